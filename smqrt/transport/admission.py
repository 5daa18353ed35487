"""Admission of connections: trusted proxies, limits and distribution over workers.

A connection over a limit gets status 503; it is counted and logged.
"""

from __future__ import annotations

import _socket
import contextlib
import fcntl
import itertools
import json
import mmap
import os
import resource
import socket
import struct
import sys
import termios
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from time import monotonic
from typing import Any, Protocol

from gevent import get_hub

from smqrt.loop.scheduling import NEVER, READ, Deadlines, share
from smqrt.settings.limits import Bucket, Limit, LimitSettings, current_limits, on_change
from smqrt.transport.tls import Address
from smqrt.transport.unix_sockets import UNIX_ADDRESS, UNIX_HOST, is_local_client
from smqrt.wire.proxy_protocol import NoProxyHeader, parse

# ---- Trusted proxies
#
# No proxy is trusted by default. A connection from a trusted network may name the client behind the proxy: by the PROXY
# protocol at listeners that require it, or by HTTP header fields (`smqrt.http.access`).

HEADER_S = 5.0
"""Time limit for a PROXY header."""
REFUSED = Limit("proxy_protocol", "proxy.trusted", "a connection has no PROXY header from a trusted proxy")
_MAX_CACHED = 4096  # addresses
_PEEK_BYTES = 4096
_SENTENCE = b"This port accepts only the PROXY protocol, from the proxies in the setting proxy.trusted.\n"
_FORBIDDEN = (
    b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Type: text/plain\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_SENTENCE), _SENTENCE)
)


class TrustedNetworks:
    """The networks of trusted proxies.

    Args:
        entries: addresses and networks: `10.0.0.0/8`, `::1`; `unix` for all clients of Unix sockets.

    Raises:
        ValueError: an invalid entry.
    """

    def __init__(self, entries: Iterable[str] = ()) -> None:
        listed = list(entries)
        self._has_unix = UNIX_HOST in listed
        self._networks: list[IPv4Network | IPv6Network] = [ip_network(one) for one in listed if one != UNIX_HOST]
        self._cache: dict[str, bool] = {}

    def __bool__(self) -> bool:
        """Whether there are networks."""
        return self._has_unix or bool(self._networks)

    def has(self, host: str) -> bool:
        """Return whether a network contains an address."""
        if host == UNIX_HOST:
            return self._has_unix
        cached = self._cache.get(host)
        if cached is not None:
            return cached
        if len(self._cache) >= _MAX_CACHED:
            self._cache.clear()
        try:
            address = ip_address(host.partition("%")[0])  # without the zone of a link-local address
        except ValueError:
            found = False
        else:
            address = getattr(address, "ipv4_mapped", None) or address
            found = any(address in network for network in self._networks if network.version == address.version)
        self._cache[host] = found
        return found


class Proxied(Protocol):
    """An accepted socket, counted per address: `smqrt.transport.admission.Admitted`.

    Attributes:
        client_tls: whether the client uses TLS to the proxy.
    """

    client_tls: bool

    def fileno(self) -> int: ...
    def recv(self, size_bytes: int, flags: int = 0, /) -> bytes: ...
    def send(self, data: bytes, /) -> int: ...
    def close(self) -> None: ...

    def count_for(self, host: str) -> bool:
        """Count it for another address; return False when a limit is reached."""


class ProxyHeaders:
    """Accepted connections whose PROXY header is incomplete. Each has a watcher and a deadline, but no greenlet.

    Args:
        trusted: returns the networks of trusted proxies.
        on_accept: called with the socket and the client's address, see `Listener`.
        timeout_s: time limit for the header.
    """

    def __init__(
        self,
        trusted: Callable[[], TrustedNetworks],
        on_accept: Callable[[Any, Address], None],
        timeout_s: float = HEADER_S,
    ) -> None:
        self.trusted, self.on_accept, self.timeout_s = trusted, on_accept, timeout_s
        self.deadlines: Deadlines[_AwaitedHeader] = Deadlines(min(0.25, timeout_s / 4))
        self.share = share()
        self._open: set[_AwaitedHeader] = set()

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, sock: Proxied, address: Address) -> None:
        """Start to read the header of an accepted socket."""
        if not self.trusted().has(address[0]):
            _refuse(sock, address, "its address is not in proxy.trusted")
            return
        awaited = _AwaitedHeader(self, sock, address)
        self._open.add(awaited)
        self.deadlines.watch(awaited)
        awaited.readable()

    def finished(self, awaited: _AwaitedHeader) -> None:
        """Forget a connection that was passed on or closed."""
        self._open.discard(awaited)
        self.deadlines.forget(awaited)

    def close(self) -> None:
        """Close all connections."""
        for awaited in list(self._open):
            awaited.end()
        self.deadlines.close()


