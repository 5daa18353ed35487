"""A Flask application under /flask/, with the files of this folder in front of it."""

import flask
import pages

from smqrt.app import dir

shop = flask.Flask(__name__, template_folder=".templates")  # a dot: the server shows it to nobody
shop.secret_key = "only of a test"
shop.register_blueprint(pages.blueprint)


@shop.get("/")
def index():
    flask.session["visits"] = flask.session.get("visits", 0) + 1
    return flask.render_template("index.html", visits=flask.session["visits"], url=flask.url_for("form"))


@shop.route("/form", methods=["GET", "POST"])
def form():
    return {"fields": flask.request.form.to_dict(), "query": flask.request.args.to_dict()}


@shop.post("/upload")
def upload():
    return {name: [one.filename, len(one.read())] for name, one in flask.request.files.items()}


@shop.get("/rows")
def rows():
    return flask.Response((f"{number}\n" for number in range(5)), mimetype="text/csv")


@shop.get("/fails")
def fails():
    raise ValueError("what Flask answers itself")


@shop.get("/twice")
def twice():
    return [len(flask.request.get_data()), len(flask.request.environ["wsgi.input"].read())]


@shop.post("/twice")
def post_twice():
    return twice()


@shop.route("/ws", websocket=True)
def talk():
    sock = flask.request.environ["wsgi.websocket"]
    while (message := sock.receive()) is not None:
        sock.send(message)
    return ""


dir.mount(shop)
