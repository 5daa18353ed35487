"""Offsets: the end of a micro-batch, and rows that are gone: arithmetic, without Spark."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smqrt.errors import JournalError
from smqrt.pipeline.smq_source import scan

SEQS = st.integers(0, 1000)
OFFSETS = st.dictionaries(st.sampled_from(["n1", "n2", "n3"]), SEQS)


def beyond(start: dict[str, int], more: dict[str, int]) -> dict[str, int]:
    return {node: start.get(node, 0) + more.get(node, 0) for node in start | more}


@given(OFFSETS, OFFSETS, st.integers(1, 500))
def test_a_limit_is_used_up_and_never_passed(start: dict[str, int], more: dict[str, int], most: int) -> None:
    end = beyond(start, more)
    reached = scan.limited(start, end, most)
    assert all(start.get(node, 0) <= reached[node] <= end[node] for node in end)
    assert sum(reached[node] - start.get(node, 0) for node in end) == min(most, sum(more.values()))


@given(OFFSETS, OFFSETS, OFFSETS)
def test_no_batch_has_rows_across_a_split(start: dict[str, int], more: dict[str, int], split: dict[str, int]) -> None:
    full = beyond(start, more)
    end = scan.before_split(start, full, split)
    before = any(start.get(node, 0) < min(seq, end[node]) for node, seq in split.items() if node in end)
    after = any(max(start.get(node, 0), split.get(node, 0)) < seq for node, seq in end.items())
    assert not (before and after)


def test_rows_after_a_split_follow_completed_earlier_ones() -> None:
    split, full = {"n1": 10, "n2": 5}, {"n1": 30, "n2": 20, "n3": 7}
    first = scan.before_split({"n1": 0, "n2": 0}, full, split)
    assert first == {"n1": 10, "n2": 5, "n3": 0}
    assert scan.before_split(first, full, split) == full


def test_nodes_are_in_order() -> None:
    assert list(scan.ordered({"n2": 1, "n10": 2, "n1": 3})) == ["n1", "n10", "n2"]


def test_rows_removed_by_retention_are_reported() -> None:
    with pytest.raises(JournalError, match="Rows 3 to 6 of node n1 are gone.*failOnDataLoss=false"):
        scan.checked({"n1": 3}, {"n1": 20}, {"n1": 7}, {"n1": 20}, fail=True)


def test_another_journal_is_reported_as_such() -> None:
    with pytest.raises(JournalError, match="Node n1 ends at row 12, but had rows up to 20"):
        scan.checked({"n1": 3}, {"n1": 20}, {"n1": 0}, {"n1": 12}, fail=True)


def test_without_the_error_what_is_there_is_read() -> None:
    begin, last = {"n1": 7}, {"n1": 12}
    assert scan.checked({"n1": 3}, {"n1": 20}, begin, last, fail=False) == ({"n1": 7}, {"n1": 12})


def test_rows_of_later_nodes_are_read_from_their_beginning() -> None:
    begin, last = {"n1": 0, "n2": 40}, {"n1": 9, "n2": 50}
    assert scan.checked({"n1": 3}, last, begin, last, fail=True) == ({"n1": 3, "n2": 40}, last)
