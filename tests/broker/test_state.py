"""Shared state of the clients of a broker: lists, counters, observers, and log lines."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from smqrt.auth.identity import Identity
from smqrt.broker.broker import Broker
from smqrt.broker.outbox import Drop, dirty
from smqrt.broker.sessions import Session
from smqrt.broker.state import LOG_INTERVAL_S, Hooks
from smqrt.broker.topics import NAMES, Topic
from smqrt.errors import CloseReason
from smqrt.wire import smq
from tests.broker.memory_clients import Crowd, Ear, settle


class Cluster:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        def tell(what: Any) -> None:
            self.told.append((name, what))

        return tell


class Observer:
    def __init__(self) -> None:
        self.told: list[int] = []

    def changed(self, topic: Topic, subscribers: int) -> None:
        self.told.append(subscribers)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    settle()
    dirty.clear()


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def broker(lines: list[str]) -> Broker:
    return Crowd(Hooks(log=lambda peer, text: lines.append(text))).broker


def client(broker: Broker, uid: bytes, identity: Identity | None = None) -> Session:
    session = Session(broker, Ear(), 5)
    session.identity = identity
    session.control(smq.connect(uid))
    return session


# ---- lists


def test_users_are_counted_while_they_are_connected(broker: Broker) -> None:
    ann = Identity("ann")
    sessions = [client(broker, b"device-%d" % n, ann) for n in range(2)]
    client(broker, b"device-3")
    assert broker.users == {"ann": 2}
    assert broker.stats.connects == 3
    for left, session in zip(({"ann": 1}, {}), sessions, strict=True):
        session.disconnect(CloseReason.CLIENT_DISCONNECT)
        assert dict(broker.users) == left
    assert list(broker.uids) == [b"device-3"]
    assert broker.stats.closes == 2


def test_a_successor_with_the_uid_stays_listed(broker: Broker) -> None:
    old = client(broker, b"device-1")
    new = client(broker, b"device-2")
    broker.uids[b"device-1"] = new
    broker.deregister(old)
    assert broker.uids[b"device-1"] is new
    assert list(broker.sessions) == [new.etid]


def test_a_hook_failing_at_close_blocks_no_client(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    def fail(session: Any, reason: Any) -> None:
        raise ValueError("broken")

    left: list[Any] = []
    broker.hooks.onclose = fail
    broker.recorder = type("Recorder", (), {"left": lambda self, session: left.append(session)})()  # type: ignore[assignment]
    session = client(broker, b"device-1")
    with caplog.at_level(logging.ERROR):
        session.disconnect(CloseReason.CLIENT_DISCONNECT)
    assert broker.sessions == {}
    assert left == [session]
    assert "error in onclose" in caplog.text
    assert broker.topic_table.get(session.etid) is None


def test_a_cluster_is_notified_of_clients_and_topics(broker: Broker) -> None:
    cluster: Any = Cluster()
    cluster.holder = lambda uid: None
    broker.cluster = cluster
    session = client(broker, b"device-1")
    topic, own, ear = broker.topic_table.named(b"t"), broker.topic_table.get(session.etid), Ear()
    assert own is not None
    broker.subscribed(topic, ear)
    broker.add_observer(topic, Observer())
    broker.add_observer(own, Observer())
    broker.unsubscribed(topic, ear)
    session.disconnect(CloseReason.CLIENT_DISCONNECT)
    assert cluster.told == [
        ("entered", session),
        ("subscribed", topic),
        ("observed", topic),
        ("unsubscribed", topic),
        ("left", session),
    ]
    broker.cluster = None


# ---- counts that change


def test_every_change_of_a_count_is_reported(broker: Broker) -> None:
    seen: list[Topic] = []
    broker.on_changed = seen.append
    session = client(broker, b"device-1")
    topic, ear = broker.topic_table.named(b"t"), Ear()
    broker.subscribed(topic, ear)
    broker.unsubscribed(topic, ear)
    own = session.topic
    session.disconnect(CloseReason.CLIENT_DISCONNECT)
    settle()
    assert seen == [own, topic, topic, own]


def test_observers_are_notified_once_a_turn(broker: Broker) -> None:
    topic, observer, ears = broker.topic_table.named(b"t"), Observer(), [Ear(), Ear()]
    broker.add_observer(topic, observer)
    for ear in ears:
        broker.subscribed(topic, ear)
    assert broker.stats.subscriptions == 2
    assert observer.told == []
    settle()
    assert observer.told == [2]
    broker.unsubscribed(topic, ears[0])
    settle()
    assert observer.told == [2, 1]
    assert broker.stats.subscriptions == 1
    assert list(topic.observers) == [observer], "a named topic is observed on"


def test_an_etid_is_free_after_its_observers_know(broker: Broker) -> None:
    session, observer = client(broker, b"device-1"), Observer()
    own = broker.topic_table.get(session.etid)
    assert own is not None
    broker.add_observer(own, observer)
    session.disconnect(CloseReason.CLIENT_DISCONNECT)
    assert own.id in broker.topic_table._leaving
    settle()
    assert observer.told == [0]
    assert own.id not in broker.topic_table._leaving
    assert not own.observers
    other = client(broker, b"device-2")
    other.disconnect(CloseReason.CLIENT_DISCONNECT)
    settle()
    assert other.etid not in broker.topic_table._leaving


@pytest.mark.parametrize("observed", [False, True])
def test_a_client_of_another_node_that_is_gone(broker: Broker, observed: bool) -> None:
    topic, observer = broker.topic_table.foreign(0x0200_0005, Ear()), Observer()
    session = client(broker, b"device-1")
    session.publish(smq.publish_frame(topic.id, session.etid, 0, b"x"))
    if observed:
        broker.add_observer(topic, observer)
    broker.gone(topic)
    assert session.routes == {}
    assert broker.topic_table.get(topic.id) is None
    assert topic.subscribers == 0
    settle()
    assert observer.told == ([0] if observed else [])
    assert broker.topic_table._leaving == set()


# ---- the log


def test_a_limit_is_logged_once_an_interval(broker: Broker, lines: list[str]) -> None:
    now_s = [100.0]
    broker.clock = lambda: now_s[0]
    session = client(broker, b"device-1")
    broker.refuse(session, NAMES)
    broker.refuse(None, NAMES)
    now_s[0] += LOG_INTERVAL_S
    broker.refuse(None, NAMES)
    assert broker.stats.refused[NAMES] == 3
    assert NAMES.count == 3
    assert [line.rpartition("; ")[2] for line in lines] == ["1 times so far", "3 times so far"]
    assert "the client 'device-1'" in lines[0]
    assert "a client:" in lines[1]


def test_a_slow_client_is_logged_once_an_interval(broker: Broker, lines: list[str]) -> None:
    now_s = [100.0]
    broker.clock = lambda: now_s[0]
    session, other = client(broker, b"device-1"), client(broker, b"device-2")
    for peer in (session, session, other):
        broker.overflowed(peer, Drop.OVER_BUDGET, 2)
    assert len(lines) == 2
    now_s[0] += LOG_INTERVAL_S
    session.outbox.dropped = 7
    broker.overflowed(session, Drop.OVER_BUDGET, 2)
    assert len(lines) == 3
    assert lines[2].startswith("slow consumer: 7 messages dropped so far")
    assert broker.stats.drops[Drop.OVER_BUDGET] == 8
    session.disconnect(CloseReason.CLIENT_DISCONNECT)
    settle()
    assert session not in broker._logged_s


@pytest.mark.parametrize(("kind", "hook"), [("topic", "permittop"), ("sub-topic", "permitsubtop")])
def test_a_denied_name_is_logged_with_its_hook(
    broker: Broker, caplog: pytest.LogCaptureFixture, kind: str, hook: str
) -> None:
    session = client(broker, b"device-1")
    with caplog.at_level(logging.WARNING):
        broker.count_denial(session, "create", kind, b"n" * 200)
    assert broker.stats.denied == 1
    assert (
        f"the client 'device-1' may not create the {kind} '{'n' * 128}': {hook} of the hub returned false"
        in caplog.text
    )
