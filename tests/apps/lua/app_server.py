"""A real server in this process with applications made on the spot."""

from __future__ import annotations

from http.client import HTTPConnection, HTTPMessage
from pathlib import Path

from gevent import socket

from smqrt.apps.lua import api
from smqrt.apps.lua.applications import Application, Applications
from smqrt.apps.lua.vm import Services, Vm
from smqrt.http.access import Access
from smqrt.http.disk import DiskIo
from smqrt.http.logins import Logins
from smqrt.http.resources import server_io
from smqrt.http.server import HttpServer
from smqrt.http.tree import Root
from smqrt.transport.listener import Listener

Files = dict[str, str | bytes]


class Answer:
    """A response: `status`, `headers` (case-insensitive), `body`, `text`."""

    def __init__(self, status: int, headers: HTTPMessage, body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "surrogateescape")


class AppServer:
    """A server on a free port.

    Args:
        folder: where the applications' folders are made.
        logins: who is logged in.
    """

    def __init__(self, folder: Path, logins: Logins | None = None) -> None:
        self.folder = folder
        self.vm = Vm()
        self.root = Root()
        self.stops: list[int] = []
        ios = {"disk": DiskIo("/"), "home": DiskIo(folder), "vm": server_io()}
        self.services = Services(root=self.root, ios=ios, argv=["serve", "-x"], stop=self.stops.append)
        self.services.logins = logins or self.services.logins
        api.install(self.vm, self.services)
        self.applications = Applications(self.vm, self.services)
        server = HttpServer(self.root, access=Access(debug=True), logins=self.services.logins)
        self.server = self.services.http_server = server
        self.listener = Listener("127.0.0.1", 0, self.server.accepted)
        self.listener.start()
        self.services.http_port = self.port

    @property
    def port(self) -> int:
        return self.listener.address[1]

    def write(self, name: str, files: Files) -> Path:
        """Put files into the folder of an application."""
        for file, content in files.items():
            path = self.folder / (name or "root") / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return self.folder / (name or "root")

    def app(self, files: Files, name: str = "") -> Application:
        """Make an application of these files and load it."""
        return self.applications.load(name, self.write(name, files))

    def page(self, source: str, **request: object) -> Answer:
        """The answer of a page with this text."""
        self.write("", {"page.lsp": source})
        if all(child.name for child in self.root.children):
            self.app({})
        return self.ask("/page.lsp", **request)  # type: ignore[arg-type]

    def ask(
        self,
        target: str = "/",
        method: str = "GET",
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        upgrades: bool = False,
        source: str = "127.0.0.1",
    ) -> Answer:
        """Send a request on a connection of its own; `upgrades`: a 101 has no body to wait for; `source`: the client's
        address."""
        client = HTTPConnection("127.0.0.1", self.port)
        client.sock = socket.create_connection(("127.0.0.1", self.port), timeout=5, source_address=(source, 0))
        try:
            client.request(method, target, body, headers or {})
            response = client.getresponse()
            body = b"" if upgrades and response.status == 101 else response.read()
            return Answer(response.status, response.headers, body)
        finally:
            client.close()

    def close(self) -> None:
        self.listener.close()
        self.server.close()
        self.vm.stop()
