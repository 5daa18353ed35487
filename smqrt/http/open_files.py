"""File access that does not block the loop.

The loop reads only bytes in the page cache, and collects written bytes. All other operations run in threads.
"""

from __future__ import annotations

import errno
import io
import os
import re
import secrets
import stat as mode_bits
from collections.abc import Callable
from time import monotonic
from typing import IO, Any, TypeVar
from weakref import finalize

import gevent
from gevent import get_hub

from smqrt.http.resources import Io, IoError
from smqrt.loop.threads import DiskThreads

# ---- Local disks
#
# The loop itself may stat and open files on a file system of this machine's kernel. Other file systems (network, FUSE)
# may block for long, so threads do that.

_LOCAL = """
aufs bcachefs btrfs devtmpfs erofs exfat ext2 ext3 ext4 f2fs iso9660 jfs nilfs2 ntfs3 overlay ramfs rootfs squashfs
tmpfs udf vfat xfs zfs"""
LOCAL_TYPES = frozenset(_LOCAL.split())
"""File systems that need neither a network nor a program. All others count as slow, including `proc` and `sysfs`, where
reading a file may wait for an event. On systems without a table of mounts, every file system counts as slow."""
CACHED_S = 5.0
"""Time for which the mount of a folder is cached. A new mount over it takes effect after this time."""
MAX_FOLDERS = 4096
_MOUNT_TABLE = "/proc/self/mountinfo"
_OCTAL_ESCAPE = re.compile(r"\\([0-7]{3})")

T = TypeVar("T")


def read_mounts() -> dict[str, bool]:
    """Return the mount points, each with whether it is local; empty when the system has no mount table."""
    try:
        with open(_MOUNT_TABLE, "rb") as table:
            lines = os.fsdecode(table.read()).splitlines()
    except OSError:
        return {}
    mounts = {}
    for line in lines:  # id parent device root mount-point options… - type source options
        fields, _, rest = line.partition(" - ")
        mount_point = _OCTAL_ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields.split(" ")[4])
        mounts[mount_point] = rest.partition(" ")[0] in LOCAL_TYPES
    return mounts


def mount_of(path: str, mounts: dict[str, bool]) -> str:
    """Return the mount point of an absolute path without links."""
    while path not in mounts and path not in ("", "/"):
        path = path.rpartition("/")[0]
    return path or "/"


class Disks:
    """Cache of the mounts of recently used folders, with the threads of each disk.

    Args:
        mounts: returns the mount table, as `read_mounts` does.
    """

    def __init__(self, mounts: Callable[[], dict[str, bool]] = read_mounts) -> None:
        self._mounts = mounts
        self._folders: dict[str, tuple[float, str, bool]] = {}  # expiry, mount, whether it is local
        self._trees: dict[str, tuple[float, bool]] = {}  # expiry, whether all of it is local
        self._threads: dict[str, DiskThreads] = {}

    def is_local(self, path: str) -> bool:
        """Return whether the folder of `path` is known to be local, so that `lstat` does not block.

        The name itself may be a link to another disk.
        """
        known = self._folders.get(path[: path.rfind("/")])
        return known is not None and known[2] and monotonic() < known[0]

    def is_local_tree(self, root: str) -> bool:
        """Return whether everything below the folder `root`, a path without links, is local."""
        known = self._trees.get(root)
        if known is None or monotonic() > known[0]:
            mounts = self._mounts()
            below = root.rstrip("/") + "/"
            is_local = mounts.get(mount_of(root, mounts), False)
            is_local = is_local and all(local for path, local in mounts.items() if path.startswith(below))
            _clear_if_full(self._trees)
            known = self._trees[root] = monotonic() + CACHED_S, is_local
        return known[1]

    def find_mount(self, path: str) -> None:
        """Cache the mount of the folder of `path`; blocks until the disk responds."""
        folder = path[: path.rfind("/")]
        mounts = self._mounts()
        mount = mount_of(os.path.realpath(folder or "/"), mounts)
        _clear_if_full(self._folders)
        self._folders[folder] = monotonic() + CACHED_S, mount, mounts.get(mount, False)

    def threads(self, path: str) -> DiskThreads:
        """Return the threads for operations on `path`. All folders with an unknown mount share the same threads."""
        known = self._folders.get(path[: path.rfind("/")])
        mount = known[1] if known is not None else "?"
        found = self._threads.get(mount)
        if found is None:
            name = mount if known is not None else "with an unknown mount"
            found = self._threads[mount] = DiskThreads(name)
        return found

    def with_mount(self, path: str, function: Callable[..., T]) -> Callable[..., T]:
        """Return a function for a thread: `function`, or one that first finds the unknown mount of `path`."""
        known = self._folders.get(path[: path.rfind("/")])
        if known is not None and monotonic() < known[0]:
            return function

        def call(*args: object) -> T:
            self.find_mount(path)
            return function(*args)

        return call

    def call(self, path: str, function: Callable[..., T], *args: object) -> T:
        """Call a function that blocks on the disk of `path` in a thread of that disk; blocks this greenlet.

        Returns:
            the result of the function.

        Raises:
            TimeoutError: the disk did not respond in time.
            Exception: any that the function raises.
        """
        return self.threads(path).call(self.with_mount(path, function), *args)


