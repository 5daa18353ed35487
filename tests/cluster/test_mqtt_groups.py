"""Messages to shared subscriptions whose clients leave a node while the messages are on the way (help: mqtt-hub)."""

from __future__ import annotations

import pytest

from smqrt.broker.mqtt.arrivals import AGAIN, CHOSEN
from smqrt.broker.mqtt.messages import Message, mqtt_batch
from smqrt.broker.outbox import Drop
from smqrt.broker.routes import destination
from smqrt.broker.topics import HubLimits
from smqrt.cluster import mqtt_sessions, mqtt_streams
from smqrt.cluster.mqtt_sessions import SessionMoves
from smqrt.errors import ProtocolError
from smqrt.wire import cluster_mqtt
from smqrt.wire.cluster_mqtt import Numbered, WireMessages
from smqrt.wire.mqtt.packets import ConnectPacket, encode
from smqrt.wire.smq import publish_frame
from tests.broker.mqtt.hub import MqttHub
from tests.broker.mqtt.memory_devices import MemoryDevice
from tests.cluster.mqtt_hubs import KEPT, Device, FileCluster, MqttCluster
from tests.cluster.test_mqtt_kills import waiting

GROUP = "$share/g/job/+"


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
    cluster.hubs[0].tick(0.6)  # the publisher's node may get the messages back before it knows of the other client
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
    for _ in range(6):
        cluster.hubs[0].tick(0.6)
    cluster.settle()
    assert sum(hub.broker.stats.drops[Drop.UNROUTED] for hub in cluster.hubs) == 2


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
    else:
        assert got == [b"x"]


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


# ---- sessions that move


@pytest.mark.parametrize("at", [0, 2])
def test_an_older_session_gives_its_messages_of_the_group_to_the_younger_one(at: int) -> None:
    cluster = MqttCluster(4)
    older, _ = cluster.hubs[at].client("worker", GROUP, "job/1", qos=2, clean=False)
    older.expiry_s = 3600
    cluster.hubs[at].devices.left(older)
    cluster.settle()
    cluster.publish(3, b"job/1", b"x", qos=2)
    for hub in cluster.hubs:
        hub.tick(5)
    younger, _ = cluster.hubs[1].client("worker", GROUP, "job/1", qos=2, clean=False)
    younger.expiry_s = 3600
    cluster.hubs[1].devices.left(younger)
    cluster.settle()
    cluster.publish(3, b"job/1", b"y", qos=2)
    worker = Device(cluster, 2, "worker", qos=2)
    got = worker.take()
    assert got.count(b"x") == 1, "not that of the other filter, which was there before the younger one"
    assert b"y" in got
    assert [list(hub.devices.sessions) for hub in cluster.hubs] == [[], [], ["worker"], []]


def test_a_session_that_stays_gets_the_messages_of_the_group_of_an_older_one() -> None:
    cluster = MqttCluster(2)
    older, _ = cluster.hubs[0].client("worker", GROUP, qos=2, clean=False)
    older.expiry_s = 3600
    cluster.hubs[0].devices.left(older)
    cluster.settle()
    cluster.publish(1, b"job/1", b"x", qos=2)
    for hub in cluster.hubs:
        hub.tick(5)
    own, _ = cluster.hubs[1].client("worker", GROUP, qos=2, clean=False)
    own.expiry_s = 3600
    cluster.hubs[1].devices.left(own)
    worker = Device(cluster, 1, "worker", qos=2)
    assert worker.take() == [b"x"]
    assert not cluster.hubs[0].devices.sessions


