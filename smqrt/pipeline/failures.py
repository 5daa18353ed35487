"""Messages for errors of Spark: one sentence with the query, its file and line, the cause and the remedy."""

from __future__ import annotations

import errno
import re
from pathlib import Path

from smqrt.errors import PipelineError, SmqrtError
from smqrt.journal.files import Unreachable
from smqrt.pipeline.api import Declaration

_OTHER_STATE_VERSION = (
    "STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE",
    "STATE_STORE_VALUE_SCHEMA_NOT_COMPATIBLE",
    "STATE_STORE_SCHEMA_NOT_COMPATIBLE",
    "STATEFUL_OPERATOR_NOT_MATCH_IN_STATE_METADATA",
    "STATE_STORE_STATE_SCHEMA",
    "TRANSFORM_WITH_STATE_SCHEMA",
    "INVALID_SCHEMA_EVOLUTION",
)
_HUB_UNREACHABLE = f"{Unreachable.__module__}.{Unreachable.__name__}"
"""Name of the error class in the text of a Python worker that can't reach the hub over HTTP."""
_REMOVED_BY_RETENTION = "(retention has removed them)"
_JAVA_MEMORY = "java.lang.OutOfMemoryError"
_TOO_LARGE = "spark.driver.maxResultSize"
_MEMORY_REMEDY = (
    "run it with --driver-memory 4g, or give the @source a smaller max_bytes, which also helps with the current "
    "micro-batch."
)
_WORKER_DIED = (
    "a Python worker of Spark died, perhaps because memory ran out: give the @source a smaller max_bytes or "
    "bytes_per_partition, or run fewer workers at a time with --master local[2]."
)
_MEANINGS = {
    "No space left on device": (
        "the disk is full: free space on the disks of the state, the tables and spark.local.dir; nothing is lost, and "
        "the micro-batch is repeated."
    ),
    "Disk quota exceeded": (
        "the disk's quota is used up: free space on the disks of the state, the tables and spark.local.dir; nothing is "
        "lost, and the micro-batch is repeated."
    ),
    "Read-only file system": (
        "the disk is read-only: mount the disks of the state, the tables and spark.local.dir for writing; nothing is "
        "lost, and the micro-batch is repeated."
    ),
    "Input/output error": (
        "the disk reports errors: check the disks of the state, the tables and spark.local.dir; the micro-batch is "
        "repeated."
    ),
    _JAVA_MEMORY: f"Java ran out of memory: {_MEMORY_REMEDY}",
    _TOO_LARGE: f"a result is larger than Spark's driver accepts (spark.driver.maxResultSize): {_MEMORY_REMEDY}",
    "Python worker exited unexpectedly": _WORKER_DIED,
    "pyspark.daemon's stdout": _WORKER_DIED,
    "driver worker exited unexpectedly": (
        "a Python worker of Spark that inspects the processor of its @stateful or @alert died; .spark/spark.log in the "
        "folder of state may contain the reason. On a cluster its Python needs pandas and protobuf."
    ),
    "sources in the checkpoint offsets": (
        "its checkpoint belongs to a version of this query with other sources; smqrt pipeline reset {name} removes it, "
        "and run --from earliest computes it again."
    ),
    "CANNOT_LOAD_STATE_STORE": (
        "the state in its checkpoint is incomplete, or was made with another number of partitions; smqrt pipeline "
        "reset {name} removes it, and run --from earliest computes it again."
    ),
}
"""Texts in errors of Spark and of the system, and the sentences that explain them."""
OUT_OF_MEMORY = "out-of-memory"
_DISK_FULL = ("No space left on device", "Disk quota exceeded")
_WORKER_GONE = (
    "Python worker failed to connect back",
    "Timed out while waiting for the Python worker",
    "Python worker exited unexpectedly",
    "pyspark.daemon's stdout",
    "java.io.IOException: Broken pipe",
    "java.io.IOException: Stream closed",
    "java.net.SocketException: Connection reset",
)
"""Texts in the JVM's errors when a Python worker or its daemon has died. Which one appears depends on the moment."""
_NO_WATERMARK = "not supported for streaming aggregations without watermark"
_OWN_ERROR = re.compile(rf"(?:{re.escape(SmqrtError.__module__)}|{re.escape(Unreachable.__module__)})\.(\w+): (.*)")
_PYTHON_ERROR = re.compile(r"^(?:[\w.]*\.)?([A-Z]\w*(?:Error|Exception)|StopIteration|KeyboardInterrupt)(: .*)?$", re.M)
_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+)', re.M)
_CLASS = re.compile(r"\[([A-Z][A-Z0-9_.]+)\]\s*")
_TEXT = "_smqrt_text"
"""The attribute of an error with its text."""
_MAX_CAUSES = 10  # a bound, in case the chain of causes has a cycle
_CALLING = re.compile(r"^An error occurred while calling [^\n]*\n: (?:[\w$]+\.)*")
"""The text that py4j puts before the class of a Java error, and the package of this class."""
_JAVA_CLASS = re.compile(r"^[\w$]+: ")
_SQLSTATE = re.compile(r"\s*SQLSTATE: \w+")


def planning_error(declaration: Declaration, error: Exception) -> PipelineError:
    """Return the error for a declaration that Spark or the function itself rejects."""
    return PipelineError(f"{_failed_line(declaration, error)}: {declaration.name}: {sentence(declaration.name, error)}")


def running_error(declaration: Declaration, error: BaseException) -> str:
    """Return the sentence for a query that has failed: its file and line, its name, the cause."""
    return f"{_failed_line(declaration, error)}: {declaration.name}: {sentence(declaration.name, error)}"


