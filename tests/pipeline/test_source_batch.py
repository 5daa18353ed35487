"""`spark.read.format("smq")` gives the rows that were recorded, and reads no more than it must."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F
from pyspark.sql.datasource import CaseInsensitiveDict, EqualTo, GreaterThanOrEqual, In, LessThan
from pyspark.sql.types import DoubleType, IntegerType, StringType, StructField, StructType

from smqrt.errors import ArgumentError, JournalError
from smqrt.journal.record import COLUMNS, Flag
from smqrt.pipeline.smq_source.options import ReadOptions
from smqrt.pipeline.smq_source.reading import BatchReader
from tests.pipeline.recorded import START_US, STEP_US, Recorded, direct, message, schema, values

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    """1000 rows in three segments of n1."""
    writer = Recorded(tmp_path / "journal")
    for rows in (400, 350, 250):
        writer.add(rows).seal()
    return writer


def load(spark: Any, recorded: Recorded, columns: str | None = None, **options: str) -> Any:
    reader = spark.read.format("smq").options(**options)
    return (reader.schema(columns) if columns else reader).load(str(recorded.path))


@contextmanager
def pushdown(spark: Any) -> Iterator[None]:
    spark.conf.set(PUSHDOWN, "true")
    try:
        yield
    finally:
        spark.conf.unset(PUSHDOWN)


def reader(recorded: Recorded, *columns: str, **options: str) -> BatchReader:
    """The reader as Spark's helper makes it."""
    given = CaseInsensitiveDict({"path": str(recorded.path)} | options)
    return BatchReader(ReadOptions.parse(given), schema(*columns))


def planned(one: BatchReader) -> int:
    """Count the rows that the tasks will look at."""
    return sum(chunk.rows for part in one.partitions() for chunk in getattr(part, "chunks", []))


def given(one: BatchReader) -> list[int]:
    """Return the seqs that the tasks give."""
    batches = [batch for part in one.partitions() for batch in one.read(part)]
    return [seq for batch in batches for seq in batch.column("seq").to_pylist()]


def at(row: int) -> datetime:
    return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=START_US + row * STEP_US)


def test_a_batch_has_exactly_the_rows_that_were_recorded(spark: Any, recorded: Recorded) -> None:
    frame = load(spark, recorded)
    assert frame.columns == [column.name for column in COLUMNS]
    rows = frame.collect()
    assert values(rows) == values(recorded.rows)
    assert {(row.node, row.broker) for row in rows} == {("n1", "broker-1")}


def test_rows_without_topic_are_read_without_topic_filter(spark: Any, recorded: Recorded) -> None:
    recorded.add([direct(1000), direct(1001), message(1002)])
    assert load(spark, recorded).where("topic is null").count() == 2
    assert load(spark, recorded, topics="site1/#").count() == 1001


def test_only_columns_of_a_narrower_schema_are_read(spark: Any, recorded: Recorded) -> None:
    frame = load(spark, recorded, "topic string, seq bigint")
    assert frame.columns == ["topic", "seq"]
    assert sorted(map(tuple, frame.collect())) == sorted((row.topic, row.seq) for row in recorded.rows)


def test_counting_needs_no_column_of_its_own(spark: Any, recorded: Recorded) -> None:
    assert load(spark, recorded).count() == 1000


def test_topics_and_exclude(spark: Any, recorded: Recorded) -> None:
    recorded.add([message(1000, "site2/x"), message(1001, "other")])
    counts = load(spark, recorded, topics="site1/d1, site2/#").groupBy("topic").count().collect()
    assert dict(map(tuple, counts)) == {"site1/d1": 100, "site2/x": 1}
    assert load(spark, recorded, exclude="site1/+").count() == 2


def test_ranges_of_offsets(recorded: Recorded) -> None:
    assert given(reader(recorded, startingOffsets='{"n1": 390}', endingOffsets='{"n1": 410}')) == list(range(390, 410))
    assert given(reader(recorded, startingOffsets="latest")) == []
    assert given(reader(recorded, endingOffsets="earliest")) == []


def test_nodes_missing_in_the_end_are_not_read(recorded: Recorded) -> None:
    """A hub that appears after a range was planned is behind its end."""
    Recorded(recorded.path, "n2").add(30)
    assert given(reader(recorded, endingOffsets='{"n1": 10}')) == list(range(10))
    assert given(reader(recorded, startingOffsets='{"n1": 5}', endingOffsets='{"n1": 10}')) == list(range(5, 10))
    assert given(reader(recorded, endingOffsets="{}")) == []
    assert given(reader(recorded, startingOffsets='{"n1": 990}')) == [*range(990, 1000), *range(30)]


def test_ranges_of_times(recorded: Recorded) -> None:
    times = {"startingTime": at(390).isoformat(), "endingTime": at(410).isoformat()}
    assert given(reader(recorded, **times)) == list(range(390, 410))
    assert given(reader(recorded, endingTime="30d")) == []


