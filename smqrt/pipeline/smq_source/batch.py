"""`spark.read.format("smq")`: the rows that the journal has when the query is planned, and filters that skip some.

Spark hands filters down in batch reads only, and only while `spark.sql.python.filterPushdown.enabled` is true.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, InputPartition

from smqrt.errors import ArgumentError
from smqrt.pipeline.smq_source import offsets
from smqrt.pipeline.smq_source.options import Offsets, ReadOptions, epoch_us, without_traceback
from smqrt.pipeline.smq_source.scan import Part, Scan, check_schema

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter as SparkFilter
    from pyspark.sql.types import StructType

    from smqrt.journal.reader import Journal
    from smqrt.journal.remote import RemoteJournal


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
    """Returns the first and the last whole number that a comparison with `value` leaves."""
    return {
        "EqualTo": (value, value),
        "GreaterThan": (value + 1, MOST),
        "GreaterThanOrEqual": (value, MOST),
        "LessThan": (LEAST, value - 1),
        "LessThanOrEqual": (LEAST, value),
    }.get(kind)


def intersection(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), min(one[1], other[1])


def remaining_names(names: frozenset[str] | None, kind: str, value: Any) -> frozenset[str] | None:
    """Returns which of the names an equality or a list leaves; None when the filter is neither."""
    if kind == "EqualTo" and isinstance(value, str):
        found = frozenset([value])
    elif kind == "In" and all(isinstance(one, str) for one in value):
        found = frozenset(value)
    else:
        return None
    return found if names is None else names & found


def narrowed(pushed: PushedFilters, wanted: SparkFilter) -> PushedFilters | None:
    """Returns what a filter leaves of `pushed`; None when it's a filter that only Spark can apply."""
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
        start, end = offsets.checked(start, end, begin, last, self.options.fail_on_data_loss)
        return scan.parts(scan.plan(*clipped(start, end, self.pushed)))

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return self.scan.read(partition) if isinstance(partition, Part) else iter(())


def named(pushed: PushedFilters, options: ReadOptions) -> frozenset[str] | None:
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


def clipped(start: Offsets, end: Offsets, pushed: PushedFilters) -> tuple[Offsets, Offsets]:
    """Returns the part of a range that filters on `node` and `seq` leave."""
    first, behind = pushed.seq
    ends = {node: min(seq, max(behind, 0)) for node, seq in end.items() if pushed.nodes is None or node in pushed.nodes}
    starts = {node: min(max(start.get(node, 0), first), seq) for node, seq in ends.items()}
    return starts, ends
