"""Links in memory: nodes in one process, and connections that deliver on request.

Tests of all engines run on it too, and the simulation: it decides what arrives next, what breaks, and when.
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
    """A source of random decisions, such as `random.Random(seed)`."""

    def choice(self, of: Sequence[T], /) -> T:
        """Return one of the items."""
        ...

    def randbytes(self, count: int, /) -> bytes:
        """Return random bytes."""
        ...


class Pipe(Outbox):
    """One direction of a connection.

    Attributes:
        chunks: what was sent and has not arrived; each arrives as a whole.
        link: the receiving link; None before it is made.
        worked_off_bytes: what has arrived.
        closed: whether nothing arrives any more.
    """

    __slots__ = ("chunks", "closed", "link", "processed_bytes")

    def __init__(self) -> None:
        super().__init__()
        self.chunks: deque[bytes] = deque()
        self.link: Link | None = None
        self.processed_bytes = 0
        self.closed = False

    def flush(self) -> None:
        """Send the queue."""
        runs, self.queue = self.queue, []
        if not self.closed:
            self.chunks.append(b"".join(runs))

    def arrive(self) -> None:
        """Deliver the oldest chunk."""
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
            self.processed_bytes += len(frame)
        link.heard(link.node.clock_s())


class MemoryTransport:
    """One side of a connection."""

    via = "memory"

    def __init__(self, network: MemoryNetwork, sends: Pipe, receives: Pipe) -> None:
        self._network, self.outbox, self._receives = network, sends, receives

    @property
    def processed_bytes(self) -> int:
        """See `Transport`."""
        return self._receives.processed_bytes

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
        chance: makes all random decisions.

    Attributes:
        now_s: the time, in monotonic seconds.
        nodes: all nodes.
        pipes: the directions of all open connections.
    """

    def __init__(self, chance: Chance) -> None:
        self.chance = chance
        self.now_s = 1000.0
        self.nodes: list[Node] = []
        self.pipes: list[Pipe] = []
        self._ends: list[Pipe] = []
        """Pipes whose sender has closed the connection: the other side notices it once all has arrived."""

    def node(self, key: bytes = b"key", number: int = 0, queue_bytes: int = QUEUE_BYTES) -> Node:
        """Add a node."""
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
        """Connect `one` to `other`; return the link of each."""
        there, back = Pipe(), Pipe()
        self.pipes += [there, back]
        back.link = one.connected(MemoryTransport(self, there, back), connects=True)
        there.link = other.connected(MemoryTransport(self, back, there), connects=False)
        return back.link, there.link

    def cut(self, pipe: Pipe) -> None:
        """Drop what is on its way in one direction."""
        pipe.chunks.clear()
        pipe.queue = []

    def hang_up(self, pipe: Pipe) -> None:
        """Record that the sender of `pipe` has closed the connection."""
        self._ends.append(pipe)

    def break_link(self, link: Link) -> None:
        """Break a connection in both directions; both sides notice it."""
        for pipe in [one for one in self.pipes if one.link is link or one is link.transport.outbox]:
            self.cut(pipe)
            pipe.closed = True
        for end in [one.link for one in self.pipes if one.link is link or one is link.transport.outbox]:
            if end is not None:
                end.lose("the connection broke")

    def swallow(self, link: Link) -> None:
        """Break a connection in both directions; neither side notices it."""
        for pipe in [one for one in self.pipes if one.link is link or one is link.transport.outbox]:
            self.cut(pipe)
            pipe.closed = True

    # ---- time

    def flush(self) -> None:
        """End a turn of the event loop."""
        while flush_dirty():
            pass

    def choose(self) -> Pipe | None:
        """Return a random pipe on which something may arrive."""
        waiting = [pipe for pipe in self.pipes if pipe.chunks]
        return self.chance.choice(waiting) if waiting else None

    def step(self) -> bool:
        """Deliver one chunk, or the end of one connection; return whether there was any."""
        self.flush()
        pipe = self.choose()
        if pipe is not None:
            pipe.arrive()
            self.flush()
            return True
        if not self._ends:
            return False
        pipe = self._ends.pop(0)
        self.pipes.remove(pipe)
        if pipe.link is not None:
            pipe.link.lose("the other side has closed the connection")
        return True

    def settle(self, until: Callable[[], bool] | None = None) -> None:
        """Deliver everything, or until a condition holds."""
        while not (until and until()) and self.step():
            pass

    def pass_time(self, seconds: float) -> None:
        """Advance the time; all nodes check their links meanwhile."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + 0.5)
            for node in self.nodes:
                node.check_links()
            self.settle()
