"""Topics: ids, names, subscribers and observers, and the limits of clients.

Topic ids and ETIDs share one number space; sub-topic ids have another. Ids are random, not zero, and kept for the
lifetime of the broker (spec: smq §12.6). In a cluster the ids of topics are derived from their names, and ETIDs contain
the number of the node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Protocol

from smqrt.broker.deferred import Deferred
from smqrt.broker.outbox import BLOCKED, EMPTY_QUEUE, FLUSHED_AT_ONCE, Outbox, dirty
from smqrt.settings.limits import Limit
from smqrt.wire.smq import LOCAL_BITS, LOCAL_MASK, MAX_PAYLOAD_BYTES, SERVER_LOCAL, TOPIC_BIT, NameNumbers


class Route(Protocol):
    """Destination of batches. Both methods return true when the publisher has to wait."""

    def deliver(self, batch: bytes) -> bool | None:
        """Deliver a batch of Publish frames."""

    def deliver_view(self, view: memoryview) -> bool | None:
        """Deliver a large batch whose memory is reused after the call."""


class Observer(Protocol):
    """Receiver of notifications about a topic's number of subscribers."""

    def changed(self, topic: Topic, subscribers: int) -> None:
        """Handle a change of the number of `subscribers` of `topic`."""


class ForwardedMessages(Protocol):
    """Counter of messages that were delivered without `Topic.deliver` (`smq/forwarder.py`).

    Attributes:
        number: identifies it.
        routes: number of routes that use it.
    """

    number: int
    routes: int

    def take(self) -> tuple[int, int]:
        """Return the number of messages and of bytes since the last call."""

    def release(self) -> None:
        """Free the counter."""


class RouteCache(Protocol):
    """Cache of routes: a session."""

    def forget_route(self, destination: bytes) -> None:
        """Remove the route to a topic, given by its key."""


@dataclass(slots=True)
class Traffic:
    """Traffic counters of one broker.

    Attributes:
        messages, bytes: published here, with or without subscribers; bytes include the headers.
        arrived: messages that were published at other nodes of a cluster.
        copies, copied_bytes: put into the queues of subscribers, including those dropped later.
    """

    messages: int = 0
    bytes: int = 0
    copies: int = 0
    copied_bytes: int = 0
    arrived: int = 0

    def add(self, messages: int, size: int, copies: int) -> None:
        """Count messages of `size` bytes together, each for `copies` subscribers."""
        self.messages += messages
        self.bytes += size
        self.copies += messages * copies
        self.copied_bytes += size * copies


_NO_OBSERVERS: dict[Observer, int] = {}
"""Shared by topics without observers, which most are; never written to."""


class OtherNodes:
    """What other nodes of a cluster have to do with a topic.

    Attributes:
        elsewhere: number of subscribers at other nodes; counted only while the topic is observed.
        arrived, arrived_bytes: the deliveries since the last `Topic.count` that other nodes published.
        leads_away: whether all subscribers are at other nodes.
    """

    __slots__ = ("arrived", "arrived_bytes", "elsewhere", "leads_away")

    def __init__(self) -> None:
        self.elsewhere = self.arrived = self.arrived_bytes = 0
        self.leads_away = False


_NO_OTHER_NODES = OtherNodes()
"""Shared by topics that concern no other node; never written to."""


