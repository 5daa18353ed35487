"""One timer for many deadlines."""

from __future__ import annotations

from time import monotonic

import gevent
import pytest

from smqrt.loop.scheduling import NEVER, Deadlines
from tests.support.waiting import wait_until


class Item:
    def __init__(self, in_s: float, error: Exception | None = None) -> None:
        self.deadline_s = monotonic() + in_s
        self.calls = 0
        self.error = error

    def expired(self) -> None:
        self.calls += 1
        if self.error:
            raise self.error


def test_expires_once_and_in_time() -> None:
    deadlines = Deadlines(0.01)
    soon, late, never, gone = Item(0.02), Item(0.2), Item(NEVER), Item(0.02)
    for item in (soon, late, never, gone):
        deadlines.watch(item)
    deadlines.forget(gone)
    wait_until(lambda: soon.calls)
    gevent.sleep(0.05)  # once more, or another one, would come in that time
    assert [item.calls for item in (soon, late, never, gone)] == [1, 0, 0, 0]
    late.deadline_s = monotonic()
    wait_until(lambda: late.calls)
    assert late.calls == 1
    deadlines.close()


def test_an_error_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    deadlines = Deadlines(0.01)
    items = [Item(0.01, LookupError("x")) for _ in range(3)]
    for item in items:
        deadlines.watch(item)
    wait_until(lambda: all(item.calls for item in items))
    assert [item.calls for item in items] == [1, 1, 1]
    assert caplog.text.count("LookupError") == 3
    deadlines.close()


def test_an_idle_process_is_not_woken() -> None:
    deadlines = Deadlines(0.01)
    assert not deadlines._timer.active
    item = Item(NEVER)
    deadlines.watch(item)
    assert deadlines._timer.active
    deadlines.forget(item)
    assert not deadlines._timer.active
    deadlines.close()
