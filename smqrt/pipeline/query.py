"""One query of a running pipeline: start, supervision, restart after failures, stop."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
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
    resume,
    session,
    sinks,
    stateful_plan,
    status,
    tables,
)
from smqrt.pipeline.checkpoint import Offsets
from smqrt.pipeline.failures import (
    is_disk_full,
    is_final,
    is_hub_unreachable,
    is_transient,
    is_worker_gone,
    planning_error,
    running_error,
    spark_gone,
)
from smqrt.pipeline.graph import Graph, QueryPlan
from smqrt.pipeline.sinks import as_messages

if TYPE_CHECKING:
    from smqrt.pipeline.run_context import RunContext

_RESTART_DELAYS_S = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_MAX_FAILURES = 3
"""The maximum number of consecutive failures without a micro-batch, except for unreachable hubs and full disks."""
_FULL_DISK_POLL_S = 5.0
FINISH_S = 30.0
"""The time that a stopping query waits for its current micro-batch; otherwise the next start repeats it."""
_WITHOUT_ROWS = "spark.sql.streaming.noDataMicroBatches.enabled"


@dataclass
class Query:
    """A running query.

    Attributes:
        plan: the query to compute.
        context: the objects that all queries share: session, options, status.
        spark_query: Spark's handle; None before the first start.
        stopping: an event that stops the query and ends its wait for the hub.
        over: whether the query has ended and is not started again; failed: whether an error ended it.
    """

    plan: QueryPlan
    context: RunContext
    spark_query: Any = None
    stopping: threading.Event = field(default_factory=threading.Event)
    over: bool = False
    failed: bool = False
    _sink: sinks.PublishSink | sinks.TableSink | None = None
    _failures: int = 0
    _failed_after_batch: int = -1
    _restart_at_s: float = field(default=0.0)
    _finish_deadline_s: float = 0.0
    _finish_batch: int = -1
    _last_reported: str = ""
    _references: list[int] = field(default_factory=list)
    _table_folder: str = ""
    _lake_table: tables.LakeTable | None = None
    _reported_batch: int = -1
    _claimed: bool = False
    _warning: str = ""
    _search: failing_rows.SearchThread | None = None
    _failure: tuple[str, BaseException] | None = None

    @property
    def folder(self) -> Path:
        """The folder of the query's state."""
        return self.context.options.state / self.plan.name

    def claim(self) -> None:
        """Register this process as the one that runs the query, with a status; an error is reported and ends it."""
        try:
            self._claim()
        except PipelineError as error:
            self._fail(str(error))
        except OSError as error:
            if not is_disk_full(error):
                raise
            self._retry_later(str(planning_error(self.plan.declaration, error)), error)

    def start(self) -> None:
        """Start the claimed query; an error is reported. It ends the query, unless it is transient."""
        if not self.over and not self._restart_at_s:
            self._start_or_retry()

    def poll(self) -> None:
        """Handle the end of the Spark query, a request to stop, and a due restart."""
        if self.over:
            return
        try:
            if status.stop_requested(self.folder):
                self.finish()
            elif self._search is not None:
                if not self._search.is_alive():
                    self._after_search(self._search)
            elif self._restart_at_s:
                if time.monotonic() >= self._restart_at_s:
                    self._restart_at_s = 0.0
                    self._start_or_retry()
            elif not self.spark_query.isActive:
                error = self.spark_query.exception()
                if error is None:
                    self._end("finished" if self.context.options.once else "stopped")
                    return
                cause = self._sink.error if self._sink is not None and self._sink.error is not None else error
                if self._sink is not None:
                    self._sink.error = None
                self._failed(running_error(self.plan.declaration, cause), cause)
            elif not self.context.options.once and self._reference_versions() != self._references:
                # The plan contains the rows of the reference, so a change needs a new plan.
                self.spark_query.stop()
                self._start_or_retry()
            elif self.context.status.idle_batch(self.plan.name) not in (None, self._reported_batch):
                self._report_progress()
        except Exception as error:
            sentence = spark_gone(error, self.context.options.state / session.LOG)
            self._fail(f"{self.plan.declaration.where}: {self.plan.name}: {sentence}")

    def finish(self) -> None:
        """Stop the query after its current micro-batch. Call this repeatedly until it is `over`."""
        if self.over:
            return
        if not self.stopping.is_set():
            self.stopping.set()
            self._finish_deadline_s = time.monotonic() + FINISH_S
            with suppress(Exception):  # the query is not started, or the JVM has ended
                self._finish_batch = self._done() + 1  # the micro-batch that may be running now
        is_done = True
        with suppress(Exception):  # the JVM has ended
            is_active = self.spark_query is not None and self.spark_query.isActive
            is_done = (
                not is_active or not self.spark_query.status["isTriggerActive"] or self._done() >= self._finish_batch
            )
        if is_done or time.monotonic() > self._finish_deadline_s:
            self.stop()

    def _done(self) -> int:
        """Return the number of the last micro-batch that Spark has completed since the start; -1 for none."""
        progress = self.spark_query.lastProgress
        return int(progress["batchId"]) if progress else -1

    def stop(self) -> None:
        """Stop the query immediately; the next start repeats its current micro-batch."""
        if self.over:
            return
        self.stopping.set()
        if self.spark_query is not None:
            with suppress(Exception):  # the JVM has ended
                self.spark_query.stop()
        if self._search is not None:
            self._search.cancel()
        self._end("stopped")

    def _claim(self) -> None:
        self._claimed = False
        pid = status.running(self.folder)
        if pid is None or pid == self.context.pid:
            checkpoint.claim(self.folder, self.plan.declaration, self.plan.sources)
            trigger_s = 0.0 if self.context.options.once else api.milliseconds(self._trigger()) / 1000
            self.context.status.starting(self.plan.name, self.plan.declaration.kind, trigger_s)
            self._claimed = True
            return
        if self.plan.shared:  # no failure: that process also publishes these dead letters
            self.over = True
        raise PipelineError(
            f"{self.plan.declaration.where}: {self.plan.name} is already running as process {pid}; "
            f"smqrt pipeline stop {self.plan.name} stops it."
        )

    def _start(self) -> None:
        context, declaration, name = self.context, self.plan.declaration, self.plan.name
        # The last micro-batch that Spark itself wrote to a table: None when it is unknown, -1 when there is none.
        written: int | None = -1
        if declaration.kind == "table" and declaration.options["format"] == "parquet":
            location = checkpoint.table_folder(self.folder) or self._location()
            written = None if files.is_elsewhere(location) else tables.last_batch(location)
        self._report(checkpoint.repair(self.folder, written))  # before the checkpoint is read
        start = self._find_start()
        done = checkpoint.committed_offsets(self.folder)
        if not done:
            # At most the end of the journal: a hub does not reuse row numbers that were reported as read.
            end = context.journal.end()
            done = {node: min(seq, end.get(node, 0)) for node, seq in start.starting.items()}
        # Before the stream starts, which takes seconds: from now on the journal keeps the rows after this position.
        context.report_progress(self.plan, done, commit.PROGRESS_RETRY_S)
        self._references = self._reference_versions()
        left_out = failing_rows.LeftOutRows(self.folder)
        left_out.publish(self._commit_client().commit)  # of a search before this start
        graph = Graph(context.catalog, context.sources(self.plan, start, left_out.rows), context.reference)
        frame = self.plan.make(graph)
        self._check_operators(frame)
        trigger = {"availableNow": True} if context.options.once else {"processingTime": self._trigger()}
        writer = self._writer(frame, start).queryName(name).trigger(**trigger)
        writer = writer.option("checkpointLocation", str(checkpoint.folder(self.folder)))
        # A query with a clock always has another micro-batch, so a run with `once` would not end.
        with session.setting(context.spark, _WITHOUT_ROWS, not (context.options.once and self._is_endless())):
            self.spark_query = writer.start()

    def _check_operators(self, frame: Any) -> None:
        """Reject a checkpoint with the state of another query; warn about state that grows without bound."""
        declaration = self.plan.declaration
        found = stateful_plan.operators_of(frame, declaration)
        if found is None:
            self._report("this version of Spark doesn't show stateful operators, so their changes aren't detected.")
            return
        described = [each.description() for each in found]
        checkpoint.claim_state(self.folder, declaration, described, self.context.spark.version)
        warning = stateful_plan.endless(found, declaration.options["mode"])
        if warning != self._warning:
            self._report(f"Warning: {warning}" if warning else "")
        self._warning = warning
        self.context.status.set_warning(self.plan.name, warning)

    def _is_endless(self) -> bool:
        from smqrt.pipeline import alerts, processors

        parts = self.context.catalog.walk(self.plan.root)
        return any(alerts.endless(part) or processors.endless(part) for part in parts)

    def _reference_versions(self) -> list[int]:
        parts = self.context.catalog.walk(self.plan.root)
        return self.context.watch.versions(part.name for part in parts if part.kind == "reference")

    def _trigger(self) -> str:
        return api.spark_duration(self.context.options.trigger or self.plan.declaration.options["trigger"])

    def _find_start(self) -> checkpoint.QueryStart:
        context, options = self.context, self.context.options
        if self.plan.declaration.kind != "table":
            self._report(resume.resume_published(self.folder, context.journal, self._commit_client()))
            return checkpoint.start(self.folder, context.journal, options.start, not options.republish)
        location = self._location()
        tables.make_parent(location)
        self._lake_table = tables.open_lake_table(self.plan.declaration, location)
        if self._lake_table is not None:
            end, notice = resume.resume_lake_table(self.folder, self._lake_table, context.journal)
        else:
            folder, end, notice = resume.resume_table(self.folder, location, context.spark, context.journal)
            self._table_folder = folder
        self._report(notice)
        return checkpoint.start(self.folder, context.journal, json.dumps(end) if end else options.start, False)

    def _location(self) -> str:
        options = self.context.options
        return tables.location(self.plan.declaration, options.app, options.tables)

    def _report(self, sentence: str) -> None:
        if sentence:
            self.context.report(f"{self.plan.declaration.where}: {self.plan.name}: {sentence}")

    def _writer(self, frame: Any, start: checkpoint.QueryStart) -> Any:
        declaration = self.plan.declaration
        if self._lake_table is not None:
            self._sink = sinks.TableSink(self._lake_table, self.folder)
            return sinks.partitioned(frame, declaration).writeStream.foreachBatch(self._sink)
        if declaration.kind == "table":
            tables.check_types(frame, self._location(), declaration.options["partition_by"])
            return sinks.table_writer(frame, declaration, self._table_folder)
        gate = checkpoint.PublishGate(self.folder, start.split, start.pending)
        self._sink = sinks.PublishSink(
            self._commit_client(), gate, lambda rows: self.context.status.add_published(self.plan.name, rows)
        )
        # Converted once here: a conversion in each micro-batch would take Spark as long as computing the rows.
        messages = as_messages(frame, declaration)
        return messages.writeStream.outputMode(declaration.options["mode"]).foreachBatch(self._sink)

    def _commit_client(self) -> sinks.CommitClient:
        return self.context.commit_client(self.plan, self.stopping, self._set_trouble)

    def _set_trouble(self, trouble: str) -> None:
        self.context.status.set_trouble(self.plan.name, trouble)

    def _start_or_retry(self) -> None:
        try:
            if not self._claimed:
                self._claim()
            self._start()
        except Exception as error:
            message = str(error if isinstance(error, SmqrtError) else planning_error(self.plan.declaration, error))
            if is_transient(error):
                self._retry_later(message, error)
            else:
                self._fail(message)

    def _failed(self, message: str, cause: BaseException) -> None:
        """Restart the query after a delay; when it fails again, search for the rows that make it fail."""
        batch = self._done()
        if batch > self._failed_after_batch:  # a micro-batch was completed since the last failure
            self._failures, self._failed_after_batch = 0, batch
        # The first failure only restarts it: a service that a function calls may have been unreachable.
        retries = _MAX_FAILURES if is_worker_gone(cause) else 0 if self.context.options.once else 1
        if self._failures < retries or not failing_rows.is_wanted(self.plan.declaration, cause):
            self._retry_or_fail(message, cause)
            return
        self._set_trouble(f"{message.rstrip('.')}. The search for the rows that make it fail is running.")
        self._failure = message, cause
        self._search = failing_rows.SearchThread(self.context.spark, self.plan.name, self._find_rows)
        self._search.start()

    def _find_rows(self) -> list[failing_rows.FailingRow]:
        """Find the failing rows and store them, in the thread of the search."""
        context, left_out = self.context, failing_rows.LeftOutRows(self.folder)
        deadline_s = time.monotonic() + failing_rows.SEARCH_S

        def compute(start: Offsets, end: Offsets, found: failing_rows.RowNumbers) -> Exception | None:
            sources = context.rows_between(start, end, failing_rows.merged(left_out.rows, found))
            graph = Graph(context.catalog, sources, context.reference)
            return failing_rows.error_of(lambda: sinks.sink_frame(self.plan.make(graph), self.plan.declaration))

        search = failing_rows.Search(
            compute,
            failing_rows.Span.of(checkpoint.batch_under_way(self.folder), context.journal.begin()),
            self.plan.name,
            stopped=lambda: self.stopping.is_set() or time.monotonic() > deadline_s,
        )
        rows = search.rows()
        left_out.add(rows, self.plan.declaration.error_topic, context.journal)
        return rows

    def _after_search(self, search: failing_rows.SearchThread) -> None:
        assert self._failure is not None
        (message, cause), self._search = self._failure, None
        if search.rows:
            self.context.status.add_left_out(self.plan.name, failing_rows.ON_ERROR, len(search.rows))
            self._report(failing_rows.summary(search.rows))
            self._start_or_retry()
            return
        why = failures.sentence(self.plan.name, search.error) if search.error else "no row fails by itself"
        self._retry_or_fail(f"{message.rstrip('.')}; no row is left out: {why.rstrip('.')}.", search.error or cause)

    def _retry_or_fail(self, message: str, cause: BaseException) -> None:
        if is_final(cause) or (self.context.options.once and not is_worker_gone(cause)):
            self._fail(message)
        else:
            self._retry_later(message, cause)

    def _retry_later(self, message: str, cause: BaseException) -> None:
        self._failures += 1
        is_full = is_disk_full(cause)
        if self._failures > _MAX_FAILURES and not (is_full or is_hub_unreachable(cause)):
            self._fail(message)
            return
        delay_s = _RESTART_DELAYS_S[min(self._failures, len(_RESTART_DELAYS_S)) - 1]
        if is_full:
            delay_s = min(delay_s, _FULL_DISK_POLL_S)
        self._restart_at_s = time.monotonic() + delay_s
        if is_full:
            self.context.status.set_disk_full(self.plan.name, message)
        else:
            self._set_trouble(message)
        self._report_once(f"{message.rstrip('.')}. It starts again in {delay_s:g} s.", message)

    def _fail(self, message: str) -> None:
        if self.over:  # another process runs this shared query
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
        """Report the processed rows. Spark reports a micro-batch to the source only when the next one begins."""
        offset = None if self.spark_query is None else checkpoint.committed_offsets(self.folder)
        if offset:
            self._reported_batch = checkpoint.last_batch(self.folder)
            self.context.status.set_position(self.plan.name, self._reported_batch, offset)
            self.context.report_progress(self.plan, offset, 0.0)
