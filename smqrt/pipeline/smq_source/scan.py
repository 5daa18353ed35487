"""Scans of a journal: ranges are planned as tasks, which workers read as Arrow batches.

A schema may have one column beside those of the journal, `json`: a struct of fields of JSON payloads, in the format of
compaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

from smqrt.errors import ArgumentError, JournalError
from smqrt.journal import payload_schema, planning
from smqrt.journal.planning import PARQUET, Chunk, Filter
from smqrt.journal.reader import Journal
from smqrt.journal.record import COLUMNS, Flag
from smqrt.journal.remote import RemoteJournal, open_journal
from smqrt.pipeline.smq_source.options import Offsets, ReadOptions

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Schema
    from pyspark.sql.types import DataType, StructType


# ---- Arithmetic of offsets: the end of a micro-batch, and missing rows. Pure functions.
#
# An offset is the next seq of every node; missing nodes start at the beginning of the journal.


def ordered(offset: Mapping[str, int]) -> Offsets:
    """Return the offset with sorted nodes, since Spark compares offsets as text."""
    return dict(sorted(offset.items()))


def limited(start: Offsets, end: Offsets, max_rows: int) -> Offsets:
    """Return an end so that at most `max_rows` are between, with equal shares of the nodes."""
    waiting = {node: max(0, seq - start.get(node, 0)) for node, seq in end.items()}
    left, reached = max_rows, dict(start)
    # Nodes with few rows come first, so that the others share the rows that these leave.
    for turn, node in enumerate(sorted(waiting, key=waiting.__getitem__)):
        share = min(waiting[node], -(-left // (len(waiting) - turn)))
        reached[node] = start.get(node, 0) + share
        left -= share
    return reached


def spans(start: Offsets, end: Offsets) -> dict[str, tuple[int, int]]:
    """Return, for each node with rows between, the first row and the row after the last."""
    return {node: (start.get(node, 0), seq) for node, seq in end.items() if seq > start.get(node, 0)}


def distance(start: Offsets, end: Offsets) -> int:
    """Return the number of rows between two offsets."""
    return sum(behind - first for first, behind in spans(start, end).values())


def before_split(start: Offsets, end: Offsets, split: Offsets) -> Offsets:
    """Return `end`, or an earlier end if a batch from `start` would have rows on both sides of `split`.

    Nodes that are missing in `split` are newer: all their rows come after it.
    """
    if all(start.get(node, 0) >= seq for node, seq in split.items()):
        return end
    return {node: min(seq, max(split.get(node, 0), start.get(node, 0))) for node, seq in end.items()}


def filled(start: Offsets, begin: Offsets) -> Offsets:
    """Return `start` with its missing nodes, from the beginning of the journal."""
    return begin | start


def removed(start: Offsets, end: Offsets, begin: Offsets) -> str | None:
    """Return a sentence about rows between two offsets that are before `begin`; None when all exist."""
    for node, first in ordered(start).items():
        until = end.get(node, first)
        if first < until and first < (kept := begin.get(node, until)):
            return f"Rows {first} to {min(kept, until) - 1} of node {node} are gone (retention has removed them)"
    return None


def ahead(seen: Offsets, last: Offsets) -> str | None:
    """Return a sentence when `seen` is after the end of the journal, else None."""
    for node, seq in ordered(seen).items():
        if seq > (there := last.get(node, 0)):
            return f"Node {node} ends at row {there}, but had rows up to {seq}: the journal was replaced or truncated"
    return None


def refused(problem: str) -> JournalError:
    """Return the error for missing rows."""
    return JournalError(
        f"{problem}. Set failOnDataLoss=false (of @source: fail_on_data_loss=False) to continue with the existing "
        "rows, or use a new checkpoint."
    )


def checked(start: Offsets, end: Offsets, begin: Offsets, last: Offsets, fail: bool) -> tuple[Offsets, Offsets]:
    """Return the range of rows to read, which all exist.

    Args:
        start, end: the wanted rows.
        begin, last: the existing rows.
        fail: whether missing rows are an error.

    Returns:
        The range; without `fail` it is restricted to existing rows.

    Raises:
        JournalError: rows are missing and `fail` is set.
    """
    start = filled(start, begin)
    problem = removed(start, end, begin) or ahead(end, last)
    if problem and fail:
        raise refused(problem)
    if problem:
        start = {node: max(seq, begin.get(node, seq)) for node, seq in start.items()}
        end = {node: min(seq, last.get(node, 0)) for node, seq in end.items()}
    return start, end


MAX_BATCH_BYTES = 32 << 20
"""The maximum size of a batch, except for a single larger row: the JVM needs several times this memory."""


def merged(batches: Iterable[RecordBatch], rows: int) -> Iterator[RecordBatch]:
    """Yield the same rows in fewer batches.

    Args:
        batches: pyarrow.RecordBatches of one schema, of any size.
        rows: small batches are joined until they have this many rows (or 32 MiB).
    """
    waiting: list[RecordBatch] = []
    waiting_rows = waiting_bytes = 0
    for batch in batches:
        waiting.append(batch)
        waiting_rows += batch.num_rows
        waiting_bytes += batch.nbytes
        if waiting_rows >= rows or waiting_bytes >= MAX_BATCH_BYTES:
            yield from joined(waiting)
            waiting, waiting_rows, waiting_bytes = [], 0, 0
    yield from joined(waiting)


def joined(batches: list[RecordBatch]) -> Iterator[RecordBatch]:
    """Yield the rows of all batches as one batch, or as several if one would be too large."""
    import pyarrow as pa

    if len(batches) > 1:
        batches = pa.Table.from_batches(batches).combine_chunks().to_batches()
    for batch in batches:
        if batch.num_rows:
            yield from cut(batch)


def cut(batch: RecordBatch) -> Iterator[RecordBatch]:
    """Yield a batch in pieces of about 32 MiB."""
    pieces = min(batch.num_rows, -(-batch.nbytes // MAX_BATCH_BYTES)) or 1
    step = -(-batch.num_rows // pieces)
    for first in range(0, batch.num_rows, step):
        yield batch.slice(first, step)


TYPES = {column.name: column.type.lower() for column in COLUMNS}
NULLABLE = {column.name for column in COLUMNS if column.nullable}


def check_schema(schema: StructType) -> list[str]:
    """Check the columns of a schema, and return their names.

    Args:
        schema: the argument of `.schema()`, or all columns.

    Returns:
        The names, in the schema's order.

    Raises:
        ArgumentError: a column isn't in the journal, or has another type.
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
                f"The journal's column {field.name} is {there}, not {here}: read it with that type, then cast it."
            )
        if not field.nullable and field.name in NULLABLE:
            raise ArgumentError(f"The journal's column {field.name} may be null: leave out NOT NULL.")
    return schema.fieldNames()


