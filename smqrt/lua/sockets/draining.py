"""A writer that waits."""

from __future__ import annotations

from typing import Any

from smqrt.errors import StreamError
from smqrt.lua.bridge import fail
from smqrt.lua.parking import Parking
from smqrt.net.readiness import Wait


class Draining(Parking):
    """Answered with true when there is room in the queue again, with nil and a word when there never will be."""

    __slots__ = ("_wait",)

    def __init__(self, wait: Wait) -> None:
        super().__init__()
        self._wait = wait
        wait.then(self._over)

    def cancel(self) -> None:
        """The activity was ended before."""
        self._wait.cancel()
        super().cancel()

    def _over(self, _value: Any, error: BaseException | None) -> None:
        self.resolve(fail(error.word) if isinstance(error, StreamError) else True)
