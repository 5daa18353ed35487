"""`smqrt pipeline test`: slices, golden files, what is said when they differ; a stream gives what a batch gives."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smqrt.errors import PipelineError
from smqrt.journal.reader import Journal as Reader
from smqrt.journal.record import Flag
from smqrt.pipeline import discover, testing
from smqrt.pipeline.checkpoint import QueryStart
from smqrt.pipeline.discover import load
from smqrt.pipeline.graph import Graph, JournalSource
from smqrt.pipeline.sinks import as_messages

HEAD = """from pyspark.sql import functions as F
from smqrt.pipeline import alert, expect, publish, reference, source, table
"""
PIPELINES = (
    HEAD
    + """

@source(topics="site1/#", json="device string, temp double", watermark="10 seconds", dead_letter="dlq/json")
@expect("temp between -60 and 150", on_fail="dead_letter:dlq/temp")
def readings(df):
    return df

@reference("places.csv", schema="device string, place string")
def places(df):
    return df

@publish(to="agg/{device}", mode="update")
def per_minute(readings):
    grouped = readings.groupBy(F.window("ts", "1 minute"), "device")
    return grouped.agg(F.avg("temp").alias("avg"), F.count("*").alias("n")).select("window.start", "device", "avg", "n")

@publish(to="places/{place}", subtopic="{device}")
def placed(readings, places):
    return readings.join(places, "device").select("place", "device", "temp")

@alert(to="alerts/{device}", key="device", when="temp > 80", clear="temp < 75", absent="30 seconds")
def hot(readings):
    return readings.select("ts", "device", "temp")

@table("silver", partition_by=["device"])
def silver(readings):
    return readings.select("ts", "device", "temp")
"""
)
DAY = "2026-11-21T12:0"


def line(time: str, device: str, temp: float | None) -> dict[str, Any]:
    return {"topic": f"site1/{device}", "ts": f"{DAY}{time}Z", "payload": {"device": device, "temp": temp}}


SLICE = [
    line("0:00", "d1", 20.5),
    line("0:01", "d1", 21.5),
    line("0:02", "d2", 81.0),
    line("0:05.250", "d2", 900),
    {"topic": "site1/d3", "ts": f"{DAY}0:06Z", "payload": "no JSON"},
    {"topic": "site2/d1", "ts": f"{DAY}0:07Z", "payload": {"device": "d1", "temp": 1}},
    {"topic": "site1/d1", "ts": f"{DAY}0:08Z", "payload": {"device": "d1", "temp": 2}, "flags": ["pipeline"]},
    line("0:09", "d1", 21.0),
    line("1:10", "d1", 90.5),
    line("1:30", "d1", 70),
]


def written(folder: Path) -> Path:
    (folder / "tests").mkdir(parents=True)
    (folder / "p.py").write_text(PIPELINES)
    (folder / "places.csv").write_text("device,place\nd1,hall\n")
    (folder / "tests" / "messages.jsonl").write_text("\n".join(map(json.dumps, SLICE)))
    return folder


def run(folder: Path, spark: Any, **options: Any) -> tuple[int, list[str]]:
    said: list[str] = []
    return testing.run(folder, spark=spark, say=said.append, **options), said


@pytest.fixture(scope="module")
def updated(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose golden files were written from what its queries give."""
    folder = written(tmp_path_factory.mktemp("app") / "pipelines")
    code, said = run(folder, spark, update=True)
    assert (code, len(said)) == (0, 5), said
    return folder


def kept(folder: Path, name: str) -> Any:
    return json.loads((folder / "tests" / f"{name}.json").read_text())


def test_golden_files_hold_what_queries_give(updated: Path) -> None:
    assert kept(updated, "per_minute") == [
        {"topic": "agg/d1", "payload": {"start": f"{DAY}0:00.000Z", "device": "d1", "avg": 21.0, "n": 3}},
        {"topic": "agg/d1", "payload": {"start": f"{DAY}1:00.000Z", "device": "d1", "avg": 80.25, "n": 2}},
        {"topic": "agg/d2", "payload": {"start": f"{DAY}0:00.000Z", "device": "d2", "avg": 81.0, "n": 1}},
    ]
    assert kept(updated, "placed")[0] == {
        "topic": "places/hall",
        "subtopic": "d1",
        "payload": {"place": "hall", "device": "d1", "temp": 20.5},
    }
    alarms = [row["payload"] for row in kept(updated, "hot")]
    assert sorted((row["ts"], row["device"], row["rule"], row["state"]) for row in alarms) == [
        (f"{DAY}0:02.000Z", "d2", "when", "raised"),
        (f"{DAY}0:32.000Z", "d2", "absent", "raised"),
        (f"{DAY}0:39.000Z", "d1", "absent", "raised"),
        (f"{DAY}1:10.000Z", "d1", "absent", "cleared"),
        (f"{DAY}1:10.000Z", "d1", "when", "raised"),
        (f"{DAY}1:30.000Z", "d1", "when", "cleared"),
    ]
    assert kept(updated, "silver")[0] == {"ts": f"{DAY}0:00.000000Z", "device": "d1", "temp": 20.5}
    assert [row["topic"] for row in kept(updated, "readings.dead_letters")] == ["dlq/json", "dlq/temp"]


