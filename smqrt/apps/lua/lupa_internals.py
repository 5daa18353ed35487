"""Lua's C interface, and debug hooks in the coroutine that runs in another thread.

A debug hook that another thread sets finds and ends an endless loop in Lua (decision 0009). lupa has no function for
that; this module loads the functions from lupa's extension module, in which Lua is linked. No other module uses lupa in
an undocumented way. `interrupt_of` tests all functions before their first use; when a test fails, as with another build
of lupa, hooks are disabled and the log has a warning.

Another thread can't read a Lua stack that changes. It sets a hook, as the signal handler of a debugger does, and Lua
calls the hook in its own thread. A hook belongs to one coroutine, and applications resume coroutines of their own, so
the running coroutine may not be the one that Python resumed. The search for the innermost one works as follows:

* Python resumed A. After A got a hook for calls, returns and instructions, either A runs and Lua calls the hook, or A
  is in a C function. If that is `coroutine.resume`, its first argument is the next coroutine, B.
* B can't be freed during the search: A references it while A is in that function. If A continues, Lua first calls A's
  hook, which waits for the gate that the searching thread holds.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from typing import Any

from lupa import __version__ as lupa_version

from smqrt.apps.lua.vm import Vm
from smqrt.errors import SmqrtError
from smqrt.loop.threads import block_thread, new_lock

log = logging.getLogger("smqrt.lua")

TIMEOUT_S, POLL_S = 1.0, 0.005
IDLE_AFTER_S = 0.03  # without a call of the hook; far longer than another core takes to notice the hook
MAX_DEPTH = 200  # Lua's limit of nested coroutines

_ALL_EVENTS = 1 | 2 | 8  # LUA_MASKCALL, LUA_MASKRET, LUA_MASKCOUNT
_GC_COUNT = 3  # LUA_GCCOUNT
_RUNNING = 0  # LUA_OK; a suspended coroutine has LUA_YIELD
_REGISTRIES = {504: -1_001_000, 505: -(0x7FFFFFFF // 2 + 1000)}  # LUA_REGISTRYINDEX
_TABLE = 5  # LUA_TTABLE
_TYPE_AT, _TYPE = ctypes.sizeof(ctypes.c_void_p), b"\x08"  # GCObject.tt of a lua_State: LUA_TTHREAD
_HOOK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


_hooks: list[object] = []  # never freed: a coroutine that is resumed late may still have a hook

Action = Callable[[int], None]


class OtherBuildError(SmqrtError):
    """This build of lupa differs from the expected one. The message names the difference."""


class LuaInterface:
    """The required part of Lua's C interface. A state is the address of a coroutine.

    Args:
        file: lupa's extension module.
        number: the expected version of Lua in it, such as 504.

    Raises:
        OtherBuildError: a function is missing, or the version differs.
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
        if version(None) != number:  # lua_version ignores its argument; before 5.4 it returned a pointer
            raise OtherBuildError(f"its Lua is not {number // 100}.{number % 100}")
        if number not in _REGISTRIES:
            raise OtherBuildError(f"unknown version: Lua {number // 100}.{number % 100}")
        self._registry = _REGISTRIES[number]

    def traceback(self, state: int, of: int) -> bytes:
        """Return the traceback of coroutine `of`; for hooks, called in `state`."""
        self._push_traceback(state, of, None, 0)
        text: bytes = self._text_of(state, -1, None)
        self.set_top(state, -2)
        return text

    def memory_mib(self, state: int) -> float:
        """Return the memory of Lua in MiB, garbage included. Callable from any thread: it only reads two numbers."""
        kib: int = self._gc(state, _GC_COUNT, 0)
        return kib / 1024

    def arm(self, state: int, case: int, limit_s: float) -> bool:
        """Call `arm` of lib/core/overtime.lua; for hooks, called in `state`. Return whether there was no error.

        lua_pcallk catches errors; an error outside of it would jump over Python's frames on the C stack.
        """
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
    """Calls functions inside Lua, on behalf of one other thread.

    Args:
        lua: the C interface.
    """

    def __init__(self, lua: LuaInterface) -> None:
        self.lua = lua
        self._gate = new_lock()
        self._action: Action | None = None
        self._has_arrived = False
        self._path: list[int] = []
        self._hook = _HOOK(self._on_event)
        _hooks.append(self._hook)

    def begin(self, state: int, action: Action) -> None:
        """Call a function with the running coroutine, and with each outer one as soon as it continues.

        Args:
            state: the coroutine that Python resumed.
            action: called in Lua's thread, inside a hook; must be quick, and replace or remove the hook.
        """
        with self._gate:
            self._action = action
            self._has_arrived = False
            # Set the hook from the outermost to the innermost coroutine; see the module's docstring.
            self._path = []
            outer: int | None = state
            while outer and len(self._path) < MAX_DEPTH:
                self._path.append(outer)
                self.lua.set_hook(outer, ctypes.cast(self._hook, ctypes.c_void_p), _ALL_EVENTS, 1)
                outer = None if wait_until(lambda: self._has_arrived, IDLE_AFTER_S) else self._inner_of(outer)

    def tracebacks(self, at: int) -> bytes:
        """Return the tracebacks of the outer coroutines and of the running one; for actions."""
        path = self._path[: self._path.index(at) + 1] if at in self._path else [at]
        return b"\ninside the coroutine, ".join(self.lua.traceback(at, state) for state in path)

    def end(self) -> None:
        """Do not call the action any more; the remaining hooks remove themselves."""
        with self._gate:
            self._action = None

    def _inner_of(self, state: int) -> int | None:
        """Return the coroutine that `state` has resumed; None if the stack of `state` may have changed."""
        inner: int | None = self.lua.to_thread(state, 1)
        if wait_until(lambda: self._has_arrived, POLL_S) or inner != self.lua.to_thread(state, 1):
            return None
        return inner if inner and self.lua.status(inner) == _RUNNING else None

    def _on_event(self, state: int, _record: int) -> None:
        """Handle a hook; runs inside Lua."""
        self._has_arrived = True
        with self._gate:
            if self._action is not None:
                self._action(state)
            else:
                self.lua.set_hook(state, None, 0, 0)


def interrupt_of(vm: Vm) -> Interrupt | None:
    """Return the Interrupt for a Lua runtime; None, after a warning, if it does not work with this build of lupa."""
    try:
        lua = LuaInterface(vm.lupa.__file__, vm.number)
        _test_functions(vm, lua)
    except OtherBuildError as error:
        log.warning(
            "lupa %s is not the expected build (%s): endless loops in Lua are not ended, and reports of a blocked "
            "event loop have no line of Lua",
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


def _test_functions(vm: Vm, lua: LuaInterface) -> None:
    """Test all functions in a few lines of Lua, with a hook that this thread sets and calls."""
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
        raise OtherBuildError("Lua does not print the address of a coroutine")
    if not seen:
        lua.set_hook(address, None, 0, 0)
        raise OtherBuildError("hooks are not called")
    if seen != [(address, _RUNNING, True, True)]:
        raise OtherBuildError("functions fail inside a hook")


def _is_state(address: int) -> bool:
    """Return whether there is a coroutine at an address.

    Reads through /proc, since reading from a wrong address would crash the process. Where that is impossible, every
    address but 0 counts as valid.
    """
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


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Block this thread until a condition is true; return False after `timeout_s`."""
    waited_s = 0.0
    while not condition():
        if waited_s >= timeout_s:
            return False
        block_thread(POLL_S)
        waited_s += POLL_S
    return True


def _function(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function
