"""Node events, lost nodes, and migration of hubs to other processes."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from smqrt.broker.broker import Broker
from smqrt.broker.deferred import Deferred
from smqrt.broker.outbox import Drop, run_in_background
from smqrt.cluster.mqtt_filters import RemoteFilters
from smqrt.cluster.remote_node import NodeSendQueue, RemoteNode, count_messages
from smqrt.cluster.state import ClusterState, Interest
from smqrt.settings.limits import LineLimit
from smqrt.wire import smq
from smqrt.wire.cluster_mqtt import Wanted
from smqrt.wire.cluster_packets import Key, LinkType
from smqrt.wire.smq import node_of

if TYPE_CHECKING:
    from smqrt.cluster.mqtt_streams import MessageStream

log = logging.getLogger("smqrt")

MAX_WAITING = 1000
"""The maximum number of events that wait for the application; further ones are dropped and logged."""
MAX_LOST = 1024
"""The maximum number of lost nodes that are remembered, so that their return is the event `back`."""


class NodeEvents:
    """The node events of one hub, in order; the next one waits while `onnode` is running.

    Attributes:
        is_off: whether this hub leaves the cluster itself; then no events are reported.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker, self.is_off = broker, False
        self._waiting: deque[tuple[int, str, str]] = deque()
        self._is_running = False
        self._known: set[RemoteNode] = set()
        """Nodes whose joining was reported."""
        self._lost: dict[object, None] = {}
        """Ids, processes and places of lost nodes, the earliest loss first."""
        self._complaints = LineLimit()

    def synced(self, node: RemoteNode) -> None:
        """Report `joined` or `back` for a node that has sent its snapshot."""
        if node in self._known:
            return
        self._known.add(node)
        was_lost = [one for one in _identities(node) if one in self._lost]
        for one in was_lost:
            del self._lost[one]
        self._add(node.number, "back" if was_lost else "joined", "")

    def gone(self, node: RemoteNode, why: str) -> None:
        """Report `left` or `lost`."""
        if node not in self._known:
            return
        self._known.discard(node)
        has_left = node.send_queue.has_left
        if not has_left:
            self._lost.update((one, None) for one in _identities(node) if one)
            while len(self._lost) > 3 * MAX_LOST:  # up to three identities a node
                del self._lost[next(iter(self._lost))]
        self._add(node.number, "left" if has_left else "lost", why)

    def _add(self, number: int, event: str, why: str) -> None:
        if self._broker.hooks.onnode is None or self.is_off:
            return
        if len(self._waiting) >= MAX_WAITING:
            if (suffix := self._complaints.line_suffix()) is not None:
                log.warning("onnode is too slow: dropped the event that node %d %s%s", number, event, suffix)
            return
        self._waiting.append((number, event, why))
        if not self._is_running:
            self._is_running = True
            run_in_background(self._run())

    def _run(self) -> Iterator[None]:
        while self._waiting and not self._broker.closed:
            event, hook = self._waiting.popleft(), self._broker.hooks.onnode
            try:
                answer = hook(*event) if hook is not None else None
            except Exception:
                log.exception("error in onnode")
                answer = None
            if isinstance(answer, Deferred) and not answer.done:
                answer.then(lambda value, error: run_in_background(self._run()))
                return
            yield
        self._is_running = False


def _identities(node: RemoteNode) -> tuple[object, object, object]:
    return node.send_queue.node_id, node.send_queue.process, node.send_queue.place


# ---- Lost nodes
#
# Messages with QoS 1 and 2 of MQTT clients are kept for a lost node for `AbsentNodes.kept_s`, see `mqtt_streams`.
# Others that it would have received count as lost. Otherwise a partition would lose more messages than the counters
# show. Queries do not return clients of a lost node.

ABSENT_S = 120.0
"""The default of the time for which a lost node is remembered. It may not return, or its clients use other nodes."""
MAX_ABSENT = 64
"""The maximum number of lost nodes that one hub remembers; above it, the earliest is forgotten."""
FILTERS_PER_STEP = 50


