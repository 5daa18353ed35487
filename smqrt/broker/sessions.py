"""Sessions of clients at the broker, and their records for migration.

    WAITING ──Connect──▶ AUTHENTICATING ──accepted──▶ CONNECTED ──closed──▶ CLOSED
       └──bad Connect, timeout──┴──rejected, timeout─────────────────────────┘

This module handles Connect, the routes of messages, and the end of a session; `control_packets` handles the other
packets and their acknowledgements. A handler that calls a hook may have to wait: `control` then returns true, and the
connection stops reading until the outbox's `resume` is called. So the requests of one client are handled and
acknowledged strictly in order.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

from smqrt.auth.identity import Identity, Method, Rights
from smqrt.broker import client_limits, control_packets
from smqrt.broker.broker import Broker
from smqrt.broker.client_limits import Meter, MeteredRoute, refuse_message
from smqrt.broker.control_packets import HANDLERS, Subscriptions, Value, with_topic, without_topic
from smqrt.broker.deferred import Deferred
from smqrt.broker.last_values import VALUE_BYTES
from smqrt.broker.outbox import Drop, Outbox, run_in_background
from smqrt.broker.rare import Rare, RareSessionState, UnsavedAnswers
from smqrt.broker.routes import GuardedRoute, destination, traced
from smqrt.broker.state import BrokerState, Stats
from smqrt.broker.topics import USER_CONNECTIONS, PublishLimits, Route, Topic
from smqrt.errors import CloseReason, ProtocolError
from smqrt.wire import smq
from smqrt.wire.smq import ConnackCode, Type

MAX_ROUTES = 1024
"""Routes that a client's cache holds. A full cache is cleared, and the routes are resolved again."""

_NO_ROUTES: dict[bytes, Route] = {}

log = logging.getLogger("smqrt")

OTHER_USERS_ID, TOO_MANY_CONNECTIONS = "another user's client has this id", "too many connections of this user"
"""Texts for clients that are rejected although `authenticate` has accepted them."""


class SessionState(Enum):
    """Phase of a session, see the diagram at the top."""

    WAITING = "waiting for Connect"
    AUTHENTICATING = "waiting for authenticate"
    CONNECTED = "connected"
    CLOSED = "closed"


# Globals, because each access to an attribute of an enumeration takes as long as a call.
WAITING, AUTHENTICATING = SessionState.WAITING, SessionState.AUTHENTICATING
CONNECTED, CLOSED = SessionState.CONNECTED, SessionState.CLOSED


