"""The open files of Lua: those of disks, special files, and those that are in memory.

Each has the same operations in three forms. `read_now` and the like are called first: they give False when it would
take time. `read` may give a `Deferred`. `read_here` is for places that an activity can't leave, such as a finalizer.
"""

from __future__ import annotations

import atexit
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from io import BufferedRandom, BufferedReader, BufferedWriter
from typing import IO, Any, Protocol
from weakref import WeakSet

from gevent import get_hub

from smqrt.apps.lua.bridge import LuaResult, LuaValue, fail
from smqrt.errors import ArgumentError
from smqrt.http.blocking_io import disks
from smqrt.http.open_files import MAX_READ_BYTES, DiskFile, PipeFile
from smqrt.http.resources import Io, IoError
from smqrt.loop import greenlet_pool
from smqrt.loop.threads import DiskJob

MAX_QUEUED = 1000  # operations on one file that wait for each other
KEPT_S = 0.5
"""So long at most the last of what was written stays here: others read the file, and a process may end."""
MAX_POSITION = 1 << 62
_STUCK = "this file is in use by a call that waits, and here nobody can wait for it: a C boundary is in between"


class LuaJob(DiskJob):
    """A job whose failure to come in time is an error word."""

    __slots__ = ()

    def reject(self, error: BaseException) -> None:
        """See `Deferred.reject`."""
        if isinstance(error, TimeoutError):
            self.resolve(fail("ioerror"))
        else:
            super().reject(error)


def with_words(operation: Callable[..., LuaResult]) -> Callable[..., LuaResult]:
    """`operation` with failures as Lua expects them: nil and an error word."""

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
    """An open file. What gives bytes gives None at the end of the file."""

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
    """Return what stands for `file`, which is `name` in `io`."""
    if isinstance(file, PipeFile):
        return SpecialFile(file)
    if isinstance(file, BufferedReader | BufferedWriter | BufferedRandom):
        fd = os.dup(file.fileno())
        file.close()
        return FileOnDisk(DiskFile(fd, file.mode), io.place(name))
    return FileInMemory(file)


_unwritten: WeakSet[FileOnDisk] = WeakSet()


@atexit.register
def _write_all() -> None:
    for file in list(_unwritten):
        with suppress(ArgumentError):  # a thread is at it
            file.flush_here()


def _at_end(data: bytes, size_bytes: int) -> bytes | None:
    return data if data or size_bytes == 0 else None


class FileOnDisk:
    """A file of a disk. One job at a time is with the threads, the others wait for it.

    Args:
        file: the file.
        path: where it lies.
    """

    def __init__(self, file: DiskFile, path: str) -> None:
        self._file, self._path = file, path
        self._jobs: deque[LuaJob] = deque()
        self._is_busy = False
        self._fault: LuaResult = None  # of a write that nobody waited for
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
        """Close it behind what is under way. Waited for is only what was written."""
        is_clean = self._file.is_clean
        if is_clean and not self._is_busy and self._file.is_local:
            return self._done(self._file.close)
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
            raise ArgumentError(_STUCK)

    @with_words
    def _read(self, size_bytes: int) -> LuaResult:
        return _at_end(self._file.read(size_bytes), size_bytes)

    @with_words
    def _done(self, operation: Callable[..., object], *args: LuaValue) -> LuaResult:
        fault, self._fault = self._fault, None
        operation(*args)
        return True if fault is None else fault

    def _submit(self, job: LuaJob) -> LuaJob:
        job.after = self._next
        if not self._is_busy:
            self._is_busy = True
            disks.threads(self._path).submit(job)
        elif len(self._jobs) < MAX_QUEUED or job.must_run:
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
    """A pipe or a device: what waits for it has a greenlet."""

    def __init__(self, file: PipeFile) -> None:
        self._file = file

    def read_now(self, size_bytes: int) -> LuaResult:
        return False

    def write_now(self, data: bytes) -> LuaResult:
        return False

    def seek_now(self, position: int) -> LuaResult:
        return fail("noimplementation")

    def read(self, size_bytes: int) -> LuaResult:
        return greenlet_pool.call(self._read_all if size_bytes < 0 else self._read, size_bytes)

    def write(self, data: bytes) -> LuaResult:
        return greenlet_pool.call(self._write, data)

    def seek(self, position: int) -> LuaResult:
        return fail("noimplementation")

    def flush(self) -> LuaResult:
        return True

    def close(self) -> LuaResult:
        self._file.close()
        return True

    def read_here(self, size_bytes: int) -> LuaResult:
        raise ArgumentError(_STUCK)

    def write_here(self, data: bytes) -> LuaResult:
        raise ArgumentError(_STUCK)

    seek_here = seek
    flush_here = flush

    @with_words
    def _read(self, size_bytes: int) -> LuaResult:
        return _at_end(self._file.read(size_bytes), size_bytes)

    @with_words
    def _read_all(self, _size_bytes: int) -> LuaResult:
        pieces, count = [], 0
        while data := self._file.read():
            pieces.append(data)
            count += len(data)
            if count > MAX_READ_BYTES:
                raise IoError("mem", "more than a string may be")
        return b"".join(pieces) or None

    @with_words
    def _write(self, data: bytes) -> LuaResult:
        self._file.write(data)
        return True


class FileInMemory:
    """What is all here: an entry of a ZIP file, unpacked."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    @with_words
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
