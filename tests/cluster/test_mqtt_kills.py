"""Crashes of nodes with `persist`: QoS 1 loses nothing over links, and QoS 2 doubles nothing (help: cluster)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from smqrt.broker.outbox import Drop
from smqrt.wire.mqtt.fields import PacketType
from smqrt.wire.mqtt.packets import encode_acknowledgement
from tests.cluster.mqtt_hubs import Device, FileCluster


def waiting(cluster: FileCluster, at: int, client_id: str = "reader") -> list[bytes]:
    """The messages in a session of a node."""
    device = cluster.hubs[at].devices.sessions[client_id]
    return [one.payload for one in (*device.in_flight.values(), *device.waiting) if one is not None]


def connected(cluster: FileCluster, at: int, client_id: str) -> Device:
    """A client whose CONNACK has waited for the file."""
    device = Device(cluster, at, client_id)
    cluster.write(at)
    device.settle()
    return device


def with_reader(at: int = 1, wait_s: float = 0.0) -> FileCluster:
    """A cluster with a session without a connection, which is saved."""
    cluster = FileCluster(wait_s)
    Device(cluster, at, "reader", qos=2).subscribe("a").lost()
    cluster.write(at)
    return cluster


@pytest.mark.parametrize("qos", [1, 2])
def test_what_the_file_lacks_arrives_again_and_nothing_else(qos: int) -> None:
    cluster = with_reader()
    cluster.publish(0, b"a", b"1", qos=qos)
    cluster.write(0)
    cluster.write(1)
    cluster.publish(0, b"a", b"2", qos=qos)
    cluster.write(0)
    cluster.commit(1)  # the acknowledgement is not sent
    cluster.publish(0, b"a", b"3", qos=qos)
    cluster.write(0)
    assert waiting(cluster, 1) == [b"1", b"2", b"3"]
    cluster.kill(1)
    cluster.publish(0, b"a", b"4", qos=qos)
    cluster.write(0)
    cluster.start(1)
    assert waiting(cluster, 1) == [b"1", b"2", b"3", b"4"]
    cluster.write(1)
    assert cluster.members[0].streams.size_bytes == 0


def test_several_crashes_in_a_row_double_nothing() -> None:
    cluster = with_reader()
    for number in range(5):
        cluster.publish(0, b"a", b"%d" % number, qos=2)
        cluster.write(0)
        if number % 2:
            cluster.commit(1)
        cluster.kill(1)
        cluster.start(1)
    assert waiting(cluster, 1) == [b"%d" % number for number in range(5)]


def before_the_commit(cluster: FileCluster) -> None:
    cluster.settle()


def before_the_forwarding(cluster: FileCluster) -> None:
    cluster.commit(0)


def before_the_acknowledgement(cluster: FileCluster) -> None:
    cluster.commit(0)
    released = cluster.hubs[0].devices.ledger.released()
    next(released)
    cluster.settle()


@pytest.mark.parametrize("until", [before_the_commit, before_the_forwarding, before_the_acknowledgement])
@pytest.mark.parametrize("is_read_there", [False, True])
def test_a_publisher_whose_node_is_killed(until: Callable[[FileCluster], None], is_read_there: bool) -> None:
    cluster = with_reader()
    if is_read_there:
        Device(cluster, 0, "near", qos=2).subscribe("a").lost()
    publisher = Device(cluster, 0, "writer")
    cluster.write(0)
    publisher.publish("a", b"x", 7, 2)
    assert waiting(cluster, 1) == [], "it follows when its identifier is saved"
    until(cluster)
    assert publisher.acknowledged == []
    cluster.kill(0)
    cluster.start(0)
    again = Device(cluster, 0, "writer")
    assert again.is_kept
    again.publish("a", b"x", 7, 2, dup=True)
    cluster.write(0)
    again.settle()
    assert again.acknowledged == [7]
    assert waiting(cluster, 1) == [b"x"]
    if is_read_there:
        assert waiting(cluster, 0, "near") == [b"x"]


def test_a_publisher_that_connects_to_another_node_after_a_crash() -> None:
    cluster = with_reader(wait_s=5)
    publisher = Device(cluster, 0, "writer")
    cluster.write(0)
    publisher.publish("a", b"x", 7, 2)
    before_the_forwarding(cluster)
    cluster.kill(0)
    again = Device(cluster, 1, "writer")
    cluster.start(0)
    cluster.write(1)
    again.settle()
    assert again.is_kept
    for dup in (True, True):
        again.publish("a", b"x", 7, 2, dup)
    cluster.write(1)
    again.settle()
    assert again.acknowledged == [7, 7]
    assert waiting(cluster, 1) == [b"x"]


def test_connect_waits_for_a_node_that_was_killed() -> None:
    cluster = with_reader(wait_s=5)
    cluster.publish(0, b"a", b"before", qos=1)
    cluster.write(1)
    cluster.kill(1)
    cluster.publish(0, b"a", b"kept", qos=1)
    fresh = Device(cluster, 0, "fresh", clean=True)
    cluster.write(0)
    fresh.settle()
    assert fresh.is_kept is False, "a clean start does not wait"
    device = Device(cluster, 0, "reader")
    assert device.is_kept is None
    cluster.start(1)
    cluster.write(0)
    assert device.take() == [b"before", b"kept"]
    assert device.is_kept is True
    cluster.publish(1, b"a", b"after", qos=1)
    assert device.take() == [b"after"]


def test_connect_waits_for_a_bounded_time() -> None:
    cluster = with_reader(wait_s=5)
    cluster.kill(1)
    device = Device(cluster, 0, "reader")
    assert device.is_kept is None
    cluster.hubs[0].tick(6)
    cluster.write(0)
    device.settle()
    assert device.is_kept is False
    later = connected(cluster, 0, "later")
    assert later.is_kept is False, "the node has been lost for too long"


def test_a_session_that_a_killed_node_has_not_saved_stays_at_the_former_one() -> None:
    cluster = with_reader(1)
    cluster.publish(0, b"a", b"1", qos=2)
    cluster.write(0)
    cluster.write(1)
    device = Device(cluster, 0, "reader", qos=2)
    assert [one.payload for one in cluster.members[1].sessions._leaving["reader"].handed] == [b"1"]
    cluster.kill(0)
    assert device.is_kept is None
    cluster.start(0)
    again = Device(cluster, 0, "reader", qos=2)
    cluster.write(1)
    cluster.write(0)
    assert again.take() == [b"1"]
    assert again.is_kept
    cluster.hubs[1].tick(30)
    assert "reader" not in cluster.hubs[1].devices.sessions


def test_a_message_for_a_group_is_sent_before_pubrec() -> None:
    cluster = FileCluster()
    Device(cluster, 0, "near", qos=2).subscribe("$share/g/a").lost()
    Device(cluster, 1, "far", qos=2).subscribe("$share/g/a")
    publisher = Device(cluster, 0, "writer")
    cluster.write(0)
    cluster.write(1)
    publisher.publish("a", b"x", 7, 2)
    assert waiting(cluster, 1, "far") == [], "it follows when its identifier is saved"
    cluster.commit(0)
    released = cluster.hubs[0].devices.ledger.released()
    next(released)
    publisher.settle()
    assert waiting(cluster, 1, "far") == [b"x"]
    assert publisher.acknowledged == []
    next(released)
    publisher.settle()
    assert publisher.acknowledged == [7]


def test_a_packet_identifier_of_a_message_for_a_group_is_free_after_pubrel() -> None:
    cluster = FileCluster()
    Device(cluster, 0, "near", qos=2).subscribe("$share/g/a").lost()
    far = Device(cluster, 1, "far", qos=2).subscribe("$share/g/a")
    publisher = Device(cluster, 0, "writer")
    cluster.write(0)
    cluster.write(1)
    for text in (b"1", b"2"):
        publisher.publish("a", text, 7, 2)
        cluster.write(0)
        cluster.write(1)
        publisher.inner.feed(encode_acknowledgement(PacketType.PUBREL, 7, 5))
        cluster.write(0)
    assert far.take() == [b"1", b"2"]


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_client_that_has_not_seen_that_its_session_is_lost_is_told_again(is_answered: bool) -> None:
    cluster = with_reader(wait_s=5)
    cluster.kill(1)
    device = Device(cluster, 0, "reader")
    cluster.hubs[0].tick(6)
    if is_answered:
        cluster.write(0)
        device.settle()
        assert device.is_kept is False
    device.lost()
    cluster.write(0)
    again = connected(cluster, 0, "reader")
    assert again.is_kept is False
    again.subscribe("b").lost()
    kept = connected(cluster, 0, "reader")
    assert kept.is_kept


def test_a_session_without_anything_is_kept_at_other_times() -> None:
    cluster = with_reader(wait_s=5)
    Device(cluster, 0, "empty").lost()
    cluster.write(0)
    cluster.kill(1)
    for _ in range(2):
        kept = connected(cluster, 0, "empty")
        assert kept.is_kept
        kept.lost()
    cluster.start(1)
    moved = Device(cluster, 1, "empty")
    cluster.write(1)
    cluster.write(0)
    moved.settle()
    assert moved.is_kept


def test_a_session_without_anything_that_comes_from_a_lost_node_is_kept() -> None:
    cluster = with_reader(wait_s=5)
    Device(cluster, 1, "empty").lost()
    cluster.write(1)
    cluster.kill(1)
    waiting_device = Device(cluster, 0, "empty")
    cluster.start(1)
    cluster.write(0)
    waiting_device.settle()
    assert waiting_device.is_kept
    waiting_device.lost()
    cluster.write(0)
    again = connected(cluster, 0, "empty")
    assert again.is_kept


def test_a_reader_and_a_publisher_that_connect_to_another_node_after_a_crash() -> None:
    cluster = with_reader(wait_s=5)
    Device(cluster, 0, "moving", qos=2).subscribe("a").lost()
    publisher = Device(cluster, 0, "writer")
    cluster.write(0)
    publisher.publish("a", b"x", 7, 2)
    before_the_forwarding(cluster)
    cluster.kill(0)
    moving, again = Device(cluster, 1, "moving", qos=2), Device(cluster, 1, "writer")
    cluster.start(0)
    cluster.write(1)
    assert moving.take() == [b"x"]
    again.settle()
    assert again.is_kept
    again.publish("a", b"x", 7, 2, dup=True)
    cluster.write(1)
    cluster.write(0)
    assert moving.take() == [], "it was in the session that has moved"
    assert waiting(cluster, 1) == [b"x"]


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("has_other", [False, True], ids=["no subscriber here", "a subscriber here"])
def test_messages_that_are_published_before_the_links_are_back_reach_groups(qos: int, has_other: bool) -> None:
    cluster = FileCluster()
    for number in (1, 2):
        Device(cluster, 1, f"worker{number}", qos=2).subscribe(f"$share/g{number}/a").lost()
    if has_other:
        Device(cluster, 0, "other", qos=2).subscribe("a", "$share/g2/a").lost()
    publisher = Device(cluster, 0, "writer")
    cluster.write(0)
    cluster.write(1)
    cluster.kill(0)
    cluster.start(0, is_linked=False)
    publisher = connected(cluster, 0, "writer")
    publisher.publish("a", b"x", 7, qos)
    cluster.write(0)
    publisher.settle()
    assert publisher.acknowledged == [7]
    if qos == 2:
        publisher.inner.feed(encode_acknowledgement(PacketType.PUBREL, 7, 5))
        cluster.write(0)
    cluster.heal(0, 1)
    for at in (0, 1, 0):
        cluster.write(at)
    assert not cluster.hubs[0].devices.sessions["writer"].unreleased, "the identifier is free"
    assert waiting(cluster, 1, "worker1") == [b"x"]
    assert waiting(cluster, 1, "worker2") == ([] if has_other else [b"x"]), "its group has a client here"


def test_messages_that_wait_for_nodes_are_limited() -> None:
    cluster = FileCluster()
    Device(cluster, 1, "worker", qos=1).subscribe("$share/g/a").lost()
    cluster.write(0)
    cluster.write(1)
    cluster.kill(0)
    cluster.start(0, is_linked=False)
    cluster.members[0].streams.limit_bytes = 8 * 520 + 4
    for number in range(5):
        cluster.hubs[0].publish(b"a", b"%d" % number, qos=1)
    cluster.members[0].streams.limit_bytes = 1 << 20
    dropped = cluster.hubs[0].broker.stats.drops[Drop.LINK_LOST]
    cluster.heal(0, 1)
    for at in (0, 1, 0):
        cluster.write(at)
    assert waiting(cluster, 1, "worker") == [b"3", b"4"]
    assert dropped >= 3
