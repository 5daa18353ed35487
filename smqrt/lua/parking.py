"""The answer of an op that doesn't block a greenlet: the activity is parked until the answer comes."""

from __future__ import annotations

from time import monotonic

from smqrt.broker.hooks import Pending


class Parking(Pending):
    """What an op of `vm.namespace(..., parking=...)` gives when its answer comes later.

    Attributes:
        op_name: the call that waits; since_s: the clock (`monotonic`) when it began to.
    """

    __slots__ = ("op_name", "since_s")

    def __init__(self) -> None:
        super().__init__()
        self.op_name = ""
        self.since_s = monotonic()

    def cancel(self) -> None:
        """The activity was ended before; an answer that comes later is ignored."""
        self._done = True
