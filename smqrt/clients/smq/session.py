"""The state of a client that outlives its connections: subscriptions, observers, known names, and messages that wait
for a number. It does no I/O.

A topic is `bytes` (a name), an `int` (an id) or `SELF`. The broker answers one client's requests strictly in order.
After a lost connection they are rebuilt: first what had been reached (Create, Createsub, Subscribe), then what was
still open, so every acknowledgement comes exactly once, in order; with 0 when the client ends before it. An answer that
nobody asked for is let be.

Messages leave in the order of the publish calls, also when the first of them waits for its topic's number.

No packet costs more than its own size, however much is open or held: the broker decides which packets come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from smqrt.clients.smq.protocol import Ack, Change, ClientProtocol
from smqrt.errors import ArgumentError
from smqrt.wire import smq
from smqrt.wire.smq import MAX_PACKET_BYTES, Type

# ---- Topics and sub-topics of a client: their names and ids, and the handlers of its subscriptions, which are
# registered by name and found by id (spec: smq §2.4, delivery rules).
#
# Topics and sub-topics are two separate spaces of names; ids are those of one connection.

SELF = b"self"
"""The topic name that means one's own ETID (spec: smq §3)."""

Topic = bytes | int
"""A name, `SELF`, or an id."""
Subtopic = bytes | int | None
Handler = Callable[[bytes, int, int, int], object]
"""Receives `(data, ptid, tid, subtid)`."""
Done = Callable[[int], None]
"""Receives the number the broker gave, 0 when it denied."""

_MAX_NAME_BYTES = MAX_PACKET_BYTES - 1
_MAX_ID = 0xFFFFFFFF
_CATCH_ALL = 0
_MISSING = object()


def topic_key(topic: object) -> Topic:
    """`topic` as bytes or int.

    Raises:
        ArgumentError: it is neither a name nor an id.
    """
    if isinstance(topic, int) and not isinstance(topic, bool):
        return _id(topic, "topic")
    return _name(topic, "topic")


def subtopic_key(subtopic: object) -> Subtopic:
    """`subtopic` as bytes, int or None.

    Raises:
        ArgumentError: it is neither a name, nor an id, nor None.
    """
    if subtopic is None or subtopic == 0:
        return None
    if isinstance(subtopic, int) and not isinstance(subtopic, bool):
        return _id(subtopic, "subtopic")
    return _name(subtopic, "subtopic")


def _id(number: int, what: str) -> int:
    if not 0 < number <= _MAX_ID:
        raise ArgumentError(f"{what} id {number} must be from 1 to {_MAX_ID}")
    return number


def _name(name: object, what: str) -> bytes:
    if not isinstance(name, str | bytes | bytearray):
        raise ArgumentError(f"{what} must be a name (str or bytes) or an id (int), not {type(name).__name__}")
    key = name.encode() if isinstance(name, str) else bytes(name)
    if len(key) > _MAX_NAME_BYTES:
        raise ArgumentError(f"{what} names have at most {_MAX_NAME_BYTES} bytes, not {len(key)}")
    return key


def to_text(name: bytes | None) -> str | bytes | None:
    """A name as applications see it: str, or bytes when it is not UTF-8."""
    if name is None:
        return None
    try:
        return name.decode()
    except UnicodeDecodeError:
        return name


class NameTable:
    """A two-way table of names and the numbers the broker gave them."""

    __slots__ = ("_ids", "_names")

    def __init__(self) -> None:
        self._ids: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}

    def number(self, name: bytes) -> int | None:
        """The number of `name`, None when the broker has not told it yet."""
        return self._ids.get(name)

    def name(self, number: int) -> bytes | None:
        """The name behind `number`, None when it is not known."""
        return self._names.get(number)

    def add(self, name: bytes, number: int) -> bool:
        """Remember what the broker said; tells whether it is news."""
        if self._ids.get(name) == number:
            return False
        self._ids[name] = number
        self._names[number] = name
        return True

    def take_all(self) -> list[bytes]:
        """Forget every number and return the names, oldest first."""
        names = list(self._ids)
        self._ids.clear()
        self._names.clear()
        return names