def sentence(name: str, error: BaseException) -> str:
    """Return the cause in one line, without Java's stack.

    Args:
        name: the name of the query, for the remedy.
        error: an error of this package, of a function of the pipeline, or of Spark.
    """
    if isinstance(error, SmqrtError):
        return str(error)
    text = _text(error)
    if any(word in text for word in _OTHER_STATE_VERSION):
        return (
            "its checkpoint holds the state of another version of this query, whose columns or windows were different; "
            f"smqrt pipeline reset {name} removes it, and run --from earliest computes it again."
        )
    if _NO_WATERMARK in text:
        return (
            "mode='append' publishes only final rows, and without a watermark no row becomes final: give the @source a "
            "watermark=, or use mode='update'."
        )
    # The causes come first: only they have the text of a full disk or of a dead worker.
    whole = _with_causes(error)
    for words, meaning in _MEANINGS.items():
        if words in whole:
            return meaning.format(name=name)
    # An error of this package in a Python worker has only its text in the JVM.
    if own := _OWN_ERROR.findall(text):
        cause, removed, _ = str(own[-1][1]).strip().partition(_REMOVED_BY_RETENTION)
        if not removed:
            return cause
        return (
            f"{cause}{removed}: the query was stopped for longer than the journal's reader_timeout_s, hard_bytes or "
            f"min_free_bytes allow; smqrt pipeline reset {name} (--keep-output keeps its table) and run --from "
            "earliest continue with the existing rows."
        )
    if (python := list(_PYTHON_ERROR.finditer(text))) and _FRAME.search(text):
        return f"{python[-1][1]}{python[-1][2] or ''}"
    # The first line with a code of Spark in brackets, else the first line, without the codes.
    message = _CALLING.sub("", text)
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    line = next((line for line in lines if _CLASS.search(line)), lines[0] if lines else type(error).__name__)
    line = _SQLSTATE.sub("", _CLASS.sub("", line)).split(";\n")[0].strip().rstrip(";")
    return line if hasattr(error, "getCondition") or message != text else f"{type(error).__name__}: {line}"


def _text(error: BaseException) -> str:
    """Return `str(error)`, computed once: the errors of Spark compute it in the JVM, in about 20 ms each time."""
    text = error.__dict__.get(_TEXT)
    if text is None:
        text = error.__dict__[_TEXT] = str(error)
    return str(text)


def _with_causes(error: BaseException) -> str:
    """Return the texts of an error and its causes: for a task that can't write, only the last one has the reason."""
    texts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(texts) < _MAX_CAUSES:
        texts.append(f"{_text(cause)}\n{getattr(cause, '_stackTrace', '')}")
        cause = getattr(cause, "_cause", None)
    return "\n".join(texts)


def _with_cause(error: BaseException) -> str:
    """Return the texts of an error and of the error that it was raised from."""
    return _text(error) if error.__cause__ is None else f"{_text(error)} {_text(error.__cause__)}"


def spark_gone(error: BaseException, log: Path) -> str:
    """Return the sentence for a JVM of Spark that no longer responds.

    Args:
        error: the error of the failed call.
        log: Spark's log. Its JVM creates a marker file beside it when it runs out of memory.
    """
    if log.with_name(OUT_OF_MEMORY).exists():
        return _MEANINGS[_JAVA_MEMORY]
    return f"Spark has ended ({type(error).__name__}), perhaps because memory ran out; {log} may contain the reason."


def first_line(error: BaseException) -> str:
    """Return the first line of an error as a sentence, without Spark's codes; its class when it has no text."""
    text = _text(error).strip()
    message = _CALLING.sub("", text)
    lines = (message if message == text else _JAVA_CLASS.sub("", message)).splitlines()
    line = _SQLSTATE.split(_CLASS.sub("", lines[0]))[0] if lines else type(error).__name__
    return line.rstrip(".;: ") + "."


def _failed_line(declaration: Declaration, error: BaseException) -> str:
    """Return the line of the pipeline file that failed; by default that of the declaration."""
    traceback, lines = error.__traceback__, []
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == declaration.file:
            lines.append(traceback.tb_lineno)
        traceback = traceback.tb_next
    lines += [int(line) for file, line in _FRAME.findall(_text(error)) if file == declaration.file]
    return f"{declaration.file}:{lines[-1]}" if lines else declaration.where


def is_final(error: BaseException) -> bool:
    """Return whether a retry is useless: a checkpoint of another version, missing rows, or a failed expectation."""
    text = _text(error)
    return any(word in text for word in (*_OTHER_STATE_VERSION, _REMOVED_BY_RETENTION, "on_fail='fail'"))


def is_hub_unreachable(error: BaseException) -> bool:
    """Return whether the hub is unreachable; such a query is retried without a limit."""
    return isinstance(error, Unreachable) or _HUB_UNREACHABLE in _with_cause(error)


def is_disk_full(error: BaseException) -> bool:
    """Return whether a disk is full; such a query is retried until the disk has space."""
    causes = (error, error.__cause__)
    if any(isinstance(one, OSError) and one.errno in (errno.ENOSPC, errno.EDQUOT) for one in causes):
        return True
    text = f"{_with_causes(error)} {_with_cause(error)}"
    return any(word in text for word in _DISK_FULL)


def is_worker_gone(error: BaseException) -> bool:
    """Return whether a Python worker of Spark died, or did not start in time on a busy machine."""
    text = f"{_with_causes(error)} {_with_cause(error)}"
    return any(word in text for word in _WORKER_GONE)


def is_too_large(error: BaseException) -> bool:
    """Return whether a result is larger than Spark's driver accepts."""
    return _TOO_LARGE in _with_cause(error)


def is_transient(error: BaseException) -> bool:
    """Return whether a start that failed with this error may succeed a little later."""
    return is_hub_unreachable(error) or is_disk_full(error) or is_worker_gone(error)
