"""MQTT clients of several nodes: filters, and messages with what MQTT adds to them (help: mqtt-hub)."""

from __future__ import annotations

import pytest

from smqrt.broker.mqtt import large_messages
from smqrt.broker.mqtt.application import PublishOptions
from smqrt.broker.mqtt.filters import Options
from smqrt.broker.mqtt.messages import mqtt_batch
from smqrt.broker.outbox import Drop
from smqrt.broker.routes import destination
from smqrt.broker.topics import HubLimits
from smqrt.cluster import mqtt_nodes
from smqrt.cluster.remote_node import ForwardedRoute
from smqrt.wire import smq
from smqrt.wire.mqtt.fields import PacketType, pack_properties
from tests.broker.memory_clients import heard
from tests.broker.memory_clients import subscribe as smq_subscribe
from tests.cluster.mqtt_hubs import MqttCluster

OLD = (1, 1)
"""The link versions of the last release."""


def test_filters_get_messages_to_topics_that_their_node_does_not_know() -> None:
    cluster = MqttCluster(3)
    one, other, third = cluster.hubs
    _, ear = other.client("reader", "house/+/temp")
    cluster.settle()
    assert cluster.publish(0, b"house/kitchen/temp", b"21")
    assert ear.take() == [b"21"]
    assert b"house/kitchen/temp" in other.broker.topic_table.by_name
    assert b"house/kitchen/temp" not in third.broker.topic_table.by_name, "nobody wants it there"
    cluster.publish(0, b"house/kitchen/temp", b"22", b"23")
    cluster.publish(2, b"house/attic/temp", b"9")
    assert ear.take() == [b"22", b"23", b"9"]
    assert not cluster.publish(0, b"house/kitchen/light", b"on"), "nobody wants it"
    assert b"house/kitchen/light" not in one.broker.topic_table.by_name
    assert one.broker.stats.drops[Drop.LINK_LOST] == other.broker.stats.drops[Drop.UNROUTED] == 0


def test_topics_that_exist_before_a_filter_are_found() -> None:
    cluster = MqttCluster()
    one, other = cluster.hubs
    _, near = one.client("near", "a/#")
    cluster.publish(0, b"a/b", b"first")
    device, far = other.client("far", "+/b")
    cluster.settle()
    cluster.publish(0, b"a/b", b"second")
    assert far.take() == [b"second"]
    other.devices.unsubscribe(device, "+/b")
    cluster.settle()
    cluster.publish(0, b"a/b", b"third")
    cluster.publish(0, b"a/c", b"fourth")
    assert far.take() == []
    assert near.take() == [b"first", b"second", b"third", b"fourth"]


def test_filters_are_known_after_a_link_is_made_and_forgotten_with_the_node() -> None:
    cluster = MqttCluster()
    _, ear = cluster.hubs[1].client("reader", "a/+", "b/#")
    cluster.settle()
    cluster.cut(0, 1)
    filters = cluster.members[0].mqtt.filters
    assert len(filters) == 0
    cluster.heal(0, 1)
    assert len(filters) == 2
    cluster.publish(0, b"a/1", b"x")
    assert ear.take() == [b"x"]


def test_messages_of_smq_clients_reach_filters_of_other_nodes() -> None:
    cluster = MqttCluster()
    one, other = cluster.hubs
    _, ear = other.client("reader", "news/#", qos=1)
    cluster.settle()
    client = one.crowd.client()
    topic = one.broker.topic_table.named(b"news/sport")
    for text in (b"1", b"2"):
        client.publish(smq.publish_frame(topic.id, client.etid, 0, text))
        cluster.settle()
    assert [(payload, qos) for _, payload, qos, *_ in ear.got] == [(b"1", 1), (b"2", 1)]


def test_a_filter_changes_routes_that_publishers_have_already() -> None:
    cluster = MqttCluster()
    one, other = cluster.hubs
    client, reader = one.crowd.client(b"writer"), one.crowd.client(b"reader")
    number = smq_subscribe(reader, b"news/sport")
    client.publish(smq.publish_frame(number, client.etid, 0, b"before"))
    cluster.settle()
    _, ear = other.client("reader", "news/#")
    cluster.settle()
    client.publish(smq.publish_frame(number, client.etid, 0, b"after"))
    cluster.settle()
    assert ear.take() == [b"after"]


