"""Recovery of a node's journal after a crash: where it ends, and the torn end of its newest segment cut off.

An end that a crash left unfinished is torn; what isn't whole and is followed by whole batches is damaged.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import IO, NamedTuple

from smqrt.errors import JournalError
from smqrt.journal import arrow, committed, manifest, numbers, readers, segment
from smqrt.journal.files import crc32, touch
from smqrt.journal.record import Flag
from smqrt.journal.segment import HAS_TXN, INDEX, INDEXED, REMEDY, RESULTS, BatchEntry, remove_summary

DAMAGED = ".damaged"
_NEWEST = 2  # segments with rows: the one that was written to, and the one before it, which may not have been sealed
_WRONG = 0xFFFFFFFF  # what a checksum is changed by so that it can't be right
_FEW_BYTES = 16
_GUESSED_SCHEMA = 8  # the first batch begins somewhere behind it, when neither schema nor index says where


class Recovered(NamedTuple):
    """What `recover` found.

    Attributes:
        next_seq: the number of the next row.
        removed_bytes: how much was cut off.
        txns: the last committed batch of each query, whichever node of the journal stored it.
        damages: a sentence for each part of a segment that can't be read, though what follows it can.
        end: the number behind the last row; below `next_seq` numbers are left out.
    """

    next_seq: int
    removed_bytes: int
    txns: dict[str, int]
    damages: tuple[str, ...] = ()
    end: int = 0


class _Repaired(NamedTuple):
    entries: list[BatchEntry]
    cut: int
    damages: list[str]


def recover(folder: Path, schema: bytes = b"") -> Recovered:
    """Makes a node's folder ready to be appended to. Only its locked writer may call it.

    What isn't whole (length, crc32) at the end of the newest segment is cut off. What isn't, and is followed by whole
    batches, is damaged: it stays where it is, as do the batches behind it, and no number is given again. The index is
    corrected from the batches, and what it was is kept beside when something is damaged (`.damaged`); an index that is
    empty or gone is made again.

    Args:
        folder: `<journal>/wal/<node>`; it may be missing.
        schema: with which its segments begin; one that is damaged in a few bytes is mended.

    Raises:
        JournalError: a file can't be read or cut, or isn't a journal's.
    """
    journal = folder.parent.parent
    try:
        next_seq, removed, damages = _repair_newest(folder, schema)
        end = max(next_seq, manifest.load(journal).nodes.get(folder.name, 0))
        given, unknown = _given(folder, end)
        next_seq = end if given <= end else numbers.behind(given)
        return Recovered(next_seq, removed, committed.last_batches(journal), (*damages, *unknown), end)
    except OSError as error:
        raise JournalError(f"{folder} can't be recovered: {error}; give this user the files.") from None


def remove_empty(folder: Path, newest: int) -> None:
    """Removes segments without a row at the end of a folder that `recover` has been to: crashes leave them.

    Args:
        folder: as for `recover`.
        newest: the number that the segment begins with that stays, since it is written to.

    Raises:
        OSError: one can't be removed.
    """
    for path in reversed(segment.paths(folder)):
        if segment.first_seq(path) == newest:
            continue
        if segment.read_index(path):
            break
        path.with_suffix(INDEXED).unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        remove_summary(path)


def _repair_newest(folder: Path, schema: bytes) -> tuple[int, int, list[str]]:
    """Returns the number behind the last row, how many bytes were cut off, and what is damaged."""
    next_seq = removed = filled = 0
    damages: list[str] = []
    for path in reversed(segment.paths(folder)):
        entries, cut, damaged = _repair(path, schema)
        removed += cut
        damages += damaged
        filled += bool(entries)
        next_seq = max([next_seq, segment.first_seq(path), *(entry.next_seq for entry in entries)])
        if filled == _NEWEST:
            break
    return next_seq, removed, damages


def _given(folder: Path, next_seq: int) -> tuple[int, list[str]]:
    """Returns the number below which all that were given are, also those of rows that are lost, and what is damaged.

    The readers' own reports are not synced, and few readers report: they count for journals of older versions.
    """
    journal, node = folder.parent.parent, folder.name
    seen = max((reader.offset.get(node, 0) for reader in readers.load(journal)), default=0)
    try:
        return max(numbers.reserved(folder), seen), []
    except JournalError as error:
        return max(next_seq, seen) + numbers.FAR, [str(error)]


def _repair(path: Path, schema: bytes) -> _Repaired:
    """Cuts off what isn't whole at the end of a segment, and corrects its index."""
    recorded, found = segment.read_index(path), salvage(path)
    if not found.fits:  # nobody knows what to do with it: it stays as it is, and its numbers stay given
        return _Repaired(found.entries, 0, [f"{path}: its batches contradict each other; {REMEDY}"])
    damages = list(_sentences(path, found))
    if found.entries and not found.schema_bytes and is_nearly(path, schema, found.entries[0].offset):
        _overwrite(path, schema)
    indexed, right_size = path.with_suffix(INDEXED), len(found.entries) * INDEX.size
    size, index_size = path.stat().st_size, indexed.stat().st_size if indexed.exists() else 0
    is_right = index_size == right_size and found.entries == recorded
    if (found.damaged and not is_right) or not recorded:
        _keep_beside(*([indexed] if recorded else [path] if size != found.end else []))
    if size != found.end:
        _truncate(path, found.end)
    if not is_right:
        _rewrite(indexed, found.entries)
    return _Repaired(found.entries, size - found.end + max(0, index_size - right_size), damages)


