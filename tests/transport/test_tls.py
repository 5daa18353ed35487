"""TLS over memory: records, ends, deadlines and certificates, against the standard library's client."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gevent
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from gevent import socket
from gevent.ssl import SSLContext as ClientContext

from smqrt.errors import StartError
from smqrt.transport.listener import Listener
from smqrt.transport.tls import HandshakeQueue, TlsTransport
from tests.support.clock import undisturbed_s
from tests.support.pki import Authority, server_context
from tests.support.waiting import let_others_run, wait_until


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def pair(authority: Authority) -> tuple[Path, Path]:
    return authority.pair("server")


class Ends:
    """Both ends of a TLS connection: `ours` under test, `client` of the standard library."""

    def __init__(self, ours: TlsTransport, client: Any) -> None:
        self.ours, self.client = ours, client

    def read(self, size: int = 65536) -> bytes:
        """Read what comes next, waiting for it."""
        buffer = bytearray(size)
        size_bytes = wait_until(lambda: unless_it_waits(lambda: (self.ours.recv_into(buffer),)), "something comes")[0]
        return bytes(buffer[:size_bytes])


def unless_it_waits(step: Callable[[], Any]) -> Any:
    """Returns what a call gives; None when it would wait for the other side."""
    try:
        return step()
    except BlockingIOError:
        return None


@pytest.fixture(params=["TLSv1_2", "TLSv1_3"])
def connect(request: Any, pair: Any, authority: Authority) -> Iterator[Callable[..., Ends]]:
    """A factory of connections, in both versions."""
    accepted: list[TlsTransport] = []
    things: list[Any] = []

    def begin(client_ca: Path | None = None, client_pair: tuple[Path, Path] | None = None) -> Ends:
        context = server_context(*pair, client_ca=client_ca)
        listener = Listener("127.0.0.1", 0, lambda transport, address: accepted.append(transport), context)
        listener.start()
        things.append(listener)
        client_context = ClientContext(ssl.PROTOCOL_TLS_CLIENT)
        client_context.check_hostname = False
        client_context.load_verify_locations(authority.path)
        client_context.minimum_version = client_context.maximum_version = ssl.TLSVersion[request.param]
        if client_pair:
            client_context.load_cert_chain(*client_pair)
        client = client_context.wrap_socket(socket.create_connection(listener.address, timeout=3))
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        things.append(client)
        wait_until(lambda: accepted)
        return Ends(accepted.pop(), client)

    yield begin
    for thing in things:
        thing.close()


def test_bytes_both_ways(connect: Any) -> None:
    ends = connect()
    ends.client.sendall(b"hello")
    assert ends.read() == b"hello"
    assert ends.ours.send(b"back") == 4
    assert ends.client.recv(100) == b"back"
    assert ends.ours.sendmsg([b"a", bytearray(b"b"), memoryview(b"c")]) == 3
    assert ends.client.recv(100) == b"abc"
    with pytest.raises(BlockingIOError):
        ends.ours.recv_into(bytearray(10))


def test_each_send_is_a_record(connect: Any) -> None:
    """The Java client hangs when the HTTP answer and Init share a record (spec: smq §12.1)."""
    ends = connect()
    ends.ours.send(b"HTTP answer")
    ends.ours.send(b"Init")
    let_others_run()
    assert ends.client.recv(100) == b"HTTP answer"
    assert ends.client.recv(100) == b"Init"


def test_pending_bytes_are_reported(connect: Any) -> None:
    ends = connect()
    ends.client.sendall(b"0123456789")
    assert ends.read(4) == b"0123"
    assert ends.ours.has_pending
    assert ends.read(4) == b"4567"
    assert ends.read(4) == b"89"
    assert not ends.ours.has_pending


def test_several_records_in_one_segment(connect: Any) -> None:
    ends = connect()
    for number in range(5):
        ends.client.sendall(b"%d" % number)
    let_others_run()
    data = ends.read()
    while ends.ours.has_pending:
        data += ends.read()
    assert data == b"01234"


def test_a_peer_that_does_not_read(connect: Any) -> None:
    """Plaintext is taken until the socket is full; then nothing more until the ciphertext is gone; nothing is lost or
    doubled, and little is encrypted that cannot be sent."""
    ends = connect()
    block = bytes(range(256)) * 65536
    taken = 0
    while not ends.ours.wants_write:
        taken += ends.ours.send(block[taken % len(block) :])
    assert len(ends.ours._unsent) < 70_000
    with pytest.raises(BlockingIOError):
        ends.ours.send(b"more")
    received = bytearray()

    def reader() -> None:
        while len(received) < taken:
            received.extend(ends.client.recv(1 << 20))

    reading = gevent.spawn(reader)
    wait_until(lambda: unless_it_waits(lambda: ends.ours.flush() or True))  # type: ignore[func-returns-value]
    reading.join(3)
    assert not ends.ours.wants_write
    assert received == (block * (taken // len(block) + 1))[:taken]
    ends.ours.send(b"more")
    assert ends.client.recv(10) == b"more"


def test_the_end_of_the_stream(connect: Any) -> None:
    ends = connect()
    ends.client.sendall(b"last")
    gevent.spawn(ends.client.unwrap)
    assert ends.read() == b"last"
    assert ends.read() == b""


def test_a_close_without_close_notify(connect: Any) -> None:
    ends = connect()
    ends.client.sendall(b"last")
    ends.client.shutdown(socket.SHUT_WR)
    assert ends.read() == b"last"
    assert ends.read() == b""


def test_our_goodbye(connect: Any) -> None:
    ends = connect()
    ends.ours.send(b"last")
    ends.ours.shutdown(1)
    assert ends.client.recv(10) == b"last"
    assert ends.client.recv(10) == b""
    ends.ours.close()
    ends.ours.close()
    assert ends.ours.fileno() == -1


def test_facts(connect: Any) -> None:
    ends = connect()
    assert ends.ours.version() == ends.client.version()
    assert ends.ours.cipher()[0] == ends.client.cipher()[0]
    assert ends.ours.getpeername() == ends.client.getsockname()
    assert ends.ours.getsockname() == ends.client.getpeername()
    assert ends.ours.peer_certificate() is None


def test_a_client_certificate(connect: Any, authority: Authority) -> None:
    client = authority.pair("client")
    ends = connect(authority.path, client)
    der = ends.ours.peer_certificate()
    assert der is not None
    assert x509.load_der_x509_certificate(der) == x509.load_pem_x509_certificate(client[0].read_bytes())


def test_a_client_certificate_is_not_required(connect: Any, authority: Authority) -> None:
    assert connect(authority.path).ours.peer_certificate() is None


def test_our_own_client_side(pair: Any) -> None:
    """A `TlsTransport` on both ends."""
    accepted: list[TlsTransport] = []
    listener = Listener("127.0.0.1", 0, lambda transport, address: accepted.append(transport), server_context(*pair))
    listener.start()
    raw = socket.create_connection(listener.address)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    client = TlsTransport(raw._sock, context, server_side=False, server_hostname="test")
    wait_until(lambda: unless_it_waits(lambda: client.handshake() or True))  # type: ignore[func-returns-value]
    client.send(b"hello")
    wait_until(lambda: accepted)
    assert Ends(accepted[0], None).read() == b"hello"
    listener.close()


# handshakes


def test_a_foreign_client_certificate_ends_the_handshake(pair: Any, authority: Authority, tmp_path: Path) -> None:
    accepted: list[Any] = []
    context = server_context(*pair, client_ca=authority.path)
    listener = Listener("127.0.0.1", 0, lambda transport, address: accepted.append(transport), context)
    listener.start()
    client_context = ClientContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname, client_context.verify_mode = False, ssl.CERT_NONE
    client_context.load_cert_chain(*Authority(tmp_path).pair("client"))
    with pytest.raises((ssl.SSLError, ConnectionError)):
        client_context.wrap_socket(socket.create_connection(listener.address, timeout=3)).recv(1)
    assert accepted == []
    listener.close()


@pytest.mark.parametrize("first", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n", bytes(100)])
def test_unfinished_handshakes_time_out(pair: Any, first: bytes) -> None:
    accepted: list[Any] = []
    context = server_context(*pair)
    listener = Listener("127.0.0.1", 0, lambda transport, _: accepted.append(transport), context, handshake_s=0.1)
    listener.start()
    clients = [socket.create_connection(listener.address, timeout=2) for _ in range(200)]
    for client in clients:
        client.sendall(first)
    begin_s = undisturbed_s()
    for client in clients:
        try:
            while client.recv(1000):  # perhaps an alert
                pass
        except ConnectionError:
            pass
        client.close()
    assert undisturbed_s() - begin_s < 1
    assert accepted == []
    assert listener._handshakes is not None
    assert not listener._handshakes._open
    listener.close()


def test_half_open_handshakes_do_not_delay_others(pair: Any) -> None:
    accepted: list[Any] = []
    listener = Listener("127.0.0.1", 0, lambda transport, address: accepted.append(transport), server_context(*pair))
    listener.start()
    half_open = [socket.create_connection(listener.address) for _ in range(200)]
    for client in half_open[::2]:
        client.sendall(b"\x16\x03\x01\x02")
    context = ClientContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    begin_s = undisturbed_s()
    good = [context.wrap_socket(socket.create_connection(listener.address, timeout=3)) for _ in range(10)]
    assert undisturbed_s() - begin_s < 1
    wait_until(lambda: len(accepted) == 10)
    for client in half_open + good:
        client.close()
    listener.close()


def test_the_usual_handshake_deadline(pair: Any) -> None:
    assert HandshakeQueue(server_context(*pair), print).timeout_s == 5


# files


def test_one_sentence_for_bad_files(pair: Any, authority: Authority, tmp_path: Path) -> None:
    cert, key = pair
    other_key = authority.pair("other")[1]
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nonsense")
    locked = tmp_path / "locked.pem"
    loaded = serialization.load_pem_private_key(key.read_bytes(), None)
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    locked.write_bytes(loaded.private_bytes(*form, serialization.BestAvailableEncryption(b"secret")))
    cases = [
        (tmp_path / "none.pem", key, None, "cannot read"),
        (cert, tmp_path / "none.pem", None, "cannot read"),
        (tmp_path, key, None, "cannot read"),
        (nonsense, key, None, "not a certificate and its key"),
        (cert, nonsense, None, "not a certificate and its key"),
        (cert, other_key, None, "not a certificate and its key"),
        (cert, locked, None, "password"),
        (cert, key, nonsense, "cannot read the client authorities"),
        (cert, key, tmp_path / "none.pem", "cannot read"),
    ]
    for cert_path, key_path, client_ca, words in cases:
        with pytest.raises(StartError) as raised:
            server_context(cert_path, key_path, client_ca)
        assert words in str(raised.value)
        assert "\n" not in str(raised.value)
