"""Options of a run, and the objects that its queries share."""

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
from smqrt.journal.readers import ResultRows
from smqrt.journal.remote import open_journal
from smqrt.pipeline import api, checkpoint, discover, session, sinks
from smqrt.pipeline.api import Declaration
from smqrt.pipeline.checkpoint import Offsets, QueryStart
from smqrt.pipeline.discover import Catalog
from smqrt.pipeline.failing_rows import RowNumbers, without
from smqrt.pipeline.graph import FrameFactory, JournalSource, QueryPlan
from smqrt.pipeline.status import LagRows, LagSeconds, StatusWriter
from smqrt.printable import printable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


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
                ResultRows(journal, known).first_others(ends) if ignores(name) else journal.behind_gaps(ends, known)
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
            return ResultRows(journal, end).others(start) if ignores(name) else journal.count(start, end)
        except (SmqrtError, OSError):
            return None

    return rows
