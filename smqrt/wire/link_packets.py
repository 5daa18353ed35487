"""Packets of a link between two nodes: the handshake, the channels that it carries, and what keeps it alive.

    connects          accepts
       ── Hello ───────▶
       ◀────── Hello ──
       ── Proof ───────▶      HMAC-SHA-256 over "connects" and both Hellos
       ◀────── Proof ──       over "accepts" and both Hellos
       ◀── Node ───────▶      node numbers, until they differ
       ◀── Open ───────▶      for each hub: then what `wire.cluster` says, and messages
                              for each channel of applications: then messages, and Handled

Framing as in `wire.cluster`. All integers are big-endian.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

from smqrt.errors import CloseReason, ProtocolError
from smqrt.wire.smq import MAX_NODE

OLDEST_VERSION, VERSION = 1, 1
MAGIC = b"smqrt node"
ID_BYTES = 16
NONCE_BYTES = 32
APP = b"\xff"
"""The names of applications' channels begin with it on links, which those of hubs don't: these are UTF-8. A node that
knows no such channels takes them for hubs that it does not have.
"""
ABILITY = b"\xfe"
"""Begins the name of a channel that is none: it says what its sender can do beyond what every node can. Nodes that do
not know it keep the name as that of a hub that they don't have.
"""
PRESSURE = ABILITY + b"pressure"
"""The sender knows the packets from `LinkType.PRESSED` on."""
STAMPS = ABILITY + b"stamps"
"""The sender knows `LinkType.VALUE_AT` and `LinkType.CLOCK`."""
SUCCESSION = ABILITY + b"succession"
"""The sender knows the packets from `LinkType.PAUSE` on."""
SIBLINGS = ABILITY + b"siblings"
"""The sender knows the packet `Packet.SIBLINGS`."""
MAX_SIBLINGS = 1024
"""Processes of one server."""
PROOF_BYTES = 32


class Packet(IntEnum):
    """Packet types."""

    HELLO = 0x60
    PROOF = 0x61
    REFUSED = 0x62
    """`u8 code, text`."""
    NODE = 0x63
    """`u16 number, u16*`: the sender's number, and those of the nodes that it knows."""
    TAKEN = 0x64
    """`u16*`: your number is one of these; choose another."""
    OPEN = 0x65
    """`u16 channel, name`: what I send on this channel is of the hub with this cluster name, or, behind `APP`, of the
    channel that applications have opened by this name.
    """
    CLOSE = 0x66
    """`u16 channel, text`."""
    CLOSED = 0x6B
    """`u16 channel`: the answer to Close; what follows is of after."""
    CHANNEL = 0x67
    """`u16 channel`: what follows is of it."""
    ACK = 0x68
    """`u64 bytes`: so many of the link have been worked off."""
    PING = 0x69
    """`u64`: comes back in Pong."""
    PONG = 0x6A
    HANDLED = 0x6C
    """`u64 bytes`, on a channel of applications: so much more of what came is in their hands."""
    SIBLINGS = 0x6D
    """`16s server, u16 own`, then `16s id, u16 port` for each process of the sender's server: see `Siblings`."""


class Refusal(IntEnum):
    """Why a node does not want a link."""

    VERSION = 1
    PASSWORD = 2
    SELF = 3
    DUPLICATE = 4
    NUMBER = 5
    CLOSING = 6


class Hello(NamedTuple):
    """What a node says first.

    Attributes:
        oldest, newest: the versions that it speaks.
        id: 16 bytes, the same after a restart when its number is fixed.
        epoch: grows with each start, ns since 1970.
        nonce: 32 random bytes.
    """

    oldest: int
    newest: int
    id: bytes
    epoch: int
    nonce: bytes


class Siblings(NamedTuple):
    """The processes of one server, as one of them tells other nodes.

    Attributes:
        server: 16 bytes that these processes share.
        own: which of them is the sender, from 0.
        places: for each its id, zeros when the sender has no link to it, and its port, 0 when it takes no links or
            that is not known.
    """

    server: bytes
    own: int
    places: tuple[tuple[bytes, int], ...]


_HELLO = struct.Struct(f">B{len(MAGIC)}sBB{ID_BYTES}sQ{NONCE_BYTES}s")
_U16 = struct.Struct(">H")
_U64 = struct.Struct(">Q")
_PLACE = struct.Struct(f">{ID_BYTES}sH")


