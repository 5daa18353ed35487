"""The status of a query: from Spark's progress to the file, and back without Spark."""

from __future__ import annotations

import json
import platform
import threading
from pathlib import Path
from typing import Any

import pytest

from smqrt.pipeline import row_checks
from smqrt.pipeline import status as process
from smqrt.pipeline.row_checks import METRIC
from smqrt.pipeline.status import FILE, Status, StatusWriter, read, read_all


def progress(
    name: str = "per_minute", rows: int = 500, end: int = 900, latest: int = 1000, **more: Any
) -> dict[str, Any]:
    """The JSON of a StreamingQueryProgress as Spark 4.3 writes it, shortened."""
    source = {"description": "smq", "startOffset": {"n1": end - rows}, "endOffset": {"n1": end}}
    return {
        "id": "78e9f218-8055-4fd0-a8d8-df21c830e44b",
        "name": name,
        "timestamp": "2026-11-21T15:14:15.674Z",
        "batchId": 6,
        "batchDuration": 448,
        "numInputRows": rows,
        "inputRowsPerSecond": 2013.04,
        "processedRowsPerSecond": 4000.0,
        "eventTime": {"max": "2026-11-21T15:14:15.000Z", "watermark": "2026-11-21T15:14:05.000Z"},
        "stateOperators": [
            {"numRowsTotal": 2, "memoryUsedBytes": 1272, "numRowsDroppedByWatermark": 3},
            {"numRowsTotal": 40, "memoryUsedBytes": 1000},
        ],
        "sources": [{**source, "latestOffset": {"n1": latest}, "numInputRows": rows}],
    } | more


@pytest.fixture
def board(tmp_path: Path) -> StatusWriter:
    board = StatusWriter(tmp_path, lag_seconds=lambda name, ends: 2.5)
    board.starting("per_minute", "publish")
    return board


def told(board: StatusWriter, tmp_path: Path, name: str = "per_minute") -> Status:
    status = read(tmp_path / name)
    assert status in board.statuses()
    assert status is not None
    return status


def test_batch_reports(board: StatusWriter, tmp_path: Path) -> None:
    assert told(board, tmp_path).state == "starting"
    board.started("78e9", "per_minute")
    board.progressed(progress())
    status = told(board, tmp_path)
    assert (status.state, status.kind, status.query_id) == ("running", "publish", "78e9")
    assert (status.batch, status.batch_ms, status.rows, status.rows_per_s) == (6, 448, 500, 2013.0)
    assert (status.processed_rows_per_s, status.dropped_by_watermark) == (4000.0, 3)
    assert (status.offset, status.lag_rows, status.lag_s) == ({"n1": 900}, 100, 2.5)
    assert (status.state_rows, status.state_bytes) == (42, 2272)
    assert status.watermark == "2026-11-21T15:14:05.000Z"
    assert 0 < status.since <= status.updated


def test_rows_add_up_and_a_batch_without_rows_waits(board: StatusWriter, tmp_path: Path) -> None:
    board.progressed(progress(end=900))
    board.progressed(progress(rows=100, end=1000))
    assert told(board, tmp_path).rows == 600
    board.progressed(progress(rows=0, end=1000, inputRowsPerSecond=0.0, processedRowsPerSecond=0.0, eventTime={}))
    status = told(board, tmp_path)
    assert (status.state, status.rows_per_s, status.lag_rows, status.lag_s) == ("waiting", 0.0, 0, 0.0)
    assert status.watermark == "2026-11-21T15:14:05.000Z"


def test_idle_has_no_lag(board: StatusWriter, tmp_path: Path) -> None:
    board.started("78e9", "per_minute")
    board.progressed(progress())
    board.idle("78e9")
    status = told(board, tmp_path)
    assert (status.state, status.lag_rows, status.rows_per_s) == ("waiting", 0, 0.0)


def test_a_first_batch_has_no_rate_of_coming(board: StatusWriter, tmp_path: Path) -> None:
    board.progressed({key: value for key, value in progress().items() if key != "inputRowsPerSecond"})
    assert told(board, tmp_path).rows_per_s == 4000.0


def test_lag_over_nodes_and_sources(board: StatusWriter, tmp_path: Path) -> None:
    one = {"endOffset": {"n1": 5, "n2": 7}, "latestOffset": {"n1": 9, "n2": 7, "n3": 3}}
    as_text = {"endOffset": json.dumps({"n1": 8}), "latestOffset": json.dumps({"n1": 10})}
    foreign = {"endOffset": 6, "latestOffset": 9, "description": "rate"}
    unlike = {"endOffset": "not json", "latestOffset": {"topic": {"0": 5}}}
    board.progressed(progress(sources=[one, as_text, foreign, unlike]))
    assert told(board, tmp_path).lag_rows == 4 + 3 + 2


def test_the_age_is_read_rarely_at_the_slowest_source(tmp_path: Path) -> None:
    asked: list[tuple[str, dict[str, int]]] = []
    board = StatusWriter(tmp_path, lag_seconds=lambda name, ends: asked.append((name, ends)) or 1.0)
    board.starting("per_minute", "publish")
    one = {"endOffset": {"n1": 5}, "latestOffset": {"n1": 9}}
    two = {"endOffset": {"n1": 3, "n2": 1}, "latestOffset": {"n1": 9, "n2": 1}}
    for _ in range(3):
        board.progressed(progress(sources=[one, two]))
    assert asked == [("per_minute", {"n1": 3, "n2": 1})]
    assert told(board, tmp_path).lag_s == 1.0, "the last known age stays"


