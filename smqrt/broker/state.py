"""State that the clients of one broker share, and its interfaces.

`BrokerState` holds the tables, counters and hooks. The Protocols describe what the broker calls: sessions, the server's
own client, the recorder of a journal, traces, and the cluster.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from smqrt.auth.identity import Identity
from smqrt.broker.deferred import Deferred
from smqrt.broker.last_values import LastValues
from smqrt.broker.outbox import Drop, Outbox, SlowPolicies, run_in_background
from smqrt.broker.topics import OF_HUBS, HubLimits, NameStore, Observer, PublishLimits, Route, SubTopics, Topic, Topics
from smqrt.errors import CloseReason
from smqrt.settings.limits import Limit, LineLimit
from smqrt.wire.smq import measure_frames

log = logging.getLogger("smqrt")

LOG_INTERVAL_S = 1.0
"""Minimum interval between log lines about drops of one slow client, and about one limit."""


class BrokerPeer(Protocol):
    """Publisher and subscriber at a broker: the session of a client, or the server's own client.

    Attributes:
        etid: ephemeral topic id; 0 before a client is accepted.
        uid, info: from the client's Connect packet.
        identity: user and rights; None without authentication, and for the server's own client.
        topics: the topics that it subscribes to, by id; None for none.
        outbox: its send queue.
        extra: for the application layer.
        pending: what it published and a hook has yet to answer.
    """

    etid: int
    extra: Any
    pending: bytes | None
    identity: Identity | None

    @property
    def uid(self) -> bytes: ...
    @property
    def info(self) -> bytes: ...
    @property
    def topics(self) -> Mapping[int, object] | None: ...
    @property
    def outbox(self) -> Outbox: ...


class BrokerClient(BrokerPeer, Protocol):
    """Session of a client, as hooks see it.

    Attributes:
        seed: the u32 that was sent in Init.
        origin: what the transport has of the request that opened the connection.
        closed: whether the session has ended.
    """

    seed: int
    origin: Any

    @property
    def closed(self) -> bool: ...

    def disconnect(self, reason: CloseReason, text: bytes | None = None) -> None:
        """Close the connection; `text` is sent in a Disconnect packet first."""
        ...

    def forget_routes(self) -> None:
        """Clear the route cache, so that each destination is resolved again."""
        ...


Verdict = tuple[int, bytes]
"""Answer of `authenticate`: a code, 0 to accept and 1 to 6 to refuse, and a text for the client."""


@dataclass(slots=True)
class Hooks:
    """Extension points of a broker (spec: smq §2.2). An unset hook costs nothing.

    A hook may answer with `Deferred`; then the client is not read until the answer comes. Hooks do not raise: the
    bindings (Python, Lua) catch and log what a function of the application raises, and answer in its place.
    """

    authenticate: Callable[[bytes, BrokerClient], Verdict | Deferred[Verdict]] | None = None
    """`(credentials, session)` returns `(code, text)`: 0 accepts, 1 to 6 refuse."""
    has_logins: bool = False
    """Whether `authenticate` requires a login of the server first."""
    permittop: Callable[[bytes, bool, BrokerClient], object] | None = None
    """`(topic, issub, session)` returns whether the client may subscribe (or create)."""
    permitsubtop: Callable[[bytes, BrokerClient], object] | None = None
    """`(subtopic, session)` returns whether the client may create a new sub-topic."""
    onconnect: Callable[[BrokerClient], object] | None = None
    """`(session)`, after Connack."""
    onclose: Callable[[BrokerClient, CloseReason], object] | None = None
    """`(session, reason)` for every closed connection that had been accepted."""
    onmoved: Callable[[BrokerClient], object] | None = None
    """`(session)`: the client was migrated to another hub, see `smqrt.smq.session_migration`."""
    onvanish: Callable[[BrokerPeer], object] | None = None
    """`(phantom)`: a client of another node that was passed to a hook has disconnected."""
    onpublish: Callable[[bytes, int, int, BrokerPeer], bytes | Deferred[bytes] | None] | None = None
    """`(batch, tid, ptid, peer)` returns the frames of the batch to deliver, once per batch."""
    ondrop: Callable[[bytes, int, int, BrokerPeer], object] | None = None
    """`(batch, tid, ptid, peer)` for messages without a subscriber."""
    onnode: Callable[[int, str, str], object] | None = None
    """`(number, event, why)`: another node of the cluster has "joined", is "lost", is "back", or has "left"."""
    log: Callable[[BrokerPeer | None, str], object] | None = None
    """`(peer, text)` for the operator's log; None when the line is not about one peer."""


