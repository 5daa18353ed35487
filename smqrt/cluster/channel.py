"""Application channels: messages between applications at several nodes.

    send ──▶ queue ──▶ link … link ──▶ AppPeer.deliver ──▶ events ──▶ on_status, on_data
      ▲                                                                     │
      └─────────────────────────── Handled ◀────────────────────────────────┘

Channels use the links between nodes. The unhandled bytes of each node are limited, so `send` can report a node that
does not keep up. Messages are Publish frames without a destination, which the kernels of the data path split into
batches.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from smqrt.broker.broker import check_size
from smqrt.broker.deferred import Deferred
from smqrt.broker.outbox import Drop, run_in_background
from smqrt.broker.topics import Route
from smqrt.cluster.link_channels import ChannelQueue
from smqrt.cluster.remote_node import count_messages
from smqrt.errors import ArgumentError, ClosedError, CloseReason, ProtocolError
from smqrt.wire import cluster_packets as wire
from smqrt.wire import smq
from smqrt.wire.cluster_packets import Packet

log = logging.getLogger("smqrt")

WINDOW_BYTES = 1 << 20
"""The maximum unhandled bytes of one channel at a node, frame headers included. Both sides use this value."""
LINK_BYTES = 4 << 20
"""The same for all channels of a link together, but at most a quarter of the node's queue; hubs get the rest."""
EVENTS_PER_STEP = 64
"""Events handled before other background tasks continue."""
MAX_TEXT_BYTES = 1000
"""The maximum length of the text that `close` sends to other nodes."""

OnStatus = Callable[[int, bool, str], object]
"""`f(node, up, why)`. It may return a `Deferred`: later events wait for it."""
OnData = Callable[[bytes, int], object]
"""`f(data, node)`. It may return a `Deferred`, too."""

_NO_DESTINATION = bytes(4)


class Sent(NamedTuple):
    """The result of sending a message.

    Attributes:
        nodes: the number of nodes to which it was sent.
        full: the number of nodes to which it was not sent, because they have not handled earlier messages.
    """

    nodes: int
    full: int


class _Event(NamedTuple):
    """An event for the application: the messages of `batch` from `at` on, or a change of status if `batch` is empty."""

    peer: AppPeer
    batch: bytes
    at: int = 0
    up: bool = False
    why: str = ""


