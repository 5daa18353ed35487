"""Channels of a link: one for each hub and each application channel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from smqrt.broker.outbox import Drop, Outbox, dirty
from smqrt.broker.topics import Route
from smqrt.cluster.remote_node import NodeSendQueue, may_drop
from smqrt.errors import CloseReason, ProtocolError
from smqrt.settings.limits import Bucket
from smqrt.wire import cluster_packets as wire
from smqrt.wire.cluster_packets import Hello, Packet, Siblings

MAX_CHANNEL = 0xFFFF
"""The largest channel number, a u16."""
MAX_UNOPENED = 4096
"""The maximum number of channels that the other side has opened and this one has not."""
MAX_NAME_BYTES = 1000
"""The maximum length of names of clusters and of application channels."""
CLOSES_PER_S, CLOSES_AT_ONCE = 10.0, 1000
"""Closed channels that a node may cause. Each is opened again, which sends a snapshot of the hub."""
HANDED_AT_ONCE_BYTES = 256 << 10
"""The bytes that a send queue passes to its link in one step."""
KEPT_QUEUES = 2
"""A full send queue keeps at most this many times `queue_bytes`: the server's own messages do not wait for room."""


class Receiver(Protocol):
    """The receiver of messages and packets of another node on one channel.

    Attributes:
        routes: the routes of its messages, by the four bytes of their destination.
        control: processes a packet that is not a Publish; raises ProtocolError.
    """

    @property
    def routes(self) -> Mapping[bytes, Route]: ...
    @property
    def control(self) -> Callable[[bytes], None]: ...

    def resolve(self, destination: bytes) -> Route:
        """Return the route to a destination that is not in `routes`."""
        ...

    def count_batch(self, destination: bytes, more: int) -> None:
        """Count `more` messages of a batch, which is delivered next."""
        ...


class Carried(Protocol):
    """A hub or an application channel, which has a channel on each link.

    Attributes:
        wire_name: the name by which both nodes match their channels.
        count_lost: called with the reason for lost messages, and their number.
    """

    @property
    def wire_name(self) -> bytes: ...
    @property
    def count_lost(self) -> Callable[[Drop, int], None]: ...

    def joined(self, number: int, send_queue: ChannelQueue, /) -> Receiver:
        """Add the node `number`, which has opened the channel too."""
        ...

    def left_node(self, remote: Any, why: str, reason: Drop, /) -> None:
        """Remove a node that has closed the channel or is unreachable; `remote` is the result of `joined`."""
        ...


class ChannelNode(Protocol):
    """The node of a link, with the attributes that channels use; see `smqrt.cluster.node.Node`."""

    @property
    def queue_bytes(self) -> int: ...
    @property
    def clock_s(self) -> Callable[[], float]: ...

    def find(self, wire_name: bytes, /) -> Carried | None:
        """Return the hub or application channel with this name."""
        ...


class Transport(Protocol):
    """The connection of a link.

    Attributes:
        outbox: the send queue for frames.
        processed_bytes: the number of received bytes that are processed.
        via: the other end as text: an address, `unix` or `nats`.
    """

    @property
    def outbox(self) -> Outbox: ...
    @property
    def via(self) -> str: ...
    @property
    def processed_bytes(self) -> int: ...

    def close(self, in_order: bool) -> None:
        """Close the connection; with `in_order`, send queued data first, as far as the socket takes it at once."""
        ...


class ChannelLink(Protocol):
    """A link, with the attributes that channels use; see `smqrt.cluster.link.Link`."""

    number: int
    unhandled_bytes: int
    remote: Receiver | None
    sending: int

    @property
    def node(self) -> ChannelNode: ...
    @property
    def transport(self) -> Transport: ...
    @property
    def peer(self) -> Hello | None: ...
    @property
    def siblings(self) -> Siblings | None: ...
    @property
    def place(self) -> tuple[str, int] | None: ...
    @property
    def has_left(self) -> bool: ...
    @property
    def knows_backpressure(self) -> bool: ...
    @property
    def knows_stamps(self) -> bool: ...
    @property
    def version(self) -> int: ...
    @property
    def knows_succession(self) -> bool: ...
    @property
    def is_behind(self) -> bool: ...
    @property
    def is_quiet(self) -> bool: ...
    @property
    def is_full(self) -> bool: ...

    def send(self, packet: bytes, /) -> None:
        """Send a packet of the link itself."""
        ...

    def transmit(self, channel: Channel, batches: list[bytes], /) -> bool:
        """Send batches of a channel; return false when messages were dropped because too much is queued."""
        ...

    def drop(self, channel: Channel, batches: list[bytes], /) -> None:
        """Count batches of a channel that are dropped because too much is queued."""
        ...

    def count_lost_of(self, theirs: int, /) -> None:
        """Count unacknowledged messages of the channel that has this number on the other side."""
        ...

    def acknowledge(self) -> None:
        """Acknowledge the processed bytes."""
        ...

    def wait(self, then: Callable[[], object], /) -> None:
        """Call `then` when the other side has caught up."""
        ...


