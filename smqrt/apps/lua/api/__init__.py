"""Python halves of the Lua API: one module per namespace, or several.

The Lua halves are in smqrt/apps/lua/lib.
"""

from __future__ import annotations

from smqrt.apps.lua.api import (
    acme,
    codec,
    crypto,
    httpc,
    luasocket,
    luasql,
    mqtt,
    mqttbroker,
    plain,
    processes,
    sockets,
    sparkplug,
    system,
    xml,
)
from smqrt.apps.lua.services import Services
from smqrt.apps.lua.vm import Vm

PARTS = (
    system,
    codec,
    sockets,
    crypto,
    processes,
    plain,
    httpc,
    mqtt,
    mqttbroker,
    luasql,
    luasocket,
    xml,
    sparkplug,
    acme,
)
"""Modules that need no running server. The order matters: Lua halves use those before them."""


def install(vm: Vm, services: Services) -> None:
    """Give Lua `trace`, `tracep`, `print`, the helpers of `ba` (spec: bas-api §7), sockets and clients."""
    for part in PARTS:
        part.install(vm, services)
