"""Child processes on a pseudo terminal for Lua: `ba.forkpty` (spec: bas-api §7, §17). The other half is
lib/ba/forkpty.lua.
"""

from __future__ import annotations

from collections import Counter
from itertools import count
from time import monotonic
from typing import Protocol

from gevent import sleep

from smqrt.apps.lua.bridge import LuaResult, fail, from_utf8, load, methods, with_words
from smqrt.apps.lua.services import Services
from smqrt.apps.lua.vm import Vm
from smqrt.child_processes.pty import HANG_UP_S, KILL_S, Pty, PtyCommand, PtyRead
from smqrt.process.current_application import AppScope

MAX_PER_APP = 32
"""Children of one application."""
MAX_IN_ALL = 128
_POLL_S = 0.02


class Child(Protocol):
    """A child process; `status` is None while it runs, and `close` ends it."""

    @property
    def status(self) -> int | None: ...
    def close(self) -> None: ...


class ProcessBinding:
    """The children on a terminal by their numbers, and all children with their owners.

    Args:
        vm: runs the callbacks.
        services: know the applications.
    """

    def __init__(self, vm: Vm, services: Services) -> None:
        self._vm, self._scope_of = vm, services.scope_of
        self._next = count(1).__next__
        self._ptys: dict[int, Pty] = {}
        self._alive: dict[Child, AppScope | None] = {}  # also those of which Lua knows no more, with their owners
        self._callback_ref = 0
        self._running: dict[int, int] = {}  # callbacks that run: the progress when they began

    def attach(self, callback_ref: int) -> None:
        """The Lua function that calls the callback of the child with a number."""
        self._callback_ref = callback_ref

    def fork(self, words: bytes, options: bytes, is_async: bool, application: int | None) -> LuaResult:
        """Start a child: its number. words, options: tables as bytes. application: see `Services.scope_of`."""
        owner = self._scope_of(application)
        if message := self.refusal(owner):
            return fail("mem", message)
        pty = Pty(_command(words, options, is_async))
        number = self._next()
        self._ptys[number] = pty
        self.keep(pty, owner)
        if is_async:
            pty.on_output = lambda: self._advance(number)
        return number

    def refusal(self, owner: AppScope | None) -> str:
        """Why an application must not have one more child; empty when it may."""
        self._alive = {child: its for child, its in self._alive.items() if child.status is None}
        of_owners = Counter(self._alive.values())
        if len(self._alive) < MAX_IN_ALL and of_owners[owner] < MAX_PER_APP:
            return ""
        return f"too many children: {MAX_PER_APP} of an application, {MAX_IN_ALL} in all"

    def keep(self, child: Child, owner: AppScope | None) -> None:
        """Count a child, and let it end with its application and with the server."""
        self._alive[child] = owner
        if owner is not None:
            owner.add(child)

    # ---- callbacks: called at the beginning, then whenever something arrived while none runs

    def start(self, number: int) -> None:
        """Begin to call the callback."""
        self._running[number] = -1
        self._vm.start(self._callback_ref, number)

    def _advance(self, number: int) -> None:
        if number in self._ptys and number not in self._running and self._ptys[number].unread:
            self._running[number] = self._ptys[number].progress
            self._vm.start(self._callback_ref, number)

    def again(self, number: int) -> bool:
        """A callback has returned: whether it is to be called once more: it has read some, or
        more arrived meanwhile."""
        pty, seen = self._ptys.get(number), self._running.pop(number, 0)
        if pty is None or not pty.unread or pty.progress == max(seen, 0):
            return False
        self._running[number] = pty.progress
        return True

    def over(self, number: int) -> bool:
        """Whether nothing more will arrive."""
        return number not in self._ptys or self._ptys[number].ended

    # ---- methods

    def read(self, number: int, timeout_ms: float | None) -> PtyRead:
        """What there is, and whether it is of standard error; None at the end, False when the time is over."""
        return self._ptys[number].read(None if timeout_ms is None else timeout_ms / 1000)

    def write(self, number: int, data: bytes) -> bool:
        self._ptys[number].write(data)
        return True

    def winsize(self, number: int) -> tuple[int, int]:
        return self._ptys[number].window_size()

    def set_winsize(self, number: int, rows: int, columns: int) -> bool:
        self._ptys[number].set_window_size(rows, columns)
        return True

    def pause(self, number: int, paused: bool) -> bool:
        self._ptys[number].pause(paused)
        return True

    def close(self, number: int) -> bool:
        self._ptys[number].close()
        return True

    def close_and_wait(self, number: int) -> int | None:
        return self._ptys[number].close_and_wait()

    def terminate(self, number: int) -> int | None:
        return self._ptys[number].terminate()

    def status(self, number: int) -> int | None:
        return self._ptys[number].status

    def drop(self, number: int) -> None:
        """Lua's object is gone."""
        pty = self._ptys.pop(number, None)
        self._running.pop(number, None)
        if pty is not None:
            pty.close()

    def shutdown(self) -> None:
        """Close all, and wait until they have ended; blocks for some seconds at most."""
        for child in (*self._ptys.values(), *self._alive):
            child.close()
        until_s = monotonic() + HANG_UP_S + KILL_S
        while any(child.status is None for child in self._alive) and monotonic() < until_s:
            sleep(_POLL_S)


def _command(words: bytes, options: bytes, apart: bool) -> PtyCommand:
    given = load(options)
    environment = {
        from_utf8(name): from_utf8(value) if isinstance(value, bytes) else None
        for name, value in given.get(b"env", {}).items()
    }
    name = given.get(b"arg0")
    stty = given.get(b"stty")
    return PtyCommand(
        [from_utf8(word) for word in load(words).values()],
        None if name is None else from_utf8(name),
        environment,
        None if stty is None else from_utf8(stty).split(),
        apart,
    )


def install_processes(vm: Vm, services: Services) -> None:
    """Give Lua `ba.forkpty`."""
    binding = services.processes = ProcessBinding(vm, services)
    direct = methods(binding, "attach start again over winsize set_winsize pause close status drop", with_words)
    blocking = methods(binding, "fork write close_and_wait terminate", with_words)
    vm.namespace("ba.forkpty", direct, blocking, parking={"read": binding.read})
