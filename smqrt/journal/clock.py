"""The time of a journal's rows: the machine's clock without its short jumps (decision 0015)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import accumulate

JUMP_US = 5_000_000
"""From here on a difference is a jump: NTP corrects less than that by and by."""
BELIEVED_US = 60_000_000
"""A jump that lasts for so long is followed; a clock that was set wrong by mistake has been set right by then."""
_READINGS = 3
_MOST_JUMPS = 1000
_NEVER_SET = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # the first counts while the machine sleeps


def _wall_us() -> int:
    return time.time_ns() // 1000


def _elapsed_us() -> int:
    return time.clock_gettime_ns(_NEVER_SET) // 1000


class Clock:
    """Goes on from the machine's clock, and follows it.

    Args:
        wall_us: reads the machine's clock, microseconds UTC.
        elapsed_us: reads one that is never set.
    """

    def __init__(self, wall_us: Callable[[], int] = _wall_us, elapsed_us: Callable[[], int] = _elapsed_us) -> None:
        self._wall_us, self._elapsed_us = wall_us, elapsed_us
        self._offset_us = self._read()
        self._latest_us = 0
        self._jump_us = self._since_us = 0
        self._jumps: deque[tuple[int, int]] = deque(maxlen=_MOST_JUMPS)

    def _read(self) -> int:
        """Returns by how much the machine's clock is ahead; of some readings that which was interrupted least."""
        return max(self._wall_us() - self._elapsed_us() for _ in range(_READINGS))

    def now_us(self) -> int:
        """Returns the time in microseconds UTC: never less than before, unless `follow` has moved it back since."""
        now_us = self._elapsed_us() + self._offset_us
        if now_us < self._latest_us:
            return self._latest_us
        self._latest_us = now_us
        return now_us

    def follow(self) -> int:
        """Compares the time with the machine's clock; to be called every second or so.

        Less than `JUMP_US` is corrected at once: forward the time goes on from there, backward it stands still until
        it is right. A jump has to last.

        Returns:
            By how many microseconds the time has jumped now; 0 as a rule.
        """
        offset_us = self._read()
        ahead_us = offset_us - self._offset_us
        if abs(ahead_us) < JUMP_US:
            self._offset_us, self._jump_us = offset_us, 0
            return 0
        if not self._jump_us or abs(ahead_us - self._jump_us) >= JUMP_US:
            self._jump_us, self._since_us = ahead_us, self._elapsed_us()
        if self._elapsed_us() - self._since_us < BELIEVED_US:
            return 0
        self._offset_us, self._jump_us, self._latest_us = offset_us, 0, 0
        self._jumps.append((self._elapsed_us(), ahead_us))
        return ahead_us

    def leapt_us(self, within_s: float) -> int:
        """Returns by how much what happened in the last seconds may look older than it is, because the time has jumped
        forward since; what is older than that anyway doesn't count.

        Args:
            within_s: how many.
        """
        since_us = self._elapsed_us() - int(within_s * 1e6)
        latest_first = [ahead_us for at_us, ahead_us in reversed(self._jumps) if at_us >= since_us]
        return max(0, *accumulate(latest_first), 0)
