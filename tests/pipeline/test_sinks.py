"""Sinks and checkpoints around Spark: old batches, whose checkpoint it is, commits in parts, a hub that is away."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.datasource import DataSource

from smqrt.errors import ArgumentError, PipelineError
from smqrt.journal.files import Unreachable
from smqrt.journal.reader import Journal
from smqrt.pipeline import checkpoint, failures, tables
from smqrt.pipeline.api import Declaration
from smqrt.pipeline.checkpoint import PublishGate, QueryStart
from smqrt.pipeline.sinks import CommitClient, Stopped
from tests.pipeline.recorded import START_US, STEP_US, Recorded


def query(kind: Any = "publish", **options: Any) -> Declaration:
    given = {"mode": "append", "path": "t", "format": "parquet", **options}
    return Declaration("q", kind, print, ("readings",), given, [], "p.py", 3)


def batch(folder: Path, number: int, *ends: Any) -> None:
    lines = ["v1", "{}", *(end if isinstance(end, str) else json.dumps(end) for end in ends)]
    path = folder / "checkpoint" / "offsets" / str(number)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines))


def test_gate(tmp_path: Path) -> None:
    batch(tmp_path, 0, {"n1": 5})
    batch(tmp_path, 1, {"n1": 10}, "-")
    batch(tmp_path, 2, {"n1": 10}, {"n1": 11})
    batch(tmp_path, 3, {"n1": 10, "n2": 1})
    old = {number: PublishGate(tmp_path, {"n1": 10}).is_old(number) for number in range(4)}
    assert old == {0: True, 1: True, 2: False, 3: False}
    assert not PublishGate(tmp_path, None).is_old(0)


def test_gate_stays_open(tmp_path: Path) -> None:
    batch(tmp_path, 0, {"n1": 11})
    gate = PublishGate(tmp_path, {"n1": 10})
    assert not gate.is_old(0)
    assert not gate.is_old(1)  # without looking


def test_where_a_query_begins(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "j").add(100).seal()
    journal = Journal(recorded.path)
    assert checkpoint.start(tmp_path / "a", journal, "latest", True) == QueryStart({"n1": 100}, None)
    assert checkpoint.start(tmp_path / "b", journal, "earliest", True) == QueryStart({"n1": 0}, {"n1": 100})
    assert checkpoint.start(tmp_path / "c", journal, "earliest", False) == QueryStart({"n1": 0}, None)
    assert checkpoint.offsets(journal, "40") == {"n1": 40}
    assert checkpoint.offsets(journal, '{"n1": 7}') == {"n1": 7}
    assert checkpoint.offsets(journal, "2026-11-21T15:00:00.050Z") == {"n1": 50}
    assert START_US + 50 * STEP_US == 1_795_273_200_050_000
    recorded.add(10).seal()
    assert checkpoint.start(tmp_path / "b", journal, "latest", False) == QueryStart({"n1": 0}, {"n1": 100}), (
        "it is kept"
    )
    assert checkpoint.start_offsets(tmp_path / "b") == {"n1": 0}
    assert checkpoint.start_offsets(tmp_path / "never") is None


@pytest.mark.parametrize("moment", ["yesterday", '{"n1": -1}', "{", ""])
def test_no_moment(tmp_path: Path, moment: str) -> None:
    journal = Journal(Recorded(tmp_path / "j").add(1).seal().path)
    with pytest.raises((PipelineError, ArgumentError), match="yesterday|not an offset|must be"):
        checkpoint.offsets(journal, moment)


@pytest.mark.parametrize(
    ("now", "sources", "change"),
    [
        (query("table"), ["readings"], "kind was publish and is table."),
        (query(), ["readings", "others"], "sources was readings and is readings, others."),
        (query(mode="update"), ["readings"], "mode was append and is update."),
    ],
)
def test_checkpoint_of_another_query(tmp_path: Path, now: Declaration, sources: list[str], change: str) -> None:
    checkpoint.claim(tmp_path, query(), ["readings"])
    checkpoint.claim(tmp_path, query(to="elsewhere"), ["readings"])
    with pytest.raises(PipelineError) as caught:
        checkpoint.claim(tmp_path, now, sources)
    assert str(caught.value) == (
        f"p.py:3: the checkpoint in {tmp_path} belongs to another version of q; "
        f"rename the query, or run smqrt pipeline reset q: {change}"
    )


def test_a_checkpoint_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(PipelineError, match=r"belongs to another version of q;.*it has no query\.json"):
        checkpoint.claim(tmp_path, query(), ["readings"])


def test_a_broken_file(tmp_path: Path) -> None:
    (tmp_path / "query.json").write_text("{")
    with pytest.raises(PipelineError, match=r"query\.json can't be read .* remove the folder"):
        checkpoint.claim(tmp_path, query(), ["readings"])


def test_hub_away(tmp_path: Path) -> None:
    hub = CommitClient(str(tmp_path), None, 0.7, threading.Event())
    began = time.monotonic()
    with pytest.raises(Unreachable, match="No hub serves .*The results to publish stay in the journal"):
        hub.commit("q", 1, [(b"t", None, b"x")])
    assert 0.6 < time.monotonic() - began < 5
    hub.stopping.set()
    hub.retry_s = 60
    with pytest.raises(Stopped, match="stopped while the hub was unreachable"):
        hub.commit("q", 1, [(b"t", None, b"x")])


def test_tables(tmp_path: Path) -> None:
    assert tables.location(query("table", path="a/b"), tmp_path) == f"{tmp_path}/.tables/a/b"
    assert tables.location(query("table", path="s3a://x/y"), tmp_path) == "s3a://x/y"
    assert tables.location(query("table", path="/x"), tmp_path) == "/x"
    assert tables.location(query("table", path="file:/x"), tmp_path) == "/x"
    assert tables.location(query("table", path="a/b"), tmp_path, "abfss://c@h/t/") == "abfss://c@h/t/a/b"
    assert tables.location(query("table", path="a/b"), tmp_path, f"file://{tmp_path}") == f"{tmp_path}/a/b"
    with pytest.raises(ArgumentError, match=r"s3a://x/y is not a folder .*frame\(spark, URI\) reads it with Spark"):
        tables.files("s3a://x/y")


def test_files_that_count(tmp_path: Path) -> None:
    table = tmp_path / "t"
    log = table / "_spark_metadata"
    log.mkdir(parents=True)

    def entry(name: str, *files: str) -> None:
        added = (json.dumps({"path": f"file://{table}/{file}", "action": "add"}) for file in files)
        (log / name).write_text("\n".join(["v1", *added]))

    entry("0", "gone.parquet")
    entry("1.compact", "a%20b.parquet", "c.parquet")
    entry("2", "d.parquet")
    (table / "orphan.parquet").touch()
    more = tmp_path / "t@3f" / "date=1"
    more.mkdir(parents=True)
    (more / "e.parquet").touch()
    (tmp_path / "t@3f/_SUCCESS").touch()
    unfinished = tmp_path / "t@4e/_temporary"
    unfinished.mkdir(parents=True)
    (unfinished / "f.parquet").touch()
    assert tables.files(table) == [table / "a b.parquet", table / "c.parquet", table / "d.parquet", more / "e.parquet"]
    assert tables.folders(table) == [table, tmp_path / "t@3f", tmp_path / "t@4e"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[STATE_STORE_VALUE_SCHEMA_NOT_COMPATIBLE] Provided value schema…", "another version of this query"),
        (
            'x\n  File "p.py", line 7, in f\nZeroDivisionError: division by zero\n\n\tat java',
            "ZeroDivisionError: division by zero",
        ),
        ('E: Traceback\n  File "x"\nsmqrt.errors.JournalError: /j is damaged.\n\n\tat java', "/j is damaged."),
        (f"Traceback\n{Unreachable.__module__}.Unreachable: The hub hasn't answered.\n", "The hub hasn't answered."),
        ("first\nsecond", "RuntimeError: first"),
        ("Job aborted\njava.io.IOException: No space left on device\n\tat java", "the disk is full: free space"),
        ("java.nio.file.FileSystemException: /x/offsets/.0: Read-only file system", "the disk is read-only: mount"),
        ("java.io.IOException: Input/output error\n\tat java.base/java.io", "the disk reports errors: check"),
        ("Job aborted\njava.lang.OutOfMemoryError: Java heap space\n\tat java", "memory: run it with --driver-memory"),
        (
            "Total size of 3 tasks is bigger than spark.driver.maxResultSize (1 MiB)",
            "larger than Spark's driver accepts",
        ),
        ("Job aborted\nPython worker exited unexpectedly (crashed)\n", "A Python worker of Spark died".lower()),
        ("An error occurred while calling o1.load.\n: java.io.IOException: Broken pipe\n\tat java", ": IOExc"),
        ("An error occurred while calling o1.load.\n: java.io.EOFException\n\tat java", ": EOFException"),
        ("calling o1\n: a.E: EOFException occurred while reading the port number from pyspark.daemon's stdout", "died"),
        ("There are [1] sources in the checkpoint offsets and now there are [2]", "smqrt pipeline reset q removes it"),
        ("[CANNOT_LOAD_STATE_STORE.UNEXPECTED_FILE_SIZE] An error", "another number of partitions"),
        ("[UNRESOLVED_COLUMN] A column with name `x` cannot be resolved. SQLSTATE: 42703", "`x` cannot be resolved"),
    ],
)
def test_one_sentence(text: str, expected: str) -> None:
    told = failures.running_error(query(), RuntimeError(text))
    assert told.startswith("p.py:7: q: " if 'File "p.py"' in text else "p.py:3: q: ")
    assert expected.lower() in told.lower()
    assert "\n" not in told


def test_spark_leaves_a_mark_when_out_of_memory(tmp_path: Path) -> None:
    log = tmp_path / "spark.log"
    assert "perhaps because memory ran out" in failures.spark_gone(OSError(), log)
    (tmp_path / failures.OUT_OF_MEMORY).touch()
    assert "--driver-memory" in failures.spark_gone(OSError(), log)


def test_a_helper_killed_during_planning_is_asked_again(spark: Any) -> None:
    class Dies(DataSource):
        def schema(self) -> str:
            os.kill(os.getpid(), signal.SIGKILL)
            return ""

    spark.dataSource.register(Dies)
    with pytest.raises(Exception, match="Dies|Python worker") as caught:
        spark.read.format("Dies").load()
    assert failures.is_transient(caught.value)
    assert failures.sentence("q", caught.value).startswith("a Python worker of Spark died")


def test_the_cause_is_looked_at_too() -> None:
    """As the task of a table tells it: pyspark keeps what Java says of the causes apart from the message."""

    class Told(RuntimeError):
        _cause: RuntimeError | None = None
        _stackTrace = ""

    error, why = Told("Task failed while writing rows to file:/x/.tables/kept."), Told("Job aborted")
    error._cause, why._stackTrace = why, "Caused by: java.io.IOException: No space left on device\n\tat java"
    assert failures.sentence("kept", error).startswith("the disk is full: free space")
