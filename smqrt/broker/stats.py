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


class Refusal(Enum):
    """Which limit somebody reached."""

    NAMES = "the hub has as many names as it may (maxnames)"
    NAME_BYTES = "the hub's names have as many bytes as they may"
    CLIENT_NAMES = "a client has brought in as many names as it may (clientnames)"
    CLIENT_SUBSCRIPTIONS = "a client has as many subscriptions as it may (clientnames)"
    CLIENT_OBSERVES = "a client observes as much as it may (clientnames)"
    HANDSHAKES = "an address has as many unfinished handshakes as it may"


@dataclass(slots=True)
class Stats:
    """The counters of one hub."""

    connects: int = 0
    refusals: int = 0
    closes: int = 0
    drops: dict[Drop, int] = field(default_factory=lambda: dict.fromkeys(Drop, 0))
    refused: dict[Refusal, int] = field(default_factory=lambda: dict.fromkeys(Refusal, 0))

    def drop(self, reason: Drop, messages: int) -> None:
        """Count `messages` that were not delivered for `reason`."""
        self.drops[reason] += messages
