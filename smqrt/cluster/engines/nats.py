"""Nodes that reach each other through NATS: links as over sockets, whose bytes travel as messages of NATS core.

    smqrt.<site>.hello     each node says there, every second, that it is alive: who, since when, which such word it is
    smqrt.<site>.n.<id>    what is for one node: who sends it, which link, its place in the order, then bytes

NATS keeps the order of what one connection publishes to a subject, and loses what it can't deliver without a word: the
place in the order shows that, and the link begins anew. The password is proved on each link as everywhere else.

Everybody with rights to the subjects can say anything there in anybody's name. So each message is signed with 16 bytes:
on a link by GMAC with the key that only its two sides have, over its side, its place and all of its bytes; a hello, and
the word that a link is gone, by BLAKE2b with a key that all nodes have. GMAC takes 3 us for 64 KiB, BLAKE2b 49. What is
not signed as it should be ends no link and keeps none alive; before the password is proved it is heard, since a node
with another password is to be told so, but then it is one of a hundred strangers.
"""

from __future__ import annotations

import logging
import struct
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from hmac import compare_digest
from typing import Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from gevent import get_hub

from smqrt.broker.outbox import Drop, Outbox
from smqrt.cluster import nats
from smqrt.cluster.engines.link_connection import LinkConnection, LinkSession
from smqrt.cluster.link import Link, LinkState
from smqrt.cluster.nats.client import NatsState
from smqrt.cluster.node import Node
from smqrt.settings.limit_register import Limit
from smqrt.smq.connection import LARGE_RUN_BYTES, view
from smqrt.wire.connection_state import Life, moved
from smqrt.wire.link_packets import ID_BYTES
from smqrt.wire.smq import MAX_NODE

log = logging.getLogger("smqrt")

PORTION_BYTES = 64 << 10
"""A message of NATS carries so much at most: larger ones cost its server more, in memory that it clears for each."""
HELLO_S = 1.0
SILENCE_S = 3.0
PING_S = 2.0
RETRY_S = 10.0
"""A node that refused a link, or was refused one, is left alone for so long, unless it says with a signature that it is
there: whoever does not know the password could have had it refused."""
SIGNATURE_BYTES = 16
WAITING_BYTES = 16 << 20
"""What may wait here for handlers that are behind, of one node."""

GONE = (1 << 64) - 1
"""In the place of a place in the order: the sender has no such link."""

_HEAD = struct.Struct(f">{ID_BYTES}s8sQ")
_FRAMES_AT = _HEAD.size + SIGNATURE_BYTES
_HELLO = struct.Struct(f">{ID_BYTES}sQQ")
_UNSIGNED = bytes(SIGNATURE_BYTES)
_NONCE = struct.Struct(">?xxxQ")
"""Which side says it, and its place: each once with a key."""

FORGED = Limit("cluster_forged", "", "a message through NATS is not signed by the node in whose name it comes")


def signature(key: bytes, word: bytes) -> bytes:
    """What who knows `key` puts behind a hello, or the word that a link is gone."""
    return blake2b(word, key=key, digest_size=SIGNATURE_BYTES).digest()


