"""Routes through traces, hooks, journal and backpressure, and their resolution.

Without hooks and recording, a client's route cache holds the topic itself, so that unused features cost no time.
Otherwise routes are nested, the outermost first:

    TracedRoute ▶ MeteredRoute ▶ GuardedRoute ▶ RecordedRoute ▶ HandledRoute ▶ BackpressureRoute ▶ LastValueRoute
    ▶ Topic
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from itertools import islice

from smqrt.broker.deferred import Deferred
from smqrt.broker.last_values import LastValueRoute, LastValues
from smqrt.broker.outbox import Drop, Outbox, Slow
from smqrt.broker.state import BrokerPeer, BrokerState, BrokerTrace, Recorder, ServerPeer
from smqrt.broker.topics import Route, Topic
from smqrt.errors import CloseReason
from smqrt.wire import smq
from smqrt.wire.smq import Type, count_frames

# ---- Traces of a client or a topic
#
# Without traces a broker's routes do not change. With traces, the routes that concern them go through a `TracedRoute`.
# A trace holds a bounded number of events, and counts the others as missed.

MAX_WAITING_EVENTS = 1000
"""Events that wait for the reader of a trace, about 300 KB."""
MAX_FRAMES_SHOWN = 20
"""Messages of one batch with one event each; one more event counts the bytes of the others."""
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
        uid: uid of the traced client; None when a topic is traced.
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
        # A tuple, which is replaced: the data path may be looping over the old one.
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
        """Record a packet other than Publish."""
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
        """Record that a client was accepted."""
        if self.is_about(client):
            self.add("connect", **_client_fields(client), info=text(client.info))

    def ended(self, client: BrokerPeer, reason: CloseReason, detail: str) -> None:
        """Record that a connection was closed."""
        if self.is_about(client):
            self.add(
                "close", **_client_fields(client), reason=reason.name.lower(), detail=detail[:MAX_NAME_SHOWN_BYTES]
            )

    def published(self, peer: BrokerPeer, batch: bytes, topic: Topic | None) -> None:
        """Record a batch that a client, or the server, published to one destination."""
        if len(self._events) >= MAX_WAITING_EVENTS:  # without unpacking it, so that a slow reader costs less
            self._missed += count_frames(batch)
            return
        table = self.broker.subtopic_table
        qos = getattr(batch, "qos", None)  # see `smqrt.broker.mqtt.messages`
        more: dict[str, object] = {} if qos is None else {"qos": qos}
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
                **more,
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
    """Return `route`, behind a `TracedRoute` if it concerns a trace."""
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


log = logging.getLogger("smqrt")


def destination(broker: BrokerState, tid: int, ptid: int, peer: BrokerPeer) -> Route:
    """Resolve the route of messages from `peer` to `tid`, behind `onpublish`."""
    topic = broker.topic_table.by_key.get(tid.to_bytes(4, "big")) or broker.topic_table.get(tid)  # inline, as below
    found = _subscribers(broker, topic, tid, ptid)
    route = found or UnroutedRoute(broker, tid, ptid, peer)  # a call costs time per message of the server
    if broker.last_values is not None:
        route = _with_last_values(broker.last_values, broker, topic, ptid, peer, route)
    server, slow = broker.server, broker.slow
    if slow and found and peer is not server and (topic is None or slow.of(topic.key) is Slow.WAIT):
        # `topic` is None for a topic that only other nodes have.
        route = BackpressureRoute(broker, tid if topic is None else topic.id, route, peer)
    if broker.cluster is not None and found is not None and peer is not server:
        route = broker.cluster.with_link_backpressure(route, found, peer)
    if topic is not None and (topic is server.topic or topic.id in server.topics) and peer is not server:
        route = HandledRoute(server, route, peer)
    recorder = broker.recorder
    if recorder is None:
        return route
    if not recorder.selects(topic):
        return SkippedRoute(recorder, route)
    return (DurableRoute if recorder.waits_for_disk else RecordedRoute)(recorder, route, peer, found is not None)


def is_received(broker: BrokerState, topic: Topic) -> bool:
    """Whether messages of the server to a topic have a subscriber, here or at another node."""
    return _subscribers(broker, topic, topic.id, broker.server.etid) is not None


def recorded_destination(broker: BrokerState, topic: Topic) -> Route:
    """Resolve the route of messages of the server that are in the journal already."""
    server = broker.server
    found = _subscribers(broker, topic, topic.id, server.etid)
    route = found or UnroutedRoute(broker, topic.id, server.etid, server)
    if broker.last_values is not None:
        route = _with_last_values(broker.last_values, broker, topic, server.etid, server, route)
    return traced(broker, route, topic, server) if broker.traces else route


def is_behind(broker: BrokerState, topic: Topic) -> bool:
    """Whether publishers of a topic have to wait for a slow subscriber or for the server's own handlers."""
    server, slow = broker.server, broker.slow
    return (slow is not None and topic.key in slow.pressure.topics) or (topic.id in server.topics and server.behind)


