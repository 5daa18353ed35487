"""Interest of other nodes: which of them have subscribers of a topic.

Names do not travel, only the two numbers that every node makes of a name (`smqrt.wire.smq.NameNumbers`). A topic takes
one entry of one dictionary, whatever the number of nodes that want it: about 120 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from smqrt.broker.outbox import run_in_background
from smqrt.broker.topics import Topic
from smqrt.cluster.remote_node import RemoteNode
from smqrt.wire import cluster_packets as wire
from smqrt.wire.cluster_packets import Key, LinkType

if TYPE_CHECKING:
    from smqrt.cluster.clustered_broker import ClusteredBroker


_CHECK_BITS = 32
LOOKED_AT_AT_ONCE = 1000
_CHECK = (1 << _CHECK_BITS) - 1


class Interest:
    """The interest of all other nodes together. A set of nodes is a number with a bit for each."""

    def __init__(self) -> None:
        # By number: the nodes above the check, in one number, which is the smallest that Python can keep both in.
        self._entries: dict[int, int] = {}
        self._clashes: dict[Key, int] = {}
        """Those whose number another name has here already: two of 200,000 topics, now and then."""
        self._clashing: dict[int, dict[int, None]] = {}
        """The checks of those, by number."""

    def __len__(self) -> int:
        return len(self._entries) + len(self._clashes)

    def add(self, key: Key, node: int) -> bool:
        """The node with this bit wants a topic; whether it did not before."""
        number, check = key
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
        """It does not any more; whether it did."""
        number, check = key
        entry = self._entries.get(number)
        if entry is not None and entry & _CHECK == check:
            nodes = entry >> _CHECK_BITS
            if nodes & ~node:
                self._entries[number] = (nodes & ~node) << _CHECK_BITS | check
            else:
                del self._entries[number]
                self._promote(number)
            return bool(nodes & node)
        before = self._clashes.get(key, 0)
        if before & ~node:
            self._clashes[key] = before & ~node
        elif before:
            del self._clashes[key], self._clashing[number][check]
            if not self._clashing[number]:
                del self._clashing[number]
        return bool(before & node)

    def _promote(self, number: int) -> None:
        """Let another name have the number, whose first name is wanted no more."""
        checks = self._clashing.get(number)
        if checks:
            check, _ = checks.popitem()
            self._entries[number] = self._clashes.pop((number, check)) << _CHECK_BITS | check
            if not checks:
                del self._clashing[number]

    def nodes(self, key: Key) -> int:
        """The nodes that want a topic."""
        number, check = key
        entry = self._entries.get(number)
        if entry is None or entry & _CHECK != check:
            return self._clashes.get(key, 0) if self._clashes else 0
        return entry >> _CHECK_BITS

    def nodes_of_number(self, number: int) -> int:
        """The nodes that want the topic with this number, whose name is not known here."""
        return self._entries.get(number, 0) >> _CHECK_BITS

    def keys(self, node: int) -> Iterator[list[Key]]:
        """The topics that a node wants, of those that were there when the iteration began: in portions, each of a
        thousand topics that anybody wants.
        """
        numbers, clashes = iter(list(self._entries)), iter(list(self._clashes))
        while keys := list(islice(clashes, LOOKED_AT_AT_ONCE)):
            yield [key for key in keys if self._clashes.get(key, 0) & node]
        while portion := list(islice(numbers, LOOKED_AT_AT_ONCE)):
            entries = [(number, self._entries.get(number, 0)) for number in portion]
            yield [(number, entry & _CHECK) for number, entry in entries if entry >> _CHECK_BITS & node]


# ---- Numbers of subscribers of a topic over all nodes of a cluster, for observers and for the other nodes.


class Counts:
    """The numbers of subscribers that one hub knows, and tells.

    Args:
        member: the hub's part in the cluster.

    Attributes:
        watching: topics that somebody observes here, and how many subscribe at each other node.
        recounted: topics whose number of subscribers here has changed, which the other nodes are to be told.
    """

    def __init__(self, member: ClusteredBroker) -> None:
        self._member = member
        self._counts_all = False
        self.watching: dict[Key, dict[RemoteNode, int]] = {}
        self.recounted: dict[Topic, None] = {}

    def count_all(self) -> None:
        """Tell observers the subscribers of all nodes, also those who observe already."""
        self._counts_all = True
        for topic in self._member.broker.topic_table.by_name.values():
            if topic.observers:
                self.observed(topic)

    def observed(self, topic: Topic) -> None:
        """Somebody here observes a topic."""
        key = self._member.key_of(topic)
        if self._counts_all and key not in self.watching:
            self.watching[key] = {}
            self._member.tell(wire.keys(LinkType.WATCH, [key]))

    def counted(self, node: RemoteNode, key: Key, subscribers: int) -> None:
        """A node has so many subscribers of a topic."""
        topic = self._member.topic_of(key)
        if topic is None or not topic.observers:
            self.watching.pop(key, None)
            node.way.say(wire.keys(LinkType.UNWATCH, [key]))
        elif key in self.watching:
            self.watching[key][node] = subscribers
            self._recount(topic, key)

    def _recount(self, topic: Topic, key: Key) -> None:
        topic.elsewhere = sum(self.watching[key].values())
        self._member.broker.changed_count(topic)

    def forget(self, node: RemoteNode) -> Iterator[None]:
        """A lost node has no subscribers."""
        for key, counts in list(self.watching.items()):
            topic = self._member.topic_of(key)
            if counts.pop(node, 0) and topic is not None:
                self._recount(topic, key)
            yield

    def changed(self, topic: Topic) -> None:
        """A topic has more or fewer subscribers here: tell the nodes that want to know, later in this turn."""
        if any(node.watched for node in self._member.remotes):
            if not self.recounted:
                run_in_background(self._tell_changed())
            self.recounted[topic] = None

    def _tell_changed(self) -> Iterator[None]:
        changed, self.recounted = self.recounted, {}
        for topic in changed:
            key = self._member.key_of(topic)
            self.tell([key], [node for node in self._member.remotes if key in node.watched])
            yield

    def tell(self, keys: Iterable[Key], to: Iterable[RemoteNode]) -> None:
        """Tell nodes how many subscribe to topics here."""
        counts = []
        for key in keys:
            topic = self._member.topic_of(key)
            counts.append((*key, topic.subscribers if topic is not None else 0))
        for node in to:
            node.way.say(wire.keys_and_numbers(LinkType.COUNT, counts))
