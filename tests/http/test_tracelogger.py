"""Lines of a trace: bounds, counts, and the order of their time."""

from __future__ import annotations

from collections.abc import Iterator
from time import time

import pytest

from smqrt.http import tracelogger
from smqrt.http.tracelogger import Line, Lines, MergedLines
from tests.support.waiting import let_others_run, wait_until

PAST_BYTES, MAX_BYTES = 10, 40


def lines(*texts: str) -> list[Line]:
    return [Line(float(number), text.encode()) for number, text in enumerate(texts)]


def test_the_oldest_go_and_are_counted() -> None:
    kept = Lines(6)
    assert [kept.add(line) for line in lines("aa", "bb", "cc", "dddd", "e")] == [0, 0, 0, 2, 1]
    assert (len(kept), kept.added, kept.take_dropped(), kept.take_dropped()) == (2, 5, 3, 0)
    kept.count_dropped(7)
    assert [line.data for line in kept.take(1)] == [b"dddd"], "one at least"
    assert (kept.take_dropped(), kept.take(100), kept.take(100)) == (7, [Line(4.0, b"e")], [])


@pytest.mark.parametrize(
    ("behind", "texts", "left_out"),
    [(0, [b"cc", b"dd"], 0), (3, [b"dd"], 0), (4, [], 0), (2, [b"cc", b"dd"], 0), (1, [b"cc", b"dd"], 1)],
)
def test_what_came_behind_a_line(behind: int, texts: list[bytes], left_out: int) -> None:
    kept = Lines(4)
    for line in lines("aa", "bb", "cc", "dd"):
        kept.add(line)
    copy = kept.copy(100, behind)
    assert ([line.data for line in copy], copy.take_dropped()) == (texts, left_out)


@pytest.fixture
def given() -> list[bytes]:
    return []


@pytest.fixture
def order(given: list[bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[MergedLines]:
    monkeypatch.setattr(tracelogger, "HOLD_S", 0.2)
    made = MergedLines(lambda line: given.append(line.data), PAST_BYTES, MAX_BYTES)
    yield made
    made.close()
    made.close()
    made.add(Line(0.0, b"late"))
    assert b"late" not in given


def test_the_past_is_the_newest_of_all(order: MergedLines, given: list[bytes]) -> None:
    for at_s, data in ((3.0, b"cccc"), (1.0, b"aaaa"), (4.0, b"dddd"), (2.0, b"bbbb")):
        order.add(Line(at_s, data))
    assert given == []
    order.begin()
    order.begin()
    assert given == [b"cccc", b"dddd"]


def test_lines_wait_for_older_ones(order: MergedLines, given: list[bytes]) -> None:
    order.begin()
    now_s = time()
    for later_s, data in ((0.02, b"c"), (0.0, b"a"), (0.01, b"b")):
        order.add(Line(now_s + later_s, data))
    let_others_run()
    assert given == []
    wait_until(lambda: given == [b"a", b"b", b"c"], given)
    assert time() >= now_s + 0.2
    # Too late, and from the future: neither waits for anything.
    order.add(Line(now_s - 60, b"d"))
    wait_until(lambda: given[3:] == [b"d"], given)
    order.add(Line(now_s + 3600, b"e"))
    wait_until(lambda: given[4:] == [b"e"], given)


def test_what_waits_is_bounded(order: MergedLines, given: list[bytes]) -> None:
    order.begin()
    for number in range(10):
        order.add(Line(time(), b"line%06d" % number))
    assert given == [b"line%06d" % number for number in range(6)]
    order.deliver_all()
    assert len(given) == 10
