"""Rows of MQTT sessions in the persist file, the acknowledgements that wait for them, and wills after a crash."""

from __future__ import annotations

import json
from typing import Any

import pytest

from smqrt.broker.mqtt import ledger, publishing
from smqrt.broker.mqtt.filters import Options
from smqrt.broker.mqtt.messages import Message
from smqrt.broker.mqtt.records import session_record
from smqrt.errors import CloseReason
from smqrt.smq import mqtt_tables
from tests.broker.mqtt.memory_devices import MemoryDevice
from tests.smq.test_mqtt_crashes import World
from tests.support.mqtt_reference import packet

ACCEPTED = packet(0x20, b"\0\0")


class DurableWorld(World):
    """A server whose clients a test plays."""

    def write(self) -> None:
        """Let the disk do everything."""
        for _ in range(6):
            self.loop()
            self.disk()
        self.group = None

    def client(self, name: bytes, clean: bool = True, will: bytes = b"", version: int = 4) -> MemoryDevice:
        """A client that has got CONNACK."""
        device = self.connecting(name, clean, will, version)
        if device.session.is_unconfirmed:
            self.write()
        device.take()
        return device

    def connecting(self, name: bytes, clean: bool = True, will: bytes = b"", version: int = 4) -> MemoryDevice:
        """A client that has sent CONNECT."""
        device = self.hub.device()
        flags = 2 * clean | (0xC if will else 0)
        body = b"\0\4MQTT" + bytes((version, flags, 0, 0)) + len(name).to_bytes(2) + name
        if will:
            body += len(will).to_bytes(2) + will + b"\0\4gone"
        device.feed(packet(0x10, body))
        return device

    def sleeper(self, name: bytes, topic: bytes, qos: int) -> MemoryDevice:
        """A client whose session is kept, with a subscription that is saved."""
        device = self.client(name, clean=False)
        device.feed(packet(0x82, b"\0\1" + len(topic).to_bytes(2) + topic + bytes((qos,))))
        self.write()
        assert device.take() == packet(0x90, b"\0\1" + bytes((qos,)))
        return device

    def restart(self) -> None:
        """Crash, and start again."""
        self.loop()
        self.start()


def publish(topic: bytes, payload: bytes, number: int, first: int = 0x32) -> bytes:
    return packet(first, len(topic).to_bytes(2) + topic + number.to_bytes(2) + payload)


def test_connack_waits_for_a_new_session_that_is_kept() -> None:
    world = DurableWorld()
    client = world.connecting(b"s", clean=False)
    assert client.take() == b""
    client.lost()
    again = world.connecting(b"s", clean=False)  # the session of the first connection is not saved either
    assert again.take() == b""
    world.write()
    assert again.take() == packet(0x20, b"\1\0")
    world.restart()
    assert world.connecting(b"s", clean=False).take() == packet(0x20, b"\1\0")  # nothing has changed


def test_connack_waits_for_the_end_of_a_session_that_was_kept() -> None:
    world = DurableWorld()
    world.sleeper(b"s", b"t", 1).lost()
    world.write()
    for _ in range(2):  # the second one finds no session, but the file still has it
        client = world.connecting(b"s", clean=True)
        assert client.take() == b""
        client.lost()
    client = world.connecting(b"s", clean=True)
    world.write()
    assert client.take() == ACCEPTED
    world.restart()
    assert "s" not in world.hub.devices.sessions


def test_connack_waits_for_another_session_expiry_and_for_the_will_of_a_kept_session() -> None:
    world = DurableWorld()

    def connect(expiry_s: int, will: bytes = b"") -> MemoryDevice:
        device = world.hub.device()
        flags = 4 if will else 0
        device.feed(packet(0x10, b"\0\4MQTT\5" + bytes((flags, 0, 0, 5, 17)) + expiry_s.to_bytes(4) + b"\0\1s" + will))
        return device

    for expiry_s, will, is_held in ((60, b"", True), (60, b"", False), (90, b"", True), (90, b"\0\0\1w\0\1x", True)):
        device = connect(expiry_s, will)
        assert device.session.is_unconfirmed is is_held
        assert bool(device.take()) is not is_held
        world.write()
        assert not device.session.is_unconfirmed
        device.feed(packet(0xE0, b""))
        world.write()


