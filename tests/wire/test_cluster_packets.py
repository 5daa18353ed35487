"""Packets between nodes: what is packed comes back, and what is none is a ProtocolError."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smqrt.errors import ProtocolError
from smqrt.wire import cluster_packets, smq
from smqrt.wire.cluster_packets import Announced, Hello, LinkType, Packet
from smqrt.wire.smq import MAX_NODE, MAX_PACKET_BYTES

U16 = st.integers(0, (1 << 16) - 1)
U32 = st.integers(0, (1 << 32) - 1)
U64 = st.integers(0, (1 << 64) - 1)
KEY = st.tuples(U32, U32)
NAME = st.binary(max_size=300)
PEER = st.builds(Announced, U32, U64, st.binary(max_size=255), NAME, st.binary(max_size=255))

LISTS: dict[str, tuple[Any, Callable[[Any], Iterable[bytes]], Callable[[bytes], Iterable[Any]]]] = {
    "keys": (KEY, lambda of: cluster_packets.keys(LinkType.INTEREST, of), cluster_packets.parse_keys),
    "numbers": (
        st.tuples(U32, U32, U32),
        lambda of: cluster_packets.keys_and_numbers(LinkType.COUNT, of),
        cluster_packets.parse_keys_and_numbers,
    ),
    "etids": (U32, cluster_packets.etids, cluster_packets.parse_etids),
    "names": (st.tuples(U32, NAME), lambda of: cluster_packets.names(LinkType.TOPICS, of), cluster_packets.parse_names),
    "peers": (PEER, cluster_packets.peers, cluster_packets.parse_peers),
}


@pytest.mark.parametrize("kind", LISTS)
@given(data=st.data())
def test_lists_come_back_in_packets_that_fit(kind: str, data: st.DataObject) -> None:
    item, pack, parse = LISTS[kind]
    some = data.draw(st.lists(item, max_size=8))
    given_items = some * data.draw(st.sampled_from((1, 1, 1, 200)))
    packets = list(pack(given_items))
    assert all(len(packet) <= MAX_PACKET_BYTES for packet in packets)
    assert [one for packet in packets for one in parse(packet)] == given_items


@pytest.mark.parametrize("kind", LISTS)
@given(packet=st.binary(min_size=1, max_size=200))
def test_any_bytes_are_a_list_or_an_error(kind: str, packet: bytes) -> None:
    _, pack, parse = LISTS[kind]
    try:
        found = list(parse(packet))
    except ProtocolError:
        return
    assert b"".join(one[1:] for one in pack(found)) == packet[1:]


def test_client_information_is_truncated_to_fit() -> None:
    (packet,) = cluster_packets.peers([Announced(1, 2, b"u" * 255, b"i" * MAX_PACKET_BYTES, b"n" * 400)])
    (found,) = cluster_packets.parse_peers(packet)
    assert len(packet) <= MAX_PACKET_BYTES
    assert (found.uid, found.user) == (b"u" * 255, b"n" * 255)
    assert len(found.info) > MAX_PACKET_BYTES - 600


FRAME = st.tuples(U32, U32, U32, st.binary(max_size=20))


@given(st.lists(FRAME, min_size=1, max_size=6), U32, U32, st.dictionaries(U32, U32, max_size=3))
def test_runs_are_rewritten_frame_by_frame(
    frames: list[tuple[int, int, int, bytes]], tid: int, ptid: int, subtopics: dict[int, int]
) -> None:
    run = b"".join(smq.publish_frame(*frame) for frame in frames)
    other = cluster_packets.rewritten(run, tid, ptid)
    assert [smq.unpack_publish(one) for one in smq.frames(other)] == [(tid, ptid, *frame[2:]) for frame in frames]
    replaced = {one.to_bytes(4, "big"): new.to_bytes(4, "big") for one, new in subtopics.items()}
    found = [smq.unpack_publish(one) for one in smq.frames(cluster_packets.with_subtopics(run, replaced))]
    assert found == [(frame[0], frame[1], subtopics.get(frame[2], frame[2]), frame[3]) for frame in frames]


HELLO = st.builds(
    Hello,
    st.integers(0, 255),
    st.integers(0, 255),
    st.binary(min_size=cluster_packets.ID_BYTES, max_size=cluster_packets.ID_BYTES),
    U64,
    st.binary(min_size=cluster_packets.NONCE_BYTES, max_size=cluster_packets.NONCE_BYTES),
)
NUMBERS = st.lists(st.integers(1, MAX_NODE), max_size=20)
SINGLE: dict[str, tuple[Any, Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    "hello": (HELLO, cluster_packets.hello, cluster_packets.parse_hello),
    "numbers": (NUMBERS, lambda of: cluster_packets.numbers(Packet.NODE, of), cluster_packets.parse_numbers),
    "channel": (
        st.tuples(U16, NAME),
        lambda of: cluster_packets.channel(Packet.OPEN, *of),
        cluster_packets.parse_channel,
    ),
    "u64": (U64, lambda of: cluster_packets.u64(Packet.ACK, of), cluster_packets.parse_u64),
    "end": (st.tuples(U32, NAME), lambda of: cluster_packets.end(*of), cluster_packets.parse_end),
}


@pytest.mark.parametrize("kind", SINGLE)
@given(data=st.data())
def test_single_packets_come_back(kind: str, data: st.DataObject) -> None:
    values, pack, parse = SINGLE[kind]
    value = data.draw(values)
    assert parse(pack(value)) == value


@pytest.mark.parametrize("kind", SINGLE)
@given(packet=st.binary(min_size=1, max_size=100))
def test_any_bytes_are_a_packet_or_an_error(kind: str, packet: bytes) -> None:
    _, pack, parse = SINGLE[kind]
    try:
        found = parse(packet)
    except ProtocolError:
        return
    assert pack(found)[1:] == packet[1:]


@given(st.binary(min_size=32, max_size=32), st.booleans(), st.binary(max_size=60), st.binary(max_size=40))
def test_a_proof_covers_key_direction_and_both_hellos(key: bytes, connects: bool, hellos: bytes, other: bytes) -> None:
    proof = cluster_packets.proof(key, connects, hellos)
    assert cluster_packets.is_proof(proof, key, connects, hellos)
    assert not cluster_packets.is_proof(proof, key, not connects, hellos)
    assert not cluster_packets.is_proof(proof, key, connects, hellos + b"x")
    assert not cluster_packets.is_proof(proof, bytes(32) if any(key) else b"k" * 32, connects, hellos)
    assert not cluster_packets.is_proof(other, key, connects, hellos)


def test_packet_types_keep_their_numbers() -> None:
    """Nodes of two versions talk to each other while a cluster is upgraded."""
    assert [kind.value for kind in LinkType] == list(range(0x41, 0x41 + len(LinkType)))
    some = [LinkType.INTEREST, LinkType.NUMBERED, LinkType.END, LinkType.PRESSED, LinkType.ONCE]
    assert some == [0x41, 0x43, 0x4B, 0x50, 0x52]
    assert sorted(kind.value for kind in Packet) == list(range(0x60, 0x60 + len(Packet)))


def test_the_key_of_a_password_stays() -> None:
    key = cluster_packets.key_of(b"secret", b"c")
    assert key.hex() == "83d6e07f4637a07e6f15c7001f8815b3413e1d158c8aa1c42fe750f469d4b17c"
    assert cluster_packets.key_of(b"secret", b"d") != key


def test_one_frame_is_rewritten_as_several_are() -> None:
    frames = [smq.publish_frame(1, 2, 3, b"x" * size) for size in (1, 300)]
    expected = [smq.publish_frame(7, 8, 3, b"x" * size) for size in (1, 300)]
    for run, rewritten in ((frames[:1], expected[:1]), (frames[1:], expected[1:]), (frames[::-1], expected[::-1])):
        assert cluster_packets.rewritten(b"".join(run), 7, 8) == b"".join(rewritten)
