"""Python half of `ba.forkpty` and of the blocking functions of `io` and `os` (spec: bas-api §7, §17)."""

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
from smqrt.apps.lua.vm import Services, Vm
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

# ---- `io.popen`, `os.execute`, `os.tmpname`, `os.remove` and `os.rename`, which park the activity. The Lua half is
# lib/ba/plain.lua.
#
# lupa builds Lua without POSIX. The functions of its `io` and `os` support neither pipes nor exit codes, and its
# `os.tmpname` creates no file.


def _failed(error: OSError, name: bytes = b"") -> LuaValues:
    """Return the results of a failed function of plain Lua: nil, "name: message" and the error number."""
    text = (error.strerror or str(error)).encode()
    return None, b"%s: %s" % (name, text) if name else text, error.errno or errno.EIO


def _with_numbers(function: Callable[..., LuaResult]) -> Callable[..., LuaResult]:
    """Wrap a function so that an OSError or StreamError becomes the results of a failed function of plain Lua."""

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
    """Shell commands. Those with a pipe have a number.

    Args:
        processes: counts the children of applications.
        services: the parts of the server.
    """

    def __init__(self, processes: ProcessBinding, services: Services) -> None:
        self._processes, self._scope_of = processes, services.scope_of
        self._next = count(1).__next__
        self._pipes: dict[int, ShellChild] = {}
        self._places: WeakKeyDictionary[AppScope, int] = WeakKeyDictionary()

    def place(self, application: int | None) -> int:
        """Return a number for the application whose code is running; 0 for none. It changes at each start."""
        owner = self._scope_of(application)
        return 0 if owner is None else self._places.setdefault(owner, self._next())

    def popen(self, command: bytes, mode: bytes, application: int | None) -> LuaResult:
        """Start a command with a pipe and return its number; blocks briefly."""
        try:
            child = self._start(command, mode.decode("latin-1"), application)
        except OSError as error:
            return _failed(error, command)
        number = self._next()
        self._pipes[number] = child
        return number

    def execute(self, command: bytes, application: int | None) -> LuaResult:
        """Run a command and return its exit status, or the negative number of a signal; blocks until it exits."""
        return self._waited(self._start(command, "", application))

    def _start(self, command: bytes, mode: str, application: int | None) -> ShellChild:
        owner = self._scope_of(application)
        inherited = threads.in_thread(inheritable_descriptors)
        if message := self._processes.refusal(owner):  # after `in_thread`, during which other children may start
            raise OSError(errno.EAGAIN, message)
        child = ShellChild(command, mode, inherited)
        self._processes.keep(child, owner)
        return child

    def _waited(self, child: ShellChild) -> int:
        try:
            return child.wait()
        except BaseException:  # the activity was killed
            child.close()
            raise

    def read(self, number: int) -> LuaResult:
        """Return the next output; empty at the end."""
        child = self._pipes[number]
        data = child.read_now()
        return greenlets.call(_with_numbers(child.read)) if data is None else data

    def read_now(self, number: int) -> LuaResult:
        """As `read`, but return False if it would block."""
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
        """Write without blocking; return the number of bytes written."""
        return self._pipes[number].write_now(data)

    def close(self, number: int) -> LuaResult:
        """Close the pipe, wait until the command exits, and return its status like `execute`."""
        child = self._pipes.pop(number)
        child.close_pipe()
        return self._waited(child)

    def drop(self, number: int) -> None:
        """Close the pipe of a command whose Lua object was collected; the command continues."""
        child = self._pipes.pop(number, None)
        if child is not None:
            child.close_pipe()


def make_temporary() -> LuaResult:
    """Create an empty file that only this user can access; return its name, None on failure."""
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
    """Wrap a function so that it runs in a thread of the disk of its first argument, a path."""

    def call(name: bytes, *more: bytes) -> LuaResult:
        place = os.path.abspath(from_utf8(name))
        return disks.threads(place).submit(LuaJob(disks.with_mount(place, function), name, *more))

    return call


def install_plain(vm: Vm, services: Services) -> None:
    """Install `io.popen` and the blocking functions of `os`."""
    binding = ShellBinding(services.processes, services)
    direct: dict[str, Function] = {"has_shell": has_shell, "make_temporary_here": make_temporary}
    direct |= methods(binding, "drop place") | methods(binding, "read_now write_now", _with_numbers)
    blocking: dict[str, Function] = {"make_temporary": lambda: threads.in_thread(make_temporary)}
    blocking |= methods(binding, "popen execute close", _with_numbers)
    parking: dict[str, Function] = {"remove": _on_disk(_remove), "rename": _on_disk(_rename)}
    vm.namespace("ba.plain", direct, blocking, parking=parking | methods(binding, "read write", _with_numbers))


# ---- `ba.forkpty`. The Lua half is lib/ba/forkpty.lua.

MAX_PER_APP = 32
"""Children of one application."""
MAX_IN_ALL = 128
_POLL_S = 0.02  # of `shutdown`, when most of the server has ended


