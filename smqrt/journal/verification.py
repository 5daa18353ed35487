"""Verification of a journal: batches, compacted files, missing rows."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from smqrt.errors import JournalError
from smqrt.journal import arrow, committed, manifest, segment
from smqrt.journal.files import MAGIC, crc32, crc32_of_file
from smqrt.journal.manifest import DataFile, Manifest
from smqrt.journal.recovery import recover
from smqrt.journal.segment import DATA, INDEX, INDEXED, BatchEntry

_RESTORE = "restore it from a backup, or continue after it (--from, startingOffsets)"
_REBUILD = "the hub rebuilds it from the batches when it starts; --repair does it now"
_REPAIR = "the hub cuts that off when it starts; --repair does it now"


class JournalFault(NamedTuple):
    """A fault in a journal.

    Attributes:
        path: the file or folder.
        what: the fault and its remedy, without the path.
        torn: whether it is the incomplete end of the newest segment, from a crash. No complete row is affected.
    """

    path: Path
    what: str
    torn: bool = False

    def __str__(self) -> str:
        return f"{self.path}: {self.what}."


@dataclass
class VerifyReport:
    """The result of a verification.

    Attributes:
        faults: the faults.
        segments, batches, rows: number of segments, of their batches and of their rows.
        files, file_rows: number of compacted files and of their rows.
        unchecked: number of compacted files without checksums, from older versions.
        gaps: by node, ranges of numbers (first, number after the last) that a hub skipped after a crash.
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
    """Check all files of a journal. A hub may write at the same time.

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
        try:
            state = manifest.load(journal)
        except JournalError as error:
            reason = str(error).partition("; ")[0]
            what = f"can't be read ({reason}); restore it from a backup: it lists the compacted files"
            report.faults.append(JournalFault(journal / manifest.FILE, what))
        else:
            report.faults += _file_faults(journal, state, report, on_file)
        report.faults += _small_file_faults(journal)
    except OSError as error:
        raise JournalError(
            f"{error.filename} can't be read: {error.strerror}; give this user access to the files."
        ) from None
    return report


def count_files(journal: Path) -> int:
    """Return the number of segments and compacted files that `verify` checks."""
    return sum(1 for pattern in (f"wal/*/*{DATA}", "data/**/*.parquet") for _ in journal.glob(pattern))


def repair(journal: Path, report: VerifyReport) -> int:
    """Cut off the torn end of the newest segments.

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
        lock = segment.lock(folder)
        try:
            removed += recover(folder).removed_bytes
        finally:
            os.close(lock)
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
        except FileNotFoundError:  # compacted meanwhile
            continue
        if before and checked.first > through and segment.is_gap(before[1], checked.first):
            report.gaps.setdefault(folder.name, []).append((before[1], checked.first))
        elif before and before[1] != checked.first > through:
            what = f"begins with {checked.first}, but {before[0].name} ends at {before[1]}: rows are missing"
            yield JournalFault(path, f"{what}; {_RESTORE}")
        before = path, checked.next_seq
        report.segments += 1
        report.batches += checked.batches
        report.rows += checked.rows
        on_file()
    oldest = segment.first_seq(paths[0]) if paths else 0
    if through and oldest > through and not segment.is_gap(through, oldest):
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
        newest: whether it is the node's newest segment, whose end may be torn.
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
            end = arrow.message_size(data[:8])
            node = arrow.schema_metadata(data[:end])["node"]
            if node != self._path.parent.name:
                raise ValueError(f"it was written by node {node!r}, not {self._path.parent.name!r}")
        except ValueError as error:
            yield self._end_fault(self._path, f"it doesn't begin with a journal schema ({error})")
            return
        if not raw and len(data) >= end + arrow.MIN_HEADER_BYTES and not self._written:
            yield JournalFault(
                self._path, f"its index is empty or missing; {_REBUILD if self._newest else _RESTORE}", self._newest
            )
            return
        yield from self._entry_faults(segment.parse_index(raw), data, end)

    def _entry_faults(self, entries: list[BatchEntry], data: bytes, end: int) -> Iterator[JournalFault]:
        are_valid = [self._is_valid(entry, data) for entry in entries]
        last = max((at for at, is_valid in enumerate(are_valid) if is_valid), default=-1)
        for at, entry in enumerate(entries):
            if at > last and self._newest:  # no valid batch follows: a crash can have caused this
                yield self._end_fault(
                    self._path, f"the batch with row {entry.first_seq} is torn at offset {entry.offset}"
                )
                return
            if (entry.offset, entry.first_seq) != (end, self.next_seq) or not are_valid[at]:
                batch = memoryview(data)[max(0, entry.offset) : max(0, entry.end)]
                if entry.first_seq != self.next_seq:
                    what = f"row {self.next_seq} should follow, but the index has {entry.first_seq}"
                elif len(batch) != entry.length:
                    what = f"the file has {len(batch)} of its {entry.length} bytes"
                elif crc32(batch) != entry.crc32:
                    what = "its checksum is wrong"
                else:
                    what = _contradiction(entry, batch) or "it doesn't begin where the one before it ends"
                place = f"rows {entry.first_seq} to {entry.next_seq - 1} at offset {entry.offset}"
                yield JournalFault(self._path, f"the batch with {place} is damaged ({what}); {_RESTORE}")
            end, self.next_seq = entry.end, entry.next_seq
            self.batches += 1
            self.rows += entry.rows
        if end < len(data) and not self._written:
            yield self._end_fault(self._path, f"{len(data) - end} bytes after its last batch belong to no batch")

    def _is_valid(self, entry: BatchEntry, data: bytes) -> bool:
        batch = memoryview(data)[entry.offset : entry.end] if 0 < entry.offset < entry.end else b""
        return len(batch) == entry.length > 0 and crc32(batch) == entry.crc32 and not _contradiction(entry, batch)

    def _end_fault(self, path: Path, what: str) -> JournalFault:
        return JournalFault(path, f"{what}; {_REPAIR if self._newest else _RESTORE}", torn=self._newest)


