"""Recorded messages once more: when, which, and which not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smqrt.cli.journal import ReplayCounts, paced, parse_speed, play
from smqrt.errors import ArgumentError
from smqrt.journal.inspection import RecordedRow
from smqrt.journal.record import Row
from tests.journal.sensor_rows import NOON_US, row


class Clock:
    """Time that passes only when somebody waits, or works."""

    def __init__(self) -> None:
        self.now = 100.0
        self.waits: list[float] = []

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


def recorded(*offsets_us: int) -> Iterator[RecordedRow]:
    return (RecordedRow("n1", row(seq, NOON_US + offset)) for seq, offset in enumerate(offsets_us))


@pytest.mark.parametrize(("speed", "waits"), [(1.0, [1.0, 0.5]), (10.0, [0.1, 0.05]), (0.5, [2.0, 1.0]), (None, [])])
def test_distances_in_time_are_kept(speed: float | None, waits: list[float]) -> None:
    clock = Clock()
    assert len(list(paced(recorded(0, 1_000_000, 1_500_000, 1_500_000), speed, clock.wait, clock))) == 4
    assert clock.waits == pytest.approx(waits)


def test_late_replay_catches_up() -> None:
    clock = Clock()
    due = []
    for one in paced(recorded(0, 1_000_000, 2_000_000, 3_000_000), 1.0, clock.wait, clock):
        due.append(round(clock.now - 100, 6))
        clock.now += 1.7 if one.row.seq == 0 else 0  # publishing the first one takes long
    assert due == [0, 1.7, 2, 3]


@given(st.lists(st.integers(0, 10**9), max_size=20), st.floats(0.01, 100))
def test_nothing_comes_too_early(offsets: list[int], speed: float) -> None:
    clock = Clock()
    for one in paced(recorded(*offsets), speed, clock.wait, clock):
        assert clock.now - 100 >= (one.row.ts_us - NOON_US - offsets[0]) / 1e6 / speed - 1e-6
    assert all(seconds > 0 for seconds in clock.waits)


def test_what_is_published_and_what_is_not() -> None:
    rows = [
        row(0, topic="a", payload=b"1", subtopic="s"),
        row(1, topic=None, payload=b"2", flags=1),
        row(2, topic="agg", payload=b"3", flags=8),
        row(3, topic="b", payload=bytes(101)),
        row(4, topic="b", payload=bytes(100)),
    ]
    published: list[tuple[str, str | None, bytes]] = []

    def publish(topic: str, row: Row) -> None:
        published.append((topic, row.subtopic, row.payload))

    played = play((RecordedRow("n1", one) for one in rows), publish, speed=None, prefix="re/", max_payload_bytes=100)
    assert published == [("re/a", "s", b"1"), ("re/b", None, bytes(100))]
    reasons = {"addressed to one client": 1, "published by a pipeline": 1, "longer than 100 bytes": 1}
    assert played == ReplayCounts(2, reasons)
    published.clear()
    assert play((RecordedRow("n1", one) for one in rows), publish, speed=None, pipelines=True).published == 4


def test_speeds() -> None:
    assert [parse_speed(text) for text in ("1x", "10x", "0.5", "max")] == [1.0, 10.0, 0.5, None]
    for text in ("", "x", "fast", "0", "-1x", "inf", "nan"):
        with pytest.raises(ArgumentError, match="not a factor such as 10x or 0.5x, or max"):
            parse_speed(text)
