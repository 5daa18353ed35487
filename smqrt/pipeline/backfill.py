"""Backfills: a query is computed again on a range of the journal, as a batch beside its stream."""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from smqrt.errors import PipelineError, SmqrtError
from smqrt.journal import files as locations
from smqrt.journal.remote import open_journal
from smqrt.pipeline import checkpoint, discover, failing_rows, session, sinks, stateful_plan, status, tables
from smqrt.pipeline.api import Declaration
from smqrt.pipeline.checkpoint import Offsets, QueryStart, Ranges
from smqrt.pipeline.discover import Catalog
from smqrt.pipeline.failures import planning_error
from smqrt.pipeline.graph import FrameFactory, Graph, JournalSource
from smqrt.pipeline.runner import RunOptions
from smqrt.pipeline.sinks import as_messages

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


# ---- Versions of published backfills: only the unpublished results of a range are published.
#
# <state>/<query>/versions/v2.3f2a9c1b5d7e/results        Parquet: all results of the range in order, each with its hash
# <state>/<query>/versions/v2.3f2a9c1b5d7e/version.json   a `Version`
#
# The folder is complete before the first result is published, and its name is the key of the commit. The next call
# therefore completes an interrupted call from the folder, even if the query has changed since then.

FOLDER = "versions"
_FILE, _RESULTS, _UNFINISHED = "version.json", "results", ".new"
_MESSAGE = ("topic", "subtopic", "payload")

Publish = Callable[["DataFrame", str, bool], int]
"""Publishes messages under the key of a commit; the flag is true for many. Returns the number of new ones."""


@dataclass(frozen=True)
class Version:
    """One set of results.

    Attributes:
        name: the name of its folder, which is unique.
        number: 1, 2, …
        start, end: the range of the journal, the next seq of each node.
        known: names of the versions whose results were published before.
        rows, new: the number of results, and of those that this version publishes.
        done: whether they are published.
    """

    name: str
    number: int
    start: Offsets
    end: Offsets
    known: list[str]
    rows: int
    new: int
    done: bool = False