def test_a_range_by_the_names_of_kafkas_source(recorded: Recorded) -> None:
    first_ms, behind_ms = ((START_US + row * STEP_US) // 1000 for row in (390, 410))
    one = reader(recorded, startingTimestamp=str(first_ms), endingTimestamp=str(behind_ms), minPartitions="4")
    assert len(one.partitions()) == 4
    assert given(one) == list(range(390, 410))
    one = reader(recorded, startingTimestamp=str(first_ms), endingOffsets='{"n1": 400}')
    assert given(one) == list(range(390, 400))


def test_results_of_pipelines_can_be_left_out(recorded: Recorded) -> None:
    recorded.add([message(1000, flags=int(Flag.PIPELINE | Flag.SERVER)), message(1001, flags=int(Flag.SERVER))])
    assert given(reader(recorded, includePipeline="false"))[-2:] == [999, 1001]
    assert given(reader(recorded, "seq", includePipeline="false"))[-2:] == [999, 1001]
    assert given(reader(recorded))[-2:] == [1000, 1001]


def test_a_task_has_at_most_the_set_rows(recorded: Recorded) -> None:
    parts = [sum(chunk.rows for chunk in part.chunks) for part in reader(recorded, rowsPerPartition="128").partitions()]
    assert sum(parts) == 1000
    assert max(parts) <= 128


def test_small_batches_of_the_journal_reach_spark_joined(recorded: Recorded) -> None:
    one = reader(recorded)
    sizes = [batch.num_rows for part in one.partitions() for batch in one.read(part)]
    assert sizes == [1000]
    one = reader(recorded, batchRows="300")
    assert all(batch.num_rows >= 300 for part in one.partitions() for batch in list(one.read(part))[:-1])


def test_several_nodes_are_one_frame(spark: Any, recorded: Recorded) -> None:
    second = Recorded(recorded.path, "n2", first_seq=50).add(30)
    counts = load(spark, recorded).groupBy("node").agg(F.count("*"), F.min("seq")).collect()
    assert sorted(map(tuple, counts)) == [("n1", 1000, 0), ("n2", 30, 50)]
    assert values(load(spark, recorded).where("node = 'n2'").collect()) == values(second.rows)


def test_a_time_filter_reads_only_matching_batches(recorded: Recorded) -> None:
    one = reader(recorded)
    left = list(one.pushFilters([GreaterThanOrEqual(("ts",), at(600)), LessThan(("ts",), at(700))]))
    assert left == []
    assert given(one) == list(range(600, 700))
    assert planned(one) < 250


def test_a_filter_on_seq_and_node_reads_only_those(recorded: Recorded) -> None:
    one = reader(recorded)
    assert list(one.pushFilters([GreaterThanOrEqual(("seq",), 990), EqualTo(("node",), "n1")])) == []
    assert planned(one) == 10
    assert given(one) == list(range(990, 1000))
    elsewhere = reader(recorded)
    list(elsewhere.pushFilters([EqualTo(("node",), "n9")]))
    assert planned(elsewhere) == 0


def test_a_filter_on_the_topic_gives_only_its_rows(recorded: Recorded) -> None:
    one = reader(recorded, topics="site1/d1,site1/d2")
    assert list(one.pushFilters([In(("topic",), ("site1/d1", "site1/d9"))])) == []
    assert given(one) == list(range(1, 1000, 10))


def test_a_topic_named_like_a_wildcard_is_only_itself(recorded: Recorded) -> None:
    recorded.add([message(1000, "site1/#")])
    one = reader(recorded)
    list(one.pushFilters([EqualTo(("topic",), "site1/#")]))
    assert given(one) == [1000]


def test_other_filters_are_left_to_spark(recorded: Recorded) -> None:
    one = reader(recorded)
    others = [EqualTo(("uid",), "uid-d1"), GreaterThanOrEqual(("topic",), "site1/d5")]
    assert list(one.pushFilters(others)) == others


@pytest.mark.parametrize("enabled", [True, False])
def test_filters_mean_the_same_with_and_without_pushdown(spark: Any, recorded: Recorded, enabled: bool) -> None:
    frame = load(spark, recorded).where(
        (F.col("ts") >= F.lit(at(100))) & (F.col("seq") < 300) & F.col("topic").isin("site1/d1", "site1/d2")
    )
    if enabled:
        with pushdown(spark):
            rows = frame.collect()
    else:
        rows = frame.collect()
    assert sorted(row.seq for row in rows) == [seq for seq in range(100, 300) if seq % 10 in (1, 2)]


def test_pushdown_without_a_filter(spark: Any, recorded: Recorded) -> None:
    with pushdown(spark):
        assert load(spark, recorded).count() == 1000


def test_a_journal_without_rows(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "empty" / "wal").mkdir(parents=True)
    assert spark.read.format("smq").load(str(tmp_path / "empty")).count() == 0


def test_spark_reports_unknown_options(spark: Any, recorded: Recorded) -> None:
    with pytest.raises(Exception, match='no option "topic" here. Did you mean topics.*It has: .*topics'):
        load(spark, recorded, topic="a").count()


def test_options_of_streams_are_no_options_of_batches(recorded: Recorded) -> None:
    with pytest.raises(ArgumentError, match="are for readStream"):
        reader(recorded, maxRowsPerTrigger="5")


@pytest.mark.parametrize(
    ("field", "sentence"),
    [
        (StructField("temperature", DoubleType()), 'no column "temperature". It has: node, seq, ts'),
        (StructField("seq", IntegerType()), "column seq is bigint, not int"),
        (StructField("topic", StringType(), nullable=False), "topic may be null"),
    ],
)
def test_columns_that_the_journal_does_not_have(recorded: Recorded, field: StructField, sentence: str) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        BatchReader(reader(recorded).options, StructType([field]))


def test_rows_that_are_not_there_are_an_error(recorded: Recorded) -> None:
    beyond = {"startingOffsets": '{"n1": 5000}', "endingOffsets": '{"n1": 5001}'}
    with pytest.raises(JournalError, match="ends at row 1000"):
        given(reader(recorded, **beyond))
    assert given(reader(recorded, failOnDataLoss="false", **beyond)) == []


def test_a_folder_that_is_no_journal_is_named(spark: Any, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="nowhere"):
        spark.read.format("smq").load(str(tmp_path / "nowhere")).count()
