"""The manifest: pages that don't change under a root that does; what is looked at doesn't grow with the files."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from smqrt.errors import JournalError
from smqrt.journal import manifest, planning
from smqrt.journal.manifest import EVERYTHING, MAX_PAGE_FILES, DataFile
from smqrt.journal.reader import Journal


def data_file(first: int, rows: int = 10, node: str = "n1", topics: tuple[str, ...] | None = ("t",)) -> DataFile:
    path = f"data/date=2026-11-21/hour=05/{node}-{first:020d}-{first + rows - 1:020d}.parquet"
    return DataFile(path, node, first, first + rows - 1, rows, first * 1000, (first + rows) * 1000, 100, topics)


def fill(journal: Path, count: int, node: str = "n1") -> list[DataFile]:
    files = [data_file(at * 10, node=node) for at in range(count)]
    with manifest.edit(journal) as changes:
        changes.add(files)
        changes.nodes[node] = count * 10
    return files


def page_files(journal: Path) -> set[str]:
    return {path.name for path in (journal / manifest.PAGES_FOLDER).iterdir()}


def listed(journal: Path) -> set[str]:
    return {page.name for page in manifest.load(journal).pages()}


@pytest.fixture
def opened_pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of pages that were parsed, none of them known before."""
    manifest.load_page.cache_clear()
    found: list[str] = []
    parsed = manifest.parse_page

    def counted(page: manifest.ManifestPage, text: bytes) -> tuple[DataFile, ...]:
        found.append(page.name)
        return parsed(page, text)

    monkeypatch.setattr(manifest, "parse_page", counted)
    yield found
    manifest.load_page.cache_clear()


def test_without_a_manifest_nothing_is_compacted(tmp_path: Path) -> None:
    state = manifest.load(tmp_path)
    assert (state.nodes, state.pages(), list(state.all_files())) == ({}, [], [])
    assert json.loads(manifest.text(tmp_path)) == {"version": 2, "nodes": {}, "pages": []}


def test_files_by_node_and_number(tmp_path: Path) -> None:
    ones, twos = fill(tmp_path, 1000), fill(tmp_path, 30, "n2")
    state = manifest.load(tmp_path)
    assert state.nodes == {"n1": 10_000, "n2": 300}
    assert list(state.all_files()) == ones + twos
    assert list(state.files("n1", 2555, 2570)) == ones[255:257]
    assert list(state.files("n1", 9999, EVERYTHING)) == ones[-1:]
    assert list(state.files("n1", 10_000)) == list(state.files("n3")) == []
    assert (state.first("n1"), state.first("n3")) == (0, None)
    assert [page.files for page in state.pages("n1")] == [256, 256, 256, 232]
    assert sum(page.rows for page in state.pages()) == 10_300


def test_random_changes(tmp_path: Path) -> None:
    """Against a plain list: appended, merged and expired in any order, and no page is empty or too long."""
    chance, files, end = random.Random(7), list[DataFile](), 0
    for _ in range(25):
        with manifest.edit(tmp_path) as changes:
            if chance.random() < 0.6 or len(files) < 40:
                more = [data_file(end + at * 10) for at in range(chance.randint(1, 400))]
                end = more[-1].last + 1
                files += more
                changes.add(more)
            elif chance.random() < 0.5:
                at = chance.randrange(len(files) - 30)
                some = files[at : at + chance.randint(2, 30)]
                merged = data_file(some[0].first, sum(file.rows for file in some))
                changes.remove(some)
                changes.add([merged])
                files[at : at + len(some)] = [merged]
            else:
                count = chance.randint(1, len(files))
                changes.remove(files[:count])
                del files[:count]
            changes.nodes["n1"] = end
        state = manifest.load(tmp_path)
        assert list(state.files("n1")) == files
        assert all(0 < page.files <= MAX_PAGE_FILES for page in state.pages())
        start = chance.randrange(end)
        stop = chance.randrange(start, end) + 1
        assert list(state.files("n1", start, stop)) == [
            file for file in files if file.last >= start and file.first < stop
        ]


