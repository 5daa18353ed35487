"""The request object of pages (spec: bas-api §2.1)."""

from __future__ import annotations

import time
from email.utils import formatdate

import pytest
from gevent import socket

from tests.apps.lua.app_server import AppServer

FORM = {"Content-Type": "application/x-www-form-urlencoded"}


def shown(server: AppServer, expression: str, **request) -> str:
    target = request.pop("target", "/page.lsp")
    server.page(f"<?lsp print({expression}) ?>")
    return server.ask(target, **request).text.removesuffix("\n")


@pytest.mark.parametrize(
    ("expression", "request_", "expected"),
    [
        ("request:method()", {}, "GET"),
        ("request:method()", {"method": "DELETE"}, "DELETE"),
        ("request:uri()", {"target": "/page.lsp?x=1"}, "/page.lsp"),
        ("request:uri()", {"target": "/%70age.lsp"}, "/page.lsp"),
        (
            "request:url()",
            {"target": "/page.lsp?x=1", "headers": {"Host": "example.com:81"}},
            "http://example.com:81/page.lsp",
        ),
        ("request:url(true)", {"headers": {"Host": "example.com:81"}}, "https://example.com/page.lsp"),
        ("request:domain()", {"headers": {"Host": "example.com:81"}}, "example.com"),
        ("request:domain()", {"headers": {"Host": "[::1]:81"}}, "[::1]"),
        ("request:domain()", {"headers": {"Host": "[::1]"}}, "[::1]"),
        ("request:issecure()", {}, "false"),
        ("request:version()", {}, "1.1"),
        ("request:env() == _ENV", {}, "true"),
        ("request:setnodelay(true)", {}, "true"),
        ("request:cipher()", {}, "nil"),
        ("select('#', request:peername()), (request:peername())", {}, "3\t127.0.0.1"),
        ("(select(3, request:sockname()))", {}, "false"),
        ("request:header'x-some'", {"headers": {"X-Some": "thing"}}, "thing"),
        ("request:header'missing'", {}, "nil"),
        ("request:header()['X-sOmE']", {"headers": {"X-sOmE": "thing"}}, "thing"),
        ("request:header()['x-some']", {"headers": {"X-sOmE": "thing"}}, "nil"),
        ("request:data'a'", {"target": "/page.lsp?a=1&b=2"}, "1"),
        ("request:data('b', 'none', 'a')", {"target": "/page.lsp?a=1&b=2"}, "2\tnil\t1"),
        ("request:data'a'", {"target": "/page.lsp?a=1&a=2"}, "1"),
        ("request:data().a", {"target": "/page.lsp?a=1&a=2"}, "2"),
        ("'[' .. request:data'a' .. ']'", {"target": "/page.lsp?a"}, "[]"),
        ("request:data'a b'", {"target": "/page.lsp?a+b=%C3%A4%20%2B+%00x"}, "ä + \0x"),
        ("next(request:data())", {}, "nil"),
        (
            "request:data('q', 'f')",
            {"target": "/page.lsp?q=1", "method": "POST", "body": b"f=2&q=3", "headers": FORM},
            "1\t2",
        ),
        ("request:data().q", {"target": "/page.lsp?q=1", "method": "POST", "body": b"q=3", "headers": FORM}, "3"),
        (
            "next(request:data())",
            {"method": "POST", "body": b'{"a":1}', "headers": {"Content-Type": "application/json"}},
            "nil",
        ),
    ],
)
def test_a_page_sees(server: AppServer, expression, request_, expected):
    assert shown(server, expression, **request_) == expected


def test_datapairs_keeps_order_and_duplicates(server: AppServer):
    server.page("<?lsp for name, value in request:datapairs() do print(name, value) end ?>")
    assert server.ask("/page.lsp?b=1&a=2&b=3&c").text == "b\t1\na\t2\nb\t3\nc\t\n"


def test_url_for_tls_names_the_tls_port(server: AppServer):
    server.services.https_port = 9443
    assert shown(server, "request:url(true)", headers={"Host": "h:80"}) == "https://h:9443/page.lsp"
    server.services.https_port = 443
    assert shown(server, "request:url(true)", headers={"Host": "h:80"}) == "https://h/page.lsp"


def test_data_in_a_callback_of_c(server: AppServer):
    server.page("<?lsp print((('{a}-{b}'):gsub('{(%w)}', function(n) return request:data(n) end))) ?>")
    assert server.ask("/page.lsp?a=1&b=2").text == "1-2\n"


