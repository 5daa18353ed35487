"""Readers of a journal: progress reports of pipelines, their backlog, and stale readers.

A report is the file `readers/<query>.json`. A backlog leaves out rows that pipelines have published, unless the query
reads them. Such rows are in separate batches, which the index of a segment marks, so that rows need not be read.
Compacted rows, and rows of older versions, have no mark: a limited number of them is read.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, TypedDict, TypeGuard

from smqrt.errors import ArgumentError, JournalError
from smqrt.journal.files import age_s, is_journal, make_folder, write_whole
from smqrt.journal.planning import Chunk, Offsets
from smqrt.journal.reader import Journal
from smqrt.journal.record import Flag, iso, now_us
from smqrt.journal.settings import JournalSettings

STALE_S = 86400.0
"""A reader with a backlog is stale after this time without a report: its pipeline has probably been abandoned."""
MAX_READ = 5000
"""Maximum number of rows that are read where no index marks the results. In a larger range all rows count as messages.
"""
_MAX_LOGGED = 20
"""Maximum number of stale readers that are logged at once."""


@dataclass(frozen=True)
class Reader:
    """The progress of a query.

    Attributes:
        name: the name of the query, and of its file.
        offset: by node, the number of the next row that it will read.
        seen_us: time of its last report, microseconds since 1970, from the clock of the journal's disk.
        results: whether it reads rows that pipelines have published.
    """

    name: str
    offset: Mapping[str, int]
    seen_us: int
    results: bool = True

    def silent_s(self, now_us: int) -> float:
        """Return the seconds since its last report."""
        return (now_us - self.seen_us) / 1e6

    def is_given_up(self, timeout_s: float | None, now_us: int) -> bool:
        """Return whether rows are no longer kept for the reader."""
        return timeout_s is not None and self.silent_s(now_us) > timeout_s


def load(journal: Path) -> Iterator[Reader]:
    """Yield the readers of a journal, sorted by name, one at a time: all of them may not fit into memory.

    Args:
        journal: its folder.

    Raises:
        JournalError: a report is damaged.
    """
    for path in _files(journal):
        try:
            seen_us = path.stat().st_mtime_ns // 1000
            values = json.loads(path.read_bytes())
            offset = {str(node): int(seq) for node, seq in values["offset"].items()}
            reader = Reader(path.stem, offset, seen_us, values.get("results") is not False)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise JournalError(f"{path} can't be read ({error!r}); `smqrt pipeline reset` removes it.") from None
        yield reader


def _files(journal: Path) -> list[Path]:
    return sorted((journal / "readers").glob("[!.]*.json"))


class Backlog:
    """The backlog of readers of a journal, up to its end at the first call.

    Args:
        journal: the journal.
        max_read: maximum number of rows that are read in one call, as for `ResultRows`.
        begin: by node, the start of readers whose offset lacks the node; its first row by default.
    """

    def __init__(self, journal: Journal, max_read: int = MAX_READ, begin: Mapping[str, int] | None = None) -> None:
        self._journal, self._max_read, self._begin = journal, max_read, begin or {}

    @cached_property
    def _end(self) -> dict[str, int]:
        return self._journal.end()

    @cached_property
    def _count(self) -> Callable[[Offsets, Offsets], int]:
        return self._journal.row_counter()

    @cached_property
    def _results(self) -> ResultRows:
        return ResultRows(self._journal, self._end, self._max_read)

    def of(self, reader: Reader) -> int:
        """Return the number of rows that a reader has not read. Results count only for a reader that reads them.

        Raises:
            JournalError: the journal can't be read.
        """
        start = {**self._begin, **reader.offset}
        return self._count(start, self._end) if reader.results else self._results.count_other_rows(start)


def backlogs(journal: Path, max_read: int = MAX_READ) -> Iterator[tuple[Reader, int]]:
    """Yield the readers of a journal with their backlogs.

    Args:
        journal: its folder.
        max_read: as for `Backlog`.

    Raises:
        JournalError: as `load`, or the journal can't be read.
    """
    backlog: Backlog | None = None
    for reader in load(journal):
        backlog = backlog or Backlog(Journal(journal), max_read)
        yield reader, backlog.of(reader)


def stale_clause(reader: Reader, behind: int, now_us: int) -> str:
    """Return a clause about a stale reader; empty for a reader that is not stale.

    Args:
        reader: the reader.
        behind: its backlog, rows.
        now_us: the time, microseconds since 1970.
    """
    if not behind or reader.silent_s(now_us) <= STALE_S:
        return ""
    return f"has read nothing since {iso(reader.seen_us)}, and {behind:,} messages are unread"


def needed(readers: Iterable[Reader], timeout_s: float | None, now_us: int) -> dict[str, int]:
    """Return, by node, the number of the first row that a reader has not read. Given-up readers are ignored.

    Args:
        readers: the readers.
        timeout_s: `reader_timeout_s`.
        now_us: the time, microseconds since 1970.
    """
    found: dict[str, int] = {}
    for reader in readers:
        if not reader.is_given_up(timeout_s, now_us):
            for node, seq in reader.offset.items():
                found[node] = min(seq, found.get(node, seq))
    return found


class ReaderWatch:
    """Reports stale readers of a journal that a hub writes.

    Args:
        settings: settings of the journal.

    Attributes:
        stale, given_up: number of stale readers, and of those for which rows are no longer kept.
    """

    def __init__(self, settings: JournalSettings) -> None:
        self._settings = settings
        self._logged: dict[str, bool] = {}
        self.stale = self.given_up = 0

    def check(self, now_us: int) -> list[str]:
        """Return a message for each new stale or given-up reader; above `_MAX_LOGGED` their number. Reads the disk.

        Args:
            now_us: the time, microseconds since 1970.

        Raises:
            JournalError: the journal or a report can't be read.
        """
        timeout_s = self._settings.reader_timeout_s
        for path in _files(self._settings.path):
            with suppress(FileNotFoundError):
                age_s(path)  # sets a time in the future to now: otherwise the reader would never be given up
        stale: dict[str, bool] = {}
        new: list[str] = []
        for each, behind in backlogs(self._settings.path, 0):  # 0: reading rows would slow down the hub
            clause = stale_clause(each, behind, now_us)
            if not clause:
                continue
            given_up = stale[each.name] = each.is_given_up(timeout_s, now_us)
            if self._logged.get(each.name) == given_up:
                continue
            if given_up:
                result = "it is given up, so they are kept no longer than other messages"
            else:
                until = "hard_bytes are reached" if timeout_s is None else iso(each.seen_us + int(timeout_s * 1e6))
                query = each.name.partition(".")[0]
                result = f"they are kept until {until}; run it, or run `smqrt pipeline reset {query}`"
            new.append(f"the pipeline {each.name} {clause}: {result}")
        self._logged, self.stale, self.given_up = stale, len(stale), sum(stale.values())
        more = len(new) - _MAX_LOGGED
        return [*new[:_MAX_LOGGED], f"{more} more pipelines are stale"] if more > 0 else new


# ---- rows that pipelines have published


class _ResultBatches(NamedTuple):
    """Batches of results of a node from `start` on: first numbers, numbers after the last, and cumulative rows."""

    start: int
    firsts: list[int]
    ends: list[int]
    sums: list[int]

    def rows_below(self, seq: int) -> int:
        """Return the number of rows of the batches below `seq`."""
        at = bisect_right(self.firsts, seq)
        return self.sums[at] - max(0, self.ends[at - 1] - seq) if at else 0

    def between(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges between the batches, within a range."""
        at = max(0, bisect_right(self.firsts, start) - 1)
        for first, last in zip(self.firsts[at:], self.ends[at:], strict=True):
            if first >= end:
                break
            if start < first:
                yield start, first
            start = max(start, last)
        if start < end:
            yield start, end