def json_ddl(schema: StructType) -> str | None:
    """Return the DDL of the fields in the column `json` of a schema; None without this column.

    Raises:
        ArgumentError: a field has a type that JSON does not support.
    """
    found = [field.dataType for field in schema.fields if field.name == payload_schema.JSON_COLUMN]
    return _struct(found[0]).ddl() if found else None


def _struct(kind: DataType) -> payload_schema.StructType:
    found = _kind(kind)
    if not isinstance(found, payload_schema.StructType):
        raise ArgumentError(
            f"The column {payload_schema.JSON_COLUMN} is {kind.simpleString()}; it must be a struct such as "
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
    """Return the columns of a pyarrow.RecordBatch that `target` (a pyarrow.Schema) names, with its types."""
    import pyarrow as pa

    columns = [batch.column(field.name) for field in target]
    columns = [one if one.type.equals(to.type) else one.cast(to.type) for one, to in zip(columns, target, strict=True)]
    if not columns:
        return batch.select([])  # keeps the number of rows, unlike a new batch without columns
    return pa.RecordBatch.from_arrays(columns, schema=target)


def needed_columns(names: Sequence[str], *more: str) -> list[str]:
    """Return the columns to read, in the journal's order: those of the result and those that filters need."""
    return [name for name in TYPES if name in names or name in more]


PARQUET_EXPANSION = 3
"""The rows of a compacted file take about three times its size in memory (zstd, JSON payloads)."""
TASK_ROWS, TASK_BYTES = 1 << 15, 8 << 20
"""The minimum size of a task, because its start takes as long as reading this many rows."""
_MIN_TASK_BYTES = 1 << 20

Chunks = Sequence[Chunk]
Plan = Callable[[Offsets, Offsets], Chunks]


def row_count(chunks: Chunks) -> int:
    """Return the number of rows in the chunks."""
    return sum(chunk.rows for chunk in chunks)


def memory_bytes(chunks: Chunks) -> int:
    """Return the approximate size of the rows of chunks as Arrow batches."""
    return sum(
        chunk.share_bytes * PARQUET_EXPANSION
        if chunk.kind == PARQUET
        else chunk.length * chunk.rows // ((chunk.skip + chunk.rows) or 1)  # `length` includes the skipped rows
        for chunk in chunks
    )


def limited_to_bytes(plan: Plan, start: Offsets, end: Offsets, max_bytes: int) -> tuple[Offsets, Chunks]:
    """Return an end so that about `max_bytes` are between, and the chunks to read.

    At least one row is between, of any size.

    Args:
        plan: returns the chunks between two offsets.
        start, end: the existing rows.
        max_bytes: the limit.
    """
    while True:
        chunks = plan(start, end)
        count, size_bytes = distance(start, end), memory_bytes(chunks)
        if size_bytes <= max_bytes or count <= 1:
            return end, chunks
        # At least one row less each time, since the rows of the rest may be larger on average.
        end = start | limited(start, end, max(1, min(count - 1, count * max_bytes // size_bytes)))


def rows_per_task(options: ReadOptions, chunks: Chunks) -> int:
    """Return the maximum number of rows in a task, so that all cores are used and no task is too large.

    Args:
        options: minPartitions, rowsPerPartition, bytesPerPartition and parallelism.
        chunks: the chunks to read.
    """
    count, size_bytes = row_count(chunks), memory_bytes(chunks)
    task_bytes = options.bytes_per_partition
    if options.max_bytes is not None:
        # The tasks that run at the same time need at most the memory of one micro-batch.
        task_bytes = min(task_bytes, max(_MIN_TASK_BYTES, options.max_bytes // options.parallelism))
    useful = min(options.parallelism, max(count // TASK_ROWS, size_bytes // TASK_BYTES))
    tasks = max(1, useful, options.min_partitions, -(-size_bytes // task_bytes))
    return max(1, min(options.rows_per_partition, -(-count // tasks)))


_ALL_ROWS = 1 << 62


class ScanPartition(InputPartition):
    """The input of one Spark task.

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
    """Return the journal: one object per process, so that connections are reused.

    Args:
        location, token, cafile, retry_s: as for `open_journal`.
        verify: whether to compare checksums. They cover all columns, so that unneeded columns are read too.
    """
    journal = open_journal(location, token, cafile=cafile, retry_s=retry_s)
    journal.verify = verify
    return journal


@dataclass(frozen=True)
class Scan:
    """A read without its range. Spark sends it to the workers.

    Attributes:
        options: the options of the read.
        schema: the schema of the result from Spark.
        topics: exact names that Spark's filters select; None selects all.
        ts_us: first and last microsecond that Spark's filters select; None selects all.
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
        """The filter that skips whole files: the names from Spark's filters if they are without wildcards."""
        if self.topics and not any({"+", "#"} & set(name) for name in self.topics):
            return Filter(sorted(self.topics))
        return self.options.filter()

    def plan(self, start: Offsets, end: Offsets) -> list[Chunk]:
        """Return the pieces of files with the rows from `start` up to (exclusive) `end`."""
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
        target, chosen = arrow_schema(self.schema), self.schema.fieldNames()
        # The filters and the column `json` need these columns.
        more = ["topic", "payload"] if payload_schema.JSON_COLUMN in chosen else []
        more += ["ts"] if self.ts_us else []
        more += ["topic"] if self.topics is not None else []
        more += [] if self.options.include_pipeline else ["flags"]
        names = needed_columns(chosen, *more)
        journal, wanted, rows = self.journal, self.filter, self.options.batch_rows
        batches = (batch for chunk in part.chunks for batch in journal.tables(chunk, names, wanted, rows))
        fields = json_ddl(self.schema)
        parser = payload_schema.TypedColumn({"#": fields}) if fields else None
        for batch in merged(batches, rows):
            if (kept := self._kept(batch)).num_rows:
                if parser:
                    parsed = parser.column(kept.column("topic"), kept.column("payload"))
                    kept = kept.append_column(parser.field, parsed)
                yield shaped(kept, target)

    def _kept(self, batch: RecordBatch) -> RecordBatch:
        """Return the rows that every filter selects."""
        import pyarrow as pa
        import pyarrow.compute as pc

        # The plan has skipped only whole files.
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
