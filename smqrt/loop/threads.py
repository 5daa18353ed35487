"""Threads for blocking work, and calls from threads into the loop.

| for | use |
|---|---|
| a short blocking call | `in_thread`, in the threads that the process shares |
| long jobs of one owner, or jobs that need one thread | `DedicatedThreads` |
| files, which a dead network disk can block for minutes | `DiskThreads`, one for each disk or purpose |
| many jobs of some ten microseconds, of several groups | `Threads` |
| a call from a thread of an application | `Inlet` |
| a thread that must run while the loop is blocked | `start_thread` |

Results and errors are delivered in the loop, except those of the last row.
"""

from __future__ import annotations

import logging
from _queue import Empty, SimpleQueue
from collections import deque
from collections.abc import Callable, Hashable
from time import monotonic
from typing import Any, NamedTuple, TypeVar, cast

from gevent import get_hub, monkey
from gevent.event import AsyncResult
from gevent.hub import Hub, Waiter
from gevent.threadpool import ThreadPool
from greenlet import getcurrent

from smqrt.broker.deferred import Deferred
from smqrt.loop.scheduling import TimedDeferred, share
from smqrt.settings.limits import Limit

log = logging.getLogger("smqrt")

T = TypeVar("T")

# The original functions: gevent replaces them in the standard library by versions for greenlets.
start_thread: Callable[..., int] = monkey.get_original("_thread", "start_new_thread")
"""Start a thread of the operating system: `start_thread(function, arguments)`, with the arguments in a tuple."""
new_lock: Callable[[], Any] = monkey.get_original("_thread", "allocate_lock")
"""Return a new lock for threads of the operating system."""
block_thread: Callable[[float], None] = monkey.get_original("time", "sleep")
"""Block this thread, with all of its greenlets, for some seconds."""


class Awaited:
    """The number of results that this process awaits from threads. While there are any, the loop must take turns."""

    results = 0


# ---- A single call


def in_thread(function: Callable[..., T], *args: object) -> T:
    """Call `function(*args)` in a shared thread, and return its value; blocks this greenlet. Raises its errors.

    gevent prints the stack of every error that leaves a thread of its pool, even if the error is handled. Therefore
    errors are passed as results.
    """
    return in_pool(get_hub().threadpool, function, *args)


def in_pool(pool: ThreadPool, function: Callable[..., T], *args: object) -> T:
    """Do the same as `in_thread`, in a thread of another pool."""
    Awaited.results += 1
    try:
        result = pool.apply(_catch, (function, args))
        if isinstance(result, _Raised):
            raise result.error
        return cast(T, result)
    finally:
        Awaited.results -= 1
        result = None  # breaks a reference cycle: the traceback of the error has this frame


class _Raised(NamedTuple):
    error: Exception


def _catch(function: Callable[..., T], args: tuple[object, ...]) -> T | _Raised:
    try:
        return function(*args)
    except Exception as error:
        return _Raised(error)


class DedicatedThreads:
    """Threads of one owner, for jobs that are long or need the same thread. They start with the first job.

    Args:
        count: the number of threads; further jobs wait.
    """

    def __init__(self, count: int = 1) -> None:
        self._pool = ThreadPool(count)

    def call(self, function: Callable[..., T], *args: object) -> T:
        """Call `function(*args)` in a thread, and return its value; blocks this greenlet. Raises its errors."""
        return in_pool(self._pool, function, *args)

    def submit(self, function: Callable[..., T], *args: object) -> AsyncResult[T]:
        """Call `function(*args)` in a thread, and return its future value; blocks only when all threads are busy."""
        return cast("AsyncResult[T]", self._pool.spawn(function, *args))

    def close(self) -> None:
        """End the threads, which must be idle."""
        self._pool.kill()


# ---- Short jobs of several groups
#
# The pool of gevent takes twice as long for a job of about 10 us, since it makes a watcher for each job. This one wakes
# the loop once for all finished jobs (measured with SQLite: 105 us instead of 190 us for three jobs).

IDLE_S = 10.0
"""A thread ends after this time without work."""
QUICK = 2
"""The maximum number of quick jobs of a group that run at a time. With more, threads mostly wait for the global
interpreter lock: with eight, pages with SQLite take 40 % more CPU time (measured on two cores)."""
SLOW_S = 0.005
"""A job that takes longer is slow, and does not count for `QUICK`."""


