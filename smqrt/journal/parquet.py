"""Compacted files that are being written: one per hour out of segments, and one per hour or day out of such files.

Row groups have at most 64Ki rows, with statistics of topic, ts and seq, so that a query for a topic, a time or a range
reads few of them. Groups follow each other by sequence number. So do the rows within a group of an hour's file; in a
merged file they are sorted by topic, which packs better and lets readers that use the page index skip most pages. A
file gets its name when it is complete.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from smqrt.errors import JournalError
from smqrt.journal import filters, tables
from smqrt.journal.files import crc32_of_file, crc32_of_footer, make_folder, touch
from smqrt.journal.manifest import MOST_TOPICS, DataFile
from smqrt.journal.record import COLUMNS
from smqrt.journal.timestamps import iso
from smqrt.journal.typed import TypedColumn

GROUP_ROWS = 1 << 16
GROUP_BYTES = 64 << 20
_HOUR_US = 3_600_000_000
_GROWING = ("seq", "ts")
_ZSTD_LEVEL = 3
_TOPIC, _PAYLOAD = ([column.name for column in COLUMNS].index(name) for name in ("topic", "payload"))

Schemas = tuple[tuple[str, str], ...]
Shred = Callable[[Path, Path], None]
"""Makes of a Parquet file (first path) another one with the same rows in the same order."""


def hour_of(ts_us: int) -> int:
    """Returns the hour since 1970 of a time in microseconds."""
    return ts_us // _HOUR_US


def folder_of(hour: int) -> str:
    """Returns the folder for an hour: `data/date=2026-11-21/hour=15`."""
    text = iso(hour * _HOUR_US)
    return f"data/date={text[:10]}/hour={text[11:13]}"


def day_folder_of(hour: int) -> str:
    """Returns the folder for files of several hours of a day; its hour is null for all who read folders as columns."""
    return f"{folder_of(hour).rpartition('/')[0]}/hour=__HIVE_DEFAULT_PARTITION__"


class CompactedFile:
    """A compacted file that is being written, under a name that nobody reads.

    Args:
        journal: the journal's folder.
        node: who recorded the rows.
        folder: where it goes, relative to the journal.
        first: the number of its first row.
        schema: of pyarrow, all columns.
        schemas: (topics, DDL) of the column `json`, when that is known.

    Raises:
        ImportError: pyarrow is missing.
        OSError: the disk is full or broken; so do the methods.
    """

    def __init__(self, journal: Path, node: str, folder: str, first: int, schema: Any, schemas: Schemas = ()) -> None:
        from pyarrow import parquet

        self._schemas, self._variant = schemas, False
        self._journal, self._node, self._folder, self._first, self._schema = journal, node, folder, first, schema
        self._path = journal / folder / f".{node}-{first:020d}.tmp"
        make_folder(self._path.parent)
        touch(self._path)
        self._writer: Any = parquet.ParquetWriter(self._path, schema, **_options(schema))
        self._waiting: list[Any] = []
        self._rows = self._written_rows = self._waiting_bytes = self._payload_bytes = 0
        self._names: set[str] = set()
        self._broker = ""
        self._ts_min_us, self._ts_max_us = 1 << 62, -(1 << 62)

    def add(self, batch: Any, broker: str) -> None:
        """Append a pyarrow batch of a segment, recorded by `broker`; its rows follow those of the one before."""
        if self._waiting and broker != self._broker:
            self._write_group()
        self._broker = broker
        self._waiting.append(batch)
        self._rows += batch.num_rows
        self._waiting_bytes += batch.nbytes
        while self._rows - self._written_rows >= GROUP_ROWS or self._waiting_bytes >= GROUP_BYTES:
            self._write_group()

    def _write_group(self) -> None:
        import pyarrow

        table = pyarrow.Table.from_batches(self._waiting).combine_chunks()
        rest = table.slice(GROUP_ROWS)
        self._waiting, self._waiting_bytes = rest.to_batches(), rest.nbytes
        group = self._completed(table.slice(0, GROUP_ROWS))
        self._measure(group)
        self._writer.write_table(group, row_group_size=GROUP_ROWS)
        self._written_rows += group.num_rows

    def _completed(self, group: Any) -> Any:
        """A group of rows as the file has them."""
        return group

    def _measure(self, group: Any) -> None:
        from pyarrow import compute

        self._payload_bytes += compute.sum(compute.binary_length(group.column("payload"))).as_py()
        times = compute.min_max(group.column("ts").cast("int64"))
        self._ts_min_us = min(self._ts_min_us, times["min"].as_py())
        self._ts_max_us = max(self._ts_max_us, times["max"].as_py())
        self._names.update(name for name in group.column("topic").unique().to_pylist() if name is not None)

    def close(self, shred: Shred | None = None) -> Unnamed:
        """Complete the file; it still has no name that anybody reads."""
        if self._waiting:
            self._write_group()
        self._writer.close()
        if shred is not None:
            beside = self._path.with_suffix(".shred")
            shred(self._path, beside)
            _check_same(beside, self._first, self._rows)
            os.replace(beside, self._path)
            self._variant = True
        synced(self._path)
        return Unnamed(self._path, self._described(), self._payload_bytes)

    def _described(self) -> DataFile:
        """What the manifest says of the complete file."""
        last = self._first + self._rows - 1
        names = tuple(sorted(self._names))
        few = len(names) <= MOST_TOPICS
        return DataFile(
            f"{self._folder}/{self._node}-{self._first:020d}-{last:020d}.parquet",
            self._node,
            self._first,
            last,
            self._rows,
            self._ts_min_us,
            self._ts_max_us,
            self._path.stat().st_size,
            names if few else None,
            None if few else filters.bloom_filter(names),
            crc32_of_file(self._path),
            crc32_of_footer(self._path),
            self._schemas,
            self._variant,
        )

    def discard(self) -> None:
        """Remove what there is of it: it won't be completed."""
        self._writer.close()
        self._path.unlink(missing_ok=True)


