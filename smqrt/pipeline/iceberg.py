"""Iceberg tables of pipelines: each micro-batch is one snapshot, with query and number as its key.

Spark's tasks write the files; the driver commits their names with the library `pyiceberg`. The library expires
snapshots, but does not join or remove files. This module joins and removes files with the library's commits.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from smqrt.errors import PipelineError
from smqrt.journal import files as locations
from smqrt.journal.reader import Offsets
from smqrt.pipeline import lake_files, status
from smqrt.pipeline.lake_files import Joined

if TYPE_CHECKING:
    from pyiceberg.table import Table, Transaction
    from pyspark.sql import DataFrame, SparkSession


NEEDS_ICEBERG = "Iceberg tables need pyiceberg, which is not installed: pip install 'smqrt[iceberg]' installs it."
CATALOG = "smqrt"
"""The catalog's name in pyiceberg's configuration; without it, tables on this machine use a catalog in a file."""
FILE = "iceberg.db"
"""The catalog file, in the parent folder of a table."""
NAMESPACE = "tables"
_QUERY, _BATCH, _END = "smqrt.query", "smqrt.batch", "smqrt.end"
"""Properties of a snapshot, about the rows that it adds."""
_SEQUENCE = "smqrt.sequence"
_LAST = "smqrt.last."
"""Prefix of properties of the table, before the key of a query. They save the query's last commit beyond the expiry of
its snapshot."""
_DEFAULTS = {
    # Each commit adds a list of manifests and a description of the table. With a commit every ten seconds both would
    # have thousands of entries after a day, in files that each commit rewrites.
    "commit.manifest-merge.enabled": "true",
    "write.metadata.delete-after-commit.enabled": "true",
}


class IcebergTable:
    """A table of a catalog: `tables.NAME`, where NAME is the last part of its path.

    Args:
        location: folder, or a URI that pyiceberg and pyarrow support.
        partition_by: partition columns.

    Attributes:
        location: the argument.

    Raises:
        PipelineError: pyiceberg is missing, or there is no catalog.
    """

    def __init__(self, location: str, partition_by: Sequence[str] = ()) -> None:
        self.location, self._by = location, list(partition_by)
        self._name = f"{NAMESPACE}.{location.rstrip('/').rpartition('/')[2]}"
        self._catalog = _catalog(location)
        self._table: Any = None
        self._has_schema = False

    def exists(self) -> bool:
        """Return whether the catalog has the table; a table without its folder is removed from the catalog."""
        from pyiceberg.exceptions import NoSuchTableError

        with suppress(NoSuchTableError):
            try:
                self._table = self._catalog.load_table(self._name)
            except FileNotFoundError:
                self._catalog.drop_table(self._name)
                self._table = None
        return self._table is not None

    def has(self, query: str, batch: int) -> bool:
        """Return whether a micro-batch is in the table; arguments as for `DeltaTable.has`."""
        return any(commit[_QUERY] == query and int(commit[_BATCH]) >= batch for commit in self._commits())

    def end(self, name: str) -> Offsets | None:
        """See `DeltaTable.end`."""
        for commit in self._commits():
            if commit[_QUERY].startswith(f"{name}:") and (end := json.loads(commit[_END])) is not None:
                return dict(end)
        return None

    def _commits(self) -> list[dict[str, Any]]:
        """Return the properties of the last commit of each query and of all snapshots, the newest first."""
        if self._table is None and not self.exists():
            return []
        table = self._table.refresh()
        last = [json.loads(value) for name, value in table.properties.items() if name.startswith(_LAST)]
        snapshots = [
            {_SEQUENCE: one.sequence_number, **one.summary.additional_properties}
            for one in table.snapshots()
            if one.summary and _QUERY in one.summary.additional_properties
        ]
        return sorted([*last, *snapshots], key=lambda commit: int(commit[_SEQUENCE]), reverse=True)

    def append(self, frame: DataFrame, query: str, batch: int, end: Offsets | None) -> int:
        """See `DeltaTable.append`."""
        if self.has(query, batch):
            return 0
        self._ensure_schema(frame)
        files = lake_files.write(frame, f"{self.location}/data", self._by, keep=True)
        status.crash_at("before_commit", batch)
        if files:
            properties = {_QUERY: query, _BATCH: str(batch), _END: json.dumps(end)}
            last = {_SEQUENCE: self._table.metadata.last_sequence_number + 1, **properties}
            paths = [f"{self._table.location()}/data/{one.path}" for one in files]
            with self._table.transaction() as transaction:
                # The names of the files are unique, and a check would read all manifests.
                transaction.add_files(paths, snapshot_properties=properties, check_duplicate_files=False)
                transaction.set_properties(_table_properties([last]))
            if len(self._table.snapshots()) > MAX_SNAPSHOTS:
                from pyiceberg.exceptions import CommitFailedException

                with suppress(PipelineError, CommitFailedException):  # the next micro-batch tries again
                    limit_snapshots(self._table, self._saved_commits())
        status.crash_at("after_commit", batch)
        return len(files)

    def replace(self, frame: DataFrame, query: str) -> int:
        """See `DeltaTable.replace`; return the sequence number of the snapshot."""
        from pyiceberg.io.pyarrow import parquet_files_to_data_files

        self._ensure_schema(frame)
        tasks = list(self._table.refresh().scan().plan_files())
        if any(task.delete_files for task in tasks):
            raise PipelineError(
                f"{self.location} has rows that another program has deleted: rewrite its files with that program first."
            )
        made = lake_files.write(frame, f"{self.location}/data", self._by, keep=True)
        status.crash_at("before_replace", 0)
        table = self._table.refresh()
        paths = [f"{table.location()}/data/{one.path}" for one in made]
        fresh = list(parquet_files_to_data_files(table.io, table.metadata, iter(paths)))
        if tasks or fresh:
            commit_change(table, lambda change: _replace(change, [task.file for task in tasks], fresh))
        status.crash_at("after_replace", 0)
        return int(self._table.refresh().metadata.last_sequence_number)

    def _saved_commits(self) -> dict[str, str]:
        return _table_properties(reversed(self._commits()))

    def _ensure_schema(self, frame: DataFrame) -> None:
        """Create the table, or add its missing columns; only the first call does so."""
        if self._has_schema:
            return
        import pyarrow

        # Every column is nullable, because later rows may not have it.
        schema = pyarrow.schema([field.with_nullable(True) for field in frame.limit(0).toArrow().schema])
        if self._table is None:
            self._catalog.create_namespace_if_not_exists(NAMESPACE)
            where = self.location if locations.scheme(self.location) else f"file://{self.location}"
            self._table = self._catalog.create_table(self._name, schema, location=where, properties=_DEFAULTS)
        if not self._table.snapshots() and not self._table.spec().fields:
            with self._table.update_spec() as spec:
                for name in self._by:
                    spec.add_identity(name)
        if (by := [field.name for field in self._table.spec().fields]) != self._by:
            raise PipelineError(
                f"The table in {self.location} is partitioned by {', '.join(by) or 'nothing'}: use the same "
                "partition_by, or another path."
            )
        try:
            with self._table.update_schema() as changes:
                changes.union_by_name(schema)
        except Exception as error:
            raise PipelineError(
                f"The table in {self.location} has a column of another type than the result: {error}; use another name "
                "for the column, or another path for the table."
            ) from None
        self._has_schema = True

    def optimize(self, target_bytes: int | None = None) -> lake_files.Joined:
        """See `DeltaTable.optimize`."""
        return join_files(self._existing(), target_bytes)

    def vacuum(self, retain: timedelta) -> int:
        """See `DeltaTable.vacuum`, with snapshots instead of versions."""
        before = datetime.now(UTC) - retain
        return expire_snapshots(self._existing(), before, self._saved_commits())

    def check_condition(self, condition: str) -> None:
        """See `DeltaTable.check_condition`."""
        with _condition_errors(self._existing(), condition):
            _check_names(self._existing(), condition)
            list(self._existing().scan(row_filter=condition, limit=0).plan_files())

    def delete(self, condition: str) -> int:
        """See `DeltaTable.delete`."""
        return delete_rows(self._existing(), condition)

    def _existing(self) -> Any:
        if self._table is None and not self.exists():
            raise PipelineError(f"There is no Iceberg table in {self.location}: run its query first.")
        return self._table


def _table_properties(commits: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Return the properties of a table that save those of commits, given in order: the last commit of each query."""
    return {f"{_LAST}{each[_QUERY]}": json.dumps(each) for each in commits}


