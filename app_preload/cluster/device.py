"""A client of node 2 on a device: it says who it is, and prints what is said at any node."""

import json
import sys

import gevent

from smqrt.client import SmqClient
from smqrt.printable import printable

NAME = "Device"
smq = SmqClient(sys.argv[1] if sys.argv[1:] else "http://127.0.0.1:9357/cluster/2")


def heard(data, ptid, tid, subtid):
    try:
        said = json.loads(data)
        print(printable(f"{said['name']}: {said['text']}"), flush=True)
    except (ValueError, TypeError, KeyError):
        pass  # anybody may publish anything


smq.subscribe("say", onmsg=heard)
smq.onclose = lambda *_: 1  # seconds until the next attempt
while True:
    smq.publish({"name": NAME}, "who")
    gevent.sleep(1)
