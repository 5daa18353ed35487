"""Which hub of a folder is announced, what remote readers see of a journal, and how they wait for rows."""

from __future__ import annotations

import json
import logging
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gevent
import pytest

from smqrt.errors import JournalError
from smqrt.journal import announcer, files, segment
from smqrt.journal.announcer import Announcer, JournalEnds, JournalListing, lock_announcement
from smqrt.journal.reader import Journal
from tests.journal import written
from tests.support.device import bounded
from tests.support.waiting import wait_until

URL = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    with bounded(30):
        yield


class Opened:
    """An open journal, and whether it was announced when the commits to other hubs were read."""

    def __init__(self, path: Path) -> None:
        self.path, self.announced = path, list[bool]()

    def read_other_commits(self) -> None:
        self.announced.append((self.path / "hub.json").exists())


def announced(path: Path) -> str:
    """The announced name of a journal; empty without one."""
    try:
        return str(json.loads((path / "hub.json").read_text())["url"]).removeprefix(f"{URL}/rtl/journal/")
    except FileNotFoundError:
        return ""


@pytest.fixture
def opened() -> dict[str, Opened]:
    return {}


@pytest.fixture
def of(opened: dict[str, Opened]) -> Iterator[Announcer]:
    made = Announcer(opened, URL)
    yield made
    made.stop()


def test_commits_to_other_hubs_are_read_before(of: Announcer, opened: dict[str, Opened], tmp_path: Path) -> None:
    opened["main"] = Opened(tmp_path)
    for _ in range(3):
        of.refresh()
    assert opened["main"].announced == [False], "once"
    assert announced(tmp_path) == "main"


def test_the_first_journal_of_a_folder_is_announced(of: Announcer, opened: dict[str, Opened], tmp_path: Path) -> None:
    opened["a b/c"], opened["later"] = Opened(tmp_path), Opened(tmp_path)
    of.refresh()
    assert announced(tmp_path) == "a%20b%2Fc"
    del opened["a b/c"]
    of.refresh()
    assert announced(tmp_path) == "later"


def test_a_closed_journal_is_withdrawn(of: Announcer, opened: dict[str, Opened], tmp_path: Path) -> None:
    opened["main"] = Opened(tmp_path)
    of.refresh()
    assert lock_announcement(tmp_path) is None
    opened.clear()
    of.refresh()
    assert announced(tmp_path) == ""
    held = lock_announcement(tmp_path)
    assert held is not None
    os.close(held)


