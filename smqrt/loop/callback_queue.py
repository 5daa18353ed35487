"""Callbacks of an application, run in one greenlet, in order, away from the connection."""

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
"""With more jobs waiting the connection is not read: a slow callback slows the broker down, not the memory up."""


class Callbacks:
    """Runs jobs one after the other. A callback may block and may call any method of the client.

    Args:
        log: takes what callbacks raise.
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
        """Run `fn(*args)` in its turn and wait for its answer; None when it failed, which is logged."""
        return self.ask_later(fn, *args).get()

    def ask_later(self, fn: Callable[..., Answer], *args: object) -> AsyncResult[Answer | None]:
        """Run `fn(*args)` in its turn; its answer, None when it failed, will be in what is returned now."""
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
        """Whether a callback is asking, which had better not wait for another one."""
        return self._greenlet is not None and gevent.getcurrent() is self._greenlet

    @property
    def waiting(self) -> int:
        """How many jobs wait for their turn."""
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
                    is_over = self._work()
                except (Exception, gevent.Timeout):  # a Timeout may come later than the callback that left it behind
                    self._log.exception("a callback failed")
        finally:
            self._greenlet = None
            if not is_over and self._jobs:  # a callback ended its greenlet: the others have a right to theirs
                self._greenlet = gevent.spawn(self._run)

    def _work(self) -> bool:
        """Do what comes, until a job fails, or the last one is done: true."""
        jobs, turn = self._jobs, Turn()
        while True:
            self._wake.wait()
            while jobs:
                fn, args = jobs.popleft()
                if len(jobs) < ROOM_JOBS // 2 and not self._room.is_set():
                    self._room.set()
                if fn is _stop:
                    return True
                fn(*args)
                turn.yield_if_due()
            self._wake.clear()


def _stop() -> None:
    """The job that ends it."""
