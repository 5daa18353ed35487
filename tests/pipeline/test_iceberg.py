"""Tables in Iceberg's format: each row once, whatever happens, and readable by those who know the format."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog.sql import SqlCatalog

from smqrt.errors import PipelineError
from smqrt.pipeline import iceberg, reset, tables
from smqrt.pipeline.backfill import backfill
from smqrt.pipeline.iceberg import IcebergTable
from tests.pipeline.applications import Application
from tests.pipeline.hubs import JournalingHub

KEPT = (
    "@source({source}, json='n int, k string')\ndef rows(df): return df\n"
    "@table('kept', format='iceberg', partition_by=['date', 'k'])\n"
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


def table(app: Application) -> Any:
    """The table as others open it."""
    return SqlCatalog("smqrt", uri=f"sqlite:///{app.folder}/.tables/iceberg.db").load_table("tables.kept")


def kept(app: Application) -> list[int]:
    found = sorted(table(app).scan().to_arrow()["n"].to_pylist())
    assert sorted(row.n for row in tables.frame(app.spark, place(app)).collect()) == found
    return found


def test_each_row_once(app: Application) -> None:
    """Also of a micro-batch that is done again, after a lost checkpoint, and after a reset."""
    send(app, *range(6))
    assert app.run() == 0, app.told
    assert kept(app) == list(range(6))
    assert table(app).scan(row_filter="k = 'a b/c%'").to_arrow()["n"].to_pylist() == [0, 3]
    assert len(tables.files(place(app))) == len(list(place(app).rglob("*.parquet")))
    for path in (state(app) / "checkpoint" / "commits").glob("*0*"):
        path.unlink()
    assert app.run() == 0, app.told
    assert len(table(app).snapshots()) == 1
    shutil.rmtree(state(app) / "checkpoint")
    send(app, 6)
    assert app.run(start="latest") == 0, app.told
    assert f"It goes on where its table in {place(app)} ends" in app.told[-1]
    list(reset.reset(app.folder / ".pipelines", "kept", app.journal, None))
    send(app, 7)
    assert app.run(start="latest") == 0, app.told
    assert kept(app) == list(range(8))
    list(reset.reset(app.folder / ".pipelines", "kept", app.journal, str(place(app))))
    assert app.run() == 0, app.told
    assert kept(app) == list(range(8))


def test_a_backfill_and_other_columns(app: Application) -> None:
    send(app, 1, 2)
    middle = app.end
    send(app, 3)
    assert app.run(start=str(middle)) == 0, app.told
    for _ in range(2):
        assert backfill(app.catalog, "kept", app.options(start=str(middle - 2), until=str(middle)), app.spark) == 0
    assert kept(app) == [1, 2, 3]
    app.write(KEPT.format(source=app.source).replace("'ts')", "'ts', 'topic')"))
    send(app, 4)
    assert app.run() == 0, app.told
    rows = table(app).scan().to_arrow().sort_by("n")
    assert rows["topic"].to_pylist() == [None, None, None, f"{app.topic}/in/x"]
    app.write(KEPT.format(source=app.source).replace("'n', 'k'", "F.col('n').cast('string').alias('n'), 'k'"))
    send(app, 5)
    assert app.run() == 1
    assert "has a column of another type than the result" in app.told[-1]


def test_what_is_missing_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PipelineError, match="needs a catalog that others see"):
        IcebergTable("s3://bucket/kept")
    monkeypatch.setitem(sys.modules, "pyiceberg.catalog.sql", None)
    with pytest.raises(PipelineError, match=r"pip install 'smqrt\[iceberg\]'"):
        IcebergTable(str(tmp_path / "kept"))
    assert iceberg.NEEDS_ICEBERG.endswith("brings it.")


@pytest.mark.cluster
def test_kill_between_the_snapshot_and_the_checkpoint(app: Application) -> None:
    send(app, *range(6))
    command = [sys.executable, "-m", "smqrt", "pipeline", "run", "--once", "--from", "earliest"]
    command += ["--app", str(app.folder), "--journal", app.journal]
    env = os.environ | {"SMQRT_FAULT": "after_commit:0"}
    killed = subprocess.run(command, env=env, start_new_session=True, capture_output=True, timeout=200)
    assert killed.returncode == -9
    assert len(table(app).snapshots()) == 1
    assert app.run() == 0, app.told
    assert kept(app) == list(range(6))
