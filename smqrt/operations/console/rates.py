"""Rates of counters that are looked at now and then."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from time import monotonic


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
