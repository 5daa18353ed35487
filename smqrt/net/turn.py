"""A share of the event loop's time."""

from __future__ import annotations

from time import monotonic

import gevent

TURN_S = 0.004
_SHORTEST_S = 1e-6  # a timer: the loop looks at sockets and timers in between, which it may not for a sleep of 0


class Turn:
    """Keeps a busy greenlet from holding the loop: call `breathe` between pieces of work."""

    __slots__ = ("_until_s",)

    def __init__(self) -> None:
        self._until_s = monotonic() + TURN_S

    def breathe(self) -> None:
        """Let the others run when this turn has taken its time."""
        if monotonic() >= self._until_s:
            gevent.sleep(_SHORTEST_S)
            self._until_s = monotonic() + TURN_S
