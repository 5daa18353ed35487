"""Messages between MQTT clients and the topics of a hub.

A hub routes batches of SMQ Publish frames. What these can't carry (QoS, retain, properties, expiry) is added to the
batch as attributes (`MqttBatch`). For MQTT subscribers, a batch is encoded once for each form that they need (`Run`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from math import ceil
from struct import Struct

from smqrt.broker.outbox import Drop
from smqrt.wire import smq
from smqrt.wire.mqtt.fields import varint

_U16, _U32 = Struct(">H"), Struct(">I")
_EXPIRY = b"\x02"  # the property "message expiry interval"
_IDENTIFIER = b"\x0b"  # the property "subscription identifier"
NO_EXPIRY_S = float("inf")

Clock = Callable[[], float]


class MqttBatch(bytes):
    """Publish frames of one MQTT client to one topic, with equal attributes.

    Attributes:
        qos: the QoS of the publication.
        retain: whether the message replaces the retained one of its topic.
        properties: the properties to forward, packed, without their length and without the expiry.
        expires_s: when the message expires, on the clock of the broker.
        drops: why messages did not reach anybody; None when nobody asks for it.
    """

    drops: list[Drop] | None = None
    qos: int
    retain: bool
    properties: bytes
    expires_s: float

    def like(self, frames: bytes) -> MqttBatch:
        """Return other frames with the attributes of these."""
        found = mqtt_batch(frames, self.qos, self.retain, self.properties, self.expires_s)
        found.drops = self.drops
        return found

    def dropped(self, reason: Drop) -> None:
        """Note that messages do not reach anybody."""
        if self.drops is not None:
            self.drops.append(reason)


def mqtt_batch(
    frames: bytes, qos: int, retain: bool = False, properties: bytes = b"", expires_s: float = NO_EXPIRY_S
) -> MqttBatch:
    """Return a batch; see `MqttBatch`."""
    batch = MqttBatch(frames)
    batch.qos, batch.retain, batch.properties, batch.expires_s = qos, retain, properties, expires_s
    return batch


class Message:
    """A message to MQTT subscribers with QoS 1 or 2; several sessions share it.

    Args:
        name: the topic name.
        payload: the payload.
        qos: 0, 1 or 2.
        retain: the retain flag that the subscriber gets.
        properties: packed, without their length, the expiry and the subscription identifiers.
        expires_s: when the message expires, on the clock of the broker.
        identifiers: the subscription identifiers, packed as properties.
    """

    __slots__ = ("expires_s", "identifiers", "name", "payload", "properties", "qos", "retain")

    def __init__(
        self,
        name: bytes,
        payload: bytes,
        qos: int,
        retain: bool = False,
        properties: bytes = b"",
        expires_s: float = NO_EXPIRY_S,
        identifiers: bytes = b"",
    ) -> None:
        self.name, self.payload, self.qos, self.retain = name, payload, qos, retain
        self.properties, self.expires_s, self.identifiers = properties, expires_s, identifiers

    @property
    def size_bytes(self) -> int:
        """The size of name, payload and properties."""
        return len(self.name) + len(self.payload) + len(self.properties)

    def packet(self, version: int, number: int, is_dup: bool, now_s: float) -> bytes:
        """Return the PUBLISH packet with the packet identifier `number`."""
        head = bytes((0x30 | is_dup << 3 | self.qos << 1 | self.retain,))
        body = _U16.pack(len(self.name)) + self.name
        if self.qos:
            body += _U16.pack(number)
        if version == 5:
            body += property_block(self.properties, self.expires_s, self.identifiers, now_s)
        return b"".join((head, varint(len(body) + len(self.payload)), body, self.payload))


def property_block(properties: bytes, expires_s: float, identifiers: bytes, now_s: float) -> bytes:
    """Return the properties of a message with their length; the expiry is the time that is left [MQTT-3.3.2-6]."""
    block = properties + identifiers
    if expires_s != NO_EXPIRY_S:
        block += _EXPIRY + _U32.pack(max(ceil(expires_s - now_s), 0))
    return varint(len(block)) + block


def packed_identifier(number: int) -> bytes:
    """Return a subscription identifier as a packed property; 0 means none."""
    return _IDENTIFIER + varint(number) if number else b""


class Run:
    """A batch for MQTT subscribers, encoded at the first use of each form.

    Args:
        name: the topic name.
        key: the key of the topic, for slow-consumer policies.
        batch: Publish frames to the topic.
        default_qos: the QoS of messages that MQTT clients have not published.
        properties_of: returns the packed properties of a message that no MQTT client has published.
        now_s: the time.
    """

    def __init__(
        self,
        name: bytes,
        key: bytes,
        batch: bytes,
        default_qos: int,
        properties_of: Callable[[bytes], bytes],
        now_s: float,
    ) -> None:
        self.name, self.key, self._batch, self.now_s = name, key, batch, now_s
        self._properties_of = properties_of
        if isinstance(batch, MqttBatch):
            self.qos, self.retain, self.expires_s = batch.qos, batch.retain, batch.expires_s
            self._properties: bytes | None = batch.properties
        else:
            self.qos, self.retain, self.expires_s = default_qos, False, NO_EXPIRY_S
            self._properties = None
        self.publisher = int.from_bytes(batch[smq.PTID], "big")
        self._packets: dict[tuple[int, bool, bytes], bytes] = {}
        self._messages: dict[tuple[int, bool, bytes], list[Message]] = {}

    @cached_property
    def payloads(self) -> list[tuple[bytes, bytes]]:
        """Payload and packed properties of each message."""
        known = self._properties
        return [
            (frame[smq.PUBLISH_HEADER_BYTES :], known if known is not None else self._properties_of(frame))
            for frame in smq.frames(self._batch)
        ]

    @property
    def count(self) -> int:
        """The number of messages."""
        return len(self.payloads)

    def singles(self) -> Iterator[Run]:
        """Return a run for each message."""
        for frame in smq.frames(self._batch):
            batch = self._batch.like(frame) if isinstance(self._batch, MqttBatch) else frame
            yield Run(self.name, self.key, batch, self.qos, self._properties_of, self.now_s)

    def packets(self, version: int, retain: bool, identifiers: bytes) -> bytes:
        """Return the PUBLISH packets with QoS 0."""
        version = 5 if version == 5 else 4
        found = self._packets.get((version, retain, identifiers))
        if found is None:
            found = b"".join(self._encoded(version, retain, identifiers))
            self._packets[version, retain, identifiers] = found
        return found

    def _encoded(self, version: int, retain: bool, identifiers: bytes) -> Iterator[bytes]:
        first, name = bytes((0x30 | retain,)), _U16.pack(len(self.name)) + self.name
        for payload, properties in self.payloads:
            block = b""
            if version == 5:
                block = property_block(properties, self.expires_s, identifiers, self.now_s)
            yield first + varint(len(name) + len(block) + len(payload)) + name + block + payload

    def messages(self, qos: int, retain: bool, identifiers: bytes) -> list[Message]:
        """Return the messages with QoS 1 or 2."""
        found = self._messages.get((qos, retain, identifiers))
        if found is None:
            found = self._messages[qos, retain, identifiers] = [
                Message(self.name, payload, qos, retain, properties, self.expires_s, identifiers)
                for payload, properties in self.payloads
            ]
        return found
