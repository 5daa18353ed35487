"""MQTT clients at a hot restart: they stay connected, or reconnect over TLS, and no message is lost or doubled."""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

from smqrt.wire.mqtt.fields import varint
from smqrt.wire.mqtt.packets import PacketSplitter
from tests.server.restart.hot import HotServed, application
from tests.support.waiting import wait_until

pytestmark = pytest.mark.servers

PRELOAD = 'smq = require "smq.hub".create {name = "main", mqtt = true}'


class MqttPeer:
    """An MQTT 5 client whose session is kept."""

    def __init__(self, port: int, name: bytes, clean: bool, will: bytes = b"", with_tls: bool = False) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), 20)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if with_tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            self.sock = context.wrap_socket(self.sock)
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


def test_clients_stay_connected(serve_hot: Callable[..., HotServed], tmp_path: Path) -> None:
    served = serve_hot(application(tmp_path / "app", PRELOAD))
    sleeper = MqttPeer(served.port, b"sleeper", clean=True)
    sleeper.subscribe(b"house/+/temp", 2)
    sleeper.send(0xE0, b"")
    watcher = MqttPeer(served.port, b"watcher", clean=True, will=b"wills/watcher")
    watcher.subscribe(b"house/#", 1)
    publisher = MqttPeer(served.port, b"publisher", clean=True)
    publisher.publish(b"house/kitchen/temp", b"21", 1)
    assert watcher.packet()[1].endswith(b"21")  # not acknowledged, and not sent again: the connection goes on
    publisher.publish(b"house/lamp", b"on", 2, 0x33)
    publisher.sock.sendall(b"\x32\x19\0\x11house/garden")  # the first part of a packet
    served.restart()

    publisher.sock.sendall(b"/temp\0\x03\0" + b"22" + b"!")
    assert publisher.packet() == (0x40, b"\0\3")
    assert watcher.packet()[1].endswith(b"on")
    assert watcher.packet()[1].endswith(b"22!")
    woken = MqttPeer(served.port, b"sleeper", clean=False)
    assert woken.session_present
    assert [woken.packet()[1][-2:] for _ in range(2)] == [b"21", b"2!"]
    late = MqttPeer(served.port, b"late", clean=True)
    late.subscribe(b"#", 0)
    assert late.packet()[1].endswith(b"on")  # retained; the will was not published


def test_clients_over_tls_reconnect_to_their_sessions(serve_hot: Callable[..., HotServed], tmp_path: Path) -> None:
    served = serve_hot(application(tmp_path / "app", PRELOAD), "--tls-port", "0")
    watcher = MqttPeer(served.tls_port, b"watcher", clean=True, will=b"wills/watcher", with_tls=True)
    watcher.subscribe(b"#", 1)
    publisher = MqttPeer(served.port, b"publisher", clean=True)
    publisher.publish(b"a", b"1", 1)
    assert watcher.packet()[1].endswith(b"1")
    served.restart()
    while (packet := watcher.packet())[0]:
        last = packet
    assert last == (0xE0, b"\x8b")  # the server is shutting down
    again = MqttPeer(served.tls_port, b"watcher", clean=False, with_tls=True)
    assert again.session_present
    assert again.packet()[1].endswith(b"1")
    publisher.publish(b"a", b"2", 2)
    assert again.packet()[1].endswith(b"2")


@pytest.mark.parametrize("qos", [1, 2])
def test_nothing_is_lost_or_doubled_over_restarts_under_load(
    serve_hot: Callable[..., HotServed], tmp_path: Path, qos: int
) -> None:
    served = serve_hot(application(tmp_path / "app", PRELOAD))
    subscriber, publisher = MqttPeer(served.port, b"sub", clean=True), MqttPeer(served.port, b"pub", clean=True)
    subscriber.subscribe(b"load", qos)
    load = Load(publisher, subscriber, qos)
    for _ in range(2):
        load.wait_for(300)
        served.restart()
    load.wait_for(300)
    assert load.stop() == [b"%d" % at for at in range(load.sent)]


class Load:
    """Publishes numbered messages, a few at a time, and collects what arrives, until it is stopped.

    Attributes:
        sent: the number of published messages.
    """

    def __init__(self, publisher: MqttPeer, subscriber: MqttPeer, qos: int) -> None:
        self.sent, self._qos, self._stopping = 0, qos, False
        self._got: list[bytes] = []
        self._errors: list[BaseException] = []
        steps = ((self._publish, publisher), (self._receive, subscriber))
        self._threads = [Thread(target=self._run, args=one) for one in steps]
        for thread in self._threads:
            thread.start()

    def _run(self, step: Callable[[MqttPeer], None], peer: MqttPeer) -> None:
        try:
            step(peer)
        except BaseException as error:  # raised again by `stop`
            self._errors.append(error)

    def _publish(self, peer: MqttPeer) -> None:
        while not self._stopping:
            for at in range(10):
                number = struct.pack(">H", at + 1)
                peer.send(0x30 | self._qos << 1, b"\0\4load" + number + b"\0%d" % self.sent)
                self.sent += 1
            for at in range(10):
                assert peer.packet()[1][:2] == struct.pack(">H", at + 1)
            if self._qos == 2:
                for at in range(10):
                    peer.send(0x62, struct.pack(">H", at + 1))
                for at in range(10):
                    assert peer.packet() == (0x70, struct.pack(">H", at + 1))
        peer.send(0x30 | 2, b"\0\4load\0\1\0end")

    def _receive(self, peer: MqttPeer) -> None:
        while True:
            first, body = peer.packet()
            assert first in (0x30 | self._qos << 1, 0x62, 0x32), first
            if first == 0x62:
                peer.send(0x70, body[:2])
                continue
            number, payload = body[6:8], body[9:]
            if payload == b"end":
                return
            self._got.append(payload)
            peer.send(0x40 if self._qos == 1 else 0x50, number)

    def wait_for(self, count: int) -> None:
        """Waits until so many more messages have arrived."""
        until = len(self._got) + count
        wait_until(lambda: len(self._got) >= until or bool(self._errors), "messages arrive")

    def stop(self) -> list[bytes]:
        """Stops, and returns the payloads that have arrived."""
        self._stopping = True
        for thread in self._threads:
            thread.join(20)
        assert not self._errors, self._errors
        return self._got
