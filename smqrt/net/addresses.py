"""From names to addresses, without holding up the loop."""

from __future__ import annotations

import _socket
from typing import Any

from gevent import get_hub

from smqrt.errors import StreamError

Info = tuple[int, Any]
"""Address family and what `connect` or `bind` takes."""


def resolve(
    host: str, port: int, ipv6: bool = False, kind: int = _socket.SOCK_STREAM, literal: bool = False
) -> list[Info]:
    """The addresses of `host`, those to try first in front; blocks the greenlet for a name.

    ipv6: IPv6 addresses only; otherwise IPv4 comes first.
    literal: `host` is an IP address; then this never blocks.

    Raises:
        StreamError: "cannotresolve"; "cannotconnect" for a port that is none.
    """
    if not 0 <= port <= 65535:
        raise StreamError("cannotconnect", f"port {port}; a port is 0 to 65535")
    family = _socket.AF_INET6 if ipv6 else _socket.AF_UNSPEC
    found = _literal(host, port, family, kind)
    if literal and not found:
        raise StreamError("cannotresolve", f"{host}: no IP address")
    found = found or _looked_up(host, port, family, kind)
    return sorted(((entry[0], entry[4]) for entry in found), key=lambda info: info[0] != _socket.AF_INET)


def _literal(host: str, port: int, family: int, kind: int) -> list[Any]:
    try:
        return _socket.getaddrinfo(host.strip("[]"), port, family, kind, 0, _socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return []


def _looked_up(host: str, port: int, family: int, kind: int) -> list[Any]:
    try:
        found: list[Any] = get_hub().resolver.getaddrinfo(host, port, family, kind, 0, 0)
    except (OSError, UnicodeError) as error:
        raise StreamError("cannotresolve", f"{host}: {error}") from None
    return found
