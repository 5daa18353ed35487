"""Delays before reconnects."""

from __future__ import annotations

import random
from collections.abc import Callable


class Backoff:
    """Delays that double from `first_s` to `max_s`, each shortened at random.

    The jitter spreads the clients of a restarted broker over time.

    Args:
        first_s, max_s: the first and the longest delay, before they are shortened.
        rnd: returns random numbers from 0 to below 1.
        jitter: the largest part of a delay that is taken away; 1 for full jitter.

    Attributes:
        ceiling_s: the next delay before it is shortened.
    """

    __slots__ = ("_first_s", "_jitter", "_max_s", "_random", "ceiling_s")

    def __init__(
        self, first_s: float, max_s: float, rnd: Callable[[], float] = random.random, jitter: float = 0.5
    ) -> None:
        self._first_s = first_s
        self._max_s = max(first_s, max_s)
        self.ceiling_s = first_s
        self._random, self._jitter = rnd, jitter

    def next_s(self) -> float:
        """Return the delay before the next attempt, in seconds."""
        ceiling_s = self.ceiling_s
        self.ceiling_s = min(2 * ceiling_s, self._max_s)
        return ceiling_s * (1 - self._jitter * self._random())

    def reset(self) -> None:
        """Start from the shortest delay again, after a successful attempt."""
        self.ceiling_s = self._first_s
