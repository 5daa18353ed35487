"""Live views of hubs for operators: messages of topics, and traces of clients and topics.

The hub may belong to this worker or to another one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from time import time
from typing import Any, Protocol

import gevent
from gevent.event import Event

from smqrt.broker.broker import MAX_ID, Broker
from smqrt.broker.outbox import Outbox
from smqrt.broker.routes import MAX_PAYLOAD_SHOWN_BYTES, Trace
from smqrt.broker.sessions import Session
from smqrt.broker.state import BrokerPeer
from smqrt.broker.topics import Topic
from smqrt.errors import ArgumentError, ClosedError
from smqrt.operations import snapshots
from smqrt.operations.api_pages import Snapshot
from smqrt.operations.logs import iso
from smqrt.printable import printable
from smqrt.settings.limits import Limit
from smqrt.smq.gevent_broker import all_brokers
from smqrt.wire import smq
from smqrt.workers.worker_rpc import END, Message, News, WorkerRpc

MAX_TOPICS = 20
"""The limit of topics of one page."""
MAX_NAME_CHARS = 256
MAX_KEPT = 30
"""The limit of messages kept between two calls of `take`, about a second apart. Further ones are only counted."""
_MAX_SHOWN_BYTES = 512
QUESTION = "listen"
"""The name of the request to another worker."""
_REPORT_S = 0.5
"""The interval of reports to another worker."""


class TopicListener(Protocol):
    """The common interface of the listeners below."""

    def take(self) -> tuple[list[Snapshot], int]: ...
    def close(self) -> None: ...


class LocalTopicListener(Outbox):
    """Subscribes to topics like a client. It never causes backpressure.

    Args:
        broker: the broker of the hub.
        destinations: the topics by name or number; missing names are created.
        clock: returns Unix seconds.

    Raises:
        ArgumentError: too many topics, a name is too long, or a number is not that of a topic.
        ClosedError: the hub is closed.
    """

    __slots__ = ("_broker", "_clock", "_kept", "_missed", "_number", "_topics")

    def __init__(self, broker: Broker, destinations: Sequence[str | int], clock: Callable[[], float] = time) -> None:
        super().__init__()
        if len(destinations) > MAX_TOPICS:
            raise ArgumentError(f"topics: a page shows at most {MAX_TOPICS} topics")
        topics = [_topic(broker, one) for one in dict.fromkeys(destinations)]  # without duplicates
        self._broker, self._clock = broker, clock
        self._kept: list[Snapshot] = []
        self._missed = self._number = 0
        self._topics: list[Topic] = []
        for topic in topics:
            self._topics.append(topic)
            topic.forget_routes()  # cached routes do not include this subscriber
            broker.subscribed(topic, self)

    def close(self) -> None:
        """Unsubscribe. A second call does nothing."""
        topics, self._topics = self._topics, []
        for topic in topics:
            self._broker.unsubscribed(topic, self)

    def take(self) -> tuple[list[Snapshot], int]:
        """Return the messages since the last call, and the number of messages that were not kept."""
        taken, self._kept = self._kept, []
        missed, self._missed = self._missed, 0
        return taken, missed

    def flush(self) -> None:
        """See `Outbox.flush`. Keep the first messages and count the others."""
        batches, self.queue = self.queue, []
        for batch in batches:
            if len(self._kept) >= MAX_KEPT:
                self._missed += smq.count_frames(batch)
                continue
            for frame in smq.frames(batch):
                if len(self._kept) >= MAX_KEPT:
                    self._missed += 1
                    continue
                self._number += 1
                tid, ptid, stid, data = smq.unpack_publish(frame)
                row: Snapshot = {
                    "number": self._number,
                    "at_s": self._clock(),
                    "topic": _name(self._broker.tid2topic(tid), tid),
                    "subtopic": _name(self._broker.tid2subtopic(stid), stid) if stid else "",
                    "from": ptid,
                    "size_bytes": len(data),
                    "text": printable(bytes(data[:_MAX_SHOWN_BYTES]), lines=True),
                    "cut": len(data) > _MAX_SHOWN_BYTES,
                }
                self._kept.append(row)


class _PeerTrace(Trace):
    """A trace of one connection; another connection of the client is not part of it.

    Args:
        session: the session of the client.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session.broker, session.uid, None, lambda: None)
        self._etid = session.etid

    def is_about(self, peer: BrokerPeer) -> bool:
        """See `Trace.is_about`."""
        return peer.etid == self._etid


class LocalPeerListener:
    """Records what a client publishes. Without a listener the data path of the client is unchanged.

    Args:
        peer: the id of the client, such as "1.3055123".
        clock: returns Unix seconds.

    Raises:
        ArgumentError: there is no such client.
    """

    def __init__(self, peer: str, clock: Callable[[], float] = time) -> None:
        self._trace, self._clock = _PeerTrace(snapshots.session_of(peer)), clock
        self._number = 0
        self._trace.start()

    def close(self) -> None:
        """Stop recording. A second call does nothing."""
        self._trace.stop()

    def take(self) -> tuple[list[Snapshot], int]:
        """Return the last messages since the last call, and the number of messages that were not kept."""
        events: list[Any] = self._trace.take()
        published = [one for one in events if one["event"] == "publish"]
        missed = sum(one["events"] for one in events if one["event"] == "missed")
        missed += sum(one["event"] == "more" for one in events) + max(len(published) - MAX_KEPT, 0)
        rows: list[Snapshot] = []
        for one in published[-MAX_KEPT:]:
            self._number += 1
            payload = printable(one["payload"], lines=True)
            row: Snapshot = {
                "number": self._number,
                "at_s": self._clock(),
                "topic": printable(str(one["topic"])),
                "subtopic": printable(str(one["subtopic"] or "")),
                "from": one["etid"],
                "size_bytes": one["bytes"],
                "text": payload,
                "cut": one["bytes"] > MAX_PAYLOAD_SHOWN_BYTES,
            }
            rows.append(row)
        return rows, missed


