"""State that the clients of one broker share, and its interfaces.

`BrokerState` holds the tables, counters and hooks. The Protocols describe what the broker calls: sessions, the server's
own client, the recorder of a journal, traces, and the cluster.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

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
        topic_ids: the ids of the topics that it subscribes to.
        outbox: its send queue.
        extra: for the application layer.
        pending: the published batch whose hook has not answered.
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
    def topic_ids(self) -> Collection[int]: ...
    @property
    def outbox(self) -> Outbox: ...


class BrokerClient(BrokerPeer, Protocol):
    """Session of a client, as passed to hooks.

    Attributes:
        seed: the u32 that was sent in Init.
        topic: the topic of its ETID; None before it is used.
        origin: the request that opened the connection, see `smqrt.smq.handshake.Origin`.
        closed: whether the session has ended.
    """

    seed: int
    topic: Topic | None
    origin: Any

    @property
    def closed(self) -> bool: ...

    @property
    def inbox(self) -> Outbox:
        """The outbox that gets the messages to its ETID."""

    def disconnect(self, reason: CloseReason, text: bytes | None = None) -> None:
        """Close the connection; `text` is sent in a Disconnect packet first."""

    def forget_routes(self) -> None:
        """Clear the route cache, so that each destination is resolved again."""


Verdict = tuple[int, bytes]
"""Answer of `authenticate`: a code, 0 to accept and 1 to 6 to reject, and a text for the client."""


class AuthStep(NamedTuple):
    """Answer of `mqttauth`.

    Attributes:
        code: 0 accepts the client, 0x18 asks it for more, another reason code of MQTT 5 rejects it.
        data: data for the client.
        user: the user whom an accepted client is; None: name and password are checked, as those of other clients.
        text: the reason of a rejection, for the client.
    """

    code: int
    data: bytes = b""
    user: str | None = None
    text: str = ""


@dataclass(slots=True)
class Hooks:
    """Extension points of a broker (spec: smq §2.2). An unset hook costs nothing.

    A hook may return `Deferred`; the client is not read until it is settled. Hooks do not raise: the bindings (Python,
    Lua) catch and log exceptions of the application's functions, and return a default answer.
    """

    authenticate: Callable[[bytes, BrokerClient], Verdict | Deferred[Verdict]] | None = None
    """`(credentials, session)` returns `(code, text)`: 0 accepts, 1 to 6 reject."""
    has_logins: bool = False
    """Whether `authenticate` first checks the server's users."""
    mqttauth: Callable[[str, bytes, BrokerClient], AuthStep | Deferred[AuthStep] | None] | None = None
    """`(method, data, session)`, for each CONNECT and AUTH packet of an MQTT client with an authentication method."""
    identify: Callable[[str, BrokerClient], Identity | None] | None = None
    """`(user, session)` returns the identity of a user of the server; None for an unknown one."""
    permittop: Callable[[bytes, bool, BrokerClient], object] | None = None
    """`(topic, issub, session)` returns whether the client may subscribe (or create)."""
    permitfilter: Callable[[bytes, BrokerClient], object] | None = None
    """`(filter, session)` returns whether an MQTT client may subscribe to a filter with wildcards."""
    permitsubtop: Callable[[bytes, BrokerClient], object] | None = None
    """`(subtopic, session)` returns whether the client may create a new sub-topic."""
    onconnect: Callable[[BrokerClient], object] | None = None
    """`(session)`, after Connack."""
    onclose: Callable[[BrokerClient, CloseReason], object] | None = None
    """`(session, reason)` for every closed connection that had been accepted."""
    onmoved: Callable[[BrokerClient], object] | None = None
    """`(session)`: the session was migrated to another hub, see `smqrt.smq.session_migration`."""
    onvanish: Callable[[BrokerPeer], object] | None = None
    """`(phantom)`: a client of another node that was passed to a hook has disconnected."""
    onpublish: Callable[[bytes, int, int, BrokerPeer], bytes | Deferred[bytes] | None] | None = None
    """`(batch, tid, ptid, peer)` returns the frames of the batch to deliver, once per batch."""
    ondrop: Callable[[bytes, int, int, BrokerPeer], object] | None = None
    """`(batch, tid, ptid, peer)` for messages without a subscriber."""
    onnode: Callable[[int, str, str], object] | None = None
    """`(number, event, why)`: another node of the cluster has "joined", is "lost", is "back", or has "left"."""
    onmqttgap: Callable[[str | None, int, Any, int | None], object] | None = None
    """`(client_id, count, client, node)`: messages of an MQTT session were lost; the client is None without a
    connection. Or messages that were kept for another node: then only `count` and the number of the node are given."""
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

    def record(self, batch: bytes) -> None:
        """Record a batch, in the order of the calls."""

    def record_large(self, batch: bytes | memoryview) -> None:
        """Record a batch of many kilobytes, see `record`. A memoryview is not used after the call."""

    def record_of(self, peer: BrokerPeer) -> Callable[[bytes], None]:
        """Return the function that records the batches of a client, see `record`."""

    def record_unrouted(self, batch: bytes) -> None:
        """Record a batch without a subscriber."""

    def record_assembled(self, deliver: Callable[[bytes], bool | None], batch: bytes) -> bool:
        """Call `deliver(batch)`, and mark the recorded messages as assembled from PubFrag packets."""

    def skipped(self, batch: bytes) -> None:
        """Count the messages of a batch that was not selected."""

    def hold(self, publisher: BrokerPeer) -> bool:
        """Resume the outbox of `publisher` once the recorder is not full; return true."""

    @property
    def is_buffered(self) -> bool:
        """Whether `record` only appends, and the messages are written later."""

    @property
    def waits_for_disk(self) -> bool:
        """Whether messages reach subscribers only after they are written; `send_later` then delivers them."""

    def send_later(self, deliver: Callable[[bytes], bool | None], batch: bytes, publisher: BrokerPeer) -> bool:
        """Deliver a batch once it is written; return whether `publisher` has to wait until its outbox is resumed."""

    def left(self, client: BrokerPeer) -> None:
        """Record that a client has disconnected; its recorded messages are still written with its name."""


