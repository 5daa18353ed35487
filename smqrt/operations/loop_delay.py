"""Delay of the event loop: a timer that looks how much later than asked for it was called."""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import Any

from gevent import get_hub

TICK_S = 0.05
"""Twenty wake-ups a second cost 0.05 % of a core; a turn longer than this can't be missed."""
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_MINUTE_S = 60


class LoopLag:
    """Measures the loop of the thread that calls `start`.

    Attributes:
        last_s: how late the last tick was.
        buckets: how many ticks were at most as late as each of `BUCKETS_S`, and how many later than all.
        total_s, count: of all ticks.
    """

    def __init__(self) -> None:
        self.last_s = self.total_s = 0.0
        self.count = 0
        self.buckets = [0] * (len(BUCKETS_S) + 1)
        self._worst: deque[tuple[int, float]] = deque(maxlen=_MINUTE_S)
        self._timer: Any = None
        self._due_s = 0.0

    @property
    def worst_s(self) -> float:
        """The latest tick of the last minute."""
        return self.worst_of(_MINUTE_S)

    def worst_of(self, seconds: int) -> float:
        """How late the latest tick of the last `seconds`, at most a minute, was; in seconds."""
        since = int(monotonic()) - seconds
        return max((late_s for second, late_s in self._worst if second >= since), default=0.0)

    def start(self) -> None:
        """Begin to measure."""
        self._timer = get_hub().loop.timer(TICK_S, TICK_S)
        self._timer.ref = False
        self._due_s = monotonic() + TICK_S
        self._timer.start(self._tick)

    def stop(self) -> None:
        """Measure no more; a second call does nothing."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.stop()
            timer.close()

    def _tick(self) -> None:
        now_s = monotonic()
        late_s = max(now_s - self._due_s, 0.0)
        self._due_s = now_s + TICK_S
        self.last_s = late_s
        self.total_s += late_s
        self.count += 1
        self.buckets[next((at for at, most_s in enumerate(BUCKETS_S) if late_s <= most_s), len(BUCKETS_S))] += 1
        second = int(now_s)
        if self._worst and self._worst[-1][0] == second:
            self._worst[-1] = (second, max(self._worst[-1][1], late_s))
        else:
            self._worst.append((second, late_s))
