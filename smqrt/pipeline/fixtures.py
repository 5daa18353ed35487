"""Files of `smqrt pipeline init` and `test`: a pipeline to start from, recorded rows, and the results to expect.

Golden files have one JSON object a line in a list, so that diffs are short. Rows have no order, and numbers that differ
by rounding are equal.
"""

from __future__ import annotations

import json
import keyword
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeGuard

from smqrt.errors import PipelineError
from smqrt.journal import arrow, segment
from smqrt.journal.record import Flag, Row

FOLDER = "tests"
"""In the folder of pipelines: the slice, and one golden file for each query."""


# ---- golden files

TOLERANCE = 1e-9
"""By how much of itself a number may differ; sums in another order round differently."""

_SHOWN = 10


def load_golden(file: Path) -> list[object]:
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


def save_golden(file: Path, rows: Sequence[object]) -> None:
    """Writes a golden file: rows sorted, one a line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = sorted(_text(row) for row in rows)
    file.write_text("[\n" + ",\n".join(lines) + "\n]\n" if lines else "[]\n", "utf-8")


def differences(expected: Sequence[object], found: Sequence[object]) -> tuple[list[object], list[object]]:
    """Returns the expected rows that were not found, and the rows found that were not expected."""
    extra: dict[str, list[object]] = {}
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


def equal(one: object, other: object) -> bool:
    """Whether two JSON values are equal but for rounding."""
    if isinstance(one, float) or isinstance(other, float):
        return _is_number(one) and _is_number(other) and math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=1e-12)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(value, other[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and bool(one == other)


def explain(missing: Sequence[object], extra: Sequence[object]) -> Iterator[str]:
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


def _pairs(missing: list[object], extra: list[object]) -> Iterator[tuple[object, object]]:
    for row in missing:
        likeness = [_alike(row, other) for other in extra]
        best = max(likeness, default=0.0)
        yield row, extra.pop(likeness.index(best)) if best >= 0.5 else None
    yield from ((None, row) for row in extra)


def _alike(one: object, other: object) -> float:
    """Returns which part of two rows is equal."""
    left, right = dict(_leaves("", one)), dict(_leaves("", other))
    names = left.keys() | right.keys()
    same = sum(1 for name in names if name in left and name in right and equal(left[name], right[name]))
    return same / len(names) if names else 0.0


def _fields(path: str, expected: object, found: object) -> Iterator[str]:
    left, right = dict(_leaves(path, expected)), dict(_leaves(path, found))
    for name in sorted(left.keys() | right.keys()):
        if name not in right:
            yield f"{name}: expected {_text(left[name])}, it is missing"
        elif name not in left:
            yield f"{name}: {_text(right[name])} was not expected"
        elif not equal(left[name], right[name]):
            yield f"{name}: expected {_text(left[name])}, found {_text(right[name])}"


def _leaves(path: str, value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from _leaves(f"{path}.{name}" if path else str(name), part)
    else:
        yield path, value


def _taken(rows: dict[str, list[object]], text: str) -> bool:
    if not rows.get(text):
        return False
    rows[text].pop()
    return True


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


# ---- recorded rows: what `smqrt journal export FILE.jsonl` writes, one JSON object a line; by hand, these are enough:
#     {"topic": "site1/a", "ts": "2026-11-21T12:00:00Z", "payload": {"device": "a", "temp": 21.5}}

NODE = "n1"

_BATCH_ROWS = 4096
_KNOWN = ("topic", "ts", "payload", "payload_hex", "subtopic", "uid", "flags")
_IGNORED = ("node", "seq", "tid", "stid", "ptid", "txn", "broker", "json")


def write_journal(file: Path, to: Path) -> int:
    """Writes a journal with the messages of a file, in their order.

    Args:
        file: with one JSON object a line; empty lines don't count.
        to: folder of the journal; made.

    Returns:
        How many messages it has.

    Raises:
        PipelineError: the file can't be read, or a line isn't a message; the sentence begins with file:line.
    """
    rows = list(_journal_rows(file))
    if not rows:
        raise PipelineError(f"{file} holds no message; write one JSON object a line: {_EXAMPLE}")
    written = segment.SegmentFile.open(to / "wal" / NODE, 0, NODE, "recorded")
    try:
        for first in range(0, len(rows), _BATCH_ROWS):
            some = rows[first : first + _BATCH_ROWS]
            times_us = [row.ts_us for row in some]
            written.append(arrow.encode(some), first, len(some), min(times_us), max(times_us), 0)
    finally:
        written.close()
    return len(rows)


_EXAMPLE = '{"topic": "site1/a", "ts": "2026-11-21T12:00:00Z", "payload": {"temp": 21.5}}'


def _journal_rows(file: Path) -> Iterator[Row]:
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"{file} can't be read: {getattr(error, 'strerror', None) or error}.") from None
    lines = ((number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip())
    for seq, (number, line) in enumerate(lines):
        try:
            yield _journal_row(seq, json.loads(line))
        except ValueError as error:
            raise PipelineError(f"{file}:{number}: {error}; a line is like {_EXAMPLE}") from None


def _journal_row(seq: int, values: Any) -> Row:
    if not isinstance(values, dict):
        raise ValueError("it isn't a JSON object")
    for name in values:
        if name not in _KNOWN and name not in _IGNORED:
            raise ValueError(f"there is no {name!r} in a message; it has {', '.join(_KNOWN)}")
    topic, flags = values.get("topic"), _flags(values.get("flags"))
    if topic is None:
        flags |= Flag.DIRECT
    # What lasts only as long as a connection or a broker says nothing in a test.
    subtopic, uid = values.get("subtopic"), values.get("uid")
    return Row(
        seq, _time_us(values.get("ts")), topic, None, subtopic, None, None, uid, flags, _payload_bytes(values), None
    )


def _time_us(value: Any) -> int:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return round(value * 1_000_000)
    try:
        moment = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise ValueError(f"ts={value!r} is neither an ISO time nor seconds since 1970") from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    whole = int(moment.replace(microsecond=0).timestamp())
    return whole * 1_000_000 + moment.microsecond


def _payload_bytes(values: dict[str, Any]) -> bytes:
    if "payload_hex" in values:
        return bytes.fromhex(values["payload_hex"])
    if "payload" not in values:
        raise ValueError("there is no payload")
    payload = values["payload"]
    return (payload if isinstance(payload, str) else json.dumps(payload, ensure_ascii=False)).encode()


def _flags(value: Any) -> int:
    if value is None or isinstance(value, int):
        return value or 0
    try:
        return int(sum(Flag[str(word).upper()] for word in value))
    except (KeyError, TypeError):
        raise ValueError(
            f"flags={value!r}: there are {', '.join(flag.name.lower() for flag in Flag if flag.name)}"
        ) from None


# ---- a pipeline to start from

_PIPELINE_TEXT = '''"""The mean temperature of each device and minute.

