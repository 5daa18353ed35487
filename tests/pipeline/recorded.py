"""A journal made of given rows, as a hub would have written it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from smqrt.journal import arrow, segment
from smqrt.journal.record import COLUMNS, Flag, Row

START_US = 1_795_273_200_000_000  # 2026-11-21T15:00:00Z
STEP_US = 1000


def message(seq: int, topic: str | None = None, payload: bytes | None = None, flags: int = 0) -> Row:
    """Return row `seq`, which comes `seq` ms after 15:00: of one of ten devices, with a temperature in JSON."""
    device = f"d{seq % 10}"
    body = payload if payload is not None else json.dumps({"device": device, "temp": seq % 100}).encode()
    name = topic or f"site1/{device}"
    uid = None if seq % 3 else f"uid-{device}"
    return Row(seq, START_US + seq * STEP_US, name, 1000 + seq % 10, None, None, 7, uid, flags, body, None)


def direct(seq: int) -> Row:
    """Return a row that is addressed to one client: it has no topic."""
    return message(seq)._replace(topic=None, tid=None, flags=int(Flag.DIRECT))


class Recorded:
    """Writes the segments of one node.

    Args:
        path: the journal's folder.
        node: whose segments.
        first_seq: where they begin.
    """

    def __init__(self, path: Path, node: str = "n1", first_seq: int = 0) -> None:
        self.path, self.node, self.next_seq = path, node, first_seq
        self.folder = path / "wal" / node
        self.rows: list[Row] = []
        self._segment: segment.SegmentFile | None = None

    def add(self, rows: Iterable[Row] | int, batch: int = 64) -> Recorded:
        """Append rows, or so many made ones, in batches of `batch` rows."""
        if isinstance(rows, int):
            rows = map(message, range(self.next_seq, self.next_seq + rows))
        for some in _pieces(list(rows), batch):
            self._append(some)
        return self

    def _append(self, rows: list[Row]) -> None:
        if self._segment is None:
            self._segment = segment.SegmentFile.open(self.folder, self.next_seq, self.node, "broker-1")
        times = [row.ts_us for row in rows]
        self._segment.append(arrow.encode(rows), rows[0].seq, len(rows), min(times), max(times), 0)
        self.next_seq = rows[-1].seq + 1
        self.rows += rows

    def seal(self) -> Recorded:
        """End the segment: what is added from now on goes to the next one."""
        if self._segment is not None:
            self._segment.sync()
            self._segment.close()
            self._segment = None
        return self


def _pieces(rows: list[Row], size: int) -> Iterator[list[Row]]:
    for first in range(0, len(rows), size):
        yield rows[first : first + size]


def values(rows: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return (seq, ts in microseconds, topic, uid, flags, payload) of Spark's rows or of the journal's, by seq."""
    return sorted((row.seq, _us(row), row.topic, row.uid, row.flags, bytes(row.payload)) for row in rows)


def _us(row: Any) -> int:
    if isinstance(row, Row):
        return row.ts_us
    from datetime import UTC

    from smqrt.pipeline.smq_source.options import epoch_us

    return epoch_us(row.ts.replace(tzinfo=row.ts.tzinfo or UTC))


def schema(*names: str) -> Any:
    """Return Spark's schema of all columns or of those named; needs no Spark that runs."""
    from pyspark.sql.types import StructType

    types = {"STRING": "string", "BIGINT": "long", "TIMESTAMP": "timestamp", "INT": "integer", "BINARY": "binary"} | {
        "BOOLEAN": "boolean"
    }
    found, known = StructType(), {column.name: column for column in COLUMNS}
    for name in names or known:
        found = found.add(name, types[known[name].type], known[name].nullable)
    return found
