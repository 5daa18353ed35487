"""The files under `wal/<node>/`: Arrow segments, and beside each an index with 64 bytes per batch.

<first_seq>.arrows   an Arrow IPC stream: the schema, then one record batch per flush
<first_seq>.idx      per batch: where it is, which rows it holds, from when to when, and its crc32
lock                 held by the one process that writes here
"""

from __future__ import annotations

import fcntl
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

from smqrt.errors import JournalError
from smqrt.journal import arrow
from smqrt.journal.files import FILE_MODE, make_folder
from smqrt.journal.index import (
    DATA,
    HAS_TXN,
    INDEX,
    INDEXED,
    Entry,
    check,
    first_seq,
    name,
    parse_index,
    paths,
    read_index,
)
from smqrt.journal.recovery import Recovered, recover

__all__ = [
    "DATA",
    "HAS_TXN",
    "INDEX",
    "INDEXED",
    "Entry",
    "Recovered",
    "SegmentFile",
    "check",
    "first_seq",
    "lock",
    "name",
    "parse_index",
    "paths",
    "read_index",
    "recover",
    "sync_folder",
]


CACHED_BYTES = 32 << 20
"""So much of a segment's end stays in the page cache, for those who follow it."""


def lock(folder: Path) -> int:
    """Makes this process the one writer of a node's folder, until the descriptor is closed or the process ends.

    Args:
        folder: `<journal>/wal/<node>`; made when missing.

    Returns:
        A file descriptor.

    Raises:
        JournalError: another process writes there, or the folder can't be used.
    """
    try:
        make_folder(folder)
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        raise JournalError(f"{folder} can't be used: {error.strerror}; choose another `journal.path`.") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.read(fd, 32).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise JournalError(
            f"{folder} is written by process {owner}; stop it, or give this hub its own `journal.node` or "
            "`journal.path`."
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


class SegmentFile:
    """One segment that is appended to. `SegmentFile.open` gives one; nothing here waits for anything but the disk.

    Attributes:
        path: the .arrows file.
        next_seq: the number the next batch begins with.
        size_bytes: how long the .arrows file is.
    """

    def __init__(self, path: Path, next_seq: int, schema: bytes) -> None:
        self.path, self.next_seq = path, next_seq
        self._data = _open(path)
        try:
            self._index = _open(path.with_suffix(INDEXED))
        except OSError:
            os.close(self._data)
            raise
        self._index_bytes, self.size_bytes, self._let_go_bytes = 0, len(schema), 0
        self._named = False
        self._write_schema(schema)

    def _write_schema(self, schema: bytes) -> None:
        try:
            _write(self._data, [schema])
        except OSError:
            self.close()
            self.path.with_suffix(INDEXED).unlink(missing_ok=True)
            self.path.unlink(missing_ok=True)
            raise

    @classmethod
    def open(cls, folder: Path, next_seq: int, node: str, broker: str) -> SegmentFile:
        """Begins a new segment: when a hub starts, and when the one before it is long enough.

        Args:
            folder: `<journal>/wal/<node>`; made when missing. `recover` has been there, so that a segment that begins
                with `next_seq` can only be an empty one, and is replaced.
            next_seq: the number of the first row that will be appended.
            node, broker: for the schema.

        Raises:
            OSError: it can't be made, for instance because the disk is full.
        """
        make_folder(folder)
        path = folder / (name(next_seq) + DATA)
        for old in (path.with_suffix(INDEXED), path):
            old.unlink(missing_ok=True)
        return cls(path, next_seq, arrow.schema_message(node, broker))

    def append(
        self,
        pieces: Sequence[bytes | bytearray | memoryview],
        first_seq: int,
        rows: int,
        ts_min_us: int,
        ts_max_us: int,
        flags: int = 0,
    ) -> None:
        """Appends one batch, then its index record. What fails leaves nothing behind.

        Args:
            pieces: the batch, header first; `arrow.encode` gives them.
            first_seq: the number of its first row; `next_seq`.
            rows: how many.
            ts_min_us, ts_max_us: earliest and latest time, microseconds UTC.
            flags: `HAS_TXN` or 0.

        Raises:
            OSError: the disk is full or broken; the same batch can be appended again later.
        """
        length, crc = sum(map(len, pieces)), 0
        for piece in pieces:
            crc = zlib.crc32(piece, crc)
        try:
            _write(self._data, pieces)
            _write(
                self._index,
                [INDEX.pack(first_seq, rows, self.size_bytes, length, ts_min_us, ts_max_us, crc, flags, 0)],
            )
        except OSError:
            os.ftruncate(self._index, self._index_bytes)
            os.ftruncate(self._data, self.size_bytes)
            raise
        self.size_bytes += length
        self._index_bytes += INDEX.size
        self.next_seq = first_seq + rows

    def sync(self, kept_bytes: int = CACHED_BYTES) -> None:
        """Has the disk keep what was appended, so that a power failure can't take it. Blocks: 0.2 to some 10 ms.

        What lies before the last `kept_bytes` leaves the page cache: the next batches get that memory, which costs a
        third of fresh memory on a virtual machine, and other programs keep theirs (decision 0012).

        Args:
            kept_bytes: for those who follow the journal.

        Raises:
            OSError: the disk is broken.
        """
        behind_bytes = self.size_bytes - kept_bytes
        os.fdatasync(self._data)
        os.fdatasync(self._index)
        if not self._named:
            sync_folder(self.path.parent)
            self._named = True
        if behind_bytes > self._let_go_bytes:
            size_bytes = behind_bytes - self._let_go_bytes
            os.posix_fadvise(self._data, self._let_go_bytes, size_bytes, os.POSIX_FADV_DONTNEED)
            self._let_go_bytes = behind_bytes

    def close(self) -> None:
        """Closes the files; `sync` before."""
        for fd in (self._data, self._index):
            if fd >= 0:
                os.close(fd)
        self._data = self._index = -1


def sync_folder(folder: Path) -> None:
    """Has the disk keep the names in a folder."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, FILE_MODE)


def _write(fd: int, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
    """Writes all of it: a disk that is full says so at the second write, after half of the first."""
    written, size = os.writev(fd, pieces), sum(map(len, pieces))
    while written < size:
        written += os.write(fd, memoryview(b"".join(pieces))[written:])
