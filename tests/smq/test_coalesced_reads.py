"""Clients that send many packets, each alone, are read at intervals (help: data-path)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import gevent
import pytest
from gevent import get_hub

from smqrt.settings import limits
from smqrt.smq import coalesced_reads, data_path
from smqrt.smq.coalesced_reads import RETRY_S, SMALL_READS, WINDOW, CoalescedReads
from smqrt.wire.connection_state import Life
from tests.support.device import KINDS, Device, Site, publish
from tests.support.waiting import wait_until

PACKET_BYTES = 31
QUICK_S, SLOW_S = SMALL_READS / 20_000, SMALL_READS / 2_000


class Connection:
    """A connection whose receives return what a test says; it counts them."""

    def __init__(self, received_bytes: int = 2 * PACKET_BYTES) -> None:
        self.received_bytes, self.receives = received_bytes, 0
        self.small_reads_since_s = 0.0
        self.paused, self.life = False, Life.OPEN
        self._ends = os.pipe()
        self.watcher: Any = get_hub().loop.io(self._ends[0], 1)
        self.watcher.start(self.on_readable)

    def on_readable(self) -> int:
        self.receives += 1
        return self.received_bytes

    def consider(self, reads: CoalescedReads, ago_s: float = QUICK_S) -> None:
        """As if the last reads had begun that long ago."""
        self.small_reads_since_s = time.monotonic() - ago_s
        reads.consider(self, PACKET_BYTES)

    def close(self) -> None:
        self.watcher.stop()
        self.watcher.close()
        for end in self._ends:
            os.close(end)


@pytest.fixture
def reads() -> CoalescedReads:
    return CoalescedReads(set())


@pytest.fixture
def connection() -> Iterator[Connection]:
    one = Connection()
    yield one
    one.life = Life.CLOSED
    gevent.sleep(0.01)
    one.close()


def test_a_quick_connection_is_read_at_intervals(reads: CoalescedReads, connection: Connection) -> None:
    connection.consider(reads)
    assert (len(reads), connection.watcher.active) == (1, False)
    began = time.monotonic()
    wait_until(lambda: connection.receives >= 100, "a hundred intervals")
    assert time.monotonic() - began >= 100 * 90e-6
    assert (len(reads), connection.watcher.active) == (1, False)


def test_two_thousand_packets_per_second_are_read_at_once(reads: CoalescedReads, connection: Connection) -> None:
    connection.consider(reads, SLOW_S)
    assert (len(reads), connection.watcher.active) == (0, True)


@pytest.mark.parametrize("received_bytes", [0, PACKET_BYTES, PACKET_BYTES * 5 // 4])
def test_without_gain_it_is_read_as_before(reads: CoalescedReads, connection: Connection, received_bytes: int) -> None:
    """A client that waits for each answer would only wait longer."""
    connection.received_bytes = received_bytes
    connection.consider(reads)
    wait_until(lambda: not len(reads), "it is read as before")
    assert (connection.receives, connection.watcher.active) == (WINDOW, True)
    assert connection.small_reads_since_s > time.monotonic() + RETRY_S / 2
    reads.consider(connection, PACKET_BYTES)  # it is not considered again for a while
    assert len(reads) == 0
    connection.consider(reads)
    assert len(reads) == 1


def test_packets_of_several_sizes_count_by_their_bytes(reads: CoalescedReads, connection: Connection) -> None:
    connection.received_bytes = 3 * PACKET_BYTES // 2 + 1
    connection.consider(reads)
    wait_until(lambda: connection.receives > 3 * WINDOW, "three windows")
    assert len(reads) == 1


def test_the_timer_stops_with_the_last_connection(reads: CoalescedReads, connection: Connection) -> None:
    connection.consider(reads)
    wait_until(lambda: connection.receives, "a receive")
    connection.life = Life.CLOSED
    wait_until(lambda: not len(reads), "the closed connection is forgotten")
    gevent.sleep(0.01)
    with pytest.raises(BlockingIOError):
        os.read(reads._timer, 8)


def test_a_paused_connection_is_not_read(reads: CoalescedReads, connection: Connection) -> None:
    connection.consider(reads)
    connection.paused = True
    wait_until(lambda: not len(reads), "the paused connection is forgotten")
    assert (connection.receives, connection.watcher.active) == (0, False)  # who resumes it starts the watcher


def test_a_resumed_connection_is_read_as_before(reads: CoalescedReads, connection: Connection) -> None:
    connection.consider(reads)
    connection.watcher.start(connection.on_readable)  # paused and resumed between two intervals
    wait_until(lambda: not len(reads), "it is read as before")
    assert connection.watcher.active


def test_a_frozen_connection_is_not_read(connection: Connection) -> None:
    frozen: set[object] = set()
    reads = CoalescedReads(frozen)
    connection.consider(reads)
    frozen.add(connection)
    wait_until(lambda: not len(reads), "the frozen connection is forgotten")
    assert (connection.receives, connection.watcher.active) == (0, False)


def test_a_setting_turns_intervals_off(
    reads: CoalescedReads, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection.consider(reads)
    monkeypatch.setattr(limits._current, "limits", limits.LimitSettings(coalesce_us=0))
    wait_until(lambda: not len(reads), "it is read as before")
    assert connection.watcher.active
    connection.consider(reads)
    assert len(reads) == 0


def test_a_setting_changes_the_interval(
    reads: CoalescedReads, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits._current, "limits", limits.LimitSettings(coalesce_us=1000))
    connection.consider(reads)
    began = time.monotonic()
    wait_until(lambda: connection.receives >= 20, "twenty intervals")
    assert time.monotonic() - began >= 20 * 900e-6


def test_the_number_of_connections_is_limited(reads: CoalescedReads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coalesced_reads, "MAX_CONNECTIONS", 2)
    connections = [Connection() for _ in range(3)]
    for one in connections:
        one.consider(reads)
    assert [one.watcher.active for one in connections] == [False, False, True]
    for one in connections:
        one.life = Life.CLOSED
    wait_until(lambda: not len(reads), "all are closed")
    for one in connections:
        one.close()


def test_without_timerfd_nothing_is_read_at_intervals(
    reads: CoalescedReads, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coalesced_reads, "_libc", None)
    connection.consider(reads)
    assert (len(reads), connection.watcher.active) == (0, True)


# ---- clients


FIRST = 2 * SMALL_READS + 8
"""After so many messages a quick client is read at intervals: the first reads only start the clock."""


@pytest.fixture
def always_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one process sends itself is slower than what the rule is for."""
    monkeypatch.setattr(coalesced_reads, "READS_PER_S", 1)
    monkeypatch.setattr(coalesced_reads, "GAIN", 0)


