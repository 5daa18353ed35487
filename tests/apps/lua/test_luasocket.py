"""The globals `socket` and `mime`, and `require "ltn12"`: LuaSocket's interface (spec: bas-api §12, §17)."""

from __future__ import annotations

import quopri
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import gevent
import pytest
from gevent import socket

from smqrt.apps.lua.bridge import LuaError
from smqrt.apps.lua.vm import Vm

Serve = Callable[[socket.socket], object]


@contextmanager
def serving(serve: Serve) -> Iterator[int]:
    """A server for one client; gives its port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def accept() -> None:
            client, _ = listener.accept()
            with client:
                serve(client)

        job = gevent.spawn(accept)
        yield listener.getsockname()[1]
        job.kill()


def sending(*pieces: bytes, stay: bool = False) -> Serve:
    def serve(client: socket.socket) -> None:
        for piece in pieces:
            client.sendall(piece)
            gevent.sleep(0)
        if stay:
            client.recv(1)

    return serve


# ---- TCP


def test_receive_in_all_ways(vm: Vm) -> None:
    with serving(sending(b"one\r\nt", b"w", b"o\n", b"\n12345", b"678rest")) as port:
        vm.eval(
            """
        local s = assert(socket.connect("127.0.0.1", ...))
        assert(s:receive() == "one" and s:receive"*l" == "two" and s:receive"l" == "")
        assert(s:receive(5) == "12345" and s:receive(0) == "" and s:receive(4, "5") == "5678")
        local data, word, part = s:receive("*l", "<")
        assert(data == nil and word == "closed" and part == "<rest", part)
        data, word, part = s:receive"*a" assert(data == nil and word == "closed" and part == "")
        assert(s:close() == 1 and s:close() == 1)
        data, word, part = s:receive(3, "x") assert(data == nil and word == "closed" and part == "x")
        data, word, part = s:send"x" assert(data == nil and word == "closed" and part == 0)
        assert(select(2, s:getpeername()) == "closed" and select(2, s:connect("127.0.0.1", 1)) == "closed")
        """,
            "=x",
            port,
        )


def test_send_takes_tables_in_tables(vm: Vm) -> None:
    got: list[bytes] = []

    def keep(client: socket.socket) -> None:
        while data := client.recv(100):
            got.append(data)

    with serving(keep) as port:
        vm.eval(
            """
        local s = assert(socket.connect("127.0.0.1", ...))
        assert(s:send({"GET ", {"/", 5, {".lsp"}, {}}, "\\r\\n"}) == 12)
        assert(s:send({}) == 0 and s:send({"abc"}, 2, 2) == 2)
        local own = {} own[1] = own
        local ok, why = pcall(s.send, s, own) assert(not ok and why:find("nested too deeply", 1, true), why)
        ok, why = pcall(s.send, s, {"a", true}) assert(not ok and why:find("string expected", 1, true), why)
        s:close()
        """,
            "=x",
            port,
        )
        gevent.sleep(0.1)
    assert b"".join(got) == b"GET /5.lsp\r\nb"


def test_all_until_the_end_and_counts_of_a_connection(vm: Vm) -> None:
    with serving(sending(b"abc\n", b"def")) as port:
        vm.eval(
            """
        local s = socket.tcp()
        assert(select(2, s:receive()) == "not connected" and select(2, s:getsockname()) == "not connected")
        assert(s:connect("127.0.0.1", tostring(...)) == 1)
        assert(select(2, s:connect("127.0.0.1", 1)) == "already connected")
        local ip, port, family = s:getpeername()
        assert(ip == "127.0.0.1" and port == ... and family == "inet" and s:send"four" == 4)
        assert(s:receive"*a" == "abc\\ndef")
        local received, sent, age = s:getstats()
        assert(received == 7 and sent == 4 and age >= 0 and age < 10 and s:setstats(1, 2, 3) == 1 and s:getstats() == 1)
        """,
            "=x",
            port,
        )


def test_many_short_lines_take_linear_time(vm: Vm) -> None:
    with serving(sending(b"a\n" * 50_000)) as port:
        began_s = time.process_time()
        count = vm.eval(
            """
        local s, n = socket.connect("127.0.0.1", ...), 0
        while s:receive() do n = n + 1 end
        return n""",
            "=x",
            port,
        )
        assert count == (50_000,)
        assert time.process_time() - began_s < 1.5


def test_timeouts_keep_what_came(vm: Vm) -> None:
    with serving(sending(b"par", stay=True)) as port:
        vm.eval(
            """
        local s = socket.connect("127.0.0.1", ...)
        assert(s:settimeout(0.02) == 1 and s:gettimeout() == 0.02)
        local data, word, part = s:receive() assert(data == nil and word == "timeout" and part == "par")
        s:settimeout(0.03, "t") s:settimeout() assert(s:gettimeout() == -1)
        local began = socket.gettime()
        assert(select(2, s:receive(9)) == "timeout" and socket.gettime() - began < 2)
        s:settimeout(0) s:settimeout(nil, "t")
        local other = socket.tcp() other:settimeout(0)
        assert(other:connect("127.0.0.1", ...) == 1)
        assert(select(2, s:receive(9)) == "timeout")
        """,
            "=x",
            port,
        )


def test_send_to_a_stopped_reader_ends_at_the_timeout(vm: Vm) -> None:
    with serving(lambda client: gevent.sleep(9)) as port:
        word, index, took_s = vm.eval(
            """
        local s, began = socket.connect("127.0.0.1", ...), socket.gettime()
        s:settimeout(0.2, "t")
        local done, word, index = s:send(("x"):rep(32 << 20))
        return word, index, socket.gettime() - began""",
            "=x",
            port,
        )
        assert word == b"timeout"
        assert isinstance(index, int)
        assert 0 < index < 32 << 20
        assert isinstance(took_s, float)
        assert took_s < 5


def test_connecting_fails_with_the_words_of_luasocket(vm: Vm) -> None:
    vm.eval("""
    assert(select(2, socket.connect("127.0.0.1", 1)) == "connection refused")
    assert(select(2, socket.connect("no.such.host.invalid", 1)) == "host or service not provided, or not known")
    local listener = socket.bind("127.0.0.1", 0)
    local _, port = listener:getsockname()
    assert(select(2, socket.bind("127.0.0.1", port)) == "address already in use")
    """)


def test_a_server_with_select_options_and_half_close(vm: Vm) -> None:
    vm.eval("""
    local listener = socket.tcp()
    assert(listener:bind("*", 0) == 1 and listener:setoption("reuseaddr", true) == 1 and listener:listen(5) == 1)
    local _, port = listener:getsockname()
    listener:settimeout(0.01) assert(select(2, listener:accept()) == "timeout")
    local a = socket.connect("127.0.0.1", port)
    local r, w, word = socket.select({listener, a}, nil, 2)
    assert(r[1] == listener and r[listener] == 1 and #r == 1 and #w == 0 and word == nil)
    local b = assert(listener:accept())
    r, w, word = socket.select({a, b}, {}, 0.02) assert(#r == 0 and word == "timeout")
    r, w = socket.select({a, b}, {a, b}, 1) assert(#r == 0 and w[1] == a and w[2] == b)
    assert(a:send"hello\\n" == 6) r = socket.select({a, b}, nil, 1) assert(r[1] == b and #r == 1 and b:dirty())
    assert(b:receive() == "hello" and not b:dirty())
    assert(a:shutdown"send" == 1 and select(2, b:receive()) == "closed" and b:send"x" == 1 and a:receive(1) == "x")
    for _, name in ipairs{"keepalive", "tcp-nodelay"} do
      assert(b:setoption(name, true) == 1 and b:getoption(name) == true and b:setoption(name, false) == 1)
      assert(b:getoption(name) == false)
    end
    assert(b:setoption("linger", {on = true, timeout = 5}) == 1 and b:getoption"linger".timeout == 5)
    b:close() r = socket.select({b}, nil, 0) assert(r[1] == b)
    assert(type(a) == "userdata" and tostring(a):find"^tcp{client}: ")
    assert(getmetatable(a).__index.receive == a.receive)
    for name, method in pairs(getmetatable(a).__index) do assert(type(method) == "function", name) end
    listener:close() assert(select(2, listener:accept()) == "closed")
    """)


def test_half_closing_sends_first_what_waits(vm: Vm) -> None:
    assert vm.eval("""
    local listener, got = socket.bind("127.0.0.1", 0)
    local ip, port = listener:getsockname()
    local a = socket.connect(ip, port)
    local b = listener:accept()
    ba.thread.run(function() ba.sleep(20) got = #b:receive"*a" b:send"thanks" b:close() end)
    assert(a:send(("x"):rep(6 << 20)) == 6 << 20 and a:shutdown"send" == 1)
    assert(a:receive"*a" == "thanks" and select(2, a:shutdown"both") == "closed")
    return got""") == (6 << 20,)


def test_a_line_without_an_end(vm: Vm) -> None:
    with serving(sending(*[b"x" * (1 << 20)] * 20)) as port:
        assert vm.eval(
            """
        local s = socket.connect("127.0.0.1", ...)
        local data, word, part = s:receive()
        return data, word, #part > 16 << 20 and #part < 17 << 20""",
            "=x",
            port,
        ) == (None, b"toomuchdata", True)


def test_over_a_socket_of_ba_and_in_cosockets(vm: Vm) -> None:
    with serving(sending(b"first\n", stay=True)) as port:
        vm.eval(
            """
        local sock = ba.socket.connect("127.0.0.1", ...)
        local s = socket.tcp()
        assert(s:connect(sock) == 1 and s:receive() == "first" and s.upgrade and s.trusted)
        assert(socket.tcp(sock):getpeername() == "127.0.0.1")
        seen = {}
        local listener = socket.bind("127.0.0.1", 0)
        local _, port = listener:getsockname()
        server = ba.socket.event(function()
          local peer = listener:accept()
          for line in function() return peer:receive() end do peer:send(line:upper() .. "\\n") end
          seen.server = true
        end)
        client = ba.socket.event(function(me)
          local one = socket.connect("127.0.0.1", port)
          one:send"a\\nb\\n" seen.a, seen.b = one:receive(), one:receive()
          seen.owner = me:owner() and me:peername() == "127.0.0.1"
          one:close()
        end)
        while not seen.server do ba.sleep(1) end
        assert(seen.a == "A" and seen.b == "B" and seen.owner)
        waiting = ba.socket.event(function()
          local one = socket.connect("127.0.0.1", port)
          seen.word = select(2, one:receive())
        end)
        while waiting and waiting:state() ~= "connected" do ba.sleep(1) end
        waiting:close()
        while not seen.word do ba.sleep(1) end
        assert(seen.word == "closed")
        """,
            "=x",
            port,
        )


WRONG = [
    "tcp():receive'*x'",
    "tcp():receive(-1)",
    "tcp():send()",
    "tcp():connect()",
    "tcp():settimeout('x')",
    "tcp():settimeout(1, 'q')",
    "tcp():setoption('nonsense', true)",
    "tcp():shutdown'sideways'",
    "tcp(5)",
    "tcp().receive(5)",
    "udp():sendto('x')",
    "udp():sendto('x', 'no address', 5)",
    "udp():setoption('nonsense', true)",
    "select({5})",
    "select(5)",
    "sleep()",
    "skip(-1)",
    "protect(5)",
    "sink('nonsense', socket.tcp())",
    "source('by-length', 5)",
    "dns.toip()",
]


def test_wrong_arguments_raise(vm: Vm) -> None:
    for call in WRONG:
        with pytest.raises(LuaError, match=r"eval:1: (bad argument|sendto)"):
            vm.eval(f"local value = socket.{call}")


# ---- UDP


def test_datagrams(vm: Vm) -> None:
    vm.eval("""
    local a, b = socket.udp(), socket.udp()
    assert(a:setsockname("127.0.0.1", 0) == 1)
    local ip, port = a:getsockname() assert(ip == "127.0.0.1")
    a:settimeout(0.01) assert(select(2, a:receivefrom()) == "timeout")
    assert(select(2, b:send"x") == "not connected")
    assert(b:sendto("hello", "127.0.0.1", port) == 1) a:settimeout(2)
    local r = socket.select({a, b}, nil, 2) assert(r[1] == a and #r == 1)
    local data, from, from_port = a:receivefrom(4) assert(data == "hell" and from == "127.0.0.1")
    assert(a:sendto("back", from, from_port) == 1 and b:receive() == "back")
    assert(b:setpeername("127.0.0.1", port) == 1 and b:send"again" == 1 and a:receive() == "again")
    assert(select(2, b:sendto("x", "127.0.0.1", port)) == "already connected" and b:getpeername() == "127.0.0.1")
    assert(b:setpeername"*" == 1 and b:setoption("broadcast", true) == 1)
    assert(tostring(b):find"^udp{unconnected}" and b:close() == 1 and b:close() == 1)
    assert(select(2, b:receive()) == "closed" and select(2, b:sendto("x", "127.0.0.1", port)) == "closed")
    assert(select(2, b:setpeername("127.0.0.1", port)) == "closed")
    """)


# ---- names, time, errors


def test_names_time_and_errors(vm: Vm) -> None:
    began_s = time.time()
    vm.eval("""
    local ip, info = socket.dns.toip"localhost" assert(ip == "127.0.0.1" and info.ip[1] == ip and #info.name > 0)
    assert(#socket.dns.gethostname() > 0 and select(2, socket.dns.toip"no.such.host.invalid"):find"not known")
    assert(type(socket.dns.tohostname"127.0.0.1") == "string" and socket.dns.getaddrinfo"127.0.0.1"[1].family == "inet")
    local closed
    local try = socket.newtry(function() closed = true end)
    local f = socket.protect(function(...) return try(...), "more" end)
    assert(select("#", f(1)) == 2 and f(7) == 7 and not closed)
    local ok, word = f(nil, "broken") assert(ok == nil and word == "broken" and closed)
    ok, word = pcall(socket.protect(function() error"mine" end)) assert(not ok and word:find"mine")
    ok, word = pcall(socket.try, nil, "outside") assert(not ok and tostring(word) == "outside")
    assert(socket.skip(2, 1, 2, 3) == 3 and select("#", socket.skip(0, 1, 2)) == 2)
    assert(require"socket" == socket and require"socket.core" == socket and require"mime" == mime)
    began = socket.gettime() socket.sleep(0.01) assert(socket.gettime() - began >= 0.009)
    """)
    (now,) = vm.eval("return socket.gettime()")
    assert isinstance(now, float)
    assert began_s <= now <= time.time()


def test_sources_and_sinks_of_sockets(vm: Vm) -> None:
    with serving(sending(b"12345", b"67890")) as port:
        assert vm.eval(
            """
        local ltn12 = require "ltn12"
        local s, list = socket.connect("127.0.0.1", ...), {}
        assert(ltn12.pump.all(socket.source("by-length", s, 4), (ltn12.sink.table(list))) == 1)
        assert(ltn12.pump.all(socket.source("until-closed", s), (ltn12.sink.table(list))) == 1)
        local listener = socket.bind("127.0.0.1", 0)
        local ip, port = listener:getsockname()
        local out = socket.connect(ip, port)
        ltn12.pump.all(ltn12.source.string(table.concat(list, "|")), socket.sink("close-when-done", out))
        return listener:accept():receive"*a"
        """,
            "=x",
            port,
        ) == (b"1234|567890",)


# ---- ltn12 and mime

TOOLS = """
local ltn12 = require "ltn12"
local function through(filter, text, size)
  local list, out = {}, {}
  for at = 1, #text, size do list[#list + 1] = text:sub(at, at + size - 1) end
  assert(ltn12.pump.all(ltn12.source.chain(ltn12.source.table(list), filter()), (ltn12.sink.table(out))))
  local back = {}
  assert(ltn12.pump.all(ltn12.source.table(list), ltn12.sink.chain(filter(), (ltn12.sink.table(back)))))
  assert(table.concat(out) == table.concat(back))
  return table.concat(out)
end
"""
TEXT = b"one = \xe4\xf6\xfc\t\r\nlonger " + b"word " * 30 + b"\r\n\r\n.dot\r\n..two \r\nlast "


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_filters_give_the_same_in_pieces_of_any_size(vm: Vm, size: int) -> None:
    base64, quoted, back, lines, dots, wrapped = vm.eval(
        TOOLS
        + """
    local text, size = ...
    local chain = ltn12.filter.chain
    local function encoded() return chain(mime.encode"base64", mime.wrap"base64") end
    local function quoted() return chain(mime.encode"quoted-printable", mime.wrap"quoted-printable") end
    local base64, qp = through(encoded, text, size), through(quoted, text, size)
    assert(through(function() return mime.decode"base64" end, base64, size) == text)
    return base64, qp, through(function() return mime.decode"quoted-printable" end, qp, size),
      through(function() return mime.normalize"\\n" end, "a\\rb\\r\\nc\\nd\\n\\re\\r\\r\\n\\r", size),
      through(mime.stuff, "." .. text, size), through(function() return mime.wrap(10) end, "0123456789abc\\r\\nd", size)
    """,
        "=x",
        TEXT,
        size,
    )
    lines_of_76 = [b64encode(TEXT)[at : at + 76] for at in range(0, len(b64encode(TEXT)), 76)]
    assert base64 == b"\r\n".join(lines_of_76) + b"\r\n"
    assert isinstance(quoted, bytes)
    assert max(map(len, quoted.split(b"\r\n"))) <= 76
    assert back == TEXT
    assert quopri.decodestring(quoted.replace(b"\r\n", b"\n")) == TEXT.replace(b"\r\n", b"\n")
    assert lines == b"a\nb\nc\nd\ne\n\n\n"
    assert dots == b".." + TEXT.replace(b"\n.", b"\n..")
    assert wrapped == b"0123456789\r\nabc\r\nd\r\n"


def test_steps_of_mime(vm: Vm) -> None:
    vm.eval(r"""
    assert((mime.b64("ann:secret")) == "YW5uOnNlY3JldA==" and (mime.unb64"YW5uOnNlY3JldA==") == "ann:secret")
    local a, b = mime.b64("abcd", "e") assert(a == "YWJj" and b == "de")
    a, b = mime.b64(nil) assert(a == nil and b == nil)
    assert((mime.qp"ma\xE7\xE3 ") == "ma=E7=E3=20" and (mime.unqp"ma=E7=E3=20") == "ma\xE7\xE3 ")
    assert((mime.qp("a\r\nb", "", "=0D=0A")) == "a=0D=0Ab")
    assert((mime.eol(0, "x\r")) == "x\r\n" and select(2, mime.eol(0, "x\r")) == 13)
    assert((mime.eol(13, "\ny\n", "%")) == "y%")
    assert((mime.dot(2, ".\r\n.x")) == "..\r\n..x" and select(2, mime.dot(0, "a\r\n")) == 2)
    assert((mime.wrp(3, "abcd", 5)) == "abc\r\nd" and (mime.wrp(5, nil, 5)) == nil and (mime.wrp(2, nil, 5)) == "\r\n")
    for _, call in ipairs{
      function() mime.encode"gzip" end, function() mime.wrap(0) end, function() mime.b64({}) end,
      function() mime.eol("x") end,
      function() mime.qpwrp(5, "x", 2) end, function() mime.decode() end,
    } do local ok, message = pcall(call) assert(not ok and message:find"^eval", message) end
    """)


def test_sources_sinks_and_pumps(vm: Vm) -> None:
    vm.eval("""
    local ltn12 = require "ltn12"
    local source, sink, pump = ltn12.source, ltn12.sink, ltn12.pump
    local to, list = sink.table()
    assert(pump.all(source.cat(source.string"ab", source.empty(), source.table{"c", "d"}), to) == 1)
    assert(table.concat(list, "|") == "ab|c|d")
    local ok, word = pump.all(source.error"no", to) assert(ok == nil and word == "no")
    ok, word = pump.all(source.string"x", sink.error"full") assert(ok == nil and word == "full")
    ok, word = pump.all(source.cat(source.string"x", source.error"late"), sink.null()) assert(word == "late")
    ok, word = pump.all(source.file(nil, "gone"), to) assert(word == "gone")
    assert(#source.string(("x"):rep(5000))() == ltn12.BLOCKSIZE and source.string(nil)() == nil)
    local closed
    local file = {close = function() closed = true end}
    function file:read() if not self.was then self.was = true return "data" end end
    assert(pump.all(source.file(file), to) == 1 and list[#list] == "data" and closed)
    local written = {}
    local out = {close = function() written.closed = true end}
    function out:write(chunk) written[#written + 1] = chunk return true end
    assert(pump.all(source.string"text", sink.file(out)) == 1 and written[1] == "text" and written.closed)
    local second = function(chunk) return chunk and 1 or 1 end
    assert(pump.all(source.string"s", sink.simplify(function() return 1, second end)) == 1)
    local n = 0
    local counting = source.simplify(function() n = n + 1 return n < 3 and "x" or nil end)
    assert(counting() == "x" and counting() == "x" and counting() == nil)
    """)
