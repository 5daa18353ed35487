"""Tables in Delta Lake's format: each row once, whatever happens, and readable by those who know the format."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
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
from smqrt.journal.deltalog import NEEDS_DELTA
from smqrt.pipeline import api, checkpoint, delta, reset, tables
from smqrt.pipeline.backfill import backfill
from smqrt.pipeline.delta import DeltaTable
from tests.conftest import free_port
from tests.pipeline.applications import Application
from tests.pipeline.hubs import JournalingHub, eventually

KEPT = (
    "@source({source}, json='n int, k string')\ndef rows(df): return df\n"
    "@table('kept', format='delta', partition_by=['date', 'k'])\n"
    "def kept(rows): return rows.select('n', 'k', 'ts')\n"
)


@pytest.fixture
def app(tmp_path: Path, hub: JournalingHub, spark: Any) -> Application:
    made = Application(tmp_path, hub, spark)
    made.write(KEPT.format(source=made.source))
    return made


def place(app: Application) -> Path:
    return app.folder / ".tables" / "kept"


def state(app: Application) -> Path:
    return app.folder / ".pipelines" / "kept"


def send(app: Application, *numbers: int) -> None:
    app.send(*({"n": n, "k": ["a b/c%", "ü", None][n % 3]} for n in numbers))


def kept(app: Application) -> list[int]:
    found = polars.read_delta(str(place(app)))["n"].sort().to_list()
    assert sorted(row.n for row in tables.frame(app.spark, place(app)).collect()) == found
    return found


def test_who_reads_it(app: Application) -> None:
    """polars and deltalake by name, DuckDB and Spark through the list of its files; filters use its statistics."""
    send(app, *range(9))
    assert app.run() == 0, app.told
    assert kept(app) == list(range(9))
    lazy = polars.scan_delta(str(place(app)))
    assert lazy.filter(polars.col("n") > 6).select("n").collect()["n"].sort().to_list() == [7, 8]
    assert lazy.filter(polars.col("k") == "a b/c%").select("n").collect()["n"].sort().to_list() == [0, 3, 6]
    table = deltalake.DeltaTable(place(app))
    with duckdb.connect() as connection:
        connection.register("kept", table.to_pyarrow_dataset())
        assert connection.sql("select sum(n) from kept where k is null").fetchall() == [(15,)]
    frame = tables.frame(app.spark, place(app))
    assert {field.name: field.dataType.simpleString() for field in frame.schema}["date"] == "date"
    assert len(tables.files(place(app))) == len(table.file_uris())


def test_a_batch_that_is_done_again_comes_once(app: Application, spark: Any) -> None:
    """Its number is in the table, though Spark's checkpoint doesn't say that it was done."""
    send(app, 1, 2)
    assert app.run() == 0, app.told
    (state(app) / "checkpoint" / "commits" / "0").unlink()
    for crc in (state(app) / "checkpoint" / "commits").glob(".0*"):
        crc.unlink()
    version = deltalake.DeltaTable(place(app)).version()
    assert app.run() == 0, app.told
    assert deltalake.DeltaTable(place(app)).version() == version
    send(app, 3)
    assert app.run() == 0, app.told
    assert kept(app) == [1, 2, 3]


def test_a_lost_checkpoint_and_a_reset(app: Application) -> None:
    """The table's log says where to go on."""
    send(app, 1)
    assert app.run() == 0, app.told
    shutil.rmtree(state(app) / "checkpoint")
    send(app, 2)
    assert app.run(start="latest") == 0, app.told
    assert f"the checkpoint in {state(app)} is gone. It goes on where its table in {place(app)} ends" in app.told[-1]
    list(reset.reset(app.folder / ".pipelines", "kept", app.journal, None))
    send(app, 3)
    assert app.run(start="latest") == 0, app.told
    assert kept(app) == [1, 2, 3]
    list(reset.reset(app.folder / ".pipelines", "kept", app.journal, str(place(app))))
    assert not place(app).exists()
    assert app.run() == 0, app.told
    assert kept(app) == [1, 2, 3]


def test_a_backfill_comes_once(app: Application) -> None:
    send(app, 1, 2)
    middle = app.end
    send(app, 3)
    assert app.run(start=str(middle)) == 0, app.told
    first = middle - 2
    for _ in range(2):
        assert backfill(app.catalog, "kept", app.options(start=str(first), until=str(middle)), app.spark) == 0
    assert kept(app) == [1, 2, 3]
    with pytest.raises(PipelineError, match="holds rows of that range already"):
        backfill(app.catalog, "kept", app.options(start=str(first + 1), until=str(middle)), app.spark)


