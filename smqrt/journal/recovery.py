"""Recovery of a node's journal.

Recovery finds the end of the rows, and cuts off the torn end of the newest segment. An incomplete end comes from a
crash and is called *torn*. An invalid batch before valid batches comes from the disk and is called *damaged*.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import IO, NamedTuple

from smqrt.errors import JournalError
from smqrt.journal import arrow, committed, manifest, readers, segment
from smqrt.journal.files import crc32, touch
from smqrt.journal.record import Flag
from smqrt.journal.segment import HAS_TXN, INDEX, INDEXED, REMEDY, RESULTS, BatchEntry, remove_summary

DAMAGED = ".damaged"
_NEWEST = 2  # segments with rows to check: the one in use at the crash, and the one before, which may be unsealed
_ALL_BITS = 0xFFFFFFFF  # a checksum with all bits inverted can't match
_MAX_DIFFERENT_BYTES = 16  # a schema that differs in more bytes is not repaired
_UNKNOWN_FIRST_OFFSET = 8  # when neither schema nor index is readable, the first batch is somewhere after this offset


class Recovered(NamedTuple):
    """The result of `recover`.

    Attributes:
        next_seq: the number of the next row.
        removed_bytes: number of bytes that were cut off.
        txns: the last committed batch of each query, from all nodes of the journal.
        faults: a sentence for each part of a segment that can't be read.
        end: the number after the last row; the numbers from it up to `next_seq` are skipped.
    """

    next_seq: int
    removed_bytes: int
    txns: dict[str, int]
    faults: tuple[str, ...] = ()
    end: int = 0


class _Repaired(NamedTuple):
    entries: list[BatchEntry]
    removed_bytes: int
    faults: list[str]


def recover(folder: Path, *schemas: bytes) -> Recovered:
    """Prepare a node's folder for appending. Only the writer that holds its lock may call it.

    Incomplete data (by length or crc32) at the end of the newest segment is cut off. Invalid data before valid batches
    is damaged: it stays, as do the batches after it, and no number is used again. The index is corrected from the
    batches. If data is damaged, the old index is stored beside it (`.damaged`). A missing or empty index is rebuilt.

    Args:
        folder: `<journal>/wal/<node>`; it may be missing.
        schemas: the schemas at the beginning of its segments; one that is damaged in a few bytes is repaired.

    Raises:
        JournalError: a file can't be read or cut, or doesn't belong to a journal.
    """
    journal, node = folder.parent.parent, folder.name
    end = removed_bytes = filled = 0
    faults: list[str] = []
    try:
        for path in reversed(segment.paths(folder)):
            repaired = _repair(path, schemas)
            removed_bytes += repaired.removed_bytes
            faults += repaired.faults
            filled += bool(repaired.entries)
            end = max([end, segment.first_seq(path), *(entry.next_seq for entry in repaired.entries)])
            if filled == _NEWEST:
                break
        end = max(end, manifest.load(journal).nodes.get(node, 0))
        # Reports of readers are not synced, and few readers report. They matter for journals of older versions.
        seen = max((reader.offset.get(node, 0) for reader in readers.load(journal)), default=0)
        try:
            used = max(segment.reserved(folder), seen)
        except JournalError as error:
            used = max(end, seen) + segment.MAX_LOST_ROWS  # the reservation is unknown
            faults.append(str(error))
        next_seq = end if used <= end else segment.next_step(used)
        return Recovered(next_seq, removed_bytes, committed.last_batches(journal), tuple(faults), end)
    except OSError as error:
        raise JournalError(f"{folder} can't be recovered: {error}; give this user access to the files.") from None


def remove_empty(folder: Path, newest: int) -> None:
    """Remove empty segments from the end of a folder, which crashes leave there. Call `recover` first.

    Args:
        folder: as for `recover`.
        newest: the first number of the segment that is in use and stays.

    Raises:
        OSError: a segment can't be removed.
    """
    for path in reversed(segment.paths(folder)):
        if segment.first_seq(path) == newest:
            continue
        if segment.read_index(path):
            break
        path.with_suffix(INDEXED).unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        remove_summary(path)


def _repair(path: Path, schemas: Sequence[bytes]) -> _Repaired:
    """Cut off incomplete data at the end of a segment, and correct its index."""
    recorded, found = segment.read_index(path), salvage(path)
    if not found.is_consistent:  # no automatic repair is possible: the segment stays, and its numbers stay in use
        return _Repaired(found.entries, 0, [f"{path}: its batches contradict each other; {REMEDY}"])
    faults = []
    if found.entries and not found.schema_bytes:
        faults.append(f"{path}: its beginning is damaged; {REMEDY}")
        for schema in schemas:
            if almost_begins_with(path, schema, found.entries[0].offset):
                with path.open("r+b") as file:
                    file.write(schema)
                    os.fsync(file.fileno())
                break
    for entry in found.damaged:
        rows = f"rows {entry.first_seq} to {entry.next_seq - 1}"
        faults.append(f"{path}: {rows} are damaged, but the rows after them are valid; {REMEDY}")
    indexed, correct_size = path.with_suffix(INDEXED), len(found.entries) * INDEX.size
    size, index_size = path.stat().st_size, indexed.stat().st_size if indexed.exists() else 0
    removed_bytes = size - found.end + max(0, index_size - correct_size)
    is_correct = index_size == correct_size and found.entries == recorded
    if (found.damaged and not is_correct) or not recorded:
        if recorded:
            _store_copy(indexed)
        elif size != found.end:
            _store_copy(path)
    if size != found.end:
        with path.open("r+b") as file:
            file.truncate(found.end)
            os.fsync(file.fileno())  # before the next batch is appended
    if not is_correct:
        _write_index(indexed, found.entries)
    return _Repaired(found.entries, removed_bytes, faults)


def _store_copy(path: Path) -> None:
    beside = path.with_name(path.name + DAMAGED)
    beside.unlink(missing_ok=True)
    touch(beside)
    beside.write_bytes(path.read_bytes())


def _write_index(path: Path, entries: Iterable[BatchEntry]) -> None:
    remove_summary(path)
    beside = path.with_suffix(".new")
    touch(beside)
    with beside.open("wb") as file:
        file.writelines(INDEX.pack(*entry) for entry in entries)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


# ---- Valid batches of a segment


class Salvaged(NamedTuple):
    """The content of a segment.

    Attributes:
        entries: the corrected index: every valid batch, and the damaged ones between them, with a checksum that
            doesn't match their bytes.
        damaged: the damaged entries among them.
        end: the offset after the last entry; no valid batch follows.
        schema_bytes: the length of the schema at the beginning; 0 when it is damaged.
        is_consistent: whether positions and numbers of the valid batches leave space for the data between them;
            otherwise `entries` has only the valid batches.
    """

    entries: list[BatchEntry]
    damaged: list[BatchEntry]
    end: int
    schema_bytes: int
    is_consistent: bool = True


def salvage(path: Path) -> Salvaged:
    """Read every batch of a segment.

    Args:
        path: the .arrows file.

    Raises:
        OSError: the file can't be read.
    """
    recorded, first = segment.read_index(path), segment.first_seq(path)
    with path.open("rb") as file:
        start = _schema_bytes(file)
        indexed = {(entry.offset, entry.first_seq): entry for entry in recorded}
        valid = _valid_entries(file, recorded)
        if not valid and start:  # the index is lost
            walked = _walk(file, start, first)
            valid = _valid_entries(file, takewhile(lambda one: (one.offset, one.first_seq) not in indexed, walked))
        first_offset = start
        if valid and not start:  # the schema is damaged: the index has the offset of the first batch
            offsets = [one.offset for one in recorded if one.first_seq == first and 0 < one.offset <= valid[0].offset]
            first_offset = offsets[0] if offsets else _UNKNOWN_FIRST_OFFSET
        found = [BatchEntry(first, 0, first_offset, 0, 0, 0, 0, 0)]  # an empty batch, so that the loop has a start
        gaps = _Gaps(file, indexed, {one.crc32 for one in recorded})
        for entry in valid:
            between = gaps.fill(found[-1], entry)
            if between is None:
                return Salvaged(valid, [], path.stat().st_size, start, is_consistent=False)
            found += [*between, entry]
        known = set(valid)
        damaged = [entry for entry in found[1:] if entry not in known and _read_valid(file, entry) is None]
    return Salvaged(found[1:], damaged, found[-1].end if valid else start, start)


def _valid_entries(file: IO[bytes], entries: Iterable[BatchEntry]) -> list[BatchEntry]:
    return [_corrected(entry, batch) for entry in entries if (batch := _read_valid(file, entry)) is not None]


class _Gaps:
    """The parts of a segment between valid batches.

    Args:
        file: the segment.
        indexed: the entries of its index, by (offset, first number).
        checksums: all checksums of the index.
    """

    def __init__(self, file: IO[bytes], indexed: dict[tuple[int, int], BatchEntry], checksums: set[int]) -> None:
        self._file, self._indexed, self._checksums = file, indexed, checksums

    def fill(self, before: BatchEntry, after: BatchEntry) -> list[BatchEntry] | None:
        """Return the batches between two valid batches, damaged or not; None when rows or bytes don't fit."""
        rows, size = after.first_seq - before.next_seq, after.offset - before.end
        if not rows and not size:
            return []
        if rows <= 0 or size <= 0:
            return None
        found: list[BatchEntry] = []
        reached = before
        while (entry := self._next(reached)) and entry.end <= after.offset and entry.next_seq <= after.first_seq:
            found.append(entry)
            reached = entry
        rest = after.first_seq - reached.next_seq, after.offset - reached.end  # rows and bytes
        if rest == (0, 0):
            return found
        if min(rest) > 0:
            return [*found, self._unreadable(reached, after)]
        return [self._unreadable(before, after)]

    def _next(self, before: BatchEntry) -> BatchEntry | None:
        """Return the batch after another batch, from its bytes, or else from the index."""
        offset, seq = before.end, before.next_seq
        recorded = self._indexed.get((offset, seq))
        usable = recorded if recorded and recorded.rows > 0 and recorded.length > 0 else None
        try:
            parsed = arrow.read_header(_read_at(self._file, offset, arrow.MAX_HEADER_BYTES))
        except ValueError:
            return usable
        batch = _read_at(self._file, offset, parsed.layout.header_bytes + parsed.body_bytes)
        entry = BatchEntry(seq, parsed.rows, offset, len(batch), 0, 0, crc32(batch), 0)
        if parsed.rows <= 0 or not _has_rows(entry, batch):
            return usable
        if entry.crc32 not in self._checksums:  # changed bytes: the entry must not match them
            entry = entry._replace(crc32=recorded.crc32 if recorded else entry.crc32 ^ _ALL_BITS)
        return _corrected(entry, batch)

    def _unreadable(self, before: BatchEntry, after: BatchEntry) -> BatchEntry:
        """Return one damaged entry for all rows and bytes between two batches."""
        rows, size = after.first_seq - before.next_seq, after.offset - before.end
        crc = crc32(_read_at(self._file, before.end, size)) ^ _ALL_BITS
        times = before.ts_min_us or after.ts_min_us, max(before.ts_max_us, after.ts_max_us)
        return BatchEntry(before.next_seq, rows, before.end, size, *times, crc, 0)


