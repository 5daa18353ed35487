"""Backfills after a fix: what is published is new, and what is in a table is the old or the new, never both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from smqrt.errors import PipelineError
from smqrt.pipeline import backfill as backfills
from smqrt.pipeline import checkpoint, sinks, status, tables
from smqrt.pipeline import query as resume
from smqrt.pipeline.backfill import Corrections
from smqrt.pipeline.session import COMMON_SETTINGS
from tests.pipeline.applications import Application
from tests.pipeline.hubs import JournalingHub

Backfill = Callable[..., str]


@pytest.fixture
def app(tmp_path: Path, hub: JournalingHub, spark: Any) -> Iterator[Application]:
    """An application whose queries keep their state as `smqrt pipeline run` would."""
    before = {name: spark.conf.get(name, None) for name in COMMON_SETTINGS if "stateStore" in name}
    for name in before:
        spark.conf.set(name, COMMON_SETTINGS[name])
    yield Application(tmp_path, hub, spark)
    for name, value in before.items():
        spark.conf.unset(name) if value is None else spark.conf.set(name, value)


@pytest.fixture
def backfill(app: Application) -> Backfill:
    """Does a backfill of the application, and returns what it said: `backfill(name, replace=True)`."""

    def do(name: str, **options: Any) -> str:
        app.told.clear()
        assert backfills.backfill(app.catalog, name, app.options(**options), app.spark) == 0
        return " | ".join(app.told)

    return do


def killed(app: Application, point: str, *words: str) -> None:
    """Does a backfill in a process of its own, which is killed with its helpers at a point."""
    command = [sys.executable, "-m", "smqrt", "pipeline", "backfill", *words, "--from", "earliest"]
    command += ["--app", str(app.folder), "--journal", app.journal]
    env = os.environ | {status.CRASH_VARIABLE: point}
    found = subprocess.run(command, env=env, start_new_session=True, capture_output=True, timeout=200)
    assert found.returncode == -9, found.stderr.decode()


class Interruption(BaseException):
    """As a kill, but in this process, which takes less time."""


@pytest.fixture
def interrupted(app: Application, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Does a backfill that ends at a point: `interrupted("before_replace", "kept", replace=True)`."""

    def do(point: str, name: str, **options: Any) -> None:
        def crash_at(here: str, number: int, of_worker: bool = False) -> None:
            if here == point:
                raise Interruption

        monkeypatch.setattr(status, "crash_at", crash_at)
        with pytest.raises(Interruption):
            backfills.backfill(app.catalog, name, app.options(**options), app.spark)
        monkeypatch.undo()

    return do


# ---- results on topics

DOUBLED = (
    "@source({source}, json='n int')\ndef rows(df): return df\n@publish(to='OUT/x')\ndef x(rows): return {result}\n"
)


def doubled(app: Application, result: str) -> None:
    app.write(DOUBLED.format(source=app.source, result=result))


def test_what_is_out_already_is_not_published_again(app: Application, backfill: Backfill) -> None:
    doubled(app, "rows.select((F.col('n') * 2).alias('d'))")
    app.send({"n": 1}, {"n": 2}, {"n": 2})
    assert backfill("x", republish=True) == "x: 3 published as version 1"
    assert backfill("x", republish=True) == "x: nothing published: all 3 results are published already, with version 1"
    app.send({"n": 2}, {"n": 4})
    assert backfill("x", republish=True) == "x: 2 published as version 2; 3 more are published already, unchanged"
    doubled(app, "rows.select((F.col('n') * F.when(F.col('n') == 1, 3).otherwise(2)).alias('d'))")
    assert backfill("x", replace=True) == "x: 1 published as version 3; 4 more are published already, unchanged"
    assert backfill("x", replace=True) == "x: nothing published: all 5 results are published already, with version 3"
    doubled(app, "rows.select((F.col('n') * 2).alias('d'))")
    assert "1 published as version 4" in backfill("x", republish=True), "the first result, which has been corrected"
    assert [one["d"] for one in app.results()] == [2, 4, 4, 4, 8, 3, 2]
    assert {row.txn.rpartition(".")[0] for row in app.hub.rows(f"{app.topic}/out/#")} == {
        f"backfill.x.v{number}" for number in (1, 2, 3, 4)
    }
    doubled(app, "rows.where('n > 99').select('n')")
    assert backfill("x", republish=True) == "x: nothing published: this range has no results"


