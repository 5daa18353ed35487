"""Python half of io objects, open files and named pipes (spec: bas-api §6, §7).

The event loop itself reads data from the system's page cache, which costs one system call. A thread of the disk runs
all other operations while the activity is parked.
"""

from __future__ import annotations

import atexit
import itertools
import os
import stat as file_modes
import struct
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import wraps
from io import BufferedRandom, BufferedReader, BufferedWriter
from itertools import islice
from typing import IO, Any, Protocol
from weakref import WeakSet

from gevent import get_hub

from smqrt.apps.lua.bridge import Function, LuaResult, LuaValue, fail, from_utf8, methods, utf8
from smqrt.apps.lua.vm import Services, Vm
from smqrt.errors import ArgumentError
from smqrt.http.open_files import MAX_READ_BYTES, DiskFile, PipeFile, disks
from smqrt.http.resources import Io, IoError, Stat
from smqrt.loop import greenlets, threads
from smqrt.loop.threads import DiskJob

# ---- Open files: on disks, special files, and in memory.
#
# Each operation has three forms. Lua first calls `read_now`, which returns False if it would block. Then it calls
# `read`, which may return a `Deferred`. `read_here` blocks; it is for code that can't be parked, such as a finalizer.

MAX_QUEUED = 1000
"""Limit of the queued operations of one file."""
KEPT_S = 0.5
"""Seconds until collected bytes are written: other programs read the file, and the process may be killed."""
MAX_POSITION = 1 << 62  # far below the overflow of the system's signed 64-bit offsets
_BUSY = "another call is using this file, and this call can't wait for it: a C boundary is in between"


class LuaJob(DiskJob):
    """A job whose timeout becomes an error word."""

    __slots__ = ()

    def reject(self, error: BaseException) -> None:
        """See `Deferred.reject`."""
        if isinstance(error, TimeoutError):
            self.resolve(fail("ioerror"))
        else:
            super().reject(error)


def with_error_words(operation: Callable[..., LuaResult]) -> Callable[..., LuaResult]:
    """Wrap `operation` so that an IoError or OSError becomes nil and an error word."""

    @wraps(operation)
    def call(*args: Any) -> LuaResult:
        try:
            return operation(*args)
        except IoError as error:
            return fail(error.word)
        except OSError as error:
            return fail(IoError.of(error, "").word)

    return call


class OpenFile(Protocol):
    """An open file. Reading returns None at the end of the file."""

    def read_now(self, size_bytes: int) -> LuaResult: ...
    def write_now(self, data: bytes) -> LuaResult: ...
    def seek_now(self, position: int) -> LuaResult: ...
    def read(self, size_bytes: int) -> LuaResult: ...
    def write(self, data: bytes) -> LuaResult: ...
    def seek(self, position: int) -> LuaResult: ...
    def flush(self) -> LuaResult: ...
    def close(self) -> LuaResult: ...
    def read_here(self, size_bytes: int) -> LuaResult: ...
    def write_here(self, data: bytes) -> LuaResult: ...
    def seek_here(self, position: int) -> LuaResult: ...
    def flush_here(self) -> LuaResult: ...


def open_file(file: IO[bytes], io: Io, name: str) -> OpenFile:
    """Return the open file for `file`, whose name in `io` is `name`."""
    if isinstance(file, PipeFile):
        return SpecialFile(file)
    if isinstance(file, BufferedReader | BufferedWriter | BufferedRandom):
        fd = os.dup(file.fileno())  # since `file` closes its own
        file.close()
        return FileOnDisk(DiskFile(fd, file.mode), io.disk_path(name))
    return FileInMemory(file)


_unwritten: WeakSet[FileOnDisk] = WeakSet()  # files with a running timer, which keeps them alive


@atexit.register
def _write_all() -> None:
    for file in list(_unwritten):
        with suppress(ArgumentError):  # a thread is using the file and writes the rest
            file.flush_here()


def _at_end(data: bytes, size_bytes: int) -> bytes | None:
    return data if data or size_bytes == 0 else None


