"""Just enough of five wire protocols for pyload.py: connect, subscribe, publish, cut messages out of the stream."""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import Iterator
from typing import Protocol as Interface

_UIDS = itertools.count()


class Link:
    """One connection, and what its protocol keeps for it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.buffer = bytearray()
        self.etid = 0
        self.heads: dict[str, bytes] = {}

    @classmethod
    async def open(cls, port: int) -> Link:
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 20))

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def read(self) -> bytes:
        return await self._reader.read(1 << 18)

    async def exactly(self, size: int) -> bytes:
        return await self._reader.readexactly(size)

    async def until(self, mark: bytes) -> bytes:
        return await self._reader.readuntil(mark)


class Protocol(Interface):
    """What pyload asks of a protocol."""

    async def open(self, link: Link) -> None: ...
    async def subscribe(self, link: Link, topic: str) -> None: ...
    async def resolve(self, link: Link, topic: str, peer: Link | None = None) -> None: ...
    def publish(self, link: Link, topic: str, payload: bytes) -> bytes: ...
    def payloads(self, link: Link, data: bytes) -> Iterator[bytes]: ...


class Smq:
    """SMQ on a raw socket.

    Attributes:
        path: of the page where clients connect.
    """

    path = "/smq.lsp"

    bootstrap = b"GET %s HTTP/1.1\r\nHost: localhost\r\nSimpleMQ: 1\r\nSendSmqHttpResponse: true\r\n\r\n"

    async def open(self, link: Link) -> None:
        await link.write(self.bootstrap % self.path.encode())
        await link.until(b"\r\n\r\n")
        await self.packet(link)
        uid = b"pyload-%d" % next(_UIDS)
        await link.write(self.frame(b"\x02\x01" + bytes([len(uid)]) + uid + b"\0"))
        link.etid = struct.unpack_from("!I", await self.packet(link), 2)[0]

    def frame(self, body: bytes) -> bytes:
        return (len(body) + 2).to_bytes(2, "big") + body

    async def packet(self, link: Link) -> bytes:
        return await link.exactly(int.from_bytes(await link.exactly(2), "big") - 2)

    async def subscribe(self, link: Link, topic: str) -> None:
        await link.write(self.frame(b"\x04" + topic.encode()))
        await self.packet(link)

    async def resolve(self, link: Link, topic: str, peer: Link | None = None) -> None:
        if peer:
            tid = peer.etid
        else:
            await link.write(self.frame(b"\x06" + topic.encode()))
            tid = struct.unpack_from("!I", await self.packet(link), 2)[0]
        link.heads[topic] = struct.pack("!BIII", 8, tid, link.etid, 0)

    def publish(self, link: Link, topic: str, payload: bytes) -> bytes:
        return self.frame(link.heads[topic] + payload)

    def payloads(self, link: Link, data: bytes) -> Iterator[bytes]:
        buffer, at = link.buffer, 0
        buffer += data
        while len(buffer) - at >= 3 and (size := int.from_bytes(buffer[at : at + 2], "big")) <= len(buffer) - at:
            if buffer[at + 2] == 8:
                yield bytes(buffer[at + 15 : at + size])
            at += size
        del buffer[:at]


class SmqWebSocket(Smq):
    """SMQ over WebSocket; the masking key is zero, so the payload is its own masked form."""

    bootstrap = (
        b"GET %s HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: cHlsb2FkcHlsb2FkcHkhIQ==\r\n\r\n"
    )

    def frame(self, body: bytes) -> bytes:
        size = bytes([0x80 | len(body)]) if len(body) < 126 else b"\xfe" + len(body).to_bytes(2, "big")
        return b"\x82" + size + b"\0\0\0\0" + body

    async def packet(self, link: Link) -> bytes:
        size = (await link.exactly(2))[1]
        return await link.exactly(size if size < 126 else int.from_bytes(await link.exactly(2), "big"))

    def payloads(self, link: Link, data: bytes) -> Iterator[bytes]:
        buffer, at = link.buffer, 0
        buffer += data
        while len(buffer) - at >= 4:
            size, head = (
                (buffer[at + 1], 2) if buffer[at + 1] < 126 else (int.from_bytes(buffer[at + 2 : at + 4], "big"), 4)
            )
            if len(buffer) - at < head + size:
                break
            if buffer[at + head] == 8:
                yield bytes(buffer[at + head + 13 : at + head + size])
            at += head + size
        del buffer[:at]


class Mqtt:
    """MQTT 3.1.1, QoS 0."""

    async def open(self, link: Link) -> None:
        body = b"\0\x04MQTT\x04\x02\0\0" + _counted(b"pyload-%d" % next(_UIDS))
        await link.write(b"\x10" + _varint(len(body)) + body)
        await link.exactly(4)

    async def subscribe(self, link: Link, topic: str) -> None:
        body = b"\0\x01" + _counted(topic.encode()) + b"\0"
        await link.write(b"\x82" + _varint(len(body)) + body)
        await link.exactly(5)

    async def resolve(self, link: Link, topic: str, peer: Link | None = None) -> None:
        link.heads[topic] = _counted(topic.encode())

    def publish(self, link: Link, topic: str, payload: bytes) -> bytes:
        head = link.heads[topic]
        return b"\x30" + _varint(len(head) + len(payload)) + head + payload

    def payloads(self, link: Link, data: bytes) -> Iterator[bytes]:
        buffer, at = link.buffer, 0
        buffer += data
        while cut := _varint_at(buffer, at + 1):
            size, body = cut
            if len(buffer) < body + size:
                break
            yield bytes(buffer[body + 2 + int.from_bytes(buffer[body : body + 2], "big") : body + size])
            at = body + size
        del buffer[:at]


class Nats:
    """NATS core."""

    async def open(self, link: Link) -> None:
        await link.until(b"\r\n")
        await link.write(b'CONNECT {"verbose":false,"pedantic":false,"echo":true}\r\n')
        await self._round_trip(link)

    async def _round_trip(self, link: Link) -> None:
        await link.write(b"PING\r\n")
        await link.until(b"PONG\r\n")

    async def subscribe(self, link: Link, topic: str) -> None:
        await link.write(b"SUB %s 1\r\n" % _dotted(topic))
        await self._round_trip(link)

    async def resolve(self, link: Link, topic: str, peer: Link | None = None) -> None:
        link.heads[topic] = b"PUB %s " % _dotted(topic)

    def publish(self, link: Link, topic: str, payload: bytes) -> bytes:
        return b"%s%d\r\n%s\r\n" % (link.heads[topic], len(payload), payload)

    def payloads(self, link: Link, data: bytes) -> Iterator[bytes]:
        buffer, at = link.buffer, 0
        buffer += data
        while (end := buffer.find(b"\r\n", at)) >= 0:
            words = bytes(buffer[at:end]).split()
            size = int(words[-1]) if words[0] == b"MSG" else -2
            if len(buffer) < end + size + 4:
                break
            if size >= 0:
                yield bytes(buffer[end + 2 : end + 2 + size])
            at = end + size + 4
        del buffer[:at]


class Redis:
    """Redis pub/sub."""

    async def open(self, link: Link) -> None:
        await link.write(b"PING\r\n")
        await link.until(b"\r\n")

    async def subscribe(self, link: Link, topic: str) -> None:
        # RESP3 lets a subscriber publish too: a ping needs both on one connection.
        await link.write(b"HELLO 3\r\n")
        await link.until(b"modules\r\n*0\r\n")
        await link.write(b"SUBSCRIBE %s\r\n" % topic.encode())
        await link.until(b":1\r\n")

    async def resolve(self, link: Link, topic: str, peer: Link | None = None) -> None:
        link.heads[topic] = b"*3\r\n$7\r\nPUBLISH\r\n$%d\r\n%s\r\n" % (len(topic), topic.encode())

    def publish(self, link: Link, topic: str, payload: bytes) -> bytes:
        return b"%s$%d\r\n%s\r\n" % (link.heads[topic], len(payload), payload)

    def payloads(self, link: Link, data: bytes) -> Iterator[bytes]:
        buffer, at = link.buffer, 0
        buffer += data
        while message := _redis_push(buffer, at):
            payload, at = message
            if payload is not None:
                yield payload
        del buffer[:at]


def _redis_push(buffer: bytearray, at: int) -> tuple[bytes | None, int] | None:
    """Returns (payload, end) of the push that starts at `at`, (None, end) of a reply, None when it is not whole."""
    end = buffer.find(b"\r\n", at) + 2
    if end < 2:
        return None
    if buffer[at : at + 1] != b">":
        return None, end
    text = b""
    for _ in range(3):
        head = buffer.find(b"\r\n", end) + 2
        if head < 2:
            return None
        size = int(buffer[end + 1 : head - 2])
        text, end = bytes(buffer[head : head + size]), head + size + 2
    return (text, end) if end <= len(buffer) else None


def _counted(text: bytes) -> bytes:
    return len(text).to_bytes(2, "big") + text


def _dotted(topic: str) -> bytes:
    return topic.replace("/", ".").encode()


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes(out) + bytes([number])


def _varint_at(buffer: bytearray, at: int) -> tuple[int, int] | None:
    """Returns (value, end) of the number at `at`, None when it is not whole."""
    value = shift = 0
    for end in range(at, min(at + 4, len(buffer))):
        value |= (buffer[end] & 127) << shift
        shift += 7
        if buffer[end] < 128:
            return value, end + 1
    return None


PROTOCOLS: dict[str, type[Protocol]] = {"smq": Smq, "smqws": SmqWebSocket, "mqtt": Mqtt, "nats": Nats, "redis": Redis}
