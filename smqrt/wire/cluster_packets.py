"""Packets between cluster nodes: link handshake, channels and hub packets.

They have the framing of raw sockets: `u16 length`, which includes itself, `u8 type`, body. Messages are Publish
frames as those of clients, so that the same kernels split the stream. All integers are big-endian.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple

from smqrt.errors import CloseReason, ProtocolError
from smqrt.wire.smq import MAX_NODE, MAX_PACKET_BYTES

# ---- Packets of a link: handshake, channels and keep-alive
#
#     connecting node   accepting node
#        ── Hello ───────▶
#        ◀────── Hello ──
#        ── Proof ───────▶      HMAC-SHA-256 over "connects" and both Hellos
#        ◀────── Proof ──       over "accepts" and both Hellos
#        ◀── Node ───────▶      node numbers, until they differ
#        ◀── Open ───────▶      for each hub; packets of `LinkType` and messages follow
#                               for each application channel; messages and Handled follow

OLDEST_VERSION, VERSION = 1, 4
"""Version 2 has the packets from `LinkType.FILTERS` on, version 3 those from `LinkType.GREETING` on, and version 4 has
messages for one session. See `smqrt.wire.cluster_mqtt`.
"""
MAGIC = b"smqrt node"
ID_BYTES = 16
NONCE_BYTES = 32
APP = b"\xff"
"""Prefix of the names of application channels. Names of hubs are UTF-8 and do not begin with this byte. A node of a
release without such channels treats them as hubs that it does not have.
"""
ABILITY = b"\xfe"
"""Prefix of a name that is not a channel. An Open packet with it announces an optional feature of the sender. Nodes
that do not support the feature treat it as a hub that they do not have.
"""
PRESSURE = ABILITY + b"pressure"
"""The sender supports the packets from `LinkType.PRESSED` on."""
STAMPS = ABILITY + b"stamps"
"""The sender supports `LinkType.VALUE_AT` and `LinkType.CLOCK`."""
SUCCESSION = ABILITY + b"succession"
"""The sender supports the packets from `LinkType.PAUSE` on."""
SIBLINGS = ABILITY + b"siblings"
"""The sender supports the packet `Packet.SIBLINGS`."""
MAX_SIBLINGS = 1024
"""Maximum number of processes of one server."""
PROOF_BYTES = 32


class Packet(IntEnum):
    """Packet types."""

    HELLO = 0x60
    PROOF = 0x61
    REFUSED = 0x62
    """`u8 code, text`."""
    NODE = 0x63
    """`u16 number, u16*`: the number of the sender, and the numbers of the nodes to which it is linked."""
    TAKEN = 0x64
    """`u16*`: numbers that are taken, among them that of the receiver, which must choose another one."""
    OPEN = 0x65
    """`u16 channel, name`: opens a channel for the hub in the cluster of this name or, with the prefix `APP`, for the
    application channel of this name.
    """
    CLOSE = 0x66
    """`u16 channel, text`."""
    CLOSED = 0x6B
    """`u16 channel`: the answer to Close. Later packets on the channel belong to a later Open."""
    CHANNEL = 0x67
    """`u16 channel`: the following packets belong to it."""
    ACK = 0x68
    """`u64 bytes`: the number of bytes of the link that the sender has processed."""
    PING = 0x69
    """`u64`: returned in Pong."""
    PONG = 0x6A
    HANDLED = 0x6C
    """`u64 bytes`, on an application channel: the bytes of messages handled since the last Handled packet."""
    SIBLINGS = 0x6D
    """`16s server, u16 own`, then `16s id, u16 port` for each process of the server of the sender; see `Siblings`."""


class Refusal(IntEnum):
    """Reasons for which a node refuses a link."""

    VERSION = 1
    PASSWORD = 2
    SELF = 3
    DUPLICATE = 4
    NUMBER = 5
    CLOSING = 6


class Hello(NamedTuple):
    """Contents of a Hello packet.

    Attributes:
        oldest, newest: the range of supported versions.
        id: 16 bytes; with a fixed node number the same after a restart.
        epoch: time of the start, in ns since 1970.
        nonce: 32 random bytes.
    """

    oldest: int
    newest: int
    id: bytes
    epoch: int
    nonce: bytes


class Siblings(NamedTuple):
    """Processes of one server, announced by one of them to other nodes.

    Attributes:
        server: 16 bytes that these processes share.
        own: the index of the sender.
        places: the id and port of each process. The id is zero when the sender has no link to the process. The port is
            0 when the process accepts no links, or its port is unknown.
    """

    server: bytes
    own: int
    places: tuple[tuple[bytes, int], ...]


_HELLO = struct.Struct(f">B{len(MAGIC)}sBB{ID_BYTES}sQ{NONCE_BYTES}s")
_U16 = struct.Struct(">H")
_U64 = struct.Struct(">Q")
_PLACE = struct.Struct(f">{ID_BYTES}sH")


def hello(of: Hello) -> bytes:
    """Return a Hello packet."""
    return _HELLO.pack(Packet.HELLO, MAGIC, *of)


def parse_hello(packet: bytes) -> Hello:
    """Parse a Hello packet.

    Raises:
        ProtocolError: it is not a Hello packet.
    """
    if len(packet) != _HELLO.size or packet[0] != Packet.HELLO or packet[1 : 1 + len(MAGIC)] != MAGIC:
        raise ProtocolError(CloseReason.BAD_CONNECT, "the connection is not from a node of smqrt")
    return Hello(*_HELLO.unpack(packet)[2:])


def proof(key: bytes, connects: bool, hellos: bytes) -> bytes:
    """Return the Proof packet of one side; `hellos` are the packets of the connecting and of the accepting node."""
    side = b"connects" if connects else b"accepts"
    return bytes((Packet.PROOF,)) + hmac.digest(key, b"smqrt link " + side + hellos, "sha256")


def is_proof(packet: bytes, key: bytes, connects: bool, hellos: bytes) -> bool:
    """Return whether a packet proves that the other side has the key; compares in constant time."""
    return hmac.compare_digest(packet, proof(key, connects, hellos))


def session_key(key: bytes, hellos: bytes) -> bytes:
    """Return the key that only the two sides of a link have, derived from the key and both Hellos; 32 bytes."""
    return hmac.digest(key, b"smqrt link session" + hellos, "sha256")


def key_of(password: bytes, cluster: bytes = b"") -> bytes:
    """Derive the key from a password. It takes 50 ms and 16 MiB, to slow down guessing; call it in a thread."""
    return hashlib.scrypt(password, salt=b"smqrt cluster " + cluster, n=1 << 14, r=8, p=1, dklen=32)


def refused(code: Refusal, text: str) -> bytes:
    """Return a Refused packet."""
    return bytes((Packet.REFUSED, code)) + text.encode()


def numbers(kind: Packet, of: Iterable[int]) -> bytes:
    """Return a Node or Taken packet."""
    return bytes((kind,)) + b"".join(map(_U16.pack, of))


def parse_numbers(packet: bytes) -> list[int]:
    """Parse a Node or Taken packet.

    Raises:
        ProtocolError: it is malformed, or a number is not valid.
    """
    if len(packet) % 2 == 0:
        raise _wrong_length()
    found = [one for (one,) in _U16.iter_unpack(memoryview(packet)[1:])]
    if found and not 0 < min(found) <= max(found) <= MAX_NODE:
        raise ProtocolError(CloseReason.UNKNOWN_PACKET, f"a node number that is not 1 to {MAX_NODE}")
    return found


def siblings(of: Siblings) -> bytes:
    """Return a Siblings packet."""
    places = b"".join(_PLACE.pack(*one) for one in of.places)
    return bytes((Packet.SIBLINGS,)) + of.server + _U16.pack(of.own) + places


def parse_siblings(packet: bytes) -> Siblings:
    """Parse a Siblings packet.

    Raises:
        ProtocolError: it is malformed, has too many processes, or not the sender among them.
    """
    head = 1 + ID_BYTES + _U16.size
    count, rest = divmod(len(packet) - head, _PLACE.size)
    if len(packet) < head or rest:
        raise _wrong_length()
    (own,) = _U16.unpack_from(packet, 1 + ID_BYTES)
    if not own < count <= MAX_SIBLINGS:
        raise ProtocolError(CloseReason.UNKNOWN_PACKET, f"a node is number {own} of {count} processes")
    return Siblings(packet[1 : 1 + ID_BYTES], own, tuple(_PLACE.iter_unpack(packet[head:])))


def channel(kind: Packet, number: int, text: bytes = b"") -> bytes:
    """Return an Open, Close or Channel packet."""
    return bytes((kind,)) + _U16.pack(number) + text


def parse_channel(packet: bytes) -> tuple[int, bytes]:
    """Parse an Open, Close or Channel packet into channel and text."""
    if len(packet) < 3:
        raise _wrong_length()
    return packet[1] << 8 | packet[2], packet[3:]


def u64(kind: Packet, value: int) -> bytes:
    """Return an Ack, Ping, Pong or Handled packet."""
    return bytes((kind,)) + _U64.pack(value)


def parse_u64(packet: bytes) -> int:
    """Return the number in an Ack, Ping, Pong or Handled packet."""
    if len(packet) != 9:
        raise _wrong_length()
    return int.from_bytes(packet[1:], "big")


def _wrong_length() -> ProtocolError:
    return ProtocolError(CloseReason.SHORT_PACKET, "a packet of another node has the wrong length")


class LinkType(IntEnum):
    """Packet types; types of client packets are below 32."""

    INTEREST = 0x41
    """`(u32 tid, u32 check)*`: the sender has subscribers of these topics now."""
    NO_INTEREST = 0x42
    """The same format: topics whose last subscriber at the sender has left."""
    NUMBERED = 0x43
    """`(u32 tid, u32 check, u32 number)*`: topics whose id at the sender is not the one derived from their name."""
    SUBTOPICS = 0x44
    """`(u32 stid, u16 length, name)*`: sub-topics of the sender."""
    PEERS = 0x45
    """`(u32 etid, u64 stamp, u8 length, uid, u16 length, info, u8 length, user)*`: clients of the sender."""
    PEERS_GONE = 0x46
    """`u32 etid*`: clients that have disconnected from the sender."""
    SYNCED = 0x47
    """The end of the packets that describe the sender's state at the beginning of the link."""
    WATCH = 0x48
    """`(u32 tid, u32 check)*`: request for the number of subscribers, now and at each change."""
    UNWATCH = 0x49
    """The same format: end of the request."""
    COUNT = 0x4A
    """`(u32 tid, u32 check, u32 subscribers)*`: the answer to Watch."""
    END = 0x4B
    """`u32 etid, text`: close this client, or all clients for 0. If the text is empty, no Disconnect packet is sent."""
    TOPICS = 0x4C
    """`(u32 tid, u16 length, name)*`: names of topics whose last values follow."""
    VALUE = 0x4D
    """A Publish frame without its length: a last value of the sender."""
    VALUE_AT = 0x4E
    """`u64 stamp`, and the rest as in `VALUE`; without payload the value was deleted at that time."""
    CLOCK = 0x4F
    """`u64 stamp`: the time of the messages that follow to topics of `TOPICS`."""
    PRESSED = 0x50
    """`(u32 tid, u32 check)*`: publishers have to wait for clients of the sender; for an ETID check is 0."""
    RELEASED = 0x51
    """The same format: end of the wait."""
    ONCE = 0x52
    """`(u32 tid, u32 check, u32 number)*`: the sender's server handles messages of these topics with `once`. Messages
    for it to handle are sent to the ETID `number`; 0 ends that.
    """
    PAUSE = 0x53
    """The hub will migrate to another process: keep messages for it."""
    PAUSED = 0x54
    """The answer to Pause: no messages follow."""
    SUCCESSOR = 0x55
    """`u16 number`: the sender takes over the clients of the node with this number."""
    SUCCEED = 0x56
    """`u16 number`: the successor has sent its whole snapshot."""
    SUCCEEDED = 0x57
    """The answer to Succeed: the following messages are for the successor."""
    FILTERS = 0x58
    """`(u8 wanted, u16 length, filter)*`: filters of the sender, see `smqrt.wire.cluster_mqtt.Wanted`; 0 removes one.
    An empty packet only announces that the sender has MQTT clients.
    """
    PART = 0x59
    """The beginning of the body of the next packet of the types below."""
    MESSAGES = 0x5A
    """`u16 count`, and the body of `smqrt.wire.cluster_mqtt.WireMessages`."""
    RETAINED = 0x5B
    """The body of `smqrt.wire.cluster_mqtt.WireRetained`: the sender has this retained message now."""
    SESSION = 0x5C
    """JSON about a session that moves, see `smqrt.cluster.mqtt_sessions`. Byte strings are objects with the field
    `bytes`, which is Base64.
    """
    GREETING = 0x5D
    """`16s identity`: names the sessions of the sender, see `smqrt.cluster.mqtt_streams`. It is the first packet."""
    CONTINUE = 0x5E
    """`u64 stream, u64 number`: asks for `ARRIVED`. Messages up to the number follow; 0 for none."""
    ARRIVED = 0x5F
    """`u64 stream, u64 number`: the last number of a stream that has arrived at the sender; 0 for none."""
    STREAMED = 0x40
    """`u16 count`, and the body of `smqrt.wire.cluster_mqtt.Numbered`."""
    DECLINED = 0x3F
    """`u64 stream, u64 number`: the sender has no client of the shared subscription that the messages were for."""


