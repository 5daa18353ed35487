"""Iceberg tables of pipelines: each micro-batch is one snapshot, keyed by query and number, so that it comes once.

Spark's tasks write the files, the driver adds their names with the library `pyiceberg`. That expires snapshots, but
joins no files and removes none; it has the commits of which both are made here.
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
from smqrt.pipeline import lake_files, process
from smqrt.pipeline.lake_files import Joined

if TYPE_CHECKING:
    from pyiceberg.table import Table, Transaction
    from pyspark.sql import DataFrame, SparkSession


NEEDS_ICEBERG = "Iceberg tables need pyiceberg, which is not installed: pip install 'smqrt[iceberg]' brings it."
CATALOG = "smqrt"
"""Of pyiceberg's configuration; without it tables on this machine have a catalog in a file."""
FILE = "iceberg.db"
"""Beside the folder of a table."""
NAMESPACE = "tables"
_QUERY, _BATCH, _END = "smqrt.query", "smqrt.batch", "smqrt.end"
"""What a snapshot says of the rows that it adds."""
_SEQUENCE = "smqrt.sequence"
_LAST = "smqrt.last."
"""Before the key of a query, in the properties of the table: what its last snapshot says, as snapshots expire."""
_DEFAULTS = {
    # Of each commit a list of manifests remains, and a description of the table: with a commit every ten seconds both
    # would have thousands of entries in a day, in files that are written anew each time.
    "commit.manifest-merge.enabled": "true",
    "write.metadata.delete-after-commit.enabled": "true",
}


class IcebergTable:
    """A table of a catalog: `tables.NAME`, where NAME is the last part of its path.

    Args:
        location: folder, or a URI that pyiceberg and pyarrow know.
        partition_by: columns whose values have files of their own.

    Attributes:
        location: as given.

    Raises:
        PipelineError: pyiceberg is missing, or there is no catalog.
    """

    def __init__(self, location: str, partition_by: Sequence[str] = ()) -> None:
        self.location, self._by = location, list(partition_by)
        self._name = f"{NAMESPACE}.{location.rstrip('/').rpartition('/')[2]}"
        self._catalog = _catalog(location)
        self._table: Any = None
        self._fits = False

    def exists(self) -> bool:
        """Return whether the catalog has the table; one whose folder has gone is taken off."""
        from pyiceberg.exceptions import NoSuchTableError

        with suppress(NoSuchTableError):
            try:
                self._table = self._catalog.load_table(self._name)
            except FileNotFoundError:
                self._catalog.drop_table(self._name)
                self._table = None
        return self._table is not None

    def has(self, query: str, batch: int) -> bool:
        """Return whether a micro-batch is in the table; arguments as of `DeltaTable.has`."""
        return any(said[_QUERY] == query and int(said[_BATCH]) >= batch for said in self._said())

    def end(self, name: str) -> Offsets | None:
        """As `DeltaTable.end`."""
        for said in self._said():
            if said[_QUERY].startswith(f"{name}:") and (end := json.loads(said[_END])) is not None:
                return dict(end)
        return None

    def _said(self) -> list[dict[str, Any]]:
        """What the last commit of each query says, and what there is in snapshots; the newest first."""
        if self._table is None and not self.exists():
            return []
        table = self._table.refresh()
        last = [json.loads(value) for name, value in table.properties.items() if name.startswith(_LAST)]
        snapshots = [
            {_SEQUENCE: one.sequence_number, **one.summary.additional_properties}
            for one in table.snapshots()
            if one.summary and _QUERY in one.summary.additional_properties
        ]
        return sorted([*last, *snapshots], key=lambda said: int(said[_SEQUENCE]), reverse=True)

    def append(self, frame: DataFrame, query: str, batch: int, end: Offsets | None) -> int:
        """As `DeltaTable.append`."""
        if self.has(query, batch):
            return 0
        self._make_fit(frame)
        files = lake_files.written(frame, f"{self.location}/data", self._by, keep=True)
        process.crash_at("before_commit", batch)
        if files:
            said = {_QUERY: query, _BATCH: str(batch), _END: json.dumps(end)}
            last = {_SEQUENCE: self._table.metadata.last_sequence_number + 1, **said}
            paths = [f"{self._table.location()}/data/{one.path}" for one in files]
            with self._table.transaction() as commit:
                commit.add_files(paths, snapshot_properties=said, check_duplicate_files=False)
                commit.set_properties(_kept([last]))
            if len(self._table.snapshots()) > MOST_SNAPSHOTS:
                self._limit()
        process.crash_at("after_commit", batch)
        return len(files)

    def replace(self, frame: DataFrame, query: str) -> int:
        """As `DeltaTable.replace`; returns the number of the snapshot in their sequence."""
        from pyiceberg.io.pyarrow import parquet_files_to_data_files

        self._make_fit(frame)
        files_before = self._undeleted()
        made = lake_files.written(frame, f"{self.location}/data", self._by, keep=True)
        process.crash_at("before_replace", 0)
        table = self._table.refresh()
        paths = [f"{table.location()}/data/{one.path}" for one in made]
        fresh = list(parquet_files_to_data_files(table.io, table.metadata, iter(paths)))
        if files_before or fresh:
            attempted(table, lambda change: _replace(change, files_before, fresh))
        process.crash_at("after_replace", 0)
        return int(self._table.refresh().metadata.last_sequence_number)

    def _undeleted(self) -> list[Any]:
        tasks = list(self._table.refresh().scan().plan_files())
        if any(task.delete_files for task in tasks):
            raise PipelineError(
                f"{self.location} has rows that another program has deleted: let that write its files anew first."
            )
        return [task.file for task in tasks]

    def _limit(self) -> None:
        from pyiceberg.exceptions import CommitFailedException

        with suppress(PipelineError, CommitFailedException):  # the next micro-batch does it
            limit_snapshots(self._table, _kept(reversed(self._said())))

    def _make_fit(self, frame: DataFrame) -> None:
        """Make the table, or adds the columns that it doesn't have yet; once is enough for a query."""
        if self._fits:
            return
        import pyarrow

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
                f"The table in {self.location} is partitioned by {', '.join(by) or 'nothing'}: write partition_by so, "
                "or give another path."
            )
        try:
            with self._table.update_schema() as changes:
                changes.union_by_name(schema)
        except Exception as error:
            raise PipelineError(
                f"The table in {self.location} has a column of another type than the result: {error}; give it another "
                "name, or the table another path."
            ) from None
        self._fits = True

    def optimize(self, target_bytes: int | None = None) -> lake_files.Joined:
        """As `DeltaTable.optimize`."""
        return join_files(self._there(), target_bytes)

    def vacuum(self, retain: timedelta) -> int:
        """As `DeltaTable.vacuum`, with snapshots instead of versions."""
        before = datetime.now(UTC) - retain
        return expire_snapshots(self._there(), before, _kept(reversed(self._said())))

    def check_condition(self, condition: str) -> None:
        """As `DeltaTable.check_condition`."""
        with _condition_told(self._there(), condition):
            _check_names(self._there(), condition)
            list(self._there().scan(row_filter=condition, limit=0).plan_files())

    def delete(self, condition: str) -> int:
        """As `DeltaTable.delete`."""
        return delete_rows(self._there(), condition)

    def _there(self) -> Any:
        if self._table is None and not self.exists():
            raise PipelineError(f"There is no Iceberg table in {self.location}: run its query first.")
        return self._table