@pytest.mark.parametrize("will", [b"", b"will"])
def test_connack_of_a_session_that_is_not_kept_does_not_wait(will: bytes) -> None:
    world = DurableWorld()
    for _ in range(2):
        client = world.connecting(b"s", will=will)
        assert client.take() == ACCEPTED
        client.lost()


def test_nothing_is_sent_before_connack() -> None:
    world = DurableWorld()
    world.sleeper(b"s", b"t", 1).lost()
    world.write()
    client = world.connecting(b"s", clean=False, will=b"will")
    world.client(b"p").feed(publish(b"t", b"x", 1))
    assert client.take() == b""
    world.write()
    assert client.take() == packet(0x20, b"\1\0") + publish(b"t", b"x", 1)


def test_a_client_that_leaves_before_connack_leaves_its_session_and_no_will() -> None:
    world = DurableWorld()
    watcher = world.client(b"w")
    watcher.feed(packet(0x82, b"\0\1\0\4will\0"))
    watcher.take()
    client = world.connecting(b"s", clean=False, will=b"will")
    client.lost()
    devices = world.hub.devices
    assert list(devices.offline) == [devices.sessions["s"]]
    world.write()
    assert client.take() == watcher.take() == b""


def test_a_session_that_is_deleted_before_connack() -> None:
    world = DurableWorld()
    client = world.connecting(b"s", clean=False)
    world.hub.devices.end(world.hub.devices.sessions["s"])
    world.write()
    assert client.take() == b""
    assert client.session.closed
    assert list(world.hub.left()) == []


def test_clients_are_refused_when_too_many_packets_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "MAX_TOTAL_HELD", 2)
    world = DurableWorld()
    waiting = [world.connecting(name, clean=False) for name in (b"a", b"b")]
    assert world.connecting(b"c", clean=False).take() == packet(0x20, b"\0\3")
    assert world.connecting(b"d").take() == ACCEPTED  # it needs no disk
    world.write()
    assert [one.take() for one in waiting] == [ACCEPTED, ACCEPTED]


@pytest.mark.parametrize(
    ("first", "body", "answer"), [(0x82, b"\0\1\0\1t\1", b"\x90\3\0\1\1"), (0xA2, b"\0\1\0\1t", b"\xb0\2\0\1")]
)
def test_suback_and_unsuback_wait_for_the_disk(first: int, body: bytes, answer: bytes) -> None:
    world = DurableWorld()
    client = world.client(b"s", clean=False)
    client.feed(packet(first, body))
    assert client.take() == b""
    world.write()
    assert client.take() == answer


def test_acknowledgements_do_not_wait_without_a_kept_session() -> None:
    world = DurableWorld()
    subscriber = world.client(b"s")
    subscriber.feed(packet(0x82, b"\0\1\0\1t\1"))
    assert subscriber.take() == packet(0x90, b"\0\1\1")
    publisher = world.client(b"p", clean=False)
    publisher.feed(publish(b"t", b"x", 1))
    publisher.feed(publish(b"t", b"y", 2, 0x34))
    assert publisher.take() == packet(0x40, b"\0\1") + packet(0x50, b"\0\2")
    assert len(subscriber.take()) == 2 * len(publish(b"t", b"x", 1))


def test_acknowledgements_wait_and_keep_their_order() -> None:
    world = DurableWorld()
    subscriber = world.sleeper(b"s", b"t", 1)
    publisher = world.client(b"p")
    publisher.feed(publish(b"t", b"x", 1))
    publisher.feed(publish(b"unknown", b"y", 2) + b"\xc0\0")
    assert publisher.take() == b"\xd0\0"  # PINGRESP goes between
    assert subscriber.take() == publish(b"t", b"x", 1)  # QoS 1 is sent at once
    world.write()
    assert publisher.take() == packet(0x40, b"\0\1") + packet(0x40, b"\0\2")


def test_a_retained_message_is_saved_before_its_acknowledgement() -> None:
    world = DurableWorld()
    publisher = world.client(b"p")
    publisher.feed(publish(b"lamp", b"on", 1, 0x33))
    assert publisher.take() == b""
    world.write()
    assert publisher.take() == packet(0x40, b"\0\1")
    world.restart()
    assert world.hub.devices.retained.by_name[b"lamp"].payload == b"on"


