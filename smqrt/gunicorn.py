"""Hubs under gunicorn: `gunicorn --worker-class smqrt.gunicorn.Worker application`.

Every worker process has hubs of its own; `hub.create(cluster="chat")` joins those of one name.
"""

from __future__ import annotations

from gunicorn.workers.ggevent import GeventPyWSGIWorker, PyWSGIHandler

from smqrt.wsgi import HandoverMixin


class GunicornHandler(HandoverMixin, PyWSGIHandler):  # type: ignore[misc]  # gunicorn has no types
    """gunicorn's handler, from which applications may take connections."""


class Worker(GeventPyWSGIWorker):  # type: ignore[misc]
    """gunicorn's worker on `gevent.pywsgi`, with that handler."""

    wsgi_handler = GunicornHandler
