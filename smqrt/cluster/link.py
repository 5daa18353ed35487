"""Link between two nodes: a state machine that processes packets and answers through its transport.

    GREETING ──Hello──▶ PROVING ──Proof──▶ NUMBERING ──numbers differ──▶ UP
        └──────────────────┴── refused, broken, timed out ──┴──────────▶ CLOSED

It carries a channel for each hub that both nodes have in the same cluster, and for each application channel that both
have opened. Sent batches are kept until they are acknowledged. When the link ends, unacknowledged messages count as
lost.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Protocol

from smqrt.broker.outbox import Drop, run_in_background
from smqrt.cluster.link_channels import Carried, Channel, LinkChannels, Receiver, Transport
from smqrt.cluster.remote_node import count_messages, may_drop
from smqrt.errors import CloseReason, ProtocolError
from smqrt.printable import printable
from smqrt.settings.limits import Limit
from smqrt.wire import cluster_packets as wire
from smqrt.wire import smq
from smqrt.wire.cluster_packets import Hello, Packet, Refusal, Siblings

MAX_UNAUTHENTICATED = 100
UNAUTHENTICATED = Limit(
    "cluster_strangers",
    "",
    f"{MAX_UNAUTHENTICATED} connections that have not proved the password; the oldest is closed",
)
DROPPED_QUEUES = 2
"""The link ends when this many times `queue_bytes` were dropped since the last acknowledgement."""
ACK_BYTES = 256 << 10
"""A node acknowledges after this many processed bytes, and with each ping and answer."""
WHY_BYTES = 200
"""The maximum length of the reason for a refusal by the other side, in the log."""
QUIET_S = 0.3
"""A node that does not answer a ping for so long may be lost."""
HANDSHAKE_S = 5.0
"""The maximum time of a handshake, also when data arrives all the time."""


class LinkState(Enum):
    """The states of a link."""

    GREETING = "waiting for Hello"
    PROVING = "waiting for Proof"
    NUMBERING = "node numbers are equal"
    UP = "up"
    CLOSED = "closed"


class OwnSiblings(Protocol):
    """The server that a node is a process of; see `smqrt.cluster.node.OwnServer`."""

    def siblings(self, links: Iterable[Link], /) -> Siblings:
        """Return the processes of this server, for other nodes; `links` are those that are up."""
        ...


class LinkNode(Protocol):
    """The node of a link, with the attributes that the link uses; see `smqrt.cluster.node.Node`."""

    key: bytes
    id: bytes
    epoch: int
    number: int
    versions: tuple[int, int]
    abilities: tuple[bytes, ...]
    predecessors: frozenset[tuple[bytes, int]]
    queue_bytes: int
    unacked_bytes: int
    random: Callable[[int], bytes]
    clock_s: Callable[[], float]
    on_round_trip: Callable[[Link, float | None], object]

    @property
    def links(self) -> Mapping[bytes, Link]: ...
    @property
    def unauthenticated(self) -> UnauthenticatedLinks: ...
    @property
    def server(self) -> OwnSiblings: ...

    def carried(self) -> list[Carried]:
        """Return the hubs and application channels."""
        ...

    def find(self, wire_name: bytes, /) -> Carried | None:
        """Return the hub or application channel with this name."""
        ...

    def is_linked(self, peer: Hello, /) -> bool:
        """Return whether there is a link to that process."""
        ...

    def numbers(self, but: Link, /) -> Iterable[int]:
        """Return the numbers of the other linked nodes."""
        ...

    def compare_numbers(self, link: Link, known: Iterable[int], /) -> None:
        """Complete the handshake if the number of the other side is free."""
        ...

    def number_taken(self, link: Link, taken: Iterable[int], /) -> None:
        """Draw a new number, since another node has this one's."""
        ...

    def siblings_changed(self, link: Link, /) -> None:
        """Process the list of processes that another node has sent."""
        ...

    def ended(self, link: Link, code: int, /) -> None:
        """Remove a link that has ended."""
        ...


