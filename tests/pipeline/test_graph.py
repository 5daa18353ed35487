"""Declarations become DataFrames: JSON fields, expectations, inputs, SQL, messages. Streams are in test_run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smqrt.errors import PipelineError
from smqrt.journal.record import Flag
from smqrt.pipeline.discover import Catalog, load
from smqrt.pipeline.graph import Graph, JournalSource
from smqrt.pipeline.sinks import as_messages, collect_messages
from tests.pipeline.recorded import Recorded, message

HEAD = "from smqrt.pipeline import alert, expect, publish, reference, source, table, view\n"
JSON = HEAD + "@source(topics='site1/#', json='device string, temp double')\ndef readings(df): return df\n"
PAYLOADS = [
    b'{"device": "d0", "temp": 20}',
    b'{"device": "d1", "temp": "warm"}',
    b"21.5",
    b"{half",
    b"",
    b"\xff\xfe",
    b' {"device": "d2"}',
    b'[{"device": "d3"}]',
]

Make = Callable[[str], Graph]


@pytest.fixture
def catalog(tmp_path: Path) -> Callable[..., Catalog]:
    """A factory: `catalog(text)` is what a file `p.py` with this text declares; more files by name."""

    def make(text: str, **files: str) -> Catalog:
        folder = tmp_path / "pipelines"
        folder.mkdir(exist_ok=True)
        (folder / "p.py").write_text(text)
        for name, content in files.items():
            (folder / ".".join(name.rsplit("_", 1))).write_text(content)
        return load(folder)

    return make


@pytest.fixture
def frames(spark: Any, tmp_path: Path) -> Callable[[Catalog], Graph]:
    """A factory of graphs over a journal with `PAYLOADS`, one row of a pipeline, and one of another topic."""
    rows = [message(seq, payload=payload) for seq, payload in enumerate(PAYLOADS)]
    rows.append(message(8, payload=b'{"device": "p", "temp": 1}', flags=int(Flag.PIPELINE)))
    rows.append(message(9, topic="site2/x", payload=b'{"device": "x", "temp": 1}'))
    recorded = Recorded(tmp_path / "journal").add(rows).seal()
    journal = JournalSource(str(recorded.path))

    def reference(declaration: Any) -> Any:
        return spark.createDataFrame([("d0", "hall")], "device string, room string")

    return lambda catalog: Graph(
        catalog, lambda source: journal.batch(spark, source, {"n1": 0}, {"n1": recorded.next_seq}), reference
    )


def found(frame: Any, *columns: str) -> list[tuple[Any, ...]]:
    return sorted((tuple(row) for row in frame.select(*columns).collect()), key=str)


def test_json_becomes_columns(catalog: Any, frames: Any) -> None:
    declared = catalog(JSON)
    frame = frames(declared).frame(declared.get("readings"))
    assert found(frame, "seq", "device", "temp") == [(0, "d0", 20.0), (1, "d1", None), (6, "d2", None)]


def test_bad_json_is_counted_and_reported(catalog: Any, frames: Any) -> None:
    declared = catalog(JSON.replace("double'", "double', dead_letter='dlq/json'"))
    graph = frames(declared)
    [(topic, bad)] = graph.rejected(declared.get("readings"))
    assert topic == "dlq/json"
    assert found(bad, "seq") == [(2,), (3,), (4,), (5,), (7,)]
    assert found(bad.limit(1), "reason") == [("the payload is not a JSON object",)]


def test_counts_are_observed(spark: Any, catalog: Any, frames: Any) -> None:
    from smqrt.pipeline import row_checks

    declared = catalog(JSON)
    frame = frames(declared).frame(declared.get("readings"))
    frame.collect()
    metrics = frame._jdf.queryExecution().observedMetrics().get(row_checks.json_observation("readings")).get()
    assert (metrics.getLong(0), metrics.getLong(1)) == (5, 1)


def test_fields_called_as_columns_of_the_journal(catalog: Any, frames: Any) -> None:
    text = JSON.replace("'device string, temp double'", "'device string, ts string'")
    declared = catalog(text)
    with pytest.raises(PipelineError, match=r"p\.py:2: the JSON field 'ts' has the name of a column.*prefix='m_'"):
        frames(declared).frame(declared.get("readings"))
    declared = catalog(text.replace("ts string'", "ts string', prefix='m_'"))
    assert found(frames(declared).frame(declared.get("readings")), "m_device", "m_ts")[0] == ("d0", None)


def test_pipelines_can_be_read_when_asked_for(catalog: Any, frames: Any) -> None:
    declared = catalog(JSON.replace("double'", "double', include_pipeline=True"))
    devices = found(frames(declared).frame(declared.get("readings")), "device")
    assert ("p",) in devices
    assert len(devices) == 4


def test_expectations_references_and_joins_with_oneself(catalog: Any, frames: Any) -> None:
    declared = catalog(
        HEAD
        + "@source('site1/#', json='device string, temp double')\n"
        + "@expect('temp is not null', on_fail='dead_letter:dlq/temp')\n"
        + "def readings(df): return df\n"
        + "@reference('devices.csv')\ndef devices(df): return df\n"
        + "def rooms(readings, devices): return readings.join(devices, 'device')\n"
        + "@publish(to='{room}')\ndef out(rooms, readings): return rooms.join(readings.select('device'), 'device')\n"
    )
    graph = frames(declared)
    assert found(graph.frame(declared.get("out")), "device", "temp", "room") == [("d0", 20.0, "hall")]
    [(topic, rejected)] = graph.rejected(declared.get("readings"))
    assert (topic, found(rejected, "device")) == ("dlq/temp", [("d1",), ("d2",)])


def test_sql(catalog: Any, frames: Any) -> None:
    declared = catalog(
        JSON, cold_sql="-- @publish to=cold/{device}\nSELECT device, temp FROM STREAM(readings) WHERE temp < 30;"
    )
    frame = frames(declared).frame(declared.get("cold"))
    assert found(frame, "device", "temp") == [("d0", 20.0)]
    assert [*collect_messages(as_messages(frame, declared.get("cold")))] == [
        (b"cold/d0", None, b'{"device":"d0","temp":20.0}')
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("@publish(to='x')\ndef f(readings): pass\n", r"p\.py:4: f: .*returns NoneType and not a DataFrame; is its"),
        (
            "@publish(to='x')\ndef f(readings):\n    return readings.where('hot')\n",
            r"p\.py:6: f: .*`hot` cannot be resolved",
        ),
        ("@publish(to='x')\ndef f(readings):\n    return 1 / 0\n", r"p\.py:6: f: ZeroDivisionError: division by zero"),
        ("@source(json='a sting')\ndef f(df): return df\n", r"p\.py:4: json='a sting' isn't a list of fields such as"),
    ],
)
def test_what_cannot_be_planned(catalog: Any, frames: Any, text: str, message: str) -> None:
    declared = catalog(JSON + text)
    with pytest.raises(PipelineError, match=message) as caught:
        frames(declared).frame(declared.get("f"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "to", "expected"),
    [
        (["topic", "temp"], "a/{topic}", (b"a/site1/d0", None, {"topic": "site1/d0", "temp": 20.0})),
        (["*"], "b", (b"b", None, PAYLOADS[0])),
        (["temp as payload"], "c", (b"c", None, b"20.0")),
        (["upper(device) as payload"], "c", (b"c", None, b"D0")),
        (["struct(temp) as payload"], "c", (b"c", None, {"temp": 20.0})),
        (["node", "count(*) as n"], "{node}/{n}", (b"n1/1", None, {"node": "n1", "n": 1})),
        (["ts"], "d", (b"d", None, {"ts": "2026-11-21T15:00:00.000Z"})),
        (["null as a", "1 as b"], "{a}/{{b}}/{b}", (b"null/{b}/1", None, {"b": 1})),
        (["'' as a"], "{a}", (b"null", None, {"a": ""})),
        (["window(ts, '1 minute') as window"], "{window.start}", (b"2026-11-21 15:00:00", None, ...)),
    ],
)
def test_messages(catalog: Any, frames: Any, columns: list[str], to: str, expected: Any) -> None:
    declared = catalog(JSON + f"@publish(to={to!r})\ndef f(readings): return readings\n")
    frame = frames(declared).frame(declared.get("readings")).where("seq = 0")
    frame = (
        frame.groupBy("node").count().withColumnRenamed("count", "n")
        if "node" in columns
        else frame.selectExpr(*columns)
    )
    [(topic, subtopic, payload)] = collect_messages(as_messages(frame, declared.get("f")))
    assert (topic, subtopic) == expected[:2]
    if expected[2] is not ...:
        assert (json.loads(payload) if isinstance(expected[2], dict) else payload) == expected[2]


def test_journal_columns_are_not_listed(catalog: Any, frames: Any) -> None:
    declared = catalog(JSON + "@publish(to='x', subtopic='s/{device}')\ndef f(readings): return readings\n")
    frame = frames(declared).frame(declared.get("readings")).where("seq = 0").drop("payload")
    [(_, subtopic, payload)] = collect_messages(as_messages(frame, declared.get("f")))
    assert subtopic == b"s/d0"
    assert json.loads(payload).keys() == {"ts", "topic", "device", "temp"}


def test_a_topic_with_an_unknown_column(catalog: Any, frames: Any) -> None:
    declared = catalog(JSON + "@publish(to='x/{room}')\ndef f(readings): return readings.select('temp', 'ts')\n")
    with pytest.raises(
        PipelineError, match=r"f publishes to 'x/\{room\}', but its result has no column 'room'; it has temp, ts"
    ):
        as_messages(frames(declared).frame(declared.get("f")), declared.get("f"))