class _AwaitedHeader:
    """A connection with an incomplete header. Only bytes of the header are read from the socket."""

    __slots__ = ("_address", "_data", "_headers", "_sock", "_watcher", "deadline_s")

    def __init__(self, headers: ProxyHeaders, sock: Proxied, address: Address) -> None:
        self._headers, self._sock, self._address = headers, sock, address
        self._data = b""
        self.deadline_s = monotonic() + headers.timeout_s
        self._watcher: Any = get_hub().loop.io(sock.fileno(), READ)
        self._watcher.start(self.readable)

    def readable(self) -> None:
        """Read received data; in a later turn when this turn's time is used up."""
        if self._headers.share.spent():
            self._watcher.stop()
            self._headers.share.later(self._resume)
        else:
            self._receive()

    def _resume(self) -> None:
        if self.deadline_s != NEVER:  # not closed since
            self._watcher.start(self.readable)
            self._receive()

    def _receive(self) -> None:
        try:
            seen = self._sock.recv(_PEEK_BYTES, _socket.MSG_PEEK)  # bytes behind the header are for the next layer
            header = parse(self._data + seen)
            size = len(seen) if header is None else header.size_bytes - len(self._data)
            self._data += self._sock.recv(size) if seen else b""
        except BlockingIOError:
            return
        except OSError:
            self.end()
        except NoProxyHeader as error:
            self._refuse(str(error))
        else:
            if header is not None:
                self._forget()
                self._sock.client_tls = header.is_tls
                if header.client is None or self._sock.count_for(header.client[0]):
                    self._headers.on_accept(self._sock, header.client or self._address[:2])
                else:
                    self._sock.close()
            elif not seen:
                self._refuse("it ended within the header")

    def _refuse(self, rule: str) -> None:
        self._forget()
        _refuse(self._sock, self._address, rule)

    def expired(self) -> None:
        """Refuse the connection after the timeout."""
        self._refuse(f"no complete header within {self._headers.timeout_s:g} s")

    def end(self) -> None:
        """Close the connection."""
        self._forget()
        self._sock.close()

    def _forget(self) -> None:
        self.deadline_s = NEVER
        self._watcher.stop()
        self._watcher.close()
        self._headers.finished(self)


def _refuse(sock: Proxied, address: Address, rule: str) -> None:
    with suppress(OSError):
        sock.recv(_PEEK_BYTES)  # unread data would reset the connection and lose the response
    with suppress(OSError):
        sock.send(_FORBIDDEN)
    sock.close()
    REFUSED.refused(f"a connection of {address[0]}", rule)


RESERVE = 128
"""Descriptors kept free for journals, databases, files of applications and outgoing connections."""
_ROOM_STEP = RESERVE // 2
"""`ulimit -n` is read again after so many more connections: it may change, but reading it for each costs a system call.
"""
MAX_PER_ADDRESS = 2000
RATE_OVER_S = 10.0
"""Rates are averages over this time, because all clients of a server reconnect at once when it restarts."""
MAX_RATED = 10_000
"""Addresses whose rate is stored; the least recently used are dropped."""
CONNECTIONS = Limit("connections", "max_connections", "the maximum of open connections is reached")
PER_ADDRESS = Limit(
    "connections_per_address", "connections_per_address", "an address has reached its maximum of open connections"
)
LISTENER_CONNECTIONS = Limit(
    "listener_connections", "listener.NAME.max_connections", "a listener has reached its maximum of open connections"
)
CONNECT_RATE = Limit("connect_rate", "limits.connect_rate", "the rate of new connections is reached")
CONNECT_RATE_PER_ADDRESS = Limit(
    "connect_rate_per_address",
    "limits.connect_rate_per_address",
    "an address has reached its rate of new connections",
)
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 5\r\nContent-Length: 0\r\n\r\n"
"""The response to a connection over a limit."""


