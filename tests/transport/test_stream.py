"""A stream against a server of gevent's sockets: reading, writing under back-pressure, TLS, closing, errors."""

from __future__ import annotations

import _socket
import gc
import ssl
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import gevent
import pytest
from gevent import socket
from gevent.ssl import PROTOCOL_TLS_SERVER
from gevent.ssl import SSLContext as ServerContext

from smqrt.errors import StreamError
from smqrt.transport import tls
from smqrt.transport.stream import Stream
from tests.support.device import Authority
from tests.support.waiting import let_others_run, wait_until


def listening(host: str = "127.0.0.1", backlog: int = 5) -> Any:
    server = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    server.bind((host, 0))
    server.listen(backlog)
    return server


class Ends:
    """A stream and the socket at its other end."""

    def __init__(self, stream: Stream, peer: Any) -> None:
        self.stream, self.peer = stream, peer


@pytest.fixture
def ends() -> Iterator[Ends]:
    with listening() as server:
        stream = Stream.connect("127.0.0.1", server.getsockname()[1], 2)
        peer, _ = server.accept()
    both = Ends(stream, peer)
    yield both
    both.stream.close()
    both.peer.close()


def word_of(function: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(StreamError) as caught:
        function(*args)
    return caught.value.word


def test_reads_what_arrives_and_the_end(ends: Ends) -> None:
    assert ends.stream.try_read() is None
    reader = gevent.spawn(ends.stream.read)
    gevent.sleep(0)  # it waits
    ends.peer.sendall(b"hello")
    assert reader.get(timeout=2) == b"hello"
    ends.peer.sendall(b"0123456789")
    assert ends.stream.read(4) == b"0123"
    ends.stream.unread(b"x")
    assert ends.stream.read() == b"x"
    assert ends.stream.read() == b"456789"
    ends.peer.close()
    assert ends.stream.read() == b""


def test_the_stream_is_usable_after_a_read_timeout(ends: Ends) -> None:
    assert word_of(ends.stream.read, 100, 0.02) == "timeout"
    ends.peer.sendall(b"late")
    assert ends.stream.read(100, 1) == b"late"


def test_write_waits_for_a_slow_reader_and_loses_nothing(ends: Ends) -> None:
    data = bytes(range(256)) * 40000
    writer = gevent.spawn(ends.stream.write, data)
    let_others_run()
    assert not writer.ready()
    assert ends.stream.queued_bytes > ends.stream.queue_limit_bytes
    assert not ends.stream.try_write(b"no room")
    got = bytearray()
    while len(got) < len(data):
        got += ends.peer.recv(65536)
    writer.get(timeout=2)
    assert got == data


def test_what_is_queued_is_sent_after_close(ends: Ends) -> None:
    data = b"z" * 5_000_000
    assert ends.stream.try_write(data)
    assert ends.stream.close()
    assert not ends.stream.close()
    got = 0
    while chunk := ends.peer.recv(65536):
        got += len(chunk)
    assert got == len(data)
    ends.peer.close()
    wait_until(lambda: not tls.under_way())


def test_a_write_waits_while_the_queue_is_full(ends: Ends) -> None:
    assert word_of(ends.stream.write, b"z" * 5_000_000, 0.02) == "timeout"
    queued_bytes = ends.stream.queued_bytes
    assert word_of(ends.stream.write, b"z" * 1000, 0.02) == "timeout"
    assert ends.stream.queued_bytes == queued_bytes > 0


@pytest.mark.parametrize("talks", [True, False])
def test_a_peer_can_not_draw_out_a_graceful_close(ends: Ends, monkeypatch: pytest.MonkeyPatch, talks: bool) -> None:
    for name in ("SEND_S", "LINGER_S"):
        monkeypatch.setattr(tls, name, 0.2)
    ends.stream.push(b"z" if talks else b"z" * 5_000_000)
    monkeypatch.setattr(tls, "MIN_BYTES_PER_S", 10**9)
    ends.stream.close(graceful=True)
    with gevent.Timeout(5):
        while tls.under_way():
            with suppress(OSError):
                ends.peer.send(b"and another thing") if talks else ends.peer.recv(10)
            gevent.sleep(0.01)


def test_a_graceful_close_delivers_in_spite_of_unread_input(ends: Ends) -> None:
    ends.peer.sendall(b"never read")
    let_others_run()
    ends.stream.write(b"last words")
    ends.stream.close(graceful=True)
    let_others_run()
    assert ends.peer.recv(100) == b"last words"
    assert ends.peer.recv(100) == b""


def test_close_wakes_waiting_greenlets(ends: Ends) -> None:
    told: list[bool] = []
    ends.stream.on_close = lambda: told.append(True)
    reader = gevent.spawn(word_of, ends.stream.read)
    writer = gevent.spawn(word_of, ends.stream.write, b"z" * 20_000_000)
    let_others_run()
    assert ends.stream.close()
    assert reader.get(timeout=2) == "socketclosed"
    assert writer.get(timeout=2) == "socketclosed"
    assert told == [True]
    for use in (ends.stream.read, ends.stream.peername, ends.stream.readable):
        assert word_of(use) == "socketclosed"
    assert word_of(ends.stream.write, b"x") == "socketclosed"


def test_a_killed_reader_leaves_the_stream_usable(ends: Ends) -> None:
    reader = gevent.spawn(ends.stream.read)
    wait_until(lambda: ends.stream._input)
    assert len(ends.stream._input) == 1
    reader.kill()
    assert len(ends.stream._input) == 0
    ends.peer.sendall(b"for the next")
    assert ends.stream.read() == b"for the next"


def test_reset_is_an_error(ends: Ends) -> None:
    ends.peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    ends.peer.close()
    assert word_of(ends.stream.read) == "socketreadfailed"
    assert word_of(ends.stream.write, b"x") == "socketwritefailed"


def test_names_of_both_sides(ends: Ends) -> None:
    assert ends.stream.peername() == ends.peer.getsockname()
    assert ends.stream.sockname() == ends.peer.getpeername()


def test_connect_errors_name_the_reason() -> None:
    free = _socket.socket()
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
    assert word_of(Stream.connect, "127.0.0.1", port, 2) == "cannotconnect"
    free.close()
    assert word_of(Stream.connect, "no such host.invalid", port, 5) == "cannotresolve"
    assert word_of(Stream.connect, "127.0.0.1", port, 2, "192.0.2.1") == "bind"


def test_connect_times_out_while_the_backlog_is_full() -> None:
    with listening(backlog=0) as server:
        port = server.getsockname()[1]
        crowd = [Stream.connect("127.0.0.1", port, 1)]
        began = word_of(_connect_until_refused, port, crowd)
        assert began == "timeout"
        for stream in crowd:
            stream.close()


def _connect_until_refused(port: int, crowd: list[Stream]) -> None:
    for _ in range(10):
        crowd.append(Stream.connect("127.0.0.1", port, 0.1))


def test_connect_by_name_and_from_an_address() -> None:
    with listening() as server:
        for host, source in (("localhost", None), ("127.0.0.1", "127.0.0.2")):
            stream = Stream.connect(host, server.getsockname()[1], 2, source)
            peer, (address, _) = server.accept()
            assert address == (source or "127.0.0.1")
            peer.close()
            stream.close()


def test_ipv6() -> None:
    with listening("::1") as server:
        for ipv6 in (False, True):
            stream = Stream.connect("::1", server.getsockname()[1], 2, ipv6=ipv6)
            assert stream.peername()[0] == "::1"
            stream.close()


@pytest.fixture
def tls_server(authority: Authority) -> Iterator[Any]:
    context = ServerContext(PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.pair("localhost"))
    context.set_alpn_protocols(["mqtt"])
    with listening() as server:
        yield context, server


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.path))


