"""Rows of the journal: the columns, and what is kept of a message.

A segment holds the columns of `Row`; `node` and `broker` are the same for all its rows and stand in its schema. A
reader adds them in front, which gives `COLUMNS`.
"""

from __future__ import annotations

from enum import IntFlag
from typing import NamedTuple


class Flag(IntFlag):
    """What happened to a message. The column `flags` holds any of them together."""

    DIRECT = 1
    """Addressed to one client (an ETID): it has no topic."""
    UNROUTED = 2
    """Nobody was subscribed."""
    ASSEMBLED = 4
    """Came in fragments (PubFrag)."""
    PIPELINE = 8
    """Published by a pipeline: pipelines leave these out, so that none feeds itself."""
    SERVER = 16
    """Published by the server's own client."""


class Row(NamedTuple):
    """One message, in the order of a segment's columns.

    Attributes:
        seq: its number; dense per node, and the offset by which everything is read.
        ts_us: when the hub got it, microseconds since 1970 in UTC.
        topic, tid: the topic's name and number; both None for a message to one client.
        subtopic, stid: the same of the subtopic; None when there is none.
        ptid: the publisher's ETID (it lasts as long as the connection).
        uid: who the publisher is (it lasts).
        flags: `Flag`.
        payload: the message.
        txn: "query:batch" when a pipeline wrote it with a commit.
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


class Column(NamedTuple):
    """One column: its name, its type as Spark writes it, and whether it may be null."""

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
)
"""The columns in a segment, in the order of `Row`."""

COLUMNS = (*NODE_COLUMNS, *SEGMENT_COLUMNS[:2], Column("broker", "STRING"), *SEGMENT_COLUMNS[2:])
"""The columns a reader gives: node, seq, ts, broker, topic, …, txn."""

DDL = ", ".join(f"{one.name} {one.type}{'' if one.nullable else ' NOT NULL'}" for one in COLUMNS)
"""The same for Spark."""


def transaction(query: str, batch: int) -> str:
    """Returns the value of `txn` for a query's micro-batch."""
    return f"{query}:{batch}"


def parse_transaction(txn: str) -> tuple[str, int]:
    """Returns (query, batch) of a value of `txn`.

    Raises:
        ValueError: it is none.
    """
    query, _, batch = txn.rpartition(":")
    return query, int(batch)
