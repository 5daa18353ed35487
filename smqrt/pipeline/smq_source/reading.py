"""Readers of `format("smq")`: batches with filters that skip files, and streams.

Spark passes filters only to batch reads, and only while `spark.sql.python.filterPushdown.enabled` is true. The offsets
of a stream are seqs. The stream reports committed offsets to the journal, so that retention keeps the later rows.
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
from smqrt.journal.remote import MAX_WAIT_S, RemoteJournal
from smqrt.pipeline.smq_source import scan as offsets
from smqrt.pipeline.smq_source.options import MAX_BYTES, Offsets, ReadOptions, epoch_us, without_traceback
from smqrt.pipeline.smq_source.scan import Chunks, Scan, ScanPartition, check_schema, limited_to_bytes

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql.datasource import Filter as SparkFilter
    from pyspark.sql.types import StructType

    from smqrt.journal.reader import Journal


UNBOUNDED_LOW, UNBOUNDED_HIGH = -(1 << 62), 1 << 62
"""Ends of an unlimited range of microseconds or seqs."""


@dataclass(frozen=True)
class PushedFilters:
    """The part of the journal that the filters of a query select.

    Attributes:
        ts_us: first and last microsecond since 1970, both inclusive.
        seq: the first seq, and the seq after the last.
        topics: the names; None selects all.
        nodes: the nodes; None selects all.
    """

    ts_us: tuple[int, int] = (UNBOUNDED_LOW, UNBOUNDED_HIGH)
    seq: tuple[int, int] = (UNBOUNDED_LOW, UNBOUNDED_HIGH)
    topics: frozenset[str] | None = None
    nodes: frozenset[str] | None = None

    @property
    def times(self) -> tuple[int, int] | None:
        """The range of microseconds; None when it is unlimited."""
        return None if self.ts_us == (UNBOUNDED_LOW, UNBOUNDED_HIGH) else self.ts_us


def bounds_of(kind: str, value: int) -> tuple[int, int] | None:
    """Return the first and the last integer for which a comparison with `value` is true."""
    return {
        "EqualTo": (value, value),
        "GreaterThan": (value + 1, UNBOUNDED_HIGH),
        "GreaterThanOrEqual": (value, UNBOUNDED_HIGH),
        "LessThan": (UNBOUNDED_LOW, value - 1),
        "LessThanOrEqual": (UNBOUNDED_LOW, value),
    }.get(kind)


def intersection(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """Return the range that two ranges have in common."""
    return max(one[0], other[0]), min(one[1], other[1])


def remaining_names(names: frozenset[str] | None, kind: str, value: object) -> frozenset[str] | None:
    """Return the names that an equality or a list selects; None for other filters."""
    if kind == "EqualTo" and isinstance(value, str):
        found = frozenset([value])
    elif kind == "In" and isinstance(value, tuple) and all(isinstance(one, str) for one in value):
        found = frozenset(value)
    else:
        return None
    return found if names is None else names & found


def narrowed(pushed: PushedFilters, wanted: SparkFilter) -> PushedFilters | None:
    """Return `pushed` restricted by a filter; None for a filter that only Spark can apply."""
    kind, value = type(wanted).__name__, getattr(wanted, "value", None)
    match getattr(wanted, "attribute", None):
        case ("ts",) if isinstance(value, datetime) and (range_ := bounds_of(kind, epoch_us(value))):
            return replace(pushed, ts_us=intersection(pushed.ts_us, range_))
        case ("seq",) if type(value) is int and (range_ := bounds_of(kind, value)):
            # The end of `seq` is exclusive.
            return replace(pushed, seq=intersection(pushed.seq, (range_[0], range_[1] + 1)))
        case ("topic",) if (names := remaining_names(pushed.topics, kind, value)) is not None:
            return replace(pushed, topics=names)
        case ("node",) if (names := remaining_names(pushed.nodes, kind, value)) is not None:
            return replace(pushed, nodes=names)
    return None


class PushFilters:
    """A reader's `pushFilters` that does not fail while pushdown is disabled.

    Spark rejects a reader that overrides `pushFilters` while the setting is false, which is the default. It compares
    `__func__` of the method with the inherited function, so `__func__` is the inherited function here. A read without
    pushdown is slower but correct.
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
                yield one  # Spark applies this filter itself


