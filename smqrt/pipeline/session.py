"""SparkSession for one machine or a cluster, and interruptible work."""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from smqrt.errors import PipelineError
from smqrt.pipeline import jvm
from smqrt.pipeline.failures import OUT_OF_MEMORY, first_line

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_sessions: list[SparkSession] = []
"""The session that this process has started, if any."""
HERE = Path(__file__).parent
LOG = ".spark/spark.log"
"""Spark's log, in the folder of state."""

MEMORY, DEFAULT_MEMORY = "spark.driver.memory", "1g"
_MASTER = re.compile(r"local(\[(\*|[1-9]\d*)( *, *\d+)?\])?|local-cluster\[.+\]|(spark|k8s|sc)://.+|yarn")
_PYSPARK_ARCHIVES = ("pyspark", "py4j")
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_STATE = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_FILES = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"

COMMON_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.structuredLogging.enabled": "false",
    "spark.sql.streaming.stateStore.providerClass": _STATE,
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    "spark.sql.streaming.metricsEnabled": "false",
    # Otherwise each function of a column makes about eight calls of the JVM, to record the line that calls it. The
    # errors of this package name the line from Python's traceback.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    "spark.sql.python.filterPushdown.enabled": "true",
    # With a repeated key the last value is used, as in other JSON parsers. By default such JSON has no VARIANT value.
    "spark.sql.variant.allowDuplicateKeys": "true",
    # With Arrow, a result of another type than declared would be converted or fail, instead of becoming NULL.
    "spark.sql.execution.pythonUDF.arrow.enabled": "false",
}
LOCAL_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.adaptive.enabled": "false",
    # Spark's default starts a process for every file of a checkpoint: 80 ms a micro-batch.
    "spark.sql.streaming.checkpointFileManagerClass": _FILES,
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
}
"""For one machine only: on HDFS and object stores only Spark's default checkpoint files are safe."""