def test_filters_of_applications_work_over_nodes() -> None:
    cluster = MqttCluster()
    one, other = cluster.hubs
    got: list[bytes] = []
    other.broker.subscribe_filter("house/+/temp", lambda data, *_: got.append(data))
    cluster.settle()
    assert cluster.publish(0, b"house/attic/temp", b"5")
    one.broker.publish(b"6", b"house/cellar/temp")
    cluster.settle()
    assert got == [b"5", b"6"]
    other.broker.unsubscribe(b"house/+/temp")
    cluster.settle()
    assert not cluster.publish(0, b"house/hall/temp", b"7")


def test_one_node_handles_the_first_message_to_a_filter_with_once() -> None:
    cluster = MqttCluster(3)
    got: list[tuple[int, bytes]] = []
    for at in (1, 2):
        hub = cluster.hubs[at].broker
        hub.subscribe_filter("job/+", lambda data, *_, at=at: got.append((at, data)), once=True)
    cluster.settle()
    for text in (b"1", b"2", b"3"):
        cluster.publish(0, b"job/x", text)
    assert [text for _, text in got] == [b"1", b"2", b"3"]
    assert len({at for at, _ in got}) == 1


def test_messages_keep_what_mqtt_adds() -> None:
    cluster = MqttCluster()
    one, other = cluster.hubs
    device, ear = other.client("reader")
    other.subscribe(device, "a/#", Options(2, retain_as_published=True))
    cluster.settle()
    for text in (b"unknown topic", b"known topic"):
        topic = one.devices.topic_for(b"a/b")
        assert topic is not None
        frame = smq.publish_frame(topic.id, 7, 0, text)
        batch = mqtt_batch(frame, 2, True, b"\x03\0\4text", one.now_s + 60)
        destination(one.broker, topic.id, 7, one.broker.server).deliver(batch)
        cluster.settle()
    assert [got[1:4] for got in ear.got] == [(b"unknown topic", 2, True), (b"known topic", 2, True)]
    messages = list(device.in_flight.values())
    assert [(one.properties, one.expires_s) for one in messages if one] == [(b"\x03\0\4text", 60.0)] * 2


def test_qos_0_stays_qos_0() -> None:
    cluster = MqttCluster()
    _, ear = cluster.hubs[1].client("reader", "a", qos=1)
    cluster.settle()
    cluster.publish(0, b"a", b"0", qos=0)
    cluster.publish(0, b"a", b"1", qos=1)
    assert [(payload, qos) for _, payload, qos, *_ in ear.got] == [(b"0", 0), (b"1", 1)]


@pytest.mark.parametrize("size", [smq.MAX_PAYLOAD_BYTES - 10, 70_000, 300_000])
def test_large_messages_reach_mqtt_clients_of_other_nodes(size: int) -> None:
    cluster = MqttCluster()
    one, other = cluster.hubs
    _, ear = other.client("reader", "a/#", qos=1)
    cluster.settle()
    payload = bytes(range(250)) * (size // 250)
    for _ in range(2):
        topic = one.devices.topic_for(b"a/b")
        assert topic is not None
        if size <= smq.MAX_PAYLOAD_BYTES:
            cluster.publish(0, b"a/b", payload, qos=1)
            continue
        batch = mqtt_batch(smq.publish_frame(topic.id, 7, 0, b""), 1)
        batch.large = payload
        large_messages.publish(one.devices, topic, batch, one.broker.server)
        cluster.settle()
    assert ear.take() == [payload, payload]
    assert not any(one.broker.stats.drops.values())


def test_nodes_of_the_last_release_get_plain_messages() -> None:
    cluster = MqttCluster(3, versions={2: OLD})
    one, other, old = cluster.hubs
    assert [cluster.link(0, 1).version, cluster.link(0, 2).version] == [4, 1]
    _, ear = other.client("new", "a/+", qos=1)
    _, old_ear = old.client("old", "a/b", qos=1)
    cluster.settle()
    cluster.publish(0, b"a/b", b"x", qos=0)
    cluster.publish(2, b"a/b", b"y", qos=0)
    assert [(got[1], got[2]) for got in ear.got] == [(b"x", 0), (b"y", 1)]
    assert [(got[1], got[2]) for got in old_ear.got] == [(b"x", 1), (b"y", 0)]
    topic = one.devices.topic_for(b"a/b")
    assert topic is not None
    batch = mqtt_batch(smq.publish_frame(topic.id, 7, 0, b""), 1)
    batch.large = b"l" * 70_000
    large_messages.publish(one.devices, topic, batch, one.broker.server)
    cluster.settle()
    assert one.broker.stats.drops[Drop.TOO_LARGE] == 1, "the older node misses it"
    assert ear.take()[-1] == batch.large


def test_a_node_with_too_many_filters_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mqtt_nodes, "MAX_FILTERS", 3)
    cluster = MqttCluster()
    _, ear = cluster.hubs[1].client("reader", *(f"a/{number}/+" for number in range(5)))
    cluster.settle()
    cluster.publish(0, b"a/4/x", b"beyond the limit")
    assert ear.take() == [b"beyond the limit"]


