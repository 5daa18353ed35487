"""Messages to shared subscriptions whose clients leave a node while the messages are on the way (help: mqtt-hub)."""

from __future__ import annotations

import pytest

from smqrt.broker.mqtt.arrivals import AGAIN, CHOSEN
from smqrt.broker.mqtt.messages import Message
from smqrt.broker.outbox import Drop
from tests.cluster.mqtt_hubs import Device, FileCluster, MqttCluster
from tests.cluster.test_mqtt_kills import waiting

GROUP = "$share/g/job/+"


def payloads(cluster: MqttCluster, at: int, client_id: str) -> list[bytes]:
    device = cluster.hubs[at].devices.sessions[client_id]
    return [one.payload for one in (*device.in_flight.values(), *device.waiting) if one is not None]


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("is_known", [False, True], ids=["no other filter", "another filter of the topic"])
def test_messages_that_arrive_when_the_client_has_left_go_to_another_node(qos: int, is_known: bool) -> None:
    cluster = MqttCluster(3)
    leaving, _ = cluster.hubs[1].client("leaving", GROUP, qos=qos)
    if is_known:
        cluster.hubs[1].client("other", "job/#", qos=qos)
    cluster.settle()
    cluster.hubs[0].publish(b"job/1", b"1", b"2", qos=qos)
    cluster.hubs[1].devices.unsubscribe(leaving, GROUP)
    _, ear = cluster.hubs[2].client("staying", GROUP, qos=qos)
    cluster.settle()
    assert ear.take() == [b"1", b"2"]
    assert cluster.hubs[1].broker.stats.drops[Drop.UNROUTED] == 0


def test_messages_for_a_group_that_nobody_has_are_counted() -> None:
    cluster = MqttCluster(3)
    leaving, _ = cluster.hubs[1].client("leaving", GROUP, qos=1)
    cluster.settle()
    cluster.hubs[0].publish(b"job/1", b"1", b"2", qos=1)
    cluster.hubs[1].devices.unsubscribe(leaving, GROUP)
    cluster.settle()
    assert cluster.hubs[1].broker.stats.drops[Drop.UNROUTED] == 2


@pytest.mark.parametrize("qos", [1, 2])
def test_messages_that_were_kept_for_a_group_follow_its_client(qos: int) -> None:
    """The messages arrive at a node whose client has moved while the publisher's node had lost it."""
    cluster = MqttCluster(3)
    Device(cluster, 1, "worker", qos=qos).subscribe(GROUP).lost()
    cluster.cut(0, 1)
    cluster.publish(0, b"job/1", b"kept", qos=qos)
    worker = Device(cluster, 2, "worker", qos=qos)
    assert worker.is_kept
    cluster.hubs[1].tick(60)  # its session has ended there
    cluster.settle()
    assert "worker" in cluster.hubs[2].devices.sessions
    cluster.heal(0, 1)
    assert worker.take() == [b"kept"]


def test_a_client_elsewhere_is_preferred_to_a_session_without_a_connection() -> None:
    cluster = MqttCluster(3)
    sleeping, _ = cluster.hubs[1].client("sleeping", GROUP, qos=1)
    cluster.settle()
    cluster.hubs[0].publish(b"job/1", b"1", qos=1)
    cluster.hubs[1].devices.left(sleeping)
    _, ear = cluster.hubs[2].client("awake", GROUP, qos=1)
    cluster.settle()
    assert ear.take() == [b"1"]
    assert not sleeping.waiting


def test_nodes_whose_clients_leave_together_do_not_send_messages_to_and_fro() -> None:
    cluster = MqttCluster(3)
    members = [(at, cluster.hubs[at].client(f"c{at}", GROUP, qos=1)[0]) for at in (1, 2)]
    cluster.settle()
    for number in range(4):
        cluster.hubs[0].publish(b"job/1", b"%d" % number, qos=1)
    for at, device in members:
        cluster.hubs[at].devices.left(device)
    cluster.settle()
    kept = [one.payload for _, device in members for one in (*device.in_flight.values(), *device.waiting) if one]
    assert sorted(kept) == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("step", ["before the commit", "after it", "all is done"])
def test_a_node_that_is_killed_while_it_sends_messages_on(qos: int, step: str) -> None:
    cluster = FileCluster()
    Device(cluster, 0, "near", qos=2).subscribe(GROUP).lost()
    leaving = Device(cluster, 1, "far", qos=2).subscribe(GROUP)
    cluster.write(0)
    cluster.write(1)
    cluster.hubs[0].publish(b"job/1", b"x", qos=qos)
    cluster.commit(0)
    for _ in cluster.hubs[0].devices.ledger.released():
        pass
    cluster.hubs[1].devices.end(leaving.inner.session.device)
    cluster.settle()
    if step == "after it":
        cluster.commit(1)
    elif step == "all is done":
        cluster.write(1)
    cluster.kill(1)
    cluster.start(1)
    cluster.write(0)
    got = waiting(cluster, 0, "near")
    if step == "before the commit":  # of the end of the session, too
        got += waiting(cluster, 1, "far")
        assert got in ([[b"x"], [b"x", b"x"]] if qos == 1 else [[b"x"]])
    else:  # the gap of QoS 2, which must not be doubled
        assert got == ([] if qos == 2 and step == "after it" else [b"x"])


def test_ids_of_messages_to_one_client_are_in_no_range() -> None:
    cluster = MqttCluster()
    Device(cluster, 1, "worker", qos=2).subscribe(GROUP).lost()
    Device(cluster, 1, "reader", qos=2).subscribe("job/#").lost()
    cluster.publish(0, b"job/1", b"1", b"2", b"3", qos=2)
    sessions = cluster.hubs[1].devices.sessions
    chosen = [one.origin for one in sessions["worker"].waiting]
    others = [one.origin for one in sessions["reader"].waiting]
    assert [one ^ CHOSEN for one in chosen] == others
    assert not any(one & (CHOSEN | AGAIN) for one in others)


def test_a_session_that_two_nodes_have_gets_each_message_once() -> None:
    """A node was killed while it handed a session over, and is back with it."""
    cluster = MqttCluster(3)
    Device(cluster, 1, "worker", qos=2).subscribe(GROUP, "job/1").lost()
    for text in (b"1", b"2"):
        cluster.publish(0, b"job/1", text, qos=2)
    before = list(cluster.hubs[1].devices.sessions["worker"].waiting)
    worker = Device(cluster, 2, "worker", qos=2)
    assert sorted(worker.take()) == [b"1", b"1", b"2", b"2"]
    other = Message(b"job/1", b"only there", 2)
    other.origin = before[0].origin + 1000 | CHOSEN
    member = cluster.members[1]
    record = member.sessions._left([*before, other])
    member.sessions._send(
        next(one for one in member.remotes if one.number == 3),
        "late", id="worker", messages=record, is_other=True, user=None,
    )  # fmt: skip
    assert worker.take() == [b"only there"]
