"""Work that waits for the disk, in a thread; the event loop goes on meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar, cast

from gevent import get_hub

T = TypeVar("T")


def in_thread(function: Callable[..., T], *args: object) -> T:
    """Returns what a function returns that is called in a thread, or raises what it raises.

    gevent prints the stack of every error that leaves a thread of its pool, also of those that are expected; so errors
    come as results.
    """
    try:
        result = get_hub().threadpool.apply(_caught, (function, args))
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