class AbsentNode:
    """A lost node.

    Attributes:
        number: its node number.
        bit: its bit in sets of absent nodes.
        lost_s, until_s: when it was lost, and when it expires, by the clock of the hub.
        leaving: its bits in sets of nodes, until its topics and filters are removed there.
        identity, stream: see `RemoteNode`.
        has_mqtt: whether its hub has MQTT clients.
        is_unknown: whether it has not sent its filters to this process, see `AbsentNodes.expect`.
    """

    def __init__(self, bit: int, identity: bytes, stream: MessageStream | None) -> None:
        self.bit, self.identity, self.stream = bit, identity, stream
        self.number = self.leaving = 0
        self.lost_s = self.until_s = 0.0
        self.has_mqtt, self.is_unknown = True, False
        self._id, self._epoch = b"", 0
        self._process: tuple[bytes, int] | None = None
        self._place: tuple[str, int] | None = None

    @classmethod
    def of(cls, node: RemoteNode, bit: int) -> AbsentNode:
        """Return a node that was linked before."""
        found, queue = cls(bit, node.identity, node.stream), node.send_queue
        found.number, found.has_mqtt = node.number, node.has_mqtt
        found._id, found._process, found._place, found._epoch = (
            queue.node_id,
            queue.process,
            queue.place,
            queue.epoch,
        )
        return found

    def is_at(self, node: RemoteNode) -> bool:
        """Return whether a node is the same one, or has replaced it: the worker, or the sessions of its file."""
        queue = node.send_queue
        return (
            (bool(self._id) and queue.node_id == self._id)
            or (self._process is not None and queue.process == self._process)
            or (bool(self.identity) and node.identity == self.identity)
        )

    def is_followed(self, node: RemoteNode) -> bool:
        """Return whether a node was started later at the same address."""
        queue = node.send_queue
        return self._place is not None and queue.place == self._place and queue.epoch > self._epoch


