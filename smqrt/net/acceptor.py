"""A listening socket that accepts when it is asked to: who is not asked leaves the connections to the kernel."""

from __future__ import annotations

import _socket
import ssl
from collections import deque
from typing import Any

from smqrt.errors import StreamError
from smqrt.net.addresses import resolve
from smqrt.net.readiness import READ, Ready, Signal, Wait
from smqrt.net.tls import HandshakeQueue

BACKLOG = 512


class Acceptor:
    """A TCP port.

    Args:
        port: 0 picks a free one.
        host: address to bind; all of the machine by default.
        ipv6: bind IPv6.
        context: for a port that speaks TLS.

    Raises:
        StreamError: "bind".
    """

    def __init__(
        self, port: int, host: str | None = None, ipv6: bool = False, context: ssl.SSLContext | None = None
    ) -> None:
        self._socket: _socket.socket | None = _bound(port, host, ipv6)
        self._ready = Ready(self._socket.fileno(), READ)
        self._shaken: deque[Any] = deque()
        self._shaken_signal = Signal()
        self._handshakes = HandshakeQueue(context, self._on_handshake) if context is not None else None

    def try_accept(self) -> Any:
        """A connection's transport, or None when there is none now.

        Raises:
            StreamError: "socketclosed", or "failed" (out of file descriptors).
        """
        sock = self._live()
        if self._shaken:
            return self._shaken.popleft()
        while True:
            try:
                fd, address = sock._accept()  # type: ignore[attr-defined]
            except BlockingIOError:
                return self._shaken.popleft() if self._shaken else None
            except ConnectionError:
                continue  # that client's trouble
            except OSError as error:
                raise StreamError("failed", error.strerror or "") from None
            client = _socket.socket(sock.family, sock.type, 0, fd)
            client.setblocking(False)
            client.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
            if self._handshakes is None:
                return client
            self._handshakes.begin(client, address)

    def acceptable(self, timeout_s: float | None = None) -> Wait:
        """Wait until `try_accept` is worth another try.

        Raises:
            StreamError: "socketclosed".
        """
        self._live()
        wait = self._ready.wait(timeout_s)
        if self._handshakes is not None:
            shaken = self._shaken_signal.wait()
            shaken.then(lambda value, error: wait.resolve())
            wait.then(lambda value, error: shaken.cancel())
        return wait

    def sockname(self) -> tuple[str, int]:
        """The bound address and port.

        Raises:
            StreamError: "socketclosed".
        """
        host, port = self._live().getsockname()[:2]
        return host, port

    def close(self) -> bool:
        """Close; who waits gets "socketclosed". False when it was closed before."""
        sock, self._socket = self._socket, None
        if sock is None:
            return False
        self._ready.close(StreamError("socketclosed"))
        if self._handshakes is not None:
            self._handshakes.close()
        while self._shaken:
            self._shaken.popleft().close()
        sock.close()
        return True

    def _on_handshake(self, transport: Any, address: tuple[Any, ...]) -> None:
        self._shaken.append(transport)
        self._shaken_signal.fire()

    def _live(self) -> _socket.socket:
        if self._socket is None:
            raise StreamError("socketclosed")
        return self._socket


def _bound(port: int, host: str | None, ipv6: bool) -> _socket.socket:
    if not 0 <= port <= 65535:
        raise StreamError("bind", f"port {port}; a port is 0 to 65535")
    family, address = resolve(host or ("::" if ipv6 else "0.0.0.0"), port, ipv6)[0]
    sock = _socket.socket(family, _socket.SOCK_STREAM)
    try:
        sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        sock.setblocking(False)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise StreamError("bind", f"{address[0]} port {port}: {error.strerror}") from None
    return sock
