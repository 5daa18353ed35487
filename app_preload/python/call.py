"""Call a function of the server from a device: call.py URL NAME [ARGUMENT]..., arguments in JSON."""

import json
import sys

from gevent.event import AsyncResult

from smqrt.client import SmqClient

url, name, *arguments = sys.argv[1:]
answer = AsyncResult()
with SmqClient(url) as smq:
    smq.subscribe("self", datatype="json", onmsg=lambda reply, *_: answer.set(reply))
    smq.publish({"id": 1, "name": name, "arguments": [json.loads(text) for text in arguments]}, 1)
    reply = answer.get(timeout=10) or {}
print(reply.get("error") or json.dumps(reply.get("value")))
