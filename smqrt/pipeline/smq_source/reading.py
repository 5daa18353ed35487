"""`read` and `readStream` of `format("smq")`: batches up to this moment, with filters that skip files, and streams.

Spark hands filters down in batch reads only, and only while `spark.sql.python.filterPushdown.enabled` is true. The
offsets of a stream are seqs; it tells the journal what it has committed, so that retention keeps what comes after it.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, SupportsTriggerAvailableNow

from smqrt.errors import ArgumentError, JournalError
from smqrt.journal import commit, files
from smqrt.journal.remote import MOST_WAIT_S, RemoteJournal
from smqrt.pipeline.smq_source import scan as offsets
from smqrt.pipeline.smq_source.options import MAX_BYTES, Offsets, ReadOptions, epoch_us, without_traceback
from smqrt.pipeline.smq_source.scan import Chunks, Scan, ScanPartition, check_schema, limited_to_bytes

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql.datasource import Filter as SparkFilter
    from pyspark.sql.types import StructType

    from smqrt.journal.reader import Journal


LEAST, MOST = -(1 << 62), 1 << 62
"""Open ends of a range of microseconds or of seqs."""


@dataclass(frozen=True)
class PushedFilters:
    """What the filters of a query leave of the journal.

    Attributes:
        ts_us: first and last microsecond since 1970, both inclusive.
        seq: first seq and the one after the last.
        topics: the names, or None for all.
        nodes: the nodes, or None for all.
    """

    ts_us: tuple[int, int] = (LEAST, MOST)
    seq: tuple[int, int] = (LEAST, MOST)
    topics: frozenset[str] | None = None
    nodes: frozenset[str] | None = None

    @property
    def times(self) -> tuple[int, int] | None:
        """The range of microseconds, or None when it's open on both sides."""
        return None if self.ts_us == (LEAST, MOST) else self.ts_us


def bounds_of(kind: str, value: int) -> tuple[int, int] | None:
    """Return the first and the last whole number that a comparison with `value` leaves."""
    return {
        "EqualTo": (value, value),
        "GreaterThan": (value + 1, MOST),
        "GreaterThanOrEqual": (value, MOST),
        "LessThan": (LEAST, value - 1),
        "LessThanOrEqual": (LEAST, value),
    }.get(kind)


def intersection(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), min(one[1], other[1])


def remaining_names(names: frozenset[str] | None, kind: str, value: object) -> frozenset[str] | None:
    """Return which of the names an equality or a list leaves; None when the filter is neither."""
    if kind == "EqualTo" and isinstance(value, str):
        found = frozenset([value])
    elif kind == "In" and isinstance(value, tuple) and all(isinstance(one, str) for one in value):
        found = frozenset(value)
    else:
        return None
    return found if names is None else names & found


def narrowed(pushed: PushedFilters, wanted: SparkFilter) -> PushedFilters | None:
    """Return what a filter leaves of `pushed`; None when it's a filter that only Spark can apply."""
    kind, value = type(wanted).__name__, getattr(wanted, "value", None)
    match getattr(wanted, "attribute", None):
        case ("ts",) if isinstance(value, datetime) and (range_ := bounds_of(kind, epoch_us(value))):
            return replace(pushed, ts_us=intersection(pushed.ts_us, range_))
        case ("seq",) if type(value) is int and (range_ := bounds_of(kind, value)):
            return replace(pushed, seq=intersection(pushed.seq, (range_[0], range_[1] + 1)))
        case ("topic",) if (names := remaining_names(pushed.topics, kind, value)) is not None:
            return replace(pushed, topics=names)
        case ("node",) if (names := remaining_names(pushed.nodes, kind, value)) is not None:
            return replace(pushed, nodes=names)
    return None


class PushFilters:
    """A reader's `pushFilters`, which is not an error where pushdown is switched off.

    Spark refuses to read when a reader has a `pushFilters` of its own while the setting is off, so that nobody misses
    it. It tells so by the function behind the method: this answers with the inherited one, as the setting is Spark's
    default and a read without it is slower but right.
    """

    def __init__(self) -> None:
        from pyspark.sql.datasource import DataSourceReader

        self.pushed = PushedFilters()
        self.__func__ = DataSourceReader.pushFilters

    def __call__(self, filters: Iterable[SparkFilter]) -> Iterator[SparkFilter]:
        for one in filters:
            if (narrower := narrowed(self.pushed, one)) is not None:
                self.pushed = narrower
            else:
                yield one