class Recorder(Protocol):
    """Recorder of published messages: the journal, as the broker uses it.

    Attributes:
        full: whether publishers have to wait until earlier messages are written.
    """

    full: bool

    def selects(self, topic: Topic | None) -> bool:
        """Whether messages to `topic` are recorded; None is an id without a topic or client."""
        ...

    def record(self, batch: bytes) -> None:
        """Record a batch, in the order of the calls."""
        ...

    def record_large(self, batch: bytes | memoryview) -> None:
        """Record a batch of many kilobytes, see `record`. A memoryview is not used after the call."""
        ...

    def record_unrouted(self, batch: bytes) -> None:
        """Record a batch without a subscriber."""
        ...

    def record_assembled(self, deliver: Callable[[bytes], bool | None], batch: bytes) -> bool:
        """Call `deliver(batch)` and mark what it records as assembled from PubFrag packets."""
        ...

    def skipped(self, batch: bytes) -> None:
        """Count the messages of a batch that was not selected."""
        ...

    def hold(self, publisher: BrokerPeer) -> bool:
        """Resume the outbox of `publisher` once the recorder is not full; return true."""
        ...

    @property
    def waits_for_disk(self) -> bool:
        """Whether messages reach subscribers only after they are written; `send_later` then delivers them."""

    def send_later(self, deliver: Callable[[bytes], bool | None], batch: bytes, publisher: BrokerPeer) -> bool:
        """Deliver a batch once it is written, and resume the outbox of `publisher`; return whether that is later."""
        ...

    def left(self, client: BrokerPeer) -> None:
        """A client has disconnected; the recorder still writes its messages with its name."""
        ...


@dataclass(slots=True)
class Stats:
    """Counters of one broker. Every message that is lost is counted.

    Attributes:
        connects: accepted clients; refusals: refused clients; closes: accepted clients that disconnected.
        denied: names that a hook of the application denied.
        subscriptions: the present number, without those of ETIDs.
        ends: closed connections by reason, accepted or not.
        drops: copies of messages that were not delivered, by reason.
        refused: how often each limit was reached.
    """

    connects: int = 0
    refusals: int = 0
    closes: int = 0
    subscriptions: int = 0
    denied: int = 0
    ends: dict[CloseReason, int] = field(default_factory=lambda: dict.fromkeys(CloseReason, 0))
    drops: dict[Drop, int] = field(default_factory=lambda: dict.fromkeys(Drop, 0))
    refused: dict[Limit, int] = field(default_factory=lambda: dict.fromkeys(OF_HUBS, 0))

    def drop(self, reason: Drop, messages: int) -> None:
        """Count `messages` that were not delivered for `reason`."""
        self.drops[reason] += messages


