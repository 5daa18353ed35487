"""Two nodes of a cluster, each a server of its own, and a page that is a client of both.

This application starts the two servers, and starts one again that died. It passes connections to /cluster/1 and
/cluster/2 on to them, so that browsers reach them at the address that they know. With `smqrt serve --workers` worker 0
starts them, and every worker passes connections on.
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
