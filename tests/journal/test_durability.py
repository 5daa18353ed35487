"""Jobs of the disk thread: their order, their repetition, and the end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import gevent
import pytest

from smqrt.journal import durability
from smqrt.journal.durability import DiskThread
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
