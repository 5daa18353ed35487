"""Listening sockets: `Listener` for servers, `Acceptor` for applications.

A `Listener` accepts many connections per event and passes them on. An `Acceptor` accepts one per call and leaves the
others in the kernel's queue. Both pause when the process has no free file descriptors.
"""

from __future__ import annotations

import _socket
import contextlib
import errno
import itertools
import logging
import os
import socket
import ssl
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from gevent import get_hub

from smqrt.errors import StartError, StreamError
from smqrt.loop.scheduling import READ, TURN_S, Ready, Signal, Wait
from smqrt.transport.admission import (
    BUSY,
    LISTENER_CONNECTIONS,
    Balance,
    ListenerCounts,
    ProxyHeaders,
    TrustedNetworks,
    open_connections,
)
from smqrt.transport.stream import resolve
from smqrt.transport.tls import HANDSHAKE_S, Address, HandshakeQueue, TlsTransport, Transport
from smqrt.transport.unix_sockets import DEFAULT_MODE, UNIX_ADDRESS, SocketFile, is_unix_path, listening_socket
from smqrt.workers.worker_rpc import worker_place

# ---- Listening sockets inherited from another process, by the host and port that were requested.

RequestedAddress = tuple[str, int]
"""Host and port as requested. Several listeners may request port 0; they get their sockets in the same order.
Of a Unix socket, its path and 0."""


class InheritedSockets:
    """Inherited listening sockets that are not used by a listener yet.

    Attributes:
        kept_files: the paths of Unix sockets whose files this server does not remove: systemd has opened the sockets.
    """

    def __init__(self) -> None:
        self._fds: defaultdict[RequestedAddress, deque[list[int]]] = defaultdict(deque)
        self.kept_files: set[str] = set()

    def add(self, requested: RequestedAddress, fds: list[int]) -> None:
        """Store the descriptors of a port's sockets."""
        self._fds[requested].append(fds)

    def take(self, host: str, port: int) -> list[_socket.socket]:
        """Remove and return the sockets of the next port for a host and port; empty when there are none."""
        ports = self._fds.get((host, port))
        sockets = [_socket.socket(-1, -1, -1, fd) for fd in ports.popleft()] if ports else []
        for one in sockets:
            one.setblocking(False)
        return sockets

    def close(self) -> None:
        """Close the sockets that no listener has requested, and remove the files of Unix sockets."""
        for (host, _), ports in self._fds.items():
            is_own = is_unix_path(host) and host not in self.kept_files
            if ports and is_own and worker_place().count == 1:  # else the supervisor removes it
                SocketFile(host).remove()
            for fd in itertools.chain.from_iterable(ports):
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._fds.clear()


inherited = InheritedSockets()
"""The inherited sockets of this process."""


log = logging.getLogger("smqrt")

OnAccept = Callable[[Any, Address], None]

_NEXT_TURN_S = 1e-6  # a timer, so that the loop polls sockets in between
_MAX_REJECTED, _READ_BYTES = 8192, 16384  # connections of one socket's queue; unread data of a rejected one
_QUEUED_AT = 24  # offset of tcpi_unacked in linux/tcp.h: of a listening socket, the length of its queue
ACCEPTS_AT_ONCE = 16  # between two reads of the clock
_MANY = ACCEPTS_AT_ONCE + 1  # connections in the queue of a Unix socket, whose length the kernel does not report
ACCEPT_S = 0.008
"""Time for accepting in a turn of the loop: about two thousand connections. While many clients connect, a turn takes
20 ms, so the kernel's queue of ten thousand clients that connect within 0.15 s does not overflow."""
MAX_KERNEL_QUEUE, MAX_SOCKETS = 16384, 4
"""Ten thousand clients can reconnect within 0.15 s. The kernel queues at most net.core.somaxconn connections for a
socket, 4096 by default; the others retry after whole seconds. Therefore a port has several sockets."""
MAX_BACKLOG = 65535
MAX_ACCEPTED = 16384
"""Accepted connections that wait to be passed on."""
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S = 230, 23  # just below four minutes, the idle timeout of many NATs
PAUSE_S = 0.5  # when file descriptors are exhausted
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_EXHAUSTED_LINE = "cannot accept connections: %s; raise the limit of open files (ulimit -n)"
_REASONS = {
    errno.EADDRINUSE: "the port is in use; stop the other server or choose another --port (0 picks a free one)",
    errno.EACCES: "permission denied; ports below 1024 need privileges, choose another --port",
    errno.EADDRNOTAVAIL: "this machine has no such address; choose another --host",
}


