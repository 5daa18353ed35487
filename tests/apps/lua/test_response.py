"""The response object of pages (spec: bas-api §2.2)."""

from __future__ import annotations

import json

import pytest

from tests.apps.lua.app_server import AppServer


def test_write_returns_the_bytes_and_takes_numbers(server: AppServer):
    assert server.page("<?lsp local n = response:write('ä', 1, 2.5) response:write(' ', n) ?>").text == "ä12.5 6"


def test_headers_are_set_replaced_and_removed(server: AppServer):
    answer = server.page(
        """<?lsp
        response:setheader("X-A", "1", "X-B", 2, "X-C", "3", "Content-Type", "text/x")
        response:setheader("x-a", "4", "X-C", nil)
        print(response:containsheader"X-a", response:containsheader"X-C")
        ?>"""
    )
    assert answer.headers["X-A"] == "4"
    assert answer.headers["X-B"] == "2"
    assert "X-C" not in answer.headers
    assert answer.headers["Content-Type"] == "text/x"
    assert answer.text == "4\tfalse\n"


@pytest.mark.parametrize("value", ["a\\r\\nX-Evil: 1", "a\\nb", "a\\0b"])
def test_a_header_can_not_split_the_head(server: AppServer, value):
    answer = server.page(f"<?lsp response:setheader('X-A', '{value}') ?>")
    assert answer.status == 500
    assert "page.lsp:1: setheader: " in answer.text
    assert "X-Evil" not in answer.headers


def test_status_type_length_age_and_dates(server: AppServer):
    answer = server.page(
        """<?lsp
        response:setstatus(201)
        response:setcontenttype"text/plain"
        response:setcontenttype("text/never", false)
        response:setmaxage(60)
        response:setdateheader("Expires", 0)
        print(response:getstatus())
        ?>"""
    )
    assert (answer.status, answer.text) == (201, "201\n")
    assert answer.headers["Content-Type"] == "text/plain"
    assert answer.headers["Cache-Control"] == "max-age=60"
    assert answer.headers["Expires"] == "Thu, 01 Jan 1970 00:00:00 GMT"


def test_a_content_length_of_its_own_is_never_chunked(server: AppServer):
    answer = server.page("<?lsp response:setcontentlength(20000) response:write(('x'):rep(20000)) ?>")
    assert answer.headers["Content-Length"] == "20000"
    assert "Transfer-Encoding" not in answer.headers
    assert len(answer.body) == 20000


def test_head_has_no_body(server: AppServer):
    server.page("<?lsp print'body' ?>")
    answer = server.ask("/page.lsp", "HEAD")
    assert (answer.status, answer.body, answer.headers["Content-Length"]) == (200, b"", "5")


# ---- json


def test_json_ends_the_page(server: AppServer):
    answer = server.page("dropped<?lsp response:json{a = 1} _G.after = 1 ?>")
    assert json.loads(answer.text) == {"a": 1}
    assert answer.headers["Content-Type"] == "application/json"
    assert "no-store" in answer.headers["Cache-Control"]
    assert answer.headers["Content-Length"] == str(len(answer.body))
    assert server.vm.eval("return after") == (None,)


def test_json_continues_on_request(server: AppServer):
    answer = server.page("<?lsp response:json({a = 1}, true) _G.after = response:valid() print'ignored' ?>")
    assert json.loads(answer.text) == {"a": 1}
    assert server.vm.eval("return after") == (False,)


def test_json_of_several_tables_is_an_array(server: AppServer):
    assert json.loads(server.page("<?lsp response:json({1}, {b = 2}) ?>").text) == [[1], {"b": 2}]


def test_json_keeps_status_and_headers(server: AppServer):
    answer = server.page("<?lsp response:setstatus(201) response:setheader('Location', '/x') response:json{} ?>")
    assert (answer.status, answer.headers["Location"], answer.text) == (201, "/x", "{}")


def test_large_json_has_its_length(server: AppServer):
    answer = server.page("<?lsp local t = {} for i = 1, 9999 do t[i] = i end response:json(t) ?>")
    assert len(json.loads(answer.text)) == 9999
    assert "Transfer-Encoding" not in answer.headers


