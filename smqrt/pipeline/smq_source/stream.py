"""`spark.readStream.format("smq")`: the journal as a stream, whose offsets are seqs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, SupportsTriggerAvailableNow

from smqrt.errors import ArgumentError
from smqrt.journal.remote import RemoteJournal
from smqrt.pipeline.smq_source import columns, offsets, sizes
from smqrt.pipeline.smq_source.batch import edge
from smqrt.pipeline.smq_source.following import Follower
from smqrt.pipeline.smq_source.options import MAX_BYTES, Offsets, ReadOptions
from smqrt.pipeline.smq_source.progress import Progress
from smqrt.pipeline.smq_source.scan import Scan
from smqrt.pipeline.smq_source.telling import told

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


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
        columns.checked(schema)
        self.scan = Scan(options, schema)
        self.options = options
        self.target: Offsets | None = None
        self.planned: tuple[dict[str, tuple[int, int]], sizes.Chunks] | None = None
        self.progress = Progress(options)
        self._paused: Offsets | None = None
        self._moved = False
        self.follower: Follower | None = None

    @told
    def initialOffset(self) -> Offsets:
        journal, options = self.scan.journal, self.options
        begin, last = journal.begin(), self._end()
        return offsets.ordered(edge(journal, options.starting, options.starting_us, begin, last, last))

    def getDefaultReadLimit(self) -> ReadLimit:
        """Spark takes one limit; that of rows is kept with it."""
        return ReadMaxBytes(self.options.max_bytes or MAX_BYTES)

    @told
    def prepareForTriggerAvailableNow(self) -> None:
        self.target = self.scan.journal.end()  # this moment's

    @told
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
        end, chunks = sizes.within(self.scan.plan, start, end, self.options.max_bytes or MAX_BYTES)
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

    @told
    def reportLatestOffset(self) -> Offsets:
        return offsets.ordered(self._end())

    @told
    def partitions(self, start: Offsets, end: Offsets) -> Sequence[InputPartition]:
        journal = self.scan.journal
        start, end = offsets.checked(start, end, journal.begin(), self._end(), self.options.fail_on_data_loss)
        return self.scan.parts(self._plan(start, end))

    def _plan(self, start: Offsets, end: Offsets) -> sizes.Chunks:
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
        self.follower = self.follower or Follower(journal)
        return self.follower.end()

    def commit(self, end: Offsets) -> None:
        self.progress.committed(end)

    def stop(self) -> None:
        if self.follower:
            self.follower.stop()
        self.progress.close()
