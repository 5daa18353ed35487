"""Routes that are more than a topic: through the onpublish hook, into the journal, and to nobody.

A client's route cache holds the topic itself when no hook is set and nothing is recorded, so that neither costs the
data path anything then.
"""

from __future__ import annotations

import logging

from smqrt.broker.deferred import Deferred
from smqrt.broker.last_values import LastValueRoute, LastValues
from smqrt.broker.outbox import Drop, Outbox
from smqrt.broker.slow import Slow
from smqrt.broker.state import BrokerPeer, BrokerState, Recorder, ServerPeer
from smqrt.broker.topics import Route, Topic
from smqrt.broker.trace import traced
from smqrt.wire.smq import count_frames

log = logging.getLogger("smqrt")


def destination(broker: BrokerState, tid: int, ptid: int, peer: BrokerPeer) -> Route:
    """Where messages of `peer` to `tid` go now, the hook left aside."""
    topic = broker.topic_table.by_key.get(tid.to_bytes(4, "big")) or broker.topic_table.absent(tid)
    found = _subscribers(broker, topic, tid, ptid)
    route = found or UnroutedRoute(broker, tid, ptid, peer)  # here, not in a function: each call is paid by a message
    if broker.last_values is not None:
        route = _keeping(broker.last_values, broker, topic, ptid, peer, route)
    server, slow = broker.server, broker.slow
    if slow and found and peer is not server and (topic is None or slow.of(topic.key) is Slow.WAIT):
        route = PressedRoute(broker, tid if topic is None else topic.id, route, peer)  # without a name: of other nodes
    if broker.cluster is not None and found is not None and peer is not server:
        route = broker.cluster.paced(route, found, peer)
    if topic is not None and (topic is server.topic or topic.id in server.topics) and peer is not server:
        route = HandledRoute(server, route, peer)
    recorder = broker.recorder
    if recorder is None:
        return route
    if not recorder.selects(topic):
        return SkippedRoute(recorder, route)
    return (DurableRoute if recorder.waits_for_disk else RecordedRoute)(recorder, route, peer, found is not None)


def is_received(broker: BrokerState, topic: Topic) -> bool:
    """Whether what the server publishes to a topic has a subscriber, here or at another node."""
    return _subscribers(broker, topic, topic.id, broker.server.etid) is not None


def recorded_destination(broker: BrokerState, topic: Topic) -> Route:
    """Where messages of the server go that the journal has already."""
    server = broker.server
    found = _subscribers(broker, topic, topic.id, server.etid)
    route = found or UnroutedRoute(broker, topic.id, server.etid, server)
    if broker.last_values is not None:
        route = _keeping(broker.last_values, broker, topic, server.etid, server, route)
    return traced(broker, route, topic, server) if broker.traces else route


def is_behind(broker: BrokerState, topic: Topic) -> bool:
    """Whether publishers of a topic have to wait: for a subscriber whose policy is `wait`, or for the server's own
    handlers.
    """
    server, slow = broker.server, broker.slow
    return (slow is not None and topic.key in slow.pressure.topics) or (topic.id in server.topics and server.behind)


def _subscribers(broker: BrokerState, topic: Topic | None, tid: int, ptid: int) -> Route | None:
    route: Route | None = None
    if topic is not None:
        topic.settle()
        if topic.raw or topic.ws:
            route = topic
    return route if broker.cluster is None else broker.cluster.forwarded(route, topic, tid, ptid)


def _keeping(
    values: LastValues, broker: BrokerState, topic: Topic | None, ptid: int, peer: BrokerPeer, route: Route
) -> Route:
    if topic is None or not values.selects(topic):
        return route
    is_late = isinstance(route, UnroutedRoute) or (broker.recorder is not None and broker.recorder.waits_for_disk)
    find_again = (lambda: _subscribers(broker, topic, topic.id, ptid) or route) if is_late else None
    return LastValueRoute(values.of(topic), route, peer.identity, find_again)


class PressedRoute:
    """A route whose publishers wait while a subscriber has more than its queue may hold."""

    __slots__ = ("_broker", "_key", "_peer", "_pressure", "_route", "_tid")

    def __init__(self, broker: BrokerState, tid: int, route: Route, peer: BrokerPeer) -> None:
        assert broker.slow
        self._broker, self._tid, self._route, self._peer = broker, tid, route, peer
        self._key, self._pressure = tid.to_bytes(4, "big"), broker.slow.pressure

    def deliver(self, batch: bytes) -> bool | None:
        """Deliver the batch, or keep it until there is room; true when the publisher has to wait."""
        pressure = self._pressure
        if self._key in pressure.topics:
            return pressure.wait(self._key, self._peer, self._later, batch)
        self._route.deliver(batch)
        return self._key in pressure.topics and pressure.wait(self._key, self._peer, self._later)

    def deliver_view(self, view: memoryview) -> bool | None:
        """See `deliver`."""
        if self._key in self._pressure.topics:
            return self.deliver(bytes(view))
        self._route.deliver_view(view)
        return self._key in self._pressure.topics and self._pressure.wait(self._key, self._peer, self._later)

    def _later(self, batch: bytes) -> None:
        """Deliver to those who subscribe by now."""
        broker, tid, peer = self._broker, self._tid, self._peer
        topic = broker.topic_table.at(self._key)
        found = _subscribers(broker, topic, tid, peer.etid)
        route = found or UnroutedRoute(broker, tid, peer.etid, peer)
        if broker.last_values is not None:
            route = _keeping(broker.last_values, broker, topic, peer.etid, peer, route)
        route.deliver(batch)


