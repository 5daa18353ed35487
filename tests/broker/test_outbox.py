"""Outboxes on their own: the slow-consumer rule, the flush at the end of a turn, and chores."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from smqrt.broker import outbox as module
from smqrt.broker.outbox import (
    CONTROL_BUDGET_BYTES,
    Drop,
    Outbox,
    QueuedMemory,
    backlog,
    dirty,
    flush_dirty,
    run_in_background,
)
from smqrt.wire import smq
from smqrt.wire.connection_state import Life

MESSAGE = smq.publish_frame(7, 8, 0, b"x" * 85)  # 100 bytes


class Slow(Outbox):
    """An outbox whose client does not read."""

    __slots__ = ("drops", "is_overloaded")

    def __init__(self, budget_bytes: int) -> None:
        super().__init__()
        self.life, self.budget_bytes = Life.BLOCKED, budget_bytes
        self.drops: list[tuple[Drop, int]] = []
        self.is_overloaded = False

    def overflowed(self, reason: Drop, messages: int) -> None:
        self.drops.append((reason, messages))

    def overloaded(self) -> None:
        self.is_overloaded = True


class Ready(Outbox):
    """An outbox whose client takes everything; `order` is where all of them write when they are flushed."""

    __slots__ = ("name", "order")

    def __init__(self, order: list[str], name: str) -> None:
        super().__init__()
        self.order, self.name = order, name

    def flush(self) -> None:
        self.queue.clear()
        self.order.append(self.name)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    held_bytes = QueuedMemory.total_bytes
    yield
    while flush_dirty():
        pass
    dirty.clear()
    backlog.clear()
    QueuedMemory.total_bytes = held_bytes


def late_clock(step_s: float = 0.004) -> itertools.count[float]:
    return itertools.count(0.0, step_s)


# ---- the slow-consumer rule


def test_what_fits_the_budget_waits() -> None:
    slow = Slow(300)
    for _ in range(3):
        slow.put(MESSAGE)
    assert (slow.queue, slow.queued_bytes, slow.drops) == ([MESSAGE] * 3, 300, [])


def test_past_the_budget_whole_messages_are_dropped_the_newest_first() -> None:
    slow = Slow(350)
    slow.put(MESSAGE * 2)
    slow.put(MESSAGE * 4)
    assert slow.queue == [MESSAGE * 2, MESSAGE]
    assert (slow.dropped, slow.drops) == (3, [(Drop.OVER_BUDGET, 3)])
    slow.put(MESSAGE)
    assert (slow.queued_bytes, slow.dropped) == (300, 4)


def test_all_blocked_queues_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QueuedMemory, "limit_bytes", QueuedMemory.total_bytes + 150)
    first, second = Slow(1000), Slow(1000)
    first.put(MESSAGE)
    second.put(MESSAGE)
    assert second.drops == [(Drop.OVER_GLOBAL_BUDGET, 1)]
    first.released(100)
    second.put(MESSAGE)
    assert second.queue == [MESSAGE]


def test_control_packets_are_never_dropped_but_end_who_lets_too_many_wait() -> None:
    slow, packet = Slow(0), smq.frame(smq.PONG)
    slow.put(packet)
    assert (slow.queue, slow.drops, slow.is_overloaded) == ([packet], [], False)
    for _ in range(CONTROL_BUDGET_BYTES // len(packet)):
        slow.put(packet)
    assert slow.is_overloaded


def test_messages_are_counted_and_control_packets_are_not() -> None:
    assert Outbox().messages([MESSAGE * 3, smq.frame(smq.PONG), MESSAGE]) == 4


# ---- the flush


def test_one_outbox_is_flushed_once_a_turn() -> None:
    order: list[str] = []
    ready = Ready(order, "a")
    ready.put(MESSAGE)
    ready.put(MESSAGE)
    assert not flush_dirty()
    assert order == ["a"]


def test_who_gets_little_is_flushed_before_who_gets_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLUSHED_AT_ONCE", 2)
    order: list[str] = []
    outboxes = {name: Ready(order, name) for name in ("much", "more", "little")}
    for name, count in (("much", 50), ("more", 90), ("little", 1)):
        outboxes[name].put(MESSAGE * count)
    flush_dirty()
    assert order == ["little", "much", "more"]


def test_what_takes_too_long_goes_on_in_the_next_turn() -> None:
    order: list[str] = []
    outboxes = [Ready(order, str(number)) for number in range(20)]
    for outbox in outboxes:
        outbox.put(MESSAGE)
    turns = 1
    while flush_dirty(late_clock().__next__):
        turns += 1
    assert turns > 1
    assert order == [outbox.name for outbox in outboxes]


def test_a_blocked_outbox_is_left_alone() -> None:
    slow = Slow(1000)
    slow.put(MESSAGE)
    assert not flush_dirty()
    assert slow.queue == [MESSAGE]


# ---- chores


def test_chores_are_done_in_order_a_portion_a_turn() -> None:
    done: list[str] = []

    def chore(name: str) -> Iterator[None]:
        for _ in range(3):
            done.append(name)
            yield

    run_in_background(chore("a"))
    run_in_background(chore("b"))
    turns = 1
    while flush_dirty(late_clock(0.001).__next__):
        turns += 1
    assert turns > 1
    assert done == ["a"] * 3 + ["b"] * 3


def test_a_chore_that_fails_keeps_nobody(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []

    def fails() -> Iterator[None]:
        yield
        raise RuntimeError("on purpose")

    def works() -> Iterator[None]:
        done.append(1)
        yield

    run_in_background(fails())
    run_in_background(works())
    while flush_dirty():
        pass
    assert done == [1]
    assert "error in work that was put off" in caplog.text