class Listener:
    """Accepts connections and passes them on.

    Args:
        host: name or address to bind, or an IPv6 literal ("::1" or "[::1]"); or the absolute path of a Unix socket.
        port: 0 picks a free one; 0 for a Unix socket.
        on_accept: called in the loop greenlet with a non-blocking `_socket.socket` (with `context`, a `TlsTransport`
            after its handshake) and the client's address. Must not block.
        context: TLS context of the server.
        backlog: size of the kernel's queue for a socket; the kernel caps it at net.core.somaxconn.
        sockets: number of sockets of the port, each with its own queue.
        handshake_s: timeout of a TLS handshake.
        given: existing listening sockets, used in place of new ones.
        mode: permissions of the file of a Unix socket, in octal digits.

    Attributes:
        is_unix: whether it listens on a Unix socket.
        has_foreign_file: whether the file of the Unix socket is never removed here: it belongs to systemd, or to the
            supervisor.
        keeps_file: whether `close` keeps the file of the Unix socket, because it belongs to another process: the
            supervisor of this worker, or during a hot restart the process that serves.
        name: name of the listener in settings.
        max_connections: maximum of open connections; 0 for the limit of the process only.
        requested: host and port as requested.
        leaves_queue: whether `reject_queued` leaves the kernel's queue to the next process with these sockets.
        accepts_one_at_a_time: whether to accept one connection per event, because other processes accept at the same
            socket.
        balance: distributes connections over the workers of the server; None without other workers.

    Raises:
        StartError: the address cannot be bound; one sentence.
    """

    def __init__(
        self,
        host: str,
        port: int,
        on_accept: OnAccept,
        context: ssl.SSLContext | None = None,
        backlog: int = MAX_BACKLOG,
        sockets: int = 1,
        handshake_s: float = HANDSHAKE_S,
        given: Sequence[_socket.socket] = (),
        mode: str = DEFAULT_MODE,
    ) -> None:
        self.requested, self.is_unix = (host, port), is_unix_path(host)
        self.leaves_queue, self.accepts_one_at_a_time = bool(given), False
        existing = list(given) or inherited.take(host, port)
        if existing:
            self._sockets = existing
        else:
            new = listening_socket(host, mode, backlog) if self.is_unix else None
            self._sockets = [new] if new else listening_sockets(host, port, sockets, backlog)
        self.has_foreign_file = self.is_unix and (bool(given) or host in inherited.kept_files)
        self._file = SocketFile(host) if self.is_unix and not self.has_foreign_file else None
        self.keeps_file = bool(existing)  # until `start`: before it, another process of a hot restart serves
        for one in () if self.is_unix else existing:
            _set_connection_options(one)
        open_listeners.append(self)
        self._handshakes = HandshakeQueue(context, on_accept, handshake_s) if context is not None else None
        self.counts = ListenerCounts()
        self.name, self.max_connections = "a listener", 0
        self.balance: Balance | None = None
        self._on_accept: OnAccept = self._handshakes.begin if self._handshakes else on_accept
        self._proxy_headers: ProxyHeaders | None = None
        self._family, self._type = self._sockets[0].family, self._sockets[0].type
        self._watchers = _watchers(self._sockets)
        self._other_sockets: list[_socket.socket] = []
        self._other_watchers: list[Any] = []
        self._is_accepting = False
        self._turn_s = self._until_s = 0.0
        self._pause: Any = None
        self._has_logged_exhaustion = False
        self._accepted: deque[tuple[int, Address] | tuple[int, Address, bool]] = deque()
        self._next_turn: Any = get_hub().loop.timer(_NEXT_TURN_S)

    @property
    def handshake_s(self) -> float:
        """The timeout of a TLS handshake, in seconds."""
        return self._handshakes.timeout_s if self._handshakes else HANDSHAKE_S

    @handshake_s.setter
    def handshake_s(self, value: float) -> None:
        if self._handshakes:
            self._handshakes.timeout_s = value

    @property
    def max_handshakes(self) -> int:
        """The maximum of unfinished TLS handshakes; a new one closes the oldest. 0 for no limit."""
        return self._handshakes.max_unfinished if self._handshakes else 0

    @max_handshakes.setter
    def max_handshakes(self, value: int) -> None:
        if self._handshakes:
            self._handshakes.max_unfinished = value

    @property
    def handshake_counts(self) -> dict[str, object]:
        """More counters of TLS handshakes: resumed sessions, and failures by reason."""
        queue = self._handshakes
        return {"handshakes_resumed": queue.resumed, "handshake_failures": dict(queue.failures)} if queue else {}

    @property
    def handshakes(self) -> tuple[int, int]:
        """The number of TLS handshakes that succeeded and failed."""
        queue = self._handshakes
        return (queue.succeeded, queue.failed) if queue else (0, 0)

    @property
    def address(self) -> tuple[str, int]:
        """The bound address and port; of a Unix socket, its path and 0."""
        if self.is_unix:
            return self.requested
        host, port = self._sockets[0].getsockname()[:2]
        return host, port

    def filenos(self) -> list[int]:
        """Return the descriptors of the listening sockets."""
        return [one.fileno() for one in self._sockets]

    def renew(self, context: ssl.SSLContext) -> None:
        """Use another TLS context for later handshakes."""
        assert self._handshakes is not None, "the listener has no TLS"
        self._handshakes.context = context

    def expect_proxy_headers(self, trusted: Callable[[], TrustedNetworks], timeout_s: float) -> None:
        """Require a PROXY header at the start of every connection, before TLS; see `ProxyHeaders`."""
        self._proxy_headers = ProxyHeaders(trusted, self._on_accept, timeout_s)
        self._on_accept = self._proxy_headers.begin

    def start(self) -> None:
        """Start to accept connections."""
        self._is_accepting, self.keeps_file = True, False
        watchers, sockets = [*self._watchers, *self._other_watchers], [*self._sockets, *self._other_sockets]
        for watcher, sock in zip(watchers, sockets, strict=True):
            watcher.start(self._accept, sock)
        if self.balance is not None:
            self.balance.begin(self.name)

    def accept_for(self, others: Sequence[_socket.socket]) -> None:
        """Also accept at these sockets of other workers, in place of those of the previous call."""
        for watcher in self._other_watchers:
            watcher.stop()
            watcher.close()
        self._other_sockets, self._other_watchers = list(others), _watchers(others)
        if self._is_accepting:
            for watcher, sock in zip(self._other_watchers, self._other_sockets, strict=True):
                watcher.start(self._accept, sock)

    def stop(self) -> None:
        """Stop accepting: connections stay in the kernel's queue. Accepted ones are still passed on."""
        self._is_accepting = False
        for watcher in (*self._watchers, *self._other_watchers):
            watcher.stop()
        if self._pause is not None:
            self._pause.stop()
            self._pause.close()
            self._pause = None
        if self.balance is not None:
            self.balance.stop(self.name)

    def reject_queued(self) -> None:
        """Stop, and reject the connections in the kernel's queue: with status 503, or closed when they use TLS.

        With `leaves_queue` they stay in the queue for the next process with these sockets.
        """
        self.stop()
        while self._accepted:
            self.reject_busy(self._accepted.popleft()[0])
        for sock in () if self.leaves_queue else (*self._sockets, *self._other_sockets):
            for _ in range(_MAX_REJECTED):
                try:
                    fd, _ = sock._accept()  # type: ignore[attr-defined]
                except OSError:
                    break
                self.reject_busy(fd)

    def reject_busy(self, fd: int) -> None:
        """Reject an accepted connection: with status 503, or closed when it uses TLS."""
        with (
            contextlib.closing(_socket.socket(self._family, self._type, 0, fd)) as client,
            contextlib.suppress(OSError),
        ):
            client.setblocking(False)
            client.send(b"" if self._handshakes else BUSY)
            client.shutdown(_socket.SHUT_WR)
            client.recv_into(bytearray(_READ_BYTES))  # unread data would reset the connection and lose the response

    def close(self) -> None:
        """Close the sockets, unfinished handshakes, and connections that were not passed on."""
        self.stop()
        self.accept_for(())
        for watcher in self._watchers:
            watcher.close()
        self._next_turn.stop()
        self._next_turn.close()
        while self._accepted:
            os.close(self._accepted.popleft()[0])
        if self._proxy_headers:
            self._proxy_headers.close()
        if self._handshakes:
            self._handshakes.close()
        if self._file is not None and not self.keeps_file:
            self._file.remove()
        for sock in self._sockets:
            sock.close()
        if self in open_listeners:
            open_listeners.remove(self)

    def _accept(self, sock: _socket.socket) -> None:
        """Empty the kernel's queue first, because it is short; then pass the connections on."""
        if self._turn_s != (turn_s := get_hub().loop.now()):  # all sockets share the time of a turn
            self._turn_s, self._until_s = turn_s, monotonic() + ACCEPT_S
        while self._accept_some(sock) and not self.accepts_one_at_a_time and monotonic() < self._until_s:
            pass
        if not self._next_turn.active:
            self._pass_on_accepted()

    def _accept_some(self, sock: _socket.socket) -> bool:
        accepted = self._accepted
        if accepted:
            waiting = sum(len(each._accepted) for each in open_listeners)
            if waiting >= min(MAX_ACCEPTED, open_connections.room()):
                return False  # further connections wait in the kernel's queue
        # `accept` is called as often as there are connections: a call that fails takes 5 us, as long as five others.
        queued = 1 if self.accepts_one_at_a_time else _MANY if self.is_unix else max(_queued(sock), 1)
        for _ in range(min(queued, ACCEPTS_AT_ONCE)):
            try:
                fd, address = sock._accept()  # type: ignore[attr-defined]
                accepted.append((fd, UNIX_ADDRESS if self.is_unix else address))
            except BlockingIOError:
                return False
            except OSError as error:
                self._accept_failed(error)
                return False
        return queued > ACCEPTS_AT_ONCE

    def take(self, fd: int, address: Address) -> None:
        """Serve a connection that another worker has accepted."""
        self._accepted.append((fd, address, True))
        if not self._next_turn.active:
            self._pass_on_accepted()

    def _pass_on_accepted(self) -> None:
        """Pass on accepted connections in their order, for at most this turn's time."""
        until_s, accepted = monotonic() + TURN_S, self._accepted
        while accepted:
            self._pass_on(*accepted.popleft())
            if accepted and monotonic() >= until_s:
                self._next_turn.start(self._pass_on_accepted)
                break

    def _pass_on(self, fd: int, address: Address, is_given: bool = False) -> None:
        # A listener with a limit keeps its connections: each worker has a share of the limit, and connections from all
        # workers would exhaust the share of one.
        keeps = self.max_connections or is_given
        if self.balance is not None and not keeps and self.balance.pass_on(self.name, fd, address):
            self.counts.given += 1
            return
        client = open_connections.admit(self._family, self._type, fd, address, is_given)
        if client is None:
            self.counts.refused += 1
            return
        if self.max_connections and self.counts.open >= self.max_connections:
            self.counts.refused += 1
            if self._handshakes is None:
                with contextlib.suppress(OSError):
                    client.send(BUSY)
            client.close()
            rule = f"{self.max_connections} connections are open at {self.name}"
            LISTENER_CONNECTIONS.refused(f"a connection of {address[0]}", rule)
            return
        client.assign_to(self.counts)
        try:
            self._on_accept(client, address)
        except OSError:  # the client has disconnected
            client.close()
        except Exception:
            log.exception("error while accepting a connection from %s", address)
            client.close()

    def _accept_failed(self, error: OSError) -> None:
        if error.errno not in EXHAUSTED:
            return  # an error of one connection, such as ECONNABORTED; the next event continues
        if not self._has_logged_exhaustion:
            log.error(_EXHAUSTED_LINE, error.strerror)
            self._has_logged_exhaustion = True
        self.stop()
        self._pause = get_hub().loop.timer(PAUSE_S)  # a new timer: a libev timer that has fired fires again at once
        self._pause.start(self.start)


