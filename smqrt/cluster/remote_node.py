"""Other nodes of a cluster, from the view of one hub."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from smqrt.auth.identity import ANONYMOUS, Identity, Method
from smqrt.broker.broker import Broker
from smqrt.broker.last_values import LastValueRoute, LastValues, SentValueRoute
from smqrt.broker.mqtt.devices import Devices
from smqrt.broker.mqtt.messages import ArrivedBatch
from smqrt.broker.outbox import Drop, Outbox
from smqrt.broker.routes import HandledRoute
from smqrt.broker.server_client import Arrived, ServerClient
from smqrt.broker.state import BrokerPeer
from smqrt.broker.topics import Route, Topic, Traffic
from smqrt.errors import CloseReason, ProtocolError
from smqrt.wire import cluster_mqtt, smq
from smqrt.wire import cluster_packets as wire
from smqrt.wire.cluster_mqtt import NumberedFrames
from smqrt.wire.cluster_packets import Announced, Key, LinkType, rewritten
from smqrt.wire.smq import server_of

if TYPE_CHECKING:
    from smqrt.cluster.mqtt_streams import MessageStream

# ---- Send queue to another node, and forwarding routes


class NodeSendQueue(Outbox):
    """The send queue to another node, in the order of `put`; each engine has a subclass.

    The hub does not check limits. An engine drops messages when its queue is full, and later ends the link.

    Attributes:
        on_full: called when the queue is so full that publishers should wait.
        holds: whether batches stay here because the link is full; see `release`.
        keeps: whether batches stay here because the hub of the node migrates to another process; see `keep`.
        missed: whether messages were dropped since this was last reset.
    """

    __slots__ = ("holds", "keeps", "missed", "on_full")

    def __init__(self) -> None:
        super().__init__()
        self.on_full: Callable[[], object] = lambda: None
        self.missed = self.holds = self.keeps = False

    @property
    def knows_backpressure(self) -> bool:
        """Whether the node supports the packets from `LinkType.PRESSED` on."""
        return False

    @property
    def knows_succession(self) -> bool:
        """Whether the node supports the packets from `LinkType.PAUSE` on."""
        return False

    @property
    def knows_stamps(self) -> bool:
        """Whether the node supports `LinkType.VALUE_AT` and `LinkType.CLOCK`."""
        return True

    @property
    def version(self) -> int:
        """The version of the link protocol that both nodes use."""
        return 1

    @property
    def epoch(self) -> int:
        """When the node started, ns since 1970 by its clock."""
        return 0

    @property
    def node_id(self) -> bytes:
        """The id of the node; empty for engines without node ids."""
        return b""

    @property
    def process(self) -> tuple[bytes, int] | None:
        """The id of the node's server and its process number there; None while unknown. They survive a restart."""
        return None

    @property
    def place(self) -> tuple[str, int] | None:
        """Host and port at which the node accepts links; None while unknown. They often survive a restart."""
        return None

    @property
    def has_left(self) -> bool:
        """Whether the node has announced that it leaves. An unreachable node that has not is lost."""
        return False

    @property
    def is_quiet(self) -> bool:
        """Whether the node does not answer, and may be lost."""
        return False

    @property
    def is_behind(self) -> bool:
        """Whether the node is so far behind that snapshots should pause; see `wait`."""
        return False

    def wait(self, then: Callable[[], object]) -> None:
        """Call `then` when the node has caught up; it is not called if the node is lost first."""

    def release(self) -> None:
        """Stop holding, and pass on the queue."""
        self.holds = False

    def keep(self) -> None:
        """Pass on the queue, then keep all later batches here."""
        self.flush()
        self.keeps = True

    def send(self, packets: Iterable[bytes]) -> None:
        """Queue control packets."""
        for packet in packets:
            self.put(smq.frame(packet))

    def end(self, reason: Drop, count: Callable[[Drop, int], None]) -> None:
        """Count queued messages as lost, and those that stale routes put later."""
        waiting, self.queue = self.queue, DiscardingQueue(reason, count)
        for batch in waiting:
            self.queue.append(batch)


class DiscardingQueue(list[bytes]):
    """The queue of a lost node: it counts messages and discards them."""

    def __init__(self, reason: Drop, count: Callable[[Drop, int], None]) -> None:
        self._reason, self._count = reason, count

    def append(self, batch: bytes) -> None:
        """Count the messages of a batch."""
        if messages := count_messages(batch):
            self._count(self._reason, messages)


