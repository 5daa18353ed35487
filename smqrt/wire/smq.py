"""SMQ packets: constants, builders and parsers (spec: smq §1).

A *packet* is `u8 type` and a body. A *frame* is `u16 length`, which includes its own two bytes, and a packet: raw
sockets carry frames, and the broker forwards them unchanged. A *batch* is one or more whole Publish frames with the
same destination and publisher. All integers are big-endian. A Publish frame, with the offset of each field:

    0 u16 length   2 u8 type   3 u32 tid (destination)   7 u32 ptid (publisher)   11 u32 stid (sub-topic)   15 payload

`frame[2:11]`, which is type, tid and ptid, is the key by which batches are found and routes are cached.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from hashlib import blake2b
from typing import NamedTuple

from smqrt.errors import CloseReason, ProtocolError

# ---- Ranges of 32-bit ids: ETIDs and the node in them, the servers of nodes, and topics.
#
#     0 nnnnnnnnnn lllllllllllllllllllll   ETID: 10 bits of the node, 21 bits drawn by that node
#     0 nnnnnnnnnn 000000000000000000001   the server of node n, for other nodes
#     1 hhhhhhhhhhhhhhhhhhhhhhhhhhhhhhhh   topic
#
# Node 0 is a hub without a cluster. A topic whose id an application or a file chooses may have any id.

LOCAL_BITS = 21
MAX_NODE = (1 << 31 - LOCAL_BITS) - 1
LOCAL_MASK = (1 << LOCAL_BITS) - 1
TOPIC_BIT = 1 << 31
SERVER_LOCAL = 1


def node_of(number: int) -> int:
    """Return the node of an ETID; 0 for a topic and for an ETID of a hub without a cluster."""
    return 0 if number & TOPIC_BIT else number >> LOCAL_BITS


def server_of(node: int) -> int:
    """Return the ETID that other nodes use for the server of `node`."""
    return node << LOCAL_BITS | SERVER_LOCAL


class NameNumbers:
    """Derives ids from names, with the same result at all nodes of a cluster.

    The key prevents clients from guessing ids, and from finding names with the same id.

    Args:
        key: at most 64 bytes, the same at all nodes.
    """

    def __init__(self, key: bytes) -> None:
        self._topics = blake2b(key=key, digest_size=8, person=b"smqrt topic")
        self._subtopics = blake2b(key=key, digest_size=4, person=b"smqrt subtopic")

    def topic(self, name: bytes) -> tuple[int, int]:
        """Return the id of a topic (u32), and a check number (u32) that differs for names with the same id."""
        digest = self._topics.copy()
        digest.update(name)
        both = int.from_bytes(digest.digest(), "big")
        return both >> 32 | TOPIC_BIT, both & 0xFFFFFFFF

    def topic_number(self, name: bytes) -> int:
        """Return the id of a topic."""
        return self.topic(name)[0]

    def subtopic_number(self, name: bytes) -> int:
        """Return the id of a sub-topic; never 0."""
        digest = self._subtopics.copy()
        digest.update(name)
        return int.from_bytes(digest.digest(), "big") or 1


VERSION = 1
MAX_PAYLOAD_BYTES = 0xFFF0
PUBLISH_HEADER_BYTES = 15
"""Length, type, tid, ptid and stid of a Publish frame; the payload follows."""
TID, PTID, STID = slice(3, 7), slice(7, 11), slice(11, 15)
"""Byte ranges of the ids in a Publish frame. Code that runs for each message uses the numbers directly."""
MAX_FRAME_BYTES = 0xFFFF
MAX_PACKET_BYTES = MAX_FRAME_BYTES - 2
MAX_NAME_BYTES = MAX_PACKET_BYTES - 6
"""The longest name whose acknowledgement fits a frame; also the longest text of Connack."""
MIN_UID_BYTES = 6


class Type(IntEnum):
    """Packet types."""

    INIT = 1
    CONNECT = 2
    CONNACK = 3
    SUBSCRIBE = 4
    SUBACK = 5
    CREATE = 6
    CREATEACK = 7
    PUBLISH = 8
    UNSUBSCRIBE = 9
    DISCONNECT = 11
    PING = 12
    PONG = 13
    OBSERVE = 14
    UNOBSERVE = 15
    CHANGE = 16
    CREATESUB = 17
    CREATESUBACK = 18
    PUBFRAG = 19


class ConnackCode(IntEnum):
    """Answer codes of Connack."""

    ACCEPTED = 0
    PROTOCOL_VERSION = 1
    SERVER_UNAVAILABLE = 2
    BAD_CREDENTIALS = 3
    CERTIFICATE_REQUIRED = 4
    CERTIFICATE_REJECTED = 5
    ACCESS_DENIED = 6


class Connect(NamedTuple):
    """Contents of a Connect packet; `max_frame_bytes` is 0 unless a version 2 client limits its received frames."""

    uid: bytes
    credentials: bytes
    info: bytes
    max_frame_bytes: int


_PUBLISH = struct.Struct(">HBIII")
_ACK = struct.Struct(">BBI")
_CHANGE = struct.Struct(">BII")
_U32 = struct.Struct(">I")

PONG = bytes((Type.PONG,))
PING = bytes((Type.PING,))


def frame(packet: bytes) -> bytes:
    """Return the frame of `packet` (at most 65533 bytes) for a raw socket."""
    return (len(packet) + 2).to_bytes(2, "big") + packet


def init(seed: int, address: str) -> bytes:
    """Return an Init packet: protocol version, u32 `seed`, the client's IP address without an IPv4-mapped prefix."""
    address = address.removeprefix("::ffff:")
    return bytes((Type.INIT, VERSION)) + seed.to_bytes(4, "big") + address.encode()


