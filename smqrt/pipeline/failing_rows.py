"""Rows that a query fails with (`on_error=`): looked for in the failed micro-batch, and left out from then on.

Spark tells that a function or a UDF has failed, not with which row. So the rows of the micro-batch are computed once
more as batches, half of them at a time, until each row that fails by itself is known.

<state>/<query>/left_out.json    {"rows": {node: [seq]}, "letters": [[topic, text]] that are yet to be published,
                                 "key", "number": of the commit that they are published with}

Source: decisions/0037-failing-rows.md (help/pipeline-rules.md is the page for users).
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
from smqrt.pipeline.failures import is_away, is_final, is_full, is_too_large, sentence

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from smqrt.journal.reader import Journal
    from smqrt.journal.remote import RemoteJournal

FILE = "left_out.json"
MOST_AT_ONCE = 100
"""So many rows of one micro-batch are left out; a function that fails with more of them is wrong."""
MOST_KEPT = 10_000
"""So many rows are remembered, for when a micro-batch is done again; the oldest are forgotten."""
_SAMPLES, _SAMPLE_PART = 8, 256
"""So many samples, each a 256th of the rows: by chance a hundred rows are in all of them once in two thousand times."""
SEARCH_S = 600.0
"""A search ends after so long."""
ON_ERROR = "on_error"
"""How the status calls the rows."""

Numbers = Mapping[str, Sequence[int]]
"""By node the numbers of rows."""
Compute = Callable[[Offsets, Offsets, Numbers], Exception | None]
"""Computes the rows of the journal between two offsets, without some; gives the error that it ends with."""


def is_wanted(declaration: Declaration, error: BaseException) -> bool:
    """Return whether rows are to be looked for that a query has ended with: not for errors that no row can be the cause of."""
    if not declaration.leaves_out or isinstance(error, SmqrtError):
        return False
    return not (is_final(error) or is_away(error) or is_full(error) or is_too_large(error))


Commit = Callable[[str, int, Sequence[OutRow]], object]
"""Publishes messages under a key and a number, once: `sinks.CommitClient.commit`."""


# ---- which rows are left out


@dataclass(frozen=True)
class FailingRow:
    """A row of the journal that a query fails with.

    Attributes:
        node, seq: which; reason: the error, one line.
    """

    node: str
    seq: int
    reason: str

    @property
    def offsets(self) -> tuple[Offsets, Offsets]:
        """The offsets between which it is."""
        return {self.node: self.seq}, {self.node: self.seq + 1}


class LeftOut:
    """The rows that a query leaves out, and the dead letters of them that are not published yet.

    Args:
        query: `<state>/<name>`; None keeps them in memory only.
        key: of the commits of letters; a new one for each state if not given.

    Attributes:
        rows: by node the numbers, ascending.
    """

    def __init__(self, query: Path | None = None, key: str = "") -> None:
        self._file = None if query is None else query / FILE
        found = cast("dict[str, Any]", (self._file and read_json(self._file)) or {})
        self.rows: dict[str, list[int]] = found.get("rows", {})
        self._letters: list[tuple[str, str]] = found.get("letters", [])
        self._key = key or found.get("key") or f"on_error.{secrets.token_hex(8)}"
        self._number = found.get("number", 0)

    def add(self, rows: Sequence[FailingRow], topic: str | None, journal: Journal | RemoteJournal) -> None:
        """Add rows, and their letters if there is a topic for them; the disk has both then."""
        for row in rows:
            known = {*self.rows.get(row.node, []), row.seq}
            self.rows[row.node] = sorted(known)[-MOST_KEPT:]
            if topic is not None:
                self._letters += [(topic, letter(found, row)) for found in journal.rows(*row.offsets)]
        self._save()

    def publish(self, commit: Commit) -> None:
        """Publish the letters that wait, each once. Raises as `commit`."""
        if self._letters:
            commit(self._key, self._number, [(topic.encode(), None, text.encode()) for topic, text in self._letters])
            self._letters, self._number = [], self._number + 1
            self._save()

    def _save(self) -> None:
        values = {"rows": self.rows, "letters": self._letters, "key": self._key, "number": self._number}
        if self._file is not None:
            write_json(self._file, values)


def without(frame: DataFrame, rows: Numbers) -> DataFrame:
    """Return the rows of a journal that are none of these, which are given by node."""
    from pyspark.sql import functions as F

    left_out = [(F.col("node") == node) & F.col("seq").isin(list(seqs)) for node, seqs in rows.items() if seqs]
    return frame.where(~reduce(or_, left_out)) if left_out else frame


def letter(row: Row, failing: FailingRow) -> str:
    """Return the dead letter of a row, as `row_checks.dead_letters` makes it of those that are checked by Spark."""
    at = datetime.fromtimestamp(row.ts_us // 1_000_000, UTC).replace(microsecond=row.ts_us % 1_000_000)
    told: dict[str, Any] = {"reason": failing.reason, "topic": row.topic, "subtopic": row.subtopic, "uid": row.uid}
    told |= {"node": failing.node, "seq": row.seq, "ts": at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")}
    return row_checks.letter_text({name: value for name, value in told.items() if value is not None}, row.payload)


# ---- the search


@dataclass(frozen=True)
class Span:
    """Rows of the journal between two offsets, numbered from 0 over all nodes."""

    start: Offsets
    end: Offsets

    @classmethod
    def of(cls, range_: tuple[Offsets, Offsets] | None, begin: Offsets) -> Span:
        """Return the rows of a range that a journal still has, which begins at `begin`.

        Raises:
            PipelineError: there is no range.
        """
        if range_ is None:
            raise PipelineError("it fails before it has any row")
        start, end = range_
        return cls({node: max(start.get(node, 0), begin.get(node, 0)) for node in end}, end)

    def __len__(self) -> int:
        return sum(max(0, self.end[node] - self.start.get(node, 0)) for node in self.end)

    def part(self, first: int, last: int) -> tuple[Offsets, Offsets]:
        """Return the offsets between which the rows number `first` up to, without, `last` are."""
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
        """Return node and seq of a row."""
        starts, ends = self.part(number, number + 1)
        return next((node, seq) for node, seq in starts.items() if ends[node] > seq)


@dataclass
class Search:
    """Looks for the rows of a range that a query fails with.

    Args:
        compute: see `Compute`.
        span: the range.
        name: of the query, for the reasons.
        stopped: tells that nobody wants them any more.
        most: of more rows it finds none.
    """

    compute: Compute
    span: Span
    name: str
    stopped: Callable[[], bool] = lambda: False
    most: int = MOST_AT_ONCE
    _found: dict[int, Exception] = field(default_factory=dict)

    def rows(self) -> list[FailingRow]:
        """Return them in order; none when the query doesn't fail any more.

        Raises:
            PipelineError: it fails without any row too, or with too many.
            Exception: what keeps it from being computed, such as a full disk.
        """
        if (error := self._error(0, 0)) is not None:
            raise PipelineError(f"it fails without any row too: {sentence(self.name, error)}")
        self._check_samples()
        while (error := self._error(0, len(self.span))) is not None:
            self._look(0, len(self.span), error)
        return [
            FailingRow(*self.span.row(number), sentence(self.name, error))
            for number, error in sorted(self._found.items())
        ]

    def _check_samples(self) -> None:
        """Sees soon that a function fails with nearly every row, which would take a minute row by row. Each sample has
        some rows, since those of other topics lie between the query's own.
        """
        size = len(self.span)
        rows = max(1, size // _SAMPLE_PART)
        samples = (size * number // _SAMPLES for number in range(_SAMPLES))
        if size > self.most and all(self._error(number, number + rows) for number in samples):
            raise self._too_many()

    def _look(self, first: int, last: int, error: Exception) -> None:
        """Find at least one row of a part that is known to fail."""
        if last - first == 1:
            self._add(first, error)
            return
        middle = (first + last) // 2
        failing = False
        for half in ((first, middle), (middle, last)):
            if (why := self._error(*half)) is not None:
                failing = True
                self._look(*half, why)
        if not failing:
            self._look_together(first, last, error)

    def _look_together(self, first: int, last: int, error: Exception) -> None:
        """Find the row with which those before it fail, where each half of a part is computed."""
        passes = first
        while last - passes > 1:
            middle = (passes + last) // 2
            if (why := self._error(first, middle)) is None:
                passes = middle
            else:
                last, error = middle, why
        self._add(last - 1, error)

    def _add(self, number: int, error: Exception) -> None:
        self._found[number] = error
        if len(self._found) > self.most:
            raise self._too_many()

    def _too_many(self) -> PipelineError:
        return PipelineError(f"it fails with more than {self.most} rows of one micro-batch")

    def _error(self, first: int, last: int) -> Exception | None:
        if self.stopped():
            raise PipelineError(f"the search for the row was stopped, or took longer than {SEARCH_S:g} s")
        left_out: dict[str, list[int]] = {}
        for number in self._found:
            node, seq = self.span.row(number)
            left_out.setdefault(node, []).append(seq)
        error = self.compute(*self.span.part(first, last), left_out)
        if error is not None and (is_away(error) or is_full(error)):
            raise error
        return error


def joined(one: Numbers, more: Numbers) -> dict[str, list[int]]:
    """Return the rows of both."""
    return {node: sorted({*one.get(node, ()), *more.get(node, ())}) for node in {*one, *more}}


def told(rows: Sequence[FailingRow]) -> str:
    """Return what is to be said of rows that are left out from now on."""
    first = rows[0]
    which = (
        f"row {first.seq} of {first.node}"
        if len(rows) == 1
        else f"{len(rows)} rows, of which the first is row {first.seq} of {first.node}"
    )
    return f"on_error leaves out {which}: {first.reason}"


def error_of(frame: Callable[[], DataFrame]) -> Exception | None:
    """Compute a frame, for nothing but the error that it ends with."""
    try:
        frame().write.format("noop").mode("overwrite").save()
    except Exception as error:
        return error
    return None


class SearchThread(threading.Thread):
    """A search beside other queries.

    Args:
        spark: the session.
        name: of the query.
        search: finds the rows and takes note of them.

    Attributes:
        rows: what was found; error: what the search itself has failed with.
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
        """End what Spark computes for it."""
        with suppress(Exception):  # the JVM is gone
            self._spark.sparkContext.cancelJobGroup(self._group)
