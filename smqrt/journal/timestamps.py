"""Timestamps of a journal: as people write them, such as `2h` ago or `2026-11-21T15:00`, and the clock that gives them.

The clock of a hub's rows is the machine's without its short jumps: a row an hour ahead would close every window of a
pipeline that is open, and most such jumps are undone within seconds (decision 0015).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import accumulate

from smqrt.errors import ArgumentError
from smqrt.settings.options import parse_duration

EARLIEST_US = 0
JUMP_US = 5_000_000
"""From here on a difference is a jump: NTP corrects less than that by and by."""
BELIEVED_US = 60_000_000
"""A jump that lasts for so long is followed; a clock that was set wrong by mistake has been set right by then."""
_READINGS = 3
_MOST_JUMPS = 1000
_NEVER_SET = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # the first counts while the machine sleeps


def now_us() -> int:
    """Returns the time in microseconds since 1970."""
    return time.time_ns() // 1000


def parse_moment(text: str, name: str = "time", now: int | None = None) -> int:
    """Returns microseconds since 1970.

    Args:
        text: a duration such as "2h" (so long ago), an ISO time (UTC unless it says otherwise), "earliest", "latest".
        name: what the error calls it, such as "--from".
        now: the time "2h" counts from, in microseconds; the clock's by default.

    Raises:
        ArgumentError: it is none of these.
    """
    now = now_us() if now is None else now
    if text in ("earliest", "latest"):
        return EARLIEST_US if text == "earliest" else now
    moment = _iso_us(text)
    if moment is None:
        moment = now - _ago_us(text, name)
    return moment


def _iso_us(text: str) -> int | None:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    return int((moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * 1_000_000)


def _ago_us(text: str, name: str) -> int:
    try:
        return int(parse_duration(text) * 1_000_000)
    except ArgumentError:
        raise ArgumentError(
            f"{name} {text!r} must be a duration such as 2h or 30m (so long ago), a time such as 2026-11-21T15:00 "
            "(UTC), earliest or latest"
        ) from None


def iso(ts_us: int) -> str:
    """Returns a time in microseconds as `2026-11-21T15:00:00.000123Z`."""
    moment = datetime.fromtimestamp(ts_us // 1_000_000, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{ts_us % 1_000_000:06d}Z"


# ---- the clock of rows


def _elapsed_us() -> int:
    return time.clock_gettime_ns(_NEVER_SET) // 1000


class Clock:
    """Goes on from the machine's clock, and follows it.

    Args:
        wall_us: reads the machine's clock, microseconds UTC.
        elapsed_us: reads one that is never set.
    """

    def __init__(self, wall_us: Callable[[], int] = now_us, elapsed_us: Callable[[], int] = _elapsed_us) -> None:
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
