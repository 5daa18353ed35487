"""Packets out of the byte stream of a broker, and the hot packet, PUBLISH, into bytes (MQTT 5 §2.1, §3.3)."""

from __future__ import annotations

from struct import pack
from typing import Any

from paho.mqtt import _packet
from paho.mqtt.enums import MQTTProtocolVersion
from paho.mqtt.exception import MalformedPacket

from smqrt.mqtt.properties import PacketTypes, Properties, as_dict

MAX_PACKET_BYTES = 268_435_455 + 5
_LENGTH_BYTES = 4


class PacketTooLargeError(Exception):
    """The broker sends more than was agreed."""


class Packets:
    """Cuts what was received into packets.

    Args:
        limit_bytes: the largest packet that is let in, its header included.
    """

    __slots__ = ("_at", "_buffer", "limit_bytes")

    def __init__(self, limit_bytes: int = MAX_PACKET_BYTES) -> None:
        self._buffer = bytearray()
        self._at = 0
        self.limit_bytes = limit_bytes

    def feed(self, data: bytes) -> None:
        """Take what was received."""
        if self._at:
            del self._buffer[: self._at]
            self._at = 0
        self._buffer += data

    def next(self) -> tuple[int, bytes] | None:
        """The first byte and the body of the next packet, None when it is not there as a whole.

        Raises:
            MalformedPacket: the length is none.
            PacketTooLargeError: above the limit; known as soon as the header is there.
        """
        buffer, at = self._buffer, self._at
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
            raise PacketTooLargeError(f"a packet of {end - at} bytes, {self.limit_bytes} are agreed")
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
            raise MalformedPacket("the length of a packet has more than four bytes")
        return None


def length_bytes(size: int) -> bytes:
    """The variable byte integer `size`.

    Raises:
        ValueError: it has more than 28 bits.
    """
    if size < 128:
        return bytes((size,))
    encoded = bytearray()
    while size > 127:
        encoded.append(size & 127 | 128)
        size >>= 7
    encoded.append(size)
    if len(encoded) > _LENGTH_BYTES:
        raise ValueError("packets have at most 268435455 bytes")
    return bytes(encoded)


def publish_packet(flags: int, topic: bytes, mid: int, properties: bytes, payload: bytes) -> bytes:
    """A PUBLISH packet.

    Args:
        flags: the lower half of the first byte: dup, QoS, retain.
        mid: the packet identifier, left out with QoS 0.
        properties: packed, with their length; empty for MQTT 3.1.1.
    """
    number = pack("!H", mid) if flags & 6 else b""
    size = 2 + len(topic) + len(number) + len(properties) + len(payload)
    return b"".join(
        (bytes((0x30 | flags,)), length_bytes(size), pack("!H", len(topic)), topic, number, properties, payload)
    )


@_packet.convert_exception
def parse_connack(body: bytes | bytearray, is_v5: bool) -> tuple[int, int, dict[str, Any]]:
    """Flags, code (paho does not know all of them) and properties of a CONNACK packet.

    Raises:
        MalformedPacket: it is none.
    """
    if len(body) < 2 or (not is_v5 and len(body) > 2):
        raise MalformedPacket("a CONNACK packet of a wrong size")
    properties = Properties(PacketTypes.CONNACK)
    if len(body) > 2:
        properties.unpack(bytes(body[2:]))
    return body[0], body[1], as_dict(properties)


def parse_publish(command: int, body: bytes, is_v5: bool) -> tuple[str, int, dict[str, Any], bytes]:
    """Topic, packet identifier (0 with QoS 0), properties and payload of a PUBLISH packet.

    Raises:
        MalformedPacket: it is none.
    """
    qos = command >> 1 & 3
    end = 2 + int.from_bytes(body[:2])
    at = end + 2 if qos else end
    if qos == 3 or len(body) < at + is_v5:
        raise MalformedPacket("a PUBLISH packet with QoS 3, or cut off")
    if is_v5 and body[at]:
        return _with_properties(command, body)
    mid = body[end] << 8 | body[end + 1] if qos else 0
    if qos and not mid:
        raise MalformedPacket("packet identifier 0")
    return _text(body[2:end]), mid, {}, body[at + is_v5 :]


def _with_properties(command: int, body: bytes) -> tuple[str, int, dict[str, Any], bytes]:
    packet = _packet.decode_publish(command, body, MQTTProtocolVersion.MQTTv5)
    return _text(packet.topic), packet.mid, as_dict(packet.properties), bytes(packet.payload)


def _text(topic: bytes) -> str:
    try:
        return topic.decode()
    except UnicodeDecodeError:
        raise MalformedPacket("a topic that is not UTF-8") from None
