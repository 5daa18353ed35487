"""The Lua runtime of a server: Lua 5.4 or 5.5 (decision 0040), made safe under gevent (decision 0003).

Lua functions and tables never cross to Python: they stay in a table on the Lua side, and Python knows them by an
integer reference. From Python to Lua cross only None, bool, int, float and bytes.
"""

from __future__ import annotations

import atexit
import logging
import re
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module, resources
from typing import Any
from weakref import WeakSet

from gevent import get_hub
from lupa import __version__ as lupa_version

from smqrt.apps.lua.activity import Activities, LuaThread
from smqrt.apps.lua.bridge import Function, LuaError, LuaValue, LuaValues, Op, encoded, guarded
from smqrt.errors import StartError
from smqrt.loop.log_limits import ErrorLimit
from smqrt.loop.readiness import TimedDeferred

log = logging.getLogger("smqrt.lua")

CORE = ("arguments", "types", "coroutine", "overtime", "activity", "namespace", "table_codec", "sandbox", "require")
"""The parts of the Lua half, in the order they build on each other."""

VERSION = "5.4"
"""Of Lua, when none is asked for."""

_LIBRARY_NAME = re.compile(r"[A-Za-z0-9_]+(?:[./][A-Za-z0-9_]+)*")
_NOT_FOR_APPLICATIONS = ("core", "ba")  # run by the vm itself, no modules for applications


def lupa_of(version: str) -> Any:
    """Return lupa's module with a version of Lua, such as "5.4".

    Raises:
        StartError: the lupa that is installed has none.
    """
    try:
        return import_module(f"lupa.lua{version.replace('.', '')}")
    except ImportError:
        raise StartError(
            f"lua.version: lupa {lupa_version} has no Lua {version}. Update it (pip install -U lupa), or remove the "
            "setting."
        ) from None


def chunk_name(name: str) -> bytes:
    """The Lua chunk name of library `name`; the prefix tells library frames from those of applications."""
    return f"@smqrt/apps/lua/lib/{_library_path(name)}".encode()


@cache
def library_source(name: str) -> bytes | None:
    """Return the source of a library in `smqrt/apps/lua/lib`, dots or slashes between its parts, or None."""
    if not _LIBRARY_NAME.fullmatch(name):
        return None
    file = resources.files("smqrt.apps.lua") / "lib" / _library_path(name)
    return file.read_bytes() if file.is_file() else None


def requirable_source(name: str) -> bytes | None:
    """The same for what an application may `require`."""
    return None if re.split(r"[./]", name)[0] in _NOT_FOR_APPLICATIONS else library_source(name)


def _library_path(name: str) -> str:
    return name.replace(".", "/") + ".lua"


def clock_ms() -> int:
    """Milliseconds of a clock that never goes back."""
    return time.monotonic_ns() // 1_000_000


class Sleep(TimedDeferred[None]):
    """Resolved when the time is over."""

    __slots__ = ()

    def _expired(self) -> None:
        self.resolve()


def pause() -> None:
    """Nothing: as every blocking call, it lets others run when this activity has had its share of the loop."""


def sleep_ms(ms: float) -> Sleep:
    """Park the activity for that time; others run meanwhile."""
    return Sleep(max(ms, 0) / 1000)


