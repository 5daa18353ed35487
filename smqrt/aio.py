"""SMQ client for asyncio: `SmqClient`. It does not import gevent.

import asyncio
from smqrt.aio import SmqClient

async def main():
    async with SmqClient("http://localhost:9357/chat/smq.lsp") as smq:
        await smq.publish("hello", "say")
        async for message in smq.subscribe("say"):
            print(message.text)

asyncio.run(main())
"""

from smqrt.clients.aio.client import SmqClient
from smqrt.clients.aio.subscriptions import Message, Observation, Subscription
from smqrt.clients.smq.protocol import ConnectionEnd
from smqrt.transport.proxy_address import Proxy
from smqrt.transport.tls_contexts import ClientTls

__all__ = ["ClientTls", "ConnectionEnd", "Message", "Observation", "Proxy", "SmqClient", "Subscription"]
