"""Channels of an application's own (help: cluster), on every engine."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from smqrt.broker.deferred import Deferred
from smqrt.cluster.channel import LINK_BYTES, WINDOW_BYTES, AppChannel
from smqrt.cluster.node import MAX_CHANNELS
from smqrt.errors import ArgumentError, ClosedError
from smqrt.wire import cluster_packets as wire
from smqrt.wire import smq
from smqrt.wire.smq import MAX_PAYLOAD_BYTES
from tests.cluster.engines import Engine, MemoryEngine, Place, pair

MESSAGE = b"x" * 1000


class End:
    """A node's side of a channel.

    Attributes:
        said: what its status function was told; got: the messages, with the node of each.
    """

    def __init__(self, engine: Engine, place: Place, name: bytes = b"chat") -> None:
        self.said: list[tuple[int, bool, str]] = []
        self.got: list[tuple[bytes, int]] = []
        self.place, self.answer = place, None
        self.channel = engine.node_of(place).open(name, self.on_status, self.on_data)

    answer: Deferred[None] | None

    def on_status(self, node: int, up: bool, why: str) -> None:
        self.said.append((node, up, why))

    def on_data(self, data: bytes, node: int) -> Deferred[None] | None:
        self.got.append((data, node))
        return self.answer

    @property
    def number(self) -> int:
        return self.place.member.number

    @property
    def data(self) -> list[bytes]:
        return [data for data, _ in self.got]

    @property
    def ups(self) -> list[bool]:
        return [up for _, up, _ in self.said]


def ends(engine: Engine, name: bytes = b"chat") -> tuple[End, End]:
    """A channel between two nodes that is up."""
    one, other = (End(engine, place, name) for place in pair(engine))
    engine.until(lambda: one.ups == other.ups == [True], "the channel is up")
    return one, other


def test_both_sides_get_peers_and_their_messages(engine: Engine) -> None:
    one, other = ends(engine)
    assert one.said == [(other.number, True, "")]
    assert list(one.channel.nodes()) == [other.number]
    assert one.channel.send(b"to all") == (1, 0)
    assert one.channel.send(b"to one \0\xff", other.number) == (1, 0)
    assert one.channel.send(b"to itself", one.number) == (0, 0)
    assert other.channel.send(b"") == (1, 0)
    engine.until(lambda: len(other.got) == 2 and one.got, "three messages")
    engine.settle()
    assert other.got == [(b"to all", one.number), (b"to one \0\xff", one.number)]
    assert one.got == [(b"", other.number)]
    assert one.channel.counts() == {"sent": 2, "received": 1, "refused": 0, "lost": 0, "dropped": 0}


def test_messages_of_a_node_arrive_in_order(engine: Engine) -> None:
    places = [engine.place(name) for name in ("a", "b", "c")]
    engine.joined(*places)
    sides = [End(engine, place) for place in places]
    engine.until(lambda: all(side.ups == [True, True] for side in sides), "three sides")
    for count in range(200):
        for side in sides:
            data = b"%d" % count + b"." * (count * 13 % 900)
            assert side.channel.send(data) == (2, 0)
            side.place.hub.publish(b"between", b"topic of nobody")
    engine.until(lambda: all(len(side.got) == 400 for side in sides), "all messages")
    for side in sides:
        for sender in sides:
            got = [int(data.rstrip(b".")) for data, node in side.got if node == sender.number]
            assert got == ([] if sender is side else list(range(200)))


def test_a_late_open_is_notified_without_earlier_messages(engine: Engine) -> None:
    places = pair(engine)
    one = End(engine, places[0])
    engine.settle()
    assert one.said == []
    assert one.channel.send(b"to nobody") == (0, 0)
    other = End(engine, places[1])
    engine.until(lambda: one.ups == other.ups == [True], "the channel is up")
    one.channel.send(b"after")
    engine.until(lambda: other.got, "the message")
    assert other.data == [b"after"]


def test_a_hub_of_the_same_name_beside_it(engine: Engine) -> None:
    one, other = ends(engine, b"hub")
    subscriber, publisher = other.place.client(), one.place.client()
    subscriber.subscribe(b"topic")
    one.place.hub.create(b"topic")
    engine.until(lambda: one.place.interest(), "interest")
    for count in range(10):
        publisher.publish(b"topic", b"hub %d" % count)
        one.channel.send(b"channel %d" % count)
    engine.until(lambda: len(subscriber.data) == len(other.got) == 10, "both")
    assert subscriber.data == [b"hub %d" % count for count in range(10)]
    assert other.data == [b"channel %d" % count for count in range(10)]
    one.channel.close()
    engine.until(lambda: other.ups == [True, False], "the end")
    publisher.publish(b"topic", b"the hub goes on")
    engine.until(lambda: subscriber.data[-1] == b"the hub goes on", "the hub")
    two = End(engine, one.place, b"hub")
    engine.until(lambda: two.ups == [True], "the channel again")
    one.place.member.leave()
    engine.until(lambda: not other.place.member.remotes, "the hub leaves")
    two.channel.send(b"the channel goes on")
    engine.until(lambda: other.data[-1] == b"the channel goes on", "the channel")
    assert other.ups == [True, False, True]


def test_a_partition_and_its_end_are_reported_once(engine: Engine) -> None:
    one, other = ends(engine)
    one.channel.send(b"before")
    engine.until(lambda: other.got, "the message")
    engine.cut(one.place, other.place)
    engine.until(lambda: one.ups == other.ups == [True, False], "both are told")
    assert all(side.said[-1][2] for side in (one, other))
    assert one.channel.send(b"meanwhile") == (0, 0)
    engine.settle()
    engine.heal(one.place, other.place)
    engine.until(lambda: one.ups == other.ups == [True, False, True], "the heal")
    one.channel.send(b"after")
    engine.until(lambda: len(other.got) == 2, "the message after")
    engine.settle()
    assert other.data == [b"before", b"after"]
    assert (one.ups, other.ups) == ([True, False, True],) * 2


def test_messages_on_a_broken_link_arrive_or_are_counted(engine: Engine) -> None:
    one, other = ends(engine)
    engine.silence(one.place, other.place)
    for count in range(100):
        assert one.channel.send(b"%d" % count) == (1, 0)
    engine.wait_silence()
    engine.until(lambda: one.ups == other.ups == [True, False], "both notice the silence")
    engine.settle()
    assert one.channel.lost + len(other.got) == 100
    assert one.place.hub.drops()["link_lost"] == 0
    assert other.data == [b"%d" % count for count in range(len(other.got))]


def test_a_lost_node_is_reported(engine: Engine) -> None:
    one, other = ends(engine)
    engine.kill(other.place)
    engine.until(lambda: one.ups == [True, False], "the death is told")
    assert one.channel.nodes() == {}


def test_close_at_one_side(engine: Engine) -> None:
    one, other = ends(engine)
    for count in range(50):
        one.channel.send(b"%d" % count)
    one.channel.close(b"good night")
    one.channel.close(b"again")
    engine.until(lambda: other.ups == [True, False], "the other is told")
    assert other.said[-1] == (one.number, False, "good night")
    assert other.data == [b"%d" % count for count in range(50)]  # all that was sent before
    assert other.channel.send(b"to nobody") == (0, 0)
    with pytest.raises(ClosedError, match="'chat' is closed"):
        one.channel.send(b"after")
    engine.settle()
    assert one.ups == [True]  # who closes is told nothing any more
    assert engine.node_of(one.place).links
    again = End(engine, one.place)
    engine.until(lambda: again.ups == [True] and other.ups == [True, False, True], "opened again")
    other.channel.send(b"welcome")
    engine.until(lambda: again.data == [b"welcome"], "the message")
    assert one.got == []


def test_opened_and_closed_again_and_again_over_one_link(engine: Engine) -> None:
    one, other = ends(engine)
    side = one
    for count in range(20):
        side.channel.close()
        side = End(engine, one.place)
        side.channel.send(b"to nobody yet")
        if count % 3 == 0:
            engine.until(lambda side=side: side.ups == [True], "up again")
    engine.until(lambda: side.ups == [True] and other.ups[-1], "the last")
    engine.settle()
    assert other.ups == [True, False] * (len(other.ups) // 2) + [True]
    side.channel.send(b"at last")
    engine.until(lambda: other.data == [b"at last"], "the message")


def test_a_second_open_of_the_same_name_is_refused(engine: Engine) -> None:
    one, other = ends(engine)
    with pytest.raises(ArgumentError, match="the channel 'chat' is open already"):
        End(engine, one.place)
    one.channel.send(b"the first goes on")
    engine.until(lambda: other.got, "the message")


def test_too_large_messages_are_refused_the_largest_arrives(engine: Engine) -> None:
    one, other = ends(engine)
    largest = bytes(range(256)) * (MAX_PAYLOAD_BYTES // 256 + 1)
    with pytest.raises(ArgumentError, match="65521 bytes; a message carries at most 65520, split it"):
        one.channel.send(largest[: MAX_PAYLOAD_BYTES + 1])
    for _ in range(8):
        assert one.channel.send(largest[:MAX_PAYLOAD_BYTES]) == (1, 0)
    engine.until(lambda: len(other.got) == 8, "eight of the largest")
    assert set(other.data) == {largest[:MAX_PAYLOAD_BYTES]}


def test_a_slow_node_is_reported_and_delays_no_other(engine: Engine) -> None:
    one, other = ends(engine)
    other.answer = waits = Deferred[None]()
    taken = 0
    while one.channel.send(MESSAGE, other.number).nodes:
        taken += 1
    assert one.channel.send(MESSAGE) == (0, 1)
    assert taken == WINDOW_BYTES // (len(MESSAGE) + 15)
    assert one.channel.refused == 2
    subscriber = other.place.client()
    subscriber.subscribe(b"topic")
    one.place.hub.create(b"topic")
    engine.until(lambda: one.place.interest(), "interest")
    one.place.hub.publish(b"goes past", b"topic")
    engine.until(lambda: subscriber.data == [b"goes past"], "the hub is not held")
    engine.settle()
    assert len(other.got) == 1
    assert one.channel.send(MESSAGE) == (0, 1)
    other.answer = None
    waits.resolve()
    engine.until(lambda: len(other.got) == taken, "all that was taken")
    engine.until(lambda: one.channel.send(MESSAGE) == (1, 0), "there is room again")
    assert one.channel.lost == other.channel.dropped == 0


def test_all_channels_together_leave_room_for_hubs(engine: Engine) -> None:
    one, other = pair(engine)
    names = [b"%d" % count for count in range(6)]
    here, there = ([End(engine, place, name) for name in names] for place in (one, other))
    engine.until(lambda: all(side.ups for side in (*here, *there)), "the channels are up")
    for side in there:
        side.answer = Deferred[None]()
    taken = 0
    for side in here:
        while side.channel.send(bytes(65520)).nodes:
            taken += 65535
    assert LINK_BYTES - 65535 < taken <= LINK_BYTES
    engine.until(lambda: all(side.got for side in there[:4]), "they arrive")
    here[0].channel.close()  # what it has under way is nobody's any more
    engine.until(lambda: here[5].channel.send(bytes(65520)) == (1, 0), "room for others")
    assert engine.node_of(one).links_lost == 0


def test_an_error_in_a_function_keeps_the_link(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    places = pair(engine)
    got: list[bytes] = []

    def on_status(node: int, up: bool, why: str) -> None:
        raise LookupError("of the status")

    def on_data(data: bytes, node: int) -> None:
        got.append(data)
        raise LookupError("of the data")

    engine.node_of(places[1]).open(b"chat", on_status, on_data)
    one = End(engine, places[0])
    engine.until(lambda: one.ups == [True], "the channel is up")
    with caplog.at_level(logging.ERROR):
        for count in range(3):
            one.channel.send(b"%d" % count)
        engine.until(lambda: len(got) == 3, "three messages")
    assert got == [b"0", b"1", b"2"]
    assert caplog.text.count("LookupError: of the data") == 3
    engine.settle()
    assert one.ups == [True]


def test_functions_may_close_send_and_open(engine: Engine) -> None:
    one, other = pair(engine)
    node, made = engine.node_of(one), list[AppChannel]()
    log: list[object] = []

    def on_status(up_node: int, up: bool, why: str) -> None:
        log.append(up)
        made[-1].send(b"hello", up_node)

    def on_data(data: bytes, from_node: int) -> None:
        log.append(data)
        made[-1].close(b"enough")
        made.append(node.open(b"second", on_status, on_data))

    made.append(node.open(b"first", on_status, on_data))
    first, second = End(engine, other, b"first"), End(engine, other, b"second")
    engine.until(lambda: first.data == [b"hello"], "hello")
    for _ in range(3):
        first.channel.send(b"stop")
    engine.until(lambda: second.data == [b"hello"], "the second channel")
    engine.until(lambda: first.ups == [True, False], "the end of the first")
    assert first.said[-1][2] == "enough"
    assert log == [True, b"stop", True]
    assert made[0].dropped + first.channel.lost == 2
    assert made[0].received == 1


def test_fast_joins_and_leaves_are_reported_in_pairs(engine: Engine) -> None:
    one, other = ends(engine)
    one.answer = waits = Deferred[None]()
    other.channel.send(b"blocks")
    engine.until(lambda: one.got, "the message")
    for count in range(5):
        engine.cut(one.place, other.place)
        engine.until(lambda count=count: other.ups == [True, False] * (count + 1), "down")
        engine.heal(one.place, other.place)
        engine.until(lambda count=count: other.ups == [True, False] * (count + 1) + [True], "up")
        other.channel.send(b"life %d" % count)
        engine.settle()
    assert one.ups == [True]
    assert len(one.channel._events) <= 4
    one.answer = None
    waits.resolve()
    engine.until(lambda: one.ups == [True, False, True], "all is told")
    engine.until(lambda: one.data == [b"blocks", b"life 4"], "the message of now")
    assert one.channel.dropped == 4


def test_the_end_of_a_node_closes_its_channels(engine: Engine) -> None:
    one, other = ends(engine)
    one.channel.send(b"the last")
    engine.stop(one.place)
    engine.until(lambda: other.ups == [True, False], "the other is told")
    assert other.data == [b"the last"]
    assert one.ups == [True]
    with pytest.raises(ClosedError, match="were shut down"):
        End(engine, one.place)
    with pytest.raises(ClosedError, match="'chat' is closed"):
        one.channel.send(b"after")


@pytest.mark.parametrize("name", [b"", b"x" * 1001])
def test_names_have_a_size(engine: Engine, name: bytes) -> None:
    with pytest.raises(ArgumentError, match=f"name: {len(name)} bytes; the name of a channel has 1 to 1000"):
        End(engine, engine.place("one"), name)


def test_names_are_any_bytes_and_disconnect_texts_bounded(engine: Engine) -> None:
    one, other = ends(engine, b"\0\xff" * 500)
    with pytest.raises(ArgumentError, match="msg: 1001 bytes; the text of close has at most 1000"):
        one.channel.close(b"x" * 1001)
    one.channel.close(b"x" * 1000)
    engine.until(lambda: other.ups == [True, False], "the end")
    assert other.said[-1][2] == "x" * 1000


def test_there_are_so_many_channels(tmp_path: Path) -> None:
    engine = MemoryEngine(tmp_path)
    one, _ = pair(engine)
    some = [End(engine, one, b"%d" % count) for count in range(MAX_CHANNELS)]
    with pytest.raises(ArgumentError, match="400 channels are open already; close one before you open 'one more'"):
        End(engine, one, b"one more")
    some[0].channel.close()
    with pytest.raises(ArgumentError, match="channels are opened too often for 'one more'; keep them open"):
        End(engine, one, b"one more")
    engine.network.now_s += 0.25
    End(engine, one, b"one more")


def test_opening_and_closing_every_channel_keeps_the_link(tmp_path: Path) -> None:
    engine = MemoryEngine(tmp_path)
    one, other = pair(engine)
    for _ in range(3):
        some = [End(engine, one, b"%d" % count) for count in range(MAX_CHANNELS)]
        engine.settle()
        for side in some:
            side.channel.close()
        engine.settle()
        engine.network.now_s += MAX_CHANNELS / 4
    assert engine.node_of(other).links_lost == engine.node_of(one).links_lost == 0


def test_a_small_node_queue_takes_at_least_one_message(tmp_path: Path) -> None:
    engine = MemoryEngine(tmp_path)
    one, other = ends(engine)
    engine.node_of(one.place).queue_bytes = 1 << 16
    assert one.channel.send(bytes(65520)) == (1, 0)
    assert one.channel.send(b"x") == (0, 1)
    engine.settle()
    assert one.channel.send(b"x") == (1, 0)
    engine.settle()
    assert len(other.got) == 2


BAD = {
    "0x41 on an application channel": b"\0\3\x41",
    "a message on an application channel has a destination": smq.publish_frame(1, 0, 0, b""),
    "a packet of another node has the wrong length": smq.frame(bytes((wire.Packet.HANDLED, 1))),
}


@pytest.mark.parametrize("why", BAD)
def test_invalid_channel_packets_close_the_link(tmp_path: Path, why: str) -> None:
    engine = MemoryEngine(tmp_path)
    one, other = ends(engine)
    (peer,) = one.channel._peers.values()
    peer.send_queue.put(BAD[why])
    engine.settle()
    assert other.ups == one.ups == [True, False]
    assert why in other.said[-1][2]


def test_sending_beyond_the_window_closes_the_link(tmp_path: Path) -> None:
    engine = MemoryEngine(tmp_path)
    one, other = ends(engine)
    other.answer = Deferred[None]()
    (peer,) = one.channel._peers.values()
    for _ in range(20):
        peer.send_queue.put(smq.publish_frame(0, 0, 0, bytes(60_000)))
    engine.settle()
    assert one.ups == [True, False]
    other.answer.resolve()
    engine.settle()
    assert "a node sent more than 1048576 bytes on a channel before they were handled" in other.said[-1][2]


def test_batches_are_reported_message_by_message(tmp_path: Path) -> None:
    engine = MemoryEngine(tmp_path)
    _, other = ends(engine)
    (peer,) = other.channel._peers.values()
    for first in (0, 3):
        peer.deliver(b"".join(smq.publish_frame(0, 0, 0, b"%d" % count) for count in range(first, first + 3)))
    peer.deliver_view(memoryview(smq.publish_frame(0, 0, 0, b"6")))
    engine.settle()
    assert other.data == [b"%d" % count for count in range(7)]


def test_more_is_never_handled_than_was_sent(tmp_path: Path) -> None:
    engine = MemoryEngine(tmp_path)
    one, other = ends(engine)
    (peer,) = other.channel._peers.values()
    peer.send_queue.put(smq.frame(wire.u64(wire.Packet.HANDLED, 1 << 60)))
    engine.settle()
    (back,) = one.channel._peers.values()
    assert back._unhandled_bytes == back.send_queue.link.unhandled_bytes == 0


def test_older_nodes_treat_channels_as_hubs_they_lack(tmp_path: Path) -> None:
    """What it gets is an Open of before with a name that no hub has; of its answers none is new."""
    engine = MemoryEngine(tmp_path)
    one, other = pair(engine)
    (link_there,) = engine.node_of(other).links.values()
    packets: list[bytes] = []
    control = link_there.control
    link_there.control = lambda packet: packets.append(packet) or control(packet)  # type: ignore[method-assign, func-returns-value]
    side = End(engine, one)
    assert side.channel.send(b"to nobody") == (0, 0)
    side.channel.close(b"bye")
    engine.settle()
    sent = [packet for packet in packets if packet[0] not in (wire.Packet.CHANNEL, wire.Packet.ACK)]
    assert [packet[0] for packet in sent] == [wire.Packet.OPEN, wire.Packet.CLOSE]
    assert sent[0][3:] == b"\xffchat"
    with pytest.raises(UnicodeDecodeError):
        sent[0][3:].decode()


def test_events_continue_after_an_answer_that_fails(tmp_path: Path) -> None:
    engine = MemoryEngine(tmp_path)
    one, other = ends(engine)
    answers = [other.answer] = [Deferred[None]()]
    for text in (b"1", b"2"):
        one.channel.send(text)
    engine.settle()
    assert other.data == [b"1"]
    other.answer = None
    answers[0].reject(RuntimeError("of the application"))
    engine.settle()
    assert other.data == [b"1", b"2"]
    assert one.channel.send(b"x" * MAX_PAYLOAD_BYTES) == (1, 0)


def test_messages_not_yet_handled_are_dropped_by_close(tmp_path: Path) -> None:
    engine = MemoryEngine(tmp_path)
    one, other = ends(engine)
    other.answer = Deferred[None]()
    for _ in range(3):
        one.channel.send(b"x")
    engine.settle()
    other.channel.close()
    assert other.channel.counts()["received"] == 1
    assert other.channel.counts()["dropped"] == 2
