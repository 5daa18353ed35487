"""Another node of a cluster, as one hub sees it: what it says, its clients, and where its messages go here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from smqrt.auth.identity import ANONYMOUS, Identity, Method
from smqrt.broker.last_values import MAX_STAMP as MAX_VALUE_STAMP
from smqrt.broker.last_values import LastValueRoute, LastValues, SentValueRoute, clock
from smqrt.broker.outbox import Drop, Outbox
from smqrt.broker.routes import HandledRoute
from smqrt.broker.server_client import Arrived, ServerClient
from smqrt.broker.topics import Route, Topic
from smqrt.cluster.node_send_queue import ForwardedRoute, NodeSendQueue, RenumberedRoute, count_messages
from smqrt.errors import CloseReason, ProtocolError
from smqrt.wire import cluster_packets as wire
from smqrt.wire import smq
from smqrt.wire.cluster_packets import Announced, Key, LinkType
from smqrt.wire.smq import LOCAL_BITS, server_of

if TYPE_CHECKING:
    from smqrt.cluster.absent_nodes import AbsentNode
    from smqrt.cluster.clustered_broker import ClusteredBroker

MAX_ROUTES = 1 << 16
"""Entries of a node's route cache."""
MAX_KEPT_BYTES = 1 << 30
"""What is kept of what another node says of one hub: three million clients."""
MAX_STAMP = 1 << 63
MAX_PRESSING = 1 << 16
"""Topics whose publishers wait for one node."""
MAX_SUBSCRIBERS = 1 << LOCAL_BITS
"""Of one node: each of its clients has an ETID."""
_TOPIC_BYTES, _CLIENT_BYTES = 160, 600
SERVER_UID = b"SMQ server client"


class Phantom:
    """A client of another node, as hooks and `etid2peer` see it.

    Attributes:
        node: where it is.
        stamp: when it connected, in ms; see `Announced`.
        older: another client of its uid that it has taken over from, while that is not gone; newer: the other way.
        size_bytes: what it takes here.
    """

    __slots__ = ("etid", "extra", "identity", "info", "newer", "node", "older", "pending", "stamp", "uid")
    topics: Mapping[int, object] | None = None

    def __init__(self, node: RemoteNode, announced: Announced) -> None:
        self.node = node
        self.etid, self.stamp, self.uid, self.info = announced[:4]
        user = announced.user.decode("utf-8", "surrogateescape")
        self.identity = Identity("" if user == ANONYMOUS else user, method=Method.NONE) if user else None
        self.extra: Any = None
        self.pending: bytes | None = None
        self.newer: Phantom | None = None
        self.older: Phantom | None = None

    @property
    def age(self) -> tuple[int, int]:
        """What all nodes compare to agree which client of a uid is the newest."""
        return self.stamp, self.node.number

    @property
    def size_bytes(self) -> int:
        """See above."""
        return _CLIENT_BYTES + len(self.uid) + len(self.info)

    @property
    def outbox(self) -> Outbox:
        """The way to its node."""
        return self.node.way