class FileOnDisk:
    """A file on a disk. A thread runs one of its jobs at a time; the other jobs are queued.

    Args:
        file: the file.
        path: its path, which selects the threads.
    """

    def __init__(self, file: DiskFile, path: str) -> None:
        self._file, self._path = file, path
        self._jobs: deque[LuaJob] = deque()
        self._is_busy = False
        self._fault: LuaResult = None  # of a write in the background; the next operation returns it
        self._timer: Any = None

    def read_now(self, size_bytes: int) -> LuaResult:
        if self._is_busy:
            return False
        data = self._file.read_now(size_bytes)
        return False if data is None else _at_end(data, size_bytes)

    def write_now(self, data: bytes) -> LuaResult:
        if self._is_busy or self._fault is not None or not self._file.write_now(data):
            return False
        if self._timer is None and not self._file.is_clean:
            self._timer = get_hub().loop.timer(KEPT_S)
            self._timer.start(self._write_kept)
            _unwritten.add(self)
        return True

    def seek_now(self, position: int) -> LuaResult:
        return not self._is_busy and self._file.seek_now(position)

    def read(self, size_bytes: int) -> LuaResult:
        return self._submit(LuaJob(self._read, size_bytes))

    def write(self, data: bytes) -> LuaResult:
        return self._submit(LuaJob(self._done, self._file.write, data))

    def seek(self, position: int) -> LuaResult:
        return self._submit(LuaJob(self._done, self._file.seek, position))

    def flush(self) -> LuaResult:
        if not self._is_busy and self._file.is_clean and self._fault is None:
            return True
        return self._submit(LuaJob(self._done, self._file.flush, must_run=True))

    def close(self) -> LuaResult:
        """Close the file after its queued jobs. The activity waits only if bytes are unwritten, to get the error."""
        is_clean = self._file.is_clean
        if is_clean and not self._is_busy and self._file.is_local:
            return self._done(self._file.close)  # does not block
        job = LuaJob(self._done, self._file.close, must_run=True)
        result = self._submit(job)
        return True if is_clean and self._fault is None else result

    def read_here(self, size_bytes: int) -> LuaResult:
        self._check_free()
        return self._read(size_bytes)

    def write_here(self, data: bytes) -> LuaResult:
        self._check_free()
        return self._done(self._file.write, data)

    def seek_here(self, position: int) -> LuaResult:
        self._check_free()
        return self._done(self._file.seek, position)

    def flush_here(self) -> LuaResult:
        self._check_free()
        return self._done(self._file.flush)

    def _check_free(self) -> None:
        if self._is_busy:
            raise ArgumentError(_BUSY)

    @with_error_words
    def _read(self, size_bytes: int) -> LuaResult:
        return _at_end(self._file.read(size_bytes), size_bytes)

    @with_error_words
    def _done(self, operation: Callable[..., object], *args: LuaValue) -> LuaResult:
        fault, self._fault = self._fault, None
        operation(*args)
        return True if fault is None else fault

    def _submit(self, job: LuaJob) -> LuaJob:
        job.after = self._next
        if not self._is_busy:
            self._is_busy = True
            disks.threads(self._path).submit(job)
        elif len(self._jobs) < MAX_QUEUED or job.must_run:  # a lost flush or close would lose data
            self._jobs.append(job)
        else:
            job.resolve(fail("locked"))
        return job

    def _next(self) -> None:
        if self._jobs:
            disks.threads(self._path).submit(self._jobs.popleft())
        else:
            self._is_busy = False

    def _write_kept(self) -> None:
        timer, self._timer = self._timer, None
        timer.close()
        if not self._file.is_clean:
            self._submit(LuaJob(self._done, self._file.flush, must_run=True)).then(self._note)

    def _note(self, result: Any, _error: BaseException | None) -> None:
        if result is not True:
            self._fault = result


class SpecialFile:
    """A pipe or a device. A pooled greenlet runs operations that may block."""

    def __init__(self, file: PipeFile) -> None:
        self._file = file

    def read_now(self, size_bytes: int) -> LuaResult:
        return False

    def write_now(self, data: bytes) -> LuaResult:
        return False

    def seek_now(self, position: int) -> LuaResult:
        return fail("noimplementation")

    def read(self, size_bytes: int) -> LuaResult:
        return greenlets.call(self._read, size_bytes)

    def write(self, data: bytes) -> LuaResult:
        return greenlets.call(self._write, data)

    def seek(self, position: int) -> LuaResult:
        return fail("noimplementation")

    def flush(self) -> LuaResult:
        return True

    def close(self) -> LuaResult:
        self._file.close()
        return True

    def read_here(self, size_bytes: int) -> LuaResult:
        raise ArgumentError(_BUSY)

    def write_here(self, data: bytes) -> LuaResult:
        raise ArgumentError(_BUSY)

    seek_here = seek
    flush_here = flush

    @with_error_words
    def _read(self, size_bytes: int) -> LuaResult:
        if size_bytes >= 0:
            return _at_end(self._file.read(size_bytes), size_bytes)
        pieces, count = [], 0
        while data := self._file.read():
            pieces.append(data)
            count += len(data)
            if count > MAX_READ_BYTES:
                raise IoError("mem", f"limit reached: {MAX_READ_BYTES} bytes in one read")
        return b"".join(pieces) or None

    @with_error_words
    def _write(self, data: bytes) -> LuaResult:
        self._file.write(data)
        return True