@dataclass(slots=True)
class Stats:
    """Counters of one broker. Every lost message is counted.

    Attributes:
        connects: accepted clients.
        refusals: rejected clients.
        closes: accepted clients that disconnected.
        denied: names that a hook of the application denied.
        subscriptions: the current number, without those of ETIDs.
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


TakeSession = Callable[[str, str | None, bool], Deferred[bool] | bool]


class ClusterMqtt(Protocol):
    """The part of a cluster that concerns filters and MQTT clients, as the broker calls it."""

    def filter_changed(self, text: str) -> None:
        """Announce a filter, or a shared subscription, that clients or the application have now, or no longer.

        It is also called when a client of a shared subscription connects or disconnects.
        """

    def wants(self, name: bytes) -> bool:
        """Return whether another node wants messages to a topic that does not exist here."""

    @property
    def retained_changed(self) -> Callable[[bytes], object]:
        """Called with a topic whose retained message was set or deleted by a client of this hub."""

    @property
    def take_session(self) -> TakeSession:
        """Called with client id, user, and whether the session is to be new: takes the session from another node.

        Returns true when the client may connect, now or later; false when the session belongs to another user.
        """

    @property
    def session_connected(self) -> Callable[[Any], object]:
        """Called with the session of a client that is accepted, before it gets messages."""

    @property
    def is_doubtful(self) -> Callable[[str], bool]:
        """Returns whether the session of a client id is new because a node was lost that may have the former one."""

    def send_large(self, topic: Topic, batch: Any) -> tuple[int, int]:
        """Send a message that does not fit an SMQ packet; return the numbers of nodes that get it, and miss it."""

    @property
    def kept_bytes(self) -> int:
        """The memory of messages with QoS 1 and 2 that other nodes have not acknowledged, approximately."""

    def must_wait(self, publisher: BrokerPeer) -> bool:
        """Return whether a publisher with QoS 1 or 2 has to wait for full links; it is resumed then."""

    def send_to_group(self, text: str, name: bytes, batch: bytes) -> bool:
        """Send a batch to a node with a connected client of a shared subscription; return whether there is one."""

    def has_groups(self, name: bytes) -> bool:
        """Return whether other nodes have shared subscriptions that match a topic."""

    def send_to_groups(
        self, name: bytes, batch: bytes, own: Collection[str], leaves_own: bool = False
    ) -> Iterator[None]:
        """Send a batch of this hub to one client of each shared subscription of other nodes, in portions.

        Args:
            name: the name of the topic.
            batch: the messages.
            own: shared subscriptions that are left out.
            leaves_own: whether those that this hub has then are left out, too.
        """

    def forward_to_group(self, text: str, name: bytes, batch: bytes) -> None:
        """Send a batch on, which another node has sent for a shared subscription that this hub does not have."""


class ClusterHooks(Protocol):
    """Cluster membership of a broker, as the broker calls it."""

    @property
    def mqtt(self) -> ClusterMqtt:
        """The part that concerns filters and MQTT clients."""

    def forwarded(self, route: Route | None, topic: Topic | None, tid: int, ptid: int) -> Route | None:
        """Return `route` extended by the nodes that have subscribers of `tid`; None without any subscriber."""

    def missed(self, tid: int, messages: int) -> bool:
        """Count messages that only lost nodes have subscribed to; return whether there are such nodes."""

    def with_link_backpressure(self, route: Route, found: Route, peer: BrokerPeer) -> Route:
        """Return `route` with backpressure of full links for `peer`, if `found`, its innermost route, uses links."""

    def handles(self, topic: Topic, frame: bytes, origin: object) -> bool:
        """Return whether the server of this node handles a message of a topic with `once`; otherwise forward it.

        `origin` is the node that published it, None for this one.
        """

    def handles_once(self, topic: Topic, number: int) -> None:
        """Announce that this server handles `topic` with `once` under the ETID `number`; 0 ends that."""

    def pressed(self, key: bytes, presses: bool) -> None:
        """Begin or end backpressure at other nodes, for a topic whose subscribers here have full queues."""

    def subscribed(self, topic: Topic) -> None:
        """Announce one more subscriber of a topic at this node."""

    def unsubscribed(self, topic: Topic) -> None:
        """Announce one fewer subscriber of a topic at this node."""

    def observed(self, topic: Topic) -> None:
        """Announce that a named topic is observed at this node."""

    def entered(self, client: BrokerClient) -> None:
        """Announce an accepted client."""

    def left(self, client: BrokerClient) -> None:
        """Announce that a client has disconnected."""

    def holder(self, uid: bytes) -> BrokerPeer | None:
        """Return the client of another node with this uid."""

    def phantom(self, etid: int) -> BrokerPeer | None:
        """Return the client, or the server, of another node with this ETID."""

    leave: Callable[[], object]
    """Leave the cluster."""
    suspend: Callable[[], object]
    """Leave the cluster during a migration to another process; `stay` rejoins if it fails."""

    @property
    def number(self) -> int:
        """Number of this node."""

    @property
    def others(self) -> frozenset[int]:
        """Numbers of the other nodes that have sent their subscriptions."""

    def pause(self) -> None:
        """Request that the other nodes hold back messages, before a migration to another process; see `is_paused`."""

    @property
    def is_paused(self) -> bool:
        """Whether all nodes that received the request hold back their messages."""

    def stay(self) -> None:
        """Rejoin after `suspend`: the clients stay in this process."""

    @property
    def awaits_clients(self) -> bool:
        """Whether clients of another process's broker are about to be migrated here."""

    def succeed(self, number: int) -> None:
        """Continue as the node `number`, whose clients are here now; `resync` follows."""

    def resync(self) -> None:
        """Send the other nodes the clients that were migrated here."""

    @property
    def phantoms(self) -> Mapping[int, BrokerPeer]:
        """Clients of other nodes, by ETID."""

    def peers_elsewhere(self) -> Iterator[BrokerPeer]:
        """Return the clients of other nodes.

        Of clients with the same uid only the newest is returned, because the loss of a node is detected late.
        """

    def end_all(self, text: bytes | None) -> None:
        """Disconnect the clients of all nodes."""

    def end_client(self, etid: int, text: bytes | None) -> bool:
        """Disconnect a client of another node; return whether there is one with this ETID."""