class Corrections:
    """The versions of one query.

    Args:
        spark: the session.
        query: `<state>/<name>`.
        publish: see `Publish`; the key begins with the name of the query.

    Raises:
        PipelineError: another process is publishing.
    """

    def __init__(self, spark: SparkSession, query: Path, publish: Publish) -> None:
        self._spark, self._query, self._publish = spark, query, publish
        self._folder = query / FOLDER

    def publish(self, messages: DataFrame, start: Offsets, end: Offsets) -> Iterator[str]:
        """Publish the unpublished results of a range under a new version.

        Args:
            messages: all results, from `sinks.as_messages`.
            start, end: the range.

        Yields:
            One sentence for each step.
        """
        working = status.running(self._folder)  # the folder of versions is claimed like that of a query
        if working is not None:
            raise PipelineError(
                f"{self._query.name}: process {working} is already publishing results; wait until it ends."
            )
        status.claim(self._folder)
        try:
            # Folders of calls that ended before their first result was published.
            for leftover in self._folder.glob(f"*{_UNFINISHED}"):
                shutil.rmtree(leftover)
            for version in self._versions():
                if not version.done:
                    yield f"{self._finish(version)}, which completes an interrupted call"
            yield self._publish_range(messages, start, end)
        finally:
            status.release(self._folder)

    def _publish_range(self, messages: DataFrame, start: Offsets, end: Offsets) -> str:
        from pyspark.sql import Window
        from pyspark.sql import functions as F

        versions = self._versions()
        known = [
            one
            for one in versions
            if not self._is_replaced(one, versions) and checkpoint.overlap(start, end, one.start, one.end)
        ]
        number = max((one.number for one in versions), default=0) + 1
        name = f"v{number}.{secrets.token_hex(6)}"
        fresh = self._folder / f"{name}{_UNFINISHED}"
        # Each message gets its position, a hash, and its number among equal messages.
        whole = F.to_json(F.struct("topic", "subtopic", F.base64("payload").alias("payload")))
        hashed = F.sha2(whole, 256).alias("hash")
        placed = messages.select(*_MESSAGE, F.monotonically_increasing_id().alias("at"), hashed)
        numbered = placed.withColumn("nth", F.row_number().over(Window.partitionBy("hash").orderBy("at")))
        numbered.write.parquet(_path(fresh / _RESULTS))
        version = Version(name, number, start, end, [one.name for one in known], 0, 0)
        rows = self._results(fresh).count()
        version = replace(version, rows=rows, new=self._unpublished(version, fresh).count())
        if not version.new:
            shutil.rmtree(fresh)
            if not version.rows:
                return "nothing published: this range has no results"
            numbers = " and ".join(str(one.number) for one in known)
            return f"nothing published: all {version.rows:,} results are published already, with version {numbers}"
        checkpoint.write_json(fresh / _FILE, asdict(version))
        fresh.rename(self._folder / name)
        return self._finish(version)

    def _finish(self, version: Version) -> str:
        folder = self._folder / version.name
        messages = self._unpublished(version, folder).orderBy("at").select(*_MESSAGE)
        key = f"backfill.{self._query.name}.{version.name}"
        self._publish(messages, key, version.new > sinks.MAX_COLLECTED_ROWS)
        checkpoint.write_json(folder / _FILE, asdict(replace(version, done=True)))
        for other in self._versions():
            if self._is_replaced(other, [version]):
                shutil.rmtree(self._folder / other.name)
        same = version.rows - version.new
        unchanged = f"; {same:,} more are published already, unchanged" if same else ""
        return f"{version.new:,} published as version {version.number}{unchanged}"

    def _versions(self) -> list[Version]:
        files = [path for path in self._folder.glob(f"v*/{_FILE}") if path.parent.suffix != _UNFINISHED]
        found = [cast("dict[str, Any]", checkpoint.read_json(path)) for path in files]
        return sorted((Version(**one) for one in found), key=lambda one: one.number)

    @staticmethod
    def _is_replaced(version: Version, others: list[Version]) -> bool:
        """Return whether a later version includes its whole range."""
        later = [one for one in others if one.number > version.number]
        return any(checkpoint.covers(one.start, one.end, version.start, version.end) for one in later)

    def _results(self, folder: Path) -> DataFrame:
        return self._spark.read.parquet(_path(folder / _RESULTS))

    def _unpublished(self, version: Version, folder: Path) -> DataFrame:
        """Return the unpublished results. Of equal results, the known versions have published the first ones."""
        from pyspark.sql import functions as F

        found = self._results(folder)
        there = [self._folder / name for name in version.known if (self._folder / name).is_dir()]
        if not there:
            return found
        known = self._results(there[0])
        for other in there[1:]:
            known = known.unionByName(self._results(other))
        counts = known.groupBy("hash").agg(F.count("*").alias("known"))
        return found.join(counts, "hash", "left").where(F.col("nth") > F.coalesce("known", F.lit(0)))


def _path(folder: Path) -> str:
    return f"file://{folder.absolute()}"


# ---- Replacement of rows of a table by those of a backfill. Readers see either the old or the new rows.
#
# For a Delta or Iceberg table, one commit removes all files and adds new ones. For a table of plain Parquet files, the
# new rows are in another folder, and the list of shown folders is replaced atomically (see `tables.show_version`).

_INFERRED = "spark.sql.sources.partitionColumnTypeInference.enabled"


@contextmanager
def exclusive(query: Path, declaration: Declaration) -> Iterator[None]:
    """Prevent the start of a query while its rows are replaced.

    Args:
        query: `<state>/<name>`.
        declaration: the query.

    Raises:
        PipelineError: the query is running.
    """
    if working := status.running(query) or status.elsewhere(query):
        where = f"as process {working}" if isinstance(working, int) else f"on {working}"
        raise PipelineError(
            f"{declaration.where}: {declaration.name} is running {where}: stop it with smqrt pipeline stop "
            f"{declaration.name}, replace its rows, and run it again; it continues from its checkpoint."
        )
    status.claim(query)
    try:
        yield
    finally:
        status.release(query)


