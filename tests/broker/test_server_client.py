"""The server's own client: which handler gets a message, what waits, and what moves to another process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from smqrt.broker import server_client as module
from smqrt.broker.deferred import Deferred
from smqrt.broker.mqtt.application import mqtt_payload
from smqrt.broker.mqtt.messages import mqtt_batch
from smqrt.broker.outbox import Drop, dirty
from smqrt.broker.server_client import Arrived, HandlerQueue, ServerClient
from smqrt.broker.state import Hooks
from smqrt.broker.topics import Topic
from smqrt.wire import smq
from tests.broker.memory_clients import Crowd, Ear, settle


class Handler:
    """Keeps what it gets; waits when it is told to."""

    def __init__(self, waits: bool = False) -> None:
        self.waits = waits
        self.got: list[tuple[bytes, int, int, int]] = []
        self.pending: list[Deferred[None]] = []

    def __call__(self, data: bytes, ptid: int, tid: int, stid: int) -> Any:
        self.got.append((data, ptid, tid, stid))
        if not self.waits:
            return None
        self.pending.append(Deferred())
        return self.pending[-1]

    @property
    def payloads(self) -> list[bytes]:
        return [call[0] for call in self.got]


class Cluster:
    """A cluster of two nodes, as far as the server's client asks."""

    def __init__(self) -> None:
        self.is_ours = True
        self.asked: list[Any] = []
        self.inboxes: list[tuple[bytes | None, bool]] = []

    def handles(self, topic: Topic, frame: bytes, origin: object) -> bool:
        self.asked.append((topic.name, frame, origin))
        return self.is_ours

    def handles_once(self, topic: Topic, number: int) -> None:
        self.inboxes.append((topic.name, number != 0))

    def subscribed(self, topic: Topic) -> None:
        pass

    unsubscribed = subscribed

    def forwarded(self, route: Any, topic: Any, tid: int, ptid: int) -> Any:
        return route

    def with_link_backpressure(self, route: Any, found: Any, peer: Any) -> Any:
        return route

    def missed(self, tid: int, messages: int) -> bool:
        return False


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    settle()
    dirty.clear()


@pytest.fixture
def crowd() -> Crowd:
    return Crowd(Hooks())


@pytest.fixture
def server(crowd: Crowd) -> ServerClient:
    return crowd.broker.server


@pytest.fixture
def topic(crowd: Crowd) -> Topic:
    return crowd.broker.topic_table.named(b"t")


def message(topic: Topic, data: bytes, stid: int = 0) -> bytes:
    return smq.publish_frame(topic.id, 77, stid, data)


def deliver(topic: Topic, *runs: bytes) -> None:
    topic.settle()
    for run in runs:
        topic.deliver(run)
    settle()


# ---- one handler


def test_a_handler_that_waits_gets_one_at_a_time() -> None:
    handler = Handler(waits=True)
    queue = HandlerQueue(handler, lambda: None)
    for number in range(4):
        queue.deliver(b"%d" % number, 1, 2, 3)
    assert handler.got == [(b"0", 1, 2, 3)]
    assert queue.unhandled == 4
    handler.pending[0].resolve()
    settle()
    assert handler.payloads == [b"0", b"1"]
    handler.waits = False
    handler.pending[1].resolve()
    settle()
    assert handler.payloads == [b"0", b"1", b"2", b"3"]
    assert queue.unhandled == 0
    queue.deliver(b"4", 1, 2, 3)
    assert handler.payloads[4:] == [b"4"]


def test_a_handler_with_an_answer_already_does_not_wait() -> None:
    done: Deferred[None] = Deferred()
    done.resolve()
    queue = HandlerQueue(lambda *call: done, lambda: None)
    queue.deliver(b"", 1, 2, 3)
    assert queue.unhandled == 0


