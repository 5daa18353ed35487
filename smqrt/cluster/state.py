"""Cluster state of one hub: nodes, topics, ETIDs, counts and last values.

The parts of `ClusteredBroker` share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from smqrt.broker.broker import Broker
from smqrt.broker.last_values import clock
from smqrt.broker.outbox import ahead, run_in_background
from smqrt.broker.topics import Topic
from smqrt.cluster.remote_node import RemoteNode
from smqrt.wire import cluster_packets as wire
from smqrt.wire import smq
from smqrt.wire.cluster_packets import Key, LinkType
from smqrt.wire.smq import NameNumbers

# ---- Topics with subscribers at other nodes
#
# Nodes exchange the two numbers that each node derives from a name (`smqrt.wire.smq.NameNumbers`), not the name. A
# topic takes one dictionary entry of about 120 bytes, also when it has subscribers at many nodes.

_CHECK_BITS = 32
_CHECK = (1 << _CHECK_BITS) - 1
BATCH_TOPICS = 1000
"""The number of topics that `Interest.keys` examines in one step."""


class Interest:
    """The topics with subscribers at other nodes. A set of nodes is an integer with one bit for each."""

    def __init__(self) -> None:
        # By number: one integer with the bits of the nodes above the check. No other object with both is smaller.
        self._entries: dict[int, int] = {}
        self._clashes: dict[Key, int] = {}
        """Topics whose number is in `_entries` for another name: about two of 200,000."""
        self._clashing: dict[int, dict[int, None]] = {}
        """The checks of these topics, by number."""

    def __len__(self) -> int:
        return len(self._entries) + len(self._clashes)

    def add(self, key: Key, node: int) -> bool:
        """Add a topic for the node with this bit; return whether it was missing."""
        number, check = key  # the check distinguishes names with the same number
        entry = self._entries.get(number)
        if entry is None:
            self._entries[number] = node << _CHECK_BITS | check
            return True
        if entry & _CHECK == check:
            self._entries[number] = entry | node << _CHECK_BITS
            return not entry >> _CHECK_BITS & node
        before = self._clashes.get(key, 0)
        self._clashes[key] = before | node
        self._clashing.setdefault(number, {})[check] = None
        return not before & node

    def discard(self, key: Key, node: int) -> bool:
        """Remove a topic of the node with this bit; return whether the node had it."""
        number, check = key
        entry = self._entries.get(number)
        if entry is not None and entry & _CHECK == check:
            nodes = entry >> _CHECK_BITS
            if nodes & ~node:
                self._entries[number] = (nodes & ~node) << _CHECK_BITS | check
            else:
                del self._entries[number]
                # Another name with this number moves here from `_clashes`.
                if checks := self._clashing.get(number):
                    check, _ = checks.popitem()
                    self._entries[number] = self._clashes.pop((number, check)) << _CHECK_BITS | check
                    if not checks:
                        del self._clashing[number]
            return bool(nodes & node)
        before = self._clashes.get(key, 0)
        if before & ~node:
            self._clashes[key] = before & ~node
        elif before:
            del self._clashes[key], self._clashing[number][check]
            if not self._clashing[number]:
                del self._clashing[number]
        return bool(before & node)

    def nodes(self, key: Key) -> int:
        """Return the bits of the nodes with subscribers of a topic."""
        number, check = key
        entry = self._entries.get(number)
        if entry is None or entry & _CHECK != check:
            return self._clashes.get(key, 0) if self._clashes else 0
        return entry >> _CHECK_BITS

    def nodes_of_number(self, number: int) -> int:
        """Return the bits of the nodes with subscribers of a topic whose name this hub does not have."""
        return self._entries.get(number, 0) >> _CHECK_BITS

    def keys(self, node: int) -> Iterator[list[Key]]:
        """Yield the topics of a node, of those that exist when the iteration begins.

        Each portion comes from `BATCH_TOPICS` topics of all nodes, so it may be empty.
        """
        numbers, clashes = iter(list(self._entries)), iter(list(self._clashes))
        while keys := list(islice(clashes, BATCH_TOPICS)):
            yield [key for key in keys if self._clashes.get(key, 0) & node]
        while portion := list(islice(numbers, BATCH_TOPICS)):
            entries = [(number, self._entries.get(number, 0)) for number in portion]
            yield [(number, entry & _CHECK) for number, entry in entries if entry >> _CHECK_BITS & node]


class ClusterState:
    """The state that the parts of a clustered hub share.

    Args:
        broker: the hub.
        key: at most 64 bytes, a secret that all nodes share; it determines the numbers of topics.
        clock_ms: the time, in ms since 1970.

    Attributes:
        epoch: when this node started, ns since 1970.
        remotes: the other nodes.
        interest: the topics with subscribers at other nodes.
        bits: the bits of the other nodes in sets of nodes, also of former nodes that are not completely removed.
        numbers: derives the numbers of topics from their names.
        renumbered: topics whose number here differs from the one that their name gives.
        public: the ETIDs that other nodes use for the server, and for clients whose ETIDs have another node number, by
            the ETID here.
        local: the inverse of `public`.
    """

    def __init__(self, broker: Broker, key: bytes, clock_ms: Callable[[], int]) -> None:
        self.broker, self.clock_ms = broker, clock_ms
        self.epoch = 0
        self.remotes: list[RemoteNode] = []
        self.interest = Interest()
        self.bits = 0
        self.numbers = NameNumbers(key)
        self.renumbered: dict[Key, Topic] = {}
        self.public: dict[int, int] = {}
        self.local: dict[int, int] = {}

    @property
    def number(self) -> int:
        """This node's number."""
        return self.broker.topic_table.node

    def public_etid(self, etid: int) -> int:
        """Return the ETID that other nodes use for a client of this hub."""
        return self.public.get(etid, etid)

    def assign_public_etid(self, etid: int) -> None:
        """Draw an ETID with the number of this node, which other nodes will use for a client."""
        self.public[etid] = public = self.broker.topic_table.etid()
        self.local[public] = etid

    # ---- topics

    def key_of(self, topic: Topic) -> Key:
        """Return the key that all nodes use for a topic with a name."""
        return self.numbers.topic(topic.name or b"")

    def topic_of(self, key: Key) -> Topic | None:
        """Return the topic with this key; None when this hub has none."""
        topic = self.renumbered.get(key) or self.broker.topic_table.by_key.get(key[0].to_bytes(4, "big"))
        return topic if topic is not None and topic.name is not None and self.key_of(topic) == key else None

    def forget_routes(self, key: Key) -> None:
        """Remove cached routes to a topic."""
        topic = self.broker.topic_table.by_key.get(key[0].to_bytes(4, "big"))
        if topic is not None:
            topic.forget_routes()
        if self.renumbered and key in self.renumbered:
            self.renumbered[key].forget_routes()

    def forget_value_routes(self) -> None:
        """Remove cached routes to all topics with last values."""
        if self.broker.last_values is not None:
            for values in self.broker.last_values:
                values.topic.forget_routes()

    # ---- the other nodes

    def send_all(self, packets: Iterable[bytes], to: list[RemoteNode] | None = None) -> None:
        """Send control packets to all other nodes, or to those of a list."""
        nodes = self.remotes if to is None else to
        if nodes:
            for frame in [smq.frame(packet) for packet in packets]:
                for node in nodes:
                    node.send_queue.put(frame)
            # Flushed before clients: a client that receives its answer may cause messages that depend on these packets.
            ahead.update(dict.fromkeys(node.send_queue for node in nodes))

    def nodes_with(self, bits: int, others: Iterable[RemoteNode] = ()) -> Iterator[RemoteNode]:
        """Return the nodes of a set of bits, of the remote ones and `others`."""
        return (node for node in (*self.remotes, *others) if node.bit & bits)


