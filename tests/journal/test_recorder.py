"""Runs of many kilobytes become rows where they lie; all rows come in the order in which they were recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from smqrt.journal import arrow, recorder, settings
from smqrt.journal.columns import MAX_ROWS
from smqrt.journal.record import Flag, Row
from smqrt.wire import smq

NOW_US = 1_700_000_000_000_000


class Disk:
    """Takes the batches of a recorder, when it is not full."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.room_rows = 1 << 30
        self.stuck: list[bytes] = []

    def write(self, rows: int, first_us: int, last_us: int, pieces: Any) -> bool:
        batch = b"".join(bytes(piece) for piece in pieces)
        if rows > self.room_rows:
            self.stuck.append(batch)
            return False
        self.room_rows -= rows
        self.rows += arrow.decode(batch)
        return True


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture(params=["quickest", "pure"])
def recording(request: Any, disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A recorder, and the time it is given."""
    if request.param == "pure":
        monkeypatch.setenv("SMQRT_KERNELS", "pure")
    client = SimpleNamespace(uid=b"client")
    topic = SimpleNamespace(name=b"topic")
    broker: Any = SimpleNamespace(
        server=SimpleNamespace(etid=1, uid=b"server"),
        sessions={2: client},
        topic_table=SimpleNamespace(get=lambda number: topic),
        subtopic_table=SimpleNamespace(by_id={}),
        record=lambda ended: None,
    )
    clock = SimpleNamespace(us=NOW_US)
    asked = settings.parse({"path": str(tmp_path)}, tmp_path)
    made = recorder.HubRecorder(broker, asked, lambda: len(disk.rows) + 1, disk.write, lambda: clock.us, lambda: None)
    yield SimpleNamespace(recorder=made, clock=clock)
    made.full = False
    made.close()


def run(first: int, count: int) -> bytes:
    return b"".join(smq.publish_frame(5, 2, 0, b"%d" % number) for number in range(first, first + count))


def receive(recording: Any, first: int, count: int) -> None:
    """Records a run from a buffer that is used for something else afterwards."""
    buffer = bytearray(run(first, count))
    recording.recorder.record_large(memoryview(buffer))
    buffer[:] = bytes(len(buffer))


def numbers(disk: Disk) -> list[int]:
    return [int(cast("bytes", row.payload)) for row in disk.rows]


def test_long_and_short_runs_keep_their_order_and_times(recording: Any, disk: Disk) -> None:
    of = recording.recorder
    of.record(run(0, 2))
    receive(recording, 2, 500)
    of.record_unrouted(run(502, 1))
    of._end_turn()
    recording.clock.us += 7
    receive(recording, 503, 500)
    of._end_turn()
    of.flush()
    assert numbers(disk) == list(range(1003))
    assert [row.ts_us for row in disk.rows] == [NOW_US] * 503 + [NOW_US + 7] * 500
    assert [row.flags for row in disk.rows if row.flags] == [Flag.UNROUTED]
    assert {row.uid for row in disk.rows} == {"client"}


def test_a_run_is_stamped_when_it_fills_a_batch(recording: Any, disk: Disk) -> None:
    receive(recording, 0, MAX_ROWS + 3)
    assert [row.ts_us for row in disk.rows] == [NOW_US] * MAX_ROWS
    recording.recorder.flush()
    assert numbers(disk) == list(range(MAX_ROWS + 3))


def test_what_a_full_disk_does_not_take_is_kept(recording: Any, disk: Disk) -> None:
    disk.room_rows = MAX_ROWS
    receive(recording, 0, 3 * MAX_ROWS)
    receive(recording, 3 * MAX_ROWS, 10)
    assert recording.recorder.full
    assert len(disk.rows) == MAX_ROWS
    disk.room_rows = 1 << 30
    [stuck] = disk.stuck
    disk.rows += arrow.decode(stuck)  # as the writer does before it tells
    recording.recorder.resume()
    assert numbers(disk) == list(range(3 * MAX_ROWS + 10))


def test_read_only_buffers_are_accepted(recording: Any, disk: Disk) -> None:
    recording.recorder.record_large(memoryview(run(0, 100)))
    recording.recorder.flush()
    assert numbers(disk) == list(range(100))
