"""Trace lines in bounded memory, merged from several workers by time."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from heapq import heappop, heappush
from itertools import count, islice
from time import monotonic, time
from typing import Any, NamedTuple

import gevent
from gevent import get_hub
from gevent.event import Event

from smqrt.workers.fd_channel import Message
from smqrt.workers.worker_rpc import News, WorkerRpc

HOLD_S = 0.2
"""How long a line waits for older lines of other workers."""
_CHECK_S = 0.05


class Line(NamedTuple):
    """A line, or the lines of one log record.

    Attributes:
        at_s: time in Unix seconds.
        data: UTF-8, including the line feed.
    """

    at_s: float
    data: bytes


class Lines:
    """A queue of lines with a limit in bytes. Beyond it, the oldest lines are dropped and counted.

    Args:
        max_bytes: the limit.

    Attributes:
        added: number of lines added so far, including dropped ones.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lines: deque[Line] = deque()
        self._bytes = self._dropped = 0
        self.added = 0

    def __len__(self) -> int:
        """Return the number of lines in the queue."""
        return len(self._lines)

    def __iter__(self) -> Iterator[Line]:
        """Iterate over the lines, the oldest first."""
        return iter(self._lines)

    def copy(self, max_bytes: int, behind: int = 0) -> Lines:
        """Return a copy with another limit.

        Args:
            max_bytes: see `Lines`.
            behind: copy only the lines added after this number; dropped ones among these are counted.
        """
        copy = Lines(max_bytes)
        here = min(self.added - behind, len(self._lines))
        for line in islice(self._lines, len(self._lines) - here, None):
            copy.add(line)
        copy._dropped = (
            self.added - behind - here if behind else 0
        )  # `behind` 0 requests the past, whose start is always missing
        return copy

    def add(self, line: Line) -> int:
        """Add a line; return how many lines were dropped for it."""
        self.added += 1
        self._lines.append(line)
        self._bytes += len(line.data)
        before = self._dropped
        while self._bytes > self._max_bytes:
            self._bytes -= len(self._lines.popleft().data)
            self._dropped += 1
        return self._dropped - before

    def count_dropped(self, lines: int) -> None:
        """Count lines that were dropped by another worker."""
        self._dropped += lines

    def take_dropped(self) -> int:
        """Return how many lines were dropped since the last call."""
        dropped, self._dropped = self._dropped, 0
        return dropped

    def take(self, max_bytes: int) -> list[Line]:
        """Remove and return the oldest lines, about `max_bytes`, but at least one if there is one."""
        taken: list[Line] = []
        size = 0
        while self._lines and (not taken or size + len(self._lines[0].data) <= max_bytes):
            taken.append(self._lines.popleft())
            size += len(taken[-1].data)
        self._bytes -= size
        return taken


class MergedLines:
    """Merges lines of several workers by time. Each line is delivered `HOLD_S` after its time, a late one at once.

    Until `begin`, it collects past lines.

    Args:
        give: receives each line.
        past_bytes: limit for past lines; the oldest are dropped.
        max_bytes: limit for waiting lines; beyond it, the oldest is delivered early.
    """

    def __init__(self, give: Callable[[Line], object], past_bytes: int, max_bytes: int) -> None:
        self._deliver = give
        self._max_bytes, self._past_bytes = max_bytes, past_bytes
        self._waiting: list[tuple[float, int, Line]] = []
        self._bytes = 0
        self._number = count().__next__
        self._is_past, self._is_closed = True, False
        self._timer: Any = get_hub().loop.timer(_CHECK_S, _CHECK_S)

    def add(self, line: Line) -> None:
        """Add a line."""
        if self._is_closed:
            return
        heappush(self._waiting, (line.at_s, self._number(), line))
        self._bytes += len(line.data)
        if self._is_past:
            while self._bytes > self._past_bytes:
                self._pop()
            return
        while self._bytes > self._max_bytes:
            self._deliver(self._pop())
        self._update_timer()

    def begin(self) -> None:
        """End the collection of past lines and deliver them. A second call does nothing."""
        if self._is_past and not self._is_closed:
            self._is_past = False
            self._deliver_due()

    def deliver_all(self) -> None:
        """Deliver all waiting lines, because no more will follow."""
        while self._waiting:
            self._deliver(self._pop())

    def close(self) -> None:
        """Deliver no more lines. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._timer.stop()
            self._timer.close()
            self._waiting.clear()

    def _pop(self) -> Line:
        line = heappop(self._waiting)[-1]
        self._bytes -= len(line.data)
        return line

    def _deliver_due(self) -> None:
        now_s = time()
        # A line from the future is delivered at once: the clock was set back.
        while self._waiting and not now_s - HOLD_S < self._waiting[0][0] <= now_s:
            self._deliver(self._pop())
        self._update_timer()

    def _update_timer(self) -> None:
        if not self._waiting:
            self._timer.stop()
        elif not self._timer.active:
            self._timer.start(self._deliver_due)


# ---- The trace of a server with several workers. The worker with the viewer requests the lines of the others.
#
#     request     {uri, claim, behind: [start, number]}
#                     the trace logger, the claim of the viewer (the latest one counts), the lines it has already
#     responses   {do: "lines", start, number, missed, lines: [[at_s, data], …]}
#                     first the past lines, also if there are none
#                 {do: "taken"}
#                     there is a later viewer
#
# So each worker knows the one viewer of the server: its own, or that of another worker.

QUESTION = "trace lines"
PAST_S = 0.5
"""How long a viewer waits for the past lines of other workers."""
TAKEN: Message = {"do": "taken"}

Claim = tuple[float, int]
"""Monotonic time of a viewer's connection, and number of its worker."""


