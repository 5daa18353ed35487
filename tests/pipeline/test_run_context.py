"""The age of the oldest unread row, read from a real journal."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from smqrt.errors import JournalError
from smqrt.pipeline.run_context import lag_seconds
from tests.pipeline.recorded import Recorded, message


def at(seq: int, seconds_ago: float) -> object:
    return message(seq)._replace(ts_us=int((time.time() - seconds_ago) * 1e6))


def test_the_next_row_tells_it(tmp_path: Path) -> None:
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


def test_a_clock_that_was_set_back_gives_no_negative_age(tmp_path: Path) -> None:
    Recorded(tmp_path).add([at(0, -100)]).seal()  # type: ignore[list-item]
    assert lag_seconds(str(tmp_path))("hot", {"n1": 0}) == 0.0


def test_a_hub_that_is_away_is_asked_once_and_not_waited_for() -> None:
    seconds = lag_seconds("http://127.0.0.1:9/rtl/journal/app", "a token of sixteen")
    began = time.monotonic()
    assert seconds("hot", {"n1": 0}) is None
    assert time.monotonic() - began < 5


def test_no_journal(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="is no folder of a journal"):
        lag_seconds(str(tmp_path / "nowhere"))
