"""A peer's way out: a queue of batches that is flushed once per turn of the event loop, with a byte budget for peers that
do not read.

The slow-consumer rule: while the transport takes everything, the queue is empty at the end of every turn. When it does
not, the queue fills up to `budget_bytes`; past it whole messages are dropped, newest first, for this subscriber only,
and counted.
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
"""Control packets are never dropped; a client that lets so much of them wait beyond its budget is disconnected."""
ROUNDS_PER_TURN = 20
"""How often in one turn messages may cause further messages, before other events are looked at."""
FLUSHED_AT_ONCE = 64
"""So many outboxes are flushed at the end of a turn; the others are its backlog."""
FLUSHED_BY_CLOCK = 2
"""So many are flushed before the clock is looked at: the socket of a client that does not read may take megabytes at
once, which is 6 ms of work."""
FLUSH_S = 0.006
"""What flushing may take of one turn, and then its backlog."""
CHORES_S = 0.004
"""What chores may take of one turn."""

dirty: list[Outbox] = []
"""Outboxes with something to send in this turn. A plain list, because appending to it is on the path of every batch."""
ahead: dict[Outbox, None] = {}
"""Of those, the ways to other nodes that are flushed before all others: a client that has its answer may have one of
another worker publish at once, and that worker is to know by then what this client subscribes to.
"""
backlog: deque[Outbox] = deque()
"""Outboxes that a turn had no time for. While there are some, publishers that send in bulk are not read."""


class Drop(Enum):
    """Why a copy of a message did not reach a subscriber."""

    UNROUTED = "nobody subscribes"
    SWALLOWED = "onpublish said no"
    OVER_RATE = "its publisher is over the rate it may publish at"
    DENIED = "the access control list says no"
    OVER_BUDGET = "the subscriber's queue is full"
    REPLACED = "a newer message of its topic and sub-topic took its place in the subscriber's queue"
    OVER_GLOBAL_BUDGET = "all queues together are full"
    CLOSED = "the subscriber went away with messages in its queue"
    QUEUE_FULL = "the server's publish queue is full"
    LINK_LOST = "the link to another node of the cluster broke before that had it"
    LINK_SLOW = "another node of the cluster does not keep up: its queue is full"


class QueuedMemory:
    """Bytes held in all blocked queues together; it is what the global cap looks at."""

    total_bytes = 0
    limit_bytes = GLOBAL_BUDGET_BYTES


class Outbox:
    """Base of everything that receives batches: connections and the server's own client.

    `queue` holds bytes ready for the transport. While `life` is BLOCKED the transport takes nothing; then
    `queued_bytes` counts.
    """

    __slots__ = ("__weakref__", "budget_bytes", "dropped", "life", "queue", "queued_bytes")
    websocket = False
    """Whether the queue holds WebSocket frames."""
    takes_fragments = True
    """Whether PubFrag is allowed."""
    torn = 0
    """Whether the client has the head of the first entry already."""

    def __init__(self) -> None:
        self.queue: list[bytes] = []
        self.life = Life.OPEN
        self.queued_bytes = 0
        self.budget_bytes = DEFAULT_BUDGET_BYTES
        self.dropped = 0

    def put(self, batch: bytes) -> None:
        """Queue `batch` behind what is there already."""
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
        """The outbox that `flush` hands the queue to; None when that writes."""
        return None

    def reply(self, packet: bytes) -> None:
        """Queue a control packet, in order with the messages."""
        raise AssertionError("an outbox without a client takes no control packets")

    def flush(self) -> None:
        """Hand the queue to the transport."""
        raise AssertionError("an outbox knows its transport")

    def settled(self) -> None:
        """Called once the client is accepted or refused."""

    def finish(self, reason: CloseReason) -> None:
        """Flush what can be flushed and end the connection."""

    def resume(self) -> None:
        """Go on reading after a hook answered."""

    def held(self, batch: bytes) -> None:
        """Account for `batch`, the newest in the blocked queue, and drop what is over the budget."""
        size = len(batch)
        self.queued_bytes += size
        QueuedMemory.total_bytes += size
        over_all = QueuedMemory.total_bytes > QueuedMemory.limit_bytes
        if self.queued_bytes > self.budget_bytes or over_all:
            self.trim(batch, Drop.OVER_GLOBAL_BUDGET if over_all else Drop.OVER_BUDGET)
            if self.queued_bytes > self.budget_bytes + CONTROL_BUDGET_BYTES:
                self.overloaded()

    def released(self, size: int) -> None:
        """Account for `size` bytes that left the blocked queue."""
        self.queued_bytes -= size
        QueuedMemory.total_bytes -= size

    def trim(self, batch: bytes, reason: Drop) -> None:
        """Drop of `batch`, the newest in the queue, what is over the budget; all that is message over the global one."""
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
        """The leading messages of `batch` that fit into `room_bytes`, and how many were left out. A control packet, which
        is a batch of its own, is always kept.
        """
        if not self.is_message(batch, 0):
            return batch, 0
        ends = frame_ends(batch, self.frame_bytes)
        fitting = bisect_right(ends, room_bytes)
        return batch[: ends[fitting - 1]] if fitting else b"", len(ends) - fitting

    def messages(self, batches: Iterable[bytes]) -> int:
        """How many messages `batches` hold."""
        return sum(self.fitting(batch, 0)[1] for batch in batches)

    @staticmethod
    def frame_bytes(batch: bytes, at: int) -> int:
        """The size of the frame at `batch[at]`, in the framing of the queue."""
        return batch[at] << 8 | batch[at + 1]

    @staticmethod
    def is_message(batch: bytes, at: int) -> bool:
        """Whether the frame at `batch[at]` is a Publish frame."""
        return batch[at + 2] == Type.PUBLISH

    @staticmethod
    def topic_key(batch: bytes) -> bytes:
        """The key of the topic that the messages of `batch` were published to."""
        return batch[3:7]

    @staticmethod
    def latest_key(batch: bytes) -> bytes:
        """Topic and sub-topic of the first message of `batch`."""
        return batch[3:7] + batch[11:15]

    def presses(self) -> None:
        """Called when publishers begin to wait for this client."""

    def overflowed(self, reason: Drop, messages: int) -> None:
        """Called when messages were dropped; connections tell the hub and the log."""

    def overloaded(self) -> None:
        """Called when control packets alone are more than may wait."""


@lru_cache(maxsize=32)
def frame_ends(batch: bytes, frame_bytes: Callable[[bytes, int], int]) -> array[int]:
    """Where the frames of `batch` end. Remembered, because all slow subscribers leave out messages of the same batches."""
    ends, at = array("I"), 0
    while at < len(batch):
        at += frame_bytes(batch, at)
        ends.append(at)
    return ends


class BackgroundTasks:
    """Work that is too long for one turn of the loop, as generators: a few milliseconds of it per turn, one after the
    other in the order they came.
    """

    def __init__(self) -> None:
        self._steps: deque[Iterator[None]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, steps: Iterator[None]) -> None:
        """Work off `steps` behind what is there already. What it raises is logged and ends it."""
        self._steps.append(steps)

    def work(self, clock: Callable[[], float]) -> None:
        """Work for `CHORES_S` on `clock`, which gives seconds, or until nothing is left."""
        until_s = clock() + CHORES_S
        while self._steps:
            if not self._advance(self._steps[0], clock, until_s):
                return
            self._steps.popleft()

    def _advance(self, steps: Iterator[None], clock: Callable[[], float], until_s: float) -> bool:
        """Whether `steps` ended in time."""
        try:
            for _ in steps:
                if clock() >= until_s:
                    return False
        except Exception:
            log.exception("error in work that was put off")
        return True


_chores = BackgroundTasks()
_wake = Outbox()
"""Never has anything to send: in `dirty` it says that the next turn has something to do."""


def run_in_background(steps: Iterator[None]) -> None:
    """Work off `steps` in the next turns, a few milliseconds in each (see `BackgroundTasks`)."""
    _chores.add(steps)
    dirty.append(_wake)


def _queued_bytes(outbox: Outbox) -> int:
    queue = outbox.queue
    return len(queue[0]) if len(queue) == 1 else sum(map(len, queue))


def _stopped_clock() -> float:
    return 0.0


def _flush_ahead() -> None:
    outboxes: list[Outbox | None] = list(ahead)
    ahead.clear()
    while outboxes:
        full = [one for one in outboxes if one is not None and one.queue and one.life is not BLOCKED]
        for outbox in full:
            outbox.flush()
        outboxes = list(dict.fromkeys(outbox.carrier for outbox in full))  # which several may share


def flush_dirty(clock: Callable[[], float] = _stopped_clock) -> bool:
    """End a turn: work off a portion of what was put off, then flush every outbox that got something, also what
    handlers of the server's client write meanwhile; true when something is left for the next turn. `clock` gives
    seconds; when it stands still, everything is done at once.
    """
    if ahead:
        _flush_ahead()
    if len(dirty) == 1 and not backlog and not _chores:  # nearly every turn of a broker that is not busy
        outbox = dirty.pop()
        if outbox.queue and outbox.life is not BLOCKED:
            outbox.flush()
        if not dirty:
            return False
    if _chores:
        _chores.work(clock)
    until_s = clock() + FLUSH_S
    for _ in range(ROUNDS_PER_TURN):
        if ahead:
            _flush_ahead()
        if not dirty:
            break
        if len(dirty) > FLUSHED_AT_ONCE:
            dirty.sort(key=_queued_bytes)  # who gets a little does not wait behind those who get megabytes
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
    if _chores or backlog:
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
