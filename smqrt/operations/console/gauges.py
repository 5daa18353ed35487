"""Figures of a server: samples, rates, growth and the last hour."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from math import isnan
from time import monotonic
from typing import Any, Generic, NamedTuple, TypeVar

from smqrt.operations.all_workers import AllWorkers
from smqrt.operations.api_pages import Snapshot
from smqrt.operations.snapshots import LATELY_S
from smqrt.printable import printable

# ---- Rates and growth of counters


class Rates:
    """Rates of counters between two rounds of readings. A counter that a round does not read starts again.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._previous: dict[Hashable, tuple[float, float]] = {}
        self._current: dict[Hashable, tuple[float, float]] = {}
        self._now_s = clock()

    def begin(self) -> None:
        """Start a round of readings."""
        self._previous, self._current = self._current, {}
        self._now_s = self._clock()

    def per_s(self, key: Hashable, count: float | None) -> float | None:
        """Return the growth per second of the counter `key` since the last round.

        Returns:
            None when the counter was not read in the last round, or has been restarted.
        """
        if count is None:
            return None
        self._current[key] = (self._now_s, count)
        at_s, before = self._previous.get(key, (self._now_s, 0.0))
        if at_s >= self._now_s or count < before:
            return None
        return (count - before) / (self._now_s - at_s)


# ---- Results that are expensive to find

ORDER_S = 5.0
"""The order of a long list is refreshed at this interval; the figures in it are refreshed each second."""
TOPICS_S = 1.0
"""The topics, their rates and their number are read at this interval."""
_CACHE_COST_FACTOR = 100
"""A result is reused for this multiple of its CPU time, so that finding it takes at most 1 % of each worker."""
T = TypeVar("T")


class PacedCache(Generic[T]):
    """Keeps the result of a function for some seconds, or longer when the function is expensive.

    Args:
        function: returns the result, and the highest CPU time of a worker.
        clock: returns monotonic seconds.
        kept_s: the minimum time, in seconds.
    """

    def __init__(
        self,
        function: Callable[[T], tuple[Any, float]],
        clock: Callable[[], float] = monotonic,
        kept_s: float = ORDER_S,
    ) -> None:
        self._function, self._clock, self._kept_s = function, clock, kept_s
        self._argument: T | None = None
        self._expires_s = 0.0
        self._result: Any = None

    def get(self, argument: T) -> Any:
        """Return the result for `argument`, possibly a cached one."""
        now_s = self._clock()
        if argument != self._argument or now_s >= self._expires_s:
            (self._result, cost_s), self._argument = self._function(argument), argument
            self._expires_s = now_s + max(self._kept_s, cost_s * _CACHE_COST_FACTOR)
        return self._result


# ---- History of the last hour, of fixed size

STEP_S = 5.0
POINTS = 720  # one hour
_UNKNOWN = float("nan")


class History:
    """Figures by name at points in time, 4 bytes each. New points overwrite the oldest.

    Args:
        names: the names of the figures.
        points: number of points that are kept.
        step_s: time between points, for charts.
    """

    def __init__(self, names: Sequence[str], points: int = POINTS, step_s: float = STEP_S) -> None:
        self.step_s = step_s
        self._points = points
        self._times = array("d")
        self._series = {name: array("f") for name in names}
        self._oldest = 0

    def add(self, at_s: float, values: Mapping[str, float | None]) -> None:
        """Add the figures of a Unix time. A missing figure, or None, is unknown."""
        given = {name: values.get(name) for name in self._series}
        known = {name: _UNKNOWN if value is None else value for name, value in given.items()}
        if len(self._times) < self._points:
            self._times.append(at_s)
            for name, series in self._series.items():
                series.append(known[name])
            return
        self._times[self._oldest] = at_s
        for name, series in self._series.items():
            series[self._oldest] = known[name]
        self._oldest = (self._oldest + 1) % self._points

    def snapshot(self) -> Snapshot:
        """Return all points, the oldest first. Unknown values are None."""

        def in_order(values: array[float]) -> array[float]:
            return values[self._oldest :] + values[: self._oldest]

        return {
            "step_s": self.step_s,
            "length": self._points,
            "times": [round(at_s, 1) for at_s in in_order(self._times)],
            "series": {
                name: [None if isnan(value) else float(f"{value:.5g}") for value in in_order(values)]
                for name, values in self._series.items()
            },
        }


# ---- Samples

NAMES = ("peers", "in_per_s", "out_per_s", "drops_per_s", "loop_ms", "cpu_percent", "memory_bytes")
"""The names of the figures."""
LOST_REASONS = frozenset(("over_budget", "over_global_budget", "closed", "queue_full"))
"""The drop reasons that count as lost messages. A message without a subscriber is not lost."""
_COST_FACTOR = 200
"""A sample is reused for this multiple of its CPU time, so that sampling takes at most 0.5 % of each worker.

A sample of 10,000 clients takes 4 ms.
"""
MIN_AGE_S = 0.5
"""A sample is used for at least this time, so that all pages of a round show the same figures."""


