"""MQTT packets as tuples, and their encoding, for MQTT 3.1.1 and 5.

Sections and statements, here and in `smqrt.wire.mqtt.decode`, are those of MQTT 5; version 4 stands for MQTT 3.1.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import NamedTuple

from smqrt.errors import ArgumentError
from smqrt.wire.mqtt.properties import (
    MAX_TEXT_BYTES,
    PacketType,
    Properties,
    Props,
    encode_properties,
    varint,
)

MAX_PACKET_BYTES = 268_435_455 + 5
DUP, RETAIN = 0x08, 0x01
_U16 = Struct(">H")
_NO_PROPERTIES: Properties = {}
FLAGS: dict[int, int] = {PacketType.PUBREL: 2, PacketType.SUBSCRIBE: 2, PacketType.UNSUBSCRIBE: 2}
"""The lower half of the first byte where it is not 0 (table 2-2), except PUBLISH."""


class WillMessage(NamedTuple):
    """Message that the server publishes when the connection ends without DISCONNECT (§3.1.2.5)."""

    topic: str
    payload: bytes
    qos: int = 0
    retain: bool = False
    properties: Props = _NO_PROPERTIES
    property_bytes: bytes = b""
    """The received bytes with their length, to forward properties in their order [MQTT-3.1.3-10]."""


class ConnectPacket(NamedTuple):
    """CONNECT (§3.1); `keepalive_s` 0 is no keep-alive."""

    version: int
    client_identifier: str
    clean_start: bool = True
    keepalive_s: int = 0
    properties: Props = _NO_PROPERTIES
    will: WillMessage | None = None
    username: str | None = None
    password: bytes | None = None


class ConnackPacket(NamedTuple):
    """CONNACK (§3.2); with MQTT 3.1.1 the code is the return code."""

    session_present: bool
    code: int
    properties: Props = _NO_PROPERTIES


class PublishPacket(NamedTuple):
    """PUBLISH (§3.3); `packet_identifier` is 0 with QoS 0."""

    topic: str
    payload: bytes
    flags: int = 0
    """The lower half of the first byte: DUP 8, QoS 6, retain 1."""
    packet_identifier: int = 0
    properties: Props = _NO_PROPERTIES
    property_bytes: bytes = b""
    """The received bytes with their length, to forward properties without encoding them."""

    @property
    def qos(self) -> int:
        """The quality of service."""
        return self.flags >> 1 & 3

    @property
    def retain(self) -> bool:
        """The retain flag."""
        return bool(self.flags & RETAIN)


class Acknowledgement(NamedTuple):
    """PUBACK, PUBREC, PUBREL or PUBCOMP (§3.4 to §3.7)."""

    type: PacketType
    packet_identifier: int
    code: int = 0
    properties: Props = _NO_PROPERTIES


class Subscription(NamedTuple):
    """One topic filter of SUBSCRIBE with its options (§3.8.3.1).

    Their bits: QoS 3, no local 4, retain as published 8, retain handling 0x30.
    """

    topic: str
    options: int = 0


class SubscribePacket(NamedTuple):
    """SUBSCRIBE (§3.8)."""

    packet_identifier: int
    subscriptions: Sequence[Subscription]
    properties: Props = _NO_PROPERTIES


class UnsubscribePacket(NamedTuple):
    """UNSUBSCRIBE (§3.10)."""

    packet_identifier: int
    topics: Sequence[str]
    properties: Props = _NO_PROPERTIES


class SubscribeAnswer(NamedTuple):
    """SUBACK or UNSUBACK (§3.9, §3.11) with a code for each topic filter, without codes in UNSUBACK of MQTT 3.1.1."""

    type: PacketType
    packet_identifier: int
    codes: bytes
    properties: Props = _NO_PROPERTIES


class PingPacket(NamedTuple):
    """PINGREQ or PINGRESP (§3.12, §3.13)."""

    type: PacketType


class DisconnectPacket(NamedTuple):
    """DISCONNECT (§3.14); in MQTT 3.1.1 only clients send it, without a code."""

    code: int = 0
    properties: Props = _NO_PROPERTIES


class AuthPacket(NamedTuple):
    """AUTH (§3.15), of MQTT 5 only."""

    code: int = 0
    properties: Props = _NO_PROPERTIES


Packet = (
    ConnectPacket
    | ConnackPacket
    | PublishPacket
    | Acknowledgement
    | SubscribePacket
    | SubscribeAnswer
    | UnsubscribePacket
    | PingPacket
    | DisconnectPacket
    | AuthPacket
)

# ---- encoding

PINGREQ, PINGRESP = b"\xc0\0", b"\xd0\0"


def encode(packet: Packet, version: int) -> bytes:
    """Return the bytes of a packet.

    Args:
        version: 5 or 4; CONNECT has its own. Fields that MQTT 3.1.1 does not have are omitted.

    Raises:
        ArgumentError: a text, a value or a property that MQTT can't encode.
    """
    if isinstance(packet, PublishPacket):
        properties = encode_properties(packet.properties, PacketType.PUBLISH) if version == 5 else b""
        return encode_publish(packet.flags, packet.topic.encode(), packet.packet_identifier, properties, packet.payload)
    first, body = _ENCODERS[type(packet)](packet, version)
    return first + varint(len(body)) + body


def encode_publish(flags: int, topic: bytes, packet_identifier: int, properties: bytes, payload: bytes) -> bytes:
    """Return a PUBLISH packet.

    Args:
        flags: the lower half of the first byte: DUP, QoS, retain.
        packet_identifier: omitted with QoS 0.
        properties: packed, with their length; empty for MQTT 3.1.1.
    """
    number = packet_identifier.to_bytes(2) if flags & 6 else b""
    size = 2 + len(topic) + len(number) + len(properties) + len(payload)
    head = bytes((0x30 | flags,)) + varint(size) + _U16.pack(len(topic))
    return b"".join((head, topic, number, properties, payload))


def encode_acknowledgement(kind: int, packet_identifier: int, version: int, code: int = 0) -> bytes:
    """Return PUBACK, PUBREC, PUBREL or PUBCOMP without properties; MQTT 3.1.1 has no code."""
    first = kind << 4 | FLAGS.get(kind, 0)
    number = packet_identifier.to_bytes(2)
    if code and version == 5:
        return bytes((first, 3)) + number + bytes((code,))
    return bytes((first, 2)) + number


def _block(properties: Props, kind: PacketType, version: int) -> bytes:
    return encode_properties(properties, kind) if version == 5 else b""


def _sized(data: bytes | str, what: str) -> bytes:
    try:
        raw = data.encode() if isinstance(data, str) else data
    except UnicodeEncodeError:
        raise ArgumentError(f"{what} must be UTF-8, not {data!r}") from None
    if len(raw) > MAX_TEXT_BYTES:
        raise ArgumentError(f"{what} has {len(raw)} bytes; at most {MAX_TEXT_BYTES} are possible")
    return _U16.pack(len(raw)) + raw


def _encode_connect(packet: ConnectPacket, _version: int) -> tuple[bytes, bytes]:
    version, will = packet.version, packet.will
    flags = packet.clean_start << 1 | (packet.username is not None) << 7 | (packet.password is not None) << 6
    parts = [_block(packet.properties, PacketType.CONNECT, version), _sized(packet.client_identifier, "the identifier")]
    if will is not None:
        flags |= 0x04 | will.qos << 3 | will.retain << 5
        parts.append(_block(will.properties, PacketType.WILL, version))
        parts += _sized(will.topic, "the topic of the will"), _sized(will.payload, "the payload of the will")
    if packet.username is not None:
        parts.append(_sized(packet.username, "the user name"))
    if packet.password is not None:
        parts.append(_sized(packet.password, "the password"))
    head = b"\0\4MQTT" + bytes((version, flags)) + _U16.pack(packet.keepalive_s)
    return b"\x10", head + b"".join(parts)


def _encode_connack(packet: ConnackPacket, version: int) -> tuple[bytes, bytes]:
    head = bytes((packet.session_present, packet.code))
    return b"\x20", head + _block(packet.properties, PacketType.CONNACK, version)


def _encode_acknowledgement(packet: Acknowledgement, version: int) -> tuple[bytes, bytes]:
    kind = packet.type
    body = _U16.pack(packet.packet_identifier)
    if version == 5 and (packet.code or packet.properties):
        body += bytes((packet.code,))
        if packet.properties:
            body += _block(packet.properties, kind, version)
    return bytes((kind << 4 | FLAGS.get(kind, 0),)), body


def _encode_subscribe(packet: SubscribePacket, version: int) -> tuple[bytes, bytes]:
    parts = [_U16.pack(packet.packet_identifier), _block(packet.properties, PacketType.SUBSCRIBE, version)]
    mask = 0xFF if version == 5 else 3
    for topic, options in packet.subscriptions:
        parts += _sized(topic, "a topic filter"), bytes((options & mask,))
    return b"\x82", b"".join(parts)


def _encode_unsubscribe(packet: UnsubscribePacket, version: int) -> tuple[bytes, bytes]:
    parts = [_U16.pack(packet.packet_identifier), _block(packet.properties, PacketType.UNSUBSCRIBE, version)]
    return b"\xa2", b"".join(parts + [_sized(topic, "a topic filter") for topic in packet.topics])


def _encode_subscribe_answer(packet: SubscribeAnswer, version: int) -> tuple[bytes, bytes]:
    kind, codes = packet.type, packet.codes
    if version < 5:  # SUBACK has one failure code, UNSUBACK no codes
        codes = bytes(min(code, 0x80) for code in codes) if kind is PacketType.SUBACK else b""
    head = _U16.pack(packet.packet_identifier)
    return bytes((kind << 4,)), head + _block(packet.properties, kind, version) + codes


def _encode_ping(packet: PingPacket, _version: int) -> tuple[bytes, bytes]:
    return bytes((packet.type << 4,)), b""


def _encode_disconnect(packet: DisconnectPacket, version: int) -> tuple[bytes, bytes]:
    return b"\xe0", _coded(packet.code, packet.properties, PacketType.DISCONNECT) if version == 5 else b""


def _encode_auth(packet: AuthPacket, _version: int) -> tuple[bytes, bytes]:
    return b"\xf0", _coded(packet.code, packet.properties, PacketType.AUTH)


def _coded(code: int, properties: Props, kind: PacketType) -> bytes:
    if properties:
        return bytes((code,)) + encode_properties(properties, kind)
    return bytes((code,)) if code else b""


_ENCODERS: dict[type[Packet], Callable[..., tuple[bytes, bytes]]] = {
    ConnectPacket: _encode_connect,
    ConnackPacket: _encode_connack,
    Acknowledgement: _encode_acknowledgement,
    SubscribePacket: _encode_subscribe,
    UnsubscribePacket: _encode_unsubscribe,
    SubscribeAnswer: _encode_subscribe_answer,
    PingPacket: _encode_ping,
    DisconnectPacket: _encode_disconnect,
    AuthPacket: _encode_auth,
}
