"""Slow-consumer policies without sockets: what leaves the queue of a blocked client, and whose publishers wait."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from smqrt.broker import outbox as module
from smqrt.broker.outbox import (
    CONTROL_BUDGET_BYTES,
    Backlog,
    Drop,
    Outbox,
    Pressure,
    QueuedMemory,
    Slow,
    SlowPolicies,
    backlog,
    dirty,
    flush_dirty,
)
from smqrt.broker.sessions import Session
from smqrt.broker.topics import Topic, Topics
from smqrt.wire import smq
from smqrt.wire.connection_state import Life
from tests.broker.memory_clients import Crowd, Ear, settle


class Blocked(Outbox):
    """An outbox whose client does not read, with the policy of a hub."""

    __slots__ = ("backlog", "drops", "ended", "presses_", "torn")

    def __init__(self, policies: SlowPolicies, budget_bytes: int) -> None:
        super().__init__()
        self.life, self.budget_bytes = Life.BLOCKED, budget_bytes
        self.backlog, self.torn = Backlog(policies), 0
        self.drops: list[tuple[Drop, int]] = []
        self.ended = False
        self.presses_ = 0

    def held(self, run: bytes) -> None:
        self.queued_bytes += len(run)
        QueuedMemory.total_bytes += len(run)
        self.ended = self.backlog.take(self, run) or self.ended

    def overflowed(self, reason: Drop, messages: int) -> None:
        self.drops.append((reason, messages))

    def backpressure_started(self) -> None:
        self.presses_ += 1

    def backpressure_ended(self) -> None:
        self.presses_ -= 1

    def sent(self, entries: int) -> None:
        """The client has read so many entries."""
        for run in self.queue[:entries]:
            self.released(len(run))
        del self.queue[:entries]
        self.backlog.left(entries)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    held_bytes = QueuedMemory.total_bytes
    yield
    while flush_dirty():
        pass
    dirty.clear()
    backlog.clear()
    QueuedMemory.total_bytes = held_bytes


@pytest.fixture
def table() -> Topics:
    return Topics(iter(range(5000, 9000)).__next__, bytes)


def message(topic: Topic, payload: bytes, sub: int = 0, size: int = 100) -> bytes:
    return smq.publish_frame(topic.id, 7, sub, payload.ljust(size - 15, b"."))


def payloads(outbox: Outbox) -> list[bytes]:
    return [frame[15:].rstrip(b".") for run in outbox.queue for frame in smq.frames(run)]


def blocked(table: Topics, policy: Slow, budget_bytes: int = 350) -> Blocked:
    return Blocked(SlowPolicies(table.by_key, policy, {}), budget_bytes)


# ---- which policy


def test_the_first_filter_that_matches_counts(table: Topics) -> None:
    by_filter = {"a/+": Slow.OLDEST, "a/#": Slow.WAIT, "b/#": Slow.LATEST}
    policies = SlowPolicies(table.by_key, Slow.DISCONNECT, by_filter)
    names = {b"a/x": Slow.OLDEST, b"a/x/y": Slow.WAIT, b"b/x": Slow.LATEST, b"c": Slow.DISCONNECT}
    for _ in range(2):
        assert {name: policies.of(table.named(name).key) for name in names} == names


@pytest.mark.parametrize(("default", "direct"), [(Slow.LATEST, Slow.NEWEST), (Slow.OLDEST, Slow.OLDEST)])
def test_messages_to_one_client_never_replace_others(table: Topics, default: Slow, direct: Slow) -> None:
    policies = SlowPolicies(table.by_key, default, {})
    assert policies.of(table.ephemeral().key) is direct
    assert policies.of(b"none") is direct


def test_remembered_policies_have_a_limit(monkeypatch: pytest.MonkeyPatch, table: Topics) -> None:
    monkeypatch.setattr(module, "MAX_CACHED", 2)
    policies = SlowPolicies(table.by_key, Slow.WAIT, {})
    for number, size in ((0, 1), (1, 2), (2, 1)):
        assert policies.of(table.named(b"%d" % number).key) is Slow.WAIT
        assert len(policies._cache) == size


# ---- what is dropped


def test_newest_drops_what_comes(table: Topics) -> None:
    outbox, topic = blocked(table, Slow.NEWEST), table.named(b"t")
    for number in range(6):
        outbox.put(message(topic, b"%d" % number))
    assert payloads(outbox) == [b"0", b"1", b"2"]
    assert outbox.drops == [(Drop.OVER_BUDGET, 1)] * 3
    assert outbox.dropped == 3


def test_oldest_drops_what_waited_longest(table: Topics) -> None:
    outbox, topic = blocked(table, Slow.OLDEST), table.named(b"t")
    for number in range(6):
        outbox.put(message(topic, b"%d" % number))
    assert payloads(outbox) == [b"3", b"4", b"5"]
    assert outbox.drops == [(Drop.OVER_BUDGET, 1)] * 3
    assert (outbox.dropped, outbox.queued_bytes) == (3, 300)


def test_oldest_keeps_the_entry_that_is_half_sent(table: Topics) -> None:
    outbox, topic = blocked(table, Slow.OLDEST), table.named(b"t")
    outbox.put(message(topic, b"0"))
    outbox.torn = 10
    for number in range(1, 6):
        outbox.put(message(topic, b"%d" % number))
    assert payloads(outbox) == [b"0", b"4", b"5"]


def test_oldest_drops_of_a_long_run_in_pieces(table: Topics) -> None:
    outbox, topic = blocked(table, Slow.OLDEST, 1600), table.named(b"t")
    outbox.put(b"".join(message(topic, b"%d" % number) for number in range(15)))
    assert [len(run) for run in outbox.queue] == [100] * 15
    outbox.put(message(topic, b"15") + message(topic, b"16"))
    assert payloads(outbox) == [b"%d" % number for number in range(1, 17)]
    assert outbox.dropped == 1


def test_oldest_counts_entries_from_the_start(table: Topics) -> None:
    outbox, topic = blocked(table, Slow.OLDEST), table.named(b"t")
    for number in range(3):
        outbox.put(message(topic, b"%d" % number))
    outbox.sent(2)
    for number in range(3, 8):
        outbox.put(message(topic, b"%d" % number))
    assert payloads(outbox) == [b"5", b"6", b"7"]


def test_oldest_says_when_all_queues_are_full(monkeypatch: pytest.MonkeyPatch, table: Topics) -> None:
    monkeypatch.setattr(QueuedMemory, "total_bytes", 0)
    monkeypatch.setattr(QueuedMemory, "limit_bytes", 200)
    outbox, topic = blocked(table, Slow.OLDEST), table.named(b"t")
    for number in range(3):
        outbox.put(message(topic, b"%d" % number))
    assert payloads(outbox) == [b"1", b"2"]
    assert outbox.drops == [(Drop.OVER_GLOBAL_BUDGET, 1)]


def test_latest_keeps_one_message_of_each_subtopic(table: Topics) -> None:
    outbox, topic, other = blocked(table, Slow.LATEST), table.named(b"t"), table.named(b"u")
    outbox.put(message(topic, b"1", 1))
    outbox.put(message(topic, b"2", 2))
    outbox.put(message(other, b"3", 1))
    outbox.put(message(topic, b"4", 1))
    assert payloads(outbox) == [b"2", b"3", b"4"]
    outbox.put(message(topic, b"5", 2) + message(topic, b"6", 1) + message(topic, b"7", 2))
    assert payloads(outbox) == [b"3", b"6", b"7"]
    assert outbox.drops == [(Drop.REPLACED, 1), (Drop.REPLACED, 3)]
    assert (outbox.dropped, outbox.queued_bytes) == (4, 300)


def test_latest_leaves_the_entry_that_is_half_sent(table: Topics) -> None:
    outbox, topic = blocked(table, Slow.LATEST), table.named(b"t")
    outbox.put(message(topic, b"1"))
    outbox.torn = 1
    outbox.put(message(topic, b"2"))
    outbox.put(message(topic, b"3"))
    assert payloads(outbox) == [b"1", b"3"]


def test_latest_replaces_nothing_that_was_sent(table: Topics) -> None:
    outbox, topic = blocked(table, Slow.LATEST), table.named(b"t")
    outbox.put(message(topic, b"1", 1))
    outbox.put(message(topic, b"2", 2))
    outbox.sent(1)
    outbox.put(message(topic, b"3", 1))
    assert payloads(outbox) == [b"2", b"3"]
    outbox.put(message(topic, b"4", 2))
    assert payloads(outbox) == [b"3", b"4"]


def test_latest_drops_what_has_no_room(table: Topics) -> None:
    outbox, topic = blocked(table, Slow.LATEST, 250), table.named(b"t")
    outbox.put(message(topic, b"1", 1) + message(topic, b"2", 2) + message(topic, b"3", 3))
    assert payloads(outbox) == [b"1", b"2"]
    assert outbox.drops == [(Drop.OVER_BUDGET, 1)]
    outbox.put(message(topic, b"4", 2))
    assert payloads(outbox) == [b"1", b"4"]
    outbox.put(message(topic, b"5", 3))
    outbox.put(message(topic, b"6", 1))
    assert payloads(outbox) == [b"4", b"6"], "a dropped message is in nobody's place"


def test_latest_drops_several_entries_of_one_run(table: Topics) -> None:
    outbox, topic = blocked(table, Slow.LATEST, 150), table.named(b"t")
    outbox.put(b"".join(message(topic, b"%d" % n, n) for n in range(4)))
    assert payloads(outbox) == [b"0"]
    assert outbox.dropped == 3


def test_a_full_queue_disconnects_by_policy(table: Topics) -> None:
    outbox, topic = blocked(table, Slow.DISCONNECT, 200), table.named(b"t")
    outbox.put(message(topic, b"1"))
    outbox.put(message(topic, b"2"))
    assert not outbox.ended
    outbox.put(message(topic, b"3"))
    assert outbox.ended


@pytest.mark.parametrize("policy", [Slow.DISCONNECT, Slow.WAIT])
def test_full_memory_drops_messages_by_any_policy(monkeypatch: pytest.MonkeyPatch, table: Topics, policy: Slow) -> None:
    monkeypatch.setattr(QueuedMemory, "total_bytes", 0)
    monkeypatch.setattr(QueuedMemory, "limit_bytes", 200)
    outbox, topic = blocked(table, policy, 150), table.named(b"t")
    outbox.budget_bytes = 1000
    for number in range(3):
        outbox.put(message(topic, b"%d" % number))
    assert payloads(outbox) == [b"0", b"1"], "exactly the limit is allowed"
    assert outbox.drops == [(Drop.OVER_GLOBAL_BUDGET, 1)]
    assert not outbox.ended
    assert outbox.presses_ == 0


def test_wait_keeps_all_until_publishers_gave_up(table: Topics) -> None:
    outbox, topic = blocked(table, Slow.WAIT, 150), table.named(b"t")
    for number in range(3):
        outbox.put(message(topic, b"%d" % number))
    assert payloads(outbox) == [b"0", b"1", b"2"]
    assert outbox.backlog.policies.pressure.here() == [topic.key]
    assert outbox.presses_ == 1
    outbox.backlog.policies.pressure.release(outbox)
    outbox.backlog.policies.pressure.release(outbox)
    assert outbox.presses_ == 0, "it began once and ended once"
    outbox.backlog.wait_expired = True
    outbox.put(message(topic, b"3"))
    assert payloads(outbox) == [b"0", b"1", b"2"]
    assert outbox.drops == [(Drop.OVER_BUDGET, 1)]


def test_too_many_control_packets_end_the_client(table: Topics) -> None:
    outbox, topic = blocked(table, Slow.WAIT, 150), table.named(b"t")
    for _ in range(2 + CONTROL_BUDGET_BYTES // 1000):
        outbox.put(message(topic, b"x", size=1000))
    packet = smq.frame(b"\x05" + bytes(997))
    for _ in range(CONTROL_BUDGET_BYTES // 1000):
        outbox.put(packet)
    assert not outbox.ended, "messages alone do not count"
    outbox.put(packet)
    assert outbox.ended


def test_control_packets_may_fill_their_budget_exactly(table: Topics) -> None:
    outbox = blocked(table, Slow.OLDEST, 100)
    rest = CONTROL_BUDGET_BYTES
    while rest:
        packet = smq.frame(b"\x05" + bytes(min(rest, 60_000) - 3))
        rest -= len(packet)
        outbox.put(packet)
    assert outbox.queued_bytes == CONTROL_BUDGET_BYTES
    outbox.budget_bytes = 0
    outbox.put(smq.frame(smq.PONG))
    assert outbox.ended


def test_a_full_queue_of_messages_adds_no_control_bytes(table: Topics) -> None:
    outbox, topic = blocked(table, Slow.WAIT, 100_000), table.named(b"t")
    rest = CONTROL_BUDGET_BYTES
    while rest:
        packet = smq.frame(b"\x05" + bytes(min(rest, 60_000) - 3))
        rest -= len(packet)
        outbox.put(packet)
    outbox.put(message(topic, b"x", size=1000))
    outbox.put(smq.frame(smq.PONG))
    assert not outbox.ended, "all together are within both budgets"


def test_control_packets_within_the_budget_are_kept(table: Topics) -> None:
    outbox = blocked(table, Slow.OLDEST, 10_000_000)
    packet = smq.frame(b"\x05" + bytes(59_997))
    for _ in range(10):
        outbox.put(packet)
    assert not outbox.ended
    assert len(outbox.queue) == 10


# ---- empty entries


def test_empty_entries_are_removed_when_many(table: Topics) -> None:
    outbox, topic = blocked(table, Slow.LATEST, 1000), table.named(b"t")
    for number in range(module.MAX_EMPTY_ENTRIES + 1):
        outbox.put(message(topic, b"%d" % number))
    assert len(outbox.queue) == module.MAX_EMPTY_ENTRIES + 1
    outbox.put(message(topic, b"last"))
    assert [len(run) for run in outbox.queue] == [100]
    outbox.put(message(topic, b"newer"))
    assert payloads(outbox) == [b"newer"], "places are still known"


def test_few_empty_entries_among_many_others_stay(table: Topics) -> None:
    outbox, topic = blocked(table, Slow.LATEST, 1_000_000), table.named(b"t")
    many = 3 * module.MAX_EMPTY_ENTRIES
    for number in range(many):
        outbox.put(message(topic, b"%d" % number, number))
    for number in range(module.MAX_EMPTY_ENTRIES + 1):
        outbox.put(message(topic, b"again", number))
    assert len(outbox.queue) == many + module.MAX_EMPTY_ENTRIES + 1


def test_places_are_right_after_empty_entries_left(table: Topics) -> None:
    outbox, topic = blocked(table, Slow.OLDEST, 450), table.named(b"t")
    for number in range(3):
        outbox.put(message(topic, b"%d" % number))
    outbox.sent(1)
    for number in range(3, 7):
        outbox.put(message(topic, b"%d" % number))
    assert payloads(outbox) == [b"3", b"4", b"5", b"6"]
    outbox.backlog.compact(outbox)
    assert len(outbox.queue) == 4
    outbox.put(message(topic, b"7"))
    outbox.put(message(topic, b"8"))
    assert payloads(outbox) == [b"5", b"6", b"7", b"8"]
    assert outbox.dropped == 4
    outbox.sent(1)
    outbox.backlog.compact(outbox)
    outbox.backlog.compact(outbox)
    outbox.put(message(topic, b"9"))
    outbox.put(message(topic, b"10"))
    outbox.put(message(topic, b"11"))
    assert payloads(outbox) == [b"8", b"9", b"10", b"11"]


@pytest.mark.parametrize(
    ("sizes", "pieces"), [((50, 50), [100]), ((100, 20), [100, 20]), ((99, 20, 20), [119, 20]), ((300, 20), [300, 20])]
)
def test_pieces_end_with_whole_messages(table: Topics, sizes: tuple[int, ...], pieces: list[int]) -> None:
    topic = table.named(b"t")
    run = b"".join(message(topic, b"x", size=size) for size in sizes)
    found = module._pieces(run, Outbox.frame_bytes, 100)
    assert [len(piece) for piece in found] == pieces
    assert b"".join(found) == run


# ---- publishers that wait


class Waits:
    """A hub's pressure, what it told, and two clients that press."""

    def __init__(self) -> None:
        self.pressure = Pressure()
        self.told: list[tuple[bytes, bool]] = []
        self.pressure.on_changed = lambda key, presses: self.told.append((key, presses))
        policies = SlowPolicies({}, Slow.WAIT, {})
        self.one, self.two = Blocked(policies, 1), Blocked(policies, 1)
        self.resumed: list[str] = []
        self.crowd = Crowd()

    def publisher(self, name: str) -> Session:
        waits = self

        class Publisher(Ear):
            def resume(self) -> None:
                waits.resumed.append(name)

        client = self.crowd.client()
        client.outbox = Publisher()
        return client


