"""What cosockets wait for besides data: room in a queue, and `wake` of one that is disabled or has no connection."""

from __future__ import annotations

from smqrt.broker.deferred import Deferred
from smqrt.errors import StreamError
from smqrt.lua.bridge import fail
from smqrt.net.readiness import TimedDeferred, Wait
from smqrt.net.stream import Stream

STALLED_S = 30.0  # the other side took nothing at all for so long


class Draining(Deferred[object]):
    """Resolved with true when there is room in the queue again; with nil and a word when there never will be, or
    "timeout" when the other side has stopped to read.
    """

    __slots__ = ("_left_bytes", "_stream", "_wait")

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream
        self._wait: Wait
        self._await()

    def _release(self) -> None:
        self._wait.cancel()

    def _await(self) -> None:
        self._left_bytes = self._stream.queued_bytes
        self._wait = self._stream.writable(STALLED_S)
        self._wait.then(self._over)

    def _over(self, _value: None, error: BaseException | None) -> None:
        if not isinstance(error, StreamError):
            self.resolve(True)
        elif error.word == "timeout" and self._stream.queued_bytes < self._left_bytes:
            self._await()  # slow, but it reads
        else:
            self.resolve(fail(error.word))


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
        self._waiting_ones.pop(self._number, None)


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
