"""DataFrames of queries, made from declarations.

They are the same for a stream, for a backfill and for `pipeline test`. A `QueryPlan` is one query to run. A `Graph`
makes its DataFrame. A `JournalSource` reads the rows of the journal.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from smqrt.errors import PipelineError, SmqrtError
from smqrt.journal import files, payload_schema
from smqrt.journal.record import Flag
from smqrt.pipeline import api, row_checks, session, stateful_plan
from smqrt.pipeline.api import DEFAULT_TRIGGER, Declaration
from smqrt.pipeline.checkpoint import Offsets, QueryStart
from smqrt.pipeline.discover import Catalog, quoted
from smqrt.pipeline.failures import planning_error

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from smqrt.pipeline.processors import Watermark


FrameFactory = Callable[[Declaration], "DataFrame"]
"""Returns the rows of the journal for a source, or the table of a reference."""


class Graph:
    """The DataFrames of one query. Each declaration is made once, even when several declarations read it.

    Args:
        catalog: the declarations, among them the inputs.
        sources: returns the rows of the journal for a source, as a stream or a batch.
        references: returns the table of a reference.
    """

    def __init__(self, catalog: Catalog, sources: FrameFactory, references: FrameFactory) -> None:
        self._catalog, self._sources, self._references = catalog, sources, references
        self._made: dict[str, DataFrame] = {}
        self._rejected: dict[str, list[tuple[str, DataFrame]]] = {}
        self._watermarks: dict[str, Watermark] = {}

    def frame(self, declaration: Declaration) -> DataFrame:
        """Return the DataFrame of a declaration: the rows that meet its expectations.

        Raises:
            PipelineError: Spark rejects the plan, or the function fails.
        """
        for each in self._catalog.walk(declaration):
            # Once: a second frame would have the same names of metrics, which must be unique in a query.
            if each.name not in self._made:
                try:
                    self._made[each.name] = self._make(each)
                except SmqrtError:
                    raise
                except Exception as error:
                    raise planning_error(each, error) from error
        return self._made[declaration.name]

    def rejected(self, declaration: Declaration) -> list[tuple[str, DataFrame]]:
        """Return the rows that a declaration itself leaves out: pairs of a topic and rows with a column `reason`.

        Raises:
            PipelineError: Spark rejects the plan, or the function fails.
        """
        self.frame(declaration)
        return self._rejected[declaration.name]

    def _make(self, declaration: Declaration) -> DataFrame:
        from pyspark.sql import DataFrame

        name, kind = declaration.name, declaration.kind
        self._rejected[name] = []
        if kind == "source":
            inputs = [self._source_rows(declaration).alias(f"{stateful_plan.SOURCE_ALIAS}{name}")]
        elif kind == "reference":
            inputs = [self._references(declaration)]
        else:
            inputs = [self._made[each] for each in declaration.inputs]
        frame: object = declaration.function(*inputs)
        if not isinstance(frame, DataFrame):
            raise TypeError(f"it returns {type(frame).__name__} and not a DataFrame; is its return statement missing?")
        if kind == "source":
            # The function may add the column of the event time.
            frame = self._watermarked(frame, declaration)
            options = declaration.options
            if options["watermark"] and name not in self._watermarks and options["event_time"] not in frame.columns:
                raise PipelineError(
                    f"{declaration.where}: @source {name} has watermark={options['watermark']!r} for the column "
                    f"{options['event_time']!r}, which is missing in its messages and in the result of its function; "
                    f"it has {', '.join(frame.columns)}. Name one of these with event_time=."
                )
        frame, rejected = row_checks.split_expectations(frame, declaration.expectations, name, declaration.where)
        self._rejected[name] += rejected
        if kind == "table":
            frame, rejected = row_checks.split_unfit(frame, declaration)
            self._rejected[name] += rejected
        if declaration.state is not None:
            from smqrt.pipeline import processors

            return processors.apply(frame, declaration, self._watermarks.values())
        if kind == "alert":
            from smqrt.pipeline import alerts

            return alerts.apply(frame, declaration)
        return frame

    def _source_rows(self, declaration: Declaration) -> DataFrame:
        frame, options = self._sources(declaration), declaration.options
        if not options["include_pipeline"]:
            frame = frame.where(frame["flags"].bitwiseAND(int(Flag.PIPELINE)) == 0)
        if options["json"]:
            frame, bad = row_checks.parse_json(frame, declaration)
            if options["dead_letter"]:
                self._rejected[declaration.name].append((options["dead_letter"], bad))
        return self._watermarked(frame, declaration)

    def _watermarked(self, frame: DataFrame, source: Declaration) -> DataFrame:
        """Set the watermark: before the function, which may aggregate, or after it if the function adds the column."""
        column, options = source.options["event_time"], source.options
        from smqrt.pipeline.processors import watermark

        has_watermark = source.name in self._watermarks or bool(watermark(frame))
        if not options["watermark"] or column not in frame.columns or has_watermark:
            return frame
        self._watermarks[source.name] = column, api.milliseconds(options["watermark"])
        frame, future = row_checks.split_future(frame, source)
        if future is not None and options["dead_letter"]:
            self._rejected[source.name].append((options["dead_letter"], future))
        return frame.withWatermark(quoted(column), api.spark_duration(options["watermark"]))


@dataclass(frozen=True)
class QueryPlan:
    """One streaming query.

    Attributes:
        declaration: the query; its name is the name of the streaming query.
        root: the declaration in the catalog that the query is made of; it differs from `declaration` for dead letters.
        sources: names of the sources that the query reads.
        make: returns the DataFrame of the query.
        shared: whether it belongs to several queries, so that another process may already run it.
    """

    declaration: Declaration
    root: Declaration
    sources: list[str]
    make: Callable[[Graph], DataFrame]
    shared: bool = False

    @property
    def name(self) -> str:
        """The name of the query, of its folder and of its status."""
        return self.declaration.name

    @property
    def reader_names(self) -> dict[str, str]:
        """By source, the name under which it reports the query's progress to the journal."""
        is_single = len(self.sources) == 1
        return {source: self.name if is_single else f"{self.name}.{source}" for source in self.sources}


