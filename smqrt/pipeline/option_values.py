"""Values of options: durations ("200 ms", "10 seconds") and topics with columns in them ("agg/{device}")."""

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
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(" + "|".join(sorted(_UNITS_MS, key=len, reverse=True)) + r")s?\s*")


def milliseconds(text: str, name: str = "") -> int:
    """Returns a duration in milliseconds: "200 ms" is 200, "1.5 minutes" is 90000.

    Args:
        text: the duration.
        name: what the error begins with, such as "--trigger ".

    Raises:
        PipelineError: `text` is no duration.
    """
    match = _DURATION.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        remedy = "write a number and a unit, such as '200 ms' or '10 seconds'"
        raise PipelineError(f"{name}{text!r} is no duration: {remedy}.")
    return round(float(match[1]) * _UNITS_MS[match[2]])


def spark_duration(text: str) -> str:
    """Returns the same duration as Spark's own parser takes it; it doesn't know "ms".

    Raises:
        PipelineError: `text` is no duration.
    """
    return f"{milliseconds(text)} milliseconds"


_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]|[^{}]+")


class Template:
    """A text in which `{column}` stands for a column of the row; `{{` and `}}` are braces.

    Args:
        text: such as "agg/{device}" or "agg/{window.start}".

    Attributes:
        text: as it was given.
        parts: (is a column, text or column) in order.

    Raises:
        PipelineError: a brace is without its partner, or there is nothing between them.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.parts: list[tuple[bool, str]] = []
        for match in _PART.finditer(text):
            self._add(match[0], match[1])

    def _add(self, piece: str, column: str | None) -> None:
        if piece in ("{", "}") or (column is not None and not column.strip()):
            raise PipelineError(f"{self.text!r} has a brace without a column; write {{column}}, or {{{{ for a brace.")
        if column is not None:
            self.parts.append((True, column.strip()))
        else:
            self.parts.append((False, {"{{": "{", "}}": "}"}.get(piece, piece)))

    @property
    def columns(self) -> list[str]:
        """Returns the columns that the row must have, in order."""
        return [piece for is_column, piece in self.parts if is_column]
