"""A command of smqrt pipeline as a process, with all processes that it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from smqrt.journal import commit, files
from smqrt.journal.reader import Journal
from smqrt.pipeline import jvm, status, tables
from tests.support.waiting import wait_until

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
QUICK = f"{os.environ.get('JDK_JAVA_OPTIONS', '')} -XX:+UseSerialGC".strip()
"""Without threads that collect garbage beside it, a sixteenth less CPU time. Not for drivers of 450 MB, the least that
Spark takes: less of it is left.
"""
COMPILED = """
import sys
sys.path[:] = [path for path in sys.path if not path.endswith(("/pyspark.zip", "-src.zip"))]
"""
"""For spark-submit, which puts archives first on the path: the driver and a dozen workers would each compile pyspark
anew, about a second each.
"""


class Terminal:
    """A command of `smqrt pipeline` in a session of its own, whose one job lasts until it is allowed to end."""

    def __init__(self, app: Path, journal: Path) -> None:
        self.app, self.journal = app, journal
        self.inside, self.go = app / "inside", app / "go"
        self.log = app / "driver.log"
        (app / "pipelines").mkdir()
        self.write(PUBLISHED)
        self.send_row()
        self.process: subprocess.Popen[bytes] | None = None

    def send_row(self) -> None:
        """A row for the job, which lasts until it is allowed to end."""
        self.inside.unlink(missing_ok=True)
        self.go.unlink(missing_ok=True)
        commit.publish(files.HubAddress.of(self.journal), [(b"in", None, b'{"n": 1}')])

    def write(self, queries: str) -> None:
        code = SOURCE.format(inside=str(self.inside), go=str(self.go)) + queries
        (self.app / "pipelines" / "p.py").write_text(code)

    def start(self, command: str = "run", *words: str) -> None:
        self.begin("pipeline", command, "--app", str(self.app), *(words or ("--from", "earliest", "--republish")))

    def submit(self, *words: str) -> None:
        folder = self.app / "compiled"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(COMPILED)
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        # The archive with which `smqrt pipeline run` starts sooner.
        java = " ".join([QUICK, *jvm.archive_options(jvm.find_java())])
        self.begin("pipeline", "submit", "--app", str(self.app), *words, PYTHONPATH=path, JDK_JAVA_OPTIONS=java)

    def begin(self, *words: str, **environment: str) -> None:
        (self.app / "tmp").mkdir(exist_ok=True)
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "smqrt", *words],
                env=os.environ | {"TMPDIR": str(self.app / "tmp"), "JDK_JAVA_OPTIONS": QUICK} | environment,
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
