"""Where an application's callbacks run: one greenlet, in order, with nothing locked, away from the socket."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import gevent
from gevent.event import AsyncResult, Event

log = logging.getLogger("smqrt.client")

_ROOM_JOBS = 1000
"""With more jobs waiting the reader pauses: a slow callback slows the broker down instead of filling the memory."""


class Dispatcher:
    """Runs jobs one after the other. A callback may block and may call any method of the client."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._wake = Event()
        self._room = Event()
        self._room.set()
        self._greenlet: gevent.Greenlet[..., Any] | None = None

    def post(self, fn: Callable[..., Any], *args: Any) -> None:
        """Run `fn(*args)` after everything posted before; an exception is logged with its traceback."""
        self._jobs.append((fn, args))
        if len(self._jobs) >= _ROOM_JOBS:
            self._room.clear()
        if self._greenlet is None:
            self._greenlet = gevent.spawn(self._run)
        self._wake.set()

    def ask(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run `fn(*args)` in its turn and wait for its answer; None when it failed (which is logged)."""
        answer: AsyncResult[Any] = AsyncResult()
        self.post(lambda: answer.set(_guarded(fn, args)))
        return answer.get()

    def wait_for_room(self) -> None:
        """Wait until the application has caught up."""
        self._room.wait()

    def finish(self) -> None:
        """End after the jobs posted so far."""
        self.post(_stop)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            while self._jobs:
                fn, args = self._jobs.popleft()
                if fn is _stop:
                    self._greenlet = None
                    return
                _guarded(fn, args)
            self._room.set()


def _stop() -> None:
    """The job that ends a dispatcher."""


def _guarded(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return fn(*args)
    except Exception:
        log.exception("a callback failed")
        return None
