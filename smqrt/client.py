"""SMQ client for Python: `SmqClient`.

It works with and without monkey patching by gevent. Call a client from one operating-system thread only.

    from smqrt.client import SmqClient

    client = SmqClient("http://localhost:9357/chat/smq.lsp", onconnect=lambda etid, rnd, ip: print("connected"))
    client.subscribe("greeting", onmsg=lambda data, ptid, tid, subtid: print(data))
    client.publish("hello", "greeting")
"""

import warnings

from smqrt.clients.smq.asyncio_guard import called_by_asyncio

if called_by_asyncio():
    warnings.warn("smqrt.client is for gevent; asyncio programs import smqrt.aio instead", RuntimeWarning, stacklevel=2)

from smqrt.clients.smq.client import SmqClient
from smqrt.clients.smq.protocol import ConnectionEnd

SMQClient = SmqClient
"""The former name, for older programs."""

__all__ = ["ConnectionEnd", "SMQClient", "SmqClient"]