def test_a_difference_fails_and_is_shown(spark: Any, updated: Path) -> None:
    file = updated / "tests" / "placed.json"
    before = file.read_text()
    file.write_text(before.replace("20.5", "20.3").replace("21.5", "21.5000000001"))
    (updated / "tests" / "gone.json").write_text("[]")
    code, said = run(updated, spark, names=["placed"])
    assert code == 1
    assert said[0].startswith(f"FAILED   placed: 1 row of {file} missing (-), 1 row not expected (+)")
    assert said[3:] == ["      payload.temp: expected 20.3, found 20.5"]
    file.write_text(before)
    with pytest.raises(PipelineError, match="There is no pipeline 'plced'"):
        run(updated, spark, names=["plced"])


def test_failing_queries_or_missing_golden_files_fail_the_test(spark: Any, tmp_path: Path) -> None:
    folder = written(tmp_path / "pipelines")
    (folder / "p.py").write_text(
        HEAD
        + """
@source(topics="site2/#", json="temp int")
def readings(df): return df
@publish(to="all")
def all(readings): return readings.select("temp")
@publish(to="broken")
@expect("temp > 5", on_fail="fail")
def broken(readings): return readings.select("temp")
"""
    )
    (folder / "tests" / "gone.json").write_text("[]")
    code, said = run(folder, spark)
    assert code == 1
    assert said[0].startswith("FAILED   all: ")
    assert said[0].endswith("all.json does not exist; check the results (1 row) and use --update:")
    assert said[1] == '  + {"payload": {"temp": 1}, "topic": "all"}'
    assert re.fullmatch(
        r"""FAILED   broken: \S+: broken: a row of broken \(\S+:8\) fails @expect\('temp > 5', on_fail='fail'\): """
        r"""\{"temp":1\}""",
        said[2],
    )
    assert said[3].startswith("unused ")


def test_small_micro_batches_give_the_result_of_one_batch(spark: Any, updated: Path, tmp_path: Path) -> None:
    testing.write_journal(updated / "tests" / "messages.jsonl", tmp_path / "journal")
    rows, catalog = JournalSource(str(tmp_path / "journal")), load(updated)
    query = catalog.get("per_minute")
    catalog.get("readings").options["max_rows"] = 4

    def frame(source: Callable[[Any], Any]) -> Any:
        return as_messages(
            Graph(catalog, source, lambda each: discover.table(spark, each, updated)).frame(query), query
        )

    end = Reader(tmp_path / "journal").end()
    batch = list(testing.message_rows(frame(lambda source: rows.batch(spark, source, {}, end))))
    found: list[Any] = []
    stream = frame(lambda source: rows.stream(spark, source, QueryStart({}, None), "test")).writeStream
    writer = stream.outputMode("update").option("checkpointLocation", str(tmp_path / "checkpoint"))
    running = writer.foreachBatch(lambda one, _: found.extend(testing.message_rows(one))).trigger(availableNow=True)
    assert running.start().awaitTermination(60)
    last = {(row["topic"], row["payload"]["start"]): row for row in found}
    assert len(found) > len(last)
    assert testing.differences(batch, list(last.values())) == ([], [])
    assert testing.differences(kept(updated, "per_minute"), batch) == ([], [])


# ---- the slice to test on


def test_the_slice_may_be_a_journal_or_another_file(spark: Any, updated: Path, tmp_path: Path) -> None:
    testing.write_journal(updated / "tests" / "messages.jsonl", tmp_path / "journal")
    passed = run(updated, spark, names=["placed"], journal=tmp_path / "journal")
    assert passed == (0, ["ok       placed: 5 rows"])
    with pytest.raises(PipelineError, match=r"/nowhere does not exist; give --journal a journal's folder or a \.jsonl"):
        run(updated, spark, journal=tmp_path / "nowhere")


def test_a_missing_or_second_slice_has_a_remedy(tmp_path: Path) -> None:
    folder = written(tmp_path / "pipelines")
    (folder / "tests" / "more.jsonl").write_text("")
    with pytest.raises(PipelineError, match=r"There are 2 \.jsonl files in .*/tests; select the rows"):
        testing.run(folder)
    for file in folder.glob("tests/*"):
        file.unlink()
    with pytest.raises(PipelineError, match=r"There is no \.jsonl file in .*/tests; select the rows"):
        testing.run(folder)


# ---- golden files


def test_rows_have_no_order_and_numbers_round() -> None:
    expected = [{"a": 1.0, "b": [1, {"c": 0.1 + 0.2}]}, {"a": 2}, {"a": 2}]
    assert testing.differences(expected, [{"a": 2}, {"a": 2.0}, {"b": [1, {"c": 0.3}], "a": 1}]) == ([], [])
    assert testing.differences(expected, [{"a": 2}, expected[0]]) == ([{"a": 2}], [])
    assert testing.differences([{"a": True}, {"a": "1"}], [{"a": 1}]) == ([{"a": "1"}, {"a": True}], [{"a": 1}])