class Topic:
    """Destination of messages: a named topic, or the ETID of one client (`name` is None).

    Adding and removing a subscriber takes constant time: `_members` is authoritative, and the tuples that `deliver`
    loops over are built from it when a publisher resolves its route (`settle`). A topic with one subscriber, such as an
    ETID, has only the tuples, which saves 200 bytes per client.

    Attributes:
        raw, ws: subscribers on raw sockets and on WebSockets; valid after `settle`.
        cached: sessions whose route cache contains this topic; they remove it when subscribers change.
        forwarded: counter of messages that `deliver` does not see; None without any.
        observers: the number of subscribers in the last notification, by observer.
        messages, bytes: delivered since the last `count`.
        total: messages that clients of this node published to it and that were delivered, until the last `count`.
        nodes: what other nodes have to do with it, to be read; `for_nodes` returns an object that may be changed.
    """

    __slots__ = (
        "_members",
        "_settled",
        "_table",
        "bytes",
        "cached",
        "forwarded",
        "id",
        "key",
        "messages",
        "name",
        "nodes",
        "observers",
        "raw",
        "total",
        "ws",
    )

    def __init__(self, number: int, name: bytes | None, table: Topics) -> None:
        self.id = number
        self.key = number.to_bytes(4, "big")
        self.name = name
        self._table = table
        self.messages = self.bytes = self.total = 0
        self.nodes = _NO_OTHER_NODES
        self.raw: tuple[Outbox, ...] = ()
        self.ws: tuple[Outbox, ...] = ()
        self.observers: dict[Observer, int] = _NO_OBSERVERS
        self.cached: set[RouteCache] | None = None
        self.forwarded: ForwardedMessages | None = None
        self._members: dict[Outbox, None] | None = None  # a dict: ordered, and removal takes constant time
        self._settled = True  # whether `raw` and `ws` agree with `_members`

    @property
    def encode(self) -> Callable[[bytes], bytes]:
        """The WebSocket encoder for batches."""
        return self._table.encode

    def for_nodes(self) -> OtherNodes:
        """Return `nodes`, to be changed."""
        if self.nodes is _NO_OTHER_NODES:
            self.nodes = OtherNodes()
        return self.nodes

    @property
    def subscribers(self) -> int:
        """Number of subscribers of this broker, including the server's own client."""
        return len(self.raw) + len(self.ws) if self._members is None else len(self._members)

    @property
    def is_delivered(self) -> bool:
        """Whether there is a subscriber, here or at another node; valid after `settle`."""
        return bool(self.raw or self.ws or self.nodes.leads_away)

    @property
    def counted(self) -> int:
        """Number of subscribers that observers see, including those at other nodes."""
        represented = self._table.represented
        more = 0 if represented is None else represented(self)
        return self.subscribers + self.nodes.elsewhere + more

    @property
    def sole_raw(self) -> Outbox | None:
        """The subscriber, if there is exactly one and it is not a WebSocket."""
        return self.raw[0] if len(self.raw) == 1 and not self.ws else None

    def add(self, outbox: Outbox) -> None:
        """Add a subscriber."""
        self.forget_routes()  # the connection also caches the sole subscriber
        if self.nodes.leads_away:  # deliveries before this one had no copies at this node
            self.count()
            self.nodes.leads_away = False
        if self._members is None:
            if not self.subscribers:
                self.raw, self.ws = ((), outbox.alone) if outbox.websocket else (outbox.alone, ())
                return
            self._members = dict.fromkeys(self.raw + self.ws)
        self._members[outbox] = None
        self._settled = False

    def discard(self, outbox: Outbox) -> None:
        """Remove a subscriber; an outbox that has not subscribed is ignored."""
        self.forget_routes()
        if self._members is not None:
            self._members.pop(outbox, None)
            self._settled = False
        elif outbox in self.raw or outbox in self.ws:  # without `_members` it is the only one
            self.count()
            self.raw = self.ws = ()

    def forget(self, outboxes: set[Outbox], observers: Set[object]) -> None:
        """Remove many subscribers and observers at once: they were migrated."""
        self.forget_routes()
        members = self.raw + self.ws if self._members is None else self._members
        left = [outbox for outbox in members if outbox not in outboxes]
        self.raw = tuple(outbox for outbox in left if not outbox.websocket)
        self.ws = tuple(outbox for outbox in left if outbox.websocket)
        self._members, self._settled = dict.fromkeys(left) if len(left) > 1 else None, True
        self.observers = {one: count for one, count in self.observers.items() if one not in observers} or _NO_OBSERVERS

    def settle(self) -> None:
        """Rebuild `raw` and `ws` if subscribers have changed. Call it before caching a route."""
        if self._settled or self._members is None:
            return
        self.count()
        self._settled = True
        self.raw = tuple(outbox for outbox in self._members if not outbox.websocket)
        self.ws = tuple(outbox for outbox in self._members if outbox.websocket)
        if len(self._members) < 2:  # the tuples are sufficient, see the class
            self._members = None

    def deliver(self, batch: bytes) -> None:
        """Append `batch` to the queue of every subscriber.

        All raw subscribers share one bytes object, all WebSockets its encoded form.
        """
        self.messages += 1
        self.bytes += len(batch)
        for outbox in self.raw:
            queue = outbox.queue
            if not queue:
                dirty.append(outbox)
                if queue is EMPTY_QUEUE:
                    queue = outbox.queue = []
            queue.append(batch)
            if outbox.life is BLOCKED:
                outbox.held(batch)
        if self.ws:
            batch = self._table.encode(batch)
            for outbox in self.ws:
                outbox.put(batch)

    def deliver_view(self, view: memoryview) -> None:
        """Deliver a large batch from the receive buffer, without a copy while the transports accept it."""
        if len(self.raw) > FLUSHED_AT_ONCE:  # direct sends to many subscribers would take too long for one turn
            self.deliver(bytes(view))
            return
        self.messages += 1
        self.bytes += len(view)
        for outbox in self.raw:
            outbox.put_view(view)
        if self.ws:
            batch = self._table.encode(bytes(view))
            for outbox in self.ws:
                outbox.put(batch)

    def count(self) -> None:
        """Add the deliveries so far to the broker's traffic counters.

        It is called before the number of subscribers changes, so that one addition counts the copies of all of them.
        """
        if self.forwarded is not None:
            self._add_forwarded(self.forwarded)
        if self.messages:
            nodes, traffic = self.nodes, self._table.traffic
            self.total += self.messages - nodes.arrived
            traffic.add(self.messages, self.bytes, 0 if nodes.leads_away else len(self.raw) + len(self.ws))
            self.messages = self.bytes = 0
            if nodes.arrived:  # published at another node, which counts them; only the copies are counted here
                traffic.messages -= nodes.arrived
                traffic.bytes -= nodes.arrived_bytes
                traffic.arrived += nodes.arrived
                nodes.arrived = nodes.arrived_bytes = 0

    def _add_forwarded(self, counter: ForwardedMessages) -> None:
        messages, size = counter.take()
        self.messages += messages
        self.bytes += size

    def end_forwarding(self) -> None:
        """Add the forwarded messages, and free their counter."""
        counter, self.forwarded = self.forwarded, None
        if counter is not None:
            self._add_forwarded(counter)
            counter.release()

    def forget_routes(self) -> None:
        """Remove this topic from all route caches, because its subscribers change."""
        sessions, self.cached = self.cached, None
        for session in sessions or ():
            session.forget_route(self.key)
        if self.forwarded is not None:
            self.end_forwarding()

    def observe(self, observer: Observer) -> None:
        """Notify `observer` of later changes of the number of subscribers."""
        if self.observers is _NO_OBSERVERS:
            self.observers = {}
        self.observers[observer] = self.counted

    def unobserve(self, observer: Observer) -> None:
        """End `observe`; an unknown observer is ignored."""
        self.observers.pop(observer, None)

    def notify(self, observer: Observer) -> None:
        """Notify `observer` of the number of subscribers, unless it is the number of the last notification."""
        count = self.counted
        if self.observers.get(observer, count) != count:
            self.observers[observer] = count
            observer.changed(self, count)

    def unobserve_all(self) -> None:
        """Remove all observers."""
        self.observers = _NO_OBSERVERS


