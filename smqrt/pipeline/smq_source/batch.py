"""`spark.read.format("smq")`: the rows that the journal has when the query is planned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, InputPartition

from smqrt.errors import ArgumentError
from smqrt.pipeline.smq_source import columns, offsets
from smqrt.pipeline.smq_source.options import Offsets, ReadOptions
from smqrt.pipeline.smq_source.pushdown import Pushed, Pushing
from smqrt.pipeline.smq_source.scan import Part, Scan
from smqrt.pipeline.smq_source.telling import told

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from smqrt.journal.reader import Journal
    from smqrt.journal.remote import RemoteJournal


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
        columns.checked(schema)
        self.options, self.schema = options, schema
        self.pushFilters = Pushing()  # type: ignore[method-assign]

    @property
    def pushed(self) -> Pushed:
        """What Spark's filters leave."""
        return self.pushFilters.pushed  # type: ignore[attr-defined,no-any-return]

    @property
    def scan(self) -> Scan:
        """What to read. Not kept: Spark sends the reader to the workers between `pushFilters` and `partitions`."""
        return Scan(self.options, self.schema, named(self.pushed, self.options), self.pushed.times)

    @told
    def partitions(self) -> Sequence[InputPartition]:
        scan = self.scan
        begin, last = scan.journal.begin(), scan.journal.end()
        start, end = edges(scan.journal, self.options, begin, last)
        start, end = offsets.checked(start, end, begin, last, self.options.fail_on_data_loss)
        return scan.parts(scan.plan(*clipped(start, end, self.pushed)))

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return self.scan.read(partition) if isinstance(partition, Part) else iter(())


def named(pushed: Pushed, options: ReadOptions) -> frozenset[str] | None:
    """Returns the topics that both Spark's filters and the options leave; None for all."""
    wanted = options.filter()
    if pushed.topics is None or wanted is None:
        return pushed.topics
    return frozenset(filter(wanted.matches, pushed.topics))


def edges(
    journal: Journal | RemoteJournal, options: ReadOptions, begin: Offsets, last: Offsets
) -> tuple[Offsets, Offsets]:
    """Returns the offsets between which the options ask for rows: none of a node that the end doesn't name."""
    start = edge(journal, options.starting, options.starting_us, begin, last, begin)
    if options.ending_us is not None:
        return start, journal.offsets_until(options.ending_us)
    return start, edge(journal, options.ending, None, begin, last, last)


def edge(
    journal: Journal | RemoteJournal,
    place: str | Offsets | None,
    time_us: int | None,
    begin: Offsets,
    last: Offsets,
    default: Offsets,
) -> Offsets:
    """Returns the offsets of one option: a place, a time or neither."""
    if time_us is not None:
        return journal.offsets_at(time_us)
    if isinstance(place, str):
        return begin if place == "earliest" else last
    return default if place is None else place


def clipped(start: Offsets, end: Offsets, pushed: Pushed) -> tuple[Offsets, Offsets]:
    """Returns the part of a range that filters on `node` and `seq` leave."""
    first, behind = pushed.seq
    ends = {node: min(seq, max(behind, 0)) for node, seq in end.items() if pushed.nodes is None or node in pushed.nodes}
    starts = {node: min(max(start.get(node, 0), first), seq) for node, seq in ends.items()}
    return starts, ends
