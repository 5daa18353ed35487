"""Last values over nodes: the newest wins, also when nodes were apart, and what was taken away stays away."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from smqrt.broker import last_values
from smqrt.broker.broker import Broker
from smqrt.broker.last_values import LastValueLimits, LastValues
from smqrt.wire import smq
from smqrt.wire.smq import Type
from tests.cluster.engines import Client, Engine, Place, opened

NAME = b"state/a"


@pytest.fixture(params=["memory", "tcp", "unix", "nats"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    with opened(request.param, tmp_path) as one:
        yield one


def keeps(broker: Broker) -> None:
    broker.last_values = LastValues(("state/#",), LastValueLimits())


def places(engine: Engine, count: int, **options: Any) -> list[Place]:
    found = [engine.place(f"node{number}", prepare=keeps, **options) for number in range(count)]
    engine.joined(*found)
    return found


def values(place: Place) -> dict[int, bytes]:
    """The last values of the topic at a node, by sub-topic."""
    topic = place.hub.topic_table.named(NAME)
    kept = place.hub.last_values
    assert kept is not None
    found = (frame for frame, _ in kept.of(topic).newest.values())
    return {int.from_bytes(one[11:15], "big"): one[smq.PUBLISH_HEADER_BYTES :] for one in found}


def publish(engine: Engine, client: Client, data: bytes, at: list[Place]) -> None:
    """Publish, and wait until these nodes have it."""
    client.publish(NAME, data)
    due = {0: data} if data else {}
    engine.until(lambda: all(values(one) == due for one in at), [values(one) for one in at])


@pytest.mark.parametrize("later", [b"new", b""], ids=["value", "deletion"])
@pytest.mark.parametrize("number", [0, 1], ids=["first", "second"])
def test_what_was_published_while_nodes_were_apart_wins(engine: Engine, later: bytes, number: int) -> None:
    both = places(engine, 2)
    clients = [one.client() for one in both]
    publish(engine, clients[0], b"old", both)
    engine.cut(*both)
    engine.until(lambda: not both[0].member.remotes and not both[1].member.remotes, "they are apart")
    publish(engine, clients[number], later, [both[number]])
    assert values(both[1 - number]) == {0: b"old"}
    engine.heal(*both)
    engine.joined(*both)
    due = {0: later} if later else {}
    engine.until(lambda: values(both[0]) == values(both[1]) == due, "the newest is everywhere")


def test_of_values_published_apart_the_newer_wins(engine: Engine) -> None:
    both = places(engine, 2)
    clients = [one.client() for one in both]
    engine.cut(*both)
    engine.until(lambda: not both[0].member.remotes and not both[1].member.remotes, "they are apart")
    publish(engine, clients[1], b"earlier", [both[1]])
    time.sleep(0.005)
    publish(engine, clients[0], b"later", [both[0]])
    engine.heal(*both)
    engine.joined(*both)
    engine.until(lambda: values(both[0]) == values(both[1]) == {0: b"later"}, "the newer one is everywhere")
    publish(engine, clients[1], b"then", both)  # what comes from now on is newer still


def test_a_node_that_missed_messages_restores_no_old_value(engine: Engine) -> None:
    """Stamps are the publisher's: a node that heard of the old value late does not take it for a newer one."""
    one, other, apart = places(engine, 3)
    client = one.client()
    publish(engine, client, b"old", [one, other, apart])
    for place in (one, other):
        engine.cut(place, apart)
    engine.until(lambda: not apart.member.remotes, "it is apart")
    publish(engine, client, b"new", [one, other])
    engine.kill(one)
    engine.until(lambda: not other.member.remotes, "the origin is gone")
    engine.heal(other, apart)
    engine.joined(other, apart)
    engine.until(lambda: values(other) == values(apart) == {0: b"new"}, "the newest is everywhere")


def test_clocks_that_are_set_change_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    both = places(engine, 2)
    client = both[0].client()
    publish(engine, client, b"old", both)
    engine.cut(*both)
    engine.until(lambda: not both[0].member.remotes and not both[1].member.remotes, "they are apart")
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    publish(engine, client, b"new", [both[0]])
    engine.heal(*both)
    engine.joined(*both)
    engine.until(lambda: values(both[1]) == {0: b"new"}, "the newest is everywhere")


def test_older_nodes_get_values_without_stamps(engine: Engine) -> None:
    both = [engine.place("new", prepare=keeps), engine.place("old", prepare=keeps, abilities=())]
    engine.joined(*both)
    clients = [one.client() for one in both]
    for number in (0, 1, 0):
        publish(engine, clients[number], b"from %d" % number, both)
    engine.cut(*both)
    engine.until(lambda: not both[0].member.remotes and not both[1].member.remotes, "they are apart")
    engine.heal(*both)
    engine.joined(*both)
    publish(engine, clients[1], b"after", both)
    publish(engine, clients[1], b"", both)


def test_nodes_with_changed_numbers_have_the_newest_value(engine: Engine) -> None:
    """Names of a file have other numbers than those of the cluster, and than those of another file."""

    def prepare(number: int, data: bytes) -> Callable[[Broker], None]:
        def known(broker: Broker) -> None:
            keeps(broker)
            broker.topic_table.named(NAME, 7000 + number)
            broker.subtopic_table.named(b"sub", 8000 + number)
            broker.publish(data, NAME)
            broker.publish(data, NAME, b"sub")

        return known

    both = []
    for number, data in enumerate((b"old", b"new")):
        both.append(engine.place(f"node{number}", prepare=prepare(number, data)))
        time.sleep(0.002)
    engine.joined(*both)
    for number, place in enumerate(both):
        due = {0: b"new", 8000 + number: b"new"}
        engine.until(lambda place=place, due=due: values(place) == due, (number, values(place)))


def test_records_of_removed_values_are_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(last_values, "MAX_DELETIONS", 3)
    with opened("memory", tmp_path) as engine:
        [place] = places(engine, 1)
        client = place.client()
        for stid in range(1, 6):
            client.publish(NAME, b"x", stid)
            client.publish(NAME, b"", stid)
        client.publish(NAME, b"again", 5)
        kept = place.hub.last_values
        assert kept is not None
        of_topic = kept.of(place.hub.topic_table.named(NAME))
        assert [int.from_bytes(one, "big") for one in of_topic.deleted] == [3, 4]
        assert [frame[0:3][2] for frame in of_topic.deletion_frames()] == [Type.PUBLISH] * 2
