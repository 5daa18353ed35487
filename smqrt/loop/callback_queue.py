"""Queue of an application's callbacks, run in order in one greenlet of their own."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import gevent
from gevent.event import AsyncResult, Event

from smqrt.loop.scheduling import Turn

Answer = TypeVar("Answer")

ROOM_JOBS = 1000
"""With more waiting jobs, the connection is not read: a slow callback must slow the broker, not fill the memory."""


class Callbacks:
    """Runs jobs one after the other. A callback may block and may call any method of the client.

    Args:
        log: where exceptions of callbacks are logged.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._jobs: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._wake = Event()
        self._room = Event()
        self._room.set()
        self._greenlet: gevent.Greenlet[..., Any] | None = None

    def post(self, fn: Callable[..., object], *args: object) -> None:
        """Run `fn(*args)` after everything posted before; an exception is logged with its traceback."""
        self._jobs.append((fn, args))
        if len(self._jobs) == ROOM_JOBS:
            self._room.clear()
        if not self._wake.is_set():
            self._wake.set()
        if self._greenlet is None:
            self._greenlet = gevent.spawn(self._run)

    def ask(self, fn: Callable[..., Answer], *args: object) -> Answer | None:
        """Run `fn(*args)` in its turn and wait for its result; None when it failed, which is logged."""
        return self.ask_later(fn, *args).get()

    def ask_later(self, fn: Callable[..., Answer], *args: object) -> AsyncResult[Answer | None]:
        """Run `fn(*args)` in its turn, and return its future result; None when it failed, which is logged."""
        answer: AsyncResult[Answer | None] = AsyncResult()

        def job() -> None:
            try:
                answer.set(fn(*args))
            except (Exception, gevent.Timeout):
                self._log.exception("a callback failed")
            finally:
                if not answer.ready():
                    answer.set(None)

        self.post(job)
        return answer

    @property
    def is_current(self) -> bool:
        """Whether the caller is a callback; one that waited for another callback would wait forever."""
        return self._greenlet is not None and gevent.getcurrent() is self._greenlet

    @property
    def waiting(self) -> int:
        """The number of waiting jobs."""
        return len(self._jobs)

    @property
    def room(self) -> Event:
        """Set while the application keeps up."""
        return self._room

    @property
    def has_room(self) -> bool:
        """Whether the application keeps up."""
        return self._room.is_set()

    def wait_for_room(self) -> None:
        """Wait until the application has caught up."""
        self._room.wait()

    def finish(self) -> None:
        """End after the jobs posted so far."""
        self.post(_stop)

    def _run(self) -> None:
        is_over = False
        try:
            while not is_over:
                try:
                    is_over = self._run_jobs()
                except (Exception, gevent.Timeout):  # a callback's Timeout may be raised after the callback has ended
                    self._log.exception("a callback failed")
        finally:
            self._greenlet = None
            if not is_over and self._jobs:  # a callback killed this greenlet: another one runs the remaining jobs
                self._greenlet = gevent.spawn(self._run)

    def _run_jobs(self) -> bool:
        """Run jobs until `_stop`, then return True. The exception of a job ends it, too."""
        jobs, turn = self._jobs, Turn()
        while True:
            self._wake.wait()
            while jobs:
                fn, args = jobs.popleft()
                # At half the bound, so that a connection is not paused and resumed for each message.
                if len(jobs) < ROOM_JOBS // 2 and not self._room.is_set():
                    self._room.set()
                if fn is _stop:
                    return True
                fn(*args)
                turn.yield_if_due()
            self._wake.clear()


def _stop() -> None:
    """Mark the end in the queue of jobs."""
