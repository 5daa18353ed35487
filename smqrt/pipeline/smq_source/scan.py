"""Scans of a journal, for batches and streams: ranges are planned as tasks, which workers read as Arrow batches.

A schema may name one column more than the journal has, `json`: the fields of JSON payloads that it lists, as compaction
makes them (`typed`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

from smqrt.errors import ArgumentError, JournalError
from smqrt.journal import payload_schema, planning
from smqrt.journal.filters import Filter
from smqrt.journal.planning import PARQUET, Chunk
from smqrt.journal.reader import Journal
from smqrt.journal.record import COLUMNS, Flag
from smqrt.journal.remote import RemoteJournal, open_journal
from smqrt.pipeline.smq_source.options import Offsets, ReadOptions

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Schema
    from pyspark.sql.types import DataType, StructType


# ---- Arithmetic of offsets: how far a micro-batch goes, and which rows are gone. Pure functions.
#
# An offset is the next seq of every node; nodes that aren't in it start where the journal has them from.


def ordered(offset: Mapping[str, int]) -> Offsets:
    """Return the offset with its nodes in order: Spark compares offsets as text."""
    return dict(sorted(offset.items()))


def limited(start: Offsets, end: Offsets, max_rows: int) -> Offsets:
    """Return how far to go so that at most `max_rows` lie between, shared fairly by the nodes."""
    waiting = {node: max(0, seq - start.get(node, 0)) for node, seq in end.items()}
    left, reached = max_rows, dict(start)
    for turn, node in enumerate(sorted(waiting, key=waiting.__getitem__)):
        share = min(waiting[node], -(-left // (len(waiting) - turn)))
        reached[node] = start.get(node, 0) + share
        left -= share
    return reached


def spans(start: Offsets, end: Offsets) -> dict[str, tuple[int, int]]:
    """Return, for each node that has rows between, the first and the one behind the last."""
    return {node: (start.get(node, 0), seq) for node, seq in end.items() if seq > start.get(node, 0)}


def distance(start: Offsets, end: Offsets) -> int:
    """Return how many rows lie between."""
    return sum(behind - first for first, behind in spans(start, end).values())


def before_split(start: Offsets, end: Offsets, split: Offsets) -> Offsets:
    """Return `end`, or less where a batch from `start` would have rows on both sides of `split`.

    Nodes that `split` doesn't name weren't there when it was made: all their rows come after it.
    """
    if all(start.get(node, 0) >= seq for node, seq in split.items()):
        return end
    return {node: min(seq, max(split.get(node, 0), start.get(node, 0))) for node, seq in end.items()}


def filled(start: Offsets, begin: Offsets) -> Offsets:
    """Return `start` with the nodes it doesn't know, from where the journal has them."""
    return begin | start


def removed(start: Offsets, end: Offsets, begin: Offsets) -> str | None:
    """Say which rows between two offsets come before `begin`, in a sentence; None when all are there."""
    for node, first in ordered(start).items():
        until = end.get(node, first)
        if first < until and first < (kept := begin.get(node, until)):
            return f"Rows {first} to {min(kept, until) - 1} of node {node} are gone (retention has removed them)"
    return None


def ahead(seen: Offsets, last: Offsets) -> str | None:
    """Say in a sentence that `seen` is further than the journal goes; None when it isn't."""
    for node, seq in ordered(seen).items():
        if seq > (there := last.get(node, 0)):
            return f"Node {node} ends at row {there}, but rows to {seq} had been there: the journal was replaced or cut"
    return None


def refused(what: str) -> JournalError:
    """Return the error for rows that are gone."""
    return JournalError(
        f"{what}. Set failOnDataLoss=false (of @source: fail_on_data_loss=False) to go on with what is there, or take "
        "a new checkpoint."
    )


