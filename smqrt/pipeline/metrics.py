"""Metrics of running queries for Prometheus: `smqrt pipeline run --metrics PORT` answers on /metrics.

The figures are those of the status files, read anew with every request.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smqrt.errors import JournalError, PipelineError
from smqrt.journal import readers
from smqrt.pipeline.status import LIVE, Status, read_all

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_GAUGES = {
    "rows_per_s": ("smqrt_pipeline_rows_per_second", "Rows that came a second before the last micro-batch."),
    "processed_rows_per_s": (
        "smqrt_pipeline_processed_rows_per_second",
        "Rows that the last micro-batch worked off a second.",
    ),
    "lag_rows": ("smqrt_pipeline_lag_rows", "Rows in the journal that wait to be read."),
    "lag_s": ("smqrt_pipeline_lag_seconds", "How long the oldest of them has waited."),
    "state_rows": ("smqrt_pipeline_state_rows", "Rows that windows, joins and the like keep."),
    "state_bytes": ("smqrt_pipeline_state_bytes", "Memory of these rows."),
    "batch": ("smqrt_pipeline_batch", "Number of the last micro-batch."),
}
_COUNTERS = {
    "rows": ("smqrt_pipeline_rows", "Rows read since the query began."),
    "published": ("smqrt_pipeline_published", "Rows published since the query began."),
    "dropped_by_watermark": (
        "smqrt_pipeline_dropped_by_watermark",
        "Rows, or groups of them, that were too late for windows and joins.",
    ),
    "future": ("smqrt_pipeline_future", "Rows left out because their time was in the future."),
    "bad_json": ("smqrt_pipeline_bad_json", "Payloads that were no JSON object."),
    "wrong_type": ("smqrt_pipeline_wrong_type", "Rows with a JSON field of another type."),
}


class PipelineMetrics:
    """The metrics of the queries of one folder of state, in the form that prometheus-client asks for.

    Args:
        state: the folder.
        names: only these queries; none means all.
        journal: folder or URL of the journal, of whose readers it tells too, where it is a folder.
    """

    def __init__(self, state: Path, names: Iterable[str] = (), journal: str = "") -> None:
        self._state, self._names, self._journal = state, set(names), journal

    def collect(self) -> Iterator[Metric]:
        """Yields every metric with one value for each query."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        statuses = [each for each in read_all(self._state) if not self._names or each.name in self._names]
        up = GaugeMetricFamily("smqrt_pipeline_up", "1 while the query runs.", labels=["query"])
        took = GaugeMetricFamily("smqrt_pipeline_batch_seconds", "Time of the last micro-batch.", labels=["query"])
        stuck = GaugeMetricFamily(
            "smqrt_pipeline_stuck_seconds",
            "For how long it has made no progress, although rows wait.",
            labels=["query"],
        )
        for each in statuses:
            stuck.add_metric([each.name], max(0.0, time.time() - each.stuck_since) if each.stuck_since else 0.0)
            up.add_metric([each.name], float(each.state in LIVE))
            took.add_metric([each.name], each.batch_ms / 1000)
        yield from (up, took, stuck)
        for family, kinds in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            yield from (_filled(family(*kinds[field], labels=["query"]), field, statuses) for field in kinds)
        yield _watermark_lag(statuses)
        yield _failed_expectations(statuses)
        if self._journal and "://" not in self._journal:
            yield from _readers(Path(self._journal))


def _filled(metric: Any, field: str, statuses: list[Status]) -> Metric:
    for each in statuses:
        metric.add_metric([each.name], float(getattr(each, field)))
    return metric  # type: ignore[no-any-return]


def _watermark_lag(statuses: list[Status]) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    text = "How far the watermark is behind now, of queries that have one."
    metric = GaugeMetricFamily("smqrt_pipeline_watermark_lag_seconds", text, labels=["query"])
    for each in statuses:
        if each.watermark:
            metric.add_metric([each.name], time.time() - datetime.fromisoformat(each.watermark).timestamp())
    return metric


def _readers(journal: Path) -> Iterator[Metric]:
    """Whoever reads the journal, also when it doesn't run: rows are kept for it."""
    from prometheus_client.core import GaugeMetricFamily

    lag = GaugeMetricFamily("smqrt_journal_reader_lag_rows", "Rows that wait for a reader.", labels=["reader"])
    text = "For how long a reader has not told how far it is."
    silent = GaugeMetricFamily("smqrt_journal_reader_silent_seconds", text, labels=["reader"])
    with suppress(JournalError):  # the figures of the queries are not worse for it
        for reader, behind in readers.waiting(journal):
            lag.add_metric([reader.name], behind)
            silent.add_metric([reader.name], reader.silent_s(time.time_ns() // 1000))
    yield from (lag, silent)


def _failed_expectations(statuses: list[Status]) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    text = "Rows that failed an expectation."
    metric = CounterMetricFamily("smqrt_pipeline_expectation_failures", text, labels=["query", "expectation"])
    for each in statuses:
        for name, rows in each.expectations.items():
            metric.add_metric([each.name, name], rows)
    return metric


def serve(state: Path, names: Iterable[str], port: int, journal: str = "") -> int:
    """Answers Prometheus on http://127.0.0.1:port/metrics from a thread, until the process ends.

    Args:
        state: the folder of state.
        names: only these queries; none means all.
        port: 0 picks a free one.
        journal: as for `PipelineMetrics`.

    Returns:
        The port.

    Raises:
        PipelineError: the port is taken, or prometheus-client isn't installed.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise PipelineError("--metrics needs prometheus-client: pip install 'smqrt[spark]'") from None
    registry = CollectorRegistry()
    registry.register(PipelineMetrics(state, names, journal))
    try:
        server, _ = start_http_server(port, "127.0.0.1", registry)
    except OSError as error:
        raise PipelineError(f"--metrics: port {port} can't be used ({error.strerror}); choose another.") from None
    return int(server.server_port)
