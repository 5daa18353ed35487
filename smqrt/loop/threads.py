"""Threads for work that blocks and is not gevent's: a bounded number, shared by groups, answering by `Deferred`s.

gevent's own pool costs twice as much for a job of some ten microseconds: it makes a watcher for each, where this one
wakes the loop once for all that are done (measured with SQLite: 105 against 190 us for three jobs).
"""

from __future__ import annotations

import logging
from _queue import Empty, SimpleQueue
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

from gevent import get_hub, monkey
from gevent.hub import Hub, Waiter
from greenlet import getcurrent

from smqrt.broker.deferred import Deferred
from smqrt.loop.readiness import TimedDeferred
from smqrt.loop.scheduling import share
from smqrt.settings.limit_register import Limit

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


# ---- Threads for what waits for disks: a few for each, so that one which hangs takes no threads but its own.

log = logging.getLogger("smqrt")

THREADS = 4  # of one disk
MAX_WAITING = 1000  # jobs for one disk that no thread has begun
PATIENCE_S = 60.0
"""How long a job is waited for, from when it is handed in. A network disk that lost its server comes back within a
minute or not at all."""
DISK_IDLE_S = 5.0  # then a thread ends
_RETURNS = "smqrt_disk_returns"  # the attribute of the hub


_new_lock = monkey.get_original("_thread", "allocate_lock")
_start_disk_thread = monkey.get_original("_thread", "start_new_thread")


class DiskJob(TimedDeferred[Any]):
    """A call in a thread: resolved with its value, rejected with its error or, when it takes too long, with
    `TimeoutError`.

    Args:
        function: is called with `args` in a thread.
        must_run: it is run also when nobody waits for it any more.

    Attributes:
        after: called in the loop when the thread is through with it, also when nobody waits any more.
        discard: called in the loop with a value that nobody waits for any more.
    """

    __slots__ = ("after", "args", "discard", "function", "must_run", "outcome")

    def __init__(self, function: Callable[..., Any], *args: object, must_run: bool = False) -> None:
        super().__init__(PATIENCE_S)
        self.function, self.args, self.must_run = function, args, must_run
        self.outcome: tuple[Any, BaseException | None] = None, None
        self.after: Callable[[], object] | None = None
        self.discard: Callable[[Any], object] | None = None

    def run(self) -> None:
        """Do it; in the thread."""
        if self.done and not self.must_run:
            return
        try:
            value = self.function(*self.args)
        except BaseException as error:
            self.outcome = None, error.with_traceback(None)  # it would keep the frames of this thread
        else:
            if self.done and self.discard is None:
                value = None  # a file that nobody wants is closed here
            self.outcome = value, None

    def finish(self) -> None:
        """Tell whoever waits; in the loop."""
        value, error = self.outcome
        self.outcome = None, None
        if self.after is not None:  # first: who waits may want to go on with the same file at once
            self.after()
        if self.done and self.discard is not None and value is not None:
            self.discard(value)
        if error is None:
            self.resolve(value)
        else:
            self.reject(error)

    def _expired(self) -> None:
        self.reject(TimeoutError("the disk did not answer"))


class _Returns:
    """Where threads put jobs that are done, for one hub."""

    def __init__(self, hub: Hub) -> None:
        self._done: deque[DiskJob] = deque()
        self._share = share()
        loop: Any = hub.loop
        self._wake = loop.async_()
        self._wake.ref = False
        self._wake.start(self._work)

    def put(self, job: DiskJob) -> None:
        """From any thread."""
        self._done.append(job)
        self._wake.send()

    def _work(self) -> None:
        while self._done:
            if self._share.spent():
                self._share.later(self._work)
                return
            try:
                self._done.popleft().finish()
            except Exception:  # the others wait as well
                log.exception("error behind a file operation")


def _returns() -> _Returns:
    hub = get_hub()
    found: _Returns | None = getattr(hub, _RETURNS, None)
    if found is None:
        found = _Returns(hub)
        setattr(hub, _RETURNS, found)
    return found


DISK_JOBS = Limit("disk_jobs", "", f"{MAX_WAITING} operations wait for one disk already")


class DiskThreads:
    """The threads of one disk; they come when there is work, and go.

    Args:
        name: of the disk, for the log.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[tuple[DiskJob, _Returns]] = SimpleQueue()
        self._lock = _new_lock()
        self._threads = self._idle = self._waiting = 0

    def submit(self, job: DiskJob) -> DiskJob:
        """Have a thread do a job, which is returned."""
        with self._lock:
            is_full = self._waiting >= MAX_WAITING and not job.must_run
            if not is_full:
                self._waiting += 1
                self._jobs.put((job, _returns()))
                is_short = self._waiting > self._idle and self._threads < THREADS
                self._threads += is_short
        if is_full:
            DISK_JOBS.refused(f"a file operation on the disk {self._name}")
            job.outcome = None, TimeoutError("too many wait for this disk")
            job.finish()
        elif is_short:
            _start_disk_thread(self._work, ())
        return job

    def call(self, function: Callable[..., T], *args: object) -> T:
        """Give what a function gives that is called in a thread; blocks this greenlet. Raises what the function raises,
        TimeoutError when it takes too long."""
        job = self.submit(DiskJob(function, *args))
        hub = get_hub()
        assert getcurrent() is not hub, "the Hub greenlet can't wait"
        waiter: Waiter[None] = Waiter(hub)
        if not job.done:
            job.then(lambda value, error: waiter.switch(None))
            try:
                waiter.get()
            finally:
                job.cancel()
        return cast(T, job.result())

    def _work(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            try:
                job, returns = self._jobs.get(True, DISK_IDLE_S)
            except Empty:
                with self._lock:
                    self._idle -= 1
                    if self._jobs.empty():
                        self._threads -= 1
                        return
                    continue
            with self._lock:
                self._idle -= 1
                self._waiting -= 1
            job.run()
            returns.put(job)
            del job, returns