def test_what_waits_for_a_handler_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HANDLER_BUDGET_BYTES", 2 * (module.WAITING_MESSAGE_BYTES + 10))
    handler, lost = Handler(waits=True), list[int]()
    queue = HandlerQueue(handler, lambda: lost.append(1))
    for _ in range(6):
        queue.deliver(b"x" * 10, 1, 2, 3)
    assert (queue.unhandled, len(lost)) == (4, 2), "one more than the limit: it is asked before"
    handler.pending[0].resolve()
    settle()
    queue.deliver(b"x" * 10, 1, 2, 3)
    assert (queue.unhandled, len(lost)) == (4, 2), "there is room again"
    queue.deliver(b"x" * 10, 1, 2, 3)
    assert len(lost) == 3
    assert queue.take() == [smq.publish_frame(2, 1, 3, b"x" * 10)] * 3
    assert queue.take() == []
    queue.deliver(b"x" * 10, 1, 2, 3)
    assert queue.unhandled == 2
    assert len(lost) == 3, "what was taken takes no room"


def test_a_message_that_a_handler_missed_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HANDLER_BUDGET_BYTES", 0)
    lines: list[str] = []
    crowd = Crowd(Hooks(log=lambda peer, text: lines.append(text)))
    topic, server = crowd.broker.topic_table.named(b"t"), crowd.broker.server
    server.subscribe(topic, Handler(waits=True))
    deliver(topic, *(message(topic, b"x") for _ in range(4)))
    assert server.dropped == 2
    assert crowd.broker.stats.drops[Drop.OVER_BUDGET] == 2
    assert [line.split(":")[0] for line in lines] == ["slow consumer"]


# ---- which handler


def test_a_subtopic_may_have_a_handler_of_its_own(server: ServerClient, topic: Topic) -> None:
    special, general, default = Handler(), Handler(), Handler()
    server.on_message(default)
    server.subscribe(topic, special, 5)
    deliver(topic, message(topic, b"5", 5), message(topic, b"6", 6))
    server.subscribe(topic, general)
    deliver(topic, message(topic, b"5", 5), message(topic, b"6", 6))
    assert special.payloads == [b"5", b"5"]
    assert default.got == [(b"6", 77, topic.id, 6)]
    assert general.payloads == [b"6"]


def test_a_message_without_a_handler_is_logged() -> None:
    lines: list[str] = []
    crowd = Crowd(Hooks(log=lambda peer, text: lines.append(text)))
    topic, server = crowd.broker.topic_table.named(b"t"), crowd.broker.server
    server.subscribe(topic, None)
    deliver(topic, message(topic, b"x"))
    assert lines == [f"no handler for a message to {topic.id} from 77: dropping it"]
    handler = Handler()
    server.on_message(handler)
    server.deliver_default(b"y", 1, 2, 3)
    assert handler.got == [(b"y", 1, 2, 3)]
    server.on_message(None)
    server.deliver_default(b"z", 1, 2, 3)
    assert len(handler.got) == 1


def test_answers_to_the_server_reach_the_requester(server: ServerClient) -> None:
    handler, asked = Handler(), list[Any]()
    server.on_message(handler)
    server.answers = lambda data, ptid, stid: bool(asked.append((data, ptid, stid))) or data == b"answer"
    deliver(server.topic, message(server.topic, b"answer", 9), message(server.topic, b"else", 9))
    assert asked == [(b"answer", 77, 9), (b"else", 77, 9)]
    assert handler.payloads == [b"else"]


def test_unsubscribing_forgets_handlers(crowd: Crowd, server: ServerClient, topic: Topic) -> None:
    handler = Handler()
    server.subscribe(topic, handler)
    server.subscribe(topic, handler, 5)
    assert crowd.broker.stats.subscriptions == 1
    assert server.topics == {topic.id: topic}
    server.unsubscribe(topic)
    server.unsubscribe(topic)
    deliver(topic, message(topic, b"x"))
    assert handler.got == []
    assert crowd.broker.stats.subscriptions == 0
    assert server.topics == {}