def test_json_after_commit_raises(server: AppServer):
    assert "iscommitted" in server.page("x<?lsp response:flush() response:json{} ?>").text


@pytest.mark.parametrize("value", ["'x'", "", "nil"])
def test_json_takes_tables(server: AppServer, value):
    assert "table expected" in server.page(f"<?lsp response:json({value}) ?>").text


# ---- redirect and errors


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("'/other?x=1'", "http://h:1/other?x=1"),
        ("'other'", "http://h:1/sub/other"),
        ("'./'", "http://h:1/sub/"),
        ("'../'", "http://h:1/"),
        ("''", "http://h:1/sub/p.lsp"),
        ("'https://example.com/a b'", "https://example.com/a%20b"),
        ("'/ä#frag'", "http://h:1/%C3%A4#frag"),
        ("'/a\\r\\nX: y'", "http://h:1/a%0D%0AX:%20y"),
    ],
)
def test_sendredirect(server: AppServer, url, location):
    server.app({"sub/p.lsp": f"dropped<?lsp response:sendredirect({url}) _G.after = 1 ?>"})
    answer = server.ask("/sub/p.lsp?q=1", headers={"Host": "h:1"})
    assert (answer.status, answer.headers["Location"]) == (302, location)
    assert "dropped" not in answer.text
    assert server.vm.eval("return after") == (None,)


def test_a_permanent_redirect_that_goes_on(server: AppServer):
    answer = server.page("<?lsp response:sendredirect('/x', true, true) _G.after = 1 ?>")
    assert answer.status == 301
    assert server.vm.eval("return after") == (1,)


def test_senderror_does_not_end_the_page(server: AppServer):
    answer = server.page("dropped<?lsp response:senderror(403, '<b>no</b>') print'ignored' _G.after = 1 ?>")
    assert answer.status == 403
    assert "<h1>403 Forbidden</h1><b>no</b>" in answer.text
    assert "dropped" not in answer.text
    assert "ignored" not in answer.text
    assert answer.headers["Connection"] == "close"
    assert server.vm.eval("return after") == (1,)


def test_encoderedirecturl(server: AppServer):
    server.page("<?lsp print(response:encoderedirecturl('b.lsp', true), response:encodeurl'/x') ?>")
    assert server.ask("/page.lsp?a=1&b=2", headers={"Host": "h"}).text == "http://h/b.lsp?a=1&b=2\t/x\n"


# ---- buffer


def test_flush_send_and_what_they_commit(server: AppServer):
    answer = server.page(
        """<?lsp
        local before = response:committed()
        response:write("a", before)  print(response:bytecount(), response:writesize(), response:getdata())
        response:flush()
        print(response:committed(), response:bytecount() > 0, response:writesize())
        response:send("sent")
        ?>""".replace("before)", "tostring(before))")
    )
    assert answer.text == "afalse6\t6\tafalse\ntrue\ttrue\t0\nsent"
    assert answer.headers["Transfer-Encoding"] == "chunked"


def test_send_and_write_do_not_mix_before_commit(server: AppServer):
    assert "mixingwritesend" in server.page("x<?lsp response:send'y' ?>").text
    assert server.page("<?lsp response:send'y' ?>").text == "y"


def test_reset(server: AppServer):
    server.app(
        {
            "buffer.lsp": "x<?lsp response:setheader('X-A', '1') response:reset'buffer' ?>y",
            "headers.lsp": "x<?lsp response:setheader('X-A', '1') response:setstatus(404) response:reset'headers' ?>y",
            "all.lsp": "x<?lsp response:setheader('X-A', '1') response:reset() ?>y",
            "late.lsp": "x<?lsp response:flush() response:reset() ?>",
            "bad.lsp": "<?lsp response:reset'other' ?>",
        }
    )
    answer = server.ask("/buffer.lsp")
    assert (answer.text, answer.headers["X-A"]) == ("y", "1")
    answer = server.ask("/headers.lsp")
    assert (answer.status, answer.text, answer.headers["X-A"]) == (404, "xy", None)
    answer = server.ask("/all.lsp")
    assert (answer.text, answer.headers["X-A"]) == ("y", None)
    assert "iscommitted" in server.ask("/late.lsp").text
    assert "bad argument #1 to 'reset'" in server.ask("/bad.lsp").text


