"""Queries whose checkpoint or state is gone, or was reset: nothing is lost in silence, nothing comes twice."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from smqrt.journal import retention
from smqrt.journal.settings import JournalSettings
from smqrt.pipeline import query, tables
from smqrt.pipeline.runner import Runner
from tests.pipeline.applications import Application
from tests.pipeline.recorded import Recorded
from tests.support.waiting import wait_until

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


def state(app: Application, name: str) -> Path:
    return app.folder / ".pipelines" / name


def mark(app: Application, name: str) -> dict[str, int]:
    """Return what keeps retention from removing what a query hasn't read; nothing when it hasn't told."""
    path = app.hub.journal / "readers" / f"{name}.json"
    return dict(json.loads(path.read_text())["offset"]) if path.exists() else {}


def kept(app: Application) -> list[int]:
    """Return the rows of the table, by Spark; the files that count hold the same."""
    import pyarrow.parquet as pq

    folder = app.folder / ".tables" / "kept"
    listed = [n for file in tables.files(folder) for n in pq.read_table(file, partitioning=None)["n"].to_pylist()]
    found = sorted(row.n for row in tables.frame(app.spark, folder).collect())
    assert sorted(listed) == found
    return found


def forget(app: Application, name: str) -> None:
    list(query.reset(app.folder / ".pipelines", name, app.journal, None))


def send(app: Application, *numbers: int) -> None:
    app.send(*({"n": n} for n in numbers))


def test_a_table_that_was_kept_is_appended_to(app: Application) -> None:
    app.write(KEPT.format(source=app.source))
    send(app, 1, 2)
    assert app.run() == 0
    assert mark(app, "kept") == {"n1": app.end}, "a single micro-batch leaves its mark"
    for number in (3, 4):
        forget(app, "kept")
        send(app, number)
        assert app.run(start="latest") == 0
        assert kept(app) == list(range(1, number + 1))
    assert "continues where its table in" in app.told[0]
    assert len(app.told) == 2


def test_a_table_without_its_checkpoint(app: Application) -> None:
    app.write(KEPT.format(source=app.source))
    send(app, 1, 2)
    assert app.run() == 0
    shutil.rmtree(state(app, "kept") / "checkpoint")
    send(app, 3)
    assert app.run() == 0
    assert kept(app) == [1, 2, 3]
    assert len(app.told) == 1
    assert f"the checkpoint in {state(app, 'kept')} is missing" in app.told[0]


def test_a_table_with_an_unreported_last_micro_batch(app: Application) -> None:
    """Killed between the table's commit and its report, and then the checkpoint is removed: nobody knows the rows."""
    app.write(KEPT.format(source=app.source))
    send(app, 1, 2)
    assert app.run() == 0
    reported = (state(app, "kept") / "status.json").read_bytes()
    send(app, 3)
    assert app.run() == 0
    (state(app, "kept") / "status.json").write_bytes(reported)
    shutil.rmtree(state(app, "kept") / "checkpoint")
    assert app.run() == 0
    assert kept(app) == [1, 2, 3, 3]
    [told] = app.told
    assert "; the table may have its last micro-batch twice; the state of windows" in told


def test_a_query_with_unknown_publications(app: Application) -> None:
    app.write(ECHO.format(source=app.source))
    send(app, 1, 2)
    assert app.run(republish=True) == 0
    shutil.rmtree(state(app, "echo") / "checkpoint")
    (state(app, "echo") / "commit.json").unlink()
    assert app.run(republish=True) == 0
    assert [result["n"] for result in app.results()] == [1, 2, 1, 2], "a new query, of which nothing is dropped"
    [told] = app.told
    assert told.endswith(
        f"echo: the checkpoint in {state(app, 'echo')} is missing; it starts again, and may publish results twice."
    )


def test_a_table_without_its_state(app: Application) -> None:
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
    assert f"the checkpoint in {state(app, 'echo')} is missing" in app.told[0]

    noted = state(app, "echo") / "commit.json"
    last = json.loads(noted.read_text())
    send(app, 4)
    killed_before_the_commit = {"batch": last["batch"] + 1, "start": last["end"], "end": {"n1": app.end}}
    noted.write_text(json.dumps(last | killed_before_the_commit))
    shutil.rmtree(state(app, "echo") / "checkpoint")
    assert app.run() == 0
    assert [result["n"] for result in app.results()] == [1, 2, 3, 4]