class FileInMemory:
    """A file whose content is in memory: the unpacked entry of a ZIP file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    @with_error_words
    def read_now(self, size_bytes: int) -> LuaResult:
        return _at_end(self._file.read(size_bytes), size_bytes)

    def write_now(self, data: bytes) -> LuaResult:
        return fail("noaccess")

    def seek_now(self, position: int) -> LuaResult:
        self._file.seek(position)
        return True

    def flush(self) -> LuaResult:
        return True

    def close(self) -> LuaResult:
        self._file.close()
        return True

    read = read_here = read_now
    write = write_here = write_now
    seek = seek_here = seek_now
    flush_here = flush


class FileTable:
    """Open files by number, which Lua uses as the handle. Operations have the forms of `OpenFile`."""

    def __init__(self) -> None:
        self._next_number = itertools.count(1).__next__
        self._files: dict[int, OpenFile] = {}

    def file(self, number: int) -> OpenFile:
        """Return the open file of a handle. Raises ArgumentError when it is closed."""
        file = self._files.get(number)
        if file is None:
            raise ArgumentError("attempt to use a closed file")
        return file

    def keep(self, file: OpenFile) -> int:
        """Return a new number for a file."""
        number = self._next_number()
        self._files[number] = file
        return number

    def read_now(self, number: int, size_bytes: int) -> LuaResult:
        """Return the next bytes, or for -1 all remaining bytes; None at the end of the file."""
        return self.file(number).read_now(size_bytes)

    def write_now(self, number: int, data: bytes) -> LuaResult:
        return self.file(number).write_now(data)

    def seek_now(self, number: int, offset: int) -> LuaResult:
        if offset < 0:
            raise ArgumentError("seek: the offset counts from the start and can't be negative")
        return fail("ioerror") if offset > MAX_POSITION else self.file(number).seek_now(offset)

    def read(self, number: int, size_bytes: int) -> LuaResult:
        return self.file(number).read(size_bytes)

    def write(self, number: int, data: bytes) -> LuaResult:
        return self.file(number).write(data)

    def seek(self, number: int, offset: int) -> LuaResult:
        return self.file(number).seek(offset)

    def flush(self, number: int) -> LuaResult:
        return self.file(number).flush()

    def close(self, number: int) -> LuaResult:
        return self._files.pop(number).close()

    def drop(self, number: int) -> bool:
        """Close a file in the background."""
        file = self._files.pop(number, None)
        if file is not None:
            file.close()
        return True

    def read_here(self, number: int, size_bytes: int) -> LuaResult:
        return self.file(number).read_here(size_bytes)

    def write_here(self, number: int, data: bytes) -> LuaResult:
        return self.file(number).write_here(data)

    def seek_here(self, number: int, offset: int) -> LuaResult:
        return self.file(number).seek_here(offset)

    def flush_here(self, number: int) -> LuaResult:
        return self.file(number).flush_here()


ENTRIES_AT_ONCE = 500
"""Directory entries per job: a thread that lists many thousands at once would hold the GIL most of the time."""


class FilesBinding:
    """io objects and directory listings by their handles in Lua.

    Attributes:
        files: the open files.

    Operations on an io have three forms, like those of files: `<name>_now` returns False when it could block, `<name>`
    parks the activity, and `<name>_here` blocks the event loop, for code where the activity can't be parked.
    """

    def __init__(self, services: Services) -> None:
        self._named: dict[str, Io] = services.ios
        self._next_handle = itertools.count(1).__next__
        self._ios: dict[int, Io] = {}
        self._handles: dict[int, int] = {}  # id of an io -> its handle, so that one io is one object in Lua
        self.files = FileTable()
        self._listings: dict[int, tuple[str, Iterator[Stat]]] = {}  # path of the folder, and its remaining entries

    def handle_of(self, io: Io) -> int:
        """Return the handle of `io` in Lua; the same io always has the same handle."""
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
        """Return the absolute path of a name that is relative to the current folder."""
        return os.path.abspath(name)

    def label(self, handle: int, name: bytes) -> bytes:
        """Return the name of a file in tracebacks; see `label`."""
        return utf8(label(self.io(handle), from_utf8(name)))

    def perform(self, operation: bytes, handle: int, name: bytes, more: bytes | None) -> LuaResult:
        """Run an operation in a thread; see `_run` for the arguments. Parks."""
        io, path = self.io(handle), from_utf8(name)
        place = io.disk_path(path)
        job = LuaJob(with_error_words(disks.with_mount(place, self._run)), operation, io, path, more)
        if operation == b"open":
            # The activity may have ended before the thread opened the file. A failure is a tuple, not a number.
            job.discard = lambda result: self.files.drop(result) if isinstance(result, int) else None
        return disks.threads(place).submit(job)

    def perform_here(self, operation: bytes, handle: int, name: bytes, more: bytes | None) -> LuaResult:
        """Run an operation in the event loop."""
        return self._run(operation, self.io(handle), from_utf8(name), more)

    def _run(self, operation: bytes, io: Io, path: str, more: bytes | None) -> LuaResult:
        """Run an operation.

        Args:
            operation: sub, open, files, stat, rename, mkdir, rmdir or remove.
            more: the mode of open, the new name of rename.
        """
        if operation == b"sub":
            return self.handle_of(io.sub(path))
        if operation == b"open":
            return self.files.keep(open_file(io.open(path, (more or b"r").decode("latin-1")), io, path))
        if operation == b"files":
            return self._portion(self._next_handle(), io.disk_path(path), io.files(path))
        if operation == b"stat":
            return _stat_values(io.stat(path))
        if operation == b"rename":
            io.rename(path, from_utf8(more or b""))
        else:
            {b"mkdir": io.mkdir, b"rmdir": io.rmdir, b"remove": io.remove}[operation](path)
        return True

    def _portion(self, number: int, place: str, entries: Iterator[Stat]) -> LuaResult:
        """Return the next entries in packed form, and the number of the listing; 0 if it has no more entries.

        An entry is the length of its name, the name, isdir, mtime and size.
        """
        parts = []
        for entry in islice(entries, ENTRIES_AT_ONCE):
            name = utf8(entry.name)
            parts.append(struct.pack(f">I{len(name)}s?qQ", len(name), name, entry.isdir, entry.mtime, entry.size))
        is_last = len(parts) < ENTRIES_AT_ONCE
        if not is_last:
            self._listings[number] = place, entries
        return b"".join(parts), 0 if is_last else number

    def list_more(self, number: int) -> LuaResult:
        place, entries = self._listings.pop(number)
        return disks.threads(place).submit(LuaJob(with_error_words(self._portion), number, place, entries))

    def list_more_here(self, number: int) -> LuaResult:
        return self._portion(number, *self._listings.pop(number))

    def end_list(self, number: int) -> None:
        """Forget a listing that was not read to its end."""
        self._listings.pop(number, None)

    def open_now(self, handle: int, name: bytes) -> LuaResult:
        io, path = self.io(handle), from_utf8(name)
        fd = io.open_now(path)
        return fd is not None and self.files.keep(FileOnDisk(DiskFile(fd, is_local=True), io.disk_path(path)))

    def stat_now(self, handle: int, name: bytes) -> LuaResult:
        stat = self.io(handle).stat_now(from_utf8(name))
        return stat is not None and _stat_values(stat)


def _stat_values(stat: Stat) -> tuple[bytes, int, int, bool]:
    return utf8(stat.name), stat.mtime, stat.size, stat.isdir


def label(io: Io, name: str) -> str:
    """Return the last part of the io's path and the name of the file, with a slash between them.

    A whole path would be cut: Lua shows at most 60 characters of a chunk name.
    """
    return f"{os.path.basename(io.realpath())}/{name.lstrip('/')}"


# ---- Named pipes. `FileTable` reads and writes them like other files.


def make_pipe(path: bytes, mode: int) -> LuaResult:
    """Make a named pipe with these permissions; blocks."""
    threads.in_thread(os.mkfifo, from_utf8(path), mode)
    return True


def check_pipe(path: bytes) -> LuaResult:
    """Return True when `path` is a named pipe; blocks."""
    status = threads.in_thread(os.stat, from_utf8(path))
    return True if file_modes.S_ISFIFO(status.st_mode) else fail("invalidname")


_PLAIN = "drop_io named_io io_names absolute label end_list"
_WITH_WORDS = "realpath resourcetype perform_here list_more_here open_now stat_now"
_PARKING = "perform list_more"
_FILE_WITH_WORDS = "read_now write_now seek_now read_here write_here seek_here flush_here"
_FILE_PARKING = "read write seek flush close"


def install(vm: Vm, services: Services) -> FilesBinding:
    """Install the io objects of the server and `ba.pipe`; return the binding with their handles."""
    binding = FilesBinding(services)
    functions: dict[str, Function] = methods(binding, _PLAIN) | methods(binding, _WITH_WORDS, with_error_words)
    functions |= methods(binding.files, "drop") | methods(binding.files, _FILE_WITH_WORDS, with_error_words)
    parking = methods(binding, _PARKING, with_error_words) | methods(binding.files, _FILE_PARKING, with_error_words)
    vm.namespace("ba.files", functions, parking=parking)

    def end_with_app(number: int, application: int | None) -> None:
        """Close the file `number` when its application ends."""
        scope = services.scope_of(application)
        if scope is not None:
            scope.add(binding.files.file(number))

    pipe_functions = {"make": with_error_words(make_pipe), "check": with_error_words(check_pipe)}
    vm.namespace("ba.pipes", {"end_with_app": end_with_app}, pipe_functions)
    return binding
