"""Rows of messages that several sessions send: their bytes, their order and the memory that is counted."""

from __future__ import annotations

from smqrt.broker.mqtt.device import WRITE_BYTES
from smqrt.broker.mqtt.messages import Message
from smqrt.broker.mqtt.shared_rows import MAX_ROWS, SharedRows
from smqrt.settings.limits import MqttSettings
from smqrt.wire.mqtt.fields import PacketType
from tests.broker.memory_clients import settle
from tests.broker.mqtt.memory_devices import DeviceHub, MemoryDevice
from tests.conformance.mqtt_script import data_of


def message(payload: bytes, expires_s: float = float("inf")) -> Message:
    return Message(b"t", payload, 1, expires_s=expires_s)


def connected(hub: DeviceHub, name: str, version: int = 5, topic: str = "") -> MemoryDevice:
    device = hub.device()
    device.feed(data_of(f"C {name}", version))
    if topic:
        device.feed(data_of(f"82: 00 01 P '{topic}' 01", version))
    device.take()
    return device


def begun(hub: DeviceHub) -> MemoryDevice:
    """A publisher whose next messages to `t` are one batch."""
    sender = connected(hub, "sender")
    publish(hub, sender, "0")
    return sender


def acknowledge(*devices: MemoryDevice) -> None:
    """Acknowledge all messages in flight in a row, as a connection does."""
    for one in devices:
        assert one.session.device is not None
        one.session.device.acknowledged_row(list(one.session.device.in_flight), PacketType.PUBACK)


def publish(hub: DeviceHub, sender: MemoryDevice, *texts: str, fields: str = "P") -> None:
    """Publish to `t` with QoS 1, as one batch."""
    sender.feed(data_of(" / ".join(f"32: 't' 00 {at:02x} {fields} ~{text}" for at, text in enumerate(texts, 1)), 5))
    sender.take()


def test_sessions_that_wait_for_the_same_messages_send_the_same_bytes() -> None:
    hub = DeviceHub(limits=MqttSettings(receive_maximum=2))
    sender = begun(hub)
    readers = [connected(hub, name, topic="t") for name in ("first", "second")]
    old = connected(hub, "old", 4, topic="t")
    publish(hub, sender, "1", "22", "3", "4", "5")
    expected = ("00 01 P ~1 / 32: 't' 00 02 P ~22", "00 03 P ~3 / 32: 't' 00 04 P ~4", "00 05 P ~5")
    for row in expected:
        sent = [one.ear.got[-1] for one in readers]
        assert sent == [data_of(f"32: 't' {row}", 5)] * 2
        assert sent[0] is sent[1]
        assert old.ear.got[-1] == data_of(f"32: 't' {row}", 4), "another version"
        acknowledge(*readers, old)
    assert hub.devices.waiting_bytes == 0
    assert [len(one.session.device.in_flight) for one in readers if one.session.device] == [0, 0]


def test_a_session_with_other_packet_identifiers_sends_its_own_bytes() -> None:
    hub = DeviceHub(limits=MqttSettings(receive_maximum=2))
    sender = connected(hub, "sender")
    early = connected(hub, "early", topic="t")
    publish(hub, sender, "0")
    early.feed(data_of("40: 00 01", 5))
    late = connected(hub, "late", topic="t")
    publish(hub, sender, "1", "2", "3")
    assert early.take().endswith(data_of("32: 't' 00 02 P ~1 / 32: 't' 00 03 P ~2", 5))
    assert late.take() == data_of("32: 't' 00 01 P ~1 / 32: 't' 00 02 P ~2", 5)
    early.feed(data_of("40: 00 02 / 40: 00 03", 5))
    late.feed(data_of("40: 00 02 / 40: 00 01", 5))
    assert (early.take(), late.take()) == (data_of("32: 't' 00 04 P ~3", 5), data_of("32: 't' 00 03 P ~3", 5))


def test_a_message_that_expires_has_the_time_that_is_left() -> None:
    hub = DeviceHub(limits=MqttSettings(receive_maximum=1))
    sender = connected(hub, "sender")
    readers = [connected(hub, name, topic="t") for name in ("first", "second")]
    publish(hub, sender, "1")
    publish(hub, sender, "2", fields="{ 02 00 00 00 09 }")
    for at, reader in enumerate(readers, 1):
        hub.at(at * 2.0)
        reader.take()
        reader.feed(data_of("40: 00 01", 5))
        assert reader.take() == data_of(f"32: 't' 00 02 {{ 02 00 00 00 {9 - 2 * at:02x} }} ~2", 5)


def test_long_rows_are_cut_and_shared() -> None:
    hub = DeviceHub(limits=MqttSettings(receive_maximum=20))
    sender = begun(hub)
    readers = [connected(hub, name, topic="t") for name in ("first", "second")]
    publish(hub, sender, *(str(at) for at in range(20)))
    publish(hub, sender, *("x" * (WRITE_BYTES >> 2) for _ in range(10)))
    settle()
    acknowledge(*readers)
    rows = [[len(row) for row in one.ear.got if len(row) > WRITE_BYTES >> 2] for one in readers]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 3, "4, 4 and 2 messages"
    assert readers[0].ear.got[-1] is readers[1].ear.got[-1]
    assert hub.devices.waiting_bytes == 0
    acknowledge(*readers)
    assert [len(one.ear.got) for one in readers] == [len(readers[0].ear.got)] * 2


def test_few_rows_are_remembered_for_a_second() -> None:
    hub, rows = DeviceHub(), SharedRows()
    messages = [message(b"%d" % at) for at in range(MAX_ROWS + 1)]
    for one in messages[:-1]:
        rows.encode([one], 5, 1)
    assert rows.find([messages[0]], 5, 1)
    assert not rows.find([messages[0]], 4, 1)
    assert not rows.find([messages[0]], 5, 2)
    assert not rows.find(messages[:2], 5, 1)
    rows.encode([messages[-1]], 5, 1)
    assert not rows.find([messages[0]], 5, 1)
    assert rows.encode([message(b"x", 5.0)], 5, 1) is None
    assert rows.encode([message(b"x" * 70_000)], 5, 1) is None
    hub.devices.shared_rows.encode(messages, 5, 1)
    hub.at(1.1)
    assert not hub.devices.shared_rows.find(messages, 5, 1)