class AppPeer:
    """Another node that has the channel open.

    Args:
        channel: the channel of this node.
        number: the other node's number.
        send_queue: the send queue to it.

    Attributes:
        routes: see `Receiver`.
    """

    def __init__(self, channel: AppChannel, number: int, send_queue: ChannelQueue) -> None:
        self.channel, self.number, self.send_queue = channel, number, send_queue
        self.routes: Mapping[bytes, Route] = {_NO_DESTINATION: self}
        self._unhandled_bytes = self._waiting_bytes = self._handled_bytes = 0

    # ---- to the node

    def send(self, frame: bytes) -> bool:
        """Send a message; return false when too many bytes of earlier messages are unhandled."""
        size, link = len(frame), self.send_queue.link
        room_bytes = min(LINK_BYTES, link.node.queue_bytes // 4)
        if self._unhandled_bytes + size > WINDOW_BYTES:
            return False
        # An idle link takes any message, also one that is larger than a quarter of a small queue.
        if link.unhandled_bytes and link.unhandled_bytes + size > room_bytes:
            return False
        self._unhandled_bytes += size
        link.unhandled_bytes += size
        self.send_queue.put(frame)
        return True

    def control(self, packet: bytes) -> None:
        """See `Receiver`."""
        if packet[0] != Packet.HANDLED:
            raise ProtocolError(CloseReason.UNKNOWN_PACKET, f"type {packet[0]:#x} on an application channel")
        self._release(wire.parse_u64(packet))

    def _release(self, size: int) -> None:
        # A node may report too many bytes, which must not change the sums of other channels.
        size = min(size, self._unhandled_bytes)
        self._unhandled_bytes -= size
        self.send_queue.link.unhandled_bytes -= size

    def left(self, reason: Drop) -> None:
        """Count the messages queued for an unreachable node as lost."""
        self._release(self._unhandled_bytes)
        self.send_queue.end(reason, self.channel.count_lost)

    # ---- from the node

    def resolve(self, destination: bytes) -> Route:
        """See `Receiver`."""
        raise ProtocolError(CloseReason.UNKNOWN_PACKET, "a message on an application channel has a destination")

    def count_batch(self, destination: bytes, more: int) -> None:
        """See `Receiver`."""

    def deliver(self, batch: bytes) -> None:
        """Queue a batch of messages for the application."""
        self._waiting_bytes += len(batch)
        if self._waiting_bytes > WINDOW_BYTES:  # `send` of the other node prevents that
            text = f"a node sent more than {WINDOW_BYTES} bytes on a channel before they were handled"
            raise ProtocolError(CloseReason.MESSAGE_TOO_LARGE, text)
        self.channel.add_event(_Event(self, batch))

    def deliver_view(self, view: memoryview) -> None:
        """See `deliver`."""
        self.deliver(bytes(view))

    def handled(self, size: int) -> None:
        """Record bytes that the application has handled."""
        self._handled_bytes += size

    def send_handled(self) -> None:
        """Report the bytes handled since the last report to the node."""
        size, self._handled_bytes = self._handled_bytes, 0
        if size:
            self._waiting_bytes -= size
            self.send_queue.send([wire.u64(Packet.HANDLED, size)])


class AppChannel:
    """A channel that applications at several nodes open under the same name.

    Args:
        name: 1 to 1000 bytes; hubs have separate names.
        on_status: called when another node has opened the channel, and when it has closed it or is unreachable.
        on_data: called with each message, in order for each node.
        on_close: removes the channel from the links; called with the text for the other nodes.

    Attributes:
        closed: whether this side has closed it; then no events follow.
        sent: messages sent, counted for each node.
        received: messages that were passed to `on_data`.
        refused: messages that were not sent to a node because it does not keep up.
        lost: messages sent that may not have arrived, because a link ended or the other side closed the channel.
        dropped: messages received and not passed to `on_data`: the channel was closed here, or the node left, joined
            and left again before `on_data` had handled them.
    """

    def __init__(
        self, name: bytes, on_status: OnStatus, on_data: OnData, on_close: Callable[[AppChannel, bytes], object]
    ) -> None:
        self.name, self.wire_name = name, wire.APP + name
        self._on_status, self._on_data, self._on_close = on_status, on_data, on_close
        self._peers: dict[int, AppPeer] = {}
        self._events: deque[_Event] = deque()
        self._is_running = False
        self.closed = False
        self.sent = self.received = self.refused = self.lost = self.dropped = 0

    def send(self, data: bytes, number: int | None = None) -> Sent:
        """Send a message to the node `number`, or to every node with the channel open.

        Raises:
            ArgumentError: it has more than 65520 bytes.
            ClosedError: the channel is closed.
        """
        if self.closed:
            raise ClosedError(f"the channel {self.name.decode('utf-8', 'replace')!r} is closed; open it again")
        check_size(data)
        frame = smq.publish_frame(0, 0, 0, data)
        peers = [peer for peer in self._peers.values() if number in (None, peer.number)]
        accepted = sum(peer.send(frame) for peer in peers)
        self.sent += accepted
        self.refused += len(peers) - accepted
        return Sent(accepted, len(peers) - accepted)

    def nodes(self) -> dict[int, str]:
        """Return the addresses of the nodes that have the channel open, by node number."""
        return {number: peer.send_queue.link.transport.via for number, peer in self._peers.items()}

    def counts(self) -> dict[str, int]:
        """Return the counters by name; see the attributes."""
        return {
            "sent": self.sent,
            "received": self.received,
            "refused": self.refused,
            "lost": self.lost,
            "dropped": self.dropped,
        }

    def close(self, text: bytes = b"") -> None:
        """Close this side. A second call does nothing.

        Messages sent before still arrive. Messages received and not handled are dropped, and no more events follow.

        Args:
            text: the reason that the other nodes get.

        Raises:
            ArgumentError: `text` has more than 1000 bytes.
        """
        check_text(text)
        if self.closed:
            return
        self.closed = True
        for peer in list(self._peers.values()):
            peer.send_queue.flush()
        self._on_close(self, text or b"the other node has closed the channel")
        self._drop_events(lambda event: True)

    # ---- called by links

    def joined(self, number: int, send_queue: ChannelQueue) -> AppPeer:
        """See `Carried`."""
        peer = self._peers[number] = AppPeer(self, number, send_queue)
        self.add_event(_Event(peer, b"", up=True))
        return peer

    def left_node(self, peer: AppPeer, why: str, reason: Drop) -> None:
        """See `Carried`.

        When a node joins and leaves repeatedly before `on_status` has run, the changes in between are not reported.
        """
        peer.left(reason)
        if self._peers.get(peer.number) is peer:
            del self._peers[peer.number]
        # This also bounds the queue: a node can reconnect without end while a callback blocks.
        if any(one.peer.number == peer.number and one.peer is not peer and one.why for one in self._events):
            self._drop_events(lambda event: event.peer is peer)
        else:
            self.add_event(_Event(peer, b"", why=why or "the link has ended"))

    def count_lost(self, reason: Drop, messages: int) -> None:
        """See `Carried`."""
        self.lost += messages

    def _drop_events(self, is_meant: Callable[[_Event], bool]) -> None:
        self.dropped += sum(count_messages(one.batch[one.at :]) for one in self._events if is_meant(one))
        self._events = deque(one for one in self._events if not is_meant(one))

    # ---- events

    def add_event(self, event: _Event) -> None:
        """Queue an event for the application; it is handled in a later turn."""
        self._events.append(event)
        if not self._is_running:
            self._is_running = True
            run_in_background(self._run())

    def _run(self) -> Iterator[None]:
        handled: set[AppPeer] = set()
        for _ in range(EVENTS_PER_STEP):
            if not self._events:
                break
            event = self._events.popleft()
            peer, batch, at = event.peer, event.batch, event.at
            size = 0
            if batch:
                end = at + (batch[at] << 8 | batch[at + 1])  # each frame begins with its length
                if end < len(batch):
                    self._events.appendleft(event._replace(at=end))
                size = end - at
                self.received += 1
                answer = self._call(self._on_data, batch[at + smq.PUBLISH_HEADER_BYTES : end], peer.number)
            else:
                answer = self._call(self._on_status, peer.number, event.up, event.why)
            if isinstance(answer, Deferred) and not answer.done:
                _send_handled(handled)
                answer.then(partial(self._answered, peer, size))
                return
            peer.handled(size)
            handled.add(peer)
            yield
        _send_handled(handled)
        self._run_again()

    def _answered(self, peer: AppPeer, size: int, value: object, error: BaseException | None) -> None:
        peer.handled(size)
        peer.send_handled()
        self._run_again()

    def _run_again(self) -> None:
        self._is_running = bool(self._events)
        if self._is_running:
            run_in_background(self._run())

    def _call(self, function: Callable[..., object], *arguments: object) -> object:
        try:
            return function(*arguments)
        except Exception:
            log.exception("error in a function of the channel %r", self.name)
            return None


def _send_handled(peers: Iterable[AppPeer]) -> None:
    for peer in peers:
        peer.send_handled()


def check_text(text: bytes) -> None:
    """Raise ArgumentError when the text for other nodes is too long."""
    if len(text) > MAX_TEXT_BYTES:
        raise ArgumentError(f"msg: {len(text)} bytes; the text of close has at most {MAX_TEXT_BYTES}")
