"""An OS thread that tells where Lua is when the loop has not turned for some seconds.

Everything waits while an application computes; the person at the terminal should read which line it is. The thread
can't walk Lua's stack itself, because Lua runs on meanwhile. So it sets a hook, as a debugger's signal handler does;
Lua calls it at its next instruction and it takes the traceback on Lua's own thread. What is found goes straight to
the file descriptor: neither locks nor loggers, which a monkey-patched process shares with greenlets, are touched.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import lupa.lua54 as lupa
from gevent import get_hub, monkey

from smqrt.lua.activity import Activities
from smqrt.lua.vm import Vm

LIMIT_S = 5.0
STEP_S = 0.5
HOOK_PATIENCE_S, HOOK_STEP_S = 1.0, 0.01
STDERR = 2

ELSEWHERE = b"not in Lua, or in a coroutine of the application, or in a C function such as string.find\n"

_MASK_COUNT = 8  # LUA_MASKCOUNT
_HOOK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)

_sleep: Callable[[float], None] = monkey.get_original("time", "sleep")
_start_thread: Callable[..., int] = monkey.get_original("_thread", "start_new_thread")


class Watchdog:
    """Watches the loop of the current thread.

    Args:
        vm: the Lua runtime of that thread.
        limit_s: for how long the loop may stand still.
        write: takes the report, in the watchdog's thread; standard error by default.
    """

    def __init__(self, vm: Vm, limit_s: float = LIMIT_S, write: Callable[[bytes], object] | None = None) -> None:
        self._states = vm.states
        self._limit_s = limit_s
        self._step_s = min(STEP_S, limit_s / 4)
        self._write = write or (lambda text: os.write(STDERR, text))
        self._stack = Stack()
        self._turns = 0
        self._stopped = False
        self._thread_id = monkey.get_original("_thread", "get_ident")()
        self._timer = get_hub().loop.timer(self._step_s, self._step_s, ref=False)

    def start(self) -> None:
        """Begin to watch."""
        self._timer.start(self._turn)
        _start_thread(self._watch, ())

    def stop(self) -> None:
        """Stop watching."""
        self._stopped = True
        self._timer.stop()
        self._timer.close()

    def _turn(self) -> None:
        self._turns += 1

    def _watch(self) -> None:
        seen, still_s = -1, 0.0
        while not self._stopped:
            _sleep(self._step_s)
            if self._turns != seen:
                seen, still_s = self._turns, 0.0
                continue
            before, still_s = still_s, still_s + self._step_s
            if before < self._limit_s <= still_s:
                self._report()

    def _report(self) -> None:
        where = self._lua_traceback() or ELSEWHERE + self._python_stack()
        self._write(b"the server has stood still for %.1f s:\n%s\n" % (self._limit_s, where))

    def _lua_traceback(self) -> bytes | None:
        coroutine = running_coroutine(sys._current_frames().get(self._thread_id))
        return None if coroutine is None else self._stack.traceback_at(self._states[id(coroutine)])

    def _python_stack(self) -> bytes:
        frame, lines = sys._current_frames().get(self._thread_id), []
        while frame is not None:
            lines.append(f"\t{frame.f_code.co_filename}:{frame.f_lineno}: in {frame.f_code.co_name}")
            frame = frame.f_back
        return "\n".join(lines).encode()


def running_coroutine(frame: FrameType | None) -> Any:
    """The innermost coroutine that Python resumed at `frame` or above, None when there is none."""
    while frame is not None:
        if frame.f_code is Activities._send.__code__:
            return frame.f_locals["co"]
        frame = frame.f_back
    return None


class Stack:
    """The stacks of Lua coroutines that run in another thread, read through Lua's C interface."""

    def __init__(self) -> None:
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        library = ctypes.CDLL(lupa.__file__)
        self._set_hook = _function(library.lua_sethook, None, pointer, pointer, integer, integer)
        self._push_traceback = _function(library.luaL_traceback, None, pointer, pointer, ctypes.c_char_p, integer)
        self._text_of = _function(library.lua_tolstring, ctypes.c_char_p, pointer, integer, pointer)
        self._set_top = _function(library.lua_settop, None, pointer, integer)
        self._hook = _HOOK(self._on_instruction)  # kept: Lua may call it late
        self._found: bytes | None = None

    def traceback_at(self, state: int) -> bytes | None:
        """The Lua traceback of the coroutine at address `state`, None when it executes no instruction for a while."""
        self._found = None
        self._set_hook(state, ctypes.cast(self._hook, ctypes.c_void_p), _MASK_COUNT, 1)
        waited_s = 0.0
        while self._found is None and waited_s < HOOK_PATIENCE_S:
            _sleep(HOOK_STEP_S)
            waited_s += HOOK_STEP_S
        self._set_hook(state, None, 0, 0)
        return self._found

    def _on_instruction(self, state: int, _record: int) -> None:
        """Runs inside Lua, in the thread that is watched."""
        self._set_hook(state, None, 0, 0)
        self._push_traceback(state, state, None, 0)
        self._found = self._text_of(state, -1, None)
        self._set_top(state, -2)


def _function(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function
