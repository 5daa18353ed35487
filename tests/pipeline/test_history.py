"""Spark reads what is compacted by itself, the source the rest: the same rows, whatever moves meanwhile."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pyarrow.parquet as pq
import pytest
from pyspark.errors import SparkRuntimeException
from pyspark.sql import functions as F

from smqrt.errors import ArgumentError, JournalError
from smqrt.journal import manifest, parquet_files, retention
from smqrt.journal.compact import CompactOptions, compact
from smqrt.journal.record import COLUMNS, Flag, Row
from smqrt.journal.settings import JournalSettings
from smqrt.pipeline import read_journal
from smqrt.pipeline.history import Shredder
from tests.journal.sensor_rows import NOON_US, row, write
from tests.pipeline.hubs import JournalingHub

HOUR_US = 3_600_000_000
NAMES = [column.name for column in COLUMNS]
FIELDS = "temp double, device string"


def readings(first: int, count: int, start_us: int = NOON_US) -> list[Row]:
    """Return rows of several topics: JSON, other texts, bytes; some to one client, some of pipelines."""
    made = []
    for seq in range(first, first + count):
        body = json.dumps({"device": f"d{seq % 4}", "temp": seq / 8, "n": seq}).encode()
        body = {3: b"no JSON", 5: b"\xff\x00", 7: b'{"temp": "hot", "device": 7}'}.get(seq % 11, body)
        topic = [f"site1/d{seq % 4}", "site2/a", "site1", "größe/°C\nx", None][seq % 5]
        flags = int(Flag.DIRECT) if topic is None else int(Flag.PIPELINE) * (seq % 6 == 0)
        txn = f"q:{seq}" if flags else None
        made.append(row(seq, start_us + (seq - first) * 1000, topic, body, flags=flags, uid=f"u{seq % 3}", txn=txn))
    return made


def compacted(path: Path, rows: Iterable[Row], node: str = "n1", **options: Any) -> None:
    write(path, rows, segment_rows=100, node=node)
    compact(path, CompactOptions(everything=True, grace_s=0, merge_bytes=0, **options))


@pytest.fixture(scope="module")
def journal(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two nodes; n1 has files of three hours that were made without a schema, with one, and with a larger one and a
    VARIANT, of which those of the second hour are joined; and a tail.
    """
    path = tmp_path_factory.mktemp("history") / "journal"
    compacted(path, readings(0, 150))
    typed = {"schemas": {"site1/#": "temp double, device string"}}
    for first in (150, 300):
        compacted(path, readings(first, 150, NOON_US + HOUR_US), **typed)
    compact(path, CompactOptions(everything=True, grace_s=0))
    grown = {"schemas": {"#": "temp double, device string, n bigint"}}
    with Shredder(path, spark) as shred:
        compacted(path, readings(450, 150, NOON_US + 2 * HOUR_US), **grown, shred=shred)
    compacted(path, readings(1000, 80), "n2", **grown)
    write(path, readings(600, 50, NOON_US + 3 * HOUR_US))
    write(path, readings(1080, 20), node="n2")
    return path


def rows(frame: Any, *more: str) -> list[Any]:
    """Return the rows as JSON, which any type can be compared as."""
    made = frame.select(*NAMES, *(F.to_json(F.struct(name)).alias(name) for name in more))
    return sorted(map(tuple, made.collect()), key=repr)


def source(spark: Any, path: Path, **options: str) -> Any:
    return spark.read.format("smq").options(**options).load(str(path))


def plan_of(frame: Any) -> str:
    frame.sparkSession.conf.set("spark.sql.maxMetadataStringLength", "10000")
    return str(frame._jdf.queryExecution().executedPlan().toString())


RANGES = [
    ({}, {}),
    ({"topics": ["site1/#", "größe/#"], "exclude": "site1/d2"}, {"topics": "site1/#,größe/#", "exclude": "site1/d2"}),
    ({"topics": ["+/a", "site1"], "include_pipeline": False}, {"topics": "+/a,site1", "includePipeline": "false"}),
    ({"exclude": ["+/d1", "site2/#"]}, {"exclude": "+/d1,site2/#"}),
    (
        {"start": '{"n1": 77, "n2": 1010}', "end": '{"n1": 460, "n2": 1090}'},
        {"startingOffsets": '{"n1": 77, "n2": 1010}', "endingOffsets": '{"n1": 460, "n2": 1090}'},
    ),
    (
        {"start": "2026-11-20T13:00:00.020", "end": "2026-11-20T14:00:00.010"},
        {"startingTime": "2026-11-20T13:00:00.020", "endingTime": "2026-11-20T14:00:00.010"},
    ),
    ({"start": "latest"}, {"startingOffsets": "latest"}),
]
"""What a range is called by `read_journal`, and by the source."""


