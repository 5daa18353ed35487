"""Dates in HTTP's form."""

from __future__ import annotations

from email.utils import formatdate, parsedate_to_datetime
from time import time


def http_date(unix_s: float) -> str:
    """Give the HTTP form of a time in seconds since 1970."""
    return formatdate(unix_s, usegmt=True)


def parse_date(text: str) -> int | None:
    """Read an HTTP date; None when it is none."""
    try:
        return int(parsedate_to_datetime(text).timestamp())
    except (ValueError, OverflowError):
        return None


class _Clock:
    """The `Date` header of the present second, built once a second."""

    def __init__(self) -> None:
        self.second = -1
        self.line = b""


_clock = _Clock()


def date_line() -> bytes:
    """Give the `Date: …` line of now, with its line end."""
    now = int(time())
    if now != _clock.second:
        _clock.line = b"Date: %s\r\n" % http_date(now).encode()
        _clock.second = now
    return _clock.line
