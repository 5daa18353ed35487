"""The end of a server: step by step, with a deadline for the whole, and at once when it is asked a second time.

The deadline and the second signal also end a server whose loop is held, by an application that computes for instance:
they wait for no turn of the loop.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from gevent import monkey

log = logging.getLogger("smqrt")

Step = tuple[str, Callable[[], object]]
"""What is done, for the person who reads why it took so long; and the function that does it."""

STDERR = 2
_LOOK_S = 0.05
_sleep: Callable[[float], None] = monkey.get_original("time", "sleep")
_start_thread: Callable[..., int] = monkey.get_original("_thread", "start_new_thread")


class Ending:
    """The steps with which a server ends.

    Args:
        left: says what is still there: "3 requests, 120 SMQ clients"; called in another thread, so it only looks.

    Attributes:
        step: what is being done; empty before the first step and after the last one.
    """

    def __init__(self, left: Callable[[], str]) -> None:
        self.step = ""
        self._left = left

    def run(self, steps: Iterable[Step]) -> None:
        """Take the steps; one that fails is logged, and the next ones are taken all the same."""
        for self.step, function in steps:
            try:
                function()
            except Exception:
                log.exception("while the server stopped, at %s", self.step)
        self.step = ""

    @contextmanager
    def within(self, most_s: float) -> Iterator[None]:
        """End the process with exit code 1 when what is inside takes longer, or a signal asks a second time.

        Args:
            most_s: seconds; 0 for as long as it takes.
        """
        over: list[bool] = []
        before = {number: signal.signal(number, _end_now) for number in (signal.SIGTERM, signal.SIGINT)}
        if most_s:
            _start_thread(self._watch, (time.monotonic() + most_s, most_s, over))
        try:
            yield
        finally:
            over.append(True)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _watch(self, end_s: float, most_s: float, over: list[bool]) -> None:
        while not over:
            if time.monotonic() >= end_s:
                os.write(STDERR, self._last_line(most_s).encode())
                os._exit(1)
            _sleep(_LOOK_S)

    def _last_line(self, most_s: float) -> str:
        return (
            f"stopped after {most_s:g} s, at {self.step or 'its last step'}, with {self._left()} still there; "
            "see the setting drain.most_s\n"
        )


def _end_now(number: int, frame: Any) -> None:
    os._exit(1)  # asked twice: somebody is in a hurry