MESSAGES = frozenset((smq.Type.PUBLISH, LinkType.MESSAGES, LinkType.PART, LinkType.RETAINED))
"""The types of packets that may be dropped when a queue is full; others are control packets. Retained messages are sent
again then.
"""


def may_drop(batch: bytes) -> bool:
    """Return whether a full queue may drop a batch."""
    return batch[2] in MESSAGES and type(batch) is not NumberedFrames


def count_messages(frames: bytes) -> int:
    """Return the number of messages among whole frames."""
    start, end, count = 0, len(frames), 0
    while start < end:
        if frames[start + 2] == smq.Type.PUBLISH:
            count += 1
        elif frames[start + 2] == LinkType.MESSAGES:
            count += frames[start + 3] << 8 | frames[start + 4]
        start += frames[start] << 8 | frames[start + 1]
    return count


class PacedRoute:
    """A route over links; the publisher waits while one of them is full.

    The batch is delivered even then, so that it does not delay other publishers.

    Args:
        route: delivers here and over the links.
        queues: the send queues of the route.
        peer: the publisher.
        full: the full send queues, with the publishers that wait for them.
    """

    __slots__ = ("_deliver", "_deliver_view", "_full", "_peer", "_queues")

    def __init__(
        self,
        route: Route,
        queues: tuple[NodeSendQueue, ...],
        peer: BrokerPeer,
        full: dict[NodeSendQueue, list[BrokerPeer]],
    ) -> None:
        self._deliver, self._deliver_view = route.deliver, route.deliver_view
        self._queues, self._peer, self._full = queues, peer, full

    def deliver(self, batch: bytes) -> bool | None:
        """Deliver the batch; return true when the publisher has to wait."""
        return self._deliver(batch) or (bool(self._full) and self._waits())

    def deliver_view(self, view: memoryview) -> bool | None:
        """See `deliver`."""
        return self._deliver_view(view) or (bool(self._full) and self._waits())

    def _waits(self) -> bool:
        for queue in self._queues:
            waiting = self._full.get(queue)
            if waiting is not None:
                waiting.append(self._peer)
                return True
        return False


class ForwardedRoute:
    """A route to other nodes, and to the subscribers of this hub, if there are any.

    Args:
        route: the route to the subscribers of this hub; None for none.
        puts: the functions that forward a batch to the nodes.
        queues: the send queues to these nodes.
        topic: the topic, to count messages when `route` is None; None when this hub does not have its name.
        traffic: counts messages without a known topic.
    """

    __slots__ = ("_puts", "_route", "queues")

    def __init__(
        self,
        route: Route | None,
        puts: Iterable[Callable[[bytes], object]],
        queues: Iterable[NodeSendQueue],
        topic: Topic | None,
        traffic: Traffic,
    ) -> None:
        self._puts, self.queues = tuple(puts), tuple(queues)
        self._route = route or CountingRoute(topic, traffic)

    def deliver(self, batch: bytes) -> bool | None:
        """Deliver the batch here, then forward it."""
        waits = self._route.deliver(batch)
        for put in self._puts:
            put(batch)
        return waits

    def deliver_view(self, view: memoryview) -> bool | None:
        """See `deliver`. Links keep batches until they are acknowledged, so they share a copy of the view."""
        batch = bytes(view)
        waits = self._route.deliver_view(view)
        for put in self._puts:
            put(batch)
        return waits


class CountingRoute:
    """The local part of a route to other nodes when no subscriber is here: it counts messages."""

    __slots__ = ("_topic", "_traffic")

    def __init__(self, topic: Topic | None, traffic: Traffic) -> None:
        self._topic, self._traffic = topic, traffic

    def deliver(self, batch: bytes | memoryview) -> None:
        """Count the batch; for a known topic only its first message, since the session has counted the others."""
        topic = self._topic
        if topic is None:
            self._traffic.add(smq.count_frames(batch), len(batch), 0)
        else:
            topic.messages += 1
            topic.bytes += len(batch)

    def deliver_view(self, view: memoryview) -> None:
        """See `deliver`."""
        self.deliver(view)