class Channel:
    """The channel of one hub, or of one application channel, on a link.

    Attributes:
        number: the channel's number on this side.
        carried: the hub or application channel.
        remote: the receiver for the other node; None until that node has opened the channel.
        theirs: the channel's number on the other side.
    """

    def __init__(self, number: int, carried: Carried) -> None:
        self.number, self.carried = number, carried
        self.remote: Receiver | None = None
        self.theirs: int | None = None


class ChannelQueue(NodeSendQueue):
    """The send queue of one hub, or of one application channel, to another node.

    Attributes:
        link: the link to the node.
    """

    __slots__ = ("_channel", "_put_bytes", "link")

    def __init__(self, link: ChannelLink, channel: Channel) -> None:
        super().__init__()
        self.link, self._channel = link, channel
        self._put_bytes = 0

    def put(self, batch: bytes) -> None:
        """See `Outbox`. Large queues are passed on before the end of the turn, so that the limits of the link apply."""
        queue = self.queue
        if not queue:
            dirty.append(self)
        elif (
            (self.holds or self.keeps)
            and self._put_bytes > KEPT_QUEUES * self.link.node.queue_bytes
            and may_drop(batch)
        ):
            self.missed = True
            self.link.drop(self._channel, [batch])
            return
        queue.append(batch)
        self._put_bytes += len(batch)
        if self._put_bytes > HANDED_AT_ONCE_BYTES and not (self.holds or self.keeps):
            self.flush()

    def flush(self) -> None:
        """Pass the queue to the link, unless batches are held or kept here."""
        if self.holds or self.keeps:
            return
        self._put_bytes = 0
        if not self.queue:  # the queue of a lost node, which must not be replaced
            return
        batches, self.queue = self.queue, []
        if not self.link.transmit(self._channel, batches):
            self.missed = True
        if self.link.is_full:
            self.on_full()

    def release(self) -> None:
        """See `NodeSendQueue`. The queue is passed on in parts, until the link is full again."""
        self.holds = False
        if self.keeps:
            return
        waiting, portion, size, at = self.queue, 0, 0, 0
        if not waiting:
            return
        self.queue = []
        while at < len(waiting) and not self.holds:
            portion, size = at, 0
            while at < len(waiting) and size < HANDED_AT_ONCE_BYTES:
                size += len(waiting[at])
                at += 1
            self._put_bytes -= size
            if not self.link.transmit(self._channel, waiting[portion:at]):
                self.missed = True
            if self.link.is_full:
                self.on_full()  # sets `holds` again
        for batch in waiting[at:]:
            self.queue.append(batch)  # if the link has ended meanwhile, the discarding queue counts it

    @property
    def knows_backpressure(self) -> bool:
        """See `NodeSendQueue`."""
        return self.link.knows_backpressure

    @property
    def knows_succession(self) -> bool:
        """See `NodeSendQueue`."""
        return self.link.knows_succession

    @property
    def knows_stamps(self) -> bool:
        """See `NodeSendQueue`."""
        return self.link.knows_stamps

    @property
    def version(self) -> int:
        """See `NodeSendQueue`."""
        return self.link.version

    @property
    def node_id(self) -> bytes:
        """See `NodeSendQueue`."""
        return self.link.peer.id if self.link.peer is not None else b""

    @property
    def epoch(self) -> int:
        """See `NodeSendQueue`."""
        return self.link.peer.epoch if self.link.peer is not None else 0

    @property
    def process(self) -> tuple[bytes, int] | None:
        """See `NodeSendQueue`."""
        siblings = self.link.siblings
        return None if siblings is None else (siblings.server, siblings.own)

    @property
    def place(self) -> tuple[str, int] | None:
        """See `NodeSendQueue`."""
        return self.link.place

    @property
    def has_left(self) -> bool:
        """See `NodeSendQueue`; true also if only the hub of the node has ended."""
        return self.link.has_left

    @property
    def carrier(self) -> Outbox:
        """See `Outbox`."""
        return self.link.transport.outbox

    def resume(self) -> None:
        """See `Outbox`."""
        self.link.transport.outbox.resume()

    @property
    def is_behind(self) -> bool:
        """See `NodeSendQueue`."""
        return self.link.is_behind

    @property
    def is_quiet(self) -> bool:
        """See `NodeSendQueue`."""
        return self.link.is_quiet

    def wait(self, then: Callable[[], object]) -> None:
        """See `NodeSendQueue`."""
        self.link.wait(then)


