"""The server's own client (spec: smq §2.4).

It publishes for the application and calls its message handlers. It is an outbox like that of any client; `flush` calls
the handlers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from typing import Any

from smqrt.auth.identity import Identity
from smqrt.broker.deferred import Deferred
from smqrt.broker.mqtt.application import MqttPayload, mqtt_payload
from smqrt.broker.mqtt.messages import MqttBatch
from smqrt.broker.outbox import Drop, Outbox, run_in_background
from smqrt.broker.routes import GuardedRoute, destination, traced
from smqrt.broker.state import BrokerPeer, BrokerState
from smqrt.broker.topics import Route, Topic
from smqrt.wire import smq

Handler = Callable[[bytes, int, int, int], object]
"""`(data, ptid, tid, stid)`. It may return `Deferred`: later messages for this handler then wait, in order."""

CATCH_ALL = -1
"""In place of a sub-topic id: the handler of all sub-topics without a handler of their own."""
HANDLER_BUDGET_BYTES = 16 << 20
"""Bytes that wait for a blocked handler; further messages for it are dropped and counted."""
WAITING_MESSAGE_BYTES = 200
"""Memory of a waiting message besides its payload."""
HANDLING_S = 0.004
"""Time for handlers in the turn in which messages arrive; publishers wait until the rest is handled."""
HANDLED_BY_CLOCK = 4
"""Messages handled between two readings of the clock: a handler may take a millisecond."""
ROUTED_PER_TURN = 20
"""Messages routed before other work: otherwise a hook that publishes for each message would never return."""


class Arrived(bytes):
    """Batch that has arrived from another node.

    Attributes:
        origin: that node.
    """

    origin: object

    def __new__(cls, batch: bytes, origin: object) -> Arrived:
        """Mark a batch with its origin."""
        arrived = super().__new__(cls, batch)
        arrived.origin = origin
        return arrived


def _memory_of(data: bytes) -> int:
    properties = data.batch.properties if isinstance(data, MqttPayload) else b""
    return len(data) + len(properties) + WAITING_MESSAGE_BYTES


class HandlerQueue:
    """Queue of one handler, which is called for one message at a time, even if it blocks.

    Args:
        handler: the handler.
        overflowed: called for each message that is dropped because too many bytes wait.
        once: whether one server of a cluster handles each message.
    """

    __slots__ = ("_busy", "_handler", "_overflowed", "_waiting", "_waiting_bytes", "once")

    def __init__(self, handler: Handler, overflowed: Callable[[], None], once: bool = False) -> None:
        self._handler, self._overflowed, self.once = handler, overflowed, once
        self._busy = False
        self._waiting: deque[tuple[bytes, int, int, int]] = deque()
        self._waiting_bytes = 0

    def deliver(self, data: bytes, ptid: int, tid: int, stid: int) -> None:
        """Call the handler now, or after the earlier messages."""
        if self._busy:
            if self._waiting_bytes > HANDLER_BUDGET_BYTES:
                self._overflowed()
            else:
                self._waiting.append((data, ptid, tid, stid))
                self._waiting_bytes += _memory_of(data)
            return
        answer = self._handler(data, ptid, tid, stid)
        if isinstance(answer, Deferred) and not answer.done:
            self._busy = True
            answer.then(lambda value, error: run_in_background(self._next()))

    @property
    def unhandled(self) -> int:
        """Number of messages that wait or are being handled."""
        return len(self._waiting) + self._busy

    def take(self) -> list[bytes]:
        """Remove and return the messages that wait, as frames; those that do not fit a frame are lost."""
        taken = []
        for data, ptid, tid, stid in self._waiting:
            if len(data) > smq.MAX_PAYLOAD_BYTES:
                self._overflowed()
            else:
                taken.append(smq.publish_frame(tid, ptid, stid, data))
        self._waiting.clear()
        self._waiting_bytes = 0
        return taken

    def _next(self) -> Iterator[None]:
        """Deliver the waiting messages until the handler blocks again."""
        while self._waiting:
            message = self._waiting.popleft()
            self._waiting_bytes -= _memory_of(message[0])
            self._busy = False
            self.deliver(*message)
            if self._busy:
                return
            self._busy = True  # during the `yield`, so that messages of other turns wait behind these
            yield
        self._busy = False


class ServerClient(Outbox):
    """Client behind the publish and subscribe methods of a broker.

    Args:
        broker: the broker.
        topic_id: its ETID; 0 draws one.
        queue_size: maximum number of publishes that wait while an `onpublish` hook has not answered.

    Attributes:
        behind: whether received messages wait for handlers; publishers to the server then wait.
        answers: called first with `(data, ptid, stid)` of each message to the server's ETID. It returns whether the
            message answers a request, so that no handler is called.
        once: ETIDs to which other nodes send the messages that this server handles, by id of a topic subscribed with
            `once`.
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
        self.budget_bytes = 1 << 62  # none: each handler has a budget, and publishers wait for handlers
        self.broker = broker
        self.outbox = self
        self.extra: Any = None
        self.identity: Identity | None = None
        self.answers: Callable[[bytes, int, int], bool] = lambda data, ptid, stid: False
        self.topic = broker.topic_table.ephemeral(topic_id)
        self.topic.add(self)
        self.etid = self.topic.id
        self.topics: dict[int, Topic] = {}
        self.once: dict[int, Topic] = {}
        self._once_topics: dict[int, int] = {}  # the reverse of `once`: topic ids by ETID
        self._once_default: set[int] = set()  # topics with `once` whose messages go to the default handler
        self._handlers: dict[int, dict[int, HandlerQueue]] = {}  # by topic id and sub-topic id
        self._default: HandlerQueue | None = None
        self._queue_size = queue_size
        self._waiting: deque[tuple[int, int, bytes]] = deque()  # published: `(tid, ptid, frame)`
        self._busy = False  # while a message is routed, or its hook has not answered
        self._unread: deque[bytes] = deque()  # received batches
        self._held: list[BrokerPeer] = []  # publishers that wait for the handlers
        self._is_held = False  # see `hold_publishes`
        self.pending: bytes | None = None
        self.behind = False

    # ---- receiving

    def on_message(self, handler: Handler | None) -> None:
        """Set the default handler, for messages without a handler of their own."""
        self._default = HandlerQueue(handler, self._overflowed) if handler else None

    def subscribe(self, topic: Topic, handler: Handler | None, stid: int = CATCH_ALL, once: bool = False) -> None:
        """Subscribe to `topic`.

        Args:
            topic: the topic.
            handler: called for messages with the sub-topic `stid`; None leaves them to the default handler.
            stid: a sub-topic id, or `CATCH_ALL`.
            once: whether only one server of a cluster handles each message.
        """
        once = once and topic is not self.topic
        if handler:  # the former handler, if any, still handles the messages in its queue
            self._handlers.setdefault(topic.id, {})[stid] = HandlerQueue(handler, self._overflowed, once)
        elif once:
            self._once_default.add(topic.id)
        if once and topic.id not in self.once:
            inbox = self.once[topic.id] = self.broker.topic_table.ephemeral()
            inbox.add(self)
            self._once_topics[inbox.id] = topic.id
            topic.forget_routes()
            if self.broker.cluster is not None:
                self.broker.cluster.handles_once(topic, inbox.id)
        if topic is not self.topic and topic.id not in self.topics:
            self.topics[topic.id] = topic
            topic.forget_routes()  # new routes wait for handlers that are behind
            self.broker.subscribed(topic, self)
            if not once:  # otherwise every server would handle the same last values
                self.broker.send_last_values(topic, self)

    @property
    def topic_ids(self) -> Collection[int]:
        """See `BrokerPeer`."""
        return self.topics.keys()

    def is_inbox(self, number: int) -> bool:
        """Whether `number` is an ETID to which other nodes send the messages that this server handles."""
        return number in self._once_topics

    def unsubscribe(self, topic: Topic) -> None:
        """End a subscription and remove its handlers."""
        self._handlers.pop(topic.id, None)
        self._once_default.discard(topic.id)
        inbox = self.once.pop(topic.id, None)
        if inbox is not None:
            del self._once_topics[inbox.id]
            self.broker.topic_table.remove(inbox.id)
            self.broker.topic_table.release(inbox.id)
            inbox.forget_routes()
            if self.broker.cluster is not None:
                self.broker.cluster.handles_once(topic, 0)
        if self.topics.pop(topic.id, None):
            topic.forget_routes()
            self.broker.unsubscribed(topic, self)

    def renumbered(self, old: int, topic: Topic) -> None:
        """Update the tables after the id of a topic changed from `old`."""
        if self.topics.pop(old, None):
            self.topics[topic.id] = topic
        if old in self._handlers:
            self._handlers[topic.id] = self._handlers.pop(old)
        if old in self.once:
            self.once[topic.id] = self.once.pop(old)
            self._once_topics[self.once[topic.id].id] = topic.id

    def flush(self) -> None:
        """Call the handlers for all messages in the queue: for `HANDLING_S` now, then in the next turns."""
        batches, self.queue = self.queue, []
        self._unread.extend(batches)
        if not self.behind:
            self.behind = True
            steps, clock = self._read(), self.broker.clock
            until_s = clock() + HANDLING_S
            while self.behind and clock() < until_s:
                deque(islice(steps, HANDLED_BY_CLOCK), maxlen=0)  # consumes the steps without storing them
            if self.behind:
                run_in_background(steps)
        if b"" in batches:  # see `_route_waiting`
            self._route_waiting()

    def _read(self) -> Iterator[None]:
        while self._unread:
            batch = self._unread.popleft()
            origin = batch.origin if isinstance(batch, Arrived) else None
            mqtt = batch if isinstance(batch, MqttBatch) else None
            for frame in smq.frames(batch):
                self._dispatch(frame, origin, mqtt)
                yield
        self.behind = False
        held, self._held = self._held, []
        for peer in held:
            peer.outbox.resume()

    def hold(self, peer: BrokerPeer) -> bool:
        """Resume the outbox of `peer` when all received messages are handled; return whether `peer` has to wait."""
        if peer is self:  # `publish` of the application does not wait
            return False
        self._held.append(peer)
        return True

    def _dispatch(self, frame: bytes, origin: object, mqtt: MqttBatch | None = None) -> None:
        tid, ptid, stid, data = smq.unpack_publish(frame)
        if mqtt is not None:
            data = mqtt_payload(data if mqtt.large is None else mqtt.large, mqtt)
        if tid == self.etid and self.answers(data, ptid, stid):
            return
        is_sent_here = tid in self._once_topics
        tid = self._once_topics.get(tid, tid)
        handlers = self._handlers.get(tid, {})
        inbox = handlers.get(stid) or handlers.get(CATCH_ALL) or self._default
        is_once = inbox and (inbox.once or (inbox is self._default and tid in self._once_default))
        if is_once and not is_sent_here:
            cluster, topic = self.broker.cluster, self.broker.topic_table.get(tid)
            if cluster is not None and topic is not None and not cluster.handles(topic, frame, origin):
                return
        if inbox:
            inbox.deliver(data, ptid, tid, stid)
        else:
            self.broker.log(None, f"no handler for a message to {tid} from {ptid}: dropping it")

    def _overflowed(self) -> None:
        self.dropped += 1
        self.broker.overflowed(self, Drop.OVER_BUDGET, 1)

    def deliver_default(self, data: bytes, ptid: int, tid: int, stid: int) -> None:
        """Pass a message to the default handler."""
        if self._default:
            self._default.deliver(data, ptid, tid, stid)

    # ---- publishing

    def publish(self, tid: int, ptid: int, frame: bytes) -> int:
        """Route `frame` now, or queue it behind a message whose hook has not answered; return the queue's length.

        The caller may be that hook.
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
        """Return the `(free, used)` places of the publish queue."""
        used = len(self._waiting)
        return self._queue_size - used, used

    def resume(self) -> None:
        """Resume publishing after a hook has answered."""
        self._route_waiting()

    def _route_waiting(self) -> None:
        """Route the queue in order, until it is empty, a hook blocks, or other work is due."""
        if self._is_held:
            return
        waiting, self._busy, blocked = self._waiting, True, False
        try:
            for _ in range(ROUTED_PER_TURN):
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
                self.put(b"")  # an empty batch, so that `flush` calls this method again

    def waiting(self) -> int:
        """Return the number of messages that wait for a hook or for handlers; a batch counts as one."""
        received = len(self._unread) + self.behind + sum(inbox.unhandled for inbox in self._queues())
        return len(self._waiting) + (self._busy and not self._is_held) + received

    # ---- hot restart and migration

    def _queues(self) -> Iterator[HandlerQueue]:
        for handlers in self._handlers.values():
            yield from handlers.values()
        if self._default:
            yield self._default

    def remove_unhandled(self) -> list[bytes]:
        """Remove and return the batches that no handler has received yet, in order."""
        batches = [batch for queue in self._queues() for batch in queue.take()]
        for batch in [*self._unread, *self.queue]:
            # A batch of another node for a topic with `once` is handled there, or sent here again by that node.
            if isinstance(batch, MqttBatch) and batch.large is not None:  # its frame has no payload
                self.broker.stats.drop(Drop.TOO_LARGE, 1)
            elif batch and not (isinstance(batch, Arrived) and int.from_bytes(batch[smq.TID], "big") in self.once):
                batches.append(batch)
        self._unread.clear()
        self.queue = []
        return batches

    def hold_publishes(self) -> None:
        """Hold back messages of the application, until `take_publishes` or `resume_publishing`."""
        self._busy = self._is_held = True

    def take_publishes(self) -> list[tuple[int, int, bytes]]:
        """Remove and return the messages that were held back, as `(tid, ptid, frame)`."""
        taken = list(self._waiting)
        self._waiting.clear()
        if self.pending is not None:  # its hook has not answered; the new broker calls its own hook
            tid, ptid, _, _ = smq.unpack_publish(self.pending)
            taken.insert(0, (tid, ptid, self.pending))
            self.pending = None
        return taken

    def resume_publishing(self) -> None:
        """Undo `hold_publishes`."""
        self._is_held = False
        self._route_waiting()

    def close(self) -> None:
        """Count waiting messages as dropped, and remove the handlers."""
        if self._waiting:
            self.broker.stats.drop(Drop.CLOSED, len(self._waiting))
            self.broker.log(None, f"closed with {len(self._waiting)} messages that waited for onpublish")
        self._waiting.clear()
        self._handlers.clear()
        self._default = None
