"""Calls that other threads hand to the loop: the one way in from outside of its thread."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any

from gevent import get_hub, monkey

from smqrt.net.refusals import Refusals

log = logging.getLogger("smqrt")

MAX_JOBS, MAX_BYTES = 10_000, 16 << 20
"""What may wait for the loop."""
PORTION_S = 0.004

_new_lock = monkey.get_original("_thread", "allocate_lock")  # gevent's own is for greenlets of one thread


class Inlet:
    """A bounded queue of calls that threads make and the loop works off, in order. Made in the loop's thread.

    Attributes:
        refusals: counts the calls that were one too many.
    """

    def __init__(self) -> None:
        self._jobs: deque[tuple[int, Callable[..., object], tuple[Any, ...]]] = deque()
        self._bytes = 0
        self.refusals = Refusals()
        self._lock = _new_lock()
        loop: Any = get_hub().loop
        self._wake = loop.async_()
        self._wake.ref = False
        self._wake.start(self._work)

    def put(self, size_bytes: int, function: Callable[..., object], *arguments: object) -> bool:
        """Have `function(*arguments)` called by the loop, soon; false when too much waits already. From any thread."""
        with self._lock:
            if len(self._jobs) >= MAX_JOBS or self._bytes + size_bytes > MAX_BYTES:
                self.refusals.add("threads hand in more than the loop takes: a message was refused")
                return False
            self._jobs.append((size_bytes, function, arguments))
            self._bytes += size_bytes
        self._wake.send()
        return True

    def drain(self) -> None:
        """Make all calls that wait; in the loop's thread only."""
        while self._next():
            pass

    def _work(self) -> None:
        until_s = monotonic() + PORTION_S
        while self._next():
            if monotonic() >= until_s:
                self._wake.send()  # the others have a turn
                return

    def _next(self) -> bool:
        with self._lock:
            if not self._jobs:
                return False
            size_bytes, function, arguments = self._jobs.popleft()
            self._bytes -= size_bytes
        try:
            function(*arguments)
        except Exception:
            log.exception("error in what a thread handed in")
        return True
