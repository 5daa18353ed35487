"""Running pipelines: several queries in one Spark, until they are done, until a signal comes, or for ever.

    code = run(load(app / "pipelines"), ["per_minute"], RunOptions(str(app / ".journal"), app, app / ".pipelines"))

One query's failure is one sentence and leaves the others alone.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smqrt.errors import JournalError, PipelineError
from smqrt.journal import commit, uris
from smqrt.journal.remote import open_journal
from smqrt.pipeline import checkpoint, intervals, lag, references, session, sinks, stuck
from smqrt.pipeline.api import Declaration
from smqrt.pipeline.checkpoint import Start
from smqrt.pipeline.discover import Catalog
from smqrt.pipeline.frames import Journal
from smqrt.pipeline.plans import Plan, plans
from smqrt.pipeline.query import Query
from smqrt.pipeline.status import Board
from smqrt.printable import printable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_LOOK_S, _FINISH_LOOK_S = 0.2, 0.02


def _to_stderr(message: str) -> None:
    print(printable(message, lines=True), file=sys.stderr, flush=True)


@dataclass(frozen=True)
class RunOptions:
    """How pipelines are run.

    Attributes:
        journal: path or URL of the journal.
        app: the application's folder; tables are kept in it.
        state: folder of checkpoints and status, one folder in it for each query.
        master: Spark's; empty takes what spark-submit has given.
        start: where a query begins that has no checkpoint: "latest", "earliest", a duration such as "2h" (so long
            ago), an ISO time, a seq, or JSON {node: seq}.
        until: where a backfill ends, written as `start`; a stream has no end.
        once: work off what there is, then end.
        republish: also publish results of what was in the journal before a query's first start.
        trigger: the shortest time between micro-batches, instead of what the pipelines say.
        token: what the hub asks for; None takes the one in the journal's folder.
        cafile: PEM file with certificates to trust instead of the system's, for an address of TLS.
        tables: folder or URI that tables with a relative path are below; None takes `.tables` of the application.
        settings: settings of Spark that win over all others.
        hub_retry_s: seconds that a micro-batch waits for a hub that is away.
        report: is told, in one sentence each, what fails.

    Raises:
        PipelineError, ArgumentError: one of these is not what it must be, which is said before Spark starts.
    """

    journal: str
    app: Path
    state: Path
    master: str = "local[*]"
    start: str = "latest"
    until: str | None = None
    once: bool = False
    republish: bool = False
    trigger: str | None = None
    token: str | None = None
    cafile: str | None = None
    tables: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    hub_retry_s: float = sinks.RETRY_S
    report: Callable[[str], None] = _to_stderr

    def __post_init__(self) -> None:
        object.__setattr__(self, "state", uris.state(self.state))
        checkpoint.check_moment(self.start, "--from")
        checkpoint.check_moment(self.until or "latest", "--to")
        session.check_master(self.master)
        if self.trigger is not None:
            intervals.milliseconds(self.trigger, "--trigger ")


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


class Context:
    """What the queries of one run share.

    Attributes:
        catalog, options: as given; pid: of this process.
        spark: the session; journal: the journal, opened.
        board: keeps the status files; report: is told what fails.
        watch: tells when references have changed.
    """

    def __init__(self, catalog: Catalog, options: RunOptions) -> None:
        self.catalog, self.options, self.report = catalog, options, options.report
        self.pid = os.getpid()
        self._address = options.journal, options.token, options.cafile
        self.journal = open_journal(*self._address[:2], cafile=options.cafile)
        self.board = Board(options.state, lag.age(*self._address))
        self._rows = Journal(*self._address)
        tables = [each for each in catalog.declarations.values() if each.kind == "reference"]
        self.watch = references.Watch(tables, catalog.folder, options.report)
        self.spark: SparkSession

    def hub(self, stopping: threading.Event, away: Callable[[str], None]) -> sinks.Hub:
        """Returns where results go; `stopping` ends the waiting for it, of which `away` is told."""
        options = self.options
        return sinks.Hub(options.journal, options.token, options.hub_retry_s, stopping, away, options.cafile)

    def watchdog(self) -> stuck.Watchdog:
        """Returns what notices that a query makes no progress."""
        journal = open_journal(*self._address[:2], cafile=self.options.cafile, retry_s=0)
        return stuck.Watchdog(self.board, self.options.state, journal.end)

    def sources(self, plan: Plan, start: Start) -> Callable[[Declaration], DataFrame]:
        """Returns what gives the streams of a query's sources."""
        marks = plan.marks
        return lambda source: self._rows.stream(self.spark, source, start, marks[source.name])

    def mark(self, plan: Plan, offset: Mapping[str, int], retry_s: float) -> None:
        """Tells the journal how far a query is, so that retention keeps what comes after it."""
        try:
            address = commit.HubAddress.of(*self._address)
            for name in plan.marks.values():
                commit.report_progress(address, name, name, offset, retry_s=retry_s)
        except JournalError as error:
            self.report(f"{plan.name}: the journal's retention doesn't know how far it is: {error}")

    def reference(self, declaration: Declaration) -> DataFrame:
        """Returns the table of a reference."""
        return references.table(self.spark, declaration, self.catalog.folder)


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
                with context.watchdog().watching():
                    return self._all([Query(plan, context) for plan in wanted])
        except sinks.Stopped:
            return 0

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

    def handle(number: int, frame: Any) -> None:
        if stopping.is_set() and number == signal.SIGINT:
            os._exit(128 + number)
        stopping.set()

    earlier = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
