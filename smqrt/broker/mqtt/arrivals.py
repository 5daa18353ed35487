"""Messages of other nodes that have arrived at a hub, and the ids of its own messages; see decision 0051."""

from __future__ import annotations

MAX_STREAMS = 1024
"""Streams that are remembered; beyond, the one that was used least recently is forgotten."""
_START_SHIFT = 40
"""Ids have the number of the start above so many bits."""


class Arrivals:
    """How far the streams of other nodes have arrived at a hub, so that no message arrives twice.

    Attributes:
        identity: 16 random bytes that name the sessions of the hub: those of a `persist` file keep it. Empty outside
            clusters.
        start: counts the starts with one `persist` file.
        numbers: the last number of each stream, by stream; the least recently used first.
        last_origin: the number of ids that were given since the start.
    """

    __slots__ = ("identity", "last_origin", "numbers", "start")

    def __init__(self) -> None:
        self.identity = b""
        self.start = self.last_origin = 0
        self.numbers: dict[int, int] = {}

    def take(self, stream: int, number: int) -> bool:
        """Return whether a number of a stream is new; then it is the last one that has arrived."""
        if number <= self.numbers.get(stream, 0):
            return False
        self.numbers.pop(stream, None)
        self.numbers[stream] = number
        if len(self.numbers) > MAX_STREAMS:
            del self.numbers[next(iter(self.numbers))]
        return True

    def new_origin(self, count: int) -> int:
        """Return the id of the first of so many messages with QoS 2; the others have the next ids."""
        first = self.last_origin + 1
        self.last_origin += count
        return self.origin_of(self.start << _START_SHIFT | first)

    def origin_of(self, position: int) -> int:
        """Return the id of a message from its lower 64 bits, which are in the `persist` file."""
        return int.from_bytes(self.identity[:8], "big") << 64 | position

    def record(self) -> list[object]:
        """Return what another process needs that takes the sessions over."""
        return [self.identity, self.start, self.last_origin, [list(one) for one in self.numbers.items()]]

    def restore(self, record: list[object]) -> None:
        """Continue with the record of another process."""
        identity, start, last_origin, numbers = record
        assert isinstance(identity, bytes)
        assert isinstance(start, int)
        assert isinstance(last_origin, int)
        assert isinstance(numbers, list)
        self.identity, self.start, self.last_origin = identity or self.identity, start, last_origin
        self.numbers |= {stream: number for stream, number in numbers}
