"""One sentence for whatever Spark throws: the query, where it is written, what happened, what to do."""

from __future__ import annotations

import errno
import re
from pathlib import Path

from smqrt.errors import PipelineError, SmqrtError
from smqrt.journal.files import Unreachable
from smqrt.pipeline.api import Declaration

_ANOTHER_STATE = (
    "STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE",
    "STATE_STORE_VALUE_SCHEMA_NOT_COMPATIBLE",
    "STATE_STORE_SCHEMA_NOT_COMPATIBLE",
    "STATEFUL_OPERATOR_NOT_MATCH_IN_STATE_METADATA",
    "STATE_STORE_STATE_SCHEMA",
    "TRANSFORM_WITH_STATE_SCHEMA",
    "INVALID_SCHEMA_EVOLUTION",
)
_AWAY = f"{Unreachable.__module__}.{Unreachable.__name__}"
"""How a helper of Spark that reads over HTTP tells that the hub is away."""
_RETIRED = "(retention has removed them)"
_JAVA_MEMORY = "java.lang.OutOfMemoryError"
_TOO_LARGE = "spark.driver.maxResultSize"
_SMALLER = (
    "run it with --driver-memory 4g, or give the @source a smaller max_bytes, which helps with the micro-batch under "
    "way too."
)
_HELPER_DIED = (
    "a Python helper of Spark died, perhaps ended by the system for want of memory: give the @source a smaller "
    "max_bytes or bytes_per_partition, or run fewer at a time with --master local[2]."
)
_MEANINGS = {
    "No space left on device": (
        "the disk is full: make room where the state, the tables and spark.local.dir are; nothing is lost, and the "
        "micro-batch is done again."
    ),
    "Disk quota exceeded": (
        "the disk's quota is used up: make room where the state, the tables and spark.local.dir are; nothing is lost, "
        "and the micro-batch is done again."
    ),
    "Read-only file system": (
        "the disk can only be read: mount the one of the state, the tables and spark.local.dir for writing; nothing is "
        "lost, and the micro-batch is done again."
    ),
    "Input/output error": (
        "the disk is broken: look at the one of the state, the tables and spark.local.dir; what was not written is "
        "done again."
    ),
    _JAVA_MEMORY: f"Java ran out of memory: {_SMALLER}",
    _TOO_LARGE: f"a result is larger than Spark's driver takes (spark.driver.maxResultSize): {_SMALLER}",
    "Python worker exited unexpectedly": _HELPER_DIED,
    "pyspark.daemon's stdout": _HELPER_DIED,
    "driver worker exited unexpectedly": (
        "a Python helper of Spark that looks at the processor of its @stateful or @alert died; .spark/spark.log in the "
        "folder of state may say why. On a cluster its Python needs pandas and protobuf."
    ),
    "sources in the checkpoint offsets": (
        "its checkpoint belongs to a version of this query with other sources; smqrt pipeline reset {name} forgets it, "
        "and run --from earliest computes it again."
    ),
    "CANNOT_LOAD_STATE_STORE": (
        "what its checkpoint remembers is incomplete, or was made with another number of partitions; smqrt pipeline "
        "reset {name} forgets it, and run --from earliest computes it again."
    ),
}
"""What texts of Spark and of the system mean."""
OUT_OF_MEMORY = "out-of-memory"
_FULL = ("No space left on device", "Disk quota exceeded")
_HELPER_GONE = (
    "Python worker failed to connect back",
    "Timed out while waiting for the Python worker",
    "Python worker exited unexpectedly",
    "pyspark.daemon's stdout",
    "java.io.IOException: Broken pipe",
    "java.io.IOException: Stream closed",
    "java.net.SocketException: Connection reset",
)
"""Who asks a helper that dies, or its daemon that does, gets one of many errors."""
_NO_WATERMARK = "not supported for streaming aggregations without watermark"
_OWN_ERROR = re.compile(r"smqrt\.(?:errors|journal\.locations)\.(\w+): (.*)")
_PYTHON_ERROR = re.compile(r"^(?:[\w.]*\.)?([A-Z]\w*(?:Error|Exception)|StopIteration|KeyboardInterrupt)(: .*)?$", re.M)
_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+)', re.M)
_CLASS = re.compile(r"\[([A-Z][A-Z0-9_.]+)\]\s*")
_MOST_CAUSES = 10
_CALLING = re.compile(r"^An error occurred while calling [^\n]*\n: (?:[\w$]+\.)*")
"""Of py4j, and Java's package: before the class of Java's error, and what it says."""
_JAVA_CLASS = re.compile(r"^[\w$]+: ")
_SQLSTATE = re.compile(r"\s*SQLSTATE: \w+")


def planning_error(declaration: Declaration, error: Exception) -> PipelineError:
    """Return the error for a declaration of which Spark, or the function itself, says that it can't be."""
    return PipelineError(f"{_failed_line(declaration, error)}: {declaration.name}: {sentence(declaration.name, error)}")


def running_error(declaration: Declaration, error: BaseException) -> str:
    """Return the sentence for a query that has failed: where it is written, its name, what happened."""
    return f"{_failed_line(declaration, error)}: {declaration.name}: {sentence(declaration.name, error)}"


