"""Guarantees of a cluster (help: cluster), on every engine."""

from __future__ import annotations

import pytest

from smqrt.broker.broker import Broker
from smqrt.broker.outbox import Drop
from smqrt.broker.state import Hooks
from smqrt.errors import CloseReason
from smqrt.wire.cluster_packets import Refusal
from smqrt.wire.smq import node_of, server_of
from tests.cluster.engines import Client, Engine, Place, pair

# ---- interest and order


def test_a_message_reaches_the_subscribers_of_all_nodes_once(engine: Engine) -> None:
    places = [engine.place(name) for name in ("a", "b", "c")]
    engine.joined(*places)
    subscribers = [place.client() for place in places for _ in range(2)]
    for one in subscribers:
        one.subscribe(b"topic")
    engine.until(lambda: all(place.wanted_by(b"topic") == 2 for place in places), "interest")
    publisher = places[0].client()
    publisher.publish(b"topic", b"hello", 7)
    engine.until(lambda: all(one.messages for one in subscribers), "the message")
    engine.settle()
    number = publisher.number(b"topic")
    assert [one.messages for one in subscribers] == [[(number, publisher.etid, 7, b"hello")]] * 6


def test_topics_and_direct_messages_keep_the_publisher_order(engine: Engine) -> None:
    one, other = pair(engine)
    publisher, subscriber = one.client(), other.client()
    for name in (b"x", b"y"):
        subscriber.subscribe(name)
    engine.until(lambda: one.wanted_by(b"x") and one.wanted_by(b"y"), "interest")
    expected = []
    for count in range(300):
        to = (b"x", b"y", subscriber.etid)[count % 3]
        publisher.publish(to, b"%d" % count)
        expected.append(b"%d" % count)
    engine.until(lambda: len(subscriber.data) == 300, "300 messages")
    assert subscriber.data == expected


def test_interest_comes_and_goes(engine: Engine) -> None:
    one, other = pair(engine)
    one.hub.create(b"topic")
    first, second = other.client(), other.client()
    first.subscribe(b"topic")
    second.subscribe(b"topic")
    engine.until(lambda: one.interest() == {b"topic"}, "interest")
    first.unsubscribe(b"topic")
    second.session.disconnect(CloseReason.PEER_CLOSED)
    engine.until(lambda: not one.interest(), "no interest")
    assert len(one.member.interest) == 0


def test_late_nodes_get_the_full_state(engine: Engine) -> None:
    one = engine.place("one")
    old = one.client(b"the-old-client")
    for count in range(500):
        old.subscribe(b"topic %d" % count)
    other = engine.place("other")
    engine.joined(one, other)
    for count in range(500):
        other.hub.create(b"topic %d" % count)
    assert len(other.interest()) == 500
    assert other.phantoms() == {b"the-old-client"}


def test_the_numbers_of_names_agree_and_of_subtopics_too(engine: Engine) -> None:
    one, other = pair(engine)
    assert one.hub.create(b"topic") == other.hub.create(b"topic")
    number = one.hub.createsub(b"part")
    engine.until(lambda: other.hub.tid2subtopic(number) == b"part", "the sub-topic")


def _with_names_of_its_own(broker: Broker) -> None:
    broker.create(b"topic", 17)
    broker.createsub(b"part", 4)
    broker.createsub(b"other part", 5)


def test_a_hub_with_other_numbers_is_translated(engine: Engine) -> None:
    one = engine.place("one", prepare=_with_names_of_its_own)
    other = engine.place("other", prepare=lambda broker: broker.createsub(b"part", 5))
    engine.joined(one, other)
    here, there = one.client(), other.client()
    here.subscribe(b"topic")
    there.subscribe(b"topic")
    engine.until(lambda: one.interest() and other.interest(), "interest")
    there.publish(b"topic", b"to 17", other.hub.createsub(b"part"))
    here.publish(b"topic", b"from 17", one.hub.createsub(b"part"))
    engine.until(lambda: len(here.data) == len(there.data) == 2, "both messages")
    assert {(tid, stid) for tid, _, stid, _ in here.messages} == {(17, 4)}
    assert {(tid, stid) for tid, _, stid, _ in there.messages} == {(other.hub.create(b"topic"), 5)}


