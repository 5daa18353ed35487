"""Retention: old rows go, and the oldest when there are too many; never what a pipeline has yet to read."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from smqrt.errors import JournalError
from smqrt.journal import manifest, readers, retention, segment
from smqrt.journal.parquet_files import remove_retired
from smqrt.journal.reader import Journal
from smqrt.journal.segment import summary_of
from smqrt.journal.settings import JournalSettings
from tests.journal import written
from tests.journal.written import START_US

KEEP = JournalSettings(Path(), retain_s=None, max_bytes=None, reader_timeout_s=None, min_free_bytes=0)
SECOND_US = 1_000_000


def names(paths: list[Path]) -> list[str]:
    return [path.name.lstrip("0") for path in paths]


def report(journal: Path, query: str, **offset: int) -> None:
    (journal / "readers").mkdir(exist_ok=True)
    (journal / "readers" / f"{query}.json").write_text(json.dumps({"query": query, "offset": offset}))


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Four segments of 100 rows, one row a second."""
    written.write(tmp_path, [[50, 100], [200], [300], [400]], step_us=SECOND_US)
    return tmp_path


def size(journal: Path) -> int:
    """What limits are compared with: rows and their index."""
    return sum(path.stat().st_size for path in journal.rglob("*") if path.suffix in (".arrows", ".idx", ".parquet"))


def test_nothing_goes_without_limits(journal: Path) -> None:
    assert retention.expired(journal, KEEP, 1 << 62) == []


def test_what_is_old_goes_as_a_whole(journal: Path) -> None:
    settings = replace(KEEP, retain_s=100.0)
    for now_s, gone in ((199, 0), (201, 1), (299, 1), (301, 2), (10_000, 3)):
        found = retention.expired(journal, settings, START_US + now_s * SECOND_US)
        assert len(found) == 2 * gone
    assert names(found) == [".arrows", ".idx", "100.arrows", "100.idx", "200.arrows", "200.idx"]


