"""The state of a process in text: what its greenlets, and the activities of its applications, wait for."""

from __future__ import annotations

import gc
import traceback
from collections import Counter
from collections.abc import Iterable

from greenlet import getcurrent, greenlet

DEEPEST_FRAMES = 12


def report(activities: Iterable[str]) -> str:
    """Give the report.

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
    frames = traceback.extract_stack(one.gr_frame, DEEPEST_FRAMES)
    lines = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames)]
    return f"{type(one).__name__} at " + "\n      from ".join(lines)
