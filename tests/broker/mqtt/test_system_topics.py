"""`$SYS` topics: figures, who may read them, when they are computed."""

from __future__ import annotations

from typing import Any

import pytest

from smqrt.broker.mqtt import system_topics
from smqrt.broker.mqtt.system_topics import NAMES
from smqrt.broker.state import Hooks
from smqrt.settings.limits import MqttSettings
from tests.broker.mqtt.memory_devices import DeviceHub, MemoryDevice
from tests.broker.mqtt.test_client import ReadRights
from tests.conformance.mqtt_script import data_of
from tests.conformance.test_mqtt_hub import body_of


def connected(hub: DeviceHub, name: str = "a") -> MemoryDevice:
    device = hub.device()
    device.feed(data_of(f"K {name}", 5))
    assert device.take()[0] == 0x20
    return device


def packets(data: bytes) -> list[bytes]:
    found = []
    while data:
        end = 2 + data[1]
        assert data[1] < 128
        found.append(data[:end])
        data = data[end:]
    return found


def figures(device: MemoryDevice) -> dict[str, str]:
    """Names and values of the messages since the last call, without `$SYS/broker/`."""
    found = {}
    for packet in packets(device.take()):
        body = body_of(packet)
        if packet[0] >> 4 == 3:
            end = 2 + int.from_bytes(body[:2])
            found[body[2:end].decode().removeprefix("$SYS/broker/")] = body[end + 1 :].decode()
    return found


def subscribe(device: MemoryDevice, script: str = "'$SYS/#' 00") -> bytes:
    device.feed(data_of(f"82: 00 01 P {script}", 5))
    first = device.ear.got[0]
    return body_of(first)[3:]


def test_a_new_subscriber_gets_all_figures_at_once() -> None:
    hub = DeviceHub()
    hub.devices.system.version = "smqrt version 7"
    sleeper, sender, device = connected(hub, "sleeper"), connected(hub, "sender"), connected(hub)
    sleeper.feed(data_of("82: 00 01 P 'news' 01 '$share/g/t' 00", 5))
    sleeper.lost()
    sender.feed(data_of("33: 'news' 00 01 P ~12345 / 30: 'nobody' P ~xyz / c0:", 5))
    device.take()
    hub.at(9)
    assert subscribe(device) == b"\0"
    got = figures(device)
    assert {f"$SYS/broker/{name}".encode() for name in got} == set(NAMES)
    expected = {
        "version": "smqrt version 7", "uptime": "9 seconds", "clients/connected": "2", "clients/total": "3",
        "clients/maximum": "3", "clients/disconnected": "1", "clients/expired": "0", "messages/stored": "2",
        "publish/messages/received": "2", "publish/bytes/received": "8", "publish/messages/sent": "1",
        "publish/bytes/sent": "5", "publish/messages/dropped": "0", "subscriptions/count": "3",
        "shared_subscriptions/count": "1", "retained messages/count": "1", "store/messages/count": "2",
        "messages/sent": "8",  # CONNACK three times, SUBACK twice, PUBACK, PINGRESP, and the message
        "load/publish/sent/1min": "0.00",
    }  # fmt: skip
    assert {name: got[name] for name in expected} == expected


