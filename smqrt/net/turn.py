"""A share of the event loop's time, for those who always find something to do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any

from gevent import get_hub
from gevent.hub import Hub, Waiter

TURN_S = 0.004
_SHORTEST_S = 1e-6  # a timer: the loop looks at sockets and timers in between, which it does not for `run_callback`
_SHARE = "smqrt_share"  # the attribute of the hub that holds its share: threads have hubs of their own

Job = tuple[Callable[..., object], tuple[Any, ...]]


class Share:
    """The time that all of them may take together in one turn of the loop; `share()` gives the one of this thread.

    One who finds the share spent goes on in a later turn, in the order of asking: a hundred busy connections hold the
    loop no longer than one does.
    """

    __slots__ = ("_loop", "_queue", "_timer", "_turn", "_until_s")

    def __init__(self, hub: Hub) -> None:
        self._loop: Any = hub.loop
        self._turn = -1
        self._until_s = 0.0
        self._queue: deque[Job] = deque()
        self._timer: Any = self._loop.timer(_SHORTEST_S)

    def spent(self) -> bool:
        """Whether this turn's time is used up. The first who asks in a turn begins it."""
        turn: int = self._loop.iteration
        if turn != self._turn:
            self._turn, self._until_s = turn, monotonic() + TURN_S
            return False
        return monotonic() >= self._until_s

    def later(self, fn: Callable[..., object], *args: Any) -> None:
        """Call `fn(*args)` in the Hub greenlet, in a later turn of the loop."""
        self._queue.append((fn, args))
        if not self._timer.active:
            self._timer.start(self._go_on)

    def wait(self) -> None:
        """Block this greenlet until a later turn of the loop."""
        waiter: Waiter[None] = Waiter()
        self.later(waiter.switch, None)
        waiter.get()

    def _go_on(self) -> None:
        queue = self._queue
        try:
            while queue:
                fn, args = queue.popleft()
                fn(*args)
                if self.spent():
                    break
        finally:
            if queue and not self._timer.active:
                self._timer.start(self._go_on)


def share() -> Share:
    """The share of this thread's loop."""
    hub = get_hub()
    found: Share | None = getattr(hub, _SHARE, None)
    if found is None:
        found = Share(hub)
        setattr(hub, _SHARE, found)
    return found


class Turn:
    """Keeps a busy greenlet from holding the loop: call `breathe` between pieces of work."""

    __slots__ = ("_share",)

    def __init__(self) -> None:
        self._share = share()

    def breathe(self) -> None:
        """Let the others run when the share of this turn is spent."""
        if self._share.spent():
            self._share.wait()
