"""Pipelines and a hub that are killed again and again, and what is left of their messages afterwards."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from smqrt.journal import commit, files
from smqrt.pipeline import status, tables
from smqrt.pipeline.status import CRASH_VARIABLE
from tests.conftest import free_port
from tests.pipeline import ledger, receivers
from tests.pipeline.plain_stream import JAVA
from tests.support.waiting import wait_until

HUB = """
from smqrt import hub
from smqrt.app import worker
from smqrt.journal import durability

durability.RETENTION_S = 2.0
smq = hub.create(cluster="trial", journal=%r)


def answer(request, relpath):
    is_here = relpath in ("smq", f"smq{worker.number}")
    if is_here:
        smq.connect(request)
    return is_here


dir.setfunc(answer)
"""
OTHER_HUB = HUB.replace("durability.RETENTION_S = 2.0\n", "").replace(", journal=%r", "")
WORKERS = 2
NODES = ("n1", "n1-w1")
LINKS = {"SMQRT_CLUSTER__PASSWORD": "of the trial", "SMQRT_CLUSTER__PING_S": "0.2"}
SETTINGS = {"sync": "publish", "min_free_bytes": 0}
RETAINED = SETTINGS | {"retain": "30s", "segment_bytes": "256KiB"}
"""So that segments are sealed, compacted and removed all the time."""
PIPELINES = """
from pyspark.sql import functions as F
from smqrt.pipeline import publish, source, table

IN = {"topics": "in/#", "json": "id string, key int", "include_pipeline": True}

@source(**IN)
def rows(df): return df

@source(**IN, watermark="2 seconds", dead_letter="out/future")
def timed(df): return df

@publish(to="out/echo", trigger="100 ms")
def echo(rows): return rows.select("id")

@publish(to="out/sums", trigger="100 ms")
def sums(timed):
    windows = timed.groupBy(F.window("ts", "1 second"), "key").agg(F.count("*").alias("n"))
    return windows.select(F.unix_seconds("window.start").alias("start"), "key", "n")

@table("kept", trigger="500 ms")
def kept(rows): return rows.select("id")
"""
QUERIES = ("echo", "sums", "kept", "timed.dead_letters")
PLAIN = "plain"
"""The stream without decorators: its results, and the folder of its checkpoint."""
PATIENCE_S = 600
DELIVERY_S = 10.0
MISSED_BATCHES = 5
HERE = Path(__file__).parent


class Shims:
    """What a hub's calls of the system do: the disk of its journal, and the machine's clock.

    Args:
        folder: for the libraries and what controls them.
        journal: the folder whose disk may fail.
    """

    def __init__(self, folder: Path, journal: Path) -> None:
        folder.mkdir()
        sources = [HERE.parent / "journal" / "failing_disk.c", HERE / "jumping_clock.c"]
        libraries = [self._compiled(source, folder) for source in sources]
        self._disk, self._clock = folder / "disk", folder / "clock"
        self._clock.write_bytes(bytes(8))
        self.environment = {
            "LD_PRELOAD": " ".join(map(str, libraries)),
            "FAILING_DISK": str(journal),
            "FAILING_DISK_CONTROL": str(self._disk),
            "JUMPING_CLOCK": str(self._clock),
        }

    @staticmethod
    def _compiled(source: Path, folder: Path) -> Path:
        library = folder / f"{source.stem}.so"
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        return library

    @contextmanager
    def disk(self, call: str, error: int = 0, delay_ms: int = 0) -> Iterator[None]:
        """While inside, calls ("write", "sync") wait so long, then fail with the number unless it is 0."""
        ready = self._disk.with_suffix(".new")
        ready.write_text(f"{call} {error} {delay_ms}\n")
        ready.rename(self._disk)
        try:
            yield
        finally:
            self._disk.unlink()

    @contextmanager
    def clock(self, ahead_s: int) -> Iterator[None]:
        """While inside, the machine's clock is so far ahead."""
        self._set(ahead_s)
        try:
            yield
        finally:
            self._set(0)

    def _set(self, ahead_s: int) -> None:
        with self._clock.open("r+b") as file:  # in place: it is mapped
            file.write(struct.pack("<q", ahead_s))


