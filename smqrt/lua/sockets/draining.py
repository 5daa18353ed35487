"""A writer that waits."""

from __future__ import annotations

from smqrt.broker.deferred import Deferred
from smqrt.errors import StreamError
from smqrt.lua.bridge import fail
from smqrt.net.readiness import Wait
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
