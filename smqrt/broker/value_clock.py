"""The clock by which last values of several processes and nodes are compared.

It follows the monotonic clock, so that setting the machine's clock changes nothing, and is put forward to whatever
stamp it hears of, so that what is published after a stamp was heard of is newer than it.
"""

from __future__ import annotations

import time

MAX_STAMP = 1 << 62
"""Stamps are below; in µs."""


class ValueClock:
    """Gives stamps, in µs."""

    __slots__ = ("_ahead_us",)

    def __init__(self) -> None:
        self._ahead_us = (time.time_ns() - time.monotonic_ns()) // 1000

    def now(self) -> int:
        """The stamp of what is published now."""
        return time.monotonic_ns() // 1000 + self._ahead_us

    def heard(self, stamp: int) -> None:
        """There is something with that stamp already."""
        behind_us = stamp + 1 - self.now()
        if behind_us > 0:
            self._ahead_us += behind_us


clock = ValueClock()
"""Of this process."""
