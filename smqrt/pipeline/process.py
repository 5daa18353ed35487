"""Process that runs a query: a file with its number, a file that asks it to stop, and crash points for tests.

<state>/<query>/pid     "4711 83541": the process and when the kernel started it, so that a number that
                        was given to somebody else is never taken for a pipeline
<state>/<query>/stop    somebody asks for the query to stop; its runner removes it
"""

from __future__ import annotations

import os
import platform
import signal
from pathlib import Path

_PID, _STOP = "pid", "stop"
_STARTED = 19
"""Field of /proc/N/stat behind the name in parentheses: when the process started, in clock ticks since boot."""


def claim(query: Path) -> None:
    """Write down that this process runs the query.

    Args:
        query: the folder of the query's state, `<state>/<name>`.
    """
    query.mkdir(parents=True, exist_ok=True)
    (query / _STOP).unlink(missing_ok=True)
    temporary = query / (_PID + ".new")
    temporary.write_text(f"{os.getpid()} {_started(os.getpid())} {_host()}\n")
    temporary.rename(query / _PID)


def release(query: Path) -> None:
    """Write down that nobody runs the query; does nothing when another process has claimed it."""
    words = _read(query)
    if words[:1] == [str(os.getpid())] and words[2:] == [_host()]:
        (query / _PID).unlink(missing_ok=True)
        (query / _STOP).unlink(missing_ok=True)


def running(query: Path) -> int | None:
    """Return the process of this machine that runs the query; None when there is none, or it died."""
    words = _read(query)
    if len(words) != 3 or words[2] != _host() or not words[0].isdigit():
        return None
    return int(words[0]) if _started(int(words[0])) == words[1] else None


def elsewhere(query: Path) -> str | None:
    """Return the other machine on which the query runs, or died without a word; None when it isn't on another one."""
    words = _read(query)
    return words[2] if len(words) == 3 and words[2] != _host() else None


def request_stop(query: Path) -> None:
    """Ask the process that runs the query to stop it, and only it."""
    (query / _STOP).touch()


def stop_requested(query: Path) -> bool:
    """Return whether somebody asked for the query to stop."""
    return (query / _STOP).exists()


def _host() -> str:
    return platform.node() or "localhost"


def _read(query: Path) -> list[str]:
    try:
        return (query / _PID).read_text().split()
    except OSError:
        return []


def _started(pid: int) -> str:
    """Return when the process started; empty when it is gone or only waits for its parent."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[_STARTED]


# ---- points at which tests let a pipeline die, to see that nothing is lost and nothing is doubled

CRASH_VARIABLE = "SMQRT_FAULT"
"""POINT or POINT:NUMBER, such as "after_commit:3"; without a number any will do."""


def crash_at(name: str, number: int, of_worker: bool = False) -> None:
    """Kill the pipeline's process and its helpers at once when the environment asks for it here.

    Args:
        name: "before_commit" or "after_commit": the hub has not or has the results, Spark doesn't know it yet;
            "before_part": it has those parts of them that come before.
        number: of the micro-batch; of the part.
        of_worker: this is a helper of Spark, whose group isn't the pipeline's.
    """
    wanted, _, of = os.environ.get(CRASH_VARIABLE, "").partition(":")
    if wanted == name and of in ("", str(number)):
        group = os.getpgrp()
        if of_worker:
            os.killpg(os.getpgid(_parent(group)), signal.SIGKILL)
        os.killpg(group, signal.SIGKILL)


def _parent(process: int) -> int:
    """Return the parent: of the first process of the helpers' group, the JVM."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
