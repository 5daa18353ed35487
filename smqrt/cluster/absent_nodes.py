"""Lost nodes that may return, and the messages that they miss.

Without it, only messages under way when a partition begins would count as lost. The clients of a lost node are gone
for all queries, and nothing is queued for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from smqrt.broker.outbox import Drop, run_in_background
from smqrt.cluster.interest import Interest
from smqrt.cluster.node_send_queue import NodeSendQueue, count_messages
from smqrt.cluster.remote_node import RemoteNode
from smqrt.cluster.state import ClusterState
from smqrt.wire.cluster_packets import Key
from smqrt.wire.smq import node_of

ABSENT_S = 120.0
"""How long missed messages of a lost node count. It may never come back, and its clients may be at another node."""
MAX_ABSENT = 64
"""Lost nodes whose missed messages one hub counts; the one that was lost first is forgotten."""


class AbsentNode:
    """A lost node.

    Attributes:
        number: its node number.
        bit: its bit in sets of absent nodes.
        until_s: when it is forgotten, by the hub's clock.
    """

    def __init__(self, number: int, queue: NodeSendQueue, bit: int, until_s: float) -> None:
        self.number, self.bit, self.until_s = number, bit, until_s
        self._id, self._process, self._place, self._epoch = queue.node_id, queue.process, queue.place, queue.epoch

    def is_at(self, queue: NodeSendQueue) -> bool:
        """Return whether a send queue leads to the same node, or to the worker that was started in its place."""
        return (bool(self._id) and queue.node_id == self._id) or (
            self._process is not None and queue.process == self._process
        )

    def is_followed(self, queue: NodeSendQueue) -> bool:
        """Return whether a send queue leads to a node that was started later at the same address."""
        return self._place is not None and queue.place == self._place and queue.epoch > self._epoch


class AbsentNodes:
    """The lost nodes of one hub and the topics that they wanted.

    Attributes:
        nodes: the lost nodes, the oldest loss first.
    """

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self.nodes: list[AbsentNode] = []
        self._interest = Interest()
        self._bits = self._counted = 0
        """Bits in use, and those of nodes that still count. Interest is removed in the background, so they differ."""

    @property
    def is_empty(self) -> bool:
        """Whether no lost node uses memory any more, background work included."""
        return not (self.nodes or self._bits or len(self._interest))

    # ---- nodes are lost and return

    def lost(self, node: RemoteNode) -> AbsentNode | None:
        """Count for a lost node from now on.

        Returns:
            None when another node is there in its place already.
        """
        until_s = self._state.broker.clock() + ABSENT_S
        if found := self.at(node.send_queue):  # it returned, and was lost again before it had sent its snapshot
            before = found[0]
            before.number, before.until_s = node.number, until_s
            self.nodes.remove(before)
            self.nodes.append(before)
            return before
        bit = ~self._bits & self._bits + 1  # the lowest free bit
        absent = AbsentNode(node.number, node.send_queue, bit, until_s)
        if any(one.synced and absent.is_at(one.send_queue) for one in self._state.remotes):
            return None
        self._bits |= bit
        self._counted |= bit
        self.nodes.append(absent)
        if len(self.nodes) > MAX_ABSENT:
            self._forget(self.nodes[0])
        return absent

    def takes(self, absent: AbsentNode, keys: list[Key]) -> None:
        """Record topics that a lost node wanted, except those that it has requested again since its return."""
        if not absent.bit & self._counted:
            return
        bits = sum(one.bit for one in self._state.remotes if absent in self.at(one.send_queue))
        for key in keys:
            if not bits or not self._state.interest.nodes(key) & bits:
                self._interest.add(key, absent.bit)

    def at(self, queue: NodeSendQueue) -> list[AbsentNode]:
        """Return the lost nodes that are reachable again by this send queue.

        Several nodes may share one address behind a router, so an exact match comes before one by address.
        """
        return [one for one in self.nodes if one.is_at(queue)] or [one for one in self.nodes if one.is_followed(queue)]

    def gets(self, absent: AbsentNode, key: Key) -> None:
        """Stop counting a topic that a node has requested after its return."""
        self._interest.discard(key, absent.bit)

    def back(self, node: RemoteNode) -> None:
        """Stop counting for a node that has sent all that it wants."""
        for absent in self.at(node.send_queue):
            self._forget(absent)

    def forget_expired(self) -> None:
        """Forget the nodes that were lost more than `ABSENT_S` ago."""
        now_s = self._state.broker.clock()
        for absent in [one for one in self.nodes if one.until_s <= now_s]:
            self._forget(absent)

    def clear(self) -> None:
        """Forget all nodes."""
        for absent in list(self.nodes):
            self._forget(absent)

    def _forget(self, absent: AbsentNode) -> None:
        self.nodes.remove(absent)
        self._counted &= ~absent.bit
        run_in_background(self._forget_interest(absent.bit))

    def _forget_interest(self, bit: int) -> Iterator[None]:
        for keys in self._interest.keys(bit):
            for key in keys:
                self._interest.discard(key, bit)
                self._state.forget_routes(key)
            yield
        self._bits &= ~bit

    # ---- what they miss

    def wanting(self, key: Key | None, tid: int) -> int:
        """Return the bits of those that want a topic; `key` is None for a number whose name this hub does not have."""
        return self._interest.nodes_of_number(tid) if key is None else self._interest.nodes(key)

    def counts(self, nodes: int) -> Callable[[bytes], object]:
        """Return a function that counts the runs of a topic as missed by these nodes."""
        return lambda run: self.missed(nodes, count_messages(run))

    def missed(self, nodes: int, messages: int) -> bool:
        """Count messages that these nodes miss; return whether any node of them still counts."""
        copies = (nodes & self._counted).bit_count() * messages
        if copies:
            self._state.broker.stats.drop(Drop.LINK_LOST, copies)
        return bool(copies)

    def has_client(self, etid: int) -> bool:
        """Return whether an unknown ETID belongs to a client of a lost node."""
        number = node_of(etid)
        if not number or not any(one.number == number for one in self.nodes):
            return False
        # Another node may have drawn the number since, and the ETID belongs to one of its former clients then.
        is_taken = number == self._state.number or any(one.number == number for one in self._state.remotes)
        return not is_taken
