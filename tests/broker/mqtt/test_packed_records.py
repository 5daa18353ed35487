"""All sessions and retained messages of a hub as one record of few objects."""

from __future__ import annotations

import json

from smqrt.broker.mqtt.messages import NO_EXPIRY_S, Message
from smqrt.broker.mqtt.packed_records import SESSIONS_PER_TEXT, packed_messages, packed_record, restore_packed
from smqrt.broker.mqtt.packed_records import unpacked_messages as unpacked
from smqrt.broker.mqtt.records import Record, message_record, record_of
from smqrt.broker.mqtt.wills import Will
from tests.broker.mqtt.hub import MqttHub

MESSAGES = [
    Message(b"a", b"", 0, False),
    Message("ä/b".encode(), bytes(range(256)) * 300, 2, True, b"\x03\x00\x01x", 1234.5, b"\x0b\x07"),
    Message(b"c" * 65535, b"x", 1, True, b"", NO_EXPIRY_S),
]


def objects_in(value: object) -> int:
    """The number of objects that JSON and references have to describe."""
    if isinstance(value, dict):
        return sum(map(objects_in, value.values()))
    return sum(map(objects_in, value)) if isinstance(value, list) else 1


def moved(hub: MqttHub) -> tuple[MqttHub, Record]:
    """The hub of another process, and the record that it got."""
    record, other = packed_record(hub.devices), MqttHub()
    restore_packed(other.devices, record)
    return other, record


def test_messages_are_restored() -> None:
    found = unpacked(packed_messages(MESSAGES))
    assert [message_record(one) for one in found] == [message_record(one) for one in MESSAGES]
    assert unpacked(b"") == []


def test_sessions_and_retained_messages_are_restored() -> None:
    hub = MqttHub()
    device, receiver = hub.client("device", "t", "$share/g/u/#", qos=2)
    hub.publish(b"t", b"0", b"1", qos=2)
    device.received(receiver.numbers[0])
    device.expect_releases((77,))
    hub.devices.left(device)
    hub.devices.wills.delay(device, Will(Message(b"will", b"offline", 1, True), 10, NO_EXPIRY_S), hub.now_s + 10)
    hub.publish(b"t", b"2", qos=2, retain=True)
    hub.publish(b"expiring", b"3", retain=True)
    hub.devices.retained.by_name[b"expiring"].expires_s = hub.now_s + 5
    hub.client("connected", "t")
    other, _ = moved(hub)
    assert record_of(other.devices) == record_of(hub.devices)
    assert sorted(other.retained("#")) == [(b"expiring", b"3"), (b"t", b"2")]
    assert list(other.devices.sessions) == ["device"], "connected clients have records of their own"
    _, second = other.client("device", clean=False)
    assert second.take() == [b"1", b"2"]
    assert second.released == [receiver.numbers[0]]


def test_sessions_share_their_messages_and_need_few_objects() -> None:
    hub, count = MqttHub(), 50
    devices = [hub.client(f"d{at}", "t", qos=1)[0] for at in range(count)]
    for one in devices:
        hub.devices.left(one)
    hub.publish(b"t", b"x" * 60_000, qos=1)
    for at in range(count):
        hub.devices.retained.set(Message(b"r/%d" % at, b"y", 1, True))
    other, record = moved(hub)
    assert len(record["messages"]) < 70_000, "the payload is sent once"
    assert len({id(other.devices.sessions[f"d{at}"].waiting[0]) for at in range(count)}) == 1
    assert objects_in(record) < 20


def test_records_of_sessions_are_in_several_texts() -> None:
    hub = MqttHub()
    for at in range(SESSIONS_PER_TEXT + 1):
        device, _ = hub.devices.open(f"d{at}", clean=False)
        device.expiry_s = 60
        hub.devices.left(device)
    other, record = moved(hub)
    assert [len(json.loads(one)) for one in record["sessions"]] == [SESSIONS_PER_TEXT, 1]
    assert other.devices.sessions.keys() == hub.devices.sessions.keys()
