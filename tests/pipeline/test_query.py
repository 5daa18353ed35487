"""Looking after a query: what is done when it ends, without Spark."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from smqrt.journal.files import Unreachable
from smqrt.pipeline import status
from smqrt.pipeline.discover import load
from smqrt.pipeline.graph import plans
from smqrt.pipeline.query import Query
from smqrt.pipeline.runner import RunContext, Runner, RunOptions
from tests.pipeline.recorded import Recorded

FILE = (
    "from smqrt.pipeline import publish, source\n"
    "@source(json='a int', dead_letter='dlq')\ndef rows(df): return df\n"
    "@publish(to='x')\ndef out(rows): return rows\n"
)


class Handle:
    """Spark's handle of a query that has ended."""

    isActive = False
    lastProgress: Any = None

    def __init__(self, error: Exception | None = None, batch: int | None = None) -> None:
        self._error = error
        self.lastProgress = None if batch is None else {"batchId": batch}

    def exception(self) -> Exception | None:
        return self._error


class Gone:
    """A handle whose JVM has died."""

    @property
    def isActive(self) -> bool:
        raise ConnectionRefusedError


class Bench:
    """A query that was started, as far as the bookkeeping goes; `told` is what was reported."""

    def __init__(self, folder: Path, **options: Any) -> None:
        (folder / "pipelines").mkdir()
        (folder / "pipelines" / "p.py").write_text(FILE)
        self.told: list[str] = []
        journal = str(Recorded(folder / "j").add(1).seal().path)
        self.state = folder / "state"
        catalog = load(folder / "pipelines")
        self.context = RunContext(catalog, RunOptions(journal, folder, self.state, report=self.told.append, **options))
        self.out, self.letters = (Query(plan, self.context) for plan in plans(catalog, catalog.queries()))

    def ended(self, handle: Any) -> str:
        """Let the query's handle be this one; returns what is told about it."""
        self.context.status.starting("out", "publish")
        self.out.spark_query, self.out._restart_at_s = handle, 0.0
        self.out.poll()
        return self.told[-1] if self.told else ""


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_restarts_are_delayed_increasingly_and_then_stop(bench: Bench) -> None:
    delays = [bench.ended(Handle(RuntimeError(f"bad {number}"))).partition("again in ")[2] for number in range(4)]
    assert delays == ["1 s.", "2 s.", "5 s.", ""]
    assert bench.out.over
    assert bench.out.failed
    found = status.read(bench.state / "out")
    assert found is not None
    assert (found.state, found.error) == ("failed", bench.told[-1])
    assert bench.told[-1].endswith("p.py:4: out: RuntimeError: bad 3")


def test_a_successful_micro_batch_resets_the_failure_count(bench: Bench) -> None:
    for batch in range(8):
        assert bench.ended(Handle(RuntimeError(f"bad {batch}"), batch)).endswith("again in 1 s.")
    assert not bench.out.over


def test_an_unreachable_hub_has_no_last_time(bench: Bench) -> None:
    for _ in range(10):
        bench.ended(Handle(Unreachable("The hub is away.")))
    assert len(bench.told) == 1
    assert bench.told[0].endswith("p.py:4: out: The hub is away. It starts again in 1 s.")
    assert not bench.out.over


@pytest.mark.parametrize(
    "text", ["[STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE] x", "@expect('a'), which has on_fail='fail': {}"]
)
def test_what_cannot_help_is_not_tried(bench: Bench, text: str) -> None:
    bench.ended(Handle(RuntimeError(text)))
    assert bench.out.failed


def test_once_is_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path, once=True)
    bench.ended(Handle(Unreachable("The hub is away.")))
    assert bench.out.failed


def test_a_spark_that_is_gone(bench: Bench) -> None:
    told = bench.ended(Gone())
    assert "p.py:4: out: Spark has ended (ConnectionRefusedError), perhaps because memory ran out; " in told
    assert told.endswith(f"{bench.state}/.spark/spark.log may contain the reason.")
    assert bench.out.failed


def test_a_machine_that_is_too_busy_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path, once=True)
    monkeypatch.setattr(bench.out, "_start", lambda: busy())
    bench.out.claim()
    bench.out.start()
    assert bench.told[0].endswith(
        "p.py:4: out: RuntimeError: Python worker failed to connect back. It starts again in 1 s."
    )
    assert not bench.out.over


def busy() -> None:
    raise RuntimeError("Python worker failed to connect back.")


def test_ended_without_an_error(bench: Bench) -> None:
    bench.ended(Handle())
    assert (bench.out.over, bench.out.failed, bench.told) == (True, False, [])


def test_stopped_before_it_could_start(bench: Bench) -> None:
    """One that waits for its turn while others start is stopped like these."""
    stopping = threading.Event()
    stopping.set()
    queries = [bench.out, bench.letters]
    assert Runner(bench.context.catalog, bench.context.options, stopping).run_queries(queries) == 0
    found = [status.read(query.folder) for query in queries]
    assert [one and one.state for one in found] == ["stopped", "stopped"]


def test_running_elsewhere(bench: Bench) -> None:
    """Dead letters are there already, which will do; the query itself is a mistake."""
    bench.context.pid = -1
    for query in (bench.out, bench.letters):
        status.claim(query.folder)
        query.claim()
        assert query.over
    assert [query.failed for query in (bench.out, bench.letters)] == [True, False]
    assert len(bench.told) == 1
    assert "out is already running as process" in bench.told[0]
    assert "smqrt pipeline stop out stops it" in bench.told[0]
