"""Options of decorators: how each is checked, durations ("200 ms") and topics with columns in them ("agg/{device}")."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from smqrt.errors import ArgumentError, PipelineError
from smqrt.settings.options import parse_duration, parse_size


def milliseconds(text: object, name: str = "") -> int:
    """Returns a duration in milliseconds: "200 ms" is 200, "1.5 minutes" is 90000.

    Args:
        text: the duration.
        name: what the error begins with, such as "--trigger ".

    Raises:
        PipelineError: `text` is no duration.
    """
    try:
        return round(parse_duration(str(text)) * 1000)
    except ArgumentError as error:
        raise PipelineError(f"{name}{error}.") from None


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


# ---- checks: each takes `file:line` of a decorator, an option's name and what was given, and returns what to keep

Check = Callable[[str, str, object], object]


def optional(check: Check) -> Check:
    """Returns a check that lets None pass."""
    return lambda where, name, value: None if value is None else check(where, name, value)


def choice(*choices: str) -> Check:
    """Returns a check for one of some words."""

    def check(where: str, name: str, value: object) -> str:
        if value not in choices:
            raise PipelineError(f"{where}: {name}={value!r} must be one of {', '.join(map(repr, choices))}.")
        return str(value)

    return check


def text_or_empty(where: str, name: str, value: object) -> str:
    """Returns a text."""
    if not isinstance(value, str):
        raise PipelineError(f"{where}: {name}={value!r} must be a text.")
    return value


def text(where: str, name: str, value: object) -> str:
    """Returns a text that is not empty."""
    if not isinstance(value, str) or not value:
        raise PipelineError(f"{where}: {name}={value!r} must be a text that is not empty.")
    return value


def texts(where: str, name: str, value: object) -> tuple[str, ...]:
    """Returns several texts, of which one may be given alone."""
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, Sequence) or not all(isinstance(item, str) and item for item in values):
        raise PipelineError(f"{where}: {name}={value!r} must be a text or a list of texts.")
    return tuple(values)


def flag(where: str, name: str, value: object) -> bool:
    """Returns True or False."""
    if not isinstance(value, bool):
        raise PipelineError(f"{where}: {name}={value!r} must be True or False.")
    return value


def count(where: str, name: str, value: object) -> int:
    """Returns a whole number above 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PipelineError(f"{where}: {name}={value!r} must be a whole number above 0.")
    return value


def size(where: str, name: str, value: object) -> int:
    """Returns the bytes of "64MB", or of a number."""
    try:
        return count(where, name, parse_size(value))
    except ArgumentError as error:
        raise PipelineError(f"{where}: {name}={value!r}: {error}") from None


def duration(where: str, name: str, value: object) -> str:
    """Returns a duration as it is written."""
    try:
        milliseconds(value)
    except PipelineError as error:
        raise PipelineError(f"{where}: {name}: {error}") from None
    return str(value)


def topic(where: str, name: str, value: object) -> str:
    """Returns the text of a `Template`."""
    try:
        return Template(text(where, name, value)).text
    except PipelineError as error:
        raise PipelineError(f"{where}: {name}: {error}") from None


def on_error(where: str, name: str, value: object) -> str:
    """Returns "fail", "drop", "dead_letter" or "dead_letter:TOPIC"."""
    action, colon, rest = value.partition(":") if isinstance(value, str) else ("", "", "")
    if action not in ("fail", "drop", "dead_letter") or (colon and (action != "dead_letter" or not rest)):
        raise PipelineError(f"{where}: {name}={value!r} must be 'fail', 'drop', 'dead_letter' or 'dead_letter:TOPIC'.")
    return str(value)


CHECKS: dict[str, dict[str, Check]] = {
    "source": {
        "topics": texts,
        "exclude": texts,
        "json": optional(text),
        "prefix": text_or_empty,
        "watermark": optional(duration),
        "event_time": text,
        "max_future": optional(duration),
        "dead_letter": optional(text),
        "include_pipeline": flag,
        "max_rows": count,
        "max_bytes": optional(size),
        "min_partitions": optional(count),
        "rows_per_partition": optional(count),
        "bytes_per_partition": optional(size),
        "fail_on_data_loss": flag,
    },
    "publish": {
        "to": topic,
        "subtopic": optional(topic),
        "mode": choice("append", "update", "complete"),
        "trigger": duration,
        "on_error": on_error,
    },
    "table": {
        "path": text,
        "partition_by": texts,
        "dead_letter": optional(text),
        "format": choice("parquet", "delta", "iceberg"),
        "trigger": duration,
        "on_error": on_error,
    },
    "alert": {
        "to": topic,
        "key": texts,
        "when": optional(text),
        "clear": optional(text),
        "cooldown": optional(duration),
        "absent": optional(duration),
        "rate": optional(text),
        "trigger": duration,
        "on_error": on_error,
    },
    "reference": {"path": text, "schema": optional(text)},
    "stateful": {"key": texts, "schema": text, "time": optional(choice("processing", "event"))},
}
"""How the options of each decorator are checked."""
