"""`smqrt bench`: short load tests of a running broker.

Publisher and subscribers share one process, so the figures are a lower bound. At most `_WINDOW_BYTES` are unreceived at
any time, so that a loss is the broker's and not an overrun of this process.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import NamedTuple, Unpack

import click
import gevent
from gevent.event import Event
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from smqrt.cli.connect import ConnectionOptions, Failure, RejectedByBroker, connection_options, failure, open_client
from smqrt.client import SmqClient

_WINDOW_BYTES = 256 * 1024
_TIMEOUT_S = 5.0
_SHAPES = ((16, 1), (1024, 1), (60_000, 1), (128, 10))
"""Payload in bytes, number of subscribers."""


class BenchRow(NamedTuple):
    """A line of the result table."""

    shape: str
    messages: int
    seconds: float
    lost: int
    disorder: int
    p50_us: float = 0
    p99_us: float = 0
    payload_bytes: int = 0


@click.command()
@click.argument("url")
@click.option(
    "--seconds", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="Duration of each test."
)
@connection_options
def bench(url: str, seconds: float, **connection: Unpack[ConnectionOptions]) -> None:
    """Measure the broker at URL: connections, round trips, messages per second, losses.

    This single Python process generates the load, and is often slower than the broker. Exit code 1 when messages were
    lost or out of order.
    """
    connection["uid"] = None

    def connect() -> SmqClient:
        return open_client(url, **connection)

    rows = [_measure_connects(connect, seconds), _measure_round_trips(connect, seconds)]
    rows += [_measure_publish(connect, seconds, size, subscribers) for size, subscribers in _SHAPES]
    Console().print(_table(url, rows))
    if failed := sum(row.lost + row.disorder for row in rows):
        raise Failure(f"{failed} messages were lost or out of order")


def _measure_connects(connect: Callable[[], SmqClient], seconds: float) -> BenchRow:
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        client = connect()
        times.append(time.perf_counter() - started)
        client.close()
    return BenchRow("connect and leave", len(times), seconds, 0, 0, *_percentiles(times))


def _measure_round_trips(connect: Callable[[], SmqClient], seconds: float) -> BenchRow:
    """Publish to the ETID of a second client, which publishes a reply to the ETID of the first."""
    with connect() as caller, connect() as server:
        replied = Event()
        server.subscribe("self", onmsg=lambda data, ptid, *_: server.publish(data, ptid))
        caller.subscribe("self", onmsg=lambda *_: replied.set())
        times: list[float] = []
        target, end = server.gettid(), time.perf_counter() + seconds
        assert target is not None
        while (started := time.perf_counter()) < end:
            replied.clear()
            caller.publish(b"ping", target)
            if not replied.wait(_TIMEOUT_S):
                raise Failure(f"no reply to a message within {_TIMEOUT_S:g} s")
            times.append(time.perf_counter() - started)
    return BenchRow("round trip by ETID", len(times), seconds, 0, 0, *_percentiles(times))


class _Receiver:
    """A subscriber that counts messages and checks their order."""

    def __init__(self, client: SmqClient, topic: str, progress: Event) -> None:
        self.client, self.received, self.disorder = client, 0, 0
        self._progress = progress
        client.subscribe(topic, onmsg=self._onmsg)

    def _onmsg(self, data: bytes, *_: int) -> None:
        self.disorder += int.from_bytes(data[:8], "big") != self.received
        self.received += 1
        self._progress.set()


def _measure_publish(connect: Callable[[], SmqClient], seconds: float, size_bytes: int, subscribers: int) -> BenchRow:
    topic, progress = f"smqrt-bench-{secrets.token_hex(8)}", Event()
    clients = [connect() for _ in range(subscribers + 1)]
    publisher, *others = clients
    try:
        receivers = [_Receiver(client, topic, progress) for client in others]
        if not all(client.flush(_TIMEOUT_S) for client in others):
            raise failure(others[0].end)
        started = time.perf_counter()
        sent = _publish_until(started + seconds, publisher, topic, size_bytes, receivers, progress)
        deadline = time.perf_counter() + _TIMEOUT_S
        while min(receiver.received for receiver in receivers) < sent and time.perf_counter() < deadline:
            gevent.sleep(0.001)
        elapsed = time.perf_counter() - started
        if publisher.dropped:
            raise RejectedByBroker(f"the broker rejected the topic {topic!r}")
    finally:
        for client in clients:
            client.close(1)
    received = sum(receiver.received for receiver in receivers)
    shape = f"1 to {subscribers}, {size_bytes:,} B"
    disorder = sum(receiver.disorder for receiver in receivers)
    return BenchRow(shape, received, elapsed, sent * subscribers - received, disorder, payload_bytes=size_bytes)


def _publish_until(
    end: float, publisher: SmqClient, topic: str, size_bytes: int, receivers: list[_Receiver], progress: Event
) -> int:
    """Publish numbered messages until a time, no faster than all receivers receive; return their number."""
    filler = bytes(size_bytes - 8)  # the number takes 8 bytes
    window = _WINDOW_BYTES // size_bytes
    batch = min(64, max(1, window // 4))
    sent = 0
    while time.perf_counter() < end:
        for _ in range(batch):
            publisher.publish(sent.to_bytes(8, "big") + filler, topic)
            sent += 1
        gevent.sleep(0)
        while sent - min(receiver.received for receiver in receivers) >= window:
            progress.clear()
            if not progress.wait(0.1) and time.perf_counter() > end + _TIMEOUT_S:
                return sent
    return sent


def _percentiles(times_s: list[float]) -> tuple[float, float]:
    ordered = sorted(times_s)
    return ordered[len(ordered) // 2] * 1e6, ordered[len(ordered) * 99 // 100] * 1e6


def _table(url: str, rows: list[BenchRow]) -> Table:
    table = Table(title=url, title_justify="left", box=SIMPLE)
    table.add_column("shape", no_wrap=True)
    for heading in ("messages", "a second", "MB/s", "p50 µs", "p99 µs", "lost", "disorder"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        rate = row.messages / row.seconds
        megabytes = f"{rate * row.payload_bytes / 1e6:,.1f}" if row.payload_bytes else ""
        percentiles = [f"{value:,.0f}" if value else "" for value in (row.p50_us, row.p99_us)]
        table.add_row(
            row.shape, f"{row.messages:,}", f"{rate:,.0f}", megabytes, *percentiles, str(row.lost), str(row.disorder)
        )
    return table
