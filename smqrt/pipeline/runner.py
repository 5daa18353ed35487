"""Pipeline runs: several queries in one Spark session, until they finish or a signal arrives.

    code = run(load(app / "pipelines"), ["per_minute"], RunOptions(str(app / ".journal"), app, app / ".pipelines"))

A query that fails is reported in one sentence; the other queries continue.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from smqrt.errors import PipelineError, SmqrtError
from smqrt.journal.remote import open_journal
from smqrt.pipeline import checkpoint, jvm, session, sinks
from smqrt.pipeline.checkpoint import Offsets
from smqrt.pipeline.discover import Catalog
from smqrt.pipeline.graph import QueryPlan, plans
from smqrt.pipeline.query import Query
from smqrt.pipeline.run_context import RunContext, RunOptions
from smqrt.pipeline.smq_source import scan
from smqrt.pipeline.status import LagRows, StatusWriter
from smqrt.process import early_signals

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
            with suppress(Exception):  # the JVM may have ended already
                spark.stop()

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
