"""Last values of topics and sub-topics, for later subscribers.

The newest message of each selected topic is recorded at its delivery: after `onpublish`, and with a journal that
delivers only written messages, after the write. So a new subscriber gets the last delivered message, then all later
ones; no message is missing or sent twice. A message without payload deletes the value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from smqrt.auth.identity import Identity
from smqrt.broker.topics import Route, Topic
from smqrt.errors import ArgumentError
from smqrt.settings.limits import Limit
from smqrt.wire import smq
from smqrt.wire.mqtt.fields import is_topic_filter
from smqrt.wire.mqtt.filter_tree import FilterTree

# ---- The clock that orders last values of several processes and nodes.
#
# It follows the monotonic clock, so that setting the machine's clock has no effect. A later stamp from another node
# advances it, so that all messages published afterwards have a later stamp.

MAX_STAMP = 1 << 62
"""Upper bound of stamps, in µs since 1970."""


class ValueClock:
    """Clock that returns stamps, in µs since 1970."""

    __slots__ = ("_ahead_us", "_monotonic_ns")

    def __init__(self) -> None:
        self._ahead_us = 0
        self._monotonic_ns: Callable[[], int] = lambda: 0

    def follow(self, monotonic_ns: Callable[[], int], time_ns: int) -> None:
        """Follow `monotonic_ns`, beginning at `time_ns`, in ns since 1970."""
        self._monotonic_ns = monotonic_ns
        self._ahead_us = (time_ns - monotonic_ns()) // 1000

    def now(self) -> int:
        """Return the stamp of a message that is published now."""
        return self._monotonic_ns() // 1000 + self._ahead_us

    def heard(self, stamp: int) -> None:
        """Advance the clock beyond a stamp of another node."""
        behind_us = stamp + 1 - self.now()
        if behind_us > 0:
            self._ahead_us += behind_us


clock = ValueClock()
"""The clock of this process; `smqrt.smq` sets the time."""


VALUES = Limit("last_values", "last_value.max_values", "the hub's limit of last values is reached")
MEMORY = Limit("last_value_bytes", "last_value.max_bytes", "the hub's limit of bytes of last values is reached")
OF_TOPIC = Limit("last_values_of_topic", "", "a topic has at most 1,000 last values, and 512 KiB of them")
MAX_TOPIC_VALUES = 1000
MAX_TOPIC_BYTES = 512 << 10
"""Half of the default send queue (1 MiB): a new subscriber gets all values of a topic at once."""
VALUE_BYTES = 200
"""Memory of a value besides its message."""
MAX_DELETIONS = 10_000
"""Deletions that a hub remembers, to reject older values from other nodes; the oldest are forgotten first."""
STAMP_STEP_US = 1000
"""Precision of the stamps that nodes send with messages."""
MAX_CACHED = 65_536
"""Topics whose filter matches are cached."""

Place = tuple[bytes, bytes]
"""Topic id and sub-topic id of a value, four bytes each, as in a message."""


@dataclass(frozen=True, slots=True)
class LastValueLimits:
    """Limits of the last values of one hub."""

    values: int = 100_000
    size_bytes: int = 64 << 20


class ValueStore(Protocol):
    """Storage of last values across restarts."""

    def wake(self) -> None:
        """Write the changes soon, see `LastValues.take_changes`."""


class TopicValues:
    """Last values of one topic.

    Attributes:
        newest: the newest message, as a frame, and its publisher, by sub-topic.
        changed: sub-topics whose value is not on the disk yet.
        stamps: the time when each value was published, see `ValueClock`; 0 when that is unknown.
        deleted: the time when each value was deleted.
    """

    __slots__ = ("_all", "changed", "deleted", "newest", "size_bytes", "stamps", "topic")

    def __init__(self, topic: Topic, of_all: LastValues) -> None:
        self.topic, self._all = topic, of_all
        self.newest: dict[bytes, tuple[bytes, Identity | None]] = {}
        self.stamps: dict[bytes, int] = {}
        self.deleted: dict[bytes, int] = {}
        self.size_bytes = 0
        self.changed: set[bytes] = set()

    def take(self, batch: bytes, source: Identity | None, stamp: int) -> None:
        """Record the newest messages of a batch that was published at `stamp`."""
        if batch[0] << 8 | batch[1] == len(batch):
            self.take_frame(batch, source, stamp)
        else:
            for frame in newest_frames(batch):
                self.take_frame(frame, source, stamp)

    def take_sent(self, batch: bytes, stamp: int) -> None:
        """Record the newest messages of a batch that another node published within `STAMP_STEP_US` after `stamp`.

        A newer value is kept: a batch that waited for a broken link arrives late.
        """
        for frame in newest_frames(batch):
            known = self.stamp(frame[smq.STID])
            if stamp + STAMP_STEP_US >= known:
                self.take_frame(frame, None, max(stamp, known + 1))

    def merge_remote(self, frame: bytes, stamp: int) -> None:
        """Take over the value, or the deletion, of another node if it is newer."""
        stid = frame[smq.STID]
        before = self.newest.get(stid)
        payload, known = frame[smq.PUBLISH_HEADER_BYTES :], before[0][smq.PUBLISH_HEADER_BYTES :] if before else b""
        # With equal stamps the greater payload wins, so that all nodes keep the same value.
        if payload != known and (stamp, payload) > (self.stamp(stid), known):
            self.take_frame(frame, None, stamp)
        elif payload == known and stamp > self.stamp(stid):
            self._stamp(stid, stamp, not payload)

    def stamp(self, stid: bytes) -> int:
        """Return the stamp of a sub-topic's value or deletion; 0 when it is unknown."""
        return self.stamps.get(stid) or self.deleted.get(stid, 0)

    def deletion_frames(self) -> list[bytes]:
        """Return a message without payload for each deleted value."""
        return [_deletion_frame(self.topic, stid) for stid in self.deleted]

    def _stamp(self, stid: bytes, stamp: int, is_deleted: bool) -> None:
        if is_deleted:
            self.stamps.pop(stid, None)
            self.deleted[stid] = stamp
            self._all.remember_deletion(self, stid)
        else:
            self.stamps[stid] = stamp
            if self.deleted.pop(stid, None) is not None:
                self._all.forget_deletion(self, stid)

    def take_frame(self, frame: bytes, source: Identity | None, stamp: int | None = None) -> None:
        """Record one message in place of the one before it; the default stamp is now."""
        stid = frame[11:15]  # `smq.STID` as literals, because this runs for many messages
        has_payload = len(frame) > smq.PUBLISH_HEADER_BYTES
        self._stamp(stid, clock.now() if stamp is None else stamp, not has_payload)
        before = self.newest.get(stid)
        if before is not None and len(before[0]) == len(frame) and has_payload:  # the memory stays the same
            self.newest[stid] = frame, source
        else:
            if before is not None:  # even without room for the new value: an outdated value must not stay
                del self.newest[stid]
                self._account(-1, -len(before[0]) - VALUE_BYTES)
            if has_payload:
                size = len(frame) + VALUE_BYTES
                is_full = len(self.newest) >= MAX_TOPIC_VALUES or self.size_bytes + size > MAX_TOPIC_BYTES
                limit = OF_TOPIC if is_full else self._all.over(size)
                if limit:
                    self.stamps.pop(stid, None)
                    limit.refused(f"the last value of {ascii((self.topic.name or b'')[:64])[1:]}")
                else:
                    self.newest[stid] = frame, source
                    self._account(1, size)
        if not self.changed:
            self._all.changed(self)
        self.changed.add(stid)

    def _account(self, values: int, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        self._all.count += values
        self._all.size_bytes += size_bytes

    def forget(self, stid: bytes) -> None:
        """Forget that a value was deleted."""
        self.deleted.pop(stid, None)
        if not self.changed:
            self._all.changed(self)
        self.changed.add(stid)

    def clear(self) -> None:
        """Remove all values and deletions."""
        self._account(-len(self.newest), -self.size_bytes)
        self.newest.clear()
        self.stamps.clear()
        for stid in self.deleted:
            self._all.forget_deletion(self, stid)
        self.deleted.clear()


def newest_frames(batch: bytes) -> Iterable[bytes]:
    """Return the last frame of each sub-topic in a batch."""
    size = batch[0] << 8 | batch[1]
    count, rest = divmod(len(batch), size)
    # The usual batch: frames of one sensor, with the same length (bytes 0, 1) and sub-topic (11 to 14). Slices compare
    # one byte of all frames at once, which is faster than a loop over the frames.
    if not rest and all(batch[at::size] == batch[at : at + 1] * count for at in (0, 1, 11, 12, 13, 14)):
        return (batch[-size:],)
    starts: dict[bytes, int] = {}
    at, end = 0, len(batch)
    while at < end:
        starts[batch[at + 11 : at + 15]] = at
        at += batch[at] << 8 | batch[at + 1]
    return [batch[at : at + (batch[at] << 8 | batch[at + 1])] for at in starts.values()]


def check_filters(filters: Iterable[str]) -> None:
    """Raise ArgumentError when one of `filters` is not a topic filter."""
    for one in filters:
        if not is_topic_filter(one):
            raise ArgumentError(f"{one!r} is not a filter of topics, such as 'site1/#' or 'site1/+/state'")


class LastValues:
    """Last values of one hub.

    Args:
        filters: topics whose values are recorded: `+` for one level, `#` for the rest.
        limits: limits of number and memory.

    Attributes:
        count, size_bytes: number of values, and their memory.
        permits: `(publisher, topic)` returns whether the publisher may still publish to the topic; by default true.

    Raises:
        ArgumentError: a filter is not valid.
    """

    def __init__(self, filters: Iterable[str], limits: LastValueLimits) -> None:
        self.limits = limits
        self._store: ValueStore | None = None
        self.count = self.size_bytes = 0
        self._deletions: dict[Place, TopicValues] = {}
        self.permits: Callable[[Identity, bytes], bool] = lambda source, name: True
        self._by_key: dict[bytes, TopicValues] = {}
        self._changed: dict[TopicValues, None] = {}
        self.set_filters(filters)

    def set_filters(self, filters: Iterable[str]) -> None:
        """Record the values of these topics from now on; remove those of others."""
        filters = tuple(filters)
        check_filters(filters)
        self._selected: dict[bytes, bool] = {}
        self._tree: FilterTree[bool] = FilterTree()
        for topic_filter in filters:
            self._tree.set(topic_filter, True)
        for values in list(self._by_key.values()):
            if not self.selects(values.topic):
                del self._by_key[values.topic.key]
                values.changed.update(values.newest)
                values.clear()
                self.changed(values)

    def selects_name(self, name: bytes) -> bool:
        """Whether the values of a topic with this name are recorded."""
        return any(self._tree.match(name.decode("utf-8", "surrogateescape")))

    def selects(self, topic: Topic) -> bool:
        """Whether the values of a topic are recorded."""
        chosen = self._selected.get(topic.key)
        if chosen is None:
            if len(self._selected) >= MAX_CACHED:
                self._selected.clear()
            chosen = topic.name is not None and self.selects_name(topic.name)
            self._selected[topic.key] = chosen
        return chosen

    def of(self, topic: Topic) -> TopicValues:
        """Return the values of a topic that is selected."""
        found = self._by_key.get(topic.key)
        if found is None:
            found = self._by_key[topic.key] = TopicValues(topic, self)
        return found

    def over(self, size_bytes: int) -> Limit | None:
        """Return the limit that forbids a new value of `size_bytes`."""
        if self.count >= self.limits.values:
            return VALUES
        return MEMORY if self.size_bytes + size_bytes > self.limits.size_bytes else None

    def initial_frames(self, topic: Topic) -> bytes:
        """Return the frames that a new subscriber of `topic` gets first; empty for none."""
        values = self._by_key.get(topic.key)
        if values is None or not values.newest:
            return b""
        permitted: dict[Identity | None, bool] = {None: True}
        frames = []
        for frame, source in values.newest.values():
            if source not in permitted:
                assert source is not None
                permitted[source] = self.permits(source, topic.name or b"")
            if permitted[source]:
                frames.append(frame)
        return b"".join(frames)

    # ---- the store

    def keep_in(self, store: ValueStore) -> None:
        """Save the values in `store` from now on."""
        self._store = store
        self._changed |= {values: None for values in self if values.changed}  # changes before this call
        if self._changed:
            store.wake()

    def changed(self, values: TopicValues) -> None:
        """Record that `values` has unsaved changes."""
        if self._store is None:
            return
        if not self._changed:
            self._store.wake()
        self._changed[values] = None

    def take_changes(self, max_changes: int) -> dict[Place, tuple[bytes, Identity | None] | None]:
        """Remove and return unsaved changes: the newest message of each place, None for a deleted value."""
        found: dict[Place, tuple[bytes, Identity | None] | None] = {}
        while self._changed and len(found) < max_changes:
            values = next(iter(self._changed))
            while values.changed and len(found) < max_changes:
                stid = values.changed.pop()
                found[values.topic.key, stid] = values.newest.get(stid)
            if not values.changed:
                del self._changed[values]
        return found

    def requeue_changes(self, places: Mapping[Place, object], topic_of: Callable[[bytes], Topic | None]) -> None:
        """Add changes again that `take_changes` returned and the disk did not accept."""
        for key, stid in places:
            topic = topic_of(key)
            # A topic that is no longer selected has no values here, but its values in the file are to be deleted.
            values = self._by_key.get(key) or (TopicValues(topic, self) if topic else None)
            if values:
                if not values.changed:
                    self.changed(values)
                values.changed.add(stid)

    def stamp_at(self, place: Place) -> int:
        """Return the stamp of a place's value or deletion; 0 when it is unknown."""
        values = self._by_key.get(place[0])
        return values.stamp(place[1]) if values else 0

    def remember_deletion(self, values: TopicValues, stid: bytes) -> None:
        """Remember a deletion; forget the oldest one when there are too many."""
        self._deletions.pop((values.topic.key, stid), None)
        if len(self._deletions) >= MAX_DELETIONS:
            place = next(iter(self._deletions))
            self._deletions.pop(place).forget(place[1])
        self._deletions[values.topic.key, stid] = values

    def forget_deletion(self, values: TopicValues, stid: bytes) -> None:
        """Forget a deletion that a new value has replaced."""
        self._deletions.pop((values.topic.key, stid), None)

    def restore(self, topic: Topic, frame: bytes, source: Identity | None, stamp: int = 0) -> None:
        """Restore a value that was saved before a restart, unless there is a newer one or it was deleted since."""
        values, stid = self.of(topic), frame[smq.STID]
        if stid not in values.newest and stid not in values.changed:
            values.take_frame(frame, source, stamp)
            values.changed.discard(stid)

    def unsaved(self) -> Iterator[tuple[Topic, bytes, Identity | None]]:
        """Yield topic, newest message and publisher of each place that the file does not have; all without a file.

        The message of a deleted value has no payload.
        """
        for values in list(self) if self._store is None else self._changed:
            for stid in (*values.newest, *values.deleted) if self._store is None else values.changed:
                frame, source = values.newest.get(stid) or (_deletion_frame(values.topic, stid), None)
                yield values.topic, frame, source

    def __iter__(self) -> Iterator[TopicValues]:
        return iter(self._by_key.values())


def _deletion_frame(topic: Topic, stid: bytes) -> bytes:
    return smq.publish_frame(topic.id, 0, int.from_bytes(stid, "big"), b"")


class LastValueRoute:
    """Route that records messages as last values.

    Args:
        values: last values of the topic.
        route: to the subscribers, if any.
        source: the publisher.
        find_again: resolves the route again at each delivery, for messages that are delivered turns after they were
            published: the subscribers may have changed.
    """

    __slots__ = ("_changed", "_deliver", "_newest", "_source", "_stamps", "_take")

    def __init__(
        self,
        values: TopicValues,
        route: Route,
        source: Identity | None,
        find_again: Callable[[], Route] | None = None,
    ) -> None:
        self._source = source
        self._take, self._newest, self._changed = values.take, values.newest, values.changed
        self._stamps = values.stamps
        self._deliver: Callable[[bytes], bool | None] = route.deliver
        if find_again is not None:
            self._deliver = lambda batch: find_again().deliver(batch)

    def deliver(self, batch: bytes) -> bool | None:
        """Record the newest messages, then deliver the batch."""
        stid = batch[11:15]
        before = self._newest.get(stid)
        # The usual case: one message, as long as the one before, whose place is marked as changed already.
        if (
            before
            and len(before[0]) == len(batch) == batch[0] << 8 | batch[1]
            and stid in self._changed
            and batch[15:16]
        ):
            self._newest[stid] = batch, self._source
            self._stamps[stid] = clock.now()
        else:
            self._take(batch, self._source, clock.now())
        return self._deliver(batch)

    def deliver_view(self, view: memoryview) -> bool | None:
        """See `deliver`."""
        return self.deliver(bytes(view))


class SentValueRoute:
    """Route that records messages of another node as last values.

    Args:
        values: last values of the topic.
        route: to the subscribers, if any.
        heard: returns the stamp of the messages.
    """

    __slots__ = ("_heard", "_route", "_values")

    def __init__(self, values: TopicValues, route: Route, heard: Callable[[], int]) -> None:
        self._values, self._route, self._heard = values, route, heard

    def deliver(self, batch: bytes) -> bool | None:
        """Record the newest messages, then deliver the batch."""
        self._values.take_sent(batch, self._heard())
        return self._route.deliver(batch)

    def deliver_view(self, view: memoryview) -> bool | None:
        """See `deliver`."""
        return self.deliver(bytes(view))