def _clear_if_full(known: dict[str, T]) -> None:
    if len(known) >= MAX_FOLDERS:
        known.clear()


disks = Disks()
"""The disks of this process."""


def call_blocking(io: Io, name: str, function: Callable[..., T], *args: object) -> T:
    """Call `function(*args)`, which uses the file `name` of `io` and may block, in a thread; blocks this greenlet.

    The functions of an io with `in_loop` are called directly.

    Returns:
        the result of the function.

    Raises:
        IoError: "ioerror", the disk did not respond in time.
        Exception: any that the function raises.
    """
    if io.in_loop:
        return function(*args)
    try:
        return disks.call(io.disk_path(name), function, *args)
    except TimeoutError as error:
        raise IoError.of(error, name) from None


def call_blocking_unless_local(io: Io, name: str, function: Callable[..., T], *args: object) -> T:
    """Call like `call_blocking`, but directly when the file is on a local disk. For functions that are quick there."""
    if io.in_loop or io.is_local(name):
        return function(*args)
    return call_blocking(io, name, function, *args)


NOW_BYTES = 64 << 10
"""Limit of bytes that the loop reads at once, which takes 20 us, and of written bytes that it collects."""
AHEAD_BYTES = 4096
"""Bytes that are read at once and buffered for smaller reads."""
MAX_READ_BYTES = 64 << 20
"""Limit of one read. Converting the result to a Lua string blocks the loop for 0.7 ms per MiB."""
_PIECE_BYTES = 1 << 20

_buffer = bytearray(NOW_BYTES)  # shared by all files: only the loop uses it, and copies the bytes at once
_view = memoryview(_buffer)


