"""MQTT client inside the process of its broker: packets of MQTT 5 in memory (help: mqtt-broker)."""

from __future__ import annotations

from collections import deque
from time import time
from typing import Protocol

from gevent import get_hub

from smqrt.broker.broker import Broker
from smqrt.broker.mqtt import large_messages
from smqrt.broker.mqtt.client import MqttClient, will_of
from smqrt.broker.mqtt.devices import is_valid_name
from smqrt.broker.mqtt.messages import MqttBatch
from smqrt.broker.mqtt.publishing import FRAME_PAYLOAD_BYTES
from smqrt.broker.outbox import Drop, Outbox, frame_ends
from smqrt.broker.sessions import SessionState
from smqrt.errors import ArgumentError, CloseReason, MqttError
from smqrt.smq import data_path
from smqrt.smq.gevent_broker import random_u32
from smqrt.smq.mqtt_connection import MqttConnection
from smqrt.wire import smq
from smqrt.wire.connection_state import Life
from smqrt.wire.mqtt.fields import PacketType, Props, Reason, cut_properties, unpack_properties, varint
from smqrt.wire.mqtt.packets import (
    ConnackPacket,
    ConnectPacket,
    DisconnectPacket,
    PacketSplitter,
    PublishPacket,
    SubscribeAnswer,
    SubscribePacket,
    Subscription,
    UnsubscribePacket,
    WillMessage,
    decode,
    encode,
)

MAX_QUEUED_BYTES = 1 << 20
"""Bytes of the messages that wait for the application; further ones are dropped and counted."""
PACKETS_PER_CHECK = 16
"""Packets between two readings of the clock."""


class LocalEvents(Protocol):
    """Events of a local client, in the order of the broker's packets; they must not block."""

    def on_connected(self, properties: Props) -> None:
        """The client is accepted. `properties` are those of CONNACK."""

    def on_answer(self, number: int, code: int) -> None:
        """SUBSCRIBE or UNSUBSCRIBE with a packet identifier was answered."""

    def on_message(self, message: PublishPacket) -> None:
        """A message has arrived."""

    def on_disconnected(self, code: int) -> None:
        """The broker has disconnected the client."""


class LocalOutbox(Outbox):
    """Passes packets on to the application, in a later callback of the loop."""

    __slots__ = ("_events", "_packets", "_size", "_splitter", "session")
    protocol = "mqtt"
    has_room = True
    session: LocalClient

    def __init__(self, events: LocalEvents) -> None:
        super().__init__()
        self._events = events
        self._packets: deque[bytes] = deque()
        self._size = 0
        self._splitter = PacketSplitter()

    def reply(self, packet: bytes) -> None:
        """Translate a control packet of SMQ, see `MqttConnection.reply`."""
        if packet[0] == smq.Type.CONNACK:
            self.session.connack()

    def send_packet(self, data: bytes) -> None:
        """See `MqttOutbox`."""
        if not self._packets:
            get_hub().loop.run_callback(self._pass_on)
        self._packets.append(data)
        self._size += len(data)

    def send_packets(self, data: bytes, key: bytes) -> None:
        """See `MqttOutbox`; messages that exceed the limit are dropped."""
        if self._size + len(data) <= MAX_QUEUED_BYTES or not self._size:
            self.send_packet(data)
        else:
            self.session.broker.stats.drop(Drop.OVER_BUDGET, len(frame_ends(data, MqttConnection.frame_bytes)))

    def _pass_on(self) -> None:
        until_s, count = data_path.defer_at_s(), 0
        while self._packets or not self._splitter.is_empty:
            found = self._splitter.next()
            if found is None:
                data = self._packets.popleft()
                self._size -= len(data)
                self._splitter.feed(data)
                continue
            self._notify(*found)
            count += 1
            if not count % PACKETS_PER_CHECK and time() >= until_s:
                get_hub().loop.run_callback(self._pass_on)
                return

    def _notify(self, first: int, body: bytes) -> None:
        packet, events = decode(first, body, 5, False), self._events
        if isinstance(packet, PublishPacket):
            events.on_message(packet)
        elif isinstance(packet, SubscribeAnswer):
            events.on_answer(packet.packet_identifier, packet.codes[0])
        elif isinstance(packet, ConnackPacket) and not packet.code:
            events.on_connected(packet.properties)
        elif isinstance(packet, ConnackPacket | DisconnectPacket):
            events.on_disconnected(packet.code)

    def finish(self, reason: CloseReason) -> None:
        """See `Outbox.finish`."""
        self.life = Life.CLOSED

    def resume(self) -> None:
        """See `Outbox.resume`."""
        get_hub().loop.run_callback(self.session.continue_later)


