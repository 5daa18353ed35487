"""Send queue to another node, and the routes that forward messages to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from smqrt.broker.outbox import Drop, Outbox
from smqrt.broker.state import BrokerPeer
from smqrt.broker.topics import Route, Topic, Traffic
from smqrt.wire import smq
from smqrt.wire.cluster_packets import rewritten


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
    def knows_pressure(self) -> bool:
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
