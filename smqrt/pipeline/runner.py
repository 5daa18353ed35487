"""Running pipelines: several queries in one Spark, until they are done, until a signal comes, or for ever.

    code = run(load(app / "pipelines"), ["per_minute"], RunOptions(str(app / ".journal"), app, app / ".pipelines"))

One query's failure is one sentence and leaves the others alone.
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
from smqrt.pipeline.status import LagRows, Status, StatusWriter
from smqrt.process import early_signals

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_LOOK_S, _FINISH_LOOK_S = 0.2, 0.02
_SIGNAL_S = 10.0
"""So long after the JVM its signal may come to this process, on a busy machine."""


def run(catalog: Catalog, names: Sequence[str], options: RunOptions) -> int:
    """Run queries until all have ended or a signal (SIGTERM, SIGINT) comes, which stops them after the micro-batch
    under way; one more SIGINT ends the process at once.

    Args:
        catalog: the pipelines.
        names: which queries; none means all.
        options: how.

    Returns:
        0, or 1 when a query has failed.

    Raises:
        PipelineError: a name is unknown, or Spark doesn't start.
        JournalError: there is no such journal.
    """
    stopping = threading.Event()
    # Not in the main thread: there pyspark would put a handler of SIGINT of its own in the place of ours.
    with _signals(stopping), ThreadPoolExecutor(1, "pipelines") as thread:
        running = thread.submit(Runner(catalog, options, stopping).run, names)
        # Of several signals at once one may come to another thread, which does not wake this one, where handlers run.
        while not wait([running], _LOOK_S).done:
            pass
        return running.result()


class Runner:
    """One run.

    Args:
        catalog, options: as for `run`.
        stopping: set it to end the run.
        spark: a session to use, which is left running; None starts one and stops it at the end.
    """

    def __init__(
        self, catalog: Catalog, options: RunOptions, stopping: threading.Event, spark: SparkSession | None = None
    ) -> None:
        self._catalog, self._options, self._stopping, self._spark = catalog, options, stopping, spark

    def run(self, names: Sequence[str] = ()) -> int:
        """Run queries; arguments, result and errors are those of `smqrt.pipeline.runner.run`."""
        wanted = plans(self._catalog, self._catalog.select(names))
        self._options.state.mkdir(parents=True, exist_ok=True)
        context = RunContext(self._catalog, self._options)
        try:
            with self._session(wanted) as context.spark:
                context.status.watch(context.spark)
                with self._watchdog(context).watching():
                    return self._all([Query(plan, context) for plan in wanted])
        except sinks.Stopped:
            return 0

    def _watchdog(self, context: RunContext) -> ProgressWatchdog:
        options = self._options
        journal = open_journal(options.journal, options.token, cafile=options.cafile, retry_s=0)
        return ProgressWatchdog(context.status, options.state, journal.end, lag_rows=context.lag_rows())

    @contextmanager
    def _session(self, wanted: list[QueryPlan]) -> Iterator[SparkSession]:
        if self._spark is not None:
            yield self._spark
            return
        spark = self._started("smqrt " + ", ".join(plan.name for plan in wanted))
        try:
            yield spark
        finally:
            with suppress(Exception):  # a JVM that is gone can't be stopped
                spark.stop()

    def _started(self, title: str) -> SparkSession:
        options = self._options
        try:
            return session.start_spark(options.master, title, options.state, options.settings)
        except PipelineError as error:
            # A signal to all processes of a service ends a JVM that has only begun to start, at times before it comes.
            if self._stopping.wait(_SIGNAL_S if jvm.ended_by(error.__cause__) else _LOOK_S):
                raise sinks.Stopped("It was stopped while Spark was starting.") from error
            raise

    def _all(self, queries: list[Query]) -> int:
        try:
            self._until_stopped(queries)
            self._finish(queries)
        finally:
            for query in queries:
                query.stop()
        return int(any(query.failed for query in queries))

    def _until_stopped(self, queries: list[Query]) -> None:
        for query in queries:  # first: what is stopped while the others start has a status, too
            query.claim()
        for query in queries:
            if not self._stopping.is_set():
                query.start()
        while not self._stopping.wait(_LOOK_S) and not all(query.over for query in queries):
            for query in queries:
                query.poll()

    def _finish(self, queries: list[Query]) -> None:
        if not all(query.over for query in queries):
            self._options.report("Stopping after the micro-batch under way; Ctrl-C once more ends it at once.")
        while not all(query.over for query in queries):
            for query in queries:
                query.finish()
            time.sleep(_FINISH_LOOK_S)


@contextmanager
def _signals(stopping: threading.Event) -> Iterator[None]:
    """SIGTERM and SIGINT set the event; one more SIGINT ends the process at once, as nothing is lost by that. One more
    SIGTERM doesn't: service managers send it to all of a service, and `smqrt serve` to its pipelines besides.
    SIGHUP, which a terminal sends when it is closed, is handled as SIGTERM, unless it is ignored (`nohup`).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if stopping.is_set() and number == signal.SIGINT:
            os._exit(128 + number)
        stopping.set()

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    earlier = {number: signal.signal(number, handle) for number in numbers}
    if signal.SIGHUP in early_signals.take():
        stopping.set()
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


