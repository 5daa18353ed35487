"""Shared state of one hub's membership in a cluster.

The parts of `ClusteredBroker` use it: the other nodes, the names of topics, and the ETIDs that other nodes use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from smqrt.broker.broker import Broker
from smqrt.broker.outbox import ahead
from smqrt.broker.topics import Topic
from smqrt.cluster.interest import Interest
from smqrt.cluster.remote_node import RemoteNode
from smqrt.wire import smq
from smqrt.wire.cluster_packets import Key
from smqrt.wire.smq import NameNumbers


class ClusterState:
    """What the parts of a clustered hub share.

    Args:
        broker: the hub.
        key: at most 64 bytes, a secret that all nodes share; the numbers of topics are made with it.
        clock_ms: the time, in ms since 1970.

    Attributes:
        epoch: when this node started, ns since 1970.
        remotes: the other nodes.
        interest: the topics that the other nodes want.
        bits: the bits of the other nodes in sets of nodes, also of those whose clients are being forgotten.
        numbers: makes the numbers of topics from their names.
        renumbered: topics whose number here differs from the one that their name gives.
        public: by ETID here, the ETID that other nodes use for the server, or for a client whose ETID has another node
            number.
        local: the same by that ETID.
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
        """Draw an ETID with the number of this node, for other nodes to use for a client."""
        self.public[etid] = public = self.broker.topic_table.draw()
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
        """Have publishers resolve the routes to a topic again."""
        topic = self.broker.topic_table.by_key.get(key[0].to_bytes(4, "big"))
        if topic is not None:
            topic.forget_routes()
        if self.renumbered and key in self.renumbered:
            self.renumbered[key].forget_routes()

    def forget_value_routes(self) -> None:
        """Have publishers resolve the routes to all topics with last values again."""
        if self.broker.last_values is not None:
            for values in self.broker.last_values:
                values.topic.forget_routes()

    # ---- the other nodes

    def send_all(self, packets: Iterable[bytes]) -> None:
        """Send control packets to all other nodes."""
        if self.remotes:
            for frame in [smq.frame(packet) for packet in packets]:
                for node in self.remotes:
                    node.send_queue.put(frame)
            # Flushed before clients: a client that has its answer may cause messages that rely on these packets.
            ahead.update(dict.fromkeys(node.send_queue for node in self.remotes))

    def nodes_with(self, bits: int, others: Iterable[RemoteNode] = ()) -> Iterator[RemoteNode]:
        """Return the nodes of a set of bits, of the remote ones and `others`."""
        return (node for node in (*self.remotes, *others) if node.bit & bits)
