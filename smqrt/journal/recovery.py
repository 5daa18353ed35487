"""Recovery and verification of a node's journal.

Recovery finds the end of the rows, and cuts off the torn end of the newest segment. An incomplete end is *torn*: a
crash left it. A batch that is invalid and is followed by valid batches is *damaged*: the disk changed it.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from pathlib import Path
from typing import IO, NamedTuple

from smqrt.errors import JournalError
from smqrt.journal import columns, committed, manifest, readers, segment
from smqrt.journal import segment as numbers
from smqrt.journal.files import MAGIC, crc32, crc32_of_file, touch
from smqrt.journal.manifest import DataFile, Manifest
from smqrt.journal.record import Flag
from smqrt.journal.segment import DATA, HAS_TXN, INDEX, INDEXED, REMEDY, RESULTS, BatchEntry, remove_summary

DAMAGED = ".damaged"
_NEWEST = 2  # segments with rows to check: the one in use at the crash, and the one before, which may be unsealed
_WRONG = 0xFFFFFFFF  # inverts a checksum, so that it can't match
_MAX_DIFFERENT_BYTES = 16  # a schema that differs in more bytes is not repaired
_GUESSED_SCHEMA = 8  # offset of the first batch when neither schema nor index is readable: it is somewhere after that


class Recovered(NamedTuple):
    """The result of `recover`.

    Attributes:
        next_seq: the number of the next row.
        removed_bytes: how many bytes were cut off.
        txns: the last committed batch of each query, from all nodes of the journal.
        damages: a sentence for each part of a segment that can't be read.
        end: the number after the last row; numbers from there up to `next_seq` are skipped.
    """

    next_seq: int
    removed_bytes: int
    txns: dict[str, int]
    damages: tuple[str, ...] = ()
    end: int = 0


class _Repaired(NamedTuple):
    entries: list[BatchEntry]
    removed_bytes: int
    damages: list[str]


def recover(folder: Path, schema: bytes = b"") -> Recovered:
    """Prepare a node's folder for appending. Only the writer that holds its lock may call it.

    Incomplete data (by length or crc32) at the end of the newest segment is cut off. Data that is invalid and is
    followed by valid batches is damaged: it stays, as do the batches after it, and no number is used again. The index
    is corrected from the batches. When something is damaged, the old index is stored beside it (`.damaged`). A missing
    or empty index is rebuilt.

    Args:
        folder: `<journal>/wal/<node>`; it may be missing.
        schema: the schema at the beginning of its segments; one that is damaged in a few bytes is repaired.

    Raises:
        JournalError: a file can't be read or cut, or doesn't belong to a journal.
    """
    journal, node = folder.parent.parent, folder.name
    try:
        end, removed, damages = _repair_newest(folder, schema)
        end = max(end, manifest.load(journal).nodes.get(node, 0))
        # Reports of readers are not synced, and few readers report. They matter for journals of older versions.
        seen = max((reader.offset.get(node, 0) for reader in readers.load(journal)), default=0)
        try:
            used = max(numbers.reserved(folder), seen)
        except JournalError as error:
            used = max(end, seen) + numbers.FAR
            damages.append(str(error))
        next_seq = end if used <= end else numbers.next_step(used)
        return Recovered(next_seq, removed, committed.last_batches(journal), tuple(damages), end)
    except OSError as error:
        raise JournalError(f"{folder} can't be recovered: {error}; give this user access to the files.") from None


def remove_empty(folder: Path, newest: int) -> None:
    """Remove segments without rows, which crashes leave at the end of a folder. Call `recover` first.

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


def _repair_newest(folder: Path, schema: bytes) -> tuple[int, int, list[str]]:
    """Return the number after the last row, how many bytes were cut off, and what is damaged."""
    next_seq = removed = filled = 0
    damages: list[str] = []
    for path in reversed(segment.paths(folder)):
        repaired = _repair(path, schema)
        removed += repaired.removed_bytes
        damages += repaired.damages
        filled += bool(repaired.entries)
        next_seq = max([next_seq, segment.first_seq(path), *(entry.next_seq for entry in repaired.entries)])
        if filled == _NEWEST:
            break
    return next_seq, removed, damages


