"""Disk work of a journal: jobs of a thread, missing files, and rows that expire."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gevent
import pytest

from smqrt.errors import JournalError
from smqrt.journal import durability, segment
from smqrt.journal.durability import DiskThread, Durability
from smqrt.journal.reader import Journal
from smqrt.journal.record import PERMANENT_JUMP_US, Clock
from smqrt.journal.settings import JournalSettings
from tests.journal import written
from tests.support.device import bounded
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    with bounded(30):
        yield


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[DiskThread]:
    monkeypatch.setattr(durability, "RETRY_S", 0.02)
    made = DiskThread()
    yield made
    made.join(5)
    made.close()


class Busy:
    """A job that runs until it is released."""

    def __init__(self, disk: DiskThread) -> None:
        self.began, self.released = threading.Event(), threading.Event()
        disk.submit("busy", self.run, lambda error: None)
        wait_until(self.began.is_set, "the job runs")

    def run(self) -> None:
        self.began.set()
        self.released.wait(20)


def test_jobs_run_in_their_order_and_once(disk: DiskThread) -> None:
    done: list[str] = []
    busy = Busy(disk)
    for kind, name in (("x", "old"), ("y", "y"), ("x", "new")):
        disk.submit(kind, lambda name=name: done.append(name), lambda error, kind=kind: done.append(f"{kind} done"))
    assert disk.jobs == 3
    assert not disk.join(0.01)
    busy.released.set()
    assert disk.join(10)
    assert done == ["new", "x done", "y", "y done"]
    assert (disk.jobs, disk.age_s) == (0, 0.0)


def test_the_age_is_that_of_the_oldest_job(disk: DiskThread) -> None:
    busy = Busy(disk)
    began_s = time.monotonic()
    disk.submit("x", lambda: None, lambda error: None)
    gevent.sleep(0.05)
    disk.submit("x", lambda: None, lambda error: None)
    assert disk.age_s >= 0.05
    busy.released.set()
    wait_until(lambda: disk.jobs == 0, "all jobs")
    assert disk.age_s <= time.monotonic() - began_s


def test_a_failed_job_is_repeated_until_it_succeeds(disk: DiskThread) -> None:
    told: list[str] = []
    tries: list[float] = []

    def work() -> None:
        tries.append(time.monotonic())
        if len(tries) < 3:
            raise OSError("broken")

    disk.submit("x", work, lambda error: told.append(str(error)))
    assert disk.join(10)
    assert told == ["broken", "broken", "None"]
    assert tries[2] - tries[0] >= 0.04


def test_a_newer_job_replaces_a_failed_one(disk: DiskThread) -> None:
    done: list[str] = []

    def fail() -> None:
        done.append("old")
        disk_busy.wait(20)
        raise OSError("broken")

    disk_busy = threading.Event()
    disk.submit("x", fail, lambda error: done.append(str(error)))
    wait_until(lambda: bool(done), "the job runs")
    disk.submit("x", lambda: done.append("new"), lambda error: done.append(str(error)))
    disk_busy.set()
    assert disk.join(10)
    assert done == ["old", "broken", "new", "None"]


def test_a_job_without_repetition_fails_once(disk: DiskThread) -> None:
    told: list[str] = []
    disk.submit("x", lambda: os.stat("/nowhere/file"), lambda error: told.append(type(error).__name__), retries=False)
    assert disk.join(10)
    assert told == ["FileNotFoundError"]


def test_waiting_jobs_are_dropped_at_the_end(disk: DiskThread) -> None:
    done: list[str] = []
    busy = Busy(disk)
    disk.submit("x", lambda: done.append("x"), lambda error: None)
    disk.close()
    assert disk.jobs == 1
    busy.released.set()
    wait_until(lambda: disk.jobs == 0, "the running job")
    assert done == []


def test_periods_of_the_disk_are_those_of_the_manual() -> None:
    """help: journal"""
    assert (durability.SLOW_S, durability.CLOSE_S) == (10.0, 5.0)
    assert durability.MAX_UNSYNCED_BYTES == 256 * 1024 * 1024


# ---- the segments of a node


class Node:
    """The files of a node that is written, their disk work, and what it reported."""

    def __init__(self, path: Path, clock: Clock, **limits: Any) -> None:
        settings = JournalSettings(path, **{"sync_s": 60.0, "min_free_bytes": 0, "max_bytes": None, **limits})
        self.folder, self.sealed = path / "wal/n1", list[int]()
        self._lock = segment.lock(self.folder)
        self.next_seq = 0
        first = segment.SegmentFile.open(self.folder, 0, "n1", "hub")
        numbers = segment.NumberReserve(self.folder, 0)
        on_sealed = lambda: self.sealed.append(1)  # noqa: E731
        self.disk = Durability(settings, self.folder, self._lock, first, on_sealed, lambda seq: None, clock, numbers)

    def append(self, rows: int = 1) -> None:
        written.append(self.disk.segment, written.rows(self.next_seq, self.next_seq + rows))
        self.next_seq += rows

    def seal(self) -> None:
        """Goes on with the next segment."""
        self.disk.seal(segment.SegmentFile.open(self.folder, self.next_seq, "n1", "hub"), {})

    def rows(self) -> list[int]:
        journal = Journal(self.folder.parent.parent)
        return [row.seq for row in journal.rows(journal.begin(), {"n1": self.next_seq})]

    def close(self) -> None:
        self.disk.close({}, lambda: None)
        os.close(self._lock)


class SetClock(Clock):
    """A clock of a machine whose time can be set, and that runs when it is told to."""

    def __init__(self) -> None:
        self.wall_us, self.passed_us = written.START_US, 0
        super().__init__(lambda: self.wall_us + self.passed_us, lambda: self.passed_us)

    def set_ahead(self, seconds: float) -> None:
        """Sets the machine's time, and lets so much time pass that it is believed."""
        self.wall_us += int(seconds * 1e6)
        assert self.follow() == 0
        self.passed_us += PERMANENT_JUMP_US
        assert self.follow() == int(seconds * 1e6)


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def node(memory: Path, clock: SetClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Node]]:
    """A factory of nodes that are checked every 5 ms."""
    monkeypatch.setattr(durability, "RETRY_S", 0.01)
    monkeypatch.setattr(durability, "CHECK_S", 0.005)
    made: list[Node] = []

    def make(**limits: Any) -> Node:
        made.append(Node(memory / "journal", clock, **limits))
        return made[-1]

    yield make
    made[0].close()