def test_a_session_that_was_handed_over_leaves_its_groups_until_its_client_is_back() -> None:
    cluster = MqttCluster(2)
    cluster.members[0].sessions.transit_s = 1.0
    Device(cluster, 0, "worker", qos=1).subscribe(GROUP).lost()
    moved = Device(cluster, 1, "worker", qos=1)
    device = cluster.hubs[0].devices.sessions["worker"]
    assert not device.subscriptions
    cluster.publish(0, b"job/1", b"1", qos=1)
    assert moved.take() == [b"1"]
    cluster.cut(0, 1)
    back = Device(cluster, 0, "worker", qos=1)
    assert list(device.subscriptions) == [GROUP]
    cluster.publish(0, b"job/1", b"2", qos=1)
    assert back.take() == [b"2"]


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("is_saved", [False, True])
def test_messages_that_follow_a_session_survive_a_crash_of_its_new_node(
    qos: int, is_saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mqtt_sessions, "PORTION_BYTES", 1)
    cluster = FileCluster()
    Device(cluster, 1, "reader", qos=2).subscribe("a").lost()
    cluster.write(1)
    texts = [b"%d" % number for number in range(5)] + [bytes(70_000)]
    for text in texts:
        cluster.hubs[1].devices.sessions["reader"].enqueue(Message(b"a", text, qos, True, b"", 1e9, b"\x0b\7"))
    cluster.write(1)
    Device(cluster, 0, "reader", qos=2).lost()
    cluster.commit(0)
    for _ in cluster.hubs[0].devices.ledger.released():
        pass
    cluster.settle()
    assert waiting(cluster, 0) == texts
    if is_saved:
        cluster.commit(0)
    cluster.kill(0)
    cluster.start(0)
    cluster.write(1)
    cluster.write(0)
    assert waiting(cluster, 0) == texts
    assert cluster.members[1].streams.size_bytes == 0
    followed = cluster.hubs[0].devices.sessions["reader"].waiting[-1]
    assert (followed.retain, followed.expires_s, followed.identifiers) == (True, 1e9, b"\x0b\7")


def test_a_node_of_the_last_release_gets_the_messages_of_a_session_without_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mqtt_sessions, "PORTION_BYTES", 1)
    cluster = MqttCluster(versions={0: (1, 3)})
    Device(cluster, 1, "reader", qos=2).subscribe("a").lost()
    for number in range(5):
        cluster.publish(1, b"a", b"%d" % number, qos=2)
    again = Device(cluster, 0, "reader", qos=2)
    assert again.take() == [b"%d" % number for number in range(5)]


def test_a_long_queue_follows_at_the_pace_of_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mqtt_sessions, "PORTION_BYTES", 1)
    monkeypatch.setattr(mqtt_streams, "WINDOW_BYTES", 2000)
    cluster = MqttCluster()
    Device(cluster, 1, "reader", qos=1).subscribe("a").lost()
    for number in range(100):
        cluster.publish(1, b"a", b"%d" % number, qos=1)
    cluster.members[1].streams.limit_bytes = 10_000  # of more, the oldest messages would be dropped
    moved = Device(cluster, 0, "reader")
    for _ in range(100):
        cluster.hubs[1].tick(0.2)
        cluster.settle()
    device = moved.inner.session.device
    assert len(device.in_flight) + len(device.waiting) == 100


def test_a_message_for_one_session_is_not_known_to_the_node() -> None:
    """Others there still need it, if its publisher sends it again."""
    cluster = MqttCluster()
    Device(cluster, 1, "reader", qos=2).subscribe("a")
    session = b'{"id": "reader", "identifiers": ""}'
    messages = WireMessages(b"a", b"", publish_frame(1, 2, 0, b"x"), True, 2, session=session)
    member = cluster.members[1]
    member.mqtt.on_numbered(member.remotes[0], cluster_mqtt.numbered(Numbered(9, 1, 1 << 62 | 5, messages))[2:])
    assert not cluster.hubs[1].devices.arrivals.knows(1 << 62 | 5)


