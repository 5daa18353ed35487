"""Two hubs with nodes of their own in one journal folder: what one has committed, neither stores a second time."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gevent
import pytest

from smqrt import hub
from smqrt.journal import commit, committed, compact, manifest, segment, writer
from smqrt.journal.announcer import Announcer, lock_announcement
from smqrt.journal.files import HubAddress
from smqrt.journal.reader import Journal
from tests.conftest import Served
from tests.support.waiting import wait_until

APPLICATION = """
from smqrt import hub

smq = hub.create(journal={settings!r})
"""
SEGMENT_BYTES = 65536
ROWS = [(b"out", None, bytes(60_000))] * 3
"""Longer than a segment: what is stored behind them goes into a new one."""


class Pair:
    """Two `smqrt serve`, "n1" and "n2", each with an application of its own, and the folder that both write to."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.journal = folder, folder / "journal"
        self.served: dict[str, Served] = {}

    def start(self, node: str) -> None:
        app = self.folder / node
        app.mkdir(exist_ok=True)
        settings = {"path": str(self.journal), "node": node, "name": node, "segment_bytes": SEGMENT_BYTES}
        (app / ".preload.py").write_text(APPLICATION.format(settings=settings))
        self.served[node] = Served(app)
        assert self.served[node].port

    def kill(self, node: str) -> None:
        self.served[node].process.kill()
        self.served[node].wait()

    def stop(self, node: str) -> None:
        assert self.served[node].stop() == 0

    def commit(self, node: str, query: str, batch: int) -> bool:
        """Commits to one of the two; returns whether it stored the rows."""
        token = (self.journal / "token").read_text().strip()
        address = HubAddress.of(f"{self.served[node].url}/rtl/journal/{node}", token)
        return commit.commit(address, query, batch, ROWS, retry_s=0)

    def stored(self, query: str) -> list[str | None]:
        """The commits of a query that the journal has, once for each."""
        journal = Journal(self.journal)
        found = [row.txn for row in journal.rows(journal.begin(), journal.end()) if row.txn]
        return [txn for txn in found[:: len(ROWS)] if txn and txn.startswith(query)]

    def announced(self) -> str:
        """Which of them pipelines are told to go to; empty when none."""
        try:
            values = json.loads((self.journal / "hub.json").read_text())
        except FileNotFoundError:
            return ""
        return next((node for node, served in self.served.items() if served.process.pid == values["pid"]), "")

    def close(self) -> None:
        for served in self.served.values():
            served.process.send_signal(signal.SIGCONT)
            served.process.kill()
            served.wait()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    pair.start("n1")
    pair.start("n2")
    yield pair
    pair.close()


@pytest.mark.servers
def test_a_killed_hub_has_its_commits(pair: Pair) -> None:
    assert pair.commit("n1", "a", 0)
    assert all(pair.commit("n1", "b", batch) for batch in range(3))
    assert all(pair.commit("n2", "c", batch) for batch in range(3))
    wait_until(lambda: committed.load_snapshot(pair.journal / "wal/n2").get("c", 0) >= 1, "it comes to that")
    pair.kill("n1")
    pair.start("n1")
    assert not pair.commit("n1", "a", 0)
    assert not pair.commit("n1", "b", 2)
    assert pair.commit("n1", "b", 3)
    assert (pair.stored("a"), pair.stored("b")) == (["a:0"], [f"b:{batch}" for batch in range(4)])


@pytest.mark.servers
def test_each_hub_says_what_was_committed_to_the_other(pair: Pair) -> None:
    """A pipeline whose checkpoint is lost asks any of them where it goes on."""
    token = (pair.journal / "token").read_text().strip()
    for batch in range(4):
        here, there = ("n1", "n2")[:: 1 if batch % 2 else -1]
        assert pair.commit(here, "q", batch)
        address = HubAddress.of(f"{pair.served[there].url}/rtl/journal/{there}", token)
        assert commit.last_batch(address, "q") == batch


def test_parts_committed_to_one_hub_are_sealed_only_there(pair: Pair) -> None:
    """A repetition of the micro-batch may be cut into more parts, of which some would be new."""
    token = (pair.journal / "token").read_text().strip()
    for node, pieces in (("n1", 1), ("n2", 3)):
        address = HubAddress.of(f"{pair.served[node].url}/rtl/journal/{node}", token)
        parts = [part for _ in range(pieces) for part in commit.stage(address, "q", 0, ROWS[:1], 0)]
        commit.commit_staged(address, "q", 0, parts, 0)
    assert len([row for row in Journal(pair.journal).rows({}, Journal(pair.journal).end()) if row.txn]) == 1


