"""Pooled greenlets for code that may block in gevent's way; threads for what waits for the disk, and the inlet for
calls that other threads hand to the loop.

A worker is a raw greenlet whose parent is the hub. Started from the Hub greenlet (that is, from a watcher's callback)
it runs at once, without a turn of the loop: handing over costs less than a microsecond, against some twenty for
`gevent.spawn`. When its function ends, the worker goes back to the pool and the Hub greenlet continues behind
`start`; when the function blocks, the Hub greenlet continues as well and the worker ends later.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from sys import getrefcount
from time import monotonic
from typing import Any, NamedTuple, TypeVar, cast

from gevent import get_hub, monkey
from gevent.hub import Hub, Waiter
from gevent.threadpool import ThreadPool
from greenlet import GreenletExit, getcurrent, greenlet

from smqrt.broker.deferred import Deferred
from smqrt.settings.limit_register import Limit

log = logging.getLogger("smqrt")

MAX_IDLE = 256  # a burst's workers beyond this end instead of waiting for work; each holds a few KB of stack
_ASIDE = "smqrt_workers_set_aside"
_POOL = "smqrt_idle_workers"  # the attribute of the hub that holds its pool: threads have hubs of their own

T = TypeVar("T")
Job = tuple[Callable[..., object], tuple[Any, ...]]


def start(fn: Callable[..., object], *args: object) -> None:
    """Run `fn(*args)` in a pooled greenlet, where it may block.

    In the Hub greenlet the function runs at once and this call returns when it ended or first blocked. Elsewhere it
    is scheduled for the next turn of the loop. An exception of the function is logged ("smqrt") with its traceback.
    """
    hub = get_hub()
    if getcurrent() is hub:
        _switch_into_worker(hub, (fn, args))
    else:
        hub.loop.run_callback(_switch_into_worker, hub, (fn, args))


def call(fn: Callable[..., T], *args: object) -> T | Deferred[T]:
    """Run `fn(*args)` as `start` does and give its value.

    Returns:
        the value, when `fn` ended without blocking (only possible when called in the Hub greenlet), else a `Deferred`
        of it.

    Raises:
        what `fn` raised, when it ended without blocking; otherwise the `Deferred` is rejected with it.
    """
    pending: Deferred[T] = Deferred()
    start(_settle, pending, fn, args)
    if not pending.done:
        return pending
    return pending.result()


def wait(pending: Deferred[T]) -> T:
    """Block this greenlet until `pending` is settled; gives the value.

    Raises:
        what the `Deferred` was rejected with.
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
    """Give what `fn(*args)` gives in the Hub greenlet, where watchers call; it must not block. Raises as `fn`."""
    waiter: Waiter[T] = Waiter()
    get_hub().loop.run_callback(_answer, waiter, fn, args)
    return waiter.get()


def _answer(waiter: Waiter[T], fn: Callable[..., T], args: tuple[object, ...]) -> None:
    try:
        value = fn(*args)
    except Exception as error:
        waiter.throw(error)
    else:
        waiter.switch(value)


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


def _switch_into_worker(hub: Hub, job: Job) -> None:
    """Give the job to an idle worker, or to a new one.

    An idle one that somebody still refers to isn't used again: a job left a `gevent.Timeout` open or handed its
    greenlet out, and what that throws would hit the job of a stranger. Nothing else keeps such a worker.
    """
    idle = _pool(hub)
    while idle:
        worker = idle.pop()
        if getrefcount(worker) <= _REFERENCES:
            break
        _set_aside(hub, worker)
    else:
        worker = greenlet(_work, hub)
    worker.switch(job)


_REFERENCES = 2  # the local variable above, and the argument of getrefcount


def _set_aside(hub: Hub, worker: greenlet) -> None:
    """Keep a worker that others refer to, and end those of before to whom nobody does any more.

    The end of a greenlet is a switch. Without this it would come wherever the last reference goes, for instance when
    the garbage collector runs in the middle of a call from Lua.
    """
    aside: list[greenlet] = getattr(hub, _ASIDE, [])
    setattr(hub, _ASIDE, aside)
    for _ in range(len(aside)):
        former = aside.pop(0)
        if getrefcount(former) > _REFERENCES:
            aside.append(former)
        else:
            former.throw(GreenletExit)
    aside.append(worker)


