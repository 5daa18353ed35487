"""Rows as pyarrow.RecordBatches with Spark's types, from segments and Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from smqrt.journal import arrow
from smqrt.journal.columns import gatherer
from smqrt.journal.files import check_footer
from smqrt.journal.planning import Chunk, Filter
from smqrt.journal.record import COLUMNS, SEGMENT_COLUMNS

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import parquet

NAMES = tuple(one.name for one in COLUMNS)
MAX_BYTES = 32 << 20
"""Maximum size of segment data that is joined to one batch, bytes, unless a row is longer."""


def schema(columns: Sequence[str] | None = None) -> pa.Schema:
    """Return the pyarrow.Schema of the journal's columns.

    Args:
        columns: the wanted names, in this order; None for all.
    """
    import pyarrow as pa

    types = {
        "STRING": pa.string(),
        "BIGINT": pa.int64(),
        "INT": pa.int32(),
        "BOOLEAN": pa.bool_(),
        "BINARY": pa.binary(),
        "TIMESTAMP": pa.timestamp("us", "UTC"),
    }
    known = {one.name: pa.field(one.name, types[one.type], one.nullable) for one in COLUMNS}
    return pa.schema([known[name] for name in (NAMES if columns is None else columns)])


def of_segment(
    stream: memoryview,
    chunk: Chunk,
    broker: str,
    skip: int,
    columns: Sequence[str] | None,
    topics: Filter | None,
    batch_rows: int,
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield (number after the last row, RecordBatch) of a chunk of a segment.

    Args:
        stream: a schema and the batches with the chunk's rows.
        chunk: the wanted rows.
        broker: the name of the broker that wrote them.
        skip: number of rows in the stream before the wanted rows.
        columns: names; None for all.
        topics: topics of the wanted rows; None for all rows, also those without a topic.
        batch_rows: small batches are joined until they have this many rows, or `MAX_BYTES`.

    Raises:
        pyarrow.ArrowException, OSError: a batch is damaged.
    """
    import pyarrow as pa

    target = schema(columns)
    constant = {"node": chunk.node, "broker": broker}  # the same for all rows of a segment
    names = {*target.names, *(["topic"] if topics is not None else []), "seq"}
    stored = schema([column.name for column in SEGMENT_COLUMNS if column.name in names])
    # With long rows a batch has fewer of them, so that it has `MAX_BYTES` at most.
    step = max(1, min(batch_rows, chunk.rows * MAX_BYTES // (len(stream) or 1)))
    data = stream[arrow.message_size(stream[:8]) :]
    layout, read = arrow.layout_of(data), chunk.start
    kernel = gatherer(layout)
    batches = kernel.batches(data, stored, step) if kernel else _streamed(stream, layout, stored, step)
    for batch in batches:
        if skip or batch.num_rows > chunk.end - read:
            batch = batch.slice(skip, chunk.end - read)
        read, skip = read + batch.num_rows, 0
        if topics is not None:
            batch = batch.filter(mask(batch.column("topic"), topics))
        arrays = [
            pa.repeat(pa.scalar(constant[field.name], pa.string()), batch.num_rows)
            if field.name in constant
            else batch.column(field.name)
            for field in target
        ]
        yield read, pa.RecordBatch.from_arrays(arrays, schema=target)


def _streamed(stream: Any, layout: arrow.BatchLayout, stored: Any, step: int) -> Iterator[Any]:
    """Yield the same as `columns.Gatherer.batches`, with pyarrow only."""
    import pyarrow as pa

    fields = [at for at, column in enumerate(layout.columns) if column.name in stored.names]
    options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
    waiting, rows = list[Any](), 0
    for batch in pa.ipc.open_stream(pa.py_buffer(stream), options=options):
        waiting.append(batch)
        rows += batch.num_rows
        if rows >= step:
            yield _joined(waiting, stored)
            waiting, rows = [], 0
    if waiting:
        yield _joined(waiting, stored)


def _joined(batches: list[Any], stored: Any) -> Any:
    import pyarrow as pa

    table = pa.Table.from_batches(batches)
    columns = {name: _combined(table.column(name)) for name in table.column_names}
    return with_columns(columns, len(table), stored)


def with_columns(columns: Mapping[str, Any], rows: int, target: pa.Schema) -> pa.RecordBatch:
    """Return a pyarrow.RecordBatch; columns that are missing, because the rows are older than them, are null.

    Args:
        columns: pyarrow.Arrays by name.
        rows: their number of values.
        target: the pyarrow.Schema of the result.
    """
    import pyarrow as pa

    found = [columns[field.name] if field.name in columns else pa.nulls(rows, field.type) for field in target]
    return pa.RecordBatch.from_arrays(found, schema=target)


def _combined(column: Any) -> Any:
    found = column.combine_chunks()
    return found.chunk(0) if hasattr(found, "chunk") else found


def of_parquet(
    source: IO[bytes], chunk: Chunk, columns: Sequence[str] | None, topics: Filter | None, batch_rows: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the same as `of_segment`, from a Parquet file.

    Args:
        source: a file object that can seek.

    Raises:
        pyarrow.ArrowException, ValueError, OSError: the file is damaged.
    """
    import pyarrow as pa
    from pyarrow import compute

    target = schema(columns)
    # Text columns stay dictionaries until the rows are in order, so that sorting moves numbers, not text.
    file = parquet_file(source, chunk, [field.name for field in target if pa.types.is_string(field.type)])
    wanted_names = dict.fromkeys([*target.names, "seq", *(["topic"] if topics is not None else [])])
    names = [name for name in wanted_names if name in file.schema_arrow.names]  # older files lack columns
    for group in groups(file.metadata, chunk):
        if topics is not None:  # reads only the topic column, to skip groups without these topics
            chosen = mask(file.read_row_group(group, ["topic"]).column("topic"), topics)
            if compute.any(chosen).as_py() is not True:
                continue
        rows = in_order(file.read_row_group(group, names), topics)
        seq = rows.column("seq")
        if len(seq) and (seq[0].as_py() < chunk.start or seq[-1].as_py() >= chunk.end):
            wanted = compute.and_(compute.greater_equal(seq, chunk.start), compute.less(seq, chunk.end))
            rows = rows.filter(wanted)
        for batch in rows.to_batches(batch_rows):
            found = {name: batch.column(name) for name in names}
            plain = {
                name: one.dictionary_decode() if hasattr(one, "dictionary_decode") else one
                for name, one in found.items()
            }
            yield batch.column("seq")[-1].as_py() + 1, with_columns(plain, batch.num_rows, target)


def parquet_file(source: IO[bytes], chunk: Chunk, as_dictionaries: Sequence[str] = ()) -> parquet.ParquetFile:
    """Return the pyarrow.parquet.ParquetFile of a chunk. Its footer is checked now, its pages when they are read.

    Args:
        source: a file object that can seek.
        chunk: of a Parquet file.
        as_dictionaries: text columns that are read as dictionaries.

    Raises:
        pyarrow.ArrowException, ValueError, OSError: the file is damaged.
    """
    from pyarrow import parquet

    check_footer(source, chunk.footer_crc32)
    metadata = parquet.read_metadata(source)
    columns = [name for name in as_dictionaries if name in metadata.schema.names]  # older files lack some
    options = {"pre_buffer": True, "page_checksum_verification": True}
    return parquet.ParquetFile(source, metadata=metadata, read_dictionary=columns, **options)


def in_order(rows: pa.Table, topics: Filter | None = None) -> pa.Table:
    """Return the rows of a row group, a pyarrow.Table, sorted by number: merged files sort each group by topic.

    Args:
        rows: all rows of the group.
        topics: rows with other topics are left out.

    Raises:
        pyarrow.ArrowInvalid: numbers are missing.
    """
    import pyarrow as pa
    from pyarrow import compute

    seq = rows.column("seq").combine_chunks()
    numbers, steps = compute.min_max(seq), compute.subtract(seq.slice(1), seq.slice(0, max(0, len(seq) - 1)))
    if numbers["max"].as_py() - numbers["min"].as_py() + 1 != len(seq):
        raise pa.ArrowInvalid(f"the {len(seq)} rows from {numbers['min']} on are not numbered consecutively")
    if topics is not None:
        rows = rows.filter(mask(rows.column("topic"), topics))
    if len(steps) and compute.min(steps).as_py() < 1:
        rows = rows.take(compute.sort_indices(rows.column("seq")))
    return rows.combine_chunks()


def groups(metadata: parquet.FileMetaData, chunk: Chunk) -> Iterator[int]:
    """Yield the row groups that have numbers of the chunk."""
    names = [metadata.schema.column(at).path for at in range(metadata.num_columns)]
    at = names.index("seq")
    for group in range(metadata.num_row_groups):
        numbers = metadata.row_group(group).column(at).statistics
        if numbers is None or not numbers.has_min_max:
            raise ValueError("a row group has no statistics of its numbers")
        if numbers.min < chunk.end and numbers.max >= chunk.start:
            yield group


def mask(column: pa.Array, topics: Filter) -> pa.BooleanArray:
    """Return for each value of a topic column whether it matches a filter; the result has no null.

    Args:
        column: topic names; may be a pyarrow.ChunkedArray.
        topics: the filter.
    """
    import pyarrow as pa
    from pyarrow import compute

    if pa.types.is_dictionary(column.type):  # compares each name once
        single = _combined(column) if isinstance(column, pa.ChunkedArray) else column
        return compute.fill_null(mask(single.dictionary, topics).take(single.indices), False)
    names = topics.literal()
    if names is not None:
        return compute.is_in(column, pa.array(names, pa.string()))
    found = compute.match_substring_regex(column, f"(?s)^(?:{topics.regex()})$")
    if topics.exclude:
        found = compute.and_not(found, compute.match_substring_regex(column, f"(?s)^(?:{topics.exclude_regex()})$"))
    return compute.fill_null(found, False)
