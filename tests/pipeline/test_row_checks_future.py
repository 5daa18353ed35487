"""A clock that is wrong: rows from the future are kept out of the watermark, so that nobody else is too late."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from smqrt.cli.pipeline import status_line
from smqrt.pipeline import status
from tests.pipeline.applications import Application
from tests.pipeline.hubs import JournalingHub

WINDOWS = """
@source({source}, json="k string, at timestamp", event_time="at", watermark="10 seconds", max_rows=2,
        dead_letter="OUT/dead")
def guarded(df): return df

@source({source}, json="k string, at timestamp", event_time="at", watermark="10 seconds", max_rows=2, max_future=None)
def trusting(df): return df

def counts(events): return events.groupBy(F.window("at", "1 hour"), "k").agg(F.count("*").alias("n")).select("k", "n")

@publish(to="OUT/guarded", mode="update")
def guards(guarded): return counts(guarded)

@publish(to="OUT/trusting", mode="update")
def trusts(trusting): return counts(trusting)
"""


@pytest.fixture
def app(tmp_path: Path, spark: Any) -> Iterator[Application]:
    hub = JournalingHub(tmp_path / "hub")
    (tmp_path / "app").mkdir()
    yield Application(tmp_path / "app", hub, spark)
    hub.stop()


def test_one_wrong_clock_makes_no_other_late(app: Application) -> None:
    app.write(WINDOWS.format(source=app.source))
    midday = time.time() // 86400 * 86400 - 43200

    def event(k: str, ahead_s: float = 0.0) -> dict[str, str]:
        at_s = time.time() + ahead_s if ahead_s else midday
        return {"k": k, "at": datetime.fromtimestamp(at_s, UTC).isoformat()}

    app.send(event("a"), event("wrong", 3600), event("a"), event("b"), event("a"), event("b"))
    assert app.run(republish=True) == 0, app.told
    assert [(row["k"], row["n"]) for row in app.results("guarded")] == [
        *[("a", 1), ("a", 2), ("b", 1)],
        *[("a", 3), ("b", 2)],
    ]
    assert [(row["k"], row["n"]) for row in app.results("trusting")] == [
        *[("a", 1), ("wrong", 1)],
        *[("a", 2), ("b", 1)],  # Spark takes what is late once more, in the micro-batch that follows
    ]
    guards, trusts = app.status("guards"), app.status("trusts")
    assert (guards.future, guards.dropped_by_watermark) == (1, 0)
    assert (trusts.future, trusts.dropped_by_watermark) == (0, 2)
    told = {(one.name, one.labels["query"]): one.value for one in _samples(app) if "query" in one.labels}
    assert told["smqrt_pipeline_future_total", "guards"] == 1
    assert told["smqrt_pipeline_dropped_by_watermark_total", "trusts"] == 2
    assert ", too late 2" in status_line(trusts)
    assert told["smqrt_pipeline_processed_rows_per_second", "guards"] > 0
    assert told["smqrt_pipeline_state_rows", "guards"] == 2
    assert (
        told["smqrt_pipeline_watermark_lag_seconds", "guards"]
        > 0
        > told["smqrt_pipeline_watermark_lag_seconds", "trusts"]
    )
    [letter] = app.results("dead")
    assert letter["reason"] == "at is more than 5 minutes in the future"
    assert '"wrong"' in letter["payload"]


def _samples(app: Application) -> list[Any]:
    return [one for metric in status.PipelineMetrics(app.folder / ".pipelines").collect() for one in metric.samples]
