"""Rows and names that are out of the ordinary: nothing of them ends a query, and every reader sees the same in them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from smqrt.journal.json_column import TypedColumn
from smqrt.pipeline import row_checks, tables
from smqrt.pipeline.api import Declaration
from smqrt.pipeline.lake_files import _measured
from tests.pipeline.hubs import JournalingHub
from tests.pipeline.lakes import LakeApplication

EPOCH_MS = 1795635200123
DDL = "at timestamp, n int, x double, s string"
AT = datetime(2026, 11, 25, 19, 33, 20, tzinfo=UTC)
GOOD = {"at": None, "n": 1, "x": None, "s": None}
PAYLOADS: list[tuple[bytes, dict[str, Any] | None]] = [
    (b'{"n":1}', GOOD),
    (b' {"n":1} \n', GOOD),
    (b'\r\n\t{"n":1}\t', GOOD),
    (b'\xef\xbb\xbf{"n":1}', None),
    (b'{"n":1,"s":"\\ud800"}', {**GOOD, "s": "?"}),
    (b'{"n":1} x', None),
    (b'{"n":1}]', None),
    (b'{"n":1}{"n":2}', None),
    (b'{"n":1},{"n":2}', None),
    (b'{"n":1} {"n":2}', None),
    (b"{'n':1}", None),
    (b'{"n":1,"s":"\xff"}', None),
    (b'{"n":2,"n":1}', GOOD),
    (b'{"n":1,"other":{"a":"}"}}', GOOD),
    (b'{"n":1,"x":NaN}', None),
    (b'{"n":1,"other":Infinity}', None),
    (b'{"n":01}', None),
    (b'{"n":1,}', None),
    (b"{n:1}", None),
    (b'/**/{"n":1}', None),
    (b'{"n":"1","s":"a"}', {"at": None, "n": None, "x": None, "s": "a"}),
    (b'{"n":1,"at":1795635200}', {**GOOD, "at": AT}),
    (b'{"n":1,"at":"2026-11-25T19:33:20Z"}', {**GOOD, "at": AT}),
    (b"[1]", None),
    (b"1", None),
    (b"null", None),
    (b"", None),
]


def by_compaction(payload: bytes) -> Any:
    made = TypedColumn({"#": DDL}).column(pa.array(["t"]), pa.array([payload], pa.binary()))
    return made.to_pylist()[0]


def test_a_payload_gives_one_row_to_all_readers(spark: Any) -> None:
    """What a source with json= sees, and what compaction and `read_journal` compute."""
    frame = spark.createDataFrame([(n, p) for n, (p, _) in enumerate(PAYLOADS)], "nr int, payload binary").coalesce(1)
    options = {"json": DDL, "prefix": ""}
    source = Declaration("rows", "source", lambda df: df, [], options, [], "here.py", 1)
    good, bad = row_checks.parse_json(frame, source)
    shown = good.selectExpr("nr", "unix_seconds(at) as at", "n", "x", "s")
    found = {row.nr: row.asDict() for row in shown.collect()}
    variants = {row.nr for row in frame.where(row_checks.payload_variant().isNotNull()).collect()}
    letters = {row.nr for row in bad.collect()}
    for number, (payload, wanted) in enumerate(PAYLOADS):
        assert by_compaction(payload) == wanted, payload
        told = found.get(number)
        if wanted is None:
            assert told is None, payload
            assert number in letters, payload
            assert number not in variants or payload in (b"[1]", b"1", b"null"), payload
        else:
            at = None if wanted["at"] is None else int(wanted["at"].timestamp())
            assert told == {"nr": number, **wanted, "at": at}, payload
            # VARIANT has no place for a key that is there twice, nor for half a surrogate pair.
            assert number in variants or payload.count(b'"n"') == 2 or b"ud800" in payload, payload


NESTED = (
    "`a.t` timestamp, s struct<`t t`: timestamp, n: bigint>, l array<struct<t: timestamp>>, m map<string, timestamp>"
)
SECONDS, MICROS, NANOS = 1795635200, 1795635200123456, 1795635200123456789


def test_whole_numbers_that_are_too_many_seconds_are_far_times(spark: Any) -> None:
    """Spark's own product of seconds and 1,000,000 wraps round, and is any time."""

    def payloads(number: int | str) -> list[dict[str, Any]]:
        return [
            {"a.t": number},
            {"s": {"t t": number}},
            {"l": [{"t": 1}, {"t": number}]},
            {"m": {"x": 1, "y": number}},
            {"a.t": 1, "s": {"n": "no number"}, "m": {"x": number}},
        ]

    def rows_of(numbers: list[int | str]) -> tuple[int, set[str]]:
        every = [json.dumps(each).encode() for number in numbers for each in payloads(number)]
        frame = spark.createDataFrame([(each,) for each in every], "payload binary").coalesce(1)
        source = Declaration("rows", "source", lambda df: df, [], {"json": NESTED, "prefix": ""}, [], "here.py", 1)
        good, bad = row_checks.parse_json(frame, source)
        reasons = [row.reason for row in bad.collect()]
        return len(reasons) - len(good.collect()), set(reasons)

    far = [SECONDS * 1000, MICROS, -MICROS, NANOS, -NANOS, 2**63 - 1, -(2**63), 9223372036855]
    assert rows_of(list(far)) == (5 * len(far), {row_checks.FAR_TIME})
    assert rows_of([SECONDS, -SECONDS, 2**63, 10**30, str(NANOS)]) == (-25, set())
    frame = spark.createDataFrame([(b'{"n": 1795635200123456789}',)], "payload binary")
    source = Declaration("rows", "source", lambda df: df, [], {"json": "n bigint", "prefix": ""}, [], "here.py", 1)
    assert row_checks.parse_json(frame, source)[0].first()["n"] == NANOS


