"""Missed messages of a lost node are counted once for each node and message."""

from __future__ import annotations

import pytest

from smqrt.broker.outbox import Drop
from smqrt.broker.state import Hooks
from smqrt.cluster import leaving_nodes
from smqrt.cluster.engines.mesh import Mesh
from smqrt.smq.gevent_broker import GeventBroker, HubOptions
from tests.cluster.cut import Cable
from tests.cluster.engines import KEY, Engine, Place, pair
from tests.support.waiting import wait_until


def lost(place: Place) -> int:
    return place.hub.stats.drops[Drop.LINK_LOST]


def unrouted(place: Place) -> int:
    return place.hub.stats.drops[Drop.UNROUTED]


def apart(engine: Engine, one: Place, other: Place) -> None:
    """Break their link when all has arrived, and wait until both know and have forgotten each other."""
    for place in (one, other):
        engine.wait_acknowledged(place)
    engine.cut(one, other)
    for place, lost_one in ((one, other), (other, one)):
        number = lost_one.member.number
        engine.until(
            lambda at=place, of=number: of not in [remote.number for remote in at.member.remotes], "it notices"
        )
        engine.until(lambda at=place, of=number: is_forgotten(at, of), "it has forgotten the clients")


def is_forgotten(place: Place, number: int) -> bool:
    return not any(one.node.number == number for one in place.member.phantoms.values()) and (
        place.member.state.bits.bit_count() == len(place.member.remotes)
    )


def test_missed_messages_of_a_lost_node_are_counted(engine: Engine) -> None:
    places = one, other, third = [engine.place(name) for name in ("one", "other", "third")]
    engine.joined(*places)
    mine, theirs, both, gone = one.client(), other.client(), third.client(), other.client()
    for client, name in ((theirs, b"theirs"), (theirs, b"all"), (both, b"all"), (mine, b"all"), (gone, b"left")):
        client.subscribe(name)
    gone.unsubscribe(b"left")
    engine.until(lambda: one.wanted_by(b"theirs") == 1 and one.wanted_by(b"all") == 2, "interest")
    engine.until(lambda: not one.wanted_by(b"left"), "interest that is gone")
    engine.until(lambda: one.member.phantom(theirs.etid), "the phantom")
    dropped: list[int] = []
    one.hub.hooks.ondrop = lambda run, tid, ptid, peer: dropped.append(tid)
    etid = theirs.etid
    apart(engine, one, other)
    assert lost(one) == 0
    for number in range(10):
        for to in (b"theirs", b"all", b"left", etid):
            mine.publish(to, b"%d" % number)
        one.hub.publish(b"%d" % number, b"theirs")
    engine.until(lambda: len(both.data) == len(mine.data) == 10, "those that are there get all")
    assert (lost(one), unrouted(one)) == (40, 10)
    assert dropped.count(etid) == 10, "nobody takes the message"
    assert len(dropped) == 40
    assert one.member.routing.to_servers(b"to all servers", one.hub.gettid(), 0) == len(one.member.remotes)
    assert lost(one) == 41

    engine.heal(one, other)
    engine.joined(*places)
    engine.until(lambda: one.wanted_by(b"theirs") == 1 and one.wanted_by(b"all") == 2, "interest")
    assert not one.member.lost.nodes
    before = lost(one)
    for number in range(10, 20):
        mine.publish(b"theirs", b"%d" % number)
        mine.publish(b"all", b"%d" % number)
    engine.until(lambda: len(theirs.data) == 20, "the messages after")
    engine.settle()
    assert lost(one) == before == 41
    assert one.member.lost.is_empty


def test_a_node_that_leaves_in_order_misses_nothing(engine: Engine) -> None:
    one, other = pair(engine)
    subscriber, publisher = other.client(), one.client()
    subscriber.subscribe(b"topic")
    engine.until(lambda: one.wanted_by(b"topic"), "interest")
    engine.wait_acknowledged(one)
    engine.stop(other)
    engine.until(lambda: not one.member.remotes and not one.member.interest, "it notices")
    publisher.publish(b"topic", b"to nobody")
    assert (lost(one), unrouted(one)) == (0, 1)
    assert not one.member.lost.nodes