def test_routes_are_looked_up_when_the_server_subscribes(crowd: Crowd, server: ServerClient, topic: Topic) -> None:
    client, ear = crowd.client(), Ear()
    topic.add(ear)
    client.publish(smq.publish_frame(topic.id, client.etid, 0, b"x"))
    assert client.routes
    server.subscribe(topic, Handler())
    assert not client.routes
    client.publish(smq.publish_frame(topic.id, client.etid, 0, b"x"))
    server.unsubscribe(topic)
    assert not client.routes


def test_a_renumbered_topic_keeps_its_handlers(crowd: Crowd, server: ServerClient, topic: Topic) -> None:
    handler, once = Handler(), Handler()
    other = crowd.broker.topic_table.named(b"other")
    server.subscribe(topic, handler)
    server.subscribe(other, once, once=True)
    for one, number in ((topic, 0x7000_0001), (other, 0x7000_0002)):
        assert crowd.broker.renumber(one.name or b"", number)
        assert not crowd.broker.renumber(one.name or b"", number)
    deliver(topic, message(topic, b"x"))
    deliver(server.once[other.id], message(server.once[other.id], b"y"))
    assert handler.got == [(b"x", 77, 0x7000_0001, 0)]
    assert once.got == [(b"y", 77, 0x7000_0002, 0)]
    assert server.topics == {topic.id: topic, other.id: other}
    server.unsubscribe(topic)
    server.unsubscribe(other)
    assert (server.topics, server.once) == ({}, {})


# ---- once in a cluster


def test_one_server_of_a_cluster_handles_a_message(crowd: Crowd, server: ServerClient, topic: Topic) -> None:
    cluster: Any = Cluster()
    crowd.broker.cluster = cluster
    once, usual = Handler(), Handler()
    server.subscribe(topic, once, once=True)
    server.subscribe(topic, usual, 5)
    inbox = server.once[topic.id]
    assert cluster.inboxes == [(b"t", True)]
    assert server.is_inbox(inbox.id)
    assert not server.is_inbox(topic.id)
    deliver(topic, Arrived(message(topic, b"mine"), "node"), message(topic, b"all", 5))
    assert cluster.asked == [(b"t", message(topic, b"mine"), "node")]
    cluster.is_ours = False
    deliver(topic, message(topic, b"theirs"), message(topic, b"all", 5))
    assert cluster.asked[1:] == [(b"t", message(topic, b"theirs"), None)]
    deliver(inbox, message(inbox, b"sent here"))
    assert once.got == [(b"mine", 77, topic.id, 0), (b"sent here", 77, topic.id, 0)]
    assert usual.payloads == [b"all", b"all"]
    server.unsubscribe(topic)
    assert cluster.inboxes == [(b"t", True), (b"t", False)]
    assert not server.is_inbox(inbox.id)
    assert crowd.broker.topic_table.get(inbox.id) is None
    assert server.once == {}


def test_the_default_handler_may_be_once_too(crowd: Crowd, server: ServerClient, topic: Topic) -> None:
    cluster: Any = Cluster()
    crowd.broker.cluster = cluster
    default = Handler()
    server.on_message(default)
    server.subscribe(topic, None, once=True)
    cluster.is_ours = False
    deliver(topic, message(topic, b"theirs"))
    assert default.got == []
    server.unsubscribe(topic)
    server.subscribe(topic, None)
    deliver(topic, message(topic, b"mine"))
    assert default.payloads == [b"mine"]


def test_without_a_cluster_once_is_here(server: ServerClient, topic: Topic) -> None:
    handler = Handler()
    server.subscribe(topic, handler, once=True)
    deliver(topic, message(topic, b"x"))
    assert handler.payloads == [b"x"]
    server.subscribe(server.topic, handler, once=True)
    assert list(server.once) == [topic.id], "its own ETID is nobody else's"


