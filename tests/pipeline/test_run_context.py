"""The age of the oldest unread row, read from a real journal."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from smqrt.errors import JournalError
from smqrt.journal import segment
from smqrt.journal.record import Flag
from smqrt.journal.segment import STEP
from smqrt.pipeline import status
from smqrt.pipeline.runner import lag_rows, lag_seconds
from smqrt.pipeline.status import StatusWriter
from tests.journal import written
from tests.pipeline.recorded import Recorded, message


def at(seq: int, seconds_ago: float) -> object:
    return message(seq)._replace(ts_us=int((time.time() - seconds_ago) * 1e6))


def test_the_lag_is_that_of_the_next_row(tmp_path: Path) -> None:
    Recorded(tmp_path).add([at(0, 50), at(1, 40), at(2, 30)]).seal()  # type: ignore[list-item]
    seconds = lag_seconds(str(tmp_path))
    assert seconds("hot", {"n1": 0}) == pytest.approx(50, abs=5)
    assert seconds("hot", {"n1": 2}) == pytest.approx(30, abs=5)
    assert seconds("hot", {"n1": 3}) == 0.0, "nothing waits"


def test_the_oldest_of_all_nodes(tmp_path: Path) -> None:
    Recorded(tmp_path, "n1").add([at(0, 50)]).seal()  # type: ignore[list-item]
    Recorded(tmp_path, "n2").add([at(0, 70), at(1, 60)]).seal()  # type: ignore[list-item]
    seconds = lag_seconds(str(tmp_path))
    assert seconds("hot", {"n1": 0, "n2": 1}) == pytest.approx(60, abs=5)
    assert seconds("hot", {}) == 0.0


def test_a_clock_set_back_gives_no_negative_age(tmp_path: Path) -> None:
    Recorded(tmp_path).add([at(0, -100)]).seal()  # type: ignore[list-item]
    assert lag_seconds(str(tmp_path))("hot", {"n1": 0}) == 0.0


def test_an_unreachable_hub_is_asked_once_without_waiting() -> None:
    seconds = lag_seconds("http://127.0.0.1:9/rtl/journal/app", "a token of sixteen")
    began = time.monotonic()
    assert seconds("hot", {"n1": 0}) is None
    assert time.monotonic() - began < 5


def test_no_journal(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="is not the folder of a journal"):
        lag_seconds(str(tmp_path / "nowhere"))


def test_what_pipelines_have_published_does_not_wait(tmp_path: Path) -> None:
    """Unless the query reads that, too; nor do numbers that were left out after a crash."""
    journal = tmp_path / "j"
    for first in (0, STEP):
        opened = segment.SegmentFile.open(journal / "wal/n1", first, "n1", "hub")
        flags = [Flag.PIPELINE if number % 3 == 0 else 0 for number in range(12)]
        rows = [one._replace(flags=int(flag)) for one, flag in zip(written.rows(first, first + 12), flags, strict=True)]
        written.append(opened, rows)
        opened.close()
    end = {"n1": STEP + 12}
    waiting = lag_rows(str(journal), ignores=lambda name: name == "hot")
    assert waiting("hot", {"n1": 6}, end) == 4 + 8
    assert waiting("all", {"n1": 6}, end) == 6 + 12
    assert waiting("hot", end, end) == 0
    board = StatusWriter(tmp_path / "state", lag_rows=waiting)
    for name, lag in (("hot", 12), ("all", 18)):
        board.starting(name, "publish")
        board.progressed({"name": name, "sources": [{"endOffset": {"n1": 6}, "latestOffset": json.dumps(end)}]})
        found = status.read(tmp_path / "state" / name)
        assert found
        assert found.lag_rows == lag
