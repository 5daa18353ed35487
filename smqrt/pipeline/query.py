"""One query of a running pipeline: started, looked after, started anew when it fails, stopped."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smqrt.errors import PipelineError, SmqrtError
from smqrt.journal import commit, files
from smqrt.pipeline import (
    api,
    checkpoint,
    failing_rows,
    failures,
    process,
    resume,
    session,
    sinks,
    stateful_plan,
    tables,
)
from smqrt.pipeline.checkpoint import Offsets
from smqrt.pipeline.failures import (
    is_away,
    is_final,
    is_full,
    is_helper_gone,
    is_passing,
    planning_error,
    running_error,
    spark_gone,
)
from smqrt.pipeline.graph import Graph, QueryPlan
from smqrt.pipeline.sinks import as_messages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from smqrt.pipeline.run_context import RunContext

_DELAYS_S = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_ATTEMPTS = 3
"""So often in a row a query may fail without a micro-batch; hubs that are away and full disks don't count."""
_MOST_FULL_S = 5.0
"""So often it is looked whether a full disk has room."""
FINISH_S = 30.0
"""So long a micro-batch under way may take to end when its query is to stop; else the next start does it again."""
_WITHOUT_DATA = "spark.sql.streaming.noDataMicroBatches.enabled"


@dataclass
class Query:
    """A query and what has become of it.

    Attributes:
        plan: what it computes.
        context: what it shares with the others: session, options, status.
        spark_query: Spark's handle; None before the first start.
        stopping: set when it is to stop, and shall not wait for its hub any longer.
        over: it won't be started any more; failed: because of an error.
    """

    plan: QueryPlan
    context: RunContext
    spark_query: Any = None
    stopping: threading.Event = field(default_factory=threading.Event)
    over: bool = False
    failed: bool = False
    _sink: sinks.PublishSink | sinks.TableSink | None = None
    _failures: int = 0
    _batch: int = -1
    _start_at_s: float = field(default=0.0)
    _finish_at_s: float = 0.0
    _finishes: int = -1
    _last_reported: str = ""
    _references: list[int] = field(default_factory=list)
    _output: str = ""
    _table: tables.LakeTable | None = None
    _reported_batch: int = -1
    _claimed: bool = False
    _warning: str = ""
    _search: failing_rows.SearchThread | None = None
    _failure: tuple[str, BaseException] | None = None

    @property
    def folder(self) -> Path:
        """The folder of its state."""
        return self.context.options.state / self.plan.name

    def claim(self) -> None:
        """Make it one of this process, with a status that says so; an error is reported and ends it."""
        try:
            self._claim()
        except PipelineError as error:
            self._fail(str(error))
        except OSError as error:
            if not is_full(error):
                raise
            self._retry_later(str(planning_error(self.plan.declaration, error)), error)

    def start(self) -> None:
        """Start what was claimed; an error is reported and ends it, unless it is one that passes."""
        if not self.over and not self._start_at_s:
            self._start_or_retry()

    def poll(self) -> None:
        """Notice that it has ended, that somebody asked it to stop, or that it is to be started anew."""
        if self.over:
            return
        try:
            self._poll()
        except Exception as error:
            what = spark_gone(error, self.context.options.state / session.LOG)
            self._fail(f"{self.plan.declaration.where}: {self.plan.name}: {what}")

    def _poll(self) -> None:
        if process.stop_requested(self.folder):
            self.finish()
        elif self._search is not None:
            if not self._search.is_alive():
                self._after_search(self._search)
        elif self._start_at_s:
            if time.monotonic() >= self._start_at_s:
                self._start_at_s = 0.0
                self._start_or_retry()
        elif not self.spark_query.isActive:
            self._ended()
        elif not self.context.options.once and self._references_now() != self._references:
            self.spark_query.stop()
            self._start_or_retry()
        elif self.context.status.waits_behind(self.plan.name) not in (None, self._reported_batch):
            self._report_progress()

    def finish(self) -> None:
        """Stop it when its micro-batch is done: to be called again until it is `over`."""
        if self.over:
            return
        if not self.stopping.is_set():
            self.stopping.set()
            self._finish_at_s = time.monotonic() + FINISH_S
            with suppress(Exception):  # it has not been started, or the JVM is gone
                self._finishes = self._done() + 1
        if time.monotonic() > self._finish_at_s or self._is_between():
            self.stop()

    def _is_between(self) -> bool:
        """Return whether the micro-batch that was under way when it was told to finish is done."""
        with suppress(Exception):  # a JVM that is gone does nothing any more
            busy = self.spark_query is not None and self.spark_query.isActive
            return not busy or not self.spark_query.status["isTriggerActive"] or self._done() >= self._finishes
        return True

    def _done(self) -> int:
        """The number of the last micro-batch that Spark has done since it was started; -1: none."""
        progress = self.spark_query.lastProgress
        return int(progress["batchId"]) if progress else -1

    def stop(self) -> None:
        """Stop it now; a micro-batch under way is done again by the next start."""
        if self.over:
            return
        self.stopping.set()
        if self.spark_query is not None:
            with suppress(Exception):  # a JVM that is gone has stopped it
                self.spark_query.stop()
        if self._search is not None:
            self._search.cancel()
        self._end("stopped")

    def _claim(self) -> None:
        self._claimed = False
        pid = process.running(self.folder)
        if pid is None or pid == self.context.pid:
            checkpoint.claim(self.folder, self.plan.declaration, self.plan.sources)
            self.context.status.starting(self.plan.name, self.plan.declaration.kind, self._trigger_s())
            self._claimed = True
            return
        if self.plan.shared:
            self.over = True
        raise PipelineError(
            f"{self.plan.declaration.where}: {self.plan.name} is running already, as process {pid}; "
            f"smqrt pipeline stop {self.plan.name} ends it."
        )

    def _start(self) -> None:
        self._report(checkpoint.mend(self.folder, self._written()))
        start, context = self._find_start(), self.context
        context.report_progress(
            self.plan, checkpoint.committed_offsets(self.folder) or self._within_journal(start), commit.PROGRESS_RETRY_S
        )
        self._references = self._references_now()
        left_out = failing_rows.LeftOut(self.folder)
        left_out.publish(self._commit_client().commit)
        graph = Graph(context.catalog, context.sources(self.plan, start, left_out.rows), context.reference)
        frame = self.plan.make(graph)
        self._check_operators(frame)
        writer = self._writer(frame, start)
        folder = str(checkpoint.folder(self.folder))
        writer = (
            writer.queryName(self.plan.name).option("checkpointLocation", folder).trigger(**self._trigger_options())
        )
        # A query with a clock has something to do at any time: "what there is" would have no end.
        with _setting(context.spark, _WITHOUT_DATA, not (context.options.once and self._is_endless())):
            self.spark_query = writer.start()

    def _written(self) -> int | None:
        """The last micro-batch that Spark itself has written to a table; None when that isn't known, -1 for none."""
        declaration = self.plan.declaration
        if declaration.kind != "table" or declaration.options["format"] != "parquet":
            return -1
        folder = checkpoint.table_folder(self.folder) or self._location()
        return None if files.is_elsewhere(folder) else tables.last_batch(folder)

    def _check_operators(self, frame: Any) -> None:
        """Reject another query's state, and warns of one that grows for ever."""
        declaration = self.plan.declaration
        found = stateful_plan.operators_of(frame, declaration)
        if found is None:
            self._report("this Spark doesn't show its stateful operators, so a change of them isn't noticed.")
            return
        described = [each.description() for each in found]
        checkpoint.claim_state(self.folder, declaration, described, self.context.spark.version)
        warning = stateful_plan.endless(found, declaration.options["mode"])
        if warning != self._warning:
            self._report(f"Warning: {warning}" if warning else "")
        self._warning = warning
        self.context.status.warned(self.plan.name, warning)

    def _is_endless(self) -> bool:
        from smqrt.pipeline import alerts, processors

        parts = self.context.catalog.walk(self.plan.root)
        return any(alerts.endless(part) or processors.endless(part) for part in parts)

    def _within_journal(self, start: checkpoint.QueryStart) -> Offsets:
        """Where it begins, as far as there are rows: a hub gives no row a number that a mark says was read."""
        end = self.context.journal.end()
        return {node: min(seq, end.get(node, 0)) for node, seq in start.starting.items()}

    def _references_now(self) -> list[int]:
        parts = self.context.catalog.walk(self.plan.root)
        return self.context.watch.versions(part.name for part in parts if part.kind == "reference")

    def _trigger_options(self) -> dict[str, Any]:
        return {"availableNow": True} if self.context.options.once else {"processingTime": self._trigger()}

    def _trigger_s(self) -> float:
        return 0.0 if self.context.options.once else api.milliseconds(self._trigger()) / 1000

    def _trigger(self) -> str:
        return api.spark_duration(self.context.options.trigger or self.plan.declaration.options["trigger"])

    def _find_start(self) -> checkpoint.QueryStart:
        options = self.context.options
        if self.plan.declaration.kind == "table":
            return self._find_start_of_table()
        self._report(resume.resume_published(self.folder, self.context.journal, self._commit_client()))
        return checkpoint.start(self.folder, self.context.journal, options.start, not options.republish)

    def _find_start_of_table(self) -> checkpoint.QueryStart:
        context, location = self.context, self._location()
        tables.make_parent(location)
        self._table = tables.open_lake_table(self.plan.declaration, location)
        if self._table is not None:
            end, told = resume.resume_lake_table(self.folder, self._table, context.journal)
            self._report(told)
            return self._decide_start_of_table(end)
        self._output, end, told = resume.resume_table(self.folder, location, context.spark, context.journal)
        self._report(told)
        return self._decide_start_of_table(end)

    def _location(self) -> str:
        options = self.context.options
        return tables.location(self.plan.declaration, options.app, options.tables)

    def _decide_start_of_table(self, end: Offsets | None) -> checkpoint.QueryStart:
        start = json.dumps(end) if end else self.context.options.start
        return checkpoint.start(self.folder, self.context.journal, start, False)

    def _report(self, sentence: str) -> None:
        if sentence:
            self.context.report(f"{self.plan.declaration.where}: {self.plan.name}: {sentence}")

    def _writer(self, frame: Any, start: checkpoint.QueryStart) -> Any:
        declaration = self.plan.declaration
        if self._table is not None:
            self._sink = sinks.TableSink(self._table, self.folder)
            return sinks.partitioned(frame, declaration).writeStream.foreachBatch(self._sink)
        if declaration.kind == "table":
            tables.check_types(frame, self._location(), declaration.options["partition_by"])
            return sinks.table_writer(frame, declaration, self._output)
        gate, hub = checkpoint.PublishGate(self.folder, start.split, start.pending), self._commit_client()
        self._sink = sinks.PublishSink(hub, gate, self._published)
        # Made into messages here, once: in each micro-batch it would cost Spark as much as computing them.
        outgoing = as_messages(frame, declaration)
        return outgoing.writeStream.outputMode(declaration.options["mode"]).foreachBatch(self._sink)

    def _commit_client(self) -> sinks.CommitClient:
        return self.context.commit_client(self.plan, self.stopping, self._troubled)

    def _troubled(self, why: str) -> None:
        self.context.status.troubled(self.plan.name, why)

    def _published(self, rows: int) -> None:
        self.context.status.count(self.plan.name, published=rows)

    def _start_or_retry(self) -> None:
        try:
            if not self._claimed:
                self._claim()
            self._start()
        except Exception as error:
            told = error if isinstance(error, SmqrtError) else planning_error(self.plan.declaration, error)
            if is_passing(error):
                self._retry_later(str(told), error)
            else:
                self._fail(str(told))

    def _ended(self) -> None:
        error = self.spark_query.exception()
        if error is None:
            self._end("finished" if self.context.options.once else "stopped")
            return
        cause = self._sink.error if self._sink is not None and self._sink.error is not None else error
        if self._sink is not None:
            self._sink.error = None
        self._failed(running_error(self.plan.declaration, cause), cause)

    def _failed(self, message: str, cause: BaseException) -> None:
        """Start it anew a little later; when that has been tried, looks for the rows that it fails with."""
        batch = self._done()
        if batch > self._batch:
            self._failures, self._batch = 0, batch
        # Not at the first time: a service that a function asks may have been away.
        tried = self._failures >= (_ATTEMPTS if is_helper_gone(cause) else 0 if self.context.options.once else 1)
        if tried and failing_rows.is_wanted(self.plan.declaration, cause):
            self._look_for_rows(message, cause)
        else:
            self._retry_or_fail(message, cause)

    def _look_for_rows(self, message: str, cause: BaseException) -> None:
        self._troubled(f"{message.rstrip('.')}. The rows that it fails with are looked for.")
        self._failure = message, cause
        self._search = failing_rows.SearchThread(self.context.spark, self.plan.name, self._found_rows)
        self._search.start()

    def _found_rows(self) -> list[failing_rows.FailingRow]:
        """Find the rows and takes note of them, in a thread."""
        context, left_out = self.context, failing_rows.LeftOut(self.folder)
        until_s = time.monotonic() + failing_rows.SEARCH_S

        def compute(start: Offsets, end: Offsets, found: failing_rows.Numbers) -> Exception | None:
            sources = context.rows_between(start, end, failing_rows.joined(left_out.rows, found))
            graph = Graph(context.catalog, sources, context.reference)
            return failing_rows.error_of(lambda: sinks.outgoing(self.plan.make(graph), self.plan.declaration))

        search = failing_rows.Search(
            compute,
            failing_rows.Span.of(checkpoint.batch_under_way(self.folder), context.journal.begin()),
            self.plan.name,
            stopped=lambda: self.stopping.is_set() or time.monotonic() > until_s,
        )
        rows = search.rows()
        left_out.add(rows, self.plan.declaration.error_topic, context.journal)
        return rows

    def _after_search(self, search: failing_rows.SearchThread) -> None:
        assert self._failure is not None
        (message, cause), self._search = self._failure, None
        if search.rows:
            self.context.status.left_out(self.plan.name, failing_rows.ON_ERROR, len(search.rows))
            self._report(failing_rows.told(search.rows))
            self._start_or_retry()
            return
        why = failures.sentence(self.plan.name, search.error) if search.error else "no row fails by itself"
        self._retry_or_fail(f"{message.rstrip('.')}; no row is left out: {why.rstrip('.')}.", search.error or cause)

    def _retry_or_fail(self, message: str, cause: BaseException) -> None:
        if is_final(cause) or (self.context.options.once and not is_helper_gone(cause)):
            self._fail(message)
        else:
            self._retry_later(message, cause)

    def _retry_later(self, message: str, cause: BaseException) -> None:
        self._failures += 1
        full = is_full(cause)
        if self._failures > _ATTEMPTS and not (full or is_away(cause)):
            self._fail(message)
            return
        delay_s = min(_DELAYS_S[min(self._failures, len(_DELAYS_S)) - 1], _MOST_FULL_S if full else _DELAYS_S[-1])
        self._start_at_s = time.monotonic() + delay_s
        if full:
            self.context.status.without_room(self.plan.name, message)
        else:
            self._troubled(message)
        self._report_once(f"{message.rstrip('.')}. It is started again in {delay_s:g} s.", message)

    def _fail(self, message: str) -> None:
        if self.over:  # a shared query that another process runs
            return
        self.failed = True
        self._report_once(message, "")
        self._end("failed", message)

    def _report_once(self, text: str, key: str) -> None:
        if not key or key != self._last_reported:
            self.context.report(text)
        self._last_reported = key

    def _end(self, state: str, error: str = "") -> None:
        self.over = True
        self._report_progress()
        self.context.status.ended(self.plan.name, state, error)

    def _report_progress(self) -> None:
        """Tell how far it came. Spark tells the source of a micro-batch only when the next one begins."""
        offset = None if self.spark_query is None else checkpoint.committed_offsets(self.folder)
        if offset:
            self._reported_batch = checkpoint.last_batch(self.folder)
            self.context.status.reached(self.plan.name, self._reported_batch, offset)
            self.context.report_progress(self.plan, offset, 0.0)


@contextmanager
def _setting(spark: SparkSession, name: str, value: bool) -> Iterator[None]:
    """Of what starts inside; what is started later in the session doesn't have it."""
    before = spark.conf.get(name)
    spark.conf.set(name, value)
    try:
        yield
    finally:
        spark.conf.set(name, str(before))