def test_a_hub_joined_later_translates_its_earlier_clients(engine: Engine) -> None:
    clients: list[Client] = []

    def ran_alone(broker: Broker) -> None:
        clients.extend(Client(broker, b"alone-%d" % count) for count in range(2))

    one, other = engine.place("one", prepare=ran_alone), engine.place("other")
    engine.joined(one, other)
    old, watcher = clients[0], other.client()
    assert node_of(old.etid) == 0
    phantom = next(one for one in other.member.phantoms.values() if one.uid == b"alone-0")
    assert node_of(phantom.etid) == one.member.number
    old.subscribe(b"topic")
    watcher.subscribe(b"topic")
    engine.until(lambda: b"topic" in one.interest() and other.interest(), "interest")
    old.publish(b"topic", b"hello")
    engine.until(lambda: watcher.data, "a message of the old client")
    assert watcher.messages[0][1] == phantom.etid
    watcher.publish(phantom.etid, b"answer")
    engine.until(lambda: old.data[-1:] == [b"answer"], "the answer")
    assert old.messages[-1][0] == old.etid
    watcher.observe(phantom.etid)
    old.session.disconnect(CloseReason.PEER_CLOSED)
    engine.until(lambda: watcher.changes == [(phantom.etid, 0)], "Change")


# ---- one-to-one, observe, presence


def test_messages_to_an_etid_and_to_servers(engine: Engine) -> None:
    one, other = pair(engine)
    a, b = one.client(), other.client()
    engine.until(lambda: one.member.phantom(b.etid) and other.member.phantom(a.etid), "phantoms")
    a.publish(b.etid, b"question")
    engine.until(lambda: b.messages, "the question")
    assert b.messages == [(b.etid, a.etid, 0, b"question")]
    got: list[tuple[bytes, int]] = []
    one.hub.subscribe(b"self", lambda data, ptid, tid, stid: got.append((data, ptid)))
    other.hub.publish(b"from the server", a.etid)
    engine.until(lambda: a.messages, "a message of the other server")
    assert a.messages == [(a.etid, server_of(other.member.number), 0, b"from the server")]
    b.publish(server_of(one.member.number), b"to the other server")
    assert other.member.routing.to_servers(b"to all servers", other.hub.gettid(), 0) == 1
    engine.until(lambda: len(got) == 2, "two messages to the server")
    assert got == [(b"to the other server", b.etid), (b"to all servers", server_of(other.member.number))]


def test_observers_of_an_etid_get_one_departure_notification(engine: Engine) -> None:
    one, other = pair(engine)
    watcher, watched = one.client(), other.client()
    engine.until(lambda: one.member.phantom(watched.etid), "the phantom")
    heard: list[int] = []
    watcher.observe(watched.etid)
    one.hub.observe(watched.etid, lambda count, etid: heard.append(count))
    etid = watched.etid
    watched.session.disconnect(CloseReason.PEER_CLOSED)
    engine.until(lambda: watcher.changes and heard, "Change")
    engine.settle()
    assert (watcher.changes, heard) == ([(etid, 0)], [0])
    assert etid not in one.member.foreign


def test_topics_are_observed_per_node_or_over_all(engine: Engine) -> None:
    one, other = pair(engine)
    one.member.counts.count_all()
    everywhere, here = one.client(), other.client()
    for watcher in (everywhere, here):
        watcher.observe(watcher.number(b"topic"))
    subscribers = [place.client() for place in (one, other) for _ in range(2)]
    for subscriber in subscribers:
        subscriber.subscribe(b"topic")
    engine.until(lambda: (everywhere.count, here.count) == (4, 2), "counts")
    subscribers[-1].unsubscribe(b"topic")
    engine.until(lambda: (everywhere.count, here.count) == (3, 1), "counts")
    engine.cut(one, other)
    engine.until(lambda: everywhere.count == 2, "the count of one node")


