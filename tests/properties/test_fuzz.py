"""Random and mutated input never raises past the session, never hangs, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import logging
import random

import gevent
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smqrt.errors import ProtocolError
from smqrt.wire import smq, websocket
from smqrt.wire.websocket import Assembler, parse_client_frame
from tests.support.device import (
    RAW,
    RAW_HEADERS,
    WS,
    WS_HEADERS,
    Site,
    connect_packet,
    expect_clean,
    masked,
    publish,
    request,
)

SESSIONS = 200
SETTINGS = settings(max_examples=120)


@SETTINGS
@given(st.binary(max_size=60))
def test_connect_never_raises_anything_else(body: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        connect = smq.parse_connect(b"\x02" + body)
        assert len(connect.uid) >= smq.MIN_UID_BYTES


@SETTINGS
@given(
    st.binary(min_size=6, max_size=255),
    st.binary(max_size=255),
    st.binary(max_size=50),
    st.one_of(st.none(), st.integers(0, 65535)),
)
def test_connect_round_trip(uid: bytes, credentials: bytes, info: bytes, max_frame: int | None) -> None:
    packet = connect_packet(uid, credentials, info, max_frame)
    assert smq.parse_connect(packet) == (uid, credentials, info, max_frame or 0)
    head = 4 if max_frame is not None else 2
    for cut in {*range(2, len(packet) - len(info))} - {head, head + 1 + len(uid)}:
        with pytest.raises(ProtocolError):
            smq.parse_connect(packet[:cut])


@SETTINGS
@given(st.binary(max_size=60))
def test_websocket_decoder_never_raises_anything_else(data: bytes) -> None:
    assembler = Assembler()
    with contextlib.suppress(ProtocolError):
        while True:
            frame, used = parse_client_frame(data, 100)
            if frame is None:
                break
            data = data[used:]
            if frame.opcode == websocket.CLOSE:
                websocket.check_close(frame.payload)
            elif frame.opcode < websocket.CLOSE:
                assembler.add(frame, 100)


def _good(rng: random.Random, device: object, etid: int) -> bytes:
    framed = device.framed  # type: ignore[attr-defined]
    kinds = [4, 6, 8, 8, 9, 12, 13, 14, 15, 17, 19]
    packets = []
    for _ in range(rng.randint(1, 12)):
        kind = rng.choice(kinds)
        number = rng.choice((100, 101, etid, 0, rng.getrandbits(32)))
        body = rng.randbytes(rng.choice((0, 1, 5, 13, 200, 5000)))
        if kind in (8, 19):
            packets.append(publish(number, etid, body, kind=kind))
        elif kind in (9, 14, 15):
            packets.append(smq.with_id(kind, number))
        else:
            packets.append(bytes((kind,)) + body[:20])
    return b"".join(map(framed, packets))


def _mutated(rng: random.Random, data: bytes) -> bytes:
    spoiled = bytearray(data)
    for _ in range(rng.choice((0, 1, 1, 2, 5))):
        at = rng.randrange(len(spoiled))
        match rng.randrange(4):
            case 0:
                spoiled[at] ^= 1 << rng.randrange(8)
            case 1:
                spoiled[at] = rng.choice((0, 1, 2, 127, 128, 255))
            case 2:
                del spoiled[at : at + rng.randint(1, 20)]
            case _:
                spoiled[at:at] = rng.randbytes(rng.randint(1, 20))
        if not spoiled:
            return b""
    return bytes(spoiled)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", [RAW, WS])
def test_sessions_with_valid_beginnings(site: Site, caplog: pytest.LogCaptureFixture, kind: str, seed: int) -> None:
    """No error but the named endings: nothing in the log, others are served, nothing is left behind."""
    caplog.set_level(logging.WARNING)
    rng = random.Random(seed)
    site.smq.create("news", 100)
    site.smq.subscribe("other", onmsg=lambda *_: None)
    witness = site.device(b"witness")
    for number in range(SESSIONS):
        device = site.open(kind)
        hello = request(WS_HEADERS if device.on_websocket else RAW_HEADERS)
        with contextlib.suppress(OSError, AssertionError):
            if rng.random() < 0.3:
                device.send_bytes(hello + _mutated(rng, device.framed(connect_packet(b"uid-%04d" % number))))
            else:
                device.start().connect(b"uid-%04d" % (number % 20))
                device.send_bytes(_mutated(rng, _good(rng, device, device.etid)))
        if rng.random() < 0.5:
            gevent.sleep(0)
        device.close() if rng.random() < 0.7 else device.reset()
    witness.expect_nothing()
    others = [record for record in caplog.records if record.name != "smqrt.close"]  # the named endings
    assert not others, caplog.text
    assert site.state.stats.connects > SESSIONS / 2
    site.smq.unsubscribe("other")
    expect_clean(site)


@pytest.mark.parametrize("opcode", [0, 1, 2, 8, 9, 10])
def test_every_head_of_a_frame(site: Site, opcode: int) -> None:
    """All 256 first bytes in both fin states, with lengths of each form."""
    witness = site.device(b"witness")
    for first in (opcode | high for high in range(0, 256, 16)):
        for second in (0, 1, 125, 126, 127, 128, 129, 0xFD, 0xFE, 0xFF):
            device = site.device(b"uid-a1", WS)
            device.send_bytes(bytes((first, second)) + b"\0" * 20)
            device.close()
    witness.expect_nothing()
    assert masked(b"")[:2] == b"\x82\x80"
