"""A real HTTP server in this process and a client that says exactly what a test wants said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gevent
from gevent import socket

from smqrt.http.body import HttpLimits
from smqrt.http.message import Request
from smqrt.http.server import HttpServer
from smqrt.http.tree import Directory, Root
from smqrt.transport.listener import Listener

PATIENCE_S = 3.0


@dataclass
class Answer:
    """A response off the wire; `fields` by lower-case name, the last one of a name."""

    status: int
    fields: dict[str, str]
    body: bytes
    head: bytes = field(repr=False, default=b"")


class Wire:
    """A connection, byte by byte."""

    def __init__(self, address: tuple[str, int], wrap: Callable[[Any], Any] | None = None) -> None:
        self.sock: Any = socket.create_connection(address, timeout=PATIENCE_S)
        if wrap:
            self.sock = wrap(self.sock)
        self.data = b""

    def send(self, data: bytes) -> Wire:
        self.sock.sendall(data)
        return self

    def more(self) -> bool:
        """Read what is there; False at the end of the stream."""
        data = self.sock.recv(65536)
        self.data += data
        return bool(data)

    def answer(self, method: str = "GET") -> Answer:
        """Read one response."""
        while b"\r\n\r\n" not in self.data:
            assert self.more(), f"the connection ended within a head: {self.data!r}"
        head, _, self.data = self.data.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        status = int(lines[0].split(" ")[1])
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        assert not ("content-length" in fields and "transfer-encoding" in fields), lines
        return Answer(status, fields, self._body(method, status, fields), head)

    def ask(self, target: str = "/", method: str = "GET", headers: str = "") -> Answer:
        """Send a plain request and read its response."""
        self.send(f"{method} {target} HTTP/1.1\r\nHost: test\r\n{headers}\r\n".encode("latin-1"))
        return self.answer(method)

    def ended(self) -> bool:
        """Whether the server ends the connection without another byte."""
        try:
            return not self.data and not self.more()
        except ConnectionError:
            return True

    def close(self) -> None:
        self.sock.close()

    def _body(self, method: str, status: int, fields: dict[str, str]) -> bytes:
        if method == "HEAD" or status in (204, 304) or status < 200:
            return b""
        if "chunked" in fields.get("transfer-encoding", ""):
            return self._chunked()
        if "content-length" in fields:
            return self._take(int(fields["content-length"]))
        while self.more():
            pass
        return self._take(len(self.data))

    def _take(self, size: int) -> bytes:
        while len(self.data) < size:
            assert self.more(), "the connection ended within a body"
        taken, self.data = self.data[:size], self.data[size:]
        return taken

    def _chunked(self) -> bytes:
        body = b""
        while True:
            while b"\r\n" not in self.data:
                assert self.more(), "the connection ended within a chunk"
            line, _, self.data = self.data.partition(b"\r\n")
            piece = self._take(int(line, 16) + 2)
            if not int(line, 16):
                return body
            body += piece[:-2]


class Bench:
    """A server on a free port with an empty tree."""

    def __init__(self, limits: HttpLimits | None = None) -> None:
        self.root = Root()
        self.server = HttpServer(self.root, limits)
        self.listener = Listener("127.0.0.1", 0, self.server.accepted)
        self.listener.start()
        self.wires: list[Wire] = []

    def connect(self) -> Wire:
        self.wires.append(Wire(self.listener.address))
        return self.wires[-1]

    def handle(self, func: Callable[[Request, str], object], name: str | None = None, priority: int = 0) -> Directory:
        """Insert a directory that answers by calling `func`."""
        directory = Directory(name, priority)
        directory.func = func
        self.root.insert(directory)
        return directory

    def close(self) -> None:
        for wire in self.wires:
            wire.close()
        self.listener.close()
        self.server.close()
        gevent.sleep(0)


HOST = b"Host: test\r\n"


def echo(request: Request, relpath: str) -> None:
    request.response.write(relpath.encode() + b"|" + request.body())


def get(path: str = "/", more: bytes = b"", version: bytes = b"1.1") -> bytes:
    return b"GET " + path.encode() + b" HTTP/" + version + b"\r\n" + HOST + more + b"\r\n"


class Kept:
    """Answers, and keeps what it read of each request, which is empty once it is over."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.bodies: list[bytes] = []

    def __call__(self, request: Any, relpath: str) -> None:
        self.requests.append(request)
        self.bodies.append(request.body())
        request.response.write(b"seen")
