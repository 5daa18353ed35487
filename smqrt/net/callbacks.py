"""Where an application's callbacks run: one greenlet, in order, away from the connection."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import gevent
from gevent.event import AsyncResult, Event

from smqrt.net.turn import Turn

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

    def post(self, fn: Callable[..., Any], *args: Any) -> None:
        """Run `fn(*args)` after everything posted before; an exception is logged with its traceback."""
        self._jobs.append((fn, args))
        if len(self._jobs) == ROOM_JOBS:
            self._room.clear()
        if not self._wake.is_set():
            self._wake.set()
            if self._greenlet is None:
                self._greenlet = gevent.spawn(self._run)

    def ask(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run `fn(*args)` in its turn and wait for its answer; None when it failed, which is logged."""
        answer: AsyncResult[Any] = AsyncResult()
        self.post(lambda: answer.set(self._guarded(fn, args)))
        return answer.get()

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
        jobs, turn = self._jobs, Turn()
        while True:
            self._wake.wait()
            while jobs:
                fn, args = jobs.popleft()
                if fn is _stop:
                    self._greenlet = None
                    return
                self._guarded(fn, args)
                if len(jobs) < ROOM_JOBS // 2 and not self._room.is_set():
                    self._room.set()
                turn.breathe()
            self._wake.clear()

    def _guarded(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        try:
            return fn(*args)
        except Exception:
            self._log.exception("a callback failed")
            return None


def _stop() -> None:
    """The job that ends it."""
