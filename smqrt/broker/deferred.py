"""`Deferred`: a result that comes later, without a greenlet.

Examples: the answer of a hook, saving a name, waiting for a readable socket, and a suspended Lua call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Deferred(Generic[T]):
    """Result that is settled once, with a value or an error, or cancelled; later attempts are ignored.

    A timeout is a timer that calls `reject`.

    Attributes:
        done: whether it is settled or cancelled.
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
        """Return the value, once `done`; raise the error it was rejected with."""
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # a resolved one has a value

    def then(self, continuation: Callable[[T | None, BaseException | None], object]) -> None:
        """Call `continuation(value, error)` when the result is settled; at once if it is settled already."""
        if self.done:
            continuation(self._value, self._error)
        else:
            self._continuations.append(continuation)

    def resolve(self, value: T | None = None) -> None:
        """Settle with `value`."""
        self._settle(value, None)

    def reject(self, error: BaseException) -> None:
        """Settle with `error`."""
        self._settle(None, error)

    def cancel(self) -> None:
        """Cancel: earlier continuations are never called; a later one is called at once, with None."""
        self._continuations = []
        self._settle(None, None)

    def _settle(self, value: T | None, error: BaseException | None) -> None:
        if self.done:
            return
        self.done, self._value, self._error = True, value, error
        self._release()
        # Removed first, so that a settled result keeps no references to its callers.
        continuations, self._continuations = self._continuations, []
        failure: Exception | None = None
        for continuation in continuations:
            try:
                continuation(value, error)
            except Exception as fault:  # the other continuations must also be called
                failure = failure or fault
        if failure is not None:
            raise failure

    def _release(self) -> None:
        """Free timers and watchers, in subclasses. Called once: before the continuations, or by `cancel`."""
