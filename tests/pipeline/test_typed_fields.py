"""Fields that compaction has written are taken for those of the payload only where the two are the same."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F

from smqrt.journal.compact import CompactOptions, compact
from smqrt.journal.payload_schema import TypedColumn
from smqrt.pipeline import graph, history, row_checks, source
from smqrt.pipeline.api import Declaration, declaration_of
from smqrt.pipeline.backfill import backfill
from smqrt.pipeline.checkpoint import QueryStart
from smqrt.pipeline.discover import load
from smqrt.pipeline.history import Shredder
from smqrt.pipeline.runner import RunOptions
from smqrt.pipeline.tables import frame as table_frame
from tests.journal.sensor_rows import row, write

ODD_VALUES = """
1|-1|0|-0|-0.0|1.0|1.5|1.50|1e2|1E+2|1e-400|1e400|-1e400|127|128|-129|32768|2147483648|9223372036854775807
9223372036854775808|123456789012345678901234567890|0.1|0.30000000000000004|4.9e-324|1.7976931348623157e308
01|+1|.5|1.|0x10|NaN|Infinity|-Infinity|"NaN"|"Infinity"|"1"|"1.5"|"true"|true|false|null|{}|[]|[1, 2]|{"a": 1.50}
""|"text"|" a "|"\\u00e9"|"é"|"\\ud83d\\ude00"|"\\ud800"|"\\u0000"|"a\\nb"|"\\/"|"\t"|'a'|"x" // comment|"2026-11-20"
"""
WHOLE = ["", "null", "[]", '[{"v": 1}]', "{}", ' {"v": 1}', '{"v": 1} ', '{"v": 1}{"v": 2}', '{"v": 1} x']
WHOLE += ['{"v": 1,}', '{"v": 1, "v": 2}', '{"v": 1, "v": null}', '{"v": null, "v": 1}', '{"V": 1}', '{"v": 1']
WHOLE += ['{"x": %s, "v": 1}' % ("[" * 1200 + "]" * 1200), '{"x": {"v": 2}, "v": 1}']
WHOLE += ['{"x": %s, "v": 1}' % ("9" * 1200)]
WHOLE += ['\ufeff{"v": 1}', "{v: 1}"]
PAYLOADS = [value.encode() for value in WHOLE] + [b'{"v": "\xff"}', b'{"x": "\xff", "v": 1}']
PAYLOADS += [f'{{"v": {value}}}'.encode() for line in ODD_VALUES.strip().split("\n") for value in line.split("|")]
KINDS = ["boolean", "tinyint", "smallint", "int", "bigint", "double", "string"]


def compacted(payload: bytes, kind: str) -> Iterator[Any]:
    """Yield the field as compaction writes it: of a payload alone, and beside one that can't be parsed fast."""
    column = TypedColumn({"#": f"v {kind}"})
    for some in ([payload], [payload, b""]):
        yield column.column(pa.array(["a"] * len(some)), pa.array(some))[0].as_py()


@pytest.mark.parametrize("kind", KINDS)
def test_every_reader_gives_the_same_value_and_fault(spark: Any, kind: str) -> None:
    rows = [(payload, value) for payload in PAYLOADS for value in compacted(payload, kind)]
    read = spark.createDataFrame(rows, f"payload binary, {row_checks.TYPED} struct<v: {kind}>")
    told = []
    for frame in (read.drop(row_checks.TYPED), read):
        marked = row_checks._marked(frame, f"v {kind}")
        chosen = marked.select("payload", "_smqrt_state", F.col("_smqrt_json.v").cast("string").alias("v"))
        told.append([(bytes(one.payload), one._smqrt_state, one.v) for one in chosen.collect()])
    assert told[1] == told[0]
    whole, _ = row_checks._compacted_fields(read)
    assert read.where(whole).count() >= 2


def test_types_with_other_readings_are_not_typed_columns() -> None:
    assert row_checks.compacted_ddl("device string, temp double, n bigint") == "device string, temp double, n bigint"
    for ddl in ("at timestamp", "at date", "temp float", "gps struct<lat: double>", "some array<int>", "variant", None):
        assert row_checks.compacted_ddl(ddl) is None


# ---- backfills

PIPELINES = """
from smqrt.pipeline import source, table
from pyspark.sql import functions as F


@source(topics="site1/#", json="device string, temp double", dead_letter="bad")
def readings(rows):
    return rows


@table("kept")
def kept(readings):
    return readings.select("node", "seq", "topic", "payload", "device", "temp")


@source(topics="site1/#", json="variant")
def documents(rows):
    return rows


@table("temps")
def temps(documents):
    return documents.select("seq", F.expr("try_variant_get(variant, '$.temp', 'double')").alias("temp"))
"""


def backfilled(spark: Any, app: Path, journal: Path, name: str) -> Any:
    options = RunOptions(str(journal), app, app / ".pipelines", start="earliest", report=lambda sentence: None)
    assert backfill(load(app / "pipelines"), name, options, spark) == 0
    return table_frame(spark, app / ".tables" / name)