def is_table(location: Path | str) -> bool:
    """Return whether a folder of this machine is an Iceberg table."""
    return not locations.is_elsewhere(location) and any((Path(location) / "metadata").glob("*.metadata.json"))


def files(location: str) -> list[str]:
    """Return the paths of the Parquet files of a table.

    Raises:
        PipelineError: pyiceberg is missing, or other programs have deleted rows, which the files still contain.
    """
    found = IcebergTable(location)
    tasks = list(found._table.scan().plan_files()) if found.exists() else []
    if any(task.delete_files for task in tasks):
        raise PipelineError(f"{location} has deleted rows: read it with pyiceberg, or with Iceberg's jar in Spark.")
    return sorted(task.file.file_path.removeprefix("file://") for task in tasks)


def frame(spark: SparkSession, location: str) -> DataFrame:
    """Return the rows of a table, read by Spark's own Parquet reader.

    Raises:
        PipelineError: as `files`, or the table has no rows yet.
    """
    paths = files(location)
    if not paths:
        raise PipelineError(f"There are no rows in {location}: run its query first.")
    return spark.read.option("mergeSchema", "true").parquet(*paths)


def check_installed() -> None:
    """Raise PipelineError when pyiceberg, or the library for its catalogs in files, is missing."""
    try:
        import pyiceberg.catalog.sql  # noqa: F401
    except ImportError:
        raise PipelineError(NEEDS_ICEBERG) from None


