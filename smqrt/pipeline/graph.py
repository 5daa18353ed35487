"""DataFrames of queries, made of declarations: the same for a stream, for a batch (backfill) and for `pipeline test`.

A `QueryPlan` is one query to run, a `Graph` makes its DataFrame, `JournalSource` gives the rows of the journal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smqrt.errors import PipelineError, SmqrtError
from smqrt.journal import files, payload_schema
from smqrt.journal.record import Flag
from smqrt.pipeline import api, row_checks, session, stateful_plan
from smqrt.pipeline.api import DEFAULT_TRIGGER, Declaration
from smqrt.pipeline.checkpoint import Offsets, QueryStart
from smqrt.pipeline.discover import Catalog
from smqrt.pipeline.failures import planning_error
from smqrt.pipeline.references import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from smqrt.pipeline.processors import Watermark


Frames = Callable[[Declaration], "DataFrame"]
"""Gives the rows of the journal for a source, or the table of a reference."""


class Graph:
    """The DataFrames of one query: each declaration is made once, however many others read it.

    Args:
        catalog: what inputs are found in.
        sources: gives the rows of the journal for a source, stream or batch.
        references: gives the table of a reference.
    """

    def __init__(self, catalog: Catalog, sources: Frames, references: Frames) -> None:
        self._catalog, self._sources, self._references = catalog, sources, references
        self._made: dict[str, DataFrame] = {}
        self._rejected: dict[str, list[tuple[str, DataFrame]]] = {}
        self._watermarks: dict[str, Watermark] = {}

    def frame(self, declaration: Declaration) -> DataFrame:
        """Return the DataFrame of a declaration: the rows that meet its expectations.

        Raises:
            PipelineError: Spark can't plan it.
        """
        for each in self._catalog.walk(declaration):
            if each.name not in self._made:
                self._made[each.name] = self._make(each)
        return self._made[declaration.name]

    def rejected(self, declaration: Declaration) -> list[tuple[str, DataFrame]]:
        """Return where rows go that a declaration itself leaves out, and these rows with a column `reason`.

        Raises:
            PipelineError: Spark can't plan it.
        """
        self.frame(declaration)
        return self._rejected[declaration.name]

    def _make(self, declaration: Declaration) -> DataFrame:
        try:
            return self._applied(declaration)
        except SmqrtError:
            raise
        except Exception as error:
            raise planning_error(declaration, error) from error

    def _applied(self, declaration: Declaration) -> DataFrame:
        self._rejected[declaration.name] = []
        frame = declaration.function(*self._arguments(declaration))
        _check(frame)
        if declaration.kind == "source":
            frame = self._watermarked(frame, declaration)
            self._check_watermark(frame, declaration)
        name, where = declaration.name, declaration.where
        frame, rejected = row_checks.split_expectations(frame, declaration.expectations, name, where)
        self._rejected[name] += rejected
        if declaration.kind == "table":
            frame, rejected = row_checks.split_unfit(frame, declaration)
            self._rejected[name] += rejected
        if declaration.state is not None:
            from smqrt.pipeline import processors

            return processors.apply(frame, declaration, self._watermarks.values())
        if declaration.kind == "alert":
            from smqrt.pipeline import alerts

            return alerts.apply(frame, declaration)
        return frame

    def _check_watermark(self, frame: DataFrame, source: Declaration) -> None:
        options = source.options
        if options["watermark"] and source.name not in self._watermarks and options["event_time"] not in frame.columns:
            raise PipelineError(
                f"{source.where}: @source {source.name} has watermark={options['watermark']!r} for the column "
                f"{options['event_time']!r}, which neither its messages nor its function have; it has "
                f"{', '.join(frame.columns)}. Name one of these with event_time=."
            )

    def _arguments(self, declaration: Declaration) -> Iterator[DataFrame]:
        if declaration.kind == "source":
            yield self._source(declaration).alias(f"{stateful_plan.SOURCE_ALIAS}{declaration.name}")
        elif declaration.kind == "reference":
            yield self._references(declaration)
        else:
            yield from (self._made[name] for name in declaration.inputs)

    def _source(self, declaration: Declaration) -> DataFrame:
        frame, options = self._sources(declaration), declaration.options
        if not options["include_pipeline"]:
            frame = frame.where(frame["flags"].bitwiseAND(int(Flag.PIPELINE)) == 0)
        if options["json"]:
            frame, bad = row_checks.parse_json(frame, declaration)
            if options["dead_letter"]:
                self._rejected[declaration.name].append((options["dead_letter"], bad))
        return self._watermarked(frame, declaration)

    def _watermarked(self, frame: DataFrame, source: Declaration) -> DataFrame:
        """The watermark stands before the function, which may aggregate, or after it where that makes the column."""
        column, options = source.options["event_time"], source.options
        from smqrt.pipeline.processors import watermark

        known = source.name in self._watermarks or bool(watermark(frame))
        if not options["watermark"] or column not in frame.columns or known:
            return frame
        self._watermarks[source.name] = column, api.milliseconds(options["watermark"])
        frame, ahead = row_checks.split_future(frame, source)
        if ahead is not None and options["dead_letter"]:
            self._rejected[source.name].append((options["dead_letter"], ahead))
        return frame.withWatermark(quoted(column), api.spark_duration(options["watermark"]))


def _check(frame: Any) -> None:
    from pyspark.sql import DataFrame

    if not isinstance(frame, DataFrame):
        raise TypeError(f"it returns {type(frame).__name__} and not a DataFrame; is there a return?")


@dataclass(frozen=True)
class QueryPlan:
    """One streaming query.

    Attributes:
        declaration: what it is; its name is the query's.
        root: the declaration of the catalog that it is made of; with dead letters another one.
        sources: names of the sources that it reads.
        make: gives its DataFrame.
        shared: it belongs to several queries; when another process runs it, that will do.
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
        """Under which name each source tells the journal how far the query is."""
        alone = len(self.sources) == 1
        return {source: self.name if alone else f"{self.name}.{source}" for source in self.sources}


