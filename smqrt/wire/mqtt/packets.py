"""MQTT packets as tuples, their encoding and strict decoding.

Sections and statements, here and in `smqrt.wire.mqtt.fields`, are those of MQTT 5; version 4 stands for MQTT 3.1.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import NamedTuple

from smqrt.errors import ArgumentError, MqttError
from smqrt.wire.mqtt.fields import (
    MAX_TEXT_BYTES,
    PacketType,
    Properties,
    Props,
    Reason,
    cut_off,
    decode_properties,
    encode_properties,
    find_alias,
    is_topic_name,
    read_binary,
    read_text,
    varint,
)

MAX_PACKET_BYTES = 268_435_455 + 5
DUP, RETAIN = 0x08, 0x01
_U16 = Struct(">H")
_NO_PROPERTIES: Properties = {}
FLAGS: dict[int, int] = {PacketType.PUBREL: 2, PacketType.SUBSCRIBE: 2, PacketType.UNSUBSCRIBE: 2}
"""The lower half of the first byte where it is not 0 (table 2-2), except PUBLISH."""


class WillMessage(NamedTuple):
    """The message that the server publishes when the connection ends without DISCONNECT (§3.1.2.5)."""

    topic: str
    payload: bytes
    qos: int = 0
    retain: bool = False
    properties: Props = _NO_PROPERTIES
    property_bytes: bytes = b""
    """The received bytes with their length, to forward properties in their order [MQTT-3.1.3-10]."""


class ConnectPacket(NamedTuple):
    """CONNECT (§3.1); `keepalive_s` 0: no keep-alive. Version 3 is MQTT 3.1."""

    version: int
    client_identifier: str
    clean_start: bool = True
    keepalive_s: int = 0
    properties: Props = _NO_PROPERTIES
    will: WillMessage | None = None
    username: str | None = None
    password: bytes | None = None
    is_bridge: bool = False
    """Whether the highest bit of the version is set: another broker, which must not get its own messages."""


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
    """SUBACK or UNSUBACK (§3.9, §3.11) with a code for each topic filter; UNSUBACK of MQTT 3.1.1 has no codes."""

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

# ---- Encoding

PINGREQ, PINGRESP = b"\xc0\0", b"\xd0\0"


def encode(packet: Packet, version: int) -> bytes:
    """Return the bytes of a packet.

    Args:
        version: 5 or 4; ignored for CONNECT, which has a version. Fields that MQTT 3.1.1 does not have are omitted.

    Raises:
        ArgumentError: MQTT can't encode a string, a value or a property.
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


def encode_acknowledgements(first: int, numbers: bytes, code: bytes = b"") -> bytes:
    """Return a row of PUBACK, PUBREC, PUBREL or PUBCOMP packets.

    Args:
        first: their first byte.
        numbers: their packet identifiers, two bytes each.
        code: their reason code of MQTT 5 as a byte; empty for success.
    """
    size = 4 + len(code)
    if len(numbers) == 2:
        return bytes((first, size - 2)) + numbers + code
    row = bytearray((bytes((first, size - 2, 0, 0)) + code) * (len(numbers) >> 1))
    row[2::size], row[3::size] = numbers[::2], numbers[1::2]
    return bytes(row)


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
    name = b"\0\6MQIsdp" if version == 3 else b"\0\4MQTT"
    head = name + bytes((version, flags)) + _U16.pack(packet.keepalive_s)
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


# ---- Decoding
#
# A packet is a first byte (its type in the upper half, flags in the lower one), the length of its body, and the body
# (§2.1). `PacketSplitter` splits a stream into first bytes and bodies, and `decode` converts them to tuples. A
# malformed packet, or one that is never valid, raises MqttError with the reason code; no other exception is possible.

MAX_FILTERS = 1000
"""The maximum in one SUBSCRIBE or UNSUBSCRIBE: each filter needs a search in the subscriptions, in one turn."""
_MAX_LENGTH_BYTES = 4
_TYPES = tuple(PacketType)  # by number; calling the enum takes longer than the rest of a PUBACK

# ---- Stream splitting


