"""Packets between the nodes of a cluster.

They travel in the frames of raw sockets (`u16 length`, which counts itself, `u8 type`, body), between Publish frames as
clients send them, so that the same kernels find the runs. All integers are big-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple

from smqrt.errors import CloseReason, ProtocolError
from smqrt.wire.smq import MAX_PACKET_BYTES

VERSION = 1


class LinkType(IntEnum):
    """Packet types; those of clients are below 32."""

    INTEREST = 0x41
    """`(u32 tid, u32 check)*`: somebody subscribes to these topics now."""
    NO_INTEREST = 0x42
    """The same: nobody does any more."""
    NUMBERED = 0x43
    """`(u32 tid, u32 check, u32 number)*`: these topics have another number at the sender than their name gives."""
    SUBTOPICS = 0x44
    """`(u32 stid, u16 length, name)*`: the sub-topics of the sender."""
    PEERS = 0x45
    """`(u32 etid, u64 stamp, u8 length, uid, u16 length, info, u8 length, user)*`: clients that the sender has."""
    PEERS_GONE = 0x46
    """`u32 etid*`: it has these no more."""
    SYNCED = 0x47
    """All that the sender had when the link came up has been said."""
    WATCH = 0x48
    """`(u32 tid, u32 check)*`: tell me how many subscribe to these, now and when it changes."""
    UNWATCH = 0x49
    """The same: no more."""
    COUNT = 0x4A
    """`(u32 tid, u32 check, u32 subscribers)*`."""
    END = 0x4B
    """`u32 etid, text`: end this client, 0 for all; an empty text ends it without a word."""
    TOPICS = 0x4C
    """`(u32 tid, u16 length, name)*`: names whose last values follow."""
    VALUE = 0x4D
    """A Publish frame without its length: a last value that the sender has."""
    VALUE_AT = 0x4E
    """`u64 stamp`, and the rest as in `VALUE`: one without payload was taken away then."""
    CLOCK = 0x4F
    """`u64 stamp`: what follows is published now, to topics that `TOPICS` has named."""
    PRESSED = 0x50
    """`(u32 tid, u32 check)*`: publishers of these have to wait for clients of the sender; for an ETID check is 0."""
    RELEASED = 0x51
    """The same: no more."""
    ONCE = 0x52
    """`(u32 tid, u32 check, u32 number)*`: the server there handles messages to these once in the cluster, and those
    that it is to handle come to this number; 0: no more.
    """
    PAUSE = 0x53
    """The hub is about to move to another process: keep what is for it."""
    PAUSED = 0x54
    """Nothing comes behind this."""
    SUCCESSOR = 0x55
    """`u16 number`: this hub goes on for that of the node of this number."""
    SUCCEED = 0x56
    """`u16 number`: it has said all that it wants."""
    SUCCEEDED = 0x57
    """What comes behind this is for it."""


class Announced(NamedTuple):
    """A client of another node.

    Attributes:
        stamp: when it connected, in ms; the newest of a uid wins.
        user: who it is; empty when nobody asked.
    """

    etid: int
    stamp: int
    uid: bytes
    info: bytes
    user: bytes


Key = tuple[int, int]
"""Number and check of a topic, see `NameNumbers.topic`."""

_U32 = struct.Struct(">I")
_KEY = struct.Struct(">II")
_KEY_AND_NUMBER = struct.Struct(">III")
_PEER = struct.Struct(">IQB")
_PEER_BYTES = _PEER.size + 255 + 2 + 1 + 255  # without `info`
_NAMED = struct.Struct(">IH")


def _packets(kind: int, items: Iterable[bytes]) -> Iterator[bytes]:
    """Packets of `kind` with as many whole items as fit into each."""
    packet = bytearray((kind,))
    for item in items:
        if len(packet) + len(item) > MAX_PACKET_BYTES:
            yield bytes(packet)
            packet = bytearray((kind,))
        packet += item
    if len(packet) > 1:
        yield bytes(packet)


def keys(kind: LinkType, of: Iterable[Key]) -> Iterator[bytes]:
    """Interest, NoInterest, Watch or Unwatch packets."""
    return _packets(kind, (_KEY.pack(*key) for key in of))


def parse_keys(packet: bytes) -> Iterator[Key]:
    """See `keys`."""
    return _KEY.iter_unpack(_body(packet, _KEY.size))


def keys_and_numbers(kind: LinkType, of: Iterable[tuple[int, int, int]]) -> Iterator[bytes]:
    """Numbered or Count packets."""
    return _packets(kind, (_KEY_AND_NUMBER.pack(*one) for one in of))


def parse_keys_and_numbers(packet: bytes) -> Iterator[tuple[int, int, int]]:
    """See `keys_and_numbers`."""
    return _KEY_AND_NUMBER.iter_unpack(_body(packet, _KEY_AND_NUMBER.size))


def etids(of: Iterable[int]) -> Iterator[bytes]:
    """PeersGone packets."""
    return _packets(LinkType.PEERS_GONE, (_U32.pack(etid) for etid in of))


def parse_etids(packet: bytes) -> Iterator[int]:
    """See `etids`."""
    return (one for (one,) in _U32.iter_unpack(_body(packet, _U32.size)))


def names(kind: LinkType, of: Iterable[tuple[int, bytes]]) -> Iterator[bytes]:
    """Subtopics or Topics packets, of `(number, name)`."""
    return _packets(kind, (_NAMED.pack(number, len(name)) + name for number, name in of))


def parse_names(packet: bytes) -> Iterator[tuple[int, bytes]]:
    """See `names`."""
    at = 1
    while at < len(packet):
        number, size = _NAMED.unpack_from(_whole(packet, at, _NAMED.size), 0)
        at += _NAMED.size
        yield number, _whole(packet, at, size)
        at += size


def peers(of: Iterable[Announced]) -> Iterator[bytes]:
    """Peers packets; an `info` that would not fit a packet is cut."""
    return _packets(LinkType.PEERS, (_peer(one) for one in of))


def _peer(one: Announced) -> bytes:
    info = one.info[: MAX_PACKET_BYTES - _PEER_BYTES - 1]
    head = _PEER.pack(one.etid, one.stamp, len(one.uid)) + one.uid + len(info).to_bytes(2, "big") + info
    user = one.user[:255]
    return head + bytes((len(user),)) + user


def parse_peers(packet: bytes) -> Iterator[Announced]:
    """See `peers`."""
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
    """The End packet."""
    return bytes((LinkType.END,)) + _U32.pack(etid) + text


def parse_end(packet: bytes) -> tuple[int, bytes]:
    """See `end`."""
    return _U32.unpack(_whole(packet, 1, 4))[0], packet[5:]


def rewritten(run: bytes, tid: int, ptid: int) -> bytes:
    """`run` with another destination and publisher in each frame."""
    head, size = _KEY.pack(tid, ptid), len(run)
    if run[0] << 8 | run[1] == size:
        return run[:3] + head + run[11:]
    made, at = bytearray(run), 0
    while at < size:
        made[at + 3 : at + 11] = head
        at += run[at] << 8 | run[at + 1]
    return bytes(made)


def with_subtopics(run: bytes, numbers: dict[bytes, bytes]) -> bytes:
    """`run` with the sub-topic of each frame replaced as `numbers` says, four bytes by four bytes."""
    made, at, size = bytearray(run), 0, len(run)
    while at < size:
        other = numbers.get(run[at + 11 : at + 15])
        if other is not None:
            made[at + 11 : at + 15] = other
        at += run[at] << 8 | run[at + 1]
    return bytes(made)


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
