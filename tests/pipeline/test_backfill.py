"""Backfills before Spark is asked: which range, which queries, and what prevents a replacement of rows."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, cast

import pytest

from smqrt.errors import PipelineError
from smqrt.pipeline import checkpoint, discover, status
from smqrt.pipeline.api import Declaration
from smqrt.pipeline.backfill import FOLDER, Corrections, backfill, exclusive, stream_end
from smqrt.pipeline.checkpoint import QueryStart
from smqrt.pipeline.discover import Catalog
from smqrt.pipeline.runner import RunOptions
from tests.pipeline.recorded import Recorded

FILE = """
from smqrt.pipeline import source, table, publish

@source("site1/#")
def rows(df): return df

@table("kept")
def kept(rows): return rows

@publish(to="OUT/x", mode="append")
def out(rows): return rows
"""


class NoSpark:
    """Stands for a session where none may be used."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"Spark is asked for {name}")


@pytest.fixture
def query(tmp_path: Path) -> Path:
    """`<state>/<name>` of a query that has not run."""
    return tmp_path / "kept"


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    (tmp_path / "pipelines").mkdir()
    (tmp_path / "pipelines" / "p.py").write_text(FILE)
    return discover.load(tmp_path / "pipelines")


def declaration(kind: Any = "table") -> Declaration:
    options = {"mode": "append", "path": "kept", "format": "parquet", "partition_by": ()}
    return Declaration("kept", kind, print, ("rows",), options, [], "p.py", 3)


# ---- which rows


def run(catalog: Catalog, name: str, tmp_path: Path, **options: Any) -> list[str]:
    """Runs a backfill that ends before Spark is asked; returns what it reports."""
    told: list[str] = []
    Recorded(tmp_path / "j").add(100).seal()
    given = RunOptions(app=tmp_path, journal=str(tmp_path / "j"), state=tmp_path, report=told.append, **options)
    backfill(catalog, name, given, cast("Any", NoSpark()))
    return told


def test_a_query_publishes_only_on_request(catalog: Catalog, tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="out publishes, and a backfill publishes only on request: add --republish"):
        run(catalog, "out", tmp_path, start="earliest")


@pytest.mark.parametrize(
    ("start", "until", "told"),
    [
        ("latest", None, "There are no rows between latest and latest."),
        ("50", "50", "There are no rows between 50 and 50."),
        ('{"n1": 60}', '{"n1": 50}', "There are no rows between"),
    ],
)
def test_a_range_without_rows_is_refused(
    catalog: Catalog, tmp_path: Path, start: str, until: str | None, told: str
) -> None:
    with pytest.raises(PipelineError, match=re.escape(told)):
        run(catalog, "kept", tmp_path, start=start, until=until)


# ---- replacing rows of a table


def test_a_running_query_is_not_replaced(query: Path) -> None:
    status.claim(query)
    with pytest.raises(PipelineError, match=rf"kept is running as process {os.getpid()}: stop it with"):
        exclusive(query, declaration()).__enter__()
    (query / "pid").write_text("1 2 another-machine\n")
    with pytest.raises(PipelineError, match="kept is running on another-machine: stop it with"):
        exclusive(query, declaration()).__enter__()


def test_a_query_can_not_start_while_it_is_replaced(query: Path) -> None:
    with exclusive(query, declaration()):
        assert status.running(query) == os.getpid()
    assert status.running(query) is None
    with pytest.raises(ZeroDivisionError), exclusive(query, declaration()):
        raise ZeroDivisionError
    assert status.running(query) is None


def spark_log(query: Path, log: str, batch: int, text: str = "") -> None:
    path = checkpoint.folder(query) / log / str(batch)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"v1\n{{}}\n{text}")


def test_rows_of_the_stream_end_at_its_checkpoint(query: Path) -> None:
    assert stream_end(query, declaration()) is None, "it has not run"
    checkpoint.replace_start(query, QueryStart({"n1": 4}, None))
    with pytest.raises(PipelineError, match=r"there is no checkpoint in .* run smqrt pipeline run kept --once first"):
        stream_end(query, declaration())
    checkpoint.folder(query).mkdir(parents=True)
    (checkpoint.folder(query) / "metadata").write_text("{}")
    assert stream_end(query, declaration()) == {"n1": 4}, "it has written nothing"
    spark_log(query, "offsets", 0, json.dumps({"n1": 9}))
    with pytest.raises(PipelineError, match="its last micro-batch is not complete"):
        stream_end(query, declaration())
    spark_log(query, "commits", 0)
    assert stream_end(query, declaration()) == {"n1": 9}


# ---- versions of published results


def version(query: Path, number: int, name: str = "", **values: Any) -> Path:
    folder = query / FOLDER / (name or f"v{number}.{number:012x}")
    given = {"name": folder.name, "number": number, "start": {"n1": 0}, "end": {"n1": 9}, "known": [], "rows": 1}
    checkpoint.write_json(folder / "version.json", {**given, "new": 1, "done": True, **values})
    return folder


def test_one_backfill_publishes_at_a_time(query: Path) -> None:
    status.claim(query / FOLDER)
    made = Corrections(cast("Any", NoSpark()), query, lambda *_: 0)
    with pytest.raises(PipelineError, match=rf"kept: process {os.getpid()} is already publishing results; wait"):
        next(made.publish(cast("Any", NoSpark()), {}, {"n1": 9}))


def test_remains_of_a_killed_backfill_are_removed(query: Path) -> None:
    """It had published nothing: its folder had not got its name."""
    whole, unfinished = version(query, 1), version(query, 2, "v2.00000000000a.new")
    made = Corrections(cast("Any", NoSpark()), query, lambda *_: 0)
    with pytest.raises(Exception, match=r"Spark|JVM|SparkContext|select"):
        list(made.publish(cast("Any", NoSpark()), {}, {"n1": 9}))
    assert (whole.exists(), unfinished.exists()) == (True, False)
    assert status.running(query / FOLDER) is None, "the next call can publish"