def _subscribers(broker: BrokerState, topic: Topic | None, tid: int, ptid: int) -> Route | None:
    route: Route | None = None
    if topic is not None:
        topic.settle()
        if topic.raw or topic.ws:
            route = topic
    return route if broker.cluster is None else broker.cluster.forwarded(route, topic, tid, ptid)


def _with_last_values(
    values: LastValues, broker: BrokerState, topic: Topic | None, ptid: int, peer: BrokerPeer, route: Route
) -> Route:
    if topic is None or not values.selects(topic):
        return route
    # Messages that are delivered turns later go to the subscribers at that time.
    is_late = isinstance(route, UnroutedRoute) or (broker.recorder is not None and broker.recorder.waits_for_disk)
    find_again = (lambda: _subscribers(broker, topic, topic.id, ptid) or route) if is_late else None
    return LastValueRoute(values.of(topic), route, peer.identity, find_again)


class BackpressureRoute:
    """Route whose publishers wait while the queue of a subscriber is full (slow-consumer policy `wait`)."""

    __slots__ = ("_broker", "_key", "_peer", "_pressure", "_route", "_tid")

    def __init__(self, broker: BrokerState, tid: int, route: Route, peer: BrokerPeer) -> None:
        assert broker.slow
        self._broker, self._tid, self._route, self._peer = broker, tid, route, peer
        self._key, self._pressure = tid.to_bytes(4, "big"), broker.slow.pressure

    def deliver(self, batch: bytes) -> bool | None:
        """Deliver the batch, or hold it back until there is room; return true when the publisher has to wait."""
        pressure = self._pressure
        if self._key in pressure.topics:
            return pressure.wait(self._key, self._peer, self._deliver_held, batch)
        self._route.deliver(batch)
        return self._key in pressure.topics and pressure.wait(self._key, self._peer, self._deliver_held)

    def deliver_view(self, view: memoryview) -> bool | None:
        """See `deliver`."""
        if self._key in self._pressure.topics:
            return self.deliver(bytes(view))
        self._route.deliver_view(view)
        return self._key in self._pressure.topics and self._pressure.wait(self._key, self._peer, self._deliver_held)

    def _deliver_held(self, batch: bytes) -> None:
        """Deliver a batch that was held back, to the subscribers at this time."""
        broker, tid, peer = self._broker, self._tid, self._peer
        topic = broker.topic_table.at(self._key)  # resolved again: subscribers may have changed
        found = _subscribers(broker, topic, tid, peer.etid)
        route = found or UnroutedRoute(broker, tid, peer.etid, peer)
        if broker.last_values is not None:
            route = _with_last_values(broker.last_values, broker, topic, peer.etid, peer, route)
        route.deliver(batch)


class HandledRoute:
    """Route to handlers of the server: publishers wait while messages for handlers wait."""

    __slots__ = ("_deliver", "_deliver_view", "_peer", "_server", "route")

    def __init__(self, server: ServerPeer, route: Route, peer: BrokerPeer) -> None:
        self._server, self._peer, self.route = server, peer, route
        self._deliver, self._deliver_view = route.deliver, route.deliver_view

    def deliver(self, batch: bytes) -> bool | None:
        """Deliver the batch; return true when the publisher has to wait."""
        return self._deliver(batch) or (self._server.behind and self._server.hold(self._peer))

    def deliver_view(self, view: memoryview) -> bool | None:
        """See `deliver`."""
        return self._deliver_view(view) or (self._server.behind and self._server.hold(self._peer))


class RecordedRoute:
    """Route that records messages in the journal before they are delivered."""

    __slots__ = ("_deliver", "_peer", "_record", "_record_large", "_route", "recorder")

    def __init__(self, recorder: Recorder, route: Route, peer: BrokerPeer, reached: bool) -> None:
        self.recorder, self._route, self._peer = recorder, route, peer
        self._deliver = route.deliver
        self._record, self._record_large = recorder.record_of(peer), recorder.record_large
        if not reached:
            self._record = recorder.record_unrouted
            self._record_large = lambda batch: recorder.record_unrouted(bytes(batch))

    @property
    def buffered(self) -> Topic | None:
        """The topic, if messages are delivered to it before the recorder writes them; otherwise None."""
        return self._route if isinstance(self._route, Topic) and self.recorder.is_buffered else None

    @property
    def sole_raw(self) -> Outbox | None:
        """The only subscriber, see `Topic.sole_raw`; None while the recorder is full, because publishers wait then."""
        return None if self.recorder.full else getattr(self._route, "sole_raw", None)

    def deliver(self, batch: bytes) -> bool | None:
        """Record the batch, then deliver it; return true when the publisher has to wait."""
        self._record(batch)
        return self._deliver(batch) or (self.recorder.full and self.recorder.hold(self._peer))

    def deliver_view(self, view: memoryview) -> bool | None:
        """See `deliver`."""
        self._record_large(view)
        return self._route.deliver_view(view) or (self.recorder.full and self.recorder.hold(self._peer))


