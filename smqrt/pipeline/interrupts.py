"""Work with Spark that a signal ends: its jobs are cancelled, and what it has opened is closed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, TypeVar

from smqrt.pipeline import session

_Result = TypeVar("_Result")
_CANCEL_EVERY_S = 0.1


def interruptible(
    work: Callable[[threading.Event], _Result], cancel: Callable[[], object] = lambda: _cancel_jobs()
) -> _Result:
    """Runs work until it is done or KeyboardInterrupt comes, after which a second one ends the process at once.

    Args:
        work: is called with an event that is set when it is to end, in a thread of its own: in the main thread pyspark
            would put its own handler of SIGINT in the place of ours.
        cancel: ends what it waits for, again and again until it is done; without it Spark's jobs are cancelled.

    Returns:
        What `work` returns.

    Raises:
        KeyboardInterrupt: it came, and `work` has ended.
    """
    stopping = threading.Event()
    with ThreadPoolExecutor(1, "spark") as thread:
        running = thread.submit(work, stopping)
        try:
            while not running.done():
                wait([running], _CANCEL_EVERY_S)  # a signal that comes just before a wait doesn't end it
            return running.result()
        except KeyboardInterrupt:
            stopping.set()
            _end(running, cancel)
            raise


def _end(running: Future[Any], cancel: Callable[[], object]) -> None:
    try:
        while not running.done():
            cancel()  # again and again: when one has been cancelled the next may begin
            wait([running], _CANCEL_EVERY_S)
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)


def _cancel_jobs() -> None:
    with suppress(Exception):  # it isn't installed, hasn't started yet, or has ended meanwhile
        session.cancel_jobs()