def test_qos_2_is_sent_when_its_identifier_is_saved() -> None:
    world = DurableWorld()
    subscriber = world.sleeper(b"s", b"t", 2)
    world.client(b"p").feed(publish(b"t", b"x", 1, 0x34))
    assert subscriber.take() == b""
    world.write()
    assert subscriber.take() == publish(b"t", b"x", 1, 0x34)
    subscriber.feed(packet(0x50, b"\0\1") * 2)
    assert subscriber.take() == b""
    world.write()
    assert subscriber.take() == packet(0x62, b"\0\1")
    world.restart()
    again = world.client(b"s", clean=False)
    world.write()
    assert again.ear.got == [packet(0x62, b"\0\1")] or world.hub.devices.sessions["s"].in_flight == {1: None}


def test_pubcomp_waits_also_for_a_repeated_pubrel() -> None:
    world = DurableWorld()
    world.sleeper(b"s", b"t", 2)
    publisher = world.client(b"p", clean=False)
    publisher.feed(publish(b"t", b"x", 1, 0x34))
    world.write()
    assert publisher.take() == packet(0x50, b"\0\1")
    publisher.feed(packet(0x62, b"\0\1"))
    publisher.lost()
    again = world.client(b"p", clean=False)
    again.feed(packet(0x62, b"\0\1"))
    assert again.take() == b""
    world.write()
    assert again.take() == packet(0x70, b"\0\1")
    again.feed(packet(0x62, b"\0\1"))
    assert again.take() == packet(0x70, b"\0\1")


def test_what_is_complete_before_the_commit_is_never_written() -> None:
    world = DurableWorld()
    subscriber = world.sleeper(b"s", b"t", 1)
    publisher = world.client(b"p")
    publisher.feed(publish(b"t", b"x", 1))
    assert subscriber.take()
    subscriber.feed(packet(0x40, b"\0\1"))
    changes = world.file.total_changes
    world.write()
    assert publisher.take() == packet(0x40, b"\0\1")
    assert world.file.total_changes == changes


def test_sessions_share_a_message_in_the_file_and_after_a_start() -> None:
    world = DurableWorld()
    for name in (b"a", b"b", b"c"):
        world.sleeper(name, b"t", 1).lost()
    world.client(b"p").feed(publish(b"t", b"x" * 1000, 1))
    world.write()
    counts = [
        world.file.execute(f"SELECT count(*) FROM {one}").fetchone()[0] for one in ("mqtt_messages", "mqtt_queue")
    ]
    assert counts == [1, 3]
    world.restart()
    sessions = world.hub.devices.sessions
    assert len({id(one.waiting[0]) for one in sessions.values()}) == 1
    for client_id in ("a", "b", "c"):
        world.hub.devices.end(sessions[client_id])
    world.write()
    assert not world.rows()


def test_messages_in_flight_are_sent_again_with_dup_in_order() -> None:
    world = DurableWorld()
    subscriber = world.sleeper(b"s", b"t", 1)
    publisher = world.client(b"p")
    for number in range(1, 7):  # the window is 4
        publisher.feed(publish(b"t", b"%d" % number, number))
    assert len(subscriber.take()) == 4 * len(publish(b"t", b"1", 1))
    world.write()
    world.restart()
    device = world.hub.device()
    device.feed(packet(0x10, b"\0\4MQTT\4\0\0\0\0\1s"))
    expected = packet(0x20, b"\1\0") + b"".join(publish(b"t", b"%d" % one, one, 0x3A) for one in range(1, 5))
    assert device.take() == expected
    device.feed(packet(0x40, b"\0\1"))
    assert device.take() == publish(b"t", b"5", 5)


def test_a_session_that_is_not_kept_any_more_leaves_the_file() -> None:
    world = DurableWorld()
    world.sleeper(b"s", b"t", 1).lost()
    world.client(b"p").feed(publish(b"t", b"x", 1))
    world.write()
    world.client(b"s", clean=True)
    world.write()
    assert not world.rows()
    assert not world.file.execute("SELECT * FROM mqtt_sessions").fetchall()


