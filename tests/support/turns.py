"""The longest turn of the event loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import thread_time

import gevent

from tests.support.garbage import no_collections


@contextmanager
def short_turns(limit_s: float = 0.05) -> Iterator[None]:
    """Check that no turn in the block takes longer, in CPU time and without garbage collections."""
    longest_s, at_s = 0.0, thread_time()

    def tick() -> None:
        nonlocal longest_s, at_s
        while True:
            now_s = thread_time()
            longest_s, at_s = max(longest_s, now_s - at_s), now_s
            gevent.sleep(0)

    with no_collections():
        ticking = gevent.spawn(tick)
        gevent.sleep(0)
        try:
            yield
        finally:
            ticking.kill()
    assert longest_s < limit_s
