"""WebSockets of Lua, from the request on: blocking and as cosockets."""

from __future__ import annotations

import os
import ssl
import struct
from collections.abc import Iterator
from http.client import BadStatusLine
from pathlib import Path
from typing import Any

import gevent
import pytest
from gevent import socket
from gevent.ssl import SSLContext

from smqrt.transport.listener import Listener
from smqrt.transport.tls_contexts import self_signed_pair
from smqrt.wire import websocket
from smqrt.wire.websocket import BINARY, CLOSE, CONTINUATION, PING, TEXT
from tests.apps.lua.app_server import AppServer
from tests.apps.lua.websocket_client import Client
from tests.support.pki import server_context
from tests.support.waiting import let_others_run, wait_until

ECHO = """
local function echo(s)
  while true do
    local data, istext, done, all = s:read()
    if not data then
      app.seen[#app.seen + 1] = {istext, done}
      return
    end
    if all then app.pieces[#app.pieces + 1] = {#data, done, all} else s:write(data, istext) end
  end
end
"""

COSOCKET = ECHO + "\nba.socket.req2sock(request):event(echo, 's')"
BLOCKING = ECHO + "\nlocal s <close> = ba.socket.req2sock(request)\necho(s)"


def page(server: AppServer, code: str) -> Any:
    preload = "app.seen, app.pieces, app.values = {}, {}, {}"
    return server.app({".preload": preload, "ws.lsp": f"<?lsp {code} ?>", "state.lsp": STATE})


STATE = (
    "<?lsp response:write(ba.json.encode{seen = app.seen, pieces = app.pieces, n = #app.seen, s = ba.socket.stat()}) ?>"
)


def state_of(server: AppServer) -> Any:
    import json

    return json.loads(server.ask("/state.lsp").body)


@pytest.fixture(params=[COSOCKET, BLOCKING], ids=["cosocket", "blocking"])
def echo(server: AppServer, request: pytest.FixtureRequest) -> AppServer:
    page(server, request.param)
    return server


def ending(server: AppServer) -> Any:
    state = wait_until(lambda: (found := state_of(server))["n"] and found)
    wait_until(lambda: state_of(server)["s"] == 0)
    return state["seen"][0]


def test_echo_of_every_kind(echo: AppServer) -> None:
    client = Client(echo.port)
    for opcode, data in [(TEXT, "grüße".encode()), (BINARY, bytes(range(256))), (TEXT, b""), (BINARY, b"x" * 65535)]:
        client.send(opcode, data)
        assert client.receive() == (data, opcode == TEXT, 0, 0)
    client.send(TEXT, b"frag", fin=False)
    client.send(PING, b"now")
    client.send(CONTINUATION, b"men", fin=False)
    client.send(CONTINUATION, b"ts")
    assert client.receive() == (b"fragments", True, 0, 0)
    client.send(CLOSE, struct.pack(">H", 4321) + b"done")
    assert client.closed() == 4321
    assert client.sock.recv(10) == b""
    assert ending(echo) == ["socketclosed", 4321]


def test_ping_is_answered(echo: AppServer) -> None:
    client = Client(echo.port)
    client.send(PING, b"hello")
    assert client.sock.recv(100) == b"\x8a\x05hello"


def test_messages_that_come_with_the_request(echo: AppServer) -> None:
    key = websocket.new_key()
    fields = "".join(f"{name}: {value}\r\n" for name, value in websocket.request_headers(key))
    with socket.create_connection(("127.0.0.1", echo.port), timeout=5) as sock:
        early = websocket.encode_masked(TEXT, b"early")
        sock.sendall(f"GET /ws.lsp HTTP/1.1\r\nHost: x\r\n{fields}\r\n".encode() + early)
        got = b""
        while not got.endswith(b"\x81\x05early"):
            got += sock.recv(1000)


def test_a_large_frame_arrives_in_pieces(echo: AppServer) -> None:
    client = Client(echo.port)
    client.send(BINARY, os.urandom(300_000))
    client.send(TEXT, b"end")
    assert client.receive() == (b"end", True, 0, 0)
    pieces = state_of(echo)["pieces"]
    assert sum(size for size, _, _ in pieces) == 300_000
    assert pieces[-1][1:] == [300_000, 300_000]
    assert max(size for size, _, _ in pieces) <= 65535


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (websocket.encode(TEXT, b"not masked"), 1002),
        (websocket.encode_masked(TEXT, b"\xff\xfe"), 1007),
        (websocket.encode_masked(CONTINUATION, b"of nothing"), 1002),
        (b"\x82\xff\x7f" + b"\xff" * 7, 1009),
    ],
    ids=["unmasked", "no UTF-8", "continuation", "too large"],
)
def test_rules_are_enforced(echo: AppServer, frame: bytes, code: int) -> None:
    client = Client(echo.port)
    client.sock.sendall(frame)
    assert client.closed() == code
    assert ending(echo) == ["socketreadfailed", code]


def test_a_client_that_just_goes(echo: AppServer) -> None:
    client = Client(echo.port)
    client.sock.close()
    assert ending(echo) == ["socketclosed"]


