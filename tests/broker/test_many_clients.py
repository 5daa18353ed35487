"""Clients that come and go in masses: what that costs, and what the others are told."""

from __future__ import annotations

import time

from smqrt.broker.outbox import Drop, flush_dirty
from smqrt.errors import CloseReason
from smqrt.wire import smq
from smqrt.wire.smq import Type
from tests.broker.memory_clients import Crowd, heard, observe, settle, subscribe

TURN_S = 0.05
"""No turn may take longer; what is measured here is CPU only."""


def longest_turn() -> float:
    """End turns until nothing is left to do; gives the CPU seconds of the longest."""
    longest = 0.0
    more = True
    while more:
        began = time.process_time()
        more = flush_dirty(time.monotonic)
        longest = max(longest, time.process_time() - began)
    return longest


def test_changes_of_one_turn_are_reported_once() -> None:
    crowd = Crowd()
    watcher, fickle, steady = crowd.clients(3)
    tid = subscribe(steady, b"lamp")
    observe(watcher, tid)
    settle()
    heard(watcher)
    for _ in range(20_000):
        subscribe(fickle, b"lamp")
        fickle.control(smq.with_id(Type.UNSUBSCRIBE, tid))
    subscribe(fickle, b"lamp")
    settle()
    assert heard(watcher) == [smq.change(tid, 2)]


def test_unchanged_counts_are_not_sent() -> None:
    crowd = Crowd()
    watcher, fickle = crowd.clients(2)
    subscribe(fickle, b"lamp")
    tid = crowd.broker.topic_table.by_name[b"lamp"].id
    observe(watcher, tid)
    settle()
    heard(watcher)
    fickle.control(smq.with_id(Type.UNSUBSCRIBE, tid))
    subscribe(fickle, b"lamp")
    settle()
    assert heard(watcher) == []


def test_a_storm_under_many_observers_costs_one_change_each() -> None:
    crowd = Crowd()
    fickle, *watchers = crowd.clients(501)
    tid = subscribe(fickle, b"lamp")
    for watcher in watchers:
        observe(watcher, tid)
    settle()
    for watcher in watchers:
        heard(watcher)
    began = time.process_time()
    for _ in range(20_000):
        fickle.control(smq.with_id(Type.UNSUBSCRIBE, tid))
        subscribe(fickle, b"lamp")
    fickle.control(smq.with_id(Type.UNSUBSCRIBE, tid))
    assert longest_turn() < TURN_S
    assert time.process_time() - began < 1.0
    assert all(heard(watcher) == [smq.change(tid, 0)] for watcher in watchers)


def test_an_observing_subscriber_is_notified_once_before_suback() -> None:
    crowd = Crowd()
    (both,) = crowd.clients(1)
    tid = crowd.broker.topic_table.named(b"lamp").id
    observe(both, tid)
    settle()
    heard(both)
    subscribe(both, b"lamp")
    settle()
    assert heard(both) == [smq.change(tid, 1), smq.ack(Type.SUBACK, tid, b"lamp")]


def test_hundreds_leaving_a_thousand_topics_yield_the_loop() -> None:
    crowd = Crowd()
    watcher, *crew = crowd.clients(201)
    names = [b"topic-%d" % number for number in range(1000)]
    for session in crew:
        for name in names:
            subscribe(session, name)
    tids = [crowd.broker.topic_table.by_name[name].id for name in names]
    for tid in tids:
        observe(watcher, tid)
    settle()
    heard(watcher)
    began = time.process_time()
    for session in crew:
        session.disconnect(CloseReason.PEER_CLOSED)
    assert time.process_time() - began < TURN_S
    assert longest_turn() < TURN_S
    assert time.process_time() - began < 2.0
    assert all(topic.subscribers == 0 for topic in crowd.broker.topic_table.by_name.values())
    told = heard(watcher)
    assert set(told) >= {smq.change(tid, 0) for tid in tids}
    assert len(told) < 3 * len(tids)


def test_a_removed_topic_costs_each_publisher_one_route() -> None:
    crowd = Crowd()
    receivers = crowd.clients(200)
    publishers = crowd.clients(1000)
    for publisher in publishers:
        for receiver in receivers:
            publisher.publish(smq.publish_frame(receiver.etid, publisher.etid, 0, b""))
    settle()
    began = time.process_time()
    receivers[0].disconnect(CloseReason.PEER_CLOSED)
    assert time.process_time() - began < TURN_S
    assert longest_turn() < TURN_S
    assert all(len(publisher.routes) == 199 for publisher in publishers)


