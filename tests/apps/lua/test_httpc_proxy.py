"""HTTP clients in Lua through proxies."""

from __future__ import annotations

from collections.abc import Iterator

import gevent
import pytest
import trustme
from gevent.server import StreamServer

from tests.apps.lua.app_server import AppServer
from tests.support.pki import gevent_context
from tests.support.proxies import ConnectProxy, SocksProxy, TestProxy
from tests.support.scripted_http import ScriptedHttp, answer
from tests.support.waiting import wait_until

KINDS = pytest.mark.parametrize("kind", [SocksProxy, ConnectProxy])


@pytest.fixture
def hello() -> Iterator[ScriptedHttp]:
    with ScriptedHttp([answer(b"hello")] * 9) as scripted:
        yield scripted


def run(server: AppServer, proxy: TestProxy, code: str, **names: object) -> list[str]:
    """The lines that Lua code printed; `op` is for this proxy, names in braces are replaced."""
    socks = "true" if isinstance(proxy, SocksProxy) else "false"
    for name, value in names.items():
        code = code.replace("{" + name + "}", str(value))
    op = f"local op = {{proxy = '127.0.0.1', proxyport = {proxy.port}, socks = {socks}}}"
    reply = server.page(f"<?lsp {op} {code} ?>")
    assert reply.status == 200, reply.text
    return reply.text.splitlines()


GET = """
    http = require"httpc".create(op)
    local ok, err = http:request{url = "{url}/a?b"}
    print(ok, err)
    if ok then print(http:status(), http:read"a") end
"""


@KINDS
def test_get(server: AppServer, hello: ScriptedHttp, kind: type[TestProxy]) -> None:
    with kind() as proxy:
        assert run(server, proxy, GET + GET, url=hello.url) == ["true\tnil", "200\thello"] * 2
        assert proxy.seen == [f"127.0.0.1:{hello.port}"] * 2
    assert hello.heads[0].startswith("GET /a?b HTTP/1.1\r\n")


@KINDS
def test_credentials(server: AppServer, hello: ScriptedHttp, kind: type[TestProxy]) -> None:
    with kind("me", "secret") as proxy:
        good = "op.proxyuser, op.proxypass = 'me', 'secret'" + GET
        assert run(server, proxy, good, url=hello.url) == ["true\tnil", "200\thello"]
        bad = "op.proxyuser, op.proxypass = 'me', 'wrong'" + GET
        refused = ["nil\tproxyauth"] if kind is SocksProxy else ["true\tnil", "407\t"]
        assert run(server, proxy, bad, url=hello.url) == refused
        assert run(server, proxy, GET, url=hello.url) == refused
    assert len(hello.heads) == 1
    assert "secret" not in hello.heads[0]


@KINDS
def test_tls_through_a_tunnel(server: AppServer, kind: type[TestProxy]) -> None:
    ca = trustme.CA()
    ca.cert_pem.write_to_path(server.folder / "ca.pem")
    context = gevent_context(ca.issue_cert("localhost"))
    trusting = """
        local store = ba.create.certstore()
        store:addcert(ba.openio"home", "ca.pem")
        op.shark = ba.create.sharkssl(store)
        op.proxyuser, op.proxypass = 'me', 'secret'
    """
    with kind("me", "secret") as proxy, ScriptedHttp([answer(b"safe")], context=context) as scripted:
        code = trusting + GET + "print(http:trusted(), http:certificate().subjectaltnames[1])"
        lines = run(server, proxy, code, url=f"https://localhost:{scripted.port}")
        assert lines == ["true\tnil", "200\tsafe", "true\tlocalhost"]
        assert proxy.seen == [f"localhost:{scripted.port}"]
        refused = run(server, proxy, GET, url=f"https://localhost:{scripted.port}")
        assert refused == ["nil\tproxyauth"]


@KINDS
def test_proxycon_makes_the_tunnel_only(server: AppServer, kind: type[TestProxy]) -> None:
    seen: list[bytes] = []

    def serve(client: gevent.socket.socket, _address: object) -> None:
        client.sendall(b"220 ready\r\n")
        seen.append(client.recv(100))

    listener = StreamServer(("127.0.0.1", 0), serve)
    listener.start()
    with kind() as proxy:
        code = "op.proxycon = true" + GET + "print(http:peername()) print(http:status())"
        lines = run(server, proxy, code, url=f"http://127.0.0.1:{listener.server_port}")
        assert lines == [
            "nil\tprxready",
            f"127.0.0.1\t{proxy.port}\tfalse",
            "nil\tincorrectuse\tthe connection is a tunnel, not HTTP",
        ]
        (client,) = server.services.http_clients.values()
        released = client.release()
        assert (released.websocket, released.tls, released.host) == (False, None, "127.0.0.1")
        assert released.stream.read(timeout_s=2) == b"220 ready\r\n"
        released.stream.write(b"HELO")
        wait_until(lambda: seen)
        assert seen == [b"HELO"]
        released.stream.close()
    listener.stop(0)


def test_no_proxy_there(server: AppServer) -> None:
    proxy = SocksProxy()
    proxy.close()
    assert run(server, proxy, GET, url="http://a.example") == ["nil\tcannotconnect"]


def test_wrong_arguments(server: AppServer) -> None:
    with SocksProxy() as proxy:
        lines = run(server, proxy, "op.proxyuser = string.rep('x', 300) print(pcall(require'httpc'.create, op))")
        assert "the user of a SOCKS proxy has 1 to 255 ASCII characters" in lines[0]
        lines = run(server, proxy, "op.proxyport = 'http' print(pcall(require'httpc'.create, op))")
        assert "create{proxyport}" in lines[0]
