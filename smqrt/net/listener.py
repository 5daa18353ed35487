"""Listening sockets: a `Listener` passes connections on as they come, many per event; an `Acceptor` accepts when it is
asked to, and leaves the others to the kernel. A lack of file descriptors ends neither: it rests for a moment. How many
connections may be open is limited: in all, so that descriptors are left for files, and per address.
"""

from __future__ import annotations

import _socket
import contextlib
import errno
import logging
import resource
import socket
import ssl
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from gevent import get_hub

from smqrt.errors import StartError, StreamError
from smqrt.net.log_limits import Refusals
from smqrt.net.origins import is_loopback
from smqrt.net.readiness import READ, Ready, Signal, Wait
from smqrt.net.stream import resolve
from smqrt.net.tls import Address, HandshakeQueue, TlsTransport, Transport

RESERVE = 128
"""Descriptors that no connection gets: journals, databases, files of applications, connections to elsewhere."""
PER_ADDRESS = 2000
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 5\r\nContent-Length: 0\r\n\r\n"


class Admitted(_socket.socket):
    """An accepted connection, which is counted until it is closed."""

    __slots__ = ("_address", "_limit")
    _limit: ConnectionLimit | None

    def counted(self, limit: ConnectionLimit, address: str) -> None:
        """Be counted by `limit`."""
        self._limit, self._address = limit, address

    def close(self) -> None:
        """Close, and count no more."""
        limit = getattr(self, "_limit", None)
        if limit is not None:
            self._limit = None
            limit.left(self._address)
        super().close()

    def __del__(self) -> None:
        self.close()


class ConnectionLimit:
    """Counts the connections that strangers opened, and refuses those over a limit.

    Attributes:
        limit: connections in all; 0 for as many as there are descriptors, less `RESERVE`.
        per_address: connections of one address; 0 for no limit. Addresses of this machine have none: behind a proxy on
            it, everybody comes from there.
        refusals: counts those that were refused.
    """

    def __init__(self, limit: int = 0, per_address: int = PER_ADDRESS) -> None:
        self.limit, self.per_address = limit, per_address
        self.open = 0
        self.refusals = Refusals()
        self._by_address: dict[str, int] = {}

    def admit(self, family: int, kind: int, fd: int, address: tuple[str, *tuple[int, ...]]) -> Admitted | None:
        """The socket of a connection that was accepted; None when it was one too many, and is closed."""
        sock, host = Admitted(family, kind, 0, fd), address[0]
        sock.setblocking(False)
        over = self._over(host)
        if over:
            self._refuse(sock, host, over)
            return None
        self.open += 1
        self._by_address[host] = self._by_address.get(host, 0) + 1
        sock.counted(self, host)
        return sock

    def left(self, host: str) -> None:
        """One of its connections was closed."""
        self.open -= 1
        left = self._by_address.pop(host) - 1
        if left:
            self._by_address[host] = left

    def _over(self, host: str) -> str:
        if self.open >= (self.limit or _most()):
            return f"{self.open} connections are open; the setting max_connections, or ulimit -n, allows no more"
        if self.per_address and self._by_address.get(host, 0) >= self.per_address and not _is_own(host):
            return f"{self.per_address} connections of {host} are open; see the setting connections_per_address"
        return ""

    def _refuse(self, sock: Admitted, host: str, why: str) -> None:
        with contextlib.suppress(OSError):
            sock.send(_BUSY)  # a client of TLS sees the end only
        sock.close()
        self.refusals.add(f"refused a connection of {host}: {why}")


def _most() -> int:
    return max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVE, 16)


@lru_cache(1024)
def _is_own(host: str) -> bool:
    return is_loopback(host)


open_connections = ConnectionLimit()
"""The limit of this process: all its ports share the descriptors."""


log = logging.getLogger("smqrt")

OnAccept = Callable[[Any, Address], None]

ACCEPTS_PER_EVENT = 64  # then the others have a turn
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S = 230, 23  # just below the four minutes after which many NATs forget
PAUSE_S = 0.5  # without file descriptors
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_REASONS = {
    errno.EADDRINUSE: "the port is in use; stop the other server or choose another --port (0 picks a free one)",
    errno.EACCES: "not allowed; ports below 1024 need rights, choose another --port",
    errno.EADDRNOTAVAIL: "this machine has no such address; choose another --host",
}


