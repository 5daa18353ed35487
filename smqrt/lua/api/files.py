"""io objects and open files for Lua: the Python half (spec: bas-api §6)."""

from __future__ import annotations

import itertools
import os
import struct
from typing import IO

from gevent import get_hub
from gevent.lock import BoundedSemaphore

from smqrt.errors import ArgumentError
from smqrt.http.resources import Io, IoError, Stat
from smqrt.lua.bridge import Function, LuaResult, LuaValue, fail, from_utf8, methods, utf8
from smqrt.lua.services import Services
from smqrt.lua.vm import Vm

LOOKING_AT_ONCE = 4
"""So many threads look at folders and files; the hub has ten, and names are looked up in them too."""
_looking = BoundedSemaphore(LOOKING_AT_ONCE)


class FilesBinding:
    """Keeps what the handles of Lua stand for. Lua calls the operations directly; `stat` and `files` also so that a
    thread does the work, see `_in_thread`."""

    def __init__(self, services: Services) -> None:
        self._named: dict[str, Io] = services.ios
        self._next_handle = itertools.count(1).__next__
        self._ios: dict[int, Io] = {}
        self._handles: dict[int, int] = {}  # id of an io -> its handle, so that one io is one object in Lua
        self._files: dict[int, IO[bytes]] = {}

    def handle_of(self, io: Io) -> int:
        """Return the handle by which Lua knows `io`."""
        handle = self._handles.get(id(io))
        if handle is None:
            handle = self._handles[id(io)] = self._next_handle()
            self._ios[handle] = io
        return handle

    def io(self, handle: int) -> Io:
        """Return the io of a handle."""
        return self._ios[handle]

    def drop_io(self, handle: int) -> None:
        io = self._ios.pop(handle, None)
        self._handles.pop(id(io), None)

    def named_io(self, name: bytes) -> int | None:
        io = self._named.get(from_utf8(name))
        return None if io is None else self.handle_of(io)

    def io_names(self) -> tuple[bytes, ...]:
        return tuple(utf8(name) for name in self._named)

    def sub_io(self, handle: int, path: bytes) -> int:
        return self.handle_of(self.io(handle).sub(from_utf8(path)))

    def stat(self, handle: int, name: bytes) -> tuple[bytes, int, int, bool]:
        stat = self.io(handle).stat(from_utf8(name))
        return utf8(stat.name), stat.mtime, stat.size, stat.isdir

    def files(self, handle: int, path: bytes) -> bytes:
        """Every entry of a folder, one behind the other: a name with its length, isdir, mtime and size."""
        return b"".join(map(_packed, self.io(handle).files(from_utf8(path))))

    def mkdir(self, handle: int, name: bytes) -> bool:
        self.io(handle).mkdir(from_utf8(name))
        return True

    def rmdir(self, handle: int, name: bytes) -> bool:
        self.io(handle).rmdir(from_utf8(name))
        return True

    def remove(self, handle: int, name: bytes) -> bool:
        self.io(handle).remove(from_utf8(name))
        return True

    def rename(self, handle: int, old: bytes, new: bytes) -> bool:
        self.io(handle).rename(from_utf8(old), from_utf8(new))
        return True

    def realpath(self, handle: int, name: bytes) -> bytes:
        return utf8(self.io(handle).realpath(from_utf8(name)))

    def resourcetype(self, handle: int) -> bytes:
        return self.io(handle).kind.encode()

    def label(self, handle: int, name: bytes) -> bytes:
        """What tracebacks call a file: the folder's name and the file's."""
        return utf8(label(self.io(handle), from_utf8(name)))

    def read_all(self, handle: int, name: bytes) -> bytes:
        return self.io(handle).read(from_utf8(name))

    def open(self, handle: int, name: bytes, mode: bytes) -> int:
        file = self.io(handle).open(from_utf8(name), mode.decode("latin-1"))
        number = self._next_handle()
        self._files[number] = file
        return number

    def read(self, number: int, size_bytes: int) -> bytes | None:
        """The next bytes, None at the end; everything for -1."""
        data = self._files[number].read(size_bytes)
        return data if data or size_bytes == 0 else None

    def write(self, number: int, data: bytes) -> bool:
        self._files[number].write(data)
        return True

    def seek(self, number: int, offset: int) -> bool:
        if offset < 0:
            raise ArgumentError("seek: the offset counts from the start, it can't be negative")
        self._files[number].seek(offset)
        return True

    def flush(self, number: int) -> bool:
        self._files[number].flush()
        return True

    def close(self, number: int) -> bool:
        self._files.pop(number).close()
        return True


def _packed(entry: Stat) -> bytes:
    name = utf8(entry.name)
    return struct.pack(f">I{len(name)}s?qQ", len(name), name, entry.isdir, entry.mtime, entry.size)


def label(io: Io, name: str) -> str:
    """The folder's own name, a slash, and the name: short enough for Lua's messages, long enough for their reader."""
    return f"{os.path.basename(io.realpath())}/{name.lstrip('/')}"


_OPERATIONS = (
    "sub_io stat files mkdir rmdir remove rename realpath resourcetype read_all open read write seek flush close"
)
_PLAIN = "drop_io named_io io_names label"


def install(vm: Vm, services: Services) -> FilesBinding:
    """Give Lua the io objects of the server; return what knows their handles."""
    binding = FilesBinding(services)
    functions = methods(binding, _PLAIN)
    functions |= methods(binding, _OPERATIONS, _with_words)
    in_threads = {f"{name}_in_thread": _in_thread(functions[name]) for name in ("stat", "files")}
    vm.namespace("ba.files", functions, in_threads)
    return binding


def _in_thread(operation: Function) -> Function:
    """`operation` in a thread: a folder may have many thousand entries, and a disk may be slow or gone.

    It must not raise: the traceback of an error that crosses threads keeps the greenlet that waited for it, in a cycle.
    """

    def call(*args: LuaValue) -> LuaResult:
        with _looking:
            return get_hub().threadpool.apply(operation, args)

    return call


def _with_words(operation: Function) -> Function:
    """`operation` with failures as Lua expects them: nil and an error word."""

    def call(*args: LuaValue) -> LuaResult:
        try:
            return operation(*args)
        except IoError as error:
            return fail(error.word)
        except OSError as error:
            return fail(IoError.of(error, "").word)

    return call
