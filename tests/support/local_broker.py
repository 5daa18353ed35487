"""A real broker behind the real HTTP server, in the process of the test."""

from __future__ import annotations

from typing import Any

from smqrt import hub
from smqrt.http.message import Request
from smqrt.http.server import HttpServer
from smqrt.http.tree import Directory, Root
from smqrt.transport.listener import Listener


class LocalBroker:
    """A broker at `/smq.lsp` behind the real HTTP server; anything else is 404.

    Attributes:
        smq: the broker's own API.
    """

    def __init__(self, port: int = 0, host: str = "127.0.0.1", context: Any = None, **options: Any) -> None:
        self.smq = hub.create(**options)
        directory = Directory()
        directory.func = self._connect
        root = Root()
        root.insert(directory)
        self._http = HttpServer(root)
        accepted = self._http.accepted_secure if context else self._http.accepted
        self._listener = Listener(host, port, accepted, context)
        self._listener.start()
        self.port = self._listener.address[1]
        self._host = host
        self._secure = context is not None

    def _connect(self, request: Request, relpath: str) -> bool:
        if relpath != "smq.lsp":
            return False
        self.smq.connect(request)
        return True

    @property
    def url(self) -> str:
        return f"http{'s' if self._secure else ''}://{self._host}:{self.port}/smq.lsp"

    @property
    def ws_url(self) -> str:
        return "ws" + self.url.removeprefix("http")

    def close(self) -> None:
        """End like a server that is killed: sockets close without a word."""
        self._listener.close()
        self.smq.shutdown()
        self._http.close()