def test_a_backfill_reads_compacted_files_and_gives_the_same(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = [b'{"device": "d%d", "temp": %d.5}' % (seq % 3, seq) for seq in range(60)]
    bodies += [b"no JSON", b'{"device": "d1", "temp": "hot"}', b'{"device": 7, "temp": 1}', b"[1]", b'"text"']
    rows = [row(seq, topic=f"site{1 + seq % 4 // 3}/a", payload=body) for seq, body in enumerate(bodies * 2)]
    with Shredder(tmp_path / "compacted", spark) as shred:
        write(tmp_path / "plain", rows)
        write(tmp_path / "compacted", rows[:100])
        typed = CompactOptions(everything=True, schemas={"#": "temp double, device string"}, shred=shred)
        compact(tmp_path / "compacted", typed)
        write(tmp_path / "compacted", rows[100:])
    (tmp_path / "app/pipelines").mkdir(parents=True)
    (tmp_path / "app/pipelines/p.py").write_text(PIPELINES)
    natively: list[int] = []
    inner = history._native

    def counted(spark: Any, read: Any, plan: Any, *more: Any) -> Any:
        natively.append(len(plan.files))
        return inner(spark, read, plan, *more)

    monkeypatch.setattr(history, "_native", counted)
    for query in ("kept", "temps"):
        found = []
        for name in ("plain", "compacted"):
            (tmp_path / name / "app").mkdir()
            (tmp_path / name / "app/pipelines").symlink_to(tmp_path / "app/pipelines")
            frame = backfilled(spark, tmp_path / name / "app", tmp_path / name, query)
            found.append(sorted(map(repr, frame.collect())))
            (tmp_path / name / "app/pipelines").unlink()
            shutil.rmtree(tmp_path / name / "app")
        assert found[0] == found[1]
        assert len(found[0]) > 80
    assert natively == [0, 1, 0, 1]


def test_few_messages_are_published_in_row_order(spark: Any, tmp_path: Path) -> None:
    for first in (0, 50):
        write(tmp_path, [row(seq, topic=f"site1/{seq % 7}") for seq in range(first, first + 50)])
        compact(tmp_path, CompactOptions(everything=True, merge_bytes=0, grace_s=0))
    assert compact(tmp_path, CompactOptions(everything=True, grace_s=0)).merged == 2
    options = declared()
    rows = graph.JournalSource(str(tmp_path)).batch(spark, options, {"n1": 0}, {"n1": 100}, ordered=True)
    write(tmp_path, [row(0), row(1)], node="later")
    assert [one.seq for one in rows.collect()] == list(range(100))
    native = graph.JournalSource(str(tmp_path)).batch(spark, options, {"n1": 0}, {"n1": 100})
    assert sorted(one.seq for one in native.collect()) == list(range(100))


def declared(**options: Any) -> Declaration:
    """Return what `@source(…)` leaves on a function."""

    @source("#", **options)
    def rows(frame: Any) -> Any:
        return frame

    found = declaration_of(rows)
    assert found is not None
    return found


def test_a_variant_of_a_stream(spark: Any, tmp_path: Path) -> None:
    journal, payloads = tmp_path / "journal", (b'{"temp": 21.5}', b"no JSON", b"[1]")
    write(journal, [row(seq, payload=payload) for seq, payload in enumerate(payloads)])
    rows = graph.JournalSource(str(journal)).stream(
        spark, declared(json="variant"), QueryStart({"n1": 0}, None), "reader"
    )
    good, bad = row_checks.parse_json(rows, declared(json="variant"))
    assert streamed(good.selectExpr("to_json(variant) AS text"), tmp_path / "good") == ['{"temp":21.5}', "[1]"]
    assert streamed(bad.selectExpr("reason AS text"), tmp_path / "bad") == ["the payload is not JSON"]


def test_the_source_gives_fields_in_streams_and_batches(spark: Any, tmp_path: Path) -> None:
    journal, payloads = str(tmp_path / "journal"), (b'{"temp": 21.5, "device": "a"}', b"no JSON", b'{"temp": "hot"}')
    write(Path(journal), [row(seq, payload=payload) for seq, payload in enumerate(payloads)])
    schema, expected = "seq bigint, json struct<temp: double>", ['{"temp":21.5}', None, "{}"]
    read = spark.readStream.format("smq").schema(schema).option("startingOffsets", "earliest").load(journal)
    assert streamed(read.selectExpr("to_json(json) AS text"), tmp_path / "stream") == expected
    batch = spark.read.format("smq").schema(schema).load(journal)
    assert [one.text for one in batch.orderBy("seq").selectExpr("to_json(json) AS text").collect()] == expected
    with pytest.raises(Exception, match=r"it must be a struct such as json struct<temp: double>"):
        spark.read.format("smq").schema("json string").load(journal).count()


def streamed(frame: Any, checkpoint: Path) -> list[str]:
    found: list[str] = []
    writer = frame.writeStream.foreachBatch(lambda batch, _: found.extend(one.text for one in batch.collect()))
    writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start().awaitTermination()
    return found