class Announced(NamedTuple):
    """Client of another node.

    Attributes:
        etid, uid, info: the values at its node.
        stamp: when it connected, in ms; of several clients with one uid, the newest counts.
        user: the user; empty without authentication.
    """

    etid: int
    stamp: int
    uid: bytes
    info: bytes
    user: bytes


Key = tuple[int, int]
"""Id of a topic and its check number, see `NameNumbers.topic`."""

_U32 = struct.Struct(">I")
_KEY = struct.Struct(">II")
_KEY_AND_NUMBER = struct.Struct(">III")
_PEER = struct.Struct(">IQB")
_PEER_BYTES = _PEER.size + 255 + 2 + 1 + 255  # without `info`
_NAMED = struct.Struct(">IH")
_ITEM_BYTES: dict[int, int] = {
    **dict.fromkeys((LinkType.INTEREST, LinkType.NO_INTEREST, LinkType.WATCH, LinkType.UNWATCH), _KEY.size),
    **dict.fromkeys((LinkType.PRESSED, LinkType.RELEASED), _KEY.size),
    **dict.fromkeys((LinkType.NUMBERED, LinkType.COUNT, LinkType.ONCE), _KEY_AND_NUMBER.size),
    LinkType.PEERS_GONE: _U32.size,
}


def _packets(kind: int, items: Iterable[bytes]) -> Iterator[bytes]:
    """Yield packets of `kind` with as many whole items as fit into each."""
    packet = bytearray((kind,))
    for item in items:
        if len(packet) + len(item) > MAX_PACKET_BYTES:
            yield bytes(packet)
            packet = bytearray((kind,))
        packet += item
    if len(packet) > 1:
        yield bytes(packet)


