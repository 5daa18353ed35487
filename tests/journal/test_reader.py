"""Readers: every row once, in segments, in Parquet files and in between."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smqrt.errors import JournalError
from smqrt.journal import manifest, planning, segment, tables
from smqrt.journal.planning import Filter
from smqrt.journal.reader import Chunk, FolderFiles, Journal
from smqrt.journal.record import Row
from tests.journal import written

ROWS = 300
NODES = ("n1", "n2")


def as_rows(batches: Iterator[Any]) -> list[Row]:
    found = []
    for batch in batches:
        columns = [batch.column(name) for name in batch.schema.names if name not in ("node", "broker")]
        columns[1] = columns[1].cast(pa.int64())
        found += [Row(*values) for values in zip(*(column.to_pylist() for column in columns), strict=True)]
    return found


def read(journal: Journal, plan: list[list[Chunk]], **options: Any) -> list[Row]:
    return [row for part in plan for chunk in part for row in as_rows(journal.tables(chunk, **options))]


@pytest.fixture(scope="module", params=range(8), ids=lambda seed: f"seed{seed}")
def journal(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Journal:
    """Two nodes with random batches and segments, compacted to a random number, with the old segments or without.

    Tests only read it.
    """
    random_, folder = random.Random(request.param), tmp_path_factory.mktemp("journal")
    for node in NODES:
        written.write(folder, written.random_ends(random_, ROWS), node)
        if cuts := sorted({random_.randint(1, ROWS - 1) for _ in range(random_.randint(0, 4))}):
            written.to_parquet(folder, cuts, node, group_rows=random_.choice((25, 64, 1000)))
            if random_.random() < 0.7:
                written.drop_compacted(folder, node)
    return Journal(folder)


def random_range(random_: random.Random) -> tuple[dict[str, int], dict[str, int]]:
    pairs = {node: sorted((random_.randint(0, ROWS), random_.randint(0, ROWS))) for node in NODES}
    return {node: pair[0] for node, pair in pairs.items()}, {node: pair[1] for node, pair in pairs.items()}


def expected(start: dict[str, int], end: dict[str, int]) -> list[Row]:
    return [row for node in sorted(end) for row in written.rows(start.get(node, 0), end[node])]


def test_where_rows_are(journal: Journal) -> None:
    assert journal.nodes() == list(NODES)
    assert journal.begin() == dict.fromkeys(NODES, 0)
    assert journal.end() == dict.fromkeys(NODES, ROWS)


def test_random_ranges(journal: Journal) -> None:
    random_ = random.Random(1)
    for _ in range(10):
        start, end = random_range(random_)
        most = random_.randint(1, 150)
        plan = journal.plan(start, end, max_rows=most)
        assert read(journal, plan) == list(journal.rows(start, end)) == expected(start, end)
        assert [sum(chunk.rows for chunk in part) for part in plan[:-1]] == [most] * (len(plan) - 1)
        assert all(chunk.rows > 0 for part in plan for chunk in part)


def test_a_range_means_the_same_after_compaction(tmp_path: Path) -> None:
    """Plans from before are read after it, when their segments are gone."""
    random_ = random.Random(7)
    written.write(tmp_path, written.random_ends(random_, ROWS, most_rows=9))
    journal, at = Journal(tmp_path), 0
    while at < ROWS:
        start, end = {"n1": random_.randrange(ROWS)}, {"n1": ROWS}
        plan = journal.plan(start, end, max_rows=40)
        at = min(ROWS, at + random_.randint(20, 80))
        written.to_parquet(tmp_path, [at])
        written.drop_compacted(tmp_path)
        assert read(journal, plan) == expected(start, end)
        assert [row for part in plan for chunk in part for row in journal.rows_of(chunk)] == expected(start, end)


def test_a_file_that_goes_while_it_is_read(tmp_path: Path) -> None:
    written.write(tmp_path, [[10], [20], [30], [40]])
    journal = Journal(tmp_path)
    rows = journal.rows({}, {"n1": 40})
    found = [next(rows) for _ in range(12)]
    written.to_parquet(tmp_path, [25, 40])
    written.drop_compacted(tmp_path)
    assert found + list(rows) == written.rows(0, 40)


def test_rows_that_have_expired(tmp_path: Path) -> None:
    written.write(tmp_path, [[10], [20], [30]])
    journal = Journal(tmp_path)
    plan = journal.plan({}, {"n1": 30}, max_rows=10)
    for path in segment.paths(tmp_path / "wal/n1")[:2]:
        path.unlink()
        path.with_suffix(".idx").unlink()
    assert journal.begin() == {"n1": 20}
    with pytest.raises(JournalError, match=r"Rows 10 to 19 of node n1 are missing from .*; increase journal\.retain"):
        read(journal, plan[1:])
    assert read(journal, plan[2:]) == written.rows(20, 30)


@pytest.mark.parametrize(
    ("topics", "exclude"),
    [(["#"], []), (["site1/+/temp"], []), (["site1/a/temp", "größe/°C"], []), (["#"], ["site1/#"]), (["none"], [])],
    ids=str,
)
def test_topics(journal: Journal, topics: list[str], exclude: list[str]) -> None:
    chosen, all_ = Filter(topics, exclude), dict.fromkeys(NODES, ROWS)
    wanted = [row for row in expected({}, all_) if row.topic is not None and chosen.matches(row.topic)]
    plan = journal.plan({}, all_, max_rows=77, topics=chosen)
    assert read(journal, plan, topics=chosen) == wanted
    assert list(journal.rows({}, all_, chosen)) == wanted
    if not exclude:
        assert list(journal.rows({}, all_, topics)) == wanted


def test_times_leave_out_what_has_none(journal: Journal) -> None:
    random_, all_ = random.Random(2), dict.fromkeys(NODES, ROWS)
    for _ in range(10):
        first, last = sorted(random_.choices(range(ROWS), k=2))
        times = (written.START_US + first * 1000, written.START_US + last * 1000 + 5)
        plan = journal.plan({}, all_, ts_us=times)
        rows = read(journal, plan)
        assert [row for row in rows if times[0] <= row.ts_us <= times[1]] == written.rows(first, last + 1) * 2
        assert len(rows) < (last - first + 1 + 400) * 2
    assert journal.plan({}, all_, ts_us=(0, written.START_US - 1)) == []


def test_a_plan_reads_the_indexes_of_segments_it_cuts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written.write(tmp_path, [[at] for at in range(10, ROWS + 10, 10)])
    journal, all_, read_indexes = Journal(tmp_path), {"n1": ROWS}, list[int]()
    index_of = FolderFiles.index

    def counted(self: FolderFiles, node: str, first: int, *rest: Any, **options: Any) -> planning.SegmentIndex:
        read_indexes.append(first)
        return index_of(self, node, first, *rest, **options)

    monkeypatch.setattr(FolderFiles, "index", counted)
    until_us = written.START_US + 204_000
    for start, times, looked_at in (
        (0, None, [ROWS - 10]),
        (17, None, [10, ROWS - 10]),
        (0, (written.START_US + 15_000, until_us), [10, 200, ROWS - 10]),
        (0, (0, 1 << 62), [ROWS - 10]),
    ):
        read_indexes.clear()
        plan = journal.plan({"n1": start}, all_, ts_us=times)
        assert read_indexes == looked_at
        rows = read(journal, plan)
        assert [row for row in rows if times is None or times[0] <= row.ts_us <= times[1]] == [
            row for row in written.rows(start, ROWS) if times is None or times[0] <= row.ts_us <= times[1]
        ]


def test_a_time_is_an_offset(journal: Journal) -> None:
    for seq in range(0, ROWS, 29):
        assert journal.offsets_at(written.START_US + seq * 1000) == dict.fromkeys(NODES, seq)
        assert journal.offsets_at(written.START_US + seq * 1000 - 999) == dict.fromkeys(NODES, seq)
    assert journal.offsets_at(0) == dict.fromkeys(NODES, 0)
    assert journal.offsets_at(1 << 61) == dict.fromkeys(NODES, ROWS)


def test_columns_have_sparks_types(journal: Journal) -> None:
    all_ = dict.fromkeys(NODES, ROWS)
    for part in journal.plan({}, all_):
        for chunk in part:
            for batch in journal.tables(chunk):
                batch.validate(full=True)
                assert batch.schema.equals(tables.schema(), check_metadata=True)
                assert set(batch.column("node").to_pylist()) == {chunk.node}
                assert set(batch.column("broker").to_pylist()) == {f"hub-{chunk.node}"}
            wanted = ["topic", "broker", "seq"]
            for batch in journal.tables(chunk, wanted, topics=["site1/#"]):
                assert batch.schema.equals(tables.schema(wanted))
                assert set(batch.column("topic").to_pylist()) <= {"site1/a/temp", "site1/b/temp"}
            assert sum(batch.num_columns for batch in journal.tables(chunk, [])) == 0


def test_small_batches_are_joined(tmp_path: Path) -> None:
    written.write(tmp_path, [range(1, ROWS + 1)])
    journal = Journal(tmp_path)
    ((chunk,),) = journal.plan({}, {"n1": ROWS})
    assert [batch.num_rows for batch in journal.tables(chunk)] == [ROWS]
    assert [batch.num_rows for batch in journal.tables(chunk, batch_rows=100)] == [100, 100, 100]


def test_plans_and_journals_travel(journal: Journal) -> None:
    all_ = dict.fromkeys(NODES, ROWS)
    there, plan = pickle.loads(pickle.dumps((journal, journal.plan({"n1": 17}, all_, max_rows=50))))
    assert read(there, plan) == expected({"n1": 17}, all_)


def test_the_order_of_compaction_does_not_matter(tmp_path: Path) -> None:
    """Segments that are Parquet already stay for a while: nothing is read twice."""
    written.write(tmp_path, [[10], [20], [30]])
    written.to_parquet(tmp_path, [5, 15])
    assert [chunk.kind for part in Journal(tmp_path).plan({}, {"n1": 30}) for chunk in part] == [
        "parquet",
        "parquet",
        "wal",
        "wal",
    ]
    assert list(Journal(tmp_path).rows({"n1": 3}, {"n1": 27})) == written.rows(3, 27)


def test_nothing_is_there(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert (journal.nodes(), journal.begin(), journal.end(), journal.offsets_at(5)) == ([], {}, {}, {})
    assert journal.plan({}, {"n1": 9}) == []
    with pytest.raises(JournalError, match="is not the folder of a journal: create the hub with journal=True"):
        Journal(tmp_path / "missing")


def test_everything_has_expired(tmp_path: Path) -> None:
    written.write(tmp_path, [[5], [9], []])
    for path in segment.paths(tmp_path / "wal/n1")[:-1]:
        path.unlink()
    assert (Journal(tmp_path).begin(), Journal(tmp_path).end()) == ({"n1": 9}, {"n1": 9})


def test_the_hub_is_just_beginning_a_segment(tmp_path: Path) -> None:
    written.write(tmp_path, [[5]])
    (tmp_path / "wal/n1" / f"{5:020d}.arrows").write_bytes(b"")
    assert Journal(tmp_path).end() == {"n1": 5}
    assert list(Journal(tmp_path).rows({}, {"n1": 99})) == written.rows(0, 5)


def test_unknown_numbers(tmp_path: Path) -> None:
    """After a power failure numbers go on behind what a pipeline had seen."""
    written.write(tmp_path, [[4, 10]])
    written.write(tmp_path, [[25, 30]], first=20)
    journal, ever = Journal(tmp_path), (0, 1 << 62)
    assert [row.seq for row in journal.rows({}, {"n1": 30})] == [*range(10), *range(20, 30)]
    for times in (None, ever):
        for start, end in ((10, 20), (12, 18), (9, 21), (0, 15), (15, 30)):
            rows = read(journal, journal.plan({"n1": start}, {"n1": end}, ts_us=times))
            assert [row.seq for row in rows] == [seq for seq in range(start, end) if seq < 10 or seq >= 20]


# ---- damage


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("where", [0, 8, 300, 712, 900], ids=lambda where: f"byte{where}")
def test_a_damaged_batch_in_the_middle(tmp_path: Path, where: int) -> None:
    written.write(tmp_path, [[10, 20, 30], [40]])
    path = segment.paths(tmp_path / "wal/n1")[0]
    entry = segment.read_index(path)[1]
    flip(path, entry.offset + where)
    journal = Journal(tmp_path)
    says = rf"{path} is damaged at offset {entry.offset}: .*checksum.*`smqrt journal verify`"
    for read_all in (lambda: list(journal.rows({}, {"n1": 40})), lambda: read(journal, journal.plan({}, {"n1": 40}))):
        with pytest.raises(JournalError, match=says):
            read_all()
    assert list(journal.rows({"n1": 20}, {"n1": 40})) == written.rows(20, 40)


def test_a_segment_that_is_cut(tmp_path: Path) -> None:
    written.write(tmp_path, [[10, 20, 30], [40]])
    path = segment.paths(tmp_path / "wal/n1")[0]
    entry = segment.read_index(path)[2]
    with path.open("r+b") as file:
        file.truncate(entry.end - 5)
    with pytest.raises(JournalError, match=rf"{path} is damaged at offset {entry.offset}: .*{entry.length - 5} of"):
        list(Journal(tmp_path).rows({}, {"n1": 40}))


def test_an_index_in_disorder(tmp_path: Path) -> None:
    written.write(tmp_path, [[10, 20, 30], [40]])
    path = segment.paths(tmp_path / "wal/n1")[0].with_suffix(".idx")
    flip(path, 64 + 8)
    with pytest.raises(JournalError, match=rf"{path} is damaged at offset \d+: .*`smqrt journal verify`"):
        list(Journal(tmp_path).rows({}, {"n1": 40}))


@pytest.mark.parametrize("start", [0, 25, 35])
def test_an_index_with_more_rows_than_there_are(tmp_path: Path, start: int) -> None:
    written.write(tmp_path, [[10, 20, 30]])
    path = segment.paths(tmp_path / "wal/n1")[0]
    flip(path.with_suffix(".idx"), 2 * 64 + 8)
    journal = Journal(tmp_path)
    end = journal.end()
    assert end == {"n1": 46}
    for read_all in (
        lambda: list(journal.rows({"n1": start}, end)),
        lambda: read(journal, journal.plan({"n1": start}, end)),
    ):
        with pytest.raises(JournalError, match=rf"{path} is damaged at offset \d+: .*don't match the index"):
            read_all()


def test_an_index_that_is_missing(tmp_path: Path) -> None:
    written.write(tmp_path, [[10, 20, 30], [40]])
    path = segment.paths(tmp_path / "wal/n1")[0].with_suffix(".idx")
    path.unlink()
    with pytest.raises(JournalError, match=rf"{path} is missing; `smqrt journal verify`"):
        list(Journal(tmp_path).rows({}, {"n1": 40}))


def test_a_segment_that_is_none(tmp_path: Path) -> None:
    written.write(tmp_path, [[10]])
    path = segment.paths(tmp_path / "wal/n1")[0]
    flip(path, 0)
    reader = Journal(tmp_path)
    [[chunk]] = reader.plan({}, {"n1": 10})
    with pytest.raises(JournalError, match=rf"{path} is damaged at offset 0: it doesn't begin with a journal schema"):
        list(reader.tables(chunk))
    assert list(reader.rows_of(chunk)) == written.rows(0, 10), "the batches need no schema"


def test_a_parquet_file_that_is_damaged(tmp_path: Path) -> None:
    written.write(tmp_path, [[10]])
    written.to_parquet(tmp_path, [10])
    path = next(tmp_path.glob("data/**/*.parquet"))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(JournalError, match=rf"{path} is damaged at offset 0: .*; `smqrt journal verify`"):
        list(Journal(tmp_path).rows({}, {"n1": 10}))


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 2}', '{"version": 1, "nodes": {"n1": 5}, "files": []}'])
def test_a_manifest_that_is_damaged(tmp_path: Path, text: str) -> None:
    (tmp_path / manifest.FILE).write_text(text)
    with pytest.raises(JournalError, match=rf"{tmp_path / manifest.FILE} can't be read: .*`smqrt journal verify`"):
        Journal(tmp_path).end()


# ---- any journal at all


@given(
    seed=st.integers(0, 10_000),
    cuts=st.lists(st.integers(1, 80), max_size=3),
    start=st.integers(0, 80),
    end=st.integers(0, 80),
    most=st.integers(1, 90),
)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_journal(
    tmp_path_factory: pytest.TempPathFactory, seed: int, cuts: list[int], start: int, end: int, most: int
) -> None:
    path = tmp_path_factory.mktemp("any")
    written.write(path, written.random_ends(random.Random(seed), 80))
    if cuts:
        written.to_parquet(path, sorted(set(cuts)), group_rows=5)
    if seed % 2 and cuts:
        written.drop_compacted(path)
    journal = Journal(path)
    plan = journal.plan({"n1": start}, {"n1": end}, max_rows=most)
    assert read(journal, plan) == written.rows(start, end)
    assert journal.end() == {"n1": 80}