Devices publish to site1/...: {"device": "d1", "temp": 21.5}. Results are published to NAME/{device}.
"""

from pyspark.sql import functions as F

from smqrt.pipeline import expect, publish, source


@source(topics="site1/#", json="device string, temp double", watermark="10 seconds")
@expect("temp between -60 and 150", on_fail="drop")
def NAME_readings(rows):
    return rows


@publish(to="NAME/{device}", mode="update")
def NAME(NAME_readings):
    # The window itself carries the watermark, and so is forgotten when it is over; a column made of it does not.
    windows = NAME_readings.groupBy("device", F.window("ts", "1 minute").alias("minute"))
    means = windows.agg(F.round(F.avg("temp"), 2).alias("mean"), F.count("*").alias("n"))
    return means.select("device", F.col("minute.start").alias("minute"), "mean", "n")
'''
_EXAMPLE_ROWS = (
    ("12:00:01", "site1/hall", {"device": "d1", "temp": 20.0}),
    ("12:00:02", "site1/hall", {"device": "d2", "temp": 30.5}),
    ("12:00:31", "site1/hall", {"device": "d1", "temp": 21.0}),
    ("12:00:32", "site1/hall", {"device": "d2", "temp": 999}),
    ("12:00:33", "site1/hall", "no JSON"),
    ("12:01:10", "site1/hall", {"device": "d1", "temp": 22.25}),
    ("12:01:11", "site2/hall", {"device": "d3", "temp": 1.0}),
)
_MEANS = (("d1", "12:00", 20.5, 2), ("d1", "12:01", 22.25, 1), ("d2", "12:00", 30.5, 1))
_DAY = "2026-11-21T"


def make_pipeline(folder: Path, name: str) -> list[Path]:
    """Makes a pipeline file, and the rows and the expected results of its test.

    Rows that are there already are kept: then the results are yours to look at, and to keep with `--update`.

    Args:
        folder: where pipelines lie, usually `<application>/pipelines`; made when it isn't there.
        name: of the file, and of the query in it.

    Returns:
        The files that were made.

    Raises:
        PipelineError: `name` can't be a function's name, the file is there already, or one can't be written.
    """
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith(("_", "test_")):
        raise PipelineError(f"{name!r} names a Python function too: take letters, digits and '_', as in per_minute.")
    files = {folder / f"{name}.py": _PIPELINE_TEXT.replace("NAME", name)}
    if not list((folder / FOLDER).glob("*.jsonl")):
        files |= {folder / FOLDER / "messages.jsonl": _messages(), folder / FOLDER / f"{name}.json": _means(name)}
    for path in files:
        if path.exists():
            raise PipelineError(f"{path} is there already: choose another name.")
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
    except OSError as error:
        raise PipelineError(f"{error.filename} can't be written: {error.strerror}.") from None
    return list(files)


def _messages() -> str:
    rows = ({"topic": topic, "ts": f"{_DAY}{time}Z", "payload": payload} for time, topic, payload in _EXAMPLE_ROWS)
    return "".join(json.dumps(row) + "\n" for row in rows)


def _means(name: str) -> str:
    """As `smqrt pipeline test --update` writes it."""
    rows = (
        {
            "topic": f"{name}/{device}",
            "payload": {"device": device, "minute": f"{_DAY}{minute}:00.000Z", "mean": mean, "n": n},
        }
        for device, minute, mean, n in _MEANS
    )
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"