class Session:
    """State of one client at the broker.

    Args:
        broker: the broker that the client is connected to.
        outbox: its send queue.
        seed: the u32 that was sent in Init.
        origin: see below.

    Attributes:
        etid: the client's ephemeral topic id, 0 before it is accepted.
        uid, info: from the Connect packet.
        seed: the u32 that was sent in Init.
        origin: the request that opened the connection, see `smqrt.smq.handshake.Origin`.
        since_s: when the client was accepted, on the broker's clock; None before.
        identity: its user and rights; None when clients need not authenticate.
        topics: the named topics that it subscribes to.
        observed: the topics that it observes; None for none.
        fragments: payload of the received PubFrag packets; None between messages.
        names_made, names_made_bytes: the topics and sub-topics that this client created, for its limits.
        unsaved_answers: answers that wait for the disk, in order; None before the first.
        waits_for_disk: whether the connection is paused because of too many unsaved answers.
        extra: for the application layer (its peer table).
        routes: the route cache, by bytes 2 to 10 of a frame (type, tid, ptid).
        pending: the packet or batch whose hook has not answered; after a migration it is handled again.
        partitions: table that the connection derives from `routes`; reset when they change.
    """

    __slots__ = (
        "broker",
        "etid",
        "extra",
        "identity",
        "info",
        "names_made",
        "names_made_bytes",
        "outbox",
        "rare",
        "routes",
        "seed",
        "since_s",
        "state",
        "topic",
        "topics",
        "uid",
    )
    no_rare = RareSessionState()
    fragments = Rare[bytearray | None]()
    meter = Rare[Meter | None]()
    observed = Rare[set[Topic] | None]()
    origin = Rare[Any]()
    partitions = Rare[Any]()
    pending = Rare[bytes | None]()
    unsaved_answers = Rare[UnsavedAnswers | None]()
    waits_for_disk = Rare[bool]()

    def __init__(self, broker: BrokerState, outbox: Outbox, seed: int, origin: object = None) -> None:
        self.broker = broker
        self.outbox = outbox
        self.seed = seed
        self.rare = self.no_rare
        if origin is not None:
            self.origin = origin
        self.identity: Identity | None = None
        self.state = WAITING
        self.etid = 0
        self.since_s: float | None = None
        self.uid = self.info = b""
        self.topic: Topic | None = None
        self.topics: Subscriptions = ()
        self.routes = _NO_ROUTES
        self.extra: Any = None
        self.names_made = self.names_made_bytes = 0

    @property
    def inbox(self) -> Outbox:
        """The outbox that gets the messages to its ETID."""
        return self.outbox

    # ---- packets

    def control(self, packet: bytes) -> bool:
        """Handle a packet that is not a routed Publish; return true when the client must not be read until `resume`.

        Never raises: a packet that violates the protocol ends the session with a close reason.
        """
        if self.state is CLOSED:
            return False
        for trace in self.broker.traces:
            trace.packet(self, packet)
        try:
            waits = bool(self._handle(packet))
        except ProtocolError as error:
            self.fail(error)
            return False
        if waits and packet[0] != Type.PUBFRAG:  # after PubFrag, `pending` is the assembled message
            self.pending = smq.frame(packet)
        unsaved = self.rare.unsaved_answers
        if not waits and unsaved and len(unsaved) >= control_packets.MAX_UNSAVED_ANSWERS:
            self.waits_for_disk = waits = True
        return waits

    def fail(self, error: ProtocolError) -> None:
        """End the session because the client violated the protocol."""
        if self.state is WAITING:
            self.broker.log(self, f"refused: {error}")
            self.refuse(ConnackCode.PROTOCOL_VERSION, b"", error.reason, str(error))
            return
        self.broker.log(self, f"closed: {error}")
        forged = error.reason is CloseReason.FORGED_PUBLISHER
        self.disconnect(error.reason, error.reason.value.encode() if forged else None, str(error))

    def _handle(self, packet: bytes) -> bool | None:
        if not packet:
            raise ProtocolError(CloseReason.SHORT_PACKET)
        if self.state is WAITING:
            return self._connect(packet)
        limits = self.broker.publish_limits
        if limits is not None:
            if len(packet) > limits.message_bytes + smq.PUBLISH_HEADER_BYTES:
                return refuse_message(self, limits)
            if self.meter is not None and packet[0] != Type.PUBFRAG:  # the assembled message is charged instead
                self.meter.charge(len(packet))
        handler = HANDLERS.get(packet[0])
        if handler is None:
            reason = CloseReason.SECOND_CONNECT if packet[0] == Type.CONNECT else CloseReason.UNKNOWN_PACKET
            raise ProtocolError(reason, f"{reason.value} (type {packet[0]})")
        return handler(self, packet)

    def ask(self, hook: Callable[..., Any] | None, arguments: tuple[Any, ...], then: Callable[[Any], None]) -> bool:
        """Call `then` with the answer of `hook`, or with true without a hook; return true for a later answer."""

        def answered(value: Any, error: BaseException | None) -> None:
            self.pending = None
            if self.state is not CLOSED and self.call_or_disconnect(then, value):
                self.outbox.resume()

        answer = hook(*arguments) if hook else True
        if isinstance(answer, Deferred):
            if not answer.done:
                answer.then(answered)
                return True
            answer = None if answer.failed else answer.result()
        if self.state is not CLOSED:  # the hook may have disconnected this client
            then(answer)
        return False

    def call_or_disconnect(self, function: Callable[[Value], object], value: Value) -> bool:
        """Call `function(value)`; when it raises, log that, disconnect the client and return false.

        Without the disconnect, the client would wait for its answer forever.
        """
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
        self.state = AUTHENTICATING
        hook = self.broker.hooks.authenticate
        if hook is None:
            self.accept()
            return False

        def authenticated(answer: Any) -> None:
            code, text = answer if isinstance(answer, tuple) else (ConnackCode.ACCESS_DENIED, b"")
            if code == ConnackCode.ACCEPTED:
                self.accept()
            else:
                names = {member.value: member.name.lower().replace("_", " ") for member in ConnackCode}
                suffix = f": {text.decode('utf-8', 'backslashreplace')}" if text else ""
                self.refuse(code, text, CloseReason.REFUSED, f"{names.get(code, f'code {code}')}{suffix}")

        return self.ask(hook, (connect.credentials, self), authenticated)

    def accept(self) -> None:
        """Accept the authenticated client; it takes over the ETID of a session with the same uid, which is closed."""
        broker = self.broker
        old = broker.uids.get(self.uid)
        holder = old or (broker.cluster.holder(self.uid) if broker.cluster is not None else None)
        if holder and not client_limits.may_take_over(self, holder):
            self.refuse(ConnackCode.ACCESS_DENIED, OTHER_USERS_ID.encode(), CloseReason.REFUSED, OTHER_USERS_ID)
            return
        max_connections, identity = broker.limits.connections_per_user, self.identity
        if max_connections is not None and identity is not None and identity.user:
            # A client that reconnects replaces one of the counted connections.
            replaces_own = old is not None and old.identity is not None and old.identity.user == identity.user
            if broker.users[identity.user] - replaces_own >= max_connections:
                broker.refuse(self, USER_CONNECTIONS)
                text = TOO_MANY_CONNECTIONS
                self.refuse(ConnackCode.SERVER_UNAVAILABLE, text.encode(), CloseReason.REFUSED, text)
                return
        if old:
            old.disconnect(CloseReason.TAKEN_OVER, CloseReason.TAKEN_OVER.value.encode())
        if broker.closed:  # `onclose` of the old session may have closed the broker
            self.disconnect(CloseReason.SHUTDOWN)
        if self.state is CLOSED:  # or this session
            return
        # The ETID of the old session is free now, and this session gets it.
        self.etid, self.state = broker.topic_table.etid(old.etid if old else 0), CONNECTED
        self.since_s = broker.clock()
        broker.add_client(self)
        for trace in broker.traces:
            trace.connected(self)
        self.outbox.reply(smq.connack(ConnackCode.ACCEPTED, self.etid))
        self.end_handshake()
        if broker.hooks.onconnect:
            broker.hooks.onconnect(self)

    def end_handshake(self) -> None:
        """End the time limit of the handshake: the client is accepted."""
        self.outbox.settled()

    def connect_timed_out(self) -> None:
        """Reject a client whose Connect, or whose authentication, did not complete in time."""
        if self.state is AUTHENTICATING:
            self.broker.log(self, "authenticate timed out; the client is rejected")
        if self.state in (WAITING, AUTHENTICATING):
            self.refuse(ConnackCode.SERVER_UNAVAILABLE, b"", CloseReason.CONNECT_TIMEOUT)

    def refuse(self, code: int, text: bytes, reason: CloseReason, detail: str = "") -> None:
        """Send Connack `code` and close the connection. Hooks and other clients are not notified."""
        self.broker.stats.refusals += 1
        self.outbox.reply(smq.connack(code, 0, text[: smq.MAX_NAME_BYTES]))
        self.disconnect(reason, None, detail)

    def changed(self, topic: Topic, subscribers: int) -> None:
        """Send the client the number of subscribers of an observed topic."""
        if self.state is CLOSED:
            return
        self.outbox.reply(smq.change(topic.id, subscribers))
        if topic.name is None and self.observed:
            self.observed.discard(topic)

    # ---- publishing

    def resolve(self, key: bytes) -> Route:
        """Return the route for batches whose bytes 2 to 10 are `key` (type, tid, ptid), and put it into the cache.

        Raises:
            ProtocolError: the publisher is not this client, or the client is not connected.
        """
        if self.state is not CONNECTED:
            raise ProtocolError(CloseReason.BAD_CONNECT, "the first packet is not Connect")
        if int.from_bytes(key[5:9], "big") != self.etid:
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
        if self.identity is not None and topic is not None and not client_limits.may_publish(self, topic):
            return client_limits.DeniedRoute(self.broker)
        if self.broker.hooks.onpublish:
            return GuardedRoute(self.broker, tid, self.etid, self)
        return destination(self.broker, tid, self.etid, self)

    def route_held(self, batch: bytes) -> bool:
        """Route messages that the meter held back; return true when the client has to wait for a hook.

        The route is resolved again, because subscribers may have changed.
        """
        key = batch[2:11]
        return bool(self._route(self.broker.topic_table.at(key[1:5]), key).deliver(batch))

    def apply_publish_limits(self) -> None:
        """Apply the broker's current limits of publishing."""
        self.forget_routes()
        if self.meter is not None:
            self.meter.apply_limits(self.broker.publish_limits or PublishLimits())

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
        """Clear the cache; in place, because the data path may be reading it."""
        if not self.routes:  # then no partition has a subscriber, and no message is forwarded
            return
        for key in self.routes:
            topic = self.broker.topic_table.by_key.get(key[1:5])
            if topic and topic.cached:
                topic.cached.discard(self)
        self.routes.clear()
        if self.rare.partitions is not None:
            self.partitions = None
        if self.outbox.is_forwarded:
            self.outbox.leave_forwarder()

    def forget_route(self, destination: bytes) -> None:
        """Remove the route to a topic, given by its key, from the cache."""
        # The key of the route cache: type Publish, destination, publisher.
        self.routes.pop(b"\x08" + destination + self.etid.to_bytes(4, "big"), None)
        if self.rare.partitions is not None:
            self.partitions = None
        if self.outbox.is_forwarded:
            self.outbox.leave_forwarder()

    def publish(self, batch: bytes) -> bool:
        """Route a batch of this client's Publish frames; return true when the client has to wait."""
        route = self.routes.get(batch[2:11]) or self.resolve(batch[2:11])
        return bool(route.deliver(batch))

    @property
    def topic_ids(self) -> list[int]:
        """The ids of the topics that it subscribes to."""
        return [topic.id for topic in self.topics]

    # ---- permissions that were withdrawn

    def end_subscription(self, topic: Topic) -> None:
        """End a subscription that is no longer permitted.

        The client gets a Suback with 0, the answer to a denied Subscribe, because SMQ has no packet for this case.
        """
        if topic in self.topics:
            self.topics = without_topic(self.topics, topic)
            self.broker.unsubscribed(topic, self.outbox)
            control_packets.deny_subscription(self, topic.name or b"")

    def end_observation(self, topic: Topic) -> None:
        """End an observation that is no longer permitted. The client gets a last Change with 0."""
        if self.observed and topic in self.observed:
            self.observed.discard(topic)
            topic.unobserve(self)
            control_packets.send_answer(self, smq.change(topic.id, 0))

    def recheck_filters(self) -> Iterator[None]:
        """End subscriptions to topic filters that are no longer permitted; only MQTT clients have such."""
        return iter(())

    def count_batch(self, key: bytes, more: int) -> None:
        """Count `more` messages to the topic `key`: all of the next batch but the first, which `deliver` counts."""
        meter = self.rare.meter
        if meter is not None:
            meter.batch_messages = more + 1
        topic = self.broker.topic_table.by_key.get(key)
        if topic is not None and topic.is_delivered:
            topic.messages += more

    # ---- closing

    @property
    def closed(self) -> bool:
        """Whether the session has ended."""
        return self.state is CLOSED

    def disconnect(self, reason: CloseReason, text: bytes | None = None, detail: str = "") -> None:
        """Close the connection.

        Args:
            reason: the close reason.
            text: sent in a Disconnect packet first; None sends no packet.
            detail: details of the reason, for the operator.
        """
        state, self.state = self.state, CLOSED  # first: hooks below may disconnect it again
        if state is CLOSED:
            return
        self.broker.stats.ends[reason] += 1
        self.broker.on_end(self, reason, detail)
        for trace in self.broker.traces:
            trace.ended(self, reason, detail)
        if text is not None:
            self.outbox.reply(smq.disconnect(text))
        if state is CONNECTED:
            self.broker.remove_client(self, reason)
            run_in_background(self._leave(self.rare.observed or set(), self.topics))
            self.topics = ()
            if self.rare is not self.no_rare:
                self.observed = self.fragments = self.unsaved_answers = None
        meter = self.rare.meter
        if meter is not None:
            meter.end()
        self.outbox.finish(reason)
        if state is CONNECTED:
            # Publishers deliver to this outbox until `_leave` is done.
            self.outbox.queue = DiscardingQueue(self.outbox, self.broker.stats)

    def _leave(self, observed: set[Topic], topics: Subscriptions) -> Iterator[None]:
        """Remove the client from all tables, in portions: leaving thousands of topics takes milliseconds."""
        for topic in observed:
            topic.unobserve(self)
            yield
        for topic in topics:
            self.broker.unsubscribed(topic, self.outbox)
            yield
        self.forget_routes()
        self.outbox.queue = []
        self.broker.release_client(self)


