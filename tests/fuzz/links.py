"""Fuzz targets of links between nodes: a stranger's bytes, those of a node that knows the password, and what comes
through NATS; through the real connection, link and hub.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from smqrt.broker.broker import Broker
from smqrt.broker.mqtt.devices import Devices
from smqrt.broker.mqtt.filters import Options
from smqrt.broker.outbox import Outbox, QueuedMemory
from smqrt.broker.state import Hooks
from smqrt.broker.topics import HubLimits
from smqrt.cluster.clustered_broker import ClusteredBroker
from smqrt.cluster.engines import nats_connections
from smqrt.cluster.engines.connections import LinkConnection
from smqrt.cluster.engines.nats_connections import NatsBackplane
from smqrt.cluster.link import Link, LinkState
from smqrt.cluster.node import Node
from smqrt.errors import ProtocolError
from smqrt.smq import data_path
from smqrt.smq.connection import RawConnection
from smqrt.wire import cluster_mqtt, cluster_packets, smq
from smqrt.wire import cluster_packets as wire
from smqrt.wire.cluster_mqtt import Numbered, Wanted, WireMessages, WireRetained
from smqrt.wire.cluster_packets import Announced, Hello, LinkType, Packet
from smqrt.wire.connection_state import Life
from smqrt.wire.smq import NameNumbers
from tests.broker.memory_clients import Ear
from tests.fuzz import connections

KEY = b"k" * 32
NODE_ID, PEER_ID, NONCE = b"n" * wire.ID_BYTES, b"p" * wire.ID_BYTES, bytes(wire.NONCE_BYTES)
NUMBER, PEER_NUMBER = 2, 5
VERSIONS = wire.OLDEST_VERSION, wire.VERSION
OWN = wire.hello(Hello(*VERSIONS, NODE_ID, 1, NONCE))
PEER = wire.hello(Hello(*VERSIONS, PEER_ID, 2, NONCE))
HUB = b"hub"
MAX_NAMES = 64


def _draws() -> Callable[[int], bytes]:
    """What the node draws: its numbers, its id, its nonces."""
    drawn = itertools.count(NUMBER)
    fixed = {wire.ID_BYTES: NODE_ID, wire.NONCE_BYTES: NONCE}
    return lambda count: next(drawn).to_bytes(2, "big") if count == 2 else fixed.get(count, b"x" * count)


def _node() -> tuple[Node, ClusteredBroker, Ear]:
    """A node with a hub, a client that subscribes and observes, and a topic with a number of its own."""
    numbers = itertools.count(1000)
    broker = Broker(
        Hooks(),
        random_u32=lambda: next(numbers),
        encode=data_path.encode,
        clock=lambda: 0.0,
        limits=HubLimits(names=MAX_NAMES),
    )
    broker.call_later = lambda delay_s, function: None
    _subscribe(Devices(broker))
    node = Node(KEY, random=_draws(), clock_s=lambda: 1.0, clock_ns=lambda: 1)
    member = node.join(broker, HUB.decode())
    broker.create(b"own", 17)
    ear = Ear()
    session = connections.Session(broker, ear, 5)
    session.control(smq.connect(b"uid-0001"))
    session.control(smq.with_name(smq.Type.SUBSCRIBE, b"news"))
    session.control(smq.with_id(smq.Type.OBSERVE, broker.create(b"news")))
    member.counts.count_all()
    return node, member, ear


def _subscribe(devices: Devices) -> None:
    device, _ = devices.open("sleeper", True)
    device.expiry_s = 100
    for _ in devices.subscribe(device, "house/+/temp", Options(1)):
        pass
    devices.left(device)


class _Link(LinkConnection):
    """A connection that the target reads."""

    __slots__ = ()

    def __init__(self, peer: Any) -> None:
        RawConnection.__init__(self, peer, connections.Watcher())
        self.handshake, self.life, self.received_bytes = None, Life.OPEN, 0

    @property
    def via(self) -> str:
        return "the target"


@contextmanager
def _errors_count() -> Iterator[None]:
    logger = logging.getLogger("smqrt")
    logger.addHandler(connections.ERRORS)
    try:
        yield
    finally:
        logger.removeHandler(connections.ERRORS)


def _converse(first: list[bytes], data: bytes) -> None:
    with _errors_count():
        connections.begin_turn()
        node, member, ear = _node()
        peer = connections.Peer(itertools.chain(first, connections.pieces(data)))
        connection = _Link(peer)
        link = node.connected(connection, False, "fuzz")
        connection.serve(link)
        while not connection.life.over and not peer.is_silent:
            connection.on_readable()
            connections.settle()
            while connection.paused and not connection.life.over:
                data_path.deferred_reads.clear()
                connections.begin_turn()
                connection.resume_now()
                connections.settle()
        _end(link, node, member, ear)


def _end(link: Link, node: Node, member: ClusteredBroker, ear: Ear) -> None:
    member.routing.to_servers(b"to servers", member.broker.server.etid, 0)
    member.broker.publish(b"to all", b"news")
    for uid in list(member.clients.holders)[:3]:
        connections.Session(member.broker, Ear(), 5).control(smq.connect(uid or b"none"))
    connections.settle()
    link.lose("the end")
    member.migration.clear()  # as when nobody has gone on for its hub for so long; the clock of the target stands still
    connections.settle()
    _check_clean(node, member)
    if not ear.ended:  # by End, as it may
        ear.got.clear()
        member.broker.publish(b"still here", b"news")
        connections.settle()
        assert [packet[13:] for packet in ear.got if packet[0] == smq.Type.PUBLISH] == [b"still here"]


def _check_clean(node: Node, member: ClusteredBroker) -> None:
    left = {
        "links": node.all_links | set(node.links),
        "strangers": node.unauthenticated,
        "nodes": member.remotes,
        "phantoms": member.phantoms,
        "holders": member.clients.holders,
        "foreign": member.foreign,
        "interest": member.interest,
        "filters": member.mqtt.filters,
        "clashes": member.interest._clashes,
        "clashing": member.interest._clashing,
    }
    assert not any(map(len, left.values())), left  # type: ignore[arg-type]
    assert member.state.bits == 0
    assert QueuedMemory.total_bytes == 0, f"{QueuedMemory.total_bytes} bytes are held by nobody"
    assert len(member.broker.topic_table.by_name) <= MAX_NAMES, "more names than there may be"
    assert len(member.broker.subtopic_table.by_name) <= MAX_NAMES, "more names than there may be"
    assert 1 <= node.number <= 1023


def stranger(data: bytes) -> None:
    """Who has connected, and knows no password: that may be a Hello of before."""
    _converse([], data)


def _proven(*packets: bytes) -> list[bytes]:
    proof = wire.proof(KEY, True, PEER + OWN)
    return [b"".join(map(smq.frame, part)) for part in ((PEER,), (proof, *packets))]


def node(data: bytes) -> None:
    """A node that knows the password: its link is up, and has the hub as channel 1."""
    number = wire.numbers(Packet.NODE, [PEER_NUMBER])
    channels = wire.channel(Packet.OPEN, 1, HUB), wire.channel(Packet.CHANNEL, 1)
    _converse(_proven(number, *channels), data)


def newcomer(data: bytes) -> None:
    """A node that knows the password, and has not told its number yet."""
    _converse(_proven(), data)


class _Nowhere:
    """The transport of a link whose packets the target gives to the hub itself."""

    via, processed_bytes = "nowhere", 0

    def __init__(self) -> None:
        self.outbox = connections.Subscriber()

    def close(self, in_order: bool) -> None:
        pass


def member(data: bytes) -> None:
    """Packets of a node to a hub, each behind its type and the size of its body."""
    with _errors_count():
        connections.begin_turn()
        node, member, ear = _node()
        link = node.connected(_Nowhere(), False, "fuzz")  # type: ignore[arg-type]
        try:
            link.receive(b"".join(_proven(wire.numbers(Packet.NODE, [PEER_NUMBER]), wire.channel(Packet.OPEN, 1, HUB))))
            assert link.state is LinkState.UP
            for packet in _packets(data):
                link.receive(smq.frame(wire.channel(Packet.CHANNEL, 1)))
                link.receive(smq.frame(packet))
                connections.settle()
        except ProtocolError as error:
            link.lose(str(error))
        _end(link, node, member, ear)


def _packets(data: bytes) -> Iterator[bytes]:
    at = 0
    while at + 2 <= len(data):
        size = data[at + 1]
        packet = data[at : at + 1] + data[at + 2 : at + 2 + size]
        yield packet if packet[0] != smq.Type.PUBLISH else packet.ljust(smq.PUBLISH_HEADER_BYTES - 2, b"\0")
        at += 2 + size


# ---- NATS


class _Client:
    """What a backplane calls of its NATS client; what it publishes goes nowhere."""

    connected, max_payload_bytes, outbox = True, 1 << 20, Outbox()

    def subscribe(self, subject: str, callback: object) -> None:
        pass

    def publish(self, subject: str, payload: bytes) -> bool:
        return True

    def publish_pieces(self, subject: str, pieces: list[bytes]) -> bool:
        return True

    def close(self) -> None:
        pass


LINK_ID = b"l" * 8


def through_nats(data: bytes) -> None:
    """Messages, each behind a byte and its size: whether it is a hello, of the linked node, with the place that is
    due, signed as it should be.
    """
    with _errors_count():
        connections.begin_turn()
        node, member, ear = _node()
        found = _backplane(node)
        say: Callable[..., None] = lambda payload: found._on_message(b"", payload, b"", b"")  # noqa: E731
        proof = wire.proof(KEY, True, PEER + OWN)
        say(_message(0, b"", smq.frame(PEER)))
        say(_message(1, b"", smq.frame(proof) + smq.frame(wire.numbers(Packet.NODE, [PEER_NUMBER]))))
        connection = found._connections[PEER_ID, LINK_ID]
        link = connection.link
        assert link.state is LinkState.UP
        key = link.session_key
        at = 0
        while at + 2 <= len(data):
            flags, size = data[at], data[at + 1]
            body, at = data[at + 2 : at + 2 + size], at + 2 + size
            before = link.state
            if flags & 1:
                found._on_hello(b"", body, b"", b"")
            elif flags & 2:
                say(
                    _message(
                        connection.received if flags & 4 else body[0] if body else 0, key if flags & 8 else b"", body
                    )
                )
            else:
                say(body)
            assert flags & 8 or link.state is before, "a link is ended by what is not signed"
            connections.settle()
        for one in list(found._connections.values()):
            one.link.lose("the end")
        found.close()
        assert not found._connections
        _end(link, node, member, ear)


def _message(place: int, key: bytes, frames: bytes) -> bytes:
    head = nats_connections._HEAD.pack(PEER_ID, LINK_ID, place)
    if not key:
        return head + bytes(nats_connections.SIGNATURE_BYTES) + frames
    nonce = nats_connections._NONCE.pack(True, place)
    return head + AESGCM(key).encrypt(nonce, b"", frames) + frames


def _backplane(node: Node) -> NatsBackplane:
    connect = nats_connections.nats.connect
    nats_connections.nats.connect = lambda *_, **__: _Client()  # type: ignore[assignment, return-value]
    try:
        found = NatsBackplane(node, "nats://nowhere")
        found.begin()
        return found
    finally:
        nats_connections.nats.connect = connect


# ---- good inputs

_TOPIC = NameNumbers(blake2b(HUB, key=KEY, digest_size=32).digest()).topic(b"news")
_SAID = [
    *cluster_packets.names(LinkType.SUBTOPICS, [(7, b"part"), (8, b"other")]),
    *cluster_packets.keys_and_numbers(LinkType.NUMBERED, [(*_TOPIC, 17)]),
    *cluster_packets.keys(LinkType.WATCH, [_TOPIC]),
    *cluster_packets.peers(
        [Announced(5 << 21 | 9, 1, b"uid-0001", b"info", b"ann"), Announced(5 << 21 | 8, 2, b"u", b"", b"")]
    ),
    *cluster_packets.keys(LinkType.INTEREST, [_TOPIC, (_TOPIC[0], 8), (0x80000002, 8)]),
    bytes((LinkType.SYNCED,)),
    *cluster_packets.keys_and_numbers(LinkType.COUNT, [(*_TOPIC, 3)]),
    *cluster_packets.names(LinkType.TOPICS, [(1, b"news")]),
    bytes((LinkType.VALUE,)) + smq.publish_frame(_TOPIC[0], 5 << 21 | 9, 7, b"value")[3:],
    *cluster_packets.keys(LinkType.NO_INTEREST, [_TOPIC]),
    *cluster_packets.keys(LinkType.UNWATCH, [_TOPIC]),
    *cluster_packets.etids([5 << 21 | 9]),
    cluster_packets.end(NUMBER << 21 | 1000, b"bye"),
    smq.publish_frame(_TOPIC[0], 5 << 21 | 9, 7, b"hello")[2:],
]
_EXTREME = [
    *cluster_packets.peers([Announced(5 << 21 | 9, (1 << 64) - 1, b"uid-last", b"", b"")]),
    *cluster_packets.keys_and_numbers(LinkType.COUNT, [(*_TOPIC, (1 << 32) - 1)]),
]
_LINK = [
    wire.u64(Packet.PING, 7),
    wire.u64(Packet.PONG, 7),
    wire.u64(Packet.ACK, 9),
    wire.channel(Packet.OPEN, 2, b"other"),
    wire.channel(Packet.CHANNEL, 2),
    wire.channel(Packet.CLOSE, 1, b"bye"),
    wire.channel(Packet.CLOSED, 1),
    wire.channel(Packet.OPEN, 3, HUB),
    wire.numbers(Packet.NODE, [PEER_NUMBER, 7]),
    wire.numbers(Packet.TAKEN, [NUMBER, 7]),
    wire.refused(wire.Refusal.CLOSING, "bye"),
]


def _sized(packet: bytes) -> bytes:
    return packet[:1] + bytes((len(packet) - 1,)) + packet[1:]


def _frames(packets: list[bytes]) -> list[bytes]:
    return [cut + b"".join(map(smq.frame, packets)) for cut in (b"\x00", b"\x01", b"\x0d")]


def _nats_seeds() -> list[bytes]:
    frames = [smq.frame(one) for one in (wire.channel(Packet.OPEN, 1, HUB), wire.channel(Packet.CHANNEL, 1), *_SAID)]
    hello = nats_connections._HELLO.pack(PEER_ID, 2, 1)
    gone = nats_connections._HEAD.pack(PEER_ID, LINK_ID, nats_connections.GONE) + bytes(16)
    signed = b"".join(bytes((2 | 4 | 8, len(one))) + one for one in frames)
    others = bytes((1, len(hello) + 16)) + hello + bytes(16) + bytes((0, len(gone))) + gone
    first = _message(0, b"", smq.frame(PEER)).replace(LINK_ID, b"another.")
    return [signed, others + bytes((0, len(first))) + first + b"\x02\x05" + smq.frame(b"\x63\0\5")]


_MESSAGE = smq.publish_frame(7, 9, 0, b"21")
_MQTT = [
    *cluster_mqtt.filters([("house/+/temp", Wanted.MESSAGES), ("$share/g/a", Wanted.CONNECTED), ("a", Wanted(0))]),
    cluster_mqtt.messages(WireMessages(b"house/a/temp", b"", _MESSAGE)),
    cluster_mqtt.messages(WireMessages(b"house/b/temp", b"", _MESSAGE, True, 2, True, b"\x03\0\1x", 1000, None)),
    cluster_mqtt.numbered(Numbered(9, 1, 5, WireMessages(b"house/b/temp", b"$share/g/a", _MESSAGE, True, 2))),
    cluster_mqtt.numbered(
        Numbered(9, 2, 6, WireMessages(b"a", b"", _MESSAGE, True, 1, session=b'{"id": "reader", "identifiers": ""}'))
    ),
    cluster_mqtt.retained(WireRetained(5, b"house/a/temp", b"20", 1, b"", cluster_mqtt.NEVER_MS)),
    cluster_mqtt.retained(WireRetained(6, b"house/a/temp", b"")),
]
SEEDS: dict[str, Callable[[], list[bytes]]] = {
    "link-stranger": lambda: [*_frames([PEER, wire.proof(b"x", True, PEER + OWN)]), *_frames(_LINK[:3])],
    "link-newcomer": lambda: _frames([wire.numbers(Packet.NODE, [NUMBER, 7]), *_LINK]),
    "link-node": lambda: [*_frames(_SAID + _MQTT), *_frames(_LINK), *_frames(_LINK[:-2] + _SAID)],
    "link-member": lambda: [
        *(b"".join(map(_sized, packets)) for packets in (_SAID, _MQTT)),
        *map(_sized, [*_SAID, *_MQTT, *_EXTREME]),
    ],
    "link-nats": _nats_seeds,
}