COOKIE = "local c = response:createcookie'c' c:value'1' c:activate()"
STATUS_AND_FIELDS = f"{COOKIE} response:setstatus(404) response:setheader('X-A', '1') response:setcontenttype'text/x'"


@pytest.mark.parametrize(
    ("call", "fields"),
    [
        ("response:forward'other.lsp'", ("1", "text/x")),
        ("response:redirect'other.lsp'", (None, "text/html; charset=utf-8")),
        ("response:reset'headers' response:write'other'", (None, None)),
        ("response:reset() response:write'other'", (None, None)),
        ("response:setresponse():abort() response:write'other'", (None, None)),
    ],
)
def test_status_and_cookies_stay(server: AppServer, call: str, fields: tuple[str | None, str | None]):
    server.app({"page.lsp": f"<?lsp {STATUS_AND_FIELDS} {call} ?>", "other.lsp": "other"})
    answer = server.ask("/page.lsp")
    assert (answer.status, answer.text, answer.headers["Set-Cookie"]) == (404, "other", "c=1")
    assert (answer.headers["X-A"], answer.headers["Content-Type"]) == fields


def test_forward_to_a_file_keeps_status_and_fields(server: AppServer):
    server.app({"page.lsp": f"x<?lsp {STATUS_AND_FIELDS} response:forward'.gone.html' ?>", ".gone.html": "gone"})
    for method in ("GET", "POST"):
        answer = server.ask("/page.lsp", method, headers={"Range": "bytes=0-1"})
        assert (answer.status, answer.text) == (404, "gone")
        assert (answer.headers["X-A"], answer.headers["Set-Cookie"]) == ("1", "c=1")
        assert answer.headers["Content-Type"] == "text/html; charset=utf-8"


@pytest.mark.parametrize("name", ["forward", "redirect"])
def test_a_failed_forward_changes_nothing(server: AppServer, name: str):
    code = f"response:include'i.html' print(pcall(response.{name}, response, 'none.lsp'))"
    server.app({"page.lsp": f"a<?lsp {STATUS_AND_FIELDS} {code} ?>b", "i.html": "i"})
    answer = server.ask("/page.lsp")
    assert (answer.status, answer.headers["X-A"], answer.headers["Content-Type"]) == (404, "1", "text/x")
    assert answer.headers["Set-Cookie"] == "c=1"
    assert answer.text.startswith("aifalse\t")
    assert answer.text.endswith("pagenotfound\nb")


def test_an_error_keeps_the_session_that_was_made(server: AppServer):
    answer = server.page("<?lsp request:session(true) response:senderror(403) ?>")
    assert (answer.status, answer.headers["Set-Cookie"][:14]) == (403, "smqrt_session=")


def test_headers_after_commit_raise(server: AppServer):
    for call in (
        "setheader('X', '1')",
        "setstatus(404)",
        "setcontenttype'x'",
        "sendredirect'/'",
        "senderror(400)",
        "setmaxage(1)",
    ):
        assert "page.lsp:1: iscommitted" in server.page(f"x<?lsp response:flush() response:{call} ?>").text


def test_a_realm_can_not_add_a_parameter(server: AppServer):
    answer = server.page("""<?lsp response:setbasic'a", charset="x\\\\' ?>""")
    assert answer.headers["WWW-Authenticate"] == r'Basic realm="a\", charset=\"x\\"'


def test_setbasic_clearkeepalive(server: AppServer):
    answer = server.page("<?lsp response:setbasic'here' response:setstatus(401) response:clearkeepalive() ?>")
    assert answer.headers["WWW-Authenticate"] == 'Basic realm="here"'
    assert answer.headers["Connection"] == "close"


def test_redirect2tls(server: AppServer):
    server.services.https_port = 9443
    answer = server.page("<?lsp response:redirect2tls() ?>", headers={"Host": "h:80"})
    assert (answer.status, answer.headers["Location"]) == (302, "https://h:9443/page.lsp")
