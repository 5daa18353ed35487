"""Control packets of a connected client: what is answered, in which order, and what they are limited to."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from smqrt.auth.identity import Action, Identity
from smqrt.broker import control_packets
from smqrt.broker.control_packets import FEW_SUBSCRIPTIONS
from smqrt.broker.deferred import Deferred
from smqrt.broker.last_values import LastValueLimits, LastValues
from smqrt.broker.state import Hooks
from smqrt.broker.topics import (
    CLIENT_NAMES,
    CLIENT_NAMES_MEMORY,
    CLIENT_OBSERVES,
    CLIENT_SUBSCRIPTIONS,
    NAMES,
    HubLimits,
    PublishLimits,
)
from smqrt.errors import CloseReason
from smqrt.wire import smq
from smqrt.wire.smq import Type
from tests.broker.memory_clients import Crowd, observe, subscribe
from tests.broker.memory_sessions import (
    NumbersEar,
    Rights,
    came,
    clean,
    connected,
    ends,
    fragment,
    names,
    opened,
    with_disk,
)

__all__ = ["clean"]


def test_pings_are_answered_and_pongs_are_not() -> None:
    session = connected(Crowd())
    assert not session.control(smq.PING)
    assert not session.control(smq.PONG)
    assert came(session) == [smq.PONG]


# ---- topics


def test_subscribing_is_answered_and_repeated() -> None:
    crowd = Crowd()
    session, other = connected(crowd), connected(crowd, b"device-2")
    number = subscribe(session, b"t")
    assert subscribe(session, b"t") == number
    assert came(session) == [smq.ack(Type.SUBACK, number, b"t")] * 2
    assert crowd.broker.stats.subscriptions == 1
    assert session.topic_ids == [number]
    topic = crowd.broker.topic_table.get(number)
    assert topic is not None
    subscribe(other, b"t")
    assert topic.subscribers == 2
    session.control(smq.with_id(Type.UNSUBSCRIBE, number))
    session.control(smq.with_id(Type.UNSUBSCRIBE, number))
    assert (topic.subscribers, crowd.broker.stats.subscriptions, session.topics) == (1, 1, ())


def test_many_subscriptions_are_kept_in_order_and_end_one_by_one() -> None:
    crowd = Crowd()
    session = connected(crowd)
    numbers = [subscribe(session, b"t%d" % number) for number in range(2 * FEW_SUBSCRIPTIONS)]
    assert session.topic_ids == numbers
    assert isinstance(session.topics, dict)
    for number in numbers[:3]:
        session.control(smq.with_id(Type.UNSUBSCRIBE, number))
    assert session.topic_ids == numbers[3:]
    assert crowd.broker.stats.subscriptions == len(numbers) - 3

    few = connected(crowd, b"device-2")
    numbers = [subscribe(few, b"t%d" % number) for number in range(FEW_SUBSCRIPTIONS)]
    few.control(smq.with_id(Type.UNSUBSCRIBE, numbers[1]))
    assert few.topic_ids == numbers[:1] + numbers[2:]
    assert isinstance(few.topics, tuple)


def test_a_subscriber_is_greeted_with_last_values_once() -> None:
    crowd = Crowd()
    crowd.broker.last_values = LastValues(["#"], LastValueLimits())
    topic = crowd.broker.topic_table.named(b"t")
    value = smq.publish_frame(topic.id, 7, 0, b"newest")
    crowd.broker.last_values.of(topic).take_frame(value, None)
    session = connected(crowd)
    subscribe(session, b"t")
    subscribe(session, b"t")
    answer = smq.ack(Type.SUBACK, topic.id, b"t")
    assert came(session) == [answer, value[2:], answer]


def test_an_application_denies_names() -> None:
    asked: list[tuple[Any, ...]] = []
    denied = Hooks(permittop=lambda *call: asked.append(call), permitsubtop=lambda *call: asked.append(call))
    crowd = Crowd(denied)
    session = connected(crowd)
    for kind in (Type.SUBSCRIBE, Type.CREATE, Type.CREATESUB):
        session.control(smq.with_name(kind, b"t"))
    assert asked == [(b"t", True, session), (b"t", False, session), (b"t", session)]
    kinds = (Type.SUBACK, Type.CREATEACK, Type.CREATESUBACK)
    assert came(session) == [smq.ack(kind, 0, b"t") for kind in kinds]
    assert crowd.broker.stats.denied == 3
    assert crowd.broker.topic_table.by_name == crowd.broker.subtopic_table.by_name == {}


def test_known_subtopics_are_not_asked_about() -> None:
    asked: list[Any] = []
    crowd = Crowd(Hooks(permitsubtop=lambda name, session: asked.append(name)))
    number = crowd.broker.subtopic_table.named(b"sub")
    session = connected(crowd)
    session.control(smq.with_name(Type.CREATESUB, b"sub"))
    assert came(session) == [smq.ack(Type.CREATESUBACK, number, b"sub")]
    assert asked == []


def test_a_client_has_so_many_subscriptions() -> None:
    crowd = Crowd(limits=HubLimits(subscriptions=2))
    session = connected(crowd)
    for name in (b"a", b"b", b"c", b"a"):
        session.control(smq.with_name(Type.SUBSCRIBE, name))
    denied = [packet[1] for packet in came(session)]
    assert denied == [0, 0, 1, 0]
    assert crowd.broker.stats.refused[CLIENT_SUBSCRIPTIONS] == 1
    assert crowd.broker.stats.denied == 0


@pytest.mark.parametrize("kind", [Type.SUBSCRIBE, Type.CREATE, Type.CREATESUB])
@pytest.mark.parametrize(
    ("limits", "limit"),
    [
        (HubLimits(client_names=2), CLIENT_NAMES),
        (HubLimits(client_names_bytes=6), CLIENT_NAMES_MEMORY),
        (HubLimits(names=2), NAMES),
    ],
)
def test_a_client_brings_in_so_many_names(kind: Type, limits: HubLimits, limit: Any) -> None:
    crowd = Crowd(limits=limits)
    session = connected(crowd)
    for name in (b"one", b"two", b"six", b"one"):
        session.control(smq.with_name(kind, name))
    assert [packet[1] for packet in came(session)] == [0, 0, 1, 0]
    assert crowd.broker.stats.refused[limit] == 1
    assert (session.names_made, session.names_made_bytes) == (2, 6)


def test_rights_decide_over_names() -> None:
    rights = Rights((Action.READ, b"r"), (Action.READ, b"new"), (Action.WRITE, b"w"), (Action.OBSERVE, b"o"))
    crowd = Crowd()
    for name in (b"r", b"w", b"o"):
        crowd.broker.topic_table.named(name)
    session = connected(crowd, identity=Identity("ann", rights=rights))
    for kind in (Type.SUBSCRIBE, Type.CREATE):
        for name in (b"r", b"w", b"o", b"new"):
            assert session.control(smq.with_name(kind, name)) is False
    assert [packet[1] for packet in came(session)] == [0, 1, 1, 1, 1, 0, 0, 1]
    rights.permitted.add((Action.CREATE, b"new"))
    session.control(smq.with_name(Type.SUBSCRIBE, b"new"))
    assert [packet[1] for packet in came(session)] == [0]


# ---- answers that wait for the disk


def test_answers_wait_for_the_disk_in_order() -> None:
    crowd, disk, session, ear = with_disk()
    for packet in (*names(Type.SUBSCRIBE, b"a"), *names(Type.CREATE, b"b"), smq.PING):
        assert session.control(packet) is False
    assert came(session) == []
    first, second = disk.pending
    second.resolve()
    assert came(session) == []
    first.resolve()
    kinds = [packet[0] for packet in came(session)]
    assert kinds == [Type.SUBACK, Type.CREATEACK, Type.PONG]
    assert ear.resumed == 0
    session.control(smq.PING)
    assert came(session) == [smq.PONG]


def test_a_name_the_disk_rejects_is_denied() -> None:
    crowd, disk, session, ear = with_disk()
    session.control(smq.with_name(Type.SUBSCRIBE, b"a"))
    disk.pending[0].reject(OSError("full"))
    session.control(smq.with_name(Type.CREATESUB, b"b"))
    disk.pending[1].reject(OSError("full"))
    assert came(session) == [smq.ack(Type.SUBACK, 0, b"a"), smq.ack(Type.CREATESUBACK, 0, b"b")]
    assert not session.topics
    assert crowd.broker.stats.subscriptions == 0


def test_a_client_with_many_unsafe_answers_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_packets, "MAX_UNSAVED_ANSWERS", 3)
    crowd, disk, session, ear = with_disk()
    waits = [session.control(smq.with_name(Type.CREATE, b"%d" % n)) for n in range(3)]
    assert waits == [False, False, True]
    assert session.pending is None, "the packet is worked off"
    disk.pending[1].resolve()
    assert ear.resumed == 0
    disk.pending[0].resolve()
    assert ear.resumed == 1
    disk.pending[2].resolve()
    assert ear.resumed == 1
    assert len(came(session)) == 3


def test_an_answer_that_fails_ends_the_client(caplog: pytest.LogCaptureFixture) -> None:
    crowd, disk, session, ear = with_disk()
    session.control(smq.with_name(Type.SUBSCRIBE, b"a"))
    session.control(smq.PING)

    def fail(topic: Any, outbox: Any) -> None:
        raise ValueError("broken")

    crowd.broker.subscribed = fail  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR):
        disk.pending[0].resolve()
    assert ends(crowd, CloseReason.HOOK_FAILED) == 1
    assert "error while a client was served" in caplog.text
    assert came(session) == []
    assert session.call_or_disconnect(lambda value: value, 1) is True


# ---- observing


def test_an_observer_gets_the_present_number_first() -> None:
    crowd = Crowd()
    session, other = connected(crowd), connected(crowd, b"device-2")
    topic = crowd.broker.topic_table.named(b"t")
    subscribe(other, b"t")
    observe(session, topic.id)
    observe(session, 12345)
    observe(session, other.etid)
    observe(session, session.etid)
    assert came(session) == [smq.change(topic.id, 1), smq.change(12345, 0)]
    subscribe(connected(crowd, b"device-3"), b"t")
    assert came(session) == [smq.change(topic.id, 2)]
    other.disconnect(CloseReason.CLIENT_DISCONNECT)
    assert sorted(came(session)) == sorted([smq.change(topic.id, 1), smq.change(other.etid, 0)])
    assert session.observed == {topic}, "an ETID that is gone needs no observer"
    session.control(smq.with_id(Type.UNOBSERVE, topic.id))
    session.control(smq.with_id(Type.UNOBSERVE, topic.id))
    session.control(smq.with_id(Type.UNOBSERVE, 12345))
    assert session.observed == set()
    subscribe(connected(crowd, b"device-4"), b"t")
    assert came(session) == []
    assert topic.observers == {}


def test_a_client_observes_so_much() -> None:
    crowd = Crowd(limits=HubLimits(observes=1))
    session = connected(crowd)
    topics = [crowd.broker.topic_table.named(name) for name in (b"a", b"b")]
    for topic in (*topics, topics[0]):
        observe(session, topic.id)
    assert came(session) == [smq.change(topic.id, 0) for topic in (*topics, topics[0])]
    assert session.observed == {topics[0]}
    assert topics[1].observers == {}
    assert crowd.broker.stats.refused[CLIENT_OBSERVES] == 1


def test_rights_apply_to_observe() -> None:
    crowd = Crowd()
    topic, hidden = (crowd.broker.topic_table.named(name) for name in (b"t", b"hidden"))
    session = connected(crowd, identity=Identity("ann", rights=Rights((Action.OBSERVE, b"t"))))
    observe(session, topic.id)
    observe(session, hidden.id)
    subscribe(connected(crowd, b"device-2"), b"hidden")
    assert came(session) == [smq.change(topic.id, 0), smq.change(hidden.id, 0)]
    assert session.observed == {topic}


# ---- fragments


def test_fragments_become_one_message() -> None:
    crowd = Crowd()
    session, other = connected(crowd), connected(crowd, b"device-2")
    number = subscribe(other, b"t")
    came(other)
    assert session.control(fragment(0, session, b"one ")) is False
    assert session.control(fragment(0, session, b"two ")) is False
    assert came(other) == []
    assert session.control(fragment(number, session, b"three")) is False
    assert came(other) == [smq.publish_frame(number, session.etid, 9, b"one two three")[2:]]
    assert session.fragments is None
    assert session.control(fragment(number, session, b"")) is False
    assert came(other) == [smq.publish_frame(number, session.etid, 9, b"")[2:]]


@pytest.mark.parametrize(("limits", "most"), [(None, smq.MAX_PAYLOAD_BYTES), (PublishLimits(message_bytes=1000), 1000)])
def test_fragments_together_have_a_limit(limits: PublishLimits | None, most: int) -> None:
    for size, closed in ((most, False), (most + 1, True)):
        crowd = Crowd()
        session = connected(crowd)
        crowd.broker.publish_limits = limits
        session.control(fragment(0, session, bytes(most // 2)))
        session.control(fragment(0, session, bytes(size - most // 2)))
        assert session.closed is closed
        assert ends(crowd, CloseReason.FRAGMENT_TOO_LARGE) == closed


def test_a_short_fragment_ends_the_client() -> None:
    for size, closed in ((12, True), (13, False)):
        crowd = Crowd()
        session = connected(crowd)
        session.control(bytes((Type.PUBFRAG,)) + bytes(size - 1))
        assert session.closed is closed
        assert ends(crowd, CloseReason.SHORT_PACKET) == closed


def test_fragments_are_for_raw_sockets() -> None:
    crowd = Crowd()
    session = opened(crowd, ear=NumbersEar())
    session.control(smq.connect(b"device"))
    session.control(fragment(0, session, b""))
    assert ends(crowd, CloseReason.FRAGMENT_NOT_ALLOWED) == 1


def test_a_waiting_hook_has_the_whole_message() -> None:
    crowd = Crowd(Hooks(onpublish=lambda run, tid, ptid, peer: Deferred()))
    session = connected(crowd)
    number = crowd.broker.topic_table.named(b"t").id
    session.control(fragment(0, session, b"a"))
    assert session.control(fragment(number, session, b"b")) is True
    assert session.pending == smq.publish_frame(number, session.etid, 9, b"ab")


# ---- what has no answer


def test_other_packets_have_no_answer() -> None:
    """Unsubscribe and Unobserve, also of what the client does not have, or what is not there."""
    crowd = Crowd()
    client, other = connected(crowd), connected(crowd, b"another")
    tid = subscribe(other, b"news")
    came(client)
    for kind in (Type.UNSUBSCRIBE, Type.UNOBSERVE):
        for number in (tid, 77, client.etid):
            client.control(smq.with_id(kind, number))
    assert came(client) == []
    assert crowd.broker.topic_table.by_name[b"news"].subscribers == 1
    assert not client.closed


def test_a_topic_without_subscribers_is_observed_with_zero() -> None:
    crowd = Crowd()
    client = connected(crowd)
    for number in (crowd.broker.create(b"news"), 77):
        observe(client, number)
        assert came(client) == [smq.change(number, 0)]
    observe(client, client.etid)
    assert came(client) == [], "nobody observes itself"


def test_a_name_subscribed_twice_before_saving_counts_once() -> None:
    crowd, disk, client, _ = with_disk()
    crowd.broker.last_values = LastValues(("#",), LastValueLimits())
    crowd.broker.publish(b"value", b"new")
    for _ in range(2):
        client.control(smq.with_name(Type.SUBSCRIBE, b"new"))
    disk.pending[0].resolve()
    kinds = [packet[0] for packet in came(client)]
    assert (kinds.count(Type.SUBACK), kinds.count(Type.PUBLISH)) == (2, 1)
    assert crowd.broker.topic_table.by_name[b"new"].subscribers == 1


def test_a_known_name_waits_behind_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd, disk, client, _ = with_disk()
    crowd.broker.create(b"known")
    unsaved = disk.unsaved
    monkeypatch.setattr(disk, "unsaved", lambda kind, name: None if name == b"known" else unsaved(kind, name))
    for name in (b"new", b"known"):
        client.control(smq.with_name(Type.SUBSCRIBE, name))
    assert came(client) == []
    disk.pending[-1].resolve()
    assert [packet for packet in came(client) if packet[0] == Type.SUBACK] == [
        smq.ack(Type.SUBACK, crowd.broker.topic_table.by_name[name].id, name) for name in (b"new", b"known")
    ]
