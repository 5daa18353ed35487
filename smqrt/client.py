"""The Python SMQ client. Works with and without gevent's monkey patching; all calls belong to one OS thread.

from smqrt.client import SmqClient

client = SmqClient("http://localhost:9357/chat/smq.lsp", onconnect=lambda etid, rnd, ip: print("connected"))
client.subscribe("greeting", onmsg=lambda data, ptid, tid, subtid: print(data))
client.publish("hello", "greeting")
"""

from smqrt.clients.smq.client import SmqClient
from smqrt.clients.smq.protocol import ConnectionEnd

SMQClient = SmqClient
"""The spelling of older programs."""

__all__ = ["ConnectionEnd", "SMQClient", "SmqClient"]
