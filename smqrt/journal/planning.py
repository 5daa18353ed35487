"""Topic filters and read plans: the files with requested rows.

Rows below a node's `compacted_through` are in Parquet files, the others in segments.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import groupby
from typing import NamedTuple

from smqrt.errors import ArgumentError
from smqrt.journal.manifest import DataFile, Manifest, ManifestPage, files_between
from smqrt.journal.segment import INDEX, TIMES, BatchEntry, check_index, parse_index, result_ranges

# ---- Topic filters and Bloom filters
#
# `+` matches one level, `#` at the end matches this level and all below. The entry of a compacted file with many topics
# has a Bloom filter of their names and parent levels instead of a list. For `site1/a/temp` it contains `site1/` and
# `site1/a/`, too, so that it can be searched for `site1/#`.

_CACHED_NAMES = 8192
MAX_BLOOM_BYTES = 8 << 10
"""Maximum size of a Bloom filter. It has one false positive in a hundred for 6,500 topics, one in two for 30,000."""
_BITS_PER_NAME = 10
_HASHES = 4
_KEPT_BLOOM_FILTERS = 256


def literal(pattern: str) -> bool:
    """Return whether a filter has no wildcard, so that it is the name of one topic."""
    return not {"+", "#"} & set(pattern.split("/"))


def check_pattern(pattern: object) -> str:
    """Check the syntax of a topic filter, and return it.

    Raises:
        ArgumentError: the filter is invalid.
    """
    if not isinstance(pattern, str) or not pattern:
        raise ArgumentError(f"topics: {pattern!r} is not a topic filter such as 'site1/+/temp' or 'site1/#'")
    *above, last = pattern.split("/")
    if any("#" in level for level in above) or ("#" in last and last != "#"):
        raise ArgumentError(f"topics: {pattern!r} has a '#' inside; '#' must be the whole last level, as in 'site1/#'")
    if any("+" in level and level != "+" for level in (*above, last)):
        raise ArgumentError(
            f"topics: {pattern!r} has a '+' beside a name; '+' must be a whole level, as in 'site1/+/temp'"
        )
    return pattern


def covers(pattern: str, other: str) -> bool:
    """Return whether a filter matches every topic that another one matches."""
    levels, others = pattern.split("/"), other.split("/")
    for at, level in enumerate(levels):
        if level == "#":
            return True
        if at == len(others) or others[at] == "#" or level not in ("+", others[at]):
            return False
    return len(levels) == len(others)


def _regex(pattern: str) -> str:
    """Return a filter as a regular expression for the whole name, in the syntax that RE2 accepts too."""
    if pattern == "#":
        return ".*"
    *above, last = pattern.split("/")
    levels = ["[^/]*" if level == "+" else _escape(level) for level in above]
    if last == "#":
        return "/".join(levels) + "(/.*)?"  # as in MQTT, site1/# also matches site1
    return "/".join([*levels, "[^/]*" if last == "+" else _escape(last)])


def _escape(text: str) -> str:
    return re.sub(r"([\\.^$*+?()\[\]{}|])", r"\\\1", text)


class Filter:
    """Selects topics by name.

    Args:
        topics: filters; a name must match one of them.
        exclude: filters; a name must match none of them.

    Raises:
        ArgumentError: a filter is invalid.
    """

    def __init__(self, topics: Sequence[str] = ("#",), exclude: Sequence[str] = ()) -> None:
        if isinstance(topics, str) or isinstance(exclude, str):
            raise ArgumentError("topics: a list of filters is needed, such as ['site1/#']")
        self.topics = tuple(map(check_pattern, topics))
        self.exclude = tuple(map(check_pattern, exclude))
        self.matches: Callable[[str], bool] = lru_cache(_CACHED_NAMES)(self.matches_uncached)
        """Return whether a topic's name is selected; the latest answers are cached."""
        self._included = re.compile(self.regex(), re.DOTALL)
        self._excluded = re.compile(self.exclude_regex(), re.DOTALL) if self.exclude else None

    def matches_uncached(self, name: str) -> bool:
        """Return the same as `matches`, without a cache, for long names from unauthenticated clients."""
        if not self._included.fullmatch(name):
            return False
        return self._excluded is None or not self._excluded.fullmatch(name)

    @property
    def everything(self) -> bool:
        """Whether every topic is selected."""
        return "#" in self.topics and not self.exclude

    def literal(self) -> tuple[str, ...] | None:
        """Return the selected names, without those of `exclude`. None when a filter has a wildcard."""
        if not all(map(literal, self.topics)):
            return None
        return tuple(name for name in dict.fromkeys(self.topics) if self.matches(name))

    def regex(self) -> str:
        """Return `topics` as a regular expression for the whole name, in the syntax that Arrow's RE2 accepts too."""
        return "|".join(f"(?:{_regex(one)})" for one in self.topics) or "[^\\s\\S]"  # which matches nothing

    def exclude_regex(self) -> str:
        """Return `exclude` as a regular expression, like `regex`."""
        return "|".join(f"(?:{_regex(one)})" for one in self.exclude) or "[^\\s\\S]"

    def __reduce__(self) -> tuple[type[Filter], tuple[tuple[str, ...], tuple[str, ...]]]:
        return Filter, (self.topics, self.exclude)

    def __repr__(self) -> str:
        return f"Filter({list(self.topics)!r}, exclude={list(self.exclude)!r})"


