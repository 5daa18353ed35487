"""Compacted files: Parquet files of segments, one per hour, and merged files, of an hour or a day.

Row groups have at most 64Ki rows, with statistics of topic, ts and seq, so that a query for a topic, a time or a range
reads few of them. Groups are in order of sequence numbers. In an hour's file the rows of a group are in that order,
too. A merged file sorts each group by topic: that compresses better, and readers with the page index skip most pages. A
file gets its name when it is complete.

Merging reduces the number of files that a query opens, and the cost of each file (its footer, its entry in the
manifest). Merged files have consecutive numbers. The old files are moved to `retired/` for the grace period. A reader
that has planned to read one opens it there, and tools that read all of `data/` see each row once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from smqrt.errors import JournalError
from smqrt.journal import planning, tables
from smqrt.journal.files import age_s, crc32_of_file, crc32_of_footer, make_folder, touch
from smqrt.journal.manifest import MAX_TOPICS, DataFile
from smqrt.journal.payload_schema import TypedColumn
from smqrt.journal.planning import PARQUET, Chunk
from smqrt.journal.record import COLUMNS, iso
from smqrt.journal.segment import REMEDY

if TYPE_CHECKING:
    import pyarrow as pa

MAX_GROUP_ROWS = 1 << 16
MAX_GROUP_BYTES = 64 << 20
_HOUR_US = 3_600_000_000
_ASCENDING = ("seq", "ts")
_ZSTD_LEVEL = 3
RETIRED = "retired"
_DAY_HOURS = 24
_HOUR_GRACE = 2
"""An hour is closed when rows of a later hour are compacted, or after this many hours, when no late rows are expected.
"""
_VARIANT = "variant"
_TOPIC, _PAYLOAD = ([column.name for column in COLUMNS].index(name) for name in ("topic", "payload"))

Schemas = tuple[tuple[str, str], ...]
Shred = Callable[[Path, Path], None]
"""Writes a Parquet file (second path) with the same rows in the same order as another one (first path)."""


def hour_of(ts_us: int) -> int:
    """Return the hour since 1970 of a time in microseconds."""
    return ts_us // _HOUR_US


def folder_of(hour: int) -> str:
    """Return the folder for an hour: `data/date=2026-11-21/hour=15`."""
    text = iso(hour * _HOUR_US)
    return f"data/date={text[:10]}/hour={text[11:13]}"


def day_folder_of(hour: int) -> str:
    """Return the folder for files of several hours of a day. Tools that read names as columns get null for the hour."""
    return f"{folder_of(hour).rpartition('/')[0]}/hour=__HIVE_DEFAULT_PARTITION__"


class CompactedFile:
    """A compacted file that is being written, under a temporary name.

    Args:
        journal: the journal's folder.
        node: the node that recorded the rows.
        folder: its folder, relative to the journal.
        first: the number of its first row.
        schema: the pyarrow.Schema of all columns.
        schemas: (topics, DDL) of the column `json`, if they are known.

    Raises:
        ImportError: pyarrow is missing.
        OSError: the disk is full or broken; methods raise this, too.
    """

    def __init__(
        self, journal: Path, node: str, folder: str, first: int, schema: pa.Schema, schemas: Schemas = ()
    ) -> None:
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

    @property
    def next_seq(self) -> int:
        """The number after its last row so far."""
        return self._first + self._rows

    def add(self, batch: pa.RecordBatch, broker: str) -> None:
        """Append a batch.

        Args:
            batch: rows of a segment, which follow those of the previous batch.
            broker: the name of the broker that wrote them.
        """
        if self._waiting and broker != self._broker:  # a group has one value in the column `broker`
            self._write_group()
        self._broker = broker
        self._waiting.append(batch)
        self._rows += batch.num_rows
        self._waiting_bytes += batch.nbytes
        while self._rows - self._written_rows >= MAX_GROUP_ROWS or self._waiting_bytes >= MAX_GROUP_BYTES:
            self._write_group()

    def _write_group(self) -> None:
        import pyarrow
        from pyarrow import compute

        table = pyarrow.Table.from_batches(self._waiting).combine_chunks()
        rest = table.slice(MAX_GROUP_ROWS)
        self._waiting, self._waiting_bytes = rest.to_batches(), rest.nbytes
        group = self._file_columns(table.slice(0, MAX_GROUP_ROWS))
        self._payload_bytes += compute.sum(compute.binary_length(group.column("payload"))).as_py()
        times = compute.min_max(group.column("ts").cast("int64"))
        self._ts_min_us = min(self._ts_min_us, times["min"].as_py())
        self._ts_max_us = max(self._ts_max_us, times["max"].as_py())
        self._names.update(name for name in group.column("topic").unique().to_pylist() if name is not None)
        self._writer.write_table(group, row_group_size=MAX_GROUP_ROWS)
        self._written_rows += group.num_rows

    def _file_columns(self, group: Any) -> Any:
        """Return a group of rows with the columns and the order of the file."""
        return group

    def close(self, shred: Shred | None = None) -> FinishedFile:
        """Complete the file, which keeps its temporary name.

        Args:
            shred: writes the file again with a VARIANT column; None for none.

        Returns:
            The file and its entry for the manifest.

        Raises:
            JournalError: the file from `shred` doesn't have the same rows.
        """
        if self._waiting:
            self._write_group()
        self._writer.close()
        if shred is not None:
            beside = self._path.with_suffix(".shred")
            shred(self._path, beside)
            _check_same(beside, self._first, self._rows)
            os.replace(beside, self._path)
            self._variant = True
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        last = self._first + self._rows - 1
        names = tuple(sorted(self._names))
        few = len(names) <= MAX_TOPICS
        entry = DataFile(
            f"{self._folder}/{self._node}-{self._first:020d}-{last:020d}.parquet",
            self._node,
            self._first,
            last,
            self._rows,
            self._ts_min_us,
            self._ts_max_us,
            self._path.stat().st_size,
            names if few else None,
            None if few else planning.bloom_filter(names),
            crc32_of_file(self._path),
            crc32_of_footer(self._path),
            self._schemas,
            self._variant,
        )
        return FinishedFile(self._path, entry, self._payload_bytes)

    def discard(self) -> None:
        """Remove the incomplete file."""
        self._writer.close()
        self._path.unlink(missing_ok=True)


class HourFile(CompactedFile):
    """A compacted file with rows of segments.

    Args:
        journal, node, first: as for `CompactedFile`.
        hour: the hour since 1970 of all rows.
        typed: the parser of payloads, or None.
    """

    def __init__(self, journal: Path, node: str, hour: int, first: int, typed: TypedColumn | None) -> None:
        schema = tables.schema().append(typed.field) if typed else tables.schema()
        super().__init__(journal, node, folder_of(hour), first, schema, tuple(typed.schemas.items()) if typed else ())
        self.hour, self._typed = hour, typed

    def _file_columns(self, group: Any) -> Any:
        """Return a table with all columns: those of segments, node and broker, and the typed column."""
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
    """A compacted file with rows of other compacted files.

    Args:
        journal, node, folder, first, schema, schemas: as for `CompactedFile`.
        by_topic: sort each group by topic. False for files that Spark writes again: Spark forms other groups,
            whose numbers would then have gaps.
    """

    def __init__(
        self, journal: Path, node: str, folder: str, first: int, schema: pa.Schema, schemas: Schemas, by_topic: bool
    ) -> None:
        super().__init__(journal, node, folder, first, schema, schemas)
        self._by_topic = by_topic

    def _file_columns(self, group: Any) -> Any:
        return group.sort_by([("topic", "ascending"), ("seq", "ascending")]) if self._by_topic else group


class FinishedFile(NamedTuple):
    """A complete file that still has its temporary name.

    Attributes:
        path: the file.
        file: its entry in the manifest.
        payload_bytes: the size of its payloads, uncompressed.
    """

    path: Path
    file: DataFile
    payload_bytes: int


def _check_same(path: Path, first: int, rows: int) -> None:
    """Check that a file has the rows from `first` on, in order. Raises JournalError if not."""
    import pyarrow
    from pyarrow import parquet

    numbers = parquet.ParquetFile(path).read(["seq"]).column("seq").combine_chunks()
    if not numbers.equals(pyarrow.array(range(first, first + rows), pyarrow.int64())):
        raise JournalError(
            f"{path} doesn't have the rows of its source; nothing is changed: compact without --json variant."
        )


def _options(schema: Any) -> dict[str, Any]:
    known = {column.name for column in COLUMNS}
    leaves = [leaf for field in schema if field.name not in known for leaf in _leaves(field.name, field.type)]
    plain = [column.name for column in COLUMNS if column.name not in (*_ASCENDING, "payload")]
    return {
        "compression": "zstd",
        "compression_level": _ZSTD_LEVEL,
        "use_dictionary": plain + leaves,  # payloads and ascending numbers rarely repeat
        "column_encoding": dict.fromkeys(_ASCENDING, "DELTA_BINARY_PACKED"),
        "write_statistics": [*plain, *_ASCENDING, *leaves],
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


# ---- merging: selection


def merge_groups(
    files: Sequence[DataFile], now_us: int, max_bytes: int, fits: Callable[[DataFile, DataFile], bool]
) -> Iterator[list[DataFile]]:
    """Yield groups of consecutive files of a node, each to be merged into one.

    Args:
        files: in ascending order.
        now_us: the time, microseconds since 1970.
        max_bytes: maximum size of a group; files above half of it are not merged.
        fits: returns whether two files can be in a group.
    """
    newest_hour = _newest_closed_hour(files, now_us)
    group: list[DataFile] = []
    for file in files:
        if group:
            last, period = group[-1], _period(file, newest_hour)
            alike = period is not None and period == _period(last, newest_hour) and last.last + 1 == file.first
            small = max(last.bytes, file.bytes) <= max_bytes // 2
            if not (alike and small and sum(one.bytes for one in (*group, file)) <= max_bytes and fits(last, file)):
                if len(group) > 1:
                    yield group
                group = []
        group.append(file)
    if len(group) > 1:
        yield group


def settled_below(files: Sequence[DataFile], now_us: int) -> int | None:
    """Return the number below which no file will be merged again, once all groups are merged.

    Args:
        files: the files of a node in ascending order.
        now_us: the time, microseconds since 1970.

    Returns:
        The number; None without a file.
    """
    newest_hour = _newest_closed_hour(files, now_us)
    for file in files:
        period = _period(file, newest_hour)
        if period is None or period[0] == "hour":
            return file.first
    return files[-1].last + 1 if files else None


def _newest_closed_hour(files: Sequence[DataFile], now_us: int) -> int:
    """Return the newest closed hour since 1970."""
    newest = max((hour_of(file.ts_max_us) for file in files), default=0) - 1
    return max(newest, hour_of(now_us) - _HOUR_GRACE)


def _period(file: DataFile, newest_hour: int) -> tuple[str, int] | None:
    """Return the day or hour whose files may be merged with a file; None while its hour is not closed."""
    first, last = hour_of(file.ts_min_us), hour_of(file.ts_max_us)
    if first // _DAY_HOURS != last // _DAY_HOURS or last > newest_hour:
        return None
    if (first // _DAY_HOURS + 1) * _DAY_HOURS - 1 <= newest_hour:
        return "day", first // _DAY_HOURS
    return ("hour", first) if first == last else None


# ---- merging: writing


def merge_files(journal: Path, files: Sequence[DataFile], shred: Shred | None) -> FinishedFile:
    """Write a file with the rows of other files.

    Args:
        journal: its folder.
        files: consecutive files.
        shred: writes a VARIANT column; needed for files with one.

    Returns:
        The file with its temporary name.

    Raises:
        JournalError: a file is damaged.
        OSError: the disk is full or broken, or a file was removed.
    """
    hours = {hour_of(one) for file in files for one in (file.ts_min_us, file.ts_max_us)}
    folder = folder_of(min(hours)) if len(hours) == 1 else day_folder_of(min(hours))
    schema, schemas = full_schema(journal / files[0].path), files[0].schemas
    if any(file.schemas != schemas for file in files):  # the same columns, but from other topics
        schemas = ()
    merged = MergedFile(journal, files[0].node, folder, files[0].first, schema, schemas, by_topic=shred is None)
    try:
        for batch in chain.from_iterable(_read_file(journal, file) for file in files):
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            merged.add(tables.with_columns(columns, batch.num_rows, schema), "")
        return merged.close(shred)
    except BaseException:
        merged.discard()
        raise


def plain_schema(path: Path) -> pa.Schema:
    """Return the pyarrow.Schema of a file without its VARIANT column, which is computed from the others."""
    from pyarrow import parquet, schema

    return schema([field for field in parquet.read_schema(path) if field.name != _VARIANT])


def full_schema(path: Path) -> pa.Schema:
    """Return the `plain_schema` of a file with the columns that it lacks, because it is older than them."""
    from pyarrow import schema

    plain = plain_schema(path)
    known = [plain.field(field.name) if field.name in plain.names else field for field in tables.schema()]
    return schema([*known, *(field for field in plain if field.name not in tables.NAMES)])


def has_variant(path: Path) -> bool:
    """Return whether a file has a VARIANT column."""
    from pyarrow import parquet

    return _VARIANT in parquet.read_schema(path).names


def _read_file(journal: Path, file: DataFile) -> Iterator[Any]:
    """Yield the rows of a file, checked, in the order of their numbers."""
    from pyarrow import ArrowException

    path = journal / file.path
    chunk = Chunk(file.path, PARQUET, 0, file.bytes, 0, file.rows, file.node, file.first, file.footer_crc32)
    try:
        names = plain_schema(path).names
        with path.open("rb") as source:
            opened = tables.parquet_file(source, chunk)
            for group in tables.groups(opened.metadata, chunk):
                yield from tables.in_order(opened.read_row_group(group, names)).to_batches()
    except (ArrowException, ValueError, OSError) as error:
        if getattr(error, "errno", None) is not None:
            raise  # an error of the disk, not in the file's content
        raise JournalError(f"{path} can't be merged: {error}; {REMEDY}.") from None


# ---- merged files


def retire_files(journal: Path, paths: Iterable[Path]) -> None:
    """Move files from `data/` to `retired/`, where readers can open them until the grace period is over.

    Raises:
        OSError: they can't be moved.
    """
    folder = journal / RETIRED
    make_folder(folder)
    for path in paths:
        with suppress(FileNotFoundError):  # expired meanwhile
            os.utime(path)  # the grace period begins now
            os.replace(path, folder / path.name)


def remove_retired(journal: Path, grace_s: float) -> None:
    """Remove retired files whose grace period is over.

    Raises:
        OSError: they can't be removed.
    """
    for path in (journal / RETIRED).glob("*.parquet"):
        if age_s(path) >= grace_s:
            path.unlink()


def compacted_path(journal: Path, file: str) -> Path:
    """Return the path of a compacted file, which may be retired."""
    path = journal / file
    return path if path.exists() else journal / RETIRED / path.name
