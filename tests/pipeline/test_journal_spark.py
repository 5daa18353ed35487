"""`smqrt query --spark`: SQL on a journal by Spark."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smqrt.errors import PipelineError
from smqrt.journal import compact
from smqrt.journal.reader import Journal
from smqrt.pipeline.history import Spark
from tests.journal.sensor_rows import NOON_US, readings, row, write

ROWS = 3000


@pytest.fixture
def asked(spark: Any, tmp_path: Path) -> Iterator[Spark]:
    """A journal of which half is compacted."""
    write(tmp_path, readings(ROWS))
    write(tmp_path, [row(ROWS, NOON_US, None, b"\xff", flags=1)])
    compact.compact(tmp_path, compact.CompactOptions(grace_s=0))
    journal = Journal(tmp_path)
    with Spark(str(tmp_path), {}, journal.begin(), journal.end(), spark=spark) as asked:
        yield asked


def rows(asked: Spark, sql: str) -> list[dict[str, Any]]:
    _, batches = asked.run(sql)
    return [row for batch in batches for row in batch.to_pylist()]


def test_rows_text_and_json(asked: Spark) -> None:
    sql = "select seq, ts, text, json:temp::double as temp, json from messages where seq in (1, {}) order by seq"
    first, last = rows(asked, sql.format(ROWS))
    assert first["json"].startswith('{"battery":')
    assert f'"temp": {first["temp"]}' in first["text"]
    assert first["ts"].isoformat() == "2026-11-20T12:00:01+00:00"
    assert (last["text"], last["temp"], last["json"]) == (None, None, None)


def test_a_result_in_many_files_keeps_its_order(asked: Spark) -> None:
    found = rows(asked, "select seq from (select /*+ repartition(4) */ * from messages) order by seq desc")
    assert [one["seq"] for one in found] == list(range(ROWS, -1, -1))


def test_errors_are_one_sentence(asked: Spark) -> None:
    with pytest.raises(PipelineError, match=r"^A column, variable, or function .* `nix` .*\]\.$"):
        asked.run("select nix from messages")
    with pytest.raises(PipelineError, match="Syntax error at or near") as caught:
        asked.run("selec 1")
    assert "\n" not in str(caught.value)


def test_an_interrupt_ends_the_question(asked: Spark, spark: Any) -> None:
    """`cancel` ends the jobs of a session; nobody is told a half result."""
    from concurrent.futures import ThreadPoolExecutor

    slow = "select count(*) from messages a, messages b, range(1000) where hash(a.seq, b.seq, id) = 7"
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(asked.run, slow)
        tracker = spark.sparkContext.statusTracker()
        while not (tracker.getActiveStageIds() and asked.share() < 1):  # a stage before the long one may have ended
            assert not running.done()
            time.sleep(0.01)
        assert asked.share() >= 0
        asked.cancel()
        with pytest.raises(PipelineError, match="cancel"):
            running.result(60)


def test_an_interrupt_between_two_jobs_ends_the_question(asked: Spark) -> None:
    asked.cancel()
    with pytest.raises(PipelineError, match="cancel"):
        asked.run("select count(*) from messages")