def test_disjoint_ranges_are_not_compared(app: Application, backfill: Backfill) -> None:
    doubled(app, "rows.select('n')")
    app.send({"n": 1})
    middle = str(app.end)
    app.send({"n": 1})
    end = str(app.end)
    assert backfill("x", republish=True, until=middle) == "x: 1 published as version 1"
    assert backfill("x", republish=True, start=middle, until=end) == "x: 1 published as version 2"
    assert "with version 1 and 2" in backfill("x", republish=True, until=end)
    assert app.results() == [{"n": 1}, {"n": 1}]


def test_a_version_that_was_killed_is_finished(
    app: Application, backfill: Backfill, interrupted: Callable[..., None]
) -> None:
    """Before the hub has it, and behind that; with another query meanwhile, and many results as with few."""
    doubled(app, "rows.select('n')")
    app.send({"n": 1}, {"n": 2})
    interrupted("before_commit", "x", republish=True)
    assert app.results() == []
    doubled(app, "rows.select((F.col('n') + 10).alias('n'))")
    assert backfill("x", republish=True).startswith("x: 2 published as version 1, which completes an interrupted")
    assert [one["n"] for one in app.results()] == [1, 2, 11, 12]
    doubled(app, "rows.select((F.col('n') + 20).alias('n'))")
    killed(app, "after_commit:0", "x", "--republish")
    assert [one["n"] for one in app.results()] == [1, 2, 11, 12, 21, 22]
    assert "nothing published: all 2 results are published already, with version 3" in backfill("x", republish=True)
    assert len(app.results()) == 6


def test_many_results_go_by_a_task(app: Application, backfill: Backfill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "MAX_COLLECTED_ROWS", 2)
    doubled(app, "rows.select('n')")
    app.send(*({"n": n} for n in range(5)))
    assert backfill("x", republish=True) == "x: 5 published as version 1"
    assert "nothing published" in backfill("x", republish=True)
    assert sorted(one["n"] for one in app.results()) == [0, 1, 2, 3, 4]


def test_two_at_a_time_are_refused(app: Application, spark: Any) -> None:
    query = app.folder / ".pipelines" / "x"
    versions = Corrections(spark, query, lambda frame, key, many: 0)
    status.claim(query / "versions")
    with pytest.raises(PipelineError, match=r"process \d+ is already publishing results"):
        next(versions.publish(spark.range(1), {}, {}))


# ---- rows of tables

KEPT = (
    "@source({source}, json='n int')\ndef rows(df): return df\n"
    "@table('kept', partition_by='hour', format='{format}')\ndef kept(rows): return {result}\n"
)


def keeps(app: Application, table_format: str, result: str) -> None:
    app.write(KEPT.format(source=app.source, format=table_format, result=result))


def rows(app: Application) -> list[int]:
    place = app.folder / ".tables" / "kept"
    frame = tables.frame(app.spark, place)
    found = sorted(row.n for row in frame.select("n").collect())
    files = tables.files(place)
    assert sorted(row.n for row in app.spark.read.parquet(*map(str, files)).collect()) == found
    return found


FORMATS = ("parquet", "delta", "iceberg")


@pytest.mark.parametrize("table_format", FORMATS)
def test_rows_are_replaced_and_the_stream_goes_on(app: Application, backfill: Backfill, table_format: str) -> None:
    whole, fixed = "rows", "rows.withColumn('n', F.col('n') * 10)"
    keeps(app, table_format, whole)
    app.send({"n": 1}, {"n": 2})
    first = app.end - 2
    assert app.run(start=str(first)) == 0, app.told
    middle = str(app.end)
    app.send({"n": 3})
    assert app.run() == 0, app.told
    app.send({"n": 4})  # not read yet: the stream's own
    keeps(app, table_format, fixed)
    with pytest.raises(PipelineError, match="--replace computes these rows again"):
        backfill("kept", start=str(first))
    assert "rows replaced in" in backfill("kept", replace=True, start=str(first), until=middle)
    assert rows(app) == [3, 10, 20], "those of a part"
    for _ in range(2):
        assert "rows replaced in" in backfill("kept", replace=True, start=str(first))
        assert rows(app) == [10, 20, 30], "all that there are"
    last = 14 if table_format == "parquet" else 5  # of plain files Spark makes its log compact at the tenth micro-batch
    for number in range(4, last):
        assert app.run() == 0, app.told
        app.send({"n": number + 1})
    assert rows(app) == [10 * number for number in range(1, last)]
    assert "rows replaced in" in backfill("kept", replace=True, start=str(first))
    assert app.run() == 0, app.told
    assert rows(app) == [10 * number for number in range(1, last + 1)]
    list(resume.reset(app.folder / ".pipelines", "kept", app.journal, str(app.folder / ".tables" / "kept")))
    assert [path.name for path in (app.folder / ".tables").iterdir() if path.name.startswith("kept")] == []


