"""SMQ packets: numbers that clients know, and frames one by one."""

from __future__ import annotations

import pytest

from smqrt.errors import ProtocolError
from smqrt.wire import smq
from smqrt.wire.smq import MAX_NAME_BYTES, MAX_NODE, ConnackCode, Connect, NameNumbers, Type


def test_answers_to_connect_keep_their_numbers() -> None:
    """spec: smq §1"""
    assert [code.value for code in ConnackCode] == list(range(7))
    assert ConnackCode.ACCEPTED == 0
    assert ConnackCode.ACCESS_DENIED == 6


def test_packet_types_keep_their_numbers() -> None:
    """spec: smq §1"""
    assert [kind.value for kind in Type] == [*range(1, 10), *range(11, 20)]
    assert (Type.PUBLISH, Type.DISCONNECT, Type.PUBFRAG) == (8, 11, 19)


def test_frames_are_counted_and_measured() -> None:
    frames = [smq.publish_frame(1, 2, 3, b"x" * size) for size in (0, 300, 5)]
    run = b"".join(frames)
    assert list(smq.frames(run)) == frames
    assert smq.count_frames(run) == 3
    assert smq.measure_frames(run) == (3, 315)
    assert smq.measure_frames(b"") == (0, 0)
    assert smq.unpack_publish(frames[1]) == (1, 2, 3, b"x" * 300)


def test_packets_have_the_bytes_of_the_specification() -> None:
    """spec: smq §1"""
    assert smq.init(0x01020304, "::ffff:192.0.2.7") == b"\x01\x01\1\2\3\x04192.0.2.7"
    assert smq.connect(b"client", b"pw", b"me") == b"\x02\x01\x06client\x02pwme"
    assert smq.connack(3, 7, b"no") == b"\x03\x03\0\0\0\x07no"
    assert smq.ack(Type.SUBACK, 9, b"a") == b"\x05\0\0\0\0\x09a"
    assert smq.ack(Type.SUBACK, 0, b"a") == b"\x05\x01\0\0\0\0a"
    assert smq.change(5, 2) == b"\x10\0\0\0\x05\0\0\0\x02"
    assert smq.disconnect(b"why") == b"\x0bwhy"
    assert smq.with_id(Type.OBSERVE, 258) == b"\x0e\0\0\1\2"
    assert smq.with_name(Type.CREATE, b"a") == b"\x06a"
    assert smq.frame(b"\x0c") == b"\0\x03\x0c"
    assert smq.publish_frame(1, 2, 3, b"x") == b"\0\x10\x08\0\0\0\1\0\0\0\2\0\0\0\3x"
    assert (smq.PING, smq.PONG) == (b"\x0c", b"\x0d")
    assert (smq.MAX_PAYLOAD_BYTES, smq.MAX_FRAME_BYTES) == (0xFFF0, 0xFFFF)


def test_ids_in_a_frame_are_at_their_offsets() -> None:
    frame = smq.publish_frame(0x01020304, 0x05060708, 0x090A0B0C, b"x")
    ids = (b"\1\2\3\4", b"\5\6\7\x08", b"\x09\x0a\x0b\x0c")
    assert (frame[smq.TID], frame[smq.PTID], frame[smq.STID]) == ids


def test_an_etid_has_ten_bits_of_its_node() -> None:
    assert MAX_NODE == 1023
    assert smq.LOCAL_MASK == 0x1FFFFF
    assert smq.server_of(MAX_NODE) == 0x7FE00001
    assert smq.node_of(0x7FFFFFFF) == MAX_NODE
    assert [smq.node_of(number) for number in (0x1FFFFF, 0x200000, 0x80200000)] == [0, 1, 0]


def test_ids_derived_from_names_stay_the_same() -> None:
    """Nodes of two releases derive the same ids."""
    numbers = NameNumbers(b"key")
    assert numbers.topic(b"a/b") == (0x9DC2F0BD, 0xE6C23665)
    assert numbers.topic_number(b"a/b") == 0x9DC2F0BD
    assert numbers.subtopic_number(b"a/b") == 0x44685C7C
    assert all(numbers.topic_number(b"%d" % number) >= 1 << 31 for number in range(50))


def test_an_id_needs_four_bytes() -> None:
    assert smq.u32(b"\x0e\0\0\1\2") == 258
    with pytest.raises(ProtocolError):
        smq.u32(b"\x0e\0\0\1")


def test_the_longest_name_leaves_room_for_its_acknowledgement() -> None:
    longest = smq.with_name(Type.CREATE, b"n" * MAX_NAME_BYTES)
    assert smq.name(longest) == longest[1:]
    assert len(smq.frame(smq.ack(Type.CREATEACK, 1, smq.name(longest)))) == smq.MAX_FRAME_BYTES
    with pytest.raises(ProtocolError):
        smq.name(longest + b"n")


def test_connect_of_both_versions_is_parsed() -> None:
    """spec: smq §1.2"""
    assert smq.parse_connect(smq.connect(b"client", b"pw", b"me")) == Connect(b"client", b"pw", b"me", 0)
    assert smq.parse_connect(b"\x02\x02\x01\x00\x06client\0") == Connect(b"client", b"", b"", 256)
    assert smq.parse_connect(b"\x02\x01\x06client") == Connect(b"client", b"", b"", 0)


@pytest.mark.parametrize(
    ("packet", "why"),
    [
        (b"", "not Connect"),
        (b"\x02", "not Connect"),
        (b"\x03\x01\x06client\0", "not Connect"),
        (b"\x02\x00\x06client\0", "version 0"),
        (b"\x02\x03\x06client\0", "version 3"),
        (b"\x02\x01", "0 bytes, at least 6"),
        (b"\x02\x01\x05clien\0", "5 bytes, at least 6"),
        (b"\x02\x01\x07client", "uid length"),
        (b"\x02\x01\x06client\x03pw", "credentials length"),
    ],
)
def test_a_wrong_connect_is_refused_with_its_reason(packet: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        smq.parse_connect(packet)
