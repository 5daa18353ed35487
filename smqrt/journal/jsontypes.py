"""JSON values and the types of a DDL: does a value fit, what is it as a value of a column, and which type fits many.

A value of a wrong type becomes null and its neighbours stay, as with Spark's `from_json`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime
from typing import Any

from smqrt.journal.ddl import Array, Scalar, Struct, Type

DOMINANT = 0.95
"""A type that this share of the values of a field have is the field's type; with less agreement it is a string."""

_BITS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
_BIGGEST = 1 << 63


def load(payload: bytes) -> object:
    """Returns the JSON value of a payload, or `Ellipsis` when it is none."""
    try:
        return json.loads(payload.decode())  # of bytes it would take UTF-16 too
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or nested without end
        return ...


# ---- values to columns


def cast(value: object, kind: Type) -> object:
    """Returns a JSON value as a column of a type wants it; None when it is of another type."""
    if value is None:
        return None
    if isinstance(kind, Struct):
        return {name: cast(value.get(name), inner) for name, inner in kind.fields} if isinstance(value, dict) else None
    if isinstance(kind, Array):
        return [cast(item, kind.item) for item in value] if isinstance(value, list) else None
    return _CASTS[kind.name](value)


def fits(value: object, kind: Type) -> bool:
    """Whether every part of a JSON value has the type the DDL gives it; fields the DDL does not name don't count."""
    if value is None:
        return True
    if isinstance(kind, Struct):
        return isinstance(value, dict) and all(fits(value.get(name), inner) for name, inner in kind.fields)
    if isinstance(kind, Array):
        return isinstance(value, list) and all(fits(item, kind.item) for item in value)
    return _CASTS[kind.name](value) is not None


def _whole(bits: int) -> Callable[[object], int | None]:
    biggest = 1 << (bits - 1)

    def convert(value: object) -> int | None:
        return value if type(value) is int and -biggest <= value < biggest else None

    return convert


def _double(value: object) -> float | None:
    try:
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    except OverflowError:
        return None


def _boolean(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _text(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()  # half a surrogate pair is JSON, but no text


def _timestamp(value: object) -> datetime | None:
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return moment.replace(tzinfo=UTC) if moment is not None and moment.tzinfo is None else moment


def _date(value: object) -> date | None:
    try:
        return date.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None


_CASTS: dict[str, Callable[[Any], object]] = {
    **{name: _whole(bits) for name, bits in _BITS.items()},
    "float": _double,
    "double": _double,
    "boolean": _boolean,
    "string": _text,
    "timestamp": _timestamp,
    "date": _date,
}


# ---- values to a type


class Seen:
    """What values a place in a JSON document has had; `kind()` is the narrowest type that (nearly) all of them have."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._fields: dict[str, Seen] = {}
        self._items: Seen | None = None

    def add(self, value: object) -> None:
        """Take one JSON value into account."""
        self._counts[_name(value)] += 1
        if isinstance(value, dict):
            for name, inner in value.items():
                self._fields.setdefault(name, Seen()).add(inner)
        elif isinstance(value, list):
            self._items = self._items or Seen()
            for item in value:
                self._items.add(item)

    def kind(self) -> Type:
        """Returns the type. Whole numbers and fractions together are double; what disagrees too much is string."""
        numbers = self._counts["bigint"] + self._counts["double"]
        groups = {name: count for name, count in self._counts.items() if name not in ("null", "bigint", "double")}
        groups["number"] = numbers
        name, most = max(groups.items(), key=lambda group: group[1])
        if most < DOMINANT * sum(groups.values()) or not most:
            return Scalar("string")
        if name == "number":
            return Scalar("double" if self._counts["double"] else "bigint")
        return self._nested(name)

    def _nested(self, name: str) -> Type:
        if name == "object":
            fields = _one_case(self._fields)
            return Struct(tuple((field, seen.kind()) for field, seen in fields.items())) if fields else Scalar("string")
        if name == "list":
            return Array(self._items.kind() if self._items else Scalar("string"))
        return Scalar(name)


def _name(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "bigint" if -_BIGGEST <= value < _BIGGEST else "double"
    return {float: "double", str: "string", dict: "object", list: "list"}[type(value)]


def _one_case(fields: dict[str, Seen]) -> dict[str, Seen]:
    """The fields without those that differ from an earlier one only in case: Spark can't tell them apart."""
    spellings: dict[str, str] = {}
    return {name: seen for name, seen in fields.items() if spellings.setdefault(name.lower(), name) == name}


def infer(values: Iterable[object]) -> Type:
    """Returns the type that fits JSON values, as `Seen` finds it."""
    seen = Seen()
    for value in values:
        seen.add(value)
    return seen.kind()
