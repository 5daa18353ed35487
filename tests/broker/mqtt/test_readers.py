"""`mqtt.acl = "deliver"`: each filter is granted, and the access control list decides about each topic."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from smqrt.auth.identity import AclRights, Identity, parse
from smqrt.broker.client_limits import recheck_clients
from smqrt.broker.mqtt.records import restore_session, session_record
from smqrt.broker.outbox import Drop, flush_dirty
from smqrt.settings.limits import MqttSettings
from tests.broker.memory_clients import settle
from tests.broker.mqtt.memory_devices import DeviceHub, MemoryDevice
from tests.conformance.mqtt_script import data_of
from tests.support.garbage import no_collections

LIST = """\
deny  ada read  house/cellar
allow ada read  house/+
allow eve read  garden
"""


class Rules:
    """A hub with an access control list that a test replaces."""

    def __init__(self, mode: str = "deliver", text: str = LIST) -> None:
        self.hub = DeviceHub(limits=MqttSettings(acl=mode))
        self.rights = AclRights(Path("acl.txt"))
        self.rights.acl = parse(text, "acl.txt")
        self.sender = self.connected("sender", None)

    def connected(self, name: str, user: str | None, clean: bool = True) -> MemoryDevice:
        device = self.hub.device()
        if user is not None:
            device.session.identity = Identity(user, rights=self.rights)
        device.feed(data_of(f"{'C' if clean else 'K'} {name}", 5))
        assert device.take()[0] == 0x20
        return device

    def subscribed(self, name: str, user: str, script: str, clean: bool = True) -> MemoryDevice:
        device = self.connected(name, user, clean)
        device.feed(data_of(f"82: 00 01 P {script}", 5))
        return device

    def publish(self, *names: str, qos: int = 0) -> None:
        for number, name in enumerate(names, 1):
            self.sender.feed(data_of(f"3{2 * qos}: '{name}' {f'00 0{number}' if qos else ''} P ~x", 5))
        settle()

    def reload(self, text: str) -> None:
        self.rights.acl = parse(text, "acl.txt")
        for _ in recheck_clients(list(self.hub.broker.sessions.values()), lambda identity: None):  # type: ignore[arg-type]
            pass


def topics(data: bytes) -> list[str]:
    """The topics of PUBLISH packets of this test."""
    found = []
    while data:
        assert data[0] >> 4 == 3, data
        found.append(data[4 : 4 + data[3]].decode())
        data = data[2 + data[1] :]
    return found


def test_messages_of_denied_topics_are_left_out() -> None:
    rules = Rules()
    ada = rules.subscribed("a", "ada", "'#' 00 'house/cellar' 00 'house/attic' 00")
    assert ada.take() == data_of("90: 00 01 P 00 87 00", 5), "a name that is denied is no filter"
    rules.publish("house/attic", "house/cellar", "garden", "house/attic", "house/cellar")
    assert topics(ada.take()) == ["house/attic", "house/attic"]
    assert sum(rules.rights.denied.values()) == 1, "those that are left out are no denials"


def test_subscribers_have_different_rights_to_one_topic() -> None:
    rules = Rules()
    ada, eve = rules.subscribed("a", "ada", "'#' 00"), rules.subscribed("e", "eve", "'#' 00")
    other = rules.connected("o", None)
    other.feed(data_of("82: 00 01 P '#' 00", 5))
    for device in (ada, eve, other):
        device.take()
    rules.publish("house/attic", "garden")
    assert [topics(one.take()) for one in (ada, eve, other)] == [["house/attic"], ["garden"], ["house/attic", "garden"]]


def test_the_default_judges_filters_as_a_whole() -> None:
    rules = Rules("subscribe")
    assert rules.subscribed("a", "ada", "'#' 00 'house/+' 00").take() == data_of("90: 00 01 P 87 87", 5)
    assert not rules.hub.devices.readers.is_used


def test_the_list_is_asked_once_for_a_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = Rules()
    ada = rules.subscribed("a", "ada", "'house/#' 00")
    ada.take()
    asked: list[Any] = []
    decide = rules.rights.allows
    monkeypatch.setattr(rules.rights, "allows", lambda *about: (asked.append(about[1]), decide(*about))[1])
    for _ in range(5):
        rules.publish("house/attic", "house/cellar")
    assert topics(ada.take()) == ["house/attic"] * 5
    assert asked == [b"house/attic", b"house/cellar"]
    rules.subscribed("b", "ada", "'house/#' 00").take()
    rules.publish("house/attic")
    assert len(asked) == 4, "the subscribers have changed"


def test_retained_messages() -> None:
    rules = Rules()
    rules.sender.feed(data_of("31: 'house/attic' P ~1 / 31: 'house/cellar' P ~2 / 31: 'garden' P ~3", 5))
    ada = rules.subscribed("a", "ada", "'#' 00")
    assert ada.take() == data_of("90: 00 01 P 00 / 31: 'house/attic' P ~1", 5)


def test_a_shared_subscription_chooses_a_member_that_may_read() -> None:
    rules = Rules()
    ada, eve = (rules.subscribed(user, user, "'$share/g/#' 00") for user in ("ada", "eve"))
    ada.take()
    eve.take()
    rules.publish("house/attic", "house/attic", "garden", "nobody", "house/attic")
    assert topics(ada.take()) == ["house/attic"] * 3
    assert topics(eve.take()) == ["garden"]


def test_a_reload() -> None:
    rules = Rules()
    ada = rules.subscribed("a", "ada", "'house/#' 00 'house/attic' 00")
    ada.take()
    rules.publish("house/attic", "house/cellar")
    assert topics(ada.take()) == ["house/attic"]
    rules.reload("allow ada read house/cellar\n")
    rules.publish("house/attic", "house/cellar")
    assert topics(ada.take()) == ["house/cellar"]
    assert list(ada.session.device.subscriptions) == ["house/#"]  # type: ignore[union-attr]


def test_a_filter_that_was_granted_as_a_whole_is_filtered_after_a_reload() -> None:
    rules = Rules(text="allow ada read #\n")
    ada = rules.subscribed("a", "ada", "'house/#' 00")
    ada.take()
    rules.publish("house/attic", "house/cellar")
    assert len(topics(ada.take())) == 2
    rules.reload(LIST)
    rules.publish("house/attic", "house/cellar")
    assert topics(ada.take()) == ["house/attic"]


@pytest.mark.parametrize("restored", [False, True])
def test_a_session_without_a_connection(restored: bool) -> None:
    """It gets what its user may read; what waits is checked again when the client returns."""
    rules = Rules()
    ada = rules.subscribed("a", "ada", "'house/#' 01", clean=False)
    ada.take()
    ada.lost()
    if restored:
        devices = rules.hub.devices
        record = session_record(devices.sessions["a"])
        devices.end(devices.sessions["a"])
        settle()
        restore_session(devices, record)
    rules.publish("house/attic", "house/cellar", "house/hall", qos=1)
    assert len(rules.hub.devices.sessions["a"].waiting) == (3 if restored else 2)
    rules.reload("allow ada read house/hall\n")
    back = rules.hub.device()
    back.session.identity = Identity("ada", rights=rules.rights)
    back.feed(data_of("K a", 5))
    got = back.take()
    assert got[2] == 1, "the session was kept"
    assert topics(got[2 + got[1] :]) == ["house/hall"]
    assert rules.hub.broker.stats.drops[Drop.DENIED] == (2 if restored else 1)


def test_filters_of_a_session_are_checked_when_its_client_returns() -> None:
    rules = Rules("subscribe", "allow ada read house/#\n")
    ada = rules.subscribed("a", "ada", "'house/#' 01 'house/attic' 01", clean=False)
    ada.take()
    ada.lost()
    rules.rights.acl = parse("allow ada read house/attic\n", "acl.txt")
    back = rules.connected("a", "ada", clean=False)
    settle()
    assert list(back.session.device.subscriptions) == ["house/attic"]  # type: ignore[union-attr]


def test_questions_about_many_subscribers_take_turns() -> None:
    rules = Rules(text="".join(f"allow u{number} read house/{number}\n" for number in range(3000)))
    rules.hub.broker.clock = time.monotonic
    for number in range(300):
        rules.subscribed(f"c{number}", f"u{number}", "'house/+' 00").take()
    rules.sender.feed(data_of("30: 'house/7' P ~x", 5))
    longest, more = 0.0, True
    with no_collections():
        while more:
            begin = time.thread_time()
            more = flush_dirty(time.monotonic)
            longest = max(longest, time.thread_time() - begin)
    assert longest < 0.05
    sent = rules.hub.devices.counts.delivered
    assert sent == 1
