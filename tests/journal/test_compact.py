"""Compaction: same rows before, during and after, in files that other tools read, whatever kills it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from smqrt.errors import ArgumentError, JournalError
from smqrt.journal import committed, compact, manifest, parquet_files, recovery, segment, tables
from smqrt.journal.compact import CompactOptions, sealed
from smqrt.journal.reader import Journal
from smqrt.journal.record import Row
from smqrt.journal.settings import parse
from tests.journal.killed import compact_killed_at
from tests.journal.sensor_rows import NOON_US, readings, row, write

AT_ONCE = CompactOptions(grace_s=0, merge_bytes=0)
HOUR_US = 3_600_000_000


def rows_of(journal: Path) -> list[Row]:
    """All rows, as a reader finds them."""
    reader = Journal(journal)
    return list(reader.rows(reader.begin(), reader.end()))


def files_of(journal: Path) -> list[str]:
    return sorted(
        str(path.relative_to(journal)) for path in journal.rglob("*") if path.is_file() and "lock" not in path.name
    )


def test_rows_are_the_same_before_and_after(tmp_path: Path) -> None:
    odd = [
        row(4000, NOON_US + 4000, None, b"\xff\x00", tid=7, flags=1),
        row(4001, NOON_US + 4001, "a/ö", b"", subtopic="s", stid=9, uid=None, ptid=None),
    ]
    rows = write(tmp_path, readings(4000)) + write(tmp_path, odd)
    done = compact.compact(tmp_path, AT_ONCE)
    assert (done.segments, done.rows, done.files, done.removed, done.waiting) == (4, 4000, 2, 4, 0)
    assert rows_of(tmp_path) == rows
    assert done.payload_bytes == sum(len(one.payload) for one in rows[:4000])
    assert compact.compact(tmp_path, AT_ONCE) == compact.CompactResult()


def test_the_newest_segment_stays_unless_no_hub_runs(tmp_path: Path) -> None:
    rows = write(tmp_path, readings(100))
    assert compact.compact(tmp_path, AT_ONCE) == compact.CompactResult()
    held = segment.lock(tmp_path / "wal" / "n1")
    with pytest.raises(JournalError, match="is written by process"):
        compact.compact(tmp_path, CompactOptions(grace_s=0, everything=True))
    os.close(held)
    assert compact.compact(tmp_path, CompactOptions(grace_s=0, everything=True)).rows == 100
    assert segment.paths(tmp_path / "wal" / "n1") == []
    assert recovery.recover(tmp_path / "wal" / "n1").next_seq == 100
    assert rows_of(tmp_path) == rows


def test_one_file_an_hour_with_what_the_manifest_says(tmp_path: Path) -> None:
    write(tmp_path, readings(3000, step_us=3_000_000), broker="hall")
    write(tmp_path, [row(3000)])
    compact.compact(tmp_path, AT_ONCE)
    state = manifest.load(tmp_path)
    assert state.nodes == {"n1": 3000}
    assert [(file.path, file.first, file.last, file.rows) for file in state.files("n1")] == [
        ("data/date=2026-11-20/hour=12/n1-00000000000000000000-00000000000000001199.parquet", 0, 1199, 1200),
        ("data/date=2026-11-20/hour=13/n1-00000000000000001200-00000000000000002399.parquet", 1200, 2399, 1200),
        ("data/date=2026-11-20/hour=14/n1-00000000000000002400-00000000000000002999.parquet", 2400, 2999, 600),
    ]
    second = list(state.all_files())[1]
    assert (second.ts_min_us, second.ts_max_us) == (NOON_US + HOUR_US, NOON_US + 2 * HOUR_US - 3_000_000)
    assert second.bytes == (tmp_path / second.path).stat().st_size
    assert len(second.topics or ()) == 20
    table = pq.ParquetFile(tmp_path / second.path).read()
    assert table.schema.equals(tables.schema())
    assert set(table["node"].to_pylist()) == {"n1"}
    assert set(table["broker"].to_pylist()) == {"hall"}


def test_a_clock_set_back_makes_files_and_loses_nothing(tmp_path: Path) -> None:
    times = [0, 1, HOUR_US, HOUR_US + 1, 2, 3, HOUR_US + 2]
    rows = write(tmp_path, [row(seq, NOON_US + ts) for seq, ts in enumerate(times)])
    write(tmp_path, [row(7)])
    assert compact.compact(tmp_path, AT_ONCE).files == 4
    assert rows_of(tmp_path)[:7] == rows


def test_row_groups_have_at_most_64ki_rows_and_statistics(tmp_path: Path) -> None:
    write(
        tmp_path,
        [row(seq, NOON_US + seq, f"t{seq // 50_000}") for seq in range(70_000)],
        batch=1000,
        segment_rows=40_000,
    )
    write(tmp_path, [row(70_000)])
    compact.compact(tmp_path, AT_ONCE)
    (file,) = manifest.load(tmp_path).all_files()
    metadata = pq.ParquetFile(tmp_path / file.path).metadata
    groups = [metadata.row_group(at) for at in range(metadata.num_row_groups)]
    assert [group.num_rows for group in groups] == [65_536, 70_000 - 65_536]
    by_name = {groups[0].column(at).path_in_schema: groups[0].column(at) for at in range(metadata.num_columns)}
    assert (by_name["topic"].statistics.min, by_name["topic"].statistics.max) == ("t0", "t1")
    assert (by_name["seq"].statistics.min, by_name["seq"].statistics.max) == (0, 65_535)
    assert by_name["ts"].statistics.has_min_max
    assert {column.compression for column in by_name.values()} == {"ZSTD"}
    assert all(column.has_offset_index for column in by_name.values())
    assert all(column.has_column_index for name, column in by_name.items() if name != "payload")


def test_groups_are_bounded_by_bytes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_files, "MAX_GROUP_BYTES", 1 << 20)
    rows = write(tmp_path, [row(seq, NOON_US, "big", bytes(1 << 16)) for seq in range(40)], batch=4, segment_rows=20)
    write(tmp_path, [row(40)])
    compact.compact(tmp_path, AT_ONCE)
    (file,) = manifest.load(tmp_path).all_files()
    assert pq.ParquetFile(tmp_path / file.path).metadata.num_row_groups == 3
    assert rows_of(tmp_path)[:40] == rows


def test_many_topics_are_not_listed(tmp_path: Path) -> None:
    write(tmp_path, [row(seq, topic=f"t{seq}") for seq in range(65)])
    write(tmp_path, [row(65)])
    compact.compact(tmp_path, AT_ONCE)
    assert next(manifest.load(tmp_path).all_files()).topics is None


def test_several_nodes(tmp_path: Path) -> None:
    for node in ("n1", "n2"):
        write(tmp_path, readings(200), node=node, segment_rows=100)
    assert compact.compact(tmp_path, AT_ONCE).rows == 200
    assert manifest.load(tmp_path).nodes == {"n1": 100, "n2": 100}


def test_large_journals_are_done_in_groups(tmp_path: Path) -> None:
    rows = write(tmp_path, readings(1000), segment_rows=100)
    steps: list[str] = []
    compact.compact(tmp_path, CompactOptions(grace_s=0, max_group_bytes=100_000), steps.append)
    assert steps.count("switched") > 2
    assert rows_of(tmp_path) == rows


def test_a_group_has_segments_up_to_its_size(tmp_path: Path) -> None:
    write(tmp_path, [row(seq, payload=bytes(1000)) for seq in range(61)], segment_rows=10)
    size_bytes = segment.paths(tmp_path / "wal" / "n1")[0].stat().st_size
    for most, groups in ((2 * size_bytes, [20, 20, 20]), (3 * size_bytes - 1, [20, 20, 20]), (size_bytes, [10] * 6)):
        journal = shutil.copytree(tmp_path / "wal", tmp_path / f"{most}/wal").parent
        compact.compact(journal, CompactOptions(grace_s=0, merge_bytes=0, max_group_bytes=most))
        assert [file.rows for file in manifest.load(journal).all_files()] == groups


def test_typed_columns(tmp_path: Path) -> None:
    write(tmp_path, [*readings(50), row(50, NOON_US, "site1/x", b"odd"), row(51, NOON_US, "else", b'{"temp":1}')])
    write(tmp_path, [row(52)])
    schemas = {f"site{n}/#": "device string, temp double, location struct<lat: double>" for n in range(4)}
    compact.compact(tmp_path, CompactOptions(grace_s=0, schemas=schemas))
    (file,) = manifest.load(tmp_path).all_files()
    parsed = pq.ParquetFile(tmp_path / file.path).read()["json"].to_pylist()
    assert parsed[50:] == [None, None]
    assert set(parsed[0]) == {"device", "temp", "location"}
    assert isinstance(parsed[0]["location"]["lat"], float)
    assert len(rows_of(tmp_path)) == 53


def test_segments_stay_for_a_grace(tmp_path: Path) -> None:
    rows = write(tmp_path, readings(300), segment_rows=100)
    done = compact.compact(tmp_path, CompactOptions(grace_s=1000))
    assert (done.removed, done.waiting) == (0, 2)
    assert len(segment.paths(tmp_path / "wal" / "n1")) == 3
    assert rows_of(tmp_path) == rows
    for file in manifest.load(tmp_path).all_files():
        os.utime(tmp_path / file.path, (0, time.time() - 1001))
    done = compact.compact(tmp_path, CompactOptions(grace_s=1000))
    assert (done.segments, done.removed, done.waiting) == (0, 2, 0)
    assert rows_of(tmp_path) == rows


def test_what_is_young_waits(tmp_path: Path) -> None:
    write(tmp_path, readings(200), segment_rows=100)
    assert compact.compact(tmp_path, CompactOptions(grace_s=0, after_s=60)).rows == 0
    os.utime(segment.paths(tmp_path / "wal" / "n1")[0], (0, time.time() - 61))
    assert compact.compact(tmp_path, CompactOptions(grace_s=0, after_s=60)).rows == 100


def test_commits_of_pipelines_are_not_forgotten(tmp_path: Path) -> None:
    """A hub killed before it wrote its snapshot finds the last batches in the segments: they must be there."""
    write(tmp_path, [row(0, txn="q:3"), row(1, txn="q:4")])
    write(tmp_path, [row(2)])
    done = compact.compact(tmp_path, AT_ONCE)
    assert (done.rows, done.removed, done.waiting) == (2, 0, 1)
    folder = tmp_path / "wal" / "n1"
    assert recovery.recover(folder).txns == {"q": 4}
    manifest.write_json(tmp_path / "wal/n1" / committed.COMMITS_FILE, {"q": 4})
    assert compact.compact(tmp_path, AT_ONCE).removed == 1
    assert recovery.recover(folder).txns == {"q": 4}


def test_readers_lose_and_double_nothing_meanwhile(tmp_path: Path) -> None:
    """Without a grace, which is the worst that can happen to who is inside a segment."""
    rows = write(tmp_path, readings(3000, step_us=4_000_000), segment_rows=250)
    reader = Journal(tmp_path)
    end, read = reader.end(), 0
    options = CompactOptions(grace_s=0, max_group_bytes=100_000)
    thread = threading.Thread(target=lambda: compact.compact(tmp_path, options, lambda step: time.sleep(0.005)))
    thread.start()
    while thread.is_alive():
        assert list(reader.rows({"n1": 0}, end)) == rows
        assert [one for part in reader.plan({"n1": 777}, end, max_rows=100) for one in part]
        read += 1
    thread.join()
    assert read > 1
    assert list(reader.rows({"n1": 0}, end)) == rows
    assert len(segment.paths(tmp_path / "wal" / "n1")) == 1


def test_chunks_planned_before_are_read_after(tmp_path: Path) -> None:
    """What a micro-batch of Spark has planned means the same rows when its segments have gone."""
    rows = write(tmp_path, readings(3000))
    reader = Journal(tmp_path)
    planned = reader.plan({"n1": 500}, {"n1": 2500}, max_rows=300)
    compact.compact(tmp_path, AT_ONCE)
    read = [one for part in planned for chunk in part for one in Journal(tmp_path).rows_of(chunk)]
    assert read == rows[500:2500]


def test_what_is_completed_meanwhile_stays_for_the_next_run(tmp_path: Path) -> None:
    rows = write(tmp_path, readings(200), segment_rows=100)

    def goes_on(step: str) -> None:
        if step == "switched":
            rows.extend(write(tmp_path, [row(200), row(201)], segment_rows=1))

    done = compact.compact(tmp_path, AT_ONCE, goes_on)
    assert (done.rows, done.removed) == (100, 1)
    assert rows_of(tmp_path) == rows
    assert compact.compact(tmp_path, AT_ONCE).rows == 101


def test_what_another_run_left_goes(tmp_path: Path) -> None:
    """Also when it had grouped the segments in another way, so that no name comes again."""
    rows = write(tmp_path, readings(300), segment_rows=100)
    hour = tmp_path / "data" / "date=2026-11-20" / "hour=12"
    hour.mkdir(parents=True)
    for name in (".n1-00000000000000000000.tmp", ".n1-00000000000000000000.shred", "n1-0-49.parquet"):
        (hour / name).write_bytes(b"half")
    compact.compact(tmp_path, AT_ONCE)
    assert [path.name for path in hour.iterdir()] == ["n1-00000000000000000000-00000000000000000199.parquet"]
    assert rows_of(tmp_path) == rows


def test_a_hub_with_another_name_in_the_same_hour(tmp_path: Path) -> None:
    write(tmp_path, readings(100), broker="old")
    write(tmp_path, readings(100, first=100), broker="new")
    compact.compact(tmp_path, CompactOptions(grace_s=0, everything=True))
    (file,) = manifest.load(tmp_path).all_files()
    assert pq.ParquetFile(tmp_path / file.path).read()["broker"].to_pylist() == ["old"] * 100 + ["new"] * 100


def test_only_one_compacts(tmp_path: Path) -> None:
    write(tmp_path, readings(10))
    inside: list[str] = []

    def again(step: str) -> None:
        with pytest.raises(JournalError, match=f"is being compacted by process {os.getpid()}"):
            compact.compact(tmp_path)
        inside.append(step)

    compact.compact(tmp_path, CompactOptions(grace_s=0, everything=True), again)
    assert inside


@pytest.mark.parametrize("part", ["data", "index", "length"])
def test_a_damaged_segment_stays_and_is_named(tmp_path: Path, part: str) -> None:
    write(tmp_path, readings(300), segment_rows=100)
    path = segment.paths(tmp_path / "wal" / "n1")[1]
    if part == "data":
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
    elif part == "index":
        path.with_suffix(".idx").write_bytes(path.with_suffix(".idx").read_bytes()[:64])
    else:
        path.write_bytes(path.read_bytes()[:-100])
    before = files_of(tmp_path)
    with pytest.raises(JournalError, match=f"{path.name} can't be compacted: .* `smqrt journal verify`"):
        compact.compact(tmp_path, AT_ONCE)
    assert files_of(tmp_path) == before


def test_a_folder_that_is_no_journal(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="name the folder of a journal"):
        compact.compact(tmp_path / "nowhere")


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(JournalError, match=r"pip install 'smqrt\[spark\]'"):
        compact.compact(tmp_path)


def test_a_full_disk_is_said_and_the_segments_stay(tmp_path: Path) -> None:
    rows = write(tmp_path, readings(200), segment_rows=100)
    (tmp_path / "data").touch()  # no folder can be made in it
    with pytest.raises(JournalError, match="the segments are not changed"):
        compact.compact(tmp_path, AT_ONCE)
    (tmp_path / "data").unlink()
    assert rows_of(tmp_path) == rows
    assert compact.compact(tmp_path, AT_ONCE).rows == 100


# ---- killed

KILLED = CompactOptions(grace_s=0, max_group_bytes=150_000)


def test_killed_at_every_step_the_journal_reads_the_same(tmp_path: Path) -> None:
    """Each run is killed one step later than the one before, on top of what that left behind; none loses a row."""
    rows = write(tmp_path, readings(1200, step_us=6_000_000), segment_rows=300)
    for step in range(1, 100):
        code = compact_killed_at(step, tmp_path, KILLED)
        assert rows_of(tmp_path) == rows, f"killed at step {step}"
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert step > 5
    assert sum(file.rows for file in manifest.load(tmp_path).all_files()) == 900
    done = files_of(tmp_path)
    assert [name for name in done if name.startswith("data/")] == sorted(
        file.path for file in manifest.load(tmp_path).all_files()
    )
    assert len([name for name in done if name.startswith("wal/")]) == 2


def test_killed_at_one_step_and_run_again(tmp_path: Path) -> None:
    """From a fresh journal each time, since what is done is not done again."""
    step = 0
    while True:
        step += 1
        journal = tmp_path / str(step)
        rows = write(journal, readings(600, step_us=10_000_000), segment_rows=200)
        if compact_killed_at(step, journal, KILLED) == 0:
            break
        assert rows_of(journal) == rows
        compact.compact(journal, AT_ONCE)
        assert rows_of(journal) == rows
        listed = sorted(str(path.relative_to(journal)) for path in (journal / "data").rglob("*") if path.is_file())
        assert listed == sorted(file.path for file in manifest.load(journal).all_files())
        assert [sealed(journal / "wal" / "n1")] == [[]]
    assert step > 8


# ---- bars


def test_compacted_files_have_at_most_60_percent_of_payload(tmp_path: Path) -> None:
    write(tmp_path, readings(10_000, devices=500), segment_rows=5_000)
    done = compact.compact(tmp_path, CompactOptions(grace_s=0, everything=True))
    assert done.rows == 10_000
    assert done.file_bytes <= 0.6 * done.payload_bytes


def test_typed_columns_do_not_break_that_bar(tmp_path: Path) -> None:
    ddl: dict[str, Any] = {
        "#": "device string, temp double, humidity double, battery int, location struct<lat: double, lon: double>"
    }
    write(tmp_path, readings(10_000, devices=500), segment_rows=5_000)
    done = compact.compact(tmp_path, CompactOptions(grace_s=0, everything=True, schemas=ddl))
    assert done.file_bytes <= 0.6 * done.payload_bytes


def test_the_words_for_a_process_of_its_own(tmp_path: Path) -> None:
    def words(**settings: object) -> list[str]:
        parsed = parse({"compact": {"after": "5m", **settings}}, tmp_path)
        assert parsed
        return [word.replace(" ", ",") for word in compact.arguments(parsed)]

    start = ["journal", "compact", f"{tmp_path}/.journal", "--watch", "60s", "--after", "300s"]
    both = [*start, "--schema", "a/#=temp,double", "--json", "variant"]
    assert words(schema={"a/#": "temp double"}, json="variant") == both


def test_settings_of_compaction_that_are_wrong(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="journal.compact.schema: schema 'temp dubble': 'dubble' is not a type"):
        parse({"compact": {"schema": {"a/#": "temp dubble"}}}, tmp_path)


def test_a_result_counts_what_was_done(tmp_path: Path) -> None:
    assert set(astuple(compact.CompactResult())) == {0}
    rows = write(tmp_path, readings(400), segment_rows=100)
    read: list[int] = []
    done = compact.compact(tmp_path, CompactOptions(grace_s=0, merge_bytes=0), on_rows=read.append)
    [file] = manifest.load(tmp_path).all_files()
    assert (done.segments, done.rows, done.files, done.file_bytes) == (3, 300, 1, file.bytes)
    assert done.payload_bytes == sum(len(one.payload) for one in rows[:300])
    assert (done.removed, done.waiting, done.merged, sum(read)) == (3, 0, 0, 300)


def test_rows_to_compact_are_those_of_sealed_segments(tmp_path: Path) -> None:
    write(tmp_path, readings(250), segment_rows=100)
    assert compact.rows_to_compact(tmp_path) == 200
    assert compact.rows_to_compact(tmp_path, CompactOptions(everything=True)) == 250
    assert compact.rows_to_compact(tmp_path, CompactOptions(after_s=60)) == 0
    compact.compact(tmp_path, CompactOptions(grace_s=1000))
    assert compact.rows_to_compact(tmp_path) == 0


def test_the_steps_of_a_run_are_told_in_their_order(tmp_path: Path) -> None:
    write(tmp_path, readings(300, step_us=30_000_000), segment_rows=150)
    write(tmp_path, [row(300)])
    steps: list[str] = []
    compact.compact(tmp_path, CompactOptions(grace_s=0), steps.append)
    files = ["file", "file", "written", "named", "named", "named", "switched"]
    assert steps[:7] == files
    assert steps[7:11] == ["index removed", "removed"] * 2
