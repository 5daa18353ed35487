"""Hubs that move to another process while other nodes write to them: nothing is lost, comes twice or out of order.

    the other node                 the old process            the new process
        ◀──────────── PAUSE ────────────┘                     is a node, and wants nothing yet
    keeps what is for it
        ──────────── PAUSED ──────────▶ the clients stand still,
        ◀─── its channel is closed ─────┘ and go ────────────▶ all are here
        ◀───────────────── SUCCESSOR, clients, interest, …, SUCCEED ──┘
    SUCCEEDED, and what it has kept ─────────────────────────▶ delivers it

Nodes are found by their numbers: a process whose number is fixed, or that is reached through NATS, makes its links only
when the old one has ended its own. When the move fails, the old process is its own successor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from smqrt.broker.outbox import Drop, run_in_background
from smqrt.cluster.node_send_queue import NodeSendQueue
from smqrt.wire import smq
from smqrt.wire.cluster_packets import LinkType

if TYPE_CHECKING:
    from smqrt.cluster.clustered_broker import ClusteredBroker
    from smqrt.cluster.remote_node import RemoteNode

MOVE_S = 10.0
"""So long a node keeps messages for a hub that moves; then they are counted as `LINK_LOST`."""
MAX_AWAITED = 64
"""Nodes whose hubs are awaited at once; the oldest is lost then."""
FLUSHED_AT_ONCE = 64
_KEPT = frozenset((smq.Type.PUBLISH, LinkType.CLOCK, LinkType.END))
"""Of what is put for a hub that moves; all else is told to the new process anyway."""


class Passed(list[bytes]):
    """The queue of a way to a hub that has moved: what comes from routes that do not know it yet goes the new way."""

    def __init__(self, way: NodeSendQueue) -> None:
        self._way = way

    def append(self, run: bytes) -> None:
        """Put the run."""
        if run[2] in _KEPT:
            self._way.put(run)


class Moving:
    """Hubs that move, as one hub of a cluster sees them: others, and itself.

    Args:
        member: the hub's part in the cluster.

    Attributes:
        nodes: those whose hub has left for another process that is awaited.
        awaits: whether this hub goes on for that of another process, which has the clients still.
    """

    def __init__(self, member: ClusteredBroker) -> None:
        self._member = member
        self.nodes: list[RemoteNode] = []
        self.awaits = False
        self._until_s: dict[RemoteNode, float] = {}
        """Of nodes that pause, and of those that are awaited."""
        self._unpaused: set[RemoteNode] = set()
        self._predecessor = 0
        self._succeeds_until_s = 0.0

    def _now_s(self) -> float:
        return self._member.broker.clock()

    # ---- another node's hub moves

    def pauses(self, node: RemoteNode) -> None:
        """A node's hub is about to move: keep what is for it. One that does not keep up loses what is published now."""
        if node.way.holds or node in self._until_s:
            return
        node.way.say([bytes((LinkType.PAUSED,))])
        node.way.keep()
        self._until_s[node] = self._now_s() + MOVE_S

    def has_left(self, node: RemoteNode) -> bool:
        """A node can't be reached any more; whether it moves, and so is not lost."""
        if not node.way.keeps:
            return False
        if node not in self.nodes:
            self.nodes.append(node)
        if len(self.nodes) > MAX_AWAITED:
            self._give_up(self.nodes[0])
        return True

    def succeeds(self, node: RemoteNode, number: int) -> None:
        """`node` goes on for the one of that number: what is for either is kept until it has said what it wants."""
        found = (one for one in (*self.nodes, *self._member.remotes) if one.number == number and one.way.keeps)
        before = next((one for one in found if one is not node), None)
        if before is not None:
            node.predecessor = before
            self._member.forget_valued()

    def succeeded(self, node: RemoteNode) -> None:
        """It has said all."""
        before = node.predecessor
        if before is None:
            node.way.say([bytes((LinkType.SUCCEEDED,))])
            if node.way.keeps:  # the hub stays where it was
                del self._until_s[node]
                node.way.keeps = False
                node.way.go_on()
        else:
            if before not in self.nodes:  # its link is slower than that of the new process
                self.nodes.append(before)
                self._member.remotes.remove(before)
            node.way.say([bytes((LinkType.SUCCEEDED,))])
            run_in_background(self._pass_kept(before, node))

    def _pass_kept(self, before: RemoteNode, node: RemoteNode) -> Iterator[None]:
        kept, at = before.way.queue, 0
        while at < len(kept) and not node.gone and not before.gone:  # also what comes meanwhile
            for run in kept[at : at + FLUSHED_AT_ONCE]:
                if run[2] in _KEPT:
                    node.way.put(run)
            at += FLUSHED_AT_ONCE
            if at < len(kept):
                yield
        if before.gone:
            return
        if node.gone:
            before.way.queue = kept[at:]
            return
        before.way.queue, before.way.keeps, node.predecessor = Passed(node.way), False, None
        self.nodes.remove(before)
        del self._until_s[before]
        self._member.forget_moved(before, node)

    def present(self, node: RemoteNode) -> RemoteNode:
        """Where messages for a node go: to the one that it goes on for, as long as these are kept."""
        return node.predecessor or node

    # ---- this hub moves

    def pause(self) -> None:
        """Have the other nodes keep what is for this hub; see `is_paused`."""
        self._unpaused = {node for node in self._member.remotes if node.way.knows_succession}
        for node in self._unpaused:
            node.way.say([bytes((LinkType.PAUSE,))])

    @property
    def is_paused(self) -> bool:
        """Whether nothing comes any more of the nodes that were asked, but what is here."""
        return not any(node in self._unpaused for node in self._member.remotes)

    def paused(self, node: RemoteNode) -> None:
        """A node keeps what is for this hub."""
        self._unpaused.discard(node)

    def stay(self) -> None:
        """The clients stay here: this node is its own successor."""
        number = self._member.number
        if self._member.remotes:
            for node in [one for one in self._member.remotes if one.way.knows_succession]:
                node.way.say([bytes((LinkType.SUCCEED,)) + number.to_bytes(2, "big")])
        else:
            self.begin(number)

    # ---- this hub goes on for another one

    def expect(self) -> None:
        """Another process has the clients still: what other nodes send is for that one."""
        self.awaits = True
        for node in self._member.remotes:
            self.greet(node)

    def begin(self, number: int) -> None:
        """The clients are here, of the hub that the node of that number had; 0 when there is none that others would
        know.
        """
        self.awaits, self._predecessor = False, number
        self._succeeds_until_s = self._now_s() + MOVE_S if number else 0.0
        for node in self._member.remotes:
            node.hold(self._succeeds_at(node))

    def greet(self, node: RemoteNode) -> None:
        """A node has joined."""
        node.hold(node.way.knows_succession and (self.awaits or self._succeeds_at(node)))

    def _succeeds_at(self, node: RemoteNode) -> bool:
        return node.way.knows_succession and self._now_s() < self._succeeds_until_s

    def framed(self, node: RemoteNode, snapshot: Iterator[None]) -> Iterator[None]:
        """Tell all there is, and whom this hub goes on for."""
        succeeds = node.is_held and not self.awaits
        if succeeds:
            node.way.say([bytes((LinkType.SUCCESSOR,)) + self._predecessor.to_bytes(2, "big")])
        yield from snapshot
        if succeeds:
            node.way.say([bytes((LinkType.SUCCEED,)) + self._predecessor.to_bytes(2, "big")])

    # ---- what takes too long

    def look(self) -> None:
        """Give up what takes too long."""
        now_s = self._now_s()
        for node in [one for one, until_s in self._until_s.items() if until_s <= now_s]:
            self._give_up(node)
        if 0 < self._succeeds_until_s <= now_s:
            self._succeeds_until_s = 0.0
            for node in self._member.remotes:
                node.hold(False)

    def clear(self) -> None:
        """Give up all."""
        for node in list(self._until_s):
            self._give_up(node)

    def _give_up(self, node: RemoteNode) -> None:
        del self._until_s[node]
        node.way.keeps = False
        if node in self.nodes:
            self.nodes.remove(node)
            self._member.left_node(node, "nobody goes on for its hub", Drop.LINK_LOST)
        else:
            node.way.go_on()
