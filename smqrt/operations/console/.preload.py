"""Web console for operators: its pages, and an SMQ hub that updates them.

`smqrt.operations.console.console` sets the name `server`, a `smqrt.operations.all_workers.AllWorkers`.
"""

import json

from smqrt import hub
from smqrt.app import HttpError, send_file
from smqrt.errors import ArgumentError
from smqrt.operations.console.console import Console
from smqrt.operations.console.live_views import MAX_REQUEST_BYTES, LiveViews
from smqrt.operations.console.views import VIEWS
from smqrt.server.javascript_client import client_scripts

PULSE = "pulse"
scripts = client_scripts()

smq = hub.create(
    permittop=lambda topic, issub, peer: issub and topic == PULSE,
    permitsubtop=lambda subtopic, peer: False,
    onpublish=lambda data, ptid, tid, subtid, peer: may_publish(data, ptid, tid),
    onclose=lambda etid, sock, peer, err: live_views.remove(etid),
    clientnames=4,
    auth=False,  # the admin listener has authenticated the client
)


def may_publish(data, ptid, tid):
    """Return whether a message is from the server, or from a page to the server."""
    return ptid == smq.gettid() or (tid == smq.gettid() and len(data) <= MAX_REQUEST_BYTES)


console = Console(server)  # noqa: F821


def make_view(name, options):
    if name not in VIEWS:
        raise ArgumentError(f"view: there is no view {name[:40]!r}")
    return VIEWS[name](console, options)


live_views = LiveViews(make_view, console.pulse, smq.publish, lambda text: smq.publish(text, PULSE))


def on_request(data, ptid, tid, subtid):
    live_views.request(ptid, data)


smq.subscribe("self", on_request, json=True)


def answer(request, relpath):
    """Handle `smq`, `smq.js` and `history.json`. Return False for other paths, where this folder's files are served."""
    if relpath == "smq":
        if request.method != "GET" or not hub.isSMQ(request):
            raise HttpError(404)
        smq.connect(request)
    elif relpath == "smq.js":
        send_file(request, "smq.js", scripts)
    elif relpath == "history.json":
        request.response.headers.set("Content-Type", "application/json")
        request.response.headers.set("Cache-Control", "no-store")
        request.response.write(json.dumps(console.history.snapshot(), separators=(",", ":")))
    else:
        return False
    return True


dir.setfunc(answer)


def onunload():
    live_views.close()
    console.close()
