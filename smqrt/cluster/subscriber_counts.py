"""Numbers of subscribers of a topic at all nodes, for observers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from smqrt.broker.outbox import run_in_background
from smqrt.broker.topics import Topic
from smqrt.cluster.remote_node import RemoteNode
from smqrt.cluster.state import ClusterState
from smqrt.wire import cluster_packets as wire
from smqrt.wire.cluster_packets import Key, LinkType


class SubscriberCounts:
    """The numbers of subscribers that one hub requests from other nodes, and those that it sends them.

    Attributes:
        watching: by observed topic, how many subscribers each other node has.
        recounted: topics whose number of subscribers here has changed and is not sent yet.
    """

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._counts_all = False
        self.watching: dict[Key, dict[RemoteNode, int]] = {}
        self.recounted: dict[Topic, None] = {}

    def count_all(self) -> None:
        """Count the subscribers of all nodes for observers, also for those that observe already."""
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
        """Take the number of subscribers that a node has."""
        topic = self._state.topic_of(key)
        if topic is None or not topic.observers:
            self.watching.pop(key, None)
            node.send_queue.send(wire.keys(LinkType.UNWATCH, [key]))
        elif key in self.watching:
            self.watching[key][node] = subscribers
            self._recount(topic, key)

    def _recount(self, topic: Topic, key: Key) -> None:
        topic.elsewhere = sum(self.watching[key].values())
        self._state.broker.changed_count(topic)

    def forget(self, node: RemoteNode) -> Iterator[None]:
        """Subtract the subscribers of a lost node, in portions."""
        for key, counts in list(self.watching.items()):
            topic = self._state.topic_of(key)
            if counts.pop(node, 0) and topic is not None:
                self._recount(topic, key)
            yield

    def changed(self, topic: Topic) -> None:
        """Send the new number of subscribers to the nodes that watch a topic, later in this turn."""
        if any(node.watched for node in self._state.remotes):
            if not self.recounted:
                run_in_background(self._send_changed())
            self.recounted[topic] = None

    def _send_changed(self) -> Iterator[None]:
        changed, self.recounted = self.recounted, {}
        for topic in changed:
            key = self._state.key_of(topic)
            self.send([key], [node for node in self._state.remotes if key in node.watched])
            yield

    def send(self, keys: Iterable[Key], to: Iterable[RemoteNode]) -> None:
        """Send nodes the numbers of subscribers of topics here."""
        counts = []
        for key in keys:
            topic = self._state.topic_of(key)
            counts.append((*key, topic.subscribers if topic is not None else 0))
        for node in to:
            node.send_queue.send(wire.keys_and_numbers(LinkType.COUNT, counts))