def _repair(path: Path, schema: bytes) -> _Repaired:
    """Cut off incomplete data at the end of a segment, and correct its index."""
    recorded, found = segment.read_index(path), salvage(path)
    if not found.is_consistent:  # no automatic repair is possible: the segment stays, and its numbers stay in use
        return _Repaired(found.entries, 0, [f"{path}: its batches contradict each other; {REMEDY}"])
    damages = []
    if found.entries and not found.schema_bytes:
        damages.append(f"{path}: its beginning is damaged; {REMEDY}")
        if is_nearly(path, schema, found.entries[0].offset):
            with path.open("r+b") as file:
                file.write(schema)
                os.fsync(file.fileno())
    for entry in found.damaged:
        rows = f"rows {entry.first_seq} to {entry.next_seq - 1}"
        damages.append(f"{path}: {rows} are damaged, the rows after them are valid; {REMEDY}")
    indexed, right_size = path.with_suffix(INDEXED), len(found.entries) * INDEX.size
    size, index_size = path.stat().st_size, indexed.stat().st_size if indexed.exists() else 0
    removed_bytes = size - found.end + max(0, index_size - right_size)
    is_right = index_size == right_size and found.entries == recorded
    if (found.damaged and not is_right) or not recorded:
        if recorded:
            _store_copy(indexed)
        elif size != found.end:
            _store_copy(path)
    if size != found.end:
        with path.open("r+b") as file:
            file.truncate(found.end)
            os.fsync(file.fileno())  # before the next batch is appended
    if not is_right:
        _write_index(indexed, found.entries)
    return _Repaired(found.entries, removed_bytes, damages)


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
        damaged: the damaged entries of these.
        end: the offset after the last entry; no valid batch follows.
        schema_bytes: the length of the schema at the beginning; 0 when it is damaged.
        is_consistent: whether positions and numbers of the valid batches leave space for what is between them;
            otherwise `entries` are the valid batches only.
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
        if valid and not start:  # the schema is damaged: the index says where the first batch begins
            said = [one.offset for one in recorded if one.first_seq == first and 0 < one.offset <= valid[0].offset]
            first_offset = said[0] if said else _GUESSED_SCHEMA
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
        """Return the batches between two valid ones, damaged or not; None when rows or bytes don't fit."""
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
        rest = after.first_seq - reached.next_seq, after.offset - reached.end
        if rest == (0, 0):
            return found
        if min(rest) > 0:
            return [*found, self._unreadable(reached, after)]
        return [self._unreadable(before, after)]

    def _next(self, before: BatchEntry) -> BatchEntry | None:
        """Return the batch after another one, from its bytes, else from the index."""
        offset, seq = before.end, before.next_seq
        recorded = self._indexed.get((offset, seq))
        usable = recorded if recorded and recorded.rows > 0 and recorded.length > 0 else None
        header = _read_at(self._file, offset, columns.HEADER_BYTES)
        try:
            said = columns.read_header(header)
        except ValueError:
            return usable
        batch = header + self._file.read(said.body_bytes)
        entry = BatchEntry(seq, said.rows, offset, len(batch), 0, 0, crc32(batch), 0)
        if said.rows <= 0 or not _has_rows(entry, batch):
            return usable
        if entry.crc32 not in self._checksums:
            entry = entry._replace(crc32=recorded.crc32 if recorded else entry.crc32 ^ _WRONG)
        return _corrected(entry, batch)

    def _unreadable(self, before: BatchEntry, after: BatchEntry) -> BatchEntry:
        """Return one damaged entry for everything between two batches."""
        rows, size = after.first_seq - before.next_seq, after.offset - before.end
        crc = crc32(_read_at(self._file, before.end, size)) ^ _WRONG
        times = before.ts_min_us or after.ts_min_us, max(before.ts_max_us, after.ts_max_us)
        return BatchEntry(before.next_seq, rows, before.end, size, *times, crc, 0)


def _walk(file: IO[bytes], start: int, next_seq: int) -> Iterator[BatchEntry]:
    """Yield the index of a segment without a valid one, as far as the headers of its batches are readable."""
    while len(header := _read_at(file, start, columns.HEADER_BYTES)) == columns.HEADER_BYTES:
        try:
            said = columns.read_header(header)
        except ValueError:
            return
        batch = _read_at(file, start, columns.HEADER_BYTES + said.body_bytes)
        yield BatchEntry(next_seq, said.rows, start, len(batch), 0, 0, crc32(batch), 0)
        start, next_seq = start + len(batch), next_seq + said.rows