def start_spark(master: str, app_name: str, state: Path, extra: Mapping[str, str] | None = None) -> SparkSession:
    """Start Spark.

    Args:
        master: "local[*]", or that of a cluster, such as "spark://host:7077"; empty uses that of spark-submit.
        app_name: the name that the cluster shows.
        state: folder of the state of pipelines, also for Spark's temporary files.
        extra: settings that override these.

    Returns:
        The session; `stop()` ends Spark.

    Raises:
        PipelineError: pyspark or Java is missing or doesn't start, or Spark Connect is configured.
    """
    _check_pyspark()
    remote = master if master.startswith("sc://") else os.environ.get("SPARK_REMOTE")
    if remote:
        raise PipelineError(
            f"{remote} is a Spark Connect server, which can't run pipelines: use another --master, "
            'and unset SPARK_REMOTE. Programs for Spark Connect use format("smq").'
        )
    found = jvm.find_java()
    jvm.use_java(found)
    settings = {"spark.app.name": app_name} | ({"spark.master": master} if master else {})
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if is_local(master):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        # pyspark.zip, which Spark puts first, has no compiled files: each Python worker would compile them again.
        paths = [str(HERE / "helper"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    _silence_pyspark()
    try:
        from pyspark import SparkConf
        from pyspark.sql import SparkSession

        # `extra` comes last, so that it overrides the other settings.
        conf = SparkConf().setAll(list((settings | _settings(master, state, found, dict(extra or {}))).items()))
        jvm.start(conf)  # before the session, which uses the JVM immediately
        jvm.handle_signals()
        session = SparkSession.builder.config(conf=conf).getOrCreate()
        _sessions[:] = [session]
    except Exception as error:
        raise PipelineError(
            f"Spark doesn't start: {first_line(error)} Run smqrt pipeline doctor to find the cause."
        ) from error
    if not is_local(master):
        from smqrt.pipeline.smq_source import register

        register(session)
        # The archives of --py-files: Spark does not pass them to the Python worker that inspects the processor of a
        # @stateful or @alert on the driver.
        archives = [path for path in sys.path if zipfile.is_zipfile(path)]
        archives = [path for path in archives if not Path(path).name.startswith(_PYSPARK_ARCHIVES)]
        session.sparkContext.environment["PYTHONPATH"] = os.pathsep.join(archives)
    return session


@contextmanager
def setting(spark: SparkSession, name: str, value: str | bool) -> Iterator[None]:
    """Change a setting of Spark in the `with` block.

    Args:
        spark: the session.
        name: the name of the setting, which has a default.
        value: its value in the block.
    """
    before = spark.conf.get(name)
    spark.conf.set(name, value)
    try:
        yield
    finally:
        spark.conf.set(name, str(before))


def cancel_jobs() -> None:
    """Cancel the jobs of the session that this process has started, from any thread; do nothing without a session."""
    # pyspark's own `SparkSession.active` returns only the session of the current thread.
    with suppress(Exception):
        for session in _sessions:
            session.sparkContext.cancelAllJobs()


def _silence_pyspark() -> None:
    """Disable pyspark's logs, which contain whole stacks; the runner reports an error in one sentence."""
    from pyspark.logger import PySparkLogger

    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    # py4j logs the end of a JVM with the root logger.
    logging.getLogger().addFilter(_is_not_of_py4j)
    for name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    return record.module not in ("clientserver", "java_gateway")


def is_local(master: str) -> bool:
    """Return whether Spark runs in this process and its child processes only."""
    return master.startswith("local") and not master.startswith("local-cluster")


def _settings(master: str, state: Path, found: jvm.Java, extra: Mapping[str, str]) -> dict[str, str]:
    if not is_local(master):
        return COMMON_SETTINGS | dict(extra)
    scratch = state.absolute() / ".spark"
    scratch.mkdir(parents=True, exist_ok=True)
    log = [f"-Dlog4j2.configurationFile={HERE / 'log4j2.properties'}", f"-Dsmqrt.log={scratch.parent / LOG}"]
    # Without these options only one thread of Spark ends when memory runs out, and others wait for it without end.
    marker = scratch / OUT_OF_MEMORY
    marker.unlink(missing_ok=True)
    memory = [f'"-XX:OnOutOfMemoryError=touch {shlex.quote(str(marker))}"', "-XX:+ExitOnOutOfMemoryError"]
    options = [*log, "-Duser.timezone=UTC", *memory, *jvm.archive_options(found)]
    own = {
        "spark.local.dir": str(scratch),
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        # The default is 1 GiB, the whole memory of a driver by default.
        "spark.driver.maxResultSize": str(memory_bytes(extra.get(MEMORY, DEFAULT_MEMORY)) // 8),
    }
    given = dict(extra)
    given[_JAVA_OPTIONS] = " ".join([*options, *filter(None, [extra.get(_JAVA_OPTIONS)])])
    return COMMON_SETTINGS | LOCAL_SETTINGS | own | given


def driver_bytes(spark: SparkSession) -> int:
    """Return the memory of Spark's driver in bytes."""
    # One call of the JVM; `sparkContext.getConf()` makes some for each of Spark's settings.
    return memory_bytes(str(spark.conf.get(MEMORY, DEFAULT_MEMORY)))


def check_master(master: str) -> None:
    """Raise PipelineError for a master that Spark would reject with a Java stack."""
    if master and not _MASTER.fullmatch(master):
        raise PipelineError(
            f"--master {master!r} is not a Spark master: write local[*] for all cores, local[2] for two; clusters are "
            "spark://HOST:PORT, k8s://https://HOST:PORT or yarn."
        )


def memory_bytes(text: str, name: str = "") -> int:
    """Return the bytes of a size in Spark's syntax: "512m", "4g", "4gb", or bytes without a letter.

    Args:
        text: the size.
        name: prefix of the error message, such as "--driver-memory ".

    Raises:
        PipelineError: it is not a size.
    """
    found = re.fullmatch(r"([0-9]{1,15})([kmgtp]?)b?", text.strip().lower())
    if not found:
        raise PipelineError(f"{name}{text!r} is not a size of memory; use Spark's syntax, such as 512m or 4g.")
    return int(found[1]) << 10 * " kmgtp".index(found[2] or " ")


def _check_pyspark() -> None:
    try:
        import pyspark
    except ImportError:
        raise PipelineError("pyspark isn't installed: pip install 'smqrt[spark]' installs it.") from None
    version = tuple(int(part) for part in pyspark.__version__.split(".")[:2])
    if not (4, 2) <= version < (5, 0):
        raise PipelineError(
            f"pyspark {pyspark.__version__} is not supported: 4.2 or newer, below 5, is needed; "
            "pip install 'smqrt[spark]' installs it."
        )


# ---- Interruptible work: Ctrl-C cancels its jobs

_Result = TypeVar("_Result")
_CANCEL_INTERVAL_S = 0.1


def interruptible(work: Callable[[threading.Event], _Result], cancel: Callable[[], object] = cancel_jobs) -> _Result:
    """Run work until it is done or KeyboardInterrupt is raised; a second Ctrl-C then ends the process immediately.

    Args:
        work: called in a separate thread, with an event that is set to end it. In the main thread pyspark would replace
            the handler of SIGINT.
        cancel: cancels the work; called repeatedly until it is done. By default it cancels Spark's jobs.

    Returns:
        The result of `work`.

    Raises:
        KeyboardInterrupt: it was interrupted, and `work` has ended.
    """
    stopping = threading.Event()
    with ThreadPoolExecutor(1, "spark") as thread:
        running = thread.submit(work, stopping)
        try:
            while not running.done():
                wait([running], _CANCEL_INTERVAL_S)  # a signal just before a wait doesn't interrupt it
            return running.result()
        except KeyboardInterrupt:
            stopping.set()
            try:
                while not running.done():
                    cancel()  # repeatedly: after a cancelled job the next one may begin
                    wait([running], _CANCEL_INTERVAL_S)
            except KeyboardInterrupt:
                os._exit(128 + signal.SIGINT)  # without waiting for the thread, which may never end
            raise