def test_the_newest_client_of_a_uid_stays(engine: Engine) -> None:
    one, other = pair(engine)
    old = one.client(b"the-same-uid")
    engine.until(lambda: other.phantoms() == {b"the-same-uid"}, "the phantom")
    new = other.client(b"the-same-uid")
    engine.until(lambda: old.session.closed, "the take-over")
    engine.settle()
    assert old.goodbye == CloseReason.TAKEN_OVER.value.encode()
    assert not new.session.closed
    assert one.phantoms() == {b"the-same-uid"}
    assert not other.phantoms()


# ---- hooks


def test_onpublish_and_ondrop_are_asked_at_the_origin(engine: Engine) -> None:
    asked: list[tuple[str, str]] = []

    def hooks(name: str) -> Hooks:
        return Hooks(
            onpublish=lambda run, tid, ptid, peer: tid == number and asked.append((name, "publish")) or run,
            ondrop=lambda run, tid, ptid, peer: asked.append((name, "drop")),
            permittop=lambda topic, issub, session: asked.append((name, "permit")) or True,  # type: ignore[func-returns-value]
        )

    one, other = engine.place("one", hooks=hooks("one")), engine.place("other", hooks=hooks("other"))
    engine.joined(one, other)
    subscriber, publisher = other.client(), one.client()
    subscriber.subscribe(b"topic")
    number = one.hub.create(b"topic")
    engine.until(lambda: one.interest(), "interest")
    publisher.publish(number, b"taken")
    engine.until(lambda: subscriber.data, "the message")
    subscriber.unsubscribe(b"topic")
    engine.until(lambda: not one.interest(), "no interest")
    publisher.publish(number, b"not taken")
    engine.settle()
    assert asked == [("other", "permit"), ("one", "publish"), ("one", "publish"), ("one", "drop")]


# ---- the end


def test_closing_a_hub_closes_no_clients_of_others(engine: Engine) -> None:
    one, other = pair(engine)
    watcher, leaving = one.client(), other.client()
    engine.until(lambda: one.member.phantom(leaving.etid), "the phantom")
    watcher.observe(leaving.etid)
    etid = leaving.etid
    other.hub.close()
    engine.until(lambda: watcher.changes == [(etid, 0)], "Change")
    assert not watcher.session.closed
    assert not one.member.remotes
    assert one.member.phantom(etid) is None


def test_shutdown_of_one_client_one_hub_and_all(engine: Engine) -> None:
    one, other = pair(engine)
    here, there, third = one.client(), other.client(), other.client()
    engine.until(lambda: one.member.phantom(there.etid), "the phantom")
    one.hub.shutdown(b"you", there.etid)
    engine.until(lambda: there.session.closed, "the end of one")
    one.hub.shutdown(b"this hub", everywhere=False)
    engine.settle()
    assert (here.session.closed, third.session.closed) == (True, False)
    again = one.client()
    one.hub.shutdown(b"all")
    engine.until(lambda: third.session.closed and again.session.closed, "the end of all")
    assert [client.goodbye for client in (there, here, third, again)] == [b"you", b"this hub", b"all", b"all"]


def test_a_hub_that_leaves_goes_on_alone(engine: Engine) -> None:
    one, other = pair(engine)
    mine, theirs = one.client(), other.client()
    mine.subscribe(b"topic")
    engine.until(lambda: other.interest() or other.hub.create(b"topic") is None, "interest")
    theirs.publish(b"topic", b"before")
    engine.until(lambda: mine.data == [b"before"], "the message")
    one.member.leave()
    engine.until(lambda: not other.member.remotes, "the other notices")
    assert one.hub.cluster is None
    assert other.hub.stats.drops[Drop.LINK_LOST] == 0
    mine.publish(b"topic", b"alone")
    engine.until(lambda: mine.data == [b"before", b"alone"], "its own message")
    assert not theirs.session.closed
    assert not other.member.phantoms