def checked(start: Offsets, end: Offsets, begin: Offsets, last: Offsets, fail: bool) -> tuple[Offsets, Offsets]:
    """Return the range of rows to read, which the journal has.

    Args:
        start, end: the rows wanted.
        begin, last: the rows there are.
        fail: whether missing rows are an error.

    Returns:
        The range; without `fail` it begins and ends where there are rows.

    Raises:
        JournalError: rows are missing and `fail` is set.
    """
    start = filled(start, begin)
    what = removed(start, end, begin) or ahead(end, last)
    if what and fail:
        raise refused(what)
    if what:
        start = {node: max(seq, begin.get(node, seq)) for node, seq in start.items()}
        end = {node: min(seq, last.get(node, 0)) for node, seq in end.items()}
    return start, end


MOST_BYTES = 32 << 20
"""A batch never has more, unless a single row does: it must fit into the JVM's memory several times."""


def merged(batches: Iterable[RecordBatch], rows: int) -> Iterator[RecordBatch]:
    """Yield the same rows in fewer pyarrow.RecordBatches.

    Args:
        batches: pyarrow.RecordBatches of one schema, of any size.
        rows: small ones are joined until there are so many rows (or 32 MiB).
    """
    waiting: list[RecordBatch] = []
    waiting_rows = waiting_bytes = 0
    for batch in batches:
        waiting.append(batch)
        waiting_rows += batch.num_rows
        waiting_bytes += batch.nbytes
        if waiting_rows >= rows or waiting_bytes >= MOST_BYTES:
            yield from joined(waiting)
            waiting, waiting_rows, waiting_bytes = [], 0, 0
    yield from joined(waiting)


def joined(batches: list[RecordBatch]) -> Iterator[RecordBatch]:
    """Yield the rows of all batches as one, or as several where one would be too large."""
    import pyarrow as pa

    if len(batches) > 1:
        batches = pa.Table.from_batches(batches).combine_chunks().to_batches()
    for batch in batches:
        if batch.num_rows:
            yield from cut(batch)


