"""Rows that make a query fail (`on_error=`): search in the failed micro-batch, and the rows left out since then.

Spark reports that a function or a UDF has failed, but not for which row. The search computes the rows of the
micro-batch again as batches, half of them at a time, until each row that fails by itself is found.

<state>/<query>/left_out.json    {"rows": {node: [seq]}, "letters": [[topic, text]] to be published,
                                 "key", "number": of the commit that publishes them}

(help: pipeline-rules, decision 0037)
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from smqrt.errors import PipelineError, SmqrtError
from smqrt.journal.commit import OutRow
from smqrt.journal.record import Row
from smqrt.pipeline import row_checks
from smqrt.pipeline.api import Declaration
from smqrt.pipeline.checkpoint import Offsets, read_json, write_json
from smqrt.pipeline.failures import is_disk_full, is_final, is_hub_unreachable, is_too_large, sentence

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from smqrt.journal.reader import Journal
    from smqrt.journal.remote import RemoteJournal

FILE = "left_out.json"
MAX_ROWS = 100
"""The maximum number of rows of one micro-batch that are left out. A function that fails with more has a bug."""
MAX_KEPT = 10_000
"""The maximum number of recorded rows, for repeated micro-batches; the oldest are removed."""
_SAMPLES, _SAMPLE_DIVISOR = 8, 256
"""A search begins with 8 samples, each a 256th of the rows. 100 failing rows are in all samples with p = 1/2000."""
SEARCH_S = 600.0
"""The maximum duration of a search."""
ON_ERROR = "on_error"
"""The name of these rows in the status."""

RowNumbers = Mapping[str, Sequence[int]]
"""Numbers of rows, by node."""
Compute = Callable[[Offsets, Offsets, RowNumbers], Exception | None]
"""Computes the rows of the journal between two offsets, without the given rows; returns the error or None."""


def is_wanted(declaration: Declaration, error: BaseException) -> bool:
    """Return whether to search for failing rows: only after errors that a row can cause."""
    if not declaration.skips_failing_rows or isinstance(error, SmqrtError):
        return False
    return not (is_final(error) or is_hub_unreachable(error) or is_disk_full(error) or is_too_large(error))


Commit = Callable[[str, int, Sequence[OutRow]], object]
"""Publishes messages once under a key and a number: `sinks.CommitClient.commit`."""


# ---- Rows that are left out


@dataclass(frozen=True)
class FailingRow:
    """A row of the journal that makes a query fail.

    Attributes:
        node, seq: the row; reason: the error, one line.
    """

    node: str
    seq: int
    reason: str

    @property
    def offsets(self) -> tuple[Offsets, Offsets]:
        """The offsets before and after it."""
        return {self.node: self.seq}, {self.node: self.seq + 1}


class LeftOutRows:
    """The rows that a query leaves out, and their unpublished dead letters.

    Args:
        query: `<state>/<name>`; None keeps them in memory only.
        key: the key of the commits of letters; by default a new one for each state.

    Attributes:
        rows: by node the numbers in ascending order.
    """

    def __init__(self, query: Path | None = None, key: str = "") -> None:
        self._file = None if query is None else query / FILE
        found = cast("dict[str, Any]", (self._file and read_json(self._file)) or {})
        self.rows: dict[str, list[int]] = found.get("rows", {})
        self._letters: list[tuple[str, str]] = found.get("letters", [])
        self._key = key or found.get("key") or f"on_error.{secrets.token_hex(8)}"
        self._number = found.get("number", 0)

    def add(self, rows: Sequence[FailingRow], topic: str | None, journal: Journal | RemoteJournal) -> None:
        """Add rows, and their letters if there is a topic, and write both to the disk."""
        for row in rows:
            known = {*self.rows.get(row.node, []), row.seq}
            self.rows[row.node] = sorted(known)[-MAX_KEPT:]
            if topic is not None:
                self._letters += [(topic, letter(found, row)) for found in journal.rows(*row.offsets)]
        self._save()

    def publish(self, commit: Commit) -> None:
        """Publish the stored letters, each once. Raises as `commit`."""
        if self._letters:
            commit(self._key, self._number, [(topic.encode(), None, text.encode()) for topic, text in self._letters])
            self._letters, self._number = [], self._number + 1
            self._save()

    def _save(self) -> None:
        values = {"rows": self.rows, "letters": self._letters, "key": self._key, "number": self._number}
        if self._file is not None:
            write_json(self._file, values)


def without(frame: DataFrame, rows: RowNumbers) -> DataFrame:
    """Return a frame of the journal without the given rows."""
    from pyspark.sql import functions as F

    left_out = [(F.col("node") == node) & F.col("seq").isin(list(seqs)) for node, seqs in rows.items() if seqs]
    return frame.where(~reduce(or_, left_out)) if left_out else frame


def letter(row: Row, failing: FailingRow) -> str:
    """Return the dead letter of a row, in the format of `row_checks.dead_letters`."""
    at = datetime.fromtimestamp(row.ts_us // 1_000_000, UTC).replace(microsecond=row.ts_us % 1_000_000)
    fields: dict[str, Any] = {"reason": failing.reason, "topic": row.topic, "subtopic": row.subtopic, "uid": row.uid}
    fields |= {"node": failing.node, "seq": row.seq, "ts": at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")}
    return row_checks.letter_text({name: value for name, value in fields.items() if value is not None}, row.payload)


# ---- The search


@dataclass(frozen=True)
class Span:
    """Rows of the journal between two offsets, numbered from 0 across all nodes."""

    start: Offsets
    end: Offsets

    @classmethod
    def of(cls, range_: tuple[Offsets, Offsets] | None, begin: Offsets) -> Span:
        """Return the existing rows of a range, given the beginning of the journal.

        Raises:
            PipelineError: there is no range.
        """
        if range_ is None:
            raise PipelineError("it fails before it reads a row")
        start, end = range_
        return cls({node: max(start.get(node, 0), begin.get(node, 0)) for node in end}, end)

    def __len__(self) -> int:
        return sum(max(0, self.end[node] - self.start.get(node, 0)) for node in self.end)

    def part(self, first: int, last: int) -> tuple[Offsets, Offsets]:
        """Return the offsets before row number `first` and before row number `last`."""
        starts, ends = dict[str, int](), dict[str, int]()
        before = 0
        for node in sorted(self.end):
            begin = self.start.get(node, 0)
            rows = max(0, self.end[node] - begin)
            starts[node] = begin + min(max(first - before, 0), rows)
            ends[node] = begin + min(max(last - before, 0), rows)
            before += rows
        return starts, ends

    def row(self, number: int) -> tuple[str, int]:
        """Return node and seq of a row, given its number."""
        starts, ends = self.part(number, number + 1)
        return next((node, seq) for node, seq in starts.items() if ends[node] > seq)


@dataclass
class Search:
    """Search for the rows of a range that make a query fail.

    Args:
        compute: see `Compute`.
        span: the range.
        name: the name of the query, for the reasons.
        stopped: returns whether to end the search.
        max_rows: the maximum number of failing rows; with more of them the search fails.
    """

    compute: Compute
    span: Span
    name: str
    stopped: Callable[[], bool] = lambda: False
    max_rows: int = MAX_ROWS
    _found: dict[int, Exception] = field(default_factory=dict)

    def rows(self) -> list[FailingRow]:
        """Return the rows in order; none when the query no longer fails.

        Raises:
            PipelineError: it fails without any row too, or with too many rows.
            Exception: the rows can't be computed, for example because the disk is full.
        """
        if (error := self._error(0, 0)) is not None:
            raise PipelineError(f"it fails without any row too: {sentence(self.name, error)}")
        size = len(self.span)
        # The samples detect a function that fails with nearly every row; a search by halves would take a minute. A
        # sample has several rows, because rows of other topics are between those of the query.
        rows = max(1, size // _SAMPLE_DIVISOR)
        samples = (size * number // _SAMPLES for number in range(_SAMPLES))
        if size > self.max_rows and all(self._error(number, number + rows) for number in samples):
            raise self._too_many()
        while (error := self._error(0, size)) is not None:
            self._bisect(0, size, error)
        return [
            FailingRow(*self.span.row(number), sentence(self.name, error))
            for number, error in sorted(self._found.items())
        ]

    def _bisect(self, first: int, last: int, error: Exception) -> None:
        """Find at least one row of a part that is known to fail."""
        if last - first == 1:
            self._add(first, error)
            return
        middle = (first + last) // 2
        is_found = False
        for half in ((first, middle), (middle, last)):
            if (why := self._error(*half)) is not None:
                is_found = True
                self._bisect(*half, why)
        if is_found:
            return
        # Each half can be computed alone: find the first row with which the rows up to it fail.
        passing = first
        while last - passing > 1:
            middle = (passing + last) // 2
            if (why := self._error(first, middle)) is None:
                passing = middle
            else:
                last, error = middle, why
        self._add(last - 1, error)

    def _add(self, number: int, error: Exception) -> None:
        self._found[number] = error
        if len(self._found) > self.max_rows:
            raise self._too_many()

    def _too_many(self) -> PipelineError:
        return PipelineError(f"it fails with more than {self.max_rows} rows of one micro-batch")

    def _error(self, first: int, last: int) -> Exception | None:
        if self.stopped():
            raise PipelineError(f"the search for the row was stopped, or took longer than {SEARCH_S:g} s")
        left_out: dict[str, list[int]] = {}
        for number in self._found:
            node, seq = self.span.row(number)
            left_out.setdefault(node, []).append(seq)
        error = self.compute(*self.span.part(first, last), left_out)
        if error is not None and (is_hub_unreachable(error) or is_disk_full(error)):
            raise error
        return error


def merged(one: RowNumbers, more: RowNumbers) -> dict[str, list[int]]:
    """Return the rows of both mappings."""
    return {node: sorted({*one.get(node, ()), *more.get(node, ())}) for node in {*one, *more}}


def summary(rows: Sequence[FailingRow]) -> str:
    """Return a sentence about newly found rows, which are left out."""
    first = rows[0]
    which = (
        f"row {first.seq} of {first.node}"
        if len(rows) == 1
        else f"{len(rows)} rows, of which the first is row {first.seq} of {first.node}"
    )
    return f"on_error leaves out {which}: {first.reason}"


def error_of(frame: Callable[[], DataFrame]) -> Exception | None:
    """Compute a frame and return the error, or None."""
    try:
        frame().write.format("noop").mode("overwrite").save()
    except Exception as error:
        return error
    return None


class SearchThread(threading.Thread):
    """Thread of a search, while other queries run.

    Args:
        spark: the session.
        name: the name of the query.
        search: finds the rows and stores them.

    Attributes:
        rows: the rows found; error: the error of the search itself.
    """

    def __init__(self, spark: SparkSession, name: str, search: Callable[[], list[FailingRow]]) -> None:
        super().__init__(name=f"search {name}", daemon=True)
        self.rows: list[FailingRow] = []
        self.error: Exception | None = None
        self._spark, self._search, self._group = spark, search, f"smqrt.search.{name}"

    def run(self) -> None:
        try:
            self._spark.sparkContext.setJobGroup(self._group, self.name, interruptOnCancel=True)
            self.rows = self._search()
        except Exception as error:
            self.error = error

    def cancel(self) -> None:
        """Cancel the Spark jobs of the search."""
        with suppress(Exception):  # the JVM has ended
            self._spark.sparkContext.cancelJobGroup(self._group)
