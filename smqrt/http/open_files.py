"""An open file of a disk, for the loop and for threads: the loop reads what is in the system's memory and keeps what is
written until it is much; everything else is for a thread.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
import stat as mode_bits
from collections.abc import Callable
from typing import IO, Any, TypeVar
from weakref import finalize

import gevent
from gevent import get_hub

from smqrt.http.blocking_io import call_blocking
from smqrt.http.resources import Io, IoError

NOW_BYTES = 64 << 10
"""The loop reads at most so much at a time, which takes 20 us, and keeps so much that was written."""
AHEAD_BYTES = 4096
"""Of smaller reads so much is got at once."""
MAX_READ_BYTES = 64 << 20
"""Of one read. What it gives becomes a string of Lua in one step, which holds the loop for 0.7 ms per MiB."""
_PIECE_BYTES = 1 << 20

_buffer = bytearray(NOW_BYTES)  # of the loop: what is read is copied out at once
_view = memoryview(_buffer)


class DiskFile:
    """A regular file with a position of its own. The loop calls `read_now`, `write_now` and `seek_now`, a thread the
    others, and only while nobody else does anything with the file.

    Args:
        fd: its descriptor; closed with this.
        mode: how it was opened: "rb", "ab+" and the like.
        is_local: it lies on a disk of this machine. Otherwise the loop reads only what the system says it has in
            memory, which most file systems of networks don't say.
    """

    __slots__ = (
        "_ahead", "_ahead_at", "_appends", "_fd", "_is_readable", "_is_writable", "_knows_memory", "_position",
        "_unwritten", "_unwritten_bytes", "is_local",
    )  # fmt: skip

    def __init__(self, fd: int, mode: str = "rb", is_local: bool = False) -> None:
        self._fd, self.is_local = fd, is_local
        self._is_readable, self._is_writable = "r" in mode or "+" in mode, mode != "rb"
        self._appends = "a" in mode
        self._position = 0
        self._ahead, self._ahead_at = b"", 0
        self._unwritten: list[bytes] = []
        self._unwritten_bytes = 0
        self._knows_memory = True  # else the file system, which is tmpfs, is memory itself

    @property
    def is_clean(self) -> bool:
        """Whether all that was written is with the system."""
        return not self._unwritten

    def read_now(self, size_bytes: int) -> bytes | None:
        """Read as `read` does, without waiting; None when the disk has to be asked, or when it is too much for once."""
        if 0 < size_bytes <= AHEAD_BYTES:
            at = self._position - self._ahead_at
            data = self._ahead[at : at + size_bytes]
            if len(data) == size_bytes:
                self._position += size_bytes
                return data
        if self._unwritten or size_bytes > NOW_BYTES or not self._is_readable:
            return None
        if 0 < size_bytes <= AHEAD_BYTES and self._look_ahead(size_bytes):
            self._position += size_bytes
            return self._ahead[:size_bytes]
        return self._read_all_now(NOW_BYTES if size_bytes < 0 else size_bytes, size_bytes < 0)

    def _look_ahead(self, size_bytes: int) -> bool:
        """Have what follows in `_ahead`; return whether it is as much as is wanted."""
        count = self._copy(0, AHEAD_BYTES)
        if count is None or count < size_bytes:
            return False
        self._ahead, self._ahead_at = _view[:count].tobytes(), self._position
        return True

    def _read_all_now(self, wanted: int, to_end: bool) -> bytes | None:
        count = self._copy(0, wanted)
        if count is None:
            return None
        is_unclear = count < wanted or to_end  # the end, or is the rest not in memory?
        if count and is_unclear and self._copy(count, 1) != 0:
            return None
        self._position += count
        return _view[:count].tobytes()

    def _copy(self, ahead: int, size_bytes: int) -> int | None:
        """Copy into the buffer from `ahead` on what follows the position by as much; None when it isn't in memory."""
        if ahead == NOW_BYTES:
            return None
        target = _view[ahead : ahead + size_bytes]
        flags = os.RWF_NOWAIT if self._knows_memory else 0
        try:
            return os.preadv(self._fd, [target], self._position + ahead, flags)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP or not (self._knows_memory and self.is_local):
                return None
            self._knows_memory = False
            return self._copy(ahead, size_bytes)

    def read(self, size_bytes: int) -> bytes:
        """Read so much, or to the end when there is less, or for -1.

        Raises:
            IoError: "mem" when it is more than MAX_READ_BYTES; and what the system says.
        """
        if not self._is_readable:
            raise IoError("noaccess", "the file was opened for writing")
        self.flush()
        size = max(0, os.fstat(self._fd).st_size - self._position)  # 0 for some files that have content
        wanted = MAX_READ_BYTES + 1 if size_bytes < 0 else size_bytes
        if min(size, wanted) > MAX_READ_BYTES:
            raise IoError("mem", f"more than {MAX_READ_BYTES} bytes at once; read it in pieces")
        data = self._read_pieces(min(wanted, max(size + 1, NOW_BYTES)), wanted)
        if len(data) > MAX_READ_BYTES:
            raise IoError("mem", f"more than {MAX_READ_BYTES} bytes at once; read it in pieces")
        self._position += len(data)
        return data

    def _read_pieces(self, first_bytes: int, wanted: int) -> bytes:
        """Read up to `wanted` bytes, in one step when that is what there is."""
        pieces = [os.pread(self._fd, first_bytes, self._position)]
        count = len(pieces[0])
        while pieces[-1] and count < min(wanted, MAX_READ_BYTES + 1):
            pieces.append(os.pread(self._fd, min(_PIECE_BYTES, wanted - count), self._position + count))
            count += len(pieces[-1])
        return pieces[0] if count == len(pieces[0]) else b"".join(pieces)

    def write_now(self, data: bytes) -> bool:
        """Keep `data` until there is more; return whether there was room."""
        self._ahead = b""
        if self._unwritten_bytes + len(data) > NOW_BYTES or not self._is_writable:
            return False
        if data:
            self._unwritten.append(data)
            self._unwritten_bytes += len(data)
        return True

    def write(self, data: bytes) -> None:
        """Write what was kept, and `data`. Raises IoError and what the system says."""
        if not self._is_writable:
            raise IoError("noaccess", "the file was opened for reading")
        if data:
            self._unwritten.append(data)
        self.flush()

    def flush(self) -> None:
        """Return the system what was kept. Raises what the system says; what it did not take is dropped then."""
        kept, self._unwritten, self._unwritten_bytes, self._ahead = self._unwritten, [], 0, b""
        rest = memoryview(kept[0] if len(kept) == 1 else b"".join(kept))
        while rest:
            count = os.write(self._fd, rest) if self._appends else os.pwrite(self._fd, rest, self._position)
            self._position = os.fstat(self._fd).st_size if self._appends else self._position + count
            rest = rest[count:]

    def seek_now(self, position: int) -> bool:
        """Move to a position; return whether that was possible without writing first."""
        if self._unwritten:
            return False
        self._position, self._ahead = position, b""
        return True

    def seek(self, position: int) -> None:
        """Write what was kept, and move."""
        self.flush()
        self._position = position

    def close(self) -> None:
        """Write what was kept, and close the file. Raises as `flush`; the file is closed all the same."""
        try:
            self.flush()
        finally:
            os.close(self._fd)


