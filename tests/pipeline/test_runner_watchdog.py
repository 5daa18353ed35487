"""A query that makes no progress says so: since when, and why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from smqrt.cli.pipeline import status_line
from smqrt.errors import JournalError
from smqrt.pipeline import status
from smqrt.pipeline.jvm import GarbageTime
from smqrt.pipeline.runner import ProgressWatchdog
from smqrt.pipeline.status import StatusWriter

NAME = "q"


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StatusWriter:
    """A query that began at row 100, of which nothing has been heard for 90 s."""
    now_s = [1000.0]
    monkeypatch.setattr(status.time, "monotonic", lambda: now_s[0])
    board = StatusWriter(tmp_path)
    board.starting(NAME, "publish")
    board.started("id", NAME)
    (tmp_path / NAME / "start.json").write_text(json.dumps({"starting": {"n1": 100}, "split": None}))
    now_s[0] += 90
    return board


def looked(board: StatusWriter, folder: Path, end: int = 600, least_s: float = 60) -> status.Status:
    ProgressWatchdog(board, folder, lambda: {"n1": end}, least_s).check()
    found = status.read(folder / NAME)
    assert found
    return found


def test_a_long_first_micro_batch_is_not_waiting(board: StatusWriter, tmp_path: Path) -> None:
    now = looked(board, tmp_path, least_s=100)
    assert (now.state, now.lag_rows, now.trouble) == ("running", 500, "")


def test_numbers_skipped_after_a_crash_are_not_awaited(board: StatusWriter, tmp_path: Path) -> None:
    ProgressWatchdog(board, tmp_path, lambda: {"n1": 1 << 20}, 60, count=lambda start, end: 0).check()
    now = status.read(tmp_path / NAME)
    assert now
    assert (now.state, now.lag_rows) == ("waiting", 0)


def test_too_long_is_stuck_and_says_what_helps(board: StatusWriter, tmp_path: Path) -> None:
    now = looked(board, tmp_path)
    assert (now.state, now.lag_rows) == ("stuck", 500)
    assert "micro-batch 0 has been running for 90 s" in now.trouble
    assert "max_bytes" in now.trouble
    assert "A function may hang, such as a UDF" in now.trouble
    since = now.stuck_since
    assert since > 0
    assert looked(board, tmp_path).stuck_since == since
    assert "q stuck" in status_line(now)
    assert "UTC: micro-batch 0" in status_line(now)


def test_a_java_that_collects_garbage_is_why(board: StatusWriter, tmp_path: Path) -> None:
    class Thrashing(GarbageTime):
        def share(self, now_s: float | None = None) -> float:
            return 0.87

    ProgressWatchdog(board, tmp_path, lambda: {"n1": 600}, 60, Thrashing(tmp_path)).check()
    now = status.read(tmp_path / NAME)
    assert now
    assert "The JVM spends 87% of the time on garbage collection: its memory is too small: set a sm" in now.trouble


def test_slow_is_not_stuck(board: StatusWriter, tmp_path: Path) -> None:
    board.progressed({"name": NAME, "batchId": 3, "batchDuration": 20_000, "numInputRows": 1, "sources": []})
    board._last_event_s[NAME] -= 90
    assert looked(board, tmp_path).state == "running"


def test_the_time_between_micro_batches_is_not_stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(status.time, "monotonic", lambda: now_s[0])
    board = StatusWriter(tmp_path)
    board.starting(NAME, "table", trigger_s=300)
    now_s[0] += 301
    assert board.silent(2) == []


def test_without_rows_it_waits(board: StatusWriter, tmp_path: Path) -> None:
    assert looked(board, tmp_path, end=100).state == "waiting"


def test_a_hub_that_is_away_is_the_reason(board: StatusWriter, tmp_path: Path) -> None:
    board.set_trouble(NAME, "The hub hasn't answered.")
    assert looked(board, tmp_path).trouble == "The hub hasn't answered."


def test_an_unreachable_journal_does_not_end_the_search(board: StatusWriter, tmp_path: Path) -> None:
    def away() -> dict[str, int]:
        raise JournalError("away")

    ProgressWatchdog(board, tmp_path, away).check()
    now = status.read(tmp_path / NAME)
    assert now
    assert now.state == "stuck"


def test_a_micro_batch_that_ends_after_all_ends_it(board: StatusWriter, tmp_path: Path) -> None:
    looked(board, tmp_path)
    board.progressed({"name": NAME, "batchId": 0, "numInputRows": 5, "sources": []})
    now = status.read(tmp_path / NAME)
    assert now
    assert (now.state, now.trouble, now.stuck_since) == ("running", "", 0.0)
