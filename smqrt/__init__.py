"""smqrt: an SMQ broker and Lua application server on gevent.

    from smqrt import hub            # brokers: hub.create(), smq.connect(request), smq.publish(...)
    from smqrt import client         # client.SmqClient("ws://host/smq.lsp"), for gevent and plain programs
    from smqrt import aio            # aio.SmqClient("ws://host/smq.lsp"), for asyncio
    from smqrt import mqttc          # MQTT 5: mqttc.create("host", onstatus, onpub)
    from smqrt import mqtt3c         # MQTT 3.1.1: mqtt3c.connect("host", onpub)

Each module is imported on first use: `import smqrt` alone starts nothing.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from smqrt import former_modules

__version__ = "1.0.0rc1"
__all__ = ["__version__", "aio", "client", "hub", "mqtt3c", "mqttc"]


former_modules.install()


def __getattr__(name: str) -> ModuleType:
    if name in ("aio", "client", "hub", "mqtt3c", "mqttc"):
        return import_module(f"smqrt.{name}")
    raise AttributeError(f"module 'smqrt' has no attribute {name!r}")