# ---- A file that takes its name when it is whole, for uploads: until then the file that has the name stays.

PREFIX = ".smqrt-upload-"
"""How names of files that are not whole begin: hidden, in the same folder."""

T = TypeVar("T")


class NewFile:
    """A file that is being written. A context: left early, nothing remains of it. Blocks the greenlet.

    On a disk it is written beside its name and renamed. Other ios can't rename so that nobody sees a half: there it is
    written in place, and what was not finished is removed.

    Args:
        io: gets the file.
        name: the name; a file that has it is replaced.

    Attributes:
        file: to write to, with `reach_file`.

    Raises:
        IoError: it can't be made.
    """

    def __init__(self, io: Io, name: str) -> None:
        self._io, self._name = io, name
        folder = name.rpartition("/")[0]
        own = f"{PREFIX}{secrets.token_hex(8)}"
        self._path = (f"{folder}/{own}" if folder else own) if io.kind == "disk" else name
        self.file: IO[bytes] = call_blocking(io, name, io.open, self._path, "w")
        self._finished = False
        # Also when the server ends meanwhile: then no greenlet comes to `abort`.
        self._leftover = finalize(self, _unlink, io.realpath(self._path)) if self._path != name else None

    def write(self, *pieces: bytes) -> None:
        """Add to it. Raises IoError."""
        reach_file(self._io, self._name, lambda: self.file.writelines(pieces))

    def finish(self) -> None:
        """Return it its name. Raises IoError."""
        reach_file(self._io, self._name, self._close_and_rename)
        self._finished = True

    def abort(self) -> None:
        """Drop it, unless it is finished."""
        if not self._finished:
            self._finished = True
            reach_file(self._io, self._name, self._drop)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.abort()

    def _close_and_rename(self) -> None:
        self.file.close()
        if self._path != self._name:
            self._io.rename(self._path, self._name)
        self._keep()

    def _drop(self) -> None:
        try:
            self.file.close()
        except OSError:  # what was in the buffer had no room
            pass
        self._io.remove(self._path)
        self._keep()

    def _keep(self) -> None:
        if self._leftover is not None:
            self._leftover.detach()