def test_rows_that_are_alike_are_shown_together() -> None:
    missing = [{"t": "a", "p": {"x": 1, "y": 1}}, {"t": "b", "p": {"x": 7, "y": 7}}]
    extra = [{"t": "q", "p": {"z": 9}}, {"t": "a", "p": {"x": 1, "z": 3}}]
    assert list(testing.explain(missing, extra)) == [
        '  - {"p": {"x": 1, "y": 1}, "t": "a"}',
        '  + {"p": {"x": 1, "z": 3}, "t": "a"}',
        "      p.y: expected 1, it is missing",
        "      p.z: 3 was not expected",
        '  - {"p": {"x": 7, "y": 7}, "t": "b"}',
        '  + {"p": {"z": 9}, "t": "q"}',
    ]
    assert list(testing.explain([], [{"n": n} for n in range(13)]))[-1] == "  ... and 3 more"


@pytest.mark.parametrize("text", ["", "{}", "[1,"])
def test_a_golden_file_that_is_none_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "q.json").write_text(text)
    with pytest.raises(PipelineError, match=r"q\.json .*; smqrt pipeline test --update rewrites it\."):
        testing.load_golden(tmp_path / "q.json")


def test_a_golden_file_has_a_row_a_line(tmp_path: Path) -> None:
    rows = [{"b": "ü", "a": 1}, {"a": 0}]
    testing.save_golden(tmp_path / "tests" / "q.json", rows)
    assert (tmp_path / "tests" / "q.json").read_text() == '[\n{"a": 0},\n{"a": 1, "b": "ü"}\n]\n'
    assert testing.differences(rows, testing.load_golden(tmp_path / "tests" / "q.json")) == ([], [])


# ---- slices


def rows_of(tmp_path: Path, *lines: Any) -> list[Any]:
    (tmp_path / "slice.jsonl").write_text(
        "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines)
    )
    testing.write_journal(tmp_path / "slice.jsonl", tmp_path / "journal")
    journal = Reader(tmp_path / "journal")
    return list(journal.rows(journal.begin(), journal.end()))


def test_a_slice_is_a_journal(tmp_path: Path) -> None:
    rows = rows_of(
        tmp_path,
        {"topic": "a", "ts": 1.5, "payload": {"ü": 1}, "subtopic": "s", "uid": "u"},
        "",
        {"topic": "b", "ts": "1970-01-01T01:00:02.000003+01:00", "payload": "text", "flags": ["pipeline", "server"]},
        {"topic": None, "ts": "1970-01-01 00:00:03", "payload_hex": "ff00", "node": "n7", "seq": 9, "tid": 3},
    )
    assert [row.ts_us for row in rows] == [1_500_000, 2_000_003, 3_000_000]
    assert [row.payload for row in rows] == ['{"ü": 1}'.encode(), b"text", b"\xff\x00"]
    assert [row.flags for row in rows] == [0, Flag.PIPELINE | Flag.SERVER, Flag.DIRECT]
    assert [(row.seq, row.topic, row.subtopic, row.uid) for row in rows] == [
        (0, "a", "s", "u"),
        (1, "b", None, None),
        (2, None, None, None),
    ]


def test_a_slice_of_mqtt_messages(tmp_path: Path) -> None:
    of_smq = {"topic": "a", "ts": 1, "payload": "1", "qos": None, "retain": None, "properties": None}
    rows = rows_of(
        tmp_path,
        of_smq,
        of_smq | {"qos": 1, "retain": True, "properties": {"unit": "°C"}},
        of_smq | {"properties": '{"unit": "K"}'},
        {"topic": "a", "ts": 1, "payload": "1", "qos": 2},
    )
    assert [row[-3:] for row in rows] == [
        (None, None, None),
        (1, True, '{"unit": "°C"}'),
        (0, False, '{"unit": "K"}'),
        (2, False, "{}"),
    ]
    with pytest.raises(PipelineError, match=r"slice\.jsonl:1: qos=3, retain=None: qos is 0, 1 or 2,"):
        rows_of(tmp_path, of_smq | {"qos": 3})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", r"slice\.jsonl:1: Expecting property name.*; a line is like \{"),
        ('{"topic": "a", "ts": 1, "payload": 1}\n[]', r"slice\.jsonl:2: it isn't a JSON object;"),
        ('{"topic": "a", "payload": 1}', r"slice\.jsonl:1: ts=None is neither an ISO time nor seconds since 1970;"),
        ('{"topic": "a", "ts": 1}', r"slice\.jsonl:1: there is no payload;"),
        ('{"topik": "a", "ts": 1}', r"slice\.jsonl:1: a message has no field 'topik'; its fields are topic, ts,"),
        (
            '{"topic": "a", "ts": 1, "payload": 1, "flags": ["old"]}',
            r"flags=\['old'\]: the flags are direct, unrouted,",
        ),
        ("", r"slice\.jsonl contains no message; write one JSON object per line"),
    ],
)
def test_a_slice_that_cannot_be_read_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(PipelineError, match=said) as caught:
        rows_of(tmp_path, *text.split("\n"))
    assert "\n" not in str(caught.value)
