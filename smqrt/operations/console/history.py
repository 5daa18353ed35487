"""The last hour of a server's figures, in memory of a fixed size."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from smqrt.operations.snapshots import Snapshot

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
