"""Waiting for events and file descriptors without a greenlet.

A `Wait` is settled when the event occurs or the descriptor is ready, after its timeout, or when the descriptor is
closed. That happens in the Hub greenlet only, so that its continuation may switch. `block` waits in a greenlet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from gevent import get_hub
from gevent.hub import Waiter
from greenlet import getcurrent

from smqrt.broker.deferred import Deferred
from smqrt.errors import StreamError
from smqrt.loop.scheduling import Share, share

READ, WRITE = 1, 2

T = TypeVar("T")


class Watcher(Protocol):
    """A watcher of the loop for a file descriptor."""

    def start(self, callback: Callable[[], object]) -> None:
        """Have `callback` called whenever the descriptor is ready."""

    def stop(self) -> None:
        """Stop calling it."""

    def close(self) -> None:
        """Free it; it can't be started again."""


class TimedDeferred(Deferred[T]):
    """A `Deferred` with a deadline, `timeout_s` from now; None sets none."""

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
    """A pending event: resolved with None, or rejected with `StreamError` ("timeout", or why it can't occur)."""

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
        """Return a `Wait` for its next occurrence."""
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
    """Fires when a file descriptor is ready for `events`; in a later turn when this turn's share is spent.

    Its watcher is active only while there are `Wait`s.
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
        """Close the watcher, and reject all `Wait`s with `error`. To be called before the descriptor is closed."""
        self._watcher.stop()
        self._watcher.close()
        self._watcher = None
        self.fail(error)


def block(wait: Wait) -> None:
    """Block this greenlet until `wait` is settled.

    Raises:
        StreamError: what the `Wait` was rejected with.
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
