"""Retained messages over nodes: the newest wins, also when nodes were apart, and what was deleted stays deleted."""

from __future__ import annotations

from random import Random

import pytest

from smqrt.broker.mqtt.filters import Options
from smqrt.broker.mqtt.messages import Message
from smqrt.cluster import mqtt_retained
from smqrt.settings.limits import MqttSettings
from tests.cluster.mqtt_hubs import MqttCluster


def retain(cluster: MqttCluster, at: int, name: bytes, payload: bytes, qos: int = 1, expires_s: float = 1e9) -> None:
    expires_s = float("inf") if expires_s == 1e9 else expires_s
    cluster.hubs[at].devices.retain(Message(name, payload, qos, True, b"", expires_s))
    cluster.settle()


def kept(cluster: MqttCluster, at: int) -> dict[bytes, bytes]:
    """What a new subscriber of `#` gets."""
    return dict(cluster.hubs[at].retained("#"))


def test_retained_messages_are_set_and_deleted_at_all_nodes() -> None:
    cluster = MqttCluster(3)
    retain(cluster, 0, b"a", b"1")
    retain(cluster, 1, b"b", bytes(300_000))
    assert [kept(cluster, at) for at in range(3)] == [{b"a": b"1", b"b": bytes(300_000)}] * 3
    retain(cluster, 2, b"a", b"2")
    retain(cluster, 0, b"a", b"0")
    retain(cluster, 0, b"b", b"")
    assert [kept(cluster, at) for at in range(3)] == [{b"a": b"0"}] * 3


def test_subscribers_get_retained_messages_of_other_nodes_with_their_qos_and_expiry() -> None:
    cluster = MqttCluster()
    retain(cluster, 0, b"a/b", b"x", qos=2, expires_s=50.0)
    one = cluster.hubs[1]
    (message,) = [found for found in one.devices.retained.matching("a/+", Options(2)) if found is not None]
    assert (message.payload, message.qos, message.expires_s) == (b"x", 2, 50.0)


def test_a_node_that_joins_gets_them() -> None:
    cluster = MqttCluster()
    cluster.cut(0, 1)
    for number in range(500):
        retain(cluster, 0, b"t/%d" % number, b"%d" % number)
    assert kept(cluster, 1) == {}
    cluster.heal(0, 1)
    assert kept(cluster, 1) == kept(cluster, 0)
    assert len(kept(cluster, 1)) == 500


def test_after_a_partition_the_newest_wins() -> None:
    cluster = MqttCluster()
    for name in (b"old at 1", b"deleted at 0", b"deleted, then set"):
        retain(cluster, 0, name, b"before")
    cluster.cut(0, 1)
    retain(cluster, 1, b"old at 1", b"older")
    retain(cluster, 0, b"old at 1", b"newer")  # the clock is that of all hubs in the test, and stands still
    retain(cluster, 0, b"old at 1", b"newest")
    retain(cluster, 0, b"deleted at 0", b"")
    retain(cluster, 0, b"deleted, then set", b"")
    retain(cluster, 1, b"deleted, then set", b"1")
    retain(cluster, 1, b"deleted, then set", b"2")
    cluster.heal(0, 1)
    due = {b"old at 1": b"newest", b"deleted, then set": b"2"}
    assert [kept(cluster, 0), kept(cluster, 1)] == [due, due]


def test_messages_without_a_time_lose() -> None:
    """Those of a file, after a start."""
    cluster = MqttCluster()
    cluster.cut(0, 1)
    cluster.hubs[0].devices.retained.set(Message(b"a", b"of the file", 1, True))
    cluster.hubs[0].devices.retained.set(Message(b"only here", b"of the file", 1, True))
    retain(cluster, 1, b"a", b"known")
    cluster.heal(0, 1)
    due = {b"a": b"known", b"only here": b"of the file"}
    assert [kept(cluster, 0), kept(cluster, 1)] == [due, due]


def test_deletions_are_forgotten_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mqtt_retained, "MAX_DELETED", 3)
    cluster = MqttCluster()
    for number in range(10):
        retain(cluster, 0, b"%d" % number, b"x")
        retain(cluster, 0, b"%d" % number, b"")
    sync = cluster.members[0].retained
    assert list(sync._deleted) == [b"7", b"8", b"9"]
    assert set(sync._stamps) == set(sync._deleted)
    cluster.hubs[0].now_s += mqtt_retained.DELETED_S + 1
    retain(cluster, 0, b"new", b"x")
    retain(cluster, 0, b"new", b"y")
    assert set(sync._stamps) == {b"new"}


def test_the_limits_of_each_node_hold() -> None:
    cluster = MqttCluster(settings=MqttSettings(retained=2))
    cluster.cut(0, 1)
    retain(cluster, 0, b"1", b"x")
    for name in (b"2", b"3"):
        retain(cluster, 1, name, b"x")
    cluster.heal(0, 1)
    assert kept(cluster, 0) == {b"1": b"x", b"2": b"x"}
    assert kept(cluster, 1) == {b"2": b"x", b"3": b"x"}


def test_nodes_of_the_last_release_are_left_alone() -> None:
    cluster = MqttCluster(versions={1: (1, 1)})
    retain(cluster, 0, b"a", b"x")
    assert kept(cluster, 1) == {}
    assert len(cluster.nodes[1].links) == 1


@pytest.mark.parametrize("seed", range(20))
def test_all_nodes_have_the_same_messages_after_any_faults(seed: int) -> None:
    chance = Random(seed)
    cluster = MqttCluster(3)
    pairs = [(0, 1), (0, 2), (1, 2)]
    apart: set[tuple[int, int]] = set()
    for number in range(60):
        pair = chance.choice(pairs)
        if chance.random() < 0.15:
            if pair in apart:
                apart.discard(pair)
                cluster.heal(*pair)
            else:
                apart.add(pair)
                cluster.cut(*pair)
        name, payload = chance.choice((b"a", b"b", b"c")), b"%d" % number if chance.random() < 0.7 else b""
        cluster.hubs[chance.randrange(3)].devices.retain(Message(name, payload, 1, True))
        if chance.random() < 0.7:
            cluster.settle()
    for pair in apart:
        cluster.heal(*pair)
    cluster.settle()
    found = [kept(cluster, at) for at in range(3)]
    assert found[0] == found[1] == found[2]
