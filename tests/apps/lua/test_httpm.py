"""httpm: forms, JSON and files over HTTP, from Lua to a real server."""

from __future__ import annotations

import pytest

from tests.apps.lua.app_server import AppServer
from tests.support.scripted_http import ScriptedHttp, answer

PAGES = {
    "form.lsp": "<?lsp for n, v in request:datapairs() do print(n, v) end print(request:header'x-own') ?>",
    "json.lsp": """<?lsp
        local list = {}
        for data in request:rawrdr() do list[#list + 1] = data end
        local got = ba.json.decode(table.concat(list))
        response:json{method = request:method(), got = got, type = request:header"content-type"}
    ?>""",
    "bare.lsp": "<?lsp response:json{method = request:method(), q = request:data'q'} ?>",
    "put.lsp": """<?lsp
        local list = {}
        for data in request:rawrdr() do list[#list + 1] = data end
        _G.stored = table.concat(list)
        response:setstatus(201)
    ?>""",
    "file.bin": b"\0\1\2" * 100_000,
}


@pytest.fixture
def pages(server: AppServer) -> AppServer:
    server.write("", PAGES)
    return server


def run(server: AppServer, code: str, url: str = "") -> list[str]:
    code = code.replace("{url}", url or f"http://127.0.0.1:{server.port}")
    reply = server.page(f"<?lsp local http = require'httpm'.create() local home = ba.openio'home' {code} ?>")
    assert reply.status == 200, reply.text
    return [line.removesuffix("\tnil") for line in reply.text.splitlines()]


def test_post(pages: AppServer) -> None:
    code = """
        print(http:post("{url}/form.lsp", {a = "1&2", b = {"x", "y"}}, {header = {["X-Own"] = "own"}}))
        print(http:post("{url}/form.lsp", "c=%C3%A4"))
        print(http:post("{url}/none.lsp", {}))
        print(http:post("http://127.0.0.1:1", {}))
        print(type(http), ba.socket.http2sock(http))
    """
    text = "\n".join(run(pages, code))
    assert text.startswith("200\t")
    assert "a\t1&2\n" in text
    assert "b\tx\nb\ty\n" in text
    assert "own\n" in text
    assert "c\tä\n" in text
    assert "\n404\t" in text
    assert "\nnil\tcannotconnect" in text
    assert text.endswith("userdata\tnil\tsocketclosed")


def test_json(pages: AppServer) -> None:
    code = """
        local t = http:json("{url}/json.lsp", {1, {a = "ä"}})
        print(t.method, t.got[1], t.got[2].a, t.type)
        print(http:json("{url}/json.lsp", {}, {method = "PUT"}).method)
        local bare = http:json("{url}/bare.lsp", nil, {query = {q = 5}})
        print(bare.method, bare.q)
        local t, status, body = http:json("{url}/none.lsp", {})
        print(t, status, #body > 0)
        print((select(2, http:json("{url}/file.bin"))))
        print(pcall(http.json, http, "{url}", "text"))
    """
    lines = run(pages, code)
    assert lines[:4] == ["POST\t1\tä\tapplication/json", "PUT", "GET\t5", "nil\t404\ttrue"]
    assert lines[4] == "parse"
    assert "bad argument #2 to 'json' (table expected, got string)" in lines[5]


def test_stat(pages: AppServer) -> None:
    code = """
        local st = http:stat"{url}/file.bin"
        print(st.size, st.mtime > 1e9, st.type)
        print(http:stat"{url}/none.bin")
        print(http:stat"{url}/form.lsp".mtime)
    """
    assert run(pages, code) == ["300000\ttrue\tapplication/octet-stream", "nil\tnotfound", "nil"]


def test_download_and_upload(pages: AppServer) -> None:
    code = """
        local last, total
        local function func(n, t) last, total = n, t end
        local function stop(n) return n < 1000 end
        print(http:download{url = "{url}/file.bin", io = home, name = "copy.bin", func = func})
        print(last, total)
        print(http:upload{url = "{url}/put.lsp", io = home, name = "copy.bin", func = func})
        print(last, total, #stored)
        print(http:download{url = "{url}/none.bin", io = home, name = "none.bin"})
        print(http:upload{url = "{url}/put.lsp", io = home, name = "none.bin"})
        print(home:stat"none.bin")
        print(http:download{url = "{url}/file.bin", io = home, name = "part.bin", func = stop})
        print(home:stat"part.bin")
        print(http:upload{url = "{url}/none/x.lsp", io = home, name = "copy.bin", method = "POST"})
    """
    lines = run(pages, code)
    assert lines[:4] == ["true", "300000\t300000", "true", "300000\t300000\t300000"]
    assert lines[4:] == ["nil\tnotfound"] * 3 + ["nil\taborted", "nil\tnotfound", "nil\t404"]
    assert (pages.folder / "copy.bin").read_bytes() == PAGES["file.bin"]


def test_a_download_that_breaks_off_leaves_no_file(pages: AppServer) -> None:
    with ScriptedHttp([[b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc", None]]) as scripted:
        code = 'print(http:download{url = "{url}", io = home, name = "part.bin"})'
        assert run(pages, code, scripted.url)[0].startswith("nil\tsocketclosed")
    assert not (pages.folder / "part.bin").exists()


def test_redirects_are_followed(pages: AppServer) -> None:
    with ScriptedHttp([answer(b"", "301 Moved", "Location: /b"), answer(b'{"a":1}')]) as scripted:
        assert run(pages, 'print(http:json("{url}/a").a, http:url())', scripted.url) == [f"1\t{scripted.url}/b"]


def test_a_form_for_a_server_that_requires_digest(pages: AppServer) -> None:
    asked = answer(b"who", "401 No", 'WWW-Authenticate: Digest realm="r", nonce="n"')
    with ScriptedHttp([asked, answer(b"thanks")]) as scripted:
        code = 'print(http:post("{url}/f", {a = 1}, {user = "me", password = "secret"}))'
        assert run(pages, code, scripted.url) == ["200\tthanks"]
    assert scripted.bodies == [b"a=1", b"a=1"]
    assert 'Authorization: Digest username="me"' in scripted.heads[1]
