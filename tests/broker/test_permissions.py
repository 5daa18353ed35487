"""Permissions of a client: which right each request needs, and what ends when a right is taken away."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from smqrt.auth.identity import SERVER, Action, Identity
from smqrt.broker import client_limits as module
from smqrt.broker.outbox import Drop, dirty
from smqrt.broker.sessions import Session
from smqrt.errors import CloseReason
from smqrt.wire import smq
from tests.broker.memory_clients import Crowd, Ear, heard, observe, settle, subscribe


class Rights:
    """Permits pairs of action and name; keeps what it was asked."""

    def __init__(self, *permitted: tuple[Action, bytes]) -> None:
        self.permitted = set(permitted)
        self.asked: list[tuple[bytes, tuple[Action, ...]]] = []

    def permits(self, identity: Identity, name: bytes, *actions: Action) -> bool:
        self.asked.append((name, actions))
        return any((action, name) in self.permitted for action in actions)

    def permits_filter(self, identity: Identity, topic_filter: bytes, action: Action) -> bool:
        return False


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    settle()
    dirty.clear()


@pytest.fixture
def crowd() -> Crowd:
    return Crowd()


def client(crowd: Crowd, uid: bytes, identity: Identity | None) -> Session:
    session = Session(crowd.broker, Ear(), 5)
    session.identity = identity
    session.control(smq.connect(uid))
    settle()
    heard(session)
    return session


@pytest.mark.parametrize(
    ("old", "new", "may"), [("ann", "ann", True), ("ann", "bob", False), (None, "bob", True), ("ann", None, True)]
)
def test_a_uid_belongs_to_its_user(crowd: Crowd, old: str | None, new: str | None, may: bool) -> None:
    first = client(crowd, b"device-1", None if old is None else Identity(old))
    second = client(crowd, b"device-2", None if new is None else Identity(new))
    assert module.may_take_over(second, first) is may


def test_each_request_needs_its_right(crowd: Crowd) -> None:
    rights = Rights()
    session = client(crowd, b"device-1", Identity("ann", rights=rights))
    topic = crowd.broker.topic_table.named(b"t")
    ends = {
        (Action.READ,): lambda: module.may_subscribe(session, b"t"),
        (Action.WRITE, Action.OBSERVE): lambda: module.may_create(session, b"t"),
        (Action.WRITE,): lambda: module.may_publish(session, topic),
        (Action.OBSERVE,): lambda: module.may_observe(session, topic),
    }
    for actions, ask in ends.items():
        rights.permitted.clear()
        rights.asked.clear()
        assert ask() is False
        assert rights.asked == [(b"t", actions)]
        rights.permitted.add((actions[-1], b"t"))
        assert ask() is True


def test_a_new_name_needs_the_right_to_create(crowd: Crowd) -> None:
    rights = Rights((Action.READ, b"new"), (Action.WRITE, b"new"))
    session = client(crowd, b"device-1", Identity("ann", rights=rights))
    assert not module.may_subscribe(session, b"new")
    assert not module.may_create(session, b"new")
    rights.permitted.add((Action.CREATE, b"new"))
    assert module.may_subscribe(session, b"new")
    assert module.may_create(session, b"new")


def test_messages_to_clients_are_permitted_by_user(crowd: Crowd) -> None:
    rights = Rights((Action.ONETOONE, b"bob"), (Action.ONETOONE, SERVER), (Action.ONETOONE, b""))
    session = client(crowd, b"device-1", Identity("ann", rights=rights))
    receivers = [client(crowd, b"device-2", Identity("bob")), client(crowd, b"device-3", Identity("eve"))]
    clients = (*receivers, client(crowd, b"device-4", None))
    topics = [crowd.broker.topic_table.get(receiver.etid) for receiver in clients]
    for topic, may in zip((*topics, crowd.broker.server.topic), (True, False, True, True), strict=True):
        assert topic is not None
        assert module.may_publish(session, topic) is may
        assert module.may_observe(session, topic) is may


def test_clients_of_other_nodes_have_users_too(crowd: Crowd) -> None:
    rights = Rights((Action.ONETOONE, b"bob"))
    session = client(crowd, b"device-1", Identity("ann", rights=rights))
    topic = crowd.broker.topic_table.foreign(0x0200_0005, Ear())
    assert not module.may_publish(session, topic)
    phantom = type("Phantom", (), {"identity": Identity("bob")})
    cluster: Any = type("Cluster", (), {"phantom": staticmethod({topic.id: phantom}.get)})
    crowd.broker.cluster = cluster
    assert module.may_publish(session, topic)
    crowd.broker.cluster = None


def test_denied_messages_are_counted(crowd: Crowd) -> None:
    route = module.DeniedRoute(crowd.broker)
    run = smq.publish_frame(7, 8, 0, b"x") * 3
    route.deliver(run)
    route.deliver_view(memoryview(run))
    assert crowd.broker.stats.drops[Drop.DENIED] == 6


def test_lost_rights_end_what_they_permitted(crowd: Crowd) -> None:
    rights = Rights(*((action, name) for action in Action for name in (b"kept", b"lost")))
    session = client(crowd, b"device-1", Identity("ann", rights=rights))
    anonymous = client(crowd, b"device-2", None)
    numbers = {name: subscribe(session, name) for name in (b"kept", b"lost")}
    for number in numbers.values():
        observe(session, number)
        session.publish(smq.publish_frame(number, session.etid, 0, b"x"))
    settle()
    heard(session)
    rights.permitted = {pair for pair in rights.permitted if pair[1] == b"kept"}
    list(module.recheck_clients([anonymous, session], lambda identity: None))
    settle()
    assert session.routes == {}
    lost = numbers[b"lost"]
    assert heard(session) == [smq.ack(smq.Type.SUBACK, 0, b"lost"), smq.change(lost, 0)]
    assert session.topic_ids == [numbers[b"kept"]]
    assert {topic.id for topic in session.observed or ()} == {numbers[b"kept"]}


def test_a_lost_login_ends_the_client(crowd: Crowd) -> None:
    session, other = client(crowd, b"device-1", Identity("ann")), client(crowd, b"device-2", Identity("bob"))
    gone = client(crowd, b"device-3", Identity("eve"))
    gone.disconnect(CloseReason.CLIENT_DISCONNECT)
    asked: list[str] = []

    def fault(identity: Identity) -> str | None:
        asked.append(identity.user)
        return "no such user" if identity.user == "ann" else None

    steps = list(module.recheck_clients([session, other, gone], fault))
    assert len(steps) >= 3, "others run in between"
    assert asked == ["ann", "bob"]
    assert heard(session) == [smq.disconnect(b"no such user")]
    assert session.closed
    assert not other.closed
    assert crowd.broker.stats.ends[CloseReason.LOGIN_ENDED] == 1


@pytest.mark.parametrize(("expires_s", "ends"), [(None, False), (99.0, True), (100.0, True), (100.1, False)])
def test_an_expired_login_ends_the_client(crowd: Crowd, expires_s: float | None, ends: bool) -> None:
    session = client(crowd, b"device-1", Identity("ann", expires_s=expires_s))
    assert list(module.disconnect_expired([client(crowd, b"device-2", None), session], 100.0)) == []
    assert session.closed is ends
    assert heard(session) == ([smq.disconnect(b"the login has expired")] if ends else [])


def test_expired_logins_end_in_portions(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXPIRY_CHECKS_PER_STEP", 2)
    sessions = [client(crowd, b"device-%d" % n, Identity("ann", expires_s=1.0)) for n in range(5)]
    steps = module.disconnect_expired(sessions, 100.0)
    closed = [sum(one.closed for one in sessions) for _ in steps]
    assert closed == [2, 4]
    assert all(one.closed for one in sessions)