def connect(uid: bytes, credentials: bytes = b"", info: bytes = b"") -> bytes:
    """Return a Connect packet of version 1. `uid` and `credentials` have at most 255 bytes."""
    head = bytes((Type.CONNECT, VERSION, len(uid)))
    return head + uid + bytes((len(credentials),)) + credentials + info


def connack(code: int, etid: int, text: bytes = b"") -> bytes:
    """Return a Connack packet; `etid` is 0 on refusal."""
    return _ACK.pack(Type.CONNACK, code, etid) + text


def ack(kind: int, number: int, name: bytes) -> bytes:
    """Return a Suback, Createack or Createsuback packet for `name`; `number` 0 denies it."""
    return _ACK.pack(kind, 0 if number else 1, number) + name


def change(tid: int, subscribers: int) -> bytes:
    """Return a Change packet: the present number of subscribers of `tid`."""
    return _CHANGE.pack(Type.CHANGE, tid, subscribers)


def disconnect(text: bytes = b"") -> bytes:
    """Return a Disconnect packet with a reason."""
    return bytes((Type.DISCONNECT,)) + text


def with_id(kind: int, number: int) -> bytes:
    """Return an Unsubscribe, Observe or Unobserve packet."""
    return bytes((kind,)) + _U32.pack(number)


def with_name(kind: int, name: bytes) -> bytes:
    """Return a Subscribe, Create or Createsub packet."""
    return bytes((kind,)) + name


def publish_frame(tid: int, ptid: int, stid: int, payload: bytes) -> bytes:
    """Return a Publish frame. `payload` has at most 0xFFF0 bytes; the caller has checked that."""
    return _PUBLISH.pack(PUBLISH_HEADER_BYTES + len(payload), Type.PUBLISH, tid, ptid, stid) + payload


def unpack_publish(frame_bytes: bytes) -> tuple[int, int, int, bytes]:
    """Return `(tid, ptid, stid, payload)` of one whole Publish frame."""
    _, _, tid, ptid, stid = _PUBLISH.unpack_from(frame_bytes)
    return tid, ptid, stid, frame_bytes[PUBLISH_HEADER_BYTES:]


def frames(batch: bytes) -> Iterator[bytes]:
    """Yield the frames of `batch`."""
    start, end = 0, len(batch)
    while start < end:
        stop = start + (batch[start] << 8 | batch[start + 1])
        yield batch[start:stop]
        start = stop


def count_frames(batch: bytes | memoryview) -> int:
    """Return the number of frames in `batch`."""
    start, end, count = 0, len(batch), 0
    while start < end:
        start += batch[start] << 8 | batch[start + 1]
        count += 1
    return count


def measure_frames(batch: bytes | memoryview) -> tuple[int, int]:
    """Return the number of frames in `batch`, and the length of the longest."""
    start, end, count, longest = 0, len(batch), 0, 0
    while start < end:
        length = batch[start] << 8 | batch[start + 1]
        start, count, longest = start + length, count + 1, max(longest, length)
    return count, longest


def u32(packet: bytes) -> int:
    """Return the id in an Unsubscribe, Observe or Unobserve packet.

    Raises:
        ProtocolError: the packet is too short.
    """
    if len(packet) < 5:
        raise ProtocolError(CloseReason.SHORT_PACKET)
    return int.from_bytes(packet[1:5], "big")


def name(packet: bytes) -> bytes:
    """Return the name in a Subscribe, Create or Createsub packet.

    Raises:
        ProtocolError: its acknowledgement would not fit a frame.
    """
    if len(packet) - 1 > MAX_NAME_BYTES:
        raise ProtocolError(CloseReason.MESSAGE_TOO_LARGE, f"a name of more than {MAX_NAME_BYTES} bytes")
    return packet[1:]


def parse_connect(packet: bytes) -> Connect:
    """Parse a Connect packet, version 1 or 2 (spec: smq §1.2).

    Raises:
        ProtocolError: wrong type or version, a uid under 6 bytes, or a length that points beyond the packet. A packet
            that ends before the length of the credentials has no credentials and no info.
    """
    if len(packet) < 2 or packet[0] != Type.CONNECT:
        raise ProtocolError(CloseReason.BAD_CONNECT, "the first packet is not Connect")
    version, at = packet[1], 2
    if version not in (1, 2):
        raise ProtocolError(CloseReason.BAD_CONNECT, f"protocol version {version} is not 1 or 2")
    max_frame_bytes = 0
    if version == 2:
        max_frame_bytes, at = int.from_bytes(packet[2:4], "big"), 4
    uid, at = _counted(packet, at, "uid")
    credentials, at = _counted(packet, at, "credentials")
    if len(uid) < MIN_UID_BYTES:
        raise ProtocolError(
            CloseReason.BAD_CONNECT, f"the uid has {len(uid)} bytes, at least {MIN_UID_BYTES} are needed"
        )
    return Connect(uid, credentials, packet[at:], max_frame_bytes)


def _counted(packet: bytes, at: int, what: str) -> tuple[bytes, int]:
    """Return a string that follows its length in one byte, and its end; empty at the end of the packet."""
    if at >= len(packet):
        return b"", at
    end = at + 1 + packet[at]
    if end > len(packet):
        raise ProtocolError(CloseReason.BAD_CONNECT, f"the {what} length points beyond the Connect packet")
    return packet[at + 1 : end], end
