"""The server's own client: a loopback outbox whose drain calls the application's message handlers (specification:
smq.md §2.4).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from smqrt.broker.hooks import Pending
from smqrt.broker.outbox import Outbox
from smqrt.broker.routes import Guarded, destination
from smqrt.broker.stats import Drop
from smqrt.broker.topics import Route, Topic
from smqrt.wire import smq

if TYPE_CHECKING:
    from smqrt.broker.hub import Hub

Handler = Callable[[bytes, int, int, int], object]
"""`(data, ptid, tid, stid)`. It may answer `Pending`: later messages for it wait, in order."""

CATCH_ALL = -1


class Inbox:
    """Calls one handler, one message after the other, also when the handler has to wait."""

    __slots__ = ("_busy", "_handler", "_waiting")

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._busy = False
        self._waiting: deque[tuple[bytes, int, int, int]] = deque()

    def deliver(self, data: bytes, ptid: int, tid: int, stid: int) -> None:
        """Call the handler now, or after the deliveries before this one."""
        if self._busy:
            self._waiting.append((data, ptid, tid, stid))
            return
        answer = self._handler(data, ptid, tid, stid)
        if isinstance(answer, Pending) and not answer.done:
            self._busy = True
            answer.then(self._next)

    def _next(self, value: object, error: BaseException | None) -> None:
        self._busy = False
        while self._waiting and not self._busy:
            self.deliver(*self._waiting.popleft())


class ServerClient(Outbox):
    """The pseudo peer behind the hub's own publish and subscribe.

    Args:
        hub: the hub.
        topic_id: its ETID, 1 unless the hub wants a random one.
        queue_size: how many publishes may wait for an `onpublish` hook that blocks.
    """

    __slots__ = (
        "_default",
        "_handlers",
        "_queue_size",
        "_waiting",
        "etid",
        "extra",
        "hub",
        "outbox",
        "topic",
        "topics",
    )
    uid = b"SMQ server client"
    info = b""

    def __init__(self, hub: Hub, topic_id: int, queue_size: int) -> None:
        super().__init__()
        self.budget_bytes = 1 << 62
        self.hub = hub
        self.outbox = self
        self.extra: object = None
        self.topic = hub.topics.ephemeral(self, topic_id)
        self.topic.add(self)
        self.etid = self.topic.id
        self.topics: dict[int, Topic] = {}
        self._handlers: dict[int, dict[int, Inbox]] = {}
        self._default: Inbox | None = None
        self._queue_size = queue_size
        self._waiting: deque[tuple[int, int, bytes]] | None = None

    # ---- receiving

    def on_message(self, handler: Handler | None) -> None:
        """Set the global handler, for messages without one of their own."""
        self._default = Inbox(handler) if handler else None

    def subscribe(self, topic: Topic, handler: Handler | None, stid: int = CATCH_ALL) -> None:
        """Receive `topic`; `handler` gets the messages with the sub-topic `stid`, or all that have no handler of their
        own.
        """
        if handler:
            self._handlers.setdefault(topic.id, {})[stid] = Inbox(handler)
        if topic is not self.topic and topic.id not in self.topics:
            self.topics[topic.id] = topic
            topic.add(self)
            topic.notify()

    def unsubscribe(self, topic: Topic) -> None:
        """Stop receiving `topic` and forget its handlers."""
        self._handlers.pop(topic.id, None)
        if self.topics.pop(topic.id, None):
            self.hub.unsubscribed(topic, self)

    def flush(self) -> None:
        """Call the handlers for everything in the queue."""
        runs, self.queue = self.queue, []
        for run in runs:
            for frame in smq.frames(run):
                self._dispatch(frame)

    def _dispatch(self, frame: bytes) -> None:
        tid, ptid, stid, data = smq.unpack_publish(frame)
        handlers = self._handlers.get(tid, {})
        inbox = handlers.get(stid) or handlers.get(CATCH_ALL) or self._default
        if inbox:
            inbox.deliver(data, ptid, tid, stid)
        else:
            self.hub.log(None, f"no handler for a message to {tid} from {ptid}: dropping it")

    def deliver_default(self, data: bytes, ptid: int, tid: int, stid: int) -> None:
        """Give a message to the global handler."""
        if self._default:
            self._default.deliver(data, ptid, tid, stid)

    # ---- publishing

    def publish(self, tid: int, ptid: int, frame: bytes) -> int:
        """Route `frame` now, or queue it behind one that a hook still holds; gives the number of waiting ones."""
        if self._waiting is None:
            self._route(tid, ptid, frame)
        elif len(self._waiting) < self._queue_size:
            self._waiting.append((tid, ptid, frame))
        else:
            self.hub.stats.drop(Drop.QUEUE_FULL, 1)
            self.hub.log(None, f"publish queue full ({self._queue_size}): a message to {tid} was dropped")
        return len(self._waiting or ())

    def queue_room(self) -> tuple[int, int]:
        """`(free, used)` places of the publish queue."""
        used = len(self._waiting or ())
        return self._queue_size - used, used

    def resume(self) -> None:
        """Go on publishing after a hook answered."""
        waiting, self._waiting = self._waiting, None
        while waiting and self._waiting is None:
            self._route(*waiting.popleft())
        if self._waiting is not None and waiting:
            self._waiting.extend(waiting)

    def _route(self, tid: int, ptid: int, frame: bytes) -> None:
        route: Route
        if self.hub.hooks.onpublish:
            route = Guarded(self.hub, tid, ptid, self)
        else:
            route = destination(self.hub, tid, ptid, self)
        if route.deliver(frame):
            self._waiting = deque()
