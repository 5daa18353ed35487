"""ba.json: all of it is Lua (spec: bas-api §7)."""

from __future__ import annotations

from smqrt.lua.services import Services
from smqrt.lua.vm import Vm


def install(vm: Vm, services: Services) -> None:
    """Give Lua `ba.json`."""
    vm.namespace("ba.json", {})
    vm.namespace("ba.jsondecode", {"max_values": lambda: services.json_values})
    vm.namespace("ba.jsonparser", {})
