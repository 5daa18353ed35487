"""One client at the broker: a state machine that takes packets and answers through its outbox.

    WAITING ──Connect──▶ ASKING ──accepted──▶ CONNECTED ──any end──────▶ CLOSED
       └────────bad Connect, timeout───────┴──refused──────────────────────┘

`HANDLERS` is the table of what a connected client may send, one handler per packet type, named after it (spec:
smq §2.6, §12). A handler that asks a hook may have to wait: `control` then returns true, the connection stops
reading, and goes on when the outbox's `resume` is called. So one client's requests are worked off and acknowledged
strictly in order.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, TypeVar

from smqrt.auth.identity import Identity
from smqrt.broker import permissions
from smqrt.broker.deferred import Deferred
from smqrt.broker.meter import Meter, MeteredRoute, PublishLimits, refuse_message
from smqrt.broker.outbox import Drop, Outbox, run_in_background
from smqrt.broker.routes import GuardedRoute, destination
from smqrt.broker.state import BrokerPeer, BrokerState, Stats
from smqrt.broker.topics import CLIENT_OBSERVES, CLIENT_SUBSCRIPTIONS, USER_CONNECTIONS, Route, SubTopics, Topic, Topics
from smqrt.broker.trace import traced
from smqrt.errors import CloseReason, ProtocolError
from smqrt.wire import smq
from smqrt.wire.smq import ConnackCode, Type

MAX_UNSAFE_ANSWERS = 1000
"""A client with more answers that wait for the disk is not read until there are fewer."""
MAX_ROUTES = 1024
"""Entries of a client's route cache. A publisher with more destinations than that pays a lookup now and then."""

_NO_ROUTES: dict[bytes, Route] = {}

Value = TypeVar("Value")

log = logging.getLogger("smqrt")

OTHER_USERS_ID, TOO_MANY_CONNECTIONS = "another user's client has this id", "too many connections of this user"
"""Why a client is refused that `authenticate` has let in."""


class SessionState(Enum):
    """Where a client's connection stands."""

    WAITING = "waiting for Connect"
    ASKING = "waiting for authenticate"
    CONNECTED = "connected"
    CLOSED = "closed"


