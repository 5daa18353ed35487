"""Publishing by MQTT clients: PUBLISH and its answers."""

from __future__ import annotations

from collections.abc import Sequence
from struct import pack, unpack
from typing import Any, NamedTuple

from smqrt.auth.identity import Action
from smqrt.broker.client_limits import Meter, refuse_message
from smqrt.broker.mqtt import large_messages
from smqrt.broker.mqtt.arrivals import AGAIN
from smqrt.broker.mqtt.device import Device
from smqrt.broker.mqtt.devices import is_valid_name
from smqrt.broker.mqtt.features import ALL_FEATURES
from smqrt.broker.mqtt.ledger import MAX_HELD
from smqrt.broker.mqtt.messages import NO_EXPIRY_S, Message, MqttBatch, mqtt_batch
from smqrt.broker.mqtt.session import RESERVED, MqttSession, check_characters, check_message_properties, is_reserved
from smqrt.broker.outbox import Drop, Outbox
from smqrt.broker.state import BrokerState
from smqrt.broker.topics import Topic
from smqrt.errors import MqttError
from smqrt.wire import smq
from smqrt.wire.kernels import ROW_MESSAGES
from smqrt.wire.mqtt.fields import FIRST_FAILURE, PacketType, Reason, TopicAliasZeroError, cut_properties
from smqrt.wire.mqtt.packets import (
    PublishPacket,
    decode_acknowledgement,
    decode_publish,
    encode_acknowledgement,
    encode_acknowledgements,
)

MAX_PERMITTED = 1024
"""Topic names whose permission is remembered."""
NO_TOPIC = bytes(4)
"""The key of messages to topics that nothing needs; they count for the limits of publishing."""
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
_PUBACK, _PUBREC, _PUBCOMP = 0x40, 0x50, 0x70  # first bytes, too


class Unanswered(NamedTuple):
    """Messages that the hub has not processed yet.

    Attributes:
        qos: their QoS.
        numbers: their packet identifiers, two bytes each.
        batch: the messages.
        kept: the message that is retained then.
        is_routed: whether the hub has routed them, and only slow subscribers delay the answer.
    """

    qos: int
    numbers: bytes
    batch: MqttBatch
    kept: Message | None = None
    is_routed: bool = False


def numbers_in(packed: bytes) -> tuple[int, ...]:
    """Return packet identifiers of two bytes each."""
    return unpack(f">{len(packed) >> 1}H", packed)


def _code_of(batch: MqttBatch) -> Reason:
    """Return the reason code for messages that the hub has processed."""
    return _CODES[batch.drops[0]] if batch.drops else Reason.SUCCESS


class HeldRoute:
    """Route behind a meter of messages that do not fit a frame, see `PublishingClient.route_held`."""

    __slots__ = ("_client",)

    def __init__(self, client: PublishingClient) -> None:
        self._client = client

    def deliver(self, batch: bytes) -> bool:
        """Deliver a message."""
        return self._client.route_held(batch)

    def deliver_view(self, view: memoryview) -> bool:
        """See `deliver`."""
        return self.deliver(bytes(view))