class UnauthenticatedLinks:
    """The accepted links whose other side has not proved the password, the oldest first.

    Above `MAX_UNAUTHENTICATED`, the oldest link of the address with the most links is closed. When several addresses
    have as many, it is the oldest of these. A node proves the password within milliseconds, so idle connections do not
    block it. Many connections from one address close only each other.
    """

    def __init__(self) -> None:
        self._addresses: dict[Link, str] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, link: Link, address: str) -> None:
        """Add a link; above the limit, another one is closed."""
        if len(self._addresses) >= MAX_UNAUTHENTICATED:
            counts = Counter(self._addresses.values())
            most = max(counts.values())
            oldest = next(link for link, address in self._addresses.items() if counts[address] == most)
            UNAUTHENTICATED.refused(f"a link from {self._addresses[oldest]}")
            oldest.lose("closed for newer connections that have not proved the password either")
        self._addresses[link] = address

    def discard(self, link: Link) -> None:
        """Remove a link that is authenticated or closed."""
        self._addresses.pop(link, None)


class Link:
    """One side of a link.

    Args:
        node: the node of this side.
        transport: the connection to the other side.
        connects: whether this side has connected.
        now_s: monotonic seconds.

    Attributes:
        peer: the Hello of the other side; None before it has arrived.
        number: the number of the other node.
        remote: the receiver of the channel that the other side has selected.
        channels, handshake, pings: parts of the link.
        since_s, heard_s: when the link was made, and when data arrived last.
        round_trip_s: the round-trip time of the newest answered ping; None before the first.
        on_up, on_end: called when the handshake is complete, and with the reason when the link ends.
        via: the address of the other side, from the transport, when the link came up.
        why, code: why the link ended; the code is a `Refusal`, 0 for none.
        sent_bytes: bytes sent, queued ones included.
        unacked: batches that are not acknowledged.
        sending: the number of the channel that was selected last for the other side; 0 for none.
        knows_backpressure: whether the other side supports the packets from `LinkType.PRESSED` on.
        knows_stamps: whether it supports `LinkType.VALUE_AT` and `LinkType.CLOCK`.
        knows_succession: whether it supports the packets from `LinkType.PAUSE` on.
        version: the version of the protocol that both sides use; 0 before Hello has arrived.
        siblings: the processes of the server of the other side; None before they have arrived, and for older releases.
        unhandled_bytes: bytes of messages on application channels that the other node has not handled.
    """

    def __init__(self, node: LinkNode, transport: Transport, connects: bool, now_s: float) -> None:
        self.node, self.transport, self.connects = node, transport, connects
        self.state = LinkState.GREETING
        self.peer: Hello | None = None
        self.number = 0
        self.remote: Receiver | None = None
        self.round_trip_s: float | None = None
        self.since_s = self.heard_s = now_s
        self.why, self.code, self.via = "", 0, ""
        self.on_up: Callable[[Link], object] = lambda link: None
        self.on_end: Callable[[Link, str], object] = lambda link, why: None
        self.sending = self.version = 0
        self.sent_bytes = self.unhandled_bytes = 0
        self._acked_bytes = self._reported_bytes = self._dropped_bytes = 0
        self.unacked: deque[Unacked] = deque()
        self.knows_backpressure = self.knows_stamps = self.knows_succession = False
        self.siblings: Siblings | None = None
        self._waiting: list[Callable[[], object]] = []
        handshake = self.handshake = Handshake(self)
        channels = self.channels = LinkChannels(self, handshake.on_ability)
        pings = self.pings = LinkPings(self, now_s)
        up, proven = (LinkState.UP,), PROVEN
        self._handlers: dict[int, tuple[tuple[LinkState, ...], Callable[[bytes], None]]] = {
            Packet.HELLO: ((LinkState.GREETING,), handshake.on_hello),
            Packet.PROOF: ((LinkState.PROVING,), handshake.on_proof),
            Packet.REFUSED: (tuple(LinkState), handshake.on_refused),
            Packet.NODE: (proven, handshake.on_node),
            Packet.TAKEN: (proven, handshake.on_taken),
            Packet.OPEN: (proven, channels.on_open),
            Packet.CLOSE: (up, channels.on_close),
            Packet.CLOSED: (up, channels.on_closed),
            Packet.CHANNEL: (up, channels.on_channel),
            Packet.ACK: (up, self._on_ack),
            Packet.PING: (proven, pings.on_ping),
            Packet.PONG: (up, pings.on_pong),
            Packet.SIBLINGS: (up, handshake.on_siblings),
        }
        if connects:
            handshake.send_hello()

    # ---- sending

    def send(self, packet: bytes) -> None:
        """Send a packet of the link itself."""
        frame = smq.frame(packet)
        self.sent_bytes += len(frame)
        self.transport.outbox.put(frame)

    def transmit(self, channel: Channel, batches: list[bytes]) -> bool:
        """Send batches of a channel and keep them until they are acknowledged.

        The last quarter of the queue is for control packets, and for application channels, which have separate limits.

        Returns:
            False when messages were dropped because too much is queued.
        """
        if self.state is not LinkState.UP:  # it ended while the caller still had batches to send
            if messages := sum(map(count_messages, batches)):
                channel.carried.count_lost(Drop.LINK_LOST, messages)
            return True
        is_complete = True
        # Hub messages may not use the last quarter of the queue.
        room_bytes = self.node.unacked_bytes - self.node.queue_bytes // 4 - self.unacked_bytes
        if sum(map(len, batches)) > room_bytes and not channel.carried.wire_name.startswith(wire.APP):
            batches, dropped = _fitting(batches, room_bytes)
            is_complete = not dropped
            self._count_dropped(channel, dropped)
        if channel.number != self.sending:
            self.sending = channel.number
            self.send(wire.channel(Packet.CHANNEL, channel.number))
        self.sent_bytes += sum(map(len, batches))
        self.unacked.append((self.sent_bytes, channel, batches))
        if self._ends_if_too_slow():
            return is_complete
        outbox = self.transport.outbox
        for batch in batches:
            outbox.put(batch)  # one by one, since `put` checks the limit of the connection
        return is_complete

    def drop(self, channel: Channel, batches: list[bytes]) -> None:
        """Count batches of a channel that are dropped because too much is queued."""
        self._count_dropped(channel, batches)
        self._ends_if_too_slow()

    def _count_dropped(self, channel: Channel, batches: list[bytes]) -> None:
        self._dropped_bytes += sum(map(len, batches))
        if messages := sum(map(count_messages, batches)):
            channel.carried.count_lost(Drop.LINK_SLOW, messages)

    def _ends_if_too_slow(self) -> bool:
        """End the link if its queue is over a limit; return whether the link has ended."""
        is_over = self.unacked_bytes > self.node.unacked_bytes
        if is_over or self._dropped_bytes > DROPPED_QUEUES * self.node.queue_bytes:
            self.lose(f"the other node is too slow: {self.unacked_bytes >> 20} MiB are queued for it", Drop.LINK_SLOW)
        return self.state is LinkState.CLOSED

    @property
    def unacked_bytes(self) -> int:
        """Bytes that were sent or are queued, and are not acknowledged."""
        return self.sent_bytes - self._acked_bytes

    @property
    def _queued_bytes(self) -> int:
        outbox = self.transport.outbox
        return outbox.queued_bytes + (0 if outbox.carrier is None else outbox.carrier.queued_bytes)

    @property
    def is_behind(self) -> bool:
        """Whether the other side is so far behind that snapshots should pause; see `wait`."""
        return self.unacked_bytes > self.node.unacked_bytes // 4 or self._queued_bytes > self.node.queue_bytes // 4

    @property
    def is_quiet(self) -> bool:
        """Whether a ping is not answered for some time."""
        sent_us = self.pings.sent_us
        return bool(sent_us) and self.node.clock_s() - sent_us[0] / 1e6 > QUIET_S

    @property
    def is_full(self) -> bool:
        """Whether the other side is so far behind that publishers should wait."""
        return self.unacked_bytes > self.node.unacked_bytes // 2 or self._queued_bytes > self.node.queue_bytes // 2

    def wait(self, then: Callable[[], object]) -> None:
        """Call `then` when the other side has caught up; it is not called if the link ends first."""
        self._waiting.append(then)

    # ---- receiving

    def control(self, packet: bytes) -> None:
        """Process a packet that is not a Publish.

        Raises:
            ProtocolError: the other side violated the protocol; the caller ends the link.
        """
        handler = self._handlers.get(packet[0]) if packet else None
        if handler is not None:
            states, handle = handler
            if self.state not in states:
                raise ProtocolError(CloseReason.UNKNOWN_PACKET, f"type {packet[0]:#x} while {self.state.value}")
            handle(packet)
        elif self.remote is not None and self.state is LinkState.UP:
            self.remote.control(packet)
        elif self.state is not LinkState.UP:
            raise ProtocolError(CloseReason.BAD_CONNECT, "the connection is not from a node of smqrt")

    def receive(self, data: bytes) -> None:
        """Process whole frames, for engines that do not use the kernels of the data path. Raises as `control`."""
        at = 0
        while at < len(data) and self.state is not LinkState.CLOSED:
            end = at + (data[at] << 8 | data[at + 1])
            if data[at + 2] == smq.Type.PUBLISH:
                self.deliver(data[at:end])
            else:
                self.control(data[at + 2 : end])
            at = end

    def deliver(self, batch: bytes) -> bool | None:
        """Deliver a batch of messages; return true when the link has to wait."""
        if self.remote is None:
            self.drop_unaddressed()
            return False
        return (self.remote.routes.get(batch[smq.TID]) or self.remote.resolve(batch[smq.TID])).deliver(batch)

    def drop_unaddressed(self) -> None:
        """Drop a message for a hub that has left the cluster. Raises ProtocolError before the handshake is complete."""
        if self.state is not LinkState.UP:
            raise ProtocolError(CloseReason.BAD_CONNECT, "the connection is not from a node of smqrt")

    def heard(self, now_s: float) -> None:
        """Record that data has arrived, and acknowledge after each `ACK_BYTES`."""
        self.heard_s = now_s
        if self.transport.processed_bytes - self._reported_bytes >= ACK_BYTES:
            self.acknowledge()

    def acknowledge(self) -> None:
        """Acknowledge the processed bytes."""
        processed_bytes = self.transport.processed_bytes
        if processed_bytes != self._reported_bytes and self.state is LinkState.UP:
            self._reported_bytes = processed_bytes
            self.send(wire.u64(Packet.ACK, processed_bytes))

    def _on_ack(self, packet: bytes) -> None:
        acked_bytes = wire.parse_u64(packet)
        if acked_bytes > self.sent_bytes:
            raise ProtocolError(CloseReason.UNKNOWN_PACKET, "a node acknowledges more than it was sent")
        if acked_bytes > self._acked_bytes:
            self._acked_bytes, self._dropped_bytes = acked_bytes, 0
        while self.unacked and self.unacked[0][0] <= self._acked_bytes:
            self.unacked.popleft()
        if not self.is_behind:
            waiting, self._waiting = self._waiting, []
            for then in waiting:
                then()

    # ---- state

    @property
    def is_proven(self) -> bool:
        """Whether the other side has proved the password."""
        return self.state in PROVEN

    @property
    def session_key(self) -> bytes:
        """A key that only the two sides have, for transports on which other clients can send."""
        return wire.session_key(self.node.key, self.handshake.hellos)

    @property
    def is_refused(self) -> bool:
        """Whether it ended because the two nodes cannot be linked."""
        return self.code in (Refusal.VERSION, Refusal.PASSWORD, Refusal.SELF, Refusal.NUMBER)

    @property
    def place(self) -> tuple[str, int] | None:
        """Host and port at which the other node accepts links; None when they are unknown."""
        port = self.siblings.places[self.siblings.own][1] if self.siblings is not None else 0
        host, colon, _ = self.via.rpartition(":")
        return (host, port) if colon and port else None

    @property
    def has_left(self) -> bool:
        """Whether the node is not lost: it shuts down, or the link is up and only a channel has ended."""
        return self.state is not LinkState.CLOSED or self.code == Refusal.CLOSING

    def complete_handshake(self) -> None:
        """Set the state to UP, and announce abilities, siblings and channels to the other side."""
        self.state, self.via = LinkState.UP, self.transport.via
        for ability in self.node.abilities:
            self.send(wire.channel(Packet.OPEN, 0, ability))
        self.handshake.send_siblings()
        for carried in self.node.carried():
            self.channels.open(carried)
        self.on_up(self)

    # ---- the end

    def refuse(self, code: Refusal, text: str) -> None:
        """Send the other side the reason for a refusal, and end the link."""
        self.send(wire.refused(code, text))
        self.lose(text, code=code, in_order=True)

    def lose(self, why: str, reason: Drop = Drop.LINK_LOST, code: int = 0, in_order: bool = False) -> None:
        """End the link. A second call does nothing.

        Args:
            why: the reason, for the log.
            reason: the counter for unacknowledged messages.
            code: a `Refusal`; 0 for none.
            in_order: send queued data first.
        """
        if self.state is LinkState.CLOSED:
            return
        # First, since the calls below may call `lose` and `send` again.
        self.state, self.why, self.code = LinkState.CLOSED, why, code
        unacked, self.unacked = self.unacked, deque()
        # In the background: counting a full queue takes longer than one turn may.
        run_in_background(_count_lost(unacked, self._acked_bytes, reason))
        self._waiting.clear()
        self.channels.lose_all(why, reason)
        self.pings.give_up_all()
        self.transport.close(in_order)
        self.node.ended(self, code)
        self.on_end(self, why)

    def count_lost_of(self, theirs: int) -> None:
        """Count unacknowledged messages of the channel that has this number on the other side."""
        unacked = [(end, channel, list(batches)) for end, channel, batches in self.unacked if channel.theirs == theirs]
        for _, channel, batches in self.unacked:
            if channel.theirs == theirs:
                batches.clear()
        run_in_background(_count_lost(unacked, self._acked_bytes, Drop.LINK_LOST))


