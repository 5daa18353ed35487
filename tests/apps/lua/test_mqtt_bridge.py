"""The demonstration mqtt-bridge against a real mosquitto: nothing lost or doubled, loops, limits, HTTP."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from smqrt.mqtt import MqttClient
from tests.apps.lua.bridge_site import BridgeSite, CutLink
from tests.clients.mqtt.mosquitto import Mosquitto
from tests.support.factory import Factory
from tests.support.waiting import wait_until

pytestmark = pytest.mark.servers

RULES = """return {
  broker = %s, name = "%s", mark = %s, mqtt = true,
  options = {reconnectdelay = 0.02, reconnectmax = 0.1, queuesize = %d},
  rules = {
    {mqtt = "house/", smq = "home/", way = "both", data = "json"},
    {mqtt = "sensors/", smq = "sensors/", way = "in", data = "bytes"},
    {mqtt = "commands/", smq = "commands/", way = "out", data = "bytes", qos = 2, retain = true},
  },
}"""


@pytest.fixture(scope="module")
def mosquitto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mosquitto]:
    broker = Mosquitto(tmp_path_factory.mktemp("mosquitto"))
    yield broker
    broker.stop()


@pytest.fixture
def link(mosquitto: Mosquitto) -> Iterator[Callable[..., CutLink]]:
    with Factory(partial(CutLink, mosquitto.port), CutLink.close) as start:
        yield start


@pytest.fixture
def bridge(tmp_path: Path) -> Iterator[Callable[..., BridgeSite]]:
    names = iter("abc")

    def make(address: str, name: str, mark: str = "nil", queuesize: int = 1000, preload: str = "") -> BridgeSite:
        folder = tmp_path / next(names)
        folder.mkdir()
        broker = f'"{address}"' if address else "nil"
        return BridgeSite(folder, RULES % (broker, name, mark, queuesize), preload)

    with Factory(make, BridgeSite.close) as start:
        yield start


@pytest.fixture
def device(mosquitto: Mosquitto) -> Iterator[MqttClient]:
    """Another client of the broker. It clears the retained messages of the tests."""
    with MqttClient(mosquitto.address) as client:
        assert client.wait_connected(20)
        yield client
        client.publish("commands/lamp", b"", 1, retain=True)


Bridge = Callable[..., BridgeSite]


def state_of(site: BridgeSite) -> Any:
    """What the page gets: state, counts and the latest messages."""
    answers: list[Any] = []
    client = site.client("self", lambda data, *_: answers.append(data), datatype="json")
    client.publish("", "bridge/ask")
    wait_until(lambda: answers)
    client.close()
    return answers[0]


def is_connected(site: BridgeSite) -> bool:
    """Wait until the bridge has its subscriptions: it publishes its state after the CONNACK."""
    return bool(wait_until(lambda: state_of(site)["state"]["connected"]))


def test_nothing_is_lost_or_doubled_by_cuts(bridge: Bridge, link: Callable[..., CutLink], device: MqttClient) -> None:
    count = 600
    wire = link(1500, 15)
    site = bridge(wire.address, "cut-bridge")
    got: Counter[bytes] = Counter()
    site.client("sensors/a", lambda data, *_: got.update([data]))
    assert is_connected(site)
    for number in range(count):
        device.publish("sensors/a", b"%d" % number, 2)
    wait_until(lambda: len(got) == count, "all messages", 30)
    device.publish("sensors/a", b"last", 2)
    wait_until(lambda: got[b"last"])
    assert wire.connections > 5
    assert sum(got.values()) - len(got) == 0  # none is doubled


def test_messages_of_a_time_without_a_connection(
    bridge: Bridge, link: Callable[..., CutLink], device: MqttClient
) -> None:
    wire = link()
    site = bridge(wire.address, "absent-bridge")
    assert is_connected(site)
    site.unload()  # another one begins later
    for number in range(50):
        assert device.publish("sensors/a", b"%d" % number, 1).wait(10)
    later = bridge(wire.address, "absent-bridge")
    wait_until(lambda: state_of(later)["counts"]["in"] == 50)
    assert [item["text"] for item in state_of(later)["items"]] == [str(number) for number in range(10, 50)]


def test_topics_and_attributes(bridge: Bridge, mosquitto: Mosquitto, device: MqttClient) -> None:
    site = bridge(mosquitto.address, "attribute-bridge")
    got: list[Any] = []

    def onpub(topic: str, payload: bytes, properties: Any, cpt: int) -> None:
        got.append((topic, payload, cpt & 7, properties["bridge"], properties.get("subtopic")))

    device.subscribe("commands/#", onpub, qos=2, retainaspublished=True)
    device.subscribe("house/lamp", onpub, qos=2, nolocal=True)
    assert device.flush(20)
    heard: list[Any] = []
    client = site.client("home/lamp", lambda data, _, tid, subtid: heard.append(("", data)))
    client.subscribe("home/lamp", subtopic="dim", onmsg=lambda data, *_: heard.append(("dim", data)))
    assert is_connected(site)
    client.publish("go", "commands/lamp")
    client.publish('{"level": 1}', "home/lamp", "dim")
    wait_until(lambda: len(got) == 2, got)
    name = "attribute-bridge"
    assert sorted(got) == [
        ("commands/lamp", b"go", 2 << 1 | 1, name, None),  # QoS 2, retained
        ("house/lamp", b'{"level": 1}', 1 << 1, name, "dim"),
    ]
    wait_until(lambda: heard == [("dim", b'{"level": 1}')], heard)
    device.publish("house/lamp", "{}", 1, properties={"subtopic": "dim"})
    device.publish("house/lamp", "[]", 1)
    wait_until(lambda: heard[1:] == [("dim", b"{}"), ("", b"[]")], heard)


def test_properties_of_mqtt_5(bridge: Bridge, mosquitto: Mosquitto, device: MqttClient) -> None:
    site = bridge(mosquitto.address, "property-bridge")
    assert is_connected(site)
    got: dict[str, Any] = {}

    def onpub(topic: str, payload: bytes, properties: Any, cpt: int) -> None:
        got[topic] = (payload, cpt >> 1 & 3, dict(properties))

    sent = {
        "contenttype": "text/plain",
        "payloadformatindicator": 1,
        "correlationdata": b"\0id",
        "messageexpiryinterval": 60,
        "colour": ["red", "blue"],
    }
    with MqttClient(site.url.replace("http", "ws")) as near:
        near.subscribe("home/#", onpub, qos=2)
        device.subscribe("house/#", onpub, qos=2, nolocal=True)
        device.subscribe("commands/#", onpub, qos=2)
        assert near.flush(20)
        assert device.flush(20)
        device.publish("house/ask", "{}", 2, properties=sent | {"responsetopic": "house/answer", "subtopic": "s"})
        near.publish("home/order", "{}", 1, properties=sent | {"responsetopic": "home/answer", "bridge": "other"})
        near.publish("commands/a", "x", 1, properties={"responsetopic": "elsewhere"})
        near.publish("commands/loop", "x", 1, properties={"bridge": "property-bridge"})
        wait_until(lambda: got.keys() >= {"home/ask", "house/order", "commands/a"}, got)
    for name, expected in (("home/ask", "home/answer"), ("house/order", "house/answer")):
        payload, qos, properties = got[name]
        assert (payload, properties.pop("responsetopic")) == (b"{}", expected)
        assert 50 < properties.pop("messageexpiryinterval") <= 60
        marks, _ = properties.pop("bridge", None), properties.pop("subscriptionidentifier", None)
        if name == "home/ask":
            assert (qos, marks, properties.pop("subtopic")) == (2, None, "s")
        else:
            assert (qos, marks) == (1, ["other", "property-bridge"])
        assert properties == {one: value for one, value in sent.items() if one != "messageexpiryinterval"}
    properties = got["commands/a"][2]
    assert (properties["responsetopic"], properties["bridge"]) == ("elsewhere", "property-bridge")
    wait_until(lambda: state_of(site)["counts"]["dropped"] == 1, "the looping message")
    assert "commands/loop" not in got


def test_bridges_with_one_mark_do_not_pass_messages_to_each_other(
    bridge: Bridge, mosquitto: Mosquitto, device: MqttClient
) -> None:
    sites = [bridge(mosquitto.address, name, '"both"') for name in ("left", "right")]
    heard: list[list[bytes]] = [[], []]
    clients = [
        site.client("home/x", lambda data, *_, into=into: into.append(data))
        for site, into in zip(sites, heard, strict=True)
    ]
    assert all(map(is_connected, sites))
    got: list[bytes] = []
    device.subscribe("house/x", lambda topic, payload, *_: got.append(payload), qos=1)
    assert device.flush(20)
    clients[0].publish("[1]", "home/x")
    wait_until(lambda: got == [b"[1]"], got)
    device.publish("house/x", "[2]", 1)  # behind what would return
    wait_until(lambda: b"[2]" in heard[0] and b"[2]" in heard[1], heard)
    assert heard == [[b"[1]", b"[2]"], [b"[2]"]]
    assert got == [b"[1]", b"[2]"]


def test_the_queue_has_a_limit(bridge: Bridge, link: Callable[..., CutLink]) -> None:
    wire = link()
    wire.close()  # no broker
    site = bridge(wire.address, "full-bridge", queuesize=10)
    counts: list[Any] = []
    client = site.client("bridge/flow", lambda data, *_: counts.append(data["counts"]), datatype="json")
    for number in range(25):
        client.publish(f"[{number}]", "home/x")
    wait_until(lambda: counts and counts[-1]["dropped"] == 15, counts)
    assert (counts[-1]["queued"], counts[-1]["out"]) == (10, 10)


def test_without_another_broker(bridge: Bridge) -> None:
    site = bridge("", "own-broker")
    ask, text = site.site.server.ask, {"Content-Type": "text/plain"}
    state = state_of(site)["state"]
    assert (state["connected"], state["broker"], state["rules"]) == (True, "this server", {})
    got: list[Any] = []
    heard: list[bytes] = []
    site.client("home/lamp", lambda data, *_: heard.append(data))
    with MqttClient(site.url.replace("http", "ws")) as client:
        client.subscribe("home/#", lambda *message: got.append(message[:2]), qos=1)
        assert client.flush(20)
        client.publish("home/lamp", '{"on": true}', 1).wait(20)
        wait_until(lambda: heard == [b'{"on": true}'], heard)
        assert ask("/topics/home/lamp").body == b'{"on": true}'
        assert ask("/topics/home/lamp", "POST", b"[]", text).status == 204
        wait_until(lambda: got == [("home/lamp", b'{"on": true}'), ("home/lamp", b"[]")], got)
    assert state_of(site)["counts"]["in"] == 1


# ---- HTTP


def test_http(bridge: Bridge, mosquitto: Mosquitto, device: MqttClient) -> None:
    site = bridge(mosquitto.address, "http-bridge")
    ask, text = site.site.server.ask, {"Content-Type": "text/plain"}
    got: list[Any] = []
    device.subscribe("house/#", lambda *message: got.append(message[:2]), qos=1)
    assert device.flush(20)
    heard: list[bytes] = []
    site.client("home/door", lambda data, *_: heard.append(data))
    assert is_connected(site)
    assert ask("/topics/home/door").status == 404
    answer = ask("/topics/home/door", "POST", b'{"open": true}', text)
    assert (answer.status, answer.body) == (204, b"")
    wait_until(lambda: got == [("house/door", b'{"open": true}')] and heard == [b'{"open": true}'], (got, heard))
    answer = ask("/topics/home/door")
    assert (answer.status, json.loads(answer.body)) == (200, {"open": True})
    assert answer.headers["Content-Type"] == "application/json"
    device.publish("sensors/raw", b"\0\1", 1).wait(10)
    wait_until(lambda: ask("/topics/sensors/raw").body == b"\0\1")
    assert ask("/topics/sensors/raw").headers["Content-Type"] == "application/octet-stream"
    assert ask("/topics/home/door", "POST", b"no JSON", text).status == 400
    assert ask("/topics/sensors/raw", "POST", b"1", text).status == 404  # only from MQTT
    assert ask("/topics/bridge/out", "POST", b"1", text).status == 404
    assert ask("/topics/commands/a", "POST", b"x" * 65521, text).status == 413
    assert ask("/topics/home/door", "DELETE").status == 405
    assert ask("/topics/home/door", "POST", b"{}", text | {"Sec-Fetch-Site": "cross-site"}).status == 403
    assert len(got) == 1


def test_http_needs_the_login_of_the_application(bridge: Bridge, mosquitto: Mosquitto) -> None:
    login = """
    local users = ba.create.jsonuser()
    users:set {ann = {pwd = "secret", roles = {}}}
    dir:setauth(ba.create.authenticator(users, {type = "basic", realm = "bridge"}))
    """
    site = bridge(mosquitto.address, "login-bridge", preload=login)
    ask, text = site.site.server.ask, {"Content-Type": "text/plain"}
    ann = {"Authorization": "Basic YW5uOnNlY3JldA=="}
    assert ask("/topics/home/a").status == 401
    assert ask("/topics/home/a", "POST", b"{}", text).status == 401
    assert ask("/topics/home/a", "POST", b"{}", text | ann).status == 204
    assert ask("/topics/home/a", headers=ann).body == b"{}"


def test_the_page_does_not_get_the_password(bridge: Bridge, mosquitto: Mosquitto) -> None:
    site = bridge(f"mqtt://anna:secret@{mosquitto.address}", "secret-bridge")
    assert state_of(site)["state"]["broker"] == f"mqtt://{mosquitto.address}"