def stream_end(query: Path, declaration: Declaration) -> Offsets | None:
    """Return the end of the rows that the query's stream has written; the stream writes later rows.

    Args:
        query, declaration: as for `exclusive`.

    Returns:
        The end; None when the query never ran.

    Raises:
        PipelineError: the end is unknown.
    """
    began = checkpoint.start_offsets(query)
    if began is None:
        return None
    name = declaration.name
    if not checkpoint.exists(query):
        raise PipelineError(
            f"{declaration.where}: {name}: there is no checkpoint in {query}, so the rows of its table are unknown: "
            f"run smqrt pipeline run {name} --once first, which restores its position."
        )
    if checkpoint.last_begun_batch(query) > checkpoint.last_batch(query):
        raise PipelineError(
            f"{declaration.where}: {name}: its last micro-batch is not complete: run smqrt pipeline run {name} --once "
            "first, which completes it."
        )
    return checkpoint.committed_offsets(query) or began


def check_stateless(stream: DataFrame, declaration: Declaration) -> None:
    """Check that the checkpoint has no state from which the stream may still write rows of the range.

    Args:
        stream: the result of the query as a stream.
        declaration: the query.

    Raises:
        PipelineError: the query has windows, joins or another state.
    """
    harmless = (stateful_plan.DISTINCT, stateful_plan.DISTINCT_WITHIN)
    kinds = [one.kind for one in stateful_plan.operators_of(stream, declaration) or () if one.kind not in harmless]
    if kinds:
        raise PipelineError(
            f"{declaration.where}: {declaration.name} has a state in its checkpoint ({', '.join(kinds)}), from which "
            "its stream may still write rows of this range, so they can't be replaced. smqrt pipeline reset "
            f"{declaration.name} and run --from earliest compute everything again."
        )


