"""A small SOCKS5 proxy and a small HTTP CONNECT proxy for the tests, with and without credentials."""

from __future__ import annotations

import base64
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import gevent
from gevent import socket
from gevent.server import StreamServer

SUCCEEDED, REFUSED = 0, 5


class TestProxy:
    """A proxy on a free port.

    Args:
        user, password: what it wants to know; nothing by default.

    Attributes:
        seen: "host:port" of every tunnel that was asked for.
        reply: SOCKS reply code, or HTTP status, to answer with instead of connecting.
    """

    __test__ = False

    def __init__(self, user: str | None = None, password: str | None = None) -> None:
        self.user, self.password = user, password
        self.seen: list[str] = []
        self.reply: int | None = None
        self._server = StreamServer(("127.0.0.1", 0), self._serve)
        self._server.start()

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def close(self) -> None:
        self._server.stop(0)

    def __enter__(self) -> TestProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, client: Any, _address: Any) -> None:
        try:
            remote = self.negotiate(client)
        except (OSError, EOFError):
            remote = None
        if remote is None:
            client.close()
            return
        pumps = [gevent.spawn(_pump, client, remote), gevent.spawn(_pump, remote, client)]
        gevent.joinall(pumps)

    def negotiate(self, client: Any) -> Any:
        """Do what comes before the tunnel; returns the connection to the target."""
        raise AssertionError

    def connect(self, host: str, port: int) -> Any:
        self.seen.append(f"{host}:{port}")
        return socket.create_connection((host, port), timeout=5)


class SocksProxy(TestProxy):
    """SOCKS5."""

    def negotiate(self, client: Any) -> Any:
        _, count = _exactly(client, 2)
        method = 2 if self.user is not None else 0
        if method not in _exactly(client, count):
            client.sendall(b"\5\xff")
            return None
        client.sendall(bytes((5, method)))
        if method == 2 and not self._check(client):
            return None
        host, port = self._target(client)
        code = self.reply
        remote = None
        if code is None:
            try:
                remote, code = self.connect(host, port), SUCCEEDED
            except OSError:
                code = REFUSED
        client.sendall(bytes((5, code, 0, 1, 127, 0, 0, 1, 0, 1)))
        return remote

    def _check(self, client: Any) -> bool:
        _, size = _exactly(client, 2)
        user = _exactly(client, size)
        password = _exactly(client, _exactly(client, 1)[0])
        good = (user.decode(), password.decode()) == (self.user, self.password)
        client.sendall(bytes((1, 0 if good else 1)))
        return good

    def _target(self, client: Any) -> tuple[str, int]:
        kind = _exactly(client, 4)[3]
        if kind == 3:
            host = _exactly(client, _exactly(client, 1)[0]).decode()
        else:
            packed = _exactly(client, 4 if kind == 1 else 16)
            host = socket.inet_ntop(socket.AF_INET if kind == 1 else socket.AF_INET6, packed)
        return host, int.from_bytes(_exactly(client, 2), "big")


class ConnectProxy(TestProxy):
    """HTTP CONNECT; requests with an absolute URL are forwarded.

    Attributes:
        tail: sent right behind the head of the answer, in the same segment.
    """

    tail = b""

    def negotiate(self, client: Any) -> Any:
        head = b""
        while b"\r\n\r\n" not in head:
            data = client.recv(4096)
            if not data:
                return None
            head += data
        method, target, _ = head.split(b"\r\n")[0].decode().split()
        if self.user is not None and self._wanted() not in head:
            client.sendall(b"HTTP/1.1 407 Who are you\r\nContent-Length: 0\r\n\r\n")
            return None
        if self.reply is not None:
            client.sendall(f"HTTP/1.1 {self.reply} No\r\nContent-Length: 0\r\n\r\n".encode())
            return None
        if method != "CONNECT":
            return self._forward(head, target)
        host, _, port = target.rpartition(":")
        remote = self.connect(host.strip("[]"), int(port))
        client.sendall(b"HTTP/1.1 200 Established\r\nVia: test\r\n\r\n" + self.tail)
        return remote

    def _forward(self, head: bytes, target: str) -> Any:
        url = urlsplit(target)
        remote = self.connect(url.hostname or "", url.port or 80)
        origin = target[: len(target) - len(urlunsplit(("", "", url.path, url.query, "")))]
        remote.sendall(head.replace(origin.encode(), b"", 1))
        return remote

    def _wanted(self) -> bytes:
        secret = base64.b64encode(f"{self.user}:{self.password}".encode())
        return b"Proxy-Authorization: Basic " + secret + b"\r\n"


def _exactly(client: Any, size_bytes: int) -> bytes:
    data = b""
    while len(data) < size_bytes:
        more = client.recv(size_bytes - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _pump(source: Any, sink: Any) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        source.close()
        sink.close()