def _store() -> dict[str, str]:
    """Return the address of an object store from the variables of pyarrow and deltalake; pyiceberg uses other names."""
    variables = {"s3.endpoint": "AWS_ENDPOINT_URL", "s3.region": "AWS_REGION"}
    return {name: value for name, variable in variables.items() if (value := os.environ.get(variable))}


def _catalog(location: str) -> Any:
    check_installed()
    from pyiceberg.catalog import load_catalog
    from pyiceberg.catalog.sql import SqlCatalog
    from pyiceberg.utils.config import Config

    if configured := Config().get_catalog_config(CATALOG):  # pyiceberg reads its configuration when it is imported
        return load_catalog(CATALOG, **{**_store(), **cast("dict[str, str]", configured)})
    if locations.is_elsewhere(location):
        raise PipelineError(
            f"An Iceberg table in {location} needs a shared catalog: configure {CATALOG!r} for pyiceberg, for "
            "instance with the variable PYICEBERG_CATALOG__SMQRT__URI."
        )
    root = Path(location).parent
    root.mkdir(parents=True, exist_ok=True)
    return SqlCatalog(CATALOG, uri=f"sqlite:///{root / FILE}", warehouse=root.as_uri())


# ---- Maintenance: small files are joined, old snapshots expire, and unreferenced files are removed

TARGET_BYTES = 128 << 20
"""Size of joined files, unless the table's `write.target-file-size-bytes` sets another."""
MAX_SNAPSHOTS = 2000
_TARGET_PROPERTY = "write.target-file-size-bytes"
_SMALL_SHARE = 0.75
"""A file of at least this share of the target size is not joined."""
_MAX_ATTEMPTS = 5
"""The maximum number of attempts for a commit. An attempt fails when a query has appended at the same time."""
_FOLDERS = ("data", "metadata")