class RemoteNode:
    """Another node that can be reached.

    Args:
        member: the hub's part in the cluster.
        number: the node's.
        bit: stands for it in sets of nodes.
        way: to it.

    Attributes:
        routes: where its messages go, by the four bytes of their destination.
        numbers: topics that have another number there than their names give.
        subtopics: what the numbers of its sub-topics are here, where they differ.
        phantoms: its clients, by ETID.
        interest: how many topics it wants.
        synced: whether it has said all that it had when it joined.
        gone: whether it is lost.
        kept_bytes: of what it has said so far.
        watched: topics whose number of subscribers it is told.
        pressing: topics whose publishers have to wait for its clients, and since when.
        timed: those that are looked at later.
        once: topics that its server handles once in the cluster, with the number for what it is to handle.
        renumbered: topics with last values that have another number here, by that number: what it says of them may come
            before it knows theirs.
        stamped: topics, by their keys here, of whose messages it tells when they were published.
        valued: topics whose names it was told, so that it can keep their last values.
        predecessor: the node that it goes on for, while messages for that are kept; see `smqrt.cluster.migration`.
        is_held: whether what it sends only becomes last values: it is for the process that this one goes on for.
    """

    def __init__(self, member: ClusteredBroker, number: int, bit: int, way: NodeSendQueue) -> None:
        self.member, self.number, self.bit, self.way = member, number, bit, way
        self.routes: dict[bytes, Route] = {}
        self.numbers: dict[Key, int] = {}
        self.subtopics: dict[bytes, bytes] = {}
        self.phantoms: dict[int, Phantom] = {}
        self.interest = self.kept_bytes = 0
        self.synced = self.gone = False
        self.watched: set[Key] = set()
        self.valued: set[Key] = set()
        self.pressing: dict[Key, float] = {}
        self.timed: set[Key] = set()
        self.once: dict[Key, int] = {}
        self.renumbered: dict[bytes, Topic] = {}
        self.stamped: set[bytes] = set()
        self._heard_us = self._told_us = 0
        self.predecessor: RemoteNode | None = None
        self.is_held = False
        self.server = Phantom(self, Announced(server_of(number), 0, SERVER_UID, b"", b""))

    # ---- messages from it

    def resolve(self, destination: bytes) -> Route:
        """Where messages to `destination`, a number in four bytes, go."""
        broker = self.member.broker
        topic = broker.topic_table.at(destination) or self.renumbered.get(destination)
        if topic is not None and topic.id in self.member.foreign:
            topic = None  # what came over one link does not go on over another
        tid = int.from_bytes(destination, "big")
        if self.is_held:
            return self._silent_route(topic, tid)
        route = self._route(topic, tid)
        if topic is not None and topic.key == destination:
            self._cache(topic, route)
        return route

    def hold(self, is_held: bool) -> None:
        """Let its messages reach nobody from now on, or those they are for again."""
        if is_held != self.is_held:
            self.is_held = is_held
            self.forget_routes()

    def _silent_route(self, topic: Topic | None, tid: int) -> Route:
        route, values = NobodyRoute(lambda reason, messages: None), self.member.broker.last_values
        if topic is None or values is None or not values.selects(topic):
            return route
        return self._translated(self._to_values(topic, values, route), topic, tid)

    def _to_values(self, topic: Topic, values: LastValues, route: Route) -> Route:
        if topic.key in self.stamped:
            return SentValueRoute(values.of(topic), route, lambda: self._heard_us)
        return LastValueRoute(values.of(topic), route, None)

    def _translated(self, route: Route, topic: Topic, tid: int) -> Route:
        if topic.id != tid:
            route = RenumberedRoute(route, topic.id)
        return SubtopicRoute(route, self.subtopics) if self.subtopics else route

    def _route(self, topic: Topic | None, tid: int) -> Route:
        broker = self.member.broker
        route: Route = NobodyRoute(broker.stats.drop)
        if topic is None:
            return route
        topic.settle()
        if topic.raw or topic.ws:
            route = OnceRoute(broker.server, topic, self) if topic.id in broker.server.once else ArrivedRoute(topic)
        values = broker.last_values
        if values is not None and values.selects(topic):
            route = self._to_values(topic, values, route)
        server = broker.server
        if topic is server.topic or topic.id in server.topics or server.is_inbox(topic.id):
            route = HandledRoute(broker.server, route, self.server)
        return self._translated(route, topic, tid)

    def _cache(self, topic: Topic, route: Route) -> None:
        if len(self.routes) >= MAX_ROUTES:
            self.forget_routes()
        if topic.cached is None:
            topic.cached = set()
        topic.cached.add(self)
        self.routes[topic.key] = route

    def forget_route(self, destination: bytes) -> None:
        """See `RouteCache`."""
        self.routes.pop(destination, None)

    def forget_routes(self) -> None:
        """Look every destination up again."""
        by_key = self.member.broker.topic_table.by_key
        for key in self.routes:
            topic = by_key.get(key)
            if topic and topic.cached:
                topic.cached.discard(self)
        self.routes.clear()

    def count_batch(self, destination: bytes, more: int) -> None:
        """Count `more` messages, which are in one run; it is delivered next."""
        topic = self.member.broker.topic_table.by_key.get(destination)
        if topic is not None and (topic.raw or topic.ws):
            topic.messages += more
            topic.arrived += more

    # ---- what it says

    def control(self, packet: bytes) -> None:
        """Work off a control packet.

        Raises:
            ProtocolError: it ends too soon, or is of an unknown type.
        """
        handler = HANDLERS.get(packet[0]) if packet else None
        if handler is None:
            raise ProtocolError(CloseReason.UNKNOWN_PACKET, f"type {packet[:1].hex()} of another node")
        handler(self, packet)

    def _keep(self, size_bytes: int) -> None:
        self.kept_bytes += size_bytes
        if self.kept_bytes > MAX_KEPT_BYTES:
            raise ProtocolError(
                CloseReason.UNKNOWN_PACKET, f"a node says more than {MAX_KEPT_BYTES >> 20} MiB of a hub"
            )

    def _interest(self, packet: bytes) -> None:
        was_lost = self.member.lost.at(self.way)
        for key in wire.parse_keys(packet):
            for absent in was_lost:
                self.member.lost.gets(absent, key)
            if self.member.interest.add(key, self.bit):
                self.interest += 1
                self._keep(_TOPIC_BYTES)
                self.member.forget(key)

    def _no_interest(self, packet: bytes) -> None:
        for key in wire.parse_keys(packet):
            if self.member.interest.discard(key, self.bit):
                self.interest -= 1
                self._keep(-_TOPIC_BYTES)
                self.member.forget(key)

    def _numbered(self, packet: bytes) -> None:
        for number, check, own in wire.parse_keys_and_numbers(packet):
            self._keep(_TOPIC_BYTES if (number, check) not in self.numbers else 0)
            self.numbers[number, check] = own
            self.member.forget((number, check))

    def _subtopics(self, packet: bytes) -> None:
        for number, name in wire.parse_names(packet):
            here = self.member.subtopic(name, number)
            if here != number:
                self._keep(_TOPIC_BYTES if number.to_bytes(4, "big") not in self.subtopics else 0)
                self.subtopics[number.to_bytes(4, "big")] = here.to_bytes(4, "big")
                self.forget_routes()

    def _peers(self, packet: bytes) -> None:
        for announced in wire.parse_peers(packet):
            if announced.stamp >= MAX_STAMP:
                raise ProtocolError(
                    CloseReason.UNKNOWN_PACKET, "a client of another node connects after the end of time"
                )
            before = self.phantoms.get(announced.etid)
            if before is None or before.stamp != announced.stamp:
                if before is not None:
                    self._keep(-before.size_bytes)
                    self.member.release(before)
                phantom = self.phantoms[announced.etid] = Phantom(self, announced)
                self._keep(phantom.size_bytes)
                self.member.appeared(phantom)

    def _peers_gone(self, packet: bytes) -> None:
        for etid in wire.parse_etids(packet):
            phantom = self.phantoms.pop(etid, None)
            if phantom is not None:
                self._keep(-phantom.size_bytes)
                self.member.vanished(phantom)

    def _synced(self, packet: bytes) -> None:
        self.synced = True
        self.member.synced(self)

    def _end(self, packet: bytes) -> None:
        etid, text = wire.parse_end(packet)
        self.member.end_here(etid, text or None)

    def _watch(self, packet: bytes) -> None:
        keys = list(wire.parse_keys(packet))
        before = len(self.watched)
        self.watched.update(keys)
        self._keep(_TOPIC_BYTES * (len(self.watched) - before))
        self.member.counts.tell(keys, [self])

    def _unwatch(self, packet: bytes) -> None:
        before = len(self.watched)
        self.watched.difference_update(wire.parse_keys(packet))
        self._keep(_TOPIC_BYTES * (len(self.watched) - before))

    def _count(self, packet: bytes) -> None:
        for number, check, subscribers in wire.parse_keys_and_numbers(packet):
            if subscribers > MAX_SUBSCRIBERS:
                raise ProtocolError(CloseReason.UNKNOWN_PACKET, f"{subscribers} subscribers at another node")
            self.member.counts.counted(self, (number, check), subscribers)

    def _topics(self, packet: bytes) -> None:
        for number, name in wire.parse_names(packet):
            self.member.keep_values_of(name)
            topic = self.member.broker.topic_table.by_name.get(name)
            if topic is None:
                continue
            if topic.id != number:
                self._keep(_TOPIC_BYTES)
                self.renumbered[number.to_bytes(4, "big")] = topic
            if self.way.tells_stamps:
                self.stamped.add(topic.key)
                topic.forget_routes()

    def _value(self, packet: bytes) -> None:
        if len(packet) < smq.PUBLISH_HEADER_BYTES - 2:
            raise ProtocolError(CloseReason.SHORT_PACKET, "a last value of another node ends too soon")
        self._restore_value(smq.frame(bytes((smq.Type.PUBLISH,)) + packet[1:]))

    def _restore_value(self, frame: bytes, stamp: int | None = None) -> None:
        frame = wire.with_subtopics(frame, self.subtopics) if self.subtopics else frame
        topic = self.renumbered.get(frame[3:7])
        if topic is not None and frame[3:7] not in self.member.broker.topic_table.by_key:
            frame = wire.rewritten(frame, topic.id, int.from_bytes(frame[7:11], "big"))
        self.member.restore_value(frame, stamp, self.way.epoch)

    def _pressed(self, packet: bytes) -> None:
        for key in wire.parse_keys(packet):
            self.member.waits.pressed_by(self, key)

    def _released(self, packet: bytes) -> None:
        for key in wire.parse_keys(packet):
            self.member.waits.released_by(self, key)

    def _once(self, packet: bytes) -> None:
        for number, check, at in wire.parse_keys_and_numbers(packet):
            key = number, check
            self._keep(_TOPIC_BYTES * (bool(at) - (key in self.once)))
            if at:
                self.once[key] = at
            else:
                self.once.pop(key, None)

    def _value_at(self, packet: bytes) -> None:
        if len(packet) < smq.PUBLISH_HEADER_BYTES + 6:
            raise ProtocolError(CloseReason.SHORT_PACKET, "a last value of another node ends too soon")
        frame = smq.frame(bytes((smq.Type.PUBLISH,)) + packet[9:])
        self._restore_value(frame, _stamp_of(packet))

    def _clock(self, packet: bytes) -> None:
        self._heard_us = _stamp_of(packet)
        clock.heard(self._heard_us)

    def _pause(self, packet: bytes) -> None:
        self.member.moving.pauses(self)

    def _paused(self, packet: bytes) -> None:
        self.member.moving.paused(self)

    def _successor(self, packet: bytes) -> None:
        if len(packet) != 3:
            raise ProtocolError(CloseReason.SHORT_PACKET, "a node goes on for another one that it does not name")
        self.member.moving.succeeds(self, int.from_bytes(packet[1:], "big"))

    def _succeed(self, packet: bytes) -> None:
        self.member.moving.succeeded(self)

    def _succeeded(self, packet: bytes) -> None:
        self.hold(False)

    def tell_clock(self, stamp: int) -> None:
        """Say when what follows is published, unless that was said already."""
        if stamp != self._told_us:
            self._told_us = stamp
            self.way.say([bytes((LinkType.CLOCK,)) + stamp.to_bytes(8, "big")])

    # ---- its end

    def forget_all(self, absent: AbsentNode | None) -> Iterator[None]:
        """Forget its clients, and its interest unless what it misses is counted, in portions."""
        self.member.vanished(self.server)
        for phantom in self.phantoms.values():
            self.member.vanished(phantom)
            yield
        for keys in self.member.interest.keys(self.bit) if self.interest else ():
            if absent is not None:
                self.member.lost.takes(absent, keys)
            for key in keys:
                self.member.interest.discard(key, self.bit)
                self.member.forget(key)
            yield
        self.forget_routes()
        yield from self.member.counts.forget(self)


