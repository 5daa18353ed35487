"""Rows and columns of the journal.

A segment has the columns of `Row`. `node` and `broker` are the same for all its rows and are stored in its schema. A
reader adds them, which gives `COLUMNS`.
"""

from __future__ import annotations

from enum import IntFlag
from typing import NamedTuple


class Flag(IntFlag):
    """Properties of a message, combined in the column `flags`."""

    DIRECT = 1
    """Addressed to one client (an ETID), without a topic."""
    UNROUTED = 2
    """No subscriber received it."""
    ASSEMBLED = 4
    """Received in fragments (PubFrag)."""
    PIPELINE = 8
    """Published by a pipeline. Pipelines skip these rows, so that none reads its own results."""
    SERVER = 16
    """Published by the server's own client."""


class Row(NamedTuple):
    """One message, in the order of a segment's columns.

    Attributes:
        seq: the sequence number: dense per node, and the offset of all readers.
        ts_us: when the hub received it, microseconds since 1970 in UTC.
        topic, tid: name and number of the topic. For a message to one client the name is None and the number its ETID.
        subtopic, stid: name and number of the subtopic; the name is None without a subtopic.
        ptid: the publisher's ETID, which changes with each connection.
        uid: the publisher's lasting identity.
        flags: values of `Flag`.
        payload: the message.
        txn: "query:batch" for rows of a commit, else None.
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
)
"""The columns in a segment, in the order of `Row`."""

COLUMNS = (*NODE_COLUMNS, *SEGMENT_COLUMNS[:2], Column("broker", "STRING"), *SEGMENT_COLUMNS[2:])
"""The columns of a reader: node, seq, ts, broker, topic, …, txn."""

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
