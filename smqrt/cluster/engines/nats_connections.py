"""Connections of links through NATS.

    smqrt.<site>.hello     each node publishes a hello every second: its id, its start time, a sequence number
    smqrt.<site>.n.<id>    messages for one node: the sender's id, the link, a sequence number, then bytes

NATS keeps the order of messages from one connection to one subject. It drops messages that it cannot deliver, without
a notification. A gap in the sequence numbers reveals that, and the link is made again. Both sides prove the password on
each link, as on other transports.

Any client with rights to the subjects can publish there in the name of any node. Therefore each message has a signature
of 16 bytes. On a link it is a GMAC over the side, the sequence number and all bytes, with a key that only the two sides
have. Hellos, and the notice that a link is gone, have a BLAKE2b signature with a key that all nodes have. For 64 KiB,
GMAC takes 3 us and BLAKE2b 49 us.

A message with a wrong signature does not end a link, and does not count as activity. Before the password is proved,
signatures are not checked, so that a node with another password gets an answer. Until then, the link counts for
`MAX_UNAUTHENTICATED`.
"""

from __future__ import annotations

import struct
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from hmac import compare_digest
from time import monotonic
from typing import Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from gevent import get_hub

from smqrt.broker.outbox import Drop, Outbox
from smqrt.cluster import nats
from smqrt.cluster.engines.connections import LinkConnection, LinkSession
from smqrt.cluster.link import Link, LinkState
from smqrt.cluster.nats.client import NatsState
from smqrt.cluster.node import Node
from smqrt.settings.limits import Limit
from smqrt.smq.connection import LARGE_BATCH_BYTES, view
from smqrt.smq.forwarder import JOIN_AFTER
from smqrt.wire.cluster_packets import ID_BYTES
from smqrt.wire.connection_state import Life, transition
from smqrt.wire.smq import MAX_NODE

PORTION_BYTES = 64 << 10
"""The maximum content of a NATS message. For larger messages, a NATS server clears more memory each time."""
HELLO_S = 1.0
RETRY_S = 10.0
"""The delay before a node is contacted again after a refusal on either side. A signed hello overrides it, since a
client without the password may have caused the refusal."""
SIGNATURE_BYTES = 16
WAITING_BYTES = 16 << 20
"""The maximum of received bytes of one node that wait for handlers."""

GONE = (1 << 64) - 1
"""In place of a sequence number: the sender has no such link."""

_HEAD = struct.Struct(f">{ID_BYTES}s8sQ")
"""The sender's id, the link's id, the sequence number."""
_FRAMES_AT = _HEAD.size + SIGNATURE_BYTES
_HELLO = struct.Struct(f">{ID_BYTES}sQQ")
"""The node's id, its epoch, the sequence number of the hello."""
_UNSIGNED = bytes(SIGNATURE_BYTES)
_NONCE = struct.Struct(">?xxxQ")
"""The sending side and the sequence number. No nonce is used twice with one key."""

FORGED = Limit("cluster_forged", "", "a message through NATS has no valid signature of its node")


def signature(key: bytes, notice: bytes) -> bytes:
    """Return the signature of a hello, or of the notice that a link is gone."""
    return blake2b(notice, key=key, digest_size=SIGNATURE_BYTES).digest()


def portions(batches: Iterable[bytes], portion_bytes: int) -> Iterator[list[bytes | memoryview]]:
    """Split batches into portions of `portion_bytes`, each a list of pieces; the last one may be smaller."""
    portion: list[bytes | memoryview] = []
    room_bytes = portion_bytes
    for batch in batches:
        rest: bytes | memoryview = batch
        while len(rest) >= room_bytes:
            piece, rest = memoryview(rest)[:room_bytes], memoryview(rest)[room_bytes:]
            yield [*portion, piece]
            portion, room_bytes = [], portion_bytes
        if rest:
            portion.append(rest)
            room_bytes -= len(rest)
    if portion:
        yield portion


