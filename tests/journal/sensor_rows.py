"""Journals for tests: rows like those of a site with sensors, written by the core's own segments."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from smqrt.journal.arrow import encode
from smqrt.journal.record import Row
from smqrt.journal.segment import HAS_TXN, SegmentFile

NOON_US = 1_795_176_000_000_000
"""2026-11-20T12:00:00Z."""


def row(
    seq: int,
    ts_us: int = NOON_US,
    topic: str | None = "site1/temp",
    payload: bytes = b"{}",
    *,
    tid: int | None = 4711,
    subtopic: str | None = None,
    stid: int | None = None,
    ptid: int | None = 99,
    uid: str | None = "sensor",
    flags: int = 0,
    txn: str | None = None,
) -> Row:
    return Row(seq, ts_us, topic, tid, subtopic, stid, ptid, uid, flags, payload, txn)


def readings(count: int, step_us: int = 1_000_000, first: int = 0, seed: int = 1, devices: int = 20) -> Iterator[Row]:
    """Yields rows with JSON payloads that differ, of some hundred bytes, as devices send them."""
    chance = random.Random(seed)
    for seq in range(first, first + count):
        device = chance.randrange(devices)
        values = {
            "device": f"sensor-{device:04d}",
            "temp": round(chance.gauss(21, 4), 2),
            "humidity": round(chance.uniform(20, 80), 1),
            "battery": chance.randrange(100),
            "count": seq,
            "status": chance.choice(["ok", "ok", "ok", "low battery", "calibrating"]),
            "location": {"lat": round(chance.uniform(47, 48), 6), "lon": round(chance.uniform(8, 9), 6)},
        }
        yield row(seq, NOON_US + seq * step_us, f"site{device % 4}/{device}/temp", json.dumps(values).encode())


def write(
    journal: Path,
    rows: Iterable[Row],
    batch: int = 64,
    segment_rows: int = 1000,
    node: str = "n1",
    broker: str = "hub",
) -> list[Row]:
    """Write rows into segments of a journal; returns them."""
    written = list(rows)
    for at in range(0, len(written), segment_rows):
        segment = SegmentFile.open(journal / "wal" / node, written[at].seq, node, broker)
        for start in range(at, min(at + segment_rows, len(written)), batch):
            _append(segment, written[start : min(start + batch, at + segment_rows)])
        segment.close()
    return written


def _append(segment: SegmentFile, rows: Sequence[Row]) -> None:
    if rows:
        times = [one.ts_us for one in rows]
        flags = HAS_TXN if any(one.txn for one in rows) else 0
        segment.append(encode(rows), rows[0].seq, len(rows), min(times), max(times), flags)