def test_a_topic_presses_until_its_last_client_reads() -> None:
    waits = Waits()
    waits.pressure.add_local(waits.one, b"a")
    waits.pressure.add_local(waits.one, b"a")
    waits.pressure.add_local(waits.one, b"b")
    waits.pressure.add_local(waits.two, b"a")
    assert (waits.one.presses_, waits.two.presses_) == (1, 1)
    assert waits.told == [(b"a", True), (b"b", True), (b"a", True)]
    waits.pressure.release(waits.one)
    assert waits.pressure.topics == {b"a": {waits.two}}
    assert waits.told[3:] == [(b"b", False)]
    waits.pressure.release(waits.two)
    waits.pressure.release(waits.two)
    assert waits.told[4:] == [(b"a", False)]
    assert waits.pressure.topics == {}


def test_publishers_go_on_in_order_when_all_read() -> None:
    waits = Waits()
    delivered: list[bytes] = []
    waits.pressure.add_local(waits.one, b"a")
    for name in "xyz":
        assert waits.pressure.wait(b"a", waits.publisher(name), delivered.append, name.encode()) is True
    assert waits.pressure.wait(b"a", waits.publisher("empty"), delivered.append)
    settle()
    assert delivered == []
    waits.pressure.release(waits.one)
    settle()
    assert delivered == [b"x", b"y", b"z"], "an empty run is not delivered"
    assert waits.resumed == ["x", "y", "z", "empty"]