# ---- handlers that are behind


def test_handlers_have_a_portion_of_a_turn(crowd: Crowd, server: ServerClient, topic: Topic) -> None:
    times = iter(n * 0.003 for n in range(1000))
    crowd.broker.clock = times.__next__
    handler = Handler()
    server.subscribe(topic, handler)
    topic.settle()
    topic.deliver(b"".join(message(topic, b"%d" % n) for n in range(20)))
    server.flush()
    assert len(handler.got) == module.HANDLED_BY_CLOCK
    assert server.behind
    waiting = Ear()
    resumed: list[int] = []
    waiting.resume = lambda: resumed.append(len(handler.got))  # type: ignore[method-assign]
    client = crowd.client()
    client.outbox = waiting
    assert server.hold(client) is True
    assert server.hold(server) is False
    assert server.waiting() > 0
    settle()
    assert handler.payloads == [b"%d" % n for n in range(20)]
    assert resumed == [20]
    assert not server.behind
    assert server.waiting() == 0
    deliver(topic, message(topic, b"more"))
    assert resumed == [20]


# ---- publishing


def test_publishes_wait_behind_a_hook_in_order() -> None:
    asked: list[bytes] = []
    pending: list[Deferred[bytes]] = []

    def onpublish(run: bytes, tid: int, ptid: int, peer: Any) -> Deferred[bytes]:
        asked.append(run)
        pending.append(Deferred())
        return pending[-1]

    crowd = Crowd(Hooks(onpublish=onpublish))
    server, ear = crowd.broker.server, Ear()
    topic = crowd.broker.topic_table.named(b"t")
    topic.add(ear)
    frames = [message(topic, b"%d" % n) for n in range(3)]
    assert [server.publish(topic.id, 77, frame) for frame in frames] == [0, 1, 2]
    assert asked == frames[:1]
    assert server.queue_room() == (198, 2)
    assert server.waiting() == 3
    for number in range(3):
        pending[number].resolve(frames[number])
    settle()
    assert ear.got == [frame[2:] for frame in frames]
    assert server.queue_room() == (200, 0)
    assert server.waiting() == 0


def test_a_full_publish_queue_drops_and_counts() -> None:
    lines: list[str] = []
    hooks = Hooks(onpublish=lambda run, tid, ptid, peer: Deferred(), log=lambda peer, text: lines.append(text))
    crowd = Crowd(hooks)
    server = crowd.broker.server
    topic = crowd.broker.topic_table.named(b"t")
    sizes = [server.publish(topic.id, 77, message(topic, b"x")) for _ in range(203)]
    assert sizes[-3:] == [200, 200, 200]
    assert crowd.broker.stats.drops[Drop.QUEUE_FULL] == 2
    assert lines == [f"publish queue full (200): a message to {topic.id} was dropped"] * 2
    server.close()
    assert crowd.broker.stats.drops[Drop.CLOSED] == 200
    assert lines[2:] == ["closed with 200 messages that waited for onpublish"]
    server.close()
    assert len(lines) == 3
    assert server.queue_room() == (200, 0)


def test_many_publishes_let_others_have_a_turn() -> None:
    crowd = Crowd(Hooks())
    server = crowd.broker.server
    topic = crowd.broker.topic_table.named(b"t")
    seen: list[int] = []

    def onpublish(run: bytes, tid: int, ptid: int, peer: Any) -> bytes:
        seen.append(len(seen))
        if len(seen) < 100:
            server.publish(topic.id, 77, message(topic, b"again"))
        return run

    crowd.broker.hooks.onpublish = onpublish
    server.publish(topic.id, 77, message(topic, b"first"))
    assert len(seen) == module.ROUTED_PER_TURN
    settle()
    assert len(seen) == 100


