"""Alarms of `@alert`: the rules for one key, and a stateful operator of Spark.

A key has up to three alarms: `when` (a condition), `absent` (silence) and `rate` (a value that changes fast). Each is
raised and cleared alternately, by the times of the messages only. A stream, an interrupted stream and one batch of the
same rows therefore have the same result. Only silence that has not ended needs a clock.

(help: pipeline-rules)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

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
from smqrt.pipeline import api, processors
from smqrt.pipeline.api import Declaration
from smqrt.pipeline.discover import column, quoted
from smqrt.pipeline.processors import EVENT_TIME, NO_TIMERS, PROCESSING_TIME

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


# ---- The rules for one key

WHEN, ABSENT, RATE_RULE = "when", "absent", "rate"
RAISED, CLEARED = "raised", "cleared"

_MAX_POINTS = 64
"""The number of parts into which the time of a rate is divided; the state has one value for each part."""


class AlertRow(NamedTuple):
    """One row of a key.

    Attributes:
        ts_us: its time in microseconds.
        when, clear: whether the conditions are true; None for NULL.
        value: the value of the expression with a rate.
        values: the columns of the row that an alarm reports, as JSON.
    """

    ts_us: int
    when: bool | None
    clear: bool | None
    value: float | None
    values: str


class AlarmEvent(NamedTuple):
    """An alarm that is raised or cleared.

    Attributes:
        rule: WHEN, ABSENT or RATE.
        state: RAISED or CLEARED.
        ts_us: its time in microseconds.
        values: the columns of the row that caused it, as JSON; for silence, of the last row before it.
    """

    rule: str
    state: str
    ts_us: int
    values: str


@dataclass(frozen=True)
class RateRule:
    """A change that raises an alarm.

    Attributes:
        rises: whether a rise (`>`, `>=`) or a fall (`<`, `<=`) raises it.
        inclusive: whether a change of exactly `limit` raises it.
        limit: the change; negative for a fall.
        per_us: the time of the change, in microseconds.
    """

    rises: bool
    inclusive: bool
    limit: float
    per_us: int

    def exceeded(self, change: float) -> bool:
        """Return whether a change raises the alarm."""
        if self.inclusive and change == self.limit:
            return True
        return change > self.limit if self.rises else change < self.limit


@dataclass(frozen=True)
class AlertRules:
    """The conditions that raise alarms; times in microseconds, None for an unused rule."""

    cooldown_us: int = 0
    absent_us: int | None = None
    rate: RateRule | None = None


@dataclass
class Alarm:
    """One alarm of one key.

    Attributes:
        raised: whether it is raised.
        since_us: when it was last raised, None if never.
    """

    raised: bool = False
    since_us: int | None = None

    def free_us(self, cooldown_us: int) -> int | None:
        """Return the first time at which it can be raised again; None when it never was."""
        return None if self.since_us is None else self.since_us + cooldown_us


@dataclass
class KeyAlarms:
    """The state of one key.

    Attributes:
        last_us: time of its latest row, None before the first.
        values: columns of that row, as JSON.
        when, absent, rate: its alarms.
        points: (time, value) pairs for the rate: the lowest or highest value of each part of the time.
    """

    last_us: int | None = None
    values: str = "{}"
    when: Alarm = field(default_factory=Alarm)
    absent: Alarm = field(default_factory=Alarm)
    rate: Alarm = field(default_factory=Alarm)
    points: list[tuple[int, float]] = field(default_factory=list)

    def take(self, row: AlertRow, rules: AlertRules) -> Iterator[AlarmEvent]:
        """Process the next row of this key; yield the alarms that the row raises and clears, in order of time."""
        if rules.absent_us is not None:
            due_us = self.silence_due_us(rules)
            # First the silence before this row, so that the events are in order of time.
            if due_us is not None and due_us < row.ts_us:
                yield from self.raise_silence(rules)
            if self.absent.raised:
                self.absent.raised = False
                # A late row does not clear the alarm before the time when it was raised.
                yield AlarmEvent(ABSENT, CLEARED, max(row.ts_us, self.absent.since_us or 0), row.values)
        if row.when is not None:
            yield from _update(WHEN, self.when, row, row.when, not row.when and bool(row.clear), rules)
        if (rate := rules.rate) is not None and row.value is not None:
            points = self.points = [point for point in self.points if point[0] >= row.ts_us - rate.per_us]
            # One value for each part of the time, so that the state is small for frequent rows too.
            part_us = max(1, rate.per_us // _MAX_POINTS)
            if not points or points[-1][0] // part_us != row.ts_us // part_us:
                points.append((row.ts_us, row.value))
            elif (row.value < points[-1][1]) == rate.rises:
                points[-1] = (row.ts_us, row.value)
            extreme = min if rate.rises else max
            is_fast = rate.exceeded(row.value - extreme(point[1] for point in points))
            yield from _update(RATE_RULE, self.rate, row, is_fast, not is_fast, rules)
        if self.last_us is None or row.ts_us >= self.last_us:
            self.last_us, self.values = row.ts_us, row.values

    def silence_due_us(self, rules: AlertRules) -> int | None:
        """Return the time of the alarm for silence if no row arrives; None when it is raised or does not exist."""
        if self.last_us is None or rules.absent_us is None or self.absent.raised:
            return None
        return max(self.last_us + rules.absent_us, self.absent.free_us(rules.cooldown_us) or 0)

    def raise_silence(self, rules: AlertRules) -> Iterator[AlarmEvent]:
        """Raise the alarm for silence at its due time."""
        due_us = self.silence_due_us(rules)
        if due_us is not None:
            self.absent = Alarm(True, due_us)
            yield AlarmEvent(ABSENT, RAISED, due_us, self.values)


def _update(
    rule: str, alarm: Alarm, row: AlertRow, raises: bool, clears: bool, rules: AlertRules
) -> Iterator[AlarmEvent]:
    free_us = alarm.free_us(rules.cooldown_us)
    if not alarm.raised and raises and (free_us is None or row.ts_us >= free_us):
        alarm.raised, alarm.since_us = True, row.ts_us
        yield AlarmEvent(rule, RAISED, row.ts_us, row.values)
    elif alarm.raised and clears:
        alarm.raised = False
        yield AlarmEvent(rule, CLEARED, row.ts_us, row.values)


# ---- The operator

WALL, EVENT = "wall", "event"
"""Values of the option "clock" of a declaration, the clock for silence: the computer's, or the times of messages."""

