"""Per-client send queue and the policies for slow consumers.

A queue of batches is flushed once per turn of the event loop. While the transport accepts everything, the queue is
empty at the end of each turn. Otherwise it grows up to `budget_bytes`. Beyond that, whole messages are dropped, newest
first, for this subscriber only, and counted. The other slow-consumer policies are below.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from functools import lru_cache
from operator import itemgetter
from typing import Protocol

from smqrt.broker.background import BackgroundTasks, TimeAtOnce
from smqrt.errors import CloseReason
from smqrt.wire.connection_state import Life
from smqrt.wire.mqtt.filter_tree import FilterTree
from smqrt.wire.smq import Type

BLOCKED = Life.BLOCKED  # a global, because each batch and subscriber needs it: faster than the enumeration's attribute

log = logging.getLogger("smqrt")

DEFAULT_BUDGET_BYTES = 1 << 20
GLOBAL_BUDGET_BYTES = 256 << 20
CONTROL_BUDGET_BYTES = 256 << 10
"""Control packets are never dropped. A client with more of them, beyond its budget, is disconnected."""
ROUNDS_PER_TURN = 20
"""Maximum rounds of messages that cause further messages, before other events are handled."""
FLUSHED_AT_ONCE = 64
"""Outboxes that are flushed at the end of a turn; others go to the backlog."""
FLUSHED_BY_CLOCK = 2
"""Outboxes that are flushed between two readings of the clock. A socket may accept megabytes at once, which takes 6 ms.
"""
FLUSH_S = 0.006
"""Time for flushing in one turn, and again for the backlog."""
AT_ONCE_S = 0.002
"""Time for a task that runs at once, as far as it gets (`run_at_once`)."""
ALL_AT_ONCE_S = 0.006
"""Time for all these tasks of a turn: thousands of clients may connect, subscribe or disconnect in it."""

dirty: list[Outbox] = []
"""Outboxes with something to send in this turn. A plain list, because each batch appends to it."""
ahead: dict[Outbox, None] = {}
"""Outboxes of other nodes that are flushed before all others. After a Suback, a client of another worker may publish at
once; that worker must have received the subscription before.
"""
backlog: deque[Outbox] = deque()
"""Outboxes left over when the time of a turn was used up. Until they are flushed, bulk publishers are not read."""


class Drop(Enum):
    """Why a copy of a message did not reach a subscriber."""

    UNROUTED = "no subscriber"
    TOO_LARGE = "larger than an SMQ packet can be"
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


class _EmptyQueue(list[bytes]):
    """See `EMPTY_QUEUE`."""

    def append(self, batch: bytes) -> None:
        """Raise an error: others would send the batch, too."""
        raise AssertionError("the queue of all connections with nothing to send must not change")


EMPTY_QUEUE: list[bytes] = _EmptyQueue()
"""The queue of each connection with nothing to send: a list for each would take 64 bytes. `put` replaces it."""


class Outbox:
    """Base class of the receivers of batches: connections and the server's own client.

    `queue` holds bytes in the form that the transport sends. While `life` is BLOCKED the transport accepts nothing;
    only then `queued_bytes` is maintained.
    """

    __slots__ = ("budget_bytes", "dropped", "life", "queue", "queued_bytes")
    websocket = False
    """Whether the queue holds WebSocket frames."""
    takes_fragments = True
    """Whether the client may send PubFrag packets."""
    protocol = "smq"
    """The protocol of the client: "smq" or "mqtt"."""
    torn = 0
    """Non-zero when the client has received the beginning of the first entry; that entry must not be dropped."""

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
            if queue is EMPTY_QUEUE:
                queue = self.queue = []
        queue.append(batch)
        if self.life is BLOCKED:
            self.held(batch)

    def put_view(self, view: memoryview) -> None:
        """Send or queue a large batch whose memory is reused after the call."""
        self.put(bytes(view))

    @property
    def is_forwarded(self) -> bool:
        """Whether `smq/forwarder.py` receives the client's messages."""
        return False

    @property
    def is_plain(self) -> bool:
        """Whether `smq/forwarder.py` can use it: open, without TLS and without slow-consumer policies."""
        return False

    @property
    def alone(self) -> tuple[Outbox, ...]:
        """The subscribers of a topic to which only this outbox subscribes."""
        return (self,)

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
        """Called once the client is accepted or rejected; connections override it."""

    def finish(self, reason: CloseReason) -> None:
        """Send the part of the queue that the transport accepts at once, and close the connection."""

    def resume(self) -> None:
        """Resume reading after a hook has answered, or after backpressure."""

    def held(self, batch: bytes) -> None:
        """Count a batch that was appended to the blocked queue, and drop messages beyond the budget."""
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
        """Drop the messages of `batch`, the last entry, that exceed the budget; all of them for the global budget."""
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

    def leave_forwarder(self) -> None:
        """Receive the client's messages here again; a route of them has changed. Connections override it."""

    def backpressure_started(self) -> None:
        """Called when publishers begin to wait for this client; connections override it."""

    def backpressure_ended(self) -> None:
        """Called when publishers no longer wait for this client; connections override it."""

    def overflowed(self, reason: Drop, messages: int) -> None:
        """Called when messages were dropped; connections count and log it."""

    def overloaded(self) -> None:
        """Called when control packets alone exceed their budget."""