class RemoteListener:
    """Subscribes to topics of a hub, or records a client, of another worker. After invalid arguments, `take` raises.

    Args:
        worker_rpc: calls the other workers.
        worker: the number of the worker that has the hub.
        what: `hub`, its number, and `topics`, see `LocalTopicListener`; or `peer`, see `LocalPeerListener`.
    """

    def __init__(self, worker_rpc: WorkerRpc, worker: int, what: Message) -> None:
        question: Message = {"do": QUESTION, **what}
        self._kept: list[Snapshot] = []
        self._missed = self._number = 0
        self._fault = ""
        self._following = gevent.spawn(worker_rpc.follow, worker, lambda: question, self._received)

    def close(self) -> None:
        """Unsubscribe. A second call does nothing."""
        self._following.kill(block=False)

    def take(self) -> tuple[list[Snapshot], int]:
        """See `LocalTopicListener.take`. Raises ArgumentError for invalid arguments."""
        if self._fault:
            raise ArgumentError(self._fault)
        taken, self._kept = self._kept, []
        missed, self._missed = self._missed, 0
        return taken, missed

    def _received(self, report: Message) -> None:
        self._fault = report["why"]
        self._missed += report["missed"]
        for message in report["messages"]:
            if len(self._kept) >= MAX_KEPT:
                self._missed += 1
                continue
            self._number += 1
            self._kept.append({**message, "number": self._number})


def serve_topic_listener(hub: Callable[[int], Broker], question: Message) -> News:
    """Yield messages for a `RemoteListener` of another worker.

    Args:
        hub: returns a hub of this worker by its number; raises ArgumentError.
        question: the request of the other worker.
    """
    try:
        listening: TopicListener
        if "peer" in question:
            listening = LocalPeerListener(question["peer"])
        else:
            listening = LocalTopicListener(hub(question["hub"]), question["topics"])
    except (ArgumentError, ClosedError) as error:
        yield {"do": "messages", "messages": [], "missed": 0, "why": str(error)}
        yield END
        return
    with closing(listening):
        while True:
            messages, missed = listening.take()
            if messages or missed:
                yield {"do": "messages", "messages": messages, "missed": missed, "why": ""}
            gevent.sleep(_REPORT_S)


def _topic(broker: Broker, destination: str | int) -> Topic:
    if isinstance(destination, str):
        if len(destination) > MAX_NAME_CHARS:
            raise ArgumentError(f"topics: a name has more than {MAX_NAME_CHARS} characters; use its number")
        destination = broker.create(destination.encode("utf-8", "surrogateescape"))
    topic = broker.topic_table.get(destination) if 0 < destination <= MAX_ID else None
    # A topic without a name is that of a client.
    if topic is None or topic.name is None:
        raise ArgumentError(f"topics: there is no topic {destination}")
    return topic


def _name(name: bytes | None, number: int) -> str:
    return str(number) if name is None else printable(name[:MAX_NAME_CHARS])


# ---- Traces

MAX_TRACES = 4
SILENCE_S = 5.0
"""The interval of empty lines while there are no events. Only a failed write shows that the reader has disconnected."""

TRACES = Limit("traces", "", f"{MAX_TRACES} traces are running")
_running: list[Trace] = []


def start_trace(hub: int | None, peer: str, topic: str) -> Generator[dict[str, object] | None, None, None]:
    """Start a trace. Yield its events, and None after each `SILENCE_S` without events, until the iterator is closed.

    Args:
        hub: the number of the hub; None when there is only one, or `peer` contains it.
        peer: the id of a client, such as "1.3055123", or its uid; empty to trace a topic.
        topic: the name of a topic; empty to trace a client.

    Raises:
        ArgumentError: both or neither of `peer` and `topic` are given, there is no such client or hub, or too many
            traces are running.
    """
    if bool(peer) == bool(topic):
        raise ArgumentError("trace: exactly one of peer and topic is needed")
    head, dot, tail = peer.partition(".")
    uid: bytes | None
    if dot and head.isdigit() and tail.isdigit():
        broker, uid = snapshots.broker_of(snapshots.peer_id(peer)[0]), snapshots.session_of(peer).uid
    else:
        brokers = all_brokers()
        if hub is None and len(brokers) != 1:
            raise ArgumentError("hub: give hub=N unless there is exactly one hub; /api/v1/hubs lists them")
        broker = brokers[0] if hub is None else snapshots.broker_of(hub)
        uid = peer.encode("utf-8", "surrogateescape") or None
    if len(_running) >= MAX_TRACES:
        TRACES.refused("a trace")
        raise ArgumentError(f"trace: {MAX_TRACES} traces are running; stop one of them first")
    has_event = Event()
    trace = Trace(broker, uid, topic.encode("utf-8", "surrogateescape") if topic else None, has_event.set)

    def events() -> Generator[dict[str, object] | None, None, None]:
        # The trace starts at the first read: an iterator that is never read is never closed.
        _running.append(trace)
        trace.start()
        try:
            yield {"event": "tracing", "time": iso(time())}
            while not trace.broker.closed:
                has_event.clear()  # before `take`, so that no event is missed
                for event in trace.take():
                    yield {"time": iso(time()), **event}
                if not has_event.wait(SILENCE_S):
                    yield None
        finally:
            trace.stop()
            _running.remove(trace)

    return events()