class PacketSplitter:
    """Splits received bytes into packets.

    Args:
        limit_bytes: the largest packet that is accepted, with its header.

    Attributes:
        only: the required type of the next packet, as its first byte without the flags; 0 for any. It is checked before
            the packet is complete, since a peer with another protocol may never complete one.
        also: another type that is allowed then; 0 for none.
    """

    __slots__ = ("_at", "_buffer", "also", "limit_bytes", "only")

    def __init__(self, limit_bytes: int = MAX_PACKET_BYTES) -> None:
        self._buffer = bytearray()
        self._at = 0
        self.limit_bytes = limit_bytes
        self.only = self.also = 0

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        if self._at:
            del self._buffer[: self._at]
            self._at = 0
        self._buffer += data

    @property
    def is_empty(self) -> bool:
        """Whether no bytes are left."""
        return len(self._buffer) == self._at

    def take_rest(self, limit_bytes: int) -> bytes:
        """Remove and return the beginning of an incomplete packet, if it is not larger than `limit_bytes`."""
        if not 0 < len(self._buffer) - self._at <= limit_bytes:
            return b""
        rest = bytes(self._buffer[self._at :])
        self._buffer.clear()
        self._at = 0
        return rest

    @property
    def rest(self) -> bytes:
        """The bytes that are left."""
        return bytes(self._buffer[self._at :])

    def put_back(self, first: int, body: bytes) -> None:
        """Let `next` return a packet again, before what is left."""
        self._buffer[: self._at] = bytes((first,)) + varint(len(body)) + body
        self._at = 0

    def next(self) -> tuple[int, bytes] | None:
        """Return the first byte and the body of the next packet, None while it is incomplete.

        Raises:
            MqttError: an invalid length, one above the limit (known from the header), or a type that is not `only`.
        """
        buffer, at = self._buffer, self._at
        if self.only and len(buffer) > at and buffer[at] & 0xF0 not in (self.only, self.also or self.only):
            raise MqttError(Reason.PROTOCOL_ERROR, f"unexpected packet {buffer[at]:#x}")
        if len(buffer) - at < 2:
            return None
        size, start = buffer[at + 1], at + 2
        if size > 127:
            length = self._long_length(at + 1)
            if length is None:
                return None
            size, start = length
        end = start + size
        if end - at > self.limit_bytes:
            raise MqttError(Reason.PACKET_TOO_LARGE, f"a packet of {end - at} bytes; the limit is {self.limit_bytes}")
        if end > len(buffer):
            return None
        self._at = end
        return buffer[at], bytes(memoryview(buffer)[start:end])

    def _long_length(self, at: int) -> tuple[int, int] | None:
        size = 0
        for index, byte in enumerate(self._buffer[at : at + _MAX_LENGTH_BYTES]):
            size |= (byte & 127) << 7 * index
            if byte < 128:
                return size, at + index + 1
        if len(self._buffer) - at >= _MAX_LENGTH_BYTES:
            raise MqttError(Reason.MALFORMED_PACKET, "the length of a packet has more than four bytes")
        return None


# ---- Tuples of packets


def decode(first: int, body: bytes, version: int, is_from_client: bool) -> Packet:
    """Return the packet of a first byte and a body.

    Args:
        first: the first byte.
        body: the body.
        version: 5 or 4; ignored for CONNECT, which has a version.
        is_from_client: whether a client has sent the packet.

    Raises:
        TooManyPropertiesError: more properties than MAX_PROPERTIES.
        MqttError: a malformed packet, or one that the sender must not send.
    """
    kind = first >> 4
    decoder = (_FROM_CLIENT if is_from_client else _FROM_SERVER).get(kind)
    is_new = kind == PacketType.AUTH or kind == PacketType.DISCONNECT and not is_from_client  # of MQTT 5 only
    if decoder is None or version < 5 and is_new:
        side = "client" if is_from_client else "server"
        raise MqttError(Reason.PROTOCOL_ERROR, f"packet {first:#x} from a {side} of this version")
    check_flags(first)
    return decoder(first, body, version)


def check_flags(first: int) -> None:
    """Check the flags of a packet other than PUBLISH.

    Raises:
        MqttError: the flags are not those of table 2-2 [MQTT-2.1.3-1].
    """
    if first >> 4 != PacketType.PUBLISH and first & 0x0F != FLAGS.get(first >> 4, 0):
        raise MqttError(Reason.MALFORMED_PACKET, f"packet {first:#x} with wrong flags")


def _properties(body: bytes, at: int, kind: PacketType, version: int) -> tuple[Properties, int]:
    """Return the properties at a position, and the position after them; none in MQTT 3.1.1."""
    if version < 5:
        return {}, at
    if at < len(body) and not body[at]:
        return {}, at + 1
    return decode_properties(body, at, kind)


def _check_end(body: bytes, at: int) -> None:
    if at != len(body):
        raise MqttError(Reason.MALFORMED_PACKET, "bytes after the last field of a packet")


def _identifier(body: bytes) -> int:
    if len(body) < 2:
        raise cut_off()
    number = body[0] << 8 | body[1]
    if not number:
        raise MqttError(Reason.PROTOCOL_ERROR, "packet identifier 0")
    return number


