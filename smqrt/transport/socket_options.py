"""Options of sockets by the names of `sock:setoption` (spec: bas-api §8.2)."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, Protocol

from smqrt.errors import ArgumentError


class OptionSocket(Protocol):
    """A socket whose options can be set."""

    def setsockopt(self, level: int, option: int, value: int | bytes, /) -> object:
        """Set an option."""


def set_option(sock: OptionSocket, name: str, *values: object) -> None:
    """Set an option of a socket.

    Args:
        sock: the socket.
        name: a name of `_SETTERS`.
        values: true or false, then what the option takes besides.

    Raises:
        ArgumentError: there is no option of that name, or a value is wrong.
        OSError: the system refuses it.
    """
    setter = _SETTERS.get(name)
    if setter is None:
        raise ArgumentError(f"setoption: unknown option '{name}'; there are {', '.join(_SETTERS)}")
    if not values or not isinstance(values[0], bool):
        raise ArgumentError(f"setoption: '{name}' takes true or false")
    setter(sock, *values)


def _keepalive(sock: OptionSocket, is_on: bool, idle_s: int | None = None, interval_s: int | None = None) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, int(is_on))
    if is_on and idle_s is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _seconds(idle_s))
    if is_on and interval_s is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _seconds(interval_s))


def _seconds(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= 32767:
        raise ArgumentError(f"setoption: 'keepalive' takes seconds, 1 to 32767, not {value!r}")
    return int(value)


def _membership(
    sock: OptionSocket, is_on: bool, group: str | bytes = b"", interface: str | bytes | None = None
) -> None:
    try:
        names = (name.encode() if isinstance(name, str) else name for name in (group, interface or b"0.0.0.0"))
        packed = b"".join(socket.inet_aton(str(name, "ascii")) for name in names)
    except (OSError, ValueError, TypeError):
        raise ArgumentError("setoption: 'ip-membership' takes true or false and an IPv4 group address") from None
    sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP if is_on else socket.IP_DROP_MEMBERSHIP, packed)


def _flag(level: int, option: int) -> Callable[..., None]:
    def set_flag(sock: OptionSocket, is_on: bool, *_: Any) -> None:
        sock.setsockopt(level, option, int(is_on))

    return set_flag


_NODELAY = _flag(socket.IPPROTO_TCP, socket.TCP_NODELAY)
_SETTERS: dict[str, Callable[..., None]] = {
    "keepalive": _keepalive,
    "tcp-nodelay": _NODELAY,
    "nodelay": _NODELAY,
    "broadcast": _flag(socket.SOL_SOCKET, socket.SO_BROADCAST),
    "dontroute": _flag(socket.SOL_SOCKET, socket.SO_DONTROUTE),
    "ip-membership": _membership,
}
