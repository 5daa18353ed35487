"""Lua's C interface beside lupa, and calls of a function in the Lua coroutine that runs in another thread.

An endless loop in Lua is found and ended by a debug hook that another thread sets (decision 0009). lupa has no way to
do that: the functions are taken out of its extension module, where Lua is linked in. Nothing else in the package uses
lupa against its intent, and nothing of it is used before `interrupt_of` has tried it: with a lupa of another build
there is no hook, and one line in the log says so.

Another thread can't look at a Lua stack that moves, so it sets a hook, as a debugger's signal handler does, and Lua
calls that on its own thread. A hook belongs to one coroutine, and the one that runs is not always the one that Python
resumed: an application has coroutines of its own. The way to the innermost leads through those in between:

* Python resumed A. Once A has a hook for calls, returns and instructions, it either is at work, and the hook is called,
  or it stands in a C function. When that is `coroutine.resume`, its first argument is the next coroutine, B.
* B can't go away meanwhile: A holds it as long as it stands there, and if A moves, its hook is called first, which
  waits at the gate for the thread that looks at B.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from typing import Any

from gevent import monkey
from lupa import __version__ as lupa_version

from smqrt.apps.lua.vm import Vm
from smqrt.errors import SmqrtError

log = logging.getLogger("smqrt.lua")

PATIENCE_S, STEP_S = 1.0, 0.005
STANDS_AFTER_S = 0.03  # for a coroutine that has called no hook: far longer than the other processor may take to see it
MAX_DEPTH = 200  # Lua allows no more coroutines inside each other

_ALL_EVENTS = 1 | 2 | 8  # LUA_MASKCALL, LUA_MASKRET, LUA_MASKCOUNT
_GC_COUNT = 3  # LUA_GCCOUNT
_RESUMED = 0  # LUA_OK; a coroutine that waits for its next resume has LUA_YIELD
_REGISTRIES = {504: -1_001_000, 505: -(0x7FFFFFFF // 2 + 1000)}  # LUA_REGISTRYINDEX
_TABLE = 5  # LUA_TTABLE
_TYPE_AT, _TYPE = ctypes.sizeof(ctypes.c_void_p), b"\x08"  # GCObject.tt of a lua_State: LUA_TTHREAD
_HOOK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)

_sleep: Callable[[float], None] = monkey.get_original("time", "sleep")
_new_lock: Callable[[], Any] = monkey.get_original("_thread", "allocate_lock")

_hooks: list[object] = []  # for ever: a coroutine that is resumed late may still have one

Action = Callable[[int], None]


class OtherBuildError(SmqrtError):
    """lupa is not built as it is here: what it lacks or does otherwise."""


class LuaInterface:
    """The part of Lua's C interface that is needed. A state is the address of a coroutine.

    Args:
        file: lupa's extension module.
        number: the version of Lua that is expected in it: 504.

    Raises:
        OtherBuildError: lupa has not got it.
    """

    def __init__(self, file: str, number: int) -> None:
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        try:
            library = ctypes.CDLL(file)
            version = _function(library.lua_version, ctypes.c_double, pointer)
            self.set_hook = _function(library.lua_sethook, None, pointer, pointer, integer, integer)
            self.status = _function(library.lua_status, integer, pointer)
            self.to_thread = _function(library.lua_tothread, pointer, pointer, integer)
            self.set_top = _function(library.lua_settop, None, pointer, integer)
            self._gc = _function(library.lua_gc, integer, pointer, integer, integer)
            self._type_of = _function(library.lua_type, integer, pointer, integer)
            self._get_field = _function(library.lua_getfield, integer, pointer, integer, ctypes.c_char_p)
            self._push_integer = _function(library.lua_pushinteger, None, pointer, ctypes.c_longlong)
            self._push_number = _function(library.lua_pushnumber, None, pointer, ctypes.c_double)
            self._pcall = _function(library.lua_pcallk, integer, pointer, integer, integer, integer, pointer, pointer)
            self._push_traceback = _function(library.luaL_traceback, None, pointer, pointer, ctypes.c_char_p, integer)
            self._text_of = _function(library.lua_tolstring, ctypes.c_char_p, pointer, integer, pointer)
        except (OSError, AttributeError) as error:
            raise OtherBuildError(str(error)) from None
        if version(None) != number:  # it doesn't look at its argument; before 5.4 it gave a pointer
            raise OtherBuildError(f"its Lua is not {number // 100}.{number % 100}")
        if number not in _REGISTRIES:
            raise OtherBuildError(f"Lua {number // 100}.{number % 100} is not known")
        self._registry = _REGISTRIES[number]

    def traceback(self, state: int, of: int) -> bytes:
        """The traceback of coroutine `of`, for a hook that was called in `state`."""
        self._push_traceback(state, of, None, 0)
        text: bytes = self._text_of(state, -1, None)
        self.set_top(state, -2)
        return text

    def memory_mib(self, state: int) -> float:
        """What Lua holds, garbage included, in MiB. Only reads two numbers: from any thread."""
        kib: int = self._gc(state, _GC_COUNT, 0)
        return kib / 1024

    def arm(self, state: int, case: int, limit_s: float) -> bool:
        """Call `arm` of lib/core/overtime.lua, for a hook that was called in `state`; whether there was no error: they
        end in lua_pcallk. One outside of it would skip the frames of Python on the C stack."""
        if self._type_of(state, self._registry) != _TABLE:
            return False
        self._get_field(state, self._registry, b"smqrt.arm")
        self._push_integer(state, case)
        self._push_number(state, limit_s)
        if not self._pcall(state, 2, 0, 0, None, None):
            return True
        self.set_top(state, -2)
        return False


class Interrupt:
    """Calls functions inside Lua, for one other thread.

    Args:
        lua: the interface, see there.
    """

    def __init__(self, lua: LuaInterface) -> None:
        self.lua = lua
        self._gate = _new_lock()
        self._action: Action | None = None
        self._has_arrived = False
        self._way: list[int] = []
        self._hook = _HOOK(self._on_event)
        _hooks.append(self._hook)

    def begin(self, state: int, action: Action) -> None:
        """Have `action` called with the coroutine that runs, and with each around it as soon as that goes on: on Lua's
        thread, inside a hook, in no time. `action` sets the hook anew or away.

        state: the coroutine that Python resumed.
        """
        with self._gate:
            self._action = action
            self._has_arrived = False
            self._way = self._enter(state)

    def tracebacks(self, at: int) -> bytes:
        """For an action: the traceback of the coroutine that runs, behind those of the ones around it."""
        way = self._way[: self._way.index(at) + 1] if at in self._way else [at]
        return b"\ninside the coroutine, ".join(self.lua.traceback(at, state) for state in way)

    def end(self) -> None:
        """Call the action no more; hooks that are left go away by themselves."""
        with self._gate:
            self._action = None

    def _enter(self, state: int | None) -> list[int]:
        way: list[int] = []
        while state and len(way) < MAX_DEPTH:
            way.append(state)
            self.lua.set_hook(state, ctypes.cast(self._hook, ctypes.c_void_p), _ALL_EVENTS, 1)
            state = None if self._moves(STANDS_AFTER_S) else self._inside(state)
        return way

    def _inside(self, state: int) -> int | None:
        """The coroutine that `state` has resumed, when it surely stands still."""
        inner: int | None = self.lua.to_thread(state, 1)
        if self._moves(STEP_S) or inner != self.lua.to_thread(state, 1):
            return None
        return inner if inner and self.lua.status(inner) == _RESUMED else None

    def _moves(self, within_s: float) -> bool:
        return wait_until(lambda: self._has_arrived, within_s)

    def _on_event(self, state: int, _record: int) -> None:
        """Runs inside Lua."""
        self._has_arrived = True
        with self._gate:
            if self._action is not None:
                self._action(state)
            else:
                self.lua.set_hook(state, None, 0, 0)


def interrupt_of(vm: Vm) -> Interrupt | None:
    """What interrupts the Lua of `vm`; None, with a line in the log, when lupa is of a build with which that fails."""
    try:
        lua = LuaInterface(vm.lupa.__file__, vm.number)
        _try(vm, lua)
    except OtherBuildError as error:
        log.warning(
            "lupa %s is built in another way than expected (%s): endless loops in Lua are not ended, and the report of "
            "a server that stands still names no line of Lua",
            lupa_version,
            error,
        )
        return None
    return Interrupt(lua)


_TRIAL = b"""local core, py = ...
py.set_hook()
local sum = 0
for i = 1, 10 do sum = sum + i end
"""


def _try(vm: Vm, lua: LuaInterface) -> None:
    """Do all that is done in earnest in a few lines of Lua, with a hook that is set and called on this thread."""
    address, seen = 0, []

    def on_event(at: int, _record: int) -> None:
        lua.set_hook(at, None, 0, 0)
        seen.append((at, lua.status(at), b"core/trial.lua" in lua.traceback(at, at), lua.arm(at, 0, 1.0)))

    def set_hook() -> None:
        nonlocal address
        address = vm.activities.runs()[0][0].address
        if _is_state(address):
            lua.set_hook(address, ctypes.cast(hook, ctypes.c_void_p), _ALL_EVENTS, 1)

    hook = _HOOK(on_event)
    vm.namespace("core.trial", {"set_hook": set_hook}, source=_TRIAL)
    vm.relax()
    if not _is_state(address):
        raise OtherBuildError("Lua doesn't tell the address of a coroutine")
    if not seen:
        lua.set_hook(address, None, 0, 0)
        raise OtherBuildError("a hook is not called")
    if seen != [(address, _RESUMED, True, True)]:
        raise OtherBuildError("a hook doesn't find what it needs")


def _is_state(address: int) -> bool:
    """Whether a coroutine is there. The system is asked, because looking at a wrong address ends the process; where it
    tells nothing, every address is believed but 0."""
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY)
    except OSError:
        return address != 0
    try:
        return os.pread(memory, 1, address + _TYPE_AT) == _TYPE
    except (OSError, OverflowError):
        return False
    finally:
        os.close(memory)


def wait_until(condition: Callable[[], bool], patience_s: float) -> bool:
    """Block this thread, and tell whether the condition came true in that time."""
    waited_s = 0.0
    while not condition():
        if waited_s >= patience_s:
            return False
        _sleep(STEP_S)
        waited_s += STEP_S
    return True


def _function(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function