def test_slow_bytes(echo: AppServer) -> None:
    client = Client(echo.port)
    for byte in websocket.encode_masked(TEXT, b"byte by byte"):
        client.sock.sendall(bytes((byte,)))
        gevent.sleep(0)
    assert client.receive() == (b"byte by byte", True, 0, 0)


def test_close_with_a_code_and_ping_and_limits(server: AppServer) -> None:
    page(
        server,
        """
        local s = ba.socket.req2sock(request)
        assert(s:websocket() and select(2, s:state()) == true)
        assert(not request:valid() and not pcall(request.header, request))
        s:maxsize(100)
        assert(s:ping("are you there") and s:ping())
        assert(not pcall(s.write, s, ("x"):rep(65536)) and not pcall(s.write, s, "\\xff", true))
        assert(not pcall(s.ping, s, ("x"):rep(126)))
        s:write("text", true) s:write("binary") s:write("0123456789", 3, 4, true)
        s:write(ba.bytearray.create("ba"), true)
        s:read()
        s:close(4000, "because")
        """,
    )
    client = Client(server.port)
    messages = [client.receive() for _ in range(4)]
    assert [message[:2] for message in messages if message] == [
        (b"text", True), (b"binary", False), (b"23", True), (b"ba", True),
    ]  # fmt: skip
    client.send(TEXT, b"go on")
    assert client.closed() == 4000
    other = Client(server.port)
    other.send(BINARY, b"x" * 101)
    while other.receive():
        pass
    assert other.codec.close_code == 1009


def test_write_under_back_pressure(server: AppServer) -> None:
    page(
        server,
        "ba.socket.req2sock(request):event(function(s) for i = 1, 300 do s:write(('m'):rep(60000)) end end, 's')",
    )
    client = Client(server.port)
    let_others_run()
    for _ in range(300):
        message = client.receive()
        assert message
        assert message.data == b"m" * 60000
    assert client.closed() == 1000


def test_a_raw_request_and_back_to_http(server: AppServer) -> None:
    page(
        server,
        """
        local s, data = ba.socket.req2sock(request)
        assert(not s:websocket())
        s:write("got " .. tostring(data) .. ";")
        local more = s:read()
        ba.socket.sock2req(s, "GET /other.lsp HTTP/1.1\\r\\nX-More: " .. more)
        assert(s:state() == "closed" and s:read() == nil)
        """,
    )
    server.write("", {"other.lsp": "other <?lsp=request:header'X-More' ?>"})
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.sendall(b"POST /ws.lsp HTTP/1.1\r\nHost: x\r\n\r\nraw data")
        assert sock.recv(100) == b"got raw data;"
        sock.sendall(b"field\r\nHost: x\r\n\r\n")
        assert b"other field" in sock.recv(1000)
        sock.sendall(b"GET /state.lsp HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b'"s":0' in sock.recv(1000)


def test_the_page_can_end_itself_after_req2sock(server: AppServer) -> None:
    code = """
        local s = ba.socket.req2sock(request)
        _G.expired = select(2, pcall(response.setheader, response, "X", "1"))
        local function taken() s:close() request:abort() end
        _G.caught, _G.mine = pcall(taken), request
        request:abort()
        _G.after = true"""
    server.app({"page.lsp": f"<?lsp {code} ?>"})
    with pytest.raises((BadStatusLine, ConnectionError)):
        server.ask("/page.lsp")
    assert server.vm.eval("return expired:match'expired', caught, after") == (b"expired", False, None)
    assert b"expired" in server.vm.eval("return select(2, pcall(mine.abort, mine))")[0]


@pytest.fixture
def secure_port(server: AppServer, tmp_path: Path) -> Iterator[int]:
    context = server_context(*self_signed_pair("127.0.0.1", tmp_path / "tls"))
    listener = Listener("127.0.0.1", 0, server.server.accepted_secure, context)
    listener.start()
    yield listener.address[1]
    listener.close()


def anybody() -> SSLContext:
    context = SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def test_over_tls(echo: AppServer, secure_port: int) -> None:
    client = Client(secure_port, tls=anybody())
    for number in range(20):
        data = os.urandom(60_000)
        client.send(BINARY, data)
        client.send(TEXT, b"%d" % number)
        assert client.receive() == (data, False, 0, 0)
        assert client.receive() == (b"%d" % number, True, 0, 0)
    client.send(CLOSE, struct.pack(">H", 1000))
    assert client.closed() == 1000
    assert ending(echo) == ["socketclosed", 1000]


def test_back_to_https(server: AppServer, secure_port: int) -> None:
    page(server, "ba.socket.sock2req(ba.socket.req2sock(request), 'GET /state.lsp HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n')")
    with anybody().wrap_socket(socket.create_connection(("127.0.0.1", secure_port), timeout=5)) as sock:
        for _ in range(3):
            sock.sendall(b"GET /ws.lsp HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b'"s":0' in sock.recv(1000)


def test_an_upgrade_without_a_valid_key_is_raw(server: AppServer) -> None:
    page(server, "local s <close> = ba.socket.req2sock(request) s:write(tostring(s:websocket()))")
    answer = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.sendall(b"GET /ws.lsp HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nSec-WebSocket-Key: abc\r\n\r\n")
        while data := sock.recv(100):
            answer += data
    assert answer == b"false"
