"""Topics: numbers, names, who subscribes, who observes. The routing structure, on its own.

Topic ids and ETIDs share one number space; sub-topic ids have their own. Numbers are random, non-zero and kept for the
broker's life (spec: smq §12.6), or made from the names in a cluster. ETIDs carry the node's number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from typing import Protocol

from smqrt.broker.deferred import Deferred
from smqrt.broker.outbox import BLOCKED, FLUSHED_AT_ONCE, Outbox, dirty
from smqrt.settings.limit_register import Limit
from smqrt.wire.smq import LOCAL_BITS, LOCAL_MASK, MAX_PAYLOAD_BYTES, SERVER_LOCAL, TOPIC_BIT, NameNumbers


class Route(Protocol):
    """Where a batch goes. Both calls return true when the publisher has to wait."""

    def deliver(self, batch: bytes) -> bool | None:
        """Deliver a batch of Publish frames."""
        ...

    def deliver_view(self, view: memoryview) -> bool | None:
        """Deliver a large batch whose memory is reused after the call."""
        ...


class Observer(Protocol):
    """Is told how many subscribers a topic has."""

    def changed(self, topic: Topic, subscribers: int) -> None:
        """The number of subscribers of `topic` is now `subscribers`."""
        ...


class RouteCache(Protocol):
    """Remembers where batches go: a session."""

    def forget_route(self, destination: bytes) -> None:
        """Drop the route to a topic, given by its key."""
        ...


@dataclass(slots=True)
class Traffic:
    """What went through a hub.

    Attributes:
        messages, bytes: that were published here, also those that nobody subscribed to; bytes with their headers.
        arrived: messages that came from other nodes of a cluster, where they were published.
        copies, copied_bytes: that were put on the queues of subscribers, also those that were dropped there.
    """

    messages: int = 0
    bytes: int = 0
    copies: int = 0
    copied_bytes: int = 0
    arrived: int = 0

    def add(self, messages: int, size: int, copies: int) -> None:
        """Count messages of `size` bytes together, each for so many subscribers."""
        self.messages += messages
        self.bytes += size
        self.copies += messages * copies
        self.copied_bytes += size * copies


_NOBODY: dict[Observer, int] = {}
"""The observers of most topics; never written to."""


class Topic:
    """A destination: a named topic, or the ETID of one client (`name` is None).

    Joining and leaving take the same time however many subscribe: `_members` is the truth, and the tuples that the data
    path walks through are made from it when the next publisher asks for the way (`settle`). A topic with one
    subscriber, as every ETID is, has the tuples only, which saves 200 bytes for each client.

    Attributes:
        raw, ws: the subscribers on raw sockets and on WebSockets; good after `settle`.
        cached: the sessions whose route cache points here; they forget it when somebody joins or leaves.
        observers: who is told of the number of subscribers, and which number each was told last.
        elsewhere: subscribers at other nodes, where the hub counts them and somebody observes.
        messages, bytes: delivered since `count` was called last.
        arrived, arrived_bytes: those of other nodes among them.
        leads_away: whether what is published goes to other nodes only.
    """

    __slots__ = (
        "__weakref__",
        "_members",
        "_settled",
        "_traffic",
        "arrived",
        "arrived_bytes",
        "bytes",
        "cached",
        "elsewhere",
        "encode",
        "id",
        "key",
        "leads_away",
        "messages",
        "name",
        "observers",
        "raw",
        "ws",
    )

    def __init__(self, number: int, name: bytes | None, encode: Callable[[bytes], bytes], traffic: Traffic) -> None:
        self.id = number
        self.key = number.to_bytes(4, "big")
        self.name = name
        self.encode = encode
        self._traffic = traffic
        self.messages = self.bytes = self.elsewhere = self.arrived = self.arrived_bytes = 0
        self.leads_away = False
        self.raw: tuple[Outbox, ...] = ()
        self.ws: tuple[Outbox, ...] = ()
        self.observers: dict[Observer, int] = _NOBODY
        self.cached: set[RouteCache] | None = None
        self._members: dict[Outbox, None] | None = None
        self._settled = True

    @property
    def subscribers(self) -> int:
        """How many clients subscribe, the server's own included."""
        return len(self.raw) + len(self.ws) if self._members is None else len(self._members)

    @property
    def is_delivered(self) -> bool:
        """Whether what is published reaches anybody, here or at another node; good after `settle`."""
        return bool(self.raw or self.ws or self.leads_away)

    @property
    def counted(self) -> int:
        """How many subscribe, as observers are told: those at other nodes included where the hub counts them."""
        return self.subscribers + self.elsewhere

    @property
    def sole_raw(self) -> Outbox | None:
        """The subscriber, when there is just one and it is no WebSocket."""
        return self.raw[0] if len(self.raw) == 1 and not self.ws else None

    def add(self, outbox: Outbox) -> None:
        """Let `outbox` receive what is published here."""
        self.forget_routes()  # a publisher's partitions know the sole subscriber
        if self.leads_away:
            self.count()
            self.leads_away = False
        if self._members is None:
            if not self.subscribers:
                self.raw, self.ws = ((), (outbox,)) if outbox.websocket else ((outbox,), ())
                return
            self._members = dict.fromkeys(self.raw + self.ws)
        self._members[outbox] = None
        self._settled = False

    def discard(self, outbox: Outbox) -> None:
        """Take `outbox` out; nothing happens when it is not there."""
        self.forget_routes()
        if self._members is not None:
            self._members.pop(outbox, None)
            self._settled = False
        elif outbox in self.raw or outbox in self.ws:
            self.count()
            self.raw = self.ws = ()

    def forget(self, outboxes: set[Outbox], observers: Set[object]) -> None:
        """Take out many at once, who have gone on elsewhere."""
        self.forget_routes()
        members = self.raw + self.ws if self._members is None else self._members
        left = [one for one in members if one not in outboxes]
        self.raw = tuple(one for one in left if not one.websocket)
        self.ws = tuple(one for one in left if one.websocket)
        self._members, self._settled = dict.fromkeys(left) if len(left) > 1 else None, True
        self.observers = {one: told for one, told in self.observers.items() if one not in observers} or _NOBODY

    def settle(self) -> None:
        """Make `raw` and `ws` what they should be; whoever caches a route here calls this first."""
        if self._settled or self._members is None:
            return
        self.count()
        self._settled = True
        self.raw = tuple(one for one in self._members if not one.websocket)
        self.ws = tuple(one for one in self._members if one.websocket)
        if len(self._members) < 2:
            self._members = None

    def deliver(self, batch: bytes) -> None:
        """Put `batch` on every subscriber's queue: the same bytes object for all raw ones, one encoded form for all
        WebSockets.
        """
        self.messages += 1
        self.bytes += len(batch)
        for outbox in self.raw:
            queue = outbox.queue
            if not queue:
                dirty.append(outbox)
            queue.append(batch)
            if outbox.life is BLOCKED:
                outbox.held(batch)
        if self.ws:
            batch = self.encode(batch)
            for outbox in self.ws:
                outbox.put(batch)

    def deliver_view(self, view: memoryview) -> None:
        """Deliver a large batch straight from the receive buffer; to many, in the order of the flush."""
        if len(self.raw) > FLUSHED_AT_ONCE:
            self.deliver(bytes(view))
            return
        self.messages += 1
        self.bytes += len(view)
        for outbox in self.raw:
            outbox.put_view(view)
        if self.ws:
            batch = self.encode(bytes(view))
            for outbox in self.ws:
                outbox.put(batch)

    def count(self) -> None:
        """Add what was delivered to the hub's counters: the number of subscribers was the same for all of it, since
        this is called before it changes. So that costs nothing for each subscriber.
        """
        if self.messages:
            copies = 0 if self.leads_away else len(self.raw) + len(self.ws)
            self._traffic.add(self.messages, self.bytes, copies)
            self._traffic.messages -= self.arrived
            self._traffic.bytes -= self.arrived_bytes
            self._traffic.arrived += self.arrived
            self.messages = self.bytes = self.arrived = self.arrived_bytes = 0

    def forget_routes(self) -> None:
        """Take this topic out of every route cache, because somebody joins or leaves."""
        sessions, self.cached = self.cached, None
        for session in sessions or ():
            session.forget_route(self.key)

    def observe(self, observer: Observer) -> None:
        """Let `observer` be told of every change from the present number of subscribers on."""
        if self.observers is _NOBODY:
            self.observers = {}
        self.observers[observer] = self.counted

    def unobserve(self, observer: Observer) -> None:
        """Take back `observe`; nothing happens when it was not called."""
        self.observers.pop(observer, None)

    def tell(self, observer: Observer) -> None:
        """Tell `observer` the present number of subscribers, unless that is what it was told last."""
        count = self.counted
        if self.observers.get(observer, count) != count:
            self.observers[observer] = count
            observer.changed(self, count)

    def unobserve_all(self) -> None:
        """Take back every `observe`."""
        self.observers = _NOBODY


