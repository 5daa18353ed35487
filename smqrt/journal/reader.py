"""Reader of a journal: one sequence of rows per node, from segments and Parquet files."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from smqrt.errors import JournalError
from smqrt.journal import numbers, planning
from smqrt.journal.filters import Filter
from smqrt.journal.manifest import DataFile
from smqrt.journal.planning import WAL, Chunk, JournalSnapshot, Offsets, Planner, Times
from smqrt.journal.record import Row
from smqrt.journal.segment import REMEDY
from smqrt.journal.storage import BATCH_ROWS, ChunkReader, FolderFiles, JournalFiles

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["BATCH_ROWS", "Chunk", "Journal", "Offsets"]

_NEWEST = -1
_POLL_S = 0.1
_MAX_INDEX_BYTES = 16 << 20
"""How much of the indexes is searched for batches that pipelines have published."""

T = TypeVar("T")
Topics = Filter | Sequence[str] | None
"""Topics to read: a filter, or its patterns; None for every row, also those to one client."""


class Journal:
    """A journal in a folder. A hub may write it meanwhile.

    Rows are found by number: a range means the same rows before and after compaction. Objects can be pickled.

    Args:
        path: the folder.
        verify: compare what is read from segments with their checksums.

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
        """Return as `end`, once there are rows after `after`, or when the time is over.

        Args:
            after: by node, the number of the next row so far.
            timeout_s: how long to wait at most, seconds; a hub may answer earlier.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            end = self.end()
            if time.monotonic() >= deadline or any(last > after.get(node, -1) for node, last in end.items()):
                return end
            time.sleep(_POLL_S)  # the writer may be another process, which can't notify

    def begin(self, seen: Offsets | None = None) -> dict[str, int]:
        """Return, by node, the number of the oldest row; without rows, that of the next one.

        Args:
            seen: by node, the position of a reader. It is returned instead when the reader misses no row, since only a
                gap in the numbers lies between, as after a crash.
        """
        snapshot, seen = self._files.snapshot(), seen or {}
        found = {node: self._begin(snapshot, node) for node in snapshot.nodes()}
        before = [node for node, seq in seen.items() if seq < found.get(node, 0)]
        return found | {
            node: seen[node] for node in before if numbers.skip_gap(seen[node], self._files.gaps(node)) == found[node]
        }

    def _begin(self, snapshot: JournalSnapshot, node: str) -> int:
        first = snapshot.begin(node)
        return self._files.end(snapshot, node) if first is None else first

    def count(self, start: Offsets, end: Offsets) -> int:
        """Return how many rows there are from `start` up to but not including `end`; see `row_counter`."""
        return self.row_counter()(start, end)

    def row_counter(self) -> Callable[[Offsets, Offsets], int]:
        """Return a function that counts the rows between two offsets at present.

        It reads the journal only once, and only for a range that may have a gap in its numbers, as after a crash.
        """
        planners: list[Planner] = []

        def rows(node: str, first: int, last: int) -> int:
            if not numbers.may_have_gap(first, last):
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

    def behind_gaps(self, start: Offsets, end: Offsets) -> dict[str, int]:
        """Return, by node, the number of the first row from `start` on, or `end` if there is none before."""
        gaps = {node: last for node, last in end.items() if numbers.may_have_gap(start.get(node, 0), last)}

        def first_rows() -> dict[str, int]:
            planner, found = self._planner(self._files.snapshot()), dict(gaps)
            for node, last in gaps.items():
                for chunk in planner.chunks({node: start.get(node, 0)}, {node: last}, None, None):
                    found[node] = chunk.start
                    break  # the first chunk begins with the first row
            return found

        return dict(start) | (self._retry(first_rows) if gaps else {})

    def offsets_at(self, ts_us: int) -> dict[str, int]:
        """Return, by node, the number of the first row at or after a time; that of the next row if there is none.

        Args:
            ts_us: microseconds since 1970, UTC.
        """
        snapshot = self._files.snapshot()
        return {node: self._offset_at(snapshot, node, ts_us) for node in snapshot.nodes()}

    def _offset_at(self, snapshot: JournalSnapshot, node: str, ts_us: int) -> int:
        end = self._files.end(snapshot, node)
        start = self._begin(snapshot, node)
        for chunk in self._planner(snapshot).chunks({node: start}, {node: end}, (ts_us, 1 << 62), None):
            for row in self.rows_of(chunk):  # a chunk only may have such rows: its batches are not cut by time
                if row.ts_us >= ts_us:
                    return row.seq
        return end

    def offsets_until(self, ts_us: int) -> dict[str, int]:
        """Return, by node, the number after the last row before a time.

        It differs from `offsets_at` when the hub's clock was set back, so that earlier times follow later ones.

        Args:
            ts_us: microseconds since 1970, UTC.
        """
        snapshot = self._files.snapshot()
        return {node: self._offset_until(snapshot, node, ts_us) for node in snapshot.nodes()}

    def _offset_until(self, snapshot: JournalSnapshot, node: str, ts_us: int) -> int:
        first, end = self._offset_at(snapshot, node, ts_us), self._files.end(snapshot, node)
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
            start, end: by node. A node that `start` doesn't name begins with its first row; one that `end` doesn't
                name is left out.
            max_rows: most rows of a task.
            ts_us: (earliest, latest) microsecond. Files and batches without such rows are left out; others are not cut.
            topics: files that list their topics, and have none of these, are left out.

        Returns:
            Lists of chunks for `tables` or `rows_of`, here or in another process.
        """

        def tasks() -> list[list[Chunk]]:
            chunks = self._planner(self._files.snapshot()).chunks(start, end, ts_us, _filter(topics))
            return planning.parts(chunks, max_rows)

        return self._retry(tasks)

    def compacted(self, start: Offsets, end: Offsets, topics: Topics = None) -> tuple[list[DataFile], dict[str, int]]:
        """Return the compacted files with rows from `start` up to but not including `end`, and where other rows begin.

        Args:
            start, end, topics: as for `plan`.

        Returns:
            The files, node by node, each node's in order; and by node, where the rows begin that are in no file.
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
        """Yield the rows of a range, node by node, each node's in order.

        Needs pyarrow for compacted rows only.

        Args:
            start, end, topics: as for `plan`, but rows with other topics are left out.
        """
        for part in self.plan(start, end, topics=topics):
            for chunk in part:
                yield from self.rows_of(chunk, topics)

    def rows_of(self, chunk: Chunk, topics: Topics = None) -> Iterator[Row]:
        """Yield the rows of a chunk."""
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
        self, chunk: Chunk, read: Callable[[Chunk], Iterator[tuple[int, T]]], again: bool = True
    ) -> Iterator[tuple[int, T]]:
        """Yield as `read(chunk)`, and continue in other files when the chunk's file is missing.

        With `again` the same file is tried once more, since the journal's folder may have been moved for a moment.
        """
        seq = chunk.start
        try:
            for seq, found in read(chunk):
                yield seq, found
            if chunk.kind == WAL and seq != chunk.end:
                raise self._reader.damaged(
                    chunk.file, chunk.offset, f"the rows from {seq} on are not where the index says"
                )
            return
        except FileNotFoundError:
            others = [other for part in self.plan({chunk.node: seq}, {chunk.node: chunk.end}) for other in part]
        same = chunk.file in (other.file for other in others)
        if (same and not again) or sum(other.rows for other in others) < chunk.end - seq:
            raise JournalError(
                f"Rows {seq} to {chunk.end - 1} of node {chunk.node} are gone from {self._files.location(chunk.file)}: "
                "they have expired; keep more (journal.retain, journal.max_bytes), or read from `journal.begin()` on."
            )
        for other in others:
            yield from self._read(other, read, again and not same)


def _filter(topics: Topics) -> Filter | None:
    return topics if topics is None or isinstance(topics, Filter) else Filter(topics)