@pytest.mark.parametrize(
    ("session", "qos"),
    [
        *((one, 1) for one in (b"x", b"{}", b"[]", b'{"id": 1, "identifiers": "x"}', b'{"id": [], "identifiers": ""}')),
        (b'{"id": "reader", "identifiers": ""}', 0),
    ],
)
def test_a_malformed_session_of_another_node_ends_the_link(session: bytes, qos: int) -> None:
    cluster = MqttCluster()
    member = cluster.members[1]
    messages = WireMessages(b"a", b"", publish_frame(1, 2, 0, b"x"), True, qos, session=session)
    with pytest.raises(ProtocolError, match="a session of another node is malformed"):
        member.mqtt.on_numbered(member.remotes[0], cluster_mqtt.numbered(Numbered(9, 1, 0, messages))[2:])


def moved_while_cut() -> tuple[MqttCluster, Device]:
    """A session that has moved from node 1 to node 2, while node 1 has lost node 0 a second time."""
    cluster = MqttCluster(3)
    Device(cluster, 1, "reader", qos=2).subscribe("a")
    cluster.settle()
    cluster.members[1].sessions.transit_s = 1.0
    cluster.cut(0, 1)
    reader = Device(cluster, 2, "reader", qos=2)
    assert reader.is_kept
    cluster.hubs[1].tick(2)
    cluster.heal(0, 1)
    cluster.cut(0, 1)
    cluster.heal(0, 1)
    assert "reader" in cluster.hubs[1].devices.sessions
    return cluster, reader


def test_ids_are_remembered_as_long_as_the_former_node_gets_messages() -> None:
    cluster, reader = moved_while_cut()
    for _ in range(4):  # the clock of the other node stands still
        cluster.hubs[2].tick(11)
    cluster.publish(0, b"a", b"x", qos=2)
    assert reader.take() == [b"x"]
    cluster.hubs[1].tick(0.5)
    cluster.settle()
    assert reader.take() == []
    cluster.hubs[1].tick(2)
    cluster.settle()
    assert "reader" not in cluster.hubs[1].devices.sessions
    cluster.hubs[2].tick(11)
    assert cluster.hubs[2].devices.sessions["reader"].origins is None


def test_the_former_node_ends_a_session_soon_when_the_lost_node_is_back() -> None:
    cluster, reader = moved_while_cut()
    cluster.hubs[1].tick(1.5)
    cluster.settle()
    assert "reader" not in cluster.hubs[1].devices.sessions
    cluster.publish(0, b"a", b"x", qos=2)
    assert reader.take() == [b"x"]


def test_a_session_that_was_handed_over_is_older_than_that_of_the_new_node() -> None:
    """The client has given up before it was connected there."""
    cluster = MqttCluster(2)
    cluster.members[0].sessions.transit_s = 60.0
    Device(cluster, 0, "worker", qos=1).subscribe("a").lost()
    cluster.publish(0, b"a", b"1", qos=1)
    gone = MemoryDevice(cluster.hubs[1])  # type: ignore[arg-type]
    gone.feed(encode(ConnectPacket(5, "worker", False, 0, KEPT), 5))
    cluster.network.settle(lambda: bool(cluster.members[0].sessions._leaving))
    gone.lost()
    cluster.settle()
    assert "worker" in cluster.members[0].sessions._leaving
    cluster.publish(0, b"a", b"2", qos=1)
    assert sorted(Device(cluster, 0, "worker", qos=1).take()) == [b"1", b"2"]


# ---- groups that come and leave between the publication and the delivery


