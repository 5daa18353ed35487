"""MQTT clients of a server with several workers: to them it is one broker."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from smqrt.wire.mqtt.fields import PacketType
from smqrt.wire.mqtt.packets import (
    ConnectPacket,
    PacketSplitter,
    PublishPacket,
    SubscribePacket,
    Subscription,
    decode_publish,
    encode,
)
from tests.conftest import Served
from tests.workers.served import asked, workers_of

pytestmark = pytest.mark.servers
CLIENTS = 8
"""So many connections come to both workers."""


class Client:
    """An MQTT 5 client on a blocking socket."""

    def __init__(self, served: Served, client_id: str, clean: bool = True) -> None:
        self._sock = socket.create_connection(("127.0.0.1", served.port), 20)
        self._splitter = PacketSplitter(1 << 20)
        self._send(ConnectPacket(5, client_id, clean, 0, {"sessionexpiryinterval": 600}))
        self.is_kept = bool(self._until(PacketType.CONNACK)[1][0])

    def _send(self, packet: object) -> None:
        self._sock.sendall(encode(packet, 5))  # type: ignore[arg-type]

    def _until(self, kind: PacketType) -> tuple[int, bytes]:
        while True:
            while (packet := self._splitter.next()) is not None:
                if packet[0] >> 4 == kind:
                    return packet
            data = self._sock.recv(1 << 16)
            assert data, "the server has closed the connection"
            self._splitter.feed(data)

    def subscribe(self, text: str) -> None:
        self._send(SubscribePacket(1, [Subscription(text, 1)]))
        assert self._until(PacketType.SUBACK)[1][-1] == 1

    def publish(self, name: str, payload: bytes, retain: bool = False) -> int:
        """Publish with QoS 1; return the reason code."""
        self._send(PublishPacket(name, payload, 2 | retain, 1))
        body = self._until(PacketType.PUBACK)[1]
        return body[2] if len(body) > 2 else 0

    def receive(self) -> tuple[str, bytes]:
        """The next message."""
        message = decode_publish(*self._until(PacketType.PUBLISH), 5)
        self._sock.sendall(b"\x40\x02" + message.packet_identifier.to_bytes(2, "big"))
        return message.topic, message.payload

    def close(self) -> None:
        self._send_disconnect()
        self._sock.close()

    def _send_disconnect(self) -> None:
        self._sock.sendall(b"\xe0\x00")
        while self._sock.recv(1 << 16):  # until the server has closed
            pass


def test_workers_are_one_broker(serve: Callable[..., Served], tmp_path: Path) -> None:
    served = serve("--mqtt", "--hosts", "*", "--workers", "2", cwd=tmp_path)
    workers_of(served)

    # Filters, at all workers.
    subscribers = [Client(served, f"subscriber-{number}") for number in range(CLIENTS)]
    for one in subscribers:
        one.subscribe("house/+/temp")
    numbers = {peer["hub"] // 1_000_000 for peer in asked(served, "api/v1/peers?limit=100")["items"]}
    assert numbers == {0, 1}, "the clients are at both workers"
    due = []
    for number in range(CLIENTS):
        publisher = Client(served, f"publisher-{number}")
        assert publisher.publish(f"house/{number}/temp", b"%d" % number) == 0
        due.append((f"house/{number}/temp", b"%d" % number))
        publisher.close()
    assert [sorted(one.receive() for _ in due) for one in subscribers] == [due] * CLIENTS

    # Retained messages.
    publisher = Client(served, "retains")
    publisher.publish("kept/a", b"x", retain=True)
    late = [Client(served, f"late-{number}") for number in range(CLIENTS)]
    for one in late:
        one.subscribe("kept/#")
    assert [one.receive() for one in late] == [("kept/a", b"x")] * CLIENTS

    # A session, whatever worker the client comes to.
    Client(served, "sleeper", clean=False).subscribe("cmd/#")
    for number in range(CLIENTS):
        sleeper = Client(served, "sleeper", clean=False)
        assert sleeper.is_kept
        sleeper.close()
        assert publisher.publish("cmd/x", b"%d" % number) == 0
        sleeper = Client(served, "sleeper", clean=False)
        assert sleeper.receive() == ("cmd/x", b"%d" % number)
        sleeper.close()
