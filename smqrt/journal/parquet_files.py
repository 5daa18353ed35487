"""Compacted files: written of segments, one per hour; small ones merged into larger ones, of an hour or of a day.

Row groups have at most 64Ki rows, with statistics of topic, ts and seq, so that a query for a topic, a time or a range
reads few of them. Groups follow each other by sequence number. So do the rows within a group of an hour's file; in a
merged file they are sorted by topic, which packs better and lets readers that use the page index skip most pages. A
file gets its name when it is complete.

A question opens few files when small ones are merged, and what every file costs by itself (its footer, its entry in the
manifest) is paid once. Rows stay where their numbers are: files that follow each other become one that follows its
neighbours. Files that were merged go to `retired/` for the grace: who has planned to read one finds it there, and who
reads all of `data/` with other tools finds no row twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from smqrt.errors import JournalError
from smqrt.journal import filters, tables
from smqrt.journal.files import age_s, crc32_of_file, crc32_of_footer, make_folder, touch
from smqrt.journal.manifest import MOST_TOPICS, DataFile
from smqrt.journal.payload_schema import TypedColumn
from smqrt.journal.planning import PARQUET, Chunk
from smqrt.journal.record import COLUMNS
from smqrt.journal.segment import REMEDY
from smqrt.journal.timestamps import iso

if TYPE_CHECKING:
    import pyarrow as pa

GROUP_ROWS = 1 << 16
GROUP_BYTES = 64 << 20
_HOUR_US = 3_600_000_000
_GROWING = ("seq", "ts")
_ZSTD_LEVEL = 3
RETIRED = "retired"
_DAY_HOURS = 24
_LATE_HOURS = 2
"""An hour is over when rows of a later one are compacted, or after so long: what belongs to it came by then."""
_VARIANT = "variant"
_TOPIC, _PAYLOAD = ([column.name for column in COLUMNS].index(name) for name in ("topic", "payload"))

Schemas = tuple[tuple[str, str], ...]
Shred = Callable[[Path, Path], None]
"""Makes of a Parquet file (first path) another one with the same rows in the same order."""


def hour_of(ts_us: int) -> int:
    """Return the hour since 1970 of a time in microseconds."""
    return ts_us // _HOUR_US


def folder_of(hour: int) -> str:
    """Return the folder for an hour: `data/date=2026-11-21/hour=15`."""
    text = iso(hour * _HOUR_US)
    return f"data/date={text[:10]}/hour={text[11:13]}"


def day_folder_of(hour: int) -> str:
    """Return the folder for files of several hours of a day; its hour is null for all who read folders as columns."""
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
        """Return what the manifest says of the complete file."""
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
        self, journal: Path, node: str, folder: str, first: int, schema: pa.Schema, schemas: Schemas, by_topic: bool
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


# ---- merging: which files


def merge_groups(
    files: Sequence[DataFile], now_us: int, most_bytes: int, fits: Callable[[DataFile, DataFile], bool]
) -> Iterator[list[DataFile]]:
    """Yield files of a node, some that follow each other, each group to become one.

    Args:
        files: in order.
        now_us: the time, microseconds since 1970.
        most_bytes: a group is not larger; files half as large stay as they are.
        fits: says whether two files can be in a group.
    """
    newest_hour = _newest_over(files, now_us)
    group: list[DataFile] = []
    for file in files:
        if group:
            last, period = group[-1], _period(file, newest_hour)
            alike = period is not None and period == _period(last, newest_hour) and last.last + 1 == file.first
            small = max(last.bytes, file.bytes) <= most_bytes // 2
            if not (alike and small and sum(one.bytes for one in (*group, file)) <= most_bytes and fits(last, file)):
                yield from [group] * (len(group) > 1)
                group = []
        group.append(file)
    yield from [group] * (len(group) > 1)


def settled_below(files: Sequence[DataFile], now_us: int) -> int | None:
    """Return the number below which no file will be merged any more, once all groups are; None without a file."""
    newest_hour = _newest_over(files, now_us)
    for file in files:
        period = _period(file, newest_hour)
        if period is None or period[0] == "hour":
            return file.first
    return files[-1].last + 1 if files else None


def _newest_over(files: Sequence[DataFile], now_us: int) -> int:
    """Return the newest hour since 1970 that is over."""
    newest = max((hour_of(file.ts_max_us) for file in files), default=0) - 1
    return max(newest, hour_of(now_us) - _LATE_HOURS)


def _period(file: DataFile, newest_hour: int) -> tuple[str, int] | None:
    """Return the day or the hour whose files may be merged with a file; None while its hour isn't over."""
    first, last = hour_of(file.ts_min_us), hour_of(file.ts_max_us)
    if first // _DAY_HOURS != last // _DAY_HOURS or last > newest_hour:
        return None
    if (first // _DAY_HOURS + 1) * _DAY_HOURS - 1 <= newest_hour:
        return "day", first // _DAY_HOURS
    return ("hour", first) if first == last else None


# ---- merging: one file of some


def merge_files(journal: Path, files: Sequence[DataFile], shred: Shred | None) -> Unnamed:
    """Write a file with the rows of others.

    Args:
        journal: its folder.
        files: that follow each other.
        shred: makes a VARIANT column; needed where the files have one.

    Returns:
        The file, which has no name that anybody reads.

    Raises:
        JournalError: a file is damaged.
        OSError: the disk is full or broken, or a file has gone.
    """
    hours = {hour_of(one) for file in files for one in (file.ts_min_us, file.ts_max_us)}
    folder = folder_of(min(hours)) if len(hours) == 1 else day_folder_of(min(hours))
    schema, schemas = plain_schema(journal / files[0].path), files[0].schemas
    if any(file.schemas != schemas for file in files):  # of the same columns, but for other topics
        schemas = ()
    opened = MergedFile(journal, files[0].node, folder, files[0].first, schema, schemas, by_topic=shred is None)
    try:
        for batch in chain.from_iterable(_rows_of_file(journal, file) for file in files):
            opened.add(batch, "")
        return opened.close(shred)
    except BaseException:
        opened.discard()
        raise


def plain_schema(path: Path) -> pa.Schema:
    """Return the pyarrow.Schema of a file without its VARIANT column, which is made of the others."""
    from pyarrow import parquet, schema

    return schema([field for field in parquet.read_schema(path) if field.name != _VARIANT])


def has_variant(path: Path) -> bool:
    """Return whether a file has a VARIANT column."""
    from pyarrow import parquet

    return _VARIANT in parquet.read_schema(path).names


def _rows_of_file(journal: Path, file: DataFile) -> Iterator[Any]:
    """Yield the rows of a file, checked, in the order of their numbers."""
    from pyarrow import ArrowException

    try:
        yield from _checked(journal / file.path, file)
    except (ArrowException, ValueError, OSError) as error:
        if getattr(error, "errno", None) is not None:
            raise  # of the disk
        raise JournalError(f"{journal / file.path} can't be merged: {error}; {REMEDY}.") from None


def _checked(path: Path, file: DataFile) -> Iterator[Any]:
    whole = Chunk(file.path, PARQUET, 0, file.bytes, 0, file.rows, file.node, file.first, file.footer_crc32)
    names = plain_schema(path).names
    with path.open("rb") as source:
        opened = tables.parquet_file(source, whole)
        for group in tables.groups(opened.metadata, whole):
            yield from tables.in_order(opened.read_row_group(group, names)).to_batches()


# ---- files that were merged


def retire_files(journal: Path, paths: Iterable[Path]) -> None:
    """Take files out of `data/`; who has planned to read one finds it in `retired/` until its grace is over.

    Raises:
        OSError: that isn't possible.
    """
    folder = journal / RETIRED
    make_folder(folder)
    for path in paths:
        with suppress(FileNotFoundError):  # it has expired meanwhile
            os.utime(path)
            os.replace(path, folder / path.name)


def remove_retired(journal: Path, grace_s: float) -> None:
    """Remove files whose grace is over.

    Raises:
        OSError: that isn't possible.
    """
    for path in (journal / RETIRED).glob("*.parquet"):
        if age_s(path) >= grace_s:
            path.unlink()


def compacted_path(journal: Path, file: str) -> Path:
    """Return where a compacted file is: at its place, or retired."""
    path = journal / file
    return path if path.exists() else journal / RETIRED / path.name
