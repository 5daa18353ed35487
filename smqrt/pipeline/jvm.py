"""Spark's JVM: Java, private PySpark names, garbage collection and warm-up.

Only this file uses private names of PySpark. They exist in 4.2 and 4.3; check this file when a later version does not
have one of them. With Spark Connect this process has no JVM and no py4j: `jvm_of` raises PipelineError. `format("smq")`
works with Spark Connect, since it does not use this module.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from smqrt.errors import PipelineError
from smqrt.process.current_process import cache_folder

if TYPE_CHECKING:
    from py4j.java_gateway import JVMView  # type: ignore[import-untyped]
    from pyspark import SparkConf
    from pyspark.sql import DataFrame, SparkSession


# ---- Java installation

JAVA_VERSIONS = (17, 21)
"""Major versions that Spark 4 supports."""

INSTALL_JAVA = "apt-get install openjdk-17-jre-headless"
"""The command that installs Java on Debian and Ubuntu."""

_DEBIAN = Path("/usr/lib/jvm")
_KEPT_CLASSES = (
    "functions",
    "PythonUtils",
    "PythonSQLUtils",
    "PythonErrorUtils",
    "org.apache.spark.sql.functions",
    "org.apache.spark.sql.classic.SparkSession",
    "org.apache.spark.sql.internal.SQLConf",
    "org.apache.spark.util.Utils",
)
_VERSION_TIMEOUT_S = 30
_VERSION = re.compile(r'(?:version "|JAVA_VERSION=")(?:1\.)?(\d+)([^"]*)"')


@dataclass(frozen=True)
class Java:
    """An installed Java.

    Attributes:
        command: the path of `bin/java`.
        version: such as "17.0.15".
        major: the first number of the version.
    """

    command: Path
    version: str
    major: int

    @property
    def home(self) -> Path:
        """The folder for JAVA_HOME."""
        return self.command.resolve().parent.parent


def find_java(environment: Mapping[str, str] | None = None, debian: Path = _DEBIAN) -> Java:
    """Find a Java for Spark: in JAVA_HOME, else in PATH, else the newest supported version in Debian's folder.

    Args:
        environment: variables; by default those of the process.
        debian: folder with one folder for each installed Java.

    Raises:
        PipelineError: no Java is found, or JAVA_HOME has another folder or version.
    """
    variables = os.environ if environment is None else environment
    if home := variables.get("JAVA_HOME"):
        command = Path(home) / "bin" / "java"
        if not os.access(command, os.X_OK):
            raise PipelineError(f"JAVA_HOME is {home}, which has no bin/java: unset it, or set it to Java 17 or 21.")
        java = _inspect(command)
        if java is None:
            raise PipelineError(f"JAVA_HOME is {home}, whose bin/java prints no version: set it to Java 17 or 21.")
        if java.major not in JAVA_VERSIONS:
            wrong = f"JAVA_HOME is {home}, which is Java {java.version}, and Spark needs 17 or 21"
            raise PipelineError(f"{wrong}: unset it, or run as root: {INSTALL_JAVA}")
        return java
    commands = [Path(found)] if (found := shutil.which("java", path=variables.get("PATH", ""))) else []
    for major in reversed(JAVA_VERSIONS):
        commands += sorted(debian.glob(f"java-{major}-*/bin/java"))
    others: list[Java] = []
    for command in commands:
        if java := _inspect(command):
            if java.major in JAVA_VERSIONS:
                return java
            others.append(java)
    there = f"; found only Java {others[0].version} ({others[0].command})" if others else ""
    raise PipelineError(f"Java 17 or 21 is needed{there}. Run as root: {INSTALL_JAVA}")


def use_java(java: Java) -> None:
    """Make the Spark that this process starts run on `java`."""
    os.environ["JAVA_HOME"] = str(java.home)


def _inspect(command: Path) -> Java | None:
    text = ""
    with suppress(OSError):
        # Every Java since 9 has this file; reading it is a hundred times faster than starting Java.
        text = (command.resolve().parent.parent / "release").read_text("utf-8", "replace")
    match = _VERSION.search(text)
    if match is None:
        with suppress(OSError, subprocess.TimeoutExpired):
            answer = subprocess.run(
                [command, "-version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=False
            )
            match = _VERSION.search(answer.stderr + answer.stdout)
    return Java(command, match[1] + match[2], int(match[1])) if match else None


# ---- Private names of PySpark


def jvm_of(spark: SparkSession) -> JVMView:
    """Return the JVM of a session, for access to its classes through py4j.

    Raises:
        PipelineError: it is a session of Spark Connect, whose JVM is in another process.
    """
    session = cast(Any, spark)
    if not hasattr(session, "_jvm"):
        raise PipelineError(
            "This needs a Spark in the same process, and this session uses Spark Connect: create a session with "
            'SparkSession.builder.master("local[*]"), without SPARK_REMOTE.'
        )
    return session._jvm


def start(conf: SparkConf | None = None) -> None:
    """Start the JVM without a session, or connect to that of spark-submit.

    `SparkContext` uses a JVM that it starts immediately, and a signal at that time would interrupt it. `SparkConf`
    reads the options of spark-submit from the JVM.
    """
    from pyspark import SparkContext

    SparkContext._ensure_initialized(conf=conf)
    keep_classes()


def keep_classes() -> None:
    """Look up the Java classes that pyspark uses most, and keep them for the lifetime of the JVM.

    py4j asks the JVM for a class at each use. For a name without a package, such as `functions`, the JVM searches its
    300 jars once for each imported package. In tests of failing queries these were 29 % of the samples of a profile.
    """
    from pyspark import SparkContext

    jvm: Any = SparkContext._jvm
    for name in _KEPT_CLASSES:
        setattr(jvm, name, getattr(jvm, name))
    # `py4j.java_gateway.is_instance_of` uses `jvm.py4j.reflection.TypeUtil`, 14 times for each error of Spark.
    package = jvm.py4j
    package.reflection = package.reflection
    package.reflection.TypeUtil = package.reflection.TypeUtil
    jvm.py4j = package


def handle_signals() -> None:
    """Make the JVM ignore signals, which this process handles.

    Service managers send SIGTERM to the JVM too. Terminals send Ctrl-C to the JVM and its Python workers, which inherit
    the ignored signals. A signal would end the JVM in the middle of a micro-batch. The JVM ends with its driver, which
    closes the JVM's stdin. The JVM of spark-submit is the process that other programs see, so it forwards SIGTERM.
    """
    from pyspark import SparkContext

    jvm: Any = SparkContext._jvm  # there is no session yet
    ignore = forward = jvm.sun.misc.SignalHandler.SIG_IGN
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        _enable_callbacks(SparkContext)
        forward = _ForwardToDriver()
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]

    for name, handler in (("INT", ignore), ("TERM", forward), ("HUP", forward)):
        with suppress(Py4JJavaError):  # a Java with -Xrs, or one that was started with an ignored signal
            jvm.sun.misc.Signal.handle(jvm.sun.misc.Signal(name), handler)


def ignore_signals() -> None:
    """Make the JVM of spark-submit ignore signals from now on: this process ends, and nobody can be told of them."""
    from py4j.protocol import Py4JJavaError
    from pyspark import SparkContext

    jvm: Any = SparkContext._jvm
    for name in ("TERM", "HUP"):
        with suppress(Py4JJavaError):
            jvm.sun.misc.Signal.handle(jvm.sun.misc.Signal(name), jvm.sun.misc.SignalHandler.SIG_IGN)


def ended_by(error: BaseException | None) -> int | None:
    """Return the signal that ended the JVM while it started; None without one, or when it is unknown.

    Args:
        error: the exception of the start. Until the JVM responds, only PySpark's frames have its process.
    """
    from pyspark import SparkContext

    process = getattr(cast(Any, SparkContext)._gateway, "proc", None)
    traceback = error.__traceback__ if error else None
    while traceback is not None:
        process = traceback.tb_frame.f_locals.get("proc", process)
        traceback = traceback.tb_next
    code = process.poll() if isinstance(process, subprocess.Popen) else None
    number = -code if code is not None and code < 0 else (code or 0) - 128  # Java and shells return 128 + signal
    return number if number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM) else None


def listen(spark: SparkSession, listener: object) -> Callable[[], None]:
    """Send Spark's events about queries to a listener.

    `spark.streams.addListener` requests every field of an event separately from the JVM, which takes 80 to 450 ms per
    micro-batch of a busy query. A listener that reads the event's JSON needs 1 to 3 ms.

    Args:
        spark: the session.
        listener: an object with the methods of a PythonStreamingQueryListener and a class `Java` for py4j.

    Returns:
        A function that removes the listener.
    """
    java = jvm_of(spark)
    _enable_callbacks(spark.sparkContext)
    streams = cast(Any, spark)._jsparkSession.streams()
    wrapper = java.org.apache.spark.sql.streaming.PythonStreamingQueryListenerWrapper(listener)
    streams.addListener(wrapper)
    return lambda: streams.removeListener(wrapper)


def check_streaming(spark: SparkSession, frame: DataFrame, mode: str) -> None:
    """Run Spark's own check of a stream, which Spark otherwise runs when the stream starts.

    Args:
        spark: the session.
        frame: the stream.
        mode: "append", "update" or "complete".

    Raises:
        AnalysisException: Spark can't run it as a stream.
    """
    java = jvm_of(spark)
    modes = java.org.apache.spark.sql.streaming.OutputMode
    output = {"append": modes.Append, "update": modes.Update, "complete": modes.Complete}[mode]()
    checker = java.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
    checker.checkForStreaming(analyzed_plan(frame), output)


def is_of_gateway(error: Exception) -> bool:
    """Return whether py4j raised an error, for example because a Java object has no such method."""
    from py4j.protocol import Py4JError

    return isinstance(error, Py4JError)


def analyzed_plan(frame: DataFrame) -> Any:
    """Return Spark's analyzed plan of a frame, a Scala object."""
    return cast(Any, frame)._jdf.queryExecution().analyzed()


