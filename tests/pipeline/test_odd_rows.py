"""Rows and names that are out of the ordinary: nothing of them ends a query, and every reader sees the same in them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from smqrt.errors import PipelineError
from smqrt.journal import compact
from smqrt.journal.duckdb_views import DuckDB
from smqrt.journal.reader import Journal
from smqrt.pipeline import row_checks, tables
from smqrt.pipeline.api import Declaration
from smqrt.pipeline.history import Spark, read_journal
from smqrt.pipeline.lake_files import write_batches
from tests.journal.sensor_rows import row as written
from tests.journal.sensor_rows import write
from tests.pipeline.applications import Application
from tests.pipeline.hubs import JournalingHub
from tests.pipeline.lakes import LakeApplication

EPOCH_MS = 1795635200123
DDL = "at timestamp, n int, x double, s string"
AT = datetime(2026, 11, 25, 19, 33, 20, tzinfo=UTC)
GOOD = {"at": None, "n": 1, "x": None, "s": None}
FAR: dict[str, Any] = {}
"""A time that is none of the years 1 to 9999."""
READER = (
    "@source({source}, json='{ddl}', dead_letter='OUT/dlq')\ndef rows(df): return df\n"
    "@table('kept')\ndef kept(rows): return rows.select('seq', 'at', 'n', 'x', 's')\n"
)
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
    (b'{"n":1,"s":"NaN, inf ,] ,}\\",}"}', {**GOOD, "s": 'NaN, inf ,] ,}",}'}),
    (b'{"n":1,"other":[1,2 , ]}', None),
    (b'{"n":1,"x":-inf}', None),
    (b'{"n":1,"at":1795635200123}', FAR),
    (b'{"n":1,"at":1795635200123456}', FAR),
    (b'{"n":1,"at":1795635200123456789}', FAR),
    (b'{"n":1,"other":{"n":2,"n":3}}', GOOD),
    (b'{"n":1,"x":2.5,"s":{"a": [1]}}', {**GOOD, "x": 2.5, "s": '{"a":[1]}'}),
    (b'{"N":1}', {**GOOD, "n": None}),
    (b"{}", {**GOOD, "n": None}),
    (b"[1]", None),
    (b"1", None),
    (b"null", None),
    (b"", None),
]


def as_numbers(row: dict[str, Any] | None) -> dict[str, Any] | None:
    """With its time as seconds, whatever the reader's kind of time."""
    if row is None or not isinstance(row["at"], datetime):
        return row
    at = row["at"] if row["at"].tzinfo else row["at"].replace(tzinfo=UTC)
    return row | {"at": int(at.timestamp())}


def test_a_payload_gives_one_row_to_all_readers(tmp_path: Path, hub: JournalingHub, spark: Any) -> None:
    """A source with json=, `read_journal`, `format("smq")`, compaction, and the column `json` of both SQLs."""
    wanted = [as_numbers(None if row is FAR else row) for _, row in PAYLOADS]
    # A reader that has no dead letters has NULL for the time.
    kept = [as_numbers(dict(GOOD) if row is FAR else row) for _, row in PAYLOADS]
    app = Application(tmp_path, hub, spark)
    app.write(READER.format(source=app.source, ddl=DDL))
    first = app.end
    app.send(*(payload for payload, _ in PAYLOADS))
    assert app.run(republish=True) == 0, app.told
    found = {
        row["seq"]: as_numbers({name: row[name] for name in GOOD})
        for row in tables.frame(spark, tmp_path / ".tables/kept").collect()
    }
    assert [found.get(first + at) for at in range(len(PAYLOADS))] == wanted
    assert len(app.results("dlq")) == wanted.count(None)

    journal = tmp_path / "journal"
    write(journal, [written(at, topic="t", payload=payload) for at, (payload, _) in enumerate(PAYLOADS)])
    for compacted in (False, True):
        if compacted:
            options = compact.CompactOptions(grace_s=0, everything=True, schemas={"#": DDL})
            assert compact.compact(journal, options).rows == len(PAYLOADS)
        by_smq = spark.read.format("smq").schema(f"seq bigint, json struct<{DDL}>").load(str(journal))
        for frame in (read_journal(spark, journal, json=DDL), by_smq):
            rows = frame.orderBy("seq").collect()
            assert [as_numbers(each.json and each.json.asDict()) for each in rows] == kept, compacted
        check_sql(journal, spark, kept)


def check_sql(journal: Path, spark: Any, kept: list[Any]) -> None:
    opened = Journal(journal)
    whole = "", opened.begin(), opened.end()
    with DuckDB(opened, *whole[1:]) as asked:
        _, batches = asked.run("select json is not null as good, json->>'n' as n from messages order by seq")
        by_duckdb = [each for batch in batches for each in batch.to_pylist()]
    with Spark(str(journal), {}, *whole[1:], spark=spark) as asked:
        _, batches = asked.run("select json is not null as good, json:n::string as n from messages order by seq")
        by_spark = [each for batch in batches for each in batch.to_pylist()]
    for (payload, _), row, *found in zip(PAYLOADS, kept, by_duckdb, by_spark, strict=True):
        other_json = payload in (b"[1]", b"1", b"null")
        if b"ud800" in payload:  # neither DuckDB nor a VARIANT has a place for half a surrogate pair
            row = None
        for told, first_of_two in zip(found, (True, False), strict=True):
            assert told["good"] == (row is not None or other_json), (payload, told)
            if row is not None and row["n"] is not None:
                assert told["n"] == ("2" if first_of_two and payload.startswith(b'{"n":2,') else "1"), (payload, told)


