"""Server-sent events: a page sends the head and the first event, then a cosocket goes on with its connection."""

from __future__ import annotations

from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import pytest
from gevent import socket

from tests.apps.lua.app_server import AppServer
from tests.support.waiting import wait_until

BEGIN = """
response:setcontenttype'text/event-stream'
response:write'data: first\\n\\n'
response:flush()
"""
TAKE = "local s <close> = ba.socket.req2sock(request)"
STREAM = (
    BEGIN
    + """
response:write'data: second\\n\\n'
app.socket = ba.socket.req2sock(request)
app.is_valid = response:valid()
app.socket:event(function(s)
  s:write'data: third\\n\\n'
  s:write''
  app.last = {s:read()}
end, 's')
"""
)
BLOCKING = (
    BEGIN
    + """
local s <close> = ba.socket.req2sock(request)
for number = 1, 3 do s:write('data: ' .. number .. '\\n\\n') end
"""
)
EVENTS = b"data: first\n\ndata: second\n\ndata: third\n\n"


@pytest.fixture
def connection(server: AppServer) -> Iterator[HTTPConnection]:
    made = HTTPConnection("127.0.0.1", server.port)
    made.sock = socket.create_connection(("127.0.0.1", server.port), timeout=5)
    yield made
    made.close()


def serve(server: AppServer, page: str) -> None:
    server.app({".preload": "app.last = false", "page.lsp": f"<?lsp {page} ?>"})


def get(connection: HTTPConnection) -> HTTPResponse:
    connection.request("GET", "/page.lsp")
    return connection.getresponse()


def app(server: AppServer, name: str) -> Any:
    return server.vm.eval(f"return {name}")[0]


def test_events_of_a_cosocket(server: AppServer, connection: HTTPConnection) -> None:
    serve(server, STREAM + "_G.stream = app.socket _G.is_valid = app.is_valid")
    answer = get(connection)
    assert answer.getheader("Transfer-Encoding") == "chunked"
    assert answer.getheader("Content-Type") == "text/event-stream"
    assert answer.read(len(EVENTS)) == EVENTS
    server.vm.eval("stream:write('data: later\\n\\n') stream:close() return 0")
    assert answer.read() == b"data: later\n\n"
    assert answer.isclosed()
    assert app(server, "is_valid") is False


def test_events_of_a_page_that_blocks(server: AppServer, connection: HTTPConnection) -> None:
    serve(server, BLOCKING)
    assert get(connection).read() == b"data: first\n\ndata: 1\n\ndata: 2\n\ndata: 3\n\n"


def test_the_cosocket_sees_the_end_of_the_client(server: AppServer) -> None:
    serve(server, STREAM.replace("app.last =", "_G.last ="))
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=5)
    sock.sendall(b"GET /page.lsp HTTP/1.1\r\nHost: x\r\n\r\n")
    data = b""
    while b"third" not in data:
        data += sock.recv(1000)
    sock.close()
    wait_until(lambda: app(server, "last and last[2]") == b"socketclosed", "the end")


RAW_ANSWERS = {
    "http/1.0": ("1.0", BEGIN, b"data: first\n\n", b"data: more\\n\\n", b"data: more\n\n"),
    "a length": (
        "1.1",
        "response:setcontentlength(25)" + BEGIN,
        b"data: first\n\n",
        b"data: more\\n\\n",
        b"data: more\n\n",
    ),
    "chunks of its own": (
        "1.1",
        BEGIN,
        b"d\r\ndata: first\n\n\r\n",
        b"3\\r\\nabc\\r\\n0\\r\\n\\r\\n",
        b"3\r\nabc\r\n0\r\n\r\n",
    ),
    "chunks": ("1.1", BEGIN, b"d\r\ndata: first\n\n\r\n", b"data: x", b"7\r\ndata: x\r\n0\r\n\r\n"),
    "nothing more": ("1.1", BEGIN, b"d\r\ndata: first\n\n\r\n", b"", b"0\r\n\r\n"),
}


@pytest.mark.parametrize("name", RAW_ANSWERS)
def test_the_bytes_on_the_wire(server: AppServer, name: str) -> None:
    version, begin, first, written, more = RAW_ANSWERS[name]
    serve(server, f'{begin} {TAKE} s:write("{written.decode()}")')
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.sendall(f"GET /page.lsp HTTP/{version}\r\nHost: x\r\n\r\n".encode())
        data = b""
        while received := sock.recv(1000):
            data += received
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert body == first + more


def test_the_bare_connection_on_demand(server: AppServer) -> None:
    serve(server, BEGIN + "local s <close> = ba.socket.req2sock(request, true) s:write'as it is'")
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.sendall(b"GET /page.lsp HTTP/1.1\r\nHost: x\r\n\r\n")
        data = b""
        while received := sock.recv(1000):
            data += received
    assert data.endswith(b"d\r\ndata: first\n\n\r\nas it is")


def test_what_was_written_without_a_flush_is_dropped(server: AppServer) -> None:
    serve(server, "response:write'x' local s <close> = ba.socket.req2sock(request) s:write'bare'")
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.sendall(b"GET /page.lsp HTTP/1.1\r\nHost: x\r\n\r\n")
        assert sock.recv(100) == b"bare"


def test_it_does_not_go_back_to_http(server: AppServer, connection: HTTPConnection) -> None:
    serve(server, f"{BEGIN} {TAKE} s:write(tostring(select(2, ba.socket.sock2req(s))))")
    assert get(connection).read() == b"data: first\n\nincorrectuse"


def test_a_websocket_needs_a_response_that_has_not_begun(server: AppServer) -> None:
    serve(server, BEGIN + "response:write(tostring(select(2, ba.socket.req2sock(request))))")
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.sendall(
            b"GET /page.lsp HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade, close\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += sock.recv(1000)
    assert b"iscommitted" in data


def test_a_response_with_a_filter_stays_with_the_page(server: AppServer) -> None:
    """What follows would not go through it."""
    serve(server, "response:setresponse() " + BEGIN + "_G.word = select(2, ba.socket.req2sock(request))")
    server.ask("/page.lsp", headers={"Accept-Encoding": "gzip, deflate"})
    assert app(server, "word") == b"iscommitted"


def test_a_client_that_does_not_read_is_waited_for(server: AppServer, connection: HTTPConnection) -> None:
    """The queue of the cosocket is bounded as that of every socket."""
    serve(
        server,
        BEGIN + "local function many(s) for i = 1, 300 do s:write(('m'):rep(60000)) end end\n"
        "ba.socket.req2sock(request):event(many, 's')",
    )
    assert len(get(connection).read()) == 300 * 60_000 + len("data: first\n\n")
