"""Results that are more than the driver's memory: published by a task of Spark, in the same parts, exactly once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smqrt.journal import commit, files
from smqrt.pipeline import sinks
from smqrt.pipeline.checkpoint import PublishGate
from smqrt.pipeline.status import CRASH_VARIABLE
from tests.pipeline.hubs import JournalingHub
from tests.pipeline.recorded import Recorded, message

ROWS = 9000
SCHEMA = "topic string, subtopic string, payload binary"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JournalingHub]:
    hub = JournalingHub(tmp_path_factory.mktemp("many") / "app")
    yield hub
    hub.stop()


def messages(topic: str) -> list[commit.OutRow]:
    """Some with a subtopic, some without, some with an empty one; one payload is null."""
    below = (None, b"", b"s")
    return [(topic.encode(), below[n % 3], b"%d" % n if n else b"") for n in range(ROWS)]


def frame(spark: Any, topic: str, reverse: bool = False) -> Any:
    rows = [(t.decode(), None if s is None else s.decode(), p or None) for t, s, p in messages(topic)]
    return spark.createDataFrame(rows[::-1] if reverse else rows, SCHEMA).repartition(3)


def published(hub: JournalingHub, topic: str) -> Counter[tuple[str | None, bytes]]:
    return Counter((row.subtopic or None, row.payload) for row in hub.rows(topic))


def expected(topic: str) -> Counter[tuple[str | None, bytes]]:
    return Counter((below.decode() if below else None, payload) for _, below, payload in messages(topic))


def target(hub: JournalingHub) -> sinks.CommitClient:
    return sinks.CommitClient(str(hub.journal), None, 5, threading.Event())


@pytest.mark.parametrize("first", [True, False])
def test_a_batch_may_be_repeated_by_the_other_method(spark: Any, hub: JournalingHub, first: bool) -> None:
    topic = f"twice.{first}"
    assert sinks.publish(frame(spark, topic), target(hub), topic, 0, many=first) == ROWS
    sinks.publish(frame(spark, topic, reverse=True), target(hub), topic, 0, many=not first)
    assert published(hub, topic) == expected(topic)


def test_a_batch_of_which_the_hub_has_some_parts(spark: Any, hub: JournalingHub) -> None:
    address = files.HubAddress.of(hub.journal)
    name, part = next(commit.parts("half", messages("half")))
    assert commit.commit(address, name, 0, part)
    sinks.publish(frame(spark, "half"), target(hub), "half", 0, many=True)
    assert published(hub, "half") == expected("half")


def test_no_results_are_no_commit(spark: Any, hub: JournalingHub) -> None:
    before = len(hub.rows())
    assert sinks.publish(frame(spark, "none").where("false"), target(hub), "none", 0, many=True) == 0
    assert len(hub.rows()) == before


def test_large_results_are_published_by_a_task(spark: Any, hub: JournalingHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(frame: Any) -> Any:
        raise RuntimeError("Total size of serialized results of 3 tasks is bigger than spark.driver.maxResultSize")

    monkeypatch.setattr(sinks, "collect_messages", refused)
    assert sinks.publish(frame(spark, "wide"), target(hub), "wide", 0, many=False) == ROWS
    assert published(hub, "wide") == expected("wide")


def test_a_write_with_a_name_is_done_once(spark: Any, hub: JournalingHub) -> None:
    ordered = frame(spark, "named").fillna("", "subtopic").where("payload is not null").repartition(1)
    for _ in range(2):
        writer = ordered.sortWithinPartitions("topic", "subtopic", "payload").write.format("smq").mode("append")
        writer.option("txnAppId", "nightly").option("txnVersion", 3).save(str(hub.journal))
    assert len(hub.rows("named")) == ROWS - 1


def test_a_write_with_an_unrepeatable_name_is_refused(spark: Any, hub: JournalingHub) -> None:
    for each in (frame(spark, "loose"), frame(spark, "loose").repartition(1)):
        writer = each.write.format("smq").mode("append").option("txnAppId", "x").option("txnVersion", 1)
        with pytest.raises(Exception, match="sortWithinPartitions"):
            writer.save(str(hub.journal))
    assert not published(hub, "loose")


def test_how_many_rows_a_micro_batch_has(tmp_path: Path) -> None:
    offsets = tmp_path / "checkpoint" / "offsets"
    offsets.mkdir(parents=True)
    for batch, ends in enumerate(([{"n1": 100}], [{"n1": 150, "n2": 7}], [{"n1": 150, "n2": 7}])):
        (offsets / str(batch)).write_text("\n".join(["v1", "{}", *map(json.dumps, ends)]))
    assert [PublishGate(tmp_path, None).rows(batch) for batch in range(3)] == [100, 57, 0]


# ---- a driver of little memory, in a process of its own

PIPELINE = """
from pyspark.sql import functions as F
from smqrt.pipeline import publish, source

