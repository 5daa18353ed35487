"""httpc, http: HTTP clients in Lua, in pages of a real server, against real and scripted servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.apps.lua.app_server import AppServer
from tests.support.scripted_http import CLOSE, ScriptedHttp, answer

HELLO = answer(b"hello", "200 OK", "X-Two: 1", "x-two: 2", "Set-Cookie: a=1; Path=/", "Set-Cookie: b=2")


@pytest.fixture
def hello() -> Iterator[ScriptedHttp]:
    with ScriptedHttp([HELLO] * 20) as scripted:
        yield scripted


def run(server: AppServer, code: str, **names: object) -> list[str]:
    """The lines that Lua code printed; names in braces are replaced."""
    for name, value in names.items():
        code = code.replace("{" + name + "}", str(value))
    reply = server.page(f"<?lsp local http = require'httpc'.create() {code} ?>")
    assert reply.status == 200, reply.text
    return reply.text.splitlines()


def test_get(server: AppServer, hello: ScriptedHttp) -> None:
    code = """
        print(http:request{url = "{url}/a b?x=ä", query = {q = "1&2"}, header = {["X-Own"] = 5}})
        print(http:status())
        print(http:header"x-TWO", http:header"none", http:header()["X-Two"])
        for name, value in http:headerpairs() do print(name, value) end
        print(http:read(2), http:read(), http:read(), http:read"a")
        local cookies = http:cookie()
        print(cookies.a, cookies.b, cookies)
        print(type(http), http:url())
    """
    lines = run(server, code, url=hello.url)
    assert lines[:3] == ["true", "200", "1,2\tnil\t1,2"]
    assert lines[3:6] == ["Content-Length\t5", "X-Two\t1", "x-two\t2"]
    assert lines[8:10] == ["he\tllo\tnil\tnil", "1\t2\ta=1; b=2"]
    assert lines[10] == f"userdata\t{hello.url}/a%20b?x=%C3%A4&q=1%262"
    head = hello.heads[0].splitlines()
    assert head[0] == "GET /a%20b?x=%C3%A4&q=1%262 HTTP/1.1"
    assert f"Host: 127.0.0.1:{hello.port}" in head
    assert "X-Own: 5" in head
    assert not any(line.startswith(("Content-Length", "Connection")) for line in head)


def test_what_a_body_is_read_by(server: AppServer, hello: ScriptedHttp) -> None:
    code = """
        local function get() assert(http:request{url = "{url}"}) return http end
        print(get():read"a", http:read"a")
        print(get():read"*a", get():read(99), http:read(1), get():read(0), http:read())
        print(get():read(5), http:read())
    """
    assert run(server, code, url=hello.url) == ["hello\tnil", "hello\thello\tnil\ttrue\tnil", "hello\tnil"]
    assert hello.connections == 1


def test_post_with_length_and_in_chunks(server: AppServer, hello: ScriptedHttp) -> None:
    code = """
        http:request{url = "{url}", method = "POST", size = 6, header = {["Content-Type"] = "text/plain"}}
        print(http:write"abc", http:write"def", http:write"g")
        print(http:status())
        http:request{url = "{url}", method = "PUT"}
        print(http:write"abc", http:write"", http:write(12), http:status())
        http:request{url = "{url}", method = "POST"}
        print(http:status())
        http:request{url = "{url}", method = "POST", header = {["content-length"] = 2}}
        print(http:write"ok", http:status())
        http:request{url = "{url}", method = "DELETE"}
        print(http:status())
    """
    lines = run(server, code, url=hello.url)
    assert lines[0] == "true\ttrue\tnil\ttoomuchdata\t1 bytes, but only 0 announced bytes are left"
    assert lines[1:] == ["200", "true\ttrue\ttrue\t200", "200", "true\t200", "200"]
    assert hello.bodies == [b"abcdef", b"3\r\nabc\r\n2\r\n12\r\n0\r\n\r\n", b"0\r\n\r\n", b"ok", b""]
    assert hello.heads[0].count("Content-Length: 6") == 1
    assert hello.heads[1].count("Transfer-Encoding: chunked") == 1
    assert hello.heads[3].lower().count("content-length: 2") == 1


def test_the_server_of_pages(server: AppServer) -> None:
    server.write(
        "", {"echo.lsp": "<?lsp for data in request:rawrdr() do response:write(data) end ?>", "a.txt": b"x" * 99}
    )
    code = """
        http:request{url = "{url}/echo.lsp", method = "POST", size = 300000}
        for i = 1, 100 do assert(http:write(string.rep("x", 3000))) end
        print(http:status(), #http:read"a")
        http:request{url = "{url}/echo.lsp", method = "POST"}
        for i = 1, 100 do assert(http:write(string.rep("x", 3000))) end
        print(http:status(), #http:read"a")
        http:request{url = "{url}/a.txt", method = "HEAD"}
        print(http:status(), http:header"content-length", http:read())
        http:request{url = "{url}/a.txt", header = {Range = "bytes=90-"}}
        print(http:status(), http:read"a")
        http:request{url = "{url}/nothing/"}
        print(http:status())
        print(http:peername())
        print(http:trusted())
        print(http:certificate(), http:cipher())
        print(select(3, http:sockname()), http:close(), http:close(), http:status())
    """
    lines = run(server, code, url=f"http://127.0.0.1:{server.port}")
    assert lines[:5] == ["200\t300000", "200\t300000", "200\t99\tnil", "206\txxxxxxxxx", "404"]
    assert lines[5] == f"127.0.0.1\t{server.port}\tfalse"
    assert lines[6:] == ["nil\tsslnotenabled", "nil\tnil", "false\ttrue\tfalse\tnil\tsocketclosed"]


def test_credentials(server: AppServer, hello: ScriptedHttp) -> None:
    code = """
        for _, op in ipairs{
            {url = "{url}", user = "me", password = "pä"},
            {url = "http://me:p%C3%A4@127.0.0.1:{port}"},
            {url = "{url}", user = "me", header = {Authorization = "Own"}},
        } do
            http:request(op)
            http:status()
        end
    """
    run(server, code, url=hello.url, port=hello.port)
    basic = "Authorization: Basic bWU6cMOk"
    assert [head.count(basic) for head in hello.heads] == [1, 1, 0]
    assert hello.heads[2].count("Authorization:") == 1


def test_errors(server: AppServer) -> None:
    with ScriptedHttp([[b"220 mail.example\r\n\r\n"]], [[CLOSE]], [[b"HTTP/1.1 200 OK\r\nContent-Le", CLOSE]]) as bad:
        code = """
            print(http:status())
            print(http:request{url = "ftp://a/"})
            print(http:request{url = "http://127.0.0.1:1"})
            print(http:request{url = "http://nowhere.invalid"})
            for i = 1, 3 do
                print(http:request{url = "{url}", method = "POST", size = 0})
                print(http:status())
                http:close()
            end
        """
        lines = run(server, code, url=bad.url)
    words = [line.split("\t")[1] if line.startswith("nil") else line for line in lines]
    assert words[:4] == ["incorrectuse", "invalidurl", "cannotconnect", "cannotresolve"]
    assert words[4:] == ["true", "invalidresponse", "true", "socketclosed", "true", "socketclosed"]


def test_wrong_arguments(server: AppServer) -> None:
    code = """
        local function try(...) print((select(2, pcall(...)):gsub("^.-: ", ""))) end
        try(http.request, http)
        try(http.request, http, {})
        try(http.request, http, {url = "http://a", size = "x"})
        try(http.request, http, {url = "http://a", header = {X = "a\\nb"}})
        try(http.request, http, {url = "http://a", method = "GET IT"})
        try(require"httpc".create, {shark = 1})
        try(require"httpc".create, {persistent = 1})
        try(http.timeout, http, 0)
        try(http.status, {})
    """
    lines = run(server, code)
    assert lines[0] == "bad argument #1 to 'request' (table expected, got no value)"
    assert lines[1] == "bad argument #1 to 'request{url}' (string expected, got no value)"
    assert lines[2] == "bad argument #request{size} to 'request' (number expected, got string)" or "size" in lines[2]
    assert "value of header field X" in lines[3]
    assert "'GET IT'" in lines[4]
    assert "create{shark}" in lines[5]
    assert "create{persistent}" in lines[6]
    assert "milliseconds above 0" in lines[7]
    assert "HTTP client expected" in lines[8]


def test_timeout(server: AppServer) -> None:
    slow = [b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nab", 0.3, b"cd"]
    with ScriptedHttp([[0.15, *slow]]) as scripted:
        code = """
            http:request{url = "{url}"}
            http:timeout(50)
            print(http:status())
            http:timeout(2000)
            print(http:status())
            http:timeout(50)
            print(http:read(), http:read())
            http:timeout(2000)
            print(http:read())
        """
        lines = run(server, code, url=scripted.url)
    assert lines == ["nil\ttimeout", "200", "ab\tnil\ttimeout", "cd"]


def test_closing_from_another_activity(server: AppServer) -> None:
    with ScriptedHttp([[5.0]]) as scripted:
        code = """
            http:request{url = "{url}"}
            ba.thread.run(function() ba.sleep(30) http:close() end)
            print(http:status())
        """
        assert run(server, code, url=scripted.url) == ["nil\tsocketclosed"]


def test_redirects_and_cookies(server: AppServer) -> None:
    moved = [
        answer(b"away", "302 Found", "Location: /b?x#f", "Set-Cookie: s=1; Path=/", "Set-Cookie: t=2; Path=/other"),
        answer(b"", "301 Moved", "Location: c/d"),
        answer(b"there", "200 OK", "Set-Cookie: s=; Max-Age=0; Path=/"),
        answer(b"again"),
        answer(b"posted", "303 See Other", "Location: /seen"),
        answer(b"seen"),
        answer(b"no", "307 Temporary", "Location: /elsewhere"),
        *[answer(b"", "302 Found", "Location: /loop")] * 10,
    ]
    with ScriptedHttp(moved) as scripted:
        code = """
            http = require"http".create{header = {["X-Every"] = "time"}}
            http:request{url = "{url}/a/b"}
            print(http:status(), http:read"a", http:url())
            http:request{url = "{url}/again"}
            print(http:status(), http:read"a")
            http:request{url = "{url}/form", method = "POST", size = 3}
            http:write"a=b"
            print(http:status(), http:read"a")
            http:request{url = "{url}/form", method = "POST", size = 3}
            http:write"a=b"
            print(http:status(), http:read"a")
            http:request{url = "{url}/loop"}
            print(http:status())
        """
        lines = run(server, code, url=scripted.url)
        assert lines == [f"200\tthere\t{scripted.url}/c/d", "200\tagain", "200\tseen", "307\tno", "302"]
        asked = [head.splitlines()[0] for head in scripted.heads]
        assert asked[:4] == [f"GET {path} HTTP/1.1" for path in ("/a/b", "/b?x", "/c/d", "/again")]
        assert asked[4:7] == ["POST /form HTTP/1.1", "GET /seen HTTP/1.1", "POST /form HTTP/1.1"]
        assert len(asked) == 7 + 10
        cookies = [head.partition("Cookie: ")[2].partition("\r\n")[0] for head in scripted.heads]
        assert cookies[:4] == ["", "s=1", "s=1", ""]
        assert all("X-Every: time" in head for head in scripted.heads)
        assert scripted.connections == 1


def test_httpc_follows_nothing(server: AppServer) -> None:
    with ScriptedHttp([answer(b"", "302 Found", "Location: /b")]) as scripted:
        code = 'http:request{url = "{url}"} print(http:status(), http:header"location")'
        assert run(server, code, url=scripted.url) == ["302\t/b"]


def test_secrets_stay_with_their_origin(server: AppServer, hello: ScriptedHttp) -> None:
    away = answer(b"", "302 Found", f"Location: {hello.url}/x", "Set-Cookie: own=1")
    with ScriptedHttp([answer(b"", "302 Found", "Location: /same"), away]) as scripted:
        code = """
            http = require"http".create()
            http:request{url = "{url}", user = "me", password = "secret", header = {Cookie = "c=1", ["X-Own"] = "1"}}
            print(http:status())
        """
        assert run(server, code, url=scripted.url) == ["200"]
        assert all("Authorization: Basic" in head and "Cookie: c=1" in head for head in scripted.heads)
        assert len(scripted.heads) == 2
    assert "X-Own: 1" in hello.heads[0]
    assert "Authorization" not in hello.heads[0]
    assert "Cookie: own=1\r\n" in hello.heads[0] + "\r\n"  # cookies are a host's, whatever its port


def test_parsequery(server: AppServer) -> None:
    code = """
        local t = require"httpc".parsequery"?a=1&b=%C3%A4+x&c=&d&a=2"
        print(t.a, t.b, t.c, t.d)
    """
    assert run(server, code) == ["1\tä x\t\t"]


def test_a_client_that_is_forgotten_closes_its_connection(server: AppServer) -> None:
    with ScriptedHttp([HELLO]) as scripted:
        run(server, '_G.kept = http http:request{url = "{url}"}', url=scripted.url)
        (client,) = server.services.http_clients.values()
        stream = client.stream
        server.vm.eval("_G.kept = nil collectgarbage() collectgarbage()")
        assert stream.closed
    assert not server.services.http_clients


def test_where_a_connection_comes_from(server: AppServer, hello: ScriptedHttp) -> None:
    code = """
        for _, op in ipairs{{intf = "127.0.0.5"}, {intf = "192.0.2.1"}, {ipv6 = true}} do
            local http = require"httpc".create(op)
            local ok, err = http:request{url = "{url}"}
            print(ok and http:sockname() or err)
        end
    """
    assert run(server, code, url=hello.url) == ["127.0.0.5", "bind", "cannotresolve"]