def _pool(hub: Hub) -> list[greenlet]:
    pool: list[greenlet] | None = getattr(hub, _POOL, None)
    if pool is None:
        pool = []
        setattr(hub, _POOL, pool)
    return pool


def _work(job: Job | None) -> None:
    """Body of a worker: one job after the other, between them idle in the pool."""
    hub = get_hub()
    idle = _pool(hub)
    name = ""
    while True:
        if job is not None:  # None: a late wake-up that was meant for an earlier job
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
        except BaseException as error:  # meant for a job that is over
            _leave(idle, name, error)
            return


def _leave(idle: list[greenlet], name: str, error: BaseException) -> None:
    me = getcurrent()
    if me in idle:
        idle.remove(me)
    if not isinstance(error, GreenletExit):
        log.error("%s left something behind that hit it when it was over (%r): close it, use `with`", name, error)


def _run(hub: Hub, fn: Callable[..., object], args: tuple[Any, ...]) -> None:
    try:
        fn(*args)
    except GreenletExit:
        pass  # somebody ended this job on purpose
    except Exception:
        log.exception("error in %s", getattr(fn, "__qualname__", fn))
    except BaseException as error:  # SystemExit, KeyboardInterrupt: the main greenlet decides
        hub.handle_error(fn, type(error), error, error.__traceback__)


def in_thread(function: Callable[..., T], *args: object) -> T:
    """Returns what a function returns that is called in a thread, or raises what it raises.

    gevent prints the stack of every error that leaves a thread of its pool, also of those that are expected; so errors
    come as results.
    """
    return in_pool(get_hub().threadpool, function, *args)


def in_pool(pool: ThreadPool, function: Callable[..., T], *args: object) -> T:
    """As `in_thread`, in a thread of another pool."""
    try:
        result = pool.apply(_caught, (function, args))
        if isinstance(result, _Raised):
            raise result.error
        return cast(T, result)
    finally:
        result = None  # its traceback has this frame


class _Raised(NamedTuple):
    error: Exception


def _caught(function: Callable[..., T], args: tuple[object, ...]) -> T | _Raised:
    try:
        return function(*args)
    except Exception as error:
        return _Raised(error)


MAX_INLET_CALLS, MAX_INLET_BYTES = 10_000, 16 << 20
"""What may wait for the loop."""
INLET_PORTION_S = 0.004

_new_lock = monkey.get_original("_thread", "allocate_lock")  # gevent's own is for greenlets of one thread


CALLS_OF_THREADS = Limit("calls_of_threads", "", "threads hand in more than the loop takes (publish_threadsafe)")


class Inlet:
    """A bounded queue of calls that threads make and the loop works off, in order. Made in the loop's thread."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[int, Callable[..., object], tuple[Any, ...]]] = deque()
        self._bytes = 0
        self._lock = _new_lock()
        loop: Any = get_hub().loop
        self._wake = loop.async_()
        self._wake.ref = False
        self._wake.start(self._work)

    def put(self, size_bytes: int, function: Callable[..., object], *arguments: object) -> bool:
        """Have `function(*arguments)` called by the loop, soon; false when too much waits already. From any thread."""
        with self._lock:
            if len(self._jobs) >= MAX_INLET_CALLS or self._bytes + size_bytes > MAX_INLET_BYTES:
                CALLS_OF_THREADS.refused("a message of a thread")
                return False
            self._jobs.append((size_bytes, function, arguments))
            self._bytes += size_bytes
        self._wake.send()
        return True

    def drain(self) -> None:
        """Make all calls that wait; in the loop's thread only."""
        while self._next():
            pass

    def _work(self) -> None:
        until_s = monotonic() + INLET_PORTION_S
        while self._next():
            if monotonic() >= until_s:
                self._wake.send()  # the others have a turn
                return

    def _next(self) -> bool:
        with self._lock:
            if not self._jobs:
                return False
            size_bytes, function, arguments = self._jobs.popleft()
            self._bytes -= size_bytes
        try:
            function(*arguments)
        except Exception:
            log.exception("error in what a thread handed in")
        return True