def test_copies_for_killed_nodes_are_counted_until_restart(engine: Engine) -> None:
    one, other = engine.place("one", number=76), engine.place("other", number=77)
    engine.joined(one, other)
    publisher = one.client()
    other.client().subscribe(b"topic")
    engine.until(lambda: one.wanted_by(b"topic"), "interest")
    engine.wait_acknowledged(one)
    engine.kill(other)
    engine.until(lambda: not one.member.remotes and not one.member.interest, "it notices")
    for _ in range(5):
        publisher.publish(b"topic", b"meanwhile")
    assert lost(one) == 5
    again = engine.place("again", number=77)
    engine.joined(one, again)
    publisher.publish(b"topic", b"nobody wants it any more")
    assert (lost(one), unrouted(one)) == (5, 1)


def test_a_lost_node_is_forgotten_after_a_while(engine: Engine) -> None:
    one, other = pair(engine)
    one.member.lost.kept_s = 0.0
    publisher = one.client()
    other.client().subscribe(b"topic")
    engine.until(lambda: one.wanted_by(b"topic"), "interest")
    apart(engine, one, other)
    engine.node_of(one).check_links()
    engine.until(lambda: one.member.lost.is_empty, "it is forgotten")
    publisher.publish(b"topic", b"to nobody")
    assert (lost(one), unrouted(one)) == (0, 1)


def test_a_hub_outside_the_cluster_is_not_counted(engine: Engine) -> None:
    one, other = pair(engine)
    publisher = one.client()
    other.client().subscribe(b"topic")
    engine.until(lambda: one.wanted_by(b"topic"), "interest")
    apart(engine, one, other)
    assert len(one.member.lost.nodes) == 1
    one.member.leave()
    publisher.publish(b"topic", b"alone")
    assert (lost(one), unrouted(one)) == (0, 1)


def test_lost_nodes_are_counted_up_to_the_limit(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving_nodes, "MAX_ABSENT", 1)
    one, first, second = places = [engine.place(name) for name in ("one", "first", "second")]
    engine.joined(*places)
    publisher = one.client()
    for place in (first, second):
        place.client().subscribe(b"topic")
    engine.until(lambda: one.wanted_by(b"topic") == 2, "interest")
    engine.wait_acknowledged(one)
    engine.kill(first)
    engine.kill(second)
    engine.until(lambda: not one.member.remotes and not one.member.interest, "it notices")
    publisher.publish(b"topic", b"meanwhile")
    assert lost(one) == len(one.member.lost.nodes) == 1


def test_a_node_with_drawn_number_returns_at_its_address() -> None:
    here, there, hub, again = Mesh(KEY), Mesh(KEY), GeventBroker(Hooks(), HubOptions()), Mesh(KEY)
    told: list[str] = []
    hub.hooks.onnode = lambda node, event, why: told.append(event)
    member = here.join(hub, "hub")
    old, new = GeventBroker(Hooks(), HubOptions()), GeventBroker(Hooks(), HubOptions())
    there.join(old, "hub")
    old.subscribe(b"topic")
    port = there.listen("127.0.0.1", 0).address[1]
    cable = Cable(port)
    here.dial("127.0.0.1", cable.port)
    try:
        wait_until(lambda: told == ["joined"], told)
        hub.publish(b"before", b"topic")
        wait_until(lambda: not any(link.unacked for link in here.node.links.values()), "it has arrived")
        cable.cut()
        there.close()
        wait_until(lambda: told == ["joined", "lost"] and not member.interest, told)
        hub.publish(b"meanwhile", b"topic")
        assert hub.drops()["link_lost"] == 1
        again.join(new, "hub")
        again.listen("127.0.0.1", port)
        cable.mend()
        wait_until(lambda: told == ["joined", "lost", "back"], told)
        assert not member.lost.nodes
        hub.publish(b"nobody wants it any more", b"topic")
        assert (hub.drops()["link_lost"], hub.drops()["unrouted"]) == (1, 1)
    finally:
        for mesh in (here, there, again):
            mesh.close()
        for broker in (hub, old, new):
            broker.close()
        cable.close()