class HandledRoute:
    """A route on which handlers of the server listen: publishers wait while these are behind."""

    __slots__ = ("_deliver", "_deliver_view", "_peer", "_server", "route")

    def __init__(self, server: ServerPeer, route: Route, peer: BrokerPeer) -> None:
        self._server, self._peer, self.route = server, peer, route
        self._deliver, self._deliver_view = route.deliver, route.deliver_view

    def deliver(self, batch: bytes) -> bool | None:
        """Deliver the batch; true when the publisher has to wait."""
        return self._deliver(batch) or (self._server.behind and self._server.hold(self._peer))

    def deliver_view(self, view: memoryview) -> bool | None:
        """See `deliver`."""
        return self._deliver_view(view) or (self._server.behind and self._server.hold(self._peer))


class RecordedRoute:
    """A route that is written to the journal before anybody receives from it."""

    __slots__ = ("_deliver", "_peer", "_record", "_record_large", "_recorder", "_route")

    def __init__(self, recorder: Recorder, route: Route, peer: BrokerPeer, reached: bool) -> None:
        self._recorder, self._route, self._peer = recorder, route, peer
        self._deliver = route.deliver
        self._record, self._record_large = recorder.record, recorder.record_large
        if not reached:
            self._record = recorder.record_unrouted
            self._record_large = lambda batch: recorder.record_unrouted(bytes(batch))

    @property
    def sole_raw(self) -> Outbox | None:
        """See `Topic.sole_raw`; while the recorder is full, publishers must come through here."""
        return None if self._recorder.full else getattr(self._route, "sole_raw", None)

    def deliver(self, batch: bytes) -> bool | None:
        """Record the batch, then deliver it; true when the publisher has to wait for the journal."""
        self._record(batch)
        return self._deliver(batch) or (self._recorder.full and self._recorder.hold(self._peer))

    def deliver_view(self, view: memoryview) -> bool | None:
        """See `deliver`."""
        self._record_large(view)
        return self._route.deliver_view(view) or (self._recorder.full and self._recorder.hold(self._peer))


class DurableRoute(RecordedRoute):
    """A route that is on the disk before anybody receives from it."""

    __slots__ = ()

    @property
    def sole_raw(self) -> Outbox | None:
        """None: nothing goes past `deliver`."""
        return None

    def deliver(self, batch: bytes) -> bool:
        """Record the batch, and deliver it later; true when the publisher has to wait for that."""
        self._record(batch)
        return self._recorder.send_later(self._deliver, batch, self._peer)

    def deliver_view(self, view: memoryview) -> bool:
        """See `deliver`."""
        return self.deliver(bytes(view))


class SkippedRoute:
    """A route that the journal does not want: its messages are counted."""

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
    """A route through `onpublish`, called once per batch before routing. Where the batch goes is decided behind the hook,
    since subscribers may have come or gone meanwhile.
    """

    __slots__ = ("_broker", "_peer", "_ptid", "_tid")

    def __init__(self, broker: BrokerState, tid: int, ptid: int, peer: BrokerPeer) -> None:
        self._broker, self._tid, self._ptid, self._peer = broker, tid, ptid, peer

    def deliver(self, batch: bytes) -> bool:
        """Deliver what the hook lets pass; true when the hook or the journal waits."""
        hook = self._broker.hooks.onpublish
        answer = hook(batch, self._tid, self._ptid, self._peer) if hook else batch
        if not isinstance(answer, Deferred):
            return self._pass(batch, answer)
        if answer.done:
            return self._pass(batch, None if answer.failed else answer.result())
        self._peer.pending = batch
        answer.then(lambda allowed, error: self._answered(batch, allowed))
        return True

    def _answered(self, batch: bytes, allowed: bytes | None) -> None:
        self._peer.pending = None
        try:
            waits = self._pass(batch, allowed)
        except Exception:  # the publisher must not wait for ever
            log.exception("error while a message was routed; it is lost")
            waits = False
        if not waits:
            self._peer.outbox.resume()

    def deliver_view(self, view: memoryview) -> bool:
        """See `deliver`."""
        return self.deliver(bytes(view))

    def _pass(self, batch: bytes, allowed: bytes | None) -> bool:
        allowed = allowed or b""
        if len(allowed) < len(batch):
            swallowed = count_frames(batch) - count_frames(allowed)
            self._broker.stats.drop(Drop.SWALLOWED, swallowed)
            self._uncount(swallowed, len(batch) - len(allowed), bool(allowed))
        return bool(allowed and destination(self._broker, self._tid, self._ptid, self._peer).deliver(allowed))

    def _uncount(self, swallowed: int, size: int, is_delivered: bool) -> None:
        """Take those that went no further out of what `Session.count_batch` counted as delivered to the topic."""
        table = self._broker.topic_table
        topic = table.get(self._tid)
        if topic is not None and topic.is_delivered:
            topic.messages -= swallowed - (not is_delivered)
        table.traffic.add(swallowed, size, 0)


class UnroutedRoute:
    """The route of messages that nobody receives: they are counted and shown to `ondrop`."""

    __slots__ = ("_broker", "_peer", "_ptid", "_tid")

    def __init__(self, broker: BrokerState, tid: int, ptid: int, peer: BrokerPeer) -> None:
        self._broker, self._tid, self._ptid, self._peer = broker, tid, ptid, peer

    def deliver(self, batch: bytes) -> None:
        """Count the batch as dropped."""
        messages = count_frames(batch)
        self._broker.topic_table.traffic.add(messages, len(batch), 0)
        cluster = self._broker.cluster
        if cluster is None or not cluster.missed(self._tid, messages):
            self._broker.stats.drop(Drop.UNROUTED, messages)
        hook = self._broker.hooks.ondrop
        if hook:
            hook(batch, self._tid, self._ptid, self._peer)

    def deliver_view(self, view: memoryview) -> None:
        """See `deliver`."""
        self.deliver(bytes(view))