# ---- Bloom filters of files with many topics


def bloom_filter(topics: Iterable[str]) -> str:
    """Return the Bloom filter of topics in base64."""
    names = set()
    for topic in topics:
        names.add(topic)
        names.update(topic[: found.end()] for found in re.finditer("/", topic))  # parent levels: site1/, site1/a/
    bits = bytearray(min(MAX_BLOOM_BYTES, max(8, len(names) * _BITS_PER_NAME // 8)))
    for name in names:
        for at in _bit_positions(name, len(bits) * 8):
            bits[at >> 3] |= 1 << (at & 7)
    return b64encode(bits).decode()


def _bit_positions(name: str, bits: int) -> Iterator[int]:
    digest = int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest())
    step = digest >> 32 | 1  # odd, so that all positions differ: sizes are multiples of 8
    return ((digest + at * step) % bits for at in range(_HASHES))


class WantedTopics(NamedTuple):
    """Names to look up in Bloom filters; `of` creates an object.

    Attributes:
        names: if a file's filter contains none of them, the file has no wanted topic.
    """

    names: tuple[str, ...]

    @classmethod
    def of(cls, topics: Filter | None) -> WantedTopics | None:
        """Return the names to look up; None when a Bloom filter does not help."""
        found: set[str] = set()
        for pattern in topics.topics if topics else ("#",):
            if literal(pattern):
                found.add(pattern)
                continue
            levels = pattern.split("/")  # the levels before the first wildcard are in the Bloom filter
            fixed = levels[: next(at for at, level in enumerate(levels) if level in ("+", "#"))]
            if not fixed:
                return None
            above = "/".join(fixed)
            found.add(above + "/")
            if pattern == above + "/#":  # as in MQTT, site1/# also matches site1
                found.add(above)
        return cls(tuple(sorted(found)))

    def may_be_in(self, topic_filter: str) -> bool:
        """Return whether a file with this Bloom filter may have a wanted topic."""
        bits = _bloom_bits(topic_filter)
        if not bits:
            return True
        return any(
            all(bits[at >> 3] >> (at & 7) & 1 for at in _bit_positions(name, len(bits) * 8)) for name in self.names
        )


@lru_cache(maxsize=_KEPT_BLOOM_FILTERS)
def _bloom_bits(text: str) -> bytes:
    """Return the bits; empty when the text isn't a Bloom filter."""
    try:
        return b64decode(text, validate=True)
    except ValueError:
        return b""


Offsets = Mapping[str, int]
"""By node, the number of the next row: the start of a range, or its end (exclusive)."""
Times = tuple[int, int]
"""Earliest and latest wanted time, microseconds UTC."""
WAL, PARQUET = "wal", "parquet"


class Chunk(NamedTuple):
    """A part of one file: rows first_seq + skip up to but not including first_seq + skip + rows of its node.

    Attributes:
        file: its path in the journal.
        kind: "wal" or "parquet".
        offset, length: position of the batches in a segment, bytes; of a Parquet file 0 and its size.
        skip: rows of the first batch before the wanted ones.
        rows: number of wanted rows.
        node: the node that wrote them.
        first_seq: the number of the first row of the first batch.
        footer_crc32: checksum of a Parquet file's footer; None when it is not known.
        share_bytes: the approximate size of the wanted rows in a Parquet file.
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
        """The number of the first wanted row."""
        return self.first_seq + self.skip

    @property
    def end(self) -> int:
        """The number after the last wanted row."""
        return self.start + self.rows


class SealedSegment(NamedTuple):
    """A sealed segment with rows: a plan with all of them doesn't need its index.

    Attributes:
        end: the number after its last row; no number before it is missing.
        size_bytes: its size.
        ts_min_us, ts_max_us: its earliest and latest time, microseconds UTC.
    """

    end: int
    size_bytes: int
    ts_min_us: int
    ts_max_us: int


class JournalSnapshot(NamedTuple):
    """The files of a journal at one moment.

    Attributes:
        wal: by node, the first numbers of its segments, ascending. They were listed before the manifest was read, so
            that rows which were compacted meanwhile are in both.
        manifest: the compacted files.
    """

    wal: dict[str, list[int]]
    manifest: Manifest

    def nodes(self) -> list[str]:
        """Return the names of all nodes, in order."""
        return sorted({*self.wal, *self.manifest.nodes})

    def begin(self, node: str) -> int | None:
        """Return the number of the oldest row of a node; None without rows."""
        through, compacted = self.manifest.nodes.get(node, 0), self.manifest.first(node)
        found = [max(first, through) for first in self.wal.get(node, [])[:1]]
        return min(found + ([] if compacted is None else [compacted]), default=None)

    def segments(self, node: str, start: int, end: int) -> list[int]:
        """Return the first numbers of the segments that may have rows of a range, ascending."""
        firsts = self.wal.get(node, [])
        oldest = max(0, bisect_right(firsts, start) - 1)
        return [first for first in firsts[oldest:] if first < end]


class SegmentIndex:
    """The index of a segment, searched by row number.

    Args:
        data: the complete records.
        path: the name for messages.
    """

    def __init__(self, data: bytes | memoryview, path: str) -> None:
        self._data, self._path = data, path
        self.count = len(data) // INDEX.size

    @property
    def size_bytes(self) -> int:
        """The size of the complete records."""
        return self.count * INDEX.size

    @property
    def end(self) -> int:
        """The number after the last row; 0 without rows."""
        return self.entry(self.count - 1).next_seq if self.count else 0

    def entry(self, at: int) -> BatchEntry:
        """Return a record."""
        return BatchEntry(*INDEX.unpack_from(self._data, at * INDEX.size))

    def at(self, seq: int) -> int:
        """Return the position of the last record that begins at or before a number; 0 without one."""
        if not self.count or seq <= self.entry(0).first_seq:  # true for most segments of a long range
            return 0
        if seq >= self.entry(self.count - 1).first_seq:
            return self.count - 1
        return max(0, bisect_right(range(self.count), seq, key=lambda at: self.entry(at).first_seq) - 1)

    def between(self, start: int, end: int) -> list[BatchEntry]:
        """Return the batches that have rows of a range.

        Raises:
            JournalError: the index is damaged: a batch doesn't follow the one before.
        """
        found = self._positions(start, end)
        entries = parse_index(self._records(found))
        check_index(entries, self._path, found.start * INDEX.size)
        return entries

    def spans(self, start: int, end: int, ts_us: Times | None) -> Iterator[tuple[BatchEntry, BatchEntry]]:
        """Yield (first, last) of adjacent batches that have rows of a range."""
        found = self._positions(start, end)
        if ts_us is None:
            if found:
                yield self.entry(found[0]), self.entry(found[-1])
            return
        times = TIMES.iter_unpack(self._records(found))
        wanted = [at for at, both in zip(found, times, strict=True) if _intersect(both, ts_us)]
        for _, pairs in groupby(enumerate(wanted), lambda pair: pair[1] - pair[0]):
            adjacent = [at for _, at in pairs]
            yield self.entry(adjacent[0]), self.entry(adjacent[-1])

    def results(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return `segment.result_ranges` of the batches that have rows of a range."""
        return result_ranges(self._records(self._positions(start, end)))

    def _positions(self, start: int, end: int) -> range:
        """Return the positions of the records that have rows of a range of numbers."""
        first = self.at(start)
        last = bisect_left(range(self.count), end, first, key=lambda at: self.entry(at).first_seq)
        return range(first + (first < last and self.entry(first).next_seq <= start), last)

    def _records(self, positions: range) -> memoryview:
        return memoryview(self._data)[positions.start * INDEX.size : positions.stop * INDEX.size]


class Planner:
    """Plans reads of one snapshot.

    Args:
        snapshot: the files.
        index: returns the index of a segment, by node and first number.
        sealed: returns the range and times of a sealed segment; None when its index is needed.
    """

    def __init__(
        self,
        snapshot: JournalSnapshot,
        index: Callable[[str, int], SegmentIndex],
        sealed: Callable[[str, int], SealedSegment | None],
    ) -> None:
        self._snapshot, self._index, self._sealed = snapshot, index, sealed

    def chunks(self, starts: Offsets, ends: Offsets, ts_us: Times | None, topics: Filter | None) -> Iterator[Chunk]:
        """Yield the chunks of a range, node by node, each node's in order."""
        for node, last in sorted(ends.items()):
            first, through = starts.get(node, 0), self._snapshot.manifest.nodes.get(node, 0)
            for file in self.files(node, first, last, ts_us, topics):
                begin, end = max(first, file.first), min(last, file.last + 1)
                share = file.bytes * (end - begin) // (file.last + 1 - file.first)  # as if all rows had the same size
                yield Chunk(file.path, PARQUET, 0, file.bytes, 0, end - begin, node, begin, file.footer_crc32, share)
            # From `through` on: segments with compacted rows exist until their grace period is over.
            yield from self._segments(node, max(first, through), last, ts_us)

    def rows(self, node: str, start: int, end: int) -> int:
        """Return the number of rows of a node in a range."""
        count = 0
        for page in self._snapshot.manifest.pages(node):
            if start <= page.first and page.last < end:  # all of the page: its entry in the root is enough
                count += page.rows
            elif page.last >= start and page.first < end:
                some = files_between(self._snapshot.manifest.read_page(page), start, end)
                count += sum(min(end, file.last + 1) - max(start, file.first) for file in some)
        through = self._snapshot.manifest.nodes.get(node, 0)
        return count + sum(chunk.rows for chunk in self._segments(node, max(start, through), end, None))

    def files(self, node: str, start: int, end: int, ts_us: Times | None, topics: Filter | None) -> Iterator[DataFile]:
        """Yield the compacted files of a node that may have rows of a range, ascending."""
        names = WantedTopics.of(topics)
        for file in self._snapshot.manifest.files(node, start, end, lambda page: _overlaps(page, ts_us)):
            is_inside = max(start, file.first) < min(end, file.last + 1)
            if is_inside and _overlaps(file, ts_us) and _may_have(file, topics, names):
                yield file

    def _segments(self, node: str, start: int, end: int, ts_us: Times | None) -> Iterator[Chunk]:
        for first in self._snapshot.segments(node, start, end) if start < end else ():
            sealed, file = self._sealed(node, first), segment_file(node, first)
            if sealed and not _overlaps(sealed, ts_us):
                continue
            is_inside = ts_us is None or (sealed and ts_us[0] <= sealed.ts_min_us and sealed.ts_max_us <= ts_us[1])
            if sealed and start <= first and sealed.end <= end and is_inside:  # all of it: its index is not needed
                yield Chunk(file, WAL, 0, sealed.size_bytes, 0, sealed.end - first, node, first)
                continue
            for oldest, newest in self._index(node, first).spans(start, end, ts_us):
                skip = max(0, start - oldest.first_seq)
                rows = min(end, newest.next_seq) - oldest.first_seq - skip
                yield Chunk(file, WAL, oldest.offset, newest.end - oldest.offset, skip, rows, node, oldest.first_seq)


def segment_file(node: str, first: int) -> str:
    """Return the path of a segment in the journal."""
    return f"wal/{node}/{first:020d}.arrows"


def _overlaps(times: SealedSegment | DataFile | ManifestPage, wanted: Times | None) -> bool:
    return wanted is None or _intersect((times.ts_min_us, times.ts_max_us), wanted)


def _intersect(times: Times, wanted: Times) -> bool:
    return times[0] <= wanted[1] and times[1] >= wanted[0]


def _may_have(file: DataFile, topics: Filter | None, names: WantedTopics | None) -> bool:
    if topics is None:
        return True
    if file.topics is not None:
        return any(map(topics.matches, file.topics))
    return file.topic_filter is None or names is None or names.may_be_in(file.topic_filter)


def parts(chunks: Iterable[Chunk], max_rows: int) -> list[list[Chunk]]:
    """Return the chunks, cut into lists of `max_rows` rows; the last list may have fewer.

    Args:
        chunks: the chunks.
        max_rows: number of rows of a list, at least 1.

    Raises:
        ValueError: `max_rows` is less than 1.
    """
    if max_rows < 1:
        raise ValueError(f"max_rows is {max_rows}; it must be at least 1")
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
