"""The address of a broker."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from smqrt.errors import ArgumentError

_SCHEMES = {"mqtt": False, "tcp": False, "mqtts": True, "ssl": True}


@dataclass(frozen=True)
class Address:
    """Where a broker is. What the address does not tell is None.

    Attributes:
        host: name or IP address.
    """

    host: str
    port: int | None = None
    secure: bool | None = None
    username: str | None = None
    password: str | None = None

    def __str__(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host


def parse_address(text: str) -> Address:
    """The address in `mqtt://user:password@host:port`, `mqtts://host`, `host:port` or `host`.

    Raises:
        ArgumentError: it is none.
    """
    if text.count(":") > 1 and "://" not in text and not text.startswith("["):
        return Address(text)  # an IPv6 address
    scheme, _, _ = text.rpartition("://")
    try:
        parts = urlsplit(text if scheme else f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ArgumentError(f"address {text!r} is none: {error}") from None
    if not host or parts.path.strip("/") or parts.query or (scheme and scheme.lower() not in _SCHEMES):
        raise ArgumentError(f"address {text!r} must be a host name, host:port, or mqtt(s)://host:port")
    return Address(host, port, _SCHEMES.get(scheme.lower()), _plain(parts.username), _plain(parts.password))


def _plain(text: str | None) -> str | None:
    return None if text is None else unquote(text)
