"""Hubs with gevent: their options beside the settings of the process, their files, and their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from smqrt.broker.outbox import Slow
from smqrt.broker.state import Hooks
from smqrt.errors import ArgumentError, SmqrtError
from smqrt.process.current_process import AppScope, running_app
from smqrt.settings.limits import LimitSettings, MqttSettings, apply_limits, apply_mqtt
from smqrt.smq.gevent_broker import (
    GeventBroker,
    HubOptions,
    TopicRules,
    accept_new_clients,
    all_brokers,
    call_later,
    mqtt_broker,
    random_u32,
    set_topic_rules,
)
from smqrt.smq.hub_registry import hub_registry
from tests.cluster.engines import Client
from tests.support.waiting import wait_until

Make = Callable[..., GeventBroker]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes hubs with these options; afterwards the settings of the process are those of before."""
    made: list[GeventBroker] = []

    def make_hub(**options: Any) -> GeventBroker:
        made.append(GeventBroker(Hooks(), HubOptions(**options)))
        return made[-1]

    yield make_hub
    for one in made:
        one.close()
    accept_new_clients(True)
    set_topic_rules(TopicRules())
    apply_limits(LimitSettings(), {})
    apply_mqtt(MqttSettings())


# ---- limits


def test_options_of_a_hub_precede_the_settings(make: Make) -> None:
    own, plain = make(maxnames=7, clientnames=3), make()
    apply_limits(replace(LimitSettings(), names=20, client_names=21, subscriptions=22, observes=23), {})
    later = make()
    assert (own.limits.names, own.limits.client_names, own.limits.subscriptions, own.limits.observes) == (7, 3, 3, 3)
    for hub in (plain, later):
        assert (hub.limits.names, hub.limits.client_names) == (20, 21)
        assert (hub.limits.subscriptions, hub.limits.observes) == (22, 23)


def test_connected_clients_get_new_limits(make: Make) -> None:
    plain, own = Client(make()), Client(make(budget_bytes=5000))
    apply_limits(replace(LimitSettings(), queue_bytes=70_000, publish_rate=5.0), {})
    assert plain.session.outbox.budget_bytes == 70_000
    assert own.session.outbox.budget_bytes == 5000
    for client in (plain, own):
        limits = client.session.broker.publish_limits
        assert limits is not None
        assert limits.per_s == 5.0


def test_hubs_without_publish_limits_measure_nothing(make: Make) -> None:
    assert make().publish_limits is None


def test_policies_are_there_only_when_they_differ(make: Make) -> None:
    assert make().slow is None
    assert make(slow="newest").slow is None
    latest = make(slow="latest")
    assert latest.slow is not None
    assert latest.slow.default is Slow.LATEST
    latest.set_slow(Slow.NEWEST, {})
    assert latest.slow is None
    latest.set_slow(Slow.NEWEST, {"news/#": Slow.OLDEST})
    assert latest.slow is not None


# ---- last values


def test_last_values_are_those_of_hub_and_settings(make: Make) -> None:
    plain, own = make(), make(lastvalue=("mine",))
    assert plain.last_values is None
    set_topic_rules(TopicRules(last_values=("shared",)))
    for hub, names in ((plain, [b"shared"]), (own, [b"mine", b"shared"])):
        assert hub.last_values is not None
        topics = [hub.topic_table.named(name) for name in (b"mine", b"shared", b"other")]
        assert [topic.name for topic in topics if hub.last_values.selects(topic)] == names
    set_topic_rules(TopicRules())
    assert plain.last_values is None
    assert own.last_values is not None


def test_invalid_rules_change_nothing(make: Make) -> None:
    hub = make()
    set_topic_rules(TopicRules(last_values=("shared",)))
    with pytest.raises(ArgumentError):
        set_topic_rules(TopicRules(last_values=("a/#/b",)))
    later = make()
    for one in (hub, later):
        assert one.last_values is not None
        assert one.last_values.selects(one.topic_table.named(b"shared"))


# ---- files


