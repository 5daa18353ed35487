"""Processors of Spark's `transformWithState`: `@stateful`, and the base of `@alert`.

Spark passes all rows of a micro-batch before it fires a timer, and fires none in a batch. The result of a processor
would depend on where micro-batches end, and a backfill would have another result. `ByRows` therefore fires timers
by event time between the rows: a stream, a backfill and a test have the same result. Timers by processing time use the
computer's clock in a stream; a backfill and a test use the times when the hub received the rows.

(help: pipeline-state)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    ListState,
    MapState,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
    ValueState,
)

from smqrt.errors import PipelineError
from smqrt.pipeline.api import Declaration, StatefulOptions
from smqrt.pipeline.discover import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, GroupedData
    from pyspark.sql.types import StructType


NEEDED_MODULES = {"pandas": "pandas", "google.protobuf.descriptor": "protobuf"}
"""Modules, and their packages, that pyspark needs for Python state, even without pandas data."""

NO_TIMERS, PROCESSING_TIME, EVENT_TIME = "None", "ProcessingTime", "EventTime"
"""The clocks of timers, by Spark's names."""

_MODES = {None: NO_TIMERS, "processing": PROCESSING_TIME, "event": EVENT_TIME}
_DELAY = "spark.watermarkDelayMs"
"""Spark's metadata of a column with a watermark."""


Watermark = tuple[str, int]
"""The column with a watermark, and its delay behind the latest time in milliseconds."""


def transform(
    grouped: GroupedData, processor: StatefulProcessor, schema: StructType, output_mode: str, time_mode: str
) -> DataFrame:
    """Return the result of a processor for each group.

    Args:
        grouped: rows by key.
        processor: processes the rows of a key and keeps its state.
        schema: the schema of its result.
        output_mode: of the query: "Append" or "Update".
        time_mode: the clock of its timers: "None", "ProcessingTime" or "EventTime".

    Raises:
        PipelineError: pandas or protobuf is missing, which Spark needs for Python state.
    """
    for module, package in NEEDED_MODULES.items():
        try:
            import_module(module)
        except ImportError:
            raise PipelineError(
                f"State for Python needs {package}, which isn't installed: pip install 'smqrt[spark]' installs it."
            ) from None
    return grouped.transformWithState(processor, schema, output_mode, time_mode)


def apply(frame: DataFrame, declaration: Declaration, watermarks: Iterable[Watermark] = ()) -> DataFrame:
    """Return the result of the processor of a @stateful for a frame.

    Args:
        frame: the result of the function, batch or stream. Rows with a NULL in the key are left out.
        declaration: the declaration with its `state`.
        watermarks: the watermarks of its sources, which Spark ignores in a batch.

    Raises:
        PipelineError: a column is missing, the schema is invalid, or timers by event time have no watermark.
    """
    from pyspark.errors import ParseException
    from pyspark.sql.types import StructType

    from smqrt.pipeline.failures import first_line

    state = declaration.state
    assert state is not None
    prefix = f"{declaration.where}: @stateful {declaration.name}"
    for name in (*state.key, *(("ts",) if state.time == "processing" else ())):
        if name not in frame.columns:
            raise PipelineError(
                f"{prefix} needs the column {name!r}, which its function must return; it has "
                f"{', '.join(frame.columns)}."
            )
    try:
        schema = cast(StructType, StructType.fromDDL(state.schema))
    except ParseException as error:
        raise PipelineError(f"{prefix}: schema={state.schema!r} can't be read: {first_line(error)}") from None
    processor = state.processor() if isinstance(state.processor, type) else state.processor
    # This calls `init`: for an error in it, Spark would only report that a Python worker crashed.
    with_ttl = states_with_ttl(processor)
    if with_ttl and state.time != "processing":
        raise PipelineError(
            f"{prefix}: the state {with_ttl[0]!r} has a time to live, which uses the computer's clock: set "
            "time='processing', or clear it when a timer is due."
        )
    frame = frame.dropna(subset=[quoted(name) for name in state.key])
    if state.time == "event":
        # A batch has no watermarks, so that those of the sources are used.
        in_batch = (each for each in watermarks if each[0] in frame.columns and not frame.isStreaming)
        clock = watermark(frame) or next(in_batch, None)
        if clock is None:
            raise PipelineError(
                f"{prefix} has time='event', whose clock is the watermark: give the @source a watermark=, and let the "
                f"function return its column; it returns {', '.join(frame.columns)}."
            )
        return _by_rows(frame, state, processor, schema, *clock)
    if state.time == "processing" and (state.recorded or not frame.isStreaming):
        return _by_rows(frame, state, processor, schema, "ts", 0)
    in_order = InOrder(processor, _positions(frame, "ts", "seq"), _names(frame))
    return transform(_by_key(frame, state.key), in_order, schema, "Update", _MODES[state.time])


def watermark(frame: DataFrame) -> Watermark | None:
    """Return the watermark of a stream's column; None when there is none, as in every batch."""
    marks = ((field.name, field.metadata) for field in frame.schema)
    return next(((name, int(metadata[_DELAY])) for name, metadata in marks if _DELAY in (metadata or {})), None)


