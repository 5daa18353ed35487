"""Sessions without sockets: what a client's packets do, in which order they are answered, and how it ends."""

from __future__ import annotations

from typing import Any

import pytest

from smqrt.auth.identity import Action, Identity
from smqrt.broker import sessions as module
from smqrt.broker.client_limits import DeniedRoute, MeteredRoute
from smqrt.broker.deferred import Deferred
from smqrt.broker.outbox import Drop
from smqrt.broker.routes import GuardedRoute
from smqrt.broker.sessions import Session, SessionState
from smqrt.broker.state import Hooks
from smqrt.broker.topics import (
    USER_CONNECTIONS,
    HubLimits,
    PublishLimits,
)
from smqrt.errors import CloseReason, ProtocolError
from smqrt.wire import smq
from smqrt.wire.smq import ConnackCode, Type
from tests.broker.memory_clients import Crowd, Ear, heard, observe, subscribe
from tests.broker.memory_sessions import (
    CountingEar,
    Rights,
    came,
    clean,
    connected,
    ends,
    fragment,
    opened,
    with_disk,
)

__all__ = ["clean"]


# ---- Connect


def test_connect_is_answered_with_an_etid() -> None:
    told: list[Any] = []
    crowd = Crowd(Hooks(onconnect=told.append))
    crowd.broker.clock = lambda: 17.0
    session = opened(crowd)
    assert (session.state, session.etid, session.since_s) == (SessionState.WAITING, 0, None)
    assert session.control(smq.connect(b"device", b"", b"about me")) is False
    assert came(session) == [smq.connack(ConnackCode.ACCEPTED, session.etid)]
    assert (session.uid, session.info, session.since_s, session.seed) == (b"device", b"about me", 17.0, 5)
    assert session.state is SessionState.CONNECTED
    assert crowd.broker.sessions == {session.etid: session}
    assert told == [session]
    assert session.topic is None, "nobody has used it"
    topic = crowd.broker.topic_table.get(session.etid)
    assert topic is not None
    assert topic is session.topic
    assert topic.raw == (session.outbox,)
    assert isinstance(session.outbox, CountingEar)
    assert session.outbox.accepted == 1


def test_the_largest_frame_of_version_2_is_heeded() -> None:
    crowd, seen = Crowd(), list[tuple[Any, int]]()
    crowd.broker.limit_chunks = lambda session, size: seen.append((session, size))
    session = opened(crowd)
    session.control(b"\x02\x02\x01\x00\x06device")
    assert seen == [(session, 256)]
    crowd.client()
    assert len(seen) == 1


def test_a_bad_connect_is_refused_with_a_reason() -> None:
    lines: list[str] = []
    crowd = Crowd(Hooks(log=lambda peer, text: lines.append(text)))
    session = opened(crowd)
    assert session.control(smq.connect(b"short")) is False
    assert came(session) == [smq.connack(ConnackCode.PROTOCOL_VERSION, 0)]
    assert session.closed
    assert ends(crowd, CloseReason.BAD_CONNECT) == 1
    assert crowd.broker.stats.refusals == 1
    assert lines == ["refused: the uid has 5 bytes, at least 6 are needed"]
    assert session.control(smq.connect(b"device")) is False
    assert crowd.broker.sessions == {}