class File:
    """A file of a hub.

    Attributes:
        did: what was done with all files.
    """

    def __init__(self, name: str, did: list[str], fails: bool = False) -> None:
        self.name, self.did, self.fails = name, did, fails

    def open(self) -> None:
        if self.fails:
            raise SmqrtError("the disk is full")
        self.did.append(f"open {self.name}")

    def close(self) -> None:
        self.did.append(f"close {self.name}")


def test_files_close_in_reverse_order(make: Make) -> None:
    hub, did = make(), list[str]()
    for name in "ab":
        hub.attach(File(name, did))
    hub.close_files()
    hub.open_files()
    assert did == ["open a", "open b", "close b", "close a", "open a", "open b"]


def test_a_file_that_fails_closes_those_before(make: Make) -> None:
    hub, did = make(), list[str]()
    files = [File(name, did) for name in "abc"]
    for file in files:
        hub.attach(file)
    del did[:]
    files[1].fails = True
    with pytest.raises(SmqrtError, match="the disk is full"):
        hub.open_files()
    assert did == ["open a", "close a"]


def test_files_wait_for_the_old_process(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    hub, did = make(), list[str]()
    monkeypatch.setattr(hub_registry, "is_waiting", True)
    hub.attach(File("a", did))
    assert did == []
    hub.open_files()
    assert did == ["open a"]


# ---- all hubs of the process


def test_hubs_are_listed_in_their_order_without_internal_ones(make: Make) -> None:
    before = all_brokers()
    app = AppScope(None, "console")
    app.is_internal = True
    first = make()
    with running_app(app):
        internal = make()
    second = make()
    assert [one for one in all_brokers() if one not in before] == [first, second]
    assert internal.number == 0
    first.close()
    assert first not in all_brokers()


@pytest.mark.parametrize(
    ("chosen", "hubs", "expected"),
    [
        ("", [{}, {"mqtt": True}, {"mqtt": True}], 1),
        ("*", [{}, {"mqtt": True}, {"mqtt": True}], 1),
        ("*", [{}, {}], 0),
        ("main", [{"mqtt": True}, {"name": "main"}, {"name": "other"}], 1),
        ("main", [{}, {"mqtt": True}], 1),
        ("", [{}, {}], None),
    ],
)
def test_mqtt_clients_get_the_hub_that_is_named_or_made_for_them(
    make: Make, chosen: str, hubs: list[dict[str, Any]], expected: int | None
) -> None:
    apply_mqtt(MqttSettings(hub=chosen))
    made = [make(**options) for options in hubs]
    assert mqtt_broker() is (None if expected is None else made[expected])


def test_later_hubs_reject_clients_while_a_server_drains(make: Make) -> None:
    before = make()
    accept_new_clients(False)
    assert before.draining
    assert make().draining
    accept_new_clients(True)
    assert not before.draining
    assert not make().draining


def test_a_closed_hub_is_not_found_again(make: Make) -> None:
    hub = make(name="main")
    assert hub_registry.find(hub.key) is hub
    with pytest.raises(ArgumentError, match="'main' is the name of another hub"):
        make(name="main")
    for _ in range(2):
        hub.close()
    assert hub_registry.find(hub.key) is None
    assert make(name="main").key == hub.key


def test_a_hub_whose_creation_failed_frees_its_number(make: Make) -> None:
    with running_app(AppScope(None, "chat")):
        first = make()
        first.abandon()
        assert first.closed
        assert make().key == first.key


# ---- time and chance


def test_functions_are_called_after_their_time() -> None:
    called: list[str] = []
    call_later(0.005, lambda: called.append("later"))
    call_later(0.0, lambda: called.append("soon"))
    assert called == []
    wait_until(lambda: "later" in called)
    assert called == ["soon", "later"]


def test_random_numbers_do_not_come_again() -> None:
    drawn = [random_u32() for _ in range(3000)]  # of several reads
    assert len(set(drawn)) > 2990
    assert all(0 <= number < 1 << 32 for number in drawn)