def test_a_hook_that_raises_does_not_stop_publishing() -> None:
    crowd = Crowd(Hooks())
    server, ear = crowd.broker.server, Ear()
    topic = crowd.broker.topic_table.named(b"t")
    topic.add(ear)

    def fail(run: bytes, tid: int, ptid: int, peer: Any) -> bytes:
        raise ValueError("broken")

    crowd.broker.hooks.onpublish = fail
    with pytest.raises(ValueError, match="broken"):
        server.publish(topic.id, 77, message(topic, b"x"))
    crowd.broker.hooks.onpublish = None
    assert server.publish(topic.id, 77, message(topic, b"y")) == 0
    settle()
    assert ear.got == [message(topic, b"y")[2:]]


# ---- to another process


def test_unhandled_messages_can_be_taken_away(crowd: Crowd, server: ServerClient, topic: Topic) -> None:
    handler, default = Handler(waits=True), Handler(waits=True)
    server.on_message(default)
    server.subscribe(topic, handler, 5)
    deliver(topic, *(message(topic, b"%d" % n, 5) for n in range(2)), message(topic, b"d0"), message(topic, b"d1"))
    topic.deliver(message(topic, b"unread"))
    assert server.remove_unhandled() == [
        smq.publish_frame(topic.id, 77, 5, b"1"),
        smq.publish_frame(topic.id, 77, 0, b"d1"),
        message(topic, b"unread"),
    ]
    assert server.remove_unhandled() == []


def test_messages_another_server_handles_stay_there(crowd: Crowd, server: ServerClient, topic: Topic) -> None:
    server.subscribe(topic, Handler(), once=True)
    topic.settle()
    topic.deliver(Arrived(message(topic, b"theirs"), "node"))
    topic.deliver(message(topic, b"mine"))
    assert server.remove_unhandled() == [message(topic, b"mine")]


def test_publishes_can_be_held_and_taken(crowd: Crowd, server: ServerClient, topic: Topic) -> None:
    ear = Ear()
    topic.add(ear)
    server.hold_publishes()
    frames = [message(topic, b"%d" % n) for n in range(2)]
    assert [server.publish(topic.id, 77, frame) for frame in frames] == [1, 2]
    server.resume()
    settle()
    assert ear.got == []
    assert server.waiting() == 2
    server.pending = message(topic, b"asked")
    assert server.take_publishes() == [(topic.id, 77, frame) for frame in (message(topic, b"asked"), *frames)]
    assert server.take_publishes() == []
    server.publish(topic.id, 77, frames[0])
    server.resume_publishing()
    settle()
    assert ear.got == [frames[0][2:]]
    assert server.publish(topic.id, 77, frames[1]) == 0


def test_a_closed_server_calls_no_handler(server: ServerClient, topic: Topic) -> None:
    handler = Handler()
    server.on_message(handler)
    server.subscribe(topic, handler)
    server.close()
    deliver(topic, message(topic, b"x"))
    assert handler.got == []


def test_the_server_has_no_identity(server: ServerClient) -> None:
    assert server.identity is None
    assert (server.uid, server.info) == (b"SMQ server client", b"")


def test_large_messages_that_wait_do_not_migrate() -> None:
    lost: list[int] = []
    queue = HandlerQueue(lambda *call: Deferred[None](), lambda: lost.append(1))
    for data in (b"handled", bytes(100_000), b"small"):
        queue.deliver(data, 1, 2, 0)
    assert queue.take() == [smq.publish_frame(2, 1, 0, b"small")]
    assert len(lost) == 1


def test_properties_count_for_the_messages_that_wait() -> None:
    lost: list[int] = []
    queue = HandlerQueue(lambda *call: Deferred[None](), lambda: lost.append(1))
    payload = mqtt_payload(b"x", mqtt_batch(b"", 1, properties=bytes(9 << 20)))
    for _ in range(5):
        queue.deliver(payload, 1, 2, 0)
    assert (queue.unhandled, len(lost)) == (3, 2)
