"""ba.timer: callbacks at intervals (spec: bas-api §7)."""

from __future__ import annotations

from typing import Any

from gevent import get_hub

from smqrt.lua.services import Services
from smqrt.lua.vm import Vm

MIN_INTERVAL_MS = 1.0


class Timers:
    """The active timers by handle. The watchers of the loop repeat by themselves: a late callback delays no later
    one."""

    def __init__(self, vm: Vm) -> None:
        self._vm = vm
        self._watchers: dict[int, Any] = {}

    def start(self, handle: int, tick_ref: int, interval_ms: float, now: bool) -> None:
        """Call the Lua function `tick_ref` with `handle` every `interval_ms`; with `now` in the next turn of the loop
        too."""
        self.stop(handle)
        seconds = max(interval_ms, MIN_INTERVAL_MS) / 1000
        watcher = get_hub().loop.timer(0.0 if now else seconds, seconds)
        watcher.start(self._vm.start, tick_ref, handle)
        self._watchers[handle] = watcher

    def stop(self, handle: int) -> bool:
        """End a timer; whether it was active."""
        watcher = self._watchers.pop(handle, None)
        if watcher is None:
            return False
        watcher.stop()
        watcher.close()
        return True

    def active(self, handle: int) -> bool:
        """Whether the timer is active."""
        return handle in self._watchers


def install(vm: Vm, services: Services) -> None:
    """Give Lua `ba.timer`."""
    timers = Timers(vm)
    vm.namespace("ba.timer", {"start": timers.start, "stop": timers.stop, "active": timers.active})
