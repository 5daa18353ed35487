"""State of an SMQ client across all its connections, without I/O.

The state consists of subscriptions, observers, known names, and messages that are held until their names have numbers.

A topic is `bytes` (a name), an `int` (an ID) or `SELF`. The broker responds to the requests of a client in their order.
After a lost connection the requests are sent again: first the answered ones (Create, Createsub, Subscribe), then the
open ones. Each request is therefore acknowledged exactly once and in order, with 0 when the client ends first. An
acknowledgement without a request is ignored.

Messages are sent in the order of the publish calls, also when the first one is held.

The time to process a packet depends only on its size, not on the number of open requests or held messages, because the
broker decides which packets it sends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from smqrt.clients.smq.protocol import Ack, Change, ClientProtocol
from smqrt.errors import ArgumentError
from smqrt.wire import smq
from smqrt.wire.smq import MAX_PACKET_BYTES, Type

# ---- Topics and sub-topics: names and IDs, and the handlers of subscriptions (spec: smq §2.4, delivery rules).
#
# Handlers are registered by name and found by ID. Topics and sub-topics are separate name spaces. IDs are valid for one
# connection.

SELF = b"self"
"""The topic name of the client's own ETID (spec: smq §3)."""

Topic = bytes | int
"""A name, `SELF`, or an ID."""
Subtopic = bytes | int | None
Handler = Callable[[bytes, int, int, int], object]
"""Receives `(data, ptid, tid, subtid)`."""
Done = Callable[[int], None]
"""Receives the number that the broker assigned, 0 when it denied the request."""

_MAX_NAME_BYTES = MAX_PACKET_BYTES - 1
_MAX_ID = 0xFFFFFFFF
_WHOLE_TOPIC = 0  # the sub-topic ID of handlers for all messages of a topic
_MISSING = object()  # None is a registered handler: see `SubscriptionTable.add`


def topic_key(topic: object) -> Topic:
    """Return a topic as bytes or int.

    Raises:
        ArgumentError: neither a name nor an ID.
    """
    if isinstance(topic, int) and not isinstance(topic, bool):
        return _checked_id(topic, "topic")
    return _checked_name(topic, "topic")


def subtopic_key(subtopic: object) -> Subtopic:
    """Return a sub-topic as bytes, int or None.

    Raises:
        ArgumentError: neither a name, nor an ID, nor None.
    """
    if subtopic is None or subtopic == 0:
        return None
    if isinstance(subtopic, int) and not isinstance(subtopic, bool):
        return _checked_id(subtopic, "subtopic")
    return _checked_name(subtopic, "subtopic")


def _checked_id(number: int, what: str) -> int:
    if not 0 < number <= _MAX_ID:
        raise ArgumentError(f"{what} id {number} must be from 1 to {_MAX_ID}")
    return number


def _checked_name(name: object, what: str) -> bytes:
    if not isinstance(name, str | bytes | bytearray):
        raise ArgumentError(f"{what} must be a name (str or bytes) or an id (int), not {type(name).__name__}")
    key = name.encode() if isinstance(name, str) else bytes(name)
    if len(key) > _MAX_NAME_BYTES:
        raise ArgumentError(f"{what} names must have at most {_MAX_NAME_BYTES} bytes, not {len(key)}")
    return key


def to_text(name: bytes | None) -> str | bytes | None:
    """Return a name for the application: str, or bytes when it is not UTF-8."""
    if name is None:
        return None
    try:
        return name.decode()
    except UnicodeDecodeError:
        return name


