"""Threads for what waits for disks: a few for each, so that one which hangs takes no threads but its own."""

from __future__ import annotations

import logging
from _queue import Empty, SimpleQueue  # not `queue`: gevent may have put its own there, which is for greenlets
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar, cast

from gevent import get_hub, monkey
from gevent.hub import Hub, Waiter
from greenlet import getcurrent

from smqrt.loop.readiness import TimedDeferred
from smqrt.loop.scheduling import share
from smqrt.settings.limit_register import Limit

log = logging.getLogger("smqrt")

THREADS = 4  # of one disk
MAX_WAITING = 1000  # jobs for one disk that no thread has begun
PATIENCE_S = 60.0
"""How long a job is waited for, from when it is handed in. A network disk that lost its server comes back within a
minute or not at all."""
IDLE_S = 5.0  # then a thread ends
_RETURNS = "smqrt_disk_returns"  # the attribute of the hub

T = TypeVar("T")

_new_lock = monkey.get_original("_thread", "allocate_lock")
_start_thread = monkey.get_original("_thread", "start_new_thread")


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
            _start_thread(self._work, ())
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
                job, returns = self._jobs.get(True, IDLE_S)
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
