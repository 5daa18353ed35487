"""SparkSession with settings that fit one machine or a cluster, and work that Ctrl-C ends."""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
import sys
import threading
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from smqrt.errors import PipelineError
from smqrt.pipeline import jvm, jvm_warmup
from smqrt.pipeline.failures import OUT_OF_MEMORY, first_line

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_sessions: list[SparkSession] = []
"""The one that this process has started, if it has."""
HERE = Path(__file__).parent
LOG = ".spark/spark.log"
"""What Spark tells, in the folder of state."""

MEMORY, DEFAULT_MEMORY = "spark.driver.memory", "1g"
_MASTER = re.compile(r"local(\[(\*|[1-9]\d*)( *, *\d+)?\])?|local-cluster\[.+\]|(spark|k8s|sc)://.+|yarn")
_SPARKS_OWN = ("pyspark", "py4j")
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_STATE = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_FILES = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"

EVERYWHERE = {
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.structuredLogging.enabled": "false",
    "spark.sql.streaming.stateStore.providerClass": _STATE,
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    "spark.sql.streaming.metricsEnabled": "false",
    "spark.sql.python.filterPushdown.enabled": "true",
    # The last value of a key that is there twice, as everywhere else, instead of no VARIANT at all.
    "spark.sql.variant.allowDuplicateKeys": "true",
    # With Arrow a function's result of another type than declared is converted or fails instead of being NULL.
    "spark.sql.execution.pythonUDF.arrow.enabled": "false",
}
LOCAL = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.adaptive.enabled": "false",
    # Spark's default forks a process for every file of a checkpoint: 80 ms a micro-batch.
    "spark.sql.streaming.checkpointFileManagerClass": _FILES,
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
}
"""Only where one machine does it all: on HDFS and object stores Spark's own way is the safe one."""


def start_spark(master: str, app_name: str, state: Path, extra: Mapping[str, str] | None = None) -> SparkSession:
    """Start Spark.

    Args:
        master: "local[*]" or a cluster's, such as "spark://host:7077"; empty takes what spark-submit has given.
        app_name: as the cluster shows it.
        state: folder of the state of pipelines; what Spark spills goes there too.
        extra: settings that win over these.

    Returns:
        The session; `stop()` ends Spark.

    Raises:
        PipelineError: pyspark or Java is missing or doesn't start, or it would be one of Spark Connect.
    """
    _check_pyspark()
    _check_is_own(master)
    found = jvm.find_java()
    jvm.use_java(found)
    named = {"spark.app.name": app_name} | ({"spark.master": master} if master else {})
    _environment(is_local(master))
    _quiet()
    try:
        session = _started(named | _settings(master, state, found, dict(extra or {})))
    except Exception as error:
        raise PipelineError(f"Spark doesn't start: {first_line(error)} smqrt pipeline doctor looks for why.") from error
    if not is_local(master):
        from smqrt.pipeline.smq_source import register

        register(session)
        session.sparkContext.environment["PYTHONPATH"] = os.pathsep.join(_archives())
    return session


def _archives() -> list[str]:
    """Return what --py-files has brought to the driver: the helper that looks there at the processor of a @stateful or
    @alert gets none of it from Spark.
    """
    return [path for path in sys.path if zipfile.is_zipfile(path) and not Path(path).name.startswith(_SPARKS_OWN)]


def _started(settings: Mapping[str, str]) -> SparkSession:
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

    conf = SparkConf().setAll(list(settings.items()))
    jvm.start(conf)  # as the session itself would do, after which its work begins
    jvm.handle_signals()
    session = SparkSession.builder.config(conf=conf).getOrCreate()
    _sessions[:] = [session]
    return session


def cancel_jobs() -> None:
    """Cancel what the session computes that this process has started, from any thread; pyspark knows the active one of
    a thread only. Does nothing when there is none, or it has ended meanwhile.
    """
    with suppress(Exception):
        for session in _sessions:
            session.sparkContext.cancelAllJobs()


def _quiet() -> None:
    """pyspark prints whole stacks of errors, of which the runner tells what there is to know in one sentence."""
    from pyspark.logger import PySparkLogger

    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(_is_not_of_py4j)  # which tells the root logger of a JVM that is gone
    for name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    return record.module not in ("clientserver", "java_gateway")


def is_local(master: str) -> bool:
    """Return whether everything runs in this process and its helpers."""
    return master.startswith("local") and not master.startswith("local-cluster")


