"""Messages through a hub, a pipeline and back, in processes of their own: how long it takes, what idling costs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import brokers
from journal_cost import journaling_app
from pipeline_data import Measure, cpu_s

HERE = Path(__file__).parent
RATE = 2000
WARM_UP_S = 15.0
READY_S = 180
SETTLE_S = 45.0
"""So long the JVM still compiles what it does again and again."""
IDLE_S = 20.0
PIPELINE = """
from pyspark.sql import functions as F

from smqrt.pipeline import publish, source


@source(topics="bench/in", json="device string, at bigint", watermark="10 seconds")
def readings(df):
    return df


@publish(to="bench/out", mode="update")
def per_second(readings):
    grouped = readings.groupBy(F.window("ts", "1 second"), "device")
    return grouped.agg(F.count("*").alias("n"), F.max("at").alias("newest"))
"""
_STATE = "org.apache.spark.sql.execution.streaming"
SPARKS_OWN = {
    "spark.sql.shuffle.partitions": "200",
    "spark.sql.streaming.checkpointFileManagerClass": f"{_STATE}.checkpointing.FileContextBasedCheckpointFileManager",
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "true",
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.LocalFileSystem",
    "spark.sql.streaming.stateStore.providerClass": f"{_STATE}.state.HDFSBackedStateStoreProvider",
}
"""What Spark does unless told otherwise, where pipelines tell it."""


@dataclass
class Run:
    """One watched pipeline.

    Attributes:
        latencies_ms: from publishing the newest message in a result to receiving the result.
        triggers_ms: how long the micro-batches took.
    """

    latencies_ms: list[float]
    triggers_ms: list[float]

    def percentile(self, share: float) -> float:
        ordered = sorted(self.latencies_ms)
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


@contextmanager
def pipeline(folder: Path, trigger: str | None, settings: dict[str, str]) -> Iterator[tuple[Any, Any, Path]]:
    """Starts a hub and a pipeline; gives both processes and the pipeline's status file."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        app = journaling_app(Path(place))
        (app / "pipelines").mkdir()
        (app / "pipelines" / "seconds.py").write_text(PIPELINE)
        broker = brokers.start("smqrt", app)
        words = [str(app), trigger or "", json.dumps(settings)]
        runner = subprocess.Popen([sys.executable, str(HERE / "pipeline_live_run.py"), *words], start_new_session=True)
        try:
            status = app / ".pipelines" / "per_second" / "status.json"
            wait_for(status, runner)
            yield broker, runner, status
        finally:
            runner.terminate()
            runner.wait(30)
            broker.stop()


def wait_for(status: Path, runner: Any) -> None:
    deadline = time.monotonic() + READY_S
    while seen(status).get("state") not in ("running", "waiting"):
        if runner.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the pipeline did not start")
        time.sleep(0.1)


def seen(status: Path) -> dict[str, Any]:
    """Returns what a status file says."""
    try:
        found: dict[str, Any] = json.loads(status.read_text())
        return found
    except (OSError, ValueError):
        return {}


def watched(folder: Path, seconds: float, settings: dict[str, str]) -> Run:
    """Sends 2,000 messages a second through a pipeline that starts its micro-batches as fast as it can."""
    with pipeline(folder, "0 seconds", settings) as (broker, runner, status):
        words = [f"http://127.0.0.1:{broker.port}/smq.lsp", str(RATE), str(WARM_UP_S), str(seconds)]
        load = subprocess.Popen(
            [sys.executable, str(HERE / "pipeline_live_load.py"), *words], stdout=subprocess.PIPE, text=True
        )
        assert load.stdout
        load.stdout.readline()
        with ThreadPoolExecutor(1) as pool:  # it has more to say than a pipe holds
            rest = pool.submit(load.communicate)
            triggers = dict(batches(status, rest))
        output, _ = rest.result()
        if runner.poll() is not None:
            raise SystemExit("the pipeline ended")
    latencies = json.loads(output or "[]")
    if not latencies:
        raise SystemExit("no result came back from the pipeline")
    return Run(latencies, list(triggers.values()))


def batches(status: Path, load: Future[Any]) -> Iterator[tuple[int, float]]:
    """Yields number and duration in ms of the micro-batches until the load ends."""
    while not load.done():
        if (now := seen(status)).get("batch_ms"):
            yield now["batch"], float(now["batch_ms"])
        time.sleep(0.02)


def latency(folder: Path, seconds: float, rounds: int) -> list[Measure]:
    """A window of one second for each device, as ours is set up and as Spark is by itself, in turn."""
    ours, sparks = list[Run](), list[Run]()
    for _ in range(max(1, rounds - 1)):
        ours.append(watched(folder, seconds, {}))
        sparks.append(watched(folder, seconds, SPARKS_OWN))
    p50, p99 = median(run.percentile(0.5) for run in ours), median(run.percentile(0.99) for run in ours)
    trigger = median(median(run.triggers_ms) for run in ours)
    default = median(run.percentile(0.5) for run in sparks)
    both = f"p50 {p50:.0f} ms, micro-batch {trigger:.0f} ms"
    return [
        Measure("publish to result: p50 / micro-batch", p50 / trigger, 2, most=True, detail=both),
        Measure(
            "p50: ours / Spark's own settings", p50 / default, 0.5, most=True, detail=f"{p50:.0f}, {default:.0f} ms"
        ),
        Measure(f"p99 at {RATE} messages a second", p99, 1000, most=True, unit="ms"),
    ]


def idle(folder: Path, seconds: float, rounds: int) -> list[Measure]:
    """What a pipeline costs that has nothing to do, all its processes together."""
    with pipeline(folder, None, {}) as (_, runner, _status):
        time.sleep(SETTLE_S)
        before, started = cpu_s(runner.pid), time.monotonic()
        time.sleep(IDLE_S)
        share = (cpu_s(runner.pid) - before) / (time.monotonic() - started)
    return [Measure("CPU of an idle pipeline", share * 100, 5, most=True, unit="% of a core")]
