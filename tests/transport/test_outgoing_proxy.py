"""Connections through real proxies: names, credentials, refusals, proxies that are none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gevent
import pytest
from gevent.server import StreamServer

from smqrt.errors import ArgumentError, StreamError
from smqrt.transport.outgoing_proxy import Proxy, open_through
from tests.support.proxies import ConnectProxy, SocksProxy, TestProxy
from tests.support.waiting import let_others_run

KINDS = [SocksProxy, ConnectProxy]


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that sends back what it gets."""
    yield from _serving(_echo)


@pytest.fixture
def serving() -> Iterator[Callable[[Callable[..., None]], int]]:
    """A factory: the port of a server for a handler of one connection."""
    servers: list[Iterator[int]] = []

    def start(handler: Callable[..., None]) -> int:
        servers.append(_serving(handler))
        return next(servers[-1])

    yield start
    for server in servers:
        next(server, None)


def _serving(handler: Callable[..., None]) -> Iterator[int]:
    server = StreamServer(("127.0.0.1", 0), handler)
    server.start()
    yield server.server_port
    server.stop(0)


def _echo(client: Any, _address: Any) -> None:
    while data := client.recv(4096):
        client.sendall(data)


def spec(proxy: TestProxy, user: str | None = None, password: str | None = None) -> Proxy:
    return Proxy("127.0.0.1", proxy.port, isinstance(proxy, SocksProxy), user, password)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tunnel(kind: type[TestProxy], echo: int) -> None:
    with kind() as proxy:
        stream = open_through(spec(proxy), "localhost", echo, timeout_s=5)
        stream.write(b"hello")
        assert stream.read(timeout_s=2) == b"hello"
        assert proxy.seen == [f"localhost:{echo}"]
        stream.close()


@pytest.mark.parametrize("kind", KINDS)
def test_credentials(kind: type[TestProxy], echo: int) -> None:
    with kind("me", "secret") as proxy:
        open_through(spec(proxy, "me", "secret"), "127.0.0.1", echo, timeout_s=5).close()
        for wrong in [("me", "wrong"), (None, None)]:
            with pytest.raises(StreamError) as failure:
                open_through(spec(proxy, *wrong), "127.0.0.1", echo, timeout_s=5)
            assert failure.value.word == "proxyauth"
        assert proxy.seen == [f"127.0.0.1:{echo}"]


@pytest.mark.parametrize(
    ("kind", "reply", "word"),
    [
        (SocksProxy, 1, "prxgeneral"),
        (SocksProxy, 2, "prxnotallowed"),
        (SocksProxy, 3, "prxnetunreachable"),
        (SocksProxy, 4, "prxhostunreachable"),
        (SocksProxy, 5, "prxrefused"),
        (SocksProxy, 6, "prxttlexpired"),
        (SocksProxy, 99, "prxnotcompatible"),
        (ConnectProxy, 403, "prxrefused"),
        (ConnectProxy, 502, "prxrefused"),
    ],
)
def test_refusals(kind: type[TestProxy], reply: int, word: str) -> None:
    with kind() as proxy:
        proxy.reply = reply
        with pytest.raises(StreamError) as failure:
            open_through(spec(proxy), "127.0.0.1", 9, timeout_s=5)
        assert failure.value.word == word


@pytest.mark.parametrize("socks", [True, False])
@pytest.mark.parametrize(
    ("answer", "word"), [(b"", "socketclosed"), (b"220 mail.example ESMTP\r\n" * 2, "prxnotcompatible")]
)
def test_no_proxy(serving: Callable[..., int], socks: bool, answer: bytes, word: str) -> None:
    def serve(client: Any, _address: Any) -> None:
        client.recv(4096)
        client.sendall(answer)

    with pytest.raises(StreamError) as failure:
        open_through(Proxy("127.0.0.1", serving(serve), socks), "127.0.0.1", 9, timeout_s=5)
    assert failure.value.word == word


def test_endless_head(serving: Callable[..., int]) -> None:
    def serve(client: Any, _address: Any) -> None:
        client.sendall(b"HTTP/1.1 200 Ok\r\n")
        while True:
            client.sendall(b"X: y\r\n" * 1000)

    with pytest.raises(StreamError, match="prxnotcompatible"):
        open_through(Proxy("127.0.0.1", serving(serve)), "127.0.0.1", 9, timeout_s=5)


@pytest.mark.parametrize("socks", [True, False])
def test_a_silent_proxy(serving: Callable[..., int], socks: bool) -> None:
    port = serving(lambda client, _address: gevent.sleep(2))
    with pytest.raises(StreamError) as failure:
        open_through(Proxy("127.0.0.1", port, socks), "127.0.0.1", 9, timeout_s=0.1)
    assert failure.value.word == "timeout"


def test_data_after_the_head_is_not_lost(echo: int) -> None:
    with ConnectProxy() as proxy:
        proxy.tail = b"220 ready\r\n"
        assert open_through(spec(proxy), "127.0.0.1", echo, timeout_s=5).read(timeout_s=1) == b"220 ready\r\n"


def test_a_closed_proxy_port() -> None:
    proxy = SocksProxy()
    port = proxy.port
    proxy.close()
    with pytest.raises(StreamError) as failure:
        open_through(Proxy("127.0.0.1", port, True), "127.0.0.1", 9, timeout_s=5)
    assert failure.value.word == "cannotconnect"


def test_credentials_that_cannot_be_sent() -> None:
    with pytest.raises(ArgumentError, match="the user of a SOCKS proxy"):
        Proxy("127.0.0.1", 1080, True, "ü", "x")
    with pytest.raises(ArgumentError, match="the password of a SOCKS proxy"):
        Proxy("127.0.0.1", 1080, True, "x", "x" * 256)
    assert "secret" not in repr(Proxy("127.0.0.1", 1080, True, "x", "secret"))


@pytest.mark.parametrize("host", ["a\r\nX-Injected: 1", "a b", "a\0", "u@a", "a/b"])
def test_no_field_can_be_smuggled_in_by_the_host(serving: Callable[..., int], host: str) -> None:
    seen: list[bytes] = []

    def note(client: Any, _address: Any) -> None:
        seen.append(client.recv(65536))

    with pytest.raises(StreamError, match="cannotresolve"):
        open_through(Proxy("127.0.0.1", serving(note)), host, 80, 3)
    let_others_run()
    assert seen in ([], [b""])