def test_the_limit_of_names_holds_for_topics_of_other_nodes() -> None:
    cluster = MqttCluster()
    one, other = cluster.hubs
    _, ear = other.client("reader", "a/#")
    cluster.settle()
    other.broker.limits = HubLimits(names=1)
    cluster.publish(0, b"a/1", b"1")
    cluster.publish(0, b"a/2", b"2")
    assert ear.take() == [b"1"]
    assert other.broker.stats.drops[Drop.UNROUTED] == 1


def test_links_without_filters_carry_plain_frames() -> None:
    cluster = MqttCluster()
    one, other = cluster.hubs
    one.broker.devices = other.broker.devices = None
    reader, writer = other.crowd.client(b"reader"), one.crowd.client(b"writer")
    smq_subscribe(reader, b"plain")
    cluster.settle()
    topic = one.broker.topic_table.named(b"plain")
    (node,) = cluster.members[0].remotes
    route = cluster.members[0].forwarded(None, topic, topic.id, writer.etid)
    assert isinstance(route, ForwardedRoute)
    assert route._puts == (node.send_queue.put,), "batches are passed on without another call"
    writer.publish(smq.publish_frame(topic.id, writer.etid, 0, b"x"))
    cluster.settle()
    assert heard(reader)[-1].endswith(b"x")


# ---- shared subscriptions


def test_a_shared_subscription_gets_each_message_once_in_the_cluster() -> None:
    cluster = MqttCluster(3)
    ears = [cluster.hubs[at].client(f"worker-{at}", "$share/g/job/+")[1] for at in (1, 2)]
    cluster.settle()
    for number in range(10):
        cluster.publish(0, b"job/x", b"%d" % number)
    got = [[int(one) for one in ear.take()] for ear in ears]
    assert sorted(got[0] + got[1]) == list(range(10))
    assert min(map(len, got)) >= 4, "the nodes take turns"


def test_a_local_client_of_the_group_comes_first() -> None:
    cluster = MqttCluster()
    _, near = cluster.hubs[0].client("near", "$share/g/job/+")
    _, far = cluster.hubs[1].client("far", "$share/g/job/+")
    cluster.settle()
    for at, text in ((0, b"at 0"), (1, b"at 1"), (0, b"at 0 again")):
        cluster.publish(at, b"job/x", text)
    assert (near.take(), far.take()) == ([b"at 0", b"at 0 again"], [b"at 1"])


def test_no_offline_client_gets_messages_while_one_is_connected_anywhere() -> None:
    cluster = MqttCluster(3)
    near, _ = cluster.hubs[0].client("near", "$share/g/job", qos=1)
    far, _ = cluster.hubs[2].client("far", "$share/g/job", qos=1)
    for at, device in ((0, near), (2, far)):
        cluster.hubs[at].devices.left(device)
    _, ear = cluster.hubs[1].client("connected", "$share/g/job", qos=1)
    cluster.settle()
    for at in range(3):
        cluster.publish(at, b"job", b"at %d" % at, qos=1)
    assert ear.take() == [b"at 0", b"at 1", b"at 2"]
    assert not near.waiting
    assert not far.waiting


def test_a_client_of_a_group_that_is_back_gets_the_messages() -> None:
    cluster = MqttCluster()
    near, _ = cluster.hubs[0].client("near", "$share/g/job", qos=1)
    far, ear = cluster.hubs[1].client("far", "$share/g/job", qos=1)
    for hub, device in zip(cluster.hubs, (near, far), strict=True):
        hub.devices.left(device)
    cluster.settle()
    cluster.publish(0, b"job", b"both are away", qos=1)
    assert len(near.waiting) == 1
    far.resume(ear)
    cluster.settle()
    cluster.publish(0, b"job", b"one is back", qos=1)
    assert ear.take() == [b"one is back"]


