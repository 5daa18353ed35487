"""Processors of Spark's `transformWithState`: `@stateful`, and what `@alert` is made of.

Spark hands over all rows of a micro-batch before it fires a timer, and fires none in a batch. What a processor gives
would depend on where micro-batches begin and end, and a backfill would give something else. So timers by event time are
fired between the rows that they lie between (`ByRows`): a stream, a backfill and a test give the same. Timers by
processing time have the clock of the computer in a stream; a backfill and a test go by the times when the hub got the
rows.

Source: design of the pipeline §1 and §7 (help/pipeline-state.md is the page for users).
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
from smqrt.pipeline.references import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, GroupedData
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
    """Return what a processor makes of each group.

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
    """Return what the processor of a @stateful makes of a frame.

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
    frame = frame.dropna(subset=[quoted(name) for name in state.key])
    if state.time == "event":
        return _by_rows(frame, state, made, schema, *_event_clock(frame, watermarks, begins))
    if state.time == "processing" and (state.recorded or not frame.isStreaming):
        return _by_rows(frame, state, made, schema, "ts", 0)
    return _sparks(frame, state, made, schema)


def watermark(frame: DataFrame) -> Watermark | None:
    """Return the watermark of a stream's column; None when there is none, as in every batch."""
    marks = ((field.name, field.metadata) for field in frame.schema)
    return next(((name, int(metadata[_DELAY])) for name, metadata in marks if _DELAY in (metadata or {})), None)


def endless(declaration: Declaration) -> bool:
    """Return whether a stream of it has micro-batches without rows, for its timers: see `alerts.endless`."""
    state = declaration.state
    return state is not None and state.time == "processing" and not state.recorded


def _made(state: StatefulOptions, begins: str) -> StatefulProcessor:
    """The processor, after its `init` was tried: of an error in it Spark only tells that a helper crashed."""

    made = state.processor() if isinstance(state.processor, type) else state.processor
    forgotten = states_with_ttl(made)
    if forgotten and state.time != "processing":
        raise PipelineError(
            f"{begins}: the state {forgotten[0]!r} has a time to live, which goes by the clock of the computer: say "
            "time='processing', or clear it when a timer is due."
        )
    return made


def _sparks(frame: DataFrame, state: StatefulOptions, made: StatefulProcessor, schema: StructType) -> DataFrame:
    """With Spark's own clock."""

    processor = InOrder(made, _positions(frame, "ts", "seq"), _names(frame))
    return transform(_by_key(frame, state.key), processor, schema, "Update", _MODES[state.time])


def _by_rows(
    frame: DataFrame, state: StatefulOptions, made: StatefulProcessor, schema: StructType, column: str, delay_ms: int
) -> DataFrame:
    """With a column of milliseconds, as the times of rows come to Python without their zone."""
    from pyspark.sql import functions as F

    if frame.isStreaming and _DELAY not in (frame.schema[column].metadata or {}):
        frame = frame.withWatermark(quoted(column), "0 seconds")
    timed = frame.withColumn(MILLISECONDS, F.unix_millis(F.col(quoted(column))))
    processor = ByRows(made, _positions(timed, column, "seq"), delay_ms, frame.isStreaming, _names(timed))
    mode = EVENT_TIME if frame.isStreaming else NO_TIMERS
    return transform(_by_key(timed, state.key), processor, schema, "Update", mode)


def _names(frame: DataFrame) -> tuple[str, ...]:
    """Return the names of the columns when they must be other ones for Spark, which takes a dot for a struct's."""
    return tuple(frame.columns) if any(mark in name for name in frame.columns for mark in ".`") else ()


def _by_key(frame: DataFrame, key: Sequence[str]) -> GroupedData:
    if not (names := _names(frame)):
        return frame.groupBy(*map(quoted, key))
    return frame.toDF(*(f"c{at}" for at in range(len(names)))).groupBy(*(f"c{names.index(name)}" for name in key))


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


def _check_columns(frame: DataFrame, state: StatefulOptions, begins: str) -> None:
    needed = (*state.key, *(("ts",) if state.time == "processing" else ()))
    for name in needed:
        if name not in frame.columns:
            raise PipelineError(
                f"{begins} needs the column {name!r}, which its function must return; it has "
                f"{', '.join(frame.columns)}."
            )


def _schema(state: StatefulOptions, begins: str) -> StructType:
    from pyspark.errors import ParseException
    from pyspark.sql.types import StructType

    from smqrt.pipeline.failures import first_line

    try:
        return cast(StructType, StructType.fromDDL(state.schema))
    except ParseException as error:
        raise PipelineError(f"{begins}: schema={state.schema!r} can't be read: {first_line(error)}") from None


# ---- what Spark calls, around the processor of the user

MILLISECONDS = "_smqrt_ms"
"""The last column of the rows of `ByRows`: their time since 1970, which the processor doesn't see."""