def test_a_recreated_hub_rejoins_over_the_same_link(engine: Engine) -> None:
    one, other = pair(engine)
    theirs = other.client()
    theirs.subscribe(b"topic")
    node = engine.node_of(one)
    for _ in range(3):
        one.member.leave()
        one.member = node.join(one.hub, "hub")
        engine.joined(one, other)
    one.hub.create(b"topic")
    engine.until(lambda: one.interest() == {b"topic"}, "interest")
    one.hub.publish(b"after", b"topic")
    engine.until(lambda: theirs.data == [b"after"], "the message")
    assert len(other.member.remotes) == 1


# ---- links break


def test_partition_and_heal(engine: Engine) -> None:
    one, other = pair(engine)
    subscriber, publisher = other.client(b"subscriber"), one.client(b"publisher")
    subscriber.subscribe(b"topic")
    engine.until(lambda: one.wanted_by(b"topic"), "interest")
    publisher.publish(b"topic", b"before")
    engine.until(lambda: subscriber.data == [b"before"], "the first message")
    publisher.observe(subscriber.etid)
    engine.wait_acknowledged(one)
    engine.cut(one, other)
    engine.until(lambda: not one.member.remotes and not other.member.remotes, "both notice")
    assert one.member.phantom(subscriber.etid) is None
    engine.until(lambda: publisher.changes == [(subscriber.etid, 0)], "Change")
    publisher.publish(b"topic", b"meanwhile")
    newcomer = other.client(b"newcomer")
    newcomer.subscribe(b"second topic")
    engine.heal(one, other)
    engine.joined(one, other)
    publisher.publish(b"topic", b"after")
    engine.until(lambda: len(subscriber.data) == 2, "the message after")
    assert subscriber.data == [b"before", b"after"]
    assert (one.hub.drops()["unrouted"], one.hub.drops()["link_lost"]) == (0, 1)
    assert one.phantoms() == {b"subscriber", b"newcomer"}
    one.hub.create(b"second topic")
    assert one.interest() == {b"topic", b"second topic"}


def test_a_uid_in_both_parts_is_settled_after_partition(engine: Engine) -> None:
    one, other = pair(engine)
    engine.cut(one, other)
    engine.until(lambda: not one.member.remotes and not other.member.remotes, "both notice")
    old = one.client(b"the-same-uid")
    engine.wait_silence()
    new = other.client(b"the-same-uid")
    engine.heal(one, other)
    engine.joined(one, other)
    engine.until(lambda: old.session.closed or new.session.closed, "one of them goes")
    engine.settle()
    assert (old.session.closed, new.session.closed) == (True, False)
    assert old.goodbye == CloseReason.TAKEN_OVER.value.encode()


def test_messages_on_broken_links_are_delivered_or_counted(engine: Engine) -> None:
    one, other = pair(engine)
    subscriber, publisher = other.client(), one.client()
    subscriber.subscribe(b"topic")
    one.hub.create(b"topic")
    engine.until(lambda: one.interest(), "interest")
    engine.silence(one, other)
    for count in range(100):
        publisher.publish(b"topic", b"%d" % count)
    engine.wait_silence()
    engine.until(lambda: not one.member.remotes and not other.member.remotes, "both notice the silence")
    engine.settle()
    drops = one.hub.stats.drops
    engine.until(lambda: drops[Drop.LINK_LOST] + drops[Drop.UNROUTED] + len(subscriber.data) >= 100, "all are counted")
    assert drops[Drop.LINK_LOST] + drops[Drop.UNROUTED] <= 100
    engine.heal(one, other)
    engine.joined(one, other)
    publisher.publish(b"topic", b"again")
    engine.until(lambda: subscriber.data[-1:] == [b"again"], "the message after")
    assert len(subscriber.data) == len(set(subscriber.data))


def test_lost_nodes_and_their_clients_are_removed_at_once(engine: Engine) -> None:
    one, other = pair(engine)
    clients = [other.client() for _ in range(50)]
    for client in clients:
        client.subscribe(b"topic")
    engine.until(lambda: len(one.member.phantoms) == 50, "phantoms")
    watcher = one.client()
    for client in clients:
        watcher.observe(client.etid)
    engine.kill(other)
    engine.until(lambda: len(watcher.changes) == 50, "50 Changes")
    engine.settle()
    member = one.member
    assert (len(member.phantoms), len(member.foreign), len(member.interest), member.state.bits) == (0, 0, 0, 0)
    assert sorted(watcher.changes) == sorted((client.etid, 0) for client in clients)


