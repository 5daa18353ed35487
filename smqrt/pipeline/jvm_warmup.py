"""Warm-up of Spark's JVM: an archive of its classes (AppCDS), which Java maps instead of loading 15,000 of them anew.

The archive lies in the cache folder and is taken by itself as long as Java and pyspark are those it was made with.
A child process that uses a little of everything makes it, and prints the seconds of a first job as JSON:

    python -m smqrt.pipeline.jvm_warmup "JVM OPTIONS" [everything]
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

from smqrt.errors import PipelineError
from smqrt.pipeline import jvm
from smqrt.process.environment import cache_folder

_QUIET = "-Xlog:disable"
"""Java says nothing when an archive doesn't fit; it goes on without."""
_CHILD_S = 600
_SMALLEST_BYTES = 1 << 20


@dataclass(frozen=True)
class WarmupResult:
    """What was won.

    Attributes:
        path: the archive; size_bytes: its size.
        before_s, after_s: from nothing to the end of a first small job, without and with it, in seconds.
    """

    path: Path
    size_bytes: int
    before_s: float
    after_s: float


def archive(found: jvm.Java) -> Path:
    """Where the archive for this Java and the installed pyspark lies, whether it was made or not.

    Args:
        found: the Java that Spark runs on.

    Raises:
        PipelineError: pyspark isn't installed.
    """
    key = hashlib.sha256(f"{found.home} {found.version} {_jars()}".encode()).hexdigest()[:12]
    return cache_folder() / f"spark-{metadata.version('pyspark')}-java-{found.major}-{key}.jsa"


def archive_options(found: jvm.Java) -> list[str]:
    """Options for the JVM of a driver: those that name the archive when there is a fitting one, else none.

    Args:
        found: the Java that Spark runs on.
    """
    try:
        path = archive(found)
        usable = path.stat().st_size >= _SMALLEST_BYTES and not any(map(str.isspace, str(path)))
    except (OSError, PipelineError):
        return []
    return [f"-XX:SharedArchiveFile={path}", "-Xshare:auto", _QUIET] if usable else []


def build() -> WarmupResult:
    """Make the archive, in place of an older one, and measures what it brings. Takes about a minute.

    Raises:
        PipelineError: Java or pyspark is missing, the folder can't be written, or Java makes no archive.
    """
    found = jvm.find_java()
    path = archive(found)
    size_bytes = _make(found, path)  # first, so that the files of Spark are in memory for both measurements
    return WarmupResult(path, size_bytes, _train(found, []), _train(found, archive_options(found)))


def _make(found: jvm.Java, path: Path) -> int:
    fresh = path.with_suffix(f".{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _train(found, [f"-XX:ArchiveClassesAtExit={fresh}", _QUIET], "everything")
        if not fresh.exists() or fresh.stat().st_size < _SMALLEST_BYTES:
            raise PipelineError(
                f"Java made no archive; perhaps its own is missing, then type: {found.command} -Xshare:dump"
            )
        fresh.rename(path)
    except OSError as error:
        raise PipelineError(f"{path.parent} can't be written: {error.strerror}; name another XDG_CACHE_HOME.") from None
    finally:
        fresh.unlink(missing_ok=True)
    return path.stat().st_size


def _train(found: jvm.Java, jvm: list[str], *words: str) -> float:
    """Run Spark in a process of its own; returns how long it took until a first job was done, in seconds."""
    command = [sys.executable, "-m", "smqrt.pipeline.jvm_warmup", " ".join(jvm), *words]
    environment = os.environ | {"JAVA_HOME": str(found.home)}
    # A session of its own, for Java outlives the process that started it when it is busy with the archive.
    child = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = child.communicate(timeout=_CHILD_S)
    except subprocess.TimeoutExpired:
        raise PipelineError(f"Spark did not finish within {_CHILD_S} s; try again when less runs here.") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if child.returncode or not output:
        reason = (errors.strip().splitlines() or ["no reason given"])[-1]
        raise PipelineError(f"Spark did not start ({reason}); look with: smqrt pipeline doctor")
    return float(json.loads(output.splitlines()[-1])["seconds"])


def _jars() -> str:
    """What Java compares with the archive: the files of its class path. Nothing is imported for it."""
    spec = util.find_spec("pyspark")
    if spec is None or not spec.submodule_search_locations:
        raise PipelineError("pyspark is not installed; type: pip install 'smqrt[spark]'")
    home = Path(os.environ.get("SPARK_HOME") or spec.submodule_search_locations[0])
    files = sorted((entry.name, *_stamp(entry)) for entry in os.scandir(home / "jars"))
    return f"{home} {files}"


def _stamp(entry: os.DirEntry[str]) -> tuple[int, int]:
    found = entry.stat()
    return found.st_size, found.st_mtime_ns


# ---- the child process

_STREAM_S = 4.0
_CONF = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}


def main(jvm: str, everything: bool) -> None:
    """Start Spark and does one job or everything. Java writes the archive after this process has ended.

    Args:
        jvm: options for Java.
        everything: whether to run what pipelines run, too.
    """
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        session = _spark(jvm, folder)
        session.range(10).groupBy("id").count().collect()
        seconds = time.perf_counter() - began
        if everything:
            _use_files(session, folder)
            _use_stream(session, folder)
        session.stop()
    print(json.dumps({"seconds": round(seconds, 2)}))


def _spark(jvm: str, folder: str) -> Any:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").appName("smqrt warm").config("spark.local.dir", folder)
    for name, value in _CONF.items():
        builder = builder.config(name, value)
    session = builder.config("spark.driver.extraJavaOptions", jvm).getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    return session


def _use_files(session: Any, folder: str) -> None:
    rows = session.range(100).selectExpr("id", "cast(id as string) as text", "current_date() as day")
    rows.write.partitionBy("day").parquet(f"{folder}/parquet")
    session.read.parquet(f"{folder}/parquet").createOrReplaceTempView("numbers")
    session.sql("select day, avg(id), max(text) from numbers where id > 3 group by day").toArrow()


def _use_stream(session: Any, folder: str) -> None:
    rows = session.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
    parsed = rows.withWatermark("timestamp", "1 second").selectExpr(
        "timestamp", "from_json(concat('{\"n\": ', value, '}'), 'n int').n as n"
    )
    windows = parsed.selectExpr("window(timestamp, '1 second') as window", "n").groupBy("window").count()
    writer = windows.writeStream.outputMode("update").foreachBatch(lambda batch, _: batch.toArrow())
    query = (
        writer.option("checkpointLocation", f"{folder}/checkpoint").trigger(processingTime="100 milliseconds").start()
    )
    query.awaitTermination(_STREAM_S)
    query.stop()


if __name__ == "__main__":
    main(sys.argv[1], "everything" in sys.argv[2:])
