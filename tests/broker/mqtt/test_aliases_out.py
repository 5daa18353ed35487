"""Topic aliases of messages from the hub to MQTT 5 clients."""

from __future__ import annotations

import pytest

from smqrt.settings.limits import MqttSettings
from tests.broker.mqtt.memory_devices import DeviceHub, MemoryDevice
from tests.conformance.mqtt_script import data_of

LONG, OTHER, SHORT = "house/kitchen/temperature", "house/bathroom/temperature", "house/kitchen/temp"


def connected(hub: DeviceHub, name: str, properties: str = "", qos: int = 1, version: int = 5) -> MemoryDevice:
    """A client that subscribes to everything."""
    device = hub.device()
    block = f"{{ {properties} }}" if version == 5 else ""
    device.feed(data_of(f"10: M V 02 00 00 {block} '{name}' / 82: 00 01 P '#' 0{qos}", version))
    device.take()
    return device


def sender_of(hub: DeviceHub) -> MemoryDevice:
    device = hub.device()
    device.feed(data_of("C sender", 5))
    return device


@pytest.mark.parametrize("qos", [1, 2])
def test_the_first_message_introduces_the_alias(qos: int) -> None:
    hub = DeviceHub()
    device, plain = connected(hub, "a", "22 00 05", qos), connected(hub, "plain", "", qos)
    sender = sender_of(hub)
    first = f"3{2 * qos}"
    for number in (1, 2):
        sender.feed(data_of(f"{first}: '{LONG}' 00 0{number} {{ 01 01 }} ~x", 5))
        assert plain.take() == data_of(f"{first}: '{LONG}' 00 0{number} {{ 01 01 }} ~x", 5)
        name = f"'{LONG}'" if number == 1 else "00 00"
        assert device.take() == data_of(f"{first}: {name} 00 0{number} {{ 01 01 23 00 01 }} ~x", 5)
    sender.feed(data_of(f"{first}: '{OTHER}' 00 03 P ~x / {first}: '{SHORT}' 00 04 P ~x", 5))
    assert device.take() == data_of(f"{first}: '{OTHER}' 00 03 {{ 23 00 02 }} ~x / {first}: '{SHORT}' 00 04 P ~x", 5)


def test_a_row_of_messages() -> None:
    hub = DeviceHub()
    device, sender = connected(hub, "a", "22 00 05"), sender_of(hub)
    sender.feed(data_of(" / ".join(f"32: '{LONG}' 00 0{number} P ~x" for number in range(1, 5)), 5))
    expected = [f"32: '{LONG}' 00 01 {{ 23 00 01 }} ~x", *(f"32: 00 00 00 0{n} {{ 23 00 01 }} ~x" for n in (2, 3, 4))]
    assert device.take() == data_of(" / ".join(expected), 5)


def test_qos_0_uses_an_alias_but_does_not_introduce_it() -> None:
    """It may be dropped, so that the client would not know the alias. Rows keep the name."""
    hub = DeviceHub()
    device, sender = connected(hub, "a", "22 00 05"), sender_of(hub)
    sender.feed(data_of(f"30: '{LONG}' P ~1", 5))
    assert device.take() == data_of(f"30: '{LONG}' P ~1", 5)
    sender.feed(data_of(f"32: '{LONG}' 00 01 P ~2", 5))
    assert device.take() == data_of(f"32: '{LONG}' 00 01 {{ 23 00 01 }} ~2", 5)
    sender.feed(data_of(f"30: '{LONG}' P ~3", 5))
    assert device.take() == data_of("30: 00 00 { 23 00 01 } ~3", 5)
    sender.feed(data_of(f"30: '{LONG}' P ~4 / 30: '{LONG}' P ~5 / 30: '{LONG}' P ~6", 5))
    assert data_of(f"30: '{LONG}' P ~6", 5) in device.take()
    sender.feed(data_of(f"30: '{LONG}' P 78*70000", 5))
    assert device.take() == data_of(f"30: '{LONG}' P 78*70000", 5), "a message that does not fit a frame"


@pytest.mark.parametrize(
    ("announced", "limit", "count"), [(0, 10, 0), (1, 10, 1), (5, 2, 2), (5, 0, 0), (65535, 10, 3)]
)
def test_the_number_of_aliases(announced: int, limit: int, count: int) -> None:
    hub = DeviceHub(limits=MqttSettings(aliases_out=limit))
    device, sender = connected(hub, "a", f"22 {announced:04x}"), sender_of(hub)
    found = 0
    for number in (1, 2, 3):
        sender.feed(data_of(f"32: '{LONG}/{number}' 00 0{number} P ~x", 5))
        found += b"\x03\x23\0" in device.take()
    assert found == count


def test_clients_without_aliases() -> None:
    """MQTT 3.1.1, and those whose maximum packet size might leave out the message with the name."""
    hub = DeviceHub()
    sender = sender_of(hub)
    old, small = connected(hub, "old", version=4), connected(hub, "small", "22 00 05 27 00 00 10 00")
    for number in (1, 2):
        sender.feed(data_of(f"32: '{LONG}' 00 0{number} P ~x", 5))
        assert old.take() == data_of(f"32: '{LONG}' 00 0{number} ~x", 4)
        assert small.take() == data_of(f"32: '{LONG}' 00 0{number} P ~x", 5)


def test_a_new_connection_begins_without_aliases() -> None:
    """Also messages that are sent again."""
    hub = DeviceHub()
    sender = sender_of(hub)
    for connection in (1, 2):
        device = hub.device()
        device.feed(data_of("10: M V 00 00 00 { 11 00 00 00 64 22 00 05 } 'a'", 5))
        if connection == 2:
            got = device.take()
            again = data_of(f"3a: '{LONG}' 00 01 {{ 23 00 01 }} ~x / 3a: 00 00 00 02 {{ 23 00 01 }} ~y", 5)
            assert got.endswith(again)
            return
        device.feed(data_of("82: 00 01 P '#' 01", 5))
        device.take()
        sender.feed(data_of(f"32: '{LONG}' 00 01 P ~x / 32: '{LONG}' 00 02 P ~y", 5))
        assert device.take().endswith(data_of("32: 00 00 00 02 { 23 00 01 } ~y", 5))
        device.lost()


def test_subscribers_share_encodings() -> None:
    hub = DeviceHub()
    devices = [connected(hub, name, "22 00 05") for name in "abc"]
    sender = sender_of(hub)
    for number in (1, 2):
        sender.feed(data_of(f"32: '{LONG}' 00 0{number} P ~x", 5))
        assert len({device.take() for device in devices}) == 1
    in_flight = [device.session.device.in_flight for device in devices]  # type: ignore[union-attr]
    assert len({id(one[2]) for one in in_flight}) == 1
    message = in_flight[0][2]
    assert message is not None
    assert message._parts is not None
    assert len(message._parts) == 1