class _Group:
    """The waiting jobs of one key, and the numbers of its running and slow jobs."""

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
    """A bounded number of threads that groups of jobs share; used in the thread of a loop.

    Args:
        limit: the maximum number of threads.
        per_group: the maximum number of running jobs of one group; further jobs wait, and do not delay other groups.
    """

    def __init__(self, limit: int, per_group: int) -> None:
        self._limit, self._per_group = limit, per_group
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
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
        """The current number of threads."""
        return self._threads

    def submit(self, key: Hashable, function: Callable[..., T], *arguments: object) -> Deferred[T]:
        """Call `function(*arguments)` in a thread; jobs of a group begin in their order.

        Args:
            key: the group.
            function: called in a thread.
            arguments: its arguments.

        Returns:
            The future value or error of the function. To cancel it does not stop the function.
        """
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group()
        job = _Job(key, group, function, arguments)
        group.waiting.append(job)
        self._advance(group)
        if group.waiting and not self._timer.active:
            self._timer.start(self._mark_slow)
        return job.answer

    def _advance(self, group: _Group) -> None:
        """Begin waiting jobs, up to the limits."""
        while group.waiting and group.running < self._per_group and group.running - group.slow < QUICK:
            job = group.waiting.popleft()
            group.running += 1
            job.tick = self._tick
            if not self._running:
                self._wake.ref = True  # keeps the loop running, also when a greenlet waits for this job only
            self._running.add(job)
            Awaited.results += 1
            self._jobs.put(job)
            self._grow()

    def _grow(self) -> None:
        if len(self._running) > self._threads and self._threads < self._limit:
            self._threads += 1
            start_thread(_run_jobs, (self._jobs, self._done, self._wake))

    def _mark_slow(self) -> None:
        """Mark jobs that have run for more than a tick as slow, so that other jobs of their groups may begin."""
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
            if job is None:  # a thread has ended, perhaps while a job was queued for it
                self._threads -= 1
                self._grow()
                continue
            group = job.group
            self._running.discard(job)
            Awaited.results -= 1
            group.running -= 1
            group.slow -= job.is_slow
            self._advance(group)
            if not group.running and not group.waiting:
                del self._groups[job.key]
            if job.error is not None:
                job.answer.reject(job.error)
            else:
                job.answer.resolve(job.value)
        if not self._running:
            self._wake.ref = False


def _run_jobs(jobs: SimpleQueue[_Job], done: deque[_Job | None], wake: Any) -> None:
    while True:
        try:
            job = jobs.get(timeout=IDLE_S)
        except Empty:
            done.append(None)
            wake.send()
            return
        try:
            job.value = job.function(*job.arguments)
        except BaseException as error:
            job.error = error
        done.append(job)
        del job  # not kept alive while this thread waits
        wake.send()


# ---- Jobs that wait for a disk: each disk has separate threads, so that a dead disk does not block others

THREADS = 4  # the maximum for one disk
MAX_WAITING = 1000  # the maximum number of jobs of one disk that are not begun
JOB_TIMEOUT_S = 60.0
"""The timeout of a job, from its submission. A network disk that lost its server recovers within a minute, or not at
all."""
DISK_IDLE_S = 5.0  # a thread ends after this time without work
_RETURNS = "smqrt_disk_returns"  # the attribute of the hub


class DiskJob(TimedDeferred[Any]):
    """A call in a thread: resolved with its value, rejected with its error or, after `JOB_TIMEOUT_S`, `TimeoutError`.

    Args:
        function: called with `args` in a thread.
        args: its arguments.
        must_run: call the function even if the job has timed out or was cancelled.

    Attributes:
        after: called in the loop when the thread has finished the job, also after the timeout.
        discard: called in the loop with the value of a job that has timed out or was cancelled.
    """

    __slots__ = ("after", "args", "discard", "function", "must_run", "outcome")

    def __init__(self, function: Callable[..., Any], *args: object, must_run: bool = False) -> None:
        super().__init__(JOB_TIMEOUT_S)
        self.function, self.args, self.must_run = function, args, must_run
        self.outcome: tuple[Any, BaseException | None] = None, None
        self.after: Callable[[], object] | None = None
        self.discard: Callable[[Any], object] | None = None

    def run(self) -> None:
        """Call the function, in the thread."""
        if self.done and not self.must_run:
            return
        try:
            value = self.function(*self.args)
        except BaseException as error:
            self.outcome = None, error.with_traceback(None)  # which would keep the frames of this thread alive
        else:
            if self.done and self.discard is None:
                value = None  # the last reference, so that a file is closed in this thread, not in the loop
            self.outcome = value, None

    def finish(self) -> None:
        """Deliver the outcome, in the loop."""
        value, error = self.outcome
        self.outcome = None, None
        if self.after is not None:  # before `resolve`, since the waiting code may use the same file at once
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
    """The finished jobs of one loop; threads add them, and the loop delivers them."""

    def __init__(self, hub: Hub) -> None:
        self._done: deque[DiskJob] = deque()
        self._share = share()
        loop: Any = hub.loop
        self._wake = loop.async_()
        self._wake.ref = False  # the timers of the jobs keep the loop running
        self._wake.start(self._deliver)

    @staticmethod
    def of_this_hub() -> _Returns:
        hub = get_hub()
        found: _Returns | None = getattr(hub, _RETURNS, None)
        if found is None:
            found = _Returns(hub)
            setattr(hub, _RETURNS, found)
        return found

    def put(self, job: DiskJob) -> None:
        """Add a job. From any thread."""
        self._done.append(job)
        self._wake.send()

    def _deliver(self) -> None:
        while self._done:
            if self._share.spent():
                self._share.later(self._deliver)
                return
            Awaited.results -= 1
            try:
                self._done.popleft().finish()
            except Exception:  # other jobs are still delivered
                log.exception("error after a file operation")


