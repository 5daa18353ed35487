"""Traces of one client or one topic, for an operator.

Without traces a broker's routes do not change. With traces, the routes that concern them go through a `TracedRoute`.
A trace holds a bounded number of events, and counts those that its reader missed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice

from smqrt.broker.state import BrokerPeer, BrokerState, BrokerTrace
from smqrt.broker.topics import Route, Topic
from smqrt.errors import CloseReason
from smqrt.wire import smq
from smqrt.wire.smq import Type

MAX_WAITING_EVENTS = 1000
"""Events that wait for the reader of a trace, about 300 KB."""
MAX_FRAMES_SHOWN = 20
"""Messages of one batch that become events of their own; the others are one event with their bytes."""
MAX_PAYLOAD_SHOWN_BYTES = 80
MAX_NAME_SHOWN_BYTES = 256
_NAMED = {Type.SUBSCRIBE: "subscribe", Type.CREATE: "create", Type.CREATESUB: "createsub"}
_NUMBERED = {Type.UNSUBSCRIBE: "unsubscribe", Type.OBSERVE: "observe", Type.UNOBSERVE: "unobserve"}

Event = dict[str, object]


def text(data: bytes, max_bytes: int = MAX_NAME_SHOWN_BYTES) -> str:
    r"""Return the beginning of a name or payload as text; bytes that are not UTF-8 become `\xff`."""
    return data[:max_bytes].decode("utf-8", "backslashreplace")


class Trace:
    """One trace of a broker.

    Args:
        broker: the broker.
        uid: of the traced client; None when a topic is traced.
        topic: name of the traced topic; None when a client is traced.
        wake: called when there are events to read.
    """

    def __init__(self, broker: BrokerState, uid: bytes | None, topic: bytes | None, wake: Callable[[], object]) -> None:
        self.broker, self.uid, self.topic = broker, uid, topic
        self._wake = wake
        self._events: deque[Event] = deque()
        self._missed = 0

    def add(self, event: str, **fields: object) -> None:
        """Add an event, or count it as missed when too many wait."""
        if len(self._events) >= MAX_WAITING_EVENTS:
            self._missed += 1
            return
        self._events.append({"event": event, **fields})
        self._wake()

    def take(self) -> list[Event]:
        """Remove and return the events so far."""
        events, self._events = list(self._events), deque()
        if self._missed:
            events.append({"event": "missed", "events": self._missed})
            self._missed = 0
        return events

    # ---- start and stop

    def start(self) -> None:
        """Start the trace; all routes are resolved again."""
        self.broker.traces = (*self.broker.traces, self)
        self._forget_routes()

    def stop(self) -> None:
        """Stop the trace; a second call does nothing."""
        self.broker.traces = tuple(trace for trace in self.broker.traces if trace is not self)
        self._forget_routes()

    def _forget_routes(self) -> None:
        for session in list(self.broker.sessions.values()):
            session.forget_routes()

    # ---- notifications of the broker

    def is_about(self, peer: BrokerPeer) -> bool:
        """Whether `peer` is the traced client."""
        return self.uid is not None and peer.uid == self.uid

    def packet(self, client: BrokerPeer, packet: bytes) -> None:
        """A client sent a packet other than Publish."""
        kind = packet[0] if packet else -1
        if kind in _NAMED:
            name = packet[1:]
            if self.is_about(client) or (name == self.topic and kind != Type.CREATESUB):
                self.add(_NAMED[Type(kind)], **_client_fields(client), topic=text(name))
        elif kind in _NUMBERED and len(packet) >= 5:
            topic = self.broker.topic_table.by_key.get(packet[1:5])
            if self.is_about(client) or (topic is not None and topic.name is not None and topic.name == self.topic):
                self.add(_NUMBERED[Type(kind)], **_client_fields(client), topic=_topic_field(topic, packet[1:5]))

    def connected(self, client: BrokerPeer) -> None:
        """A client was accepted."""
        if self.is_about(client):
            self.add("connect", **_client_fields(client), info=text(client.info))

    def ended(self, client: BrokerPeer, reason: CloseReason, detail: str) -> None:
        """A connection was closed."""
        if self.is_about(client):
            self.add(
                "close", **_client_fields(client), reason=reason.name.lower(), detail=detail[:MAX_NAME_SHOWN_BYTES]
            )

    def published(self, peer: BrokerPeer, batch: bytes, topic: Topic | None) -> None:
        """A client, or the server, published a batch to one destination."""
        table = self.broker.subtopic_table
        shown = list(islice(smq.frames(batch), MAX_FRAMES_SHOWN))
        for frame in shown:
            _, _, stid, payload = smq.unpack_publish(frame)
            subtopic = table.by_id.get(stid)
            self.add(
                "publish",
                **_client_fields(peer),
                topic=_topic_field(topic, batch[3:7]),
                subtopic=None if not stid else text(subtopic) if subtopic is not None else stid,
                subscribers=topic.subscribers if topic is not None else 0,
                bytes=len(payload),
                payload=text(payload, MAX_PAYLOAD_SHOWN_BYTES),
            )
        rest = len(batch) - sum(map(len, shown))
        if rest:
            self.add("more", **_client_fields(peer), topic=_topic_field(topic, batch[3:7]), bytes=rest)


def _client_fields(peer: BrokerPeer) -> dict[str, object]:
    return {"etid": peer.etid, "uid": text(peer.uid)}


def _topic_field(topic: Topic | None, key: bytes) -> str | int:
    if topic is not None and topic.name is not None:
        return text(topic.name)
    return int.from_bytes(key, "big")


def traced(broker: BrokerState, route: Route, topic: Topic | None, peer: BrokerPeer) -> Route:
    """Return `route`, or a route that notifies the traces that it concerns."""
    name = topic.name if topic is not None else None
    concerned = tuple(
        trace for trace in broker.traces if trace.is_about(peer) or (name is not None and name == trace.topic)
    )
    return TracedRoute(concerned, route, topic, peer) if concerned else route


class TracedRoute:
    """Route that notifies traces of each batch."""

    __slots__ = ("_peer", "_route", "_topic", "_traces")

    def __init__(self, traces: tuple[BrokerTrace, ...], route: Route, topic: Topic | None, peer: BrokerPeer) -> None:
        self._traces, self._route, self._topic, self._peer = traces, route, topic, peer

    def deliver(self, batch: bytes) -> bool | None:
        """Notify the traces, then deliver the batch."""
        for trace in self._traces:
            trace.published(self._peer, batch, self._topic)
        return self._route.deliver(batch)

    def deliver_view(self, view: memoryview) -> bool | None:
        """See `deliver`."""
        batch = bytes(view)
        for trace in self._traces:
            trace.published(self._peer, batch, self._topic)
        return self._route.deliver_view(view)
