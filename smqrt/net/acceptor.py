"""A listening socket that accepts when it is asked to: who is not asked leaves the connections to the kernel.

A lack of file descriptors doesn't end it: it rests for a moment, and the connections wait in the kernel.
"""

from __future__ import annotations

import _socket
import logging
import ssl
from collections import deque
from typing import Any

from gevent import get_hub

from smqrt.errors import StreamError
from smqrt.net.addresses import resolve
from smqrt.net.gate import connections
from smqrt.net.listener import EXHAUSTED, PAUSE_S
from smqrt.net.readiness import READ, Ready, Signal, Wait
from smqrt.net.tls import HandshakeQueue

log = logging.getLogger("smqrt")

BACKLOG = 4096  # a client beyond these isn't refused: its system tries again after 1, 3, 7, 15, 31 s


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
        self._rest = _Rest()
        self._shaken: deque[Any] = deque()
        self._shaken_signal = Signal()
        self._handshakes = HandshakeQueue(context, self._on_handshake) if context is not None else None

    def try_accept(self) -> Any:
        """A connection's transport, or None when there is none now.

        Raises:
            StreamError: "socketclosed".
        """
        sock = self._live()
        while not self._shaken and not self._rest.lasts:
            try:
                fd, address = sock._accept()  # type: ignore[attr-defined]
            except BlockingIOError:
                break
            except ConnectionError:
                continue  # that client's trouble
            except OSError as error:
                self._failed(error)
                break
            client = connections.admit(sock.family, sock.type, fd, address)
            if client is None:
                continue
            client.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
            if self._handshakes is None:
                return client
            self._handshakes.begin(client, address)
            if self._handshakes.share.spent():
                break  # the others wait in the kernel
        return self._shaken.popleft() if self._shaken else None

    def _failed(self, error: OSError) -> None:
        if error.errno not in EXHAUSTED:
            return  # that client's trouble as well
        if not self._rest.begun:
            log.error("cannot accept connections: %s; raise the limit of open files (ulimit -n)", error.strerror)
        self._rest.begin()

    def acceptable(self, timeout_s: float | None = None) -> Wait:
        """Wait until `try_accept` is worth another try.

        Raises:
            StreamError: "socketclosed".
        """
        self._live()
        wait = (self._rest if self._rest.lasts else self._ready).wait(timeout_s)
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
        for signal in (self._ready, self._rest):
            signal.close(StreamError("socketclosed"))
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


class _Rest(Signal):
    """Fires when it is over. A descriptor that is ready would wake us at once, and in vain.

    Attributes:
        begun: whether there ever was one.
    """

    __slots__ = ("_timer", "begun")

    def __init__(self) -> None:
        super().__init__()
        self._timer: Any = None
        self.begun = False

    @property
    def lasts(self) -> bool:
        """Whether it goes on."""
        return self._timer is not None

    def begin(self) -> None:
        """Rest for `PAUSE_S`."""
        self.begun = True
        self._timer = get_hub().loop.timer(PAUSE_S)
        self._timer.start(self._over)

    def close(self, error: BaseException) -> None:
        """End it for good; who waits is rejected with `error`."""
        self._stop()
        self.fail(error)

    def _over(self) -> None:
        self._stop()
        self.fire()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.stop()
            self._timer.close()
            self._timer = None


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
