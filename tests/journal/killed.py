"""Compactions that are killed at a step, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

from smqrt.journal.compact import CompactOptions, compact

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([__name__, "pyarrow.parquet"])  # a fork of that starts twenty times as fast


def compact_killed_at(step: int, journal: Path, options: CompactOptions) -> int | None:
    """Compacts a journal in a process that is killed at a step; returns its exit code, 0 when it had fewer steps."""
    process = _PROCESSES.Process(target=_compact, args=(step, journal, options))
    process.start()
    process.join()
    return process.exitcode


def _compact(step: int, journal: Path, options: CompactOptions) -> None:
    left = step

    def on_step(_: str) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    compact(journal, options, on_step)
