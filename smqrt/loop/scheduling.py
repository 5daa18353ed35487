"""Time slices, deadlines, garbage collection and readiness of the event loop."""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Callable, Iterator
from time import monotonic, perf_counter
from typing import Any, Generic, Protocol, TypeVar

from gevent import get_hub
from gevent.hub import Hub, Waiter
from greenlet import getcurrent

from smqrt.broker.deferred import Deferred
from smqrt.errors import StreamError

log = logging.getLogger("smqrt")

NEVER = float("inf")
"""The deadline of objects without one."""
TICK_S = 0.25
TURN_S = 0.004
"""The time that all busy tasks together may use in one turn."""
_SHORTEST_S = 1e-6  # of a timer: the loop checks sockets and other timers first, unlike with `run_callback`
_SHARE = "smqrt_share"  # the attribute of a hub with its share; each thread has a hub

Job = tuple[Callable[..., object], tuple[object, ...]]


class Share:
    """The time that all busy tasks of a thread share in one turn of the loop; see `share`.

    When the share is used up, tasks continue in later turns, in the order of `later` calls. So a hundred busy
    connections block the loop no longer than one.

    Attributes:
        turn: number of the turn of the last call of `spent`.
    """

    __slots__ = ("_loop", "_queue", "_timer", "_until_s", "turn")

    def __init__(self, hub: Hub) -> None:
        self._loop: Any = hub.loop
        self.turn = -1
        self._until_s = 0.0
        self._queue: deque[Job] = deque()
        self._timer: Any = self._loop.timer(_SHORTEST_S)

    def spent(self) -> bool:
        """Return whether the time of this turn is used up. The time begins with the first call in a turn."""
        turn: int = self._loop.iteration
        if turn != self.turn:
            self.turn, self._until_s = turn, monotonic() + TURN_S
            return False
        return monotonic() >= self._until_s

    def later(self, fn: Callable[..., object], *args: object) -> None:
        """Call `fn(*args)` in the Hub greenlet, in a later turn of the loop."""
        self._queue.append((fn, args))
        if not self._timer.active:
            self._timer.start(self._run_queue)

    @property
    def has_waiting(self) -> bool:
        """Whether tasks wait for a later turn."""
        return bool(self._timer.active)

    def wait(self) -> None:
        """Block this greenlet until a later turn of the loop."""
        waiter: Waiter[None] = Waiter()
        self.later(waiter.switch, None)
        waiter.get()

    def _run_queue(self) -> None:
        queue = self._queue
        try:
            while queue:
                fn, args = queue.popleft()
                fn(*args)
                if self.spent():
                    break
        finally:
            if queue and not self._timer.active:
                self._timer.start(self._run_queue)


def share() -> Share:
    """Return the share of this thread's loop."""
    hub = get_hub()
    found: Share | None = getattr(hub, _SHARE, None)
    if found is None:
        found = Share(hub)
        setattr(hub, _SHARE, found)
    return found


class Turn:
    """Prevents a busy greenlet from blocking the loop: call `yield_if_due` between pieces of work."""

    __slots__ = ("_share",)

    def __init__(self) -> None:
        self._share = share()

    def yield_if_due(self) -> bool:
        """Yield to other greenlets if the share of this turn is used up; return whether it was."""
        if not self._share.spent():
            return False
        self._share.wait()
        return True


# ---- Deadlines


class Timed(Protocol):
    """An object with a deadline, on the clock of `time.monotonic`."""

    deadline_s: float

    def expired(self) -> None:
        """Handle the passed deadline. Called in the Hub greenlet; must not block."""


TimedItem = TypeVar("TimedItem", bound=Timed)


