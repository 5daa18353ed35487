"""ws:// and http2sock: HTTP clients in Lua whose connection becomes a socket."""

from __future__ import annotations

import trustme

from tests.apps.lua.app_server import AppServer
from tests.support.pki import gevent_context
from tests.support.proxies import SocksProxy
from tests.support.scripted_http import ScriptedHttp, answer

ECHO = """<?lsp
    local sock = ba.socket.req2sock(request)
    while true do
        local data, text = sock:read()
        if not data then break end
        sock:write(data, text)
    end
?>"""


def run(server: AppServer, code: str) -> list[str]:
    server.write("", {"echo.lsp": ECHO})
    code = code.replace("{port}", str(server.port))
    reply = server.page(f"<?lsp local http = require'httpc'.create() {code} ?>")
    assert reply.status == 200, reply.text
    return reply.text.splitlines()


def test_a_websocket(server: AppServer) -> None:
    code = """
        print(http:request{url = "ws://127.0.0.1:{port}/echo.lsp"})
        print(http:status())
        local sock, data = ba.socket.http2sock(http)
        print(sock:websocket(), data)
        sock:write("hello", true)
        print(sock:read(2000))
        sock:write("bytes")
        print(sock:read(2000))
        print(sock:close(), http:status())
    """
    expected = ["true", "101", "true\tnil", "hello\ttrue", "bytes\tfalse", "true\tnil\tsocketclosed"]
    assert run(server, code) == expected


def test_without_asking_for_the_status_and_through_a_proxy(server: AppServer) -> None:
    with SocksProxy() as proxy:
        code = f"""
            http = require"http".create{{proxy = "127.0.0.1", proxyport = {proxy.port}, socks = true}}
            http:request{{url = "ws://localhost:{{port}}/echo.lsp"}}
            local sock = assert(ba.socket.http2sock(http))
            sock:write("hello", true)
            print(sock:read(2000))
        """
        assert run(server, code) == ["hello\ttrue"]
        assert proxy.seen == [f"localhost:{server.port}"]


def test_a_server_without_websockets(server: AppServer) -> None:
    code = """
        http:request{url = "ws://127.0.0.1:{port}/page.html"}
        print(ba.socket.http2sock(http))
        print(http:status())
    """
    lines = run(server, code)
    assert lines[0].startswith("nil\tinvalidresponse")
    assert lines[1] == "404"


def test_a_wrong_key(server: AppServer) -> None:
    head = b"HTTP/1.1 101 x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: nonsense\r\n\r\n"
    with ScriptedHttp([[head]]) as scripted:
        code = f"""
            http:request{{url = "ws://127.0.0.1:{scripted.port}/"}}
            print((select(2, http:status())))
            print((select(2, ba.socket.http2sock(http))))
        """
        assert run(server, code) == ["invalidresponse", "socketclosed"]


def test_another_protocol_behind_101(server: AppServer) -> None:
    head = b"HTTP/1.1 101 x\r\nUpgrade: raw\r\nConnection: Upgrade\r\n\r\nfirst bytes"
    with ScriptedHttp([[head]]) as scripted:
        code = f"""
            local header = {{Upgrade = "raw", Connection = "Upgrade"}}
            http:request{{url = "http://127.0.0.1:{scripted.port}/", header = header}}
            print(http:status(), http:header"upgrade")
            local sock, data = ba.socket.http2sock(http)
            print(sock:websocket(), data)
        """
        assert run(server, code) == ["101\traw", "false\tfirst bytes"]


def test_the_documented_example_of_tls_through_socks(server: AppServer) -> None:
    """A tunnel through a SOCKS proxy by httpc, its socket, TLS over it: how MQTT goes through a proxy."""
    ca = trustme.CA()
    ca.cert_pem.write_to_path(server.folder / "ca.pem")
    context = gevent_context(ca.issue_cert("localhost"))
    with SocksProxy("me", "secret") as proxy, ScriptedHttp([answer(b"safe")], context=context) as scripted:
        code = f"""
            http = require"httpc".create{{
                proxy = "127.0.0.1", proxyport = {proxy.port}, socks = true, proxycon = true,
                proxyuser = "me", proxypass = "secret",
            }}
            print(http:request{{url = "http://localhost:{scripted.port}"}})
            local s = ba.socket.http2sock(http)
            print(s:upgrade(ba.sharkclient()), s:trusted())
            s:write"GET / HTTP/1.1\\r\\n\\r\\n"
            print(s:read(2000):match"safe$")
        """
        assert run(server, code) == ["nil\tprxready", "true\tnil\tcn", "safe"]
        assert proxy.seen == [f"localhost:{scripted.port}"]
