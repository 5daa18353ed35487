"""CPU, memory and files of this process, read from /proc."""

from __future__ import annotations

import os
import resource
from functools import lru_cache
from typing import NamedTuple


class Usage(NamedTuple):
    """What the process takes.

    Attributes:
        pid: its number.
        cpu_s: seconds of CPU so far, of all its threads.
        memory_bytes: memory that it has (resident set); virtual_bytes: addresses that it has.
        threads: how many threads it has.
        open_files: file descriptors in use; open_files_limit: those it may have.
        started_s: when it began, in Unix seconds.
    """

    pid: int
    cpu_s: float
    memory_bytes: int
    virtual_bytes: int
    threads: int
    open_files: int
    open_files_limit: int
    started_s: float


def usage() -> Usage:
    """Returns what the process takes now."""
    with open("/proc/self/stat", "rb") as file:
        # Behind the name of the program, which stands in brackets and may hold anything.
        fields = file.read().rpartition(b")")[2].split()
    user, system, threads, started, virtual, resident = (int(fields[at]) for at in (11, 12, 17, 19, 20, 21))
    ticks = os.sysconf("SC_CLK_TCK")
    return Usage(
        os.getpid(),
        (user + system) / ticks,
        resident * resource.getpagesize(),
        virtual,
        threads,
        _open_files(),
        resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        _booted_s() + started / ticks,
    )


def _open_files() -> int:
    # Since Linux 6.2 the size of the folder; before that it is 0, and they are counted: 4 ms for 10,000.
    return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))


@lru_cache(1)
def _booted_s() -> float:
    with open("/proc/stat", "rb") as file:
        return float(next(line for line in file if line.startswith(b"btime ")).split()[1])