class Admitted(_socket.socket):
    """The socket of an accepted connection, which is counted until it is closed."""

    __slots__ = ("_address", "_counts", "_limit", "client_tls")
    _limit: ConnectionLimit | None
    _address: str
    client_tls: bool

    @property
    def peer_host(self) -> str | None:
        """The peer's address, even after it has disconnected; None when unknown."""
        return getattr(self, "_address", None)

    def getpeername(self) -> Any:
        """Return the address of the client; `UNIX_ADDRESS` for a Unix socket."""
        address = super().getpeername()
        return address if isinstance(address, tuple) else UNIX_ADDRESS

    def getsockname(self) -> Any:
        """Return the local address; `UNIX_ADDRESS` for a Unix socket."""
        address = super().getsockname()
        return address if isinstance(address, tuple) else UNIX_ADDRESS

    def count_for(self, host: str) -> bool:
        """Count the connection for the address of a client behind a proxy; return False when a limit is reached."""
        limit = self._limit
        if limit is None or host == self._address:
            return True
        if limit.reassign(self._address, host):
            self._address = host
            return True
        return False

    def assign_to(self, counts: ListenerCounts) -> None:
        """Count the connection for a listener until it is closed."""
        self._counts: ListenerCounts | None = counts
        counts.accepted += 1
        counts.open += 1

    def close(self) -> None:
        """Close and stop counting."""
        limit = getattr(self, "_limit", None)
        if limit is not None:
            self._limit = None
            limit.release(self._address)
        counts = getattr(self, "_counts", None)
        if counts is not None:
            self._counts = None
            counts.open -= 1
        super().close()

    def __del__(self) -> None:
        self.close()  # a socket that is lost after an error must not be counted forever


@dataclass(slots=True)
class ListenerCounts:
    """Counts of a listener's connections.

    Attributes:
        accepted: admitted connections.
        open: admitted connections that are not closed.
        refused: connections over a limit.
        given: connections passed on to another worker, which counts them.
    """

    accepted: int = 0
    open: int = 0
    refused: int = 0
    given: int = 0