class NameTable:
    """Two-way table of names and the numbers that the broker assigned."""

    __slots__ = ("_ids", "_names")

    def __init__(self) -> None:
        self._ids: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}

    def number(self, name: bytes) -> int | None:
        """Return the number of `name`, None before the broker has sent it."""
        return self._ids.get(name)

    def name(self, number: int) -> bytes | None:
        """Return the name with `number`, None when it is unknown."""
        return self._names.get(number)

    def add(self, name: bytes, number: int) -> bool:
        """Store the assigned number; return whether it is new."""
        if self._ids.get(name) == number:
            return False
        self._ids[name] = number
        self._names[number] = name
        return True

    def take_all(self) -> list[bytes]:
        """Remove all numbers and return the names, oldest first."""
        names = list(self._ids)
        self._ids.clear()
        self._names.clear()
        return names


class SubscriptionTable:
    """Handlers of subscriptions by name, and for the current connection by number.

    Args:
        number: returns the number of a topic, None while it is unknown.
        subnumber: the same for a sub-topic.
    """

    def __init__(self, number: Callable[[Topic], int | None], subnumber: Callable[[Subtopic], int | None]) -> None:
        self._number = number
        self._subnumber = subnumber
        self._handlers: dict[Topic, dict[Subtopic, Handler | None]] = {}
        self._bound: dict[int, dict[int, Handler]] = {}  # by the numbers of this connection
        self._topics_of: dict[bytes, dict[Topic, None]] = {}  # by sub-topic; a dict as an ordered set

    def __contains__(self, topic: Topic) -> bool:
        return topic in self._handlers

    def names(self) -> list[bytes]:
        """Return the topic names that need a Subscribe request."""
        return [topic for topic in self._handlers if isinstance(topic, bytes) and topic != SELF]

    def find(self, tid: int, subtid: int) -> Handler | None:
        """Return the handler of the sub-topic, else that of the whole topic, else None."""
        handlers = self._bound.get(tid)
        if handlers is None:
            return None
        return handlers.get(subtid) or handlers.get(_WHOLE_TOPIC)

    def add(self, topic: Topic, subtopic: Subtopic, handler: Handler | None) -> None:
        """Register a handler, None for the client's `onmsg`. The last registration wins."""
        self._handlers.setdefault(topic, {})[subtopic or None] = handler
        if isinstance(subtopic, bytes):
            self._topics_of.setdefault(subtopic, {})[topic] = None
        self._bind_one(topic, subtopic or None, handler)

    def remove(self, topic: Topic, subtopic: Subtopic) -> None:
        """Remove one handler, and the topic with its last handler."""
        handlers = self._handlers.get(topic, {})
        if handlers.pop(subtopic or None, _MISSING) is not _MISSING:
            self._bind_one(topic, subtopic, None)
            self._forget_use(topic, subtopic)
        if not handlers:
            self._handlers.pop(topic, None)

    def remove_all(self, topic: Topic, tid: int | None) -> None:
        """Remove every handler of a topic."""
        for subtopic in self._handlers.pop(topic, {}):
            self._forget_use(topic, subtopic)
        if tid is not None:
            self._bound.pop(tid, None)

    def _forget_use(self, topic: Topic, subtopic: Subtopic) -> None:
        if isinstance(subtopic, bytes) and (topics := self._topics_of.get(subtopic)) is not None:
            topics.pop(topic, None)
            if not topics:
                del self._topics_of[subtopic]

    def bind(self, topic: Topic) -> None:
        """Bind the handlers of `topic` to the numbers that are known."""
        tid = self._number(topic)
        if tid is None or topic not in self._handlers:
            return
        numbered = ((self._subnumber(subtopic), handler) for subtopic, handler in self._handlers[topic].items())
        self._bound[tid] = {
            number: handler for number, handler in numbered if number is not None and handler is not None
        }

    def bind_subtopic(self, name: bytes) -> None:
        """Bind the handlers of a sub-topic after its number has become known."""
        for topic in self._topics_of.get(name, ()):
            handlers = self._handlers.get(topic, {})
            if name in handlers:
                self._bind_one(topic, name, handlers[name])

    def _bind_one(self, topic: Topic, subtopic: Subtopic, handler: Handler | None) -> None:
        tid, stid = self._number(topic), self._subnumber(subtopic)
        if tid is None or stid is None:
            return
        bound = self._bound.setdefault(tid, {})
        if handler is None:
            bound.pop(stid, None)
        else:
            bound[stid] = handler

    def bind_local(self) -> None:
        """Bind the topics whose numbers are known without a request: IDs, and the client's own ETID."""
        for topic in self._handlers:
            if isinstance(topic, int) or topic == SELF:
                self.bind(topic)

    def unbind(self) -> None:
        """Remove all bindings to numbers."""
        self._bound.clear()