def hello(of: Hello) -> bytes:
    """The Hello packet."""
    return _HELLO.pack(Packet.HELLO, MAGIC, *of)


def parse_hello(packet: bytes) -> Hello:
    """See `hello`.

    Raises:
        ProtocolError: it is none.
    """
    if len(packet) != _HELLO.size or packet[0] != Packet.HELLO or packet[1 : 1 + len(MAGIC)] != MAGIC:
        raise ProtocolError(CloseReason.BAD_CONNECT, "what connects here is no node of smqrt")
    return Hello(*_HELLO.unpack(packet)[2:])


def proof(key: bytes, connects: bool, hellos: bytes) -> bytes:
    """The Proof packet of one side; `hellos` are the packets of who connects and who accepts."""
    side = b"connects" if connects else b"accepts"
    return bytes((Packet.PROOF,)) + hmac.digest(key, b"smqrt link " + side + hellos, "sha256")


def is_proof(packet: bytes, key: bytes, connects: bool, hellos: bytes) -> bool:
    """Whether a packet proves that the other side knows the key; takes the same time for every wrong one."""
    return hmac.compare_digest(packet, proof(key, connects, hellos))


def session_key(key: bytes, hellos: bytes) -> bytes:
    """What both sides of a link have alone, made of the key and both Hellos; 32 bytes."""
    return hmac.digest(key, b"smqrt link session" + hellos, "sha256")


def key_of(password: bytes, cluster: bytes = b"") -> bytes:
    """The key of a password: 50 ms of work and 16 MiB, so that each guess costs as much. Call it in a thread."""
    return hashlib.scrypt(password, salt=b"smqrt cluster " + cluster, n=1 << 14, r=8, p=1, dklen=32)


def refused(code: Refusal, text: str) -> bytes:
    """The Refused packet."""
    return bytes((Packet.REFUSED, code)) + text.encode()


def numbers(kind: Packet, of: Iterable[int]) -> bytes:
    """The Node or Taken packet."""
    return bytes((kind,)) + b"".join(map(_U16.pack, of))


def parse_numbers(packet: bytes) -> list[int]:
    """See `numbers`.

    Raises:
        ProtocolError: it is none, or one of them is no number of a node.
    """
    if len(packet) % 2 == 0:
        raise _short()
    found = [one for (one,) in _U16.iter_unpack(memoryview(packet)[1:])]
    if found and not 0 < min(found) <= max(found) <= MAX_NODE:
        raise ProtocolError(CloseReason.UNKNOWN_PACKET, f"a node whose number is not 1 to {MAX_NODE}")
    return found


def siblings(of: Siblings) -> bytes:
    """The Siblings packet."""
    places = b"".join(_PLACE.pack(*one) for one in of.places)
    return bytes((Packet.SIBLINGS,)) + of.server + _U16.pack(of.own) + places


def parse_siblings(packet: bytes) -> Siblings:
    """See `siblings`.

    Raises:
        ProtocolError: it is none, names too many, or does not name its sender.
    """
    head = 1 + ID_BYTES + _U16.size
    count, rest = divmod(len(packet) - head, _PLACE.size)
    if len(packet) < head or rest:
        raise _short()
    (own,) = _U16.unpack_from(packet, 1 + ID_BYTES)
    if not own < count <= MAX_SIBLINGS:
        raise ProtocolError(CloseReason.UNKNOWN_PACKET, f"a node is number {own} of {count} processes")
    return Siblings(packet[1 : 1 + ID_BYTES], own, tuple(_PLACE.iter_unpack(packet[head:])))


def channel(kind: Packet, number: int, text: bytes = b"") -> bytes:
    """The Open, Close or Channel packet."""
    return bytes((kind,)) + _U16.pack(number) + text


def parse_channel(packet: bytes) -> tuple[int, bytes]:
    """See `channel`."""
    if len(packet) < 3:
        raise _short()
    return packet[1] << 8 | packet[2], packet[3:]


def u64(kind: Packet, value: int) -> bytes:
    """The Ack, Ping, Pong or Handled packet."""
    return bytes((kind,)) + _U64.pack(value)


def parse_u64(packet: bytes) -> int:
    """See `u64`."""
    if len(packet) != 9:
        raise _short()
    return int.from_bytes(packet[1:], "big")


def _short() -> ProtocolError:
    return ProtocolError(CloseReason.SHORT_PACKET, "a packet of another node has the wrong length")
