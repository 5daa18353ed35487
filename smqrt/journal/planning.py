"""Plans: the files that hold a range of rows, Parquet below a node's `compacted_through`, segments above it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import NamedTuple

from smqrt.journal.filters import Filter, WantedTopics
from smqrt.journal.manifest import DataFile, Manifest, ManifestPage, files_between
from smqrt.journal.segment import INDEX, TIMES, BatchEntry, check, parse_index, result_ranges

Offsets = Mapping[str, int]
"""By node, the number of the next row: the start of a range, or its end (exclusive)."""
Times = tuple[int, int]
"""Earliest and latest microsecond that is wanted."""
WAL, PARQUET = "wal", "parquet"


class Chunk(NamedTuple):
    """A piece of one file: rows first_seq + skip up to but not including first_seq + skip + rows of its node.

    Attributes:
        file: its path in the journal.
        kind: "wal" or "parquet".
        offset, length: where the batches are in a segment, bytes; of a Parquet file 0 and its whole length.
        skip: how many rows of the first batch come before.
        rows: how many are wanted.
        node: who wrote them.
        first_seq: number of the first row of the first batch.
        footer_crc32: of a Parquet file; None when it is not known.
        share_bytes: of a Parquet file, about how much of it the rows are.
    """

    file: str
    kind: str
    offset: int
    length: int
    skip: int
    rows: int
    node: str
    first_seq: int
    footer_crc32: int | None = None
    share_bytes: int = 0

    @property
    def start(self) -> int:
        """The number of the first row that is wanted."""
        return self.first_seq + self.skip

    @property
    def end(self) -> int:
        """The number after the last row that is wanted."""
        return self.start + self.rows


class SealedSegment(NamedTuple):
    """A segment with rows that doesn't grow any more: a plan of all of it needn't look at its index.

    Attributes:
        end: the number after its last row; without holes before it.
        size_bytes: how long it is.
        ts_min_us, ts_max_us: its earliest and latest time, microseconds UTC.
    """

    end: int
    size_bytes: int
    ts_min_us: int
    ts_max_us: int


class JournalSnapshot(NamedTuple):
    """What a journal has at a moment.

    Attributes:
        wal: by node, the first numbers of its segments, ascending. Looked at before the manifest: what is compacted
            meanwhile is in both, never in neither.
        manifest: what is Parquet.
    """

    wal: dict[str, list[int]]
    manifest: Manifest

    def nodes(self) -> list[str]:
        """Return the names of all nodes, in order."""
        return sorted({*self.wal, *self.manifest.nodes})

    def begin(self, node: str) -> int | None:
        """Return the oldest number there is; None when there are no rows."""
        through, compacted = self.manifest.nodes.get(node, 0), self.manifest.first(node)
        found = [max(first, through) for first in self.wal.get(node, [])[:1]]
        return min(found + ([] if compacted is None else [compacted]), default=None)

    def segments(self, node: str, start: int, end: int) -> list[int]:
        """Return the first numbers of the segments that may have rows of a range."""
        firsts = self.wal.get(node, [])
        oldest = max(0, bisect_right(firsts, start) - 1)
        return [first for first in firsts[oldest:] if first < end]


class SegmentIndex:
    """The index of a segment, looked at by row number.

    Args:
        data: the whole records.
        path: for messages.
    """

    def __init__(self, data: bytes | memoryview, path: str) -> None:
        self._data, self._path = data, path
        self.count = len(data) // INDEX.size

    @property
    def size_bytes(self) -> int:
        """How long it is."""
        return self.count * INDEX.size

    @property
    def end(self) -> int:
        """The number after its last row; 0 when it has none."""
        return self.entry(self.count - 1).next_seq if self.count else 0

    def entry(self, at: int) -> BatchEntry:
        """Return one record."""
        return BatchEntry(*INDEX.unpack_from(self._data, at * INDEX.size))

    def at(self, seq: int) -> int:
        """Return which record has a row, or would."""
        firsts = range(self.count)
        if not self.count or seq <= self.entry(0).first_seq:  # as in most segments of a long range
            return 0
        if seq >= self.entry(self.count - 1).first_seq:
            return self.count - 1
        return max(0, bisect_right(firsts, seq, key=lambda at: self.entry(at).first_seq) - 1)

    def between(self, start: int, end: int) -> list[BatchEntry]:
        """Return the batches that have rows of a range.

        Raises:
            JournalError: they don't follow each other.
        """
        found = self._range(start, end)
        entries = parse_index(self._records(found))
        check(entries, self._path, found.start * INDEX.size)
        return entries

    def runs(self, start: int, end: int, ts_us: Times | None) -> Iterator[tuple[BatchEntry, BatchEntry]]:
        """Yield (first, last) of batches that follow each other and have rows of a range."""
        found = self._range(start, end)
        for run in filter(None, [found] if ts_us is None else self._meeting(found, ts_us)):
            yield self.entry(run[0]), self.entry(run[-1])

    def results(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the batches that have rows of a range and were published by pipelines, as `index.results`."""
        return result_ranges(self._records(self._range(start, end)))

    def _range(self, start: int, end: int) -> range:
        """Return which records have rows of a range of numbers."""
        first = self.at(start)
        last = bisect_left(range(self.count), end, first, key=lambda at: self.entry(at).first_seq)
        return range(first + (first < last and self.entry(first).next_seq <= start), last)

    def _meeting(self, some: range, ts_us: Times) -> Iterator[list[int]]:
        """Yield those of some records that have rows of a time, in lists of such that follow each other."""
        times = TIMES.iter_unpack(self._records(some))
        wanted = [at for at, both in zip(some, times, strict=True) if _meet(both, ts_us)]
        for _, run in groupby(enumerate(wanted), lambda pair: pair[1] - pair[0]):
            yield [at for _, at in run]

    def _records(self, some: range) -> memoryview:
        return memoryview(self._data)[some.start * INDEX.size : some.stop * INDEX.size]


