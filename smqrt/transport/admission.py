"""Limits of accepted connections: in all, per address, per listener and per second.

A connection over a limit gets status 503; it is counted and logged.
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
"""Descriptors kept free for journals, databases, files of applications and outgoing connections."""
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

    @property
    def peer_host(self) -> str | None:
        """The peer's address, also after it has disconnected; None when unknown."""
        return getattr(self, "_address", None)

    def count_by(self, limit: ConnectionLimit, address: str) -> None:
        """Let `limit` count the connection until it is closed."""
        self._limit, self._address = limit, address

    def comes_from(self, host: str) -> bool:
        """Count the connection for the address of the client behind a proxy; return False when that is over a limit."""
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
        self.close()


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
        per_address: maximum of connections per address; 0 for no limit. Loopback addresses have no limit, because all
            clients behind a local proxy have one.
        proxies: trusted proxies; their addresses have no limit either.
        open: number of open connections.
    """

    def __init__(self, limit: int = 0, per_address: int = MAX_PER_ADDRESS) -> None:
        self.limit, self.per_address = limit, per_address
        self.proxies = TrustedNetworks()
        self.open = 0
        self._shared_count: memoryview = memoryview(bytearray(4)).cast("I")
        self._by_address: dict[str, int] = {}
        self.rate(in_force())

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
            family, kind: of the socket.
            fd: its descriptor.
            address: the client's address.
            is_given: accepted by another worker, which has applied the rates.
        """
        sock, host = Admitted(family, kind, 0, fd), address[0]
        sock.setblocking(False)
        if self.open >= (self.limit or _max_open()):
            limit, rule = CONNECTIONS, f"{self.open} connections are open, and ulimit -n may allow no more"
        elif self._has_too_many(host):
            limit, rule = PER_ADDRESS, f"{self.per_address} connections of {host} are open"
        elif not (is_given or _is_loopback(host)) and (exceeded := self._exceeded_rate(host)):
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
        """Count a new connection of an address, which another worker admits; return False when it is over a rate."""
        return _is_loopback(host) or not self._exceeded_rate(host)

    def room(self) -> int:
        """Return how many more connections may be open."""
        return (self.limit or _max_open()) - self.open

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
        self._add(host, 1)
        sock.count_by(self, host)

    def release(self, host: str) -> None:
        """Stop counting a closed connection of an address."""
        self.open -= 1
        self._shared_count[0] = self.open
        self._add(host, -1)

    def reassign(self, before: str, host: str) -> bool:
        """Count a connection of `before` for `host`; return False when that is over a limit."""
        bucket = None if _is_loopback(host) else self._bucket_of(host)
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
        return not (_is_loopback(host) or self.proxies.has(host))

    def _exceeded_rate(self, host: str) -> Limit | None:
        """Return the rate that one more connection exceeds; count the connection when there is none."""
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
    return max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVE, 16)


_is_loopback = lru_cache(1024)(is_loopback)


open_connections = ConnectionLimit()
"""The limit of this process, whose ports share the descriptors."""
on_change(open_connections.rate)
