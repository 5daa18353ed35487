"""Any split of the byte stream gives the same packets (spec: smq §1)."""

from __future__ import annotations

import struct
from typing import Any

import gevent
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smqrt.wire import smq, websocket
from smqrt.wire.smq import Type
from tests.support.device import RAW, RAW_HEADERS, WS, WS_HEADERS, Site, connect_packet, masked, publish, request

SETTINGS = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
ETID_MARK = 0xEEEEEEEE


def _numbered(kind: int) -> st.SearchStrategy[bytes]:
    return st.sampled_from([100, 200, 0x7FFFFFFF]).map(lambda number: smq.with_id(kind, number))


def _message(kind: int, tids: list[int]) -> st.SearchStrategy[bytes]:
    payloads = st.one_of(st.binary(max_size=30), st.integers(100, 6000).map(lambda size: b"p" * size))
    return st.builds(
        lambda tid, stid, data: publish(tid, ETID_MARK, data, stid, kind),
        st.sampled_from(tids),
        st.integers(0, 3),
        payloads,
    )


CONTROL = [
    st.just(smq.PING),
    st.just(smq.PONG),
    st.sampled_from([b"a", b"b", b"\xff\0"]).map(lambda name: b"\x04" + name),
    st.sampled_from([b"a", b"b"]).map(lambda name: b"\x06" + name),
    st.sampled_from([b"s", b"t"]).map(lambda name: b"\x11" + name),
    _numbered(Type.UNSUBSCRIBE),
    _numbered(Type.OBSERVE),
    _numbered(Type.UNOBSERVE),
]
MESSAGES = _message(Type.PUBLISH, [100, 200, ETID_MARK, 0x7FFFFFFF])
PACKETS = st.lists(st.one_of(MESSAGES, MESSAGES, *CONTROL), min_size=1, max_size=40)
FRAGMENTS = _message(Type.PUBFRAG, [0, 100, ETID_MARK])
RAW_PACKETS = st.lists(st.one_of(MESSAGES, FRAGMENTS, *CONTROL), min_size=1, max_size=40)
FORMS = st.sampled_from(["plain", "text", "two", "empty ends"])
CUTS = st.lists(st.floats(0, 1, exclude_max=True), max_size=12)


def conversation(site: Site, kind: str, packets: list[bytes], cuts: list[float], as_frames: Any = None) -> list[bytes]:
    """What a fresh broker answers, with its random numbers replaced by names."""
    for name, tid in (("a", 100), ("b", 200)):
        site.smq.create(name, tid)
    site.smq.create(b"\xff\0", 300)
    site.smq.createsub("s", 1)
    site.smq.createsub("t", 2)
    device = site.device(b"uid-a1", kind)
    own = struct.pack(">I", device.etid)
    stream = (as_frames or (lambda all_packets: b"".join(map(device.framed, all_packets))))(
        [packet.replace(struct.pack(">I", ETID_MARK), own) for packet in packets]
    )
    places = sorted({0, len(stream), *(int(cut * len(stream)) for cut in cuts)})
    for start, end in zip(places, places[1:], strict=False):
        device.send_bytes(stream[start:end])
        gevent.sleep(0)
        gevent.sleep(0)
    device.send_bytes(masked(smq.PING) if device.on_websocket else smq.frame(smq.PING))
    answers = []
    pongs = sum(packet == smq.PING for packet in packets)
    while pongs >= 0:
        answers.append(device.receive().replace(own, b"\xee\xee\xee\xee"))
        pongs -= answers[-1] == smq.PONG
    device.disconnect()
    return answers


@SETTINGS
@given(packets=RAW_PACKETS, cuts=CUTS)
def test_raw(site: Site, packets: list[bytes], cuts: list[float]) -> None:
    assert conversation(site, RAW, packets, cuts) == conversation(site, RAW, packets, [])


@SETTINGS
@given(packets=PACKETS, cuts=CUTS)
def test_websocket_gives_what_raw_gives(site: Site, packets: list[bytes], cuts: list[float]) -> None:
    assert conversation(site, WS, packets, cuts) == conversation(site, RAW, packets, [])


@SETTINGS
@given(packets=PACKETS, cuts=CUTS, forms=st.lists(FORMS, min_size=40, max_size=40))
def test_websocket_with_fragments_and_text(
    site: Site, packets: list[bytes], cuts: list[float], forms: list[str]
) -> None:
    def as_frames(all_packets: list[bytes]) -> bytes:
        return b"".join(map(_in_frames, all_packets, forms))

    assert conversation(site, WS, packets, cuts, as_frames) == conversation(site, RAW, packets, [])


def _is_utf8(packet: bytes) -> bool:
    try:
        packet.decode()
    except UnicodeDecodeError:
        return False
    return True


def _in_frames(packet: bytes, form: str) -> bytes:
    middle = len(packet) // 2
    match form:
        case "plain":
            return masked(packet)
        case "text":
            return masked(packet, websocket.TEXT if _is_utf8(packet) else websocket.BINARY)
        case "two":
            return masked(packet[:middle], fin=False) + masked(packet[middle:], websocket.CONTINUATION)
        case _:
            ends = masked(b"", fin=False), masked(b"", websocket.CONTINUATION)
            return ends[0] + masked(packet, websocket.CONTINUATION, fin=False) + ends[1]


@pytest.mark.parametrize("kind", [RAW, WS])
def test_the_bootstrap_cut_anywhere(site: Site, kind: str) -> None:
    headers = WS_HEADERS if kind == WS else RAW_HEADERS
    for at in range(1, len(request(headers)) + 20, 7):
        device = site.open(kind)
        stream = request(headers) + device.framed(connect_packet(b"uid-a1")) + device.framed(smq.PING)
        device.send_bytes(stream[:at])
        gevent.sleep(0)
        gevent.sleep(0)
        device.send_bytes(stream[at:]).read_head().hello().accepted().expect(smq.PONG)
        device.close()
