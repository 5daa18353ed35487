"""Slow-consumer policies: what gives way when a client's queue is full, per hub and per topic.

`NEWEST` is what every outbox does by itself (see `outbox.py`). For the others a client that does not read gets a
`Backlog`, which knows where in the queue the messages stand that may go. They go out of the middle: an empty entry
takes their place, so that nothing else moves, and empty entries are taken out when they are many.
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
from smqrt.broker.topics import Topic
from smqrt.wire.mqtt.topics import FilterTree

MAX_CACHED = 65_536
"""Topics whose policy is remembered."""
PIECE_BYTES = 16 << 10
"""Of a long batch that may go, so much goes at once."""
MAX_HOLES = 64
"""Empty entries that a queue may have, or as many as others."""


Deliver = Callable[[bytes], object]

log = logging.getLogger("smqrt")


class Slow(Enum):
    """What happens when messages for a client are more than its queue may hold."""

    NEWEST = "newest"
    """What comes is dropped."""
    OLDEST = "oldest"
    """What has waited for longest is dropped."""
    LATEST = "latest"
    """Of each topic and sub-topic one message waits: the newest takes the place of the one before."""
    DISCONNECT = "disconnect"
    """The client is disconnected."""
    WAIT = "wait"
    """The publishers are not read until there is room."""


class SlowPolicies:
    """The policies of one hub.

    Args:
        topics: the hub's topics by key.
        default: of all topics that no filter names, and of messages to one client.
        by_filter: by topic filter (`+` for one level, `#` for the rest); the first that matches counts.
    """

    def __init__(self, topics: Mapping[bytes, Topic], default: Slow, by_filter: Mapping[str, Slow]) -> None:
        self.default = default
        self.pressure = Pressure()
        self._topics = topics
        self._cache: dict[bytes, Slow] = {}
        self._tree: FilterTree[tuple[int, Slow]] = FilterTree()
        for number, (topic_filter, policy) in enumerate(by_filter.items()):
            self._tree.set(topic_filter, (number, policy))

    def of(self, key: bytes) -> Slow:
        """The policy of a topic, given by its key."""
        policy = self._cache.get(key)
        if policy is None:
            topic = self._topics.get(key)
            if topic is None or topic.name is None:  # one-to-one: what an answer says is in no later one
                return Slow.NEWEST if self.default is Slow.LATEST else self.default
            if len(self._cache) >= MAX_CACHED:
                self._cache.clear()
            policy = self._cache[key] = self.named(topic.name)
        return policy

    def named(self, name: bytes) -> Slow:
        """The policy of the topic with this name."""
        found = list(self._tree.match(name.decode("utf-8", "surrogateescape")))
        return min(found, key=itemgetter(0))[1] if found else self.default


class Backlog:
    """The queue of one client that does not read. Made when its socket is full, gone when the queue is empty.

    Entries are known by how many were there before them since the backlog was made, those that left included.
    """

    __slots__ = ("_control_bytes", "_holes", "_latest", "_left", "_oldest", "gave_up", "policies")

    def __init__(self, policies: SlowPolicies) -> None:
        self.policies = policies
        self.gave_up = False
        """The publishers have waited for this client for long enough: what comes is dropped now."""
        self._left = self._holes = self._control_bytes = 0
        self._latest: dict[bytes, int] = {}
        self._oldest: deque[int] = deque()

    def take(self, outbox: Outbox, batch: bytes) -> bool:
        """Apply the policy to `batch`, the last entry of the queue; true when the client is to be disconnected."""
        if not outbox.is_message(batch, 0):
            self._control_bytes += len(batch)  # messages may be over the budget too, by those that publishers wait with
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
        """Drop of the last entries of the queue what is too much: those of the newest batch."""
        for _ in range(entries):
            reason = _over(outbox)
            if reason is None:
                break
            batch = outbox.queue[-1]
            self._latest.pop(outbox.latest_key(batch), None)
            outbox.trim(batch, reason)

    # ---- keep latest

    def _replace(self, outbox: Outbox, batch: bytes) -> int:
        """Let the newest messages of the batch, the last entry, take the places of those before; gives how many entries
        they are.
        """
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
        self._close_holes(outbox)
        return len(frames)

    # ---- drop oldest

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
        self._close_holes(outbox)

    # ---- the queue

    def _take_out(self, outbox: Outbox, at: int) -> int:
        """Leave out the messages of an entry; gives how many they were."""
        batch = outbox.queue[at]
        outbox.queue[at] = b""
        outbox.released(len(batch))
        self._holes += 1
        return outbox.fitting(batch, 0)[1] if batch else 0

    def left(self, entries: int) -> None:
        """So many entries have left the queue at its front."""
        self._left += entries

    def close_holes(self, outbox: Outbox) -> None:
        """Take the empty entries out."""
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

    def _close_holes(self, outbox: Outbox) -> None:
        if self._holes > MAX_HOLES and self._holes * 2 > len(outbox.queue):
            self.close_holes(outbox)


def _first(outbox: Outbox) -> int:
    """The first entry that may go: not the one whose head the client has already."""
    return 1 if outbox.torn else 0


def _over(outbox: Outbox) -> Drop | None:
    if QueuedMemory.total_bytes > QueuedMemory.limit_bytes:
        return Drop.OVER_GLOBAL_BUDGET
    return Drop.OVER_BUDGET if outbox.queued_bytes > outbox.budget_bytes else None


@lru_cache(maxsize=32)
def _latest_of(
    batch: bytes, frame_bytes: Callable[[bytes, int], int], latest_key: Callable[[bytes], bytes]
) -> tuple[tuple[tuple[bytes, bytes], ...], int]:
    """The newest frame of each topic and sub-topic, in their order, and how many frames the batch has. Remembered,
    because all slow subscribers ask for the same batches.
    """
    frames, messages, at = dict[bytes, bytes](), 0, 0
    while at < len(batch):
        end = at + frame_bytes(batch, at)
        frame = batch[at:end]
        key = latest_key(frame)
        frames.pop(key, None)  # the newest goes to the end
        frames[key] = frame
        messages, at = messages + 1, end
    return tuple(frames.items()), messages


@lru_cache(maxsize=32)
def _pieces(batch: bytes, frame_bytes: Callable[[bytes, int], int], piece_bytes: int) -> tuple[bytes, ...]:
    """The batch in pieces of whole frames, of about `piece_bytes` each. Remembered, so that all share them."""
    pieces, begin, at = list[bytes](), 0, 0
    while at < len(batch):
        at += frame_bytes(batch, at)
        if at - begin >= piece_bytes:
            pieces.append(batch[begin:at])
            begin = at
    if begin < len(batch):
        pieces.append(batch[begin:])
    return tuple(pieces)


# ---- back-pressure


class WaitingPublisher(Protocol):
    """Client, or the server, whose outbox resumes when it may publish again."""

    @property
    def outbox(self) -> Outbox: ...


class Pressure:
    """Who has to wait for whom: the publishers of a topic, while a subscriber of it has more than its queue may hold.

    Attributes:
        topics: by topic, those who have too much. A publisher looks here at every batch.
        told: called when a client here has too much of a topic, and with false when none has any more.
        lasts_s: so long publishers wait for one client at a stretch.
    """

    lasts_s = 10.0

    def __init__(self) -> None:
        self.told: Callable[[bytes, bool], object] = lambda key, presses: None
        self._elsewhere: set[Outbox] = set()
        """The ways to other nodes, whose clients have too much."""
        self.topics: dict[bytes, set[Outbox]] = {}
        self._pressing: dict[Outbox, set[bytes]] = {}
        self._waiting: dict[bytes, list[tuple[WaitingPublisher, Deliver, bytes]]] = {}

    def press(self, outbox: Outbox, key: bytes) -> None:
        """The publishers of a topic have to wait for `outbox`."""
        if outbox not in self._pressing:
            self._pressing[outbox] = set()
            outbox.presses()
        if key not in self._pressing[outbox]:
            self._pressing[outbox].add(key)
            self.topics.setdefault(key, set()).add(outbox)
            self.told(key, True)

    def press_elsewhere(self, way: Outbox, key: bytes) -> None:
        """The publishers of a topic have to wait for clients of another node."""
        self._elsewhere.add(way)
        self._pressing.setdefault(way, set()).add(key)
        self.topics.setdefault(key, set()).add(way)

    def release_elsewhere(self, way: Outbox, key: bytes) -> None:
        """They have not any more."""
        if key in self._pressing.get(way, ()):
            self._pressing[way].discard(key)
            self._no_more(way, key)

    def forget(self, way: Outbox) -> None:
        """Another node is gone."""
        self.release(way)
        self._elsewhere.discard(way)

    def forget_elsewhere(self) -> None:
        """Other policies take the place of these."""
        for way in list(self._elsewhere):
            self.forget(way)

    def here(self) -> list[bytes]:
        """The topics of which a client here has too much."""
        return [key for key, pressing in self.topics.items() if not pressing <= self._elsewhere]

    def wait(self, key: bytes, peer: WaitingPublisher, deliver: Deliver, batch: bytes = b"") -> bool:
        """Call `deliver(batch)` and let `peer` go on when nobody presses on the topic any more; gives true."""
        self._waiting.setdefault(key, []).append((peer, deliver, batch))
        return True

    def release(self, outbox: Outbox) -> None:
        """Nobody has to wait for `outbox` any more."""
        for key in self._pressing.pop(outbox, ()):
            self._no_more(outbox, key)

    def _no_more(self, outbox: Outbox, key: bytes) -> None:
        pressing = self.topics[key]
        pressing.discard(outbox)
        if outbox not in self._elsewhere and pressing <= self._elsewhere:
            self.told(key, False)
        if not pressing:
            del self.topics[key]
            if key in self._waiting:
                run_in_background(self._go_on(key))

    def _go_on(self, key: bytes) -> Iterator[None]:
        waiting = deque(self._waiting.pop(key, ()))
        while waiting:
            if key in self.topics:  # again
                self._waiting[key] = [*waiting, *self._waiting.get(key, ())]
                return
            peer, deliver, batch = waiting.popleft()
            try:
                if batch:
                    deliver(batch)
            except Exception:  # the others must not wait for ever
                log.exception("error while a message was routed; it is lost")
            if key in self.topics:
                self.wait(key, peer, deliver)
            else:
                peer.outbox.resume()
            yield
