"""The index of a segment, 64 bytes per batch, its summary, and the names of the files.

A batch counts from the moment its index record is whole; it is written after the batch. So a reader that goes by the
index sees whole batches only, while the one writer appends.

    <first_seq>.sum      first_seq, end, rows, batches, ts_min_us, ts_max_us, size of the index, crc32

The summary is written when a segment is sealed, and made anew from the index where it is missing or not that of the
index: whoever asks when the rows of a sealed segment are from needn't read its index.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from smqrt.errors import JournalError
from smqrt.journal.files import crc32, write_whole

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
