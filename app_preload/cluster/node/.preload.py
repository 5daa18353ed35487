"""A node of the demonstration: an ordinary application whose hub is in a cluster."""

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


def exit_with_parent():
    """Exit at the end of standard input: the system closes its other end when the parent process exits or is killed."""
    gevent_os.tp_read(sys.stdin.fileno(), 1)
    die()


smq.subscribe("self", subtopic="kill -9", onmsg=die)
dir.setfunc(serve)
gevent.spawn(exit_with_parent)
