"""Sockets of Lua behind one interface: reads that wait, queues with room, chunks, datagrams and WebSockets."""

from __future__ import annotations

import _socket
from collections.abc import Iterator
from typing import Any

import gevent
import pytest

from smqrt.apps.lua.socket_handles import (
    STALLED_S,
    ChunkedHandle,
    DatagramHandle,
    QueueDrain,
    Reading,
    SocketHandle,
    StreamHandle,
    Suspensions,
    WebSocketHandle,
)
from smqrt.broker.deferred import Deferred
from smqrt.errors import ArgumentError, StreamError
from smqrt.loop import greenlets
from smqrt.transport.stream import Datagram, Stream
from smqrt.wire import websocket
from smqrt.wire.websocket import TEXT
from tests.support.waiting import let_others_run, wait_until


class Pair:
    """A stream, and the socket at its other end."""

    def __init__(self) -> None:
        own, self.peer = _socket.socketpair()
        own.setblocking(False)
        self.peer.settimeout(0)
        self.stream = Stream(own)

    def arrived(self) -> bytes:
        """What the other end has received by now."""
        try:
            return bytes(self.peer.recv(1 << 20))
        except BlockingIOError:
            return b""


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.stream.close()
    pair.peer.close()


def test_a_handle_without_a_socket_fails_with_words() -> None:
    handle = SocketHandle()
    for call, word in (
        (handle.receive, "incorrectuse"),
        (lambda: handle.readable(None), "incorrectuse"),
        (lambda: handle.put(b"x", None), "incorrectuse"),
        (handle.close, "incorrectuse"),
        (handle.peername, "invalidsocketcon"),
        (handle.sockname, "invalidsocketcon"),
    ):
        with pytest.raises(StreamError) as error:
            call()
        assert error.value.word == word
    assert handle.tls_layer is None


def test_a_read_gets_data_the_end_or_a_timeout(pair: Pair) -> None:
    handle = StreamHandle(pair.stream)
    assert greenlets.wait(Reading(handle, 0.001)) == (None, b"timeout")
    waiting = Reading(handle, 5)
    assert handle.reading is waiting
    pair.peer.send(b"data")
    assert greenlets.wait(waiting) == (b"data",)
    assert handle.reading is None
    pair.peer.close()
    assert greenlets.wait(Reading(handle, 5)) == (None, b"socketclosed")


def test_a_paused_read_leaves_the_data_in_the_socket(pair: Pair) -> None:
    handle = StreamHandle(pair.stream)
    handle.pause(True)
    pair.peer.send(b"held back")
    waiting = Reading(handle, None)
    let_others_run()
    assert not waiting.done
    handle.pause(False)
    assert greenlets.wait(waiting) == (b"held back",)
    waiting = Reading(handle, None)
    handle.pause(True)
    pair.peer.send(b"held back too")
    let_others_run()
    assert not waiting.done
    handle.pause(False)
    assert greenlets.wait(waiting) == (b"held back too",)


def test_a_read_ended_from_outside_takes_no_data(pair: Pair) -> None:
    handle = StreamHandle(pair.stream)
    waiting = Reading(handle, None)
    handle.end_reading("sysshutdown")
    assert greenlets.wait(waiting) == (None, b"sysshutdown")
    pair.peer.send(b"for the next")
    assert greenlets.wait(Reading(handle, 5)) == (b"for the next",)
    handle.end_reading("sysshutdown")


def test_a_fault_of_a_read_ends_it() -> None:
    class Broken(SocketHandle):
        def receive(self) -> Any:
            raise LookupError("a fault of the program")

        def readable(self, timeout_s: float | None) -> Any:
            raise AssertionError("not asked for")

    with pytest.raises(LookupError):
        greenlets.wait(Reading(Broken(), None, is_soon=True))


@pytest.mark.parametrize(
    ("writes", "sent"),
    [
        ((b"hello", b"", b"x" * 20), b"5\r\nhello\r\n14\r\n" + b"x" * 20 + b"\r\n0\r\n\r\n"),
        ((b"", b"3\r\nown\r\n", b"plain", b"0\r\n\r\n"), b"3\r\nown\r\nplain0\r\n\r\n"),
        ((b"a3;x=y\r\nmore",), b"a3;x=y\r\nmore"),
        ((b"5 words",), b"7\r\n5 words\r\n0\r\n\r\n"),
        ((), b"0\r\n\r\n"),
    ],
    ids=["data", "own chunks", "extension", "no chunk", "nothing"],
)
def test_chunks_are_framed_unless_the_application_does(pair: Pair, writes: tuple[bytes, ...], sent: bytes) -> None:
    handle = ChunkedHandle(pair.stream, None)  # type: ignore[arg-type]
    for data in writes:
        assert handle.put(data, None)
    handle.close()
    handle.close()
    wait_until(lambda: pair.stream.closed)
    assert pair.arrived() == sent


