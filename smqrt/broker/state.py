"""State that the clients of one broker share: its tables and counters, and its extension points: the hooks, the
recorder of a journal, and what both see of a client.
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
from smqrt.broker.outbox import Drop, Outbox, run_in_background
from smqrt.broker.slow import SlowPolicies
from smqrt.broker.topics import OF_HUBS, HubLimits, NameStore, Observer, PublishLimits, Route, SubTopics, Topic, Topics
from smqrt.errors import CloseReason
from smqrt.settings.limit_register import Limit, LineLimit
from smqrt.wire.smq import measure_frames

log = logging.getLogger("smqrt")

LOG_INTERVAL_S = 1.0
"""A slow client's drops are logged at most this often, and that a limit was reached."""


class BrokerPeer(Protocol):
    """Whoever publishes and subscribes at a broker, as hooks see it: a client's session, or the server's own client.

    Attributes:
        etid: its ephemeral topic id; 0 before a client is accepted.
        uid, info: what a client said of itself.
        identity: who it is; None when nobody asks, and for the server's own client.
        topics: the topics it subscribes to, by id; None for none.
        outbox: its way out.
        extra: for the layer above.
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
    """A client's session, as hooks see it.

    Attributes:
        seed: the u32 that it was sent in Init.
        origin: what the layer above knows of the request that opened the connection.
        closed: whether it has ended.
    """

    seed: int
    origin: Any

    @property
    def closed(self) -> bool: ...

    def disconnect(self, reason: CloseReason, text: bytes | None = None) -> None:
        """End the connection; `text` goes out in a Disconnect packet first."""
        ...

    def forget_routes(self) -> None:
        """Look every destination up again when it is used next."""
        ...


Verdict = tuple[int, bytes]
"""What `authenticate` answers: 0 accepts, 1 to 6 refuse; and a text for the client."""


@dataclass(slots=True)
class Hooks:
    """Every extension point of a broker (spec: smq §2.2). An unset hook costs nothing.

    A hook may answer with `Deferred`; the client's input waits meanwhile. A hook does not raise: the bindings (Python,
    Lua) catch and log what the application's function raises, and answer in its place.
    """

    authenticate: Callable[[bytes, BrokerClient], Verdict | Deferred[Verdict]] | None = None
    """`(credentials, session)` gives `(code, text)`: 0 accepts, 1 to 6 refuse."""
    has_logins: bool = False
    """Whether `authenticate` asks for a login of the server first."""
    permittop: Callable[[bytes, bool, BrokerClient], object] | None = None
    """`(topic, issub, session)` gives whether the client may subscribe (or create)."""
    permitsubtop: Callable[[bytes, BrokerClient], object] | None = None
    """`(subtopic, session)` gives whether the client may create a new sub-topic."""
    onconnect: Callable[[BrokerClient], object] | None = None
    """`(session)`, after Connack."""
    onclose: Callable[[BrokerClient, CloseReason], object] | None = None
    """`(session, reason)` for every ended connection that had been accepted."""
    onmoved: Callable[[BrokerClient], object] | None = None
    """`(session)`: the client goes on at another hub, see `smqrt.smq.session_migration`."""
    onvanish: Callable[[BrokerPeer], object] | None = None
    """`(phantom)`: a client of another node, which a hook has seen, is gone."""
    onpublish: Callable[[bytes, int, int, BrokerPeer], bytes | Deferred[bytes] | None] | None = None
    """`(batch, tid, ptid, peer)` gives the frames of the batch that may pass, once per batch."""
    ondrop: Callable[[bytes, int, int, BrokerPeer], object] | None = None
    """`(batch, tid, ptid, peer)` for messages that nobody received."""
    onnode: Callable[[int, str, str], object] | None = None
    """`(number, event, why)`: another node of the cluster has "joined", is "lost", is "back", or has "left"."""
    log: Callable[[BrokerPeer | None, str], object] | None = None
    """`(peer, text)` for what an operator may want to know; None when it is about nobody in particular."""


class Recorder(Protocol):
    """Keeps what is published: the broker's side of a journal.

    Attributes:
        full: it can take no more for now; publishers have to wait.
    """

    full: bool

    def selects(self, topic: Topic | None) -> bool:
        """Whether messages to `topic` are recorded; None is a number that belongs to nobody."""
        ...

    def record(self, batch: bytes) -> None:
        """Keep a batch, in the order of the calls."""
        ...

    def record_large(self, batch: bytes | memoryview) -> None:
        """As `record`, for batches of many kilobytes; of a memoryview nothing is used afterwards."""
        ...

    def record_unrouted(self, batch: bytes) -> None:
        """Keep a batch that nobody receives."""
        ...

    def record_assembled(self, deliver: Callable[[bytes], bool | None], batch: bytes) -> bool:
        """Call `deliver(batch)`; what it records was assembled from PubFrag packets."""
        ...

    def skipped(self, batch: bytes) -> None:
        """Count the messages of a batch that was not selected."""
        ...

    def hold(self, publisher: BrokerPeer) -> bool:
        """Let the outbox of `publisher` resume once there is room again; gives true."""
        ...

    @property
    def waits_for_disk(self) -> bool:
        """Nobody receives a message before the disk has it: `send_later` delivers what is recorded."""

    def send_later(self, deliver: Callable[[bytes], bool | None], batch: bytes, publisher: BrokerPeer) -> bool:
        """Deliver a batch when the disk has it, and let the outbox of `publisher` resume then; gives whether it waits."""
        ...

    def left(self, client: BrokerPeer) -> None:
        """A client is gone; what it published is still to be written with its name."""
        ...


@dataclass(slots=True)
class Stats:
    """The counters of one broker: nothing is lost without being counted.

    Attributes:
        connects: clients that were let in; refusals: those that were not; closes: of those let in.
        denied: names that the application did not allow a client.
        subscriptions: how many there are at the moment, without those of ETIDs.
        ends: of all connections, by reason, also of those not let in.
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
    """A hub's part in a cluster, as the broker calls it."""

    def forwarded(self, route: Route | None, topic: Topic | None, tid: int, ptid: int) -> Route | None:
        """Where messages of `ptid` to `tid` go: `route`, of this hub, and to other nodes; None when nobody is there."""
        ...

    def missed(self, tid: int, messages: int) -> bool:
        """Count messages that nobody receives for nodes that are lost and wanted them; whether there are some."""
        ...

    def paced(self, route: Route, found: Route, peer: BrokerPeer) -> Route:
        """`route` as one on which `peer` waits for full links, when `found`, its end, leads over some."""
        ...

    def handles(self, topic: Topic, frame: bytes, origin: object) -> bool:
        """Whether the server of this node handles a message that one of the cluster is to; it is sent there otherwise.
        `origin` is the node that it came from, None for this one.
        """
        ...

    def handles_once(self, topic: Topic, number: int) -> None:
        """The server handles a topic once in the cluster: what is for it comes to `number`; 0 for no more."""
        ...

    def pressed(self, key: bytes, presses: bool) -> None:
        """Clients of this hub have too much of a topic, or have no more: publishers elsewhere have to wait."""
        ...

    def subscribed(self, topic: Topic) -> None:
        """A topic has one subscriber more."""
        ...

    def unsubscribed(self, topic: Topic) -> None:
        """A topic has one subscriber less."""
        ...

    def observed(self, topic: Topic) -> None:
        """Somebody observes a topic with a name."""
        ...

    def entered(self, client: BrokerClient) -> None:
        """A client was let in."""
        ...

    def left(self, client: BrokerClient) -> None:
        """A client is gone."""
        ...

    def holder(self, uid: bytes) -> BrokerPeer | None:
        """The client of another node that has this uid."""
        ...

    def phantom(self, etid: int) -> BrokerPeer | None:
        """The client of another node, or the server there, that has this ETID."""
        ...

    leave: Callable[[], object]
    """Take the hub out of the cluster."""
    suspend: Callable[[], object]
    """Leave the other nodes, as long as it is not known whether the clients stay here."""

    @property
    def number(self) -> int:
        """Of the node."""
        ...

    @property
    def others(self) -> frozenset[int]:
        """The numbers of the other nodes that have said what they want."""
        ...

    def pause(self) -> None:
        """The hub is about to move to another process: have the other nodes keep what is for it, see `is_paused`."""
        ...

    @property
    def is_paused(self) -> bool:
        """Whether all that were asked do so: nothing comes any more."""
        ...

    def stay(self) -> None:
        """The clients stay here after all: be back."""
        ...

    @property
    def awaits_clients(self) -> bool:
        """Whether those of another process's hub are to come here."""
        ...

    def succeed(self, number: int) -> None:
        """This hub goes on for that of the node of this number, whose clients are here; `resync` follows."""
        ...

    def resync(self) -> None:
        """Clients of another hub go on here: tell the other nodes of them."""
        ...

    @property
    def phantoms(self) -> Mapping[int, BrokerPeer]:
        """The clients of other nodes, by ETID."""
        ...

    def peers_elsewhere(self) -> Iterator[BrokerPeer]:
        """The clients of other nodes; of several with one uid only the newest, also when a lost node is not noticed
        yet.
        """
        ...

    def end_all(self, text: bytes | None) -> None:
        """End the clients of all nodes."""
        ...

    def end_client(self, etid: int, text: bytes | None) -> bool:
        """End a client of another node; whether there is one with this ETID."""
        ...


