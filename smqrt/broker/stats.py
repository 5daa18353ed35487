"""Counters: nothing is lost without being counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Drop(Enum):
    """Why a copy of a message did not reach a subscriber."""

    UNROUTED = "nobody subscribes"
    SWALLOWED = "onpublish said no"
    OVER_BUDGET = "the subscriber's queue is full"
    OVER_GLOBAL_BUDGET = "all queues together are full"
    CLOSED = "the subscriber went away with messages in its queue"
    QUEUE_FULL = "the server's publish queue is full"


@dataclass(slots=True)
class Stats:
    """The counters of one hub."""

    connects: int = 0
    refusals: int = 0
    closes: int = 0
    drops: dict[Drop, int] = field(default_factory=lambda: dict.fromkeys(Drop, 0))

    def drop(self, reason: Drop, messages: int) -> None:
        """Count `messages` that were not delivered for `reason`."""
        self.drops[reason] += messages