def _sentences(path: Path, found: Salvaged) -> Iterator[str]:
    if found.entries and not found.schema_bytes:
        yield f"{path}: its beginning is damaged; {REMEDY}"
    for entry in found.damaged:
        rows = f"rows {entry.first_seq} to {entry.next_seq - 1}"
        yield f"{path}: {rows} are damaged, those behind them are whole; {REMEDY}"


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


def _overwrite(path: Path, start: bytes) -> None:
    with path.open("r+b") as file:
        file.write(start)
        os.fsync(file.fileno())


def _rewrite(path: Path, entries: Iterable[BatchEntry]) -> None:
    remove_summary(path)
    beside = path.with_suffix(".new")
    touch(beside)
    with beside.open("wb") as file:
        file.writelines(INDEX.pack(*entry) for entry in entries)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


# ---- the whole batches of a segment


class Salvaged(NamedTuple):
    """What there is in a segment.

    Attributes:
        entries: its index as it should be: every whole batch, and what is damaged between them, with a checksum that is
            not the one of its bytes.
        damaged: those of the entries that are.
        end: where the last of them ends, bytes; behind it nothing is whole.
        schema_bytes: how long the schema is at the beginning; 0 when that is damaged.
        fits: places and numbers of the whole batches leave room for what is between; else `entries` are these only.
    """

    entries: list[BatchEntry]
    damaged: list[BatchEntry]
    end: int
    schema_bytes: int
    fits: bool = True


def salvage(path: Path) -> Salvaged:
    """Looks at every batch of a segment.

    Args:
        path: the .arrows file.

    Raises:
        OSError: it can't be read.
    """
    recorded, first = segment.read_index(path), segment.first_seq(path)
    with path.open("rb") as file:
        start = _schema_bytes(file)
        indexed = {(entry.offset, entry.first_seq): entry for entry in recorded}
        whole = _wholes(file, recorded)
        if not whole and start:  # the index is lost
            walked = _rebuilt(file, start, first)
            whole = _wholes(file, takewhile(lambda one: (one.offset, one.first_seq) not in indexed, walked))
        found = [BatchEntry(first, 0, _first_offset(start, recorded, whole, first), 0, 0, 0, 0, 0)]
        gaps = _Gaps(file, indexed, {one.crc32 for one in recorded})
        for entry in whole:
            between = gaps.fill(found[-1], entry)
            if between is None:
                return Salvaged(whole, [], path.stat().st_size, start, fits=False)
            found += [*between, entry]
        known = set(whole)
        damaged = [entry for entry in found[1:] if entry not in known and _whole(file, entry) is None]
    return Salvaged(found[1:], damaged, found[-1].end if whole else start, start)


def _wholes(file: IO[bytes], entries: Iterable[BatchEntry]) -> list[BatchEntry]:
    return [_corrected(entry, batch) for entry in entries if (batch := _whole(file, entry)) is not None]


def _first_offset(schema_bytes: int, recorded: list[BatchEntry], whole: list[BatchEntry], first: int) -> int:
    """Returns where the first batch begins: behind the schema; when that is damaged, where the index says."""
    if schema_bytes or not whole:
        return schema_bytes
    said = [one.offset for one in recorded if one.first_seq == first and 0 < one.offset <= whole[0].offset]
    return said[0] if said else _GUESSED_SCHEMA