class NameStore(Protocol):
    """Keeps names and their numbers over restarts."""

    def load(self, kind: str) -> Iterable[tuple[bytes, int]]:
        """All entries of `kind` (`"topic"` or `"subtopic"`)."""
        ...

    def add(self, kind: str, name: bytes, number: int) -> None:
        """Begin to keep `name` under `number`."""
        ...

    def unsaved(self, kind: str, name: bytes) -> Deferred[None] | None:
        """Settles when `name` is safe, or is rejected when that failed for now; None when it is safe already."""
        ...

    def close(self) -> None:
        """Wait a while for what was added, then release the file."""
        ...


class Topics:
    """The topic table of one hub.

    Args:
        random_u32: gives random 32-bit numbers.
        encode: the WebSocket encoder for batches.
        store: keeps topic names over restarts; None keeps them in memory.

    Attributes:
        node: this node's number in a cluster, 0 in none; ETIDs that are drawn from now on have it.
        numbers: what the numbers of new topics are made of; None draws them.
        named_otherwise: called for a topic that got another number than `numbers` says.
        absent: gives the topic of an ETID that another node has, by its number.
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
        self.by_key: dict[bytes, Topic] = {}
        self.by_name: dict[bytes, Topic] = {}
        self._random_u32 = random_u32
        self._encode = encode
        self._store = store
        self._leaving: set[int] = set()
        self.traffic = Traffic()
        self.names_bytes = 0
        for name, number in store.load("topic") if store else ():
            self._insert(number, name)

    def get(self, number: int) -> Topic | None:
        """The topic or ETID with the id `number` (u32), of this node or another one."""
        return self.by_key.get(number.to_bytes(4, "big")) or self.absent(number)

    def at(self, key: bytes) -> Topic | None:
        """As `get`, by the four bytes of the number."""
        return self.by_key.get(key) or self.absent(int.from_bytes(key, "big"))

    def named(self, name: bytes, wanted: int = 0) -> Topic:
        """Get or create the topic `name`; a new one gets the id `wanted` when that is free and not 0."""
        topic = self.by_name.get(name)
        if topic is None:
            number = self._number(name, wanted)
            if self._store:
                self._store.add("topic", name, number)
            topic = self._insert(number, name)
        return topic

    def _number(self, name: bytes, wanted: int) -> int:
        if not wanted and self.numbers:
            wanted = self.numbers.topic_number(name)
        if wanted and wanted.to_bytes(4, "big") not in self.by_key and not self._is_of_nodes(wanted):
            return wanted
        return self._free(lambda: self._random_u32() | TOPIC_BIT)

    def _is_of_nodes(self, number: int) -> bool:
        """Whether clients of nodes may have `number`, so that no topic can."""
        return self.numbers is not None and LOCAL_MASK < number < TOPIC_BIT

    def renumber(self, topic: Topic, number: int) -> None:
        """Give a topic another number, which nobody has."""
        topic.forget_routes()
        del self.by_key[topic.key]
        topic.id, topic.key = number, number.to_bytes(4, "big")
        self.by_key[topic.key] = topic

    def keep_in(self, store: NameStore) -> None:
        """Keep the names in `store` from now on, these and its own."""
        known = dict(store.load("topic"))
        for name, number in known.items():
            if name not in self.by_name and not self.get(number):
                self._insert(number, name)
        self._store = store
        for name, topic in self.by_name.items():
            if name not in known:
                store.add("topic", name, topic.id)

    def unsaved(self, name: bytes) -> Deferred[None] | None:
        """See `NameStore.unsaved`; None without a store."""
        return self._store.unsaved("topic", name) if self._store else None

    def ephemeral(self, number: int = 0) -> Topic:
        """The topic of a client's ETID; `number` asks for that id when it is free."""
        if not number or self.get(number):
            number = self.draw()
        return self._insert(number, None)

    def draw(self) -> int:
        """A number for an ETID of this node, which nobody has."""
        return self._free(lambda: self.node << LOCAL_BITS | self._random_u32() & LOCAL_MASK)

    def foreign(self, number: int, way: Outbox) -> Topic:
        """The topic of an ETID that another node has: what is sent there goes `way`."""
        topic = self._insert(number, None)
        topic.add(way)
        return topic

    def remove(self, topic: Topic) -> None:
        """Forget an ETID; it is drawn again after `release` only."""
        self.by_key.pop(topic.key, None)
        self._leaving.add(topic.id)

    def release(self, topic: Topic) -> None:
        """The client of a removed ETID is out of every table, and its observers know."""
        self._leaving.discard(topic.id)

    def names(self) -> Iterator[tuple[int, bytes]]:
        """`(id, name)` of every named topic."""
        return iter([(topic.id, name) for name, topic in self.by_name.items()])

    def _free(self, draw: Callable[[], int]) -> int:
        while True:
            number = draw()
            if number & LOCAL_MASK > SERVER_LOCAL and not self.get(number) and number not in self._leaving:
                return number

    def _insert(self, number: int, name: bytes | None) -> Topic:
        topic = Topic(number, name, self._encode, self.traffic)
        self.by_key[topic.key] = topic
        if name is not None:
            self.by_name[name] = topic
            self.names_bytes += len(name)
            if self.numbers and number != self.numbers.topic_number(name):
                self.named_otherwise(topic)
        return topic


