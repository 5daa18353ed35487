"""After a power failure Spark's checkpoint may be older than what the hub or a table has: no number of a micro-batch is
given to other rows.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow
import pytest

from smqrt.pipeline import checkpoint
from smqrt.pipeline.checkpoint import PublishGate
from smqrt.pipeline.sinks import CommitClient, PublishSink, TableSink


class Frame:
    """Three messages of a micro-batch."""

    sparkSession = SimpleNamespace(sparkContext=SimpleNamespace(getLocalProperty=lambda name: "id"))

    def toArrow(self) -> Any:
        return pyarrow.table({"topic": ["t"] * 3, "subtopic": [None] * 3, "payload": [b"x"] * 3})


@pytest.fixture
def query(tmp_path: Path) -> Path:
    query = tmp_path / "state" / "q"
    (query / "checkpoint" / "offsets").mkdir(parents=True)
    (query / "checkpoint" / "metadata").write_text('{"id": "id"}')
    for batch in (2, 3):
        text = "\n".join(["v1", "{}", json.dumps({"n1": batch * 10})])
        (query / "checkpoint" / "offsets" / str(batch)).write_text(text)
    return query


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files and folders that the disk was told to keep."""
    told: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: told.append(os.readlink(f"/proc/self/fd/{fd}")))
    return told


def test_the_hub_gets_only_rows_that_are_synced(query: Path, synced: list[str]) -> None:
    seen: list[set[str]] = []

    def commit(name: str, batch: int, rows: Any) -> int:
        seen.append(set(synced))
        return len(rows)

    sink = PublishSink(
        cast("CommitClient", SimpleNamespace(commit=commit, fitting=list, retry_s=1)), PublishGate(query, None)
    )
    sink(cast("Any", Frame()), 3)
    assert sink.error is None
    assert seen == [seen[0]]
    assert _missing(query, seen[0]) == []


def test_a_table_gets_only_rows_that_are_synced(query: Path, synced: list[str]) -> None:
    seen: list[set[str]] = []
    table = SimpleNamespace(append=lambda *_: seen.append(set(synced)))
    TableSink(cast("Any", table), query)(cast("Any", Frame()), 3)
    assert _missing(query, seen[0]) == []


def test_what_is_decided_for_good_has_its_name_synced(tmp_path: Path, synced: list[str]) -> None:
    checkpoint.write_json(tmp_path / "start.json", {})
    assert synced[-1] == str(tmp_path)
    synced.clear()
    checkpoint.write_json(tmp_path / "start.json", {}, sync=False)
    assert synced == []


def _mended(query: Path) -> dict[str, str]:
    checkpoint.repair(query, -1)
    place = query / "checkpoint"
    return {str(path.relative_to(place)): path.read_text() for path in place.rglob("*") if path.is_file()}


def test_what_is_torn_is_done_again(query: Path) -> None:
    place = query / "checkpoint"
    (place / "commits").mkdir()
    for batch in (2, 3):
        (place / "commits" / str(batch)).write_text('v1\n{"nextBatchWatermarkMs":0}')
    whole = _mended(query)
    assert len(whole) == 5
    (place / "offsets" / ".4.1b-2c.tmp").touch()
    (place / "offsets" / "..4.1b-2c.tmp.crc").touch()
    (place / "offsets" / "4").touch()
    (place / "offsets" / ".4.crc").touch()
    assert checkpoint.repair(query, 4) == "", "the table has it"
    assert (place / "offsets" / "4").exists()
    assert "micro-batch 4" in checkpoint.repair(query, 3)
    assert _mended(query) == whole
    (place / "commits" / "3").write_text("v1\n{")
    assert set(whole) - set(_mended(query)) == {"commits/3"}, "its offsets are whole"
    (place / "offsets" / "2").write_text("")
    assert set(whole) - set(_mended(query)) == {"commits/3"}, "it is done"
    (place / "metadata").write_text("")
    assert _mended(query) == {}
    assert not checkpoint.exists(query)


def test_a_failed_first_micro_batch_begins_again(query: Path) -> None:
    place = query / "checkpoint"
    (place / "state" / "0").mkdir(parents=True)
    (place / "state" / "0" / "x").touch()
    for batch in (2, 3):
        (place / "offsets" / str(batch)).unlink()
    (place / "offsets" / "0").write_text("v1\n{")
    assert list(_mended(query)) == ["metadata"]


def _missing(query: Path, synced: set[str]) -> list[str]:
    place = query / "checkpoint"
    wanted = [place / "offsets" / "3", place / "offsets", place / "metadata", place, query, query.parent]
    return [str(path) for path in wanted if str(path) not in synced]