@lru_cache(maxsize=32)
def frame_ends(batch: bytes, frame_bytes: Callable[[bytes, int], int]) -> array[int]:
    """Return the end offsets of the frames of `batch`. Cached: all slow subscribers of a topic get the same batches."""
    ends, at = array("I"), 0
    while at < len(batch):
        at += frame_bytes(batch, at)
        ends.append(at)
    return ends


_background, _at_once = BackgroundTasks(), TimeAtOnce()
_steps = _background.steps  # each turn asks whether there are any: faster than a method
_wake = Outbox()
"""An outbox with an empty queue: in `dirty` it causes another turn of the loop."""


def run_in_background(steps: Iterator[None]) -> None:
    """Run a generator in the next turns, a few milliseconds per turn (see `BackgroundTasks`)."""
    _background.add(steps)
    dirty.append(_wake)


def run_at_once(steps: Iterator[None], clock: Callable[[], float]) -> None:
    """Run a generator now for `AT_ONCE_S` on `clock`, which returns seconds, and the rest in the next turns.

    When such tasks have used `ALL_AT_ONCE_S` of this turn, all of it runs in the next turns.
    """
    if _at_once.spent_s >= ALL_AT_ONCE_S:
        run_in_background(steps)
        return
    began_s = now_s = clock()
    for _ in steps:
        now_s = clock()
        if now_s - began_s >= AT_ONCE_S:
            run_in_background(steps)
            break
    _at_once.spent_s += now_s - began_s