_REQUEST_OF_ACK: dict[int, Type] = {
    Type.SUBACK: Type.SUBSCRIBE,
    Type.CREATEACK: Type.CREATE,
    Type.CREATESUBACK: Type.CREATESUB,
}

_LOCAL = 0  # the kind of a request about the client's own ETID: complete as soon as there is a connection


class PendingRequest(NamedTuple):
    """A request to the broker.

    Attributes:
        kind: packet type; `_LOCAL` for a request that is not sent.
        done: receives the number.
        restores: whether it was answered on an earlier connection.
    """

    kind: int
    name: bytes
    done: Done | None
    restores: bool = False


class PendingRequests:
    """Open requests in their order, with an index by kind and name.

    Attributes:
        restoring: number of requests that were answered on an earlier connection.
    """

    def __init__(self) -> None:
        self.restoring = 0
        self._requests: dict[int, PendingRequest] = {}
        self._numbers: dict[tuple[int, bytes], deque[int]] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[PendingRequest]:
        return iter(self._requests.values())

    def add(self, request: PendingRequest) -> None:
        """Append a request."""
        self._last += 1
        self._requests[self._last] = request
        self._numbers.setdefault((request.kind, request.name), deque()).append(self._last)
        self.restoring += request.restores

    def take(self, kind: int, name: bytes) -> PendingRequest | None:
        """Remove and return the oldest request of that kind and name, None when there is none."""
        numbers = self._numbers.get((kind, name))
        if numbers is None:
            return None
        request = self._requests.pop(numbers.popleft())
        if not numbers:
            del self._numbers[kind, name]
        self.restoring -= request.restores
        return request


class _HeldMessage(NamedTuple):
    payload: bytes
    topic: Topic
    subtopic: Subtopic

    @property
    def size_bytes(self) -> int:
        """Size in the queue, with the header, so that empty messages are limited too."""
        return len(self.payload) + smq.PUBLISH_HEADER_BYTES


