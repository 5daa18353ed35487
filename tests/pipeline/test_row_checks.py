"""Expectations: which rows go on, which are counted, which become dead letters and which end the query."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from smqrt.errors import PipelineError
from smqrt.pipeline import row_checks
from smqrt.pipeline.api import Expectation, expectation
from smqrt.pipeline.row_checks import failed_counts, split_expectations

RANGE = expectation("here.py:1", "temp between -60 and 150", "dead_letter:dlq/temp")
KNOWN = expectation("here.py:1", "device is not null", "drop")
WARM = expectation("here.py:1", "temp > -50", "dead_letter:dlq/cold", name="warm enough")
MESSAGES = "topic string, ts timestamp, node string, seq long, payload binary, device string, temp double"
NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
ROWS: list[tuple[str | None, float | None]] = [("d1", 20.0), ("d2", 900.0), ("d3", None), (None, 20.0), ("d4", -80.0)]


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    rows = [
        ("site/t", NOON, "n1", seq, json.dumps({"device": device, "temp": temp}).encode(), device, temp)
        for seq, (device, temp) in enumerate(ROWS)
    ]
    return spark.createDataFrame(rows, MESSAGES).coalesce(1)


def seqs(frame: Any) -> list[int]:
    return sorted(row.seq for row in frame.collect())


def test_rows_that_fail_or_are_unknown_are_left_out(frame: Any) -> None:
    good, rejected = split_expectations(frame, [RANGE, KNOWN, WARM], "readings")
    assert seqs(good) == [0]
    assert good.columns == frame.columns
    assert [(topic, seqs(rows)) for topic, rows in rejected] == [("dlq/temp", [1, 2, 4]), ("dlq/cold", [])]


def test_without_expectations_nothing_is_done(frame: Any) -> None:
    assert split_expectations(frame, []) == (frame, [])


def test_a_dead_letter_has_the_message_and_every_reason(frame: Any) -> None:
    _, rejected = split_expectations(frame, [RANGE, WARM], "readings")
    rows = {json.loads(row.payload)["seq"]: row for row in row_checks.dead_letters(rejected).collect()}
    assert {row.topic for row in rows.values()} == {"dlq/temp"}
    assert json.loads(rows[4].payload) == {
        "reason": "temp between -60 and 150; warm enough",
        "topic": "site/t",
        "node": "n1",
        "seq": 4,
        "ts": "2026-11-21T12:00:00.000000Z",
        "payload": '{"device": "d4", "temp": -80.0}',
    }


def test_binary_payloads_are_shown_in_base64(frame: Any) -> None:
    binary = frame.filter("seq = 1").selectExpr("* except (payload)", "unhex('FF00') as payload")
    (row,) = row_checks.dead_letters(split_expectations(binary, [RANGE])[1]).collect()
    letter = json.loads(row.payload)
    assert letter["payload_base64"] == "/wA="
    assert "payload" not in letter


def test_rows_that_are_no_messages_are_shown_whole(frame: Any) -> None:
    means = frame.groupBy("topic").agg({"temp": "max"}).withColumnRenamed("max(temp)", "top")
    few = expectation("here.py:1", "top < 100", "dead_letter:dlq/top")
    (row,) = row_checks.dead_letters(split_expectations(means, [few])[1]).collect()
    assert json.loads(row.payload) == {"reason": "top < 100", "row": {"topic": "site/t", "top": 900.0}}


def test_a_failed_required_expectation_ends_the_query_with_row(frame: Any) -> None:
    good, _ = split_expectations(frame, [expectation("here.py:1", "temp < 500", "fail")], "readings", "p/temp.py:7")
    with pytest.raises(
        Exception, match=r"a row of readings \(p/temp\.py:7\) fails @expect\('temp < 500', .*\"device\":\"d2\""
    ):
        good.collect()


@pytest.mark.parametrize(
    ("condition", "said"),
    [
        ("tmp > 3", r"p\.py:7: @expect\('tmp > 3'\) can't be checked: .*`tmp`.* The columns are topic, ts,"),
        ("temp >", r"p\.py:7: @expect\('temp >'\) can't be checked: "),
        ("temp + 1", r"p\.py:7: @expect\('temp \+ 1'\) returns double; write a condition, true or false\."),
    ],
)
def test_a_wrong_condition_is_one_sentence(frame: Any, condition: str, said: str) -> None:
    with pytest.raises(PipelineError, match=said) as caught:
        split_expectations(frame, [Expectation(condition, "drop", "", condition)], "readings", "p.py:7")
    assert "\n" not in str(caught.value)


def test_a_stream_counts_what_fails_while_it_passes(spark: Any, frame: Any, tmp_path: Path) -> None:
    frame.write.parquet(str(tmp_path / "rows"))
    stream = spark.readStream.schema(frame.schema).parquet(str(tmp_path / "rows"))
    good, _ = split_expectations(stream, [RANGE, KNOWN], "readings")
    seen: list[int] = []
    writer = good.writeStream.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
    query = writer.foreachBatch(lambda batch, _: seen.extend(seqs(batch))).start()
    query.awaitTermination()
    assert seen == [0]
    assert failed_counts(query.lastProgress.observedMetrics) == {"temp between -60 and 150": 3, "device is not null": 1}