def _kept(said: Iterable[dict[str, Any]]) -> dict[str, str]:
    """The properties of a table that keep what commits say; the last of each query counts."""
    return {f"{_LAST}{each[_QUERY]}": json.dumps(each) for each in said}


def is_table(location: Path | str) -> bool:
    """Return whether a folder of this machine is an Iceberg table."""
    return not locations.is_elsewhere(location) and any((Path(location) / "metadata").glob("*.metadata.json"))


def files(location: str) -> list[str]:
    """Return the paths of the Parquet files that a table is made of.

    Raises:
        PipelineError: pyiceberg is missing, or other programs have deleted rows in a way that the files don't show.
    """
    found = IcebergTable(location)
    tasks = list(found._table.scan().plan_files()) if found.exists() else []
    if any(task.delete_files for task in tasks):
        raise PipelineError(f"{location} has deleted rows: read it by pyiceberg, or by Spark with Iceberg's jar.")
    return sorted(task.file.file_path.removeprefix("file://") for task in tasks)


def frame(spark: SparkSession, location: str) -> DataFrame:
    """Return the rows of a table, by Spark's own Parquet reader.

    Raises:
        PipelineError: as `files`, or nothing has been written.
    """
    paths = files(location)
    if not paths:
        raise PipelineError(f"There are no rows in {location}: run its query first.")
    return spark.read.option("mergeSchema", "true").parquet(*paths)


def check_installed() -> None:
    """Raise PipelineError when pyiceberg or what its catalogs in files need is missing."""
    try:
        import pyiceberg.catalog.sql  # noqa: F401
    except ImportError:
        raise PipelineError(NEEDS_ICEBERG) from None


def _store() -> dict[str, str]:
    """Where an object store is, from the variables that pyarrow and deltalake know; pyiceberg has names of its own."""
    variables = {"s3.endpoint": "AWS_ENDPOINT_URL", "s3.region": "AWS_REGION"}
    return {name: value for name, variable in variables.items() if (value := os.environ.get(variable))}


