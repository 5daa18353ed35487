"""Compacted files with a VARIANT column: same rows, in the same order, and a field costs what the field costs."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pyarrow.parquet as pq
import pytest

from smqrt.errors import JournalError, PipelineError
from smqrt.journal import compact, manifest
from smqrt.journal.compact import CompactOptions
from smqrt.journal.reader import Journal
from smqrt.journal.verification import verify
from smqrt.pipeline.history import Shredder
from tests.journal.flips import flipped
from tests.journal.sensor_rows import NOON_US, readings, row, write


@pytest.fixture
def journal(tmp_path: Path, spark: Any) -> Path:
    """Compacted, with a VARIANT column and a typed one."""
    rows = [*readings(5_000, step_us=1000), row(5_000, NOON_US, payload=b"no JSON"), row(5_001, payload=b"\xff")]
    write(tmp_path, rows, segment_rows=2_000)
    with Shredder(tmp_path, spark) as shredder:
        done = compact.compact(
            tmp_path, CompactOptions(grace_s=0, everything=True, schemas={"#": "temp double"}, shred=shredder)
        )
    assert (done.rows, done.files) == (5_002, 1)
    assert done.file_bytes <= 0.6 * done.payload_bytes
    return tmp_path


def test_a_variant_column(journal: Path, spark: Any) -> None:
    (file,) = manifest.load(journal).all_files()
    metadata = pq.ParquetFile(journal / file.path).metadata
    assert "variant.typed_value.temp.typed_value" in [
        metadata.schema.column(at).path for at in range(metadata.num_columns)
    ]
    reader = Journal(journal)
    rows = list(reader.rows(reader.begin(), reader.end()))
    assert [one.seq for one in rows] == list(range(5_002))
    assert rows[:5_000] == list(readings(5_000, step_us=1000))

    read = spark.read.parquet(str(journal / file.path))
    shown = read.selectExpr(
        "avg(variant_get(variant, '$.temp', 'double')) as temp", "count(variant) as documents"
    ).first()
    assert shown["documents"] == 5_000
    assert read.selectExpr("avg(json.temp)").first()[0] == pytest.approx(shown["temp"])
    assert shown["temp"] == pytest.approx(mean(json.loads(one.payload)["temp"] for one in rows[:5_000]))
    assert sorted(path.name for path in journal.iterdir() if path.name.startswith(".variant")) == []


def test_failures_of_spark_are_reported_and_segments_stay(tmp_path: Path, spark: Any) -> None:
    write(tmp_path, readings(100))
    source = tmp_path / "broken.parquet"
    source.write_bytes(b"PAR1 is not all")
    with Shredder(tmp_path, spark) as shredder, pytest.raises(PipelineError, match="can't make a VARIANT of"):
        shredder(source, tmp_path / "out.parquet")


def test_flipped_bits_in_files_of_spark_are_reported(journal: Path) -> None:
    (file,) = manifest.load(journal).all_files()
    path, reader, refused = journal / file.path, Journal(journal), 0
    rows = list(reader.rows({}, {"n1": 5_002}))
    for _ in flipped(path, 60, seed=9):
        assert [fault.path for fault in verify(journal).faults] == [path]
        try:
            read = list(reader.rows({}, {"n1": 5_002}))
        except JournalError:
            refused += 1
        else:
            assert read == rows
    assert refused > 10  # most of the file is the VARIANT column, which our reader doesn't read


def test_files_with_variant_columns_are_merged_only_by_spark(tmp_path: Path, spark: Any) -> None:
    rows = [*readings(400, step_us=1000)]
    with Shredder(tmp_path, spark) as shredder:
        for first in (0, 200):
            write(tmp_path, rows[first : first + 200])
            compact.compact(tmp_path, CompactOptions(grace_s=0, everything=True, shred=shredder, merge_bytes=0))
        assert compact.compact(tmp_path, CompactOptions(grace_s=0)).merged == 0
        assert compact.compact(tmp_path, CompactOptions(grace_s=0, shred=shredder)).merged == 2
    (file,) = manifest.load(tmp_path).all_files()
    assert list(Journal(tmp_path).rows({}, {"n1": 400})) == rows
    read = spark.read.parquet(str(tmp_path / file.path))
    assert read.selectExpr("count(variant_get(variant, '$.temp', 'double'))").first()[0] == 400
