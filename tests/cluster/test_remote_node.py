"""Other nodes, from the view of one hub: their send queues and the routes of their messages.

A message is counted as published once, where that was; what comes from other nodes has a counter of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from smqrt.auth.identity import ANONYMOUS
from smqrt.broker.outbox import Drop
from smqrt.broker.topics import Traffic
from smqrt.cluster import remote_node as module
from smqrt.cluster.remote_node import MAX_KEPT_BYTES, PacedRoute, Phantom, count_messages
from smqrt.errors import ProtocolError
from smqrt.wire import cluster_packets as wire
from smqrt.wire import smq
from smqrt.wire.cluster_packets import LinkType
from tests.broker.memory_clients import heard, subscribe
from tests.cluster.engines import Client, Engine, Place, pair
from tests.cluster.one_hub import OneHub, Way, announced

# ---- counters, on every engine


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


# ---- send queues


@pytest.fixture
def hub() -> Iterator[OneHub]:
    found = OneHub()
    yield found
    for node in list(found.member.remotes):
        found.member.left_node(node, "the end of the test")
    found.settle()


def message(to: int, data: bytes, stid: int = 0) -> bytes:
    return smq.publish_frame(to, 5, stid, data)


def data(packets: list[bytes]) -> list[bytes]:
    return [packet[13:] for packet in packets if packet[0] == smq.Type.PUBLISH]


def test_a_keeping_queue_first_sends_what_it_has() -> None:
    way = Way()
    way.put(message(1, b"before"))
    way.keep()
    way.put(message(1, b"later"))
    way.flush()
    assert data(way.take()) == [b"before"]
    way.keeps = False
    way.release()
    assert data(way.take()) == [b"later"]


def test_only_messages_of_a_batch_are_counted() -> None:
    control = smq.frame(bytes((LinkType.SYNCED,)))
    assert count_messages(b"") == 0
    assert count_messages(control + message(1, b"") + control + message(1, b"x" * 300) + control) == 2


# ---- routes of messages to other nodes


def test_publishers_wait_for_full_queues_of_their_route(hub: OneHub) -> None:
    publisher, reader = hub.client(), hub.client()
    subscribe(reader, b"news")
    topic = hub.broker.topic_table.by_name[b"news"]
    one, other = Way(), Way()
    route = PacedRoute(topic, (one,), publisher, full := {})
    batch = message(topic.id, b"hello")
    assert not route.deliver(batch)
    full[other] = []
    assert not route.deliver_view(memoryview(batch)), "its messages do not go there"
    full[one] = []
    assert route.deliver(batch)
    assert route.deliver_view(memoryview(batch))
    hub.settle()
    assert full == {one: [publisher, publisher], other: []}
    assert data(heard(reader)) == [b"hello"] * 4, "it is delivered all the same"


def test_the_time_is_sent_when_it_has_changed(hub: OneHub) -> None:
    node, way = hub.join()
    for stamp in (7, 7, 8):
        node.send_clock(stamp)
    hub.settle()
    assert way.take() == [bytes((LinkType.CLOCK,)) + stamp.to_bytes(8, "big") for stamp in (7, 8)]


# ---- routes of messages of another node


def test_messages_of_a_link_go_over_no_other_link(hub: OneHub) -> None:
    one, _ = hub.join(5)
    other, way = hub.join(6)
    there = announced(other, 9)
    hub.told(other, wire.peers([there]))
    hub.broker.publish(b"from here", there.etid)
    hub.settle()
    one.resolve(there.etid.to_bytes(4, "big")).deliver(message(there.etid, b"from a node"))
    hub.settle()
    assert data(way.take()) == [b"from here"]
    assert hub.broker.stats.drops[Drop.UNROUTED] == 1


def test_messages_without_subscribers_here_are_counted_as_dropped(hub: OneHub) -> None:
    node, _ = hub.join()
    tid = hub.broker.create(b"news")
    batch = message(tid, b"") * 3
    route = node.resolve(tid.to_bytes(4, "big"))
    route.deliver(batch)
    route.deliver_view(memoryview(batch))
    assert hub.broker.stats.drops[Drop.UNROUTED] == 6


def test_a_held_node_reaches_no_client(hub: OneHub) -> None:
    node, _ = hub.join()
    reader = hub.client()
    tid = subscribe(reader, b"news")
    key = tid.to_bytes(4, "big")
    for is_held in (False, True, True, False):
        node.hold(is_held)
        (node.routes.get(key) or node.resolve(key)).deliver(message(tid, str(is_held).encode()))
    hub.settle()
    assert data(heard(reader)) == [b"False", b"False"]
    assert not hub.broker.stats.drops[Drop.UNROUTED], "the other process delivers them"


def test_numbers_of_sub_topics_there_are_translated(hub: OneHub) -> None:
    node, _ = hub.join()
    reader = hub.client()
    tid, here = subscribe(reader, b"news"), hub.broker.createsub(b"sub")
    hub.told(node, wire.names(LinkType.SUBTOPICS, [(here + 1, b"sub")]))
    batch = message(tid, b"known", here + 1) + message(tid, b"unknown", 77)
    route = node.resolve(tid.to_bytes(4, "big"))
    route.deliver(batch)
    route.deliver_view(memoryview(batch))
    hub.settle()
    got = [smq.unpack_publish(smq.frame(one)) for one in heard(reader) if one[0] == smq.Type.PUBLISH]
    assert [(stid, text) for _, _, stid, text in got] == [(here, b"known"), (77, b"unknown")] * 2


def test_a_full_route_cache_is_emptied(hub: OneHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ROUTES", 2)
    node, _ = hub.join()
    reader = hub.client()
    tids = [subscribe(reader, name) for name in (b"one", b"two", b"three")]
    for tid in tids:
        node.resolve(tid.to_bytes(4, "big"))
    assert list(node.routes) == [tids[2].to_bytes(4, "big")]
    assert not hub.broker.topic_table.by_name[b"one"].cached


def test_memory_for_one_node_is_limited(hub: OneHub) -> None:
    node, _ = hub.join()
    node.grow(MAX_KEPT_BYTES - node.kept_bytes)
    with pytest.raises(ProtocolError, match="a node announces more than 1024 MiB for one hub"):
        node.grow(1)


@pytest.mark.parametrize(
    ("user", "shown"),
    [(b"", None), (ANONYMOUS.encode(), ""), (b"alice", "alice"), (b"\xff", "\udcff")],
)
def test_clients_of_other_nodes_have_the_announced_user(hub: OneHub, user: bytes, shown: str | None) -> None:
    node, _ = hub.join()
    identity = Phantom(node, announced(node)._replace(user=user)).identity
    assert (None if identity is None else identity.user) == shown
