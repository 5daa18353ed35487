"""Filters of topics, which have MQTT's rules in Python and in Arrow, and plans: which rows of which files are read."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smqrt.errors import ArgumentError, JournalError
from smqrt.journal import manifest, planning, tables
from smqrt.journal.manifest import DataFile, Manifest
from smqrt.journal.planning import (
    Chunk,
    Filter,
    JournalSnapshot,
    Planner,
    SealedSegment,
    SegmentIndex,
    WantedTopics,
    covers,
    parts,
)
from smqrt.journal.segment import INDEX, RESULTS

LEVEL = st.sampled_from(["a", "b", "", "a.c", "größe", "$x", "a|b", "(", "\n", "\\"])
NAME = st.lists(LEVEL, min_size=1, max_size=4).map("/".join).filter(bool)
PATTERN = st.builds(
    lambda levels, end: "/".join([*levels, *end]),
    st.lists(LEVEL | st.just("+"), min_size=1, max_size=3),
    st.sampled_from([[], ["#"]]),
).filter(bool)


def by_the_book(pattern: str, name: str) -> bool:
    """MQTT 5 §4.7, level by level."""
    wanted, levels = pattern.split("/"), name.split("/")
    for at, level in enumerate(wanted):
        if level == "#":
            return True
        if at >= len(levels) or level not in ("+", levels[at]):
            return False
    return len(levels) == len(wanted)


@settings(max_examples=50)
@given(st.lists(PATTERN | st.just("#"), max_size=3), st.lists(PATTERN, max_size=2), st.lists(NAME, max_size=8))
def test_as_in_the_book(topics: list[str], exclude: list[str], names: list[str]) -> None:
    chosen = Filter(topics, exclude)
    wanted = [
        any(by_the_book(one, name) for one in topics) and not any(by_the_book(one, name) for one in exclude)
        for name in names
    ]
    assert [chosen.matches(name) for name in names] == wanted
    column = pa.array([*names, None], pa.string())
    assert tables.mask(column, chosen).to_pylist() == [*wanted, False]
    assert tables.mask(column.dictionary_encode(), chosen).to_pylist() == [*wanted, False]
    in_pieces = pa.chunked_array([column.dictionary_encode(), column.slice(0, 1).dictionary_encode()])
    assert tables.mask(in_pieces, chosen).to_pylist() == [*wanted, False, *[*wanted, False][:1]]


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("a/#", "a", True),
        ("a/#", "a/b/c", True),
        ("a/#", "ab", False),
        ("+", "a", True),
        ("+", "a/b", False),
        ("+/+", "/a", True),
        ("/+", "/", True),
        ("a/+", "a", False),
        ("a.b", "axb", False),
        ("#", "", True),
    ],
)
def test_examples(pattern: str, name: str, matches: bool) -> None:
    assert Filter([pattern]).matches(name) is matches


def test_names_without_wildcards() -> None:
    assert Filter(["b", "a", "b"]).literal() == ("b", "a")
    assert Filter(["a", "b"], ["b/#"]).literal() == ("a",)
    assert Filter(["a", "b/+"]).literal() is None
    assert Filter([]).literal() == ()
    assert Filter().everything
    assert not Filter(["#"], ["a"]).everything
    assert not Filter(["a/#"]).everything


def test_a_filter_travels() -> None:
    there = pickle.loads(pickle.dumps(Filter(["a/+"], ["a/b"])))
    assert (there.topics, there.exclude) == (("a/+",), ("a/b",))
    assert [there.matches(name) for name in ("a/a", "a/b")] == [True, False]
    assert repr(there) == "Filter(['a/+'], exclude=['a/b'])"


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("a/#/b", "has a '#' inside; '#' must be the whole last level, as in 'site1/#'"),
        ("a#", "has a '#' inside"),
        ("a+/b", "has a '+' beside a name; '+' must be a whole level"),
        ("", "is not a topic filter"),
        (5, "5 is not a topic filter"),
    ],
)
def test_mistakes(pattern: str, says: str) -> None:
    for topics, exclude in (([pattern], []), (["#"], [pattern])):
        with pytest.raises(ArgumentError, match=re.escape(says)):
            Filter(topics, exclude)


def test_one_text_is_no_list() -> None:
    with pytest.raises(ArgumentError, match="a list of filters is needed"):
        Filter("site1/#")


@pytest.mark.parametrize(
    ("pattern", "other", "is_covered"),
    [
        ("#", "a/+/#", True),
        ("a/#", "a", True),
        ("a/#", "a/+/b", True),
        ("a/+", "a/b", True),
        ("a/+", "a/+", True),
        ("a/b", "a/+", False),
        ("a/+", "a/#", False),
        ("a/+", "a", False),
        ("+", "a/b", False),
        ("a", "#", False),
    ],
)
def test_a_filter_covers_another(pattern: str, other: str, is_covered: bool) -> None:
    assert covers(pattern, other) is is_covered


# ---- files with many topics


def test_a_topic_filter_matches_its_names_and_excludes_most() -> None:
    names = [f"site{at % 50}/machine{at}/temp" for at in range(4000)]
    made = planning.bloom_filter(names)
    assert len(made) <= 11_000

    def may_be_in(*topics: str) -> bool:
        wanted = WantedTopics.of(Filter(topics))
        return wanted is None or wanted.may_be_in(made)

    assert all(may_be_in(name) for name in names[::4])
    for pattern in (
        "#",
        "+/machine7/temp",
        "site3/#",
        "site3/+/temp",
        "site3/machine3/#",
        "nowhere",
        "site1/machine1/temp",
    ):
        assert may_be_in("site1/machine1/temp", pattern)
    assert may_be_in("site3/#")
    assert may_be_in("site3/machine3/temp/#")
    assert may_be_in("+/x")
    wrong = sum(may_be_in(f"site{at % 50}/machine{at}/temp") for at in range(10_000, 11_000))
    assert wrong < 1000 * 0.05
    assert sum(may_be_in(f"other{at}/#") for at in range(1000)) < 1000 * 0.1


def test_a_filter_that_is_none_leaves_nothing_out() -> None:
    wanted = WantedTopics.of(Filter(["a"]))
    assert wanted
    assert wanted.may_be_in("")
    assert wanted.may_be_in("%%%")


def test_a_filter_that_begins_with_a_wildcard_looks_nothing_up() -> None:
    assert WantedTopics.of(None) is None
    assert WantedTopics.of(Filter(["a", "+/b"])) is None
    assert WantedTopics.of(Filter(["b", "a/+/c", "d/#"])) == WantedTopics(("a/", "b", "d", "d/"))


def test_a_bloom_filter_has_a_largest_size() -> None:
    sizes = [len(planning.bloom_filter(f"t{number}" for number in range(count))) for count in (1, 100, 7000, 9000)]
    assert sizes == [12, 168, 10924, 10924], "8, 125 and 8192 bytes in base64"


# ---- the index of a segment


def index(*batches: tuple[int, int], step: int = 10, flags: int = 0) -> SegmentIndex:
    """An index with a record of 64 bytes for (first number, number of rows), and times 10 us for each number."""
    records = [
        INDEX.pack(first, rows, 1000 + 64 * at, 64, first * step, (first + rows - 1) * step, 0, flags, 0)
        for at, (first, rows) in enumerate(batches)
    ]
    return SegmentIndex(b"".join(records) + b"half a record", "x.arrows")


THREE = (100, 10), (110, 5), (120, 10)
"""Batches with a gap from 115 to 120."""


@pytest.mark.parametrize(
    ("seq", "position"), [(0, 0), (100, 0), (109, 0), (110, 1), (117, 1), (119, 1), (120, 2), (500, 2)]
)
def test_a_number_is_in_the_last_batch_that_begins_before_it(seq: int, position: int) -> None:
    assert index(*THREE).at(seq) == position


def test_an_index_without_records_has_no_rows() -> None:
    empty = index()
    assert (empty.count, empty.size_bytes, empty.end, empty.at(5)) == (0, 0, 0, 0)
    assert empty.between(0, 100) == []
    assert list(empty.spans(0, 100, None)) == list(empty.spans(0, 100, (0, 100))) == []
    assert (index(*THREE).count, index(*THREE).size_bytes, index(*THREE).end) == (3, 192, 130)


@pytest.mark.parametrize(
    ("start", "end", "firsts"),
    [
        (0, 100, []),
        (0, 101, [100]),
        (109, 110, [100]),
        (109, 111, [100, 110]),
        (110, 120, [110]),
        (115, 120, []),
        (115, 121, [120]),
        (129, 999, [120]),
        (130, 999, []),
    ],
)
def test_batches_with_rows_of_a_range(start: int, end: int, firsts: list[int]) -> None:
    assert [entry.first_seq for entry in index(*THREE).between(start, end)] == firsts


def test_a_batch_that_does_not_follow_is_damage() -> None:
    with pytest.raises(JournalError, match=r"x\.idx is damaged at offset 64"):
        index((100, 10), (105, 5)).between(0, 200)


def test_adjacent_batches_of_the_wanted_times_are_one_span() -> None:
    whole = index(*((at * 10, 10) for at in range(6)))
    spans = lambda *times: [(a.first_seq, b.first_seq) for a, b in whole.spans(0, 60, times or None)]  # noqa: E731
    assert spans() == [(0, 50)]
    assert spans(190, 300) == [(10, 30)]
    assert spans(191, 199) == []
    mixed = index((0, 10), (10, 10), (20, 10), (30, 10))
    apart = [entry for pair in mixed.spans(5, 40, (0, 90)) for entry in pair]
    assert [entry.first_seq for entry in apart] == [0, 0]


def test_batches_of_results_are_ranges() -> None:
    assert index((0, 5), (5, 5), (20, 5), flags=RESULTS).results(6, 25) == [(5, 10), (20, 25)]
    assert index((0, 5)).results(0, 5) == []


# ---- plans


def data_file(first: int, rows: int, topics: tuple[str, ...] | None = None) -> DataFile:
    return DataFile(
        f"data/{first}", "n1", first, first + rows - 1, rows, first * 10, (first + rows - 1) * 10, 1000, topics
    )


def manifest_of(tmp_path: Path, *files: DataFile, through: int = 0) -> Manifest:
    tmp_path.mkdir(exist_ok=True)
    with manifest.edit(tmp_path) as changes:
        changes.add(files)
        changes.nodes["n1"] = through
    return manifest.load(tmp_path)


def planner(state: Manifest, indexes: dict[int, SegmentIndex], read: list[int] | None = None) -> Planner:
    """A planner of a node whose newest segment is not sealed; notes in `read` which indexes it needs."""

    def index_of(node: str, first: int) -> SegmentIndex:
        if read is not None:
            read.append(first)
        return indexes[first]

    def sealed(node: str, first: int) -> SealedSegment | None:
        if first == max(indexes):
            return None
        last = indexes[first].entry(indexes[first].count - 1)
        return SealedSegment(last.next_seq, last.end, first * 10, last.ts_max_us)

    return Planner(JournalSnapshot({"n1": sorted(indexes)}, state), index_of, sealed)


def ranges(found: Iterable[Chunk]) -> list[tuple[str, int, int]]:
    return [(chunk.kind, chunk.start, chunk.end) for chunk in found]


def test_rows_come_from_files_then_from_segments(tmp_path: Path) -> None:
    state = manifest_of(tmp_path, data_file(0, 10), data_file(10, 10), through=20)
    indexes = {10: index((10, 5), (15, 15)), 30: index((30, 10))}
    plan = planner(state, indexes)
    assert ranges(plan.chunks({}, {"n1": 40}, None, None)) == [
        ("parquet", 0, 10),
        ("parquet", 10, 20),
        ("wal", 20, 30),
        ("wal", 30, 40),
    ]
    assert ranges(plan.chunks({"n1": 15}, {"n1": 22}, None, None)) == [("parquet", 15, 20), ("wal", 20, 22)]
    assert plan.rows("n1", 5, 37) == 32
    assert (plan.rows("n1", 40, 90), plan.rows("n1", 7, 7), plan.rows("n2", 0, 9)) == (0, 0, 0)


def test_a_chunk_of_a_file_has_a_share_of_its_bytes(tmp_path: Path) -> None:
    state = manifest_of(tmp_path, data_file(0, 10), through=10)
    [chunk] = planner(state, {10: index()}).chunks({"n1": 4}, {"n1": 7}, None, None)
    assert chunk == Chunk("data/0", "parquet", 0, 1000, 0, 3, "n1", 4, None, 300)


def test_a_chunk_of_a_segment_has_whole_batches(tmp_path: Path) -> None:
    state = manifest_of(tmp_path)
    plan = planner(state, {0: index((0, 10), (10, 10), (20, 10))})
    [chunk] = plan.chunks({"n1": 13}, {"n1": 27}, None, None)
    assert chunk == Chunk("wal/n1/00000000000000000000.arrows", "wal", 1064, 128, 3, 14, "n1", 10)
    assert (chunk.start, chunk.end) == (13, 27)


def test_only_segments_that_are_cut_need_their_index(tmp_path: Path) -> None:
    indexes = {first: index((first, 10)) for first in (0, 10, 20)}
    for start, end, times, needed in (
        (0, 20, None, []),
        (1, 20, None, [0]),
        (0, 19, None, [10]),
        (0, 20, (0, 190), []),
        (0, 20, (1, 190), [0]),
        (0, 20, (0, 189), [10]),
        (0, 20, (91, 189), [10]),
        (0, 30, None, [20]),
    ):
        read: list[int] = []
        list(planner(manifest_of(tmp_path), indexes, read).chunks({"n1": start}, {"n1": end}, times, None))
        assert read == needed, (start, end, times)


def test_files_of_other_topics_and_times_are_left_out(tmp_path: Path) -> None:
    bloom = planning.bloom_filter(["c/x"])
    files = data_file(0, 10, ("a/x",)), data_file(10, 10, ("b",)), replace(data_file(20, 10), topic_filter=bloom)
    plan = planner(manifest_of(tmp_path, *files, through=30), {30: index()})

    def planned(topics: Sequence[str] = ("#",), times: tuple[int, int] | None = None) -> list[int]:
        return [file.first for file in plan.files("n1", 0, 30, times, Filter(topics))]

    assert planned() == [0, 10, 20]
    assert planned(["a/+"]) == [0]
    assert planned(["c/#"]) == [20]
    assert planned(times=(90, 100)) == [0, 10]
    assert planned(times=(91, 99)) == []
    for start, end, firsts in ((9, 10, [0]), (9, 11, [0, 10]), (10, 11, [10]), (19, 20, [10]), (30, 31, [])):
        assert [file.first for file in plan.files("n1", start, end, None, None)] == firsts


def test_a_node_begins_with_its_oldest_row(tmp_path: Path) -> None:
    nothing = manifest.load(tmp_path)
    state = manifest_of(tmp_path, data_file(5, 10), through=15)
    assert JournalSnapshot({"n1": [10, 20]}, state).begin("n1") == 5
    assert JournalSnapshot({"n1": [10, 20]}, nothing).begin("n1") == 10
    expired = manifest_of(tmp_path / "other", through=15)
    assert JournalSnapshot({"n1": [10, 20]}, expired).begin("n1") == 15
    assert JournalSnapshot({}, nothing).begin("n1") is None
    assert JournalSnapshot({"n2": []}, state).nodes() == ["n1", "n2"]


@pytest.mark.parametrize(
    ("start", "end", "firsts"),
    [(0, 10, []), (0, 11, [10]), (19, 20, [10]), (20, 21, [20]), (15, 99, [10, 20, 30]), (99, 100, [30])],
)
def test_segments_of_a_range(tmp_path: Path, start: int, end: int, firsts: list[int]) -> None:
    assert JournalSnapshot({"n1": [10, 20, 30]}, manifest.load(tmp_path)).segments("n1", start, end) == firsts


def test_a_plan_is_cut_into_parts_of_equal_size() -> None:
    chunks = [Chunk("a", "wal", 0, 1, 2, 5, "n1", 0), Chunk("b", "wal", 0, 1, 0, 4, "n1", 7)]
    found = parts(chunks, 3)
    assert [[(one.file, one.start, one.rows) for one in part] for part in found] == [
        [("a", 2, 3)],
        [("a", 5, 2), ("b", 7, 1)],
        [("b", 8, 3)],
    ]
    assert parts(chunks, 100) == [chunks]
    assert parts([], 3) == []
    with pytest.raises(ValueError, match="max_rows is 0; it must be at least 1"):
        parts(chunks, 0)
