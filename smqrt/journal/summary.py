"""The summary of a sealed segment, in 64 bytes beside it: whoever asks when its rows are from needn't read its index.

    <first_seq>.sum      first_seq, end, rows, batches, ts_min_us, ts_max_us, size of the index, crc32

It is written when a segment is sealed, and made anew from the index where it is missing or not that of the index.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from smqrt.journal import checksums
from smqrt.journal.files import touch
from smqrt.journal.index import DATA, INDEX, INDEXED, first_seq

SUMMARY = ".sum"
_VALUES, _CRC = struct.Struct("<7q"), struct.Struct("<q")
_KEPT = 1024

Place = Path | str
"""A plan asks for hundreds: a str takes a third of the time of a Path."""


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


def of(path: Place) -> Summary:
    """Returns the summary of a sealed segment; one that is missing or outdated is made, and written if possible.

    Args:
        path: of the segment.

    Raises:
        FileNotFoundError: the segment has gone.
        OSError: it can't be read.
    """
    os.stat(path)
    found = known(path)
    if found is None:
        found = _made(path)
        with suppress(OSError):  # a reader may not write here
            _write(Path(_beside(path, SUMMARY)), found)
    return found


def known(path: Place) -> Summary | None:
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


def remove(path: Place) -> None:
    """Removes the summary of a segment that was changed."""
    Path(_beside(path, SUMMARY)).unlink(missing_ok=True)


def _beside(path: Place, suffix: str) -> str:
    return str(path).removesuffix(DATA) + suffix


def _parsed(data: bytes) -> Summary | None:
    size = _VALUES.size
    if len(data) != size + _CRC.size or _CRC.unpack_from(data, size)[0] != checksums.crc32(data[:size]):
        return None
    return Summary._make(_VALUES.unpack_from(data))


def _made(path: Place) -> Summary:
    first, size = first_seq(path), _index_bytes(path)
    if not size:
        return Summary(first, first, 0, 0, 0, 0, 0)
    with open(_beside(path, INDEXED), "rb") as file:
        data = file.read(size)
    firsts, rows, _, _, earliest, latest, *_ = zip(*INDEX.iter_unpack(data), strict=True)
    return Summary(first, firsts[-1] + rows[-1], sum(rows), len(rows), min(earliest), max(latest), size)


def _index_bytes(path: Place) -> int:
    """The size of a segment's index, whole records only."""
    try:
        return os.stat(_beside(path, INDEXED)).st_size // INDEX.size * INDEX.size
    except FileNotFoundError:
        return 0


def _write(path: Path, found: Summary) -> None:
    values, beside = _VALUES.pack(*found), path.with_name(f".{path.name}.{os.getpid()}")
    touch(beside)
    beside.write_bytes(values + _CRC.pack(checksums.crc32(values)))
    os.replace(beside, path)
