"""Per-client send queue.

A queue of batches is flushed once per turn of the event loop. While the transport takes everything, the queue is empty
at the end of each turn. When it does not, the queue grows up to `budget_bytes`. Beyond that, whole messages are
dropped, newest first, for this subscriber only, and counted. `slow.py` has the other policies.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import lru_cache

from smqrt.errors import CloseReason
from smqrt.wire.connection_state import Life
from smqrt.wire.smq import Type

BLOCKED = Life.BLOCKED  # a global: it is looked up for every batch and subscriber

log = logging.getLogger("smqrt")

DEFAULT_BUDGET_BYTES = 1 << 20
GLOBAL_BUDGET_BYTES = 256 << 20
CONTROL_BUDGET_BYTES = 256 << 10
"""Control packets are never dropped; a client with more of them beyond its budget is disconnected."""
ROUNDS_PER_TURN = 20
"""How often in one turn messages may cause further messages before other events are handled."""
FLUSHED_AT_ONCE = 64
"""Outboxes that are flushed at the end of a turn; others go to the backlog."""
FLUSHED_BY_CLOCK = 2
"""Outboxes that are flushed between two readings of the clock. A socket may take megabytes at once, which is 6 ms of
work."""
FLUSH_S = 0.006
"""Time for flushing in one turn, and again for the backlog."""
BACKGROUND_S = 0.004
"""Time for background tasks in one turn."""

dirty: list[Outbox] = []
"""Outboxes with something to send in this turn. A plain list, because each batch appends to it."""
ahead: dict[Outbox, None] = {}
"""Outboxes of other nodes that are flushed before all others. A client that has its Suback may have a client of another
worker publish at once; that worker must have received the subscription by then.
"""
backlog: deque[Outbox] = deque()
"""Outboxes that a turn had no time for. While there are any, publishers that send in bulk are not read."""


class Drop(Enum):
    """Why a copy of a message did not reach a subscriber."""

    UNROUTED = "no subscriber"
    SWALLOWED = "rejected by onpublish"
    OVER_RATE = "its publisher is over its rate limit"
    DENIED = "denied by the access control list"
    OVER_BUDGET = "the subscriber's queue is full"
    REPLACED = "replaced in the subscriber's queue by a newer message of its topic and sub-topic"
    OVER_GLOBAL_BUDGET = "all queues together are full"
    CLOSED = "the subscriber disconnected before it was sent"
    QUEUE_FULL = "the server's publish queue is full"
    LINK_LOST = "the link to another node broke before it was confirmed"
    LINK_SLOW = "the queue for another node of the cluster is full"


class QueuedMemory:
    """Bytes in all blocked queues together, and their limit."""

    total_bytes = 0
    limit_bytes = GLOBAL_BUDGET_BYTES


class Outbox:
    """Base of all that receives batches: connections and the server's own client.

    `queue` holds bytes in the form that the transport sends. While `life` is BLOCKED the transport takes nothing; only
    then `queued_bytes` is maintained.
    """

    __slots__ = ("__weakref__", "budget_bytes", "dropped", "life", "queue", "queued_bytes")
    websocket = False
    """Whether the queue holds WebSocket frames."""
    takes_fragments = True
    """Whether the client may send PubFrag packets."""
    torn = 0
    """Non-zero when the client has received the beginning of the first entry already."""

    def __init__(self) -> None:
        self.queue: list[bytes] = []
        self.life = Life.OPEN
        self.queued_bytes = 0
        self.budget_bytes = DEFAULT_BUDGET_BYTES
        self.dropped = 0

    def put(self, batch: bytes) -> None:
        """Append a batch to the queue."""
        queue = self.queue
        if not queue:
            dirty.append(self)
        queue.append(batch)
        if self.life is BLOCKED:
            self.held(batch)

    def put_view(self, view: memoryview) -> None:
        """Send or queue a large batch whose memory is reused after the call."""
        self.put(bytes(view))

    @property
    def carrier(self) -> Outbox | None:
        """Outbox that `flush` passes the queue to; None when `flush` writes to a transport."""
        return None

    def reply(self, packet: bytes) -> None:
        """Queue a control packet, in order with the messages."""
        raise AssertionError("an outbox without a client takes no control packets")

    def flush(self) -> None:
        """Pass the queue to the transport."""
        raise AssertionError("flush is for outboxes with a transport")

    def settled(self) -> None:
        """Called once the client is accepted or refused; connections override it."""

    def finish(self, reason: CloseReason) -> None:
        """Send what the transport takes and close the connection."""

    def resume(self) -> None:
        """Resume reading after a hook has answered, or after backpressure."""

    def held(self, batch: bytes) -> None:
        """Count a batch that was appended to the blocked queue, and drop what exceeds the budget."""
        size = len(batch)
        self.queued_bytes += size
        QueuedMemory.total_bytes += size
        over_all = QueuedMemory.total_bytes > QueuedMemory.limit_bytes
        if self.queued_bytes > self.budget_bytes or over_all:
            self.trim(batch, Drop.OVER_GLOBAL_BUDGET if over_all else Drop.OVER_BUDGET)
            if self.queued_bytes > self.budget_bytes + CONTROL_BUDGET_BYTES:
                self.overloaded()

    def released(self, size: int) -> None:
        """Count `size` bytes that left the blocked queue."""
        self.queued_bytes -= size
        QueuedMemory.total_bytes -= size

    def trim(self, batch: bytes, reason: Drop) -> None:
        """Drop messages of `batch`, the last entry, that exceed the budget; all of them for the global budget."""
        room = len(batch) - max(self.queued_bytes - self.budget_bytes, 0)
        kept, dropped = self.fitting(batch, 0 if reason is Drop.OVER_GLOBAL_BUDGET else room)
        self.queue.pop()
        if kept:
            self.queue.append(kept)
        self.released(len(batch) - len(kept))
        if dropped:
            self.dropped += dropped
            self.overflowed(reason, dropped)

    def fitting(self, batch: bytes, room_bytes: int) -> tuple[bytes, int]:
        """Return the leading messages of `batch` that fit into `room_bytes`, and the number of the others.

        A control packet, which is a batch of its own, is returned whole.
        """
        if not self.is_message(batch, 0):
            return batch, 0
        ends = frame_ends(batch, self.frame_bytes)
        fitting = bisect_right(ends, room_bytes)
        return batch[: ends[fitting - 1]] if fitting else b"", len(ends) - fitting

    def messages(self, batches: Iterable[bytes]) -> int:
        """Return the number of messages in `batches`."""
        return sum(self.fitting(batch, 0)[1] for batch in batches)

    @staticmethod
    def frame_bytes(batch: bytes, at: int) -> int:
        """Return the size of the frame at `batch[at]`, in the framing of this queue."""
        return batch[at] << 8 | batch[at + 1]

    @staticmethod
    def is_message(batch: bytes, at: int) -> bool:
        """Whether the frame at `batch[at]` is a Publish frame."""
        return batch[at + 2] == Type.PUBLISH

    @staticmethod
    def topic_key(batch: bytes) -> bytes:
        """Return the key of the topic that a batch was published to."""
        return batch[3:7]  # behind length and type

    @staticmethod
    def latest_key(batch: bytes) -> bytes:
        """Return topic and sub-topic of the first message of `batch`."""
        return batch[3:7] + batch[11:15]  # the publisher id is between them

    def presses(self) -> None:
        """Called when publishers begin to wait for this client; connections override it."""

    def overflowed(self, reason: Drop, messages: int) -> None:
        """Called when messages were dropped; connections count and log it."""

    def overloaded(self) -> None:
        """Called when control packets alone exceed their budget."""


@lru_cache(maxsize=32)
def frame_ends(batch: bytes, frame_bytes: Callable[[bytes, int], int]) -> array[int]:
    """Return where the frames of `batch` end. Cached, because slow subscribers of a topic get the same batches."""
    ends, at = array("I"), 0
    while at < len(batch):
        at += frame_bytes(batch, at)
        ends.append(at)
    return ends


class BackgroundTasks:
    """Work that is too long for one turn of the loop, as generators.

    They run one after the other in the order they were added, a few milliseconds per turn.
    """

    def __init__(self) -> None:
        self._steps: deque[Iterator[None]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, steps: Iterator[None]) -> None:
        """Add a generator behind those that are there. What it raises is logged and ends it."""
        self._steps.append(steps)

    def work(self, clock: Callable[[], float]) -> None:
        """Run generators for `BACKGROUND_S` on `clock`, which returns seconds, or until none is left."""
        until_s = clock() + BACKGROUND_S
        while self._steps:
            try:
                for _ in self._steps[0]:
                    if clock() >= until_s:
                        return
            except Exception:
                log.exception("error in a background task")
            self._steps.popleft()


_background = BackgroundTasks()
_wake = Outbox()
"""An outbox that never has anything to send: in `dirty` it makes the loop run another turn."""


def run_in_background(steps: Iterator[None]) -> None:
    """Run a generator in the next turns, a few milliseconds in each (see `BackgroundTasks`)."""
    _background.add(steps)
    dirty.append(_wake)


def _queued_bytes(outbox: Outbox) -> int:
    # The sum is taken here, because `queued_bytes` is maintained for blocked outboxes only.
    queue = outbox.queue
    return len(queue[0]) if len(queue) == 1 else sum(map(len, queue))


def _stopped_clock() -> float:
    return 0.0


def _flush_ahead() -> None:
    outboxes: list[Outbox | None] = list(ahead)
    ahead.clear()
    while outboxes:
        sending = [outbox for outbox in outboxes if outbox is not None and outbox.queue and outbox.life is not BLOCKED]
        for outbox in sending:
            outbox.flush()
        outboxes = list(dict.fromkeys(outbox.carrier for outbox in sending))  # several may share a carrier


def flush_dirty(clock: Callable[[], float] = _stopped_clock) -> bool:
    """End a turn of the loop: run background tasks for a while, then flush all outboxes that have something to send.

    Flushing the server's own client runs handlers, which may publish; that is flushed too.

    Args:
        clock: returns seconds. The default always returns 0, so that everything is done at once.

    Returns:
        True when something is left for the next turn.
    """
    if ahead:
        _flush_ahead()
    if len(dirty) == 1 and not backlog and not _background:  # nearly every turn of a broker with little load
        outbox = dirty.pop()
        if outbox.queue and outbox.life is not BLOCKED:
            outbox.flush()
        if not dirty:
            return False
    if _background:
        _background.work(clock)
    until_s = clock() + FLUSH_S
    for _ in range(ROUNDS_PER_TURN):
        if ahead:
            _flush_ahead()
        if not dirty:
            break
        if len(dirty) > FLUSHED_AT_ONCE:
            dirty.sort(key=_queued_bytes)  # small messages are not delayed by megabytes for others
        # Copies, because flushing the server's own client adds to `dirty`.
        turn = dirty[:FLUSHED_AT_ONCE]
        late = dirty[FLUSHED_AT_ONCE:]
        dirty.clear()
        at = 0
        while at < len(turn):
            for outbox in turn[at : at + FLUSHED_BY_CLOCK]:
                if outbox.queue and outbox.life is not BLOCKED:
                    outbox.flush()
            at += FLUSHED_BY_CLOCK
            if clock() >= until_s:
                break
        backlog.extend(turn[at:])
        backlog.extend(late)
        if clock() >= until_s:
            break
    if backlog:
        _flush_backlog(clock)
    if _background or backlog:
        dirty.append(_wake)
    return bool(dirty)


def _flush_backlog(clock: Callable[[], float]) -> None:
    until_s = clock() + FLUSH_S
    while backlog:
        for _ in range(min(len(backlog), FLUSHED_BY_CLOCK)):
            outbox = backlog.popleft()
            if outbox.queue and outbox.life is not BLOCKED:
                outbox.flush()
        if clock() >= until_s:
            return
