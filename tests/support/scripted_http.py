"""An HTTP server that follows a script: it answers with exactly the bytes it is told, and remembers what it got."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Any

import gevent
from gevent import socket
from gevent.server import StreamServer

CLOSE = None
Step = bytes | float | Callable[[Any], None] | None


class ScriptedHttp:
    """A server on a free port.

    Args:
        answers: one per connection, or one for all: steps for each request on it, one list a request. A step is
            bytes to send, seconds to wait, a function of the socket, or CLOSE.

    Attributes:
        heads: the heads of the requests; bodies: what came behind them, as far as Content-Length tells.
        connections: how many were made.
        answered: how many answers were given to the last step.
    """

    def __init__(self, *answers: list[list[Step]], context: ssl.SSLContext | None = None) -> None:
        self.answers = list(answers)
        self.heads: list[str] = []
        self.bodies: list[bytes] = []
        self.connections = self.answered = 0
        options = {"ssl_context": context} if context else {}
        self._server = StreamServer(("127.0.0.1", 0), self._serve, **options)
        self._server.start()

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._server.stop(0)

    def __enter__(self) -> ScriptedHttp:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, client: Any, _address: Any) -> None:
        requests = self.answers[min(self.connections, len(self.answers) - 1)]
        self.connections += 1
        for steps in requests:
            if not self._read(client):
                return
            for step in steps:
                if step is CLOSE:
                    client.close()
                    self.answered += 1
                    return
                self._do(client, step)
            self.answered += 1
        self._read(client)  # until the client closes

    def _do(self, client: Any, step: Any) -> None:
        try:
            if isinstance(step, bytes):
                client.sendall(step)
            elif callable(step):
                step(client)
            else:
                gevent.sleep(step)
        except OSError:
            pass  # the client went away

    def _read(self, client: Any) -> bool:
        data = b""
        try:
            while b"\r\n\r\n" not in data:
                more = client.recv(65536)
                if not more:
                    return False
                data += more
            head, _, body = data.partition(b"\r\n\r\n")
            self.heads.append(head.decode("latin-1"))
            while not self._is_whole(head.lower(), body):
                body += client.recv(65536)
        except OSError:
            return False
        self.bodies.append(body)
        return True

    def _is_whole(self, head: bytes, body: bytes) -> bool:
        if b"transfer-encoding: chunked" in head:
            return body.endswith(b"0\r\n\r\n")
        size = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
        return len(body) >= int(size or 0)


def answer(body: bytes = b"", status: str = "200 OK", *fields: str) -> list[Step]:
    """The steps of a plain answer."""
    lines = "".join(f"{field}\r\n" for field in fields)
    return [f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{lines}\r\n".encode() + body]


def reset(client: Any) -> None:
    """A step: the connection is reset."""
    import struct

    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
