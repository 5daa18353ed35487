"""Spark's JVM: the Java it runs on, what PySpark has no public name for, and the time that it spends on garbage.

Every private name of PySpark is used here. They are those of 4.2 and 4.3; when a later one lacks one of them, this is
the file to look at. Under Spark Connect there is no JVM in this process, and no py4j: `jvm_of` says so in one sentence.
`format("smq")` works there, as it needs nothing of this.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import struct
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from smqrt.errors import PipelineError

if TYPE_CHECKING:
    from py4j.java_gateway import JVMView  # type: ignore[import-untyped]
    from pyspark import SparkConf
    from pyspark.sql import DataFrame, SparkSession


# ---- Java: found where Spark looks for it, else where Debian puts it

JAVA_VERSIONS = (17, 21)
"""Major versions that Spark 4 is made for."""

INSTALL_JAVA = "apt-get install openjdk-17-jre-headless"
"""What brings one on Debian and Ubuntu."""

_DEBIAN = Path("/usr/lib/jvm")
_VERSION_S = 30
_VERSION = re.compile(r'(?:version "|JAVA_VERSION=")(?:1\.)?(\d+)([^"]*)"')


@dataclass(frozen=True)
class Java:
    """A Java that was found.

    Attributes:
        command: its `bin/java`.
        version: as it says of itself, such as "17.0.15".
        major: the first number of it.
    """

    command: Path
    version: str
    major: int

    @property
    def home(self) -> Path:
        """The folder that JAVA_HOME names."""
        return self.command.resolve().parent.parent


def find_java(environment: Mapping[str, str] | None = None, debian: Path = _DEBIAN) -> Java:
    """Find a Java that Spark runs on: JAVA_HOME, else the one on the path, else the newest supported one of Debian's.

    Args:
        environment: variables to look at; those of the process when not given.
        debian: folder with one folder for each Java installed.

    Raises:
        PipelineError: there is none, or JAVA_HOME names something else.
    """
    variables = os.environ if environment is None else environment
    if home := variables.get("JAVA_HOME"):
        return _of_home(Path(home))
    found = [java for command in _candidates(variables, debian) if (java := _inspected(command))]
    for java in found:
        if java.major in JAVA_VERSIONS:
            return java
    there = f"; found only Java {found[0].version} ({found[0].command})" if found else ""
    raise PipelineError(f"Java 17 or 21 is needed{there}. As root, type: {INSTALL_JAVA}")


def use_java(java: Java) -> None:
    """Let the Spark that this process starts run on `java`."""
    os.environ["JAVA_HOME"] = str(java.home)


def _of_home(home: Path) -> Java:
    command = home / "bin" / "java"
    if not os.access(command, os.X_OK):
        raise PipelineError(f"JAVA_HOME is {home}, where there is no bin/java: unset it, or name Java 17 or 21.")
    java = _inspected(command)
    if java is None:
        raise PipelineError(f"JAVA_HOME is {home}, whose bin/java doesn't tell its version: name Java 17 or 21.")
    if java.major not in JAVA_VERSIONS:
        wrong = f"JAVA_HOME is {home}, which is Java {java.version}, and Spark needs 17 or 21"
        raise PipelineError(f"{wrong}: unset it, or type as root: {INSTALL_JAVA}")
    return java


def _candidates(variables: Mapping[str, str], debian: Path) -> Iterator[Path]:
    if command := shutil.which("java", path=variables.get("PATH", "")):
        yield Path(command)
    for major in reversed(JAVA_VERSIONS):
        yield from sorted(debian.glob(f"java-{major}-*/bin/java"))


def _inspected(command: Path) -> Java | None:
    match = _VERSION.search(_release(command)) or _VERSION.search(_spoken(command))
    return Java(command, match[1] + match[2], int(match[1])) if match else None


def _release(command: Path) -> str:
    """What lies beside every Java since 9; reading it is a hundred times faster than starting it."""
    try:
        return (command.resolve().parent.parent / "release").read_text("utf-8", "replace")
    except OSError:
        return ""


def _spoken(command: Path) -> str:
    try:
        answer = subprocess.run([command, "-version"], capture_output=True, text=True, timeout=_VERSION_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stderr + answer.stdout


# ---- what PySpark has no public name for


def jvm_of(spark: SparkSession) -> JVMView:
    """Return the JVM of a session, through which py4j reaches its classes.

    Raises:
        PipelineError: it is a session of Spark Connect, whose JVM is elsewhere.
    """
    session = cast(Any, spark)
    if not hasattr(session, "_jvm"):
        raise PipelineError(
            "This needs a Spark in the same process, and this session is one of Spark Connect: make one with "
            'SparkSession.builder.master("local[*]"), without SPARK_REMOTE.'
        )
    return session._jvm


def start(conf: SparkConf | None = None) -> None:
    """Start the JVM without a session, or takes that of spark-submit.

    `SparkContext` itself would begin to work in it at once: a signal that comes then ends it in the middle. And
    `SparkConf` only knows what spark-submit was given when there is a JVM to ask.
    """
    from pyspark import SparkContext

    SparkContext._ensure_initialized(conf=conf)


def handle_signals() -> None:
    """Let the JVM leave signals to this process: service managers send SIGTERM to it too, and terminals Ctrl-C to it
    and its helpers, which inherit what it ignores. It would end in the middle of a micro-batch, and it ends with its
    driver anyway, as its stdin does. That of spark-submit, which is the process that others know, hands SIGTERM on.
    """
    from pyspark import SparkContext

    jvm: Any = SparkContext._jvm  # there is no session yet
    ignore = told = jvm.sun.misc.SignalHandler.SIG_IGN
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        _take_calls(SparkContext)
        told = _ToDriver()
    _handle(jvm, {"INT": ignore, "TERM": told, "HUP": told})  # Java takes no other handler after SIG_IGN


def ended_by(error: BaseException | None) -> int | None:
    """Return the signal that ended the JVM while it started; None when none did, or that isn't known.

    Args:
        error: what starting it raised. Until it answers, only the frames of PySpark have its process.
    """
    from pyspark import SparkContext

    process = getattr(cast(Any, SparkContext)._gateway, "proc", None)
    traceback = error.__traceback__ if error else None
    while traceback is not None:
        process = traceback.tb_frame.f_locals.get("proc", process)
        traceback = traceback.tb_next
    code = process.poll() if isinstance(process, subprocess.Popen) else None
    number = -code if code is not None and code < 0 else (code or 0) - 128  # Java and shells give 128 and the signal
    return number if number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM) else None


def listen(spark: SparkSession, listener: object) -> Callable[[], None]:
    """Let Spark tell a listener about its queries.

    `spark.streams.addListener` asks the JVM for every field of an event by itself: 80 to 450 ms a micro-batch were
    measured beside a busy query, where one that takes the event's JSON needs 1 to 3 ms.

    Args:
        spark: the session.
        listener: has the methods of a PythonStreamingQueryListener, which get Java's events, and says so to py4j.

    Returns:
        A function that ends it.
    """
    java = jvm_of(spark)
    _take_calls(spark.sparkContext)
    streams = cast(Any, spark)._jsparkSession.streams()
    wrapper = java.org.apache.spark.sql.streaming.PythonStreamingQueryListenerWrapper(listener)
    streams.addListener(wrapper)
    return lambda: streams.removeListener(wrapper)


def check_streaming(spark: SparkSession, frame: DataFrame, mode: str) -> None:
    """Make Spark's own check of a stream, which otherwise it makes when the stream starts.

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
    checker.checkForStreaming(analysed_plan(frame), output)


