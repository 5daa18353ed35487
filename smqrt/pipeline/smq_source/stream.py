"""`spark.readStream.format("smq")`: the journal as a stream, whose offsets are seqs."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, SupportsTriggerAvailableNow

from smqrt.errors import ArgumentError, JournalError
from smqrt.journal import commit, locations
from smqrt.journal.remote import MOST_WAIT_S, RemoteJournal
from smqrt.pipeline.smq_source import offsets
from smqrt.pipeline.smq_source.batch import edge
from smqrt.pipeline.smq_source.options import MAX_BYTES, Offsets, ReadOptions, without_traceback
from smqrt.pipeline.smq_source.scan import Chunks, Scan, check_schema, limited_to_bytes

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


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

    def __reduce__(self) -> Any:
        return JournalFollower, (self._journal,)

    def end(self) -> dict[str, int]:
        """Returns, by node, the number of the next row, as the hub told it last; the first time it is asked.

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
        self._hub = locations.HubAddress.of(options.journal, options.token, options.cafile)
        self._query = options.query or ""
        self._waiting: Offsets | None = None
        self._last_s = -INTERVAL_S

    def committed(self, end: Offsets) -> None:
        """Takes note that everything before `end` is done with."""
        if not self._query:
            return
        self._waiting = end
        if time.monotonic() - self._last_s >= INTERVAL_S:
            self.close()

    def close(self) -> None:
        """Reports what hasn't been reported. A report that fails is only logged: the next one says more."""
        if self._waiting is None:
            return
        offset, self._waiting, self._last_s = self._waiting, None, time.monotonic()
        try:
            commit.report_progress(self._hub, self._query, self._query, offset)
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
        """Whether a trigger is to find nothing new: the first one at a split. With `availableNow` only if it was
        reached just now, as nothing new may end the query.
        """
        splits = self.options.split_at
        at = next((one for one in splits.at if all(start.get(node, 0) == seq for node, seq in one.items())), None)
        first, self._paused = at != self._paused, at
        return splits.pauses and at is not None and first and (self.target is None or self._moved)

    def _limited(self, start: Offsets, end: Offsets) -> Offsets:
        if self.options.max_rows:
            end = offsets.limited(start, end, self.options.max_rows)
        if not offsets.distance(start, end):
            return end
        end, chunks = limited_to_bytes(self.scan.plan, start, end, self.options.max_bytes or MAX_BYTES)
        self.planned = offsets.spans(start, end), chunks
        return end

    def _known(self, start: Offsets, last: Offsets) -> Offsets:
        """Returns `start` with the nodes that came since, each from its beginning.

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
        start, end = offsets.checked(start, end, journal.begin(), self._end(), self.options.fail_on_data_loss)
        return self.scan.parts(self._plan(start, end))

    def _plan(self, start: Offsets, end: Offsets) -> Chunks:
        """Returns the chunks of a micro-batch: most often those that were found while its end was looked for."""
        planned, self.planned = self.planned, None
        if planned and planned[0] == offsets.spans(start, end):
            return planned[1]
        return self.scan.plan(start, end)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return self.scan.read(partition)

    def _end(self) -> Offsets:
        """Returns where the journal ends; a hub tells it by itself."""
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
