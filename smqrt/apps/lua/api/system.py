"""The server process as Lua sees it: version, clock, trace and output, and work beside the request: ba.timer,
ba.thread, ba.sleep, ba.exec (spec: bas-api §7, §8.1, runtime §6, §7).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address
from typing import Any, TextIO

from gevent import get_hub, subprocess

from smqrt.apps.lua.bridge import Function, LuaValues
from smqrt.apps.lua.services import Services
from smqrt.apps.lua.vm import Vm, clock_ms, sleep_ms
from smqrt.errors import ArgumentError
from smqrt.http.tracelogger import FOR_VIEWERS
from smqrt.printable import PrintableFormatter
from smqrt.process.current_application import AppScope, current_app
from smqrt.settings.limit_register import Limit
from smqrt.settings.limits import in_force

BAS_VERSION = 5803  # the most that an application is known to demand; a higher one promises functions we don't know
BUILD_DATE = b"2026-11-21"
SHOWN_PRIORITY = 7  # messages with a larger number are not shown; 0 is the most important


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


class _LastResort(logging.StreamHandler[TextIO]):
    """Writes traces to stderr until logging is set up."""

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`."""
        if not logging.getLogger().handlers:
            super().emit(record)


def _tracer(trace_log: logging.Logger) -> Callable[[int, bytes, bool], None]:
    """What `trace` writes to: the log, and stderr when nobody set up logging."""
    if not trace_log.hasHandlers():
        handler = _LastResort()
        handler.setFormatter(PrintableFormatter())
        trace_log.addHandler(handler)
        trace_log.setLevel(logging.INFO)

    def trace(priority: int, text: bytes, is_for_viewers: bool) -> None:
        if priority <= SHOWN_PRIORITY:
            extra = {FOR_VIEWERS: True} if is_for_viewers else None
            trace_log.info("%s", text.decode("utf-8", "replace"), extra=extra)

    return trace


def install_system(vm: Vm, services: Services) -> None:
    """Give Lua `trace`, `tracep` and `print`, `ba.version`, `ba.cmpaddr`, `ba.datetime` and the byte order functions of
    `ba.socket`."""
    vm.namespace("ba.trace", {"trace": _tracer(services.log), "print": services.output})

    def version() -> tuple[int, int, bytes]:
        return BAS_VERSION, vm.number, BUILD_DATE

    def port(secure: bool) -> int | None:
        return (services.https_port if secure else services.http_port) or None

    system: dict[str, Function] = {"version": version, "cmpaddr": same_address, "port": port}
    vm.namespace("ba.system", system)
    vm.namespace("ba.socket", {})
    vm.namespace("ba.datetime", {"now": now})
    _install_scheduling(vm)


MIN_INTERVAL_MS = 1.0
MAX_OUTPUT_BYTES = 64 * 1024


APP_TIMERS = Limit("app_timers", "limits.app_timers", "an application has as many active timers as it may")


class Timers:
    """The active timers by handle. The watchers of the loop repeat by themselves: a late callback delays no later
    one."""

    def __init__(self, vm: Vm) -> None:
        self._vm = vm
        self._watchers: dict[int, Any] = {}
        self._owners: dict[int, AppScope | None] = {}
        self._counts: Counter[AppScope | None] = Counter()

    def start(self, handle: int, tick_ref: int, interval_ms: float, now: bool) -> None:
        """Call the Lua function `tick_ref` with `handle` every `interval_ms`; with `now` in the next turn of the loop
        too.

        Raises:
            ArgumentError: the application has as many as it may.
        """
        self.stop(handle)
        self._count(handle)
        seconds = max(interval_ms, MIN_INTERVAL_MS) / 1000
        watcher = get_hub().loop.timer(0.0 if now else seconds, seconds)
        watcher.start(self._vm.start, tick_ref, handle)
        self._watchers[handle] = watcher

    def _count(self, handle: int) -> None:
        """Count a timer for the application whose page or .preload sets it; those of callbacks count together."""
        owner, most = current_app.get(), in_force().app_timers
        if most is not None and self._counts[owner] >= most:
            name = owner.name if owner is not None else ""
            APP_TIMERS.refused(f"a timer of {name or 'an application'}")
            raise ArgumentError(f"timer:set: {most} timers are active; see the setting limits.app_timers")
        self._owners[handle] = owner
        self._counts[owner] += 1

    def stop(self, handle: int) -> bool:
        """End a timer; whether it was active."""
        watcher = self._watchers.pop(handle, None)
        if watcher is None:
            return False
        owner = self._owners.pop(handle)
        self._counts[owner] -= 1
        if not self._counts[owner]:
            del self._counts[owner]
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
            assert process.stdout is not None
            output: bytes = process.stdout.read(MAX_OUTPUT_BYTES)
            while process.stdout.read(MAX_OUTPUT_BYTES):  # the rest, so that the command never waits for a reader
                pass
            code = process.wait()
        except BaseException:
            process.kill()
            raise
    return (output, code) if code == 0 else (None, code, output)


def _install_scheduling(vm: Vm) -> None:
    """Give Lua `ba.timer`, `ba.thread`, `ba.sleep`, `ba.clock` and `ba.exec`."""
    timers = Timers(vm)

    def soon(ref: int, handle: int) -> None:
        get_hub().loop.run_callback(vm.start, ref, handle)

    vm.namespace("ba.timer", {"start": timers.start, "stop": timers.stop, "active": timers.active})
    vm.namespace("ba.thread", {"clock": clock_ms, "soon": soon}, {"exec": execute}, parking={"sleep": sleep_ms})