def _contradiction(entry: BatchEntry, batch: bytes | memoryview) -> str:
    """Return how a batch contradicts its index record; empty when they agree."""
    try:
        seqs, times = arrow.decode_numbers(batch, "seq"), arrow.decode_numbers(batch, "ts")
    except JournalError as error:
        return str(error).rstrip(".")
    if len(seqs) != entry.rows or seqs != list(range(entry.first_seq, entry.next_seq)):
        return "its row numbers differ from the index"
    if (min(times), max(times)) != (entry.ts_min_us, entry.ts_max_us):
        return "its times differ from the index"
    return ""


# ---- Verification of compacted files


def _file_faults(
    journal: Path, state: Manifest, report: VerifyReport, on_file: Callable[[], None]
) -> Iterator[JournalFault]:
    try:
        listed = list(state.all_files())
    except (JournalError, FileNotFoundError) as error:
        what = f"of the manifest can't be read ({str(error).partition('; ')[0]}); restore it from a backup"
        yield JournalFault(journal / manifest.PAGES_FOLDER, f"a page {what}")
        return
    for file in listed:
        report.files += 1
        report.file_rows += file.rows
        report.unchecked += file.crc32 is None
        if what := _file_fault(journal / file.path, file):
            yield JournalFault(journal / file.path, f"{what}; restore it from a backup")
        on_file()
    for node in state.nodes:
        yield from _coverage(journal, [file for file in listed if file.node == node], state, report)
    known = {file.path for file in listed}
    found = {str(path.relative_to(journal)) for path in (journal / "data").rglob("*.parquet")}
    if not _is_locked(journal / "compact.lock"):  # a running compaction has files that the manifest doesn't list yet
        for name in sorted(found - known):
            what = "is left over from an interrupted compaction; `smqrt journal compact` removes it"
            yield JournalFault(journal / name, what)


def _coverage(journal: Path, files: list[DataFile], state: Manifest, report: VerifyReport) -> Iterator[JournalFault]:
    for before, file in pairwise(files):
        if segment.is_gap(before.last + 1, file.first):
            report.gaps.setdefault(file.node, []).append((before.last + 1, file.first))
        elif file.first != before.last + 1:
            what = "rows are in two files" if file.first <= before.last else "rows are in no file"
            yield JournalFault(
                journal / file.path, f"begins with {file.first}, but {before.path} ends with {before.last}: {what}"
            )
    through = state.nodes[files[-1].node] if files else 0
    if files and files[-1].last + 1 != through and not segment.is_gap(files[-1].last + 1, through):
        yield JournalFault(
            journal / manifest.FILE,
            f"lists the rows below {through} as compacted, but its files end with {files[-1].last}",
        )


def _file_fault(path: Path, file: DataFile) -> str:
    """Return the fault of a compacted file; empty for a valid one."""
    if not path.exists():
        return "is missing"
    size = path.stat().st_size
    if size != file.bytes:
        return f"has {size} bytes, but {file.bytes} in the manifest"
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
    except ImportError:  # the checksum of the whole file was right
        return ""
    try:
        opened = parquet.ParquetFile(path, page_checksum_verification=True)
        metadata = opened.metadata
        if file.crc32 is None:  # of an older version: reading checks the pages' own checksums
            for group in range(metadata.num_row_groups):
                opened.read_row_group(group)
    except (ArrowException, OSError) as error:
        return f"is damaged ({str(error).splitlines()[0].rstrip('.')})"
    if metadata.num_rows != file.rows or file.last - file.first + 1 != file.rows:
        return f"has {metadata.num_rows} rows, but {file.rows} from {file.first} to {file.last} in the manifest"
    groups = [metadata.row_group(at) for at in range(metadata.num_row_groups)]
    names = [groups[0].column(at).path_in_schema for at in range(metadata.num_columns)]
    numbers = [group.column(names.index("seq")).statistics for group in groups]
    if (numbers[0].min, numbers[-1].max) != (file.first, file.last):
        return f"has rows {numbers[0].min} to {numbers[-1].max}, but {file.first} to {file.last} in the manifest"
    return ""


# ---- Verification of the small files


def _small_file_faults(journal: Path) -> Iterator[JournalFault]:
    snapshots = [journal / committed.COMMITS_FILE, *sorted((journal / "wal").glob(f"*/{committed.COMMITS_FILE}"))]
    for folder in segment.node_folders(journal):
        try:
            segment.reserved(folder)
        except JournalError as error:
            what = str(error).partition(f"{segment.NUMBERS_FILE} ")[2].rstrip(".")
            yield JournalFault(folder / segment.NUMBERS_FILE, what)
    for path in [*snapshots, *sorted((journal / "readers").glob("[!.]*.json"))]:
        try:
            if path.exists() and not isinstance(json.loads(path.read_bytes()), dict):
                raise ValueError("it is not a JSON object")
        except ValueError as error:
            remedy = "remove it: it is rebuilt" if path in snapshots else "`smqrt pipeline reset` removes it"
            yield JournalFault(path, f"is damaged ({error}); {remedy}")
