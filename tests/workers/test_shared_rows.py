"""Shared rows of workers: a process that is killed or stopped during a write blocks no other."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from smqrt.errors import StartError
from smqrt.workers import shared_rows
from smqrt.workers.shared_rows import MAX_READ, Row, SharedRows
from tests.support.clock import undisturbed_s
from tests.support.waiting import wait_until

SECRET = b"s" * 32
HEAD = b"h"
HOLDER = """
import sqlite3, sys, time
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("BEGIN IMMEDIATE")
db.execute("INSERT INTO rows (owner, name, data, writer) VALUES (9, x'68', x'00', 99)")
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def pair(tmp_path: Path) -> tuple[SharedRows, SharedRows]:
    return SharedRows(tmp_path, SECRET, HEAD), SharedRows(tmp_path, SECRET, HEAD)


def test_changes_arrive_once_in_order_with_the_last_state(pair: tuple[SharedRows, SharedRows]) -> None:
    first, second = pair
    first.put(1, HEAD, b"one")
    first.put(1, b"a", b"old")
    second.put(0, b"note", b"", 60)
    first.put(1, b"a", b"new")
    assert second.changes() == [Row(1, HEAD, b"one"), Row(1, b"a", b"new")]
    assert second.changes() == []
    assert first.changes() == [Row(0, b"note", b"")]
    second.put(1, b"a", None)
    second.end(1)
    first.put(1, b"a", b"too late")
    assert first.changes() == [Row(1, HEAD, None)]
    assert second.changes() == []
    assert SharedRows(Path(first_file(first)).parent, SECRET, HEAD).writer == 3


def first_file(rows: SharedRows) -> str:
    return str(rows._db.execute("PRAGMA database_list").fetchone()[2])


def test_many_changes_are_read_in_portions(pair: tuple[SharedRows, SharedRows]) -> None:
    first, second = pair
    with first.together():
        for owner in range(1, MAX_READ + 11):
            first.put(owner, HEAD, b"x")
    assert first.write(), "in portions, too"
    assert len(second.changes()) == MAX_READ
    assert not second.is_complete
    assert len(second.changes()) == 10
    assert second.is_complete
    for owner in range(1, 5):
        first.put(owner, b"big", b"x" * (600 << 10))
    assert [len(second.changes()) for _ in range(3)] == [2, 2, 0]


def test_a_worker_with_another_secret_reads_nothing(pair: tuple[SharedRows, SharedRows], tmp_path: Path) -> None:
    pair[0].put(1, HEAD, b"one")
    assert SharedRows(tmp_path, b"t" * 32, HEAD).changes() == [Row(1, HEAD, None)]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGCONT])
def test_a_stopped_writer_does_not_block_other_workers(pair: tuple[SharedRows, SharedRows], end: int) -> None:
    first, second = pair
    command = [sys.executable, "-c", HOLDER, first_file(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        os.kill(holder.pid, signal.SIGSTOP)
        began_s = undisturbed_s()
        for at in range(1, 4):
            first.put(at, HEAD, b"x")
            first.changes()
        with first.together(alone=True) as is_alone:
            assert not is_alone
        assert undisturbed_s() - began_s < 0.5, "all of it together: 10 ms"
        assert second.changes() == []
        holder.send_signal(end)
        if end == signal.SIGCONT:
            holder.kill()
        wait_until(first.write)
    assert [row.owner for row in second.changes()] == [1, 2, 3]
    with first.together(alone=True) as is_alone:
        assert is_alone


def test_writes_to_a_full_disk_are_repeated(
    pair: tuple[SharedRows, SharedRows], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair
    pages = first._db.execute("PRAGMA page_count").fetchone()[0]
    first._db.execute(f"PRAGMA max_page_count = {pages}")
    for owner in range(1, 20):
        first.put(owner, HEAD, b"x" * 1000)
    monkeypatch.setattr(shared_rows, "MAX_WAITING", 19)
    first.put(20, HEAD, b"x" * 1000)
    assert (shared_rows.WAITING.count, len(first._waiting)) == (1, 19)
    assert "database or disk is full" in caplog.text
    assert caplog.text.count("trying again") == 1
    first._db.execute(f"PRAGMA max_page_count = {1 << 20}")
    wait_until(first.write)
    assert len(second.changes()) <= 19
    third = SharedRows(Path(first_file(first)).parent, SECRET, HEAD)
    assert {row.owner for row in third.changes()} == set(range(2, 21)), "the oldest was dropped"


def test_deletions_are_kept_for_a_time_only(
    pair: tuple[SharedRows, SharedRows], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair
    first.put(1, HEAD, b"x")
    first.put(2, HEAD, b"x")
    second.changes()
    monkeypatch.setattr(shared_rows, "ENDED_S", -1.0)
    first.end(1)
    assert not first.purge(), "that was all"
    assert second.changes() == [], "it has missed it"
    assert second.owners_if_missed() is None
    monkeypatch.setattr(shared_rows, "MISSED_S", 0.0)
    assert second.owners_if_missed() == {2}
    assert second.changes() == [Row(2, HEAD, b"x")], "all again"


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="set TMPDIR"):
        SharedRows(tmp_path / "nowhere", SECRET, HEAD)
    (tmp_path / f"shared-{shared_rows.FORMAT}.db").write_bytes(b"no database" * 1000)
    with pytest.raises(StartError, match="not a database"):
        SharedRows(tmp_path, SECRET, HEAD)
    assert sqlite3.sqlite_version_info >= (3, 24)
