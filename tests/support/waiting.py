"""Waiting for what happens in another greenlet, thread or process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import gevent

T = TypeVar("T")
PATIENCE_S = 20.0
"""How long a test waits for what ought to happen at once: the machine may have other things to do."""
SOONEST_S, LATEST_S = 0.002, 0.05


def wait_until(condition: Callable[[], T], what: object = "what the test needs", patience_s: float = PATIENCE_S) -> T:
    """Lets others run until a condition holds, and returns its value.

    Looks again after a tenth of the time it has waited, within two limits: what comes at once costs no time, what
    takes seconds costs no CPU.

    Args:
        condition: what is to become true.
        what: says in the error what didn't come true; a list, for instance, what came instead.
        patience_s: how long it may take.

    Raises:
        AssertionError: it took longer.
    """
    begin = time.monotonic()
    while not (value := condition()):
        waited_s = time.monotonic() - begin
        assert waited_s < patience_s, f"not within {patience_s:g} s: {what}"
        gevent.sleep(min(max(SOONEST_S, waited_s / 10), LATEST_S))
    return value


def let_others_run(turns: int = 10) -> None:
    """Turns the loop: what lies in the sockets of this process is read, and what becomes ready meanwhile runs.

    For peers that share the process with the test, where something is to be there before the test goes on, or
    nothing is to come. It takes no time.
    """
    for _ in range(turns):
        gevent.sleep(1e-6)  # with 0 gevent comes back without a look at the sockets
