"""Rows of a key for a processor of Spark's `transformWithState`: in the order of their times, with timers in between.

Spark hands over all rows of a micro-batch before it fires a timer, and fires none in a batch. What a processor gives
would depend on where micro-batches begin and end, and a backfill would give something else. So `ByRows` hands over one
row after the other and fires the timers that are due before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

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

MILLISECONDS = "_smqrt_ms"
"""The last column of the rows of `ByRows`: their time since 1970, which the processor doesn't see."""


class InOrder(StatefulProcessor):
    """Hands the rows of a key on in order: Spark's exchange leaves them in none.

    Args:
        processor: gets them.
        order: positions of the columns that they are sorted by, NULL first; none leaves them as they come.
    """

    def __init__(self, processor: StatefulProcessor, order: Sequence[int]) -> None:
        self._processor, self._order = processor, tuple(order)

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Is called by Spark in each task."""
        self._processor.init(handle)

    def handleInputRows(self, key: Any, rows: Any, timerValues: TimerValues) -> Iterator[Any]:
        """Takes the rows of a key in a micro-batch; called by Spark."""
        yield from self._processor.handleInputRows(key, iter(self._sorted(rows)), timerValues)

    def handleExpiredTimer(
        self, key: Any, timerValues: TimerValues, expiredTimerInfo: ExpiredTimerInfo
    ) -> Iterator[Any]:
        """Takes a timer that is due; called by Spark."""
        yield from self._processor.handleExpiredTimer(key, timerValues, expiredTimerInfo)

    def close(self) -> None:
        """Is called by Spark at the end of each task."""
        self._processor.close()

    def _sorted(self, rows: Any) -> Any:
        def place(row: Row) -> list[tuple[bool, Any]]:
            return [(row[at] is not None, row[at]) for at in self._order]

        return sorted(rows, key=place) if self._order else rows


class ByRows(InOrder):
    """A processor whose clock is the times of the rows, each of which is a micro-batch of its own.

    Args:
        processor: gets them.
        order: as of `InOrder`; the last column of each row is `MILLISECONDS`.
        delay_ms: by so much the clock is behind the rows, as a watermark is.
        is_stream: timers that are still to come are left to Spark, whose clock is the watermark; in a batch nothing
            comes any more.
    """

    def __init__(self, processor: StatefulProcessor, order: Sequence[int], delay_ms: int, is_stream: bool) -> None:
        super().__init__(processor, order)
        self._delay_ms, self._is_stream = delay_ms, is_stream

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Is called by Spark in each task."""
        self._clock = _Clock(handle, self._is_stream)
        self._processor.init(self._clock)

    def handleInputRows(self, key: Any, rows: Any, timerValues: TimerValues) -> Iterator[Any]:
        """Takes the rows of a key in a micro-batch; called by Spark."""
        self._clock.begin(timerValues)
        for row in self._sorted(rows):
            if row[-1] is not None:
                yield from self._until(key, row[-1] - self._delay_ms)
            told = Row(*row.__fields__[:-1])(*row[:-1])
            yield from self._processor.handleInputRows(key, iter([told]), self._clock.values())
        self._clock.end()

    def handleExpiredTimer(
        self, key: Any, timerValues: TimerValues, expiredTimerInfo: ExpiredTimerInfo
    ) -> Iterator[Any]:
        """Takes a timer that was left to Spark, and those that it leads to; called by Spark."""
        self._clock.begin(timerValues)
        until_ms, due_ms = self._clock.now_ms, expiredTimerInfo.getExpiryTimeInMs()
        self._clock.leave_to_spark(until_ms)
        yield from self._expired(key, due_ms)
        yield from self._until(key, until_ms)
        self._clock.end()

    def _until(self, key: Any, until_ms: int) -> Iterator[Any]:
        while (due_ms := self._clock.next_due(until_ms)) is not None:
            yield from self._expired(key, due_ms)
            self._clock.deleteTimer(due_ms)
        self._clock.now_ms = max(self._clock.now_ms, until_ms)

    def _expired(self, key: Any, due_ms: int) -> Iterator[Any]:
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
        """Leaves to Spark what is still to come."""
        if self._is_stream:
            for due_ms in sorted(self._timers - self._sparks):
                self._handle.registerTimer(due_ms)
            for due_ms in sorted(self._sparks - self._timers):
                self._handle.deleteTimer(due_ms)

    def values(self) -> TimerValues:
        """Both clocks say the same."""
        return TimerValues(self.now_ms, self.now_ms)

    def next_due(self, until_ms: int) -> int | None:
        """Returns the first timer up to a time."""
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
