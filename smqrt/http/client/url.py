"""Where a request goes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote, quote_from_bytes, unquote, urljoin, urlsplit

from smqrt.errors import StreamError

_PORTS = {"http": 80, "ws": 80, "https": 443, "wss": 443}
_PATH_SAFE = "/%:@!$&'()*+,;=~-._"
_QUERY_SAFE = _PATH_SAFE + "?[]{}|^`\\"  # as browsers have it: what servers take is left as it is

Pairs = Iterable[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Url:
    """An address of HTTP or WebSocket.

    Attributes:
        host: name (IDNA) or address, IPv6 without brackets.
        target: path and query as they are sent, percent-encoded.
        user, password: what the address names, decoded.
    """

    scheme: str
    host: str
    port: int
    target: str
    user: str | None = None
    password: str | None = None

    @property
    def secure(self) -> bool:
        """Whether TLS is spoken."""
        return self.scheme in ("https", "wss")

    @property
    def websocket(self) -> bool:
        """Whether an upgrade to WebSocket is asked for."""
        return self.scheme in ("ws", "wss")

    @property
    def origin(self) -> tuple[bool, str, int]:
        """What credentials and connections are for."""
        return self.secure, self.host, self.port

    @property
    def authority(self) -> str:
        """Host and port as the Host field needs them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"

    def join(self, location: str) -> Url:
        """What a reference found at this address means.

        Raises:
            StreamError: "invalidurl".
        """
        try:
            return parse(urljoin(str(self), location))
        except ValueError:
            raise StreamError("invalidurl", location) from None


def parse(url: str, query: Pairs = ()) -> Url:
    """Read an address and append parameters to its query.

    Raises:
        StreamError: "invalidurl".
    """
    try:
        parts = urlsplit(url)
        host = _host(parts.hostname or "")
        port = parts.port
        known = _PORTS[parts.scheme.lower()]
    except (ValueError, KeyError):
        raise StreamError("invalidurl", url) from None
    if not host or any(ord(c) < 32 or ord(c) == 127 for c in url):
        raise StreamError("invalidurl", url)
    target = quote(parts.path or "/", safe=_PATH_SAFE)
    if asked := "&".join(filter(None, [quote(parts.query, safe=_QUERY_SAFE), encode(query)])):
        target += f"?{asked}"
    user = None if parts.username is None else unquote(parts.username)
    password = None if parts.password is None else unquote(parts.password)
    return Url(parts.scheme.lower(), host, known if port is None else port, target, user, password)


def encode(pairs: Pairs) -> str:
    """Parameters as a query or a form carries them."""
    return "&".join(f"{quote_from_bytes(name, safe='')}={quote_from_bytes(value, safe='')}" for name, value in pairs)


def _host(host: str) -> str:
    if any(c in host for c in " %/\\"):
        raise ValueError(host)
    return host if host.isascii() else host.encode("idna").decode()
