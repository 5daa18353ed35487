"""`Deferred`: a value that comes later. Whatever is waited for without a greenlet is one: the answer of a hook, a name
on its way to the disk, a readable socket, a Lua call that parks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar, cast

T = TypeVar("T")


class Deferred(Generic[T]):
    """Settled once, with a value or an error, or cancelled; what comes later is ignored.

    It knows no clock and no loop: a deadline is a timer of somebody who rejects it (`net.readiness.Wait`).

    Attributes:
        done: whether it was settled or cancelled.
    """

    __slots__ = ("_continuations", "_error", "_value", "done")

    def __init__(self) -> None:
        self.done = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._continuations: list[Callable[[T | None, BaseException | None], object]] = []

    @property
    def failed(self) -> bool:
        """Whether it was rejected."""
        return self._error is not None

    def result(self) -> T:
        """The value, once `done`; raises what it was rejected with."""
        if self._error is not None:
            raise self._error
        return cast(T, self._value)

    def then(self, continuation: Callable[[T | None, BaseException | None], object]) -> None:
        """Call `continuation(value, error)` when it is settled, at once if it is so already."""
        if self.done:
            continuation(self._value, self._error)
        else:
            self._continuations.append(continuation)

    def resolve(self, value: T | None = None) -> None:
        """Settle it with `value`."""
        self._settle(value, None)

    def reject(self, error: BaseException) -> None:
        """Settle it with `error`."""
        self._settle(None, error)

    def cancel(self) -> None:
        """Wait no more: the continuations so far are never called; a later one is called at once, with None."""
        self._continuations = []
        self._settle(None, None)

    def _settle(self, value: T | None, error: BaseException | None) -> None:
        if self.done:
            return
        self.done, self._value, self._error = True, value, error
        self._release()
        continuations, self._continuations = self._continuations, []
        failure: Exception | None = None
        for continuation in continuations:
            try:
                continuation(value, error)
            except Exception as fault:  # the others wait for it as well
                failure = failure or fault
        if failure is not None:
            raise failure

    def _release(self) -> None:
        """Called once, before the continuations, however it ends: subclasses free their timers and watchers here."""
