"""A journal that is read: one sequence of rows per node, wherever its files are."""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from smqrt.errors import JournalError
from smqrt.journal import arrow, manifest, numbers, parquet_files, planning, tables
from smqrt.journal import segment as index
from smqrt.journal import segment as indexes
from smqrt.journal.files import MOVED, Unreachable, crc32, there
from smqrt.journal.filters import Filter
from smqrt.journal.manifest import DataFile
from smqrt.journal.planning import (
    PARQUET,
    WAL,
    Chunk,
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

__all__ = ["Chunk", "Journal", "Offsets"]

BATCH_ROWS = 1 << 14
_SCHEMA_BYTES = 8192
_NEWEST = -1
_POLL_S = 0.1
_MAX_INDEX_BYTES = 16 << 20
"""Of indexes that are looked at to tell what pipelines have published."""

T = TypeVar("T")
Topics = Filter | Sequence[str] | None
"""Which topics: a filter, or its patterns; None for every row, also those to one client."""


class Journal:
    """A journal in a folder, while its hub writes it or when it doesn't.

    Rows are found by number: a range means the same rows before and after compaction. Objects can be pickled.

    Args:
        path: the folder.
        verify: compare what is read from segments with their checksums.

    Raises:
        JournalError: there is no such folder.
    """

    def __init__(self, path: Path | str, verify: bool = True) -> None:
        self.path = Path(path)
        self.verify = verify
        self._brokers: dict[tuple[str, int], str] = {}
        if not self.path.is_dir():
            raise JournalError(
                f"{self.path} is no folder of a journal: give the hub journal=True, or name the folder it writes to."
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    # ---- where rows are

    def nodes(self) -> list[str]:
        """Return the names of the nodes that have written to it.

        Raises:
            JournalError: it can't be read; so do all methods.
        """
        return self._snapshot().nodes()

    def end(self, known: Collection[str] = ()) -> dict[str, int]:
        """Return, by node, the number that the next row will have.

        Args:
            known: nodes that are left out.
        """
        return self._again(lambda: self._ends_on_disk(known))

    def _ends_on_disk(self, known: Collection[str]) -> dict[str, int]:
        snapshot = self._snapshot()
        return {node: self._end(snapshot, node) for node in snapshot.nodes() if node not in known}

    def wait(self, after: Offsets, timeout_s: float) -> dict[str, int]:
        """Return as `end`, when there are rows behind `after`, or when the time is over.

        Args:
            after: by node, what was the number of the next row.
            timeout_s: how long to wait at most, seconds; a hub that is asked may answer earlier.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            end = self.end()
            if time.monotonic() >= deadline or any(last > after.get(node, -1) for node, last in end.items()):
                return end
            time.sleep(_POLL_S)

    def begin(self, seen: Offsets | None = None) -> dict[str, int]:
        """Return, by node, the number of the oldest row; that of the next one when there are none.

        Args:
            seen: by node, up to where somebody has read: that number when nothing is missing for him, since no row was
                between, as after a crash.
        """
        snapshot, seen = self._snapshot(), seen or {}
        found = {node: self._begin(snapshot, node) for node in snapshot.nodes()}
        before = [node for node, seq in seen.items() if seq < found.get(node, 0)]
        return found | {
            node: seen[node] for node in before if numbers.skip_gap(seen[node], self._gaps(node)) == found[node]
        }

    def _gaps(self, node: str) -> list[tuple[int, int]]:
        return numbers.gaps(self.path / WAL / node)

    def _begin(self, snapshot: JournalSnapshot, node: str) -> int:
        first = snapshot.begin(node)
        return self._end(snapshot, node) if first is None else first

    def _end(self, snapshot: JournalSnapshot, node: str) -> int:
        end = snapshot.manifest.nodes.get(node, 0)
        for first in snapshot.wal.get(node, [])[_NEWEST:]:
            index = self._index(node, first, newest=True)
            end = max(end, first, index.end)
        return end

    def count(self, start: Offsets, end: Offsets) -> int:
        """Return how many rows there are from `start` up to but not including `end`; see `row_counter`."""
        return self.row_counter()(start, end)

    def row_counter(self) -> Callable[[Offsets, Offsets], int]:
        """Return what counts the rows between two offsets, as they are now. It looks at the journal only where numbers
        may be left out, as after a crash, and once.
        """
        planners: list[Planner] = []

        def rows(node: str, first: int, last: int) -> int:
            if not numbers.may_have_gap(first, last):
                return max(0, last - first)
            if not planners:
                planners.append(self._planner(self._snapshot()))
            return planners[0].rows(node, first, last)

        return lambda start, end: self._again(
            lambda: sum(rows(node, start.get(node, 0), last) for node, last in end.items())
        )

    def result_batches(self, node: str, start: int, end: int) -> list[tuple[int, int]]:
        """Return which rows from `start` up to but not including `end` are in batches that pipelines have published, as far
        as the newest indexes of segments say so: (first number, number after the last), ascending.
        """
        return self._again(lambda: self._result_batches(node, start, end))

    def _result_batches(self, node: str, start: int, end: int) -> list[tuple[int, int]]:
        snapshot, looked_at = self._snapshot(), 0
        found: list[list[tuple[int, int]]] = []
        for first in reversed(snapshot.segments(node, start, end)):
            if looked_at >= _MAX_INDEX_BYTES:
                break
            index = self._index(node, first, newest=first == snapshot.wal[node][_NEWEST])
            looked_at += index.size_bytes
            found.append([(max(start, one), min(end, last)) for one, last in index.results(start, end)])
        return [one for some in reversed(found) for one in some]

    def behind_gaps(self, start: Offsets, end: Offsets) -> dict[str, int]:
        """Return `start`, by node the number of the first row from there on; at most that of `end`."""
        gaps = {node: last for node, last in end.items() if numbers.may_have_gap(start.get(node, 0), last)}
        return dict(start) | (self._again(lambda: self._first_rows(start, gaps)) if gaps else {})

    def _first_rows(self, start: Offsets, end: Offsets) -> dict[str, int]:
        planner, found = self._planner(self._snapshot()), dict(end)
        for node, last in end.items():
            for chunk in planner.chunks({node: start.get(node, 0)}, {node: last}, None, None):
                found[node] = chunk.start
                break
        return found

    def offsets_at(self, ts_us: int) -> dict[str, int]:
        """Return, by node, the number of the first row at or after a time; the next one's when there is none.

        Args:
            ts_us: microseconds since 1970, UTC.
        """
        snapshot = self._snapshot()
        return {node: self._offset_at(snapshot, node, ts_us) for node in snapshot.nodes()}

    def _offset_at(self, snapshot: JournalSnapshot, node: str, ts_us: int) -> int:
        end = self._end(snapshot, node)
        start = self._begin(snapshot, node)
        for chunk in self._planner(snapshot).chunks({node: start}, {node: end}, (ts_us, 1 << 62), None):
            for row in self.rows_of(chunk):
                if row.ts_us >= ts_us:
                    return row.seq
        return end

    def offsets_until(self, ts_us: int) -> dict[str, int]:
        """Return, by node, the number after the last row before a time: that of `offsets_at`, unless the hub's clock
        was set back, so that rows before the time come behind some after it.

        Args:
            ts_us: microseconds since 1970, UTC.
        """
        snapshot = self._snapshot()
        return {node: self._offset_until(snapshot, node, ts_us) for node in snapshot.nodes()}

    def _offset_until(self, snapshot: JournalSnapshot, node: str, ts_us: int) -> int:
        first, end = self._offset_at(snapshot, node, ts_us), self._end(snapshot, node)
        chunks = self._planner(snapshot).chunks({node: first}, {node: end}, (-(1 << 62), ts_us - 1), None)
        for chunk in reversed(list(chunks)):
            if earlier := [row.seq for row in self.rows_of(chunk) if row.ts_us < ts_us]:
                return earlier[-1] + 1
        return first

    def plan(
        self,
        start: Offsets,
        end: Offsets,
        *,
        max_rows: int = 1 << 19,
        ts_us: Times | None = None,
        topics: Topics = None,
    ) -> list[list[Chunk]]:
        """Return what to read for the rows from `start` up to but not including `end`: tasks of `max_rows` rows.

        Args:
            start, end: by node; a node that `start` doesn't name begins with its first row, one that `end` doesn't
                name is left out.
            max_rows: a task has at most so many.
            ts_us: (earliest, latest) microsecond: files and batches without such rows are left out, others not cut.
            topics: files that say that they have no such topic are left out.

        Returns:
            Lists of chunks, to be given to `tables` or `rows_of`, here or in another process.
        """
        return self._again(lambda: planning.parts(self._chunks(start, end, ts_us, topics), max_rows))

    def compacted(self, start: Offsets, end: Offsets, topics: Topics = None) -> tuple[list[DataFile], dict[str, int]]:
        """Return the compacted files that have rows from `start` up to but not including `end`, and what they leave.

        Args:
            start, end, topics: as for `plan`.

        Returns:
            The files, node by node, each node's in order; and by node where the rows begin that are in no file.
        """
        return self._again(lambda: self._compacted(start, end, _filter(topics)))

    def _compacted(self, start: Offsets, end: Offsets, topics: Filter | None) -> tuple[list[DataFile], dict[str, int]]:
        snapshot = self._snapshot()
        planner, through = self._planner(snapshot), snapshot.manifest.nodes
        ranges = {node: (start.get(node, 0), last) for node, last in sorted(end.items())}
        files = [file for node, range_ in ranges.items() for file in planner.files(node, *range_, None, topics)]
        return files, {node: max(first, min(last, through.get(node, 0))) for node, (first, last) in ranges.items()}

    def _chunks(self, start: Offsets, end: Offsets, ts_us: Times | None, topics: Topics) -> Iterator[Chunk]:
        return self._planner(self._snapshot()).chunks(start, end, ts_us, _filter(topics))

    def _planner(self, snapshot: JournalSnapshot) -> Planner:
        newest = {node: firsts[_NEWEST] for node, firsts in snapshot.wal.items() if firsts}

        def is_newest(node: str, first: int) -> bool:
            return newest[node] == first

        return Planner(
            snapshot,
            lambda node, first: self._index(node, first, is_newest(node, first)),
            lambda node, first: None if is_newest(node, first) else self._sealed(node, first),
        )

    def _again(self, work: Callable[[], T]) -> T:
        """Do something once more when a file went meanwhile, because it was compacted or has expired."""
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
        """Yield the rows of a range, node by node, each node's in their order.

        Needs pyarrow for what is compacted only.

        Args:
            start, end, topics: as for `plan`, but no other rows come.
        """
        for part in self.plan(start, end, topics=topics):
            for chunk in part:
                yield from self.rows_of(chunk, topics)

    def rows_of(self, chunk: Chunk, topics: Topics = None) -> Iterator[Row]:
        """Yield the rows of a chunk."""
        chosen = _filter(topics)
        for _, rows in self._read(chunk, lambda part: self._part_rows(part, chosen)):
            yield from rows

    def _part_rows(self, chunk: Chunk, topics: Filter | None) -> Iterator[tuple[int, Iterable[Row]]]:
        if chunk.kind == PARQUET:
            for seq, batch in self._part_tables(chunk, None, topics, BATCH_ROWS):
                yield seq, _as_rows(batch)
            return
        for skip, data in self._batches(chunk):
            rows = arrow.decode(data)[skip:]
            kept = [row for row in rows if row.seq < chunk.end]
            seq = min(chunk.end, rows[-1].seq + 1) if rows else chunk.start
            if topics is not None:
                kept = [row for row in kept if row.topic is not None and topics.matches(row.topic)]
            yield seq, kept

    def tables(
        self, chunk: Chunk, columns: Sequence[str] | None = None, topics: Topics = None, batch_rows: int = BATCH_ROWS
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a chunk as pyarrow.RecordBatches.

        Args:
            chunk: of `plan`.
            columns: the names wanted, in this order; None for all of `record.COLUMNS`.
            topics: other rows are left out.
            batch_rows: small batches are joined until there are about so many rows.
        """
        chosen = _filter(topics)
        for _, batch in self._read(chunk, lambda part: self._part_tables(part, columns, chosen, batch_rows)):
            if batch.num_rows:
                yield batch

    def _part_tables(
        self, chunk: Chunk, columns: Sequence[str] | None, topics: Filter | None, batch_rows: int
    ) -> Iterator[tuple[int, Any]]:
        import pyarrow as pa

        try:
            if chunk.kind == WAL:
                broker = self._broker(chunk.node, int(Path(chunk.file).stem))
                skip, stream = self._stream(chunk, broker)
                yield from tables.of_segment(stream, chunk, broker, skip, columns, topics, batch_rows)
            else:
                yield from tables.of_parquet(self._parquet(chunk), chunk, columns, topics, batch_rows)
        except (pa.ArrowException, OSError, ValueError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise self._damaged(chunk.file, chunk.offset, str(error)) from error

    def _read(
        self, chunk: Chunk, read: Callable[[Chunk], Iterator[tuple[int, T]]], again: bool = True
    ) -> Iterator[tuple[int, T]]:
        """Yield what `read(chunk)` does; goes on in other files when the chunk's has gone, from where it was.

        The same file counts as another one if it is `again` there: the journal's folder was away.
        """
        seq = chunk.start
        try:
            for seq, found in read(chunk):
                yield seq, found
            if chunk.kind == WAL and seq != chunk.end:
                raise self._damaged(chunk.file, chunk.offset, f"the rows from {seq} on are not where the index says")
            return
        except FileNotFoundError:
            others = [other for part in self.plan({chunk.node: seq}, {chunk.node: chunk.end}) for other in part]
        same = chunk.file in (other.file for other in others)
        if (same and not again) or sum(other.rows for other in others) < chunk.end - seq:
            raise JournalError(
                f"Rows {seq} to {chunk.end - 1} of node {chunk.node} are gone from {self._location(chunk.file)}: they "
                "have expired; keep more (journal.retain, journal.max_bytes), or read from `journal.begin()` on."
            )
        for other in others:
            yield from self._read(other, read, again and not same)

    # ---- batches of segments

    def _batches(self, chunk: Chunk) -> Iterator[tuple[int, memoryview]]:
        """Yield (rows before the wanted ones, bytes) of a chunk's batches, checked."""
        entries = self._entries(chunk)
        data = self._bytes(chunk.file, entries[0].offset, entries[-1].end - entries[0].offset)
        for entry, batch in self._cut(chunk.file, entries, data):
            yield max(0, chunk.start - entry.first_seq), batch

    def _stream(self, chunk: Chunk, broker: str) -> tuple[int, memoryview]:
        """Return (rows before the wanted ones, schema and batches of a chunk), checked."""
        entries, head = self._entries(chunk), arrow.schema_message(chunk.node, broker)
        length = entries[-1].end - entries[0].offset
        stream = self._bytes(chunk.file, entries[0].offset, length, head)
        if self.verify or len(stream) < len(head) + length:
            for _ in self._cut(chunk.file, entries, stream[len(head) :]):
                pass
        return max(0, chunk.start - entries[0].first_seq), stream

    def _entries(self, chunk: Chunk) -> list[BatchEntry]:
        first = int(Path(chunk.file).stem)
        entries = self._index(chunk.node, first, until=chunk.end).between(chunk.start, chunk.end)
        if not entries or entries[0].first_seq > chunk.start or entries[-1].next_seq < chunk.end:
            raise self._damaged(chunk.file, chunk.offset, "the index doesn't have the rows any more")
        return entries

    def _cut(
        self, file: str, entries: Sequence[BatchEntry], data: memoryview
    ) -> Iterator[tuple[BatchEntry, memoryview]]:
        for entry in entries:
            at = entry.offset - entries[0].offset
            batch = data[at : at + entry.length]
            self._check(file, entry, batch)
            yield entry, batch

    def _check(self, file: str, entry: BatchEntry, batch: memoryview) -> None:
        if len(batch) < entry.length:
            raise self._damaged(file, entry.offset, f"the batch has {len(batch)} of its {entry.length} bytes")
        if self.verify and crc32(batch) != entry.crc32:
            raise self._damaged(file, entry.offset, "the batch's checksum is wrong")

    def _damaged(self, file: str, offset: int, what: str) -> JournalError:
        return JournalError(f"{self._location(file)} is damaged at offset {offset}: {what}; {REMEDY}.")

    # ---- files

    def _location(self, file: str) -> str:
        return str(self.path / file)

    def _snapshot(self) -> JournalSnapshot:
        try:
            with there(self.path):
                return self._listed_here()
        except FileNotFoundError:
            raise Unreachable(f"{self.path} {MOVED}") from None

    def _listed_here(self) -> JournalSnapshot:
        wal = {folder.name: indexes.firsts(folder) for folder in indexes.node_folders(self.path)}
        return JournalSnapshot(wal, manifest.load(self.path))

    def _index(self, node: str, first: int, newest: bool = False, until: int = 0) -> SegmentIndex:
        """Return the index of a segment.

        Args:
            node, first: which segment.
            newest: its file may not be there yet.
            until: rows before this number are enough, when that is known.

        Raises:
            FileNotFoundError: the segment has gone.
        """
        path = (self.path / segment_file(node, first)).with_suffix(INDEXED)
        try:
            return SegmentIndex(_mapped(path), str(path))
        except FileNotFoundError:
            if newest and path.with_suffix(DATA).exists():
                return SegmentIndex(b"", str(path))
            raise

    def _sealed(self, node: str, first: int) -> SealedSegment | None:
        """Return what a sealed segment holds; None when its index is to be looked at.

        Raises:
            FileNotFoundError: the segment has gone.
        """
        path = f"{self.path}/{segment_file(node, first)}"
        found = index.summary_of(path)
        if not found.is_dense:
            return None
        return SealedSegment(found.end, os.stat(path).st_size, found.ts_min_us, found.ts_max_us)

    def _broker(self, node: str, first: int) -> str:
        """Return the broker of a segment."""
        key = node, first
        if key not in self._brokers:
            file = segment_file(node, first)
            try:
                head = bytes(self._bytes(file, 0, _SCHEMA_BYTES))
                self._brokers[key] = arrow.schema_metadata(head)["broker"]
            except (ValueError, KeyError, struct.error) as error:
                raise self._damaged(file, 0, f"no schema of a journal is there ({error})") from None
        return self._brokers[key]

    def _bytes(self, file: str, offset: int, length: int, head: bytes = b"") -> memoryview:
        """Return a piece of a file, or as much of it as there is.

        Args:
            file: its path in the journal.
            offset, length: which piece, bytes.
            head: is put in front of it, without a copy: over what comes before it in a private mapping.

        Raises:
            FileNotFoundError: the file has gone.
        """
        with (self.path / file).open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if size <= offset:
                return memoryview(head)
            mapped = mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY if head else mmap.ACCESS_READ)
        if offset < len(head):
            return memoryview(head + mapped[offset : offset + length])
        if head:
            mapped[offset - len(head) : offset] = head
        return memoryview(mapped)[offset - len(head) : offset + length]

    def _parquet(self, chunk: Chunk) -> Any:
        """Return what pyarrow can read the Parquet file of a chunk from.

        Raises:
            FileNotFoundError: the file has gone.
        """
        return parquet_files.compacted_path(self.path, chunk.file).open("rb")


def _mapped(path: Path) -> memoryview:
    """Return an index; of a long one only what is looked at is read."""
    with path.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        return memoryview(mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_READ) if size else b"")


def _filter(topics: Topics) -> Filter | None:
    return topics if topics is None or isinstance(topics, Filter) else Filter(topics)


def _as_rows(batch: Any) -> Iterator[Row]:
    """Return the rows of a RecordBatch of all columns."""
    import pyarrow as pa

    columns = [batch.column(name) for name in tables.NAMES if name not in ("node", "broker")]
    columns[1] = columns[1].cast(pa.int64())
    return map(Row._make, zip(*(column.to_pylist() for column in columns), strict=True))
