"""The address of a broker: `http(s)://` for raw SMQ over the morphed HTTP socket, `ws(s)://` for WebSocket."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit

from smqrt.errors import ArgumentError

_DEFAULT_PORTS = {"http": 80, "ws": 80, "https": 443, "wss": 443}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a broker is and how to speak to it.

    Attributes:
        host: name or address, IPv6 without brackets.
        target: path and query of the HTTP request.
        authorization: value of the Authorization field when the URL names a user, else None.
    """

    scheme: str
    host: str
    port: int
    target: str
    authorization: str | None = None

    @property
    def secure(self) -> bool:
        """Whether TLS is spoken."""
        return self.scheme in ("https", "wss")

    @property
    def websocket(self) -> bool:
        """Whether packets travel in WebSocket messages."""
        return self.scheme in ("ws", "wss")

    @property
    def authority(self) -> str:
        """Host and port as the Host field needs them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"


def parse_url(url: str) -> Endpoint:
    """The endpoint that `url` names.

    Raises:
        ArgumentError: the scheme is not http, https, ws or wss, or the host or port is missing or wrong.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ArgumentError(f"url {url!r} can't be read: {error}") from None
    scheme = parts.scheme.lower()
    if scheme not in _DEFAULT_PORTS or not parts.hostname:
        raise ArgumentError(f"url {url!r} must look like http://host:port/path (schemes: http, https, ws, wss)")
    target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._") + (f"?{parts.query}" if parts.query else "")
    if any(ord(c) <= 32 for c in parts.hostname + target):
        raise ArgumentError(f"url {url!r} must not contain spaces or control characters")
    return Endpoint(
        scheme,
        parts.hostname,
        _DEFAULT_PORTS[scheme] if port is None else port,
        target,
        _basic(parts.username, parts.password),
    )


def _basic(user: str | None, password: str | None) -> str | None:
    if user is None:
        return None
    secret = f"{unquote(user)}:{unquote(password or '')}".encode()
    return "Basic " + base64.b64encode(secret).decode()
