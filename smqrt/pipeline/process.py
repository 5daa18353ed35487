"""Process of a query: its pid file, its stop file, and crash points for tests.

<state>/<query>/pid     "4711 83541 HOST": the process, when the kernel started it, and its machine. The start
                        time distinguishes it from a later process with the same number.
<state>/<query>/stop    a request to stop the query; its runner removes it
"""

from __future__ import annotations

import os
import platform
import signal
from pathlib import Path

_PID, _STOP = "pid", "stop"
_START_TIME_FIELD = 19
"""Index in /proc/N/stat, after the name in parentheses, of the start time in clock ticks since boot."""


def claim(query: Path) -> None:
    """Register this process as the one that runs the query.

    Args:
        query: the folder of the query's state, `<state>/<name>`.
    """
    query.mkdir(parents=True, exist_ok=True)
    (query / _STOP).unlink(missing_ok=True)
    temporary = query / (_PID + ".new")
    temporary.write_text(f"{os.getpid()} {_started(os.getpid())} {_host()}\n")
    temporary.rename(query / _PID)


def release(query: Path) -> None:
    """Remove the registration of this process; do nothing when another process has claimed the query."""
    words = _read(query)
    if words[:1] == [str(os.getpid())] and words[2:] == [_host()]:
        (query / _PID).unlink(missing_ok=True)
        (query / _STOP).unlink(missing_ok=True)


def running(query: Path) -> int | None:
    """Return the process of this machine that runs the query; None when there is none, or it has ended."""
    words = _read(query)
    if len(words) != 3 or words[2] != _host() or not words[0].isdigit():
        return None
    return int(words[0]) if _started(int(words[0])) == words[1] else None


def elsewhere(query: Path) -> str | None:
    """Return the name of the other machine on which the query runs, or ran until a crash; else None."""
    words = _read(query)
    return words[2] if len(words) == 3 and words[2] != _host() else None


def request_stop(query: Path) -> None:
    """Ask the process that runs the query to stop this query, and no other."""
    (query / _STOP).touch()


def stop_requested(query: Path) -> bool:
    """Return whether a stop of the query was requested."""
    return (query / _STOP).exists()


def _host() -> str:
    return platform.node() or "localhost"


def _read(query: Path) -> list[str]:
    try:
        return (query / _PID).read_text().split()
    except OSError:
        return []


def _started(pid: int) -> str:
    """Return when the process started; empty when it has ended or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[_START_TIME_FIELD]


# ---- Crash points, at which tests end a pipeline to check that no result is lost or duplicated

CRASH_VARIABLE = "SMQRT_FAULT"
"""POINT or POINT:NUMBER, such as "after_commit:3"; without a number every number matches."""


def crash_at(name: str, number: int, of_worker: bool = False) -> None:
    """Kill the pipeline's process and its child processes if the environment names this crash point.

    Args:
        name: "before_commit" or "after_commit": before or after the hub stores the results, which Spark does not know
            yet; "before_part": after the preceding parts of the results.
        number: the number of the micro-batch or of the part.
        of_worker: whether this is a Python worker of Spark, whose process group isn't the pipeline's.
    """
    wanted, _, of = os.environ.get(CRASH_VARIABLE, "").partition(":")
    if wanted == name and of in ("", str(number)):
        group = os.getpgrp()
        if of_worker:
            # The parent of the first process of the workers' group is the JVM.
            parent = Path(f"/proc/{group}/stat").read_text().rpartition(")")[2].split()[1]
            os.killpg(os.getpgid(int(parent)), signal.SIGKILL)
        os.killpg(group, signal.SIGKILL)
