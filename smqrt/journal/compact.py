"""Compaction: sealed segments to Parquet files, and small files to larger ones.

It runs in a separate process, while the hub writes and readers read, and may be killed at any moment. The order of its
steps makes that safe: files are written and synced under temporary names and renamed. Then the manifest lists them, so
that readers use them. The segments are removed after a grace period. The next run removes the files of an unfinished
run. File names contain the range of sequence numbers, so a range means the same rows before and after compaction.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from smqrt.errors import JournalError
from smqrt.journal import committed, files, manifest, parquet_files, recovery, retention, segment, tables
from smqrt.journal.files import FILE_MODE, age_s, crc32, sync_folder
from smqrt.journal.manifest import DataFile, Manifest
from smqrt.journal.parquet_files import FinishedFile, HourFile, Shred, hour_of
from smqrt.journal.payload_schema import TypedColumn
from smqrt.journal.record import SEGMENT_COLUMNS
from smqrt.journal.segment import remove_summary
from smqrt.journal.settings import CompactSettings, JournalSettings

Step = Callable[[str], None]
"""Called with the name of each completed step, so that tests can simulate a crash after it."""

_LOCK = "compact.lock"
_STATE_BYTES, _DONE = 32, b"done"
_PARQUET = ".parquet"
_LEFTOVERS = (".tmp", ".shred", _PARQUET)


@dataclass(frozen=True)
class CompactOptions:
    """Options of a compaction.

    Attributes:
        after_s: segments are compacted when their last row has this age, seconds.
        grace_s: how long compacted segments stay, seconds, since readers may use them.
        everything: compact the newest segment, too; no hub may write to it.
        schemas: DDL by topic pattern, for the column `json`.
        shred: writes a Parquet file with a VARIANT column from one without.
        max_group_bytes: maximum size of the segments that are compacted together, to one file an hour.
        merge_bytes: maximum size of a merged file (of an hour or a day); 0 to merge no files.
    """

    after_s: float = 0.0
    grace_s: float = 60.0
    everything: bool = False
    schemas: Mapping[str, str] = field(default_factory=dict)
    shred: Shred | None = None
    max_group_bytes: int = 256 << 20
    merge_bytes: int = 128 << 20


@dataclass
class CompactResult:
    """The result of a compaction.

    Attributes:
        segments, rows, files: number of compacted segments, of their rows, and of the new files.
        payload_bytes, file_bytes: size of the payloads, and of the new files.
        removed: number of segments that were removed.
        waiting: number of compacted segments that stay until their grace period is over.
        merged: number of files that were merged.
    """

    segments: int = 0
    rows: int = 0
    files: int = 0
    payload_bytes: int = 0
    file_bytes: int = 0
    removed: int = 0
    waiting: int = 0
    merged: int = 0


class _Sealed(NamedTuple):
    """A sealed segment; `end` is the first number of the next one."""

    path: Path
    end: int
    size_bytes: int


def compact(
    journal: Path,
    options: CompactOptions = CompactOptions(),
    on_step: Step = lambda step: None,
    on_rows: Callable[[int], None] = lambda count: None,
) -> CompactResult:
    """Write sealed segments to Parquet files, and remove the segments whose grace period is over.

    Args:
        journal: the journal's folder.
        options: the options.
        on_step: called with the name of each step.
        on_rows: called with the number of rows that were read from segments.

    Returns:
        The counts of segments, rows and files.

    Raises:
        JournalError: pyarrow is missing, another process compacts the journal, a segment is damaged, or the disk is
            full. The journal remains usable.
    """
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise JournalError("Compaction needs pyarrow, which is not installed: pip install 'smqrt[spark]'.") from None
    lock, was_unfinished = _lock(journal)
    try:
        if was_unfinished:
            remove_leftovers(journal, manifest.load(journal))
        result = _Compaction(journal, options, on_step, on_rows).run()
        os.pwrite(lock, _DONE.ljust(_STATE_BYTES), 0)
        return result
    except OSError as error:
        text = error.strerror or str(error)
        cause = f"{error.filename}: {text}" if error.filename else text  # an error of pyarrow has no file name
        raise JournalError(
            f"{journal} can't be compacted: {cause}; "
            "the segments are not changed; fix this, then run the compaction again."
        ) from error
    finally:
        os.close(lock)


def rows_to_compact(journal: Path, options: CompactOptions = CompactOptions()) -> int:
    """Return how many rows of segments `compact` would write to Parquet files.

    Args:
        journal: the journal's folder.
        options: the options.

    Raises:
        JournalError: the manifest can't be read.
    """
    through, rows = manifest.load(journal).nodes, 0
    for folder in segment.node_folders(journal):
        wanted = (one for one in sealed(folder, options) if one.end > through.get(folder.name, 0))
        rows += sum(entry.rows for one in wanted for entry in segment.read_index(one.path))
    return rows


def _lock(journal: Path) -> tuple[int, bool]:
    """Lock the journal for this compaction, until the descriptor is closed or the process ends.

    Returns:
        The descriptor, and whether the last run was unfinished: a complete run writes `_DONE` into the lock file.
    """
    try:
        fd = os.open(journal / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        raise JournalError(
            f"{journal} can't be compacted: {error.strerror}; name the folder of a journal that this user can write to."
        ) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.read(fd, _STATE_BYTES).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise JournalError(
            f"{journal} is being compacted by process {owner}; only one process can compact it at a time."
        ) from None
    was_unfinished = os.pread(fd, _STATE_BYTES, 0).strip() != _DONE
    os.pwrite(fd, f"{os.getpid()}\n".encode().ljust(_STATE_BYTES), 0)
    return fd, was_unfinished


class _Compaction:
    def __init__(self, journal: Path, options: CompactOptions, on_step: Step, on_rows: Callable[[int], None]) -> None:
        self._journal, self._options, self._step, self._on_rows = journal, options, on_step, on_rows
        self._typed_column = TypedColumn(options.schemas) if options.schemas else None
        self._result = CompactResult()
        self._needs_spark = False
        self._errors: list[JournalError] = []

    def run(self) -> CompactResult:
        for folder in segment.node_folders(self._journal):
            lock = segment.lock(folder) if self._options.everything else -1  # a hub must not append to the newest one
            try:
                self._compact_node(folder)
            finally:
                if lock >= 0:
                    os.close(lock)
            self._remove(folder)
        for node in sorted(manifest.load(self._journal).nodes) if self._options.merge_bytes else ():
            self._merge_node(node)
        parquet_files.remove_retired(self._journal, self._options.grace_s)
        retention.release_links(self._journal, time.time())
        if self._errors:
            raise self._errors[0]
        return self._result

    # ---- segments to files

    def _compact_node(self, folder: Path) -> None:
        if self._options.everything:
            recovery.recover(folder)
        through = manifest.load(self._journal).nodes.get(folder.name, 0)
        wanted = [one for one in sealed(folder, self._options) if one.end > through]
        groups: list[list[_Sealed]] = []
        for one in wanted:
            size_bytes = sum(other.size_bytes for other in groups[-1]) + one.size_bytes if groups else 0
            if not groups or size_bytes > self._options.max_group_bytes:
                groups.append([])
            groups[-1].append(one)
        for group in groups:
            written = self._write_files(folder.name, group)
            self._step("written")
            self._rename_files(written)
            with manifest.edit(self._journal) as state:
                state.nodes[folder.name] = max(group[-1].end, state.nodes.get(folder.name, 0))
                state.add(new.file for new in written)
            self._step("switched")
            self._result.segments += len(group)
            self._result.files += len(written)
            for new in written:
                self._result.rows += new.file.rows
                self._result.file_bytes += new.file.bytes
                self._result.payload_bytes += new.payload_bytes

    def _rename_files(self, files: Sequence[FinishedFile]) -> None:
        for new in files:
            os.utime(new.path)  # the grace period of the segments begins now
            path = self._journal / new.file.path
            os.replace(new.path, path)
            sync_folder(path.parent)
            self._step("named")

    def _write_files(self, node: str, group: Sequence[_Sealed]) -> list[FinishedFile]:
        files: list[FinishedFile] = []
        open_file: HourFile | None = None
        try:
            for piece in _by_hour(group):
                if open_file is not None and (open_file.hour, open_file.next_seq) != (piece.hour, piece.first):
                    files.append(open_file.close(self._options.shred))
                    self._step("file")
                    open_file = None
                open_file = open_file or HourFile(self._journal, node, piece.hour, piece.first, self._typed_column)
                open_file.add(piece.batch, piece.broker)
                self._on_rows(piece.batch.num_rows)
            if open_file is not None:
                files.append(open_file.close(self._options.shred))
        except BaseException:
            if open_file is not None:
                open_file.discard()
            raise
        return files

    # ---- small files to large ones

    def _merge_node(self, node: str) -> None:
        self._needs_spark = False
        now_us, state = time.time_ns() // 1000, manifest.load(self._journal)
        files = list(state.files(node, state.settled.get(node, 0)))
        for group in parquet_files.merge_groups(files, now_us, self._options.merge_bytes, self._can_merge):
            try:
                merged = parquet_files.merge_files(self._journal, group, self._options.shred)
                self._step("merged")
                self._rename_files([merged])
                with manifest.edit(self._journal) as changes:
                    changes.remove(group)
                    changes.add([merged.file])
                self._step("merge switched")
                for file in group:
                    parquet_files.retire_files(self._journal, [self._journal / file.path])
                    self._step("retired")
                self._result.merged += len(group)
            except JournalError as error:  # the other files are still merged
                self._errors.append(error)
        below = parquet_files.settled_below(files, now_us)
        if not (self._needs_spark or self._errors) and below is not None and below > state.settled.get(node, 0):
            with manifest.edit(self._journal) as changes:
                changes.settled[node] = below

    def _can_merge(self, one: DataFile, other: DataFile) -> bool:
        """Return whether two files have the same columns, and this run can write them."""
        paths = [self._journal / file.path for file in (one, other)]
        if not self._options.shred and any(map(parquet_files.has_variant, paths)):
            self._needs_spark = True  # a later run with Spark merges them
            return False
        return bool(parquet_files.full_schema(paths[0]).equals(parquet_files.full_schema(paths[1])))

    # ---- segments that are no longer needed

    def _remove(self, folder: Path) -> None:
        state = manifest.load(self._journal)
        through = state.nodes.get(folder.name, 0)
        for one in sealed(folder, self._options):
            if one.end > through:
                break
            # The grace period begins when the files with the segment's rows are renamed.
            data_files = state.files(folder.name, segment.first_seq(one.path), one.end)
            is_removable = all(_age_s(self._journal / file.path) >= self._options.grace_s for file in data_files)
            if is_removable:
                # The snapshot must have each commit of the segment: else the hub would accept such a batch again.
                known, batches = committed.load_snapshot(folder), committed.batches_of_segment(one.path)
                is_removable = all(known.get(query, -1) >= batch for query, batch in batches.items())
            if not is_removable:
                self._result.waiting += 1
                continue
            # The index first: after a kill, a segment without an index is still removed by the next run.
            one.path.with_suffix(segment.INDEXED).unlink(missing_ok=True)
            self._step("index removed")
            one.path.unlink(missing_ok=True)
            remove_summary(one.path)
            self._step("removed")
            self._result.removed += 1
        files.sync_folder(folder)


def remove_leftovers(journal: Path, state: Manifest) -> list[Path]:
    """Remove files under `data` that the manifest does not list, from an unfinished run. The caller has the lock.

    Args:
        journal: the journal's folder.
        state: its manifest.

    Returns:
        The removed files. Complete ones are in `retired/`, since a reader may use them.
    """
    listed = {journal / file.path for file in state.all_files()}
    found = [path for path in (journal / "data").glob("date=*/hour=*/*") if path.suffix in _LEFTOVERS]
    left = [path for path in found if path not in listed]
    parquet_files.retire_files(journal, (path for path in left if path.suffix == _PARQUET))
    for path in left:
        path.unlink(missing_ok=True)
    return left


def sealed(folder: Path, options: CompactOptions = CompactOptions()) -> list[_Sealed]:
    """Return the sealed segments of a node, oldest first; with `everything` the newest segment, too.

    Args:
        folder: `<journal>/wal/<node>`.
        options: `after_s` and `everything` are used.

    Raises:
        OSError: a segment can't be read.
    """
    paths = segment.paths(folder)
    ends = [segment.first_seq(path) for path in paths[1:]]  # a segment ends where the next one begins
    if paths and options.everything and (entries := segment.read_index(paths[-1])):
        ends.append(entries[-1].next_seq)
    found = [_Sealed(path, end, path.stat().st_size) for path, end in zip(paths, ends, strict=False)]
    return [one for one in found if not options.after_s or _age_s(one.path) >= options.after_s]


def _age_s(path: Path) -> float:
    """Return the age of a file in seconds; infinity for a missing one."""
    try:
        return age_s(path)
    except FileNotFoundError:
        return float("inf")


# ---- reading segments


class _Piece(NamedTuple):
    """Rows of one batch and one hour."""

    first: int
    hour: int
    batch: Any
    broker: str


def _by_hour(group: Sequence[_Sealed]) -> Iterator[_Piece]:
    """Yield the rows of segments. Each batch is checked, since the segments will be removed."""
    from pyarrow import ipc, memory_map

    target = tables.schema([column.name for column in SEGMENT_COLUMNS])
    for one in group:
        entries = segment.read_index(one.path)
        segment.check_index(entries, one.path)
        end = entries[-1].next_seq if entries else segment.first_seq(one.path)
        is_followed = end == one.end or segment.is_gap(end, one.end)
        if not is_followed or (entries and entries[0].first_seq != segment.first_seq(one.path)):
            raise _damaged(one.path, f"its batches end at {end}, but the next segment begins at {one.end}")
        if not entries:
            continue
        data = memory_map(str(one.path)).read_buffer()
        schema = ipc.open_stream(data).schema
        broker = schema.metadata[b"broker"].decode()
        for entry in entries:
            message = data[entry.offset : entry.end]
            if len(message) != entry.length or crc32(message) != entry.crc32:
                raise _damaged(one.path, f"the batch with {entry.first_seq} at offset {entry.offset} is damaged")
            read = ipc.read_record_batch(ipc.read_message(message), schema)
            columns = dict(zip(schema.names, read.columns, strict=True))
            batch = tables.with_columns(columns, read.num_rows, target)
            hour, at = hour_of(entry.ts_min_us), 0
            if hour == hour_of(entry.ts_max_us):
                yield _Piece(entry.first_seq, hour, batch, broker)
                continue
            for hour, same in groupby(map(hour_of, batch.column("ts").cast("int64").to_pylist())):
                rows = sum(1 for _ in same)
                yield _Piece(entry.first_seq + at, hour, batch.slice(at, rows), broker)
                at += rows


def _damaged(path: Path, what: str) -> JournalError:
    return JournalError(f"{path} can't be compacted: {what}; {segment.REMEDY}.")


def arguments(settings: JournalSettings) -> list[str]:
    """Return the command-line arguments of `smqrt` that compact a hub's journal continuously.

    Args:
        settings: settings of the journal, with `compact`.
    """
    wanted = settings.compact or CompactSettings()
    words = ["journal", "compact", str(settings.path), "--watch", "60s", "--after", f"{wanted.after_s:g}s"]
    for pattern, ddl in wanted.schema.items():
        words += ["--schema", f"{pattern}={ddl}"]
    return words + (["--json", wanted.json] if wanted.json else [])