class ResultRows:
    """The rows that pipelines have published. It caches what it reads, so create a new object after a few calls.

    Args:
        journal: the journal.
        end: by node, the number after the last row of interest.
        max_read: maximum number of rows that are read in one call.

    Raises:
        JournalError: the journal can't be read; all methods raise this.
    """

    def __init__(self, journal: Journal, end: Offsets, max_read: int = MAX_READ) -> None:
        self._journal, self._end, self._max_read = journal, end, max_read
        self._count = journal.row_counter()
        self._nodes: dict[str, _ResultBatches] = {}

    def count_other_rows(self, start: Offsets) -> int:
        """Return the number of rows from `start` on that were not published by pipelines."""
        found = 0
        for node, end in self._end.items():
            first = start.get(node, 0)
            known = self._known(node, first)
            results = known.rows_below(end) - known.rows_below(first)
            rows = self._count({node: first}, {node: end}) - results
            if 0 < rows <= self._max_read:
                chunks = (chunk for range_ in known.between(first, end) for chunk in self._chunks(node, *range_))
                found += sum(not flag & Flag.PIPELINE for chunk in chunks for _, flag in self._flags(chunk))
            else:
                found += max(0, rows)
        return found

    def first_other_rows(self, start: Offsets) -> dict[str, int]:
        """Return, by node, the number of the first row from `start` on that was not published by pipelines.

        A node without such a row is left out.
        """
        found = {node: self._first_other_row(node, start.get(node, 0), end) for node, end in self._end.items()}
        return {node: first for node, first in found.items() if first is not None}

    def _first_other_row(self, node: str, start: int, end: int) -> int | None:
        known, left = self._known(node, start), self._max_read
        pieces = (piece for first, last in known.between(start, end) for piece in _growing(first, last))
        for chunk in (chunk for first, last in pieces for chunk in self._chunks(node, first, last)):
            some = chunk._replace(rows=min(chunk.rows, left))
            for seq, flag in self._flags(some):
                if not flag & Flag.PIPELINE:
                    return seq
            if some.rows < chunk.rows:
                return some.end
            left -= some.rows
        return None

    def _chunks(self, node: str, first: int, last: int) -> Iterator[Chunk]:
        return (chunk for part in self._journal.plan({node: first}, {node: last}) for chunk in part)

    def _flags(self, chunk: Chunk) -> Iterator[tuple[int, int]]:
        """Yield (number, flags) of the rows of a chunk; without pyarrow the flags are 0."""
        try:
            batches = list(self._journal.tables(chunk, ["flags"])) if chunk.rows else []
        except ImportError:
            yield from ((seq, 0) for seq in range(chunk.start, chunk.end))
            return
        flags = (flag for batch in batches for flag in batch.column("flags").to_pylist())
        yield from enumerate(flags, chunk.start)

    def _known(self, node: str, start: int) -> _ResultBatches:
        """Return the batches of results of a node from `start` on; indexes are read once."""
        known = self._nodes.get(node)
        if known is None or start < known.start:
            until = self._end[node] if known is None else known.start
            found = self._journal.result_batches(node, start, until)
            older = _ResultBatches(start, [], [], []) if known is None else known
            firsts = [first for first, _ in found] + older.firsts
            ends = [end for _, end in found] + older.ends
            sums = [0, *accumulate(end - first for first, end in zip(firsts, ends, strict=True))]
            known = self._nodes[node] = _ResultBatches(start, firsts, ends, sums)
        return known


