"""Signals of a server process, and its shutdown in steps with a deadline.

The deadline and a second signal also end a server whose event loop is blocked, for instance by an application in a
long computation: both run outside the loop.
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
from types import FrameType

import gevent
from greenlet import getcurrent, greenlet

from smqrt.loop.threads import block_thread, start_thread
from smqrt.process import early_signals

log = logging.getLogger("smqrt")

# ---- signals

Handler = Callable[[], object]


class Signals:
    """Handlers of signals, in the event loop.

    Args:
        at_once: the handlers that need no running server.
        when_ready: the handlers that need one. A signal that arrives before `ready` is called is deferred until then.
    """

    def __init__(self, at_once: Mapping[int, Handler], when_ready: Mapping[int, Handler]) -> None:
        self._at_once, self._when_ready = at_once, when_ready
        self._deferred: dict[int, None] | None = {}
        self._watchers = [gevent.signal_handler(number, self._handle, number) for number in (*at_once, *when_ready)]
        for number in early_signals.take():
            self._handle(number)

    def _handle(self, number: int) -> None:
        if number in self._at_once:
            self._at_once[number]()
        elif self._deferred is None:
            self._when_ready[number]()
        else:
            self._deferred[number] = None

    def ready(self) -> None:
        """Handle the deferred signals; from now on each signal is handled at once."""
        deferred, self._deferred = self._deferred, None
        for number in deferred or ():
            self._when_ready[number]()

    def cancel(self) -> None:
        """Stop handling signals."""
        for watcher in self._watchers:
            watcher.cancel()


# ---- the process

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # options of mallopt(3)
_MMAP_BYTES, _TRIM_BYTES = 4 << 20, 64 << 20
_MAX_FRAMES = 12  # for each greenlet in a state report


def prepare_process() -> None:
    """Prepare the process for many connections and large messages."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    # By default malloc maps and unmaps memory for every large message: 34 us instead of 20 us for 60 KB.
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)


def state_report(activities: Iterable[str]) -> str:
    """Return the stacks of all greenlets, and the blocked Lua activities, as text.

    Args:
        activities: a line for each blocked Lua activity.
    """

    def counted(text: str, count: int) -> str:
        return f"  {text}" if count == 1 else f"  {count} times {text}"

    lua, stacks = Counter(activities), Counter[str]()
    current = getcurrent()
    gc.unfreeze()  # the collector does not list objects that the server froze at its start
    for one in gc.get_objects():
        if isinstance(one, greenlet) and one.gr_frame is not None and one is not current:
            frames = traceback.extract_stack(one.gr_frame, _MAX_FRAMES)
            calls = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames)]
            stacks[f"{type(one).__name__} at " + "\n      from ".join(calls)] += 1
    gc.freeze()
    lines = [f"{sum(lua.values())} blocked Lua activities", *(counted(text, count) for text, count in lua.items())]
    lines += [f"{sum(stacks.values())} greenlets", *(counted(text, count) for text, count in stacks.most_common())]
    return "\n".join(lines)


# ---- the steps of a shutdown

Step = tuple[str, Callable[[], object]]
"""The name of a step, for the message of a shutdown that exceeds its time limit; and its function."""

STDERR = 2
_POLL_S = 0.05


class StepRunner:
    """Runs the steps of a shutdown.

    Args:
        remaining: returns the counts of open objects, such as "3 requests, 120 SMQ clients". It must only read, because
            another thread calls it.

    Attributes:
        step: the name of the current step; empty before the first and after the last one.
    """

    def __init__(self, remaining: Callable[[], str]) -> None:
        self.step = ""
        self._remaining = remaining

    def run(self, steps: Iterable[Step]) -> None:
        """Run the steps. The error of a step is logged, and the next step runs."""
        for self.step, function in steps:
            try:
                function()
            except Exception:
                log.exception("shutdown: error at %s", self.step)
        self.step = ""

    @contextmanager
    def within(self, timeout_s: float) -> Iterator[None]:
        """Exit the process with code 1 when the body takes longer, or at a second signal.

        Args:
            timeout_s: 0 for no limit.
        """

        def exit_at_once(_number: int, _frame: FrameType | None) -> None:
            os._exit(1)

        is_over: list[bool] = []
        # Handlers of Python, not of gevent: they also run while a greenlet blocks the loop.
        before = {number: signal.signal(number, exit_at_once) for number in (signal.SIGTERM, signal.SIGINT)}
        if timeout_s:
            start_thread(self._watch, (timeout_s, is_over))
        try:
            yield
        finally:
            is_over.append(True)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _watch(self, timeout_s: float, is_over: list[bool]) -> None:
        """Enforce the time limit. This runs in a thread, which a blocked event loop does not delay."""
        deadline_s = time.monotonic() + timeout_s
        while not is_over:
            if time.monotonic() >= deadline_s:
                line = (
                    f"stopped after {timeout_s:g} s, at {self.step or 'the last step'}, with {self._remaining()} still "
                    "open; see the setting drain.timeout_s\n"
                )
                os.write(STDERR, line.encode())  # not the log: its lock may be held
                os._exit(1)
            block_thread(_POLL_S)