def sentence(name: str, error: BaseException) -> str:
    """Return what happened in one line, without Java's stack.

    Args:
        name: of the query, for the remedy.
        error: what was thrown, by us, by a function of the pipeline, or by Spark.
    """
    if isinstance(error, SmqrtError):
        return str(error)
    text = str(error)
    if any(word in text for word in _ANOTHER_STATE):
        return (
            "its checkpoint holds the state of another version of this query, whose columns or windows were different; "
            f"smqrt pipeline reset {name} forgets it, and run --from earliest computes it again."
        )
    if _NO_WATERMARK in text:
        return (
            "mode='append' publishes what is final, and without a watermark nothing ever is: give the @source a "
            "watermark=, or use mode='update'."
        )
    whole = _with_causes(error)
    for words, meaning in _MEANINGS.items():
        if words in whole:
            return meaning.format(name=name)
    if own := _OWN_ERROR.findall(text):
        return _with_remedy(name, str(own[-1][1]).strip())
    if (python := list(_PYTHON_ERROR.finditer(text))) and _FRAME.search(text):
        return f"{python[-1][1]}{python[-1][2] or ''}"
    return _first_sentence(error, text)


def _with_causes(error: BaseException | None) -> str:
    """Return what an error and those behind it say: of a task that can't write, only Java's last one says why."""
    said: list[str] = []
    while error is not None and len(said) < _MOST_CAUSES:
        said.append(f"{error}\n{getattr(error, '_stackTrace', '')}")
        error = getattr(error, "_cause", None)
    return "\n".join(said)


def _with_remedy(name: str, text: str) -> str:
    what, retired, _ = text.partition(_RETIRED)
    if not retired:
        return text
    return (
        f"{what}{retired}: it was away for longer than the journal's reader_timeout_s, hard_bytes or min_free_bytes "
        f"allow; smqrt pipeline reset {name} (or with --keep-output) and run --from earliest go on with what is there."
    )


def spark_gone(error: BaseException, log: Path) -> str:
    """Return the sentence for a Spark that doesn't answer any more.

    Args:
        error: of who asked it.
        log: Spark's, beside which its Java leaves a mark when it ends for want of memory.
    """
    if log.with_name(OUT_OF_MEMORY).exists():
        return _MEANINGS[_JAVA_MEMORY]
    return f"Spark is gone ({type(error).__name__}), perhaps for want of memory; {log} may say why."


def first_line(error: BaseException) -> str:
    """Return the first line of an error as a sentence, without Spark's codes; its class when it says nothing."""
    text = str(error).strip()
    said = _CALLING.sub("", text)
    lines = (said if said == text else _JAVA_CLASS.sub("", said)).splitlines()
    clear = _SQLSTATE.split(_CLASS.sub("", lines[0]))[0] if lines else type(error).__name__
    return clear.rstrip(".;: ") + "."


def _first_sentence(error: BaseException, text: str) -> str:
    said = _CALLING.sub("", text)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    clear = next((line for line in lines if _CLASS.search(line)), lines[0] if lines else type(error).__name__)
    clear = _SQLSTATE.sub("", _CLASS.sub("", clear)).split(";\n")[0].strip().rstrip(";")
    return clear if hasattr(error, "getCondition") or said != text else f"{type(error).__name__}: {clear}"


def _failed_line(declaration: Declaration, error: BaseException) -> str:
    """The line of the pipeline's own file that failed, when the error tells it."""
    traceback, lines = error.__traceback__, []
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == declaration.file:
            lines.append(traceback.tb_lineno)
        traceback = traceback.tb_next
    lines += [int(line) for file, line in _FRAME.findall(str(error)) if file == declaration.file]
    return f"{declaration.file}:{lines[-1]}" if lines else declaration.where


def is_final(error: BaseException) -> bool:
    """Return whether trying again can't help: the query and its checkpoint don't fit, or an expectation says to end."""
    text = str(error)
    return any(word in text for word in (*_ANOTHER_STATE, _RETIRED, "on_fail='fail'"))


def is_away(error: BaseException) -> bool:
    """Return whether the hub is away: it is tried for as long as it takes."""
    return isinstance(error, Unreachable) or _AWAY in f"{error} {error.__cause__}"


def is_full(error: BaseException) -> bool:
    """Return whether a disk is full: it is tried until there is room."""
    causes = (error, error.__cause__)
    if any(isinstance(one, OSError) and one.errno in (errno.ENOSPC, errno.EDQUOT) for one in causes):
        return True
    return any(word in f"{_with_causes(error)} {error.__cause__}" for word in _FULL)


def is_helper_gone(error: BaseException) -> bool:
    """Return whether one of Spark's Python helpers died, or did not start in time on a busy machine."""
    return any(word in f"{_with_causes(error)} {error.__cause__}" for word in _HELPER_GONE)


def is_too_large(error: BaseException) -> bool:
    """Return whether a result is more than Spark's driver takes at once."""
    return _TOO_LARGE in f"{error} {error.__cause__}"


def is_passing(error: BaseException) -> bool:
    """Return whether what kept a query from starting may be over a little later."""
    return is_away(error) or is_full(error) or is_helper_gone(error)
