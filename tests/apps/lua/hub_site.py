"""A hub made by a Lua `.preload`, which clients reach as they reach a `tests.support.device.Site`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gevent.ssl import SSLContext

from smqrt.apps.lua.api import smq_hub
from smqrt.transport.listener import Listener
from tests.apps.lua.app_server import AppServer
from tests.support.device import RAW, TLS, WSS, Authority, Device, leftovers
from tests.support.pki import server_context
from tests.support.waiting import wait_until

PRELOAD = """
smq = require"smq.hub".create()
local hub = smq
dir:setfunc(function(_ENV) hub:connect(request) return true end)
"""


class LuaHubSite:
    """An application that connects every request to its hub, plain and over TLS.

    Args:
        folder: where the application's folder is made.
        authority: signs the server's certificate.
        more: Lua behind the making of `smq`.

    Attributes:
        server: the HTTP server.
    """

    def __init__(self, folder: Path, authority: Authority, more: str = "") -> None:
        self._apps = AppServer(folder)
        self._half = smq_hub.install(self._apps.vm, self._apps.services, self._apps.applications.exchanges)
        application = self._apps.app({".preload": PRELOAD + more})
        assert application.error is None, application.error
        self.server = self._apps.server
        context = server_context(*authority.pair("server"), authority.path)
        self._tls = Listener("127.0.0.1", 0, self.server.accepted_secure, context)
        self._tls.start()
        self._devices: list[Device] = []

    @property
    def state(self) -> Any:
        """The hub's state."""
        return next(iter(self._half._brokers.values())).broker

    def address(self, secure: bool = False) -> tuple[str, int]:
        return self._tls.address if secure else ("127.0.0.1", self._apps.port)

    def open(self, kind: str = RAW, context: SSLContext | None = None) -> Device:
        """A connection on which nothing was said yet."""
        self._devices.append(Device(self.address(kind in (TLS, WSS)), kind, context))
        return self._devices[-1]

    def device(self, uid: bytes = b"device", kind: str = RAW, **more: Any) -> Device:
        """A connected client."""
        return self.open(kind).start().connect(uid, **more)

    def close_devices(self) -> None:
        for device in self._devices:
            device.close()
        self._devices.clear()

    def close(self) -> None:
        self.close_devices()
        self.state.shutdown()
        wait_until(lambda: not leftovers(self.state), "everything of the clients is gone")
        self._tls.close()
        self._apps.close()


@pytest.fixture
def lua_site(tmp_path: Path, authority: Authority) -> Iterator[LuaHubSite]:
    """A hub made in Lua, without callbacks."""
    site = LuaHubSite(tmp_path, authority)
    yield site
    site.close()


@pytest.fixture(params=["site", "lua_site"], ids=["python", "lua"])
def both(request: pytest.FixtureRequest) -> Any:
    """A hub made in Python, and one made in Lua."""
    return request.getfixturevalue(request.param)
