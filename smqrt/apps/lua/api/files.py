"""io objects and open files for Lua: the Python half (spec: bas-api §6).

What the system has in memory the loop gets itself, at the price of one call. Everything else is for the threads of the
disk it lies on, and the activity is parked meanwhile.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Callable, Iterator
from itertools import islice

from smqrt.apps.lua.api.open_files import MAX_POSITION, FileOnDisk, LuaJob, OpenFile, open_file, with_words
from smqrt.apps.lua.bridge import Function, LuaResult, fail, from_utf8, methods, utf8
from smqrt.apps.lua.services import Services
from smqrt.apps.lua.vm import Vm
from smqrt.errors import ArgumentError
from smqrt.http.blocking_io import disks
from smqrt.http.open_files import DiskFile
from smqrt.http.resources import Io, Stat

ENTRIES_AT_ONCE = 500
"""Of a folder, for one job: a thread that lists many thousand in one go would have Python's lock most of the time."""


class FilesBinding:
    """Keeps what the handles of Lua stand for.

    Operations on an io have three forms, as those on files: `<name>_now` gives False when it may take time, `<name>`
    parks the activity, `<name>_here` does it where an activity can't wait.
    """

    def __init__(self, services: Services) -> None:
        self._named: dict[str, Io] = services.ios
        self._next_handle = itertools.count(1).__next__
        self._ios: dict[int, Io] = {}
        self._handles: dict[int, int] = {}  # id of an io -> its handle, so that one io is one object in Lua
        self._files: dict[int, OpenFile] = {}
        self._listings: dict[int, tuple[str, Iterator[Stat]]] = {}  # where the folder lies, and the rest of its entries

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

    def realpath(self, handle: int, name: bytes) -> bytes:
        return utf8(self.io(handle).realpath(from_utf8(name)))

    def resourcetype(self, handle: int) -> bytes:
        return self.io(handle).kind.encode()

    def absolute(self, name: bytes) -> bytes:
        """A name on the disk, from the current folder."""
        return os.path.abspath(name)

    def label(self, handle: int, name: bytes) -> bytes:
        """What tracebacks call a file: the folder's name and the file's."""
        return utf8(label(self.io(handle), from_utf8(name)))

    def perform(self, operation: bytes, handle: int, name: bytes, more: bytes | None) -> LuaResult:
        """Do what one of `_OPERATIONS` does, in a thread; `more`: its second argument."""
        io, path = self.io(handle), from_utf8(name)
        place = io.place(path)
        job = LuaJob(with_words(disks.doing(place, self._operation(operation))), io, path, more)
        if operation == b"open":
            job.discard = self._drop_opened
        return disks.threads(place).submit(job)

    def _drop_opened(self, number: int | tuple[object, ...]) -> None:
        """Nobody waited until the file was open."""
        if isinstance(number, int):
            self.drop(number)

    def perform_here(self, operation: bytes, handle: int, name: bytes, more: bytes | None) -> LuaResult:
        """The same, in the loop."""
        return self._operation(operation)(self.io(handle), from_utf8(name), more)

    def _operation(self, operation: bytes) -> Callable[[Io, str, bytes | None], LuaResult]:
        own = {b"sub": self._sub, b"open": self._open, b"files": self._list}
        return own.get(operation) or _OPERATIONS[operation]

    def _sub(self, io: Io, path: str, _more: bytes | None) -> LuaResult:
        return self.handle_of(io.sub(path))

    def _open(self, io: Io, name: str, mode: bytes | None) -> LuaResult:
        return self._keep(open_file(io.open(name, (mode or b"r").decode("latin-1")), io, name))

    def file(self, number: int) -> OpenFile:
        """Return the open file of a handle."""
        return self._file(number)

    def _keep(self, file: OpenFile) -> int:
        number = self._next_handle()
        self._files[number] = file
        return number

    def _list(self, io: Io, path: str, _more: bytes | None) -> LuaResult:
        return self._portion(self._next_handle(), io.place(path), io.files(path))

    def _portion(self, number: int, place: str, entries: Iterator[Stat]) -> LuaResult:
        """The next entries, one behind the other: a name with its length, isdir, mtime and size. And the number of the
        listing, 0 when these are the last."""
        portion = list(map(_packed, islice(entries, ENTRIES_AT_ONCE)))
        is_over = len(portion) < ENTRIES_AT_ONCE
        if not is_over:
            self._listings[number] = place, entries
        return b"".join(portion), 0 if is_over else number

    def list_more(self, number: int) -> LuaResult:
        place, entries = self._listings.pop(number)
        return disks.threads(place).submit(LuaJob(with_words(self._portion), number, place, entries))

    def list_more_here(self, number: int) -> LuaResult:
        return self._portion(number, *self._listings.pop(number))

    def end_list(self, number: int) -> None:
        """Nobody wants the rest."""
        self._listings.pop(number, None)

    def open_now(self, handle: int, name: bytes) -> LuaResult:
        io, path = self.io(handle), from_utf8(name)
        fd = io.open_now(path)
        return fd is not None and self._keep(FileOnDisk(DiskFile(fd, is_local=True), io.place(path)))

    def stat_now(self, handle: int, name: bytes) -> LuaResult:
        stat = self.io(handle).stat_now(from_utf8(name))
        return stat is not None and _facts(stat)

    def read_now(self, number: int, size_bytes: int) -> LuaResult:
        """The next bytes, None at the end; everything for -1."""
        return self._file(number).read_now(size_bytes)

    def write_now(self, number: int, data: bytes) -> LuaResult:
        return self._file(number).write_now(data)

    def seek_now(self, number: int, offset: int) -> LuaResult:
        if offset < 0:
            raise ArgumentError("seek: the offset counts from the start, it can't be negative")
        return fail("ioerror") if offset > MAX_POSITION else self._file(number).seek_now(offset)

    def read(self, number: int, size_bytes: int) -> LuaResult:
        return self._file(number).read(size_bytes)

    def write(self, number: int, data: bytes) -> LuaResult:
        return self._file(number).write(data)

    def seek(self, number: int, offset: int) -> LuaResult:
        return self._file(number).seek(offset)

    def flush(self, number: int) -> LuaResult:
        return self._file(number).flush()

    def close(self, number: int) -> LuaResult:
        return self._files.pop(number).close()

    def drop(self, number: int) -> bool:
        """Close a file without waiting."""
        file = self._files.pop(number, None)
        if file is not None:
            file.close()
        return True

    def read_here(self, number: int, size_bytes: int) -> LuaResult:
        return self._file(number).read_here(size_bytes)

    def write_here(self, number: int, data: bytes) -> LuaResult:
        return self._file(number).write_here(data)

    def seek_here(self, number: int, offset: int) -> LuaResult:
        return self._file(number).seek_here(offset)

    def flush_here(self, number: int) -> LuaResult:
        return self._file(number).flush_here()

    def _file(self, number: int) -> OpenFile:
        file = self._files.get(number)
        if file is None:
            raise ArgumentError("attempt to use a closed file")
        return file


