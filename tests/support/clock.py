"""Clocks: one that a test sets, and one for upper bounds on machines that have other things to do."""

from __future__ import annotations

import time
from pathlib import Path


def queued_s(thread: int | str = "thread-self") -> float:
    """Returns how long a thread was ready to run and no core was free (schedstat, proc(5)).

    Args:
        thread: its id; a process's id is that of its first thread. This thread without it.
    """
    return int(Path(f"/proc/{thread}/schedstat").read_text().split()[1]) / 1e9


def undisturbed_s(*others: int) -> float:
    """Returns the time of a clock that stands still while this thread waits for a core, or one of `others` does.

    For upper bounds only: a timer goes on meanwhile.
    """
    return time.perf_counter() - sum(map(queued_s, ("thread-self", *others)))


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s
