"""The end of a server: step by step, with a deadline for the whole, and at once when it is asked a second time.

The deadline and the second signal also end a server whose loop is held, by an application that computes for instance:
they wait for no turn of the loop.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import gevent
from gevent import monkey
from greenlet import getcurrent, greenlet

from smqrt.process import early_signals

# ---- The signals of a server's process.

Reaction = Callable[[], object]


class Signals:
    """Handlers of signals, in the event loop.

    Args:
        at_once: what is done at each of these signals.
        when_ready: what needs a server that serves: a signal that arrives before `ready` is handled there.
    """

    def __init__(self, at_once: Mapping[int, Reaction], when_ready: Mapping[int, Reaction]) -> None:
        self._at_once, self._when_ready = at_once, when_ready
        self._waiting: dict[int, None] | None = {}
        self._watchers = [gevent.signal_handler(number, self._react, number) for number in (*at_once, *when_ready)]
        for number in early_signals.take():
            self._react(number)

    def _react(self, number: int) -> None:
        if number in self._at_once:
            self._at_once[number]()
        elif self._waiting is None:
            self._when_ready[number]()
        else:
            self._waiting[number] = None

    def ready(self) -> None:
        """Handle what has waited, and from now on every signal at once."""
        waiting, self._waiting = self._waiting, None
        for number in waiting or ():
            self._when_ready[number]()

    def cancel(self) -> None:
        """Handle no signal any more."""
        for watcher in self._watchers:
            watcher.cancel()


# ---- The process of a server: what it needs of its machine, and a report of what everything in it waits for.

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


log = logging.getLogger("smqrt")

Step = tuple[str, Callable[[], object]]
"""What is done, for the person who reads why it took so long; and the function that does it."""

STDERR = 2
_LOOK_S = 0.05
_sleep: Callable[[float], None] = monkey.get_original("time", "sleep")
_start_thread: Callable[..., int] = monkey.get_original("_thread", "start_new_thread")


class Ending:
    """The steps with which a server ends.

    Args:
        left: says what is still there: "3 requests, 120 SMQ clients"; called in another thread, so it only looks.

    Attributes:
        step: what is being done; empty before the first step and after the last one.
    """

    def __init__(self, left: Callable[[], str]) -> None:
        self.step = ""
        self._left = left

    def run(self, steps: Iterable[Step]) -> None:
        """Take the steps; one that fails is logged, and the next ones are taken all the same."""
        for self.step, function in steps:
            try:
                function()
            except Exception:
                log.exception("while the server stopped, at %s", self.step)
        self.step = ""

    @contextmanager
    def within(self, most_s: float) -> Iterator[None]:
        """End the process with exit code 1 when what is inside takes longer, or a signal asks a second time.

        Args:
            most_s: seconds; 0 for as long as it takes.
        """
        over: list[bool] = []
        before = {number: signal.signal(number, _end_now) for number in (signal.SIGTERM, signal.SIGINT)}
        if most_s:
            _start_thread(self._watch, (time.monotonic() + most_s, most_s, over))
        try:
            yield
        finally:
            over.append(True)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _watch(self, end_s: float, most_s: float, over: list[bool]) -> None:
        while not over:
            if time.monotonic() >= end_s:
                os.write(STDERR, self._last_line(most_s).encode())
                os._exit(1)
            _sleep(_LOOK_S)

    def _last_line(self, most_s: float) -> str:
        return (
            f"stopped after {most_s:g} s, at {self.step or 'its last step'}, with {self._left()} still there; "
            "see the setting drain.timeout_s\n"
        )


def _end_now(number: int, frame: Any) -> None:
    os._exit(1)  # asked twice: somebody is in a hurry
