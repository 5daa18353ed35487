"""Columns of all types in `partition_by`: what no folder can be named after is left out, all else is kept as it is."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from smqrt.pipeline import row_checks, tables
from tests.pipeline.hubs import JournalingHub
from tests.pipeline.lakes import LakeApplication

BY = ["dec", "day", "at", "x", "flag", "n", "k", "raw", "bytes_as_text"]
PIPELINE = (
    "@source({source}, json='dec decimal(20,5), x double, flag boolean, n bigint, k string, hex string')\n"
    "def rows(df): return df.withColumn('day', F.to_date('ts')).withColumn('at', F.date_trunc('hour', 'ts'))"
    ".withColumn('raw', F.unhex('hex')).withColumn('bytes_as_text', F.unhex('hex').cast('string'))\n"
    "@table('kept', format='{format}', partition_by={by}, dead_letter='OUT/dlq')\n"
    "def kept(rows): return rows.select('seq', {columns}, F.col('payload').alias('text'))\n"
)
GOOD: list[dict[str, Any]] = [
    {"n": 1, "dec": 12345678901234.5, "x": 1e300, "flag": True, "k": "a", "hex": "61"},
    {"n": -2, "dec": -0.00001, "x": -1e-300, "flag": False, "k": "", "hex": "C3A9"},
    {},
    {"n": 2**62, "dec": 1, "x": 0.1, "k": "ü/=%+ .", "hex": "2F3D252B20"},
    {"n": 5, "k": "é" * 40},
]
BAD = [
    ({"n": 6, "k": "é" * 60}, "the value of k in partition_by is too long for a folder's name"),
    ({"n": 7, "hex": "FF00"}, "the value of raw in partition_by is not UTF-8 text"),
    ({"n": 8, "hex": "61" * 300}, "the value of raw in partition_by is too long for a folder's name"),
]


def _as_number(value: Any) -> float | None:
    return None if value is None else float({"true": 1, "false": 0}.get(str(value).lower(), value))


@pytest.mark.parametrize("table_format", ["delta", "iceberg", "parquet"])
def test_values_of_all_types(tmp_path: Path, hub: JournalingHub, spark: Any, table_format: str) -> None:
    app = LakeApplication(tmp_path, hub, spark, "delta")
    columns = ", ".join(map(repr, BY))
    app.write(PIPELINE.format(source=app.source, format=table_format, by=BY, columns=columns))
    app.send(*GOOD, *(row for row, _ in BAD))
    assert app.run(republish=True) == 0, app.told
    found = tables.frame(spark, app.folder / ".tables/kept").orderBy("seq").collect()
    assert len(found) == len(GOOD), (found, app.results("dlq"))
    for row, sent in zip(found, GOOD, strict=True):
        raw = bytes.fromhex(sent["hex"]) if "hex" in sent else None
        text = None if raw is None else raw.decode()
        wanted = [
            Decimal(str(sent["dec"])) if "dec" in sent else None,
            *(sent.get(name) for name in ("x", "flag", "n")),
        ]
        values = [row.dec, row.x, row.flag, row.n]
        if table_format == "parquet":  # whose readers guess types from the names of folders
            values, wanted = [_as_number(each) for each in values], [_as_number(each) for each in wanted]
            assert row.raw == row.bytes_as_text == text
        else:
            assert (row.raw, row.bytes_as_text) == (raw, text)
        assert values == wanted
        assert (row.k or "") == sent.get("k", "")
        assert row.at.minute == 0
        assert row.day == row.at.date()
    for letter, (_, reason) in zip(app.results("dlq"), BAD, strict=True):
        assert reason in letter["reason"].split("; ")
    assert app.status("kept").expectations == {row_checks.FITS_TABLE: len(BAD)}


@pytest.mark.parametrize("table_format", ["delta", "iceberg", "parquet"])
def test_texts_of_any_bytes(tmp_path: Path, hub: JournalingHub, spark: Any, table_format: str) -> None:
    """A text that was made of bytes stops no table, whatever they are."""
    app = LakeApplication(tmp_path, hub, spark, "delta")
    app.write(
        f"@source({app.source})\ndef rows(df): return df\n"
        f"@table('kept', format='{table_format}', dead_letter='OUT/dlq')\n"
        "def kept(rows): return rows.select('seq', F.col('payload').cast('string').alias('s'))\n"
    )
    app.send(b"\xff\xfe", b"ok", b"\xed\xa0\x80", b"\x00")
    assert app.run(republish=True) == 0, app.told
    frame = tables.frame(spark, app.folder / ".tables/kept").orderBy("seq")
    found = [bytes(row.s) for row in frame.selectExpr("cast(s as binary) as s").collect()]
    every = [b"\xff\xfe", b"ok", b"\xed\xa0\x80", b"\x00"]
    assert found == (every if table_format == "parquet" else every[1::2])
    assert [letter["reason"] for letter in app.results("dlq")] == [row_checks.NO_TEXT] * (4 - len(found))