def _walk(file: IO[bytes], start: int, next_seq: int) -> Iterator[BatchEntry]:
    """Yield index entries from the headers of a segment's batches, as far as these are readable."""
    while header := _read_at(file, start, arrow.MAX_HEADER_BYTES):
        try:
            parsed = arrow.read_header(header)
        except ValueError:
            return
        batch = _read_at(file, start, parsed.layout.header_bytes + parsed.body_bytes)
        yield BatchEntry(next_seq, parsed.rows, start, len(batch), 0, 0, crc32(batch), 0)
        start, next_seq = start + len(batch), next_seq + parsed.rows


def _read_at(file: IO[bytes], offset: int, length: int) -> bytes:
    file.seek(offset)
    return file.read(length)


def _schema_bytes(file: IO[bytes]) -> int:
    """Return the length of the segment's schema; 0 when it is torn or damaged."""
    try:
        size = arrow.message_size(file.read(8))
        head = _read_at(file, 0, size)
        metadata = arrow.schema_metadata(head)
    except (ValueError, IndexError, UnicodeDecodeError):
        return 0
    return size if len(head) == size and metadata.keys() >= {"node", "broker"} else 0


def _read_valid(file: IO[bytes], entry: BatchEntry) -> bytes | None:
    """Return the bytes of a batch; None when they are incomplete or invalid."""
    size = os.fstat(file.fileno()).st_size
    if not (0 < entry.offset < entry.end <= size and entry.length >= arrow.MIN_HEADER_BYTES):
        return None
    batch = _read_at(file, entry.offset, entry.length)
    return batch if crc32(batch) == entry.crc32 and _has_rows(entry, batch) else None