class DiscardingQueue(list[bytes]):
    """Send queue of a closed client that is still in tables: counts messages and discards them."""

    def __init__(self, outbox: Outbox, stats: Stats) -> None:
        self._outbox, self._stats = outbox, stats

    def append(self, batch: bytes) -> None:
        """Count the messages of `batch` as not delivered."""
        self._stats.drop(Drop.CLOSED, self._outbox.fitting(batch, 0)[1])


# ---- Records of broker state
#
# A record is a dictionary of numbers, texts, bytes and lists, so that it can be sent to another process. Migration of
# sessions and hot restarts use them.

Record = dict[str, Any]
PORTION_BYTES = 1 << 20
"""Size of the portions in which last values are sent."""


class CannotJoin(ValueError):
    """Error of `join`: the ETID or the uid of the session is in use at this broker, or it accepts no MQTT clients."""


# ---- Records of names


def names_of(broker: Broker) -> Record:
    """Return the names and their ids. The other broker needs them before its application creates topics."""
    return {
        "server": broker.server.etid,
        "topics": [[number, name] for number, name in broker.topics()],
        "subtopics": [[number, name] for number, name in broker.subtopics()],
    }


def adopt_names(broker: Broker, names: Record) -> list[bytes]:
    """Change the ids of topics and sub-topics to those that clients use; return the names whose id changed."""
    renumbered = [name for number, name in names["topics"] if broker.renumber(name, number)]
    return renumbered + [name for number, name in names["subtopics"] if broker.subtopic_table.renumber(name, number)]


