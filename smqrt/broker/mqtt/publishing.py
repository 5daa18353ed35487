"""What MQTT clients publish: PUBLISH and its answers."""

from __future__ import annotations

from typing import Any

from smqrt.auth.identity import Action
from smqrt.broker.mqtt.devices import is_valid_name
from smqrt.broker.mqtt.messages import NO_EXPIRY_S, Message, MqttBatch, mqtt_batch
from smqrt.broker.mqtt.session import MqttSession, is_reserved
from smqrt.broker.outbox import Drop, Outbox
from smqrt.broker.state import BrokerState
from smqrt.broker.topics import Topic
from smqrt.errors import MqttError
from smqrt.wire import smq
from smqrt.wire.mqtt.fields import FIRST_FAILURE, PacketType, Reason, TopicAliasZeroError, cut_properties
from smqrt.wire.mqtt.packets import PublishPacket, decode_acknowledgement, decode_publish, encode_acknowledgement
from smqrt.wire.mqtt.server import check_message_properties

MAX_PERMITTED = 1024
"""Topic names whose permission is remembered."""
FRAME_PAYLOAD_BYTES = smq.MAX_FRAME_BYTES - smq.PUBLISH_HEADER_BYTES
_CODES = {
    Drop.UNROUTED: Reason.NO_MATCHING_SUBSCRIBERS,
    Drop.DENIED: Reason.NOT_AUTHORIZED,
    Drop.OVER_RATE: Reason.QUOTA_EXCEEDED,
    Drop.SWALLOWED: Reason.IMPLEMENTATION_SPECIFIC_ERROR,
}
"""Reason codes of PUBACK for messages that nobody gets."""


