"""The answer of an op that doesn't block a greenlet: the activity is parked until the answer comes."""

from __future__ import annotations

from smqrt.broker.hooks import Pending


class Parking(Pending):
    """What an op of `vm.namespace(..., parking=...)` gives when its answer comes later."""

    __slots__ = ()

    def cancel(self) -> None:
        """The activity was ended before; an answer that comes later is ignored."""
        self._done = True