def cut(batch: RecordBatch) -> Iterator[RecordBatch]:
    """Yield a batch in pieces of about 32 MiB."""
    pieces = min(batch.num_rows, -(-batch.nbytes // MOST_BYTES)) or 1
    step = -(-batch.num_rows // pieces)
    for first in range(0, batch.num_rows, step):
        yield batch.slice(first, step)


TYPES = {column.name: column.type.lower() for column in COLUMNS}
NULLABLE = {column.name for column in COLUMNS if column.nullable}


def check_schema(schema: StructType) -> list[str]:
    """Return the journal's names of a schema's columns.

    Args:
        schema: what the user gave to `.schema()`, or all columns.

    Returns:
        The names, in the schema's order.

    Raises:
        ArgumentError: a column isn't in the journal, or has another type there.
    """
    for field in schema.fields:
        if field.name == payload_schema.JSON_COLUMN:
            _struct(field.dataType)
            continue
        here = field.dataType.simpleString()
        if (there := TYPES.get(field.name)) is None:
            raise ArgumentError(f'The journal has no column "{field.name}". It has: {", ".join(TYPES)}.')
        if here != there:
            raise ArgumentError(
                f"The journal's column {field.name} is {there}, not {here}: read it as it is, then cast it."
            )
        if not field.nullable and field.name in NULLABLE:
            raise ArgumentError(f"The journal's column {field.name} may be null: leave out NOT NULL.")
    return schema.fieldNames()


def json_ddl(schema: StructType) -> str | None:
    """Return which fields of payloads the column `json` of a schema has; None when it has no such column.

    Raises:
        ArgumentError: a field is of a type that JSON has not.
    """
    found = [field.dataType for field in schema.fields if field.name == payload_schema.JSON_COLUMN]
    return _struct(found[0]).ddl() if found else None


def _struct(kind: DataType) -> payload_schema.StructType:
    found = _kind(kind)
    if not isinstance(found, payload_schema.StructType):
        raise ArgumentError(
            f"The column {payload_schema.JSON_COLUMN} is {kind.simpleString()}; it's a struct such as "
            "json struct<temp: double>."
        )
    return payload_schema.parse_ddl(found.ddl())


def _kind(kind: DataType) -> payload_schema.PayloadType:
    from pyspark.sql.types import ArrayType, StructType

    if isinstance(kind, StructType):
        return payload_schema.StructType(tuple((field.name, _kind(field.dataType)) for field in kind.fields))
    return (
        payload_schema.ArrayType(_kind(kind.elementType))
        if isinstance(kind, ArrayType)
        else payload_schema.ScalarType(kind.simpleString())
    )


def arrow_schema(schema: StructType) -> Schema:
    """Return the pyarrow.Schema that Spark compares every batch with."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone="UTC")


def shaped(batch: RecordBatch, target: Schema) -> RecordBatch:
    """Return the columns of a pyarrow.RecordBatch that `target` (a pyarrow.Schema) names, as it declares them."""
    import pyarrow as pa

    columns = [batch.column(field.name) for field in target]
    columns = [one if one.type.equals(to.type) else one.cast(to.type) for one, to in zip(columns, target, strict=True)]
    if not columns:
        return batch.select([])
    return pa.RecordBatch.from_arrays(columns, schema=target)


def needed_columns(names: Sequence[str], *more: str) -> list[str]:
    """Return the columns to read, in the journal's order: those of the result and those that filters look at."""
    return [name for name in TYPES if name in names or name in more]


PARQUET_GROWS = 3
"""A compacted file is about a third of what its rows are in memory (zstd, payloads of JSON)."""
TASK_ROWS, TASK_BYTES = 1 << 15, 8 << 20
"""Less than this isn't worth a task of its own: to start one costs as much as to read it."""
_LEAST_TASK_BYTES = 1 << 20

Chunks = Sequence[Chunk]
Plan = Callable[[Offsets, Offsets], Chunks]


def row_count(chunks: Chunks) -> int:
    """Return how many rows the chunks have."""
    return sum(chunk.rows for chunk in chunks)


def memory_bytes(chunks: Chunks) -> int:
    """Return about how many bytes the rows of chunks are as Arrow batches."""
    return sum(map(_bytes, chunks))


def _bytes(chunk: Chunk) -> int:
    if chunk.kind == PARQUET:
        return chunk.share_bytes * PARQUET_GROWS
    return chunk.length * chunk.rows // ((chunk.skip + chunk.rows) or 1)


def limited_to_bytes(plan: Plan, start: Offsets, end: Offsets, max_bytes: int) -> tuple[Offsets, Chunks]:
    """Return how far to go so that about `max_bytes` lie between, and what to read then.

    A single row goes, however large it is.

    Args:
        plan: gives the chunks between two offsets.
        start, end: the rows there are.
        max_bytes: the limit.
    """
    while True:
        chunks = plan(start, end)
        count, size_bytes = distance(start, end), memory_bytes(chunks)
        if size_bytes <= max_bytes or count <= 1:
            return end, chunks
        end = start | limited(start, end, max(1, min(count - 1, count * max_bytes // size_bytes)))


def rows_per_task(options: ReadOptions, chunks: Chunks) -> int:
    """Return the most rows of a task, so that all cores have work and no task has too much.

    Args:
        options: minPartitions, rowsPerPartition, bytesPerPartition and parallelism.
        chunks: what is to be read.
    """
    count, size_bytes = row_count(chunks), memory_bytes(chunks)
    worth = min(options.parallelism, max(count // TASK_ROWS, size_bytes // TASK_BYTES))
    tasks = max(1, worth, options.min_partitions, -(-size_bytes // _task_bytes(options)))
    return max(1, min(options.rows_per_partition, -(-count // tasks)))


def _task_bytes(options: ReadOptions) -> int:
    """Return the most bytes of a task: those that work at the same time have no more than a micro-batch may have."""
    if options.max_bytes is None:
        return options.bytes_per_partition
    return min(options.bytes_per_partition, max(_LEAST_TASK_BYTES, options.max_bytes // options.parallelism))


_ALL_ROWS = 1 << 62


class ScanPartition(InputPartition):
    """What one task of Spark reads.

    Args:
        chunks: pieces of files, in the order of their rows.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        super().__init__(None)
        self.chunks = list(chunks)


@lru_cache(maxsize=4)
def open_cached_journal(
    location: str, token: str | None, cafile: str | None, retry_s: float, verify: bool = True
) -> Journal | RemoteJournal:
    """Return the journal: one object for each process, so that connections are used again.

    Args:
        location, token, cafile, retry_s: as for `open_journal`.
        verify: compare checksums; they are over all columns, so that this reads what a query may not need.
    """
    journal = open_journal(location, token, cafile=cafile, retry_s=retry_s)
    journal.verify = verify
    return journal


@dataclass(frozen=True)
class Scan:
    """What to read, without the ranges: it's sent to the workers.

    Attributes:
        options: of the read.
        schema: of the result, as Spark gave it.
        topics: exact names that Spark's filters leave, or None.
        ts_us: first and last microsecond that Spark's filters leave, or None.
    """

    options: ReadOptions
    schema: StructType
    topics: frozenset[str] | None = None
    ts_us: tuple[int, int] | None = None

    @property
    def journal(self) -> Journal | RemoteJournal:
        options, verify = self.options, not {"payload", payload_schema.JSON_COLUMN}.isdisjoint(self.schema.fieldNames())
        return open_cached_journal(options.journal, options.token, options.cafile, options.retry_s, verify)

    @property
    def filter(self) -> Filter | None:
        """What skips whole files: the names that Spark's filters leave, where they can be told from wildcards."""
        if self.topics and not any({"+", "#"} & set(name) for name in self.topics):
            return Filter(sorted(self.topics))
        return self.options.filter()

    def plan(self, start: Offsets, end: Offsets) -> list[Chunk]:
        """Return the pieces of files that have the rows from `start` up to, without, `end`."""
        if self.topics is not None and not self.topics:
            return []
        plan = self.journal.plan(start, end, max_rows=_ALL_ROWS, ts_us=self.ts_us, topics=self.filter)
        return [chunk for chunks in plan for chunk in chunks]

    def parts(self, chunks: Sequence[Chunk]) -> list[ScanPartition]:
        """Return the tasks that read these chunks."""
        return [ScanPartition(some) for some in planning.parts(chunks, rows_per_task(self.options, chunks))]

    def read(self, part: InputPartition) -> Iterator[RecordBatch]:
        """Yield the rows of a task as pyarrow.RecordBatches of Spark's schema."""
        if not isinstance(part, ScanPartition):
            return
        target = arrow_schema(self.schema)
        names = needed_columns(self.schema.fieldNames(), *self._looked_at())
        journal, wanted, rows = self.journal, self.filter, self.options.batch_rows
        batches = (batch for chunk in part.chunks for batch in journal.tables(chunk, names, wanted, rows))
        fields = json_ddl(self.schema)
        parser = payload_schema.TypedColumn({"#": fields}) if fields else None
        for batch in merged(batches, rows):
            if (kept := self._kept(batch)).num_rows:
                yield shaped(_with_json(kept, parser) if parser else kept, target)

    def _looked_at(self) -> Iterator[str]:
        """Yield the columns that reading itself needs."""
        if payload_schema.JSON_COLUMN in self.schema.fieldNames():
            yield from ("topic", "payload")
        if self.ts_us:
            yield "ts"
        if self.topics is not None:
            yield "topic"
        if not self.options.include_pipeline:
            yield "flags"

    def _kept(self, batch: RecordBatch) -> RecordBatch:
        """Return the rows that every filter leaves."""
        import pyarrow as pa
        import pyarrow.compute as pc

        masks = []
        if self.ts_us:
            ts = batch.column("ts").cast(pa.int64())
            masks += [pc.greater_equal(ts, self.ts_us[0]), pc.less_equal(ts, self.ts_us[1])]
        if self.topics is not None:
            masks.append(pc.is_in(batch.column("topic"), pa.array(sorted(self.topics), pa.string())))
        if not self.options.include_pipeline:
            masks.append(pc.equal(pc.bit_wise_and(batch.column("flags"), int(Flag.PIPELINE)), 0))
        for mask in masks[1:]:
            masks[0] = pc.and_(masks[0], mask)
        return batch.filter(masks[0]) if masks else batch


def _with_json(batch: RecordBatch, parser: payload_schema.TypedColumn) -> RecordBatch:
    return batch.append_column(parser.field, parser.column(batch.column("topic"), batch.column("payload")))
