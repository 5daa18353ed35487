"""Pipeline runs: options, and several queries in one Spark session, until they finish or a signal arrives.

    code = run(load(app / "pipelines"), ["per_minute"], RunOptions(str(app / ".journal"), app, app / ".pipelines"))

A query that fails is reported in one sentence; the other queries continue.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from smqrt.errors import JournalError, PipelineError, SmqrtError
from smqrt.journal import commit, files
from smqrt.journal.readers import ResultRows
from smqrt.journal.remote import open_journal
from smqrt.pipeline import api, checkpoint, discover, jvm, session, sinks
from smqrt.pipeline.api import Declaration
from smqrt.pipeline.checkpoint import Offsets, QueryStart
from smqrt.pipeline.discover import Catalog
from smqrt.pipeline.failing_rows import RowNumbers, without
from smqrt.pipeline.graph import FrameFactory, JournalSource, QueryPlan, plans
from smqrt.pipeline.query import Query
from smqrt.pipeline.smq_source import scan
from smqrt.pipeline.status import LagRows, LagSeconds, StatusWriter
from smqrt.printable import printable
from smqrt.process import early_signals

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_POLL_S, _FINISH_POLL_S = 0.2, 0.02
_SIGNAL_WAIT_S = 10.0
"""The maximum delay between the arrival of a signal in the JVM and in this process, on a busy machine."""


def run(catalog: Catalog, names: Sequence[str], options: RunOptions) -> int:
    """Run queries until all have ended or a signal (SIGTERM, SIGINT) arrives.

    A signal stops them after the current micro-batch; a second SIGINT ends the process immediately.

    Args:
        catalog: the pipelines.
        names: the names of the queries; empty means all.
        options: the options of the run.

    Returns:
        0, or 1 when a query has failed.

    Raises:
        PipelineError: a name is unknown, or Spark doesn't start.
        JournalError: there is no such journal.
    """
    stopping = threading.Event()
    # In a separate thread: in the main thread pyspark would replace the handler of SIGINT.
    with _signals(stopping), ThreadPoolExecutor(1, "pipelines") as thread:
        running = thread.submit(Runner(catalog, options, stopping).run, names)
        # Polls, because a signal that another thread receives does not interrupt a wait without a timeout.
        while not wait([running], _POLL_S).done:
            pass
        return running.result()


class Runner:
    """One run of queries.

    Args:
        catalog, options: as for `run`.
        stopping: set it to end the run.
        spark: a session to use, which is not stopped; None starts one and stops it at the end.
    """

    def __init__(
        self, catalog: Catalog, options: RunOptions, stopping: threading.Event, spark: SparkSession | None = None
    ) -> None:
        self._catalog, self._options, self._stopping, self._spark = catalog, options, stopping, spark

    def run(self, names: Sequence[str] = ()) -> int:
        """Run queries; arguments, result and errors are those of `smqrt.pipeline.runner.run`."""
        options = self._options
        wanted = plans(self._catalog, self._catalog.select(names))
        options.state.mkdir(parents=True, exist_ok=True)
        context = RunContext(self._catalog, options)
        try:
            with self._session(wanted) as context.spark:
                context.status.watch(context.spark)
                journal = open_journal(options.journal, options.token, cafile=options.cafile, retry_s=0)
                watchdog = ProgressWatchdog(context.status, options.state, journal.end, lag_rows=context.lag_rows())
                with watchdog.watching():
                    return self.run_queries([Query(plan, context) for plan in wanted])
        except sinks.Stopped:
            return 0

    @contextmanager
    def _session(self, wanted: list[QueryPlan]) -> Iterator[SparkSession]:
        if self._spark is not None:
            yield self._spark
            return
        options, title = self._options, "smqrt " + ", ".join(plan.name for plan in wanted)
        try:
            spark = session.start_spark(options.master, title, options.state, options.settings)
        except PipelineError as error:
            # A signal to all processes of a service may end a starting JVM before it reaches this process.
            if self._stopping.wait(_SIGNAL_WAIT_S if jvm.ended_by(error.__cause__) else _POLL_S):
                raise sinks.Stopped("It was stopped while Spark was starting.") from error
            raise
        try:
            yield spark
        finally:
            for step in (jvm.ignore_signals, spark.stop):
                with suppress(Exception):  # the JVM may have ended already
                    step()

    def run_queries(self, queries: list[Query]) -> int:
        """Run these queries in the session of their context; return 0, or 1 when a query has failed."""
        try:
            for query in queries:  # before any starts: a query that is stopped while others start needs a status too
                query.claim()
            for query in queries:
                if not self._stopping.is_set():
                    query.start()
            while not self._stopping.wait(_POLL_S) and not all(query.over for query in queries):
                for query in queries:
                    query.poll()
            if not all(query.over for query in queries):
                self._options.report("Stopping after the current micro-batch; press Ctrl-C again to stop immediately.")
            # A query is over after its current micro-batch, or after `query.FINISH_S`.
            while not all(query.over for query in queries):
                for query in queries:
                    query.finish()
                time.sleep(_FINISH_POLL_S)
        finally:
            for query in queries:
                query.stop()
        return int(any(query.failed for query in queries))


@contextmanager
def _signals(stopping: threading.Event) -> Iterator[None]:
    """Set the event on SIGTERM, SIGINT and SIGHUP; a second SIGINT ends the process immediately, which loses nothing.

    A second SIGTERM does not end it: service managers send SIGTERM to all processes of a service, and `smqrt serve`
    sends another one to its pipelines. A closed terminal sends SIGHUP. An ignored SIGHUP stays ignored (`nohup`).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if stopping.is_set() and number == signal.SIGINT:
            os._exit(128 + number)  # the exit code of shells for a signal
        stopping.set()

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    earlier = {number: signal.signal(number, handle) for number in numbers}
    if signal.SIGHUP in early_signals.take():  # it arrived while the modules were imported
        stopping.set()
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