def test_the_limit_of_a_session_applies_after_a_start() -> None:
    world = DurableWorld()
    world.sleeper(b"s", b"t", 1).lost()
    publisher = world.client(b"p")
    for number in range(1, 6):
        publisher.feed(publish(b"t", b"%d" % number, number))
    world.write()
    world.queued_messages = 2
    world.restart()
    assert [one.payload for one in world.hub.devices.sessions["s"].waiting] == [b"4", b"5"]
    world.write()
    assert len(world.rows()) == 4


class OnlyA:
    """An identity that may read one topic."""

    @staticmethod
    def allows(name: bytes, action: object) -> bool:
        return name == b"a"


def messages_after_a_start(world: DurableWorld) -> list[bytes]:
    world.write()
    world.restart()
    return [one.payload for one in world.hub.devices.sessions["s"].waiting]


@pytest.mark.parametrize("is_sent_on", [False, True])
def test_messages_that_are_denied_leave_the_file(is_sent_on: bool) -> None:
    world = DurableWorld()
    world.sleeper(b"s", b"#", 1).lost()
    publisher = world.client(b"p")
    for number, name in enumerate((b"b", b"a", b"b", b"a"), 1):
        publisher.feed(publish(name, b"%d" % number, number))
    world.write()
    device: Any = world.hub.devices.sessions["s"]
    device.is_checked, device.identity = True, OnlyA
    device.drop_denied()
    if is_sent_on:  # the rows follow their messages
        assert [one.payload for one in device.take_waiting(1)] == [b"2"]
    assert messages_after_a_start(world) == ([b"4"] if is_sent_on else [b"2", b"4"])
    world.hub.devices.end(world.hub.devices.sessions["s"])
    world.write()
    assert not world.rows()


def test_messages_that_have_moved_to_another_node_leave_the_file() -> None:
    world = DurableWorld()
    world.sleeper(b"s", b"t", 1).lost()
    publisher = world.client(b"p")
    for number in range(1, 4):
        publisher.feed(publish(b"t", b"%d" % number, number))
    world.write()
    assert [one.payload for one in world.hub.devices.sessions["s"].take_waiting(1)] == [b"1"]
    assert messages_after_a_start(world) == [b"2", b"3"]


def test_many_acknowledgements_that_wait_stop_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "MAX_HELD", 4)
    world = DurableWorld()
    world.sleeper(b"s", b"t", 1)
    publisher = world.client(b"p")
    session = publisher.session
    body = publish(b"u", b"x", 1, 0x33)[2:]
    paused = [session.packet(0x33, body) for _ in range(4)]
    assert paused == [False, False, False, True]
    world.write()
    assert publisher.ear.resumes == 1
    assert publisher.take() == packet(0x40, b"\0\1") * 4


def test_the_identifiers_of_a_batch_are_in_the_group_of_its_messages() -> None:
    """Also when the delivery is interrupted and a group is taken then."""
    world = DurableWorld()
    for name in (b"a", b"b"):
        world.sleeper(name, b"t", 2).lost()
    publisher = world.client(b"p", clean=False)
    world.write()
    devices = world.hub.devices
    publisher.feed(publish(b"t", b"x", 1, 0x34))
    devices._unsent.extend(devices.queue)
    devices.queue = []
    devices._is_delivering = True
    steps = devices._deliver_all()
    for _ in steps:
        group = world.ledger.begin_group()
        for _ in world.ledger.fill(group, lambda device: {}):
            pass
        states = [row[3] for row in group.rows]
        assert states in ([], [ledger.RECEIVED, ledger.WAITING, ledger.WAITING])


@pytest.mark.parametrize("clean", [True, False])
def test_the_will_of_a_client_that_does_not_come_back_is_published(clean: bool) -> None:
    world = DurableWorld()
    world.sleeper(b"s", b"will", 1).lost()
    world.client(b"w", clean, will=b"will")
    world.client(b"back", clean, will=b"will")
    world.write()
    world.restart()
    world.client(b"back", clean)
    world.hub.at(29)
    sleeper = world.hub.devices.sessions["s"]
    assert not sleeper.waiting
    for now_s in (31, 41):
        world.hub.at(now_s)
    assert [one.payload for one in sleeper.waiting] == [b"gone"]
    world.write()
    world.restart()
    for now_s in (31, 41):
        world.hub.at(now_s)
    assert len(world.hub.devices.sessions["s"].waiting) == 1


