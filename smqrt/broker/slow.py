"""Slow-consumer policies: what is dropped when a client's queue is full.

A policy applies to a whole broker or to topics. Every outbox implements `NEWEST` itself (see `outbox.py`). For the
other policies a client that does not read gets a `Backlog`, which records where in the queue droppable messages are. A
dropped entry becomes an empty one, so that the positions of others do not change; many empty entries are removed
together. `Pressure` implements `WAIT`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import lru_cache
from operator import itemgetter
from typing import Protocol

from smqrt.broker.outbox import CONTROL_BUDGET_BYTES, Drop, Outbox, QueuedMemory, run_in_background
from smqrt.wire.mqtt.topics import FilterTree

MAX_CACHED = 65_536
"""Topics whose policy is cached."""
PIECE_BYTES = 16 << 10
"""Size of the pieces in which a long batch is dropped (policy `OLDEST`)."""
MAX_HOLES = 64
"""Empty entries of a queue before they are removed; more while they are at most half of the queue."""


Deliver = Callable[[bytes], object]

log = logging.getLogger("smqrt")


class Slow(Enum):
    """What happens to messages for a client whose queue is full."""

    NEWEST = "newest"
    """The new message is dropped."""
    OLDEST = "oldest"
    """The message that has waited longest is dropped."""
    LATEST = "latest"
    """One message of each topic and sub-topic waits: a new one replaces the one before."""
    DISCONNECT = "disconnect"
    """The client is disconnected."""
    WAIT = "wait"
    """The publishers are not read until there is room."""


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
            if topic is None or topic.name is None:  # one-to-one: a later answer does not replace an earlier one
                return Slow.NEWEST if self.default is Slow.LATEST else self.default
            if len(self._cache) >= MAX_CACHED:
                self._cache.clear()
            policy = self._cache[key] = self.named(topic.name)
        return policy

    def named(self, name: bytes) -> Slow:
        """Return the policy of the topic with this name."""
        found = list(self._tree.match(name.decode("utf-8", "surrogateescape")))
        return min(found, key=itemgetter(0))[1] if found else self.default


class Backlog:
    """Queue positions of one client that does not read; it exists from when its socket blocks until its queue is empty.

    Positions count all entries since the backlog was created, also those that have left the queue since.
    """

    __slots__ = ("_control_bytes", "_holes", "_latest", "_left", "_oldest", "gave_up", "policies")

    def __init__(self, policies: SlowPolicies) -> None:
        self.policies = policies
        self.gave_up = False
        """Whether publishers have waited for this client long enough; new messages are dropped then."""
        self._left = self._holes = self._control_bytes = 0
        self._latest: dict[bytes, int] = {}  # by topic and sub-topic, the position of the newest message
        self._oldest: deque[int] = deque()  # positions that may be dropped, the oldest first

    def take(self, outbox: Outbox, batch: bytes) -> bool:
        """Apply the policy to `batch`, the last entry of the queue; return whether to disconnect the client."""
        if not outbox.is_message(batch, 0):
            # Messages may exceed the budget too, while publishers wait: so control packets are counted apart.
            self._control_bytes += len(batch)
            is_over = outbox.queued_bytes > outbox.budget_bytes + CONTROL_BUDGET_BYTES
            return is_over and self._control_bytes > CONTROL_BUDGET_BYTES
        key = outbox.topic_key(batch)
        policy, entries = self.policies.of(key), 1
        if policy is Slow.LATEST:
            entries = self._replace(outbox, batch)
        elif policy is Slow.OLDEST:
            self._add_oldest(outbox, batch)
        over_all = QueuedMemory.total_bytes > QueuedMemory.limit_bytes
        if not over_all and outbox.queued_bytes <= outbox.budget_bytes:
            return False
        if policy is Slow.DISCONNECT and not over_all:
            return True
        if policy is Slow.OLDEST:
            self._drop_oldest(outbox)
        elif policy is Slow.WAIT and not over_all and not self.gave_up:
            self.policies.pressure.press(outbox, key)
        else:
            self._drop_newest(outbox, entries)
        return False

    def _drop_newest(self, outbox: Outbox, entries: int) -> None:
        """Drop what exceeds the budget from the last entries of the queue, which are those of the newest batch."""
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
        self._close_many_holes(outbox)
        return len(frames)

    # ---- policy `OLDEST`

    def _add_oldest(self, outbox: Outbox, batch: bytes) -> None:
        queue = outbox.queue
        piece_bytes = min(PIECE_BYTES, outbox.budget_bytes >> 4)
        pieces = _pieces(batch, outbox.frame_bytes, piece_bytes) if len(batch) > piece_bytes else (batch,)
        first = self._left + len(queue) - 1
        queue[-1:] = pieces
        self._oldest.extend(range(first, first + len(pieces)))

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
        self._close_many_holes(outbox)

    # ---- the queue

    def _take_out(self, outbox: Outbox, at: int) -> int:
        """Make an entry empty; return how many messages it had."""
        batch = outbox.queue[at]
        outbox.queue[at] = b""
        outbox.released(len(batch))
        self._holes += 1
        return outbox.fitting(batch, 0)[1] if batch else 0

    def left(self, entries: int) -> None:
        """Note that `entries` entries have left the queue at its front."""
        self._left += entries

    def close_holes(self, outbox: Outbox) -> None:
        """Remove the empty entries."""
        if not self._holes:
            return
        self._holes = 0
        places: dict[int, int] = {}
        queue = outbox.queue
        for at, batch in enumerate(queue):
            if batch:
                places[at + self._left] = len(places)
        queue[:] = [batch for batch in queue if batch]
        self._latest = {key: places[at] for key, at in self._latest.items() if at in places}
        self._oldest = deque(places[at] for at in self._oldest if at in places)
        self._left = 0

    def _close_many_holes(self, outbox: Outbox) -> None:
        if self._holes > MAX_HOLES and self._holes * 2 > len(outbox.queue):
            self.close_holes(outbox)


def _first(outbox: Outbox) -> int:
    """Return the first entry that may be dropped: not one that the client has partly received."""
    return 1 if outbox.torn else 0


def _over(outbox: Outbox) -> Drop | None:
    """Return which budget is exceeded, as the reason of a drop."""
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


# ---- backpressure


class WaitingPublisher(Protocol):
    """Client, or the server, that waits to publish."""

    @property
    def outbox(self) -> Outbox: ...


class Pressure:
    """Backpressure: publishers of a topic wait while the queue of a subscriber is full.

    Attributes:
        topics: by topic key, the outboxes that are full. Publishers look here for each batch.
        told: called with true when the first local client is full for a topic, with false when the last one is not.
        lasts_s: how long publishers wait for one client at a stretch.
    """

    lasts_s = 10.0

    def __init__(self) -> None:
        self.told: Callable[[bytes, bool], object] = lambda key, presses: None
        self._elsewhere: set[Outbox] = set()
        """Outboxes of other nodes that have full subscribers."""
        self.topics: dict[bytes, set[Outbox]] = {}
        self._pressing: dict[Outbox, set[bytes]] = {}
        self._waiting: dict[bytes, list[tuple[WaitingPublisher, Deliver, bytes]]] = {}

    def press(self, outbox: Outbox, key: bytes) -> None:
        """Let publishers of a topic wait for `outbox`."""
        if outbox not in self._pressing:
            self._pressing[outbox] = set()
            outbox.presses()
        if key not in self._pressing[outbox]:
            self._pressing[outbox].add(key)
            self.topics.setdefault(key, set()).add(outbox)
            self.told(key, True)

    def press_elsewhere(self, outbox: Outbox, key: bytes) -> None:
        """Let publishers of a topic wait for clients of another node, whose outbox is `outbox`."""
        self._elsewhere.add(outbox)
        self._pressing.setdefault(outbox, set()).add(key)
        self.topics.setdefault(key, set()).add(outbox)

    def release_elsewhere(self, outbox: Outbox, key: bytes) -> None:
        """End `press_elsewhere` of one topic."""
        if key in self._pressing.get(outbox, ()):
            self._pressing[outbox].discard(key)
            self._remove(outbox, key)

    def forget(self, outbox: Outbox) -> None:
        """Remove another node that has left."""
        self.release(outbox)
        self._elsewhere.discard(outbox)

    def forget_elsewhere(self) -> None:
        """Remove all other nodes, before other policies replace these."""
        for outbox in list(self._elsewhere):
            self.forget(outbox)

    def here(self) -> list[bytes]:
        """Return the keys of the topics for which a local client is full."""
        return [key for key, pressing in self.topics.items() if not pressing <= self._elsewhere]

    def wait(self, key: bytes, peer: WaitingPublisher, deliver: Deliver, batch: bytes = b"") -> bool:
        """Call `deliver(batch)` and resume `peer` when no subscriber of the topic is full; return true."""
        self._waiting.setdefault(key, []).append((peer, deliver, batch))
        return True

    def release(self, outbox: Outbox) -> None:
        """Let no publisher wait for `outbox` any longer."""
        for key in self._pressing.pop(outbox, ()):
            self._remove(outbox, key)

    def _remove(self, outbox: Outbox, key: bytes) -> None:
        pressing = self.topics[key]
        pressing.discard(outbox)
        if outbox not in self._elsewhere and pressing <= self._elsewhere:
            self.told(key, False)
        if not pressing:
            del self.topics[key]
            if key in self._waiting:
                run_in_background(self._resume_publishers(key))

    def _resume_publishers(self, key: bytes) -> Iterator[None]:
        waiting = deque(self._waiting.pop(key, ()))
        while waiting:
            if key in self.topics:  # a subscriber is full again
                self._waiting[key] = [*waiting, *self._waiting.get(key, ())]
                return
            peer, deliver, batch = waiting.popleft()
            try:
                if batch:
                    deliver(batch)
            except Exception:  # else the other publishers would wait forever
                log.exception("error while a message was routed; it is lost")
            if key in self.topics:
                self.wait(key, peer, deliver)
            else:
                peer.outbox.resume()
            yield