# ---- Subscriber counts of all nodes


class SubscriberCounts:
    """The numbers of subscribers that one hub requests from other nodes and sends to them.

    Attributes:
        watching: the number of subscribers at each other node, by observed topic.
        recounted: topics with a new number of subscribers here that is not sent yet.
    """

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._counts_all = False
        self.watching: dict[Key, dict[RemoteNode, int]] = {}
        self.recounted: dict[Topic, None] = {}

    def count_all(self) -> None:
        """Count the subscribers of all nodes for all observers, present ones included."""
        self._counts_all = True
        for topic in self._state.broker.topic_table.by_name.values():
            if topic.observers:
                self.observed(topic)

    def observed(self, topic: Topic) -> None:
        """Request the counts of a topic that has an observer here; see `ClusterHooks`."""
        key = self._state.key_of(topic)
        if self._counts_all and key not in self.watching:
            self.watching[key] = {}
            self._state.send_all(wire.keys(LinkType.WATCH, [key]))

    def counted(self, node: RemoteNode, key: Key, subscribers: int) -> None:
        """Record the number of subscribers at a node."""
        topic = self._state.topic_of(key)
        if topic is None or not topic.observers:
            self.watching.pop(key, None)
            node.send_queue.send(wire.keys(LinkType.UNWATCH, [key]))
        elif key in self.watching:
            self.watching[key][node] = subscribers
            self._recount(topic, key)

    def _recount(self, topic: Topic, key: Key) -> None:
        topic.for_nodes().elsewhere = sum(self.watching[key].values())
        self._state.broker.notify_observers_later(topic)

    def forget(self, node: RemoteNode) -> Iterator[None]:
        """Subtract the subscribers of a lost node, in portions."""
        for key, counts in list(self.watching.items()):
            topic = self._state.topic_of(key)
            if counts.pop(node, 0) and topic is not None:
                self._recount(topic, key)
            yield

    def changed(self, topic: Topic) -> None:
        """Send the new number of subscribers to the nodes that watch a topic, in the background."""
        if any(node.watched for node in self._state.remotes):
            if not self.recounted:  # many changes in one turn are sent once
                run_in_background(self._send_changed())
            self.recounted[topic] = None

    def _send_changed(self) -> Iterator[None]:
        changed, self.recounted = self.recounted, {}
        for topic in changed:
            key = self._state.key_of(topic)
            self.send([key], [node for node in self._state.remotes if key in node.watched])
            yield

    def send(self, keys: Iterable[Key], to: Iterable[RemoteNode]) -> None:
        """Send the numbers of subscribers here to nodes."""
        counts = []
        for key in keys:
            topic = self._state.topic_of(key)
            counts.append((*key, topic.subscribers if topic is not None else 0))
        for node in to:
            node.send_queue.send(wire.keys_and_numbers(LinkType.COUNT, counts))


