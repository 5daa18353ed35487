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
from tests.broker.memory_clients import settle
from tests.broker.mqtt.memory_devices import DeviceHub, MemoryDevice
from tests.support.mqtt_reference import WINDOW, Publisher, Subscriber


class World:
    """A server that crashes, its file, and the clients."""

    queued_messages = 1000

    def __init__(self, sync: str = "publish") -> None:
        self.sync = sync
        self.file = sqlite3.connect(":memory:", isolation_level=None)
        for schema in mqtt_tables.SCHEMAS:
            self.file.execute(schema)
        self.group: Group | None = None
        self.is_written = False
        self.publishers = [Publisher(b"p%d" % number, self.open, 12) for number in range(2)]
        self.subscribers = [Subscriber(b"s%d" % number, self.open) for number in range(2)]
        self.clients: list[Any] = [*self.publishers, *self.subscribers]
        self.start()

    def start(self) -> None:
        limits = MqttSettings(sync=self.sync, receive_maximum=WINDOW, queued_messages=self.queued_messages)
        self.hub = DeviceHub(limits=limits)
        self.ledger, self.kept = restore(self.file, self.hub.devices, 0.0)
        self.group, self.is_written = None, False

    def open(self) -> MemoryDevice:
        return self.hub.device()

    def crash(self) -> None:
        settle()  # the queues are global; what the old hub does now is not seen
        for client in self.clients:
            client.device = None
        self.start()

    def disk(self) -> bool:
        """Take a group, write it, or send what has waited for it; return whether there was something to do."""
        if self.group is None:
            self.group = self.ledger.begin_group()
            for _ in self.ledger.fill(self.group, saved_record):
                pass
            return not self.group.is_empty or bool(self.ledger.held)
        if not self.is_written:
            with self.file:  # a transaction
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
            one.check(self.publishers)
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


@pytest.mark.parametrize("seed", [*range(40), 110, 134, 393])
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