class SubscriptionTable:
    """Handlers of subscriptions. Names stay; numbers are bound anew on every connection.

    Args:
        number: gives a topic's number, None while it is not known.
        subnumber: the same for a sub-topic.
    """

    def __init__(self, number: Callable[[Topic], int | None], subnumber: Callable[[Subtopic], int | None]) -> None:
        self._number = number
        self._subnumber = subnumber
        self._handlers: dict[Topic, dict[Subtopic, Handler | None]] = {}
        self._bound: dict[int, dict[int, Handler]] = {}
        self._topics_of: dict[bytes, dict[Topic, None]] = {}

    def __contains__(self, topic: Topic) -> bool:
        return topic in self._handlers

    def names(self) -> list[bytes]:
        """The topics that the broker must know to be subscribed."""
        return [topic for topic in self._handlers if isinstance(topic, bytes) and topic != SELF]

    def find(self, tid: int, subtid: int) -> Handler | None:
        """The sub-topic's handler, else the topic's catch-all, else None."""
        handlers = self._bound.get(tid)
        if handlers is None:
            return None
        return handlers.get(subtid) or handlers.get(_CATCH_ALL)

    def add(self, topic: Topic, subtopic: Subtopic, handler: Handler | None) -> None:
        """Register a handler; None leaves the messages to the client's general one. The last registration wins."""
        self._handlers.setdefault(topic, {})[subtopic or None] = handler
        if isinstance(subtopic, bytes):
            self._topics_of.setdefault(subtopic, {})[topic] = None
        self._bind_one(topic, subtopic or None, handler)

    def remove(self, topic: Topic, subtopic: Subtopic) -> None:
        """Take back one handler; the topic goes with its last."""
        handlers = self._handlers.get(topic, {})
        if handlers.pop(subtopic or None, _MISSING) is not _MISSING:
            self._bind_one(topic, subtopic, None)
            self._forget_use(topic, subtopic)
        if not handlers:
            self._handlers.pop(topic, None)

    def remove_all(self, topic: Topic, tid: int | None) -> None:
        """Take back every handler of a topic."""
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
        """Use the numbers known by now for the handlers of `topic`."""
        tid = self._number(topic)
        if tid is None or topic not in self._handlers:
            return
        numbered = ((self._subnumber(subtopic), handler) for subtopic, handler in self._handlers[topic].items())
        self._bound[tid] = {
            number: handler for number, handler in numbered if number is not None and handler is not None
        }

    def bind_subtopic(self, name: bytes) -> None:
        """A sub-topic got its number: bind the handlers that use it."""
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
        """Bind what needs no answer of the broker: ids, and one's own ETID."""
        for topic in self._handlers:
            if isinstance(topic, int) or topic == SELF:
                self.bind(topic)

    def unbind(self) -> None:
        """Forget every number."""
        self._bound.clear()


_REQUEST_OF_ACK: dict[int, Type] = {
    Type.SUBACK: Type.SUBSCRIBE,
    Type.CREATEACK: Type.CREATE,
    Type.CREATESUBACK: Type.CREATESUB,
}
_NUMBERING = (Type.CREATE, Type.CREATESUB)
_LOCAL = 0
"""A request about one's own ETID: done as soon as there is one."""


class PendingRequest(NamedTuple):
    """What is asked of the broker.

    Attributes:
        kind: packet type; 0 concerns only this client, and is done as soon as there is a connection.
        done: gets the number.
        restores: whether it was answered on an earlier connection already.
    """

    kind: int
    name: bytes
    done: Done | None
    restores: bool = False


