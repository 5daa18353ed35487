"""Connections of links: sockets and NATS.

The kernels split what arrives into runs, which are delivered. What is sent goes out once per turn of the event loop.
"""

from __future__ import annotations

import logging
import struct
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from hmac import compare_digest
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from gevent import Timeout, get_hub

from smqrt.broker.outbox import Drop, Outbox, QueuedMemory, backlog
from smqrt.cluster import nats
from smqrt.cluster.link import Link, LinkState
from smqrt.cluster.nats.client import NatsState
from smqrt.cluster.node import QUEUE_BYTES, Node
from smqrt.errors import CloseReason, ProtocolError
from smqrt.settings.limits import Limit
from smqrt.smq import data_path
from smqrt.smq.connection import (
    LARGE_RUN_BYTES,
    MAX_RECEIVE_BYTES,
    MIN_RECEIVE_BYTES,
    READ,
    RUNS_AT_ONCE,
    RawConnection,
    chars,
    ends,
    frames,
    scan,
    view,
)
from smqrt.smq.connection_kinds import OverTls
from smqrt.transport.tls import TlsTransport, Transport, half_close
from smqrt.wire.cluster_packets import ID_BYTES
from smqrt.wire.connection_state import Life, moved
from smqrt.wire.smq import MAX_NODE, PUBLISH_HEADER_BYTES

log = logging.getLogger("smqrt")

MAX_UNAUTHENTICATED_BYTES = 8192
"""What may arrive before the other side has proved the password; a node sends less until then."""
_NEVER_S = float("inf")


class _DiscardingQueue(list[bytes]):
    """The queue of a closed connection: the link counts what it loses."""

    def append(self, run: bytes) -> None:
        """Keep nothing."""


class LinkSession:
    """What `RawConnection` needs of a client's session, for a link."""

    meter = None
    partitions = None

    def __init__(self, link: Link) -> None:
        self.link = link

    def disconnect(self, reason: CloseReason, text: bytes | None = None, detail: str = "") -> None:
        """End the link: its connection is broken, or the other side reads nothing."""
        slow = reason is CloseReason.SLOW_CONSUMER
        why = "the other node has stopped reading" if slow else reason.value
        self.link.lose(why, Drop.LINK_SLOW if slow else Drop.LINK_LOST)

    def fail(self, error: ProtocolError) -> None:
        """End the link: the other side broke a rule."""
        self.link.lose(str(error))


