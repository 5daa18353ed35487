"""Promptness: what a handler starts continues at once, not at the next event of the loop."""

from __future__ import annotations

from collections.abc import Callable

import gevent
import pytest
from gevent.event import Event

from smqrt import hub
from smqrt.loop import greenlets
from tests.support.clock import undisturbed_s

BEGINNINGS = {
    "spawn": gevent.spawn,
    "worker": greenlets.start,
    "callback": lambda fn: gevent.get_hub().loop.run_callback(fn),
}


@pytest.mark.parametrize("begin", BEGINNINGS.values(), ids=list(BEGINNINGS))
def test_what_a_handler_begins_runs_at_once(begin: Callable[[Callable[[], None]], object]) -> None:
    smq = hub.create()
    started_s = undisturbed_s()
    for _ in range(8):
        done = Event()
        smq.subscribe("self", lambda *_, done=done: begin(done.set))
        smq.publish("go", "self")
        assert done.wait(2)
    assert undisturbed_s() - started_s < 1  # waiting for the next event of the loop takes 0.25 s each time


def test_a_handler_publishing_to_itself_continues_at_once() -> None:
    smq = hub.create()
    done = Event()

    def count_down(data: bytes, *_: int) -> None:
        if data == b"0":
            done.set()
        else:
            smq.publish(str(int(data) - 1), "self")

    smq.subscribe("self", count_down)
    started_s = undisturbed_s()
    smq.publish("1000", "self")
    assert done.wait(5)
    assert undisturbed_s() - started_s < 0.5
