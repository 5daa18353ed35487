"""The queue of an MQTT client: its order, its bounds, and what happens at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gevent
import pytest

from smqrt.errors import ArgumentError, ClosedError, QueueFullError
from smqrt.mqtt import MqttClient
from tests.clients.mqtt.scripted import PUBACK, PUBLISH, SUBSCRIBE, UNSUBSCRIBE, ScriptedBroker, packet, stall
from tests.support.waiting import let_others_run, wait_until

Connect = Callable[..., MqttClient]
Scripted = Callable[..., ScriptedBroker]


def stopped(scripted: Scripted) -> ScriptedBroker:
    """A broker that reads nothing behind CONNECT."""
    return scripted(on_open=lambda wire: stall())


@pytest.mark.parametrize("qos", [0, 1])
def test_a_broker_that_stopped_does_not_fill_the_memory(scripted: Scripted, connect: Connect, qos: int) -> None:
    client = connect(stopped(scripted).address, queuefull="raise", queuebytes=1 << 20)
    taken = 0
    with pytest.raises(QueueFullError, match="queuebytes=1048576"):  # noqa: PT012
        for _ in range(20_000):
            client.publish("t", b"x" * 10_000, qos)
            taken += 1
            if not taken % 100:
                gevent.sleep(0.001)  # what the system takes may go
    system_bytes = 8 << 20  # what the sockets of both sides hold
    assert taken * 10_000 < system_bytes + (2 << 20)
    assert client.refused == 1


def test_by_default_10_000_messages_and_16_mib_wait(connect: Connect) -> None:
    client = connect("127.0.0.1:1", lambda *_: 60, wait=False, queuefull="raise")
    for _ in range(10_000):
        client.publish("t", b"x")
    with pytest.raises(QueueFullError, match="queuesize=10000"):
        client.publish("t", b"x")
    assert client.status() == (10_000, False, False)
    large = connect("127.0.0.1:1", lambda *_: 60, wait=False, queuefull="raise")
    with pytest.raises(QueueFullError, match="queuebytes=16777216"):
        [large.publish("t", b"x" * 1_000_000) for _ in range(17)]


def test_by_default_publish_waits(scripted: Scripted, connect: Connect) -> None:
    broker = scripted()
    client = connect(broker.address, queuesize=10)
    for number in range(2000):
        client.publish("t", b"%d" % number)
    assert client.flush(5)
    wait_until(lambda: len(broker.received) == 2000)
    assert [payload for _, payload in broker.received] == [b"%d" % number for number in range(2000)]
    assert client.refused == client.dropped == 0


def test_calls_waiting_for_queue_space_time_out(connect: Connect) -> None:
    client = connect("127.0.0.1:1", lambda *_: 60, wait=False, queuesize=1, timeout=0.2)
    client.publish("t", b"x")
    with pytest.raises(QueueFullError, match="queuesize=1"):
        client.publish("t", b"x")
    with pytest.raises(QueueFullError):
        client.subscribe("t")
    assert client.refused == 2


def test_waiting_readers_are_notified_of_the_end(connect: Connect) -> None:
    client = connect("127.0.0.1:1", lambda *_: 60, wait=False, queuesize=1, timeout=30)
    client.publish("t", b"x")
    waiting = gevent.spawn(client.publish, "t", b"y")
    let_others_run()
    client.disconnect()
    with pytest.raises(ClosedError):
        waiting.get(timeout=5)


def test_the_oldest_is_dropped_if_that_is_wanted(scripted: Scripted, connect: Connect) -> None:
    client = connect("127.0.0.1:1", lambda *_: 60, wait=False, queuesize=3, queuefull="drop")
    client.subscribe("kept")
    items = [client.publish("t", b"%d" % number, 1) for number in range(5)]
    assert [item.error for item in items] == ["dropped"] * 3 + [None] * 2
    assert client.dropped == 3
    assert client.status()[0] == 3


def test_what_is_larger_than_a_packet_fails_at_once(scripted: Scripted, connect: Connect) -> None:
    client = connect(scripted().address, maxpacketsize=1000)
    assert client.publish("t", b"x" * 1000).error == "toolarge"
    assert client.publish("t", b"x" * 900, 1).wait(5)


@pytest.mark.parametrize("version", [4, 5])
def test_subscriptions_keep_their_place(scripted: Scripted, connect: Connect, version: int) -> None:
    broker = scripted(version)
    client = connect(broker.address, wait=False, version=version)
    client.publish("t", b"1", 1)
    client.subscribe("a")
    client.publish("t", b"2", 0)
    client.unsubscribe("a")
    client.publish("t", b"3", 2)
    assert client.flush(5)
    kinds = [first & 0xF0 for first, _ in broker.packets if first & 0xF0 in (PUBLISH, SUBSCRIBE, UNSUBSCRIBE)]
    assert kinds == [PUBLISH, SUBSCRIBE, PUBLISH, UNSUBSCRIBE, PUBLISH]


def test_a_subscription_waits_for_messages_that_wait_for_room(scripted: Scripted, connect: Connect) -> None:
    broker = scripted()
    client = connect(broker.address, inflight=1)
    for number in range(50):
        client.publish("t", b"%d" % number, 1)
    client.subscribe("a")
    assert client.flush(5)
    assert [first & 0xF0 for first, _ in broker.packets[1:]] == [PUBLISH] * 50 + [SUBSCRIBE]


@pytest.mark.parametrize(("version", "properties", "most"), [(4, b"", 20), (5, b"", 1000), (5, b"\x21\0\x07", 7)])
def test_how_much_is_in_flight(
    scripted: Scripted, connect: Connect, version: int, properties: bytes, most: int
) -> None:
    broker = scripted(version, properties=properties, on_packet=lambda wire, first, body: first & 0xF0 == PUBLISH)
    client = connect(broker.address, version=version)
    for _ in range(1000):
        client.publish("t", b"x", 1)
    wait_until(lambda: len(broker.of_kind(PUBLISH)) == most)
    let_others_run()
    assert len(broker.of_kind(PUBLISH)) == most


def test_acknowledgements_cost_the_same_however_much_is_in_flight(scripted: Scripted, connect: Connect) -> None:
    """The broker breaks off with thousands in flight, and acknowledges backwards what is sent again."""
    seen: list[bytes] = []

    def on_packet(wire: Any, first: int, body: bytes) -> bool:
        if first & 0xF0 != PUBLISH:
            return False
        seen.append(body[3:5])
        if len(seen) == 10_000:
            wire.sock.close()
        if len(seen) == 20_000:
            wire.send(b"".join(packet(PUBACK, mid) for mid in reversed(seen[10_000:])))
        return True

    broker = scripted(on_packet=on_packet)
    client = connect(broker.address, lambda *_: 0.01, properties={"sessionexpiryinterval": 60})
    items = [client.publish("t", b"x", 1) for _ in range(10_000)]
    assert client.flush(15)
    assert all(item.wait(0) for item in items)
    assert broker.connections == 2


WRONG = {
    "keepalive": [-1, 65536, 1.5, "60", True, float("nan")],
    "timeout": [0, -1, float("nan"), float("inf"), 1e9, "5"],
    "inflight": [0, 40000, 1.5],
    "queuesize": [0, -5, 2.5],
    "queuebytes": [0, "many"],
    "maxpacketsize": [10, 1 << 30],
    "port": [0, 65536, "1883"],
    "queuefull": ["never", 1],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in WRONG for value in WRONG[name]])
def test_options_beyond_their_range_are_named(name: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=f"^{name} must be"):
        MqttClient("127.0.0.1:1", **{name: value})


def test_what_waits_is_forgotten_when_that_is_wanted(connect: Connect) -> None:
    client = connect("127.0.0.1:1", lambda *_: 60, wait=False)
    item = client.publish("t", b"x", 1)
    client.subscribe("a")
    assert client.discard() == 2
    assert (item.done, item.error) == (True, "closed")
    assert client.status()[0] == client.discard() == 0
