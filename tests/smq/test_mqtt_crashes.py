"""Crashes of a server between any two steps: QoS 1 loses nothing, QoS 2 neither loses nor doubles anything."""

from __future__ import annotations

import sqlite3
from random import Random
from typing import Any

import pytest

from smqrt.broker.mqtt.ledger import Group
from smqrt.broker.mqtt.saved_sessions import saved_record
from smqrt.settings.limits import MqttSettings
from smqrt.smq import mqtt_tables
from smqrt.smq.mqtt_file import restore
from smqrt.wire.mqtt.fields import varint
from smqrt.wire.mqtt.packets import PacketSplitter
from tests.broker.memory_clients import settle
from tests.broker.mqtt.memory_devices import DeviceHub, MemoryDevice

TOPICS = (b"t/1", b"t/2")
WINDOW = 4


def packet(first: int, body: bytes) -> bytes:
    return bytes((first,)) + varint(len(body)) + body


class ReferenceClient:
    """An MQTT 3.1.1 client whose state survives its connections."""

    def __init__(self, world: World, name: bytes) -> None:
        self.world, self.name = world, name
        self.device: MemoryDevice | None = None

    def connect(self) -> None:
        self.device = self.world.hub.device()
        self.splitter = PacketSplitter()
        self.inbox: list[tuple[int, bytes]] = []
        connect = b"\0\4MQTT\4\0\0\0" + len(self.name).to_bytes(2) + self.name
        self.send(0x10, connect)
        assert self.packets()[0][0] == 0x20
        self.connected()

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
        self.handle(*self.inbox.pop(0))
        return True

    def handle(self, first: int, body: bytes) -> None:
        raise NotImplementedError

    def drop(self) -> None:
        """The connection breaks."""
        if self.device is not None and self.world.is_running:
            self.device.lost()
        self.device = None


class Publisher(ReferenceClient):
    """Publishes numbered messages, with QoS 1 and 2 in turn."""

    def __init__(self, world: World, name: bytes, count: int) -> None:
        super().__init__(world, name)
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

    def __init__(self, world: World, name: bytes) -> None:
        super().__init__(world, name)
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


class World:
    """A server that crashes, its file, and the clients."""

    def __init__(self, sync: str = "publish") -> None:
        self.sync = sync
        self.file = sqlite3.connect(":memory:", isolation_level=None)
        for schema in mqtt_tables.SCHEMAS:
            self.file.execute(schema)
        self.group: Group | None = None
        self.is_written = False
        self.publishers = [Publisher(self, b"p%d" % number, 12) for number in range(2)]
        self.subscribers = [Subscriber(self, b"s%d" % number) for number in range(2)]
        self.clients: list[Any] = [*self.publishers, *self.subscribers]
        self.start()

    def start(self) -> None:
        self.hub = DeviceHub(limits=MqttSettings(sync=self.sync, receive_maximum=WINDOW))
        self.ledger, self.kept = restore(self.file, self.hub.devices, 0.0)
        self.group, self.is_written, self.is_running = None, False, True

    def crash(self) -> None:
        settle()  # the queues are global; what the old hub does now is not seen
        self.is_running = False
        for client in self.clients:
            client.drop()
        self.start()

    def disk(self) -> bool:
        """Take a group, write it, or send what has waited for it; return whether there was something to do."""
        if self.group is None:
            self.group = self.ledger.begin_group()
            for _ in self.ledger.fill(self.group, saved_record):
                pass
            return not self.group.is_empty or bool(self.ledger.held)
        if not self.is_written:
            with self.file:
                self.file.execute("BEGIN")
                if self.kept is not None:
                    mqtt_tables.remove_unused(self.file, self.kept)
                    self.kept = None
                mqtt_tables.write(self.file, self.group, 0.0)
            self.is_written = True
            return True
        self.ledger.saved, self.group, self.is_written = self.group.through, None, False
        for _ in self.ledger.released():
            pass
        return True

    def loop(self) -> bool:
        settle()
        return False

    def subscribe(self) -> None:
        """Let all subscribers subscribe."""
        while not all(one.is_subscribed for one in self.subscribers):
            for step in (self.loop, self.disk, *[one.step for one in self.subscribers]):
                step()

    def finish(self) -> None:
        """Let everything come to its end without further crashes, and check the result."""
        idle = 0
        while idle < 5:
            steps = [self.loop, *[one.step for one in self.clients], self.disk, self.disk, self.disk]
            did = [step() for step in steps]
            idle = 0 if any(did[:-3]) or did[-3] and self.ledger.held else idle + 1
        assert all(one.is_done for one in self.publishers)
        for one in self.subscribers:
            for publisher in self.publishers:
                for number in range(12):
                    count = one.got.get(b"%b/%d" % (publisher.name, number), 0)
                    assert count == 1 if number % 2 else count >= 1, (one.name, publisher.name, number, count)
        assert not self.ledger.held
        for _ in range(9):
            self.disk()
        assert not self.rows(), "complete messages are removed"

    def rows(self) -> list[Any]:
        tables = ("mqtt_queue", "mqtt_messages")
        return [row for table in tables for row in self.file.execute(f"SELECT * FROM {table}")]


def steps_of(world: World) -> list[Any]:
    return [*[one.step for one in world.publishers], world.disk, world.loop, *[one.step for one in world.subscribers]]


def test_nothing_is_lost_without_a_crash() -> None:
    world = World()
    world.subscribe()
    world.finish()


@pytest.mark.parametrize("first", range(7))
def test_a_crash_at_each_step(first: int) -> None:
    for at in range(first, 210, 7):
        world = World()
        world.subscribe()
        steps = steps_of(world)
        for count in range(at):
            steps[count % len(steps)]()
        world.crash()
        world.finish()


@pytest.mark.parametrize("seed", range(40))
def test_many_crashes_in_a_random_order(seed: int) -> None:
    random = Random(seed)
    world = World()
    world.subscribe()
    steps = steps_of(world)
    for _ in range(random.randrange(50, 1500)):
        if random.random() < 0.02:
            world.crash()
        elif random.random() < 0.02:
            random.choice(world.clients).drop()
        else:
            random.choice(steps)()
    world.finish()


def test_messages_are_lost_with_sync_interval() -> None:
    """The test above can fail: without waiting for the disk, a crash loses messages."""
    world = World("interval")
    world.subscribe()
    for _ in range(9):
        world.disk()
    for _ in range(8):
        for one in (*world.publishers, world):
            (one.loop if isinstance(one, World) else one.step)()
    world.crash()
    with pytest.raises(AssertionError):
        world.finish()