class Listener:
    """Accepts connections and passes them on.

    Args:
        host: name or address to bind, also an IPv6 literal ("::1" or "[::1]").
        port: 0 picks a free one.
        on_accept: called in the Hub greenlet with a non-blocking `_socket.socket` (or, given `context`, a
            `TlsTransport` after its handshake) and the client's address. Must not block.
        context: TLS context of the server.
        backlog: connections the kernel may hold for us.
        reuse_port: let several processes listen on the same port.

    Raises:
        StartError: the address can't be bound; one sentence.
    """

    def __init__(
        self,
        host: str,
        port: int,
        on_accept: OnAccept,
        context: ssl.SSLContext | None = None,
        backlog: int = 4096,
        reuse_port: bool = False,
    ) -> None:
        self._socket = _bind(host.strip("[]"), port, backlog, reuse_port)
        self._handshakes = HandshakeQueue(context, on_accept) if context is not None else None
        self._on_accept: OnAccept = self._handshakes.begin if self._handshakes else on_accept
        self._family, self._type = self._socket.family, self._socket.type
        self._watcher = get_hub().loop.io(self._socket.fileno(), 1)
        self._pause: Any = None
        self._complained = False

    @property
    def address(self) -> tuple[str, int]:
        """Bound address and port."""
        host, port = self._socket.getsockname()[:2]
        return host, port

    def renew(self, context: ssl.SSLContext) -> None:
        """Use another TLS context from the next handshake on."""
        assert self._handshakes is not None, "a listener without TLS"
        self._handshakes.context = context

    def start(self) -> None:
        """Begin to accept."""
        self._watcher.start(self._accept)

    def stop(self) -> None:
        """Accept no more; connections wait in the kernel."""
        self._watcher.stop()
        if self._pause is not None:
            self._pause.stop()
            self._pause.close()
            self._pause = None

    def close(self) -> None:
        """Stop for good. Unfinished handshakes end."""
        self.stop()
        self._watcher.close()
        if self._handshakes:
            self._handshakes.close()
        self._socket.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_EVENT):
            try:
                fd, address = self._socket._accept()  # type: ignore[attr-defined]
            except BlockingIOError:
                return
            except OSError as error:
                self._failed(error)
                return
            self._pass_on(fd, address)

    def _pass_on(self, fd: int, address: Address) -> None:
        client = open_connections.admit(self._family, self._type, fd, address)
        if client is None:
            return
        try:
            self._on_accept(client, address)
        except OSError:
            client.close()  # gone already
        except Exception:
            log.exception("error while taking a connection from %s", address)
            client.close()

    def _failed(self, error: OSError) -> None:
        if error.errno not in EXHAUSTED:
            return  # that client's trouble (ECONNABORTED and the like); the next event goes on
        if not self._complained:
            log.error("cannot accept connections: %s; raise the limit of open files (ulimit -n)", error.strerror)
            self._complained = True
        self.stop()
        self._pause = get_hub().loop.timer(PAUSE_S)  # a new one: a timer of libev that has fired fires again at once
        self._pause.start(self.start)


def _set_inherited(sock: _socket.socket) -> None:
    """What every accepted connection has from the start: on Linux it is inherited, which saves four calls for each."""
    sock.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
    sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_KEEPALIVE, 1)
    sock.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)


def _bind(host: str, port: int, backlog: int, reuse_port: bool) -> _socket.socket:
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if not 0 <= port <= 65535:
        raise StartError(f"cannot listen on {where}: a port is 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError, OverflowError) as error:
        raise StartError(
            f"cannot listen on {where}: unknown host ({error}); give an address of this machine with --host"
        ) from None
    sock = _socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEPORT, 1)
        _set_inherited(sock)
        sock.setblocking(False)
        sock.bind(address)
        sock.listen(backlog)
    except (OSError, OverflowError) as error:
        sock.close()
        hint = _REASONS.get(getattr(error, "errno", None) or 0, str(error))
        raise StartError(f"cannot listen on {where}: {hint}") from None
    return sock


# ---- when asked

BACKLOG = 4096  # a client beyond these isn't refused: its system tries again after 1, 3, 7, 15, 31 s


class Acceptor:
    """A TCP port that accepts when it is asked to.

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
        self._shaken: deque[TlsTransport] = deque()
        self._shaken_signal = Signal()
        self._handshakes = HandshakeQueue(context, self._on_handshake) if context is not None else None

    def try_accept(self) -> Transport | None:
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
            client = open_connections.admit(sock.family, sock.type, fd, address)
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

    def _on_handshake(self, transport: TlsTransport, address: Address) -> None:
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
