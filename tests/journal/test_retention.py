"""Retention: old rows go, and the oldest when there are too many; never what a pipeline has yet to read."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from smqrt.errors import JournalError
from smqrt.journal import manifest, retention, segment
from smqrt.journal.manifest import DataFile, Manifest
from smqrt.journal.reader import Journal
from smqrt.journal.settings import JournalSettings
from tests.journal import written
from tests.journal.written import START_US

KEEP = JournalSettings(Path(), retain_s=None, max_bytes=None)
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
    return sum(path.stat().st_size for path in journal.rglob("*") if path.is_file() and path.parent.name != "readers")


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
        listed = {file.path for file in manifest.load(journal).files}
        assert listed == {path.relative_to(journal).as_posix() for path in journal.rglob("*.parquet")}
        assert [row.seq for row in Journal(journal).rows({}, {"n1": 400})] == list(range(begin, 400))


def test_a_clock_that_went_back_makes_no_hole(tmp_path: Path) -> None:
    folder = tmp_path / "wal/n1"
    for at, hours in enumerate((5, 1, 6, 7)):
        opened = segment.SegmentFile.open(folder, at, "n1", "hub")
        written.append(opened, [written.row(at)._replace(ts_us=START_US + hours * 3600 * SECOND_US)])
        opened.close()
    settings = replace(KEEP, retain_s=3600.0)
    assert retention.expired(tmp_path, settings, START_US + 4 * 3600 * SECOND_US) == []
    assert len(retention.expired(tmp_path, settings, START_US + int(6.5 * 3600) * SECOND_US)) == 4


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


def test_two_change_the_manifest(tmp_path: Path) -> None:
    """Nobody's change is lost, and who fails changes nothing."""
    with manifest.edit(tmp_path) as known:
        known.nodes["n1"] = 5
    with pytest.raises(ZeroDivisionError), manifest.edit(tmp_path) as known:
        known.nodes["n1"] = 1 // 0
    with manifest.edit(tmp_path) as known:
        known.nodes["n2"] = 7
    assert manifest.load(tmp_path).nodes == {"n1": 5, "n2": 7}


def test_changes_of_many_come_after_each_other(tmp_path: Path) -> None:
    def count() -> None:
        for _ in range(20):
            with manifest.edit(tmp_path) as known:
                known.nodes["n1"] = known.nodes.get("n1", 0) + 1

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(count) for _ in range(4)]:
            done.result(20)
    assert manifest.load(tmp_path).nodes == {"n1": 80}


def test_a_manifest_is_read_whole(tmp_path: Path) -> None:
    """While it is written over and over."""
    files = [DataFile(f"data/{at}.parquet", "n1", at, at, 1, at, at, 1, ("a",)) for at in range(500)]
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(lambda: [manifest.save(tmp_path, Manifest({"n1": 500}, files)) for _ in range(15)])
        while not writing.done():
            assert len(manifest.load(tmp_path).files) in (0, 500)
        writing.result()
    assert manifest.load(tmp_path) == Manifest({"n1": 500}, files)
