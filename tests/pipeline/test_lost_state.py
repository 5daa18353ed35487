"""Queries whose checkpoint or state is gone, or was reset: nothing is lost in silence, nothing comes twice."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smqrt.pipeline import reset, tables
from tests.pipeline.applications import Application
from tests.pipeline.hubs import JournalingHub

KEPT = (
    "@source({source}, json='n int')\ndef rows(df): return df\n"
    "@table('kept')\ndef kept(rows): return rows.select('n')\n"
)
ECHO = (
    "@source({source}, json='n int')\ndef rows(df): return df\n@publish(to='OUT/echo')\ndef echo(rows): return rows\n"
)
COUNTS = (
    "@source({source}, json='k string')\ndef rows(df): return df\n"
    "@publish(to='OUT/{{k}}', mode='update')\n"
    "def counts(rows): return rows.groupBy('k').agg(F.count('*').alias('n'))\n"
)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JournalingHub]:
    hub = JournalingHub(tmp_path_factory.mktemp("hub") / "app")
    yield hub
    hub.stop()


@pytest.fixture
def app(tmp_path: Path, hub: JournalingHub, spark: Any) -> Application:
    return Application(tmp_path, hub, spark)


def state(app: Application, name: str) -> Path:
    return app.folder / ".pipelines" / name


def mark(app: Application, name: str) -> dict[str, int]:
    """Returns what keeps retention from removing what a query hasn't read."""
    found: dict[str, int] = json.loads((app.hub.journal / "readers" / f"{name}.json").read_text())["offset"]
    return found


def kept(app: Application) -> list[int]:
    """Returns the rows of the table, by Spark; the files that count hold the same."""
    import pyarrow.parquet as pq

    folder = app.folder / ".tables" / "kept"
    listed = [n for file in tables.files(folder) for n in pq.read_table(file, partitioning=None)["n"].to_pylist()]
    found = sorted(row.n for row in tables.frame(app.spark, folder).collect())
    assert sorted(listed) == found
    return found


def forget(app: Application, name: str) -> None:
    list(reset.reset(app.folder / ".pipelines", name, app.journal, None))


def send(app: Application, *numbers: int) -> None:
    app.send(*({"n": n} for n in numbers))


def test_a_table_that_was_kept_is_appended_to(app: Application) -> None:
    app.write(KEPT.format(source=app.source))
    send(app, 1, 2)
    assert app.run() == 0
    assert mark(app, "kept") == {"n1": app.end}, "a single micro-batch leaves its mark"
    send(app, 3)
    assert app.run() == 0
    for first in (4, 6):
        forget(app, "kept")
        send(app, first)
        assert app.run(start="latest") == 0
        send(app, first + 1)
        assert app.run() == 0
        assert kept(app) == list(range(1, first + 2))
    assert "goes on where its table in" in app.told[0]
    assert len(app.told) == 2


def test_a_table_whose_checkpoint_is_gone(app: Application) -> None:
    app.write(KEPT.format(source=app.source))
    send(app, 1, 2)
    assert app.run() == 0
    shutil.rmtree(state(app, "kept") / "checkpoint")
    send(app, 3)
    assert app.run() == 0
    assert kept(app) == [1, 2, 3]
    assert len(app.told) == 1
    assert f"the checkpoint in {state(app, 'kept')} is gone" in app.told[0]


def test_a_table_whose_state_is_gone(app: Application) -> None:
    app.write(KEPT.format(source=app.source))
    send(app, 1, 2)
    assert app.run() == 0
    shutil.rmtree(state(app, "kept"))
    send(app, 3)
    assert app.run(start=str(app.end - 1)) == 0
    assert kept(app) == [1, 2, 3]
    assert "of an earlier run" in app.told[0]


def test_nothing_is_published_twice_when_the_checkpoint_is_gone(app: Application) -> None:
    app.write(ECHO.format(source=app.source))
    send(app, 1, 2)
    assert app.run(republish=True) == 0
    shutil.rmtree(state(app, "echo") / "checkpoint")
    send(app, 3)
    assert app.run() == 0
    assert [result["n"] for result in app.results()] == [1, 2, 3]
    assert len(app.told) == 1
    assert f"the checkpoint in {state(app, 'echo')} is gone" in app.told[0]


def test_what_a_query_remembered_is_computed_anew(app: Application) -> None:
    app.write(COUNTS.format(source=app.source))
    app.send({"k": "a"}, {"k": "b"}, {"k": "a"})
    assert app.run(republish=True) == 0
    shutil.rmtree(state(app, "counts") / "checkpoint")
    app.send({"k": "a"})
    assert app.run() == 0
    assert app.results("a") == [{"k": "a", "n": 2}, {"k": "a", "n": 3}]
    assert app.results("b") == [{"k": "b", "n": 1}]