@pytest.mark.parametrize("table_format", FORMATS)
def test_a_kill_leaves_either_the_old_or_new_rows(
    app: Application, backfill: Backfill, interrupted: Callable[..., None], table_format: str
) -> None:
    keeps(app, table_format, "rows")
    app.send({"n": 1}, {"n": 2})
    assert app.run() == 0, app.told
    keeps(app, table_format, "rows.withColumn('n', F.col('n') * 10)")
    interrupted("before_replace", "kept", replace=True)
    assert rows(app) == [1, 2]
    if table_format == "parquet":
        killed(app, "amid_replace", "kept", "--replace")
        assert rows(app) == [1, 2]
    app.send({"n": 3})
    assert app.run() == 0, app.told
    assert rows(app) == [1, 2, 30], "the query goes on nevertheless"
    interrupted("after_replace", "kept", replace=True)
    assert rows(app) == [10, 20, 30]
    assert "rows replaced in" in backfill("kept", replace=True)
    assert rows(app) == [10, 20, 30]


def test_what_can_not_be_replaced_is_said(app: Application, backfill: Backfill) -> None:
    keeps(app, "parquet", "rows.select('n', 'ts')")
    app.send({"n": 1}, {"n": 2})
    first, middle = app.end - 2, app.end - 1
    assert app.run(start=str(first)) == 0
    with pytest.raises(PipelineError, match="without columns node and seq in the result") as error:
        backfill("kept", replace=True, start=str(first), until=str(middle))
    assert f"""--from '{{"n1": {first}}}' --to '{{"n1": {first + 2}}}'.""" in str(error.value)
    assert rows(app) == [1, 2]
    state = app.folder / ".pipelines" / "kept"
    commits = state / "checkpoint" / "commits"
    last = commits / str(checkpoint.last_batch(state))
    text = last.read_text()
    last.unlink()
    with pytest.raises(PipelineError, match="its last micro-batch is not complete: run smqrt pipeline run kept --once"):
        backfill("kept", replace=True)
    last.write_text(text)
    app.write(
        f"@source({app.source}, json='at timestamp, n int', event_time='at', watermark='1 second')\n"
        "def rows(df): return df\n"
        "@table('kept')\n"
        "def kept(rows): return rows.groupBy(F.window('at', '1 hour')).count()\n"
    )
    with pytest.raises(PipelineError, match="has a state in its checkpoint \\(groupBy\\)"):
        backfill("kept", replace=True)
    (state / "pid").write_text(f"{os.getppid()} {status._started(os.getppid())} {status._host()}\n")
    with pytest.raises(PipelineError, match="is running as process"):
        backfill("kept", replace=True)


def test_a_backfill_takes_its_place_among_others(app: Application, backfill: Backfill) -> None:
    """Folders of other ranges are left alone, and an identical call without --replace writes nothing."""
    keeps(app, "parquet", "rows.select('n', 'ts')")
    app.send({"n": 1}, {"n": 2})
    first = app.end - 2
    middle = str(first + 1)
    assert app.run(start=str(app.end)) == 0
    assert "written to" in backfill("kept", start=str(first), until=middle)
    assert "written to" in backfill("kept", start=middle, until=str(first + 2))
    keeps(app, "parquet", "rows.select((F.col('n') * 10).alias('n'), 'ts')")
    assert "nothing written: an earlier backfill has written these rows" in backfill(
        "kept", start=str(first), until=middle
    )
    assert rows(app) == [1, 2]
    backfill("kept", replace=True, start=str(first), until=middle)
    assert rows(app) == [2, 10]
    file = tables.versions_file(app.folder / ".tables" / "kept")
    assert json.loads(file.read_text())["version"] == 1
