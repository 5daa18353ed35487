"""The readers of a journal (`readers/<query>.json`): their progress, and for which of them rows are kept."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypedDict, TypeGuard

from smqrt.errors import ArgumentError, JournalError
from smqrt.journal.files import age_s, is_journal, make_folder, write_whole
from smqrt.journal.planning import Offsets
from smqrt.journal.reader import Journal
from smqrt.journal.results import MAX_READ, ResultRows
from smqrt.journal.settings import JournalSettings
from smqrt.journal.timestamps import iso, now_us

STALE_S = 86400.0
"""A reader that has said nothing for so long, though there are rows for it, has probably been forgotten."""
_MAX_LOGGED = 20
"""At once, in the log."""


@dataclass(frozen=True)
class Reader:
    """How far a query has come.

    Attributes:
        name: of the query, and of its file.
        offset: by node the next row that it will read.
        seen_us: when it last said so, microseconds since 1970, by the clock of the journal's disk.
        results: whether it reads what pipelines have published.
    """

    name: str
    offset: Mapping[str, int]
    seen_us: int
    results: bool = True

    def silent_s(self, now_us: int) -> float:
        """Return for how long it has said nothing."""
        return (now_us - self.seen_us) / 1e6

    def is_given_up(self, timeout_s: float | None, now_us: int) -> bool:
        """Return whether rows are no longer kept for it."""
        return timeout_s is not None and self.silent_s(now_us) > timeout_s


def load(journal: Path) -> Iterator[Reader]:
    """Yield the readers of a journal by name: all of them may be more than fits into memory.

    Args:
        journal: its folder.

    Raises:
        JournalError: what one has said is damaged.
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
    """How many rows wait for readers of a journal, up to its end at the moment of the first question.

    Args:
        journal: where.
        max_read: how many rows of a question are read, as for `ResultRows`.
        begin: from where a reader begins in nodes that its offset doesn't name; their first numbers by default.
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
        """Return how many rows wait for a reader: results of pipelines do for who reads them.

        Raises:
            JournalError: the journal can't be read.
        """
        start = {**self._begin, **reader.offset}
        return self._count(start, self._end) if reader.results else self._results.others(start)


def waiting(journal: Path, max_read: int = MAX_READ) -> Iterator[tuple[Reader, int]]:
    """Yield the readers of a journal, and how many rows wait for each.

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


def silence(reader: Reader, behind: int, now_us: int) -> str:
    """Say of a reader that it has said nothing for long, in half a sentence; nothing when all is well.

    Args:
        reader: the reader; behind: how many rows wait for it; now_us: the time, microseconds since 1970.
    """
    if not behind or reader.silent_s(now_us) <= STALE_S:
        return ""
    return f"has read nothing since {iso(reader.seen_us)}, and {behind:,} messages wait for it"


def needed(readers: Iterable[Reader], timeout_s: float | None, now_us: int) -> dict[str, int]:
    """Return, by node, the number of the first row that one of the readers has yet to read; those that are given up
    don't count.
    """
    found: dict[str, int] = {}
    for reader in readers:
        if not reader.is_given_up(timeout_s, now_us):
            for node, seq in reader.offset.items():
                found[node] = min(seq, found.get(node, seq))
    return found


def _condition(reader: Reader, behind: int, timeout_s: float | None, now_us: int) -> str:
    """Say of a silent reader what becomes of its rows; arguments as for `silence`, and after what time of silence it
    is given up, None for never.
    """
    since = silence(reader, behind, now_us)
    if reader.is_given_up(timeout_s, now_us):
        return f"{since}: it is given up, and they are kept no longer than others"
    until = (
        "until hard_bytes are reached" if timeout_s is None else f"until {iso(reader.seen_us + int(timeout_s * 1e6))}"
    )
    return f"{since}: they are kept {until}; run it, or smqrt pipeline reset {reader.name.partition('.')[0]}"


