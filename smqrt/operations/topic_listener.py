"""A subscriber inside the server: what comes to some topics of a hub, of this worker or of another one, is shown on a
page.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from time import time
from typing import Protocol

import gevent
from gevent.event import Event

from smqrt.broker.broker import MAX_ID, Broker
from smqrt.broker.outbox import Outbox
from smqrt.broker.topics import Topic
from smqrt.broker.trace import Trace
from smqrt.errors import ArgumentError, ClosedError
from smqrt.operations import snapshots
from smqrt.operations.snapshots import Snapshot
from smqrt.printable import printable
from smqrt.settings.limit_register import Limit
from smqrt.smq.gevent_broker import GeventBroker, all_brokers
from smqrt.wire import smq
from smqrt.workers.fd_channel import Message
from smqrt.workers.worker_rpc import END, News, WorkerRpc

TOPICS = 20
"""At most so many topics of one page."""
NAME_CHARACTERS = 256
KEPT = 30
"""Messages between two looks at them, which is a second; further ones are only counted."""
_SHOWN_BYTES = 512
QUESTION = "listen"
_LOOK_S = 0.5
"""So often another worker is told what came."""


class Listener(Protocol):
    """What `Listening` and `FarListening` are."""

    def take(self) -> tuple[list[Snapshot], int]: ...
    def close(self) -> None: ...


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


class FarListening:
    """The same at a hub that only another worker has. Arguments as `Listening`; what is wrong with them is said by
    `take`.

    Args:
        fleet: the workers.
        worker: which one has the hub.
        hub: its number.
        destinations: see `Listening`.
    """

    def __init__(self, fleet: WorkerRpc, worker: int, hub: int, destinations: Sequence[str | int]) -> None:
        question: Message = {"do": QUESTION, "hub": hub, "topics": list(destinations)}
        self._kept: list[Snapshot] = []
        self._missed = self._number = 0
        self._why = ""
        self._following = gevent.spawn(fleet.follow, worker, lambda: question, self._told)

    def close(self) -> None:
        """Ask no more; a second call does nothing."""
        self._following.kill(block=False)

    def take(self) -> tuple[list[Snapshot], int]:
        """See `Listening.take`. Raises ArgumentError for what that raises when it is made."""
        if self._why:
            raise ArgumentError(self._why)
        taken, self._kept = self._kept, []
        missed, self._missed = self._missed, 0
        return taken, missed

    def _told(self, said: Message) -> None:
        self._why = said["why"]
        self._missed += said["missed"]
        for message in said["messages"]:
            if len(self._kept) >= KEPT:
                self._missed += 1
                continue
            self._number += 1
            self._kept.append({**message, "number": self._number})


def listened(hub: Callable[[int], Broker], question: Message) -> News:
    """Yields what `FarListening` of another worker asks for.

    Args:
        hub: gives one of this worker by its number; raises ArgumentError.
        question: what is asked.
    """
    try:
        listening = Listening(hub(question["hub"]), question["topics"])
    except (ArgumentError, ClosedError) as error:
        yield {"do": "messages", "messages": [], "missed": 0, "why": str(error)}
        yield END
        return
    with closing(listening):
        while True:
            messages, missed = listening.take()
            if messages or missed:
                yield {"do": "messages", "messages": messages, "missed": missed, "why": ""}
            gevent.sleep(_LOOK_S)


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


# ---- A trace for an operator: a stream of JSON lines, as long as somebody reads.

AT_ONCE = 4
SILENCE_S = 5.0
"""So often there is an empty line when nothing happens: that somebody has gone is noticed when writing to him fails."""

TRACES = Limit("traces", "", f"{AT_ONCE} traces are running")
_running: list[Trace] = []


def begin(hub: int | None, peer: str, topic: str) -> Generator[dict[str, object] | None, None, None]:
    """Begins a trace; yields what happens, None when nothing did for a while. It ends when the iterator is closed.

    Args:
        hub: the number of the hub; None when there is one only, or `peer` names it.
        peer: the id of a client, such as "1.3055123", or its uid; empty to trace a topic.
        topic: the name of a topic; empty to trace a client.

    Raises:
        ArgumentError: not exactly one of both is given, there is no such client or hub, or too many traces run.
    """
    if bool(peer) == bool(topic):
        raise ArgumentError("trace: give a peer or a topic, one of both")
    broker, uid = _broker_and_uid(hub, peer)
    if len(_running) >= AT_ONCE:
        TRACES.refused("a trace")
        raise ArgumentError(f"trace: {AT_ONCE} traces are running; end one of them first")
    more = Event()
    trace = Trace(broker, uid, topic.encode("utf-8", "surrogateescape") if topic else None, more.set)
    return _events(trace, more)


def _broker_and_uid(hub: int | None, peer: str) -> tuple[GeventBroker, bytes | None]:
    head, dot, tail = peer.partition(".")
    if dot and head.isdigit() and tail.isdigit():
        session = snapshots.session_of(peer)
        return snapshots.broker_of(snapshots.peer_id(peer)[0]), session.uid
    brokers = all_brokers()
    if hub is None and len(brokers) != 1:
        raise ArgumentError("hub: which one? give hub=N; /api/v1/hubs lists them")
    broker = brokers[0] if hub is None else snapshots.broker_of(hub)
    return broker, peer.encode("utf-8", "surrogateescape") if peer else None


def _events(trace: Trace, more: Event) -> Generator[dict[str, object] | None, None, None]:
    _running.append(trace)
    trace.start()
    try:
        yield {"event": "tracing", "time": snapshots.iso(time())}
        while not trace.broker.closed:
            more.clear()
            for event in trace.take():
                yield {"time": snapshots.iso(time()), **event}
            if not more.wait(SILENCE_S):
                yield None
    finally:
        trace.stop()
        _running.remove(trace)
