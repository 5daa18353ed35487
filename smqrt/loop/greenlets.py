"""Pooled greenlets, callback queues and rate limits for logged errors.

The parent of a pooled greenlet is the Hub greenlet of gevent, which calls the callbacks of watchers. A job that is
started there runs at once, without a turn of the loop. That takes less than 1 us; `gevent.spawn` takes about 20 us.
When the job ends or blocks, the Hub greenlet continues after `start`. When it ends, the greenlet returns to the pool.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable
from sys import getrefcount
from time import monotonic
from types import CodeType, TracebackType
from typing import Any, TypeVar

import gevent
from gevent import get_hub
from gevent.event import AsyncResult, Event
from gevent.hub import Hub, Waiter
from greenlet import GreenletExit, getcurrent, greenlet

from smqrt.broker.deferred import Deferred
from smqrt.loop.scheduling import Turn
from smqrt.printable import place_of

log = logging.getLogger("smqrt")

MAX_IDLE = 256  # after a burst, greenlets beyond this end; each holds a few KB of stack
_POOL = "smqrt_idle_greenlets"  # the attribute of a hub with its pool; each thread has a hub
_REFERENCED = "smqrt_referenced_greenlets"

T = TypeVar("T")
Job = tuple[Callable[..., object], tuple[Any, ...]]


def start(fn: Callable[..., object], *args: object) -> None:
    """Run `fn(*args)` in a pooled greenlet, where it may block.

    If the caller is the Hub greenlet, the function runs at once, and this call returns when the function ends or first
    blocks. Otherwise it is scheduled for the next turn of the loop. Its exceptions are logged with a traceback.
    """
    hub = get_hub()
    if getcurrent() is hub:
        _switch_to_pooled(hub, (fn, args))
    else:
        hub.loop.run_callback(_switch_to_pooled, hub, (fn, args))


def call(fn: Callable[..., T], *args: object) -> T | Deferred[T]:
    """Run `fn(*args)` as `start` does and return its value.

    Returns:
        The value if `fn` ended without blocking, which is possible only in the Hub greenlet; otherwise a `Deferred`.

    Raises:
        Exception: the error of `fn`, if it did not block first; later errors reject the `Deferred`.
    """
    pending: Deferred[T] = Deferred()
    start(_settle, pending, fn, args)
    if not pending.done:
        return pending
    return pending.result()


def wait(pending: Deferred[T]) -> T:
    """Block this greenlet until `pending` is settled, and return its value.

    Raises:
        BaseException: the error with which the `Deferred` was rejected.
    """
    if not pending.done:
        hub = get_hub()
        waiter: Waiter[None] = Waiter(hub)

        def wake(value: T | None, error: BaseException | None) -> None:
            hub.loop.run_callback(waiter.switch, None)

        pending.then(wake)
        waiter.get()
    return pending.result()


def in_hub(fn: Callable[..., T], *args: object) -> T:
    """Call `fn(*args)` in the Hub greenlet, where it must not block, and return its value. Raises its errors."""
    waiter: Waiter[T] = Waiter()

    def run() -> None:
        try:
            value = fn(*args)
        except Exception as error:
            waiter.throw(error)
        else:
            waiter.switch(value)

    get_hub().loop.run_callback(run)
    return waiter.get()


def _settle(pending: Deferred[T], fn: Callable[..., T], args: tuple[object, ...]) -> None:
    try:
        value = fn(*args)
    except Exception as error:
        pending.reject(error)
    except BaseException as error:
        pending.reject(error)
        raise
    else:
        pending.resolve(value)


def _switch_to_pooled(hub: Hub, job: Job) -> None:
    """Run a job in an idle greenlet of the pool, or in a new one.

    An idle greenlet with other references is not used again. An earlier job left a `gevent.Timeout` open, or passed its
    greenlet on; an exception thrown into it would hit another job. The pool itself has no further reference.
    """
    idle: list[greenlet] = getattr(hub, _POOL, None) or _pool(hub)
    while idle:
        pooled = idle.pop()
        if getrefcount(pooled) <= _OWN_REFERENCES:
            break
        _set_aside(hub, pooled)
    else:
        pooled = greenlet(_run_jobs, hub)
    pooled.switch(job)


_OWN_REFERENCES = 2  # the local variable above, and the argument of getrefcount


def _set_aside(hub: Hub, pooled: greenlet) -> None:
    """Keep a greenlet that has other references; end the kept ones that no longer have any.

    Ending a greenlet switches to it. Otherwise this would happen where the last reference is removed, for example in
    the garbage collector during a call from Lua.
    """
    aside: list[greenlet] = getattr(hub, _REFERENCED, [])
    setattr(hub, _REFERENCED, aside)
    for _ in range(len(aside)):
        former = aside.pop(0)
        if getrefcount(former) > _OWN_REFERENCES:
            aside.append(former)
        else:
            former.throw(GreenletExit)
    aside.append(pooled)


def _pool(hub: Hub) -> list[greenlet]:
    pool: list[greenlet] | None = getattr(hub, _POOL, None)
    if pool is None:
        pool = []
        setattr(hub, _POOL, pool)
    return pool


def _run_jobs(job: Job | None) -> None:
    """Run jobs one after the other; between jobs the greenlet is idle in the pool."""
    hub = get_hub()
    idle = _pool(hub)
    name = ""
    while True:
        if job is not None:  # None: a late wake-up of an earlier job
            fn, args = job
            name = getattr(args[1] if fn is _settle else fn, "__qualname__", "a job")
            _run(hub, fn, args)
            del fn, args
            if len(idle) >= MAX_IDLE:
                return
            idle.append(getcurrent())
        job = None  # keeps neither the function nor its arguments alive while idle
        try:
            job = hub.switch()
        except BaseException as error:  # thrown by an object that an earlier job left open, such as a Timeout
            me = getcurrent()
            if me in idle:
                idle.remove(me)
            if not isinstance(error, GreenletExit):
                log.error("%s has ended, and an object that it left open raised %r: close it, use `with`", name, error)
            return


def _run(hub: Hub, fn: Callable[..., object], args: tuple[Any, ...]) -> None:
    try:
        fn(*args)
    except GreenletExit:
        pass  # the job was killed
    except Exception:
        log.exception("error in %s", getattr(fn, "__qualname__", fn))
    except BaseException as error:  # SystemExit, KeyboardInterrupt: raised in the main greenlet
        hub.handle_error(fn, type(error), error, error.__traceback__)


# ---- Callback queue of an application

Answer = TypeVar("Answer")

MAX_WAITING_JOBS = 1000
"""Above this number, the connection is not read: a slow callback must slow the broker, not fill the memory."""


class Callbacks:
    """Runs callbacks one after the other. A callback may block, and may call any method of the client.

    Args:
        log: the logger for exceptions of callbacks.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._jobs: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._wake = Event()
        self._room = Event()
        self._room.set()
        self._greenlet: gevent.Greenlet[..., Any] | None = None

    def post(self, fn: Callable[..., object], *args: object) -> None:
        """Run `fn(*args)` after all jobs that were posted before; an exception is logged with its traceback."""
        self._jobs.append((fn, args))
        if len(self._jobs) == MAX_WAITING_JOBS:
            self._room.clear()
        if not self._wake.is_set():
            self._wake.set()
        if self._greenlet is None:
            self._greenlet = gevent.spawn(self._run)

    def ask(self, fn: Callable[..., Answer], *args: object) -> Answer | None:
        """Run `fn(*args)` in its turn and wait for its result; None if it failed, which is logged."""
        return self.ask_later(fn, *args).get()

    def ask_later(self, fn: Callable[..., Answer], *args: object) -> AsyncResult[Answer | None]:
        """Run `fn(*args)` in its turn, and return its future result; None if it failed, which is logged."""
        answer: AsyncResult[Answer | None] = AsyncResult()

        def job() -> None:
            try:
                answer.set(fn(*args))
            except (Exception, gevent.Timeout):
                self._log.exception("a callback failed: %s", place_of(fn))
            finally:
                if not answer.ready():
                    answer.set(None)

        self.post(job)
        return answer

    @property
    def is_current(self) -> bool:
        """Whether the caller is a callback. A callback must not wait for another one: it would wait forever."""
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
        """End after the jobs that are posted already."""
        self.post(_stop)

    def _run(self) -> None:
        is_over = False
        try:
            while not is_over:
                try:
                    is_over = self._run_jobs()
                except (Exception, gevent.Timeout) as error:
                    # A callback's Timeout may be raised after the callback has ended. The traceback does not have the
                    # function when it was called with arguments that do not fit.
                    jobs = error.__traceback__.tb_next if error.__traceback__ else None
                    fn = jobs.tb_frame.f_locals.get("fn") if jobs else None
                    self._log.exception("a callback failed: %s", place_of(fn))
        finally:
            self._greenlet = None
            if not is_over and self._jobs:  # a callback killed this greenlet: another one runs the remaining jobs
                self._greenlet = gevent.spawn(self._run)

    def _run_jobs(self) -> bool:
        """Run jobs until `_stop`, then return True. An exception of a job ends the call, too."""
        jobs, turn = self._jobs, Turn()
        while True:
            self._wake.wait()
            while jobs:
                fn, args = jobs.popleft()
                # At half the limit, so that a connection is not paused and resumed for each message.
                if len(jobs) < MAX_WAITING_JOBS // 2 and not self._room.is_set():
                    self._room.set()
                if fn is _stop:
                    return True
                fn(*args)
                turn.yield_if_due()
            self._wake.clear()


