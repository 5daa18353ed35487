"""A recorded slice of messages as a journal, made from a file with one JSON object a line.

    {"topic": "site1/a", "ts": "2026-11-21T12:00:00Z", "payload": {"device": "a", "temp": 21.5}}

It is what `smqrt journal export FILE.jsonl` writes; by hand, `topic`, `ts` and `payload` are enough.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from smqrt.errors import PipelineError
from smqrt.journal import arrow, segment
from smqrt.journal.record import Flag, Row

NODE = "n1"

_BATCH_ROWS = 4096
_KNOWN = ("topic", "ts", "payload", "payload_hex", "subtopic", "uid", "flags")
_IGNORED = ("node", "seq", "tid", "stid", "ptid", "txn", "broker", "json")


def journal(file: Path, to: Path) -> int:
    """Writes a journal with the messages of a file, in their order.

    Args:
        file: with one JSON object a line; empty lines don't count.
        to: folder of the journal; made.

    Returns:
        How many messages it has.

    Raises:
        PipelineError: the file can't be read, or a line isn't a message; the sentence begins with file:line.
    """
    rows = list(_rows(file))
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


def _rows(file: Path) -> Iterator[Row]:
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"{file} can't be read: {getattr(error, 'strerror', None) or error}.") from None
    lines = ((number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip())
    for seq, (number, line) in enumerate(lines):
        try:
            yield _row(seq, json.loads(line))
        except ValueError as error:
            raise PipelineError(f"{file}:{number}: {error}; a line is like {_EXAMPLE}") from None


def _row(seq: int, values: Any) -> Row:
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
    return Row(seq, _time_us(values.get("ts")), topic, None, subtopic, None, None, uid, flags, _payload(values), None)


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


def _payload(values: dict[str, Any]) -> bytes:
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