# ---- Records of counters


def counters_of(broker: Broker) -> Record:
    """Return the counters, by the names of their enumerations."""
    stats = broker.stats
    return {
        "connects": stats.connects,
        "refusals": stats.refusals,
        "closes": stats.closes,
        "drops": {reason.name: count for reason, count in stats.drops.items() if count},
        "refused": {limit.name: count for limit, count in stats.refused.items() if count},
    }


def add_counters(broker: Broker, counters: Record) -> None:
    """Add the counters of another broker; unknown names, of another version, are ignored."""
    stats = broker.stats
    stats.connects += counters["connects"]
    stats.refusals += counters["refusals"]
    stats.closes += counters["closes"]
    for reason in Drop:
        stats.drops[reason] += counters["drops"].get(reason.name, 0)
    for limit in stats.refused:
        stats.refused[limit] += counters["refused"].get(limit.name, 0)


# ---- Records of last values


def values_of(broker: Broker) -> Iterator[Record]:
    """Yield the last values that are not in the file yet, in portions of about a megabyte.

    The message of a deleted value has no payload.
    """
    portion: Record = {"values": [], "sources": [], "stamps": []}
    places: dict[Identity | None, int] = {}
    size_bytes = 0
    for topic, frame, source in broker.last_values.unsaved() if broker.last_values else ():
        if source not in places:
            places[source] = len(places)
            portion["sources"].append(source and _identity_record(source))
        portion["values"].append([topic.id, frame, places[source]])
        portion["stamps"].append(broker.last_values.stamp_at((topic.key, frame[smq.STID])) if broker.last_values else 0)
        size_bytes += len(frame) + VALUE_BYTES
        if size_bytes >= PORTION_BYTES:
            yield portion
            portion, places, size_bytes = {"values": [], "sources": [], "stamps": []}, {}, 0
    if portion["values"]:
        yield portion