open_listeners: list[Listener] = []
"""The listeners of this process, in the order of creation."""


def _queued(sock: _socket.socket) -> int:
    """Return the number of connections in the kernel's queue of a listening socket."""
    info = sock.getsockopt(_socket.IPPROTO_TCP, _socket.TCP_INFO, _QUEUED_AT + 4)
    return int.from_bytes(info[_QUEUED_AT:], sys.byteorder)


def _watchers(sockets: Sequence[_socket.socket]) -> list[Any]:
    return [get_hub().loop.io(one.fileno(), READ) for one in sockets]


def _set_connection_options(sock: _socket.socket) -> None:
    """Set the options of all later connections. On Linux they inherit them, which saves four system calls for each."""
    sock.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
    sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_KEEPALIVE, 1)
    sock.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)


def sockets_per_port() -> int:
    """Return the number of sockets with which the kernel queues `MAX_KERNEL_QUEUE` connections for a port."""
    try:
        queued = int(Path("/proc/sys/net/core/somaxconn").read_text())
    except (OSError, ValueError):
        return MAX_SOCKETS
    return min(MAX_SOCKETS, -(-MAX_KERNEL_QUEUE // max(queued, 1)))


def listening_sockets(host: str, port: int, count: int = 1, backlog: int = MAX_BACKLOG) -> list[_socket.socket]:
    """Open the sockets of a port; the kernel spreads connections evenly over them.

    Args:
        host: as for `Listener`.
        port: 0 picks a free one.
        count: number of sockets.
        backlog: size of the kernel's queue for each.

    Raises:
        StartError: the address cannot be bound; one sentence.
    """
    host = host.strip("[]")
    exclusive = _bind(host, port, backlog, is_shared=False)  # fails when another server has the port
    if count == 1:
        return [exclusive]
    port = exclusive.getsockname()[1]
    exclusive.close()
    bound: list[_socket.socket] = []
    try:
        for _ in range(count):
            bound.append(_bind(host, port, backlog, is_shared=True))
    except StartError:
        for one in bound:
            one.close()
        raise
    return bound


def _bind(host: str, port: int, backlog: int, is_shared: bool) -> _socket.socket:
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if not 0 <= port <= 65535:
        raise StartError(f"cannot listen on {where}: a port is 0 to 65535")
    try:
        # Not gevent's function, which switches greenlets: Lua code may be the caller. A local address needs no look-up.
        family, kind, protocol, _, address = _socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError, OverflowError) as error:
        raise StartError(
            f"cannot listen on {where}: unknown host ({error}); give an address of this machine with --host"
        ) from None
    sock = _socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        if is_shared:
            sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEPORT, 1)
        _set_connection_options(sock)
        sock.setblocking(False)
        sock.bind(address)
        sock.listen(backlog)
    except (OSError, OverflowError) as error:
        sock.close()
        hint = _REASONS.get(getattr(error, "errno", None) or 0, str(error))
        raise StartError(f"cannot listen on {where}: {hint}") from None
    return sock