def test_a_removed_segment_is_restored(node: Callable[..., Node], caplog: pytest.LogCaptureFixture) -> None:
    one = node()
    one.append(5)
    wait_until(lambda: one.disk.stats()["disk_jobs"] == 0)
    assert one.disk.fault is None
    path = one.disk.segment.path
    path.unlink()
    wait_until(lambda: "is available again" in caplog.text, "the segment is restored")
    assert one.disk.fault is None
    assert one.rows() == [*range(5)]
    one.append(2)
    assert one.rows() == [*range(7)]
    said = [record.getMessage().removeprefix("the journal ") for record in caplog.records]
    assert said == [
        f"{one.folder.parent.parent} can't be written ({path.name} was removed); publishers wait and nothing is lost: "
        "restore it",
        f"{path} was removed; it is restored from the open file",
        f"{one.folder.parent.parent} is available again",
    ]


def test_a_moved_folder_is_reported_once(node: Callable[..., Node], caplog: pytest.LogCaptureFixture) -> None:
    one = node()
    away = one.folder.with_name("away")
    one.folder.rename(away)
    wait_until(lambda: one.disk.fault)
    gevent.sleep(0.03)  # some checks
    assert "its folder was moved, removed or unmounted" in str(one.disk.fault)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    away.rename(one.folder)
    wait_until(lambda: one.disk.fault is None, "it is there again")


