"""Metrics for Prometheus, over a real port."""

from __future__ import annotations

import os
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from smqrt.errors import PipelineError
from smqrt.journal import commit, files
from smqrt.pipeline import status
from smqrt.pipeline.status import StatusWriter
from tests.pipeline.recorded import Recorded


@pytest.fixture
def state(tmp_path: Path) -> Path:
    board = StatusWriter(tmp_path)
    board.starting("per_minute", "publish")
    board.add_published("per_minute", published=7)
    board.starting("alarms", "alert")
    board.ended("alarms", "failed", "It broke.")
    return tmp_path


def values(port: int) -> dict[tuple[str, str], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            (one.name, one.labels.get("query") or one.labels["reader"]): one.value
            for family in families
            for one in family.samples
        }


def test_every_query_has_its_figures(state: Path) -> None:
    found = values(status.serve(state, (), 0))
    assert found["smqrt_pipeline_up", "per_minute"] == 1
    assert found["smqrt_pipeline_up", "alarms"] == 0
    assert found["smqrt_pipeline_lag_rows", "per_minute"] == 0
    assert ("smqrt_pipeline_published_total", "per_minute") in found
    for kinds in (status._GAUGES, status._COUNTERS):
        for name, _ in kinds.values():
            assert {(name, "alarms"), (f"{name}_total", "alarms")} & set(found), name


def test_how_late_and_how_fast(state: Path) -> None:
    board = StatusWriter(state)
    board.starting("windows", "publish")
    watermark = datetime.fromtimestamp(time.time() - 90, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    operators = [{"numRowsTotal": 7, "memoryUsedBytes": 500, "numRowsDroppedByWatermark": 3}]
    figures = {"name": "windows", "batchId": 4, "batchDuration": 250, "numInputRows": 10, "stateOperators": operators}
    board.progressed(figures | {"processedRowsPerSecond": 40.0, "eventTime": {"watermark": watermark}})
    found = values(status.serve(state, (), 0))
    assert 90 <= found["smqrt_pipeline_watermark_lag_seconds", "windows"] < 120
    assert ("smqrt_pipeline_watermark_lag_seconds", "per_minute") not in found
    assert found["smqrt_pipeline_processed_rows_per_second", "windows"] == 40
    assert found["smqrt_pipeline_batch_seconds", "windows"] == 0.25
    assert found["smqrt_pipeline_dropped_by_watermark_total", "windows"] == 3
    assert (found["smqrt_pipeline_state_rows", "windows"], found["smqrt_pipeline_state_bytes", "windows"]) == (7, 500)


def test_journal_readers_are_notified_too(state: Path, tmp_path: Path) -> None:
    journal = Recorded(tmp_path / "journal").add(30).seal().path
    commit.report_progress(files.HubAddress.of(journal), "stopped", "stopped", {"n1": 10})
    os.utime(journal / "readers" / "stopped.json", (time.time() - 90_000,) * 2)
    found = values(status.serve(state, (), 0, str(journal)))
    assert found["smqrt_journal_reader_lag_rows", "stopped"] == 20
    assert found["smqrt_journal_reader_silent_seconds", "stopped"] >= 90_000


def test_only_the_queries_of_this_run(state: Path) -> None:
    assert {query for _, query in values(status.serve(state, ["alarms"], 0))} == {"alarms"}


def test_a_port_that_is_taken(state: Path) -> None:
    port = status.serve(state, (), 0)
    with pytest.raises(PipelineError, match=f"^--metrics: port {port} can't be used .*; use another port"):
        status.serve(state, (), port)