def reach_file(io: Io, name: str, work: Callable[[], T]) -> T:
    """As `call_blocking`, for work with open files, which has errors of the system. Raises IoError."""
    try:
        return call_blocking(io, name, work)
    except OSError as error:
        raise IoError.of(error, name) from None


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:  # it is gone, or its disk
        pass


# ---- A named pipe, a serial line or another file that is no store: whoever reads or writes it waits in a greenlet,
# without
# a thread.

_READ, _WRITE = 1, 2
_LOOK_S = 0.05  # between two looks whether somebody reads the pipe: the system tells nobody who waits to write
MAX_PIPE_READ_BYTES = 1 << 20  # of one read: a device may have no end


def is_special(path: str) -> bool:
    """Return whether a file is neither regular nor a folder."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not (mode_bits.S_ISREG(mode) or mode_bits.S_ISDIR(mode))


class PipeFile(io.RawIOBase):
    """An open special file. Opening never waits: to write, the first `write` waits until somebody reads.

    Args:
        path: the file.
        mode: as `open` takes it.

    Raises:
        OSError: what the system says.
    """

    def __init__(self, path: str, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self._path = path
        self._reads, self._writes = "r" in mode or "+" in mode, "r" not in mode or "+" in mode
        self._fd = -1
        self._waiting: list[Any] = []
        if not (self._writes and not self._reads and mode_bits.S_ISFIFO(os.stat(path).st_mode)):
            self._open()

    def _open(self) -> None:
        access = os.O_RDWR if self._reads and self._writes else os.O_WRONLY if self._writes else os.O_RDONLY
        self._fd = os.open(self._path, access | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)

    def readable(self) -> bool:
        """Return whether it was opened to read."""
        return self._reads

    def writable(self) -> bool:
        """Return whether it was opened to write."""
        return self._writes

    def read(self, size: int = -1) -> bytes:
        """Read what there is next, at most `size` bytes and at most MAX_PIPE_READ_BYTES; empty once the other closed.
        Blocks this greenlet.

        Raises:
            IoError: it was closed meanwhile, or opened to write.
            OSError: what the system says.
        """
        if not self._reads:
            raise IoError("noaccess", "the file was opened for writing")
        wanted = MAX_PIPE_READ_BYTES if size < 0 else min(size, MAX_PIPE_READ_BYTES)
        self._wait(_READ)  # also for a pipe's first writer: until then a read would say that it is at its end
        while True:
            try:
                return os.read(self._live(), wanted)
            except BlockingIOError:
                self._wait(_READ)

    def write(self, data: Any) -> int:
        """Write all of `data`; blocks this greenlet until somebody has taken it. Raises as `read`."""
        if not self._writes:
            raise IoError("noaccess", "the file was opened for reading")
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._connected(), rest) :]
            except BlockingIOError:
                self._wait(_WRITE)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Raise IoError: it has no positions."""
        raise IoError("noimplementation", f"{self._path} has no positions")

    def close(self) -> None:
        """Close it; whoever waits gets an IoError."""
        hub = get_hub()
        for watcher in self._waiting:
            hub.cancel_wait(watcher, IoError("ioerror", f"{self._path} was closed"))
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            hub.loop.run_callback(os.close, fd)  # when nobody watches it any more
        super().close()

    def _live(self) -> int:
        if self.closed:
            raise IoError("ioerror", f"{self._path} was closed")
        return self._fd

    def _connected(self) -> int:
        while self._live() < 0:
            try:
                self._open()
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                gevent.sleep(_LOOK_S)
        return self._fd

    def _wait(self, events: int) -> None:
        hub = get_hub()
        watcher: Any = hub.loop.io(self._live(), events)
        self._waiting.append(watcher)
        try:
            hub.wait(watcher)
        finally:
            self._waiting.remove(watcher)
            watcher.stop()
            watcher.close()
