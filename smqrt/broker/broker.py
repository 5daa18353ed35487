"""SMQ broker: the methods that Python and Lua share (spec: smq §2).

Names are bytes here, and ids are numbers. The table `METHODS` lists the methods and the types of their arguments. The
Lua object (`smq.hub`) is generated from it, and a test compares the Python object (`smqrt.hub`) with it. These objects
convert arguments and results; this module checks values. Callbacks are plain functions that never raise and may return
`Deferred`. `smqrt.smq.gevent_broker` adds sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import NamedTuple

from smqrt.broker.handler_filters import HandlerFilters
from smqrt.broker.mqtt.application import CheckedOptions, PublishOptions, batch_of, checked_options
from smqrt.broker.mqtt.retained import RetainedMessages
from smqrt.broker.server_client import CATCH_ALL, Handler, ServerClient
from smqrt.broker.state import BrokerPeer, BrokerState, Hooks, Recorder
from smqrt.broker.topics import HubLimits, NameStore, SubTopics, Topic, Topics
from smqrt.errors import ArgumentError, ClosedError, CloseReason
from smqrt.wire import smq


class Kind(Enum):
    """Type of an argument or a result."""

    NAME = "name"
    """Name of a topic or sub-topic, or other text: bytes."""
    NUMBER = "number"
    """Id, ETID, seconds or a count: int."""
    DESTINATION = "destination"
    """Topic or sub-topic by name (bytes) or by id (int)."""
    PAYLOAD = "payload"
    """Payload of a message: bytes."""
    FUNCTION = "function"
    """Function of the application."""
    FLAG = "flag"
    """Any value, tested for truth."""
    ROOM = "room"
    """`(free, used)` places of a queue."""
    COUNTS = "counts"
    """Numbers by name: `dict[str, int]`."""
    NAMES = "names"
    """Iterator of `(id, name)`."""
    PEER = "peer"
    """A client, or the server's own client."""
    PEERS = "peers"
    """Iterator of clients."""
    NOTHING = "nothing"


REQUIRED = object()
"""The default of an argument that must be given; None is a valid default."""


class Argument(NamedTuple):
    """One argument of a method.

    Attributes:
        name: the keyword in Python.
        kind: its type.
        default: value when it is omitted.
        optional: whether it may be None, or nil.
    """

    name: str
    kind: Kind
    default: object = REQUIRED
    optional: bool = False


class Method(NamedTuple):
    """One method of a broker."""

    name: str
    arguments: tuple[Argument, ...] = ()
    returns: Kind = Kind.NOTHING


_TOPIC = Argument("topic", Kind.DESTINATION)
_MESSAGE = (
    Argument("data", Kind.PAYLOAD),
    _TOPIC,
    Argument("subtopic", Kind.DESTINATION, None, optional=True),
    Argument("ptid", Kind.NUMBER, None, optional=True),
)

_ALL = (
    Method("create", (Argument("topic", Kind.NAME), Argument("tid", Kind.NUMBER, 0)), Kind.NUMBER),
    Method(
        "createsub", (Argument("subtopic", Kind.NAME, optional=True), Argument("stid", Kind.NUMBER, 0)), Kind.NUMBER
    ),
    Method("gettid", (), Kind.NUMBER),
    Method("tid2topic", (Argument("tid", Kind.NUMBER),), Kind.NAME),
    Method("topic2tid", (Argument("topic", Kind.NAME),), Kind.NUMBER),
    Method("tid2subtopic", (Argument("tid", Kind.NUMBER),), Kind.NAME),
    Method("subtopic2tid", (Argument("subtopic", Kind.NAME),), Kind.NUMBER),
    Method("topics", (), Kind.NAMES),
    Method("subtopics", (), Kind.NAMES),
    Method("publish", _MESSAGE, Kind.NUMBER),
    Method("publish_threadsafe", _MESSAGE, Kind.FLAG),
    Method(
        "pubon",
        (
            Argument("data", Kind.PAYLOAD),
            Argument("totid", Kind.NUMBER),
            Argument("fromtid", Kind.NUMBER),
            Argument("subtopic", Kind.NUMBER, 0),
        ),
        Kind.FLAG,
    ),
    Method("unsubscribe", (_TOPIC,)),
    Method("onmsg", (Argument("onmsg", Kind.FUNCTION, optional=True),)),
    Method("observe", (_TOPIC, Argument("onchange", Kind.FUNCTION)), Kind.FLAG),
    Method("unobserve", (_TOPIC,)),
    Method("queuesize", (), Kind.ROOM),
    Method("peers", (Argument("phantoms", Kind.FLAG, False),), Kind.PEERS),
    Method("etid2peer", (Argument("etid", Kind.NUMBER),), Kind.PEER),
    Method("setkeepalive", (Argument("time", Kind.NUMBER), Argument("intv", Kind.NUMBER, 0))),
    Method(
        "shutdown",
        (
            Argument("msg", Kind.NAME, None, optional=True),
            Argument("etid", Kind.NUMBER, None, optional=True),
            Argument("everywhere", Kind.FLAG, True),
        ),
    ),
    Method("drops", (), Kind.COUNTS),
    Method("refused", (), Kind.COUNTS),
)