def test_work_does_not_grow_with_the_files(tmp_path: Path, opened_pages: list[str]) -> None:
    for count, most in ((100, 1), (10_000, 2)):
        journal = tmp_path / str(count)
        journal.mkdir()
        fill(journal, count)
        manifest.load_page.cache_clear()
        opened_pages.clear()
        reader = Journal(journal)
        assert reader.end() == {"n1": count * 10}
        assert reader.begin() == {"n1": 0}
        assert opened_pages == []
        middle = count * 5
        [part] = reader.plan({"n1": middle - 15}, {"n1": middle + 15})
        assert sum(chunk.rows for chunk in part) == 30
        assert reader.plan({}, {"n1": count * 10}, ts_us=(50_500, 50_600)) != []
        assert len(set(opened_pages)) == len(opened_pages) <= most
        with manifest.edit(journal) as changes:
            changes.add([data_file(count * 10)])
            changes.nodes["n1"] = count * 10 + 10
        assert len(opened_pages) <= most + 2


def test_pages_that_stay_the_same_are_not_written_again(tmp_path: Path) -> None:
    fill(tmp_path, 1000)
    before = {name: (tmp_path / manifest.PAGES_FOLDER / name).stat().st_ino for name in listed(tmp_path)}
    with manifest.edit(tmp_path) as changes:
        changes.add([data_file(10_000)])
    after = {name: (tmp_path / manifest.PAGES_FOLDER / name).stat().st_ino for name in listed(tmp_path)}
    assert len(before.items() & after.items()) == 3


def test_replaced_pages_stay_for_a_while(tmp_path: Path) -> None:
    files = fill(tmp_path, 300)
    old = manifest.load(tmp_path)
    manifest.load_page.cache_clear()
    with manifest.edit(tmp_path) as changes:
        changes.remove(files[:10])
    assert list(old.files("n1")) == files
    replaced = page_files(tmp_path) - listed(tmp_path)
    assert replaced
    for name in replaced:
        os.utime(tmp_path / manifest.PAGES_FOLDER / name, (0, time.time() - manifest.PAGE_GRACE_S - 1))
    with manifest.edit(tmp_path) as changes:
        changes.remove(files[10:11])
    assert not replaced & page_files(tmp_path)
    manifest.load_page.cache_clear()
    with pytest.raises(FileNotFoundError):
        list(old.files("n1"))
    assert list(manifest.load(tmp_path).files("n1")) == files[11:]


def test_what_a_crash_left_goes_later(tmp_path: Path) -> None:
    fill(tmp_path, 10)
    folder = tmp_path / manifest.PAGES_FOLDER
    (folder / "n1-new.json").write_text("{}")
    (folder / ".n1-old.json.77").write_text("{")
    os.utime(folder / ".n1-old.json.77", (0, 0))
    with manifest.edit(tmp_path) as changes:
        changes.add([data_file(100)])
    assert (folder / "n1-new.json").exists()
    assert not (folder / ".n1-old.json.77").exists()


def test_a_version_1_manifest_is_read_and_converted(tmp_path: Path) -> None:
    files = [data_file(at * 10) for at in range(600)]
    values = [{name: getattr(file, name) for name in ("path", "node", "first", "last", "rows", "ts_min_us",
              "ts_max_us", "bytes", "topics")} for file in reversed(files)]  # fmt: skip
    text = json.dumps({"version": 1, "nodes": {"n1": {"compacted_through": 6000}}, "files": values})
    (tmp_path / manifest.FILE).write_text(text)
    assert list(manifest.load(tmp_path).files("n1")) == files
    assert Journal(tmp_path).begin() == {"n1": 0}
    with manifest.edit(tmp_path) as changes:
        changes.remove(files[:5])
    state = manifest.load(tmp_path)
    assert list(state.files("n1")) == files[5:]
    assert state.nodes == {"n1": 6000}
    assert json.loads((tmp_path / manifest.FILE).read_text())["version"] == 2
    assert listed(tmp_path) == page_files(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '{"version": 3}', '{"version": 2, "nodes": {}}', "[" * 100_000, '{"version": 2, '
             '"nodes": {}, "pages": [{"name": "x"}]}', '{"version": 1, "nodes": {}, "files": [3]}'], ids=range(9),
)  # fmt: skip
def test_a_root_that_is_damaged(tmp_path: Path, text: str) -> None:
    (tmp_path / manifest.FILE).write_text(text)
    for _ in range(2):
        with pytest.raises(JournalError, match=r"manifest\.json can't be read"):
            manifest.load(tmp_path)


