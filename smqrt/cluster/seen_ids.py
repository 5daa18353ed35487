"""Ids of the messages that a session has got, while two nodes may get messages for it."""

from __future__ import annotations

from smqrt.broker.mqtt.arrivals import class_of

MAX_RANGES = 16
MAX_IDS = 100_000
"""Ids of messages that a session remembers while older ones may follow."""
Ranges = dict[int, list[tuple[int, int]]]
"""Ids of messages by class, see `class_of`: above the first id and up to the second one of each pair."""


class SeenIds:
    """The messages that a session has got, which began or moved while another node may have messages for it.

    Args:
        known: what the session has got at former nodes.
        base: what this node had delivered before the session was here, see `Arrivals.delivered`.

    Attributes:
        former: the identity of the node that may still get messages for the session; empty for none.
    """

    def __init__(self, known: Ranges, base: dict[int, int]) -> None:
        self._known, self._base = known, dict(base)
        self._ids: dict[int, None] = {}
        self.former = b""

    def takes(self, origin: int) -> bool:
        """Return whether a message is new, and remember it."""
        return not (origin and _covers(self._known, origin)) and self.is_new(origin)

    def takes_late(self, origin: int, is_rest: bool) -> bool:
        """Return whether a message of another node is new, and remember it.

        Args:
            origin: its id.
            is_rest: whether it has waited in the session when the session was handed over.
        """
        return (is_rest or not _covers(self._known, origin, 1)) and self.is_new(origin)

    def is_new(self, origin: int) -> bool:
        """Return whether the session has not got a message here, and remember it."""
        if not origin:
            return True
        if origin in self._ids:
            return False
        self._ids[origin] = None
        if len(self._ids) > MAX_IDS:
            del self._ids[next(iter(self._ids))]
        return True

    def known(self, delivered: dict[int, int]) -> tuple[Ranges, list[int]]:
        """Return what the session has got, for its next node, and ids that are not in these ranges.

        Args:
            delivered: what this node has delivered, see `Arrivals.delivered`.
        """
        found = {key: list(ranges) for key, ranges in self._known.items()}
        for key, last in delivered.items():
            found[key] = [*found.get(key, ()), (self._base.get(key, 0), last)][-MAX_RANGES:]
        return found, [one for one in self._ids if not _covers(found, one)]


def _covers(known: Ranges, origin: int, lowest: int = 0) -> bool:
    """Return whether an id is in one of the ranges that begin at `lowest` or above."""
    return any(lowest <= low < origin <= high for low, high in known.get(class_of(origin), ()))


class LateIds:
    """The messages that the former node of a session still takes: not those of nodes that know its new node.

    Attributes:
        known: the prefixes of the ids of such nodes.
    """

    def __init__(self) -> None:
        self.known: set[int] = set()

    def takes(self, origin: int) -> bool:
        """Return whether the message is one of these."""
        return bool(origin) and origin >> 64 not in self.known
