"""Arrow batches of a good size: the hub writes one every few milliseconds, and each costs Spark the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

MOST_BYTES = 32 << 20
"""A batch never has more, unless a single row does: it must fit into the JVM's memory several times."""


def merged(batches: Iterable[Any], rows: int) -> Iterator[Any]:
    """Yields the same rows in fewer pyarrow.RecordBatches.

    Args:
        batches: pyarrow.RecordBatches of one schema, of any size.
        rows: small ones are joined until there are so many rows (or 32 MiB).
    """
    waiting: list[Any] = []
    waiting_rows = waiting_bytes = 0
    for batch in batches:
        waiting.append(batch)
        waiting_rows += batch.num_rows
        waiting_bytes += batch.nbytes
        if waiting_rows >= rows or waiting_bytes >= MOST_BYTES:
            yield from joined(waiting)
            waiting, waiting_rows, waiting_bytes = [], 0, 0
    yield from joined(waiting)


def joined(batches: list[Any]) -> Iterator[Any]:
    """Yields the rows of all batches as one, or as several where one would be too large."""
    import pyarrow as pa

    if len(batches) > 1:
        batches = pa.Table.from_batches(batches).combine_chunks().to_batches()
    for batch in batches:
        if batch.num_rows:
            yield from cut(batch)


def cut(batch: Any) -> Iterator[Any]:
    """Yields a batch in pieces of about 32 MiB."""
    pieces = min(batch.num_rows, -(-batch.nbytes // MOST_BYTES)) or 1
    step = -(-batch.num_rows // pieces)
    for first in range(0, batch.num_rows, step):
        yield batch.slice(first, step)