def test_pipelines_use_the_first_then_the_second(pair: Pair) -> None:
    assert pair.announced() == "n1"
    assert pair.commit("n1", "a", 0)
    pair.kill("n1")
    wait_until(lambda: pair.announced() == "n2", "it comes to that")
    assert not pair.commit("n2", "a", 0)
    assert pair.commit("n2", "a", 1)
    pair.start("n1")
    assert pair.announced() == "n2"
    assert not pair.commit("n1", "a", 1)
    pair.stop("n2")
    wait_until(lambda: pair.announced() == "n1", "it comes to that")
    assert not pair.commit("n1", "a", 1)
    assert pair.commit("n1", "a", 2)
    pair.stop("n1")
    assert pair.announced() == ""
    assert sorted(map(str, pair.stored("a"))) == ["a:0", "a:1", "a:2"]


def test_a_folder_of_an_earlier_version(tmp_path: Path) -> None:
    """It had one snapshot for all nodes, in which only the last writer's commits were sure to be."""
    manifest.write_json(tmp_path / committed.COMMITS_FILE, {"old": 7})
    rows = [(b"out", None, b"x")]
    settings: dict[str, Any] = {"path": str(tmp_path), "name": "first"}
    first = hub.create(journal=settings)
    assert not first.journal.commit("old", 7, rows)
    assert first.journal.commit("old", 8, rows)
    first.journal.close()
    os.utime(tmp_path / committed.COMMITS_FILE)
    again = hub.create(journal=settings)
    assert [again.journal.commit("old", batch, rows) for batch in (7, 8, 9)] == [False, False, True]
    again.journal.close()


Create = Callable[[str], Any]


@pytest.fixture
def create(tmp_path: Path) -> Iterator[Create]:
    """Makes a hub of this process that writes as a node of its own to the one folder."""
    made = []

    def create(node: str) -> Any:
        made.append(hub.create(journal={"path": str(tmp_path), "name": node, "node": node}))
        return made[-1].journal

    yield create
    for each in made:
        each.journal.close()


def test_two_of_one_process(create: Create, tmp_path: Path) -> None:
    def url() -> str:
        return str(json.loads((tmp_path / "hub.json").read_text())["url"])

    first, second = create("n1"), create("n2")
    announcer = Announcer(writer.opened, "http://127.0.0.1:1")
    announcer.start()
    assert url().endswith("/n1")
    assert first.commit("q", 0, [(b"t", None, b"x")])
    first.close()
    announcer.refresh()
    assert url().endswith("/n2")
    assert not second.commit("q", 0, [(b"t", None, b"x")])
    announcer.stop()
    assert not (tmp_path / "hub.json").exists()


def test_a_query_goes_from_hub_to_hub_and_back(create: Create) -> None:
    """By their URLs, while both are there."""
    rows = [(b"t", None, b"x")]
    hubs = create("n1"), create("n2")
    assert hubs[0].commit("q", 0, rows)
    for batch in range(1, 20):
        one, other = hubs[batch % 2], hubs[1 - batch % 2]
        assert not one.commit("q", batch - 1, rows)
        assert one.commit("q", batch, rows)
        assert not other.commit("q", batch, rows)
    assert sum(journal.stats()["rows"] for journal in hubs) == 20


def test_the_other_hub_finds_commits_of_compacted_segments(create: Create, tmp_path: Path) -> None:
    rows = [(b"t", None, b"x")]
    first, second = create("n1"), create("n2")
    assert first.commit("q", 0, rows)
    assert not second.commit("q", 0, rows)  # it has looked
    assert first.commit("q", 1, rows)
    first._seal()
    wait_until(lambda: committed.load_snapshot(tmp_path / "wal/n1").get("q") == 1, "the disk has it")
    compact.compact(tmp_path, compact.CompactOptions(grace_s=0))
    assert all(segment.first_seq(path) >= 2 for path in segment.paths(tmp_path / "wal/n1"))
    assert not second.commit("q", 1, rows)
    assert second.commit("q", 2, rows)


def test_the_same_commit_to_two_hubs_at_once(create: Create) -> None:
    many = [(b"t", None, b"%d" % number) for number in range(3000)]
    hubs = create("n1"), create("n2")
    both = [gevent.spawn(journal.commit, "q", 0, many) for journal in hubs]
    gevent.joinall(both)
    assert sorted(one.value for one in both) == [False, True]


def test_failed_announcements_of_a_hub_are_reported_once(
    create: Create, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    create("n1")
    announcer = Announcer(writer.opened, "http://127.0.0.1:1")
    other = tmp_path / "wal" / "n2"
    other.mkdir()
    (other / committed.COMMITS_FILE).write_text("no")
    for _ in range(3):
        announcer.refresh()
    assert caplog.text.count("n2/txn.json is damaged") == 1
    assert not (tmp_path / "hub.json").exists()
    (other / committed.COMMITS_FILE).unlink()
    announcer.refresh()
    assert (tmp_path / "hub.json").exists()
    announcer.stop()
    held = lock_announcement(tmp_path)
    assert held is not None
    os.close(held)
