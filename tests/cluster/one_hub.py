"""One hub of a cluster; the other nodes are what a test says for them, and what they are sent is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from smqrt.broker.outbox import flush_dirty
from smqrt.broker.sessions import Session
from smqrt.broker.state import Hooks
from smqrt.broker.topics import HubLimits
from smqrt.cluster.clustered_broker import ClusteredBroker
from smqrt.cluster.remote_node import NodeSendQueue, RemoteNode
from smqrt.wire import smq
from smqrt.wire.cluster_packets import Announced, Key
from smqrt.wire.smq import LOCAL_BITS
from tests.broker.memory_clients import Crowd

NUMBER = 2


class Way(NodeSendQueue):
    """The send queue to another node.

    Attributes:
        got: the frames that were sent, without their lengths, in order.
        is_behind: whether snapshots pause; behind: those that do.
        flushed: called after each flush, as an engine may do something then.
    """

    is_behind = False
    knows_backpressure = True
    epoch = 1

    def __init__(self) -> None:
        super().__init__()
        self.got: list[bytes] = []
        self.behind: list[Callable[[], object]] = []
        self.flushed: Callable[[], object] = lambda: None

    def flush(self) -> None:
        if self.holds or self.keeps or not self.queue:
            return
        batches, self.queue = self.queue, []
        self.got += [frame[2:] for batch in batches for frame in smq.frames(batch)]
        self.flushed()

    def release(self) -> None:
        super().release()
        self.flush()

    def wait(self, then: Callable[[], object]) -> None:
        self.behind.append(then)

    def take(self) -> list[bytes]:
        """What was sent since the last call."""
        found, self.got = self.got, []
        return found


class OneHub:
    """A hub with the node number 2.

    Attributes:
        broker, member: the hub, and its part in the cluster.
        now_ms: the time by which connections of clients are compared.
        now_s: the time of timers.
    """

    def __init__(self, hooks: Hooks | None = None, limits: HubLimits | None = None) -> None:
        self._crowd = Crowd(hooks, limits)
        self.broker = self._crowd.broker
        self.now_ms, self.now_s = 1000, 0.0
        self._timers: list[tuple[float, Callable[[], object]]] = []
        self.broker.clock, self.broker.call_later = lambda: self.now_s, self._call_later
        self.member = ClusteredBroker(self.broker, "hub", b"k" * 32, NUMBER, lambda: self.now_ms)

    def client(self, uid: bytes | None = None) -> Session:
        client = self._crowd.client(uid)
        self.settle()
        return client

    def _call_later(self, delay_s: float, function: Callable[[], object]) -> None:
        self._timers.append((self.now_s + delay_s, function))

    def pass_time(self, seconds: float) -> None:
        """Let time pass, and call what was to be called meanwhile."""
        until_s = self.now_s + seconds
        while due := [one for one in self._timers if one[0] <= until_s]:
            timer = min(due, key=lambda one: one[0])
            self._timers.remove(timer)
            self.now_s = timer[0]
            timer[1]()
        self.now_s = until_s
        self.settle()

    def join(self, number: int = 5) -> tuple[RemoteNode, Way]:
        """Another node, after its snapshot."""
        way = Way()
        node = self.member.joined(number, way)
        self.settle()
        way.take()
        return node, way

    def key(self, name: bytes) -> Key:
        """That of a topic."""
        numbers = self.broker.topic_table.numbers
        assert numbers is not None
        return numbers.topic(name)

    def told(self, node: RemoteNode, packets: Iterable[bytes]) -> None:
        """Another node says something."""
        for packet in packets:
            node.control(packet)
        self.settle()

    def settle(self) -> None:
        while flush_dirty():
            pass


def announced(node: RemoteNode, local: int = 1, uid: bytes = b"uid", stamp: int = 1, info: bytes = b"") -> Announced:
    """A client of another node."""
    return Announced(node.number << LOCAL_BITS | local, stamp, uid, info, b"")
