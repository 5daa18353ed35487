"""Publishing by MQTT clients: PUBLISH and its answers."""

from __future__ import annotations

from typing import Any, NamedTuple

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

ROW_MESSAGES = 100
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


_NO_PAYLOADS: list[bytes] = []
_NO_PERMISSIONS: dict[bytes, bool] = {}
_NO_ALIASES: dict[int, bytes] = {}
"""Shared by clients that do not publish; never written to."""
_NOT_KEPT = (Reason.IMPLEMENTATION_SPECIFIC_ERROR, Reason.QUOTA_EXCEEDED)
_QOS_0, _QOS_1, _QOS_2, _NO_RUN = 0x30, 0x32, 0x34, -1  # first bytes of PUBLISH packets without flags


class Unanswered(NamedTuple):
    """Messages that the hub has not processed yet.

    Attributes:
        qos: their QoS.
        numbers: their packet identifiers.
        batch: the messages.
        kept: the message that is retained then.
        is_routed: whether the hub has routed them, and only slow subscribers delay the answer.
    """

    qos: int
    numbers: list[bytes]
    batch: MqttBatch
    kept: Message | None = None
    is_routed: bool = False


def _code_of(batch: MqttBatch) -> Reason:
    """Return the reason code for messages that the hub has processed."""
    return _CODES[batch.drops[0]] if batch.drops else Reason.SUCCESS