def test_another_hub_takes_over_when_the_lock_is_free(
    of: Announcer, opened: dict[str, Opened], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    held = lock_announcement(tmp_path)
    assert held is not None
    opened["main"] = Opened(tmp_path)
    for _ in range(3):
        of.refresh()
    assert (announced(tmp_path), opened["main"].announced) == ("", [])
    assert caplog.text.count("pipelines use another hub of this folder") == 1
    os.close(held)
    of.refresh()
    assert announced(tmp_path) == "main"


def test_a_folder_that_can_not_be_used_stops_no_other(
    of: Announcer, opened: dict[str, Opened], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened["gone"], opened["main"] = Opened(tmp_path / "gone"), Opened(tmp_path)
    for _ in range(3):
        of.refresh()
    assert announced(tmp_path) == "main"
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "No such file or directory; give this user access to the folder."
    ]


def test_a_stopped_announcer_withdraws_everything(opened: dict[str, Opened], tmp_path: Path) -> None:
    of = Announcer(opened, URL)
    opened["main"] = Opened(tmp_path)
    of.start()
    assert announced(tmp_path) == "main"
    of.stop()
    assert announced(tmp_path) == ""
    of.stop()


def test_new_journals_are_announced_in_time(
    of: Announcer, opened: dict[str, Opened], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert announcer.REFRESH_S == 1.0
    monkeypatch.setattr(announcer, "REFRESH_S", 0.001)
    of.start()
    opened["main"] = Opened(tmp_path)
    wait_until(lambda: announced(tmp_path) == "main")


def test_a_journal_has_the_address_of_its_hub(tmp_path: Path) -> None:
    announcer.announce(tmp_path, "http://127.0.0.1:1/rtl/journal/x")
    path = tmp_path / "hub.json"
    url, token = "http://127.0.0.1:1/rtl/journal/x", files.journal_token(tmp_path)
    assert json.loads(path.read_text()) == {"url": url, "token": token, "pid": os.getpid()}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    announcer.withdraw(tmp_path)
    announcer.withdraw(tmp_path)
    assert os.listdir(tmp_path) == ["token"]
    path.write_text('{"pid": 1}')
    announcer.withdraw(tmp_path)
    assert path.exists()


# ---- the listing


def listed(listing: JournalListing) -> Any:
    return json.loads(listing.text()[0])


def test_a_sealed_segment_has_its_end_and_times(tmp_path: Path) -> None:
    written.write(tmp_path, [[5], [9], [12]])
    written.write(tmp_path, [[3]], node="n2")
    first, second, newest = listed(JournalListing(tmp_path))["wal"]["n1"]
    path = segment.paths(tmp_path / "wal/n1")[0]
    assert first == {
        "first": 0,
        "idx_bytes": 64,
        "ts_min_us": written.START_US,
        "ts_max_us": written.START_US + 4000,
        "end": 5,
        "bytes": path.stat().st_size,
    }
    assert (second["first"], second["end"], newest) == (5, 9, {"first": 9})
    assert listed(JournalListing(tmp_path))["wal"]["n2"] == [{"first": 0}]


def test_a_segment_with_missing_numbers_has_no_end(tmp_path: Path) -> None:
    opened = segment.SegmentFile.open(tmp_path / "wal/n1", 0, "n1", "hub")
    written.append(opened, written.rows(0, 5))
    written.append(opened, written.rows(8, 9))
    opened.close()
    written.write(tmp_path, [[12]], first=9)
    first, _ = listed(JournalListing(tmp_path))["wal"]["n1"]
    assert set(first) == {"first", "idx_bytes", "ts_min_us", "ts_max_us"}


def test_a_listing_is_made_again_after_a_change(tmp_path: Path) -> None:
    written.write(tmp_path, [[5]])
    for path in (tmp_path / "wal", tmp_path / "wal/n1"):
        os.utime(path, (1_795_000_000,) * 2)
    listing = JournalListing(tmp_path)
    text, tag = listing.text()
    assert listing.text() == (text, tag)
    opened = segment.SegmentFile.open(tmp_path / "wal/n1", 5, "n1", "hub")
    newer, other_tag = listing.text()
    assert [one["first"] for one in json.loads(newer)["wal"]["n1"]] == [0, 5]
    assert other_tag != tag
    written.append(opened, written.rows(5, 9))
    opened.close()
    assert listing.text() == (newer, other_tag), "rows don't change it"


@pytest.mark.parametrize(("ago_s", "firsts"), [(10, [0]), (0.2, [0]), (0.05, [0, 5]), (-0.05, [0, 5]), (-10, [0])])
def test_a_listing_is_kept_once_its_times_are_old(
    tmp_path: Path, ago_s: float, firsts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two changes at nearly the same time can't be told apart."""
    written.write(tmp_path, [[5]])
    listing, changed_s = JournalListing(tmp_path), 1_795_000_000
    monkeypatch.setattr(time, "time", lambda: changed_s + ago_s)
    for step in ("before", "after"):
        for path in (tmp_path / "wal", tmp_path / "wal/n1"):
            os.utime(path, (changed_s,) * 2)
        if step == "before":
            listing.text()
            segment.SegmentFile.open(tmp_path / "wal/n1", 5, "n1", "hub").close()
    assert [one["first"] for one in listed(listing)["wal"]["n1"]] == firsts


# ---- ends


class Served:
    """A journal that a hub serves; the node n1 is the hub's own."""

    def __init__(self, path: Path) -> None:
        self.path, self.own, self.is_open = path, {"n1": 5}, True
        self.ends = JournalEnds(self, lambda: self.is_open)

    def end(self) -> dict[str, int]:
        return dict(self.own)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    monkeypatch.setattr(announcer, "TICK_S", 0.001)
    written.write(tmp_path, [[7]], node="n2")
    return Served(tmp_path)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """The nodes for which the disk was not read, for each time that it was."""
    found: list[dict[str, int]] = []
    end = Journal.end

    def counted(journal: Journal, known: dict[str, int]) -> dict[str, int]:
        found.append(known)
        return end(journal, known)

    monkeypatch.setattr(Journal, "end", counted)
    return found


def test_the_own_end_is_known_without_the_disk(
    served: Served, reads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcer, "OTHER_ENDS_S", 1000.0)
    assert served.ends.now() == {"n1": 5, "n2": 7}
    served.own["n1"] = 6
    assert served.ends.now() == {"n1": 6, "n2": 7}
    assert reads == [{"n1": 5}]
    monkeypatch.setattr(announcer, "OTHER_ENDS_S", 0.0)
    written.write(served.path, [[9]], node="n2", first=7)
    assert served.ends.now() == {"n1": 6, "n2": 9}


def test_a_hub_that_writes_nothing_reads_every_time(served: Served, reads: list[Any]) -> None:
    served.own.clear()
    assert served.ends.now() == {"n2": 7}
    written.write(served.path, [[9]], node="n2", first=7)
    assert served.ends.now() == {"n2": 9}
    assert len(reads) == 2


def test_requests_at_once_share_a_read(served: Served, reads: list[Any]) -> None:
    asked = [gevent.spawn(served.ends.now) for _ in range(5)]
    gevent.joinall(asked)
    assert [one.value for one in asked] == [{"n1": 5, "n2": 7}] * 5
    assert len(reads) == 1


def test_rows_that_are_there_end_a_wait_at_once(served: Served) -> None:
    assert served.ends.after({"n1": 4, "n2": 7}, 1000) == {"n1": 5, "n2": 7}
    assert served.ends.after({"n1": 5}, 1000) == {"n1": 5, "n2": 7}, "another node is new"
    assert served.ends.after({"n1": 5, "n2": 7}, 0) == {"n1": 5, "n2": 7}
    assert served.ends.after({"n1": 9, "n2": 9}, 0.01) == {"n1": 5, "n2": 7}


def test_new_rows_end_every_wait_for_them(served: Served) -> None:
    waiting = [gevent.spawn(served.ends.after, {"n1": seq, "n2": 7}, 1000) for seq in (5, 5, 6)]
    gevent.sleep(0.01)
    assert not any(one.ready() for one in waiting)
    served.own["n1"] = 6
    assert [one.get() for one in waiting[:2]] == [{"n1": 6, "n2": 7}] * 2
    assert not waiting[2].ready()
    served.own["n1"] = 7
    assert waiting[2].get() == {"n1": 7, "n2": 7}


@pytest.mark.parametrize("limit", [0, 1])
def test_too_many_requests_do_not_wait(served: Served, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert announcer.MAX_WAITING == 1000
    monkeypatch.setattr(announcer, "MAX_WAITING", limit)
    waiting = [gevent.spawn(served.ends.after, {"n1": 5, "n2": 7}, 1000) for _ in range(3)]
    wait_until(lambda: sum(one.ready() for one in waiting) == 3 - limit)
    served.own["n1"] = 6
    assert {one.get()["n1"] for one in waiting} <= {5, 6}


def test_a_closed_journal_ends_every_wait(served: Served) -> None:
    waiting = gevent.spawn(served.ends.after, {"n1": 5, "n2": 7}, 1000)
    gevent.sleep(0.005)
    assert not waiting.ready()
    served.is_open = False
    assert waiting.get() == served.ends.after({"n1": 5, "n2": 7}, 1000) == {"n1": 5, "n2": 7}


def test_an_error_ends_every_wait(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(*_: object) -> None:
        raise JournalError("it can't be read.")

    monkeypatch.setattr(announcer, "OTHER_ENDS_S", 0.0)
    waiting = [gevent.spawn(served.ends.after, {"n1": 5, "n2": 7}, 1000) for _ in range(2)]
    gevent.sleep(0.005)
    monkeypatch.setattr(Journal, "end", damaged)
    gevent.joinall(waiting)
    assert [str(one.exception) for one in waiting] == ["it can't be read."] * 2
