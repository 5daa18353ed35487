"""Retained messages of MQTT clients at all nodes of a cluster: the newest message of a topic wins."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from smqrt.broker.last_values import MAX_STAMP, clock
from smqrt.broker.mqtt.filters import mqtt_name
from smqrt.broker.mqtt.messages import Message
from smqrt.cluster.mqtt_nodes import MqttNodes, expires_s_of, left_ms_of
from smqrt.cluster.remote_node import RemoteNode
from smqrt.cluster.state import ClusterState
from smqrt.errors import CloseReason, ProtocolError
from smqrt.wire import cluster_mqtt
from smqrt.wire.cluster_mqtt import WireRetained

DELETED_S = 3600.0
"""The time for which a deletion is remembered: a node that was unreachable for longer brings the message back."""
MAX_DELETED = 100_000
"""The maximum number of deletions that are remembered; the oldest are forgotten first."""
SPARE_STAMPS = 10_000
"""Stamps of messages that have expired are removed when there are so many more stamps than messages."""


class RetainedSync:
    """The retained messages that one hub sends to other nodes and receives from them.

    Messages from a file, or of an earlier process, have the stamp 0, so that those of other nodes replace them.

    Args:
        state: the state that the parts of the cluster share.
        nodes: the nodes with links of version 2.
    """

    def __init__(self, state: ClusterState, nodes: MqttNodes) -> None:
        self._state, self._nodes = state, nodes
        self._stamps: dict[bytes, int] = {}
        """When the message of each topic was set or deleted."""
        self._deleted: dict[bytes, float] = {}
        """When each deletion is forgotten, on the clock of the broker; the oldest first."""

    def changed(self, name: bytes) -> None:
        """See `ClusterMqtt.retained_changed`."""
        self._record(name, max(clock.now(), self._stamps.get(name, 0) + 1))
        for node in self._nodes.nodes():
            if node.has_mqtt:
                self._send(node, name)

    def _record(self, name: bytes, stamp: int) -> None:
        now_s, kept = self._state.broker.clock(), self._state.broker.devices.retained.by_name
        self._stamps[name] = stamp
        self._deleted.pop(name, None)
        if name not in kept:
            self._deleted[name] = now_s + DELETED_S
        for oldest in list(islice(self._deleted, 2)):  # two for each change, so that it takes no long time
            if self._deleted[oldest] <= now_s or len(self._deleted) > MAX_DELETED:
                del self._deleted[oldest], self._stamps[oldest]
        if len(self._stamps) > len(kept) + len(self._deleted) + SPARE_STAMPS:
            self._stamps = {one: at for one, at in self._stamps.items() if one in kept or one in self._deleted}

    def _send(self, node: RemoteNode, name: bytes) -> None:
        broker = self._state.broker
        stamp, kept = self._stamps.get(name, 0), broker.devices.retained.by_name.get(name)
        if kept is not None:
            left_ms = left_ms_of(kept.expires_s, broker.clock())
            packet = WireRetained(stamp, name, kept.payload, kept.qos, kept.properties, left_ms)
        elif name in self._deleted:
            packet = WireRetained(stamp, name, b"")
        else:
            return
        node.send_queue.put(cluster_mqtt.retained(packet))

    def snapshot(self, node: RemoteNode) -> Iterator[None]:
        """Send a node the retained messages and the deletions of this hub, one in each step."""
        devices = self._state.broker.devices
        if devices is None or node.send_queue.version < cluster_mqtt.VERSION:
            return
        for name in [*devices.retained.by_name, *self._deleted]:
            self._send(node, name)
            yield

    def on_retained(self, node: RemoteNode, packet: bytes) -> None:
        """Process a Retained packet."""
        found = cluster_mqtt.parse_retained(self._nodes.body(node, packet[1:]))
        if found.stamp >= MAX_STAMP or mqtt_name(found.name) is None:
            raise ProtocolError(CloseReason.UNKNOWN_PACKET, "a retained message of another node is not valid")
        clock.heard(found.stamp)
        broker = self._state.broker
        if broker.devices is None or not self._is_newer(found):
            return
        expires_s = expires_s_of(found.left_ms, broker.clock())
        message = Message(found.name, found.payload, found.qos, True, found.properties, expires_s)
        if broker.devices.retained.set(message):
            self._record(found.name, found.stamp)

    def _is_newer(self, found: WireRetained) -> bool:
        """Return whether a message replaces the one here; all nodes decide alike, also when the stamps are equal."""
        stamp = self._stamps.get(found.name, 0)
        if found.stamp != stamp:
            return found.stamp > stamp
        kept = self._state.broker.devices.retained.by_name.get(found.name)
        return found.name not in self._deleted and found.payload > (b"" if kept is None else kept.payload)
