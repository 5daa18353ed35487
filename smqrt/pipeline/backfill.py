"""The same query once more, on a part of the journal: as a batch, beside the stream, which goes on undisturbed."""

from __future__ import annotations

import hashlib
import json
import threading
from typing import TYPE_CHECKING

from smqrt.errors import PipelineError, SmqrtError
from smqrt.journal.remote import open_journal
from smqrt.pipeline import checkpoint, failing_rows, references, replacing, session, sinks, tables
from smqrt.pipeline.api import Declaration
from smqrt.pipeline.checkpoint import Offsets, QueryStart
from smqrt.pipeline.corrections import Corrections
from smqrt.pipeline.discover import Catalog
from smqrt.pipeline.failures import planning_error
from smqrt.pipeline.graph import Frames, Graph, JournalSource
from smqrt.pipeline.run_context import RunOptions
from smqrt.pipeline.sinks import as_messages
from smqrt.pipeline.tables import LakeTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ONCE_MORE = "--replace computes these rows once more and puts them in the place of the old ones"


def backfill(
    catalog: Catalog,
    name: str,
    options: RunOptions,
    spark: SparkSession | None = None,
    stopping: threading.Event | None = None,
) -> int:
    """Computes a query on the rows between `options.start` and `options.until`.

    A table's rows are written beside those of its stream, into a folder of their own that `tables.files` and
    `tables.frame` know; what the stream or another backfill has written already is only written again with
    `options.replace`, in the place of what is there. Of results those are published that an earlier call has not
    published.

    Args:
        catalog: the pipelines.
        name: which query.
        options: how; `republish` or `replace` must be set for queries that publish.
        spark: a session to use; None starts one and stops it at the end.
        stopping: ends the waiting for a hub that is away.

    Returns:
        0.

    Raises:
        PipelineError: it publishes and neither is set, the range is empty or written already, its rows can't be
            replaced, or Spark can't plan it.
        JournalError: there is no such journal, or the hub is away.
    """
    [declaration] = catalog.select([name])
    if declaration.kind != "table" and not (options.republish or options.replace):
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
        self._folder = options.state / declaration.name
        self._journal = journal = open_journal(options.journal, options.token, cafile=options.cafile)
        self._start = checkpoint.offsets(journal, options.start)
        self._end = checkpoint.offsets(journal, options.until or "latest", end=True)
        self._check_range()
        # Of its own, as the query's stream may run. A second call for this range publishes no letter again.
        self._left_out = failing_rows.LeftOut(key=f"backfill.{declaration.name}.{self._key()}.on_error")

    def _check_range(self) -> None:
        if not any(self._start.get(node, 0) < seq for node, seq in self._end.items()):
            until = self._options.until or "latest"
            raise PipelineError(f"There are no rows between {self._options.start} and {until}.")

    def run(self, spark: SparkSession) -> int:
        while True:
            try:
                self._compute(spark)
            except SmqrtError:
                raise
            except Exception as error:
                if not self._leave_out(spark, error):
                    raise planning_error(self._declaration, error) from error
            else:
                return 0

    def _compute(self, spark: SparkSession) -> None:
        if self._declaration.kind != "table":
            self._publish(spark)
        elif self._options.replace:
            self._replace(spark)
        else:
            self._write(self._frame(spark))

    def _leave_out(self, spark: SparkSession, error: Exception) -> bool:
        """Looks for the rows that it fails with; whether there are any, which are left out from now on."""
        if not failing_rows.is_wanted(self._declaration, error):
            return False

        def compute(start: Offsets, end: Offsets, found: failing_rows.Numbers) -> Exception | None:
            left_out = failing_rows.joined(self._left_out.rows, found)
            graph = self._graph(
                spark, lambda one: failing_rows.without(self._rows.batch(spark, one, start, end), left_out)
            )
            return failing_rows.error_of(lambda: sinks.outgoing(graph.frame(self._declaration), self._declaration))

        span = failing_rows.Span.of((self._start, self._end), self._journal.begin())
        rows = failing_rows.Search(compute, span, self._declaration.name, self._stopping.is_set).rows()
        if rows:
            self._left_out.add(rows, self._declaration.error_topic, self._journal)
            self._left_out.publish(self._hub.commit)
            self._report(failing_rows.told(rows))
        return bool(rows)

    def _frame(self, spark: SparkSession) -> DataFrame:
        # Few messages are published in the order of the rows that they were made of.
        ordered = self._declaration.kind != "table" and not self._are_many
        left_out = self._left_out.rows

        def rows_of(source: Declaration) -> DataFrame:
            rows = self._rows.batch(spark, source, self._start, self._end, ordered)
            return failing_rows.without(rows, left_out)

        return self._graph(spark, rows_of).frame(self._declaration)

    def _graph(self, spark: SparkSession, sources: Frames) -> Graph:
        folder = self._catalog.folder
        return Graph(self._catalog, sources, lambda reference: references.table(spark, reference, folder))

    @property
    def _rows(self) -> JournalSource:
        return JournalSource(self._options.journal, self._options.token, self._options.cafile)

    @property
    def _location(self) -> str:
        return tables.location(self._declaration, self._options.app, self._options.tables)

    def _report(self, sentence: str) -> None:
        self._options.report(f"{self._declaration.name}: {sentence}")

    # ---- rows of a table

    def _replace(self, spark: SparkSession) -> None:
        declaration = self._declaration
        with replacing.standing_still(self._folder, declaration):
            end = replacing.stream_end(self._folder, declaration)
            if end is not None:
                start = QueryStart({}, None)
                graph = self._graph(spark, lambda one: self._rows.stream(spark, one, start, one.name))
                replacing.check_stateless(graph.frame(declaration), declaration)
                self._end = {node: min(seq, end.get(node, seq)) for node, seq in self._end.items()}
                self._check_range()
            found = (self._start, self._end, self._key(), end)
            replacement = replacing.Replacement(declaration, self._folder, self._location, *found)
            self._report(replacement.apply(self._frame(spark)))

    def _write(self, frame: DataFrame) -> None:
        location = self._location
        path = f"{location}{tables.BACKFILL}{self._key()}"
        self._check_unwritten(path)
        if table := tables.open_lake_table(self._declaration, location):
            self._append(frame, table, path)
            return
        if path in checkpoint.written_ranges(self._folder):
            self._report(f"nothing written: an earlier backfill has done it, to {path}; {_ONCE_MORE}")
            return
        checkpoint.add_table_range(self._folder, path, self._start, self._end)
        by = self._declaration.options["partition_by"]
        writer = sinks.partitioned(frame, self._declaration).write.mode("overwrite")
        (writer.partitionBy(*by) if by else writer).parquet(path)
        self._report(f"written to {path}")

    def _check_unwritten(self, path: str) -> None:
        began = checkpoint.start_offsets(self._folder)
        if began is not None and checkpoint.overlap(self._start, self._end, began, {}):
            raise PipelineError(
                f"{self._declaration.name} has itself written rows from {json.dumps(began)} on; end with --to "
                f"'{json.dumps(began)}', {_ONCE_MORE}, or forget them with smqrt pipeline reset "
                f"{self._declaration.name}."
            )
        for other, (start, end) in checkpoint.written_ranges(self._folder).items():
            if other != path and checkpoint.overlap(self._start, self._end, start, end):
                raise PipelineError(f"{other} holds rows of that range already; {_ONCE_MORE}, or take another range.")

    def _append(self, frame: DataFrame, table: LakeTable, path: str) -> None:
        rows = sinks.partitioned(frame, self._declaration)
        new = table.append(rows, f"backfill.{self._declaration.name}.{self._key()}:", 0, None)
        checkpoint.add_table_range(self._folder, path, self._start, self._end)
        why = "there are no rows, or an earlier backfill has written them"
        self._report(f"written to {table.location}" if new else f"nothing written: {why}; {_ONCE_MORE}")

    # ---- results on topics

    def _publish(self, spark: SparkSession) -> None:
        hub = self._hub
        versions = Corrections(spark, self._folder, lambda frame, key, many: sinks.publish(frame, hub, key, 0, many))
        messages = as_messages(self._frame(spark), self._declaration)
        for told in versions.publish(messages, self._start, self._end):
            self._report(told)

    @property
    def _hub(self) -> sinks.CommitClient:
        options = self._options
        return sinks.CommitClient(
            options.journal,
            options.token,
            options.hub_retry_s,
            self._stopping,
            cafile=options.cafile,
            letters=self._declaration.error_topic,
            left_out=lambda rows: self._report(f"{rows} results are too long for a message, and are left out"),
        )

    @property
    def _are_many(self) -> bool:
        return sum(seq - self._start.get(node, 0) for node, seq in self._end.items()) > sinks.MANY_ROWS

    def _key(self) -> str:
        text = json.dumps([self._start, self._end], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]
