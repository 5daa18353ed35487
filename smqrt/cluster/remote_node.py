"""Another node of a cluster, as one hub sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from smqrt.auth.identity import ANONYMOUS, Identity, Method
from smqrt.broker.broker import Broker
from smqrt.broker.last_values import LastValueRoute, LastValues, SentValueRoute
from smqrt.broker.outbox import Drop, Outbox
from smqrt.broker.routes import HandledRoute
from smqrt.broker.server_client import Arrived, ServerClient
from smqrt.broker.state import BrokerPeer
from smqrt.broker.topics import Route, Topic, Traffic
from smqrt.errors import CloseReason, ProtocolError
from smqrt.wire import cluster_packets as wire
from smqrt.wire import smq
from smqrt.wire.cluster_packets import Announced, Key, LinkType, rewritten
from smqrt.wire.smq import server_of

# ---- Send queue to another node, and forwarding routes


class NodeSendQueue(Outbox):
    """The send queue to another node; each engine has a kind of its own. It keeps the order of what is put.

    It accepts everything from the hub: an engine whose queue is over its limit drops messages, and in the end the link.

    Attributes:
        on_full: called when so much is queued that publishers should wait.
        holds: whether runs stay here because the link is full; see `release`.
        keeps: whether runs stay here because the node's hub migrates to another process; see `keep`.
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
    def epoch(self) -> int:
        """When the node started, ns since 1970 by its clock."""
        return 0

    @property
    def node_id(self) -> bytes:
        """The node's id; empty where nodes have none."""
        return b""

    @property
    def process(self) -> tuple[bytes, int] | None:
        """The id of the node's server and its process number there, once known: the same after a restart."""
        return None

    @property
    def place(self) -> tuple[str, int] | None:
        """Host and port at which the node accepts links, once known: often the same after a restart."""
        return None

    @property
    def has_left(self) -> bool:
        """Whether the node has announced that it leaves; otherwise it is lost."""
        return False

    @property
    def is_behind(self) -> bool:
        """Whether the node is so far behind that snapshots should pause; see `wait`."""
        return False

    def wait(self, then: Callable[[], object]) -> None:
        """Call `then` when the node has processed more; never when it is lost before."""

    def release(self) -> None:
        """Pass on what `holds` has kept here."""
        self.holds = False

    def keep(self) -> None:
        """Keep what is put from now on here."""
        self.flush()
        self.keeps = True

    def send(self, packets: Iterable[bytes]) -> None:
        """Put control packets."""
        for packet in packets:
            self.put(smq.frame(packet))

    def end(self, reason: Drop, count: Callable[[Drop, int], None]) -> None:
        """Count what is queued as lost, and what stale routes put later."""
        waiting, self.queue = self.queue, DiscardingQueue(reason, count)
        for run in waiting:
            self.queue.append(run)


class DiscardingQueue(list[bytes]):
    """The queue of a lost node: it counts messages and keeps nothing."""

    def __init__(self, reason: Drop, count: Callable[[Drop, int], None]) -> None:
        self._reason, self._count = reason, count

    def append(self, run: bytes) -> None:
        """Count the messages of `run`."""
        if messages := count_messages(run):
            self._count(self._reason, messages)


def count_messages(frames: bytes) -> int:
    """Return the number of Publish frames among whole frames."""
    start, end, count = 0, len(frames), 0
    while start < end:
        count += frames[start + 2] == smq.Type.PUBLISH
        start += frames[start] << 8 | frames[start + 1]
    return count


class PacedRoute:
    """A route over links on which the publisher waits while one of them is full.

    What the publisher has sent by then is delivered, so that no other publisher waits for that link.

    Args:
        route: delivers, also over the links.
        queues: to the nodes that the route leads to.
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

    def deliver(self, run: bytes) -> bool | None:
        """Deliver the run; return true when the publisher has to wait."""
        return self._deliver(run) or (bool(self._full) and self._waits())

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
    """A route to subscribers here, if there are any, and to other nodes.

    Args:
        route: to the subscribers here; None for none.
        puts: one function for each node, which takes a run.
        queues: the send queues to these nodes.
        topic: of the messages, to count them when `route` is None; None when this hub does not have its name.
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

    def deliver(self, run: bytes) -> bool | None:
        """Deliver the run here, then forward it."""
        waits = self._route.deliver(run)
        for put in self._puts:
            put(run)
        return waits

    def deliver_view(self, view: memoryview) -> bool | None:
        """See `deliver`. Links keep what they send until it is acknowledged, so they need a copy: one for all."""
        run = bytes(view)
        waits = self._route.deliver_view(view)
        for put in self._puts:
            put(run)
        return waits