def test_a_form_with_too_many_fields_is_refused(server: AppServer):
    server.page("<?lsp request:data() print'never' ?>")
    assert server.ask("/page.lsp", "POST", b"&".join(b"a=1" for _ in range(5000)), FORM).status == 413
    assert server.ask("/page.lsp?" + "a&" * 5000).status == 413


def test_a_form_that_is_too_large_is_refused(server: AppServer):
    server.page("<?lsp pcall(request.data, request) print'never' ?>")
    assert server.ask("/page.lsp", "POST", b"a=" + b"x" * (5 << 20), FORM).status == 413


# ---- allow, checktime


def test_allow(server: AppServer):
    server.page("<?lsp print(request:allow{'GET', 'POST'}) ?>")
    assert server.ask("/page.lsp").text == "true\n"
    assert server.ask("/page.lsp", "POST", b"").text == "true\n"
    assert server.ask("/page.lsp", "HEAD").status == 200
    refused = server.ask("/page.lsp", "PUT", b"")
    assert (refused.status, refused.headers["Allow"], refused.text) == (405, "GET, POST, HEAD, OPTIONS", "")
    options = server.ask("/page.lsp", "OPTIONS")
    assert (options.status, options.headers["Allow"], options.text) == (200, "GET, POST, HEAD, OPTIONS", "")


def test_allow_without_defaults(server: AppServer):
    server.page("<?lsp print(request:allow({'PUT'}, false)) ?>")
    assert server.ask("/page.lsp", "OPTIONS").status == 405
    assert server.ask("/page.lsp", "HEAD").headers["Allow"] == "PUT"
    assert server.ask("/page.lsp", "PUT", b"").text == "true\n"


def test_allow_refuses_unknown_methods(server: AppServer):
    assert "allow: unknown method 'FETCH'" in server.page("<?lsp request:allow{'FETCH'} ?>").text


def test_checktime(server: AppServer):
    changed = int(time.time()) - 1000
    server.page(f"<?lsp request:checktime({changed}) print'body' ?>")
    fresh = server.ask("/page.lsp")
    assert (fresh.text, fresh.headers["Last-Modified"]) == ("body\n", formatdate(changed, usegmt=True))
    known = server.ask("/page.lsp", headers={"If-Modified-Since": formatdate(changed, usegmt=True)})
    assert (known.status, known.body) == (304, b"")
    older = server.ask("/page.lsp", headers={"If-Modified-Since": formatdate(changed - 1, usegmt=True)})
    assert older.text == "body\n"


# ---- rawrdr

RAW = """<?lsp
  local sizes, all = {}, {}
  for piece in request:rawrdr(SIZE) do sizes[#sizes + 1] = #piece all[#all + 1] = piece end
  print(table.concat(all) == ("abcdefgh"):rep(1000), math.max(table.unpack(sizes)))
?>"""


@pytest.mark.parametrize(("size", "largest"), [("", 1024), ("100", 100), ("100000", 8000)])
def test_rawrdr_reads_the_body_in_pieces(server: AppServer, size, largest):
    server.page(RAW.replace("SIZE", size))
    same, maximum = server.ask("/page.lsp", "POST", b"abcdefgh" * 1000).text.split()
    assert same == "true"
    assert int(maximum) <= largest


def test_rawrdr_reads_a_chunked_body(server: AppServer):
    server.page(RAW.replace("SIZE", ""))
    assert server.ask("/page.lsp", "POST", iter([b"abcd", b"efgh"] * 1000)).text.startswith("true")


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        ({}, "neither Content-Length nor chunked encoding"),
        ({"method": "POST", "body": b"a=1", "headers": FORM}, "a body of type application/x-www-form-urlencoded"),
        (
            {"method": "POST", "body": b"x", "headers": {"Content-Type": "multipart/form-data; boundary=x"}},
            "multipart/form-data",
        ),
    ],
)
def test_rawrdr_raises_when_there_is_nothing_for_it(server: AppServer, request_, error):
    server.page("<?lsp for piece in request:rawrdr() do end ?>")
    answer = server.ask("/page.lsp", **request_)
    assert error in answer.text
    assert answer.status == (415 if request_ else 411)
    server.page("<?lsp print(pcall(request.rawrdr, request)) ?>")
    caught = server.ask("/page.lsp", **request_)
    assert caught.status == 200
    assert error in caught.text


# ---- cookies