class Deadlines(Generic[TimedItem]):
    """Calls `expired()` of each watched object once its `deadline_s` has passed.

    To set a deadline, write the attribute. A repeating timer checks all watched objects a few times a second. That is
    cheaper than a timer for each object, since nearly every deadline is changed many times and never reached.

    Args:
        tick_s: seconds between two checks, and so the maximum delay of `expired`.
    """

    def __init__(self, tick_s: float = TICK_S) -> None:
        self._watched: set[TimedItem] = set()
        self._tick_s = tick_s
        self._timer = get_hub().loop.timer(tick_s, tick_s)

    def __len__(self) -> int:
        return len(self._watched)

    def __iter__(self) -> Iterator[TimedItem]:
        return iter(self._watched)

    def watch(self, item: TimedItem) -> None:
        """Watch `item`."""
        if not self._watched:  # so that an idle process is not woken up
            self._timer.start(self._check)
        self._watched.add(item)

    def forget(self, item: TimedItem) -> None:
        """Stop watching `item`."""
        self._watched.discard(item)
        if not self._watched:
            self._timer.stop()

    def close(self) -> None:
        """Stop watching all objects."""
        self._watched.clear()
        self._timer.stop()
        self._timer.close()

    def _check(self) -> None:
        now, turn = monotonic(), share()
        for item in [item for item in self._watched if item.deadline_s <= now]:
            if turn.spent():  # many have expired; the rest follows in a later turn
                turn.later(self._check)
                return
            item.deadline_s = NEVER
            try:
                item.expired()
            except Exception:
                log.exception("error when a deadline passed")


# ---- Garbage collection

YOUNG_OBJECTS = 10_000
"""The threshold for automatic passes of Python. With the default of 700 objects they take 8 % of the CPU time of a
connect (measured with ten thousand clients that connect at the same time)."""
_NO_LIMIT = (1 << 31) - 1
YOUNG_S = 0.1
"""The interval of passes over young objects."""
DUE_OBJECTS = 50_000
"""The excess of created over deleted objects at which a full pass is due."""
RESTS = 50
"""The pause after a full pass, as a multiple of its duration: full passes take at most 2 % of the time."""


class GarbageCollector:
    """Runs the passes of the garbage collector in separate turns of the loop.

    A full pass visits every client and every subscription. It takes 8 ms for 10,000 idle clients, and 25 ms for 1,000
    clients with 2,000 subscriptions each. Python would start it during other work, when an object is created. A pass
    over young objects may be long, too: for the 10,000 objects and four million references of those 1,000 clients it
    takes 49 ms.
    """

    def __init__(self) -> None:
        loop: Any = get_hub().loop
        self._timer = loop.timer(YOUNG_S, YOUNG_S)
        self._timer.ref = False  # the timer alone does not keep the loop running
        self._made = 0
        self._rests_until_s = 0.0

    def start(self) -> None:
        """Start the passes."""
        gc.set_threshold(YOUNG_OBJECTS, _NO_LIMIT, _NO_LIMIT)
        self._timer.start(self._collect)

    def freeze(self) -> None:
        """Exclude the objects that exist now from the passes."""
        gc.collect()
        gc.freeze()

    def stop(self) -> None:
        """Stop the passes."""
        self._timer.stop()

    def _collect(self) -> None:
        young, passes, _ = gc.get_count()
        self._made += young + passes * YOUNG_OBJECTS
        began_s = perf_counter()
        if self._made < DUE_OBJECTS or began_s < self._rests_until_s:
            gc.collect(1)
            return
        gc.collect()
        now_s = perf_counter()
        self._made, self._rests_until_s = 0, now_s + RESTS * (now_s - began_s)


# ---- Readiness of events and file descriptors
#
# A `Wait` is settled when the event occurs or the descriptor is ready, after its timeout, or when the descriptor is
# closed. That happens in the Hub greenlet only, so that its continuation may switch. `block` waits in a greenlet.

READ, WRITE = 1, 2

T = TypeVar("T")