def test_unread_rows_of_a_query_are_kept(app: Application) -> None:
    app.write(ECHO.format(source=app.source))
    before = app.end
    assert app.run(start=str(before + 10**9)) == 1, "there are no such rows"
    assert mark(app, "echo") == {"n1": before}, "a hub counts on from a mark"

    forget(app, "echo")
    stopping = threading.Event()
    runner = Runner(app.catalog, app.options(once=False, start="latest"), stopping, app.spark)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(runner.run, ["echo"])
        try:
            wait_until(lambda: mark(app, "echo") == {"n1": before}, "a mark before the first row", 60)
            send(app, 1, 2)
            wait_until(lambda: app.results() and mark(app, "echo") == {"n1": app.end}, "a mark while it waits", 60)
        finally:
            stopping.set()
        assert running.result(60) == 0


def test_an_abandoned_query_reports_missing_rows(app: Application, tmp_path: Path) -> None:
    app.write(
        "@source('site1/#')\ndef rows(df): return df\n@table('late')\ndef late(rows): return rows.select('seq')\n"
    )
    recorded = Recorded(tmp_path / "journal").add(20).seal()
    app.journal = str(recorded.path)
    assert app.run() == 0
    recorded.add(30).seal().add(10).seal()
    kept = JournalSettings(recorded.path, retain_s=0.001, max_bytes=None)
    now_us = time.time_ns() // 1000
    assert len(retention.expired(recorded.path, kept, now_us)) == 2, "what it has read"
    os.utime(recorded.path / "readers" / "late.json", (1_000_000, 1_000_000))
    retention.remove(recorded.path, retention.expired(recorded.path, kept, now_us))
    assert app.run() == 1
    [told] = app.told
    assert (
        "Rows 20 to 49 of node n1 are gone (retention has removed them): the query was stopped for longer than" in told
    )
    list(query.reset(app.folder / ".pipelines", "late", app.journal, None))
    assert app.run() == 0
    assert "Later rows that retention has removed are missing." in app.told[1]
    found = tables.frame(app.spark, app.folder / ".tables" / "late")
    assert sorted(row.seq for row in found.collect()) == [*range(20), *range(50, 60)]


def test_what_a_query_remembered_is_computed_anew(app: Application) -> None:
    app.write(COUNTS.format(source=app.source))
    app.send({"k": "a"}, {"k": "b"}, {"k": "a"})
    assert app.run(republish=True) == 0
    shutil.rmtree(state(app, "counts") / "checkpoint")
    app.send({"k": "a"})
    assert app.run() == 0
    assert app.results("a") == [{"k": "a", "n": 2}, {"k": "a", "n": 3}]
    assert app.results("b") == [{"k": "b", "n": 1}]


WINDOWS = (
    "@source({source}, json='t timestamp', event_time='t', watermark='1 second')\ndef rows(df): return df\n"
    "@publish(to='OUT/windows')\n"
    "def windows(rows):\n"
    "    counts = rows.groupBy(F.window('t', '1 second')).count()\n"
    "    return counts.select(F.second('window.start').alias('s'))\n"
)


def at(app: Application, *seconds: int) -> None:
    app.send(*({"t": f"2026-01-01T00:00:{second:02}Z"} for second in seconds))


def windows(app: Application) -> list[int]:
    return [result["s"] for result in app.results()]


@pytest.mark.parametrize("more", [(), (30,)])
def test_windows_that_the_last_commit_has_closed_come_once(
    app: Application, monkeypatch: pytest.MonkeyPatch, more: tuple[int, ...]
) -> None:
    """Spark gives them with the next micro-batch, with rows or without, which the checkpoint did not live to see."""
    app.write(WINDOWS.format(source=app.source))
    with monkeypatch.context() as stopped:  # before Spark has come to a micro-batch without rows
        stopped.setattr(query.Query, "_is_endless", lambda self: True)
        for seconds in ((1, 5), (20,)):
            at(app, *seconds)
            assert app.run(republish=True) == 0
    assert windows(app) == [1]
    shutil.rmtree(state(app, "windows") / "checkpoint")
    at(app, *more)
    assert app.run() == 0
    assert windows(app) == ([1, 5, 20] if more else [1, 5])
    at(app, 40)
    assert app.run() == 0
    assert windows(app) == ([1, 5, 20, 30] if more else [1, 5, 20])


def test_windows_before_the_first_start_are_not_published(app: Application) -> None:
    app.write(WINDOWS.format(source=app.source))
    at(app, 1, 5, 20)
    runner = Runner(app.catalog, app.options(once=False), stopping := threading.Event(), app.spark)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(runner.run, ["windows"])
        try:
            wait_until(lambda: state(app, "windows").joinpath("start.json").exists(), "it has begun", 60)
            at(app, 40)
            wait_until(lambda: 20 in windows(app), "the first window of now", 60)
        finally:
            stopping.set()
        assert running.result(60) == 0
    assert windows(app) == [20]