def test_cookies_come_and_go(server: AppServer):
    server.page(
        """<?lsp
        local old = request:cookie"visits"
        local cookie = response:createcookie"visits"
        cookie:value(tostring((old and old:value() or 0) + 1))
        cookie:path"/" cookie:maxage(60) cookie:httponly(true) cookie:secure(true)
        cookie:domain"example.com" cookie:comment"c"
        print(cookie:activate(), cookie:name(), cookie:path(), cookie:httponly(), type(cookie), request:cookie"none")
        ?>"""
    )
    first = server.ask("/page.lsp")
    assert first.text == "true\tvisits\t/\ttrue\tuserdata\tnil\n"
    assert (
        first.headers["Set-Cookie"] == "visits=1; Path=/; Domain=example.com; Max-Age=60; Comment=c; Secure; HttpOnly"
    )
    assert server.ask("/page.lsp", headers={"Cookie": "a=b; visits=41"}).headers["Set-Cookie"].startswith("visits=42;")
    assert server.ask("/page.lsp", headers={"Cookie": 'visits="9"'}).headers["Set-Cookie"].startswith("visits=10;")


def test_a_cookie_is_deleted_by_its_age(server: AppServer):
    server.page("<?lsp local c = request:cookie'a' c:path'/' c:delete() response:createcookie'b':activate() ?>")
    answer = server.ask("/page.lsp", headers={"Cookie": "a=1"})
    assert answer.headers.get_all("Set-Cookie") == ["a=1; Path=/; Max-Age=0", "b="]


BREAKING = ["a;b", "a; Domain=example.com", "a\\r\\nX: y", "a\\nb", "a\\0", "a\\127"]


@pytest.mark.parametrize("value", BREAKING)
@pytest.mark.parametrize("part", ["value", "path", "domain", "maxage", "comment"])
@pytest.mark.parametrize("way", ["activate", "delete"])
def test_no_part_of_a_cookie_can_add_another(server: AppServer, part, value, way):
    """Text of a user in a cookie must set no attributes, and no other headers."""
    if (part, way) == ("maxage", "delete"):
        return  # it is not sent
    page = f"<?lsp local c = response:createcookie'a' c:{part}'{value}' print(pcall(c.{way}, c)) ?>"
    answer = server.page(page)
    assert "Set-Cookie" not in answer.headers
    assert answer.text.startswith("false\t")
    assert "of cookie a has a semicolon or a control character" in answer.text


@pytest.mark.parametrize("name", [*BREAKING, "", "a b", "a=b", "a,b", "\\228"])
def test_the_name_of_a_cookie_is_a_token(server: AppServer, name):
    answer = server.page(f"<?lsp local c = response:createcookie'{name}' print(pcall(c.activate, c)) ?>")
    assert "Set-Cookie" not in answer.headers
    assert "is not a token" in answer.text


BREAKING_VALUES = ["a\\r\\nX: y", "a\\nX: y", "a\\rX: y", "a\\0"]


@pytest.mark.parametrize("value", BREAKING_VALUES)
@pytest.mark.parametrize(
    "call",
    [
        "response:setheader('X-A', V)", "response:setheader(V, 'a')", "response:setcontenttype(V)",
        "response:setbasic(V)",
        "response:setheader('Set-Cookie', V)", "ba.create.resrdr('r', ba.openio'home'):header{['X-A'] = V}",
        "ba.create.resrdr('r', ba.openio'home'):header{[V] = 'a'}",
    ],
)  # fmt: skip
def test_no_header_can_add_another(server: AppServer, call, value):
    answer = server.page(f"<?lsp local V = '{value}' print(pcall(function() {call} end)) ?>")
    assert answer.status == 200
    assert answer.text.startswith("false\t")
    assert "X" not in answer.headers


@pytest.mark.parametrize("value", BREAKING_VALUES)
def test_no_redirection_can_add_a_header(server: AppServer, value):
    answer = server.page(f"<?lsp response:sendredirect('/x' .. '{value}') ?>")
    assert "X" not in answer.headers


@pytest.mark.parametrize("path", ["/page.lsp", "/folder"])
def test_redirects_without_host_keep_the_port(server: AppServer, path: str):
    server.app({"page.lsp": "<?lsp response:sendredirect'x' ?>", "folder/index.html": "x"})
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as wire:
        wire.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        head = wire.makefile().read()
    location = "x" if path == "/page.lsp" else "folder/"
    assert f"Location: http://127.0.0.1:{server.port}/{location}\n" in head
