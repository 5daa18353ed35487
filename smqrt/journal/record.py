"""Rows, columns and timestamps of the journal.

A segment has the columns of `Row`. `node` and `broker` are the same for all its rows and are stored in its schema. A
reader adds these two, and returns the columns `COLUMNS`. A segment of format 1 lacks the columns of MQTT, which are
null then (decision 0047).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from enum import IntFlag
from itertools import accumulate
from typing import NamedTuple

from smqrt.errors import ArgumentError
from smqrt.settings.option_types import parse_duration

# ---- Timestamps
#
# The clock of a hub's rows follows the machine's clock, but not its short jumps. A row that is an hour ahead would
# close every open window of a pipeline, and most jumps are reversed within seconds (decision 0015).

EARLIEST_US = 0
JUMP_US = 5_000_000
"""A difference of this or more is a jump; NTP corrects smaller ones gradually."""
PERMANENT_JUMP_US = 60_000_000
"""A jump that lasts this long is permanent, and is followed. A clock that was set by mistake is corrected earlier."""
_READINGS = 3
"""Number of times that both clocks are read: between two readings, the process may be interrupted."""
_MAX_JUMPS = 1000
_STEADY_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # CLOCK_BOOTTIME also runs during suspend


def now_us() -> int:
    """Return the time in microseconds since 1970."""
    return time.time_ns() // 1000


def parse_moment(text: str, name: str = "time", now: int | None = None) -> int:
    """Return microseconds since 1970.

    Args:
        text: a duration before now such as "2h", an ISO time (UTC without a time zone), "earliest" or "latest".
        name: the name in the error message, such as "--from".
        now: the end of durations, microseconds since 1970; the current time by default.

    Raises:
        ArgumentError: `text` is none of these.
    """
    now = now_us() if now is None else now
    if text in ("earliest", "latest"):
        return EARLIEST_US if text == "earliest" else now
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        pass
    else:
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
        return int((moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * 1_000_000)
    try:
        return now - int(parse_duration(text) * 1_000_000)
    except ArgumentError:
        raise ArgumentError(
            f"{name} {text!r} must be a duration such as 2h or 30m (before now), a time such as 2026-11-21T15:00 "
            "(UTC), earliest or latest"
        ) from None


def iso(ts_us: int) -> str:
    """Return a time in microseconds as `2026-11-21T15:00:00.000123Z`."""
    moment = datetime.fromtimestamp(ts_us // 1_000_000, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{ts_us % 1_000_000:06d}Z"


# ---- Clock of rows


def _elapsed_us() -> int:
    return time.clock_gettime_ns(_STEADY_CLOCK) // 1000


class Clock:
    """The clock of rows: it starts at the machine's time and follows it without short jumps.

    Args:
        wall_us: returns the machine's time, microseconds UTC.
        elapsed_us: returns the time of a monotonic clock, microseconds.
    """

    def __init__(self, wall_us: Callable[[], int] = now_us, elapsed_us: Callable[[], int] = _elapsed_us) -> None:
        self._wall_us, self._elapsed_us = wall_us, elapsed_us
        self._offset_us = self._read()
        self._latest_us = 0
        self._jump_us = self._since_us = 0
        self._jumps: deque[tuple[int, int]] = deque(maxlen=_MAX_JUMPS)

    def _read(self) -> int:
        """Return the offset of the machine's clock, from the reading with the shortest interruption."""
        return max(self._wall_us() - self._elapsed_us() for _ in range(_READINGS))

    def now_us(self) -> int:
        """Return the time in microseconds UTC. It decreases only after `follow` has returned a negative jump."""
        now_us = self._elapsed_us() + self._offset_us
        if now_us < self._latest_us:
            return self._latest_us
        self._latest_us = now_us
        return now_us

    def follow(self) -> int:
        """Compare the time with the machine's clock; call it about once a second.

        A difference below `JUMP_US` is corrected at once; after a backward correction the time is constant until the
        machine's clock reaches it. A jump is followed after `PERMANENT_JUMP_US`.

        Returns:
            The jump of the time in this call, microseconds; usually 0.
        """
        offset_us = self._read()
        ahead_us = offset_us - self._offset_us
        if abs(ahead_us) < JUMP_US:
            self._offset_us, self._jump_us = offset_us, 0
            return 0
        if not self._jump_us or abs(ahead_us - self._jump_us) >= JUMP_US:
            self._jump_us, self._since_us = ahead_us, self._elapsed_us()
        if self._elapsed_us() - self._since_us < PERMANENT_JUMP_US:
            return 0
        self._offset_us, self._jump_us, self._latest_us = offset_us, 0, 0
        self._jumps.append((self._elapsed_us(), ahead_us))
        return ahead_us

    def jumped_us(self, within_s: float) -> int:
        """Return by how many microseconds the computed age of recent events may be too high after forward jumps.

        Args:
            within_s: the highest age of an event, seconds.
        """
        since_us = self._elapsed_us() - int(within_s * 1e6)
        # An event lies between two jumps, and the later ones add up. The worst case is the largest of these sums.
        latest_first = [ahead_us for at_us, ahead_us in reversed(self._jumps) if at_us >= since_us]
        return max(0, *accumulate(latest_first), 0)


