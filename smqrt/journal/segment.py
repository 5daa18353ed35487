"""The files under `wal/<node>/`: Arrow segments, and beside each an index with 64 bytes per batch.

<first_seq>.arrows   an Arrow IPC stream: the schema, then one record batch per flush
<first_seq>.idx      per batch: where it is, which rows it holds, from when to when, and its crc32
lock                 held by the one process that writes here
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from smqrt.errors import JournalError
from smqrt.journal import arrow
from smqrt.journal.files import FILE_MODE, crc32, make_folder, sync_folder, write_whole

# ---- The index of a segment, 64 bytes per batch, its summary, and the names of the files.
#
# A batch counts from the moment its index record is whole; it is written after the batch. So a reader that goes by the
# index sees whole batches only, while the one writer appends.
#
#     <first_seq>.sum      first_seq, end, rows, batches, ts_min_us, ts_max_us, size of the index, crc32
#
# The summary is written when a segment is sealed, and made anew from the index where it is missing or not that of the
# index: whoever asks when the rows of a sealed segment are from needn't read its index.

INDEX = struct.Struct("<qqqqqqIIq")
"""An index record: first_seq, rows, offset, length, ts_min_us, ts_max_us, crc32, flags, reserved."""
TIMES = struct.Struct("<32x2q16x")
"""Of an index record ts_min_us and ts_max_us only."""
HAS_TXN = 1
"""Flag of an index record: the batch has rows of a commit."""
RESULTS = 2
"""Flag of an index record: pipelines have published all rows of the batch. So they have with `HAS_TXN`."""
_FLAGS_AT = struct.calcsize("<qqqqqqI")
DATA, INDEXED = ".arrows", ".idx"
SUMMARY = ".sum"
_VALUES, _CRC = struct.Struct("<7q"), struct.Struct("<q")

_SegmentPath = Path | str
"""A plan asks for hundreds: a str takes a third of the time of a Path."""
REMEDY = "`smqrt journal verify` says what can be read and what to do"


class BatchEntry(NamedTuple):
    """A batch, as the index has it.

    Attributes:
        first_seq, rows: it holds the rows first_seq … first_seq + rows - 1.
        offset, length: where it is in the segment, bytes.
        ts_min_us, ts_max_us: its earliest and latest time, microseconds UTC.
        crc32: of its bytes.
        flags: `HAS_TXN`, `RESULTS`.
    """

    first_seq: int
    rows: int
    offset: int
    length: int
    ts_min_us: int
    ts_max_us: int
    crc32: int
    flags: int
    reserved: int = 0

    @property
    def next_seq(self) -> int:
        """The first number behind it."""
        return self.first_seq + self.rows

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + self.length


def name(first_seq: int) -> str:
    """Returns the name of a segment's files, without their suffix."""
    return f"{first_seq:020d}"


def first_seq(path: Path | str) -> int:
    """Returns the number of the first row of a segment, from the name of one of its files."""
    return int(str(path).rpartition("/")[2].partition(".")[0])


def paths(folder: Path) -> list[Path]:
    """Returns the .arrows files of a node, oldest first.

    Args:
        folder: `<journal>/wal/<node>`; it may be missing.
    """
    return [folder / name for name in _names(folder)]


def firsts(folder: Path) -> list[int]:
    """Returns the numbers that the segments of a node begin with, ascending; `folder` as for `paths`."""
    return [int(name.removesuffix(DATA)) for name in _names(folder)]


def _names(folder: Path) -> list[str]:
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(name for name in names if name.endswith(DATA) and name.removesuffix(DATA).isdecimal())


def node_folders(journal: Path) -> list[Path]:
    """Returns the folders `wal/<node>` of a journal, by name; none where it has no rows yet."""
    try:
        with os.scandir(journal / "wal") as found:
            return sorted(Path(one.path) for one in found if one.is_dir())
    except FileNotFoundError:
        return []