def _stamp_of(packet: bytes) -> int:
    stamp = int.from_bytes(packet[1:9], "big")
    if len(packet) < 9 or stamp >= MAX_VALUE_STAMP:
        raise ProtocolError(CloseReason.SHORT_PACKET, "another node says no time, or one after the end of time")
    return stamp


class NobodyRoute:
    """The route of messages whose last subscriber here has just gone."""

    __slots__ = ("_drop",)

    def __init__(self, drop: Callable[[Drop, int], None]) -> None:
        self._drop = drop

    def deliver(self, run: bytes) -> None:
        """Count the run as dropped."""
        self._drop(Drop.UNROUTED, count_messages(run))

    def deliver_view(self, view: memoryview) -> None:
        """See `deliver`."""
        self.deliver(bytes(view))


class ArrivedRoute:
    """A route to a topic, whose messages are counted where they were published."""

    __slots__ = ("_topic",)

    def __init__(self, topic: Topic) -> None:
        self._topic = topic

    def deliver(self, run: bytes) -> None:
        """Deliver the run."""
        topic = self._topic
        topic.arrived += 1
        topic.arrived_bytes += len(run)
        topic.deliver(run)

    def deliver_view(self, view: memoryview) -> None:
        """See `deliver`."""
        topic = self._topic
        topic.arrived += 1
        topic.arrived_bytes += len(view)
        topic.deliver_view(view)


