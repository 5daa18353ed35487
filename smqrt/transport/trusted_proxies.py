"""Trusted proxies: the networks whose word on a client counts, and connections that begin with a PROXY header.

Nobody is believed by default. With networks given, a connection that comes from one of them may say whom it speaks for:
by the PROXY protocol, here, at listeners that ask for it; or by the header fields of HTTP (`smqrt.http.forwarded`).
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
from smqrt.wire.proxy_protocol import NoProxyHeader, ProxyHeader, parse

HEADER_S = 5.0
REFUSED = Limit("proxy_protocol", "proxy.trusted", "a connection begins with no PROXY header of a trusted proxy")
_KNOWN_ADDRESSES = 4096  # remembered, of those that were asked about
_PEEK_BYTES = 4096
_SENTENCE = b"This port is for the proxies of the setting proxy.trusted, and for the PROXY protocol.\n"
_FORBIDDEN = (
    b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Type: text/plain\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_SENTENCE), _SENTENCE)
)


class TrustedNetworks:
    """The networks whose proxies are believed.

    Args:
        entries: addresses and networks: `10.0.0.0/8`, `::1`.

    Raises:
        ValueError: an entry is none.
    """

    def __init__(self, entries: Iterable[str] = ()) -> None:
        self._networks: list[IPv4Network | IPv6Network] = [ip_network(entry) for entry in entries]
        self._known: dict[str, bool] = {}

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._networks)

    def has(self, host: str) -> bool:
        """Whether an address is in one of them."""
        known = self._known.get(host)
        if known is None:
            if len(self._known) >= _KNOWN_ADDRESSES:
                self._known.clear()
            known = self._known[host] = self._look_up(host)
        return known

    def _look_up(self, host: str) -> bool:
        try:
            address = ip_address(host.partition("%")[0])
        except ValueError:
            return False
        address = getattr(address, "ipv4_mapped", None) or address
        return any(address in network for network in self._networks if network.version == address.version)


class Proxied(Protocol):
    """An accepted socket that is counted for an address: `smqrt.transport.admission.Admitted`.

    Attributes:
        client_tls: its client speaks TLS with the proxy.
    """

    client_tls: bool

    def fileno(self) -> int: ...
    def recv(self, size_bytes: int, flags: int = 0, /) -> bytes: ...
    def send(self, data: bytes, /) -> int: ...
    def close(self) -> None: ...

    def comes_from(self, host: str) -> bool:
        """Count it for another address; False when that has too many."""
        ...


class ProxyHeaders:
    """Connections whose PROXY header is awaited: each has a watcher and a deadline and costs the others nothing.

    Args:
        trusted: gives the networks whose proxies are believed.
        on_accept: called with the socket and the client's address, as `Listener` does it.
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
        self._open: set[_Awaited] = set()

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, sock: Proxied, address: Address) -> None:
        """Take an accepted socket."""
        if not self.trusted().has(address[0]):
            _refuse(sock, address, "its address is in no network of proxy.trusted")
            return
        awaited = _Awaited(self, sock, address)
        self._open.add(awaited)
        self.deadlines.watch(awaited)
        awaited.look()

    def finished(self, awaited: _Awaited) -> None:
        """Called by one that ended either way."""
        self._open.discard(awaited)
        self.deadlines.forget(awaited)

    def close(self) -> None:
        """End all."""
        for awaited in list(self._open):
            awaited.end()
        self.deadlines.close()


class _Awaited:
    """A connection before its header is complete. Only bytes of the header are taken from the socket."""

    __slots__ = ("_address", "_data", "_headers", "_sock", "_watcher", "deadline_s")

    def __init__(self, headers: ProxyHeaders, sock: Proxied, address: Address) -> None:
        self._headers, self._sock, self._address = headers, sock, address
        self._data = b""
        self.deadline_s = monotonic() + headers.timeout_s
        self._watcher: Any = get_hub().loop.io(sock.fileno(), READ)
        self._watcher.start(self.look)

    def look(self) -> None:
        """Go on as far as the bytes reach, in a later turn when many do."""
        if self._headers.share.spent():
            self._watcher.stop()
            self._headers.share.later(self._go_on)
        else:
            self._receive()

    def _go_on(self) -> None:
        if self.deadline_s != NEVER:
            self._watcher.start(self.look)
            self._receive()

    def _receive(self) -> None:
        try:
            seen = self._sock.recv(_PEEK_BYTES, _socket.MSG_PEEK)
            header = parse(self._data + seen)
            taken = len(seen) if header is None else header.size_bytes - len(self._data)
            self._data += self._sock.recv(taken) if seen else b""
        except BlockingIOError:
            return
        except OSError:
            self.end()
        except NoProxyHeader as error:
            self._refuse(str(error))
        else:
            if header is not None:
                self._pass_on(header)
            elif not seen:
                self._refuse("it ended early")

    def _pass_on(self, header: ProxyHeader) -> None:
        self._forget()
        address: Address = header.client or self._address[:2]
        self._sock.client_tls = header.is_tls
        if header.client is None or self._sock.comes_from(header.client[0]):
            self._headers.on_accept(self._sock, address)
        else:
            self._sock.close()

    def _refuse(self, rule: str) -> None:
        self._forget()
        _refuse(self._sock, self._address, rule)

    def expired(self) -> None:
        """No header in time."""
        self._refuse(f"no whole header within {self._headers.timeout_s:g} s")

    def end(self) -> None:
        """Close."""
        self._forget()
        self._sock.close()

    def _forget(self) -> None:
        self.deadline_s = NEVER
        self._watcher.stop()
        self._watcher.close()
        self._headers.finished(self)


def _refuse(sock: Proxied, address: Address, rule: str) -> None:
    with suppress(OSError):
        sock.recv(_PEEK_BYTES)  # what is not read would reset the connection, answer and all
    with suppress(OSError):
        sock.send(_FORBIDDEN)
    sock.close()
    REFUSED.refused(f"a connection of {address[0]}", rule)
