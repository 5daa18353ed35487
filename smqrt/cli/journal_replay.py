"""`smqrt journal replay`: recorded messages once more, at the distances in time they had, published by a client."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, Unpack

import gevent

from smqrt.cli.connect import ConnectionOptions, Failure, RefusedByBroker, failure, open_client
from smqrt.cli.terminal import only_this_greenlet
from smqrt.client import SmqClient
from smqrt.errors import ArgumentError, ClosedError
from smqrt.journal.inspection import RecordedRow
from smqrt.journal.record import Flag, Row
from smqrt.journal.timestamps import iso
from smqrt.wire.smq import MAX_PAYLOAD_BYTES

_BACKLOG_BYTES = 1 << 18
_SCHEMES = {"smq://": "http://", "smqs://": "https://"}


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
    rows: Iterable[RecordedRow],
    speed: float | None,
    wait: Callable[[float], object],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[RecordedRow]:
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
    rows: Iterable[RecordedRow],
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


# ---- the network


@contextmanager
def publishing(
    url: str, **connection: Unpack[ConnectionOptions]
) -> Iterator[tuple[Publish, Callable[[float], object], int]]:
    """Connects to a hub; at the end it has got everything.

    Args:
        url: the hub's address.
        connection: as `open_client` takes it.

    Returns:
        What publishes, what waits some seconds, and how long a payload may be, bytes.

    Raises:
        Failure: no connection, a lost one, or the hub refuses messages.
    """
    for scheme, known in _SCHEMES.items():
        url = known + url.removeprefix(scheme) if url.startswith(scheme) else url
    with only_this_greenlet(), open_client(url, **connection) as client:
        yield _publisher(client), gevent.sleep, MAX_PAYLOAD_BYTES
        if not client.flush():
            raise failure(client.end)
        if client.dropped:
            raise RefusedByBroker(f"the hub refused {client.dropped} messages")


@contextmanager
def position(rows: Iterable[RecordedRow]) -> Iterator[Iterator[RecordedRow]]:
    """Yields the same rows; who interrupts what takes them is told where to go on.

    Raises:
        KeyboardInterrupt: it came, and says so.
    """
    at_us: int | None = None

    def noted() -> Iterator[RecordedRow]:
        nonlocal at_us
        for recorded in rows:
            at_us = recorded.row.ts_us
            yield recorded

    try:
        yield noted()
    except KeyboardInterrupt as interrupt:
        where = "Nothing was published yet." if at_us is None else f"--from {iso(at_us)} goes on."
        raise type(interrupt)(f"Interrupted. {where}") from None


def _publisher(client: SmqClient) -> Publish:
    def publish(topic: str, subtopic: str | None, payload: bytes) -> None:
        try:
            client.publish(payload, topic, subtopic)
        except ArgumentError as error:
            raise Failure(str(error)) from None
        except ClosedError:
            raise failure(client.end) from None
        if client.backlog_bytes > _BACKLOG_BYTES and not client.flush():
            raise failure(client.end)
        if not client.connected:
            raise failure(client.end)

    return publish
