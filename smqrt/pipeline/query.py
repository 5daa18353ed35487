"""One query of a running pipeline: start, supervision, restart after failures, resumption, reset, stop."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smqrt.errors import PipelineError, SmqrtError
from smqrt.journal import commit, files
from smqrt.pipeline import api, checkpoint, failing_rows, failures, session, sinks, stateful_plan, status, tables
from smqrt.pipeline.checkpoint import Offsets, QueryStart
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
    from pyspark.sql import SparkSession

    from smqrt.journal.reader import Journal
    from smqrt.journal.remote import RemoteJournal
    from smqrt.pipeline.runner import RunContext
    from smqrt.pipeline.sinks import CommitClient
    from smqrt.pipeline.tables import LakeTable


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
            self._report(resume_published(self.folder, context.journal, self._commit_client()))
            return checkpoint.start(self.folder, context.journal, options.start, not options.republish)
        location = self._location()
        tables.make_parent(location)
        self._lake_table = tables.open_lake_table(self.plan.declaration, location)
        if self._lake_table is not None:
            end, notice = resume_lake_table(self.folder, self._lake_table, context.journal)
        else:
            folder, end, notice = resume_table(self.folder, location, context.spark, context.journal)
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


# ---- Resumption of a query without its checkpoint, and its reset: no result is lost or duplicated.

_REMOVED = " Later rows that retention has removed are missing."
_STATE_LOST = (
    " The state of windows and joins is lost: smqrt pipeline reset {} and run --from earliest compute everything again."
)


def resume_table(
    query: Path, location: str, spark: SparkSession, journal: Journal | RemoteJournal
) -> tuple[str, Offsets | None, str]:
    """Find the folder that the stream of a table writes to.

    Spark's file sink skips micro-batches whose numbers its folder already has. A stream without a checkpoint therefore
    gets its own folder beside the table's; `tables.files` and `tables.frame` read both.

    Args:
        query: `<state>/<name>`.
        location: folder or URI of the table.
        spark: the session.
        journal: the journal, opened.

    Returns:
        The folder or URI; the offsets where a new stream begins, if they are known; and a sentence for the user, which
        may be empty.

    Raises:
        PipelineError: the checkpoint is missing, and the rows of the table are unknown.
    """
    folder, notice = checkpoint.table_folder(query) or location, ""
    if checkpoint.exists(query):
        checkpoint.save_table_folder(query, folder)
        return folder, None, ""
    if tables.is_streamed(spark, folder):
        notice = _describe_table(query, location, folder)
        checkpoint.replace_start(query, None)
        folder = f"{location}{tables.BACKFILL}{secrets.token_hex(6)}"
    checkpoint.save_table_folder(query, folder)
    # After a reset that keeps the table, or a lost checkpoint, the recorded ranges have the position.
    end = checkpoint.table_end(query)
    begin = _later(end, journal.begin(end)) if end else None
    return folder, begin, notice + (_REMOVED if notice and begin != end else "")


def resume_lake_table(query: Path, table: LakeTable, journal: Journal | RemoteJournal) -> tuple[Offsets | None, str]:
    """Find where the stream of a table with commits begins: the commits record which rows the table has.

    Args:
        query: `<state>/<name>`.
        table: the table.
        journal: the journal, opened.

    Returns:
        As `resume_table`, without the folder.
    """
    if checkpoint.exists(query) or not table.exists():
        return None, ""
    end, is_lost = table.end(query.name), checkpoint.saved_start(query) is not None
    checkpoint.replace_start(query, None)
    if end is None:
        return None, (
            f"appends to the table in {table.location}, whose commits don't record which rows of the journal it has; "
            "rows are written twice if --from is before its end."
        )
    begin = _later(end, journal.begin(end))
    notice = f"continues where its table in {table.location} ends, at {checkpoint.offset_text(end)}."
    if is_lost:
        notice = f"the checkpoint in {query} is missing. It {notice}{_STATE_LOST.format(query.name)}"
    return begin, notice + (_REMOVED if begin != end else "")


def _describe_table(query: Path, location: str, folder: str) -> str:
    """Describe an existing table that is continued; record its rows."""

    # Called after `save_written_range` where that changes the end.
    def position() -> str:
        end = checkpoint.table_end(query)
        return f", at {checkpoint.offset_text(end)}" if end else ""

    if folder in checkpoint.table_ranges(query):
        return f"continues where its table in {location} ends{position()}; new rows are in a folder beside it."
    if checkpoint.start_offsets(query) is None:
        return (
            f"appends to the table in {location} of an earlier run, whose state is lost; rows are written twice "
            "if --from is before its end."
        )
    repetition = save_written_range(query)
    return (
        f"the checkpoint in {query} is missing. It continues where its table ends{position()}{repetition}; the "
        f"state of windows and joins is lost too: smqrt pipeline reset {query.name} and run --from earliest compute "
        "everything again."
    )


def save_written_range(query: Path) -> str:
    """Record which rows the stream of a table has written, before its checkpoint is removed.

    Args:
        query: `<state>/<name>`.

    Returns:
        A part of a sentence for the user, which may be empty.

    Raises:
        PipelineError: the rows are unknown.
    """
    folder, start, last = checkpoint.table_folder(query), checkpoint.start_offsets(query), status.read(query)
    batch = tables.last_batch(folder) if folder else -1
    end = checkpoint.committed_offsets(query, batch if batch >= 0 else None) or (last.offset if last else None)
    if not folder or start is None or not end:
        raise PipelineError(
            f"The checkpoint in {query} is missing, and the rows of its table are unknown: smqrt pipeline reset "
            f"{query.name} removes both; with --keep-output the table stays, and rows from --from on are written again."
        )
    checkpoint.add_table_range(query, folder, start, end)
    is_certain = checkpoint.exists(query) or (last and batch <= last.batch)
    return "" if is_certain else "; the table may have its last micro-batch twice"


def resume_published(query: Path, journal: Journal | RemoteJournal, hub: CommitClient) -> str:
    """Decide where a publishing query without a checkpoint continues: after the results that the hub has stored.

    Its state (windows, joins, alarms) is computed again from its first row, without publishing.

    Args:
        query: `<state>/<name>`.
        journal: the journal, opened.
        hub: the client that reads the hub's list of commits.

    Returns:
        A sentence for the user, which may be empty.

    Raises:
        Unreachable: the hub is unreachable.
        JournalError: the hub's list of commits can't be read.
    """
    before, commit = checkpoint.saved_start(query), checkpoint.last_commit(query)
    if checkpoint.exists(query) or before is None:
        return ""
    if commit is None:
        last = status.read(query)
        is_unknown = last is not None and last.batch >= 0 and before.split is None
        return (
            f"the checkpoint in {query} is missing; it starts again, and may publish results twice."
            if is_unknown
            else ""
        )
    # The last micro-batch was recorded before it was published, so that only the hub knows whether it was.
    is_published = hub.has(commit.query_id, commit.batch)
    begun, ended = (commit.start, commit.end) if is_published else (commit.before, commit.start)
    # Results before the split are never published, even if the last commit is older.
    done = _later(before.split or {}, ended)
    starting = _later(before.starting, journal.begin(before.starting)) if commit.stateful else done
    pending = _later(before.split or {}, begun) if commit.stateful and begun else None
    checkpoint.replace_start(query, QueryStart(starting, None if starting == done else done, pending))
    subject = "Its state is computed again from the rows in the journal, and it" if commit.stateful else "It"
    return (
        f"the checkpoint in {query} is missing. {subject} publishes the results after {checkpoint.offset_text(done)}, "
        "where the hub's list of commits ends."
    )


def _later(one: Mapping[str, int], other: Mapping[str, int]) -> Offsets:
    return {node: max(one.get(node, 0), other.get(node, 0)) for node in {*one, *other}}


# ---- `smqrt pipeline reset`: the next run of the query starts like a first run

_DEAD_LETTERS = ".dead_letters"
_NAME = re.compile(r"[^./][^/]*")


def reset(state: Path, name: str, journal: str, table: str | None) -> Iterator[str]:
    """Remove the state of a query.

    Args:
        state: folder of the state of queries.
        name: the name of the query.
        journal: path of the journal, which keeps rows that the query has not read; a URL is ignored.
        table: folder or URI of its table, which is removed too, backfills included; None keeps it. The next run
            continues where a kept table ends.

    Yields:
        The paths that were removed.

    Raises:
        PipelineError: the query is running, never ran, or a file can't be removed.
    """
    query = state / name
    if not _NAME.fullmatch(name) or not query.is_dir():
        raise PipelineError(f"{name} never ran with the state in {state}: nothing to reset.")
    if working := status.running(query) or status.elsewhere(query):
        where = f"as process {working}" if isinstance(working, int) else f"on {working}"
        raise PipelineError(f"{name} is running {where}: stop it first with smqrt pipeline stop {name}.")
    if table and files.is_elsewhere(table):
        raise PipelineError(f"{table} is not on this machine: remove it there, then reset with --keep-output.")
    if not table:
        with suppress(PipelineError):  # the rows of its table are unknown, or it has no table
            save_written_range(query)
    ranges = checkpoint.ranges_file(query)
    is_kept = not table and ranges.exists()
    readers: list[Path] = []
    if not files.is_address(journal):
        # These files keep the journal from removing rows that the query has not read.
        folder = files.journal_folder(journal) / "readers"
        readers = [folder / f"{name}.json", *sorted(folder.glob(f"{name}.*.json"))]
    # The checkpoint is removed last: after a failure in between, the same command removes the rest.
    for path in [
        *([*tables.folders(Path(table)), tables.versions_file(Path(table))] if table else []),
        *(path for path in readers if not path.name.startswith(f"{name}{_DEAD_LETTERS}")),
        *(sorted(set(query.iterdir()) - {ranges}) if is_kept else [query]),
    ]:
        if path.exists():
            try:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            except OSError as error:
                raise PipelineError(f"{error.filename or path} can't be removed: {error.strerror}.") from None
            yield str(path)
