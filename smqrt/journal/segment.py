"""Segments of a node: sequence numbers, files, indexes and lock.

In `wal/<node>/`:

    <first_seq>.arrows   an Arrow IPC stream: the schema, then one record batch per flush
    <first_seq>.idx      64 bytes per batch: its position, its rows, its times and its crc32
    <first_seq>.sum      a summary of the index of a sealed segment
    lock                 locked by the one process that writes the segments
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from smqrt.errors import JournalError
from smqrt.journal import arrow
from smqrt.journal.files import FILE_MODE, crc32, make_folder, sync_folder, write_whole

# ---- Reserved numbers: none is used twice, even after a power failure
#
# Readers see rows before the disk has them, and store their position. When such rows are lost, their numbers must not
# be used again: readers would skip the new rows as already read. Therefore many numbers are reserved in advance. The
# disk has the reservation before the first of them is used:
#
#     wal/<node>/numbers.json      {"below": N}: no row has this number or a higher one
#                                  "gaps": [[E, N], …]: no row has, or had, a number from E up to but not including N
#
# On an orderly shutdown a hub writes the number of its next row. After a crash the file still has the reservation, and
# the next hub continues after it, with a multiple of `STEP`. This distinguishes a gap in the numbers from missing
# rows. The hub also stores the gap: once the rows before it have expired, no other file shows whether the gap ever had
# rows.

NUMBERS_FILE = "numbers.json"
STEP = 1 << 20
"""After a crash the numbers continue with a multiple of this."""
MAX_LOST_ROWS = 1 << 32
"""Greater than the number of rows that a crash can lose. Without a reservation, this many numbers are skipped."""
MAX_GAPS = 256
"""Maximum number of stored gaps of a node; the oldest ones are dropped."""
_MAX_STEPS = 64
"""Maximum size of a reservation, in steps."""
_SHORT_RESERVATION_S = 10.0
"""Reservations that last less than this are doubled."""


def reserved(folder: Path) -> int:
    """Return the reservation: all used numbers are below it. 0 without a reservation.

    Args:
        folder: `<journal>/wal/<node>`.

    Raises:
        JournalError: the reservation file is damaged.
        OSError: the file can't be read.
    """
    path = folder / NUMBERS_FILE
    try:
        below = json.loads(path.read_bytes())["below"]
        if type(below) is not int or not 0 <= below < 1 << 62:
            raise ValueError(f"below is {below!r}")
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise JournalError(
            f"{path} is damaged ({error!r}): the used numbers are unknown. The hub continues with a much higher "
            "number when it starts, and writes the file again."
        ) from None
    return below


def gaps(folder: Path) -> list[tuple[int, int]]:
    """Return the newest gaps in the numbers of a node: (first number without a row, number of the next row).

    Args:
        folder: `<journal>/wal/<node>`. A missing or damaged file means no known gaps.
    """
    try:
        return parse_gaps(json.loads((folder / NUMBERS_FILE).read_bytes()).get("gaps", ()))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return []


def parse_gaps(values: Any) -> list[tuple[int, int]]:
    """Return gaps from their JSON value. Raises ValueError or TypeError for an invalid value."""
    return [(int(first), int(end)) for first, end in values]


def skip_gap(seq: int, known: Iterable[tuple[int, int]]) -> int:
    """Return the number of the next row when `seq` lies in a gap, else `seq`."""
    return next((end for first, end in known if first <= seq < end), seq)


def next_step(seq: int) -> int:
    """Return the first number, not below `seq`, with which numbers may continue after a gap."""
    return -(-seq // STEP) * STEP


def is_gap(end: int, first: int) -> bool:
    """Return whether rows may continue with `first` after rows that end at `end` without a missing row."""
    return end < first and first % STEP == 0


def may_have_gap(start: int, end: int) -> bool:
    """Return whether there may be numbers without a row from `start` up to but not including `end`."""
    return end // STEP > start // STEP


class NumberReserve:
    """The numbers that a hub may use for rows.

    Args:
        folder: `<journal>/wal/<node>`, which exists.
        next_seq: the number of the next row.
        gap_begins: the number after the last row, when no row has a number from there up to `next_seq`.

    Raises:
        OSError: the disk is full or broken.

    Attributes:
        below: numbers below this one may be used; the disk has this reservation.
    """

    def __init__(self, folder: Path, next_seq: int, gap_begins: int | None = None) -> None:
        self._folder, self._steps = folder, 1
        self._gaps = gaps(folder)
        if gap_begins is not None and gap_begins < next_seq:
            if self._gaps and self._gaps[-1][1] == gap_begins:  # no row is between both gaps, so they are one
                gap_begins = self._gaps.pop()[0]
            self._gaps = [*self._gaps, (gap_begins, next_seq)][-MAX_GAPS:]
        self._extended_s = time.monotonic()
        self.below = 0
        self.extend(next_seq)
        for above in (folder.parent, folder.parent.parent, folder.parent.parent.parent):
            with suppress(PermissionError):  # another user's folder is older, so the disk has its name
                sync_folder(above)

    def is_short(self, seq: int) -> bool:
        """Return whether more numbers must be reserved; `seq` is the number of the next row."""
        return self.below - seq < self._steps * STEP // 2

    def extend(self, seq: int) -> None:
        """Reserve more numbers: twice as many when the last ones were used quickly. Blocks until the disk has them.

        Args:
            seq: the number of the next row.

        Raises:
            OSError: the disk is full or broken; the earlier reservation stays.
        """
        is_short_lived = time.monotonic() - self._extended_s < _SHORT_RESERVATION_S and self.below
        steps = min(_MAX_STEPS, self._steps * 2) if is_short_lived else self._steps
        below = max(self.below, next_step(seq) + steps * STEP)
        self._write(below)
        self.below, self._steps, self._extended_s = below, steps, time.monotonic()

    def repeat(self) -> None:
        """Write the reservation again: a restored copy of the folder may have an older one. Raises as `extend`."""
        self._write(self.below)

    def release(self, seq: int) -> None:
        """Write the number of the next row instead of a reservation. The disk must have all rows before it.

        Args:
            seq: the number.

        Raises:
            OSError: the disk is full or broken.
        """
        self._write(seq)

    def _write(self, below: int) -> None:
        values = {"below": below} | ({"gaps": self._gaps} if self._gaps else {})
        write_whole(self._folder / NUMBERS_FILE, json.dumps(values).encode() + b"\n")
        sync_folder(self._folder)


# ---- Index of a segment
#
# A batch exists once its index record is complete, which is written after the batch. So a reader that uses the index
# sees only complete batches while the writer appends.
#
# The summary has first_seq, end, rows, batches, ts_min_us, ts_max_us, the size of the index, and a crc32. It is written
# when a segment is sealed, and rebuilt from the index when it is missing or outdated. With it, a reader has the times
# of a sealed segment without reading its index.

INDEX = struct.Struct("<qqqqqqIIq")
"""An index record: first_seq, rows, offset, length, ts_min_us, ts_max_us, crc32, flags, reserved."""
TIMES = struct.Struct("<32x2q16x")
"""The fields ts_min_us and ts_max_us of an index record."""
HAS_TXN = 1
"""Flag of an index record: the batch has rows of a commit."""
RESULTS = 2
"""Flag of an index record: pipelines have published all rows of the batch. `HAS_TXN` implies it."""
_FLAGS_AT = struct.calcsize("<qqqqqqI")
"""The offset of the flags in an index record."""
DATA, INDEXED = ".arrows", ".idx"
SUMMARY = ".sum"
_SUMMARY, _SUMMARY_CRC = struct.Struct("<7q"), struct.Struct("<q")

_SegmentPath = Path | str
"""A plan needs hundreds of paths: a str takes a third of the time of a Path."""
REMEDY = "`smqrt journal verify` reports the faults and their remedies"
"""The end of error messages about damaged files."""


class BatchEntry(NamedTuple):
    """An index record: one batch of a segment.

    Attributes:
        first_seq, rows: the batch has the rows first_seq … first_seq + rows - 1.
        offset, length: its position in the segment, bytes.
        ts_min_us, ts_max_us: its earliest and latest time, microseconds UTC.
        crc32: the checksum of its bytes.
        flags: `HAS_TXN` and `RESULTS`.
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
        """The number of the first row after the batch."""
        return self.first_seq + self.rows

    @property
    def end(self) -> int:
        """The offset of the first byte after the batch."""
        return self.offset + self.length


