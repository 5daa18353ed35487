"""Ctrl-C, as a terminal sends it: SIGINT to the driver, the JVM and the helpers at once. And SIGTERM of an operator."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from smqrt.journal import commit, locations
from smqrt.journal.reader import Journal
from smqrt.pipeline import status, tables
from tests.journal.made import readings, write
from tests.pipeline.hubs import JournalingHub
from tests.waiting import wait_until

START_S, STOP_S = 300, 120
SOURCE = """
import os
import time

from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType
from smqrt.pipeline import publish, source, table

@source("in", json="n int", include_pipeline=True)
def rows(df): return df

@F.udf(IntegerType())
def waits(n):
    open({inside!r}, "w").close()
    while not os.path.exists({go!r}):
        time.sleep(0.01)
    return n
"""
PUBLISHED = """
@publish(to="out", trigger="10 ms")
def echo(rows): return rows.select(waits("n").alias("n"))

@publish(to="idle", trigger="10 ms")
def idle(rows): return rows.filter("n < 0")
"""
KEPT = """
@table("kept")
def kept(rows): return rows.select(waits("n").alias("n"))
"""


class Terminal:
    """A command of `smqrt pipeline` in a session of its own, whose one job lasts until it is allowed to end."""

    def __init__(self, app: Path, journal: Path) -> None:
        self.app, self.journal = app, journal
        self.inside, self.go = app / "inside", app / "go"
        self.log = app / "driver.log"
        (app / "pipelines").mkdir()
        self.write(PUBLISHED)
        rows = [(b"in", None, b'{"n": 1}')]
        commit.publish(locations.HubAddress.of(journal), rows)
        self.process: subprocess.Popen[bytes] | None = None

    def write(self, queries: str) -> None:
        code = SOURCE.format(inside=str(self.inside), go=str(self.go)) + queries
        (self.app / "pipelines" / "p.py").write_text(code)

    def start(self, command: str = "run", *words: str) -> None:
        self.begin("pipeline", command, "--app", str(self.app), *(words or ("--from", "earliest", "--republish")))

    def begin(self, *words: str) -> None:
        (self.app / "tmp").mkdir(exist_ok=True)
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "smqrt", *words],
                env=os.environ | {"TMPDIR": str(self.app / "tmp")},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def send(self, number: int) -> None:
        assert self.process
        os.killpg(self.process.pid, number)

    def wait(self, timeout_s: float = STOP_S) -> int:
        assert self.process
        return self.process.wait(timeout_s)

    @property
    def written(self) -> list[Path]:
        """The files of the table, and those that a test has kept."""
        kept = self.app / "pipelines/tests/kept.json"
        return [*tables.files(self.app / ".tables/kept"), *([kept] if kept.exists() else [])]

    def wait_inside(self) -> None:
        """Waits until the micro-batch is under way."""
        wait_until(lambda: self.inside.exists() or self.ended, "the micro-batch is under way", START_S)
        assert not self.ended, self.printed

    @property
    def ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def everybody(self) -> dict[int, str]:
        """The driver and all its descendants: their process ids and the names of their programs."""
        assert self.process
        return family(self.process.pid)

    @property
    def printed(self) -> str:
        return self.log.read_text()

    @property
    def traces(self) -> list[str]:
        """Lines of errors that nobody can do anything about."""
        words = ("Traceback", "Exception", "\tat ", "Aborted", "ERROR")
        return [line for line in self.printed.splitlines() if any(word in line for word in words)]

    @property
    def results(self) -> list[bytes]:
        journal = Journal(self.journal)
        return [row.payload for row in journal.rows(journal.begin(), journal.end(), ["out"])]

    def state(self, query: str) -> str:
        found = status.read(self.app / ".pipelines" / query)
        return found.state if found else ""

    def close(self) -> None:
        if not self.ended:
            self.send(signal.SIGKILL)
            self.wait()


def family(pid: int) -> dict[int, str]:
    """A process and its descendants, by their numbers: the names of their programs. Who is dead isn't there."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            before, _, after = (path / "stat").read_text().rpartition(")")
            if after.split()[0] not in "ZX":
                parents[int(path.name)], names[int(path.name)] = int(after.split()[1]), before.partition("(")[2]
    found: set[int] = set()
    more = {pid}
    while more:
        found |= more
        more = {child for child, parent in parents.items() if parent in more}
    return {each: names[each] for each in found if each in names}


