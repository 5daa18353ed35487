"""A hub as part of a cluster: what it tells a new node, and what it accepts from one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from smqrt.broker.last_values import MAX_STAMP as MAX_VALUE_STAMP
from smqrt.broker.outbox import Drop
from smqrt.broker.topics import HubLimits
from smqrt.cluster.clustered_broker import BATCH_ITEMS, HANDLERS, MAX_STAMP, MAX_SUBSCRIBERS
from smqrt.cluster.remote_node import RemoteNode
from smqrt.errors import ProtocolError
from smqrt.wire import cluster_packets as wire
from smqrt.wire import smq
from smqrt.wire.cluster_packets import LinkType
from smqrt.wire.smq import LOCAL_BITS, node_of
from tests.broker.memory_clients import subscribe
from tests.cluster.one_hub import NUMBER, OneHub, Way, announced


@pytest.fixture
def hub() -> Iterator[OneHub]:
    found = OneHub()
    yield found
    for node in list(found.member.remotes):
        found.member.left_node(node, "the end of the test")
    found.settle()


# ---- what a new node is sent


def test_a_snapshot_ends_with_synced_in_bounded_portions(hub: OneHub) -> None:
    client = hub.client()
    for number in range(BATCH_ITEMS + 1):
        subscribe(client, b"topic/%d" % number)
    hub.broker.create(b"without subscribers")
    way = Way()
    hub.member.joined(5, way)
    hub.settle()
    packets = way.take()
    interest = [list(wire.parse_keys(one)) for one in packets if one[0] == LinkType.INTEREST]
    assert [len(keys) for keys in interest] == [BATCH_ITEMS, 1]
    assert set().union(*interest) == {hub.key(b"topic/%d" % number) for number in range(BATCH_ITEMS + 1)}
    assert [one[0] for one in packets].index(LinkType.SYNCED) == len(packets) - 1
    (peers,) = [list(wire.parse_peers(one)) for one in packets if one[0] == LinkType.PEERS]
    assert [one.etid for one in peers] == [client.etid]


def test_a_snapshot_stops_when_its_node_has_gone(hub: OneHub) -> None:
    way = Way()
    node = hub.member.joined(5, way)
    hub.member.left_node(node, "the test")
    hub.settle()
    assert way.got == []


def test_only_the_first_and_last_subscribers_are_announced(hub: OneHub) -> None:
    _, way = hub.join()
    one, other = hub.client(), hub.client()
    way.take()
    for client in (one, other):
        tid = subscribe(client, b"news")
        hub.settle()
    assert way.take() == list(wire.keys(LinkType.INTEREST, [hub.key(b"news")]))
    for client, expected in ((other, []), (one, list(wire.keys(LinkType.NO_INTEREST, [hub.key(b"news")])))):
        client.control(smq.with_id(smq.Type.UNSUBSCRIBE, tid))
        hub.settle()
        assert way.take() == expected


def test_clients_keep_their_etids_when_the_number_changes(hub: OneHub) -> None:
    client = hub.client()
    hub.member.renumber(NUMBER + 1)
    way = Way()
    hub.member.joined(5, way)
    hub.settle()
    (peers,) = [list(wire.parse_peers(one)) for one in way.got if one[0] == LinkType.PEERS]
    assert node_of(client.etid) == NUMBER
    assert [node_of(one.etid) for one in peers] == [NUMBER + 1], "other nodes know it by another one"
    hub.told(hub.member.remotes[0], [wire.end(peers[0].etid, b"bye")])
    assert client.closed


# ---- what another node may say


BAD = {
    "type 3e of another node": b"\x3e",
    "type  of another node": b"",
    f"connect time is out of range: {MAX_STAMP}": next(
        wire.peers([wire.Announced(5 << LOCAL_BITS | 1, MAX_STAMP, b"uid", b"", b"")])
    ),
    f"{MAX_SUBSCRIBERS + 1} subscribers at another node": next(
        wire.keys_and_numbers(LinkType.COUNT, [(1, 2, MAX_SUBSCRIBERS + 1)])
    ),
    "a last value of another node is too short": bytes((LinkType.VALUE,)) + bytes(11),
    "value of another node is too short": bytes((LinkType.VALUE_AT,)) + bytes(19),
    "the time of another node is missing": bytes((LinkType.CLOCK,)) + bytes(7),
    "missing or out of range": bytes((LinkType.CLOCK,)) + MAX_VALUE_STAMP.to_bytes(8, "big"),
    "the number of the predecessor is missing": bytes((LinkType.SUCCESSOR,)) + b"\0",
}


@pytest.mark.parametrize("why", BAD)
def test_invalid_packets_of_a_node_are_errors(hub: OneHub, why: str) -> None:
    node, _ = hub.join()
    with pytest.raises(ProtocolError, match=why):
        node.control(BAD[why])


def test_every_type_of_packet_has_a_handler() -> None:
    assert set(HANDLERS) == set(LinkType)


KEYS = [(1 << 31 | 7, 1), (1 << 31 | 8, 2)]
RETRACTED: dict[str, tuple[Callable[[RemoteNode], list[bytes]], Callable[[RemoteNode], list[bytes]]]] = {
    "interest": (
        lambda node: [*wire.keys(LinkType.INTEREST, KEYS)],
        lambda node: [*wire.keys(LinkType.NO_INTEREST, KEYS)],
    ),
    "watching": (lambda node: [*wire.keys(LinkType.WATCH, KEYS)], lambda node: [*wire.keys(LinkType.UNWATCH, KEYS)]),
    "handling once": (
        lambda node: [*wire.keys_and_numbers(LinkType.ONCE, [(*key, 9) for key in KEYS])],
        lambda node: [*wire.keys_and_numbers(LinkType.ONCE, [(*key, 0) for key in KEYS])],
    ),
    "clients": (
        lambda node: [*wire.peers([announced(node, 7), announced(node, 8, b"another", info=b"info")])],
        lambda node: [*wire.etids([announced(node, 7).etid, announced(node, 8).etid])],
    ),
}


@pytest.mark.parametrize("what", RETRACTED)
def test_memory_of_a_node_is_counted_once_and_freed(hub: OneHub, what: str) -> None:
    node, _ = hub.join()
    said, retracted = RETRACTED[what]
    hub.told(node, said(node))
    size = node.kept_bytes
    assert size > 0
    hub.told(node, said(node))
    assert node.kept_bytes == size, "said again, as a snapshot does"
    for _ in range(2):
        hub.told(node, retracted(node))
        assert node.kept_bytes == 0


@pytest.mark.parametrize("kind", [LinkType.TOPICS, LinkType.SUBTOPICS])
def test_a_name_with_another_number_is_counted_once(hub: OneHub, kind: LinkType) -> None:
    node, _ = hub.join()
    hub.broker.create(b"named", 17)
    hub.broker.createsub(b"named")
    hub.told(node, wire.names(kind, [(7, b"named")]))
    size = node.kept_bytes
    assert size > 0
    hub.told(node, wire.names(kind, [(7, b"named")]))
    assert node.kept_bytes == size


def test_a_client_announced_anew_replaces_its_former_self(hub: OneHub) -> None:
    node, _ = hub.join()
    hub.told(node, wire.peers([announced(node, 7, info=b"before")]))
    first = node.phantoms[announced(node, 7).etid]
    hub.told(node, wire.peers([announced(node, 7, info=b"again")]))
    assert node.phantoms[first.etid] is first, "the same stamp: it is the same client"
    hub.told(node, wire.peers([announced(node, 7, stamp=2, info=b"now")]))
    (phantom,) = node.phantoms.values()
    assert (phantom.info, hub.member.holder(b"uid")) == (b"now", phantom)
    assert node.kept_bytes == phantom.size_bytes


def test_sub_topics_above_the_limit_keep_the_number_there() -> None:
    hub = OneHub(limits=HubLimits(names=1))
    node, _ = hub.join()
    hub.told(node, wire.names(LinkType.SUBTOPICS, [(7, b"first"), (8, b"second")]))
    assert list(hub.broker.subtopic_table.by_name) == [b"first"]
    assert (8).to_bytes(4, "big") not in node.subtopics
    hub.member.left_node(node, "the test")
    hub.settle()


# ---- nodes that leave


def test_the_bit_of_a_node_outlasts_its_topics(hub: OneHub) -> None:
    node, _ = hub.join(5)
    hub.told(node, wire.keys(LinkType.INTEREST, KEYS))
    hub.member.left_node(node, "the test")
    other = hub.member.joined(6, Way())
    assert other.bit != node.bit, "topics still have the bit"
    hub.settle()
    assert not hub.member.interest
    third, _ = hub.join(7)
    assert third.bit == node.bit


def test_queued_messages_of_a_lost_node_are_counted_once(hub: OneHub) -> None:
    node, way = hub.join()
    events: list[str] = []
    hub.member.changed = lambda node, event: events.append(event)
    for _ in range(3):
        way.put(smq.publish_frame(1, 5, 0, b"") * 2)
    way.send([bytes((LinkType.SYNCED,))])
    for _ in range(2):
        hub.member.left_node(node, "the test")
    way.put(smq.publish_frame(1, 5, 0, b""))  # by a stale route
    assert hub.broker.stats.drops[Drop.LINK_LOST] == 7
    assert events == ["the test"]