class Watcher(Protocol):
    """A watcher of the loop for a file descriptor."""

    def start(self, callback: Callable[..., object], *args: object) -> None:
        """Begin to call `callback(*args)` whenever the descriptor is ready."""

    def stop(self) -> None:
        """Stop calling the callback."""

    def close(self) -> None:
        """Free the watcher, which cannot be started again."""


class TimedDeferred(Deferred[T]):
    """A `Deferred` with a timeout; `timeout_s` None: no timeout."""

    __slots__ = ("_timer",)

    def __init__(self, timeout_s: float | None) -> None:
        super().__init__()
        self._timer: Any = None
        if timeout_s is not None:
            self._timer = get_hub().loop.timer(max(timeout_s, 0.0))
            self._timer.start(self._expired, update=True)

    def _expired(self) -> None:
        self.reject(StreamError("timeout"))

    def _release(self) -> None:
        if self._timer is not None:
            self._timer.stop()
            self._timer.close()
            self._timer = None


class Wait(TimedDeferred[None]):
    """A future event: resolved with None, or rejected with `StreamError` ("timeout", or why it can't occur)."""

    __slots__ = ("_signal",)

    def __init__(self, signal: Signal, timeout_s: float | None) -> None:
        super().__init__(timeout_s)
        self._signal = signal

    def _release(self) -> None:
        super()._release()
        self._signal.forget(self)


class Signal:
    """An event that any number of `Wait`s wait for."""

    __slots__ = ("_waits",)

    def __init__(self) -> None:
        self._waits: list[Wait] = []

    def __len__(self) -> int:
        return len(self._waits)

    def wait(self, timeout_s: float | None = None) -> Wait:
        """Return a `Wait` for the next occurrence."""
        wait = Wait(self, timeout_s)
        self._waits.append(wait)
        return wait

    def forget(self, wait: Wait) -> None:
        """Remove a settled `Wait`; called by it."""
        if wait in self._waits:
            self._waits.remove(wait)

    def fire(self) -> None:
        """Resolve all current `Wait`s. In the Hub greenlet only."""
        for wait in self._waits.copy():
            wait.resolve()

    def fail(self, error: BaseException) -> None:
        """Reject all current `Wait`s, in the next turn of the loop. From any greenlet."""
        for wait in self._waits.copy():
            get_hub().loop.run_callback(wait.reject, error)


class Ready(Signal):
    """Fires when a file descriptor is ready for `events`; in a later turn if the share of this turn is used up.

    The watcher is active only while there are `Wait`s.
    """

    __slots__ = ("_share", "_watcher")

    def __init__(self, fd: int, events: int) -> None:
        super().__init__()
        self._share: Share = share()
        self._watcher: Any = get_hub().loop.io(fd, events)

    def wait(self, timeout_s: float | None = None) -> Wait:
        """Return a `Wait` for the descriptor."""
        wait = super().wait(timeout_s)
        if not self._watcher.active:
            self._watcher.start(self._is_ready)
        return wait

    def _is_ready(self) -> None:
        if self._share.spent():
            self._watcher.stop()
            self._share.later(self.fire)
        else:
            self.fire()

    def forget(self, wait: Wait) -> None:
        """Remove a settled `Wait`; called by it."""
        super().forget(wait)
        if not self._waits and self._watcher is not None:
            self._watcher.stop()

    def close(self, error: BaseException) -> None:
        """Close the watcher, and reject all `Wait`s with `error`. Call it before the descriptor is closed."""
        self._watcher.stop()
        self._watcher.close()
        self._watcher = None
        self.fail(error)


def block(wait: Wait) -> None:
    """Block this greenlet until `wait` is settled.

    Raises:
        StreamError: the error with which the `Wait` was rejected.
    """
    hub = get_hub()
    assert getcurrent() is not hub, "the Hub greenlet can't wait"
    waiter: Waiter[None] = Waiter(hub)
    wait.then(lambda value, error: waiter.switch(None))
    try:
        waiter.get()
    finally:
        wait.cancel()
    wait.result()