class LinkConnection(RawConnection):
    """A connection to another node; the transport of a `Link`.

    Args:
        sock: connected and non-blocking.

    Attributes:
        link: the link over it.
        received_bytes: bytes received, without those being processed.
    """

    __slots__ = ("link", "received_bytes")
    link: Link

    def __init__(self, sock: Transport) -> None:
        # Priority 1: links are read before clients. When a client of another worker has its answer, this worker must
        # have what that worker has sent, before a client here can ask for it.
        super().__init__(sock, get_hub().loop.io(sock.fileno(), READ, priority=1))
        self.handshake = None
        self.life = Life.OPEN
        self.budget_bytes = QUEUE_BYTES
        self.received_bytes = 0

    @property
    def outbox(self) -> LinkConnection:
        """See `Transport` of links."""
        return self

    @property
    def processed_bytes(self) -> int:
        """See `Transport` of links."""
        return self.received_bytes - len(self.carry)

    @property
    def via(self) -> str:
        """See `Transport` of links."""
        try:
            address: Any = self.transport.getpeername()
        except OSError:
            return "closed"
        if isinstance(address, str | bytes):
            return "unix"
        host, port = address[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def serve(self, link: Link, data: bytes = b"") -> None:
        """Begin to read; `data` has arrived already."""
        self.link = link
        self.received_bytes = len(data)
        session: Any = LinkSession(link)
        if link.state is not LinkState.CLOSED and not self.exceeds_unauthenticated_bytes(len(data)):
            self.start(session, data)

    def exceeds_unauthenticated_bytes(self, received_bytes: int) -> bool:
        """End the link of an unauthenticated peer that has sent too much; return whether it has."""
        if self.link.is_proven or received_bytes <= MAX_UNAUTHENTICATED_BYTES:
            return False
        self.link.lose(
            f"peer sent more than {MAX_UNAUTHENTICATED_BYTES >> 10} KiB before authenticating; it is not an smqrt node"
        )
        return True

    # ---- reading

    def on_readable(self) -> None:
        """See `RawConnection.on_readable`."""
        carry = self.carry
        held, size = len(carry), self.receive_bytes
        try:
            if held:
                view[:held] = carry
                got = self.sock.recv_into(view[held:], size)
            else:
                got = self.sock.recv_into(view, size)
        except BlockingIOError:
            return
        except OSError:
            self.lost(CloseReason.READ_FAILED)
            return
        if not got:
            self.lost(CloseReason.PEER_CLOSED)
            return
        if got == size:
            self.receive_bytes = min(size << 1, MAX_RECEIVE_BYTES)
        elif size > MIN_RECEIVE_BYTES and got < size >> 2:
            self.receive_bytes = size >> 1
        self.carry = b""
        self.received_bytes -= held  # what is being processed must not be acknowledged
        if self.exceeds_unauthenticated_bytes(self.received_bytes + held + got):
            return
        self.feed(held + got)
        self.received_bytes += held + got
        self.link.heard(self.link.node.clock_s())

    def on_data_waiting(self) -> None:
        """See `RawConnection.on_data_waiting`."""
        held = len(self.carry)
        self.received_bytes -= held  # what is being processed must not be acknowledged
        super().on_data_waiting()
        self.received_bytes += held
        if not self.life.over:
            self.link.heard(self.link.node.clock_s())

    def _receive_more(self) -> None:
        held = len(self.carry)
        super()._receive_more()
        self.received_bytes += len(self.carry) - held

    def route(self, size: int) -> int:
        """Process the frames in `chars[:size]`; return the number of bytes processed."""
        try:
            return self._work_off(size)
        except ProtocolError as error:
            self.link.lose(str(error))
        except (Exception, Timeout):
            log.exception("error while a message of another node was delivered; the link is closed")
            self.lost(CloseReason.HOOK_FAILED)
        return size

    def _work_off(self, size: int) -> int:
        if backlog or (size >= LARGE_RUN_BYTES and time() >= data_path.defer_at_s()):
            self.defer()
            return 0
        runs, used, bad = scan(size, 0)
        until_s = data_path.defer_at_s() if runs > RUNS_AT_ONCE else _NEVER_S
        at = 0
        for first in range(0, runs, RUNS_AT_ONCE):
            if runs > RUNS_AT_ONCE and time() >= until_s:
                self.defer()
                return at
            last = min(first + RUNS_AT_ONCE, runs)
            for end, count in zip(ends[first:last].tolist(), frames[first:last].tolist(), strict=True):
                if chars[at + 2] != b"\x08":  # u16 length, u8 type: no Publish
                    self.link.control(chars[at + 2 : end])
                    waits: bool | None = False
                    if end - at >= LARGE_RUN_BYTES and time() >= data_path.defer_at_s():
                        self.defer()  # 64 KiB of clients or topics are up to 20 ms of work
                        return size if self.life.over else end
                else:
                    waits = self._deliver(at, end, count)
                if self.life.over:
                    return size
                if waits:
                    self.pause()
                    return end
                at = end
        if bad:
            raise ProtocolError(CloseReason.SHORT_PACKET)
        return used

    def _deliver(self, at: int, end: int, count: int) -> bool | None:
        remote = self.link.remote
        if remote is None:
            self.link.stray()
            return False
        if end - at < PUBLISH_HEADER_BYTES:
            raise ProtocolError(CloseReason.SHORT_PACKET)
        destination = chars[at + 3 : at + 7]  # u16 length, u8 type, u32 tid
        route = remote.routes.get(destination) or remote.resolve(destination)
        if count > 1:
            remote.count_batch(destination, count - 1)
        if end - at < LARGE_RUN_BYTES:
            return route.deliver(chars[at:end])
        return route.deliver_view(view[at:end])

    # ---- writing

    def held(self, run: bytes) -> None:
        """Account for a queued run. A link drops no single messages: over its limit it ends."""
        self.queued_bytes += len(run)
        QueuedMemory.total_bytes += len(run)
        self._drop_over_budget()

    def _drop_over_budget(self) -> None:
        if self.queued_bytes > self.budget_bytes and not self.life.over:
            # Not at once: the caller may be in a loop over the runs of this turn, and has more to put.
            get_hub().loop.run_callback(self._give_up)

    def _give_up(self) -> None:
        if not self.life.over and self.queued_bytes > self.budget_bytes:
            waiting = f"the other node is too slow: {self.queued_bytes >> 20} MiB are queued for it"
            self.link.lose(f"{waiting}; the link is made again", Drop.LINK_SLOW)

    # ---- the end

    def close(self, in_order: bool) -> None:
        """See `Transport` of links."""
        if self.life.over:
            return
        sends = in_order and self.life is not Life.BLOCKED
        if sends:
            self._flush_before_close(CloseReason.SHUTDOWN)
        if self.life is Life.BLOCKED:
            self._unblock()
        self.queue = _DiscardingQueue()
        self.life = moved(self.life, Life.DRAINING if sends else Life.CLOSED)
        data_path.unblocked(self)
        self.watcher.stop()
        if self.writer is not None:
            self.writer.stop()
            self.writer.close()
        if sends:
            half_close(self, self.transport, self.watcher)
        else:
            self.watcher.close()
            self.sock.close()


if TYPE_CHECKING:
    _TlsLink = LinkConnection
else:

    class _TlsLink(OverTls, LinkConnection):
        """A connection to another node over TLS."""

        __slots__ = ()


def connection_of(sock: Transport) -> LinkConnection:
    """Return the connection of a link over `sock`."""
    return _TlsLink(sock) if type(sock) is TlsTransport else LinkConnection(sock)


# ---- Links through NATS
#
#     smqrt.<site>.hello     each node publishes a hello every second: its id, its start time, a sequence number
#     smqrt.<site>.n.<id>    messages for one node: the sender's id, the link, a sequence number, then bytes
#
# NATS keeps the order of what one connection publishes to a subject, and drops silently what it cannot deliver. A gap
# in the sequence numbers shows that, and the link is made again. The password is proved on each link as everywhere
# else.
#
# Any client with rights to the subjects can publish there in the name of any node. So each message has a signature of
# 16 bytes. On a link it is GMAC with a key that only the two sides have, over the side, the sequence number and all
# bytes. A hello, and the notice that a link is gone, have BLAKE2b with a key that all nodes have. GMAC takes 3 us for
# 64 KiB, BLAKE2b 49. A message with a wrong signature ends no link and keeps none alive. Before the password is proved
# it is processed, so that a node with another password gets an answer. Until then the link is one of
# `MAX_UNAUTHENTICATED`.


PORTION_BYTES = 64 << 10
"""The maximum content of a NATS message: for larger ones its server clears more memory, for each."""
HELLO_S = 1.0
RETRY_S = 10.0
"""How long a node is not contacted after a refusal on either side, unless its hello is signed: a client without the
password may have caused the refusal."""
SIGNATURE_BYTES = 16
WAITING_BYTES = 16 << 20
"""What may be queued of one node, for handlers that are behind."""

GONE = (1 << 64) - 1
"""Instead of a sequence number: the sender has no such link."""

_HEAD = struct.Struct(f">{ID_BYTES}s8sQ")
"""The sender's id, the link's id, the sequence number."""
_FRAMES_AT = _HEAD.size + SIGNATURE_BYTES
_HELLO = struct.Struct(f">{ID_BYTES}sQQ")
"""The node's id, its epoch, the sequence number of the hello."""
_UNSIGNED = bytes(SIGNATURE_BYTES)
_NONCE = struct.Struct(">?xxxQ")
"""The sending side and the sequence number: no two messages have the same with one key."""

FORGED = Limit("cluster_forged", "", "a message through NATS has no valid signature of its node")


def signature(key: bytes, notice: bytes) -> bytes:
    """Return the signature of a hello, or of the notice that a link is gone."""
    return blake2b(notice, key=key, digest_size=SIGNATURE_BYTES).digest()


def portions(runs: Iterable[bytes], portion_bytes: int) -> Iterator[list[bytes | memoryview]]:
    """Split runs into portions of `portion_bytes`, the last may be smaller; each is a list of pieces."""
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
    """The connection of a link through NATS: numbered messages in both directions.

    Args:
        backplane: the backplane of this node.
        to: the id of the other node.
        link_id: eight bytes, the same on both sides.

    Attributes:
        received, sent: the next sequence numbers of received and of sent messages.
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
        Outbox.__init__(self)  # not that of LinkConnection: there is no socket to watch
        self.watcher = self.writer = self.backlog = self.handshake = None
        self.carry, self.paused, self.torn, self.life = b"", False, 0, Life.OPEN
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
        """The other node's id and the link's."""
        return self.to, self._link_id

    @property
    def via(self) -> str:
        """See `Transport` of links."""
        return "nats"

    @property
    def processed_bytes(self) -> int:
        """See `Transport` of links."""
        return self.received_bytes - len(self.carry) - self._waiting_bytes

    def signature(self, connects: bool, place: int, content: bytes | memoryview) -> bytes:
        """Return the signature of a message; zeros while the link has no key.

        Args:
            connects: whether the sender is the side that has connected.
            place: the sequence number.
            content: the frames.
        """
        if self._cipher is None:
            if self.link.peer is None:
                return _UNSIGNED
            self._cipher = AESGCM(self.link.session_key)
        return self._cipher.encrypt(_NONCE.pack(connects, place), b"", content)

    # ---- reading

    def arrived(self, place: int, message: bytes) -> None:
        """Process a message in the name of the other node."""
        if self.link.is_proven and not self._is_next(place, message):
            return
        if place != self.received:
            self.link.lose(f"NATS lost {place - self.received} messages; the link is made again")
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
        elif size < LARGE_RUN_BYTES:
            self._work_off_waiting()
        elif len(self._waiting) == 1:  # later, with what else has arrived: each delivery is a write
            get_hub().loop.run_callback(self._work_off_waiting)

    def _is_next(self, place: int, message: bytes) -> bool:
        """Return whether a message is signed by the other node, and is not a replay."""
        signed = self.signature(not self.link.connects, place, memoryview(message)[_FRAMES_AT:])
        # In constant time, so that a forger learns nothing from the duration.
        if not compare_digest(message[_HEAD.size : _FRAMES_AT], signed):
            FORGED.refused(f"a message in the name of node {self.link.number}")
            return False
        return place >= self.received

    def _work_off_waiting(self) -> None:
        while self._waiting and not self.paused and not self.life.over:
            # What is carried over, and behind it as many messages as the buffer takes.
            size = carried = len(self.carry)
            view[:size] = self.carry
            self.carry = b""
            while self._waiting and size + len(self._waiting[0]) <= len(view):
                piece = memoryview(self._waiting.popleft())[_FRAMES_AT:]
                view[size : size + len(piece)] = piece
                size += len(piece)
            self._waiting_bytes += carried  # what is being processed must not be acknowledged
            self.feed(size)
            self._waiting_bytes -= size
        if not self.life.over:
            self.link.heard(self.link.node.clock_s())

    def on_data_waiting(self) -> None:
        """Continue after a pause."""
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
        self.life = moved(self.life, Life.CLOSED)
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
        options: of the client, see `smqrt.cluster.nats.options.NatsOptions`.

    Attributes:
        client: the NATS client.
    """

    def __init__(self, node: Node, servers: str, site: str = "smqrt", hello_s: float = HELLO_S, **options: Any) -> None:
        self.node, self._site, self._hello_s = node, site, hello_s
        self._key = blake2b(b"smqrt nats", key=node.key, digest_size=32).digest()
        self._connections: dict[tuple[bytes, bytes], NatsConnection] = {}
        self._heard: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        """The newest hello of each linked node: its epoch and its sequence number."""
        self._hellos = 0
        self._left_alone: OrderedDict[bytes, float] = OrderedDict()
        """Nodes that are not contacted after a refusal, and until when."""
        self._told_gone: set[bytes] = set()
        """Links whose end was announced since the last hello."""
        self._broken: list[tuple[bytes, bytes]] = []
        """Links that broke with the connection to NATS."""
        self._answered_s = 0.0
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
        """Publish a hello, if there is a connection."""
        self._told_gone.clear()
        if self.client.connected and self._timer.active:
            self._answered_s = monotonic()
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
        """Make the links again that broke with the connection to NATS.

        The other node's connection to NATS may have lasted. It still sends over the old link then, so announce its end.
        """
        self.send_hello()
        broken, self._broken = self._broken, []
        for node_id, link_id in broken:
            self._send_gone(node_id, link_id)
            if node_id not in self.node.links:
                self._meet(node_id)

    def _on_hello(self, subject: bytes, payload: bytes, reply: bytes, headers: bytes) -> None:
        if len(payload) != _HELLO.size + SIGNATURE_BYTES or self.node.closed:
            return
        node_id, epoch, count = _HELLO.unpack_from(payload)
        is_signed = compare_digest(payload[_HELLO.size :], signature(self._key, payload[: _HELLO.size]))
        link = self.node.links.get(node_id)
        if link is None:
            is_left_alone = self._left_alone.get(node_id, 0.0) > monotonic()
            if node_id != self.node.id and (is_signed or not is_left_alone):
                self._meet(node_id)
        elif is_signed and (epoch, count) > self._heard.get(node_id, (0, 0)):  # else it is a replay
            self._is_alive(link, epoch, count)

    def _is_alive(self, link: Link, epoch: int, count: int) -> None:
        """Record a signed hello of a linked node."""
        assert link.peer is not None
        self._heard[link.peer.id] = epoch, count
        self._heard.move_to_end(link.peer.id)
        if len(self._heard) > MAX_NODE:
            self._heard.popitem(last=False)
        if epoch > link.peer.epoch:
            self._meet(link.peer.id)
        elif epoch == link.peer.epoch and isinstance(link.transport, NatsConnection):
            link.heard(self.node.clock_s())

    def _meet(self, node_id: bytes) -> None:
        """Make a link if this node has the smaller id; otherwise publish a hello, so that the other one does."""
        under_way = (one.link for one in self._connections.values() if one.to == node_id and one.link.connects)
        if any(link.state is not LinkState.UP for link in under_way):
            return
        if self.node.id < node_id:
            self._begin(node_id, self.node.random(8), connects=True)
        elif monotonic() - self._answered_s > self._hello_s / 10:
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
        node_id, link_id, place = _HEAD.unpack_from(payload)
        connection = self._connections.get((node_id, link_id))
        if place == GONE:
            if connection is not None and self._is_signed_by_a_node(payload):
                connection.link.lose("the other node lost this link; it is made again")
                self._meet(node_id)
            return
        if connection is None:
            if place:
                self._send_gone(node_id, link_id)
                return
            connection = self._begin(node_id, link_id, connects=False)
        connection.arrived(place, payload)

    def _is_signed_by_a_node(self, payload: bytes) -> bool:
        is_signed = compare_digest(payload[_HEAD.size :], signature(self._key, payload[: _HEAD.size]))
        if not is_signed:
            FORGED.refused("the notice that a link is gone")
        return is_signed

    def _send_gone(self, node_id: bytes, link_id: bytes) -> None:
        """Announce that a link has ended here: the other node may not have noticed it."""
        if len(self._told_gone) >= MAX_NODE or link_id in self._told_gone:
            return
        self._told_gone.add(link_id)
        head = _HEAD.pack(self.node.id, link_id, GONE)
        self.client.publish(self.inbox(node_id), head + signature(self._key, head))

    def closed(self, connection: NatsConnection) -> None:
        """Remove the connection of a link that has ended."""
        if self._connections.get(connection.key) is connection:
            del self._connections[connection.key]
        if connection.link.state is LinkState.CLOSED and connection.link.is_refused:
            self._left_alone.pop(connection.to, None)
            self._left_alone[connection.to] = monotonic() + RETRY_S
            if len(self._left_alone) > MAX_NODE:  # a client can pretend to be any number of nodes
                self._left_alone.popitem(last=False)

    def close(self) -> None:
        """Stop publishing hellos, and close the client."""
        self._timer.stop()
        self._timer.close()
        self.client.close()
