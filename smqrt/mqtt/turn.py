"""A share of the event loop's time."""

from __future__ import annotations

from time import monotonic

import gevent

TURN_S = 0.005


class Turn:
    """Keeps a busy greenlet from holding the loop: call `breathe` between pieces of work."""

    __slots__ = ("_until_s",)

    def __init__(self) -> None:
        self._until_s = monotonic() + TURN_S

    def breathe(self) -> None:
        """Let the others run when this turn has taken its time."""
        if monotonic() >= self._until_s:
            gevent.sleep(0)
            self._until_s = monotonic() + TURN_S