_BRIDGE = 0x80
"""The bit of the version with which mosquitto connects to another broker, in MQTT 3.1 and 3.1.1."""
# the flags of CONNECT (§3.1.2.3)
_RESERVED, _CLEAN_START, _WILL, _WILL_QOS, _WILL_RETAIN, _PASSWORD, _USERNAME = 0x01, 0x02, 0x04, 0x18, 0x20, 0x40, 0x80


def connect_version(body: bytes) -> int:
    """Return the version (5 or 4) for the answer to CONNECT, even if that is invalid; 0 if it is no CONNECT.

    An unknown version gets the answer of the version whose layout the packet has.
    """
    for name in (b"\0\4MQTT", b"\0\6MQIsdp"):
        if body.startswith(name) and len(body) > len(name):
            version = body[len(name)] & ~_BRIDGE
            if name[2:] != b"MQTT" or version in (3, 4):
                return 4
            return 5 if version == 5 or _has_properties(body, len(name) + 4) else 4  # 3.1.1 [MQTT-3.1.2-2]
    return 0


def _has_properties(body: bytes, at: int) -> bool:
    """Return whether properties and a client identifier can be at `body[at]`, behind the keep-alive."""
    if at >= len(body) or body[at] > 127:
        return False
    at += 1 + body[at]
    return at + 2 <= len(body) and at + 2 + (body[at] << 8 | body[at + 1]) <= len(body)


def decode_connect(_first: int, body: bytes, _version: int = 0, takes_level_3: bool = False) -> ConnectPacket:
    """Decode CONNECT; raises as `decode`. With `takes_level_3`, MQTT 3.1 and bridges are accepted as well."""
    name, at = read_text(body, 0, len(body))
    if at + 4 > len(body):
        raise cut_off()
    version, flags, keepalive_s, at = body[at], body[at + 1], body[at + 2] << 8 | body[at + 3], at + 4
    is_bridge = takes_level_3 and version & ~_BRIDGE in (3, 4) and version >= _BRIDGE
    if is_bridge:
        version &= ~_BRIDGE
    is_known = (name == "MQTT" and version in (4, 5)) or (takes_level_3 and name == "MQIsdp" and version == 3)
    if not is_known:
        raise MqttError(Reason.UNSUPPORTED_PROTOCOL_VERSION, "neither MQTT 3.1.1 nor MQTT 5")
    if flags & _WILL_QOS == _WILL_QOS:
        raise MqttError(Reason.MALFORMED_PACKET, "a will with QoS 3")  # [MQTT-3.1.2-12]
    if version == 3:  # 3.1 does not use them
        flags &= ~_RESERVED if flags & _WILL else ~(_RESERVED | _WILL_QOS | _WILL_RETAIN)
    if flags & _RESERVED:
        raise MqttError(Reason.MALFORMED_PACKET, "a reserved flag of CONNECT is set")  # [MQTT-3.1.2-3]
    if not flags & _WILL and flags & (_WILL_QOS | _WILL_RETAIN):
        raise MqttError(Reason.MALFORMED_PACKET, "flags of a will without one")  # [MQTT-3.1.2-11], [MQTT-3.1.2-13]
    if version < 5 and flags & (_USERNAME | _PASSWORD) == _PASSWORD:
        raise MqttError(Reason.MALFORMED_PACKET, "a password without a user name")  # 3.1.1 [MQTT-3.1.2-22]
    properties, at = _properties(body, at, PacketType.CONNECT, version)
    if "authenticationdata" in properties and "authenticationmethod" not in properties:
        raise MqttError(Reason.PROTOCOL_ERROR, "authentication data without a method")
    identifier, at = read_text(body, at, len(body))
    will, at = _decode_will(body, at, flags, version) if flags & _WILL else (None, at)
    username = password = None
    if flags & _USERNAME:
        username, at = read_text(body, at, len(body))
    if flags & _PASSWORD:
        password, at = read_binary(body, at, len(body))
    _check_end(body, at)
    return ConnectPacket(
        version, identifier, bool(flags & _CLEAN_START), keepalive_s, properties, will, username, password, is_bridge
    )


def _decode_will(body: bytes, at: int, flags: int, version: int) -> tuple[WillMessage, int]:
    properties, start = _properties(body, at, PacketType.WILL, version)
    topic, end = read_text(body, start, len(body))
    payload, end = read_binary(body, end, len(body))
    if not is_topic_name(topic):
        raise MqttError(Reason.TOPIC_NAME_INVALID, "the topic of the will is empty or has a wildcard")
    block = body[at:start] if start > at + 1 else b""
    return WillMessage(topic, payload, flags >> 3 & 3, bool(flags & _WILL_RETAIN), properties, block), end


