"""The answer of an op that doesn't block a greenlet: the activity is parked until the answer comes."""

from __future__ import annotations

from collections.abc import Callable

from smqrt.broker.hooks import Pending


class Parking(Pending):
    """What an op of `vm.namespace(..., parking=...)` gives when its answer comes later.

    Attributes:
        on_cancel: called when the activity is ended before.
    """

    __slots__ = ("on_cancel",)

    def __init__(self) -> None:
        super().__init__()
        self.on_cancel: Callable[[], None] | None = None

    def cancel(self) -> None:
        """The activity has ended; an answer that comes later is ignored."""
        self._done = True
        if self.on_cancel is not None:
            self.on_cancel()
