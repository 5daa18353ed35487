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
    ahead,
    backlog,
    dirty,
    flush_dirty,
    run_at_once,
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


def test_beyond_the_budget_the_newest_messages_are_dropped() -> None:
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


def test_too_many_waiting_control_packets_close_the_client() -> None:
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


def test_small_queues_are_flushed_before_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLUSHED_AT_ONCE", 2)
    order: list[str] = []
    outboxes = {name: Ready(order, name) for name in ("much", "more", "little")}
    for name, count in (("much", 50), ("more", 90), ("little", 1)):
        outboxes[name].put(MESSAGE * count)
    flush_dirty()
    assert order == ["little", "much", "more"]


def test_long_work_continues_in_the_next_turn() -> None:
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


class NodeSendQueue(Ready):
    """An outbox that hands its queue to another one."""

    __slots__ = ("over",)

    def __init__(self, order: list[str], name: str, over: Outbox) -> None:
        super().__init__(order, name)
        self.over = over

    def flush(self) -> None:
        self.over.put(b"".join(self.queue))
        super().flush()

    @property
    def carrier(self) -> Outbox | None:
        return self.over


def test_ways_to_other_nodes_are_flushed_first() -> None:
    order: list[str] = []
    client, link = Ready(order, "client"), Ready(order, "link")
    ways = [NodeSendQueue(order, name, link) for name in ("way", "second way")]
    for outbox in (client, *ways):
        outbox.put(MESSAGE)
    ahead.update(dict.fromkeys(ways))
    flush_dirty()
    assert order == ["way", "second way", "link", "client"]
    assert not ahead
    ways[0].put(MESSAGE)
    client.put(MESSAGE)
    flush_dirty()
    assert order[4:] == ["way", "client", "link"], "nothing is ahead any more"


def test_a_blocked_client_is_not_flushed() -> None:
    order: list[str] = []
    blocked, idle = Ready(order, "blocked"), Ready(order, "idle")
    blocked.queue.append(MESSAGE)
    blocked.life = Life.BLOCKED
    ahead.update({blocked: None, idle: None})
    flush_dirty()
    assert order == []
    assert not ahead


@pytest.mark.parametrize("count", [2, 90])
def test_blocked_and_empty_outboxes_are_not_flushed(count: int) -> None:
    order: list[str] = []
    outboxes = [Ready(order, str(number)) for number in range(count)]
    for outbox in outboxes:
        outbox.put(MESSAGE)
    outboxes[0].life = Life.BLOCKED
    outboxes[1].queue.clear()
    late = outboxes[-1] if count > 2 else None
    if late:
        late.life = Life.BLOCKED
    while flush_dirty():
        pass
    assert sorted(order, key=int) == [str(number) for number in range(2, count - (late is not None))]


def test_what_handlers_write_is_sent_in_the_turn() -> None:
    order: list[str] = []
    answer = Ready(order, "answer")

    class Asks(Ready):
        def flush(self) -> None:
            super().flush()
            answer.put(MESSAGE)

    Asks(order, "question").put(MESSAGE)
    assert not flush_dirty()
    assert order == ["question", "answer"]


def test_many_answers_let_others_have_a_turn() -> None:
    order: list[str] = []

    class Again(Ready):
        def flush(self) -> None:
            super().flush()
            if len(order) < 100:
                self.put(MESSAGE)

    Again(order, "again").put(MESSAGE)
    assert flush_dirty()
    assert 1 < len(order) <= 1 + module.ROUNDS_PER_TURN


def test_small_portions_are_flushed_between_looks_at_the_clock() -> None:
    order: list[str] = []
    for number in range(8):
        Ready(order, str(number)).put(MESSAGE)
    times = iter([0.0, 0.001, module.FLUSH_S, 1.0, 1.0, 1.0 + module.FLUSH_S])
    assert flush_dirty(times.__next__)
    assert order == ["0", "1", "2", "3", "4", "5"]
    assert len(backlog) == 2


def test_the_frame_of_a_message_has_topic_and_subtopic() -> None:
    assert Outbox.topic_key(MESSAGE) == b"\0\0\0\7"
    run = smq.publish_frame(0x01020304, 8, 0x05060708, b"")
    assert Outbox.latest_key(run) == bytes(range(1, 9))
    assert Outbox.frame_bytes(b"\x01\x02", 0) == 0x102


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


def test_a_failing_task_delays_no_other(caplog: pytest.LogCaptureFixture) -> None:
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
    assert "error in a background task" in caplog.text


def test_tasks_that_run_at_once_share_the_time_of_a_turn() -> None:
    """A thousand clients that disconnect together have a few milliseconds together."""
    times_s, done = itertools.count(0, 0.001), list[int]()

    def task(number: int) -> Iterator[None]:
        for _ in range(3):
            yield
        done.append(number)

    flush_dirty()
    for number in range(100):
        run_at_once(task(number), lambda: next(times_s))
    used_s = next(times_s)
    assert used_s < 2 * module.ALL_AT_ONCE_S + module.AT_ONCE_S
    while flush_dirty():
        pass
    assert sorted(done) == list(range(100))