@pytest.mark.parametrize(
    ("answer", "code", "text"),
    [
        ((ConnackCode.BAD_CREDENTIALS, b"no such user"), ConnackCode.BAD_CREDENTIALS, b"no such user"),
        ((ConnackCode.SERVER_UNAVAILABLE, b"x" * 70_000), ConnackCode.SERVER_UNAVAILABLE, b"x" * smq.MAX_NAME_BYTES),
        (None, ConnackCode.ACCESS_DENIED, b""),
        (True, ConnackCode.ACCESS_DENIED, b""),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_authenticate_refuses_a_client(answer: Any, code: int, text: bytes, late: bool) -> None:
    asked: list[Any] = []
    pending: Deferred[Any] = Deferred()

    def authenticate(credentials: bytes, session: Any) -> Any:
        asked.append((credentials, session))
        return pending if late else answer

    crowd, reasons = Crowd(Hooks(authenticate=authenticate)), list[str]()
    crowd.broker.on_end = lambda session, reason, detail: reasons.append(detail)
    session = opened(crowd)
    assert session.control(smq.connect(b"device", b"secret")) is late
    if late:
        assert session.state is SessionState.AUTHENTICATING
        pending.resolve(answer)
    assert asked == [(b"secret", session)]
    assert came(session) == [smq.connack(code, 0, text)]
    assert session.closed
    assert reasons[0].startswith(ConnackCode(code).name.lower().replace("_", " "))
    assert (": " in reasons[0]) is bool(text)


def test_unknown_codes_are_shown_by_number() -> None:
    crowd, reasons = Crowd(Hooks(authenticate=lambda credentials, session: (9, b"\xff!"))), list[str]()
    crowd.broker.on_end = lambda session, reason, detail: reasons.append(detail)
    opened(crowd).control(smq.connect(b"device", b"secret"))
    assert reasons == ["code 9: \\xff!"]


@pytest.mark.parametrize("late", [False, True])
def test_authenticate_that_fails_refuses_the_client(late: bool) -> None:
    pending: Deferred[Any] = Deferred()
    crowd = Crowd(Hooks(authenticate=lambda credentials, session: pending))
    session = opened(crowd)
    if not late:
        pending.reject(ValueError("broken"))
    assert session.control(smq.connect(b"device")) is late
    if late:
        pending.reject(ValueError("broken"))
    assert came(session) == [smq.connack(ConnackCode.ACCESS_DENIED, 0)]


def test_an_accepted_answer_that_is_late_resumes_the_client() -> None:
    pending: Deferred[Any] = Deferred()
    crowd = Crowd(Hooks(authenticate=lambda credentials, session: pending))
    ear = CountingEar()
    session = opened(crowd, ear=ear)
    assert session.control(smq.connect(b"device")) is True
    assert session.pending == smq.frame(smq.connect(b"device"))
    pending.resolve((0, b""))
    assert session.pending is None
    assert ear.resumed == 1
    assert session.state is SessionState.CONNECTED


def test_an_answer_after_the_end_is_ignored() -> None:
    pending: Deferred[Any] = Deferred()
    crowd = Crowd(Hooks(authenticate=lambda credentials, session: pending))
    session = opened(crowd, ear=(ear := CountingEar()))
    session.control(smq.connect(b"device"))
    session.disconnect(CloseReason.CLIENT_DISCONNECT)
    pending.resolve((0, b""))
    assert (came(session), ear.resumed, crowd.broker.sessions) == ([], 0, {})


def test_a_hook_may_close_its_client() -> None:
    def permittop(name: bytes, is_subscription: bool, session: Any) -> bool:
        session.disconnect(CloseReason.SHUTDOWN)
        return True

    crowd = Crowd(Hooks(permittop=permittop))
    session = connected(crowd)
    session.control(smq.with_name(Type.SUBSCRIBE, b"t"))
    assert came(session) == []
    assert crowd.broker.topic_table.by_name == {}


@pytest.mark.parametrize("state", [SessionState.WAITING, SessionState.AUTHENTICATING, SessionState.CONNECTED])
def test_a_late_acceptance_refuses_the_client(state: SessionState) -> None:
    lines: list[str] = []
    hooks = Hooks(log=lambda peer, text: lines.append(text))
    if state is SessionState.AUTHENTICATING:
        hooks.authenticate = lambda credentials, session: Deferred()
    crowd = Crowd(hooks)
    session = opened(crowd)
    if state is not SessionState.WAITING:
        session.control(smq.connect(b"device"))
    came(session)
    session.connect_timed_out()
    expected = [] if state is SessionState.CONNECTED else [smq.connack(ConnackCode.SERVER_UNAVAILABLE, 0)]
    assert came(session) == expected
    assert ends(crowd, CloseReason.CONNECT_TIMEOUT) == len(expected)
    assert len(lines) == (state is SessionState.AUTHENTICATING)


def test_a_second_client_with_the_uid_takes_over() -> None:
    crowd = Crowd()
    old = connected(crowd)
    new = opened(crowd)
    new.control(smq.connect(b"device"))
    assert came(old) == [smq.disconnect(CloseReason.TAKEN_OVER.value.encode())]
    assert came(new) == [smq.connack(0, new.etid)]
    assert old.closed
    assert new.etid == old.etid, "who sends to it reaches the new one"
    assert crowd.broker.uids == {b"device": new}
    assert ends(crowd, CloseReason.TAKEN_OVER) == 1


def test_takeover_requires_the_same_user() -> None:
    crowd = Crowd()
    old = connected(crowd, identity=Identity("ann"))
    new = opened(crowd, Identity("bob"))
    new.control(smq.connect(b"device"))
    assert came(new) == [smq.connack(ConnackCode.ACCESS_DENIED, 0, module.OTHER_USERS_ID.encode())]
    assert new.closed
    assert not old.closed
    same = opened(crowd, Identity("ann"))
    same.control(smq.connect(b"device"))
    assert came(same) == [smq.connack(0, same.etid)]


def test_a_user_has_so_many_connections() -> None:
    crowd = Crowd(limits=HubLimits(connections_per_user=2))
    ann = Identity("ann")
    first = connected(crowd, b"device-1", ann)
    connected(crowd, b"device-2", ann)
    third = opened(crowd, ann)
    third.control(smq.connect(b"device-3"))
    assert came(third) == [smq.connack(ConnackCode.SERVER_UNAVAILABLE, 0, module.TOO_MANY_CONNECTIONS.encode())]
    assert third.closed
    assert crowd.broker.stats.refused[USER_CONNECTIONS] == 1
    again = opened(crowd, ann)
    again.control(smq.connect(b"device-1"))
    assert (first.closed, again.closed) == (True, False), "it takes the place of one"
    assert not connected(crowd, b"device-4", Identity("bob")).closed
    assert not connected(crowd, b"device-5").closed
    again.disconnect(CloseReason.CLIENT_DISCONNECT)
    assert not connected(crowd, b"device-6", ann).closed


def test_a_closed_hub_accepts_no_clients() -> None:
    crowd = Crowd()
    crowd.broker.closed = True
    session = opened(crowd)
    session.control(smq.connect(b"device"))
    assert session.closed
    assert came(session) == []
    assert crowd.broker.sessions == {}


# ---- packets


@pytest.mark.parametrize(
    ("packet", "reason"),
    [
        (b"", CloseReason.SHORT_PACKET),
        (smq.connect(b"device"), CloseReason.SECOND_CONNECT),
        (b"\x7f", CloseReason.UNKNOWN_PACKET),
        (b"\x09\x00", CloseReason.SHORT_PACKET),
    ],
)
def test_a_packet_against_the_rules_ends_the_client(packet: bytes, reason: CloseReason) -> None:
    crowd = Crowd()
    session = connected(crowd)
    assert session.control(packet) is False
    assert session.closed
    assert ends(crowd, reason) == 1
    assert came(session) == [], "without a word"


def test_forged_publisher_is_the_close_reason() -> None:
    crowd = Crowd()
    session = connected(crowd)
    with pytest.raises(ProtocolError) as raised:
        session.resolve(smq.publish_frame(7, session.etid ^ 1, 0, b"")[2:11])
    session.fail(raised.value)
    assert came(session) == [smq.disconnect(CloseReason.FORGED_PUBLISHER.value.encode())]
    assert session.closed


def test_disconnect_ends_the_client() -> None:
    crowd = Crowd()
    session = connected(crowd)
    session.control(smq.disconnect())
    assert session.closed
    assert ends(crowd, CloseReason.CLIENT_DISCONNECT) == 1
    session.disconnect(CloseReason.SHUTDOWN)
    assert ends(crowd, CloseReason.SHUTDOWN) == 0, "the first reason counts"
    assert crowd.broker.stats.closes == 1


def test_routes_of_two_clients_are_their_own() -> None:
    crowd = Crowd()
    first, second = connected(crowd), connected(crowd, b"device-2")
    number = crowd.broker.create(b"t")
    first.publish(smq.publish_frame(number, first.etid, 0, b"x"))
    first.publish(smq.publish_frame(crowd.broker.create(b"u"), first.etid, 0, b"x"))
    assert (len(first.routes), second.routes) == (2, {})


def test_a_closed_client_gets_no_notifications() -> None:
    crowd = Crowd()
    session = connected(crowd)
    topic = crowd.broker.topic_table.named(b"t")
    session.state = SessionState.CLOSED
    session.changed(topic, 3)
    assert came(session) == []


# ---- publishing


def test_messages_reach_subscribers_and_the_route_is_cached() -> None:
    crowd = Crowd()
    session, other = connected(crowd), connected(crowd, b"device-2")
    number = subscribe(other, b"t")
    came(other)
    run = smq.publish_frame(number, session.etid, 0, b"x")
    assert session.publish(run) is False
    assert list(session.routes) == [run[2:11]]
    assert session.publish(run) is False
    assert came(other) == [run[2:]] * 2
    topic = crowd.broker.topic_table.get(number)
    assert topic is not None
    assert topic.cached == {session}
    session.partitions = "derived"
    subscribe(connected(crowd, b"device-3"), b"t")
    assert session.routes == {}
    assert session.partitions is None
    session.publish(run)
    session.forget_routes()
    assert session.routes == {}
    assert not topic.cached


def test_the_route_cache_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ROUTES", 2)
    crowd = Crowd()
    session = connected(crowd)
    numbers = [crowd.broker.topic_table.named(b"%d" % n).id for n in range(3)]
    for number, size in zip(numbers, (1, 2, 1), strict=True):
        session.publish(smq.publish_frame(number, session.etid, 0, b"x"))
        assert len(session.routes) == size


def test_publish_before_connect_is_refused() -> None:
    crowd = Crowd()
    with pytest.raises(ProtocolError) as raised:
        opened(crowd).resolve(smq.publish_frame(7, 0, 0, b"")[2:11])
    assert raised.value.reason is CloseReason.BAD_CONNECT
    session = connected(crowd)
    key = smq.publish_frame(7, session.etid, 0, b"")[2:11]
    session.resolve(key)
    session.disconnect(CloseReason.CLIENT_DISCONNECT)
    with pytest.raises(ProtocolError):
        session.resolve(key)


def test_routes_know_rights_hooks_and_limits() -> None:
    crowd = Crowd()
    topic, hidden = (crowd.broker.topic_table.named(name) for name in (b"t", b"hidden"))
    session = connected(crowd, identity=Identity("ann", rights=Rights((Action.WRITE, b"t"))))

    def route(number: int) -> Any:
        return session.resolve(smq.publish_frame(number, session.etid, 0, b"")[2:11])

    assert isinstance(route(hidden.id), DeniedRoute)
    assert not isinstance(route(topic.id), DeniedRoute | GuardedRoute | MeteredRoute)
    crowd.broker.hooks.onpublish = lambda run, tid, ptid, peer: run
    assert isinstance(route(topic.id), GuardedRoute)
    assert session.meter is None
    crowd.broker.publish_limits = PublishLimits(per_s=5.0)
    assert isinstance(route(topic.id), MeteredRoute)
    meter = session.meter
    assert isinstance(route(hidden.id), MeteredRoute)
    assert session.meter is meter is not None
    session.partitions = "derived"
    crowd.broker.publish_limits = PublishLimits(per_s=5.0, message_bytes=10)
    session.apply_publish_limits()
    assert session.routes == {}
    assert session.partitions is None
    assert meter.admits(smq.publish_frame(topic.id, session.etid, 0, bytes(10)))
    assert not meter.admits(smq.publish_frame(topic.id, session.etid, 0, bytes(11)))
    crowd.broker.publish_limits = None
    session.apply_publish_limits()
    assert session.meter is meter


def test_kept_messages_are_routed_anew() -> None:
    crowd = Crowd()
    session, other = connected(crowd), connected(crowd, b"device-2")
    number = subscribe(other, b"t")
    came(other)
    run = smq.publish_frame(number, session.etid, 0, b"x")
    assert session.route_held(run) is False
    assert came(other) == [run[2:]]
    crowd.broker.hooks.onpublish = lambda run, tid, ptid, peer: Deferred()
    assert session.route_held(run) is True


def test_messages_of_one_run_are_counted() -> None:
    crowd = Crowd()
    session, other = connected(crowd), connected(crowd, b"device-2")
    number = subscribe(other, b"t")
    topic = crowd.broker.topic_table.get(number)
    assert topic is not None
    session.count_batch(topic.key, 4)
    assert topic.messages == 4
    session.count_batch(b"none", 4)
    crowd.broker.publish_limits = PublishLimits(per_s=5.0)
    session.resolve(smq.publish_frame(number, session.etid, 0, b"")[2:11])
    session.count_batch(topic.key, 2)
    assert session.meter is not None
    assert session.meter.batch_messages == 3


# ---- limits of control packets


def test_control_packets_have_limits_too() -> None:
    crowd = Crowd()
    session = connected(crowd)
    crowd.broker.publish_limits = PublishLimits(per_s=10.0, message_bytes=20)
    session.control(smq.with_name(Type.CREATE, b"x" * 34))
    assert not session.closed
    session.resolve(smq.publish_frame(7, session.etid, 0, b"")[2:11])
    assert session.meter is not None
    charged: list[int] = []
    session.meter = type("Meter", (), {"charge": lambda self, size: charged.append(size), "end": lambda self: None})()
    session.control(smq.PING)
    session.control(fragment(0, session, b""))
    assert charged == [1], "fragments are charged as one message"
    session.control(smq.with_name(Type.CREATE, b"x" * 35))
    assert session.closed
    assert ends(crowd, CloseReason.MESSAGE_TOO_LARGE) == 1


# ---- rights that were taken away


def test_a_lost_right_ends_a_subscription() -> None:
    crowd = Crowd()
    session = connected(crowd)
    number = subscribe(session, b"t")
    topic = crowd.broker.topic_table.get(number)
    assert topic is not None
    came(session)
    for _ in range(2):
        session.end_subscription(topic)
    assert came(session) == [smq.ack(Type.SUBACK, 0, b"t")]
    assert (topic.subscribers, crowd.broker.stats.subscriptions) == (0, 0)


def test_a_lost_right_ends_an_observation() -> None:
    crowd = Crowd()
    session = connected(crowd)
    topic = crowd.broker.topic_table.named(b"t")
    observe(session, topic.id)
    came(session)
    for _ in range(2):
        session.end_observation(topic)
    assert came(session) == [smq.change(topic.id, 0)]
    assert (session.observed, topic.observers) == (set(), {})


# ---- the end


def test_close_is_reported_and_leaves_nothing() -> None:
    told: list[Any] = []
    crowd = Crowd(Hooks(onclose=lambda *call: told.append(call)))
    crowd.broker.on_end = lambda *call: told.append(call)
    session, other = connected(crowd), connected(crowd, b"device-2")
    topic = crowd.broker.topic_table.named(b"t")
    subscribe(session, b"t")
    observe(session, other.etid)
    observe(other, topic.id)
    session.publish(smq.publish_frame(topic.id, session.etid, 0, b"x"))
    came(session)
    came(other)
    session.disconnect(CloseReason.SHUTDOWN, b"bye", "by hand")
    assert heard(session) == [smq.disconnect(b"bye")]
    assert told == [(session, CloseReason.SHUTDOWN, "by hand"), (session, CloseReason.SHUTDOWN)]
    assert isinstance(session.outbox, Ear)
    assert session.outbox.ended
    topic.deliver(smq.publish_frame(topic.id, other.etid, 0, b"x") * 3)
    assert crowd.broker.stats.drops[Drop.CLOSED] == 3, "until it is out of every table"
    assert came(other) == [smq.change(topic.id, 0)]
    assert session.outbox.queue == []
    assert topic.subscribers == 0
    assert not topic.cached
    assert crowd.broker.topic_table.get(session.etid) is None
    assert list(crowd.broker.uids) == [b"device-2"]
    assert other.topic is not None
    assert other.topic.observers == {}
    assert (session.observed, session.topics, session.fragments) == (None, (), None)


def test_a_client_that_was_not_accepted_is_not_removed() -> None:
    told: list[Any] = []
    crowd = Crowd(Hooks(onclose=lambda *call: told.append(call)))
    session = opened(crowd)
    session.disconnect(CloseReason.CONNECT_TIMEOUT)
    assert told == []
    assert crowd.broker.stats.closes == 0
    assert ends(crowd, CloseReason.CONNECT_TIMEOUT) == 1
    assert type(session.outbox.queue) is list


def test_what_a_meter_keeps_is_counted_at_the_end() -> None:
    crowd = Crowd()
    crowd.broker.call_later = lambda delay_s, function: None
    session = connected(crowd)
    crowd.broker.publish_limits = PublishLimits(per_s=1.0)
    number = crowd.broker.topic_table.named(b"t").id
    assert session.publish(smq.publish_frame(number, session.etid, 0, b"x") * 3) is True
    session.disconnect(CloseReason.CLIENT_DISCONNECT)
    assert crowd.broker.stats.drops[Drop.OVER_RATE] == 3


def test_new_topics_begin_without_old_answers() -> None:
    """A name that is asked for twice while the disk waits is joined once."""
    crowd, disk, session, ear = with_disk()
    session.control(smq.with_name(Type.SUBSCRIBE, b"a"))
    session.control(smq.with_name(Type.SUBSCRIBE, b"a"))
    disk.pending[0].resolve()
    assert len(came(session)) == 2
    assert crowd.broker.stats.subscriptions == 1


# ---- disconnected by the hub


class FakeCluster:
    """A cluster that knows the clients of other nodes."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def end_all(self, text: bytes | None) -> None:
        self.calls.append(("all", text))

    def end_client(self, etid: int, text: bytes | None) -> bool:
        self.calls.append((etid, text))
        return etid == 4711

    def left(self, client: Session) -> None:
        """The nodes are told of it."""


def test_one_client_or_all_are_disconnected() -> None:
    crowd = Crowd()
    one, two, three = crowd.clients(3)
    crowd.broker.shutdown(b"bye", one.etid)
    assert set(crowd.broker.sessions) == {two.etid, three.etid}
    assert heard(one)[-1] == smq.disconnect(b"bye")
    crowd.broker.shutdown()
    assert not crowd.broker.sessions


def test_clients_of_other_nodes_are_disconnected_there() -> None:
    crowd = Crowd()
    one, two = crowd.clients(2)
    broker: Any = crowd.broker
    cluster = broker.cluster = FakeCluster()
    broker.shutdown(b"bye", 4711)
    broker.shutdown(b"bye", one.etid)
    broker.shutdown(b"all")
    assert cluster.calls == [(4711, b"bye"), (one.etid, b"bye"), ("all", b"all")]
    assert set(broker.sessions) == {two.etid}
    broker.shutdown(b"here", everywhere=False)
    assert not broker.sessions
