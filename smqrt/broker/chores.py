"""Work that is too long for one turn of the loop: a few milliseconds of it per turn, in the order it came."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator

PORTION_S = 0.004
"""What chores may take of one turn."""

log = logging.getLogger("smqrt")


class Chores:
    """Generators that are advanced step by step; one begins when those before it have ended."""

    def __init__(self) -> None:
        self._steps: deque[Iterator[None]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, steps: Iterator[None]) -> None:
        """Work off `steps` behind what is there already. What it raises is logged and ends it."""
        self._steps.append(steps)

    def work(self, clock: Callable[[], float]) -> None:
        """Work for `PORTION_S` on `clock`, which gives seconds, or until nothing is left."""
        until_s = clock() + PORTION_S
        while self._steps:
            if not self._advance(self._steps[0], clock, until_s):
                return
            self._steps.popleft()

    def _advance(self, steps: Iterator[None], clock: Callable[[], float], until_s: float) -> bool:
        """Whether `steps` ended in time."""
        try:
            for _ in steps:
                if clock() >= until_s:
                    return False
        except Exception:
            log.exception("error in work that was put off")
        return True