class PublishingClient(MqttSession):
    """An MQTT client that publishes.

    Args:
        broker, outbox, seed, origin: see `MqttSession`.

    Attributes:
        aliases: topic names by the alias that the client has chosen.
        run_name: the topic of the last message.
    """

    __slots__ = (
        "_numbers",
        "_payloads",
        "_permitted",
        "_postponed",
        "_run_first",
        "_unanswered",
        "aliases",
        "run_name",
    )

    def __init__(self, broker: BrokerState, outbox: Outbox, seed: int, origin: object = None) -> None:
        super().__init__(broker, outbox, seed, origin)
        self.aliases: dict[int, bytes] = _NO_ALIASES
        self._permitted = _NO_PERMISSIONS
        self.run_name = b""
        self._run_first = _NO_RUN
        self._payloads = _NO_PAYLOADS  # of PUBLISH packets with the first byte `_run_first` to the topic `run_name`
        self._numbers = _NO_PAYLOADS  # their packet identifiers, with QoS 1
        self._unanswered: Unanswered | None = None
        self._postponed: tuple[int, bytes] | None = None  # a packet that waits for the collected messages before it

    # ---- messages in a row

    def collect(self, first: int, body: bytes) -> bool:
        """Keep a message for `publish_collected`, if it is one more of a row; return whether it is.

        A row has messages with one QoS to one topic, without flags and properties.
        """
        if first != self._run_first:
            return False
        name = self.run_name
        end = 2 + len(name)
        if body[2:end] != name or body[0] << 8 | body[1] != len(name):
            return False
        if self._payloads is _NO_PAYLOADS:
            self._payloads, self._numbers = [], []
        start = end if first == _QOS_0 else end + 2
        if self.version == 5:
            if body[start : start + 1] != b"\0":
                return False
            start += 1
        if len(body) < start or len(body) - start > FRAME_PAYLOAD_BYTES:
            return False
        if first != _QOS_0:
            number = body[end : end + 2]
            if number == b"\0\0" or (first == _QOS_2 and not self._is_expected(number)):
                return False
            self._numbers.append(number)
        self._payloads.append(body[start:])
        return True

    def _is_expected(self, number: bytes) -> bool:
        """Return whether a message with QoS 2 is neither repeated nor above the receive maximum."""
        device = self.device
        if device is None or number in self._numbers or number[0] << 8 | number[1] in device.unreleased:
            return False
        return self.version < 5 or len(device.unreleased) + len(self._numbers) < self.devices.limits.receive_maximum

    @property
    def is_row_full(self) -> bool:
        """Whether one turn publishes no more messages with QoS 1 or 2: publishers wait for slow subscribers."""
        return len(self._numbers) >= ROW_MESSAGES

    @property
    def is_in_row(self) -> bool:
        """Whether the last message had QoS 0, and others to its topic `run_name` can be published together."""
        return self._run_first == _QOS_0

    def publish_collected(self) -> bool:
        """Publish the collected messages; return true when the client has to wait."""
        payloads, numbers, qos = self._payloads, self._numbers, self._run_first >> 1 & 3
        if not payloads:
            return False
        self._payloads = self._numbers = _NO_PAYLOADS
        topic = self.devices.topic_for(self.run_name)
        if topic is None:
            self.broker.stats.drop(Drop.UNROUTED, len(payloads))
            self._send_answers(qos, numbers, Reason.NO_MATCHING_SUBSCRIBERS)
            return False
        head = b"\x08" + topic.key + self.etid.to_bytes(4, "big") + bytes(4)
        frames = b"".join([(len(one) + smq.PUBLISH_HEADER_BYTES).to_bytes(2, "big") + head + one for one in payloads])
        return self.publish_frames(topic, mqtt_batch(frames, qos), len(payloads), numbers)

    def publish_frames(self, topic: Topic, batch: MqttBatch, count: int, numbers: list[bytes]) -> bool:
        """Publish `count` messages to one topic; return true when the client has to wait.

        Args:
            topic: the topic.
            batch: the messages.
            count: their number.
            numbers: their packet identifiers; empty with QoS 0.
        """
        if count > 1:
            self.count_batch(topic.key, count - 1)
        if numbers:
            batch.drops = []
        waits = self.publish(batch)
        if not numbers:
            return waits
        if waits or self.devices.must_wait(topic, self):
            self._unanswered = Unanswered(batch.qos, numbers, batch, is_routed=not waits)
            return True
        self._send_answers(batch.qos, numbers, _code_of(batch))
        return False

    def _send_answers(self, qos: int, numbers: list[bytes], code: Reason) -> None:
        """Send PUBACK or PUBREC for each message, in one write; nothing with QoS 0."""
        device = self.device
        if device is None or self.closed or not numbers:
            return
        first = b"\x40" if qos == 1 else b"\x50"
        if qos == 2 and (code < FIRST_FAILURE or self.version < 5):  # PUBREC of 3.1.1 can't tell a failure
            for number in numbers:
                device.expect_release(number[0] << 8 | number[1])
        size, end = (b"\3", bytes((code,))) if code and self.version == 5 else (b"\2", b"")
        self.mqtt_outbox.send_packet(b"".join([first + size + number + end for number in numbers]))

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
        if qos == 2:
            if number in device.unreleased:  # it was delivered before
                self._acknowledge(message, Reason.SUCCESS)
                return False
            if self.version == 5 and len(device.unreleased) >= self.devices.limits.receive_maximum:
                raise MqttError(Reason.RECEIVE_MAXIMUM_EXCEEDED, "more messages than the receive maximum")
        permitted = False if is_reserved(name) else self._permitted.get(name)
        if permitted is None:
            return self._ask_permission(name, first, body)
        if permitted and not message.property_bytes and first in (_QOS_0, _QOS_1, _QOS_2):
            # Behind the hook and the limits, the messages of a batch may have different answers.
            answers_differ = self.broker.hooks.onpublish is not None or self.broker.publish_limits is not None
            self.run_name, self._run_first = name, _NO_RUN if qos and answers_differ else first
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
        if self.aliases is _NO_ALIASES:
            self.aliases = {}
        if message.topic:
            self.aliases[alias] = message.topic.encode()
        elif alias not in self.aliases:
            raise MqttError(Reason.PROTOCOL_ERROR, f"topic alias {alias} is unknown")
        return self.aliases[alias]

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
        if self._permitted is _NO_PERMISSIONS or len(self._permitted) >= MAX_PERMITTED:
            self._permitted = {}
        self._permitted[name] = permitted

    def _publish(self, message: PublishPacket, name: bytes, permitted: bool) -> bool:
        """Route a message and acknowledge it; return true when the client has to wait for the hub."""
        if not permitted:
            self.broker.stats.drop(Drop.DENIED, 1)
            self._acknowledge(message, Reason.NOT_AUTHORIZED)
            return False
        properties, expires_s = self._forwarded(message)
        kept = Message(name, message.payload, message.qos, True, properties, expires_s) if message.retain else None
        numbers = [message.packet_identifier.to_bytes(2)] if message.qos else []
        topic = self.devices.topic_for(name)
        is_large = len(message.payload) > FRAME_PAYLOAD_BYTES
        frame = smq.publish_frame(topic.id if topic else 0, self.etid, 0, b"" if is_large else message.payload)
        batch = mqtt_batch(frame, message.qos, message.retain, properties, expires_s)
        batch.drops = []
        before = self.broker.stats.drops[Drop.OVER_RATE]
        if topic is None:
            self.broker.stats.drop(Drop.UNROUTED, 1)
            batch.drops.append(Drop.UNROUTED)
        elif is_large:
            batch.large = message.payload
            self.devices.publish_large(topic, batch)
        elif (waits := self.publish(batch)) or (message.qos and self.devices.must_wait(topic, self)):
            self._unanswered = Unanswered(message.qos, numbers, batch, kept, not waits)
            return True
        if self.broker.stats.drops[Drop.OVER_RATE] != before:
            batch.drops.append(Drop.OVER_RATE)
        self._answer(Unanswered(message.qos, numbers, batch, kept))
        return False

    def _forwarded(self, message: PublishPacket) -> tuple[bytes, float]:
        """Return the properties that subscribers get, packed, and when the message expires."""
        if not message.property_bytes:
            return b"", NO_EXPIRY_S
        properties = cut_properties(message.property_bytes, "topicalias", "messageexpiryinterval")
        expiry_s = message.properties.get("messageexpiryinterval")
        return properties, self.broker.clock() + expiry_s if isinstance(expiry_s, int) else NO_EXPIRY_S

    def _answer(self, processed: Unanswered) -> None:
        """Retain a message that the hub has processed, unless a hook or a limit forbids it, and acknowledge it."""
        code = _code_of(processed.batch)
        if processed.kept is not None and code not in _NOT_KEPT and not self.devices.retain(processed.kept):
            code = Reason.QUOTA_EXCEEDED
        self._send_answers(processed.qos, processed.numbers, code)

    def _acknowledge(self, message: PublishPacket, code: Reason) -> None:
        """Send PUBACK or PUBREC."""
        if message.qos:
            self._send_answers(message.qos, [message.packet_identifier.to_bytes(2)], code)

    def on_pubrel(self, first: int, body: bytes) -> None:
        """Handle PUBREL."""
        packet = decode_acknowledgement(first, body, self.codec)
        self.check_user_properties(packet.properties)
        self.release(packet.packet_identifier)

    def release(self, number: int) -> None:
        """Handle PUBREL: send PUBCOMP."""
        device = self.device
        assert device is not None
        code = Reason.SUCCESS if device.released(number) else Reason.PACKET_IDENTIFIER_NOT_FOUND
        self.mqtt_outbox.send_packet(encode_acknowledgement(PacketType.PUBCOMP, number, self.codec, code))

    # ---- waiting for the hub

    def postpone(self, first: int, body: bytes) -> bool:
        """Let a packet wait for the collected messages before it; return whether it has to."""
        if not self._payloads or not self.publish_collected():
            return False
        self._postponed = first, body
        return True

    def resumed(self) -> tuple[int, bytes] | None:
        """Send the acknowledgement of a message that the hub has processed now; return the packet that has waited."""
        unanswered, self._unanswered = self._unanswered, None
        if unanswered is not None:
            self._answer(unanswered)
        postponed, self._postponed = self._postponed, None
        return postponed

    @property
    def can_finish(self) -> bool:
        """Whether a client that is not read waits only for slow subscribers, or for its publish rate; see `finish`."""
        return (self._unanswered is not None and self._unanswered.is_routed) or (
            self.meter is not None and self.meter.waits
        )

    def finish(self) -> tuple[int, bytes] | None:
        """End the waiting of a client that migrates: `can_finish` is true, or it does not wait.

        Returns:
            The packet that has waited, which is to be handled next.
        """
        if self.meter is not None and self.meter.waits:
            self.meter.route_held()
        return self.resumed()

    def lost(self) -> None:
        """Remember the messages with QoS 2 that are routed and not answered: the client sends them again."""
        unanswered, device = self._unanswered, self.device
        if unanswered is not None and unanswered.is_routed and unanswered.qos == 2 and device is not None:
            for number in unanswered.numbers:
                device.expect_release(number[0] << 8 | number[1])

    def forget_routes(self) -> None:
        """See `Session.forget_routes`; permissions are asked for again."""
        super().forget_routes()
        self._permitted = _NO_PERMISSIONS
        if not self._payloads:
            self.run_name, self._run_first = b"", _NO_RUN
