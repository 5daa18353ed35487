"""Pooled greenlets: they start at once, may block, keep their order, and survive errors."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import gevent
import pytest
from gevent.event import AsyncResult
from greenlet import GreenletExit, getcurrent

from smqrt.broker.deferred import Deferred
from smqrt.loop import greenlets
from tests.support.waiting import wait_until


def in_hub(fn: Callable[[], Any]) -> Any:
    """Run `fn` in the Hub greenlet and give its value."""
    result: AsyncResult = AsyncResult()

    def run() -> None:
        try:
            result.set(fn())
        except Exception as error:
            result.set_exception(error)

    gevent.get_hub().loop.run_callback(run)
    return result.get(timeout=2)


def test_start_in_the_hub_runs_at_once() -> None:
    def body() -> list[str]:
        seen: list[str] = []
        greenlets.start(seen.append, "worker")
        seen.append("behind start")
        return seen

    assert in_hub(body) == ["worker", "behind start"]


def test_start_elsewhere_runs_in_the_next_turn() -> None:
    seen: list[str] = []
    greenlets.start(seen.append, "worker")
    assert seen == []
    gevent.sleep(0)
    assert seen == ["worker"]


def test_start_returns_when_the_job_blocks() -> None:
    seen: list[str] = []

    def job() -> None:
        seen.append("begin")
        gevent.sleep(0.01)
        seen.append("end")

    def body() -> list[str]:
        greenlets.start(job)
        return list(seen)

    assert in_hub(body) == ["begin"]
    wait_until(lambda: len(seen) == 2)
    assert seen == ["begin", "end"]


def test_call_returns_the_value_or_a_deferred() -> None:
    assert in_hub(lambda: greenlets.call(lambda a, b: a + b, 1, 2)) == 3

    def slow() -> str:
        gevent.sleep(0.01)
        return "late"

    pending = in_hub(lambda: greenlets.call(slow))
    assert isinstance(pending, Deferred)
    answer: AsyncResult = AsyncResult()
    pending.then(lambda value, error: answer.set((value, error)))
    assert answer.get(timeout=1) == ("late", None)


def test_call_raises_or_rejects_the_deferred() -> None:
    def fails() -> None:
        raise LookupError("quick")

    with pytest.raises(LookupError, match="quick"):
        in_hub(lambda: greenlets.call(fails))

    def fails_later() -> None:
        gevent.sleep(0.005)
        raise LookupError("slow")

    pending = greenlets.call(fails_later)
    errors: list[BaseException | None] = []
    pending.then(lambda value, error: errors.append(error))
    wait_until(lambda: errors)
    assert str(errors[0]) == "slow"


def test_an_error_is_logged_and_the_greenlet_stays(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise LookupError("named in the log")

    with caplog.at_level(logging.ERROR, "smqrt"):
        in_hub(lambda: greenlets.start(fails))
    assert "named in the log" in caplog.text
    assert "Traceback" in caplog.text
    assert in_hub(lambda: greenlets.call(lambda: "alive")) == "alive"


def test_greenlets_are_reused() -> None:
    def who() -> int:
        return id(gevent.getcurrent())

    first = in_hub(lambda: greenlets.call(who))
    assert in_hub(lambda: greenlets.call(who)) == first


def test_the_pool_stays_bounded_after_a_burst() -> None:
    ended: list[int] = []

    def job(number: int) -> None:
        gevent.sleep(0.01)
        ended.append(number)

    for number in range(3 * greenlets.MAX_IDLE):
        greenlets.start(job, number)
    wait_until(lambda: len(ended) >= 3 * greenlets.MAX_IDLE, "the end of all")
    assert sorted(ended) == list(range(3 * greenlets.MAX_IDLE))
    assert len(greenlets._pool(gevent.get_hub())) <= greenlets.MAX_IDLE


def test_a_nested_start_runs_later() -> None:
    seen: list[str] = []

    def outer() -> None:
        greenlets.start(seen.append, "inner")
        seen.append("outer")

    in_hub(lambda: greenlets.start(outer))
    gevent.sleep(0)
    assert seen == ["outer", "inner"]


def test_a_job_can_use_gevent_timeouts() -> None:
    def job() -> str:
        with gevent.Timeout(0.01, False):
            gevent.sleep(5)
        return "timed out"

    pending = greenlets.call(job)
    values: list[Any] = []
    pending.then(lambda value, error: values.append(value))
    wait_until(lambda: values)
    assert values == ["timed out"]


def test_a_leftover_timeout_does_not_hit_other_jobs(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []
    left = gevent.Timeout(0.02)

    def stranger() -> None:
        gevent.sleep(0.04)
        seen.append("unharmed")

    def body() -> None:
        greenlets.start(left.start)
        greenlets.start(stranger)

    with caplog.at_level(logging.ERROR, "smqrt"):
        in_hub(body)
        wait_until(lambda: seen)
    assert seen == ["unharmed"]
    assert [record.message.partition(" has ended")[0] for record in caplog.records] == ["Timeout.start"]


@pytest.mark.parametrize(
    "error",
    [gevent.Timeout(), GreenletExit(), ValueError("x"), KeyboardInterrupt()],
    ids=lambda error: type(error).__name__,
)
def test_a_greenlet_killed_while_idle_gets_no_job(error: BaseException) -> None:
    seen: list[str] = []

    def body() -> list[str]:
        greenlets.start(lambda: found.append(getcurrent()))
        found.pop().throw(error)
        greenlets.start(seen.append, "done")
        return seen

    found: list[Any] = []
    assert in_hub(body) == ["done"]


def test_a_referenced_greenlet_ends_in_the_hub() -> None:
    """It ends in the Hub, when nobody refers to it any more."""
    found: list[Any] = []

    def body() -> list[bool]:
        greenlets.start(lambda: found.append(getcurrent()))
        greenlets.start(len, ())  # finds it referred to
        is_freed = weakref.ref(found.pop())
        was_kept = is_freed() is not None
        greenlets.start(lambda: found.append(getcurrent()))
        greenlets.start(len, ())
        return [was_kept, is_freed() is None]

    assert in_hub(body) == [True, True]


def test_all_waiting_greenlets_get_the_value_though_one_fails() -> None:
    pending = Deferred()
    seen: list[str] = []

    def fails(value: Any, error: BaseException | None) -> None:
        raise LookupError("mine")

    pending.then(fails)
    pending.then(lambda value, error: seen.append(value))
    with pytest.raises(LookupError, match="mine"):
        pending.resolve("answer")
    assert seen == ["answer"]