class ServerPeer(BrokerPeer, Protocol):
    """The server's own client, as routes see it.

    Attributes:
        topic: its own ETID's.
        once: by the id of each topic that one server of the cluster handles, where what is for this one comes.
        behind: whether its handlers have not got all messages yet: who publishes to them has to wait.
    """

    topic: Topic
    topics: dict[int, Topic]
    once: dict[int, Topic]
    behind: bool

    def hold(self, peer: BrokerPeer) -> bool:
        """Let the outbox of `peer` resume when the handlers are no longer behind; gives whether it has to wait."""
        ...


class BrokerTrace(Protocol):
    """Trace of one client or topic, as the broker notifies it (see `smqrt.broker.trace`).

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
    """What the clients of one broker share.

    Args:
        hooks: the extension points.
        random_u32: gives random 32-bit numbers.
        encode: the WebSocket encoder for batches.
        store: keeps names over restarts, or None.
        clock: monotonic seconds.
        limits: how many names clients may make it keep.
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
        """Those that the process before this one keeps until it closes them; other nodes reach them through this."""
        self.recorder: Recorder | None = None
        self.last_values: LastValues | None = None
        self.cluster: ClusterHooks | None = None
        self.slow: SlowPolicies | None = None
        self.publish_limits: PublishLimits | None = None
        self.users: Counter[str] = Counter()
        """Clients that are connected, by user."""
        self.measure: Callable[[bytes | memoryview], tuple[int, int]] = measure_frames
        self.call_later: Callable[[float, Callable[[], object]], object] = lambda delay_s, function: function()
        self.limit_chunks: Callable[[BrokerClient, int], None] = lambda session, size_bytes: None
        self.traces: tuple[BrokerTrace, ...] = ()
        self._denials = LineLimit()
        self.on_end: Callable[[Any, CloseReason, str], None] = lambda session, reason, detail: None
        self.on_changed: Callable[[Topic], object] | None = None
        """Called when a topic, or an ETID, has one subscriber more or less."""
        self.closed = False
        self.draining = False  # nobody new is let in
        self._logged_s: dict[BrokerPeer, float] = {}
        self._changed: dict[Topic, None] = {}
        self._refused_s: dict[Limit, float] = {}

    # ---- clients come and go

    def add(self, client: BrokerClient) -> None:
        """Count and list a client that was accepted."""
        self.list(client)
        self.stats.connects += 1
        if self.on_changed is not None and (topic := self.topic_table.get(client.etid)) is not None:
            self.on_changed(topic)
        if self.cluster is not None:
            self.cluster.entered(client)

    def list(self, client: BrokerClient) -> None:
        """List a client that was accepted, here or by another process."""
        self.sessions[client.etid] = self.uids[client.uid] = client
        if client.identity is not None:
            self.users[client.identity.user] += 1

    def remove(self, client: BrokerClient, topic: Topic, reason: CloseReason) -> None:
        """Take out a client whose connection ended, and the `topic` of its ETID."""
        self.stats.closes += 1
        if self.hooks.onclose:
            try:
                self.hooks.onclose(client, reason)
            except Exception:  # the client has to go all the same
                log.exception("error in onclose")
        if self.recorder:
            self.recorder.left(client)
        self.unlist(client)
        topic.discard(client.outbox)
        self.topic_table.remove(topic)

    def unlist(self, client: BrokerClient) -> None:
        """Take back `list`."""
        del self.sessions[client.etid]
        if self.cluster is not None:
            self.cluster.left(client)
        if client.identity is not None:
            user = client.identity.user
            self.users[user] -= 1
            if not self.users[user]:
                del self.users[user]
        if self.uids.get(client.uid) is client:
            del self.uids[client.uid]

    def release(self, client: BrokerClient, topic: Topic) -> None:
        """A client that was removed is out of every table: let its ETID be drawn again, once its observers know."""
        self._logged_s.pop(client, None)
        self.changed_count(topic)
        if not topic.observers:
            self.topic_table.release(topic)

    def subscribed(self, topic: Topic, outbox: Outbox) -> None:
        """Let `outbox` receive `topic`; observers are told."""
        topic.add(outbox)
        self.stats.subscriptions += 1
        self.changed_count(topic)
        if self.cluster is not None:
            self.cluster.subscribed(topic)

    def greet(self, topic: Topic, outbox: Outbox) -> None:
        """Give a new subscriber the last values of `topic`, before anything that is published from now on."""
        if self.last_values is not None and (batch := self.last_values.greeting(topic)):
            outbox.put(topic.encode(batch) if outbox.websocket else batch)

    def unsubscribed(self, topic: Topic, outbox: Outbox) -> None:
        """Take `outbox` out of `topic`; observers are told."""
        topic.discard(outbox)
        self.stats.subscriptions -= 1
        self.changed_count(topic)
        if self.cluster is not None:
            self.cluster.unsubscribed(topic)

    def gone(self, topic: Topic) -> None:
        """The ETID of a client of another node is no longer anybody's: its observers are told."""
        topic.forget_routes()
        self.topic_table.remove(topic)
        for outbox in topic.raw:
            topic.discard(outbox)
        self.changed_count(topic)
        if not topic.observers:
            self.topic_table.release(topic)

    def add_observer(self, topic: Topic, observer: Observer) -> None:
        """Let `observer` be told of every change from the present number of subscribers on."""
        topic.observe(observer)
        if self.cluster is not None and topic.name is not None:
            self.cluster.observed(topic)

    def changed_count(self, topic: Topic) -> None:
        """Have the observers told once per turn, however often the number changes in it."""
        if self.on_changed is not None:
            self.on_changed(topic)
        if topic.observers:
            if not self._changed:
                run_in_background(self._tell())
            self._changed[topic] = None

    def _tell(self) -> Iterator[None]:
        changed, self._changed = self._changed, {}
        for topic in changed:
            for observer in list(topic.observers):
                topic.tell(observer)
                yield
            if topic.name is None:
                topic.unobserve_all()
                self.topic_table.release(topic)

    # ---- accounting

    def log(self, peer: BrokerPeer | None, text: str) -> None:
        """Tell the operator's log hook."""
        if self.hooks.log:
            self.hooks.log(peer, text)

    def refuse(self, peer: BrokerPeer | None, limit: Limit) -> None:
        """Count that a limit was reached; say so in the log, at most once a second for each limit."""
        self.stats.refused[limit] += 1
        who = "a client" if peer is None else f"the client {ascii(peer.uid[:64])[1:]}"
        limit.refused(who)
        now_s = self.clock()
        if now_s - self._refused_s.get(limit, -LOG_INTERVAL_S) >= LOG_INTERVAL_S:
            self._refused_s[limit] = now_s
            self.log(peer, f"{limit.sentence(who)}; {self.stats.refused[limit]} times so far")

    def denied(self, peer: BrokerPeer, what: str, kind: str, name: bytes) -> None:
        """Count that the application denied a client a name; say so in the log, at most once a second."""
        self.stats.denied += 1
        hook = "permittop" if kind == "topic" else "permitsubtop"
        who = f"the client {ascii(peer.uid[:64])[1:]}"
        self._denials.warn(
            f"denied: {who} may not {what} the {kind} {ascii(name[:128])[1:]}: {hook} of the hub said no"
        )

    def overflowed(self, peer: BrokerPeer, reason: Drop, messages: int) -> None:
        """Count copies that a slow client did not get; log it at most once a second per client."""
        self.stats.drop(reason, messages)
        now_s = self.clock()
        if now_s - self._logged_s.get(peer, -LOG_INTERVAL_S) >= LOG_INTERVAL_S:
            self._logged_s[peer] = now_s
            self.log(peer, f"slow consumer: {peer.outbox.dropped} messages dropped so far ({reason.value})")
