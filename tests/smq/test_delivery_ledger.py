"""Clients that come, stall, are cut and return in any order: whatever was published is delivered, in order and once,
or counted as dropped."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from smqrt.wire.smq import Type
from tests.support.device import KINDS, TLS, WSS, Device, Site, bounded, expect_clean, publish
from tests.support.waiting import wait_until

SEEDS = range(20)
STEPS = 40
BUDGET_BYTES, SOCKET_BYTES = 20_000, 16_384
TOPICS = (b"news", b"weather")


@dataclass
class Client:
    """A client that subscribes, and what it has to get: the numbers of messages, in order."""

    uid: bytes
    device: Device
    topics: set[bytes]
    due: list[int] = field(default_factory=list)
    got: list[int] = field(default_factory=list)
    is_stalled: bool = False

    def read(self, packets: list[bytes]) -> None:
        """Take the messages out of what came."""
        self.got += [struct.unpack(">I", one[13:17])[0] for one in packets if one[0] == Type.PUBLISH]


class Schedule:
    """A hub and its clients, to whom things happen at random; the hub's own client is the witness of what it took."""

    def __init__(self, site: Site, rng: random.Random) -> None:
        self.site, self.rng = site, rng
        self.clients: list[Client] = []
        self.witnessed: list[tuple[bytes, int]] = []
        self.lost_copies = 0
        self._sent = self._uids = 0
        self.tids = {name: site.smq.create(name) for name in TOPICS}
        for name in TOPICS:
            site.smq.subscribe(name, onmsg=self._witness(name))

    def _witness(self, topic: bytes) -> Callable[..., None]:
        return lambda data, *_: self.witnessed.append((topic, struct.unpack(">I", data[:4])[0]))

    def step(self) -> None:
        """Let one thing happen."""
        happening = self.rng.choice([self.come, self.publish, self.publish, self.publish, self.stall, self.wake])
        if self.rng.random() < 0.25 and self.clients:
            happening = self.rng.choice([self.go, self.break_off, self.come_back])
        happening()

    def come(self) -> None:
        """A client connects and subscribes."""
        self._uids += 1
        self._connect(b"client-%04d" % self._uids)

    def _connect(self, uid: bytes) -> None:
        device = self._small(uid, self.rng.choice(KINDS))
        topics = set(self.rng.sample(TOPICS, self.rng.randint(1, len(TOPICS))))
        for name in topics:
            device.subscribe(name)
        device.sync()
        self.clients.append(Client(uid, device, topics))

    def _small(self, uid: bytes, kind: str) -> Device:
        """A client in whose sockets little fits."""
        device = self.site.open(kind)
        device.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
        device.start().connect(uid)
        transport = self.site.state.uids[uid].outbox.sock
        plain = transport._sock if kind in (TLS, WSS) else transport
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        return device

    def publish(self) -> None:
        """A publisher sends a burst, and may be cut in it."""
        publisher = self.site.device(b"publisher", self.rng.choice(KINDS))
        name, size = self.rng.choice(TOPICS), self.rng.choice((4, 100, 5000))
        packets = [self._message(publisher, name, size) for _ in range(self.rng.choice((1, 5, 60)))]
        data = b"".join(map(publisher.framed, packets))
        before = len(self.witnessed)
        match self.rng.choice(("whole", "whole", "cut", "reset")):
            case "whole":
                publisher.send_bytes(data).sync()
            case "cut":
                publisher.send_bytes(data[: self.rng.randrange(1, len(data))])
            case _:
                publisher.send_bytes(data)
                publisher.reset()
        publisher.close()
        self._gone(b"publisher")
        self._owe(self.witnessed[before:])

    def _message(self, publisher: Device, name: bytes, size: int) -> bytes:
        self._sent += 1
        return publish(self.tids[name], publisher.etid, struct.pack(">I", self._sent).ljust(size, b"."))

    def _gone(self, uid: bytes) -> None:
        wait_until(lambda: uid not in self.site.state.uids, uid)

    def _owe(self, taken: list[tuple[bytes, int]]) -> None:
        for client in self.clients:
            client.due += [number for name, number in taken if name in client.topics]
            if not client.is_stalled:
                client.read(client.device.sync())

    def stall(self) -> None:
        """A client stops reading."""
        if self.clients:
            self.rng.choice(self.clients).is_stalled = True

    def wake(self) -> None:
        """One that stalled reads again."""
        for client in self.clients:
            if client.is_stalled:
                client.is_stalled = False
                client.read(client.device.sync())
                return

    def go(self) -> None:
        """A client leaves in order."""
        client = self._taken_out()
        client.device.disconnect()

    def break_off(self) -> None:
        """A client is gone without a word."""
        self._taken_out().device.reset()

    def come_back(self) -> None:
        """A client connects anew, while the server still has its old connection."""
        client = self._taken_out(waits=False)
        self._connect(client.uid)
        client.device.close()

    def _taken_out(self, waits: bool = True) -> Client:
        client = self.clients.pop(self.rng.randrange(len(self.clients)))
        self.lost_copies += self.site.state.uids[client.uid].outbox.dropped
        return client

    def check(self) -> None:
        """Everybody reads on: what is missing was dropped and counted."""
        for client in self.clients:
            client.read(client.device.sync())
            dropped = self.site.state.uids[client.uid].outbox.dropped
            assert len(client.got) + dropped == len(client.due), client.uid
            assert len(set(client.got)) == len(client.got), "a message came twice"
            places = {number: place for place, number in enumerate(client.due)}
            order = [places[number] for number in client.got]
            assert order == sorted(order), "out of order"
            self.lost_copies += dropped
        assert self.site.smq.drops()["over_budget"] == self.lost_copies


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_lost_without_being_counted(make_site: Callable[..., Site], seed: int) -> None:
    site = make_site(budget=BUDGET_BYTES)
    schedule = Schedule(site, random.Random(seed))
    with bounded(60):
        for _ in range(3):
            schedule.come()
        for _ in range(STEPS):
            schedule.step()
        schedule.check()
    assert schedule.witnessed, "nothing was published"
    for name in TOPICS:
        site.smq.unsubscribe(name)
    expect_clean(site)
