"""Connections that begin with a PROXY header, against a real listener: pieces, floods, untrusted clients, limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import gevent
import pytest
from gevent import socket

from smqrt.errors import StartError
from smqrt.http.forwarded import Proxies
from smqrt.server.listeners import ports
from smqrt.settings.server_settings import ListenerSettings, ProxySettings, Settings
from smqrt.transport import admission
from smqrt.transport.admission import TrustedNetworks, open_connections
from tests.support.device import RAW, TLS, Device, Site, bounded
from tests.support.waiting import wait_until
from tests.wire.proxy_headers import V4, version_2

MakeSite = Callable[..., Site]
LINE = b"PROXY TCP4 192.0.2.7 127.0.0.1 4711 443\r\n"


@pytest.fixture
def proxied(make_site: MakeSite) -> Iterator[Site]:
    """A site whose ports ask for the header, plain and over TLS; this machine is trusted."""
    site = make_site()
    open_connections.proxies = TrustedNetworks(["127.0.0.0/8"])
    site.address(secure=True)
    for listener in site._listeners:
        listener.expect_proxy_headers(lambda: open_connections.proxies, 0.6)
    yield site
    open_connections.proxies, open_connections.per_address = TrustedNetworks(), 2000


def connected(site: Site, header: bytes, kind: str = RAW, uid: bytes = b"device") -> Device:
    return site.open(kind, first=header).start().connect(uid)


@pytest.mark.parametrize("kind", [RAW, TLS])
@pytest.mark.parametrize("header", [LINE, version_2()], ids=["version 1", "version 2"])
def test_the_client_is_the_one_that_the_header_names(proxied: Site, header: bytes, kind: str) -> None:
    device = connected(proxied, header, kind)
    assert device.ip.rstrip() == b"192.0.2.7"
    assert proxied.requests[-1].peer == ("192.0.2.7", 4711)
    assert proxied.requests[-1].secure is (kind == TLS)
    assert open_connections._by_address.get("192.0.2.7") == 1
    assert next(iter(proxied.state.sessions.values())).outbox.transport.peer_host == "192.0.2.7"
    device.close()
    wait_until(lambda: "192.0.2.7" not in open_connections._by_address)


def test_local_headers_and_terminated_tls(proxied: Site) -> None:
    for header in (b"PROXY UNKNOWN\r\n", version_2(0x20, 0, b"")):
        assert connected(proxied, header).ip.rstrip() == b"127.0.0.1"
    connected(proxied, version_2(body=V4 + b"\x20\0\5\1\0\0\0\0"))
    assert proxied.requests[-1].secure is True


@pytest.mark.parametrize("header", [LINE, version_2()], ids=["version 1", "version 2"])
def test_a_header_in_pieces(proxied: Site, header: bytes) -> None:
    request = b"GET /smq HTTP/1.1\r\nHost: test\r\nSimpleMQ: 1\r\n\r\n"
    clients = []
    for cut in range(1, len(header) + 1):
        client = socket.create_connection(proxied.address(), timeout=10)
        client.sendall(header[:cut])
        clients.append((client, header[cut:]))
    gevent.sleep(0.05)
    for client, rest in clients:
        client.sendall(rest + request)
    for client, _ in clients:
        assert client.recv(4, socket.MSG_WAITALL)[2:4] == b"\1\1", "Init"
        client.close()
    assert {request.peer[0] for request in proxied.requests} == {"192.0.2.7"}
    one = socket.create_connection(proxied.address(), timeout=10)
    for byte in header:
        one.sendall(bytes((byte,)))
        gevent.sleep(0.001)
    one.sendall(request)
    assert one.recv(4, socket.MSG_WAITALL)[2:4] == b"\1\1"
    one.close()


def test_an_invalid_header_is_refused_and_logged(proxied: Site, caplog: pytest.LogCaptureFixture) -> None:
    before = admission.REFUSED.count
    clients = []
    for nonsense in (b"GET / HTTP/1.1\r\nHost: test\r\n\r\n", b"PROXY TCP4 1 2 3\r\n", b"PROXY TCP4", b""):
        clients.append(socket.create_connection(proxied.address(), timeout=10))
        clients[-1].sendall(nonsense)
    half = socket.create_connection(proxied.address(), timeout=10)
    half.sendall(b"PROXY TCP4 192")
    half.shutdown(socket.SHUT_WR)
    with bounded():
        for client in [*clients, half]:
            assert client.recv(100).startswith(b"HTTP/1.1 403 "), "also who never ends it: after the deadline"
            client.close()
    assert admission.REFUSED.count == before + 5
    assert "see the setting proxy.trusted" in caplog.text
    assert proxied.requests == []


def test_unauthenticated_connections_are_refused(proxied: Site) -> None:
    open_connections.proxies = TrustedNetworks(["10.0.0.0/8"])
    client = socket.create_connection(proxied.address(), timeout=10)
    client.sendall(LINE + b"GET / HTTP/1.1\r\nHost: test\r\n\r\n")
    answer = b""
    while data := client.recv(4096):
        answer += data
    assert b"proxy.trusted" in answer
    client.close()
    assert proxied.requests == []


def test_limits_count_the_client_and_not_the_proxy(proxied: Site) -> None:
    open_connections.per_address = 2
    first = connected(proxied, LINE, uid=b"first one")
    connected(proxied, LINE, uid=b"second one")
    third = socket.create_connection(proxied.address(), timeout=10)
    third.sendall(LINE)
    assert third.recv(100) == b"", "one too many of that client"
    connected(proxied, LINE.replace(b".7", b".8", 1), uid=b"another")
    first.close()
    wait_until(lambda: open_connections._by_address["192.0.2.7"] == 1)
    connected(proxied, LINE, uid=b"fourth one")
    third.close()


def test_websockets_behind_an_http_proxy_count_for_their_clients(make_site: MakeSite) -> None:
    site = make_site()
    trusted = open_connections.proxies = TrustedNetworks(["127.0.0.1"])
    site.server.proxies = Proxies(trusted)
    open_connections.per_address = 1
    try:
        headers = "SimpleMQ: 1\r\nSendSmqHttpResponse: true\r\nX-Forwarded-For: 6.6.6.6, 192.0.2.9\r\n"
        first = site.open().start(headers).connect()
        assert first.ip.rstrip() == b"192.0.2.9"
        second = site.open()
        second.send_bytes(f"GET /smq HTTP/1.1\r\nHost: test\r\n{headers}\r\n".encode())
        assert second.read_head().head.startswith(b"HTTP/1.1 503 ")
        assert open_connections._by_address["192.0.2.9"] == 1
    finally:
        open_connections.proxies, open_connections.per_address = TrustedNetworks(), 2000


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: Settings(proxy=ProxySettings(trusted=("10.0.0.1/8",))),
            "proxy.trusted: 10.0.0.1/8 has host bits set; write addresses and networks such as 10.0.0.0/8, ::1 or unix",
        ),
        (
            lambda: ports(Settings(listener={"http": ListenerSettings(proxy_protocol=True)})),
            "listener.http has proxy_protocol, but proxy.trusted names no proxy; add its address.",
        ),
    ],
)
def test_settings_that_make_no_sense(make: Callable[[], object], said: str) -> None:
    with pytest.raises(StartError) as error:
        make()
    assert str(error.value) == said
