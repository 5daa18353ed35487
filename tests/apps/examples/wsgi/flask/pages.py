"""More of the application, in a module beside `.preload.py`."""

import flask

blueprint = flask.Blueprint("more", __name__, url_prefix="/more")


@blueprint.get("/")
def more():
    return f"more at {flask.url_for('more.more')}"