def _read_at(file: IO[bytes], offset: int, length: int) -> bytes:
    file.seek(offset)
    return file.read(length)


def _schema_bytes(file: IO[bytes]) -> int:
    """Return the length of the segment's schema; 0 when it is torn or damaged."""
    try:
        size = columns.message_size(file.read(8))
        head = _read_at(file, 0, size)
        metadata = columns.schema_metadata(head)
    except (ValueError, IndexError, UnicodeDecodeError):
        return 0
    return size if len(head) == size and metadata.keys() >= {"node", "broker"} else 0


def _read_valid(file: IO[bytes], entry: BatchEntry) -> bytes | None:
    """Return the bytes of a batch; None when they are incomplete or invalid."""
    size = os.fstat(file.fileno()).st_size
    if not (0 < entry.offset < entry.end <= size and entry.length >= columns.HEADER_BYTES):
        return None
    batch = _read_at(file, entry.offset, entry.length)
    return batch if crc32(batch) == entry.crc32 and _has_rows(entry, batch) else None


def _has_rows(entry: BatchEntry, batch: bytes) -> bool:
    """Return whether a batch has the rows of its index entry."""
    try:
        if columns.read_header(batch).rows != entry.rows:
            return False
        return columns.decode_numbers(batch, "seq") == [*range(entry.first_seq, entry.next_seq)]
    except (ValueError, JournalError):
        return False


def _corrected(entry: BatchEntry, batch: bytes) -> BatchEntry:
    """Return an index entry with times and flags from the batch, since no checksum covers them in the index."""
    times = columns.decode_numbers(batch, "ts")
    has_txn = columns.read_header(batch).nulls[-1] < entry.rows
    are_results = all((flag or 0) & Flag.PIPELINE for flag in columns.decode_numbers(batch, "flags"))  # None: damaged
    flags = (HAS_TXN if has_txn else 0) | (RESULTS if are_results else 0)
    return entry._replace(ts_min_us=min(times), ts_max_us=max(times), flags=flags, reserved=0)


def is_nearly(path: Path, schema: bytes, size: int) -> bool:
    """Return whether the first `size` bytes of a segment equal a schema, but for a few bytes and zeroed ones."""
    with path.open("rb") as file:
        head = file.read(size)
    differ = sum(one not in (0, right) for one, right in zip(head, schema, strict=False))
    return len(head) == len(schema) and differ <= _MAX_DIFFERENT_BYTES


# ---- Verification: batches, compacted files, missing rows

_RESTORE = "bring it back from a backup, or read on after it (--from, startingOffsets)"
_REBUILD = "the hub rebuilds it from the batches when it starts, or do it now with --repair"
_REPAIR = "the hub cuts that off when it starts, or do it now with --repair"


class JournalFault(NamedTuple):
    """A fault in a journal.

    Attributes:
        path: the file or folder.
        what: the fault and its remedy.
        torn: whether it is the end of the newest segment, left incomplete by a crash. No complete row is affected.
    """

    path: Path
    what: str
    torn: bool = False

    def __str__(self) -> str:
        return f"{self.path}: {self.what}."


@dataclass
class VerifyReport:
    """The result of a verification.

    `unchecked` counts files that were compacted without checksums. `gaps` are numbers (first, number after the last)
    that a hub skipped when it was started after a crash.
    """

    faults: list[JournalFault] = field(default_factory=list)
    segments: int = 0
    batches: int = 0
    rows: int = 0
    files: int = 0
    file_rows: int = 0
    unchecked: int = 0
    gaps: dict[str, list[tuple[int, int]]] = field(default_factory=dict)


