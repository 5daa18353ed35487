"""One link between two nodes: a state machine that takes packets and answers through its transport.

    GREETING ──Hello──▶ PROVING ──Proof──▶ NUMBERING ──numbers differ──▶ UP
        └──────────────────┴──── refused, broken, silent ────┴──────────▶ CLOSED

It carries a channel for each hub that both nodes have in the same cluster, and for each channel of an application's own
that both have opened. What it sends is kept until the other side says that it has worked it off; what that never says
is counted as lost, at its hub or channel.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from smqrt.broker.outbox import Drop, Outbox, run_in_background
from smqrt.broker.topics import Route
from smqrt.cluster.channel import ChannelWay
from smqrt.cluster.node_send_queue import count_messages
from smqrt.errors import CloseReason, ProtocolError
from smqrt.printable import printable
from smqrt.settings.limit_register import Bucket, Limit
from smqrt.wire import link_packets as wire
from smqrt.wire import smq
from smqrt.wire.link_packets import Hello, Packet, Refusal, Siblings

if TYPE_CHECKING:
    from smqrt.cluster.node import Node


# ---- Who has connected from outside and has not proved yet that it knows the password.

MAX_STRANGERS = 100
STRANGERS = Limit(
    "cluster_strangers", "", f"{MAX_STRANGERS} connections that have not proved the password; the oldest makes room"
)


class UnauthenticatedLinks:
    """The links of a node whose other side is a stranger, in the order they came.

    When there are too many, the oldest of the address that has the most of them makes room. So whoever holds
    connections and says nothing keeps nobody out: a node proves the password within milliseconds. Who comes from one
    address only gives up connections of its own; with all addresses alike it is the oldest of all.
    """

    def __init__(self) -> None:
        self._addresses: dict[Link, str] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, link: Link, address: str) -> None:
        """Count a new one; another one may be ended for it."""
        if len(self._addresses) >= MAX_STRANGERS:
            self._make_room()
        self._addresses[link] = address

    def discard(self, link: Link) -> None:
        """It is a stranger no more, or gone."""
        self._addresses.pop(link, None)

    def _make_room(self) -> None:
        counts = Counter(self._addresses.values())
        most = max(counts.values())
        oldest = next(link for link, address in self._addresses.items() if counts[address] == most)
        STRANGERS.refused(f"a link from {self._addresses[oldest]}")
        oldest.lose("others have come that did not prove the password either")


log = logging.getLogger("smqrt")

MAX_CHANNEL = 0xFFFF
LEFT_OUT = 2
"""A node for which so many times its queue was left out since it worked off anything is lost."""
MAX_UNOPENED = 4096
"""Hubs and channels that the other side has and this one has not."""
MAX_NAME_BYTES = 1000
"""Of clusters and of channels."""
ACK_BYTES = 256 << 10
"""Worked off so much, a node says so; and with each answer to a ping."""
WHY_BYTES = 200
"""Of what another node, or a stranger, says why it refuses a link."""
HANDSHAKE_S = 5.0
"""A handshake takes so long at most, however much is said meanwhile."""
CLOSES_PER_S, CLOSES_AT_ONCE = 10.0, 1000
"""How often a node may close channels: each is opened again, and what the hub has is told anew."""


class LinkState(Enum):
    """Where a link stands."""

    GREETING = "waiting for Hello"
    PROVING = "waiting for Proof"
    NUMBERING = "node numbers are equal"
    UP = "up"
    CLOSED = "closed"


class Transport(Protocol):
    """What a link sends through.

    Attributes:
        outbox: takes frames.
        worked_off_bytes: how many of the received bytes have been worked off.
        via: where the connection goes, for people: an address, `unix` or `nats`.
    """

    @property
    def outbox(self) -> Outbox: ...
    @property
    def via(self) -> str: ...
    @property
    def worked_off_bytes(self) -> int: ...

    def close(self, in_order: bool) -> None:
        """End the connection; `in_order` sends what waits first, as far as that goes at once."""
        ...


class Receiver(Protocol):
    """Another node, as what it sends on one channel finds it.

    Attributes:
        routes: where its messages go, by the four bytes of their destination.
    """

    @property
    def routes(self) -> Mapping[bytes, Route]: ...

    def resolve(self, destination: bytes) -> Route:
        """Where messages to a destination go that is not among the routes."""
        ...

    def count_batch(self, destination: bytes, more: int) -> None:
        """Count `more` messages, which are in one run; it is delivered next."""
        ...

    def control(self, packet: bytes) -> None:
        """Work off a packet that is no Publish. Raises ProtocolError."""
        ...


class Carried(Protocol):
    """What has a channel on each link: a hub, or a channel of an application's own.

    Attributes:
        wire_name: by which both nodes know that they mean the same.
        count_lost: takes why messages were lost, and how many.
    """

    @property
    def wire_name(self) -> bytes: ...
    @property
    def count_lost(self) -> Callable[[Drop, int], None]: ...

    def joined(self, number: int, way: ChannelWay, /) -> Receiver:
        """Another node, of that number, has it too."""
        ...

    def left_node(self, remote: Any, why: str, reason: Drop, /) -> None:
        """It has it no more, or can't be reached; `remote` is what `joined` gave."""
        ...