class Handshake:
    """The handshake of a link, and later announcements of both nodes.

    Attributes:
        hellos: the Hello packets of both sides; the first is that of the side which has connected.
    """

    def __init__(self, link: Link) -> None:
        self._link, node = link, link.node
        oldest, newest = node.versions
        self._own = wire.hello(Hello(oldest, newest, node.id, node.epoch, node.random(wire.NONCE_BYTES)))
        self.hellos = b""
        self._knows_siblings = False

    def send_hello(self) -> None:
        """Send Hello."""
        self._link.send(self._own)

    def on_hello(self, packet: bytes) -> None:
        """Process Hello: check that the nodes can have a link."""
        link, node = self._link, self._link.node
        peer = link.peer = wire.parse_hello(packet)
        self.hellos = self._own + packet if link.connects else packet + self._own
        if not link.connects:
            self.send_hello()
        oldest, newest = node.versions
        link.version = min(newest, peer.newest)
        if peer.newest < oldest or peer.oldest > newest:
            theirs, mine = f"{peer.oldest} to {peer.newest}", f"{oldest} to {newest}"
            link.refuse(Refusal.VERSION, f"that node supports link versions {theirs}, this one {mine}; update one")
        elif (peer.id, peer.epoch) in node.predecessors:
            link.refuse(Refusal.SELF, "that is the process that this one replaces")
        elif peer.id == node.id and peer.epoch == node.epoch:
            link.refuse(Refusal.SELF, "that is this node itself")
        elif peer.id == node.id:
            link.refuse(
                Refusal.NUMBER, f"two nodes have the fixed number {node.number}; give one of them another number"
            )
        elif link.connects and node.is_linked(peer):  # before the other node replaces the link in use
            link.refuse(Refusal.DUPLICATE, "there is a link already")
        else:
            link.state = LinkState.PROVING
            if link.connects:
                link.send(wire.proof(node.key, True, self.hellos))

    def on_proof(self, packet: bytes) -> None:
        """Process Proof: check that the other side has the password, and send this node's number."""
        link, node = self._link, self._link.node
        if not wire.is_proof(packet, node.key, not link.connects, self.hellos):
            link.refuse(Refusal.PASSWORD, "the passwords of the two nodes differ")
            return
        node.unauthenticated.discard(link)
        if not link.connects:
            link.send(wire.proof(node.key, False, self.hellos))
        link.state = LinkState.NUMBERING
        self.send_number()

    def send_number(self) -> None:
        """Send this node's number and those of the nodes that it has links to."""
        node = self._link.node
        self._link.send(wire.numbers(Packet.NODE, [node.number, *node.numbers(self._link)]))

    def on_node(self, packet: bytes) -> None:
        """Process Node: compare the node numbers."""
        link = self._link
        number, *known = wire.parse_numbers(packet) or [0]
        if not number:
            raise ProtocolError(CloseReason.SHORT_PACKET, "node number missing")
        if link.state is LinkState.UP:
            if number != link.number:
                link.lose("the other node has another number now")
            return
        link.number = number
        link.node.compare_numbers(link, known)

    def send_taken(self) -> None:
        """Send the other node that its number is taken."""
        link, node = self._link, self._link.node
        link.send(wire.numbers(Packet.TAKEN, [link.number, node.number, *node.numbers(link)]))

    def on_taken(self, packet: bytes) -> None:
        """Process Taken: draw another number."""
        taken = wire.parse_numbers(packet)
        if self._link.node.number in taken:  # otherwise it refers to a former number of this node
            self._link.node.number_taken(self._link, taken)

    def on_refused(self, packet: bytes) -> None:
        """Process Refused: end the link."""
        link = self._link
        is_code = len(packet) > 1 and packet[1] in _REFUSALS and link.state is not LinkState.GREETING
        link.lose(f"refused: {printable(packet[2 : 2 + WHY_BYTES])}", code=packet[1] if is_code else 0)

    def on_ability(self, ability: bytes) -> None:
        """Record an ability of the other side that this node has too."""
        link = self._link
        if ability not in link.node.abilities:
            return
        link.knows_backpressure = link.knows_backpressure or ability == wire.PRESSURE
        link.knows_stamps = link.knows_stamps or ability == wire.STAMPS
        link.knows_succession = link.knows_succession or ability == wire.SUCCESSION
        if ability == wire.SIBLINGS and not self._knows_siblings:
            self._knows_siblings = True
            self.send_siblings()

    def send_siblings(self) -> None:
        """Send the processes of this server, if the other side supports Siblings."""
        link, node = self._link, self._link.node
        if self._knows_siblings and link.state is LinkState.UP:
            link.send(wire.siblings(node.server.siblings(node.links.values())))

    def on_siblings(self, packet: bytes) -> None:
        """Process Siblings: record the processes of the other server."""
        link = self._link
        link.siblings, before = wire.parse_siblings(packet), link.siblings
        if link.siblings != before:
            link.node.siblings_changed(link)