class ConnectionLimit:
    """Counts open connections and refuses those over a limit.

    Attributes:
        limit: maximum of connections; 0 for the number of descriptors less `RESERVE`.
        per_address: maximum of connections per address; 0 for no limit. Loopback addresses and Unix sockets have no
            limit, because a local proxy connects from one for all clients.
        proxies: trusted proxies; their addresses have no limit for the same reason.
        open: number of open connections.
    """

    def __init__(self, limit: int = 0, per_address: int = MAX_PER_ADDRESS) -> None:
        self.limit, self.per_address = limit, per_address
        self.proxies = TrustedNetworks()
        self.open = 0
        self._room_until = 0  # up to this number of open connections, `ulimit -n` is not read again
        self._shared_count: memoryview = memoryview(bytearray(4)).cast("I")
        self._by_address: dict[str, int] = {}
        self.rate(current_limits())

    def rate(self, settings: LimitSettings) -> None:
        """Set the rates of new connections."""
        self._per_s, self._per_address_per_s = settings.connect_rate, settings.connect_rate_per_address
        self._rate = None if self._per_s is None else _bucket(self._per_s)
        self._rates: OrderedDict[str, Bucket] = OrderedDict()

    def admit(
        self, family: int, kind: int, fd: int, address: tuple[str, *tuple[int, ...]], is_given: bool = False
    ) -> Admitted | None:
        """Return the socket of an accepted connection, or close it and return None when it is over a limit.

        Args:
            family, kind: family and type of the socket.
            fd: descriptor of the socket.
            address: the client's address.
            is_given: whether another worker has accepted it and applied the rates.
        """
        sock, host = Admitted(family, kind, 0, fd), sys.intern(address[0])  # many clients share an address
        sock.setblocking(False)
        if self.open >= (self.limit or self._room_until) and self.room() <= 0:
            limit, rule = CONNECTIONS, f"{self.open} connections are open, and ulimit -n may allow no more"
        elif self._has_too_many(host):
            limit, rule = PER_ADDRESS, f"{self.per_address} connections of {host} are open"
        elif not (is_given or _is_local(host)) and (exceeded := self._exceeded_rate(host)):
            limit, rule = exceeded, ""
        else:
            self._count(sock, host)
            return sock
        with contextlib.suppress(OSError):
            sock.send(BUSY)  # a TLS client sees only the close
        sock.close()
        limit.refused(f"a connection of {host}", rule)
        return None

    def use_rate(self, host: str) -> bool:
        """Count a new connection that another worker admits; return False when a rate is exceeded."""
        return _is_local(host) or not self._exceeded_rate(host)

    @property
    def maximum(self) -> int:
        """The maximum of open connections that is in force now."""
        return self.limit or _max_open()

    @property
    def most_of_an_address(self) -> int:
        """The number of open connections of the address that has the most."""
        return max(self._by_address.values(), default=0)

    def room(self) -> int:
        """Return the number of further connections that the limit permits."""
        limit = self.maximum
        self._room_until = min(limit, self.open + _ROOM_STEP)
        return limit - self.open

    def adopt(self, fd: int, host: str) -> Admitted:
        """Return the socket of a connection that another process has admitted; `host` is its client's address."""
        sock = Admitted(-1, -1, -1, fd)
        sock.setblocking(False)
        self._count(sock, host)
        return sock

    def publish_in(self, cell: memoryview) -> None:
        """Publish the number of open connections in shared memory, as a 32-bit number."""
        self._shared_count = cell
        cell[0] = self.open

    def _count(self, sock: Admitted, host: str) -> None:
        self.open += 1
        self._shared_count[0] = self.open
        self._by_address[host] = self._by_address.get(host, 0) + 1
        sock._limit, sock._address, sock.client_tls = self, host, False

    def release(self, host: str) -> None:
        """Stop counting a closed connection of an address."""
        self.open -= 1
        self._shared_count[0] = self.open
        self._add(host, -1)

    def reassign(self, before: str, host: str) -> bool:
        """Count a connection of `before` for `host` instead; return False when a limit is reached."""
        bucket = None if _is_local(host) else self._bucket_of(host)
        if self._has_too_many(host):
            PER_ADDRESS.refused(f"a connection of {host}", f"{self.per_address} connections of {host} are open")
            return False
        if bucket is not None:
            if bucket.fill(monotonic()) < 1:
                CONNECT_RATE_PER_ADDRESS.refused(f"a connection of {host}", "")
                return False
            bucket.tokens -= 1
        self._add(before, -1)
        self._add(host, 1)
        return True

    def _add(self, host: str, one: int) -> None:
        count = self._by_address.pop(host, 0) + one
        if count:
            self._by_address[host] = count

    def _has_too_many(self, host: str) -> bool:
        if not self.per_address or self._by_address.get(host, 0) < self.per_address:
            return False
        return not (_is_local(host) or self.proxies.has(host))

    def _exceeded_rate(self, host: str) -> Limit | None:
        """Return the rate that one more connection exceeds; otherwise count the connection and return None."""
        if self._rate is None and self._per_address_per_s is None:
            return None
        now_s = monotonic()
        own = self._bucket_of(host)
        if own is not None and own.fill(now_s) < 1:
            return CONNECT_RATE_PER_ADDRESS
        if self._rate is not None:
            if self._rate.fill(now_s) < 1:
                return CONNECT_RATE
            self._rate.tokens -= 1
        if own is not None:
            own.tokens -= 1
        return None

    def _bucket_of(self, host: str) -> Bucket | None:
        """Return the token bucket of an address; None without a rate per address, and for trusted proxies."""
        if self._per_address_per_s is None or self.proxies.has(host):
            return None
        bucket = self._rates.get(host) or _bucket(self._per_address_per_s)
        self._rates[host] = bucket
        self._rates.move_to_end(host)
        if len(self._rates) > MAX_RATED:
            self._rates.popitem(last=False)
        return bucket


