"""Tables in Delta Lake's format: each row once, whatever happens, and readable by those who know the format."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import deltalake
import duckdb
import polars
import pytest

from smqrt.errors import PipelineError
from smqrt.journal.delta_table import NEEDS_DELTA
from smqrt.pipeline import api, checkpoint, delta, query, tables
from smqrt.pipeline.backfill import backfill
from smqrt.pipeline.delta import DeltaTable
from tests.pipeline import lakes
from tests.pipeline.hubs import JournalingHub
from tests.pipeline.lakes import LakeApplication


@pytest.fixture
def app(tmp_path: Path, hub: JournalingHub, spark: Any) -> LakeApplication:
    return LakeApplication(tmp_path, hub, spark, "delta")


def kept(app: LakeApplication) -> list[int]:
    found = polars.read_delta(str(app.place))["n"].sort().to_list()
    assert sorted(row.n for row in tables.frame(app.spark, app.place).collect()) == found
    return found


def test_readers_of_the_table(app: LakeApplication) -> None:
    """polars and deltalake by name, DuckDB and Spark through the list of its files; filters use its statistics."""
    app.keep(*range(9))
    assert kept(app) == list(range(9))
    lazy = polars.scan_delta(str(app.place))
    assert lazy.filter(polars.col("n") > 6).select("n").collect()["n"].sort().to_list() == [7, 8]
    assert lazy.filter(polars.col("k") == "a b/c%").select("n").collect()["n"].sort().to_list() == [0, 3, 6]
    table = deltalake.DeltaTable(app.place)
    with duckdb.connect() as connection:
        connection.register("kept", table.to_pyarrow_dataset())
        assert connection.sql("select sum(n) from kept where k is null").fetchall() == [(15,)]
    frame = tables.frame(app.spark, app.place)
    assert {field.name: field.dataType.simpleString() for field in frame.schema}["date"] == "date"
    assert len(tables.files(app.place)) == len(table.file_uris())


def test_a_batch_that_is_done_again_comes_once(app: LakeApplication, spark: Any) -> None:
    """Its number is in the table, though Spark's checkpoint doesn't say that it was done."""
    app.keep(1, 2)
    app.forget_last_batch()
    version = deltalake.DeltaTable(app.place).version()
    assert app.run() == 0, app.told
    assert deltalake.DeltaTable(app.place).version() == version
    app.keep(3)
    assert kept(app) == [1, 2, 3]


def test_a_lost_checkpoint_and_a_reset(app: LakeApplication) -> None:
    """The table's log says where to go on."""
    app.keep(1)
    shutil.rmtree(app.state / "checkpoint")
    app.keep(2, start="latest")
    assert f"the checkpoint in {app.state} is missing. It continues where its table in {app.place} ends" in app.told[-1]
    list(query.reset(app.folder / ".pipelines", "kept", app.journal, None))
    app.keep(3, start="latest")
    assert kept(app) == [1, 2, 3]
    list(query.reset(app.folder / ".pipelines", "kept", app.journal, str(app.place)))
    assert not app.place.exists()
    assert app.run() == 0, app.told
    assert kept(app) == [1, 2, 3]


def test_a_backfill_comes_once(app: LakeApplication) -> None:
    app.numbers(1, 2)
    middle = app.end
    app.numbers(3)
    assert app.run(start=str(middle)) == 0, app.told
    first = middle - 2
    for _ in range(2):
        assert backfill(app.catalog, "kept", app.options(start=str(first), until=str(middle)), app.spark) == 0
    assert kept(app) == [1, 2, 3]
    with pytest.raises(PipelineError, match="already has rows of this range"):
        backfill(app.catalog, "kept", app.options(start=str(first + 1), until=str(middle)), app.spark)


def test_a_column_more_and_one_of_another_type(app: LakeApplication) -> None:
    app.keep(1)
    app.change("select('n', 'k', 'ts')", "select('n', 'k', 'ts', 'topic')")
    app.keep(2)
    frame = polars.read_delta(str(app.place)).sort("n")
    assert frame["topic"].to_list() == [None, f"{app.topic}/in/x"]
    app.change("select('n'", "select(F.col('n').cast('string').alias('n')")
    app.numbers(3)
    assert app.run() == 1
    assert "has the column n as" in app.told[-1]
    app.change("['date', 'k']", "['date']")
    assert app.run() == 1
    assert "is partitioned by date, k, and that can't change" in app.told[-1]


