"""The channels of a link: their numbers, their ends, and the send queue of each."""

from __future__ import annotations

from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from smqrt.broker.outbox import Outbox, flush_dirty
from smqrt.cluster import link_channels
from smqrt.cluster.link import LinkState
from smqrt.cluster.link_channels import (
    CLOSES_AT_ONCE,
    HANDED_AT_ONCE_BYTES,
    KEPT_QUEUES,
    MAX_NAME_BYTES,
    Channel,
    ChannelQueue,
)
from smqrt.errors import ProtocolError
from smqrt.wire import cluster_packets as wire
from smqrt.wire import smq
from smqrt.wire.cluster_packets import LinkType, Packet
from tests.cluster.engines import MemoryEngine, pair
from tests.cluster.memory_links import MemoryNetwork
from tests.cluster.test_channel import End
from tests.cluster.test_link import Hub

# ---- opening and closing


def test_numbers_of_channels_come_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_channels, "MAX_CHANNEL", 2)  # one is the hub's
    engine = MemoryEngine(tmp_path)
    one, other = pair(engine)
    there = End(engine, other)
    for count in range(5):
        here = End(engine, one)
        engine.until(lambda here=here: here.ups == [True], "up")
        here.channel.send(b"%d" % count)
        engine.settle()
        here.channel.close()
    engine.settle()
    assert (there.data, there.ups) == ([b"0", b"1", b"2", b"3", b"4"], [True, False] * 5)


def test_a_node_that_opens_without_end_loses_its_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_channels, "MAX_UNOPENED", 3)
    engine = MemoryEngine(tmp_path)
    one, other = pair(engine)
    for count in range(4):
        End(engine, one, b"%d" % count)
    engine.settle()
    assert engine.node_of(other).links_lost == 1


class Pair:
    """A link that is up between two nodes without channels.

    Attributes:
        link: the side at which the test says what the other side would.
    """

    def __init__(self) -> None:
        self.network = MemoryNetwork(Random(1))
        self.node, other = self.network.node(), self.network.node()
        self.link, _ = self.network.connect(self.node, other)
        self.network.settle()
        assert self.link.state is LinkState.UP
        self.link.acknowledge()
        self.said()

    def said(self) -> list[bytes]:
        """What this side has said since the last call."""
        self.network.flush()
        pipe: Any = self.link.transport.outbox
        found = [frame[2:] for chunk in pipe.chunks for frame in smq.frames(chunk)]
        pipe.chunks.clear()
        return found

    def open(self, name: bytes = b"chat") -> list[bool]:
        """Opens an application channel here; gives what it will be told."""
        ups: list[bool] = []
        self.node.open(name, lambda node, up, why: ups.append(up), lambda data, node: None)
        return ups

    def hears(self, kind: Packet, number: int, text: bytes = b"") -> None:
        self.link.control(wire.channel(kind, number, text))
        self.network.flush()


def test_a_channel_is_up_when_both_have_opened_it() -> None:
    for opens_first in (False, True):
        link = Pair()
        ups = link.open() if opens_first else []
        link.hears(Packet.OPEN, 7, wire.APP + b"chat")
        assert link.link.channels.is_settled is opens_first
        ups = ups if opens_first else link.open()
        link.network.flush()
        assert ups == [True]
        assert link.link.channels.joined == 1
        assert link.link.channels.is_settled


def test_a_channel_the_other_side_closed_is_not_joined() -> None:
    link = Pair()
    link.hears(Packet.OPEN, 7, wire.APP + b"chat")
    link.hears(Packet.CLOSE, 7)
    assert link.said() == [wire.channel(Packet.CLOSED, 7)]
    assert link.link.channels.is_settled
    assert link.open() == []
    assert link.link.channels.joined == 0


def test_a_name_is_opened_again_after_closed_arrives() -> None:
    link = Pair()
    link.open()
    link.node.channels[b"chat"].close(b"bye")
    link.open()
    assert [packet[0] for packet in link.said()] == [Packet.OPEN, Packet.CLOSE]
    link.hears(Packet.CLOSED, 1)
    assert link.said() == [wire.channel(Packet.OPEN, 2, wire.APP + b"chat")], "1 may still be in transit"


def test_a_close_of_the_other_side_opens_another_number() -> None:
    link = Pair()
    ups = link.open()
    link.hears(Packet.OPEN, 7, wire.APP + b"chat")
    link.said()
    link.hears(Packet.CLOSE, 7, b"bye")
    assert link.said() == [wire.channel(Packet.CLOSED, 7), wire.channel(Packet.OPEN, 2, wire.APP + b"chat")]
    link.hears(Packet.OPEN, 8, wire.APP + b"chat")
    assert ups == [True, False, True]