def test_a_column_more_and_one_of_another_type(app: Application) -> None:
    send(app, 1)
    assert app.run() == 0, app.told
    app.write(KEPT.format(source=app.source).replace("select('n', 'k', 'ts')", "select('n', 'k', 'ts', 'topic')"))
    send(app, 2)
    assert app.run() == 0, app.told
    frame = polars.read_delta(str(place(app))).sort("n")
    assert frame["topic"].to_list() == [None, f"{app.topic}/in/x"]
    app.write(KEPT.format(source=app.source).replace("select('n'", "select(F.col('n').cast('string').alias('n')"))
    send(app, 3)
    assert app.run() == 1
    assert "has the column n as" in app.told[-1]
    app.write(KEPT.format(source=app.source).replace("['date', 'k']", "['date']"))
    assert app.run() == 1
    assert "is partitioned by date, k, and that can't change" in app.told[-1]


def test_parquet_and_delta_are_not_mixed(app: Application) -> None:
    send(app, 1)
    app.write(KEPT.format(source=app.source).replace("format='delta', ", ""))
    assert app.run() == 0, app.told
    app.write(KEPT.format(source=app.source))
    assert app.run() == 1
    assert "format was parquet and is delta" in app.told[-1]
    with pytest.raises(PipelineError, match="plain Parquet files"):
        DeltaTable(str(place(app)))


def test_small_files_are_joined_and_old_ones_removed(app: Application) -> None:
    for number in range(3):
        send(app, 3 * number)
        assert app.run() == 0, app.told
    orphan = place(app) / "date=2026-01-01" / "part-killed.parquet"
    orphan.parent.mkdir()
    shutil.copy(tables.files(place(app))[0], orphan)
    before = {*place(app).rglob("*.parquet")} - {*(place(app) / "_delta_log").rglob("*")}
    table = DeltaTable(str(place(app)), ["date", "k"])
    assert table.optimize()["numFilesAdded"] == 1
    assert len(tables.files(place(app))) == 1
    assert table.vacuum(timedelta(days=7)) == 0
    assert table.vacuum(timedelta(0)) == 4
    assert before.isdisjoint(tables.files(place(app)))
    assert not orphan.exists()
    assert kept(app) == [0, 3, 6]
    assert table.delete("n < 4") == 2
    assert kept(app) == [6]
    send(app, 9)
    assert app.run() == 0, app.told
    assert kept(app) == [6, 9]


def test_without_deltalake(app: Application, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deltalake", None)
    send(app, 1)
    assert app.run() == 1
    assert app.told[-1].endswith(NEEDS_DELTA)


def test_the_settings_of_the_jar() -> None:
    assert delta.settings("org.x:y:1") == {}
    assert set(delta.settings("a:b:1,io.delta:delta-spark_2.13:4.1.0")) == {
        "spark.sql.extensions",
        "spark.sql.catalog.spark_catalog",
    }


@pytest.mark.cluster
@pytest.mark.parametrize("point", ["before_commit", "after_commit"])
def test_kill_between_the_files_and_the_checkpoint(app: Application, point: str) -> None:
    """kill -9 of driver and workers, with the files written, and with the table's commit but not Spark's."""
    send(app, *range(6))
    command = [sys.executable, "-m", "smqrt", "pipeline", "run", "--once", "--from", "earliest"]
    command += ["--app", str(app.folder), "--journal", app.journal]
    env = os.environ | {"SMQRT_FAULT": f"{point}:0"}
    killed = subprocess.run(command, env=env, start_new_session=True, capture_output=True, timeout=200)
    assert killed.returncode == -9
    assert deltalake.DeltaTable(place(app)).version() == (1 if point == "after_commit" else 0)
    assert list(place(app).rglob("part-*.parquet"))
    assert app.run() == 0, app.told
    assert kept(app) == list(range(6))


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket of a server of S3, a process of its own: deltalake keeps Python's lock while it asks."""
    import boto3

    port = free_port()
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stderr=-3)
    settings = {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    try:
        eventually(lambda: answers(port), "the server of S3 answers")
        boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="lake")
        yield "s3://lake"
    finally:
        server.terminate()
        server.wait()


def answers(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def test_an_object_store(app: Application, bucket: str) -> None:
    """deltalake commits there, Spark's workers write there with pyarrow; no jar is needed."""
    for numbers in ((1, 2), (3,)):
        send(app, *numbers)
        assert app.run(tables=bucket) == 0, app.told
    assert polars.read_delta(f"{bucket}/kept")["n"].sort().to_list() == [1, 2, 3]
    table = DeltaTable(f"{bucket}/kept", ["date", "k"])
    assert table.optimize()["numFilesAdded"] == 0
    assert table.vacuum(timedelta(0)) == 0
    shutil.rmtree(state(app) / "checkpoint")
    send(app, 4)
    assert app.run(tables=bucket, start="latest") == 0, app.told
    assert polars.read_delta(f"{bucket}/kept")["n"].sort().to_list() == [1, 2, 3, 4]
    assert not place(app).exists()


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
