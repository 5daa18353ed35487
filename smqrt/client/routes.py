"""Which handler gets a message: registered by name, found by number (specification: smq.md §2.4, delivery rules)."""

from __future__ import annotations

from collections.abc import Callable

SELF = b"self"
"""The topic name that means one's own ETID (specification: smq.md §3)."""

Topic = bytes | int
"""A name, `SELF`, or an id."""
Subtopic = bytes | int | None
Handler = Callable[[bytes, int, int, int], None]
"""Receives `(data, ptid, tid, subtid)`."""
Done = Callable[[int], None]
"""Receives the number the broker gave, 0 when it denied."""

_CATCH_ALL = 0
_MISSING = object()


class Routes:
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