def join_files(table: Table, target_bytes: int | None) -> Joined:
    """Join the small files of each partition, in one snapshot.

    Args:
        table: pyiceberg's table.
        target_bytes: the approximate maximum size of the large files.

    Raises:
        PipelineError: other programs keep changing the table, or have just changed the same files.
    """
    target_bytes = target_bytes or int(table.properties.get(_TARGET_PROPERTY) or TARGET_BYTES)
    table.refresh()
    # Files with deleted rows are left out: only other engines support all kinds of deletions.
    by_partition: dict[Any, list[Any]] = defaultdict(list)
    for task in table.scan().plan_files():
        is_small = task.file.file_size_in_bytes < _SMALL_SHARE * target_bytes
        if is_small and not task.delete_files and task.file.spec_id == table.spec().spec_id:
            by_partition[task.file.partition].append(task)
    groups: list[list[Any]] = []
    for tasks in by_partition.values():
        parts: list[list[Any]] = [[]]
        size_bytes = 0
        for task in sorted(tasks, key=lambda task: task.file.file_size_in_bytes):
            if parts[-1] and size_bytes + task.file.file_size_in_bytes > target_bytes:
                parts.append([])
                size_bytes = 0
            parts[-1].append(task)
            size_bytes += task.file.file_size_in_bytes
        groups += [part for part in parts if len(part) > 1]
    if not groups:
        return Joined(0, 0)
    large = [made for group in groups for made in _join_group(table, group)]
    small = [task.file for group in groups for task in group]
    commit_change(table, lambda change: _replace(change, small, large))
    return Joined(len(small), len(large))


def _join_group(table: Table, tasks: list[Any]) -> Iterator[Any]:
    """Write the rows of files into large files, with the current columns; one file at a time is in memory."""
    from pyiceberg.expressions import AlwaysTrue
    from pyiceberg.io.pyarrow import ArrowScan, parquet_files_to_data_files, schema_to_pyarrow

    schema = schema_to_pyarrow(table.schema())
    scan = ArrowScan(table.metadata, table.io, table.schema(), AlwaysTrue())
    batches = (batch.cast(schema) for task in tasks for batch in scan.to_record_batches([task]))
    rows = sum(task.file.record_count for task in tasks)
    size_bytes = sum(task.file.file_size_in_bytes for task in tasks)
    folder = f"{table.location()}/data"
    files = lake_files.write_batches(batches, schema, folder, group_rows=lake_files.group_rows(rows, size_bytes))
    paths = [f"{folder}/{file.path}" for file in files]
    return parquet_files_to_data_files(table.io, table.metadata, iter(paths))


def _replace(change: Transaction, small: Iterable[Any], large: Iterable[Any]) -> None:
    with change.update_snapshot().overwrite() as snapshot:
        for file in small:
            snapshot.delete_data_file(file)
        for file in large:
            snapshot.append_data_file(file)


def commit_change(table: Table, change: Callable[[Transaction], object]) -> None:
    """Commit a change of a table; retry when another program committed first.

    Raises:
        PipelineError: every attempt failed, or the rows to be changed no longer exist.
    """
    from pyiceberg.exceptions import CommitFailedException, ValidationException

    for attempt in range(_MAX_ATTEMPTS):
        try:
            with table.refresh().transaction() as transaction:
                change(transaction)
            return
        except (CommitFailedException, ValidationException) as error:
            if attempt == _MAX_ATTEMPTS - 1:
                raise PipelineError(
                    f"{table.location()} was changed by other programs at the same time, {_MAX_ATTEMPTS} times: "
                    f"{error}. Nothing is lost; run it again."
                ) from None


@contextmanager
def _condition_errors(table: Table, condition: str) -> Iterator[None]:
    from pyparsing import ParseBaseException

    try:
        yield
    except ParseBaseException:  # its text is the whole grammar
        raise PipelineError(f"""{condition!r} is not a condition, such as "n < 5 and k = 'a'".""") from None
    except Exception as error:  # of its parser, of types, of columns
        raise PipelineError(f"{condition!r} can't be deleted from {table.location()}: {error}.") from None


def _check_names(table: Table, condition: str) -> None:
    """Reject columns with a dot in their names: pyiceberg finds rows by such columns, but silently deletes none."""
    from pyiceberg.expressions.parser import parse
    from pyiceberg.expressions.visitors import bind, extract_field_ids

    used = extract_field_ids(bind(table.schema(), parse(condition), case_sensitive=True))
    for field in table.schema().fields:
        if "." in field.name and field.field_id in used:
            raise ValueError(f"pyiceberg deletes nothing by a column with a dot in its name, {field.name!r}; use Spark")


