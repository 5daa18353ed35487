"""The figures of a server at a moment: sums and rates over its hubs, for the overview, the history and what needs
attention.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from time import monotonic
from typing import Any, NamedTuple

from smqrt.operations.all_workers import Together
from smqrt.operations.snapshots import LATELY_S, Snapshot
from smqrt.printable import printable

# ---- Rates of counters that are looked at now and then.


class Rates:
    """How fast counters grow, from one look at them to the next.

    What isn't looked at for two rounds is forgotten.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._before: dict[Hashable, tuple[float, float]] = {}
        self._seen: dict[Hashable, tuple[float, float]] = {}
        self._now_s = clock()

    def begin(self) -> None:
        """Begin a round."""
        self._before, self._seen = self._seen, {}
        self._now_s = self._clock()

    def per_s(self, key: Hashable, count: float | None) -> float | None:
        """Returns how much the counter `key` grew a second since the last round; None when that is not known, or it
        began anew.
        """
        if count is None:
            return None
        self._seen[key] = (self._now_s, count)
        at_s, before = self._before.get(key, (self._now_s, 0.0))
        if at_s >= self._now_s or count < before:
            return None
        return (count - before) / (self._now_s - at_s)


# ---- The last hour of a server's figures, in memory of a fixed size.

STEP_S = 5.0
POINTS = 720
"""One hour."""
_NONE = float("nan")


class History:
    """Figures by name at points in time; the oldest are overwritten. 4 bytes each.

    Args:
        names: of the figures.
        points: how many points are kept.
        step_s: seconds from one to the next, for those who draw them.
    """

    def __init__(self, names: Sequence[str], points: int = POINTS, step_s: float = STEP_S) -> None:
        self.step_s = step_s
        self._points = points
        self._times = array("d")
        self._series = {name: array("f") for name in names}
        self._oldest = 0

    def add(self, at_s: float, values: Mapping[str, float | None]) -> None:
        """Keep the figures of a moment, in Unix seconds; one that is missing or None is unknown."""
        known = {name: values.get(name) for name in self._series}
        if len(self._times) < self._points:
            self._times.append(at_s)
            for name, series in self._series.items():
                series.append(_stored(known[name]))
            return
        self._times[self._oldest] = at_s
        for name, series in self._series.items():
            series[self._oldest] = _stored(known[name])
        self._oldest = (self._oldest + 1) % self._points

    def snapshot(self) -> Snapshot:
        """Returns all of it, the oldest first; what is unknown is None."""
        series = {name: [_shown(value) for value in self._in_order(values)] for name, values in self._series.items()}
        return {
            "step_s": self.step_s,
            "length": self._points,
            "times": [round(at_s, 1) for at_s in self._in_order(self._times)],
            "series": series,
        }

    def _in_order(self, values: array[float]) -> array[float]:
        return values[self._oldest :] + values[: self._oldest]


def _stored(value: float | None) -> float:
    return _NONE if value is None else value


def _shown(value: float) -> float | None:
    return None if value != value else float(f"{value:.5g}")  # what is unknown is no number, and unlike itself


NAMES = ("peers", "in_per_s", "out_per_s", "drops_per_s", "loop_ms", "cpu_percent", "memory_bytes")
LOST = frozenset(("over_budget", "over_global_budget", "closed", "queue_full"))
"""Reasons of drops for which somebody misses something; that nobody subscribes is none."""
_COST = 200
"""Looking takes at most one in so many of all seconds, in each worker: 4 ms for 10,000 clients."""

MOMENT_S = 0.5
"""What pages are shown within so short a time is of one moment."""


