"""`spark.readStream.format("smq")`: every row once, in batches of the size asked for, whatever happens to the files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smqrt.journal.compact import Options, compact
from smqrt.pipeline.smq_source.options import ReadOptions
from smqrt.pipeline.smq_source.stream import StreamReader
from tests.pipeline.recorded import START_US, STEP_US, Recorded, message, schema, values

Batches = list[list[Any]]
WAIT_S = 60


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    """500 rows in two segments of n1."""
    return Recorded(tmp_path / "journal").add(300).seal().add(200).seal()


def stream(spark: Any, recorded: Recorded, columns: str | None = None, **options: str) -> Any:
    reader = spark.readStream.format("smq").options(**{"startingOffsets": "earliest"} | options)
    return (reader.schema(columns) if columns else reader).load(str(recorded.path))


def drained(frame: Any, checkpoint: Path, between: Callable[[int], None] | None = None) -> Batches:
    """Runs a stream until it has everything that is there; returns the rows of each micro-batch that has some."""
    batches: Batches = []

    def keep(one: Any, number: int) -> None:
        batches.append(one.collect())
        if between:
            between(number)

    writer = frame.writeStream.foreachBatch(keep).option("checkpointLocation", str(checkpoint))
    query = writer.trigger(availableNow=True).start()
    try:
        assert query.awaitTermination(WAIT_S)
    finally:
        query.stop()
    return list(filter(None, batches))


def seqs(batches: Batches) -> list[list[int]]:
    return [sorted(row.seq for row in batch) for batch in batches]


def test_everything_that_is_there_then_what_came_since(spark: Any, recorded: Recorded, tmp_path: Path) -> None:
    frame, checkpoint = stream(spark, recorded), tmp_path / "checkpoint"
    first = drained(frame, checkpoint)
    assert values(first[0]) == values(recorded.rows)
    recorded.add(70)
    assert seqs(drained(frame, checkpoint)) == [list(range(500, 570))]
    assert drained(frame, checkpoint) == []


def test_a_limit_of_rows_makes_batches_of_that_size(spark: Any, recorded: Recorded, tmp_path: Path) -> None:
    batches = seqs(drained(stream(spark, recorded, maxRowsPerTrigger="150"), tmp_path / "checkpoint"))
    assert batches == [list(range(first, min(first + 150, 500))) for first in range(0, 500, 150)]


def test_a_stream_begins_at_the_end_unless_told_otherwise(spark: Any, recorded: Recorded, tmp_path: Path) -> None:
    frame = spark.readStream.format("smq").load(str(recorded.path))
    assert drained(frame, tmp_path / "checkpoint") == []
    recorded.add(5)
    assert seqs(drained(frame, tmp_path / "checkpoint")) == [[500, 501, 502, 503, 504]]


def test_a_stream_begins_at_a_time(spark: Any, recorded: Recorded, tmp_path: Path) -> None:
    from datetime import UTC, datetime

    time = datetime.fromtimestamp((START_US + 480 * STEP_US) / 1e6, UTC).isoformat()
    frame = spark.readStream.format("smq").option("startingTime", time).load(str(recorded.path))
    assert seqs(drained(frame, tmp_path / "checkpoint")) == [list(range(480, 500))]


def test_topics_and_narrower_columns(spark: Any, recorded: Recorded, tmp_path: Path) -> None:
    frame = stream(spark, recorded, "seq bigint, topic string", topics="site1/d7")
    [rows] = drained(frame, tmp_path / "checkpoint")
    assert sorted(map(tuple, rows)) == [(seq, "site1/d7") for seq in range(7, 500, 10)]


def test_no_batch_reaches_over_a_split(spark: Any, recorded: Recorded, tmp_path: Path) -> None:
    options = {"splitAt": json.dumps({"n1": 320}), "maxRowsPerTrigger": "200"}
    batches = seqs(drained(stream(spark, recorded, **options), tmp_path / "checkpoint"))
    assert [batch[0] for batch in batches] == [0, 200, 320]
    assert sum(batches, []) == list(range(500))


def test_a_node_that_comes_later_is_read_from_its_beginning(spark: Any, recorded: Recorded, tmp_path: Path) -> None:
    frame = stream(spark, recorded)
    drained(frame, tmp_path / "checkpoint")
    Recorded(recorded.path, "n2", first_seq=20).add(10)
    [rows] = drained(frame, tmp_path / "checkpoint")
    assert sorted((row.node, row.seq) for row in rows) == [("n2", seq) for seq in range(20, 30)]


def test_progress_is_told_to_the_journal(spark: Any, recorded: Recorded, tmp_path: Path) -> None:
    """Up to the batch before the latest one, which Spark would repeat after a crash."""
    frame = stream(spark, recorded, queryName="averages", maxRowsPerTrigger="250")
    drained(frame, tmp_path / "checkpoint")
    report = json.loads((recorded.path / "readers" / "averages.json").read_text())
    assert (report["query"], report["offset"]) == ("averages", {"n1": 250})


def test_how_much_is_waiting_is_known(spark: Any, recorded: Recorded, tmp_path: Path) -> None:
    frame = stream(spark, recorded, maxRowsPerTrigger="100")
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint"))
    query = writer.trigger(availableNow=True).start()
    assert query.awaitTermination(WAIT_S)
    source = query.recentProgress[0]["sources"][0]
    assert json.loads(source["endOffset"] if isinstance(source["endOffset"], str) else json.dumps(source["endOffset"]))
    assert "500" in str(source["latestOffset"])
    query.stop()


def test_rows_that_are_gone_end_the_query_with_a_sentence(spark: Any, recorded: Recorded, tmp_path: Path) -> None:
    drained(stream(spark, recorded), tmp_path / "checkpoint")
    shutil.rmtree(recorded.path)
    other = Recorded(recorded.path).add(10)
    with pytest.raises(Exception, match="Node n1 ends at row 10, but rows to 500 had been there.*failOnDataLoss"):
        drained(stream(spark, other), tmp_path / "checkpoint")
    assert drained(stream(spark, other, failOnDataLoss="false"), tmp_path / "checkpoint") is not None
    other.add([message(10)])
    assert seqs(drained(stream(spark, other, failOnDataLoss="false"), tmp_path / "checkpoint"))[-1] == [10]


def test_compaction_amidst_a_stream_loses_and_doubles_nothing(spark: Any, recorded: Recorded, tmp_path: Path) -> None:
    def compacted(number: int) -> None:
        if number in (0, 2):
            recorded.add(100).seal()
            compact(recorded.path, Options(everything=True, grace_s=0))

    frame = stream(spark, recorded, maxRowsPerTrigger="170")
    batches = drained(frame, tmp_path / "checkpoint", compacted) + drained(frame, tmp_path / "checkpoint")
    assert values(sum(batches, [])) == values(recorded.rows)
    assert not list(recorded.folder.glob("*.arrows"))


def test_a_task_whose_segment_was_compacted_since_it_was_planned(recorded: Recorded) -> None:
    options = ReadOptions.parse({"path": str(recorded.path), "topics": "site1/#", "rowsPerPartition": "130"})
    reader = StreamReader(options, schema("seq"))
    parts = reader.partitions({"n1": 0}, {"n1": 500})
    compact(recorded.path, Options(everything=True, grace_s=0))
    assert not list(recorded.folder.glob("*.arrows"))
    found = [seq for part in parts for batch in reader.read(part) for seq in batch.column("seq").to_pylist()]
    assert found == list(range(500))


def test_an_option_for_batches_is_a_mistake(spark: Any, recorded: Recorded, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="endingOffsets and endingTime are for read: a stream has no end"):
        drained(stream(spark, recorded, endingOffsets="latest"), tmp_path / "checkpoint")