# ---- queries that make no progress: their status says so, since when, and why. Spark tells of a micro-batch when it is
# done, and every ten seconds that there is nothing to do. When it tells nothing, the journal and the checkpoint do,
# which are looked at here; Spark isn't asked, which may have no memory to answer with.

STUCK_AFTER_S = 60.0
STUCK_AFTER_BATCHES = 10
"""A query is stuck when nothing is heard of it for so many times the usual micro-batch, `STUCK_AFTER_S` at least."""
MOST_GARBAGE = 0.5
"""A Java that spends more of its time on it has too little memory."""
_WATCH_EVERY_S = 1.0
_QUIET_S = 2.0

JournalEnd = Callable[[], Offsets]
"""Gives the end of the journal."""


class ProgressWatchdog:
    """Looks after the queries of one process.

    Args:
        status: where their status is kept.
        state: folder with one folder for each query.
        end: of the journal.
        least_s: see `STUCK_AFTER_S`.
        java: what watches Spark's Java; found when it is not given.
        count: of the rows between two offsets; lag_rows: of those of them that wait for a query, instead.
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
        """Look every second while inside."""
        over = threading.Event()
        thread = threading.Thread(target=self._until, args=(over,), name="stuck", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()

    def _until(self, over: threading.Event) -> None:
        while not over.wait(_WATCH_EVERY_S):
            self.look()

    def look(self) -> None:
        """Brings the status of queries up to date of which nothing has been heard for a while."""
        share = (self._java.share() if self._java else None) or 0.0
        for status, quiet_s in self._status.quiet(_QUIET_S):
            lag_rows = self._lag_rows(status)
            if lag_rows:
                usual_s = status.batch_ms / 1000
                late = quiet_s > max(self._least_s, STUCK_AFTER_BATCHES * usual_s)
                self._status.under_way(
                    status.name, lag_rows, self._why(status, quiet_s, usual_s, share) if late else ""
                )

    def _lag_rows(self, status: Status) -> int:
        try:
            folder = self._state / status.name
            done = checkpoint.committed_offsets(folder) or checkpoint.start_offsets(folder)
            found = self._rows_between(status.name, done, dict(self._end())) if done else 0
        except (SmqrtError, OSError, ValueError):  # a hub that is away, a file that was just removed
            found = None
        return status.lag_rows or 1 if found is None else found

    @staticmethod
    def _why(status: Status, quiet_s: float, usual_s: float, garbage_share: float) -> str:
        if status.trouble:
            return status.trouble
        before = f"micro-batches took {usual_s:.1f} s before" if usual_s else "it is the first one"
        why = "A function of it may hang, such as a UDF that waits without a timeout; or its rows may be too many"
        if garbage_share > MOST_GARBAGE:
            why = f"The JVM collects garbage, {garbage_share:.0%} of the time: its memory is too small for these rows"
        return (
            f"micro-batch {status.batch + 1} has been under way for {quiet_s:.0f} s; {before}. {why}: "
            "a smaller max_bytes on @source, or --driver-memory, helps, also with this one."
        )