_STATE = (
    "last_us bigint, vals string, when_raised boolean, when_us bigint, absent_raised boolean, absent_us bigint, "
    "rate_raised boolean, rate_us bigint, times array<bigint>, points array<double>, seen_ms bigint, timer_ms bigint"
)
_RATE = re.compile(r"(.+?)\s*(>=|<=|>|<)\s*([+-]?\d+(?:\.\d+)?)\s+per\s+(.+)", re.DOTALL)
_RESULT_COLUMNS = ("alert", "rule", "state", "ts", "values")
_INPUT = ("_ts", "_seq", "_when", "_clear", "_value", "_values")
_VALUES_JSON = {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX"}
_MISSED_MS = 60_000
"""The maximum delay of a timer while the query runs. A longer delay means that the query was stopped."""


def apply(frame: DataFrame, declaration: Declaration) -> DataFrame:
    """Return the alarms of a frame.

    Args:
        frame: a batch or stream with `ts`, the columns of the key and those of the conditions. Rows with a NULL in the
            key are left out.
        declaration: an @alert.

    Returns:
        A DataFrame with the columns of the key, `alert` (the declaration's name), `rule` ("when", "absent" or "rate"),
        `state` ("raised" or "cleared"), `ts` (its time), and `values`: the other columns of the row that caused it,
        without those of the journal (the column is omitted when there are no others).

    Raises:
        PipelineError: a column is missing or has the name of a result column, or a condition or rate is invalid.
    """
    from pyspark.sql import functions as F

    options, keys = declaration.options, declaration.options["key"]
    prefix = f"{declaration.where}: @alert {declaration.name}"
    for name in ("ts", *keys):
        if name not in frame.columns:
            columns = ", ".join(frame.columns)
            raise PipelineError(
                f"{prefix} needs the column {name!r}, which its function must return; it has {columns}."
            )
    for name in keys:
        if name in _RESULT_COLUMNS:
            raise PipelineError(f"{prefix} has a key {name!r}, which is a column of its result too; rename the column.")
    ignored = {*keys, *(column.name for column in COLUMNS)}
    reported = [name for name in frame.columns if name not in ignored]
    time_mode = NO_TIMERS
    if options["absent"] and frame.isStreaming:
        time_mode = EVENT_TIME if options.get("clock", WALL) == EVENT else PROCESSING_TIME
    if time_mode == EVENT_TIME and processors.watermark(frame.select("ts")) is None:
        frame = frame.withWatermark("ts", "0 seconds")
    schema = StructType([StructField(name, frame.schema[name].dataType) for name in keys])
    events = processors.transform(
        _alert_rows(frame, declaration, reported).groupBy(*map(_key_name, keys)),
        AlertProcessor(keys, rules(declaration), time_mode),
        schema.add("rule", "string").add("state", "string").add("_ts", "long").add("_values", "string"),
        str(options["mode"]).capitalize(),
        time_mode,
    )
    values = StructType([StructField(name, frame.schema[name].dataType) for name in reported])
    return events.select(
        *map(column, keys),
        F.lit(declaration.name).alias("alert"),
        "rule",
        "state",
        F.timestamp_micros("_ts").alias("ts"),
        *([F.from_json("_values", values, _VALUES_JSON).alias("values")] if reported else []),
    )


def endless(declaration: Declaration) -> bool:
    """Return whether a stream of this query has micro-batches without rows, for its clock.

    A run of the available rows then does not end, unless the session's setting
    spark.sql.streaming.noDataMicroBatches.enabled is false when the query starts.
    """
    is_timed = declaration.kind == "alert" and bool(declaration.options["absent"])
    return is_timed and declaration.options.get("clock", WALL) == WALL


def rules(declaration: Declaration) -> AlertRules:
    """Return the conditions that raise the alarms of an @alert.

    Raises:
        PipelineError: the rate is invalid.
    """
    options = declaration.options
    absent = options["absent"]
    return AlertRules(
        _microseconds(options["cooldown"] or "0 s"),
        _microseconds(absent) if absent else None,
        _rate(declaration)[1] if options["rate"] else None,
    )


class AlertProcessor(StatefulProcessor):
    """Keeps the alarms of each key in Spark's state.

    Args:
        keys: names of the columns of the key.
        rules: the conditions that raise alarms.
        time_mode: the clock of Spark's timers; "None" without timers.
    """

    def __init__(self, keys: Sequence[str], rules: AlertRules, time_mode: str) -> None:
        self._keys, self._rules = list(keys), rules
        self._timed, self._by_event = time_mode != NO_TIMERS, time_mode == EVENT_TIME

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Open the state; called by Spark in each task."""
        self._handle = handle
        self._state = handle.getValueState("alarms", _STATE)

    def handleInputRows(self, key: tuple[object, ...], rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:
        """Process the rows of a key in a micro-batch; called by Spark."""
        alarms, seen_ms, timer_ms = self._load()
        for row in sorted(rows, key=lambda row: (row._ts, row._seq)):
            alert_row = AlertRow(row._ts, row._when, row._clear, row._value, row._values)
            yield from self._rows(key, alarms.take(alert_row, self._rules))
        if self._timed:
            seen_ms = self._now_ms(timerValues)
            # An existing timer is changed only when it expires, because most keys send a message long before.
            timer_ms = timer_ms or self._set_timer(alarms, seen_ms, seen_ms)
        self._save(alarms, seen_ms, timer_ms)

    def handleExpiredTimer(
        self, key: tuple[object, ...], timerValues: TimerValues, expiredTimerInfo: ExpiredTimerInfo
    ) -> Iterator[Row]:
        """Raise the alarm for silence that has not ended; called by Spark."""
        alarms, seen_ms, _ = self._load()
        due_ms, now_ms = self._due_ms(alarms, seen_ms), self._now_ms(timerValues)
        if due_ms is not None and not self._by_event and now_ms - due_ms > _MISSED_MS:
            # The query was stopped at the due time, and has not read the messages of that time yet.
            seen_ms, due_ms = now_ms, self._due_ms(alarms, now_ms)
        if due_ms is not None and due_ms <= now_ms:
            yield from self._rows(key, alarms.raise_silence(self._rules))
        self._save(alarms, seen_ms, self._set_timer(alarms, seen_ms, now_ms))

    def close(self) -> None:
        """Do nothing: Spark closes the state."""

    def _now_ms(self, times: TimerValues) -> int:
        return int(times.getCurrentWatermarkInMs() if self._by_event else times.getCurrentProcessingTimeInMs())

    def _due_ms(self, alarms: KeyAlarms, seen_ms: int) -> int | None:
        """Return the time of the alarm for silence by the clock of the timers; None without one."""
        due_us = alarms.silence_due_us(self._rules)
        if due_us is None or self._by_event:
            return None if due_us is None else -(-due_us // 1000)  # rounded up
        # The computer's clock is ahead of the messages while the query catches up: the silence begins at `seen_ms`.
        return seen_ms + -(-(due_us - (alarms.last_us or 0)) // 1000)

    def _set_timer(self, alarms: KeyAlarms, seen_ms: int, now_ms: int) -> int:
        """Set the timer of the key and return its time; 0 without a timer."""
        due_ms = self._due_ms(alarms, seen_ms)
        if due_ms is None or due_ms <= now_ms:
            return 0
        self._handle.registerTimer(due_ms)
        return due_ms

    def _rows(self, key: tuple[object, ...], events: Iterator[AlarmEvent]) -> Iterator[Row]:
        names = (*self._keys, "rule", "state", "_ts", "_values")
        for event in events:
            yield Row(*names)(*key, event.rule, event.state, event.ts_us, event.values)

    def _load(self) -> tuple[KeyAlarms, int, int]:
        found = self._state.get()
        if found is None:
            return KeyAlarms(), 0, 0
        last_us, values, when, when_us, absent, absent_us, rate, rate_us, times, points, seen_ms, timer_ms = found
        pairs = list(zip(times, points, strict=True))
        alarms = Alarm(when, when_us), Alarm(absent, absent_us), Alarm(rate, rate_us)
        return KeyAlarms(last_us, values, *alarms, pairs), seen_ms, timer_ms

    def _save(self, alarms: KeyAlarms, seen_ms: int, timer_ms: int) -> None:
        flags = (part for alarm in (alarms.when, alarms.absent, alarms.rate) for part in (alarm.raised, alarm.since_us))
        times, points = [ts_us for ts_us, _ in alarms.points], [value for _, value in alarms.points]
        self._state.update((alarms.last_us, alarms.values, *flags, times, points, seen_ms, timer_ms))


def _alert_rows(frame: DataFrame, declaration: Declaration, reported: Sequence[str]) -> DataFrame:
    from pyspark.sql import functions as F

    options = declaration.options
    when = F.expr(options["when"] or "NULL").cast("boolean")
    clear = F.expr(options["clear"]).cast("boolean") if options["clear"] else ~when
    value = F.expr(_rate(declaration)[0] if options["rate"] else "NULL").cast("double")
    values = F.to_json(F.struct(*map(column, reported)), _VALUES_JSON) if reported else F.lit("{}")
    seq = F.col("seq") if "seq" in frame.columns else F.lit(0).cast("bigint")
    made = F.unix_micros("ts"), seq, when, clear, value, values
    columns = [each.alias(name) for name, each in zip(_INPUT, made, strict=True)]
    # The column `ts` has the watermark, which Spark needs for timers by event time.
    return frame.dropna(subset=[quoted(name) for name in options["key"]]).select(
        *(column(name).alias(_key_name(name)) for name in options["key"]), *columns, "ts"
    )


def _key_name(name: str) -> str:
    """Return a column's name for the state. A name without dots is unchanged, for the state of existing queries."""
    return name if not {".", "`"} & {*name} else "_key_" + "".join(f"{ord(each):x}_" for each in name)


def _rate(declaration: Declaration) -> tuple[str, RateRule]:
    """Return the expression with a rate, and the rule."""
    text = str(declaration.options["rate"])
    match = _RATE.fullmatch(text.strip())
    if match is None or (float(match[3]) < 0) != (match[2][0] == "<"):
        raise PipelineError(
            f"{declaration.where}: rate={text!r} is invalid; write a rise as 'temp > 5 per 1 minute' "
            "and a fall as 'temp < -5 per 1 minute'."
        )
    return match[1], RateRule(match[2][0] == ">", match[2].endswith("="), float(match[3]), _microseconds(match[4]))


def _microseconds(duration: str) -> int:
    return api.milliseconds(duration) * 1000