@dataclass(frozen=True)
class Replacement:
    """New rows for a range of the journal.

    Attributes:
        declaration: the query of the table.
        query: `<state>/<name>`.
        location: folder or URI of the table.
        start, end: the range, the next seq of each node.
        key: the key of this backfill, a part of a file's name.
        stream_end: the result of `stream_end`.
    """

    declaration: Declaration
    query: Path
    location: str
    start: Offsets
    end: Offsets
    key: str
    stream_end: Offsets | None

    def apply(self, frame: DataFrame) -> str:
        """Replace the rows of the range; return a sentence about it.

        Args:
            frame: the new rows.

        Raises:
            PipelineError: the rows of the table that belong to the range are unknown.
        """
        rows = sinks.partitioned(frame, self.declaration)
        if table := tables.open_lake_table(self.declaration, self.location):
            parts = self._parts()
            if table.exists() and any(not self._covers(range_) for range_ in parts.values()):
                old = tables.lake_frame(rows.sparkSession, self.location)
                rows = rows.unionByName(self._outside(old, rows), allowMissingColumns=True)
            version = table.replace(rows, f"replaced.{self.declaration.name}:{self.key}")
            checkpoint.add_table_range(self.query, f"{self.location}{tables.BACKFILL}{self.key}", self.start, self.end)
            return f"rows replaced in {self.location}, version {version}"
        if locations.is_elsewhere(self.location):
            raise PipelineError(
                f"{self.declaration.where}: {self.declaration.name}: rows of a table of plain Parquet files can be "
                f"replaced only on this machine, and {self.location} is elsewhere: use format='delta' or 'iceberg'."
            )
        return self._replace_in_folders(rows)

    def _replace_in_folders(self, rows: DataFrame) -> str:
        parts = {
            name: range_ for name, range_ in self._parts().items() if checkpoint.overlap(self.start, self.end, *range_)
        }
        # Folders with rows outside the range too; these rows are copied.
        cut = {name: range_ for name, range_ in parts.items() if not self._covers(range_)}
        for name in cut:
            # The values in names of folders are read as strings: with the number 7 for `hour=07` the new folder would
            # be `hour=7`.
            with session.setting(rows.sparkSession, _INFERRED, "false"):
                old = tables.folder_frame(rows.sparkSession, name)
            rows = rows.unionByName(self._outside(old, rows), allowMissingColumns=True)
        tables.remove_hidden(self.location)
        folder = f"{self.location}{tables.VERSION}{self.key}.{secrets.token_hex(3)}"
        by = self.declaration.options["partition_by"]
        writer = rows.write.mode("overwrite")
        (writer.partitionBy(*by) if by else writer).parquet(folder)
        status.crash_at("before_replace", 0)
        # The ranges are recorded before the new folder is shown: those of folders that are not shown do not count.
        stream_folder = checkpoint.table_folder(self.query) or self.location
        if self.stream_end is not None and stream_folder in parts and checkpoint.exists(self.query):
            # The stream continues in another folder, because its folder is replaced.
            fresh = f"{self.location}{tables.BACKFILL}{secrets.token_hex(6)}"
            tables.continue_log(stream_folder, fresh)
            checkpoint.add_table_range(self.query, stream_folder, *parts[stream_folder])
            checkpoint.save_table_folder(self.query, fresh, self.stream_end)
        checkpoint.add_table_range(self.query, folder, *_hull([(self.start, self.end), *cut.values()]))
        status.crash_at("amid_replace", 0)
        version = tables.show_version(self.location, folder, parts)
        status.crash_at("after_replace", 0)
        return f"rows replaced in {self.location}, version {version}"

    def _parts(self) -> Ranges:
        """Return the folders of the table, each with its range of the journal."""
        found = checkpoint.written_ranges(self.query)
        began = checkpoint.start_offsets(self.query)
        if began is not None and self.stream_end is not None and checkpoint.last_batch(self.query) >= 0:
            folder = checkpoint.table_folder(self.query) or self.location
            found[folder] = (began, self.stream_end)
        return found

    def _outside(self, old: DataFrame, rows: DataFrame) -> DataFrame:
        """Return the old rows outside the range, with the types of the new ones."""
        from pyspark.sql import functions as F

        for each in (old, rows):
            kinds = dict(each.dtypes)
            if (kinds.get("node"), kinds.get("seq")) != ("string", "bigint"):
                start, end = _hull([(self.start, self.end), *self._parts().values()])
                raise PipelineError(
                    f"{self.declaration.where}: {self.declaration.name}: without columns node and seq in the result, "
                    "the rows of its table that belong to a part of the journal are unknown; replace all of them: "
                    f"--from '{checkpoint.offset_text(start)}' --to '{checkpoint.offset_text(end)}'."
                )
        types = dict(rows.dtypes)
        columns = [F.col(f"`{name}`").cast(types.get(name, kind)).alias(name) for name, kind in old.dtypes]
        ranges = [
            (F.col("node") == node) & (F.col("seq") >= self.start.get(node, 0)) & (F.col("seq") < seq)
            for node, seq in self.end.items()
        ]
        return old.where(~F.coalesce(reduce(or_, ranges), F.lit(False))).select(*columns)

    def _covers(self, other: tuple[Offsets, Offsets]) -> bool:
        return checkpoint.covers(self.start, self.end, *other)


def _hull(ranges: list[tuple[Offsets, Offsets]]) -> tuple[Offsets, Offsets]:
    """Return the range from the first to the last row of all ranges."""
    nodes = {node for _, end in ranges for node in end}
    start = {node: min(first.get(node, 0) for first, last in ranges if node in last) for node in nodes}
    return start, {node: max(last[node] for _, last in ranges if node in last) for node in nodes}


_REPLACE_HINT = "--replace computes these rows again and replaces the old ones"