def _catalog(location: str) -> Any:
    check_installed()
    from pyiceberg.catalog import load_catalog
    from pyiceberg.catalog.sql import SqlCatalog
    from pyiceberg.utils.config import Config

    if configured := Config().get_catalog_config(CATALOG):  # pyiceberg itself has read it when it was imported
        return load_catalog(CATALOG, **{**_store(), **cast("dict[str, str]", configured)})
    if locations.is_elsewhere(location):
        raise PipelineError(
            f"An Iceberg table in {location} needs a catalog that others see: configure {CATALOG!r} for pyiceberg, for "
            "instance with the variable PYICEBERG_CATALOG__SMQRT__URI."
        )
    root = Path(location).parent
    root.mkdir(parents=True, exist_ok=True)
    return SqlCatalog(CATALOG, uri=f"sqlite:///{root / FILE}", warehouse=root.as_uri())


# ---- upkeep: small files are joined, old snapshots expire, and files that nobody refers to go

TARGET_BYTES = 128 << 20
"""Size of files that others are joined to, where the table's `write.target-file-size-bytes` doesn't say another."""
MOST_SNAPSHOTS = 2000
_TARGET_PROPERTY = "write.target-file-size-bytes"
_SMALL = 0.75
"""So much of the target is large enough to be left alone."""
_ATTEMPTS = 5
"""Of a commit: each time a query has appended in the same moment."""
_FOLDERS = ("data", "metadata")


def join_files(table: Table, target_bytes: int | None) -> Joined:
    """Join the small files of each partition, in one snapshot.

    Args:
        table: pyiceberg's.
        target_bytes: about the size of the large ones, at most.

    Raises:
        PipelineError: others go on changing the table, or have just changed the same files.
    """
    target_bytes = target_bytes or int(table.properties.get(_TARGET_PROPERTY) or TARGET_BYTES)
    groups = list(_groups(table.refresh(), target_bytes))
    if not groups:
        return Joined(0, 0)
    large = [made for group in groups for made in _large(table, group)]
    small = [task.file for group in groups for task in group]
    attempted(table, lambda change: _replace(change, small, large))
    return Joined(len(small), len(large))


def _groups(table: Table, target_bytes: int) -> Iterator[list[Any]]:
    """Yield files to be joined; those with deleted rows beside them are left to engines that know all kinds."""
    by_partition: dict[Any, list[Any]] = defaultdict(list)
    for task in table.scan().plan_files():
        is_small = task.file.file_size_in_bytes < _SMALL * target_bytes
        if is_small and not task.delete_files and task.file.spec_id == table.spec().spec_id:
            by_partition[task.file.partition].append(task)
    for tasks in by_partition.values():
        yield from (group for group in _filled(tasks, target_bytes) if len(group) > 1)


def _filled(tasks: Iterable[Any], target_bytes: int) -> Iterator[list[Any]]:
    group: list[Any] = []
    size_bytes = 0
    for task in sorted(tasks, key=lambda task: task.file.file_size_in_bytes):
        if group and size_bytes + task.file.file_size_in_bytes > target_bytes:
            yield group
            group, size_bytes = [], 0
        group.append(task)
        size_bytes += task.file.file_size_in_bytes
    yield group


def _large(table: Table, tasks: list[Any]) -> Iterator[Any]:
    """Write the rows of files, one of them at a time in memory, with the columns that the table has now."""
    from pyiceberg.expressions import AlwaysTrue
    from pyiceberg.io.pyarrow import ArrowScan, parquet_files_to_data_files, schema_to_pyarrow

    schema = schema_to_pyarrow(table.schema())
    scan = ArrowScan(table.metadata, table.io, table.schema(), AlwaysTrue())
    batches = (batch.cast(schema) for task in tasks for batch in scan.to_record_batches([task]))
    rows = sum(task.file.record_count for task in tasks)
    size_bytes = sum(task.file.file_size_in_bytes for task in tasks)
    folder = f"{table.location()}/data"
    files = lake_files.stored(batches, schema, folder, group_rows=lake_files.group_rows(rows, size_bytes))
    paths = [f"{folder}/{file.path}" for file in files]
    return parquet_files_to_data_files(table.io, table.metadata, iter(paths))


def _replace(change: Transaction, small: Iterable[Any], large: Iterable[Any]) -> None:
    with change.update_snapshot().overwrite() as snapshot:
        for file in small:
            snapshot.delete_data_file(file)
        for file in large:
            snapshot.append_data_file(file)


