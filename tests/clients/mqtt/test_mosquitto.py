"""Against a real mosquitto: messages, properties, sessions, TLS, passwords, both versions."""

from __future__ import annotations

import gc
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import process_time
from typing import Any

import gevent
import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import MQTTProtocolVersion

from smqrt.errors import ArgumentError
from smqrt.mqtt import MqttClient
from tests.clients.mqtt.mosquitto import COMMON, Mosquitto, tls_listener
from tests.support.pki import Authority
from tests.support.waiting import wait_until

pytestmark = pytest.mark.servers

Connect = Callable[..., MqttClient]
Start = Callable[..., Mosquitto]

BOTH = pytest.mark.parametrize("version", [4, 5])


@BOTH
def test_every_quality_there_and_back(mosquitto: Mosquitto, connect: Connect, version: int) -> None:
    got: list[Any] = []
    client = connect(mosquitto.address, None, lambda *message: got.append(message), version=version)
    granted: list[Any] = []
    client.subscribe("all/#", None, lambda *answer: granted.append(answer), qos=2)
    for qos in range(3):
        assert client.publish(f"all/{qos}", bytes([qos]) * 200_000, qos).wait(5)
    wait_until(lambda: len(got) == 3)
    assert granted == [("all/#", 2, {})]
    assert [(topic, payload, cpt >> 1 & 3) for topic, payload, _, cpt in got] == [
        (f"all/{qos}", bytes([qos]) * 200_000, qos) for qos in range(3)
    ]
    ended: list[Any] = []
    client.unsubscribe("all/#", lambda *answer: ended.append(answer[:2]))
    wait_until(lambda: ended)
    client.publish("all/gone", b"", 1).wait(5)
    assert (ended, len(got)) == ([("all/#", 0)], 3)


@BOTH
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_messages_to_and_from_paho(mosquitto: Mosquitto, connect: Connect, version: int, qos: int) -> None:
    heard: list[Any] = []
    theirs = paho.Client(paho.CallbackAPIVersion.VERSION2, protocol=MQTTProtocolVersion(version))
    theirs.on_subscribe = lambda *_: heard.append("subscribed")
    theirs.on_message = lambda _client, _data, message: heard.append((message.topic, message.payload, message.qos))
    theirs.connect("127.0.0.1", mosquitto.port)
    theirs.subscribe("to/paho", qos)
    loop = gevent.spawn(turn_paho, theirs)
    got: list[Any] = []
    client = connect(
        mosquitto.address, None, lambda topic, payload, _, cpt: got.append((payload, cpt >> 1 & 3)), version=version
    )
    ready: list[int] = []
    client.subscribe("from/paho", None, lambda topic, reason, _: ready.append(reason), qos=qos)
    wait_until(lambda: heard == ["subscribed"] and ready == [qos])
    for number in range(50):
        client.publish("to/paho", b"%d" % number, qos)
        theirs.publish("from/paho", b"%d" % number, qos)
    wait_until(lambda: len(heard) == 51 and len(got) == 50)
    assert heard[1:] == [("to/paho", b"%d" % number, qos) for number in range(50)]
    assert got == [(b"%d" % number, qos) for number in range(50)]
    loop.kill()
    theirs.disconnect()


def turn_paho(client: paho.Client) -> None:
    """Paho's own loop, between the other greenlets."""
    while True:
        client.loop(timeout=0.001)
        gevent.sleep(0.001)


def test_properties_go_both_ways(mosquitto: Mosquitto, connect: Connect) -> None:
    sent = {
        "payloadformatindicator": 1,
        "messageexpiryinterval": 60,
        "contenttype": "text/plain",
        "responsetopic": "answers",
        "correlationdata": b"\0\xff",
        "colour": "red",
        "many": ["one", "two"],
    }
    got: list[Any] = []
    client = connect(mosquitto.address, None, lambda *message: got.append(message[2]))
    client.subscribe("properties")
    client.publish("properties", "x", 1, properties=sent)
    wait_until(lambda: got)
    assert got[0] == sent


@BOTH
def test_callbacks_of_single_subscriptions(mosquitto: Mosquitto, connect: Connect, version: int) -> None:
    got: list[Any] = []

    def named(name: str) -> Callable[..., None]:
        return lambda topic, payload, properties, cpt: got.append((name, topic))

    client = connect(mosquitto.address, None, named("all"), version=version)
    client.subscribe("single/one", named("one"))
    client.subscribe("single/+/deep", named("deep"))
    client.subscribe("single/other")
    for topic in ("single/one", "single/two/deep", "single/other"):
        client.publish(topic, b"", 1)
    wait_until(lambda: len(got) == 3)
    assert got == [("one", "single/one"), ("deep", "single/two/deep"), ("all", "single/other")]


