"""Warm-up of Spark's JVM: a class archive (AppCDS), which Java maps instead of loading 15,000 classes.

The archive is in the cache folder, and is used as long as Java and pyspark are those with which it was made. A child
process that uses most features makes it, and prints the seconds of a first job as JSON:

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
"""Java continues without an archive that does not match; this option suppresses its warning."""
_TIMEOUT_S = 600
_MIN_ARCHIVE_BYTES = 1 << 20


@dataclass(frozen=True)
class WarmupResult:
    """The archive and what it saves.

    Attributes:
        path: the archive; size_bytes: its size.
        before_s, after_s: seconds from the start to the end of a first small job, without and with it.
    """

    path: Path
    size_bytes: int
    before_s: float
    after_s: float


def archive(found: jvm.Java) -> Path:
    """Return the path of the archive for this Java and the installed pyspark, whether it exists or not.

    Args:
        found: the Java that Spark runs on.

    Raises:
        PipelineError: pyspark isn't installed.
    """
    spec = util.find_spec("pyspark")
    if spec is None or not spec.submodule_search_locations:
        raise PipelineError("pyspark is not installed; type: pip install 'smqrt[spark]'")
    home = Path(os.environ.get("SPARK_HOME") or spec.submodule_search_locations[0])
    # The files of the class path, which Java itself compares with the archive.
    stats = ((entry.name, entry.stat()) for entry in os.scandir(home / "jars"))
    jars = sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
    key = hashlib.sha256(f"{found.home} {found.version} {home} {jars}".encode()).hexdigest()[:12]
    return cache_folder() / f"spark-{metadata.version('pyspark')}-java-{found.major}-{key}.jsa"


def archive_options(found: jvm.Java) -> list[str]:
    """Return the JVM options for a driver that name the archive; empty without an archive that matches.

    Args:
        found: the Java that Spark runs on.
    """
    try:
        path = archive(found)
        is_usable = path.stat().st_size >= _MIN_ARCHIVE_BYTES and not any(map(str.isspace, str(path)))
    except (OSError, PipelineError):
        return []
    return [f"-XX:SharedArchiveFile={path}", "-Xshare:auto", _QUIET] if is_usable else []


def build() -> WarmupResult:
    """Make the archive, or replace an older one, and measure what it saves. This takes about a minute.

    Raises:
        PipelineError: Java or pyspark is missing, the folder can't be written, or Java makes no archive.
    """
    found = jvm.find_java()
    path = archive(found)
    fresh = path.with_suffix(f".{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _train(found, [f"-XX:ArchiveClassesAtExit={fresh}", _QUIET], "everything")
        if not fresh.exists() or fresh.stat().st_size < _MIN_ARCHIVE_BYTES:
            raise PipelineError(
                f"Java made no archive; perhaps its own is missing, then type: {found.command} -Xshare:dump"
            )
        fresh.rename(path)
    except OSError as error:
        raise PipelineError(f"{path.parent} can't be written: {error.strerror}; name another XDG_CACHE_HOME.") from None
    finally:
        fresh.unlink(missing_ok=True)
    # Measured after the archive was made, so that the files of Spark are in the page cache for both measurements.
    return WarmupResult(path, path.stat().st_size, _train(found, []), _train(found, archive_options(found)))


def _train(found: jvm.Java, jvm: list[str], *words: str) -> float:
    """Run Spark in a child process; return the seconds until its first job was done."""
    command = [sys.executable, "-m", "smqrt.pipeline.jvm_warmup", " ".join(jvm), *words]
    environment = os.environ | {"JAVA_HOME": str(found.home)}
    # In its own session: Java outlives its parent process while it writes the archive.
    child = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = child.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise PipelineError(f"Spark did not finish within {_TIMEOUT_S} s; try again when less runs here.") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if child.returncode or not output:
        reason = (errors.strip().splitlines() or ["no reason given"])[-1]
        raise PipelineError(f"Spark did not start ({reason}); look with: smqrt pipeline doctor")
    return float(json.loads(output.splitlines()[-1])["seconds"])


# ---- The child process

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
    """Start Spark and run one job or everything. Java writes the archive after this process has ended.

    Args:
        jvm: options for Java.
        everything: whether to use all features that pipelines use.
    """
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        from pyspark.sql import SparkSession

        builder = SparkSession.builder.master("local[2]").appName("smqrt warm").config("spark.local.dir", folder)
        for name, value in _CONF.items():
            builder = builder.config(name, value)
        session = builder.config("spark.driver.extraJavaOptions", jvm).getOrCreate()
        session.sparkContext.setLogLevel("OFF")
        session.range(10).groupBy("id").count().collect()
        seconds = time.perf_counter() - began
        if everything:
            _use_files(session, folder)
            _use_stream(session, folder)
        session.stop()
    print(json.dumps({"seconds": round(seconds, 2)}))


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
