"""The process of a server: what it needs of its machine, and a report of what everything in it waits for."""

from __future__ import annotations

import ctypes
import gc
import resource
import traceback
from collections import Counter
from collections.abc import Iterable

from greenlet import getcurrent, greenlet

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_BYTES, _TRIM_BYTES = 4 << 20, 64 << 20
_DEEPEST_FRAMES = 12  # of a greenlet in a report of the state


def prepare() -> None:
    """Suits the process to many connections and large messages."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # Without this, malloc maps and unmaps every large message: 34 against 20 us for one of 60 KB.
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)


def state_report(activities: Iterable[str]) -> str:
    """Give the state of the process in text: what its greenlets, and the activities of its applications, wait for.

    Args:
        activities: a line for each activity of Lua.
    """
    lua = Counter(activities)
    stacks = Counter(_stack(one) for one in _greenlets())
    gc.freeze()
    parts = [f"{sum(lua.values())} activities of Lua wait", *(_counted(count, text) for text, count in lua.items())]
    parts += [f"{sum(stacks.values())} greenlets", *(_counted(count, text) for text, count in stacks.most_common())]
    return "\n".join(parts)


def _counted(count: int, text: str) -> str:
    return f"  {text}" if count == 1 else f"  {count} times {text}"


def _greenlets() -> list[greenlet]:
    me = getcurrent()
    gc.unfreeze()  # what the server froze when it started would not be seen
    return [one for one in gc.get_objects() if isinstance(one, greenlet) and one.gr_frame is not None and one is not me]


def _stack(one: greenlet) -> str:
    frames = traceback.extract_stack(one.gr_frame, _DEEPEST_FRAMES)
    lines = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames)]
    return f"{type(one).__name__} at " + "\n      from ".join(lines)