class ClusterHooks(Protocol):
    """Cluster membership of a broker, as the broker calls it."""

    def forwarded(self, route: Route | None, topic: Topic | None, tid: int, ptid: int) -> Route | None:
        """Extend `route` by the nodes that have subscribers of `tid`; None when there is no subscriber at all."""
        ...

    def missed(self, tid: int, messages: int) -> bool:
        """Count messages without a subscriber for lost nodes that subscribed; return whether there are such nodes."""
        ...

    def with_link_backpressure(self, route: Route, found: Route, peer: BrokerPeer) -> Route:
        """Return `route` with backpressure of full links for `peer`, if `found`, its last part, uses any."""
        ...

    def handles(self, topic: Topic, frame: bytes, origin: object) -> bool:
        """Whether this node's server handles a message of a topic with `once`; otherwise send it to the node that does.
        `origin` is the node that it came from, None for this one.
        """
        ...

    def handles_once(self, topic: Topic, number: int) -> None:
        """This server handles `topic` with `once` under the ETID `number`; 0 when it does no longer."""
        ...

    def pressed(self, key: bytes, presses: bool) -> None:
        """Begin or end backpressure at other nodes: subscribers here have full queues of the topic, or no longer."""
        ...

    def subscribed(self, topic: Topic) -> None:
        """A topic has one subscriber more here."""
        ...

    def unsubscribed(self, topic: Topic) -> None:
        """A topic has one subscriber less here."""
        ...

    def observed(self, topic: Topic) -> None:
        """A named topic is observed here."""
        ...

    def entered(self, client: BrokerClient) -> None:
        """A client was accepted."""
        ...

    def left(self, client: BrokerClient) -> None:
        """A client has disconnected."""
        ...

    def holder(self, uid: bytes) -> BrokerPeer | None:
        """Return the client of another node with this uid."""
        ...

    def phantom(self, etid: int) -> BrokerPeer | None:
        """Return the client, or the server, of another node with this ETID."""
        ...

    leave: Callable[[], object]
    """Leave the cluster."""
    suspend: Callable[[], object]
    """Leave the cluster for now, until it is decided whether the clients stay in this process."""

    @property
    def number(self) -> int:
        """Number of this node."""
        ...

    @property
    def others(self) -> frozenset[int]:
        """Numbers of the other nodes that have sent their subscriptions."""
        ...

    def pause(self) -> None:
        """Have the other nodes hold back messages: the broker is about to move to another process, see `is_paused`."""
        ...

    @property
    def is_paused(self) -> bool:
        """Whether all nodes that were asked hold back their messages."""
        ...

    def stay(self) -> None:
        """Rejoin after `suspend`: the clients stay in this process."""
        ...

    @property
    def awaits_clients(self) -> bool:
        """Whether clients of another process's broker are about to be migrated here."""
        ...

    def succeed(self, number: int) -> None:
        """Continue as the node `number`, whose clients are here now; `resync` follows."""
        ...

    def resync(self) -> None:
        """Send the other nodes the clients that were migrated here."""
        ...

    @property
    def phantoms(self) -> Mapping[int, BrokerPeer]:
        """Clients of other nodes, by ETID."""
        ...

    def peers_elsewhere(self) -> Iterator[BrokerPeer]:
        """Return the clients of other nodes; of several with one uid only the newest, because a lost node is noticed
        late.
        """
        ...

    def end_all(self, text: bytes | None) -> None:
        """Disconnect the clients of all nodes."""
        ...

    def end_client(self, etid: int, text: bytes | None) -> bool:
        """Disconnect a client of another node; return whether there is one with this ETID."""
        ...


class ServerPeer(BrokerPeer, Protocol):
    """The server's own client, as routes see it.

    Attributes:
        topic: of its own ETID.
        once: for each topic subscribed with `once`, by id, the ETID where other nodes send what this server handles.
        behind: whether received messages wait for handlers; publishers to the server then wait.
    """

    topic: Topic
    topics: dict[int, Topic]
    once: dict[int, Topic]
    behind: bool

    def hold(self, peer: BrokerPeer) -> bool:
        """Resume the outbox of `peer` when the handlers have caught up; return whether it has to wait."""
        ...


class BrokerTrace(Protocol):
    """Trace of one client or topic, as the broker notifies it (see `smqrt.broker.routes`).

    Attributes:
        topic: name of the traced topic; None when a client is traced.
    """

    topic: bytes | None

    def is_about(self, peer: BrokerPeer) -> bool:
        """Whether `peer` is the traced client."""
        ...

    def packet(self, client: BrokerPeer, packet: bytes) -> None:
        """A client sent a packet other than Publish."""
        ...

    def connected(self, client: BrokerPeer) -> None:
        """A client was accepted."""
        ...

    def ended(self, client: BrokerPeer, reason: CloseReason, detail: str) -> None:
        """A connection was closed."""
        ...

    def published(self, peer: BrokerPeer, batch: bytes, topic: Topic | None) -> None:
        """A client, or the server, published a batch to one destination."""
        ...