METHODS = {method.name: method for method in _ALL}
"""Methods by name, without `connect`, `subscribe` and `close`, which differ between the languages."""


Name = bytes | int
SELF = b"self"
"""Name of the server's own ETID as a topic."""
SERVER_ETID = 1
MAX_ID = 0xFFFFFFFF


class BrokerNames(BrokerState):
    """Broker methods for the names and ids of topics and sub-topics."""

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("this hub has been closed; its application has ended, or called close()")

    def create(self, name: bytes, tid: int = 0) -> int:
        """Return the id of a topic; create it if needed, with the id `tid` if that is free."""
        return self._named(name, _checked_id("tid", tid)).id

    def _named(self, name: bytes, tid: int = 0) -> Topic:
        self._check_open()
        topic = self.topic_table.by_name.get(name)
        if topic is None:  # existing names can be used even when the limit is reached
            self._check_room("topic", self.topic_table, name)
            topic = self.topic_table.named(name, tid)
        return topic

    def createsub(self, name: bytes | None, stid: int = 0) -> int:
        """Return the id of a sub-topic, 0 for no name; create it if needed, with the id `stid` if that is free."""
        _checked_id("stid", stid)
        if name is None:
            return 0
        self._check_open()
        number = self.subtopic_table.by_name.get(name)
        if number is None:
            self._check_room("subtopic", self.subtopic_table, name)
            number = self.subtopic_table.named(name, stid)
        return number

    def _check_room(self, what: str, table: Topics | SubTopics, name: bytes) -> None:
        reached = self.limits.of_all(table, _checked_length(what, name))
        if reached:
            self.refuse(None, reached)
            count = len(table.by_name)
            raise ArgumentError(f"{what}: {reached.rule}, see maxnames of create or {reached.setting}; {count} exist")

    def keep_names_in(self, store: NameStore) -> None:
        """Save the names in `store` from now on."""
        self.store = store
        self.topic_table.keep_in(store)
        self.subtopic_table.keep_in(store)

    def tid2topic(self, tid: int) -> bytes | None:
        """Return the name of a topic id; None for an ETID or an unknown id."""
        topic = self._known(tid)
        return topic.name if topic else None

    def topic2tid(self, name: bytes) -> int | None:
        """Return the id of a topic name, if it exists."""
        topic = self.topic_table.by_name.get(name)
        return topic.id if topic else None

    def tid2subtopic(self, stid: int) -> bytes | None:
        """Return the name of a sub-topic id, if it exists."""
        return self.subtopic_table.by_id.get(stid)

    def subtopic2tid(self, name: bytes) -> int | None:
        """Return the id of a sub-topic name, if it exists."""
        return self.subtopic_table.by_name.get(name)

    def topics(self) -> Iterator[tuple[int, bytes]]:
        """Return `(tid, name)` of every named topic."""
        return self.topic_table.names()

    def subtopics(self) -> Iterator[tuple[int, bytes]]:
        """Return `(stid, name)` of every sub-topic."""
        return iter(list(self.subtopic_table.by_id.items()))

    def _known(self, tid: int) -> Topic | None:
        return self.topic_table.get(tid) if 0 <= tid <= MAX_ID else None

    def _subtopic(self, subtopic: Name | None) -> int:
        return _checked_id("subtopic", subtopic) if isinstance(subtopic, int) else self.createsub(subtopic)