def test_pressure_that_returns_stops_the_rest() -> None:
    waits = Waits()
    delivered: list[bytes] = []

    def deliver(run: bytes) -> None:
        delivered.append(run)
        if run == b"x":
            waits.pressure.add_local(waits.two, b"a")

    waits.pressure.add_local(waits.one, b"a")
    for name in "xy":
        waits.pressure.wait(b"a", waits.publisher(name), deliver, name.encode())
    waits.pressure.release(waits.one)
    settle()
    assert delivered == [b"x"]
    assert waits.resumed == [], "its own run pressed again"
    waits.pressure.release(waits.two)
    settle()
    assert delivered == [b"x", b"y"], "nothing twice"
    assert sorted(waits.resumed) == ["x", "y"]


def test_a_publisher_that_fails_lets_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    waits = Waits()
    delivered: list[bytes] = []

    def fail(run: bytes) -> None:
        raise ValueError("broken route")

    waits.pressure.add_local(waits.one, b"a")
    waits.pressure.wait(b"a", waits.publisher("x"), fail, b"x")
    waits.pressure.wait(b"a", waits.publisher("y"), delivered.append, b"y")
    with caplog.at_level(logging.ERROR):
        waits.pressure.release(waits.one)
        settle()
    assert "it is lost" in caplog.text
    assert delivered == [b"y"]
    assert waits.resumed == ["x", "y"]