# ---- Queries without progress: their status has the reason and the duration. Spark sends an event after a micro-batch,
# and every ten seconds while it is idle. Without these events the watchdog compares the journal with the checkpoint. It
# does not call Spark, which may have no memory left to respond.

STUCK_AFTER_S = 60.0
STUCK_AFTER_BATCHES = 10
"""A query without events is stuck after this many usual durations of a micro-batch, and after `STUCK_AFTER_S`."""
_MAX_GARBAGE_SHARE = 0.5
"""A JVM that spends more of its time on garbage collection has too little memory."""
_WATCH_INTERVAL_S = 1.0
_SILENT_S = 2.0

JournalEnd = Callable[[], Offsets]
"""Returns the end of the journal."""


class ProgressWatchdog:
    """Updates the status of queries of this process that make no progress.

    Args:
        status: the writer of their status files.
        state: folder with one folder for each query.
        end: returns the end of the journal.
        least_s: see `STUCK_AFTER_S`.
        java: the garbage collection of Spark's JVM; None finds it.
        count: counts the rows between two offsets; lag_rows: counts only those that a query has not processed.
    """

    def __init__(
        self,
        status: StatusWriter,
        state: Path,
        end: JournalEnd,
        least_s: float = STUCK_AFTER_S,
        java: jvm.GarbageTime | None = None,
        count: Callable[[Offsets, Offsets], int] = scan.distance,
        lag_rows: LagRows | None = None,
    ) -> None:
        self._rows_between: LagRows = lag_rows or (lambda name, start, end: count(start, end))
        self._status, self._state, self._end, self._least_s = status, state, end, least_s
        self._java = java or jvm.find_garbage_time()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Call `check` every second in the `with` block."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(_WATCH_INTERVAL_S):
                self.check()

        threading.Thread(target=watch, name="stuck", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def check(self) -> None:
        """Update the status of the queries without recent events."""
        garbage_share = (self._java.share() if self._java else None) or 0.0
        for status, silent_s in self._status.silent(_SILENT_S):
            try:
                folder = self._state / status.name
                done = checkpoint.committed_offsets(folder) or checkpoint.start_offsets(folder)
                rows = self._rows_between(status.name, done, dict(self._end())) if done else 0
            except (SmqrtError, OSError, ValueError):  # the hub is unreachable, or a file was just removed
                rows = None
            lag_rows = status.lag_rows or 1 if rows is None else rows
            if not lag_rows:
                continue
            usual_s, trouble = status.batch_ms / 1000, ""
            if silent_s > max(self._least_s, STUCK_AFTER_BATCHES * usual_s):
                before = f"micro-batches took {usual_s:.1f} s before" if usual_s else "it is the first one"
                why = "A function may hang, such as a UDF that waits without a timeout; or there are too many rows"
                if garbage_share > _MAX_GARBAGE_SHARE:
                    why = (
                        f"The JVM spends {garbage_share:.0%} of the time on garbage collection: its memory is too small"
                    )
                # An earlier trouble, such as an unreachable hub, explains the delay better.
                trouble = status.trouble or (
                    f"micro-batch {status.batch + 1} has been running for {silent_s:.0f} s; {before}. {why}: "
                    "set a smaller max_bytes on @source, or --driver-memory; both also help with this micro-batch."
                )
            self._status.set_batch_running(status.name, lag_rows, trouble)


# ---- Options of a run, and the objects that its queries share.


@dataclass(frozen=True)
class RunOptions:
    """Options of a run.

    Attributes:
        journal: path or URL of the journal.
        app: the application's folder, which holds its tables.
        state: folder of checkpoints and status, with one folder for each query.
        master: Spark's master; empty uses that of spark-submit.
        start: where a query without a checkpoint begins: "latest", "earliest", a duration before now such as "2h",
            an ISO time, a seq, or JSON {node: seq}.
        until: where a backfill ends, written like `start`; a stream has no end.
        once: process the rows that the journal has, then end.
        republish: also publish results of rows that were in the journal before a query's first start.
        replace: a backfill replaces the results of the range.
        trigger: the shortest time between micro-batches, instead of the declared ones.
        token: the hub's token; None uses the one in the journal's folder.
        cafile: PEM file with certificates to trust instead of the system's, for a TLS address.
        tables: folder or URI for tables with a relative path; None uses `.tables` of the application.
        settings: settings of Spark, which override all others.
        hub_retry_s: how many seconds a micro-batch waits for an unreachable hub.
        report: called with one sentence for each failure.

    Raises:
        PipelineError, ArgumentError: an option is invalid; this is checked before Spark starts.
    """

    journal: str
    app: Path
    state: Path
    master: str = "local[*]"
    start: str = "latest"
    until: str | None = None
    once: bool = False
    republish: bool = False
    replace: bool = False
    trigger: str | None = None
    token: str | None = None
    cafile: str | None = None
    tables: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    hub_retry_s: float = sinks.RETRY_S
    report: Callable[[str], None] = lambda message: print(printable(message, lines=True), file=sys.stderr, flush=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "state", files.state_folder(self.state))  # the dataclass is frozen
        checkpoint.check_position(self.start, "--from")
        checkpoint.check_position(self.until or "latest", "--to")
        session.check_master(self.master)
        if self.trigger is not None:
            api.milliseconds(self.trigger, "--trigger ")


class RunContext:
    """The objects that the queries of one run share.

    Attributes:
        catalog, options: the arguments; pid: of this process.
        spark: the session; journal: the opened journal.
        status: writes the status files; report: called with one sentence for each failure.
        watch: detects changes of references.
    """

    def __init__(self, catalog: Catalog, options: RunOptions) -> None:
        self.catalog, self.options, self.report = catalog, options, options.report
        self.pid = os.getpid()
        self._address = options.journal, options.token, options.cafile
        self.journal = open_journal(*self._address[:2], cafile=options.cafile)
        self.status = StatusWriter(
            options.state, lag_seconds(*self._address, ignores=self._ignores_results), self.lag_rows()
        )
        self._rows = JournalSource(*self._address)
        tables = (each for each in catalog.declarations.values() if each.kind == "reference")
        self.watch = discover.ReferenceWatch(tables, catalog.folder, options.report)
        self.spark: SparkSession

    def lag_rows(self) -> LagRows:
        """Return a function that counts the rows that a query has not processed yet. Only one thread may call it."""
        return lag_rows(*self._address, ignores=self._ignores_results)

    def _ignores_results(self, name: str) -> bool:
        """Return whether a query ignores all rows that pipelines have published."""
        declaration = self.catalog.declarations.get(name)
        read = self.catalog.walk(declaration) if declaration else []
        return bool(read) and not any(one.options["include_pipeline"] for one in read if one.kind == "source")

    def commit_client(
        self, plan: QueryPlan, stopping: threading.Event, on_unreachable: Callable[[str], None]
    ) -> sinks.CommitClient:
        """Return the client that publishes results. It stops waiting for the hub when `stopping` is set."""
        options = self.options
        return sinks.CommitClient(
            options.journal,
            options.token,
            options.hub_retry_s,
            stopping,
            on_unreachable,
            options.cafile,
            plan.declaration.error_topic,
            lambda rows: self.status.add_left_out(plan.name, sinks.FITS_MESSAGE, rows),
        )

    def sources(self, plan: QueryPlan, start: QueryStart, left_out: RowNumbers) -> FrameFactory:
        """Return a function that makes the stream of a source of this query, without the rows in `left_out`."""
        names = plan.reader_names
        return lambda source: without(self._rows.stream(self.spark, source, start, names[source.name]), left_out)

    def rows_between(self, start: Offsets, end: Offsets, left_out: RowNumbers) -> FrameFactory:
        """Return a function that returns the rows of a source between two offsets, without those in `left_out`."""
        return lambda source: without(self._rows.batch(self.spark, source, start, end), left_out)

    def report_progress(self, plan: QueryPlan, offset: Mapping[str, int], retry_s: float) -> None:
        """Report to the journal which rows a query has processed, so that retention keeps the rows after them."""
        try:
            address = files.HubAddress.of(*self._address)
            for source, name in plan.reader_names.items():
                results = bool(self.catalog.declarations[source].options["include_pipeline"])
                commit.report_progress(address, name, name, offset, retry_s=retry_s, results=results)
        except JournalError as error:
            # The query continues: retention keeps more rows than necessary, and the next report includes this one.
            self.report(f"{plan.name}: its progress can't be reported to the journal's retention: {error}")

    def reference(self, declaration: Declaration) -> DataFrame:
        """Return the table of a reference."""
        return discover.table(self.spark, declaration, self.catalog.folder)


def lag_seconds(
    location: str,
    token: str | None = None,
    cafile: str | None = None,
    *,
    ignores: Callable[[str], bool] = lambda name: False,
) -> LagSeconds:
    """Return a function for `StatusWriter` that measures how many seconds a query is behind.

    Args:
        location: path or URL of the journal; each call reads the next row of each node.
        token: the hub's token; cafile: as for `open_journal`.
        ignores: whether a query ignores the rows that pipelines have published, which then do not count.

    Raises:
        JournalError: there is no such journal.
    """
    journal = open_journal(location, token, cafile=cafile, retry_s=0)

    def seconds(name: str, ends: dict[str, int]) -> float | None:
        try:
            known = {node: seq for node, seq in journal.end().items() if node in ends}
            firsts = (
                ResultRows(journal, known).first_other_rows(ends) if ignores(name) else journal.after_gaps(ends, known)
            )
            # A row that has not been written yet has no time of arrival.
            first_rows = (next(journal.rows({node: seq}, {node: seq + 1}), None) for node, seq in firsts.items())
            waiting_us = [row.ts_us for row in first_rows if row is not None]
        except (SmqrtError, OSError):
            return None  # the hub is unreachable, or a segment was just removed; the next call is soon
        return max(0.0, time.time() - min(waiting_us) / 1e6) if waiting_us else 0.0

    return seconds


def lag_rows(
    location: str, token: str | None = None, cafile: str | None = None, *, ignores: Callable[[str], bool]
) -> LagRows:
    """Return a function for `StatusWriter` that counts the rows between two offsets that a query has not processed.

    Args:
        location, token, cafile, ignores: as for `lag_seconds`.

    Raises:
        JournalError: there is no such journal.
    """
    journal = open_journal(location, token, cafile=cafile, retry_s=0)

    def rows(name: str, start: Offsets, end: Offsets) -> int | None:
        try:
            return ResultRows(journal, end).count_other_rows(start) if ignores(name) else journal.count(start, end)
        except (SmqrtError, OSError):
            return None

    return rows