def test_options_of_subscriptions(mosquitto: Mosquitto, connect: Connect) -> None:
    got: list[Any] = []
    client = connect(mosquitto.address, None, lambda topic, payload, properties, cpt: got.append((topic, cpt & 1)))
    client.publish("kept/a", b"1", 1, retain=True).wait(5)
    client.subscribe("kept/a", retainhandling=2)
    client.subscribe("kept/b", nolocal=True)
    client.subscribe("kept/c", retainaspublished=True)
    for topic in ("kept/b", "kept/c", "kept/a"):
        client.publish(topic, b"2", 1, retain=True)
    wait_until(lambda: len(got) == 2)
    client.subscribe("kept/b")
    wait_until(lambda: len(got) == 3)
    assert got == [("kept/c", 1), ("kept/a", 0), ("kept/b", 1)]


def test_a_will_with_delay_and_properties(mosquitto: Mosquitto, connect: Connect) -> None:
    got: list[Any] = []
    watcher = connect(mosquitto.address, None, lambda *message: got.append(message[:3]))
    watcher.subscribe("wills/#")
    assert watcher.flush(5)
    will = {"topic": "wills/a", "payload": "gone", "properties": {"willdelayinterval": 1, "contenttype": "x"}}
    mortal = connect(mosquitto.address, will=will, properties={"sessionexpiryinterval": 30})
    mortal.disconnect(4)
    gevent.sleep(0.3)
    assert got == []
    wait_until(lambda: got)
    assert got == [("wills/a", b"gone", {"contenttype": "x"})]


@BOTH
def test_what_was_published_offline_is_sent(
    tmp_path: Path, connect: Connect, version: int, start_mosquitto: Start
) -> None:
    first = start_mosquitto()
    got: list[bytes] = []
    client = connect(first.address, lambda *_: 0.05, version=version)
    watcher = connect(first.address, lambda *_: 0.05, lambda topic, payload, *_: got.append(payload))
    watcher.subscribe("offline", qos=1)
    first.stop()
    wait_until(lambda: not client.connected and not watcher.connected)
    for number in range(100):
        client.publish("offline", str(number), number % 3)
    start_mosquitto(port=first.port)
    wait_until(lambda: watcher.connected and watcher.flush(1))
    wait_until(lambda: client.flush(1))
    client.publish("offline", "end", 1)
    wait_until(lambda: b"end" in got)
    assert client.connected


def test_a_session_is_resumed(mosquitto: Mosquitto, connect: Connect) -> None:
    log: list[Any] = []
    got: list[bytes] = []

    def onstatus(kind: str, code: str, status: Any) -> float:
        log.append(status.get("sessionpresent"))
        return 0.01

    client = connect(
        mosquitto.address,
        onstatus,
        lambda topic, payload, *_: got.append(payload),
        clientidentifier="resumes",
        properties={"sessionexpiryinterval": 30},
    )
    client.subscribe("resumed", qos=1)
    assert client.flush(5)
    other = connect(mosquitto.address, clientidentifier="resumes2")
    thief = connect(
        mosquitto.address, clientidentifier="resumes", cleanstart=False, properties={"sessionexpiryinterval": 30}
    )
    wait_until(lambda: log.count(True) >= 1)
    thief.close()
    other.publish("resumed", "there", 1).wait(5)
    wait_until(lambda: got == [b"there"])
    assert log[0] is False


def test_the_receive_maximum_of_mosquitto(mosquitto: Mosquitto, connect: Connect) -> None:
    client = connect(mosquitto.address)
    deliveries = [client.publish("many", b"x", 2) for _ in range(500)]
    assert client.flush(10)
    assert all(item.done and item.error is None for item in deliveries)


# ---- who is let in


@BOTH
def test_passwords(tmp_path: Path, start_mosquitto: Start, connect: Connect, version: int) -> None:
    passwords = tmp_path / "passwords"
    passwords.touch(0o700)
    subprocess.run(["mosquitto_passwd", "-b", passwords, "anna", "s3cret"], check=True, capture_output=True)
    broker = start_mosquitto(common=f"allow_anonymous false\npassword_file {passwords}\nlog_dest none\nuser root\n")
    right = connect(broker.address, version=version, username="anna", password="s3cret")
    assert right.connected
    assert connect(f"mqtt://anna:s3cret@{broker.address}", version=version).connected
    wrong = connect(broker.address, version=version, username="anna", password="guess")
    assert wrong.closed
    assert wrong.end
    assert wrong.end.status["reasoncode"] == (5 if version == 4 else 0x87)


@BOTH
def test_tls_with_a_trusted_authority(
    start_mosquitto: Start, certificates: Authority, connect: Connect, version: int
) -> None:
    broker = start_mosquitto(tls_listener(certificates))
    client = connect(f"mqtts://{broker.address}", version=version, cafile=str(certificates.path))
    assert client.publish("t", b"x", 1).wait(5)
    large = connect(broker.address, version=version, cafile=str(certificates.path))
    assert large.publish("t", b"x" * 1_000_000, 2).wait(5)


def test_client_certificates(start_mosquitto: Start, certificates: Authority, connect: Connect) -> None:
    broker = start_mosquitto(tls_listener(certificates) + "require_certificate true\n")
    cert, key = certificates.pair("client", "client.example")
    ca = str(certificates.path)
    assert connect(f"mqtts://{broker.address}", cafile=ca, certfile=str(cert), keyfile=str(key)).connected
    assert connect(f"mqtts://{broker.address}", lambda *_: None, cafile=ca).closed


