"""The summary of a sealed segment, in 64 bytes beside it: whoever asks when its rows are from needn't read its index.

    <first_seq>.sum      first_seq, end, rows, batches, ts_min_us, ts_max_us, size of the index, crc32

It is written when a segment is sealed, and made anew from the index where it is missing or not that of the index.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from smqrt.journal import checksums, index
from smqrt.journal.files import touch
from smqrt.journal.index import INDEX, INDEXED

SUMMARY = ".sum"
_VALUES, _CRC = struct.Struct("<7q"), struct.Struct("<q")
_KEPT = 1024


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


def of(path: Path) -> Summary:
    """Returns the summary of a sealed segment; one that is missing or outdated is made, and written if possible.

    Args:
        path: of the segment.

    Raises:
        FileNotFoundError: the segment has gone.
        OSError: it can't be read.
    """
    path.stat()
    found = known(path)
    if found is None:
        found = _made(path)
        with suppress(OSError):  # a reader may not write here
            _write(path.with_suffix(SUMMARY), found)
    return found


def known(path: Path) -> Summary | None:
    """Returns the summary that stands beside a segment; None when there is none for its index.

    Raises:
        OSError: it can't be read.
    """
    size = _index_bytes(path)
    try:
        data = path.with_suffix(SUMMARY).read_bytes()
    except FileNotFoundError:
        return None
    found = _parsed(data)
    return found if found and (found.first_seq, found.index_bytes) == (index.first_seq(path), size) else None


def remove(path: Path) -> None:
    """Removes the summary of a segment that was changed."""
    path.with_suffix(SUMMARY).unlink(missing_ok=True)


@lru_cache(maxsize=_KEPT)
def _parsed(data: bytes) -> Summary | None:
    size = _VALUES.size
    if len(data) != size + _CRC.size or _CRC.unpack_from(data, size)[0] != checksums.crc32(data[:size]):
        return None
    return Summary._make(_VALUES.unpack_from(data))


def _made(path: Path) -> Summary:
    first, size = index.first_seq(path), _index_bytes(path)
    if not size:
        return Summary(first, first, 0, 0, 0, 0, 0)
    with path.with_suffix(INDEXED).open("rb") as file:
        data = file.read(size)
    firsts, rows, _, _, earliest, latest, *_ = zip(*INDEX.iter_unpack(data), strict=True)
    return Summary(first, firsts[-1] + rows[-1], sum(rows), len(rows), min(earliest), max(latest), size)


def _index_bytes(path: Path) -> int:
    """The size of a segment's index, whole records only."""
    try:
        return path.with_suffix(INDEXED).stat().st_size // INDEX.size * INDEX.size
    except FileNotFoundError:
        return 0


def _write(path: Path, found: Summary) -> None:
    values, beside = _VALUES.pack(*found), path.with_name(f".{path.name}.{os.getpid()}")
    touch(beside)
    beside.write_bytes(values + _CRC.pack(checksums.crc32(values)))
    os.replace(beside, path)