@pytest.mark.parametrize(("given", "options"), RANGES, ids=str)
def test_the_rows_and_columns_are_those_of_the_source(spark: Any, journal: Path, given: Any, options: Any) -> None:
    frame, expected = read_journal(spark, journal, **given), source(spark, journal, **options)
    assert [(one.name, one.dataType) for one in frame.schema] == [(one.name, one.dataType) for one in expected.schema]
    assert rows(frame) == rows(expected)


def test_the_journal_of_the_test_has_all_there_is(journal: Path) -> None:
    files = [file for file in manifest.load(journal).all_files() if file.node == "n1"]
    assert [file.rows for file in files] == [150, 300, 150]
    assert [file.schemas for file in files] == [(), (("site1/#", FIELDS),), (("#", f"{FIELDS}, n bigint"),)]
    assert [file.variant for file in files] == [False, False, True]


def test_typed_columns_are_the_same_wherever_they_come_from(spark: Any, journal: Path) -> None:
    computed = spark.read.format("smq").schema(f"seq bigint, node string, json struct<{FIELDS}, n: bigint>")
    expected = {(one.node, one.seq): one.json for one in computed.load(str(journal)).collect()}
    frame = read_journal(spark, journal, json=f"{FIELDS}, n bigint")
    found = {(one.node, one.seq): one.json for one in frame.collect()}
    assert found == expected
    assert found["n1", 450 + 1].asDict() == {"temp": 451 / 8, "device": "d3", "n": 451}
    assert found["n1", 7 + 11 * 50].asDict() == {"temp": None, "device": "7", "n": None}
    assert found["n1", 3 + 11 * 50] is None


def test_files_with_other_fields_or_topics_are_not_typed(spark: Any, journal: Path) -> None:
    scanned = lambda **given: plan_of(read_journal(spark, journal, **given).select("json.temp"))  # noqa: E731
    assert "InMemoryFileIndex(2 paths)" in scanned(json=f"{FIELDS}, n bigint")
    assert "InMemoryFileIndex(3 paths)" in scanned(json=FIELDS, topics="site1/#")
    assert "InMemoryFileIndex(2 paths)" in scanned(json=FIELDS, topics="#")
    assert "FileScan" not in scanned(json="temp string")


def test_a_variant_is_read_or_made(spark: Any, journal: Path) -> None:
    frame = read_journal(spark, journal, variant=True)
    text = F.to_json("variant").alias("variant")
    made = F.to_json(F.try_parse_json(F.col("payload").cast("string"))).alias("made")
    found = frame.select(text, made).collect()
    assert len(found) == 750
    assert all(one.variant == one.made for one in found)
    assert sum(one.variant is not None for one in found) > 500
    only = read_journal(spark, journal, start='{"n1": 450, "n2": 1100}', end='{"n1": 600, "n2": 1100}', variant=True)
    assert "payload" not in plan_of(only.selectExpr("variant_get(variant, '$.temp', 'double')"))


def test_filters_and_fields_go_down_into_the_files(spark: Any, journal: Path) -> None:
    frame = read_journal(spark, journal, topics="site1/#", json=FIELDS, columns=["ts", "topic"])
    assert frame.columns == ["ts", "topic", "json"]
    plan = plan_of(frame.where("json.temp > 60").select("topic", "json.temp"))
    assert "GreaterThan(json.temp,60.0)" in plan
    assert "Or(EqualTo(topic,site1),StringStartsWith(topic,site1/))" in plan
    assert "ReadSchema: struct<topic:string,json:struct<temp:double>>" in plan
    assert (
        frame.where("json.temp > 60").count()
        == source(spark, journal, topics="site1/#")
        .where("try_cast(get_json_object(cast(payload as string), '$.temp') as double) > 60")
        .count()
    )


