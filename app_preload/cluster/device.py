"""A client of node 2 on a device, which publishes its name and prints the messages of all nodes."""

import json
import sys

import gevent

from smqrt.client import SmqClient
from smqrt.printable import printable

NAME = "Device"
smq = SmqClient(sys.argv[1] if sys.argv[1:] else "http://127.0.0.1:9357/cluster/2")


def on_message(data, ptid, tid, subtid):
    try:
        message = json.loads(data)
        print(printable(f"{message['name']}: {message['text']}"), flush=True)
    except (ValueError, TypeError, KeyError):
        pass  # any client can publish any data


smq.subscribe("say", onmsg=on_message)
smq.onclose = lambda *_: 1  # seconds until the next attempt
while True:
    smq.publish({"name": NAME}, "who")
    gevent.sleep(1)
