"""SMQ packets: numbers that clients know, and frames one by one."""

from __future__ import annotations

from smqrt.wire import smq
from smqrt.wire.smq import ConnackCode, Type


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
