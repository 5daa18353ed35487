"""Context of a run: how pipelines are run, and what their queries share."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from smqrt.errors import JournalError, SmqrtError
from smqrt.journal import commit, files
from smqrt.journal.remote import open_journal
from smqrt.journal.results import ResultRows
from smqrt.pipeline import api, checkpoint, references, session, sinks
from smqrt.pipeline.api import Declaration
from smqrt.pipeline.checkpoint import Offsets, QueryStart
from smqrt.pipeline.discover import Catalog
from smqrt.pipeline.failing_rows import Numbers, without
from smqrt.pipeline.graph import Frames, JournalSource, QueryPlan
from smqrt.pipeline.status import LagRows, LagSeconds, StatusWriter
from smqrt.printable import printable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from smqrt.journal.reader import Journal
    from smqrt.journal.remote import RemoteJournal


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
        replace: a backfill replaces what there is of the range.
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
    replace: bool = False
    trigger: str | None = None
    token: str | None = None
    cafile: str | None = None
    tables: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    hub_retry_s: float = sinks.RETRY_S
    report: Callable[[str], None] = _to_stderr

    def __post_init__(self) -> None:
        object.__setattr__(self, "state", files.state_folder(self.state))
        checkpoint.check_position(self.start, "--from")
        checkpoint.check_position(self.until or "latest", "--to")
        session.check_master(self.master)
        if self.trigger is not None:
            api.milliseconds(self.trigger, "--trigger ")


class RunContext:
    """What the queries of one run share.

    Attributes:
        catalog, options: as given; pid: of this process.
        spark: the session; journal: the journal, opened.
        status: keeps the status files; report: is told what fails.
        watch: tells when references have changed.
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
        tables = [each for each in catalog.declarations.values() if each.kind == "reference"]
        self.watch = references.ReferenceWatch(tables, catalog.folder, options.report)
        self.spark: SparkSession

    def lag_rows(self) -> LagRows:
        """Return what tells how many rows wait for a query; to be asked by one thread."""
        return lag_rows(*self._address, ignores=self._ignores_results)

    def _ignores_results(self, name: str) -> bool:
        """Return whether a query reads nothing that pipelines have published."""
        declaration = self.catalog.declarations.get(name)
        read = self.catalog.walk(declaration) if declaration else []
        return bool(read) and not any(one.options["include_pipeline"] for one in read if one.kind == "source")

    def commit_client(
        self, plan: QueryPlan, stopping: threading.Event, away: Callable[[str], None]
    ) -> sinks.CommitClient:
        """Return where results go; `stopping` ends the waiting for it, of which `away` is told."""
        options = self.options
        return sinks.CommitClient(
            options.journal,
            options.token,
            options.hub_retry_s,
            stopping,
            away,
            options.cafile,
            plan.declaration.error_topic,
            lambda rows: self.status.left_out(plan.name, sinks.FITS_MESSAGE, rows),
        )

    def sources(self, plan: QueryPlan, start: QueryStart, left_out: Numbers) -> Frames:
        """Return what gives the streams of a query's sources, without some rows."""
        names = plan.reader_names
        return lambda source: without(self._rows.stream(self.spark, source, start, names[source.name]), left_out)

    def rows_between(self, start: Offsets, end: Offsets, left_out: Numbers) -> Frames:
        """Return what gives the rows of sources between two offsets, without some."""
        return lambda source: without(self._rows.batch(self.spark, source, start, end), left_out)

    def report_progress(self, plan: QueryPlan, offset: Mapping[str, int], retry_s: float) -> None:
        """Tell the journal how far a query is, so that retention keeps what comes after it."""
        try:
            address = files.HubAddress.of(*self._address)
            for source, name in plan.reader_names.items():
                results = bool(self.catalog.declarations[source].options["include_pipeline"])
                commit.report_progress(address, name, name, offset, retry_s=retry_s, results=results)
        except JournalError as error:
            self.report(f"{plan.name}: the journal's retention doesn't know how far it is: {error}")

    def reference(self, declaration: Declaration) -> DataFrame:
        """Return the table of a reference."""
        return references.table(self.spark, declaration, self.catalog.folder)


def _reads_all(name: str) -> bool:
    return False


def lag_seconds(
    location: str, token: str | None = None, cafile: str | None = None, *, ignores: Callable[[str], bool] = _reads_all
) -> LagSeconds:
    """Return what tells a `StatusWriter` how far a query is behind, in seconds.

    Args:
        location: path or URL of the journal, of which for each question the next row of each node is read.
        token: what its hub wants to see; cafile: as for `open_journal`.
        ignores: whether a query leaves out what pipelines have published, such as its own results: that does not wait.

    Raises:
        JournalError: there is no such journal.
    """
    journal = open_journal(location, token, cafile=cafile, retry_s=0)

    def seconds(name: str, ends: dict[str, int]) -> float | None:
        try:
            known = {node: seq for node, seq in journal.end().items() if node in ends}
            firsts = (
                ResultRows(journal, known).first_others(ends) if ignores(name) else journal.behind_gaps(ends, known)
            )
            times_us = [_time_us(journal, node, seq) for node, seq in firsts.items()]
        except (SmqrtError, OSError):
            return None  # a hub that is away, a segment that was just removed: the next question is soon
        waiting_us = [time_us for time_us in times_us if time_us is not None]
        return max(0.0, time.time() - min(waiting_us) / 1e6) if waiting_us else 0.0

    return seconds


def lag_rows(
    location: str, token: str | None = None, cafile: str | None = None, *, ignores: Callable[[str], bool]
) -> LagRows:
    """Return what tells a `StatusWriter` how many rows wait for a query between two offsets.

    Args:
        location, token, cafile, ignores: as for `lag_seconds`.

    Raises:
        JournalError: there is no such journal.
    """
    journal = open_journal(location, token, cafile=cafile, retry_s=0)

    def rows(name: str, start: Offsets, end: Offsets) -> int | None:
        try:
            return ResultRows(journal, end).others(start) if ignores(name) else journal.count(start, end)
        except (SmqrtError, OSError):
            return None

    return rows


def _time_us(journal: Journal | RemoteJournal, node: str, seq: int) -> int | None:
    """The time of arrival of the row `seq`; None when it isn't there yet."""
    return next((row.ts_us for row in journal.rows({node: seq}, {node: seq + 1})), None)
