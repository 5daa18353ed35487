"""MQTT clients that count: a publisher and a subscriber whose sessions survive the connections and the server."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from smqrt.wire.mqtt.fields import varint
from smqrt.wire.mqtt.packets import PacketSplitter

TOPICS = (b"t/1", b"t/2")
WINDOW = 4


def packet(first: int, body: bytes) -> bytes:
    return bytes((first,)) + varint(len(body)) + body


class Ear(Protocol):
    """What the client got.

    Attributes:
        got: the bytes since it was emptied.
    """

    got: list[bytes]


class Transport(Protocol):
    """The connection of a client."""

    @property
    def ear(self) -> Ear: ...

    def feed(self, data: bytes) -> None: ...

    def lost(self) -> None: ...


class ReferenceClient:
    """An MQTT 3.1.1 client whose state survives its connections."""

    def __init__(self, name: bytes, open_transport: Callable[[], Transport]) -> None:
        self.name, self._open = name, open_transport
        self.device: Transport | None = None
        self.is_connected = False

    def connect(self) -> None:
        self.device = self._open()
        self.splitter = PacketSplitter()
        self.inbox: list[tuple[int, bytes]] = []
        connect = b"\0\4MQTT\4\0\0\0" + len(self.name).to_bytes(2) + self.name
        self.is_connected = False
        self.send(0x10, connect)

    def connected(self) -> None:
        """CONNACK has come."""

    def send(self, first: int, body: bytes) -> None:
        assert self.device is not None
        self.device.feed(packet(first, body))

    def packets(self) -> list[tuple[int, bytes]]:
        assert self.device is not None
        got, self.device.ear.got = self.device.ear.got, []
        self.splitter.feed(b"".join(got))
        while (one := self.splitter.next()) is not None:
            self.inbox.append(one)
        return self.inbox

    def step(self) -> bool:
        """Connect, or handle a packet; return whether there was something to do."""
        if self.device is None:
            self.connect()
            return True
        if not self.packets():
            return False
        if not self.is_connected:
            assert self.inbox[0][0] == 0x20
            self.is_connected = True
            self.connected()
            return True
        self.handle(*self.inbox.pop(0))
        return True

    def handle(self, first: int, body: bytes) -> None:
        raise NotImplementedError

    def drop(self) -> None:
        """The connection breaks."""
        if self.device is not None:
            self.device.lost()
        self.device = None


class Publisher(ReferenceClient):
    """Publishes numbered messages, with QoS 1 and 2 in turn."""

    def __init__(self, name: bytes, open_transport: Callable[[], Transport], count: int) -> None:
        super().__init__(name, open_transport)
        self.count = count
        self.left = [b"%b/%d" % (name, number) for number in range(count)]
        self.next = 0
        self.pending: dict[int, tuple[int, bytes]] = {}
        self.released: dict[int, None] = {}

    def connected(self) -> None:
        self.inbox.clear()
        for number in list(self.pending):
            self.publish(number, 8)
        for number in list(self.released):
            self.send(0x62, number.to_bytes(2))

    def publish(self, number: int, dup: int = 0) -> None:
        qos, payload = self.pending[number]
        topic = TOPICS[payload[-1] % 2] if qos == 1 else TOPICS[0]
        retain = payload.endswith(b"3")
        first = 0x30 | dup | qos << 1 | retain
        self.send(first, len(topic).to_bytes(2) + topic + number.to_bytes(2) + payload)

    def step(self) -> bool:
        if super().step():
            return True
        if not self.is_connected:
            return False
        if not self.left or len(self.pending) + len(self.released) >= WINDOW:
            return False
        payload = self.left.pop(0)
        self.next = self.next % 7 + 1
        while self.next in self.pending or self.next in self.released:
            self.next = self.next % 7 + 1
        self.pending[self.next] = 1 + int(payload.split(b"/")[1]) % 2, payload
        self.publish(self.next)
        return True

    def handle(self, first: int, body: bytes) -> None:
        number = int.from_bytes(body[:2])
        if first == 0x40:
            del self.pending[number]
        elif first == 0x50:
            self.pending.pop(number, None)
            self.released[number] = None
            self.send(0x62, body[:2])
        else:
            assert first == 0x70, hex(first)
            del self.released[number]

    @property
    def is_done(self) -> bool:
        return not (self.left or self.pending or self.released)


class Subscriber(ReferenceClient):
    """Counts the messages that it gets."""

    def __init__(self, name: bytes, open_transport: Callable[[], Transport]) -> None:
        super().__init__(name, open_transport)
        self.got: dict[bytes, int] = {}
        self.received: set[int] = set()
        self.is_subscribed = False

    def connected(self) -> None:
        self.inbox.pop(0)
        if not self.is_subscribed:
            self.send(0x82, b"\0\1\0\3t/#\2")

    def handle(self, first: int, body: bytes) -> None:
        if first == 0x90:
            self.is_subscribed = True
            return
        if first == 0x62:
            self.received.discard(int.from_bytes(body[:2]))
            self.send(0x70, body[:2])
            return
        assert first & 0xF0 == 0x30, hex(first)
        qos, size = first >> 1 & 3, 2 + int.from_bytes(body[:2])
        number, payload = int.from_bytes(body[size : size + 2]), body[size + 2 :]
        if first & 1:  # retained: of a subscription, not of a publication
            payload = b""
        if qos == 1 or number not in self.received:
            self.got[payload] = self.got.get(payload, 0) + 1
        if qos == 2:
            self.received.add(number)
        self.send(0x40 if qos == 1 else 0x50, number.to_bytes(2))

    @property
    def count(self) -> int:
        """The number of different messages that have come."""
        return len(self.got.keys() - {b""})

    def check(self, publishers: Iterable[Publisher]) -> None:
        """Check that nothing is lost, and that nothing with QoS 2 is doubled."""
        for one in publishers:
            for number in range(one.count):
                count = self.got.get(b"%b/%d" % (one.name, number), 0)
                assert count == 1 if number % 2 else count >= 1, (self.name, one.name, number, count)
