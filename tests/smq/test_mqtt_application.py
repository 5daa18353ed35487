"""Messages of the application with QoS, retain flag, expiry and properties, and those that its handlers get."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from smqrt import hub
from smqrt.errors import ArgumentError
from smqrt.server.mqtt import take_mqtt
from smqrt.settings.limits import MqttSettings, apply_mqtt, current_mqtt
from tests.smq.test_mqtt_clients import PahoClient, mosquitto
from tests.support.device import Site, publish
from tests.support.factory import Factory
from tests.support.waiting import let_others_run, wait_until


@pytest.fixture
def mqtt_site(make_site: Callable[..., Site]) -> Site:
    site = make_site(mqtt=True)
    site.server.take_mqtt = take_mqtt
    return site


@pytest.fixture
def connect(mqtt_site: Site) -> Iterator[Callable[..., PahoClient]]:
    with Factory(lambda *arguments, **more: PahoClient(mqtt_site, *arguments, **more)) as make:
        yield make


def messages_of(client: PahoClient) -> list[Any]:
    """What arrives from now on, as paho's messages."""
    found: list[Any] = []
    client.client.on_message = lambda _client, _data, message: found.append(message)
    return found


# ---- publish


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_qos_expiry_and_properties_reach_mqtt_clients(
    connect: Callable[..., PahoClient], mqtt_site: Site, qos: int
) -> None:
    got = messages_of(connect("listener").subscribe("house/#", 2))
    properties = {
        "contenttype": "text/plain",
        "payloadformatindicator": 1,
        "responsetopic": "answers",
        "correlationdata": b"\x00id",
        "colour": ["red", "blue"],
        "count": 5,
    }
    mqtt_site.smq.publish("21", "house/temp", qos=qos, expiry=60, properties=properties)
    wait_until(lambda: got, "the message")
    message, found = got[0], got[0].properties
    assert (message.topic, message.payload, message.qos, message.retain) == ("house/temp", b"21", qos, False)
    assert (found.ContentType, found.PayloadFormatIndicator, found.ResponseTopic) == ("text/plain", 1, "answers")
    assert found.CorrelationData == b"\x00id"
    assert found.UserProperty == [("colour", "red"), ("colour", "blue"), ("count", "5")]
    assert 50 < found.MessageExpiryInterval <= 60


def test_a_retained_message_of_the_application(connect: Callable[..., PahoClient], mqtt_site: Site) -> None:
    smq = mqtt_site.smq
    smq.publish("on", "lamp", retain=True, properties={"by": "app"})
    late = connect("late")
    got = messages_of(late)
    late.subscribe("lamp", 1)
    wait_until(lambda: got, "the retained message")
    assert (got[0].payload, got[0].retain, got[0].qos, got[0].properties.UserProperty) == (
        b"on",
        True,
        1,
        [("by", "app")],
    )
    assert mosquitto(mqtt_site, "sub", "-t", "lamp", "-C", "1", "-W", "10").communicate()[0] == "on\n"
    smq.publish(b"", "lamp", retain=True)
    assert mqtt_site.state.devices.retained.by_name == {}


def test_the_default_qos_is_that_of_smq(connect: Callable[..., PahoClient], mqtt_site: Site) -> None:
    listener = connect("listener").subscribe("t", 2)
    mqtt_site.smq.publish("x", "t", properties={"a": "b"})
    listener.receives(("t", b"x", 1, False))


def test_smq_clients_get_the_same_message(mqtt_site: Site) -> None:
    device = mqtt_site.device()
    tid = device.create(b"t")
    device.subscribe(b"t")
    mqtt_site.smq.publish("x", "t", subtopic="s", qos=2, expiry=5)
    device.expect(publish(tid, 1, b"x", mqtt_site.smq.subtopic2tid("s")))


