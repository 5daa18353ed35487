"""Deadlines of many connections with one timer.

Arming a deadline is one attribute write: a repeating timer looks over all watched objects a few times a second. That
is cheaper than a timer each, since nearly every deadline is moved many times and never reached.
"""

from __future__ import annotations

import logging
from time import monotonic
from typing import Protocol

from gevent import get_hub

from smqrt.net.turn import share

NEVER = float("inf")
TICK_S = 0.25

log = logging.getLogger("smqrt")


class Timed(Protocol):
    """What can be watched: `deadline_s` is on the clock of `time.monotonic`."""

    deadline_s: float

    def expired(self) -> None:
        """The deadline is over. Called in the Hub greenlet; must not block."""


class Deadlines:
    """Calls `expired()` of each watched object once its `deadline_s` has passed.

    Args:
        tick_s: seconds between two looks, and so the most by which a deadline is late.
    """

    def __init__(self, tick_s: float = TICK_S) -> None:
        self._watched: set[Timed] = set()
        self._tick_s = tick_s
        self._timer = get_hub().loop.timer(tick_s, tick_s)

    def __len__(self) -> int:
        return len(self._watched)

    def watch(self, item: Timed) -> None:
        """Begin to look at `item`."""
        if not self._watched:  # an idle process is not woken
            self._timer.start(self._look)
        self._watched.add(item)

    def forget(self, item: Timed) -> None:
        """Stop looking at `item`."""
        self._watched.discard(item)
        if not self._watched:
            self._timer.stop()

    def close(self) -> None:
        """Forget all."""
        self._watched.clear()
        self._timer.stop()
        self._timer.close()

    def _look(self) -> None:
        now, turn = monotonic(), share()
        for item in [item for item in self._watched if item.deadline_s <= now]:
            if turn.spent():  # so many at once: the others of them in a later turn
                turn.later(self._look)
                return
            item.deadline_s = NEVER
            try:
                item.expired()
            except Exception:
                log.exception("error when a deadline passed")