class ClientSession:
    """State of one client across all its connections.

    Args:
        queue_bytes: size of the send queue; messages that do not fit are dropped and counted.
        clean_start: drop everything when the connection is lost.

    Attributes:
        etid: the client's own ETID, 0 while not connected.
        dropped: number of dropped messages: queue full, topic denied by the broker, or connection lost.
        sent: number of messages sent on this connection.
        confirmed: number of messages that the broker has confirmed on this connection.
        in_doubt: number of unsent and unconfirmed messages of the last connection; 0 while connected.
    """

    def __init__(self, queue_bytes: int, clean_start: bool = False) -> None:
        self.etid = 0
        self.dropped = 0
        self.sent = self.confirmed = self.in_doubt = 0
        self.topics = NameTable()
        self.subtopics = NameTable()
        self._queue_bytes = queue_bytes
        self._clean_start = clean_start
        self._protocol: ClientProtocol | None = None
        self._requests = PendingRequests()
        self._numbering: set[tuple[int, bytes]] = set()  # open requests for numbers, so that each is sent once
        self._on_restored: Callable[[], None] | None = None
        self._subscriptions = SubscriptionTable(self._number, self._subnumber)
        self._observers: dict[Topic, Callable[[int], None]] = {}
        self._held: deque[_HeldMessage] = deque()
        self._held_bytes = 0
        self._denied: set[tuple[int, bytes]] = set()  # requests whose held messages are to be dropped
        self._when_drained: deque[Callable[[], object]] = deque()

    # ---- connections

    def open(self, protocol: ClientProtocol, etid: int, on_restored: Callable[[], None]) -> None:
        """Use a new connection and send all requests again.

        Args:
            on_restored: called when the requests of earlier connections are answered.
        """
        self._protocol, self.etid, self._on_restored = protocol, etid, on_restored
        self.sent = self.confirmed = self.in_doubt = 0
        self._subscriptions.bind_local()
        waiting, self._requests = self._requests, PendingRequests()
        for request in waiting:
            self._issue(request)
        for topic in self._observers:
            if isinstance(topic, int):
                self._send_number(Type.OBSERVE, topic)
        self._progress()

    def lost(self) -> None:
        """Drop the numbers of the lost connection, and queue its requests for the next one; a clean start drops all."""
        if self._protocol is not None:
            self.dropped += self._protocol.unsent_publishes()
        self._protocol, self.etid, self._on_restored = None, 0, None
        self.in_doubt = self.sent - self.confirmed
        self._subscriptions.unbind()
        if self._clean_start:
            self._drop_held()
            self.topics.take_all()
            self.subtopics.take_all()
            self._subscriptions = SubscriptionTable(self._number, self._subnumber)
            self._requests = PendingRequests()
            self._numbering.clear()
            self._observers.clear()
            return
        still_open = [request for request in self._requests if not request.restores]
        subscribed = self._subscriptions.names()
        # Suback has the number of the topic too, so a subscribed topic needs no Create.
        plan: list[tuple[int, bytes]] = [
            (Type.CREATE, name) for name in self.topics.take_all() if name not in subscribed
        ]
        plan += [(Type.CREATESUB, name) for name in self.subtopics.take_all()]
        plan += [(Type.SUBSCRIBE, name) for name in subscribed]
        # The connection may have been lost while requests of an earlier one were still being restored.
        plan += [(request.kind, request.name) for request in self._requests if request.restores]
        open_keys = {(request.kind, request.name) for request in still_open}
        self._requests = PendingRequests()
        for kind, name in dict.fromkeys(plan):
            if (kind, name) not in open_keys:
                self._requests.add(PendingRequest(kind, name, None, True))
        for request in still_open:
            self._requests.add(request)
        self._numbering = {(one.kind, one.name) for one in self._requests if one.kind in (Type.CREATE, Type.CREATESUB)}

    def abandon(self) -> None:
        """Drop and count the held messages, and deny the open requests: no further connection will be opened."""
        self._drop_held()
        unanswered, self._requests = self._requests, PendingRequests()
        for request in unanswered:
            if request.done:
                request.done(0)

    def _drop_held(self) -> None:
        self.dropped += len(self._held)
        self.in_doubt += len(self._held)
        self._held.clear()
        self._held_bytes = 0
        self._denied.clear()

    # ---- names

    def create(self, name: bytes, done: Done) -> None:
        """Request the number of a topic; when it is known, call `done` at once."""
        if (number := self.topics.number(name)) is not None:
            done(number)
        else:
            self._request(Type.CREATE, name, done)

    def createsub(self, name: bytes, done: Done) -> None:
        """Request the number of a sub-topic; when it is known, call `done` at once."""
        if (number := self.subtopics.number(name)) is not None:
            done(number)
        else:
            self._request(Type.CREATESUB, name, done)

    def _number(self, topic: Topic) -> int | None:
        if isinstance(topic, int):
            return topic
        return self.etid or None if topic == SELF else self.topics.number(topic)

    def _subnumber(self, subtopic: Subtopic) -> int | None:
        return self.subtopics.number(subtopic) if isinstance(subtopic, bytes) else subtopic or 0

    # ---- subscriptions

    def subscribe(
        self, topic: Topic, subtopic: Subtopic, handler: Handler | None, done: Callable[[int, int], None]
    ) -> None:
        """Subscribe; messages go to `handler`.

        Args:
            done: called with the IDs of topic and sub-topic, 0 for the topic when the broker denied the request.
        """
        self._subscriptions.add(topic, subtopic, handler)

        def finish(tid: int) -> None:
            stid = self._subnumber(subtopic)
            if tid and stid is not None:
                done(tid, stid)
                return
            self.remove_handler(topic, subtopic)
            done(0, stid or 0)

        is_new = isinstance(subtopic, bytes) and self.subtopics.number(subtopic) is None
        if isinstance(topic, bytes) and topic != SELF:
            if isinstance(subtopic, bytes) and is_new:
                self._request(Type.CREATESUB, subtopic, None)
            self._request(Type.SUBSCRIBE, topic, finish)
        elif isinstance(subtopic, bytes) and is_new:
            self._request(Type.CREATESUB, subtopic, lambda stid: finish(self._number(topic) or 0))
        else:
            self._request(_LOCAL, b"", lambda _: finish(self._number(topic) or 0))

    def unsubscribe(self, topic: Topic) -> None:
        """Remove a subscription with all its handlers; unknown topics are ignored."""
        tid = self._number(topic)
        self._subscriptions.remove_all(topic, tid)
        if tid and tid != self.etid and isinstance(topic, bytes):
            self._send_number(Type.UNSUBSCRIBE, tid)

    def remove_handler(self, topic: Topic, subtopic: Subtopic) -> None:
        """Remove the handler of one sub-topic, or of the whole topic, and with the last one the subscription."""
        self._subscriptions.remove(topic, subtopic)
        if topic not in self._subscriptions:
            self.unsubscribe(topic)

    def route(self, tid: int, subtid: int) -> Handler | None:
        """Return the handler for a message: that of the sub-topic, else that of the topic, else None."""
        return self._subscriptions.find(tid, subtid)

    # ---- observers

    def observe(self, topic: Topic, on_change: Callable[[int], None]) -> None:
        """Call `on_change(subscribers)` when the count of a topic changes, or the client of an ETID disconnects."""
        number = self._number(topic)
        if topic == SELF or (number is not None and number == self.etid):
            return
        self._observers[topic] = on_change
        if number:
            self._send_number(Type.OBSERVE, number)
        elif isinstance(topic, bytes):
            self._request_number(Type.CREATE, topic)

    def unobserve(self, topic: Topic) -> None:
        """Stop observing; topics that are not observed are ignored."""
        if self._observers.pop(topic, None) and (number := self._number(topic)):
            self._send_number(Type.UNOBSERVE, number)

    def changed(self, change: Change) -> Callable[[int], None] | None:
        """Return the observer of a Change packet; remove the observer of an ETID, which changes only once."""
        name = self.topics.name(change.tid)
        if name in self._observers:
            return self._observers[name]
        if change.subscribers == 0 and name is None:
            return self._observers.pop(change.tid, None)
        return self._observers.get(change.tid)

    # ---- outgoing messages

    def has_room(self, payload_bytes: int) -> bool:
        """Return whether the send queue has room for a message."""
        return self.waiting_bytes + payload_bytes + smq.PUBLISH_HEADER_BYTES <= self._queue_bytes

    def publish(self, payload: bytes, topic: Topic, subtopic: Subtopic) -> bool:
        """Send a message, or hold it until its names have numbers. Return False for a message that was dropped."""
        if not self.has_room(len(payload)):
            self.dropped += 1
            return False
        if not self._held and self._protocol is not None and self._send_publish(payload, topic, subtopic):
            return True
        if isinstance(topic, bytes) and topic != SELF and self.topics.number(topic) is None:
            self._request_number(Type.CREATE, topic)
        if isinstance(subtopic, bytes) and self.subtopics.number(subtopic) is None:
            self._request_number(Type.CREATESUB, subtopic)
        held = _HeldMessage(payload, topic, subtopic)
        self._held.append(held)
        self._held_bytes += held.size_bytes
        return True

    @property
    def has_held(self) -> bool:
        """Whether messages are held until there is a connection or a number."""
        return bool(self._held)

    @property
    def waiting_bytes(self) -> int:
        """The size of the unsent messages and requests."""
        return self._held_bytes + (self._protocol.unsent_bytes if self._protocol else 0)

    def when_drained(self, fn: Callable[[], object]) -> None:
        """Call `fn` as soon as the client is connected, every request is answered and no message is held."""
        self._when_drained.append(fn)
        self._progress()

    def forget_drained(self, fn: Callable[[], object]) -> None:
        """Cancel `when_drained`."""
        if fn in self._when_drained:
            self._when_drained.remove(fn)

    def _send_publish(self, payload: bytes, topic: Topic, subtopic: Subtopic) -> bool:
        """Send a message if it can be sent now; return whether it was sent."""
        tid, stid = self._number(topic), self._subnumber(subtopic)
        if self._protocol is None or tid is None or stid is None:
            return False
        self._protocol.send(smq.publish_frame(tid, self.etid, stid, payload))
        self.sent += 1
        return True

    def _progress(self) -> None:
        """Send the held messages whose numbers are known, then call the callbacks that are due."""
        denied = self._denied
        while self._held:
            held = self._held[0]
            if denied and ((Type.CREATE, held.topic) in denied or (Type.CREATESUB, held.subtopic) in denied):
                self.dropped += 1  # the broker denied a name of this message
            elif not self._send_publish(*held):
                break
            self._held_bytes -= self._held.popleft().size_bytes
        if not self._held:
            self._denied.clear()
        while self._when_drained and self.etid and not self._held and not self._requests:
            self._when_drained.popleft()()
        if (on_restored := self._on_restored) and not self._requests.restoring:
            self._on_restored = None
            on_restored()

    # ---- requests and acknowledgements

    def acked(self, ack: Ack) -> None:
        """Process the acknowledgement of Subscribe, Create or Createsub."""
        kind, name = _REQUEST_OF_ACK[ack.kind], ack.name
        request = self._requests.take(kind, name)
        if request is None:
            return
        self._numbering.discard((kind, name))
        if ack.number and kind == Type.CREATESUB:
            self._denied.discard((kind, name))
            self.subtopics.add(name, ack.number)
            self._subscriptions.bind_subtopic(name)
        elif ack.number:
            self._denied.discard((Type.CREATE, name))
            if self.topics.add(name, ack.number):
                self._subscriptions.bind(name)
                if name in self._observers:
                    self._send_number(Type.OBSERVE, ack.number)
            if kind == Type.SUBSCRIBE and name not in self._subscriptions:  # unsubscribed before the acknowledgement
                self._send_number(Type.UNSUBSCRIBE, ack.number)
        elif self._held and kind == Type.SUBSCRIBE:  # a held message may need the number, which Suback did not have
            self._request_number(Type.CREATE, name)
        elif self._held:
            self._denied.add((kind, name))
        if request.done:
            request.done(ack.number)
        self._progress()

    def _request_number(self, kind: Type, name: bytes) -> None:
        """Request the number of a name, once."""
        if (kind, name) not in self._numbering:
            self._numbering.add((kind, name))
            self._denied.discard((kind, name))
            self._request(kind, name, None)

    def _request(self, kind: int, name: bytes, done: Done | None) -> None:
        self._issue(PendingRequest(kind, name, done))

    def _issue(self, request: PendingRequest) -> None:
        """Send a request when connected; otherwise queue it for `open`."""
        if request.kind == _LOCAL and self._protocol is not None and request.done:
            request.done(0)
            return
        self._requests.add(request)
        if request.kind != _LOCAL and self._protocol is not None:
            self._protocol.send_packet(smq.with_name(request.kind, request.name))

    def _send_number(self, kind: Type, number: int) -> None:
        if self._protocol is not None:
            self._protocol.send_packet(smq.with_id(kind, number))