def test_a_page_that_is_damaged(tmp_path: Path) -> None:
    fill(tmp_path, 10)
    [name] = listed(tmp_path)
    path = tmp_path / manifest.PAGES_FOLDER / name
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"rows": 10', b'"rows": 11', 1))
    with pytest.raises(JournalError, match=rf"{path} can't be read: the digest in its name doesn't match its content"):
        list(manifest.load(tmp_path).files("n1"))


def test_two_change_it_at_once(tmp_path: Path) -> None:
    def one(worker: int) -> None:
        for at in range(20):
            with manifest.edit(tmp_path) as changes:
                changes.add([data_file((worker * 20 + at) * 10)])
                changes.nodes["n1"] = changes.nodes.get("n1", 0) + 10

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(4)))
    state = manifest.load(tmp_path)
    assert state.nodes == {"n1": 800}
    assert list(state.files("n1")) == [data_file(at * 10) for at in range(80)]


def test_a_failed_change_changes_nothing(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    before = (tmp_path / manifest.FILE).read_bytes()
    with pytest.raises(ZeroDivisionError), manifest.edit(tmp_path) as changes:
        changes.nodes["n1"] = 1 // 0
    assert (tmp_path / manifest.FILE).read_bytes() == before


def test_it_is_read_whole_while_it_is_changed(tmp_path: Path) -> None:
    files = fill(tmp_path, 500)

    def change() -> None:
        for _ in range(15):
            for step in ("remove", "add"):
                with manifest.edit(tmp_path) as changes:
                    getattr(changes, step)(files[:300])

    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(change)
        while not changing.done():
            assert len(list(manifest.load(tmp_path).all_files())) in (200, 500)
        changing.result()


# ---- files with many topics


def test_a_plan_leaves_out_files_of_many_topics(tmp_path: Path) -> None:
    def many(first: int, start: int) -> DataFile:
        names = [f"site{at}/temp" for at in range(start, start + 1000)]
        values = {name: getattr(data_file(first), name) for name in manifest.DataFile.__slots__}
        return DataFile(**{**values, "topics": None, "topic_filter": planning.bloom_filter(names)})

    with manifest.edit(tmp_path) as changes:
        changes.add(many(at * 10, at * 1000) for at in range(40))
        changes.nodes["n1"] = 400

    def planned(*topics: str) -> list[int]:
        return [chunk.start for part in Journal(tmp_path).plan({}, {"n1": 400}, topics=topics) for chunk in part]

    assert 120 in planned("site12007/temp")
    assert 120 in planned("site12007/#")
    assert len(planned("site12007/temp")) <= 8
    assert len(planned("#")) == 40


def test_the_very_first_row_is_among_all_files(tmp_path: Path) -> None:
    files = [data_file(0, 1), data_file(1, 1)]
    with manifest.edit(tmp_path) as changes:
        changes.add(files)
    state = manifest.load(tmp_path)
    assert list(state.files("n1")) == list(state.all_files()) == files
    assert list(state.files("n1", 1)) == files[1:]
    assert list(state.files("n1", 0, 1)) == files[:1]


def test_sizes_of_pages_are_those_of_the_manual() -> None:
    """help: journal"""
    assert (manifest.MAX_TOPICS, MAX_PAGE_FILES, manifest.MAX_PAGE_BYTES) == (64, 256, 512 * 1024)
    assert (manifest.VERSION, manifest.PAGE_GRACE_S, EVERYTHING) == (2, 120.0, 2**63)


def test_a_page_omits_what_a_file_does_not_have(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    [name] = page_files(tmp_path)
    [values] = json.loads((tmp_path / manifest.PAGES_FOLDER / name).read_text())["files"]
    assert list(values) == ["path", "node", "first", "last", "rows", "ts_min_us", "ts_max_us", "bytes", "topics"]
