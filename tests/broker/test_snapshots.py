"""Brokers as plain values: names, counters, last values and clients go on at another broker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from smqrt.auth.identity import Identity, Method
from smqrt.broker import sessions as module
from smqrt.broker.broker import Broker
from smqrt.broker.last_values import LastValueLimits, LastValues
from smqrt.broker.outbox import Drop, dirty
from smqrt.broker.sessions import Session, SessionState
from smqrt.broker.topics import CLIENT_NAMES, NAMES, Topic
from smqrt.wire import smq
from tests.broker.memory_clients import Crowd, Ear, heard, observe, settle, subscribe

ANN = Identity("ann", ("staff", "night"), Method.PASSWORD, b"client", "192.0.2.7", expires_s=12.5, proof="hash")


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    settle()
    dirty.clear()


@pytest.fixture
def old() -> Broker:
    return Crowd().broker


@pytest.fixture
def new() -> Broker:
    """A broker that draws other numbers."""
    crowd = Crowd()
    for _ in range(10):
        crowd.broker.random_u32()
    return crowd.broker


def client(broker: Broker, uid: bytes = b"device", identity: Identity | None = None) -> Session:
    session = Session(broker, Ear(), 5)
    session.identity = identity
    session.control(smq.connect(uid, b"", b"about me"))
    settle()
    heard(session)
    return session


# ---- names


def test_names_keep_the_numbers_clients_know(old: Broker, new: Broker) -> None:
    numbers = {name: old.create(name) for name in (b"a", b"b", b"c")}
    subs = {name: old.createsub(name) for name in (b"s", b"t")}
    for name in (b"zero", b"a", b"c"):
        new.create(name)
    new.createsub(b"zero")
    new.createsub(b"t")
    names = module.names_of(old)
    assert names["server"] == old.gettid()
    changed = module.adopt_names(new, names)
    assert sorted(changed) == [b"a", b"c", b"t"]
    assert {name: new.topic2tid(name) for name in numbers} == numbers
    assert {name: new.subtopic2tid(name) for name in subs} == subs
    assert module.adopt_names(new, names) == []


# ---- counters


def test_counters_go_on_from_there(old: Broker, new: Broker) -> None:
    for broker, factor in ((old, 1), (new, 100)):
        broker.stats.connects, broker.stats.refusals, broker.stats.closes = 1 * factor, 2 * factor, 3 * factor
        broker.stats.drops[Drop.DENIED] = 4 * factor
        broker.stats.refused[NAMES] = 5 * factor
    counters = module.counters_of(old)
    assert counters["drops"] == {"DENIED": 4}
    assert counters["refused"] == {"names": 5}
    counters["drops"]["UNKNOWN"] = 3
    module.add_counters(new, json.loads(json.dumps(counters)))
    assert (new.stats.connects, new.stats.refusals, new.stats.closes) == (101, 202, 303)
    assert (new.stats.drops[Drop.DENIED], new.stats.drops[Drop.UNROUTED]) == (404, 0)
    assert (new.stats.refused[NAMES], new.stats.refused[CLIENT_NAMES]) == (505, 0)


# ---- last values


def with_values(broker: Broker) -> Topic:
    broker.last_values = LastValues(["site/#"], LastValueLimits())
    return broker.topic_table.named(b"site/a")


def test_last_values_move_with_publisher_and_stamp(old: Broker, new: Broker) -> None:
    topic = with_values(old)
    assert old.last_values is not None
    values = old.last_values.of(topic)
    frames = [smq.publish_frame(topic.id, 7, sub, b"x") for sub in range(3)]
    values.take_frame(frames[0], ANN, 100)
    values.take_frame(frames[1], ANN, 101)
    values.take_frame(frames[2], None, 102)
    values.take_frame(smq.publish_frame(topic.id, 7, 3, b""), None, 103)
    (portion,) = module.values_of(old)
    assert len(portion["sources"]) == 2
    with_values(new)
    module.adopt_names(new, module.names_of(old))
    module.adopt_values(new, portion)
    assert new.last_values is not None
    found = new.last_values.of(new.topic_table.named(b"site/a"))
    keys = [frame[11:15] for frame in frames]
    assert [found.newest[key][0] for key in keys] == frames
    sources = [found.newest[key][1] for key in keys]
    assert sources[0] is sources[1]
    assert sources[0] is not None
    assert (sources[0].user, sources[0].groups, sources[0].method) == ("ann", ("staff", "night"), Method.PASSWORD)
    assert sources[2] is None
    assert [found.stamp(key) for key in (*keys, b"\0\0\0\3")] == [100, 101, 102, 103]
    assert found.deleted == {b"\0\0\0\3": 103}


def test_values_without_stamps_are_from_now(old: Broker, new: Broker) -> None:
    topic = with_values(old)
    assert old.last_values is not None
    old.last_values.of(topic).take_frame(smq.publish_frame(topic.id, 7, 0, b"x"), None, 1 << 61)
    (portion,) = module.values_of(old)
    del portion["stamps"]
    module.adopt_names(new, module.names_of(old))
    module.adopt_values(new, portion)  # it keeps none
    with_values(new)
    module.adopt_values(new, portion)
    assert new.last_values is not None
    found = new.last_values.of(new.topic_table.named(b"site/a"))
    assert list(found.newest) == [bytes(4)]
    assert found.stamp(bytes(4)) < 1 << 61
    new.last_values.set_filters(["other/#"])
    module.adopt_values(new, portion)
    assert new.last_values.count == 0


def test_last_values_are_sent_in_portions(monkeypatch: pytest.MonkeyPatch, old: Broker) -> None:
    assert list(module.values_of(old)) == [], "it keeps none"
    topic = with_values(old)
    assert list(module.values_of(old)) == []
    assert old.last_values is not None
    frame = smq.publish_frame(topic.id, 7, 0, b"x")
    monkeypatch.setattr(module, "PORTION_BYTES", 2 * (len(frame) + module.VALUE_BYTES))
    for sub in range(5):
        old.last_values.of(topic).take_frame(smq.publish_frame(topic.id, 7, sub, b"x"), ANN, sub)
    portions = list(module.values_of(old))
    assert [len(portion["values"]) for portion in portions] == [2, 2, 1]
    assert [len(portion["stamps"]) for portion in portions] == [2, 2, 1]
    assert [len(portion["sources"]) for portion in portions] == [1, 1, 1]
    assert [[value[2] for value in portion["values"]] for portion in portions] == [[0, 0], [0, 0], [0]]
    old.last_values.of(topic).take_frame(smq.publish_frame(topic.id, 7, 5, b"x"), ANN, 5)
    assert [len(portion["values"]) for portion in module.values_of(old)] == [2, 2, 2]


def test_an_application_gets_values_that_came_late(new: Broker) -> None:
    got: list[bytes] = []
    topic = with_values(new)
    early, once = (new.topic_table.named(name) for name in (b"site/early", b"site/once"))
    assert new.last_values is not None
    new.last_values.of(early).take_frame(smq.publish_frame(early.id, 7, 0, b"early"), None)
    new.subscribe(b"site/a", lambda data, ptid, tid, stid: got.append(data))
    new.subscribe(b"site/early", lambda data, ptid, tid, stid: got.append(data))
    new.subscribe(b"site/once", lambda data, ptid, tid, stid: got.append(data), once=True)
    settle()
    greeted = module.topics_with_values(new)
    assert greeted == {early.id}
    for one in (topic, once):
        new.last_values.of(one).take_frame(smq.publish_frame(one.id, 7, 0, b"late"), None)
    module.send_restored_values(new, greeted)
    settle()
    assert got == [b"early", b"late"]
    new.last_values = None
    assert module.topics_with_values(new) == set()


# ---- clients


def test_a_client_goes_on_with_all_it_has(old: Broker, new: Broker) -> None:
    old.clock = lambda: 42.0
    session = client(old, identity=ANN)
    topics = [subscribe(session, name) for name in (b"a", b"b")]
    session.control(bytes((smq.Type.PUBFRAG,)) + bytes(12) + b"begun")
    record = module.client_record(session)
    module.adopt_names(new, module.names_of(old))
    ear: Any = Ear()
    rights: Any = object()
    joined = module.join(new, ear, record, rights)
    assert (joined.etid, joined.uid, joined.info, joined.seed, joined.since_s) == (
        session.etid,
        b"device",
        b"about me",
        5,
        42.0,
    )
    assert (joined.names_made, joined.names_made_bytes) == (2, 2)
    assert joined.fragments == b"begun"
    assert isinstance(joined.fragments, bytearray)
    assert joined.state is SessionState.CONNECTED
    assert joined.topic_ids == topics
    own = new.topic_table.get(joined.etid)
    assert own is not None
    assert own.raw == (ear,)
    identity = joined.identity
    assert identity is not None
    assert identity.rights is rights
    for name in ("user", "groups", "method", "client_id", "address", "expires_s", "proof"):
        assert getattr(identity, name) == getattr(ANN, name)
    assert new.sessions == {session.etid: joined}
    assert new.uids == {b"device": joined}
    assert new.users == {"ann": 1}
    assert new.stats.connects == 0, "for others it never left"
    new.publish(b"x", b"a")
    settle()
    assert heard(joined) == [smq.publish_frame(topics[0], new.gettid(), 0, b"x")[2:]]


def test_a_client_without_anything_goes_on(old: Broker, new: Broker) -> None:
    record = module.client_record(client(old))
    assert (record["topics"], record["observed"], record["identity"], record["fragments"]) == ([], [], None, None)
    record["topics"] = [4711]
    joined = module.join(new, Ear(), record)
    assert (joined.topics, joined.identity, joined.fragments) == ((), None, None)


def test_a_taken_number_or_uid_is_refused(old: Broker, new: Broker) -> None:
    record = module.client_record(client(old))
    client(new)
    with pytest.raises(module.CannotJoin):
        module.join(new, Ear(), {**record, "etid": 4711})
    with pytest.raises(module.CannotJoin):
        module.join(new, Ear(), {**record, "uid": b"another", "etid": new.gettid()})
    assert len(new.sessions) == 1
    assert new.topic_table.get(4711) is None


def test_an_observer_is_notified_of_intermediate_changes(old: Broker, new: Broker) -> None:
    session, other, gone = client(old), client(old, b"device-2"), client(old, b"device-3")
    tids = [subscribe(other, name) for name in (b"a", b"b")]
    for number in (*tids, gone.etid):
        observe(session, number)
    settle()
    record = module.client_record(session)
    assert sorted(record["observed"]) == sorted([[tids[0], 1], [tids[1], 1], [gone.etid, 1]])
    module.adopt_names(new, module.names_of(old))
    joined = module.join(new, Ear(), record)
    staying = module.client_record(other)
    staying["topics"] = tids[:1]
    module.join(new, Ear(), staying)
    record["observed"].append([4711, 0])
    module.observe(joined, record)
    settle()
    assert sorted(heard(joined)) == sorted([smq.change(tids[1], 0), smq.change(gone.etid, 0)])
    topics = {new.topic_table.get(number) for number in tids}
    assert joined.observed == topics
    assert all(topic is not None and list(topic.observers) == [joined] for topic in topics)


def test_a_client_that_left_is_in_no_table(old: Broker) -> None:
    told: list[Any] = []
    old.hooks.onclose = lambda *call: told.append(call)
    session, stays = client(old, identity=ANN), client(old, b"device-2")
    number = subscribe(session, b"a")
    subscribe(stays, b"a")
    observe(session, stays.etid)
    observe(session, number)
    session.publish(smq.publish_frame(number, session.etid, 0, b"x"))
    module.leave(session)
    assert session.closed
    assert session.routes == {}
    assert (session.outbox.queue, session.topics, session.observed, session.fragments) == ([], (), None, None)
    module.forget_clients(old, {session})
    assert list(old.sessions) == [stays.etid]
    assert list(old.uids) == [b"device-2"]
    assert old.users == {}
    topic = old.topic_table.get(number)
    assert topic is not None
    topic.settle()
    assert topic.raw == (stays.outbox,)
    assert topic.observers == {}
    assert stays.topic is not None
    assert stays.topic.observers == {}
    assert old.topic_table.get(session.etid) is None
    assert old.topic_table.etid(session.etid) == session.etid, "its number is free again"
    assert told == []