def test_the_oldest_go_when_there_are_too_many(journal: Path) -> None:
    total, first = size(journal), segment.paths(journal / "wal/n1")[0].stat().st_size
    assert retention.expired(journal, replace(KEEP, max_bytes=total), 0) == []
    assert names(retention.expired(journal, replace(KEEP, max_bytes=total - first // 2), 0)) == [".arrows", ".idx"]
    assert len(retention.expired(journal, replace(KEEP, max_bytes=1), 0)) == 6


def test_what_a_pipeline_has_yet_to_read_stays(journal: Path) -> None:
    report(journal, "slow", n1=150)
    report(journal, "fast", n1=400)
    report(journal, "elsewhere", n2=0)
    settings = replace(KEEP, retain_s=1.0, max_bytes=1)
    assert names(retention.expired(journal, settings, 1 << 62)) == [".arrows", ".idx"]
    report(journal, "slow", n1=200)
    assert len(retention.expired(journal, settings, 1 << 62)) == 4


def test_unless_the_disk_would_be_full(journal: Path) -> None:
    report(journal, "stopped", n1=0)
    settings = replace(KEEP, max_bytes=1, hard_bytes=size(journal) - 10)
    assert names(retention.expired(journal, settings, 0)) == [".arrows", ".idx"]
    assert retention.expired(journal, replace(settings, hard_bytes=size(journal)), 0) == []


DAY_S = 86400


def silent(journal: Path, query: str, days: float) -> int:
    """Lets a report be so old; returns the time now, in microseconds."""
    now_s = time.time()
    os.utime(journal / "readers" / f"{query}.json", (now_s - days * DAY_S,) * 2)
    return int(now_s * 1e6)


def test_a_pipeline_without_process_is_abandoned(journal: Path) -> None:
    report(journal, "forgotten", n1=0)
    settings = replace(KEEP, retain_s=1.0, path=journal, reader_timeout_s=7.0 * DAY_S)
    assert retention.expired(journal, settings, silent(journal, "forgotten", 6.9)) == []
    assert len(retention.expired(journal, settings, silent(journal, "forgotten", 7.1))) == 6
    assert retention.expired(journal, replace(settings, reader_timeout_s=None), 1 << 60) == []


def test_no_pipeline_fills_the_disk(journal: Path) -> None:
    report(journal, "slow", n1=0)
    free = shutil.disk_usage(journal).free
    settings = replace(KEEP, retain_s=1.0, min_free_bytes=0)
    assert retention.expired(journal, settings, 1 << 62) == []
    assert len(retention.expired(journal, replace(settings, min_free_bytes=2 * free), 1 << 62)) == 6
    assert retention.expired(journal, replace(settings, min_free_bytes=2 * free), 0) == [], "what is kept anyway stays"


def test_parquet_goes_from_the_manifest_too(journal: Path) -> None:
    written.to_parquet(journal, [60, 250], step_us=SECOND_US)
    written.drop_compacted(journal)
    settings = replace(KEEP, retain_s=100.0)
    for now_s, begin in ((100, 0), (200, 60), (351, 250), (401, 300)):
        found = retention.expired(journal, settings, START_US + now_s * SECOND_US)
        before = size(journal)
        freed = retention.remove(journal, found)
        assert bool(freed) == bool(found) == (begin > 0)
        assert before - size(journal) >= freed
        assert Journal(journal).begin() == {"n1": begin}
        listed = {file.path for file in manifest.load(journal).all_files()}
        assert listed == {path.relative_to(journal).as_posix() for path in journal.rglob("*.parquet")}
        assert [row.seq for row in Journal(journal).rows({}, {"n1": 400})] == list(range(begin, 400))


def test_a_clock_that_went_back_makes_no_hole(tmp_path: Path) -> None:
    folder = tmp_path / "wal/n1"
    for at, hours in enumerate((3, 1, 6, 7)):
        opened = segment.SegmentFile.open(folder, at, "n1", "hub")
        written.append(opened, [written.row(at)._replace(ts_us=START_US + hours * 3600 * SECOND_US)])
        opened.close()
    settings = replace(KEEP, retain_s=3600.0)
    assert retention.expired(tmp_path, settings, START_US + int(3.5 * 3600) * SECOND_US) == []
    assert len(retention.expired(tmp_path, settings, START_US + int(6.5 * 3600) * SECOND_US)) == 4


def test_rows_of_the_future_go_with_those_after_them(tmp_path: Path) -> None:
    """The clock was ten years ahead once: nothing would have gone for ten years."""
    folder, hour_us = tmp_path / "wal/n1", 3600 * SECOND_US
    for at, hours in enumerate((1, 87_600, 87_601, 2, 3, 9)):
        opened = segment.SegmentFile.open(folder, at, "n1", "hub")
        written.append(opened, [written.row(at)._replace(ts_us=START_US + hours * hour_us)])
        opened.close()
    settings = replace(KEEP, retain_s=3600.0)
    assert len(retention.expired(tmp_path, settings, START_US + int(2.5 * hour_us))) == 2
    assert len(retention.expired(tmp_path, settings, START_US + int(3.5 * hour_us))) == 8
    assert len(retention.expired(tmp_path, settings, START_US + 10 * hour_us)) == 10


def test_a_report_of_the_future_counts_from_now_on(journal: Path) -> None:
    report(journal, "q", n1=0)
    settings = replace(KEEP, retain_s=1.0, path=journal, reader_timeout_s=7.0 * DAY_S)
    silent(journal, "q", -3650)
    readers.ReaderWatch(settings).check(time.time_ns() // 1000)
    now_us = time.time_ns() // 1000
    assert retention.expired(journal, settings, now_us) == []
    assert len(retention.expired(journal, settings, now_us + int(7.1 * DAY_S * 1e6))) == 6


def test_files_dated_in_the_future_expire(tmp_path: Path) -> None:
    path, ahead_s = tmp_path / "retired" / "n1.parquet", time.time() + 3650 * DAY_S
    path.parent.mkdir()
    path.touch()
    os.utime(path, (ahead_s, ahead_s))
    remove_retired(tmp_path, 3600)
    assert path.stat().st_mtime <= time.time()
    remove_retired(tmp_path, 0)
    assert not path.exists()


def test_nodes_share_the_room(tmp_path: Path) -> None:
    written.write(tmp_path, [[100], [200], [300]], "n1", step_us=SECOND_US)
    written.write(tmp_path, [[100], [200], [300]], "n2", step_us=SECOND_US)
    found = retention.expired(tmp_path, replace(KEEP, retain_s=1.0), START_US + 150 * SECOND_US)
    assert {path.parent.name for path in found} == {"n1", "n2"}
    report(tmp_path, "q", n1=0)
    found = retention.expired(tmp_path, replace(KEEP, max_bytes=1), 0)
    assert [path.parent.name for path in found] == ["n2"] * 4


def test_readers_never_see_a_hole(tmp_path: Path) -> None:
    random_ = random.Random(8)
    written.write(tmp_path, written.random_ends(random_, 300))
    for now in range(0, 300, 7):
        if now % 3 == 0 and now > manifest.load(tmp_path).nodes.get("n1", 0):
            written.to_parquet(tmp_path, [now])
        settings = replace(KEEP, retain_s=0.02)
        retention.remove(tmp_path, retention.expired(tmp_path, settings, START_US + now * 1000))
        journal = Journal(tmp_path)
        begin = journal.begin()["n1"]
        assert begin <= max(0, now - 20)
        assert [row.seq for row in journal.rows({}, {"n1": 300})] == list(range(begin, 300))


def test_what_has_gone_already(journal: Path) -> None:
    found = retention.expired(journal, replace(KEEP, max_bytes=1), 0)
    found[0].unlink()
    assert retention.remove(journal, found) > 0
    assert retention.remove(journal, found) == 0


def test_a_report_that_is_damaged(journal: Path) -> None:
    report(journal, "q", n1=3)
    (journal / "readers" / "q.json").write_text("{}")
    with pytest.raises(JournalError, match=r"readers/q\.json can't be read .*; `smqrt pipeline reset` removes it"):
        retention.expired(journal, KEEP, 0)


def test_of_many_segments_only_the_oldest_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written.write(tmp_path, [[at] for at in range(1, 101)], step_us=SECOND_US)
    read: list[Path] = []
    of = summary_of
    monkeypatch.setattr(retention, "summary_of", lambda path: read.append(path) or of(path))
    assert retention.expired(tmp_path, replace(KEEP, retain_s=1000.0), START_US + 500 * SECOND_US) == []
    assert [path.stem for path in read] == [f"{0:020d}"]
    found = retention.expired(tmp_path, replace(KEEP, retain_s=1000.0), START_US + 1010 * SECOND_US)
    assert len(found) == 20
    assert len(read) == 12
    retention.remove(tmp_path, found)
    assert len(list((tmp_path / "wal/n1").iterdir())) == 2 * 90 + 1  # one summary was made: of the first that stays


def test_a_missing_or_wrong_summary_is_rebuilt(tmp_path: Path) -> None:
    written.write(tmp_path, [[30, 50], [60]])
    path = segment.paths(tmp_path / "wal/n1")[0]
    made = summary_of(path)
    assert made == (0, 50, 50, 2, START_US, START_US + 49_000, 128)
    kept = path.with_suffix(segment.SUMMARY)
    for data in (b"", b"x" * 64, kept.read_bytes()[:-1] + b"\x01", bytes(64)):
        kept.write_bytes(data)
        assert segment.known_summary(path) is None
        assert summary_of(path) == made == segment.known_summary(path)
    with path.with_suffix(segment.INDEXED).open("r+b") as file:
        file.truncate(64)
    assert summary_of(path) == (0, 30, 30, 1, START_US, START_US + 29_000, 64)
    path.with_suffix(segment.INDEXED).unlink()
    assert summary_of(path).batches == 0
    path.unlink()
    with pytest.raises(FileNotFoundError):
        summary_of(path)


# ---- held files


@pytest.fixture
def compacted(tmp_path: Path) -> Path:
    """Three compacted files of ten rows."""
    written.write(tmp_path, [[10, 20, 30], [40]])
    written.to_parquet(tmp_path, [10, 20, 30])
    return tmp_path


def files_of(journal: Path) -> list[manifest.DataFile]:
    return list(manifest.load(journal).all_files())


def test_held_files_stay_after_they_are_removed(compacted: Path) -> None:
    files = files_of(compacted)
    contents = [(compacted / file.path).read_bytes() for file in files]
    began_s = time.time()
    held = retention.hold_files(compacted, files)
    assert retention.hold_files(compacted, files) == held
    [folder] = {path.parent for path in held}
    assert (folder.parent, str(os.getpid()) in folder.name) == (compacted / retention.HELD_FOLDER, True)
    for file in files:
        (compacted / file.path).unlink()
    assert [path.read_bytes() for path in held] == contents
    until_s = retention.held_until_s(held[0])
    assert until_s is not None
    assert began_s + retention.HOLD_S <= until_s <= time.time() + retention.HOLD_S
    assert retention.held_until_s(compacted / files[0].path) is None
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError):
        retention.hold_files(compacted, files)


def test_links_of_a_living_process_are_released_in_time(compacted: Path) -> None:
    [path, *_] = retention.hold_files(compacted, files_of(compacted))
    for later_s in (0.0, retention.HOLD_S - 60):
        retention.release_links(compacted, time.time() + later_s)
        assert path.exists()
    retention.release_links(compacted, time.time() + retention.HOLD_S + 60)
    assert not path.parent.exists()


def test_links_of_an_ended_process_are_released_at_once(compacted: Path) -> None:
    code = "import sys, os; from pathlib import Path; from smqrt.journal import manifest, retention"
    code += "; at = Path(sys.argv[1]); held = retention.hold_files(at, list(manifest.load(at).all_files()))"
    code += "; print(held[0], flush=True); os._exit(0)"
    done = subprocess.run([sys.executable, "-c", code, str(compacted)], capture_output=True, text=True, check=True)
    path = Path(done.stdout.strip())
    mine = retention.hold_files(compacted, files_of(compacted))
    assert path.exists()
    retention.release_links(compacted, time.time())
    assert not path.parent.exists()
    assert all(one.exists() for one in mine)


def test_a_folder_of_another_machine_is_kept(compacted: Path) -> None:
    folder = retention.hold_files(compacted, files_of(compacted))[0].parent
    other = folder.with_name(folder.name + "x")
    shutil.copytree(folder, other)
    (other / ".lock").write_text("another machine")
    unfinished = folder.with_name(f".new-{folder.name}")
    unfinished.mkdir()
    retention.release_links(compacted, time.time())
    assert other.exists()
    assert unfinished.exists()
    (other / ".lock").unlink()
    os.utime(unfinished, (0, time.time() - 70))
    retention.release_links(compacted, time.time())
    assert not other.exists()
    assert not unfinished.exists()
    assert folder.exists()


def test_a_full_disk_releases_links_of_expired_files(compacted: Path) -> None:
    files = files_of(compacted)
    first, second, _ = retention.hold_files(compacted, files)
    (compacted / files[0].path).unlink()
    retention.release_links(compacted, time.time(), is_full=True)
    assert not first.exists()
    assert second.exists()


def test_files_of_another_file_system_are_their_own_paths(compacted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    files = files_of(compacted)
    assert retention.hold_files(compacted, files) == [compacted / file.path for file in files]
    (compacted / files[1].path).unlink()
    with pytest.raises(FileNotFoundError):
        retention.hold_files(compacted, files)


def test_removed_bytes_are_counted(compacted: Path) -> None:
    files = files_of(compacted)
    segments = segment.paths(compacted / "wal" / "n1")[:1]
    paths = [compacted / files[0].path, *segments, compacted / "wal" / "n1" / "gone.arrows"]
    size_bytes = sum(path.stat().st_size for path in paths[:2])
    assert retention.remove(compacted, paths) == size_bytes
    assert not any(path.exists() for path in paths)
    assert files_of(compacted) == files[1:]


def test_files_are_held_for_24_hours() -> None:
    """help: journal"""
    assert retention.HOLD_S == 24 * 60 * 60