class CountingRoute:
    """Counts messages that only other nodes receive."""

    __slots__ = ("_topic", "_traffic")

    def __init__(self, topic: Topic | None, traffic: Traffic) -> None:
        self._topic, self._traffic = topic, traffic

    def deliver(self, run: bytes | memoryview) -> None:
        """Count the run; of a known topic only the first message, since the session has counted the others."""
        topic = self._topic
        if topic is None:
            self._traffic.add(smq.count_frames(run), len(run), 0)
        else:
            topic.messages += 1
            topic.bytes += len(run)

    def deliver_view(self, view: memoryview) -> None:
        """See `deliver`."""
        self.deliver(view)


class RenumberedRoute:
    """A route that gives messages another destination.

    Args:
        route: delivers them.
        tid: the new destination.
    """

    __slots__ = ("_route", "_tid")

    def __init__(self, route: Route, tid: int) -> None:
        self._route, self._tid = route, tid

    def deliver(self, run: bytes) -> bool | None:
        """Deliver the run to the other number."""
        return self._route.deliver(rewritten(run, self._tid, int.from_bytes(run[7:11], "big")))

    def deliver_view(self, view: memoryview) -> bool | None:
        """See `deliver`."""
        return self.deliver(bytes(view))


MAX_ROUTES = 1 << 16
"""Entries of a node's route cache."""
MAX_KEPT_BYTES = 1 << 30
"""What one hub keeps of another node: three million clients."""
MAX_PRESSING = 1 << 16
"""Topics whose publishers wait for one node."""
TOPIC_BYTES, _CLIENT_BYTES = 160, 600
"""What a topic and a client of another node take here, about."""
SERVER_UID = b"SMQ server client"


class Phantom:
    """A client of another node, as hooks and `etid2peer` see it.

    Attributes:
        node: the node that it is connected to.
        stamp: when it connected, in ms; see `Announced`.
        older: the client of the same uid that it has taken over from, until that is gone.
        newer: the client that has taken over from this one.
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
        """The memory that it takes here, about."""
        return _CLIENT_BYTES + len(self.uid) + len(self.info)

    @property
    def outbox(self) -> Outbox:
        """The send queue to its node."""
        return self.node.send_queue


class RemoteNode:
    """A reachable node of the cluster.

    Args:
        broker: the hub here.
        foreign: by ETID, the topics of clients of other nodes.
        number: the node's number.
        bit: the node's bit in sets of nodes.
        send_queue: to the node.
        on_packet: processes a control packet of the node; raises ProtocolError.

    Attributes:
        control: processes a control packet; raises ProtocolError when it is too short, or its type is unknown.
        routes: of its messages, by the four bytes of their destination.
        numbers: topics that have another number there than their names give.
        subtopics: by the number of a sub-topic there, its number here where that differs.
        phantoms: its clients, by ETID.
        interest: how many topics it wants.
        synced: whether its snapshot has arrived.
        gone: whether it is lost.
        kept_bytes: what this hub keeps of it.
        watched: topics whose number of subscribers it is sent.
        pressing: topics whose publishers have to wait for its clients, and since when.
        timed: those of them that a timer checks later.
        once: topics that its server handles once in the cluster, with the number that takes these messages.
        renumbered: topics with last values that have another number here, by the number there: values may arrive before
            the node has received the number here.
        stamped: topics, by their keys here, of whose messages it sends the time.
        valued: topics whose names it was sent, so that it can keep their last values.
        heard_us, sent_us: the newest time of messages that it has sent, and that it was sent.
        predecessor: the node whose successor it is, while messages for that are kept; see `HubMigration`.
        is_held: whether its messages only become last values: they are for the process whose successor this one is.
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
        self.is_held = False
        self.server = Phantom(self, Announced(server_of(number), 0, SERVER_UID, b"", b""))

    # ---- routes of its messages

    def resolve(self, destination: bytes) -> Route:
        """Return the route of messages to `destination`, a number in four bytes, and cache it."""
        table = self._broker.topic_table
        topic = table.at(destination) or self.renumbered.get(destination)
        if topic is not None and topic.id in self._foreign:
            topic = None  # what arrives over one link is not forwarded over another
        tid = int.from_bytes(destination, "big")
        if self.is_held:
            return self._held_route(topic, tid)
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

    def _held_route(self, topic: Topic | None, tid: int) -> Route:
        route, values = UnroutedRoute(lambda reason, messages: None), self._broker.last_values
        if topic is None or values is None or not values.selects(topic):
            return route
        return self._translated(self._to_values(topic, values, route), topic, tid)

    def _route(self, topic: Topic | None, tid: int) -> Route:
        broker = self._broker
        route: Route = UnroutedRoute(broker.stats.drop)
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
        """Count `more` messages of one run, which is delivered next."""
        topic = self._broker.topic_table.by_key.get(destination)
        if topic is not None and (topic.raw or topic.ws):
            topic.messages += more  # `ArrivedRoute` counts the first message of a run
            topic.arrived += more

    # ---- control packets

    def grow(self, size_bytes: int) -> None:
        """Account for what this hub keeps of the node. Raises ProtocolError when that is more than allowed."""
        self.kept_bytes += size_bytes
        if self.kept_bytes > MAX_KEPT_BYTES:
            raise ProtocolError(
                CloseReason.UNKNOWN_PACKET, f"a node announces more than {MAX_KEPT_BYTES >> 20} MiB for one hub"
            )

    def send_clock(self, stamp: int) -> None:
        """Send when the following messages were published, unless that was the last time sent."""
        if stamp != self.sent_us:
            self.sent_us = stamp
            self.send_queue.send([bytes((LinkType.CLOCK,)) + stamp.to_bytes(8, "big")])


