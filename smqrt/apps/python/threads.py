"""Threads for the code of applications that computes long, or waits in a way that gevent does not know: it would hold
up everybody else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

from gevent import get_hub
from gevent.hub import Hub
from gevent.threadpool import ThreadPool

from smqrt.loop.greenlet_pool import in_pool

THREADS = 8
"""Of all applications together. The server's own reading of files has others, so that no application delays it."""
_POOL = "smqrt_application_threads"  # the attribute of the hub that holds its pool

P = ParamSpec("P")
T = TypeVar("T")


def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a thread; blocks the greenlet only. With all threads busy it waits for one.

    Args:
        function: it must not use what belongs to the loop: requests, responses, hubs, sockets.
        args, kwargs: its arguments.

    Returns:
        what it returns.

    Raises:
        Exception: what it raises.
    """
    hub = get_hub()
    if not hub.loop.default:  # this is a thread already
        return function(*args, **kwargs)
    return in_pool(_threads(hub), partial(function, *args, **kwargs))


def _threads(hub: Hub) -> ThreadPool:
    pool: ThreadPool | None = getattr(hub, _POOL, None)
    if pool is None:
        pool = ThreadPool(THREADS, hub=hub)
        setattr(hub, _POOL, pool)
    return pool
