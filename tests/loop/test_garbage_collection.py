"""The collector's passes in a server."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import gevent
import pytest

from smqrt.loop import scheduling


class Node:
    """Refers to itself."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def collector() -> Iterator[scheduling.GarbageCollector]:
    before = gc.get_threshold()
    collector = scheduling.GarbageCollector()
    collector.start()
    collector.freeze()
    yield collector
    collector.stop()
    gc.set_threshold(*before)


def gone(ref: weakref.ref[Node], within_s: float) -> bool:
    with gevent.Timeout(within_s, False):
        while ref() is not None:
            gevent.sleep(0.01)
    return ref() is None


def test_a_young_cycle_is_collected(collector: scheduling.GarbageCollector) -> None:
    node = Node()
    ref = weakref.ref(node)
    del node
    assert gone(ref, within_s=5)


def test_old_cycles_are_collected_after_enough_allocations(
    collector: scheduling.GarbageCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node()
    ref = weakref.ref(node)
    while any(one is node for one in gc.get_objects(0)) or any(one is node for one in gc.get_objects(1)):
        gevent.sleep(0.01)
    del node
    assert not gone(ref, within_s=0.3)
    monkeypatch.setattr(scheduling, "DUE_OBJECTS", 100)
    kept = [[number] for number in range(1000)]
    assert gone(ref, within_s=5)
    assert len(kept) == 1000
