"""MQTT topics: what is a name, what a filter, and which filters match."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt.client import topic_matches_sub

from smqrt.errors import ArgumentError
from smqrt.wire.mqtt.fields import FilterTree, Routes, check_filter, check_topic, unshared

LEVEL = st.sampled_from(["a", "b", "", "$x"])
TOPIC = st.lists(LEVEL, min_size=1, max_size=4).map("/".join).filter(bool)
PATTERN = st.tuples(st.lists(LEVEL | st.just("+"), max_size=4), st.booleans()).map(
    lambda pair: "/".join(pair[0] + ["#"] * pair[1])
)


@given(st.lists(PATTERN.filter(bool), max_size=8), st.lists(PATTERN.filter(bool), max_size=3), TOPIC)
def test_matches_as_paho_does(filters: list[str], removed: list[str], topic: str) -> None:
    tree: FilterTree[str] = FilterTree()
    for one in filters:
        tree.set(one, one)
    for one in removed:
        tree.remove(one)
    kept = {one for one in filters if one not in removed}
    assert sorted(tree.match(topic)) == sorted(one for one in kept if topic_matches_sub(one, topic))


def test_nothing_is_left_of_what_was_removed() -> None:
    tree: FilterTree[int] = FilterTree()
    tree.set("a/+/c", 1)
    tree.set("a/#", 2)
    tree.remove("a/+/c")
    tree.remove("nothing/there")
    assert list(tree.match("a/b/c")) == [2]
    tree.remove("a/#")
    assert not tree._root.children


@pytest.mark.parametrize("wrong", ["", "a\0", "\ud800", "x" * 65536, 5, None, "a/+", "#"])
def test_no_topic(wrong: object) -> None:
    with pytest.raises(ArgumentError, match="topic"):
        check_topic(wrong)


@pytest.mark.parametrize("wrong", ["", "a#", "a/#/b", "+a", "a/b+", "##"])
def test_no_filter(wrong: str) -> None:
    with pytest.raises(ArgumentError, match="topic"):
        check_filter(wrong)


def test_filters() -> None:
    assert check_filter("a/+/#") == "a/+/#"
    assert check_topic(b"a") == "a"
    assert unshared("$share/g/a/#") == "a/#"
    assert unshared("a/b") == "a/b"


def test_routes() -> None:
    routes = Routes()
    one, two = (lambda *_: 1), (lambda *_: 2)
    assert (routes.add("a/#", one), routes.add("$share/g/a/b", two), routes.add("a/#", one)) == (1, 2, 1)
    assert routes.find("a/b", {"subscriptionidentifier": [2, 1, 9]}) == [two, one]
    assert routes.find("a/b", {"subscriptionidentifier": 2}) == [two]
    assert routes.find("a/b", {}) == []
    routes.uses_identifiers = False
    assert routes.find("a/b", {}) == [one, two]
    routes.remove("a/#")
    routes.remove("a/#")
    assert routes.find("a/b", {}) == [two]


def test_repeated_subscription_identifiers_deliver_a_message_once() -> None:
    routes = Routes()
    one, other = (routes.add(topic, lambda *_: None) for topic in ("a", "b"))
    assert len(routes.find("a", {"subscriptionidentifier": [one] * 1000 + [other]})) == 2


def test_a_shared_filter_needs_a_group_and_a_filter() -> None:
    assert unshared("$share/g/") == ""
    assert unshared("$share/g") == "$share/g"
    assert unshared("$shared/g/a") == "$shared/g/a"


def test_a_topic_has_at_most_65535_bytes() -> None:
    for check in (check_topic, check_filter):
        assert check("x" * 65535) == "x" * 65535
        with pytest.raises(ArgumentError, match="65535 bytes"):
            check("x" * 65536)
        with pytest.raises(ArgumentError, match="65535 bytes"):
            check("ä" * 32768)
        with pytest.raises(ArgumentError, match="UTF-8"):
            check(b"\xff")


def test_identifiers_of_subscriptions_are_not_used_again() -> None:
    routes = Routes()
    assert routes.find("a", {"subscriptionidentifier": 1}) == []
    assert [routes.add(topic, lambda *_: None) for topic in ("a", "b")] == [1, 2]
    routes.remove("b")
    assert routes.add("b", lambda *_: None) == 3
    assert routes.find("b", {"subscriptionidentifier": 2}) == []
    assert routes.uses_identifiers
