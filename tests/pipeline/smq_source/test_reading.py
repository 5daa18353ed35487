"""Filters of Spark that select a part of the journal, the offsets of options, and what a stream asks and reports."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.datasource import Not as Negated

from smqrt.errors import JournalError
from smqrt.journal import commit
from smqrt.journal.reader import Journal
from smqrt.pipeline.smq_source import reading
from smqrt.pipeline.smq_source.options import ReadOptions
from smqrt.pipeline.smq_source.reading import (
    UNBOUNDED_HIGH,
    UNBOUNDED_LOW,
    JournalFollower,
    ProgressReports,
    PushedFilters,
    PushFilters,
    clipped,
    edges,
    named,
)
from tests.pipeline.recorded import START_US, STEP_US, Recorded
from tests.support.waiting import wait_until

MOMENT = datetime.fromtimestamp(START_US / 1e6, UTC)


def pushed(*filters: Any) -> tuple[PushedFilters, list[Any]]:
    """What filters select, and those that are left to Spark."""
    push = PushFilters()
    left = list(push(filters))
    return push.pushed, left


# ---- filters


@pytest.mark.parametrize(
    ("kind", "seq", "ts_us"),
    [
        (EqualTo, (7, 8), (START_US, START_US)),
        (GreaterThan, (8, UNBOUNDED_HIGH), (START_US + 1, UNBOUNDED_HIGH)),
        (GreaterThanOrEqual, (7, UNBOUNDED_HIGH), (START_US, UNBOUNDED_HIGH)),
        (LessThan, (UNBOUNDED_LOW, 7), (UNBOUNDED_LOW, START_US - 1)),
        (LessThanOrEqual, (UNBOUNDED_LOW, 8), (UNBOUNDED_LOW, START_US)),
    ],
)
def test_a_comparison_bounds_numbers_and_times(kind: Any, seq: tuple[int, int], ts_us: tuple[int, int]) -> None:
    """The end of `seq` is exclusive, that of `ts` inclusive."""
    both, left = pushed(kind(("seq",), 7), kind(("ts",), MOMENT))
    assert left == []
    assert (both.seq, both.ts_us, both.times) == (seq, ts_us, ts_us)


def test_several_filters_select_what_all_of_them_select() -> None:
    both, _ = pushed(
        GreaterThan(("seq",), 4), LessThan(("seq",), 9), In(("topic",), ("a", "b")), In(("topic",), ("b", "c")),
        EqualTo(("node",), "n1"), EqualTo(("node",), "n2"),
    )  # fmt: skip
    assert both == PushedFilters(seq=(5, 9), topics=frozenset("b"), nodes=frozenset())
    assert both.times is None


@pytest.mark.parametrize(
    "one",
    [
        EqualTo(("payload",), b"x"),
        EqualTo(("json", "seq"), 5),
        EqualTo(("seq",), True),
        EqualTo(("seq",), "5"),
        EqualTo(("ts",), 5),
        GreaterThan(("topic",), "a"),
        In(("topic",), ("a", None)),
        In(("seq",), (1, 2)),
        Negated(EqualTo(("topic",), "a")),
    ],
    ids=str,
)
def test_a_filter_that_only_spark_can_apply_is_left(one: Any) -> None:
    assert pushed(one) == (PushedFilters(), [one])


def test_a_reader_does_not_look_as_if_it_had_filters() -> None:
    """Spark would reject it while pushdown is disabled."""
    assert PushFilters().__func__ is DataSourceReader.pushFilters


def test_topics_are_those_of_filters_and_options() -> None:
    all_, some = ReadOptions("/j"), ReadOptions("/j", topics=("a/#",), exclude=("a/b",))
    assert named(PushedFilters(), all_) is named(PushedFilters(), some) is None
    wanted = PushedFilters(topics=frozenset(["a/a", "a/b", "c"]))
    assert named(wanted, all_) == frozenset(["a/a", "a/b", "c"])
    assert named(wanted, some) == frozenset(["a/a"])


def test_a_range_is_clipped_to_nodes_and_numbers() -> None:
    start, end = {"n1": 5, "n2": 3}, {"n1": 20, "n2": 9}
    assert clipped(start, end, PushedFilters()) == (start, end)
    assert clipped(start, end, PushedFilters(nodes=frozenset(["n2", "n3"]))) == ({"n2": 3}, {"n2": 9})
    assert clipped(start, end, PushedFilters(seq=(7, 8))) == ({"n1": 7, "n2": 7}, {"n1": 8, "n2": 8})
    assert clipped(start, end, PushedFilters(seq=(50, 60))) == ({"n1": 20, "n2": 9}, {"n1": 20, "n2": 9})
    assert clipped(start, end, PushedFilters(seq=(UNBOUNDED_LOW, -3))) == ({"n1": 0, "n2": 0}, {"n1": 0, "n2": 0})
    assert clipped({}, {"n3": 4}, PushedFilters()) == ({"n3": 0}, {"n3": 4})


# ---- offsets of options


def test_a_range_is_everything_unless_options_limit_it(tmp_path: Path) -> None:
    journal = Journal(Recorded(tmp_path / "j").add(100).seal().path)
    begin, last = {"n1": 0}, {"n1": 100}
    options = ReadOptions(str(journal.path))

    def range_of(**given: Any) -> tuple[int, int]:
        start, end = edges(journal, replace(options, **given), begin, last)
        return start["n1"], end["n1"]

    assert range_of() == range_of(starting="earliest", ending="latest") == (0, 100)
    assert range_of(starting="latest", ending="earliest") == (100, 0)
    assert range_of(starting={"n1": 7}, ending={"n1": 9}) == (7, 9)
    assert range_of(starting_us=START_US + 10 * STEP_US, ending_us=START_US + 20 * STEP_US) == (10, 20)


# ---- following a hub


class Remote:
    """A journal at a hub, which answers when it is told to; a copy has another connection."""

    def __init__(self) -> None:
        self.ends: list[dict[str, int] | JournalError] = []
        self.asked: list[Mapping[str, int]] = []
        self.answer, self.closed = threading.Semaphore(0), threading.Event()

    def __copy__(self) -> Remote:
        return self

    def end(self) -> dict[str, int]:
        return {"n1": 5}

    def wait(self, known: Mapping[str, int], timeout_s: float) -> dict[str, int]:
        self.asked.append(known)
        assert self.answer.acquire(timeout=20)
        found = self.ends.pop(0)
        if isinstance(found, JournalError):
            raise found
        return found

    def close(self) -> None:
        self.closed.set()

    def tell(self, found: dict[str, int] | JournalError) -> None:
        self.ends.append(found)
        self.answer.release()


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    monkeypatch.setattr(reading, "REQUEST_INTERVAL_S", 0.001)
    made = Remote()
    yield made
    made.tell(JournalError("the test has ended"))


def test_the_end_is_that_of_the_last_answer(remote: Remote) -> None:
    follower = JournalFollower(cast("Any", remote))
    assert follower.end() == {"n1": 5}
    remote.tell({"n1": 9})
    wait_until(lambda: follower.end() == {"n1": 9})
    wait_until(lambda: remote.asked == [{"n1": 5}, {"n1": 9}])


def test_an_error_is_raised_once_then_it_is_asked_again(remote: Remote) -> None:
    follower = JournalFollower(cast("Any", remote))
    follower.end()
    remote.tell(JournalError("away"))
    assert remote.closed.wait(20)
    with pytest.raises(JournalError, match="away"):
        follower.end()
    assert follower.end() == {"n1": 5}
    wait_until(lambda: len(remote.asked) == 2)


def test_a_stopped_follower_ends_with_its_request(remote: Remote) -> None:
    follower = JournalFollower(cast("Any", remote))
    follower.end()
    follower.stop()
    assert not remote.closed.is_set()
    remote.tell({"n1": 6})
    assert remote.closed.wait(20)
    assert len(remote.asked) == 1


# ---- reports of progress


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Reports that the journal got."""
    found: list[Any] = []
    save = lambda hub, query, name, offset, results: found.append((query, offset, results))  # noqa: E731
    monkeypatch.setattr(commit, "report_progress", save)
    return found