def backfill(
    catalog: Catalog,
    name: str,
    options: RunOptions,
    spark: SparkSession | None = None,
    stopping: threading.Event | None = None,
) -> int:
    """Compute a query on the rows between `options.start` and `options.until`.

    The rows of a table are written into a separate folder, which `tables.files` and `tables.frame` read too. Rows that
    the stream or another backfill has already written are only replaced with `options.replace`. Results are published
    unless an earlier call has published them.

    Args:
        catalog: the pipelines.
        name: the query.
        options: the options; `republish` or `replace` must be set for a query that publishes.
        spark: a session to use; None starts one and stops it at the end.
        stopping: an event that ends the wait for an unreachable hub.

    Returns:
        0.

    Raises:
        PipelineError: the query publishes and neither option is set, the range is empty or already written, its rows
            can't be replaced, or Spark rejects the plan.
        JournalError: there is no such journal, or the hub is unreachable.
    """
    [declaration] = catalog.select([name])
    if declaration.kind != "table" and not (options.republish or options.replace):
        raise PipelineError(
            f"{declaration.where}: {name} publishes, and a backfill publishes only on request: add --republish."
        )
    task = _Task(catalog, declaration, options, stopping or threading.Event())
    if spark is not None:
        return task.run(spark)
    spark = session.start_spark(options.master, f"smqrt backfill {name}", options.state, options.settings)
    try:
        return task.run(spark)
    finally:
        spark.stop()