def is_of_gateway(error: Exception) -> bool:
    """Return whether an error says that an object of Java has no such method, or the like."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]

    return isinstance(error, Py4JError)


def analysed_plan(frame: DataFrame) -> Any:
    """Return Spark's analysed plan of a frame, an object of Scala."""
    return cast(Any, frame)._jdf.queryExecution().analyzed()


def glob(spark: SparkSession, pattern: str) -> list[str]:
    """Return what there is in a file system of Hadoop's; nothing where a folder is missing.

    Spark's readers pass over names that begin with an underscore, as those do that say that a table is whole.
    """
    path = jvm_of(spark).org.apache.hadoop.fs.Path(pattern)
    found = path.getFileSystem(cast(Any, spark)._jsc.hadoopConfiguration()).globStatus(path)
    return [status.getPath().toString() for status in found or ()]


def _take_calls(context: Any) -> None:
    """Python objects that are handed to the JVM are called from there."""
    from pyspark.java_gateway import ensure_callback_server_started

    ensure_callback_server_started(context._gateway)  # type: ignore[no-untyped-call]


def _handle(jvm: Any, handlers: Mapping[str, Any]) -> None:
    from py4j.protocol import Py4JJavaError

    for name, handler in handlers.items():
        with suppress(Py4JJavaError):  # a Java that was told to leave signals alone (-Xrs)
            jvm.sun.misc.Signal.handle(jvm.sun.misc.Signal(name), handler)


