"""URLs of servers."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

PORTS = {"http": 80, "ws": 80, "https": 443, "wss": 443}
"""The schemes of `Url` with their default ports."""

_PATH_SAFE = "/%:@!$&'()*+,;=~-._"
_QUERY_SAFE = _PATH_SAFE + "?[]{}|^`\\"  # as in browsers: servers accept these without encoding


class UrlParts(NamedTuple):
    """Parts of a URL; missing parts are empty or None.

    Attributes:
        scheme: in lower case.
        host: name or address, IPv6 without brackets.
        port: None when it is missing.
        path, query: as in the URL, not decoded.
        user, password: decoded.
    """

    scheme: str
    host: str
    port: int | None
    path: str
    query: str
    user: str | None
    password: str | None


def split_url(text: str) -> UrlParts:
    """Split a URL into its parts.

    Raises:
        ValueError: unbalanced brackets or an invalid port.
    """
    parts = urlsplit(text)
    user = None if parts.username is None else unquote(parts.username)
    password = None if parts.password is None else unquote(parts.password)
    try:
        port = parts.port
    except ValueError:  # its text has the port, which is a part of a password with a slash
        raise ValueError("its port must be a number from 0 to 65535") from None
    return UrlParts(parts.scheme.lower(), parts.hostname or "", port, parts.path, parts.query, user, password)


def without_password(text: str) -> str:
    """Return a URL or address for messages, with `***` in place of the password. It need not be valid."""
    head, separator, rest = text.rpartition("@")
    if not separator:
        return text
    start = head.find("://") + 3 if "://" in head else 0
    user, colon, _ = head[start:].partition(":")
    return f"{head[:start]}{user}{colon and ':***'}@{rest}"


@dataclass(frozen=True, slots=True)
class Url:
    """HTTP or WebSocket URL.

    Attributes:
        host: name (IDNA) or address, IPv6 without brackets.
        target: path and query as sent in a request, percent-encoded.
        user, password: from the URL, decoded.
    """

    scheme: str
    host: str
    port: int
    target: str
    user: str | None = None
    password: str | None = None

    @property
    def secure(self) -> bool:
        """Whether the connection uses TLS."""
        return self.scheme in ("https", "wss")

    @property
    def websocket(self) -> bool:
        """Whether it is a WebSocket URL."""
        return self.scheme in ("ws", "wss")

    @property
    def origin(self) -> tuple[bool, str, int]:
        """The scope of credentials and connections: TLS or not, host and port."""
        return self.secure, self.host, self.port

    @property
    def authority(self) -> str:
        """Host and port in the form of the Host field."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"


def parse_url(text: str, more_query: str = "") -> Url:
    """Parse an HTTP or WebSocket URL.

    Args:
        text: the URL.
        more_query: encoded parameters to append to its query.

    Raises:
        ValueError: it is not valid; the message does not contain the URL, which may have a password.
    """
    parts = split_url(text)
    if parts.scheme not in PORTS or not parts.host:
        raise ValueError(f"it must look like http://host:port/path (schemes: {', '.join(sorted(PORTS))})")
    if any(ord(c) <= 32 or c in "/\\\x7f" for c in parts.host):
        raise ValueError("its host must not contain spaces, slashes or control characters")
    host = parts.host if parts.host.isascii() else parts.host.encode("idna").decode()
    target = quote(parts.path or "/", safe=_PATH_SAFE)
    if query := "&".join(filter(None, [quote(parts.query, safe=_QUERY_SAFE), more_query])):
        target += f"?{query}"
    port = PORTS[parts.scheme] if parts.port is None else parts.port
    if not port:
        raise ValueError("its port must be 1 to 65535")
    return Url(parts.scheme, host, port, target, parts.user, parts.password)


def basic_authorization(user: str, password: str | None) -> str:
    """Return the value of an Authorization field for Basic authentication (RFC 7617)."""
    return "Basic " + base64.b64encode(f"{user}:{password or ''}".encode()).decode()
