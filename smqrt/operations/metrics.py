"""The metrics of a server for Prometheus, read from its counters when they are asked for (help: metrics)."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from smqrt.loop.scheduling import Turn
from smqrt.operations.context import Parts
from smqrt.operations.loop_delay import BUCKETS_S
from smqrt.operations.metric_families import FAMILIES, Family, Scrape

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

MetricFamily = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class Metrics:
    """The metrics of a server.

    Args:
        parts: the server.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def lines(self) -> Iterator[bytes]:
        """Yields all metrics in the text format of Prometheus, a part after the other; others run in between."""
        scrape, turn = Scrape(self._parts), Turn()
        for row in FAMILIES:
            turn.breathe()
            yield generate_latest(_One(_family(row, scrape)))


class _One:
    """A registry of one family."""

    def __init__(self, family: MetricFamily) -> None:
        self._family = family

    def collect(self) -> list[MetricFamily]:
        """See `prometheus_client.registry.Collector`."""
        return [self._family]


def _family(row: Family, scrape: Scrape) -> MetricFamily:
    if row.kind == "histogram":
        lag = scrape.parts.lag
        at_most, buckets = 0, []
        for most_s, count in zip([*map(str, BUCKETS_S), "+Inf"], lag.buckets, strict=True):
            at_most += count
            buckets.append((most_s, float(at_most)))
        histogram = HistogramMetricFamily(row.name, row.help)
        histogram.add_metric([], buckets, lag.total_s)
        return histogram
    family = (CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily)(
        row.name.removesuffix("_total") if row.kind == "counter" else row.name, row.help, labels=row.labels
    )
    for labels, value in row.samples(scrape):
        family.add_metric(labels, value)
    return family