class Flag(IntFlag):
    """Properties of a message, combined in the column `flags`."""

    DIRECT = 1
    """Addressed to one client (an ETID), without a topic."""
    UNROUTED = 2
    """No subscriber received it."""
    ASSEMBLED = 4
    """Received in fragments (PubFrag)."""
    PIPELINE = 8
    """Published by a pipeline. Pipelines skip these rows, so that no pipeline reads its own results."""
    SERVER = 16
    """Published by the server's own client."""


class Row(NamedTuple):
    """One message, in the order of a segment's columns.

    Attributes:
        seq: the sequence number: dense per node, and the offset of all readers.
        ts_us: when the hub received it, microseconds since 1970 in UTC.
        topic, tid: name and number of the topic. For a message to one client the name is None, the number its ETID.
        subtopic, stid: name and number of the subtopic; the name is None without a subtopic.
        ptid: the publisher's ETID, which changes with each connection.
        uid: the publisher's permanent identity.
        flags: values of `Flag`.
        payload: the message.
        txn: "query:batch" for rows of a commit, else None.
        qos: the QoS of a message of an MQTT client, else None.
        retain: whether an MQTT client has published it as a retained message; None as `qos`.
        properties: its MQTT properties, a JSON object as text, see `smqrt.journal.mqtt_columns`; None as `qos`.
    """

    seq: int
    ts_us: int
    topic: str | None
    tid: int | None
    subtopic: str | None
    stid: int | None
    ptid: int | None
    uid: str | None
    flags: int
    payload: bytes
    txn: str | None
    qos: int | None = None
    retain: bool | None = None
    properties: str | None = None


class Column(NamedTuple):
    """A column: its name, its type in Spark's spelling, and whether it may be null."""

    name: str
    type: str
    nullable: bool = True


NODE_COLUMNS = (Column("node", "STRING", False),)
SEGMENT_COLUMNS = (
    Column("seq", "BIGINT", False),
    Column("ts", "TIMESTAMP", False),
    Column("topic", "STRING"),
    Column("tid", "BIGINT"),
    Column("subtopic", "STRING"),
    Column("stid", "BIGINT"),
    Column("ptid", "BIGINT"),
    Column("uid", "STRING"),
    Column("flags", "INT", False),
    Column("payload", "BINARY", False),
    Column("txn", "STRING"),
    Column("qos", "INT"),
    Column("retain", "BOOLEAN"),
    Column("properties", "STRING"),
)
"""The columns in a segment, in the order of `Row`."""

MQTT_COLUMNS = 3
"""The number of columns at the end of `SEGMENT_COLUMNS` that segments of format 1 lack."""

COLUMNS = (*NODE_COLUMNS, *SEGMENT_COLUMNS[:2], Column("broker", "STRING"), *SEGMENT_COLUMNS[2:])
"""The columns of a reader: node, seq, ts, broker, topic, …, properties."""

DDL = ", ".join(f"{one.name} {one.type}{'' if one.nullable else ' NOT NULL'}" for one in COLUMNS)
"""`COLUMNS` as a DDL text for Spark."""


def transaction(query: str, batch: int) -> str:
    """Return the value of `txn` for a query's micro-batch."""
    return f"{query}:{batch}"


def parse_transaction(txn: str) -> tuple[str, int]:
    """Return (query, batch) from a value of `txn`.

    Raises:
        ValueError: the batch is not a number.
    """
    query, _, batch = txn.rpartition(":")
    return query, int(batch)