def alive(pid: int) -> bool:
    return pid in family(pid)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    hub = JournalingHub(tmp_path / "app")
    opened = Terminal(tmp_path / "app", hub.journal)
    yield opened
    opened.close()
    hub.stop()


@pytest.mark.cluster
def test_what_was_submitted_finishes_its_micro_batch(terminal: Terminal) -> None:
    """The process that was started is spark-submit's; the driver is its child. It is told twice, as a service manager
    and `smqrt serve` do.
    """
    terminal.start("submit", "--master", "local[2]", "--from", "earliest", "--republish")
    terminal.wait_inside()
    everybody = terminal.everybody()
    for _ in range(2):
        assert terminal.process
        terminal.process.terminate()
        wait_until(lambda: "once more" in terminal.printed or terminal.ended, "it says what it does", STOP_S)
    terminal.go.touch()
    assert terminal.wait() == 0, terminal.printed
    assert (terminal.state("echo"), terminal.state("idle"), terminal.results) == ("stopped", "stopped", [b'{"n":1}'])
    assert not terminal.traces
    wait_until(lambda: not any(map(alive, everybody)), "nobody is left", STOP_S)


@pytest.mark.cluster
def test_sigterm_to_everybody(terminal: Terminal) -> None:
    """As systemd does by default: to the JVM and the helpers of Spark too, which are in process groups of their own."""
    terminal.start()
    terminal.wait_inside()
    everybody = terminal.everybody()
    assert {"java", "python"} <= {name.rstrip(".0123456789") for name in everybody.values()}
    for _ in range(2):
        for pid in everybody:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        wait_until(lambda: "once more" in terminal.printed or terminal.ended, "it says what it does", STOP_S)
    assert set(terminal.everybody()) >= set(everybody), terminal.printed
    terminal.go.touch()
    assert terminal.wait() == 0, terminal.printed
    assert (terminal.state("echo"), terminal.state("idle"), terminal.results) == ("stopped", "stopped", [b'{"n":1}'])
    assert not terminal.traces
    wait_until(lambda: not any(map(alive, everybody)), "nobody is left", STOP_S)


@pytest.mark.cluster
def test_sigterm_to_everybody_while_spark_starts(terminal: Terminal) -> None:
    terminal.start()
    wait_until(lambda: "java" in terminal.everybody().values() or terminal.ended, "the JVM starts", START_S)
    everybody = terminal.everybody()
    for pid in everybody:
        os.kill(pid, signal.SIGTERM)
    assert terminal.wait() == 0, terminal.printed
    assert not terminal.traces
    wait_until(lambda: not any(map(alive, everybody)), "nobody is left", STOP_S)


@pytest.mark.cluster
def test_nobody_outlives_the_driver(terminal: Terminal) -> None:
    terminal.start()
    terminal.wait_inside()
    everybody = terminal.everybody()
    assert terminal.process
    terminal.process.kill()
    terminal.wait()
    terminal.go.touch()  # a worker that computes sees that nobody wants its result only when it has one
    wait_until(lambda: not any(map(alive, everybody)), "nobody is left", STOP_S)


@pytest.mark.cluster
def test_a_jvm_that_dies(terminal: Terminal) -> None:
    terminal.start()
    terminal.wait_inside()
    [jvm] = [pid for pid, name in terminal.everybody().items() if name == "java"]
    os.kill(jvm, signal.SIGKILL)
    assert terminal.wait() == 1, terminal.printed
    assert (terminal.state("echo"), terminal.state("idle"), terminal.results) == ("failed", "failed", [])
    assert not terminal.traces
    told = [line for line in terminal.printed.splitlines() if "Spark is gone" in line and "batch" not in line]
    assert len(told) == 2, terminal.printed