class Channel:
    """What a link carries of one hub of this node, or of one channel of its applications.

    Attributes:
        carried: that hub's part in the cluster, or that channel.
        remote: the other node for it; None before that has opened the channel.
        theirs: the number of the channel there.
    """

    def __init__(self, number: int, carried: Carried) -> None:
        self.number, self.carried = number, carried
        self.remote: Receiver | None = None
        self.theirs: int | None = None


class Link:
    """One side of a link.

    Args:
        node: whose side.
        transport: to the other side.
        connects: whether this side has connected.
        now_s: monotonic seconds.

    Attributes:
        peer: what the other side said of itself; None before.
        number: the other node's number.
        remote: where received messages go at the moment.
        round_trip_s: of the newest ping; None before.
        on_up, on_end: called when the handshake is over, and with the reason when it ends.
        via: where the connection goes, as its transport has said when the link came up.
        why, code: why it ended; the code is a `Refusal`, 0 for none.
        sent_bytes: of the link.
        knows_pressure: whether the other side knows the packets from `LinkType.PRESSED` on.
        knows_stamps: whether it knows `LinkType.VALUE_AT` and `LinkType.CLOCK`.
        knows_succession: whether it knows the packets from `LinkType.PAUSE` on.
        siblings: what the other side has said of the processes of its server; None before, and of older releases.
        unhandled_bytes: what the other node's applications have not handled yet of all that came over their channels.
    """

    def __init__(self, node: Node, transport: Transport, connects: bool, now_s: float) -> None:
        self.node, self.transport, self.connects = node, transport, connects
        self.state = LinkState.GREETING
        self.peer: Hello | None = None
        self.number = 0
        self.remote: Receiver | None = None
        self.round_trip_s: float | None = None
        self.since_s = self.heard_s = self.pinged_s = now_s
        self._pings: deque[int] = deque()
        """When those were sent that may still be answered in time, in µs."""
        self.why, self.code, self.via = "", 0, ""
        self.on_up: Callable[[Link], object] = lambda link: None
        self.on_end: Callable[[Link, str], object] = lambda link, why: None
        oldest, newest = node.versions
        self._own = Hello(oldest, newest, node.id, node.epoch, node.random(wire.NONCE_BYTES))
        self._hellos = b""
        self._channels: dict[int, Channel] = {}
        self._theirs: dict[int, Channel] = {}
        self._unopened: dict[bytes, int] = {}
        self._closing: dict[int, bytes] = {}
        """By number, the names of channels whose end the other side has not heard of yet."""
        self._sending = self._last_channel = 0
        self.sent_bytes = self.unhandled_bytes = 0
        self._acked_bytes = self._said_bytes = self._left_out_bytes = 0
        self._unacked: deque[Unacked] = deque()
        self._uncounted: set[int] = set()
        """Channels there that were joined, and of whose end this side has not heard."""
        self.knows_pressure = self.knows_stamps = self.knows_succession = self._knows_siblings = False
        self.siblings: Siblings | None = None
        self._closes = Bucket(CLOSES_PER_S, CLOSES_AT_ONCE, now_s)
        self._waiting: list[Callable[[], object]] = []
        if connects:
            self._say(wire.hello(self._own))

    # ---- sending

    def _say(self, packet: bytes) -> None:
        frame = smq.frame(packet)
        self.sent_bytes += len(frame)
        self.transport.outbox.put(frame)

    def transmit(self, channel: Channel, runs: list[bytes]) -> bool:
        """Send runs of a channel, and keep them until they have arrived; false when messages were left out because too
        much waits already. The last part of the queue is for what nodes tell each other, and for applications'
        channels, which have bounds of their own.
        """
        if self.state is not LinkState.UP:  # it has just ended, while more was to be handed over
            if messages := sum(map(count_messages, runs)):
                channel.carried.count_lost(Drop.LINK_LOST, messages)
            return True
        takes_all = True
        room_bytes = self.node.unacked_bytes - self.node.queue_bytes // 4 - self.unacked_bytes
        if sum(map(len, runs)) > room_bytes and not channel.carried.wire_name.startswith(wire.APP):
            runs, left_out = _fitting(runs, room_bytes)
            takes_all = not left_out
            self._count_left_out(channel, left_out)
        if channel.number != self._sending:
            self._sending = channel.number
            self._say(wire.channel(Packet.CHANNEL, channel.number))
        self.sent_bytes += sum(map(len, runs))
        self._unacked.append((self.sent_bytes, channel, runs))
        if self._is_too_slow():
            return takes_all
        outbox = self.transport.outbox
        for run in runs:
            outbox.put(run)  # in a way that a connection over its limit is noticed
        return takes_all

    def leave_out(self, channel: Channel, runs: list[bytes]) -> None:
        """Count runs that are not sent, because too much waits."""
        self._count_left_out(channel, runs)
        self._is_too_slow()

    def _count_left_out(self, channel: Channel, runs: list[bytes]) -> None:
        self._left_out_bytes += sum(map(len, runs))
        if messages := sum(map(count_messages, runs)):
            channel.carried.count_lost(Drop.LINK_SLOW, messages)

    def _is_too_slow(self) -> bool:
        is_over = self.unacked_bytes > self.node.unacked_bytes
        if is_over or self._left_out_bytes > LEFT_OUT * self.node.queue_bytes:
            self.lose(f"{self.unacked_bytes >> 20} MiB wait for the other node, which does not keep up", Drop.LINK_SLOW)
        return self.state is LinkState.CLOSED

    @property
    def is_proven(self) -> bool:
        """Whether the other side has proved that it knows the password."""
        return self.state in PROVEN

    @property
    def session_key(self) -> bytes:
        """What only both sides know; for connections that strangers could speak on, too."""
        return wire.session_key(self.node.key, self._hellos)

    @property
    def is_refused(self) -> bool:
        """Whether it ended because the two nodes can't have a link."""
        return self.code in (Refusal.VERSION, Refusal.PASSWORD, Refusal.SELF, Refusal.NUMBER)

    @property
    def place(self) -> tuple[str, int] | None:
        """Host and port at which the other node takes links; None when that is not known."""
        port = self.siblings.places[self.siblings.own][1] if self.siblings is not None else 0
        host, colon, _ = self.via.rpartition(":")
        return (host, port) if colon and port else None

    @property
    def has_left(self) -> bool:
        """Whether the other node goes in order, or only what the link has carried ends; else it is lost."""
        return self.state is not LinkState.CLOSED or self.code == Refusal.CLOSING

    @property
    def unacked_bytes(self) -> int:
        """What was sent, or waits, and has not been worked off there yet."""
        return self.sent_bytes - self._acked_bytes

    @property
    def _waiting_bytes(self) -> int:
        outbox = self.transport.outbox
        return outbox.queued_bytes + (0 if outbox.carrier is None else outbox.carrier.queued_bytes)

    @property
    def is_behind(self) -> bool:
        """Whether so much has not been worked off there that what can wait should; see `wait`."""
        return self.unacked_bytes > self.node.unacked_bytes // 4 or self._waiting_bytes > self.node.queue_bytes // 4

    @property
    def is_full(self) -> bool:
        """Whether so much has not been worked off there that publishers should wait."""
        return self.unacked_bytes > self.node.unacked_bytes // 2 or self._waiting_bytes > self.node.queue_bytes // 2

    def wait(self, then: Callable[[], object]) -> None:
        """Call `then` when the other side has worked off more; not when the link ends before."""
        self._waiting.append(then)

    # ---- receiving

    def control(self, packet: bytes) -> None:
        """Work off a packet that is no Publish.

        Raises:
            ProtocolError: the other side broke a rule; the link is to be ended with that.
        """
        handler = HANDLERS.get(packet[0]) if packet else None
        if handler is not None:
            states, handle = handler
            if self.state not in states:
                raise ProtocolError(CloseReason.UNKNOWN_PACKET, f"type {packet[0]:#x} while {self.state.value}")
            handle(self, packet)
        elif self.remote is not None and self.state is LinkState.UP:
            self.remote.control(packet)
        elif self.state is not LinkState.UP:
            raise ProtocolError(CloseReason.BAD_CONNECT, "what connects here is no node of smqrt")

    def receive(self, data: bytes) -> None:
        """Work off whole frames; see `control` for what is raised. For engines without the kernels of the data path."""
        at = 0
        while at < len(data) and self.state is not LinkState.CLOSED:
            end = at + (data[at] << 8 | data[at + 1])
            if data[at + 2] == smq.Type.PUBLISH:
                self.deliver(data[at:end])
            else:
                self.control(data[at + 2 : end])
            at = end

    def deliver(self, run: bytes) -> bool | None:
        """Deliver a run where it belongs; true when the link is to wait."""
        if self.remote is None:
            self.stray()
            return False
        return (self.remote.routes.get(run[3:7]) or self.remote.resolve(run[3:7])).deliver(run)

    def stray(self) -> None:
        """A message for no hub has come: of one that has left the cluster, or of a stranger. Raises as `control`."""
        if self.state is not LinkState.UP:
            raise ProtocolError(CloseReason.BAD_CONNECT, "what connects here is no node of smqrt")

    # ---- the handshake

    def _hello(self, packet: bytes) -> None:
        peer = self.peer = wire.parse_hello(packet)
        own = wire.hello(self._own)
        self._hellos = own + packet if self.connects else packet + own
        if not self.connects:
            self._say(own)
        oldest, newest = self.node.versions
        if peer.newest < oldest or peer.oldest > newest:
            theirs, mine = f"{peer.oldest} to {peer.newest}", f"{oldest} to {newest}"
            self.refuse(Refusal.VERSION, f"that node speaks versions {theirs} of the link, this one {mine}; update one")
        elif (peer.id, peer.epoch) in self.node.predecessors:
            self.refuse(Refusal.SELF, "that is the process whose place this one takes")
        elif peer.id == self.node.id:
            self._refuse_self(peer)
        elif self.connects and self.node.is_linked(peer):  # before that node has a choice: its messages are under way
            self.refuse(Refusal.DUPLICATE, "there is a link already")
        else:
            self.state = LinkState.PROVING
            if self.connects:
                self._say(wire.proof(self.node.key, True, self._hellos))

    def _refuse_self(self, peer: Hello) -> None:
        if peer.epoch == self.node.epoch:
            self.refuse(Refusal.SELF, "that is this node itself")
        else:
            self.refuse(Refusal.NUMBER, f"two nodes have the fixed number {self.node.number}; give one another")

    def _proof(self, packet: bytes) -> None:
        if not wire.is_proof(packet, self.node.key, not self.connects, self._hellos):
            self.refuse(Refusal.PASSWORD, "the passwords of the two nodes differ")
            return
        self.node.strangers.discard(self)
        if not self.connects:
            self._say(wire.proof(self.node.key, False, self._hellos))
        self.state = LinkState.NUMBERING
        self.say_number()

    def say_number(self) -> None:
        """Tell this node's number, and the others that are taken."""
        self._say(wire.numbers(Packet.NODE, [self.node.number, *self.node.numbers(self)]))

    def _node(self, packet: bytes) -> None:
        number, *known = wire.parse_numbers(packet) or [0]
        if not number:
            raise ProtocolError(CloseReason.SHORT_PACKET, "a node that says no number")
        if self.state is LinkState.UP:
            if number != self.number:
                self.lose("the other node has another number now")
            return
        self.number = number
        self.node.compare_numbers(self, known)

    def _taken(self, packet: bytes) -> None:
        taken = wire.parse_numbers(packet)
        if self.node.number in taken:  # else it means the one of before
            self.node.number_taken(self, taken)

    def say_taken(self) -> None:
        """Tell the other node that its number is another node's."""
        self._say(wire.numbers(Packet.TAKEN, [self.number, self.node.number, *self.node.numbers(self)]))

    def complete_handshake(self) -> None:
        """The handshake is over."""
        self.state, self.via = LinkState.UP, self.transport.via
        for ability in self.node.abilities:
            self._say(wire.channel(Packet.OPEN, 0, ability))
        self.say_siblings()
        for carried in self.node.carried():
            self.open(carried)
        self.on_up(self)

    def say_siblings(self) -> None:
        """Tell the processes of this server, when the other side knows what that is."""
        if self._knows_siblings and self.state is LinkState.UP:
            self._say(wire.siblings(self.node.server.siblings(self.node.links.values())))

    def _siblings(self, packet: bytes) -> None:
        self.siblings, before = wire.parse_siblings(packet), self.siblings
        if self.siblings != before:
            self.node.heard_of_siblings(self)

    # ---- channels

    def open(self, carried: Carried) -> None:
        """Carry a hub or a channel, as soon as the other side has forgotten its channel of before."""
        if carried.wire_name in self._closing.values():
            return
        channel = Channel(self._free_number(), carried)
        self._channels[channel.number] = channel
        self._say(wire.channel(Packet.OPEN, channel.number, carried.wire_name))
        theirs = self._unopened.pop(carried.wire_name, None)
        if theirs is not None:
            self._join(channel, theirs)

    def _free_number(self) -> int:
        """The number of a channel that the other side does not know, or has forgotten."""
        number = self._last_channel % MAX_CHANNEL + 1
        while number in self._channels or number in self._closing:
            number = number % MAX_CHANNEL + 1
        self._last_channel = number
        return number

    def close_channel(self, carried: Carried, text: bytes) -> None:
        """Carry it no more. The other side counts what comes too late, so that it is told what has not."""
        self.acknowledge()
        for channel in [one for one in self._channels.values() if one.carried is carried]:
            self._say(wire.channel(Packet.CLOSE, channel.number, text))
            self._closing[channel.number] = carried.wire_name
            self._forget_channel(channel)

    def _opened(self, packet: bytes) -> None:
        number, name = wire.parse_channel(packet)
        if name.startswith(wire.ABILITY):
            self._know(name)
            return
        if len(name) > len(wire.APP) + MAX_NAME_BYTES or number in self._theirs:
            raise ProtocolError(CloseReason.UNKNOWN_PACKET, f"a node opens the channel {number} once, by a short name")
        for channel in self._channels.values():
            if channel.carried.wire_name == name and channel.theirs is None:
                self._join(channel, number)
                return
        if len(self._unopened) >= MAX_UNOPENED:
            raise ProtocolError(CloseReason.UNKNOWN_PACKET, f"a node opens at most {MAX_UNOPENED} channels")
        self._unopened[name] = number

    def _know(self, ability: bytes) -> None:
        if ability not in self.node.abilities:
            return
        self.knows_pressure = self.knows_pressure or ability == wire.PRESSURE
        self.knows_stamps = self.knows_stamps or ability == wire.STAMPS
        self.knows_succession = self.knows_succession or ability == wire.SUCCESSION
        if ability == wire.SIBLINGS and not self._knows_siblings:
            self._knows_siblings = True
            self.say_siblings()

    def _join(self, channel: Channel, theirs: int) -> None:
        channel.theirs = theirs
        self._theirs[theirs] = channel
        self._uncounted.add(theirs)
        self._sending = 0  # what was said of this channel before it was open there is forgotten there
        channel.remote = channel.carried.joined(self.number, ChannelWay(self, channel))

    def _closed(self, packet: bytes) -> None:
        number, text = wire.parse_channel(packet)
        if self._closes.fill(self.node.clock_s()) < 1:
            raise ProtocolError(CloseReason.UNKNOWN_PACKET, "a node closes its channels again and again")
        self._closes.tokens -= 1
        channel = self._theirs.get(number)
        self._count_lost_of(number)
        self._say(wire.channel(Packet.CLOSED, number))
        if channel is not None:
            self._leave(channel, text.decode("utf-8", "replace") or "that node left the cluster")
            del self._channels[channel.number]
            self.open(channel.carried)  # by another number: what is on its way over this one is of before
        else:
            self._unopened = {name: one for name, one in self._unopened.items() if one != number}

    def _forgotten(self, packet: bytes) -> None:
        name = self._closing.pop(wire.parse_channel(packet)[0], None)
        if name is not None:
            self._unopened.pop(name, None)  # of before
            if (carried := self.node.find(name)) is not None:
                self.open(carried)

    def _leave(self, channel: Channel, why: str, reason: Drop = Drop.LINK_LOST) -> None:
        remote, channel.remote = channel.remote, None
        if self.remote is remote:
            self.remote = None
        if channel.theirs is not None:
            self._theirs.pop(channel.theirs, None)
        if remote is not None:
            channel.carried.left_node(remote, why, reason)

    def _forget_channel(self, channel: Channel) -> None:
        self._leave(channel, "this node left the cluster")
        self._channels.pop(channel.number, None)

    def _channel(self, packet: bytes) -> None:
        channel = self._theirs.get(wire.parse_channel(packet)[0])
        self.remote = None if channel is None else channel.remote

    # ---- life

    def _ping(self, packet: bytes) -> None:
        self._say(wire.u64(Packet.PONG, wire.parse_u64(packet)))
        self.acknowledge()

    def _pong(self, packet: bytes) -> None:
        sent_us = wire.parse_u64(packet)
        self.round_trip_s = max(0.0, self.node.clock_s() - sent_us / 1e6)
        if self._pings and self._pings[0] == sent_us:
            self._pings.popleft()
            self.node.on_round_trip(self, self.round_trip_s)

    def acknowledge(self) -> None:
        """Say what was worked off."""
        worked_off = self.transport.worked_off_bytes
        if worked_off != self._said_bytes and self.state is LinkState.UP:
            self._said_bytes = worked_off
            self._say(wire.u64(Packet.ACK, worked_off))

    def heard(self, now_s: float) -> None:
        """Something has come."""
        self.heard_s = now_s
        if self.transport.worked_off_bytes - self._said_bytes >= ACK_BYTES:
            self.acknowledge()

    def _ack(self, packet: bytes) -> None:
        acked_bytes = wire.parse_u64(packet)
        if acked_bytes > self.sent_bytes:
            raise ProtocolError(CloseReason.UNKNOWN_PACKET, "a node has worked off more than there was")
        if acked_bytes > self._acked_bytes:
            self._acked_bytes, self._left_out_bytes = acked_bytes, 0
        while self._unacked and self._unacked[0][0] <= self._acked_bytes:
            self._unacked.popleft()
        if not self.is_behind:
            waiting, self._waiting = self._waiting, []
            for then in waiting:
                then()

    def look(self, now_s: float, ping_s: float, silence_s: float) -> None:
        """Ask whether the other side is there, or give it up."""
        if self.state is not LinkState.UP:
            if now_s - self.since_s >= min(silence_s, HANDSHAKE_S):
                self.lose("the handshake was not done in time")
        elif now_s - self.heard_s >= silence_s:
            self.lose(f"nothing has come for {silence_s:g} s")
        else:
            self._ask(now_s, ping_s, silence_s)

    def _ask(self, now_s: float, ping_s: float, silence_s: float) -> None:
        self._give_up_pings(int((now_s - silence_s + ping_s) * 1e6))
        if self.state is LinkState.UP and now_s - self.pinged_s >= ping_s:
            self.pinged_s, sent_us = now_s, int(now_s * 1e6)
            self._pings.append(sent_us)
            self._say(wire.u64(Packet.PING, sent_us))
            self.acknowledge()

    def _give_up_pings(self, until_us: int) -> None:
        """Nobody waits any more for the answers to pings that were sent until then."""
        while self._pings and self._pings[0] <= until_us:
            self._pings.popleft()
            self.node.on_round_trip(self, None)

    # ---- the end

    def refuse(self, code: Refusal, text: str) -> None:
        """Tell the other side why there is no link, and end it."""
        self._say(wire.refused(code, text))
        self._end(text, code, in_order=True)

    def _refused(self, packet: bytes) -> None:
        is_code = len(packet) > 1 and packet[1] in _REFUSALS and self.state is not LinkState.GREETING
        self._end(f"refused: {printable(packet[2 : 2 + WHY_BYTES])}", packet[1] if is_code else 0)

    def fail(self, error: ProtocolError) -> None:
        """End the link because the other side broke a rule."""
        self.lose(str(error))

    def lose(self, why: str, reason: Drop = Drop.LINK_LOST) -> None:
        """The link is broken, or given up."""
        self._end(why, reason=reason)

    def _end(self, why: str, code: int = 0, in_order: bool = False, reason: Drop = Drop.LINK_LOST) -> None:
        if self.state is LinkState.CLOSED:
            return
        self.state, self.why, self.code = LinkState.CLOSED, why, code
        unacked, self._unacked = self._unacked, deque()
        run_in_background(_count_lost(unacked, self._acked_bytes, reason))
        self._waiting.clear()
        for channel in list(self._channels.values()):
            self._leave(channel, why, reason)
        self._give_up_pings(self._pings[-1] if self._pings else 0)
        self.transport.close(in_order)
        self.node.ended(self, code)
        self.on_end(self, why)

    def _count_lost_of(self, theirs: int) -> None:
        """What was sent over the channel with this number there, and did not arrive any more."""
        if theirs in self._uncounted:
            self._uncounted.discard(theirs)
            unacked = [(end, channel, list(runs)) for end, channel, runs in self._unacked if channel.theirs == theirs]
            for _, channel, runs in self._unacked:
                if channel.theirs == theirs:
                    runs.clear()
            run_in_background(_count_lost(unacked, self._acked_bytes, Drop.LINK_LOST))


