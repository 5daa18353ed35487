"""Threads for disks."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import gevent
import pytest

from smqrt.http.open_files import Disks, mount_of, read_mounts
from smqrt.loop import threads as disk_threads
from smqrt.loop.threads import DiskJob, DiskThreads
from tests.support.waiting import wait_until


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_values_and_errors_are_delivered_and_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_threads, "IDLE_S", 0.02)
    threads = DiskThreads("a disk")
    before = threading.active_count()
    assert [threads.call(pow, 2, number) for number in range(20)] == [2**number for number in range(20)]
    with pytest.raises(ZeroDivisionError):
        threads.call(divmod, 1, 0)
    jobs = [threads.submit(DiskJob(pow, 3, number)) for number in range(100)]
    wait_until(lambda: all(job.done for job in jobs))
    assert [job.result() for job in jobs] == [3**number for number in range(100)]
    wait_until(lambda: threads._threads == 0)
    assert threading.active_count() == before
    assert threads.call(len, "abc") == 3  # they come again


def test_late_jobs_time_out_and_required_ones_still_run(monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> None:
    monkeypatch.setattr(disk_threads, "JOB_TIMEOUT_S", 0.05)
    threads, done, after = DiskThreads("a disk"), [], []
    for _ in range(disk_threads.THREADS):
        job = threads.submit(DiskJob(gate.wait, 20))
        job.after = lambda: after.append("after")
    nobody_waits = threads.submit(DiskJob(done.append, "skipped"))
    must = threads.submit(DiskJob(done.append, "must run", must_run=True))
    with pytest.raises(TimeoutError):
        threads.call(done.append, "late")
    assert nobody_waits.failed
    assert must.failed
    gate.set()
    wait_until(lambda: done == ["must run"] and len(after) == disk_threads.THREADS)


def test_jobs_of_a_disk_are_bounded(monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> None:
    monkeypatch.setattr(disk_threads, "MAX_WAITING", disk_threads.THREADS)
    threads, other = DiskThreads("a disk"), DiskThreads("another")
    hung = [threads.submit(DiskJob(gate.wait, 20)) for _ in range(disk_threads.THREADS)]
    wait_until(lambda: threads._waiting == 0)
    killed = gevent.spawn(threads.call, len, "")
    gevent.sleep(0)
    killed.kill()
    waiting = [threads.submit(DiskJob(len, "")) for _ in range(disk_threads.THREADS - 1)]
    with pytest.raises(TimeoutError):
        threads.call(len, "")
    assert disk_threads.DISK_JOBS.count == 1
    assert other.call(len, "x") == 1
    gate.set()
    wait_until(lambda: all(job.done for job in hung + waiting))


def test_a_process_ends_while_its_disk_hangs() -> None:
    code = """
import gevent, time
from smqrt.loop.threads import DiskJob, DiskThreads
threads = DiskThreads("a disk")
for _ in range(6): threads.submit(DiskJob(time.sleep, 60))
gevent.sleep(0.1)
"""
    subprocess.run([sys.executable, "-c", code], timeout=20, check=True)


def test_what_is_near() -> None:
    mounts = {"/": True, "/home/net": False, "/home/net/ram": True, "/srv": True, "/srv/a/fuse": False}
    assert mount_of("/home/net/x/y", mounts) == "/home/net"
    assert mount_of("/home/netx", mounts) == "/"
    assert mount_of("/", mounts) == "/"
    disks = Disks(lambda: mounts)
    trees = {"/": False, "/home": False, "/home/net": False, "/home/net/ram": True, "/srv": False, "/srv/b": True}
    assert {tree: disks.is_local_tree(tree) for tree in trees} == trees
    assert not disks.is_local("/srv/b/file")
    disks.find_mount("/srv/b/file")
    disks.find_mount("/home/net/file")
    assert disks.is_local("/srv/b/other")
    assert not disks.is_local("/home/net/other")
    assert disks.threads("/srv/b/x") is not disks.threads("/home/net/x")
    assert disks.threads("/nowhere/x") is disks.threads("/else/x")
    assert not Disks(dict).is_local_tree("/")  # a system without a table of mounts
    assert "/" in read_mounts()
