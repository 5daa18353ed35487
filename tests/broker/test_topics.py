"""Topics on their own: numbers, names, who subscribes, who observes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from smqrt.broker import topics as module
from smqrt.broker.outbox import FLUSHED_AT_ONCE, Outbox, dirty
from smqrt.broker.topics import HubLimits, SubTopics, Topic, Topics
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


def test_drawn_numbers_that_are_taken_or_reserved_are_drawn_again() -> None:
    table = Topics(iter([0, 1, 5, 5, 6]).__next__, encoded)
    assert [table.named(name).id & LOCAL_MASK for name in (b"a", b"b")] == [5, 6]


def test_an_etid_carries_the_node_and_a_topic_is_out_of_their_range() -> None:
    table = Topics(lambda: 0xFFFFFFFF, encoded)
    table.node = 3
    assert node_of(table.ephemeral().id) == 3
    table = Topics(lambda: 77, encoded)
    assert node_of(table.named(b"a").id) == 0
    assert table.named(b"a").id == TOPIC_BIT | 77


def test_an_etid_is_drawn_again_only_after_its_release() -> None:
    table = Topics(iter([5, 5, 6, 5]).__next__, encoded)
    first = table.ephemeral()
    table.remove(first)
    assert table.get(first.id) is None
    assert table.ephemeral().id != first.id
    table.release(first)
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
def test_who_subscribes_receives(table: Topics, count: int) -> None:
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


def test_who_left_receives_no_more(table: Topics) -> None:
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
def test_a_view_is_copied_before_its_memory_is_used_again(table: Topics, count: int) -> None:
    topic, outboxes = table.named(b"lamp"), [Outbox() for _ in range(count)]
    for outbox in outboxes:
        topic.add(outbox)
    topic.settle()
    memory = bytearray(b"run")
    topic.deliver_view(memoryview(memory))
    memory[:] = b"xxx"
    assert all(outbox.queue == [b"run"] for outbox in outboxes)


def test_routes_are_forgotten_when_somebody_joins_or_leaves(table: Topics) -> None:
    topic, cache, outbox = table.named(b"lamp"), Cache(), Outbox()
    for change in (topic.add, topic.discard):
        topic.cached = {cache}
        change(outbox)
        assert topic.cached is None
    assert cache.forgotten == [topic.key, topic.key]


# ---- who observes


def test_an_observer_is_told_a_number_once(table: Topics) -> None:
    topic, observer = table.named(b"lamp"), Observer()
    topic.observe(observer)
    topic.tell(observer)
    topic.add(Outbox())
    topic.tell(observer)
    topic.tell(observer)
    assert observer.told == [1]
    topic.unobserve(observer)
    topic.add(Outbox())
    topic.tell(observer)
    assert observer.told == [1]


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
