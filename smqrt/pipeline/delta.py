"""Delta tables of pipelines: each micro-batch is one commit, keyed by query and number, so that it comes once.

Spark's tasks write the files, the driver commits their names with the library `deltalake`. Where Spark has Delta's own
jar (`--packages`), that writes and commits, with the same keys.
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
from smqrt.pipeline import lake_files, process
from smqrt.pipeline.references import column

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_KEY = "smqrt"
"""Of what a commit says about the rows of the journal that it holds."""
_JAR = "io.delta.sql.DeltaSparkSessionExtension"
_ESCAPED = re.compile("%([0-9A-Fa-f]{2})")
_HISTORY = 1000
"""So many commits back somebody looks for one of ours: others are made by compaction and by vacuum."""


class DeltaTable:
    """A table in a folder or an object store.

    Args:
        location: folder, or a URI that deltalake knows, such as s3://bucket/x; keys and the like are in the
            environment, under the names that deltalake knows (AWS_ACCESS_KEY_ID …).
        partition_by: its columns that become folders.

    Attributes:
        location: as given.

    Raises:
        PipelineError: deltalake is missing, or there is something else in the folder.
    """

    def __init__(self, location: str, partition_by: Sequence[str] = ()) -> None:
        self.location, self._by = location, list(partition_by)
        self._deltalake = import_deltalake()
        if not locations.is_elsewhere(location) and (Path(location) / "_spark_metadata").is_dir():
            raise PipelineError(
                f"{location} has a table of plain Parquet files that a stream has written: give the Delta table "
                "another path."
            )
        self._table: Any = self._deltalake.DeltaTable(location) if self.exists() else None

    def exists(self) -> bool:
        """Return whether there is a Delta table."""
        return bool(self._deltalake.DeltaTable.is_deltatable(self.location))

    def has(self, query: str, batch: int) -> bool:
        """Return whether a micro-batch is in the table.

        Args:
            query: a key of the query, its name and a colon first.
            batch: number of the micro-batch.
        """
        last = self._fresh().transaction_version(query) if self._table else None
        return last is not None and last >= batch

    def end(self, name: str) -> Offsets | None:
        """Return where the rows end that a query has read for it, the next of each node; None when its log doesn't
        say it.
        """
        for entry in self._fresh().history(_HISTORY) if self._table else ():
            said = entry.get(_KEY) or _user_metadata(entry)
            if str(said.get("query")).startswith(f"{name}:") and said.get("end") is not None:
                return dict(said["end"])
        return None

    def append(self, frame: DataFrame, query: str, batch: int, end: Offsets | None) -> int:
        """Append the rows of a micro-batch, once, however often it is called.

        Args:
            frame: the rows.
            query, batch: as for `has`.
            end: where the rows of the journal end of which it was made; None says nothing of it.

        Returns:
            How many files were written; 0 when the table has them already.

        Raises:
            PipelineError: its columns don't fit those of the table.
        """
        if self.has(query, batch):
            return 0
        said = {"query": query, "batch": batch, "end": end}
        if _has_jar(frame.sparkSession):
            return self._append_by_spark(frame, said)
        schema = self._fitting(frame)
        files = lake_files.written(frame, self.location, self._by)
        process.crash_at("before_commit", batch)
        if files:
            self._commit(schema, files, said)
        process.crash_at("after_commit", batch)
        return len(files)

    def replace(self, frame: DataFrame, query: str) -> int:
        """Replace all rows, in one commit; who reads the table sees the ones or the others.

        Args:
            frame: the new rows, which may be made of the old ones.
            query: a name for the commit, as of `append`, but none that a query has.

        Returns:
            The version of the table.

        Raises:
            PipelineError: its columns don't fit those of the table.
        """
        said = {"query": query, "batch": 0, "end": None}
        if _has_jar(frame.sparkSession):
            self._append_by_spark(frame, said, "overwrite")
        else:
            schema = self._fitting(frame)
            files = lake_files.written(frame, self.location, self._by)
            process.crash_at("before_replace", 0)
            self._commit(schema, files, said, "overwrite")
        process.crash_at("after_replace", 0)
        self._table.update_incremental()
        return int(self._table.version())

    def _commit(
        self, schema: Any, files: list[lake_files.LakeFile], said: dict[str, Any], mode: str = "append"
    ) -> None:
        from deltalake.transaction import AddAction

        now_ms = _now_ms()
        actions = [AddAction(one.path, one.bytes, one.values, now_ms, True, one.statistics()) for one in files]
        key = self._deltalake.Transaction(said["query"], said["batch"])
        properties = self._deltalake.CommitProperties(custom_metadata={_KEY: said}, app_transactions=[key])
        self._table.create_write_transaction(actions, mode, schema, partition_by=self._by, commit_properties=properties)

    def _append_by_spark(self, frame: DataFrame, said: dict[str, Any], mode: str = "append") -> int:
        writer: Any = frame.write.format("delta").mode(mode).option("mergeSchema", "true")
        writer = writer.option("txnAppId", said["query"]).option("txnVersion", said["batch"])
        writer = writer.option("userMetadata", json.dumps({_KEY: said}))
        (writer.partitionBy(*self._by) if self._by else writer).save(self.location)
        self._table = self._table or self._deltalake.DeltaTable(self.location)
        return 1

    def _fitting(self, frame: DataFrame) -> Any:
        """Return the schema of a frame; makes the table, or adds the columns that it doesn't have yet."""
        schema = _schema(self._deltalake, frame)
        if self._table is None:
            self._table = self._deltalake.DeltaTable.create(self.location, schema, partition_by=self._by, mode="ignore")
        known = {field.name: field for field in self._table.schema().fields}
        for field in schema.fields:
            if field.name in known and known[field.name].type != field.type:
                raise PipelineError(
                    f"The table in {self.location} has the column {field.name} as {known[field.name].type}, and the "
                    f"result has it as {field.type}: give it another name, or the table another path."
                )
        if (by := list(self._table.metadata().partition_columns)) != self._by:
            raise PipelineError(
                f"The table in {self.location} is partitioned by {', '.join(by) or 'nothing'}, and that can't "
                "change: write partition_by as it was, or another path."
            )
        if fresh := [field for field in schema.fields if field.name not in known]:
            self._table.alter.add_columns(fresh)
        return schema

    def optimize(self, target_bytes: int | None = None) -> lake_files.Joined:
        """Join small files to large ones. Rows stay as they are, older versions too.

        Args:
            target_bytes: about the size of large ones; the library knows one.

        Raises:
            PipelineError: there is no table.
        """
        figures = self._fresh().optimize.compact(target_size=target_bytes)
        return lake_files.Joined(figures["numFilesRemoved"], figures["numFilesAdded"])

    def vacuum(self, retain: timedelta) -> int:
        """Remove files that no version within `retain` reads, also those that were never committed.

        Returns:
            How many.
        """
        hours = max(0, round(retain.total_seconds() / 3600))
        table = self._fresh()
        gone = table.vacuum(hours, dry_run=False, enforce_retention_duration=False, full=True)
        table.create_checkpoint()
        table.cleanup_metadata()
        return len(gone)

    def check_condition(self, condition: str) -> None:
        """Say whether it is a condition of SQL for this table; errors as of `delete`."""
        table = self._fresh()
        try:
            question = self._deltalake.QueryBuilder().register("t", table)
            list(question.execute(f"select 1 from t where ({condition}) limit 0"))
        except self._deltalake.exceptions.DeltaError as error:
            raise PipelineError(f"{condition!r} can't be deleted from {self.location}: {one_line(error)}.") from None

    def delete(self, condition: str) -> int:
        """Delete the rows that meet a condition of SQL; returns how many.

        Raises:
            PipelineError: it is none.
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
    """Return whether a folder or URI is a Delta table, as far as deltalake knows it."""
    with suppress(Exception):  # it isn't installed, or knows no such URI
        return bool(import_deltalake().DeltaTable.is_deltatable(location))
    return False


def frame(spark: SparkSession, location: str) -> DataFrame:
    """Return the rows of a table: by Delta's jar where Spark has it, else by Spark's own Parquet reader.

    Raises:
        PipelineError: deltalake is missing.
    """
    from pyspark.sql.types import StringType, StructField, StructType

    if _has_jar(spark):
        return spark.read.format("delta").load(location)
    table = import_deltalake().DeltaTable(location)
    schema = StructType.fromJson(json.loads(table.schema().to_json()))
    paths = table.file_uris()
    if not paths:
        return spark.createDataFrame([], schema)
    # Values of partitions are in names of folders, and Spark decodes those of texts only.
    kinds = {name: schema[name].dataType for name in table.metadata().partition_columns}
    as_texts = StructType([StructField(f.name, StringType() if f.name in kinds else f.dataType) for f in schema])
    found = spark.read.schema(as_texts).option("basePath", location).parquet(*paths)
    values = {name: _decoded(name, paths).cast(kind) for name, kind in kinds.items()}
    return found.withColumns(values) if values else found


def _decoded(name: str, paths: Sequence[str]) -> Column:
    """Return the values of a partition: Spark takes each byte of `%C3%A9` for a letter, where others write UTF-8."""
    from pyspark.sql import functions as F

    pairs = (folder.partition("=")[::2] for path in paths if "%" in path for folder in path.split("/"))
    folders = {value for key, value in pairs if unquote(key) == name}
    by_spark = {one: _ESCAPED.sub(lambda byte: chr(int(byte[1], 16)), one) for one in folders}
    wrong = {seen: unquote(one) for one, seen in by_spark.items() if seen != unquote(one)}
    if not wrong:
        return column(name)
    right = F.create_map(*(F.lit(text) for pair in wrong.items() for text in pair))
    return F.coalesce(F.element_at(right, column(name)), column(name))


def files(location: str) -> list[str]:
    """Return the paths or URIs of the Parquet files that a Delta table is made of.

    Raises:
        PipelineError: deltalake is missing.
    """
    return sorted(import_deltalake().DeltaTable(location).file_uris())


def settings(packages: str) -> dict[str, str]:
    """Return the settings that Delta's jar needs, when `packages`, coordinates of Maven between commas, has it."""
    if ":delta-spark_" not in packages:
        return {}
    return {
        "spark.sql.extensions": _JAR,
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    }


def _has_jar(spark: SparkSession) -> bool:
    return _JAR in str(spark.conf.get("spark.sql.extensions", ""))


def _schema(deltalake: Any, frame: DataFrame) -> Any:
    """Delta writes schemas as Spark does. Every column may be null: what is published today may lack one tomorrow."""
    fields = [json.loads(field.json()) | {"nullable": True} for field in frame.schema]
    try:
        return deltalake.Schema.from_json(json.dumps({"type": "struct", "fields": fields}))
    except Exception as error:
        raise PipelineError(f"A Delta table can't have these columns: {error}.") from None


def _user_metadata(entry: dict[str, Any]) -> dict[str, Any]:
    """What a commit of Spark's own writer says."""
    try:
        return dict(json.loads(entry.get("userMetadata") or "{}").get(_KEY) or {})
    except (ValueError, TypeError, AttributeError):  # somebody else's
        return {}


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