class PublishingClient(MqttSession):
    """An MQTT client that publishes.

    Args:
        broker, outbox, seed, origin: see `MqttSession`.
    """

    __slots__ = ("_aliases", "_frames", "_permitted", "_postponed", "_run_name", "_unanswered")

    def __init__(self, broker: BrokerState, outbox: Outbox, seed: int, origin: object = None) -> None:
        super().__init__(broker, outbox, seed, origin)
        self._aliases: dict[int, bytes] = {}
        self._permitted: dict[bytes, bool] = {}
        self._frames: list[bytes] = []  # payloads of PUBLISH packets with QoS 0 to the topic `_run_name`
        self._run_name = b""
        self._unanswered: tuple[PublishPacket, MqttBatch] | None = None  # to be answered when the hub has processed it
        self._postponed: tuple[int, bytes] | None = None  # a packet that waits for the collected messages before it

    # ---- messages with QoS 0 in a row

    def is_plain_publish(self, body: bytes) -> bool:
        """Return whether a PUBLISH with QoS 0 can be collected: to the topic of the last one, without properties."""
        name = self._run_name
        end = 2 + len(name)
        if not name or body[2:end] != name or body[0] << 8 | body[1] != len(name):
            return False
        return self.version < 5 or body[end : end + 1] == b"\0"

    def collect(self, body: bytes) -> bool:
        """Keep the message of a PUBLISH packet for `publish_collected`."""
        start = 2 + len(self._run_name) + (self.version == 5)
        payload = body[start:]
        if len(payload) > FRAME_PAYLOAD_BYTES:
            raise MqttError(Reason.PACKET_TOO_LARGE, "the payload is too large")
        self._frames.append(payload)
        return False

    def publish_collected(self) -> bool:
        """Publish the collected messages; return true when the client has to wait."""
        payloads, self._frames = self._frames, []
        topic = self._topic(self._run_name)
        if not payloads:
            return False
        if topic is None:
            self.broker.stats.drop(Drop.UNROUTED, len(payloads))
            return False
        head = b"\x08" + topic.key + self.etid.to_bytes(4, "big") + bytes(4)
        frames = b"".join([(len(one) + smq.PUBLISH_HEADER_BYTES).to_bytes(2, "big") + head + one for one in payloads])
        if len(payloads) > 1:
            self.count_batch(topic.key, len(payloads) - 1)
        return self.publish(mqtt_batch(frames, 0))

    # ---- PUBLISH and PUBREL

    def on_publish(self, first: int, body: bytes) -> bool:
        """Handle PUBLISH; return true when the client has to wait."""
        try:
            message = decode_publish(first, body, self.codec)
        except TopicAliasZeroError as error:
            raise MqttError(Reason.TOPIC_ALIAS_INVALID, str(error)) from None
        name = self._name_of(message)
        qos, number = message.qos, message.packet_identifier
        device = self.device
        assert device is not None
        if message.property_bytes:
            check_message_properties(message.properties)
            self.check_user_properties(message.properties, message.property_bytes)
        if not is_valid_name(name, self.devices.limits.levels):
            raise MqttError(Reason.TOPIC_NAME_INVALID, f"clients can't publish to {ascii(name[:64])[1:]}")
        if len(message.payload) > FRAME_PAYLOAD_BYTES:
            raise MqttError(Reason.PACKET_TOO_LARGE, "the payload is too large")
        if qos == 2:
            if number in device.unreleased:  # it was delivered before
                self._acknowledge(message, Reason.SUCCESS)
                return False
            if self.version == 5 and len(device.unreleased) >= self.devices.limits.receive_maximum:
                raise MqttError(Reason.RECEIVE_MAXIMUM_EXCEEDED, "more messages than the receive maximum")
        permitted = False if is_reserved(name) else self._permitted.get(name)
        if permitted is None:
            return self._ask_permission(name, first, body)
        if qos == 0 and first == 0x30 and not message.property_bytes and permitted:
            self._run_name = name
        return self._publish(message, name, permitted)

    def _name_of(self, message: PublishPacket) -> bytes:
        alias = message.properties.get("topicalias")
        if alias is None:
            if not message.topic:
                reason = Reason.PROTOCOL_ERROR if self.version == 5 else Reason.TOPIC_NAME_INVALID
                raise MqttError(reason, "a message without a topic")
            return message.topic.encode()
        if not isinstance(alias, int) or not 0 < alias <= self.devices.limits.aliases:
            raise MqttError(Reason.TOPIC_ALIAS_INVALID, f"topic alias {alias} is above the maximum")
        if message.topic:
            self._aliases[alias] = message.topic.encode()
        elif alias not in self._aliases:
            raise MqttError(Reason.PROTOCOL_ERROR, f"topic alias {alias} is unknown")
        return self._aliases[alias]

    def _ask_permission(self, name: bytes, first: int, body: bytes) -> bool:
        """Ask whether the client may publish to a topic, then publish."""
        if self.identity is not None and not self.identity.may(name, Action.WRITE):
            self._remember(name, False)
            return self.on_publish(first, body)

        def decided(permitted: Any) -> bool:
            if not permitted:
                self.broker.count_denial(self, "publish to", "topic", name)
            self._remember(name, bool(permitted))
            return self.on_publish(first, body)

        return self.ask_then(self.broker.hooks.permittop, (name, False, self), decided)

    def _remember(self, name: bytes, permitted: bool) -> None:
        if len(self._permitted) >= MAX_PERMITTED:
            self._permitted.clear()
        self._permitted[name] = permitted

    def _publish(self, message: PublishPacket, name: bytes, permitted: bool) -> bool:
        """Route a message and acknowledge it; return true when the client has to wait for the hub."""
        drops = self.broker.stats.drops
        before = [drops[reason] for reason in _CODES]
        code: Reason | None = None
        if permitted:
            batch, code = self._batch(message, name)
            if batch is not None and self.publish(batch):
                self._unanswered = message, batch
                return True
        else:
            self.broker.stats.drop(Drop.DENIED, 1)
        if code is None:
            counts = zip(_CODES.items(), before, strict=True)
            code = next((found for (reason, found), count in counts if drops[reason] != count), Reason.SUCCESS)
        self._acknowledge(message, code)
        return False

    def _batch(self, message: PublishPacket, name: bytes) -> tuple[MqttBatch | None, Reason | None]:
        """Return a message for routing, None when nobody gets it; and the reason of a refusal."""
        properties, expires_s = b"", NO_EXPIRY_S
        if message.property_bytes:
            properties = cut_properties(message.property_bytes, "topicalias", "messageexpiryinterval")
            expiry_s = message.properties.get("messageexpiryinterval")
            if isinstance(expiry_s, int):
                expires_s = self.broker.clock() + expiry_s
        topic = self._topic(name)
        if message.retain:
            kept = Message(name, message.payload, message.qos, True, properties, expires_s)
            if not self.devices.set_retained(kept) and message.qos and self.version == 5:
                return None, Reason.QUOTA_EXCEEDED  # others can't be told, so their subscribers get the message
        if topic is None:
            self.broker.stats.drop(Drop.UNROUTED, 1)
            return None, None
        frame = smq.publish_frame(topic.id, self.etid, 0, message.payload)
        batch = mqtt_batch(frame, message.qos, message.retain, properties, expires_s)
        if message.qos:
            batch.drops = []
        return batch, None

    def _topic(self, name: bytes) -> Topic | None:
        """Return the topic of a name; it is created if somebody wants it."""
        table = self.broker.topic_table
        topic = table.by_name.get(name)
        if topic is not None:
            return topic
        broker = self.broker
        is_wanted = (
            broker.hooks.onpublish is not None
            or broker.hooks.ondrop is not None
            or broker.recorder is not None
            or broker.cluster is not None
            or (broker.last_values is not None and broker.last_values.selects_name(name))
            or self.devices.wants(name)
        )
        if not is_wanted:
            return None
        reached = broker.limits.of_all(table, name)
        if reached:
            broker.refuse(self, reached)
            return None
        return table.named(name)

    def _acknowledge(self, message: PublishPacket, code: Reason) -> None:
        """Send PUBACK or PUBREC."""
        qos, number, device = message.qos, message.packet_identifier, self.device
        if not qos or device is None or self.closed:
            return
        if qos == 2 and (code < FIRST_FAILURE or self.version < 5):  # PUBREC of 3.1.1 can't tell a failure
            device.unreleased.add(number)
        kind = PacketType.PUBACK if qos == 1 else PacketType.PUBREC
        self.mqtt_outbox.send_packet(encode_acknowledgement(kind, number, self.codec, code))

    def on_pubrel(self, first: int, body: bytes) -> None:
        """Handle PUBREL."""
        packet = decode_acknowledgement(first, body, self.codec)
        self.check_user_properties(packet.properties)
        number, device = packet.packet_identifier, self.device
        assert device is not None
        code = Reason.SUCCESS if number in device.unreleased else Reason.PACKET_IDENTIFIER_NOT_FOUND
        device.unreleased.discard(number)
        self.mqtt_outbox.send_packet(encode_acknowledgement(PacketType.PUBCOMP, number, self.codec, code))

    # ---- waiting for the hub

    def postpone(self, first: int, body: bytes) -> bool:
        """Let a packet wait for the collected messages before it; return whether it has to."""
        if not self._frames or not self.publish_collected():
            return False
        self._postponed = first, body
        return True

    def resumed(self) -> tuple[int, bytes] | None:
        """Send the acknowledgement of a message that the hub has processed now; return the packet that has waited."""
        unanswered, self._unanswered = self._unanswered, None
        if unanswered is not None:
            message, batch = unanswered
            self._acknowledge(message, _CODES[batch.drops[0]] if batch.drops else Reason.SUCCESS)
        postponed, self._postponed = self._postponed, None
        return postponed

    def forget_routes(self) -> None:
        """See `Session.forget_routes`; permissions are asked for again."""
        super().forget_routes()
        self._permitted.clear()
        if not self._frames:
            self._run_name = b""