class LocalClient(MqttClient):
    """A client inside the process.

    Args:
        broker: its broker.
        events: the application.
    """

    __slots__ = ("_events", "_later", "_splitter", "_will")

    def __init__(self, broker: Broker, events: LocalEvents) -> None:
        outbox = LocalOutbox(events)
        super().__init__(broker, outbox, random_u32())
        outbox.session = self
        self._events = events
        self._splitter = PacketSplitter()
        self._later: deque[SubscribePacket | UnsubscribePacket] = deque()
        self._will: WillMessage | None = None

    # ---- connection

    def connect(self, client_id: str) -> None:
        """Connect with a client id; `on_connected` follows."""
        self._give(ConnectPacket(5, client_id))

    def own_uid(self) -> bytes:
        """See `PortClient.own_uid`."""
        return self.client_id.encode()

    def log_in(self) -> bool:
        """See `MqttClient.log_in`: the application need not authenticate itself."""
        return self.admit()

    def connack(self) -> None:
        """See `MqttClient.connack`."""
        super().connack()
        self.set_will(self._will)

    def set_will(self, will: WillMessage | None) -> None:
        """Set the will; None for none.

        Raises:
            ArgumentError: its topic has too many levels, or its payload is too large.
        """
        if will is not None:
            self._check_topic(will.topic.encode(), "will.topic")
            if len(will.payload) > FRAME_PAYLOAD_BYTES:
                raise ArgumentError(f"will.payload: {len(will.payload)} bytes; at most {FRAME_PAYLOAD_BYTES} fit")
        self._will = will
        if self.device is not None:
            self.device.will = None if will is None else will_of(will, 0)

    def leave(self, with_will: bool) -> None:
        """Disconnect; the application gets no event of it."""
        if self.device is not None and not with_will:
            self.device.will = None
        self.version = 4  # the server sends no DISCONNECT
        self.disconnect(CloseReason.CLIENT_DISCONNECT)

    # ---- messages

    def _check_topic(self, name: bytes, what: str) -> None:
        if not is_valid_name(name, self.devices.limits.levels):
            raise ArgumentError(
                f"{what}: {ascii(name[:64])[1:]} is not a topic of MQTT; use UTF-8 and at most "
                f"{self.devices.limits.levels} levels"
            )

    def send(self, topic: bytes, payload: bytes, retain: bool, properties: bytes) -> None:
        """Publish a message, when the client is connected.

        Args:
            topic: the topic.
            payload: the payload.
            retain: the retain flag; subscribers may see it.
            properties: the properties of MQTT 5, packed without their length.

        Raises:
            ArgumentError: MQTT clients can't use the topic.
        """
        self._check_topic(topic, "topic")
        found = unpack_properties(properties, 0, len(properties), PacketType.PUBLISH)
        block = varint(len(properties)) + properties if properties else b""
        message = PublishPacket(topic.decode(), payload, int(retain), 0, found, block)
        self._publish(message, topic, True)

    def route_held(self, batch: bytes) -> bool:
        """See `PublishingClient.route_held`; the application need not permit large messages."""
        topic = self.broker.topic_table.by_key.get(batch[smq.TID])
        if topic is None or not isinstance(batch, MqttBatch) or batch.large is None:
            return super().route_held(batch)
        return large_messages.publish(self.devices, topic, batch, self, True)

    # ---- subscriptions

    def request(self, number: int, topic_filter: bytes, options: int | None, identifier: int = 0) -> None:
        """Send SUBSCRIBE, or UNSUBSCRIBE; `on_answer` follows.

        Args:
            number: the packet identifier.
            topic_filter: the filter.
            options: the options of SUBSCRIBE; None for UNSUBSCRIBE.
            identifier: the subscription identifier.
        """
        text = topic_filter.decode("utf-8", "replace")
        if options is None:
            self._later.append(UnsubscribePacket(number, [text]))
        else:
            properties = {"subscriptionidentifier": identifier}
            self._later.append(SubscribePacket(number, [Subscription(text, options)], properties))
        self._handle_later()

    def _handle_later(self) -> None:
        while self._later and not self.is_subscribing and self.state is SessionState.CONNECTED:
            packet = self._later.popleft()
            try:
                self._give(packet)
            except MqttError:  # a filter with a control character, or a longer one than a packet takes
                code = Reason.TOPIC_FILTER_INVALID
                get_hub().loop.run_callback(self._events.on_answer, packet.packet_identifier, code)

    def continue_later(self) -> None:
        """Continue after a pause."""
        if not self.closed:
            self.continue_packets()
            self._handle_later()

    def _give(self, packet: ConnectPacket | SubscribePacket | UnsubscribePacket) -> None:
        self._splitter.feed(encode(packet, 5))
        found = self._splitter.next()
        assert found is not None
        self.packet(*found)


def forwarded_properties(message: PublishPacket) -> bytes:
    """Return the properties of a received message that its publisher has set, packed without their length."""
    return cut_properties(message.property_bytes, "subscriptionidentifier") if message.property_bytes else b""