class OnceRoute(ArrivedRoute):
    """A route to a topic that the server handles once in the cluster: it is to know where the messages come from."""

    __slots__ = ("_node", "_server")

    def __init__(self, server: ServerClient, topic: Topic, node: RemoteNode) -> None:
        super().__init__(topic)
        self._server, self._node = server, node

    def deliver(self, run: bytes) -> None:
        """Deliver the run."""
        before = len(self._server.queue)
        super().deliver(run)
        if len(self._server.queue) > before:
            self._server.queue[-1] = Arrived(run, self._node)

    def deliver_view(self, view: memoryview) -> None:
        """See `deliver`."""
        self.deliver(bytes(view))


class ClockedRoute:
    """A route over which other nodes are told when the messages were published.

    Args:
        route: to them.
        nodes: those that are told.
        stamp: gives the same for all of them, so that no two have one message at different times.
    """

    __slots__ = ("_nodes", "_route", "_stamp", "ways")

    def __init__(self, route: ForwardedRoute, nodes: list[RemoteNode], stamp: Callable[[], int]) -> None:
        self._route, self._nodes, self._stamp, self.ways = route, nodes, stamp, route.ways

    def deliver(self, run: bytes) -> bool | None:
        """Tell the time, then deliver the run."""
        stamp = self._stamp()
        for node in self._nodes:
            node.tell_clock(stamp)
        return self._route.deliver(run)

    def deliver_view(self, view: memoryview) -> bool | None:
        """See `deliver`."""
        return self.deliver(bytes(view))


