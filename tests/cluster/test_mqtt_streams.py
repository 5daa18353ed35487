"""Messages with QoS 1 and 2 over links that break: nothing is lost, and nothing arrives twice (help: cluster)."""

from __future__ import annotations

import pytest

from smqrt.broker.outbox import Drop
from smqrt.broker.routes import Trace
from smqrt.cluster import mqtt_streams
from smqrt.cluster.remote_node import may_drop
from smqrt.settings.limits import MqttSettings
from smqrt.wire import cluster_mqtt
from smqrt.wire.cluster_mqtt import Numbered, WireMessages
from smqrt.wire.mqtt.fields import PacketType
from smqrt.wire.mqtt.packets import ConnectPacket, PublishPacket, encode, encode_acknowledgement
from smqrt.wire.smq import publish_frame
from tests.broker.memory_clients import Crowd
from tests.broker.mqtt.memory_devices import MemoryDevice
from tests.cluster.mqtt_hubs import KEPT, Device, MqttCluster


def lost(cluster: MqttCluster, at: int = 0) -> int:
    """The messages that a node has counted as lost."""
    drops = cluster.hubs[at].broker.stats.drops
    return drops[Drop.LINK_LOST] + drops[Drop.LINK_SLOW] + drops[Drop.UNROUTED]


@pytest.mark.parametrize("text", ["a/b", "a/+", "$share/g/a/b"])
def test_messages_of_a_cut_follow(text: str) -> None:
    cluster = MqttCluster()
    _, ear = cluster.hubs[1].client("reader", text, qos=2)
    cluster.settle()
    cluster.publish(0, b"a/b", b"1", qos=1)
    cluster.cut(0, 1)
    for payload in (b"2", b"3"):
        cluster.publish(0, b"a/b", payload, qos=1)
    cluster.publish(0, b"a/b", b"4", b"5", qos=2)
    assert ear.take() == [b"1"]
    cluster.heal(0, 1)
    assert ear.take() == [b"2", b"3", b"4", b"5"]
    cluster.publish(0, b"a/b", b"6", qos=1)
    assert ear.take() == [b"6"]
    assert lost(cluster) == 0
    assert cluster.members[0].streams.size_bytes == 0, "all are acknowledged"
    assert cluster.members[0].lost.is_empty


def test_what_was_on_the_way_follows_once() -> None:
    cluster = MqttCluster()
    one, other = cluster.hubs
    _, ear = other.client("reader", "a", qos=2)
    cluster.settle()
    for number in range(10):
        one.publish(b"a", b"%d" % number, qos=1 + number % 2)
        cluster.network.flush()
        if number < 5:  # these arrive, but their acknowledgement does not
            for pipe in [pipe for pipe in cluster.network.pipes if pipe.link is cluster.link(1, 0)]:
                while pipe.chunks:
                    pipe.arrive()
    cluster.cut(0, 1)
    cluster.heal(0, 1)
    assert ear.take() == [b"%d" % number for number in range(10)]
    assert lost(cluster) == 0


def test_messages_with_qos_0_are_lost_and_counted() -> None:
    cluster = MqttCluster()
    _, ear = cluster.hubs[1].client("reader", "a", qos=1)
    cluster.settle()
    cluster.cut(0, 1)
    cluster.publish(0, b"a", b"1")
    cluster.publish(0, b"a", b"2", qos=1)
    cluster.heal(0, 1)
    assert ear.take() == [b"2"]
    assert lost(cluster) == 1


def test_a_node_of_the_last_release_gets_messages_without_numbers() -> None:
    cluster = MqttCluster(versions={1: (1, 2)})
    _, ear = cluster.hubs[1].client("reader", "a", qos=2)
    cluster.settle()
    assert cluster.members[0].remotes[0].stream is None
    cluster.publish(0, b"a", b"1", qos=1)
    cluster.cut(0, 1)
    cluster.publish(0, b"a", b"2", qos=2)
    cluster.heal(0, 1)
    cluster.publish(0, b"a", b"3", qos=1)
    assert ear.take() == [b"1", b"3"]
    assert lost(cluster) == 2, "the first one was not acknowledged"


