"""A range of a journal as one file for other tools: Parquet, Arrow, CSV or JSON lines."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from smqrt.errors import ArgumentError, JournalError
from smqrt.journal import tables
from smqrt.journal.files import touch
from smqrt.journal.inspect import as_fields, in_order
from smqrt.journal.reader import Journal, Offsets
from smqrt.journal.record import COLUMNS

OnRows = Callable[[int], None]
"""Hears how many rows more were done."""
_GROUP_ROWS = 1 << 16
_TELL_ROWS = 1024
NEEDS_PYARROW = "{what} needs pyarrow, which is not installed: pip install 'smqrt[spark]'"


def export(
    journal: Journal,
    start: Offsets,
    end: Offsets,
    to: Path,
    topics: Sequence[str] | None = None,
    on_rows: OnRows = lambda count: None,
) -> int:
    """Write rows to a file; its ending says how. The file is there when it is complete, not earlier.

    Args:
        journal: where the rows are.
        start, end: from where to where (exclusive), by node.
        to: a file that ends in .parquet, .arrow, .csv or .jsonl.
        topics: patterns of the topics to take; None for everything, also messages to one client.
        on_rows: hears how many rows more were written, now and then.

    Returns:
        How many rows it has.

    Raises:
        ArgumentError: the ending is another one.
        JournalError: pyarrow is missing, or the file can't be written.
    """
    write = _WRITERS.get(to.suffix)
    if write is None:
        raise ArgumentError(f"{to} must end in one of {', '.join(_WRITERS)}: the ending says what is written")
    beside = to.with_name(f".{to.name}.{os.getpid()}")
    try:
        touch(beside)
        rows = write(journal, start, end, beside, topics, on_rows)
        os.replace(beside, to)
    except ImportError:
        raise JournalError(NEEDS_PYARROW.format(what=f"A {to.suffix} file")) from None
    except OSError as error:
        raise JournalError(f"{to} can't be written: {error.strerror or error}.") from None
    finally:
        beside.unlink(missing_ok=True)
    return rows


def _jsonl(
    journal: Journal, start: Offsets, end: Offsets, to: Path, topics: Sequence[str] | None, on_rows: OnRows
) -> int:
    rows = 0
    with to.open("w", encoding="utf-8") as file:
        for recorded in in_order(journal, start, end, topics):
            file.write(json.dumps(as_fields(recorded), ensure_ascii=False) + "\n")
            rows += 1
            if rows % _TELL_ROWS == 0:
                on_rows(_TELL_ROWS)
    return rows


def _csv(
    journal: Journal, start: Offsets, end: Offsets, to: Path, topics: Sequence[str] | None, on_rows: OnRows
) -> int:
    names = [column.name for column in COLUMNS if column.name != "broker"]
    rows = 0
    with to.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*names, "payload_hex"])
        writer.writeheader()
        for recorded in in_order(journal, start, end, topics):
            writer.writerow(as_fields(recorded) | {"flags": recorded.row.flags})
            rows += 1
            if rows % _TELL_ROWS == 0:
                on_rows(_TELL_ROWS)
    return rows


def _parquet(
    journal: Journal, start: Offsets, end: Offsets, to: Path, topics: Sequence[str] | None, on_rows: OnRows
) -> int:
    from pyarrow import parquet

    def opened(schema: Any) -> Any:
        return parquet.ParquetWriter(to, schema, compression="zstd")

    return _tables(journal, start, end, topics, opened, on_rows)


def _arrow(
    journal: Journal, start: Offsets, end: Offsets, to: Path, topics: Sequence[str] | None, on_rows: OnRows
) -> int:
    from pyarrow import ipc

    return _tables(journal, start, end, topics, lambda schema: ipc.new_file(to, schema), on_rows)


def _tables(
    journal: Journal,
    start: Offsets,
    end: Offsets,
    topics: Sequence[str] | None,
    opened: Callable[[Any], Any],
    on_rows: OnRows,
) -> int:
    """Writes record batches, merged into larger ones, into what `opened` makes of their schema."""
    import pyarrow

    schema = tables.schema()
    rows = 0
    with opened(schema) as writer:
        for batches in _grouped(_batches(journal, start, end, topics)):
            writer.write_table(pyarrow.Table.from_batches(batches, schema).combine_chunks())
            count = sum(batch.num_rows for batch in batches)
            on_rows(count)
            rows += count
    return rows


def _batches(journal: Journal, start: Offsets, end: Offsets, topics: Sequence[str] | None) -> Iterator[Any]:
    for chunks in journal.plan(start, end, topics=topics):
        for chunk in chunks:
            yield from journal.tables(chunk, topics=topics)


def _grouped(batches: Iterator[Any]) -> Iterator[list[Any]]:
    group: list[Any] = []
    rows = 0
    for batch in batches:
        group.append(batch)
        rows += batch.num_rows
        if rows >= _GROUP_ROWS:
            yield group
            group, rows = [], 0
    if group:
        yield group


_WRITERS: dict[str, Callable[[Journal, Offsets, Offsets, Path, Sequence[str] | None, OnRows], int]] = {
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".csv": _csv,
    ".jsonl": _jsonl,
}