class _Task:
    def __init__(
        self, catalog: Catalog, declaration: Declaration, options: RunOptions, stopping: threading.Event
    ) -> None:
        self._catalog, self._declaration, self._options, self._stopping = catalog, declaration, options, stopping
        self._folder = options.state / declaration.name
        self._journal = journal = open_journal(options.journal, options.token, cafile=options.cafile)
        self._start = checkpoint.offsets(journal, options.start)
        self._end = checkpoint.offsets(journal, options.until or "latest", end=True)
        self._check_range()
        # Separate from those of the query, which may be running. A repeated call for this range has the same key, so
        # that it publishes each letter once.
        self._left_out = failing_rows.LeftOutRows(key=f"backfill.{declaration.name}.{self._key()}.on_error")

    def _check_range(self) -> None:
        if not any(self._start.get(node, 0) < seq for node, seq in self._end.items()):
            until = self._options.until or "latest"
            raise PipelineError(f"There are no rows between {self._options.start} and {until}.")

    def run(self, spark: SparkSession) -> int:
        while True:
            try:
                if self._declaration.kind != "table":
                    self._publish(spark)
                elif self._options.replace:
                    self._replace(spark)
                else:
                    self._write(self._frame(spark))
            except SmqrtError:
                raise
            except Exception as error:
                if not self._leave_out_failing_rows(spark, error):
                    raise planning_error(self._declaration, error) from error
            else:
                return 0

    def _leave_out_failing_rows(self, spark: SparkSession, error: Exception) -> bool:
        """Search for failing rows and leave them out; return whether there are any."""
        if not failing_rows.is_wanted(self._declaration, error):
            return False

        def compute(start: Offsets, end: Offsets, found: failing_rows.RowNumbers) -> Exception | None:
            left_out = failing_rows.merged(self._left_out.rows, found)
            graph = self._graph(
                spark, lambda one: failing_rows.without(self._rows.batch(spark, one, start, end), left_out)
            )
            return failing_rows.error_of(lambda: sinks.sink_frame(graph.frame(self._declaration), self._declaration))

        span = failing_rows.Span.of((self._start, self._end), self._journal.begin())
        rows = failing_rows.Search(compute, span, self._declaration.name, self._stopping.is_set).rows()
        if rows:
            self._left_out.add(rows, self._declaration.error_topic, self._journal)
            self._left_out.publish(self._hub.commit)
            self._report(failing_rows.summary(rows))
        return bool(rows)

    def _frame(self, spark: SparkSession) -> DataFrame:
        # A small number of messages is published in the order of the rows from which they were computed.
        is_large = sum(seq - self._start.get(node, 0) for node, seq in self._end.items()) > sinks.MAX_COLLECTED_ROWS
        ordered = self._declaration.kind != "table" and not is_large
        left_out = self._left_out.rows

        def rows_of(source: Declaration) -> DataFrame:
            rows = self._rows.batch(spark, source, self._start, self._end, ordered)
            return failing_rows.without(rows, left_out)

        return self._graph(spark, rows_of).frame(self._declaration)

    def _graph(self, spark: SparkSession, sources: FrameFactory) -> Graph:
        folder = self._catalog.folder
        return Graph(self._catalog, sources, lambda reference: discover.table(spark, reference, folder))

    @property
    def _rows(self) -> JournalSource:
        return JournalSource(self._options.journal, self._options.token, self._options.cafile)

    @property
    def _location(self) -> str:
        return tables.location(self._declaration, self._options.app, self._options.tables)

    def _report(self, sentence: str) -> None:
        self._options.report(f"{self._declaration.name}: {sentence}")

    # ---- Rows of a table

    def _replace(self, spark: SparkSession) -> None:
        declaration = self._declaration
        with exclusive(self._folder, declaration):
            end = stream_end(self._folder, declaration)
            if end is not None:
                start = QueryStart({}, None)
                graph = self._graph(spark, lambda one: self._rows.stream(spark, one, start, one.name))
                check_stateless(graph.frame(declaration), declaration)
                self._end = {node: min(seq, end.get(node, seq)) for node, seq in self._end.items()}
                self._check_range()
            found = (self._start, self._end, self._key(), end)
            replacement = Replacement(declaration, self._folder, self._location, *found)
            self._report(replacement.apply(self._frame(spark)))

    def _write(self, frame: DataFrame) -> None:
        location = self._location
        path = f"{location}{tables.BACKFILL}{self._key()}"
        began = checkpoint.start_offsets(self._folder)
        if began is not None and checkpoint.overlap(self._start, self._end, began, {}):
            raise PipelineError(
                f"{self._declaration.name} has already written the rows from {json.dumps(began)} on; end with --to "
                f"'{json.dumps(began)}', {_REPLACE_HINT}, or remove them with smqrt pipeline reset "
                f"{self._declaration.name}."
            )
        for other, (start, end) in checkpoint.written_ranges(self._folder).items():
            if other != path and checkpoint.overlap(self._start, self._end, start, end):
                raise PipelineError(f"{other} already has rows of this range; {_REPLACE_HINT}, or use another range.")
        rows = sinks.partitioned(frame, self._declaration)
        if table := tables.open_lake_table(self._declaration, location):
            new = table.append(rows, f"backfill.{self._declaration.name}.{self._key()}:", 0, None)
            checkpoint.add_table_range(self._folder, path, self._start, self._end)
            reason = "there are no rows, or an earlier backfill has written them"
            self._report(f"written to {table.location}" if new else f"nothing written: {reason}; {_REPLACE_HINT}")
            return
        if path in checkpoint.written_ranges(self._folder):
            self._report(f"nothing written: an earlier backfill has written these rows to {path}; {_REPLACE_HINT}")
            return
        checkpoint.add_table_range(self._folder, path, self._start, self._end)
        by = self._declaration.options["partition_by"]
        writer = rows.write.mode("overwrite")
        (writer.partitionBy(*by) if by else writer).parquet(path)
        self._report(f"written to {path}")

    # ---- Results on topics

    def _publish(self, spark: SparkSession) -> None:
        hub = self._hub
        versions = Corrections(spark, self._folder, lambda frame, key, many: sinks.publish(frame, hub, key, 0, many))
        messages = as_messages(self._frame(spark), self._declaration)
        for sentence in versions.publish(messages, self._start, self._end):
            self._report(sentence)

    @property
    def _hub(self) -> sinks.CommitClient:
        options = self._options
        return sinks.CommitClient(
            options.journal,
            options.token,
            options.hub_retry_s,
            self._stopping,
            cafile=options.cafile,
            dead_letter_topic=self._declaration.error_topic,
            on_left_out=lambda rows: self._report(f"{rows} results are too long for a message and are left out"),
        )

    def _key(self) -> str:
        text = json.dumps([self._start, self._end], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]
