"""The LuaJIT kernels and their twins in Python give the same bytes for the same input."""

from __future__ import annotations

import ctypes
import os
import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smqrt.wire import kernels as luajit_kernels
from smqrt.wire import smq, websocket
from smqrt.wire.kernels import (
    BUFFER_BYTES,
    ENCODE_BYTES,
    ROW_MESSAGES,
    PureKernels,
    encode_batch,
    encode_frame,
    mqtt_packets,
)
from smqrt.wire.mqtt.fields import varint
from tests.support.device import masked, publish

JIT, PURE = luajit_kernels.JitKernels(), PureKernels()
SETTINGS = settings(max_examples=120)

PACKETS = st.one_of(
    st.binary(min_size=1, max_size=40),
    st.builds(publish, st.integers(1, 3), st.integers(1, 2), st.binary(max_size=40)),
    st.builds(lambda size: publish(1, 1, b"x" * size), st.integers(100, 300)),
)
SPOILED = st.one_of(
    st.just(b""), st.binary(max_size=20), st.sampled_from([b"\0\2\0", b"\0\0\0", b"\0\x0e\x08" + b"\0" * 11])
)
FRAMES = st.builds(lambda packet, key: masked(packet, key=key), PACKETS, st.binary(min_size=4, max_size=4))


def fill(data: bytes) -> None:
    for kernels in (JIT, PURE):
        kernels.view[: len(data)] = data


@SETTINGS
@given(st.lists(PACKETS, max_size=30), SPOILED, st.integers(0, 50))
def test_scan(packets: list[bytes], tail: bytes, cut: int) -> None:
    data = b"".join(map(smq.frame, packets)) + tail
    data = data[: max(len(data) - cut, 0)]
    fill(data)
    found = JIT.scan(len(data), 0)
    assert found == PURE.scan(len(data), 0)
    ends = JIT.ends[: found[0]].tolist()
    assert ends == PURE.ends[: found[0]].tolist()
    assert JIT.frames[: found[0]].tolist() == PURE.frames[: found[0]].tolist()
    assert (ends[-1] if ends else 0) == found[1]


@SETTINGS
@given(st.lists(PACKETS, max_size=30))
def test_count(packets: list[bytes]) -> None:
    run = b"".join(map(smq.frame, packets))
    assert JIT.count(run) == PURE.count(run) == len(packets)
    assert JIT.measure(run) == PURE.measure(run) == (len(packets), max((len(one) + 2 for one in packets), default=0))


@SETTINGS
@given(st.lists(PACKETS, max_size=30))
def test_scan_gives_every_frame_once(packets: list[bytes]) -> None:
    packets = [packet for packet in packets if packet[0] != smq.Type.PUBLISH or len(packet) >= 13]
    data = b"".join(map(smq.frame, packets))
    fill(data)
    runs, used, bad = JIT.scan(len(data), 0)
    assert (used, bad) == (len(data), False)
    starts = [0, *JIT.ends[:runs].tolist()]
    run_list = [data[start:end] for start, end in zip(starts, starts[1:], strict=False)]
    assert [frame[2:] for run in run_list for frame in smq.frames(run)] == packets
    for run in run_list:
        keys = {frame[2:11] for frame in smq.frames(run)}
        assert len(keys) == 1


@SETTINGS
@given(st.lists(PACKETS, max_size=30), SPOILED, st.lists(st.integers(1, 3), unique=True), st.integers(1, 2), st.data())
def test_spread(packets: list[bytes], tail: bytes, tids: list[int], publisher: int, data: st.DataObject) -> None:
    stream = b"".join(map(smq.frame, packets)) + tail
    fill(stream)
    keys = b"".join(tid.to_bytes(4, "big") for tid in tids)
    reader = int.from_bytes(publisher.to_bytes(4, "big"), "little")
    numbers = array("I", [data.draw(st.integers(0, 1)) for _ in tids]).tobytes()
    found = [kernels.partition(len(stream), kernels.partition_table(keys, numbers), reader) for kernels in (JIT, PURE)]
    assert found[0] == found[1]
    (count, used, _), ends = found[0], JIT.partition_ends[: found[0][0]].tolist()
    assert JIT.partition_ids[:count].tolist() == PURE.partition_ids[:count].tolist()
    assert ends == PURE.partition_ends[:count].tolist()
    size = ends[-1] if ends else 0
    assert size == used
    assert bytes(JIT.partitioned[:size]) == bytes(PURE.partitioned[:size])