class ServerPeer(BrokerPeer, Protocol):
    """The server's own client, as routes use it; see `smqrt.broker.server_client.ServerClient`.

    Attributes:
        topic: topic of its ETID.
        once: ETIDs to which other nodes send the messages that this server handles, by id of a topic subscribed with
            `once`.
        behind: whether received messages wait for handlers; publishers to the server then wait.
    """

    topic: Topic
    topics: dict[int, Topic]
    once: dict[int, Topic]
    behind: bool

    def hold(self, peer: BrokerPeer) -> bool:
        """Resume the outbox of `peer` when all received messages are handled; return whether `peer` has to wait."""


class BrokerTrace(Protocol):
    """Trace of one client or topic, as the broker notifies it (see `smqrt.broker.routes`).

    Attributes:
        topic: name of the traced topic; None when a client is traced.
    """

    topic: bytes | None

    def is_about(self, peer: BrokerPeer) -> bool:
        """Whether `peer` is the traced client."""

    def add(self, event: str, **fields: object) -> None:
        """Add an event, or count it as missed when too many wait."""

    def packet(self, client: BrokerPeer, packet: bytes) -> None:
        """Record a packet other than Publish."""

    def connected(self, client: BrokerPeer) -> None:
        """Record that a client was accepted."""

    def ended(self, client: BrokerPeer, reason: CloseReason, detail: str) -> None:
        """Record that a connection was closed."""

    def published(self, peer: BrokerPeer, batch: bytes, topic: Topic | None) -> None:
        """Record a batch that a client, or the server, published to one destination."""