UNTRUSTED = {
    "foreign": ("cn", "127.0.0.1", {}),
    "expired": ("certcn", "127.0.0.1", {"not_after": datetime.now(UTC) - timedelta(days=1)}),
    "another name": ("cert", "elsewhere.example", {}),
    "foreign and another name": ("none", "elsewhere.example", {}),
}


@pytest.mark.parametrize("what", UNTRUSTED)
def test_an_untrusted_broker_never_sees_credentials(
    tmp_path: Path, start_mosquitto: Start, certificates: Authority, connect: Connect, what: str
) -> None:
    word, host, arguments = UNTRUSTED[what]
    broker = start_mosquitto(tls_listener(certificates, "server", host, **arguments), common=COMMON)
    authority = certificates.path
    if "foreign" in what:
        (tmp_path / "foreign").mkdir()
        authority = Authority(tmp_path / "foreign").path
    log: list[Any] = []
    options: dict[str, Any] = {"cafile": str(authority), "username": "anna", "password": "s3cret"}
    client = connect(f"mqtts://{broker.address}", lambda *told: log.append(told), **options)
    assert log == [("sock", word, {})]
    assert client.closed
    assert client._endpoint._wrote_s == 0, "CONNECT was never sent"
    assert connect(f"mqtts://{broker.address}", nocheck=True, **options).connected


def test_tls_against_a_plain_port(mosquitto: Mosquitto, connect: Connect) -> None:
    log: list[Any] = []
    connect(f"mqtts://{mosquitto.address}", lambda *told: log.append(told), nocheck=True, timeout=1)
    assert log[0][0] == "sock"
    assert log[0][1] in ("sslhandshake", "timeout", "socketclosed")


# ---- other greenlets


@pytest.mark.parametrize("qos", [0, 1])
def test_a_busy_client_lets_others_have_a_turn(mosquitto: Mosquitto, connect: Connect, qos: int) -> None:
    got = 0

    def onpub(*_: Any) -> None:
        nonlocal got
        got += 1

    client = connect(mosquitto.address, None, onpub)
    client.subscribe("busy", qos=qos)
    assert client.flush(5)
    for _ in range(20_000):
        client.publish("busy", b"x" * 50, qos)
    held: list[float] = []
    gc.collect()
    gc.freeze()  # what all the tests before left behind is nothing to walk through now
    ticker = gevent.spawn(_tick, held)
    wait_until(lambda: got == 20_000, 20)
    ticker.kill()
    assert max(held) < 0.05


def _tick(held: list[float]) -> None:
    """Notes how long this process computed during each sleep; the clock would tell about other processes as well."""
    while True:
        before = process_time()
        gevent.sleep(0.001)
        held.append(process_time() - before)


# ---- arguments


WRONG: dict[str, Callable[[MqttClient], object]] = {
    "a wildcard in a topic": lambda client: client.publish("a/+"),
    "an empty topic": lambda client: client.publish(""),
    "a payload that is none": lambda client: client.publish("t", 5),  # type: ignore[arg-type]
    "a quality that is none": lambda client: client.publish("t", b"", 3),
    "a wildcard in a level": lambda client: client.subscribe("a+/b"),
    "a wildcard in the middle": lambda client: client.subscribe("#/b"),
    "a property out of range": lambda client: client.publish("t", properties={"payloadformatindicator": 7}),
    "a will without a topic": lambda client: client.setwill({"payload": "x"}),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_are_named(mosquitto: Mosquitto, connect: Connect, what: str) -> None:
    with pytest.raises(ArgumentError):
        WRONG[what](connect(mosquitto.address))


@pytest.mark.parametrize(
    "options",
    [
        {"version": 3},
        {"keepalive": -1},
        {"colour": 1},
        {"cafile": "/nowhere"},
        {"properties": {"receivemaximum": 0}},
        {"version": 4, "properties": {"receivemaximum": 0}},
    ],
)
def test_wrong_options_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        MqttClient("127.0.0.1", **options)


@pytest.mark.parametrize("address", ["http://host", "", "host:port", "mqtt://host/path"])
def test_wrong_addresses_are_named(address: str) -> None:
    with pytest.raises(ArgumentError):
        MqttClient(address)


def test_nothing_is_left_of_clients_that_ended(mosquitto: Mosquitto) -> None:
    def left() -> tuple[int, int]:
        gc.collect()
        kinds = [type(item) for item in gc.get_objects()]
        return len(list(Path("/proc/self/fd").iterdir())), kinds.count(MqttClient)

    def use_clients(count: int) -> None:
        for _ in range(count):
            with MqttClient(mosquitto.address) as client:
                client.subscribe("left")
                client.publish("left", b"x", 1).wait(5)
        del client
        gevent.sleep(0.2)

    use_clients(1)
    before = left()
    use_clients(20)
    files, clients = left()
    assert files <= before[0]  # sockets of earlier tests may go meanwhile
    assert clients == before[1]
