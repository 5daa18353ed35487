"""Last values: the newest message of each topic that a filter names, one for each of its sub-topics, for those who
subscribe later.

They are taken where a message meets its subscribers: behind `onpublish`, behind a journal that waits for the disk. So
whoever subscribes gets the newest that was delivered before, and then what is delivered from then on: nothing twice,
nothing left out. A message without payload takes the value away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from smqrt.auth.identity import Identity
from smqrt.broker.topics import Route, Topic
from smqrt.errors import ArgumentError
from smqrt.settings.limit_register import Limit
from smqrt.wire import smq
from smqrt.wire.mqtt.topics import FilterTree, is_topic_filter

# ---- The clock by which last values of several processes and nodes are compared.
#
# It follows the monotonic clock, so that setting the machine's clock changes nothing, and is put forward to whatever
# stamp it hears of, so that what is published after a stamp was heard of is newer than it.

MAX_STAMP = 1 << 62
"""Stamps are below; in µs."""


class ValueClock:
    """Gives stamps, in µs."""

    __slots__ = ("_ahead_us", "_monotonic_ns")

    def __init__(self) -> None:
        self._ahead_us = 0
        self._monotonic_ns: Callable[[], int] = lambda: 0

    def follow(self, monotonic_ns: Callable[[], int], time_ns: int) -> None:
        """Go on as this clock does, from the time it is: ns since 1970."""
        self._monotonic_ns = monotonic_ns
        self._ahead_us = (time_ns - monotonic_ns()) // 1000

    def now(self) -> int:
        """The stamp of what is published now."""
        return self._monotonic_ns() // 1000 + self._ahead_us

    def heard(self, stamp: int) -> None:
        """There is something with that stamp already."""
        behind_us = stamp + 1 - self.now()
        if behind_us > 0:
            self._ahead_us += behind_us


clock = ValueClock()
"""Of this process; whoever brings the sockets brings the time."""


VALUES = Limit("last_values", "last_value.max_values", "the hub keeps as many last values as it may")
MEMORY = Limit("last_value_bytes", "last_value.max_bytes", "the last values of the hub have as many bytes as they may")
OF_TOPIC = Limit("last_values_of_topic", "", "a topic has 1,000 last values, or 512 KiB of them")
TOPIC_VALUES = 1000
TOPIC_BYTES = 512 << 10
"""A new subscriber gets them all at once, and its queue holds 1 MiB unless the hub says otherwise."""
VALUE_BYTES = 200
"""What a value takes besides its message."""
MAX_GONE = 10_000
"""Places of which a hub remembers when their value was taken away, so that no older one of another node comes back; the
one that was remembered longest is forgotten first."""
STAMP_STEP_US = 1000
"""So exactly a node knows when another one published."""
MAX_CACHED = 65_536
"""Topics of which it is remembered whether a filter names them."""

Place = tuple[bytes, bytes]
"""Topic and sub-topic of a value, as they stand in a message."""


@dataclass(frozen=True, slots=True)
class LastValueLimits:
    """How many one hub keeps."""

    values: int = 100_000
    size_bytes: int = 64 << 20


class ValueStore(Protocol):
    """Keeps last values over restarts."""

    def wake(self) -> None:
        """There is something to write (`LastValues.take_changes`)."""
        ...


class TopicValues:
    """The last values of one topic.

    Attributes:
        newest: the newest message, a frame, and its publisher, by sub-topic.
        changed: sub-topics that the disk is to be told of.
        stamps: when each was published, see `ValueClock`; 0 when that is not known.
        gone: when values were taken away.
    """

    __slots__ = ("_all", "changed", "gone", "newest", "size_bytes", "stamps", "topic")

    def __init__(self, topic: Topic, of_all: LastValues) -> None:
        self.topic, self._all = topic, of_all
        self.newest: dict[bytes, tuple[bytes, Identity | None]] = {}
        self.stamps: dict[bytes, int] = {}
        self.gone: dict[bytes, int] = {}
        self.size_bytes = 0
        self.changed: set[bytes] = set()

    def take(self, batch: bytes, source: Identity | None, stamp: int) -> None:
        """Keep what is newest in a batch that was published at `stamp`."""
        if batch[0] << 8 | batch[1] == len(batch):
            self.take_frame(batch, source, stamp)
        else:
            for frame in newest_frames(batch):
                self.take_frame(frame, source, stamp)

    def take_sent(self, batch: bytes, stamp: int) -> None:
        """Keep what is newest in a batch that another node published within `STAMP_STEP_US` after `stamp`, except where
        there is something newer: what waited in a link that was cut comes late.
        """
        for frame in newest_frames(batch):
            known = self.stamp(frame[11:15])
            if stamp + STAMP_STEP_US >= known:
                self.take_frame(frame, None, max(stamp, known + 1))

    def take_told(self, frame: bytes, stamp: int) -> None:
        """Have what another node has, or that it has none, when that is newer."""
        stid = frame[11:15]
        before = self.newest.get(stid)
        payload, known = frame[smq.PUBLISH_HEADER_BYTES :], before[0][smq.PUBLISH_HEADER_BYTES :] if before else b""
        if payload != known and (stamp, payload) > (self.stamp(stid), known):
            self.take_frame(frame, None, stamp)
        elif payload == known and stamp > self.stamp(stid):
            self._stamp(stid, stamp, not payload)

    def stamp(self, stid: bytes) -> int:
        """When the value of a sub-topic was published, or taken away; 0 when that is not known."""
        return self.stamps.get(stid) or self.gone.get(stid, 0)

    def gone_frames(self) -> list[bytes]:
        """For each value that was taken away the message that does it."""
        return [_nothing(self.topic, stid) for stid in self.gone]

    def _stamp(self, stid: bytes, stamp: int, is_gone: bool) -> None:
        if is_gone:
            self.stamps.pop(stid, None)
            self.gone[stid] = stamp
            self._all.remember_gone(self, stid)
        else:
            self.stamps[stid] = stamp
            if self.gone.pop(stid, None) is not None:
                self._all.forget_gone(self, stid)

    def take_frame(self, frame: bytes, source: Identity | None, stamp: int | None = None) -> None:
        """Keep one message, in place of the one before it; without a stamp it is published now."""
        stid = frame[11:15]
        self._stamp(stid, clock.now() if stamp is None else stamp, len(frame) <= smq.PUBLISH_HEADER_BYTES)
        before = self.newest.get(stid)
        if before is not None and len(before[0]) == len(frame) > smq.PUBLISH_HEADER_BYTES:
            self.newest[stid] = frame, source
        else:
            self._resize(stid, frame, source)
        if not self.changed:
            self._all.changed(self)
        self.changed.add(stid)

    def _resize(self, stid: bytes, frame: bytes, source: Identity | None) -> None:
        before = self.newest.pop(stid, None)
        if before is not None:  # also when there is no room for the new one: an old value is a wrong one
            self._account(-1, -len(before[0]) - VALUE_BYTES)
        if len(frame) <= smq.PUBLISH_HEADER_BYTES:
            return
        size = len(frame) + VALUE_BYTES
        limit = OF_TOPIC if self._is_full(size) else self._all.over(size)
        if limit:
            self.stamps.pop(stid, None)
            limit.refused(f"the last value of {ascii((self.topic.name or b'')[:64])[1:]}")
            return
        self.newest[stid] = frame, source
        self._account(1, size)

    def _is_full(self, size_bytes: int) -> bool:
        return len(self.newest) >= TOPIC_VALUES or self.size_bytes + size_bytes > TOPIC_BYTES

    def _account(self, values: int, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        self._all.count += values
        self._all.size_bytes += size_bytes

    def forget(self, stid: bytes) -> None:
        """Forget when a value was taken away."""
        self.gone.pop(stid, None)
        if not self.changed:
            self._all.changed(self)
        self.changed.add(stid)

    def clear(self) -> None:
        """Forget all of them."""
        self._account(-len(self.newest), -self.size_bytes)
        self.newest.clear()
        self.stamps.clear()
        for stid in self.gone:
            self._all.forget_gone(self, stid)
        self.gone.clear()


def newest_frames(batch: bytes) -> Iterable[bytes]:
    """The last frame of each sub-topic in a batch."""
    size = batch[0] << 8 | batch[1]
    count, rest = divmod(len(batch), size)
    if not rest and all(batch[at::size] == batch[at : at + 1] * count for at in (0, 1, 11, 12, 13, 14)):
        return (batch[-size:],)  # all are of one size and one sub-topic, as those of one sensor are
    starts: dict[bytes, int] = {}
    at, end = 0, len(batch)
    while at < end:
        starts[batch[at + 11 : at + 15]] = at
        at += batch[at] << 8 | batch[at + 1]
    return [batch[at : at + (batch[at] << 8 | batch[at + 1])] for at in starts.values()]


def check_filters(filters: Iterable[str]) -> None:
    """Raise ArgumentError when one of these is no filter of topics."""
    for one in filters:
        if not is_topic_filter(one):
            raise ArgumentError(f"{one!r} is no filter of topics, such as 'site1/#' or 'site1/+/state'")


class LastValues:
    """The last values of one hub.

    Args:
        filters: of the topics whose values are kept: `+` for one level, `#` for the rest.
        limits: how many there may be.

    Attributes:
        count, size_bytes: how many there are, and what they take.
        permits: whether what somebody published to a topic may still be given to others; all may by default.

    Raises:
        ArgumentError: a filter is none.
    """

    def __init__(self, filters: Iterable[str], limits: LastValueLimits) -> None:
        self._limits = limits
        self._store: ValueStore | None = None
        self.count = self.size_bytes = 0
        self._gone: dict[Place, TopicValues] = {}
        self.permits: Callable[[Identity, bytes], bool] = lambda source, name: True
        self._by_key: dict[bytes, TopicValues] = {}
        self._changed: dict[TopicValues, None] = {}
        self.set_filters(filters)

    def set_filters(self, filters: Iterable[str]) -> None:
        """Keep the values of these topics from now on; those of others are forgotten."""
        filters = tuple(filters)
        check_filters(filters)
        self._selected: dict[bytes, bool] = {}
        self._tree: FilterTree[bool] = FilterTree()
        for one in filters:
            self._tree.set(one, True)
        for values in list(self._by_key.values()):
            if not self.selects(values.topic):
                del self._by_key[values.topic.key]
                values.changed.update(values.newest)
                values.clear()
                self.changed(values)

    def selects_name(self, name: bytes) -> bool:
        """Whether the values of a topic of this name are kept."""
        return any(self._tree.match(name.decode("utf-8", "surrogateescape")))

    def selects(self, topic: Topic) -> bool:
        """Whether the values of a topic are kept."""
        chosen = self._selected.get(topic.key)
        if chosen is None:
            if len(self._selected) >= MAX_CACHED:
                self._selected.clear()
            chosen = topic.name is not None and self.selects_name(topic.name)
            self._selected[topic.key] = chosen
        return chosen

    def of(self, topic: Topic) -> TopicValues:
        """The values of a topic that is selected."""
        found = self._by_key.get(topic.key)
        if found is None:
            found = self._by_key[topic.key] = TopicValues(topic, self)
        return found

    def over(self, size_bytes: int) -> Limit | None:
        """Why a new value has no room."""
        if self.count >= self._limits.values:
            return VALUES
        return MEMORY if self.size_bytes + size_bytes > self._limits.size_bytes else None

    def greeting(self, topic: Topic) -> bytes:
        """What a new subscriber of `topic` gets first: frames, maybe none."""
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

    # ---- the disk

    def keep_in(self, store: ValueStore) -> None:
        """Keep them over restarts from now on."""
        self._store = store
        self._changed |= {values: None for values in self if values.changed}  # while there was none, or another
        if self._changed:
            store.wake()

    def changed(self, values: TopicValues) -> None:
        """Something in `values` is not on the disk yet."""
        if self._store is None:
            return
        if not self._changed:
            self._store.wake()
        self._changed[values] = None

    def take_changes(self, most: int) -> dict[Place, tuple[bytes, Identity | None] | None]:
        """Give, and forget, what the disk does not know yet: the newest message of each place, None for none."""
        found: dict[Place, tuple[bytes, Identity | None] | None] = {}
        while self._changed and len(found) < most:
            values = next(iter(self._changed))
            while values.changed and len(found) < most:
                stid = values.changed.pop()
                found[values.topic.key, stid] = values.newest.get(stid)
            if not values.changed:
                del self._changed[values]
        return found

    def give_back(self, places: Mapping[Place, object], topic_of: Callable[[bytes], Topic | None]) -> None:
        """The disk did not take these: they are to be tried again."""
        for key, stid in places:
            topic = topic_of(key)
            values = self._by_key.get(key) or (TopicValues(topic, self) if topic else None)
            if values:
                if not values.changed:
                    self.changed(values)
                values.changed.add(stid)

    def stamp_at(self, place: Place) -> int:
        """When the value of a place was published, or taken away; 0 when that is not known."""
        values = self._by_key.get(place[0])
        return values.stamp(place[1]) if values else 0

    def remember_gone(self, values: TopicValues, stid: bytes) -> None:
        """A value was taken away; the place that was remembered longest is forgotten when there are too many."""
        self._gone.pop((values.topic.key, stid), None)
        if len(self._gone) >= MAX_GONE:
            place = next(iter(self._gone))
            self._gone.pop(place).forget(place[1])
        self._gone[values.topic.key, stid] = values

    def forget_gone(self, values: TopicValues, stid: bytes) -> None:
        """There is a value again."""
        self._gone.pop((values.topic.key, stid), None)

    def restore(self, topic: Topic, frame: bytes, source: Identity | None, stamp: int = 0) -> None:
        """Have a value that was kept over a restart, unless there is a newer one, or it was taken away."""
        values = self.of(topic)
        if frame[11:15] not in values.newest and frame[11:15] not in values.changed:
            values.take_frame(frame, source, stamp)
            values.changed.discard(frame[11:15])

    def unsaved(self) -> Iterator[tuple[Topic, bytes, Identity | None]]:
        """What who reads the file does not find there: a message and its publisher for each place, all without a file.
        The message has no payload where a value was taken away.
        """
        for values in list(self) if self._store is None else self._changed:
            for stid in (*values.newest, *values.gone) if self._store is None else values.changed:
                frame, source = values.newest.get(stid) or (_nothing(values.topic, stid), None)
                yield values.topic, frame, source

    def __iter__(self) -> Iterator[TopicValues]:
        return iter(self._by_key.values())


def _nothing(topic: Topic, stid: bytes) -> bytes:
    return smq.publish_frame(topic.id, 0, int.from_bytes(stid, "big"), b"")


class LastValueRoute:
    """A route whose messages are kept as last values.

    Args:
        values: of the topic.
        route: to the subscribers, or to nobody.
        source: who publishes.
        find_again: gives the route anew, when messages may come here turns after it was found: subscribers may have
            come meanwhile.
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
        """Keep what is newest, then deliver the batch."""
        stid = batch[11:15]
        before = self._newest.get(stid)
        # Nearly always: one message, as long as the one before it, which the disk is to be told of already.
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
    """A route whose messages, which another node publishes, are kept as last values.

    Args:
        values: of the topic.
        route: to the subscribers, or to nobody.
        heard: gives when they were published.
    """

    __slots__ = ("_heard", "_route", "_values")

    def __init__(self, values: TopicValues, route: Route, heard: Callable[[], int]) -> None:
        self._values, self._route, self._heard = values, route, heard

    def deliver(self, batch: bytes) -> bool | None:
        """Keep what is newest, then deliver the batch."""
        self._values.take_sent(batch, self._heard())
        return self._route.deliver(batch)

    def deliver_view(self, view: memoryview) -> bool | None:
        """See `deliver`."""
        return self.deliver(bytes(view))
