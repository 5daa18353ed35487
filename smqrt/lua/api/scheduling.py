"""Time, and work beside the request: ba.timer, ba.thread, ba.sleep, ba.clock and ba.exec (spec: bas-api §7, runtime
§6)."""

from __future__ import annotations

from typing import Any

from gevent import get_hub, subprocess

from smqrt.lua.bridge import LuaValues
from smqrt.lua.services import Services
from smqrt.lua.vm import Vm, clock_ms, sleep_ms

MIN_INTERVAL_MS = 1.0
MAX_OUTPUT_BYTES = 64 * 1024


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


def execute(command: bytes) -> LuaValues:
    """Run a shell command and return its output (stdout and stderr, at most 64 KiB) and exit code.

    Returns None, code, output when the command failed.
    """
    with subprocess.Popen(command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            output = _head_of(process)
            code = process.wait()
        except BaseException:
            process.kill()
            raise
    return (output, code) if code == 0 else (None, code, output)


def _head_of(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    head: bytes = process.stdout.read(MAX_OUTPUT_BYTES)
    while process.stdout.read(MAX_OUTPUT_BYTES):  # the rest, so that the command never waits for a reader
        pass
    return head


def install(vm: Vm, services: Services) -> None:
    """Give Lua `ba.timer`, `ba.thread`, `ba.sleep`, `ba.clock` and `ba.exec`."""
    timers = Timers(vm)

    def soon(ref: int, handle: int) -> None:
        get_hub().loop.run_callback(vm.start, ref, handle)

    vm.namespace("ba.timer", {"start": timers.start, "stop": timers.stop, "active": timers.active})
    vm.namespace("ba.thread", {"clock": clock_ms, "soon": soon}, {"exec": execute}, parking={"sleep": sleep_ms})