def parse_index(data: bytes | memoryview) -> list[BatchEntry]:
    """Returns the whole records of an index; half a record at the end is one that is being written."""
    whole = len(data) // INDEX.size * INDEX.size
    return list(map(BatchEntry._make, INDEX.iter_unpack(data[:whole])))


def read_index(path: Path) -> list[BatchEntry]:
    """Returns the batches of a segment.

    Args:
        path: its .arrows or its .idx file. Without an index file it has no batches.

    Raises:
        OSError: it can't be read.
    """
    try:
        return parse_index(path.with_suffix(INDEXED).read_bytes())
    except FileNotFoundError:
        return []


def with_transactions(path: Path) -> list[BatchEntry]:
    """Returns the batches of a segment that have rows of a commit; others are passed over without looking at each.

    Raises:
        OSError: it can't be read.
    """
    try:
        data = path.with_suffix(INDEXED).read_bytes()
    except FileNotFoundError:
        return []
    flags = data[_FLAGS_AT :: INDEX.size]
    if not any(flags):
        return []
    whole = range(len(data) // INDEX.size)
    return [BatchEntry._make(INDEX.unpack_from(data, at * INDEX.size)) for at in whole if flags[at] & HAS_TXN]


def results(data: bytes | memoryview) -> list[tuple[int, int]]:
    """Returns where the batches are that pipelines have published, of an index: (first number, number behind the last);
    those that follow each other are one. Others are passed over without looking at each.
    """
    found: list[tuple[int, int]] = []
    flags = bytes(data[_FLAGS_AT :: INDEX.size])
    for at in (at for at, flag in enumerate(flags) if flag & (HAS_TXN | RESULTS)) if any(flags) else ():
        first, rows, *_ = INDEX.unpack_from(data, at * INDEX.size)
        if found and found[-1][1] == first:
            found[-1] = found[-1][0], first + rows
        else:
            found.append((first, first + rows))
    return found


def check(entries: Sequence[BatchEntry], path: Path | str, offset: int = 0) -> None:
    """Says whether the batches of an index follow each other.

    Args:
        entries: all of an index, or some that follow each other there.
        path: of the index or its segment, for the message.
        offset: where in the index they begin, bytes.

    Raises:
        JournalError: they don't.
    """
    for at, (before, entry) in enumerate(zip(entries, entries[1:], strict=False), 1):
        if entry[0] != before[0] + before[1] or entry[2] != before[2] + before[3] or entry[1] <= 0:
            where = f"{str(path).removesuffix(DATA).removesuffix(INDEXED)}{INDEXED} is damaged at offset "
            where += str(offset + at * INDEX.size)
            raise JournalError(f"{where}: the batch there doesn't follow the one before it; {REMEDY}.")


# ---- the summary


class Summary(NamedTuple):
    """What a segment holds.

    Attributes:
        first_seq, end: its rows are from `first_seq` up to, without, `end`.
        rows, batches: how many.
        ts_min_us, ts_max_us: earliest and latest time, microseconds UTC; both 0 when there is no row.
        index_bytes: the size of the index it was made of.
    """

    first_seq: int
    end: int
    rows: int
    batches: int
    ts_min_us: int
    ts_max_us: int
    index_bytes: int

    @property
    def is_dense(self) -> bool:
        """Whether it has rows, and no number between them is missing."""
        return 0 < self.rows == self.end - self.first_seq


def summary_of(path: _SegmentPath) -> Summary:
    """Returns the summary of a sealed segment; one that is missing or outdated is made, and written if possible.

    Args:
        path: of the segment.

    Raises:
        FileNotFoundError: the segment has gone.
        OSError: it can't be read.
    """
    os.stat(path)
    found = known_summary(path)
    if found is None:
        found = _made(path)
        with suppress(OSError):  # a reader may not write here
            values = _VALUES.pack(*found)
            write_whole(Path(_beside(path, SUMMARY)), values + _CRC.pack(crc32(values)), sync=False)
    return found


def known_summary(path: _SegmentPath) -> Summary | None:
    """Returns the summary that stands beside a segment; None when there is none for its index.

    Raises:
        OSError: it can't be read.
    """
    size = _index_bytes(path)
    try:
        with open(_beside(path, SUMMARY), "rb", buffering=0) as file:
            data = file.read()
    except FileNotFoundError:
        return None
    found = _parsed(data)
    return found if found and (found.first_seq, found.index_bytes) == (first_seq(path), size) else None


def remove_summary(path: _SegmentPath) -> None:
    """Removes the summary of a segment that was changed."""
    Path(_beside(path, SUMMARY)).unlink(missing_ok=True)


def _beside(path: _SegmentPath, suffix: str) -> str:
    return str(path).removesuffix(DATA) + suffix


def _parsed(data: bytes) -> Summary | None:
    size = _VALUES.size
    if len(data) != size + _CRC.size or _CRC.unpack_from(data, size)[0] != crc32(data[:size]):
        return None
    return Summary._make(_VALUES.unpack_from(data))


def _made(path: _SegmentPath) -> Summary:
    first, size = first_seq(path), _index_bytes(path)
    if not size:
        return Summary(first, first, 0, 0, 0, 0, 0)
    with open(_beside(path, INDEXED), "rb") as file:
        data = file.read(size)
    firsts, rows, _, _, earliest, latest, *_ = zip(*INDEX.iter_unpack(data), strict=True)
    return Summary(first, firsts[-1] + rows[-1], sum(rows), len(rows), min(earliest), max(latest), size)


def _index_bytes(path: _SegmentPath) -> int:
    """The size of a segment's index, whole records only."""
    try:
        return os.stat(_beside(path, INDEXED)).st_size // INDEX.size * INDEX.size
    except FileNotFoundError:
        return 0


LOCK = "lock"
"""The file in a node's folder that its writer holds, with the number of its process."""
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
        fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
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

    `sync`, `is_there` and `close` may be called in another thread than `append`, one at a time.

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
        self._schema, self._let_go_bytes = schema, 0
        self._index_bytes, self.size_bytes = 0, len(schema)
        self._records = bytearray()  # of the index: what the disk has not confirmed
        self._confirmed_bytes = self._confirmed_index_bytes = 0
        self._named = self._doubtful = False
        self._write_schema()

    def _write_schema(self) -> None:
        try:
            _write(self._data, [self._schema], 0)
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
            flags: of the index record.

        Raises:
            OSError: the disk is full or broken; the same batch can be appended again later.
        """
        length, crc = sum(map(len, pieces)), 0
        for piece in pieces:
            crc = crc32(piece, crc)
        record = INDEX.pack(first_seq, rows, self.size_bytes, length, ts_min_us, ts_max_us, crc, flags, 0)
        try:
            _write(self._data, pieces, self.size_bytes)
            _write(self._index, [record], self._index_bytes)
        except OSError:
            os.ftruncate(self._index, self._index_bytes)
            os.ftruncate(self._data, self.size_bytes)
            raise
        self.size_bytes += length
        self._index_bytes += INDEX.size
        self.next_seq = first_seq + rows
        self._records += record  # last: `sync` goes by it

    @property
    def unsynced_bytes(self) -> int:
        """How much of the .arrows file the disk has not confirmed; 0 when it has all batches."""
        return self.size_bytes - self._confirmed_bytes if self._records else 0

    @property
    def unsynced_rows(self) -> int:
        """How many rows the disk has not confirmed."""
        return sum(entry.rows for entry in parse_index(bytes(self._records)))

    @property
    def synced_seq(self) -> int:
        """The number below which the disk has confirmed every row."""
        first = parse_index(bytes(self._records[: INDEX.size]))
        return first[0].first_seq if first else self.next_seq

    def sync(self, kept_bytes: int = CACHED_BYTES) -> list[BatchEntry]:
        """Has the disk keep what was appended, so that a power failure can't take it. Blocks: 0.2 to some 10 ms.

        After a sync that failed, what it was about is written anew: the kernel forgets then what it could not write,
        and says of the next sync that all is well.

        What lies before the last `kept_bytes` leaves the page cache: the next batches get that memory, which costs a
        third of fresh memory on a virtual machine, and other programs keep theirs (decision 0012).

        Args:
            kept_bytes: for those who follow the journal.

        Returns:
            Batches that are lost, because the disk failed and nobody has them any more. As a rule none.

        Raises:
            OSError: the disk is broken.
        """
        records = bytes(self._records)
        entries = parse_index(records)
        lost = self._write_anew(entries, records) if self._doubtful else []
        self._doubtful = True
        os.fdatasync(self._data)
        os.fdatasync(self._index)
        self._doubtful = False
        if not self._named:
            sync_folder(self.path.parent)
            self._named = True
        if entries:
            self._confirmed_bytes = entries[-1].end
            self._confirmed_index_bytes += len(records)
            del self._records[: len(records)]
        self._let_go(self._confirmed_bytes - kept_bytes)
        return lost

    def _write_anew(self, entries: Sequence[BatchEntry], records: bytes) -> list[BatchEntry]:
        """Writes what the disk has not confirmed once more; returns the batches that can't be read back."""
        lost = []
        if not self._confirmed_bytes:
            _write(self._data, [self._schema], 0)
        for entry in entries:
            batch = os.pread(self._data, entry.length, entry.offset)
            if crc32(batch) == entry.crc32:
                _write(self._data, [batch], entry.offset)
            else:
                lost.append(entry)
        _write(self._index, [records], self._confirmed_index_bytes)
        return lost

    def _let_go(self, behind_bytes: int) -> None:
        if behind_bytes > self._let_go_bytes:
            size_bytes = behind_bytes - self._let_go_bytes
            os.posix_fadvise(self._data, self._let_go_bytes, size_bytes, os.POSIX_FADV_DONTNEED)
            self._let_go_bytes = behind_bytes

    def is_there(self) -> bool:
        """Says whether the files are still in their folder: neither moved away, removed nor unmounted."""
        return is_open_at(self._data, self.path) and is_open_at(self._index, self.path.with_suffix(INDEXED))

    def put_back(self) -> None:
        """Makes the files again where they were, with all that is in them; nobody may append meanwhile.

        Raises:
            OSError: the folder is gone, the disk is full or broken.
        """
        for fd, path in ((self._data, self.path), (self._index, self.path.with_suffix(INDEXED))):
            path.unlink(missing_ok=True)
            copy = _open(path)
            try:
                _copy(fd, copy)
                os.dup2(copy, fd, inheritable=False)
            finally:
                os.close(copy)
        self._named = False

    def close(self) -> None:
        """Closes the files; `sync` before."""
        for fd in (self._data, self._index):
            if fd >= 0:
                os.close(fd)
        self._data = self._index = -1


def is_open_at(fd: int, path: Path) -> bool:
    """Says whether the file that is open is the one a path leads to.

    Raises:
        OSError: the disk is broken.
    """
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)


def _copy(fd: int, to: int) -> None:
    at = 0
    while piece := os.pread(fd, 1 << 20, at):
        _write(to, [piece], at)
        at += len(piece)
    os.fdatasync(to)


def _write(fd: int, pieces: Sequence[bytes | bytearray | memoryview], offset: int) -> None:
    """Writes all of it: a disk that is full says so at the second write, after half of the first."""
    written, size = os.pwritev(fd, pieces, offset), sum(map(len, pieces))
    while written < size:
        written += os.pwrite(fd, memoryview(b"".join(pieces))[written:], offset + written)
