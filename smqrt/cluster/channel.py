"""A channel of an application's own: its messages go to the same channel at other nodes, over the links of hubs.

    send ──▶ way ──▶ link … link ──▶ AppPeer.deliver ──▶ events ──▶ on_status, on_data
      ▲                                                                   │
      └────────────────────────── Handled ◀───────────────────────────────┘

What the other side has not handled yet is bounded, so that `send` can say that a node does not keep up. Messages travel
as Publish frames without a destination: the kernels that find runs know them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

from smqrt.broker.broker import check_size
from smqrt.broker.deferred import Deferred
from smqrt.broker.outbox import Drop, Outbox, dirty, run_in_background
from smqrt.broker.topics import Route
from smqrt.cluster.node_send_queue import NodeSendQueue, count_messages
from smqrt.errors import ArgumentError, ClosedError, CloseReason, ProtocolError
from smqrt.wire import link_packets as wire
from smqrt.wire import smq
from smqrt.wire.link_packets import Packet

if TYPE_CHECKING:
    from smqrt.cluster.link import Channel, Link


# ---- The way of one hub, or of an application's channel, over a link.

HANDED_AT_ONCE_BYTES = 256 << 10
"""So much of one turn is handed to a link at once."""
KEPT = 2
"""So many times its queue is kept for a node beside that, of those who wait and of the server, which does not."""


class ChannelWay(NodeSendQueue):
    """The way of one hub, or of an application's channel, to another node.

    Attributes:
        link: over which it leads.
    """

    __slots__ = ("_channel", "_put_bytes", "link")

    def __init__(self, link: Link, channel: Channel) -> None:
        super().__init__()
        self.link, self._channel = link, channel
        self._put_bytes = 0

    def put(self, run: bytes) -> None:
        """See `Outbox`; a turn of many messages is handed over in parts, so that the link's limits hold within it."""
        queue = self.queue
        if not queue:
            dirty.append(self)
        elif self._is_over() and run[2] == smq.Type.PUBLISH:
            self.missed = True
            self.link.leave_out(self._channel, [run])
            return
        queue.append(run)
        self._put_bytes += len(run)
        if self._put_bytes > HANDED_AT_ONCE_BYTES and not (self.holds or self.keeps):
            self.flush()

    def _is_over(self) -> bool:
        return (self.holds or self.keeps) and self._put_bytes > KEPT * self.link.node.queue_bytes

    def flush(self) -> None:
        """Hand the queue to the link, until that is full."""
        if self.holds or self.keeps:
            return
        self._put_bytes = 0
        if not self.queue:  # that of a lost node stays
            return
        runs, self.queue = self.queue, []
        if not self.link.transmit(self._channel, runs):
            self.missed = True
        if self.link.is_full:
            self.on_full()

    def go_on(self) -> None:
        """See `NodeSendQueue`; what waits is handed over in parts, until the link is full again."""
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
                self.on_full()
        for run in waiting[at:]:
            self.queue.append(run)  # that of a lost node counts it

    @property
    def knows_pressure(self) -> bool:
        """See `NodeSendQueue`."""
        return self.link.knows_pressure

    @property
    def node_id(self) -> bytes:
        """See `NodeSendQueue`."""
        return self.link.peer.id if self.link.peer is not None else b""

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
        """See `NodeSendQueue`: it is being stopped, or only its hub has ended."""
        return self.link.has_left

    @property
    def knows_succession(self) -> bool:
        """See `NodeSendQueue`."""
        return self.link.knows_succession

    @property
    def tells_stamps(self) -> bool:
        """See `NodeSendQueue`."""
        return self.link.knows_stamps

    @property
    def epoch(self) -> int:
        """See `NodeSendQueue`."""
        return self.link.peer.epoch if self.link.peer is not None else 0

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

    def wait(self, then: Callable[[], object]) -> None:
        """See `NodeSendQueue`."""
        self.link.wait(then)


log = logging.getLogger("smqrt")

WINDOW_BYTES = 1 << 20
"""What one channel of another node may not have handled yet, in frames; both sides know it."""
LINK_BYTES = 4 << 20
"""The same of all channels of a link together, at most a quarter of what may wait for a node: hubs have the rest."""
TOLD_AT_ONCE = 64
"""So many events are told before other work that was put off has its turn."""
MAX_TEXT_BYTES = 1000
"""Of what `close` says to the other nodes."""

OnStatus = Callable[[int, bool, str], object]
"""`f(node, up, why)`. It may answer `Deferred`: what comes later waits."""
OnData = Callable[[bytes, int], object]
"""`f(data, node)`. The same."""

_NOWHERE = bytes(4)


class Sent(NamedTuple):
    """What became of a message.

    Attributes:
        nodes: to how many it is on its way.
        full: to how many it is not, because they have not handled what was sent before.
    """

    nodes: int
    full: int


