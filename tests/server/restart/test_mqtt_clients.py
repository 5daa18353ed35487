"""MQTT clients at a hot restart: they reconnect to their sessions, and no message is lost or doubled."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from smqrt.wire.mqtt.fields import varint
from smqrt.wire.mqtt.packets import PacketSplitter
from tests.server.restart.hot import HotServed, application

pytestmark = pytest.mark.servers

PRELOAD = 'smq = require "smq.hub".create {name = "main", mqtt = true}'


class MqttPeer:
    """An MQTT 5 client whose session is kept."""

    def __init__(self, port: int, name: bytes, clean: bool, will: bytes = b"") -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), 20)
        self._splitter = PacketSplitter()
        flags = 2 * clean | (4 if will else 0)
        body = b"\0\4MQTT\5" + bytes((flags, 0, 0)) + b"\5\x11\0\0\0\x3c" + struct.pack(">H", len(name)) + name
        if will:
            body += b"\0" + struct.pack(">H", len(will)) + will + b"\0\4gone"
        self.send(0x10, body)
        first, body = self.packet()
        assert (first, body[1]) == (0x20, 0)
        self.session_present = bool(body[0])

    def send(self, first: int, body: bytes) -> None:
        self.sock.sendall(bytes((first,)) + varint(len(body)) + body)

    def packet(self) -> tuple[int, bytes]:
        while (found := self._splitter.next()) is None:
            data = self.sock.recv(65536)
            if not data:
                return 0, b""
            self._splitter.feed(data)
        return found

    def subscribe(self, topic: bytes, qos: int) -> None:
        self.send(0x82, b"\0\1\0" + struct.pack(">H", len(topic)) + topic + bytes((qos,)))
        assert self.packet()[0] == 0x90

    def publish(self, topic: bytes, payload: bytes, number: int, first: int = 0x32) -> None:
        self.send(first, struct.pack(">H", len(topic)) + topic + struct.pack(">H", number) + b"\0" + payload)
        assert self.packet() in [(0x40, struct.pack(">H", number)), (0x40, struct.pack(">HB", number, 0x10))]


def test_sessions_and_retained_messages_are_there_again(serve_hot: Callable[..., HotServed], tmp_path: Path) -> None:
    served = serve_hot(application(tmp_path / "app", PRELOAD))
    sleeper = MqttPeer(served.port, b"sleeper", clean=True)
    sleeper.subscribe(b"house/+/temp", 2)
    sleeper.send(0xE0, b"")
    watcher = MqttPeer(served.port, b"watcher", clean=True, will=b"wills/watcher")
    watcher.subscribe(b"house/#", 1)
    publisher = MqttPeer(served.port, b"publisher", clean=True)
    publisher.publish(b"house/kitchen/temp", b"21", 1)
    assert watcher.packet()[1].endswith(b"21")  # not acknowledged: it comes again
    publisher.publish(b"house/lamp", b"on", 2, 0x33)
    served.restart()

    while (packet := watcher.packet())[0]:
        last = packet
    assert last == (0xE0, b"\x8b")  # the server is shutting down
    again = MqttPeer(served.port, b"watcher", clean=False)
    assert again.session_present
    assert [again.packet()[1][-2:] for _ in range(2)] == [b"21", b"on"]
    woken = MqttPeer(served.port, b"sleeper", clean=False)
    assert woken.session_present
    assert woken.packet()[1].endswith(b"21")
    late = MqttPeer(served.port, b"late", clean=True)
    late.subscribe(b"#", 0)
    assert late.packet()[1].endswith(b"on")  # retained; the will was not published
    back = MqttPeer(served.port, b"publisher", clean=False)
    back.publish(b"house/garden/temp", b"22", 3)
    assert [one.packet()[1][-2:] for one in (again, woken, late)] == [b"22"] * 3
