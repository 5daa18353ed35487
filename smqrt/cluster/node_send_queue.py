"""The way from a hub to another node, and where messages go that would have taken a lost one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from smqrt.broker.outbox import Drop, Outbox
from smqrt.broker.state import BrokerPeer
from smqrt.broker.topics import Route, Topic, Traffic
from smqrt.wire import smq
from smqrt.wire.cluster_packets import rewritten


class NodeSendQueue(Outbox):
    """The outbox of another node; each engine has its own kind. It keeps the order of what is put.

    It never refuses a hub: an engine whose queue is over its limit leaves messages out, and in the end loses the node.

    Attributes:
        on_full: called when so much waits that publishers should wait.
        holds: whether what is put waits here, since the engine's queue is full; see `go_on`.
        keeps: whether what is put waits here, since the node's hub moves to another process; see `keep`.
        missed: whether messages were left out since that was looked at.
    """

    __slots__ = ("holds", "keeps", "missed", "on_full")

    def __init__(self) -> None:
        super().__init__()
        self.on_full: Callable[[], object] = lambda: None
        self.missed = self.holds = self.keeps = False

    @property
    def knows_pressure(self) -> bool:
        """Whether the node knows the packets from `LinkType.PRESSED` on."""
        return False

    @property
    def knows_succession(self) -> bool:
        """Whether the node knows the packets from `LinkType.PAUSE` on."""
        return False

    @property
    def epoch(self) -> int:
        """When the node started, ns since 1970 by its clock."""
        return 0

    @property
    def node_id(self) -> bytes:
        """Of the node; empty where nodes have none."""
        return b""

    @property
    def process(self) -> tuple[bytes, int] | None:
        """The node's server, and which of its processes it is, as far as it has said so: the same after its restart."""
        return None

    @property
    def place(self) -> tuple[str, int] | None:
        """Host and port at which the node takes links, as far as that is known: often the same after its restart."""
        return None

    @property
    def has_left(self) -> bool:
        """Whether the node has said that it goes; else it is lost."""
        return False

    @property
    def tells_stamps(self) -> bool:
        """Whether the other node knows `LinkType.VALUE_AT` and `LinkType.CLOCK`."""
        return True

    @property
    def is_behind(self) -> bool:
        """Whether what can wait should; see `wait`."""
        return False

    def wait(self, then: Callable[[], object]) -> None:
        """Call `then` when the node has worked off more; not when it is lost before."""

    def go_on(self) -> None:
        """Hold back no more."""
        self.holds = False

    def keep(self) -> None:
        """Let what is put from now on wait here."""
        self.flush()
        self.keeps = True

    def say(self, packets: Iterable[bytes]) -> None:
        """Send control packets."""
        for packet in packets:
            self.put(smq.frame(packet))

    def end(self, reason: Drop, count: Callable[[Drop, int], None]) -> None:
        """The node is lost: what waits, and what comes from routes that do not know it yet, is counted."""
        waiting, self.queue = self.queue, Lost(reason, count)
        for run in waiting:
            self.queue.append(run)


class Lost(list[bytes]):
    """The queue of a lost node: it keeps nothing and counts the messages that come."""

    def __init__(self, reason: Drop, count: Callable[[Drop, int], None]) -> None:
        self._reason, self._count = reason, count

    def append(self, run: bytes) -> None:
        """Count the messages of `run`."""
        if messages := count_messages(run):
            self._count(self._reason, messages)


def count_messages(frames: bytes) -> int:
    """How many Publish frames there are among whole frames."""
    start, end, count = 0, len(frames), 0
    while start < end:
        count += frames[start + 2] == smq.Type.PUBLISH
        start += frames[start] << 8 | frames[start + 1]
    return count


class PacedRoute:
    """A route over links: its publisher waits while one of them is full. What it has sent by then is delivered, so that
    nobody else waits for that link.

    Args:
        route: with what lies over the links.
        ways: over which it leads.
        peer: who publishes.
        full: the ways that are full, with those who wait for them.
    """

    __slots__ = ("_deliver", "_deliver_view", "_full", "_peer", "_ways")

    def __init__(
        self,
        route: Route,
        ways: tuple[NodeSendQueue, ...],
        peer: BrokerPeer,
        full: dict[NodeSendQueue, list[BrokerPeer]],
    ) -> None:
        self._deliver, self._deliver_view = route.deliver, route.deliver_view
        self._ways, self._peer, self._full = ways, peer, full

    def deliver(self, run: bytes) -> bool | None:
        """Deliver the run; true when the publisher has to wait."""
        return self._deliver(run) or (bool(self._full) and self._waits())

    def deliver_view(self, view: memoryview) -> bool | None:
        """See `deliver`."""
        return self._deliver_view(view) or (bool(self._full) and self._waits())

    def _waits(self) -> bool:
        for way in self._ways:
            waiting = self._full.get(way)
            if waiting is not None:
                waiting.append(self._peer)
                return True
        return False


class ForwardedRoute:
    """A route to subscribers here, if there are any, and to other nodes.

    Args:
        route: to those here.
        puts: takes a run, one for each node.
        ways: to these nodes.
        topic: of the messages, where no route counts them; None when its name is not known here.
    """

    __slots__ = ("_puts", "_route", "ways")

    def __init__(
        self,
        route: Route | None,
        puts: Iterable[Callable[[bytes], object]],
        ways: Iterable[NodeSendQueue],
        topic: Topic | None,
        traffic: Traffic,
    ) -> None:
        self._puts, self.ways = tuple(puts), tuple(ways)
        self._route = route or CountingRoute(topic, traffic)

    def deliver(self, run: bytes) -> bool | None:
        """Deliver the run here, then forward it."""
        waits = self._route.deliver(run)
        for put in self._puts:
            put(run)
        return waits

    def deliver_view(self, view: memoryview) -> bool | None:
        """See `deliver`; the links keep what they send until it has arrived, so that one copy is made."""
        run = bytes(view)
        waits = self._route.deliver_view(view)
        for put in self._puts:
            put(run)
        return waits


class CountingRoute:
    """A route to nobody here, of messages that other nodes get."""

    __slots__ = ("_topic", "_traffic")

    def __init__(self, topic: Topic | None, traffic: Traffic) -> None:
        self._topic, self._traffic = topic, traffic

    def deliver(self, run: bytes | memoryview) -> None:
        """Count the run: its first message, since the publisher's session has counted the others of a known topic."""
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
    """A route whose messages get another destination.

    Args:
        route: where they go.
        tid: their new destination.
    """

    __slots__ = ("_route", "_tid")

    def __init__(self, route: Route, tid: int) -> None:
        self._route, self._tid = route, tid

    def deliver(self, run: bytes) -> bool | None:
        """Deliver the run under its other number."""
        return self._route.deliver(rewritten(run, self._tid, int.from_bytes(run[7:11], "big")))

    def deliver_view(self, view: memoryview) -> bool | None:
        """See `deliver`."""
        return self.deliver(bytes(view))