class LinkChannels:
    """The channels of one link.

    Each side numbers its channels and announces them by Open. Two channels with the same name are joined. Close ends a
    channel of the sender. Its number is free again after the answer, Closed.

    Args:
        link: the link.
        on_ability: called with the name of a channel that only announces an ability of the other side.
    """

    def __init__(self, link: ChannelLink, on_ability: Callable[[bytes], object]) -> None:
        self._link, self._on_ability = link, on_ability
        self._own: dict[int, Channel] = {}
        self._theirs: dict[int, Channel] = {}
        self._unopened: dict[bytes, int] = {}
        """The numbers of channels that only the other side has opened, by name."""
        self._closing: dict[int, bytes] = {}
        """The names of channels whose Close is not answered, by number."""
        self._uncounted: set[int] = set()
        """Numbers, on the other side, of joined channels that the other side has not closed."""
        self._last = 0
        self._closes = Bucket(CLOSES_PER_S, CLOSES_AT_ONCE, link.node.clock_s())

    def __len__(self) -> int:
        return len(self._own)

    @property
    def joined(self) -> int:
        """The number of channels that both sides have opened."""
        return len(self._theirs)

    @property
    def is_settled(self) -> bool:
        """Whether both sides have the same channels, and each Close is answered."""
        return not self._closing and not self._unopened

    def open(self, carried: Carried) -> None:
        """Open a channel; if a Close for its name is not answered yet, `on_closed` opens it later."""
        if carried.wire_name in self._closing.values():
            return
        number = self._last % MAX_CHANNEL + 1
        # Before Closed arrives, packets of the former channel may still be in transit.
        while number in self._own or number in self._closing:
            number = number % MAX_CHANNEL + 1
        self._last = number
        channel = self._own[number] = Channel(number, carried)
        self._link.send(wire.channel(Packet.OPEN, number, carried.wire_name))
        theirs = self._unopened.pop(carried.wire_name, None)
        if theirs is not None:
            self._join(channel, theirs)

    def _join(self, channel: Channel, theirs: int) -> None:
        channel.theirs = theirs
        self._theirs[theirs] = channel
        self._uncounted.add(theirs)
        self._link.sending = 0  # select again: the other side ignored a Channel packet that preceded Open
        channel.remote = channel.carried.joined(self._link.number, ChannelQueue(self._link, channel))

    def close(self, carried: Carried, text: bytes) -> None:
        """Close the channel of a hub or an application channel.

        The other side counts unacknowledged messages as lost, so acknowledge first.
        """
        self._link.acknowledge()
        for channel in [one for one in self._own.values() if one.carried is carried]:
            self._link.send(wire.channel(Packet.CLOSE, channel.number, text))
            self._closing[channel.number] = carried.wire_name
            self._leave(channel, "this node left the cluster", Drop.LINK_LOST)
            self._own.pop(channel.number, None)

    def _leave(self, channel: Channel, why: str, reason: Drop) -> None:
        remote, channel.remote = channel.remote, None
        if self._link.remote is remote:
            self._link.remote = None
        if channel.theirs is not None:
            self._theirs.pop(channel.theirs, None)
        if remote is not None:
            channel.carried.left_node(remote, why, reason)

    def lose_all(self, why: str, reason: Drop) -> None:
        """Remove the other node from all channels, since the link has ended."""
        for channel in list(self._own.values()):
            self._leave(channel, why, reason)

    # ---- packets of the other side; each method may raise ProtocolError

    def on_open(self, packet: bytes) -> None:
        """Process Open."""
        number, name = wire.parse_channel(packet)
        if name.startswith(wire.ABILITY):
            self._on_ability(name)
            return
        if len(name) > len(wire.APP) + MAX_NAME_BYTES or number in self._theirs:
            text = f"channel {number}: it is open already, or its name has more than {MAX_NAME_BYTES} bytes"
            raise ProtocolError(CloseReason.UNKNOWN_PACKET, text)
        for channel in self._own.values():
            if channel.carried.wire_name == name and channel.theirs is None:
                self._join(channel, number)
                return
        if len(self._unopened) >= MAX_UNOPENED:
            text = f"limit reached: {MAX_UNOPENED} channels that this node does not have"
            raise ProtocolError(CloseReason.UNKNOWN_PACKET, text)
        self._unopened[name] = number

    def on_close(self, packet: bytes) -> None:
        """Process Close: remove the node from the channel, and open it again under another number."""
        number, text = wire.parse_channel(packet)
        if self._closes.fill(self._link.node.clock_s()) < 1:
            raise ProtocolError(CloseReason.UNKNOWN_PACKET, "a node closes channels too often")
        self._closes.tokens -= 1
        channel = self._theirs.get(number)
        # The other side acknowledges before Close: all other messages have not reached the hub there.
        if number in self._uncounted:
            self._uncounted.discard(number)
            self._link.count_lost_of(number)
        self._link.send(wire.channel(Packet.CLOSED, number))
        if channel is not None:
            self._leave(channel, text.decode("utf-8", "replace") or "that node left the cluster", Drop.LINK_LOST)
            del self._own[channel.number]
            self.open(channel.carried)  # a new number: packets in transit with the old one belong to the old channel
        else:
            self._unopened = {name: one for name, one in self._unopened.items() if one != number}

    def on_closed(self, packet: bytes) -> None:
        """Process Closed: the name may be opened again."""
        name = self._closing.pop(wire.parse_channel(packet)[0], None)
        if name is not None:
            self._unopened.pop(name, None)  # the other side had opened it before it received Close
            if (carried := self._link.node.find(name)) is not None:
                self.open(carried)

    def on_channel(self, packet: bytes) -> None:
        """Process Channel: the following messages and packets belong to it."""
        channel = self._theirs.get(wire.parse_channel(packet)[0])
        self._link.remote = None if channel is None else channel.remote