def test_a_copy_of_the_folder_is_locked(node: Callable[..., Node]) -> None:
    one = node()
    one.append(5)
    away = one.folder.with_name("away")
    one.folder.rename(away)
    wait_until(lambda: one.disk.fault)
    shutil.copytree(away, one.folder.with_name("copy")).rename(one.folder)
    wait_until(lambda: one.disk.fault is None, "the copy is used")
    with pytest.raises(JournalError, match="is written by process"):
        segment.lock(one.folder)
    one.append(1)
    assert one.rows() == [*range(6)]


def test_another_folder_in_its_place_is_not_written(node: Callable[..., Node]) -> None:
    one = node()
    away = one.folder.with_name("away")
    one.folder.rename(away)
    one.folder.mkdir()
    (one.folder / segment.LOCK).write_text("1\n")
    wait_until(lambda: "another folder is in its place" in str(one.disk.fault))
    assert os.listdir(one.folder) == [segment.LOCK]
    shutil.rmtree(one.folder)
    away.rename(one.folder)
    wait_until(lambda: one.disk.fault is None)


def test_a_segment_is_not_sealed_while_its_index_is_missing(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durability, "CHECK_S", 60.0)
    one = node()
    one.append(5)
    index = one.disk.segment.path.with_suffix(".idx")
    index.rename(index.with_suffix(".away"))
    one.seal()
    wait_until(lambda: one.sealed or one.disk.stats()["alarm"], "it can't be sealed")
    assert (one.sealed, one.disk.is_sealing) == ([], True)
    index.with_suffix(".away").rename(index)
    wait_until(lambda: one.sealed, "it is sealed")
    assert one.disk.stats()["alarm"] == 0


DAY_S = 86400.0


def expire(one: Node) -> list[int]:
    """The rows that are left after a removal of expired files."""
    one.disk.start_retention()
    wait_until(lambda: one.disk.stats()["disk_jobs"] == 0)
    return one.rows()


def two_segments(one: Node) -> None:
    one.append(5)
    one.seal()
    wait_until(lambda: one.sealed)
    one.append(2)


def test_rows_do_not_expire_by_a_jump_of_the_clock(node: Callable[..., Node], clock: SetClock) -> None:
    one = node(retain_s=DAY_S, reader_timeout_s=None)
    two_segments(one)
    clock.set_ahead(10 * DAY_S)
    clock.passed_us += int(0.9 * DAY_S * 1e6)
    assert expire(one) == [*range(7)]
    clock.passed_us += int(0.2 * DAY_S * 1e6)
    assert expire(one) == [5, 6]


def test_readers_are_not_given_up_by_a_jump_of_the_clock(node: Callable[..., Node], clock: SetClock) -> None:
    one = node(retain_s=1.0, reader_timeout_s=DAY_S)
    two_segments(one)
    report = one.folder.parent.parent / "readers" / "q.json"
    report.parent.mkdir()
    report.write_text('{"query": "q", "offset": {"n1": 0}}')
    os.utime(report, (clock.now_us() / 1e6,) * 2)
    clock.set_ahead(10 * DAY_S)
    clock.passed_us += int(0.9 * DAY_S * 1e6)
    assert expire(one) == [*range(7)]
    clock.passed_us += int(0.2 * DAY_S * 1e6)
    assert expire(one) == [5, 6]


def test_a_removal_that_fails_waits_for_its_next_time(
    node: Callable[..., Node], caplog: pytest.LogCaptureFixture
) -> None:
    one = node(retain_s=1.0)
    (one.folder.parent.parent / "readers").mkdir()
    (one.folder.parent.parent / "readers" / "q.json").write_text("no")
    one.disk.start_retention()
    wait_until(lambda: "removal of expired files failed" in caplog.text)
    assert one.disk.join(5), "no job is left"
