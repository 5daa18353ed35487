"""Traces: what an operator is told of one client or one topic, and what is left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from smqrt.broker import routes as module
from smqrt.broker.outbox import dirty
from smqrt.broker.routes import Trace, TracedRoute
from smqrt.errors import CloseReason
from smqrt.wire import smq
from smqrt.wire.smq import Type
from tests.broker.memory_clients import Crowd, Ear, observe, settle, subscribe


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    settle()
    dirty.clear()


@pytest.fixture
def crowd() -> Crowd:
    return Crowd()


def started(crowd: Crowd, uid: bytes | None = None, topic: bytes | None = None) -> tuple[Trace, list[None]]:
    woken: list[None] = []
    trace = Trace(crowd.broker, uid, topic, lambda: woken.append(None))
    trace.start()
    return trace, woken


def events(trace: Trace) -> list[str]:
    return [str(event["event"]) for event in trace.take()]


def test_a_client_is_traced_from_connect_to_close(crowd: Crowd) -> None:
    trace, woken = started(crowd, uid=b"device")
    session, other = crowd.client(b"device"), crowd.client(b"device-2")
    number = subscribe(session, b"t")
    for kind, name in ((Type.CREATE, b"c"), (Type.CREATESUB, b"s")):
        session.control(smq.with_name(kind, name))
    observe(session, number)
    observe(session, other.etid)
    for kind in (Type.UNOBSERVE, Type.UNSUBSCRIBE):
        session.control(smq.with_id(kind, number))
    subscribe(other, b"t")
    session.control(smq.PING)
    session.disconnect(CloseReason.SHUTDOWN, None, "x" * 300)
    other.disconnect(CloseReason.SHUTDOWN)
    who: dict[str, Any] = {"etid": session.etid, "uid": "device"}
    assert trace.take() == [
        {"event": "connect", **who, "info": ""},
        {"event": "subscribe", **who, "topic": "t"},
        {"event": "create", **who, "topic": "c"},
        {"event": "createsub", **who, "topic": "s"},
        {"event": "observe", **who, "topic": "t"},
        {"event": "observe", **who, "topic": other.etid},
        {"event": "unobserve", **who, "topic": "t"},
        {"event": "unsubscribe", **who, "topic": "t"},
        {"event": "close", **who, "reason": "shutdown", "detail": "x" * module.MAX_NAME_SHOWN_BYTES},
    ]
    assert len(woken) == 9
    assert trace.take() == []


def test_a_topic_is_traced_for_every_client(crowd: Crowd) -> None:
    trace, _ = started(crowd, topic=b"t")
    sessions = [crowd.client() for _ in range(2)]
    for session in sessions:
        number = subscribe(session, b"t")
        subscribe(session, b"u")
        session.control(smq.with_name(Type.CREATESUB, b"t"))
        session.control(smq.with_id(Type.UNSUBSCRIBE, number))
        observe(session, sessions[0].etid)
    assert events(trace) == ["subscribe", "unsubscribe"] * 2


def test_short_packets_are_not_traced(crowd: Crowd) -> None:
    trace, _ = started(crowd, uid=b"device")
    session = crowd.client(b"device")
    trace.take()
    for packet in (b"", b"\x09\0\0\0"):
        trace.packet(session, packet)
    assert trace.take() == []
    trace.packet(session, b"\x09\0\0\0\0")
    assert events(trace) == ["unsubscribe"]


def test_messages_are_shown_with_their_beginning(crowd: Crowd) -> None:
    session, ear = crowd.client(b"device"), Ear()
    topic = crowd.broker.topic_table.named(b"t")
    topic.add(ear)
    sub = crowd.broker.createsub(b"sub\xff")
    session.publish(smq.publish_frame(topic.id, session.etid, 0, b"before"))
    trace, _ = started(crowd, uid=b"device")
    for stid in (0, sub, 12345):
        session.publish(smq.publish_frame(topic.id, session.etid, stid, b"x" * 100))
    session.publish(smq.publish_frame(4711, session.etid, 0, b"x"))
    who: dict[str, Any] = {"event": "publish", "etid": session.etid, "uid": "device"}
    message = {**who, "topic": "t", "subscribers": 1, "bytes": 100, "payload": "x" * module.MAX_PAYLOAD_SHOWN_BYTES}
    assert trace.take() == [
        {**message, "subtopic": None},
        {**message, "subtopic": "sub\\xff"},
        {**message, "subtopic": 12345},
        {**who, "topic": 4711, "subtopic": None, "subscribers": 0, "bytes": 1, "payload": "x"},
    ]
    settle()
    assert len(ear.got) == 4
    trace.stop()
    trace.stop()
    assert crowd.broker.traces == ()
    session.publish(smq.publish_frame(topic.id, session.etid, 0, b"after"))
    assert trace.take() == []


def test_of_a_bulk_sender_the_rest_is_counted(crowd: Crowd) -> None:
    session = crowd.client(b"device")
    number = crowd.broker.create(b"t")
    trace, _ = started(crowd, uid=b"device")
    frame = smq.publish_frame(number, session.etid, 0, b"x")
    session.publish(frame * module.MAX_FRAMES_SHOWN)
    assert events(trace) == ["publish"] * module.MAX_FRAMES_SHOWN
    session.publish(frame * (module.MAX_FRAMES_SHOWN + 2))
    *shown, rest = trace.take()
    assert len(shown) == module.MAX_FRAMES_SHOWN
    assert rest == {"event": "more", "etid": session.etid, "uid": "device", "topic": "t", "bytes": 2 * len(frame)}


def test_unread_events_are_counted(monkeypatch: pytest.MonkeyPatch, crowd: Crowd) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_EVENTS", 2)
    trace, woken = started(crowd, uid=b"device")
    for _ in range(5):
        trace.add("tick")
    assert trace.take() == [{"event": "tick"}] * 2 + [{"event": "missed", "events": 3}]
    assert len(woken) == 2
    trace.add("tick")
    assert trace.take() == [{"event": "tick"}]


def test_only_concerned_routes_are_traced(crowd: Crowd) -> None:
    session, other = crowd.client(b"device"), crowd.client(b"device-2")
    topic, untraced = (crowd.broker.topic_table.named(name) for name in (b"t", b"u"))
    trace, _ = started(crowd, uid=b"device")
    by_topic, _ = started(crowd, topic=b"t")
    broker, route = crowd.broker, topic
    assert module.traced(broker, route, untraced, other) is route
    assert module.traced(broker, route, None, other) is route
    for one, peer in ((untraced, session), (topic, other), (None, session)):
        found = module.traced(broker, route, one, peer)
        assert isinstance(found, TracedRoute)
    module.traced(broker, route, topic, session).deliver(smq.publish_frame(topic.id, session.etid, 0, b"x"))
    assert (events(trace), events(by_topic)) == (["publish"], ["publish"])


def test_a_traced_route_delivers_and_reports_waiting_publishers(crowd: Crowd) -> None:
    got: list[bytes] = []

    class Waits:
        def deliver(self, run: bytes) -> bool:
            got.append(run)
            return True

        def deliver_view(self, view: memoryview) -> bool:
            got.append(bytes(view))
            return True

    session = crowd.client(b"device")
    topic = crowd.broker.topic_table.named(b"t")
    trace, _ = started(crowd, uid=b"device")
    route = module.traced(crowd.broker, Waits(), topic, session)
    run = smq.publish_frame(topic.id, session.etid, 0, b"x")
    assert route.deliver(run) is True
    assert route.deliver_view(memoryview(run)) is True
    assert got == [run, run]
    assert events(trace) == ["publish", "publish"]
