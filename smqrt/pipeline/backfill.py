"""The same query once more, on a part of the journal: as a batch, beside the stream, which goes on undisturbed."""

from __future__ import annotations

import hashlib
import json
import threading
from typing import TYPE_CHECKING

from smqrt.errors import PipelineError
from smqrt.journal.remote import open_journal
from smqrt.pipeline import checkpoint, references, session, sinks, tables
from smqrt.pipeline.api import Declaration
from smqrt.pipeline.checkpoint import Offsets
from smqrt.pipeline.discover import Catalog
from smqrt.pipeline.failures import planning_error
from smqrt.pipeline.graph import Graph, JournalSource
from smqrt.pipeline.run_context import RunOptions
from smqrt.pipeline.sinks import as_messages
from smqrt.pipeline.tables import LakeTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def backfill(
    catalog: Catalog,
    name: str,
    options: RunOptions,
    spark: SparkSession | None = None,
    stopping: threading.Event | None = None,
) -> int:
    """Computes a query on the rows between `options.start` and `options.until`.

    A table's rows are written beside those of its stream, into a folder of their own that `tables.files` and
    `tables.frame` know; what the stream or another backfill has written already can't be written again. What is
    published is published once for each range, however often this is called.

    Args:
        catalog: the pipelines.
        name: which query.
        options: how; `republish` must be set for queries that publish.
        spark: a session to use; None starts one and stops it at the end.
        stopping: ends the waiting for a hub that is away.

    Returns:
        0.

    Raises:
        PipelineError: it publishes and `republish` isn't set, the range is empty or written already, or Spark can't
            plan it.
        JournalError: there is no such journal, or the hub is away.
    """
    [declaration] = catalog.select([name])
    if declaration.kind != "table" and not options.republish:
        raise PipelineError(
            f"{declaration.where}: {name} publishes, and old results aren't published again unasked; say --republish."
        )
    task = _Task(catalog, declaration, options, stopping or threading.Event())
    if spark is not None:
        return task.run(spark)
    spark = session.start_spark(options.master, f"smqrt backfill {name}", options.state, options.settings)
    try:
        return task.run(spark)
    finally:
        spark.stop()


class _Task:
    def __init__(
        self, catalog: Catalog, declaration: Declaration, options: RunOptions, stopping: threading.Event
    ) -> None:
        self._catalog, self._declaration, self._options, self._stopping = catalog, declaration, options, stopping
        journal = open_journal(options.journal, options.token, cafile=options.cafile)
        self._start = checkpoint.offsets(journal, options.start)
        self._end = checkpoint.offsets(journal, options.until or "latest", end=True)
        self._folder = options.state / declaration.name
        if not any(self._start.get(node, 0) < seq for node, seq in self._end.items()):
            raise PipelineError(f"There are no rows between {options.start} and {options.until or 'latest'}.")

    def run(self, spark: SparkSession) -> int:
        declaration = self._declaration
        rows = JournalSource(self._options.journal, self._options.token, self._options.cafile)
        # Few messages are published in the order of the rows that they were made of.
        ordered = declaration.kind != "table" and not self._are_many
        graph = Graph(
            self._catalog,
            lambda source: rows.batch(spark, source, self._start, self._end, ordered),
            lambda reference: references.table(spark, reference, self._catalog.folder),
        )
        try:
            frame = graph.frame(declaration)
            self._write(frame) if declaration.kind == "table" else self._publish(frame)
        except PipelineError:
            raise
        except Exception as error:
            raise planning_error(declaration, error) from error
        return 0

    def _write(self, frame: DataFrame) -> None:
        location = tables.location(self._declaration, self._options.app, self._options.tables)
        path = f"{location}{tables.BACKFILL}{self._key()}"
        self._check_unwritten(path)
        if table := tables.open_lake_table(self._declaration, location):
            self._append(frame, table, path)
            return
        checkpoint.add_table_range(self._folder, path, self._start, self._end)
        by = self._declaration.options["partition_by"]
        writer = sinks.partitioned(frame, self._declaration).write.mode("overwrite")
        (writer.partitionBy(*by) if by else writer).parquet(path)
        self._options.report(f"{self._declaration.name}: written to {path}")

    def _check_unwritten(self, path: str) -> None:
        began = checkpoint.start_offsets(self._folder)
        if began is not None and _overlap(self._start, self._end, began, {}):
            raise PipelineError(
                f"{self._declaration.name} has itself written rows from {json.dumps(began)} on; end with --to "
                f"'{json.dumps(began)}', or forget them with smqrt pipeline reset {self._declaration.name}."
            )
        for other, (start, end) in checkpoint.written_ranges(self._folder).items():
            if other != path and _overlap(self._start, self._end, start, end):
                raise PipelineError(f"{other} holds rows of that range already; remove it, or take another range.")

    def _append(self, frame: DataFrame, table: LakeTable, path: str) -> None:
        name = self._declaration.name
        rows = sinks.partitioned(frame, self._declaration)
        new = table.append(rows, f"backfill.{name}.{self._key()}:", 0, None)
        checkpoint.add_table_range(self._folder, path, self._start, self._end)
        what = "written" if new else "nothing to write, or an earlier backfill has done it,"
        self._options.report(f"{name}: {what} to {table.location}")

    def _publish(self, frame: DataFrame) -> None:
        options = self._options
        hub = sinks.CommitClient(
            options.journal, options.token, options.hub_retry_s, self._stopping, cafile=options.cafile
        )
        name = f"backfill.{self._declaration.name}.{self._key()}"
        new = sinks.publish(as_messages(frame, self._declaration), hub, name, 0, self._are_many)
        again = "" if new else " now: there are no results, or an earlier backfill has published them"
        self._options.report(f"{self._declaration.name}: {new} published{again}")

    @property
    def _are_many(self) -> bool:
        return sum(seq - self._start.get(node, 0) for node, seq in self._end.items()) > sinks.MANY_ROWS

    def _key(self) -> str:
        text = json.dumps([self._start, self._end], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _overlap(start: Offsets, end: Offsets, other: Offsets, other_end: Offsets) -> bool:
    """Whether two ranges have rows in common; a node that an end doesn't name goes on for ever."""
    for node, seq in end.items():
        first, last = max(start.get(node, 0), other.get(node, 0)), min(seq, other_end.get(node, seq))
        if first < last:
            return True
    return False
