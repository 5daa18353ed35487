"""`spark.readStream.format("smq")`: the journal as a stream, whose offsets are seqs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from smqrt.errors import ArgumentError
from smqrt.pipeline.smq_source import columns, offsets
from smqrt.pipeline.smq_source.batch import edge
from smqrt.pipeline.smq_source.options import Offsets, ReadOptions
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
        self.progress = Progress(options)

    @told
    def initialOffset(self) -> Offsets:
        journal, options = self.scan.journal, self.options
        begin, last = journal.begin(), journal.end()
        return offsets.ordered(edge(journal, options.starting, options.starting_us, begin, last, last))

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self.options.max_rows) if self.options.max_rows else ReadAllAvailable()

    @told
    def prepareForTriggerAvailableNow(self) -> None:
        self.target = self.scan.journal.end()

    @told
    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:
        last = self.scan.journal.end() if self.target is None else self.target
        start = self._known(start, last)
        end = offsets.before_split(start, last, self.options.split_at)
        if isinstance(limit, ReadMaxRows):
            end = offsets.limited(start, end, limit.max_rows)
        return offsets.ordered(start | end)

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
        return offsets.ordered(self.scan.journal.end())

    @told
    def partitions(self, start: Offsets, end: Offsets) -> Sequence[InputPartition]:
        journal = self.scan.journal
        start, end = offsets.checked(start, end, journal.begin(), journal.end(), self.options.fail_on_data_loss)
        return self.scan.parts(start, end)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return self.scan.read(partition)

    def commit(self, end: Offsets) -> None:
        self.progress.committed(end)

    def stop(self) -> None:
        self.progress.close()
