"""Topics on their own: numbers, names, who subscribes, who observes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from smqrt.broker import topics as module
from smqrt.broker.outbox import FLUSHED_AT_ONCE, Outbox, QueuedMemory, dirty
from smqrt.broker.topics import HubLimits, SubTopics, Topic, Topics
from smqrt.wire.connection_state import Life
from smqrt.wire.smq import LOCAL_MASK, TOPIC_BIT, node_of


class WebSocketOutbox(Outbox):
    __slots__ = ()
    websocket = True


class Cache:
    """A route cache that tells what it forgot."""

    def __init__(self) -> None:
        self.forgotten: list[bytes] = []

    def forget_route(self, destination: bytes) -> None:
        self.forgotten.append(destination)


class Observer:
    def __init__(self) -> None:
        self.told: list[int] = []

    def changed(self, topic: Topic, subscribers: int) -> None:
        self.told.append(subscribers)


class Store:
    """Names that are there already, and what is added."""

    def __init__(self, **names: dict[bytes, int]) -> None:
        self.names = names
        self.added: list[tuple[str, bytes, int]] = []

    def load(self, kind: str) -> Iterator[tuple[bytes, int]]:
        return iter(self.names.get(kind, {}).items())

    def add(self, kind: str, name: bytes, number: int) -> None:
        self.added.append((kind, name, number))

    def unsaved(self, kind: str, name: bytes) -> None:
        return None

    def close(self) -> None:
        pass


def encoded(run: bytes) -> bytes:
    return b"ws:" + run


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    dirty.clear()


@pytest.fixture
def table() -> Topics:
    return Topics(itertools.count(1000).__next__, encoded)


# ---- numbers


def test_a_name_keeps_its_number(table: Topics) -> None:
    topic = table.named(b"lamp")
    assert table.named(b"lamp") is topic
    assert table.get(topic.id) is topic
    assert table.by_key[topic.id.to_bytes(4, "big")] is topic
    assert list(table.names()) == [(topic.id, b"lamp")]


def test_a_wanted_number_is_given_when_it_is_free(table: Topics) -> None:
    assert table.named(b"a", 7).id == 7
    assert table.named(b"b", 7).id != 7


def test_used_or_reserved_numbers_are_drawn_again() -> None:
    table = Topics(iter([0, 1, 5, 5, 6]).__next__, encoded)
    assert [table.named(name).id & LOCAL_MASK for name in (b"a", b"b")] == [5, 6]


def test_etids_contain_the_node_and_topics_are_outside() -> None:
    table = Topics(lambda: 0xFFFFFFFF, encoded)
    table.node = 3
    assert node_of(table.ephemeral().id) == 3
    table = Topics(lambda: 77, encoded)
    assert node_of(table.named(b"a").id) == 0
    assert table.named(b"a").id == TOPIC_BIT | 77


def test_an_etid_is_drawn_again_only_after_its_release() -> None:
    table = Topics(iter([5, 5, 6, 5]).__next__, encoded)
    first = table.ephemeral()
    table.remove(first.id)
    assert table.get(first.id) is None
    assert table.ephemeral().id != first.id
    table.release(first.id)
    assert table.ephemeral().id == first.id


def test_names_come_from_the_store_and_go_to_it() -> None:
    store = Store(topic={b"old": 42}, subtopic={b"part": 7})
    table, subtopics = Topics(itertools.count(100).__next__, encoded, store=store), SubTopics(lambda: 200, store)
    assert (table.named(b"old").id, subtopics.named(b"part")) == (42, 7)
    number = table.named(b"new").id
    assert subtopics.named(b"other") == 200
    assert store.added == [("topic", b"new", number), ("subtopic", b"other", 200)]


def test_subtopics_have_numbers_of_their_own() -> None:
    subtopics = SubTopics(iter([0, 9, 9, 10]).__next__)
    assert [subtopics.named(name) for name in (b"a", b"b", b"a")] == [9, 10, 9]
    assert subtopics.by_id == {9: b"a", 10: b"b"}


# ---- who subscribes


@pytest.mark.parametrize("count", [1, 2, 5])
def test_subscribers_receive(table: Topics, count: int) -> None:
    topic = table.named(b"lamp")
    raw, web = [Outbox() for _ in range(count)], [WebSocketOutbox() for _ in range(count)]
    for outbox in raw + web:
        topic.add(outbox)
    assert topic.subscribers == 2 * count
    topic.settle()
    topic.deliver(b"run")
    assert [one.queue for one in raw] == [[b"run"]] * count
    assert [one.queue for one in web] == [[b"ws:run"]] * count
    assert all(one.queue[0] is web[0].queue[0] for one in web), "encoded once"


def test_closed_clients_receive_nothing(table: Topics) -> None:
    topic, (first, second, third) = table.named(b"lamp"), (Outbox(), Outbox(), WebSocketOutbox())
    for outbox in (first, second, third):
        topic.add(outbox)
    for left, outbox in ((2, first), (1, third), (1, third), (0, second)):
        topic.discard(outbox)
        assert topic.subscribers == left
    topic.settle()
    topic.deliver(b"run")
    assert [one.queue for one in (first, second, third)] == [[], [], []]


def test_one_who_joins_twice_receives_once(table: Topics) -> None:
    topic, outbox = table.named(b"lamp"), Outbox()
    for one in (outbox, Outbox(), outbox):
        topic.add(one)
    topic.settle()
    topic.deliver(b"run")
    assert (topic.subscribers, outbox.queue) == (2, [b"run"])


def test_the_sole_raw_subscriber(table: Topics) -> None:
    topic, outbox = table.named(b"lamp"), Outbox()
    assert topic.sole_raw is None
    topic.add(outbox)
    assert topic.sole_raw is outbox
    topic.add(WebSocketOutbox())
    topic.settle()
    assert topic.sole_raw is None


@pytest.mark.parametrize("count", [2, FLUSHED_AT_ONCE + 1])
def test_a_view_is_copied_before_its_memory_is_reused(table: Topics, count: int) -> None:
    topic, outboxes = table.named(b"lamp"), [Outbox() for _ in range(count)]
    for outbox in outboxes:
        topic.add(outbox)
    topic.settle()
    memory = bytearray(b"run")
    topic.deliver_view(memoryview(memory))
    memory[:] = b"xxx"
    assert all(outbox.queue == [b"run"] for outbox in outboxes)


def test_routes_are_removed_on_join_or_leave(table: Topics) -> None:
    topic, cache, outbox = table.named(b"lamp"), Cache(), Outbox()
    for change in (topic.add, topic.discard):
        topic.cached = {cache}
        change(outbox)
        assert topic.cached is None
    assert cache.forgotten == [topic.key, topic.key]


def test_many_leave_at_once(table: Topics) -> None:
    topic, cache = table.named(b"lamp"), Cache()
    raw, web = [Outbox() for _ in range(3)], [WebSocketOutbox() for _ in range(2)]
    observers = [Observer() for _ in range(2)]
    for outbox in raw + web:
        topic.add(outbox)
    for observer in observers:
        topic.observe(observer)
    topic.cached = {cache}
    topic.forget({raw[0], web[0], Outbox()}, {observers[0]})
    assert topic.cached is None
    assert (topic.raw, topic.ws, topic.subscribers) == (tuple(raw[1:]), (web[1],), 3)
    assert list(topic.observers) == observers[1:]
    topic.forget({raw[1], web[1]}, set())
    assert topic.sole_raw is raw[2]
    topic.discard(raw[2])
    assert topic.subscribers == 0
    topic.forget(set(), {observers[1]})
    other = table.named(b"other")
    topic.observe(observers[0])
    assert not other.observers


def test_what_is_delivered_is_counted_for_each_subscriber(table: Topics) -> None:
    topic, traffic = table.named(b"lamp"), table.traffic
    outboxes = [Outbox(), WebSocketOutbox(), Outbox()]
    for outbox in outboxes:
        topic.add(outbox)
    topic.settle()
    topic.deliver(b"12345")
    topic.deliver_view(memoryview(b"123"))
    nodes = topic.for_nodes()
    nodes.arrived, nodes.arrived_bytes = 1, 3
    topic.discard(outboxes[0])
    topic.settle()
    assert traffic == module.Traffic(messages=1, bytes=5, copies=6, copied_bytes=24, arrived=1)
    topic.deliver(b"1")
    topic.discard(outboxes[1])
    topic.settle()
    topic.deliver(b"22")
    topic.discard(outboxes[2])
    assert traffic == module.Traffic(messages=3, bytes=8, copies=9, copied_bytes=28, arrived=1)
    topic.count()
    assert traffic.messages == 3


def test_what_goes_to_other_nodes_has_no_copies_here(table: Topics) -> None:
    topic = table.named(b"lamp")
    assert not topic.is_delivered
    topic.for_nodes().leads_away = True
    assert topic.is_delivered
    topic.deliver(b"123")
    topic.add(Outbox())
    assert not topic.nodes.leads_away
    assert table.traffic == module.Traffic(messages=1, bytes=3)
    assert topic.is_delivered


def test_views_go_to_many_as_messages(table: Topics) -> None:
    topic, outboxes = table.named(b"lamp"), [Outbox() for _ in range(FLUSHED_AT_ONCE + 1)]
    for outbox in (*outboxes, web := WebSocketOutbox()):
        topic.add(outbox)
    topic.settle()
    for sent in (1, 2):
        topic.deliver_view(memoryview(b"run"))
        assert (topic.messages, topic.bytes) == (sent, 3 * sent)
        topic.forget({outboxes[0]}, set())
    assert web.queue == [b"ws:run"] * 2
    assert outboxes[1].queue == [b"run"] * 2


def test_a_slow_client_is_accounted_for_each_run(table: Topics) -> None:
    topic, slow, fast = table.named(b"lamp"), Outbox(), Outbox()
    slow.life = Life.BLOCKED
    for outbox in (slow, fast):
        topic.add(outbox)
    topic.settle()
    before = QueuedMemory.total_bytes
    topic.deliver(b"12345")
    topic.deliver(b"12345")
    assert (slow.queued_bytes, fast.queued_bytes, QueuedMemory.total_bytes - before) == (10, 0, 10)
    assert dirty == [slow, fast]
    slow.released(10)


# ---- numbers that are made of names


class Numbers:
    """A name's number is its length."""

    def topic_number(self, name: bytes) -> int:
        return TOPIC_BIT | len(name)

    def subtopic_number(self, name: bytes) -> int:
        return len(name)