def _bucket(per_s: float) -> Bucket:
    return Bucket(per_s, max(1.0, per_s * RATE_OVER_S), monotonic())


def _max_open() -> int:
    return max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVE, 16)  # some, even with a very low ulimit -n


_is_local = lru_cache(1024)(is_local_client)


open_connections = ConnectionLimit()
"""The limit of this process, whose ports share the descriptors."""
on_change(open_connections.rate)


# ---- Distribution over workers
#
# The kernel distributes connections by a hash. This is even for thousands, but a hundred connections on two workers may
# split 60 to 40. After the end of a worker, its clients reconnect to all workers, and the imbalance stays for days.
# Therefore a worker with more connections than another passes new ones on, over a socket pair, before it reads any
# data. Shared memory contains the number of open connections of each worker.

SLACK, SLACK_SHARE = 3, 32
"""A worker keeps this many connections more than another, and one more for each 32 of the other worker: passing one on
costs more than a small imbalance."""
MAX_RECEIVED = 64
"""Connections received per event of the loop."""
MAX_IN_TRANSIT_BYTES = 16 * 768
"""Maximum in transit to one worker, so that a blocked worker gets no more: 16 connections, for each of which the kernel
counts 768 bytes."""
MAX_REJECTED = 1000
"""Maximum of connections in transit to one worker that are rejected when it stops."""
_MESSAGE_BYTES = 512
_ANCILLARY_BYTES = socket.CMSG_LEN(4)
"""One descriptor. `socket.recv_fds` ignores its flags in Python 3.11."""
_CELL_BYTES = 4


class BalanceSockets:
    """The shared memory and socket pairs of the workers, created by their supervisor.

    The sockets stay open when a worker ends: its successor receives the connections in transit.

    Args:
        count: number of workers.

    Raises:
        OSError: there are no descriptors left.
    """

    def __init__(self, count: int) -> None:
        self._table = os.memfd_create("smqrt-connections")
        os.ftruncate(self._table, 2 * _CELL_BYTES * count)
        self._cells = _cells(self._table, count)
        self._count = count
        self._pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]

    def filenos(self) -> tuple[list[int], list[int]]:
        """Return the descriptors for `Balance`, in two lists because one message has at most 253 descriptors."""
        inboxes, senders = zip(*self._pairs, strict=True)
        return [self._table, *(one.fileno() for one in inboxes)], [one.fileno() for one in senders]

    def accepting(self, numbers: Iterable[int]) -> None:
        """Set the workers that receive connections of others."""
        accepting = set(numbers)
        for number in range(self._count):
            self._cells[self._count + number] = number in accepting

    def close(self) -> None:
        """Close the descriptors of this process."""
        os.close(self._table)
        for sock in itertools.chain.from_iterable(self._pairs):
            sock.close()