def test_a_message_to_ten_thousand_is_flushed_in_portions() -> None:
    crowd = Crowd()
    publisher, *subscribers = crowd.clients(10_001)
    for subscriber in subscribers:
        subscribe(subscriber, b"news")
    assert longest_turn() < TURN_S
    for subscriber in subscribers:
        heard(subscriber)
    tid = crowd.broker.topic_table.by_name[b"news"].id
    began = time.process_time()
    publisher.publish(smq.publish_frame(tid, publisher.etid, 0, b"extra"))
    assert time.process_time() - began < TURN_S
    assert longest_turn() < TURN_S
    assert all(len(heard(subscriber)) == 1 for subscriber in subscribers)


def test_each_of_ten_thousand_observers_gets_one_notification() -> None:
    crowd = Crowd()
    watched, *watchers = crowd.clients(10_001)
    for watcher in watchers:
        observe(watcher, watched.etid)
    settle()
    for watcher in watchers:
        heard(watcher)
    watched.disconnect(CloseReason.PEER_CLOSED)
    assert longest_turn() < TURN_S
    assert all(heard(watcher) == [smq.change(watched.etid, 0)] for watcher in watchers)
    assert not any(watcher.observed for watcher in watchers)


# ---- who has left, but is not out of every table yet


def leaver(crowd: Crowd) -> tuple[object, int]:
    """A client with more topics than one turn takes out of the tables, and the id of the last of them."""
    session = crowd.client()
    for number in range(20_000):
        subscribe(session, b"held-%d" % number)
    settle()
    return session, crowd.broker.topic_table.by_name[b"held-19999"].id


def test_messages_for_a_closed_client_are_counted() -> None:
    crowd = Crowd()
    session, tid = leaver(crowd)
    (publisher,) = crowd.clients(1)
    session.disconnect(CloseReason.PEER_CLOSED)
    heard(session)
    assert flush_dirty(time.monotonic), "all of it was done in one turn: this shows nothing"
    publisher.publish(smq.publish_frame(tid, publisher.etid, 0, b"late") * 3)
    settle()
    assert heard(session) == []
    assert crowd.broker.stats.drops[Drop.CLOSED] == 3
    publisher.publish(smq.publish_frame(tid, publisher.etid, 0, b"later"))
    assert crowd.broker.stats.drops[Drop.UNROUTED] == 1


def test_an_etid_is_not_reused_before_its_removal() -> None:
    crowd = Crowd()
    session, _ = leaver(crowd)
    etid = session.etid  # type: ignore[attr-defined]
    session.disconnect(CloseReason.PEER_CLOSED)
    crowd.drawn += [etid, etid, 77, etid]
    assert crowd.client().etid == 77 != etid
    settle()
    assert crowd.client().etid == etid


def test_clients_reconnecting_meanwhile_restart_without_loss() -> None:
    crowd = Crowd()
    session, tid = leaver(crowd)
    (watcher,) = crowd.clients(1)
    observe(watcher, tid)
    settle()
    heard(watcher)
    uid, etid = session.uid, session.etid  # type: ignore[attr-defined]
    again = crowd.client(uid)
    assert again.etid == etid
    assert flush_dirty(time.monotonic)
    subscribe(again, b"held-19999")
    subscribe(again, b"held-0")
    settle()
    assert [crowd.broker.topic_table.by_name[name].subscribers for name in (b"held-0", b"held-19999", b"held-7")] == [
        1,
        1,
        0,
    ]
    assert crowd.broker.sessions == {etid: again, watcher.etid: watcher}
    assert heard(watcher) == [], "the number is what it was"


def test_a_shutdown_under_load_closes_all_cleanly() -> None:
    crowd = Crowd()
    session, _ = leaver(crowd)
    others = crowd.clients(10)
    session.disconnect(CloseReason.PEER_CLOSED)
    flush_dirty(time.monotonic)
    crowd.broker.shutdown(b"bye")
    settle()
    assert all(heard(other)[-1] == smq.disconnect(b"bye") for other in others)
    assert not crowd.broker.sessions
    assert not any(topic.subscribers or topic.observers for topic in crowd.broker.topic_table.by_name.values())
    assert not crowd.broker.topic_table._leaving
