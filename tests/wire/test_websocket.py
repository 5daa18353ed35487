"""The frames of one side of a WebSocket, byte by byte."""

from __future__ import annotations

import os
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smqrt.errors import ProtocolError
from smqrt.wire import websocket
from smqrt.wire.websocket import (
    BINARY,
    CLOSE,
    CLOSE_NO_CODE,
    CONTINUATION,
    FRAMES_AT_A_TIME,
    PIECE_BYTES,
    PING,
    TEXT,
    WebSocketCodec,
    WebSocketMessage,
    close_code,
)


def frame(opcode: int, payload: bytes, fin: bool = True, masked: bool = True) -> bytes:
    head = bytearray(websocket.header(opcode, len(payload)))
    if not fin:
        head[0] &= 0x7F
    if not masked:
        return bytes(head) + payload
    head[1] |= 0x80
    key = b"\x1b\x8e\x03\xfa"
    return bytes(head) + key + websocket.mask(payload, key)


def received(
    data: bytes, size: int = 1 << 20, is_client: bool = False, limit: int | None = None
) -> list[WebSocketMessage]:
    side = WebSocketCodec(is_client)
    if limit:
        side.max_message_bytes = limit
    messages = []
    for at in range(0, len(data), size):
        side.feed(data[at : at + size])
        while (message := side.next()) is not None or side.has_more:
            messages += [message] if message else []
    return messages


@pytest.mark.parametrize("size", [1, 3, 1 << 20])
def test_messages_whatever_the_pieces_of_the_stream(size: int) -> None:
    data = (
        frame(TEXT, "grüße".encode())
        + frame(BINARY, b"\0" * 200)
        + frame(PING, b"x")
        + frame(TEXT, b"")
        + frame(BINARY, b"a", fin=False)
        + frame(PING, b"y")
        + frame(CONTINUATION, b"b", fin=False)
        + frame(CONTINUATION, b"c")
        + frame(BINARY, b"e" * 65535)
    )
    assert received(data, size) == [
        ("grüße".encode(), True, 0, 0),
        (b"\0" * 200, False, 0, 0),
        (b"", True, 0, 0),
        (b"abc", False, 0, 0),
        (b"e" * 65535, False, 0, 0),
    ]


@pytest.mark.parametrize("is_client", [False, True])
@pytest.mark.parametrize("size", [1000, 65536, 1 << 20])
def test_a_large_frame_comes_in_pieces(size: int, is_client: bool) -> None:
    text = ("ä€x" * 40000).encode()
    messages = received(
        frame(TEXT, text, masked=not is_client) + frame(BINARY, b"z", masked=not is_client), size, is_client
    )
    assert messages.pop() == (b"z", False, 0, 0)
    assert b"".join(message.data for message in messages) == text
    assert all(len(message.data) <= PIECE_BYTES and message.is_text for message in messages)
    assert {message.frame_bytes for message in messages} == {len(text)}
    assert messages[-1].done_bytes == len(text)


def test_large_fragments_make_one_message() -> None:
    data = os.urandom(300_000)
    stream = frame(BINARY, data[:100_000], False) + frame(CONTINUATION, data[100_000:101_000], False)
    stream += frame(CONTINUATION, data[101_000:])
    assert received(stream, 5000) == [(data, False, 0, 0)]


@given(st.lists(st.tuples(st.sampled_from([TEXT, BINARY]), st.binary(max_size=300)), max_size=6), st.integers(1, 50))
@settings(max_examples=60)
def test_what_one_side_sends_the_other_receives(messages: list[tuple[int, bytes]], size: int) -> None:
    for is_client in (False, True):
        sender = WebSocketCodec(not is_client)
        stream = b"".join(sender.message(data.hex().encode(), opcode == TEXT) for opcode, data in messages)
        expected = [(data.hex().encode(), opcode == TEXT, 0, 0) for opcode, data in messages]
        assert received(stream, size, is_client) == expected


def test_ping_is_answered_and_close_ends() -> None:
    side = WebSocketCodec()
    side.feed(frame(PING, b"hi") + frame(CLOSE, b"\x03\xe8bye") + frame(TEXT, b"never"))
    assert side.next() is None
    assert side.take_replies() == b"\x8a\x02hi" + b"\x88\x02\x03\xe8"
    assert side.close_code == 1000
    assert side.close(1000) == b""
    other = WebSocketCodec()
    other.feed(frame(CLOSE, b""))
    assert other.next() is None
    assert (other.close_code, other.take_replies()) == (CLOSE_NO_CODE, b"\x88\0")


def test_a_ping_flood_gets_one_pong_and_is_portioned() -> None:
    side = WebSocketCodec()
    side.feed(frame(PING, b"hi") * (FRAMES_AT_A_TIME + 10) + frame(TEXT, b"then"))
    assert side.next() is None
    assert side.has_more
    assert side.take_replies() == b"\x8a\x02hi"
    assert side.next() == (b"then", True, 0, 0)
    assert not side.has_more


def test_a_message_of_tiny_fragments_takes_what_it_weighs() -> None:
    side = WebSocketCodec()
    side.feed(frame(BINARY, b"x", False))
    tracemalloc.start()
    for _ in range(4):
        side.feed(frame(CONTINUATION, b"x", False) * 1000)
        while side.next() is None and side.has_more:
            pass
    held_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held_bytes < 50_000


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame(TEXT, b"x", masked=False), 1002),
        (b"\xc1\x80\0\0\0\0", 1002),
        (frame(3, b""), 1002),
        (frame(CONTINUATION, b"x"), 1002),
        (frame(TEXT, b"x", False) + frame(TEXT, b"y"), 1002),
        (frame(TEXT, b"x", False) + frame(BINARY, b"y" * 70000), 1002),
        (frame(PING, b"x" * 126), 1002),
        (frame(PING, b"x", False), 1002),
        (frame(CLOSE, b"x"), 1002),
        (frame(CLOSE, b"\x03\xed"), 1002),
        (frame(CLOSE, b"\x03\xe8\xff"), 1002),
        (b"\x82\xfe\0\x05", 1002),
        (b"\x82\xff\0\0\0\0\0\0\0\x05", 1002),
        (frame(TEXT, b"", False) + frame(CONTINUATION, b"", False) * websocket.MAX_FRAGMENTS, 1008),
        (frame(TEXT, b"\xff"), 1007),
        (frame(TEXT, b"\xe2\x82", False) + frame(CONTINUATION, b"x"), 1007),
        (frame(TEXT, b"a" * 70000 + b"\xe2\x82"), 1007),
        (frame(BINARY, b"x" * 2001), 1009),
        (frame(BINARY, b"x" * 1500, False) + frame(CONTINUATION, b"x" * 1500), 1009),
    ],
)
def test_violations(data: bytes, code: int) -> None:
    with pytest.raises(ProtocolError) as caught:
        received(data, 7000, limit=2000 if code == 1009 else None)
    assert close_code(caught.value.reason) == code


def test_a_masked_frame_from_a_server() -> None:
    with pytest.raises(ProtocolError):
        received(frame(TEXT, b"x"), is_client=True)


@pytest.mark.parametrize("payload", [b"", b"x"])
def test_a_message_of_endless_fragments_is_a_violation(payload: bytes) -> None:
    side = WebSocketCodec()
    side.feed(frame(BINARY, payload, fin=False) + frame(CONTINUATION, payload, fin=False) * 4096)
    for _ in range(4096 // FRAMES_AT_A_TIME):
        assert side.next() is None
    with pytest.raises(ProtocolError, match="more than 4096 frames") as caught:
        side.next()
    assert close_code(caught.value.reason) == 1008