def _fitting(runs: list[bytes], room_bytes: int) -> tuple[list[bytes], list[bytes]]:
    """Those that fit, with all that are no messages, and those that don't."""
    kept: list[bytes] = []
    left_out: list[bytes] = []
    for run in runs:
        if run[2] != smq.Type.PUBLISH or len(run) <= room_bytes:
            kept.append(run)
            room_bytes -= len(run)
        else:
            left_out.append(run)
            room_bytes = 0  # who comes behind it in this turn does not overtake it
    return kept, left_out


Unacked = tuple[int, Channel, list[bytes]]
"""What has not arrived for sure: where it ends on the link, of which channel it is, and the runs."""


def _count_lost(unacked: Iterable[Unacked], acked_bytes: int, reason: Drop) -> Iterator[None]:
    """Count what has not arrived for sure; a batch of which a part has, from where that ends. In portions: there may be
    a million messages in it.
    """
    for end, channel, runs in unacked:
        at = end - sum(map(len, runs))
        for run in runs:
            at += len(run)
            if at > acked_bytes and (messages := count_messages(run)):
                channel.carried.count_lost(reason, messages)
            yield


_REFUSALS = frozenset(Refusal)
_UP = (LinkState.UP,)
PROVEN = (LinkState.NUMBERING, LinkState.UP)
HANDLERS: dict[int, tuple[tuple[LinkState, ...], Callable[[Link, bytes], None]]] = {
    Packet.HELLO: ((LinkState.GREETING,), Link._hello),
    Packet.PROOF: ((LinkState.PROVING,), Link._proof),
    Packet.REFUSED: (tuple(LinkState), Link._refused),
    Packet.NODE: (PROVEN, Link._node),
    Packet.TAKEN: (PROVEN, Link._taken),
    Packet.OPEN: (PROVEN, Link._opened),
    Packet.CLOSE: (_UP, Link._closed),
    Packet.CLOSED: (_UP, Link._forgotten),
    Packet.CHANNEL: (_UP, Link._channel),
    Packet.ACK: (_UP, Link._ack),
    Packet.PING: (PROVEN, Link._ping),
    Packet.PONG: (_UP, Link._pong),
    Packet.SIBLINGS: (_UP, Link._siblings),
}