class NameStore(Protocol):
    """Storage of names and their ids across restarts."""

    def load(self, kind: str) -> Iterable[tuple[bytes, int]]:
        """Return all entries of `kind` (`"topic"` or `"subtopic"`)."""

    def add(self, kind: str, name: bytes, number: int) -> None:
        """Start to save `name` with its id `number`."""

    def unsaved(self, kind: str, name: bytes) -> Deferred[None] | None:
        """Return a result that is settled when `name` is saved, or rejected when that fails; None if it is saved."""

    def close(self) -> None:
        """Wait a limited time for the added names to be saved, then close the file."""


class EtidHolder(Protocol):
    """A client, as the topic table uses it.

    Attributes:
        etid: its ETID.
        inbox: gets the messages to its ETID.
        topic: the topic of its ETID; None before it is used.
    """

    etid: int
    topic: Topic | None

    @property
    def inbox(self) -> Outbox: ...


class Topics:
    """Topic table of one broker.

    Args:
        random_u32: returns random 32-bit numbers.
        encode: the WebSocket encoder for batches.
        store: saves topic names across restarts; None keeps them in memory only.

    Attributes:
        encode: see above.
        traffic: the traffic counters of the broker.
        node: this node's number in a cluster, 0 without one; part of new ETIDs.
        clients: the clients of this broker by ETID. Their topics are created when they are used, which saves 300 bytes
            for each client that only receives.
        numbers: derives ids of new topics from their names; None draws them at random.
        named_otherwise: called for a topic whose id differs from the one that `numbers` derives.
        absent: returns the topic of an ETID at another node, by its number, or None.
        passing: topics that only messages of MQTT clients have created; they are removed again, see `remove_named`.
        represented: returns how many more subscribers a topic has than outboxes, since one outbox represents all MQTT
            clients; None without MQTT clients.
        on_named: called for each new topic with a name.
    """

    def __init__(
        self,
        random_u32: Callable[[], int],
        encode: Callable[[bytes], bytes],
        store: NameStore | None = None,
    ) -> None:
        self.node = 0
        self.numbers: NameNumbers | None = None
        self.named_otherwise: Callable[[Topic], object] = lambda topic: None
        self.absent: Callable[[int], Topic | None] = lambda number: None
        self.passing: dict[Topic, None] = {}
        self.represented: Callable[[Topic], int] | None = None
        self.on_named: tuple[Callable[[Topic], object], ...] = ()
        self.clients: Mapping[int, EtidHolder] = {}
        self.by_key: dict[bytes, Topic] = {}
        self.by_name: dict[bytes, Topic] = {}
        self._random_u32 = random_u32
        self.encode = encode
        self._store = store
        self._leaving: set[int] = set()  # removed, but not released
        self.traffic = Traffic()
        self.names_bytes = 0
        for name, number in store.load("topic") if store else ():
            self._insert(number, name)

    def get(self, number: int) -> Topic | None:
        """Return the topic or ETID with the id `number` (u32), of this node or another one."""
        return self.at(number.to_bytes(4, "big"))

    def at(self, key: bytes) -> Topic | None:
        """Return the topic or ETID with this id in its four bytes, see `get`."""
        return self.here(key) or self.absent(int.from_bytes(key, "big"))

    def here(self, key: bytes) -> Topic | None:
        """Return the topic or ETID with this id in its four bytes, of this node."""
        topic = self.by_key.get(key)
        if topic is None and (client := self.clients.get(int.from_bytes(key, "big"))) is not None:
            topic = client.topic = self._insert(client.etid, None)
            topic.add(client.inbox)
        return topic

    def is_taken(self, number: int) -> bool:
        """Return whether a topic or a client has the id `number`, here or at another node."""
        is_here = number in self.clients or number.to_bytes(4, "big") in self.by_key
        return is_here or self.absent(number) is not None

    def named(self, name: bytes, wanted: int = 0) -> Topic:
        """Return the topic `name`; create it if needed, with the id `wanted` if that is free and not 0."""
        topic = self.by_name.get(name)
        if topic is None:
            number = wanted or (self.numbers.topic_number(name) if self.numbers else 0)
            # In a cluster this range has the ETIDs of clients at all nodes, which this node can't check.
            may_be_etid = self.numbers is not None and LOCAL_MASK < number < TOPIC_BIT
            if not number or number.to_bytes(4, "big") in self.by_key or may_be_etid:
                number = self._draw_free(TOPIC_BIT, TOPIC_BIT - 1)
            if self._store:
                self._store.add("topic", name, number)
            topic = self._insert(number, name)
        elif self.passing:
            self.passing.pop(topic, None)  # somebody may keep its id from now on
        return topic

    def passing_named(self, name: bytes) -> Topic:
        """Return the topic `name`; a new one is removed again when nobody needs it."""
        topic = self.by_name.get(name)
        if topic is None:
            topic = self.named(name)
            if self._store is None:  # stored names keep their ids
                self.passing[topic] = None
        return topic

    def remove_named(self, topic: Topic) -> None:
        """Remove a topic of `passing`."""
        assert topic.name is not None
        topic.count()
        topic.forget_routes()
        self.passing.pop(topic, None)
        del self.by_key[topic.key], self.by_name[topic.name]
        self.names_bytes -= len(topic.name)

    def renumber(self, topic: Topic, number: int) -> None:
        """Change the id of a topic to `number`, which must be free."""
        topic.forget_routes()  # with the old key, by which sessions cache them
        del self.by_key[topic.key]
        topic.id, topic.key = number, number.to_bytes(4, "big")
        self.by_key[topic.key] = topic

    def keep_in(self, store: NameStore) -> None:
        """Save the names in `store` from now on, and create the stored topics."""
        known = dict(store.load("topic"))
        for name, number in known.items():
            if name not in self.by_name and not self.get(number):  # a name or an id may be in use already
                self._insert(number, name)
        self._store = store
        for name, topic in self.by_name.items():
            if name not in known:
                store.add("topic", name, topic.id)

    def unsaved(self, name: bytes) -> Deferred[None] | None:
        """See `NameStore.unsaved`; None without a store."""
        return self._store.unsaved("topic", name) if self._store else None

    def etid(self, wanted: int = 0) -> int:
        """Return an ETID for a new client: `wanted` if that is free and not 0."""
        if wanted and not self.is_taken(wanted):
            return wanted
        return self._draw_free(self.node << LOCAL_BITS, LOCAL_MASK)

    def ephemeral(self, number: int = 0) -> Topic:
        """Create the topic of an ETID, with the id `number` if that is free and not 0."""
        return self._insert(self.etid(number), None)

    def foreign(self, number: int, outbox: Outbox) -> Topic:
        """Create the topic of an ETID at another node; `outbox` is that node's send queue."""
        topic = self._insert(number, None)
        topic.add(outbox)
        return topic

    def remove(self, etid: int) -> None:
        """Remove an ETID; it is drawn again only after `release`."""
        self.by_key.pop(etid.to_bytes(4, "big"), None)
        self._leaving.add(etid)

    def release(self, etid: int) -> None:
        """Free a removed ETID, once the client is in no table and its observers are notified."""
        self._leaving.discard(etid)

    def names(self) -> Iterator[tuple[int, bytes]]:
        """Return `(id, name)` of every named topic."""
        return iter([(topic.id, name) for name, topic in self.by_name.items()])

    def _draw_free(self, fixed_bits: int, random_bits: int) -> int:
        """Return a free id of `fixed_bits` and of random bits where `random_bits` has ones."""
        while True:
            number = fixed_bits | self._random_u32() & random_bits
            # Local number 1 is the ETID of a node's server. ETIDs in `_leaving` are still observed, or in tables.
            if number & LOCAL_MASK > SERVER_LOCAL and not self.is_taken(number) and number not in self._leaving:
                return number

    def _insert(self, number: int, name: bytes | None) -> Topic:
        topic = Topic(number, name, self)
        self.by_key[topic.key] = topic
        if name is not None:
            self.by_name[name] = topic
            self.names_bytes += len(name)
            if self.numbers and number != self.numbers.topic_number(name):
                self.named_otherwise(topic)
            for notify in self.on_named:
                notify(topic)
        return topic