@source("site1/#")
def rows(df): return df

@publish(to="out")
def echo(rows):
    number = F.lpad(F.col("seq").cast("string"), 6, "0").cast("binary")
    return rows.select(F.concat(number, "payload").alias("payload"))
"""
BACKLOG, PAYLOAD_BYTES = 100_000, 1000
PATIENCE_S = 300


@pytest.fixture
def backlog(tmp_path: Path) -> Iterator[JournalingHub]:
    """A hub whose journal has 100 MB, which a heap of 450 MB can't hold as often as collecting it takes."""
    folder = tmp_path / "app"
    recorded = Recorded(folder / ".journal")
    body = b"x" * PAYLOAD_BYTES
    recorded.add((message(seq, payload=body) for seq in range(BACKLOG)), batch=1024).seal()
    (folder / "pipelines").mkdir()
    (folder / "pipelines" / "p.py").write_text(PIPELINE)
    hub = JournalingHub(folder)
    yield hub
    hub.stop()


def run(folder: Path, *options: str, fault: str = "", log: Path | None = None) -> int:
    words = ["pipeline", "run", "--once", "--from", "earliest", "--republish", "--driver-memory", "450m", *options]
    process = subprocess.Popen(
        [sys.executable, "-m", "smqrt", *words, "--app", str(folder)],
        env=os.environ | ({CRASH_VARIABLE: fault} if fault else {}),
        start_new_session=True,
        stderr=log.open("w") if log else None,
    )
    try:
        return process.wait(PATIENCE_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_a_large_backlog_is_published_once_despite_a_kill(
    backlog: JournalingHub,
) -> None:
    folder = backlog.journal.parent
    assert run(folder, fault="before_part:3") == -signal.SIGKILL
    assert 0 < len(backlog.rows("out")) < BACKLOG
    assert run(folder) == 0
    numbers = Counter(row.payload[:6] for row in backlog.rows("out"))
    assert len(numbers) == BACKLOG
    assert set(numbers.values()) == {1}


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_java_without_memory_ends_with_a_working_remedy(tmp_path: Path) -> None:
    folder = tmp_path / "app"
    body = b"x" * 60_000
    Recorded(folder / ".journal").add((message(seq, payload=body) for seq in range(4000)), batch=64).seal()
    (folder / "pipelines").mkdir()
    (folder / "pipelines" / "p.py").write_text(PIPELINE.replace('"site1/#"', '"site1/#", max_bytes="1GB"'))
    hub, log = JournalingHub(folder), tmp_path / "log"
    try:
        assert run(folder, "--conf", "spark.driver.maxResultSize=0", log=log) == 1
        assert "Java ran out of memory: run it with --driver-memory 4g" in log.read_text()
        (folder / "pipelines" / "p.py").write_text(PIPELINE.replace('"site1/#"', '"site1/#", max_bytes="16MB"'))
        assert run(folder) == 0
        assert len(hub.rows("out")) == 4000
    finally:
        hub.stop()
