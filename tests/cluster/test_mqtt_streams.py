"""Messages with QoS 1 and 2 over links that break: nothing is lost, and nothing arrives twice (help: cluster)."""

from __future__ import annotations

import pytest

from smqrt.broker.outbox import Drop
from tests.cluster.mqtt_hubs import MqttCluster


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
