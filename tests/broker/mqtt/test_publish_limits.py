"""MQTT clients above the limits of publishing, at each QoS."""

from __future__ import annotations

import pytest

from smqrt.broker import client_limits
from smqrt.broker.outbox import Drop
from smqrt.broker.topics import PublishLimits
from smqrt.errors import CloseReason
from tests.broker.mqtt.memory_devices import DeviceHub, MemoryDevice
from tests.conformance.mqtt_script import data_of

LARGE = 70_000
"""Bytes of a payload that does not fit a packet of SMQ."""


def limited_hub(policy: str, per_s: float | None = 2.0, bytes_per_s: float | None = None) -> DeviceHub:
    hub = DeviceHub()
    hub.broker.publish_limits = PublishLimits(per_s, bytes_per_s, 1.0, policy)
    return hub


def connected(hub: DeviceHub, name: str = "a", version: int = 5) -> MemoryDevice:
    device = hub.device()
    device.feed(data_of(f"C {name}", version))
    assert device.take()[0] == 0x20
    return device


def subscribed(hub: DeviceHub, qos: int) -> MemoryDevice:
    device = connected(hub, "reader")
    device.feed(data_of(f"82: 00 01 P 't' {qos:02x}", 5))
    device.take()
    return device


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("size", [1, LARGE])
@pytest.mark.parametrize("topic", ["t", "nobody"])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_too_much_is_dropped_and_counted(qos: int, topic: str, size: int, version: int) -> None:
    """Also messages that nobody gets: they may be retained."""
    hub = limited_hub("drop")
    subscribed(hub, 0)
    sender = connected(hub, version=version)
    packets = "".join(
        f" / 3{2 * qos}: '{topic}' {f'00 0{number}' if qos else ''} P 78*{size}" for number in range(1, 6)
    )
    before = client_limits.PUBLISH_RATE.count
    sender.feed(data_of(packets.removeprefix(" / "), version))
    passed, dropped = {"t": "", "nobody": "10"}[topic], "97"
    if version == 4:
        passed = dropped = ""
    answers = [f"{0x30 + 0x10 * qos:x}: 00 0{number} {passed if number < 3 else dropped}" for number in range(1, 6)]
    assert sender.take() == (data_of(" / ".join(answers), version) if qos else b"")
    assert hub.broker.stats.drops[Drop.OVER_RATE] == client_limits.PUBLISH_RATE.count - before == 3
    assert hub.broker.stats.drops[Drop.UNROUTED] == (2 if topic == "nobody" else 0)


def test_a_retained_message_above_the_rate_is_not_kept() -> None:
    hub = limited_hub("drop", 1.0)
    sender = connected(hub)
    sender.feed(data_of("33: 't' 00 01 P ~1 / 33: 't' 00 02 P ~2", 5))
    assert sender.take() == data_of("40: 00 01 10 / 40: 00 02 97", 5)
    assert hub.devices.retained.by_name[b"t"].payload == b"1"


@pytest.mark.parametrize("size", [1, LARGE])
def test_messages_wait_with_their_qos_and_properties(size: int) -> None:
    hub = limited_hub("wait", 1.0)
    reader, sender = subscribed(hub, 2), connected(hub)
    sender.feed(data_of("34: 't' 00 01 { 0100 } ~1", 5))
    assert sender.take() == data_of("50: 00 01", 5)
    assert reader.take() == data_of("34: 't' 00 01 { 0100 } ~1", 5)
    sender._splitter.feed(data_of(f"34: 't' 00 02 {{ 0101 }} 78*{size}", 5))
    packet = sender._splitter.next()
    assert packet is not None
    assert sender.session.packet(*packet), "the client has to wait"
    assert (sender.take(), reader.take(), sender.ear.resumes) == (b"", b"", 0)
    hub.at(1.1)
    assert sender.ear.resumes == 1
    assert not sender.session.continue_packets()
    assert sender.take() == data_of("50: 00 02", 5)
    assert reader.take() == data_of(f"34: 't' 00 02 {{ 0101 }} 78*{size}", 5)


def test_bytes_of_a_large_message_count() -> None:
    hub = limited_hub("drop", None, 10_000.0)
    subscribed(hub, 0)
    sender = connected(hub)
    sender.feed(data_of(f"32: 't' 00 01 P 78*{LARGE} / 32: 't' 00 02 P ~x", 5))
    assert sender.take() == data_of("40: 00 01 97 / 40: 00 02 97", 5)
    hub.at(30.0)
    sender.feed(data_of("32: 't' 00 03 P ~x", 5))
    assert sender.take() == data_of("40: 00 03", 5)


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_too_much_disconnects(qos: int) -> None:
    hub = limited_hub("disconnect", 1.0)
    subscribed(hub, 0)
    sender = connected(hub)
    number = "00 01" if qos else ""
    sender.feed(data_of(f"3{2 * qos}: 't' {number} P ~1 / 3{2 * qos}: 't' {number.replace('1', '2')} P ~2", 5))
    assert sender.session.closed
    assert data_of("e0: 96", 5)[2:3] in sender.take()[-20:], "message rate too high"
    assert hub.broker.stats.ends[CloseReason.PUBLISH_RATE] == 1


def test_a_message_above_its_size_disconnects() -> None:
    hub = DeviceHub()
    hub.broker.publish_limits = PublishLimits(message_bytes=100)
    subscribed(hub, 0)
    for size in (101, LARGE):
        sender = connected(hub)
        sender.feed(data_of(f"32: 't' 00 01 P 78*{size}", 5))
        assert sender.session.closed
    assert hub.broker.stats.ends[CloseReason.MESSAGE_TOO_LARGE] == 2
