"""Routes that are more than a topic, and the queues of the server's own client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from smqrt.broker import server_client
from smqrt.broker.deferred import Deferred
from smqrt.broker.outbox import Drop, dirty
from smqrt.broker.routes import (
    DurableRoute,
    GuardedRoute,
    HandledRoute,
    RecordedRoute,
    SkippedRoute,
    UnroutedRoute,
    destination,
    is_behind,
    is_received,
    recorded_destination,
)
from smqrt.broker.server_client import HandlerQueue
from smqrt.broker.sessions import Session
from smqrt.broker.state import Hooks
from smqrt.broker.topics import Topic
from smqrt.wire import smq
from tests.broker.memory_clients import Crowd, Ear, settle


class Journal:
    """A recorder that keeps the order of its calls."""

    def __init__(self, waits_for_disk: bool = False, selected: bool = True) -> None:
        self.full, self.waits_for_disk, self.selected = False, waits_for_disk, selected
        self.calls: list[tuple[str, bytes]] = []
        self.later: list[tuple[Callable[[bytes], Any], bytes]] = []
        self.held: list[Any] = []

    def selects(self, topic: Topic | None) -> bool:
        return self.selected

    def record(self, run: bytes) -> None:
        self.calls.append(("record", run))

    def record_large(self, run: bytes) -> None:
        self.calls.append(("large", run))

    def record_of(self, peer: Any) -> Callable[[bytes], None]:
        return self.record

    def record_unrouted(self, run: bytes) -> None:
        self.calls.append(("unrouted", run))

    def record_assembled(self, deliver: Callable[[bytes], bool | None], run: bytes) -> bool:
        return bool(deliver(run))

    def skipped(self, run: bytes) -> None:
        self.calls.append(("skipped", run))

    def hold(self, publisher: Any) -> bool:
        self.held.append(publisher)
        return True

    def send_later(self, deliver: Callable[[bytes], bool | None], run: bytes, publisher: Any) -> bool:
        self.later.append((deliver, run))
        return True

    def left(self, client: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    settle()
    dirty.clear()


class NodeSendQueue:
    """From a client to a topic with one subscriber."""

    def __init__(self, hooks: Hooks | None = None, journal: Journal | None = None) -> None:
        self.crowd = Crowd(hooks)
        self.broker = self.crowd.broker
        self.broker.record(journal)
        self.publisher: Session = self.crowd.client()
        self.topic, self.subscriber = self.broker.topic_table.named(b"lamp"), Ear()
        self.topic.add(self.subscriber)
        self.run = smq.publish_frame(self.topic.id, self.publisher.etid, 0, b"x")

    def route(self, tid: int | None = None) -> Any:
        to = self.topic.id if tid is None else tid
        return destination(self.broker, to, self.publisher.etid, self.publisher)


def test_the_route_to_a_topic_is_the_topic() -> None:
    way = NodeSendQueue()
    assert way.route() is way.topic


def test_undelivered_messages_are_counted_and_reach_ondrop() -> None:
    shown: list[tuple[Any, ...]] = []
    way = NodeSendQueue(Hooks(ondrop=lambda *call: shown.append(call)))
    route = way.route(4711)
    assert isinstance(route, UnroutedRoute)
    route.deliver_view(memoryview(way.run * 2))
    assert way.broker.stats.drops[Drop.UNROUTED] == 2
    assert shown == [(way.run * 2, 4711, way.publisher.etid, way.publisher)]


def test_a_run_is_recorded_before_it_is_delivered() -> None:
    journal = Journal()
    way = NodeSendQueue(journal=journal)
    route = way.route()
    assert type(route) is RecordedRoute
    assert not route.deliver(way.run)
    assert (journal.calls, way.subscriber.queue) == ([("record", way.run)], [way.run])
    journal.full = True
    assert route.sole_raw is None
    assert route.deliver_view(memoryview(way.run))
    assert journal.held == [way.publisher]


def test_undelivered_messages_are_recorded_as_such() -> None:
    journal = Journal()
    way = NodeSendQueue(journal=journal)
    way.route(4711).deliver(way.run)
    assert journal.calls == [("unrouted", way.run)]


def test_messages_refused_by_the_journal_are_counted() -> None:
    journal = Journal(selected=False)
    way = NodeSendQueue(journal=journal)
    route = way.route()
    assert isinstance(route, SkippedRoute)
    route.deliver(way.run)
    assert (journal.calls, way.subscriber.queue) == ([("skipped", way.run)], [way.run])


def test_only_synced_messages_are_delivered() -> None:
    journal = Journal(waits_for_disk=True)
    way = NodeSendQueue(journal=journal)
    route = way.route()
    assert isinstance(route, DurableRoute)
    assert route.deliver(way.run)
    assert way.subscriber.queue == []
    deliver, run = journal.later.pop()
    deliver(run)
    assert way.subscriber.queue == [way.run]


def test_publishers_wait_for_slow_handlers() -> None:
    way = NodeSendQueue()
    server = way.broker.server
    server.subscribe(way.topic, None)
    route = way.route()
    assert isinstance(route, HandledRoute)
    assert not route.deliver(way.run)
    server.behind = True
    assert route.deliver(way.run)
    assert destination(way.broker, way.topic.id, server.etid, server) is way.topic, "the server itself does not wait"


# ---- onpublish


@pytest.mark.parametrize("late", [False, True])
def test_onpublish_says_which_messages_pass(late: bool) -> None:
    answer: Deferred[bytes] = Deferred()
    way = NodeSendQueue(Hooks(onpublish=lambda run, *_: answer if late else run[: len(run) // 2]))
    route = GuardedRoute(way.broker, way.topic.id, way.publisher.etid, way.publisher)
    assert route.deliver(way.run * 2) is late
    if late:
        assert way.subscriber.queue == []
        answer.resolve(way.run)
    assert way.subscriber.queue == [way.run]
    assert way.broker.stats.drops[Drop.SWALLOWED] == 1


def test_onpublish_that_fails_lets_nothing_pass() -> None:
    answer: Deferred[bytes] = Deferred()
    answer.reject(RuntimeError("on purpose"))
    way = NodeSendQueue(Hooks(onpublish=lambda *_: answer))
    assert not GuardedRoute(way.broker, way.topic.id, way.publisher.etid, way.publisher).deliver(way.run)
    assert way.broker.stats.drops[Drop.SWALLOWED] == 1


# ---- the server's own client


def test_a_handler_that_waits_gets_its_messages_in_order() -> None:
    got: list[bytes] = []
    first: Deferred[None] = Deferred()

    def handle(data: bytes, ptid: int, tid: int, stid: int) -> object:
        got.append(data)
        return first if data == b"1" else None

    queue = HandlerQueue(handle, lambda: None)
    for data in (b"1", b"2", b"3"):
        queue.deliver(data, 5, 6, 7)
    assert got == [b"1"]
    first.resolve(None)
    settle()
    assert got == [b"1", b"2", b"3"]


def test_what_waits_for_a_handler_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "HANDLER_BUDGET_BYTES", 500)
    overflows: list[None] = []
    queue = HandlerQueue(lambda *_: Deferred[None](), lambda: overflows.append(None))
    for _ in range(6):
        queue.deliver(b"x" * 100, 5, 6, 7)
    assert len(overflows) == 3


def test_messages_wait_in_the_publish_queue_while_onpublish_does() -> None:
    answers: list[Deferred[bytes]] = []

    def onpublish(run: bytes, *_: Any) -> Deferred[bytes]:
        answers.append(Deferred())
        return answers[-1]

    crowd = Crowd(Hooks(onpublish=onpublish), queue_size=2)
    broker, outbox = crowd.broker, Ear()
    broker.topic_table.named(b"lamp").add(outbox)
    assert [broker.publish(data, b"lamp") for data in (b"1", b"2", b"3", b"4")] == [0, 1, 2, 2]
    assert (broker.queuesize(), broker.stats.drops[Drop.QUEUE_FULL]) == ((0, 2), 1)
    for data in (b"1", b"2", b"3"):
        answers[-1].resolve(smq.publish_frame(broker.topic2tid(b"lamp") or 0, 1, 0, data))
    assert [run[-1:] for run in outbox.queue] == [b"1", b"2", b"3"]


def test_a_hook_answered_late_resumes_unless_others_wait() -> None:
    pending: list[Deferred[bytes]] = []

    def onpublish(run: bytes, tid: int, ptid: int, peer: Any) -> Deferred[bytes]:
        pending.append(Deferred())
        return pending[-1]

    journal = Journal(waits_for_disk=True)
    way = NodeSendQueue(Hooks(onpublish=onpublish), journal)
    resumed: list[int] = []
    way.publisher.outbox.resume = lambda: resumed.append(1)  # type: ignore[method-assign]
    for answer, count in ((way.run, 0), (b"", 1), (None, 2)):
        assert way.publisher.publish(way.run) is True
        assert way.publisher.pending == way.run
        pending[-1].resolve(answer)
        assert way.publisher.pending is None
        assert len(resumed) == count, "the disk resumes it"


def test_a_route_that_fails_late_resumes_the_publisher(caplog: pytest.LogCaptureFixture) -> None:
    pending: Deferred[bytes] = Deferred()
    way = NodeSendQueue(Hooks(onpublish=lambda run, tid, ptid, peer: pending))
    resumed: list[int] = []
    way.publisher.outbox.resume = lambda: resumed.append(1)  # type: ignore[method-assign]
    assert way.publisher.publish(way.run) is True

    def fail(topic: Any) -> bool:
        raise ValueError("broken")

    way.broker.record(journal := Journal())
    journal.selects = fail  # type: ignore[method-assign]
    pending.resolve(way.run)
    assert resumed == [1]
    assert "it is lost" in caplog.text


@pytest.mark.parametrize("as_view", [False, True])
def test_a_full_journal_blocks_publishers_not_yet_waiting(as_view: bool) -> None:
    journal = Journal()
    way = NodeSendQueue(None, journal)

    class Waits:
        answer = False

        def deliver(self, run: bytes | memoryview) -> bool:
            return self.answer

        deliver_view = deliver

    target = Waits()
    route = RecordedRoute(journal, target, way.publisher, True)  # type: ignore[arg-type]

    def send() -> Any:
        return route.deliver_view(memoryview(way.run)) if as_view else route.deliver(way.run)

    assert send() is False
    assert journal.held == []
    journal.full = True
    assert send() is True
    assert journal.held == [way.publisher]
    target.answer = True
    assert send() is True
    assert len(journal.held) == 1
    assert [name for name, _ in journal.calls] == ["large" if as_view else "record"] * 3


def test_a_recorded_topic_shows_its_sole_subscriber() -> None:
    journal = Journal()
    route = NodeSendQueue(None, journal).route()
    assert isinstance(route.sole_raw, Ear)
    journal.full = True
    assert route.sole_raw is None
    durable = NodeSendQueue(None, Journal(waits_for_disk=True)).route()
    assert durable.sole_raw is None


def test_routes_through_hooks_take_views() -> None:
    seen: list[bytes] = []

    def onpublish(run: bytes, tid: int, ptid: int, peer: Any) -> bytes:
        seen.append(run)
        return run

    way = NodeSendQueue(Hooks(onpublish=onpublish))
    route = way.publisher.resolve(way.run[2:11])
    memory = bytearray(way.run)
    route.deliver_view(memoryview(memory))
    memory[:] = bytes(len(memory))
    settle()
    assert seen == [way.run]
    assert way.subscriber.got == [way.run[2:]]


def test_what_a_hook_swallows_is_counted_once() -> None:
    way = NodeSendQueue(Hooks(onpublish=lambda run, tid, ptid, peer: run[: len(run) // 3]))
    traffic = way.broker.topic_table.traffic
    way.publisher.count_batch(way.topic.key, 2)
    way.publisher.publish(way.run * 3)
    way.topic.count()
    assert (traffic.messages, traffic.copies) == (3, 1)
    assert traffic.bytes == 3 * len(way.run)
    assert way.broker.stats.drops[Drop.SWALLOWED] == 2
    way.broker.hooks.onpublish = lambda run, tid, ptid, peer: b""
    way.publisher.count_batch(way.topic.key, 2)
    way.publisher.publish(way.run * 3)
    way.topic.count()
    assert (traffic.messages, traffic.copies) == (6, 1)
    assert way.broker.stats.drops[Drop.SWALLOWED] == 5


# ---- messages that are in the journal already


def test_the_route_of_recorded_messages_is_not_recorded_again() -> None:
    way = NodeSendQueue(journal=Journal())
    assert recorded_destination(way.broker, way.topic) is way.topic
    other = way.broker.topic_table.named(b"other")
    assert isinstance(recorded_destination(way.broker, other), UnroutedRoute)
    assert is_received(way.broker, way.topic)
    assert not is_received(way.broker, other)


def test_a_topic_is_behind_while_its_handlers_are() -> None:
    way = NodeSendQueue()
    server = way.broker.server
    server.behind = True
    assert is_behind(way.broker, way.topic) is False
    server.subscribe(way.topic, None)
    assert is_behind(way.broker, way.topic) is True
    server.behind = False
    assert is_behind(way.broker, way.topic) is False


def test_only_clients_wait_for_links_to_other_nodes() -> None:
    way = NodeSendQueue()
    broker: Any = way.broker
    broker.cluster = SimpleNamespace(
        forwarded=lambda route, topic, tid, ptid: route,
        with_link_backpressure=lambda route, found, peer: ("link", route, found, peer),
    )
    assert way.route() == ("link", way.topic, way.topic, way.publisher)
    assert destination(broker, way.topic.id, broker.server.etid, broker.server) is way.topic
    assert isinstance(way.route(4711), UnroutedRoute)
