"""Golden files: the rows that a query is expected to give, one JSON object a line in a list, so that diffs are short.

Rows have no order, and numbers that differ by rounding are equal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from smqrt.errors import PipelineError

TOLERANCE = 1e-9
"""By how much of itself a number may differ; sums in another order round differently."""

_SHOWN = 10


def load(file: Path) -> list[Any]:
    """Reads a golden file.

    Raises:
        PipelineError: it is no JSON list.
    """
    try:
        rows = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise PipelineError(f"{file} can't be read: {error}; smqrt pipeline test --update writes it anew.") from None
    if not isinstance(rows, list):
        raise PipelineError(f"{file} must hold a JSON list of rows; smqrt pipeline test --update writes it anew.")
    return rows


def save(file: Path, rows: Sequence[Any]) -> None:
    """Writes a golden file: rows sorted, one a line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = sorted(_text(row) for row in rows)
    file.write_text("[\n" + ",\n".join(lines) + "\n]\n" if lines else "[]\n", "utf-8")


def differences(expected: Sequence[Any], found: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Returns the expected rows that were not found, and the rows found that were not expected."""
    extra: dict[str, list[Any]] = {}
    for row in found:
        extra.setdefault(_text(row), []).append(row)
    missing = [row for row in expected if not _taken(extra, _text(row))]
    rest = [row for rows in extra.values() for row in rows]
    still = []
    for row in missing:
        near = next((number for number, other in enumerate(rest) if equal(row, other)), None)
        if near is None:
            still.append(row)
        else:
            del rest[near]
    return sorted(still, key=_text), sorted(rest, key=_text)


def equal(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal but for rounding."""
    if isinstance(one, float) or isinstance(other, float):
        return _is_number(one) and _is_number(other) and math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=1e-12)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(value, other[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and bool(one == other)


def explain(missing: Sequence[Any], extra: Sequence[Any]) -> Iterator[str]:
    """Yields lines that tell differences: "-" was expected, "+" was found; rows that are alike stand together."""
    pairs = list(_pairs(list(missing), list(extra)))
    for expected, found in pairs[:_SHOWN]:
        if expected is not None:
            yield f"  - {_text(expected)}"
        if found is not None:
            yield f"  + {_text(found)}"
        if expected is not None and found is not None:
            yield from (f"      {line}" for line in _fields("", expected, found))
    if len(pairs) > _SHOWN:
        yield f"  ... and {len(pairs) - _SHOWN} more"


def _pairs(missing: list[Any], extra: list[Any]) -> Iterator[tuple[Any, Any]]:
    for row in missing:
        likeness = [_alike(row, other) for other in extra]
        best = max(likeness, default=0.0)
        yield row, extra.pop(likeness.index(best)) if best >= 0.5 else None
    yield from ((None, row) for row in extra)


def _alike(one: Any, other: Any) -> float:
    """Returns which part of two rows is equal."""
    left, right = dict(_leaves("", one)), dict(_leaves("", other))
    names = left.keys() | right.keys()
    same = sum(1 for name in names if name in left and name in right and equal(left[name], right[name]))
    return same / len(names) if names else 0.0


def _fields(path: str, expected: Any, found: Any) -> Iterator[str]:
    left, right = dict(_leaves(path, expected)), dict(_leaves(path, found))
    for name in sorted(left.keys() | right.keys()):
        if name not in right:
            yield f"{name}: expected {_text(left[name])}, it is missing"
        elif name not in left:
            yield f"{name}: {_text(right[name])} was not expected"
        elif not equal(left[name], right[name]):
            yield f"{name}: expected {_text(left[name])}, found {_text(right[name])}"


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from _leaves(f"{path}.{name}" if path else str(name), part)
    else:
        yield path, value


def _taken(rows: dict[str, list[Any]], text: str) -> bool:
    if not rows.get(text):
        return False
    rows[text].pop()
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