class SubTopics:
    """Sub-topic table of one broker.

    Attributes:
        numbers: derives ids of new names; None draws them at random.
        on_new: called with the id and the name of each new sub-topic.
    """

    def __init__(self, random_u32: Callable[[], int], store: NameStore | None = None) -> None:
        self.numbers: NameNumbers | None = None
        self.on_new: Callable[[int, bytes], object] = lambda number, name: None
        self.by_name: dict[bytes, int] = {}
        self.by_id: dict[int, bytes] = {}
        self.names_bytes = 0
        self._random_u32 = random_u32
        self._store = store
        for name, number in store.load("subtopic") if store else ():
            self._insert(name, number)

    def named(self, name: bytes, wanted: int = 0) -> int:
        """Return the id of `name`; create it if needed, with the id `wanted` if that is free and not 0."""
        number = self.by_name.get(name)
        if number is None:
            number = wanted or (self.numbers.subtopic_number(name) if self.numbers else 0)
            while not number or number in self.by_id:  # 0 means no sub-topic
                number = self._random_u32()
            if self._store:
                self._store.add("subtopic", name, number)
            self._insert(name, number)
            self.on_new(number, name)
        return number

    def renumber(self, name: bytes, number: int) -> bool:
        """Change the id of `name` to `number`, or create the name; return whether it had a different id."""
        known = self.by_name.get(name)
        if known != number:
            if known is not None:
                self.by_id.pop(known, None)
                self.names_bytes -= len(name)
            self._insert(name, number)
        return known not in (None, number)

    def keep_in(self, store: NameStore) -> None:
        """Save the names in `store` from now on, and create the stored sub-topics."""
        known = dict(store.load("subtopic"))
        for name, number in known.items():
            if name not in self.by_name and number not in self.by_id:
                self._insert(name, number)
        self._store = store
        for name, number in self.by_name.items():
            if name not in known:
                store.add("subtopic", name, number)

    def unsaved(self, name: bytes) -> Deferred[None] | None:
        """See `NameStore.unsaved`; None without a store."""
        return self._store.unsaved("subtopic", name) if self._store else None

    def _insert(self, name: bytes, number: int) -> None:
        self.by_name[name], self.by_id[number] = number, name
        self.names_bytes += len(name)


