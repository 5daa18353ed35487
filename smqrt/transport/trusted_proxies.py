"""Trusted proxy networks, and connections that begin with a PROXY header.

No proxy is trusted by default. A connection from a trusted network may name the client behind the proxy: by the PROXY
protocol at listeners that require it, or by HTTP header fields (`smqrt.http.forwarded`).
"""

from __future__ import annotations

import _socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from time import monotonic
from typing import Any, Protocol

from gevent import get_hub

from smqrt.loop.readiness import READ
from smqrt.loop.scheduling import NEVER, Deadlines, share
from smqrt.settings.limit_register import Limit
from smqrt.transport.tls import Address
from smqrt.wire.proxy_protocol import NoProxyHeader, parse

HEADER_S = 5.0
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
        entries: addresses and networks: `10.0.0.0/8`, `::1`.

    Raises:
        ValueError: an invalid entry.
    """

    def __init__(self, entries: Iterable[str] = ()) -> None:
        self._networks: list[IPv4Network | IPv6Network] = [ip_network(entry) for entry in entries]
        self._cache: dict[str, bool] = {}

    def __bool__(self) -> bool:
        """Whether there are networks."""
        return bool(self._networks)

    def has(self, host: str) -> bool:
        """Return whether a network contains an address."""
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

    def comes_from(self, host: str) -> bool:
        """Count it for another address; return False when that is over a limit."""
        ...


class ProxyHeaders:
    """Accepted connections whose PROXY header is incomplete. Each has a watcher and a deadline, none a greenlet.

    Args:
        trusted: returns the networks of trusted proxies.
        on_accept: called with the socket and the client's address, as by `Listener`.
        timeout_s: for the header.
    """

    def __init__(
        self,
        trusted: Callable[[], TrustedNetworks],
        on_accept: Callable[[Any, Address], None],
        timeout_s: float = HEADER_S,
    ) -> None:
        self.trusted, self.on_accept, self.timeout_s = trusted, on_accept, timeout_s
        self.deadlines = Deadlines(min(0.25, timeout_s / 4))
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
        """Read what has arrived, in a later turn when this turn's time is used up."""
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
            seen = self._sock.recv(_PEEK_BYTES, _socket.MSG_PEEK)  # what follows the header belongs to the next layer
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
                if header.client is None or self._sock.comes_from(header.client[0]):
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
