"""Pooled greenlets for code that may block in gevent's way.

A pooled greenlet is a raw greenlet whose parent is the Hub greenlet, gevent's own, which calls the callbacks of
watchers. A job that is started there runs at once, without a turn of the loop. That costs less than a microsecond,
against some twenty for `gevent.spawn`. When the job ends or blocks, the Hub greenlet continues behind `start`. After
its end the greenlet goes back to the pool.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from sys import getrefcount
from typing import Any, TypeVar

from gevent import get_hub
from gevent.hub import Hub, Waiter
from greenlet import GreenletExit, getcurrent, greenlet

from smqrt.broker.deferred import Deferred
from smqrt.loop.threads import in_pool as in_pool
from smqrt.loop.threads import in_thread as in_thread

log = logging.getLogger("smqrt")

MAX_IDLE = 256  # after a burst, greenlets beyond this end; each holds a few KB of stack
_POOL = "smqrt_idle_greenlets"  # the attribute of the hub that holds its pool: threads have hubs of their own
_REFERENCED = "smqrt_referenced_greenlets"

T = TypeVar("T")
Job = tuple[Callable[..., object], tuple[Any, ...]]


def start(fn: Callable[..., object], *args: object) -> None:
    """Run `fn(*args)` in a pooled greenlet, where it may block.

    In the Hub greenlet the function runs at once and this call returns when it ended or first blocked. Elsewhere it
    is scheduled for the next turn of the loop. An exception of the function is logged ("smqrt") with its traceback.
    """
    hub = get_hub()
    if getcurrent() is hub:
        _switch_to_pooled(hub, (fn, args))
    else:
        hub.loop.run_callback(_switch_to_pooled, hub, (fn, args))


def call(fn: Callable[..., T], *args: object) -> T | Deferred[T]:
    """Run `fn(*args)` as `start` does and return its value.

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
    """Block this greenlet until `pending` is settled, and return its value.

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
    """Call `fn(*args)` in the Hub greenlet, where it must not block, and return its value. Raises what `fn` raises."""
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

    An idle greenlet that something still refers to is not used again. An earlier job left a `gevent.Timeout` open, or
    passed its greenlet on, and what that throws would hit another job. The pool itself holds no further reference.
    """
    idle = _pool(hub)
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
    """Keep a greenlet that others refer to, and end the kept ones that are no longer referred to.

    The end of a greenlet is a switch. Otherwise it would happen where the last reference is dropped, for example in the
    garbage collector in the middle of a call from Lua.
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
    """Run one job after the other; between them this greenlet is idle in the pool."""
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
        except BaseException as error:  # meant for an earlier job
            me = getcurrent()
            if me in idle:
                idle.remove(me)
            if not isinstance(error, GreenletExit):
                log.error("%s left something behind that raised %r after its end: close it, use `with`", name, error)
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
