"""Strict decoder of MQTT packets.

A packet is a first byte (its type in the upper half, flags in the lower one), the length of its body, and the body
(§2.1). `PacketSplitter` cuts a stream into first bytes and bodies, `decode` makes tuples of them. A malformed packet,
or one that breaks a rule on its own, raises MqttError with the reason code. Received bytes raise no other exception.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from smqrt.errors import MqttError
from smqrt.wire.mqtt.packets import (
    DUP,
    FLAGS,
    MAX_PACKET_BYTES,
    Acknowledgement,
    AuthPacket,
    ConnackPacket,
    ConnectPacket,
    DisconnectPacket,
    Packet,
    PingPacket,
    PublishPacket,
    SubscribeAnswer,
    SubscribePacket,
    Subscription,
    UnsubscribePacket,
    WillMessage,
)
from smqrt.wire.mqtt.properties import (
    PacketType,
    Properties,
    cut_off,
    decode_properties,
    find_alias,
    read_binary,
    read_text,
)
from smqrt.wire.mqtt.reasons import Reason
from smqrt.wire.mqtt.topics import is_topic_name

MAX_FILTERS = 1000
"""In one SUBSCRIBE or UNSUBSCRIBE. Each one is looked up in the subscriptions, so more would block the loop."""
_MAX_LENGTH_BYTES = 4
_TYPES = tuple(PacketType)  # by number; calling the enum takes longer than the rest of a PUBACK

# ---- packets of a stream


class PacketSplitter:
    """Splits received bytes into packets.

    Args:
        limit_bytes: the largest packet that is accepted, with its header.

    Attributes:
        only: the type that the next packet must have (its first byte without the flags), 0 for any. The first byte is
            checked at once: a peer with another protocol may never complete a packet.
    """

    __slots__ = ("_at", "_buffer", "limit_bytes", "only")

    def __init__(self, limit_bytes: int = MAX_PACKET_BYTES) -> None:
        self._buffer = bytearray()
        self._at = 0
        self.limit_bytes = limit_bytes
        self.only = 0

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        if self._at:
            del self._buffer[: self._at]
            self._at = 0
        self._buffer += data

    def next(self) -> tuple[int, bytes] | None:
        """Return the first byte and the body of the next packet, None while it is incomplete.

        Raises:
            MqttError: an invalid length, one above the limit (known from the header), or a type that is not `only`.
        """
        buffer, at = self._buffer, self._at
        if self.only and len(buffer) > at and buffer[at] & 0xF0 != self.only:
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


# ---- tuples of packets


def decode(first: int, body: bytes, version: int, is_from_client: bool) -> Packet:
    """Return the packet of a first byte and a body.

    Args:
        version: 5 or 4; CONNECT has its own.

    Raises:
        TooManyPropertiesError: more properties than MAX_PROPERTIES.
        MqttError: a malformed packet, or one that this side must not send.
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
        MqttError: not the flags of table 2-2 [MQTT-2.1.3-1].
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


# the flags of CONNECT (§3.1.2.3)
_RESERVED, _CLEAN_START, _WILL, _WILL_QOS, _WILL_RETAIN, _PASSWORD, _USERNAME = 0x01, 0x02, 0x04, 0x18, 0x20, 0x40, 0x80


def connect_version(body: bytes) -> int:
    """Return the version (5 or 4) for the answer to CONNECT, also an invalid one; 0 when it is not of MQTT."""
    for name in (b"\0\4MQTT", b"\0\6MQIsdp"):
        if body.startswith(name) and len(body) > len(name):
            return 4 if body[len(name)] < 5 else 5
    return 0


def decode_connect(_first: int, body: bytes, _version: int = 0) -> ConnectPacket:
    """Decode CONNECT; raises as `decode`."""
    name, at = read_text(body, 0, len(body))
    if at + 4 > len(body):
        raise cut_off()
    version, flags, keepalive_s, at = body[at], body[at + 1], body[at + 2] << 8 | body[at + 3], at + 4
    if name != "MQTT" or version not in (4, 5):
        raise MqttError(Reason.UNSUPPORTED_PROTOCOL_VERSION, "neither MQTT 3.1.1 nor MQTT 5")
    if flags & _RESERVED:
        raise MqttError(Reason.MALFORMED_PACKET, "a reserved flag of CONNECT is set")  # [MQTT-3.1.2-3]
    if flags & _WILL_QOS == _WILL_QOS:
        raise MqttError(Reason.MALFORMED_PACKET, "a will with QoS 3")  # [MQTT-3.1.2-12]
    if not flags & _WILL and flags & (_WILL_QOS | _WILL_RETAIN):
        raise MqttError(Reason.MALFORMED_PACKET, "flags of a will without one")  # [MQTT-3.1.2-11], [MQTT-3.1.2-13]
    if version == 4 and flags & (_USERNAME | _PASSWORD) == _PASSWORD:
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
        version, identifier, bool(flags & _CLEAN_START), keepalive_s, properties, will, username, password
    )


def _decode_will(body: bytes, at: int, flags: int, version: int) -> tuple[WillMessage, int]:
    properties, start = _properties(body, at, PacketType.WILL, version)
    topic, end = read_text(body, start, len(body))
    payload, end = read_binary(body, end, len(body))
    if not is_topic_name(topic):
        raise MqttError(Reason.TOPIC_NAME_INVALID, "the topic of the will is empty or has a wildcard")
    block = body[at:start] if properties else b""
    return WillMessage(topic, payload, flags >> 3 & 3, bool(flags & _WILL_RETAIN), properties, block), end


def decode_connack(_first: int, body: bytes, version: int) -> ConnackPacket:
    """Decode CONNACK; raises as `decode`."""
    if len(body) < 2 or (version < 5 and len(body) > 2):
        raise MqttError(Reason.MALFORMED_PACKET, "a CONNACK packet of a wrong size")
    if body[0] > 1:
        raise MqttError(Reason.MALFORMED_PACKET, "a reserved flag of CONNACK is set")  # [MQTT-3.2.2-1]
    # MQTT 5 has at least the length of the properties; some servers omit it in a refusal
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
    """Decode SUBSCRIBE; raises as `decode`. Topic filters are not checked: SUBACK has failures for them."""
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


def _decode_auth(_first: int, body: bytes, _version: int) -> AuthPacket:
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
    PacketType.AUTH: _decode_auth,
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