def decode_connack(_first: int, body: bytes, version: int) -> ConnackPacket:
    """Decode CONNACK; raises as `decode`."""
    if len(body) < 2 or (version < 5 and len(body) > 2):
        raise MqttError(Reason.MALFORMED_PACKET, "a CONNACK packet of a wrong size")
    if body[0] > 1:
        raise MqttError(Reason.MALFORMED_PACKET, "a reserved flag of CONNACK is set")  # [MQTT-3.2.2-1]
    # In MQTT 5 the length of the properties is required; some servers omit it in a refusal.
    properties, at = decode_properties(body, 2, PacketType.CONNACK) if len(body) > 2 else ({}, 2)
    _check_end(body, at)
    return ConnackPacket(bool(body[0]), body[1], properties)


def decode_publish(first: int, body: bytes, version: int) -> PublishPacket:
    """Decode PUBLISH; raises as `decode`. The endpoint checks topic and alias."""
    qos, size = first >> 1 & 3, len(body)
    if size < 2:
        raise cut_off()
    end = 2 + (body[0] << 8 | body[1])
    at = end + 2 if qos else end
    if qos == 3 or size < at + (version == 5):
        raise MqttError(Reason.MALFORMED_PACKET, "a PUBLISH packet with QoS 3, or cut off")  # [MQTT-3.3.1-4]
    if not qos and first & DUP:
        raise MqttError(Reason.MALFORMED_PACKET, "a PUBLISH packet with QoS 0 that is sent again")  # [MQTT-3.3.1-2]
    number = body[end] << 8 | body[end + 1] if qos else 0
    if qos and not number:
        raise MqttError(Reason.MALFORMED_PACKET, "packet identifier 0")
    topic, _ = read_text(body, 0, end)
    if "+" in topic or "#" in topic:
        raise MqttError(Reason.TOPIC_NAME_INVALID, "a topic with a wildcard")  # [MQTT-3.3.2-2]
    if version < 5:
        return PublishPacket(topic, body[at:], first & 0x0F, number)
    if not body[at]:
        return PublishPacket(topic, body[at + 1 :], first & 0x0F, number)
    properties, end = decode_properties(body, at, PacketType.PUBLISH)
    return PublishPacket(topic, body[end:], first & 0x0F, number, properties, body[at:end])


def publish_identifier(body: bytes) -> int:
    """Return the packet identifier of a PUBLISH packet with QoS 1 or 2 that `decode_publish` has checked."""
    end = 2 + (body[0] << 8 | body[1])
    return body[end] << 8 | body[end + 1]


def publish_alias(first: int, body: bytes) -> PublishPacket:
    """Return topic and alias of a PUBLISH packet that has too many properties for `decode_publish`.

    Raises:
        MqttError: see `find_alias`.
    """
    topic, at = read_text(body, 0, len(body))
    alias = find_alias(body, at + 2 if first & 6 else at)
    return PublishPacket(topic, b"", properties={"topicalias": alias} if alias else {})


def decode_acknowledgement(first: int, body: bytes, version: int) -> Acknowledgement:
    """Decode PUBACK, PUBREC, PUBREL or PUBCOMP; raises as `decode`."""
    size = len(body)
    if size < 2 or version < 5 and size > 2:
        raise MqttError(Reason.MALFORMED_PACKET, "an acknowledgement of a wrong size")
    if first & 0x0F != (2 if first >> 4 == PacketType.PUBREL else 0):
        raise MqttError(Reason.MALFORMED_PACKET, f"packet {first:#x} with wrong flags")
    kind, number = _TYPES[first >> 4], _identifier(body)
    if size < 4:
        return Acknowledgement(kind, number, body[2] if size > 2 else 0)
    properties, at = decode_properties(body, 3, kind)
    _check_end(body, at)
    return Acknowledgement(kind, number, body[2], properties)


