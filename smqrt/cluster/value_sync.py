"""Last values of topics, shared between nodes."""

from __future__ import annotations

from collections.abc import Iterator

from smqrt.broker.last_values import TopicValues, clock
from smqrt.broker.topics import Topic
from smqrt.cluster.remote_node import RemoteNode
from smqrt.cluster.state import ClusterState
from smqrt.wire import cluster_packets as wire
from smqrt.wire.cluster_packets import Key, LinkType

# Positions in a frame: u16 length, u8 type, u32 tid, u32 ptid, u32 stid.
_TID, _PTID, _STID = slice(3, 7), slice(7, 11), slice(11, 15)
_BODY = slice(3, None)


class ValueSync:
    """The last values that one hub sends to other nodes and takes from them."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state

    def snapshot(self, node: RemoteNode) -> Iterator[None]:
        """Send a node the last values of this hub, topic by topic."""
        for values in list(self._state.broker.last_values or ()):
            self._send_values(node, values)
            yield

    def _send_values(self, node: RemoteNode, values: TopicValues) -> None:
        knows_stamps = node.send_queue.knows_stamps
        removed = values.gone_frames() if knows_stamps else []
        if not values.newest and not removed:
            return
        key = self._state.key_of(values.topic)
        self.name_topic(node, values.topic, key)
        number = node.numbers.get(key, key[0])
        for frame in [*(one for one, _ in values.newest.values()), *removed]:
            ptid = int.from_bytes(frame[_PTID], "big")
            value = wire.rewritten(frame, number, self._state.public_etid(ptid))
            if knows_stamps:
                stamp = values.stamp(frame[_STID]).to_bytes(8, "big")
                node.send_queue.send([bytes((LinkType.VALUE_AT,)) + stamp + value[_BODY]])
            else:
                node.send_queue.send([bytes((LinkType.VALUE,)) + value[_BODY]])

    def name_topic(self, node: RemoteNode, topic: Topic, key: Key) -> None:
        """Send a node the name of a topic, once: it needs the name to keep the last values."""
        if key not in node.valued:
            node.valued.add(key)
            node.send_queue.send(wire.names(LinkType.TOPICS, [(key[0], topic.name or b"")]))

    def add_topic(self, name: bytes) -> None:
        """Create a topic whose last values this hub keeps: those of another node follow."""
        broker = self._state.broker
        values, table = broker.last_values, broker.topic_table
        if values is None or name in table.by_name or not values.selects_name(name):
            return
        if refusal := broker.limits.of_all(table, name):
            broker.refuse(None, refusal)
        else:
            table.named(name)

    def restore(self, frame: bytes, stamp: int | None, since: int) -> None:
        """Take a last value of another node, unless this hub has a newer one.

        Args:
            frame: the value, a Publish frame.
            stamp: when it was published; None from a node of an older release, which does not send it.
            since: when that node started, ns since 1970. A value without a stamp replaces one that an older release has
                written to a file before that: what was published while this node was down is newer.
        """
        values, topic = self._state.broker.last_values, self._state.broker.topic_table.by_key.get(frame[_TID])
        if values is None or topic is None or not values.selects(topic):
            return
        kept = values.of(topic)
        if stamp is not None:
            clock.heard(stamp)
            kept.take_told(frame, stamp)
        elif frame[_STID] not in kept.newest or (0 < since < self._state.epoch and not kept.stamp(frame[_STID])):
            kept.take_frame(frame, None)