class AbsentNodes:
    """The lost nodes of one hub, and the topics and filters that had subscribers there.

    Attributes:
        nodes: the lost nodes, the earliest loss first.
        filters: their filters.
        kept_s: the time for which they are remembered.
        on_forgotten: called with a lost node that has not returned in time, or has returned without its sessions.
    """

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self.nodes: list[AbsentNode] = []
        self.filters = RemoteFilters()
        self.kept_s = ABSENT_S
        self.on_forgotten: Callable[[AbsentNode], object] = lambda absent: None
        self._texts: dict[int, dict[str, None]] = {}
        """The texts of the filters, by the bit of the node."""
        self._interest = Interest()
        self._bits = self._counted = 0
        """Bits in use, and bits of the nodes in `nodes`. They differ while topics are removed in the background."""

    @property
    def is_empty(self) -> bool:
        """Whether there is no lost node, and the topics of all former ones are removed."""
        return not (self.nodes or self._bits or len(self._interest))

    # ---- lost and returned nodes

    def add(self, node: RemoteNode) -> AbsentNode | None:
        """Add a lost node, whose messages are kept or counted from now on.

        Returns:
            None when another link or process has replaced it already.
        """
        now_s = self._state.broker.clock()
        if found := self.at(node):  # lost again after its return, before it had sent its snapshot
            absent = found[0]
            absent.number = node.number
            self.nodes.remove(absent)
        else:
            absent = AbsentNode.of(node, ~self._bits & self._bits + 1)  # the lowest free bit
            if any(one.synced and absent.is_at(one) for one in self._state.remotes):
                return None
            self._bits |= absent.bit
            self._counted |= absent.bit
        absent.lost_s, absent.until_s = now_s, now_s + self.kept_s
        absent.leaving |= node.bit
        absent.stream = absent.stream or node.stream
        self.nodes.append(absent)
        if len(self.nodes) > MAX_ABSENT:
            self._forget(self.nodes[0])
        return absent

    def expect(self, identity: bytes, stream: MessageStream) -> None:
        """Add a node that was linked to the former process of this hub: it may want any message."""
        absent = AbsentNode(~self._bits & self._bits + 1, identity, stream)
        self._bits |= absent.bit
        self._counted |= absent.bit
        absent.lost_s = self._state.broker.clock()
        absent.until_s, absent.is_unknown = absent.lost_s + self.kept_s, True
        self.nodes.append(absent)
        self.add_filter(absent, "#", Wanted.MESSAGES)

    @property
    def has_unknown(self) -> bool:
        """Whether there may be shared subscriptions of which this process does not know."""
        return any(one.is_unknown for one in self.nodes)

    def add_topics(self, absent: AbsentNode, keys: list[Key]) -> None:
        """Record topics with subscribers at a lost node, except those announced again since its return."""
        if not absent.bit & self._counted:
            return
        bits = sum(one.bit for one in self._state.remotes if absent in self.at(one))
        for key in keys:
            if not bits or not self._state.interest.nodes(key) & bits:
                self._interest.add(key, absent.bit)

    def add_filter(self, absent: AbsentNode, text: str, wanted: int) -> None:
        """Record a filter of a lost node, unless the node is back and has announced it again."""
        if absent.bit & self._counted and not any(
            text in one.filters for one in self._state.remotes if absent.is_at(one)
        ):
            self._texts.setdefault(absent.bit, {})[text] = None
            self.filters.set(text, wanted, absent.bit)

    def at(self, node: RemoteNode) -> list[AbsentNode]:
        """Return the lost nodes that are reachable again as this node.

        Several nodes may share one address behind a router, so a match by id or process precedes one by address.
        """
        return [one for one in self.nodes if one.is_at(node)] or [one for one in self.nodes if one.is_followed(node)]

    def discard_topic(self, absent: AbsentNode, key: Key) -> None:
        """Forget a topic that a node has announced after its return."""
        self._interest.discard(key, absent.bit)

    def discard_filter(self, absent: AbsentNode, text: str) -> None:
        """Forget a filter that a node has announced after its return."""
        if self._texts.get(absent.bit, {}).pop(text, self) is None:
            self.filters.set(text, 0, absent.bit)

    def returned(self, node: RemoteNode) -> None:
        """Forget a lost node that has returned and announced all its topics."""
        for absent in self.at(node):
            self._forget(absent)

    def forget_expired(self) -> None:
        """Forget nodes that have been lost for `kept_s`."""
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
        self.on_forgotten(absent)
        run_in_background(self._forget_interest(absent.bit))

    def _forget_interest(self, bit: int) -> Iterator[None]:
        for keys in self._interest.keys(bit):
            for key in keys:
                self._interest.discard(key, bit)
                self._state.forget_routes(key)
            yield
        for count, text in enumerate(self._texts.pop(bit, ()), 1):
            self.filters.set(text, 0, bit)
            if not count % FILTERS_PER_STEP:
                yield
        self._bits &= ~bit

    # ---- missed messages

    def wanting(self, key: Key | None, tid: int, name: bytes | None = None) -> int:
        """Return the bits of lost nodes with subscribers of a topic.

        Args:
            key: the key of the topic; None if its name is unknown here.
            tid: its number.
            name: its name, when filters count, too.
        """
        bits = self._interest.nodes_of_number(tid) if key is None else self._interest.nodes(key)
        if name is not None and len(self.filters):
            bits |= self.filters.nodes(name)
        return bits & self._counted

    def left(self, bits: int) -> int:
        """Return the bits of lost nodes that have these bits still in sets of nodes."""
        return sum(one.bit for one in self.nodes if one.leaving & bits)

    def of(self, bits: int) -> list[AbsentNode]:
        """Return the lost nodes with these bits."""
        return [one for one in self.nodes if one.bit & bits]

    def counts(self, nodes: int) -> Callable[[bytes], object]:
        """Return a function that counts batches of a topic as missed by these nodes."""
        return lambda batch: self.missed(nodes, count_messages(batch))

    def missed(self, nodes: int, messages: int) -> bool:
        """Count messages that these nodes miss; return whether any of them is still in `nodes`."""
        copies = (nodes & self._counted).bit_count() * messages
        if copies:
            self._state.broker.stats.drop(Drop.LINK_LOST, copies)
        return bool(copies)

    def has_client(self, etid: int) -> bool:
        """Return whether an unknown ETID is that of a client of a lost node."""
        number = node_of(etid)
        if not number or not any(one.number == number for one in self.nodes):
            return False
        # Another node may have the number now; the ETID is then that of one of its former clients.
        is_taken = number == self._state.number or any(one.number == number for one in self._state.remotes)
        return not is_taken


