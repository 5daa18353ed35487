"""Limit of open connections: in all, so that descriptors are left for files, and per address."""

from __future__ import annotations

import _socket
import contextlib
import resource
from functools import lru_cache

from smqrt.net.origins import is_loopback
from smqrt.net.refusals import Refusals

RESERVE = 128
"""Descriptors that no connection gets: journals, databases, files of applications, connections to elsewhere."""
PER_ADDRESS = 2000
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 5\r\nContent-Length: 0\r\n\r\n"


class Admitted(_socket.socket):
    """An accepted connection, which is counted until it is closed."""

    __slots__ = ("_address", "_gate")
    _gate: Gate | None

    def counted(self, gate: Gate, address: str) -> None:
        """Be counted by `gate`."""
        self._gate, self._address = gate, address

    def close(self) -> None:
        """Close, and count no more."""
        gate = getattr(self, "_gate", None)
        if gate is not None:
            self._gate = None
            gate.left(self._address)
        super().close()

    def __del__(self) -> None:
        self.close()


class Gate:
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


connections = Gate()
"""The gate of this process: all its ports share the descriptors."""
