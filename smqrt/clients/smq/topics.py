"""Topics and sub-topics of a client: their names and ids, and the handlers of its subscriptions, registered by name and
found by id (spec: smq §2.4, delivery rules).

Topics and sub-topics are two separate spaces of names; ids are those of one connection.
"""

from __future__ import annotations

from collections.abc import Callable

from smqrt.errors import ArgumentError
from smqrt.wire.smq import MAX_PACKET_BYTES

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