def test_changed_figures_are_published_while_somebody_subscribes(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = DeviceHub(limits=MqttSettings(sys_interval_s=10))
    computed: list[float] = []
    compute = system_topics.SystemTopics._compute
    monkeypatch.setattr(
        system_topics.SystemTopics, "_compute", lambda self, now_s: (computed.append(now_s), compute(self, now_s))[1]
    )
    device, sender = connected(hub), connected(hub, "sender")
    device.feed(data_of("82: 00 01 P '#' 00 '+/broker/uptime' 00", 5))
    for second in range(1, 25):
        hub.at(second)
    assert computed == [], "wildcards at the first level do not match"
    device.take()
    subscribe(device, "'$SYS/broker/publish/#' 00 '$SYS/broker/uptime' 08")
    assert figures(device)["publish/messages/received"] == "0"
    sender.feed(data_of("30: 't' P ~x", 5))
    for second in range(25, 31):
        hub.at(second)
    assert figures(device) == {
        "publish/messages/received": "1", "publish/bytes/received": "1", "publish/messages/sent": "1",
        "publish/bytes/sent": "1", "uptime": "30 seconds", "t": "x",
    }  # fmt: skip
    device.feed(data_of("a2: 00 02 P '$SYS/broker/publish/#' '$SYS/broker/uptime'", 5))
    before = len(computed)
    for second in range(31, 60):
        hub.at(second)
    assert len(computed) == before == 2


def test_flags_of_figures() -> None:
    """The first values are retained messages; later ones only for clients that ask for the flag. QoS is 0."""
    hub = DeviceHub()
    plain, flagged = connected(hub), connected(hub, "b")
    plain.feed(data_of("82: 00 01 { 0b05 } '$SYS/broker/uptime' 02", 5))
    flagged.feed(data_of("82: 00 01 P '$SYS/broker/uptime' 0a", 5))
    name = "'$SYS/broker/uptime'"
    assert packets(plain.take())[-1] == data_of(f"31: {name} {{ 0b05 }} ~{'0'} 20 ~seconds", 5)
    assert packets(flagged.take())[-1] == data_of(f"31: {name} P ~0 20 ~seconds", 5)
    hub.at(10)
    assert plain.take() == data_of(f"30: {name} {{ 0b05 }} ~10 20 ~seconds", 5)
    assert flagged.take() == data_of(f"31: {name} P ~10 20 ~seconds", 5)


def test_a_shared_subscription_gets_each_figure_once() -> None:
    hub = DeviceHub()
    devices = [connected(hub, name) for name in "ab"]
    for device in devices:
        subscribe(device, "'$share/g/$SYS/broker/uptime' 00")
        assert figures(device) == {}
    hub.at(10)
    assert sorted(len(figures(device)) for device in devices) == [0, 1]


def test_moving_averages() -> None:
    hub = DeviceHub()
    device, sender = connected(hub), connected(hub, "sender")
    subscribe(device, "'$SYS/broker/load/publish/received/+' 00")
    assert set(figures(device).values()) == {"0.00"}
    for tens in range(1, 400):
        sender.feed(data_of("30: 't' P ~x / 30: 't' P ~x", 5))
        hub.at(tens * 10)
        if tens == 1:
            first = figures(device)
    assert float(first["load/publish/received/1min"]) == pytest.approx(1.84, abs=0.01)
    assert {round(float(value)) for value in figures(device).values()} == {12}, "two in 10 s are 12 a minute"


@pytest.mark.parametrize(
    ("sys", "user", "code"),
    [
        ("users", None, 0),  # a hub without users: all clients may read everything
        ("users", "", 0x87),
        ("users", "ada", 0),
        ("all", "", 0),
    ],
)
def test_anonymous_clients_of_a_hub_with_users_do_not_see_them(sys: str, user: str | None, code: int) -> None:
    hub = DeviceHub(limits=MqttSettings(sys=sys))
    device = connected(hub)
    if user is not None:
        rights: Any = ReadRights(b"$SYS/#", b"$SYS/broker/uptime", b"$SYS/broker/connection/#")
        rights.user = user
        device.session.identity = rights
    assert subscribe(device, "'$SYS/#' 00 '$SYS/broker/uptime' 00 '$SYS/broker/connection/#' 00") == bytes(
        (code, code, 0)
    ), "the states of bridges are messages of clients"
    assert bool(figures(device)) is not code


def test_the_access_control_list_and_hooks_decide_for_users() -> None:
    hub = DeviceHub(Hooks(permitfilter=lambda wanted, session: wanted != b"$SYS/#"))
    device = connected(hub)
    assert subscribe(device, "'$SYS/#' 00 '$SYS/broker/+' 00") == b"\x87\0"
    rights: Any = ReadRights(b"$SYS/broker/#")
    device.session.identity = rights
    device.take()
    assert subscribe(device, "'$SYS/broker/#' 00 '$SYS/broker/+' 00") == b"\0\x87"


@pytest.mark.parametrize("off", [{"sys": "off"}, {"sys_interval_s": 0}])
def test_without_them(off: dict[str, Any]) -> None:
    hub = DeviceHub(limits=MqttSettings(**off))
    device = connected(hub)
    assert subscribe(device) == b"\0"
    for second in range(30):
        hub.at(second)
    assert figures(device) == {}


def test_clients_cannot_publish_them() -> None:
    hub = DeviceHub()
    device = connected(hub)
    device.feed(data_of("33: '$SYS/broker/uptime' 00 01 P ~x", 5))
    assert device.take() == data_of("40: 00 01 87", 5)


def test_expired_sessions_and_the_traffic_of_closed_connections_count() -> None:
    hub = DeviceHub()
    hub.devices.system.transferred = lambda client: (1000, 300)
    device, gone = connected(hub), connected(hub, "gone")
    gone.session.device.expiry_s = 5  # type: ignore[union-attr]
    gone.lost()
    for second in range(1, 8):
        hub.at(second)
    subscribe(device)
    got = figures(device)
    assert (got["clients/expired"], got["clients/total"], got["clients/maximum"]) == ("1", "1", "2")
    assert (got["bytes/received"], got["bytes/sent"]) == ("2000", "600")