class ReaderWatch:
    """Looks after the readers of a journal that a hub writes.

    Args:
        settings: of the journal.

    Attributes:
        stale, given_up: how many readers say nothing, and for how many rows are no longer kept.
    """

    def __init__(self, settings: JournalSettings) -> None:
        self._settings = settings
        self._told: dict[str, bool] = {}
        self.stale = self.given_up = 0

    def look(self, now_us: int) -> list[str]:
        """Return a sentence for each reader with which something is wrong that wasn't told before, for hundreds only
        how many there are; reads the disk.

        Args:
            now_us: the time, microseconds since 1970.

        Raises:
            JournalError: the journal, or what a reader has said, can't be read.
        """
        timeout_s = self._settings.reader_timeout_s
        for path in _files(self._settings.path):
            with suppress(FileNotFoundError):
                age_s(path)  # of a clock that was wrong: else it is never given up
        late: dict[str, bool] = {}
        new: list[str] = []
        for each, behind in waiting(self._settings.path, 0):  # a hub reads no rows for this
            if silence(each, behind, now_us):
                given_up = late[each.name] = each.is_given_up(timeout_s, now_us)
                if self._told.get(each.name) != given_up:
                    new.append(f"the pipeline {each.name} {_condition(each, behind, timeout_s, now_us)}")
        self._told, self.stale, self.given_up = late, len(late), sum(late.values())
        more = len(new) - _MAX_LOGGED
        return [*new[:_MAX_LOGGED], f"{more} more pipelines are like them"] if more > 0 else new


MAX_QUERIES = 10_000
"""That report: retention reads all they have said."""
MOST_NODES = 256
"""Of a report: a hub looks at all reports once a minute."""
_MAX_SHOWN_CHARS = 100
_QUERY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


def checked_query(query: object) -> str:
    """Return the id of a query that may name a file; raises ArgumentError for others."""
    if isinstance(query, str) and _QUERY.fullmatch(query):
        return query
    raise ArgumentError(f"query: {_shown(query)} is no id of a query; use 1 to 100 letters, digits, '-', '_' and '.'.")


class ProgressReport(TypedDict):
    """How far a query has come: its id, its name, by node the next row it will read, when it said so, and whether it
    reads what pipelines have published.
    """

    query: str
    name: str
    offset: dict[str, int]
    time_us: int
    results: bool


def parse_report(body: bytes) -> ProgressReport:
    """Read a report of progress.

    Args:
        body: JSON with `query`, `name`, `offset` (node: next sequence number), and perhaps `time_us` and `results`.

    Returns:
        What `save_report` takes.

    Raises:
        ArgumentError: one sentence that names the wrong field.
    """
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:  # the latter: nested without end
        raise ArgumentError(f"progress: this is no JSON ({error}); send query, name and offset.") from None
    if not isinstance(values, dict):
        raise ArgumentError("progress: this is no JSON object; send query, name and offset.")
    query, name = checked_query(values.get("query")), values.get("name") or ""
    if not isinstance(name, str):
        raise ArgumentError(f"name: {_shown(name)} is no text; the name of the query is needed.")
    time_us = values.get("time_us")
    seen_us = time_us if _is_count(time_us) else now_us()
    results = values.get("results") is not False
    return {
        "query": query,
        "name": name,
        "offset": _offset(values.get("offset")),
        "time_us": seen_us,
        "results": results,
    }


def _offset(offset: object) -> dict[str, int]:
    if isinstance(offset, dict) and len(offset) > MOST_NODES:
        raise ArgumentError(f"offset: it names {len(offset)} nodes; a report has {MOST_NODES} at most.")
    if isinstance(offset, dict) and all(_is_count(seq) for seq in offset.values()):
        return offset
    raise ArgumentError(f"offset: {_shown(offset)} is no object of node: sequence number, such as {{'n1': 17}}.")


def _shown(value: object) -> str:
    """Return what is wrong, as far as it fits into a sentence."""
    try:
        text = repr(value)
    except RecursionError:
        return "what is nested so deep"
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "…"


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def reported_queries(journal: Path) -> list[str]:
    """Return the queries that have reported."""
    return [path.stem for path in (journal / "readers").glob("[!.]*.json")]


def save_report(journal: Path, values: ProgressReport) -> None:
    """Keep a report in the journal's folder.

    Raises:
        ArgumentError: it would be one query too many.
        JournalError: it can't be written.
    """
    folder = journal / "readers"
    path = folder / f"{values['query']}.json"
    if not path.exists() and len(reported_queries(journal)) >= MAX_QUERIES:
        raise ArgumentError(
            f"query: {MAX_QUERIES} queries have told {folder} how far they are; `smqrt pipeline reset` takes off "
            "those that are gone."
        )
    try:
        if is_journal(journal):  # and is not made anew
            make_folder(folder)
        write_whole(path, (json.dumps(values) + "\n").encode(), sync=False)
    except OSError as error:
        raise JournalError(f"{path} can't be written: {error.strerror}; make room on the disk.") from None
