"""Links in memory: nodes in one process, whose connections deliver when they are told to.

The tests of all engines run on it too, and the simulation: it decides what arrives next, what breaks, and when.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from smqrt.broker.outbox import Outbox, flush_dirty
from smqrt.cluster.link import Link
from smqrt.cluster.node import QUEUE_BYTES, Node
from smqrt.errors import ProtocolError
from smqrt.wire.smq import frames

T = TypeVar("T")


class Chance(Protocol):
    """What decides, such as `random.Random(seed)`."""

    def choice(self, of: Sequence[T], /) -> T:
        """One of them."""
        ...

    def randbytes(self, count: int, /) -> bytes:
        """So many bytes."""
        ...


class Pipe(Outbox):
    """One direction of a connection.

    Attributes:
        chunks: what was sent and has not arrived; each arrives as a whole.
        link: of the other side; None before it is there.
        worked_off_bytes: what has arrived.
        closed: nothing arrives any more.
    """

    __slots__ = ("chunks", "closed", "link", "worked_off_bytes")

    def __init__(self) -> None:
        super().__init__()
        self.chunks: deque[bytes] = deque()
        self.link: Link | None = None
        self.worked_off_bytes = 0
        self.closed = False

    def flush(self) -> None:
        """Send the queue."""
        runs, self.queue = self.queue, []
        if not self.closed:
            self.chunks.append(b"".join(runs))

    def arrive(self) -> None:
        """Let the oldest chunk arrive."""
        data = self.chunks.popleft()
        link = self.link
        if link is None or self.closed:
            return
        for frame in frames(data):
            try:
                link.receive(frame)
            except ProtocolError as error:
                link.lose(str(error))
                return
            self.worked_off_bytes += len(frame)
        link.heard(link.node.clock_s())


class MemoryTransport:
    """One side of a connection."""

    via = "memory"

    def __init__(self, network: MemoryNetwork, sends: Pipe, receives: Pipe) -> None:
        self._network, self.outbox, self._receives = network, sends, receives

    @property
    def worked_off_bytes(self) -> int:
        """See `Transport`."""
        return self._receives.worked_off_bytes

    def close(self, in_order: bool) -> None:
        """See `Transport`."""
        if in_order:
            self.outbox.flush()
        else:
            self._network.cut(self.outbox)
        self._receives.closed = True
        self._network.hang_up(self.outbox)


class MemoryNetwork:
    """Nodes and the connections between them.

    Args:
        chance: decides everything.
    """

    def __init__(self, chance: Chance) -> None:
        self.chance = chance
        self.now_s = 1000.0
        self.nodes: list[Node] = []
        self.pipes: list[Pipe] = []
        self._ends: list[Pipe] = []
        """Whose sender has hung up: the other side learns it once all has arrived."""

    def node(self, key: bytes = b"key", number: int = 0, queue_bytes: int = QUEUE_BYTES) -> Node:
        """A new node."""
        self.now_s += 0.001
        node = Node(
            key,
            random=self.chance.randbytes,
            clock_s=lambda: self.now_s,
            clock_ns=lambda: int(self.now_s * 1e9),
            number=number,
            queue_bytes=queue_bytes,
        )
        self.nodes.append(node)
        return node

    def connect(self, one: Node, other: Node) -> tuple[Link, Link]:
        """Connect `one` to `other`; gives the link of each."""
        there, back = Pipe(), Pipe()
        self.pipes += [there, back]
        back.link = one.connected(MemoryTransport(self, there, back), connects=True)
        there.link = other.connected(MemoryTransport(self, back, there), connects=False)
        return back.link, there.link

    def cut(self, pipe: Pipe) -> None:
        """What is on the way in one direction never arrives."""
        pipe.chunks.clear()
        pipe.queue = []

    def hang_up(self, pipe: Pipe) -> None:
        """The sender of `pipe` has ended the connection."""
        self._ends.append(pipe)

    def break_link(self, link: Link) -> None:
        """Cut a connection in both directions; both sides learn it."""
        for pipe in [one for one in self.pipes if one.link is link or one is link.transport.outbox]:
            self.cut(pipe)
            pipe.closed = True
        for end in [one.link for one in self.pipes if one.link is link or one is link.transport.outbox]:
            if end is not None:
                end.lose("the connection broke")

    def swallow(self, link: Link) -> None:
        """Nothing arrives any more over a connection, and nobody is told."""
        for pipe in [one for one in self.pipes if one.link is link or one is link.transport.outbox]:
            self.cut(pipe)
            pipe.closed = True

    # ---- time

    def flush(self) -> None:
        """End a turn."""
        while flush_dirty():
            pass

    def choose(self) -> Pipe | None:
        """A connection on which something may arrive, chosen at random."""
        waiting = [pipe for pipe in self.pipes if pipe.chunks]
        return self.chance.choice(waiting) if waiting else None

    def step(self) -> bool:
        """Let one thing arrive; whether there was one."""
        self.flush()
        pipe = self.choose()
        if pipe is not None:
            pipe.arrive()
            self.flush()
            return True
        return self._end_one()

    def _end_one(self) -> bool:
        for pipe in self._ends:
            self._ends.remove(pipe)
            self.pipes.remove(pipe)
            if pipe.link is not None:
                pipe.link.lose("the other side has ended the connection")
            return True
        return False

    def settle(self, until: Callable[[], bool] | None = None) -> None:
        """Let everything arrive, or until a condition holds."""
        while not (until and until()) and self.step():
            pass

    def pass_time(self, seconds: float) -> None:
        """Let time pass, and all nodes look after their links."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + 0.5)
            for node in self.nodes:
                node.look()
            self.settle()