class BatchReader(DataSourceReader):
    """Reads a range of the journal.

    Args:
        options: the options of the read.
        schema: the schema of the result.

    Raises:
        ArgumentError: an option is for streams only, or the schema has a column that the journal doesn't have.
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
        """The part of the journal that Spark's filters select."""
        return self.pushFilters.pushed  # type: ignore[attr-defined,no-any-return]

    @property
    def scan(self) -> Scan:
        """The scan. It is not stored, since Spark sends the reader to the workers before it calls `partitions`."""
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
    """Return the topics that both Spark's filters and the options select; None for all."""
    wanted = options.filter()
    if pushed.topics is None or wanted is None:
        return pushed.topics
    return frozenset(filter(wanted.matches, pushed.topics))


def edges(
    journal: Journal | RemoteJournal, options: ReadOptions, begin: Offsets, last: Offsets
) -> tuple[Offsets, Offsets]:
    """Return the offsets of the range in the options; a node that is missing in the end has no rows."""
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
    """Return the offsets of one option: a word or offsets, a time, or the default."""
    if time_us is not None:
        return journal.offsets_at(time_us)
    if isinstance(given, str):
        return begin if given == "earliest" else last
    return default if given is None else given


def clipped(start: Offsets, end: Offsets, pushed: PushedFilters) -> tuple[Offsets, Offsets]:
    """Return the part of a range that filters on `node` and `seq` select."""
    first, behind = pushed.seq
    ends = {node: min(seq, max(behind, 0)) for node, seq in end.items() if pushed.nodes is None or node in pushed.nodes}
    starts = {node: min(max(start.get(node, 0), first), seq) for node, seq in ends.items()}
    return starts, ends


REQUEST_INTERVAL_S = 0.05
"""The time between two requests while the journal grows: a fraction of the shortest useful trigger. At most 20 requests
a second take the hub about 120 µs each."""


