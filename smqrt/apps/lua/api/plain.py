"""`io.popen`, `os.execute`, `os.tmpname`, `os.remove` and `os.rename` of plain Lua, so that they hold nobody. The other
half is lib/ba/plain.lua.

lupa's Lua is built for every system, without POSIX: its own have no pipes, no exit codes and make no file.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from functools import wraps
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from smqrt.apps.lua.api.open_files import LuaJob
from smqrt.apps.lua.api.processes import ProcessBinding
from smqrt.apps.lua.bridge import Function, LuaResult, LuaValues, from_utf8, methods
from smqrt.apps.lua.services import Services
from smqrt.apps.lua.vm import Vm
from smqrt.child_processes.shell import ShellChild, has_shell, inheritable_descriptors
from smqrt.errors import StreamError
from smqrt.http.blocking_io import disks
from smqrt.loop import greenlet_pool
from smqrt.process.current_application import AppScope


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
        inherited = greenlet_pool.in_thread(inheritable_descriptors)
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
        return greenlet_pool.call(_with_numbers(child.read)) if data is None else data

    def read_now(self, number: int) -> LuaResult:
        """The same, False when that would have to be waited for."""
        data = self._pipes[number].read_now()
        return False if data is None else data

    def write(self, number: int, data: bytes) -> LuaResult:
        child = self._pipes[number]
        count = child.write_now(data)
        return count == len(data) or greenlet_pool.call(_with_numbers(self._write), child, data[count:])

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
    blocking: dict[str, Function] = {"make_temporary": lambda: greenlet_pool.in_thread(make_temporary)}
    blocking |= methods(binding, "popen execute close", _with_numbers)
    parking: dict[str, Function] = {"remove": _on_disk(_remove), "rename": _on_disk(_rename)}
    vm.namespace("ba.plain", direct, blocking, parking=parking | methods(binding, "read write", _with_numbers))
