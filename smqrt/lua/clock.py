"""Time for Lua."""

from __future__ import annotations

import time

import gevent


def clock_ms() -> int:
    """Milliseconds of a clock that never goes back."""
    return time.monotonic_ns() // 1_000_000


def sleep_ms(ms: float) -> None:
    """Wait in the current greenlet; others run meanwhile."""
    gevent.sleep(max(ms, 0) / 1000)