def test_progress_is_reported_at_most_once_a_second(
    reports: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [50.0]
    monkeypatch.setattr(reading, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    progress = ProgressReports(ReadOptions(str(tmp_path), query="q", include_pipeline=False))
    for seq, passed_s in ((1, 0.0), (2, 0.5), (3, 0.4), (4, 0.1), (5, 0.9)):
        now_s[0] += passed_s
        progress.committed({"n1": seq})
    assert reports == [("q", {"n1": 1}, False), ("q", {"n1": 4}, False)]
    progress.close()
    progress.close()
    assert reports[2:] == [("q", {"n1": 5}, False)], "what waits is reported at the end, once"


def test_a_stream_without_a_name_reports_nothing(reports: list[Any], tmp_path: Path) -> None:
    progress = ProgressReports(ReadOptions(str(tmp_path)))
    progress.committed({"n1": 1})
    progress.close()
    assert reports == []


def test_a_report_that_fails_ends_no_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise JournalError("the hub is away.")

    monkeypatch.setattr(commit, "report_progress", fail)
    progress = ProgressReports(ReadOptions(str(tmp_path), query="q"))
    progress.committed({"n1": 1})
    assert "progress can't be reported to the journal's retention: the hub is away." in caplog.text


def test_a_copy_of_a_follower_asks_for_itself(remote: Remote) -> None:
    follower = JournalFollower(cast("Any", remote))
    follower.end()
    other = copy.copy(follower)
    assert other.end() == {"n1": 5}
    wait_until(lambda: len(remote.asked) == 2)
    remote.tell(JournalError("the test has ended"))