def adopt_values(broker: Broker, portion: Record) -> None:
    """Record a portion of last values; topics that do not exist, or that no filter selects here, are skipped."""
    sources = [one and _identity_of(one, None) for one in portion["sources"]]
    stamps = portion.get("stamps") or itertools.repeat(None)  # older versions send no stamps
    for (number, frame, source), stamp in zip(portion["values"], stamps, strict=False):
        topic = broker.topic_table.get(number)
        if broker.last_values is not None and topic is not None and broker.last_values.selects(topic):
            broker.last_values.of(topic).take_frame(frame, sources[source], stamp)


def topics_with_values(broker: Broker) -> set[int]:
    """Return the ids of subscribed topics of the application that have last values, which it has received already."""
    values = broker.last_values
    return {
        number for number, topic in broker.server.topics.items() if values is not None and values.initial_frames(topic)
    }


def send_restored_values(broker: Broker, already_sent: set[int]) -> None:
    """Send the application the last values of its topics that were restored after it subscribed.

    Args:
        broker: the broker.
        already_sent: ids of topics to skip, see `topics_with_values`.
    """
    for number, topic in list(broker.server.topics.items()):
        if number not in already_sent and number not in broker.server.once:
            broker.send_last_values(topic, broker.server)


# ---- Records of clients