class Planner:
    """Plans reads of one snapshot.

    Args:
        snapshot: what there is.
        index: gives the index of (node, first number of a segment).
        sealed: says what it holds as a whole; None when its index has to say.
    """

    def __init__(
        self,
        snapshot: JournalSnapshot,
        index: Callable[[str, int], SegmentIndex],
        sealed: Callable[[str, int], SealedSegment | None],
    ) -> None:
        self._snapshot, self._index, self._sealed = snapshot, index, sealed

    def chunks(self, start: Offsets, end: Offsets, ts_us: Times | None, topics: Filter | None) -> Iterator[Chunk]:
        """Yield the chunks of a range, node by node, each node's in the order of its numbers."""
        for node, last in sorted(end.items()):
            first, through = start.get(node, 0), self._snapshot.manifest.nodes.get(node, 0)
            yield from self._parquet(node, first, last, ts_us, topics)
            yield from self._segments(node, max(first, through), last, ts_us)

    def rows(self, node: str, start: int, end: int) -> int:
        """Return how many rows of a node there are in a range."""
        count = 0
        for page in self._snapshot.manifest.pages(node):
            if start <= page.first and page.last < end:
                count += page.rows
            elif page.last >= start and page.first < end:
                some = files_between(self._snapshot.manifest.read_page(page), start, end)
                count += sum(min(end, file.last + 1) - max(start, file.first) for file in some)
        through = self._snapshot.manifest.nodes.get(node, 0)
        return count + sum(chunk.rows for chunk in self._segments(node, max(start, through), end, None))

    def files(self, node: str, start: int, end: int, ts_us: Times | None, topics: Filter | None) -> Iterator[DataFile]:
        """Yield the compacted files of a node that may have rows of a range, in the order of their numbers."""
        names = WantedTopics.of(topics)
        for file in self._snapshot.manifest.files(node, start, end, lambda page: _overlaps(page, ts_us)):
            is_inside = max(start, file.first) < min(end, file.last + 1)
            if is_inside and _overlaps(file, ts_us) and _may_have(file, topics, names):
                yield file

    def _parquet(self, node: str, start: int, end: int, ts_us: Times | None, topics: Filter | None) -> Iterator[Chunk]:
        for file in self.files(node, start, end, ts_us, topics):
            first, last = max(start, file.first), min(end, file.last + 1)
            share = file.bytes * (last - first) // (file.last + 1 - file.first)
            yield Chunk(file.path, PARQUET, 0, file.bytes, 0, last - first, node, first, file.footer_crc32, share)

    def _segments(self, node: str, start: int, end: int, ts_us: Times | None) -> Iterator[Chunk]:
        for first in self._snapshot.segments(node, start, end) if start < end else ():
            sealed, file = self._sealed(node, first), segment_file(node, first)
            if sealed and not _overlaps(sealed, ts_us):
                continue
            if sealed and start <= first and sealed.end <= end and _lies_within(sealed, ts_us):
                yield Chunk(file, WAL, 0, sealed.size_bytes, 0, sealed.end - first, node, first)
                continue
            for oldest, newest in self._index(node, first).runs(start, end, ts_us):
                skip = max(0, start - oldest.first_seq)
                rows = min(end, newest.next_seq) - oldest.first_seq - skip
                yield Chunk(file, WAL, oldest.offset, newest.end - oldest.offset, skip, rows, node, oldest.first_seq)


def segment_file(node: str, first: int) -> str:
    """Return the path of a segment in the journal."""
    return f"wal/{node}/{first:020d}.arrows"


def _overlaps(times: SealedSegment | DataFile | ManifestPage, wanted: Times | None) -> bool:
    return wanted is None or _meet((times.ts_min_us, times.ts_max_us), wanted)


def _lies_within(times: SealedSegment, wanted: Times | None) -> bool:
    return wanted is None or (wanted[0] <= times.ts_min_us and times.ts_max_us <= wanted[1])


def _meet(times: Times, wanted: Times) -> bool:
    return times[0] <= wanted[1] and times[1] >= wanted[0]


def _may_have(file: DataFile, topics: Filter | None, names: WantedTopics | None) -> bool:
    if topics is None:
        return True
    if file.topics is not None:
        return any(map(topics.matches, file.topics))
    return file.topic_filter is None or names is None or names.may_be_in(file.topic_filter)


def parts(chunks: Iterable[Chunk], max_rows: int) -> list[list[Chunk]]:
    """Return the chunks in lists of `max_rows` rows; the last one may have fewer.

    Raises:
        ValueError: `max_rows` is less than 1.
    """
    if max_rows < 1:
        raise ValueError(f"max_rows is {max_rows}; it's at least 1")
    found: list[list[Chunk]] = []
    room = 0
    for chunk in chunks:
        while chunk.rows:
            if not room:
                found.append([])
                room = max_rows
            rows = min(room, chunk.rows)
            found[-1].append(chunk._replace(rows=rows))
            chunk = chunk._replace(skip=chunk.skip + rows, rows=chunk.rows - rows)
            room -= rows
    return found
