"""Listening sockets: a `Listener` passes connections on as they come, many per event; an `Acceptor` accepts when it is
asked to, and leaves the others to the kernel. A lack of file descriptors ends neither: it rests for a moment.
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
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from gevent import get_hub

from smqrt.errors import StartError, StreamError
from smqrt.loop.readiness import READ, Ready, Signal, Wait
from smqrt.loop.scheduling import TURN_S
from smqrt.transport.admission import BUSY, LISTENER_CONNECTIONS, Admitted, ListenerCounts, open_connections
from smqrt.transport.balance import Balance
from smqrt.transport.stream import resolve
from smqrt.transport.tls import HANDSHAKE_S, Address, HandshakeQueue, TlsTransport, Transport
from smqrt.transport.trusted_proxies import ProxyHeaders, TrustedNetworks
from smqrt.workers.worker_identity import worker_place

# ---- Listening sockets that another process has handed to this one: who asks for the same host and port gets them.

Asked = tuple[str, int]
"""Host and port as they were asked for: several may have asked for port 0, and get theirs in the same order."""


class InheritedSockets:
    """Those that nobody has asked for yet."""

    def __init__(self) -> None:
        self._fds: defaultdict[Asked, deque[list[int]]] = defaultdict(deque)

    def add(self, asked_for: Asked, fds: list[int]) -> None:
        """Keep the descriptors of the sockets of a port."""
        self._fds[asked_for].append(fds)

    def take(self, host: str, port: int) -> list[_socket.socket]:
        """The sockets of the next port for a host and port; none when there is none."""
        waiting = self._fds.get((host, port))
        sockets = [_socket.socket(-1, -1, -1, fd) for fd in waiting.popleft()] if waiting else []
        for one in sockets:
            one.setblocking(False)
        return sockets

    def close(self) -> None:
        """Close those that nobody has asked for."""
        for waiting in self._fds.values():
            for fd in itertools.chain.from_iterable(waiting):
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._fds.clear()


inherited = InheritedSockets()
"""Of this process."""


log = logging.getLogger("smqrt")

OnAccept = Callable[[Any, Address], None]

_NEXT_TURN_S = 1e-6  # a timer: the loop looks at sockets in between
_WAITING_AT_MOST, _READ_BYTES = 8192, 16384
ACCEPTS_AT_ONCE = 16  # then the clock is looked at
ACCEPT_S = 0.02
"""What accepting may take of a turn: some five thousand connections."""
WAITING_IN_KERNEL, SOCKETS_AT_MOST = 16384, 4
"""Ten thousand clients that come back at once are there within 0.15 s. The kernel holds no more than
net.core.somaxconn of them for a socket, 4096 by default, and lets the others try again after whole seconds; so a port
has several sockets."""
BACKLOG_AT_MOST = 65535
ACCEPTED_AT_MOST = 16384
"""Connections that may be accepted and wait for their turn."""
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
        handshake_s: seconds that a TLS handshake may take.
        backlog: connections the kernel may hold for us; it takes no more than net.core.somaxconn.
        sockets: with so many the kernel holds so much more.
        given: listening sockets of somebody else, instead of new ones.

    Attributes:
        name: what settings call it.
        max_connections: so many of its connections may be open at once; 0 for no limit of its own.
        asked_for: host and port as they were given.
        leaves_queue: at its end those who wait in the kernel are left to whoever serves the sockets next.
        takes_turns: other processes accept at the same socket, so it takes one connection at a time.
        balance: spreads the connections over the workers of the server; None where there are no others.

    Raises:
        StartError: the address can't be bound; one sentence.
    """

    def __init__(
        self,
        host: str,
        port: int,
        on_accept: OnAccept,
        context: ssl.SSLContext | None = None,
        backlog: int = BACKLOG_AT_MOST,
        sockets: int = 1,
        handshake_s: float = HANDSHAKE_S,
        given: Sequence[_socket.socket] = (),
    ) -> None:
        self.asked_for = host, port
        self.leaves_queue, self.takes_turns = bool(given), False
        handed = list(given) or inherited.take(host, port)
        self._sockets = handed or listening_sockets(host, port, sockets, backlog)
        for one in handed:
            _set_inherited(one)
        open_listeners.append(self)
        self._handshakes = HandshakeQueue(context, on_accept, handshake_s) if context is not None else None
        self.counts = ListenerCounts()
        self.name, self.max_connections = "a listener", 0
        self.balance: Balance | None = None
        self._on_accept: OnAccept = self._handshakes.begin if self._handshakes else on_accept
        self._proxy_headers: ProxyHeaders | None = None
        self._family, self._type = self._sockets[0].family, self._sockets[0].type
        self._watchers = _watchers(self._sockets)
        self._others: list[_socket.socket] = []
        self._watchers_of_others: list[Any] = []
        self._is_accepting = False
        self._turn_s = self._until_s = 0.0
        self._pause: Any = None
        self._complained = False
        self._accepted: deque[tuple[int, Address] | tuple[int, Address, bool]] = deque()
        self._taking: Any = get_hub().loop.timer(_NEXT_TURN_S)

    @property
    def handshake_s(self) -> float:
        """Seconds that a TLS handshake may take."""
        return self._handshakes.timeout_s if self._handshakes else HANDSHAKE_S

    @handshake_s.setter
    def handshake_s(self, value: float) -> None:
        if self._handshakes:
            self._handshakes.timeout_s = value

    @property
    def max_handshakes(self) -> int:
        """How many TLS handshakes may be under way: for one more the oldest ends. 0 for no limit of its own."""
        return self._handshakes.max_unfinished if self._handshakes else 0

    @max_handshakes.setter
    def max_handshakes(self, value: int) -> None:
        if self._handshakes:
            self._handshakes.max_unfinished = value

    @property
    def handshake_counts(self) -> dict[str, object]:
        """What is counted of TLS handshakes beside that: those that resumed a session, and failures by their reason."""
        queue = self._handshakes
        return {"handshakes_resumed": queue.resumed, "handshake_failures": dict(queue.failures)} if queue else {}

    @property
    def handshakes(self) -> tuple[int, int]:
        """How many TLS handshakes were done, and how many failed."""
        queue = self._handshakes
        return (queue.succeeded, queue.failed) if queue else (0, 0)

    @property
    def address(self) -> tuple[str, int]:
        """Bound address and port."""
        host, port = self._sockets[0].getsockname()[:2]
        return host, port

    def filenos(self) -> list[int]:
        """The descriptors of the listening sockets."""
        return [one.fileno() for one in self._sockets]

    def renew(self, context: ssl.SSLContext) -> None:
        """Use another TLS context from the next handshake on."""
        assert self._handshakes is not None, "a listener without TLS"
        self._handshakes.context = context

    def expect_proxy_headers(self, trusted: Callable[[], TrustedNetworks], timeout_s: float) -> None:
        """Let every connection begin with a PROXY header, before TLS too; see `ProxyHeaders`."""
        self._proxy_headers = ProxyHeaders(trusted, self._on_accept, timeout_s)
        self._on_accept = self._proxy_headers.begin

    def start(self) -> None:
        """Begin to accept."""
        self._is_accepting = True
        watchers, sockets = [*self._watchers, *self._watchers_of_others], [*self._sockets, *self._others]
        for watcher, sock in zip(watchers, sockets, strict=True):
            watcher.start(self._accept, sock)
        if self.balance is not None:
            self.balance.begin(self.name)

    def accept_for(self, others: Sequence[_socket.socket]) -> None:
        """Accept at these sockets too, whose own process does not, and no longer at those that were named before."""
        for watcher in self._watchers_of_others:
            watcher.stop()
            watcher.close()
        self._others, self._watchers_of_others = list(others), _watchers(others)
        if self._is_accepting:
            for watcher, sock in zip(self._watchers_of_others, self._others, strict=True):
                watcher.start(self._accept, sock)

    def stop(self) -> None:
        """Accept no more; connections wait in the kernel. Those that were accepted are still passed on."""
        self._is_accepting = False
        for watcher in (*self._watchers, *self._watchers_of_others):
            watcher.stop()
        if self._pause is not None:
            self._pause.stop()
            self._pause.close()
            self._pause = None
        if self.balance is not None:
            self.balance.rest(self.name)

    def turn_away(self) -> None:
        """Tell those who wait in the kernel that the server stops: 503, or just the end of a TLS connection. At the
        socket of somebody else they wait for whoever serves it next.
        """
        self.stop()
        while self._accepted:
            self.say_busy(self._accepted.popleft()[0])
        for sock in () if self.leaves_queue else (*self._sockets, *self._others):
            for _ in range(_WAITING_AT_MOST):
                try:
                    fd, _ = sock._accept()  # type: ignore[attr-defined]
                except OSError:
                    break
                self.say_busy(fd)

    def say_busy(self, fd: int) -> None:
        """Tell a client that the server stops: 503, or just the end of a TLS connection."""
        with contextlib.closing(_socket.socket(self._family, self._type, 0, fd)) as client:
            _say_busy(client, b"" if self._handshakes else BUSY)

    def close(self) -> None:
        """Stop for good. Unfinished handshakes end."""
        self.stop()
        self.accept_for(())
        for watcher in self._watchers:
            watcher.close()
        self._taking.stop()
        self._taking.close()
        while self._accepted:
            os.close(self._accepted.popleft()[0])
        if self._proxy_headers:
            self._proxy_headers.close()
        if self._handshakes:
            self._handshakes.close()
        for sock in self._sockets:
            sock.close()
        if self in open_listeners:
            open_listeners.remove(self)

    def _accept(self, sock: _socket.socket) -> None:
        """Empty the kernel's list first, which is short, and then begin with those who came."""
        if self._turn_s != (turn_s := get_hub().loop.now()):  # the sockets share the time of a turn
            self._turn_s, self._until_s = turn_s, monotonic() + ACCEPT_S
        while self._accept_some(sock) and not self.takes_turns and monotonic() < self._until_s:
            pass
        if not self._taking.active:
            self._take()

    def _accept_some(self, sock: _socket.socket) -> bool:
        """Whether there may be more."""
        accepted = self._accepted
        if accepted and _are_enough():
            return False  # those that are one too many wait in the kernel
        for _ in range(1 if self.takes_turns else ACCEPTS_AT_ONCE):
            try:
                accepted.append(sock._accept())  # type: ignore[attr-defined]
            except BlockingIOError:
                return False
            except OSError as error:
                self._failed(error)
                return False
        return True

    def take(self, fd: int, address: Address) -> None:
        """Serve a connection that another worker has accepted."""
        self._accepted.append((fd, address, True))
        if not self._taking.active:
            self._take()

    def _take(self) -> None:
        """Pass on those who were accepted, in their order, as far as this turn's time goes."""
        until_s, accepted = monotonic() + TURN_S, self._accepted
        while accepted:
            self._pass_on(*accepted.popleft())
            if accepted and monotonic() >= until_s:
                self._taking.start(self._take)
                break

    def _pass_on(self, fd: int, address: Address, is_given: bool = False) -> None:
        if not is_given and self._gives(fd, address):
            self.counts.given += 1
            return
        client = open_connections.admit(self._family, self._type, fd, address, is_given)
        if client is None:
            self.counts.refused += 1
            return
        if self.max_connections and self.counts.open >= self.max_connections:
            self._refuse(client, address)
            return
        client.belongs_to(self.counts)
        try:
            self._on_accept(client, address)
        except OSError:
            client.close()  # gone already
        except Exception:
            log.exception("error while taking a connection from %s", address)
            client.close()

    def _gives(self, fd: int, address: Address) -> bool:
        """Whether another worker has got a connection. Not where the listener has a limit of its own, of which each
        worker has a share: the newcomers of all would meet that of one.
        """
        if self.balance is None or self.max_connections:
            return False
        return self.balance.gives(self.name, fd, address)

    def _refuse(self, client: Admitted, address: Address) -> None:
        self.counts.refused += 1
        if self._handshakes is None:
            with contextlib.suppress(OSError):
                client.send(BUSY)
        client.close()
        LISTENER_CONNECTIONS.refused(
            f"a connection of {address[0]}", f"{self.max_connections} connections are open at {self.name}"
        )

    def _failed(self, error: OSError) -> None:
        if error.errno not in EXHAUSTED:
            return  # that client's trouble (ECONNABORTED and the like); the next event goes on
        if not self._complained:
            log.error("cannot accept connections: %s; raise the limit of open files (ulimit -n)", error.strerror)
            self._complained = True
        self.stop()
        self._pause = get_hub().loop.timer(PAUSE_S)  # a new one: a timer of libev that has fired fires again at once
        self._pause.start(self.start)