def attempted(table: Table, change: Callable[[Transaction], object]) -> None:
    """Commit a change of a table, again where somebody else was quicker.

    Raises:
        PipelineError: that went on, or what is to be changed is there no more.
    """
    from pyiceberg.exceptions import CommitFailedException, ValidationException

    for attempt in range(_ATTEMPTS):
        try:
            with table.refresh().transaction() as transaction:
                change(transaction)
            return
        except (CommitFailedException, ValidationException) as error:
            if attempt == _ATTEMPTS - 1:
                raise PipelineError(
                    f"{table.location()} was changed by others in the same moment, {_ATTEMPTS} times: {error}. Nothing "
                    "is lost; run it again."
                ) from None


@contextmanager
def _condition_told(table: Table, condition: str) -> Iterator[None]:
    from pyparsing import ParseBaseException

    try:
        yield
    except ParseBaseException:  # it tells its whole grammar
        raise PipelineError(f"""{condition!r} is no condition: write it like "n < 5 and k = 'a'".""") from None
    except Exception as error:  # of its parser, of types, of columns
        raise PipelineError(f"{condition!r} can't be deleted from {table.location()}: {error}.") from None


def _check_names(table: Table, condition: str) -> None:
    """Reject columns with a dot in their names: pyiceberg finds rows by them, but deletes none, and says nothing."""
    from pyiceberg.expressions.parser import parse
    from pyiceberg.expressions.visitors import bind, extract_field_ids

    asked = extract_field_ids(bind(table.schema(), parse(condition), case_sensitive=True))
    for field in table.schema().fields:
        if "." in field.name and field.field_id in asked:
            raise ValueError(f"pyiceberg deletes nothing by a column with a dot in its name, {field.name!r}; use Spark")


def delete_rows(table: Table, condition: str) -> int:
    """Delete the rows that meet a condition, in SQL as pyiceberg knows it; returns how many.

    Raises:
        PipelineError: it is none.
    """
    known = {one.snapshot_id for one in table.refresh().snapshots()}
    with _condition_told(table, condition):
        _check_names(table, condition)
        table.delete(condition)
    new = [one.summary for one in table.refresh().snapshots() if one.snapshot_id not in known and one.summary]
    figures = [summary.additional_properties for summary in new if summary.operation.value in ("delete", "overwrite")]
    return sum(int(one.get("deleted-records", 0)) - int(one.get("added-records", 0)) for one in figures)


def expire_snapshots(table: Table, before: datetime, properties: Mapping[str, str]) -> int:
    """Forget the snapshots from before a time, except the last one and those that have names; then removes files
    from before that time which nobody refers to, also those that were never committed.

    Args:
        table: pyiceberg's.
        before: the time, with its zone.
        properties: what is known from snapshots only and shall stay known.

    Returns:
        How many files were removed.

    Raises:
        PipelineError: others go on changing the table.
    """
    before_ms = before.timestamp() * 1000
    _forget(table, properties, lambda snapshot: snapshot.timestamp_ms < before_ms)
    return sum(1 for _ in _removed(table.refresh(), before))


def limit_snapshots(table: Table, properties: Mapping[str, str]) -> None:
    """Forget the older half of the snapshots when there are more than `MOST_SNAPSHOTS`: each commit writes and reads a
    description of all. Their files go with the next `expire_snapshots`.

    Args:
        table, properties: as for `expire_snapshots`.

    Raises:
        PipelineError: as `expire_snapshots`.
    """
    numbers = sorted(snapshot.sequence_number or 0 for snapshot in table.snapshots())
    if len(numbers) > MOST_SNAPSHOTS:
        _forget(table, properties, lambda snapshot: (snapshot.sequence_number or 0) < numbers[len(numbers) // 2])


def _forget(table: Table, properties: Mapping[str, str], is_old: Callable[[Any], bool]) -> None:
    if properties:
        attempted(table, lambda change: change.set_properties(dict(properties)))
    heads = {ref.snapshot_id for ref in table.refresh().metadata.refs.values()}
    old = [one.snapshot_id for one in table.snapshots() if is_old(one) and one.snapshot_id not in heads]
    if old:
        table.maintenance.expire_snapshots().by_ids(old).commit()


def _removed(table: Table, before: datetime) -> Iterator[str]:
    from pyarrow import fs

    system, root = locations.filesystem(table.location())
    # Listed before anybody asks what is referred to: what is committed in between was not there, or is in the answer.
    folders = [fs.FileSelector(f"{root}/{name}", allow_not_found=True, recursive=True) for name in _FOLDERS]
    found = [one for folder in folders for one in system.get_file_info(folder) if one.is_file]
    old = {one.path for one in found if one.mtime < before.astimezone(UTC)}
    for path in sorted(old - {locations.filesystem(uri)[1] for uri in set(_referred(table.refresh()))}):
        system.delete_file(path)
        yield path


def _referred(table: Table) -> Iterator[str]:
    """Yield the URIs of all files that a snapshot, or the table itself, refers to."""
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