@pytest.mark.parametrize(
    ("number", "name"), [(7, b"another"), (8, b"x" * (MAX_NAME_BYTES + 1))], ids=["open already", "name"]
)
def test_invalid_opens_are_errors(number: int, name: bytes) -> None:
    link = Pair()
    link.open()
    link.hears(Packet.OPEN, 7, wire.APP + b"chat")
    with pytest.raises(ProtocolError, match="it is open already, or its name has more than 1000 bytes"):
        link.hears(Packet.OPEN, number, wire.APP + name)
    link.hears(Packet.OPEN, 9, wire.APP + name[:MAX_NAME_BYTES])


def test_closing_channels_too_often_is_an_error() -> None:
    link = Pair()
    for _ in range(CLOSES_AT_ONCE):
        link.hears(Packet.CLOSE, 7)
    with pytest.raises(ProtocolError, match="a node closes channels too often"):
        link.hears(Packet.CLOSE, 7)
    link.network.now_s += 0.1
    link.hears(Packet.CLOSE, 7)


def test_messages_on_an_unknown_channel_are_dropped() -> None:
    link = Pair()
    link.open()
    link.hears(Packet.OPEN, 7, wire.APP + b"chat")
    link.hears(Packet.CHANNEL, 7)
    assert link.link.remote is not None
    link.hears(Packet.CHANNEL, 8)
    assert link.link.remote is None
    link.link.receive(smq.publish_frame(1, 2, 0, b"") + smq.frame(bytes((LinkType.SYNCED,))))


# ---- send queues


class Wire:
    """The link under a send queue.

    Attributes:
        passed: the batches of each step; dropped: those that the queue has dropped.
        full_after: the link is full once so many steps were passed to it.
    """

    def __init__(self, queue_bytes: int = 1 << 20) -> None:
        self.node = SimpleNamespace(queue_bytes=queue_bytes)
        self.transport = SimpleNamespace(outbox=Outbox())
        self.passed: list[list[bytes]] = []
        self.dropped: list[bytes] = []
        self.full_after = 1000
        self.accepts = True

    @property
    def is_full(self) -> bool:
        return len(self.passed) >= self.full_after

    def transmit(self, channel: Channel, batches: list[bytes]) -> bool:
        self.passed.append(batches)
        return self.accepts

    def drop(self, channel: Channel, batches: list[bytes]) -> None:
        self.dropped += batches


def queue_over(link: Any) -> ChannelQueue:
    return ChannelQueue(link, Channel(1, Hub()))


def message(size: int) -> bytes:
    return smq.publish_frame(1, 5, 0, bytes(size))


LARGE = message(60_000)


def test_a_large_queue_is_sent_before_the_turn_ends() -> None:
    link = Wire()
    queue = queue_over(link)
    for _ in range(HANDED_AT_ONCE_BYTES // len(LARGE)):
        queue.put(LARGE)
    assert link.passed == []
    queue.put(LARGE)
    assert [len(batches) for batches in link.passed] == [HANDED_AT_ONCE_BYTES // len(LARGE) + 1]
    flush_dirty()


def test_a_kept_queue_is_bounded_for_messages() -> None:
    link = Wire(queue_bytes=len(LARGE))
    queue, control = queue_over(link), smq.frame(bytes((LinkType.SYNCED,)))
    queue.keep()
    for _ in range(KEPT_QUEUES + 3):
        queue.put(LARGE)
    queue.put(control)
    assert queue.queue == [LARGE] * (KEPT_QUEUES + 1) + [control]
    assert link.dropped == [LARGE] * 2
    assert queue.missed
    flush_dirty()
    assert link.passed == []


def test_what_the_link_drops_is_missed() -> None:
    link = Wire()
    queue = queue_over(link)
    queue.put(LARGE)
    queue.flush()
    assert not queue.missed
    link.accepts = False
    queue.put(LARGE)
    queue.flush()
    assert queue.missed
    flush_dirty()


def test_a_released_queue_stops_when_the_link_is_full() -> None:
    link = Wire()
    queue = queue_over(link)
    queue.on_full = lambda: setattr(queue, "holds", True)
    queue.holds = True
    for _ in range(20):
        queue.put(LARGE)
    link.full_after = 2
    queue.release()
    each = HANDED_AT_ONCE_BYTES // len(LARGE) + 1
    assert [len(batches) for batches in link.passed] == [each, each]
    assert len(queue.queue) == 20 - 2 * each
    link.full_after = 1000
    queue.release()
    assert sum(map(len, link.passed)) == 20
    assert queue.queue == []
    flush_dirty()


def test_a_flush_that_fills_the_link_reports_it() -> None:
    link = Wire()
    queue, full = queue_over(link), []
    queue.on_full = lambda: full.append(True)
    link.full_after = 2
    for expected in ([], [True]):
        queue.put(LARGE)
        queue.flush()
        assert full == expected
    flush_dirty()
