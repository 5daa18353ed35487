"""When one key raises an alarm and when it is over: the rules of `@alert`, without Spark.

A key has up to three alarms: `when` (a condition), `absent` (silence) and `rate` (a value that changes fast). Each is
raised and cleared in turn, never twice in a row, and decided by the times of the messages alone. So a stream, the same
rows in one batch, and a stream that was interrupted tell the same. Only silence that still lasts needs a clock.

Source: design of the pipeline §7 (help/pipeline-rules.md is the page for users).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

WHEN, ABSENT, RATE = "when", "absent", "rate"
RAISED, CLEARED = "raised", "cleared"

_KEPT_POINTS = 64


class Reading(NamedTuple):
    """One row of a key.

    Attributes:
        ts_us: its time in microseconds.
        when, clear: whether the conditions hold; None when that isn't known.
        value: of which the change is watched.
        values: what an alarm tells of the row, as JSON.
    """

    ts_us: int
    when: bool | None
    clear: bool | None
    value: float | None
    values: str


class Event(NamedTuple):
    """An alarm that is raised or over.

    Attributes:
        rule: WHEN, ABSENT or RATE.
        state: RAISED or CLEARED.
        ts_us: the time of it in microseconds.
        values: of the row that tells it, as JSON; for silence, of the last row before it.
    """

    rule: str
    state: str
    ts_us: int
    values: str


@dataclass(frozen=True)
class Rate:
    """A change that raises an alarm.

    Attributes:
        rises: whether it is a rise (`>`, `>=`) or a fall (`<`, `<=`) that counts.
        reached: whether a change of exactly `limit` counts.
        limit: the change; negative for a fall.
        per_us: within which time, in microseconds.
    """

    rises: bool
    reached: bool
    limit: float
    per_us: int

    def exceeded(self, change: float) -> bool:
        """Whether a change raises the alarm."""
        if self.reached and change == self.limit:
            return True
        return change > self.limit if self.rises else change < self.limit


@dataclass(frozen=True)
class Rules:
    """What raises alarms; times in microseconds, None where there is no such rule."""

    cooldown_us: int = 0
    absent_us: int | None = None
    rate: Rate | None = None


@dataclass
class Alarm:
    """One alarm of one key.

    Attributes:
        raised: whether it is.
        since_us: when it was raised last, None if never.
    """

    raised: bool = False
    since_us: int | None = None

    def free_us(self, cooldown_us: int) -> int | None:
        """Returns before which time it isn't raised again."""
        return None if self.since_us is None else self.since_us + cooldown_us


@dataclass
class Key:
    """What is remembered of a key.

    Attributes:
        last_us: time of its latest row, None before the first.
        values: of that row, as JSON.
        when, absent, rate: its alarms.
        points: (time, value) pairs for the rate: of each part of the time the lowest, or highest.
    """

    last_us: int | None = None
    values: str = "{}"
    when: Alarm = field(default_factory=Alarm)
    absent: Alarm = field(default_factory=Alarm)
    rate: Alarm = field(default_factory=Alarm)
    points: list[tuple[int, float]] = field(default_factory=list)

    def take(self, row: Reading, rules: Rules) -> Iterator[Event]:
        """Takes the next row of this key, and yields what it raises and clears, in order of time."""
        if rules.absent_us is not None:
            yield from self._end_silence(row, rules)
        if row.when is not None:
            yield from _turn(WHEN, self.when, row, row.when, not row.when and bool(row.clear), rules)
        if rules.rate is not None and row.value is not None:
            fast = self._is_fast(row.ts_us, row.value, rules.rate)
            yield from _turn(RATE, self.rate, row, fast, not fast, rules)
        if self.last_us is None or row.ts_us >= self.last_us:
            self.last_us, self.values = row.ts_us, row.values

    def silent_from_us(self, rules: Rules) -> int | None:
        """Returns when the alarm for silence is due if nothing comes; None when it's raised already or there's none."""
        if self.last_us is None or rules.absent_us is None or self.absent.raised:
            return None
        return max(self.last_us + rules.absent_us, self.absent.free_us(rules.cooldown_us) or 0)

    def silence(self, rules: Rules) -> Iterator[Event]:
        """Raises the alarm for silence, which is due."""
        due_us = self.silent_from_us(rules)
        if due_us is not None:
            self.absent = Alarm(True, due_us)
            yield Event(ABSENT, RAISED, due_us, self.values)

    def _end_silence(self, row: Reading, rules: Rules) -> Iterator[Event]:
        due_us = self.silent_from_us(rules)
        if due_us is not None and due_us < row.ts_us:
            yield from self.silence(rules)
        if self.absent.raised:
            self.absent.raised = False
            yield Event(ABSENT, CLEARED, max(row.ts_us, self.absent.since_us or 0), row.values)

    def _is_fast(self, ts_us: int, value: float, rate: Rate) -> bool:
        self.points = [point for point in self.points if point[0] >= ts_us - rate.per_us]
        _keep(self.points, ts_us, value, rate)
        extreme = min if rate.rises else max
        return rate.exceeded(value - extreme(point[1] for point in self.points))


def _turn(rule: str, alarm: Alarm, row: Reading, raises: bool, clears: bool, rules: Rules) -> Iterator[Event]:
    free_us = alarm.free_us(rules.cooldown_us)
    if not alarm.raised and raises and (free_us is None or row.ts_us >= free_us):
        alarm.raised, alarm.since_us = True, row.ts_us
        yield Event(rule, RAISED, row.ts_us, row.values)
    elif alarm.raised and clears:
        alarm.raised = False
        yield Event(rule, CLEARED, row.ts_us, row.values)


def _keep(points: list[tuple[int, float]], ts_us: int, value: float, rate: Rate) -> None:
    """Keeps what a key remembers small, however fast its rows come."""
    part_us = max(1, rate.per_us // _KEPT_POINTS)
    if not points or points[-1][0] // part_us != ts_us // part_us:
        points.append((ts_us, value))
    elif (value < points[-1][1]) == rate.rises:
        points[-1] = (ts_us, value)
