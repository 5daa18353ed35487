"""What operators do with sessions of MQTT clients and retained messages, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from smqrt import hub
from smqrt.broker.mqtt.messages import Message
from smqrt.errors import ArgumentError
from smqrt.operations import all_workers
from smqrt.operations.snapshots import NotFoundError
from smqrt.server.mqtt import take_mqtt
from tests.smq.test_mqtt_clients import PahoClient
from tests.support.device import Site
from tests.support.factory import Factory
from tests.support.turns import short_turns
from tests.support.waiting import wait_until


def get(*words: str, **arguments: str) -> Any:
    return all_workers.handle(None, words, arguments)  # type: ignore[arg-type]  # these answers need no parts


def post(*words: str, **body: object) -> Any:
    return all_workers.handle(None, words, {}, body)  # type: ignore[arg-type]


@pytest.fixture
def site(make_site: Callable[..., Site]) -> Site:
    site = make_site(mqtt=True)
    site.server.take_mqtt = take_mqtt
    return site


@pytest.fixture
def number(site: Site) -> str:
    return str(site.smq.broker.number)


@pytest.fixture
def connect(site: Site) -> Iterator[Callable[..., PahoClient]]:
    with Factory(lambda *arguments, **more: PahoClient(site, *arguments, **more)) as make:
        yield make


# ---- retained messages


@pytest.fixture
def kept(site: Site) -> Site:
    for topic in ("house/a/temp", "house/b/temp", "house/b/state", "garden", "$own/x"):
        site.smq.publish(topic[-5:], topic, retain=True, qos=2)
    site.smq.publish(
        b"\xff", "binary", retain=True, expiry=60, properties={"contenttype": "x", "correlationdata": b"\xff"}
    )
    return site


@pytest.mark.parametrize(
    ("filter", "topics"),
    [
        ("", ["$own/x", "binary", "garden", "house/a/temp", "house/b/state", "house/b/temp"]),
        ("#", ["binary", "garden", "house/a/temp", "house/b/state", "house/b/temp"]),
        ("house/+/temp", ["house/a/temp", "house/b/temp"]),
        ("house/#", ["house/a/temp", "house/b/state", "house/b/temp"]),
        ("garden", ["garden"]),
        ("none", []),
        ("$own/#", ["$own/x"]),
    ],
)
def test_retained_messages_are_listed_and_deleted_by_filter(
    kept: Site, number: str, filter: str, topics: list[str]
) -> None:
    found = get("mqtt-retained", hub=number, filter=filter)
    assert [one["topic"] for one in found["items"]] == topics
    assert (found["total"], found["after"]) == (len(topics), None)
    assert [name for name, _, _ in sorted(kept.smq.retained(filter))] == topics
    if filter:
        before = len(kept.state.devices.retained.by_name)
        assert post("hubs", number, "mqtt-retained", "delete", filter=filter)["deleted"] == len(topics)
        assert len(kept.state.devices.retained.by_name) == before - len(topics)
        assert get("mqtt-retained", hub=number, filter=filter)["items"] == []


def test_a_retained_message_in_a_list(kept: Site, number: str) -> None:
    (found,) = get("mqtt-retained", hub=number, filter="binary")["items"]
    assert 50 < found.pop("expires_in_s") <= 60
    assert found == {
        "topic": "binary",
        "qos": 1,
        "bytes": 1,
        "payload": "\\xff",
        "properties": {"contenttype": "x", "correlationdata": "\\xff"},
    }
    ((topic, data, attributes),) = kept.smq.retained("binary")
    assert (topic, data, attributes.qos, attributes.retain) == ("binary", b"\xff", 1, True)
    assert attributes.properties == {"contenttype": "x", "correlationdata": b"\xff"}


def test_retained_messages_come_in_pages(kept: Site, number: str) -> None:
    topics: list[str] = []
    page = {"after": ""}
    while page["after"] is not None:
        after = {"after": page["after"]} if page["after"] else {}
        page = get("mqtt-retained", hub=number, filter="house/#", limit="2", **after)
        topics += [one["topic"] for one in page["items"]]  # type: ignore[index]
    assert topics == ["house/a/temp", "house/b/state", "house/b/temp"]


def test_the_application_deletes_retained_messages(kept: Site) -> None:
    assert kept.smq.deleteretained("house/+/temp") == 2
    assert kept.smq.deleteretained("house/+/temp") == 0
    for wrong in ("", "a/#/b"):
        with pytest.raises(ArgumentError, match="topic"):
            kept.smq.deleteretained(wrong)


def test_hubs_without_mqtt_and_wrong_arguments(kept: Site, number: str) -> None:
    with hub.create() as smq:
        other = str(smq.broker.number)
        for call in (
            lambda: get("mqtt-retained", hub=other),
            lambda: post("hubs", other, "mqtt-retained", "delete", filter="#"),
            lambda: post("hubs", other, "mqtt-sessions", "delete", client="x"),
            lambda: next(smq.retained()),
            lambda: smq.deleteretained("#"),
        ):
            with pytest.raises(ArgumentError, match="accepts no MQTT clients; create it with the option mqtt$"):
                call()
    for wrong in ({}, {"filter": ""}, {"filter": 5}):
        with pytest.raises(ArgumentError, match="^filter: a topic filter is needed"):
            post("hubs", number, "mqtt-retained", "delete", **wrong)
    with pytest.raises(ArgumentError, match="hub: an argument is needed, such as /api/v1/mqtt-retained.hub=1"):
        get("mqtt-retained")
    with pytest.raises(ArgumentError, match="^state: 'x' is not one of offline, connected, all$"):
        get("mqtt-sessions", hub=number, state="x")


def test_many_retained_messages_do_not_block_the_loop(site: Site, number: str) -> None:
    """CPU time between two turns of the loop, while 30,000 messages are listed and deleted."""
    kept = site.state.devices.retained
    for at in range(30_000):
        kept.set(Message(b"house/%d/temp" % at, b"x", 0, True))
    with short_turns():
        found = get("mqtt-retained", hub=number, filter="house/+/temp", limit="10")
        assert found["total"] == 30_000
        assert post("hubs", number, "mqtt-retained", "delete", filter="+/+/temp")["deleted"] == 30_000


# ---- sessions


def test_sessions_are_listed_by_state(connect: Callable[..., PahoClient], site: Site, number: str) -> None:
    connect("asleep", keeps=True).subscribe("news", 1).close()
    connect("awake", keeps=True)
    wait_until(lambda: len(site.state.devices.offline) == 1, "one sleeps")
    site.smq.publish("x", "news")
    wait_until(lambda: site.state.devices.sessions["asleep"].waiting, "the message waits")
    found = {state: get("mqtt-sessions", hub=number, state=state)["items"] for state in ("offline", "connected", "all")}
    names = {state: [one["client_id"] for one in items] for state, items in found.items()}
    assert names == {"offline": ["asleep"], "connected": ["awake"], "all": ["asleep", "awake"]}
    asleep, awake = found["all"]
    assert (asleep["connected"], asleep["id"], asleep["waiting"], asleep["version"]) == (False, None, 1, "5")
    assert (awake["connected"], awake["ends_in_s"], awake["expiry_s"]) == (True, None, 100)
    assert get("peers", awake["id"])["uid"] == "mqtt:awake"


@pytest.mark.parametrize("version", [4, 5])
def test_a_client_is_disconnected_and_its_session_kept(
    connect: Callable[..., PahoClient], site: Site, number: str, version: int
) -> None:
    client = connect("lamp", version, keeps=True).subscribe("news", 1)
    reasons: list[int] = []
    client.client.on_disconnect = lambda _client, _data, flags, code, properties: reasons.append(code.value)
    client.client.reconnect_delay_set(100, 100)
    answer = post("hubs", number, "mqtt-sessions", "disconnect", client="lamp")
    assert answer == {"hub": int(number), "client": "lamp", "disconnected": True}
    wait_until(lambda: reasons, "the client notices it")
    assert version < 5 or reasons == [0x98]
    assert "lamp" in site.state.devices.sessions
    assert post("hubs", number, "mqtt-sessions", "disconnect", client="lamp")["disconnected"] is False


def test_a_session_is_deleted(connect: Callable[..., PahoClient], site: Site, number: str) -> None:
    connect("asleep", keeps=True).subscribe("news", 1).close()
    awake = connect("awake", keeps=True).subscribe("news", 1)
    awake.client.reconnect_delay_set(100, 100)
    wait_until(lambda: len(site.state.devices.offline) == 1, "one sleeps")
    for name in ("asleep", "awake"):
        assert post("hubs", number, "mqtt-sessions", "delete", client=name)["deleted"] is True
    assert site.state.devices.sessions == {}
    wait_until(lambda: not site.state.devices.filters.by_text, "the end of the subscriptions")
    with pytest.raises(NotFoundError, match="^client: hub . has no session 'awake'; it may have ended$|has no session"):
        post("hubs", number, "mqtt-sessions", "delete", client="awake")
    with pytest.raises(ArgumentError, match="^client: the client identifier of a session is needed"):
        post("hubs", number, "mqtt-sessions", "delete")


def test_a_will_is_published_when_an_operator_disconnects(
    connect: Callable[..., PahoClient], site: Site, number: str
) -> None:
    listener = connect("listener").subscribe("alive", 1)
    lamp = connect("lamp", will=("alive", "gone", 1, False))
    lamp.client.reconnect_delay_set(100, 100)
    (peer,) = [one for one in get("peers", hub=number)["items"] if one["uid"] == "mqtt:lamp"]
    post("peers", peer["id"], "disconnect")
    listener.receives(("alive", b"gone", 1, False))


# ---- publish


def test_publish_with_options(connect: Callable[..., PahoClient], site: Site, number: str) -> None:
    got: list[Any] = []
    listener = connect("listener")
    listener.client.on_message = lambda _client, _data, message: got.append(message)
    listener.subscribe("t", 2)
    options = {"qos": 2, "retain": True, "expiry": 60, "properties": {"contenttype": "text/plain", "a": ["1", "2"]}}
    assert post("hubs", number, "publish", topic="t", data="x", **options)["waiting"] == 0
    wait_until(lambda: got, "the message")
    assert (got[0].qos, got[0].properties.ContentType) == (2, "text/plain")
    assert got[0].properties.UserProperty == [("a", "1"), ("a", "2")]
    assert list(site.state.devices.retained.by_name) == [b"t"]
    for wrong, error in (
        ({"qos": 5}, "qos: '5'"),
        ({"retain": 1}, "retain: true or false"),
        ({"expiry": "x"}, "expiry: 'x'"),
    ):
        with pytest.raises(ArgumentError, match=f"^{error}"):
            post("hubs", number, "publish", topic="t", data="x", **wrong)
