"""Delta tables of pipelines: each micro-batch is one commit, with query and number as its key.

Spark's tasks write the files; the driver commits their names with the library `deltalake`. If Spark has Delta's jar
(`--packages`), the jar writes and commits, with the same keys.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from smqrt.errors import PipelineError
from smqrt.journal import files as locations
from smqrt.journal.delta_table import import_deltalake, one_line
from smqrt.journal.reader import Offsets
from smqrt.pipeline import lake_files, status
from smqrt.pipeline.discover import column

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_KEY = "smqrt"
"""The field of a commit with the position of its rows in the journal."""
_JAR = "io.delta.sql.DeltaSparkSessionExtension"
_ESCAPED = re.compile("%([0-9A-Fa-f]{2})")
_HISTORY = 1000
"""The maximum number of commits to search for one of a pipeline; compaction and vacuum make other commits."""


class DeltaTable:
    """A table in a folder or an object store.

    Args:
        location: folder, or a URI that deltalake supports, such as s3://bucket/x. Environment variables with
            deltalake's names contain the credentials (AWS_ACCESS_KEY_ID …).
        partition_by: its columns that become folders.

    Attributes:
        location: the argument.

    Raises:
        PipelineError: deltalake is missing, or the folder contains a table of another format.
    """

    def __init__(self, location: str, partition_by: Sequence[str] = ()) -> None:
        self.location, self._by = location, list(partition_by)
        self._deltalake = import_deltalake()
        if not locations.is_elsewhere(location) and (Path(location) / "_spark_metadata").is_dir():
            raise PipelineError(
                f"{location} has a table of plain Parquet files that a stream has written: use another path for the "
                "Delta table."
            )
        self._table: Any = self._deltalake.DeltaTable(location) if self.exists() else None

    def exists(self) -> bool:
        """Return whether there is a Delta table."""
        return bool(self._deltalake.DeltaTable.is_deltatable(self.location))

    def has(self, query: str, batch: int) -> bool:
        """Return whether a micro-batch is in the table.

        Args:
            query: the key of the query, which begins with its name and a colon.
            batch: number of the micro-batch.
        """
        last = self._fresh().transaction_version(query) if self._table else None
        return last is not None and last >= batch

    def end(self, name: str) -> Offsets | None:
        """Return the end of the rows of a query, the next row of each node; None when the log does not record it."""
        for entry in self._fresh().history(_HISTORY) if self._table else ():
            commit = entry.get(_KEY)
            if not commit:
                with suppress(ValueError, TypeError, AttributeError):  # the metadata of another program
                    commit = json.loads(entry.get("userMetadata") or "{}").get(_KEY)  # of a commit by Delta's jar
            if (
                isinstance(commit, dict)
                and str(commit.get("query")).startswith(f"{name}:")
                and commit.get("end") is not None
            ):
                return dict(commit["end"])
        return None

    def append(self, frame: DataFrame, query: str, batch: int, end: Offsets | None) -> int:
        """Append the rows of a micro-batch; repeated calls append them once.

        Args:
            frame: the rows.
            query, batch: as for `has`.
            end: the end of its rows in the journal; None records no end.

        Returns:
            The number of written files; 0 when the table already has the micro-batch.

        Raises:
            PipelineError: its columns don't match those of the table.
        """
        if self.has(query, batch):
            return 0
        key = {"query": query, "batch": batch, "end": end}
        if _has_jar(frame.sparkSession):
            return self._append_by_spark(frame, key)
        schema = self._ensure_schema(frame)
        files = lake_files.write(frame, self.location, self._by)
        status.crash_at("before_commit", batch)
        if files:
            self._commit(schema, files, key)
        status.crash_at("after_commit", batch)
        return len(files)

    def replace(self, frame: DataFrame, query: str) -> int:
        """Replace all rows in one commit; readers see either the old or the new rows.

        Args:
            frame: the new rows, which may be computed from the old ones.
            query: the key of the commit, different from those of queries.

        Returns:
            The version of the table.

        Raises:
            PipelineError: its columns don't match those of the table.
        """
        key = {"query": query, "batch": 0, "end": None}
        if _has_jar(frame.sparkSession):
            self._append_by_spark(frame, key, "overwrite")
        else:
            schema = self._ensure_schema(frame)
            files = lake_files.write(frame, self.location, self._by)
            status.crash_at("before_replace", 0)
            self._commit(schema, files, key, "overwrite")
        status.crash_at("after_replace", 0)
        self._table.update_incremental()
        return int(self._table.version())

    def _commit(self, schema: Any, files: list[lake_files.LakeFile], key: dict[str, Any], mode: str = "append") -> None:
        from deltalake.transaction import AddAction

        now_ms = time.time_ns() // 1_000_000
        actions = [AddAction(one.path, one.bytes, one.values, now_ms, True, one.statistics()) for one in files]
        # The log keeps the last transaction of each query longer than its commits, so `has` needs no search.
        transaction = self._deltalake.Transaction(key["query"], key["batch"])
        properties = self._deltalake.CommitProperties(custom_metadata={_KEY: key}, app_transactions=[transaction])
        self._table.create_write_transaction(actions, mode, schema, partition_by=self._by, commit_properties=properties)

    def _append_by_spark(self, frame: DataFrame, key: dict[str, Any], mode: str = "append") -> int:
        writer: Any = frame.write.format("delta").mode(mode).option("mergeSchema", "true")
        writer = writer.option("txnAppId", key["query"]).option("txnVersion", key["batch"])
        writer = writer.option("userMetadata", json.dumps({_KEY: key}))
        (writer.partitionBy(*self._by) if self._by else writer).save(self.location)
        self._table = self._table or self._deltalake.DeltaTable(self.location)
        return 1

    def _ensure_schema(self, frame: DataFrame) -> Any:
        """Return the schema of a frame; create the table, or add its missing columns."""
        # Delta writes schemas in Spark's format. Every column is nullable, because later rows may not have it.
        fields = [json.loads(field.json()) | {"nullable": True} for field in frame.schema]
        try:
            schema = self._deltalake.Schema.from_json(json.dumps({"type": "struct", "fields": fields}))
        except Exception as error:
            raise PipelineError(f"A Delta table can't have these columns: {error}.") from None
        if self._table is None:
            self._table = self._deltalake.DeltaTable.create(self.location, schema, partition_by=self._by, mode="ignore")
        known = {field.name: field for field in self._table.schema().fields}
        for field in schema.fields:
            if field.name in known and known[field.name].type != field.type:
                raise PipelineError(
                    f"The table in {self.location} has the column {field.name} as {known[field.name].type}, and the "
                    f"result has it as {field.type}: use another name for the column, or another path for the table."
                )
        if (by := list(self._table.metadata().partition_columns)) != self._by:
            raise PipelineError(
                f"The table in {self.location} is partitioned by {', '.join(by) or 'nothing'}, and that can't "
                "change: use the same partition_by, or another path."
            )
        if fresh := [field for field in schema.fields if field.name not in known]:
            self._table.alter.add_columns(fresh)
        return schema

    def optimize(self, target_bytes: int | None = None) -> lake_files.Joined:
        """Join small files into large ones. The rows do not change, and older versions are kept.

        Args:
            target_bytes: the approximate size of the large files; by default the library's.

        Raises:
            PipelineError: there is no table.
        """
        figures = self._fresh().optimize.compact(target_size=target_bytes)
        return lake_files.Joined(figures["numFilesRemoved"], figures["numFilesAdded"])

    def vacuum(self, retain: timedelta) -> int:
        """Remove files that no version within `retain` reads, including uncommitted ones.

        Returns:
            The number of removed files.
        """
        hours = max(0, round(retain.total_seconds() / 3600))
        table = self._fresh()
        removed = table.vacuum(hours, dry_run=False, enforce_retention_duration=False, full=True)
        # Readers start from the checkpoint, and entries of the log before it can be removed.
        table.create_checkpoint()
        table.cleanup_metadata()
        return len(removed)

    def check_condition(self, condition: str) -> None:
        """Check a SQL condition for this table. Raises as `delete`."""
        table = self._fresh()
        try:
            builder = self._deltalake.QueryBuilder().register("t", table)
            list(builder.execute(f"select 1 from t where ({condition}) limit 0"))  # plans the query, reads no rows
        except self._deltalake.exceptions.DeltaError as error:
            raise PipelineError(f"{condition!r} can't be deleted from {self.location}: {one_line(error)}.") from None

    def delete(self, condition: str) -> int:
        """Delete the rows that meet a SQL condition; return their number.

        Raises:
            PipelineError: the condition is invalid.
        """
        table = self._fresh()
        try:
            return int(table.delete(condition).get("num_deleted_rows") or 0)
        except self._deltalake.exceptions.DeltaError as error:
            raise PipelineError(f"{condition!r} can't be deleted from {self.location}: {one_line(error)}.") from None

    def _fresh(self) -> Any:
        if self._table is None:
            raise PipelineError(f"There is no Delta table in {self.location}: run its query first.")
        self._table.update_incremental()
        return self._table


def is_table(location: str) -> bool:
    """Return whether a folder or URI is a Delta table that deltalake can read."""
    with suppress(Exception):  # it isn't installed, or doesn't support the URI
        return bool(import_deltalake().DeltaTable.is_deltatable(location))
    return False


def frame(spark: SparkSession, location: str) -> DataFrame:
    """Return the rows of a table: with Delta's jar if Spark has it, else with Spark's own Parquet reader.

    Raises:
        PipelineError: deltalake is missing.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.types import StringType, StructField, StructType

    if _has_jar(spark):
        return spark.read.format("delta").load(location)
    table = import_deltalake().DeltaTable(location)
    schema = StructType.fromJson(json.loads(table.schema().to_json()))
    paths = table.file_uris()
    if not paths:
        return spark.createDataFrame([], schema)
    # The values of partitions are in the names of folders, and Spark decodes only those of string columns.
    kinds = {name: schema[name].dataType for name in table.metadata().partition_columns}
    as_strings = StructType([StructField(f.name, StringType() if f.name in kinds else f.dataType) for f in schema])
    found = spark.read.schema(as_strings).option("basePath", location).parquet(*paths)
    values: dict[str, Column] = {}
    for name, kind in kinds.items():
        # Folders are named in UTF-8, and Spark makes each byte of `%C3%A9` a character: such values are replaced.
        pairs = (folder.partition("=")[::2] for path in paths if "%" in path for folder in path.split("/"))
        names = {value for key, value in pairs if unquote(key) == name}
        by_spark = {one: _ESCAPED.sub(lambda byte: chr(int(byte[1], 16)), one) for one in names}
        wrong = {seen: unquote(one) for one, seen in by_spark.items() if seen != unquote(one)}
        value = column(name)
        if wrong:
            right = F.create_map(*(F.lit(text) for pair in wrong.items() for text in pair))
            value = F.coalesce(F.element_at(right, value), value)
        values[name] = value.cast(kind)
    return found.withColumns(values) if values else found


def files(location: str) -> list[str]:
    """Return the paths or URIs of the Parquet files of a Delta table.

    Raises:
        PipelineError: deltalake is missing.
    """
    return sorted(import_deltalake().DeltaTable(location).file_uris())


def settings(packages: str) -> dict[str, str]:
    """Return the settings for Delta's jar if `packages`, a list of Maven coordinates with commas, contains it."""
    if ":delta-spark_" not in packages:
        return {}
    return {
        "spark.sql.extensions": _JAR,
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    }


def _has_jar(spark: SparkSession) -> bool:
    return _JAR in str(spark.conf.get("spark.sql.extensions", ""))
