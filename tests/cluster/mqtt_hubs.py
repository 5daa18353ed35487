"""Hubs with MQTT clients at several nodes, with links in memory."""

from __future__ import annotations

from random import Random

from smqrt.cluster.clustered_broker import ClusteredBroker
from smqrt.cluster.link import Link
from smqrt.cluster.node import Node
from smqrt.settings.limits import MqttSettings
from smqrt.wire.cluster_packets import VERSION
from tests.broker.mqtt.hub import MqttHub
from tests.cluster.memory_links import MemoryNetwork


class MqttCluster:
    """Hubs of one cluster, each at a node of its own, which are linked to each other.

    Args:
        count: the number of nodes.
        versions: the link versions of some nodes.
        settings: the settings of the hubs.
        wait_s: see `SessionMoves`.

    Attributes:
        network: the links; `settle` lets everything arrive.
        hubs: the hubs; their clients are those of `MqttHub`.
        nodes, members: their nodes, and their parts in the cluster.
    """

    def __init__(
        self,
        count: int = 2,
        versions: dict[int, tuple[int, int]] | None = None,
        settings: MqttSettings | None = None,
        wait_s: float = 0.0,
    ) -> None:
        self.network = MemoryNetwork(Random(1))
        self.hubs = [MqttHub(settings=settings) for _ in range(count)]
        self.nodes: list[Node] = []
        self.members: list[ClusteredBroker] = []
        for at, hub in enumerate(self.hubs):
            node = self.network.node(number=at + 1)
            node.versions = (versions or {}).get(at, (1, VERSION))
            self.members.append(node.join(hub.broker, "hub"))
            self.members[-1].sessions.wait_s = wait_s
            self.nodes.append(node)
        for at, one in enumerate(self.nodes):
            for other in self.nodes[at + 1 :]:
                self.network.connect(one, other)
        self.settle()
        for member in self.members:
            member.streams.joined_s -= 60  # the nodes are linked for some time

    def settle(self) -> None:
        self.network.settle()

    def link(self, one: int, other: int) -> Link:
        """The link of one node to another."""
        return self.nodes[one].links[self.nodes[other].id]

    def cut(self, one: int, other: int) -> None:
        self.network.break_link(self.link(one, other))
        self.settle()

    def heal(self, one: int, other: int) -> None:
        self.network.connect(self.nodes[one], self.nodes[other])
        self.settle()

    def publish(self, at: int, name: bytes, *payloads: bytes, qos: int = 0) -> bool:
        """Publish as an MQTT client of a node; gives whether the topic was needed."""
        is_needed = self.hubs[at].publish(name, *payloads, qos=qos)
        self.settle()
        return is_needed
