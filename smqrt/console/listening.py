"""A subscriber inside the server: what comes to some topics of a hub is shown on a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import time

from smqrt.admin.snapshots import Snapshot
from smqrt.broker.broker import MAX_ID, Broker
from smqrt.broker.outbox import Outbox
from smqrt.broker.topics import Topic
from smqrt.errors import ArgumentError
from smqrt.printable import printable
from smqrt.wire import smq

TOPICS = 20
"""At most so many topics of one page."""
NAME_CHARACTERS = 256
KEPT = 30
"""Messages between two looks at them, which is a second; further ones are only counted."""
_SHOWN_BYTES = 512


class Listening(Outbox):
    """Subscribes to topics like a client; `take` gives what came since the last call. It holds nobody up.

    Args:
        broker: the hub's.
        destinations: the topics, by name or number; names that don't exist are made.
        clock: gives Unix seconds.

    Raises:
        ArgumentError: too many topics, a name that is too long, or a number that is no topic's.
        ClosedError: the hub has been closed.
    """

    __slots__ = ("_broker", "_clock", "_kept", "_missed", "_number", "_topics")

    def __init__(self, broker: Broker, destinations: Sequence[str | int], clock: Callable[[], float] = time) -> None:
        super().__init__()
        if len(destinations) > TOPICS:
            raise ArgumentError(f"topics: at most {TOPICS} can be looked at on one page")
        topics = [_topic(broker, one) for one in dict.fromkeys(destinations)]
        self._broker, self._clock = broker, clock
        self._kept: list[Snapshot] = []
        self._missed = self._number = 0
        self._topics: list[Topic] = []
        for topic in topics:
            self._topics.append(topic)
            topic.forget_routes()
            broker.subscribed(topic, self)

    def close(self) -> None:
        """Subscribe no more; a second call does nothing."""
        topics, self._topics = self._topics, []
        for topic in topics:
            self._broker.unsubscribed(topic, self)

    def take(self) -> tuple[list[Snapshot], int]:
        """Returns the messages that came since the last call, and how many were left out."""
        taken, self._kept = self._kept, []
        missed, self._missed = self._missed, 0
        return taken, missed

    def flush(self) -> None:
        """See `Outbox.flush`: keep the first of what comes, count the rest."""
        runs, self.queue = self.queue, []
        for run in runs:
            if len(self._kept) >= KEPT:
                self._missed += smq.count_frames(run)
                continue
            for frame in smq.frames(run):
                self._keep(frame)

    def _keep(self, frame: bytes) -> None:
        if len(self._kept) >= KEPT:
            self._missed += 1
            return
        tid, ptid, stid, data = smq.unpack_publish(frame)
        self._number += 1
        self._kept.append(
            {
                "number": self._number,
                "at_s": self._clock(),
                "topic": _name(self._broker.tid2topic(tid), tid),
                "subtopic": _name(self._broker.tid2subtopic(stid), stid) if stid else "",
                "from": ptid,
                "size_bytes": len(data),
                "text": printable(bytes(data[:_SHOWN_BYTES]), lines=True),
                "cut": len(data) > _SHOWN_BYTES,
            }
        )


def _topic(broker: Broker, destination: str | int) -> Topic:
    if isinstance(destination, str):
        if len(destination) > NAME_CHARACTERS:
            raise ArgumentError(f"topics: a name has at most {NAME_CHARACTERS} characters here; use its number")
        destination = broker.create(destination.encode("utf-8", "surrogateescape"))
    topic = broker.topic_table.get(destination) if 0 < destination <= MAX_ID else None
    if topic is None or topic.name is None:
        raise ArgumentError(f"topics: {destination} is no topic's number")
    return topic


def _name(name: bytes | None, number: int) -> str:
    return str(number) if name is None else printable(name[:NAME_CHARACTERS])
