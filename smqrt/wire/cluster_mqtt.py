"""Packets between cluster nodes about MQTT clients; link versions 2 to 4.

A body that does not fit one packet is sent in several: all but the last one have the type `LinkType.PART`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from enum import IntFlag
from typing import NamedTuple

from smqrt.errors import CloseReason, ProtocolError
from smqrt.wire import smq
from smqrt.wire.cluster_packets import LinkType
from smqrt.wire.smq import MAX_PACKET_BYTES

VERSION, STREAM_VERSION, SESSION_VERSION = 2, 3, 4
"""The version of links that carry these packets, of those that number messages with QoS 1 and 2, and of those with
messages for one session.
"""
IDENTITY_BYTES = 16
NEVER_MS = (1 << 64) - 1
"""The time to live of messages that do not expire."""
PART_BYTES = MAX_PACKET_BYTES - 3
"""The maximum bytes of a body in one packet: `MESSAGES` and similar types also have a u16."""
MAX_BODY_BYTES = 1 << 28
"""The maximum length of a body, which is that of an MQTT packet."""


class Wanted(IntFlag):
    """What a node does with messages that a filter matches.

    Attributes:
        MESSAGES: it delivers them.
        ONCE: its application handles them with `once`.
        CONNECTED: the filter is a shared subscription, and a client of the group is connected to the node.
        OFFLINE: the filter is a shared subscription, and the node has sessions of the group without a connection.
    """

    MESSAGES = 1
    ONCE = 2
    CONNECTED = 4
    OFFLINE = 8


class WireMessages(NamedTuple):
    """Messages to one topic, with what SMQ frames do not carry.

    Attributes:
        name: the topic name.
        group: the shared subscription whose client gets them, `$share/group/filter`; empty for all subscribers.
        frames: Publish frames; a topic id in them has no meaning.
        is_mqtt: whether an MQTT client has published them; without it, only name and group matter.
        qos, retain, properties: see `smqrt.broker.mqtt.messages.MqttBatch`.
        left_ms: the time until they expire, or `NEVER_MS`.
        large: the payload of a message that does not fit a frame; None for others.
        session: for a message that only one session gets, JSON that describes it; then there is no group.
    """

    name: bytes
    group: bytes
    frames: bytes
    is_mqtt: bool = False
    qos: int = 0
    retain: bool = False
    properties: bytes = b""
    left_ms: int = NEVER_MS
    large: bytes | None = None
    session: bytes = b""


class Numbered(NamedTuple):
    """Messages with QoS 1 or 2 that the receiver acknowledges.

    Attributes:
        stream: the random number of the stream.
        number: their number in the stream, from 1.
        origin: the id of the first message with QoS 2; the following messages have the next ids. 0 for none.
        messages: the messages.
    """

    stream: int
    number: int
    origin: int
    messages: WireMessages


class WireRetained(NamedTuple):
    """A retained message.

    Attributes:
        stamp: when it was set, in µs since 1970; 0 when that is unknown.
        name: the topic name.
        payload: the payload; empty when the message was deleted.
        qos, properties: those of the message.
        left_ms: the time until it expires, or `NEVER_MS`.
    """

    stamp: int
    name: bytes
    payload: bytes
    qos: int = 0
    properties: bytes = b""
    left_ms: int = NEVER_MS


_FILTER = struct.Struct(">BH")
_MESSAGES = struct.Struct(">BQHHII")  # flags, left_ms, lengths of name, group, properties and frames
_NUMBERED = struct.Struct(">QQ16s")  # stream, number, origin
_POSITION = struct.Struct(">BQQ")
_RETAINED = struct.Struct(">QBQHI")  # stamp, qos, left_ms, lengths of name and properties
_IS_MQTT, _RETAIN, _IS_LARGE, _IS_FOR_SESSION = 4, 8, 16, 32  # above the two bits of the QoS


def filters(of: Iterable[tuple[str, int]]) -> Iterator[bytes]:
    """Yield Filters packets of (filter, what the sender wants); with 0, the filter is removed."""
    packet = bytearray((LinkType.FILTERS,))
    for text, wanted in of:
        raw = text.encode()
        if len(packet) + _FILTER.size + len(raw) > MAX_PACKET_BYTES:
            if len(packet) > 1:
                yield bytes(packet)
            packet = bytearray((LinkType.FILTERS,))
        if _FILTER.size + len(raw) < MAX_PACKET_BYTES:  # a longer one would match names that do not fit either
            packet += _FILTER.pack(wanted, len(raw)) + raw
    if len(packet) > 1:
        yield bytes(packet)


def parse_filters(packet: bytes) -> Iterator[tuple[str, Wanted]]:
    """Parse a Filters packet.

    Raises:
        ProtocolError: it is too short, or a filter is not UTF-8.
    """
    at = 1
    while at < len(packet):
        if at + _FILTER.size > len(packet):
            raise _short()
        wanted, size = _FILTER.unpack_from(packet, at)
        at += _FILTER.size
        if at + size > len(packet):
            raise _short()
        yield _text(packet[at : at + size]), Wanted(wanted & 15)
        at += size


def messages(of: WireMessages) -> bytes:
    """Return the frames with messages, for the send queue of a node; `count_messages` counts them."""
    return packets(_head(LinkType.MESSAGES, of), _body(of))


def _head(kind: LinkType, of: WireMessages) -> bytes:
    return bytes((kind,)) + min(smq.count_frames(of.frames), 0xFFFF).to_bytes(2, "big")


def _body(of: WireMessages) -> bytes:
    flags = of.qos | of.is_mqtt * _IS_MQTT | of.retain * _RETAIN | (of.large is not None) * _IS_LARGE
    flags |= bool(of.session) * _IS_FOR_SESSION
    receiver = of.session or of.group
    lengths = len(of.name), len(receiver), len(of.properties), len(of.frames)
    body = _MESSAGES.pack(flags, of.left_ms, *lengths) + of.name + receiver + of.properties + of.frames
    return body + (of.large or b"")


def parse_messages(body: bytes) -> WireMessages:
    """Parse the body of Messages.

    Raises:
        ProtocolError: it is malformed.
    """
    if len(body) < _MESSAGES.size:
        raise _short()
    flags, left_ms, *lengths = _MESSAGES.unpack_from(body)
    parts, at = [], _MESSAGES.size
    for length in lengths:
        parts.append(body[at : at + length])
        at += length
    name, receiver, properties, frames = parts
    large = body[at:] if flags & _IS_LARGE else None
    if at > len(body) or flags & 3 > 2 or not name or not _are_messages(frames):
        raise _short()
    group, session = (b"", receiver) if flags & _IS_FOR_SESSION else (receiver, b"")
    is_mqtt, retain = bool(flags & _IS_MQTT), bool(flags & _RETAIN)
    return WireMessages(name, group, frames, is_mqtt, flags & 3, retain, properties, left_ms, large, session)


def _are_messages(frames: bytes) -> bool:
    """Return whether bytes are whole Publish frames, at least one."""
    at, end = 0, len(frames)
    while at + smq.PUBLISH_HEADER_BYTES <= end:
        size = frames[at] << 8 | frames[at + 1]
        if size < smq.PUBLISH_HEADER_BYTES or frames[at + 2] != smq.Type.PUBLISH:
            return False
        at += size
    return 0 < at == end


class NumberedFrames(bytes):
    """Frames with numbered messages. A full queue does not drop them, since their sender keeps and limits them."""


def numbered(of: Numbered) -> NumberedFrames:
    """Return the frames with numbered messages, for the send queue of a node."""
    body = _NUMBERED.pack(of.stream, of.number, of.origin.to_bytes(16, "big")) + _body(of.messages)
    return NumberedFrames(packets(_head(LinkType.STREAMED, of.messages), body))


def parse_numbered(body: bytes) -> Numbered:
    """Parse the body of Numbered.

    Raises:
        ProtocolError: it is malformed.
    """
    if len(body) < _NUMBERED.size:
        raise _short()
    stream, number, origin = _NUMBERED.unpack_from(body)
    return Numbered(stream, number, int.from_bytes(origin, "big"), parse_messages(body[_NUMBERED.size :]))


def greeting(identity: bytes) -> bytes:
    """Return a Greeting packet."""
    return bytes((LinkType.GREETING,)) + identity


def parse_greeting(packet: bytes) -> bytes:
    """Return the identity in a Greeting packet. Raises ProtocolError when it is malformed."""
    if len(packet) != 1 + IDENTITY_BYTES:
        raise _short()
    return packet[1:]


def position(kind: LinkType, stream: int, number: int) -> bytes:
    """Return a Continue, Arrived or Declined packet."""
    return _POSITION.pack(kind, stream, number)


def parse_position(packet: bytes) -> tuple[int, int]:
    """Return stream and number of a Continue, Arrived or Declined packet. Raises ProtocolError when it is malformed."""
    if len(packet) != _POSITION.size:
        raise _short()
    _, stream, number = _POSITION.unpack(packet)
    return stream, number


def retained(of: WireRetained) -> bytes:
    """Return the frames with a retained message, for the send queue of a node."""
    head = _RETAINED.pack(of.stamp, of.qos, of.left_ms, len(of.name), len(of.properties))
    return packets(bytes((LinkType.RETAINED,)), head + of.name + of.properties + of.payload)


def parse_retained(body: bytes) -> WireRetained:
    """Parse the body of Retained.

    Raises:
        ProtocolError: it is malformed.
    """
    if len(body) < _RETAINED.size:
        raise _short()
    stamp, qos, left_ms, name_bytes, property_bytes = _RETAINED.unpack_from(body)
    start = _RETAINED.size + name_bytes
    end = start + property_bytes
    if end > len(body) or not name_bytes or qos > 2:
        raise _short()
    return WireRetained(stamp, body[_RETAINED.size : start], body[end:], qos, body[start:end], left_ms)


def packets(head: bytes, body: bytes) -> bytes:
    """Return the frames of a body: parts, and a packet that begins with `head`."""
    if len(body) <= PART_BYTES:
        return smq.frame(head + body)
    cuts = [body[at : at + PART_BYTES] for at in range(0, len(body), PART_BYTES)]
    last = cuts.pop()
    return b"".join([smq.frame(bytes((LinkType.PART,)) + cut) for cut in cuts]) + smq.frame(head + last)


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise ProtocolError(CloseReason.UNKNOWN_PACKET, "a text of another node is not UTF-8") from None


def _short() -> ProtocolError:
    return ProtocolError(CloseReason.SHORT_PACKET, "a packet of another node about MQTT clients is malformed")
