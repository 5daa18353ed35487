"""The end of a client: what was handed in is delivered or told, the broker is told, and nobody waits for ever."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import gevent
import pytest

from smqrt.errors import ArgumentError, ClosedError, DeliveryError
from smqrt.mqtt import MqttClient
from smqrt.transport.stream import Stream
from tests.clients.mqtt.mosquitto import Mosquitto
from tests.clients.mqtt.scripted import DISCONNECT, PINGREQ, PUBLISH, ScriptedBroker, packet, publish, stall
from tests.support.clock import undisturbed_s
from tests.support.waiting import wait_until

Connect = Callable[..., MqttClient]
Scripted = Callable[..., ScriptedBroker]


class Ear:
    """Hears what a broker publishes below one name."""

    def __init__(self, connect: Connect, broker: Mosquitto, name: str) -> None:
        self.heard: list[bytes] = []
        self.client = connect(broker.address, None, lambda topic, payload, *_: self.heard.append(payload))
        self.client.subscribe(f"{name}/#", qos=1)
        assert self.client.flush(5)

    def count(self, message: bytes) -> int:
        """How often a message came; all that was sent before this call has come."""
        mark = f"mark {len(self.heard)}".encode()
        topic = next(iter(self.client._subscriptions._wanted)).replace("#", "mark")
        self.client.publish(topic, mark, qos=1)
        wait_until(lambda: mark in self.heard)
        return self.heard.count(message)


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("version", [4, 5])
def test_a_block_delivers_what_was_published_in_it(
    mosquitto: Mosquitto, connect: Connect, version: int, qos: int
) -> None:
    ear = Ear(connect, mosquitto, f"block{version}{qos}")
    with MqttClient(mosquitto.address, version=version) as client:
        deliveries = [client.publish(f"block{version}{qos}/t", b"%d" % number, qos) for number in range(5000)]
    assert all(item.done and item.error is None for item in deliveries)
    ear.count(b"")
    assert [item for item in ear.heard if not item.startswith(b"mark")] == [b"%d" % number for number in range(5000)]


def test_disconnect_before_the_connection_stands_delivers(mosquitto: Mosquitto, connect: Connect) -> None:
    ear = Ear(connect, mosquitto, "early")
    client = connect(mosquitto.address, wait=False)
    items = [client.publish("early/t", b"x", qos) for qos in (0, 1, 2)]
    assert not client.disconnect()
    wait_until(lambda: client.closed)
    assert [item.error for item in items] == [None] * 3
    assert ear.count(b"x") == 3


def test_a_block_without_a_broker_reports_losses() -> None:
    with (  # noqa: PT012
        pytest.raises(DeliveryError, match=r"3 messages or subscriptions.*Connection refused"),
        MqttClient("127.0.0.1:1") as client,
    ):
        client.subscribe("a")
        lost = [client.publish("a", b"x"), client.publish("a", b"x", 1)]
    assert [item.error for item in lost] == ["closed", "closed"]
    with MqttClient("127.0.0.1:1"):
        pass  # nothing was handed in, nothing is lost


def test_a_refused_client_reports_the_reason(scripted: Scripted) -> None:
    client = MqttClient(scripted(code=0x87).address)
    client.publish("a", b"x")
    with pytest.raises(DeliveryError, match="not authorized"):
        client.close()
    client.close()  # it was told once
    with pytest.raises(ClosedError):
        client.publish("a", b"x")


def test_what_the_block_raises_goes_first() -> None:
    with pytest.raises(KeyError), MqttClient("127.0.0.1:1") as client:  # noqa: PT012
        client.publish("a", b"x")
        raise KeyError("mine")


def test_nothing_is_taken_in_after_the_end(mosquitto: Mosquitto, connect: Connect) -> None:
    client = connect(mosquitto.address)
    client.close()
    for use in (lambda: client.publish("a"), lambda: client.subscribe("a"), lambda: client.unsubscribe("a")):
        with pytest.raises(ClosedError, match="has ended"):
            use()


def test_qos_0_is_delivered_only_after_broker_confirmation(scripted: Scripted) -> None:
    def deaf(wire: Any, first: int, _body: bytes) -> bool:
        return first == PINGREQ

    broker = scripted(on_packet=deaf)
    client = MqttClient(broker.address)
    client.publish("a", b"x")
    with pytest.raises(DeliveryError, match="confirm 1 message or"):
        client.close(0.3)
    assert client.closed


def test_close_ends_in_time_whatever_the_broker_does(scripted: Scripted) -> None:
    broker = scripted(on_packet=lambda wire, first, _: first & 0xF0 == PUBLISH and (stall(), True)[1])
    client = MqttClient(broker.address)
    item = client.publish("a", b"x", 1)
    with pytest.raises(DeliveryError), gevent.Timeout(4):
        client.close(0.5)
    assert client.closed
    assert item.error == "closed"


WILL = {"topic": "will/x", "payload": "dead", "qos": 1}

LEAVING = {
    "twice": lambda client: (client.disconnect(), client.disconnect()),
    "close, then disconnect": lambda client: (client.close(), client.disconnect()),
    "disconnect, then close": lambda client: (client.disconnect(), client.close()),
    "disconnect, then the process ends": lambda client: (client.disconnect(), client.shutdown()),
    "the process ends": lambda client: client.shutdown(),
    "with messages": lambda client: ([client.publish("any", b"x" * 50000, 1) for _ in range(40)], client.disconnect()),
}


@pytest.mark.parametrize("how", LEAVING)
def test_no_will_after_an_orderly_end(mosquitto: Mosquitto, connect: Connect, how: str) -> None:
    ear = Ear(connect, mosquitto, "will")
    client = connect(mosquitto.address, will=WILL)
    LEAVING[how](client)
    wait_until(lambda: client.closed)
    with connect(mosquitto.address, will=WILL) as other:
        other.disconnect()
    assert ear.count(b"dead") == 0


def test_the_will_is_published_when_it_is_wanted(mosquitto: Mosquitto, connect: Connect) -> None:
    ear = Ear(connect, mosquitto, "will")
    connect(mosquitto.address, will=WILL).disconnect(4)
    wait_until(lambda: ear.count(b"dead") == 1)


def test_disconnect_goes_out_although_the_process_ends_at_once(mosquitto: Mosquitto, connect: Connect) -> None:
    ear = Ear(connect, mosquitto, "will")
    code = (
        "import os; from smqrt.mqtt import MqttClient;"
        f"c = MqttClient({mosquitto.address!r}, will={WILL!r}); assert c.wait_connected(5); c.disconnect(); os._exit(0)"
    )
    gevent.get_hub().threadpool.apply(lambda: subprocess.run([sys.executable, "-c", code], check=True, timeout=20))
    assert ear.count(b"dead") == 0


def test_packets_that_still_come_do_not_keep_disconnect_back(scripted: Scripted, connect: Connect) -> None:
    flood = packet(PUBLISH, b"\0\x01t\0x") * 3000
    broker = scripted(on_open=lambda wire: wire.send(flood))
    seen: list[str] = []

    def onpub(*_: Any) -> None:
        if not seen:
            client.disconnect()
        seen.append("x")

    client = connect(broker.address, None, onpub, wait=False)
    wait_until(lambda: client.closed and broker.of_kind(DISCONNECT))
    assert client.end is None


def test_a_reason_that_is_none_is_refused_at_once(mosquitto: Mosquitto, connect: Connect) -> None:
    client = connect(mosquitto.address)
    for reason in (300, -1, "bye"):
        with pytest.raises(ArgumentError, match="reason must be"):
            client.disconnect(reason)
    assert client.connected
    assert client.publish("a", b"x", 1).wait(5)


def test_a_blocking_onstatus_does_not_delay_close(mosquitto: Mosquitto, connect: Connect) -> None:
    client = connect(mosquitto.address, lambda *_: gevent.sleep(3))
    item = client.publish("a", b"x", 1)
    client.close(2)
    assert item.error is None


BAD_ANSWERS = {"text": "soon", "nan": float("nan"), "negative": -1, "ages": 1e300, "a list": [1]}


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_an_invalid_result_of_onstatus_is_reported(
    connect: Connect, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    client = connect("127.0.0.1:1", lambda *_: BAD_ANSWERS[name], wait=False)
    wait_until(lambda: "onstatus returned" in caplog.text)
    assert not client.closed, "it tries again, as without onstatus"


def test_an_onstatus_that_raises_keeps_the_client(
    scripted: Scripted, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    def onstatus(*_: Any) -> bool:
        raise RuntimeError("oh no")

    client = connect(scripted().address, onstatus)
    assert client.publish("a", b"x", 1).wait(5)
    assert "oh no" in caplog.text
    other = connect("127.0.0.1:1", onstatus, wait=False)
    wait_until(lambda: caplog.text.count("oh no") >= 4)
    assert not other.closed


def test_wait_connected_in_onstatus_returns_at_once(connect: Connect) -> None:
    answers: list[bool] = []
    client = connect("127.0.0.1:1", lambda *_: answers.append(client.wait_connected(5)), wait=False)
    assert client.wait_closed(3), "None, the answer of onstatus, makes no further attempt"
    assert answers == [False]


def test_stream_end_errors_match_the_original_texts(connect: Connect) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    told: list[Any] = []
    client = connect(f"127.0.0.1:{listener.getsockname()[1]}", lambda *what: told.append(what[:2]), wait=False)
    peer, _ = gevent.get_hub().threadpool.apply(listener.accept)
    peer.close()
    listener.close()
    wait_until(lambda: client.closed)
    assert told == [("sock", "socketreadfailed")]


class Peer:
    """Accepts one connection, and does with it what a test wants, in a thread."""

    def __init__(self, act: Callable[[socket.socket], object], receive_bytes: int | None = None) -> None:
        self._listener = socket.socket()
        if receive_bytes is not None:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._act, self.stopped = act, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._listener, self._listener.accept()[0] as sock:
            try:
                self._act(sock)
                self.stopped.wait(20)
            except OSError:
                pass  # the client has left


def drip(data: bytes) -> Callable[[socket.socket], None]:
    def act(sock: socket.socket) -> None:
        for byte in data:
            sock.sendall(bytes((byte,)))
            time.sleep(0.01)

    return act


def flood(sock: socket.socket) -> None:
    while True:
        sock.sendall(b"\x16\x03\x03\x40\0" + bytes(16384))


ENDLESS = {
    "a silent handshake": (lambda sock: None, True, "timeout"),
    "a handshake byte by byte": (drip(b"\x16\x03\x03\x3f\xff\x02\0\xff\xff\x03\x03" + bytes(16000)), True, "timeout"),
    "an endless handshake": (flood, True, "timeout"),
    "a silent broker": (lambda sock: None, False, "timeout"),
    "CONNACK byte by byte": (drip(b"\x20\xff\x7f\0\0\xfc\x7f" + b"\x26\0\1a\0\1b" * 2000), False, "timeout"),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_connecting_has_a_deadline(connect: Connect, what: str) -> None:
    act, secure, word = ENDLESS[what]
    peer = Peer(act)
    told: list[Any] = []
    client = connect(peer.address, lambda *what: told.append(what[:2]), wait=False, timeout=0.4, secure=secure)
    wait_until(lambda: client.closed, 3)
    assert told == [("sock", word)]
    peer.stopped.set()


def accept(sock: socket.socket) -> None:
    sock.recv(65536)
    sock.sendall(packet(0x20, b"\0\0\0"))


def test_a_broker_that_takes_nothing_is_left(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smqrt.clients.mqtt.connection.STUCK_S", 0.3)
    peer = Peer(accept, 4096)
    told: list[Any] = []
    client = connect(peer.address, lambda *what: told.append(what[:2]) or len(told) == 1, keepalive=0)
    for _ in range(15):
        client.publish("t", bytes(1_000_000))
    wait_until(lambda: client.closed)
    assert told == [("mqtt", "connect"), ("sock", "timeout")]
    peer.stopped.set()


def test_a_broker_that_takes_little_by_little_is_not(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smqrt.clients.mqtt.connection.STUCK_S", 0.3)
    size_bytes, taken = 12_000_000, [0]

    def slow(sock: socket.socket) -> None:
        accept(sock)
        while taken[0] < size_bytes and (data := sock.recv(60_000)):
            taken[0] += len(data)
            time.sleep(0.02)

    peer = Peer(slow, 65536)
    client = connect(peer.address, keepalive=0)
    for _ in range(12):
        client.publish("t", bytes(1_000_000))
    assert client.flush(20)
    assert client.connected
    peer.stopped.set()


@pytest.mark.parametrize("which", ["onstatus of a connection", "onstatus of none", "onpub"])
def test_a_callback_may_close_its_client(mosquitto: Mosquitto, which: str) -> None:
    took_s: list[float] = []

    def close(*_: Any) -> bool:
        begin_s = undisturbed_s()
        client.close()
        took_s.append(undisturbed_s() - begin_s)
        return True

    address = "127.0.0.1:1" if which.endswith("none") else mosquitto.address
    client = MqttClient(address, None if which == "onpub" else close, close)
    if which == "onpub":
        client.subscribe("own")
        client.publish("own", b"x")
    wait_until(lambda: client.closed and took_s)
    assert len(took_s) == 1
    assert took_s[0] < 1


def test_unread_acknowledgements_are_bounded(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smqrt.clients.mqtt.connection.STUCK_S", 0.3)
    sent, messages = [0], publish("t", b"", 1, 7, properties=b"") * 5000

    def flood_of_qos_1(sock: socket.socket) -> None:
        accept(sock)
        while True:
            sock.sendall(messages)
            sent[0] += 5000

    peer = Peer(flood_of_qos_1, 4096)

    def narrow() -> Stream:
        host, _, port = peer.address.partition(":")
        stream = Stream.connect(host, int(port))
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return stream

    told: list[Any] = []
    most = 0
    client = connect(narrow, lambda *what: told.append(what[:2]) or len(told) == 1, keepalive=0, wait=False)
    while not client.closed:
        most = max(most, len(client._endpoint._out))
        gevent.sleep(0.001)
    assert told == [("mqtt", "connect"), ("sock", "timeout")]
    assert 1000 < most < 12_000
    assert sent[0] > 2 * most