def test_a_restarted_node_replaces_its_former_self(engine: Engine) -> None:
    one, other = engine.place("one", number=76), engine.place("other", number=77)
    engine.joined(one, other)
    other.client(b"of the old one")
    engine.until(lambda: one.phantoms() == {b"of the old one"}, "the phantom")
    engine.silence(one, other)  # so that the death is not noticed
    again = engine.place("again", number=77)
    engine.until(lambda: one.phantoms() != {b"of the old one"}, "the old one is forgotten")
    again.client(b"of the new one")
    engine.until(lambda: one.phantoms() == {b"of the new one"}, "the new phantom")
    assert [remote.number for remote in one.member.remotes] == [77]


# ---- slow nodes


FLOOD_BYTES = 32_000
SLOW_QUEUE_BYTES = 1 << 20


def lost(place: Place) -> dict[Drop, int]:
    return {reason: place.hub.stats.drops[reason] for reason in (Drop.LINK_SLOW, Drop.LINK_LOST)}


def test_a_slow_node_is_dropped_counted_and_resynchronized(engine: Engine) -> None:
    options: dict[str, object] = {"queue_bytes": SLOW_QUEUE_BYTES, "silence_s": 20.0}
    one, slow, quick = (engine.place(name, **options) for name in ("one", "slow", "quick"))
    engine.joined(one, slow, quick)
    publisher, here, there, behind = one.client(), one.client(), quick.client(), slow.client(b"behind")
    for client in (here, there, behind):
        client.subscribe(b"topic")
    engine.until(lambda: one.wanted_by(b"topic") == 2, "interest")
    publisher.publish(b"topic", b"before")
    engine.until(lambda: behind.data == there.data == [b"before"], "the first message")
    engine.wait_acknowledged(one)

    engine.silence(one, slow)
    sent = 1
    while len(one.member.remotes) == 2:
        newest = b"%d " % sent + b"x" * FLOOD_BYTES
        publisher.publish(b"topic", newest)
        sent += 1
        engine.until(lambda of=newest: here.data[-1] == there.data[-1] == of, "the others have it at once")  # type: ignore[misc]
        assert sent * FLOOD_BYTES < 10 * SLOW_QUEUE_BYTES, "the slow node is dropped when its queue is full"
    assert [remote.number for remote in one.member.remotes] == [quick.member.number]
    assert one.member.phantom(behind.etid) is None
    engine.until(lambda: lost(one) == {Drop.LINK_SLOW: sent - 1, Drop.LINK_LOST: 0}, lost(one))
    assert sent * FLOOD_BYTES > SLOW_QUEUE_BYTES
    publisher.publish(b"topic", b"meanwhile")
    engine.until(lambda: there.data[-1] == here.data[-1] == b"meanwhile", "the others go on")

    engine.heal(one, slow)
    engine.joined(one, slow, quick)
    engine.until(lambda: one.wanted_by(b"topic") == 2, "interest")
    publisher.publish(b"topic", b"after")
    engine.until(lambda: behind.data[-1:] == there.data[-1:] == [b"after"], "the message after")
    assert behind.data == [b"before", b"after"]
    assert lost(one) == {Drop.LINK_SLOW: sent - 1, Drop.LINK_LOST: 1}, "what was published meanwhile"
    assert lost(quick) == {Drop.LINK_SLOW: 0, Drop.LINK_LOST: 0}
    assert one.phantoms() == {there.uid, behind.uid}
    assert quick.phantoms() == {publisher.uid, here.uid, behind.uid}
    assert slow.phantoms() == {publisher.uid, here.uid, there.uid}
    assert len(there.data) == len(set(there.data)) == sent + 2


