"""Shared subscriptions of other nodes: many of one topic get their messages in portions."""

from __future__ import annotations

import time

import pytest

from smqrt.broker.mqtt.messages import mqtt_batch
from smqrt.broker.outbox import flush_dirty
from smqrt.broker.routes import destination
from smqrt.cluster import mqtt_filters
from smqrt.wire import smq
from smqrt.wire.cluster_mqtt import Wanted
from tests.cluster.mqtt_hubs import Device, FileCluster, MqttCluster
from tests.support.garbage import no_collections

LEVELS = "abcdefghijklmno"
NAME = "/".join(LEVELS).encode()
MANY = 74


def deliver(cluster: MqttCluster, payload: bytes, qos: int) -> None:
    """Publish at the first node, without the end of the turn."""
    hub = cluster.hubs[0]
    topic = hub.devices.topic_for(NAME)
    assert topic is not None
    batch = mqtt_batch(smq.publish_frame(topic.id, 7, 0, payload), qos)
    destination(hub.broker, topic.id, 7, hub.broker.server).deliver(batch)


@pytest.mark.parametrize(("qos", "has_wildcards"), [(0, False), (1, True)])
def test_many_groups_of_a_topic_do_not_hold_the_loop(qos: int, has_wildcards: bool) -> None:
    cluster = MqttCluster()
    member = cluster.members[0]
    for number in range(20_000):
        levels = ["+" if number >> at & 1 and has_wildcards else level for at, level in enumerate(LEVELS)]
        member.mqtt.filters.set(f"$share/g{number}/{'/'.join(levels)}", Wanted.CONNECTED, member.remotes[0].bit)
    steps = []
    cluster.hubs[0].broker.clock = time.thread_time
    with no_collections():
        for payload in (b"1", b"2"):
            begun_s = time.thread_time()
            deliver(cluster, payload, qos)
            steps.append(time.thread_time() - begun_s)
        is_left = True
        while is_left:
            begun_s = time.thread_time()
            is_left = flush_dirty(time.thread_time)
            steps.append(time.thread_time() - begun_s)
    assert len(steps) > 10
    assert max(steps) < 0.05
    sent = sum(chunk.count(b"$share") for pipe in cluster.network.pipes for chunk in pipe.chunks)
    if qos:  # at most 4 MiB of a stream are on the way
        sent += len(member.remotes[0].stream._waiting)
    assert sent == 40_000


def test_each_of_many_groups_gets_the_messages_in_order() -> None:
    cluster = MqttCluster()
    ears = [cluster.hubs[1].client(f"c{number}", f"$share/g{number}/a/+", qos=1)[1] for number in range(MANY)]
    _, near = cluster.hubs[0].client("near", "$share/g0/a/+", qos=1)
    cluster.settle()
    for number in range(3):
        cluster.publish(0, b"a/b", b"%d" % number, qos=number % 2)
    assert near.take() == [b"0", b"1", b"2"], "the group has a client here"
    assert [ear.take() for ear in ears] == [[]] + [[b"0", b"1", b"2"]] * (MANY - 1)
    device = cluster.hubs[1].devices.sessions["c1"]
    cluster.hubs[1].devices.unsubscribe(device, "$share/g1/a/+")
    _, late = cluster.hubs[1].client("late", "$share/late/a/+", qos=1)
    cluster.settle()
    cluster.publish(0, b"a/b", b"3", qos=1)
    assert late.take() == [b"3"]
    assert [ear.take() for ear in ears] == [[], []] + [[b"3"]] * (MANY - 2)


def test_messages_for_many_groups_of_a_lost_node_are_kept() -> None:
    cluster = MqttCluster()
    ears = [cluster.hubs[1].client(f"c{number}", f"$share/g{number}/a", qos=1)[1] for number in range(MANY)]
    cluster.settle()
    cluster.cut(0, 1)
    cluster.publish(0, b"a", b"1", qos=1)
    cluster.heal(0, 1)
    assert [ear.take() for ear in ears] == [[b"1"]] * MANY


@pytest.mark.parametrize("count", [1, MANY])
def test_messages_with_qos_2_follow_the_commit(count: int) -> None:
    cluster = FileCluster()
    ears = [cluster.hubs[1].client(f"c{number}", f"$share/g{number}/a", qos=2)[1] for number in range(count)]
    cluster.write(1)
    cluster.settle()
    publisher = Device(cluster, 0, "publisher")
    cluster.write(0)
    publisher.publish("a", b"1", 1, qos=2)
    assert [ear.take() for ear in ears] == [[]] * count, "its packet identifier is not saved"
    for _ in range(2):
        cluster.write(0)
        cluster.write(1)
    assert [ear.take() for ear in ears] == [[b"1"]] * count
    publisher.settle()
    assert publisher.acknowledged == [1]
    assert cluster.hubs[0].devices.sessions["publisher"].unreleased == {1}


def test_the_groups_of_few_topics_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mqtt_filters, "MAX_KNOWN_GROUPS", 2 * MANY)
    cluster = MqttCluster()
    for number in range(MANY):
        cluster.hubs[1].client(f"c{number}", f"$share/g{number}/a/+")
    cluster.settle()
    known = cluster.members[0].mqtt.filters._known
    for number in range(4):
        cluster.publish(0, b"a/%d" % number, b"x")
    assert list(known) == [b"a/2", b"a/3"]
    cluster.publish(0, b"a/3", b"x")
    assert list(known) == [b"a/2", b"a/3"]


def test_names_of_topics_are_not_remembered_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = MqttCluster()
    cluster.hubs[1].client("plain", "#")
    cluster.settle()
    filters = cluster.members[0].mqtt.filters
    assert not filters.has_groups(b"a")
    assert not filters._known, "there are no shared subscriptions"
    cluster.hubs[1].client("shared", "$share/g/b")
    cluster.settle()
    monkeypatch.setattr(mqtt_filters, "MAX_KNOWN_GROUPS", 2500)
    for number in range(10):
        assert not filters.has_groups(b"%d" % number + b"x" * 50_000)
    assert len(filters._known) <= 3
