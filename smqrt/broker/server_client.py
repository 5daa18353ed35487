"""The server's own client: a loopback outbox whose drain calls the application's message handlers (spec:
smq §2.4).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from smqrt.auth.identity import Identity
from smqrt.broker.deferred import Deferred
from smqrt.broker.outbox import Drop, Outbox, run_in_background
from smqrt.broker.routes import GuardedRoute, destination
from smqrt.broker.state import BrokerPeer, BrokerState
from smqrt.broker.topics import Route, Topic
from smqrt.broker.trace import traced
from smqrt.wire import smq

Handler = Callable[[bytes, int, int, int], object]
"""`(data, ptid, tid, stid)`. It may answer `Deferred`: later messages for it wait, in order."""

CATCH_ALL = -1
HANDLER_BUDGET_BYTES = 16 << 20
"""What may wait for a handler that blocks; further messages for it are dropped and counted."""
WAITING_MESSAGE_BYTES = 200
"""What a waiting message takes besides its payload."""
HANDLING_S = 0.004
"""What handling may take of the turn in which messages came; for more, publishers wait."""
HANDLED_BY_CLOCK = 4
"""So many are handled before the clock is looked at: a handler may take a millisecond."""
MESSAGES_IN_A_ROW = 20
"""So many are routed before others have a turn: a hook that publishes at every message would never end."""


class Arrived(bytes):
    """A batch that has come from another node.

    Attributes:
        origin: that node.
    """

    origin: object

    def __new__(cls, batch: bytes, origin: object) -> Arrived:
        """Mark a batch."""
        arrived = super().__new__(cls, batch)
        arrived.origin = origin
        return arrived


class HandlerQueue:
    """Calls one handler, one message after the other, also when the handler has to wait.

    Args:
        handler: the handler.
        overflowed: called for each message that came while too many bytes waited for it.
        once: whether one server of a cluster handles each message.
    """

    __slots__ = ("_busy", "_handler", "_overflowed", "_waiting", "_waiting_bytes", "once")

    def __init__(self, handler: Handler, overflowed: Callable[[], None], once: bool = False) -> None:
        self._handler, self._overflowed, self.once = handler, overflowed, once
        self._busy = False
        self._waiting: deque[tuple[bytes, int, int, int]] = deque()
        self._waiting_bytes = 0

    def deliver(self, data: bytes, ptid: int, tid: int, stid: int) -> None:
        """Call the handler now, or after the deliveries before this one."""
        if self._busy:
            self._wait(data, ptid, tid, stid)
            return
        answer = self._handler(data, ptid, tid, stid)
        if isinstance(answer, Deferred) and not answer.done:
            self._busy = True
            answer.then(lambda value, error: run_in_background(self._next()))

    @property
    def unhandled(self) -> int:
        """How many messages wait, and the one that it handles now."""
        return len(self._waiting) + self._busy

    def _wait(self, data: bytes, ptid: int, tid: int, stid: int) -> None:
        if self._waiting_bytes > HANDLER_BUDGET_BYTES:
            self._overflowed()
            return
        self._waiting.append((data, ptid, tid, stid))
        self._waiting_bytes += len(data) + WAITING_MESSAGE_BYTES

    def take(self) -> list[bytes]:
        """Take away what waits, as frames."""
        taken = [smq.publish_frame(tid, ptid, stid, data) for data, ptid, tid, stid in self._waiting]
        self._waiting.clear()
        self._waiting_bytes = 0
        return taken

    def _next(self) -> Iterator[None]:
        """Deliver what waits, until the handler has to wait again; what comes meanwhile waits behind it."""
        while self._waiting:
            message = self._waiting.popleft()
            self._waiting_bytes -= len(message[0]) + WAITING_MESSAGE_BYTES
            self._busy = False
            self.deliver(*message)
            if self._busy:
                return
            self._busy = True
            yield
        self._busy = False


def _no_answer(data: bytes, ptid: int, stid: int) -> bool:
    return False


class ServerClient(Outbox):
    """The pseudo peer behind the broker's own publish and subscribe.

    `behind` tells whether handlers have not got all messages yet: who publishes to them has to wait.
    `answers(data, ptid, stid)` is asked first about a message to the server's ETID: whether somebody waits for it.

    Args:
        broker: the broker.
        topic_id: its ETID, 1 unless the broker wants a random one.
        queue_size: how many publishes may wait for an `onpublish` hook that has not answered.
    """

    __slots__ = (
        "_busy",
        "_default",
        "_held",
        "_handlers",
        "_is_held",
        "_queue_size",
        "_unread",
        "_waiting",
        "answers",
        "behind",
        "etid",
        "extra",
        "identity",
        "broker",
        "once",
        "_once_default",
        "_once_topics",
        "outbox",
        "pending",
        "topic",
        "topics",
    )
    uid = b"SMQ server client"
    info = b""

    def __init__(self, broker: BrokerState, topic_id: int, queue_size: int) -> None:
        super().__init__()
        self.budget_bytes = 1 << 62
        self.broker = broker
        self.outbox = self
        self.extra: Any = None
        self.identity: Identity | None = None
        self.answers: Callable[[bytes, int, int], bool] = _no_answer
        self.topic = broker.topic_table.ephemeral(topic_id)
        self.topic.add(self)
        self.etid = self.topic.id
        self.topics: dict[int, Topic] = {}
        self.once: dict[int, Topic] = {}
        self._once_topics: dict[int, int] = {}
        self._once_default: set[int] = set()
        self._handlers: dict[int, dict[int, HandlerQueue]] = {}
        self._default: HandlerQueue | None = None
        self._queue_size = queue_size
        self._waiting: deque[tuple[int, int, bytes]] = deque()
        self._busy = False
        self._unread: deque[bytes] = deque()
        self._held: list[BrokerPeer] = []
        self._is_held = False
        self.pending: bytes | None = None
        self.behind = False

    # ---- receiving

    def on_message(self, handler: Handler | None) -> None:
        """Set the global handler, for messages without one of their own."""
        self._default = HandlerQueue(handler, self._overflowed) if handler else None

    def subscribe(self, topic: Topic, handler: Handler | None, stid: int = CATCH_ALL, once: bool = False) -> None:
        """Receive `topic`; `handler` gets the messages with the sub-topic `stid`, or all that have no handler of their
        own. With `once` each message is handled by one server of a cluster.
        """
        once = once and topic is not self.topic
        if handler:
            self._handlers.setdefault(topic.id, {})[stid] = HandlerQueue(handler, self._overflowed, once)
        elif once:
            self._once_default.add(topic.id)
        if once and topic.id not in self.once:
            self._open_inbox(topic)
        if topic is not self.topic and topic.id not in self.topics:
            self.topics[topic.id] = topic
            topic.forget_routes()  # publishers wait for handlers that are behind
            self.broker.subscribed(topic, self)
            if not once:  # each of the servers would hand it to the one
                self.broker.greet(topic, self)

    def _open_inbox(self, topic: Topic) -> None:
        """Have a number to which other nodes send what this server is to handle."""
        inbox = self.once[topic.id] = self.broker.topic_table.ephemeral()
        inbox.add(self)
        self._once_topics[inbox.id] = topic.id
        topic.forget_routes()
        if self.broker.cluster is not None:
            self.broker.cluster.handles_once(topic, inbox.id)

    def is_inbox(self, number: int) -> bool:
        """Whether what other nodes send to `number` is for this server to handle."""
        return number in self._once_topics

    def _close_inbox(self, topic: Topic) -> None:
        self._once_default.discard(topic.id)
        inbox = self.once.pop(topic.id, None)
        if inbox is None:
            return
        del self._once_topics[inbox.id]
        self.broker.topic_table.remove(inbox)
        self.broker.topic_table.release(inbox)
        inbox.forget_routes()
        if self.broker.cluster is not None:
            self.broker.cluster.handles_once(topic, 0)

    def unsubscribe(self, topic: Topic) -> None:
        """Stop receiving `topic` and forget its handlers."""
        self._handlers.pop(topic.id, None)
        self._close_inbox(topic)
        if self.topics.pop(topic.id, None):
            topic.forget_routes()
            self.broker.unsubscribed(topic, self)

    def renumbered(self, old: int, topic: Topic) -> None:
        """A topic whose number was `old` has another one."""
        if self.topics.pop(old, None):
            self.topics[topic.id] = topic
        if old in self._handlers:
            self._handlers[topic.id] = self._handlers.pop(old)
        if old in self.once:
            self.once[topic.id] = self.once.pop(old)
            self._once_topics[self.once[topic.id].id] = topic.id

    def flush(self) -> None:
        """Call the handlers for everything in the queue: a portion now, what is left in the next turns."""
        batches, self.queue = self.queue, []
        self._unread.extend(batches)
        if not self.behind:
            self.behind = True
            self._handle(self._read())
        if b"" in batches:
            self._route_waiting()

    def _handle(self, steps: Iterator[None]) -> None:
        clock = self.broker.clock
        until_s = clock() + HANDLING_S
        while self.behind and clock() < until_s:
            deque(islice(steps, HANDLED_BY_CLOCK), maxlen=0)  # consumes them
        if self.behind:
            run_in_background(steps)

    def _read(self) -> Iterator[None]:
        while self._unread:
            batch = self._unread.popleft()
            origin = batch.origin if isinstance(batch, Arrived) else None
            for frame in smq.frames(batch):
                self._dispatch(frame, origin)
                yield
        self.behind = False
        held, self._held = self._held, []
        for peer in held:
            peer.outbox.resume()

    def hold(self, peer: BrokerPeer) -> bool:
        """Let the outbox of `peer` resume when the handlers are no longer behind; false for the server itself, whose
        application is not made to wait.
        """
        if peer is self:
            return False
        self._held.append(peer)
        return True

    def _dispatch(self, frame: bytes, origin: object) -> None:
        tid, ptid, stid, data = smq.unpack_publish(frame)
        if tid == self.etid and self.answers(data, ptid, stid):
            return
        is_sent_here = tid in self._once_topics
        tid = self._once_topics.get(tid, tid)
        handlers = self._handlers.get(tid, {})
        inbox = handlers.get(stid) or handlers.get(CATCH_ALL) or self._default
        is_once = inbox and (inbox.once or (inbox is self._default and tid in self._once_default))
        if is_once and not is_sent_here and not self._is_ours(tid, frame, origin):
            return
        if inbox:
            inbox.deliver(data, ptid, tid, stid)
        else:
            self.broker.log(None, f"no handler for a message to {tid} from {ptid}: dropping it")

    def _is_ours(self, tid: int, frame: bytes, origin: object) -> bool:
        cluster, topic = self.broker.cluster, self.broker.topic_table.get(tid)
        return cluster is None or topic is None or cluster.handles(topic, frame, origin)

    def _overflowed(self) -> None:
        self.dropped += 1
        self.broker.overflowed(self, Drop.OVER_BUDGET, 1)

    def deliver_default(self, data: bytes, ptid: int, tid: int, stid: int) -> None:
        """Give a message to the global handler."""
        if self._default:
            self._default.deliver(data, ptid, tid, stid)

    # ---- publishing

    def publish(self, tid: int, ptid: int, frame: bytes) -> int:
        """Route `frame` now, or queue it behind one that a hook still looks at, which may be the caller; gives the
        number of waiting ones.
        """
        if not self._busy:
            self._waiting.append((tid, ptid, frame))
            self._route_waiting()
        elif len(self._waiting) < self._queue_size:
            self._waiting.append((tid, ptid, frame))
        else:
            self.broker.stats.drop(Drop.QUEUE_FULL, 1)
            self.broker.log(None, f"publish queue full ({self._queue_size}): a message to {tid} was dropped")
        return len(self._waiting)

    def queue_room(self) -> tuple[int, int]:
        """`(free, used)` places of the publish queue."""
        used = len(self._waiting)
        return self._queue_size - used, used

    def resume(self) -> None:
        """Go on publishing after a hook answered."""
        self._route_waiting()

    def _route_waiting(self) -> None:
        """Route in order until nothing waits, a hook blocks, or it is the turn of others."""
        if self._is_held:
            return
        waiting, self._busy, blocked = self._waiting, True, False
        try:
            for _ in range(MESSAGES_IN_A_ROW):
                if not waiting or blocked:
                    break
                tid, ptid, frame = waiting.popleft()
                through_hook = self.broker.hooks.onpublish is not None
                route: Route = (GuardedRoute if through_hook else destination)(self.broker, tid, ptid, self)
                if self.broker.traces:
                    route = traced(self.broker, route, self.broker.topic_table.get(tid), self)
                blocked = bool(route.deliver(frame))
        except BaseException:
            self._busy = False
            raise
        if not blocked:
            self._busy = bool(waiting)
            if waiting:
                self.put(b"")  # nothing to receive: `flush` goes on here

    def waiting(self) -> int:
        """How many messages wait here: published ones for a hook, received ones for handlers; batches count as one."""
        received = len(self._unread) + self.behind + sum(inbox.unhandled for inbox in self._queues())
        return len(self._waiting) + (self._busy and not self._is_held) + received

    # ---- while the clients go on elsewhere

    def _queues(self) -> Iterator[HandlerQueue]:
        for handlers in self._handlers.values():
            yield from handlers.values()
        if self._default:
            yield self._default

    def take_unhandled(self) -> list[bytes]:
        """Take away the messages that no handler has got yet, in order."""
        batches = [batch for queue in self._queues() for batch in queue.take()]
        batches += [batch for batch in [*self._unread, *self.queue] if batch and not self._is_handled_elsewhere(batch)]
        self._unread.clear()
        self.queue = []
        return batches

    def _is_handled_elsewhere(self, batch: bytes) -> bool:
        return isinstance(batch, Arrived) and int.from_bytes(batch[3:7], "big") in self.once

    def hold_publishes(self) -> None:
        """Let what the application publishes from now on wait for `take_publishes` or `go_on_publishing`."""
        self._busy = self._is_held = True

    def take_publishes(self) -> list[tuple[int, int, bytes]]:
        """Take away what waits: `(tid, ptid, frame)` of each message."""
        taken = list(self._waiting)
        self._waiting.clear()
        if self.pending is not None:  # a hook that no longer counts has it
            tid, ptid, _, _ = smq.unpack_publish(self.pending)
            taken.insert(0, (tid, ptid, self.pending))
            self.pending = None
        return taken

    def go_on_publishing(self) -> None:
        """Take back `hold_publishes`."""
        self._is_held = False
        self._route_waiting()

    def close(self) -> None:
        """Count what still waits as lost, and forget the handlers."""
        if self._waiting:
            self.broker.stats.drop(Drop.CLOSED, len(self._waiting))
            self.broker.log(None, f"closed with {len(self._waiting)} messages that waited for onpublish")
        self._waiting.clear()
        self._handlers.clear()
        self._default = None
