"""Migration of hubs to other processes: no message is lost, duplicated or reordered.

    the other node                 the old process            the new process
        ◀──────────── PAUSE ────────────┘                     is a node, and wants nothing yet
    keeps messages for it
        ──────────── PAUSED ──────────▶ freezes its clients,
        ◀─── its channel is closed ─────┘ and sends them ────▶ has all of them
        ◀───────────────── SUCCESSOR, clients, interest, …, SUCCEED ──┘
    SUCCEEDED, and the messages it kept ─────────────────────▶ delivers them

Nodes are found by their numbers. A process whose number is fixed, or that is reached through NATS, makes its links
only after the old process has closed its own. When the migration fails, the old process is its own successor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from smqrt.broker.outbox import run_in_background
from smqrt.cluster.node_send_queue import NodeSendQueue
from smqrt.cluster.remote_node import RemoteNode
from smqrt.cluster.state import ClusterState
from smqrt.wire import smq
from smqrt.wire.cluster_packets import LinkType

MOVE_S = 10.0
"""How long a node keeps messages for a hub that migrates; then they count as `LINK_LOST`."""
MAX_AWAITED = 64
"""Nodes whose hubs are awaited at once; one more, and the oldest is lost."""
RUNS_PER_STEP = 64
"""Kept runs that one background step sends."""
_KEPT = frozenset((smq.Type.PUBLISH, LinkType.CLOCK, LinkType.END))
"""The types that are kept for a hub that migrates. The new process gets a snapshot, which has all else."""


class ForwardingQueue(list[bytes]):
    """The send queue of a hub that has migrated: runs of stale routes go to its new process."""

    def __init__(self, queue: NodeSendQueue) -> None:
        self._queue = queue

    def append(self, run: bytes) -> None:
        """Put the run."""
        if run[2] in _KEPT:
            self._queue.put(run)


class HubMigration:
    """The migrations that one hub of a cluster takes part in: those of other nodes' hubs, and its own.

    Attributes:
        nodes: unreachable nodes whose hub migrates to a process that is awaited.
        awaits: whether this hub is the successor of another process's, which still has the clients.
        on_moved: called with the old and the new node when a hub has migrated.
        on_lost: called with a node whose hub no process has taken over.
    """

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self.nodes: list[RemoteNode] = []
        self.awaits = False
        self.on_moved: Callable[[RemoteNode, RemoteNode], object] = lambda before, node: None
        self.on_lost: Callable[[RemoteNode], object] = lambda node: None
        self._until_s: dict[RemoteNode, float] = {}
        """Until when messages are kept, of nodes that pause and of those that are awaited."""
        self._unpaused: set[RemoteNode] = set()
        self._predecessor = 0
        self._succeeds_until_s = 0.0

    def _now_s(self) -> float:
        return self._state.broker.clock()

    # ---- the hub of another node migrates

    def pauses(self, node: RemoteNode) -> None:
        """Keep messages for a hub that is about to migrate. A node that does not keep up loses them instead."""
        if node.send_queue.holds or node in self._until_s:
            return
        node.send_queue.send([bytes((LinkType.PAUSED,))])
        node.send_queue.keep()
        self._until_s[node] = self._now_s() + MOVE_S

    def has_left(self, node: RemoteNode) -> bool:
        """Return whether an unreachable node migrates, and so is not lost."""
        if not node.send_queue.keeps:
            return False
        if node not in self.nodes:
            self.nodes.append(node)
        if len(self.nodes) > MAX_AWAITED:
            self._give_up(self.nodes[0])
        return True

    def succeeds(self, node: RemoteNode, number: int) -> None:
        """Make `node` the successor of the node `number`; messages for both are kept until it has sent its snapshot."""
        found = (one for one in (*self.nodes, *self._state.remotes) if one.number == number and one.send_queue.keeps)
        before = next((one for one in found if one is not node), None)
        if before is not None:
            node.predecessor = before
            self._state.forget_value_routes()

    def succeeded(self, node: RemoteNode) -> None:
        """Send a successor the kept messages, since it has sent its snapshot."""
        before = node.predecessor
        if before is None:
            node.send_queue.send([bytes((LinkType.SUCCEEDED,))])
            if node.send_queue.keeps:  # the migration failed, and the hub stays in its old process
                del self._until_s[node]
                node.send_queue.keeps = False
                node.send_queue.release()
        else:
            if before not in self.nodes:  # its link is slower than that of the new process
                self.nodes.append(before)
                self._state.remotes.remove(before)
            node.send_queue.send([bytes((LinkType.SUCCEEDED,))])
            run_in_background(self._send_kept(before, node))

    def _send_kept(self, before: RemoteNode, node: RemoteNode) -> Iterator[None]:
        kept, at = before.send_queue.queue, 0
        while at < len(kept) and not node.gone and not before.gone:  # also what is added meanwhile
            for run in kept[at : at + RUNS_PER_STEP]:
                if run[2] in _KEPT:
                    node.send_queue.put(run)  # in order, with the times and the ends of clients between them
            at += RUNS_PER_STEP
            if at < len(kept):
                yield
        if before.gone:  # given up meanwhile, and counted as lost
            return
        if node.gone:  # another process may still succeed
            before.send_queue.queue = kept[at:]
            return
        before.send_queue.queue, before.send_queue.keeps = ForwardingQueue(node.send_queue), False
        node.predecessor = None
        self.nodes.remove(before)
        del self._until_s[before]
        self.on_moved(before, node)

    def present(self, node: RemoteNode) -> RemoteNode:
        """Return where messages for a node go: to its predecessor, as long as messages are kept for that."""
        return node.predecessor or node

    # ---- this hub migrates

    def pause(self) -> None:
        """Ask the other nodes to keep messages for this hub; see `is_paused`."""
        self._unpaused = {node for node in self._state.remotes if node.send_queue.knows_succession}
        for node in self._unpaused:
            node.send_queue.send([bytes((LinkType.PAUSE,))])

    @property
    def is_paused(self) -> bool:
        """Whether all nodes that were asked have stopped sending."""
        return not any(node in self._unpaused for node in self._state.remotes)

    def paused(self, node: RemoteNode) -> None:
        """Record that a node keeps messages for this hub."""
        self._unpaused.discard(node)

    def stay(self) -> None:
        """Keep the hub in this process after all: this node is its own successor."""
        number = self._state.number
        if self._state.remotes:
            for node in [one for one in self._state.remotes if one.send_queue.knows_succession]:
                node.send_queue.send([bytes((LinkType.SUCCEED,)) + number.to_bytes(2, "big")])
        else:
            self.begin(number)

    # ---- this hub is a successor

    def expect(self) -> None:
        """Await the clients of another process: what other nodes send is for that one."""
        self.awaits = True
        for node in self._state.remotes:
            self.greet(node)

    def begin(self, number: int) -> None:
        """Begin to serve the clients of the hub that the node `number` had; 0 for one that was in no cluster."""
        self.awaits, self._predecessor = False, number
        self._succeeds_until_s = self._now_s() + MOVE_S if number else 0.0
        for node in self._state.remotes:
            node.hold(self._succeeds_at(node))

    def greet(self, node: RemoteNode) -> None:
        """Hold the messages of a node that has joined, as long as they are for the predecessor."""
        node.hold(node.send_queue.knows_succession and (self.awaits or self._succeeds_at(node)))

    def _succeeds_at(self, node: RemoteNode) -> bool:
        return node.send_queue.knows_succession and self._now_s() < self._succeeds_until_s

    def framed(self, node: RemoteNode, snapshot: Iterator[None]) -> Iterator[None]:
        """Send a snapshot, between the packets that name the predecessor of this hub where it has one."""
        succeeds = node.is_held and not self.awaits
        if succeeds:
            node.send_queue.send([bytes((LinkType.SUCCESSOR,)) + self._predecessor.to_bytes(2, "big")])
        yield from snapshot
        if succeeds:
            node.send_queue.send([bytes((LinkType.SUCCEED,)) + self._predecessor.to_bytes(2, "big")])

    # ---- time limits

    def give_up_expired(self) -> None:
        """Give up migrations that take longer than `MOVE_S`."""
        now_s = self._now_s()
        for node in [one for one, until_s in self._until_s.items() if until_s <= now_s]:
            self._give_up(node)
        if 0 < self._succeeds_until_s <= now_s:
            self._succeeds_until_s = 0.0
            for node in self._state.remotes:
                node.hold(False)

    def clear(self) -> None:
        """Give up all migrations."""
        for node in list(self._until_s):
            self._give_up(node)

    def _give_up(self, node: RemoteNode) -> None:
        del self._until_s[node]
        node.send_queue.keeps = False
        if node in self.nodes:
            self.nodes.remove(node)
            self.on_lost(node)
        else:
            node.send_queue.release()
