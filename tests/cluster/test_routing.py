"""Clients of other nodes, routes to them, and publishers that wait for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from smqrt.broker.outbox import Drop, Pressure, Slow, SlowPolicies
from smqrt.broker.sessions import Session
from smqrt.broker.state import BrokerPeer, Hooks
from smqrt.cluster import routing as module
from smqrt.cluster.remote_node import Phantom, RemoteNode
from smqrt.cluster.routing import MAX_SORTED, PRESSURE_GRACE_S
from smqrt.errors import CloseReason
from smqrt.wire import cluster_packets as wire
from smqrt.wire import smq
from smqrt.wire.cluster_packets import LinkType
from smqrt.wire.smq import server_of
from tests.broker.memory_clients import subscribe
from tests.cluster.engines import Engine, Place, opened
from tests.cluster.one_hub import NUMBER, OneHub, announced

# ---- one uid at two nodes that do not know each other, as a third node sees it


@pytest.fixture
def places(tmp_path: Path) -> Iterator[tuple[Engine, Place, Place, Place]]:
    """Two nodes that have no link to each other, and one that has links to both."""
    with opened("memory", tmp_path) as engine:
        one, other, both = (engine.place(name, number=number) for number, name in enumerate("abc", 1))
        engine.joined(one, other, both)
        engine.cut(one, other)
        yield engine, one, other, both


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_equal_stamps_are_decided_by_the_greater_node(
    places: tuple[Engine, Place, Place, Place], order: tuple[int, int]
) -> None:
    engine, *nodes, both = places
    etids = {}
    for number in order:
        etids[number] = nodes[number].client(b"the same").etid
        engine.settle()
    holder = both.member.holder(b"the same")
    assert holder is not None
    assert holder.etid == etids[1]


def test_the_previous_client_regains_the_uid(places: tuple[Engine, Place, Place, Place]) -> None:
    engine, one, other, both = places
    first, second = one.client(b"the same"), other.client(b"the same")
    engine.settle()
    second.session.disconnect(CloseReason.PEER_CLOSED)
    engine.settle()
    holder = both.member.holder(b"the same")
    assert holder is not None
    assert holder.etid == first.etid
    first.session.disconnect(CloseReason.PEER_CLOSED)
    engine.settle()
    assert both.member.holder(b"the same") is None
    assert not both.member.clients.holders


def test_peers_lists_a_uid_once(places: tuple[Engine, Place, Place, Place]) -> None:
    """A node that starts again lists its clients at once; that its former self is dead others notice seconds later."""
    engine, one, other, both = places
    one.client(b"the same")
    other.client(b"another one")
    engine.settle()
    second = other.client(b"the same")
    engine.settle()

    def listed() -> list[tuple[bytes, int]]:
        return sorted((peer.uid, peer.etid) for peer in both.hub.peers(True) if peer is not both.hub.server)

    assert len(both.member.phantoms) == 3
    assert [uid for uid, _ in listed()] == [b"another one", b"the same"]
    assert (b"the same", second.etid) in listed()
    here = both.client(b"the same")
    assert (b"the same", here.etid) in listed()
    assert len(listed()) == 2
    assert {uid for uid, _ in listed()} == {peer.uid for peer in one.hub.peers(True) if peer is not one.hub.server} | {
        b"another one"
    }


# ---- clients of one uid


@pytest.fixture
def hub() -> Iterator[OneHub]:
    found = OneHub()
    yield found
    for node in list(found.member.remotes):
        found.member.left_node(node, "the end of the test")
    found.settle()


def appear(hub: OneHub, node: RemoteNode, local: int, stamp: int, uid: bytes = b"client") -> Phantom:
    """A client connects to another node."""
    hub.told(node, wire.peers([announced(node, local, uid, stamp)]))
    return node.phantoms[announced(node, local).etid]


@pytest.mark.parametrize(
    ("number", "stamp", "stays"), [(1, 999, True), (1, 1000, True), (9, 999, True), (9, 1000, False), (1, 1001, False)]
)
def test_the_younger_client_stays_or_the_greater_node(hub: OneHub, number: int, stamp: int, stays: bool) -> None:
    hub.now_ms = 1000
    here = hub.client(b"client")
    node, _ = hub.join(number)
    appear(hub, node, 7, stamp)
    assert here.closed is not stays


def test_a_new_client_is_younger_despite_a_slow_clock(hub: OneHub) -> None:
    node, way = hub.join()
    appear(hub, node, 7, stamp=hub.now_ms + 5000)
    here = hub.client(b"client")
    (said,) = [list(wire.parse_peers(packet)) for packet in way.take() if packet[0] == LinkType.PEERS]
    assert [(one.etid, one.stamp) for one in said] == [(here.etid, hub.now_ms + 5001)]


def test_the_holder_is_the_youngest_on_a_present_node(hub: OneHub) -> None:
    one, _ = hub.join(5)
    other, _ = hub.join(6)
    younger, older = appear(hub, other, 7, 20), appear(hub, one, 7, 10)
    assert hub.member.holder(b"client") is younger
    hub.member.left_node(other, "the test")
    assert hub.member.holder(b"client") is older, "before the clients of the node are removed"
    assert hub.member.phantom(younger.etid) is None
    hub.settle()
    assert hub.member.holder(b"client") is older
    assert list(hub.member.peers_elsewhere()) == [older]


@pytest.mark.parametrize("gone", range(3))
def test_any_client_of_a_uid_may_go_first(hub: OneHub, gone: int) -> None:
    node, _ = hub.join()
    phantoms = [appear(hub, node, 7 + stamp, stamp) for stamp in range(3)]
    hub.told(node, wire.etids([phantoms.pop(gone).etid]))
    for phantom in reversed(phantoms):
        assert hub.member.holder(b"client") is phantom
        hub.told(node, wire.etids([phantom.etid]))
    assert not hub.member.clients.holders


def test_many_clients_of_one_uid_are_partly_sorted(hub: OneHub) -> None:
    node, _ = hub.join()
    stamps = [*range(100, 100 + MAX_SORTED + 1), 1]
    phantoms = [appear(hub, node, 7 + at, stamp) for at, stamp in enumerate(stamps)]
    found = hub.member.holder(b"client")
    order: list[int] = []
    while found is not None:
        order.append(found.stamp)
        found = found.older
    assert order == [*range(100 + MAX_SORTED, 100, -1), 1, 100], "the last step is left out"
    hub.told(node, wire.etids([one.etid for one in phantoms]))
    assert not hub.member.clients.holders


def test_hooks_hear_only_of_clients_they_were_given() -> None:
    gone: list[bytes] = []
    hub = OneHub(Hooks(onvanish=lambda phantom: gone.append(phantom.uid)))
    node, _ = hub.join()
    given, _ = appear(hub, node, 7, 1, b"given"), appear(hub, node, 8, 1, b"another")
    given.extra = object()
    hub.member.left_node(node, "the test")
    hub.settle()
    assert gone == [b"given"]


def test_a_client_is_closed_at_its_node(hub: OneHub) -> None:
    node, way = hub.join()
    phantom = appear(hub, node, 7, 1)
    assert not hub.member.end_client(phantom.etid + 1, None)
    assert hub.member.end_client(phantom.etid, b"bye")
    hub.settle()
    assert way.take() == [wire.end(phantom.etid, b"bye")]
    hub.member.left_node(node, "the test")
    assert not hub.member.end_client(phantom.etid, None)


def test_servers_of_other_nodes_have_etids(hub: OneHub) -> None:
    node, _ = hub.join(5)
    assert hub.member.phantom(server_of(5)) is node.server
    assert hub.member.phantom(server_of(6)) is None
    hub.member.left_node(node, "the test")
    assert hub.member.phantom(server_of(5)) is None


# ---- routes


def published(hub: OneHub, name: bytes | int) -> None:
    hub.broker.publish(b"hello", name)
    hub.settle()


def test_messages_have_the_topic_number_of_each_node(hub: OneHub) -> None:
    (one, way), (other, there) = hub.join(5), hub.join(6)
    tid = hub.broker.create(b"news")
    for node in (one, other):
        hub.told(node, wire.keys(LinkType.INTEREST, [hub.key(b"news")]))
    hub.told(other, wire.keys_and_numbers(LinkType.NUMBERED, [(*hub.key(b"news"), 77)]))
    published(hub, b"news")
    (first,), (second,) = ([smq.unpack_publish(smq.frame(packet)) for packet in queue.take()] for queue in (way, there))
    assert (first[0], second[0]) == (tid, 77)
    assert first[1] == second[1] == server_of(NUMBER)


def test_messages_to_servers_reach_each_other_node(hub: OneHub) -> None:
    ways = {number: hub.join(number)[1] for number in (5, 6)}
    assert hub.member.routing.to_servers(b"hello", hub.broker.server.etid, 0) == 2
    hub.settle()
    for number, way in ways.items():
        assert [smq.unpack_publish(smq.frame(one))[:2] for one in way.take()] == [
            (server_of(number), server_of(NUMBER))
        ]


def test_messages_to_clients_of_lost_nodes_are_counted(hub: OneHub) -> None:
    node, _ = hub.join()
    phantom = appear(hub, node, 7, 1)
    hub.member.left_node(node, "the test")
    hub.settle()
    published(hub, phantom.etid)
    published(hub, phantom.etid + 1)
    drops = hub.broker.stats.drops
    assert (drops[Drop.LINK_LOST], drops[Drop.UNROUTED]) == (2, 0), "each ETID of the node may have been a client"
    published(hub, announced(node, 7).etid + (1 << 21))
    assert (drops[Drop.LINK_LOST], drops[Drop.UNROUTED]) == (2, 1)


# ---- full links


class Publisher:
    """A client that waits.

    Attributes:
        resumed: how often it went on.
    """

    def __init__(self, hub: OneHub, monkeypatch: pytest.MonkeyPatch) -> None:
        self.session: Session = hub.client()
        self.resumed = 0
        monkeypatch.setattr(self.session.outbox, "resume", self._resume)

    def _resume(self) -> None:
        self.resumed += 1


def wait_for(hub: OneHub, node: RemoteNode, peer: BrokerPeer) -> None:
    """The link is full, and a publisher waits for it."""
    node.send_queue.on_full()
    hub.member.waits.full[node.send_queue].append(peer)


def test_publishers_resume_when_the_node_has_caught_up(hub: OneHub, monkeypatch: pytest.MonkeyPatch) -> None:
    node, way = hub.join()
    publisher = Publisher(hub, monkeypatch)
    way.take()
    wait_for(hub, node, publisher.session)
    way.put(smq.publish_frame(1, 5, 0, b""))
    hub.settle()
    assert (way.take(), publisher.resumed) == ([], 0)
    for then in way.behind:
        then()
    hub.settle()
    assert (len(way.take()), publisher.resumed) == (1, 1)


def test_publishers_wait_on_when_held_messages_fill_it_again(hub: OneHub, monkeypatch: pytest.MonkeyPatch) -> None:
    node, way = hub.join()
    publisher = Publisher(hub, monkeypatch)
    wait_for(hub, node, publisher.session)
    way.put(smq.publish_frame(1, 5, 0, b""))
    way.flushed = way.on_full
    hub.member.waits.caught_up(node)
    hub.settle()
    assert publisher.resumed == 0
    assert hub.member.waits.full == {way: [publisher.session]}


def test_publishers_wait_once_and_only_so_long(hub: OneHub, monkeypatch: pytest.MonkeyPatch) -> None:
    node, way = hub.join()
    publisher = Publisher(hub, monkeypatch)
    wait_for(hub, node, publisher.session)
    hub.pass_time(Pressure.max_wait_s - 1)
    assert publisher.resumed == 0
    hub.pass_time(1)
    assert (publisher.resumed, way.holds) == (1, False)
    way.on_full()
    assert not hub.member.waits.full, "the node has not caught up since"
    hub.member.waits.caught_up(node)
    way.on_full()
    assert way in hub.member.waits.full


def test_publishers_resume_when_the_node_is_lost(hub: OneHub, monkeypatch: pytest.MonkeyPatch) -> None:
    node, way = hub.join()
    publisher = Publisher(hub, monkeypatch)
    wait_for(hub, node, publisher.session)
    hub.member.left_node(node, "the test")
    hub.settle()
    assert publisher.resumed == 1
    way.on_full()
    assert not hub.member.waits.full


def test_a_snapshot_pauses_while_its_node_is_behind(hub: OneHub) -> None:
    node, way = hub.join()
    done: list[int] = []
    node.send_queue.is_behind = True  # type: ignore[misc]
    steps = iter(done.append(number) for number in range(3))
    for _ in module.paced(node, steps):
        pass
    assert (done, len(way.behind)) == ([0], 1)
    node.send_queue.is_behind = False  # type: ignore[misc]
    way.behind.pop()()
    hub.settle()
    assert done == [0, 1, 2]


# ---- slow clients of other nodes


def pressing(hub: OneHub) -> bool:
    """Whether publishers of the topic have to wait."""
    assert hub.broker.slow is not None
    return bool(hub.broker.slow.pressure.topics)


def test_a_forgotten_slow_client_delays_for_bounded_time(hub: OneHub) -> None:
    hub.broker.slow = SlowPolicies(hub.broker.topic_table.by_key, Slow.WAIT, {})
    node, _ = hub.join()
    hub.broker.create(b"news")
    most_s = Pressure.max_wait_s + PRESSURE_GRACE_S
    hub.told(node, wire.keys(LinkType.PRESSED, [hub.key(b"news")]))
    hub.pass_time(most_s - 1)
    hub.told(node, wire.keys(LinkType.PRESSED, [hub.key(b"news")]))
    hub.pass_time(most_s - 1)
    assert pressing(hub), "it was said again"
    hub.pass_time(1)
    assert not pressing(hub)
    assert not node.pressing


def test_a_node_may_slow_down_so_many_topics(hub: OneHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PRESSING", 1)
    hub.broker.slow = SlowPolicies(hub.broker.topic_table.by_key, Slow.WAIT, {})
    node, _ = hub.join()
    for name in (b"news", b"more"):
        hub.broker.create(name)
    hub.told(node, wire.keys(LinkType.PRESSED, [hub.key(b"news"), hub.key(b"more")]))
    assert list(node.pressing) == [hub.key(b"news")]
    hub.told(node, wire.keys(LinkType.RELEASED, [hub.key(b"news"), hub.key(b"more")]))
    assert not pressing(hub)


def test_a_client_that_goes_delays_its_publishers_no_longer(hub: OneHub) -> None:
    hub.broker.slow = SlowPolicies(hub.broker.topic_table.by_key, Slow.WAIT, {})
    node, _ = hub.join()
    phantom = appear(hub, node, 7, 1)
    hub.told(node, wire.keys(LinkType.PRESSED, [(phantom.etid, 0)]))
    assert pressing(hub)
    hub.told(node, wire.etids([phantom.etid]))
    assert not pressing(hub)


def test_only_nodes_that_know_them_hear_of_slow_clients(hub: OneHub) -> None:
    (_, newer), (_, older) = hub.join(5), hub.join(6)
    older.knows_backpressure = False  # type: ignore[misc]
    tid = subscribe(hub.client(), b"news")
    hub.settle()
    newer.take()
    older.take()
    for presses in (True, False):
        hub.member.pressed(tid.to_bytes(4, "big"), presses)
    hub.settle()
    key = [hub.key(b"news")]
    assert newer.take() == [*wire.keys(LinkType.PRESSED, key), *wire.keys(LinkType.RELEASED, key)]
    assert older.take() == []
