"""A cosocket that waits for something else than its connection: `sock:disable()`, or a time when it has none."""

from __future__ import annotations

from smqrt.lua.bridge import fail
from smqrt.net.readiness import TimedDeferred


class Suspension(TimedDeferred[object]):
    """Resolved by `wake` with true, or nil and a word; with nil, "timeout" when time is up."""

    __slots__ = ("_number", "_waiting_ones")

    def __init__(self, waiting_ones: dict[int, Suspension], number: int, timeout_s: float | None) -> None:
        super().__init__(timeout_s)
        self._waiting_ones, self._number = waiting_ones, number
        waiting_ones[number] = self

    def wake(self, word: bytes | None = None) -> None:
        """Let the activity go on."""
        self.resolve(True if word is None else fail(word.decode()))

    def _expired(self) -> None:
        self.wake(b"timeout")

    def _release(self) -> None:
        super()._release()
        del self._waiting_ones[self._number]


class Suspensions:
    """All that wait so, by the number that Lua gave them."""

    def __init__(self) -> None:
        self._waiting: dict[int, Suspension] = {}

    def suspend(self, number: int, timeout_ms: float | None = None) -> Suspension:
        """Park the activity until `wake(number)`, or for so many milliseconds."""
        return Suspension(self._waiting, number, None if timeout_ms is None else timeout_ms / 1000)

    def wake(self, number: int, word: bytes | None = None) -> bool:
        """Let it go on, with true or with nil and `word`; false when nobody waits."""
        suspension = self._waiting.get(number)
        if suspension is None:
            return False
        suspension.wake(word)
        return True

    def wake_all(self, word: bytes) -> None:
        """Let all go on with nil and `word`."""
        for number in list(self._waiting):
            self.wake(number, word)
