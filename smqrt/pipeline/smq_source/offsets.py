"""Arithmetic of offsets: how far a micro-batch goes, and which rows are gone. Pure functions.

An offset is the next seq of every node; nodes that aren't in it start where the journal has them from.
"""

from __future__ import annotations

from collections.abc import Mapping

from smqrt.errors import JournalError
from smqrt.pipeline.smq_source.options import Offsets


def ordered(offset: Mapping[str, int]) -> Offsets:
    """Returns the offset with its nodes in order: Spark compares offsets as text."""
    return dict(sorted(offset.items()))


def limited(start: Offsets, end: Offsets, max_rows: int) -> Offsets:
    """Returns how far to go so that at most `max_rows` lie between, shared fairly by the nodes."""
    waiting = {node: max(0, seq - start.get(node, 0)) for node, seq in end.items()}
    left, reached = max_rows, dict(start)
    for turn, node in enumerate(sorted(waiting, key=waiting.__getitem__)):
        share = min(waiting[node], -(-left // (len(waiting) - turn)))
        reached[node] = start.get(node, 0) + share
        left -= share
    return reached


def spans(start: Offsets, end: Offsets) -> dict[str, tuple[int, int]]:
    """Returns, for each node that has rows between, the first and the one behind the last."""
    return {node: (start.get(node, 0), seq) for node, seq in end.items() if seq > start.get(node, 0)}


def distance(start: Offsets, end: Offsets) -> int:
    """Returns how many rows lie between."""
    return sum(behind - first for first, behind in spans(start, end).values())


def before_split(start: Offsets, end: Offsets, split: Offsets) -> Offsets:
    """Returns `end`, or less where a batch from `start` would have rows on both sides of `split`.

    Nodes that `split` doesn't name weren't there when it was made: all their rows come after it.
    """
    if all(start.get(node, 0) >= seq for node, seq in split.items()):
        return end
    return {node: min(seq, max(split.get(node, 0), start.get(node, 0))) for node, seq in end.items()}


def filled(start: Offsets, begin: Offsets) -> Offsets:
    """Returns `start` with the nodes it doesn't know, from where the journal has them."""
    return begin | start


def removed(start: Offsets, end: Offsets, begin: Offsets) -> str | None:
    """Says which rows between two offsets come before `begin`, in a sentence; None when all are there."""
    for node, first in ordered(start).items():
        until = end.get(node, first)
        if first < until and first < (kept := begin.get(node, until)):
            return f"Rows {first} to {min(kept, until) - 1} of node {node} are gone (retention has removed them)"
    return None


def ahead(seen: Offsets, last: Offsets) -> str | None:
    """Says in a sentence that `seen` is further than the journal goes; None when it isn't."""
    for node, seq in ordered(seen).items():
        if seq > (there := last.get(node, 0)):
            return f"Node {node} ends at row {there}, but rows to {seq} had been there: the journal was replaced or cut"
    return None


def refused(what: str) -> JournalError:
    """Returns the error for rows that are gone."""
    return JournalError(
        f"{what}. Set failOnDataLoss=false (of @source: fail_on_data_loss=False) to go on with what is there, or take "
        "a new checkpoint."
    )


def checked(start: Offsets, end: Offsets, begin: Offsets, last: Offsets, fail: bool) -> tuple[Offsets, Offsets]:
    """Returns the range of rows to read, which the journal has.

    Args:
        start, end: the rows wanted.
        begin, last: the rows there are.
        fail: whether missing rows are an error.

    Returns:
        The range; without `fail` it begins and ends where there are rows.

    Raises:
        JournalError: rows are missing and `fail` is set.
    """
    start = filled(start, begin)
    what = removed(start, end, begin) or ahead(end, last)
    if what and fail:
        raise refused(what)
    if what:
        start = {node: max(seq, begin.get(node, seq)) for node, seq in start.items()}
        end = {node: min(seq, last.get(node, 0)) for node, seq in end.items()}
    return start, end
