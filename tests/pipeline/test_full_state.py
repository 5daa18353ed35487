"""A full disk under the state of queries: they wait for room, say so, and go on by themselves with nothing lost."""

from __future__ import annotations

import errno
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from smqrt.pipeline import query, status
from smqrt.pipeline.failures import is_disk_full, is_transient
from smqrt.pipeline.runner import Runner
from tests.pipeline.applications import Application
from tests.server.test_full_disk import fill
from tests.support.waiting import wait_until

PATIENCE_S = 60.0
QUERIES = ("out", "kept", "sums")
FILE = """
@source(SOURCE, json="n int")
def rows(df):
    return df

@publish(to="OUT/n", trigger="100ms")
def out(rows):
    return rows.select("n")

@table("kept", trigger="100ms")
def kept(rows):
    return rows.select("n")

@publish(to="OUT/sum", mode="update", trigger="100ms")
def sums(rows):
    return rows.groupBy((F.col("n") % 2).alias("odd")).agg(F.count("n").alias("count"))
"""


@pytest.fixture
def state(app: Application) -> Iterator[Path]:
    """The folder of the state, on a disk of its own."""
    at = app.folder / ".pipelines"
    at.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "smqrt", str(at)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    assert mounted.returncode == 0, f"to mount a disk takes root: {mounted.stderr}"
    yield at
    subprocess.run(["umount", "-l", at], check=True)


def test_queries_wait_for_room(
    app: Application, state: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query, "_FULL_DISK_POLL_S", 0.2)
    app.write(FILE.replace("SOURCE", app.source))
    stopping, told = threading.Event(), app.told
    runner = Runner(app.catalog, app.options(once=False, republish=True), stopping, spark)
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(runner.run)
        try:
            wait_until(lambda: all(_state(state, name) == "waiting" for name in QUERIES), "rest", PATIENCE_S)
            fill(state)  # so that the very first micro-batch finds no room
            app.send(*({"n": n} for n in range(10)))
            wait_until(lambda: all(_state(state, name) == "disk full" for name in QUERIES), told, PATIENCE_S)
            (state / "filler").unlink()
            wait_until(lambda: {each["n"] for each in app.results("n")} == set(range(10)), told, PATIENCE_S)
            wait_until(lambda: {"odd": 1, "count": 5} in app.results("sum"), told, PATIENCE_S)
            wait_until(lambda: all(_state(state, name) == "waiting" for name in QUERIES), "rest", PATIENCE_S)
            fill(state)
            app.send(*({"n": n} for n in range(10, 20)))
            wait_until(lambda: all(_state(state, name) == "disk full" for name in QUERIES), told, PATIENCE_S)
            found = status.read(state / "out")
            assert found
            assert "the disk is full: free space" in found.trouble
            assert found.stuck_since > 0
            monkeypatch.setattr(query, "_MAX_FAILURES", 0)  # from now on any other error ends a query
            threading.Event().wait(2)
            assert not done.done()
            assert {_state(state, name) for name in QUERIES} == {"disk full"}
            (state / "filler").unlink()
            wait_until(lambda: {each["n"] for each in app.results("n")} == set(range(20)), told, PATIENCE_S)
            wait_until(lambda: all(_state(state, name) == "waiting" for name in QUERIES), told, PATIENCE_S)
            wait_until(lambda: _read(app, spark) == list(range(20)), told, PATIENCE_S)
            wait_until(lambda: {"odd": 1, "count": 10} in app.results("sum"), told, PATIENCE_S)
            assert [status.read(state / name).trouble for name in QUERIES] == ["", "", ""]  # type: ignore[union-attr]
        finally:
            (state / "filler").unlink(missing_ok=True)
            stopping.set()
        assert done.result(PATIENCE_S) == 0
    assert max(Counter(each["n"] for each in app.results("n")).values()) == 1


def test_remains_of_a_first_micro_batch_are_harmless(app: Application) -> None:
    """Spark leaves it when the disk is full, and refuses a new checkpoint that has it."""
    app.write(FILE.replace("SOURCE", app.source))
    queries = ("out", "sums")
    assert app.run(*queries, republish=True) == 0, app.told
    for name in queries:
        checkpoint = app.folder / ".pipelines" / name / "checkpoint"
        for log in ("offsets", "commits", "state"):
            shutil.rmtree(checkpoint / log, ignore_errors=True)
        (checkpoint / "offsets").mkdir()
        (checkpoint / "offsets" / ".0.1e8f1c5e-0d5b-4a25-a1a6-3f8b5f7c1d2e.tmp").touch()
    app.send({"n": 1})
    assert app.run(*queries, republish=True) == 0, app.told
    assert (app.results("n"), app.results("sum")) == ([{"n": 1}], [{"odd": 1, "count": 1}])


def _state(state: Path, name: str) -> str:
    found = status.read(state / name)
    return found.state if found else ""


def _read(app: Application, spark: SparkSession) -> list[int]:
    [metadata] = app.folder.rglob("_spark_metadata")
    return sorted(row.n for row in spark.read.parquet(str(metadata.parent)).collect())


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("Job aborted\njava.io.IOException: No space left on device\n\tat java"),
        RuntimeError("java.io.IOException: Disk quota exceeded"),
    ],
)
def test_what_a_full_disk_says(error: Exception) -> None:
    assert is_disk_full(error)
    assert is_transient(error)
    assert not is_disk_full(RuntimeError("Input/output error"))


def test_status_is_reported_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = status.StatusWriter(tmp_path)
    kept.starting("q", "publish")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    kept.set_disk_full("q", "the disk is full")
    found = status.read(tmp_path / "q")
    assert found
    assert (found.state, found.trouble) == ("disk full", "the disk is full")
    kept.set_trouble("q", "x" * 100_000)  # more than fits: what was told last stays
    found = status.read(tmp_path / "q")
    assert found
    assert found.state == "disk full"
