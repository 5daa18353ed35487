"""Names, ids and the handlers of subscriptions, without a session."""

from __future__ import annotations

import pytest

from smqrt.clients.smq.session import SELF, NameTable, SubscriptionTable, subtopic_key, to_text, topic_key
from smqrt.errors import ArgumentError
from smqrt.wire.smq import MAX_PACKET_BYTES


@pytest.mark.parametrize(("given", "key"), [("a", b"a"), ("ä", b"\xc3\xa4"), (b"\xff", b"\xff"), (7, 7)])
def test_a_topic_is_a_name_or_an_id(given: object, key: object) -> None:
    assert topic_key(given) == key
    assert subtopic_key(given) == key


@pytest.mark.parametrize("nothing", [None, 0])
def test_no_subtopic(nothing: object) -> None:
    assert subtopic_key(nothing) is None


@pytest.mark.parametrize("given", [0, -1, 1 << 32, True, None, 1.5, "x" * MAX_PACKET_BYTES])
def test_what_is_no_topic(given: object) -> None:
    with pytest.raises(ArgumentError, match="topic"):
        topic_key(given)


def test_names_that_are_no_text_stay_bytes() -> None:
    assert (to_text(b"a"), to_text(b"\xff"), to_text(None)) == ("a", b"\xff", None)


def test_a_table_maps_both_directions_until_emptied() -> None:
    table = NameTable()
    assert table.add(b"a", 1)
    assert not table.add(b"a", 1), "no news"
    assert table.add(b"a", 2)
    assert (table.number(b"a"), table.name(2), table.name(3)) == (2, b"a", None)
    table.add(b"b", 3)
    assert table.take_all() == [b"a", b"b"]
    assert table.number(b"a") is None
    assert table.name(2) is None


class Numbers:
    """What a session tells `Subscriptions`: the ids it knows."""

    def __init__(self) -> None:
        self.ids: dict[object, int] = {}

    def make(self) -> SubscriptionTable:
        def number(topic: object) -> int | None:
            return topic if isinstance(topic, int) else self.ids.get(topic)

        def subnumber(subtopic: object) -> int | None:
            return self.ids.get(subtopic) if isinstance(subtopic, bytes) else 0

        return SubscriptionTable(number, subnumber)


def one(*message: object) -> None:
    """A handler."""


def other(*message: object) -> None:
    """Another one."""


def test_a_handler_is_found_once_its_topic_is_numbered() -> None:
    numbers = Numbers()
    subscriptions = numbers.make()
    subscriptions.add(b"a", None, one)
    assert subscriptions.find(5, 0) is None
    numbers.ids[b"a"] = 5
    subscriptions.bind(b"a")
    assert subscriptions.find(5, 0) is one
    assert subscriptions.find(5, 9) is one, "the topic's handler takes every sub-topic"
    assert subscriptions.find(6, 0) is None
    subscriptions.unbind()
    assert subscriptions.find(5, 0) is None
    assert b"a" in subscriptions


def test_the_handler_of_a_subtopic_comes_before_the_topics() -> None:
    numbers = Numbers()
    numbers.ids[b"a"] = 5
    subscriptions = numbers.make()
    subscriptions.add(b"a", None, one)
    subscriptions.add(b"a", b"s", other)
    assert subscriptions.find(5, 9) is one, "the sub-topic has no id yet"
    numbers.ids[b"s"] = 9
    subscriptions.bind_subtopic(b"s")
    assert subscriptions.find(5, 9) is other
    subscriptions.remove(b"a", b"s")
    assert subscriptions.find(5, 9) is one
    subscriptions.remove(b"a", None)
    assert b"a" not in subscriptions
    assert subscriptions.find(5, 0) is None


def test_the_last_registration_wins() -> None:
    subscriptions = Numbers().make()
    subscriptions.add(5, None, one)
    subscriptions.add(5, None, other)
    assert subscriptions.find(5, 0) is other
    subscriptions.add(5, None, None)
    assert subscriptions.find(5, 0) is None


def test_what_the_broker_must_know_and_what_not() -> None:
    numbers = Numbers()
    subscriptions = numbers.make()
    for topic in (b"a", 5, SELF, b"b"):
        subscriptions.add(topic, None, one)
    assert subscriptions.names() == [b"a", b"b"]
    numbers.ids[SELF] = 8
    subscriptions.bind_local()
    assert subscriptions.find(8, 0) is subscriptions.find(5, 0) is one
    subscriptions.remove_all(SELF, 8)
    assert subscriptions.find(8, 0) is None