def decode_subscribe(_first: int, body: bytes, version: int) -> SubscribePacket:
    """Decode SUBSCRIBE; raises as `decode`. Topic filters are not checked, since SUBACK reports invalid ones."""
    number, wanted = _identifier(body), list[Subscription]()
    properties, at = _properties(body, 2, PacketType.SUBSCRIBE, version)
    while at < len(body):
        _check_count(wanted)
        topic, at = read_text(body, at, len(body))
        if at == len(body):
            raise cut_off()
        options, at = body[at], at + 1
        if options & (0xFC if version < 5 else 0xC0) or options & 3 == 3:  # reserved bits, or QoS 3
            raise MqttError(Reason.MALFORMED_PACKET, "wrong options of a subscription")  # [MQTT-3.8.3-5]
        if options & 0x30 == 0x30:
            raise MqttError(Reason.PROTOCOL_ERROR, "retain handling 3")
        if options & 0x04 and topic.startswith("$share/"):
            raise MqttError(Reason.PROTOCOL_ERROR, "a shared subscription with no local")  # [MQTT-3.8.3-4]
        wanted.append(Subscription(topic, options))
    if not wanted:
        raise MqttError(Reason.PROTOCOL_ERROR, "SUBSCRIBE without a topic filter")  # [MQTT-3.8.3-2]
    return SubscribePacket(number, wanted, properties)


def _check_count(found: Sequence[object]) -> None:
    if len(found) == MAX_FILTERS:
        raise MqttError(Reason.QUOTA_EXCEEDED, f"a packet with more than {MAX_FILTERS} topic filters")


def decode_unsubscribe(_first: int, body: bytes, version: int) -> UnsubscribePacket:
    """Decode UNSUBSCRIBE; raises as `decode`."""
    number, topics = _identifier(body), list[str]()
    properties, at = _properties(body, 2, PacketType.UNSUBSCRIBE, version)
    while at < len(body):
        _check_count(topics)
        topic, at = read_text(body, at, len(body))
        topics.append(topic)
    if not topics:
        raise MqttError(Reason.PROTOCOL_ERROR, "UNSUBSCRIBE without a topic filter")  # [MQTT-3.10.3-2]
    return UnsubscribePacket(number, topics, properties)


def decode_subscribe_answer(first: int, body: bytes, version: int) -> SubscribeAnswer:
    """Decode SUBACK or UNSUBACK; raises as `decode`."""
    kind, number = PacketType(first >> 4), _identifier(body)
    properties, at = _properties(body, 2, kind, version)
    has_codes = version == 5 or kind is PacketType.SUBACK
    if (at < len(body)) is not has_codes:
        raise MqttError(Reason.MALFORMED_PACKET, "an answer to a subscription of a wrong size")
    return SubscribeAnswer(kind, number, body[at:], properties)


def decode_ping(first: int, body: bytes, _version: int) -> PingPacket:
    """Decode PINGREQ or PINGRESP; raises as `decode`."""
    kind = PacketType(first >> 4)
    if body:
        raise MqttError(Reason.MALFORMED_PACKET, f"a {kind.name} packet with a body")
    return PingPacket(kind)


def decode_disconnect(_first: int, body: bytes, version: int) -> DisconnectPacket:
    """Decode DISCONNECT; raises as `decode`."""
    if version < 5 and body:
        raise MqttError(Reason.MALFORMED_PACKET, "a DISCONNECT packet with a body")
    return DisconnectPacket(*_code_and_properties(body, PacketType.DISCONNECT))


def decode_auth(_first: int, body: bytes, _version: int) -> AuthPacket:
    """Decode AUTH; raises as `decode`."""
    return AuthPacket(*_code_and_properties(body, PacketType.AUTH))


def _code_and_properties(body: bytes, kind: PacketType) -> tuple[int, Properties]:
    if len(body) < 2:
        return body[0] if body else 0, {}
    properties, at = decode_properties(body, 1, kind)
    _check_end(body, at)
    return body[0], properties


_Decoder = Callable[[int, bytes, int], Packet]
_BOTH: dict[int, _Decoder] = {
    PacketType.PUBLISH: decode_publish,
    PacketType.PUBACK: decode_acknowledgement,
    PacketType.PUBREC: decode_acknowledgement,
    PacketType.PUBREL: decode_acknowledgement,
    PacketType.PUBCOMP: decode_acknowledgement,
    PacketType.DISCONNECT: decode_disconnect,
    PacketType.AUTH: decode_auth,
}
_FROM_CLIENT: dict[int, _Decoder] = _BOTH | {
    PacketType.CONNECT: decode_connect,
    PacketType.SUBSCRIBE: decode_subscribe,
    PacketType.UNSUBSCRIBE: decode_unsubscribe,
    PacketType.PINGREQ: decode_ping,
}
_FROM_SERVER: dict[int, _Decoder] = _BOTH | {
    PacketType.CONNACK: decode_connack,
    PacketType.SUBACK: decode_subscribe_answer,
    PacketType.UNSUBACK: decode_subscribe_answer,
    PacketType.PINGRESP: decode_ping,
}