def test_numbers_are_made_of_names_in_a_cluster(table: Topics) -> None:
    otherwise: list[bytes | None] = []
    table.numbers = Numbers()  # type: ignore[assignment]
    table.named_otherwise = lambda topic: otherwise.append(topic.name)
    assert table.named(b"abc").id == TOPIC_BIT | 3
    assert otherwise == []
    assert table.named(b"xyz").id == TOPIC_BIT | 1000
    assert otherwise == [b"xyz"]
    assert table.named(b"of a node", LOCAL_MASK + 1).id == TOPIC_BIT | 1001
    assert table.named(b"small", LOCAL_MASK).id == LOCAL_MASK
    assert table.named(b"large", TOPIC_BIT).id == TOPIC_BIT
    assert otherwise == [b"xyz", b"of a node", b"small", b"large"]
    assert table.ephemeral().id < TOPIC_BIT


def test_subtopic_numbers_are_made_of_names() -> None:
    new: list[tuple[int, bytes]] = []
    subtopics = SubTopics(itertools.count(100).__next__)
    subtopics.numbers = Numbers()  # type: ignore[assignment]
    subtopics.on_new = lambda number, name: new.append((number, name))
    assert [subtopics.named(name) for name in (b"abc", b"xyz", b"abc")] == [3, 100, 3]
    assert subtopics.named(b"w", 77) == 77
    assert new == [(3, b"abc"), (100, b"xyz"), (77, b"w")]
    assert subtopics.names_bytes == 7


