"""Two nodes of a cluster, each in a separate server, and a page that is a client of both.

This application starts the two servers, and restarts a server that has exited. It forwards connections to /cluster/1
and /cluster/2 to them, so browsers need no other address. With `smqrt serve --workers`, worker 0 starts the servers,
and every worker forwards connections.
"""

from functools import partial

from nodes import Nodes
from relay import Relay

from smqrt.app import HttpError, dir, io, worker
from smqrt.hub import isSMQ

NUMBERS = ("1", "2")

nodes = Nodes(io.realpath("node"), worker.directory, NUMBERS if worker.is_first else ())
relay = Relay()


def serve(request, relpath):
    if relpath not in NUMBERS:
        return False
    if not isSMQ(request):
        raise HttpError(404, "This address speaks SMQ; the page is one level up.")
    relay.run(request, partial(nodes.port, relpath))
    return True


def onunload():
    relay.close()
    nodes.close()


dir.setfunc(serve)