class HourFile(CompactedFile):
    """A file of rows of segments.

    Args:
        journal, node, first: as for `CompactedFile`.
        hour: the hour since 1970 that all rows are of.
        typed: what parses the payloads, or None.
    """

    def __init__(self, journal: Path, node: str, hour: int, first: int, typed: TypedColumn | None) -> None:
        schema = tables.schema().append(typed.field) if typed else tables.schema()
        super().__init__(journal, node, folder_of(hour), first, schema, tuple(typed.schemas.items()) if typed else ())
        self.hour, self._typed = hour, typed

    def _completed(self, group: Any) -> Any:
        """A table with all columns of the file: those that a segment has once for all its rows, and the typed one."""
        import pyarrow

        constant = {"node": self._node, "broker": self._broker}
        columns = [
            pyarrow.repeat(pyarrow.scalar(constant[column.name], pyarrow.string()), group.num_rows)
            if column.name in constant
            else group.column(column.name).combine_chunks()
            for column in COLUMNS
        ]
        if self._typed:
            columns.append(self._typed.column(columns[_TOPIC], columns[_PAYLOAD]))
        return pyarrow.Table.from_arrays(columns, schema=self._schema)


class MergedFile(CompactedFile):
    """A file of rows of others.

    Args:
        journal, node, folder, first, schema, schemas: as for `CompactedFile`.
        by_topic: sort each group by topic. Not for files that Spark writes anew: it makes groups of its own, in which
            then rows would be missing between others.
    """

    def __init__(
        self, journal: Path, node: str, folder: str, first: int, schema: Any, schemas: Schemas, by_topic: bool
    ) -> None:
        super().__init__(journal, node, folder, first, schema, schemas)
        self._by_topic = by_topic

    def _completed(self, group: Any) -> Any:
        return group.sort_by([("topic", "ascending"), ("seq", "ascending")]) if self._by_topic else group


class Unnamed(NamedTuple):
    """A complete file that has not got its name yet.

    Attributes:
        path: where it is.
        file: what the manifest will say of it.
        payload_bytes: how much payload is in it, uncompressed.
    """

    path: Path
    file: DataFile
    payload_bytes: int


def _check_same(path: Path, first: int, rows: int) -> None:
    """Raises JournalError unless a file has the rows from `first` on, in their order."""
    import pyarrow
    from pyarrow import parquet

    numbers = parquet.ParquetFile(path).read(["seq"]).column("seq").combine_chunks()
    if not numbers.equals(pyarrow.array(range(first, first + rows), pyarrow.int64())):
        raise JournalError(
            f"{path} has not the rows it was made of; nothing is changed: compact without --json variant."
        )


def synced(path: Path) -> None:
    """Has the disk keep a file's contents."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _options(schema: Any) -> dict[str, Any]:
    known = {column.name for column in COLUMNS}
    leaves = [leaf for field in schema if field.name not in known for leaf in _leaves(field.name, field.type)]
    plain = [column.name for column in COLUMNS if column.name not in (*_GROWING, "payload")]
    return {
        "compression": "zstd",
        "compression_level": _ZSTD_LEVEL,
        "use_dictionary": plain + leaves,
        "column_encoding": dict.fromkeys(_GROWING, "DELTA_BINARY_PACKED"),
        "write_statistics": [*plain, *_GROWING, *leaves],
        "write_page_index": True,
        "write_page_checksum": True,
    }


def _leaves(path: str, kind: Any) -> Iterator[str]:
    from pyarrow import types

    if types.is_struct(kind):
        for field in kind:
            yield from _leaves(f"{path}.{field.name}", field.type)
    elif types.is_list(kind):
        yield from _leaves(f"{path}.list.element", kind.value_type)
    else:
        yield path
