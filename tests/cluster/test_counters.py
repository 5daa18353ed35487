"""A message is counted as published once, where that was; what comes from other nodes has a counter of its own."""

from __future__ import annotations

from smqrt.broker.topics import Traffic
from smqrt.wire import smq
from tests.cluster.engines import Client, Engine, Place, pair


def traffic(place: Place) -> Traffic:
    for topic in list(place.hub.topic_table.by_key.values()):
        topic.count()
    return place.hub.topic_table.traffic


def counts(place: Place) -> tuple[int, int, int]:
    """Published, arrived, copies."""
    found = traffic(place)
    return found.messages, found.arrived, found.copies


def publish(client: Client, to: int, data: bytes) -> int:
    """As a connection does it, with one message; gives its bytes."""
    frame = smq.publish_frame(to, client.etid, 0, data)
    client.session.publish(frame)
    return len(frame)


def test_a_message_is_published_once(engine: Engine) -> None:
    one, other = pair(engine)
    publisher, there = one.client(), other.client()
    there.subscribe(b"topic")
    engine.until(lambda: one.wanted_by(b"topic"), "interest")
    size = publish(publisher, there.number(b"topic"), b"by number")  # whose name is not known at this node
    for _ in range(4):
        publisher.publish(b"topic", b"by number")
    engine.until(lambda: len(there.data) == 5, "five messages")
    assert counts(one) == (5, 0, 0)
    assert counts(other) == (0, 5, 5)
    assert (traffic(one).bytes, traffic(other).bytes) == (5 * size, 0)

    here = [one.client() for _ in range(2)]
    for client in here:
        client.subscribe(b"topic")
    for _ in range(3):
        publisher.publish(b"topic", b"to both nodes")
    engine.until(lambda: len(there.data) == 8, "eight messages")
    assert counts(one) == (8, 0, 6)
    assert counts(other) == (0, 8, 8)

    publisher.publish(there.etid, b"directly")
    one.hub.publish(b"of the server", b"topic")
    engine.until(lambda: len(there.data) == 10, "ten messages")
    assert counts(one) == (10, 0, 8)
    assert counts(other) == (0, 10, 10)


def test_a_run_is_counted_whole(engine: Engine) -> None:
    one, other = pair(engine)
    publisher, there = one.client(), other.client()
    there.subscribe(b"topic")
    engine.until(lambda: one.wanted_by(b"topic"), "interest")
    number = publisher.number(b"topic")
    run = smq.publish_frame(number, publisher.etid, 0, b"in a run") * 5
    route = publisher.session.resolve(run[2:11])
    publisher.session.count_batch(run[3:7], 4)
    route.deliver(run)
    engine.until(lambda: len(there.data) == 5, "five messages")
    assert counts(one)[0] == 5
    assert traffic(one).bytes == len(run)
    assert traffic(other).messages == traffic(other).bytes == 0


def test_a_topic_subscribed_here_later(engine: Engine) -> None:
    one, other = pair(engine)
    there = other.client()
    there.subscribe(b"topic")
    engine.until(lambda: one.wanted_by(b"topic"), "interest")
    one.client().publish(b"topic", b"away")
    here = one.client()
    here.subscribe(b"topic")
    engine.until(lambda: other.wanted_by(b"topic"), "interest")
    other.client().publish(b"topic", b"from there")
    engine.until(lambda: here.data, "the message")
    assert counts(one) == (1, 1, 1)
