"""`require "xmlrpc"`: called by Python's XML-RPC client, and by strangers."""

from __future__ import annotations

import xmlrpc.client
from datetime import UTC, datetime
from typing import Any

import pytest
from gevent import get_hub

from tests.apps.lua.app_server import AppServer

PRELOAD = """
local xmlrpc = require "xmlrpc"
local service = xmlrpc.new("test", {
  math = {add = function(a, b) return a + b end, deep = {er = function() return "found" end}},
  echo = function(...) return ... end, kind = function(v) return math.type(v) or type(v) end,
  count = function(...) return select("#", ...) end,
  fail = function() error "not so" end, odd = function() return {print} end,
  lines = function() return "a\\r\\nb" end,
  bytes = function() return "\\0\\255" end, endless = function() local t = {} t[1] = t return t end,
  infinite = function() return 1/0 end, none = function() end, plain = 7,
})
local rpc = ba.create.dir "rpc"
rpc:setfunc(function(_ENV, path)
  service:execute(request, response)
end)
dir:insert(rpc, true)
"""


@pytest.fixture
def app(server: AppServer) -> AppServer:
    assert server.app({".preload": PRELOAD}, "app").error is None
    return server


def call(app: AppServer, method: str, *params: Any) -> Any:
    """Calls as Python's client does; a fault is raised."""
    body = xmlrpc.client.dumps(params, method, allow_none=True).encode()
    return loads(app, body)


def loads(app: AppServer, body: bytes) -> Any:
    answer = app.ask("/app/rpc/", "POST", body, {"Content-Type": "text/xml"})
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/xml; charset=utf-8")
    (value,), _ = xmlrpc.client.loads(answer.text, use_builtin_types=True)
    return value


@pytest.mark.parametrize(
    "value",
    [
        1, -(2**31), 2.5, 1e300, True, False, "", "täxt <&> ]]> \n x", " a ", "  ", [], [1, [2, "x"]],
        {"a": 1, "<b>": [True]}, None, b"\0\xff",
    ],
)  # fmt: skip
def test_values_there_and_back(app: AppServer, value: Any) -> None:
    assert call(app, "echo", value) == value


def test_types_in_lua(app: AppServer) -> None:
    assert call(app, "math.add", 2, 3) == 5
    assert call(app, "math.deep.er") == "found"
    assert [call(app, "kind", one) for one in (1, 1.5, True, "x", None, {"a": 1})] == [
        "integer", "float", "boolean", "string", "nil", "table",
    ]  # fmt: skip
    assert call(app, "count", None, 1, None) == 3
    assert call(app, "none") is None
    assert call(app, "lines") == "a\r\nb"
    assert call(app, "bytes") == b"\0\xff"
    when = datetime(2026, 2, 28, 23, 59, 58, tzinfo=UTC)
    assert call(app, "echo", xmlrpc.client.DateTime(when)) == int(when.timestamp())
    leap = datetime(2024, 2, 29, tzinfo=UTC)
    assert call(app, "echo", xmlrpc.client.DateTime(leap)) == int(leap.timestamp())
    assert call(app, "echo", xmlrpc.client.DateTime("19690101T00:00:00")) == "19690101T00:00:00"


@pytest.mark.parametrize(
    ("method", "code", "text"),
    [
        ("nobody", -32601, "there is no method 'nobody'"),
        ("plain", -32601, "there is no method 'plain'"),
        ("math", -32601, "there is no method"),
        ("math.add.x", -32601, "there is no method"),
        ("fail", -32500, "not so"),
        ("odd", -32500, "a function can't be sent"),
        ("endless", -32500, "tables are nested deeper than 100"),
        ("infinite", -32500, "a number that XML-RPC can't hold"),
    ],
)
def test_faults(app: AppServer, method: str, code: int, text: str) -> None:
    with pytest.raises(xmlrpc.client.Fault) as found:
        call(app, method)
    assert found.value.faultCode == code
    assert text in found.value.faultString
    assert "preload" not in found.value.faultString


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", -32700),
        (b"no XML", -32700),
        (b"<methodCall>", -32700),
        (b'<!DOCTYPE x [<!ENTITY a "b">]><methodCall><methodName>&a;</methodName></methodCall>', -32700),
        (b"<x/>", -32602),
        (b"<methodCall><params/></methodCall>", -32602),
        (b"<methodCall><methodName>echo</methodName><params><param/></params></methodCall>", -32602),
        (b"<methodCall><methodName>echo</methodName><params><param><value><int>x</int></value></param></params>"
         b"</methodCall>", -32602),
        (b"<methodCall><methodName>echo</methodName><params><param><value><what/></value></param></params></methodCall>",
         -32602),
        (b"<methodCall><methodName>echo</methodName><params>" + b"<param><value/></param>" * 201 +
         b"</params></methodCall>", -32602),
    ],
)  # fmt: skip
def test_what_is_no_call(app: AppServer, body: bytes, code: int) -> None:
    with pytest.raises(xmlrpc.client.Fault) as found:
        loads(app, body)
    assert found.value.faultCode == code


def test_other_requests(app: AppServer) -> None:
    answer = app.ask("/app/rpc/")
    assert (answer.status, answer.headers["Allow"]) == (405, "POST")
    assert app.ask("/app/rpc/", "POST", b"x" * (1 << 20) + b"x", {"Content-Type": "text/xml"}).status == 413


def test_a_large_call_lets_others_run(app: AppServer) -> None:
    turns = 0

    def turn() -> None:
        nonlocal turns
        turns += 1

    check = get_hub().loop.prepare()
    check.start(turn)
    assert len(call(app, "echo", list(range(15_000)))) == 15_000
    check.stop()
    assert turns > 10