def numbers(packets: list[bytes]) -> list[int]:
    return [int(packet[13:]) for packet in packets]


def send_singles(device: Device, tid: int, first: int, count: int) -> None:
    for number in range(first, first + count):
        device.send(publish(tid, device.etid, b"%06d" % number))
        gevent.sleep(0.001)  # the loop looks at its sockets


@pytest.mark.parametrize("kind", KINDS)
def test_messages_arrive_once_and_in_order(site: Site, always_quick: None, kind: str) -> None:
    publisher, subscriber = site.device(b"publisher", kind), site.device(b"subscriber", kind)
    tid = subscriber.subscribe(b"topic")
    send_singles(publisher, tid, 0, FIRST)
    wait_until(lambda: len(data_path.coalesced_reads) == 1, "the publisher is read at intervals")
    send_singles(publisher, tid, FIRST, 400)
    publisher.send(*(publish(tid, publisher.etid, b"%06d" % number) for number in range(1000, 3000)))
    got: list[int] = []
    while len(got) < FIRST + 400 + 2000:
        got += numbers([subscriber.receive()])
    assert got == [*range(FIRST + 400), *range(1000, 3000)]
    assert publisher.sync() == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_a_client_is_noticed(site: Site, always_quick: None, kind: str) -> None:
    publisher, subscriber = site.device(b"publisher", kind), site.device(b"subscriber")
    tid = subscriber.subscribe(b"topic")
    send_singles(publisher, tid, 0, FIRST)
    wait_until(lambda: len(data_path.coalesced_reads), "the publisher is read at intervals")
    publisher.close()
    wait_until(lambda: publisher.etid not in site.state.sessions, "the session ends")
    assert numbers(subscriber.sync()) == [*range(FIRST)]
