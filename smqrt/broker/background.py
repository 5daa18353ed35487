"""Work of a broker that is too long for one turn of the loop."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator

log = logging.getLogger("smqrt")

BACKGROUND_S = 0.004
"""Time for background tasks in one turn."""


class BackgroundTasks:
    """Work that is too long for one turn of the loop, as generators.

    They run one after the other in the order they were added, a few milliseconds per turn.

    Attributes:
        steps: the generators that are not finished.
    """

    def __init__(self) -> None:
        self.steps: deque[Iterator[None]] = deque()

    def add(self, steps: Iterator[None]) -> None:
        """Append a generator. An exception ends it and is logged."""
        self.steps.append(steps)

    def work(self, clock: Callable[[], float]) -> None:
        """Run generators for `BACKGROUND_S` on `clock`, which returns seconds, or until none is left."""
        until_s = clock() + BACKGROUND_S
        while self.steps:
            try:
                for _ in self.steps[0]:  # stays in front while it is unfinished: the next turn continues it
                    if clock() >= until_s:
                        return
            except Exception:
                log.exception("error in a background task")
            self.steps.popleft()


class TimeAtOnce:
    """The time that the tasks which run at once have used of this turn.

    Attributes:
        spent_s: seconds.
    """

    __slots__ = ("spent_s",)

    def __init__(self) -> None:
        self.spent_s = 0.0
