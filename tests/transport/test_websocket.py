"""Streams over the messages of a WebSocket, whose socket accepts only a part of the data."""

from __future__ import annotations

import _socket
import random
import socket
from collections.abc import Iterator
from time import thread_time

import gevent
import pytest

from smqrt.errors import StreamError
from smqrt.transport.stream import Stream
from smqrt.transport.websocket import WebSocketTransport
from smqrt.wire import websocket
from smqrt.wire.websocket import WebSocketCodec
from tests.support.waiting import let_others_run, wait_until


class Ends:
    """A stream over a WebSocket transport, and the plain socket of the server."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.server = theirs
        self.transport = WebSocketTransport(_socket.socket(fileno=ours.detach()))
        self.stream = Stream(self.transport)  # type: ignore[arg-type]
        self._codec = WebSocketCodec()

    def received(self) -> bytes:
        """What the server gets now, without frames."""
        found = b""
        try:
            while data := self.server.recv(1000):
                self._codec.feed(data)
                while message := self._codec.next():
                    found += message.data
        except BlockingIOError:
            pass
        return found


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.stream.close()
    made.server.close()


def test_a_slow_server_gets_everything_once(ends: Ends) -> None:
    draw = random.Random(1)
    parts = [draw.randbytes(size) for size in (1, 70_000, 3, 200_000, 65_536, 5)]
    for part in parts:
        ends.stream.push(part)
    assert ends.stream.queued_bytes
    got = bytearray()

    def is_complete() -> bool:
        got.extend(ends.received())
        return len(got) >= sum(map(len, parts))

    wait_until(is_complete)
    assert bytes(got) == b"".join(parts)
    wait_until(lambda: not ends.stream.queued_bytes)


def test_queued_data_is_sent_before_the_close_frame(ends: Ends) -> None:
    data = bytes(100_000)
    ends.stream.push(data)
    ends.stream.close(graceful=True)
    got = bytearray()

    def is_closed() -> bool:
        got.extend(ends.received())
        return ends._codec.close_code == websocket.CLOSE_NORMAL

    wait_until(is_closed)
    assert bytes(got) == data


def test_messages_of_the_server_are_one_stream(ends: Ends) -> None:
    large = bytes(range(256)) * 10
    ends.server.sendall(websocket.encode(websocket.BINARY, large[:1000]))
    ends.server.sendall(websocket.encode(websocket.BINARY, b"") + websocket.encode(websocket.BINARY, large[1000:]))
    got = b""
    while len(got) < len(large):
        got += ends.stream.read(100, 10)
    assert got == large
    ends.server.sendall(websocket.encode(websocket.CLOSE, b""))
    assert ends.stream.read(100, 10) == b""


def test_a_server_that_sends_pings_and_reads_nothing(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smqrt.transport.websocket._MAX_OUT_BYTES", 60_000)
    ping = websocket.encode(websocket.PING, bytes(125))
    ends.stream.push(bytes(50_000))  # fills the socket
    reader = gevent.spawn(ends.stream.read, 100, 20)
    for _ in range(400):
        ends.server.send(ping)
        let_others_run(3)
    assert not reader.ready()
    assert 50_000 < len(ends.transport._out) <= 60_131
    reader.kill()


def test_many_empty_frames_take_little_time(ends: Ends) -> None:
    ends.server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    ends.server.send(websocket.encode(websocket.BINARY, b"") * 100_000)
    longest_s = 0.0
    for _ in range(10):
        begin_s = thread_time()
        assert ends.stream.try_read() is None
        longest_s = max(longest_s, thread_time() - begin_s)
    assert longest_s < 0.05


def test_a_broken_connection(ends: Ends) -> None:
    ends.server.close()
    assert ends.stream.read(1, 10) == b""
    with pytest.raises(StreamError, match="socketwritefailed"):
        ends.stream.push(bytes(10))
