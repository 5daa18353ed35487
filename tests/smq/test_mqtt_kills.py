"""Servers that are killed while MQTT clients publish: QoS 1 loses nothing, QoS 2 neither loses nor doubles anything."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from random import Random
from time import monotonic

import pytest

from tests.server.restart.hot import HotServed, application
from tests.support.mqtt_reference import Publisher, ReferenceClient, Subscriber

pytestmark = pytest.mark.servers
KILLS = 3
MESSAGES = 100
END_S = 60.0


class SocketTransport:
    """A connection to a server; a broken one raises ConnectionError."""

    def __init__(self, port: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port), 20)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def ear(self) -> SocketTransport:
        return self

    @property
    def got(self) -> list[bytes]:
        if not select.select([self._sock], [], [], 0.001)[0]:
            return []
        data = self._sock.recv(65536)
        if not data:
            raise ConnectionResetError("the server has closed the connection")
        return [data]

    @got.setter
    def got(self, value: list[bytes]) -> None:
        pass

    def feed(self, data: bytes) -> None:
        self._sock.sendall(data)

    def lost(self) -> None:
        self._sock.close()


def run(clients: list[ReferenceClient], has_ended: Callable[[], bool]) -> None:
    """Let the clients work until `has_ended` returns true."""
    until_s = monotonic() + END_S
    while not has_ended():
        assert monotonic() < until_s, "the messages are published in time"
        for one in clients:
            try:
                one.step()
            except ConnectionError:
                one.drop()


def test_kills_lose_and_double_nothing(tmp_path: Path) -> None:
    preload = f'smq = require "smq.hub".create {{mqtt = true, persist = "{tmp_path}/hub.sqlite"}}'
    folder, random = application(tmp_path / "app", preload), Random(7)
    served = HotServed(folder)
    try:
        subscriber = Subscriber(b"subscriber", lambda: SocketTransport(served.port))
        publishers = [Publisher(b"p%d" % one, lambda: SocketTransport(served.port), MESSAGES) for one in range(2)]
        clients: list[ReferenceClient] = [subscriber, *publishers]
        run([subscriber], lambda: subscriber.is_subscribed)
        for kill in range(1, KILLS + 1):
            left = len(publishers) * MESSAGES * (KILLS + 1 - kill) // (KILLS + 1) + random.randrange(8)
            run(clients, lambda: sum(len(one.left) for one in publishers) <= left)  # noqa: B023  # called at once
            os.kill(served.pid, signal.SIGKILL)
            served.end()
            for one in clients:
                one.drop()
            served = HotServed(folder)
        run(clients, lambda: all(one.is_done for one in publishers) and subscriber.count == len(publishers) * MESSAGES)
        subscriber.check(publishers)
    finally:
        served.end()


def test_a_hot_restart_and_a_kill_after_it_lose_nothing(tmp_path: Path) -> None:
    """The new process replaces the rows of the old one in the file."""
    preload = f'smq = require "smq.hub".create {{name = "main", mqtt = true, persist = "{tmp_path}/hub.sqlite"}}'
    folder = application(tmp_path / "app", preload)
    served = HotServed(folder)
    try:
        subscriber = Subscriber(b"subscriber", lambda: SocketTransport(served.port))
        publisher = Publisher(b"p", lambda: SocketTransport(served.port), 30)
        run([subscriber], lambda: subscriber.is_subscribed)
        subscriber.drop()
        run([publisher], lambda: len(publisher.left) < 20)
        served.restart()
        run([publisher], lambda: len(publisher.left) < 10)
        os.kill(served.pid, signal.SIGKILL)
        served.end()
        publisher.drop()
        served = HotServed(folder)
        run([publisher, subscriber], lambda: publisher.is_done and subscriber.count == publisher.count)
        subscriber.check([publisher])
    finally:
        served.end()