NESTED = (
    "`a.t` timestamp, s struct<`t t`: timestamp, n: bigint>, l array<struct<t: timestamp>>, m map<string, timestamp>"
)
SECONDS, MICROS, NANOS = 1795635200, 1795635200123456, 1795635200123456789


def test_integers_above_the_range_are_far_times(spark: Any) -> None:
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


def test_times_outside_of_python_range_have_no_bounds(tmp_path: Path) -> None:
    rows = pa.table({"at": pa.array([EPOCH_MS * 1_000_000], pa.timestamp("us", "UTC")), "n": [1]})
    [file] = write_batches(iter(rows.to_batches()), rows.schema, str(tmp_path))
    assert (file.least, file.greatest, file.nulls) == ({"n": 1}, {"n": 1}, {"at": 0, "n": 0})


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


STATE = """
from smqrt.pipeline import stateful
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql import Row
from pyspark.sql.types import StructType, StructField, LongType
class Count(StatefulProcessor):
    def init(self, handle):
        self.n = handle.getValueState("n", "n bigint")
    def handleInputRows(self, key, rows, timerValues):
        for row in rows:
            n = (self.n.get()[0] if self.n.exists() else 0) + 1
            self.n.update((n,))
            yield Row(**{"service.name": key[0], "ü b": key[1], "n": n, "last.x": row["last.x"]})
    def close(self): pass

FIELDS = '`service.name` string, `ü b` string, `last.x` int'

@source({source}, json=f'{FIELDS}, `ev.t` timestamp', event_time='ev.t', watermark='1 second')
def rows(df): return df

@publish(to='OUT/{service.name}', mode='update')
@stateful(Count, key=['service.name', 'ü b'], schema=f'{FIELDS}, n bigint', time={time})
def counted(rows): return rows.select('`service.name`', '`ü b`', '`last.x`', '`ev.t`', 'ts')
"""


@pytest.mark.parametrize("time", ["None", "'event'"])
def test_state_of_columns_with_odd_names(app: Application, time: str) -> None:
    app.write(STATE.replace("{source}", app.source).replace("{time}", time))
    row = {"service.name": "s.1", "ü b": "x", "last.x": 3, "ev.t": "2026-11-27T00:00:00Z"}
    app.send(row, {**row, "last.x": 4}, {**row, "service.name": "s.2", "ev.t": "2026-11-27T00:01:00Z"})
    assert app.run(republish=True) == 0, app.told
    app.send({**row, "ev.t": "2026-11-27T00:02:00Z"})
    assert app.run(republish=True) == 0, app.told
    assert [(row["n"], row["last.x"], row["ü b"]) for row in app.results("s.1")] == [
        (1, 3, "x"),
        (2, 4, "x"),
        (3, 3, "x"),
    ]
    assert [row["n"] for row in app.results("s.2")] == [1]


def test_fields_that_differ_in_case_only_are_refused(spark: Any) -> None:
    frame = spark.createDataFrame([(b"{}",)], "payload binary")
    source = Declaration("rows", "source", lambda df: df, [], {"json": "a int, A int", "prefix": ""}, [], "here.py", 1)
    with pytest.raises(PipelineError, match="here.py:1: json= has the fields 'a' and 'A', which are one column"):
        row_checks.parse_json(frame, source)


@pytest.mark.parametrize("table_format", ["delta", "iceberg"])
def test_tables_with_odd_names_are_optimized(tmp_path: Path, hub: JournalingHub, spark: Any, table_format: str) -> None:
    app = LakeApplication(tmp_path, hub, spark, "delta")
    app.write(
        f"@source({app.source}, json='n int, `service.name` string, `ü b` string')\ndef rows(df): return df\n"
        f"@table('kept', format='{table_format}', partition_by=['service.name', 'ü b'])\n"
        "def kept(rows): return rows.select('n', '`service.name`', '`ü b`')\n"
    )
    for n in range(3):
        app.send({"n": n, "service.name": "s.1", "ü b": "é/x"}, {"n": n, "service.name": "s.2", "ü b": None})
        assert app.run(republish=True) == 0, app.told
    table = tables.open_lake_table(app.catalog.declarations["kept"], str(app.place))
    assert table is not None
    assert table.optimize() == (6, 2)
    found = tables.frame(spark, app.place).collect()
    assert sorted((row["n"], row["service.name"], row["ü b"]) for row in found if row["ü b"]) == [
        (n, "s.1", "é/x") for n in range(3)
    ]
    by_dotted = {"delta": "`service.name` = 's.2' and n < 2", "iceberg": "service.name = 's.2' and n < 2"}[table_format]
    if table_format == "iceberg":
        for call in (table.check_condition, table.delete):
            with pytest.raises(PipelineError, match="nothing by a column with a dot in its name, 'service.name'"):
                call(by_dotted)
    condition = {"delta": by_dotted, "iceberg": '"ü b" is null and n < 2'}[table_format]
    table.check_condition(condition)
    assert table.delete(condition) == 2
    assert tables.frame(spark, app.place).count() == 4