class Session:
    """The broker's side of one client.

    Attributes:
        etid: the client's ephemeral topic id, 0 before it is accepted.
        uid, info: what the client said of itself in Connect.
        seed: the u32 sent in Init.
        origin: what the layer above knows of the request that opened the connection.
        since_s: when it was let in, on the broker's clock; None before.
        identity: who it is, and what it may do; None when the server asks nobody.
        topics: the named topics it subscribes to, by id.
        observed: the topics whose number of subscribers it is told.
        fragments: what has come of a message in PubFrag packets.
        names_made, names_made_bytes: the topics and sub-topics that were new when it asked for them.
        extra: a place for the layer above (the peer table of an application).
        routes: the route cache: nine bytes of a frame to where it goes.
        pending: the frame, or the run, that a hook has yet to answer; it is asked again where the client goes on.
        partitions: what the connection derived from `routes`; it goes when they change.
    """

    __slots__ = (
        "_unsafe",
        "_waits_for_disk",
        "broker",
        "etid",
        "extra",
        "identity",
        "fragments",
        "info",
        "meter",
        "partitions",
        "pending",
        "names_made",
        "names_made_bytes",
        "observed",
        "origin",
        "outbox",
        "routes",
        "seed",
        "since_s",
        "state",
        "topic",
        "topics",
        "uid",
    )

    def __init__(self, broker: BrokerState, outbox: Outbox, seed: int, origin: object = None) -> None:
        self.broker = broker
        self.outbox = outbox
        self.seed = seed
        self.origin: Any = origin
        self.identity: Identity | None = None
        self.state = SessionState.WAITING
        self.etid = 0
        self.since_s: float | None = None
        self.uid = self.info = b""
        self.topic: Topic | None = None
        self.topics: dict[int, Topic] | None = None
        self.routes = _NO_ROUTES
        self.partitions: Any = None
        self.pending: bytes | None = None
        self.meter: Meter | None = None
        self.extra: Any = None
        self.observed: set[Topic] | None = None
        self.fragments: bytearray | None = None
        self.names_made = self.names_made_bytes = 0
        self._unsafe: deque[tuple[Deferred[None] | None, Callable[[bool], None]]] | None = None
        self._waits_for_disk = False

    # ---- packets

    def control(self, packet: bytes) -> bool:
        """Work off a packet that is not a routed Publish; true when the session waits for a hook.

        Never raises: whatever arrives, the session ends in a state with a reason.
        """
        if self.state is SessionState.CLOSED:
            return False
        for trace in self.broker.traces:
            trace.packet(self, packet)
        try:
            waits = bool(self._handle(packet))
        except ProtocolError as error:
            self.fail(error)
            return False
        if waits and packet[0] != Type.PUBFRAG:  # the run that was assembled waits then, and has been noted
            self.pending = smq.frame(packet)
        if self._unsafe and not waits and len(self._unsafe) >= MAX_UNSAFE_ANSWERS:
            self._waits_for_disk = waits = True
        return waits

    def fail(self, error: ProtocolError) -> None:
        """End the session because the client broke a rule."""
        if self.state is SessionState.WAITING:
            self.broker.log(self, f"refused: {error}")
            self.refuse(ConnackCode.PROTOCOL_VERSION, b"", error.reason, str(error))
            return
        self.broker.log(self, f"closed: {error}")
        forged = error.reason is CloseReason.FORGED_PUBLISHER
        self.disconnect(error.reason, error.reason.value.encode() if forged else None, str(error))

    def _handle(self, packet: bytes) -> bool | None:
        if not packet:
            raise ProtocolError(CloseReason.SHORT_PACKET)
        if self.state is SessionState.WAITING:
            return self._connect(packet)
        if self.broker.publish_limits is not None and not self._may_send(packet):
            return False
        handler = HANDLERS.get(packet[0])
        if handler is None:
            reason = CloseReason.SECOND_CONNECT if packet[0] == Type.CONNECT else CloseReason.UNKNOWN_PACKET
            raise ProtocolError(reason, f"{reason.value} (type {packet[0]})")
        return handler(self, packet)

    def _may_send(self, packet: bytes) -> bool:
        """Whether a control packet is within the limits of what clients publish; it is charged."""
        limits = self.broker.publish_limits
        if limits is not None and len(packet) > limits.message_bytes + smq.PUBLISH_HEADER_BYTES:
            refuse_message(self, limits)
            return False
        if self.meter is not None and packet[0] != Type.PUBFRAG:  # that is charged as a whole
            self.meter.charge(len(packet))
        return True

    def _ask(self, hook: Callable[..., Any] | None, arguments: tuple[Any, ...], then: Callable[[Any], None]) -> bool:
        """Call `then` with the hook's answer (true when there is no hook); true when it comes later."""
        answer = hook(*arguments) if hook else True
        if isinstance(answer, Deferred):
            if not answer.done:
                answer.then(lambda value, error: self._answered(then, value))
                return True
            answer = None if answer.failed else answer.result()
        if self.state is not SessionState.CLOSED:  # a hook may end the very client it is asked about
            then(answer)
        return False

    def _answered(self, then: Callable[[Any], None], value: Any) -> None:
        self.pending = None
        if self.state is not SessionState.CLOSED and self.guarded(then, value):
            self.outbox.resume()

    def guarded(self, function: Callable[[Value], object], value: Value) -> bool:
        """Call `function(value)`; an error ends the client, which would wait for ever, and is logged. True without."""
        try:
            function(value)
        except Exception:
            log.exception("error while a client was served; its connection is closed")
            self.disconnect(CloseReason.HOOK_FAILED)
            return False
        return True

    # ---- Connect

    def _connect(self, packet: bytes) -> bool:
        connect = smq.parse_connect(packet)
        self.uid, self.info = connect.uid, connect.info
        if connect.max_frame_bytes:
            self.broker.limit_chunks(self, connect.max_frame_bytes)
        self.state = SessionState.ASKING
        hook = self.broker.hooks.authenticate
        if hook is None:
            self.accept()
            return False
        return self._ask(hook, (connect.credentials, self), self._authenticated)

    def _authenticated(self, answer: Any) -> None:
        code, text = answer if isinstance(answer, tuple) else (ConnackCode.ACCESS_DENIED, b"")
        if code == ConnackCode.ACCEPTED:
            self.accept()
        else:
            self.refuse(code, text, CloseReason.REFUSED, _refusal(code, text))

    def accept(self) -> None:
        """Let the authenticated client in; one that is connected under the same uid gives way and leaves its ETID."""
        broker = self.broker
        old = broker.uids.get(self.uid)
        holder = old or (broker.cluster.holder(self.uid) if broker.cluster is not None else None)
        if holder and not permissions.may_take_over(self, holder):
            self.refuse(ConnackCode.ACCESS_DENIED, OTHER_USERS_ID.encode(), CloseReason.REFUSED, OTHER_USERS_ID)
            return
        if not self._user_may_connect(old):
            text = TOO_MANY_CONNECTIONS
            self.refuse(ConnackCode.SERVER_UNAVAILABLE, text.encode(), CloseReason.REFUSED, text)
            return
        if old:
            old.disconnect(CloseReason.TAKEN_OVER, CloseReason.TAKEN_OVER.value.encode())
        if broker.closed:
            self.disconnect(CloseReason.SHUTDOWN)
        if self.state is SessionState.CLOSED:  # `onclose` of the old one may have ended this one
            return
        topic = broker.topic_table.ephemeral(old.etid if old else 0)
        self.topic, self.etid, self.state = topic, topic.id, SessionState.CONNECTED
        self.since_s = broker.clock()
        topic.add(self.outbox)
        broker.add(self)
        for trace in broker.traces:
            trace.connected(self)
        self.outbox.reply(smq.connack(ConnackCode.ACCEPTED, topic.id))
        self.outbox.settled()
        if broker.hooks.onconnect:
            broker.hooks.onconnect(self)

    def _user_may_connect(self, old: BrokerPeer | None) -> bool:
        most, identity = self.broker.limits.connections_per_user, self.identity
        if most is None or identity is None or not identity.user:
            return True
        ends = old is not None and old.identity is not None and old.identity.user == identity.user
        if self.broker.users[identity.user] - ends < most:
            return True
        self.broker.refuse(self, USER_CONNECTIONS)
        return False

    def connect_timed_out(self) -> None:
        """Refuse a client that sent no Connect in time, or whom `authenticate` gave no answer in time."""
        if self.state is SessionState.ASKING:
            self.broker.log(self, "authenticate gave no answer in time: the client is refused")
        if self.state in (SessionState.WAITING, SessionState.ASKING):
            self.refuse(ConnackCode.SERVER_UNAVAILABLE, b"", CloseReason.CONNECT_TIMEOUT)

    def refuse(self, code: int, text: bytes, reason: CloseReason, detail: str = "") -> None:
        """Answer Connack `code` and end the connection, which nobody else has noticed so far."""
        self.broker.stats.refusals += 1
        self.outbox.reply(smq.connack(code, 0, text[: smq.MAX_NAME_BYTES]))
        self.disconnect(reason, None, detail)

    # ---- answers, which wait for the disk when names are kept over restarts

    def _answer(self, packet: bytes) -> None:
        """Send a control packet, behind those that wait for the disk."""
        if self._unsafe:
            self._unsafe.append((None, lambda safe: self.outbox.reply(packet)))
        else:
            self.outbox.reply(packet)

    def _when_safe(self, pending: Deferred[None] | None, then: Callable[[bool], None]) -> None:
        """Call `then` with whether the disk took a name, behind the answers that wait already."""
        if pending is None and not self._unsafe:
            then(True)
            return
        if self._unsafe is None:
            self._unsafe = deque()
        self._unsafe.append((pending, then))
        if pending:
            pending.then(self._safe)

    def _safe(self, value: Any, error: BaseException | None) -> None:
        while self._unsafe and (self._unsafe[0][0] is None or self._unsafe[0][0].done):
            pending, then = self._unsafe.popleft()
            if not self.guarded(then, pending is None or not pending.failed):
                return
        if self._waits_for_disk and len(self._unsafe or ()) < MAX_UNSAFE_ANSWERS:
            self._waits_for_disk = False
            self.outbox.resume()

    # ---- topics

    def _subscribe(self, packet: bytes) -> bool:
        name = smq.name(packet)
        topic = self.broker.topic_table.by_name.get(name)
        if topic and self.topics and topic.id in self.topics:
            self._answer(smq.ack(Type.SUBACK, topic.id, name))
            return False
        if self.identity is not None and not permissions.may_subscribe(self, name):
            self._answer(smq.ack(Type.SUBACK, 0, name))
            return False
        return self._ask(self.broker.hooks.permittop, (name, True, self), lambda ok: self._subscribed(name, ok))

    def _subscribed(self, name: bytes, permitted: Any) -> None:
        if len(self.topics or ()) >= self.broker.limits.subscriptions:
            self.broker.refuse(self, CLIENT_SUBSCRIPTIONS)
            permitted = False
        elif not permitted:
            self.broker.denied(self, "subscribe to", "topic", name)
        if not permitted or not self._may_name(self.broker.topic_table, name):
            self._answer(smq.ack(Type.SUBACK, 0, name))
            return
        topic = self.broker.topic_table.named(name)
        self._when_safe(self.broker.topic_table.unsaved(name), lambda safe: self._join(topic, name, safe))

    def _join(self, topic: Topic, name: bytes, safe: bool) -> None:
        is_new = safe and topic.id not in (self.topics or ())
        if is_new:
            if self.topics is None:
                self.topics = {}
            self.topics[topic.id] = topic
            self.broker.subscribed(topic, self.outbox)
            topic.tell(self)  # the others are told at the end of the turn
        self.outbox.reply(smq.ack(Type.SUBACK, topic.id if safe else 0, name))
        if is_new and self.broker.last_values is not None:
            self.broker.greet(topic, self.outbox)

    def _create(self, packet: bytes) -> bool:
        name = smq.name(packet)
        if self.identity is not None and not permissions.may_create(self, name):
            self._answer(smq.ack(Type.CREATEACK, 0, name))
            return False
        return self._ask(self.broker.hooks.permittop, (name, False, self), lambda ok: self._created(name, ok))

    def _created(self, name: bytes, permitted: Any) -> None:
        if not permitted:
            self.broker.denied(self, "create", "topic", name)
        permitted = permitted and self._may_name(self.broker.topic_table, name)
        number = self.broker.topic_table.named(name).id if permitted else 0
        self._acknowledge(Type.CREATEACK, number, name, self.broker.topic_table.unsaved(name))

    def _may_name(self, table: Topics | SubTopics, name: bytes) -> bool:
        """Whether the client may use `name`; a new one counts for it."""
        if name in table.by_name:
            return True
        refusal = self.broker.limits.of_all(table, name) or self.broker.limits.of_client(
            self.names_made, self.names_made_bytes, name
        )
        if refusal:
            self.broker.refuse(self, refusal)
            return False
        self.names_made += 1
        self.names_made_bytes += len(name)
        return True

    def _acknowledge(self, kind: Type, number: int, name: bytes, pending: Deferred[None] | None) -> None:
        self._when_safe(pending, lambda safe: self.outbox.reply(smq.ack(kind, number if safe else 0, name)))

    def _createsub(self, packet: bytes) -> bool:
        name = smq.name(packet)
        known = self.broker.subtopic_table.by_name.get(name)
        hook = None if known else self.broker.hooks.permitsubtop
        return self._ask(hook, (name, self), lambda ok: self._subcreated(name, ok))

    def _subcreated(self, name: bytes, permitted: Any) -> None:
        if not permitted:
            self.broker.denied(self, "create", "sub-topic", name)
        permitted = permitted and self._may_name(self.broker.subtopic_table, name)
        number = self.broker.subtopic_table.named(name) if permitted else 0
        self._acknowledge(Type.CREATESUBACK, number, name, self.broker.subtopic_table.unsaved(name))

    def _unsubscribe(self, packet: bytes) -> None:
        number = smq.u32(packet)
        topic = self.topics.pop(number, None) if self.topics else None
        if topic:
            self.broker.unsubscribed(topic, self.outbox)

    # ---- observing

    def _observe(self, packet: bytes) -> None:
        number = smq.u32(packet)
        topic = self.broker.topic_table.get(number)
        if topic is None or (self.identity is not None and not permissions.may_observe(self, topic)):
            self._answer(smq.change(number, 0))
        elif topic is not self.topic:
            if self.observed is None:
                self.observed = set()
            if topic not in self.observed and len(self.observed) >= self.broker.limits.observes:
                self.broker.refuse(self, CLIENT_OBSERVES)  # it gets the present number, and no more
            else:
                self.observed.add(topic)
                self.broker.add_observer(topic, self)
            if topic.name is not None:
                self._answer(smq.change(number, topic.counted))

    def _unobserve(self, packet: bytes) -> None:
        topic = self.broker.topic_table.get(smq.u32(packet))
        if topic and self.observed and topic in self.observed:
            self.observed.discard(topic)
            topic.unobserve(self)

    def changed(self, topic: Topic, subscribers: int) -> None:
        """Tell the client how many subscribers an observed topic has."""
        if self.state is SessionState.CLOSED:
            return
        self.outbox.reply(smq.change(topic.id, subscribers))
        if topic.name is None and self.observed:
            self.observed.discard(topic)

    # ---- the rest

    def _ping(self, packet: bytes) -> None:
        self._answer(smq.PONG)

    def _pong(self, packet: bytes) -> None:
        pass

    def _disconnect(self, packet: bytes) -> None:
        self.disconnect(CloseReason.CLIENT_DISCONNECT)

    # ---- publishing

    def resolve(self, key: bytes) -> Route:
        """The route for a run whose nine bytes are `key` (type, tid, ptid); found once, then cached in `routes`.

        Raises:
            ProtocolError: the publisher is not this client, or the client is not connected.
        """
        if self.state is not SessionState.CONNECTED or self.topic is None:
            raise ProtocolError(CloseReason.BAD_CONNECT, "the first packet is not Connect")
        if key[5:9] != self.topic.key:
            raise ProtocolError(CloseReason.FORGED_PUBLISHER, "a publisher id that is not the client's own")
        topic = self.broker.topic_table.at(key[1:5])
        route = self._route(topic, key)
        if self.broker.publish_limits is not None:
            if self.meter is None:
                self.meter = Meter(self, self.broker.publish_limits)
            route = MeteredRoute(self.meter, route)
        if self.broker.traces:
            route = traced(self.broker, route, topic, self)
        if topic is not None:
            self._cache(key, topic, route)
        return route

    def _route(self, topic: Topic | None, key: bytes) -> Route:
        tid = int.from_bytes(key[1:5], "big")
        if self.identity is not None and topic is not None and not permissions.may_publish(self, topic):
            return permissions.DeniedRoute(self.broker)
        if self.broker.hooks.onpublish:
            return GuardedRoute(self.broker, tid, self.etid, self)
        return destination(self.broker, tid, self.etid, self)

    def route_kept(self, run: bytes) -> bool:
        """Route what the meter has kept, to those who receive it by now; true when the session waits for a hook."""
        key = run[2:11]
        return bool(self._route(self.broker.topic_table.at(key[1:5]), key).deliver(run))

    def apply_publish_limits(self) -> None:
        """The hub's limits of publishing have changed."""
        self.forget_routes()
        if self.meter is not None:
            self.meter.change(self.broker.publish_limits or PublishLimits())

    def _cache(self, key: bytes, topic: Topic, route: Route) -> None:
        if len(self.routes) >= MAX_ROUTES:
            self.forget_routes()
        if self.routes is _NO_ROUTES:
            self.routes = {}
        if topic.cached is None:
            topic.cached = set()
        topic.cached.add(self)
        self.routes[key] = route

    def forget_routes(self) -> None:
        """Drop the cache. In place: the data path may be looking at it."""
        for key in self.routes:
            topic = self.broker.topic_table.by_key.get(key[1:5])
            if topic and topic.cached:
                topic.cached.discard(self)
        self.routes.clear()
        self.partitions = None

    def forget_route(self, destination: bytes) -> None:
        """Drop the route to a topic key out of the cache."""
        if self.topic is not None:
            self.routes.pop(b"\x08" + destination + self.topic.key, None)
        self.partitions = None

    def _pubfrag(self, packet: bytes) -> bool:
        if not self.outbox.takes_fragments:
            raise ProtocolError(CloseReason.FRAGMENT_NOT_ALLOWED, "PubFrag is for raw sockets")
        if len(packet) < smq.PUBLISH_HEADER_BYTES - 2:
            raise ProtocolError(CloseReason.SHORT_PACKET)
        if self.fragments is None:
            self.fragments = bytearray()
        self.fragments += packet[13:]
        limits = self.broker.publish_limits
        most = smq.MAX_PAYLOAD_BYTES if limits is None else limits.message_bytes
        if len(self.fragments) > most:
            raise ProtocolError(CloseReason.FRAGMENT_TOO_LARGE, f"fragments of more than {most} bytes")
        if packet[1:5] == b"\0\0\0\0":
            return False
        payload, self.fragments = bytes(self.fragments), None
        whole = smq.frame(bytes((Type.PUBLISH,)) + packet[1:13] + payload)
        recorder = self.broker.recorder
        return recorder.record_assembled(self.publish, whole) if recorder else self.publish(whole)

    def publish(self, run: bytes) -> bool:
        """Route a run of this client's Publish frames; true when the session waits for a hook."""
        route = self.routes.get(run[2:11]) or self.resolve(run[2:11])
        return bool(route.deliver(run))

    # ---- rights that were taken away

    def end_subscription(self, topic: Topic) -> None:
        """Take the client out of a topic that it may not read any more; it gets the answer that a Subscribe would get
        now (SMQ has no other word for it).
        """
        if self.topics and self.topics.pop(topic.id, None):
            self.broker.unsubscribed(topic, self.outbox)
            self._answer(smq.ack(Type.SUBACK, 0, topic.name or b""))

    def end_observation(self, topic: Topic) -> None:
        """Tell the client nothing more of a topic that it may not observe any more; the last it hears is 0."""
        if self.observed and topic in self.observed:
            self.observed.discard(topic)
            topic.unobserve(self)
            self._answer(smq.change(topic.id, 0))

    def count_batch(self, key: bytes, more: int) -> None:
        """Count `more` messages to the topic `key`, which are in one run; it is delivered next."""
        if self.meter is not None:
            self.meter.told = more + 1
        topic = self.broker.topic_table.by_key.get(key)
        if topic is not None and topic.is_delivered:
            topic.messages += more

    # ---- the end

    @property
    def closed(self) -> bool:
        """Whether the connection has ended."""
        return self.state is SessionState.CLOSED

    def disconnect(self, reason: CloseReason, text: bytes | None = None, detail: str = "") -> None:
        """End the connection, whatever the reason; `text` goes out in a Disconnect packet first, `detail` says the
        reason more exactly to the operator.
        """
        state, self.state = self.state, SessionState.CLOSED
        if state is SessionState.CLOSED:
            return
        self.broker.stats.ends[reason] += 1
        self.broker.on_end(self, reason, detail)
        for trace in self.broker.traces:
            trace.ended(self, reason, detail)
        if text is not None:
            self.outbox.reply(smq.disconnect(text))
        if state is SessionState.CONNECTED and self.topic is not None:
            self.broker.remove(self, self.topic, reason)
            run_in_background(self._leave(self.topic, self.observed or set(), self.topics or {}))
            self.observed = self.topics = self.fragments = self._unsafe = None
        if self.meter is not None:
            self.meter.end()
        self.outbox.finish(reason)
        if state is SessionState.CONNECTED:
            self.outbox.queue = DiscardingQueue(self.outbox, self.broker.stats)

    def _leave(self, own: Topic, observed: set[Topic], topics: dict[int, Topic]) -> Iterator[None]:
        """Take the client out of every table, in portions: it may have held many thousand topics."""
        for topic in observed:
            topic.unobserve(self)
            yield
        for topic in topics.values():
            self.broker.unsubscribed(topic, self.outbox)
            yield
        self.forget_routes()
        self.outbox.queue = []
        self.broker.release(self, own)


