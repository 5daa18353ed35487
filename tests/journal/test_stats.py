"""Figures of a journal."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from smqrt.journal import compact, readers
from smqrt.journal.inspection import journal_stats
from smqrt.journal.reader import Journal
from tests.journal.sensor_rows import NOON_US, readings, row, write


def test_an_empty_journal(tmp_path: Path) -> None:
    found = journal_stats(Journal(tmp_path))
    assert (found.rows, found.segments, found.first_us, found.rate, found.topics) == (0, 0, None, 0.0, {})
    assert found.as_fields()["first"] is None


@pytest.mark.parametrize("compacted", [False, True])
def test_figures(tmp_path: Path, compacted: bool) -> None:
    rows = write(tmp_path, [row(seq, NOON_US + seq * 10_000, f"t{seq % 3}") for seq in range(3000)])
    rows += write(tmp_path, [row(3000, NOON_US + 30_000_000, None)])
    if compacted:
        compact.compact(tmp_path, compact.CompactOptions(grace_s=0))
    found = journal_stats(Journal(tmp_path))
    assert (found.rows, found.offsets) == (3001, {"n1": (0, 3001)})
    assert (found.first_us, found.last_us, found.rate) == (NOON_US, NOON_US + 30_000_000, 100.033)
    assert found.topics == {"t0": 1000, "t1": 1000, "t2": 1000, "": 1}
    assert (found.segments, found.files) == ((1, 1) if compacted else (4, 0))
    on_disk = sum(path.stat().st_size for path in tmp_path.glob("data/*/*/*.parquet"))
    assert found.file_bytes == on_disk
    assert 0 < found.segment_bytes <= sum(path.stat().st_size for path in tmp_path.glob("wal/n1/*.arrows"))
    assert found.as_fields()["last"] == "2026-11-20T12:00:30.000000Z"


def test_how_far_behind_queries_are(tmp_path: Path) -> None:
    write(tmp_path, readings(100))
    write(tmp_path, readings(50), node="n2")
    readers.save_report(tmp_path, {"query": "fast", "name": "fast", "offset": {"n1": 100, "n2": 50}, "time_us": 0})
    readers.save_report(tmp_path, {"query": "slow", "name": "slow", "offset": {"n1": 30}, "time_us": 0})
    assert journal_stats(Journal(tmp_path)).readers == {"fast": 0, "slow": 120}
    assert journal_stats(Journal(tmp_path)).stale_readers == {}
    for query in ("fast", "slow"):
        os.utime(tmp_path / "readers" / f"{query}.json", (1_795_000_000, 1_795_000_000))
    assert journal_stats(Journal(tmp_path)).stale_readers == {"slow": "2026-11-18T11:06:40.000000Z"}


def test_topics_are_counted_without_pyarrow_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, readings(1000))
    with_it = journal_stats(Journal(tmp_path)).topics
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert journal_stats(Journal(tmp_path)).topics == with_it
    assert journal_stats(Journal(tmp_path), count_topics=False).topics is None