def test_a_time_that_python_does_not_know_has_no_bounds(tmp_path: Path) -> None:
    rows = pa.table({"at": pa.array([EPOCH_MS * 1_000_000], pa.timestamp("us", "UTC")), "n": [1]})
    pq.write_table(rows, tmp_path / "far.parquet")
    assert _measured(pq.read_metadata(tmp_path / "far.parquet")) == ({"n": 1}, {"n": 1}, {"at": 0, "n": 0})


ODD = (
    "@source({source}, json='`at` timestamp, n int, k string, `service.name` string, `ü b` string',"
    " event_time='at.time', watermark='1 second', dead_letter='OUT/dlq/source')\n"
    "def rows(df): return df.withColumn('at.time', F.coalesce('at', 'ts'))\n"
    "@table('kept', format='{format}', partition_by=['k', 'service.name'], dead_letter='OUT/dlq/table')\n"
    "def kept(rows): return rows.withColumn('far', F.expr('if(n = 5, timestamp_seconds(1795635200123), null)'))\n"
    "@publish(to='OUT/res/{{service.name}}')\n"
    "def out(rows): return rows.select('`service.name`', '`ü b`', 'n')\n"
    "@alert(to='OUT/alarm/{{service.name}}', key='service.name', when='n > 3')\n"
    "def alarm(rows): return rows\n"
)


@pytest.mark.parametrize("table_format", ["delta", "iceberg", "parquet"])
def test_odd_rows_and_names_go_through(tmp_path: Path, hub: JournalingHub, spark: Any, table_format: str) -> None:
    app = LakeApplication(tmp_path, hub, spark, "delta")
    app.write(ODD.format(source=app.source, format=table_format))
    row = {"n": 1, "k": "a/..", "service.name": "s.1", "ü b": "x"}
    app.send(
        row,
        row | {"at": EPOCH_MS},
        row | {"k": "y" * 300},
        row | {"n": 4, "k": "."},
        row | {"n": 5, "k": "é" * 60},
    )
    assert app.run(republish=True) == 0, app.told
    kept = tables.frame(spark, app.place).collect()
    assert sorted((each["n"], each["k"], each["service.name"]) for each in kept) == [
        (1, "a/..", "s.1"),
        (4, ".", "s.1"),
    ]
    reasons = [row["reason"] for row in app.results("dlq/#")]
    assert len(reasons) == 3, reasons
    assert sum("partition_by is too long" in reason for reason in reasons) == 2
    assert sum("years 1 to 9999" in reason for reason in reasons) == 2
    assert [row["n"] for row in app.results("res/s.1")] == [1, 1, 4, 5]
    assert [row["state"] for row in app.results("alarm/s.1")] == ["raised"]
