"""Reader of a journal: one sequence of rows per node."""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol, TypeVar

from smqrt.errors import JournalError
from smqrt.journal import arrow, manifest, parquet_files, planning, segment, tables
from smqrt.journal.files import IS_MISSING, Unreachable, crc32, existing_folder
from smqrt.journal.manifest import DataFile
from smqrt.journal.planning import (
    PARQUET,
    WAL,
    Chunk,
    Filter,
    JournalSnapshot,
    Offsets,
    Planner,
    SealedSegment,
    SegmentIndex,
    Times,
    segment_file,
)
from smqrt.journal.record import Row
from smqrt.journal.segment import DATA, INDEXED, REMEDY, BatchEntry

if TYPE_CHECKING:
    import pyarrow as pa


# ---- Journal files and their rows
#
# A reader uses a journal's storage through `JournalFiles`: `FolderFiles` here, `HubFiles` in `remote`. `ChunkReader`
# reads rows and Arrow batches from either.

BATCH_ROWS = 1 << 14
_SCHEMA_BYTES = 8192  # longer than any schema of a segment
_NEWEST = -1  # position of the newest segment in a list


class JournalFiles(Protocol):
    """Access to the files of a journal."""

    def location(self, file: str) -> str:
        """Return the full path or address of a file, for messages."""

    def snapshot(self) -> JournalSnapshot:
        """Return the current segments and the manifest. Raises JournalError when they can't be read."""

    def gaps(self, node: str) -> list[tuple[int, int]]:
        """Return the gaps in the numbers of a node; see `segment.gaps`."""

    def end(self, snapshot: JournalSnapshot, node: str) -> int:
        """Return the number of the next row of a node."""

    def index(self, node: str, first: int, newest: bool = False, until: int = 0) -> SegmentIndex:
        """Return the index of a segment.

        Args:
            node, first: the segment.
            newest: the index of the newest segment may be missing.
            until: rows before this number are enough; 0 for all.

        Raises:
            FileNotFoundError: the segment does not exist any more.
        """

    def sealed(self, node: str, first: int) -> SealedSegment | None:
        """Return the range and times of a sealed segment; None when its index is needed.

        Raises:
            FileNotFoundError: the segment does not exist any more.
        """

    def read(self, file: str, offset: int, length: int, head: bytes = b"") -> memoryview:
        """Return `head` and a part of a file; less when the file is shorter.

        Raises:
            FileNotFoundError: the file does not exist any more.
        """

    def open_parquet(self, chunk: Chunk) -> IO[bytes]:
        """Open the Parquet file of a chunk.

        Raises:
            FileNotFoundError: the file does not exist any more.
        """