def _stop() -> None:
    """The last job of a queue, which is compared and not called."""


# ---- Rate limit for logged errors that remote clients can cause

ERRORS_PER_S = 10  # of each callback, since a client can repeat a message that causes an error


class ErrorLimit:
    """Limits the logged errors of one callback to `ERRORS_PER_S`, and counts the others."""

    __slots__ = ("_second_ends_s", "_shown", "_suppressed")

    def __init__(self) -> None:
        self._second_ends_s = 0.0
        self._shown = self._suppressed = 0

    def line_suffix(self) -> str | None:
        """Return a suffix for the line of an error, with the number of suppressed ones; None to suppress this error."""
        now_s = monotonic()
        if now_s >= self._second_ends_s:
            self._second_ends_s, self._shown = now_s + 1, 0
        if self._shown >= ERRORS_PER_S:
            self._suppressed += 1
            return None
        suffix = f" ({self._suppressed} more are not shown)" if self._suppressed else ""
        self._shown, self._suppressed = self._shown + 1, 0
        return suffix


def limit_errors_of_greenlets() -> None:
    """Limit the errors that gevent prints on standard error, for each line of code that raises them."""
    hub: Any = get_hub()
    print_all, limits = hub.print_exception, defaultdict[tuple[CodeType, int] | None, ErrorLimit](ErrorLimit)

    def print_exception(context: Any, kind: Any, error: Any, traceback: TracebackType | None) -> None:
        innermost = traceback
        while innermost is not None and innermost.tb_next is not None:
            innermost = innermost.tb_next
        # A program has a bounded number of lines, so this dictionary is bounded as well.
        raised_at = (innermost.tb_frame.f_code, innermost.tb_lineno) if innermost is not None else None
        if (suffix := limits[raised_at].line_suffix()) is not None:
            print_all(f"{context!r}{suffix}" if suffix else context, kind, error, traceback)

    hub.print_exception = print_exception
