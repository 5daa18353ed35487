"""Running pipelines: several queries in one Spark, until they are done, until a signal comes, or for ever.

    code = run(load(app / "pipelines"), ["per_minute"], RunOptions(str(app / ".journal"), app, app / ".pipelines"))

One query's failure is one sentence and leaves the others alone.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from smqrt.errors import PipelineError
from smqrt.journal.remote import open_journal
from smqrt.pipeline import session, sinks, stuck
from smqrt.pipeline.discover import Catalog
from smqrt.pipeline.graph import Plan, plans
from smqrt.pipeline.query import Query
from smqrt.pipeline.run_context import Context, RunOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOOK_S, _FINISH_LOOK_S = 0.2, 0.02


def run(catalog: Catalog, names: Sequence[str], options: RunOptions) -> int:
    """Runs queries until all have ended or a signal (SIGTERM, SIGINT) comes, which stops them after the micro-batch
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
        return thread.submit(Runner(catalog, options, stopping).run, names).result()


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
        """Runs queries; arguments, result and errors are those of `smqrt.pipeline.runner.run`."""
        wanted = plans(self._catalog, self._catalog.select(names))
        self._options.state.mkdir(parents=True, exist_ok=True)
        context = Context(self._catalog, self._options)
        try:
            with self._session(wanted) as context.spark:
                context.board.watch(context.spark)
                with self._watchdog(context).watching():
                    return self._all([Query(plan, context) for plan in wanted])
        except sinks.Stopped:
            return 0

    def _watchdog(self, context: Context) -> stuck.Watchdog:
        options = self._options
        journal = open_journal(options.journal, options.token, cafile=options.cafile, retry_s=0)
        return stuck.Watchdog(context.board, options.state, journal.end)

    @contextmanager
    def _session(self, wanted: list[Plan]) -> Iterator[SparkSession]:
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
            return session.spark(options.master, title, options.state, options.settings)
        except PipelineError as error:
            # A signal to all processes of a service ends a JVM that has only begun to start.
            if self._stopping.wait(_LOOK_S):
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
        for query in queries:
            if not self._stopping.is_set():
                query.start()
        while not self._stopping.wait(_LOOK_S) and not all(query.over for query in queries):
            for query in queries:
                query.look()

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
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if stopping.is_set() and number == signal.SIGINT:
            os._exit(128 + number)
        stopping.set()

    earlier = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