class Vm:
    """One Lua state with its activities.

    `run`, `call` and `start` run a Lua function by its reference, see `Activities`; `stop` ends all that wait.

    Args:
        version: of Lua, `VERSION` by default.

    Attributes:
        lupa: lupa's module with that version.
        number: the version as a number: 504.

    Raises:
        StartError: lupa has no such version.
    """

    def __init__(self, version: str | None = None) -> None:
        self.lupa = lupa_of(version or VERSION)
        major, minor = self.lupa.LUA_VERSION
        self.number = 100 * major + minor
        runtime = self.lupa.LuaRuntime(
            encoding=None,
            register_eval=False,
            register_builtins=False,
            unpack_returned_tuples=True,
            attribute_handlers=(_deny, _deny),
        )
        core = _load_core(runtime)
        self._failure, self._refs = core[b"failure"], dict(core[b"entries"])
        loop, first = core[b"loop"], self._refs[b"first"]
        activities = Activities(lambda: loop.coroutine(first), self._refs[b"close"], self._failure)
        self.activities = activities
        self.run, self.call, self.start, self.stop = activities.run, activities.call, activities.start, activities.stop
        _live.add(self)
        halves: dict[str, Function] = {"module_source": _module_source, "log_error": _log_error, "clock": clock_ms}
        self.namespace("core.python", halves, {"pause": pause}, parking={"sleep": sleep_ms})

    def finish(self) -> None:
        """Cut Lua off from Python, for good. The finalizers that run when the Lua state is freed must not call into
        Python objects that are being freed with it; happens by itself at the end of the process and of the `Vm`.
        """
        self.call(self._refs[b"finish"])

    def __del__(self) -> None:
        with suppress(LuaError, AttributeError):  # the latter when the constructor failed
            self.finish()

    def relax(self) -> None:
        """No activity computes any more that the watchdog was to end."""
        self.call(self._refs[b"relax"])

    def hold_collector(self) -> None:
        """Let Lua take something large without collecting, which it would do in one step for all of it. The Lua half
        that takes it calls `core.collect`."""
        self.call(self._refs[b"hold"])

    def free(self, ref: int) -> None:
        """Forget the Lua function or table `ref`. A reference is never given out twice, so a late call of it is an
        error."""
        self.call(self._refs[b"free"], ref)

    def namespace(
        self,
        name: str,
        functions: Mapping[str, Function],
        blocking: Mapping[str, Function] | None = None,
        source: bytes | None = None,
        parking: Mapping[str, Function] | None = None,
    ) -> None:
        """Give Lua the Python half of a part of the API and run its Lua half as `chunk(core, py)`.

        functions: become `py.<key>`, called directly; they must not switch greenlets, nor keep a Lua value.
        blocking: become `py.<key>` as well; they run with no Lua on the C stack and may block.
        parking: the same, but they do not block and may answer a `Deferred`: what waits in one needs no greenlet.
        source: the Lua half; without it the shipped file `lib/<name>.lua`, dots standing for slashes.
        What the Lua half returns is the module `name` for `require`. Raises LuaError when the Lua half fails,
        ValueError when there is none.
        """
        source = source if source is not None else library_source(name)
        if source is None:
            raise ValueError(f"there is no Lua half smqrt/apps/lua/lib/{name}.lua")
        halves: list[Any] = []
        for key, fn in functions.items():
            halves += (key.encode(), guarded(fn, self._failure))
        for key, fn in (blocking or {}).items():
            halves += (key.encode(), Op(fn, name=f"{name}.{key}"))
        for key, fn in (parking or {}).items():
            halves += (key.encode(), Op(fn, True, f"{name}.{key}"))
        self.run(self._refs[b"install"], name.encode(), source, chunk_name(name), len(functions), *halves)

    def compile(self, source: str | bytes, name: str = "=compile") -> int:
        """Return a reference to the function that Lua source text is, with the global environment.

        name: the chunk name, "@" and a path for a file. Raises LuaError for a syntax error.
        """
        return _integer(self.run(self._refs[b"compile"], encoded(source), name.encode())[0])

    def eval(self, source: str | bytes, name: str = "=eval", *args: LuaValue) -> LuaValues:
        """Run Lua source text with the global environment in the current greenlet and return its values (for
        start-up and tests).

        name: the chunk name, "@" and a path for a file. Raises LuaError for a syntax or run-time error.
        """
        return self.run(self._refs[b"eval"], encoded(source), name.encode(), *args)

    def waiting(self) -> list[str]:
        """One line for each activity that waits: where in Lua, in which call, and for how long."""
        return [
            f"{self._where(co)} in {name or 'Lua'} for {waited_s:.1f} s"
            for co, name, waited_s in self.activities.waiting()
        ]

    def _where(self, co: LuaThread) -> str:
        found = self.call(self._refs[b"where"], co)
        line = found[0] if type(found) is tuple and found else None
        return line.decode("utf-8", "replace") if isinstance(line, bytes) else "?"

    def collect(self) -> None:
        """Collect all garbage in one step, which takes seconds of a heap of gigabytes."""
        self.run(self._refs[b"collect"])

    def memory_bytes(self) -> int:
        """What the Lua state holds at the moment, garbage included."""
        return _integer(self.run(self._refs[b"memory"])[0])


class LuaFunction:
    """A Lua function that Python calls; its reference is given back when nobody needs it any more.

    Args:
        vm: the runtime.
        ref: the reference, which belongs to this object from now on.
        what: names the function in the log.
    """

    __slots__ = ("_vm", "_what", "ref")

    def __init__(self, vm: Vm, ref: int, what: str = "a Lua function") -> None:
        self._vm, self.ref, self._what = vm, ref, what

    def __call__(self, *arguments: LuaValue | str) -> LuaValue:
        """Run it in this greenlet, which may block: its first value; None after an error, which is logged."""
        return self.run(self._what, *arguments)

    def run(self, what: str, *arguments: LuaValue | str) -> LuaValue:
        """The same, with another name in the log."""
        try:
            values = self._vm.run(self.ref, *map(encoded, arguments))
        except LuaError as error:
            log.error("%s failed: %s", what, error)
            return None
        return values[0] if values else None

    def __del__(self) -> None:
        get_hub().loop.run_callback(self._vm.free, self.ref)


_live: WeakSet[Vm] = WeakSet()


@atexit.register
def _finish_all() -> None:
    for vm in list(_live):
        vm.finish()


def _load_core(runtime: Any) -> Any:
    core = runtime.table()
    for part in CORE:
        name = f"core.{part}"
        source = library_source(name)
        assert source is not None, name
        runtime.compile(source, chunk_name(name))(core)
    return core


def _integer(value: LuaValue) -> int:
    assert isinstance(value, int | float)
    return int(value)


def _module_source(name: bytes) -> tuple[bytes, bytes] | None:
    text = name.decode("utf-8", "replace")
    source = requirable_source(text)
    return None if source is None else (source, chunk_name(text))


_limits: defaultdict[bytes, ErrorLimit] = defaultdict(ErrorLimit)
"""By what failed: "Cosocket failed", "Thread job failed" and the like."""


def _log_error(text: bytes) -> None:
    if (others := _limits[text.partition(b":")[0]].others()) is not None:
        log.error("%s%s", text.decode("utf-8", "replace"), others)


def _deny(_obj: Any, _name: Any, _value: Any = None) -> None:
    """Python objects have no fields in Lua. Answers nil: an exception raised here would cross lupa."""
