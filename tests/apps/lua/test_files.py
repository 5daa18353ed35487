"""io objects and files (spec: bas-api §6)."""
# ruff: noqa: E501 - one case per line

from __future__ import annotations

import threading
import zipfile

import gevent
import pytest

from smqrt.http.disk import DiskIo
from tests.apps.lua.app_server import AppServer
from tests.support.waiting import wait_until


def told(server: AppServer, code: str) -> str:
    """What the page code prints, in an application folder with some files."""
    server.write("", {"a.txt": "hello", "sub/b.txt": "b", "empty/.keep": ""})
    return server.page(f"<?lsp {code} ?>").text.removesuffix("\n")


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("local s = io:stat'a.txt' print(s.name, s.size, s.isdir, s.type, math.type(s.mtime))", "a.txt\t5\tfalse\tregular\tinteger"),
        ("local s = io:stat'/sub' print(s.name, s.isdir, s.type)", "sub\ttrue\tdirectory"),
        ("print(io:stat'none')", "nil\tnotfound"),
        ("print(io:stat'../x')", "nil\tinvalidname"),
        ("print(io:stat'sub/../../x')", "nil\tinvalidname"),
        ("print(io:stat'a\\0b')", "nil\tinvalidname"),
        ("print(io:open'none')", "nil\tnotfound"),
        ("print(io:open('none/x', 'w'))", "nil\tnotfound"),
        ("print(io:mkdir'new', io:mkdir'new')", "true\tnil\texist"),
        ("print(io:rmdir'sub')", "nil\tnotempty"),
        ("print(io:mkdir'd', io:rmdir'd', io:rmdir'd')", "true\ttrue\tnil\tnotfound"),
        ("print(io:remove'a.txt', io:remove'a.txt')", "true\tnil\tnotfound"),
        ("print(io:rename('a.txt', 'c.txt'), io:stat'c.txt'.size)", "true\t5"),
        ("print(io:rename('none', 'c'))", "nil\tnotfound"),
        ("print(io:resourcetype())", "disk\tlinux"),
        ("print(io:realpath'x/y' == mako.cwd and 1 or io:realpath'':match'[^/]*$')", "root"),
        ("print(type(io), type(io:open'a.txt'), tostring(io):match'^io')", "userdata\tuserdata\tio"),
        ("local f = io:open'a.txt' print(f:read(2), f:read(), f:read(), f:close(), f:close())", "he\tllo\tnil\ttrue\tfalse"),
        ("local f = io:open'a.txt' print(f:read'a', f:read'a', f:getio() == io)", "hello\tnil\ttrue"),
        ("local f = io:open'a.txt' print(f:read'*a', f:seek(1), f:read'*a', f:seek(), f:read(1))", "hello\ttrue\tello\ttrue\th"),
        ("local f = io:open('n', 'w') print(f:write('a', 1, 2.5), f:flush(), f:close()) print(io:open'n':read'a')", "true\ttrue\ttrue\na12.5"),
        ("local f = io:open('a.txt', 'a') f:write' you' f:close() print(io:open'a.txt':read'a')", "hello you"),
        ("local f = io:open('a.txt', 'r+') f:seek(4) f:write'!' f:close() print(io:open'a.txt':read'a')", "hell!"),
        ("local f do local g <close> = io:open'a.txt' f = g end print(pcall(f.read, f))", "false\tpage.lsp:1: attempt to use a closed file in 'read'"),
        ("print((pcall(io.stat, io)))", "false"),
        ("print(pcall(io.files, io, 'none'))", "false\tpage.lsp:1: notfound"),
        ("local n = {} for name in io:files'sub' do n[#n + 1] = name end print(table.concat(n))", "b.txt"),
        ("for name, isdir, mtime, size in io:files('sub', true) do print(name, isdir, mtime > 0, size) end", "b.txt\tfalse\ttrue\t1"),
        ("for name in io:files'/new' do print(name) end", None),
        ("print(ba.openio'disk' ~= nil, ba.openio'none', type(ba.io().home), ba.openio'home' == ba.openio'home')", "true\tnil\tuserdata\ttrue"),
        ("print(ba.mkio(io, 'sub'):open'b.txt':read'a')", "b"),
        ("print(ba.mkio(io, 'none'))", "nil\tnotfound"),
        ("print(ba.mkio(io, 'a.txt'))", "nil\tziperror"),
        ("print(ba.mkio(io, 'sub'):stat'../a.txt')", "nil\tinvalidname"),
    ],
)  # fmt: skip
def test_files(server: AppServer, code, output):
    answer = told(server, code)
    if output is None:
        assert "notfound" in answer
    else:
        assert answer == output


