"""How long to wait before the next attempt: doubling, with jitter, reset by success."""

from __future__ import annotations

import random
from collections.abc import Callable


class Backoff:
    """Delays that double from `first_s` to `longest_s`, each shortened by up to a half at random.

    The jitter spreads the clients of a restarted broker over time instead of letting them all come at once.
    """

    __slots__ = ("_ceiling_s", "_first_s", "_longest_s", "_random")

    def __init__(self, first_s: float, longest_s: float, rnd: Callable[[], float] = random.random) -> None:
        self._first_s = first_s
        self._longest_s = max(first_s, longest_s)
        self._ceiling_s = first_s
        self._random = rnd

    def next_s(self) -> float:
        """The delay before the next attempt, in seconds."""
        ceiling_s = self._ceiling_s
        self._ceiling_s = min(2 * ceiling_s, self._longest_s)
        return ceiling_s * (1 - 0.5 * self._random())

    def reset(self) -> None:
        """An attempt succeeded: start from the shortest delay again."""
        self._ceiling_s = self._first_s
