"""Threads of our own: bounds, fairness between groups, and their end."""

from __future__ import annotations

import threading
from collections.abc import Callable

import gevent
import pytest

from smqrt.loop import greenlets
from smqrt.loop import threads as module
from smqrt.loop.threads import Threads
from tests.support.waiting import wait_until


def held(go: threading.Event, begun: list[str], name: str) -> Callable[[], str]:
    def job() -> str:
        begun.append(name)
        assert go.wait(20)
        return name

    return job


def test_values_and_errors() -> None:
    threads = Threads(2, 2)
    assert greenlets.wait(threads.submit("a", divmod, 7, 2)) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        greenlets.wait(threads.submit("a", divmod, 7, 0))
    answers = [threads.submit("a", str, number) for number in range(1000)]
    assert [greenlets.wait(answer) for answer in answers] == list(map(str, range(1000)))
    assert threads.count == 2
    assert not threads._groups


def test_a_group_with_slow_jobs_leaves_threads_for_others() -> None:
    threads, go, begun = Threads(5, 3), threading.Event(), []
    slow = [threads.submit("slow", held(go, begun, f"slow {number}")) for number in range(6)]
    wait_until(lambda: len(begun) == 3)
    assert greenlets.wait(threads.submit("other", str, 5)) == "5"
    assert sorted(begun) == ["slow 0", "slow 1", "slow 2"]
    go.set()
    assert [greenlets.wait(answer) for answer in slow] == [f"slow {number}" for number in range(6)]
    assert not threads._timer.active or wait_until(lambda: not threads._timer.active)


def test_two_slow_jobs_do_not_delay_quick_ones() -> None:
    threads, go, begun = Threads(5, 4), threading.Event(), []
    slow = [threads.submit("a", held(go, begun, "slow")) for _ in range(2)]
    assert [greenlets.wait(threads.submit("a", str, number)) for number in range(50)] == list(map(str, range(50)))
    assert not any(answer.done for answer in slow)
    go.set()
    gevent.joinall([gevent.spawn(greenlets.wait, answer) for answer in slow], raise_error=True)


def test_idle_threads_end_and_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.01)
    threads = Threads(2, 2)
    greenlets.wait(threads.submit("a", str, 1))
    wait_until(lambda: threads.count == 0)
    assert greenlets.wait(threads.submit("a", str, 1)) == "1"
