"""Lines of a trace, in memory of a bounded size; and those of several workers in the order of their time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import count, islice
from time import time
from typing import Any, NamedTuple

from gevent import get_hub

HOLD_S = 0.2
"""So long a line waits for older ones of other workers."""
_LOOK_S = 0.05


class Line(NamedTuple):
    """A line, or the lines of one record of the log.

    Attributes:
        at_s: when, in Unix seconds.
        data: UTF-8, with the line feed.
    """

    at_s: float
    data: bytes


class Lines:
    """Lines that wait, of so many bytes together: when more come, the oldest go and are counted.

    Args:
        most_bytes: see above.

    Attributes:
        added: how many lines there were so far, those that have gone included.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lines: deque[Line] = deque()
        self._bytes = self._left_out = 0
        self.added = 0

    def __len__(self) -> int:
        """How many wait."""
        return len(self._lines)

    def __iter__(self) -> Iterator[Line]:
        """Those that wait, the oldest first."""
        return iter(self._lines)

    def copy(self, most_bytes: int, behind: int = 0) -> Lines:
        """The same lines with room for more.

        Args:
            most_bytes: see `Lines`.
            behind: only those that came behind so many; what has gone of these is left out.
        """
        copy = Lines(most_bytes)
        here = min(self.added - behind, len(self._lines))
        for line in islice(self._lines, len(self._lines) - here, None):
            copy.add(line)
        copy._left_out = self.added - behind - here if behind else 0  # else that is the past, of which this is the end
        return copy

    def add(self, line: Line) -> int:
        """Add a line; give how many went."""
        self.added += 1
        self._lines.append(line)
        self._bytes += len(line.data)
        before = self._left_out
        while self._bytes > self._most_bytes:
            self._bytes -= len(self._lines.popleft().data)
            self._left_out += 1
        return self._left_out - before

    def miss(self, lines: int) -> None:
        """So many were left out before they came here."""
        self._left_out += lines

    def take_left_out(self) -> int:
        """How many were left out since this was asked last."""
        left_out, self._left_out = self._left_out, 0
        return left_out

    def take(self, most_bytes: int) -> list[Line]:
        """Take lines from the front, about so many bytes, and at least one if there is one."""
        taken: list[Line] = []
        size = 0
        while self._lines and (not taken or size + len(self._lines[0].data) <= most_bytes):
            taken.append(self._lines.popleft())
            size += len(taken[-1].data)
        self._bytes -= size
        return taken


class InOrder:
    """Gives lines of several workers in the order of their time, each `HOLD_S` after that. One that comes later than so
    is given at once. At first the past is gathered, until `begin`.

    Args:
        give: gets each line.
        past_bytes: of the past, the newest; more of it goes.
        most_bytes: what may wait; of more the oldest is given before its time.
    """

    def __init__(self, give: Callable[[Line], object], past_bytes: int, most_bytes: int) -> None:
        self._give = give
        self._most_bytes, self._past_bytes = most_bytes, past_bytes
        self._waiting: list[tuple[float, int, Line]] = []
        self._bytes = 0
        self._number = count().__next__
        self._is_past, self._is_closed = True, False
        self._timer: Any = get_hub().loop.timer(_LOOK_S, _LOOK_S)

    def add(self, line: Line) -> None:
        """A line has come."""
        if self._is_closed:
            return
        heappush(self._waiting, (line.at_s, self._number(), line))
        self._bytes += len(line.data)
        if self._is_past:
            while self._bytes > self._past_bytes:
                self._pop()
            return
        while self._bytes > self._most_bytes:
            self._give(self._pop())
        self._look_again()

    def begin(self) -> None:
        """The past is here; a second call does nothing."""
        if self._is_past and not self._is_closed:
            self._is_past = False
            self._ripen()

    def give_all(self) -> None:
        """Give what waits, since nothing comes behind it."""
        while self._waiting:
            self._give(self._pop())

    def close(self) -> None:
        """Give nothing any more; a second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._timer.stop()
            self._timer.close()
            self._waiting.clear()

    def _pop(self) -> Line:
        line = heappop(self._waiting)[-1]
        self._bytes -= len(line.data)
        return line

    def _ripen(self) -> None:
        now_s = time()
        # What seems to come from the future does not wait for it: the clock was set back.
        while self._waiting and not now_s - HOLD_S < self._waiting[0][0] <= now_s:
            self._give(self._pop())
        self._look_again()

    def _look_again(self) -> None:
        if not self._waiting:
            self._timer.stop()
        elif not self._timer.active:
            self._timer.start(self._ripen)
