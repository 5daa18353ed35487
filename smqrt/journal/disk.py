"""The thread that works on a journal's disk: the event loop hands jobs over, and never waits for one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gevent import get_hub
from gevent.event import Event
from gevent.threadpool import ThreadPool

RETRY_S = 0.5


@dataclass(slots=True)
class _Job:
    kind: str
    work: Callable[[], object]
    done: Callable[[Exception | None], None]
    retries: bool
    since_s: float
    not_before_s: float = 0.0


class DiskThread:
    """Does jobs one after the other in a thread.

    A job is of a kind. Of each kind at most one runs and one waits, so that what waits is bounded by the kinds there
    are; nothing is skipped, since the one that waits does what is to be done when it runs.
    """

    def __init__(self) -> None:
        self._pool = ThreadPool(1)  # it is given one job at a time: handing it a third would wait, or raise in the loop
        self._waiting: dict[str, _Job] = {}
        self._running: _Job | None = None
        self._retry = get_hub().loop.timer(RETRY_S, ref=False)
        self._idle = Event()
        self._idle.set()

    def ask(
        self, kind: str, work: Callable[[], object], done: Callable[[Exception | None], None], retries: bool = True
    ) -> None:
        """Have a job done. One of the same kind that waits is replaced by it, and keeps its place.

        Args:
            kind: what it is about.
            work: the job, called in the thread.
            done: called in the loop with what `work` raised, or None.
            retries: what has failed is done again every `RETRY_S`, until it succeeds.
        """
        job = _Job(kind, work, done, retries, time.monotonic())
        if before := self._waiting.get(kind):
            job.since_s, job.not_before_s = before.since_s, before.not_before_s
        self._waiting[kind] = job
        self._idle.clear()
        self._next()

    def busy(self, kind: str) -> bool:
        """Says whether a job of a kind waits or runs."""
        return kind in self._waiting or bool(self._running and self._running.kind == kind)

    @property
    def jobs(self) -> int:
        """How many jobs wait or run."""
        return len(self._waiting) + bool(self._running)

    @property
    def age_s(self) -> float:
        """For how long the oldest job that is not done has been waiting; 0 when all are."""
        jobs = [*self._waiting.values(), *filter(None, [self._running])]
        return time.monotonic() - min(job.since_s for job in jobs) if jobs else 0.0

    def join(self, timeout_s: float) -> bool:
        """Waits until everything is done; returns whether it is. Blocks."""
        return bool(self._idle.wait(timeout_s))

    def close(self) -> None:
        """Ends the thread, unless it is in the middle of something; what waits is dropped."""
        self._waiting.clear()
        self._retry.stop()
        if self._running is None:
            self._pool.kill()

    def _next(self) -> None:
        if self._running is not None:
            return
        now_s = time.monotonic()
        ready = next((job for job in self._waiting.values() if job.not_before_s <= now_s), None)
        if ready is None:
            self._wait()
            return
        self._running = self._waiting.pop(ready.kind)
        self._pool.spawn(_error_of, ready.work).rawlink(self._ended)

    def _wait(self) -> None:
        if self._waiting:
            self._retry.stop()
            self._retry.start(self._next)
        else:
            self._idle.set()

    def _ended(self, result: Any) -> None:
        job, self._running = self._running, None
        assert job
        error: Exception | None = result.value
        if error is not None and job.retries:
            self._put_back(job)
        try:
            job.done(error)
        finally:
            self._next()

    def _put_back(self, job: _Job) -> None:
        newer = self._waiting.get(job.kind, job)
        newer.since_s, newer.not_before_s = job.since_s, time.monotonic() + RETRY_S
        self._waiting.setdefault(job.kind, job)


def _error_of(job: Callable[[], object]) -> Exception | None:
    """Does a job; what it raises is returned, since gevent would print it with its whole stack."""
    try:
        job()
    except Exception as error:
        return error
    return None