class BatchReader(DataSourceReader):
    """Reads a range of the journal.

    Args:
        options: of the read.
        schema: of the result.

    Raises:
        ArgumentError: an option is for streams only, or the schema asks for what the journal doesn't have.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        if options.max_rows or options.max_bytes or options.split_at.at or options.query:
            raise ArgumentError(
                "smq options maxRowsPerTrigger, maxBytesPerTrigger, splitAt and queryName are for readStream."
            )
        check_schema(schema)
        self.options, self.schema = options, schema
        self.pushFilters = PushFilters()  # type: ignore[method-assign]

    @property
    def pushed(self) -> PushedFilters:
        """What Spark's filters leave."""
        return self.pushFilters.pushed  # type: ignore[attr-defined,no-any-return]

    @property
    def scan(self) -> Scan:
        """What to read. Not kept: Spark sends the reader to the workers between `pushFilters` and `partitions`."""
        return Scan(self.options, self.schema, named(self.pushed, self.options), self.pushed.times)

    @without_traceback
    def partitions(self) -> Sequence[InputPartition]:
        scan = self.scan
        begin, last = scan.journal.begin(), scan.journal.end()
        start, end = edges(scan.journal, self.options, begin, last)
        begin = scan.journal.begin(start)
        start, end = offsets.checked(start, end, begin, last, self.options.fail_on_data_loss)
        return scan.parts(scan.plan(*clipped(start, end, self.pushed)))

    def read(self, partition: InputPartition) -> Iterator[RecordBatch]:
        return self.scan.read(partition) if isinstance(partition, ScanPartition) else iter(())


def named(pushed: PushedFilters, options: ReadOptions) -> frozenset[str] | None:
    """Return the topics that both Spark's filters and the options leave; None for all."""
    wanted = options.filter()
    if pushed.topics is None or wanted is None:
        return pushed.topics
    return frozenset(filter(wanted.matches, pushed.topics))


def edges(
    journal: Journal | RemoteJournal, options: ReadOptions, begin: Offsets, last: Offsets
) -> tuple[Offsets, Offsets]:
    """Return the offsets between which the options ask for rows: none of a node that the end doesn't name."""
    start = edge(journal, options.starting, options.starting_us, begin, last, begin)
    if options.ending_us is not None:
        return start, journal.offsets_until(options.ending_us)
    return start, edge(journal, options.ending, None, begin, last, last)


def edge(
    journal: Journal | RemoteJournal,
    given: str | Offsets | None,
    time_us: int | None,
    begin: Offsets,
    last: Offsets,
    default: Offsets,
) -> Offsets:
    """Return the offsets of one option: a word or offsets, a time, or neither."""
    if time_us is not None:
        return journal.offsets_at(time_us)
    if isinstance(given, str):
        return begin if given == "earliest" else last
    return default if given is None else given


def clipped(start: Offsets, end: Offsets, pushed: PushedFilters) -> tuple[Offsets, Offsets]:
    """Return the part of a range that filters on `node` and `seq` leave."""
    first, behind = pushed.seq
    ends = {node: min(seq, max(behind, 0)) for node, seq in end.items() if pushed.nodes is None or node in pushed.nodes}
    starts = {node: min(max(start.get(node, 0), first), seq) for node, seq in ends.items()}
    return starts, ends


PACE_S = 0.05
"""Between two requests while the journal grows: a fraction of the shortest useful trigger, and at most 20 requests a
second for the hub, of some 120 µs."""


class JournalFollower:
    """Keeps one request open at the hub, on a connection and in a thread of its own.

    Copies that go to other processes ask for themselves.

    Args:
        journal: what is followed.
    """

    def __init__(self, journal: RemoteJournal) -> None:
        self._journal = journal
        self._thread: threading.Thread | None = None
        self._known: dict[str, int] = {}
        self._error: JournalError | None = None
        self._stopped = threading.Event()

    def __reduce__(self) -> tuple[object, ...]:
        return JournalFollower, (self._journal,)

    def end(self) -> dict[str, int]:
        """Return, by node, the number of the next row, as the hub told it last; the first time it is asked.

        Raises:
            JournalError: the hub is away for too long, or refuses.
        """
        if self._thread is None:
            self._begin()
        elif error := self._error:
            self._thread = self._error = None  # who asks again begins again
            raise error
        return dict(self._known)

    def stop(self) -> None:
        """Ask no more. The request that is open ends by itself, within `MOST_WAIT_S`."""
        self._stopped.set()

    def _begin(self) -> None:
        self._known = self._journal.end()
        self._thread = threading.Thread(target=self._follow, args=(copy.copy(self._journal),), daemon=True)
        self._thread.start()

    def _follow(self, journal: RemoteJournal) -> None:
        while not self._stopped.is_set():
            try:
                self._known = journal.wait(self._known, MOST_WAIT_S)
            except JournalError as error:
                self._error = error
                break
            self._stopped.wait(PACE_S)
        journal.close()


_log = logging.getLogger("smqrt.pipeline")
INTERVAL_S = 1.0
"""Retention thinks in hours, micro-batches end several times a second."""