def test_without_a_connected_client_one_session_keeps_the_message() -> None:
    cluster = MqttCluster(3)
    devices = []
    for at in (1, 2):
        device, _ = cluster.hubs[at].client(f"c{at}", "$share/g/job", qos=1)
        cluster.hubs[at].devices.left(device)
        devices.append(device)
    cluster.settle()
    for at in range(3):
        cluster.publish(at, b"job", b"at %d" % at, qos=1)
    waiting = [message.payload for device in devices for message in device.waiting]
    assert sorted(waiting) == [b"at 0", b"at 1", b"at 2"]


def test_a_client_of_a_group_that_ends_leaves_the_others() -> None:
    cluster = MqttCluster()
    device, _ = cluster.hubs[1].client("c", "$share/g/job/+")
    cluster.settle()
    assert cluster.publish(0, b"job/1", b"x")
    cluster.hubs[1].devices.unsubscribe(device, "$share/g/job/+")
    cluster.settle()
    assert len(cluster.members[0].mqtt.filters) == 0
    assert not cluster.publish(0, b"job/2", b"x")


def test_other_subscribers_of_the_topic_are_not_affected_by_groups() -> None:
    cluster = MqttCluster()
    _, shared = cluster.hubs[1].client("shared", "$share/g/a/#", qos=1)
    _, plain = cluster.hubs[1].client("plain", "a/+", qos=1)
    reader = cluster.hubs[1].crowd.client(b"reader")
    smq_subscribe(reader, b"a/b")
    cluster.settle()
    writer = cluster.hubs[0].crowd.client(b"writer")
    topic = cluster.hubs[0].broker.topic_table.named(b"a/b")
    for text in (b"1", b"2"):
        writer.publish(smq.publish_frame(topic.id, writer.etid, 0, text))
        cluster.settle()
    cluster.publish(0, b"a/b", b"3", qos=1)
    assert shared.take() == plain.take() == [b"1", b"2", b"3"]
    assert [frame[-1:] for frame in heard(reader) if frame[0] == smq.Type.PUBLISH] == [b"1", b"2", b"3"]


def test_shared_subscriptions_alone_are_no_interest_in_a_topic() -> None:
    """Otherwise each node with a client of the group would get each message, for nothing."""
    cluster = MqttCluster()
    one, other = cluster.hubs

    def is_wanted() -> bool:
        cluster.settle()
        topic = one.broker.topic_table.by_name[b"job/x"]
        state = cluster.members[0].state
        return bool(state.interest.nodes(state.key_of(topic)))

    _, shared = other.client("shared", "$share/g/job/+")
    cluster.settle()
    cluster.publish(0, b"job/x", b"1")
    assert not is_wanted()
    device, plain = other.client("plain", "job/+")
    assert is_wanted()
    cluster.publish(0, b"job/x", b"2")
    other.devices.unsubscribe(device, "job/+")
    assert not is_wanted()
    other.subscribe(device, "job/#", Options(0))  # another set of filters
    assert is_wanted()
    cluster.publish(0, b"job/x", b"3")
    other.devices.unsubscribe(device, "job/#")
    assert not is_wanted()
    reader = other.crowd.client(b"reader")
    smq_subscribe(reader, b"job/x")
    assert is_wanted()
    reader.control(smq.with_id(smq.Type.UNSUBSCRIBE, other.broker.topic_table.named(b"job/x").id))
    assert not is_wanted()
    cluster.publish(0, b"job/x", b"4")
    assert (shared.take(), plain.take()) == ([b"1", b"2", b"3", b"4"], [b"2", b"3"])


def test_nodes_of_the_last_release_get_interest_in_shared_subscriptions() -> None:
    cluster = MqttCluster(versions={0: OLD})
    _, shared = cluster.hubs[1].client("shared", "$share/g/job")
    cluster.settle()
    cluster.publish(0, b"job", b"1")
    assert shared.take() == [b"1"]


def test_messages_of_applications_keep_their_attributes() -> None:
    cluster = MqttCluster()
    one, other = cluster.hubs
    _, ear = other.client("reader", "house/#", qos=2)
    cluster.settle()
    packed = pack_properties({"unit": "C"}, PacketType.PUBLISH)
    one.broker.publish_mqtt(b"21", b"house/temp", PublishOptions(2, True, 60, {"unit": "C"}))
    cluster.settle()
    assert ear.take() == [b"21"]
    kept = other.devices.retained.by_name[b"house/temp"]
    assert (kept.payload, kept.qos, kept.properties, kept.expires_s) == (b"21", 2, packed, 60)
