"""Packets between nodes: what is packed comes back, and what is none is a ProtocolError."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smqrt.errors import ProtocolError
from smqrt.wire import cluster_packets, smq
from smqrt.wire.cluster_packets import Announced, Hello, LinkType, Packet, Refusal, Siblings
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
@given(data=st.data())
def test_a_list_in_parts_has_the_same_items(kind: str, data: st.DataObject) -> None:
    item, pack, parse = LISTS[kind]
    (packet,) = pack(items := data.draw(st.lists(item, min_size=1, max_size=20)))
    size_bytes, parts = data.draw(st.integers(2, 600)), []
    rest = packet
    while rest[1:]:
        end = cluster_packets.first_items(rest, size_bytes)
        assert end == len(rest) or end >= size_bytes
        parts.append(rest[:end])
        rest = rest[:1] + rest[end:]
    assert [one for part in parts for one in parse(part)] == items


@given(kind=st.sampled_from([*LinkType, 0, 255]), items=st.binary(max_size=200), size_bytes=st.integers(2, 300))
def test_any_bytes_have_first_items(kind: int, items: bytes, size_bytes: int) -> None:
    packet = bytes((kind,)) + items
    assert min(2, len(packet)) <= cluster_packets.first_items(packet, size_bytes) <= len(packet)


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
    # From 0x60 on are the packets of the link; so the types after 0x5F are 0x40 and 0x3F.
    assert [kind.value for kind in LinkType] == [*range(0x41, 0x60), 0x40, 0x3F]
    some = [LinkType.INTEREST, LinkType.NUMBERED, LinkType.END, LinkType.PRESSED, LinkType.ONCE]
    assert some == [0x41, 0x43, 0x4B, 0x50, 0x52]
    assert sorted(kind.value for kind in Packet) == list(range(0x60, 0x60 + len(Packet)))


def test_the_key_of_a_password_stays() -> None:
    key = cluster_packets.key_of(b"secret", b"c")
    assert key.hex() == "83d6e07f4637a07e6f15c7001f8815b3413e1d158c8aa1c42fe750f469d4b17c"
    assert cluster_packets.key_of(b"secret", b"d") != key
    assert cluster_packets.key_of(b"secret") == cluster_packets.key_of(b"secret", b"")


def test_one_frame_is_rewritten_as_several_are() -> None:
    frames = [smq.publish_frame(1, 2, 3, b"x" * size) for size in (1, 300)]
    expected = [smq.publish_frame(7, 8, 3, b"x" * size) for size in (1, 300)]
    for run, rewritten in ((frames[:1], expected[:1]), (frames[1:], expected[1:]), (frames[::-1], expected[::-1])):
        assert cluster_packets.rewritten(b"".join(run), 7, 8) == b"".join(rewritten)


PLACE = st.tuples(st.binary(min_size=16, max_size=16), U16)


@given(st.binary(min_size=16, max_size=16), st.lists(PLACE, min_size=1, max_size=5).map(tuple), st.data())
def test_processes_of_a_server_come_back(server: bytes, places: tuple[tuple[bytes, int], ...], data: Any) -> None:
    announced = Siblings(server, data.draw(st.integers(0, len(places) - 1)), places)
    assert cluster_packets.parse_siblings(cluster_packets.siblings(announced)) == announced


def test_a_sender_is_one_of_its_processes() -> None:
    places = ((bytes(16), 7),) * 2
    for own, count in ((2, 2), (0, 0), (0, cluster_packets.MAX_SIBLINGS + 1)):
        packet = cluster_packets.siblings(Siblings(bytes(16), own, (places * 1024)[:count]))
        with pytest.raises(ProtocolError, match="processes"):
            cluster_packets.parse_siblings(packet)
    largest = Siblings(bytes(16), 1023, places * 512)
    assert cluster_packets.parse_siblings(cluster_packets.siblings(largest)) == largest


def test_a_cut_announcement_of_processes_is_refused() -> None:
    packet = cluster_packets.siblings(Siblings(b"s" * 16, 0, ((b"i" * 16, 258),)))
    assert packet == b"\x6d" + b"s" * 16 + b"\0\0" + b"i" * 16 + b"\1\2"
    for size in range(1, len(packet)):
        with pytest.raises(ProtocolError):
            cluster_packets.parse_siblings(packet[:size])


def test_packets_of_a_link_have_fixed_bytes() -> None:
    """Nodes of two versions talk to each other while a cluster is upgraded."""
    hello = Hello(1, 2, b"i" * 16, 258, b"n" * 32)
    assert cluster_packets.hello(hello) == b"\x60smqrt node\1\2" + b"i" * 16 + bytes(6) + b"\1\2" + b"n" * 32
    assert cluster_packets.refused(Refusal.NUMBER, "no") == b"\x62\x05no"
    assert cluster_packets.numbers(Packet.TAKEN, [1, 258]) == b"\x64\0\1\1\2"
    assert cluster_packets.channel(Packet.CLOSE, 258, b"why") == b"\x66\1\2why"
    assert cluster_packets.u64(Packet.HANDLED, 258) == b"\x6c" + bytes(6) + b"\1\2"
    assert cluster_packets.end(258, b"why") == b"\x4b\0\0\1\2why"
    assert list(cluster_packets.keys(LinkType.WATCH, [(1, 2)])) == [b"\x48\0\0\0\1\0\0\0\2"]
    assert list(cluster_packets.names(LinkType.TOPICS, [(1, b"ab")])) == [b"\x4c\0\0\0\1\0\2ab"]
    assert list(cluster_packets.etids([1, 2])) == [b"\x46\0\0\0\1\0\0\0\2"]
    peer = Announced(1, 2, b"u", b"info", b"joe")
    assert list(cluster_packets.peers([peer])) == [b"\x45\0\0\0\1" + bytes(7) + b"\2\1u\0\4info\3joe"]
    assert (cluster_packets.OLDEST_VERSION, cluster_packets.VERSION) == (1, 4)
    assert [code.value for code in Refusal] == list(range(1, 7))


def test_prefixes_of_channels_that_are_no_hubs_stay() -> None:
    assert cluster_packets.APP == b"\xff"
    some = [cluster_packets.PRESSURE, cluster_packets.STAMPS, cluster_packets.SUCCESSION, cluster_packets.SIBLINGS]
    assert some == [b"\xfepressure", b"\xfestamps", b"\xfesuccession", b"\xfesiblings"]


def test_a_proof_and_the_key_of_a_link_stay() -> None:
    assert cluster_packets.proof(b"k", True, b"h").hex().startswith("61df2b5406b0")
    assert cluster_packets.proof(b"k", False, b"h").hex().startswith("6149e35610fc")
    assert cluster_packets.session_key(b"k", b"h").hex().startswith("b21198a50a74d602")
    assert len(cluster_packets.proof(b"k", True, b"h")) == 1 + cluster_packets.PROOF_BYTES


@pytest.mark.parametrize("number", [0, MAX_NODE + 1])
def test_a_node_number_out_of_range_is_refused(number: int) -> None:
    assert cluster_packets.parse_numbers(cluster_packets.numbers(Packet.NODE, [1, MAX_NODE])) == [1, MAX_NODE]
    with pytest.raises(ProtocolError, match="node number"):
        cluster_packets.parse_numbers(cluster_packets.numbers(Packet.NODE, [1, number]))


def test_a_packet_is_filled_to_its_last_byte() -> None:
    fitting = (MAX_PACKET_BYTES - 1) // 4
    assert (MAX_PACKET_BYTES - 1) % 4 == 0
    sizes = [len(packet) for packet in cluster_packets.etids(range(fitting + 1))]
    assert sizes == [MAX_PACKET_BYTES, 5]
    assert list(cluster_packets.etids([])) == []


def test_a_hello_of_another_program_is_refused() -> None:
    hello = cluster_packets.hello(Hello(1, 1, bytes(16), 0, bytes(32)))
    for other in (hello[:-1], hello + b"x", b"\x61" + hello[1:], hello[:1] + b"other node" + hello[11:]):
        with pytest.raises(ProtocolError, match="not from a node"):
            cluster_packets.parse_hello(other)
