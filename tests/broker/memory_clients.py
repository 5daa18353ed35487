"""Many clients of a hub without sockets: what they do together takes as long as the hub does."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

from smqrt.broker.broker import Broker
from smqrt.broker.outbox import Outbox, flush_dirty
from smqrt.broker.sessions import Session
from smqrt.broker.state import Hooks
from smqrt.broker.topics import HubLimits
from smqrt.errors import CloseReason
from smqrt.wire import smq


class Ear(Outbox):
    """A client's side: keeps the packets that were flushed.

    Attributes:
        got: the packets, without framing; ended: whether the hub has closed the connection.
    """

    def __init__(self) -> None:
        super().__init__()
        self.got: list[bytes] = []
        self.ended = False

    def reply(self, packet: bytes) -> None:
        self.put(smq.frame(packet))

    def flush(self) -> None:
        runs, self.queue = self.queue, []
        self.got += [frame[2:] for run in runs for frame in smq.frames(run)]

    def finish(self, reason: CloseReason) -> None:
        self.flush()
        self.ended = True


class Crowd:
    """A hub and a way to get connected clients; its first random numbers are `drawn`, which a test may extend."""

    def __init__(self, hooks: Hooks | None = None, limits: HubLimits | None = None, queue_size: int = 200) -> None:
        numbers = (number * 2654435761 % (1 << 32) for number in itertools.count(1000))
        self.drawn: list[int] = []
        self.broker = Broker(
            hooks or Hooks(),
            random_u32=lambda: self.drawn.pop(0) if self.drawn else next(numbers),
            encode=bytes,
            clock=lambda: 0.0,
            queue_size=queue_size,
            limits=limits or HubLimits(client_names=100_000, subscriptions=100_000, observes=100_000),
        )
        self._uids = itertools.count(100000)

    def client(self, uid: bytes | None = None) -> Session:
        session = Session(self.broker, Ear(), 5)
        session.control(smq.connect(uid or b"%d" % next(self._uids)))
        return session

    def clients(self, count: int) -> list[Session]:
        found = [self.client() for _ in range(count)]
        settle()
        return found


def subscribe(session: Session, name: bytes) -> int:
    """Subscribe and give the topic's id."""
    session.control(smq.with_name(smq.Type.SUBSCRIBE, name))
    return session.broker.topic_table.by_name[name].id


def observe(session: Session, number: int) -> None:
    session.control(smq.with_id(smq.Type.OBSERVE, number))


def heard(session: Session) -> list[bytes]:
    """What the client got since the last call."""
    outbox = session.outbox
    assert isinstance(outbox, Ear)
    got, outbox.got = outbox.got, []
    return got


def settle() -> int:
    """End turns until nothing is left to do; gives how many that took."""
    turns = 1
    while flush_dirty(time.monotonic):
        turns += 1
    return turns


def turns() -> Iterator[None]:
    """End turns one by one, as long as something is left."""
    while flush_dirty(time.monotonic):
        yield