def test_state_larger_than_a_node_queue_is_sent_completely(engine: Engine) -> None:
    one = engine.place("one", queue_bytes=1 << 18)
    talkative = [one.client() for _ in range(10)]
    for number in range(3000):
        talkative[number % 10].subscribe(b"topic %d " % number)
    clients = [one.client(info=b"i" * 40_000) for _ in range(60)]  # 2.4 MB
    other = engine.place("other", queue_bytes=1 << 18)
    engine.joined(one, other)
    assert other.phantoms() == {client.uid for client in talkative + clients}
    assert len(other.member.interest) == 3000
    assert engine.node_of(one).links_lost == 0


# ---- one link to each node


def test_nodes_that_dial_each_other_keep_one_link(engine: Engine) -> None:
    one, other = engine.place("one"), engine.place("other")
    engine.meet(one, other)
    engine.joined(one, other)
    engine.until(lambda: engine.is_settled(one) and engine.is_settled(other), "one link is kept")
    nodes = [engine.node_of(place) for place in (one, other)]
    (mine,), (theirs,) = (node.links.values() for node in nodes)
    assert mine.connects != theirs.connects
    assert len(one.member.remotes) == len(other.member.remotes) == 1


def test_a_second_link_replaces_the_first_or_closes(engine: Engine) -> None:
    one, other = pair(engine)
    subscriber, publisher = other.client(), one.client()
    subscriber.subscribe(b"topic")
    engine.until(lambda: one.wanted_by(b"topic"), "interest")
    engine.meet(one, other)
    engine.settle()
    engine.until(lambda: engine.is_settled(one) and engine.is_settled(other), "one link is kept")
    engine.joined(one, other)
    engine.until(lambda: one.wanted_by(b"topic"), "interest")
    publisher.publish(b"topic", b"hello")
    engine.until(lambda: subscriber.data, "the message")
    engine.settle()
    assert subscriber.data == [b"hello"]


def test_a_node_never_joins_itself(engine: Engine) -> None:
    one, other = pair(engine)
    engine.meet_itself(one)
    engine.settle()
    engine.until(lambda: engine.is_settled(one), "it knows itself")
    assert [remote.number for remote in one.member.remotes] == [other.member.number]
    assert set(engine.node_of(one).links) == {engine.node_of(other).id}
    one.hub.publish(b"to itself", one.hub.create(b"topic"))
    assert one.hub.drops()["unrouted"] == 1


# ---- who may not join


def refused(engine: Engine, one: Place, other: Place, why: Refusal) -> bool:
    return bool(engine.node_of(one).refused[why] and engine.node_of(other).refused[why])


def test_another_password_links_no_node(engine: Engine) -> None:
    one, stranger = engine.place("one"), engine.place("stranger", key=b"x" * 32)
    engine.until(lambda: refused(engine, one, stranger, Refusal.PASSWORD), "the refusal")
    assert not one.member.remotes
    assert not stranger.member.remotes


def test_another_cluster_name_links_no_node(engine: Engine) -> None:
    one, other = engine.place("one", hub="chat"), engine.place("other", hub="game")
    engine.until(lambda: engine.node_of(one).links and engine.node_of(other).links, "a link")
    engine.settle()
    assert not one.member.remotes
    assert not other.member.remotes


def test_another_version_links_no_node(engine: Engine) -> None:
    one, other = engine.place("one"), engine.place("other", versions=(5, 6))
    engine.until(lambda: refused(engine, one, other, Refusal.VERSION), "the refusal")
    assert not one.member.remotes
    assert not other.member.remotes


def test_nodes_with_the_same_number_choose_others(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine.place("one")
    number = one.member.number
    drawn = iter([number] * 3)
    node_class = type(engine.node_of(one))
    draw = node_class._draw
    monkeypatch.setattr(node_class, "_draw", lambda self, taken: next(drawn, None) or draw(self, taken))
    other = engine.place("other")
    assert other.member.number == number
    drawn = iter(())
    client = other.client(b"before the change")
    engine.joined(one, other)
    assert one.member.number != other.member.number
    sender = one.client()
    engine.until(lambda: one.phantoms() == {b"before the change"}, "the phantom")
    phantom = next(iter(one.member.phantoms.values()))
    assert node_of(phantom.etid) == other.member.number
    sender.publish(phantom.etid, b"hello")
    engine.until(lambda: client.data == [b"hello"], "a message to the translated client")