def delete_rows(table: Table, condition: str) -> int:
    """Delete the rows that meet a condition, in pyiceberg's SQL; return their number.

    Raises:
        PipelineError: the condition is invalid.
    """
    # pyiceberg does not return a number; the new snapshots have it.
    known = {one.snapshot_id for one in table.refresh().snapshots()}
    with _condition_errors(table, condition):
        _check_names(table, condition)
        table.delete(condition)
    new = [one.summary for one in table.refresh().snapshots() if one.snapshot_id not in known and one.summary]
    figures = [summary.additional_properties for summary in new if summary.operation.value in ("delete", "overwrite")]
    return sum(int(one.get("deleted-records", 0)) - int(one.get("added-records", 0)) for one in figures)


def expire_snapshots(table: Table, before: datetime, properties: Mapping[str, str]) -> int:
    """Remove the snapshots from before a time, except the last one and named ones.

    Then remove unreferenced files from before that time, including uncommitted ones.

    Args:
        table: pyiceberg's table.
        before: the time, with its zone.
        properties: the properties of snapshots to save in the table.

    Returns:
        The number of removed files.

    Raises:
        PipelineError: other programs keep changing the table.
    """
    from pyarrow import fs

    before_ms = before.timestamp() * 1000
    _expire(table, properties, lambda snapshot: snapshot.timestamp_ms < before_ms)
    system, root = locations.filesystem(table.refresh().location())
    # Listed before the references are read: a file that is committed in between is not listed, or is referenced.
    folders = [fs.FileSelector(f"{root}/{name}", allow_not_found=True, recursive=True) for name in _FOLDERS]
    found = [one for folder in folders for one in system.get_file_info(folder) if one.is_file]
    old = {one.path for one in found if one.mtime < before.astimezone(UTC)}
    unreferenced = old - {locations.filesystem(uri)[1] for uri in set(_references(table.refresh()))}
    for path in sorted(unreferenced):
        system.delete_file(path)
    return len(unreferenced)


def limit_snapshots(table: Table, properties: Mapping[str, str]) -> None:
    """Remove the older half of the snapshots when there are more than `MAX_SNAPSHOTS`.

    Each commit reads and writes a description of all snapshots. The next `expire_snapshots` removes their files.

    Args:
        table, properties: as for `expire_snapshots`.

    Raises:
        PipelineError: as `expire_snapshots`.
    """
    numbers = sorted(snapshot.sequence_number or 0 for snapshot in table.snapshots())
    if len(numbers) > MAX_SNAPSHOTS:
        _expire(table, properties, lambda snapshot: (snapshot.sequence_number or 0) < numbers[len(numbers) // 2])


def _expire(table: Table, properties: Mapping[str, str], is_old: Callable[[Any], bool]) -> None:
    if properties:
        commit_change(table, lambda change: change.set_properties(dict(properties)))
    heads = {ref.snapshot_id for ref in table.refresh().metadata.refs.values()}  # the last one and named ones
    old = [one.snapshot_id for one in table.snapshots() if is_old(one) and one.snapshot_id not in heads]
    if old:
        table.maintenance.expire_snapshots().by_ids(old).commit()


def _references(table: Table) -> Iterator[str]:
    """Yield the URIs of all files that the table or one of its snapshots refers to."""
    metadata = table.metadata
    yield table.metadata_location
    yield from (entry.metadata_file for entry in metadata.metadata_log)
    yield from (one.statistics_path for one in [*metadata.statistics, *metadata.partition_statistics])
    manifests = {}
    for snapshot in table.snapshots():
        yield snapshot.manifest_list
        manifests.update({one.manifest_path: one for one in snapshot.manifests(table.io)})
    for path, manifest in manifests.items():
        yield path
        yield from (entry.data_file.file_path for entry in manifest.fetch_manifest_entry(table.io))