@pytest.mark.parametrize("options", [{"qos": 0}, {"retain": True}, {"expiry": 5}, {"properties": {}}])
def test_a_hub_without_mqtt_rejects_the_options(options: dict[str, Any]) -> None:
    (name,) = options
    with hub.create() as smq:
        with pytest.raises(
            ArgumentError, match=f"^{name}: this hub accepts no MQTT clients; create it with the option"
        ):
            smq.publish("x", "t", **options)
        assert smq.topic2tid("t") is None
        smq.publish("x", "t", qos=None, retain=False)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"qos": 3}, "qos: '3' is not a QoS; use 0, 1 or 2"),
        ({"qos": True}, "qos: 'True' is not a QoS"),
        ({"expiry": 0}, "expiry: '0'; seconds above 0"),
        ({"expiry": float("nan")}, "expiry: 'nan'"),
        ({"expiry": 1 << 32}, "expiry: '4294967296'"),
        ({"properties": "x"}, "properties: names and values are needed, not str"),
        ({"properties": {1: 2}}, "properties: names and values are needed"),
        ({"properties": {"topicalias": 1}}, "properties: the hub sets topicalias"),
        ({"properties": {"messageexpiryinterval": 1}}, "properties: messageexpiryinterval is the argument expiry"),
        ({"properties": {"responsetopic": "a/#"}}, "properties: responsetopic is empty or has a wildcard"),
        ({"properties": {"payloadformatindicator": 2}}, "property 'payloadformatindicator' can't be 2"),
        ({"properties": {"a": ["x"] * 65}}, "properties: 65 user properties; at most 64 are possible"),
        ({"topic": "a/+", "retain": True}, "retain: 'a/\\+' is not a topic that MQTT can name"),
        ({"topic": 1, "retain": True}, "retain: a client is not a topic that MQTT can name"),
    ],
)
def test_invalid_options(options: dict[str, Any], error: str) -> None:
    with hub.create(mqtt=True) as smq, pytest.raises(ArgumentError, match=f"^{error}"):
        smq.publish(**{"data": "x", "topic": "t", **options})


def test_the_limit_of_retained_messages() -> None:
    before = current_mqtt()
    apply_mqtt(MqttSettings(retained=1))
    try:
        with hub.create(mqtt=True) as smq:
            smq.publish("1", "a", retain=True)
            smq.publish("2", "a", retain=True)
            with pytest.raises(
                ArgumentError, match="^retain: the hub's limit of retained messages is reached, see mqtt"
            ):
                smq.publish("1", "b", retain=True)
            assert smq.drops()["unrouted"] == 2  # the third one was not published
            smq.publish("", "a", retain=True)
            smq.publish("1", "b", retain=True)
    finally:
        apply_mqtt(before)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_hook_decides_before_a_message_is_retained(make_site: Callable[..., Site], is_late: bool) -> None:
    def onpublish(data: bytes, *_: Any) -> bool:
        if is_late:
            let_others_run()
        return data != b"no"

    site = make_site(mqtt=True, onpublish=onpublish)
    site.smq.publish("yes", "a", retain=True)
    site.smq.publish("no", "b", retain=True)
    retained = site.state.devices.retained.by_name
    wait_until(lambda: site.smq.drops()["swallowed"] == 1, "the second answer")
    assert list(retained) == [b"a"]


# ---- handlers


def send(client: PahoClient, topic: str, qos: int, retain: bool = False) -> None:
    properties = Properties(PacketTypes.PUBLISH)
    properties.ContentType, properties.MessageExpiryInterval = "text/plain", 60
    properties.UserProperty = [("colour", "red"), ("colour", "blue"), ("size", "5")]
    sent = client.client.publish(topic, "21", qos, retain, properties)
    wait_until(sent.is_published, "the message is published")


def test_handlers_get_the_attributes(connect: Callable[..., PahoClient], mqtt_site: Site) -> None:
    got: list[tuple[Any, ...]] = []

    def onmsg(data: Any, ptid: int, tid: int, subtid: int, mqtt: hub.MqttAttributes | None) -> None:
        got.append((data, mqtt))

    mqtt_site.smq.subscribe("named", onmsg)
    mqtt_site.smq.subscribe(filter="house/+", onmsg=onmsg, json=True)
    mqtt_site.smq.onmsg(onmsg)
    sensor = connect("sensor")
    send(sensor, "named", 2)
    send(sensor, "house/temp", 0, True)
    mqtt_site.smq.subscribe("default")
    send(sensor, "default", 1)
    mqtt_site.smq.publish("smq", "named")
    wait_until(lambda: len(got) == 4, got)
    assert [data for data, _ in got] == [b"21", 21, b"21", b"smq"]
    assert type(got[0][0]) is bytes
    assert got[3][1] is None
    assert [(one.qos, one.retain) for _, one in got[:3]] == [(2, False), (0, True), (1, False)]
    for _, one in got[:3]:
        assert one.properties == {"contenttype": "text/plain", "colour": ["red", "blue"], "size": "5"}
        assert 50 < one.expiry <= 60


