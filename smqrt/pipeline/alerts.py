"""`@alert` as a stateful operator of Spark: each key keeps its alarms between micro-batches, and silence has a timer.

Source: design of the pipeline §7 (help/pipeline-rules.md is the page for users).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
)
from pyspark.sql.types import StructField, StructType

from smqrt.errors import PipelineError
from smqrt.journal.record import COLUMNS
from smqrt.pipeline import intervals, state
from smqrt.pipeline.alarms import Alarm, Event, Key, Rate, Reading, Rules
from smqrt.pipeline.api import Declaration

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

WALL, EVENT = "wall", "event"
"""The option "clock" of a declaration: silence by the clock on the wall, or by the times of the messages alone."""

_NO_TIMERS, _BY_WALL, _BY_EVENT = "None", "ProcessingTime", "EventTime"
_STATE = (
    "last_us bigint, vals string, when_raised boolean, when_us bigint, absent_raised boolean, absent_us bigint, "
    "rate_raised boolean, rate_us bigint, times array<bigint>, points array<double>, seen_ms bigint, timer_ms bigint"
)
_RATE = re.compile(r"(.+?)\s*(>=|<=|>|<)\s*([+-]?\d+(?:\.\d+)?)\s+per\s+(.+)", re.DOTALL)
_TOLD = ("alert", "rule", "state", "ts", "values")
_INPUT = ("_ts", "_seq", "_when", "_clear", "_value", "_values")
_VALUES_JSON = {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX"}
_AWAY_MS = 60_000


def apply(frame: DataFrame, declaration: Declaration) -> DataFrame:
    """Returns the alarms of a frame.

    Args:
        frame: with `ts`, the columns of the key and those that the conditions name; batch or stream. Rows without a
            key are left out.
        declaration: an @alert.

    Returns:
        A DataFrame with the columns of the key, `alert` (the declaration's name), `rule` ("when", "absent" or "rate"),
        `state` ("raised" or "cleared"), `ts` (the time of it), and `values`: the other columns of the row that tells
        it, without those of the journal (there is no such column when there are no others).

    Raises:
        PipelineError: a column is missing or is called as one of the result, or a condition or rate can't be read.
    """
    _check(frame, declaration)
    told = _values(frame, declaration.options["key"])
    clock = _time_mode(frame, declaration)
    if clock == _BY_EVENT and "spark.watermarkDelayMs" not in (frame.schema["ts"].metadata or {}):
        frame = frame.withWatermark("ts", "0 seconds")
    events = state.transform(
        _readings(frame, declaration, told).groupBy(*declaration.options["key"]),
        Processor(declaration.options["key"], rules(declaration), clock),
        _event_schema(frame, declaration.options["key"]),
        str(declaration.options["mode"]).capitalize(),
        clock,
    )
    return _result(events, frame, declaration, told)


def endless(declaration: Declaration) -> bool:
    """Whether a stream of this query has micro-batches without rows, for its clock, so that "available now" never ends.

    The session's setting spark.sql.streaming.noDataMicroBatches.enabled=false, when it starts, keeps it from that.
    """
    is_timed = declaration.kind == "alert" and bool(declaration.options["absent"])
    return is_timed and declaration.options.get("clock", WALL) == WALL


def rules(declaration: Declaration) -> Rules:
    """Returns what raises the alarms of an @alert.

    Raises:
        PipelineError: the rate can't be read.
    """
    options = declaration.options
    absent = options["absent"]
    return Rules(
        _microseconds(options["cooldown"] or "0 s"),
        _microseconds(absent) if absent else None,
        _rate(declaration)[1] if options["rate"] else None,
    )


class Processor(StatefulProcessor):
    """The alarms of each key, kept by Spark.

    Args:
        keys: names of the columns of the key.
        rules: what raises alarms.
        time_mode: what Spark's timers go by; "None" for none.
    """

    def __init__(self, keys: Sequence[str], rules: Rules, time_mode: str) -> None:
        self._keys, self._rules = list(keys), rules
        self._timed, self._by_event = time_mode != _NO_TIMERS, time_mode == _BY_EVENT

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Opens the state; called by Spark in each task."""
        self._handle = handle
        self._state = handle.getValueState("alarms", _STATE)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:
        """Takes the rows of a key in a micro-batch; called by Spark."""
        alarms, seen_ms, timer_ms = self._load()
        for row in sorted(rows, key=lambda row: (row._ts, row._seq)):
            reading = Reading(row._ts, row._when, row._clear, row._value, row._values)
            yield from self._told(key, alarms.take(reading, self._rules))
        if self._timed:
            seen_ms = self._now_ms(timerValues)
            timer_ms = timer_ms or self._set_timer(alarms, seen_ms, seen_ms)
        self._save(alarms, seen_ms, timer_ms)

    def handleExpiredTimer(
        self, key: Any, timerValues: TimerValues, expiredTimerInfo: ExpiredTimerInfo
    ) -> Iterator[Row]:
        """Raises the alarm for silence if it still lasts; called by Spark."""
        alarms, seen_ms, _ = self._load()
        due_ms, now_ms = self._due_ms(alarms, seen_ms), self._now_ms(timerValues)
        if due_ms is not None and not self._by_event and now_ms - due_ms > _AWAY_MS:
            # Nobody ran this when it was due: what came meanwhile waits to be read.
            seen_ms, due_ms = now_ms, self._due_ms(alarms, now_ms)
        if due_ms is not None and due_ms <= now_ms:
            yield from self._told(key, alarms.silence(self._rules))
        self._save(alarms, seen_ms, self._set_timer(alarms, seen_ms, now_ms))

    def close(self) -> None:
        """Spark closes the state."""

    def _now_ms(self, times: TimerValues) -> int:
        return int(times.getCurrentWatermarkInMs() if self._by_event else times.getCurrentProcessingTimeInMs())

    def _due_ms(self, alarms: Key, seen_ms: int) -> int | None:
        """The clock on the wall is ahead of the messages by what there is to catch up on, so waiting begins anew."""
        due_us = alarms.silent_from_us(self._rules)
        if due_us is None or self._by_event:
            return None if due_us is None else -(-due_us // 1000)
        return seen_ms + -(-(due_us - (alarms.last_us or 0)) // 1000)

    def _set_timer(self, alarms: Key, seen_ms: int, now_ms: int) -> int:
        """One timer a key, moved on only when it expires: most keys speak long before that."""
        due_ms = self._due_ms(alarms, seen_ms)
        if due_ms is None or due_ms <= now_ms:
            return 0
        self._handle.registerTimer(due_ms)
        return due_ms

    def _told(self, key: Any, events: Iterator[Event]) -> Iterator[Row]:
        names = (*self._keys, "rule", "state", "_ts", "_values")
        for event in events:
            yield Row(*names)(*key, event.rule, event.state, event.ts_us, event.values)

    def _load(self) -> tuple[Key, int, int]:
        found = self._state.get()
        if found is None:
            return Key(), 0, 0
        last_us, values, when, when_us, absent, absent_us, rate, rate_us, times, points, seen_ms, timer_ms = found
        pairs = list(zip(times, points, strict=True))
        alarms = Alarm(when, when_us), Alarm(absent, absent_us), Alarm(rate, rate_us)
        return Key(last_us, values, *alarms, pairs), seen_ms, timer_ms

    def _save(self, alarms: Key, seen_ms: int, timer_ms: int) -> None:
        flags = (part for alarm in (alarms.when, alarms.absent, alarms.rate) for part in (alarm.raised, alarm.since_us))
        times, points = [ts_us for ts_us, _ in alarms.points], [value for _, value in alarms.points]
        self._state.update((alarms.last_us, alarms.values, *flags, times, points, seen_ms, timer_ms))


def _time_mode(frame: DataFrame, declaration: Declaration) -> str:
    if not declaration.options["absent"] or not frame.isStreaming:
        return _NO_TIMERS
    return _BY_EVENT if declaration.options.get("clock", WALL) == EVENT else _BY_WALL


def _readings(frame: DataFrame, declaration: Declaration, told: Sequence[str]) -> DataFrame:
    from pyspark.sql import functions as F

    options = declaration.options
    when = F.expr(options["when"] or "NULL").cast("boolean")
    clear = F.expr(options["clear"]).cast("boolean") if options["clear"] else ~when
    value = F.expr(_rate(declaration)[0] if options["rate"] else "NULL").cast("double")
    values = F.to_json(F.struct(*(F.col(f"`{name}`") for name in told)), _VALUES_JSON) if told else F.lit("{}")
    seq = F.col("seq") if "seq" in frame.columns else F.lit(0).cast("bigint")
    made = F.unix_micros("ts"), seq, when, clear, value, values
    columns = [column.alias(name) for name, column in zip(_INPUT, made, strict=True)]
    # Kept for its watermark, without which Spark doesn't know the time of messages.
    return frame.dropna(subset=list(options["key"])).select(
        *(F.col(f"`{name}`") for name in options["key"]), *columns, "ts"
    )


def _values(frame: DataFrame, keys: Sequence[str]) -> list[str]:
    left_out = {*keys, *(column.name for column in COLUMNS)}
    return [name for name in frame.columns if name not in left_out]


def _event_schema(frame: DataFrame, keys: Sequence[str]) -> StructType:
    schema = StructType([StructField(name, frame.schema[name].dataType) for name in keys])
    return schema.add("rule", "string").add("state", "string").add("_ts", "long").add("_values", "string")


def _result(events: DataFrame, frame: DataFrame, declaration: Declaration, told: Sequence[str]) -> DataFrame:
    from pyspark.sql import functions as F

    values = StructType([StructField(name, frame.schema[name].dataType) for name in told])
    return events.select(
        *(F.col(f"`{name}`") for name in declaration.options["key"]),
        F.lit(declaration.name).alias("alert"),
        "rule",
        "state",
        F.timestamp_micros("_ts").alias("ts"),
        *([F.from_json("_values", values, _VALUES_JSON).alias("values")] if told else []),
    )


def _check(frame: DataFrame, declaration: Declaration) -> None:
    begins = f"{declaration.where}: @alert {declaration.name}"
    columns = ", ".join(frame.columns)
    for name in ("ts", *declaration.options["key"]):
        if name not in frame.columns:
            raise PipelineError(
                f"{begins} needs the column {name!r}, which its function must return; it has {columns}."
            )
    for name in declaration.options["key"]:
        if name in _TOLD:
            raise PipelineError(f"{begins} has a key called {name!r}, as a column of its result is; rename the column.")


def _rate(declaration: Declaration) -> tuple[str, Rate]:
    """Returns the expression whose change is watched, and the change."""
    text = str(declaration.options["rate"])
    match = _RATE.fullmatch(text.strip())
    if match is None or (float(match[3]) < 0) != (match[2][0] == "<"):
        raise PipelineError(
            f"{declaration.where}: rate={text!r} can't be read; write a rise as 'temp > 5 per 1 minute' "
            "and a fall as 'temp < -5 per 1 minute'."
        )
    return match[1], Rate(match[2][0] == ">", match[2].endswith("="), float(match[3]), _microseconds(match[4]))


def _microseconds(duration: str) -> int:
    return intervals.milliseconds(duration) * 1000