@pytest.mark.cluster
def test_ctrl_c_finishes_the_micro_batch_and_a_second_one_ends_it_at_once(terminal: Terminal) -> None:
    terminal.start()
    terminal.wait_inside()
    terminal.send(signal.SIGINT)
    wait_until(lambda: "once more" in terminal.printed, "it says what it does", STOP_S)
    terminal.send(signal.SIGINT)
    assert terminal.wait() == 128 + signal.SIGINT, terminal.printed
    assert terminal.results == []
    terminal.inside.unlink()
    terminal.start()
    terminal.wait_inside()
    terminal.send(signal.SIGINT)
    wait_until(lambda: terminal.printed.count("once more") == 2, "it says what it does", STOP_S)
    terminal.go.touch()
    assert terminal.wait() == 0, terminal.printed
    assert (terminal.state("echo"), terminal.state("idle")) == ("stopped", "stopped")
    assert terminal.results == [b'{"n":1}']
    assert (terminal.app / ".pipelines/echo/checkpoint/commits/0").exists()
    assert not terminal.traces


OTHERS = {
    "backfill": ("backfill", "kept", "--from", "earliest"),
    "test": ("test", "--journal", "{app}/.journal", "--update"),
}


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("command", "number", "code"), [("backfill", signal.SIGINT, 130), ("test", signal.SIGTERM, 143)]
)
def test_other_commands_leave_nothing_half_done(terminal: Terminal, command: str, number: int, code: int) -> None:
    words = [word.format(app=terminal.app) for word in OTHERS[command]]
    terminal.write(KEPT)
    terminal.start(*words)
    terminal.wait_inside()
    everybody = terminal.everybody()
    terminal.send(number)
    assert terminal.wait() == code, terminal.printed
    assert terminal.printed.splitlines()[-1] == "Interrupted."
    assert not terminal.traces
    assert terminal.written == []
    wait_until(lambda: not any(map(alive, everybody)), "nobody is left", STOP_S)
    assert list((terminal.app / "tmp").glob("smqrt-test-*")) == []
    terminal.go.touch()
    terminal.start(*words)
    assert terminal.wait(START_S) == 0, terminal.printed
    assert len(terminal.written) == 1


@pytest.mark.cluster
def test_doctor_while_spark_starts(terminal: Terminal) -> None:
    terminal.begin("pipeline", "doctor", "--app", str(terminal.app))
    wait_until(lambda: "java" in terminal.everybody().values() or terminal.ended, "the JVM starts", START_S)
    everybody = terminal.everybody()
    terminal.send(signal.SIGINT)
    assert terminal.wait() == 130, terminal.printed
    assert terminal.printed.splitlines()[-1] == "Interrupted."
    assert not terminal.traces
    wait_until(lambda: not any(map(alive, everybody)), "nobody is left", STOP_S)


@pytest.mark.cluster
def test_compacting_with_spark(terminal: Terminal, tmp_path: Path) -> None:
    journal = tmp_path / "recorded"
    write(journal, readings(200), segment_rows=100)
    words = ("journal", "compact", str(journal), "--json", "variant")
    terminal.begin(*words)
    wait_until(lambda: (journal / ".variant/rows.parquet").exists() or terminal.ended, "Spark is to write", START_S)
    terminal.send(signal.SIGINT)
    assert terminal.wait() == 130, terminal.printed
    assert terminal.printed.splitlines()[-1] == "Interrupted."
    assert not terminal.traces
    assert (list(journal.glob("data/*/*/*.parquet")), (journal / ".variant").exists()) == ([], False)
    terminal.begin(*words)
    assert terminal.wait(START_S) == 0, terminal.printed
    assert len(list(journal.glob("data/*/*/*"))) == 1
