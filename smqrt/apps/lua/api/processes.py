"""Child processes on a pseudo terminal for Lua: `ba.forkpty` (spec: bas-api §7, §17). The other half is
lib/ba/forkpty.lua.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import wraps
from itertools import count
from time import monotonic
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from gevent import sleep

from smqrt.apps.lua.api.files import LuaJob
from smqrt.apps.lua.bridge import Function, LuaResult, LuaValues, fail, from_utf8, load, methods, with_error_words
from smqrt.apps.lua.services import Services
from smqrt.apps.lua.vm import Vm
from smqrt.child_processes.processes import (
    HANG_UP_S,
    KILL_S,
    Pty,
    PtyCommand,
    PtyRead,
    ShellChild,
    has_shell,
    inheritable_descriptors,
)
from smqrt.errors import StreamError
from smqrt.http.open_files import disks
from smqrt.loop import greenlets, threads
from smqrt.process.current_process import AppScope

# ---- `io.popen`, `os.execute`, `os.tmpname`, `os.remove` and `os.rename` of plain Lua, so that they hold nobody. The
# other half is lib/ba/plain.lua.
#
# lupa's Lua is built for every system, without POSIX: its own have no pipes, no exit codes and make no file.


def _failed(error: OSError, name: bytes = b"") -> LuaValues:
    """What plain Lua gives: nil, the message with the name before it, the number."""
    text = (error.strerror or str(error)).encode()
    return None, b"%s: %s" % (name, text) if name else text, error.errno or errno.EIO


def _with_numbers(function: Callable[..., LuaResult]) -> Callable[..., LuaResult]:
    """`function` with failures as plain Lua tells them."""

    @wraps(function)
    def call(*args: Any) -> LuaResult:
        try:
            return function(*args)
        except OSError as error:
            return _failed(error)
        except StreamError:
            return _failed(OSError(errno.EBADF, os.strerror(errno.EBADF)))

    return call


class ShellBinding:
    """The commands that run, those with a pipe by their numbers.

    Args:
        processes: counts the children of applications.
        services: know the applications.
    """

    def __init__(self, processes: ProcessBinding, services: Services) -> None:
        self._processes, self._scope_of = processes, services.scope_of
        self._next = count(1).__next__
        self._pipes: dict[int, ShellChild] = {}
        self._places: WeakKeyDictionary[AppScope, int] = WeakKeyDictionary()

    def place(self, application: int | None) -> int:
        """A number for the application whose code is running, another one at each of its starts; 0 for none."""
        owner = self._scope_of(application)
        return 0 if owner is None else self._places.setdefault(owner, self._next())

    def popen(self, command: bytes, mode: bytes, application: int | None) -> LuaResult:
        """Start a command with a pipe: its number. Blocks for a moment."""
        try:
            child = self._start(command, mode.decode("latin-1"), application)
        except OSError as error:
            return _failed(error, command)
        number = self._next()
        self._pipes[number] = child
        return number

    def execute(self, command: bytes, application: int | None) -> LuaResult:
        """Run a command and give its exit status, below 0 the number of a signal. Blocks until it has ended."""
        return self._waited(self._start(command, "", application))

    def _start(self, command: bytes, mode: str, application: int | None) -> ShellChild:
        owner = self._scope_of(application)
        inherited = threads.in_thread(inheritable_descriptors)
        if message := self._processes.refusal(owner):  # after the switch, so that none comes in between
            raise OSError(errno.EAGAIN, message)
        child = ShellChild(command, mode, inherited)
        self._processes.keep(child, owner)
        return child

    def _waited(self, child: ShellChild) -> int:
        try:
            return child.wait()
        except BaseException:  # nobody waits for it any more
            child.close()
            raise

    def read(self, number: int) -> LuaResult:
        """The next output, empty at the end."""
        child = self._pipes[number]
        data = child.read_now()
        return greenlets.call(_with_numbers(child.read)) if data is None else data

    def read_now(self, number: int) -> LuaResult:
        """The same, False when that would have to be waited for."""
        data = self._pipes[number].read_now()
        return False if data is None else data

    def write(self, number: int, data: bytes) -> LuaResult:
        child = self._pipes[number]
        count = child.write_now(data)
        return count == len(data) or greenlets.call(_with_numbers(self._write), child, data[count:])

    def _write(self, child: ShellChild, data: bytes) -> bool:
        child.write(data)
        return True

    def write_now(self, number: int, data: bytes) -> LuaResult:
        """Write what it takes at once: how many bytes."""
        return self._pipes[number].write_now(data)

    def close(self, number: int) -> LuaResult:
        """Close the pipe, wait until the command has ended, and give its status as `execute` does."""
        child = self._pipes.pop(number)
        child.close_pipe()
        return self._waited(child)

    def drop(self, number: int) -> None:
        """Lua's handle is gone: the command goes on without it."""
        child = self._pipes.pop(number, None)
        if child is not None:
            child.close_pipe()


def make_temporary() -> LuaResult:
    """Make an empty file for this user only: its name, None when that is impossible."""
    try:
        fd, name = tempfile.mkstemp(prefix=b"lua_")
    except OSError:
        return None
    os.close(fd)
    return name


def _remove(name: bytes) -> LuaResult:
    try:
        try:
            os.unlink(name)
        except IsADirectoryError:
            os.rmdir(name)
    except OSError as error:
        return _failed(error, name)
    return True


@_with_numbers
def _rename(old: bytes, new: bytes) -> LuaResult:
    os.rename(old, new)
    return True


def _on_disk(function: Callable[..., LuaResult]) -> Function:
    """`function` in a thread of the disk where its first argument lies."""

    def call(name: bytes, *more: bytes) -> LuaResult:
        place = os.path.abspath(from_utf8(name))
        return disks.threads(place).submit(LuaJob(disks.doing(place, function), name, *more))

    return call


def install_plain(vm: Vm, services: Services) -> None:
    """Give Lua `io.popen` and what waits in `os`."""
    binding = ShellBinding(services.processes, services)
    direct: dict[str, Function] = {"has_shell": has_shell, "make_temporary_here": make_temporary}
    direct |= methods(binding, "drop place") | methods(binding, "read_now write_now", _with_numbers)
    blocking: dict[str, Function] = {"make_temporary": lambda: threads.in_thread(make_temporary)}
    blocking |= methods(binding, "popen execute close", _with_numbers)
    parking: dict[str, Function] = {"remove": _on_disk(_remove), "rename": _on_disk(_rename)}
    vm.namespace("ba.plain", direct, blocking, parking=parking | methods(binding, "read write", _with_numbers))


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
    direct = methods(binding, "attach start again over winsize set_winsize pause close status drop", with_error_words)
    blocking = methods(binding, "fork write close_and_wait terminate", with_error_words)
    vm.namespace("ba.forkpty", direct, blocking, parking={"read": binding.read})