class RenumberedRoute:
    """A route that replaces the destination of messages.

    Args:
        route: delivers the messages.
        tid: the new destination.
    """

    __slots__ = ("_route", "_tid")

    def __init__(self, route: Route, tid: int) -> None:
        self._route, self._tid = route, tid

    def deliver(self, batch: bytes) -> bool | None:
        """Deliver the batch with the new destination."""
        return self._route.deliver(rewritten(batch, self._tid, int.from_bytes(batch[smq.PTID], "big")))

    def deliver_view(self, view: memoryview) -> bool | None:
        """See `deliver`."""
        return self.deliver(bytes(view))


MAX_ROUTES = 1 << 16
"""The maximum number of entries of a node's route cache."""
MAX_KEPT_BYTES = 1 << 30
"""The maximum memory that one hub uses for another node: three million clients."""
MAX_PRESSING = 1 << 16
"""The maximum number of topics whose publishers wait for one node."""
TOPIC_BYTES, _CLIENT_BYTES = 160, 600
"""The approximate memory for a topic and for a client of another node."""
SERVER_UID = b"SMQ server client"


class Phantom:
    """A client of another node, as passed to hooks and returned by `etid2peer`.

    Attributes:
        node: the node to which it is connected.
        stamp: when it connected, in ms; see `Announced`.
        older: the next older client of the same uid, until its node has closed it.
        newer: the next newer client of the same uid.
    """

    __slots__ = ("etid", "extra", "identity", "info", "newer", "node", "older", "pending", "stamp", "uid")
    topic_ids: Collection[int] = ()

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
        """The key by which all nodes find the newest client of a uid."""
        return self.stamp, self.node.number

    @property
    def size_bytes(self) -> int:
        """The approximate memory that it uses at this hub."""
        return _CLIENT_BYTES + len(self.uid) + len(self.info)

    @property
    def outbox(self) -> Outbox:
        """The send queue to its node."""
        return self.node.send_queue