class InOrder(StatefulProcessor):
    """Hands the rows of a key on in order: Spark's exchange leaves them in none.

    Args:
        processor: gets them.
        order: positions of the columns that they are sorted by, NULL first; none leaves them as they come.
        names: of the columns, where Spark has others.
    """

    def __init__(self, processor: StatefulProcessor, order: Sequence[int], names: Sequence[str] = ()) -> None:
        self._processor, self._order = processor, tuple(order)
        self._named = Row(*names) if names else None

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Is called by Spark in each task."""
        self._processor.init(handle)

    def handleInputRows(self, key: tuple[object, ...], rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:
        """Take the rows of a key in a micro-batch; called by Spark."""
        yield from self._processor.handleInputRows(key, iter(self._sorted(rows)), timerValues)

    def handleExpiredTimer(
        self, key: tuple[object, ...], timerValues: TimerValues, expiredTimerInfo: ExpiredTimerInfo
    ) -> Iterator[Row]:
        """Take a timer that is due; called by Spark."""
        yield from self._processor.handleExpiredTimer(key, timerValues, expiredTimerInfo)

    def close(self) -> None:
        """Is called by Spark at the end of each task."""
        self._processor.close()

    def _sorted(self, rows: Iterator[Row]) -> Iterable[Row]:
        def sort_key(row: Row) -> list[tuple[bool, Any]]:
            return [(row[at] is not None, row[at]) for at in self._order]

        if self._named is not None:
            rows = (self._named(*row) for row in rows)
        return sorted(rows, key=sort_key) if self._order else rows


class ByRows(InOrder):
    """A processor whose clock is the times of the rows, each of which is a micro-batch of its own.

    Args:
        processor: gets them.
        order: as of `InOrder`; the last column of each row is `MILLISECONDS`.
        delay_ms: by so much the clock is behind the rows, as a watermark is.
        is_stream: timers that are still to come are left to Spark, whose clock is the watermark; in a batch nothing
            comes any more.
        names: as of `InOrder`.
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
        """Is called by Spark in each task."""
        self._clock = _Clock(handle, self._is_stream)
        self._processor.init(self._clock)

    def handleInputRows(self, key: tuple[object, ...], rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:
        """Take the rows of a key in a micro-batch; called by Spark."""
        self._clock.begin(timerValues)
        for row in self._sorted(rows):
            if row[-1] is not None:
                yield from self._until(key, row[-1] - self._delay_ms)
            told = Row(*row.__fields__[:-1])(*row[:-1])
            yield from self._processor.handleInputRows(key, iter([told]), self._clock.values())
        self._clock.end()

    def handleExpiredTimer(
        self, key: tuple[object, ...], timerValues: TimerValues, expiredTimerInfo: ExpiredTimerInfo
    ) -> Iterator[Row]:
        """Take a timer that was left to Spark, and those that it leads to; called by Spark."""
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
    """Spark's handle for one key at a time, with timers that go by the rows.

    A time to live is left out: it goes by the clock of the computer, which stands still here.
    """

    def __init__(self, handle: StatefulProcessorHandle, is_stream: bool) -> None:
        self._handle, self._is_stream = handle, is_stream
        self.now_ms = 0
        self._timers: set[int] = set()
        self._sparks: set[int] = set()
        self._left: set[int] = set()

    def begin(self, values: TimerValues) -> None:
        """Another key has its turn."""
        self.now_ms = max(0, values.getCurrentWatermarkInMs())
        self._sparks = set(self._handle.listTimers()) if self._is_stream else set()
        self._timers, self._left = set(self._sparks), set()

    def leave_to_spark(self, until_ms: int) -> None:
        """Spark itself fires its timers up to this time, one after the other, and forgets them."""
        self._left = {due_ms for due_ms in self._sparks if due_ms <= until_ms}

    def end(self) -> None:
        """Leave to Spark what is still to come."""
        if self._is_stream:
            for due_ms in sorted(self._timers - self._sparks):
                self._handle.registerTimer(due_ms)
            for due_ms in sorted(self._sparks - self._timers):
                self._handle.deleteTimer(due_ms)

    def values(self) -> TimerValues:
        """Both clocks say the same."""
        return TimerValues(self.now_ms, self.now_ms)

    def next_due(self, until_ms: int) -> int | None:
        """Return the first timer up to a time."""
        first = min(self._timers - self._left, default=until_ms + 1)
        return first if first <= until_ms else None

    def registerTimer(self, expiryTimestampMs: int) -> None:
        """One in the past is fired as soon as can be."""
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


# ---- `init`, tried before Spark calls it


def states_with_ttl(processor: StatefulProcessor) -> list[str]:
    """Return the names of a processor's states that have a time to live; raises what its `init` raises."""
    handle = _TryHandle()
    copy(processor).init(handle)
    return handle.with_ttl


class _TryHandle(StatefulProcessorHandle):
    """One without Spark behind it."""

    def __init__(self) -> None:
        self.with_ttl: list[str] = []

    def getValueState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> ValueState:
        self._note(stateName, ttlDurationMs)
        return ValueState(_NOBODY, stateName)

    def getListState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> ListState:
        self._note(stateName, ttlDurationMs)
        return ListState(_NOBODY, stateName)

    def getMapState(
        self, stateName: str, userKeySchema: Any, valueSchema: Any, ttlDurationMs: int | None = None
    ) -> MapState:
        self._note(stateName, ttlDurationMs)
        return MapState(_NOBODY, stateName)

    def registerTimer(self, expiryTimestampMs: int) -> None:
        raise RuntimeError("init() has no key, whose timer it could set; set it in handleInputRows().")

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        self.registerTimer(expiryTimestampMs)

    def listTimers(self) -> Iterator[int]:
        return iter(())

    def deleteIfExists(self, stateName: str) -> None:
        """There is none yet."""

    def _note(self, name: str, ttl_ms: int | None) -> None:
        if ttl_ms is not None:
            self.with_ttl.append(name)


_NOBODY: Any = None