def _queued_bytes(outbox: Outbox) -> int:
    # Added up here, because `queued_bytes` is maintained for blocked outboxes only.
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
        clock: returns seconds. The default always returns 0, so that no time limit is reached.

    Returns:
        True when something is left for the next turn.
    """
    _at_once.spent_s = 0.0
    if ahead:
        _flush_ahead()
    if len(dirty) == 1 and not backlog and not _steps:  # nearly every turn while the load is low
        outbox = dirty.pop()
        if outbox.queue and outbox.life is not BLOCKED:
            outbox.flush()
        if not dirty:
            return False
    if _steps:
        _background.work(clock)
    until_s = clock() + FLUSH_S
    for _ in range(ROUNDS_PER_TURN):  # more than one round only when handlers of the server publish
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
        flushed = 0
        for outbox in turn:
            if outbox.queue and outbox.life is not BLOCKED:
                outbox.flush()
            flushed += 1
            if flushed % FLUSHED_BY_CLOCK == 0 and clock() >= until_s:
                break
        backlog.extend(turn[flushed:])
        backlog.extend(late)
        if clock() >= until_s:
            break
    if backlog:
        _flush_backlog(clock)
    if _steps or backlog:
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


# ---- Slow-consumer policies
#
# A policy applies to a whole broker or to topics. Every outbox implements `NEWEST`. For the other policies, a slow
# consumer gets a `Backlog`, which records the queue positions of droppable messages. A dropped entry becomes an empty
# one, so that the positions of others do not change; many empty entries are removed together. `Pressure` implements
# `WAIT`.

MAX_CACHED = 65_536
"""Topics whose policy is cached."""
PIECE_BYTES = 16 << 10
"""Size of the pieces into which a long batch is split, so that only its oldest part is dropped (policy `OLDEST`)."""
MAX_EMPTY_ENTRIES = 64
"""Empty entries of a queue before they are removed; more while they are at most half of the queue."""


Deliver = Callable[[bytes], object]


class Slow(Enum):
    """Treatment of messages for a client whose queue is full."""

    NEWEST = "newest"
    """The new message is dropped."""
    OLDEST = "oldest"
    """The message that has waited longest is dropped."""
    LATEST = "latest"
    """One message of each topic and sub-topic waits: a new one replaces the one before."""
    DISCONNECT = "disconnect"
    """The client is disconnected."""
    WAIT = "wait"
    """The publishers are not read until the queue has room."""


class NamedTopic(Protocol):
    """A topic, or the ETID of a client, which has no name."""

    @property
    def name(self) -> bytes | None: ...


class SlowPolicies:
    """Slow-consumer policies of one broker.

    Args:
        topics: the broker's topics by key.
        default: policy of topics that no filter matches, and of messages to one client.
        by_filter: policies by topic filter (`+` for one level, `#` for the rest); the first match applies.
    """

    def __init__(self, topics: Mapping[bytes, NamedTopic], default: Slow, by_filter: Mapping[str, Slow]) -> None:
        self.default = default
        self.pressure = Pressure()
        self._topics = topics
        self._cache: dict[bytes, Slow] = {}
        self._tree: FilterTree[tuple[int, Slow]] = FilterTree()
        for number, (topic_filter, policy) in enumerate(by_filter.items()):
            self._tree.set(topic_filter, (number, policy))

    def of(self, key: bytes) -> Slow:
        """Return the policy of a topic, given by its key."""
        policy = self._cache.get(key)
        if policy is None:
            topic = self._topics.get(key)
            if topic is None or topic.name is None:  # one-to-one: a later message must not replace an earlier one
                return Slow.NEWEST if self.default is Slow.LATEST else self.default
            if len(self._cache) >= MAX_CACHED:
                self._cache.clear()
            policy = self._cache[key] = self.named(topic.name)
        return policy

    def named(self, name: bytes) -> Slow:
        """Return the policy of the topic with this name."""
        found = list(self._tree.match(name.decode("utf-8", "surrogateescape")))
        # The tree returns matches in any order; the number is the place in the settings.
        return min(found, key=itemgetter(0))[1] if found else self.default


class Backlog:
    """Queue positions of one slow consumer, while its socket is blocked.

    Positions count all entries since the backlog was created, including those that have left the queue.
    """

    __slots__ = ("_control_bytes", "_empty_entries", "_latest", "_left", "_oldest", "wait_expired", "policies")

    def __init__(self, policies: SlowPolicies) -> None:
        self.policies = policies
        self.wait_expired = False
        """Whether publishers have waited for the maximum time; new messages are dropped then."""
        self._left = self._empty_entries = self._control_bytes = 0
        self._latest: dict[bytes, int] = {}  # by topic and sub-topic, the position of the newest message
        self._oldest: deque[int] = deque()  # positions that may be dropped, the oldest first

    def take(self, outbox: Outbox, batch: bytes) -> bool:
        """Apply the policy to `batch`, the last entry of the queue; return whether to disconnect the client."""
        if not outbox.is_message(batch, 0):
            # Counted separately: messages may also exceed the budget, while publishers wait.
            self._control_bytes += len(batch)
            is_over = outbox.queued_bytes > outbox.budget_bytes + CONTROL_BUDGET_BYTES
            return is_over and self._control_bytes > CONTROL_BUDGET_BYTES
        key = outbox.topic_key(batch)
        policy, entries = self.policies.of(key), 1
        if policy is Slow.LATEST:
            entries = self._replace(outbox, batch)
        elif policy is Slow.OLDEST:
            queue, piece_bytes = outbox.queue, min(PIECE_BYTES, outbox.budget_bytes >> 4)
            pieces = _pieces(batch, outbox.frame_bytes, piece_bytes) if len(batch) > piece_bytes else (batch,)
            first = self._left + len(queue) - 1
            queue[-1:] = pieces
            self._oldest.extend(range(first, first + len(pieces)))
        over_all = QueuedMemory.total_bytes > QueuedMemory.limit_bytes
        if not over_all and outbox.queued_bytes <= outbox.budget_bytes:
            return False
        if policy is Slow.DISCONNECT and not over_all:
            return True
        if policy is Slow.OLDEST:
            self._drop_oldest(outbox)
        elif policy is Slow.WAIT and not over_all and not self.wait_expired:
            self.policies.pressure.add_local(outbox, key)
        else:
            self._drop_newest(outbox, entries)
        return False

    def _drop_newest(self, outbox: Outbox, entries: int) -> None:
        """Drop messages beyond the budget from the last `entries` of the queue, which are those of the newest batch."""
        for _ in range(entries):
            reason = _over(outbox)
            if reason is None:
                break
            batch = outbox.queue[-1]
            self._latest.pop(outbox.latest_key(batch), None)
            outbox.trim(batch, reason)

    # ---- policy `LATEST`

    def _replace(self, outbox: Outbox, batch: bytes) -> int:
        """Replace earlier messages by the newest ones of the last entry, `batch`; return how many entries these are."""
        queue, first = outbox.queue, _first(outbox)
        frames, messages = _latest_of(batch, outbox.frame_bytes, outbox.latest_key)
        queue.pop()
        outbox.released(len(batch))
        dropped = messages - len(frames)
        for key, frame in frames:
            at = self._latest.get(key, -1) - self._left
            if first <= at < len(queue):
                dropped += self._take_out(outbox, at)
            self._latest[key] = self._left + len(queue)
            queue.append(frame)
            outbox.released(-len(frame))
        if dropped:
            outbox.dropped += dropped
            outbox.overflowed(Drop.REPLACED, dropped)
        self._compact_if_sparse(outbox)
        return len(frames)

    # ---- policy `OLDEST`

    def _drop_oldest(self, outbox: Outbox) -> None:
        queue, first, dropped = outbox.queue, _first(outbox), 0
        reason = _over(outbox)
        while self._oldest and _over(outbox):
            at = self._oldest.popleft() - self._left
            if first <= at < len(queue):
                dropped += self._take_out(outbox, at)
        if dropped and reason:
            outbox.dropped += dropped
            outbox.overflowed(reason, dropped)
        self._compact_if_sparse(outbox)

    # ---- the queue

    def _take_out(self, outbox: Outbox, at: int) -> int:
        """Make an entry empty; return the number of its messages."""
        batch = outbox.queue[at]
        outbox.queue[at] = b""
        outbox.released(len(batch))
        self._empty_entries += 1
        return outbox.fitting(batch, 0)[1] if batch else 0

    def left(self, entries: int) -> None:
        """Record that `entries` entries have left the queue at its front."""
        self._left += entries

    def compact(self, outbox: Outbox) -> None:
        """Remove the empty entries."""
        if not self._empty_entries:
            return
        self._empty_entries = 0
        places: dict[int, int] = {}
        queue = outbox.queue
        for at, batch in enumerate(queue):
            if batch:
                places[at + self._left] = len(places)
        queue[:] = [batch for batch in queue if batch]
        self._latest = {key: places[at] for key, at in self._latest.items() if at in places}
        self._oldest = deque(places[at] for at in self._oldest if at in places)
        self._left = 0

    def _compact_if_sparse(self, outbox: Outbox) -> None:
        if self._empty_entries > MAX_EMPTY_ENTRIES and self._empty_entries * 2 > len(outbox.queue):
            self.compact(outbox)


def _first(outbox: Outbox) -> int:
    """Return the index of the first droppable entry: a partly sent one must be completed."""
    return 1 if outbox.torn else 0


def _over(outbox: Outbox) -> Drop | None:
    """Return the exceeded budget as the reason of a drop; None when there is room."""
    if QueuedMemory.total_bytes > QueuedMemory.limit_bytes:
        return Drop.OVER_GLOBAL_BUDGET
    return Drop.OVER_BUDGET if outbox.queued_bytes > outbox.budget_bytes else None


@lru_cache(maxsize=32)
def _latest_of(
    batch: bytes, frame_bytes: Callable[[bytes, int], int], latest_key: Callable[[bytes], bytes]
) -> tuple[tuple[tuple[bytes, bytes], ...], int]:
    """Return the newest frame of each topic and sub-topic, in order, and the number of frames in the batch.

    Cached, because all slow subscribers get the same batches.
    """
    frames, messages, at = dict[bytes, bytes](), 0, 0
    while at < len(batch):
        end = at + frame_bytes(batch, at)
        frame = batch[at:end]
        key = latest_key(frame)
        frames.pop(key, None)  # so that the newest is inserted at the end
        frames[key] = frame
        messages, at = messages + 1, end
    return tuple(frames.items()), messages


@lru_cache(maxsize=32)
def _pieces(batch: bytes, frame_bytes: Callable[[bytes, int], int], piece_bytes: int) -> tuple[bytes, ...]:
    """Split a batch into pieces of whole frames, of about `piece_bytes` each. Cached, so that outboxes share them."""
    pieces, begin, at = list[bytes](), 0, 0
    while at < len(batch):
        at += frame_bytes(batch, at)
        if at - begin >= piece_bytes:
            pieces.append(batch[begin:at])
            begin = at
    if begin < len(batch):
        pieces.append(batch[begin:])
    return tuple(pieces)


# ---- Backpressure


class WaitingPublisher(Protocol):
    """Client, or the server, that waits to publish."""

    @property
    def outbox(self) -> Outbox: ...


class Pressure:
    """Backpressure: publishers of a topic wait while the queue of a subscriber is full.

    Attributes:
        topics: full outboxes by topic key. Routes check it for each batch.
        on_changed: called with true when the first local client is full for a topic, with false when none is any more.
        max_wait_s: maximum time that publishers wait for one client without a break.
    """

    max_wait_s = 10.0

    def __init__(self) -> None:
        self.on_changed: Callable[[bytes, bool], object] = lambda key, is_full: None
        self._remote: set[Outbox] = set()  # outboxes of other nodes that have full subscribers
        self.topics: dict[bytes, set[Outbox]] = {}
        self._keys: dict[Outbox, set[bytes]] = {}  # the reverse of `topics`: topic keys by full outbox
        self._waiting: dict[bytes, list[tuple[WaitingPublisher, Deliver, bytes]]] = {}

    def add_local(self, outbox: Outbox, key: bytes) -> None:
        """Make publishers of a topic wait for a local client."""
        if outbox not in self._keys:
            self._keys[outbox] = set()
            outbox.backpressure_started()
        if key not in self._keys[outbox]:
            self._keys[outbox].add(key)
            self.topics.setdefault(key, set()).add(outbox)
            self.on_changed(key, True)

    def add_remote(self, outbox: Outbox, key: bytes) -> None:
        """Make publishers of a topic wait for clients of another node; `outbox` is the queue to that node."""
        self._remote.add(outbox)
        self._keys.setdefault(outbox, set()).add(key)
        self.topics.setdefault(key, set()).add(outbox)

    def remove_remote(self, outbox: Outbox, key: bytes) -> None:
        """End `add_remote` of one topic."""
        if key in self._keys.get(outbox, ()):
            self._keys[outbox].discard(key)
            self._remove(outbox, key)

    def forget(self, outbox: Outbox) -> None:
        """Remove the queue to a node that has left."""
        self.release(outbox)
        self._remote.discard(outbox)

    def remove_all_remote(self) -> None:
        """Remove the queues to all other nodes, before new policies replace these."""
        for outbox in list(self._remote):
            self.forget(outbox)

    def here(self) -> list[bytes]:
        """Return the keys of the topics for which the queue of a local client is full."""
        return [key for key, full in self.topics.items() if not full <= self._remote]

    def wait(self, key: bytes, peer: WaitingPublisher, deliver: Deliver, batch: bytes = b"") -> bool:
        """Call `deliver(batch)` and resume `peer` when no subscriber of the topic is full; return true."""
        self._waiting.setdefault(key, []).append((peer, deliver, batch))
        return True

    def release(self, outbox: Outbox) -> None:
        """End the backpressure of `outbox`."""
        keys = self._keys.pop(outbox, None)
        if keys is None:
            return
        outbox.backpressure_ended()
        for key in keys:
            self._remove(outbox, key)

    def _remove(self, outbox: Outbox, key: bytes) -> None:
        full = self.topics[key]
        full.discard(outbox)
        if outbox not in self._remote and full <= self._remote:
            self.on_changed(key, False)
        if not full:
            del self.topics[key]
            if key in self._waiting:
                run_in_background(self._resume_publishers(key))

    def _resume_publishers(self, key: bytes) -> Iterator[None]:
        waiting = deque(self._waiting.pop(key, ()))
        while waiting:
            if key in self.topics:  # a subscriber is full again; the earlier publishers stay in front
                self._waiting[key] = [*waiting, *self._waiting.get(key, ())]
                return
            peer, deliver, batch = waiting.popleft()
            try:
                if batch:
                    deliver(batch)
            except Exception:  # otherwise the other publishers would wait forever
                log.exception("error while a message was routed; it is lost")
            if key in self.topics:
                self.wait(key, peer, deliver)
            else:
                peer.outbox.resume()
            yield
