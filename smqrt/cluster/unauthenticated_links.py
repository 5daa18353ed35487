"""Who has connected from outside and has not proved yet that it knows the password."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from smqrt.settings.limit_register import Limit

if TYPE_CHECKING:
    from smqrt.cluster.link import Link

MAX_STRANGERS = 100
STRANGERS = Limit(
    "cluster_strangers", "", f"{MAX_STRANGERS} connections that have not proved the password; the oldest makes room"
)


class Strangers:
    """The links of a node whose other side is a stranger, in the order they came.

    When there are too many, the oldest of the address that has the most of them makes room. So whoever holds
    connections and says nothing keeps nobody out: a node proves the password within milliseconds. Who comes from one
    address only gives up connections of its own; with all addresses alike it is the oldest of all.
    """

    def __init__(self) -> None:
        self._addresses: dict[Link, str] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, link: Link, address: str) -> None:
        """Count a new one; another one may be ended for it."""
        if len(self._addresses) >= MAX_STRANGERS:
            self._make_room()
        self._addresses[link] = address

    def discard(self, link: Link) -> None:
        """It is a stranger no more, or gone."""
        self._addresses.pop(link, None)

    def _make_room(self) -> None:
        counts = Counter(self._addresses.values())
        most = max(counts.values())
        oldest = next(link for link, address in self._addresses.items() if counts[address] == most)
        STRANGERS.refused(f"a link from {self._addresses[oldest]}")
        oldest.lose("others have come that did not prove the password either")