open_listeners: list[Listener] = []
"""Of this process, in the order they were made."""


def _watchers(sockets: Sequence[_socket.socket]) -> list[Any]:
    return [get_hub().loop.io(one.fileno(), 1) for one in sockets]


def _are_enough() -> bool:
    """Whether as many connections were accepted, and wait, as may be."""
    waiting = sum(len(each._accepted) for each in open_listeners)
    return waiting >= min(ACCEPTED_AT_MOST, open_connections.room())


def _say_busy(client: _socket.socket, answer: bytes) -> None:
    client.setblocking(False)
    with contextlib.suppress(OSError):
        client.send(answer)
        client.shutdown(_socket.SHUT_WR)
        client.recv_into(bytearray(_READ_BYTES))  # what is not read resets the connection, answer and all


def _set_inherited(sock: _socket.socket) -> None:
    """What every accepted connection has from the start: on Linux it is inherited, which saves four calls for each."""
    sock.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
    sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_KEEPALIVE, 1)
    sock.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)


def sockets_for_storms() -> int:
    """How many sockets a port needs so that the kernel holds WAITING_IN_KERNEL connections for it."""
    try:
        held = int(Path("/proc/sys/net/core/somaxconn").read_text())
    except (OSError, ValueError):
        return SOCKETS_AT_MOST
    return min(SOCKETS_AT_MOST, -(-WAITING_IN_KERNEL // max(held, 1)))


def listening_sockets(host: str, port: int, count: int = 1, backlog: int = BACKLOG_AT_MOST) -> list[_socket.socket]:
    """Open the sockets of a port; the kernel spreads connections evenly over them.

    Args:
        host: as for `Listener`.
        port: 0 picks a free one.
        count: how many sockets.
        backlog: connections that the kernel may hold for each.

    Raises:
        StartError: the address can't be bound; one sentence.
    """
    host = host.strip("[]")
    alone = _bind(host, port, backlog, is_shared=False)  # only so a port is refused that another server has
    if count == 1:
        return [alone]
    port = alone.getsockname()[1]
    alone.close()
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
        # Not gevent's, which lets others run: Lua may be waiting inside, and an address of this machine takes no time.
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

    Attributes:
        asked_for: what finds it in the next process.

    Raises:
        StreamError: "bind".
    """

    def __init__(
        self, port: int, host: str | None = None, ipv6: bool = False, context: ssl.SSLContext | None = None
    ) -> None:
        self.asked_for = f"acceptor {host} {ipv6}", port
        given = inherited.take(*self.asked_for)
        self._socket: _socket.socket | None = given[0] if given else _bound(port, host, ipv6)
        open_acceptors.append(self)
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

    def filenos(self) -> list[int]:
        """The descriptor of the listening socket. Raises as `sockname`."""
        return [self._live().fileno()]

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
        open_acceptors.remove(self)
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


open_acceptors: list[Acceptor] = []
"""Of this process, in the order they were made."""


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
        if worker_place().count > 1:  # every worker loads the application that asks for this port
            sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEPORT, 1)
        sock.setblocking(False)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise StreamError("bind", f"{address[0]} port {port}: {error.strerror}") from None
    return sock
