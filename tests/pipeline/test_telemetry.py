"""The pipelines of app_preload/telemetry, as an application has them: loaded, and tested on their slice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from smqrt.pipeline import testing
from smqrt.pipeline.discover import load
from tests.conftest import REPOSITORY

PIPELINES = REPOSITORY / "app_preload" / "telemetry" / "pipelines"


@pytest.fixture
def with_rocksdb(spark: Any) -> Iterator[Any]:
    """The session, with the state store that alerts need."""
    name = "spark.sql.streaming.stateStore.providerClass"
    spark.conf.set(name, "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider")
    yield spark
    spark.conf.unset(name)


def test_what_they_declare() -> None:
    catalog = load(PIPELINES)
    assert [(query.name, query.kind) for query in catalog.queries()] == [("minutes", "publish"), ("alarms", "alert")]
    assert {str(query.options["to"]) for query in catalog.queries()} == {"stats/{device}", "alerts/{device}"}


def test_they_give_what_is_expected_of_them(with_rocksdb: Any) -> None:
    said: list[str] = []
    assert testing.run(PIPELINES, spark=with_rocksdb, say=said.append) == 0, said
    assert said == ["ok       minutes: 4 rows", "ok       alarms: 8 rows"]