class Growth:
    """How much counters grew in the last minutes.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._looks: deque[tuple[float, dict[str, int]]] = deque()

    def look(self, counts: Mapping[str, int]) -> None:
        """Remember what the counters say now."""
        now_s = self._clock()
        self._looks.append((now_s, dict(counts)))
        while len(self._looks) > 1 and self._looks[1][0] <= now_s - LATELY_S:
            self._looks.popleft()

    def of(self, name: str, count: int) -> int:
        """How much the counter `name`, which is at `count` now, grew."""
        before = self._looks[0][1].get(name, 0) if self._looks else count
        return max(count - before, 0)


class Seen(NamedTuple):
    """What `Gauges.look` saw.

    Attributes:
        server: see `snapshots.server`.
        hubs: see `snapshots.hub`; with `in_per_s` and `out_per_s`, the messages that were published and their copies,
            `dropped`, those that somebody missed, and `dropped_per_s`.
        now: the figures by `NAMES`.
        also: what else was looked at, by its name.
    """

    server: dict[str, Any]
    hubs: list[dict[str, Any]]
    now: dict[str, float | None]
    also: dict[str, list[dict[str, Any]]]


class Gauges:
    """What a server does at the moment.

    Args:
        server: with all of its workers.
        also: what else is looked at, in the same question to the workers.
    """

    def __init__(self, server: Together, *also: str) -> None:
        self._server, self._names = server, ("server", "hubs", *also)
        self._rates = Rates()
        self._seen: Seen | None = None
        self._rests_until_s = 0.0

    def look(self) -> Seen:
        """Returns what there is now, with the rates since the look before; the same as then when looking takes some
        worker long and was done a short while ago.
        """
        now_s = monotonic()
        if self._seen is None or now_s >= self._rests_until_s:
            looks = self._server.looks([((name,), {}) for name in self._names])
            self._seen = self._made(*looks.answers)
            self._rests_until_s = now_s + max(looks.cost_s * _COST, MOMENT_S)
        return self._seen

    def _made(self, server: dict[str, Any], hubs: list[dict[str, Any]], *also: list[dict[str, Any]]) -> Seen:
        self._rates.begin()
        hubs = list(map(dict, hubs))
        for hub in hubs:
            number = hub["id"]
            hub["dropped"] = lost(hub)
            hub["in_per_s"] = self._rates.per_s((number, "in"), hub["messages"])
            hub["out_per_s"] = self._rates.per_s((number, "out"), hub["copies"])
            hub["dropped_per_s"] = self._rates.per_s((number, "drops"), hub["dropped"])
        cpu = [self._rates.per_s(("cpu", one.get("worker")), one["cpu_s"]) for one in server.get("workers", [server])]
        now: dict[str, float | None] = {
            "peers": sum(hub["peers"] for hub in hubs),
            "in_per_s": sum(hub["in_per_s"] or 0.0 for hub in hubs),
            "out_per_s": sum(hub["out_per_s"] or 0.0 for hub in hubs),
            "drops_per_s": sum(hub["dropped_per_s"] or 0.0 for hub in hubs),
            "loop_ms": server["loop_lag_5s_s"] * 1000,
            "cpu_percent": None if None in cpu else sum(one or 0.0 for one in cpu) * 100,
            "memory_bytes": server["memory_bytes"],
        }
        return Seen(server, hubs, now, dict(zip(self._names[2:], also, strict=True)))


def lost(hub: Mapping[str, Any]) -> int:
    """How many messages clients of a hub missed."""
    return sum(count for reason, count in hub["drops"].items() if reason in LOST)


def hub_name(hub: Mapping[str, Any]) -> str:
    """What a hub is called: by the line that made it, which begins with its application; and by its worker."""
    return f"{place_of(hub)}, worker {hub['worker']}" if "worker" in hub else place_of(hub)


def place_of(hub: Mapping[str, Any]) -> str:
    """The line of the application that made a hub."""
    return printable(str(hub["made_at"] or hub["app"] or f"hub {hub['id']}"))


def hub_choices(hubs: list[dict[str, Any]]) -> list[Snapshot]:
    """The hubs to choose from, the one with most clients first."""
    ordered = sorted(hubs, key=lambda hub: -hub["peers"])
    return [{"id": hub["id"], "name": hub_name(hub)} for hub in ordered]