def publish_only(hub: MqttHub, payload: bytes, qos: int) -> None:
    """Publish a message that is not delivered yet."""
    topic = hub.broker.topic_table.named(b"job/1")
    batch = mqtt_batch(publish_frame(topic.id, 7, 0, payload), qos)
    destination(hub.broker, topic.id, 7, hub.broker.server).deliver(batch)


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_group_that_begins_before_the_delivery_gets_a_message_once(qos: int) -> None:
    cluster = MqttCluster()
    cluster.hubs[0].client("plain", "job/1")
    _, far = cluster.hubs[1].client("far", GROUP, qos=qos)
    cluster.settle()
    publish_only(cluster.hubs[0], b"1", qos)
    _, near = cluster.hubs[0].client("near", GROUP, qos=qos)
    cluster.settle()
    assert near.take() + far.take() == [b"1"]


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_group_that_ends_before_the_delivery_does_not_lose_a_message(qos: int) -> None:
    cluster = MqttCluster()
    cluster.hubs[0].client("plain", "job/1")
    near, ear = cluster.hubs[0].client("near", GROUP, qos=qos)
    _, far = cluster.hubs[1].client("far", GROUP, qos=qos)
    cluster.settle()
    publish_only(cluster.hubs[0], b"1", qos)
    cluster.hubs[0].devices.unsubscribe(near, GROUP)
    cluster.settle()
    assert ear.take() + far.take() == [b"1"]


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_message_does_not_circle_when_a_node_may_create_no_topics(qos: int) -> None:
    cluster = MqttCluster()
    _, ear = cluster.hubs[1].client("worker", "$share/g/#", qos=qos)
    cluster.settle()
    cluster.hubs[1].broker.limits = HubLimits(names=0)
    cluster.publish(0, b"job/1", b"x", qos=qos)
    assert ear.take() == []
    assert cluster.hubs[1].broker.stats.drops[Drop.UNROUTED] == 1


def test_messages_are_returned_again_when_the_link_was_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = MqttCluster(3)
    leaving, _ = cluster.hubs[1].client("leaving", GROUP, qos=1)
    staying, _ = cluster.hubs[2].client("staying", GROUP, qos=1)
    cluster.hubs[2].devices.left(staying)
    cluster.settle()
    to_publisher = next(one for one in cluster.members[1].remotes if one.number == 1).send_queue
    send = type(to_publisher).send
    with monkeypatch.context() as lost:
        lost.setattr(
            type(to_publisher), "send", lambda self, batches: None if self is to_publisher else send(self, batches)
        )
        cluster.hubs[0].publish(b"job/1", b"1", qos=1)
        cluster.hubs[1].devices.unsubscribe(leaving, GROUP)
        cluster.settle()
    assert not staying.waiting
    cluster.cut(0, 1)
    cluster.heal(0, 1)
    cluster.hubs[0].tick(3)
    cluster.settle()
    assert [one.payload for one in staying.waiting] == [b"1"]


def test_a_clean_start_forgets_that_a_session_was_handed_over() -> None:
    cluster = MqttCluster(2)
    cluster.members[0].sessions.transit_s = 60.0
    Device(cluster, 0, "worker", qos=1).subscribe(GROUP).lost()
    Device(cluster, 1, "worker", qos=1)
    assert "worker" in cluster.members[0].sessions._leaving
    fresh = Device(cluster, 0, "worker", clean=True).subscribe("a")
    assert not cluster.members[0].sessions._leaving
    fresh.lost()
    moved = Device(cluster, 1, "worker", qos=1)
    assert moved.is_kept
    cluster.publish(0, b"a", b"1", qos=1)
    assert moved.take() == [b"1"]


def test_a_message_without_an_id_is_not_doubled_when_a_hand_over_is_not_confirmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = MqttCluster()
    Device(cluster, 0, "reader", qos=2).subscribe("a").lost()
    cluster.publish(0, b"a", b"x", qos=2)
    assert cluster.hubs[0].devices.sessions["reader"].waiting[0].origin == 0
    send = SessionMoves._send
    monkeypatch.setattr(
        SessionMoves, "_send", lambda self, node, kind, **fields: kind != "done" and send(self, node, kind, **fields)
    )
    reader = Device(cluster, 1, "reader", qos=2)
    assert reader.is_kept
    cluster.cut(0, 1)
    cluster.heal(0, 1)
    assert reader.take() == [b"x"]
    assert "reader" not in cluster.hubs[0].devices.sessions
