"""`sock:setoption` (spec: bas-api §8.2)."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from smqrt.errors import ArgumentError


def set_option(end: Any, name: bytes, *values: Any) -> None:
    """Set an option of the socket behind an `End`. Raises ArgumentError for an unknown one, OSError, StreamError."""
    setter = _SETTERS.get(name)
    if setter is None:
        known = ", ".join(word.decode() for word in _SETTERS)
        raise ArgumentError(f"setoption: unknown option '{name.decode('utf-8', 'replace')}'; there are {known}")
    if not values or not isinstance(values[0], bool):
        raise ArgumentError(f"setoption: '{name.decode()}' takes true or false")
    setter(end, *values)


def _keepalive(end: Any, is_on: bool, idle_s: int | None = None, interval_s: int | None = None) -> None:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, int(is_on))
    if is_on and idle_s is not None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _seconds(idle_s))
    if is_on and interval_s is not None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _seconds(interval_s))


def _seconds(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= 32767:
        raise ArgumentError(f"setoption: 'keepalive' takes seconds, 1 to 32767, not {value!r}")
    return int(value)


def _membership(end: Any, is_on: bool, group: bytes = b"", interface: bytes | None = None) -> None:
    try:
        packed = b"".join(socket.inet_aton(str(name, "ascii")) for name in (group, interface or b"0.0.0.0"))
    except (OSError, ValueError, TypeError):
        raise ArgumentError("setoption: 'ip-membership' takes true or false and an IPv4 group address") from None
    end.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP if is_on else socket.IP_DROP_MEMBERSHIP, packed)


def _flag(level: int, option: int) -> Callable[..., None]:
    def set_flag(end: Any, is_on: bool, *_: Any) -> None:
        end.setsockopt(level, option, int(is_on))

    return set_flag


_SETTERS: dict[bytes, Callable[..., None]] = {
    b"keepalive": _keepalive,
    b"tcp-nodelay": _flag(socket.IPPROTO_TCP, socket.TCP_NODELAY),
    b"broadcast": _flag(socket.SOL_SOCKET, socket.SO_BROADCAST),
    b"dontroute": _flag(socket.SOL_SOCKET, socket.SO_DONTROUTE),
    b"ip-membership": _membership,
}