def test_handlers_with_four_arguments_get_four(connect: Callable[..., PahoClient], mqtt_site: Site) -> None:
    got: list[Any] = []
    mqtt_site.smq.subscribe("a", lambda *given: got.append(given))
    mqtt_site.smq.subscribe("b", lambda data, ptid, tid, subtid: got.append((data, ptid, tid, subtid)))
    sensor = connect("sensor")
    send(sensor, "a", 1)
    send(sensor, "b", 1)
    wait_until(lambda: len(got) == 2, got)
    assert [(len(one), type(one[0])) for one in got] == [(4, bytes), (4, bytes)]


def test_on_gets_the_attributes(connect: Callable[..., PahoClient], mqtt_site: Site) -> None:
    got: list[hub.Message] = []
    mqtt_site.smq.on("a")(got.append)
    send(connect("sensor"), "a", 2)
    mqtt_site.smq.publish("x", "a")
    wait_until(lambda: len(got) == 2, got)
    assert got[0].mqtt is not None
    assert (got[0].mqtt.qos, got[0].mqtt.properties["size"], got[1].mqtt) == (2, "5", None)


def test_onpublish_gets_the_attributes(make_site: Callable[..., Site]) -> None:
    got: list[Any] = []

    def onpublish(
        data: bytes, ptid: int, tid: int, subtid: int, peer: hub.Peer, mqtt: hub.MqttAttributes | None
    ) -> bool:
        got.append((data, mqtt))
        return True

    smq = make_site(mqtt=True, onpublish=onpublish).smq
    smq.publish("x", "a", qos=2, expiry=60, properties={"contenttype": "text/plain"})
    smq.pubon("y", smq.gettid(), smq.gettid())
    wait_until(lambda: len(got) == 2, got)
    (first, attributes), second = got
    assert (first, attributes.qos, attributes.properties) == (b"x", 2, {"contenttype": "text/plain"})
    assert 50 < attributes.expiry <= 60
    assert second[0] == b"y"


def test_a_handler_gets_the_retained_message_of_its_topic(connect: Callable[..., PahoClient], mqtt_site: Site) -> None:
    got: list[Any] = []
    send(connect("sensor"), "kept", 1, retain=True)
    mqtt_site.smq.subscribe("kept", lambda data, ptid, tid, subtid, mqtt: got.append((data, mqtt.retain, mqtt.qos)))
    wait_until(lambda: got, "the retained message")
    assert got == [(b"21", True, 1)]


def test_a_message_of_the_application_to_itself(mqtt_site: Site) -> None:
    got: list[Any] = []
    mqtt_site.smq.subscribe("a", lambda data, ptid, tid, subtid, mqtt: got.append((data, mqtt.qos, mqtt.properties)))
    mqtt_site.smq.publish("x", "a", qos=2, properties={"b": "c"})
    wait_until(lambda: got, "the message")
    assert got == [(b"x", 2, {"b": "c"})]


# ---- lost messages


def test_onmqttgap(make_site: Callable[..., Site]) -> None:
    before, got = current_mqtt(), list[Any]()
    apply_mqtt(MqttSettings(queued_messages=2))
    try:
        site = make_site(mqtt=True, onmqttgap=lambda *given: got.append(given))
        site.server.take_mqtt = take_mqtt
        sleeper = PahoClient(site, "sleeper", keeps=True).subscribe("news", 1)
        sleeper.close()
        wait_until(lambda: site.state.devices.offline, "the session sleeps")
        for number in range(5):
            site.smq.publish(str(number), "news")
        wait_until(lambda: got, "the report")
        site.state.devices.gaps.lost(2, 5)
        wait_until(lambda: len(got) == 2, "the report of a node")
        assert got == [("sleeper", 3, None, None), (None, 5, None, 2)]
        assert site.smq.drops()["over_budget"] == 3
    finally:
        apply_mqtt(before)
