"""A broker for one client, with wire code of its own, that does what a test wants: cuts, refuses, keeps silent.

Its session outlives connections. What it received it keeps as a ledger, with QoS 1 and 2 handled by the book.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import Any

import gevent
from gevent.server import StreamServer

CONNECT, CONNACK, PUBLISH, PUBACK, PUBREC, PUBREL, PUBCOMP = range(0x10, 0x80, 0x10)
SUBSCRIBE, SUBACK, UNSUBSCRIBE, UNSUBACK, PINGREQ, PINGRESP, DISCONNECT = range(0x80, 0xF0, 0x10)


def varint(number: int) -> bytes:
    out = bytearray()
    while True:
        number, low = divmod(number, 128)
        out.append(low | (128 if number else 0))
        if not number:
            return bytes(out)


def packet(first: int, body: bytes = b"") -> bytes:
    return bytes((first,)) + varint(len(body)) + body


def text(value: str) -> bytes:
    return struct.pack("!H", len(value.encode())) + value.encode()


def publish(
    topic: str, payload: bytes, qos: int = 0, mid: int = 0, *, properties: bytes | None = None, dup: bool = False
) -> bytes:
    """PUBLISH; `properties` None for MQTT 3.1.1."""
    props = b"" if properties is None else varint(len(properties)) + properties
    number = struct.pack("!H", mid) if qos else b""
    return packet(PUBLISH | dup << 3 | qos << 1, text(topic) + number + props + payload)


class Cut(Exception):
    """The connection ends here."""


class Wire:
    """A connection that breaks after a number of bytes, both directions counted."""

    def __init__(self, sock: Any, budget: int | None) -> None:
        self.sock, self.budget, self.used = sock, budget, 0

    def _allowed(self, size: int) -> int:
        return size if self.budget is None else min(size, self.budget - self.used)

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            allowed = self._allowed(size - len(data))
            if not allowed:
                raise Cut
            part = self.sock.recv(allowed)
            if not part:
                raise Cut
            self.used += len(part)
            data += part
        return data

    def send(self, data: bytes) -> None:
        allowed = self._allowed(len(data))
        self.sock.sendall(data[:allowed])
        self.used += allowed
        if allowed < len(data):
            raise Cut

    def packet(self) -> tuple[int, bytes]:
        first, size, shift = self.read(1)[0], 0, 0
        while True:
            byte = self.read(1)[0]
            size |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return first, self.read(size)


class Outgoing:
    """A message to the client, until the client has it for sure."""

    def __init__(self, mid: int, topic: str, qos: int, payload: bytes) -> None:
        self.mid, self.topic, self.qos, self.payload = mid, topic, qos, payload
        self.is_sent = self.is_received = self.is_done = False


class ScriptedBroker:
    """The broker.

    Args:
        version: 5 or 4.
        cut_after: the first connection breaks after so many bytes.
        code: of CONNACK. properties: of CONNACK, packed.
        push: topic, QoS and payload of what goes to the client as soon as it has subscribed.
        on_packet: `f(wire, first, body)`; a true answer says that it dealt with the packet.
        on_open: `f(wire)` after CONNACK.

    Attributes:
        received: (QoS, payload) of every message of the client, once with QoS 2.
        packets: first bytes and bodies of all packets.
        connections: how many there were. wire: the last one.
    """

    def __init__(
        self,
        version: int = 5,
        cut_after: int | None = None,
        code: int = 0,
        properties: bytes = b"",
        push: list[tuple[str, int, bytes]] | None = None,
        on_packet: Callable[[Wire, int, bytes], object] = lambda *_: False,
        on_open: Callable[[Wire], object] = lambda *_: None,
    ) -> None:
        self.version, self.cut_after, self.code, self.properties = version, cut_after, code, properties
        self.on_packet, self.on_open = on_packet, on_open
        self.to_push = push or []
        self.received: list[tuple[int, bytes]] = []
        self.packets: list[tuple[int, bytes]] = []
        self.connections = 0
        self.wire: Any = None
        self._has_session = False
        self._held: set[int] = set()
        self._outgoing: list[Outgoing] = []
        self._server = StreamServer(("127.0.0.1", 0), self._serve)
        self._server.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.server_port}"

    @property
    def is_quiet(self) -> bool:
        """Whether everything pushed is acknowledged and everything received is released."""
        return not self._held and all(item.is_done for item in self._outgoing)

    def close(self) -> None:
        self._server.stop(timeout=0)

    def of_kind(self, kind: int) -> list[bytes]:
        """The bodies of the packets of one kind."""
        return [body for first, body in self.packets if first & 0xF0 == kind]

    # ---- one connection

    def _serve(self, sock: Any, _address: object) -> None:
        self.connections += 1
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.wire = wire = Wire(sock, self.cut_after if self.connections == 1 else None)
        try:
            self._talk(wire)
        except (Cut, OSError):
            pass
        finally:
            sock.close()

    def _talk(self, wire: Wire) -> None:
        while True:
            first, body = wire.packet()
            self.packets.append((first, body))
            if not self.on_packet(wire, first, body):
                getattr(self, f"_on_{first >> 4}")(wire, first, body)

    def _on_1(self, wire: Wire, _first: int, body: bytes) -> None:
        clean = body[7] & 2
        present = self._has_session and not clean and not self.code
        if not present:
            self._held.clear()
            self._outgoing.clear()
        props = varint(len(self.properties)) + self.properties if self.version == 5 else b""
        wire.send(packet(CONNACK, bytes((bool(present), self.code)) + props))
        if self.code:
            raise Cut
        self._has_session = True
        self.on_open(wire)
        for item in self._outgoing:
            if not item.is_done:
                self._push(wire, item)

    def _on_14(self, _wire: Wire, _first: int, _body: bytes) -> None:
        raise Cut

    def _on_12(self, wire: Wire, _first: int, _body: bytes) -> None:
        wire.send(packet(PINGRESP))

    def _on_8(self, wire: Wire, _first: int, body: bytes) -> None:
        props = b"\0" if self.version == 5 else b""
        wire.send(packet(SUBACK, body[:2] + props + bytes((body[-1] & 3,))))
        for topic, qos, payload in self.to_push:
            self._outgoing.append(Outgoing(len(self._outgoing) + 1, topic, qos, payload))
        fresh, self.to_push = self._outgoing[len(self._outgoing) - len(self.to_push) :], []
        for item in fresh:
            self._push(wire, item)

    def _on_10(self, wire: Wire, _first: int, body: bytes) -> None:
        wire.send(packet(UNSUBACK, body[:2] + (b"\0\0" if self.version == 5 else b"")))

    # ---- messages of the client

    def _on_3(self, wire: Wire, first: int, body: bytes) -> None:
        qos, at = first >> 1 & 3, 2 + int.from_bytes(body[:2])
        mid = int.from_bytes(body[at : at + 2]) if qos else 0
        at += 2 if qos else 0
        at += 1 + body[at] if self.version == 5 else 0
        if qos < 2 or mid not in self._held:
            self.received.append((qos, body[at:]))
        if qos == 2:
            self._held.add(mid)
        if qos:
            wire.send(packet(PUBACK if qos == 1 else PUBREC, struct.pack("!H", mid)))

    def _on_6(self, wire: Wire, _first: int, body: bytes) -> None:
        self._held.discard(int.from_bytes(body[:2]))
        wire.send(packet(PUBCOMP, body[:2]))

    # ---- messages to the client

    def _push(self, wire: Wire, item: Outgoing) -> None:
        if item.is_received:
            wire.send(packet(PUBREL | 2, struct.pack("!H", item.mid)))
            return
        dup, item.is_sent = item.is_sent and item.qos > 0, True
        item.is_done = item.qos == 0
        properties = b"" if self.version == 5 else None
        wire.send(publish(item.topic, item.payload, item.qos, item.mid, properties=properties, dup=dup))

    def _item(self, body: bytes) -> Outgoing:
        return self._outgoing[int.from_bytes(body[:2]) - 1]

    def _on_4(self, _wire: Wire, _first: int, body: bytes) -> None:
        self._item(body).is_done = True

    def _on_5(self, wire: Wire, _first: int, body: bytes) -> None:
        self._item(body).is_received = True
        wire.send(packet(PUBREL | 2, body[:2]))

    def _on_7(self, _wire: Wire, _first: int, body: bytes) -> None:
        self._item(body).is_done = True


def stall(seconds: float = 60) -> None:
    """Says nothing any more, as a host behind a dead link does."""
    gevent.sleep(seconds)