class _ToDriver:
    """A handler of signals for the JVM of spark-submit."""

    def handle(self, number: Any) -> None:
        """Is called by Java."""
        os.kill(os.getpid(), signal.SIGTERM)

    class Java:
        implements: ClassVar = ["sun.misc.SignalHandler"]


# ---- garbage: a Java that has no memory left answers nobody, but HotSpot's counters in a file can be read.
# The file is that of `jstat`: a head, then entries, each with a name and where its value is (`perfMemory.hpp` of
# OpenJDK, version 2.0). A Java that keeps none (-XX:-UsePerfData, or another than HotSpot) tells nothing.

COUNTER_FOLDERS = "/tmp"
"""Where HotSpot has the files on Linux, whatever TMPDIR says: hsperfdata_USER/PID."""
WINDOW_S = 30.0
_HEAD = struct.Struct("<IBBBBiiqii")
_ENTRY = struct.Struct("<iiibbbbi")
_MAGIC = 0xC0C0FECA  # 0xcafec0c0, big-endian in any case
_LONG = ord("J")
_TIME = re.compile(r"sun\.gc\.collector\.\d+\.time")
_FREQUENCY = "sun.os.hrt.frequency"


class GarbageTime:
    """Watches a Java.

    Args:
        path: of its counters.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: deque[tuple[float, float]] = deque()

    def share(self, now_s: float | None = None) -> float | None:
        """Return which share of the last `WINDOW_S` went into collecting garbage, from 0 to 1; to be called every
        second or so.

        Args:
            now_s: of a clock that is never set; that of this moment if not given.

        Returns:
            None when nothing tells, or it has not been watched for half of that time.
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
    """Return what watches the Java of this process, its child or, under spark-submit, its parent; None without one."""
    for process in (*_children(), os.getppid()):
        for path in Path(COUNTER_FOLDERS).glob(f"hsperfdata_*/{process}"):
            return GarbageTime(path)
    return None


def _children() -> list[int]:
    found: list[int] = []
    for thread in Path("/proc/self/task").iterdir():
        try:
            found += map(int, (thread / "children").read_text().split())
        except OSError:  # it has ended
            continue
    return found


def collecting_s(path: Path) -> float:
    """Return for how many seconds a Java has collected garbage since it began.

    Raises:
        OSError: it has ended, or keeps no counters.
        ValueError: the file is none of these.
    """
    counters = dict(_counters(path.read_bytes()))
    ticks = sum(value for name, value in counters.items() if _TIME.fullmatch(name))
    if not counters.get(_FREQUENCY):
        raise ValueError(f"{path} has no counters of HotSpot")
    return ticks / counters[_FREQUENCY]


def _counters(data: bytes) -> Iterator[tuple[str, int]]:
    magic, is_little, _, _, _, _, _, _, at, count = _HEAD.unpack_from(data)
    if magic != _MAGIC or is_little != 1:
        raise ValueError("another format")
    for _ in range(count):
        size, name_at, _, kind, _, _, _, value_at = _ENTRY.unpack_from(data, at)
        if size <= 0:
            raise ValueError("an entry without an end")
        if kind == _LONG:
            name = data[at + name_at : data.index(b"\0", at + name_at)].decode("ascii", "replace")
            yield name, struct.unpack_from("<q", data, at + value_at)[0]
        at += size