def test_loadfile_and_dofile(server: AppServer):
    server.write("", {"f.lua": "local a = ...\nx = 7\nreturn 1, x", "bad.lua": "\nx x", "err.lua": "\n\nerror'deep'"})
    code = """
      print(io:dofile"f.lua") print(_G.x, x) _G.x = nil
      print(io:dofile("f.lua", _ENV)) print(rawget(_G, "x"), x)
      print(io:loadfile"none") print(io:loadfile"bad.lua")
      print(pcall(io.dofile, io, "err.lua"))
      print(select("#", ba.loadfile("f.lua", io)()))
    """
    lines = told(server, code).split("\n")
    assert lines[:4] == ["1\t7", "7\t7", "1\t7", "nil\t7"]
    assert lines[4] == "nil\tnotfound"
    assert lines[5].startswith("nil\troot/bad.lua:2: ")
    assert lines[6] == "false\troot/err.lua:3: deep"
    assert lines[7] == "2"


def test_an_archive_is_read_only(server: AppServer):
    with zipfile.ZipFile(server.folder / "z.zip", "w") as archive:
        archive.writestr("d/a.txt", "zipped")
    code = """
      local z = ba.mkio(ba.openio"home", "z.zip")
      print((z:resourcetype()), z:open"d/a.txt":read"a", z:stat"d".isdir)
      print(z:open("x", "w")) print(z:mkdir"x")
      for name in z:files"d" do print(name) end
    """
    assert told(server, code) == "zip\tzipped\ttrue\nnil\tnoaccess\nnil\tnoaccess\na.txt"


def test_a_forgotten_file_is_closed(server: AppServer):
    server.app({})
    server.vm.eval("local f = ba.openio'home':open('x', 'w') f:write'kept'")
    server.vm.eval("collectgarbage() collectgarbage()")
    wait_until(lambda: (server.folder / "x").read_text() == "kept")


def test_an_io_is_one_object_while_referenced(server: AppServer):
    server.app({".preload": "_G.mine = io"})
    server.vm.eval("collectgarbage() collectgarbage()")
    assert server.vm.eval("return mine == mine, mine:stat'' ~= nil") == (True, True)


def test_an_io_reused_during_collection_remains_valid(server: AppServer):
    server.vm.eval(
        """
        local old = ba.openio'disk'
        setmetatable({}, {__gc = function() back = ba.openio'disk' end}) -- finalized before the older one
        old = nil
        collectgarbage() collectgarbage()
        """
    )
    assert server.vm.eval("return back:stat'/'.isdir") == (True,)


def test_a_slow_disk_delays_no_others(server: AppServer, monkeypatch: pytest.MonkeyPatch):
    """Not even the sixth who asks holds others, though only some threads look at files."""
    answered = threading.Event()
    look = DiskIo.files

    def slow(io: DiskIo, path: str = ""):
        assert answered.wait(10)
        return look(io, path)

    monkeypatch.setattr(DiskIo, "files", slow)
    server.write("", {"a.txt": "hello"})
    server.page("")  # loads the application: not while its pages are asked for
    code = "local n = 0 for name in io:files'' do n = n + 1 end print(n > 0)"
    listing = [gevent.spawn(server.page, f"<?lsp {code} ?>") for _ in range(6)]
    wait_until(lambda: server.vm.activities.blocked == 6)
    assert server.page("<?lsp print(1) ?>").text == "1\n"
    assert not any(job.ready() for job in listing)
    answered.set()
    assert [job.get(timeout=10).text for job in listing] == ["true\n"] * 6
