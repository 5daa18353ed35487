"""Time for Lua."""

from __future__ import annotations

import time
from typing import Any

from gevent import get_hub

from smqrt.lua.parking import Parking


def clock_ms() -> int:
    """Milliseconds of a clock that never goes back."""
    return time.monotonic_ns() // 1_000_000


class Sleep(Parking):
    """Answered when the time is over."""

    __slots__ = ("_timer",)

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._timer: Any = get_hub().loop.timer(seconds)
        self._timer.start(self._over, update=True)

    def _over(self) -> None:
        self._end()
        self.resolve()

    def cancel(self) -> None:
        """The activity was ended before."""
        self._end()
        super().cancel()

    def _end(self) -> None:
        self._timer.stop()
        self._timer.close()


def pause() -> None:
    """Nothing: as every blocking call, it lets others run when this activity has had its share of the loop."""


def sleep_ms(ms: float) -> Sleep:
    """Park the activity for that time; others run meanwhile."""
    return Sleep(max(ms, 0) / 1000)