def _free_ports(count: int) -> int:
    """Return the first of so many free ports that follow each other."""
    while True:
        first = free_port()
        with suppress(OSError), ExitStack() as taken:
            for port in range(first, first + count):
                taken.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def _clusters(port: int) -> list[Any]:
    """Return what the server with this port for operators says of its cluster; nothing while it is not there."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/api/v1/clusters", timeout=5) as answer:
            return list(json.load(answer))
    except OSError:
        return []


class Trial:
    """An application, its hub, its publishers and its pipelines, each in a process group of its own.

    Args:
        folder: for everything; made here.
        rate: messages a second.
        full: with retention, compaction, and a disk and a clock that can be made to fail.

    Attributes:
        driver_kills, hub_kills, compactor_kills: how many there were; inside: of those of drivers, how many between the
            hub's commit and Spark's; log: what pipelines have printed.
    """

    def __init__(self, folder: Path, rate: int, full: bool = False) -> None:
        self.folder, self.journal, self.state = folder, folder / ".journal", folder / ".pipelines"
        (folder / "pipelines").mkdir(parents=True)
        (folder / ".preload.py").write_text(HUB % (RETAINED if full else SETTINGS))
        (folder / "pipelines" / "all.py").write_text(PIPELINES)
        self.shims = Shims(folder.with_name("shims"), self.journal) if full else None
        self.hub_kills = self.driver_kills = self.compactor_kills = self.inside = 0
        self.log = folder / "driver.log"
        self._port, self._rate, self._plain = free_port(), rate, False
        self._hub: subprocess.Popen[Any] | None = None
        self._compactor: subprocess.Popen[Any] | None = None
        self.driver: subprocess.Popen[Any] | None = None
        self._publishers: list[ledger.Publisher] = []
        self._collector, self._clients = ledger.Collector(self.journal), receivers.ClientThread()
        self._links, self._other_port, self._admin_ports = _free_ports(WORKERS), free_port(), (free_port(), free_port())
        self._other: subprocess.Popen[Any] | None = None
        self._receivers: list[receivers.Receiver] = []
        self._kills: list[receivers.Moment] = []
        self._linked: list[receivers.Moment] = []

    # ---- processes

    def start_hub(self) -> None:
        """Start the hub, where it was; at the first start messages begin to flow."""
        environment, known = (self.shims.environment if self.shims else {}) | LINKS, self._announced()
        links = ("--cluster-listen", f"127.0.0.1:{self._links}", "--admin-port", str(self._admin_ports[0]))
        words = ("serve", "--port", str(self._port), "--workers", str(WORKERS), *links, str(self.folder))
        self._hub = self._process(*words, log="hub.log", **environment)
        wait_until(lambda: self._announced() not in (0, known), "the hub is there", 60)
        if not self._publishers:
            self._start_other_node()
        at_s = time.monotonic()
        wait_until(self._are_linked, "workers and nodes are linked", 60)
        self._linked.append(receivers.moment(self.journal, at_s))
        if not self._publishers:
            self._begin()

    def _are_linked(self) -> bool:
        """Return whether each of both workers and the other node sees both others."""
        found = [node for port in self._admin_ports for node in _clusters(port)]
        all_nodes = {node["node"] for node in found}
        hubs = [(node["node"], hub) for node in found for hub in node["hubs"] if not hub["joining"]]
        return len(hubs) == WORKERS + 1 and all({number, *hub["nodes"]} == all_nodes for number, hub in hubs)

    def _begin(self) -> None:
        self._clients.start()
        for worker in range(WORKERS):
            self.subscribe(f"raw at worker {worker}", f"http://127.0.0.1:{self._port}/smq{worker}")
            self.subscribe(f"WebSocket at worker {worker}", f"ws://127.0.0.1:{self._port}/smq{worker}")
        self.subscribe("raw at another node", f"http://127.0.0.1:{self._other_port}/smq", is_at_hub=False)
        self.subscribe("WebSocket at another node", f"ws://127.0.0.1:{self._other_port}/smq", is_at_hub=False)
        address, rate = f"http://127.0.0.1:{self._port}/smq", self._rate // 2
        client = ledger.Client("client", self.journal, rate, address, self._clients)
        self._publishers = [ledger.Publisher("http", self.journal, rate), client]
        for name in (*QUERIES, PLAIN):  # as if all had run before the first message
            commit.report_progress(files.HubAddress.of(self.journal), name, name, dict.fromkeys(NODES, 0))
        for thread in (*self._publishers, self._collector):
            thread.start()

    def _start_other_node(self) -> None:
        """A node without a journal, whose subscribers get the results over links."""
        app = self.folder.with_name("other")
        app.mkdir()
        (app / ".preload.py").write_text(OTHER_HUB)
        nodes = ",".join(f"127.0.0.1:{self._links + worker}" for worker in range(WORKERS))
        links = ("--cluster-listen", f"127.0.0.1:{free_port()}", "--cluster-nodes", nodes)
        words = ("serve", "--port", str(self._other_port), "--admin-port", str(self._admin_ports[1]), *links, str(app))
        self._other = self._process(*words, log="other.log", **LINKS)

    def subscribe(self, name: str, url: str, is_at_hub: bool = True) -> None:
        """Add a subscriber of the results."""
        receiver = receivers.Receiver(name, self.journal, url, is_at_hub)
        self._clients.spawn(receiver.run)
        receiver.wait_subscribed()
        self._receivers.append(receiver)

    def join_late(self) -> None:
        """Add subscribers of the results that have missed some already, at all workers and nodes."""
        for worker in range(WORKERS):
            self.subscribe(f"late raw at worker {worker}", f"http://127.0.0.1:{self._port}/smq{worker}")
        self.subscribe("late WebSocket", f"ws://127.0.0.1:{self._port}/smq")
        self.subscribe("late raw at another node", f"http://127.0.0.1:{self._other_port}/smq", is_at_hub=False)

    def kill_hub(self) -> None:
        """kill -9."""
        self._kill(self._hub)
        self._kills.append(receivers.moment(self.journal, time.monotonic()))
        self.hub_kills += 1

    def start_compactor(self) -> None:
        """Start the process that compacts and merges, every second."""
        words = ("journal", "compact", str(self.journal), "--watch", "1s", "--grace", "5s")
        self._compactor = self._process(*words, log="compactor.log")

    def kill_compactor(self) -> None:
        """kill -9, and it is started again."""
        self._kill(self._compactor)
        self.compactor_kills += 1
        self.start_compactor()

    def start_driver(self, fault: str = "", http: bool = False, plain: bool = False) -> None:
        """Start the pipelines.

        Args:
            fault: "before_commit" or "after_commit", with ":N" in micro-batch N.
            http: they read from the hub, and not from the folder.
            plain: instead of them a stream of plain Spark, whose sink is `format("smq")`.
        """
        self._plain = plain
        self._fault_batch = int(fault.partition(":")[2] or 0)
        environment = {CRASH_VARIABLE: fault} if fault else {}
        where = (self._url, "--token", (self.journal / "token").read_text().strip()) if http else (str(self.journal),)
        if plain:
            command: tuple[str, ...] = ("-m", "tests.pipeline.plain_stream", str(self.state / PLAIN), where[0])
            environment["PLAIN_STREAM_TOKEN"] = where[-1] if http else ""
        else:
            java = [word for name, value in JAVA.items() for word in ("--conf", f"{name}={value}")]
            more = ("--from", "earliest", "--republish", "--hub-retry", "120", *java, "--journal", *where)
            command = ("-m", "smqrt", "pipeline", "run", "--app", str(self.folder), *more)
        self.driver = self._started(*command, log="driver.log", **environment)

    def wait_for_the_fault(self) -> None:
        """Waits until the pipelines have killed themselves, and notes whether the hub knew more than Spark. They are
        killed when they did not: the micro-batch that was meant had no results.
        """
        assert self.driver
        wait_until(lambda: self._ended or self.batch() > self._fault_batch + MISSED_BATCHES, "the fault", PATIENCE_S)
        if not self._ended:
            self._kill(self.driver)
        assert self.driver.returncode == -signal.SIGKILL, self.log.read_text()
        self.driver_kills += 1
        self.inside += self._is_inside()

    def kill_driver(self) -> None:
        """kill -9 of the process group: driver, JVM and helpers."""
        self._kill(self.driver)
        self.driver_kills += 1
        self.inside += self._is_inside()

    def stop_driver(self) -> None:
        """Stop the pipelines as an operator does."""
        assert self.driver
        self.driver.send_signal(signal.SIGTERM)
        assert self.driver.wait(120) == 0, self.log.read_text()

    def close(self) -> None:
        """End what still runs."""
        if self._clients.is_alive():
            self._clients.finish()
        for process in (self.driver, self._compactor, self._hub, self._other):
            if process is not None and process.poll() is None:
                self._kill(process)

    # ---- faults

    @contextmanager
    def moved(self) -> Iterator[None]:
        """While inside, the journal's folder is elsewhere."""
        away = self.journal.with_name("away")
        self.journal.rename(away)
        try:
            yield
        finally:
            away.rename(self.journal)

    def forget_checkpoint(self, query: str) -> None:
        """Remove the checkpoint of a query that doesn't run, and nothing else of it."""
        shutil.rmtree(self.state / query / "checkpoint")

    # ---- how far it is

    def batch(self, query: str = "") -> int:
        """Return the last micro-batch that Spark has noted as done; -1 is none."""
        query = query or (PLAIN if self._plain else "echo")
        done = (self.state / query / "checkpoint" / "commits").glob("[0-9]*")
        return max((int(path.name) for path in done if path.name.isdecimal()), default=-1)

    def wait_for_batches(self, more: int, or_its_end: bool = False) -> None:
        """Waits until so many more micro-batches are done; the pipelines may end meanwhile if that is said."""
        reached = self.batch() + more
        wait_until(lambda: self.batch() >= reached or self._ended, f"micro-batch {reached} is done", PATIENCE_S)
        assert or_its_end or not self._ended, self.log.read_text()[-4000:]

    @property
    def _ended(self) -> bool:
        return self.driver is None or self.driver.poll() is not None

    def finish(self) -> str:
        """Let the messages end, the pipelines catch up and stop as an operator does; returns what they printed."""
        for publisher in self._publishers:
            publisher.finish()
        self.catch_up(*QUERIES)
        return self.log.read_text()

    def catch_up(self, *queries: str) -> None:
        """Waits until queries that run are behind the last message, and stops them."""
        end = self._last_message()
        behind = lambda: all(self._is_behind(end, each) for each in queries)  # noqa: E731
        wait_until(lambda: self._ended or behind(), f"{queries} are behind rows {end}", PATIENCE_S)
        self.stop_driver()

    def figures(self) -> ledger.Figures:
        """Compare what came in with what went out."""
        recorded = self._collector.caught_up()
        self._collector.finish()
        assert recorded.sent
        deliveries = self._deliveries(recorded)
        acknowledged = (name for publisher in self._publishers for name in publisher.acknowledged)
        return ledger.figures(recorded, acknowledged, self._kept(), deliveries)

    def _deliveries(self, recorded: ledger.Recorded) -> dict[str, receivers.Delivery]:
        """Waits until subscribers have the last results, though not for ever."""
        until_s = time.monotonic() + DELIVERY_S
        while True:
            results = recorded.in_order()
            found = {one.name: self._delivery(one, results) for one in self._receivers}
            if all(one.exact for one in found.values()) or time.monotonic() > until_s:
                break
            time.sleep(0.5)
        for one in self._receivers:
            one.finish()
        return found

    def _delivery(self, one: receivers.Receiver, results: dict[str, list[receivers.Result]]) -> receivers.Delivery:
        ways = [self._linked, one.subscribed] if one.is_at_hub else [self._linked]
        return receivers.delivery(results, one.got, one.subscribed, self._kills, ways)

    @property
    def uncertain(self) -> int:
        """Messages of which publishers don't know whether they are stored."""
        return sum(len(publisher.uncertain) for publisher in self._publishers)

    def _kept(self) -> Iterable[str]:
        from pyarrow import parquet

        for file in tables.files(self.folder / ".tables" / "kept"):
            yield from parquet.read_table(file, partitioning=None).column("id").to_pylist()

    def _is_inside(self) -> bool:
        """Return whether the hub has results of a micro-batch that Spark doesn't know to be done."""
        committed = self._collector.caught_up().commits
        return any(f"{self._query_id(query)}:{self.batch(query) + 1}" in committed for query in ("echo", "sums", PLAIN))

    def _query_id(self, query: str) -> str:
        if query == PLAIN:
            metadata = self.state / PLAIN / "checkpoint" / "metadata"
            return str(json.loads(metadata.read_text())["id"]) if metadata.exists() else ""
        found = status.read(self.state / query)
        return found.query_id if found else ""

    def _last_message(self) -> dict[str, int]:
        """Waits until no more messages come; returns by node the number behind the last one."""
        seen = [-1, 0]
        while seen[-1] != seen[-2]:
            seen.append(len(self._collector.caught_up().sent))
            time.sleep(1)
        return self._collector.recorded.end

    def _is_behind(self, end: dict[str, int], query: str) -> bool:
        """Return whether a query is behind the last message; for windows also with the micro-batch that follows."""
        batch = self.batch(query) - (query == "sums")
        if batch < 0:
            return False
        lines = (self.state / query / "checkpoint" / "offsets" / str(batch)).read_text().splitlines()
        reached = json.loads(lines[2])
        return all(reached.get(node, 0) >= seq for node, seq in end.items())

    # ---- starting and killing

    @property
    def _url(self) -> str:
        return str(json.loads((self.journal / "hub.json").read_text())["url"])

    def _announced(self) -> int:
        try:
            return int(json.loads((self.journal / "hub.json").read_text())["pid"])
        except (OSError, ValueError):
            return 0

    def _process(self, *words: str, log: str, **environment: str) -> subprocess.Popen[Any]:
        return self._started("-m", "smqrt", *words, log=log, **environment)

    def _started(self, *words: str, log: str, **environment: str) -> subprocess.Popen[Any]:
        with (self.folder / log).open("ab") as out:
            return subprocess.Popen(
                [sys.executable, *words],
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