def verify(journal: Path, on_file: Callable[[], None] = lambda: None) -> VerifyReport:
    """Check all files of a journal. A hub may write meanwhile.

    Args:
        journal: its folder.
        on_file: called after each segment and each compacted file.

    Returns:
        The report; without faults the journal is valid.

    Raises:
        JournalError: there is no such folder, or a file can't be opened.
    """
    if not journal.is_dir():
        raise JournalError(
            f"{journal} is not a folder; name the folder of a journal, or of an application that has one."
        )
    report = VerifyReport()
    try:
        for node in segment.node_folders(journal):
            report.faults += _segment_faults(node, report, on_file)
        state = _manifest(journal, report)
        if state is not None:
            report.faults += _file_faults(journal, state, report, on_file)
        report.faults += _small_file_faults(journal)
    except OSError as error:
        raise JournalError(f"{error.filename} can't be read: {error.strerror}; give this user the files.") from None
    return report


def count_files(journal: Path) -> int:
    """Return how many segments and compacted files `verify` checks."""
    return sum(1 for pattern in (f"wal/*/*{DATA}", "data/**/*.parquet") for _ in journal.glob(pattern))


def repair(journal: Path, report: VerifyReport) -> int:
    """Cut off the incomplete end that a crash left in the newest segments.

    Args:
        journal: its folder.
        report: the result of `verify`.

    Returns:
        The number of bytes that were cut off.

    Raises:
        JournalError: a hub writes to the folder.
    """
    removed = 0
    for folder in {fault.path.parent for fault in report.faults if fault.torn}:
        held = segment.lock(folder)
        try:
            removed += recover(folder).removed_bytes
        finally:
            os.close(held)
    return removed


# ---- Verification of segments


def _segment_faults(folder: Path, report: VerifyReport, on_file: Callable[[], None]) -> Iterator[JournalFault]:
    try:
        through = manifest.load(folder.parent.parent).nodes.get(folder.name, 0)
    except JournalError:  # `verify` reports the manifest itself
        through = 0
    paths = segment.paths(folder)
    is_written = _is_locked(folder / segment.LOCK)  # a hub is writing: the newest segment may be incomplete
    before: tuple[Path, int] | None = None
    for path in paths:
        checked = _SegmentCheck(path, path == paths[-1], is_written and path == paths[-1])
        try:
            yield from checked.faults()
        except FileNotFoundError:
            continue  # compacted meanwhile
        if before and checked.first > through and numbers.is_gap(before[1], checked.first):
            report.gaps.setdefault(folder.name, []).append((before[1], checked.first))
        elif before and before[1] != checked.first > through:
            what = f"begins with {checked.first}, {before[0].name} ends at {before[1]}: rows are missing"
            yield JournalFault(path, f"{what}; {_RESTORE}")
        before = path, checked.next_seq
        report.segments += 1
        report.batches += checked.batches
        report.rows += checked.rows
        on_file()
    oldest = segment.first_seq(paths[0]) if paths else 0
    if through and oldest > through and not numbers.is_gap(through, oldest):
        yield JournalFault(paths[0], f"is the oldest segment, but only rows below {through} are compacted; {_RESTORE}")
    for path in sorted(folder.glob("*" + INDEXED)):
        if not path.with_suffix(DATA).exists() and segment.first_seq(path) >= through:
            yield JournalFault(path, f"is the index of a segment that is missing; {_RESTORE}")


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


