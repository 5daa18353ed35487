"""Alarms: raised and cleared in turn, with hysteresis, cool-down, silence and fast changes; live as in one batch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql.streaming.tws_tester import TwsTester

from smqrt.errors import PipelineError
from smqrt.pipeline import alert, alerts
from smqrt.pipeline.alerts import AlertRow, AlertRules, KeyAlarms, RateRule
from smqrt.pipeline.api import Declaration, declaration_of
from tests.support.waiting import wait_until

S = 1_000_000
NOON_MS = 1_795_262_400_000


def declared(**options: Any) -> Declaration:
    @alert(to="alerts/{device}", key="device", **options)
    def hot(readings: Any) -> Any:
        return readings

    found = declaration_of(hot)
    assert found
    return found


# ---- the rules by themselves


def temperature(second: float, temp: float | None) -> AlertRow:
    """As when="temp > 80", clear="temp < 75" gives it."""
    known = temp is not None
    return AlertRow(
        int(second * S), temp > 80 if known else None, temp < 75 if known else None, temp, json.dumps({"temp": temp})
    )


def told(
    rules: AlertRules, rows: Sequence[tuple[float, float | None]], key: KeyAlarms | None = None
) -> list[tuple[Any, ...]]:
    key = key or KeyAlarms()
    events = [event for row in rows for event in key.take(temperature(*row), rules)]
    return [(event.rule, event.state, event.ts_us / S) for event in events]


def test_between_the_two_limits_nothing_changes() -> None:
    rows = [(0, 79.0), (1, 81.0), (2, 90.0), (3, 76.0), (4, 81.0), (5, 74.0), (6, 76.0), (7, 80.5)]
    assert told(AlertRules(), rows) == [("when", "raised", 1), ("when", "cleared", 5), ("when", "raised", 7)]


def test_a_value_that_is_unknown_changes_nothing() -> None:
    assert told(AlertRules(), [(0, None), (1, 81.0), (2, None), (3, 74.0)]) == [
        ("when", "raised", 1),
        ("when", "cleared", 3),
    ]


def test_an_alarm_repeats_only_after_its_cool_down() -> None:
    rows = [(0, 81.0), (1, 70.0), (2, 81.0), (3, 70.0), (9.5, 81.0), (10, 81.0), (11, 82.0)]
    assert told(AlertRules(cooldown_us=10 * S), rows) == [
        ("when", "raised", 0),
        ("when", "cleared", 1),
        ("when", "raised", 10),
    ]


def test_silence_is_raised_when_due_and_cleared_by_rows() -> None:
    rows = [(0, 1.0), (30, 1.0), (61, 1.0), (62, 1.0)]
    assert told(AlertRules(absent_us=30 * S), rows) == [("absent", "raised", 60), ("absent", "cleared", 61)]


def test_silence_within_the_cool_down_waits_for_its_end() -> None:
    rows = [(0, 1.0), (15, 1.0), (30, 1.0), (100, 1.0), (120, 1.0)]
    assert told(AlertRules(absent_us=10 * S, cooldown_us=60 * S), rows) == [
        ("absent", "raised", 10),
        ("absent", "cleared", 15),
        ("absent", "raised", 70),
        ("absent", "cleared", 100),
    ]


def test_a_rise_counts_from_the_lowest_recent_value() -> None:
    rise = AlertRules(rate=RateRule(True, False, 5.0, 60 * S))
    rows = [(0, 20.0), (30, 24.0), (55, 25.0), (59, 25.5), (70, 25.0), (200, 40.0)]
    assert told(rise, rows) == [("rate", "raised", 59), ("rate", "cleared", 70)]


def test_a_fall_counts_from_the_highest() -> None:
    fall = AlertRules(rate=RateRule(False, True, -5.0, 60 * S))
    assert told(fall, [(0, 20.0), (10, 22.0), (20, 17.0), (90, 17.0)]) == [
        ("rate", "raised", 20),
        ("rate", "cleared", 90),
    ]


def test_what_a_fast_key_remembers_stays_small() -> None:
    key = KeyAlarms()
    told(AlertRules(rate=RateRule(True, False, 1e9, 60 * S)), [(n / 100, n % 7) for n in range(20_000)], key)
    assert len(key.points) <= 66


@given(
    st.lists(st.tuples(st.integers(0, 200), st.sampled_from([60.0, 77.0, 90.0, None])), max_size=40),
    st.integers(0, 30),
    st.integers(1, 40),
)
@settings(max_examples=200)
def test_alarms_are_raised_and_cleared_in_order(
    rows: list[tuple[int, float | None]], cooldown: int, absent: int
) -> None:
    rules = AlertRules(cooldown * S, absent * S, RateRule(True, False, 5.0, 20 * S))
    events = told(rules, sorted(rows, key=lambda row: row[0]))
    for rule in ("when", "absent", "rate"):
        own = [event for event in events if event[0] == rule]
        assert [event[1] for event in own] == ["raised", "cleared"] * (len(own) // 2) + ["raised"] * (len(own) % 2)
        assert [event[2] for event in own] == sorted(event[2] for event in own)
        raised = [event[2] for event in own if event[1] == "raised"]
        assert all(later - earlier >= cooldown for earlier, later in zip(raised, raised[1:], strict=False))


# ---- the operator, without Java


def row(second: float, temp: float, seq: int = 0) -> Row:
    reading = temperature(second, temp)
    ts_us = NOON_MS * 1000 + reading.ts_us
    names = ("device", "_ts", "_seq", "_when", "_clear", "_value", "_values")
    return Row(*names)("d1", ts_us, seq, reading.when, reading.clear, reading.value, reading.values)


def operator(mode: str, **options: Any) -> TwsTester:
    processor = alerts.AlertProcessor(["device"], alerts.rules(declared(**options)), mode)
    time_of = (lambda row: row._ts // 1000) if mode == "EventTime" else None
    return TwsTester(processor, timeMode=mode, outputMode="Update", eventTimeExtractor=time_of)


def shown(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    return [(row.device, row.rule, row.state, row._ts / S - NOON_MS / 1000) for row in rows]


def test_rows_of_a_micro_batch_are_processed_by_time() -> None:
    test = operator("None", when="temp > 80", clear="temp < 75")
    assert shown(test.test("d1", [row(3, 70), row(1, 81), row(2, 82)])) == [
        ("d1", "when", "raised", 1),
        ("d1", "when", "cleared", 3),
    ]
    assert shown(test.test("d1", [row(4, 81)])) == [("d1", "when", "raised", 4)]
    assert shown(test.test("d1", [row(5, 81)])) == []


def test_lasting_silence_is_reported_with_its_due_time() -> None:
    test = operator("ProcessingTime", absent="30 seconds")
    late_ms = 5_000
    test.setProcessingTime(NOON_MS + late_ms)
    assert shown(test.test("d1", [row(0, 20)])) == []
    assert shown(test.setProcessingTime(NOON_MS + late_ms + 29_999)) == []
    assert shown(test.setProcessingTime(NOON_MS + late_ms + 30_000)) == [("d1", "absent", "raised", 30)]
    assert shown(test.setProcessingTime(NOON_MS + 900_000)) == []
    assert shown(test.test("d1", [row(901, 20)])) == [("d1", "absent", "cleared", 901)]


def test_a_key_that_speaks_moves_its_timer() -> None:
    test = operator("ProcessingTime", absent="30 seconds")
    for second in range(1, 120, 7):
        assert shown(test.setProcessingTime(NOON_MS + second * 1000)) == []
        assert shown(test.test("d1", [row(second, 20)])) == []
    assert shown(test.setProcessingTime(NOON_MS + 149_000)) == [("d1", "absent", "raised", 113 + 30)]


def test_waiting_rows_are_read_before_silence_is_reported() -> None:
    test = operator("ProcessingTime", absent="30 seconds")
    test.setProcessingTime(NOON_MS)
    test.test("d1", [row(0, 20)])
    assert shown(test.setProcessingTime(NOON_MS + 3_600_000)) == []
    assert shown(test.test("d1", [row(20, 20), row(40, 20)])) == []
    assert shown(test.setProcessingTime(NOON_MS + 3_630_000)) == [("d1", "absent", "raised", 70)]


def test_event_time_watermarks_report_silence() -> None:
    test = operator("EventTime", absent="30 seconds")
    assert shown(test.test("d1", [row(0, 20), row(10, 20)])) == []
    assert shown(test.setWatermark(NOON_MS + 39_000)) == []
    assert shown(test.setWatermark(NOON_MS + 40_000)) == [("d1", "absent", "raised", 40)]
    assert shown(test.test("d1", [row(50, 20)])) == [("d1", "absent", "cleared", 50)]


@pytest.mark.parametrize(
    "text", ["fast", "temp > 5", "temp > -5 per 1 minute", "temp < 5 per 1 minute", "> 5 per 1 minute"]
)
def test_a_rate_that_cannot_be_read_is_one_sentence(text: str) -> None:
    with pytest.raises(
        PipelineError, match=r"test_alerts\.py:\d+: rate=.* is invalid; write a rise as 'temp > 5 per 1"
    ):
        alerts.rules(declared(rate=text))


# ---- in Spark

SCHEMA = "device string, ts timestamp, seq long, temp double"
NOON = datetime.fromtimestamp(NOON_MS / 1000, UTC)
READINGS = [
    *((f"d{n % 2}", n, 70 + n % 17 + n // 20) for n in range(60)),
    *(("d1", n, 60.0) for n in range(60, 100, 20)),
    ("d0", 110, 60.0),
    (None, 111, 99.0),
]


def write_readings(folder: Path, parts: int) -> str:
    """Write them into so many files; a stream makes a micro-batch of each."""
    folder.mkdir()
    size = -(-len(READINGS) // parts)
    for seq, (device, second, temp) in enumerate(READINGS):
        values = {"device": device, "ts": str(NOON + timedelta(seconds=second)), "seq": seq, "temp": temp}
        with (folder / f"{seq // size}.json").open("a") as file:
            file.write(json.dumps(values) + "\n")
    for part in range(parts):
        os.utime(folder / f"{part}.json", (part, part))
    return str(folder)


@pytest.fixture(scope="module")
def readings(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return spark.read.schema(SCHEMA).json(write_readings(tmp_path_factory.mktemp("alerts") / "rows", 1))


def facts(rows: Sequence[Any]) -> list[tuple[Any, ...]]:
    return sorted(
        (row.ts.replace(tzinfo=UTC), row.device, row.alert, row.rule, row.state, row["values"].temp) for row in rows
    )


@contextmanager
def streamed(spark: Any, folder: Path, declaration: Declaration) -> Iterator[tuple[Any, Callable[[], list[Any]]]]:
    """A query over the readings in two micro-batches, and what gives what it told."""
    rows = write_readings(folder / "rows", 2)
    stream = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(rows)
    found: list[Any] = []
    writer = alerts.apply(stream, declaration).writeStream.outputMode("update")
    writer = writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(processingTime="0 seconds")
    query = writer.foreachBatch(lambda batch, _: found.extend(batch.collect())).start()
    try:
        yield query, lambda: found
    finally:
        query.stop()


def test_a_stream_reports_like_a_batch_then_lasting_silence(spark: Any, readings: Any, tmp_path: Path) -> None:
    declaration = declared(when="temp > 80", clear="temp < 75", cooldown="5 seconds", absent="15 seconds")
    batch = facts(alerts.apply(readings, declaration).collect())
    assert {fact[1] for fact in batch} == {"d0", "d1"}
    assert {fact[3:5] for fact in batch} == {
        (rule, state) for rule in ("when", "absent") for state in ("raised", "cleared")
    }
    declaration.options["clock"] = alerts.EVENT
    with streamed(spark, tmp_path, declaration) as (query, found):
        query.processAllAvailable()
        live = facts(found())
    silent = (NOON + timedelta(seconds=95), "d1", "hot", "absent", "raised", 60.0)
    assert live == sorted([*batch, silent])


def test_processing_time_reports_silence_without_rows(spark: Any, tmp_path: Path) -> None:
    declaration = declared(absent="1 second")
    assert alerts.endless(declaration)
    with streamed(spark, tmp_path, declaration) as (_, found):
        lasting = [(NOON + timedelta(seconds=81), "d1"), (NOON + timedelta(seconds=111), "d0")]
        wait_until(lambda: [fact[:2] for fact in facts(found()) if fact[4] == "raised"][-2:] == lasting)


@pytest.mark.parametrize(
    ("select", "said"),
    [
        (["device", "temp"], "needs the column 'ts', which its function must return; it has device, temp"),
        (["ts", "temp"], "needs the column 'device', which its function must return; it has ts, temp"),
    ],
)
def test_a_missing_column_is_one_sentence(readings: Any, select: list[str], said: str) -> None:
    with pytest.raises(PipelineError, match=said):
        alerts.apply(readings.select(*select), declared(when="temp > 80"))


def test_a_key_named_like_a_result_column_is_refused(readings: Any) -> None:
    @alert(to="alerts/{state}", key="state", when="temp > 80")
    def hot(readings: Any) -> Any:
        return readings

    declaration = declaration_of(hot)
    assert declaration
    with pytest.raises(PipelineError, match="has a key 'state', which is a column of its result too; rename"):
        alerts.apply(readings.withColumnRenamed("device", "state"), declaration)
