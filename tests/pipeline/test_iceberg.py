"""Tables in Iceberg's format: each row once, whatever happens, and readable by those who know the format."""

from __future__ import annotations

import json
import shutil
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow
import pytest
from pyiceberg.catalog.sql import SqlCatalog

from smqrt.errors import PipelineError
from smqrt.pipeline import iceberg, lake_files, query, tables
from smqrt.pipeline.backfill import backfill
from smqrt.pipeline.iceberg import IcebergTable
from tests.pipeline import lakes
from tests.pipeline.hubs import JournalingHub
from tests.pipeline.lakes import LakeApplication


@pytest.fixture
def app(tmp_path: Path, hub: JournalingHub, spark: Any) -> LakeApplication:
    return LakeApplication(tmp_path, hub, spark, "iceberg")


def table(app: LakeApplication) -> Any:
    """The table as others open it."""
    return SqlCatalog("smqrt", uri=f"sqlite:///{app.folder}/.tables/iceberg.db").load_table("tables.kept")


def numbers(table: Any) -> list[int]:
    return sorted(table.scan().to_arrow()["n"].to_pylist())


def kept(app: LakeApplication) -> list[int]:
    found = numbers(table(app))
    assert sorted(row.n for row in tables.frame(app.spark, app.place).collect()) == found
    return found


def test_each_row_once(app: LakeApplication) -> None:
    """Also of a micro-batch that is done again, after a lost checkpoint, and after a reset."""
    app.keep(*range(6))
    assert kept(app) == list(range(6))
    assert table(app).scan(row_filter="k = 'a b/c%'").to_arrow()["n"].to_pylist() == [0, 3]
    assert len(tables.files(app.place)) == len(list(app.place.rglob("*.parquet")))
    app.forget_last_batch()
    assert app.run() == 0, app.told
    assert len(table(app).snapshots()) == 1
    shutil.rmtree(app.state / "checkpoint")
    app.keep(6, start="latest")
    assert f"It continues where its table in {app.place} ends" in app.told[-1]
    list(query.reset(app.folder / ".pipelines", "kept", app.journal, None))
    app.keep(7, start="latest")
    assert kept(app) == list(range(8))
    list(query.reset(app.folder / ".pipelines", "kept", app.journal, str(app.place)))
    assert app.run() == 0, app.told
    assert kept(app) == list(range(8))