class _SegmentCheck:
    """The check of one segment.

    Args:
        path: the .arrows file.
        newest: whether it is the newest one, whose end may be torn.
        written: whether a hub is writing it, so that its end may be incomplete.
    """

    def __init__(self, path: Path, newest: bool, written: bool) -> None:
        self._path, self._newest, self._written = path, newest, written
        self.first = segment.first_seq(path)
        self.batches = self.rows = 0
        self.next_seq = self.first

    def faults(self) -> Iterator[JournalFault]:
        """Yield the faults of the segment."""
        index_path = self._path.with_suffix(INDEXED)
        raw = index_path.read_bytes() if index_path.exists() else b""
        data = self._path.read_bytes()  # after the index, so that it has every batch of the index
        if self._newest and not data and not raw:
            return  # a hub was killed before it wrote anything
        if len(raw) % INDEX.size and not self._written:
            yield self._end_fault(index_path, f"{len(raw) % INDEX.size} bytes of a torn record are at its end")
        try:
            end = _schema_end(data, self._path)
        except ValueError as error:
            yield self._end_fault(self._path, f"no schema of a journal is at its beginning ({error})")
            return
        if not raw and len(data) >= end + columns.HEADER_BYTES and not self._written:
            yield JournalFault(
                self._path, f"its index is empty or gone; {_REBUILD if self._newest else _RESTORE}", self._newest
            )
            return
        yield from self._entry_faults(segment.parse_index(raw), data, end)

    def _entry_faults(self, entries: list[BatchEntry], data: bytes, end: int) -> Iterator[JournalFault]:
        whole = [self._is_whole(entry, data) for entry in entries]
        last = max((at for at, good in enumerate(whole) if good), default=-1)
        for at, entry in enumerate(entries):
            if at > last and self._newest:
                yield self._end_fault(
                    self._path, f"the batch with row {entry.first_seq} is torn at offset {entry.offset}"
                )
                return
            if (entry.offset, entry.first_seq) != (end, self.next_seq) or not whole[at]:
                yield self._damage_fault(entry, data)
            end, self.next_seq = entry.end, entry.next_seq
            self.batches += 1
            self.rows += entry.rows
        if end < len(data) and not self._written:
            yield self._end_fault(self._path, f"{len(data) - end} bytes after its last batch belong to no batch")

    def _is_whole(self, entry: BatchEntry, data: bytes) -> bool:
        batch = memoryview(data)[entry.offset : entry.end] if 0 < entry.offset < entry.end else b""
        return len(batch) == entry.length > 0 and crc32(batch) == entry.crc32 and not _contradiction(entry, batch)

    def _damage_fault(self, entry: BatchEntry, data: bytes) -> JournalFault:
        batch = memoryview(data)[max(0, entry.offset) : max(0, entry.end)]
        if entry.first_seq != self.next_seq:
            what = f"row {self.next_seq} should follow, the index has {entry.first_seq}"
        elif len(batch) != entry.length:
            what = f"{len(batch)} of its {entry.length} bytes are there"
        elif crc32(batch) != entry.crc32:
            what = "its checksum is wrong"
        else:
            what = _contradiction(entry, batch) or "it doesn't begin where the one before it ends"
        rows = f"rows {entry.first_seq} to {entry.next_seq - 1}"
        return JournalFault(
            self._path, f"the batch with {rows} at offset {entry.offset} is damaged ({what}); {_RESTORE}"
        )

    def _end_fault(self, path: Path, what: str) -> JournalFault:
        return JournalFault(path, f"{what}; {_REPAIR if self._newest else _RESTORE}", torn=self._newest)


def _schema_end(data: bytes, path: Path) -> int:
    size = columns.message_size(data[:8])
    node = columns.schema_metadata(data[:size])["node"]
    if node != path.parent.name:
        raise ValueError(f"it was written by node {node!r}, not {path.parent.name!r}")
    return size


def _contradiction(entry: BatchEntry, batch: bytes | memoryview) -> str:
    """Return how a batch contradicts its index record; empty when they agree."""
    try:
        seqs, times = columns.decode_numbers(batch, "seq"), columns.decode_numbers(batch, "ts")
    except JournalError as error:
        return str(error).rstrip(".")
    if len(seqs) != entry.rows or seqs != list(range(entry.first_seq, entry.next_seq)):
        return "its rows are not numbered as the index says"
    if (min(times), max(times)) != (entry.ts_min_us, entry.ts_max_us):
        return "its times differ from the index"
    return ""


# ---- Verification of compacted files


def _manifest(journal: Path, report: VerifyReport) -> Manifest | None:
    try:
        return manifest.load(journal)
    except JournalError as error:
        reason = str(error).partition("; ")[0]
        what = f"can't be read ({reason}); bring it back from a backup: it lists the compacted files"
        report.faults.append(JournalFault(journal / manifest.FILE, what))
        return None