class RemoteNode:
    """A reachable node of the cluster.

    Args:
        broker: the hub of this node.
        foreign: the topics of clients of other nodes, by ETID.
        number: the node's number.
        bit: the node's bit in sets of nodes.
        send_queue: the send queue to the node.
        on_packet: processes a control packet of the node; raises ProtocolError.

    Attributes:
        control: processes a control packet; raises ProtocolError when it is too short, or its type is unknown.
        routes: the routes of its messages, by the four bytes of their destination.
        numbers: the numbers of topics there that differ from those that the names give.
        subtopics: the numbers of sub-topics here by their numbers there, where these differ.
        phantoms: its clients, by ETID.
        interest: the number of its topics with subscribers.
        synced: whether its snapshot has arrived.
        gone: whether it was removed: its routes are stale.
        kept_bytes: the memory that this hub uses for it, about.
        watched: topics whose numbers of subscribers are sent to it.
        pressing: topics whose publishers have to wait for its clients, and since when.
        timed: topics of `pressing` that a timer checks later.
        once: topics that its server handles once in the cluster, with the number to which these messages are sent.
        renumbered: topics with last values that have another number here, by the number there. Values may arrive before
            the node has received the number here.
        stamped: keys of topics for whose messages it sends the time.
        valued: topics whose names were sent to it, so that it can keep their last values.
        heard_us, sent_us: the newest message time received from it, and the newest sent to it.
        predecessor: the node whose clients it takes over, while messages for that node are kept; see `HubMigration`.
        is_held: whether its messages only become last values, since they are for the predecessor of this hub.
        has_mqtt: whether its hub has MQTT clients.
        filters: what it wants, by filter; see `smqrt.wire.cluster_mqtt.Wanted`.
        is_wide: whether it has too many filters, and gets all messages.
        parts: the beginning of a packet that comes in parts.
        identity: names the sessions of MQTT clients at the node; empty before Greeting, and for older releases.
        stream: the messages with QoS 1 and 2 to the node; None without numbers.
    """

    def __init__(
        self,
        broker: Broker,
        foreign: Mapping[int, object],
        number: int,
        bit: int,
        send_queue: NodeSendQueue,
        on_packet: Callable[[RemoteNode, bytes], None],
    ) -> None:
        self._broker, self._foreign = broker, foreign
        self.number, self.bit, self.send_queue = number, bit, send_queue
        self.control: Callable[[bytes], None] = partial(on_packet, self)
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
        self.heard_us = self.sent_us = 0
        self.predecessor: RemoteNode | None = None
        self.is_held = self.has_mqtt = self.is_wide = False
        self.filters: dict[str, int] = {}
        self.parts = bytearray()
        self.identity = b""
        self.stream: MessageStream | None = None
        self.server = Phantom(self, Announced(server_of(number), 0, SERVER_UID, b"", b""))

    # ---- routes of its messages

    def resolve(self, destination: bytes) -> Route:
        """Return the route of messages to `destination`, a number in four bytes, and cache it."""
        table = self._broker.topic_table
        topic = table.at(destination) or self.renumbered.get(destination)
        if topic is not None and topic.id in self._foreign:
            topic = None  # messages from one link are not forwarded over another
        tid = int.from_bytes(destination, "big")
        if self.is_held:
            held, values = UnroutedRoute(lambda reason, messages: None), self._broker.last_values
            if topic is None or values is None or not values.selects(topic):
                return held
            return self._translated(self._to_values(topic, values, held), topic, tid)
        route = self._route(topic, tid)
        if topic is not None and topic.key == destination:
            if len(self.routes) >= MAX_ROUTES:
                self.forget_routes()
            if topic.cached is None:
                topic.cached = set()
            topic.cached.add(self)
            self.routes[topic.key] = route
        return route

    def hold(self, is_held: bool) -> None:
        """Deliver its messages to no client from now on, or deliver them again."""
        if is_held != self.is_held:
            self.is_held = is_held
            self.forget_routes()

    def _route(self, topic: Topic | None, tid: int) -> Route:
        broker = self._broker
        route: Route = UnroutedRoute(broker.stats.drop)
        if topic is None:
            return route
        topic.settle()
        if topic.raw or topic.ws:
            route = OnceRoute(broker.server, topic, self) if topic.id in broker.server.once else ArrivedRoute(topic)
            if broker.devices is not None and self.send_queue.version >= cluster_mqtt.VERSION:
                route = SharedRoute(route, topic, broker.devices)
        values = broker.last_values
        if values is not None and values.selects(topic):
            route = self._to_values(topic, values, route)
        server = broker.server
        if topic is server.topic or topic.id in server.topics or server.is_inbox(topic.id):
            route = HandledRoute(broker.server, route, self.server)
        return self._translated(route, topic, tid)

    def _to_values(self, topic: Topic, values: LastValues, route: Route) -> Route:
        if topic.key in self.stamped:
            return SentValueRoute(values.of(topic), route, lambda: self.heard_us)
        return LastValueRoute(values.of(topic), route, None)

    def _translated(self, route: Route, topic: Topic, tid: int) -> Route:
        if topic.id != tid:
            route = RenumberedRoute(route, topic.id)
        return SubtopicRoute(route, self.subtopics) if self.subtopics else route

    def forget_route(self, destination: bytes) -> None:
        """See `RouteCache`."""
        self.routes.pop(destination, None)

    def forget_routes(self) -> None:
        """Empty the route cache."""
        by_key = self._broker.topic_table.by_key
        for key in self.routes:
            topic = by_key.get(key)
            if topic and topic.cached:
                topic.cached.discard(self)
        self.routes.clear()

    def count_batch(self, destination: bytes, more: int) -> None:
        """Count `more` messages of a batch, which is delivered next."""
        topic = self._broker.topic_table.by_key.get(destination)
        if topic is not None and (topic.raw or topic.ws):
            topic.messages += more  # `ArrivedRoute` counts the first message of a batch
            topic.for_nodes().arrived += more

    # ---- control packets

    def grow(self, size_bytes: int) -> None:
        """Account for memory that the node causes here. Raises ProtocolError above `MAX_KEPT_BYTES`."""
        self.kept_bytes += size_bytes
        if self.kept_bytes > MAX_KEPT_BYTES:
            raise ProtocolError(
                CloseReason.UNKNOWN_PACKET, f"a node announces more than {MAX_KEPT_BYTES >> 20} MiB for one hub"
            )

    def send_clock(self, stamp: int) -> None:
        """Send the time of the following messages, unless it is the last one sent."""
        if stamp != self.sent_us:
            self.sent_us = stamp
            self.send_queue.send([bytes((LinkType.CLOCK,)) + stamp.to_bytes(8, "big")])