# ---- Ports of applications

BACKLOG = 4096  # when it is full, clients are not refused: their system retries after 1, 3, 7, 15, 31 s


class Acceptor:
    """A TCP port that accepts one connection per call.

    Args:
        port: 0 picks a free one.
        host: address to bind; all addresses by default.
        ipv6: bind IPv6.
        context: TLS context, for a TLS port.

    Attributes:
        requested: the key by which the next process of a hot restart finds the socket.

    Raises:
        StreamError: "bind".
    """

    def __init__(
        self, port: int, host: str | None = None, ipv6: bool = False, context: ssl.SSLContext | None = None
    ) -> None:
        self.requested = f"acceptor {host} {ipv6}", port  # differs from every key of a `Listener`
        given = inherited.take(*self.requested)
        self._socket: _socket.socket | None = given[0] if given else _bound(port, host, ipv6)
        open_acceptors.append(self)
        self._ready = Ready(self._socket.fileno(), READ)
        self._pause = _Pause()
        self._secured: deque[TlsTransport] = deque()  # after their handshake
        self._secured_signal = Signal()
        self._handshakes = HandshakeQueue(context, self._on_handshake) if context is not None else None

    def try_accept(self) -> Transport | None:
        """Return the transport of a new connection, or None when there is none.

        Raises:
            StreamError: "socketclosed".
        """
        sock = self._live()
        while not self._secured and not self._pause.lasts:
            try:
                fd, address = sock._accept()  # type: ignore[attr-defined]
            except BlockingIOError:
                break
            except ConnectionError:
                continue  # an error of one connection
            except OSError as error:
                if error.errno in EXHAUSTED:
                    if not self._pause.begun:
                        log.error(_EXHAUSTED_LINE, error.strerror)
                    self._pause.begin()
                break
            client = open_connections.admit(sock.family, sock.type, fd, address)
            if client is None:
                continue
            client.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
            if self._handshakes is None:
                return client
            self._handshakes.begin(client, address)
            if self._handshakes.share.spent():
                break  # further connections wait in the kernel's queue
        return self._secured.popleft() if self._secured else None

    def acceptable(self, timeout_s: float | None = None) -> Wait:
        """Return a wait for the next time when `try_accept` may succeed.

        Raises:
            StreamError: "socketclosed".
        """
        self._live()
        wait = (self._pause if self._pause.lasts else self._ready).wait(timeout_s)
        if self._handshakes is not None:  # the end of a handshake also makes a connection ready
            secured = self._secured_signal.wait()
            secured.then(lambda value, error: wait.resolve())
            wait.then(lambda value, error: secured.cancel())
        return wait

    def filenos(self) -> list[int]:
        """Return the descriptor of the listening socket. Raises as `sockname`."""
        return [self._live().fileno()]

    def sockname(self) -> tuple[str, int]:
        """Return the bound address and port.

        Raises:
            StreamError: "socketclosed".
        """
        host, port = self._live().getsockname()[:2]
        return host, port

    def close(self) -> bool:
        """Close; waiting calls raise "socketclosed". Return False when it was closed before."""
        sock, self._socket = self._socket, None
        if sock is None:
            return False
        open_acceptors.remove(self)
        for signal in (self._ready, self._pause):
            signal.close(StreamError("socketclosed"))
        if self._handshakes is not None:
            self._handshakes.close()
        while self._secured:
            self._secured.popleft().close()
        sock.close()
        return True

    def _on_handshake(self, transport: TlsTransport, address: Address) -> None:
        self._secured.append(transport)
        self._secured_signal.fire()

    def _live(self) -> _socket.socket:
        if self._socket is None:
            raise StreamError("socketclosed")
        return self._socket


open_acceptors: list[Acceptor] = []
"""The acceptors of this process, in the order of creation."""


class _Pause(Signal):
    """A pause while no descriptors are free; fires at its end.

    Without it, the readable socket would wake waiters repeatedly.

    Attributes:
        begun: whether there was a pause before.
    """

    __slots__ = ("_timer", "begun")

    def __init__(self) -> None:
        super().__init__()
        self._timer: Any = None
        self.begun = False

    @property
    def lasts(self) -> bool:
        """Whether the pause lasts."""
        return self._timer is not None

    def begin(self) -> None:
        """Pause for `PAUSE_S`."""
        self.begun = True
        self._timer = get_hub().loop.timer(PAUSE_S)
        self._timer.start(self._end)

    def close(self, error: BaseException) -> None:
        """End the pause; waiters are rejected with `error`."""
        self._stop()
        self.fail(error)

    def _end(self) -> None:
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
        if worker_place().count > 1:  # every worker loads the application that opens this port
            sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEPORT, 1)
        sock.setblocking(False)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise StreamError("bind", f"{address[0]} port {port}: {error.strerror}") from None
    return sock