def test_a_watermark_before_the_first_row_is_none(board: StatusWriter, tmp_path: Path) -> None:
    board.progressed(progress(eventTime={"watermark": "1970-01-01T00:00:00.000Z"}))
    assert told(board, tmp_path).watermark == ""


def test_counters_reach_the_file_with_the_next_progress(board: StatusWriter, tmp_path: Path) -> None:
    board.add_published("per_minute", 3)
    board.add_published("per_minute", 4)
    board.add_published("stranger", 1)
    board.progressed(progress())
    assert told(board, tmp_path).published == 7


def test_what_spark_counted_while_rows_passed(board: StatusWriter, tmp_path: Path) -> None:
    """The names of the metrics are those under which the pipeline observes."""
    json_metric = {row_checks.json_observation("readings"): {"bad_json": 1, "wrong_type": 2}}
    ahead = {row_checks.future_observation("readings"): {row_checks.FUTURE: 5}}
    board.progressed(
        progress(observedMetrics=json_metric | ahead | {METRIC + "readings": {"rows": 9, "0:temp < 80": 3}})
    )
    board.progressed(
        progress(observedMetrics=json_metric | {METRIC + "good": {"rows": 9, "0:temp < 80": 1, "1:ok": 0}})
    )
    board.progressed(progress(observedMetrics={}))
    status = told(board, tmp_path)
    assert (status.bad_json, status.wrong_type, status.future) == (2, 4, 5)
    assert status.expectations == {"temp < 80": 4, "ok": 0}


@pytest.mark.parametrize("state", ["finished", "stopped", "failed"])
def test_the_end_is_the_last_word(board: StatusWriter, tmp_path: Path, state: str) -> None:
    board.ended("per_minute", state, "the hub went away" if state == "failed" else "")
    board.progressed(progress())  # Spark tells of the last batch after the query has ended
    board.idle("78e9")
    status = read(tmp_path / "per_minute")
    assert status is not None
    assert (status.state, status.error) == (state, "the hub went away" if state == "failed" else "")
    assert (status.batch, status.rows, status.rows_per_s) == (6, 500, 0.0)
    assert process.running(tmp_path / "per_minute") is None


def test_the_reader_reports_an_ended_process(board: StatusWriter, tmp_path: Path) -> None:
    board.progressed(progress())
    (tmp_path / "per_minute" / "pid").write_text(f"99999999 1 {platform.node()}\n")
    status = read(tmp_path / "per_minute")
    assert status is not None
    assert (status.state, status.rows_per_s, status.rows) == ("dead", 0.0, 500)


def test_status_of_processes_on_other_machines_is_trusted(board: StatusWriter, tmp_path: Path) -> None:
    board.progressed(progress())
    (tmp_path / "per_minute" / "pid").write_text("99999999 1 other.example\n")
    status = read(tmp_path / "per_minute")
    assert status is not None
    assert status.state == "running"


def test_all_queries_by_name(board: StatusWriter, tmp_path: Path) -> None:
    board.starting("hot", "alert")
    (tmp_path / "never-ran").mkdir()
    (tmp_path / "file").touch()
    assert [status.name for status in read_all(tmp_path)] == ["hot", "per_minute"]
    assert read_all(tmp_path / "nowhere") == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"kind": "publish"}', "null"])
def test_a_damaged_file_is_no_status(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    assert read(tmp_path) is None


def test_a_file_of_a_later_version_is_read(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"name": "hot", "state": "stopped", "invented": 1}')
    assert read(tmp_path) == Status("hot", state="stopped")


def test_progress_of_foreign_queries_is_ignored(board: StatusWriter, tmp_path: Path) -> None:
    board.progressed(progress("stranger"))
    board.started("1", "stranger")
    board.idle("1")
    assert [status.name for status in read_all(tmp_path)] == ["per_minute"]


def test_readers_never_see_half_a_file(board: StatusWriter, tmp_path: Path) -> None:
    over = threading.Event()

    def write() -> None:
        for _ in range(300):
            board.progressed(progress())
        over.set()

    threading.Thread(target=write).start()
    while not over.is_set():
        assert read(tmp_path / "per_minute") is not None


def test_status_comes_from_the_spark_listener(spark: Any, tmp_path: Path) -> None:
    """A real query: its name, batches, watermark and state arrive through the listener."""
    board = StatusWriter(tmp_path)
    unwatch = board.watch(spark)
    board.starting("ticks", "publish")
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
    counts = rows.withWatermark("timestamp", "1 second").groupBy("timestamp").count()
    writer = counts.writeStream.queryName("ticks").outputMode("update").foreachBatch(lambda batch, _: batch.collect())
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    arrived = threading.Event()
    while not (status := read(tmp_path / "ticks")) or status.batch < 1:
        assert query.isActive, query.exception()
        arrived.wait(0.05)
    query.stop()
    unwatch()
    board.ended("ticks", "stopped")
    assert status.query_id == query.id
    assert (status.state, status.kind) == ("running", "publish")
    assert status.rows >= 10
    assert status.state_rows >= 1
    assert status.watermark.startswith("19") or status.watermark == ""
