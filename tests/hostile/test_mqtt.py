"""MQTT in both directions: strangers at the broker in Lua, and hostile brokers of the client in the server."""

from __future__ import annotations

import itertools
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from tests.apps.lua.mqtt_packets import PINGREQ, connect, packet, publish, subscribe, text, varint
from tests.hostile.conftest import APPS, Attack, Besieged
from tests.support.waiting import wait_until

SMALLEST = b"\x26\0\0\0\0"
USER_PROPERTY = b"\x26\0\1a\0\1b"
CONNACK = packet(0x20, b"\0\0\0")
WAIT_S = 20


@pytest.fixture(scope="module")
def server() -> Iterator[Besieged]:
    besieged = Besieged(APPS / "mqtt")
    yield besieged
    besieged.stop()


def page(server: Besieged, name: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/mqtt/{name}", timeout=WAIT_S) as answer:
        return str(answer.read().decode().strip())


# ---- strangers at the broker


class Stranger:
    """A client of the broker that sends bytes."""

    def __init__(self, server: Besieged, attack: Attack, version: int = 5, name: str = "stranger") -> None:
        self._attack = attack
        self.socket = socket.create_connection(("127.0.0.1", int(page(server, "port.lsp"))), WAIT_S)
        self.send(connect(version, name))
        assert self.socket.recv(1024)[0] == 0x20

    def send(self, data: bytes) -> None:
        try:
            self.socket.sendall(data)
            self._attack.sent(len(data))
        except OSError:
            pass  # refused before all was sent

    def settle(self) -> bytes:
        """What comes until the broker has handled all that was sent: it answers a ping behind it, or closes."""
        data = b""
        try:
            self.socket.sendall(PINGREQ)
            while not data.endswith(b"\xd0\0") and (part := self.socket.recv(1 << 20)):
                data += part
        except OSError:
            pass  # closed
        return data

    def close(self) -> None:
        self.settle()
        self.socket.close()


def many_filters() -> bytes:
    return subscribe(5, *(str(number % 10) for number in range(65_000)))


def deep_filters() -> bytes:
    patterns = itertools.islice(itertools.product("a+", repeat=10), 1000)
    return subscribe(5, *("/".join(one) + "/+" * 115 for one in patterns))


PACKETS: dict[str, Callable[[], bytes]] = {
    "MQTT broker: 52,000 properties in one message": lambda: publish(5, "t", properties=SMALLEST * 52_000),
    "MQTT broker: 65,000 filters in one packet": many_filters,
    "MQTT broker: 1000 filters of 125 levels": deep_filters,
    "MQTT broker: filters of 65,000 levels": lambda: subscribe(5, *["/" * 65_000] * 4),
    "MQTT broker: 200,000 pings at once": lambda: PINGREQ * 200_000,
    "MQTT broker: 100,000 empty messages": lambda: publish(5, "t") * 100_000,
    "MQTT broker: a topic of 65,000 levels": lambda: publish(5, "/" * 65_000) * 20,
}


@pytest.mark.parametrize("name", PACKETS)
def test_unauthenticated_clients_of_the_broker(server: Besieged, name: str) -> None:
    data = PACKETS[name]()
    with server.attack(name) as attack:
        stranger = Stranger(server, attack)
        stranger.send(data)
        stranger.close()


def test_overlapping_subscriptions(server: Besieged) -> None:
    patterns = ["/".join(one) for one in itertools.islice(itertools.product("a+", repeat=10), 1000)]
    with server.attack("MQTT broker: 1000 subscriptions match each of 1500 messages") as attack:
        stranger = Stranger(server, attack)
        stranger.send(subscribe(5, *patterns))
        stranger.send(publish(5, "/".join("a" * 10)) * 1500)
        assert stranger.settle()
        stranger.close()


def test_many_subscribers_of_everything(server: Besieged) -> None:
    filters = ["/".join(one) + "/+" * 40 for one in itertools.islice(itertools.product("a+", repeat=7), 100)]
    with server.attack("MQTT broker: 40 clients whose filters fill the tree, and messages") as attack:
        strangers = [Stranger(server, attack, name=f"s{number}") for number in range(40)]
        for number, stranger in enumerate(strangers):
            stranger.send(subscribe(5, *(f"{one}/{number}" for one in filters)))
        strangers[0].send(publish(5, "/".join("a" * 47)) * 300)
        for stranger in strangers:
            stranger.close()


# ---- hostile brokers


class HostileBroker:
    """Accepts one client, reads CONNECT, and does as it likes in a thread."""

    def __init__(self, attack: Attack, act: Callable[[HostileBroker], None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._attack, self._act = attack, act
        self.port = int(self._listener.getsockname()[1])
        self.stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._listener.settimeout(WAIT_S)
        self.socket, _ = self._listener.accept()
        self.socket.recv(65536)
        try:
            self._act(self)
        except OSError:
            pass  # the client has left

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)
        self._attack.sent(len(data))

    def close(self) -> None:
        self.stopped.set()
        self._listener.close()
        self.socket.close()
        self._thread.join(WAIT_S)


def flood(data: bytes, times: int = 10) -> Callable[[HostileBroker], None]:
    def act(broker: HostileBroker) -> None:
        broker.send(CONNACK)
        for _ in range(times):
            broker.send(data)
        broker.stopped.wait(WAIT_S)

    return act


def once(*packets: bytes) -> Callable[[HostileBroker], None]:
    def act(broker: HostileBroker) -> None:
        for data in packets:
            broker.send(data)
        broker.stopped.wait(3)

    return act


def drip(broker: HostileBroker) -> None:
    for byte in packet(0x20, b"\0\0" + varint(60_000) + USER_PROPERTY * 8571):
        broker.send(bytes((byte,)))
        if broker.stopped.wait(0.01):
            return


def full_of(pair: bytes) -> bytes:
    return pair * (1_040_000 // len(pair))


BROKERS: dict[str, tuple[Callable[[HostileBroker], None], str]] = {
    "MQTT client: 1 MB of properties in a message": (
        once(CONNACK, publish(5, "t", properties=full_of(SMALLEST)), publish(5, "t")),
        "connect  1",
    ),
    "MQTT client: 1 MB of properties in CONNACK": (
        once(packet(0x20, b"\0\0" + varint(1_040_000) + full_of(SMALLEST))),
        "protocolerror  0",
    ),
    "MQTT client: 1 MB of codes in SUBACK": (
        once(CONNACK, packet(0x90, b"\0\1\0" + bytes(1_000_000))),
        "connect protocolerror  0",
    ),
    "MQTT client: a packet of 256 MB is announced": (
        once(CONNACK, b"\x30\xff\xff\xff\x7f" + bytes(100_000)),
        "connect protocolerror  0",
    ),
    "MQTT client: CONNACK byte by byte": (drip, "timeout  0"),
    "MQTT client: rubbish instead of CONNACK": (once(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 1000), "protocolerror  0"),
}


@pytest.mark.parametrize("name", BROKERS)
def test_hostile_brokers(server: Besieged, name: str) -> None:
    act, told = BROKERS[name]
    with server.attack(name) as attack:
        broker = HostileBroker(attack, act)
        page(server, f"begin.lsp?port={broker.port}")
        wait_until(lambda: page(server, "told.lsp").replace("\t", " ") == told, told)
        broker.close()


FLOODS = {
    "MQTT client: a flood of small messages": packet(0x30, text("t") + b"\0") * 10_000,
    "MQTT client: a flood of large messages": publish(5, "t", bytes(1_000_000)),
    "MQTT client: a flood of QoS 1 whose answers nobody reads": packet(0x32, text("t") + b"\0\7\0") * 10_000,
    "MQTT client: a flood of pings' answers": packet(0xD0) * 30_000,
    "MQTT client: messages with 1000 properties each": publish(5, "t", properties=USER_PROPERTY * 1000) * 10,
    "MQTT client: messages with too many properties": publish(5, "t", properties=USER_PROPERTY * 1001) * 10,
}


@pytest.mark.parametrize("name", FLOODS)
def test_floods(server: Besieged, name: str) -> None:
    with server.attack(name) as attack:
        broker = HostileBroker(attack, flood(FLOODS[name]))
        page(server, f"begin.lsp?port={broker.port}")
        wait_until(lambda: page(server, "told.lsp").startswith("connect"), "the client is connected")
        time.sleep(1)  # it takes what lies in its socket
        broker.close()
