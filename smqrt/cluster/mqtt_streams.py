"""Numbered messages with QoS 1 and 2 between the hubs of a cluster, over links of version 3.

    hub A                                    hub B
      ◀──────────────────────────── GREETING ──┘  names the sessions of B
      ── STREAMED 1, STREAMED 2 ──────────────▶   routes them; with `persist`, commits them with their numbers
      ◀────────────────────────── ARRIVED 2 ──
                 the link breaks                  A keeps 3 and the following messages
      ◀──────────────────────────── GREETING ──┘  the same sessions, perhaps of another process
      ── CONTINUE ────────────────────────────▶
      ◀────────────────────────── ARRIVED 2 ──
      ── STREAMED 3, … ───────────────────────▶

A stream belongs to one sending process and to the sessions of one receiver.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from math import ceil, inf
from typing import TYPE_CHECKING, NamedTuple

from smqrt.broker.mqtt.arrivals import AGAIN, MAX_STREAMS, Arrivals, KnownNode, set_bounded
from smqrt.broker.mqtt.messages import Mark, Message, MqttBatch
from smqrt.broker.mqtt.publishing import FRAME_PAYLOAD_BYTES
from smqrt.broker.outbox import BLOCKED, Drop, ahead, run_in_background
from smqrt.broker.state import BrokerPeer
from smqrt.settings.limits import Limit
from smqrt.wire import cluster_mqtt, smq
from smqrt.wire.cluster_mqtt import NEVER_MS, Numbered, WireMessages
from smqrt.wire.cluster_packets import LinkType

if TYPE_CHECKING:
    from smqrt.cluster.remote_node import NodeSendQueue, RemoteNode
    from smqrt.cluster.state import ClusterState

KEPT_BYTES = 64 << 20
"""The default of the messages that a hub keeps for other nodes."""
ENTRY_BYTES = 500
"""The memory of a kept batch beside its bytes, approximately."""
WINDOW_BYTES = 4 << 20
"""Messages of a stream on the way; further ones follow after an acknowledgement."""
MAX_EXPECTED = 32
"""Hubs that a process expects when it starts with the sessions of another one."""
SENT_WAIT_S = 1.0
"""The maximum time for which publishers wait until a link takes their messages."""
MAX_DECLINED = 1000
"""Declined messages of a stream that are remembered."""
KEPT = Limit("cluster_kept", "cluster.kept_bytes", "messages for other nodes are dropped, the oldest first")


class Entry(NamedTuple):
    """A batch of a stream.

    Attributes:
        number: its number.
        origin: see `Numbered`.
        messages: the messages.
        expires_s: when they expire, on the clock of the broker.
        size_bytes: its memory, approximately.
    """

    number: int
    origin: int
    messages: WireMessages
    expires_s: float
    size_bytes: int

    @property
    def message_count(self) -> int:
        """The number of messages."""
        return smq.count_frames(self.messages.frames)


class MessageStream:
    """The messages of this hub to one receiver, until it has acknowledged them.

    Args:
        streams: the streams of the hub.
        identity: the sessions of the receiver.
        number: the random number of the stream.

    Attributes:
        identity: see above.
        node_number: the last node number of the receiver; 0 if it was not linked since the start.
        queue: the send queue to the receiver; None while it is lost.
        is_open: whether messages can be sent; otherwise the answer to Continue is awaited.
        size_bytes: the memory of the messages.
        is_ended: whether the receiver will not return.
    """

    def __init__(self, streams: MqttStreams, identity: bytes, number: int) -> None:
        self._streams, self.identity, self.id = streams, identity, number
        self.queue: NodeSendQueue | None = None
        self.is_open = self.is_ended = False
        self.size_bytes = self.node_number = 0
        self._last = self._sent_bytes = 0
        self._sent: deque[Entry] = deque()
        self._waiting: deque[Entry] = deque()

    @property
    def is_empty(self) -> bool:
        """Whether all messages are acknowledged."""
        return not (self._sent or self._waiting)

    @property
    def is_delayed(self) -> bool:
        """Whether messages wait in this process although the receiver is connected."""
        queue = self.queue
        if queue is None:
            return False
        carrier = queue.carrier
        return bool(self._waiting) or (carrier is not None and carrier.life is BLOCKED)

    # ---- the receiver

    def attach(self, queue: NodeSendQueue) -> None:
        """Send messages to this queue: the receiver is connected."""
        self.detach()
        self.queue, self.is_open = queue, self.is_empty
        self._announce(queue)

    def _announce(self, queue: NodeSendQueue) -> None:
        last = 0 if self.is_empty else self._last
        queue.send([cluster_mqtt.position(LinkType.CONTINUE, self.id, last)])

    def follow(self, queue: NodeSendQueue) -> None:
        """Send further messages to another queue, which gets all messages of the former one before."""
        if self.is_open:
            self.queue = queue
            self.pump()
        else:
            self.attach(queue)

    def detach(self) -> None:
        """Keep messages: the receiver is lost."""
        self.queue, self.is_open = None, False
        self._waiting.extendleft(reversed(self._sent))
        self._sent.clear()
        self._sent_bytes = 0

    # ---- messages

    def put(self, messages: WireMessages, origin: int, expires_s: float) -> None:
        """Send messages, or keep them until the receiver is back."""
        size = len(messages.frames) + len(messages.properties) + len(messages.large or b"") + ENTRY_BYTES
        self._last += 1
        entry = Entry(self._last, origin, messages, expires_s, size)
        self.size_bytes += size
        self._streams.size_bytes += size
        if self.is_open and not self._waiting and self._has_room(size):
            self._send(entry)
        else:
            self._waiting.append(entry)
            self._drop_excess()
        if self.is_delayed:
            self._streams.delayed[self] = None
            self._streams.is_delayed = True
            if self.size_bytes > self._streams.limit_bytes >> 2 and self.queue is not None:
                self.queue.on_full()

    @property
    def has_room(self) -> bool:
        """Whether another portion of messages would be sent at once; also if they would be lost."""
        return self.is_ended or (self.is_open and not self._waiting and self.size_bytes < WINDOW_BYTES)

    def _has_room(self, size: int) -> bool:
        return not self._sent or self._sent_bytes + size <= WINDOW_BYTES

    def _send(self, entry: Entry) -> None:
        queue = self.queue
        assert queue is not None
        messages = entry.messages
        if entry.expires_s != inf:
            left_ms = max(ceil((entry.expires_s - self._streams.now_s()) * 1000), 0)
            messages = messages._replace(left_ms=left_ms)
        self._sent.append(entry)
        self._sent_bytes += entry.size_bytes
        queue.put(cluster_mqtt.numbered(Numbered(self.id, entry.number, entry.origin, messages)))
        ahead[queue] = None  # before the publisher gets its acknowledgement: then a crash of this process loses nothing

    def pump(self) -> None:
        """Send messages that wait, as far as there is room."""
        while self.is_open and self._waiting and self._has_room(self._waiting[0].size_bytes):
            entry = self._waiting.popleft()
            if entry.expires_s <= self._streams.now_s():
                self._forget(entry)
            else:
                self._send(entry)

    def arrived(self, number: int) -> None:
        """Forget messages that the receiver has, and send further ones."""
        for entries in (self._sent, self._waiting):
            while entries and entries[0].number <= number:
                entry = entries.popleft()
                if entries is self._sent:
                    self._sent_bytes -= entry.size_bytes
                self._forget(entry)
        if self.queue is not None:
            self.is_open = True
            self.pump()

    def take_declined(self, number: int) -> Entry | None:
        """Remove and return messages whose shared subscription the receiver does not have."""
        for entries in (self._sent, self._waiting):
            at = bisect_left(entries, number, key=lambda one: one.number)
            if at < len(entries) and entries[at].number == number:
                entry = entries[at]
                del entries[at]
                self._sent_bytes -= entry.size_bytes if entries is self._sent else 0
                self._forget(entry)
                return entry
        return None

    def _forget(self, entry: Entry) -> None:
        self.size_bytes -= entry.size_bytes
        self._streams.size_bytes -= entry.size_bytes

    def _drop_excess(self) -> None:
        while self._waiting and self._streams.size_bytes > self._streams.limit_bytes:
            entry = self._waiting.popleft()
            self._forget(entry)
            self._streams.dropped(self, entry)

    def end(self, reason: Drop) -> Iterator[None]:
        """Count the messages as lost, in portions: the receiver does not return."""
        self.detach()
        self.is_ended = True
        while self._waiting:
            entry = self._waiting.popleft()
            self._forget(entry)
            self._streams.lost(self, reason, entry.message_count)
            yield


class Acknowledgement(Mark):
    """A place among the batches that wait for delivery: what has arrived before is acknowledged."""

    send: Callable[[], object]

    def reached(self) -> None:
        """Send the acknowledgement."""
        self.send()


class _Answer:
    """An acknowledgement that waits for the `persist` file, see `Publisher`."""

    held = 0

    def __init__(self, send: Callable[[], object]) -> None:
        self._send = send

    def send_held(self, data: bytes) -> None:
        """Send the acknowledgement."""
        self._send()


class MqttStreams:
    """The streams that one hub sends and receives.

    Args:
        state: the state that the parts of the cluster share.

    Attributes:
        limit_bytes: the memory for messages that are not acknowledged.
        size_bytes: the memory in use, approximately.
        overflowed: messages that were dropped because of this limit.
        delayed: streams whose link takes no more messages now.
        is_delayed: whether the last messages have gone to one of these.
        random: returns random bytes.
        on_caught_up: called when all messages have arrived that linked nodes had kept.
    """

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self.limit_bytes, self.size_bytes, self.overflowed = KEPT_BYTES, 0, 0
        self.delayed: dict[MessageStream, None] = {}
        self.is_delayed = False
        self.random: Callable[[int], bytes] = lambda count: bytes(count)
        self._by_identity: dict[bytes, MessageStream] = {}
        self._by_id: dict[int, MessageStream] = {}
        self._unacknowledged: dict[tuple[RemoteNode, int], None] = {}
        self._senders: dict[int, RemoteNode] = {}
        """The node that has sent the last messages of each stream."""
        self._declined: dict[int, deque[int]] = {}
        """The last messages of each stream that were declined: the sender may have lost the link before it knew."""
        self._publishers: list[BrokerPeer] = []
        self.on_caught_up: Callable[[], object] = lambda: None
        self._behind: dict[RemoteNode, tuple[int, int] | None] = {}
        """Nodes that may have kept messages for this hub, and up to which number of which stream these are."""

    def now_s(self) -> float:
        """Return the time, on the clock of the broker."""
        return self._state.broker.clock()

    @property
    def _arrivals(self) -> Arrivals | None:
        devices = self._state.broker.devices
        if devices is None:
            return None
        found: Arrivals = devices.arrivals
        if not found.identity:
            found.identity = self.random(cluster_mqtt.IDENTITY_BYTES)
        return found

    # ---- other nodes

    def greet(self, node: RemoteNode) -> None:
        """Send a new node the identity of this hub, if it has MQTT clients."""
        if node.send_queue.version >= cluster_mqtt.STREAM_VERSION and (arrivals := self._arrivals) is not None:
            node.send_queue.send([cluster_mqtt.greeting(arrivals.identity)])
            self._behind[node] = None

    def synced(self, node: RemoteNode) -> None:
        """Note that a node has sent its state: one without MQTT clients has no messages."""
        if not node.identity:
            self._caught_up(node)

    @property
    def is_behind(self) -> bool:
        """Whether other nodes may have kept messages for this hub that have not arrived."""
        return bool(self._behind)

    def _caught_up(self, node: RemoteNode) -> None:
        if node in self._behind:
            del self._behind[node]
            if not self._behind:
                self.on_caught_up()

    def on_greeting(self, node: RemoteNode, packet: bytes) -> None:
        """Process Greeting: continue the stream to the sessions of a node, or begin one."""
        node.identity = identity = cluster_mqtt.parse_greeting(packet)
        if node.stream is not None or self._arrivals is None:
            return
        node.stream = stream = self.stream_to(identity)
        stream.node_number = node.number
        self._remember(identity, True)
        if stream.queue is None:
            stream.attach(node.send_queue)
        else:  # the former process of a hub that migrates has it still
            node.send_queue.send([cluster_mqtt.position(LinkType.CONTINUE, stream.id, 0)])

    def stream_to(self, identity: bytes) -> MessageStream:
        """Return the stream to the sessions of another hub, which begins if there is none."""
        stream = self._by_identity.get(identity)
        if stream is None:
            stream = MessageStream(self, identity, int.from_bytes(self.random(8), "big") or 1)
            self._by_identity[identity] = self._by_id[stream.id] = stream
        return stream

    def known(self) -> list[bytes]:
        """Return the identities of hubs that were linked to the former process of this hub."""
        devices = self._state.broker.devices
        return list(devices.arrivals.nodes)[:MAX_EXPECTED] if devices is not None else []

    def _remember(self, identity: bytes, is_known: bool) -> None:
        """Save that there is another hub, or that there is none any more."""
        devices, arrivals = self._state.broker.devices, self._arrivals
        if arrivals is None or (identity in arrivals.nodes) is is_known:
            return
        if is_known:
            arrivals.nodes[identity] = None
        else:
            del arrivals.nodes[identity]
        if devices.ledger is not None:
            devices.ledger.touch(KnownNode(identity))

    def lost(self, stream: MessageStream, reason: Drop, messages: int) -> None:
        """Count and report messages that reach no client of a lost node."""
        broker = self._state.broker
        broker.stats.drop(reason, messages)
        if broker.devices is not None:
            broker.devices.gaps.lost(stream.node_number, messages)

    def dropped(self, stream: MessageStream, entry: Entry) -> None:
        """Count and report messages that were dropped because too many are kept."""
        broker, count = self._state.broker, entry.message_count
        self.overflowed += count
        self.lost(stream, Drop.LINK_LOST if stream.queue is None else Drop.LINK_SLOW, count)
        name = entry.messages.name
        KEPT.refused(f"the topic {ascii(name[:64])[1:]}")
        for trace in broker.traces:
            if trace.topic == name:
                trace.add("dropped", topic=name.decode("utf-8", "replace"), messages=count, reason="cluster.kept_bytes")

    def left(self, node: RemoteNode, is_lost: bool) -> None:
        """Keep the messages for a lost node; those for a node that has left are lost, unless another one succeeds."""
        stream = node.stream
        self._caught_up(node)
        for key in [one for one in self._unacknowledged if one[0] is node]:
            del self._unacknowledged[key]
        self._senders = {stream: sender for stream, sender in self._senders.items() if sender is not node}
        if stream is None or stream.queue is not node.send_queue:
            return
        stream.detach()
        self._relieve()
        heir = next((one for one in self._state.remotes if one.stream is stream and one is not node), None)
        if heir is not None:
            stream.attach(heir.send_queue)
        elif not is_lost:
            self.end(stream)

    def end(self, stream: MessageStream) -> None:
        """Forget a stream; its messages count as lost."""
        self._remember(stream.identity, False)
        self._by_id.pop(stream.id, None)
        if self._by_identity.get(stream.identity) is stream:
            del self._by_identity[stream.identity]
        run_in_background(stream.end(Drop.LINK_LOST))

    def moved(self, before: RemoteNode, node: RemoteNode) -> None:
        """Continue the stream to a hub that has migrated to another process."""
        stream, fresh = before.stream, node.stream
        if stream is None:
            return
        node.stream, stream.node_number = stream, node.number
        self._caught_up(before)
        self._senders = {one: sender for one, sender in self._senders.items() if sender is not before}
        stream.follow(node.send_queue)
        if fresh is not None and fresh is not stream:
            self.end(fresh)

    # ---- sending

    def put(self, stream: MessageStream, messages: WireMessages, batch: MqttBatch) -> None:
        """Send messages with QoS 1 or 2."""
        ledger = self._state.broker.devices.ledger
        origin, expires_s = self.origin_of(batch), batch.expires_s

        def send() -> None:
            if stream.is_ended:
                self.lost(stream, Drop.LINK_LOST, smq.count_frames(messages.frames))
            else:
                stream.put(messages, origin, expires_s)

        if batch.qos < 2 or ledger is None or not ledger.waits:
            send()
        elif batch.is_delivered:  # before its publisher gets PUBREC, which waits behind the batch
            ledger.hold(send)
            ledger.wake()
        else:
            ledger.forward(batch, send)

    def put_for_session(self, stream: MessageStream, message: Message, session: bytes) -> None:
        """Send a message that only one session gets.

        Args:
            stream: the stream to the node with the session.
            message: the message, with QoS 1 or 2.
            session: see `WireMessages`.
        """
        if stream.is_ended:
            self.lost(stream, Drop.LINK_LOST, 1)
            return
        payload, large = message.payload, None
        if len(payload) > FRAME_PAYLOAD_BYTES:
            payload, large = b"", message.payload
        wired = WireMessages(
            message.name,
            b"",
            smq.publish_frame(0, 0, 0, payload),
            True,
            message.qos,
            message.retain,
            message.properties,
            NEVER_MS,
            large,
            session,
        )
        stream.put(wired, message.origin, message.expires_s)

    def origin_of(self, batch: MqttBatch) -> int:
        """Return the id of the first message of a batch, which gets one if it has none."""
        if not batch.origin:
            batch.origin = self._state.broker.devices.arrivals.new_origin(smq.count_frames(batch), batch.qos)
        return batch.origin

    def on_arrived(self, node: RemoteNode, packet: bytes) -> None:
        """Process Arrived."""
        number, last = cluster_mqtt.parse_position(packet)
        stream = self._by_id.get(number)
        if stream is not None and stream.queue is node.send_queue:
            stream.arrived(last)
            self._relieve()

    def decline(self, stream: int, number: int) -> bool:
        """Return messages to their sender, since there is no client of their shared subscription here any more.

        Returns:
            Whether the sender is linked, and takes them.
        """
        sender = self._senders.get(stream)
        if sender is None or sender.gone or sender.send_queue.version < cluster_mqtt.SESSION_VERSION:
            return False
        if stream not in self._declined:
            set_bounded(self._declined, stream, deque(maxlen=MAX_DECLINED), MAX_STREAMS)
        self._declined[stream].append(number)
        sender.send_queue.send([cluster_mqtt.position(LinkType.DECLINED, stream, number)])
        ahead[sender.send_queue] = None  # before their number is saved: then a crash of this process loses nothing
        return True

    def take_declined(self, packet: bytes) -> Entry | None:
        """Return the messages that another node declines; None if they are not those of a stream."""
        number, declined = cluster_mqtt.parse_position(packet)
        stream = self._by_id.get(number)
        return stream.take_declined(declined) if stream is not None else None

    def must_wait(self, publisher: BrokerPeer) -> bool:
        """Return whether a publisher has to wait until links take its last messages; it is resumed then."""
        if not self.is_delayed:
            return False
        self.is_delayed = False
        self._forget_delayed()
        if not self.delayed:
            return False
        if not self._publishers:
            self._state.broker.call_later(SENT_WAIT_S, self._resume)
        self._publishers.append(publisher)
        return True

    def _forget_delayed(self) -> None:
        for stream in [one for one in self.delayed if not one.is_delayed]:
            del self.delayed[stream]

    def _relieve(self) -> None:
        if self.delayed:
            self._forget_delayed()
            if not self.delayed:
                self._resume()

    def _resume(self) -> None:
        publishers, self._publishers = self._publishers, []
        for one in publishers:
            one.outbox.resume()

    # ---- receiving

    def on_continue(self, node: RemoteNode, packet: bytes) -> None:
        """Process Continue."""
        stream, last = cluster_mqtt.parse_position(packet)
        for number in self._declined.get(stream, ()):
            node.send_queue.send([cluster_mqtt.position(LinkType.DECLINED, stream, number)])
        self._acknowledge_later(node, stream)
        arrivals = self._arrivals
        if arrivals is None or last <= arrivals.numbers.get(stream, 0):
            self._caught_up(node)
        elif node in self._behind:
            self._behind[node] = stream, last

    def takes(self, node: RemoteNode, found: Numbered) -> bool:
        """Return whether messages are new; acknowledge them soon."""
        arrivals = self._arrivals
        if node.is_held or arrivals is None:
            return False
        self._acknowledge_later(node, found.stream)
        set_bounded(self._senders, found.stream, node, MAX_STREAMS)
        is_new = arrivals.take(found.stream, found.number)
        expected = self._behind.get(node)
        if expected is not None and expected[0] == found.stream and found.number >= expected[1]:
            self._behind[node] = None
            run_in_background(self._catch_up(node))  # when the message is routed
        if not is_new:
            return False
        if found.messages.qos == 2 and found.origin and not found.messages.session:
            origin, group = found.origin & ~AGAIN, found.messages.group
            if found.origin & AGAIN and arrivals.knows(origin, group):
                return False
            arrivals.know(range(origin, origin + smq.count_frames(found.messages.frames)), group)
        return True

    def _catch_up(self, node: RemoteNode) -> Iterator[None]:
        self._caught_up(node)
        yield

    def _acknowledge_later(self, node: RemoteNode, stream: int) -> None:
        if not self._unacknowledged:
            run_in_background(self._acknowledge_all())
        self._unacknowledged[node, stream] = None

    def _acknowledge_all(self) -> Iterator[None]:
        """Acknowledge what has arrived in a turn, once it is delivered and saved."""
        unacknowledged, self._unacknowledged = self._unacknowledged, {}
        arrivals = self._arrivals
        numbers = {} if arrivals is None else arrivals.numbers
        answers = [
            (node, cluster_mqtt.position(LinkType.ARRIVED, stream, numbers.get(stream, 0)))
            for node, stream in unacknowledged
        ]
        self.when_saved(lambda: _send(answers))
        yield

    def in_order(self, call: Callable[[], object]) -> None:
        """Call a function when the batches are delivered that have arrived until now."""
        devices = self._state.broker.devices
        if devices.is_delivering:
            mark = Acknowledgement()
            mark.send = call
            devices.put(mark)
        else:
            call()

    def when_saved(self, call: Callable[[], object]) -> None:
        """Call a function when the sessions have what has arrived until now, and with `persist` the file."""
        devices = self._state.broker.devices
        ledger = devices.ledger if devices is not None else None
        if ledger is not None and ledger.waits:
            ledger.barrier().answers.append((_Answer(call), b""))
        elif devices is not None:
            self.in_order(call)
        else:
            call()


def _send(answers: Iterable[tuple[RemoteNode, bytes]]) -> None:
    for node, packet in answers:
        if not node.gone:
            node.send_queue.send([packet])
