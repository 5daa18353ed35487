"""Time for Lua."""

from __future__ import annotations

import time

from smqrt.net.readiness import TimedDeferred


def clock_ms() -> int:
    """Milliseconds of a clock that never goes back."""
    return time.monotonic_ns() // 1_000_000


class Sleep(TimedDeferred[None]):
    """Resolved when the time is over."""

    __slots__ = ()

    def _expired(self) -> None:
        self.resolve()


def pause() -> None:
    """Nothing: as every blocking call, it lets others run when this activity has had its share of the loop."""


def sleep_ms(ms: float) -> Sleep:
    """Park the activity for that time; others run meanwhile."""
    return Sleep(max(ms, 0) / 1000)
