"""Last values on their own: which message is kept, which stamp wins, which limits hold, what the disk is given."""

from __future__ import annotations

from typing import Any

import pytest

from smqrt.auth.identity import Identity
from smqrt.broker import last_values as module
from smqrt.broker.last_values import LastValueLimits, LastValueRoute, LastValues, SentValueRoute, TopicValues
from smqrt.broker.topics import Topic, Topics
from smqrt.errors import ArgumentError
from smqrt.wire import smq

ANN = Identity("ann")
BOB = Identity("bob")


class Store:
    """Counts how often it was woken."""

    def __init__(self) -> None:
        self.woken = 0

    def wake(self) -> None:
        self.woken += 1


class Sink:
    """A route that keeps the runs."""

    def __init__(self) -> None:
        self.runs: list[bytes] = []

    def deliver(self, run: bytes) -> bool:
        self.runs.append(run)
        return True

    def deliver_view(self, view: memoryview) -> bool:
        return self.deliver(bytes(view))


@pytest.fixture
def table() -> Topics:
    return Topics(iter(range(5000, 9000)).__next__, bytes)


@pytest.fixture
def topic(table: Topics) -> Topic:
    return table.named(b"site/a")


@pytest.fixture
def values() -> LastValues:
    return LastValues(["site/#"], LastValueLimits())