def _facts(stat: Stat) -> tuple[bytes, int, int, bool]:
    return utf8(stat.name), stat.mtime, stat.size, stat.isdir


def _packed(entry: Stat) -> bytes:
    name = utf8(entry.name)
    return struct.pack(f">I{len(name)}s?qQ", len(name), name, entry.isdir, entry.mtime, entry.size)


def _renamed(io: Io, old: str, new: bytes | None) -> bool:
    io.rename(old, from_utf8(new or b""))
    return True


def _changed(change: str) -> Callable[[Io, str, bytes | None], bool]:
    def call(io: Io, name: str, _more: bytes | None) -> bool:
        getattr(io, change)(name)
        return True

    return call


_OPERATIONS: dict[bytes, Callable[[Io, str, bytes | None], LuaResult]] = {
    b"stat": lambda io, name, _more: _facts(io.stat(name)),
    b"rename": _renamed,
    b"mkdir": _changed("mkdir"),
    b"rmdir": _changed("rmdir"),
    b"remove": _changed("remove"),
}


def label(io: Io, name: str) -> str:
    """The folder's own name, a slash, and the name: short enough for Lua's messages, long enough for their reader."""
    return f"{os.path.basename(io.realpath())}/{name.lstrip('/')}"


_WITH_WORDS = (
    "realpath resourcetype perform_here list_more_here open_now stat_now read_now write_now seek_now "
    "read_here write_here seek_here flush_here"
)
_PLAIN = "drop_io named_io io_names absolute label drop end_list"
_PARKING = "perform list_more read write seek flush close"


def install(vm: Vm, services: Services) -> FilesBinding:
    """Give Lua the io objects of the server; return what knows their handles."""
    binding = FilesBinding(services)
    functions: dict[str, Function] = methods(binding, _PLAIN) | methods(binding, _WITH_WORDS, with_words)
    vm.namespace("ba.files", functions, parking=methods(binding, _PARKING, with_words))
    return binding