class Child(Protocol):
    """A child process; `status` is None while it runs, and `close` ends it."""

    @property
    def status(self) -> int | None: ...
    def close(self) -> None: ...


class ProcessBinding:
    """Children on a pseudo terminal by number, and all children with their applications.

    Args:
        vm: runs the callbacks.
        services: the parts of the server.
    """

    def __init__(self, vm: Vm, services: Services) -> None:
        self._vm, self._scope_of = vm, services.scope_of
        self._next = count(1).__next__
        self._ptys: dict[int, Pty] = {}
        self._alive: dict[Child, AppScope | None] = {}  # with their owners; also children without a Lua object
        self._callback_ref = 0
        self._running: dict[int, int] = {}  # running callbacks: `Pty.progress` when they began

    def attach(self, callback_ref: int) -> None:
        """Set the Lua function that runs the callback of a child, which it gets by number."""
        self._callback_ref = callback_ref

    def fork(self, words: bytes, options: bytes, is_async: bool, application: int | None) -> LuaResult:
        """Start a child and return its number; nil, "mem" and a message if a limit is reached.

        Args:
            words: the command and its arguments, a packed table.
            options: a packed table with `env`, `arg0` and `stty`.
            is_async: whether a callback reads the output, and standard error separately.
            application: see `Services.scope_of`.
        """
        owner = self._scope_of(application)
        if message := self.refusal(owner):
            return fail("mem", message)
        given = load(options)
        environment = {
            from_utf8(name): from_utf8(value) if isinstance(value, bytes) else None
            for name, value in given.get(b"env", {}).items()
        }
        name, stty = given.get(b"arg0"), given.get(b"stty")
        command = PtyCommand(
            [from_utf8(word) for word in load(words).values()],
            None if name is None else from_utf8(name),
            environment,
            None if stty is None else from_utf8(stty).split(),
            is_async,
        )
        pty = Pty(command)
        number = self._next()
        self._ptys[number] = pty
        self.keep(pty, owner)
        if is_async:
            pty.on_output = lambda: self._advance(number)
        return number

    def refusal(self, owner: AppScope | None) -> str:
        """Return the message if the limits permit no more child of an application; empty if they do."""
        self._alive = {child: its for child, its in self._alive.items() if child.status is None}
        of_owners = Counter(self._alive.values())
        if len(self._alive) < MAX_IN_ALL and of_owners[owner] < MAX_PER_APP:
            return ""
        return f"too many children: {MAX_PER_APP} of an application, {MAX_IN_ALL} in all"

    def keep(self, child: Child, owner: AppScope | None) -> None:
        """Count a child, and close it when its application ends or the server stops."""
        self._alive[child] = owner
        if owner is not None:
            owner.add(child)

    # ---- callbacks: called once at the start, then for each arrival of output while no callback of the child runs

    def start(self, number: int) -> None:
        """Run the callback for the first time."""
        self._running[number] = -1  # nothing was read when it begins
        self._vm.start(self._callback_ref, number)

    def _advance(self, number: int) -> None:
        if number in self._ptys and number not in self._running and self._ptys[number].unread:
            self._running[number] = self._ptys[number].progress
            self._vm.start(self._callback_ref, number)

    def again(self, number: int) -> bool:
        """Return whether to run a callback that has returned again: it has read some output, or more has arrived."""
        pty, seen = self._ptys.get(number), self._running.pop(number, 0)
        if pty is None or not pty.unread or pty.progress == max(seen, 0):
            return False
        self._running[number] = pty.progress
        return True

    def over(self, number: int) -> bool:
        """Return whether no more output will arrive."""
        return number not in self._ptys or self._ptys[number].ended

    # ---- methods

    def read(self, number: int, timeout_ms: float | None) -> PtyRead:
        """Read the available output; resolves to it and whether it is of standard error.

        Resolves to None at the end, to False after the timeout.
        """
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
        """Close a child whose Lua object was collected."""
        pty = self._ptys.pop(number, None)
        self._running.pop(number, None)
        if pty is not None:
            pty.close()

    def shutdown(self) -> None:
        """Close all children and wait until they exit, at most `HANG_UP_S` plus `KILL_S`; blocks."""
        for child in (*self._ptys.values(), *self._alive):
            child.close()
        until_s = monotonic() + HANG_UP_S + KILL_S
        while any(child.status is None for child in self._alive) and monotonic() < until_s:
            sleep(_POLL_S)


def install_processes(vm: Vm, services: Services) -> None:
    """Install `ba.forkpty`."""
    binding = services.processes = ProcessBinding(vm, services)
    direct = methods(binding, "attach start again over winsize set_winsize pause close status drop", with_error_words)
    blocking = methods(binding, "fork write close_and_wait terminate", with_error_words)
    vm.namespace("ba.forkpty", direct, blocking, parking={"read": binding.read})