def name(first_seq: int) -> str:
    """Return the name of a segment's files, without their suffix."""
    return f"{first_seq:020d}"


def first_seq(path: Path | str) -> int:
    """Return the number of the first row of a segment, from the name of one of its files."""
    return int(str(path).rpartition("/")[2].partition(".")[0])


def paths(folder: Path) -> list[Path]:
    """Return the .arrows files of a node, oldest first.

    Args:
        folder: `<journal>/wal/<node>`; it may be missing.
    """
    return [folder / name for name in _names(folder)]


def firsts(folder: Path) -> list[int]:
    """Return the first numbers of the segments of a node, ascending; `folder` as for `paths`."""
    return [int(name.removesuffix(DATA)) for name in _names(folder)]


def _names(folder: Path) -> list[str]:
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(name for name in names if name.endswith(DATA) and name.removesuffix(DATA).isdecimal())


def node_folders(journal: Path) -> list[Path]:
    """Return the folders `wal/<node>` of a journal, sorted; empty for a journal without rows."""
    try:
        with os.scandir(journal / "wal") as found:
            return sorted(Path(one.path) for one in found if one.is_dir())
    except FileNotFoundError:
        return []


def parse_index(data: bytes | memoryview) -> list[BatchEntry]:
    """Return the complete records of an index; a partial record at the end is being written."""
    whole = len(data) // INDEX.size * INDEX.size
    return list(map(BatchEntry._make, INDEX.iter_unpack(data[:whole])))


