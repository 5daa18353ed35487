"""Python's garbage collector in a server: what it would do amid a turn of the loop is done in turns of its own.

A full pass looks at every client and every subscription: 8 ms for 10,000 idle clients, 25 ms for 1,000 that subscribe
to 2,000 topics each. Python would begin it wherever the next object is made, on top of the work of that turn. And what
it calls young may be large: those 1,000 clients are 10,000 objects with four million references, 49 ms.
"""

from __future__ import annotations

import gc
from time import perf_counter
from typing import Any

from gevent import get_hub

YOUNG_OBJECTS = 10_000
"""Python's own threshold, for a turn that makes so many: ten thousand clients that connect at once need not wait for it
every 700 objects, which is 8 % of the CPU of a connect, measured."""
_NEVER = (1 << 31) - 1
YOUNG_S = 0.1
"""So often the young are looked at and become old, before they are many."""
DUE_OBJECTS = 50_000
"""When so many objects more have been made than went, a full pass may find something."""
RESTS = 50
"""After a full pass there is none for so many times as long as it took: 2 % of the time at most."""


class Collector:
    """The collector's passes in a process."""

    def __init__(self) -> None:
        loop: Any = get_hub().loop
        self._timer = loop.timer(YOUNG_S, YOUNG_S)
        self._timer.ref = False
        self._made = 0
        self._rests_until_s = 0.0

    def start(self) -> None:
        """Make passes from now on. What is there already stays, and is not looked at again."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS, _NEVER, _NEVER)
        self._timer.start(self._look)

    def stop(self) -> None:
        """Make no more passes."""
        self._timer.stop()

    def _look(self) -> None:
        young, passes, _ = gc.get_count()
        self._made += young + passes * YOUNG_OBJECTS
        began_s = perf_counter()
        if self._made < DUE_OBJECTS or began_s < self._rests_until_s:
            gc.collect(1)
            return
        gc.collect()
        now_s = perf_counter()
        self._made, self._rests_until_s = 0, now_s + RESTS * (now_s - began_s)
