"""Recorded messages once more, at the distances in time they had: `smqrt journal replay`.

This is the part without a network: whoever calls gives a function that publishes, and one that waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from smqrt.errors import ArgumentError
from smqrt.journal.inspect import Recorded
from smqrt.journal.record import Flag, Row


class Publish(Protocol):
    """Publishes one message; called with the topic, the subtopic or None, and the payload."""

    def __call__(self, topic: str, subtopic: str | None, payload: bytes) -> None: ...


@dataclass
class Played:
    """What a replay did: how many messages it published, and how many not, by the reason."""

    published: int = 0
    skipped: dict[str, int] = field(default_factory=dict)

    def skip(self, reason: str) -> None:
        """Count a message that is not published."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1


def parse_speed(text: str) -> float | None:
    """Returns how many times faster than recorded: "10x" or "10" is 10.0, "max" is None.

    Raises:
        ArgumentError: it is no such thing.
    """
    if text == "max":
        return None
    try:
        speed = float(text.removesuffix("x"))
    except ValueError:
        speed = 0.0
    if not 0 < speed < float("inf"):
        raise ArgumentError(f"--speed {text!r} must be a factor such as 10x or 0.5x, or max")
    return speed


def paced(
    rows: Iterable[Recorded],
    speed: float | None,
    wait: Callable[[float], object],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Recorded]:
    """Yields rows when they are due, counted from the first one; who is late catches up.

    Args:
        rows: in the order of their times.
        speed: how many times faster than recorded; None does not wait.
        wait: waits so many seconds.
        clock: seconds that only go forward.
    """
    started = first_us = None
    for recorded in rows:
        if speed is not None:
            if started is None or first_us is None:
                started, first_us = clock(), recorded.row.ts_us
            due = started + (recorded.row.ts_us - first_us) / 1e6 / speed
            if (remaining := due - clock()) > 0:
                wait(remaining)
        yield recorded


def play(
    rows: Iterable[Recorded],
    publish: Publish,
    wait: Callable[[float], object] = time.sleep,
    speed: float | None = 1.0,
    prefix: str = "",
    pipelines: bool = False,
    longest_bytes: int | None = None,
) -> Played:
    """Publish rows one after the other, when they are due.

    Args:
        rows: what to publish, in the order of time.
        publish: how.
        wait: waits so many seconds.
        speed: how many times faster than recorded; None does not wait.
        prefix: put before every topic.
        pipelines: also what pipelines had published; the pipelines behind the destination will do that again.
        longest_bytes: what a message may have at most.
    """
    played = Played()
    for recorded in paced(rows, speed, wait):
        topic, reason = recorded.row.topic, _reason(recorded.row, pipelines, longest_bytes)
        if topic is None or reason:
            played.skip(reason or "addressed to one client")
            continue
        publish(prefix + topic, recorded.row.subtopic, recorded.row.payload)
        played.published += 1
    return played


def _reason(row: Row, pipelines: bool, longest_bytes: int | None) -> str:
    """Why a row can't be or must not be published again; empty when it can."""
    if row.flags & Flag.PIPELINE and not pipelines:
        return "published by a pipeline"
    if longest_bytes is not None and len(row.payload) > longest_bytes:
        return f"longer than {longest_bytes} bytes"
    return ""
