"""Files of a micro-batch, as one of Spark's tasks writes them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from smqrt.pipeline import lake_files

ROWS = pa.table(
    {
        "k": ["a b/c%", "d", None],
        "n": [1, 2, 3],
        "x": [0.5, float("nan"), 1.0],
        "ts": pa.array([datetime(2026, 11, 20, 12, 0, 0, us, UTC) for us in (1, 2, 3)], pa.timestamp("us", "UTC")),
        "long": ["y" * 100] * 3,
        "none": pa.array([None] * 3, pa.string()),
    }
)


def written(folder: Path, by: tuple[str, ...], rows: Any = ROWS) -> list[lake_files.LakeFile]:
    found = lake_files._write_task(iter(rows.to_batches()), str(folder), by, {})
    return [lake_files.LakeFile(**json.loads(line)) for batch in found for line in batch["file"].to_pylist()]


def test_one_file_without_folders(tmp_path: Path) -> None:
    (one,) = written(tmp_path, ())
    assert pq.read_table(tmp_path / one.path).drop(["x"]).equals(ROWS.drop(["x"]))
    assert (one.rows, one.bytes, one.values) == (3, (tmp_path / one.path).stat().st_size, {})
    assert json.loads(one.statistics()) == {
        "numRecords": 3,
        "minValues": {"k": "a b/c%", "n": 1, "ts": "2026-11-20T12:00:00.000Z"},
        "maxValues": {"k": "d", "n": 3, "ts": "2026-11-20T12:00:00.001Z"},
        "nullCount": {"k": 1, "n": 0, "x": 0, "ts": 0, "long": 0, "none": 3},
    }


def test_folders_for_values(tmp_path: Path) -> None:
    files = written(tmp_path, ("k",))
    assert {one.values["k"]: one.rows for one in files} == {"a b/c%": 1, "d": 1, None: 1}
    assert sum(pq.read_metadata(tmp_path / one.path).num_rows for one in files) == 3


def test_a_task_without_rows_writes_nothing(tmp_path: Path) -> None:
    assert written(tmp_path, ("k",), ROWS.slice(0, 0)) == []
    assert list(tmp_path.iterdir()) == []
