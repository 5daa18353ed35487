"""ba.json: all of it is Lua, but for the pause in which others have their turn (spec: bas-api §7)."""

from __future__ import annotations

from smqrt.lua.services import Services
from smqrt.lua.vm import Vm


def install(vm: Vm, services: Services) -> None:
    """Give Lua `ba.json`."""
    vm.namespace("ba.json", {})
    vm.namespace("ba.jsondecode", {}, {"pause": _pause})
    vm.namespace("ba.jsonparser", {})


def _pause() -> None:
    """Nothing: as every blocking call, it lets others run when this activity has had its share of the loop."""
