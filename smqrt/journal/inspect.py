"""Looking into a journal: its rows in the order of time, the last ones, the next ones, as text and as JSON."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from smqrt.journal.reader import Journal, Offsets
from smqrt.journal.record import Flag, Row
from smqrt.journal.timestamps import iso
from smqrt.printable import json_line, printable

_FIRST_WINDOW_ROWS = 4096
_WAIT_S = 10.0
_FLAG_WORDS = {
    Flag.DIRECT: "direct",
    Flag.UNROUTED: "unrouted",
    Flag.ASSEMBLED: "assembled",
    Flag.PIPELINE: "pipeline",
    Flag.SERVER: "server",
}


class Recorded(NamedTuple):
    """A row and the node that recorded it."""

    node: str
    row: Row


# ---- rows


def in_order(journal: Journal, start: Offsets, end: Offsets, topics: Sequence[str] | None = None) -> Iterator[Recorded]:
    """Yields the rows of all nodes from `start` to `end` (exclusive), by time, each node's in their sequence."""

    def of(node: str, last: int) -> Iterator[Recorded]:
        return (Recorded(node, row) for row in journal.rows({node: start.get(node, 0)}, {node: last}, topics))

    return heapq.merge(*(of(node, last) for node, last in end.items()), key=lambda recorded: recorded.row.ts_us)


def latest(journal: Journal, end: Offsets, count: int, topics: Sequence[str] | None = None) -> list[Recorded]:
    """Returns the last `count` rows before `end`, oldest first. It reads backwards, so that the rest stays unread."""
    begin = journal.begin()
    rows: list[Recorded] = []
    for node, last in end.items():
        rows += (Recorded(node, row) for row in _last_of(journal, node, begin.get(node, 0), last, count, topics))
    rows.sort(key=lambda recorded: recorded.row.ts_us)
    return rows[len(rows) - count :] if count < len(rows) else rows


def _last_of(journal: Journal, node: str, begin: int, end: int, count: int, topics: Sequence[str] | None) -> deque[Row]:
    found: deque[Row] = deque()
    window = max(_FIRST_WINDOW_ROWS, count)
    while end > begin and len(found) < count:
        start = max(begin, end - window)
        found.extendleft(reversed([*journal.rows({node: start}, {node: end}, topics)]))
        end, window = start, window * 4
    return deque(found, count)


def follow(journal: Journal, start: Offsets, topics: Sequence[str] | None = None) -> Iterator[Recorded]:
    """Yields rows from `start` on as they are written, without end."""
    while True:
        end = journal.wait(start, _WAIT_S)
        if any(last > start.get(node, 0) for node, last in end.items()):
            yield from in_order(journal, start, end, topics)
        start = end


def words(flags: int) -> list[str]:
    """Returns the names of the flags that are set, such as ["direct", "assembled"]."""
    return [word for flag, word in _FLAG_WORDS.items() if flags & flag]


def as_line(recorded: Recorded) -> str:
    """Returns a row for a terminal: time, topic, uid, payload and flags."""
    row = recorded.row
    where = row.topic if row.topic is not None else f"(to {row.tid})"
    where = f"{where} ({row.subtopic})" if row.subtopic else where
    parts = [iso(row.ts_us), printable(where), printable(row.uid or "-"), _visible(row.payload)]
    return "  ".join(parts + [f"[{word}]" for word in words(row.flags)])


def _visible(payload: bytes) -> str:
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return f"0x{payload.hex()}"
    return text if text == printable(text) else json_line(text)


def as_fields(recorded: Recorded) -> dict[str, Any]:
    """Returns a row as JSON has it: the payload as text, or as `payload_hex` when it is not UTF-8."""
    row = recorded.row
    fields: dict[str, Any] = {"node": recorded.node, "seq": row.seq, "ts": iso(row.ts_us), "topic": row.topic}
    fields |= {"tid": row.tid, "subtopic": row.subtopic, "stid": row.stid, "ptid": row.ptid, "uid": row.uid}
    fields |= {"flags": words(row.flags), "txn": row.txn}
    try:
        fields["payload"] = row.payload.decode()
    except UnicodeDecodeError:
        fields["payload_hex"] = row.payload.hex()
    return fields
