"""Sizes between two offsets: the end of a range of so many bytes, and the tasks that it is cut into."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from smqrt.journal.planning import PARQUET, Chunk
from smqrt.pipeline.smq_source import offsets
from smqrt.pipeline.smq_source.options import Offsets, ReadOptions

PARQUET_GROWS = 3
"""A compacted file is about a third of what its rows are in memory (zstd, payloads of JSON)."""
TASK_ROWS, TASK_BYTES = 1 << 15, 8 << 20
"""Less than this isn't worth a task of its own: to start one costs as much as to read it."""
_LEAST_TASK_BYTES = 1 << 20

Chunks = Sequence[Chunk]
Plan = Callable[[Offsets, Offsets], Chunks]


def rows(chunks: Chunks) -> int:
    """Returns how many rows the chunks have."""
    return sum(chunk.rows for chunk in chunks)


def in_memory_bytes(chunks: Chunks) -> int:
    """Returns about how many bytes the rows of chunks are as Arrow batches."""
    return sum(map(_bytes, chunks))


def _bytes(chunk: Chunk) -> int:
    if chunk.kind == PARQUET:
        return chunk.share_bytes * PARQUET_GROWS
    return chunk.length * chunk.rows // ((chunk.skip + chunk.rows) or 1)


def within(plan: Plan, start: Offsets, end: Offsets, max_bytes: int) -> tuple[Offsets, Chunks]:
    """Returns how far to go so that about `max_bytes` lie between, and what to read then.

    A single row goes, however large it is.

    Args:
        plan: gives the chunks between two offsets.
        start, end: the rows there are.
        max_bytes: the limit.
    """
    while True:
        chunks = plan(start, end)
        count, size_bytes = offsets.distance(start, end), in_memory_bytes(chunks)
        if size_bytes <= max_bytes or count <= 1:
            return end, chunks
        end = start | offsets.limited(start, end, max(1, min(count - 1, count * max_bytes // size_bytes)))


def rows_per_task(options: ReadOptions, chunks: Chunks) -> int:
    """Returns the most rows of a task, so that all cores have work and no task has too much.

    Args:
        options: minPartitions, rowsPerPartition, bytesPerPartition and parallelism.
        chunks: what is to be read.
    """
    count, size_bytes = rows(chunks), in_memory_bytes(chunks)
    worth = min(options.parallelism, max(count // TASK_ROWS, size_bytes // TASK_BYTES))
    tasks = max(1, worth, options.min_partitions, -(-size_bytes // _task_bytes(options)))
    return max(1, min(options.rows_per_partition, -(-count // tasks)))


def _task_bytes(options: ReadOptions) -> int:
    """Returns the most bytes of a task: those that work at the same time have no more than a micro-batch may have."""
    if options.max_bytes is None:
        return options.bytes_per_partition
    return min(options.bytes_per_partition, max(_LEAST_TASK_BYTES, options.max_bytes // options.parallelism))
