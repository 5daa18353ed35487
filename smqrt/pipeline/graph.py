"""From declarations to DataFrames: the same for a stream, for a batch (backfill) and for `pipeline test`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from smqrt.errors import SmqrtError
from smqrt.journal.record import Flag
from smqrt.pipeline import expectations, fields, future, intervals, state
from smqrt.pipeline.api import Declaration
from smqrt.pipeline.discover import Catalog
from smqrt.pipeline.failures import planning_error

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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
        self._watermarks: dict[str, state.Watermark] = {}

    def frame(self, declaration: Declaration) -> DataFrame:
        """Returns the DataFrame of a declaration: the rows that meet its expectations.

        Raises:
            PipelineError: Spark can't plan it.
        """
        for each in self._catalog.walk(declaration):
            if each.name not in self._made:
                self._made[each.name] = self._make(each)
        return self._made[declaration.name]

    def rejected(self, declaration: Declaration) -> list[tuple[str, DataFrame]]:
        """Returns where rows go that a declaration itself leaves out, and these rows with a column `reason`.

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
        name, where = declaration.name, declaration.where
        frame, rejected = expectations.split(frame, declaration.expectations, name, where)
        self._rejected[name] += rejected
        if declaration.state is not None:
            return state.apply(frame, declaration, self._watermarks.values())
        return _alarms(frame, declaration) if declaration.kind == "alert" else frame

    def _arguments(self, declaration: Declaration) -> Iterator[DataFrame]:
        if declaration.kind == "source":
            yield self._source(declaration)
        elif declaration.kind == "reference":
            yield self._references(declaration)
        else:
            yield from (self._made[name] for name in declaration.inputs)

    def _source(self, declaration: Declaration) -> DataFrame:
        frame, options = self._sources(declaration), declaration.options
        if not options["include_pipeline"]:
            frame = frame.where(frame["flags"].bitwiseAND(int(Flag.PIPELINE)) == 0)
        if options["json"]:
            frame, bad = fields.parse(frame, declaration.name, options, declaration.where)
            if options["dead_letter"]:
                self._rejected[declaration.name].append((options["dead_letter"], bad))
        return self._watermarked(frame, declaration)

    def _watermarked(self, frame: DataFrame, source: Declaration) -> DataFrame:
        """The watermark stands before the function, which may aggregate, or after it where that makes the column."""
        column, options = source.options["event_time"], source.options
        known = source.name in self._watermarks or bool(state.watermark(frame))
        if not options["watermark"] or column not in frame.columns or known:
            return frame
        self._watermarks[source.name] = column, intervals.milliseconds(options["watermark"])
        frame, ahead = future.split(frame, source.name, options)
        if ahead is not None and options["dead_letter"]:
            self._rejected[source.name].append((options["dead_letter"], ahead))
        return frame.withWatermark(column, intervals.for_spark(options["watermark"]))


def _alarms(frame: DataFrame, declaration: Declaration) -> DataFrame:
    from smqrt.pipeline import alerts

    return alerts.apply(frame, declaration)


def _check(frame: Any) -> None:
    from pyspark.sql import DataFrame

    if not isinstance(frame, DataFrame):
        raise TypeError(f"it returns {type(frame).__name__} and not a DataFrame; is there a return?")
