"""Pages of other hosts and Lua: brokers, WebSockets that a page takes over, and forms."""

from __future__ import annotations

import pytest

from smqrt.apps.lua.api import smq_hub
from smqrt.wire.websocket import new_key, request_headers
from tests.apps.lua.app_server import AppServer

FOREIGN = {"Origin": "http://evil.example"}
PAGE = "<?lsp app.smq:connect(request) print 'behind' ?>"


def websocket(server: AppServer, path: str, origin: str | None) -> int:
    """The status of a WebSocket handshake."""
    fields = dict(request_headers(new_key())) | ({"Origin": origin} if origin else {})
    return server.ask(path, headers=fields, upgrades=True).status


def own(server: AppServer) -> str:
    return f"http://127.0.0.1:{server.port}"


@pytest.mark.parametrize(("option", "friends"), [("{}", 403), ("{origins='http://evil.example'}", 101)])
def test_brokers(server: AppServer, option: str, friends: int) -> None:
    smq_hub.install(server.vm, server.services, server.applications.exchanges)
    assert server.app({".preload": f"smq = require'smq.hub'.create{option}", "smq.lsp": PAGE}).error is None
    assert websocket(server, "/smq.lsp", None) == 101
    assert websocket(server, "/smq.lsp", own(server)) == 101
    assert websocket(server, "/smq.lsp", "http://evil.example") == friends
    assert websocket(server, "/smq.lsp", "http://other.example") == 403


def test_a_table_of_origins(server: AppServer) -> None:
    smq_hub.install(server.vm, server.services, server.applications.exchanges)
    preload = "smq = require'smq.hub'.create{origins={'https://a.example', 'https://b.example'}}"
    assert server.app({".preload": preload, "smq.lsp": PAGE}).error is None
    assert [websocket(server, "/smq.lsp", f"https://{name}.example") for name in "abc"] == [101, 101, 403]


def test_a_wrong_one_names_the_rule(server: AppServer) -> None:
    smq_hub.install(server.vm, server.services, server.applications.exchanges)
    error = server.app({".preload": "require'smq.hub'.create{origins='example.com'}"}).error
    assert error is not None
    assert "origins: 'example.com' is not an origin; write https://example.com" in error


@pytest.mark.parametrize("raw", ["false", "true"])
def test_websockets_that_a_page_takes_over(server: AppServer, raw: str) -> None:
    source = f"local s, word = ba.socket.req2sock(request, {raw}) app.word = word " + (
        "if s then s:write'HTTP/1.1 101 ok\\r\\n\\r\\n' end" if raw == "true" else ""
    )
    server.app({"ws.lsp": f"<?lsp {source} ?>", "word.lsp": "<?lsp response:write(tostring(app.word)) ?>"})
    assert websocket(server, "/ws.lsp", None) == 101
    assert websocket(server, "/ws.lsp", own(server)) == 101
    assert websocket(server, "/ws.lsp", "http://evil.example") == 403
    assert server.ask("/word.lsp").text == "noaccess"


def test_forms(server: AppServer) -> None:
    server.app({"form.lsp": "<?lsp app.ran = true response:write(request:method()) ?>"})
    assert server.ask("/form.lsp", "POST", b"a=1", FOREIGN).status == 403
    assert server.ask("/form.lsp", "POST", b"a=1", {"Origin": own(server)}).text == "POST"
    assert server.ask("/form.lsp", "POST", b"a=1").text == "POST"
    assert server.ask("/form.lsp", headers=FOREIGN).text == "GET"