class BrokerState:
    """State that the clients of one broker share.

    Args:
        hooks: the extension points.
        random_u32: returns random 32-bit numbers.
        encode: the WebSocket encoder for batches.
        store: keeps names over restarts, or None.
        clock: monotonic seconds.
        limits: limits of what clients make it keep.
    """

    server: ServerPeer

    def __init__(
        self,
        hooks: Hooks,
        *,
        random_u32: Callable[[], int],
        encode: Callable[[bytes], bytes],
        clock: Callable[[], float],
        store: NameStore | None = None,
        limits: HubLimits | None = None,
    ) -> None:
        self.hooks = hooks
        self.limits = limits or HubLimits()
        self.stats = Stats()
        self.topic_table = Topics(random_u32, encode, store)
        self.subtopic_table = SubTopics(random_u32, store)
        self.random_u32 = random_u32
        self.clock = clock
        self.store = store
        self.sessions: dict[int, BrokerClient] = {}
        self.uids: dict[bytes, BrokerClient] = {}
        self.staying: dict[int, BrokerClient] = {}
        """Clients that the process before this one serves until it closes them; other nodes reach them through here."""
        self.recorder: Recorder | None = None
        self.last_values: LastValues | None = None
        self.cluster: ClusterHooks | None = None
        self.slow: SlowPolicies | None = None
        self.publish_limits: PublishLimits | None = None
        self.users: Counter[str] = Counter()
        """Number of connected clients by user."""
        # Set by the layer that has sockets and timers.
        self.measure: Callable[[bytes | memoryview], tuple[int, int]] = measure_frames
        self.call_later: Callable[[float, Callable[[], object]], object] = lambda delay_s, function: function()
        self.limit_chunks: Callable[[BrokerClient, int], None] = lambda session, size_bytes: None
        self.traces: tuple[BrokerTrace, ...] = ()
        self._denials = LineLimit()
        self.on_end: Callable[[Any, CloseReason, str], None] = lambda session, reason, detail: None
        self.on_changed: Callable[[Topic], object] | None = None
        """Called when a topic, or an ETID, has one subscriber more or less."""
        self.closed = False
        self.draining = False
        """Whether new clients are rejected."""
        self._logged_s: dict[BrokerPeer, float] = {}  # when drops of a slow client were last logged
        self._changed: dict[Topic, None] = {}  # topics whose observers are notified at the end of the turn
        self._refused_s: dict[Limit, float] = {}  # when reaching a limit was last logged

    # ---- clients

    def add_client(self, client: BrokerClient) -> None:
        """Count and register a client that was accepted."""
        self.register(client)
        self.stats.connects += 1
        if self.on_changed is not None and (topic := self.topic_table.get(client.etid)) is not None:
            self.on_changed(topic)
        if self.cluster is not None:
            self.cluster.entered(client)

    def register(self, client: BrokerClient) -> None:
        """Put a client that was accepted, here or by another process, into the tables."""
        self.sessions[client.etid] = self.uids[client.uid] = client
        if client.identity is not None:
            self.users[client.identity.user] += 1

    def remove_client(self, client: BrokerClient, topic: Topic, reason: CloseReason) -> None:
        """Remove a client whose connection was closed, and the `topic` of its ETID."""
        self.stats.closes += 1
        if self.hooks.onclose:  # before `deregister`, so that the hook finds the client in the tables
            try:
                self.hooks.onclose(client, reason)
            except Exception:  # the tables must be consistent whatever the hook does
                log.exception("error in onclose")
        if self.recorder:
            self.recorder.left(client)
        self.deregister(client)
        topic.discard(client.outbox)
        self.topic_table.remove(topic)

    def deregister(self, client: BrokerClient) -> None:
        """Remove a client from the tables, see `register`."""
        del self.sessions[client.etid]
        if self.cluster is not None:
            self.cluster.left(client)
        if client.identity is not None:
            user = client.identity.user
            self.users[user] -= 1
            if not self.users[user]:
                del self.users[user]
        if self.uids.get(client.uid) is client:  # another session may have the uid by now
            del self.uids[client.uid]

    def release_client(self, client: BrokerClient, topic: Topic) -> None:
        """Let the ETID of a removed client be used again, once its observers are notified."""
        self._logged_s.pop(client, None)
        self.notify_observers_later(topic)
        if not topic.observers:
            self.topic_table.release(topic)

    def subscribed(self, topic: Topic, outbox: Outbox) -> None:
        """Subscribe `outbox` to `topic` and notify the observers."""
        topic.add(outbox)
        self.stats.subscriptions += 1
        self.notify_observers_later(topic)
        if self.cluster is not None:
            self.cluster.subscribed(topic)

    def send_last_values(self, topic: Topic, outbox: Outbox) -> None:
        """Send a new subscriber the last values of `topic`, before any message that is published later."""
        if self.last_values is not None and (batch := self.last_values.greeting(topic)):
            outbox.put(topic.encode(batch) if outbox.websocket else batch)

    def unsubscribed(self, topic: Topic, outbox: Outbox) -> None:
        """Unsubscribe `outbox` from `topic` and notify the observers."""
        topic.discard(outbox)
        self.stats.subscriptions -= 1
        self.notify_observers_later(topic)
        if self.cluster is not None:
            self.cluster.unsubscribed(topic)

    def gone(self, topic: Topic) -> None:
        """Remove the ETID of a client of another node that has disconnected, and notify its observers."""
        topic.forget_routes()
        self.topic_table.remove(topic)
        for outbox in topic.raw:
            topic.discard(outbox)
        self.notify_observers_later(topic)
        if not topic.observers:
            self.topic_table.release(topic)

    def add_observer(self, topic: Topic, observer: Observer) -> None:
        """Notify `observer` of each change from the present number of subscribers on."""
        topic.observe(observer)
        if self.cluster is not None and topic.name is not None:
            self.cluster.observed(topic)

    def notify_observers_later(self, topic: Topic) -> None:
        """Notify the observers of a topic at the end of the turn, once for all changes of the turn."""
        if self.on_changed is not None:
            self.on_changed(topic)
        if topic.observers:
            if not self._changed:
                run_in_background(self._notify_observers())
            self._changed[topic] = None

    def _notify_observers(self) -> Iterator[None]:
        changed, self._changed = self._changed, {}
        for topic in changed:
            for observer in list(topic.observers):
                topic.notify(observer)
                yield
            if topic.name is None:
                topic.unobserve_all()
                self.topic_table.release(topic)

    # ---- accounting

    def log(self, peer: BrokerPeer | None, text: str) -> None:
        """Call the log hook."""
        if self.hooks.log:
            self.hooks.log(peer, text)

    def refuse(self, peer: BrokerPeer | None, limit: Limit) -> None:
        """Count that a limit was reached; log it at most once a second for each limit."""
        self.stats.refused[limit] += 1
        who = "a client" if peer is None else describe_client(peer)
        limit.refused(who)
        now_s = self.clock()
        if now_s - self._refused_s.get(limit, -LOG_INTERVAL_S) >= LOG_INTERVAL_S:
            self._refused_s[limit] = now_s
            self.log(peer, f"{limit.sentence(who)}; {self.stats.refused[limit]} times so far")

    def count_denial(self, peer: BrokerPeer, what: str, kind: str, name: bytes) -> None:
        """Count that a hook of the application denied a client a name; log it at most once a second."""
        self.stats.denied += 1
        hook = "permittop" if kind == "topic" else "permitsubtop"
        who, name_shown = describe_client(peer), ascii(name[:128])[1:]  # without the b of b'…'
        self._denials.warn(f"denied: {who} may not {what} the {kind} {name_shown}: {hook} of the hub returned false")

    def overflowed(self, peer: BrokerPeer, reason: Drop, messages: int) -> None:
        """Count copies of messages that a slow client did not get; log it at most once a second per client."""
        self.stats.drop(reason, messages)
        now_s = self.clock()
        if now_s - self._logged_s.get(peer, -LOG_INTERVAL_S) >= LOG_INTERVAL_S:
            self._logged_s[peer] = now_s
            self.log(peer, f"slow consumer: {peer.outbox.dropped} messages dropped so far ({reason.value})")


def describe_client(peer: BrokerPeer) -> str:
    """Return how log lines name a client."""
    return f"the client {ascii(peer.uid[:64])[1:]}"