def test_the_oldest_messages_are_dropped_above_the_limit() -> None:
    cluster = MqttCluster()
    _, ear = cluster.hubs[1].client("reader", "a", qos=1)
    cluster.settle()
    streams = cluster.members[0].streams
    streams.limit_bytes = 3 * (mqtt_streams.ENTRY_BYTES + 100)
    trace = Trace(cluster.hubs[0].broker, None, b"a", lambda: None)
    trace.start()
    cluster.cut(0, 1)
    for number in range(5):
        cluster.publish(0, b"a", b"%d" % number, qos=1)
    assert lost(cluster) == streams.overflowed == 2
    dropped = [event for event in trace.take() if event["event"] == "dropped"]
    assert [(event["messages"], event["topic"]) for event in dropped] == [(1, "a")] * 2
    cluster.heal(0, 1)
    assert ear.take() == [b"2", b"3", b"4"]


def test_the_application_learns_of_dropped_messages() -> None:
    reports: list[tuple[object, ...]] = []
    cluster = MqttCluster()
    hub, member = cluster.hubs[0], cluster.members[0]
    hub.broker.hooks.onmqttgap = lambda *report: reports.append(report)
    cluster.hubs[1].client("reader", "a", qos=1)
    cluster.settle()
    member.streams.limit_bytes = 3 * (mqtt_streams.ENTRY_BYTES + 100)
    cluster.cut(0, 1)
    for number in range(5):
        cluster.publish(0, b"a", b"%d" % number, qos=1)
    hub.tick(1)
    assert reports == [(None, 2, None, 2)], "more than cluster.kept_bytes"
    hub.now_s += member.lost.kept_s
    member.lost.forget_expired()
    cluster.settle()
    hub.tick(1)
    assert reports[1:] == [(None, 3, None, 2)], "cluster.kept_s is over"


def test_messages_are_not_kept_for_ever() -> None:
    cluster = MqttCluster()
    _, ear = cluster.hubs[1].client("reader", "a", "+/b", qos=1)
    cluster.settle()
    member = cluster.members[0]
    cluster.cut(0, 1)
    cluster.publish(0, b"a", b"1", qos=1)
    cluster.publish(0, b"x/b", b"2", qos=1)
    assert lost(cluster) == 0
    cluster.hubs[0].now_s += member.lost.kept_s
    member.lost.forget_expired()
    cluster.settle()
    assert lost(cluster) == 2
    assert member.streams.size_bytes == 0
    assert member.lost.is_empty
    cluster.heal(0, 1)
    cluster.publish(0, b"a", b"3", qos=1)
    assert ear.take() == [b"3"]


def test_messages_expire_while_they_are_kept() -> None:
    cluster = MqttCluster()
    one, other = cluster.hubs
    device, ear = other.client("reader", "a", qos=1)
    cluster.settle()
    cluster.cut(0, 1)
    writer = Device(cluster, 0, "writer")
    writer.send(PublishPacket("a", b"old", 2, 1, properties={"messageexpiryinterval": 5}))
    writer.send(PublishPacket("a", b"new", 2, 2, properties={"messageexpiryinterval": 50}))
    one.now_s += 10
    cluster.heal(0, 1)
    assert ear.take() == [b"new"]
    assert cluster.members[0].streams.size_bytes == 0


def test_a_stream_sends_what_the_other_node_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mqtt_streams, "WINDOW_BYTES", 3 * (mqtt_streams.ENTRY_BYTES + 100))
    cluster = MqttCluster()
    one, other = cluster.hubs
    _, ear = other.client("reader", "a", qos=1)
    cluster.settle()
    for number in range(10):
        one.publish(b"a", b"%d" % number, qos=1)
    stream = cluster.members[0].remotes[0].stream
    assert stream is not None
    assert stream.is_delayed
    waits = cluster.members[0].mqtt.must_wait(one.broker.server)
    assert waits, "a publisher gets no acknowledgement while messages wait in this process"
    cluster.settle()
    assert ear.take() == [b"%d" % number for number in range(10)]
    assert not cluster.members[0].mqtt.must_wait(one.broker.server)


def test_a_full_queue_drops_no_numbered_message() -> None:
    messages = WireMessages(b"a", b"", publish_frame(1, 2, 0, b"x"), True, 1, large=b"y" * 100_000)
    assert may_drop(cluster_mqtt.messages(messages))
    assert not may_drop(cluster_mqtt.numbered(Numbered(1, 2, 3, messages)))


