"""The source smq with a real hub: over HTTP, through restarts, and results back into it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from smqrt.errors import ArgumentError
from smqrt.journal.record import Flag
from smqrt.pipeline.smq_source import writing
from smqrt.pipeline.smq_source.options import WriteOptions
from smqrt.pipeline.smq_source.writing import BatchWriter
from tests.pipeline.hubs import JournalingHub
from tests.pipeline.recorded import values
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JournalingHub]:
    """One for the whole file: every test has topics of its own."""
    running = JournalingHub(tmp_path_factory.mktemp("hub") / "app")
    yield running
    running.stop()


def over_http(reader: Any, hub: JournalingHub, **options: str) -> Any:
    address = hub.announced
    return reader.format("smq").options(url=address["url"], token=address["token"], **options).load()


def doubling(frame: Any, to: str, hub: JournalingHub, checkpoint: Path) -> Any:
    """Return the writer of a stream that publishes twice the numbers it reads."""
    twice = (F.col("payload").cast("string").cast("int") * 2).cast("string")
    writer = frame.select(F.lit(to).alias("topic"), twice.alias("payload")).writeStream.format("smq")
    return writer.option("checkpointLocation", str(checkpoint)).option("path", str(hub.journal))


def test_over_http_is_the_same_as_from_the_folder(spark: Any, hub: JournalingHub) -> None:
    hub.publish("same", 0, 300)
    assert values(over_http(spark.read, hub, topics="same").collect()) == values(hub.rows("same"))


def test_a_stream_goes_on_when_its_hub_comes_back(spark: Any, hub: JournalingHub, tmp_path: Path) -> None:
    hub.publish("in", 0, 100)
    frame = over_http(spark.readStream, hub, startingOffsets="earliest", topics="in")
    query = doubling(frame, "out", hub, tmp_path / "checkpoint").trigger(processingTime="100 milliseconds").start()
    try:
        wait_until(lambda: len(hub.rows("out")) == 100, "the first hundred came back", 40)
        hub.restart()
        hub.publish("in", 100, 100)
        wait_until(lambda: len(hub.rows("out")) >= 200, "the second hundred came back", 40)
        assert query.exception() is None
    finally:
        query.stop()
    assert hub.numbers("out") == [2 * number for number in range(200)]


def test_a_permanently_lost_hub_ends_the_query(spark: Any, tmp_path: Path) -> None:
    nobody = {"url": "http://127.0.0.1:1/rtl/journal/app", "token": "x" * 43, "retry": "200ms"}
    frame = spark.readStream.format("smq").options(**nobody).load()
    query = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    with pytest.raises(Exception, match="The hub hasn't answered for 0.2 s .*start it with `smqrt serve`") as caught:
        query.awaitTermination(30)
    assert "link.py" not in str(caught.value)


def test_a_wrong_token_is_a_sentence(spark: Any, hub: JournalingHub) -> None:
    with pytest.raises(Exception, match="token"):
        spark.read.format("smq").options(url=hub.announced["url"], token="x" * 43).load().count()


def test_results_are_stored_once_though_spark_repeats_a_batch(spark: Any, hub: JournalingHub, tmp_path: Path) -> None:
    hub.publish("once", 0, 50)
    offsets = json.dumps({"n1": hub.rows("once")[0].seq})
    reader = spark.readStream.format("smq").options(startingOffsets=offsets, topics="once", maxRowsPerTrigger="20")
    writer = doubling(reader.load(str(hub.journal)), "twice", hub, tmp_path / "checkpoint")
    for _ in range(2):
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(60)
        results = hub.rows("twice")
        assert hub.numbers("twice") == [2 * number for number in range(50)]
        assert {row.txn for row in results} == {f"{query.id}:{batch}" for batch in range(3)}
        assert all(row.flags & Flag.PIPELINE for row in results)
        forget_last_batch(tmp_path / "checkpoint")


def test_a_large_batch_is_stored_in_parts_and_once(spark: Any, hub: JournalingHub, tmp_path: Path) -> None:
    hub.publish("many", 0, 60)
    reader = spark.readStream.format("smq").options(startingOffsets="earliest", topics="many")
    long = F.rpad(F.col("payload").cast("string"), 40_000, ".")
    frame = reader.load(str(hub.journal)).select(F.lit("large").alias("topic"), long.alias("payload"))
    writer = frame.writeStream.format("smq").option("checkpointLocation", str(tmp_path / "checkpoint"))
    for _ in range(2):
        query = writer.option("path", str(hub.journal)).trigger(availableNow=True).start()
        assert query.awaitTermination(60)
        results = hub.rows("large")
        assert sorted(int(row.payload.rstrip(b".")) for row in results) == list(range(60))
        assert {row.txn for row in results} == {f"{query.id}:0", f"{query.id}.1:0", f"{query.id}.2:0"}
        forget_last_batch(tmp_path / "checkpoint")


def test_task_results_do_not_grow_with_the_rows(hub: JournalingHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_property", {writing.QUERY_ID: "grown", writing.BATCH: "0"}.__getitem__)
    schema = StructType().add("topic", "string").add("payload", "binary")
    writer = writing.StreamWriter(WriteOptions(str(hub.journal)), schema, overwrite=False)
    rows = pa.record_batch({"topic": ["grown"] * 1000, "payload": [b"%0500d" % n for n in range(1000)]})
    few, many = (writer.write(iter([rows.slice(0, 10), *[rows] * times])) for times in (0, 20))
    assert len(few.rows) == 10
    assert len(pickle.dumps(many)) < 1000
    writer.commit([few, None, many], 0)
    writer.commit([many, few], 0)
    assert len(hub.rows("grown")) == 20_020


def forget_last_batch(checkpoint: Path) -> None:
    """Leave a checkpoint as a crash between the hub's commit and Spark's leaves it."""
    latest = max((path for path in (checkpoint / "commits").glob("[0-9]*")), key=lambda path: int(path.name))
    for path in (latest, latest.with_name(f".{latest.name}.crc")):
        path.unlink(missing_ok=True)


def test_a_batch_frame_is_published(spark: Any, hub: JournalingHub) -> None:
    frame = spark.createDataFrame([("a", "x", b"1"), ("b", None, b"\x00\xff"), ("c", None, None)], MESSAGE)
    frame.write.format("smq").mode("append").save(str(hub.journal))
    wait_until(lambda: len(hub.rows("a", "b", "c")) == 3, "all rows are in the journal")
    assert sorted((row.topic, row.subtopic, row.payload) for row in hub.rows("a", "b", "c")) == [
        ("a", "x", b"1"),
        ("b", None, b"\x00\xff"),
        ("c", None, b""),
    ]


MESSAGE = "topic string, subtopic string, payload binary"


@pytest.mark.parametrize(
    ("columns", "overwrite", "sentence"),
    [
        ({"topic": "string", "value": "binary"}, False, 'there is no "payload"'),
        ({"topic": "string", "payload": "double"}, False, "payload as string or binary, not double: cast it"),
        ({"topic": "string", "payload": "string", "device": "string"}, False, 'not "device": put the content'),
        ({"topic": "string", "payload": "binary"}, True, 'use mode."append"'),
    ],
)
def test_frames_that_are_no_messages(columns: dict[str, str], overwrite: bool, sentence: str) -> None:
    schema = StructType()
    for name, kind in columns.items():
        schema = schema.add(name, kind)
    with pytest.raises(ArgumentError, match=sentence):
        BatchWriter(WriteOptions("/tmp/journal"), schema, overwrite)


def test_a_row_without_a_topic_is_a_mistake(spark: Any, hub: JournalingHub) -> None:
    frame = spark.createDataFrame([(None, None, b"1")], MESSAGE)
    with pytest.raises(Exception, match="topic is null or empty"):
        frame.write.format("smq").mode("append").save(str(hub.journal))


def test_without_a_hub_a_write_says_so(spark: Any, tmp_path: Path) -> None:
    frame = spark.createDataFrame([("a", None, b"1")], MESSAGE)
    with pytest.raises(Exception, match="No hub serves"):
        frame.write.format("smq").option("retry", "100ms").mode("append").save(str(tmp_path))