def test_clients_of_other_nodes_are_not_reported() -> None:
    waits = Waits()
    waits.pressure.add_remote(waits.two, b"a")
    assert waits.told == []
    assert waits.pressure.here() == []
    assert waits.pressure.topics == {b"a": {waits.two}}
    waits.pressure.add_local(waits.one, b"a")
    assert waits.pressure.here() == [b"a"]
    waits.pressure.release(waits.one)
    assert waits.told == [(b"a", True), (b"a", False)], "the others need not wait for their own"
    waits.pressure.remove_remote(waits.two, b"other")
    assert waits.pressure.topics == {b"a": {waits.two}}
    waits.pressure.remove_remote(waits.two, b"a")
    waits.pressure.remove_remote(waits.two, b"a")
    assert waits.pressure.topics == {}
    assert len(waits.told) == 2


def test_a_lost_node_presses_no_more() -> None:
    waits = Waits()
    waits.pressure.add_remote(waits.one, b"a")
    waits.pressure.add_remote(waits.one, b"b")
    waits.pressure.add_remote(waits.two, b"b")
    waits.pressure.forget(waits.one)
    assert waits.pressure.topics == {b"b": {waits.two}}
    waits.pressure.add_local(waits.one, b"c")
    assert waits.pressure.here() == [b"c"], "it is not a node any more"
    waits.pressure.remove_all_remote()
    assert list(waits.pressure.topics) == [b"c"]