def client_record(session: Session) -> Record:
    """Return the record of a connected client."""
    return {
        "etid": session.etid,
        "uid": session.uid,
        "info": session.info,
        "seed": session.seed,
        "names": [session.names_made, session.names_made_bytes],
        "topics": session.topic_ids,
        "observed": [[topic.id, topic.observers.get(session, 0)] for topic in session.observed or ()],
        "since": session.since_s,  # monotonic: the same clock in all processes of a machine
        "identity": None if session.identity is None else _identity_record(session.identity),
        "fragments": None if session.fragments is None else bytes(session.fragments),
    }


def _identity_record(identity: Identity) -> Record:
    return {
        "user": identity.user,
        "groups": list(identity.groups),
        "method": identity.method.value,
        "client_id": identity.client_id,
        "address": identity.address,
        "expires_s": identity.expires_s,
        "proof": identity.proof,
    }


def _identity_of(record: Record, rights: Rights | None) -> Identity:
    known = {**record, "groups": tuple(record["groups"]), "method": Method(record["method"])}
    return Identity(**known, rights=rights)


def join(
    broker: Broker,
    outbox: Outbox,
    record: Record,
    rights: Rights | None = None,
    make: Callable[[Broker, Outbox, int], Session] | None = None,
) -> Session:
    """Restore the session of a record at `broker`, whose names are adopted already.

    Hooks, observers and other nodes are not notified, because the client stays connected.

    Args:
        broker: the hub.
        outbox: the connection of the client.
        record: see `client_record`.
        rights: the rights of users.
        make: the class of the session; `Session` without it.

    Raises:
        CannotJoin: its ETID or its uid is in use here.
    """
    if broker.topic_table.is_taken(record["etid"]) or record["uid"] in broker.uids:
        raise CannotJoin(record["etid"])
    session = (make or Session)(broker, outbox, record["seed"])
    session.uid, session.info = record["uid"], record["info"]
    session.since_s = record["since"]
    session.names_made, session.names_made_bytes = record["names"]
    session.fragments = None if record["fragments"] is None else bytearray(record["fragments"])
    session.etid, session.state = record["etid"], CONNECTED
    for number in record["topics"]:
        named = broker.topic_table.get(number)
        if named is not None:
            session.topics = with_topic(session.topics, named)
            named.add(outbox)
    if record["identity"] is not None:
        session.identity = _identity_of(record["identity"], rights)
    broker.register(session)
    return session


def observe(session: Session, record: Record) -> None:
    """Restore the observations of a session, after all sessions are restored; send changes since the record was made.

    Args:
        session: the session that joined.
        record: its record.
    """
    for number, notified in record["observed"]:
        topic = session.broker.topic_table.get(number)
        if topic is None:
            if notified:  # the ETID of a client that was not restored: report its end
                session.outbox.reply(smq.change(number, 0))
            continue
        if session.observed is None:
            session.observed = set()
        session.observed.add(topic)
        topic.observe(session)
        topic.observers[session] = notified
        topic.notify(session)


def leave(session: Session) -> None:
    """Close a session that another process has restored, without notifications."""
    session.state = CLOSED
    session.forget_routes()
    session.outbox.queue = []
    session.topics = ()
    session.observed = session.fragments = None


def forget_clients(broker: Broker, sessions: set[Session]) -> None:
    """Remove from all tables the sessions that another process has restored."""
    for session in sessions:
        broker.deregister(session)
        broker.topic_table.remove(session.etid)
        broker.topic_table.release(session.etid)
    outboxes = {session.outbox for session in sessions}
    for topic in broker.topic_table.by_key.values():
        topic.forget(outboxes, sessions)