def test_a_topic_may_get_another_number(table: Topics) -> None:
    topic, cache = table.named(b"lamp"), Cache()
    old = topic.key
    topic.cached = {cache}
    table.renumber(topic, 77)
    assert cache.forgotten == [old]
    assert table.get(77) is topic
    assert table.at(old) is None
    assert table.at(topic.key) is topic


def test_a_subtopic_may_get_another_number() -> None:
    subtopics = SubTopics(itertools.count(100).__next__)
    subtopics.named(b"a")
    assert subtopics.renumber(b"a", 100) is False
    assert subtopics.renumber(b"a", 7) is True
    assert subtopics.renumber(b"bc", 8) is False
    assert subtopics.by_id == {7: b"a", 8: b"bc"}
    assert subtopics.by_name == {b"a": 7, b"bc": 8}
    assert subtopics.names_bytes == 3


def test_a_store_that_comes_later_gets_and_gives_names(table: Topics) -> None:
    kept = table.named(b"kept", 42)
    new = table.named(b"new")
    store = Store(topic={b"kept": 42, b"taken": 42, b"stored": 43}, subtopic={b"a": 1, b"b": 2})
    table.keep_in(store)
    assert table.named(b"stored").id == 43
    assert b"taken" not in table.by_name
    assert store.added == [("topic", b"new", new.id)]
    assert table.named(b"later").id
    assert len(store.added) == 2
    assert table.get(42) is kept
    subtopics = SubTopics(itertools.count(100).__next__)
    subtopics.named(b"a", 2)
    subtopics.named(b"c", 3)
    store.added.clear()
    subtopics.keep_in(store)
    assert subtopics.by_id == {2: b"a", 3: b"c"}
    assert store.added == [("subtopic", b"c", 3)]
    subtopics.named(b"d")
    assert len(store.added) == 2