class PendingRequests:
    """Requests in their order, found by what they ask for: an answer costs the same however many are open.

    Attributes:
        restoring: how many of them restore what was on an earlier connection.
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
        """Put a request at the end."""
        self._last += 1
        self._requests[self._last] = request
        self._numbers.setdefault((request.kind, request.name), deque()).append(self._last)
        self.restoring += request.restores

    def take(self, kind: int, name: bytes) -> PendingRequest | None:
        """Take out the oldest of that kind and name, None when there is none."""
        numbers = self._numbers.get((kind, name))
        if numbers is None:
            return None
        request = self._requests.pop(numbers.popleft())
        if not numbers:
            del self._numbers[kind, name]
        self.restoring -= request.restores
        return request


class _Held(NamedTuple):
    payload: bytes
    topic: Topic
    subtopic: Subtopic

    @property
    def size_bytes(self) -> int:
        """What it takes of the queue: an empty message is not for nothing."""
        return len(self.payload) + smq.PUBLISH_HEADER_BYTES


class ClientSession:
    """The state of one client over all its connections.

    Args:
        queue_bytes: how much may wait to be sent; more is dropped and counted.
        clean_start: forget everything when the connection is lost.

    Attributes:
        etid: one's own ETID, 0 while not connected.
        dropped: messages that were not sent: no room, topic refused by the broker, or connection lost.
        sent: messages sent on this connection.
        confirmed: how many of them the broker has for certain.
        in_doubt: messages of the last connection that were not sent, or not confirmed; 0 while one stands.
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
        self._asked: set[tuple[int, bytes]] = set()
        self._restored: Callable[[], None] | None = None
        self._subscriptions = SubscriptionTable(self._number, self._subnumber)
        self._observers: dict[Topic, Callable[[int], None]] = {}
        self._held: deque[_Held] = deque()
        self._held_bytes = 0
        self._refused: set[tuple[int, bytes]] = set()
        self._drained: deque[Callable[[], object]] = deque()

    # ---- connections come and go

    def open(self, protocol: ClientProtocol, etid: int, restored: Callable[[], None]) -> None:
        """A connection stands: ask again for everything; `restored` comes when all is as it was."""
        self._protocol, self.etid, self._restored = protocol, etid, restored
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
        """The connection is gone: numbers are forgotten, wishes are kept (unless this is a clean start)."""
        if self._protocol is not None:
            self.dropped += self._protocol.unsent_publishes()
        self._protocol, self.etid, self._restored = None, 0, None
        self.in_doubt = self.sent - self.confirmed
        self._subscriptions.unbind()
        if self._clean_start:
            self._forget_everything()
        else:
            self._plan_to_restore()

    def abandon(self) -> None:
        """No connection will come any more: what still waits is dropped, and counted; what is asked is denied."""
        self._drop_all_held()
        unanswered, self._requests = self._requests, PendingRequests()
        for request in unanswered:
            if request.done:
                request.done(0)

    def _drop_all_held(self) -> None:
        self.dropped += len(self._held)
        self.in_doubt += len(self._held)
        self._held.clear()
        self._held_bytes = 0
        self._refused.clear()

    def _plan_to_restore(self) -> None:
        still_open = [request for request in self._requests if not request.restores]
        subscribed = self._subscriptions.names()
        plan: list[tuple[int, bytes]] = [
            (Type.CREATE, name) for name in self.topics.take_all() if name not in subscribed
        ]
        plan += [(Type.CREATESUB, name) for name in self.subtopics.take_all()]
        plan += [(Type.SUBSCRIBE, name) for name in subscribed]
        plan += [(request.kind, request.name) for request in self._requests if request.restores]
        open_keys = {(request.kind, request.name) for request in still_open}
        restoring = [
            PendingRequest(kind, name, None, True)
            for kind, name in dict.fromkeys(plan)
            if (kind, name) not in open_keys
        ]
        self._requests = PendingRequests()
        for request in (*restoring, *still_open):
            self._requests.add(request)
        self._asked = {(request.kind, request.name) for request in self._requests if request.kind in _NUMBERING}

    def _forget_everything(self) -> None:
        self._drop_all_held()
        self.topics.take_all()
        self.subtopics.take_all()
        self._subscriptions = SubscriptionTable(self._number, self._subnumber)
        self._requests = PendingRequests()
        self._asked.clear()
        self._observers.clear()

    # ---- names

    def create(self, name: bytes, done: Done) -> None:
        """Have the broker number a topic; `done` comes at once when the number is known."""
        self._resolve(Type.CREATE, name, self.topics.number(name), done)

    def createsub(self, name: bytes, done: Done) -> None:
        """Have the broker number a sub-topic."""
        self._resolve(Type.CREATESUB, name, self.subtopics.number(name), done)

    def _resolve(self, kind: Type, name: bytes, known: int | None, done: Done) -> None:
        if known is None:
            self._request(kind, name, done)
        else:
            done(known)

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
        """Subscribe, messages go to `handler`. `done(tid, stid)` tells the numbers, tid 0 when the broker denied."""
        self._subscriptions.add(topic, subtopic, handler)

        def finish(tid: int) -> None:
            stid = self._subnumber(subtopic)
            if tid and stid is not None:
                done(tid, stid)
            else:
                self._withdraw(topic, subtopic)
                done(0, stid or 0)

        new_subtopic = isinstance(subtopic, bytes) and self.subtopics.number(subtopic) is None
        if isinstance(topic, bytes) and topic != SELF:
            if isinstance(subtopic, bytes) and new_subtopic:
                self._request(Type.CREATESUB, subtopic, None)
            self._request(Type.SUBSCRIBE, topic, finish)
        elif isinstance(subtopic, bytes) and new_subtopic:
            self._request(Type.CREATESUB, subtopic, lambda stid: finish(self._number(topic) or 0))
        else:
            self._request(_LOCAL, b"", lambda _: finish(self._number(topic) or 0))

    def _withdraw(self, topic: Topic, subtopic: Subtopic) -> None:
        self._subscriptions.remove(topic, subtopic)
        if topic not in self._subscriptions:
            self.unsubscribe(topic)

    def unsubscribe(self, topic: Topic) -> None:
        """End a subscription with all its handlers; unknown topics are let be."""
        tid = self._number(topic)
        self._subscriptions.remove_all(topic, tid)
        if tid and tid != self.etid and isinstance(topic, bytes):
            self._send_number(Type.UNSUBSCRIBE, tid)

    def route(self, tid: int, subtid: int) -> Handler | None:
        """The handler for a message: that of the sub-topic, else the topic's, else None."""
        return self._subscriptions.find(tid, subtid)

    # ---- observers

    def observe(self, topic: Topic, on_change: Callable[[int], None]) -> None:
        """Have `on_change(subscribers)` called when the count of `topic` changes, or an ETID goes away."""
        number = self._number(topic)
        if topic == SELF or (number is not None and number == self.etid):
            return
        self._observers[topic] = on_change
        if number:
            self._send_number(Type.OBSERVE, number)
        elif isinstance(topic, bytes):
            self._ask(Type.CREATE, topic)

    def unobserve(self, topic: Topic) -> None:
        """Stop observing; a topic that is not observed is let be."""
        if self._observers.pop(topic, None) and (number := self._number(topic)):
            self._send_number(Type.UNOBSERVE, number)

    def changed(self, change: Change) -> Callable[[int], None] | None:
        """The observer that a Change packet is for. An ETID that went away is observed no longer."""
        name = self.topics.name(change.tid)
        if name in self._observers:
            return self._observers[name]
        if change.subscribers == 0 and name is None:
            return self._observers.pop(change.tid, None)
        return self._observers.get(change.tid)

    # ---- messages out

    def publish(self, payload: bytes, topic: Topic, subtopic: Subtopic) -> bool:
        """Send a message, or hold it until its names have numbers. False: no room, it is dropped and counted."""
        if self.waiting_bytes + len(payload) + smq.PUBLISH_HEADER_BYTES > self._queue_bytes:
            self.dropped += 1
            return False
        if not self._held and self._protocol is not None and self._send_publish(payload, topic, subtopic):
            return True
        if isinstance(topic, bytes) and topic != SELF and self.topics.number(topic) is None:
            self._ask(Type.CREATE, topic)
        if isinstance(subtopic, bytes) and self.subtopics.number(subtopic) is None:
            self._ask(Type.CREATESUB, subtopic)
        held = _Held(payload, topic, subtopic)
        self._held.append(held)
        self._held_bytes += held.size_bytes
        return True

    @property
    def has_held(self) -> bool:
        """Whether messages wait for a connection, or for numbers."""
        return bool(self._held)

    @property
    def waiting_bytes(self) -> int:
        """How much waits to be sent."""
        return self._held_bytes + (self._protocol.unsent_bytes if self._protocol else 0)

    def when_drained(self, fn: Callable[[], object]) -> None:
        """Call `fn` as soon as a connection stands, every request is answered and no message waits for a number."""
        self._drained.append(fn)
        self._progress()

    def forget_drained(self, fn: Callable[[], object]) -> None:
        """Nobody waits for `fn` any more."""
        if fn in self._drained:
            self._drained.remove(fn)

    def _send_publish(self, payload: bytes, topic: Topic, subtopic: Subtopic) -> bool:
        tid, stid = self._number(topic), self._subnumber(subtopic)
        if self._protocol is None or tid is None or stid is None:
            return False
        self._protocol.send(smq.publish_frame(tid, self.etid, stid, payload))
        self.sent += 1
        return True

    def _progress(self) -> None:
        while self._held and (self._is_refused(self._held[0]) or self._send_publish(*self._held[0])):
            self._held_bytes -= self._held.popleft().size_bytes
        if not self._held:
            self._refused.clear()
        while self._drained and self.etid and not self._held and not self._requests:
            self._drained.popleft()()
        if (restored := self._restored) and not self._requests.restoring:
            self._restored = None
            restored()

    def _is_refused(self, held: _Held) -> bool:
        """Whether the broker does not want this message, which is dropped, then."""
        refused = self._refused
        if not refused or ((Type.CREATE, held.topic) not in refused and (Type.CREATESUB, held.subtopic) not in refused):
            return False
        self.dropped += 1
        return True

    # ---- requests and answers

    def acked(self, ack: Ack) -> None:
        """Take the broker's answer to Subscribe, Create or Createsub."""
        kind = _REQUEST_OF_ACK[ack.kind]
        request = self._requests.take(kind, ack.name)
        if request is None:
            return
        self._asked.discard((kind, ack.name))
        if ack.number:
            self._learn(kind, ack.name, ack.number)
        else:
            self._denied(kind, ack.name)
        if request.done:
            request.done(ack.number)
        self._progress()

    def _learn(self, kind: Type, name: bytes, number: int) -> None:
        if kind == Type.CREATESUB:
            self._refused.discard((kind, name))
            self.subtopics.add(name, number)
            self._subscriptions.bind_subtopic(name)
            return
        self._refused.discard((Type.CREATE, name))
        if self.topics.add(name, number):
            self._subscriptions.bind(name)
            if name in self._observers:
                self._send_number(Type.OBSERVE, number)
        if kind == Type.SUBSCRIBE and name not in self._subscriptions:
            self._send_number(Type.UNSUBSCRIBE, number)

    def _denied(self, kind: Type, name: bytes) -> None:
        if not self._held:
            return
        if kind == Type.SUBSCRIBE:  # a message may wait for the number that this would have brought
            self._ask(Type.CREATE, name)
        else:
            self._refused.add((kind, name))

    def _ask(self, kind: Type, name: bytes) -> None:
        if (kind, name) not in self._asked:
            self._asked.add((kind, name))
            self._refused.discard((kind, name))
            self._request(kind, name, None)

    def _request(self, kind: int, name: bytes, done: Done | None) -> None:
        self._issue(PendingRequest(kind, name, done))

    def _issue(self, request: PendingRequest) -> None:
        if request.kind == _LOCAL and self._protocol is not None and request.done:
            request.done(0)
            return
        self._requests.add(request)
        if request.kind != _LOCAL and self._protocol is not None:
            self._protocol.send_packet(smq.with_name(request.kind, request.name))

    def _send_number(self, kind: Type, number: int) -> None:
        if self._protocol is not None:
            self._protocol.send_packet(smq.with_id(kind, number))
