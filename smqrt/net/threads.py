"""Threads for work that blocks and is not gevent's: a bounded number, shared by groups, answering by `Deferred`s.

gevent's own pool costs twice as much for a job of some ten microseconds: it makes a watcher for each, where this one
wakes the loop once for all that are done (measured with SQLite: 105 against 190 us for three jobs).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from gevent import get_hub, monkey

from smqrt.broker.deferred import Deferred

T = TypeVar("T")

IDLE_S = 10.0
"""A thread that has had nothing to do for so long ends."""

_Queue: Any = monkey.get_original("queue", "SimpleQueue")
_Empty: type[Exception] = monkey.get_original("queue", "Empty")
_start_thread: Callable[..., int] = monkey.get_original("_thread", "start_new_thread")

_Job = tuple[Hashable, Deferred[Any], Callable[..., Any], tuple[Any, ...]]
_Done = tuple[Hashable, Deferred[Any], Any, BaseException | None]


class Threads:
    """Made and used in the thread of a loop; threads begin when there is work.

    Args:
        limit: how many threads there are at most.
        per_group: how many jobs of one group run at a time; the others wait, and do not hold those of other groups.
    """

    def __init__(self, limit: int, per_group: int) -> None:
        self._limit, self._per_group = limit, per_group
        self._jobs = _Queue()
        self._done: deque[_Done | None] = deque()
        self._threads = 0
        self._posted = 0
        self._running: defaultdict[Hashable, int] = defaultdict(int)
        self._waiting: dict[Hashable, deque[_Job]] = {}
        loop: Any = get_hub().loop
        self._wake = loop.async_()
        self._wake.ref = False
        self._wake.start(self._collect)

    @property
    def count(self) -> int:
        """How many threads there are at the moment."""
        return self._threads

    def submit(self, group: Hashable, function: Callable[..., T], *arguments: object) -> Deferred[T]:
        """Have a thread call `function(*arguments)`; jobs of a group begin in their order.

        Returns:
            its value, or rejected with what it raised. To cancel it does not stop the function.
        """
        answer: Deferred[T] = Deferred()
        job = group, answer, function, arguments
        if self._running[group] >= self._per_group:
            self._waiting.setdefault(group, deque()).append(job)
        else:
            self._post(job)
        return answer

    def _post(self, job: _Job) -> None:
        self._running[job[0]] += 1
        if not self._posted:
            self._wake.ref = True  # whoever waits for the job alone has something to wait for
        self._posted += 1
        self._jobs.put(job)
        self._grow()

    def _grow(self) -> None:
        if self._posted > self._threads and self._threads < self._limit:
            self._threads += 1
            _start_thread(_work, (self._jobs, self._done, self._wake))

    def _collect(self) -> None:
        while self._done:
            done = self._done.popleft()
            if done is None:  # a thread has ended, maybe while a job was posted for it
                self._threads -= 1
                self._grow()
                continue
            group, answer, value, error = done
            self._posted -= 1
            self._advance(group)
            if error is not None:
                answer.reject(error)
            else:
                answer.resolve(value)
        if not self._posted:
            self._wake.ref = False

    def _advance(self, group: Hashable) -> None:
        self._running[group] -= 1
        if waiting := self._waiting.get(group):
            self._post(waiting.popleft())
            return
        self._waiting.pop(group, None)
        if not self._running[group]:
            del self._running[group]


def _work(jobs: Any, done: deque[_Done | None], wake: Any) -> None:
    """Body of a thread."""
    while True:
        try:
            group, answer, function, arguments = jobs.get(timeout=IDLE_S)
        except _Empty:
            done.append(None)
            wake.send()
            return
        try:
            done.append((group, answer, function(*arguments), None))
        except BaseException as error:
            done.append((group, answer, None, error))
        del answer, function, arguments
        wake.send()
