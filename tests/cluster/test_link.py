"""Links between two nodes (help: cluster), in a network with a clock of the test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest

from smqrt.broker.outbox import Drop
from smqrt.cluster import link as module
from smqrt.cluster.link import ACK_BYTES, HANDSHAKE_S, WHY_BYTES, Link, LinkState
from smqrt.cluster.link_channels import Channel, ChannelQueue, Receiver
from smqrt.cluster.node import PING_S, SILENCE_S, Node
from smqrt.errors import ProtocolError
from smqrt.wire import cluster_packets as wire
from smqrt.wire import smq
from smqrt.wire.cluster_packets import LinkType, Packet, Refusal, Siblings
from tests.cluster.memory_links import MemoryNetwork, MemoryTransport, Pipe

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


# ---- the handshake


class Half:
    """A node with the accepted links of peers that say nothing but what the test says for them."""

    def __init__(self) -> None:
        self.network = MemoryNetwork(Random(1))
        self.node = self.network.node()

    def accepted(self, address: str = "192.0.2.1") -> Link:
        transport = MemoryTransport(self.network, Pipe(), Pipe())
        return self.node.connected(transport, connects=False, address=address)

    def hello(self) -> bytes:
        return wire.hello(wire.Hello(*self.node.versions, b"p" * wire.ID_BYTES, 1, bytes(wire.NONCE_BYTES)))


@pytest.fixture
def half() -> Iterator[Half]:
    found = Half()
    yield found
    found.node.close()
    found.network.flush()


def test_a_handshake_has_a_time_limit(half: Half) -> None:
    link = half.accepted()
    for passed_s, state in ((HANDSHAKE_S - 0.1, LinkState.GREETING), (0.1, LinkState.CLOSED)):
        half.network.now_s += passed_s
        link.heard(half.network.now_s)  # data that arrives does not extend it
        half.node.check_links(PING_S, SILENCE_S)
        assert link.state is state
    assert link.why == "the handshake took longer than 5 s"


def test_the_busiest_address_loses_its_oldest_unauthenticated_link(half: Half, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNAUTHENTICATED", 4)
    addresses = ("a", "b", "b", "c")
    links = [half.accepted(address) for address in addresses]
    newest = half.accepted("a")
    assert [link.state is LinkState.CLOSED for link in (*links, newest)] == [False, True, False, False, False]
    half.accepted("d")
    assert links[0].state is LinkState.CLOSED, "of two links of this address the older one"
    half.accepted("d")
    assert links[2].state is LinkState.CLOSED, "the oldest of four addresses with one link each"
    assert len(half.node.unauthenticated) == 4


def test_a_refusal_before_hello_has_no_code(half: Half) -> None:
    early, later = half.accepted(), half.accepted()
    later.control(half.hello())
    for link in (early, later):
        link.control(wire.refused(Refusal.VERSION, "no"))
    assert (early.code, later.code) == (0, Refusal.VERSION)
    assert (early.is_refused, later.is_refused) == (False, True)
    assert early.why == later.why == "refused: no"


def test_reasons_of_other_nodes_are_cut_and_printable(half: Half) -> None:
    link = half.accepted()
    link.control(wire.refused(Refusal.CLOSING, "\n" + "x" * 1000))
    assert "\n" not in link.why
    assert link.why.count("x") == WHY_BYTES - 1


@pytest.mark.parametrize(
    "packet", [wire.u64(Packet.ACK, 0), wire.numbers(Packet.NODE, [5]), wire.proof(b"", True, b"")]
)
def test_packets_before_their_state_are_errors(half: Half, packet: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"type {packet[0]:#x} while waiting for Hello"):
        half.accepted().control(packet)


@pytest.mark.parametrize("packet", [b"", b"\x01", b"\xff123"])
def test_unknown_first_packets_are_not_from_a_node(half: Half, packet: bytes) -> None:
    link = half.accepted()
    with pytest.raises(ProtocolError, match="not from a node of smqrt"):
        link.control(packet)
    with pytest.raises(ProtocolError, match="not from a node of smqrt"):
        link.deliver(smq.publish_frame(1, 1, 0, b""))


# ---- links that are up


class Hub:
    """What a channel carries.

    Attributes:
        lost: the messages that were counted as lost, by reason.
    """

    def __init__(self, wire_name: bytes = b"hub") -> None:
        self.wire_name = wire_name
        self.lost: Counter[Drop] = Counter()

    def count_lost(self, reason: Drop, messages: int) -> None:
        self.lost[reason] += messages

    def joined(self, number: int, send_queue: ChannelQueue, /) -> Receiver:
        raise NotImplementedError

    def left_node(self, remote: object, why: str, reason: Drop, /) -> None:
        raise NotImplementedError


class Up:
    """A link that is up, and the channel of a hub; what is sent stays on its way.

    Attributes:
        link, other: both sides.
    """

    def __init__(self, queue_bytes: int = 1 << 20) -> None:
        self.network = MemoryNetwork(Random(1))
        one, other = (self.network.node(queue_bytes=queue_bytes) for _ in range(2))
        self.node: Node = one
        self.link, self.other = self.network.connect(one, other)
        self.network.settle()
        assert self.link.state is LinkState.UP
        self.hub = Hub()
        self.channel = Channel(1, self.hub)

    @property
    def sent(self) -> list[bytes]:
        """The frames on their way, without their lengths."""
        self.network.flush()
        pipe = self.link.transport.outbox
        assert isinstance(pipe, Pipe)
        return [frame[2:] for chunk in pipe.chunks for frame in smq.frames(chunk)]

    def messages(self) -> list[bytes]:
        return [frame[13:] for frame in self.sent if frame[0] == smq.Type.PUBLISH]


def message(text: bytes, size: int = 1000) -> bytes:
    return smq.publish_frame(1, 5, 0, text.ljust(size))


def test_more_acknowledged_than_sent_is_an_error() -> None:
    up = Up()
    up.link.control(wire.u64(Packet.ACK, up.link.sent_bytes))
    assert up.link.unacked_bytes == 0
    with pytest.raises(ProtocolError, match="acknowledges more than it was sent"):
        up.link.control(wire.u64(Packet.ACK, up.link.sent_bytes + 1))


def test_only_unacknowledged_messages_of_a_batch_are_lost() -> None:
    up = Up()
    batch = b"".join(message(b"%d" % number) for number in range(5))
    up.link.transmit(up.channel, [batch, message(b"5")])
    up.link.control(wire.u64(Packet.ACK, up.link.sent_bytes - 1))
    up.link.lose("the test")
    up.network.flush()
    assert up.hub.lost == {Drop.LINK_LOST: 1}, "the first batch has arrived"
    up.link.transmit(up.channel, [message(b"6"), message(b"7")])  # by a queue that was full of batches
    assert up.hub.lost == {Drop.LINK_LOST: 3}


def test_an_acknowledgement_never_goes_back() -> None:
    up = Up()
    up.link.control(wire.u64(Packet.ACK, up.link.sent_bytes))
    up.link.control(wire.u64(Packet.ACK, 1))
    assert up.link.unacked_bytes == 0


def test_bytes_are_acknowledged_after_a_fixed_amount() -> None:
    up = Up()
    pipe = next(pipe for pipe in up.network.pipes if pipe.link is up.link)
    up.link.acknowledge()
    before = len(up.sent)
    pipe.processed_bytes += ACK_BYTES - 1
    up.link.heard(up.network.now_s)
    assert len(up.sent) == before
    pipe.processed_bytes += 1
    up.link.heard(up.network.now_s)
    up.link.acknowledge()  # nothing new to acknowledge
    assert up.sent[before:] == [wire.u64(Packet.ACK, pipe.processed_bytes)]


def test_no_smaller_message_replaces_a_dropped_one() -> None:
    up = Up()
    room_bytes = up.node.unacked_bytes - up.node.queue_bytes // 4 - up.link.unacked_bytes
    control = smq.frame(bytes((LinkType.SYNCED,)))
    filling = [message(b"filling", 60_000)] * (room_bytes // 60_100)
    assert up.link.transmit(up.channel, filling)
    assert not up.link.transmit(up.channel, [message(b"large", 65_000), control, message(b"small")])
    up.network.flush()
    assert up.hub.lost == {Drop.LINK_SLOW: 2}
    assert [one.strip() for one in up.messages()] == [b"filling"] * len(filling)
    assert up.sent[-1] == control[2:]
    app = Channel(2, Hub(wire.APP + b"chat"))
    assert up.link.transmit(app, [message(b"of an application", 65_000)]), "it has limits of its own"


def test_a_link_ends_after_too_many_dropped_bytes() -> None:
    up = Up(queue_bytes=10_000)
    for _ in range(2):  # an acknowledgement of something starts the count again
        up.link.drop(up.channel, [message(b"", 20_000 - smq.PUBLISH_HEADER_BYTES)])
        assert up.link.state is LinkState.UP
        up.link.send(b"\x01")
        up.link.control(wire.u64(Packet.ACK, up.link.sent_bytes))
    up.link.drop(up.channel, [message(b"", 20_000), message(b"")])
    assert up.link.state is LinkState.CLOSED
    assert "the other node is too slow" in up.link.why
    assert up.hub.lost == {Drop.LINK_SLOW: 4}


@pytest.mark.parametrize("ends", [False, True])
def test_waiting_snapshots_go_on_unless_the_link_ends(ends: bool) -> None:
    up = Up()
    up.link.transmit(up.channel, [message(b"", 60_000)] * (up.node.unacked_bytes // 4 // 60_000 + 1))
    assert up.link.is_behind
    resumed: list[bool] = []
    up.link.wait(lambda: resumed.append(True))
    up.link.control(wire.u64(Packet.ACK, 1))
    assert resumed == []
    if ends:
        up.link.lose("the test")
        up.network.settle()
    else:
        up.network.settle()
        up.link.control(wire.u64(Packet.ACK, up.link.sent_bytes))
    assert resumed == ([] if ends else [True])


def test_a_node_that_changes_its_number_loses_the_link() -> None:
    up = Up()
    up.link.control(wire.numbers(Packet.NODE, [up.link.number]))
    assert up.link.state is LinkState.UP
    with pytest.raises(ProtocolError, match="node number missing"):
        up.link.control(wire.numbers(Packet.NODE, []))
    up.link.control(wire.numbers(Packet.NODE, [up.link.number % 1000 + 1]))
    assert up.link.why == "the other node has another number now"


def test_a_place_has_a_host_and_an_announced_port() -> None:
    up = Up()
    for via, port, place in (
        ("192.0.2.1:5", 1900, ("192.0.2.1", 1900)),
        ("[::1]:5", 1900, ("[::1]", 1900)),
        ("unix", 1900, None),
        ("192.0.2.1:5", 0, None),
    ):
        up.link.via = via
        up.link.control(wire.siblings(Siblings(bytes(wire.ID_BYTES), 0, ((bytes(wire.ID_BYTES), port),))))
        assert up.link.place == place


@pytest.mark.parametrize(("code", "has_left"), [(0, False), (Refusal.CLOSING, True), (Refusal.NUMBER, False)])
def test_a_node_that_shuts_down_has_left(code: int, has_left: bool) -> None:
    up = Up()
    assert up.link.has_left, "a channel that ends while the link is up"
    up.link.lose("the test", code=code)
    assert up.link.has_left is has_left


def test_losing_twice_reports_the_first_reason() -> None:
    up = Up()
    ends: list[str] = []
    up.link.on_end = lambda link, why: ends.append(why) or link.lose("again")  # type: ignore[func-returns-value]
    up.link.refuse(Refusal.CLOSING, "first")
    up.link.lose("second")
    assert ends == ["first"]
    assert (up.link.why, up.link.code) == ("first", Refusal.CLOSING)
    up.network.settle()
    assert (up.other.why, up.other.code) == ("refused: first", Refusal.CLOSING), "it is sent before the end"