@pytest.fixture
def of_topic(values: LastValues, topic: Topic) -> TopicValues:
    return values.of(topic)


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The stamp of what is published now, as a list to change it."""
    stamp = [1_000_000]
    monkeypatch.setattr(module, "clock", type("Clock", (), {"now": staticmethod(lambda: stamp[0])}))
    return stamp


def frame(topic: Topic, payload: bytes, sub: int = 0) -> bytes:
    return smq.publish_frame(topic.id, 77, sub, payload)


def stid(sub: int) -> bytes:
    return sub.to_bytes(4, "big")


# ---- what is newest in a run


def test_one_frame_of_each_subtopic_is_newest(topic: Topic) -> None:
    frames = [frame(topic, b"a", 1), frame(topic, b"b" * 300, 2), frame(topic, b"ccc", 1), frame(topic, b"d" * 600, 3)]
    assert sorted(module.newest_frames(b"".join(frames))) == sorted(frames[1:])


def test_frames_of_one_size_and_subtopic_give_the_last(topic: Topic) -> None:
    frames = [frame(topic, b"%d" % n, 9) for n in range(5)]
    assert list(module.newest_frames(b"".join(frames))) == frames[-1:]


@pytest.mark.parametrize("byte", range(4))
def test_each_byte_of_a_subtopic_distinguishes_frames(topic: Topic, byte: int) -> None:
    frames = [frame(topic, b"x", 0), frame(topic, b"x", 1 << 8 * byte)]
    assert list(module.newest_frames(b"".join(frames))) == frames


def test_frames_with_matching_total_size_are_split(topic: Topic) -> None:
    """The run is three times as long as its first frame, and holds two others."""
    first = frame(topic, b"x" * 10)
    others = [frame(topic, b"y" * 5), frame(topic, b"z" * 15)]
    assert list(module.newest_frames(first + b"".join(others))) == others[1:]


def test_sizes_that_differ_in_the_high_byte_are_seen(topic: Topic) -> None:
    small, large = frame(topic, b"x" * 49), frame(topic, b"y" * (64 + 256 - 15))
    assert (len(small), len(large)) == (64, 320)
    assert list(module.newest_frames(small + large)) == [large]


# ---- taking


def test_a_run_leaves_its_newest_message_and_publisher(of_topic: TopicValues, topic: Topic) -> None:
    of_topic.take(frame(topic, b"old") + frame(topic, b"newer"), ANN, 7)
    assert of_topic.newest == {stid(0): (frame(topic, b"newer"), ANN)}
    of_topic.take(frame(topic, b"alone"), BOB, 8)
    assert of_topic.newest == {stid(0): (frame(topic, b"alone"), BOB)}
    assert of_topic.stamp(stid(0)) == 8


def test_count_and_bytes_follow_what_is_kept(values: LastValues, of_topic: TopicValues, topic: Topic) -> None:
    one = frame(topic, b"12345", 1)
    of_topic.take_frame(one, None)
    of_topic.take_frame(frame(topic, b"67890", 1), None)
    of_topic.take_frame(frame(topic, b"1", 2), None)
    assert values.count == 2
    assert values.size_bytes == of_topic.size_bytes == len(one) + len(one) - 4 + 2 * module.VALUE_BYTES
    of_topic.take_frame(frame(topic, b"longer", 2), None)
    assert (values.count, values.size_bytes) == (2, 2 * len(one) + 1 + 2 * module.VALUE_BYTES)
    of_topic.take_frame(frame(topic, b"", 1), None)
    assert (values.count, values.size_bytes) == (1, len(one) + 1 + module.VALUE_BYTES)


def test_an_empty_message_takes_the_value_away(of_topic: TopicValues, topic: Topic, now: list[int]) -> None:
    of_topic.take_frame(frame(topic, b"x"), None)
    now[0] += 5
    of_topic.take_frame(frame(topic, b""), None)
    assert of_topic.newest == {}
    assert of_topic.stamps == {}
    assert of_topic.deleted == {stid(0): now[0]}
    assert of_topic.deletion_frames() == [smq.publish_frame(topic.id, 0, 0, b"")]
    assert of_topic.stamp(stid(0)) == now[0]
    now[0] += 5
    of_topic.take_frame(frame(topic, b""), None)
    assert of_topic.deleted == {stid(0): now[0]}, "once more, also where nothing is left"
    of_topic.take_frame(frame(topic, b"again"), None)
    assert of_topic.deleted == {}
    assert of_topic.stamps == {stid(0): now[0]}


def test_a_value_of_one_byte_is_a_value(of_topic: TopicValues, topic: Topic) -> None:
    of_topic.take_frame(frame(topic, b"x"), None)
    of_topic.take_frame(frame(topic, b"y"), None)
    assert list(of_topic.newest) == [stid(0)]
    assert of_topic.deleted == {}


# ---- stamps


@pytest.mark.parametrize(("late_us", "kept"), [(0, True), (999, True), (1000, True), (1001, False)])
def test_late_messages_of_other_nodes_lose(of_topic: TopicValues, topic: Topic, late_us: int, kept: bool) -> None:
    of_topic.take_frame(frame(topic, b"here"), ANN, 50_000)
    of_topic.take_sent(frame(topic, b"there"), 50_000 - late_us)
    assert (of_topic.newest[stid(0)][0] == frame(topic, b"there")) is kept
    assert of_topic.stamp(stid(0)) == 50_000 + kept, "newer than what it took the place of"


def test_a_later_message_keeps_its_own_stamp(of_topic: TopicValues, topic: Topic) -> None:
    of_topic.take_frame(frame(topic, b"here"), ANN, 50_000)
    of_topic.take_sent(frame(topic, b"there"), 60_000)
    assert of_topic.stamp(stid(0)) == 60_000
    assert of_topic.newest[stid(0)][1] is None


@pytest.mark.parametrize(
    ("payload", "stamp", "newest", "known"),
    [
        (b"other", 101, b"other", 101),
        (b"other", 99, b"mine", 100),
        (b"other", 100, b"other", 100),
        (b"aaa", 100, b"mine", 100),
        (b"mine", 101, b"mine", 101),
        (b"mine", 99, b"mine", 100),
    ],
)
def test_what_another_node_has_wins_when_newer(
    of_topic: TopicValues, topic: Topic, payload: bytes, stamp: int, newest: bytes, known: int
) -> None:
    of_topic.take_frame(frame(topic, b"mine"), None, 100)
    of_topic.merge_remote(frame(topic, payload), stamp)
    assert of_topic.newest[stid(0)][0] == frame(topic, newest)
    assert of_topic.stamp(stid(0)) == known


def test_another_node_may_have_removed_what_never_was(of_topic: TopicValues, topic: Topic) -> None:
    of_topic.merge_remote(frame(topic, b""), 5)
    assert of_topic.deleted == {stid(0): 5}
    of_topic.merge_remote(frame(topic, b"first", 1), 6)
    assert of_topic.newest[stid(1)] == (frame(topic, b"first", 1), None)


def test_another_node_may_say_that_nothing_is_left(of_topic: TopicValues, topic: Topic) -> None:
    of_topic.take_frame(frame(topic, b"mine", 4), None, 100)
    of_topic.merge_remote(frame(topic, b"", 4), 101)
    assert of_topic.newest == {}
    assert of_topic.deleted == {stid(4): 101}
    of_topic.merge_remote(frame(topic, b"", 4), 105)
    assert of_topic.deleted == {stid(4): 105}
    assert of_topic.stamps == {}


# ---- limits


def test_a_full_hub_refuses_another_value(table: Topics, topic: Topic) -> None:
    values = LastValues(["#"], LastValueLimits(values=2))
    before = module.VALUES.count
    for sub in range(3):
        values.of(topic).take_frame(frame(topic, b"x", sub), None)
    assert list(values.of(topic).newest) == [stid(0), stid(1)]
    assert module.VALUES.count == before + 1
    assert values.of(topic).stamp(stid(2)) == 0


@pytest.mark.parametrize(("spare", "kept"), [(0, 2), (-1, 1)])
def test_the_memory_of_a_hub_is_used_up(topic: Topic, spare: int, kept: int) -> None:
    size = len(frame(topic, b"x")) + module.VALUE_BYTES
    values = LastValues(["#"], LastValueLimits(size_bytes=2 * size + spare))
    for sub in range(3):
        values.of(topic).take_frame(frame(topic, b"x", sub), None)
    assert values.count == kept
    assert values.over(size) is module.MEMORY


def test_a_full_topic_refuses_another_value(
    monkeypatch: pytest.MonkeyPatch, of_topic: TopicValues, topic: Topic
) -> None:
    monkeypatch.setattr(module, "MAX_TOPIC_VALUES", 2)
    for sub in range(3):
        of_topic.take_frame(frame(topic, b"x", sub), None)
    assert len(of_topic.newest) == 2
    monkeypatch.setattr(module, "MAX_TOPIC_BYTES", of_topic.size_bytes)
    of_topic.take_frame(frame(topic, b"", 0), None)
    of_topic.take_frame(frame(topic, b"x", 3), None)
    assert stid(3) in of_topic.newest, "just as many bytes as may be"
    of_topic.take_frame(frame(topic, b"xx", 3), None)
    assert stid(3) not in of_topic.newest, "an old value is a wrong one"
    assert module.OF_TOPIC.count == 2


def test_removed_values_beyond_the_limit_are_forgotten(
    monkeypatch: pytest.MonkeyPatch, values: LastValues, of_topic: TopicValues, topic: Topic
) -> None:
    monkeypatch.setattr(module, "MAX_DELETIONS", 2)
    for sub in (1, 2, 1, 3):
        of_topic.take_frame(frame(topic, b"", sub), None)
    assert list(of_topic.deleted) == [(1).to_bytes(4, "big"), stid(3)], "1 was removed again"
    of_topic.take_frame(frame(topic, b"x", 3), None)
    of_topic.take_frame(frame(topic, b"", 4), None)
    assert list(of_topic.deleted) == [stid(1), stid(4)], "3 is no longer among those removed"


def test_a_forgotten_removal_is_written_to_disk(values: LastValues, of_topic: TopicValues, topic: Topic) -> None:
    store = Store()
    values.keep_in(store)
    of_topic.take_frame(frame(topic, b"", 1), None)
    values.take_changes(10)
    of_topic.forget(stid(1))
    assert of_topic.deleted == {}
    assert values.take_changes(10) == {(topic.key, stid(1)): None}
    assert store.woken == 2


# ---- filters


def test_other_filters_forget_values_they_leave_out(
    values: LastValues, of_topic: TopicValues, topic: Topic, table: Topics
) -> None:
    values.keep_in(Store())
    other = table.named(b"site/b")
    of_topic.take_frame(frame(topic, b"x", 1), None)
    of_topic.take_frame(frame(topic, b"", 2), None)
    values.of(other).take_frame(frame(other, b"y"), None)
    values.take_changes(10)
    values.set_filters(["site/b"])
    assert [one.topic for one in values] == [other]
    assert values.count == 1
    assert values.size_bytes == len(frame(other, b"y")) + module.VALUE_BYTES
    assert values.take_changes(10) == {(topic.key, stid(1)): None}
    assert (of_topic.newest, of_topic.stamps, of_topic.deleted, of_topic.size_bytes) == ({}, {}, {}, 0)
    assert not values.selects(topic)
    assert values.selects(other)
    values.set_filters(["site/#"])
    assert values.selects(topic)
    assert values.stamp_at((topic.key, stid(1))) == 0


def test_topics_without_a_name_have_no_values(table: Topics) -> None:
    values = LastValues(["#"], LastValueLimits())
    assert values.selects(table.named(b"any"))
    assert not values.selects(table.ephemeral())


def test_remembered_filter_decisions_have_a_limit(
    monkeypatch: pytest.MonkeyPatch, values: LastValues, table: Topics
) -> None:
    monkeypatch.setattr(module, "MAX_CACHED", 2)
    for number, size in ((0, 1), (1, 2), (2, 1)):
        assert values.selects(table.named(b"site/%d" % number))
        assert len(values._selected) == size


def test_what_is_no_filter_is_refused(values: LastValues) -> None:
    with pytest.raises(ArgumentError, match="'a#'"):
        values.set_filters(["ok", "a#"])


# ---- who gets them


def test_a_subscriber_gets_what_its_publishers_may_still_say(
    values: LastValues, of_topic: TopicValues, topic: Topic, table: Topics
) -> None:
    asked: list[Any] = []
    values.permits = lambda source, name: bool(asked.append((source, name))) or source is ANN
    frames = [frame(topic, b"x", sub) for sub in range(4)]
    for one, source in zip(frames, (ANN, BOB, None, ANN), strict=True):
        of_topic.take_frame(one, source)
    assert values.initial_frames(topic) == frames[0] + frames[2] + frames[3]
    assert asked == [(ANN, b"site/a"), (BOB, b"site/a")], "once each"
    assert values.initial_frames(table.named(b"site/none")) == b""


def test_any_publisher_is_accepted_by_default(values: LastValues, of_topic: TopicValues, topic: Topic) -> None:
    of_topic.take_frame(frame(topic, b"x"), ANN)
    assert values.initial_frames(topic) == frame(topic, b"x")


# ---- the disk


def test_a_store_is_woken_once_for_several_changes(
    values: LastValues, of_topic: TopicValues, topic: Topic, table: Topics
) -> None:
    other, store = table.named(b"site/b"), Store()
    of_topic.take_frame(frame(topic, b"x", 1), ANN)
    values.keep_in(store)
    assert store.woken == 1, "what was kept before there was a store"
    of_topic.take_frame(frame(topic, b"yy", 2), None)
    values.of(other).take_frame(frame(other, b"z"), None)
    assert store.woken == 1
    assert len(values.take_changes(2)) == 2
    assert len(values.take_changes(2)) == 1
    assert values.take_changes(2) == {}
    of_topic.take_frame(frame(topic, b"xx", 1), None)
    assert store.woken == 2


def test_a_store_without_changes_is_not_woken(values: LastValues) -> None:
    store = Store()
    values.keep_in(store)
    assert store.woken == 0


def test_changes_carry_message_and_publisher(values: LastValues, of_topic: TopicValues, topic: Topic) -> None:
    values.keep_in(Store())
    of_topic.take_frame(frame(topic, b"x", 1), ANN)
    of_topic.take_frame(frame(topic, b"", 2), BOB)
    assert values.take_changes(10) == {
        (topic.key, stid(1)): (frame(topic, b"x", 1), ANN),
        (topic.key, stid(2)): None,
    }


def test_what_the_disk_rejects_is_tried_again(
    values: LastValues, of_topic: TopicValues, topic: Topic, table: Topics
) -> None:
    other, store = table.named(b"site/b"), Store()
    values.keep_in(store)
    of_topic.take_frame(frame(topic, b"x", 1), ANN)
    taken = values.take_changes(10)
    places = {**taken, (other.key, stid(5)): None, (b"none", stid(6)): None}
    values.requeue_changes(places, table.at)
    assert store.woken == 2
    assert values.take_changes(10) == {**taken, (other.key, stid(5)): None}


def test_a_restored_value_does_not_replace_a_newer_one(values: LastValues, of_topic: TopicValues, topic: Topic) -> None:
    values.restore(topic, frame(topic, b"disk", 1), ANN, 7)
    assert of_topic.newest[stid(1)] == (frame(topic, b"disk", 1), ANN)
    assert values.stamp_at((topic.key, stid(1))) == 7
    assert of_topic.changed == set(), "the disk has it"
    values.restore(topic, frame(topic, b"older", 1), None, 9)
    assert of_topic.newest[stid(1)][0] == frame(topic, b"disk", 1)
    values.restore(topic, frame(topic, b"other", 3), None)
    assert values.stamp_at((topic.key, stid(3))) == 0
    of_topic.take_frame(frame(topic, b"", 2), None)
    values.restore(topic, frame(topic, b"was removed", 2), None, 9)
    assert stid(2) not in of_topic.newest


def test_unsaved_values_are_all_without_a_store(values: LastValues, of_topic: TopicValues, topic: Topic) -> None:
    of_topic.take_frame(frame(topic, b"x", 1), ANN)
    of_topic.take_frame(frame(topic, b"", 2), None)
    removal = smq.publish_frame(topic.id, 0, 2, b"")
    assert list(values.unsaved()) == [(topic, frame(topic, b"x", 1), ANN), (topic, removal, None)]
    values.keep_in(Store())
    values.take_changes(1)
    assert len(list(values.unsaved())) == 1
    values.take_changes(1)
    assert list(values.unsaved()) == []


# ---- routes


def test_a_route_keeps_then_delivers(values: LastValues, of_topic: TopicValues, topic: Topic, now: list[int]) -> None:
    values.keep_in(Store())
    sink = Sink()
    route = LastValueRoute(of_topic, sink, ANN)
    runs = [frame(topic, b"a"), frame(topic, b"b"), frame(topic, b"cc"), frame(topic, b"d") + frame(topic, b"e")]
    for run in runs:
        now[0] += 1
        assert route.deliver(run) is True
        assert of_topic.newest[stid(0)] == (list(smq.frames(run))[-1], ANN)
        assert of_topic.stamps[stid(0)] == now[0]
    assert route.deliver_view(memoryview(runs[0])) is True
    assert sink.runs == [*runs, runs[0]]
    values.take_changes(1)
    route.deliver(runs[1])
    assert len(values.take_changes(1)) == 1, "the disk is told of each change"
    route.deliver(frame(topic, b""))
    route.deliver(frame(topic, b""))
    assert of_topic.newest == {}


def test_a_late_run_is_routed_anew(of_topic: TopicValues, topic: Topic) -> None:
    early, late = Sink(), Sink()
    route = LastValueRoute(of_topic, early, None, lambda: late)
    route.deliver(frame(topic, b"a"))
    assert (early.runs, late.runs) == ([], [frame(topic, b"a")])


def test_what_other_nodes_publish_is_kept(of_topic: TopicValues, topic: Topic) -> None:
    sink = Sink()
    route = SentValueRoute(of_topic, sink, lambda: 123)
    assert route.deliver(frame(topic, b"a")) is True
    assert route.deliver_view(memoryview(frame(topic, b"b"))) is True
    assert sink.runs == [frame(topic, b"a"), frame(topic, b"b")]
    assert of_topic.newest[stid(0)] == (frame(topic, b"b"), None)
    assert of_topic.stamp(stid(0)) == 124


def test_a_topic_has_at_most_1000_values_and_512_kib() -> None:
    assert (module.MAX_TOPIC_VALUES, module.MAX_TOPIC_BYTES) == (1000, 512 * 1024)