class NatsConnection(LinkConnection):
    """The connection of a link through NATS: numbered messages in both directions.

    Args:
        backplane: the backplane of this node.
        to: the id of the other node.
        link_id: eight bytes, the same on both sides.

    Attributes:
        received, sent: the sequence numbers of the next received and the next sent message.
    """

    __slots__ = (
        "_backplane",
        "_cipher",
        "_link_id",
        "_subject",
        "_waiting",
        "_waiting_bytes",
        "received",
        "sent",
        "to",
    )

    def __init__(self, backplane: NatsBackplane, to: bytes, link_id: bytes) -> None:
        Outbox.__init__(self)  # not `LinkConnection.__init__`, since there is no socket to watch
        self.watcher = self.handshake = None
        self.rare = self.no_rare
        self.carry, self.paused, self.life = b"", False, Life.OPEN
        self.joins_in = JOIN_AFTER  # of clients; a link never joins
        self.received_bytes = self.sent = self.received = 0
        self._backplane, self.to, self._link_id = backplane, to, link_id
        self._cipher: AESGCM | None = None
        self._subject = backplane.inbox(to)
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0

    def begin(self, link: Link) -> None:
        """Begin to serve a link."""
        session: Any = LinkSession(link)
        self.link, self.session = link, session

    @property
    def key(self) -> tuple[bytes, bytes]:
        """The ids of the other node and of the link."""
        return self.to, self._link_id

    @property
    def via(self) -> str:
        """See `Transport` of links."""
        return "nats"

    @property
    def processed_bytes(self) -> int:
        """See `Transport` of links."""
        return self.received_bytes - len(self.carry) - self._waiting_bytes

    def signature(self, connects: bool, number: int, content: bytes | memoryview) -> bytes:
        """Return the signature of a message; zeros while the link has no key.

        Args:
            connects: whether the sender is the side that has connected.
            number: the sequence number.
            content: the frames.
        """
        if self._cipher is None:
            if self.link.peer is None:
                return _UNSIGNED
            self._cipher = AESGCM(self.link.session_key)
        return self._cipher.encrypt(_NONCE.pack(connects, number), b"", content)

    # ---- reading

    def arrived(self, number: int, message: bytes) -> None:
        """Process the message `number`, which claims to be from the other node."""
        if self.link.is_proven:
            signed = self.signature(not self.link.connects, number, memoryview(message)[_FRAMES_AT:])
            # In constant time, so that the duration reveals nothing about the signature.
            if not compare_digest(message[_HEAD.size : _FRAMES_AT], signed):
                FORGED.refused(f"a message in the name of node {self.link.number}")
                return
            if number < self.received:  # a replay
                return
        if number != self.received:
            self.link.lose(f"NATS lost {number - self.received} messages; the link is made again")
            return
        size = len(message) - _FRAMES_AT
        if size > PORTION_BYTES:
            self.link.lose(f"a NATS message has {size} bytes; a node sends at most {PORTION_BYTES}")
            return
        if self.exceeds_unauthenticated_bytes(self.received_bytes + size):
            return
        self.received += 1
        self.received_bytes += size
        self._waiting.append(message)
        self._waiting_bytes += size
        if self._waiting_bytes > WAITING_BYTES:
            self.link.lose(
                f"handlers are behind: {WAITING_BYTES >> 20} MiB are queued from NATS; the link is made again"
            )
        elif size < LARGE_BATCH_BYTES:
            self._process_waiting()
        elif len(self._waiting) == 1:  # later, together with further messages: each delivery causes a write
            get_hub().loop.run_callback(self._process_waiting)

    def _process_waiting(self) -> None:
        while self._waiting and not self.paused and not self.life.over:
            # The incomplete frame, followed by the messages that fit into the buffer.
            size = carried = len(self.carry)
            view[:size] = self.carry
            self.carry = b""
            while self._waiting and size + len(self._waiting[0]) <= len(view):
                piece = memoryview(self._waiting.popleft())[_FRAMES_AT:]
                view[size : size + len(piece)] = piece
                size += len(piece)
            self._waiting_bytes += carried  # bytes that are being processed must not be acknowledged
            self.feed(size)
            self._waiting_bytes -= size
        if not self.life.over:
            self.link.heard(self.link.node.clock_s())

    def on_data_waiting(self) -> None:
        """Continue after a pause."""
        super().on_data_waiting()
        self._process_waiting()

    def pause(self) -> None:
        """See `RawConnection`."""
        self.paused = True

    def resume_now(self) -> None:
        """See `RawConnection`."""
        if self.paused and not self.life.over:
            self.paused = False
            self.on_data_waiting()

    # ---- writing

    def put_view(self, view: memoryview) -> None:
        """See `Outbox`."""
        self.put(bytes(view))

    def flush(self) -> None:
        """Publish the queue in portions."""
        queue, self.queue = self.queue, []
        for pieces in portions(queue, self._backplane.portion_bytes):
            head = _HEAD.pack(self._backplane.node.id, self._link_id, self.sent)
            content = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            signed = self.signature(self.link.connects, self.sent, content)
            self.sent += 1
            if not self._backplane.client.publish_pieces(self._subject, [head, signed, content]):
                get_hub().loop.run_callback(self._queue_is_full)  # not at once; see `LinkConnection._drop_over_budget`
                return

    @property
    def carrier(self) -> Outbox:
        """See `Outbox`."""
        return self._backplane.client.outbox

    def _queue_is_full(self) -> None:
        self.link.lose("the queue for NATS is full; the link is made again", Drop.LINK_SLOW)

    # ---- the end

    def close(self, in_order: bool) -> None:
        """See `Transport` of links."""
        if self.life.over:
            return
        if in_order and self.queue:
            self.flush()
        self.life = transition(self.life, Life.CLOSED)
        self.queue, self.carry = [], b""
        self._waiting.clear()
        self._backplane.closed(self)