def plans(catalog: Catalog, queries: list[Declaration]) -> list[QueryPlan]:
    """Return the streaming queries that these queries need, including those of dead letters."""

    def source_names(declaration: Declaration) -> list[str]:
        return [source.name for source in catalog.sources_of(declaration)]

    def dead_letters_plan(part: Declaration) -> QueryPlan:
        # One query publishes the dead letters of a part, even if several queries read it: each letter once.
        options = {
            "to": "{topic}",
            "subtopic": None,
            "mode": part.options.get("mode", "append"),
            "trigger": DEFAULT_TRIGGER,
            "on_error": "drop" if part.name in skipping else "fail",
        }
        query = Declaration(
            f"{part.name}.dead_letters", "publish", part.function, part.inputs, options, [], part.file, part.line
        )
        names = source_names(part)
        return QueryPlan(query, part, names, lambda graph: row_checks.dead_letters(graph.rejected(part)), shared=True)

    found = [QueryPlan(query, query, source_names(query), partial(Graph.frame, declaration=query)) for query in queries]
    parts = {each.name: each for query in queries for each in catalog.walk(query)}
    # The dead letters of a part run the same functions as the query, so they also leave out its failing rows.
    skipping = {each.name for query in queries if query.skips_failing_rows for each in catalog.walk(query)}
    for part in parts.values():
        if part.options.get("dead_letter") or any(each.on_fail == "dead_letter" for each in part.expectations):
            found.append(dead_letters_plan(part))
    return found


SOURCE_OPTIONS = {
    "minPartitions": "min_partitions",
    "rowsPerPartition": "rows_per_partition",
    "bytesPerPartition": "bytes_per_partition",
}
"""Options of the source, and the options of a declaration that set them."""
_DRIVER_SHARE = 8
"""A micro-batch is an eighth of the driver's memory, which holds its rows as batches, as columns and as results."""


@dataclass(frozen=True)
class JournalSource:
    """The journal that a run reads.

    Attributes:
        location: path or URL.
        token: the hub's token, with a URL; cafile: as for `open_journal`.
    """

    location: str
    token: str | None = None
    cafile: str | None = None

    def stream(self, spark: SparkSession, source: Declaration, start: QueryStart, reports_as: str) -> DataFrame:
        """Return the rows of a source as a stream.

        Args:
            spark: the session.
            source: the declaration.
            start: where the stream begins if it has no checkpoint.
            reports_as: the name under which it reports its progress to the journal.
        """
        options = self._options(spark, source) | {
            "startingOffsets": json.dumps(start.starting),
            "maxRowsPerTrigger": str(source.options["max_rows"]),
            "maxBytesPerTrigger": str(source.options["max_bytes"] or session.driver_bytes(spark) // _DRIVER_SHARE),
            "queryName": reports_as,
        }
        if start.split and source.options["watermark"]:
            # Spark returns the windows that a micro-batch closes with the next micro-batch. A boundary at `pending`
            # separates the windows of old rows from the results of new ones.
            options["splitAt"] = json.dumps([*([start.pending] if start.pending else []), start.split])
        elif start.split:
            options["splitAt"] = json.dumps(start.split)
        frame: DataFrame = spark.readStream.format("smq").options(**options).load()
        return frame

    def batch(
        self, spark: SparkSession, source: Declaration, start: Offsets, end: Offsets, ordered: bool = False
    ) -> DataFrame:
        """Return the rows of a source between two offsets.

        The frame has the column `row_checks.TYPED` if files may contain fields of the payload that the source selects.

        Args:
            spark, source: as for `stream`.
            start, end: the next seq of each node.
            ordered: whether to return them in the order of their numbers, which Spark's own reader does not preserve.
        """
        from smqrt.pipeline import history

        if ordered:
            return history.frame_by_source(spark, self._options(spark, source), start, end)
        ddl = source.options["json"]
        wanted = history.ReadColumns(
            json=row_checks.compacted_ddl(ddl), computes=False, variant=ddl == row_checks.VARIANT
        )
        frame = history.frame(spark, self._options(spark, source), start, end, wanted)
        return frame if wanted.json is None else frame.withColumnRenamed(payload_schema.JSON_COLUMN, row_checks.TYPED)

    def _options(self, spark: SparkSession, source: Declaration) -> dict[str, str]:
        options = {
            "url" if files.is_address(self.location) else "path": self.location,
            "topics": json.dumps(source.options["topics"]),
            "includePipeline": str(source.options["include_pipeline"]).lower(),
            "failOnDataLoss": str(source.options["fail_on_data_loss"]).lower(),
            "parallelism": str(spark.sparkContext.defaultParallelism),
        }
        options |= {name: str(source.options[key]) for name, key in SOURCE_OPTIONS.items() if source.options[key]}
        if source.options["exclude"]:
            options["exclude"] = json.dumps(source.options["exclude"])
        given = {"token": self.token, "cafile": self.cafile}
        return options | {name: value for name, value in given.items() if value}