@SETTINGS
@given(st.lists(FRAMES, max_size=20), SPOILED, st.integers(0, 20))
def test_unmask(frames: list[bytes], tail: bytes, cut: int) -> None:
    data = b"".join(frames) + tail
    data = data[: max(len(data) - cut, 0)]
    fill(data)
    written, used = JIT.unmask(len(data))
    assert (written, used) == PURE.unmask(len(data))
    assert bytes(JIT.view[:written]) == bytes(PURE.view[:written])


@SETTINGS
@given(st.lists(PACKETS, max_size=20), st.lists(st.sampled_from([0x82, 0x81, 0x02, 0x89, 0xC2]), max_size=3))
def test_unmask_stops_at_what_is_not_plain(packets: list[bytes], firsts: list[int]) -> None:
    data = b"".join(map(masked, packets)) + b"".join(bytes((first, 0x81)) + b"\0\0\0\0x" for first in firsts)
    fill(data)
    written, used = JIT.unmask(len(data))
    assert (written, used) == PURE.unmask(len(data))
    plain = b"".join(map(smq.frame, packets))
    assert bytes(JIT.view[: len(plain)]) == plain


@SETTINGS
@given(st.lists(PACKETS, max_size=40), st.integers(0, 30))
def test_encode(packets: list[bytes], cut: int) -> None:
    run = b"".join(map(smq.frame, packets))
    run = run[: max(len(run) - cut, 0)]
    assert JIT.encode(run) == PURE.encode(run)


@pytest.mark.parametrize("size", [0, 1, 108, 109, 110, 111, 112, 113, 114, 4096, 32750, 32760, 60000, 65520])
def test_encode_run_of_every_size(size: int) -> None:
    run = smq.publish_frame(1, 2, 3, os.urandom(size)) * 5
    expected = b"".join(map(encode_frame, smq.frames(run)))
    assert encode_batch(JIT, run) == encode_batch(PURE, run) == expected
    assert expected.startswith(websocket.header(websocket.BINARY, size + 13))


