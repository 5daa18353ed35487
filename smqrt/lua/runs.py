"""The activities that a thread is inside of at the moment, and for how long each has computed."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from smqrt.lua.activity import Activities

_SEND = Activities._send.__code__

AGAIN_AFTER_S = 2.0  # or twice the limit


class Run:
    """An activity between two waits, in which Lua runs or has called Python."""

    __slots__ = ("_frame",)

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and self._frame is other._frame

    def __hash__(self) -> int:
        return hash(self._frame)

    @property
    def coroutine(self) -> Any:
        """What Python resumed, None when the run is over."""
        return self._frame.f_locals.get("co")

    def lasts(self) -> bool:
        """Whether the calling thread is still inside of it."""
        return self in _runs(sys._getframe())


def runs_of(thread_id: int) -> list[Run]:
    """The runs that a thread is inside of, the innermost first."""
    return list(_runs(sys._current_frames().get(thread_id)))


def _runs(frame: FrameType | None) -> Iterator[Run]:
    while frame is not None:
        if frame.f_code is _SEND:
            yield Run(frame)
        frame = frame.f_back


class Overdue:
    """Finds the run that has computed for too long.

    Args:
        thread_id: of the thread in which they are.
        limit_s: CPU time of that thread. A process that had to wait for the processor has not computed.
    """

    def __init__(self, thread_id: int, limit_s: float) -> None:
        self._thread_id, self._limit_s = thread_id, limit_s
        self._clock = time.pthread_getcpuclockid(thread_id)
        self._since_s: dict[Run, float] = {}
        self._found: Run | None = None
        self._again_s = 0.0
        self.case = 0

    def look(self) -> Run | None:
        """The innermost run that is overdue, and again after `AGAIN_AFTER_S` when it goes on.

        `case` is another number for every other run. Must be called a few times per limit, and `forget` when the loop
        has turned. When one has ended that was overdue, the time of those around it begins anew: it was not they who
        computed.
        """
        now_s, runs = time.clock_gettime(self._clock), runs_of(self._thread_id)
        if self._found is not None and self._found not in runs:
            self.forget()
        self._since_s = {run: self._since_s.get(run, now_s) for run in runs}
        found = next((run for run in runs if now_s - self._since_s[run] >= self._limit_s), None)
        if found is None or (found == self._found and now_s < self._again_s):
            return None
        self.case += found != self._found
        self._found, self._again_s = found, now_s + min(AGAIN_AFTER_S, 2 * self._limit_s)
        return found

    def forget(self) -> None:
        """All runs that were seen are over."""
        self._since_s, self._found = {}, None
