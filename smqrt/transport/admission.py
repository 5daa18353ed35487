"""Admission of connections: how many may be open in all, for each address and listener, and how many may come in a
second. Who is over gets 503, is counted and logged.
"""

from __future__ import annotations

import _socket
import contextlib
import resource
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from time import monotonic

from smqrt.settings.limit_register import Bucket, Limit
from smqrt.settings.limits import LimitSettings, in_force, on_change
from smqrt.transport.origins import is_loopback
from smqrt.transport.trusted_proxies import TrustedNetworks

RESERVE = 128
"""Descriptors that no connection gets: journals, databases, files of applications, connections to elsewhere."""
MOST_PER_ADDRESS = 2000
RATE_OVER_S = 10.0
"""Rates of new connections are averages of so long: all clients of a server come back at once when it restarts."""
MAX_RATED = 10_000
"""Addresses whose rate is kept; those that came least recently are forgotten."""
CONNECTIONS = Limit("connections", "max_connections", "as many connections are open as may be")
PER_ADDRESS = Limit(
    "connections_per_address", "connections_per_address", "an address has as many connections open as it may"
)
LISTENER_CONNECTIONS = Limit(
    "listener_connections", "listener.NAME.max_connections", "a listener has as many connections open as it may"
)
CONNECT_RATE = Limit("connect_rate", "limits.connect_rate", "so many connections come in a second as may")
CONNECT_RATE_PER_ADDRESS = Limit(
    "connect_rate_per_address",
    "limits.connect_rate_per_address",
    "so many connections of an address come in a second as may",
)
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 5\r\nContent-Length: 0\r\n\r\n"
"""The answer to a connection that is one too many."""


class Admitted(_socket.socket):
    """An accepted connection, which is counted until it is closed."""

    __slots__ = ("_address", "_counts", "_limit", "client_tls")
    _limit: ConnectionLimit | None
    _address: str

    @property
    def peer_host(self) -> str | None:
        """The address of the other side, also when that is gone; None when it is not known."""
        return getattr(self, "_address", None)

    def counted(self, limit: ConnectionLimit, address: str) -> None:
        """Be counted by `limit`."""
        self._limit, self._address = limit, address

    def comes_from(self, host: str) -> bool:
        """Be counted for the address of a client for whom a proxy speaks; False when that has too many."""
        limit = self._limit
        if limit is None or host == self._address:
            return True
        if limit.moves(self._address, host):
            self._address = host
            return True
        return False

    def belongs_to(self, counts: ListenerCounts) -> None:
        """Be counted by a listener."""
        self._counts: ListenerCounts | None = counts
        counts.accepted += 1
        counts.open += 1

    def close(self) -> None:
        """Close, and count no more."""
        limit = getattr(self, "_limit", None)
        if limit is not None:
            self._limit = None
            limit.left(self._address)
        counts = getattr(self, "_counts", None)
        if counts is not None:
            self._counts = None
            counts.open -= 1
        super().close()

    def __del__(self) -> None:
        self.close()


@dataclass(slots=True)
class ListenerCounts:
    """What a listener counts.

    Attributes:
        accepted: connections that were let in; open: those of them that are not closed; refused: those over a limit.
        given: passed on to another worker, which counts them.
    """

    accepted: int = 0
    open: int = 0
    refused: int = 0
    given: int = 0


class ConnectionLimit:
    """Counts the connections that strangers opened, and refuses those over a limit.

    Attributes:
        limit: connections in all; 0 for as many as there are descriptors, less `RESERVE`.
        per_address: connections of one address; 0 for no limit. Addresses of this machine have none: behind a proxy on
            it, everybody comes from there.
        proxies: the same for the addresses of these.
    """

    def __init__(self, limit: int = 0, per_address: int = MOST_PER_ADDRESS) -> None:
        self.limit, self.per_address = limit, per_address
        self.proxies = TrustedNetworks()
        self.open = 0
        self._published: memoryview = memoryview(bytearray(4)).cast("I")
        self._by_address: dict[str, int] = {}
        self.rate(in_force())

    def rate(self, settings: LimitSettings) -> None:
        """Limit how many connections come in a second, from now on."""
        self._per_s, self._per_address_per_s = settings.connect_rate, settings.connect_rate_per_address
        self._rate = None if self._per_s is None else _bucket(self._per_s)
        self._rates: OrderedDict[str, Bucket] = OrderedDict()

    def admit(
        self, family: int, kind: int, fd: int, address: tuple[str, *tuple[int, ...]], is_given: bool = False
    ) -> Admitted | None:
        """The socket of a connection that was accepted; None when it was one too many, and is closed. Of one that
        another worker has given, that one has looked after the rates.
        """
        sock, host = Admitted(family, kind, 0, fd), address[0]
        sock.setblocking(False)
        if self._refused(sock, host, is_given):
            return None
        self._count(sock, host)
        return sock

    def may_come(self, host: str) -> bool:
        """Whether the rates let one more connection of an address in, which is spent then: for one that is admitted by
        another worker.
        """
        return _is_own(host) or not self._too_fast(host)

    def room(self) -> int:
        """How many connections more there may be."""
        return (self.limit or _most()) - self.open

    def adopt(self, fd: int, host: str) -> Admitted:
        """The socket of a connection that another process had admitted; `host` is its client's address."""
        sock = Admitted(-1, -1, -1, fd)
        sock.setblocking(False)
        self._count(sock, host)
        return sock

    def publish_in(self, cell: memoryview) -> None:
        """Let others know how many connections are open, in a number of 32 bits, from now on."""
        self._published = cell
        cell[0] = self.open

    def _count(self, sock: Admitted, host: str) -> None:
        self.open += 1
        self._published[0] = self.open
        self._add(host, 1)
        sock.counted(self, host)

    def left(self, host: str) -> None:
        """One of its connections was closed."""
        self.open -= 1
        self._published[0] = self.open
        self._add(host, -1)

    def moves(self, before: str, host: str) -> bool:
        """A connection of `before` is one of `host`, unless that has too many or comes too often, which is counted."""
        bucket = None if _is_own(host) else self._bucket_of(host)
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
        return not (_is_own(host) or self.proxies.has(host))

    def _refused(self, sock: Admitted, host: str, is_given: bool) -> bool:
        """Whether the connection was one too many, and was closed."""
        if self.open >= (self.limit or _most()):
            limit, rule = CONNECTIONS, f"{self.open} connections are open, and ulimit -n may allow no more"
        elif self._has_too_many(host):
            limit, rule = PER_ADDRESS, f"{self.per_address} connections of {host} are open"
        elif not (is_given or _is_own(host)) and (over := self._too_fast(host)):
            limit, rule = over, ""
        else:
            return False
        self._refuse(sock, host, limit, rule)
        return True

    def _refuse(self, sock: Admitted, host: str, limit: Limit, rule: str) -> None:
        with contextlib.suppress(OSError):
            sock.send(BUSY)  # a client of TLS sees the end only
        sock.close()
        limit.refused(f"a connection of {host}", rule)

    def _too_fast(self, host: str) -> Limit | None:
        """The rate that one more connection of a stranger would exceed; it is counted when there is none."""
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
        """That of an address; none where addresses have no rate, and for trusted proxies."""
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


def _most() -> int:
    return max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVE, 16)


@lru_cache(1024)
def _is_own(host: str) -> bool:
    return is_loopback(host)


open_connections = ConnectionLimit()
"""The limit of this process: all its ports share the descriptors."""
on_change(open_connections.rate)
