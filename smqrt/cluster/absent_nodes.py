"""Nodes that are lost and may come back: what they would have been sent is counted, for a while.

Without that, only what was on its way when a partition begins would be counted. Such a node has no clients any more for
those who ask, and nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from smqrt.broker.outbox import Drop, run_in_background
from smqrt.cluster.interest import Interest
from smqrt.cluster.node_send_queue import NodeSendQueue, count_messages
from smqrt.wire.cluster_packets import Key
from smqrt.wire.smq import node_of

if TYPE_CHECKING:
    from smqrt.cluster.clustered_broker import ClusteredBroker
    from smqrt.cluster.remote_node import RemoteNode

ABSENT_S = 120.0
"""So long what a lost node misses is counted. Nobody knows whether it ever comes back: its clients may be elsewhere."""
MAX_ABSENT = 64
"""Nodes for which it is, at one hub: those that were lost last."""


class AbsentNode:
    """A lost node.

    Attributes:
        number: its number.
        bit: stands for it in sets of absent nodes.
        until_s: when it is forgotten, on the hub's clock.
    """

    def __init__(self, number: int, way: NodeSendQueue, bit: int, until_s: float) -> None:
        self.number, self.bit, self.until_s = number, bit, until_s
        self._id, self._process, self._place, self._epoch = way.node_id, way.process, way.place, way.epoch

    def is_at(self, way: NodeSendQueue) -> bool:
        """Whether a way leads to the same node, or to the worker that was started in its place."""
        return (bool(self._id) and way.node_id == self._id) or (
            self._process is not None and way.process == self._process
        )

    def is_followed(self, way: NodeSendQueue) -> bool:
        """Whether a way leads to a node that was started later at the same address."""
        return self._place is not None and way.place == self._place and way.epoch > self._epoch


class Absent:
    """The lost nodes of one hub, with what they wanted.

    Attributes:
        nodes: those that are counted for, the oldest loss first.
    """

    def __init__(self, member: ClusteredBroker) -> None:
        self._member = member
        self.nodes: list[AbsentNode] = []
        self._interest = Interest()
        self._bits = self._counted = 0
        """Bits in use, and of those the ones of nodes that are not forgotten."""

    # ---- nodes come and go

    def lost(self, node: RemoteNode) -> AbsentNode | None:
        """A node is lost: count for it from now on. None when another one is there in its place."""
        until_s = self._member.broker.clock() + ABSENT_S
        if found := self.at(node.way):  # it was back, and had not said all
            before = found[0]
            before.number, before.until_s = node.number, until_s
            self.nodes.remove(before)
            self.nodes.append(before)
            return before
        bit = ~self._bits & self._bits + 1  # the lowest that is free
        absent = AbsentNode(node.number, node.way, bit, until_s)
        if any(one.synced and absent.is_at(one.way) for one in self._member.remotes):
            return None
        self._bits |= bit
        self._counted |= bit
        self.nodes.append(absent)
        if len(self.nodes) > MAX_ABSENT:
            self._forget(self.nodes[0])
        return absent

    def takes(self, absent: AbsentNode, keys: list[Key]) -> None:
        """It wanted these topics; those that it has asked for anew, since it is back, it gets."""
        if not absent.bit & self._counted:
            return
        bits = sum(one.bit for one in self._member.remotes if absent in self.at(one.way))
        for key in keys:
            if not bits or not self._member.interest.nodes(key) & bits:
                self._interest.add(key, absent.bit)

    def at(self, way: NodeSendQueue) -> list[AbsentNode]:
        """Those that are back, by this way. Several nodes may seem to have one address, behind a router: one that is
        known itself is in no other's place.
        """
        return [one for one in self.nodes if one.is_at(way)] or [one for one in self.nodes if one.is_followed(way)]

    def gets(self, absent: AbsentNode, key: Key) -> None:
        """It is back, and wants a topic: it gets what is published from now on."""
        self._interest.discard(key, absent.bit)

    def back(self, node: RemoteNode) -> None:
        """A node has said all that it wants."""
        for absent in self.at(node.way):
            self._forget(absent)

    def look(self) -> None:
        """Forget those that are gone for too long."""
        now_s = self._member.broker.clock()
        for absent in [one for one in self.nodes if one.until_s <= now_s]:
            self._forget(absent)

    def clear(self) -> None:
        """Forget all."""
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
                self._member.forget(key)
            yield
        self._bits &= ~bit

    # ---- what they miss

    def wanting(self, key: Key | None, tid: int) -> int:
        """Those that want a topic; without `key` the one with the number `tid`, whose name is not known here."""
        return self._interest.nodes_of_number(tid) if key is None else self._interest.nodes(key)

    def counts(self, nodes: int) -> Callable[[bytes], object]:
        """What takes the runs of a topic that these nodes want, as ways do."""
        return lambda run: self.missed(nodes, count_messages(run))

    def missed(self, nodes: int, messages: int) -> bool:
        """Count messages that these nodes do not get; whether there were some of them."""
        copies = (nodes & self._counted).bit_count() * messages
        if copies:
            self._member.broker.stats.drop(Drop.LINK_LOST, copies)
        return bool(copies)

    def has_client(self, etid: int) -> bool:
        """Whether an ETID that nobody has is one of a lost node's clients."""
        number = node_of(etid)
        return bool(number) and any(one.number == number for one in self.nodes) and not self._is_taken(number)

    def _is_taken(self, number: int) -> bool:
        return number == self._member.number or any(one.number == number for one in self._member.remotes)
