"""Packets out of the byte stream of a broker, what they hold, and PUBLISH packets into bytes (MQTT 5 §2.1, §3)."""

from __future__ import annotations

from struct import pack
from typing import Any

from smqrt.errors import MqttError
from smqrt.wire.mqtt_properties import MALFORMED, PROTOCOL_ERROR, Packet, checked_text, decode, varint

TOO_LARGE = 0x95
MAX_PACKET_BYTES = 268_435_455 + 5
_LENGTH_BYTES = 4


class Packets:
    """Cuts what was received into packets.

    Args:
        limit_bytes: the largest packet that is let in, its header included.

    Attributes:
        only: the type that the next packet has to have (its first byte without the flags); 0 lets all in. It is looked
            at with the first byte: what is no broker would keep us waiting for the end of a packet.
    """

    __slots__ = ("_at", "_buffer", "limit_bytes", "only")

    def __init__(self, limit_bytes: int = MAX_PACKET_BYTES) -> None:
        self._buffer = bytearray()
        self._at = 0
        self.limit_bytes = limit_bytes
        self.only = 0

    def feed(self, data: bytes) -> None:
        """Take what was received."""
        if self._at:
            del self._buffer[: self._at]
            self._at = 0
        self._buffer += data

    def next(self) -> tuple[int, bytes] | None:
        """The first byte and the body of the next packet, None when it is not there as a whole.

        Raises:
            MqttError: the length is none, or above the limit, which is known as soon as the header is there; or it is
                not the `only` one.
        """
        buffer, at = self._buffer, self._at
        if self.only and len(buffer) > at and buffer[at] & 0xF0 != self.only:
            raise MqttError(PROTOCOL_ERROR, f"packet {buffer[at]:#x} in the wrong place")
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
            raise MqttError(TOO_LARGE, f"a packet of {end - at} bytes, {self.limit_bytes} are agreed")
        if end > len(buffer):
            return None
        self._at = end
        return buffer[at], bytes(memoryview(buffer)[start:end])

    def _long_length(self, at: int) -> tuple[int, int] | None:
        size = 0
        for index, byte in enumerate(self._buffer[at : at + _LENGTH_BYTES]):
            size |= (byte & 127) << 7 * index
            if byte < 128:
                return size, at + index + 1
        if len(self._buffer) - at >= _LENGTH_BYTES:
            raise MqttError(MALFORMED, "the length of a packet has more than four bytes")
        return None


def publish_packet(flags: int, topic: bytes, mid: int, properties: bytes, payload: bytes) -> bytes:
    """A PUBLISH packet.

    Args:
        flags: the lower half of the first byte: dup, QoS, retain.
        mid: the packet identifier, left out with QoS 0.
        properties: packed, with their length; empty for MQTT 3.1.1.
    """
    number = pack("!H", mid) if flags & 6 else b""
    size = 2 + len(topic) + len(number) + len(properties) + len(payload)
    return b"".join((bytes((0x30 | flags,)), varint(size), pack("!H", len(topic)), topic, number, properties, payload))


# ---- what packets of a broker hold; all raise MqttError for what is none


def parse_connack(body: bytes, is_v5: bool) -> tuple[int, int, dict[str, Any]]:
    """Flags, code and properties of a CONNACK packet."""
    if len(body) < 2 or (not is_v5 and len(body) > 2):
        raise MqttError(MALFORMED, "a CONNACK packet of a wrong size")
    properties = decode(body, 2, Packet.CONNACK)[0] if len(body) > 2 else {}
    return body[0], body[1], properties


def parse_disconnect(body: bytes) -> tuple[int, dict[str, Any]]:
    """Code and properties of a DISCONNECT packet."""
    properties = decode(body, 1, Packet.DISCONNECT)[0] if len(body) > 1 else {}
    return body[0] if body else 0, properties


def parse_acknowledgement(body: bytes, is_v5: bool) -> tuple[int, int]:
    """Packet identifier and code of PUBACK, PUBREC, PUBREL and PUBCOMP; nobody asks for their properties."""
    if len(body) < 2 or (not is_v5 and len(body) > 2):
        raise MqttError(MALFORMED, "an acknowledgement of a wrong size")
    return body[0] << 8 | body[1], body[2] if len(body) > 2 else 0


def parse_answer(packet: Packet, body: bytes, is_v5: bool) -> tuple[int, int, dict[str, Any]]:
    """Packet identifier, code and properties of SUBACK or UNSUBACK. One topic was asked for, so there is one code; none
    in UNSUBACK of MQTT 3.1.1."""
    properties, at = decode(body, 2, packet) if is_v5 and len(body) > 2 else ({}, 2)
    expected = 1 if is_v5 or packet is Packet.SUBACK else 0
    if len(body) != at + expected:
        raise MqttError(MALFORMED, "an answer to a subscription of a wrong size")
    return body[0] << 8 | body[1], body[at] if expected else 0, properties


def parse_publish(command: int, body: bytes, is_v5: bool) -> tuple[str, int, dict[str, Any], bytes]:
    """Topic, packet identifier (0 with QoS 0), properties and payload of a PUBLISH packet.

    Raises:
        TooManyPropertiesError: it is one, but has more of them than is allowed; `identifier_of` tells which it is.
    """
    qos = command >> 1 & 3
    end = 2 + int.from_bytes(body[:2])
    at = end + 2 if qos else end
    if qos == 3 or len(body) < at + is_v5:
        raise MqttError(MALFORMED, "a PUBLISH packet with QoS 3, or cut off")
    mid = body[end] << 8 | body[end + 1] if qos else 0
    if qos and not mid:
        raise MqttError(MALFORMED, "packet identifier 0")
    topic = checked_text(body[2:end])
    if not is_v5:
        return topic, mid, {}, body[at:]
    if not body[at]:
        return topic, mid, {}, body[at + 1 :]
    properties, at = decode(body, at, Packet.PUBLISH)
    return topic, mid, properties, body[at:]


def identifier_of(body: bytes) -> int:
    """The packet identifier of a PUBLISH packet with QoS 1 or 2."""
    end = 2 + int.from_bytes(body[:2])
    return body[end] << 8 | body[end + 1]