class Growth:
    """Growth of counters in the last minutes.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._readings: deque[tuple[float, dict[str, int]]] = deque()

    def add(self, counts: Mapping[str, int]) -> None:
        """Add the current values of the counters."""
        now_s = self._clock()
        self._readings.append((now_s, dict(counts)))
        while len(self._readings) > 1 and self._readings[1][0] <= now_s - LATELY_S:
            self._readings.popleft()

    def of(self, name: str, count: int) -> int:
        """Return the growth of the counter `name`, whose current value is `count`."""
        before = self._readings[0][1].get(name, 0) if self._readings else count
        return max(count - before, 0)


class Sample(NamedTuple):
    """The state of a server at a moment.

    Attributes:
        server: see `snapshots.server`.
        hubs: see `snapshots.hub`; in addition `in_per_s` (published messages), `out_per_s` (copies), `dropped` (lost
            messages) and `dropped_per_s`.
        now: the figures by `NAMES`.
        also: the answers for other paths, by path.
    """

    server: dict[str, Any]
    hubs: list[dict[str, Any]]
    now: dict[str, float | None]
    also: dict[str, list[dict[str, Any]]]


class Sampler:
    """Takes samples of a server.

    Args:
        server: the server with all its workers.
        also: further paths of the API, which are part of the same request to the workers.
        clock: returns monotonic seconds.
    """

    def __init__(self, server: AllWorkers, *also: str, clock: Callable[[], float] = monotonic) -> None:
        self._server, self._paths, self._clock = server, ("server", "hubs", *also), clock
        self._rates = Rates(clock)
        self._last: Sample | None = None
        self._next_s = 0.0

    def sample(self) -> Sample:
        """Return a sample with the rates since the previous one.

        The previous sample is returned while its age is below `MIN_AGE_S`, or a multiple of its CPU time.
        """
        now_s = self._clock()
        if self._last is not None and now_s < self._next_s:
            return self._last
        results = self._server.get_many([((path,), {}) for path in self._paths])
        server, answered_hubs, *also = results.answers
        self._rates.begin()
        hubs: list[dict[str, Any]] = list(map(dict, answered_hubs))  # copies, to which rates are added
        for hub in hubs:
            number = hub["id"]
            hub["dropped"] = lost_messages(hub)
            hub["in_per_s"] = self._rates.per_s((number, "in"), hub["messages"])
            hub["out_per_s"] = self._rates.per_s((number, "out"), hub["copies"])
            hub["dropped_per_s"] = self._rates.per_s((number, "drops"), hub["dropped"])
        cpu = [self._rates.per_s(("cpu", one.get("worker")), one["cpu_s"]) for one in server.get("workers", [server])]
        figures: dict[str, float | None] = {
            "peers": sum(hub["peers"] for hub in hubs),
            "in_per_s": sum(hub["in_per_s"] or 0.0 for hub in hubs),
            "out_per_s": sum(hub["out_per_s"] or 0.0 for hub in hubs),
            "drops_per_s": sum(hub["dropped_per_s"] or 0.0 for hub in hubs),
            "loop_ms": server["loop_lag_5s_s"] * 1000,
            "cpu_percent": None if None in cpu else sum(one or 0.0 for one in cpu) * 100,
            "memory_bytes": server["memory_bytes"],
        }
        self._last = Sample(server, hubs, figures, dict(zip(self._paths[2:], also, strict=True)))
        self._next_s = now_s + max(results.cost_s * _COST_FACTOR, MIN_AGE_S)
        return self._last


def lost_messages(hub: Mapping[str, Any]) -> int:
    """Return the number of messages that clients of a hub missed."""
    return sum(count for reason, count in hub["drops"].items() if reason in LOST_REASONS)


def hub_names(hubs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the names of hubs for pages, by key.

    A hub has the name of its application. If that has several hubs, or none created it, the name is the file and line.
    """
    by_key = {hub["key"]: hub for hub in hubs}
    counts = Counter(hub["app"] for hub in by_key.values())

    def name(hub: Mapping[str, Any]) -> str:
        is_alone = hub["app"] and counts[hub["app"]] == 1
        return printable(str(hub["app"] if is_alone else hub["made_at"] or hub["app"] or f"hub {hub['id']}"))

    return {key: name(hub) for key, hub in by_key.items()}


def hub_choices(hubs: list[dict[str, Any]], counter: str = "peers") -> list[Snapshot]:
    """Return the merged hubs to choose from, in descending order of a counter: their clients, for example."""
    ordered = sorted(hubs, key=lambda hub: -hub[counter])
    return [{"id": hub["id"], "name": hub["name"]} for hub in ordered]


# ---- Merged hubs of several workers


_HUB_SUMS = (
    "peers", "topics", "sessions", "in_per_s", "out_per_s", "queued_bytes", "dropped", "dropped_per_s",
)  # fmt: skip


def merged_hubs(hubs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the hubs, with one row for the hubs of all workers that have the same key.

    `ids` are the ids of these hubs, `name` see `hub_names`; the figures are sums. A topic counts once for each worker
    that has it, see `Console.hubs`. All workers have the same `retained` messages.
    """
    names, found = hub_names(hubs), dict[str, dict[str, Any]]()
    for hub in sorted(hubs, key=lambda one: int(one["id"])):
        new = {
            "name": names[hub["key"]],
            "key": hub["key"],
            "id": hub["id"],
            "ids": [],
            **dict.fromkeys((*_HUB_SUMS, "retained"), 0),
        }
        one = found.setdefault(hub["key"], new)
        one["ids"].append(hub["id"])
        figures = {**(hub["mqtt"] or {}), **hub}
        for name in _HUB_SUMS:
            one[name] += figures.get(name) or 0
        one["retained"] = max(one["retained"], figures.get("retained", 0))
    return list(found.values())
