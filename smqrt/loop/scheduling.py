"""The event loop's time: what busy ones may take of a turn, deadlines, and the passes of Python's garbage collector."""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Callable, Iterator
from time import monotonic, perf_counter
from typing import Any, Protocol

from gevent import get_hub
from gevent.hub import Hub, Waiter

log = logging.getLogger("smqrt")

NEVER = float("inf")
"""The deadline of who has none."""
TICK_S = 0.25
TURN_S = 0.004
_SHORTEST_S = 1e-6  # a timer: the loop looks at sockets and timers in between, which it does not for `run_callback`
_SHARE = "smqrt_share"  # the attribute of the hub that holds its share: threads have hubs of their own

Job = tuple[Callable[..., object], tuple[object, ...]]


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

    def later(self, fn: Callable[..., object], *args: object) -> None:
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
    """Keeps a busy greenlet from holding the loop: call `yield_if_due` between pieces of work."""

    __slots__ = ("_share",)

    def __init__(self) -> None:
        self._share = share()

    def yield_if_due(self) -> bool:
        """Let the others run when the share of this turn is spent; tells whether they did."""
        if not self._share.spent():
            return False
        self._share.wait()
        return True


# ---- deadlines


class Timed(Protocol):
    """What can be watched: `deadline_s` is on the clock of `time.monotonic`."""

    deadline_s: float

    def expired(self) -> None:
        """The deadline is over. Called in the Hub greenlet; must not block."""


class Deadlines:
    """Calls `expired()` of each watched object once its `deadline_s` has passed.

    Arming a deadline is one attribute write: a repeating timer looks over all watched objects a few times a second.
    That is cheaper than a timer each, since nearly every deadline is moved many times and never reached.

    Args:
        tick_s: seconds between two looks, and so the most by which a deadline is late.
    """

    def __init__(self, tick_s: float = TICK_S) -> None:
        self._watched: set[Timed] = set()
        self._tick_s = tick_s
        self._timer = get_hub().loop.timer(tick_s, tick_s)

    def __len__(self) -> int:
        return len(self._watched)

    def __iter__(self) -> Iterator[Timed]:
        return iter(self._watched)

    def watch(self, item: Timed) -> None:
        """Begin to look at `item`."""
        if not self._watched:  # an idle process is not woken
            self._timer.start(self._look)
        self._watched.add(item)

    def forget(self, item: Timed) -> None:
        """Stop looking at `item`."""
        self._watched.discard(item)
        if not self._watched:
            self._timer.stop()

    def close(self) -> None:
        """Forget all."""
        self._watched.clear()
        self._timer.stop()
        self._timer.close()

    def _look(self) -> None:
        now, turn = monotonic(), share()
        for item in [item for item in self._watched if item.deadline_s <= now]:
            if turn.spent():  # so many at once: the others of them in a later turn
                turn.later(self._look)
                return
            item.deadline_s = NEVER
            try:
                item.expired()
            except Exception:
                log.exception("error when a deadline passed")


# ---- garbage

YOUNG_OBJECTS = 10_000
"""Python's own threshold, for a turn that makes so many: ten thousand clients that connect at once need not wait for it
every 700 objects, which is 8 % of the CPU of a connect, measured."""
_NO_LIMIT = (1 << 31) - 1
YOUNG_S = 0.1
"""So often the young are looked at and become old, before they are many."""
DUE_OBJECTS = 50_000
"""When so many objects more have been made than went, a full pass may find something."""
RESTS = 50
"""After a full pass there is none for so many times as long as it took: 2 % of the time at most."""


class GarbageCollector:
    """The garbage collector's passes in a server, in turns of the loop that are their own.

    A full pass looks at every client and every subscription: 8 ms for 10,000 idle clients, 25 ms for 1,000 that
    subscribe to 2,000 topics each. Python would begin it wherever the next object is made, on top of the work of that
    turn. And what it calls young may be large: those 1,000 clients are 10,000 objects with four million references,
    49 ms.
    """

    def __init__(self) -> None:
        loop: Any = get_hub().loop
        self._timer = loop.timer(YOUNG_S, YOUNG_S)
        self._timer.ref = False
        self._made = 0
        self._rests_until_s = 0.0

    def start(self) -> None:
        """Make passes from now on. What is there already stays, and is not looked at again."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS, _NO_LIMIT, _NO_LIMIT)
        self._timer.start(self._look)

    def stop(self) -> None:
        """Make no more passes."""
        self._timer.stop()

    def _look(self) -> None:
        young, passes, _ = gc.get_count()
        self._made += young + passes * YOUNG_OBJECTS
        began_s = perf_counter()
        if self._made < DUE_OBJECTS or began_s < self._rests_until_s:
            gc.collect(1)
            return
        gc.collect()
        now_s = perf_counter()
        self._made, self._rests_until_s = 0, now_s + RESTS * (now_s - began_s)