def glob(spark: SparkSession, pattern: str) -> list[str]:
    """Return the matching paths in a file system of Hadoop; empty when a folder is missing.

    Spark's readers skip names that begin with an underscore, such as those of the logs of tables.
    """
    path = jvm_of(spark).org.apache.hadoop.fs.Path(pattern)
    found = path.getFileSystem(cast(Any, spark)._jsc.hadoopConfiguration()).globStatus(path)
    return [status.getPath().toString() for status in found or ()]


def cancel_group(spark: SparkSession, group: str) -> None:
    """Cancel the current and later jobs of a group; `SparkContext.cancelJobGroup` cancels only current jobs."""
    cast(Any, spark.sparkContext)._jsc.sc().cancelJobGroupAndFutureJobs(group)


def _enable_callbacks(context: Any) -> None:
    """Start the server through which the JVM calls Python objects."""
    from pyspark.java_gateway import ensure_callback_server_started

    ensure_callback_server_started(context._gateway)  # type: ignore[no-untyped-call]


class _ForwardToDriver:
    """Signal handler for the JVM of spark-submit."""

    def handle(self, number: Any) -> None:
        """Send SIGTERM to this process; called by Java."""
        os.kill(os.getpid(), signal.SIGTERM)

    class Java:
        implements: ClassVar = ["sun.misc.SignalHandler"]