class Balance:
    """The balancing of one worker: passes connections on and receives those of others.

    Args:
        number: number of the worker.
        table_and_inboxes, senders: see `BalanceSockets.filenos`; owned by this object.
    """

    def __init__(self, number: int, table_and_inboxes: Sequence[int], senders: Sequence[int]) -> None:
        table, *inboxes = table_and_inboxes
        self._number, count = number, len(inboxes)
        self._cells = _cells(table, count)
        os.close(table)
        self._open, self._accepts = self._cells[:count], self._cells[count:]
        self._inboxes = [socket.socket(fileno=fd) for fd in inboxes]
        self._senders = [socket.socket(fileno=fd) for fd in senders]
        for one in (*self._inboxes, *self._senders):
            one.setblocking(False)
        self._watchers: list[Any] = [get_hub().loop.io(one.fileno(), READ) for one in self._inboxes]
        self._receives_for = {number}
        self._takers: dict[str, Callable[[int, Address], object]] = {}
        self._accepting: set[str] = set()
        open_connections.publish_in(self._open[number : number + 1])

    # ---- passing on

    def pass_on(self, name: str, fd: int, address: Address) -> bool:
        """Pass an accepted connection on to the worker with the fewest. Return False when this worker keeps it.

        Args:
            name: name of the listener that accepted it.
            fd: descriptor of the connection; closed when it is passed on.
            address: address of the client.
        """
        least = min(self._open)
        if self._open[self._number] <= least + SLACK + least // SLACK_SHARE:  # first, because it needs no loop
            return False
        accepting = [number for number, accepts in enumerate(self._accepts) if accepts]
        to = min((*accepting, self._number), key=self._open.__getitem__)
        if self._open[self._number] <= self._open[to] + SLACK + self._open[to] // SLACK_SHARE:
            return False
        message = json.dumps([name, *address]).encode()
        try:
            unread: int = struct.unpack("i", fcntl.ioctl(self._senders[to], termios.TIOCOUTQ, bytes(4)))[0]
            if unread > MAX_IN_TRANSIT_BYTES or len(message) > _MESSAGE_BYTES:
                return False
            if not open_connections.use_rate(address[0]):
                return False  # the caller refuses it
            socket.send_fds(self._senders[to], [message], [fd])
        except OSError:
            return False  # no memory, or too many descriptors in transit
        os.close(fd)
        self._open[to] += 1  # the receiver counts it later; until then all new connections would be passed to it
        return True

    # ---- receiving

    def add(self, name: str, take: Callable[[int, Address], object]) -> None:
        """Call `take` with descriptor and address of each connection for the listener of that name."""
        self._takers[name] = take

    def begin(self, name: str) -> None:
        """Start to receive connections for the listener of that name."""
        self._accepting.add(name)
        self._watch()

    def stop(self, name: str) -> None:
        """Stop receiving for a listener. After the last one, connections in transit wait for the next process."""
        self._accepting.discard(name)
        self._watch()

    def receive_for(self, others: Iterable[int]) -> None:
        """Also receive the connections in transit to these workers, which do not accept."""
        self._receives_for = {self._number, *others}
        self._watch()

    def _watch(self) -> None:
        for number, watcher in enumerate(self._watchers):
            if self._accepting and number in self._receives_for:
                watcher.start(self._readable, self._inboxes[number])
            else:
                watcher.stop()

    def _readable(self, inbox: socket.socket) -> None:
        for fd, name, address in _received(inbox, MAX_RECEIVED):
            take = self._takers.get(name)
            if take is None:
                os.close(fd)  # the port of a listener that this worker does not have
            else:
                take(fd, address)

    def leave(self) -> None:
        """Stop other workers from passing connections on to this one."""
        self._accepts[self._number] = 0

    def reject_queued(self, reject_busy: Callable[[str, int], object]) -> None:
        """Reject all connections in transit to this worker.

        Args:
            reject_busy: called with the listener's name and the descriptor of each, which it closes.
        """
        for number in self._receives_for:
            for fd, name, _ in _received(self._inboxes[number], MAX_REJECTED):
                reject_busy(name, fd)

    def close(self) -> None:
        """Close the sockets and watchers. A second call does nothing."""
        for watcher in self._watchers:
            watcher.stop()
            watcher.close()
        self._watchers = []
        for one in (*self._inboxes, *self._senders):
            one.close()


def _received(inbox: socket.socket, max_count: int) -> Iterator[tuple[int, str, Address]]:
    """Yield descriptor, listener name and client address of the connections in transit."""
    for _ in range(max_count):
        try:
            message, ancillary, _, _ = inbox.recvmsg(_MESSAGE_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            return  # no more
        if not ancillary:
            CONNECTIONS.refused("a connection of another worker", "no file descriptors are left")
            continue
        ((_, _, fd),) = ancillary
        name, *address = json.loads(message)
        yield int.from_bytes(fd, sys.byteorder), name, tuple(address)


def _cells(table: int, count: int) -> memoryview:
    """Map the shared 32-bit numbers: open connections of each worker, then whether each accepts."""
    return memoryview(mmap.mmap(table, 2 * _CELL_BYTES * count)).cast("I")
