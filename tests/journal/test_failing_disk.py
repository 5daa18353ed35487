"""A disk that is slow, full or broken, under a real hub: nothing is lost, nothing is skipped, and it is told."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator

import gevent
import pytest

from smqrt.errors import JournalError
from smqrt.journal import commit
from smqrt.journal import files as locations
from smqrt.journal.commit import commit_staged, stage
from smqrt.journal.reader import Journal
from tests.journal.failing_disk import FailingDisk, failing, shim
from tests.support.device import bounded
from tests.support.waiting import wait_until

__all__ = ["failing", "shim"]

Failing = Callable[..., FailingDisk]
pytestmark = pytest.mark.servers

ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS)


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    """Servers that start, and start again, take their time when others want the machine too."""
    with bounded(100):
        yield


def numbered(first: int, end: int) -> list[bytes]:
    return [b"%08d" % number + bytes(1000) for number in range(first, end)]


class Subscriber:
    """A client that publishes numbered messages and one that notes what it receives."""

    def __init__(self, disk: FailingDisk) -> None:
        self.numbers: list[int] = []
        self.receiver, self.sender = disk.client(), disk.client()
        ready: list[bool] = []
        note = lambda data, *_: self.numbers.append(int(data[:8]))  # noqa: E731
        self.receiver.subscribe("t", onmsg=note, onack=lambda accepted, *_: ready.append(accepted))
        wait_until(lambda: ready, "the subscription")
        self.publish(0, 1)
        wait_until(lambda: self.numbers, "the first message")

    def publish(self, first: int, end: int) -> None:
        for payload in numbered(first, end):
            assert self.sender.publish(payload, "t")

    def expect(self, end: int) -> None:
        wait_until(lambda: len(self.numbers) >= end, f"{end} messages", 20)
        assert self.numbers == list(range(end))


def test_after_a_full_disk_nothing_is_missing(failing: Failing) -> None:
    disk = failing(flush_ms=1, segment_bytes=65536)
    clients = Subscriber(disk)
    disk.does("write", error=errno.ENOSPC)
    clients.publish(1, 3000)
    disk.until(lambda stats: stats["stalls"] and stats["alarm"])
    disk.is_well()
    clients.expect(3000)
    disk.until(lambda stats: stats["rows"] == 3000 and not stats["disk_jobs"])
    assert disk.numbers() == list(range(3000))
    assert disk.served.output.count("can't be written (No space left on device)") == 1
    assert "Traceback" not in disk.served.output


def test_a_disk_that_was_slow_syncs_again(failing: Failing) -> None:
    disk = failing(sync="20ms", segment_bytes=65536)
    clients = Subscriber(disk)
    disk.does("sync", delay_ms=2500)
    for number in range(1, 300):
        clients.publish(number, number + 1)
        gevent.sleep(0.005)  # in many batches: four segments are full meanwhile
    waiting = disk.until(lambda stats: stats["disk_age_s"] >= 1)
    assert waiting["disk_jobs"] >= 1
    assert waiting["unsynced_bytes"] > 100_000
    disk.is_well()
    well = disk.until(lambda stats: not stats["unsynced_bytes"])
    clients.publish(300, 301)
    disk.until(lambda stats: stats["rows"] == 301 and not stats["unsynced_bytes"] and stats["syncs"] > well["syncs"])
    assert disk.numbers() == list(range(301))
    assert "Traceback" not in disk.served.output


def test_what_a_failed_sync_was_about_is_written_anew(failing: Failing) -> None:
    """The kernel forgets what it could not write, and says of the next sync that all is well."""
    disk = failing(sync="20ms")
    clients = Subscriber(disk)
    disk.until(lambda stats: stats["rows"] == 1 and not stats["unsynced_bytes"])
    disk.does("sync", error=errno.EIO)
    clients.publish(1, 50)
    clients.expect(50)
    disk.until(lambda stats: stats["rows"] == 50 and stats["alarm"])
    forget(disk)
    disk.is_well()
    disk.until(lambda stats: not stats["unsynced_bytes"] and not stats["alarm"])
    assert disk.served.output.count("sync failed: [Errno 5] Input/output error") == 1
    disk.served.wait_for("00.arrows: rows .* are lost: the disk failed")
    journal = Journal(disk.journal)
    assert [int(row.payload[:8]) for row in journal.rows({"n1": 0}, {"n1": 1})] == [0]
    with pytest.raises(JournalError, match="checksum is wrong"):
        list(journal.rows({"n1": 0}, {"n1": 50}))


def forget(disk: FailingDisk) -> None:
    """Takes from a segment what was written last, as a kernel does that could not write it."""
    [path] = (disk.journal / "wal" / "n1").glob("*.arrows")
    with path.open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(size - 20_000)
        file.write(bytes(20_000))


def test_the_end_does_not_wait_for_ever(failing: Failing) -> None:
    disk = failing(sync="1h")
    clients = Subscriber(disk)
    clients.publish(1, 20)
    clients.expect(20)
    disk.does("sync", delay_ms=60_000)
    began = time.monotonic()
    disk.served.process.send_signal(signal.SIGTERM)
    assert disk.served.process.wait(15) == 0
    assert time.monotonic() - began < 14
    disk.served.wait_for("was closed with 20 messages that the disk has not confirmed")
    disk.is_well()
    disk.start()
    assert disk.numbers() == list(range(20)), "the system had them"


@pytest.mark.parametrize("how", ["moved", "copied", "one segment"])
def test_a_folder_that_is_taken_away(failing: Failing, how: str) -> None:
    disk = failing(flush_ms=1)
    clients = Subscriber(disk)
    away = disk.journal.with_name("away")
    if how == "one segment":
        for path in (disk.journal / "wal" / "n1").glob("0*"):
            path.unlink()
        disk.served.wait_for("is restored from the open file")
    else:
        disk.journal.rename(away)
        disk.until(lambda stats: stats["alarm"])
    clients.publish(1, 2000)
    if how != "one segment":
        disk.until(lambda stats: stats["stalls"])
        assert not disk.journal.exists(), "nothing begins anew"
        if how == "copied":
            shutil.copytree(away, disk.journal.with_name("copy"))
            shutil.rmtree(away)
            away = disk.journal.with_name("copy")
        away.rename(disk.journal)
    clients.expect(2000)
    disk.until(lambda stats: stats["rows"] == 2000 and not stats["alarm"])
    assert disk.numbers() == list(range(2000))
    assert disk.served.output.count("is available again") == 1
    assert "Traceback" not in disk.served.output
    disk.served.stop()
    disk.start()
    assert disk.stats()["next_seq"] == 2000
    assert disk.numbers() == list(range(2000))


def test_messages_are_always_synced_before_delivery(failing: Failing) -> None:
    """A disk that is slow or broken holds publishers, not the event loop; and nothing comes twice."""
    disk = failing(sync="always", segment_bytes=65536)
    clients = Subscriber(disk)
    disk.does("sync", error=errno.EIO)
    clients.publish(1, 200)
    failed = disk.until(lambda stats: stats["alarm"] and stats["unsynced_bytes"])
    assert clients.numbers == [0]
    disk.does("sync", delay_ms=2500)
    clients.expect(failed["rows"])
    began = time.monotonic()
    disk.stats()
    assert time.monotonic() - began < 2, "the loop goes on while the disk works"
    disk.is_well()
    clients.expect(200)
    disk.until(lambda stats: stats["rows"] == 200 and not stats["unsynced_bytes"])
    assert disk.numbers() == list(range(200))


def test_a_commit_is_synced_before_its_confirmation(failing: Failing) -> None:
    disk = failing(sync="always")
    disk.does("sync", error=errno.EIO)
    rows = [(b"out", None, b"%08d" % number) for number in range(3)]
    committing = gevent.get_hub().threadpool.spawn(commit.commit, disk.address(), "q", 0, rows)
    disk.until(lambda stats: stats["commits"] == 1 and stats["alarm"])
    assert not committing.ready()
    disk.is_well()
    assert committing.get(timeout=10)
    assert not commit.commit(disk.address(), "q", 0, rows)
    assert disk.numbers() == [0, 1, 2]


def test_unconfirmed_results_are_not_published_twice(failing: Failing) -> None:
    disk = failing(sync="always")
    disk.does("sync", error=errno.EIO)
    publishing = gevent.get_hub().threadpool.spawn(commit.publish, disk.address(), [(b"out", None, b"%08d" % 0)])
    disk.until(lambda stats: stats["unsynced_bytes"])
    disk.served.process.send_signal(signal.SIGTERM)
    assert disk.served.process.wait(20) == 0
    disk.is_well()
    disk.start()
    disk.stats()
    with pytest.raises(JournalError, match="not known"):
        publishing.get(timeout=20)
    assert disk.numbers() == [0]


@pytest.mark.parametrize("kind", [".arrows", ".idx", "txn.json"])
def test_each_kind_of_file_of_a_segment(failing: Failing, kind: str) -> None:
    """Nothing is lost and the alarm is on until disk writes recover, be it full, broken or read-only."""
    disk = failing(flush_ms=1, segment_bytes=65536, sync="50ms")
    clients = Subscriber(disk)
    for round_, error in enumerate(ERRORS):
        disk.does("write", "sync", "change", error=error, part=kind)
        clients.publish(1 + 500 * round_, 501 + 500 * round_)
        assert disk.until(lambda stats: stats["alarm"])
        disk.is_well()
        clients.expect(501 + 500 * round_)
        disk.until(lambda stats: stats["rows"] == len(clients.numbers))
        disk.until(lambda stats: not stats["alarm"] and not stats["unsynced_bytes"])
        assert disk.numbers() == clients.numbers
    assert "Traceback" not in disk.served.output
    end = len(clients.numbers)
    assert commit.commit(disk.address(), "q", 0, [(b"out", None, b"%08d" % end)])
    disk.served.stop()
    disk.start()
    assert disk.stats()["next_seq"] == end + 1
    assert not commit.commit(disk.address(), "q", 0, [(b"out", None, b"%08d" % end)])


def test_what_pipelines_leave_in_the_journal(failing: Failing) -> None:
    """Their reports and what they stage: one sentence that names the file and why, and nothing of it remains."""
    disk = failing()
    hub, rows = disk.address(), [(b"out", None, b"%08d" % 0)]
    remote = locations.HubAddress.of(hub.url, hub.token)
    commit.report_progress(remote, "q", "q", {"n1": 0})
    parts = stage(remote, "q", 0, rows, 0)
    for error in ERRORS:
        disk.does("write", "sync", "change", error=error, part="/readers/")
        why = os.strerror(error)
        for _ in range(3):
            with pytest.raises(JournalError, match=f"readers/q.json can't be written: {why}"):
                commit.report_progress(remote, "q", "q", {"n1": 9}, retry_s=0)
        disk.does("write", "sync", "change", error=error, part="/staged/")
        for ask in (
            lambda: stage(remote, "q", 0, rows, 0),
            lambda: commit_staged(remote, "q", 0, parts, 0),
        ):
            with pytest.raises(JournalError, match=f"staged/q/0 can't be written: {why}"):
                ask()
        disk.is_well()
        assert [path.name for path in (disk.journal / "readers").iterdir()] == ["q.json"]
        assert [path.name for path in (disk.journal / "staged/q/0").iterdir()] == parts
    commit.report_progress(remote, "q", "q", {"n1": 1})
    commit_staged(remote, "q", 0, parts, 0)
    assert disk.numbers() == [0]
    assert "Traceback" not in disk.served.output


@pytest.mark.parametrize("part", ["manifest", "/data/"])
def test_a_compaction_that_can_not_write(failing: Failing, part: str) -> None:
    """It says so in one sentence, what it was about stays, and it is done the next time."""
    disk = failing(flush_ms=1, segment_bytes=65536)
    clients = Subscriber(disk)
    for round_, error in enumerate(ERRORS):
        clients.publish(1 + 300 * round_, 301 + 300 * round_)
        clients.expect(301 + 300 * round_)
        disk.until(lambda stats: stats["rows"] == len(clients.numbers) and not stats["disk_jobs"])
        files_before = set((disk.journal / "data").rglob("*.parquet"))
        disk.does("write", "sync", "change", error=error, part=part)
        code, said = disk.compact()
        assert code == 1
        assert os.strerror(error) in said, said
        assert "Traceback" not in said, said
        assert disk.numbers() == clients.numbers
        disk.is_well()
        assert disk.compact()[0] == 0
        assert disk.numbers() == clients.numbers
        files = {path for path in (disk.journal / "data").rglob("*") if path.is_file()}
        assert files > files_before
        assert {path.suffix for path in files} == {".parquet"}