def _has_rows(entry: BatchEntry, batch: bytes) -> bool:
    """Return whether a batch has the rows of its index entry."""
    try:
        if arrow.read_header(batch).rows != entry.rows:
            return False
        return arrow.decode_numbers(batch, "seq") == [*range(entry.first_seq, entry.next_seq)]
    except (ValueError, JournalError):
        return False


def _corrected(entry: BatchEntry, batch: bytes) -> BatchEntry:
    """Return an index entry with times and flags from the batch, since no checksum covers them in the index."""
    times = arrow.decode_numbers(batch, "ts")
    has_txn = arrow.read_header(batch).nulls[arrow.TXN] < entry.rows
    are_results = all((flag or 0) & Flag.PIPELINE for flag in arrow.decode_numbers(batch, "flags"))  # None: damaged
    flags = (HAS_TXN if has_txn else 0) | (RESULTS if are_results else 0)
    return entry._replace(ts_min_us=min(times), ts_max_us=max(times), flags=flags, reserved=0)


def almost_begins_with(path: Path, schema: bytes, size: int) -> bool:
    """Return whether the beginning of a segment equals a schema, except for zeroed bytes and a few others.

    Args:
        path: the .arrows file.
        schema: the expected bytes.
        size: length of the beginning, bytes.
    """
    with path.open("rb") as file:
        head = file.read(size)
    differ = sum(one not in (0, right) for one, right in zip(head, schema, strict=False))
    return len(head) == len(schema) and differ <= _MAX_DIFFERENT_BYTES
