"""The sub-protocol of a WebSocket, and its cookies: whoever answers 101 sends what the application chose."""

from __future__ import annotations

from http.client import HTTPConnection, HTTPResponse

import pytest
from gevent import socket

from smqrt.apps.lua.api import smq_hub
from smqrt.wire.websocket import new_key, request_headers
from tests.apps.lua.app_server import AppServer

PYTHON = """
from smqrt.app import WebSocket, dir

def answer(request, relpath):
    headers = request.response.headers
    if relpath == "argument":
        WebSocket(request, subprotocol="chat.v2").close()
    elif relpath == "field":
        headers.set("Sec-WebSocket-Protocol", "chat.v2")
        headers.add("Set-Cookie", "a=1")
        WebSocket(request).close()
    elif relpath == "injected":
        WebSocket(request, subprotocol="chat.v2\\r\\nX: y").close()
    elif relpath == "none":
        WebSocket(request).close()
    else:
        return False
    return True

dir.setfunc(answer)
"""
LUA = {
    ".preload": """
        hub = require'smq.hub'.create()
        local before = ba.create.dir('traced', 1)
        before:setfunc(function(_ENV) response:setheader('Sec-WebSocket-Protocol', 'chat.v2') return false end)
        dir:insert(before, true)
        tl = ba.create.tracelogger('traced')
        dir:insert(tl, true)""",
    "field.lsp": "<?lsp response:setheader('Sec-WebSocket-Protocol', 'chat.v2') "
    "local c = response:createcookie'a' c:value'1' c:activate() "
    "s, app.word, app.text = ba.socket.req2sock(request) ?>",
    "argument.lsp": "<?lsp local s = ba.socket.req2sock(request, 'chat.v2') ?>",
    "none.lsp": "<?lsp local s = ba.socket.req2sock(request) ?>",
    "hub.lsp": "<?lsp response:setheader('Sec-WebSocket-Protocol', 'chat.v2') app.hub:connect(request) ?>",
    "said.lsp": "<?lsp response:write(tostring(app.word), ': ', tostring(app.text)) ?>",
}
CHOOSE = ["/py/argument", "/py/field", "/argument.lsp", "/field.lsp", "/hub.lsp", "/traced/"]


@pytest.fixture
def site(server: AppServer) -> AppServer:
    smq_hub.install(server.vm, server.services, server.applications.exchanges)
    for application in (server.app(LUA), server.app({".preload.py": PYTHON}, "py")):
        assert application.error is None, application.error
    return server


def opened(site: AppServer, path: str, *offers: str) -> HTTPResponse:
    """The answer to a handshake with these lines of offers."""
    return asked(site, path, [*request_headers(new_key()), *[("Sec-WebSocket-Protocol", one) for one in offers]])


def asked(site: AppServer, path: str, fields: list[tuple[str, str]]) -> HTTPResponse:
    """The answer to a request with these lines."""
    connection = HTTPConnection("127.0.0.1", site.port)
    connection.sock = socket.create_connection(("127.0.0.1", site.port), timeout=10)
    connection.putrequest("GET", path)
    for name, value in fields:
        connection.putheader(name, value)
    connection.endheaders()
    return connection.getresponse()


@pytest.mark.parametrize("path", CHOOSE)
def test_what_is_chosen_is_sent(site: AppServer, path: str) -> None:
    for offers in (("chat.v2",), ("mqtt, chat.v2",), ("mqtt", "chat.v2")):
        answer = opened(site, path, *offers)
        assert (answer.status, answer.getheader("Sec-WebSocket-Protocol")) == (101, "chat.v2")
        assert (answer.getheader("Set-Cookie") or "").startswith("a=1") == ("field" in path)


@pytest.mark.parametrize("path", [*CHOOSE, "/py/injected"])
def test_what_the_client_does_not_offer_is_refused(site: AppServer, path: str) -> None:
    for offers, words in (((), "offers none"), (("mqtt, CHAT.V2",), "offers mqtt, CHAT.V2")):
        answer = opened(site, path, *offers)
        text = answer.read().decode()
        assert answer.status == 400
        assert "chat.v2" in text
        assert words in text
        assert answer.getheader("X") is None
    if path == "/field.lsp":
        assert site.ask("/said.lsp").text.startswith("subprotocol: WebSocket sub-protocol")


@pytest.mark.parametrize("path", ["/py/none", "/none.lsp"])
def test_nothing_is_chosen_by_itself(site: AppServer, path: str) -> None:
    answer = opened(site, path, "chat.v2")
    assert (answer.status, answer.getheader("Sec-WebSocket-Protocol")) == (101, None)


def test_lines_of_a_name_are_joined_in_lua(site: AppServer) -> None:
    site.write("", {"lines.lsp": "<?lsp response:write(request:header'X-A', '|', request:cookie'c':value()) ?>"})
    answer = asked(site, "/lines.lsp", [("X-A", "1"), ("Cookie", "b=1"), ("x-a", "2"), ("Cookie", "c=2")])
    assert answer.read() == b"1,2|2"


@pytest.mark.parametrize("path", ["/none.lsp", "/py/none", "/hub.lsp"])
def test_an_upgrade_on_two_connection_lines(site: AppServer, path: str) -> None:
    fields = [("Connection", "keep-alive"), *request_headers(new_key()), ("Sec-WebSocket-Protocol", "chat.v2")]
    assert asked(site, path, fields).status == 101
