"""Packets of a link between two nodes: handshake, channels and keep-alive.

    connecting node   accepting node
       ── Hello ───────▶
       ◀────── Hello ──
       ── Proof ───────▶      HMAC-SHA-256 over "connects" and both Hellos
       ◀────── Proof ──       over "accepts" and both Hellos
       ◀── Node ───────▶      node numbers, until they differ
       ◀── Open ───────▶      for each hub: then the packets of `cluster_packets`, and messages
                              for each channel of applications: then messages, and Handled

Packets are framed as in `cluster_packets`. All integers are big-endian.
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
"""Prefix of the names of applications' channels. Names of hubs are UTF-8 and don't begin with this byte. A node without
such channels takes them for hubs that it does not have.
"""
ABILITY = b"\xfe"
"""Prefix of a name that is not a channel: opening it announces a feature of the sender beyond version 1. Nodes that do
not support the feature take it for a hub that they don't have.
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
    """`u16 number, u16*`: the sender's number, and the numbers of the nodes that it is linked to."""
    TAKEN = 0x64
    """`u16*`: numbers that are taken, among them the receiver's; the receiver must choose another one."""
    OPEN = 0x65
    """`u16 channel, name`: this channel has the packets of the hub with this cluster name, or, with the prefix `APP`,
    of the applications' channel with this name.
    """
    CLOSE = 0x66
    """`u16 channel, text`."""
    CLOSED = 0x6B
    """`u16 channel`: the answer to Close. What follows on the channel belongs to a later Open."""
    CHANNEL = 0x67
    """`u16 channel`: the packets that follow belong to it."""
    ACK = 0x68
    """`u64 bytes`: the number of bytes of the link that the sender has processed."""
    PING = 0x69
    """`u64`: returned in Pong."""
    PONG = 0x6A
    HANDLED = 0x6C
    """`u64 bytes`, on a channel of applications: how many more bytes the applications have received."""
    SIBLINGS = 0x6D
    """`16s server, u16 own`, then `16s id, u16 port` for each process of the sender's server: see `Siblings`."""


class Refusal(IntEnum):
    """Reason why a node rejects a link."""

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
    """Processes of one server, as one of them announces them to other nodes.

    Attributes:
        server: 16 bytes that these processes share.
        own: index of the sender.
        places: id and port of each process. The id is zero when the sender has no link to it; the port is 0 when it
            accepts no links or is unknown.
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
    """Whether a packet proves that the other side has the key; compares in constant time."""
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
        raise ProtocolError(CloseReason.UNKNOWN_PACKET, f"a node whose number is not 1 to {MAX_NODE}")
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
