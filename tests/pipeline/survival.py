"""Pipelines and a hub that are killed again and again, and what is left of their messages afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smqrt.journal.reader import Journal
from smqrt.pipeline import faults, status, tables

HUB = """
import json
import os

import gevent

from smqrt import hub

smq = hub.create(journal={"sync": "1s"})


def feed():
    number = 0
    while not os.path.exists(%(quiet)r):
        for _ in range(%(burst)d):
            number += 1
            message = {"id": f"{os.getpid()}-{number}", "key": number %% 10}
            smq.publish(json.dumps(message), f"in/{number %% 10}")
        gevent.sleep(0.02)


gevent.spawn(feed)
"""
PIPELINES = """
from pyspark.sql import functions as F
from smqrt.pipeline import publish, source, table

@source("in/#", json="id string, key int", watermark="1 second")
def rows(df): return df

@publish(to="out/echo", trigger="20 ms")
def echo(rows): return rows.select("id")

@publish(to="out/sums", trigger="20 ms")
def sums(rows):
    windows = rows.groupBy(F.window("ts", "1 second"), "key").agg(F.count("*").alias("n"))
    return windows.select(F.unix_seconds("window.start").alias("start"), "key", "n")

@table("kept", trigger="500 ms")
def kept(rows): return rows.select("id")
"""
BURST_S = 0.02
PATIENCE_S = 600


@dataclass(frozen=True)
class Figures:
    """What became of the messages.

    Attributes:
        expected: messages that the journal has; published, unique: results of the stateless query; kept: rows of its
            table that count; windows: results of the stateful query; wrong: of these, how many differ from what the
            messages give; twice: how many came again; missing: how many never came; gaps: missing numbers in the
            journal.
    """

    expected: int
    published: int
    unique: int
    kept: int
    windows: int
    wrong: int
    twice: int
    missing: int
    gaps: int

    @property
    def exact(self) -> bool:
        """Whether everything was done exactly once."""
        once = self.expected == self.published == self.unique == self.kept
        faults = self.wrong + self.twice + self.missing + self.gaps
        return once and self.expected > 0 and self.windows > 0 and not faults


class Trial:
    """An application, its hub and its pipelines, each in a process group of its own.

    Args:
        folder: for everything; made here.
        rate: messages a second.
    """

    def __init__(self, folder: Path, rate: int) -> None:
        self.folder, self.journal, self.state = folder, folder / ".journal", folder / ".pipelines"
        (folder / "pipelines").mkdir(parents=True)
        (folder / ".preload.py").write_text(HUB % {"burst": round(rate * BURST_S), "quiet": str(folder / "quiet")})
        (folder / "pipelines" / "all.py").write_text(PIPELINES)
        self.hub_kills = self.driver_kills = 0
        self.inside = 0
        self.log = folder / "driver.log"
        self._port = 0
        self._hub: subprocess.Popen[Any] | None = None
        self.driver: subprocess.Popen[Any] | None = None

    def start_hub(self) -> None:
        """Starts the hub, where it was; messages begin to flow."""
        self._hub = self._process("serve", "--port", str(self._port), str(self.folder), log="hub.log")
        eventually(lambda: self._announced() == self._hub.pid, "the hub is there", 30)  # type: ignore[union-attr]
        self._port = int(json.loads((self.journal / "hub.json").read_text())["url"].split(":")[2].split("/")[0])

    def kill_hub(self) -> None:
        """kill -9."""
        self._kill(self._hub)
        self.hub_kills += 1

    def start_driver(self, fault: str = "") -> None:
        """Starts the pipelines; a fault is "before_commit" or "after_commit", with ":N" in micro-batch N."""
        more = ["--from", "earliest", "--republish", "--hub-retry", "120"]
        environment = {faults.VARIABLE: fault} if fault else {}
        self.driver = self._process(
            "pipeline", "run", "--app", str(self.folder), *more, log="driver.log", **environment
        )

    def wait_for_the_fault(self) -> None:
        """Waits until the pipelines have killed themselves, and notes whether the hub knew more than Spark."""
        assert self.driver
        self.driver.wait(PATIENCE_S)
        assert self.driver.returncode == -signal.SIGKILL, self.log.read_text()
        self.driver_kills += 1
        self.inside += self._is_inside()

    def kill_driver(self) -> None:
        """kill -9 of the process group: driver, JVM and helpers."""
        self._kill(self.driver)
        self.driver_kills += 1
        self.inside += self._is_inside()

    def batch(self, query: str = "echo") -> int:
        """Returns the last micro-batch that Spark has noted as done; -1 is none."""
        done = (self.state / query / "checkpoint" / "commits").glob("[0-9]*")
        return max((int(path.name) for path in done), default=-1)

    def wait_for_batches(self, more: int) -> None:
        """Waits until so many more micro-batches are done."""
        reached = self.batch() + more
        eventually(lambda: self.batch() >= reached, f"micro-batch {reached} is done", PATIENCE_S)

    def finish(self) -> str:
        """Lets the messages end, the pipelines catch up and stop as an operator does; returns what they printed."""
        (self.folder / "quiet").touch()
        end = self._last_message()
        eventually(lambda: self._caught_up(end), "the pipelines have caught up", PATIENCE_S)
        assert self.driver
        self.driver.send_signal(signal.SIGTERM)
        assert self.driver.wait(60) == 0, self.log.read_text()
        return self.log.read_text()

    def close(self) -> None:
        """Ends what still runs."""
        for process in (self.driver, self._hub):
            if process is not None and process.poll() is None:
                self._kill(process)

    def figures(self) -> Figures:
        """Compares what came in with what went out."""
        rows = self._rows()
        sent = [row for row in rows if row.topic.startswith("in/")]
        echoed = [json.loads(row.payload)["id"] for row in rows if row.topic == "out/echo"]
        windows = [json.loads(row.payload) for row in rows if row.topic == "out/sums"]
        truth = Counter((row.ts_us // 1_000_000, json.loads(row.payload)["key"]) for row in sent)
        told = Counter((each["start"], each["key"]) for each in windows)
        wrong = sum(truth[each["start"], each["key"]] != each["n"] for each in windows)
        known = {json.loads(row.payload)["id"] for row in sent}
        assert len(known) == len(sent)
        return Figures(
            expected=len(sent),
            published=len(echoed),
            unique=len(set(echoed) & known),
            kept=self._kept(),
            windows=len(windows),
            wrong=wrong,
            twice=sum(times - 1 for times in told.values()),
            missing=self._missing(truth, told),
            gaps=sum(later.seq - row.seq - 1 for row, later in zip(rows, rows[1:], strict=False)),
        )

    @staticmethod
    def _missing(truth: Counter[Any], told: Counter[Any]) -> int:
        """Windows that ought to be final: a second and the watermark before the last message."""
        last = max(start for start, _ in truth)
        return sum(1 for start, key in truth if start < last - 3 and (start, key) not in told)

    def _kept(self) -> int:
        from pyarrow import parquet

        ids = [id for file in tables.files(self.folder / ".tables" / "kept") for id in _ids(parquet.read_table(file))]
        assert len(ids) == len(set(ids)), "a row is twice in the table"
        return len(ids)

    def _is_inside(self) -> bool:
        """Whether the hub has results of a micro-batch that Spark doesn't know to be done."""
        committed = {row.txn for row in self._rows() if row.txn}
        for query in ("echo", "sums"):
            found = status.read(self.state / query)
            if found and f"{found.query_id}:{self.batch(query) + 1}" in committed:
                return True
        return False

    def _rows(self) -> list[Any]:
        journal = Journal(self.journal)
        return list(journal.rows(journal.begin(), journal.end()))

    def _last_message(self) -> int:
        """Waits until no more messages come; returns what follows the last one."""
        ends = [-1, 0]
        while ends[-1] != ends[-2]:
            time.sleep(1)
            ends.append(max(row.seq for row in self._rows() if row.topic.startswith("in/")) + 1)
        return ends[-1]

    def _caught_up(self, end: int) -> bool:
        """Whether every query is behind the last message; for windows also with the micro-batch that follows."""
        done = {query: self.batch(query) - (query == "sums") for query in ("echo", "sums", "kept")}
        return all(batch >= 0 and self._end_of(query, batch) >= end for query, batch in done.items())

    def _end_of(self, query: str, batch: int) -> int:
        lines = (self.state / query / "checkpoint" / "offsets" / str(batch)).read_text().splitlines()
        return int(json.loads(lines[2]).get("n1", 0))

    def _announced(self) -> int:
        try:
            return int(json.loads((self.journal / "hub.json").read_text())["pid"])
        except (OSError, ValueError):
            return 0

    def _process(self, *words: str, log: str, **environment: str) -> subprocess.Popen[Any]:
        with (self.folder / log).open("ab") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "smqrt", *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | environment,
                start_new_session=True,
            )

    @staticmethod
    def _kill(process: subprocess.Popen[Any] | None) -> None:
        assert process
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def _ids(table: Any) -> list[str]:
    return list(table.column("id").to_pylist())


def eventually(condition: Callable[[], Any], what: str, timeout_s: float) -> None:
    """Waits until something is true; fails when it doesn't become so."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)