class NatsBackplane:
    """Finds the other nodes through NATS and makes a link to each.

    Args:
        node: this node.
        servers: the NATS servers, see `smqrt.nats.connect`.
        site: a word of a subject; only nodes of the same site find each other.
        hello_s: seconds between hellos.
        options: options of the client, see `smqrt.cluster.nats.options.NatsOptions`.

    Attributes:
        client: the NATS client.
    """

    def __init__(self, node: Node, servers: str, site: str = "smqrt", hello_s: float = HELLO_S, **options: Any) -> None:
        self.node, self._site, self._hello_s = node, site, hello_s
        self._key = blake2b(b"smqrt nats", key=node.key, digest_size=32).digest()
        self._connections: dict[tuple[bytes, bytes], NatsConnection] = {}
        self._newest_hellos: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        """The newest hello of each linked node: its epoch and its sequence number."""
        self._hellos = 0
        self._refused_until_s: OrderedDict[bytes, float] = OrderedDict()
        """Nodes that are not contacted after a refusal, and until when."""
        self._announced_gone: set[bytes] = set()
        """Links whose end was announced since the last hello."""
        self._broken: list[tuple[bytes, bytes]] = []
        """Links that ended with the connection to NATS."""
        self._hello_at_s = 0.0
        """When the last hello was published."""
        self.client = nats.connect(servers, self._on_state, echo=False, reconnect_queue_bytes=0, **options)
        loop: Any = get_hub().loop
        self._timer = loop.timer(hello_s, hello_s)
        self._timer.ref = False  # the timer alone does not keep the event loop running

    def begin(self) -> None:
        """Subscribe, and publish hellos."""
        self.client.subscribe(f"smqrt.{self._site}.hello", self._on_hello)
        self.client.subscribe(self.inbox(self.node.id), self._on_message)
        self._timer.start(self.send_hello)
        self.send_hello()

    def inbox(self, node_id: bytes) -> str:
        """Return the subject of messages for a node."""
        return f"smqrt.{self._site}.n.{node_id.hex()}"

    @property
    def portion_bytes(self) -> int:
        """The content of one NATS message, without its head."""
        return min(PORTION_BYTES, max(self.client.max_payload_bytes - _FRAMES_AT, _FRAMES_AT))

    # ---- finding nodes

    def send_hello(self) -> None:
        """Publish a hello, if there is a connection to NATS."""
        self._announced_gone.clear()
        if self.client.connected and self._timer.active:
            self._hello_at_s = monotonic()
            self.client.publish(f"smqrt.{self._site}.hello", self.hello())

    def hello(self) -> bytes:
        """Return the next hello of this node."""
        self._hellos += 1
        hello = _HELLO.pack(self.node.id, self.node.epoch, self._hellos)
        return hello + signature(self._key, hello)

    def _on_state(self, state: NatsState, why: str) -> None:
        if state is NatsState.CONNECTED:
            get_hub().loop.run_callback(self._reconnected)
            return
        for connection in list(self._connections.values()):
            if connection.link.state is LinkState.UP and len(self._broken) < MAX_NODE:
                self._broken.append(connection.key)
            connection.link.lose(f"no connection to NATS: {why}")

    def _reconnected(self) -> None:
        """Make the links again that ended with the connection to NATS.

        If the other node has kept its connection to NATS, it still sends over the old link. Therefore announce its end.
        """
        self.send_hello()
        broken, self._broken = self._broken, []
        for node_id, link_id in broken:
            self._send_gone(node_id, link_id)
            if node_id not in self.node.links:
                self._make_link(node_id)

    def _on_hello(self, subject: bytes, payload: bytes, reply: bytes, headers: bytes) -> None:
        if len(payload) != _HELLO.size + SIGNATURE_BYTES or self.node.closed:
            return
        node_id, epoch, count = _HELLO.unpack_from(payload)
        is_signed = compare_digest(payload[_HELLO.size :], signature(self._key, payload[: _HELLO.size]))
        link = self.node.links.get(node_id)
        if link is None:
            is_refused = self._refused_until_s.get(node_id, 0.0) > monotonic()
            if node_id != self.node.id and (is_signed or not is_refused):
                self._make_link(node_id)
        elif is_signed and (epoch, count) > self._newest_hellos.get(node_id, (0, 0)):  # otherwise it is a replay
            assert link.peer is not None
            self._newest_hellos[node_id] = epoch, count
            self._newest_hellos.move_to_end(node_id)
            if len(self._newest_hellos) > MAX_NODE:
                self._newest_hellos.popitem(last=False)
            if epoch > link.peer.epoch:  # the node was started again
                self._make_link(node_id)
            elif epoch == link.peer.epoch and isinstance(link.transport, NatsConnection):
                link.heard(self.node.clock_s())

    def _make_link(self, node_id: bytes) -> None:
        """Make a link if this node has the smaller id; otherwise publish a hello, so that the other node does."""
        unfinished = (one.link for one in self._connections.values() if one.to == node_id and one.link.connects)
        if any(link.state is not LinkState.UP for link in unfinished):
            return
        if self.node.id < node_id:
            self._begin(node_id, self.node.random(8), connects=True)
        elif monotonic() - self._hello_at_s > self._hello_s / 10:
            self.send_hello()

    def _begin(self, node_id: bytes, link_id: bytes, connects: bool) -> NatsConnection:
        connection = NatsConnection(self, node_id, link_id)
        self._connections[node_id, link_id] = connection
        link = self.node.connected(connection, connects, f"node {node_id.hex()} through NATS")
        connection.begin(link)
        return connection

    # ---- links

    def _on_message(self, subject: bytes, payload: bytes, reply: bytes, headers: bytes) -> None:
        if len(payload) < _FRAMES_AT or self.node.closed:
            return
        node_id, link_id, number = _HEAD.unpack_from(payload)
        connection = self._connections.get((node_id, link_id))
        if number == GONE:
            if connection is None:
                return
            if compare_digest(payload[_HEAD.size :], signature(self._key, payload[: _HEAD.size])):
                connection.link.lose("the other node has lost this link; it is made again")
                self._make_link(node_id)
            else:
                FORGED.refused("the notice that a link is gone")
            return
        if connection is None:
            if number:  # not the first message, so the link has ended here
                self._send_gone(node_id, link_id)
                return
            connection = self._begin(node_id, link_id, connects=False)
        connection.arrived(number, payload)

    def _send_gone(self, node_id: bytes, link_id: bytes) -> None:
        """Announce that a link has ended here, since the other node may not have noticed that."""
        if len(self._announced_gone) >= MAX_NODE or link_id in self._announced_gone:
            return
        self._announced_gone.add(link_id)
        head = _HEAD.pack(self.node.id, link_id, GONE)
        self.client.publish(self.inbox(node_id), head + signature(self._key, head))

    def closed(self, connection: NatsConnection) -> None:
        """Remove the connection of a link that has ended."""
        if self._connections.get(connection.key) is connection:
            del self._connections[connection.key]
        if connection.link.state is LinkState.CLOSED and connection.link.is_refused:
            self._refused_until_s.pop(connection.to, None)
            self._refused_until_s[connection.to] = monotonic() + RETRY_S
            if len(self._refused_until_s) > MAX_NODE:  # a client can claim to be any number of nodes
                self._refused_until_s.popitem(last=False)

    def close(self) -> None:
        """Stop publishing hellos, and close the client."""
        self._timer.stop()
        self._timer.close()
        self.client.close()
