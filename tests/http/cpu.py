"""The CPU time of something, which does not depend on who else uses the machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import thread_time

from smqrt.errors import SmqrtError

TRIES = 4


def seconds(work: Callable[[], object]) -> float:
    """The least CPU time that `work` took in some tries; a refusal counts as an end."""
    best = float("inf")
    for _ in range(TRIES):
        began = thread_time()
        with suppress(SmqrtError):
            work()
        best = min(best, thread_time() - began)
    return best


def linear(work: Callable[[int], object], size: int) -> bool:
    """Whether four times the size takes about four times the time; sixteen times it would be the square."""
    return seconds(lambda: work(4 * size)) < 9 * seconds(lambda: work(size)) + 0.001