# ---- Migration of hubs
#
#     the other node                 the old process            the new process
#         ◀──────────── PAUSE ────────────┘                     is a node without topics and clients
#     keeps messages for it
#         ──────────── PAUSED ──────────▶ freezes its clients,
#         ◀─── closes its channel ────────┘ and sends them ────▶ has all clients
#         ◀───────────────── SUCCESSOR, clients, interest, …, SUCCEED ──┘
#     SUCCEEDED, then the kept messages ───────────────────────▶ delivers them
#
# Packets identify a predecessor by its node number. A process with a fixed number, or with links through NATS, makes
# its links only after the old process has closed all links. When the migration fails, the old process is its successor.

MOVE_S = 10.0
"""Time for which a node keeps messages for a hub that migrates. Later they count as `LINK_LOST`."""
MAX_AWAITED = 64
"""The maximum number of nodes whose successor is awaited; above it, the oldest counts as lost."""
RUNS_PER_STEP = 64
"""Kept batches that one background step sends."""
_KEPT = frozenset(
    (
        smq.Type.PUBLISH,
        LinkType.CLOCK,
        LinkType.END,
        LinkType.MESSAGES,
        LinkType.STREAMED,
        LinkType.PART,
        LinkType.SESSION,
    )
)
"""The types of packets that are kept for a hub that migrates. The snapshot for the new process replaces all others."""


class ForwardingQueue(list[bytes]):
    """The send queue of a hub that has migrated: it forwards batches of stale routes to the new process."""

    def __init__(self, queue: NodeSendQueue) -> None:
        self._queue = queue

    def append(self, batch: bytes) -> None:
        """Forward the batch, if its type is kept during migrations."""
        if batch[2] in _KEPT:
            self._queue.put(batch)


