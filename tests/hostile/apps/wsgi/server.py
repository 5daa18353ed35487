"""A Flask application with a hub and the meter, behind gevent.pywsgi or gunicorn: `server.py ... pywsgi|gunicorn`."""

import os
import runpy
import socket
import sys
from pathlib import Path

from flask import Flask, request

HERE = Path(__file__).parent
BACKLOG = 2048  # a crowd that the kernel turns away comes again after whole seconds
if sys.argv[-1] == "gunicorn":
    listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    os.set_inheritable(listener.fileno(), True)
    print(f"listening on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    options = "--worker-class smqrt.gunicorn.Worker --workers 1 --worker-connections 3000 --log-level warning"
    command = [sys.executable, "-m", "gunicorn", *options.split(), "--chdir", str(HERE)]
    os.execv(sys.executable, [*command, "--bind", f"fd://{listener.fileno()}", "server:app"])

app = Flask(__name__)


class _Dir:
    def setfunc(self, _function):
        pass


watch = runpy.run_path(str(HERE.parent / "watch" / ".preload.py"), {"dir": _Dir()})


@app.route("/watch/smq")
@app.route("/watch/smq", websocket=True)
def connect():
    watch["smq"].connect(request.environ)
    return ""


@app.route("/watch/held")
def held():
    return watch["held"]()


@app.route("/", methods=["GET", "POST"])
def page():
    return "hello\n"


@app.route("/body", methods=["POST"])
def body():
    size = 0
    while data := request.stream.read(16384):
        size += len(data)
    return f"{size}\n"


if __name__ == "__main__":
    from gevent.pywsgi import WSGIServer

    from smqrt.transport.tls_contexts import self_signed_pair
    from smqrt.wsgi import Handler

    cert, key = self_signed_pair("127.0.0.1")
    tls = WSGIServer(("127.0.0.1", 0), app, handler_class=Handler, log=None, certfile=cert, keyfile=key)
    tls.start()
    print(f"listening on https://127.0.0.1:{tls.server_port}", flush=True)
    server = WSGIServer(("127.0.0.1", 0), app, backlog=BACKLOG, handler_class=Handler, log=None)
    server.start()
    print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