def plans(catalog: Catalog, queries: list[Declaration]) -> list[QueryPlan]:
    """Return what to run so that these queries run, dead letters included."""
    found = [_query_plan(catalog, query) for query in queries]
    parts = {each.name: each for query in queries for each in catalog.walk(query)}
    # What a query leaves out, the letters of its parts leave out too: they are made by the same functions.
    leave_out = {each.name for query in queries if query.leaves_out for each in catalog.walk(query)}
    return found + [_letters_plan(catalog, each, leave_out) for each in parts.values() if _has_letters(each)]


def _query_plan(catalog: Catalog, query: Declaration) -> QueryPlan:
    return QueryPlan(query, query, _source_names(catalog, query), lambda graph: graph.frame(query))


def _has_letters(part: Declaration) -> bool:
    return bool(part.options.get("dead_letter")) or any(each.on_fail == "dead_letter" for each in part.expectations)


def _letters_plan(catalog: Catalog, part: Declaration, leave_out: Container[str]) -> QueryPlan:
    """One query for a part's dead letters, however many queries read the part: each letter is published once."""
    options = {
        "to": "{topic}",
        "subtopic": None,
        "mode": part.options.get("mode", "append"),
        "trigger": DEFAULT_TRIGGER,
        "on_error": "drop" if part.name in leave_out else "fail",
    }
    query = Declaration(
        f"{part.name}.dead_letters", "publish", part.function, part.inputs, options, [], part.file, part.line
    )
    names = _source_names(catalog, part)
    return QueryPlan(query, part, names, lambda graph: row_checks.dead_letters(graph.rejected(part)), shared=True)


def _source_names(catalog: Catalog, declaration: Declaration) -> list[str]:
    return [source.name for source in catalog.sources_of(declaration)]


PARTITIONS = {
    "minPartitions": "min_partitions",
    "rowsPerPartition": "rows_per_partition",
    "bytesPerPartition": "bytes_per_partition",
}
"""Options of the source, and what they are called in a declaration."""
_PART_OF_DRIVER = 8
"""Rows of a micro-batch are in its memory several times: as they come, as columns, as what is made of them."""


@dataclass(frozen=True)
class JournalSource:
    """Which journal to read, and how to get at it.

    Attributes:
        location: path or URL.
        token: what the hub asks for, with a URL; cafile: as for `open_journal`.
    """

    location: str
    token: str | None = None
    cafile: str | None = None

    def stream(self, spark: SparkSession, source: Declaration, start: QueryStart, reports_as: str) -> DataFrame:
        """Return the rows of a source as a stream.

        Args:
            spark: the session.
            source: the declaration.
            start: where the stream begins when its checkpoint is new.
            reports_as: the name under which it tells the journal how far it is.
        """
        options = self._options(spark, source) | {
            "startingOffsets": json.dumps(start.starting),
            "maxRowsPerTrigger": str(source.options["max_rows"]),
            "maxBytesPerTrigger": str(source.options["max_bytes"] or session.driver_bytes(spark) // _PART_OF_DRIVER),
            "queryName": reports_as,
        }
        if start.split and source.options["watermark"]:
            # Spark gives the windows that a micro-batch closes with the next one: those of old rows shall not come
            # with new ones.
            options["splitAt"] = json.dumps([*([start.pending] if start.pending else []), start.split])
        elif start.split:
            options["splitAt"] = json.dumps(start.split)
        frame: DataFrame = spark.readStream.format("smq").options(**options).load()
        return frame

    def batch(
        self, spark: SparkSession, source: Declaration, start: Offsets, end: Offsets, ordered: bool = False
    ) -> DataFrame:
        """Return the rows of a source between two offsets.

        With the column `row_checks.TYPED`, where files may have fields of the payload that the source asks for.

        Args:
            spark, source: as for `stream`.
            start, end: the next seq of each node.
            ordered: in the order of their numbers, which Spark's own reader does not keep.
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
        options |= {name: str(source.options[key]) for name, key in PARTITIONS.items() if source.options[key]}
        if source.options["exclude"]:
            options["exclude"] = json.dumps(source.options["exclude"])
        given = {"token": self.token, "cafile": self.cafile}
        return options | {name: value for name, value in given.items() if value}
