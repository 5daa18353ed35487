"""Hubs in gunicorn: `gunicorn --worker-class smqrt.gunicorn.Worker application`.

Each worker process has its own hubs; `hub.create(cluster="chat")` joins the hubs with the same cluster name.
"""

from __future__ import annotations

from gunicorn.workers.ggevent import GeventPyWSGIWorker, PyWSGIHandler

from smqrt.wsgi import HandoverMixin


class GunicornHandler(HandoverMixin, PyWSGIHandler):  # type: ignore[misc]  # gunicorn has no types
    """gunicorn's handler; hubs can take over its connections."""


class Worker(GeventPyWSGIWorker):  # type: ignore[misc]
    """gunicorn's `gevent.pywsgi` worker with `GunicornHandler`."""

    wsgi_handler = GunicornHandler
