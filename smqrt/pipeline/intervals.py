"""Durations as people write them ("200 ms", "10 seconds", "5 minutes"), in milliseconds and as Spark wants them."""

from __future__ import annotations

import re

from smqrt.errors import PipelineError

_UNITS_MS = {
    "ms": 1,
    "millisecond": 1,
    "s": 1000,
    "second": 1000,
    "m": 60_000,
    "minute": 60_000,
    "h": 3_600_000,
    "hour": 3_600_000,
    "d": 86_400_000,
    "day": 86_400_000,
}
_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(" + "|".join(sorted(_UNITS_MS, key=len, reverse=True)) + r")s?\s*")


def milliseconds(text: str, name: str = "") -> int:
    """Returns a duration in milliseconds: "200 ms" is 200, "1.5 minutes" is 90000.

    Args:
        text: the duration.
        name: what the error begins with, such as "--trigger ".

    Raises:
        PipelineError: `text` is no duration.
    """
    match = _FORM.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        remedy = "write a number and a unit, such as '200 ms' or '10 seconds'"
        raise PipelineError(f"{name}{text!r} is no duration: {remedy}.")
    return round(float(match[1]) * _UNITS_MS[match[2]])


def for_spark(text: str) -> str:
    """Returns the same duration as Spark's own parser takes it; it doesn't know "ms".

    Raises:
        PipelineError: `text` is no duration.
    """
    return f"{milliseconds(text)} milliseconds"
