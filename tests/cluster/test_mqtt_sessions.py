"""Sessions of MQTT clients that connect to another node: subscriptions and messages come along (help: mqtt-hub)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from smqrt.broker.mqtt.client_ids import uid_of
from smqrt.broker.mqtt.messages import Message
from smqrt.broker.mqtt.take_overs import MAX_TAKE_OVERS, WINDOW_S
from smqrt.cluster import mqtt_sessions
from smqrt.cluster.mqtt_sessions import SessionMoves
from smqrt.errors import ProtocolError
from smqrt.wire.mqtt.fields import PacketType
from smqrt.wire.mqtt.packets import (
    ConnectPacket,
    PublishPacket,
    encode,
)
from tests.broker.mqtt.hub import MqttHub
from tests.broker.mqtt.memory_devices import MemoryDevice
from tests.cluster.mqtt_hubs import KEPT, Device, MqttCluster


def test_a_session_moves_with_its_subscriptions_and_messages() -> None:
    cluster = MqttCluster(3)
    device = Device(cluster, 0, "sensor").subscribe("cmd/+", "state")
    assert device.is_kept is False
    cluster.publish(1, b"cmd/a", b"in flight", qos=1)
    assert device.take() == [b"in flight"]  # not acknowledged
    device.lost()
    cluster.publish(1, b"cmd/a", b"waiting", qos=1)
    again = Device(cluster, 2, "sensor")
    assert again.is_kept is True
    assert again.take() == [b"in flight", b"waiting"]
    assert again.numbers[0] == device.numbers[0], "sent again under its number"
    for at in range(3):
        cluster.publish(at, b"cmd/b", b"from %d" % at, qos=1)
        cluster.publish(at, b"state", b"s%d" % at, qos=1)
    assert again.take() == [b"from 0", b"s0", b"from 1", b"s1", b"from 2", b"s2"]
    assert [list(hub.devices.sessions) for hub in cluster.hubs] == [[], [], ["sensor"]]
    assert not any(cluster.hubs[at].devices.filters.by_text for at in (0, 1))
    assert cluster.hubs[0].devices.waiting_bytes == 0


MALFORMED = (
    b"\xe0r\xd2",
    b"[]",
    b'{"kind": "gone"}',
    b'{"kind": []}',
    b'{"bytes": 1}',
    b"[" * 9000,
)


@pytest.mark.parametrize("body", MALFORMED, ids=lambda body: repr(body[:16]))
def test_a_malformed_packet_is_refused_without_its_bytes(body: bytes) -> None:
    nodes = SimpleNamespace(body=lambda node, packet: packet)
    moves = SessionMoves(Any, nodes, Any, Any)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError) as refused:
        moves.on_session(Any, b"S" + body)
    assert str(refused.value) == "a session of another node is malformed: not the JSON of a known kind"


def test_the_old_connection_is_closed_as_taken_over() -> None:
    cluster = MqttCluster()
    device = Device(cluster, 0, "x" * 300).subscribe("a")
    again = Device(cluster, 1, "x" * 300)
    device.settle()
    assert device.closed_with == 0x8E
    assert again.is_kept is True
    cluster.publish(0, b"a", b"1", qos=1)
    assert again.take() == [b"1"]


def test_qos_2_continues_at_the_other_node() -> None:
    cluster = MqttCluster()
    device = Device(cluster, 0, "d")
    device.send(PublishPacket("t", b"x", 4, 7))
    assert cluster.hubs[0].devices.sessions["d"].unreleased == {7}
    Device(cluster, 1, "d")
    assert cluster.hubs[1].devices.sessions["d"].unreleased == {7}


def test_a_clean_start_ends_the_session_elsewhere() -> None:
    cluster = MqttCluster()
    Device(cluster, 0, "d").subscribe("a/#").lost()
    again = Device(cluster, 1, "d", clean=True)
    assert again.is_kept is False
    assert not cluster.hubs[0].devices.sessions
    assert not cluster.publish(0, b"a/b", b"x")


def test_messages_that_arrive_during_the_move_follow() -> None:
    cluster = MqttCluster()
    Device(cluster, 0, "d").subscribe("a").lost()
    again = MemoryDevice(cluster.hubs[1])  # type: ignore[arg-type]
    again.feed(encode(ConnectPacket(5, "d", False, 0, KEPT), 5))
    cluster.network.settle(lambda: bool(cluster.members[0].sessions._leaving))
    assert "d" in cluster.members[0].sessions._leaving
    cluster.hubs[0].devices.sessions["d"].enqueue(Message(b"a", b"meanwhile", 1))
    cluster.settle()
    assert b"meanwhile" in again.take()
    assert not cluster.members[0].sessions._leaving
    assert not cluster.hubs[0].devices.sessions


def test_many_waiting_messages_follow_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mqtt_sessions, "PORTION_BYTES", 2000)
    cluster = MqttCluster()
    cluster.hubs[0].now_s = 1000.0
    Device(cluster, 0, "d").subscribe("a").lost()
    for number in range(100):
        message = Message(b"a", b"%d" % number, 1, expires_s=1000.5 if number % 2 else 1060.0)
        cluster.hubs[0].devices.sessions["d"].enqueue(message)
    cluster.hubs[0].now_s = 1001.0  # the clock of the other node is at 0
    again = Device(cluster, 1, "d")
    for _ in range(10):
        for number in again.numbers:
            again.inner.session.acknowledged(number, PacketType.PUBACK)
        again.numbers = []
        again.settle()
    assert again.take() == [b"%d" % number for number in range(0, 100, 2)]
    assert not cluster.hubs[0].devices.sessions
    assert cluster.hubs[0].devices.waiting_bytes == 0


def test_another_users_session_is_not_taken() -> None:
    cluster = MqttCluster()
    first = Device(cluster, 0, "d", user="eve").subscribe("a")
    other = Device(cluster, 1, "d", user="mallory")
    assert other.is_kept is None
    assert other.inner.session.closed
    first.settle()
    assert first.closed_with is None
    first.lost()
    assert Device(cluster, 1, "d", user="mallory").inner.session.closed
    assert Device(cluster, 1, "d", user="eve").is_kept is True


def test_a_node_that_does_not_answer_is_skipped() -> None:
    cluster = MqttCluster()
    Device(cluster, 0, "d").subscribe("a").lost()
    cluster.network.swallow(cluster.link(0, 1))
    again = Device(cluster, 1, "d")
    assert not again.inner.take()
    cluster.hubs[1].tick(mqtt_sessions.ANSWER_S)
    again.settle()
    assert again.is_kept is False
    cluster.network.pass_time(10)
    cluster.heal(0, 1)
    assert not cluster.hubs[0].devices.sessions, "the older session has ended"


def test_a_node_that_is_lost_is_not_waited_for() -> None:
    cluster = MqttCluster()
    again = MemoryDevice(cluster.hubs[1])  # type: ignore[arg-type]
    again.feed(encode(ConnectPacket(5, "d", False, 0, KEPT), 5))
    cluster.cut(0, 1)
    assert again.take()[:1] == b"\x20"


def test_after_a_partition_the_younger_session_stays() -> None:
    cluster = MqttCluster()
    cluster.cut(0, 1)
    older = Device(cluster, 0, "d").subscribe("old")
    cluster.network.now_s += 1
    younger = Device(cluster, 1, "d").subscribe("new")
    cluster.heal(0, 1)
    older.settle()
    younger.settle()
    assert (older.closed_with, younger.closed_with) == (0x8E, None)
    assert [list(hub.devices.sessions) for hub in cluster.hubs] == [[], ["d"]]
    cluster.publish(0, b"new", b"x", qos=1)
    assert younger.take() == [b"x"]


def test_of_two_sessions_without_a_connection_the_younger_one_is_taken() -> None:
    cluster = MqttCluster(3)
    cluster.cut(0, 1)
    for hub in cluster.hubs:
        hub.now_s = 100.0
    Device(cluster, 0, "d").subscribe("older").lost()
    for hub in cluster.hubs:
        hub.now_s = 200.0
    cluster.cut(0, 2)
    Device(cluster, 1, "d").subscribe("younger").lost()
    cluster.heal(0, 1)
    cluster.heal(0, 2)
    Device(cluster, 2, "d")
    assert list(cluster.hubs[2].devices.sessions["d"].subscriptions) == ["younger"]
    for hub in cluster.hubs[:2]:  # they keep the sessions for messages of nodes that were lost
        hub.tick(mqtt_sessions.LEAVING_S + 1)
    assert not cluster.hubs[0].devices.sessions
    assert not cluster.hubs[1].devices.sessions


def test_messages_of_a_session_at_a_lost_node_follow_when_it_is_back() -> None:
    cluster = MqttCluster(3)
    device = Device(cluster, 0, "d").subscribe("a", "b")
    cluster.publish(0, b"a", b"in flight", qos=1)
    assert device.take() == [b"in flight"]
    device.lost()
    cluster.publish(0, b"a", b"waiting", qos=1)
    cluster.publish(0, b"b", b"unwanted", qos=1)
    cluster.cut(0, 1)
    again = Device(cluster, 1, "d").subscribe("a")
    assert again.is_kept is False
    cluster.heal(0, 1)
    assert again.take() == [b"in flight", b"waiting"]
    assert [list(hub.devices.sessions) for hub in cluster.hubs] == [[], ["d"], []]
    cluster.publish(0, b"a", b"later", qos=1)
    assert again.take() == [b"later"]


@pytest.mark.parametrize(("clean", "user"), [(True, None), (False, "eve")])
def test_messages_of_a_session_at_a_lost_node_are_not_for_others(clean: bool, user: str | None) -> None:
    cluster = MqttCluster()
    Device(cluster, 0, "d").subscribe("a").lost()
    cluster.publish(0, b"a", b"secret", qos=1)
    cluster.cut(0, 1)
    again = Device(cluster, 1, "d", clean, user).subscribe("a")
    cluster.heal(0, 1)
    assert again.take() == []
    assert not cluster.hubs[0].devices.sessions


@pytest.mark.parametrize("at", [0, 1])
def test_clients_of_nodes_of_the_last_release(at: int) -> None:
    """Their sessions stay where they are; connections are taken over as those of SMQ clients."""
    cluster = MqttCluster(versions={1: (1, 1)})
    device = Device(cluster, at, "d").subscribe("a")
    again = Device(cluster, 1 - at, "d")
    device.settle()
    assert device.closed_with == 0x8E
    assert again.is_kept is False
    assert "d" in cluster.hubs[at].devices.sessions


def test_clients_of_several_nodes_that_replace_each_other_wait() -> None:
    cluster = MqttCluster()
    devices = [Device(cluster, at % 2, "same") for at in range(2 * MAX_TAKE_OVERS)]
    assert all(one.is_kept is not None for one in devices)
    waiting = Device(cluster, 0, "same")
    assert waiting.is_kept is None
    assert devices[-1].closed_with is None
    for hub in cluster.hubs:
        hub.tick(WINDOW_S)
    waiting.settle()
    assert waiting.is_kept
    devices[-1].settle()
    assert devices[-1].closed_with == 0x8E


def test_the_session_of_a_long_client_id_is_found_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = MqttHub()
    for at in range(100):
        hub.client("x" * 300 + str(at))
    asked: list[str] = []
    monkeypatch.setattr(mqtt_sessions, "uid_of", lambda client_id: asked.append(client_id) or uid_of(client_id))
    moves = SessionMoves.__new__(SessionMoves)
    moves._state = SimpleNamespace(broker=hub.broker)  # type: ignore[assignment]
    last = "x" * 300 + "99"
    assert moves._device_of(uid_of(last)) is hub.devices.sessions[last]
    assert moves._device_of(uid_of("y" * 300)) is None
    assert asked == [last]
    for device in list(hub.devices.sessions.values()):
        hub.devices.end(device)
    assert not hub.devices.hashed
