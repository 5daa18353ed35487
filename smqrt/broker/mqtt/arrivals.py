"""Messages of other nodes that have arrived at a hub, and the ids of its own messages; see decision 0051."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")
MAX_STREAMS = 1024
"""Streams, and hubs with messages, that are remembered; beyond, the one that was used least recently is forgotten."""
MAX_KNOWN = 50_000
"""Messages with QoS 2 that are remembered, because a publisher may send them again after a crash of its node."""
_START_SHIFT, _CLASS_SHIFT, _QOS_2_SHIFT, _PREFIX_SHIFT = 40, 61, 62, 64
"""The id of a message has the prefix of a hub above 64 bits, bits for `AGAIN`, QoS 2 and `CHOSEN`, and the number of a
start above 40.
"""
AGAIN = 1 << 63
"""The bit of ids of messages that are sent again, since the node that has received them was killed."""
CHOSEN = 1 << _CLASS_SHIFT
"""The bit of ids of messages that only one client of a shared subscription gets. So they are in no range of ids that a
node has delivered.
"""


class KnownNode(NamedTuple):
    """A change of `Arrivals.nodes`, for the ledger."""

    identity: bytes


def prefix_of(identity: bytes) -> int:
    """Return the prefix of the ids of a hub's messages."""
    return int.from_bytes(identity[:8], "big")


def class_of(origin: int) -> int:
    """Return the class of an id: its hub, and the bits above `CHOSEN`. Messages with QoS 2 may be sent later."""
    return origin >> _CLASS_SHIFT


class Arrivals:
    """How far the streams of other nodes have arrived at a hub, so that no message arrives twice.

    Attributes:
        identity: 16 random bytes that name the sessions of the hub: those of a `persist` file keep it. Empty outside
            clusters.
        start: counts the starts with one `persist` file.
        numbers: the last number of each stream, by stream; the least recently used first.
        last_origin: the number of ids that were given since the start.
        nodes: identities of other hubs of the cluster, which are saved: a hub that starts again knows them.
        delivered: the last id that was delivered here, by class, see `class_of`: the ids of a class arrive in
            order, but for those of messages that are repeated after a crash.
    """

    __slots__ = ("_known", "delivered", "identity", "last_origin", "nodes", "numbers", "start")

    def __init__(self) -> None:
        self.identity = b""
        self.start = self.last_origin = 0
        self.numbers: dict[int, int] = {}
        self.delivered: dict[int, int] = {}
        self.nodes: dict[bytes, None] = {}
        self._known: dict[int, None] = {}

    # ---- streams of other nodes

    def take(self, stream: int, number: int) -> bool:
        """Return whether a number of a stream is new; then it is the last one that has arrived."""
        if number <= self.numbers.get(stream, 0):
            return False
        set_bounded(self.numbers, stream, number, MAX_STREAMS)
        return True

    def note_delivered(self, origin: int) -> None:
        """Record that the message with an id was delivered to its subscribers here."""
        last = max(origin, self.delivered.get(class_of(origin), 0))  # a repeated message has an earlier id
        set_bounded(self.delivered, class_of(origin), last, MAX_STREAMS)

    # ---- ids of messages

    def new_origin(self, count: int, qos: int) -> int:
        """Return the id of the first of so many messages; the others have the next ids."""
        first = self.last_origin + 1
        self.last_origin += count
        start = self.start & (1 << _CLASS_SHIFT - _START_SHIFT) - 1
        return self.origin_of((qos == 2) << _QOS_2_SHIFT | start << _START_SHIFT | first)

    def origin_of(self, position: int) -> int:
        """Return the id of a message of this hub from its lower 64 bits, which are in the `persist` file."""
        return prefix_of(self.identity) << _PREFIX_SHIFT | position

    def position_of(self, origin: int) -> int:
        """Return the lower 64 bits of an id."""
        return origin & (1 << _PREFIX_SHIFT) - 1

    def know(self, origins: Iterable[int], group: bytes = b"") -> None:
        """Remember ids of messages with QoS 2 that this hub has got, perhaps for a shared subscription."""
        for one in origins:
            set_bounded(self._known, hash((one, group)), None, MAX_KNOWN)

    def knows(self, origin: int, group: bytes = b"") -> bool:
        """Return whether this hub has got the message with QoS 2 with an id, see `know`."""
        return hash((origin, group)) in self._known

    # ---- hot restart

    def record(self) -> list[object]:
        """Return what another process needs that takes the sessions over."""
        numbers = [list(one) for one in self.numbers.items()]
        delivered = [one.to_bytes(16, "big") for one in self.delivered.values()]
        return [self.identity, self.start, self.last_origin, numbers, delivered]

    def restore(self, record: list[object]) -> None:
        """Continue with the record of another process."""
        identity, start, last_origin, numbers, delivered = record
        assert isinstance(identity, bytes)
        assert isinstance(start, int)
        assert isinstance(last_origin, int)
        assert isinstance(numbers, list)
        assert isinstance(delivered, list)
        self.identity, self.start, self.last_origin = identity or self.identity, start, last_origin
        self.numbers |= dict(numbers)
        for raw in delivered:
            self.note_delivered(int.from_bytes(raw, "big"))


def set_bounded(of: dict[Key, Value], key: Key, value: Value, limit: int) -> None:
    """Set a value as the newest one; the oldest one is removed above the limit."""
    of.pop(key, None)
    of[key] = value
    if len(of) > limit:
        del of[next(iter(of))]