# ---- Garbage collection
#
# A JVM without free memory does not respond, but HotSpot's counters in a file can be read.
# The file is that of `jstat`: a header, then entries, each with a name and the position of its value (`perfMemory.hpp`
# of OpenJDK, version 2.0). A JVM without such a file (-XX:-UsePerfData, or not HotSpot) can't be measured.

COUNTER_FOLDERS = "/tmp"
"""The folder of HotSpot's files hsperfdata_USER/PID on Linux, which does not depend on TMPDIR."""
WINDOW_S = 30.0
_HEAD = struct.Struct("<IBBBBiiqii")
_ENTRY = struct.Struct("<iiibbbbi")
_MAGIC = 0xC0C0FECA  # 0xcafec0c0 in big-endian order on all machines
_LONG = ord("J")
_TIME = re.compile(r"sun\.gc\.collector\.\d+\.time")
_FREQUENCY = "sun.os.hrt.frequency"


class GarbageTime:
    """Measures the garbage collection of a JVM.

    Args:
        path: the file of its counters.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: deque[tuple[float, float]] = deque()

    def share(self, now_s: float | None = None) -> float | None:
        """Return the share of the last `WINDOW_S` seconds that garbage collection took, from 0 to 1.

        Call this about once a second.

        Args:
            now_s: time of a monotonic clock; by default the current time.

        Returns:
            The share; None when the JVM can't be measured, or less than half of that time was measured.
        """
        now_s = time.monotonic() if now_s is None else now_s
        try:
            self._seen.append((now_s, collecting_s(self._path)))
        except (OSError, ValueError, struct.error):
            return None
        while now_s - self._seen[0][0] > WINDOW_S:
            self._seen.popleft()
        (first_s, before_s), (_, after_s) = self._seen[0], self._seen[-1]
        watched_s = now_s - first_s
        return min(1.0, (after_s - before_s) / watched_s) if watched_s >= WINDOW_S / 2 else None


def find_garbage_time() -> GarbageTime | None:
    """Return the meter for the JVM, a child of this process or, with spark-submit, its parent; None without a JVM."""
    processes = [os.getppid()]
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended
            processes[:0] = map(int, (thread / "children").read_text().split())
    for process in processes:
        # The first process with counters is a JVM.
        for path in Path(COUNTER_FOLDERS).glob(f"hsperfdata_*/{process}"):
            return GarbageTime(path)
    return None


def collecting_s(path: Path) -> float:
    """Return how many seconds a JVM has spent on garbage collection since its start.

    Raises:
        OSError: the JVM has ended, or has no counters.
        ValueError: the file has another format.
    """
    data = path.read_bytes()
    magic, is_little, _, _, _, _, _, _, at, count = _HEAD.unpack_from(data)
    if magic != _MAGIC or is_little != 1:
        raise ValueError("another format")
    counters: dict[str, int] = {}
    for _ in range(count):
        size, name_at, _, kind, _, _, _, value_at = _ENTRY.unpack_from(data, at)
        if size <= 0:
            raise ValueError("an entry without a size")
        if kind == _LONG:
            name = data[at + name_at : data.index(b"\0", at + name_at)].decode("ascii", "replace")
            counters[name] = struct.unpack_from("<q", data, at + value_at)[0]
        at += size
    ticks = sum(value for name, value in counters.items() if _TIME.fullmatch(name))
    if not counters.get(_FREQUENCY):
        raise ValueError(f"{path} has no counters of HotSpot")
    return ticks / counters[_FREQUENCY]


# ---- Warm-up by a class archive (AppCDS)
#
# The archive is in the cache folder. It is used as long as Java and pyspark are the same as when it was made. A child
# process that uses most features creates it, and prints the duration of a first job as JSON:
#
#     python -m smqrt.pipeline.jvm "JVM OPTIONS" [everything]

_QUIET = "-Xlog:disable"
"""Suppresses the warning of Java about an archive that does not match; Java continues without the archive."""
_TIMEOUT_S = 600
_MIN_ARCHIVE_BYTES = 1 << 20


@dataclass(frozen=True)
class WarmupResult:
    """The archive and the time that it saves.

    Attributes:
        path: the archive; size_bytes: its size.
        before_s, after_s: seconds from the start to the end of a first small job, without and with the archive.
    """

    path: Path
    size_bytes: int
    before_s: float
    after_s: float


def archive(found: Java) -> Path:
    """Return the path of the archive for this Java and the installed pyspark; the archive need not exist.

    Args:
        found: the Java that Spark runs on.

    Raises:
        PipelineError: pyspark isn't installed.
    """
    spec = util.find_spec("pyspark")
    if spec is None or not spec.submodule_search_locations:
        raise PipelineError("pyspark is not installed; run: pip install 'smqrt[spark]'")
    home = Path(os.environ.get("SPARK_HOME") or spec.submodule_search_locations[0])
    # Java compares the files of the class path with those recorded in the archive.
    stats = ((entry.name, entry.stat()) for entry in os.scandir(home / "jars"))
    jars = sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
    # Another Java, another pyspark or other jars give the archive another name, because this one does not fit them.
    key = hashlib.sha256(f"{found.home} {found.version} {home} {jars}".encode()).hexdigest()[:12]
    return cache_folder() / f"spark-{metadata.version('pyspark')}-java-{found.major}-{key}.jsa"


def archive_options(found: Java) -> list[str]:
    """Return the JVM options of a driver that use the archive; empty without a matching archive.

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
    """Create or replace the archive, and measure the time that it saves. This takes about a minute.

    Raises:
        PipelineError: Java or pyspark is missing, the folder can't be written, or Java creates no archive.
    """
    found = find_java()
    path = create_archive(found)
    # The archive was made before, so the files of Spark are in the page cache for both measurements.
    return WarmupResult(path, path.stat().st_size, _train(found, []), _train(found, archive_options(found)))