def test_starttls_on_an_open_connection(tls_server: Any, authority: Authority) -> None:
    context, server = tls_server
    stream = Stream.connect("127.0.0.1", server.getsockname()[1], 2)
    plain, _ = server.accept()
    stream.write(b"STARTTLS")
    assert plain.recv(100) == b"STARTTLS"
    accepting = gevent.spawn(context.wrap_socket, plain, True)
    stream.starttls(trusting(authority), "127.0.0.1", ["x", "mqtt"])
    peer = accepting.get(timeout=2)
    assert stream.tls
    assert (stream.tls.alpn(), stream.tls.version()) == ("mqtt", "TLSv1.3")
    big = b"big" * 1_000_000
    writer = gevent.spawn(stream.write, big)
    got = bytearray()
    while len(got) < len(big):
        got += peer.recv(65536)
    writer.get(timeout=2)
    assert got == big
    sender = gevent.spawn(peer.sendall, big)
    got = bytearray()
    while len(got) < len(big):
        got += stream.read(1000)
    sender.get(timeout=2)
    assert got == big
    peer.close()
    assert stream.read() == b""
    stream.close()


def test_a_context_that_verifies_refuses(tls_server: Any) -> None:
    context, server = tls_server
    stream = Stream.connect("127.0.0.1", server.getsockname()[1], 2)
    plain, _ = server.accept()
    accepting = gevent.spawn(_ignoring_errors, context.wrap_socket, plain, True)
    assert word_of(stream.starttls, ssl.create_default_context(), "localhost") == "sslnottrusted"
    assert stream.closed
    accepting.get(timeout=2)


def _ignoring_errors(function: Callable[..., Any], *args: Any) -> None:
    try:
        function(*args)
    except OSError:
        pass


def test_handshake_with_something_else(ends: Ends, authority: Authority) -> None:
    gevent.spawn(ends.peer.sendall, b"HTTP/1.1 400 What?\r\n\r\n" * 10)
    assert word_of(ends.stream.starttls, trusting(authority), "localhost") == "sslhandshake"


def test_handshake_with_a_silent_peer_times_out(ends: Ends, authority: Authority) -> None:
    assert word_of(ends.stream.starttls, trusting(authority), "x", None, False, 0.05) == "timeout"


def test_many_streams_leave_nothing_behind(ends: Ends) -> None:
    gc.collect()
    before = len(gc.get_objects())
    with listening() as server:
        for _ in range(50):
            stream = Stream.connect("127.0.0.1", server.getsockname()[1], 2)
            peer, _ = server.accept()
            peer.sendall(b"x")
            assert stream.read() == b"x"
            assert word_of(stream.read, 10, 0.001) == "timeout"
            stream.close()
            peer.close()
    let_others_run()
    gc.collect()
    assert len(gc.get_objects()) - before < 200