def test_datagrams_go_to_literal_addresses_only() -> None:
    here, there = DatagramHandle(Datagram(0, "127.0.0.1")), DatagramHandle(Datagram(0, "127.0.0.1"))
    host, port = there.sockname()
    assert here.sendto(b"hello", host, port)
    gevent.sleep(0)
    assert there.receive() == (b"hello", b"127.0.0.1", here.sockname()[1], False)
    assert there.receive() is None
    with pytest.raises(ArgumentError, match="'localhost' is not an IP address; use ba.socket.toip first"):
        here.sendto(b"hello", "localhost", port)
    here.close()
    there.close()


class Queue:
    """A stream whose waits for room end when the test says so."""

    def __init__(self) -> None:
        self.queued_bytes = 100
        self.waits: list[tuple[float, Deferred[None]]] = []

    def writable(self, timeout_s: float) -> Deferred[None]:
        wait: Deferred[None] = Deferred()
        self.waits.append((timeout_s, wait))
        return wait


def test_a_drain_waits_as_long_as_there_is_progress() -> None:
    queue: Any = Queue()
    drain = QueueDrain(queue)
    for left_bytes in (99, 50, 50):
        assert not drain.done
        queue.queued_bytes = left_bytes
        timeout_s, wait = queue.waits[-1]
        assert timeout_s == STALLED_S
        wait.reject(StreamError("timeout"))
    assert greenlets.wait(drain) == (None, b"timeout")
    drain = QueueDrain(queue)
    queue.waits[-1][1].resolve()
    assert greenlets.wait(drain) is True


def test_a_drain_ends_at_its_timeout_or_the_close(pair: Pair) -> None:
    pair.stream.push(b"x" * 2_000_000)
    assert greenlets.wait(QueueDrain(pair.stream, 0.001)) == (None, b"timeout")
    drain = QueueDrain(pair.stream)
    pair.stream.close()
    assert greenlets.wait(drain) == (None, b"socketclosed")


def test_a_suspension_is_woken_once_by_its_number() -> None:
    suspensions = Suspensions()
    assert not suspensions.wake(1)
    first, second, late = (
        suspensions.suspend(number, timeout_ms) for number, timeout_ms in ((1, None), (2, None), (3, 1))
    )
    assert suspensions.wake(1)
    assert not suspensions.wake(1)
    assert greenlets.wait(first) is True
    assert greenlets.wait(late) == (None, b"timeout")
    assert not suspensions.wake(3)
    suspensions.wake_all(b"sysshutdown")
    assert greenlets.wait(second) == (None, b"sysshutdown")


def test_a_websocket_ends_with_one_code(pair: Pair) -> None:
    """After the end each read says the same, and the close frame was sent once."""
    handle = WebSocketHandle(pair.stream, is_client=False)
    pair.peer.send(websocket.encode_masked(TEXT, b"hi") + websocket.encode_masked(TEXT, b"\xff"))
    assert greenlets.wait(Reading(handle, 5)) == (b"hi", True)
    assert [greenlets.wait(Reading(handle, 5, is_soon=True)) for _ in range(2)] == [
        (None, b"socketreadfailed", 1007)
    ] * 2
    handle.close()
    wait_until(lambda: pair.stream.closed)
    assert pair.arrived()[:4] == b"\x88\x02\x03\xef"


def test_limits_of_a_websocket_are_errors_of_the_caller(pair: Pair) -> None:
    handle = WebSocketHandle(pair.stream, is_client=False)
    for call, message in (
        (lambda: handle.put(b"x" * 65_536, False), "write: 65536 bytes; a WebSocket message takes at most 65535"),
        (lambda: handle.put(b"ab\xff", True), "the text is not UTF-8 at byte 3"),
        (lambda: handle.ping(b"x" * 126), "ping: 126 bytes; a ping takes at most 125"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call()
    assert pair.arrived() == b""
    assert handle.put(b"ab\xff", False)
    assert handle.ping(b"x")
    assert pair.arrived() == b"\x82\x03ab\xff\x89\x01x"
