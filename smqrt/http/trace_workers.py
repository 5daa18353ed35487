"""The trace of a server with several workers: the one that a viewer is connected to asks the others for their lines.

    asks    {uri, claim, behind: [start, number]}    of which trace logger; who has a right to the place, the latest
                                                     has; which lines it has already
    told    {do: "lines", start, number, missed, lines: [[at_s, data], …]}    at first the past, also an empty one
            {do: "taken"}                            there is a later viewer

So the one place is held at every worker, by its own viewer or by that of another one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any

import gevent
from gevent.event import Event

from smqrt.http.trace_lines import InOrder, Line
from smqrt.workers.fd_channel import Message
from smqrt.workers.worker_rpc import Fleet, News

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
        """Whether what it was shown last has gone."""
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
        fleet: Fleet,
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
        """Give what waits: this worker's trace logger ends."""
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
