"""Rows of a journal that pipelines have published: readers that leave them out, such as the queries that made them, are
not behind by them.

What a pipeline has published is in batches of its own, and the index of a segment says so; no row has to be read. It
does not say so of rows that are compacted, or were published by an older version: of those a few are read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from smqrt.journal.planning import Chunk, Offsets
from smqrt.journal.reader import Journal
from smqrt.journal.record import Flag

MAX_READ = 5000
"""So many rows are read where no index says whose they are; of more, all count as messages."""


class _Known(NamedTuple):
    """The batches of a node from `start` on: first numbers, numbers after the last, and how many rows up to each."""

    start: int
    firsts: list[int]
    ends: list[int]
    sums: list[int]


class ResultRows:
    """The results of pipelines in a journal, as it is now: made for a few questions.

    Args:
        journal: where.
        end: after the last row that is asked about, by node.
        max_read: how many rows of a question are read at most.

    Raises:
        JournalError: it can't be read; so do all methods.
    """

    def __init__(self, journal: Journal, end: Offsets, max_read: int = MAX_READ) -> None:
        self._journal, self._end, self._max_read = journal, end, max_read
        self._count = journal.row_counter()
        self._nodes: dict[str, _Known] = {}

    def others(self, start: Offsets) -> int:
        """Return how many rows from `start` on were not published by pipelines."""
        found = 0
        for node, end in self._end.items():
            known, first = self._of(node, start.get(node, 0)), start.get(node, 0)
            rows = self._count({node: first}, {node: end}) - _covered(known, first, end)
            found += self._read(node, known, first, end) if 0 < rows <= self._max_read else max(0, rows)
        return found

    def first_others(self, start: Offsets) -> dict[str, int]:
        """Return, by node, the number of the first row from `start` on that was not published by pipelines; nothing of
        a node that has none.
        """
        found = {node: self._first_other(node, start.get(node, 0), end) for node, end in self._end.items()}
        return {node: first for node, first in found.items() if first is not None}

    def _first_other(self, node: str, start: int, end: int) -> int | None:
        known, left = self._of(node, start), self._max_read
        pieces = (piece for first, last in _between(known, start, end) for piece in _growing(first, last))
        for chunk in (chunk for first, last in pieces for chunk in self._chunks(node, first, last)):
            some = chunk._replace(rows=min(chunk.rows, left))
            for seq, flag in self._flags(some):
                if not flag & Flag.PIPELINE:
                    return seq
            if some.rows < chunk.rows:
                return some.end
            left -= some.rows
        return None

    def _read(self, node: str, known: _Known, start: int, end: int) -> int:
        chunks = (chunk for first, last in _between(known, start, end) for chunk in self._chunks(node, first, last))
        return sum(not flag & Flag.PIPELINE for chunk in chunks for _, flag in self._flags(chunk))

    def _chunks(self, node: str, first: int, last: int) -> Iterator[Chunk]:
        return (chunk for part in self._journal.plan({node: first}, {node: last}) for chunk in part)

    def _flags(self, chunk: Chunk) -> Iterator[tuple[int, int]]:
        """Yield (number, flags) of the rows of a chunk; without pyarrow no flags."""
        try:
            batches = list(self._journal.tables(chunk, ["flags"])) if chunk.rows else []
        except ImportError:
            yield from ((seq, 0) for seq in range(chunk.start, chunk.end))
            return
        flags = (flag for batch in batches for flag in batch.column("flags").to_pylist())
        yield from enumerate(flags, chunk.start)

    def _of(self, node: str, start: int) -> _Known:
        """Return what is known of a node's batches from `start` on, and looks at those of which nothing is yet."""
        known = self._nodes.get(node)
        if known is None or start < known.start:
            until = self._end[node] if known is None else known.start
            found = self._journal.result_batches(node, start, until)
            older = _Known(start, [], [], []) if known is None else known
            firsts = [first for first, _ in found] + older.firsts
            ends = [end for _, end in found] + older.ends
            sums = [0, *accumulate(end - first for first, end in zip(firsts, ends, strict=True))]
            known = self._nodes[node] = _Known(start, firsts, ends, sums)
        return known


def _covered(known: _Known, start: int, end: int) -> int:
    """Return how many rows of a range are in the batches."""
    return _below(known, end) - _below(known, start)


def _below(known: _Known, seq: int) -> int:
    at = bisect_right(known.firsts, seq)
    return known.sums[at] - max(0, known.ends[at - 1] - seq) if at else 0


def _between(known: _Known, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield what lies between the batches, within a range."""
    at = max(0, bisect_right(known.firsts, start) - 1)
    for first, last in zip(known.firsts[at:], known.ends[at:], strict=True):
        if first >= end:
            break
        if start < first:
            yield start, first
        start = max(start, last)
    if start < end:
        yield start, end


def _growing(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield a range in pieces: mostly the first row is what is looked for; of a hub all of a piece is asked for."""
    rows = 1
    while start < end:
        yield start, min(end, start + rows)
        start, rows = start + rows, rows * 8
