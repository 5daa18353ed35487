"""What Prometheus is told, over a real port."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from smqrt.errors import PipelineError
from smqrt.pipeline import metrics
from smqrt.pipeline.status import Board


@pytest.fixture
def state(tmp_path: Path) -> Path:
    board = Board(tmp_path)
    board.starting("per_minute", "publish")
    board.count("per_minute", published=7)
    board.starting("alarms", "alert")
    board.ended("alarms", "failed", "It broke.")
    return tmp_path


def values(port: int) -> dict[tuple[str, str], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {(one.name, one.labels["query"]): one.value for family in families for one in family.samples}


def test_every_query_has_its_figures(state: Path) -> None:
    found = values(metrics.serve(state, (), 0))
    assert found["smqrt_pipeline_up", "per_minute"] == 1
    assert found["smqrt_pipeline_up", "alarms"] == 0
    assert found["smqrt_pipeline_lag_rows", "per_minute"] == 0
    assert ("smqrt_pipeline_published_total", "per_minute") in found
    for kinds in (metrics._GAUGES, metrics._COUNTERS):
        for name, _ in kinds.values():
            assert {(name, "alarms"), (f"{name}_total", "alarms")} & set(found), name


def test_only_the_queries_of_this_run(state: Path) -> None:
    assert {query for _, query in values(metrics.serve(state, ["alarms"], 0))} == {"alarms"}


def test_a_port_that_is_taken(state: Path) -> None:
    port = metrics.serve(state, (), 0)
    with pytest.raises(PipelineError, match=f"^--metrics: port {port} can't be used .*; choose another"):
        metrics.serve(state, (), port)