def first_items(packet: bytes, size_bytes: int) -> int:
    """Return where the first items of a packet end, at or after `size_bytes`; its length if it is not made of items.

    The items before and after that position can be processed as two packets.
    """
    kind, at, end = packet[0], 1, min(size_bytes, len(packet))
    try:
        if kind in _ITEM_BYTES:
            size = _ITEM_BYTES[kind]
            at += -(-(end - 1) // size) * size
        elif kind in (LinkType.SUBTOPICS, LinkType.TOPICS):
            while at < end:
                at += _NAMED.size + (packet[at + 4] << 8 | packet[at + 5])
        elif kind == LinkType.PEERS:
            while at < end:
                at += _PEER.size + packet[at + _PEER.size - 1]
                at += 2 + (packet[at] << 8 | packet[at + 1])
                at += 1 + packet[at]
        else:
            return len(packet)
    except IndexError:  # malformed, which the parser reports
        return len(packet)
    return min(at, len(packet))


def keys(kind: LinkType, of: Iterable[Key]) -> Iterator[bytes]:
    """Yield Interest, NoInterest, Watch, Unwatch, Pressed or Released packets."""
    return _packets(kind, (_KEY.pack(*key) for key in of))


def parse_keys(packet: bytes) -> Iterator[Key]:
    """Parse a packet of `keys`."""
    return _KEY.iter_unpack(_body(packet, _KEY.size))


def keys_and_numbers(kind: LinkType, of: Iterable[tuple[int, int, int]]) -> Iterator[bytes]:
    """Yield Numbered, Count or Once packets."""
    return _packets(kind, (_KEY_AND_NUMBER.pack(*one) for one in of))


def parse_keys_and_numbers(packet: bytes) -> Iterator[tuple[int, int, int]]:
    """Parse a packet of `keys_and_numbers`."""
    return _KEY_AND_NUMBER.iter_unpack(_body(packet, _KEY_AND_NUMBER.size))


def etids(of: Iterable[int]) -> Iterator[bytes]:
    """Yield PeersGone packets."""
    return _packets(LinkType.PEERS_GONE, (_U32.pack(etid) for etid in of))


def parse_etids(packet: bytes) -> Iterator[int]:
    """Parse a PeersGone packet."""
    return (one for (one,) in _U32.iter_unpack(_body(packet, _U32.size)))


def names(kind: LinkType, of: Iterable[tuple[int, bytes]]) -> Iterator[bytes]:
    """Yield Subtopics or Topics packets of `(number, name)`."""
    return _packets(kind, (_NAMED.pack(number, len(name)) + name for number, name in of))


def parse_names(packet: bytes) -> Iterator[tuple[int, bytes]]:
    """Parse a Subtopics or Topics packet."""
    at = 1
    while at < len(packet):
        number, size = _NAMED.unpack_from(_whole(packet, at, _NAMED.size), 0)
        at += _NAMED.size
        yield number, _whole(packet, at, size)
        at += size


def peers(of: Iterable[Announced]) -> Iterator[bytes]:
    """Yield Peers packets; an `info` that does not fit a packet is cut."""

    def encoded() -> Iterator[bytes]:
        for one in of:
            info, user = one.info[: MAX_PACKET_BYTES - _PEER_BYTES - 1], one.user[:255]
            head = _PEER.pack(one.etid, one.stamp, len(one.uid)) + one.uid + len(info).to_bytes(2, "big") + info
            yield head + bytes((len(user),)) + user

    return _packets(LinkType.PEERS, encoded())


def parse_peers(packet: bytes) -> Iterator[Announced]:
    """Parse a Peers packet."""
    at = 1
    while at < len(packet):
        etid, stamp, size = _PEER.unpack(_whole(packet, at, _PEER.size))
        at += _PEER.size
        uid, at = _whole(packet, at, size), at + size
        size = int.from_bytes(_whole(packet, at, 2), "big")
        info, at = _whole(packet, at + 2, size), at + 2 + size
        size = _whole(packet, at, 1)[0]
        user, at = _whole(packet, at + 1, size), at + 1 + size
        yield Announced(etid, stamp, uid, info, user)


def end(etid: int, text: bytes) -> bytes:
    """Return an End packet."""
    return bytes((LinkType.END,)) + _U32.pack(etid) + text


def parse_end(packet: bytes) -> tuple[int, bytes]:
    """Parse an End packet into ETID and text."""
    return _U32.unpack(_whole(packet, 1, 4))[0], packet[5:]


def rewritten(batch: bytes, tid: int, ptid: int) -> bytes:
    """Return `batch` with another destination and publisher in each frame."""
    head, size = _KEY.pack(tid, ptid), len(batch)  # bytes 3 to 10 of a frame
    if batch[0] << 8 | batch[1] == size:
        return batch[:3] + head + batch[11:]
    made, at = bytearray(batch), 0
    while at < size:
        made[at + 3 : at + 11] = head
        at += batch[at] << 8 | batch[at + 1]
    return bytes(made)


def with_subtopics(batch: bytes, numbers: dict[bytes, bytes]) -> bytes:
    """Return `batch` with the sub-topic of each frame replaced by `numbers`, which maps four bytes to four bytes."""
    made, at, size = None, 0, len(batch)
    while at < size:
        other = numbers.get(batch[at + 11 : at + 15])  # the stid of the frame
        if other is not None:
            made = made if made is not None else bytearray(batch)
            made[at + 11 : at + 15] = other
        at += batch[at] << 8 | batch[at + 1]
    return batch if made is None else bytes(made)  # messages of MQTT clients have no sub-topic, but attributes


def _body(packet: bytes, size: int) -> memoryview:
    if (len(packet) - 1) % size:
        raise _short()
    return memoryview(packet)[1:]


def _whole(packet: bytes, at: int, size: int) -> bytes:
    if at + size > len(packet):
        raise _short()
    return packet[at : at + size]


def _short() -> ProtocolError:
    return ProtocolError(CloseReason.SHORT_PACKET, "a packet of another node ends too soon")