def portions(runs: Iterable[bytes], portion_bytes: int) -> Iterator[list[bytes | memoryview]]:
    """Cuts runs into portions, each a list of pieces; all but the last are of that size."""
    portion: list[bytes | memoryview] = []
    room_bytes = portion_bytes
    for run in runs:
        rest: bytes | memoryview = run
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
    """The connection of a link through NATS: both directions are messages with a place in an order.

    Args:
        backplane: of this node.
        to: the id of the other node.
        link_id: eight bytes, the same on both sides.
    """

    __slots__ = ("_backplane", "_cipher", "_link_id", "_subject", "_waiting", "_waiting_bytes", "came", "sent", "to")

    def __init__(self, backplane: NatsBackplane, to: bytes, link_id: bytes) -> None:
        Outbox.__init__(self)
        self.watcher = self.writer = self.backlog = self.handshake = None
        self.carry, self.paused, self.torn, self.life = b"", False, 0, Life.OPEN
        self.received_bytes = self.sent = self.came = 0
        self._backplane, self.to, self._link_id = backplane, to, link_id
        self._cipher: AESGCM | None = None
        self._subject = backplane.inbox(to)
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0

    def begin(self, link: Link) -> None:
        """Serve a link."""
        session: Any = LinkSession(link)
        self.link, self.session = link, session

    @property
    def key(self) -> tuple[bytes, bytes]:
        """The other node's id and the link's."""
        return self.to, self._link_id

    @property
    def via(self) -> str:
        """See `Transport` of links."""
        return "nats"

    @property
    def worked_off_bytes(self) -> int:
        """See `Transport` of links."""
        return self.received_bytes - len(self.carry) - self._waiting_bytes

    def signature(self, connects: bool, place: int, content: bytes | memoryview) -> bytes:
        """What the side that connects, or the other one, puts behind the head of a message; zeros while there is no key
        of the link.
        """
        if self._cipher is None:
            if self.link.peer is None:
                return _UNSIGNED
            self._cipher = AESGCM(self.link.session_key)
        return self._cipher.encrypt(_NONCE.pack(connects, place), b"", content)

    # ---- reading

    def arrived(self, place: int, message: bytes) -> None:
        """A message has come in the name of the other node."""
        if self.link.is_proven and not self._is_next(place, message):
            return
        if place != self.came:
            self.link.lose(f"NATS lost {place - self.came} messages on the way; the link begins anew")
            return
        size = len(message) - _FRAMES_AT
        if size > PORTION_BYTES:
            self.link.lose(f"{size} bytes came through NATS at once, of which no node sends more than {PORTION_BYTES}")
            return
        if self.says_too_much(self.received_bytes + size):
            return
        self.came += 1
        self.received_bytes += size
        self._waiting.append(message)
        self._waiting_bytes += size
        if self._waiting_bytes > WAITING_BYTES:
            self.link.lose("what came through NATS waits for handlers that are behind; the link begins anew")
        elif size < LARGE_RUN_BYTES:
            self._work_off_waiting()
        elif len(self._waiting) == 1:  # what else has come is delivered with it: each delivery is a write
            get_hub().loop.run_callback(self._work_off_waiting)

    def _is_next(self, place: int, message: bytes) -> bool:
        """Whether it is of the other node, and has not come already."""
        signed = self.signature(not self.link.connects, place, memoryview(message)[_FRAMES_AT:])
        if not compare_digest(message[_HEAD.size : _FRAMES_AT], signed):
            FORGED.refused(f"a message in the name of node {self.link.number}")
            return False
        return place >= self.came

    def _work_off_waiting(self) -> None:
        while self._waiting and not self.paused and not self.life.over:
            self._work_off_some()
        if not self.life.over:
            self.link.heard(self.link.node.clock_s())

    def _work_off_some(self) -> None:
        """Work off what is carried, and behind it as many messages as the buffer takes."""
        size = carried = len(self.carry)
        view[:size] = self.carry
        self.carry = b""
        while self._waiting and size + len(self._waiting[0]) <= len(view):
            piece = memoryview(self._waiting.popleft())[_FRAMES_AT:]
            view[size : size + len(piece)] = piece
            size += len(piece)
        self._waiting_bytes += carried  # what is in work is not worked off
        self.feed(size)
        self._waiting_bytes -= size

    def on_data_waiting(self) -> None:
        """Go on after a pause."""
        super().on_data_waiting()
        self._work_off_waiting()

    def pause(self) -> None:
        """See `RawConnection`."""
        self.paused = True

    def go_on(self) -> None:
        """See `RawConnection`."""
        if self.paused and not self.life.over:
            self.paused = False
            self.on_data_waiting()

    # ---- writing

    def put_view(self, view: memoryview) -> None:
        """See `Outbox`."""
        self.put(bytes(view))

    def flush(self) -> None:
        """Publish the queue, in portions."""
        queue, self.queue = self.queue, []
        for pieces in portions(queue, self._backplane.portion_bytes):
            head = _HEAD.pack(self._backplane.node.id, self._link_id, self.sent)
            content = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            signed = self.signature(self.link.connects, self.sent, content)
            self.sent += 1
            if not self._backplane.client.publish_pieces(self._subject, [head, signed, content]):
                get_hub().loop.run_callback(self._refused)
                return

    @property
    def carrier(self) -> Outbox:
        """See `Outbox`."""
        return self._backplane.client.outbox

    def _refused(self) -> None:
        self.link.lose("the queue for NATS is full; the link begins anew", Drop.LINK_SLOW)

    # ---- the end

    def close(self, in_order: bool) -> None:
        """See `Transport` of links."""
        if self.life.over:
            return
        if in_order and self.queue:
            self.flush()
        self.life = moved(self.life, Life.CLOSED)
        self.queue, self.carry = [], b""
        self._waiting.clear()
        self._backplane.closed(self)


