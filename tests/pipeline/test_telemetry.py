"""The pipelines of app_preload/telemetry, as an application has them: loaded, and tested on their slice."""

from __future__ import annotations

from typing import Any

from smqrt.pipeline import testing
from smqrt.pipeline.discover import load
from tests.conftest import REPOSITORY

PIPELINES = REPOSITORY / "app_preload" / "telemetry" / "pipelines"


def test_what_they_declare() -> None:
    catalog = load(PIPELINES)
    assert {(query.name, query.kind, query.options["to"]) for query in catalog.queries()} == {
        ("minutes", "publish", "stats/{device}"),
        ("alarms", "alert", "alerts/{device}"),
        ("outages", "publish", "outages/{device}"),
    }


def test_they_give_what_is_expected_of_them(spark: Any) -> None:
    said: list[str] = []
    assert testing.run(PIPELINES, spark=spark, say=said.append) == 0, said
    assert said == ["ok       outages: 4 rows", "ok       minutes: 4 rows", "ok       alarms: 8 rows"]