class ProgressReports:
    """Reports of one stream, at most one a second.

    Args:
        options: of the stream; one without a query name reports nothing.
    """

    def __init__(self, options: ReadOptions) -> None:
        self._hub = files.HubAddress.of(options.journal, options.token, options.cafile)
        self._query, self._results = options.query or "", options.include_pipeline
        self._waiting: Offsets | None = None
        self._last_s = -INTERVAL_S

    def committed(self, end: Offsets) -> None:
        """Take note that everything before `end` is done with."""
        if not self._query:
            return
        self._waiting = end
        if time.monotonic() - self._last_s >= INTERVAL_S:
            self.close()

    def close(self) -> None:
        """Report what hasn't been reported. A report that fails is only logged: the next one says more."""
        if self._waiting is None:
            return
        offset, self._waiting, self._last_s = self._waiting, None, time.monotonic()
        try:
            commit.report_progress(self._hub, self._query, self._query, offset, results=self._results)
        except JournalError as error:
            _log.warning("progress can't be reported, retention doesn't know of it: %s", error)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the journal as a stream. One lives in a helper process of the driver, copies read in the workers.

    Args:
        options: of the read.
        schema: of the result.

    Raises:
        ArgumentError: an option is for batch reads only, or the schema asks for what the journal doesn't have.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        if options.ending is not None or options.ending_us is not None:
            raise ArgumentError("smq options endingOffsets and endingTime are for read: a stream has no end.")
        check_schema(schema)
        self.scan = Scan(options, schema)
        self.options = options
        self.target: Offsets | None = None
        self.planned: tuple[dict[str, tuple[int, int]], Chunks] | None = None
        self.progress = ProgressReports(options)
        self._paused: Offsets | None = None
        self._moved = False
        self.follower: JournalFollower | None = None

    @without_traceback
    def initialOffset(self) -> Offsets:
        journal, options = self.scan.journal, self.options
        begin, last = journal.begin(), self._end()
        return offsets.ordered(edge(journal, options.starting, options.starting_us, begin, last, last))

    def getDefaultReadLimit(self) -> ReadLimit:
        """Spark takes one limit; that of rows is kept with it."""
        return ReadMaxBytes(self.options.max_bytes or MAX_BYTES)

    @without_traceback
    def prepareForTriggerAvailableNow(self) -> None:
        self.target = self.scan.journal.end()  # this moment's

    @without_traceback
    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:
        last = self._end() if self.target is None else self.target
        start = self._known(start, last)
        if self._pauses(start):
            return offsets.ordered(start)
        end = last
        for split in self.options.split_at.at:
            end = offsets.before_split(start, end, split)
        if not isinstance(limit, ReadAllAvailable):
            end = self._limited(start, end)
        self._moved |= offsets.distance(start, end) > 0
        return offsets.ordered(start | end)

    def _pauses(self, start: Offsets) -> bool:
        """Return whether a trigger is to find nothing new: the first one at a split. With `availableNow` only if it was
        reached just now, as nothing new may end the query.
        """
        splits = self.options.split_at
        at = next((one for one in splits.at if all(start.get(node, 0) == seq for node, seq in one.items())), None)
        first, self._paused = at != self._paused, at
        return splits.pauses and at is not None and first and (self.target is None or self._moved)

    def _limited(self, start: Offsets, end: Offsets) -> Offsets:
        first = self.scan.journal.behind_gaps(start, end)
        if self.options.max_rows:
            end = offsets.limited(first, end, self.options.max_rows)
        if not offsets.distance(first, end):
            return end
        end, chunks = limited_to_bytes(self.scan.plan, first, end, self.options.max_bytes or MAX_BYTES)
        self.planned = offsets.spans(start, end), chunks
        return end

    def _known(self, start: Offsets, last: Offsets) -> Offsets:
        """Return `start` with the nodes that came since, each from its beginning.

        Raises:
            JournalError: the journal ends before `start`, so that it isn't the one that was read.
        """
        if what := offsets.ahead(start, last):
            if self.options.fail_on_data_loss:
                raise offsets.refused(what)
            start = {node: min(seq, last.get(node, 0)) for node, seq in start.items()}
        return start if last.keys() <= start.keys() else offsets.filled(start, self.scan.journal.begin())

    @without_traceback
    def reportLatestOffset(self) -> Offsets:
        return offsets.ordered(self._end())

    @without_traceback
    def partitions(self, start: Offsets, end: Offsets) -> Sequence[InputPartition]:
        journal = self.scan.journal
        start, end = offsets.checked(start, end, journal.begin(start), self._end(), self.options.fail_on_data_loss)
        return self.scan.parts(self._plan(start, end))

    def _plan(self, start: Offsets, end: Offsets) -> Chunks:
        """Return the chunks of a micro-batch: most often those that were found while its end was looked for."""
        planned, self.planned = self.planned, None
        if planned and planned[0] == offsets.spans(start, end):
            return planned[1]
        return self.scan.plan(start, end)

    def read(self, partition: InputPartition) -> Iterator[RecordBatch]:
        return self.scan.read(partition)

    def _end(self) -> Offsets:
        """Return where the journal ends; a hub tells it by itself."""
        journal = self.scan.journal
        if not isinstance(journal, RemoteJournal):
            return journal.end()
        self.follower = self.follower or JournalFollower(journal)
        return self.follower.end()

    def commit(self, end: Offsets) -> None:
        self.progress.committed(end)

    def stop(self) -> None:
        if self.follower:
            self.follower.stop()
        self.progress.close()