class UnroutedRoute:
    """Counts messages whose last subscriber here has just gone."""

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
    """A route to a topic. Its messages count as published at the node of the publisher."""

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
    """A route to a topic that the server handles once in the cluster: it adds the node of the publisher."""

    __slots__ = ("_node", "_server")

    def __init__(self, server: ServerClient, topic: Topic, node: RemoteNode) -> None:
        super().__init__(topic)
        self._server, self._node = server, node

    def deliver(self, run: bytes) -> None:
        """Deliver the run."""
        before = len(self._server.queue)
        super().deliver(run)
        # If the server subscribes, the run is now the last one in its queue.
        if len(self._server.queue) > before:
            self._server.queue[-1] = Arrived(run, self._node)

    def deliver_view(self, view: memoryview) -> None:
        """See `deliver`."""
        self.deliver(bytes(view))


class ClockedRoute:
    """A route that sends other nodes the time of the messages.

    Args:
        route: to these nodes and others.
        nodes: the nodes that are sent the time.
        stamp: gives one time for all nodes, so that a message has the same time everywhere.
    """

    __slots__ = ("_nodes", "_route", "_stamp", "queues")

    def __init__(self, route: ForwardedRoute, nodes: list[RemoteNode], stamp: Callable[[], int]) -> None:
        self._route, self._nodes, self._stamp, self.queues = route, nodes, stamp, route.queues

    def deliver(self, run: bytes) -> bool | None:
        """Send the time, then deliver the run."""
        stamp = self._stamp()
        for node in self._nodes:
            node.send_clock(stamp)
        return self._route.deliver(run)

    def deliver_view(self, view: memoryview) -> bool | None:
        """See `deliver`."""
        return self.deliver(bytes(view))


class SubtopicRoute:
    """A route that gives sub-topics their numbers of this hub."""

    __slots__ = ("_numbers", "_route")

    def __init__(self, route: Route, numbers: dict[bytes, bytes]) -> None:
        self._route, self._numbers = route, numbers

    def deliver(self, run: bytes) -> bool | None:
        """Deliver the run with these numbers."""
        return self._route.deliver(wire.with_subtopics(run, self._numbers))

    def deliver_view(self, view: memoryview) -> bool | None:
        """See `deliver`."""
        return self.deliver(bytes(view))
