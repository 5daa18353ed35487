"""The demonstration mqtt-bridge in this process, and a link to its broker that can be cut."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gevent
from gevent import socket
from gevent.server import StreamServer

from smqrt.client import SmqClient
from tests.apps.lua.lua_hub import LuaSite
from tests.conftest import REPOSITORY

FOLDER = REPOSITORY / "app_preload" / "mqtt-bridge"


class CutLink:
    """A TCP forwarder.

    Args:
        port: where it connects to.
        budget_bytes: after so many bytes of both directions, the next connection is cut; None for no cuts.
        cuts: how many connections are cut.
    """

    def __init__(self, port: int, budget_bytes: int | None = None, cuts: int = 0) -> None:
        self._port, self._budget_bytes, self._cuts = port, budget_bytes, cuts
        self.connections = 0
        self._server = StreamServer(("127.0.0.1", 0), self._serve)
        self._server.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.server_port}"

    def _serve(self, client: Any, _address: object) -> None:
        self.connections += 1
        is_cut = self.connections <= self._cuts
        try:
            broker = socket.create_connection(("127.0.0.1", self._port))
        except OSError:
            client.close()
            return
        left = [self._budget_bytes if is_cut and self._budget_bytes else 1 << 60]

        def pump(source: Any, sink: Any) -> None:
            try:
                while left[0] > 0 and (data := source.recv(min(4096, left[0]))):
                    left[0] -= len(data)
                    sink.sendall(data)
            except OSError:
                pass
            for sock in (source, sink):
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

        gevent.joinall([gevent.spawn(pump, client, broker), gevent.spawn(pump, broker, client)])
        client.close()
        broker.close()

    def close(self) -> None:
        self._server.stop(0)


class BridgeSite:
    """The application with changed rules, and SMQ clients of it.

    Args:
        folder: for the copy of the application.
        rules: Lua code of `.lua/rules.lua`; None for the file of the demonstration.
        preload: code behind that of its `.preload`.
    """

    def __init__(self, folder: Path, rules: str | None = None, preload: str = "") -> None:
        self.site = LuaSite(folder)
        copy = folder / "bridge"
        shutil.copytree(FOLDER, copy)
        if rules is not None:
            (copy / ".lua" / "rules.lua").write_text(rules)
        with (copy / ".preload").open("a") as file:
            file.write(preload)
        self._application = self.site.server.applications.load("", copy)
        assert self._application.error is None, self._application.error
        self._clients: list[SmqClient] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.site.server.port}/smq.lsp"

    def client(self, topic: str, heard: Callable[..., object], **options: Any) -> SmqClient:
        """A connected SMQ client with a subscription."""
        client = SmqClient(self.url)
        self._clients.append(client)
        assert client.wait_connected(20)
        acknowledged = gevent.event.Event()
        client.subscribe(topic, onmsg=heard, onack=lambda *_: acknowledged.set(), **options)
        assert acknowledged.wait(20)
        return client

    def unload(self) -> None:
        """End the application, and wait for the end of its MQTT connection."""
        self._application.unload()
        self.site.server.services.mqtt.shutdown()
        self.site.server.services.mqtt.wait_ended(10)

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.unload()
        self.site.close()