def test_parquet_and_delta_are_not_mixed(app: LakeApplication) -> None:
    app.numbers(1)
    app.change("format='delta', ", "")
    assert app.run() == 0, app.told
    app.change()
    assert app.run() == 1
    assert "format was parquet and is delta" in app.told[-1]
    with pytest.raises(PipelineError, match="plain Parquet files"):
        DeltaTable(str(app.place))


def test_small_files_are_joined_and_old_ones_removed(app: LakeApplication) -> None:
    for number in range(3):
        app.keep(3 * number)
    orphan = app.place / "date=2026-01-01" / "part-killed.parquet"
    orphan.parent.mkdir()
    shutil.copy(tables.files(app.place)[0], orphan)
    before = {*app.place.rglob("*.parquet")} - {*(app.place / "_delta_log").rglob("*")}
    table = DeltaTable(str(app.place), ["date", "k"])
    assert table.optimize() == (3, 1)
    assert len(tables.files(app.place)) == 1
    assert table.vacuum(timedelta(days=7)) == 0
    assert table.vacuum(timedelta(0)) == 4
    assert before.isdisjoint(tables.files(app.place))
    assert not orphan.exists()
    assert kept(app) == [0, 3, 6]
    assert table.delete("n < 4") == 2
    assert kept(app) == [6]
    app.keep(9)
    assert kept(app) == [6, 9]


def test_without_deltalake(app: LakeApplication, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deltalake", None)
    app.numbers(1)
    assert app.run() == 1
    assert app.told[-1].endswith(NEEDS_DELTA)


def test_the_settings_of_the_jar() -> None:
    assert delta.settings("org.x:y:1") == {}
    assert set(delta.settings("a:b:1,io.delta:delta-spark_2.13:4.1.0")) == {
        "spark.sql.extensions",
        "spark.sql.catalog.spark_catalog",
    }


def test_kill_between_the_commit_and_the_checkpoint(app: LakeApplication) -> None:
    """kill -9 of driver and workers, with the table's commit but not Spark's."""
    app.numbers(*range(6))
    app.killed("after_commit")
    assert deltalake.DeltaTable(app.place).version() == 1
    assert app.run() == 0, app.told
    assert kept(app) == list(range(6))


def test_an_end_between_the_files_and_the_commit(app: LakeApplication, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(name: str, batch: int) -> None:
        raise OSError(f"an end {name}")

    app.numbers(*range(6))
    with monkeypatch.context() as ended:
        ended.setattr(delta.status, "crash_at", end)
        assert app.run() == 1
    assert "before_commit" in app.told[-1]
    assert deltalake.DeltaTable(app.place).version() == 0
    assert list(app.place.rglob("part-*.parquet"))
    assert app.run() == 0, app.told
    assert kept(app) == list(range(6))


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with lakes.bucket(monkeypatch) as made:
        yield made


def test_an_object_store(app: LakeApplication, bucket: str) -> None:
    """deltalake commits there, Spark's workers write there with pyarrow; no jar is needed."""
    for numbers in ((1, 2), (3,)):
        app.keep(*numbers, tables=bucket)
    assert polars.read_delta(f"{bucket}/kept")["n"].sort().to_list() == [1, 2, 3]
    table = DeltaTable(f"{bucket}/kept", ["date", "k"])
    assert table.optimize().large == 0
    assert table.vacuum(timedelta(0)) == 0
    shutil.rmtree(app.state / "checkpoint")
    app.keep(4, tables=bucket, start="latest")
    assert polars.read_delta(f"{bucket}/kept")["n"].sort().to_list() == [1, 2, 3, 4]
    assert not app.place.exists()


def test_a_state_of_an_older_version(tmp_path: Path) -> None:
    """It doesn't say in which format its table is: there was one."""
    plain = api.Declaration(
        "kept", "table", lambda rows: rows, options={"mode": "append", "path": "p", "format": "parquet"}
    )
    checkpoint.write_json(tmp_path / "query.json", {"kind": "table", "sources": ["s"], "mode": "append", "path": "p"})
    checkpoint.claim(tmp_path, plain, ["s"])
    plain.options["format"] = "delta"
    with pytest.raises(PipelineError, match="format was parquet and is delta"):
        checkpoint.claim(tmp_path, plain, ["s"])
