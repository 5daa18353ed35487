"""The clock by which last values of several processes and nodes are compared.

It follows the monotonic clock, so that setting the machine's clock changes nothing, and is put forward to whatever
stamp it hears of, so that what is published after a stamp was heard of is newer than it.
"""

from __future__ import annotations

from collections.abc import Callable

MAX_STAMP = 1 << 62
"""Stamps are below; in µs."""


class ValueClock:
    """Gives stamps, in µs."""

    __slots__ = ("_ahead_us", "_monotonic_ns")

    def __init__(self) -> None:
        self._ahead_us = 0
        self._monotonic_ns: Callable[[], int] = lambda: 0

    def follow(self, monotonic_ns: Callable[[], int], time_ns: int) -> None:
        """Go on as this clock does, from the time it is: ns since 1970."""
        self._monotonic_ns = monotonic_ns
        self._ahead_us = (time_ns - monotonic_ns()) // 1000

    def now(self) -> int:
        """The stamp of what is published now."""
        return self._monotonic_ns() // 1000 + self._ahead_us

    def heard(self, stamp: int) -> None:
        """There is something with that stamp already."""
        behind_us = stamp + 1 - self.now()
        if behind_us > 0:
            self._ahead_us += behind_us


clock = ValueClock()
"""Of this process; whoever brings the sockets brings the time."""
