"""Threads for work that blocks and is not gevent's: a bounded number, shared by groups, answering by `Deferred`s.

gevent's own pool costs twice as much for a job of some ten microseconds: it makes a watcher for each, where this one
wakes the loop once for all that are done (measured with SQLite: 105 against 190 us for three jobs).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from gevent import get_hub, monkey

from smqrt.broker.deferred import Deferred

T = TypeVar("T")

IDLE_S = 10.0
"""A thread that has had nothing to do for so long ends."""
QUICK = 2
"""So many quick jobs of a group run at a time. With more, threads mostly wait for Python's lock: SQLite pages take 40 %
more CPU with eight (measured on two cores)."""
SLOW_S = 0.005
"""A job that takes longer is no quick one: it does not count as one of `QUICK`."""

_Queue: Any = monkey.get_original("queue", "SimpleQueue")
_Empty: type[Exception] = monkey.get_original("queue", "Empty")
_start_thread: Callable[..., int] = monkey.get_original("_thread", "start_new_thread")


class _Group:
    """Whose jobs they are: those that wait, and how many run and are slow."""

    __slots__ = ("running", "slow", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[_Job] = deque()
        self.running = self.slow = 0


class _Job:
    __slots__ = ("answer", "arguments", "error", "function", "group", "is_slow", "key", "tick", "value")

    def __init__(self, key: Hashable, group: _Group, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.key, self.group, self.function, self.arguments = key, group, function, arguments
        self.answer: Deferred[Any] = Deferred()
        self.value: Any = None
        self.error: BaseException | None = None
        self.tick, self.is_slow = 0, False


class Threads:
    """Made and used in the thread of a loop; threads begin when there is work.

    Args:
        limit: how many threads there are at most.
        per_group: how many jobs of one group run at a time; the others wait, and do not hold those of other groups.
    """

    def __init__(self, limit: int, per_group: int) -> None:
        self._limit, self._per_group = limit, per_group
        self._jobs = _Queue()
        self._done: deque[_Job | None] = deque()
        self._threads = 0
        self._groups: dict[Hashable, _Group] = {}
        self._running: set[_Job] = set()
        loop: Any = get_hub().loop
        self._wake = loop.async_()
        self._wake.ref = False
        self._wake.start(self._collect)
        self._tick = 0
        self._timer = loop.timer(SLOW_S, SLOW_S)

    @property
    def count(self) -> int:
        """How many threads there are at the moment."""
        return self._threads

    def submit(self, key: Hashable, function: Callable[..., T], *arguments: object) -> Deferred[T]:
        """Have a thread call `function(*arguments)`; jobs of a group begin in their order.

        Args:
            key: the group.

        Returns:
            its value, or rejected with what it raised. To cancel it does not stop the function.
        """
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group()
        job = _Job(key, group, function, arguments)
        group.waiting.append(job)
        self._advance(group)
        if group.waiting and not self._timer.active:
            self._timer.start(self._look)
        return job.answer

    def _advance(self, group: _Group) -> None:
        """Begin what may begin."""
        while group.waiting and group.running < self._per_group and group.running - group.slow < QUICK:
            job = group.waiting.popleft()
            group.running += 1
            job.tick = self._tick
            if not self._running:
                self._wake.ref = True  # whoever waits for the job alone has something to wait for
            self._running.add(job)
            self._jobs.put(job)
            self._grow()

    def _grow(self) -> None:
        if len(self._running) > self._threads and self._threads < self._limit:
            self._threads += 1
            _start_thread(_work, (self._jobs, self._done, self._wake))

    def _look(self) -> None:
        """Jobs that have run for longer than a tick are slow, and others may begin beside them."""
        for job in self._running:
            if job.tick < self._tick and not job.is_slow:
                job.is_slow = True
                job.group.slow += 1
        self._tick += 1
        waiting = [group for group in self._groups.values() if group.waiting]
        for group in waiting:
            self._advance(group)
        if not waiting:
            self._timer.stop()

    def _collect(self) -> None:
        while self._done:
            job = self._done.popleft()
            if job is None:  # a thread has ended, maybe while a job was posted for it
                self._threads -= 1
                self._grow()
            else:
                self._finish(job)
        if not self._running:
            self._wake.ref = False

    def _finish(self, job: _Job) -> None:
        group = job.group
        self._running.discard(job)
        group.running -= 1
        group.slow -= job.is_slow
        self._advance(group)
        if not group.running and not group.waiting:
            del self._groups[job.key]
        if job.error is not None:
            job.answer.reject(job.error)
        else:
            job.answer.resolve(job.value)


def _work(jobs: Any, done: deque[_Job | None], wake: Any) -> None:
    """Body of a thread."""
    while True:
        try:
            job = jobs.get(timeout=IDLE_S)
        except _Empty:
            done.append(None)
            wake.send()
            return
        try:
            job.value = job.function(*job.arguments)
        except BaseException as error:
            job.error = error
        done.append(job)
        del job
        wake.send()