NAMES = Limit("names", "limits.names", "the hub's limit of names is reached")
NAMES_MEMORY = Limit("name_bytes", "limits.names_bytes", "the hub's limit of bytes of names is reached")
CLIENT_NAMES = Limit("client_names", "limits.client_names", "the client's limit of new names is reached")
CLIENT_NAMES_MEMORY = Limit(
    "client_name_bytes", "limits.client_names_bytes", "the client's limit of bytes of new names is reached"
)
CLIENT_SUBSCRIPTIONS = Limit(
    "client_subscriptions", "limits.subscriptions", "the client's limit of subscriptions is reached"
)
CLIENT_OBSERVES = Limit("client_observes", "limits.observes", "the client's limit of observed topics is reached")
HANDSHAKES = Limit(
    "handshakes", "limits.handshakes_per_address", "the address's limit of unfinished handshakes is reached"
)
USER_CONNECTIONS = Limit(
    "connections_per_user", "limits.connections_per_user", "the user's limit of connections is reached"
)
OF_HUBS = (
    NAMES,
    NAMES_MEMORY,
    CLIENT_NAMES,
    CLIENT_NAMES_MEMORY,
    CLIENT_SUBSCRIPTIONS,
    CLIENT_OBSERVES,
    HANDSHAKES,
    USER_CONNECTIONS,
)
"""Limits that are also counted per broker (`refused`)."""