def create_archive(found: Java) -> Path:
    """Create or replace the archive, without the measurements of `build`, and return its path.

    Args:
        found: the Java that Spark runs on.

    Raises:
        PipelineError: pyspark is missing, the folder can't be written, or Java creates no archive.
    """
    path = archive(found)
    fresh = path.with_suffix(f".{os.getpid()}.new")  # other processes use the existing archive meanwhile
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _train(found, [f"-XX:ArchiveClassesAtExit={fresh}", _QUIET], "everything")
        if not fresh.exists() or fresh.stat().st_size < _MIN_ARCHIVE_BYTES:
            raise PipelineError(
                f"Java created no archive; if its default archive is missing, run: {found.command} -Xshare:dump"
            )
        fresh.rename(path)
    except OSError as error:
        raise PipelineError(f"{path.parent} can't be written: {error.strerror}; set another XDG_CACHE_HOME.") from None
    finally:
        fresh.unlink(missing_ok=True)
    return path


def _train(found: Java, jvm: list[str], *words: str) -> float:
    """Run Spark in a child process; return the seconds until its first job was done."""
    command = [sys.executable, "-m", "smqrt.pipeline.jvm", " ".join(jvm), *words]
    environment = os.environ | {"JAVA_HOME": str(found.home)}
    # In a new session, whose processes are all killed: Java runs longer than its parent, while it writes the archive.
    child = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = child.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise PipelineError(f"Spark did not finish within {_TIMEOUT_S} s; try again with less load.") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if child.returncode or not output:
        reason = (errors.strip().splitlines() or ["no reason given"])[-1]
        raise PipelineError(f"Spark did not start ({reason}); run: smqrt pipeline doctor")
    return float(json.loads(output.splitlines()[-1])["seconds"])