class SubtopicRoute:
    """A route of messages whose sub-topics have other numbers here."""

    __slots__ = ("_numbers", "_route")

    def __init__(self, route: Route, numbers: dict[bytes, bytes]) -> None:
        self._route, self._numbers = route, numbers

    def deliver(self, run: bytes) -> bool | None:
        """Deliver the run with the numbers of this hub."""
        return self._route.deliver(wire.with_subtopics(run, self._numbers))

    def deliver_view(self, view: memoryview) -> bool | None:
        """See `deliver`."""
        return self.deliver(bytes(view))


HANDLERS: dict[int, Callable[[RemoteNode, bytes], None]] = {
    LinkType.INTEREST: RemoteNode._interest,
    LinkType.NO_INTEREST: RemoteNode._no_interest,
    LinkType.NUMBERED: RemoteNode._numbered,
    LinkType.SUBTOPICS: RemoteNode._subtopics,
    LinkType.PEERS: RemoteNode._peers,
    LinkType.PEERS_GONE: RemoteNode._peers_gone,
    LinkType.SYNCED: RemoteNode._synced,
    LinkType.WATCH: RemoteNode._watch,
    LinkType.UNWATCH: RemoteNode._unwatch,
    LinkType.COUNT: RemoteNode._count,
    LinkType.END: RemoteNode._end,
    LinkType.TOPICS: RemoteNode._topics,
    LinkType.VALUE: RemoteNode._value,
    LinkType.PRESSED: RemoteNode._pressed,
    LinkType.RELEASED: RemoteNode._released,
    LinkType.ONCE: RemoteNode._once,
    LinkType.VALUE_AT: RemoteNode._value_at,
    LinkType.CLOCK: RemoteNode._clock,
    LinkType.PAUSE: RemoteNode._pause,
    LinkType.PAUSED: RemoteNode._paused,
    LinkType.SUCCESSOR: RemoteNode._successor,
    LinkType.SUCCEED: RemoteNode._succeed,
    LinkType.SUCCEEDED: RemoteNode._succeeded,
}
