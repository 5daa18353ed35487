"""Results of pings (help: cluster): each once, in a network with a clock of the test."""

from __future__ import annotations

from random import Random

from smqrt.cluster.link import Link, LinkState
from smqrt.cluster.node import PING_S, SILENCE_S
from tests.cluster.memory_links import MemoryNetwork

ANSWER_S = SILENCE_S - PING_S


class Pinged:
    """Two nodes with a link, of whose pings the first one is told.

    Attributes:
        told: the seconds of each ping, None without an answer in time.
    """

    def __init__(self) -> None:
        self.network = MemoryNetwork(Random(1))
        one, other = self.network.node(), self.network.node()
        self.told: list[float | None] = []
        one.on_round_trip = lambda link, seconds: self.told.append(seconds)
        self.link, self.other = self.network.connect(one, other)
        self.network.settle()
        assert self.link.state is LinkState.UP

    def look(self, after_s: float, link: Link | None = None) -> None:
        """Let time pass, in which nothing arrives."""
        self.network.now_s += after_s
        (link or self.link).pings.check(self.network.now_s, PING_S, SILENCE_S)


def test_each_answer_is_reported() -> None:
    pinged = Pinged()
    pinged.network.pass_time(3.1)
    assert len(pinged.told) == 3
    pinged.look(PING_S)
    pinged.network.now_s += 0.25
    pinged.network.settle()
    assert len(pinged.told) == 4
    assert pinged.told[3] is not None
    assert abs(pinged.told[3] - 0.25) < 1e-5
    assert pinged.link.round_trip_s == pinged.told[3]


def test_a_late_pong_is_reported_once_as_none() -> None:
    pinged = Pinged()
    pinged.look(PING_S)
    pinged.link.heard(pinged.network.now_s)
    for _ in range(3):
        pinged.look(PING_S)
        pinged.link.heard(pinged.network.now_s)
    assert pinged.told == []
    pinged.look(ANSWER_S - 3 * PING_S)
    assert pinged.told == [None]
    pinged.network.settle()
    assert len(pinged.told) == 5  # of the first and the four behind it, which came in time
    assert pinged.told.count(None) == 1
    assert pinged.link.state is LinkState.UP


def test_pings_of_a_link_that_ends_have_no_answer() -> None:
    pinged = Pinged()
    pinged.look(PING_S)
    pinged.network.break_link(pinged.link)
    assert pinged.told == [None]
    pinged.network.settle()
    pinged.look(10)
    assert pinged.told == [None]


def test_a_link_lost_by_silence_reports_none_once() -> None:
    pinged = Pinged()
    pinged.network.swallow(pinged.link)
    pinged.look(PING_S)
    pinged.look(SILENCE_S)
    assert pinged.link.state is LinkState.CLOSED
    assert pinged.told == [None]


def test_notified_callbacks_may_close_the_link() -> None:
    pinged = Pinged()
    node = pinged.link.node
    node.on_round_trip = lambda link, seconds: node.close()
    for _ in range(2):  # in the second the first has no answer in time
        pinged.look(ANSWER_S)
        pinged.link.heard(pinged.network.now_s)
    assert node.closed
    assert not pinged.link.pings.sent_us
    pinged.network.settle()
    assert pinged.link.state is LinkState.CLOSED
    assert pinged.other.state is LinkState.CLOSED