class DurableRoute(RecordedRoute):
    """Route that delivers messages once they are on the disk."""

    __slots__ = ()

    @property
    def sole_raw(self) -> Outbox | None:
        """None: messages reach the subscriber only through `deliver`."""
        return None

    def deliver(self, batch: bytes) -> bool:
        """Record the batch and deliver it later; return true when the publisher has to wait for that."""
        self._record(batch)
        return self.recorder.send_later(self._deliver, batch, self._peer)

    def deliver_view(self, view: memoryview) -> bool:
        """See `deliver`."""
        return self.deliver(bytes(view))


class SkippedRoute:
    """Route that the journal does not record: counts the messages as skipped."""

    __slots__ = ("_recorder", "_route")

    def __init__(self, recorder: Recorder, route: Route) -> None:
        self._recorder, self._route = recorder, route

    def deliver(self, batch: bytes) -> bool | None:
        """Count the batch, then deliver it."""
        self._recorder.skipped(batch)
        return self._route.deliver(batch)

    def deliver_view(self, view: memoryview) -> bool | None:
        """See `deliver`."""
        self._recorder.skipped(bytes(view))
        return self._route.deliver_view(view)


class GuardedRoute:
    """Route through the `onpublish` hook, which is called once per batch.

    The destination is resolved after the hook has answered, because subscribers may have changed meanwhile.
    """

    __slots__ = ("_broker", "_peer", "_ptid", "_tid")

    def __init__(self, broker: BrokerState, tid: int, ptid: int, peer: BrokerPeer) -> None:
        self._broker, self._tid, self._ptid, self._peer = broker, tid, ptid, peer

    def deliver(self, batch: bytes) -> bool:
        """Deliver what the hook permits; return true when the publisher has to wait for the hook or the journal."""
        hook = self._broker.hooks.onpublish
        answer = hook(batch, self._tid, self._ptid, self._peer) if hook else batch  # it may have been removed
        if not isinstance(answer, Deferred):
            return self._deliver_allowed(batch, answer)
        if answer.done:
            return self._deliver_allowed(batch, None if answer.failed else answer.result())
        self._peer.pending = batch
        answer.then(lambda allowed, error: self._deliver_later(batch, allowed))
        return True

    def _deliver_later(self, batch: bytes, allowed: bytes | None) -> None:
        self._peer.pending = None
        try:
            waits = self._deliver_allowed(batch, allowed)
        except Exception:  # otherwise the publisher would wait forever
            log.exception("error while a message was routed; it is lost")
            waits = False
        if not waits:
            self._peer.outbox.resume()

    def deliver_view(self, view: memoryview) -> bool:
        """See `deliver`."""
        return self.deliver(bytes(view))

    def _deliver_allowed(self, batch: bytes, allowed: bytes | None) -> bool:
        allowed = allowed or b""
        if allowed and type(batch) is not bytes and type(allowed) is bytes:  # see `smqrt.broker.mqtt.messages`
            allowed = batch.like(allowed)  # type: ignore[attr-defined]
        if allowed and type(batch) is not bytes:
            batch.accepted()  # type: ignore[attr-defined]
        if len(allowed) < len(batch):  # the hook only removes whole frames
            swallowed = count_frames(batch) - count_frames(allowed)
            self._broker.stats.drop(Drop.SWALLOWED, swallowed)
            if type(batch) is not bytes:  # an MQTT client gets an answer for each message
                batch.dropped(Drop.SWALLOWED)  # type: ignore[attr-defined]
            table = self._broker.topic_table
            topic = table.get(self._tid)
            # `Session.count_batch` has counted all messages but the first one, which only `Topic.deliver` counts.
            if topic is not None and topic.is_delivered:
                topic.messages -= swallowed - (not allowed)
            table.traffic.add(swallowed, len(batch) - len(allowed), 0)
        return bool(allowed and destination(self._broker, self._tid, self._ptid, self._peer).deliver(allowed))


class UnroutedRoute:
    """Route without a subscriber: counts the messages and calls `ondrop`."""

    __slots__ = ("_broker", "_peer", "_ptid", "_tid")

    def __init__(self, broker: BrokerState, tid: int, ptid: int, peer: BrokerPeer) -> None:
        self._broker, self._tid, self._ptid, self._peer = broker, tid, ptid, peer

    def deliver(self, batch: bytes) -> None:
        """Count the messages as dropped and call the hook."""
        messages = count_frames(batch)
        self._broker.topic_table.traffic.add(messages, len(batch), 0)
        cluster = self._broker.cluster
        if cluster is None or not cluster.missed(self._tid, messages):
            self._broker.stats.drop(Drop.UNROUTED, messages)
            if type(batch) is not bytes:
                batch.dropped(Drop.UNROUTED)  # type: ignore[attr-defined]
        hook = self._broker.hooks.ondrop
        if hook:
            hook(batch, self._tid, self._ptid, self._peer)

    def deliver_view(self, view: memoryview) -> None:
        """See `deliver`."""
        self.deliver(bytes(view))
