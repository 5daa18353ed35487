"""The trace logger for Lua: `ba.create.tracelogger` (spec: bas-api §4, §17)."""

from __future__ import annotations

from weakref import WeakSet

from smqrt.app_folder import close_with_app
from smqrt.http.trace_workers import QUESTION
from smqrt.http.tracelogger import NAME, OPTIONS, TraceLogger
from smqrt.lua.api.dirs import DirsBinding
from smqrt.lua.bridge import Function, LuaValue, from_utf8, options_of, utf8
from smqrt.lua.services import Services
from smqrt.lua.vm import Vm
from smqrt.net.fd_channel import Message
from smqrt.net.fleet import News


class TraceLoggers:
    """All trace loggers of a server."""

    def __init__(self, services: Services, dirs: DirsBinding) -> None:
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
        tracelogger = self._dirs.directory(handle)
        assert isinstance(tracelogger, TraceLogger)
        tracelogger.configure(options_of(names_and_values))
        return True

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


def install(vm: Vm, services: Services, dirs: DirsBinding) -> TraceLoggers:
    """Give Lua trace loggers; return what ends them."""
    loggers = TraceLoggers(services, dirs)
    if services.fleet is not None:
        services.fleet.desk.news[QUESTION] = loggers.lines
    names = tuple(map(utf8, OPTIONS))
    functions: dict[str, Function] = {"new": loggers.new, "configure": loggers.configure, "options": lambda: names}
    vm.namespace("ba.tracelogger", functions)
    return loggers