@dataclass(slots=True)
class HubLimits:
    """Limits of names, subscriptions and connections of one broker (help: limits).

    Attributes:
        names, names_bytes: number and bytes of the topics of the broker; the same again for its sub-topics.
        client_names, client_names_bytes: number and bytes of the names that one client creates.
        subscriptions, observes: maximum number for one client.
        connections_per_user: maximum number; None for no limit.
    """

    names: int = 250_000
    names_bytes: int = 64 << 20
    client_names: int = 10_000
    client_names_bytes: int = 4 << 20
    subscriptions: int = 10_000
    observes: int = 10_000
    connections_per_user: int | None = None

    def of_all(self, table: Topics | SubTopics, name: bytes) -> Limit | None:
        """Return the limit that forbids adding `name` to `table`."""
        if len(table.by_name) >= self.names:
            return NAMES
        return NAMES_MEMORY if table.names_bytes + len(name) > self.names_bytes else None

    def of_client(self, names: int, names_bytes: int, name: bytes) -> Limit | None:
        """Return the limit that forbids a new `name` to a client that has created `names` of `names_bytes` in total."""
        if names >= self.client_names:
            return CLIENT_NAMES
        return CLIENT_NAMES_MEMORY if names_bytes + len(name) > self.client_names_bytes else None


@dataclass(frozen=True, slots=True)
class PublishLimits:
    """Limits of what each client of a broker publishes.

    Attributes:
        per_s, bytes_per_s: messages and bytes per second; None for no limit.
        burst_s: the burst size, in seconds of the rate.
        policy: treatment of messages above the rate: "wait", "drop" or "disconnect".
        message_bytes: largest payload.
    """

    per_s: float | None = None
    bytes_per_s: float | None = None
    burst_s: float = 1.0
    policy: str = "wait"
    message_bytes: int = MAX_PAYLOAD_BYTES

    @property
    def is_any(self) -> bool:
        """Whether there is any limit besides the maximum of the protocol."""
        return self.has_rate or self.message_bytes < MAX_PAYLOAD_BYTES

    @property
    def has_rate(self) -> bool:
        """Whether a rate is limited."""
        return self.per_s is not None or self.bytes_per_s is not None
