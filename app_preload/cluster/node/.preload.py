"""A node of the demonstration: an application as any other, whose hub is in a cluster."""

import os
import signal
import sys

import gevent
from gevent import os as gevent_os

from smqrt import hub
from smqrt.app import dir

smq = hub.create(cluster="demonstration")


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def serve(request, relpath):
    if relpath != "smq" or not hub.isSMQ(request):
        return False
    smq.connect(request)
    return True


def end_with_starter():
    """The starter holds the other end of standard input, and so lets go of it however it ends."""
    gevent_os.tp_read(sys.stdin.fileno(), 1)
    die()


smq.subscribe("self", subtopic="kill -9", onmsg=die)
dir.setfunc(serve)
gevent.spawn(end_with_starter)