class UnroutedRoute:
    """Counts messages without a subscriber: the last one has left, and the other node has not processed that yet."""

    __slots__ = ("_drop",)

    def __init__(self, drop: Callable[[Drop, int], None]) -> None:
        self._drop = drop

    def deliver(self, batch: bytes) -> None:
        """Count the batch as dropped."""
        self._drop(Drop.UNROUTED, count_messages(batch))

    def deliver_view(self, view: memoryview) -> None:
        """See `deliver`."""
        self.deliver(bytes(view))


class ArrivedRoute:
    """A route to a topic; its messages count as arrived here, and as published at the node of the publisher."""

    __slots__ = ("_nodes", "_topic")

    def __init__(self, topic: Topic) -> None:
        self._topic, self._nodes = topic, topic.for_nodes()

    def deliver(self, batch: bytes) -> None:
        """Deliver the batch."""
        topic, nodes = self._topic, self._nodes
        nodes.arrived += 1
        nodes.arrived_bytes += len(batch)
        topic.deliver(batch)

    def deliver_view(self, view: memoryview) -> None:
        """See `deliver`."""
        topic, nodes = self._topic, self._nodes
        nodes.arrived += 1
        nodes.arrived_bytes += len(view)
        topic.deliver_view(view)


class OnceRoute(ArrivedRoute):
    """A route to a topic that one server of the cluster handles: it records the node of the publisher."""

    __slots__ = ("_node", "_server")

    def __init__(self, server: ServerClient, topic: Topic, node: RemoteNode) -> None:
        super().__init__(topic)
        self._server, self._node = server, node

    def deliver(self, batch: bytes) -> None:
        """Deliver the batch."""
        before = len(self._server.queue)
        super().deliver(batch)
        # If the server subscribes, the batch is now the last one in its queue.
        if len(self._server.queue) > before:
            self._server.queue[-1] = Arrived(batch, self._node)

    def deliver_view(self, view: memoryview) -> None:
        """See `deliver`."""
        self.deliver(bytes(view))


class SharedRoute:
    """A route to a topic that MQTT clients may have shared subscriptions of: the node of the publisher chooses these.

    Args:
        route: the route.
        topic: the topic.
        devices: the MQTT clients of this hub.
    """

    __slots__ = ("_devices", "_route", "_topic")

    def __init__(self, route: Route, topic: Topic, devices: Devices) -> None:
        self._route, self._topic, self._devices = route, topic, devices

    def deliver(self, batch: bytes) -> bool | None:
        """Deliver the batch."""
        waits = self._route.deliver(batch)
        queue = self._devices.queue
        # If the MQTT clients subscribe, the batch is now the last one in their queue.
        if (
            queue
            and queue[-1] is batch
            and not isinstance(batch, ArrivedBatch)
            and self._devices.has_groups(self._topic)
        ):
            queue[-1] = ArrivedBatch.of(batch)
        return waits

    def deliver_view(self, view: memoryview) -> bool | None:
        """See `deliver`."""
        return self.deliver(bytes(view))


class ClockedRoute:
    """A route that sends the time of the messages to nodes before the messages.

    Args:
        route: the route to these nodes and others.
        nodes: the nodes that need the time.
        stamp: returns the time. It is called once, so that a message has the same time at all nodes.
    """

    __slots__ = ("_nodes", "_route", "_stamp", "queues")

    def __init__(self, route: ForwardedRoute, nodes: list[RemoteNode], stamp: Callable[[], int]) -> None:
        self._route, self._nodes, self._stamp, self.queues = route, nodes, stamp, route.queues

    def deliver(self, batch: bytes) -> bool | None:
        """Send the time, then deliver the batch."""
        stamp = self._stamp()
        for node in self._nodes:
            node.send_clock(stamp)
        return self._route.deliver(batch)

    def deliver_view(self, view: memoryview) -> bool | None:
        """See `deliver`."""
        return self.deliver(bytes(view))


class SubtopicRoute:
    """A route that replaces the numbers of sub-topics by those of this hub."""

    __slots__ = ("_numbers", "_route")

    def __init__(self, route: Route, numbers: dict[bytes, bytes]) -> None:
        self._route, self._numbers = route, numbers

    def deliver(self, batch: bytes) -> bool | None:
        """Deliver the batch with these numbers."""
        return self._route.deliver(wire.with_subtopics(batch, self._numbers))

    def deliver_view(self, view: memoryview) -> bool | None:
        """See `deliver`."""
        return self.deliver(bytes(view))