def test_rows_moved_after_planning_are_read_at_their_place(spark: Any, tmp_path: Path) -> None:
    for first in (0, 100, 200):
        compacted(tmp_path, readings(first, 100))
    write(tmp_path, readings(300, 50))
    frame, expected = read_journal(spark, tmp_path), rows(source(spark, tmp_path))
    assert compact(tmp_path, CompactOptions(everything=True, grace_s=0)).merged == 4
    parquet_files.remove_retired(tmp_path, 0)
    write(tmp_path, readings(350, 50))
    write(tmp_path, readings(0, 50), node="later")
    assert rows(frame) == expected
    rest = read_journal(spark, tmp_path, end='{"n1": 300, "later": 0}')
    retention.remove(tmp_path, [tmp_path / file.path for file in manifest.load(tmp_path).all_files()])
    assert list(tmp_path.glob("data/*/*/*.parquet")) == []
    assert rows(rest) == [one for one in expected if one[1] < 300]


def test_files_that_move_while_it_is_planned(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for first in (0, 100):
        compacted(tmp_path, readings(first, 100))
    hold, moves = retention.hold_files, [True]

    def moved(journal: Path, files: Any) -> list[Path]:
        if moves.pop() if moves else False:
            compact(journal, CompactOptions(grace_s=0))
        return hold(journal, files)

    monkeypatch.setattr(retention, "hold_files", moved)
    assert len(rows(read_journal(spark, tmp_path))) == 200


def test_missing_rows_are_an_error_by_default(spark: Any, tmp_path: Path) -> None:
    for first in (0, 100):
        compacted(tmp_path, readings(first, 100))
    oldest = next(manifest.load(tmp_path).all_files())
    retention.remove(tmp_path, [tmp_path / oldest.path])
    with pytest.raises(JournalError, match="Rows 50 to 99 of node n1 are gone"):
        read_journal(spark, tmp_path, start='{"n1": 50}')
    assert read_journal(spark, tmp_path, start='{"n1": 50}', fail_on_data_loss=False).count() == 100


def test_a_flipped_bit_is_reported_and_never_misread(spark: Any, tmp_path: Path) -> None:
    compacted(tmp_path, readings(0, 2000))
    (file,) = manifest.load(tmp_path).all_files()
    path = tmp_path / file.path
    whole, metadata = path.read_bytes(), pq.ParquetFile(path).metadata
    columns = [metadata.row_group(0).column(at) for at in range(metadata.num_columns)]
    payload = next(one for one in columns if one.path_in_schema == "payload")
    at = payload.data_page_offset + payload.total_compressed_size - 100
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(Exception, match=r"CRC checksum verification failed|could not verify page integrity"):
        read_journal(spark, tmp_path).select(F.sum(F.hash("payload"))).collect()
    path.write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
    with pytest.raises(JournalError, match="checksum of its footer is wrong"):
        read_journal(spark, tmp_path)


def test_file_uris_are_folders_and_wrong_columns_are_named(spark: Any, journal: Path) -> None:
    assert read_journal(spark, f"file://{journal}").count() == 750
    assert read_journal(spark, journal, columns=[]).count() == 750
    with pytest.raises(ArgumentError, match='no column "temperature"'):
        read_journal(spark, journal, columns=["temperature"])
    with pytest.raises(ArgumentError, match="not a type of JSON"):
        read_journal(spark, journal, json="temp decimal")


def test_a_journal_of_the_first_version(spark: Any, tmp_path: Path) -> None:
    with ZipFile(Path(__file__).parent.parent / "journal" / "journal_of_version_1.zip") as archive:
        archive.extractall(tmp_path)
    path = next(tmp_path.rglob("manifest.json")).parent
    frame = read_journal(spark, path)
    assert "FileScan parquet" in plan_of(frame)
    assert rows(frame) == rows(source(spark, path)) != []


def test_the_source_reads_the_journal_of_a_hub(spark: Any, tmp_path: Path) -> None:
    hub = JournalingHub(tmp_path / "app")
    try:
        sent = [("site1/a", '{"temp": 1.5}'), ("site2/a", "{}")]
        messages = spark.createDataFrame(sent, "topic string, payload string")
        messages.write.format("smq").mode("append").save(str(hub.journal))
        url, token = hub.announced["url"], hub.announced["token"]
        frame = read_journal(spark, url, token=token, topics="site1/#", json="temp double", variant=True)
        assert frame.selectExpr("json.temp", "variant_get(variant, '$.temp', 'double')").collect() == [(1.5, 1.5)]
    finally:
        hub.stop()


# ---- holding


def test_a_query_that_begins_too_late(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In time nothing of the guard is left in Spark's plan."""
    compacted(tmp_path, readings(0, 100))
    in_time = read_journal(spark, tmp_path)
    plan = in_time._jdf.queryExecution().optimizedPlan().toString()
    assert "Relation" in plan
    assert "raise_error" not in plan
    assert "subquery" not in plan
    monkeypatch.setattr(retention, "HOLD_S", 0.0)
    retention._remove_hold(retention._holds.pop(tmp_path))
    late = read_journal(spark, tmp_path, topics="site1/#")
    retention.release_links(tmp_path, time.time() + 2)
    with pytest.raises(SparkRuntimeException, match="twelve hours after it was planned.*call read_journal again"):
        late.collect()
    with pytest.raises(SparkRuntimeException, match="twelve hours after it was planned"):
        late.count()
    monkeypatch.undo()
    assert read_journal(spark, tmp_path).count() == 100


def links(journal: Path) -> int:
    return len(list(journal.glob("held/*/*.parquet")))


def test_links_of_a_process_that_was_killed_are_removed(tmp_path: Path) -> None:
    compacted(tmp_path, readings(0, 100))
    program = (
        "import sys, time; from pathlib import Path; from smqrt.journal import manifest, retention; "
        "journal = Path(sys.argv[1]); retention.hold_files(journal, list(manifest.load(journal).all_files())); "
        "print(flush=True); time.sleep(600)"
    )
    reader = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert reader.stdout is not None
        reader.stdout.readline()
        compact(tmp_path, CompactOptions(grace_s=0))
        assert links(tmp_path) == 1
    finally:
        reader.kill()
        reader.communicate()
    retention.release_held(tmp_path, JournalSettings(tmp_path, min_free_bytes=0), time.time_ns() // 1000)
    assert links(tmp_path) == 0


def test_links_are_removed_when_expired_or_disk_is_full(tmp_path: Path) -> None:
    compacted(tmp_path, readings(0, 100))
    files = list(manifest.load(tmp_path).all_files())
    first, full = retention.hold_files(tmp_path, files), JournalSettings(tmp_path, min_free_bytes=1 << 60)
    assert retention.hold_files(tmp_path, files) == first
    other = tmp_path / "held/99990101T000000Z-1-other" / first[0].name
    other.parent.mkdir()
    other.hardlink_to(first[0])
    with held_lock(other.parent):
        retention.release_held(tmp_path, full, time.time_ns() // 1000)
        assert links(tmp_path) == 2, "they take no room"
        retention.remove(tmp_path, [tmp_path / files[0].path])
        retention.release_held(tmp_path, JournalSettings(tmp_path, min_free_bytes=0), time.time_ns() // 1000)
        assert links(tmp_path) == 2, "there is room"
        retention.release_held(tmp_path, full, time.time_ns() // 1000)
        assert links(tmp_path) == 0
    retention.release_links(tmp_path, time.time() + retention.HOLD_S + 1)
    assert not first[0].parent.exists()


@contextmanager
def held_lock(folder: Path) -> Iterator[None]:
    """Holds a folder as another process would."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_expired_links_of_other_machines_are_removed(tmp_path: Path) -> None:
    compacted(tmp_path, readings(0, 100))
    retention.hold_files(tmp_path, list(manifest.load(tmp_path).all_files()))
    (folder,) = tmp_path.glob("held/*")
    (folder / ".lock").write_text("another")
    os.close(retention._holds.pop(tmp_path).lock)
    retention.release_links(tmp_path, time.time())
    assert links(tmp_path) == 1
    retention.release_links(tmp_path, time.time() + retention.HOLD_S + 1)
    assert links(tmp_path) == 0


def test_a_read_only_journal_is_read_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compacted(tmp_path, readings(0, 100))
    files = list(manifest.load(tmp_path).all_files())

    def refused(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    assert retention.hold_files(tmp_path, files) == [tmp_path / files[0].path]