class SubTopics:
    """The sub-topic names of one hub and their numbers.

    Attributes:
        numbers: what the numbers of new names are made of; None draws them.
        on_new: called with the number and the name of each new one.
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
        """Get or create the number of `name`; a new one gets `wanted` when that is free and not 0."""
        number = self.by_name.get(name)
        if number is None:
            number = wanted or (self.numbers.subtopic_number(name) if self.numbers else 0)
            while not number or number in self.by_id:
                number = self._random_u32()
            if self._store:
                self._store.add("subtopic", name, number)
            self._insert(name, number)
            self.on_new(number, name)
        return number

    def renumber(self, name: bytes, number: int) -> bool:
        """Let `name` have `number`; whether it had another one."""
        known = self.by_name.get(name)
        if known != number:
            if known is not None:
                self.by_id.pop(known, None)
                self.names_bytes -= len(name)
            self._insert(name, number)
        return known not in (None, number)

    def keep_in(self, store: NameStore) -> None:
        """Keep the names in `store` from now on, these and its own."""
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


NAMES = Limit("names", "limits.names", "the hub has as many names as it may")
NAMES_MEMORY = Limit("name_bytes", "limits.names_bytes", "the hub's names have as many bytes as they may")
CLIENT_NAMES = Limit("client_names", "limits.client_names", "a client has brought in as many names as it may")
CLIENT_NAMES_MEMORY = Limit(
    "client_name_bytes",
    "limits.client_names_bytes",
    "the names of a client have as many bytes as they may",
)
CLIENT_SUBSCRIPTIONS = Limit(
    "client_subscriptions", "limits.subscriptions", "a client has as many subscriptions as it may"
)
CLIENT_OBSERVES = Limit("client_observes", "limits.observes", "a client observes as much as it may")
HANDSHAKES = Limit(
    "handshakes", "limits.handshakes_per_address", "an address has as many unfinished handshakes as it may"
)
USER_CONNECTIONS = Limit(
    "connections_per_user", "limits.connections_per_user", "a user has as many connections as it may"
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
"""The limits that hubs count for themselves too (`refused`)."""


@dataclass(slots=True)
class HubLimits:
    """How much strangers may make a broker keep (help: limits).

    Attributes:
        names, names_bytes: topics in all, and sub-topics in all, and the bytes of the names of either.
        client_names, client_names_bytes: new names of one client.
        subscriptions, observes: of one client.
        connections_per_user: None for any number.
    """

    names: int = 250_000
    names_bytes: int = 64 << 20
    client_names: int = 10_000
    client_names_bytes: int = 4 << 20
    subscriptions: int = 10_000
    observes: int = 10_000
    connections_per_user: int | None = None

    def of_all(self, table: Topics | SubTopics, name: bytes) -> Limit | None:
        """Why `name` may not be added to `table`."""
        if len(table.by_name) >= self.names:
            return NAMES
        return NAMES_MEMORY if table.names_bytes + len(name) > self.names_bytes else None

    def of_client(self, names: int, names_bytes: int, name: bytes) -> Limit | None:
        """Why a client that brought in `names`, of `names_bytes` together, may not bring in `name`."""
        if names >= self.client_names:
            return CLIENT_NAMES
        return CLIENT_NAMES_MEMORY if names_bytes + len(name) > self.client_names_bytes else None


@dataclass(frozen=True, slots=True)
class PublishLimits:
    """Limits of what each client of a broker publishes.

    Attributes:
        per_s, bytes_per_s: messages and bytes a second; None for no limit.
        burst_s: how many seconds' worth may come at once.
        policy: what happens beyond: "wait", "drop" or "disconnect".
        message_bytes: largest payload.
    """

    per_s: float | None = None
    bytes_per_s: float | None = None
    burst_s: float = 1.0
    policy: str = "wait"
    message_bytes: int = MAX_PAYLOAD_BYTES

    @property
    def is_any(self) -> bool:
        """Whether there is any limit beside the protocol's own."""
        return self.has_rate or self.message_bytes < MAX_PAYLOAD_BYTES

    @property
    def has_rate(self) -> bool:
        """Whether a rate is limited."""
        return self.per_s is not None or self.bytes_per_s is not None