class PublishingClient(MqttSession):
    """An MQTT client that publishes.

    Args:
        broker, outbox, seed, origin: see `MqttSession`.

    Attributes:
        aliases: topic names by the alias that the client has chosen.
        run_name: the topic of the last message.
        run_first: the first byte of the last message, if others like it to the same topic can be published together
            with it; otherwise -1.
        held: its acknowledgements that wait for the disk.
        is_held_back: whether it is not read because too many wait.
    """

    __slots__ = (
        "_numbers",
        "_payloads",
        "_permitted",
        "_postponed",
        "_unanswered",
        "aliases",
        "held",
        "is_held_back",
        "run_first",
        "run_name",
    )

    def __init__(self, broker: BrokerState, outbox: Outbox, seed: int, origin: object = None) -> None:
        super().__init__(broker, outbox, seed, origin)
        self.aliases: dict[int, bytes] = _NO_ALIASES
        self._permitted = _NO_PERMISSIONS
        self.run_name = b""
        self.run_first = _NO_RUN
        self._payloads = _NO_PAYLOADS  # of PUBLISH packets with the first byte `run_first` to the topic `run_name`
        self._numbers = _NO_PAYLOADS  # their packet identifiers, with QoS 1
        self._unanswered: Unanswered | None = None
        self.held = 0
        self.is_held_back = False
        self._postponed: tuple[int, bytes] | None = None  # a packet that waits for the collected messages before it

    # ---- messages in a row

    def collect(self, first: int, body: bytes) -> bool:
        """Keep a message for `publish_collected`, if it is one more of a row; return whether it is.

        A row has messages with one QoS to one topic, without flags and properties.
        """
        if first != self.run_first:
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

    def takes_numbers(self, numbers: bytes) -> bool:
        """Return whether all messages of a row with QoS 2 are neither repeated nor above the receive maximum.

        Args:
            numbers: their packet identifiers, two bytes each.
        """
        device, count = self.device, len(numbers) >> 1
        if device is None:
            return False
        found = set(numbers_in(numbers))
        if len(found) != count or not found.isdisjoint(device.unreleased):
            return False
        return self.version < 5 or len(device.unreleased) + count <= self.devices.limits.receive_maximum

    def publish_collected(self) -> bool:
        """Publish the collected messages; return true when the client has to wait."""
        payloads, numbers, qos = self._payloads, self._numbers, self.run_first >> 1 & 3
        if not payloads:
            return False
        self._payloads = self._numbers = _NO_PAYLOADS
        topic = self.devices.topic_for(self.run_name)
        if topic is None and self.broker.publish_limits is None:
            self.broker.stats.drop(Drop.UNROUTED, len(payloads))
            self.counts.published += len(payloads)
            self.counts.published_bytes += sum(map(len, payloads))
            self._send_answers(qos, b"".join(numbers), Reason.NO_MATCHING_SUBSCRIBERS)
            return False
        key = topic.key if topic is not None else NO_TOPIC
        head = b"\x08" + key + self.etid.to_bytes(4, "big") + bytes(4)
        frames = b"".join([(len(one) + smq.PUBLISH_HEADER_BYTES).to_bytes(2, "big") + head + one for one in payloads])
        return self.publish_frames(topic, mqtt_batch(frames, qos), len(payloads), b"".join(numbers))

    def publish_frames(self, topic: Topic | None, batch: MqttBatch, count: int, numbers: bytes) -> bool:
        """Publish `count` messages to one topic; return true when the client has to wait.

        Args:
            topic: the topic; None for `NO_TOPIC`.
            batch: the messages.
            count: their number.
            numbers: their packet identifiers, two bytes each; empty with QoS 0.
        """
        if count > 1:
            self.count_batch(topic.key if topic is not None else NO_TOPIC, count - 1)
        batch.messages = count
        counts = self.counts
        counts.published += count
        counts.published_bytes += len(batch) - count * smq.PUBLISH_HEADER_BYTES
        if numbers:
            batch.drops = []
            if batch.qos == 2:
                self._note_received(batch, numbers)
        waits = self.publish(batch)
        if not numbers:
            return waits
        if waits or self._must_wait(topic):
            self._unanswered = Unanswered(batch.qos, numbers, batch, is_routed=not waits)
            return True
        if self.devices.ledger is None:
            self._send_answers(batch.qos, numbers, _code_of(batch))
            return False
        self._send_answers(batch.qos, numbers, _code_of(batch), self._is_saved(batch))
        return self._hold_back()

    def _must_wait(self, topic: Topic | None) -> bool:
        """Return whether the client has to wait for slow subscribers, or for links to other nodes."""
        cluster = self.broker.cluster
        return self.devices.must_wait(topic, self) or (cluster is not None and cluster.mqtt.must_wait(self))

    def _note_received(self, batch: MqttBatch, numbers: bytes) -> None:
        """Let the packet identifiers of messages with QoS 2 be saved together with the messages."""
        if self.device is not None and self.device.rows is not None:
            batch.received = self.device, numbers

    def _is_saved(self, batch: MqttBatch) -> bool:
        """Return whether the acknowledgements of messages wait for the disk; otherwise it gets nothing of them."""
        if self.devices.ledger is None:
            return False
        is_forwarded = self._is_forwarded(batch)
        is_saved = not batch.drops and (is_forwarded or self.devices.is_saved(batch))
        if not is_saved:
            batch.received = None  # the client may use the identifiers again before the messages are delivered
        return is_saved

    def _is_forwarded(self, batch: MqttBatch) -> bool:
        """Return whether other nodes get messages later: with QoS 2 when their packet identifiers are saved, for shared
        subscriptions when they are delivered here.
        """
        cluster, topic = self.broker.cluster, self.broker.topic_table.by_key.get(batch[smq.TID])
        if cluster is None:
            return False
        return batch.received is not None or (topic is not None and cluster.mqtt.has_groups(topic.name or b""))

    def _send_answers(self, qos: int, numbers: bytes, code: Reason, is_saved: bool = False) -> None:
        """Send PUBACK or PUBREC for each message, in one write; nothing with QoS 0.

        Args:
            qos: the QoS of the messages.
            numbers: their packet identifiers, two bytes each.
            code: the reason code.
            is_saved: whether they wait for the disk.
        """
        device = self.device
        if device is None or self.closed or not numbers:
            return
        count = len(numbers) >> 1
        if code >= FIRST_FAILURE and self.version < 5:
            self.devices.hidden_failures += count
        if qos == 2 and (code < FIRST_FAILURE or self.version < 5):  # PUBREC of 3.1.1 can't tell a failure
            device.expect_releases(numbers_in(numbers))
        self.counts.answers += count
        end = bytes((code,)) if code and self.version == 5 else b""
        data, ledger = encode_acknowledgements(_PUBACK if qos == 1 else _PUBREC, numbers, end), self.devices.ledger
        if ledger is None:
            self.mqtt_outbox.send_packet(data)
        else:
            ledger.answer(self, data, is_saved)

    # ---- PUBLISH and PUBREL

    def on_publish(self, first: int, body: bytes) -> bool:
        """Handle PUBLISH; return true when the client has to wait."""
        try:
            message = decode_publish(first, body, self.codec)
        except TopicAliasZeroError as error:
            raise MqttError(Reason.TOPIC_ALIAS_INVALID, str(error)) from None
        check_characters(message.topic)
        name = self._name_of(message)
        qos, number = message.qos, message.packet_identifier
        device, features = self.device, self.devices.features
        assert device is not None
        if features is not ALL_FEATURES:
            features.check(qos, message.retain, self.version, "PUBLISH")
        if message.property_bytes:
            check_message_properties(message.properties)
            self.check_properties(message.properties, message.property_bytes)
        if not is_valid_name(name, self.devices.limits.levels):
            raise MqttError(Reason.TOPIC_NAME_INVALID, f"clients can't publish to {ascii(name[:64])[1:]}")
        if qos == 2:
            if number in device.unreleased:  # it was delivered before
                if number in self.devices.again.get(device, ()):
                    self._publish_again(message, name, device)
                self._acknowledge(message, Reason.SUCCESS, is_saved=device.rows is not None)
                return self._hold_back()
            if self.version == 5 and len(device.unreleased) >= self.devices.limits.receive_maximum:
                raise MqttError(Reason.RECEIVE_MAXIMUM_EXCEEDED, "more messages than the receive maximum")
        permitted = self._permitted.get(name)
        if features.own_topics and is_reserved(name):
            permitted = False
            self.broker.log_denial(self, "publish to", "topic", name, RESERVED)
        if permitted is None:
            return self._ask_permission(name, first, body)
        if permitted and not message.property_bytes and first in (_QOS_0, _QOS_1, _QOS_2) and not self.broker.traces:
            # Behind the hook and the limits, the messages of a batch may have different answers.
            answers_differ = self.broker.hooks.onpublish is not None or self.broker.publish_limits is not None
            self.run_name, self.run_first = name, _NO_RUN if qos and answers_differ else first
        return self._publish(message, name, permitted)

    def _publish_again(self, message: PublishPacket, name: bytes, device: Device) -> None:
        """Send a message to nodes that may not have it: the node that has received it was killed."""
        origin = self.devices.again[device].pop(message.packet_identifier)
        topic, cluster = self.devices.topic_for(name), self.broker.cluster
        if topic is None or cluster is None or self.broker.hooks.onpublish is not None:
            return
        is_large = len(message.payload) > FRAME_PAYLOAD_BYTES
        properties, expires_s = self._forwarded(message)
        frame = smq.publish_frame(topic.id, self.etid, 0, b"" if is_large else message.payload)
        batch = mqtt_batch(frame, 2, message.retain, properties, expires_s)
        batch.origin, batch.large = origin, message.payload if is_large else None
        batch.group = ""  # the node that was killed has saved it for a client of each shared subscription
        if not self.devices.arrivals.knows(origin):
            self.devices.arrivals.know((origin,))
            if is_large:
                large_messages.deliver(self.devices, topic, batch)
            else:
                topic.settle()
                topic.deliver(batch)
        again = batch.like(batch)  # the other one is delivered later
        again.origin |= AGAIN
        cluster.mqtt.send_large(topic, again)

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
        self.counts.published += 1
        self.counts.published_bytes += len(message.payload)
        properties, expires_s = self._forwarded(message)
        kept = Message(name, message.payload, message.qos, True, properties, expires_s) if message.retain else None
        numbers = message.packet_identifier.to_bytes(2) if message.qos else b""
        topic = self.devices.topic_for(name)
        is_large = len(message.payload) > FRAME_PAYLOAD_BYTES
        frame = smq.publish_frame(topic.id if topic else 0, self.etid, 0, b"" if is_large else message.payload)
        batch = mqtt_batch(frame, message.qos, message.retain, properties, expires_s)
        batch.drops = []
        if message.qos == 2:
            self._note_received(batch, numbers)
        before = self.broker.stats.drops[Drop.OVER_RATE]
        if is_large:
            batch.large = message.payload
        if topic is None and self.broker.publish_limits is None:
            self.broker.stats.drop(Drop.UNROUTED, 1)
            batch.drops.append(Drop.UNROUTED)
        elif (waits := self._route_one(batch)) or (message.qos and self._must_wait(topic)):
            self._unanswered = Unanswered(message.qos, numbers, batch, kept, not waits)
            return True
        if self.broker.stats.drops[Drop.OVER_RATE] != before:
            batch.drops.append(Drop.OVER_RATE)
        self._answer(Unanswered(message.qos, numbers, batch, kept))
        return self._hold_back()

    def _route_one(self, batch: MqttBatch) -> bool:
        """Route a message within the limits of publishing; return true when the client has to wait."""
        if batch.large is None:
            return self.publish(batch)
        limits, size = self.broker.publish_limits, len(batch.large)
        if limits is None:
            return self.route_held(batch)
        if limits.message_bytes < smq.MAX_PAYLOAD_BYTES:
            return refuse_message(self, limits)
        if self.meter is None:
            self.meter = Meter(self, limits)
        self.meter.charge_bytes(size)
        return bool(self.meter.deliver(HeldRoute(self), batch))

    def route_held(self, batch: bytes) -> bool:
        """See `Session.route_held`; also messages that do not fit a frame."""
        if not isinstance(batch, MqttBatch) or batch.large is None:
            return super().route_held(batch)
        topic = self.broker.topic_table.by_key.get(batch[smq.TID])
        if topic is not None:
            return large_messages.publish(self.devices, topic, batch, self)
        self.broker.stats.drop(Drop.UNROUTED, 1)
        batch.dropped(Drop.UNROUTED)
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
        is_saved = self._is_saved(processed.batch)
        if processed.kept is not None and code not in _NOT_KEPT:
            is_saved = self.devices.ledger is not None
            if not self.devices.retain(processed.kept):
                code = Reason.QUOTA_EXCEEDED
        self._send_answers(processed.qos, processed.numbers, code, is_saved)

    def _acknowledge(self, message: PublishPacket, code: Reason, is_saved: bool = False) -> None:
        """Send PUBACK or PUBREC."""
        if message.qos:
            self._send_answers(message.qos, message.packet_identifier.to_bytes(2), code, is_saved)

    def on_pubrel(self, first: int, body: bytes) -> bool:
        """Handle PUBREL; return true when the client has to wait."""
        packet = decode_acknowledgement(first, body, self.codec)
        self.check_properties(packet.properties)
        self.release(packet.packet_identifier)
        return self._hold_back()

    def release(self, number: int) -> None:
        """Handle PUBREL: send PUBCOMP, when the packet identifier is removed from the `persist` file."""
        device = self.device
        assert device is not None
        self.counts.answers += 1
        if self.devices.again:
            self.devices.again.get(device, {}).pop(number, None)
        was_saved = device.rows is not None and device.rows.release(number)
        code = Reason.SUCCESS if device.released(number) else Reason.PACKET_IDENTIFIER_NOT_FOUND
        data = encode_acknowledgement(PacketType.PUBCOMP, number, self.codec, code)
        self.send_when_saved(data, was_saved)

    def release_row(self, numbers: Sequence[int]) -> bool:
        """Handle PUBREL packets without reasons; return true when the client has to wait."""
        device = self.device
        assert device is not None
        if device.rows is None and not self.held and device.released_all(numbers):
            self.counts.answers += len(numbers)
            self.mqtt_outbox.send_packet(encode_acknowledgements(_PUBCOMP, pack(f">{len(numbers)}H", *numbers)))
            return False
        for number in numbers:
            self.release(number)
        return self._hold_back()

    # ---- acknowledgements that wait for the disk, see `Ledger`

    def send_when_saved(self, data: bytes, is_saved: bool) -> None:
        """Send an acknowledgement when the changes until now are saved.

        Args:
            data: the packet.
            is_saved: whether there are changes; otherwise it only follows those that wait.
        """
        ledger = self.devices.ledger
        if ledger is None or not (is_saved or self.held):
            self.mqtt_outbox.send_packet(data)
        else:
            ledger.answer_change(self, data)

    def send_held(self, data: bytes) -> None:
        """See `Publisher`."""
        self.held -= 1
        if self.closed:
            return
        self.mqtt_outbox.send_packet(data)
        if self.is_held_back and self.held <= MAX_HELD >> 1:
            self.is_held_back = False
            self.outbox.resume()

    def _hold_back(self) -> bool:
        """Return whether the client must not be read because many acknowledgements wait for the disk."""
        ledger = self.devices.ledger
        is_full = ledger is not None and ledger.is_full
        self.is_held_back = self.held >= MAX_HELD or (is_full and self.held > 0)
        return self.is_held_back

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
            device.expect_releases(numbers_in(unanswered.numbers))

    def forget_routes(self) -> None:
        """See `Session.forget_routes`; permissions are asked for again."""
        super().forget_routes()
        self._permitted = _NO_PERMISSIONS
        if not self._payloads:
            self.run_name, self.run_first = b"", _NO_RUN
