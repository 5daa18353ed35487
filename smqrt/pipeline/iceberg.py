"""Iceberg tables of pipelines: each micro-batch is one snapshot, keyed by query and number, so that it comes once.

Spark's tasks write the files, the driver adds their names with the library `pyiceberg`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from smqrt.errors import PipelineError
from smqrt.journal import uris
from smqrt.pipeline import faults, iceberg_upkeep, lake_files
from smqrt.pipeline.checkpoint import Offsets

if TYPE_CHECKING:
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
        """Whether the catalog has the table; one whose folder has gone is taken off."""
        from pyiceberg.exceptions import NoSuchTableError

        with suppress(NoSuchTableError):
            try:
                self._table = self._catalog.load_table(self._name)
            except FileNotFoundError:
                self._catalog.drop_table(self._name)
                self._table = None
        return self._table is not None

    def has(self, query: str, batch: int) -> bool:
        """Whether a micro-batch is in the table; arguments as of `DeltaTable.has`."""
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
        faults.point("before_commit", batch)
        if files:
            said = {_QUERY: query, _BATCH: str(batch), _END: json.dumps(end)}
            last = {_SEQUENCE: self._table.metadata.last_sequence_number + 1, **said}
            paths = [f"{self._table.location()}/data/{one.path}" for one in files]
            with self._table.transaction() as commit:
                commit.add_files(paths, snapshot_properties=said, check_duplicate_files=False)
                commit.set_properties(_kept([last]))
            if len(self._table.snapshots()) > iceberg_upkeep.MOST_SNAPSHOTS:
                self._limit()
        faults.point("after_commit", batch)
        return len(files)

    def _limit(self) -> None:
        from pyiceberg.exceptions import CommitFailedException

        with suppress(PipelineError, CommitFailedException):  # the next micro-batch does it
            iceberg_upkeep.limit(self._table, _kept(reversed(self._said())))

    def _make_fit(self, frame: DataFrame) -> None:
        """Makes the table, or adds the columns that it doesn't have yet; once is enough for a query."""
        if self._fits:
            return
        import pyarrow

        schema = pyarrow.schema([field.with_nullable(True) for field in frame.limit(0).toArrow().schema])
        if self._table is None:
            self._catalog.create_namespace_if_not_exists(NAMESPACE)
            where = self.location if uris.scheme(self.location) else f"file://{self.location}"
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
        return iceberg_upkeep.join(self._there(), target_bytes)

    def vacuum(self, retain: timedelta) -> int:
        """As `DeltaTable.vacuum`, with snapshots instead of versions."""
        before = datetime.now(UTC) - retain
        return iceberg_upkeep.expire(self._there(), before, _kept(reversed(self._said())))

    def delete(self, condition: str) -> int:
        """As `DeltaTable.delete`."""
        return iceberg_upkeep.delete(self._there(), condition)

    def _there(self) -> Any:
        if self._table is None and not self.exists():
            raise PipelineError(f"There is no Iceberg table in {self.location}: run its query first.")
        return self._table


def _kept(said: Iterable[dict[str, Any]]) -> dict[str, str]:
    """The properties of a table that keep what commits say; the last of each query counts."""
    return {f"{_LAST}{each[_QUERY]}": json.dumps(each) for each in said}


def is_table(location: Path | str) -> bool:
    """Whether a folder of this machine is an Iceberg table."""
    return not uris.is_elsewhere(location) and any((Path(location) / "metadata").glob("*.metadata.json"))


def files(location: str) -> list[str]:
    """Returns the paths of the Parquet files that a table is made of.

    Raises:
        PipelineError: pyiceberg is missing, or other programs have deleted rows in a way that the files don't show.
    """
    found = IcebergTable(location)
    tasks = list(found._table.scan().plan_files()) if found.exists() else []
    if any(task.delete_files for task in tasks):
        raise PipelineError(f"{location} has deleted rows: read it by pyiceberg, or by Spark with Iceberg's jar.")
    return sorted(task.file.file_path.removeprefix("file://") for task in tasks)


def frame(spark: SparkSession, location: str) -> DataFrame:
    """Returns the rows of a table, by Spark's own Parquet reader.

    Raises:
        PipelineError: as `files`, or nothing has been written.
    """
    paths = files(location)
    if not paths:
        raise PipelineError(f"There are no rows in {location}: run its query first.")
    return spark.read.option("mergeSchema", "true").parquet(*paths)


def check_installed() -> None:
    """Raises PipelineError when pyiceberg or what its catalogs in files need is missing."""
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
    if uris.is_elsewhere(location):
        raise PipelineError(
            f"An Iceberg table in {location} needs a catalog that others see: configure {CATALOG!r} for pyiceberg, for "
            "instance with the variable PYICEBERG_CATALOG__SMQRT__URI."
        )
    root = Path(location).parent
    root.mkdir(parents=True, exist_ok=True)
    return SqlCatalog(CATALOG, uri=f"sqlite:///{root / FILE}", warehouse=root.as_uri())
