"""What pipelines publish: from rows of a commit to rows of the journal, and to messages for subscribers.

Commits may be large. What can wait for others to have their turn does; only `Outgoing.rows` must not, since it numbers
the rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from smqrt.broker.broker import Broker
from smqrt.broker.outbox import Drop
from smqrt.broker.topics import Topic
from smqrt.errors import ArgumentError
from smqrt.journal.record import Flag, Row
from smqrt.net.scheduling import Turn
from smqrt.wire import smq

OutRow = tuple[bytes, bytes | None, bytes]
"""`(topic, subtopic, payload)` of a row that a pipeline publishes."""


class _Address(NamedTuple):
    topic: Topic
    name: str
    stid: int
    subtopic: str | None


class Outgoing:
    """The messages of one commit; making it may let others have their turn.

    Args:
        broker: the hub's broker, whose topics are made when they are missing.
        rows: what to publish.

    Raises:
        ArgumentError: a payload or a name is too long for a message; nothing is published then.
    """

    def __init__(self, broker: Broker, rows: Iterable[OutRow]) -> None:
        self._broker = broker
        self._messages: list[tuple[_Address, bytes]] = []
        known: dict[tuple[bytes, bytes | None], _Address] = {}
        turn = Turn()
        for topic, subtopic, payload in rows:
            if len(payload) > smq.MAX_PAYLOAD_BYTES:
                raise ArgumentError(_too_long(topic, payload))
            address = known.get((topic, subtopic))
            if address is None:
                address = known[topic, subtopic] = self._address(topic, subtopic)
            self._messages.append((address, payload))
            turn.breathe()

    def __len__(self) -> int:
        return len(self._messages)

    def _address(self, topic: bytes, subtopic: bytes | None) -> _Address:
        tid, stid = self._broker.create(topic), self._broker.createsub(subtopic)
        found = self._broker.topic_table.by_key[tid.to_bytes(4, "big")]
        return _Address(found, _text(topic), stid, None if subtopic is None else _text(subtopic))

    def rows(self, seq: int, now_us: int, txn: str | None) -> list[Row]:
        """The rows for the journal.

        Args:
            seq: the number of the first.
            now_us: their time, microseconds since 1970.
            txn: "query:batch" of the commit.
        """
        server = self._broker.server
        etid, uid, routed = server.etid, server.uid.decode(), Flag.PIPELINE | Flag.SERVER
        flags = [int(routed | Flag.UNROUTED), int(routed)]
        made = []
        for number, (to, payload) in enumerate(self._messages, seq):
            flag = flags[to.topic.subscribers > 0]
            made.append(Row(number, now_us, to.name, to.topic.id, to.subtopic, to.stid, etid, uid, flag, payload, txn))
        return made

    def deliver(self) -> None:
        """Give the messages to whoever subscribes, others having their turn meanwhile."""
        broker, turn = self._broker, Turn()
        for to, payload in self._messages:
            if to.topic.subscribers:
                to.topic.deliver(smq.publish_frame(to.topic.id, broker.server.etid, to.stid, payload))
            else:
                broker.stats.drop(Drop.UNROUTED, 1)
            turn.breathe()


def _text(name: bytes) -> str:
    return name.decode("utf-8", "replace")


def _too_long(topic: bytes, payload: bytes) -> str:
    return f"{_text(topic)}: {len(payload)} bytes; a message carries at most {smq.MAX_PAYLOAD_BYTES}"