def test_large_messages_are_kept_too() -> None:
    cluster = MqttCluster(settings=MqttSettings(packet_bytes=1 << 20))
    _, ear = cluster.hubs[1].client("reader", "a", qos=1)
    cluster.settle()
    writer = Device(cluster, 0, "writer")
    cluster.cut(0, 1)
    writer.send(PublishPacket("a", b"z" * 200_000, 2, 1))
    cluster.heal(0, 1)
    assert [len(one) for one in ear.take()] == [200_000]


def test_only_hubs_with_mqtt_clients_greet() -> None:
    cluster = MqttCluster()
    node = cluster.network.node(number=9)
    broker = Crowd().broker
    member = node.join(broker, "hub")
    for other in cluster.nodes:
        cluster.network.connect(node, other)
    cluster.settle()
    assert all(one.identity for one in member.remotes), "the others have MQTT clients"
    assert all(one.stream is None for one in member.remotes)
    assert next(one for one in cluster.members[0].remotes if one.number == 9).stream is None


# ---- sessions that move while a node is lost


def test_messages_that_reach_the_former_node_of_a_session_follow_once() -> None:
    cluster = MqttCluster(3)
    Device(cluster, 1, "reader", qos=2).subscribe("a")
    cluster.hubs[2].client("other", "a", qos=1)
    cluster.settle()
    cluster.cut(0, 1)
    cluster.publish(0, b"a", b"before the move", qos=2)
    reader = Device(cluster, 2, "reader", qos=2)
    assert reader.is_kept
    cluster.publish(0, b"a", b"after the move", qos=2)
    assert reader.take() == [b"after the move"]
    cluster.heal(0, 1)
    cluster.hubs[1].tick(1)
    assert reader.take() == [b"before the move"]
    for hub in cluster.hubs:
        hub.tick(30)
        hub.tick(30)
    cluster.settle()
    assert "reader" not in cluster.hubs[1].devices.sessions
    assert cluster.hubs[2].devices.sessions["reader"].origins is None


def test_messages_that_the_new_node_gets_late_are_not_doubled() -> None:
    cluster = MqttCluster(3)
    reader = Device(cluster, 1, "reader", qos=2).subscribe("a")
    cluster.hubs[2].client("other", "a", qos=1)
    cluster.settle()
    cluster.cut(0, 2)
    cluster.publish(0, b"a", b"1", qos=2)
    assert reader.take() == [b"1"]
    reader.inner.feed(encode_acknowledgement(PacketType.PUBREC, reader.numbers[0], 5))
    reader.inner.feed(encode_acknowledgement(PacketType.PUBCOMP, reader.numbers[0], 5))
    again = Device(cluster, 2, "reader", qos=2)
    assert again.is_kept
    cluster.heal(0, 2)
    assert again.take() == []
    cluster.publish(0, b"a", b"2", qos=2)
    assert again.take() == [b"2"]


def test_a_session_that_is_handed_over_to_a_node_that_is_lost_keeps_its_messages() -> None:
    cluster = MqttCluster()
    Device(cluster, 0, "reader", qos=1).subscribe("a").lost()
    cluster.publish(0, b"a", b"1", qos=1)
    again = MemoryDevice(cluster.hubs[1])  # type: ignore[arg-type]
    again.feed(encode(ConnectPacket(5, "reader", False, 0, KEPT), 5))
    cluster.network.settle(lambda: bool(cluster.members[0].sessions._leaving))
    cluster.cut(0, 1)
    device = cluster.hubs[0].devices.sessions["reader"]
    assert [one.payload for one in device.waiting] == [b"1"]


def test_a_number_that_has_arrived_is_ignored() -> None:
    cluster = MqttCluster()
    _, ear = cluster.hubs[1].client("reader", "a", qos=1)
    cluster.settle()
    member = cluster.members[1]
    messages = WireMessages(b"a", b"", publish_frame(1, 2, 0, b"x"), True, 1)
    for number in (1, 1, 3, 2):  # the sender has dropped one
        packet = cluster_mqtt.numbered(Numbered(9, number, 0, messages))
        member.mqtt.on_numbered(member.remotes[0], packet[2:])
    assert ear.take() == [b"x", b"x"]
