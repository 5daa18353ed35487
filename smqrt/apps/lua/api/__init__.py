"""The Python halves of the API that Lua applications have: one module per namespace. The Lua halves are in lua/lib."""

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
    tls,
    tpm,
    xml,
)
from smqrt.apps.lua.services import Services
from smqrt.apps.lua.vm import Vm

PARTS = (
    system,
    codec,
    tls,
    sockets,
    crypto,
    processes,
    plain,
    tpm,
    httpc,
    mqtt,
    mqttbroker,
    luasql,
    luasocket,
    xml,
    sparkplug,
    acme,
)
"""What needs nothing of a server around it."""


def install(vm: Vm, services: Services) -> None:
    """Give Lua `trace`, `tracep`, `print`, the helpers of `ba` (spec: bas-api §7), sockets and clients."""
    for part in PARTS:
        part.install(vm, services)