def _file_faults(
    journal: Path, state: Manifest, report: VerifyReport, on_file: Callable[[], None]
) -> Iterator[JournalFault]:
    try:
        listed = list(state.all_files())
    except (JournalError, FileNotFoundError) as error:
        what = f"of the manifest can't be read ({str(error).partition('; ')[0]}); bring it back from a backup"
        yield JournalFault(journal / manifest.PAGES_FOLDER, f"a page {what}")
        return
    for file in listed:
        report.files += 1
        report.file_rows += file.rows
        report.unchecked += file.crc32 is None
        if what := _file_fault(journal / file.path, file):
            yield JournalFault(journal / file.path, f"{what}; bring it back from a backup")
        on_file()
    for node in state.nodes:
        yield from _coverage(journal, [file for file in listed if file.node == node], state, report)
    named = {file.path for file in listed}
    found = {str(path.relative_to(journal)) for path in (journal / "data").rglob("*.parquet")}
    if not _is_locked(journal / "compact.lock"):
        for name in sorted(found - named):
            yield JournalFault(
                journal / name,
                "is left over from a killed compaction; `smqrt journal compact` removes it",
            )


def _coverage(journal: Path, files: list[DataFile], state: Manifest, report: VerifyReport) -> Iterator[JournalFault]:
    for before, file in pairwise(files):
        if numbers.is_gap(before.last + 1, file.first):
            report.gaps.setdefault(file.node, []).append((before.last + 1, file.first))
        elif file.first != before.last + 1:
            what = "rows are in two files" if file.first <= before.last else "rows are in no file"
            yield JournalFault(
                journal / file.path, f"begins with {file.first}, {before.path} ends with {before.last}: {what}"
            )
    through = state.nodes[files[-1].node] if files else 0
    if files and files[-1].last + 1 != through and not numbers.is_gap(files[-1].last + 1, through):
        yield JournalFault(
            journal / manifest.FILE, f"says that rows below {through} are compacted; files end with {files[-1].last}"
        )


def _file_fault(path: Path, file: DataFile) -> str:
    """Return the fault of a compacted file; empty for a valid one."""
    if not path.exists():
        return "is missing"
    size = path.stat().st_size
    if size != file.bytes:
        return f"has {size} bytes, {file.bytes} in the manifest"
    with path.open("rb") as opened:  # Parquet files begin and end with the same magic
        start = opened.read(len(MAGIC))
        opened.seek(-len(MAGIC), os.SEEK_END)
        if start != MAGIC or opened.read() != MAGIC:
            return "is not a Parquet file"
    if file.crc32 is not None and crc32_of_file(path) != file.crc32:
        return "was changed after it was written: its checksum is wrong"
    return _footer_fault(path, file)


def _footer_fault(path: Path, file: DataFile) -> str:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        return ""
    try:
        opened = parquet.ParquetFile(path, page_checksum_verification=True)
        metadata = opened.metadata
        if file.crc32 is None:
            for group in range(metadata.num_row_groups):
                opened.read_row_group(group)
    except (ArrowException, OSError) as error:
        return f"is damaged ({str(error).splitlines()[0].rstrip('.')})"
    if metadata.num_rows != file.rows or file.last - file.first + 1 != file.rows:
        return f"has {metadata.num_rows} rows, {file.rows} from {file.first} to {file.last} in the manifest"
    groups = [metadata.row_group(at) for at in range(metadata.num_row_groups)]
    names = [groups[0].column(at).path_in_schema for at in range(metadata.num_columns)]
    numbers = [group.column(names.index("seq")).statistics for group in groups]
    if (numbers[0].min, numbers[-1].max) != (file.first, file.last):
        return f"has rows {numbers[0].min} to {numbers[-1].max}, {file.first} to {file.last} in the manifest"
    return ""


# ---- Verification of the small files


def _small_file_faults(journal: Path) -> Iterator[JournalFault]:
    snapshots = [journal / committed.COMMITS_FILE, *sorted((journal / "wal").glob(f"*/{committed.COMMITS_FILE}"))]
    for folder in segment.node_folders(journal):
        try:
            numbers.reserved(folder)
        except JournalError as error:
            yield JournalFault(folder / numbers.FILE, str(error).partition(f"{numbers.FILE} ")[2].rstrip("."))
    for path in [*snapshots, *sorted((journal / "readers").glob("[!.]*.json"))]:
        try:
            if path.exists() and not isinstance(json.loads(path.read_bytes()), dict):
                raise ValueError("it is not a JSON object")
        except ValueError as error:
            remedy = "remove it: it is rebuilt" if path in snapshots else "`smqrt pipeline reset` removes it"
            yield JournalFault(path, f"is damaged ({error}); {remedy}")
