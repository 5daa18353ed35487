"""Subscriptions of applications to topic filters, in Python and Lua."""

from __future__ import annotations

from typing import Any

import pytest

from smqrt import hub
from smqrt.errors import ArgumentError
from tests.support.waiting import let_others_run


def collect(found: list[tuple[str, bytes]], smq: hub.Smq) -> Any:
    return lambda data, ptid, tid, stid: found.append((smq.tid2topic(tid), bytes(data)))


def test_present_and_later_topics_are_subscribed_to() -> None:
    found: list[tuple[str, bytes]] = []
    with hub.create() as smq:
        smq.create("house/kitchen/temp")
        smq.create("garden/temp")
        assert smq.subscribe(filter="house/+/temp", onmsg=collect(found, smq)) == 0
        for topic in ("house/kitchen/temp", "house/bath/temp", "garden/temp", "house/temp", "house/a/b/temp"):
            smq.publish("21", topic)
            let_others_run()
    assert found == [("house/kitchen/temp", b"21"), ("house/bath/temp", b"21")]


def test_the_rest_of_a_name() -> None:
    found: list[tuple[str, bytes]] = []
    with hub.create() as smq:
        smq.subscribe(None, {"filter": "house/#", "onmsg": collect(found, smq)})
        for topic in ("house", "house/a/b", "garden"):
            smq.publish("x", topic)
            let_others_run()
    assert [topic for topic, _ in found] == ["house", "house/a/b"]


def test_a_subscription_by_name_and_an_earlier_filter_take_precedence() -> None:
    first: list[Any] = []
    second: list[Any] = []
    named: list[Any] = []
    with hub.create() as smq:
        smq.subscribe(filter="a/+", onmsg=lambda *message: first.append(message))
        smq.subscribe(filter="#", onmsg=lambda *message: second.append(message))
        smq.subscribe("a/named", lambda *message: named.append(message))
        for topic in ("a/x", "a/named", "b"):
            smq.publish("x", topic)
            let_others_run()
        assert (len(first), len(second), len(named)) == (1, 1, 1)
        smq.unsubscribe("a/+")  # the other filter gets its topics
        smq.publish("x", "a/x")
        let_others_run()
        assert (len(first), len(second)) == (1, 2)
        smq.unsubscribe("#")
        smq.publish("x", "a/x")
        let_others_run()
        assert len(second) == 2
        assert smq.drops()["unrouted"] == 1


def test_without_filter_a_wildcard_is_part_of_the_name() -> None:
    found: list[Any] = []
    with hub.create() as smq:
        smq.subscribe("a/#", lambda *message: found.append(message))
        smq.publish("x", "a/b")
        smq.publish("x", "a/#")
        let_others_run()
    assert len(found) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"filter": "a/#/b"}, "'#' the whole last level"),
        ({"filter": ""}, "1 to 65535 bytes"),
        ({"filter": 5}, "filter: "),
        ({"topic": "t", "filter": "a"}, "not to both"),
        ({}, "topic: "),
    ],
)
def test_mistakes(arguments: dict[str, Any], says: str) -> None:
    with hub.create() as smq, pytest.raises(ArgumentError, match=says):
        smq.subscribe(**arguments)
