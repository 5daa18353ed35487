"""The trace logger for Lua: `ba.create.tracelogger` (spec: bas-api §4, §17)."""

from __future__ import annotations

import itertools
from weakref import WeakKeyDictionary, WeakSet

from gevent import get_hub

from smqrt.apps.lua.api.dirs import DirsBinding
from smqrt.apps.lua.bridge import LuaValue, from_utf8, methods, options_of, utf8
from smqrt.apps.lua.services import Services
from smqrt.apps.lua.vm import LuaFunction, Vm
from smqrt.http.trace_lines import QUESTION, Line, Lines
from smqrt.http.tracelogger import FRAME_BYTES, NAME, OPTIONS, WAITING_BYTES, TraceLogger
from smqrt.process.current_application import close_with_app
from smqrt.workers.fd_channel import Message
from smqrt.workers.worker_rpc import News


class _Listener:
    """The callback of `ontrace`, and the lines that wait for it.

    Args:
        vm: the runtime.
        ref: the Lua function that takes the lines, see lib/ba/tracelogger.lua.
        handle: of the trace logger.
        number: of this listener; a later one has another.
    """

    def __init__(self, vm: Vm, ref: int, handle: int, number: int) -> None:
        self._vm, self._handle, self.number = vm, handle, number
        self._function = LuaFunction(vm, ref)
        self._lines = Lines(WAITING_BYTES)
        self._is_busy = False

    def add(self, line: Line) -> None:
        """A line for the callback, which is called in the next turn of the loop: whoever traces may be in Lua."""
        self._lines.add(line)
        if not self._is_busy:
            self._is_busy = True
            get_hub().loop.run_callback(self._vm.start, self._function.ref, self._handle, self.number)

    def take(self) -> bytes | None:
        """Some of the lines; None when there are none, and the next one calls the callback again."""
        if not self._lines:
            self._is_busy = False
            return None
        left_out = self._lines.take_dropped()
        missing = b"%d lines were left out: the callback is too slow\n" % left_out if left_out else b""
        return missing + b"".join(line.data for line in self._lines.take(FRAME_BYTES))


class TraceLoggers:
    """All trace loggers of a server."""

    def __init__(self, vm: Vm, services: Services, dirs: DirsBinding) -> None:
        self._vm = vm
        self._next_number = itertools.count(1).__next__
        self._listeners: WeakKeyDictionary[TraceLogger, _Listener] = WeakKeyDictionary()
        self._services = services
        self._dirs = dirs
        self._all: WeakSet[TraceLogger] = WeakSet()

    def new(self, name: bytes, priority: int) -> int:
        services = self._services
        tracelogger = TraceLogger(from_utf8(name) or NAME, priority, services.http_server, fleet=services.fleet)
        self._all.add(tracelogger)
        close_with_app(tracelogger)
        return self._dirs.register(tracelogger)

    def configure(self, handle: int, *names_and_values: LuaValue) -> bool:
        self._of(handle).configure(options_of(names_and_values))
        return True

    def ontrace(self, handle: int, ref: int | None = None) -> bool:
        """Give the lines of a trace logger to a Lua function from now on; None ends that."""
        tracelogger = self._of(handle)
        if ref is None:
            self._listeners.pop(tracelogger, None)
            tracelogger.on_line = None
            return True
        listener = self._listeners[tracelogger] = _Listener(self._vm, ref, handle, self._next_number())
        tracelogger.on_line = listener.add
        return True

    def heard(self, handle: int, number: int) -> bytes | None:
        """Lines for the callback; None when there are none, or it has been replaced."""
        listener = self._listeners.get(self._of(handle))
        return listener.take() if listener and listener.number == number else None

    def ended(self, handle: int, number: int) -> None:
        """A callback has failed."""
        listener = self._listeners.get(self._of(handle))
        if listener and listener.number == number:
            self.ontrace(handle)

    def _of(self, handle: int) -> TraceLogger:
        tracelogger = self._dirs.directory(handle)
        assert isinstance(tracelogger, TraceLogger)
        return tracelogger

    def lines(self, question: Message) -> News:
        """Yields what the trace logger of another worker, which has a viewer, asks of the one with its address."""
        for one in list(self._all):
            if one.baseuri() == question["uri"]:
                yield from one.lines(question)
                return

    def close(self) -> None:
        """Disconnect all viewers."""
        for tracelogger in list(self._all):
            tracelogger.close()


def install_tracelogger(vm: Vm, services: Services, dirs: DirsBinding) -> TraceLoggers:
    """Give Lua trace loggers; return what ends them."""
    loggers = TraceLoggers(vm, services, dirs)
    if services.fleet is not None:
        services.fleet.desk.news[QUESTION] = loggers.lines
    names = tuple(map(utf8, OPTIONS))
    functions = methods(loggers, "new configure ontrace heard ended")
    vm.namespace("ba.tracelogger", functions | {"options": lambda: names})
    return loggers