# ---- Last values

_BODY = slice(3, None)  # a frame without u16 length and u8 type


class ValueSync:
    """The last values that one hub sends to other nodes and receives from them."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state

    def snapshot(self, node: RemoteNode) -> Iterator[None]:
        """Send the last values of this hub to a node, topic by topic."""
        knows_stamps = node.send_queue.knows_stamps
        for values in list(self._state.broker.last_values or ()):
            removed = values.deletion_frames() if knows_stamps else []
            if values.newest or removed:
                key = self._state.key_of(values.topic)
                self.name_topic(node, values.topic, key)
                number = node.numbers.get(key, key[0])
                for frame in [*(one for one, _ in values.newest.values()), *removed]:
                    ptid = int.from_bytes(frame[smq.PTID], "big")
                    value = wire.rewritten(frame, number, self._state.public_etid(ptid))
                    if knows_stamps:
                        stamp = values.stamp(frame[smq.STID]).to_bytes(8, "big")
                        node.send_queue.send([bytes((LinkType.VALUE_AT,)) + stamp + value[_BODY]])
                    else:
                        node.send_queue.send([bytes((LinkType.VALUE,)) + value[_BODY]])
            yield

    def name_topic(self, node: RemoteNode, topic: Topic, key: Key) -> None:
        """Send the name of a topic to a node, once: the node needs it to keep last values."""
        if key not in node.valued:
            node.valued.add(key)
            node.send_queue.send(wire.names(LinkType.TOPICS, [(key[0], topic.name or b"")]))

    def add_topic(self, name: bytes) -> None:
        """Create a topic for last values that another node will send, if this hub keeps last values of it."""
        broker = self._state.broker
        values, table = broker.last_values, broker.topic_table
        if values is None or name in table.by_name or not values.selects_name(name):
            return
        if refusal := broker.limits.of_all(table, name):
            broker.refuse(None, refusal)
        else:
            table.named(name)

    def restore(self, frame: bytes, stamp: int | None, since: int) -> None:
        """Store a last value of another node, unless this hub has a newer one.

        Args:
            frame: the value, a Publish frame.
            stamp: when it was published; None from a node of an older release.
            since: when that node started, ns since 1970. Without a stamp, the value replaces one from a file of an
                older release if that node started before this one: it may be newer than the file.
        """
        values, topic = self._state.broker.last_values, self._state.broker.topic_table.by_key.get(frame[smq.TID])
        if values is None or topic is None or not values.selects(topic):
            return
        kept = values.of(topic)
        if stamp is not None:
            clock.heard(stamp)
            kept.merge_remote(frame, stamp)
        elif frame[smq.STID] not in kept.newest or (0 < since < self._state.epoch and not kept.stamp(frame[smq.STID])):
            kept.take_frame(frame, None)
