"""Moments as people write them: `2h` ago, `2026-11-21T15:00`, `earliest`, `latest`."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from smqrt.errors import ArgumentError
from smqrt.options import parse_duration

EARLIEST_US = 0


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
