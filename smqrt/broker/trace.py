"""Traces: what one client does, or what goes through one topic, told to an operator while it happens.

A hub without traces has no tracer, and its routes are what they are otherwise. With one, the routes of those who are
traced go through a `TracedRoute`. A trace keeps a bounded number of events and counts those that its reader missed.
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

WAITING_EVENTS = 1000
"""Events that wait for the reader of a trace; 300 KB or so."""
FRAMES_SHOWN = 20
"""Messages of one batch that are shown one by one; of a bulk sender the rest is counted."""
PAYLOAD_SHOWN = 80
"""Bytes of a payload that are shown."""
NAME_SHOWN = 256
_NAMED = {Type.SUBSCRIBE: "subscribe", Type.CREATE: "create", Type.CREATESUB: "createsub"}
_NUMBERED = {Type.UNSUBSCRIBE: "unsubscribe", Type.OBSERVE: "observe", Type.UNOBSERVE: "unobserve"}

Event = dict[str, object]


def text(data: bytes, most: int = NAME_SHOWN) -> str:
    r"""Returns the beginning of a name or payload as text; bytes that are not UTF-8 stand there as `\xff`."""
    return data[:most].decode("utf-8", "backslashreplace")


class Trace:
    """One trace of a hub.

    Args:
        broker: the hub.
        uid: of the client that is traced; None when a topic is.
        topic: the name of the topic that is traced; None when a client is.
        wake: called when there is something to read.
    """

    def __init__(self, broker: BrokerState, uid: bytes | None, topic: bytes | None, wake: Callable[[], object]) -> None:
        self.broker, self.uid, self.topic = broker, uid, topic
        self._wake = wake
        self._events: deque[Event] = deque()
        self._missed = 0

    def add(self, event: str, **fields: object) -> None:
        """Tell something, unless too much waits already."""
        if len(self._events) >= WAITING_EVENTS:
            self._missed += 1
            return
        self._events.append({"event": event, **fields})
        self._wake()

    def take(self) -> list[Event]:
        """Returns what has come, and begins anew."""
        events, self._events = list(self._events), deque()
        if self._missed:
            events.append({"event": "missed", "events": self._missed})
            self._missed = 0
        return events

    # ---- begin and end

    def start(self) -> None:
        """Begin; routes are looked up again."""
        self.broker.traces = (*self.broker.traces, self)
        _forget_routes(self.broker)

    def stop(self) -> None:
        """End; a second call does nothing."""
        self.broker.traces = tuple(one for one in self.broker.traces if one is not self)
        _forget_routes(self.broker)

    # ---- what is told

    def is_about(self, peer: BrokerPeer) -> bool:
        """Whether the client is the one that is traced."""
        return self.uid is not None and peer.uid == self.uid

    def packet(self, client: BrokerPeer, packet: bytes) -> None:
        """A client sent a packet that is no message."""
        kind = packet[0] if packet else -1
        if kind in _NAMED:
            name = packet[1:]
            if self.is_about(client) or (name == self.topic and kind != Type.CREATESUB):
                self.add(_NAMED[Type(kind)], **_who(client), topic=text(name))
        elif kind in _NUMBERED and len(packet) >= 5:
            topic = self.broker.topic_table.by_key.get(packet[1:5])
            if self.is_about(client) or (topic is not None and topic.name is not None and topic.name == self.topic):
                self.add(_NUMBERED[Type(kind)], **_who(client), topic=_topic_shown(topic, packet[1:5]))

    def connected(self, client: BrokerPeer) -> None:
        """A client was let in."""
        if self.is_about(client):
            self.add("connect", **_who(client), info=text(client.info))

    def ended(self, client: BrokerPeer, reason: CloseReason, detail: str) -> None:
        """A connection ended."""
        if self.is_about(client):
            self.add("close", **_who(client), reason=reason.name.lower(), detail=detail[:NAME_SHOWN])

    def published(self, peer: BrokerPeer, batch: bytes, topic: Topic | None) -> None:
        """A client, or the server, published a batch of messages to one destination."""
        table = self.broker.subtopic_table
        shown = list(islice(smq.frames(batch), FRAMES_SHOWN))
        for frame in shown:
            _, _, stid, payload = smq.unpack_publish(frame)
            subtopic = table.by_id.get(stid)
            self.add(
                "publish",
                **_who(peer),
                topic=_topic_shown(topic, batch[3:7]),
                subtopic=None if not stid else text(subtopic) if subtopic is not None else stid,
                subscribers=topic.subscribers if topic is not None else 0,
                bytes=len(payload),
                payload=text(payload, PAYLOAD_SHOWN),
            )
        rest = len(batch) - sum(map(len, shown))
        if rest:
            self.add("more", **_who(peer), topic=_topic_shown(topic, batch[3:7]), bytes=rest)


def _who(peer: BrokerPeer) -> dict[str, object]:
    return {"etid": peer.etid, "uid": text(peer.uid)}


def _topic_shown(topic: Topic | None, key: bytes) -> str | int:
    if topic is not None and topic.name is not None:
        return text(topic.name)
    return int.from_bytes(key, "big")


def _forget_routes(broker: BrokerState) -> None:
    for session in list(broker.sessions.values()):
        session.forget_routes()


def traced(broker: BrokerState, route: Route, topic: Topic | None, peer: BrokerPeer) -> Route:
    """Returns the route to be used while there are traces."""
    name = topic.name if topic is not None else None
    concerned = tuple(one for one in broker.traces if one.is_about(peer) or (name is not None and name == one.topic))
    return TracedRoute(concerned, route, topic, peer) if concerned else route


class TracedRoute:
    """A route that is told to traces."""

    __slots__ = ("_peer", "_route", "_topic", "_traces")

    def __init__(self, traces: tuple[BrokerTrace, ...], route: Route, topic: Topic | None, peer: BrokerPeer) -> None:
        self._traces, self._route, self._topic, self._peer = traces, route, topic, peer

    def deliver(self, batch: bytes) -> bool | None:
        """Tell, then deliver."""
        for trace in self._traces:
            trace.published(self._peer, batch, self._topic)
        return self._route.deliver(batch)

    def deliver_view(self, view: memoryview) -> bool | None:
        """See `deliver`."""
        batch = bytes(view)
        for trace in self._traces:
            trace.published(self._peer, batch, self._topic)
        return self._route.deliver_view(view)