class LinkPings:
    """The pings of a link.

    Attributes:
        sent_us: when the unanswered pings were sent, in µs, the oldest first.
    """

    def __init__(self, link: Link, now_s: float) -> None:
        self._link = link
        self._pinged_s = now_s
        self.sent_us: deque[int] = deque()

    def check(self, now_s: float, ping_s: float, silence_s: float) -> None:
        """Send a ping if one is due, or end a link on which nothing has arrived for too long."""
        link = self._link
        if link.state is not LinkState.UP:
            if now_s - link.since_s >= min(silence_s, HANDSHAKE_S):
                link.lose(f"the handshake took longer than {min(silence_s, HANDSHAKE_S):g} s")
            return
        if now_s - link.heard_s >= silence_s:
            link.lose(f"no data for {silence_s:g} s")
            return
        self._give_up(int((now_s - silence_s + ping_s) * 1e6))
        if link.state is LinkState.UP and now_s - self._pinged_s >= ping_s:
            self._pinged_s, sent_us = now_s, int(now_s * 1e6)
            self.sent_us.append(sent_us)
            link.send(wire.u64(Packet.PING, sent_us))
            link.acknowledge()

    def on_ping(self, packet: bytes) -> None:
        """Answer a ping."""
        self._link.send(wire.u64(Packet.PONG, wire.parse_u64(packet)))
        self._link.acknowledge()

    def on_pong(self, packet: bytes) -> None:
        """Process the answer to a ping."""
        link, sent_us = self._link, wire.parse_u64(packet)
        link.round_trip_s = max(0.0, link.node.clock_s() - sent_us / 1e6)
        if self.sent_us and self.sent_us[0] == sent_us:
            self.sent_us.popleft()
            link.node.on_round_trip(link, link.round_trip_s)

    def _give_up(self, until_us: int) -> None:
        """Report pings that were sent until `until_us` as not answered."""
        while self.sent_us and self.sent_us[0] <= until_us:
            self.sent_us.popleft()
            self._link.node.on_round_trip(self._link, None)

    def give_up_all(self) -> None:
        """Report all pings as not answered."""
        if self.sent_us:
            self._give_up(self.sent_us[-1])


def _fitting(batches: list[bytes], room_bytes: int) -> tuple[list[bytes], list[bytes]]:
    """Split batches into those that fit, with all control packets, and messages that do not."""
    kept: list[bytes] = []
    dropped: list[bytes] = []
    for batch in batches:
        if not may_drop(batch) or len(batch) <= room_bytes:
            kept.append(batch)
            room_bytes -= len(batch)
        else:
            dropped.append(batch)
            room_bytes = 0  # so that no later, smaller message of this turn is sent in its place
    return kept, dropped


Unacked = tuple[int, Channel, list[bytes]]
"""Unacknowledged batches: the position of their end among all sent bytes, their channel, and the batches."""


def _count_lost(unacked: Iterable[Unacked], acked_bytes: int, reason: Drop) -> Iterator[None]:
    """Count unacknowledged messages, batch by batch, since there may be many; partly acknowledged batches count."""
    for end, channel, batches in unacked:
        at = end - sum(map(len, batches))
        for batch in batches:
            at += len(batch)
            if at > acked_bytes and (messages := count_messages(batch)):
                channel.carried.count_lost(reason, messages)
            yield


_REFUSALS = frozenset(Refusal)
PROVEN = (LinkState.NUMBERING, LinkState.UP)