def endless(declaration: Declaration) -> bool:
    """Return whether a stream of this query has micro-batches without rows, for its timers: see `alerts.endless`."""
    state = declaration.state
    return state is not None and state.time == "processing" and not state.recorded


def _by_rows(
    frame: DataFrame,
    state: StatefulOptions,
    processor: StatefulProcessor,
    schema: StructType,
    column: str,
    delay_ms: int,
) -> DataFrame:
    """Run the processor with the times of the rows, in an additional column of milliseconds."""
    from pyspark.sql import functions as F

    if frame.isStreaming and _DELAY not in (frame.schema[column].metadata or {}):
        # Spark needs a watermark to fire timers by event time.
        frame = frame.withWatermark(quoted(column), "0 seconds")
    timed = frame.withColumn(MILLISECONDS, F.unix_millis(F.col(quoted(column))))
    by_rows = ByRows(processor, _positions(timed, column, "seq"), delay_ms, frame.isStreaming, _names(timed))
    mode = EVENT_TIME if frame.isStreaming else NO_TIMERS
    return transform(_by_key(timed, state.key), by_rows, schema, "Update", mode)


def _names(frame: DataFrame) -> tuple[str, ...]:
    """Return the names of the columns if Spark needs other names: it treats a dot as access to a struct's field."""
    return tuple(frame.columns) if any(mark in name for name in frame.columns for mark in ".`") else ()


def _by_key(frame: DataFrame, key: Sequence[str]) -> GroupedData:
    if not (names := _names(frame)):
        return frame.groupBy(*map(quoted, key))
    return frame.toDF(*(f"c{at}" for at in range(len(names)))).groupBy(*(f"c{names.index(name)}" for name in key))


def _positions(frame: DataFrame, *names: str) -> list[int]:
    return [frame.columns.index(name) for name in names if name in frame.columns]


# ---- Processors that Spark calls, around the processor of the user

MILLISECONDS = "_smqrt_ms"
"""The last column of the rows of `ByRows`: their time since 1970, hidden from the processor."""


