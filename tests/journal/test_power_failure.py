"""After a power failure no number is given a second time: readers know rows that the disk has lost."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from smqrt.journal import recovery, segment, writer
from smqrt.journal.compact import CompactOptions, compact, rows_to_compact
from smqrt.journal.inspection import journal_stats, latest
from smqrt.journal.reader import Journal
from smqrt.journal.readers import backlogs
from smqrt.journal.segment import STEP, NumberReserve
from smqrt.journal.verification import verify
from smqrt.pipeline.smq_source import scan
from tests.journal import written
from tests.journal.failing_disk import FailingDisk, shim
from tests.journal.power import Ext4, SyncedDisk, ext4
from tests.journal.test_failing_disk import Subscriber
from tests.journal.test_remote import Hub, there
from tests.support.device import Site, bounded
from tests.support.waiting import wait_until

__all__ = ["ext4", "shim"]

Make = Callable[..., Site]


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    """Servers that start, and start again, take their time when others want the machine too."""
    with bounded(100):
        yield


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SyncedDisk]:
    root = tmp_path / "life-0"
    root.mkdir()
    disk = SyncedDisk(monkeypatch, root)
    yield disk
    writer.close_all()
    disk.close()


class Lives:
    """A hub with a journal whose machine loses its power again and again; `seen` is how far its readers are."""

    def __init__(self, disk: SyncedDisk, make_site: Make, options: dict[str, Any]) -> None:
        self._disk, self._make, self._options, self._lives = disk, make_site, options, 0
        self.seen = 0
        self.start()

    def start(self) -> None:
        self._site = self._make(journal={"path": str(self._disk.root / "journal"), **self._options})
        self.journal: writer.JournalWriter = self._site.smq.journal

    def publish(self, count: int) -> None:
        for _ in range(count):
            self._site.smq.publish("x" * 20, "topic")
        self.journal.flush()
        self.seen = Journal(self.journal.path).end()["n1"]  # as any reader does

    def sync(self) -> None:
        self.journal._durability.sync()
        self.journal._durability.join()

    def end(self) -> None:
        self.journal.close()

    def fail(self) -> None:
        self._lives += 1
        after = self._disk.root.parent / f"life-{self._lives}"
        self._disk.fail(after)
        self.journal.close()
        self._disk.begin(after)


@pytest.mark.parametrize("sync", ["1h", "publish", "always"])
def test_numbers_seen_by_a_reader_are_not_reused(disk: SyncedDisk, make_site: Make, sync: str) -> None:
    lives = Lives(disk, make_site, {"sync": sync})
    lives.publish(500)
    lives.fail()
    lives.start()
    start = {"n1": lives.seen}
    lives.publish(500)
    journal = Journal(lives.journal.path)
    assert len(list(journal.rows(start, journal.end()))) == 500
    assert verify(lives.journal.path).faults == []


@pytest.mark.parametrize("seed", range(6))
def test_no_number_comes_twice_whenever_the_power_fails(disk: SyncedDisk, make_site: Make, seed: int) -> None:
    random_ = random.Random(seed)
    sync = random_.choice(["1h", "publish"])
    most, size_bytes = (1500, 1 << 20) if sync == "1h" else (150, 1 << 17)  # "publish": each message is a batch
    lives = Lives(disk, make_site, {"sync": sync, "segment_bytes": size_bytes})
    for _ in range(12):
        before = lives.seen
        for _ in range(random_.randrange(4)):
            random_.choice([lambda: lives.publish(random_.randrange(1, most)), lives.sync])()
        if random_.random() < 0.3:
            lives.end()
        if random_.random() < 0.8:
            lives.fail()
        else:
            lives.end()
        lives.start()
        seen = max(before, lives.seen)
        lives.publish(3)
        journal = Journal(lives.journal.path)
        assert journal.end()["n1"] - 3 >= seen
        assert [row.seq for row in journal.rows({"n1": seen}, journal.end())] == list(range(lives.seen - 3, lives.seen))
        assert verify(lives.journal.path).faults == []
        assert Journal(lives.journal.path).count({}, journal.end()) == len(list(journal.rows({}, journal.end())))


def test_numbers_are_dense_when_a_hub_ends_in_order(disk: SyncedDisk, make_site: Make) -> None:
    lives = Lives(disk, make_site, {"sync": "1h"})
    for _ in range(3):
        lives.publish(5)
        lives.end()
        lives.start()
    lives.publish(1)
    assert lives.seen == 16


def test_a_hub_closed_while_finishing_keeps_its_last_segment(disk: SyncedDisk, make_site: Make) -> None:
    lives = Lives(disk, make_site, {"sync": "1h", "segment_bytes": 1 << 17})
    while not lives.journal._durability.is_sealing:  # on a busy machine a segment may be finished at once
        lives.publish(2500)
        assert lives.seen < 100_000
    time.sleep(0.3)  # the disk is done, and the event loop has not heard of it
    lives.publish(5)
    lives.end()
    lives.fail()
    assert [row.seq for row in Journal(disk.root / "journal").rows({}, {"n1": 1 << 62})] == [*range(lives.seen)]
    assert segment.reserved(disk.root / "journal/wal/n1") == lives.seen


def test_publishers_wait_until_used_numbers_are_synced(
    disk: SyncedDisk, make_site: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment, "STEP", 64)
    lives = Lives(disk, make_site, {"sync": "1h"})
    lives.publish(10)
    working = NumberReserve._write

    def broken(self: NumberReserve, below: int) -> None:
        raise OSError(5, "broken")

    monkeypatch.setattr(NumberReserve, "_write", broken)
    lives.publish(200)
    reserved = segment.reserved(lives.journal.path / "wal/n1")
    assert lives.seen <= reserved
    assert lives.journal.stats()["stalls"] == 1
    monkeypatch.setattr(NumberReserve, "_write", working)
    wait_until(lambda: lives.journal.end()["n1"] == 210, "the disk is well again", 20)
    assert segment.reserved(lives.journal.path / "wal/n1") >= 210


def test_fast_hubs_reserve_more_numbers_at_once(tmp_path: Path) -> None:
    reserve, sizes, seq = NumberReserve(tmp_path, 0), [], 0
    for _ in range(10):
        seq = reserve.below
        reserve.extend(seq)
        sizes.append(reserve.below - seq)
    assert sizes[:3] == [2 * STEP, 4 * STEP, 8 * STEP]
    assert max(sizes) == 64 * STEP


def test_a_damaged_reservation_gives_no_number_again(tmp_path: Path) -> None:
    written.write(tmp_path, [[5]])
    for text in (b"", b"{", b"[]", b'{"below": "x"}', b'{"below": -1}', b'{"below": 1e99}', b"null"):
        (tmp_path / "wal/n1/numbers.json").write_bytes(text)
        found = recovery.recover(tmp_path / "wal/n1")
        assert found.next_seq >= segment.MAX_LOST_ROWS
        assert "numbers.json is damaged" in found.faults[0]
        assert "numbers.json: is damaged" in str(verify(tmp_path).faults[0])
    NumberReserve(tmp_path / "wal/n1", found.next_seq)
    assert verify(tmp_path).faults == []


# ---- what a gap means


@pytest.fixture
def gapped(tmp_path: Path) -> Path:
    """Rows 0 to 11, and after a crash 25 from STEP on."""
    journal = tmp_path / "journal"
    written.write(journal, [[5], [12]])
    written.write(journal, [[STEP + 7], [STEP + 20, STEP + 25]], first=STEP)
    return journal


NUMBERS = [*range(12), *range(STEP, STEP + 25)]


def seqs(journal: Journal, start: int = 0) -> list[int]:
    return [row.seq for row in journal.rows({"n1": start}, journal.end())]


def test_a_gap_after_a_crash_is_no_fault(gapped: Path) -> None:
    report = verify(gapped)
    assert report.faults == []
    assert report.gaps == {"n1": [(12, STEP)]}


def test_missing_rows_are_one(gapped: Path) -> None:
    for path in sorted((gapped / "wal/n1").glob(f"{STEP:020d}.*")):
        path.unlink()
    assert "rows are missing" in str(verify(gapped).faults)


def test_readers_pass_a_gap(gapped: Path) -> None:
    journal = Journal(gapped)
    assert seqs(journal) == NUMBERS
    for start in (3, 12, 13, STEP - 1, STEP, STEP + 9):
        assert seqs(journal, start) == [seq for seq in NUMBERS if seq >= start]
        assert journal.count({"n1": start}, journal.end()) == len(seqs(journal, start))
        [first] = journal.after_gaps({"n1": start}, journal.end()).values()
        assert first in (start, min(seq for seq in NUMBERS if seq >= start))
    assert journal.after_gaps({"n1": 12}, journal.end()) == {"n1": STEP}
    assert journal.after_gaps({"n1": 12}, {"n1": STEP}) == {"n1": STEP}
    for count in (1, 25, 26, 30, 100):
        found = [recorded.row.seq for recorded in latest(journal, journal.end(), count)]
        assert found == NUMBERS[-count:]


def test_a_gap_is_no_lag(gapped: Path) -> None:
    (gapped / "readers").mkdir()
    (gapped / "readers/q.json").write_text('{"query": "q", "name": "q", "offset": {"n1": 10}, "time_us": 0}')
    assert [behind for _, behind in backlogs(gapped)] == [27]
    stats = journal_stats(Journal(gapped))
    assert (stats.rows, stats.readers) == (37, {"q": 27})


@pytest.mark.parametrize("hidden", [False, True])
def test_compaction_passes_a_gap(gapped: Path, hidden: bool) -> None:
    options = CompactOptions(grace_s=0, everything=True, max_group_bytes=1 if hidden else 1 << 28)
    assert rows_to_compact(gapped, options) == 37
    assert compact(gapped, options).rows == 37
    assert rows_to_compact(gapped, options) == 0
    compact(gapped, options)
    journal = Journal(gapped)
    assert not list((gapped / "wal/n1").glob("*.arrows"))
    assert seqs(journal) == NUMBERS
    assert journal.count({"n1": 4}, journal.end()) == 33
    assert journal.count({"n1": 4}, {"n1": STEP + 3}) == 11
    assert journal.after_gaps({"n1": 12}, journal.end()) == {"n1": STEP}
    report = verify(gapped)
    assert (report.faults, report.gaps) == ([], {"n1": [(12, STEP)]})


def test_compaction_up_to_a_gap(gapped: Path) -> None:
    """The rows before it are Parquet, those behind it are not."""
    newest = gapped / "wal/n1" / f"{STEP + 7:020d}"
    for path in [newest.with_suffix(".arrows"), newest.with_suffix(".idx")]:
        path.unlink()
    compact(gapped, CompactOptions(grace_s=0))
    journal = Journal(gapped)
    assert len(list((gapped / "wal/n1").glob("*.arrows"))) == 1
    assert seqs(journal) == [seq for seq in NUMBERS if seq < STEP + 7]
    assert verify(gapped).faults == []


def test_the_grace_of_segments_before_a_gap_is_kept(gapped: Path) -> None:
    compact(gapped, CompactOptions(grace_s=3600))
    assert len(list((gapped / "wal/n1").glob("*.arrows"))) == 4


def test_remote_readers_pass_a_gap(gapped: Path, tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    hub = Hub(tmp_path / "hub")
    (gapped / "wal").rename(hub.path / "wal")
    journal = hub.open()
    assert there(lambda: seqs(journal, 3)) == NUMBERS[3:]
    assert there(lambda: journal.count({"n1": 3}, journal.end())) == 34
    assert there(lambda: journal.after_gaps({"n1": 12}, journal.end())) == {"n1": STEP}
    there(journal.close)


def expired_before_a_gap(path: Path, crashes: int = 1) -> int:
    """A hub was killed, perhaps several times before it wrote more, and the rows before have expired; returns the
    number of the first row.
    """
    written.write(path, [[5], [12]])
    folder = path / "wal/n1"
    NumberReserve(folder, 12)
    for _ in range(crashes):
        found = recovery.recover(folder)
        NumberReserve(folder, found.next_seq, found.end)
        written.write(path, [[]], first=found.next_seq)
    written.write(path, [[found.next_seq + 7]], first=found.next_seq)
    for older in segment.paths(folder)[:-1]:
        older.unlink()
        older.with_suffix(".idx").unlink()
    return found.next_seq


@pytest.mark.parametrize("crashes", [1, 3])
def test_expired_rows_before_a_gap_are_not_missing(tmp_path: Path, crashes: int) -> None:
    behind = expired_before_a_gap(tmp_path, crashes)
    journal = Journal(tmp_path)
    assert journal.begin() == {"n1": behind}
    for seen in (12, 13, behind - 1, behind):
        start = {"n1": seen}
        assert journal.begin(start) == start
        assert scan.checked(start, journal.end(), journal.begin(start), journal.end(), fail=True)[0] == start
    assert journal.begin({"n1": 11}) == {"n1": behind}, "a row is missing"
    assert journal.begin({"n1": behind + 3}) == {"n1": behind}
    (tmp_path / "wal/n1" / f"{behind:020d}.arrows").unlink()
    (tmp_path / "wal/n1" / f"{behind:020d}.idx").unlink()
    written.write(tmp_path, [[behind + 9]], first=behind + 7)
    assert journal.begin({"n1": 12}) == {"n1": behind + 7}, "rows behind the gap are missing"


def test_remote_readers_know_so_too(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    hub = Hub(tmp_path / "hub")
    behind = expired_before_a_gap(hub.path)
    journal = hub.open()
    assert there(lambda: journal.begin({"n1": 12})) == {"n1": 12}
    assert there(lambda: journal.begin({"n1": 11})) == {"n1": behind}
    there(journal.close)


def test_gaps_stay_known(tmp_path: Path) -> None:
    """Of the many crashes of a node those of the newest, also when a hub ends in order; older hubs note none."""
    for crash in range(300):
        NumberReserve(tmp_path, STEP * (crash + 1), STEP * crash + 5)
    NumberReserve(tmp_path, STEP * 300 + 7).release(STEP * 300 + 9)
    found = segment.gaps(tmp_path)
    assert len(found) == segment.MAX_GAPS
    assert found[-1] == (STEP * 299 + 5, STEP * 300)
    for text in ('{"below": 5}', '{"below": 5, "gaps": [1]}', "[]", "{"):
        (tmp_path / "numbers.json").write_text(text)
        assert segment.gaps(tmp_path) == []


def test_a_micro_batch_begins_behind_a_gap(gapped: Path) -> None:
    journal = Journal(gapped)
    first = journal.after_gaps({"n1": 12}, journal.end())
    assert scan.limited(first, journal.end(), 10) == {"n1": STEP + 10}


def test_a_torn_end_before_a_gap(tmp_path: Path) -> None:
    """The hub was killed in a write, and again before it wrote anything."""
    written.write(tmp_path, [[5]])
    folder = tmp_path / "wal/n1"
    NumberReserve(folder, 5)
    (folder / f"{0:020d}.arrows").open("ab").write(b"torn")
    for _ in range(3):
        found = recovery.recover(folder)
        NumberReserve(folder, found.next_seq)
        segment.SegmentFile.open(folder, found.next_seq, "n1", "b").close()
    assert found.next_seq % STEP == 0
    opened = segment.SegmentFile.open(folder, found.next_seq, "n1", "hub-n1")
    written.append(opened, written.rows(found.next_seq, found.next_seq + 2))
    opened.close()
    assert verify(tmp_path).faults == []
    compact(tmp_path, CompactOptions(grace_s=0, everything=True))
    assert verify(tmp_path).faults == []
    assert len(seqs(Journal(tmp_path))) == 7


# ---- a real disk


@pytest.mark.servers
def test_an_ext4_that_aborts(ext4: Ext4, tmp_path: Path, shim: Path) -> None:
    """A reader has passed 501 messages that the disk has lost; the next 500 all reach it."""
    hub = FailingDisk(tmp_path, shim, {"sync": "1h", "min_free_bytes": 0})
    assert hub.journal == ext4.at
    before = Subscriber(hub)
    before.publish(1, 501)
    hub.until(lambda stats: stats["rows"] == 501)
    seen = Journal(hub.journal).end()
    ext4.abort()
    hub.served.process.kill()
    hub.served.wait()
    ext4.unmount()
    ext4.mount()
    hub.start()
    try:
        after = Subscriber(hub)
        after.publish(1, 500)
        hub.until(lambda stats: stats["rows"] == 500)
        journal = Journal(hub.journal)
        assert [int(row.payload[:8]) for row in journal.rows(seen, journal.end())] == list(range(500))
        assert verify(hub.journal).faults == []
    finally:
        hub.served.process.kill()
        hub.served.wait()


PROGRAM = """
import sys
from smqrt import hub
smq = hub.create(journal=sys.argv[1])
smq.publish(b"x", "topic")
"""


def test_a_program_with_an_open_hub_ends_normally(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    for end in (1, 2):
        subprocess.run([sys.executable, "-c", PROGRAM, journal], check=True, timeout=60)
        assert seqs(Journal(journal)) == list(range(end))