class JournalFollower:
    """Keeps one request open at the hub, with a separate connection and thread.

    Copies in other processes send separate requests.

    Args:
        journal: the journal.
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
        """Return the last known end of the journal: by node, the number of the next row.

        The first call sends a request to the hub and starts the thread.

        Raises:
            JournalError: the hub is unreachable for too long, or rejects the request.
        """
        if self._thread is None:  # in the first call, or after an error
            self._known = self._journal.end()
            self._thread = threading.Thread(target=self._follow, args=(copy.copy(self._journal),), daemon=True)
            self._thread.start()
        elif error := self._error:  # of the thread, which has ended
            self._thread = self._error = None  # the next call starts again
            raise error
        return dict(self._known)

    def stop(self) -> None:
        """Stop sending requests. The open request ends within `MAX_WAIT_S`."""
        self._stopped.set()

    def _follow(self, journal: RemoteJournal) -> None:
        while not self._stopped.is_set():
            try:
                self._known = journal.wait(self._known, MAX_WAIT_S)
            except JournalError as error:
                self._error = error
                break
            self._stopped.wait(REQUEST_INTERVAL_S)
        journal.close()


_log = logging.getLogger("smqrt.pipeline")
REPORT_INTERVAL_S = 1.0
"""The interval of reports. Retention has a resolution of hours, while micro-batches end several times a second."""


class ProgressReports:
    """Reports the progress of one stream, at most once a second.

    Args:
        options: the options of the stream; without a query name nothing is reported.
    """

    def __init__(self, options: ReadOptions) -> None:
        self._hub = files.HubAddress.of(options.journal, options.token, options.cafile)
        self._query, self._results = options.query or "", options.include_pipeline
        self._waiting: Offsets | None = None
        self._last_s = -REPORT_INTERVAL_S

    def committed(self, end: Offsets) -> None:
        """Record that all rows before `end` are processed."""
        if not self._query:
            return
        self._waiting = end
        if time.monotonic() - self._last_s >= REPORT_INTERVAL_S:
            self.close()

    def close(self) -> None:
        """Report the recorded progress. A failed report is only logged, since the next one includes it."""
        if self._waiting is None:
            return
        offset, self._waiting, self._last_s = self._waiting, None, time.monotonic()
        try:
            commit.report_progress(self._hub, self._query, self._query, offset, results=self._results)
        except JournalError as error:
            _log.warning("progress can't be reported to the journal's retention: %s", error)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the journal as a stream: one object in a child process of the driver, and copies in the workers.

    Args:
        options: the options of the read.
        schema: the schema of the result.

    Raises:
        ArgumentError: an option is for batch reads only, or the schema has a column that the journal doesn't have.
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
        """Return the limit of bytes: Spark supports one limit, and `latestOffset` also applies that of rows."""
        return ReadMaxBytes(self.options.max_bytes or MAX_BYTES)

    @without_traceback
    def prepareForTriggerAvailableNow(self) -> None:
        self.target = self.scan.journal.end()

    @without_traceback
    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:
        last = self._end() if self.target is None else self.target
        start = self._known(start, last)
        splits = self.options.split_at
        at = next((one for one in splits.at if all(start.get(node, 0) == seq for node, seq in one.items())), None)
        is_first, self._paused = at != self._paused, at
        # The first trigger at a split returns no rows. With `availableNow` a trigger without rows may end the query, so
        # this applies only to splits that the present run has reached.
        if splits.pauses and at is not None and is_first and (self.target is None or self._moved):
            return offsets.ordered(start)
        end = last
        for split in splits.at:
            end = offsets.before_split(start, end, split)
        if not isinstance(limit, ReadAllAvailable):
            first = self.scan.journal.after_gaps(start, end)
            if self.options.max_rows:
                end = offsets.limited(first, end, self.options.max_rows)
            if offsets.distance(first, end):
                max_bytes = self.options.max_bytes or MAX_BYTES
                end, chunks = limited_to_bytes(self.scan.plan, first, end, max_bytes)
                self.planned = offsets.spans(start, end), chunks
        self._moved |= offsets.distance(start, end) > 0
        return offsets.ordered(start | end)

    def _known(self, start: Offsets, last: Offsets) -> Offsets:
        """Return `start` with new nodes, each from its beginning.

        Raises:
            JournalError: the journal ends before `start`, so it is another journal than before.
        """
        if problem := offsets.ahead(start, last):
            if self.options.fail_on_data_loss:
                raise offsets.refused(problem)
            start = {node: min(seq, last.get(node, 0)) for node, seq in start.items()}
        return start if last.keys() <= start.keys() else offsets.filled(start, self.scan.journal.begin())

    @without_traceback
    def reportLatestOffset(self) -> Offsets:
        return offsets.ordered(self._end())

    @without_traceback
    def partitions(self, start: Offsets, end: Offsets) -> Sequence[InputPartition]:
        journal = self.scan.journal
        start, end = offsets.checked(start, end, journal.begin(start), self._end(), self.options.fail_on_data_loss)
        # `latestOffset` has usually planned this range already. After a restart Spark repeats an earlier range.
        planned, self.planned = self.planned, None
        is_planned = planned is not None and planned[0] == offsets.spans(start, end)
        return self.scan.parts(planned[1] if planned is not None and is_planned else self.scan.plan(start, end))

    def read(self, partition: InputPartition) -> Iterator[RecordBatch]:
        return self.scan.read(partition)

    def _end(self) -> Offsets:
        """Return the end of the journal; a hub reports it through the open request."""
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
