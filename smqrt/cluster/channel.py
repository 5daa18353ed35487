"""Application channels: messages between applications at several nodes, over the links of hubs.

    send ──▶ queue ──▶ link … link ──▶ AppPeer.deliver ──▶ events ──▶ on_status, on_data
      ▲                                                                     │
      └─────────────────────────── Handled ◀────────────────────────────────┘

What the other side has not handled yet is limited, so that `send` can report a node that does not keep up. Messages
travel as Publish frames without a destination, which the kernels of the data path split into runs.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple, TypeGuard

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
"""What a node may not have handled of one channel, in frames; both sides know it."""
LINK_BYTES = 4 << 20
"""The same for all channels of a link together. It is at most a quarter of what may be queued; hubs get the rest."""
EVENTS_PER_STEP = 64
"""Events that are handled before other background work has its turn."""
MAX_TEXT_BYTES = 1000
"""The maximum length of the text that `close` sends to other nodes."""

OnStatus = Callable[[int, bool, str], object]
"""`f(node, up, why)`. It may return a `Deferred`: later events wait for it."""
OnData = Callable[[bytes, int], object]
"""`f(data, node)`. The same."""

_NO_DESTINATION = bytes(4)


class Sent(NamedTuple):
    """The result of sending a message.

    Attributes:
        nodes: the number of nodes that it was sent to.
        full: the number of nodes that it was not sent to, because they have not handled earlier messages.
    """

    nodes: int
    full: int


class _Event(NamedTuple):
    """An event for the application: a run of messages from `at` on, or the status of a node where `run` is empty."""

    peer: AppPeer
    run: bytes
    at: int = 0
    up: bool = False
    why: str = ""


class AppPeer:
    """Another node that has the channel open.

    Args:
        channel: the channel of this node.
        number: the other node's number.
        send_queue: leads to it.

    Attributes:
        routes: see `Receiver`.
    """

    def __init__(self, channel: AppChannel, number: int, send_queue: ChannelQueue) -> None:
        self.channel, self.number, self.send_queue = channel, number, send_queue
        self.routes: Mapping[bytes, Route] = {_NO_DESTINATION: self}
        self._unhandled_bytes = self._waiting_bytes = self._handled_bytes = 0

    # ---- to the node

    def send(self, frame: bytes) -> bool:
        """Send a message; return false when the node has not handled enough of the earlier ones."""
        size, link = len(frame), self.send_queue.link
        room_bytes = min(LINK_BYTES, link.node.queue_bytes // 4)
        if self._unhandled_bytes + size > WINDOW_BYTES:
            return False
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
        size = min(size, self._unhandled_bytes)
        self._unhandled_bytes -= size
        self.send_queue.link.unhandled_bytes -= size

    def left(self, reason: Drop) -> None:
        """Count what is queued for an unreachable node as lost."""
        self._release(self._unhandled_bytes)
        self.send_queue.end(reason, self.channel.count_lost)

    # ---- from the node

    def resolve(self, destination: bytes) -> Route:
        """See `Receiver`."""
        raise ProtocolError(CloseReason.UNKNOWN_PACKET, "a message on an application channel has a destination")

    def count_batch(self, destination: bytes, more: int) -> None:
        """See `Receiver`."""

    def deliver(self, run: bytes) -> None:
        """Queue a run of messages for the application."""
        self._waiting_bytes += len(run)
        if self._waiting_bytes > WINDOW_BYTES:
            text = f"a node sent more than {WINDOW_BYTES} bytes on a channel before they were handled"
            raise ProtocolError(CloseReason.MESSAGE_TOO_LARGE, text)
        self.channel.add_event(_Event(self, run))

    def deliver_view(self, view: memoryview) -> None:
        """See `deliver`."""
        self.deliver(bytes(view))

    def handled(self, size: int) -> None:
        """Record bytes that the application has handled."""
        self._handled_bytes += size

    def send_handled(self) -> None:
        """Send the node how much has been handled since the last time."""
        size, self._handled_bytes = self._handled_bytes, 0
        if size:
            self._waiting_bytes -= size
            self.send_queue.send([wire.u64(Packet.HANDLED, size)])


class AppChannel:
    """A channel that applications at several nodes have opened by the same name.

    Args:
        name: 1 to 1000 bytes. A hub may have the same name.
        on_status: called when another node has opened the channel, and when it has closed it or is unreachable.
        on_data: called with each message, in order for each node.
        on_close: removes the channel from the links; it gets the text for the other nodes.

    Attributes:
        closed: whether this side has closed it: there are no more events.
        sent: messages sent, counted for each node.
        received: messages that were passed to `on_data`.
        refused: messages that were not sent to a node because it does not keep up.
        lost: messages sent that may not have arrived, because a link ended or the other side closed the channel.
        dropped: messages received that `on_data` did not get. The channel was closed here, or `on_data` was so far
            behind that the node had left, joined and left again.
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
        """Send a message to the node `number`, or to all that have the channel open now.

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
        """Return the numbers of the nodes that have the channel open, with the other ends of their links."""
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

        What was sent before still arrives. What was received and not handled is dropped, and there are no more events.

        Args:
            text: the reason, for the other nodes.

        Raises:
            ArgumentError: `text` has more than 1000 bytes.
        """
        check_text(text)
        if self.closed:
            return
        self.closed = True
        for peer in list(self._peers.values()):
            peer.send_queue.flush()
        self._on_close(self, text or b"the channel was closed there")
        self._drop_events(lambda event: True)

    # ---- calls of links

    def joined(self, number: int, send_queue: ChannelQueue) -> AppPeer:
        """See `Carried`."""
        peer = self._peers[number] = AppPeer(self, number, send_queue)
        self.add_event(_Event(peer, b"", up=True))
        return peer

    def left_node(self, peer: AppPeer, why: str, reason: Drop) -> None:
        """See `Carried`. Of a node that joins and leaves faster than `on_status` runs, only the first and the last time
        are events.
        """
        peer.left(reason)
        if self._peers.get(peer.number) is peer:
            del self._peers[peer.number]
        if any(one.peer.number == peer.number and one.peer is not peer and one.why for one in self._events):
            self._drop_events(lambda event: event.peer is peer)
        else:
            self.add_event(_Event(peer, b"", why=why or "the link has ended"))

    def count_lost(self, reason: Drop, messages: int) -> None:
        """See `Carried`."""
        self.lost += messages

    def _drop_events(self, is_meant: Callable[[_Event], bool]) -> None:
        self.dropped += sum(count_messages(one.run[one.at :]) for one in self._events if is_meant(one))
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
            peer, size, answer = self._handle_next()
            if _waits(answer):
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

    def _handle_next(self) -> tuple[AppPeer, int, object]:
        """Handle one event; return its node, its bytes, and what the application's function returned."""
        event = self._events.popleft()
        peer, run, at = event.peer, event.run, event.at
        if not run:
            return peer, 0, self._call(self._on_status, peer.number, event.up, event.why)
        end = at + (run[at] << 8 | run[at + 1])  # each frame begins with its length
        if end < len(run):
            self._events.appendleft(event._replace(at=end))
        self.received += 1
        data = run[at + smq.PUBLISH_HEADER_BYTES : end]
        return peer, end - at, self._call(self._on_data, data, peer.number)

    def _call(self, function: Callable[..., object], *arguments: object) -> object:
        try:
            return function(*arguments)
        except Exception:
            log.exception("error in a function of the channel %r", self.name)
            return None


def _send_handled(peers: Iterable[AppPeer]) -> None:
    for peer in peers:
        peer.send_handled()


def _waits(answer: object) -> TypeGuard[Deferred[object]]:
    return isinstance(answer, Deferred) and not answer.done


def check_text(text: bytes) -> None:
    """Raise ArgumentError when the text for other nodes is too long."""
    if len(text) > MAX_TEXT_BYTES:
        raise ArgumentError(f"msg: {len(text)} bytes; the text of close has at most {MAX_TEXT_BYTES}")