class _CountObserver:
    """Observer that calls a function with the count and the topic; for an ETID once, when its client disconnects."""

    def __init__(self, function: Callable[[int, Name], object], observers: dict[int, _CountObserver]) -> None:
        self.function = function
        self._observers = observers

    def changed(self, topic: Topic, subscribers: int) -> None:
        """See `Observer`."""
        if topic.name is None:  # an ETID changes once, when its client disconnects; its id may be drawn again
            self._observers.pop(topic.id, None)
        self.function(subscribers, topic.id if topic.name is None else topic.name)


class Broker(BrokerNames):
    """One SMQ broker.

    Args:
        hooks: the extension points.
        random_u32: returns random 32-bit numbers.
        encode: the WebSocket encoder for batches.
        clock: monotonic seconds.
        store: saves names across restarts, or None.
        limits: limits of names, subscriptions and connections.
        random_server_etid: whether the server's own client gets a random ETID instead of 1.
        server_etid: ETID of the server's own client; 0 for the default.
        queue_size: places in the server's publish queue.
    """

    server: ServerClient

    def __init__(
        self,
        hooks: Hooks,
        *,
        random_u32: Callable[[], int],
        encode: Callable[[bytes], bytes],
        clock: Callable[[], float],
        store: NameStore | None = None,
        limits: HubLimits | None = None,
        random_server_etid: bool = False,
        server_etid: int = 0,
        queue_size: int = 200,
    ) -> None:
        super().__init__(hooks, random_u32=random_u32, encode=encode, clock=clock, store=store, limits=limits)
        self.server = ServerClient(self, server_etid or (0 if random_server_etid else SERVER_ETID), queue_size)
        self._observers: dict[int, _CountObserver] = {}

    # ---- clients

    def peers(self, phantoms: object = False) -> Iterator[BrokerPeer]:
        """Return the server's own client and all connected clients; with `phantoms` also those of other nodes."""
        others = self.cluster.peers_elsewhere() if phantoms and self.cluster is not None else ()
        return iter([self.server, *self.sessions.values(), *others])

    def etid2peer(self, etid: int) -> BrokerPeer | None:
        """Return the client with this ETID, of this node or another."""
        if etid == self.server.etid:
            return self.server
        return self.sessions.get(etid) or (None if self.cluster is None else self.cluster.phantom(etid))

    def drops(self) -> dict[str, int]:
        """Return how many copies of messages were not delivered, by the names of `Drop` in lower case."""
        return {reason.name.lower(): count for reason, count in self.stats.drops.items()}

    def refused(self) -> dict[str, int]:
        """Return how often each limit was reached, by the names in `smqrt.settings.limits`."""
        return {limit.name: count for limit, count in self.stats.refused.items()}

    @property
    def is_unloading(self) -> bool:
        """Whether the application of this broker is being unloaded."""
        return False

    def shutdown(self, text: bytes | None = None, etid: int | None = None, everywhere: object = True) -> None:
        """Disconnect clients.

        Args:
            text: sent in a Disconnect packet; None closes the sockets without a packet.
            etid: the client to disconnect; None for all.
            everywhere: whether all means all nodes of the cluster. While the application is being unloaded, it means
                this broker only.

        Raises:
            ArgumentError: `text` does not fit a packet.
        """
        if text is not None:
            _checked_length("msg", text)
        # A hub that is unloaded in one worker must not close the clients of the others.
        if everywhere and etid is None and self.cluster is not None and not self.is_unloading:
            self.cluster.end_all(text)
        elif etid is None or self.cluster is None or not self.cluster.end_client(etid, text):
            self.end_clients(text, etid)

    def end_clients(self, text: bytes | None, etid: int | None) -> None:
        """Disconnect one client of this broker, or all."""
        # A copy: `onclose` may close or accept clients.
        chosen = [self.sessions.get(etid)] if etid is not None else list(self.sessions.values())
        for session in chosen:
            if session:
                session.disconnect(CloseReason.SHUTDOWN, text)

    def close(self) -> None:
        """Close the broker: disconnect all clients and accept no new ones. A second call does nothing.

        No Disconnect packet is sent, so that clients reconnect when there is a broker again. Later calls that create,
        publish, subscribe or observe raise ClosedError.
        """
        if self.closed:
            return
        self.closed = True  # before anything else: `onclose` may call `close` again, or publish
        if self.cluster is not None:  # first, so that the other nodes remove its clients together
            self.cluster.leave()
        self.end_clients(None, None)
        self.server.close()
        self._observers.clear()
        if self.store:
            self.store.close()

    def record(self, recorder: Recorder | None) -> None:
        """Record published messages with `recorder`; None stops recording."""
        self.recorder = recorder
        for session in self.sessions.values():  # cached routes bypass a new recorder
            session.forget_routes()

    # ---- ids

    def renumber(self, name: bytes, number: int) -> bool:
        """Change the id of the topic `name` to `number`, which clients use; return whether it had a different id."""
        topic = self.topic_table.by_name.get(name)
        if topic is None:
            self.topic_table.named(name, number)
            return False
        if topic.id == number:
            return False
        old = topic.id
        self.topic_table.renumber(topic, number)
        self.server.renumbered(old, topic)
        if old in self._observers:
            self._observers[number] = self._observers.pop(old)
        return True

    def gettid(self) -> int:
        """Return the server's ETID."""
        return self.server.etid

    def _topic(self, topic: Name) -> Topic | None:
        """Return the topic of a name, created if needed, or of an id."""
        if topic == SELF:
            return self.server.topic
        return self._known(topic) if isinstance(topic, int) else self._named(topic)

    def _existing(self, topic: Name) -> Topic | None:
        """Return the topic of a name or id, None if it does not exist."""
        if isinstance(topic, bytes) and topic != SELF:
            return self.topic_table.by_name.get(topic)
        return self._topic(topic)

    # ---- publish and subscribe: the server's own client

    def publish(self, data: bytes, topic: Name, subtopic: Name | None = None, ptid: int | None = None) -> int:
        """Publish as the server, or as `ptid`; return the number of messages in the server's queue.

        Raises:
            ArgumentError: `data` has more than 0xFFF0 bytes, an id has more than 32 bits, or a limit of names is
                reached.
        """
        if self.closed or len(data) > smq.MAX_PAYLOAD_BYTES:  # checked here, because two calls cost time per message
            self._check_open()
            check_size(data)
        if isinstance(topic, int):
            tid = _checked_id("topic", topic)
        else:
            found = None if topic == SELF else self.topic_table.by_name.get(topic)
            tid = (found or self._topic(topic)).id  # type: ignore[union-attr]
        stid = 0 if subtopic is None else self._subtopic(subtopic)
        sender = self.server.etid if ptid is None else _checked_id("ptid", ptid)
        return self.server.publish(tid, sender, smq.publish_frame(tid, sender, stid, data))

    def publish_mqtt(
        self, data: bytes, topic: Name, options: PublishOptions, subtopic: Name | None = None, ptid: int | None = None
    ) -> int:
        """Publish as `publish`, with the QoS, retain flag, expiry and properties that MQTT clients get.

        Raises:
            ArgumentError: as `publish`; this hub accepts no MQTT clients, an option is invalid, or a limit of retained
                messages is reached.
        """
        self._check_open()
        check_size(data)
        checked = checked_options(self.devices, options)  # before a topic is created
        if checked is None:
            return self.publish(data, topic, subtopic, ptid)
        return self.publish_checked(data, topic, checked, subtopic, ptid)

    def publish_checked(
        self, data: bytes, topic: Name, checked: CheckedOptions, subtopic: Name | None, ptid: int | None
    ) -> int:
        """Publish as `publish_mqtt`, with options and a payload that were checked.

        Raises:
            ArgumentError: as `publish`, or a limit of retained messages is reached.
        """
        self._check_open()
        found = self._topic(_checked_id("topic", topic) if isinstance(topic, int) else topic)
        tid = topic if isinstance(topic, int) else found.id  # type: ignore[union-attr]  # a name has a topic
        stid = 0 if subtopic is None else self._subtopic(subtopic)
        sender = self.server.etid if ptid is None else _checked_id("ptid", ptid)
        frame = smq.publish_frame(tid, sender, stid, data)
        batch = batch_of(self.devices, found, frame, checked, self.hooks.onpublish is not None)
        return self.server.publish(tid, sender, batch)

    @property
    def retained(self) -> RetainedMessages:
        """The retained messages of MQTT clients.

        Raises:
            ArgumentError: this hub accepts no MQTT clients.
            ClosedError: the hub is closed.
        """
        self._check_open()
        if self.devices is None:
            raise ArgumentError("retained: this hub accepts no MQTT clients; create it with the option mqtt")
        found: RetainedMessages = self.devices.retained
        return found

    def pubon(self, data: bytes, to_etid: int, from_etid: int, stid: int = 0) -> bool:
        """Send to one client on behalf of another; return false unless both are connected, or the server itself."""
        self._check_open()
        check_size(data)
        _checked_id("subtopic", stid)
        if not self._is_client(to_etid) or not self._is_client(from_etid):
            return False
        self.publish(data, to_etid, stid, from_etid)
        return True

    def _is_client(self, etid: int) -> bool:
        if etid in self.sessions or etid == self.server.etid:
            return True
        return self.cluster is not None and etid in self.cluster.phantoms

    def subscribe(
        self, topic: Name, handler: Handler | None = None, subtopic: Name | None = None, once: bool = False
    ) -> int:
        """Subscribe the server to a topic; return its id. With `once` one node of a cluster handles each message.

        Raises:
            ArgumentError: `topic` is a number but not the id of a topic.
        """
        found = self._topic(topic)
        if found is None or (found.name is None and found is not self.server.topic):
            raise ArgumentError(f"topic: {topic!r} is not a topic's id; subscribe by name, or create the topic first")
        self._check_open()
        self.server.subscribe(found, handler, CATCH_ALL if subtopic is None else self._subtopic(subtopic), once)
        if self.handler_filters is not None:
            self.handler_filters.taken_over(found)
        return found.id

    def subscribe_filter(
        self, text: str, handler: Handler | None = None, subtopic: Name | None = None, once: bool = False
    ) -> None:
        """Subscribe the server to all topics that a filter matches: `+` for one level, `#` for the rest.

        Raises:
            ArgumentError: `text` is not a filter.
        """
        self._check_open()
        if self.handler_filters is None:
            self.handler_filters = HandlerFilters(self)
        self.handler_filters.add(text, handler, CATCH_ALL if subtopic is None else self._subtopic(subtopic), once)

    def unsubscribe(self, topic: Name) -> None:
        """End the server's subscription to a topic, or to a filter with this text; an unknown one is ignored."""
        if self.handler_filters is not None and isinstance(topic, bytes):
            self.handler_filters.remove(topic.decode("utf-8", "surrogateescape"))
        found = self._existing(topic)
        if found:
            self.server.unsubscribe(found)
            if self.handler_filters is not None:
                self.handler_filters.taken_over(found)

    def onmsg(self, handler: Handler | None) -> None:
        """Set the default handler, for messages that no other handler matches."""
        self._check_open()
        self.server.on_message(handler)

    def queuesize(self) -> tuple[int, int]:
        """Return the `(free, used)` places of the publish queue."""
        return self.server.queue_room()

    def observe(self, topic: Name, function: Callable[[int, Name], object]) -> bool | None:
        """Call `function(subscribers, topic)` on each change; return None for the server's ETID or an unknown id."""
        found = self._topic(topic)
        if found is None or found is self.server.topic:
            return None
        self._check_open()
        self.unobserve(found.id)  # a topic has one observer function: a second call replaces the first
        observer = self._observers[found.id] = _CountObserver(function, self._observers)
        self.add_observer(found, observer)
        return True

    def unobserve(self, topic: Name) -> None:
        """End `observe` of a topic."""
        found = self._existing(topic)
        observer = self._observers.pop(found.id, None) if found else None
        if found and observer:
            found.unobserve(observer)


def check_size(data: bytes) -> None:
    """Raise ArgumentError when `data` does not fit a message."""
    if len(data) > smq.MAX_PAYLOAD_BYTES:
        raise ArgumentError(f"data: {len(data)} bytes; a message carries at most {smq.MAX_PAYLOAD_BYTES}, split it")


def _checked_length(what: str, text: bytes) -> bytes:
    if len(text) > smq.MAX_NAME_BYTES:
        raise ArgumentError(f"{what}: {len(text)} bytes; at most {smq.MAX_NAME_BYTES} fit a packet")
    return text


def _checked_id(what: str, number: int) -> int:
    if not 0 <= number <= MAX_ID:
        raise ArgumentError(f"{what}: {number} is not a 32-bit id (0 to 4294967295)")
    return number