@pytest.mark.parametrize("reason", [CloseReason.SHUTDOWN, CloseReason.RESTARTED])
def test_wills_are_not_published_after_a_stop(reason: CloseReason) -> None:
    world = DurableWorld()
    world.sleeper(b"s", b"will", 1).lost()
    client = world.client(b"w", True, will=b"will")
    world.write()
    client.session.disconnect(reason)
    world.write()
    count = int(reason is CloseReason.SHUTDOWN)  # then it is published before the end
    world.restart()
    world.hub.at(60)
    assert len(world.hub.devices.sessions["s"].waiting) == count


def test_a_delayed_will_survives_a_stop() -> None:
    world = DurableWorld()
    world.sleeper(b"s", b"will", 1).lost()
    device = world.hub.device()
    will = b"\5\x18\0\0\0\x28\0\4will\0\4gone"  # a delay of 40 s
    device.feed(packet(0x10, b"\0\4MQTT\5\x0e\0\0\5\x11\0\0\0\x64\0\1w" + will))
    world.write()
    device.lost()
    world.write()
    world.restart()
    sleeper = world.hub.devices.sessions["s"]
    for now_s in (10, 20, 30, 39):
        world.hub.at(now_s)
    assert not sleeper.waiting
    world.hub.at(41)
    assert len(sleeper.waiting) == 1


def test_the_former_layout_is_read() -> None:
    world = DurableWorld()
    devices = world.hub.devices
    world.sleeper(b"s", b"t", 2).lost()
    device: Any = devices.sessions["s"]
    device.enqueue(Message(b"t", b"waits", 1))
    old = former_record(device)
    world.ledger.detach()
    world.file.execute("DELETE FROM mqtt_queue")
    world.file.execute("DELETE FROM mqtt_messages")
    write_former(world, old)
    for _ in range(2):
        world.restart()
        found = world.hub.devices.sessions["s"]
        assert found.subscriptions == {"t": Options(2)}
        assert [one.payload for one in found.waiting] == [b"waits"]
        assert found.in_flight == {9: None}
        assert found.unreleased == {3}
        world.write()
    assert len(world.rows()) == 4


def former_record(device: Any) -> dict[str, Any]:
    return {**session_record(device), "in_flight": [[9, None]], "unreleased": [3]}


def write_former(world: World, record: dict[str, Any]) -> None:
    text = json.dumps(record, default=mqtt_tables._text_of)
    row = "s", text, mqtt_tables._checksum(b"s", text.encode())
    world.file.execute("INSERT OR REPLACE INTO mqtt_sessions VALUES (?, ?, ?)", row)


def test_rows_follow_waiting_messages_that_are_denied_or_move(monkeypatch: pytest.MonkeyPatch) -> None:
    world = DurableWorld()
    world.sleeper(b"s", b"#", 1).lost()
    publisher = world.client(b"p")
    for number in (1, 2, 3, 4):
        publisher.feed(publish(b"t%d" % number, b"x", number))
    world.write()
    device = world.hub.devices.sessions["s"]
    rows = device.rows
    assert rows is not None
    device.is_checked = True
    monkeypatch.setattr(type(device), "may_read", lambda self, name: name != b"t2")
    device.drop_denied()
    assert [row.message.name for row in rows.waiting if row.message] == [b"t1", b"t3", b"t4"]
    assert [one.name for one in device.take_waiting(1)] == [b"t1"]
    assert [row.message.name for row in rows.waiting if row.message] == [b"t3", b"t4"]
    world.write()
    world.restart()
    assert [one.name for one in world.hub.devices.sessions["s"].waiting] == [b"t3", b"t4"]


def test_acknowledgements_of_all_clients_that_wait_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that connects again and again while the disk fails would leave more and more of them."""
    monkeypatch.setattr(ledger, "MAX_TOTAL_HELD", 3)
    world = DurableWorld()
    world.sleeper(b"s", b"t", 1)
    paused = []
    for name in (b"p", b"q", b"r"):
        session = world.client(name).session
        for number in (1, 2):
            paused.append(session.packet(0x33, publish(b"t", b"x", number)[2:]))
            world.loop()
    assert paused == [False, False, False, True, True, True]
    world.write()
    assert not world.hub.devices.ledger.held
    assert not session.is_held_back
