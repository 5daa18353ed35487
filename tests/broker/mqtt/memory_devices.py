"""MQTT clients of a hub without sockets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from smqrt.broker.mqtt.client import MqttClient
from smqrt.broker.mqtt.devices import Devices
from smqrt.broker.outbox import Outbox
from smqrt.broker.state import Hooks
from smqrt.errors import CloseReason, MqttError
from smqrt.settings.limits import MqttSettings
from smqrt.wire.mqtt.packets import PacketSplitter
from tests.broker.memory_clients import Crowd, settle


class DeviceEar(Outbox):
    """An MQTT client's side: keeps the bytes that were sent to it."""

    has_room = True
    session: MqttClient

    def __init__(self) -> None:
        super().__init__()
        self.got: list[bytes] = []
        self.resumes = 0

    def send_packet(self, data: bytes) -> None:
        self.got.append(data)

    def send_packets(self, data: bytes, key: bytes) -> None:
        self.got.append(data)

    def reply(self, packet: bytes) -> None:
        if packet[0] == 3:
            self.session.connack()

    def finish(self, reason: CloseReason) -> None:
        pass

    def resume(self) -> None:
        if self.session.skips_resume:
            self.session.skips_resume = False
        else:
            self.resumes += 1


class MemoryDevice:
    """Feeds bytes to a client of the hub as `MqttConnection` does."""

    def __init__(self, hub: DeviceHub) -> None:
        self.ear = DeviceEar()
        self.session = self.ear.session = MqttClient(hub.broker, self.ear, 5)
        self._splitter = PacketSplitter(hub.devices.limits.packet_bytes)
        self._splitter.only = 0x10

    def feed(self, data: bytes) -> None:
        self._splitter.feed(data)
        try:
            while not self.session.closed and (packet := self._splitter.next()) is not None:
                self._splitter.only = 0
                waits = self.session.packet(*packet)
                while waits and not self.session.closed:
                    settle()
                    waits = self.session.continue_packets()
            self.session.publish_collected()
        except MqttError as error:
            self.session.publish_collected()
            self.session.fail_mqtt(error)

    def take(self) -> bytes:
        """What the client got since the last call."""
        settle()
        got, self.ear.got = b"".join(self.ear.got), []
        return got

    def lost(self) -> None:
        self.session.disconnect(CloseReason.PEER_CLOSED)


class DeviceHub:
    """A hub that takes MQTT clients, whose time a test sets."""

    def __init__(self, hooks: Hooks | None = None, limits: MqttSettings | None = None) -> None:
        self.broker = Crowd(hooks).broker
        self.now_s = 0.0
        self.later: list[tuple[float, Callable[[], object]]] = []
        self.broker.clock = lambda: self.now_s
        self.broker.call_later = lambda delay_s, function: self.later.append((self.now_s + delay_s, function))
        self.devices = Devices(self.broker, limits)

    def at(self, now_s: float) -> None:
        """Let time pass: what is due is called."""
        self.now_s = now_s
        due = [function for time_s, function in self.later if time_s <= now_s]
        self.later = [(time_s, function) for time_s, function in self.later if time_s > now_s]
        for function in due:
            function()
        settle()

    def device(self) -> MemoryDevice:
        return MemoryDevice(self)

    def left(self) -> dict[str, Any]:
        """What is left of clients; empty when there is nothing."""
        settle()
        filters = self.devices.filters
        topics = self.broker.topic_table.by_key.values()
        found: dict[str, Any] = {
            "sessions": list(self.devices.sessions),
            "offline": list(self.devices.offline),
            "clients": [one for one in self.broker.sessions if one != self.broker.server.etid],
            "uids": list(self.broker.uids),
            "filters": list(filters.by_text),
            "tree": list(filters._tree._root),
            "subscriptions": [topic.name for topic in topics if topic.name is not None and topic.subscribers],
            "etids": [one.id for one in topics if one.name is None and one.id != self.broker.server.etid],
            "routes": [topic.name for topic in topics if topic.cached],
        }
        return {name: rest for name, rest in found.items() if rest}