DISK_JOBS = Limit("disk_jobs", "", f"{MAX_WAITING} operations wait for one disk already")


class DiskThreads:
    """The threads of one disk; they start with work, and end after `DISK_IDLE_S` without work.

    Args:
        name: the name of the disk, for the log.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[tuple[DiskJob, _Returns]] = SimpleQueue()
        self._lock = new_lock()
        self._threads = self._idle = self._waiting = 0

    def submit(self, job: DiskJob) -> DiskJob:
        """Run a job in a thread, and return the job."""
        with self._lock:
            is_full = self._waiting >= MAX_WAITING and not job.must_run
            if not is_full:
                self._waiting += 1
                Awaited.results += 1
                self._jobs.put((job, _Returns.of_this_hub()))
                needs_thread = self._waiting > self._idle and self._threads < THREADS
                self._threads += needs_thread
        if is_full:
            DISK_JOBS.refused(f"a file operation on the disk {self._name}")
            job.outcome = None, TimeoutError("too many operations wait for this disk")
            job.finish()
        elif needs_thread:
            start_thread(self._run_jobs, ())
        return job

    def call(self, function: Callable[..., T], *args: object) -> T:
        """Call a function in a thread, and return its value; blocks this greenlet.

        Raises:
            Exception: the error of the function.
            TimeoutError: after `JOB_TIMEOUT_S`, or when too many jobs wait.
        """
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

    def _run_jobs(self) -> None:
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


# ---- Calls from other threads into the loop

MAX_INLET_CALLS, MAX_INLET_BYTES = 10_000, 16 << 20
"""The maximum number of waiting calls, and of the bytes of their messages."""
INLET_PORTION_S = 0.004
CALLS_OF_THREADS = Limit("calls_of_threads", "", "threads pass more calls than the loop handles (publish_threadsafe)")


class Inlet:
    """A bounded queue of calls from threads; the loop makes the calls in order. Create it in the thread of the loop."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[int, Callable[..., object], tuple[Any, ...]]] = deque()
        self._bytes = 0
        self._lock = new_lock()
        loop: Any = get_hub().loop
        self._wake = loop.async_()
        self._wake.ref = False  # an idle inlet does not keep the loop running
        self._wake.start(self._run_portion)

    def put(self, size_bytes: int, function: Callable[..., object], *arguments: object) -> bool:
        """Call `function(*arguments)` in the loop soon; return False when the queue is full. From any thread."""
        with self._lock:
            if len(self._jobs) >= MAX_INLET_CALLS or self._bytes + size_bytes > MAX_INLET_BYTES:
                CALLS_OF_THREADS.refused("a message of a thread")
                return False
            self._jobs.append((size_bytes, function, arguments))
            self._bytes += size_bytes
        self._wake.send()
        return True

    def drain(self) -> None:
        """Make all waiting calls; in the thread of the loop only."""
        while self._run_next():
            pass

    def _run_portion(self) -> None:
        until_s = monotonic() + INLET_PORTION_S
        while self._run_next():
            if monotonic() >= until_s:
                self._wake.send()  # sockets and timers are served before the next portion
                return

    def _run_next(self) -> bool:
        with self._lock:
            if not self._jobs:
                return False
            size_bytes, function, arguments = self._jobs.popleft()
            self._bytes -= size_bytes
        try:
            function(*arguments)
        except Exception:
            log.exception("error in a call from a thread")
        return True
