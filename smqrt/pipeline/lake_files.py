"""Parquet files of lake tables: Spark's tasks write them, the driver collects their descriptions."""

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
from smqrt.pipeline.discover import column

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Schema
    from pyspark.sql import DataFrame

_KEY_PREFIX = "_"
"""Prefix of a copy of a partition column. The columns that name folders are not stored in the files."""
_NULL = "__HIVE_DEFAULT_PARTITION__"
_MAX_OPEN_FILES = 64
"""The maximum for one task; each open file holds a group of rows in memory."""
_MAX_GROUP_ROWS = 1 << 20
_GROUP_ROWS, _GROUP_BYTES = 128 * 1024, 32 << 20
"""Approximate maximum of a row group in a file that joins other files."""
_MAX_STATISTIC_LENGTH = 64
_STORE_VARIABLES = ("AWS_", "AZURE_", "GOOGLE_")
"""Prefixes of variables with credentials for object stores. The driver passes these variables to the workers."""
_MILLISECOND = timedelta(milliseconds=1)


@dataclass(frozen=True)
class LakeFile:
    """A file of a table.

    Attributes:
        path: relative to the table.
        bytes: its size.
        rows: the number of its rows.
        values: the values of the partition columns, as strings.
        least, greatest: minimum and maximum of columns with such statistics, as JSON values.
        nulls: the number of NULLs by column.
    """

    path: str
    bytes: int
    rows: int
    values: dict[str, str | None]
    least: dict[str, Any]
    greatest: dict[str, Any]
    nulls: dict[str, int]

    def statistics(self) -> str:
        """Return the statistics in the format of a Delta table's log."""
        values = {"minValues": self.least, "maxValues": self.greatest, "nullCount": self.nulls}
        return json.dumps({"numRecords": self.rows, **values})


class Joined(NamedTuple):
    """The numbers of small files that were joined, and of large files that replace them."""

    small: int
    large: int


def write(frame: DataFrame, table: str, partition_by: Sequence[str], keep: bool = False) -> list[LakeFile]:
    """Write the rows of a frame into files of a table, which are not visible until they are committed.

    A repeated task writes other files. Those of the first attempt are never committed, and vacuum removes them.

    Args:
        frame: the rows.
        table: its folder, or a URI that pyarrow supports.
        partition_by: columns that become folders.
        keep: whether the files contain these columns too.
    """
    from pyspark.sql import functions as F

    if keep:
        copies = [f"{_KEY_PREFIX}{name}" for name in partition_by]
        frame = frame.withColumns(dict(zip(copies, map(column, partition_by), strict=True))) if copies else frame
        partition_by = copies
    # Spark and other readers treat an empty folder name as NULL.
    strings = [name for name in partition_by if frame.schema[name].dataType.typeName() == "string"]
    frame = frame.withColumns({name: F.nullif(column(name), F.lit("")) for name in strings}) if strings else frame
    is_remote = files.scheme(table)
    keys = {name: value for name, value in os.environ.items() if name.startswith(_STORE_VARIABLES) and is_remote}
    names = frame.columns
    task = partial(_write_task, table=table, partition_by=tuple(partition_by), keys=keys, names=names)
    plain = frame.toDF(*(f"c{number}" for number in range(len(names))))  # for mapInArrow a dot means a struct's field
    # Only the descriptions of the files go through the driver.
    rows = plain.mapInArrow(task, "file string")
    return [LakeFile(**json.loads(row.file)) for row in rows.collect()]


def group_rows(rows: int, size_bytes: int) -> int:
    """Return the number of rows in a group of a large file, joined from files with `rows` and `size_bytes` in total."""
    return max(1, min(_GROUP_ROWS, rows * _GROUP_BYTES // max(1, size_bytes)))


def write_batches(
    batches: Iterator[RecordBatch], schema: Schema, table: str, partition_by: Sequence[str] = (), group_rows: int = 0
) -> list[LakeFile]:
    """Write batches of Arrow into files of a table, which are not visible until they are committed.

    Args:
        batches, schema: the rows.
        table, partition_by: as for `write`.
        group_rows: the minimum number of rows in a group; 0 makes each batch a group.
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
        existing_data_behavior="overwrite_or_ignore",  # keeps the other files of the folder
        max_open_files=_MAX_OPEN_FILES,
        min_rows_per_group=group_rows,
        max_rows_per_group=group_rows or _MAX_GROUP_ROWS,
        create_dir=not files.is_elsewhere(table),  # in an object store this would create empty objects
        file_visitor=lambda file: found.append(_lake_file(file, root)),
    )
    return found


def _write_task(
    batches: Iterator[RecordBatch],
    table: str,
    partition_by: Sequence[str],
    keys: Mapping[str, str],
    names: Sequence[str] = (),
) -> Iterator[RecordBatch]:
    import pyarrow as pa

    rows = (batch.rename_columns(list(names)) if names else batch for batch in batches if batch.num_rows)
    first = next(rows, None)
    if first is None:  # without rows there is no schema
        return
    os.environ.update(keys)
    found = write_batches(chain([first], rows), first.schema, table, partition_by)
    yield pa.RecordBatch.from_pydict({"file": [json.dumps(asdict(file)) for file in found]})


def _lake_file(file: Any, root: str) -> LakeFile:
    """Return the description of a written file; its statistics cover the columns that are not nested."""
    path = file.path.removeprefix(root.rstrip("/") + "/")
    pairs = (folder.split("=", 1) for folder in path.split("/")[:-1])
    values = {unquote(name): None if value == _NULL else unquote(value) for name, value in pairs}
    metadata = file.metadata
    least, greatest, nulls = dict[str, Any](), dict[str, Any](), dict[str, int]()
    groups = [metadata.row_group(at) for at in range(metadata.num_row_groups)]
    for at in range(metadata.num_columns):
        name = metadata.schema.column(at).path
        found = [group.column(at).statistics for group in groups]
        if "." in name or not all(found):
            continue
        if all(one.has_null_count for one in found):
            nulls[name] = sum(one.null_count for one in found)
        # A group with only NULLs has no bounds. The bounds are valid if every other group has them.
        filled = [group for group, one in zip(groups, found, strict=True) if one.null_count != group.num_rows]
        with suppress(OverflowError, ValueError):  # a time outside Python's range: the column gets no bounds
            bounds = [(one.min, one.max) for one in found if one.has_min_max]
            if len(bounds) == len(filled) and bounds:
                low, high = min(low for low, _ in bounds), max(high for _, high in bounds)
                if _is_bound(low) and _is_bound(high):
                    least[name], greatest[name] = _bound(low, up=False), _bound(high, up=True)
    return LakeFile(path, file.size, metadata.num_rows, values, least, greatest, nulls)


def _is_bound(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= _MAX_STATISTIC_LENGTH
    # Not for floats: Parquet's statistics omit NaN, which filters treat as the largest value.
    return isinstance(value, int | date) and not isinstance(value, bool)


def _bound(value: Any, up: bool) -> Any:
    """Return a bound in Delta's format: times in milliseconds, rounded outwards."""
    if isinstance(value, datetime):
        whole = value.replace(microsecond=value.microsecond // 1000 * 1000)
        value = whole + _MILLISECOND if up and whole != value else whole
        return value.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return value.isoformat() if isinstance(value, date) else value
