"""Lines of a trace, in memory of a bounded size; and those of several workers in the order of their time."""

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
        max_bytes: see above.

    Attributes:
        added: how many lines there were so far, those that have gone included.
    """

    def __init__(self, max_bytes: int) -> None:
        self._most_bytes = max_bytes
        self._lines: deque[Line] = deque()
        self._bytes = self._left_out = 0
        self.added = 0

    def __len__(self) -> int:
        """How many wait."""
        return len(self._lines)

    def __iter__(self) -> Iterator[Line]:
        """Those that wait, the oldest first."""
        return iter(self._lines)

    def copy(self, max_bytes: int, behind: int = 0) -> Lines:
        """The same lines with room for more.

        Args:
            max_bytes: see `Lines`.
            behind: only those that came behind so many; what has gone of these is left out.
        """
        copy = Lines(max_bytes)
        here = min(self.added - behind, len(self._lines))
        for line in islice(self._lines, len(self._lines) - here, None):
            copy.add(line)
        copy._left_out = self.added - behind - here if behind else 0  # else that is the past, of which this is the end
        return copy

    def add(self, line: Line) -> int:
        """Add a line; return how many went."""
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

    def take(self, max_bytes: int) -> list[Line]:
        """Take lines from the front, about so many bytes, and at least one if there is one."""
        taken: list[Line] = []
        size = 0
        while self._lines and (not taken or size + len(self._lines[0].data) <= max_bytes):
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
        max_bytes: what may wait; of more the oldest is given before its time.
    """

    def __init__(self, give: Callable[[Line], object], past_bytes: int, max_bytes: int) -> None:
        self._give = give
        self._most_bytes, self._past_bytes = max_bytes, past_bytes
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
        """Return what waits, since nothing comes behind it."""
        while self._waiting:
            self._give(self._pop())

    def close(self) -> None:
        """Return nothing any more; a second call does nothing."""
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


# ---- The trace of a server with several workers: the one that a viewer is connected to asks the others for their
# lines.
#
#     asks    {uri, claim, behind: [start, number]}    of which trace logger; who has a right to the place, the latest
#                                                      has; which lines it has already
#     told    {do: "lines", start, number, missed, lines: [[at_s, data], …]}    at first the past, also an empty one
#             {do: "taken"}                            there is a later viewer
#
# So the one place is held at every worker, by its own viewer or by that of another one.

QUESTION = "trace lines"
PAST_S = 0.5
"""So long a viewer waits for the past of workers that do not answer; it comes later then."""
TAKEN: Message = {"do": "taken"}

Claim = tuple[float, int]
"""When a viewer came, by the clock of the machine, and to which worker."""


class FarViewer:
    """A viewer of another worker, as a worker sees it that is asked for its lines.

    Args:
        claim: see `Claim`.
        past: what it is told at first.
        missed: how many lines were left out of that.
    """

    def __init__(self, claim: Claim, past: list[Line], missed: int) -> None:
        self.claim = claim
        self._batch: tuple[list[Line], int] | None = (past, missed)
        self._more = Event()
        self._is_over = self._is_taken = False

    def takes(self) -> bool:
        """Return whether what it was shown last has gone."""
        return self._batch is None and not self._is_over

    def show(self, lines: list[Line], missed: int) -> None:
        """Show lines, and how many were left out before them."""
        self._batch = lines, missed
        self._more.set()

    def end(self, is_taken: bool = False) -> None:
        """Show nothing any more, because the place is taken or because there is no trace logger."""
        self._is_over, self._is_taken = True, is_taken
        self._more.set()

    def news(self, number: Callable[[], int], more: Callable[[], object]) -> News:
        """Yields what is told to the other worker.

        Args:
            number: gives how many lines there were, up to the last that was shown.
            more: is called when there is room for more.
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
"""Tells the lines of this process from those of the one before."""


def behind_of(question: Message) -> int:
    """How many of this process's lines who asks has already."""
    start, number = question["behind"]
    return int(number) if start == _START else 0


class Gathering:
    """The lines of all workers, for the viewer of this one.

    Args:
        fleet: the workers.
        uri: gives the address of the trace logger, by which the others know theirs.
        claim: of the viewer.
        order: puts the lines in order.
        missed: is told how many lines others had to leave out.
        taken: is called when there is a later viewer at another worker.
    """

    def __init__(
        self,
        fleet: WorkerRpc,
        uri: Callable[[], str],
        claim: Claim,
        order: InOrder,
        missed: Callable[[int], object],
        taken: Callable[[], object],
    ) -> None:
        self._uri, self._claim, self._order = uri, claim, order
        self._missed, self._taken = missed, taken
        self._behind: dict[int, list[Any]] = {}
        self._awaited = set(fleet.others)
        self._greenlets: list[gevent.Greenlet[..., None]] = [
            gevent.spawn(fleet.follow, number, partial(self._question, number), partial(self._told, number))
            for number in fleet.others
        ]
        self._greenlets.append(gevent.spawn(self._begin))

    def add(self, line: Line) -> None:
        """A line of this worker."""
        self._order.add(line)

    def give_all(self) -> None:
        """Return what waits: this worker's trace logger ends."""
        self._order.give_all()

    def close(self) -> None:
        """Ask no more; a second call does nothing."""
        gevent.killall(self._greenlets, block=False)
        self._order.close()

    def _begin(self) -> None:
        gevent.sleep(PAST_S)
        self._order.begin()

    def _question(self, number: int) -> Message:
        behind = self._behind.get(number, ["", 0])
        return {"do": QUESTION, "uri": self._uri(), "claim": self._claim, "behind": behind}

    def _told(self, worker: int, said: Message) -> None:
        if said == TAKEN:
            self._taken()
            return
        self._behind[worker] = [said["start"], said["number"]]
        self._missed(said["missed"])
        for at_s, data in said["lines"]:
            self._order.add(Line(at_s, data))
        self._awaited.discard(worker)
        if not self._awaited:
            self._order.begin()