def test_long_runs() -> None:
    """More than one piece of the encoder, and a full receive buffer."""
    rng = random.Random(1)
    run = b"".join(smq.publish_frame(1, 2, 0, b"y" * rng.choice((0, 3, 200, 2000, 33000))) for _ in range(60))
    assert len(run) > 5 * ENCODE_BYTES
    assert encode_batch(JIT, run) == encode_batch(PURE, run)
    data = (smq.frame(smq.PING) * BUFFER_BYTES)[:BUFFER_BYTES]
    fill(data)
    assert JIT.scan(BUFFER_BYTES, 0) == PURE.scan(BUFFER_BYTES, 0) == (BUFFER_BYTES // 3, BUFFER_BYTES // 3 * 3, False)


SOMETHING_ELSE = ctypes.create_string_buffer(b"\x00\x0a", 16)


def test_the_pure_kernels_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMQRT_KERNELS", "pure")
    assert isinstance(luajit_kernels.load(), PureKernels)
    monkeypatch.delenv("SMQRT_KERNELS")
    assert isinstance(luajit_kernels.load(), luajit_kernels.JitKernels)
    monkeypatch.setattr(luajit_kernels, "JitKernels", lambda: 1 / 0)
    assert isinstance(luajit_kernels.load(), PureKernels)


def test_loops_that_see_other_bytes_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(luajit_kernels, "_address", lambda data: ctypes.addressof(SOMETHING_ELSE))
    assert isinstance(luajit_kernels.load(), PureKernels)
    assert len(caplog.records) == 1
    assert "LuaJIT kernels are not available (they return" in caplog.text


def mqtt_publish(
    version: int, name: bytes, payload: bytes, first: int = 0x30, block: bytes = b"\0", number: int = 0
) -> bytes:
    identifier = number.to_bytes(2) if first & 6 else b""
    body = len(name).to_bytes(2) + name + identifier + (block if version == 5 else b"") + payload
    return bytes((first,)) + varint(len(body)) + body


NAMES = st.sampled_from([b"t", b"topic", b"house/kitchen/temp", b"tooth"])
PAYLOADS = st.one_of(st.binary(max_size=20), st.sampled_from([b"x" * 120, b"y" * 300, b"z" * 17000, b"q" * 0xFFF0]))
MQTT_PACKETS = st.one_of(
    st.builds(mqtt_publish, st.sampled_from([4, 5]), NAMES, PAYLOADS),
    st.builds(mqtt_publish, st.just(5), NAMES, PAYLOADS, st.just(0x30), st.just(b"\x02\x01\x01")),
    st.builds(mqtt_publish, st.just(4), NAMES, PAYLOADS, st.just(0x31)),
    st.binary(max_size=6),
    st.just(mqtt_publish(4, b"t", b"x" * 0xFFF1)),
)


@SETTINGS
@given(NAMES, st.lists(PAYLOADS, max_size=10), st.lists(MQTT_PACKETS, max_size=4), st.integers(0, 30), st.booleans())
def test_publish_packets_become_frames(
    name: bytes, payloads: list[bytes], others: list[bytes], cut: int, is_5: bool
) -> None:
    packets = [mqtt_publish(5 if is_5 else 4, name, one) for one in payloads]
    data = b"xy" + b"".join(packets + others)
    data = data[: max(len(data) - cut, 2)][:BUFFER_BYTES]
    fill(data)
    arguments = 2, len(data), len(name), int(is_5), 0x81020304, 0x90A0B0C0
    count, used, written = JIT.publishes(*arguments)
    assert PURE.publishes(*arguments) == (count, used, written)
    frames = bytes(memoryview(JIT.partitioned)[:written])
    assert frames == bytes(memoryview(PURE.partitioned)[:written])
    found = [smq.unpack_publish(frame) for frame in smq.frames(frames)]
    assert len(found) == count
    assert {one[:3] for one in found} <= {(0x81020304, 0x90A0B0C0, 0)}
    if not cut:
        assert [one[3] for one in found][: len(payloads)] == payloads[: len(found)]
        assert count >= len(payloads) or sum(map(len, packets)) > BUFFER_BYTES // 2


@SETTINGS
@given(
    NAMES,
    st.lists(st.tuples(st.integers(0, 300), PAYLOADS), max_size=10),
    st.lists(MQTT_PACKETS, max_size=4),
    st.integers(0, 30),
    st.booleans(),
    st.sampled_from([0x32, 0x34]),
    st.sampled_from([1, 30]),
)
def test_publish_packets_with_identifiers_become_frames(
    name: bytes,
    messages: list[tuple[int, bytes]],
    others: list[bytes],
    cut: int,
    is_5: bool,
    first: int,
    times: int,
) -> None:
    packets = [mqtt_publish(5 if is_5 else 4, name, one, first, number=number) for number, one in messages] * times
    data = b"".join(packets + others)
    data = data[: max(len(data) - cut, 0)][:BUFFER_BYTES]
    if data[:1] != bytes((first,)):
        return
    fill(data)
    arguments = 0, len(data), len(name), int(is_5), 0x81020304, 0x90A0B0C0
    count, used, written = JIT.publishes(*arguments)
    assert PURE.publishes(*arguments) == (count, used, written)
    assert count <= ROW_MESSAGES
    numbers, frames = JIT.packet_numbers[: 2 * count], bytes(memoryview(JIT.partitioned)[:written])
    assert numbers == PURE.packet_numbers[: 2 * count]
    assert frames == bytes(memoryview(PURE.partitioned)[:written])
    payloads = [smq.unpack_publish(one)[3] for one in smq.frames(frames)]
    found = [(int.from_bytes(numbers[2 * at : 2 * at + 2]), payload) for at, payload in enumerate(payloads)]
    assert found == (messages * times)[:count]
    if not cut:
        expected = next((at for at, (number, _) in enumerate(messages) if not number), len(packets))
        assert count == min(expected, ROW_MESSAGES) or len(data) > BUFFER_BYTES // 2


@SETTINGS
@given(NAMES, st.lists(PAYLOADS, max_size=10), st.binary(max_size=4), st.sampled_from([0x30, 0x31]))
def test_frames_become_publish_packets(name: bytes, payloads: list[bytes], block: bytes, first: int) -> None:
    batch = b"".join(smq.publish_frame(1, 2, 3, one) for one in payloads)
    fixed = len(name).to_bytes(2) + name + block
    expected = b"".join(bytes((first,)) + varint(len(fixed + one)) + fixed + one for one in payloads)
    assert mqtt_packets(JIT.packed, batch, first, fixed) == mqtt_packets(PURE.packed, batch, first, fixed) == expected
