"""State beside Spark's checkpoint: positions, the last commit, and which ranges of the journal a table has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from smqrt.errors import ArgumentError, PipelineError
from smqrt.journal.reader import Journal
from smqrt.pipeline import checkpoint, tables
from smqrt.pipeline.api import Declaration
from smqrt.pipeline.checkpoint import PublishCommit, PublishGate, QueryStart
from tests.pipeline.recorded import START_US, STEP_US, Recorded, message


@pytest.fixture
def query(tmp_path: Path) -> Path:
    """`<state>/<name>` of a query that has not run."""
    return tmp_path / "q"


def begun(query: Path, batch: int, *ends: Any) -> None:
    """Writes the offsets of a micro-batch as Spark does: a line for each source, "-" for one without an offset."""
    path = checkpoint.folder(query) / "offsets" / str(batch)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["v1", "{}", *(end if isinstance(end, str) else json.dumps(end) for end in ends)]))


def completed(query: Path, batch: int) -> None:
    path = checkpoint.folder(query) / "commits" / str(batch)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('v1\n{"nextBatchWatermarkMs":0}')


def table(**options: Any) -> Declaration:
    given = {"mode": "append", "path": "t", "format": "parquet", "partition_by": ["day"], **options}
    return Declaration("q", "table", print, ("readings",), given, [], "p.py", 3)


# ---- the query


def test_a_table_keeps_its_path_format_and_partitions(query: Path) -> None:
    checkpoint.claim(query, table(), ["readings"])
    for change, told in (
        ({"path": "u"}, "path was t and is u."),
        ({"format": "delta"}, "format was parquet and is delta."),
        ({"partition_by": ["day", "hour"]}, "partition_by was day and is day, hour."),
    ):
        with pytest.raises(PipelineError) as caught:
            checkpoint.claim(query, table(**change), ["readings"])
        assert str(caught.value).endswith(f"rename the query, or run smqrt pipeline reset q: {told}")
    checkpoint.claim(query, table(), ["readings"])


def test_partitions_of_a_delta_table_are_checked_by_delta(query: Path) -> None:
    checkpoint.claim(query, table(format="delta"), ["readings"])
    checkpoint.claim(query, table(format="delta", partition_by=[]), ["readings"])


def test_tables_of_older_versions_are_plain_files(query: Path) -> None:
    old = {"kind": "table", "sources": ["readings"], "mode": "append", "path": "t"}
    checkpoint.write_json(query / "query.json", old)
    with pytest.raises(PipelineError, match="format was parquet and is delta"):
        checkpoint.claim(query, table(format="delta"), ["readings"])
    checkpoint.claim(query, table(), ["readings"])


COUNT = {"kind": "groupBy", "keys": ["k string"], "values": ["count(1) bigint"], "watermark": [], "rate": ""}
LARGEST = COUNT | {"values": ["max(n) int"]}


def test_another_state_is_refused_once_there_is_one(query: Path) -> None:
    checkpoint.claim_state(query, table(), [COUNT], "4.1.0")
    checkpoint.claim_state(query, table(), [LARGEST], "4.1.0")
    (checkpoint.folder(query) / "state").mkdir(parents=True)
    checkpoint.claim_state(query, table(), [COUNT], "4.1.0")
    (checkpoint.folder(query) / "metadata").write_text("{}")
    with pytest.raises(
        PipelineError, match=r"^p\.py:3: q: .* of another version .*count\(1\) bigint → max\(n\) int\. "
    ):
        checkpoint.claim_state(query, table(), [LARGEST], "4.1.3")
    checkpoint.claim_state(query, table(), [LARGEST], "4.2.0")
    with pytest.raises(PipelineError, match=r"max\(n\) int → count\(1\) bigint"):
        checkpoint.claim_state(query, table(), [COUNT], "4.2.0")


# ---- positions


@pytest.mark.parametrize(
    ("position", "error"),
    [
        ("7", ""),
        ("earliest", ""),
        ("2h", ""),
        ('{"n1": 0}', ""),
        ('{"n1": 1.5}', "offset"),
        ("{", "offset"),
        ("x", "--to"),
    ],
)
def test_a_position_is_checked_without_the_journal(position: str, error: str) -> None:
    if not error:
        checkpoint.check_position(position, "--to")
        return
    with pytest.raises((PipelineError, ArgumentError), match=error):
        checkpoint.check_position(position, "--to")


def test_a_range_ends_with_its_last_row_after_a_wrong_clock(tmp_path: Path) -> None:
    """Row 100 came when the clock was set back to the time of row 40."""
    rows = [message(seq)._replace(ts_us=START_US + (seq - 60 * (seq >= 100)) * STEP_US) for seq in range(120)]
    journal = Journal(Recorded(tmp_path / "j").add(rows).seal().path)
    at = "2026-11-21T15:00:00.050Z"
    assert checkpoint.offsets(journal, at) == {"n1": 50}
    assert checkpoint.offsets(journal, at, end=True) == {"n1": 110}
    assert checkpoint.offsets(journal, "latest") == {"n1": 120}


def test_a_number_before_the_first_row_is_the_first_row(tmp_path: Path) -> None:
    journal = Journal(Recorded(tmp_path / "j", first_seq=200).add(3).seal().path)
    assert checkpoint.offsets(journal, "150") == checkpoint.offsets(journal, "earliest") == {"n1": 200}
    assert checkpoint.offsets(journal, "201") == {"n1": 201}


def test_the_slowest_source_has_the_position(query: Path) -> None:
    assert checkpoint.committed_offsets(query) is None
    begun(query, 0, {"n1": 5, "n2": 9, "version": "x"}, "-", {"n1": 7, "n3": 1})
    begun(query, 1, {"n1": 8})
    completed(query, 0)
    assert checkpoint.committed_offsets(query) == {"n1": 5, "n2": 9, "n3": 1}
    assert checkpoint.committed_offsets(query, 1) == {"n1": 8}
    assert checkpoint.committed_offsets(query, 2) is None
    (checkpoint.folder(query) / "offsets" / ".2.tmp").touch()
    assert (checkpoint.last_batch(query), checkpoint.last_begun_batch(query)) == (0, 1)


def test_the_batch_under_way_has_a_beginning_and_an_end(query: Path) -> None:
    assert checkpoint.batch_under_way(query) is None
    checkpoint.replace_start(query, QueryStart({"n1": 2}, None))
    begun(query, 0, {"n1": 5}, {"n1": 6})
    assert checkpoint.batch_under_way(query) == ({"n1": 2}, {"n1": 6})
    completed(query, 0)
    assert checkpoint.batch_under_way(query) is None
    begun(query, 1, {"n1": 9, "n2": 4}, {"n1": 8})
    assert checkpoint.batch_under_way(query) == ({"n1": 5, "n2": 0}, {"n1": 9, "n2": 4})
    (checkpoint.folder(query) / "offsets" / "1").write_text("v1\n{}\n{")
    assert checkpoint.batch_under_way(query) is None


def test_a_source_without_an_offset_begins_with_the_query(query: Path) -> None:
    checkpoint.replace_start(query, QueryStart({"n1": 2}, None))
    begun(query, 0, {"n1": 5}, "-")
    begun(query, 1, {"n1": 9}, {"n1": 8})
    completed(query, 0)
    assert checkpoint.batch_under_way(query) == ({"n1": 2}, {"n1": 9})


# ---- the last commit


def test_a_commit_is_known_with_its_rows(query: Path) -> None:
    assert checkpoint.last_commit(query) is None
    checkpoint.replace_start(query, QueryStart({"n1": 2}, None))
    begun(query, 0, {"n1": 5})
    gate = PublishGate(query, None)
    gate.save_commit("id", 0)
    assert checkpoint.last_commit(query) == PublishCommit("id", 0, {"n1": 2}, {"n1": 5}, stateful=False)
    (checkpoint.folder(query) / "state").mkdir()
    begun(query, 1, {"n1": 9})
    gate.save_commit("id", 1)
    assert checkpoint.last_commit(query) == PublishCommit("id", 1, {"n1": 5}, {"n1": 9}, True, {"n1": 2})
    gate.save_commit("id", 7)
    assert checkpoint.last_commit(query) is None, "Spark's checkpoint doesn't have it"


def test_a_new_start_forgets_the_last_commit(query: Path) -> None:
    checkpoint.replace_start(query, QueryStart({"n1": 2}, {"n1": 4}, {"n1": 3}))
    begun(query, 0, {"n1": 5})
    PublishGate(query, None).save_commit("id", 0)
    assert checkpoint.saved_start(query) == QueryStart({"n1": 2}, {"n1": 4}, {"n1": 3})
    checkpoint.replace_start(query, None)
    assert (checkpoint.saved_start(query), checkpoint.last_commit(query)) == (None, None)


def test_windows_that_a_lost_checkpoint_had_closed_are_published(query: Path) -> None:
    """With the batch without rows at the split, which Spark makes for them."""
    begun(query, 0, {"n1": 10})
    begun(query, 1, {"n1": 10})
    assert [PublishGate(query, {"n1": 10}, {"n1": 8}).is_old(batch) for batch in (0, 1)] == [True, False]
    assert [PublishGate(query, {"n1": 10}, {"n1": 10}).is_old(batch) for batch in (0, 1)] == [True, True]
    assert [PublishGate(query, {"n1": 11}, {"n1": 8}).is_old(batch) for batch in (0, 1)] == [True, True]
    gate = PublishGate(query, None)
    assert (gate.rows(0), gate.rows(1)) == (10, 0)


# ---- ranges of a table


def test_a_table_has_the_ranges_of_its_folders(query: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = {str(tmp_path / "one"), str(tmp_path / "other")}
    monkeypatch.setattr(tables, "is_shown", lambda path: str(path) in there)
    assert (checkpoint.table_ranges(query), checkpoint.table_end(query)) == ({}, None)
    checkpoint.add_table_range(query, str(tmp_path / "one"), {"n1": 0}, {"n1": 5, "n2": 9})
    checkpoint.add_table_range(query, str(tmp_path / "other"), {"n1": 5}, {"n1": 8})
    checkpoint.add_table_range(query, str(tmp_path / "gone"), {"n1": 8}, {"n1": 99})
    checkpoint.add_table_range(query, "s3a://x/y", {"n1": 8}, {"n1": 7})
    assert [Path(name).name for name in checkpoint.written_ranges(query)] == ["one", "other", "y"]
    assert checkpoint.table_ranges(query)[str(tmp_path / "gone")] == ({"n1": 8}, {"n1": 99})
    assert checkpoint.table_end(query) == {"n1": 8, "n2": 9}


def test_a_stream_in_another_folder_has_another_start(query: Path) -> None:
    checkpoint.replace_start(query, QueryStart({"n1": 2}, None))
    assert (checkpoint.table_folder(query), checkpoint.start_offsets(query)) == (None, {"n1": 2})
    checkpoint.save_table_folder(query, "/t")
    assert (checkpoint.table_folder(query), checkpoint.start_offsets(query)) == ("/t", {"n1": 2})
    checkpoint.save_table_folder(query, "/t@1", {"n1": 40})
    checkpoint.save_table_folder(query, "/t@1")
    assert (checkpoint.table_folder(query), checkpoint.start_offsets(query)) == ("/t@1", {"n1": 40})


@pytest.mark.parametrize(
    ("start", "end", "other", "other_end", "overlaps", "covers"),
    [
        ({"n1": 0}, {"n1": 5}, {"n1": 5}, {"n1": 9}, False, False),
        ({"n1": 0}, {"n1": 6}, {"n1": 5}, {"n1": 9}, True, False),
        ({"n1": 0}, {"n1": 9}, {"n1": 5}, {"n1": 9}, True, True),
        ({"n1": 6}, {"n1": 9}, {"n1": 5}, {"n1": 9}, True, False),
        ({}, {"n1": 9}, {"n1": 5}, {}, True, True),
        ({}, {"n1": 5}, {"n1": 5}, {}, False, True),
        ({}, {"n1": 5}, {}, {"n2": 5}, True, False),
        ({}, {"n1": 5}, {"n1": 0, "n2": 5}, {"n1": 5, "n2": 5}, True, True),
    ],
)
def test_ranges_overlap_and_cover(
    start: dict[str, int],
    end: dict[str, int],
    other: dict[str, int],
    other_end: dict[str, int],
    overlaps: bool,
    covers: bool,
) -> None:
    """A node that is missing in the end of the other range is unlimited there, where they are compared for rows."""
    assert checkpoint.overlap(start, end, other, other_end) is overlaps
    assert checkpoint.covers(start, end, other, other_end) is covers


def test_an_offset_has_its_nodes_in_order() -> None:
    assert checkpoint.offset_text({"n2": 1, "n1": 2}) == '{"n1": 2, "n2": 1}'


def test_a_damaged_file_names_the_folder_to_remove(query: Path) -> None:
    query.mkdir()
    (query / "start.json").write_text("{")
    with pytest.raises(PipelineError, match=rf"start\.json can't be read .* remove the folder {query} to restart"):
        checkpoint.saved_start(query)
