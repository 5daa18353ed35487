"""`spark.readStream.format("smq")`: every row once, in batches of the size asked for, whatever happens to the files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes

from smqrt.errors import ArgumentError
from smqrt.journal import planning
from smqrt.journal.compact import CompactOptions, compact
from smqrt.journal.reader import Chunk, Journal
from smqrt.pipeline.smq_source import scan
from smqrt.pipeline.smq_source.options import ReadOptions
from smqrt.pipeline.smq_source.reading import StreamReader
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
    """Run a stream until it has everything that is there; returns the rows of each micro-batch that has some."""
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


def test_a_stream_begins_at_the_end_by_default(spark: Any, recorded: Recorded, tmp_path: Path) -> None:
    frame = spark.readStream.format("smq").load(str(recorded.path))
    assert drained(frame, tmp_path / "checkpoint") == []
    recorded.add(5)
    assert seqs(drained(frame, tmp_path / "checkpoint")) == [[500, 501, 502, 503, 504]]


def test_missing_rows_end_the_query_with_an_error(spark: Any, recorded: Recorded, tmp_path: Path) -> None:
    drained(stream(spark, recorded), tmp_path / "checkpoint")
    shutil.rmtree(recorded.path)
    other = Recorded(recorded.path).add(10)
    with pytest.raises(Exception, match="Node n1 ends at row 10, but had rows up to 500.*failOnDataLoss"):
        drained(stream(spark, other), tmp_path / "checkpoint")
    assert drained(stream(spark, other, failOnDataLoss="false"), tmp_path / "checkpoint") is not None
    other.add([message(10)])
    assert seqs(drained(stream(spark, other, failOnDataLoss="false"), tmp_path / "checkpoint"))[-1] == [10]


def test_compaction_amidst_a_stream_loses_and_doubles_nothing(spark: Any, recorded: Recorded, tmp_path: Path) -> None:
    def compacted(number: int) -> None:
        if number in (0, 2):
            recorded.add(100).seal()
            compact(recorded.path, CompactOptions(everything=True, grace_s=0))

    frame = stream(spark, recorded, maxRowsPerTrigger="170")
    batches = drained(frame, tmp_path / "checkpoint", compacted) + drained(frame, tmp_path / "checkpoint")
    assert values(sum(batches, [])) == values(recorded.rows)
    assert not list(recorded.folder.glob("*.arrows"))


def test_a_task_whose_segment_was_compacted_after_planning(recorded: Recorded) -> None:
    reader = Driven(recorded, "seq", topics="site1/#", rowsPerPartition="130").reader
    parts = reader.partitions({"n1": 0}, {"n1": 500})
    compact(recorded.path, CompactOptions(everything=True, grace_s=0))
    assert not list(recorded.folder.glob("*.arrows"))
    found = [seq for part in parts for batch in reader.read(part) for seq in batch.column("seq").to_pylist()]
    assert found == list(range(500))


# ---- the reader as Spark drives it, without Spark


class Driven:
    """Does what Spark does with a reader: offsets, tasks, commits.

    Args:
        recorded: the journal.
        columns: of the result; all by default.
        options: of the stream.
    """

    def __init__(self, recorded: Recorded, *columns: str, **options: str) -> None:
        given = CaseInsensitiveDict({"path": str(recorded.path), "startingOffsets": "earliest"} | options)
        if "startingTime" in options or "startingTimestamp" in options:
            del given["startingOffsets"]
        self.reader = StreamReader(ReadOptions.parse(given), schema(*columns))
        self.offset = self.reader.initialOffset()

    def batch(self) -> list[Any]:
        """Return the rows of the next micro-batch."""
        end = self.reader.latestOffset(self.offset, self.reader.getDefaultReadLimit())
        tables = [batch for part in self.reader.partitions(self.offset, end) for batch in self.reader.read(part)]
        self.offset = end
        return [row for table in tables for row in table.to_pylist()]

    def batches(self) -> list[list[int]]:
        """Return the seqs of all micro-batches until there are no more."""
        return [[row["seq"] for row in rows] for rows in iter(self.batch, [])]


def test_a_stream_begins_at_a_time(recorded: Recorded) -> None:
    time = datetime.fromtimestamp((START_US + 480 * STEP_US) / 1e6, UTC).isoformat()
    assert Driven(recorded, startingTime=time).batches() == [list(range(480, 500))]


def test_topics_and_narrower_columns(recorded: Recorded) -> None:
    rows = Driven(recorded, "topic", "seq", topics="site1/d7").batch()
    assert rows == [{"topic": "site1/d7", "seq": seq} for seq in range(7, 500, 10)]


def test_no_batch_reaches_over_a_split(recorded: Recorded) -> None:
    batches = Driven(recorded, splitAt=json.dumps({"n1": 320}), maxRowsPerTrigger="200").batches()
    assert [batch[0] for batch in batches] == [0, 200, 320]
    assert sum(batches, []) == list(range(500))


def test_a_later_node_is_read_from_its_beginning(recorded: Recorded) -> None:
    driven = Driven(recorded)
    assert len(driven.batch()) == 500
    Recorded(recorded.path, "n2", first_seq=20).add(10)
    assert [(row["node"], row["seq"]) for row in driven.batch()] == [("n2", seq) for seq in range(20, 30)]


def test_a_stream_by_the_names_of_kafkas_source(recorded: Recorded) -> None:
    at_ms = str((START_US + 200 * STEP_US) // 1000)
    driven = Driven(recorded, "seq", startingTimestamp=at_ms, maxOffsetsPerTrigger="130", minPartitions="4")
    parts = driven.reader.partitions({"n1": 200}, {"n1": 300})
    assert len(parts) == 4
    assert [(batch[0], batch[-1]) for batch in driven.batches()] == [(200, 329), (330, 459), (460, 499)]


def test_two_nodes_share_a_limit(recorded: Recorded) -> None:
    Recorded(recorded.path, "n2").add(500)
    rows = Driven(recorded, maxRowsPerTrigger="100").batch()
    assert sorted(row["node"] for row in rows) == ["n1"] * 50 + ["n2"] * 50


def size_bytes(journal: Journal, first: int, behind: int) -> int:
    chunks = [chunk for part in journal.plan({"n1": first}, {"n1": behind}) for chunk in part]
    return scan.memory_bytes(chunks)


def test_a_limit_of_bytes_makes_batches_of_that_size(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "journal")
    recorded.add((message(seq, payload=b"x" * 1000) for seq in range(1000)), batch=10).seal()
    recorded.add((message(seq, payload=b"x" * 10) for seq in range(1000, 2000)), batch=10)
    batches = Driven(recorded, "seq", maxBytesPerTrigger="200kB").batches()
    assert [seq for batch in batches for seq in batch] == list(range(2000))
    journal = Journal(recorded.path)
    assert max(size_bytes(journal, batch[0], batch[-1] + 1) for batch in batches) <= 220_000
    assert len(batches) < 20


def test_a_row_above_the_limit_is_sent_alone(recorded: Recorded) -> None:
    assert Driven(recorded, "seq", maxBytesPerTrigger="1").batches() == [[seq] for seq in range(500)]


def test_compacted_files_count_for_the_limit_of_bytes(recorded: Recorded) -> None:
    compact(recorded.path, CompactOptions(everything=True, grace_s=0))
    half = size_bytes(Journal(recorded.path), 0, 500) // 2
    batches = Driven(recorded, "seq", maxBytesPerTrigger=str(half)).batches()
    assert len(batches) in (2, 3)
    assert [seq for batch in batches for seq in batch] == list(range(500))


def test_without_a_limit_of_bytes_there_is_one(recorded: Recorded) -> None:
    assert Driven(recorded).reader.getDefaultReadLimit() == ReadMaxBytes(128 << 20)


def test_all_that_is_there_when_spark_asks_for_it(recorded: Recorded) -> None:
    driven = Driven(recorded, maxRowsPerTrigger="10", maxBytesPerTrigger="100")
    assert driven.reader.latestOffset(driven.offset, ReadAllAvailable()) == {"n1": 500}


def test_smaller_limits_make_smaller_tasks_of_a_checkpointed_batch(recorded: Recorded) -> None:
    driven = Driven(recorded, "seq", bytesPerPartition="10kB")
    parts = driven.reader.partitions({"n1": 0}, {"n1": 500})
    assert len(parts) == -(-size_bytes(Journal(recorded.path), 0, 500) // 10_000) > 3


def test_a_batch_is_planned_once(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []
    plan = Journal.plan
    monkeypatch.setattr(Journal, "plan", lambda *args, **keywords: planned.append(1) or plan(*args, **keywords))
    assert len(Driven(recorded).batch()) == 500
    assert len(planned) == 1


@pytest.mark.parametrize(
    ("rows", "payload_bytes", "options", "tasks"),
    [
        (500, 10, {}, 1),
        (40_000, 10, {}, 1),
        (70_000, 10, {}, 2),
        (140_000, 10, {}, 4),
        (500, 40_000, {}, 2),
        (500, 10, {"minPartitions": "3"}, 3),
        (2, 10, {"minPartitions": "3"}, 2),
        (500, 10, {"rowsPerPartition": "100"}, 5),
        (140_000, 10, {"parallelism": "1"}, 1),
        (8000, 9900, {"maxBytesPerTrigger": "40MB"}, 8),
    ],
)
def test_large_inputs_have_one_task_per_core(
    rows: int, payload_bytes: int, options: dict[str, str], tasks: int
) -> None:
    chunk = Chunk("f", "wal", 0, rows * (100 + payload_bytes), 0, rows, "n1", 0)
    given = ReadOptions.parse(CaseInsensitiveDict({"path": "/tmp/j", "parallelism": "4"} | options))
    assert len(planning.parts([chunk], scan.rows_per_task(given, [chunk]))) == tasks


def test_progress_is_reported_to_the_journal(recorded: Recorded) -> None:
    driven = Driven(recorded, queryName="averages", maxRowsPerTrigger="250")
    driven.batch()
    driven.reader.commit(driven.offset)
    report = json.loads((recorded.path / "readers" / "averages.json").read_text())
    assert (report["query"], report["offset"]) == ("averages", {"n1": 250})
    driven.batch()
    driven.reader.commit(driven.offset)
    driven.reader.stop()
    report = json.loads((recorded.path / "readers" / "averages.json").read_text())
    assert report["offset"] == {"n1": 500}


def test_without_a_name_no_progress_is_reported(recorded: Recorded) -> None:
    driven = Driven(recorded)
    driven.reader.commit(driven.offset)
    driven.reader.stop()
    assert not (recorded.path / "readers").exists()


def test_how_much_is_waiting_is_known(recorded: Recorded) -> None:
    driven = Driven(recorded, maxRowsPerTrigger="100")
    driven.batch()
    assert (driven.offset, driven.reader.reportLatestOffset()) == ({"n1": 100}, {"n1": 500})


def test_what_comes_after_available_now_has_begun_is_left(recorded: Recorded) -> None:
    driven = Driven(recorded, maxRowsPerTrigger="400")
    driven.reader.prepareForTriggerAvailableNow()
    recorded.add(50)
    assert sum(driven.batches(), []) == list(range(500))


def test_an_option_for_batches_is_a_mistake(recorded: Recorded) -> None:
    with pytest.raises(ArgumentError, match="endingOffsets and endingTime are for read: a stream has no end"):
        Driven(recorded, endingOffsets="latest")