class HubMigration:
    """The migrations in which one hub of a cluster takes part: those of hubs of other nodes, and that of this hub.

    Attributes:
        nodes: unreachable nodes whose hub migrates to a process that is not linked yet.
        awaits: whether this hub will take over the clients of another process, which still has them.
        on_moved: called with the old and the new node when a hub has migrated.
        on_lost: called with a node whose hub was not taken over in time.
    """

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self.nodes: list[RemoteNode] = []
        self.awaits = False
        self.on_moved: Callable[[RemoteNode, RemoteNode], object] = lambda before, node: None
        self.on_lost: Callable[[RemoteNode], object] = lambda node: None
        self._until_s: dict[RemoteNode, float] = {}
        """Until when messages are kept, by node: of paused nodes, and of those whose successor is awaited."""
        self._unpaused: set[RemoteNode] = set()
        self._predecessor = 0
        self._succeeds_until_s = 0.0

    def _now_s(self) -> float:
        return self._state.broker.clock()

    # ---- migration of a hub of another node

    def pauses(self, node: RemoteNode) -> None:
        """Keep messages for a hub that will migrate. A slow node, whose queue holds messages already, is ignored."""
        if node.send_queue.holds or node in self._until_s:
            return
        node.send_queue.send([bytes((LinkType.PAUSED,))])
        node.send_queue.keep()
        self._until_s[node] = self._now_s() + MOVE_S

    def awaits_successor_of(self, node: RemoteNode) -> bool:
        """Return whether messages are kept for an unreachable node: its hub migrates, so that it is not lost."""
        if not node.send_queue.keeps:
            return False
        if node not in self.nodes:
            self.nodes.append(node)
        if len(self.nodes) > MAX_AWAITED:
            self._give_up(self.nodes[0])
        return True

    def succeeds(self, node: RemoteNode, number: int) -> None:
        """Record `node` as the successor of the node `number`; messages are kept until its snapshot is complete."""
        found = (one for one in (*self.nodes, *self._state.remotes) if one.number == number and one.send_queue.keeps)
        before = next((one for one in found if one is not node), None)
        if before is not None:
            node.predecessor = before
            self._state.forget_value_routes()

    def succeeded(self, node: RemoteNode) -> None:
        """Send the kept messages to a successor, whose snapshot is complete."""
        before = node.predecessor
        if before is None:
            node.send_queue.send([bytes((LinkType.SUCCEEDED,))])
            if node.send_queue.keeps:  # the migration failed, and the hub stays in its old process
                del self._until_s[node]
                node.send_queue.keeps = False
                node.send_queue.release()
        else:
            if before not in self.nodes:  # the end of its link is not noticed yet
                self.nodes.append(before)
                self._state.remotes.remove(before)
            node.send_queue.send([bytes((LinkType.SUCCEEDED,))])
            run_in_background(self._send_kept(before, node))

    def _send_kept(self, before: RemoteNode, node: RemoteNode) -> Iterator[None]:
        kept, at = before.send_queue.queue, 0
        while at < len(kept) and not node.gone and not before.gone:  # `kept` may grow meanwhile
            for batch in kept[at : at + RUNS_PER_STEP]:
                if batch[2] in _KEPT:
                    node.send_queue.put(batch)  # in order, so that Clock and End packets stay between the same messages
            at += RUNS_PER_STEP
            if at < len(kept):
                yield
        if before.gone:  # given up meanwhile: the messages counted as lost
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
        """Return the node that gets messages for `node`: its predecessor, as long as messages are kept for that."""
        return node.predecessor or node

    # ---- migration of this hub

    def pause(self) -> None:
        """Ask the other nodes to keep messages for this hub; see `is_paused`."""
        self._unpaused = {node for node in self._state.remotes if node.send_queue.knows_succession}
        for node in self._unpaused:
            node.send_queue.send([bytes((LinkType.PAUSE,))])

    @property
    def is_paused(self) -> bool:
        """Whether all reachable nodes that received PAUSE have answered."""
        return not any(node in self._unpaused for node in self._state.remotes)

    def paused(self, node: RemoteNode) -> None:
        """Record that a node keeps messages for this hub."""
        self._unpaused.discard(node)

    def stay(self) -> None:
        """Cancel the migration: this node is its own successor."""
        number = self._state.number
        if self._state.remotes:
            for node in [one for one in self._state.remotes if one.send_queue.knows_succession]:
                node.send_queue.send([bytes((LinkType.SUCCEED,)) + number.to_bytes(2, "big")])
        else:
            self.begin(number)

    # ---- this hub as a successor

    def expect(self) -> None:
        """Await the clients of another process. Until then, messages of other nodes are for that process."""
        self.awaits = True
        for node in self._state.remotes:
            self.hold_for_predecessor(node)

    def begin(self, number: int) -> None:
        """Take over the clients of the hub of the node `number`; 0 if that hub was in no cluster."""
        self.awaits, self._predecessor = False, number
        self._succeeds_until_s = self._now_s() + MOVE_S if number else 0.0
        for node in self._state.remotes:
            node.hold(self._succeeds_at(node))

    def hold_for_predecessor(self, node: RemoteNode) -> None:
        """Hold the messages of a node as long as they are for the predecessor of this hub."""
        node.hold(node.send_queue.knows_succession and (self.awaits or self._succeeds_at(node)))

    def _succeeds_at(self, node: RemoteNode) -> bool:
        return node.send_queue.knows_succession and self._now_s() < self._succeeds_until_s

    def framed(self, node: RemoteNode, snapshot: Iterator[None]) -> Iterator[None]:
        """Send a snapshot; if this hub has a predecessor, between the packets with its number."""
        succeeds = node.is_held and not self.awaits
        if succeeds:
            node.send_queue.send([bytes((LinkType.SUCCESSOR,)) + self._predecessor.to_bytes(2, "big")])
        yield from snapshot
        if succeeds:
            node.send_queue.send([bytes((LinkType.SUCCEED,)) + self._predecessor.to_bytes(2, "big")])

    # ---- time limits

    def give_up_expired(self) -> None:
        """Cancel migrations that take longer than `MOVE_S`."""
        now_s = self._now_s()
        for node in [one for one, until_s in self._until_s.items() if until_s <= now_s]:
            self._give_up(node)
        if 0 < self._succeeds_until_s <= now_s:
            self._succeeds_until_s = 0.0
            for node in self._state.remotes:
                node.hold(False)

    def clear(self) -> None:
        """Cancel all migrations."""
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
