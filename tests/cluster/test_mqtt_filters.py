"""Filters of other nodes: which nodes want the messages to a topic."""

from __future__ import annotations

from time import thread_time

from smqrt.cluster.mqtt_filters import RemoteFilters
from smqrt.wire.cluster_mqtt import Wanted
from tests.support.garbage import no_collections

ONE, OTHER, THIRD = 1, 2, 4


def test_nodes_that_want_a_topic() -> None:
    filters = RemoteFilters()
    filters.set("a/+", Wanted.MESSAGES, ONE)
    filters.set("#", Wanted.MESSAGES, OTHER)
    filters.set("b", Wanted.MESSAGES, THIRD)
    filters.set("$share/g/a/b", Wanted.CONNECTED, THIRD)
    assert filters.nodes(b"a/b") == ONE | OTHER
    assert filters.nodes(b"b") == OTHER | THIRD
    assert filters.nodes(b"$SYS/x") == 0
    filters.set("#", 0, OTHER)
    filters.set("a/+", Wanted.MESSAGES, ONE)
    assert filters.nodes(b"a/b") == ONE
    filters.set("a/+", 0, ONE)
    assert filters.nodes(b"a/b") == 0


def test_a_node_with_many_filters_that_match_is_found_at_once() -> None:
    filters = RemoteFilters()
    levels = "abcdefghijklmno"  # each of them, or "+": 32,768 filters
    for number in range(1 << len(levels)):
        text = "/".join("+" if number >> at & 1 else level for at, level in enumerate(levels))
        filters.set(text, Wanted.MESSAGES, ONE)
    name = "/".join(levels).encode()
    filters.set("other", Wanted.MESSAGES, OTHER)
    with no_collections():
        begun_s = thread_time()
        assert filters.nodes(name) == ONE | OTHER, "not all filters were compared: the other node drops the message"
        assert thread_time() - begun_s < 0.05
    filters.set("other", 0, OTHER)
    assert filters.nodes(name) == ONE