def _refusal(code: int, text: bytes) -> str:
    """What the operator reads of a login that was refused."""
    names = {member.value: member.name.lower().replace("_", " ") for member in ConnackCode}
    said = f": {text.decode('utf-8', 'backslashreplace')}" if text else ""
    return f"{names.get(code, f'code {code}')}{said}"


class DiscardingQueue(list[bytes]):
    """The queue of a client that is gone, until it is out of every table: it keeps nothing and counts what comes."""

    def __init__(self, outbox: Outbox, stats: Stats) -> None:
        self._outbox, self._stats = outbox, stats

    def append(self, run: bytes) -> None:
        """Count the messages of `run` as not delivered."""
        self._stats.drop(Drop.CLOSED, self._outbox.fitting(run, 0)[1])


HANDLERS: dict[int, Callable[[Session, bytes], bool | None]] = {
    Type.SUBSCRIBE: Session._subscribe,
    Type.CREATE: Session._create,
    Type.CREATESUB: Session._createsub,
    Type.UNSUBSCRIBE: Session._unsubscribe,
    Type.DISCONNECT: Session._disconnect,
    Type.PING: Session._ping,
    Type.PONG: Session._pong,
    Type.OBSERVE: Session._observe,
    Type.UNOBSERVE: Session._unobserve,
    Type.PUBFRAG: Session._pubfrag,
}