class BrokerState:
    """State that the clients of one broker share.

    Args:
        hooks: the extension points.
        random_u32: returns random 32-bit numbers.
        encode: the WebSocket encoder for batches.
        store: saves names across restarts, or None.
        clock: monotonic seconds.
        limits: limits of names, subscriptions and connections.
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
        self.topic_table.clients = self.sessions
        self.uids: dict[bytes, BrokerClient] = {}
        self.staying: dict[int, BrokerClient] = {}
        """Clients that the old process of a hot restart serves until it closes them; other nodes send to them through
        this process.
        """
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
        self.devices: Any = None
        """The MQTT clients, see `smqrt.broker.mqtt.devices`; None without the option `mqtt`."""
        self.handler_filters: Any = None
        """Filters of the application, see `smqrt.broker.handler_filters`; None without any."""
        self.traces: tuple[BrokerTrace, ...] = ()
        self._denials = LineLimit()
        self.address_of: Callable[[BrokerPeer], str] = lambda client: ""
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
            self.on_changed(topic)  # the ETID has its subscriber now
        if self.cluster is not None:
            self.cluster.entered(client)

    def register(self, client: BrokerClient) -> None:
        """Put a client that was accepted, here or by another process, into the tables."""
        self.sessions[client.etid] = self.uids[client.uid] = client
        if client.identity is not None:
            self.users[client.identity.user] += 1

    def remove_client(self, client: BrokerClient, reason: CloseReason) -> None:
        """Remove a client whose connection was closed, and the topic of its ETID."""
        self.stats.closes += 1
        if self.hooks.onclose:  # before `deregister`, so that the hook finds the client in the tables
            try:
                self.hooks.onclose(client, reason)
            except Exception:  # the tables must be updated even if the hook fails
                log.exception("error in onclose")
        if self.recorder:
            self.recorder.left(client)
        if self.on_changed is not None:
            self.topic_table.get(client.etid)  # creates the topic, which `on_changed` gets when the client is released
        self.deregister(client)
        if client.topic is not None:
            client.topic.discard(client.inbox)
        self.topic_table.remove(client.etid)

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

    def release_client(self, client: BrokerClient) -> None:
        """Free the ETID of a removed client, once its observers are notified."""
        self._logged_s.pop(client, None)
        topic = client.topic
        if topic is not None:
            self.notify_observers_later(topic)
        if topic is None or not topic.observers:  # otherwise `_notify_observers` releases it
            self.topic_table.release(client.etid)

    def subscribed(self, topic: Topic, outbox: Outbox) -> None:
        """Subscribe `outbox` to `topic` and notify the observers."""
        topic.add(outbox)
        self.stats.subscriptions += 1
        self.notify_observers_later(topic)
        if self.cluster is not None:
            self.cluster.subscribed(topic)

    def send_last_values(self, topic: Topic, outbox: Outbox) -> None:
        """Send a new subscriber the last values of `topic`, before any message that is published later."""
        batch = self.last_values.initial_frames(topic) if self.last_values is not None else b""
        if not batch and self.devices is not None and outbox is not self.devices:
            batch = self.devices.retained.frame(topic)
        if batch:
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
        self.topic_table.remove(topic.id)
        for outbox in topic.raw:
            topic.discard(outbox)
        self.notify_observers_later(topic)
        if not topic.observers:
            self.topic_table.release(topic.id)

    def add_observer(self, topic: Topic, observer: Observer) -> None:
        """Notify `observer` of later changes of the number of subscribers."""
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
            if topic.name is None:  # the last notification about an ETID
                topic.unobserve_all()
                self.topic_table.release(topic.id)

    # ---- accounting

    def log(self, peer: BrokerPeer | None, text: str) -> None:
        """Call the log hook."""
        if self.hooks.log:
            self.hooks.log(peer, text)

    def refuse(self, peer: BrokerPeer | None, limit: Limit, address: str = "") -> None:
        """Count that a limit was reached; log it at most once a second for each limit.

        Args:
            peer: the client; None before it has sent Connect.
            limit: the limit.
            address: the address of a client that has not sent Connect.
        """
        self.stats.refused[limit] += 1
        client = f"a client of {address}" if address else "a client" if peer is None else describe_client(peer)
        limit.refused(client)
        now_s = self.clock()
        if now_s - self._refused_s.get(limit, -LOG_INTERVAL_S) >= LOG_INTERVAL_S:
            self._refused_s[limit] = now_s
            self.log(peer, f"{limit.sentence(client)}; {self.stats.refused[limit]} times so far")

    def count_denial(self, peer: BrokerPeer, what: str, kind: str, name: bytes) -> None:
        """Count that a hook of the application denied a client a name; log it at most once a second."""
        self.stats.denied += 1
        hook = {"topic": "permittop", "topic filter": "permitfilter"}.get(kind, "permitsubtop")
        self.log_denial(peer, what, kind, name, f"{hook} of the hub returned false")

    def log_denial(self, peer: BrokerPeer, what: str, kind: str, name: bytes, why: str) -> None:
        """Log that a client may not do something with a name, at most once a second.

        Args:
            peer: the client.
            what: the action, such as "subscribe to".
            kind: what the name is: "topic", "topic filter" or "sub-topic".
            name: the name.
            why: the rule that denies it.
        """
        address = self.address_of(peer)
        client = f"{describe_client(peer)} of {address}" if address else describe_client(peer)
        name_shown = ascii(name[:128])[1:]  # without the b of b'…'
        self._denials.warn(f"denied: {client} may not {what} the {kind} {name_shown}: {why}")

    def overflowed(self, peer: BrokerPeer, reason: Drop, messages: int) -> None:
        """Count dropped copies of messages for a slow client; log it at most once a second per client."""
        self.stats.drop(reason, messages)
        now_s = self.clock()
        if now_s - self._logged_s.get(peer, -LOG_INTERVAL_S) >= LOG_INTERVAL_S:
            self._logged_s[peer] = now_s
            self.log(peer, f"slow consumer: {peer.outbox.dropped} messages dropped so far ({reason.value})")


def describe_client(peer: BrokerPeer) -> str:
    """Return the description of a client in log lines; its uid is escaped and shortened."""
    return f"the client {ascii(peer.uid[:64])[1:]}"
