"""Merging: small compacted files become large ones, and whoever reads meanwhile finds every row once, in its order."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from smqrt.errors import JournalError
from smqrt.journal import compact, manifest, parquet_files, segment
from smqrt.journal.compact import CompactOptions
from smqrt.journal.manifest import DataFile
from smqrt.journal.planning import Filter
from smqrt.journal.reader import Journal
from smqrt.journal.record import Row
from smqrt.journal.verification import verify
from tests.journal.killed import compact_killed_at
from tests.journal.sensor_rows import NOON_US, readings, row, write

APART, MERGED = CompactOptions(grace_s=0, everything=True, merge_bytes=0), CompactOptions(grace_s=0, everything=True)
HOUR_US = 3_600_000_000


def rows_of(journal: Path, **options: Any) -> list[Row]:
    reader = Journal(journal)
    return list(reader.rows(reader.begin(), reader.end(), **options))


def files_of(journal: Path) -> list[DataFile]:
    return list(manifest.load(journal).all_files())


def listed(journal: Path) -> list[str]:
    return sorted(file.path for file in files_of(journal))


def on_disk(journal: Path) -> list[str]:
    return sorted(str(path.relative_to(journal)) for path in (journal / "data").rglob("*") if path.is_file())


def small_files(journal: Path, hours: int, a_file: int = 50, an_hour: int = 6) -> list[Row]:
    """Compacts some times an hour, as a hub with little traffic does; returns the rows."""
    step_us = HOUR_US // an_hour // a_file
    rows = [*readings(hours * an_hour * a_file, step_us=step_us)]
    for first in range(0, len(rows), a_file):
        write(journal, rows[first : first + a_file])
        compact.compact(journal, APART)
    assert len(files_of(journal)) == hours * an_hour
    return rows


def test_hours_and_days_become_files(tmp_path: Path) -> None:
    # from noon on: twelve hours of a day, three of the next
    rows = small_files(tmp_path, hours=15, a_file=20, an_hour=3)
    now_us = NOON_US + 15 * HOUR_US - 1
    groups = list(parquet_files.merge_groups(files_of(tmp_path), now_us, 128 << 20, lambda one, other: True))
    assert [len(group) for group in groups] == [36, 3, 3]
    assert parquet_files.settled_below(files_of(tmp_path), now_us) == groups[1][0].first
    assert compact.compact(tmp_path, MERGED).merged == 45
    assert listed(tmp_path) == on_disk(tmp_path)
    folders = [Path(file.path).parent.as_posix() for file in files_of(tmp_path)]
    null = "hour=__HIVE_DEFAULT_PARTITION__"
    assert folders == [f"data/date=2026-11-20/{null}", f"data/date=2026-11-21/{null}"]
    assert rows_of(tmp_path) == rows
    assert not verify(tmp_path).faults
    assert compact.compact(tmp_path, MERGED).merged == 0
    assert manifest.load(tmp_path).settled == {"n1": len(rows)}
    assert list((tmp_path / parquet_files.RETIRED).iterdir()) == []


def test_what_is_settled_is_not_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_files(tmp_path, hours=2)
    compact.compact(tmp_path, MERGED)
    monkeypatch.setattr(parquet_files, "_period", None)
    assert compact.compact(tmp_path, MERGED).merged == 0


def test_files_stay_small_enough_and_large_ones_stay(tmp_path: Path) -> None:
    rows = small_files(tmp_path, hours=2, a_file=500)
    most = 3 * max(file.bytes for file in files_of(tmp_path))
    for _ in range(4):
        compact.compact(tmp_path, CompactOptions(grace_s=0, merge_bytes=most))
    assert 3 <= len(files_of(tmp_path)) <= 6
    assert all(file.bytes <= most for file in files_of(tmp_path))
    assert rows_of(tmp_path) == rows
    before = listed(tmp_path)
    compact.compact(tmp_path, CompactOptions(grace_s=0, merge_bytes=most))
    assert listed(tmp_path) == before


def test_groups_are_sorted_by_topic_and_read_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_files, "MAX_GROUP_ROWS", 1 << 13)
    rows = [row(seq, NOON_US + seq, f"t{seq * 7919 % 100:02}", b"x" * (seq % 50)) for seq in range(21_000)]
    for first in range(0, len(rows), 7000):
        write(tmp_path, rows[first : first + 7000], batch=1000, segment_rows=7000)
        compact.compact(tmp_path, APART)
    compact.compact(tmp_path, MERGED)
    (file,) = files_of(tmp_path)
    opened = pq.ParquetFile(tmp_path / file.path)
    assert opened.num_row_groups == 3
    for group in range(3):
        topics = opened.read_row_group(group, ["topic"]).column("topic").to_pylist()
        assert topics == sorted(topics)
    assert rows_of(tmp_path) == rows
    reader, chance = Journal(tmp_path), random.Random(3)
    for _ in range(5):
        start = chance.randrange(len(rows))
        end = chance.randrange(start, len(rows)) + 1
        plan = reader.plan({"n1": start}, {"n1": end}, max_rows=chance.randrange(100, 14_000))
        batches = [batch for part in plan for chunk in part for batch in reader.tables(chunk, ["seq"])]
        assert [seq for batch in batches for seq in batch.column("seq").to_pylist()] == list(range(start, end))
    wanted = [one for one in rows if one.topic == "t07"]
    assert rows_of(tmp_path, topics=Filter(["t07"])) == wanted


def test_groups_without_a_wanted_topic_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_files, "MAX_GROUP_ROWS", 6000)
    rows = [row(seq, NOON_US + seq, "early" if seq < 7000 else "late", b"x") for seq in range(14_000)]
    write(tmp_path, rows, batch=1000, segment_rows=14_000)
    compact.compact(tmp_path, APART)
    reader, read = Journal(tmp_path), list[tuple[int, ...]]()
    read_row_group = pq.ParquetFile.read_row_group

    def counted(self: Any, group: int, columns: list[str]) -> Any:
        read.append((group, len(columns)))
        return read_row_group(self, group, columns)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    [[chunk]] = reader.plan({}, {"n1": 14_000})
    assert sum(batch.num_rows for batch in reader.tables(chunk, ["seq", "payload"], ["late"])) == 7000
    assert read == [(0, 1), (1, 1), (1, 3), (2, 1), (2, 3)]


def test_typed_columns_are_kept_and_different_columns_not_merged(tmp_path: Path) -> None:
    typed = CompactOptions(
        grace_s=0, everything=True, merge_bytes=0, schemas={"#": "temp double, location struct<lat: double>"}
    )
    rows = [*readings(400)]
    for first, options in ((0, typed), (100, typed), (200, APART), (300, APART)):
        write(tmp_path, rows[first : first + 100])
        compact.compact(tmp_path, options)
    before = [pq.read_table(tmp_path / file.path).column("json") for file in files_of(tmp_path)[:2]]
    assert compact.compact(tmp_path, MERGED).merged == 4
    first, second = files_of(tmp_path)
    table = pq.ParquetFile(tmp_path / first.path).read().sort_by("seq")
    assert table.column("json").to_pylist() == [one for column in before for one in column.to_pylist()]
    assert "json" not in pq.read_schema(tmp_path / second.path).names
    assert rows_of(tmp_path) == rows


def test_several_nodes_and_brokers(tmp_path: Path) -> None:
    for node in ("n1", "n2"):
        for at in range(3):
            write(tmp_path, readings(50, first=at * 50), node=node, broker=f"hub{at}")
            compact.compact(tmp_path, APART)
    compact.compact(tmp_path, MERGED)
    assert [(file.node, file.rows) for file in files_of(tmp_path)] == [("n1", 150), ("n2", 150)]
    reader = Journal(tmp_path)
    [part] = reader.plan({}, {"n1": 150})
    brokers = [one for chunk in part for batch in reader.tables(chunk) for one in batch.column("broker").to_pylist()]
    assert brokers == [f"hub{at}" for at in range(3) for _ in range(50)]


def test_readers_in_the_middle_go_on(tmp_path: Path) -> None:
    rows = small_files(tmp_path, hours=2)
    reader = Journal(tmp_path)
    plan = reader.plan({}, reader.end(), max_rows=100)
    half = [one for part in plan[:3] for chunk in part for one in reader.rows_of(chunk)]
    kept = CompactOptions(grace_s=60, everything=True)
    compact.compact(tmp_path, kept)
    assert len(list((tmp_path / parquet_files.RETIRED).iterdir())) == 12
    third = [one for part in plan[3:5] for chunk in part for one in reader.rows_of(chunk)]
    for path in (tmp_path / parquet_files.RETIRED).iterdir():
        os.utime(path, (0, time.time() - 61))
    compact.compact(tmp_path, kept)
    assert list((tmp_path / parquet_files.RETIRED).iterdir()) == []
    rest = [one for part in plan[5:] for chunk in part for one in reader.rows_of(chunk)]
    assert half + third + rest == rows


def test_a_damaged_file_is_not_merged(tmp_path: Path) -> None:
    small_files(tmp_path, hours=1)
    path = tmp_path / files_of(tmp_path)[2].path
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    path.write_bytes(data)
    before = listed(tmp_path)
    write(tmp_path, readings(10), node="n2", segment_rows=5)
    compact.compact(tmp_path, CompactOptions(grace_s=0, everything=True, max_group_bytes=1, merge_bytes=0))
    for _ in range(2):
        with pytest.raises(JournalError, match=rf"{path} can't be merged: .*`smqrt journal verify`"):
            compact.compact(tmp_path, MERGED)
        assert listed(tmp_path) == on_disk(tmp_path)
    assert [name for name in listed(tmp_path) if "/n1-" in name] == before
    assert len(listed(tmp_path)) == len(before) + 1
    assert manifest.load(tmp_path).settled == {}


def test_a_file_that_expires_meanwhile(tmp_path: Path) -> None:
    small_files(tmp_path, hours=1)
    (tmp_path / files_of(tmp_path)[0].path).unlink()
    with pytest.raises(JournalError, match="can't be compacted: Failed to open .*run the compaction again"):
        compact.compact(tmp_path, MERGED)


def test_killed_at_every_step_the_journal_reads_the_same(tmp_path: Path) -> None:
    """On top of what the run before left behind, each time one step later."""
    rows = small_files(tmp_path, hours=13, a_file=3, an_hour=3)
    for step in range(1, 200, 3):
        code = compact_killed_at(step, tmp_path, CompactOptions(grace_s=0, everything=True))
        assert rows_of(tmp_path) == rows, f"killed at step {step}"
        if code == 0:
            break
    assert (code, step > 5) == (0, True)
    assert listed(tmp_path) == on_disk(tmp_path)
    assert len(files_of(tmp_path)) == 2
    assert not verify(tmp_path).faults


def test_small_messages_cost_at_most_three_tenths_extra(tmp_path: Path) -> None:
    """A message of 128 random bytes a minute: half a day of 72 files of ten rows each."""
    chance = random.Random(1)
    rows = [
        row(seq, NOON_US - 12 * HOUR_US + seq * 60_000_000, f"site/{seq % 5}", chance.randbytes(128), uid=f"d{seq % 5}")
        for seq in range(720)
    ]
    write(tmp_path, rows, batch=1, segment_rows=10)
    compact.compact(tmp_path, CompactOptions(grace_s=0, everything=True, max_group_bytes=1, merge_bytes=0))
    apart = sum(file.bytes for file in files_of(tmp_path))
    assert len(files_of(tmp_path)) == 72
    assert compact.compact(tmp_path, MERGED).merged == 72
    payload = 128 * len(rows)
    assert sum(path.stat().st_size for path in (tmp_path / "data").rglob("*.parquet")) <= 1.3 * payload
    assert apart > 4 * payload
    assert segment.paths(tmp_path / "wal" / "n1") == []
    assert rows_of(tmp_path) == rows


def test_files_of_the_present_hour_are_not_merged(tmp_path: Path) -> None:
    now_us = time.time_ns() // 1000
    for first in (0, 10):
        write(tmp_path, [row(seq, now_us) for seq in range(first, first + 10)])
        assert compact.compact(tmp_path, MERGED).merged == 0
    assert len(files_of(tmp_path)) == 2
    assert manifest.load(tmp_path).settled == {}
