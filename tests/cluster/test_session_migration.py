"""A hub moves to another process while other nodes write to it: nothing is lost, comes twice or out of order."""

from __future__ import annotations

import gevent
import pytest

from smqrt.broker.outbox import Drop
from smqrt.cluster import leaving_nodes
from smqrt.wire.cluster_packets import PRESSURE, SIBLINGS, STAMPS
from tests.cluster.engines import Client, Engine, Place, pair


def drops(place: Place) -> dict[Drop, int]:
    return {reason: count for reason, count in place.hub.stats.drops.items() if count}


def pause(engine: Engine, place: Place) -> None:
    place.member.pause()
    engine.until(lambda: place.member.is_paused, "the others keep what is for the hub")


def moved(engine: Engine, old: Place, number: int = 0) -> tuple[Place, Client]:
    """The hub of a node goes to a new one, with its only client, which is another one here."""
    new = engine.place("new", number=number)
    new.member.migration.expect()
    engine.until(lambda: len(new.member.remotes) >= 1 and all(one.synced for one in new.member.remotes), "it joins")
    client = Client(new.hub)
    client.subscribe(b"news")
    return new, client


def test_messages_wait_for_the_new_process(engine: Engine) -> None:
    writer, old = pair(engine)
    before, mine = old.client(), writer.client()
    before.subscribe(b"news")
    engine.until(lambda: writer.wanted_by(b"news"), "interest")
    for number in range(10):
        mine.publish(b"news", b"%d" % number)
    pause(engine, old)
    assert before.data == [b"%d" % number for number in range(10)], "all that came before is here"
    for number in range(10, 20):
        mine.publish(b"news", b"%d" % number)
    new, client = moved(engine, old)
    new.hub.subscribe(b"news", lambda *_: None)  # an application's own, as the old process has
    old.member.suspend()
    for number in range(20, 30):
        mine.publish(b"news", b"%d" % number)
    _pass_time(engine, 0.1)
    assert before.data == [b"%d" % number for number in range(10)]
    assert client.data == [], "it has not said that it goes on for the other"
    new.member.succeed(old.member.number)
    new.member.resync()
    for number in range(30, 40):
        mine.publish(b"news", b"%d" % number)
    engine.until(lambda: len(client.data) >= 30, lambda: client.data)
    for number in range(40, 50):
        mine.publish(b"news", b"%d" % number)
    engine.until(lambda: len(client.data) >= 40, "what comes later")
    engine.settle()
    assert client.data == [b"%d" % number for number in range(10, 50)]
    assert not drops(writer)
    assert len(writer.member.remotes) == 1
    assert not writer.member.migration.nodes


def test_migration_reports_no_client_as_lost(engine: Engine) -> None:
    """Its ETID goes along; messages to it do, too."""
    writer, old = pair(engine)
    client, mine = old.client(), writer.client()
    engine.until(lambda: writer.member.phantom(client.etid), "the phantom")
    mine.observe(client.etid)
    mine.publish(client.etid, b"before")
    engine.until(lambda: client.data == [b"before"], "it arrives")
    new = engine.place("new")
    new.member.migration.expect()
    engine.until(lambda: len(new.member.remotes) >= 1, "it joins")
    pause(engine, old)
    mine.publish(client.etid, b"paused")
    old.member.suspend()
    mine.publish(client.etid, b"moving")
    other = writer.client()
    other.publish(client.etid, b"from another one")
    _pass_time(engine, 0.1)
    after = Client.__new__(Client)
    after.__init__(new.hub, client.uid)  # type: ignore[misc]
    _take_etid(new, after, client.etid)
    new.member.succeed(old.member.number)
    new.member.resync()
    engine.until(lambda: len(after.data) == 3, lambda: after.data)
    mine.publish(client.etid, b"there")
    writer.client().publish(client.etid, b"there, too")
    engine.until(lambda: len(after.data) == 5, lambda: after.data)
    assert sorted(after.data) == sorted([b"paused", b"moving", b"from another one", b"there", b"there, too"])
    assert mine.changes == []


def _take_etid(place: Place, client: Client, etid: int) -> None:
    """As a restart places a client: under the number that others know."""
    hub, session = place.hub, client.session
    table = hub.topic_table
    before = session.etid
    topic = hub.sessions.pop(before)
    hub.sessions[etid] = topic
    own = table.by_key.pop(before.to_bytes(4, "big"), None)
    if own is not None:
        own.id, own.key = etid, etid.to_bytes(4, "big")
        table.by_key[own.key] = own
    session.etid = etid


def test_a_move_that_fails_loses_nothing(engine: Engine) -> None:
    writer, old = pair(engine)
    client, mine = old.client(), writer.client()
    client.subscribe(b"news")
    engine.until(lambda: writer.wanted_by(b"news"), "interest")
    sent = 0

    def publish() -> None:
        nonlocal sent
        for _ in range(5):
            mine.publish(b"news", b"%d" % sent)
            sent += 1

    for suspends in (False, True):
        publish()
        pause(engine, old)
        publish()
        if suspends:
            old.member.suspend()
            publish()
            _pass_time(engine, 0.1)
        old.member.stay()
        publish()
        engine.until(lambda: len(client.data) == sent, lambda: client.data)
        publish()
        engine.until(lambda: len(client.data) == sent, lambda: client.data)
    assert client.data == [b"%d" % number for number in range(sent)]
    assert not drops(writer)


def test_what_waits_in_vain_is_counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving_nodes, "MOVE_S", 0.5)
    writer, old = pair(engine)
    client, mine = old.client(), writer.client()
    client.subscribe(b"news")
    engine.until(lambda: writer.wanted_by(b"news") and writer.member.phantom(client.etid), "interest")
    mine.observe(client.etid)
    pause(engine, old)
    old.member.suspend()
    engine.until(lambda: writer.member.migration.nodes, "it is awaited")
    for number in range(10):
        mine.publish(b"news", b"%d" % number)
    assert not drops(writer)
    _pass_time(engine, 2.0)
    engine.until(lambda: drops(writer) == {Drop.LINK_LOST: 10}, lambda: drops(writer))
    engine.until(lambda: mine.changes == [(client.etid, 0)], "who observes is told")
    assert not writer.member.migration.nodes


def test_a_hub_that_only_pauses_continues(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving_nodes, "MOVE_S", 0.5)
    writer, old = pair(engine)
    client, mine = old.client(), writer.client()
    client.subscribe(b"news")
    engine.until(lambda: writer.wanted_by(b"news"), "interest")
    pause(engine, old)
    mine.publish(b"news", b"kept")
    _pass_time(engine, 2.0)
    engine.until(lambda: client.data == [b"kept"], "it is sent after all")


def test_a_node_of_an_older_version_is_not_asked(engine: Engine) -> None:
    writer = engine.place("writer", abilities=(PRESSURE, STAMPS, SIBLINGS))
    old = engine.place("old")
    engine.joined(writer, old)
    old.member.pause()
    assert old.member.is_paused


def _pass_time(engine: Engine, seconds: float) -> None:
    network = getattr(engine, "network", None)
    if network is not None:
        network.pass_time(seconds)
    else:
        gevent.sleep(min(seconds, 0.1))
