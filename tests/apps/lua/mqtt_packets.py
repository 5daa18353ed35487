"""MQTT packets as bytes, written from the standard, for tests that say what a client sends byte by byte."""

from __future__ import annotations

import struct


def varint(value: int) -> bytes:
    """A variable byte integer."""
    out = bytearray()
    while True:
        value, low = divmod(value, 128)
        out.append(low | (0x80 if value else 0))
        if not value:
            return bytes(out)


def text(value: str | bytes) -> bytes:
    """A string with its length before it."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack(">H", len(raw)) + raw


def packet(first: int, body: bytes = b"") -> bytes:
    """A packet: the first byte, the length, the body."""
    return bytes([first]) + varint(len(body)) + body


def block(version: int, properties: bytes = b"") -> bytes:
    """The properties of a packet; 3.1.1 has none."""
    return varint(len(properties)) + properties if version >= 5 else b""


def connect(
    version: int = 4,
    client_id: str = "c",
    *,
    flags: int = 2,
    keepalive: int = 0,
    properties: bytes = b"",
    rest: bytes = b"",
    name: str = "MQTT",
) -> bytes:
    """CONNECT; `rest` is what follows the client identifier."""
    body = text(name) + bytes([version, flags]) + struct.pack(">H", keepalive) + block(version, properties)
    return packet(0x10, body + text(client_id) + rest)


def publish(
    version: int, topic: str | bytes, payload: bytes = b"", *, first: int = 0x30, properties: bytes = b""
) -> bytes:
    """PUBLISH; with a QoS in `first` it has the packet identifier 7."""
    identifier = b"\0\7" if first & 6 else b""
    return packet(first, text(topic) + identifier + block(version, properties) + payload)


def subscribe(
    version: int,
    *filters: str | bytes,
    options: int = 0,
    identifier: int = 1,
    properties: bytes = b"",
    first: int = 0x82,
) -> bytes:
    """SUBSCRIBE to filters with the same options."""
    wanted = b"".join(text(one) + bytes([options]) for one in filters)
    return packet(first, struct.pack(">H", identifier) + block(version, properties) + wanted)


def unsubscribe(version: int, *filters: str, identifier: int = 1, first: int = 0xA2) -> bytes:
    """UNSUBSCRIBE."""
    return packet(first, struct.pack(">H", identifier) + block(version) + b"".join(map(text, filters)))


def disconnect(code: int | None = None, properties: bytes | None = None) -> bytes:
    """DISCONNECT."""
    body = b"" if code is None else bytes([code]) + (b"" if properties is None else block(5, properties))
    return packet(0xE0, body)


PINGREQ = packet(0xC0)
PINGRESP = packet(0xD0)


def split(data: bytes) -> list[tuple[int, bytes]]:
    """The packets in `data` as (first byte, body); fails when it ends inside one."""
    packets, at = [], 0
    while at < len(data):
        first, size, shift, at = data[at], 0, 0, at + 1
        while True:
            part, at = data[at], at + 1
            size |= (part & 0x7F) << shift
            shift += 7
            if part < 0x80:
                break
        assert at + size <= len(data), "the last packet is incomplete"
        packets.append((first, data[at : at + size]))
        at += size
    return packets