# ---- Child process of the warm-up

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
    """Start Spark and run one job, or most features. Java writes the archive after this process has ended.

    Args:
        jvm: options for Java.
        everything: whether to use most features of pipelines.
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
            rows = session.range(100).selectExpr("id", "cast(id as string) as text", "current_date() as day")
            rows.write.partitionBy("day").parquet(f"{folder}/parquet")
            session.read.parquet(f"{folder}/parquet").createOrReplaceTempView("numbers")
            session.sql("select day, avg(id), max(text) from numbers where id > 3 group by day").toArrow()
            stream: Any = session.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
            parsed = stream.withWatermark("timestamp", "1 second").selectExpr(
                "timestamp", "from_json(concat('{\"n\": ', value, '}'), 'n int').n as n"
            )
            windows = parsed.selectExpr("window(timestamp, '1 second') as window", "n").groupBy("window").count()
            writer = windows.writeStream.outputMode("update").foreachBatch(lambda batch, _: batch.toArrow())
            writer = writer.option("checkpointLocation", f"{folder}/checkpoint")
            query = writer.trigger(processingTime="100 milliseconds").start()
            query.awaitTermination(_STREAM_S)
            query.stop()
        session.stop()
    print(json.dumps({"seconds": round(seconds, 2)}))


if __name__ == "__main__":
    main(sys.argv[1], "everything" in sys.argv[2:])
