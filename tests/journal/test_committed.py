"""Committed batches of all nodes, in snapshots and behind them; staged results, which have a limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from smqrt.errors import ArgumentError, JournalError
from smqrt.journal import committed, manifest
from smqrt.journal.commit import encode
from smqrt.journal.committed import StagedResults
from tests.journal import sensor_rows

PART = f"{7:016x}.0"


def test_of_too_many_queries_the_longest_silent_are_removed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(committed, "MAX_QUERIES", 3)
    known = committed.CommittedBatches({"a": 1, "b": 2, "c": 3})
    known.add("a", 2)
    for number, query in enumerate("de"):
        known.add(query, number)
    assert known.all() == {"a": 2, "d": 0, "e": 1}
    assert (len(known), known.forgotten, known.last("b")) == (3, 2, -1)
    assert len(committed.CommittedBatches({str(query): 0 for query in range(9)})) == 3
    told = [record.message for record in caplog.records if "limit reached" in record.message]
    assert len(told) == 2, "once for each journal"


def test_a_snapshot_saved_late_hides_no_commit(tmp_path: Path) -> None:
    """Two hubs that were killed at once, one after the other: the third stored a micro-batch again."""
    rows = [sensor_rows.row(seq, txn="q:3" if seq == 15 else None) for seq in range(40)]
    sensor_rows.write(tmp_path, rows, batch=5, segment_rows=10)
    committed.save_snapshot(tmp_path / "wal" / "n1", {"q": 2}, through=10)
    assert committed.last_batches(tmp_path) == {"q": 3}


def test_a_snapshot_of_an_older_version_is_read(tmp_path: Path) -> None:
    sensor_rows.write(tmp_path, [sensor_rows.row(seq, txn="q:3" if seq == 35 else None) for seq in range(40)], 5, 10)
    (tmp_path / "wal" / "n1" / committed.COMMITS_FILE).write_text('{"q": 2, "r": 7}')
    assert committed.last_batches(tmp_path) == {"q": 3, "r": 7}


def test_the_last_batch_of_each_query_is_known() -> None:
    known = committed.CommittedBatches({"a": 1})
    assert (known.last("a"), known.last("b")) == (1, -1)
    known.merge({"a": 0, "b": 4})
    known.add("a", 2)
    assert known.all() == {"b": 4, "a": 2}
    assert list(known.all()) == ["b", "a"]
    assert (len(known), known.forgotten) == (2, 0)


def test_commits_of_other_nodes_are_read_once(tmp_path: Path) -> None:
    others = committed.OtherNodes(tmp_path, "n1")
    rows = [sensor_rows.row(seq, txn=f"q:{seq}") for seq in range(4)]
    sensor_rows.write(tmp_path, rows, batch=2, node="n1")
    assert not others.exist()
    assert others.new_commits() == {}
    sensor_rows.write(tmp_path, rows, batch=1, node="n2")
    assert others.exist()
    assert others.new_commits() == {"q": 3}
    assert others.new_commits() == {}
    sensor_rows.write(tmp_path, [sensor_rows.row(4, txn="r:1"), sensor_rows.row(5)], batch=1, node="n2")
    assert others.new_commits() == {"r": 1}
    committed.save_snapshot(tmp_path / "wal" / "n2", {"s": 9}, through=6)
    assert others.new_commits() == {"s": 9}
    assert others.new_commits() == {}


def test_commits_before_a_number_are_left_out(tmp_path: Path) -> None:
    rows = [sensor_rows.row(seq, txn=f"q{seq // 2}:{seq}" if seq < 6 else None) for seq in range(8)]
    sensor_rows.write(tmp_path, rows, batch=2)
    [path] = (tmp_path / "wal" / "n1").glob("*.arrows")
    assert committed.batches_of_segment(path) == {"q0": 1, "q1": 3, "q2": 5}
    assert committed.batches_of_segment(path, 2) == {"q1": 3, "q2": 5}
    assert committed.batches_of_segment(path, 3) == {"q2": 5}
    assert committed.batches_of_segment(path, 6) == {}


def test_the_later_of_both_snapshots_counts(tmp_path: Path) -> None:
    folder = tmp_path / "wal" / "n1"
    folder.mkdir(parents=True)
    assert committed.load_snapshot(folder) == {}
    committed.save_snapshot(folder, {"q": 2, "r": 7}, through=10)
    manifest.write_json(tmp_path / committed.COMMITS_FILE, {"q": 3, "r": 1, "s": 0})
    assert committed.load_snapshot(folder) == {"q": 3, "r": 7, "s": 0}


def test_a_row_of_a_damaged_batch_is_no_commit(tmp_path: Path) -> None:
    sensor_rows.write(tmp_path, [sensor_rows.row(seq, txn=f"q:{seq}") for seq in range(3)], batch=1)
    [path] = (tmp_path / "wal/n1").glob("*.arrows")
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    assert committed.last_batches(tmp_path) == {"q": 1}


@pytest.mark.parametrize("text", ["no", "[3]", '{"q": "x"}', '{"q": null}'])
def test_a_damaged_snapshot_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "wal/n1" / committed.COMMITS_FILE
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(JournalError, match=r"n1/txn\.json is damaged .*; remove it: it is rebuilt"):
        committed.last_batches(tmp_path)


def test_segments_from_a_snapshot_on_have_its_later_commits(tmp_path: Path) -> None:
    """Also the one in whose middle it ends; those before are not read."""
    rows = [sensor_rows.row(seq, txn=f"q{seq // 10}:{seq}") for seq in range(40)]
    sensor_rows.write(tmp_path, rows, batch=5, segment_rows=10)
    folder = tmp_path / "wal/n1"
    for through, known in ((0, range(4)), (10, range(1, 4)), (19, range(1, 4)), (40, range(3, 4))):
        committed.save_snapshot(folder, {"s": 1}, through)
        assert committed.last_batches(tmp_path) == {"s": 1} | {f"q{at}": 10 * at + 9 for at in known}


def test_a_journal_that_was_moved_has_no_commits(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        committed.last_batches(tmp_path / "journal")


# ---- staged results


@pytest.mark.parametrize("part", ["", "0123456789abcdef", "0123456789abcdef.", "0123456789abcdef.1234567", "../x.1", 5])
def test_a_wrong_name_of_a_part_is_refused(part: object) -> None:
    for right in ("0123456789abcdef.0", "0123456789abcdef.123456"):
        assert committed.checked_part(right) == right
    with pytest.raises(ArgumentError, match="is not the name of a part"):
        committed.checked_part(part)


def test_uncommittable_parts_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committed, "MAX_STAGED_BYTES", 3 * committed.MIN_PART_BYTES)
    (tmp_path / "wal").mkdir()
    waiting = StagedResults(tmp_path, {"done": 5}.get)  # type: ignore[arg-type]
    rows = encode([(b"t", None, b"x")])
    for query, batch in (("done", 5), ("sealed", 0), ("old", 0)):
        waiting.put(query, batch, PART, rows)
    waiting.seal("sealed", 0, [PART])
    for query, batch in (("sealed", 0), ("old", 0)):
        os.utime(tmp_path / committed.STAGED_FOLDER / query / str(batch), (0, 0))
    waiting = StagedResults(tmp_path, {"done": 5, "sealed": -1, "old": -1}.__getitem__)
    with pytest.raises(JournalError, match="of uncommitted results"):
        waiting.put("new", 0, PART, bytes(3 * committed.MIN_PART_BYTES))
    assert waiting.open("sealed", 0, PART).read() == rows, "half of it may be published"
    left = {path.parent.name for path in (tmp_path / committed.STAGED_FOLDER).glob("*/[0-9]*")}
    assert left == {"sealed"}


def test_a_journal_that_was_moved_is_not_made_anew(tmp_path: Path) -> None:
    waiting = StagedResults(tmp_path / "journal", lambda query: -1)
    with pytest.raises(JournalError, match="can't be written"):
        waiting.put("q", 0, PART, b"x")
    assert not (tmp_path / "journal").exists()


def test_forgotten_parts_are_those_up_to_a_batch(tmp_path: Path) -> None:
    (tmp_path / "wal").mkdir()
    waiting = StagedResults(tmp_path, lambda query: -1)
    for batch in (1, 2, 3):
        waiting.put("q", batch, PART, b"rows")
    waiting.forget("q", 2)
    assert [path.name for path in (tmp_path / committed.STAGED_FOLDER / "q").iterdir()] == ["3"]
    waiting.forget("q", 3)
    assert list((tmp_path / committed.STAGED_FOLDER).iterdir()) == []
    waiting.forget("q", 3)


def test_a_small_part_counts_as_16_kib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (committed.MIN_PART_BYTES, committed.MAX_STAGED_BYTES, committed.MAX_PARTS) == (16 << 10, 2 << 30, 10_000)
    monkeypatch.setattr(committed, "MAX_STAGED_BYTES", 40 << 10)
    (tmp_path / "wal").mkdir()
    waiting = StagedResults(tmp_path, lambda query: -1)
    waiting.put("q", 0, PART, b"x")
    waiting.put("q", 1, PART, bytes(24 << 10))
    for again in (waiting, StagedResults(tmp_path, lambda query: -1)):
        with pytest.raises(JournalError, match="limit reached"):
            again.put("q", 2, PART, b"x")
    assert waiting.open("q", 0, PART).read() == b"x"


def test_sealed_parts_stay_those_of_the_first_call(tmp_path: Path) -> None:
    (tmp_path / "wal").mkdir()
    waiting, other = StagedResults(tmp_path, lambda query: -1), PART[:-1] + "9"
    for part in (PART, other):
        waiting.put("q", 0, part, b"x")
    assert waiting.seal("q", 0, [PART]) == [PART]
    assert waiting.seal("q", 0, [other]) == [PART]
    with pytest.raises(ArgumentError, match="is not staged"):
        waiting.seal("q", 1, [PART])
    with pytest.raises(ArgumentError, match="is not staged"):
        waiting.open("q", 1, PART)


def test_stale_parts_stay_while_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wal").mkdir()
    waiting = StagedResults(tmp_path, lambda query: 5)
    waiting.put("q", 5, PART, b"x")
    waiting.put("r", 0, PART, b"y")
    assert waiting.open("q", 5, PART).read() == b"x"
    monkeypatch.setattr(committed, "MAX_STAGED_BYTES", 3 * committed.MIN_PART_BYTES)
    waiting.put("r", 6, PART, b"z")
    assert waiting.open("q", 5, PART).read() == b"x", "exactly the limit"
    waiting.put("r", 7, PART, b"z")
    for query, batch in (("q", 5), ("r", 0)):
        with pytest.raises(ArgumentError, match="is not staged"):
            waiting.open(query, batch, PART)
    assert waiting.open("r", 6, PART).read() == b"z"
