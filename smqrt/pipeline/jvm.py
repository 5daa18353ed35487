"""Spark's JVM, asked for what PySpark has no public name for: every private name of it is used here.

They are those of PySpark 4.2 and 4.3; when a later one lacks one of them, this is the file to look at. Under Spark
Connect there is no JVM in this process, and no py4j: `of` says so in one sentence. `format("smq")` works there, as it
needs nothing of this.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, cast

from smqrt.errors import PipelineError

if TYPE_CHECKING:
    from pyspark import SparkConf
    from pyspark.sql import DataFrame, SparkSession


def of(spark: SparkSession) -> Any:
    """Returns the JVM of a session, through which py4j reaches its classes.

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
    """Starts the JVM without a session, or takes that of spark-submit.

    `SparkContext` itself would begin to work in it at once: a signal that comes then ends it in the middle. And
    `SparkConf` only knows what spark-submit was given when there is a JVM to ask.
    """
    from pyspark import SparkContext

    SparkContext._ensure_initialized(conf=conf)


def handle_signals() -> None:
    """Lets the JVM leave signals to this process: service managers send SIGTERM to it too, and terminals Ctrl-C to it
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


def listen(spark: SparkSession, listener: Any) -> Callable[[], None]:
    """Lets Spark tell a listener about its queries.

    `spark.streams.addListener` asks the JVM for every field of an event by itself: 80 to 450 ms a micro-batch were
    measured beside a busy query, where one that takes the event's JSON needs 1 to 3 ms.

    Args:
        spark: the session.
        listener: has the methods of a PythonStreamingQueryListener, which get Java's events, and says so to py4j.

    Returns:
        A function that ends it.
    """
    java = of(spark)
    _take_calls(spark.sparkContext)
    streams = cast(Any, spark)._jsparkSession.streams()
    wrapper = java.org.apache.spark.sql.streaming.PythonStreamingQueryListenerWrapper(listener)
    streams.addListener(wrapper)
    return lambda: streams.removeListener(wrapper)


def check_streaming(spark: SparkSession, frame: DataFrame, mode: str) -> None:
    """Makes Spark's own check of a stream, which otherwise it makes when the stream starts.

    Args:
        spark: the session.
        frame: the stream.
        mode: "append", "update" or "complete".

    Raises:
        AnalysisException: Spark can't run it as a stream.
    """
    java = of(spark)
    modes = java.org.apache.spark.sql.streaming.OutputMode
    output = {"append": modes.Append, "update": modes.Update, "complete": modes.Complete}[mode]()
    checker = java.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
    checker.checkForStreaming(cast(Any, frame)._jdf.queryExecution().analyzed(), output)


def glob(spark: SparkSession, pattern: str) -> list[str]:
    """Returns what there is in a file system of Hadoop's; nothing where a folder is missing.

    Spark's readers pass over names that begin with an underscore, as those do that say that a table is whole.
    """
    path = of(spark).org.apache.hadoop.fs.Path(pattern)
    found = path.getFileSystem(cast(Any, spark)._jsc.hadoopConfiguration()).globStatus(path)
    return [status.getPath().toString() for status in found or ()]


def _take_calls(context: Any) -> None:
    """Python objects that are handed to the JVM are called from there."""
    from pyspark.java_gateway import ensure_callback_server_started

    ensure_callback_server_started(context._gateway)  # type: ignore[no-untyped-call]


def _handle(jvm: Any, handlers: Mapping[str, Any]) -> None:
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]

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
