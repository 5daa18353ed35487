"""The parts of the API that need nothing of a server around them."""

from __future__ import annotations

from smqrt.lua.api import codec, crypto, httpc, json, mqtt, servcon, sockets, system, thread, timer, tls, trace
from smqrt.lua.services import Services
from smqrt.lua.vm import Vm

PARTS = (trace, timer, thread, json, codec, crypto, system, tls, sockets, httpc, servcon, mqtt)


def install(vm: Vm, services: Services) -> None:
    """Give Lua `trace`, `tracep`, `print` and the helpers of `ba` (spec: bas-api §7)."""
    for part in PARTS:
        part.install(vm, services)