def _settings(master: str, state: Path, found: jvm.Java, extra: Mapping[str, str]) -> dict[str, str]:
    if not is_local(master):
        return EVERYWHERE | dict(extra)
    scratch = state.absolute() / ".spark"
    scratch.mkdir(parents=True, exist_ok=True)
    options = _java_options(scratch, found)
    own = {
        "spark.local.dir": str(scratch),
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        # Otherwise 1 GiB, which is all the memory that a driver has by default.
        "spark.driver.maxResultSize": str(memory_bytes(extra.get(MEMORY, DEFAULT_MEMORY)) // 8),
    }
    given = dict(extra)
    given[_JAVA_OPTIONS] = " ".join([*options, *filter(None, [extra.get(_JAVA_OPTIONS)])])
    return EVERYWHERE | LOCAL | own | given


def driver_bytes(spark: SparkSession) -> int:
    """Return how much memory Spark's driver has."""
    return memory_bytes(spark.sparkContext.getConf().get(MEMORY) or DEFAULT_MEMORY)


def check_master(master: str) -> None:
    """Raise PipelineError for what Spark would end on with a stack of Java's."""
    if master and not _MASTER.fullmatch(master):
        raise PipelineError(
            f"--master {master!r} is none of Spark's: write local[*] for all cores, local[2] for two; clusters are "
            "spark://HOST:PORT, k8s://https://HOST:PORT or yarn."
        )


def memory_bytes(text: str, name: str = "") -> int:
    """Return the bytes of a size as Spark writes it: "512m", "4g", "4gb", bytes without a letter.

    Args:
        text: the size.
        name: what the error begins with, such as "--driver-memory ".

    Raises:
        PipelineError: it is none.
    """
    found = re.fullmatch(r"([0-9]{1,15})([kmgtp]?)b?", text.strip().lower())
    if not found:
        raise PipelineError(f"{name}{text!r} is no size of memory; write it as Spark does, such as 512m or 4g.")
    return int(found[1]) << 10 * " kmgtp".index(found[2] or " ")


def _java_options(scratch: Path, found: jvm.Java) -> list[str]:
    log = [f"-Dlog4j2.configurationFile={HERE / 'log4j2.properties'}", f"-Dsmqrt.log={scratch.parent / LOG}"]
    # Without memory a thread of Spark ends alone, and the others wait for it for ever: better all of it ends.
    mark = scratch / OUT_OF_MEMORY
    mark.unlink(missing_ok=True)
    dying = [f'"-XX:OnOutOfMemoryError=touch {shlex.quote(str(mark))}"', "-XX:+ExitOnOutOfMemoryError"]
    return [*log, "-Duser.timezone=UTC", *dying, *jvm_warmup.archive_options(found)]


def _environment(local: bool) -> None:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if not local:
        return
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # pyspark.zip, which Spark puts first, holds no compiled files: each helper would compile them again.
    paths = [str(HERE / "helper"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


def _check_pyspark() -> None:
    try:
        import pyspark
    except ImportError:
        raise PipelineError("pyspark isn't installed: pip install 'smqrt[spark]' brings it.") from None
    version = tuple(int(part) for part in pyspark.__version__.split(".")[:2])
    if not (4, 2) <= version < (5, 0):
        raise PipelineError(f"pyspark {pyspark.__version__} doesn't fit: 4.2 or newer, below 5, is needed; {_INSTALL}.")


def _check_is_own(master: str) -> None:
    remote = master if master.startswith("sc://") else os.environ.get("SPARK_REMOTE")
    if remote:
        raise PipelineError(
            f"{remote} is a server of Spark Connect, and pipelines run in a Spark of their own: name another --master, "
            'and unset SPARK_REMOTE. Programs for Spark Connect use format("smq").'
        )


_INSTALL = "pip install 'smqrt[spark]' brings it"


# ---- work that Ctrl-C ends: its jobs are cancelled, and what it has opened is closed

_Result = TypeVar("_Result")
_CANCEL_EVERY_S = 0.1


def interruptible(work: Callable[[threading.Event], _Result], cancel: Callable[[], object] = cancel_jobs) -> _Result:
    """Run work until it is done or KeyboardInterrupt comes, after which a second one ends the process at once.

    Args:
        work: is called with an event that is set when it is to end, in a thread of its own: in the main thread pyspark
            would put its own handler of SIGINT in the place of ours.
        cancel: ends what it waits for, again and again until it is done; without it Spark's jobs are cancelled.

    Returns:
        What `work` returns.

    Raises:
        KeyboardInterrupt: it came, and `work` has ended.
    """
    stopping = threading.Event()
    with ThreadPoolExecutor(1, "spark") as thread:
        running = thread.submit(work, stopping)
        try:
            while not running.done():
                wait([running], _CANCEL_EVERY_S)  # a signal that comes just before a wait doesn't end it
            return running.result()
        except KeyboardInterrupt:
            stopping.set()
            _cancel_until_done(running, cancel)
            raise


def _cancel_until_done(running: Future[Any], cancel: Callable[[], object]) -> None:
    try:
        while not running.done():
            cancel()  # again and again: when one has been cancelled the next may begin
            wait([running], _CANCEL_EVERY_S)
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)
