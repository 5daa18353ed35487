"""State of one's own, kept by Spark for each key: `@stateful`, and what `@alert` is made of.

Timers by event time are fired between the rows that they lie between (see `by_rows`), so that a stream, a backfill and
a test give the same. Timers by processing time have the clock of the computer in a stream; a backfill and a test go by
the times when the hub got the rows.

Source: design of the pipeline §1 and §7 (help/pipeline-state.md is the page for users).
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, cast

from smqrt.errors import PipelineError
from smqrt.pipeline.api import Declaration, State

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, GroupedData
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor
    from pyspark.sql.types import StructType

NEEDED = {"pandas": "pandas", "google.protobuf.descriptor": "protobuf"}
"""What pyspark asks for before it keeps state for Python, although rows pass by without pandas: module, package."""

NO_TIMERS, PROCESSING_TIME, EVENT_TIME = "None", "ProcessingTime", "EventTime"
"""What timers go by, as Spark calls it."""

_MODES = {None: NO_TIMERS, "processing": PROCESSING_TIME, "event": EVENT_TIME}
_DELAY = "spark.watermarkDelayMs"
"""What Spark notes on the column that a watermark is on."""


Watermark = tuple[str, int]
"""The column that a watermark is on, and by how many milliseconds it is behind the latest time."""


def transform(
    grouped: GroupedData, processor: StatefulProcessor, schema: StructType, output_mode: str, time_mode: str
) -> DataFrame:
    """Returns what a processor makes of each group.

    Args:
        grouped: rows by key.
        processor: gets the rows of a key and keeps its state.
        schema: of the rows that it returns.
        output_mode: of the query: "Append" or "Update".
        time_mode: what its timers go by: "None", "ProcessingTime" or "EventTime".

    Raises:
        PipelineError: pandas or protobuf, without which Spark keeps no state for Python, is missing.
    """
    for module, package in NEEDED.items():
        try:
            import_module(module)
        except ImportError:
            raise PipelineError(
                f"State for Python needs {package}, which isn't installed: pip install 'smqrt[spark]' brings it."
            ) from None
    return grouped.transformWithState(processor, schema, output_mode, time_mode)


def apply(frame: DataFrame, declaration: Declaration, watermarks: Iterable[Watermark] = ()) -> DataFrame:
    """Returns what the processor of a @stateful makes of a frame.

    Args:
        frame: what the function returned, batch or stream. Rows without a key are left out.
        declaration: with its `state`.
        watermarks: those that its sources declare; Spark forgets them in a batch.

    Raises:
        PipelineError: a column is missing, the schema can't be read, or timers by event time have no watermark.
    """
    state = declaration.state
    assert state is not None
    begins = f"{declaration.where}: @stateful {declaration.name}"
    _check_columns(frame, state, begins)
    schema = _schema(state, begins)
    made = _made(state, begins)
    frame = frame.dropna(subset=list(state.key))
    if state.time == "event":
        return _by_rows(frame, state, made, schema, *_event_clock(frame, watermarks, begins))
    if state.time == "processing" and (state.recorded or not frame.isStreaming):
        return _by_rows(frame, state, made, schema, "ts", 0)
    return _sparks(frame, state, made, schema)


def watermark(frame: DataFrame) -> Watermark | None:
    """Returns the watermark of a stream's column; None when there is none, as in every batch."""
    marks = ((field.name, field.metadata) for field in frame.schema)
    return next(((name, int(metadata[_DELAY])) for name, metadata in marks if _DELAY in (metadata or {})), None)


def endless(declaration: Declaration) -> bool:
    """Whether a stream of it has micro-batches without rows, for its timers: see `alerts.endless`."""
    state = declaration.state
    return state is not None and state.time == "processing" and not state.recorded


def _made(state: State, begins: str) -> StatefulProcessor:
    """The processor, after its `init` was tried: of an error in it Spark only tells that a helper crashed."""
    from smqrt.pipeline.init_check import states_with_ttl

    made = state.processor() if isinstance(state.processor, type) else state.processor
    forgotten = states_with_ttl(made)
    if forgotten and state.time != "processing":
        raise PipelineError(
            f"{begins}: the state {forgotten[0]!r} has a time to live, which goes by the clock of the computer: say "
            "time='processing', or clear it when a timer is due."
        )
    return cast("StatefulProcessor", made)


def _sparks(frame: DataFrame, state: State, made: StatefulProcessor, schema: StructType) -> DataFrame:
    """With Spark's own clock."""
    from smqrt.pipeline.by_rows import InOrder

    order = _positions(frame, "ts", "seq")
    return transform(frame.groupBy(*state.key), InOrder(made, order), schema, "Update", _MODES[state.time])


def _by_rows(
    frame: DataFrame, state: State, made: StatefulProcessor, schema: StructType, column: str, delay_ms: int
) -> DataFrame:
    """With a column of milliseconds, as the times of rows come to Python without their zone."""
    from pyspark.sql import functions as F

    from smqrt.pipeline.by_rows import MILLISECONDS, ByRows

    if frame.isStreaming and _DELAY not in (frame.schema[column].metadata or {}):
        frame = frame.withWatermark(column, "0 seconds")
    timed = frame.withColumn(MILLISECONDS, F.unix_millis(F.col(f"`{column}`")))
    processor = ByRows(made, _positions(timed, column, "seq"), delay_ms, frame.isStreaming)
    mode = EVENT_TIME if frame.isStreaming else NO_TIMERS
    return transform(timed.groupBy(*state.key), processor, schema, "Update", mode)


def _positions(frame: DataFrame, *names: str) -> list[int]:
    return [frame.columns.index(name) for name in names if name in frame.columns]


def _event_clock(frame: DataFrame, declared: Iterable[Watermark], begins: str) -> Watermark:
    here = (each for each in declared if each[0] in frame.columns and not frame.isStreaming)
    found = watermark(frame) or next(here, None)
    if found is None:
        raise PipelineError(
            f"{begins} has time='event', whose clock is the watermark: give the @source a watermark=, and let the "
            f"function return the column that it is on; it returns {', '.join(frame.columns)}."
        )
    return found


def _check_columns(frame: DataFrame, state: State, begins: str) -> None:
    needed = (*state.key, *(("ts",) if state.time == "processing" else ()))
    for name in needed:
        if name not in frame.columns:
            raise PipelineError(
                f"{begins} needs the column {name!r}, which its function must return; it has "
                f"{', '.join(frame.columns)}."
            )


def _schema(state: State, begins: str) -> StructType:
    from pyspark.errors import ParseException
    from pyspark.sql.types import StructType

    from smqrt.pipeline.failures import first_line

    try:
        return cast(StructType, StructType.fromDDL(state.schema))
    except ParseException as error:
        raise PipelineError(f"{begins}: schema={state.schema!r} can't be read: {first_line(error)}") from None
