"""Hubs with MQTT clients at several nodes, with links in memory."""

from __future__ import annotations

import sqlite3
from random import Random

from smqrt.auth.identity import Identity, Method
from smqrt.broker.mqtt.saved_sessions import saved_record
from smqrt.broker.outbox import flush_dirty
from smqrt.cluster.clustered_broker import ClusteredBroker
from smqrt.cluster.link import Link
from smqrt.cluster.node import Node
from smqrt.settings.limits import MqttSettings
from smqrt.smq import mqtt_tables
from smqrt.smq.mqtt_file import restore
from smqrt.wire.cluster_packets import VERSION
from smqrt.wire.mqtt.fields import PacketType
from smqrt.wire.mqtt.packets import (
    ConnectPacket,
    PacketSplitter,
    SubscribePacket,
    Subscription,
    decode_publish,
    encode,
)
from tests.broker.mqtt.hub import MqttHub
from tests.broker.mqtt.memory_devices import MemoryDevice
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
        for at, hub in enumerate(self.hubs):
            self._open(at, hub)
        self.nodes: list[Node] = []
        self.members: list[ClusteredBroker] = []
        for at, hub in enumerate(self.hubs):
            node = self.network.node(number=at + 1)
            node.versions = (versions or {}).get(at, (1, VERSION))
            self.members.append(node.join(hub.broker, "hub"))
            self.members[-1].sessions.wait_s, self.members[-1].sessions.transit_s = wait_s, 0.0
            self.nodes.append(node)
        for at, one in enumerate(self.nodes):
            for other in self.nodes[at + 1 :]:
                self.network.connect(one, other)
        self.settle()

    def _open(self, at: int, hub: MqttHub) -> None:
        """Open the file of a hub, if it has one."""

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


class FileCluster(MqttCluster):
    """Two hubs whose sessions are in files in memory; a test writes them, and kills the hubs."""

    def __init__(self, wait_s: float = 0.0) -> None:
        self.files = [sqlite3.connect(":memory:", isolation_level=None) for _ in range(2)]
        super().__init__(wait_s=wait_s)
        self._wait_s = wait_s

    def _open(self, at: int, hub: MqttHub) -> None:
        for schema in mqtt_tables.SCHEMAS:
            self.files[at].execute(schema)
        restore(self.files[at], hub.devices, 0.0)

    def commit(self, at: int) -> None:
        """Write what has changed until now, but let nothing wait for it yet."""
        ledger = self.hubs[at].devices.ledger
        while flush_dirty():
            pass
        group = ledger.begin_group()
        for _ in ledger.fill(group, saved_record):
            pass
        with self.files[at] as file:
            file.execute("BEGIN")
            mqtt_tables.write(file, group, 0.0)
        ledger.saved = group.through

    def write(self, at: int) -> None:
        """Let the disk do everything."""
        ledger = self.hubs[at].devices.ledger
        for _ in range(6):
            self.commit(at)
            for _ in ledger.released():
                pass
            self.settle()

    def kill(self, at: int) -> None:
        """End a process without notice."""
        node = self.nodes[at]
        self.network.nodes.remove(node)
        for link in list(node.links.values()):
            self.network.break_link(link)
        self.settle()

    def start(self, at: int, is_linked: bool = True) -> None:
        """Start it again, with its file."""
        hub = self.hubs[at] = MqttHub()
        hub.now_s = self.hubs[1 - at].now_s
        self._open(at, hub)
        node = self.nodes[at] = self.network.node(number=at + 1)
        self.members[at] = node.join(hub.broker, "hub")
        self.members[at].sessions.wait_s, self.members[at].sessions.transit_s = self._wait_s, 0.0
        if is_linked:
            self.network.connect(self.nodes[0], self.nodes[1])
        self.settle()
        self.write(at)


KEPT = {"sessionexpiryinterval": 3600}


class Device:
    """An MQTT 5 client that connects to a node.

    Attributes:
        is_kept: whether the node has said that there is a session.
        closed_with: the reason code of the node's DISCONNECT; None before it.
        acknowledged: the packet identifiers of PUBACK and PUBREC.
    """

    def __init__(
        self,
        cluster: MqttCluster,
        at: int,
        client_id: str,
        clean: bool = False,
        user: str | None = None,
        qos: int = 1,
    ) -> None:
        self.cluster, self.qos = cluster, qos
        self.inner = MemoryDevice(cluster.hubs[at])  # type: ignore[arg-type]
        if user is not None:
            self.inner.session.identity = Identity(user, method=Method.NONE)
        self.is_kept: bool | None = None
        self.closed_with: int | None = None
        self.payloads: list[bytes] = []
        self.numbers: list[int] = []
        self.acknowledged: list[int] = []
        self._splitter = PacketSplitter(1 << 24)
        self.send(ConnectPacket(5, client_id, clean, 0, KEPT))

    def send(self, packet: object) -> None:
        self.inner.feed(encode(packet, 5))  # type: ignore[arg-type]
        self.settle()

    def settle(self) -> None:
        """Let everything arrive."""
        self.cluster.settle()
        self._splitter.feed(self.inner.take())
        while (packet := self._splitter.next()) is not None:
            first, body = packet
            kind = first >> 4
            if kind == PacketType.CONNACK:
                self.is_kept = None if body[1] else bool(body[0])
            elif kind == PacketType.DISCONNECT:
                self.closed_with = body[0] if body else 0
            elif kind in (PacketType.PUBACK, PacketType.PUBREC):
                self.acknowledged.append(body[0] << 8 | body[1])
            elif kind == PacketType.PUBLISH:
                message = decode_publish(first, body, 5)
                self.payloads.append(message.payload)
                if message.qos:
                    self.numbers.append(message.packet_identifier)

    def take(self) -> list[bytes]:
        self.settle()
        found, self.payloads = self.payloads, []
        return found

    def subscribe(self, *filters: str) -> Device:
        self.send(SubscribePacket(1, [Subscription(one, self.qos) for one in filters]))
        return self

    def lost(self) -> None:
        self.inner.lost()
        self.settle()

    def publish(self, name: str, payload: bytes, number: int, qos: int, dup: bool = False) -> None:
        """Send PUBLISH."""
        first = 0x30 | qos << 1 | dup << 3
        body = len(name).to_bytes(2) + name.encode() + number.to_bytes(2) + b"\0" + payload
        self.inner.feed(bytes((first, len(body))) + body)
        self.settle()
