"""Parquet files of a micro-batch: written by Spark's tasks, of which the driver learns the names."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import date, datetime, timedelta
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from smqrt.journal import files
from smqrt.pipeline.references import column

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Schema
    from pyspark.sql import DataFrame

_TWIN = "_"
"""Before the name of a column that only gives a folder its name: those that name folders are not in the files."""
_NULL = "__HIVE_DEFAULT_PARTITION__"
_OPEN_FILES = 64
"""Of a task at a time: each holds a group of rows."""
_MOST_GROUP_ROWS = 1 << 20
_GROUP_ROWS, _GROUP_BYTES = 128 * 1024, 32 << 20
"""About the most of a group of rows of a file that is made of others."""
_LONGEST_STATISTIC = 64
_KEYS = ("AWS_", "AZURE_", "GOOGLE_")
"""Variables that say how an object store is reached: workers take those of the driver, as its log of commits does."""
_MILLISECOND = timedelta(milliseconds=1)


@dataclass(frozen=True)
class LakeFile:
    """A file of a table.

    Attributes:
        path: relative to the table.
        bytes: its size.
        rows: how many it has.
        values: of the columns that the table is partitioned by, as texts.
        least, greatest: of columns whose statistics say it, as JSON has them.
        nulls: how many, by column.
    """

    path: str
    bytes: int
    rows: int
    values: dict[str, str | None]
    least: dict[str, Any]
    greatest: dict[str, Any]
    nulls: dict[str, int]

    def statistics(self) -> str:
        """Return what the log of a Delta table says of the rows."""
        values = {"minValues": self.least, "maxValues": self.greatest, "nullCount": self.nulls}
        return json.dumps({"numRecords": self.rows, **values})


class Joined(NamedTuple):
    """What joining files has done: so many small ones to so many large ones."""

    small: int
    large: int


def written(frame: DataFrame, table: str, partition_by: Sequence[str], keep: bool = False) -> list[LakeFile]:
    """Write the rows of a frame into files of a table, which nobody reads until they are committed.

    A task that is done again writes other files; those of the first time are never committed, and vacuum removes them.

    Args:
        frame: the rows.
        table: its folder, or a URI that pyarrow knows.
        partition_by: columns that become folders.
        keep: have these columns in the files too.
    """
    from pyspark.sql import functions as F

    if keep:
        twins = [f"{_TWIN}{name}" for name in partition_by]
        frame = frame.withColumns(dict(zip(twins, map(column, partition_by), strict=True))) if twins else frame
        partition_by = twins
    # A folder needs a name: readers, and Spark in its own tables, take an empty text for NULL.
    texts = [name for name in partition_by if frame.schema[name].dataType.typeName() == "string"]
    frame = frame.withColumns({name: F.nullif(column(name), F.lit("")) for name in texts}) if texts else frame
    keys = {name: value for name, value in os.environ.items() if name.startswith(_KEYS) and files.scheme(table)}
    names = frame.columns
    write = partial(_write, table=table, partition_by=tuple(partition_by), keys=keys, names=names)
    plain = frame.toDF(*(f"c{number}" for number in range(len(names))))  # mapInArrow takes a dot for a struct's
    rows = plain.mapInArrow(write, "file string")
    return [LakeFile(**json.loads(row.file)) for row in rows.collect()]


def group_rows(rows: int, size_bytes: int) -> int:
    """Return how many rows a group of a large file has, where files of `size_bytes` have `rows` together."""
    return max(1, min(_GROUP_ROWS, rows * _GROUP_BYTES // max(1, size_bytes)))


def stored(
    batches: Iterator[RecordBatch], schema: Schema, table: str, partition_by: Sequence[str] = (), group_rows: int = 0
) -> list[LakeFile]:
    """Write batches of Arrow into files of a table; nobody reads them until they are committed.

    Args:
        batches, schema: what, a batch at a time.
        table, partition_by: as for `written`.
        group_rows: the fewest rows of a group; without it each batch is one.
    """
    import pyarrow as pa
    from pyarrow import dataset

    system, root = files.filesystem(table)
    by = dataset.partitioning(pa.schema([schema.field(name) for name in partition_by]), flavor="hive")
    found: list[LakeFile] = []
    dataset.write_dataset(
        pa.RecordBatchReader.from_batches(schema, batches),
        root,
        filesystem=system,
        format="parquet",
        file_options=dataset.ParquetFileFormat().make_write_options(compression="zstd"),
        partitioning=by,
        basename_template=f"part-{uuid.uuid4().hex}-{{i}}.parquet",
        existing_data_behavior="overwrite_or_ignore",
        max_open_files=_OPEN_FILES,
        min_rows_per_group=group_rows,
        max_rows_per_group=group_rows or _MOST_GROUP_ROWS,
        create_dir=not files.is_elsewhere(table),  # in an object store that would leave files without a byte
        file_visitor=lambda file: found.append(_described(file, root)),
    )
    return found


def _write(
    batches: Iterator[RecordBatch],
    table: str,
    partition_by: Sequence[str],
    keys: Mapping[str, str],
    names: Sequence[str] = (),
) -> Iterator[RecordBatch]:
    import pyarrow as pa

    rows = (batch.rename_columns(list(names)) if names else batch for batch in batches if batch.num_rows)
    first = next(rows, None)
    if first is None:
        return
    os.environ.update(keys)
    found = stored(chain([first], rows), first.schema, table, partition_by)
    yield pa.RecordBatch.from_pydict({"file": [json.dumps(asdict(file)) for file in found]})


def _described(file: Any, root: str) -> LakeFile:
    path = file.path.removeprefix(root.rstrip("/") + "/")
    pairs = (folder.split("=", 1) for folder in path.split("/")[:-1])
    values = {unquote(name): None if value == _NULL else unquote(value) for name, value in pairs}
    least, greatest, nulls = _measured(file.metadata)
    return LakeFile(path, file.size, file.metadata.num_rows, values, least, greatest, nulls)


def _measured(metadata: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, int]]:
    """The statistics of the columns without parts, of all row groups together."""
    least, greatest, nulls = dict[str, Any](), dict[str, Any](), dict[str, int]()
    groups = [metadata.row_group(at) for at in range(metadata.num_row_groups)]
    for at in range(metadata.num_columns):
        name = metadata.schema.column(at).path
        found = [group.column(at).statistics for group in groups]
        if "." in name or not all(found):
            continue
        if all(one.has_null_count for one in found):
            nulls[name] = sum(one.null_count for one in found)
        filled = [group for group, one in zip(groups, found, strict=True) if one.null_count != group.num_rows]
        with suppress(OverflowError, ValueError):  # a time that Python doesn't know: the column has no bounds then
            bounds = [(one.min, one.max) for one in found if one.has_min_max]
            if len(bounds) == len(filled) and bounds:
                low, high = min(low for low, _ in bounds), max(high for _, high in bounds)
                if _is_told(low) and _is_told(high):
                    shown = _shown(low, up=False), _shown(high, up=True)
                    least[name], greatest[name] = shown
    return least, greatest, nulls


def _is_told(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= _LONGEST_STATISTIC
    # Statistics of Parquet leave out NaN, which is the greatest of all for those who filter.
    return isinstance(value, int | date) and not isinstance(value, bool)


def _shown(value: Any, up: bool) -> Any:
    """As Delta has it: times in milliseconds, rounded away from the others."""
    if isinstance(value, datetime):
        whole = value.replace(microsecond=value.microsecond // 1000 * 1000)
        value = whole + _MILLISECOND if up and whole != value else whole
        return value.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return value.isoformat() if isinstance(value, date) else value
