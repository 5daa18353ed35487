"""Threads for code of applications that would block the event loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

from gevent import get_hub
from gevent.threadpool import ThreadPool

from smqrt.loop.greenlet_pool import in_pool

THREADS = 8
"""Threads of all applications together. The server reads files in other threads, so that no application delays it."""
_POOL = "smqrt_application_threads"  # attribute of gevent's loop object that has the pool

P = ParamSpec("P")
T = TypeVar("T")


def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a thread. Blocks only the calling greenlet, until a thread is free and the function returns.

    Args:
        function: must not use objects of the event loop: requests, responses, hubs, sockets.
        args, kwargs: its arguments.

    Returns:
        The return value of the function.

    Raises:
        Exception: the exception of the function.
    """
    gevent_hub = get_hub()
    if not gevent_hub.loop.default:  # already in a thread
        return function(*args, **kwargs)
    pool: ThreadPool | None = getattr(gevent_hub, _POOL, None)
    if pool is None:
        pool = ThreadPool(THREADS, hub=gevent_hub)
        setattr(gevent_hub, _POOL, pool)
    return in_pool(pool, partial(function, *args, **kwargs))