class _Gaps:
    """What stands between whole batches.

    Args:
        file: the segment.
        indexed: what its index says, by (offset, first number).
        checksums: all that are in the index.
    """

    def __init__(self, file: IO[bytes], indexed: dict[tuple[int, int], BatchEntry], checksums: set[int]) -> None:
        self._file, self._indexed, self._checksums = file, indexed, checksums

    def fill(self, before: BatchEntry, after: BatchEntry) -> list[BatchEntry] | None:
        """Returns the batches between, damaged or not; None when there is no way that they fit."""
        rows, size = after.first_seq - before.next_seq, after.offset - before.end
        if not rows and not size:
            return []
        if rows <= 0 or size <= 0:
            return None
        found = list(self._steps(before.end, before.next_seq, after))
        reached = found[-1] if found else before
        rest = after.first_seq - reached.next_seq, after.offset - reached.end
        if rest == (0, 0):
            return found
        if min(rest) > 0:
            return [*found, self._unreadable(reached, after)]
        return [self._unreadable(before, after)]

    def _steps(self, offset: int, seq: int, after: BatchEntry) -> Iterator[BatchEntry]:
        while (entry := self._step(offset, seq)) and entry.end <= after.offset and entry.next_seq <= after.first_seq:
            yield entry
            offset, seq = entry.end, entry.next_seq

    def _step(self, offset: int, seq: int) -> BatchEntry | None:
        """Returns the batch at a place, as its bytes say; else as the index says."""
        recorded = self._indexed.get((offset, seq))
        header = _at(self._file, offset, arrow.HEADER_BYTES)
        try:
            said = arrow.read_header(header)
        except ValueError:
            return recorded if recorded and recorded.rows > 0 and recorded.length > 0 else None
        batch = header + self._file.read(said.body_bytes)
        entry = BatchEntry(seq, said.rows, offset, len(batch), 0, 0, crc32(batch), 0)
        if said.rows <= 0 or not _has_rows(entry, batch):
            return recorded if recorded and recorded.rows > 0 and recorded.length > 0 else None
        if entry.crc32 not in self._checksums:
            entry = entry._replace(crc32=recorded.crc32 if recorded else entry.crc32 ^ _WRONG)
        return _corrected(entry, batch)

    def _unreadable(self, before: BatchEntry, after: BatchEntry) -> BatchEntry:
        rows, size = after.first_seq - before.next_seq, after.offset - before.end
        crc = crc32(_at(self._file, before.end, size)) ^ _WRONG
        times = before.ts_min_us or after.ts_min_us, max(before.ts_max_us, after.ts_max_us)
        return BatchEntry(before.next_seq, rows, before.end, size, *times, crc, 0)


def _rebuilt(file: IO[bytes], start: int, next_seq: int) -> Iterator[BatchEntry]:
    """Yields the index of a segment that has lost its own, as far as its batches say what they are."""
    while len(header := _at(file, start, arrow.HEADER_BYTES)) == arrow.HEADER_BYTES:
        try:
            said = arrow.read_header(header)
        except ValueError:
            return
        batch = _at(file, start, arrow.HEADER_BYTES + said.body_bytes)
        yield BatchEntry(next_seq, said.rows, start, len(batch), 0, 0, crc32(batch), 0)
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
        metadata = arrow.schema_metadata(head)
    except (ValueError, IndexError, UnicodeDecodeError):
        return 0
    return size if len(head) == size and metadata.keys() >= {"node", "broker"} else 0


def _whole(file: IO[bytes], entry: BatchEntry) -> bytes | None:
    """Returns the bytes of a batch when they are all there, and right."""
    size = os.fstat(file.fileno()).st_size
    if not (0 < entry.offset < entry.end <= size and entry.length >= arrow.HEADER_BYTES):
        return None
    batch = _at(file, entry.offset, entry.length)
    return batch if crc32(batch) == entry.crc32 and _has_rows(entry, batch) else None


def _has_rows(entry: BatchEntry, batch: bytes) -> bool:
    try:
        if arrow.read_header(batch).rows != entry.rows:
            return False
        return arrow.decode_numbers(batch, "seq") == [*range(entry.first_seq, entry.next_seq)]
    except (ValueError, JournalError):
        return False


def _corrected(entry: BatchEntry, batch: bytes) -> BatchEntry:
    """Returns an index record with what no checksum covers, from the batch itself."""
    times = arrow.decode_numbers(batch, "ts")
    has_txn = arrow.read_header(batch).nulls[-1] < entry.rows
    are_results = all((flag or 0) & Flag.PIPELINE for flag in arrow.decode_numbers(batch, "flags"))  # damaged: no flag
    flags = (HAS_TXN if has_txn else 0) | (RESULTS if are_results else 0)
    return entry._replace(ts_min_us=min(times), ts_max_us=max(times), flags=flags, reserved=0)


def is_nearly(path: Path, schema: bytes, size: int) -> bool:
    """Says whether the first bytes of a segment, so many, are this schema but for a few, and those that are empty."""
    with path.open("rb") as file:
        head = file.read(size)
    differ = sum(one not in (0, right) for one, right in zip(head, schema, strict=False))
    return len(head) == len(schema) and differ <= _FEW_BYTES
