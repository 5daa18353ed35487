"""Kernels of the data path at the edges of frames, in both kinds."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from smqrt.wire import smq, websocket
from smqrt.wire.kernels import JitKernels, PureKernels, encode_batch, encode_frame

FRAME = smq.publish_frame(1, 2, 3, b"x")
KEY = b"\1\2\3\4"


@pytest.fixture(params=[JitKernels, PureKernels])
def kernels(request: pytest.FixtureRequest) -> Any:
    return request.param()


def scanned(kernels: Any, data: bytes, start: int = 0) -> tuple[tuple[int, int, bool], list[int], list[int]]:
    kernels.view[: len(data)] = data
    found = kernels.scan(len(data), start)
    return found, kernels.ends[: found[0]].tolist(), kernels.frames[: found[0]].tolist()


def unmasked(kernels: Any, data: bytes) -> tuple[bytes, int]:
    kernels.view[: len(data)] = data
    written, used = kernels.unmask(len(data))
    return bytes(kernels.view[:written]), used


def masked(first: int, head: bytes, payload: bytes) -> bytes:
    return bytes((first,)) + head + KEY + websocket.mask(payload, KEY)


@pytest.mark.parametrize("data", [b"\0\0", b"\0\2", b"\0\2\x08", b"\0\3\x08", b"\0\x0e\x08", b"\0\x0e\x08" + bytes(11)])
def test_a_frame_that_is_too_short_is_bad(kernels: Any, data: bytes) -> None:
    assert scanned(kernels, data) == ((0, 0, True), [], [])
    assert scanned(kernels, FRAME + data) == ((1, len(FRAME), True), [len(FRAME)], [1])


def test_an_incomplete_frame_waits_for_the_rest(kernels: Any) -> None:
    for size in range(len(FRAME)):
        assert scanned(kernels, FRAME[:size]) == ((0, 0, False), [], [])
        assert scanned(kernels, FRAME + FRAME[:size])[0] == (1, len(FRAME), False)
    assert scanned(kernels, b"\0\3\x0c") == ((1, 3, False), [3], [1])


def test_messages_of_one_publisher_to_one_topic_are_together(kernels: Any) -> None:
    size = len(FRAME)
    others = [smq.publish_frame(9, 2, 3, b"x"), smq.publish_frame(1, 9, 3, b"x"), smq.publish_frame(1, 2, 9, b"x")]
    assert scanned(kernels, FRAME * 3) == ((1, 3 * size, False), [3 * size], [3])
    assert scanned(kernels, FRAME * 3, size) == ((1, 3 * size, False), [3 * size], [2])
    assert [scanned(kernels, FRAME + other)[2] for other in others] == [[1, 1], [1, 1], [2]]
    ping = smq.frame(smq.PING)
    assert scanned(kernels, FRAME + ping * 2 + FRAME)[2] == [1, 1, 1, 1]


def test_messages_are_sorted_by_partition(kernels: Any) -> None:
    one, two, three = (smq.publish_frame(tid, 7, 0, b"%d" % tid) for tid in (1, 2, 3))
    table = kernels.partition_table(b"".join(tid.to_bytes(4, "big") for tid in (1, 2)), array("I", [5, 0]).tobytes())
    publisher = int.from_bytes((7).to_bytes(4, "big"), "little")
    whole = one + two + one
    cases = {
        whole: (2, len(whole), 3),
        whole + three: (2, len(whole), 3),
        whole + one[:-1]: (2, len(whole), 3),
        whole + smq.publish_frame(1, 8, 0, b""): (2, len(whole), 3),
        whole + b"\0\x0f\x0b" + one[3:15]: (2, len(whole), 3),
        two: (1, len(two), 1),
        b"": (0, 0, 0),
    }
    for data, expected in cases.items():
        kernels.view[: len(data)] = data
        assert kernels.partition(len(data), table, publisher) == expected
        if data.startswith(whole):
            assert kernels.partition_ids[:2].tolist() == [0, 5]
            assert kernels.partition_ends[:2].tolist() == [len(two), len(whole)]
            assert bytes(kernels.partitioned[: len(whole)]) == two + one + one


@pytest.mark.parametrize(
    ("head", "size"),
    [(b"\x81", 1), (b"\xfd", 125), (b"\xfe\0\x7e", 126), (b"\xfe\xff\xfd", 65533)],
)
def test_masked_frames_become_raw_ones(kernels: Any, head: bytes, size: int) -> None:
    payload = bytes(range(256)) * 256
    data, raw = masked(0x82, head, payload[:size]), smq.frame(payload[:size])
    assert unmasked(kernels, data) == (raw, len(data))
    assert unmasked(kernels, data[:-1]) == (b"", 0)
    small = masked(0x82, b"\x82", b"hi")
    assert unmasked(kernels, small + data + small[:3]) == (b"\0\4hi" + raw, len(small + data))


@pytest.mark.parametrize(
    "data",
    [
        masked(0x82, b"\x80", b""),
        masked(0x02, b"\x81", b"x"),
        masked(0x81, b"\x81", b"x"),
        masked(0xC2, b"\x81", b"x"),
        masked(0x82, b"\xfe\0\x7d", b"x" * 125),
        masked(0x82, b"\xfe\xff\xfe", b"x" * 65534),
        masked(0x82, b"\xff" + bytes(6) + b"\0\1", b"x"),
        b"\x82\x04x12345678",
    ],
)
def test_other_frames_are_left_to_the_codec(kernels: Any, data: bytes) -> None:
    assert unmasked(kernels, data) == (b"", 0)


@pytest.mark.parametrize("size", [1, 125, 126, 65533])
def test_raw_frames_become_websocket_frames(kernels: Any, size: int) -> None:
    raw = smq.frame(b"p" * size)
    expected = websocket.encode(websocket.BINARY, b"p" * size)
    assert encode_frame(raw) == expected
    assert encode_batch(kernels, raw * 3) == expected * 3
    if size < 200:
        assert kernels.encode(raw + raw[:-1]) == (expected, len(raw))
    assert kernels.count(raw * 3) == 3
    assert kernels.measure(raw + smq.frame(b"q")) == (2, max(len(raw), 3))
    assert (kernels.encode(b""), kernels.count(b""), kernels.measure(b"")) == ((b"", 0), 0, (0, 0))
