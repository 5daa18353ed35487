"""What an error of Spark means: which queries are tried again, and the line and sentence that are reported."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from smqrt.errors import JournalError, PipelineError
from smqrt.journal.files import Unreachable
from smqrt.pipeline import failures
from smqrt.pipeline.api import Declaration

UNREACHABLE = f"{Unreachable.__module__}.Unreachable: The hub hasn't answered."
GONE = "smqrt.errors.JournalError: Rows 3 to 6 of node n1 are gone (retention has removed them). Set failOnDataLoss"


class OfSpark(RuntimeError):
    """An error as pyspark makes it: what Java says of the causes is apart from the message."""

    def __init__(self, text: str, cause: BaseException | None = None, stack: str = "") -> None:
        super().__init__(text)
        self._cause, self._stackTrace = cause, stack

    def getCondition(self) -> str:
        return ""


def from_(error: Exception, cause: BaseException) -> Exception:
    """The error as `raise error from cause` makes it."""
    error.__cause__ = cause
    return error


def declaration(file: str = "p.py", line: int = 3) -> Declaration:
    return Declaration("q", "publish", print, ("readings",), {}, [], file, line)


@pytest.mark.parametrize(
    ("error", "kinds"),
    [
        (Unreachable("no hub"), {"hub"}),
        (RuntimeError(f"Traceback\n{UNREACHABLE}\n"), {"hub"}),
        (from_(RuntimeError("Job aborted"), RuntimeError(UNREACHABLE)), {"hub"}),
        (JournalError("it is damaged."), set()),
        (OSError(errno.ENOSPC, "full"), {"disk"}),
        (from_(RuntimeError("x"), OSError(errno.EDQUOT, "full")), {"disk"}),
        (OSError(errno.EIO, "No luck"), set()),
        (OfSpark("Job aborted", OfSpark("x", stack="IOException: No space left on device")), {"disk"}),
        (OfSpark("Job aborted", OfSpark("x", OfSpark("java.io.IOException: Broken pipe"))), {"worker"}),
        (from_(RuntimeError("x"), RuntimeError("Python worker exited unexpectedly (crashed)")), {"worker"}),
        (RuntimeError("java.lang.OutOfMemoryError: Java heap space"), set()),
    ],
    ids=str,
)
def test_only_what_may_pass_is_transient(error: Exception, kinds: set[str]) -> None:
    found = {"hub": failures.is_hub_unreachable, "disk": failures.is_disk_full, "worker": failures.is_worker_gone}
    assert {name for name, is_one in found.items() if is_one(error)} == kinds
    assert failures.is_transient(error) is bool(kinds)


@pytest.mark.parametrize(
    ("text", "is_final"),
    [
        ("[STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE] x", True),
        (GONE, True),
        ("2 rows fail, and on_fail='fail' ends the query", True),
        ("No space left on device", False),
        ("", False),
    ],
)
def test_some_errors_stay_after_every_retry(text: str, is_final: bool) -> None:
    assert failures.is_final(RuntimeError(text)) is is_final


def test_a_result_may_be_larger_than_spark_accepts() -> None:
    error = RuntimeError("Total size is bigger than spark.driver.maxResultSize (1 MiB)")
    assert failures.is_too_large(error)
    assert failures.is_too_large(from_(RuntimeError("x"), error))
    assert not failures.is_too_large(RuntimeError("Java heap space"))


def test_rows_that_retention_has_removed_have_a_remedy() -> None:
    told = failures.sentence("q", RuntimeError(f"Traceback\n{GONE}=false to continue.\n"))
    assert told.startswith("Rows 3 to 6 of node n1 are gone (retention has removed them): the query was stopped for")
    assert "smqrt pipeline reset q (--keep-output keeps its table)" in told
    assert "failOnDataLoss" not in told


def test_own_errors_are_their_own_sentence() -> None:
    assert failures.sentence("q", PipelineError("OutOfMemoryError is a word.")) == "OutOfMemoryError is a word."


def test_groups_that_are_never_final_need_a_watermark() -> None:
    told = failures.sentence("q", RuntimeError("Append is not supported for streaming aggregations without watermark"))
    assert told.startswith("mode='append' publishes only final rows")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OfSpark("[A_B.C] The first; SQLSTATE: 42703;\n'Project x\n+- y"), "The first;"),
        (OfSpark("x\n[A_B] It is wrong. SQLSTATE: 42703"), "It is wrong."),
        (OfSpark("\n  plain\nmore"), "plain"),
        (ValueError(""), "ValueError: ValueError"),
        (KeyError("k"), "KeyError: 'k'"),
    ],
)
def test_a_sentence_has_no_codes_of_spark(error: Exception, expected: str) -> None:
    assert failures.sentence("q", error).rstrip(";") == expected.rstrip(";")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("[A_B.C] It is wrong. SQLSTATE: 42703 (line 1)\nmore"), "It is wrong."),
        (
            RuntimeError("An error occurred while calling o1.load.\n: java.io.IOException: It is gone;\n\tat"),
            "It is gone.",
        ),
        (RuntimeError("no end:"), "no end."),
        (ValueError(), "ValueError."),
    ],
)
def test_the_first_line_is_a_sentence(error: Exception, line: str) -> None:
    assert failures.first_line(error) == line


def failing(text: str = "x") -> Any:
    raise ValueError(text)


def test_the_line_of_the_file_that_failed_is_reported() -> None:
    here = failing.__code__.co_filename
    with pytest.raises(ValueError, match="x") as caught:
        failing()
    line = failing.__code__.co_firstlineno + 1
    assert failures.running_error(declaration(here), caught.value).startswith(f"{here}:{line}: q: ")
    assert str(failures.planning_error(declaration(), caught.value)) == "p.py:3: q: ValueError: x"
    text = 'Traceback\n  File "p.py", line 7, in f\n  File "other.py", line 9, in g\nValueError: x'
    assert failures.running_error(declaration(), RuntimeError(text)) == "p.py:7: q: ValueError: x"


def test_a_chain_of_causes_may_have_a_cycle() -> None:
    error = OfSpark("one")
    error._cause = OfSpark("other", error)
    assert not failures.is_worker_gone(error)