def read_index(path: Path) -> list[BatchEntry]:
    """Return the batches of a segment.

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
    """Return the batches of a segment that have rows of a commit. Other records are not decoded.

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


def result_ranges(data: bytes | memoryview) -> list[tuple[int, int]]:
    """Return the ranges of rows that pipelines have published, from an index: (first number, number after the last).

    Adjacent ranges are joined. Other records are not decoded.
    """
    found: list[tuple[int, int]] = []
    flags = bytes(data[_FLAGS_AT :: INDEX.size])  # the lowest byte of each record's flags
    for at in (at for at, flag in enumerate(flags) if flag & (HAS_TXN | RESULTS)) if any(flags) else ():
        first, rows, *_ = INDEX.unpack_from(data, at * INDEX.size)
        if found and found[-1][1] == first:
            found[-1] = found[-1][0], first + rows
        else:
            found.append((first, first + rows))
    return found


def check_index(entries: Sequence[BatchEntry], path: Path | str, offset: int = 0) -> None:
    """Check that each batch of an index follows the one before.

    Args:
        entries: all records of an index, or consecutive ones.
        path: the index or its segment, for the message.
        offset: the position of the first record in the index, bytes.

    Raises:
        JournalError: a batch doesn't follow.
    """
    for at, (before, entry) in enumerate(zip(entries, entries[1:], strict=False), 1):
        # By position, since this runs for each batch of a plan: (0) first_seq, (1) rows, (2) offset, (3) length.
        if entry[0] != before[0] + before[1] or entry[2] != before[2] + before[3] or entry[1] <= 0:
            index = f"{str(path).removesuffix(DATA).removesuffix(INDEXED)}{INDEXED}"
            at_byte = offset + at * INDEX.size
            raise JournalError(
                f"{index} is damaged at offset {at_byte}: its batch doesn't follow the one before it; {REMEDY}."
            )


# ---- Summary of a segment


