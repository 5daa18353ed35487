"""MQTT clients of others at a hub: paho-mqtt and mosquitto's, beside an SMQ client and handlers of the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from gevent import subprocess
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from smqrt.server.mqtt import take_mqtt
from smqrt.wire.smq import Type
from tests.support.device import Site, publish
from tests.support.factory import Factory
from tests.support.waiting import let_others_run, wait_until

VERSIONS = (MQTTProtocolVersion.MQTTv31, MQTTProtocolVersion.MQTTv311, MQTTProtocolVersion.MQTTv5)
TRANSPORTS = ("tcp", "websockets")


class PahoClient:
    """A paho client with a thread of its own.

    Attributes:
        got: topic, payload, QoS and retain flag of the messages.
        codes: the reasons of CONNACK.
    """

    def __init__(
        self, site: Site, name: str, version: int = 5, transport: str = "tcp", keeps: bool = False, will: Any = None
    ) -> None:
        is_5 = version == MQTTProtocolVersion.MQTTv5
        clean = {} if is_5 else {"clean_session": not keeps}
        self.client = paho.Client(CallbackAPIVersion.VERSION2, name, protocol=version, transport=transport, **clean)
        self.got: list[tuple[str, bytes, int, bool]] = []
        self.codes: list[str] = []
        self.subscribed: list[int] = []
        self.is_present = False
        self.client.on_message = lambda client, data, one: self.got.append(
            (one.topic, one.payload, one.qos, one.retain)
        )
        self.client.on_connect = self._on_connect
        self.client.on_subscribe = lambda client, data, mid, codes, properties: self.subscribed.append(mid)
        if will is not None:
            self.client.will_set(*will)
        properties = None
        if is_5:
            properties = Properties(PacketTypes.CONNECT)
            properties.SessionExpiryInterval = 100 if keeps else 0
        host, port = site.address()
        self.client.connect_async(host, port, clean_start=not keeps, properties=properties) if is_5 else (
            self.client.connect_async(host, port)
        )
        self.client.loop_start()
        wait_until(lambda: self.codes, f"{name} is connected")

    def _on_connect(self, client: Any, data: Any, flags: Any, code: Any, properties: Any) -> None:
        self.is_present = flags.session_present
        self.codes.append(str(code))

    def subscribe(self, topic: str, qos: int = 0) -> PahoClient:
        _, mid = self.client.subscribe(topic, qos)
        wait_until(lambda: mid in self.subscribed, "SUBACK")
        return self

    def publish(self, topic: str, payload: bytes | str, qos: int = 0, retain: bool = False) -> None:
        sent = self.client.publish(topic, payload, qos, retain)
        wait_until(sent.is_published, "the message is published")

    def receives(self, *messages: tuple[str, bytes, int, bool]) -> None:
        wait_until(lambda: len(self.got) >= len(messages), self.got)
        assert self.got == list(messages)
        self.got.clear()

    def lose(self) -> None:
        """Break the connection without DISCONNECT."""
        sock = self.client.socket()
        self.client.loop_stop()
        if sock is not None:
            sock.close()

    def close(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()


@pytest.fixture
def mqtt_site(make_site: Callable[..., Site]) -> Site:
    site = make_site(mqtt=True)
    site.server.take_mqtt = take_mqtt
    return site


@pytest.fixture
def connect(mqtt_site: Site) -> Iterator[Callable[..., PahoClient]]:
    with Factory(lambda *arguments, **more: PahoClient(mqtt_site, *arguments, **more)) as make:
        yield make


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("version", VERSIONS)
def test_each_qos(connect: Callable[..., PahoClient], version: int, transport: str) -> None:
    listener = connect("listener", version, transport).subscribe("house/+/temp", 2)
    sensor = connect("sensor", version, transport)
    for qos in (0, 1, 2):
        sensor.publish("house/kitchen/temp", f"{20 + qos}", qos)
    wait_until(lambda: len(listener.got) == 3, listener.got)
    assert sorted(listener.got) == [("house/kitchen/temp", b"%d" % (20 + qos), qos, False) for qos in (0, 1, 2)]
    assert listener.codes == sensor.codes == ["Success"]


@pytest.mark.parametrize("version", VERSIONS)
def test_retained_messages(connect: Callable[..., PahoClient], version: int) -> None:
    sensor = connect("sensor", version)
    sensor.publish("house/state", "on", 1, retain=True)
    connect("early", version).subscribe("house/#", 1).receives(("house/state", b"on", 1, True))
    sensor.publish("house/state", "", 1, retain=True)
    late = connect("late", version).subscribe("house/#", 1)
    sensor.publish("house/end", "x", 0)
    late.receives(("house/end", b"x", 0, False))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_will(connect: Callable[..., PahoClient], version: int) -> None:
    listener = connect("listener", version).subscribe("alive/sensor", 1)
    connect("sensor", version, will=("alive/sensor", "offline", 1, True)).lose()
    listener.receives(("alive/sensor", b"offline", 1, False))
    connect("late", version).subscribe("alive/#", 1).receives(("alive/sensor", b"offline", 1, True))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_kept_session(connect: Callable[..., PahoClient], version: int) -> None:
    connect("sleeper", version, keeps=True).subscribe("news", 1).close()
    sensor = connect("sensor", version)
    for number in range(30):
        sensor.publish("news", str(number), 1)
    back = connect("sleeper", version, keeps=True)
    back.receives(*(("news", b"%d" % number, 1, False) for number in range(30)))
    assert back.is_present is (version != MQTTProtocolVersion.MQTTv31)


def test_properties_and_requests(connect: Callable[..., PahoClient]) -> None:
    worker, asker = connect("worker").subscribe("work"), connect("asker").subscribe("answers/1")

    def answer(client: Any, data: Any, message: Any) -> None:
        properties = Properties(PacketTypes.PUBLISH)
        properties.CorrelationData = message.properties.CorrelationData
        client.publish(message.properties.ResponseTopic, message.payload.upper(), 1, properties=properties)

    worker.client.on_message = answer
    found: list[Any] = []
    asker.client.on_message = lambda client, data, message: found.append(message)
    properties = Properties(PacketTypes.PUBLISH)
    properties.ResponseTopic, properties.CorrelationData = "answers/1", b"id"
    properties.UserProperty = ("colour", "red")
    asker.client.publish("work", "hello", 1, properties=properties)
    wait_until(lambda: found, "an answer")
    assert (found[0].payload, found[0].properties.CorrelationData) == (b"HELLO", b"id")


def test_mqtt_and_smq_clients_share_a_topic(connect: Callable[..., PahoClient], mqtt_site: Site) -> None:
    number = mqtt_site.smq.create("house/kitchen/temp")
    device = mqtt_site.device(b"browser")
    device.ask(Type.SUBSCRIBE, b"house/kitchen/temp")
    listener = connect("listener").subscribe("house/+/temp", 1)
    connect("sensor").publish("house/kitchen/temp", "21", 1)
    assert device.receive()[13:] == b"21"
    listener.receives(("house/kitchen/temp", b"21", 1, False))
    device.send(publish(number, device.etid, b"22"))
    listener.receives(("house/kitchen/temp", b"22", 1, False))


def test_mqtt_clients_and_the_server(connect: Callable[..., PahoClient], mqtt_site: Site) -> None:
    got: list[bytes] = []
    mqtt_site.smq.subscribe("to/server", onmsg=lambda data, *rest: got.append(bytes(data)))
    listener = connect("listener").subscribe("from/#", 1)
    sensor = connect("sensor")
    sensor.publish("to/server", "hello", 2)
    wait_until(lambda: got == [b"hello"], got)
    mqtt_site.smq.publish("news", "from/server")
    listener.receives(("from/server", b"news", 1, False))


def test_a_long_message_and_many_short_ones(connect: Callable[..., PahoClient]) -> None:
    listener = connect("listener", transport="websockets").subscribe("t", 1)
    sensor = connect("sensor", transport="websockets")
    sensor.publish("t", b"x" * 65000, 1)
    for number in range(200):
        sensor.client.publish("t", str(number), 0)
    sensor.publish("t", b"end", 1)
    wait_until(lambda: len(listener.got) == 202, "all messages")
    assert len(listener.got[0][1]) == 65000
    assert [payload for _, payload, qos, _ in listener.got if not qos] == [b"%d" % number for number in range(200)]


# ---- mosquitto's clients


def mosquitto(site: Site, tool: str, *arguments: str) -> Any:
    host, port = site.address()
    command = [f"mosquitto_{tool}", "-h", host, "-p", str(port), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.servers
@pytest.mark.parametrize("version", ["mqttv31", "mqttv311", "mqttv5"])
@pytest.mark.parametrize("qos", ["0", "1", "2"])
def test_mosquitto_pub_and_sub(mqtt_site: Site, version: str, qos: str) -> None:
    listener = mosquitto(mqtt_site, "sub", "-V", version, "-q", qos, "-t", "a/#", "-v", "-C", "2", "-W", "10")
    wait_until(lambda: mqtt_site.state.devices.filters.by_text, "a subscription")
    for payload in ("one", "two"):
        sender = mosquitto(mqtt_site, "pub", "-V", version, "-q", qos, "-t", "a/b", "-m", payload)
        assert sender.wait() == 0, sender.stdout.read()
    assert listener.wait() == 0
    assert listener.stdout.read() == "a/b one\na/b two\n"


@pytest.mark.servers
def test_mosquitto_retained_and_will(mqtt_site: Site) -> None:
    assert mosquitto(mqtt_site, "pub", "-q", "1", "-r", "-t", "state", "-m", "on").wait() == 0
    sleeper = mosquitto(mqtt_site, "sub", "-t", "x", "--will-topic", "gone", "--will-payload", "bye", "--will-retain")
    wait_until(lambda: "x" in mqtt_site.state.devices.filters.by_text, "a subscription")
    sleeper.kill()
    sleeper.wait()
    let_others_run()
    listener = mosquitto(mqtt_site, "sub", "-t", "#", "-v", "-C", "2", "-W", "10")
    assert listener.wait() == 0
    assert sorted(listener.stdout.read().splitlines()) == ["gone bye", "state on"]
