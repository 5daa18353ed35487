"""Numbers of subscribers of a topic over all nodes of a cluster, for observers and for the other nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from smqrt.broker.outbox import put_off
from smqrt.broker.topics import Topic
from smqrt.cluster.remote_node import RemoteNode
from smqrt.wire import cluster_packets as wire
from smqrt.wire.cluster_packets import Key, LinkType

if TYPE_CHECKING:
    from smqrt.cluster.clustered_broker import Member


class Counts:
    """The numbers of subscribers that one hub knows, and tells.

    Args:
        member: the hub's part in the cluster.

    Attributes:
        watching: topics that somebody observes here, and how many subscribe at each other node.
        recounted: topics whose number of subscribers here has changed, which the other nodes are to be told.
    """

    def __init__(self, member: Member) -> None:
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
                put_off(self._tell_changed())
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