class DiskFile:
    """A regular file with its own position.

    The loop calls `read_now`, `write_now` and `seek_now`. A thread calls the other methods, and no other call may run
    at the same time.

    Args:
        fd: the descriptor, which `close` closes.
        mode: mode of opening, such as "rb" or "ab+".
        is_local: whether the file is on a local disk. Otherwise the loop reads only if the file system supports
            RWF_NOWAIT, which most network file systems do not.
    """

    __slots__ = (
        "_ahead", "_ahead_at", "_appends", "_fd", "_is_readable", "_is_writable", "_has_nowait", "_position",
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
        self._has_nowait = True  # False for tmpfs, which has no RWF_NOWAIT and never blocks

    @property
    def is_clean(self) -> bool:
        """Whether all written bytes were passed to the system."""
        return not self._unwritten

    def read_now(self, size_bytes: int) -> bytes | None:
        """Read like `read`, but return None if that would block or is too much at once."""
        if 0 < size_bytes <= AHEAD_BYTES:
            at = self._position - self._ahead_at
            data = self._ahead[at : at + size_bytes]
            if len(data) == size_bytes:
                self._position += size_bytes
                return data
        if self._unwritten or size_bytes > NOW_BYTES or not self._is_readable:
            return None
        if 0 < size_bytes <= AHEAD_BYTES:
            count = self._copy(0, AHEAD_BYTES)
            if count is not None and count >= size_bytes:
                self._ahead, self._ahead_at = _view[:count].tobytes(), self._position
                self._position += size_bytes
                return self._ahead[:size_bytes]
        wanted = NOW_BYTES if size_bytes < 0 else size_bytes
        count = self._copy(0, wanted)
        if count is None:
            return None
        # Fewer bytes mean the end of the file, or that the rest is not in the page cache. One more byte shows which.
        is_unclear = count < wanted or size_bytes < 0
        if count and is_unclear and self._copy(count, 1) != 0:
            return None
        self._position += count
        return _view[:count].tobytes()

    def _copy(self, ahead: int, size_bytes: int) -> int | None:
        """Copy bytes from `ahead` after the position to the same offset in the buffer; None if that would block."""
        if ahead == NOW_BYTES:
            return None
        target = _view[ahead : ahead + size_bytes]
        flags = os.RWF_NOWAIT if self._has_nowait else 0
        try:
            return os.preadv(self._fd, [target], self._position + ahead, flags)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP or not (self._has_nowait and self.is_local):
                return None
            self._has_nowait = False
            return self._copy(ahead, size_bytes)

    def read(self, size_bytes: int) -> bytes:
        """Read `size_bytes`, or less at the end of the file. Reads to the end for -1.

        Raises:
            IoError: "mem", it is more than MAX_READ_BYTES; "noaccess", the file is open for writing only.
        """
        if not self._is_readable:
            raise IoError("noaccess", "the file was opened for writing")
        self.flush()
        size = max(0, os.fstat(self._fd).st_size - self._position)  # 0 for some files with content, such as in /proc
        wanted = MAX_READ_BYTES + 1 if size_bytes < 0 else size_bytes
        if min(size, wanted) > MAX_READ_BYTES:
            raise IoError("mem", f"more than {MAX_READ_BYTES} bytes at once; read it in pieces")
        pieces = [os.pread(self._fd, min(wanted, max(size + 1, NOW_BYTES)), self._position)]  # usually all of it
        count = len(pieces[0])
        while pieces[-1] and count < min(wanted, MAX_READ_BYTES + 1):
            pieces.append(os.pread(self._fd, min(_PIECE_BYTES, wanted - count), self._position + count))
            count += len(pieces[-1])
        if count > MAX_READ_BYTES:
            raise IoError("mem", f"more than {MAX_READ_BYTES} bytes at once; read it in pieces")
        self._position += count
        return pieces[0] if count == len(pieces[0]) else b"".join(pieces)

    def write_now(self, data: bytes) -> bool:
        """Collect `data` for a later write; return whether the collected bytes stay under NOW_BYTES."""
        self._ahead = b""
        if self._unwritten_bytes + len(data) > NOW_BYTES or not self._is_writable:
            return False
        if data:
            self._unwritten.append(data)
            self._unwritten_bytes += len(data)
        return True

    def write(self, data: bytes) -> None:
        """Write the collected bytes and `data`. Raises IoError and OSError."""
        if not self._is_writable:
            raise IoError("noaccess", "the file was opened for reading")
        if data:
            self._unwritten.append(data)
        self.flush()

    def flush(self) -> None:
        """Write the collected bytes. Raises OSError; unwritten bytes are then lost."""
        kept, self._unwritten, self._unwritten_bytes, self._ahead = self._unwritten, [], 0, b""
        rest = memoryview(kept[0] if len(kept) == 1 else b"".join(kept))
        while rest:
            count = os.write(self._fd, rest) if self._appends else os.pwrite(self._fd, rest, self._position)
            self._position = os.fstat(self._fd).st_size if self._appends else self._position + count
            rest = rest[count:]

    def seek_now(self, position: int) -> bool:
        """Set the position; return False if collected bytes must be written first."""
        if self._unwritten:
            return False
        self._position, self._ahead = position, b""
        return True

    def seek(self, position: int) -> None:
        """Write the collected bytes, then set the position."""
        self.flush()
        self._position = position

    def close(self) -> None:
        """Write the collected bytes and close the file even if that fails. Raises as `flush`."""
        try:
            self.flush()
        finally:
            os.close(self._fd)


# ---- Replacement files for uploads

PREFIX = ".smqrt-upload-"
"""Prefix of the names of incomplete files, which are hidden in the target's folder."""


class NewFile:
    """A file that is being written. Its methods block. As a context manager, it removes an unfinished file.

    On a disk the file has a temporary name and is renamed at the end. Other ios have no atomic rename, so there the
    file is written in place.

    Args:
        io: stores the file.
        name: name of the file; an existing file is replaced.

    Attributes:
        file: the open file, for operations in `call_blocking_file`.

    Raises:
        IoError: the file cannot be created.
    """

    def __init__(self, io: Io, name: str) -> None:
        self._io, self._name = io, name
        folder = name.rpartition("/")[0]
        own = f"{PREFIX}{secrets.token_hex(8)}"
        self._path = (f"{folder}/{own}" if folder else own) if io.kind == "disk" else name
        self.file: IO[bytes] = call_blocking(io, name, io.open, self._path, "w")
        self._is_finished = False
        # `finalize` also runs when the process exits, without a call of `abort`.
        self._finalizer = finalize(self, _try_unlink, io.realpath(self._path)) if self._path != name else None

    def write(self, *pieces: bytes) -> None:
        """Append pieces. Raises IoError."""
        call_blocking_file(self._io, self._name, lambda: self.file.writelines(pieces))

    def finish(self) -> None:
        """Close the file and rename it to its final name. Raises IoError."""
        call_blocking_file(self._io, self._name, self._close_and_rename)
        self._is_finished = True

    def abort(self) -> None:
        """Remove the file, unless it is finished."""
        if not self._is_finished:
            self._is_finished = True
            call_blocking_file(self._io, self._name, self._close_and_remove)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.abort()

    def _close_and_rename(self) -> None:
        self.file.close()
        if self._path != self._name:
            self._io.rename(self._path, self._name)
        self._detach_finalizer()

    def _close_and_remove(self) -> None:
        try:
            self.file.close()
        except OSError:  # no space on the disk for buffered bytes
            pass
        self._io.remove(self._path)
        self._detach_finalizer()

    def _detach_finalizer(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()


def call_blocking_file(io: Io, name: str, work: Callable[[], T]) -> T:
    """Call like `call_blocking`, and convert OSError, which open files raise, to IoError."""
    try:
        return call_blocking(io, name, work)
    except OSError as error:
        raise IoError.of(error, name) from None


def _try_unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:  # the file or its disk no longer exists
        pass


# ---- Special files: named pipes, serial lines

_READ, _WRITE = 1, 2
_POLL_S = 0.05  # interval of attempts to open a pipe for writing: the system has no event for its first reader
MAX_PIPE_READ_BYTES = 1 << 20  # of one read: a device may be endless


def is_special(path: str) -> bool:
    """Return whether a file is neither regular nor a folder."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not (mode_bits.S_ISREG(mode) or mode_bits.S_ISDIR(mode))


class PipeFile(io.RawIOBase):
    """An open special file. Opening does not block; the first `write` to a pipe blocks until it has a reader.

    Args:
        path: path of the file.
        mode: mode, as for `open`.

    Raises:
        OSError: an operating-system error.
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
        """Return whether it is open for reading."""
        return self._reads

    def writable(self) -> bool:
        """Return whether it is open for writing."""
        return self._writes

    def read(self, size: int = -1) -> bytes:
        """Read the next bytes, at most `size` and MAX_PIPE_READ_BYTES; blocks this greenlet.

        Returns:
            the bytes; empty after the other end has closed.

        Raises:
            IoError: the file was closed meanwhile, or is open for writing only.
            OSError: an operating-system error.
        """
        if not self._reads:
            raise IoError("noaccess", "the file was opened for writing")
        wanted = MAX_PIPE_READ_BYTES if size < 0 else min(size, MAX_PIPE_READ_BYTES)
        self._wait(_READ)  # before the first writer of a pipe, a read would return the end of the file
        while True:
            try:
                return os.read(self._open_fd(), wanted)
            except BlockingIOError:
                self._wait(_READ)

    def write(self, data: Any) -> int:
        """Write all of `data`; blocks this greenlet until the other end accepts it. Raises as `read`."""
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
        """Raise IoError: a special file is not seekable."""
        raise IoError("noimplementation", f"{self._path} is not seekable")

    def close(self) -> None:
        """Close the file and raise IoError in waiting greenlets."""
        hub = get_hub()
        for watcher in self._waiting:
            hub.cancel_wait(watcher, IoError("ioerror", f"{self._path} was closed"))
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            hub.loop.run_callback(os.close, fd)  # after the watchers are stopped
        super().close()

    def _open_fd(self) -> int:
        if self.closed:
            raise IoError("ioerror", f"{self._path} was closed")
        return self._fd

    def _connected(self) -> int:
        while self._open_fd() < 0:
            try:
                self._open()
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                gevent.sleep(_POLL_S)
        return self._fd

    def _wait(self, events: int) -> None:
        hub = get_hub()
        watcher: Any = hub.loop.io(self._open_fd(), events)
        self._waiting.append(watcher)
        try:
            hub.wait(watcher)
        finally:
            self._waiting.remove(watcher)
            watcher.stop()
            watcher.close()