def test_small_files_are_joined_and_old_ones_removed(app: LakeApplication, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the table is known when the snapshots that said so have expired. Queries may append meanwhile."""
    for number in range(2):
        app.keep(3 * number)
    orphan = app.place / "data" / "part-killed.parquet"
    shutil.copy(tables.files(app.place)[0], orphan)
    before = set(app.place.rglob("*.parquet"))
    found = IcebergTable(str(app.place), ["date", "k"])
    large = iceberg._join_group
    with monkeypatch.context() as slow:
        slow.setattr(iceberg, "_join_group", lambda *group: [app.keep(6), *large(*group)][1:])
        assert found.optimize() == (2, 1)
    assert found.optimize() == (2, 1)
    assert found.optimize() == (0, 0)
    assert len(tables.files(app.place)) == 1
    assert found.vacuum(timedelta(days=7)) == 0
    assert found.vacuum(timedelta(0)) > 4
    assert len(table(app).snapshots()) == 1
    assert {*app.place.rglob("*.parquet")} == set(tables.files(app.place))
    assert before.isdisjoint(tables.files(app.place))
    assert kept(app) == [0, 3, 6]
    app.forget_last_batch()
    assert app.run() == 0, app.told
    shutil.rmtree(app.state / "checkpoint")
    app.keep(9, start="latest")
    assert kept(app) == [0, 3, 6, 9]
    for condition, why in (("n <", "is not a condition"), ("x = 3", "field with name x"), ("n < 'b'", "convert b")):
        with pytest.raises(PipelineError, match=why) as refused:
            found.delete(condition)
        assert len(str(refused.value)) < 300
    assert found.delete("n < 4") == 2
    assert kept(app) == [6, 9]


def test_a_table_of_an_older_version(tmp_path: Path) -> None:
    """Only its snapshots say what is in it."""
    place = tmp_path / "kept"
    rows = pyarrow.table({"n": [1, 2]})
    catalog = SqlCatalog("smqrt", uri=f"sqlite:///{tmp_path}/iceberg.db")
    catalog.create_namespace("tables")
    made = catalog.create_table("tables.kept", rows.schema, location=place.as_uri())
    for batch in range(3):
        said = {"smqrt.query": "kept:1", "smqrt.batch": str(batch), "smqrt.end": json.dumps({"n1": batch})}
        made.append(rows, snapshot_properties=said)
    found = IcebergTable(str(place))
    for _ in range(2):
        assert (found.has("kept:1", 2), found.has("kept:1", 3), found.end("kept")) == (True, False, {"n1": 2})
        assert found.optimize().large <= 1
        found.vacuum(timedelta(0))
    assert len(made.refresh().snapshots()) == 1
    assert numbers(made) == [1, 1, 1, 2, 2, 2]


def test_snapshots_do_not_become_more_and_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the table is known without those that are forgotten; their files wait for a vacuum."""
    monkeypatch.setattr(iceberg, "MAX_SNAPSHOTS", 4)
    monkeypatch.setattr(lake_files, "write", lambda *_, **options: [file])
    monkeypatch.setattr(IcebergTable, "_ensure_schema", lambda *_: None)
    catalog = SqlCatalog("smqrt", uri=f"sqlite:///{tmp_path}/iceberg.db")
    catalog.create_namespace("tables")
    rows = pyarrow.table({"n": [1]})
    made = catalog.create_table("tables.kept", rows.schema, location=(tmp_path / "kept").as_uri())
    found = IcebergTable(str(tmp_path / "kept"))
    for batch in range(12):
        (file,) = lake_files.write_batches(iter(rows.to_batches()), rows.schema, f"{tmp_path}/kept/data")
        assert found.append(None, "kept:1", batch, {"n1": batch}) == 1  # type: ignore[arg-type]
        assert len(made.refresh().snapshots()) <= 4
        assert found.append(None, "kept:1", batch, None) == 0  # type: ignore[arg-type]
    assert found.end("kept") == {"n1": 11}
    assert numbers(made) == [1] * 12


def test_an_object_store(app: LakeApplication, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pyiceberg commits there, Spark's workers write there with pyarrow; no jar is needed."""
    catalog = f"sqlite:///{tmp_path}/catalog.db"
    monkeypatch.setenv("PYICEBERG_CATALOG__SMQRT__URI", catalog)
    with lakes.bucket(monkeypatch) as bucket:
        app.keep(1, 2, tables=bucket)
        app.keep(4, tables=bucket)
        app.forget_last_batch()
        assert app.run(tables=bucket) == 0, app.told
        place = f"{bucket}/kept"
        found = IcebergTable(place, ["date", "k"])
        seen = SqlCatalog("smqrt", uri=catalog, **iceberg._store()).load_table("tables.kept")
        assert numbers(seen) == [1, 2, 4]
        assert polars.scan_iceberg(seen).collect()["n"].sort().to_list() == [1, 2, 4]
        with duckdb.connect() as connection:
            assert seen.scan().to_duckdb("kept", connection).sql("select sum(n) from kept").fetchall() == [(7,)]
        assert found.optimize() == (2, 1)
        assert found.vacuum(timedelta(0)) > 2
        assert len(iceberg.files(place)) == 2
        shutil.rmtree(app.state / "checkpoint")
        app.keep(5, tables=bucket, start="latest")
        assert numbers(seen.refresh()) == [1, 2, 4, 5]
        assert not app.place.exists()


def test_a_backfill_and_other_columns(app: LakeApplication) -> None:
    app.numbers(1, 2)
    middle = app.end
    app.keep(3, start=str(middle))
    for _ in range(2):
        assert backfill(app.catalog, "kept", app.options(start=str(middle - 2), until=str(middle)), app.spark) == 0
    assert kept(app) == [1, 2, 3]
    app.change("'ts')", "'ts', 'topic')")
    app.keep(4)
    rows = table(app).scan().to_arrow().sort_by("n")
    assert rows["topic"].to_pylist() == [None, None, None, f"{app.topic}/in/x"]
    assert IcebergTable(str(app.place)).optimize().large == 1, "files of before have a column less"
    assert kept(app) == [1, 2, 3, 4]
    app.change("'n', 'k'", "F.col('n').cast('string').alias('n'), 'k'")
    app.numbers(5)
    assert app.run() == 1
    assert "has a column of another type than the result" in app.told[-1]


def test_what_is_missing_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PipelineError, match="needs a shared catalog"):
        IcebergTable("s3://bucket/kept")
    with pytest.raises(PipelineError, match="There is no Iceberg table in .*: run its query first"):
        IcebergTable(str(tmp_path / "kept")).optimize()
    monkeypatch.setitem(sys.modules, "pyiceberg.catalog.sql", None)
    with pytest.raises(PipelineError, match=r"pip install 'smqrt\[iceberg\]'"):
        IcebergTable(str(tmp_path / "kept"))
    assert iceberg.NEEDS_ICEBERG.endswith("installs it.")
