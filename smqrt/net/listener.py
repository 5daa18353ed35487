"""Listening sockets: many accepts per event, never stopped by a lack of file descriptors."""

from __future__ import annotations

import _socket
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

from gevent import get_hub

from smqrt.errors import StartError
from smqrt.net.gate import connections
from smqrt.net.tls import HandshakeQueue

log = logging.getLogger("smqrt")

OnAccept = Callable[[Any, tuple[Any, ...]], None]

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

    def _pass_on(self, fd: int, address: tuple[Any, ...]) -> None:
        client = connections.admit(self._family, self._type, fd, address)
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
