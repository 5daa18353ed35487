"""Traces of MQTT clients: the packets in both directions."""

from __future__ import annotations

from typing import Any

import pytest

from smqrt.broker.routes import MAX_FRAMES_SHOWN, Trace
from smqrt.wire.mqtt.fields import PacketType
from smqrt.wire.mqtt.packets import (
    Acknowledgement,
    ConnectPacket,
    DisconnectPacket,
    Packet,
    PingPacket,
    PublishPacket,
    SubscribePacket,
    Subscription,
    UnsubscribePacket,
    WillMessage,
    encode,
)
from tests.broker.memory_clients import settle
from tests.broker.mqtt.memory_devices import DeviceHub, MemoryDevice


@pytest.fixture
def hub() -> DeviceHub:
    return DeviceHub()


def traced(hub: DeviceHub, uid: bytes | None = None, topic: bytes | None = None) -> Trace:
    trace = Trace(hub.broker, uid, topic, lambda: None)
    trace.start()
    return trace


def feed(device: MemoryDevice, *packets: Packet, version: int = 5) -> None:
    for packet in packets:
        device.feed(encode(packet, version))
    settle()


def connected(hub: DeviceHub, name: str, version: int = 5) -> MemoryDevice:
    device = hub.device()
    feed(device, ConnectPacket(version, name, keepalive_s=30, will=WillMessage("gone", b"x")), version=version)
    return device


def rows(trace: Trace) -> list[dict[str, Any]]:
    """The events without the names of the client."""
    return [{key: value for key, value in one.items() if key not in ("etid", "uid")} for one in trace.take()]


@pytest.mark.parametrize("version", [4, 5])
def test_the_packets_of_a_client(hub: DeviceHub, version: int) -> None:
    trace = traced(hub, b"mqtt:lamp")
    device = connected(hub, "lamp", version)
    connected(hub, "other")
    name = {4: "3.1.1", 5: "5"}[version]
    assert rows(trace) == [
        {"event": "CONNECT", "version": name, "keepalive_s": 30, "flags": "clean start", "will": "gone"},
        {"event": "connect", "info": ""},
        {"event": "CONNACK", "sent": True},
    ]
    flags = {"flags": "no local, retain as published"} if version == 5 else {}
    options = 1 | (12 if version == 5 else 0)
    feed(device, SubscribePacket(7, [Subscription("a/+", options), Subscription("b", 2)]), version=version)
    assert rows(trace) == [
        {"event": "SUBSCRIBE", "topic": "a/+", "id": 7, "qos": 1, **flags},
        {"event": "SUBSCRIBE", "topic": "b", "id": 7, "qos": 2},
        {"event": "SUBACK", "sent": True, "id": 7, "codes": "0x01, 0x02"},
    ]
    feed(
        device,
        PublishPacket("x", b"21", 0x0B, 9),
        UnsubscribePacket(8, ["b"]),
        PingPacket(PacketType.PINGREQ),
        version=version,
    )
    code = {"code": "0x10 no matching subscribers"} if version == 5 else {}
    assert rows(trace) == [
        {"event": "PUBLISH", "topic": "x", "id": 9, "qos": 1, "flags": "dup, retain", "bytes": 2, "payload": "21"},
        {"event": "PUBACK", "sent": True, "id": 9, **code},
        {"event": "UNSUBSCRIBE", "topic": "b", "id": 8},
        {"event": "UNSUBACK", "sent": True, "id": 8, **({"codes": "0x00"} if version == 5 else {})},
        {"event": "PINGREQ"},
        {"event": "PINGRESP", "sent": True},
    ]
    hub.broker.publish(b"warm", b"a/b")
    settle()
    feed(device, Acknowledgement(PacketType.PUBACK, 1), DisconnectPacket(), version=version)
    assert rows(trace) == [
        {"event": "PUBLISH", "sent": True, "topic": "a/b", "id": 1, "qos": 1, "bytes": 4, "payload": "warm"},
        {"event": "PUBACK", "id": 1},
        {"event": "DISCONNECT"},
        {"event": "close", "reason": "client_disconnect", "detail": ""},
    ]


def test_messages_in_a_row_are_traced_one_by_one(hub: DeviceHub) -> None:
    device, listener = connected(hub, "sensor"), connected(hub, "listener")
    feed(listener, SubscribePacket(1, [Subscription("t", 0)]))
    feed(device, PublishPacket("t", b"0"), PublishPacket("t", b"1"))
    trace = traced(hub, b"mqtt:sensor")
    device.feed(b"".join(encode(PublishPacket("t", b"%d" % at), 5) for at in range(3)))
    settle()
    found = rows(trace)
    assert [one["payload"] for one in found if one["event"] == "PUBLISH"] == ["0", "1", "2"]
    assert [(one["payload"], one["qos"]) for one in found if one["event"] == "publish"] == [
        ("0", 0),
        ("1", 0),
        ("2", 0),
    ]
    trace.stop()
    device.take()
    device.feed(b"".join(encode(PublishPacket("t", b"%d" % at), 5) for at in range(3)))
    assert device.session.run_first == 0x30, "without a trace messages are published together again"
    assert rows(trace) == []
    assert device.session.mqtt_outbox is device.session.outbox


def test_a_topic_has_the_packets_that_concern_it(hub: DeviceHub) -> None:
    trace = traced(hub, topic=b"house/temp")
    device = connected(hub, "a")
    filters = ("house/+", "$share/g/house/#", "house/temp", "garden", "$share/x", "#/bad")
    feed(device, SubscribePacket(1, [Subscription(one, 1) for one in filters]))
    feed(device, PublishPacket("garden", b"x"), PublishPacket("house/temp", b"21", 2, 5))
    found = rows(trace)
    assert [one["topic"] for one in found if one["event"] == "SUBSCRIBE"] == list(filters[:3])
    assert [(one["event"], one["qos"]) for one in found[3:]] == [("PUBLISH", 1), ("publish", 1)]


def test_malformed_and_large_packets(hub: DeviceHub) -> None:
    trace = traced(hub, b"mqtt:a")
    device = connected(hub, "a")
    rows(trace)
    feed(device, SubscribePacket(1, [Subscription(f"t/{at}") for at in range(900)]))
    assert len([one for one in rows(trace) if one["event"] == "SUBSCRIBE"]) == MAX_FRAMES_SHOWN
    device.feed(b"\x82\x02\0\x01")
    first, *rest = rows(trace)
    assert first["event"] == "SUBSCRIBE"
    assert first["detail"]
    assert [one["event"] for one in rest] == ["DISCONNECT", "close"]
    assert rest[0]["code"].startswith("0x8")


def test_a_client_that_is_connected_already(hub: DeviceHub) -> None:
    device = connected(hub, "a")
    trace = traced(hub, b"mqtt:a")
    feed(device, PingPacket(PacketType.PINGREQ))
    assert [one["event"] for one in rows(trace)] == ["PINGREQ", "PINGRESP"]