class Summary(NamedTuple):
    """The summary of a segment.

    Attributes:
        first_seq, end: its rows are from `first_seq` up to but not including `end`.
        rows, batches: number of rows and of batches.
        ts_min_us, ts_max_us: earliest and latest time, microseconds UTC; both 0 without a row.
        index_bytes: the size of the index when the summary was created.
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
        """Whether the segment has rows, and no number between them is missing."""
        return 0 < self.rows == self.end - self.first_seq


def summary_of(path: _SegmentPath) -> Summary:
    """Return the summary of a sealed segment; a missing or outdated one is rebuilt, and written if possible.

    Args:
        path: the segment.

    Raises:
        FileNotFoundError: the segment doesn't exist any more.
        OSError: it can't be read.
    """
    os.stat(path)  # raises FileNotFoundError: a summary may be left over after the segment
    found = known_summary(path)
    if found is None:
        first, size = first_seq(path), _index_bytes(path)
        found = Summary(first, first, 0, 0, 0, 0, 0)
        if size:
            with open(_beside(path, INDEXED), "rb") as file:
                data = file.read(size)
            firsts, rows, _, _, earliest, latest, *_ = zip(*INDEX.iter_unpack(data), strict=True)
            end = firsts[-1] + rows[-1]
            found = Summary(first, end, sum(rows), len(rows), min(earliest), max(latest), size)
        with suppress(OSError):  # a reader may lack the permission
            values = _SUMMARY.pack(*found)
            write_whole(Path(_beside(path, SUMMARY)), values + _SUMMARY_CRC.pack(crc32(values)), sync=False)
    return found


def known_summary(path: _SegmentPath) -> Summary | None:
    """Return the stored summary of a segment; None when it is missing, damaged or outdated.

    Raises:
        OSError: it can't be read.
    """
    size = _index_bytes(path)
    try:
        with open(_beside(path, SUMMARY), "rb", buffering=0) as file:
            data = file.read()
    except FileNotFoundError:
        return None
    values = data[: _SUMMARY.size]
    if len(data) != _SUMMARY.size + _SUMMARY_CRC.size or _SUMMARY_CRC.unpack_from(data, len(values))[0] != crc32(
        values
    ):
        return None
    found = Summary._make(_SUMMARY.unpack(values))
    return found if (found.first_seq, found.index_bytes) == (first_seq(path), size) else None


def remove_summary(path: _SegmentPath) -> None:
    """Remove the summary of a segment that has changed."""
    Path(_beside(path, SUMMARY)).unlink(missing_ok=True)


def _beside(path: _SegmentPath, suffix: str) -> str:
    return str(path).removesuffix(DATA) + suffix


def _index_bytes(path: _SegmentPath) -> int:
    """Return the size of a segment's index, complete records only."""
    try:
        return os.stat(_beside(path, INDEXED)).st_size // INDEX.size * INDEX.size
    except FileNotFoundError:
        return 0


# ---- Writing


LOCK = "lock"
"""The file in a node's folder that its writer locks; it has the writer's process id."""
CACHED_BYTES = 32 << 20
"""This many bytes of a segment's end stay in the page cache, for readers that follow it."""