class _Event(NamedTuple):
    """What is to be told: of a run of messages what begins at `at`, else that the node came, or went and why."""

    peer: AppPeer
    run: bytes
    at: int = 0
    up: bool = False
    why: str = ""


class AppPeer:
    """Another node that has the channel open.

    Args:
        channel: of this node.
        number: the node's.
        way: to it.

    Attributes:
        routes: see `Receiver`.
    """

    def __init__(self, channel: AppChannel, number: int, way: ChannelWay) -> None:
        self.channel, self.number, self.way = channel, number, way
        self.routes: Mapping[bytes, Route] = {_NOWHERE: self}
        self._unhandled_bytes = self._waiting_bytes = self._handled_bytes = 0

    # ---- to it

    def send(self, frame: bytes) -> bool:
        """Send a message; false when the node has not handled enough of what was sent before."""
        size, link = len(frame), self.way.link
        room_bytes = min(LINK_BYTES, link.node.queue_bytes // 4)
        if self._unhandled_bytes + size > WINDOW_BYTES:
            return False
        if link.unhandled_bytes and link.unhandled_bytes + size > room_bytes:
            return False
        self._unhandled_bytes += size
        link.unhandled_bytes += size
        self.way.put(frame)
        return True

    def control(self, packet: bytes) -> None:
        """See `Receiver`."""
        if packet[0] != Packet.HANDLED:
            raise ProtocolError(CloseReason.UNKNOWN_PACKET, f"type {packet[0]:#x} on a channel of applications")
        self._release(wire.parse_u64(packet))

    def _release(self, size: int) -> None:
        size = min(size, self._unhandled_bytes)
        self._unhandled_bytes -= size
        self.way.link.unhandled_bytes -= size

    def left(self, reason: Drop) -> None:
        """It can't be reached any more."""
        self._release(self._unhandled_bytes)
        self.way.end(reason, self.channel.count_lost)

    # ---- from it

    def resolve(self, destination: bytes) -> Route:
        """See `Receiver`."""
        raise ProtocolError(CloseReason.UNKNOWN_PACKET, "a message on a channel of applications has a destination")

    def count_batch(self, destination: bytes, more: int) -> None:
        """See `Receiver`."""

    def deliver(self, run: bytes) -> None:
        """A run of messages has come."""
        self._waiting_bytes += len(run)
        if self._waiting_bytes > WINDOW_BYTES:
            limit = f"more than {WINDOW_BYTES} bytes"
            raise ProtocolError(CloseReason.MESSAGE_TOO_LARGE, f"{limit} came on a channel before they were handled")
        self.channel.came(_Event(self, run))

    def deliver_view(self, view: memoryview) -> None:
        """See `deliver`."""
        self.deliver(bytes(view))

    def handled(self, size: int) -> None:
        """So many bytes of it have been handled."""
        self._handled_bytes += size

    def say_handled(self) -> None:
        """Tell it how much has been handled."""
        size, self._handled_bytes = self._handled_bytes, 0
        if size:
            self._waiting_bytes -= size
            self.way.say([wire.u64(Packet.HANDLED, size)])


class AppChannel:
    """A channel that applications at several nodes have opened by the same name.

    Args:
        name: 1 to 1000 bytes. Hubs may have the same.
        on_status: told when another node has the channel open, and when it has no more or can't be reached.
        on_data: gets each message, of one node in the order in which they were sent.
        on_close: takes it from the links, with what is to be said to the other nodes.

    Attributes:
        closed: whether this side has closed it: nothing is told any more.
        sent: messages that went to other nodes, counted for each of them.
        received: messages that were handed to `on_data`.
        refused: messages that a node did not get because it does not keep up.
        lost: of those sent, what may not have arrived because a link broke, or the other side closed the channel.
        dropped: messages that have come and were told to nobody: the channel was closed here, or `on_data` was so far
            behind that the node had gone, come and gone again.
    """

    def __init__(
        self, name: bytes, on_status: OnStatus, on_data: OnData, on_close: Callable[[AppChannel, bytes], object]
    ) -> None:
        self.name, self.wire_name = name, wire.APP + name
        self._on_status, self._on_data, self._on_close = on_status, on_data, on_close
        self._peers: dict[int, AppPeer] = {}
        self._events: deque[_Event] = deque()
        self._is_telling = False
        self.closed = False
        self.sent = self.received = self.refused = self.lost = self.dropped = 0

    def send(self, data: bytes, number: int | None = None) -> Sent:
        """Send a message to the node `number`, or to all that have the channel open; no other node gets it later.

        Raises:
            ArgumentError: it has more than 65520 bytes.
            ClosedError: the channel is closed.
        """
        if self.closed:
            raise ClosedError(f"the channel {self.name.decode('utf-8', 'replace')!r} is closed; open it again")
        check_size(data)
        frame = smq.publish_frame(0, 0, 0, data)
        peers = [peer for peer in self._peers.values() if number in (None, peer.number)]
        taken = sum(peer.send(frame) for peer in peers)
        self.sent += taken
        self.refused += len(peers) - taken
        return Sent(taken, len(peers) - taken)

    def nodes(self) -> dict[int, str]:
        """The numbers of the nodes that have the channel open, and where their links go."""
        return {number: peer.way.link.transport.via for number, peer in self._peers.items()}

    def counts(self) -> dict[str, int]:
        """The counters by name; see the attributes."""
        return {
            "sent": self.sent,
            "received": self.received,
            "refused": self.refused,
            "lost": self.lost,
            "dropped": self.dropped,
        }

    def close(self, text: bytes = b"") -> None:
        """Close this side: what was sent before still arrives, what has come and waits is dropped, and nothing is told
        here any more. A second call does nothing.

        Args:
            text: why, for the other nodes.

        Raises:
            ArgumentError: `text` has more than 1000 bytes.
        """
        check_text(text)
        if self.closed:
            return
        self.closed = True
        for peer in list(self._peers.values()):
            peer.way.flush()
        self._on_close(self, text or b"the channel was closed there")
        self._forget(lambda event: True)

    # ---- what links tell

    def joined(self, number: int, way: ChannelWay) -> AppPeer:
        """See `Carried`."""
        peer = self._peers[number] = AppPeer(self, number, way)
        self.came(_Event(peer, b"", up=True))
        return peer

    def left_node(self, peer: AppPeer, why: str, reason: Drop) -> None:
        """See `Carried`. Of a node that comes and goes faster than `on_status` takes it, its visits between the first
        and the last are not told.
        """
        peer.left(reason)
        if self._peers.get(peer.number) is peer:
            del self._peers[peer.number]
        if any(one.peer.number == peer.number and one.peer is not peer and one.why for one in self._events):
            self._forget(lambda event: event.peer is peer)
        else:
            self.came(_Event(peer, b"", why=why or "the link has ended"))

    def count_lost(self, reason: Drop, messages: int) -> None:
        """See `Carried`."""
        self.lost += messages

    def _forget(self, is_meant: Callable[[_Event], bool]) -> None:
        self.dropped += sum(count_messages(one.run[one.at :]) for one in self._events if is_meant(one))
        self._events = deque(one for one in self._events if not is_meant(one))

    # ---- telling

    def came(self, event: _Event) -> None:
        """Tell it in the next turn, behind what came before."""
        self._events.append(event)
        if not self._is_telling:
            self._is_telling = True
            run_in_background(self._tell_some())

    def _tell_some(self) -> Iterator[None]:
        handled: set[AppPeer] = set()
        for _ in range(TOLD_AT_ONCE):
            if not self._events:
                break
            peer, size, answer = self._tell_next()
            if _waits(answer):
                _say_handled(handled)
                answer.then(partial(self._answered, peer, size))
                return
            peer.handled(size)
            handled.add(peer)
            yield
        _say_handled(handled)
        self._go_on()

    def _answered(self, peer: AppPeer, size: int, value: object, error: BaseException | None) -> None:
        peer.handled(size)
        peer.say_handled()
        self._go_on()

    def _go_on(self) -> None:
        self._is_telling = bool(self._events)
        if self._is_telling:
            run_in_background(self._tell_some())

    def _tell_next(self) -> tuple[AppPeer, int, object]:
        """Tell one thing: whose it was, its bytes, and what the function answered."""
        event = self._events.popleft()
        peer, run, at = event.peer, event.run, event.at
        if not run:
            return peer, 0, self._told(self._on_status, peer.number, event.up, event.why)
        end = at + (run[at] << 8 | run[at + 1])
        if end < len(run):
            self._events.appendleft(event._replace(at=end))
        self.received += 1
        data = run[at + smq.PUBLISH_HEADER_BYTES : end]
        return peer, end - at, self._told(self._on_data, data, peer.number)

    def _told(self, function: Callable[..., object], *arguments: object) -> object:
        try:
            return function(*arguments)
        except Exception:
            log.exception("error in a function of the channel %r", self.name)
            return None


def _say_handled(peers: Iterable[AppPeer]) -> None:
    for peer in peers:
        peer.say_handled()


def _waits(answer: object) -> TypeGuard[Deferred[object]]:
    return isinstance(answer, Deferred) and not answer.done


def check_text(text: bytes) -> None:
    """Raise ArgumentError when `text` is more than `close` says."""
    if len(text) > MAX_TEXT_BYTES:
        raise ArgumentError(f"msg: {len(text)} bytes; what is said at the end has at most {MAX_TEXT_BYTES}")
