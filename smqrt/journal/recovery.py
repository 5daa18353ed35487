"""After a crash: where the journal of a node ends, and the torn end of its newest segment cut off."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

from smqrt.errors import JournalError
from smqrt.journal import arrow, committed, index, manifest, summary
from smqrt.journal.files import touch
from smqrt.journal.index import HAS_TXN, INDEX, INDEXED, Entry

DAMAGED = ".damaged"
_NEWEST = 2  # segments with rows: the one that was written to, and the one before it, which may not have been sealed


class Recovered(NamedTuple):
    """What `recover` found.

    Attributes:
        next_seq: the number of the next row.
        removed_bytes: how much was cut off.
        txns: the last committed batch of each query, whichever node of the journal stored it.
    """

    next_seq: int
    removed_bytes: int
    txns: dict[str, int]


def recover(folder: Path) -> Recovered:
    """Makes a node's folder ready to be appended to. Only its locked writer may call it.

    Batches of the newest segment that aren't whole (length, crc32) are cut off, and the segment goes on there. When
    whole batches stand behind a broken one, they are kept beside, in files that end with `.damaged`. An index that is
    empty or gone is made again from the batches.

    Args:
        folder: `<journal>/wal/<node>`; it may be missing.

    Raises:
        JournalError: a file can't be read or cut, or isn't a journal's.
    """
    journal = folder.parent.parent
    try:
        next_seq, removed = _repair_newest(folder)
        return Recovered(max(next_seq, _least_next(journal, folder.name)), removed, committed.last_batches(journal))
    except OSError as error:
        raise JournalError(f"{folder} can't be recovered: {error}; give this user the files.") from None


def _repair_newest(folder: Path) -> tuple[int, int]:
    """Returns the number behind the last row, and how many bytes were cut off."""
    next_seq = removed = filled = 0
    for path in reversed(index.paths(folder)):
        entries, cut = _repair(path)
        removed += cut
        filled += bool(entries)
        next_seq = max(next_seq, index.first_seq(path), entries[-1].next_seq if entries else 0)
        if filled == _NEWEST:
            break
    return next_seq, removed


def _least_next(journal: Path, node: str) -> int:
    """Numbers below it were given: their rows are Parquet by now, or a pipeline has seen them."""
    known = [manifest.load(journal).nodes.get(node, 0)]
    known += [offset.get(node, 0) for offset in manifest.reader_offsets(journal).values()]
    return max(known)


def _repair(path: Path) -> tuple[list[Entry], int]:
    """Cuts off what isn't whole at the end of a segment; returns its batches and the bytes cut off."""
    indexed = path.with_suffix(INDEXED)
    entries = index.read_index(path)
    with path.open("rb") as file:
        size, start = os.fstat(file.fileno()).st_size, _schema_bytes(file)
        if not entries and start:
            entries = list(_rebuilt(file, start, index.first_seq(path)))
        good = _whole(file, entries, start)
        if any(_batch(file, entry) for entry in entries[len(good) + 1 :]):
            _keep_beside(path, indexed)
    end = good[-1].end if good else start
    index_size = indexed.stat().st_size if indexed.exists() else 0
    cut = size - end + max(0, index_size - len(good) * INDEX.size)
    if size != end:
        _truncate(path, end)
    if index_size != len(good) * INDEX.size or good != index.read_index(path):
        _rewrite(indexed, good)
    return good, cut


def _rebuilt(file: IO[bytes], start: int, next_seq: int) -> Iterator[Entry]:
    """Yields the index of a segment that has lost its own, as far as its batches say what they are."""
    while len(header := _at(file, start, arrow.HEADER_BYTES)) == arrow.HEADER_BYTES:
        try:
            said = arrow.read_header(header)
        except ValueError:
            return
        batch = _at(file, start, arrow.HEADER_BYTES + said.body_bytes)
        yield Entry(next_seq, said.rows, start, len(batch), 0, 0, zlib.crc32(batch), 0)
        start, next_seq = start + len(batch), next_seq + said.rows


def _at(file: IO[bytes], offset: int, length: int) -> bytes:
    file.seek(offset)
    return file.read(length)


def _schema_bytes(file: IO[bytes]) -> int:
    """Returns the length of the segment's schema; 0 when that is torn already."""
    try:
        size = arrow.message_size(file.read(8))
        file.seek(0)
        head = file.read(size)
        arrow.schema_metadata(head)
    except ValueError:
        return 0
    return size if len(head) == size else 0


def _whole(file: IO[bytes], entries: Iterable[Entry], start: int) -> list[Entry]:
    """Returns the batches up to the first that isn't whole, as their bytes say."""
    good: list[Entry] = []
    end, next_seq = start, None
    for entry in entries:
        follows = entry.offset == end and entry.rows > 0 and next_seq in (None, entry.first_seq)
        batch = _batch(file, entry) if start and follows else None
        if batch is None or not _has_rows(entry, batch):
            break
        good.append(_corrected(entry, batch))
        end, next_seq = entry.end, entry.next_seq
    return good


def _batch(file: IO[bytes], entry: Entry) -> bytes | None:
    """Returns the bytes of a batch when they are all there and right."""
    size = os.fstat(file.fileno()).st_size
    if not (0 < entry.offset < entry.end <= size and entry.length >= arrow.HEADER_BYTES):
        return None
    batch = _at(file, entry.offset, entry.length)
    return batch if len(batch) == entry.length and zlib.crc32(batch) == entry.crc32 else None


def _has_rows(entry: Entry, batch: bytes) -> bool:
    try:
        if arrow.read_header(batch).rows != entry.rows:
            return False
        return arrow.decode_column(batch, "seq") == [*range(entry.first_seq, entry.next_seq)]
    except (ValueError, JournalError):
        return False


def _corrected(entry: Entry, batch: bytes) -> Entry:
    """Returns an index record with what no checksum covers, from the batch itself."""
    times = arrow.decode_column(batch, "ts")
    has_txn = arrow.read_header(batch).nulls[-1] < entry.rows
    flags = HAS_TXN if has_txn else 0
    return entry._replace(ts_min_us=min(times), ts_max_us=max(times), flags=flags, reserved=0)


def _keep_beside(*files: Path) -> None:
    for path in files:
        beside = path.with_name(path.name + DAMAGED)
        beside.unlink(missing_ok=True)
        touch(beside)
        beside.write_bytes(path.read_bytes())


def _truncate(path: Path, size: int) -> None:
    """Cuts a file; the disk keeps it before anything is appended."""
    with path.open("r+b") as file:
        file.truncate(size)
        os.fsync(file.fileno())


def _rewrite(path: Path, entries: Iterable[Entry]) -> None:
    summary.remove(path)
    beside = path.with_suffix(".new")
    touch(beside)
    with beside.open("wb") as file:
        file.writelines(INDEX.pack(*entry) for entry in entries)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