def lock(folder: Path) -> int:
    """Lock a node's folder for this process, until the descriptor is closed or the process ends.

    Args:
        folder: `<journal>/wal/<node>`; created when missing.

    Returns:
        A file descriptor.

    Raises:
        JournalError: another process has the lock, or the folder can't be used.
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
    """A segment that is being written. `SegmentFile.open` creates one. Methods block on the disk only.

    `sync`, `is_present` and `close` may be called in another thread than `append`, one at a time.

    Attributes:
        path: the .arrows file.
        next_seq: the number of the next row.
        size_bytes: the size of the .arrows file.
    """

    def __init__(self, path: Path, next_seq: int, schema: bytes) -> None:
        self.path, self.next_seq = path, next_seq
        self._data = _open(path)
        try:
            self._index = _open(path.with_suffix(INDEXED))
        except OSError:
            os.close(self._data)
            raise
        self._schema, self._uncached_bytes = schema, 0
        self._index_bytes, self.size_bytes = 0, len(schema)
        self._records = bytearray()  # index records that the disk has not confirmed
        self._confirmed_bytes = self._confirmed_index_bytes = 0
        self._is_name_synced = self._needs_rewrite = False
        try:
            _write(self._data, [schema], 0)
        except OSError:
            self.close()
            self.path.with_suffix(INDEXED).unlink(missing_ok=True)
            self.path.unlink(missing_ok=True)
            raise

    @classmethod
    def open(cls, folder: Path, next_seq: int, node: str, broker: str, format_: int = 1) -> SegmentFile:
        """Create a segment: when a hub starts, and when the previous segment is complete.

        Args:
            folder: `<journal>/wal/<node>`; created when missing. Call `recover` first: then an existing segment with
                this number is empty, and is replaced.
            next_seq: the number of the first row that will be appended.
            node, broker: names for the schema.
            format_: its format, see `arrow.LAYOUTS`.

        Raises:
            OSError: the files can't be created, for instance because the disk is full.
        """
        make_folder(folder)
        path = folder / (name(next_seq) + DATA)
        for old in (path.with_suffix(INDEXED), path):
            old.unlink(missing_ok=True)
        return cls(path, next_seq, arrow.schema_message(node, broker, format_))

    def append(
        self,
        pieces: Sequence[bytes | bytearray | memoryview],
        first_seq: int,
        rows: int,
        ts_min_us: int,
        ts_max_us: int,
        flags: int = 0,
    ) -> None:
        """Append one batch, then its index record. A failure leaves the files as they were.

        Args:
            pieces: the batch, header first, as `arrow.encode` returns it.
            first_seq: the number of its first row, which is `next_seq`.
            rows: its number of rows.
            ts_min_us, ts_max_us: earliest and latest time, microseconds UTC.
            flags: flags of the index record.

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
        self._records += record  # last, since `sync` in another thread reads it first

    @property
    def unsynced_bytes(self) -> int:
        """Bytes of the .arrows file that the disk has not confirmed; 0 when it has all batches."""
        return self.size_bytes - self._confirmed_bytes if self._records else 0

    @property
    def unsynced_rows(self) -> int:
        """Number of rows that the disk has not confirmed."""
        return sum(entry.rows for entry in parse_index(bytes(self._records)))

    @property
    def synced_seq(self) -> int:
        """The number below which the disk has confirmed all rows."""
        first = parse_index(bytes(self._records[: INDEX.size]))
        return first[0].first_seq if first else self.next_seq

    def sync(self, kept_bytes: int = CACHED_BYTES) -> list[BatchEntry]:
        """Sync the appended batches to the disk. Blocks, usually for 0.2 to 10 ms.

        After a failed sync, the unconfirmed batches are written again: the kernel drops data that it could not write,
        and then reports the next sync as successful.

        All data before the last `kept_bytes` leaves the page cache. The next batches use that memory, which takes a
        third of the time of fresh memory on a virtual machine, and other programs keep theirs (decision 0012).

        Args:
            kept_bytes: number of bytes that stay in the page cache for readers that follow the journal.

        Returns:
            Batches that are lost, since the disk failed and no copy is left; usually none.

        Raises:
            OSError: the disk is broken.
        """
        records = bytes(self._records)
        entries = parse_index(records)
        lost = self._rewrite_unconfirmed(entries, records) if self._needs_rewrite else []
        self._needs_rewrite = True
        os.fdatasync(self._data)
        os.fdatasync(self._index)
        self._needs_rewrite = False
        if not self._is_name_synced:
            sync_folder(self.path.parent)
            self._is_name_synced = True
        if entries:
            self._confirmed_bytes = entries[-1].end
            self._confirmed_index_bytes += len(records)
            del self._records[: len(records)]
        uncached_bytes = self._confirmed_bytes - kept_bytes
        if uncached_bytes > self._uncached_bytes:
            length = uncached_bytes - self._uncached_bytes
            os.posix_fadvise(self._data, self._uncached_bytes, length, os.POSIX_FADV_DONTNEED)
            self._uncached_bytes = uncached_bytes
        return lost

    def _rewrite_unconfirmed(self, entries: Sequence[BatchEntry], records: bytes) -> list[BatchEntry]:
        """Write unconfirmed batches again; return the batches that can't be read back."""
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

    def is_present(self) -> bool:
        """Return whether the files are still in their folder: not moved, removed or unmounted."""
        return is_open_at(self._data, self.path) and is_open_at(self._index, self.path.with_suffix(INDEXED))

    def restore(self) -> None:
        """Create the removed files again from the open ones. No other thread may append meanwhile.

        Raises:
            OSError: the folder is missing, or the disk is full or broken.
        """
        for fd, path in ((self._data, self.path), (self._index, self.path.with_suffix(INDEXED))):
            path.unlink(missing_ok=True)
            copy, at = _open(path), 0
            try:
                while piece := os.pread(fd, 1 << 20, at):
                    _write(copy, [piece], at)
                    at += len(piece)
                os.fdatasync(copy)
                os.dup2(copy, fd, inheritable=False)
            finally:
                os.close(copy)
        self._is_name_synced = False

    def close(self) -> None:
        """Close the files; call `sync` before."""
        for fd in (self._data, self._index):
            if fd >= 0:
                os.close(fd)
        self._data = self._index = -1


def is_open_at(fd: int, path: Path) -> bool:
    """Return whether an open file is still the one at a path.

    Raises:
        OSError: the disk is broken.
    """
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)


def _write(fd: int, pieces: Sequence[bytes | bytearray | memoryview], offset: int) -> None:
    """Write all pieces. A full disk may write only a part without an error; the second call then raises one."""
    written, size = os.pwritev(fd, pieces, offset), sum(map(len, pieces))
    while written < size:
        written += os.pwrite(fd, memoryview(b"".join(pieces))[written:], offset + written)
