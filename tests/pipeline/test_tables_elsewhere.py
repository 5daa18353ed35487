"""Tables in a file system that only Spark sees. Hadoop's viewfs stands for an object store: it needs no jar."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smqrt.errors import ArgumentError, PipelineError
from smqrt.pipeline import tables
from smqrt.pipeline.backfill import backfill
from smqrt.pipeline.query import reset
from smqrt.pipeline.runner import RunOptions
from tests.pipeline.applications import Application
from tests.pipeline.hubs import JournalingHub

MOUNT = "fs.viewfs.mounttable.smqrt.link./data"
ROOT = "viewfs://smqrt/data"
TABLE = """
@source({source}, json="v int")
def rows(df):
    return df


@table("deep/kept")
def kept(rows):
    return rows.select("seq", "v")
"""


@pytest.fixture
def store(spark: Any, tmp_path: Path) -> Iterator[Path]:
    """The folder behind `ROOT`."""
    folder = tmp_path / "store"
    folder.mkdir()
    hadoop = spark._jsc.hadoopConfiguration()
    hadoop.set(MOUNT, f"file://{folder}")
    hadoop.setBoolean("fs.viewfs.impl.disable.cache", True)
    yield folder
    hadoop.unset(MOUNT)


@pytest.fixture
def app(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Application]:
    for name in ("here", "app"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    hub = JournalingHub(tmp_path / "hub")
    try:
        made = Application(tmp_path / "app", hub, spark)
        made.write(TABLE.format(source=made.source))
        yield made
    finally:
        hub.stop()


def test_a_stream_a_backfill_and_a_reset(app: Application, store: Path, spark: Any) -> None:
    """`tables.frame` gives the stream's rows and those of backfills, as on the disk; nothing becomes local."""
    app.send({"v": 1}, {"v": 2})
    middle = app.end
    app.send({"v": 4})
    assert app.run(start=str(middle), tables=ROOT) == 0, app.told
    assert backfill(app.catalog, "kept", app.options(until=str(middle), tables=ROOT), spark) == 0
    uri = f"{ROOT}/deep/kept"
    assert tables.frame(spark, uri).groupBy().sum("v").first()[0] == 7
    assert list((store / "deep/kept").glob("*.parquet"))
    unfinished = next((store / "deep").glob("kept@*"))
    (unfinished / "_SUCCESS").unlink()
    assert tables.frame(spark, uri).groupBy().sum("v").first()[0] == 4
    with pytest.raises(PipelineError, match="There is no table in viewfs://smqrt/data/other"):
        tables.frame(spark, f"{ROOT}/other")
    with pytest.raises(PipelineError, match="is not on this machine: remove it there"):
        list(reset(app.folder / ".pipelines", "kept", app.journal, uri))
    assert list(Path.cwd().iterdir()) == []
    assert not (app.folder / ".tables").exists()


def test_state_is_on_this_machine(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"--state s3a:/+b/state is not a folder of this machine: .* --tables"):
        RunOptions(str(tmp_path), tmp_path, Path("s3a://b/state"))
    assert RunOptions("j", tmp_path, Path("file:///mnt/state")).state == Path("/mnt/state")
