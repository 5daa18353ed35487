"""`subscribe(…, once=True)`: of all servers of a cluster one handles each message, whoever goes."""

from __future__ import annotations

from collections import Counter

from smqrt.broker.broker import Broker
from tests.cluster.engines import Engine, Place

Handled = list[tuple[str, bytes]]


def serve(place: Place, handled: Handled, once: bool = True) -> None:
    place.hub.subscribe(b"ask", lambda data, ptid, tid, stid: handled.append((place.name, data)), once=once)


def publish(engine: Engine, handled: Handled, places: list[Place], text: str) -> str:
    """Each node has a client that asks ten times; gives who has answered."""
    before = len(handled)
    expected = []
    for place in places:
        client = place.client()
        for number in range(10):
            expected.append(f"{text} {place.name} {number}".encode())
            client.publish(b"ask", expected[-1])
    engine.until(lambda: len(handled) >= before + len(expected), "all are handled")
    engine.settle()
    assert Counter(data for _, data in handled[before:]) == Counter(expected), "each once"
    for place in places:
        own = [data for _, data in handled[before:] if f" {place.name} ".encode() in data]
        assert own == sorted(own), "in order"
    (server,) = {name for name, _ in handled[before:]}
    return server


def test_one_server_handles_each_message_despite_failures(engine: Engine) -> None:
    handled: Handled = []
    places = [engine.place(name) for name in ("a", "b", "c")]
    for place in places:
        serve(place, handled)
    engine.joined(*places)
    engine.until(lambda: all(len(node.once) == 1 for place in places for node in place.member.remotes), "all are told")
    assert publish(engine, handled, places, "first") == "a", "who has run for longest"

    engine.kill(places.pop(0))
    engine.until(lambda: all(len(place.member.remotes) == 1 for place in places), "its end is noticed")
    assert publish(engine, handled, places, "second") == "b"

    places.append(engine.place("d"))
    serve(places[-1], handled)
    engine.joined(*places)
    engine.until(lambda: all(len(node.once) == 1 for place in places for node in place.member.remotes), "all are told")
    assert publish(engine, handled, places, "third") == "b", "a newcomer takes nothing over"

    places[0].hub.unsubscribe(b"ask")
    engine.until(
        lambda: all(
            not node.once or node.number != places[0].member.number for place in places for node in place.member.remotes
        )
    )
    assert publish(engine, handled, places, "fourth") == "c", "also of a node that handles none itself"


def test_messages_of_older_nodes_are_handled_once(engine: Engine) -> None:
    handled: Handled = []
    older, *places = engine.place("older", abilities=()), engine.place("a"), engine.place("b")
    for place in places:
        serve(place, handled)
    engine.joined(older, *places)
    ask = older.member.state.key_of(older.hub.topic_table.named(b"ask"))
    engine.until(lambda: older.member.interest.nodes(ask).bit_count() == 2, "it knows that both want them")
    engine.until(lambda: all(any(node.once for node in one.member.remotes) for one in places), "they know each other")
    assert publish(engine, handled, [older, *places], "mixed") == "a"


def test_each_part_of_a_cluster_has_one(engine: Engine) -> None:
    handled: Handled = []
    one, other = engine.place("one"), engine.place("other")
    for place in (one, other):
        serve(place, handled)
    engine.joined(one, other)
    engine.cut(one, other)
    engine.until(lambda: not one.member.remotes and not other.member.remotes, "both notice the cut")
    for place in (one, other):
        place.client().publish(b"ask", place.name.encode())
    engine.until(lambda: len(handled) == 2, "both are handled")
    assert sorted(handled) == [("one", b"one"), ("other", b"other")]
    engine.heal(one, other)
    engine.joined(one, other)
    engine.until(lambda: all(place.member.remotes[0].once for place in (one, other)), "told anew")
    assert publish(engine, handled, [one, other], "after") == "one"


def _with_numbers_of_its_own(broker: Broker) -> None:
    broker.create(b"ask", 17)
    broker.createsub(b"part", 4)


def test_a_message_keeps_its_publisher_and_its_sub_topic(engine: Engine) -> None:
    one, other = engine.place("one", prepare=_with_numbers_of_its_own), engine.place("other")
    got: list[tuple[bytes, int, int, int]] = []
    for place in (one, other):
        place.hub.subscribe(b"ask", lambda *message: got.append(message), once=True)
    engine.joined(one, other)
    engine.until(lambda: other.member.remotes[0].once and other.member.remotes[0].numbers, "told")
    client = other.client()
    client.publish(b"ask", b"hello", other.hub.createsub(b"part"))
    engine.until(lambda: got, "the message")
    engine.settle()
    assert got == [(b"hello", client.etid, 17, 4)]


def test_the_global_handler_gets_it_once_beside_others(engine: Engine) -> None:
    handled: Handled = []
    every: Handled = []
    one, other = engine.place("one"), engine.place("other")
    for place in (one, other):
        place.hub.onmsg(lambda data, ptid, tid, stid, place=place: handled.append((place.name, data)))
        place.hub.subscribe(b"ask", once=True)
        place.hub.subscribe(b"ask", lambda data, ptid, tid, stid, place=place: every.append((place.name, data)), b"all")
    engine.joined(one, other)
    engine.until(lambda: all(place.member.remotes[0].once for place in (one, other)), "told")
    assert publish(engine, handled, [one, other], "default") == "one"
    other.client().publish(b"ask", b"to all", other.hub.createsub(b"all"))
    engine.until(lambda: len(every) == 2, "both have it")
    assert sorted(every) == [("one", b"to all"), ("other", b"to all")]


def test_alone_it_is_as_without(engine: Engine) -> None:
    one = engine.place("one")
    handled: Handled = []
    serve(one, handled)
    assert publish(engine, handled, [one], "alone") == "one"
    one.hub.unsubscribe(b"ask")
    assert not one.hub.server.once
    assert not one.hub.server.topics