class NatsBackplane:
    """Finds the other nodes through NATS, and links this one to each.

    Args:
        node: this one.
        servers: of NATS, see `smqrt.nats.connect`.
        site: nodes of other sites are never met; a word of a subject.
        options: of the client, see `smqrt.cluster.nats.options.NatsOptions`.
        hello_s: seconds between signs of life.
    """

    def __init__(self, node: Node, servers: str, site: str = "smqrt", hello_s: float = HELLO_S, **options: Any) -> None:
        self.node, self._site, self._hello_s = node, site, hello_s
        self._key = blake2b(b"smqrt nats", key=node.key, digest_size=32).digest()
        self._connections: dict[tuple[bytes, bytes], NatsConnection] = {}
        self._heard: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        """The newest word of each node that is linked: since when it is alive, and which word it was."""
        self._said = 0
        self._left_alone: OrderedDict[bytes, float] = OrderedDict()
        self._told_gone: set[bytes] = set()
        self._broken: list[tuple[bytes, bytes]] = []
        self._answered_s = 0.0
        self.client = nats.connect(servers, self._on_state, echo=False, reconnect_queue_bytes=0, **options)
        loop: Any = get_hub().loop
        self._timer = loop.timer(hello_s, hello_s)
        self._timer.ref = False

    def begin(self) -> None:
        """Be there for the others."""
        self.client.subscribe(f"smqrt.{self._site}.hello", self._on_hello)
        self.client.subscribe(self.inbox(self.node.id), self._on_message)
        self._timer.start(self._say_hello)
        self._say_hello()

    def inbox(self, node_id: bytes) -> str:
        """The subject of what is for a node."""
        return f"smqrt.{self._site}.n.{node_id.hex()}"

    @property
    def portion_bytes(self) -> int:
        """What a message of NATS carries, beside its head."""
        return min(PORTION_BYTES, max(self.client.max_payload_bytes - _FRAMES_AT, _FRAMES_AT))

    # ---- who is there

    def _say_hello(self) -> None:
        self._told_gone.clear()
        if self.client.connected and self._timer.active:
            self._answered_s = time.monotonic()
            self.client.publish(f"smqrt.{self._site}.hello", self.hello())

    def hello(self) -> bytes:
        """The next word that this node is alive."""
        self._said += 1
        hello = _HELLO.pack(self.node.id, self.node.epoch, self._said)
        return hello + signature(self._key, hello)

    def _on_state(self, state: NatsState, why: str) -> None:
        if state is NatsState.CONNECTED:
            get_hub().loop.run_callback(self._come_back)
            return
        for connection in list(self._connections.values()):
            if connection.link.state is LinkState.UP and len(self._broken) < MAX_NODE:
                self._broken.append(connection.key)
            connection.link.lose(f"no connection to NATS: {why}")

    def _come_back(self) -> None:
        """Link again the nodes of links that broke with the connection to NATS. Theirs may have held: then they know of
        nothing, and send into links that are gone.
        """
        self._say_hello()
        broken, self._broken = self._broken, []
        for node_id, link_id in broken:
            self._say_gone(node_id, link_id)
            if node_id not in self.node.links:
                self._meet(node_id)

    def _on_hello(self, subject: bytes, payload: bytes, reply: bytes, headers: bytes) -> None:
        if len(payload) != _HELLO.size + SIGNATURE_BYTES or self.node.closed:
            return
        node_id, epoch, said = _HELLO.unpack_from(payload)
        is_signed = compare_digest(payload[_HELLO.size :], signature(self._key, payload[: _HELLO.size]))
        link = self.node.links.get(node_id)
        if link is None:
            if node_id != self.node.id and (is_signed or not self._is_left_alone(node_id)):
                self._meet(node_id)
        elif is_signed and (epoch, said) > self._heard.get(node_id, (0, 0)):
            self._is_alive(link, epoch, said)

    def _is_alive(self, link: Link, epoch: int, said: int) -> None:
        """The node of a link has said so; what was recorded of it counts for nothing."""
        assert link.peer is not None
        self._heard[link.peer.id] = epoch, said
        self._heard.move_to_end(link.peer.id)
        if len(self._heard) > MAX_NODE:
            self._heard.popitem(last=False)
        if epoch > link.peer.epoch:
            self._meet(link.peer.id)
        elif epoch == link.peer.epoch and isinstance(link.transport, NatsConnection):
            link.heard(self.node.clock_s())

    def _is_left_alone(self, node_id: bytes) -> bool:
        return self._left_alone.get(node_id, 0.0) > time.monotonic()

    def _meet(self, node_id: bytes) -> None:
        """The node with the smaller id connects; the other one says that it is there."""
        under_way = (one.link for one in self._connections.values() if one.to == node_id and one.link.connects)
        if any(link.state is not LinkState.UP for link in under_way):
            return
        if self.node.id < node_id:
            self._begin(node_id, self.node.random(8), connects=True)
        elif time.monotonic() - self._answered_s > self._hello_s / 10:
            self._say_hello()

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
        node_id, link_id, place = _HEAD.unpack_from(payload)
        connection = self._connections.get((node_id, link_id))
        if place == GONE:
            if connection is not None and self._is_signed_by_a_node(payload):
                connection.link.lose("the other node lost this link; it begins anew")
                self._meet(node_id)
            return
        if connection is None:
            if place:
                self._say_gone(node_id, link_id)
                return
            connection = self._begin(node_id, link_id, connects=False)
        connection.arrived(place, payload)

    def _is_signed_by_a_node(self, payload: bytes) -> bool:
        is_signed = compare_digest(payload[_HEAD.size :], signature(self._key, payload[: _HEAD.size]))
        if not is_signed:
            FORGED.refused("the word that a link is gone")
        return is_signed

    def _say_gone(self, node_id: bytes, link_id: bytes) -> None:
        """A link has ended here of which the other node does not know: its own connection to NATS never broke."""
        if len(self._told_gone) >= MAX_NODE or link_id in self._told_gone:
            return
        self._told_gone.add(link_id)
        head = _HEAD.pack(self.node.id, link_id, GONE)
        self.client.publish(self.inbox(node_id), head + signature(self._key, head))

    def closed(self, connection: NatsConnection) -> None:
        """A link has ended."""
        if self._connections.get(connection.key) is connection:
            del self._connections[connection.key]
        if connection.link.state is LinkState.CLOSED and connection.link.is_refused:
            self._leave_alone(connection.to)

    def _leave_alone(self, node_id: bytes) -> None:
        """For a while; strangers can claim to be any number of nodes."""
        self._left_alone.pop(node_id, None)
        self._left_alone[node_id] = time.monotonic() + RETRY_S
        if len(self._left_alone) > MAX_NODE:
            self._left_alone.popitem(last=False)

    def close(self) -> None:
        """Be there no more."""
        self._timer.stop()
        self._timer.close()
        self.client.close()