def _growing(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield a range in growing pieces: the wanted row is often the first one, and a hub sends whole pieces."""
    rows = 1
    while start < end:
        yield start, min(end, start + rows)
        start, rows = start + rows, rows * 8


# ---- progress reports


MAX_QUERIES = 10_000
"""Maximum number of queries with reports: retention reads all reports."""
MAX_NODES = 256
"""Maximum number of nodes in a report: a hub reads all reports once a minute."""
_MAX_SHOWN_CHARS = 100
_QUERY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


def checked_query(query: object) -> str:
    """Return the id of a query, which must be valid as a file name. Raises ArgumentError for an invalid one."""
    if isinstance(query, str) and _QUERY.fullmatch(query):
        return query
    raise ArgumentError(
        f"query: {_shown(query)} is not the id of a query; use 1 to 100 letters, digits, '-', '_' and '.'."
    )


class ProgressReport(TypedDict):
    """The progress of a query: id, name, the next row by node, the time, and whether it reads results of pipelines."""

    query: str
    name: str
    offset: dict[str, int]
    time_us: int
    results: bool


def parse_report(body: bytes) -> ProgressReport:
    """Parse a progress report.

    Args:
        body: JSON with `query`, `name` and `offset` (node: next sequence number); `time_us` and `results` are optional.

    Returns:
        The argument of `save_report`.

    Raises:
        ArgumentError: a field is invalid; the message names it.
    """
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise ArgumentError(f"progress: the body is not JSON ({error}); send query, name and offset.") from None
    if not isinstance(values, dict):
        raise ArgumentError("progress: the body is not a JSON object; send query, name and offset.")
    query, name = checked_query(values.get("query")), values.get("name") or ""
    if not isinstance(name, str):
        raise ArgumentError(f"name: {_shown(name)} is not a string; send the name of the query.")
    time_us, offset = values.get("time_us"), values.get("offset")
    if isinstance(offset, dict) and len(offset) > MAX_NODES:
        raise ArgumentError(f"offset: it names {len(offset)} nodes; a report has {MAX_NODES} at most.")
    if not isinstance(offset, dict) or not all(_is_count(seq) for seq in offset.values()):
        raise ArgumentError(
            f"offset: {_shown(offset)} is not an object {{node: sequence number}} such as {{'n1': 17}}."
        )
    return {
        "query": query,
        "name": name,
        "offset": offset,
        "time_us": time_us if _is_count(time_us) else now_us(),
        "results": values.get("results") is not False,
    }


def _shown(value: object) -> str:
    """Return an invalid value, shortened for a message."""
    try:
        text = repr(value)
    except RecursionError:
        return "a deeply nested value"
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "…"


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def reported_queries(journal: Path) -> list[str]:
    """Return the ids of the queries that have reported."""
    return [path.stem for path in (journal / "readers").glob("[!.]*.json")]


def save_report(journal: Path, values: ProgressReport) -> None:
    """Store a report in the journal's folder.

    Raises:
        ArgumentError: too many queries have reports.
        JournalError: it can't be written.
    """
    folder = journal / "readers"
    path = folder / f"{values['query']}.json"
    if not path.exists() and len(reported_queries(journal)) >= MAX_QUERIES:
        raise ArgumentError(
            f"query: limit reached: {MAX_QUERIES} queries have reports in {folder}; remove unused ones "
            "with `smqrt pipeline reset`."
        )
    try:
        if is_journal(journal):  # a journal that is missing is not created again
            make_folder(folder)
        write_whole(path, (json.dumps(values) + "\n").encode(), sync=False)
    except OSError as error:
        raise JournalError(f"{path} can't be written: {error.strerror}; make room on the disk.") from None