class InOrder(StatefulProcessor):
    """Passes the rows of a key in order, which Spark's exchange does not preserve.

    Args:
        processor: the processor of the user.
        order: positions of the columns to sort by, NULL first; empty keeps the present order.
        names: the names of the columns, if Spark uses other names.
    """

    def __init__(self, processor: StatefulProcessor, order: Sequence[int], names: Sequence[str] = ()) -> None:
        self._processor, self._order = processor, tuple(order)
        self._named = Row(*names) if names else None

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Open the state; called by Spark in each task."""
        self._processor.init(handle)

    def handleInputRows(self, key: tuple[object, ...], rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:
        """Process the rows of a key in a micro-batch; called by Spark."""
        yield from self._processor.handleInputRows(key, iter(self._sorted(rows)), timerValues)

    def handleExpiredTimer(
        self, key: tuple[object, ...], timerValues: TimerValues, expiredTimerInfo: ExpiredTimerInfo
    ) -> Iterator[Row]:
        """Process a timer that is due; called by Spark."""
        yield from self._processor.handleExpiredTimer(key, timerValues, expiredTimerInfo)

    def close(self) -> None:
        """Close the processor; called by Spark at the end of each task."""
        self._processor.close()

    def _sorted(self, rows: Iterator[Row]) -> Iterable[Row]:
        def sort_key(row: Row) -> list[tuple[bool, Any]]:
            return [(row[at] is not None, row[at]) for at in self._order]

        if self._named is not None:
            rows = (self._named(*row) for row in rows)
        return sorted(rows, key=sort_key) if self._order else rows


class ByRows(InOrder):
    """Runs a processor with the times of the rows as its clock; each row is a separate call.

    Args:
        processor: the processor of the user.
        order: as for `InOrder`; the last column of each row is `MILLISECONDS`.
        delay_ms: the delay of the clock behind the rows, like that of a watermark.
        is_stream: whether Spark fires the later timers, with the watermark as its clock; in a batch they never fire.
        names: as for `InOrder`.
    """

    def __init__(
        self,
        processor: StatefulProcessor,
        order: Sequence[int],
        delay_ms: int,
        is_stream: bool,
        names: Sequence[str] = (),
    ) -> None:
        super().__init__(processor, order, names)
        self._delay_ms, self._is_stream = delay_ms, is_stream

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Open the state; called by Spark in each task."""
        self._clock = _Clock(handle, self._is_stream)
        self._processor.init(self._clock)

    def handleInputRows(self, key: tuple[object, ...], rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:
        """Process the rows of a key in a micro-batch; called by Spark."""
        self._clock.begin(timerValues)
        for row in self._sorted(rows):
            if row[-1] is not None:
                yield from self._until(key, row[-1] - self._delay_ms)
            visible = Row(*row.__fields__[:-1])(*row[:-1])  # without `MILLISECONDS`
            yield from self._processor.handleInputRows(key, iter([visible]), self._clock.values())
        self._clock.end()

    def handleExpiredTimer(
        self, key: tuple[object, ...], timerValues: TimerValues, expiredTimerInfo: ExpiredTimerInfo
    ) -> Iterator[Row]:
        """Process a timer that Spark fires, and timers that it sets; called by Spark."""
        self._clock.begin(timerValues)
        until_ms, due_ms = self._clock.now_ms, expiredTimerInfo.getExpiryTimeInMs()
        self._clock.leave_to_spark(until_ms)
        yield from self._expired(key, due_ms)
        yield from self._until(key, until_ms)
        self._clock.end()

    def _until(self, key: tuple[object, ...], until_ms: int) -> Iterator[Row]:
        while (due_ms := self._clock.next_due(until_ms)) is not None:
            yield from self._expired(key, due_ms)
            self._clock.deleteTimer(due_ms)
        self._clock.now_ms = max(self._clock.now_ms, until_ms)

    def _expired(self, key: tuple[object, ...], due_ms: int) -> Iterator[Row]:
        self._clock.now_ms = due_ms
        yield from self._processor.handleExpiredTimer(key, self._clock.values(), ExpiredTimerInfo(due_ms))


class _Clock(StatefulProcessorHandle):
    """Spark's handle for one key at a time, with timers by the times of the rows.

    It ignores a time to live, which uses the computer's clock.
    """

    def __init__(self, handle: StatefulProcessorHandle, is_stream: bool) -> None:
        self._handle, self._is_stream = handle, is_stream
        self.now_ms = 0
        self._timers: set[int] = set()
        self._spark_timers: set[int] = set()
        self._fired_by_spark: set[int] = set()

    def begin(self, values: TimerValues) -> None:
        """Begin the calls for another key."""
        self.now_ms = max(0, values.getCurrentWatermarkInMs())
        self._spark_timers = set(self._handle.listTimers()) if self._is_stream else set()
        self._timers, self._fired_by_spark = set(self._spark_timers), set()

    def leave_to_spark(self, until_ms: int) -> None:
        """Ignore the timers up to this time that Spark itself fires and removes."""
        self._fired_by_spark = {due_ms for due_ms in self._spark_timers if due_ms <= until_ms}

    def end(self) -> None:
        """Pass the remaining timers to Spark."""
        if self._is_stream:
            for due_ms in sorted(self._timers - self._spark_timers):
                self._handle.registerTimer(due_ms)
            for due_ms in sorted(self._spark_timers - self._timers):
                self._handle.deleteTimer(due_ms)

    def values(self) -> TimerValues:
        """Return the current time, which is the same for both clocks."""
        return TimerValues(self.now_ms, self.now_ms)

    def next_due(self, until_ms: int) -> int | None:
        """Return the first timer up to a time."""
        first = min(self._timers - self._fired_by_spark, default=until_ms + 1)
        return first if first <= until_ms else None

    def registerTimer(self, expiryTimestampMs: int) -> None:
        """Set a timer; a time in the past becomes the next millisecond."""
        self._timers.add(max(expiryTimestampMs, self.now_ms + 1))

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        self._timers.discard(expiryTimestampMs)

    def listTimers(self) -> Iterator[int]:
        return iter(sorted(self._timers))

    def getValueState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> ValueState:
        return self._handle.getValueState(stateName, schema)

    def getListState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> ListState:
        return self._handle.getListState(stateName, schema)

    def getMapState(
        self, stateName: str, userKeySchema: Any, valueSchema: Any, ttlDurationMs: int | None = None
    ) -> MapState:
        return self._handle.getMapState(stateName, userKeySchema, valueSchema)

    def deleteIfExists(self, stateName: str) -> None:
        self._handle.deleteIfExists(stateName)


# ---- A trial of `init` before Spark calls it


def states_with_ttl(processor: StatefulProcessor) -> list[str]:
    """Return the names of a processor's states with a time to live; raise the errors of its `init`."""
    handle = _RecordingHandle()
    copy(processor).init(handle)  # a copy, because `init` usually stores the handle in the processor
    return handle.with_ttl


class _RecordingHandle(StatefulProcessorHandle):
    """A handle without Spark, which records the states with a time to live."""

    def __init__(self) -> None:
        self.with_ttl: list[str] = []

    def getValueState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> ValueState:
        self._record(stateName, ttlDurationMs)
        return ValueState(_NO_CLIENT, stateName)

    def getListState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> ListState:
        self._record(stateName, ttlDurationMs)
        return ListState(_NO_CLIENT, stateName)

    def getMapState(
        self, stateName: str, userKeySchema: Any, valueSchema: Any, ttlDurationMs: int | None = None
    ) -> MapState:
        self._record(stateName, ttlDurationMs)
        return MapState(_NO_CLIENT, stateName)

    def registerTimer(self, expiryTimestampMs: int) -> None:
        raise RuntimeError("init() can't set a timer, because it has no key; set it in handleInputRows().")

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        self.registerTimer(expiryTimestampMs)

    def listTimers(self) -> Iterator[int]:
        return iter(())

    def deleteIfExists(self, stateName: str) -> None:
        """Do nothing: no state exists."""

    def _record(self, name: str, ttl_ms: int | None) -> None:
        if ttl_ms is not None:
            self.with_ttl.append(name)


_NO_CLIENT: Any = None