def test_etids_of_other_nodes_lead_there(table: Topics) -> None:
    way = Outbox()
    topic = table.foreign(0x0200_0005, way)
    assert topic.raw == (way,)
    assert table.get(0x0200_0005) is topic
    asked: list[int] = []
    table.absent = lambda number: asked.append(number)
    assert table.get(5) is None
    assert table.at(b"\0\0\0\6") is None
    assert asked == [5, 6]
    assert table.ephemeral(0x0200_0005) is not topic
    assert table.ephemeral(0x0200_0006).id == 0x0200_0006


def test_names_have_bytes(table: Topics) -> None:
    table.named(b"abc")
    table.named(b"de")
    table.ephemeral()
    assert table.names_bytes == 5


# ---- who observes


def test_an_observer_gets_a_count_once(table: Topics) -> None:
    topic, observer = table.named(b"lamp"), Observer()
    topic.observe(observer)
    topic.notify(observer)
    topic.add(Outbox())
    topic.notify(observer)
    topic.notify(observer)
    assert observer.told == [1]
    topic.unobserve(observer)
    topic.add(Outbox())
    topic.notify(observer)
    assert observer.told == [1]


def test_observers_are_notified_of_subscribers_elsewhere(table: Topics) -> None:
    topic, observer = table.named(b"lamp"), Observer()
    topic.for_nodes().elsewhere = 2
    topic.add(Outbox())
    topic.observe(observer)
    topic.for_nodes().elsewhere = 3
    topic.notify(observer)
    topic.notify(Observer())
    assert observer.told == [4]
    assert len(topic.observers) == 1


def test_observers_of_one_topic_are_not_those_of_another(table: Topics) -> None:
    one, other = table.named(b"one"), table.named(b"other")
    one.observe(Observer())
    assert (len(one.observers), len(other.observers)) == (1, 0)
    one.unobserve_all()
    assert not one.observers
    other.unobserve(Observer())  # nothing happens


# ---- limits


def test_limits_of_all(table: Topics) -> None:
    limits = HubLimits(names=2, names_bytes=10)
    table.named(b"1234")
    assert limits.of_all(table, b"123456") is None
    assert limits.of_all(table, b"1234567") is module.NAMES_MEMORY
    table.named(b"5")
    assert limits.of_all(table, b"6") is module.NAMES


def test_limits_of_a_client() -> None:
    limits = HubLimits(client_names=2, client_names_bytes=10)
    assert limits.of_client(1, 4, b"123456") is None
    assert limits.of_client(1, 4, b"1234567") is module.CLIENT_NAMES_MEMORY
    assert limits.of_client(2, 0, b"1") is module.CLIENT_NAMES


def test_limits_are_those_of_the_manual() -> None:
    """help: limits"""
    limits = HubLimits()
    assert (limits.names, limits.names_bytes) == (250_000, 64 << 20)
    assert (limits.client_names, limits.client_names_bytes) == (10_000, 4 << 20)
    assert (limits.subscriptions, limits.observes, limits.connections_per_user) == (10_000, 10_000, None)