class FolderFiles:
    """The files of a journal in a folder; see `JournalFiles`.

    Args:
        path: the journal's folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def location(self, file: str) -> str:
        """See `JournalFiles`."""
        return str(self._path / file)

    def snapshot(self) -> JournalSnapshot:
        """See `JournalFiles`."""
        try:
            with existing_folder(self._path):
                # Segments before the manifest: rows that are compacted meanwhile are in both.
                wal = {folder.name: segment.firsts(folder) for folder in segment.node_folders(self._path)}
                return JournalSnapshot(wal, manifest.load(self._path))
        except FileNotFoundError:
            raise Unreachable(f"{self._path} {IS_MISSING}") from None

    def gaps(self, node: str) -> list[tuple[int, int]]:
        """See `JournalFiles`."""
        return segment.gaps(self._path / WAL / node)

    def end(self, snapshot: JournalSnapshot, node: str) -> int:
        """See `JournalFiles`."""
        end = snapshot.manifest.nodes.get(node, 0)
        for first in snapshot.wal.get(node, [])[_NEWEST:]:
            end = max(end, first, self.index(node, first, newest=True).end)
        return end

    def index(self, node: str, first: int, newest: bool = False, until: int = 0) -> SegmentIndex:
        """See `JournalFiles`."""
        path = (self._path / segment_file(node, first)).with_suffix(INDEXED)
        try:
            with path.open("rb") as opened:  # mapped, so that the disk reads only the used part
                size = os.fstat(opened.fileno()).st_size
                data = mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_READ) if size else b""
            return SegmentIndex(memoryview(data), str(path))
        except FileNotFoundError:
            if newest and path.with_suffix(DATA).exists():
                return SegmentIndex(b"", str(path))
            raise

    def sealed(self, node: str, first: int) -> SealedSegment | None:
        """See `JournalFiles`."""
        path = f"{self._path}/{segment_file(node, first)}"
        found = segment.summary_of(path)
        if not found.is_dense:
            return None
        return SealedSegment(found.end, os.stat(path).st_size, found.ts_min_us, found.ts_max_us)

    def read(self, file: str, offset: int, length: int, head: bytes = b"") -> memoryview:
        """See `JournalFiles`. To avoid a copy, `head` overwrites the bytes before the part in a private mapping."""
        with (self._path / file).open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if size <= offset:
                return memoryview(head)
            mapped = mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY if head else mmap.ACCESS_READ)
        if offset < len(head):
            return memoryview(head + mapped[offset : offset + length])
        if head:
            mapped[offset - len(head) : offset] = head
        return memoryview(mapped)[offset - len(head) : offset + length]

    def open_parquet(self, chunk: Chunk) -> IO[bytes]:
        """See `JournalFiles`."""
        return parquet_files.compacted_path(self._path, chunk.file).open("rb")


class ChunkReader:
    """Reads the rows of chunks.

    Args:
        files: the files of the journal.
        verify: compare batches of segments with their checksums.

    Attributes:
        verify: as given.
    """

    def __init__(self, files: JournalFiles, verify: bool) -> None:
        self._files, self.verify = files, verify
        self._schemas: dict[tuple[str, int], tuple[str, int]] = {}

    def rows(self, chunk: Chunk, topics: Filter | None) -> Iterator[tuple[int, Iterable[Row]]]:
        """Yield (number after the last row, rows) of a chunk.

        Args:
            chunk: the chunk.
            topics: topics of the wanted rows; None for all rows, also those without a topic.

        Raises:
            JournalError: the rows are damaged.
            FileNotFoundError: the file does not exist any more.
        """
        if chunk.kind == PARQUET:
            names = [name for name in tables.NAMES if name not in ("node", "broker")]
            for seq, batch in self.tables(chunk, None, topics, BATCH_ROWS):
                columns = {name: batch.column(name) for name in names}
                columns["ts"] = columns["ts"].cast("int64")  # microseconds: `to_pylist` would return datetimes
                yield seq, map(Row._make, zip(*(column.to_pylist() for column in columns.values()), strict=True))
            return
        entries = self._entries(chunk)
        data = self._files.read(chunk.file, entries[0].offset, entries[-1].end - entries[0].offset)
        for entry, batch in self._checked_batches(chunk.file, entries, data):
            rows = arrow.decode(batch)[max(0, chunk.start - entry.first_seq) :]
            kept = [row for row in rows if row.seq < chunk.end]
            seq = min(chunk.end, rows[-1].seq + 1) if rows else chunk.start
            if topics is not None:
                kept = [row for row in kept if row.topic is not None and topics.matches(row.topic)]
            yield seq, kept

    def tables(
        self, chunk: Chunk, columns: Sequence[str] | None, topics: Filter | None, batch_rows: int
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield (number after the last row, RecordBatch) of a chunk.

        Arguments as for `Journal.tables`; raises as `rows`.
        """
        import pyarrow as pa

        try:
            if chunk.kind == WAL:
                broker, format_ = self._schema(chunk.node, int(Path(chunk.file).stem))
                entries, head = self._entries(chunk), arrow.schema_message(chunk.node, broker, format_)
                length = entries[-1].end - entries[0].offset
                stream = self._files.read(chunk.file, entries[0].offset, length, head)
                if self.verify or len(stream) < len(head) + length:
                    for _ in self._checked_batches(chunk.file, entries, stream[len(head) :]):
                        pass
                skip = max(0, chunk.start - entries[0].first_seq)
                yield from tables.of_segment(stream, chunk, broker, skip, columns, topics, batch_rows)
            else:
                yield from tables.of_parquet(self._files.open_parquet(chunk), chunk, columns, topics, batch_rows)
        except (pa.ArrowException, OSError, ValueError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise self.damaged(chunk.file, chunk.offset, str(error)) from error

    def damaged(self, file: str, offset: int, what: str) -> JournalError:
        """Return the error for a damaged file."""
        return JournalError(f"{self._files.location(file)} is damaged at offset {offset}: {what}; {REMEDY}.")

    def _entries(self, chunk: Chunk) -> list[BatchEntry]:
        first = int(Path(chunk.file).stem)
        entries = self._files.index(chunk.node, first, until=chunk.end).between(chunk.start, chunk.end)
        if not entries or entries[0].first_seq > chunk.start or entries[-1].next_seq < chunk.end:
            raise self.damaged(chunk.file, chunk.offset, "the index no longer has the rows")
        return entries

    def _checked_batches(
        self, file: str, entries: Sequence[BatchEntry], data: memoryview
    ) -> Iterator[tuple[BatchEntry, memoryview]]:
        for entry in entries:
            at = entry.offset - entries[0].offset
            batch = data[at : at + entry.length]
            if len(batch) < entry.length:
                raise self.damaged(file, entry.offset, f"the batch has {len(batch)} of its {entry.length} bytes")
            if self.verify and crc32(batch) != entry.crc32:
                raise self.damaged(file, entry.offset, "the batch's checksum is wrong")
            yield entry, batch

    def _schema(self, node: str, first: int) -> tuple[str, int]:
        """Return the broker's name in the schema of a segment, and its format."""
        key = node, first
        if key not in self._schemas:
            file = segment_file(node, first)
            try:
                head = bytes(self._files.read(file, 0, _SCHEMA_BYTES))
                found = arrow.schema_metadata(head)
                self._schemas[key] = found["broker"], int(found.get("format", 1))
            except (ValueError, KeyError, struct.error) as error:
                raise self.damaged(file, 0, f"it doesn't begin with a journal schema ({error})") from None
        return self._schemas[key]


__all__ = ["BATCH_ROWS", "Chunk", "Journal", "Offsets"]

_POLL_S = 0.1
_MAX_INDEX_BYTES = 16 << 20
"""Maximum size of the indexes that are searched for batches of pipelines, bytes."""

T = TypeVar("T")
Topics = Filter | Sequence[str] | None
"""Topics to read: a filter, or its patterns; None for all rows, also messages to one client."""


class Journal:
    """A journal in a folder. A hub may write to it at the same time.

    Rows are found by number: a range means the same rows before and after compaction. Objects can be pickled.

    Args:
        path: the folder.
        verify: compare batches of segments with their checksums.

    Raises:
        JournalError: there is no such folder.
    """

    def __init__(self, path: Path | str, verify: bool = True) -> None:
        self.path = Path(path)
        self._files: JournalFiles = FolderFiles(self.path)
        self._reader = ChunkReader(self._files, verify)
        if not self.path.is_dir():
            raise JournalError(
                f"{self.path} is not the folder of a journal: create the hub with journal=True, or name the folder "
                "that it writes to."
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    @property
    def verify(self) -> bool:
        """Whether batches of segments are compared with their checksums."""
        return self._reader.verify

    @verify.setter
    def verify(self, verify: bool) -> None:
        self._reader.verify = verify

    # ---- where rows are

    def nodes(self) -> list[str]:
        """Return the names of the nodes that have written to the journal.

        Raises:
            JournalError: the journal can't be read; all methods raise this.
        """
        return self._files.snapshot().nodes()

    def end(self, known: Collection[str] = ()) -> dict[str, int]:
        """Return, by node, the number that the next row will have.

        Args:
            known: nodes that are left out.
        """

        def ends() -> dict[str, int]:
            snapshot = self._files.snapshot()
            return {node: self._files.end(snapshot, node) for node in snapshot.nodes() if node not in known}

        return self._retry(ends)

    def wait(self, after: Offsets, timeout_s: float) -> dict[str, int]:
        """Return the same as `end`, once there are rows after `after`, or after `timeout_s`.

        Args:
            after: by node, the number of the next row so far.
            timeout_s: the longest wait, seconds; a hub may answer earlier.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            end = self.end()
            if time.monotonic() >= deadline or any(last > after.get(node, -1) for node, last in end.items()):
                return end
            time.sleep(_POLL_S)  # the writer may be another process, which can't notify

    def begin(self, seen: Offsets | None = None) -> dict[str, int]:
        """Return, by node, the number of the oldest row; without rows, that of the next row.

        Args:
            seen: by node, the position of a reader. It is returned instead when only a gap in the numbers lies between,
                as after a crash, so that the reader misses no row.
        """
        snapshot, seen = self._files.snapshot(), seen or {}
        found = {node: self._begin(snapshot, node) for node in snapshot.nodes()}
        before = [node for node, seq in seen.items() if seq < found.get(node, 0)]
        return found | {
            node: seen[node] for node in before if segment.skip_gap(seen[node], self._files.gaps(node)) == found[node]
        }

    def _begin(self, snapshot: JournalSnapshot, node: str) -> int:
        first = snapshot.begin(node)
        return self._files.end(snapshot, node) if first is None else first

    def count(self, start: Offsets, end: Offsets) -> int:
        """Return how many rows there are from `start` up to but not including `end`; see `row_counter`."""
        return self.row_counter()(start, end)

    def row_counter(self) -> Callable[[Offsets, Offsets], int]:
        """Return a function that counts the rows that are now between two offsets.

        It reads the journal once, and only for a range that may have a gap in its numbers, as after a crash.
        """
        planners: list[Planner] = []

        def rows(node: str, first: int, last: int) -> int:
            if not segment.may_have_gap(first, last):
                return max(0, last - first)
            if not planners:
                planners.append(self._planner(self._files.snapshot()))
            return planners[0].rows(node, first, last)

        return lambda start, end: self._retry(
            lambda: sum(rows(node, start.get(node, 0), last) for node, last in end.items())
        )

    def result_batches(self, node: str, start: int, end: int) -> list[tuple[int, int]]:
        """Return the ranges of rows that pipelines have published: (first number, number after the last), ascending.

        Only ranges from `start` up to but not including `end` are returned, as far as the newest indexes contain them.
        """

        def ranges() -> list[tuple[int, int]]:
            snapshot, searched_bytes = self._files.snapshot(), 0
            found: list[list[tuple[int, int]]] = []
            for first in reversed(snapshot.segments(node, start, end)):
                if searched_bytes >= _MAX_INDEX_BYTES:
                    break
                index = self._files.index(node, first, newest=first == snapshot.wal[node][_NEWEST])
                searched_bytes += index.size_bytes
                found.append([(max(start, one), min(end, last)) for one, last in index.results(start, end)])
            return [one for some in reversed(found) for one in some]

        return self._retry(ranges)

    def after_gaps(self, start: Offsets, end: Offsets) -> dict[str, int]:
        """Return, by node, the number of the first row from `start` on; `end` without a row before it."""
        gaps = {node: last for node, last in end.items() if segment.may_have_gap(start.get(node, 0), last)}

        def first_rows() -> dict[str, int]:
            planner, found = self._planner(self._files.snapshot()), dict(gaps)
            for node, last in gaps.items():
                for chunk in planner.chunks({node: start.get(node, 0)}, {node: last}, None, None):
                    found[node] = chunk.start
                    break  # the first chunk begins with the first row
            return found

        return dict(start) | (self._retry(first_rows) if gaps else {})

    def offsets_at(self, ts_us: int) -> dict[str, int]:
        """Return, by node, the number of the first row at or after a time; without one, that of the next row.

        Args:
            ts_us: microseconds since 1970, UTC.
        """
        snapshot = self._files.snapshot()
        return {node: self._offset_at(snapshot, node, ts_us) for node in snapshot.nodes()}

    def _offset_at(self, snapshot: JournalSnapshot, node: str, ts_us: int) -> int:
        end = self._files.end(snapshot, node)
        start = self._begin(snapshot, node)
        for chunk in self._planner(snapshot).chunks({node: start}, {node: end}, (ts_us, 1 << 62), None):
            for row in self.rows_of(chunk):  # the plan chooses batches, which also have rows of other times
                if row.ts_us >= ts_us:
                    return row.seq
        return end

    def offsets_until(self, ts_us: int) -> dict[str, int]:
        """Return, by node, the number after the last row before a time.

        It differs from `offsets_at` when the hub's clock was set back, so that earlier times follow later ones.

        Args:
            ts_us: microseconds since 1970, UTC.
        """
        snapshot, found = self._files.snapshot(), {}
        for node in snapshot.nodes():
            found[node] = first = self._offset_at(snapshot, node, ts_us)
            end = self._files.end(snapshot, node)
            chunks = self._planner(snapshot).chunks({node: first}, {node: end}, (-(1 << 62), ts_us - 1), None)
            for chunk in reversed(list(chunks)):
                if earlier := [row.seq for row in self.rows_of(chunk) if row.ts_us < ts_us]:
                    found[node] = earlier[-1] + 1
                    break
        return found

    def plan(
        self,
        start: Offsets,
        end: Offsets,
        *,
        max_rows: int = 1 << 19,
        ts_us: Times | None = None,
        topics: Topics = None,
    ) -> list[list[Chunk]]:
        """Return the chunks with the rows from `start` up to but not including `end`, in tasks of `max_rows` rows.

        Args:
            start, end: by node. A node that `start` lacks begins with its first row. A node that `end` lacks is left
                out.
            max_rows: maximum number of rows of a task.
            ts_us: (earliest, latest) microsecond. Files and batches without rows of this time are left out; others are
                complete.
            topics: files that list their topics, and have none of these, are left out.

        Returns:
            Lists of chunks for `tables` or `rows_of`, here or in another process.
        """

        def tasks() -> list[list[Chunk]]:
            chunks = self._planner(self._files.snapshot()).chunks(start, end, ts_us, _filter(topics))
            return planning.parts(chunks, max_rows)

        return self._retry(tasks)

    def compacted(self, start: Offsets, end: Offsets, topics: Topics = None) -> tuple[list[DataFile], dict[str, int]]:
        """Return the compacted files with rows from `start` up to but not including `end`, and the start of other rows.

        Args:
            start, end, topics: as for `plan`.

        Returns:
            The files, node by node, each node's in order; and by node, the number of the first row that is in no file.
        """

        def compacted_files() -> tuple[list[DataFile], dict[str, int]]:
            snapshot = self._files.snapshot()
            planner, through = self._planner(snapshot), snapshot.manifest.nodes
            ranges = {node: (start.get(node, 0), last) for node, last in sorted(end.items())}
            chosen = _filter(topics)
            files = [file for node, range_ in ranges.items() for file in planner.files(node, *range_, None, chosen)]
            return files, {node: max(first, min(last, through.get(node, 0))) for node, (first, last) in ranges.items()}

        return self._retry(compacted_files)

    def _planner(self, snapshot: JournalSnapshot) -> Planner:
        newest = {node: firsts[_NEWEST] for node, firsts in snapshot.wal.items() if firsts}

        def is_newest(node: str, first: int) -> bool:
            return newest[node] == first

        return Planner(
            snapshot,
            lambda node, first: self._files.index(node, first, is_newest(node, first)),
            lambda node, first: None if is_newest(node, first) else self._files.sealed(node, first),
        )

    def _retry(self, work: Callable[[], T]) -> T:
        """Call a function again when a file is missing, since it was compacted or has expired meanwhile."""
        try:
            return work()
        except FileNotFoundError:
            pass
        try:
            return work()
        except FileNotFoundError as error:
            raise JournalError(f"{error.filename} is missing; {REMEDY}.") from None

    # ---- rows

    def rows(self, start: Offsets, end: Offsets, topics: Topics = None) -> Iterator[Row]:
        """Yield the rows of a range, node by node, each node's in order. Compacted rows need pyarrow.

        Args:
            start, end: as for `plan`.
            topics: rows with other topics are left out.
        """
        for part in self.plan(start, end, topics=topics):
            for chunk in part:
                yield from self.rows_of(chunk, topics)

    def rows_of(self, chunk: Chunk, topics: Topics = None) -> Iterator[Row]:
        """Yield the rows of a chunk.

        Args:
            chunk: a chunk of `plan`.
            topics: rows with other topics are left out.
        """
        chosen = _filter(topics)
        for _, rows in self._read(chunk, lambda part: self._reader.rows(part, chosen)):
            yield from rows

    def tables(
        self, chunk: Chunk, columns: Sequence[str] | None = None, topics: Topics = None, batch_rows: int = BATCH_ROWS
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a chunk as pyarrow.RecordBatches.

        Args:
            chunk: a chunk of `plan`.
            columns: the wanted names, in this order; None for all of `record.COLUMNS`.
            topics: rows with other topics are left out.
            batch_rows: small batches are joined until they have about this many rows.
        """
        chosen = _filter(topics)
        for _, batch in self._read(chunk, lambda part: self._reader.tables(part, columns, chosen, batch_rows)):
            if batch.num_rows:
                yield batch

    def _read(
        self, chunk: Chunk, read: Callable[[Chunk], Iterator[tuple[int, T]]], may_reread: bool = True
    ) -> Iterator[tuple[int, T]]:
        """Yield the same as `read(chunk)`, and continue in other files when the chunk's file is missing.

        With `may_reread` the same file is read once more, since the journal's folder may have been moved for a moment.
        """
        seq = chunk.start
        try:
            for seq, found in read(chunk):
                yield seq, found
            if chunk.kind == WAL and seq != chunk.end:
                raise self._reader.damaged(chunk.file, chunk.offset, f"the rows from {seq} on don't match the index")
            return
        except FileNotFoundError:
            others = [other for part in self.plan({chunk.node: seq}, {chunk.node: chunk.end}) for other in part]
        same = chunk.file in (other.file for other in others)
        if (same and not may_reread) or sum(other.rows for other in others) < chunk.end - seq:
            raise JournalError(
                f"Rows {seq} to {chunk.end - 1} of node {chunk.node} are missing from "
                f"{self._files.location(chunk.file)}: they have expired; increase journal.retain "
                "or journal.max_bytes, or read from `journal.begin()` on."
            )
        for other in others:
            yield from self._read(other, read, may_reread and not same)


def _filter(topics: Topics) -> Filter | None:
    return topics if topics is None or isinstance(topics, Filter) else Filter(topics)
