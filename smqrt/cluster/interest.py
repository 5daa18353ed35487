"""Topics that other nodes want.

Nodes exchange no topic names, only the two numbers that every node makes from a name (`smqrt.wire.smq.NameNumbers`).
A topic takes one dictionary entry, however many nodes want it: about 120 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from smqrt.wire.cluster_packets import Key

_CHECK_BITS = 32
_CHECK = (1 << _CHECK_BITS) - 1
BATCH_TOPICS = 1000
"""Topics that `Interest.keys` examines in one step."""


class Interest:
    """The topics that all other nodes together want. A set of nodes is an integer with one bit for each."""

    def __init__(self) -> None:
        # By number: the bits of the nodes above the check, in one integer. It is the smallest object that holds both.
        self._entries: dict[int, int] = {}
        self._clashes: dict[Key, int] = {}
        """Topics whose number another name has in `_entries`: about two of 200,000."""
        self._clashing: dict[int, dict[int, None]] = {}
        """The checks of these topics, by number."""

    def __len__(self) -> int:
        return len(self._entries) + len(self._clashes)

    def add(self, key: Key, node: int) -> bool:
        """Add a topic for the node with this bit; return whether that is new."""
        number, check = key  # the check distinguishes names with the same number
        entry = self._entries.get(number)
        if entry is None:
            self._entries[number] = node << _CHECK_BITS | check
            return True
        if entry & _CHECK == check:
            self._entries[number] = entry | node << _CHECK_BITS
            return not entry >> _CHECK_BITS & node
        before = self._clashes.get(key, 0)
        self._clashes[key] = before | node
        self._clashing.setdefault(number, {})[check] = None
        return not before & node

    def discard(self, key: Key, node: int) -> bool:
        """Remove a topic of the node with this bit; return whether the node wanted it."""
        number, check = key
        entry = self._entries.get(number)
        if entry is not None and entry & _CHECK == check:
            nodes = entry >> _CHECK_BITS
            if nodes & ~node:
                self._entries[number] = (nodes & ~node) << _CHECK_BITS | check
            else:
                del self._entries[number]
                # Another name may have waited for the number in `_clashes`.
                if checks := self._clashing.get(number):
                    check, _ = checks.popitem()
                    self._entries[number] = self._clashes.pop((number, check)) << _CHECK_BITS | check
                    if not checks:
                        del self._clashing[number]
            return bool(nodes & node)
        before = self._clashes.get(key, 0)
        if before & ~node:
            self._clashes[key] = before & ~node
        elif before:
            del self._clashes[key], self._clashing[number][check]
            if not self._clashing[number]:
                del self._clashing[number]
        return bool(before & node)

    def nodes(self, key: Key) -> int:
        """Return the bits of the nodes that want a topic."""
        number, check = key
        entry = self._entries.get(number)
        if entry is None or entry & _CHECK != check:
            return self._clashes.get(key, 0) if self._clashes else 0
        return entry >> _CHECK_BITS

    def nodes_of_number(self, number: int) -> int:
        """Return the bits of the nodes that want the topic with this number, whose name this hub does not have."""
        return self._entries.get(number, 0) >> _CHECK_BITS

    def keys(self, node: int) -> Iterator[list[Key]]:
        """Yield the topics that a node wants, of those that exist when the iteration begins.

        Each portion holds those among `BATCH_TOPICS` topics of all nodes; it may be empty.
        """
        numbers, clashes = iter(list(self._entries)), iter(list(self._clashes))
        while keys := list(islice(clashes, BATCH_TOPICS)):
            yield [key for key in keys if self._clashes.get(key, 0) & node]
        while portion := list(islice(numbers, BATCH_TOPICS)):
            entries = [(number, self._entries.get(number, 0)) for number in portion]
            yield [(number, entry & _CHECK) for number, entry in entries if entry >> _CHECK_BITS & node]