class RemoteViewer:
    """The viewer of another worker, which has requested the lines of this worker.

    Args:
        claim: see `Claim`.
        past: the past lines, which are sent first.
        missed: number of dropped lines before them.
    """

    def __init__(self, claim: Claim, past: list[Line], missed: int) -> None:
        self.claim = claim
        self._batch: tuple[list[Line], int] | None = (past, missed)
        self._more = Event()
        self._is_over = self._is_taken = False

    def takes(self) -> bool:
        """Return whether the last batch was sent."""
        return self._batch is None and not self._is_over

    def show(self, lines: list[Line], missed: int) -> None:
        """Send lines, and the number of dropped lines before them."""
        self._batch = lines, missed
        self._more.set()

    def end(self, is_taken: bool = False) -> None:
        """End, because there is a later viewer or because the trace logger ends."""
        self._is_over, self._is_taken = True, is_taken
        self._more.set()

    def news(self, number: Callable[[], int], more: Callable[[], object]) -> News:
        """Yield the messages for the other worker.

        Args:
            number: returns the number of lines up to the last one that was sent.
            more: called when the next batch can be sent.
        """
        while self._batch is not None or not self._is_over:
            if self._batch is None:
                self._more.wait()
                self._more.clear()
                continue
            (lines, missed), self._batch = self._batch, None
            yield {"do": "lines", "start": _START, "number": number(), "missed": missed, "lines": lines}
            more()
        if self._is_taken:
            yield TAKEN


_START = f"{os.getpid()} {monotonic()}"
"""Identifies this process, so that its line numbers are not confused with those of its predecessor."""


def behind_of(question: Message) -> int:
    """Return how many lines of this process the requesting worker has already."""
    start, number = question["behind"]
    return int(number) if start == _START else 0


class WorkerLines:
    """The lines of all workers, for the viewer of this worker.

    Args:
        fleet: the workers.
        uri: returns the path of the trace logger, which identifies it in the other workers.
        claim: claim of the viewer.
        order: merges the lines.
        missed: called with the number of lines that other workers have dropped.
        taken: called when another worker has a later viewer.
    """

    def __init__(
        self,
        fleet: WorkerRpc,
        uri: Callable[[], str],
        claim: Claim,
        order: MergedLines,
        missed: Callable[[int], object],
        taken: Callable[[], object],
    ) -> None:
        self._uri, self._claim, self._order = uri, claim, order
        self._missed, self._taken = missed, taken
        self._behind: dict[int, list[Any]] = {}
        self._without_past = set(fleet.others)
        self._greenlets: list[gevent.Greenlet[..., None]] = [
            gevent.spawn(fleet.follow, number, partial(self._question, number), partial(self._receive, number))
            for number in fleet.others
        ]
        self._greenlets.append(gevent.spawn(self._begin))

    def add(self, line: Line) -> None:
        """Add a line of this worker."""
        self._order.add(line)

    def deliver_all(self) -> None:
        """Deliver all waiting lines, because the trace logger ends."""
        self._order.deliver_all()

    def close(self) -> None:
        """End the requests. A second call does nothing."""
        gevent.killall(self._greenlets, block=False)
        self._order.close()

    def _begin(self) -> None:
        gevent.sleep(PAST_S)
        self._order.begin()

    def _question(self, number: int) -> Message:
        behind = self._behind.get(number, ["", 0])
        return {"do": QUESTION, "uri": self._uri(), "claim": self._claim, "behind": behind}

    def _receive(self, worker: int, said: Message) -> None:
        if said == TAKEN:
            self._taken()
            return
        self._behind[worker] = [said["start"], said["number"]]
        self._missed(said["missed"])
        for at_s, data in said["lines"]:
            self._order.add(Line(at_s, data))
        self._without_past.discard(worker)
        if not self._without_past:
            self._order.begin()
