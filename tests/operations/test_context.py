"""What operators see of a process: its use of resources, the delay of its loop, and whether it is ready."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from smqrt.operations import context
from smqrt.operations.context import BUCKETS_S, Health, LoopLag, process_usage
from tests.support.clock import Clock
from tests.support.waiting import wait_until


def test_usage_is_that_of_this_process() -> None:
    before = process_usage()
    with open(os.devnull) as one, open(os.devnull) as two:
        during = process_usage()
        assert during.open_files >= before.open_files + 2, (one, two)
    assert before.pid == os.getpid()
    assert before.cpu_s <= time.process_time() + 0.02
    assert 1 << 20 < before.memory_bytes < before.virtual_bytes
    assert before.threads >= 1
    assert time.time() - 86_400 < before.started_s < time.time() + 1
    assert before.open_files < before.open_files_limit


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(context, "monotonic", clock)
    monkeypatch.setattr(context, "TICK_S", 0.001)
    return clock


@pytest.fixture
def lag(clock: Clock) -> Iterator[LoopLag]:
    lag = LoopLag()
    lag.start()
    yield lag
    lag.stop()
    lag.stop()


def pass_time(lag: LoopLag, clock: Clock, seconds: float) -> None:
    """Some time passes without a turn of the loop."""
    clock.now_s += seconds
    before = lag.count
    wait_until(lambda: lag.count > before)


def test_a_late_tick_counts_in_its_bucket(lag: LoopLag, clock: Clock) -> None:
    pass_time(lag, clock, 0.041)
    assert lag.total_s == pytest.approx(0.04)
    assert lag.buckets[BUCKETS_S.index(0.05)] == 1
    pass_time(lag, clock, 5.001)
    assert lag.buckets[-1] == 1, "longer than all buckets"
    assert lag.total_s == pytest.approx(5.04)
    assert sum(lag.buckets) == lag.count
    assert lag.buckets[0] == lag.count - 2, "others were in time"


def test_the_worst_delay_is_that_of_the_last_minute(lag: LoopLag, clock: Clock) -> None:
    pass_time(lag, clock, 0.401)
    for _ in range(2):
        pass_time(lag, clock, 3.0)
        pass_time(lag, clock, 0.0)
    assert lag.max_of(60) == lag.max_s == pytest.approx(2.999)
    clock.now_s += 10
    assert lag.max_of(5) == 0
    clock.now_s += 60
    assert lag.max_s == 0


def test_a_server_is_ready_when_serving_and_not_drained() -> None:
    phase = "loading"
    good: Any = SimpleNamespace(uri="/good/", error=None)
    bad: Any = SimpleNamespace(uri="/bad/", error="oh")
    health = Health(lambda: phase, lambda: [good, bad])

    def obstacle() -> str:
        return " ".join(health.obstacles())

    assert "are being loaded" in obstacle()
    phase = "serving"
    assert obstacle() == ""
    health.strict = True
    assert obstacle() == "The application /bad/ failed; its error is at /api/v1/apps."
    health.drained = True
    assert "is drained" in obstacle()
    phase = "draining"
    assert "is shutting down" in obstacle()
