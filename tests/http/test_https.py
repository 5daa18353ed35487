"""HTTP over TLS: the same server behind `accepted_secure`."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import gevent
import pytest
from gevent import socket
from gevent.ssl import SSLContext

from smqrt.http.logins import Authenticator
from smqrt.http.message import Request
from smqrt.transport.listener import Listener
from smqrt.transport.tls_contexts import self_signed_pair
from tests.http.http_bench import Bench, Wire
from tests.support.pki import server_context
from tests.support.waiting import let_others_run, wait_until


class SecureBench(Bench):
    """A server on a TLS port."""

    def __init__(self, pair: tuple[str, str]) -> None:
        super().__init__()
        self.listener.close()
        self.listener = Listener("127.0.0.1", 0, self.server.accepted_secure, server_context(*pair))
        self.listener.start()

    def connect(self) -> Wire:
        context = SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self.wires.append(Wire(self.listener.address, context.wrap_socket))
        self.wires[-1].sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self.wires[-1]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return self_signed_pair("127.0.0.1", Path(tmp_path_factory.mktemp("pair")))


@pytest.fixture
def secure(pair: tuple[str, str]) -> Iterator[SecureBench]:
    bench = SecureBench(pair)
    yield bench
    bench.close()


def test_requests_on_one_connection(secure: SecureBench) -> None:
    def handler(request: Request, relpath: str) -> None:
        assert request.secure
        assert request.transport.version().startswith("TLS")
        request.response.write(relpath.encode() + b"|" + request.body())

    secure.handle(handler)
    wire = secure.connect()
    for size in (0, 10, 100_000):
        wire.send(f"POST /{size} HTTP/1.1\r\nHost: test\r\nContent-Length: {size}\r\n\r\n".encode() + b"x" * size)
        assert wire.answer().body == f"{size}|".encode() + b"x" * size


def test_a_pipeline_in_one_record_and_in_many(secure: SecureBench) -> None:
    def handler(request: Request, relpath: str) -> None:
        if relpath.endswith("5"):
            gevent.sleep(0.005)
        request.response.write(relpath.encode())

    secure.handle(handler)
    wire = secure.connect()
    requests = [f"GET /{number} HTTP/1.1\r\nHost: test\r\n\r\n".encode() for number in range(200)]
    wire.send(b"".join(requests[:100]))
    for request in requests[100:]:
        wire.send(request)
    assert [wire.answer().body for _ in requests] == [b"%d" % number for number in range(200)]


def test_a_large_answer_to_a_slow_reader(secure: SecureBench) -> None:
    secure.handle(lambda request, relpath: request.response.end(bytes(5 << 20) if relpath else b"small"))
    slow = secure.connect().send(b"GET /big HTTP/1.1\r\nHost: test\r\n\r\n")
    let_others_run()
    assert secure.connect().ask("/").body == b"small"
    assert len(slow.answer().body) == 5 << 20
    assert slow.ask("/").body == b"small"


def test_a_stream(secure: SecureBench) -> None:
    secure.handle(lambda request, relpath: [request.response.write(bytes(10_000)) for _ in range(100)])
    assert secure.connect().ask("/").body == bytes(1_000_000)


def test_a_slash_is_added_with_https(secure: SecureBench) -> None:
    assert secure.connect().ask("/x").fields["location"] == "https://test/x/"


def test_malformed_is_refused(secure: SecureBench) -> None:
    wire = secure.connect().send(b"nonsense\r\n\r\n")
    assert wire.answer().status == 400
    assert wire.ended()


def test_nothing_behind_a_malformed_request_is_seen(secure: SecureBench) -> None:
    """Records that were decrypted together: the bad one ends the connection, the good one behind it is thrown away."""
    seen = []

    def handler(request: Request, relpath: str) -> None:
        seen.append(request.path)
        gevent.sleep(0.03)

    secure.handle(handler)
    wire = secure.connect().send(b"GET /1 HTTP/1.1\r\nHost: test\r\n\r\n")
    wait_until(lambda: seen)
    wire.send(b"GET /2 HTTP/1.1\r\n\r\n").send(b"GET /3 HTTP/1.1\r\nHost: test\r\n\r\n")
    assert wire.answer().status == 200
    assert wire.answer().status == 400
    assert wire.ended()
    assert seen == ["/1"]


def test_connection_close_ends_with_goodbye(secure: SecureBench) -> None:
    secure.handle(lambda request, relpath: request.response.write(b"bye"))
    wire = secure.connect()
    assert wire.ask("/", headers="Connection: close\r\n").body == b"bye"
    assert wire.sock.recv(10) == b"", "a close without close_notify would raise"
    let_others_run()


def test_detach_with_bytes_behind_the_head(secure: SecureBench) -> None:
    def handler(request: Request, relpath: str) -> None:
        detached = request.detach()
        assert detached.secure
        detached.transport.send(b"first")
        detached.transport.send(b"[" + detached.data + b"]")

    secure.handle(handler)
    wire = secure.connect().send(b"GET / HTTP/1.1\r\nHost: test\r\n\r\nabc")
    assert wire.sock.recv(100) == b"first"
    assert wire.sock.recv(100) == b"[abc]"


def test_plain_http_on_the_tls_port_is_closed(secure: SecureBench) -> None:
    wire = Wire(secure.listener.address).send(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n")
    while wire.more():  # perhaps an alert
        pass
    assert b"HTTP" not in wire.data
    assert len(secure.server) == 0


def test_logins(secure: SecureBench) -> None:
    """A cookie of TLS stays there; what TLS protects may be sent as it is."""
    for name in ("sform", "dav", "auth"):
        secure.handle(lambda request, relpath: False, name).setauth(Authenticator({"ann": "secret"}, name))
    wire = secure.connect()
    body = b"ba_username=ann&ba_password=secret"
    kind = "Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 34\r\n"
    wire.send(f"POST /sform/x HTTP/1.1\r\nHost: test\r\n{kind}\r\n".encode() + body)
    answer = wire.answer()
    assert (answer.status, answer.fields["location"]) == (302, "https://test/sform/x")
    assert answer.fields["set-cookie"].endswith("; Path=/; HttpOnly; SameSite=Lax; Secure")
    for name in ("dav", "auth"):
        offered = [line for line in wire.ask(f"/{name}/x").head.split(b"\r\n") if b"WWW-Authenticate" in line]
        assert [line.split()[1] for line in offered] == [b"Digest", b"Digest", b"Basic"]
