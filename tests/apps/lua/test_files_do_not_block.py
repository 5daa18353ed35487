"""Calls of files hold nobody else, whatever the file is (spec: bas-api §6)."""

from __future__ import annotations

import os
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, thread_time

import gevent
import pytest

from smqrt.http import disk
from smqrt.http.disk import DiskIo
from smqrt.http.open_files import MAX_READ_BYTES, Disks
from tests.apps.lua.app_server import AppServer
from tests.support.waiting import wait_until

MAX_S = 0.1
"""Of computing in the loop's thread: what others on this machine do must not count."""
LONGEST_WAIT_S = 1.0
"""Of waiting on top, for Python's lock or for the machine."""


@contextmanager
def nobody_waits() -> Iterator[None]:
    """Fails when a greenlet that wants to run every millisecond is held for longer."""
    worst_s = worst_wait_s = 0.0

    def tick() -> None:
        nonlocal worst_s, worst_wait_s
        while True:
            began_s, computed_s = perf_counter(), thread_time()
            gevent.sleep(0.001)
            worst_s = max(worst_s, thread_time() - computed_s)
            worst_wait_s = max(worst_wait_s, perf_counter() - began_s)

    ticking = gevent.spawn(tick)
    gevent.sleep(0.005)
    try:
        yield
        gevent.sleep(0.002)
    finally:
        ticking.kill()
    assert worst_s < MAX_S
    assert worst_wait_s < LONGEST_WAIT_S


def told(server: AppServer, code: str) -> list[str]:
    return server.page(f"<?lsp {code} ?>").text.removesuffix("\n").split("\n")


def wait_until_in(server: AppServer, call: str) -> None:
    """Wait until an activity waits in this call of the library."""
    wait_until(lambda: [name for _, name, _ in server.vm.activities.waiting() if name.endswith(call)])


def test_a_file_that_is_too_large_for_a_string(server: AppServer):
    file = server.write("", {"sparse": b""}) / "sparse"
    os.truncate(file, 1536 << 20)
    code = f"""
      local f = io:open"sparse"
      print(f:read"a") print(f:read({MAX_READ_BYTES + 1})) print(#f:read(100000), f:seek(1536 << 20), f:read(1))
      print(pcall(f.read, f, -5)) print(pcall(f.read, f, 1.5)) print(pcall(f.read, f, "l")) print(f:read(0))
      print(f:seek(math.maxinteger)) print(pcall(f.seek, f, -1)) print(f:write"x")
      print(io:loadfile"sparse")
      print(pcall(require"rwfile".file, io, "sparse"))
    """
    with nobody_waits():
        lines = told(server, code)
    assert lines[:3] == ["nil\tmem", "nil\tmem", "100000\ttrue\tnil"]
    assert lines[3].endswith("bad argument #1 to 'read' (a size expected, got -5)")
    assert lines[4].endswith("bad argument #1 to 'read' (number has no integer representation)")
    assert lines[5].endswith("bad argument #1 to 'read' (number expected, got string)")
    assert lines[6:8] == ["", "nil\tioerror"]
    assert lines[8].endswith("seek: the offset counts from the start and can't be negative")
    assert lines[9:] == ["nil\tnoaccess", "nil\tmem", "true\tnil\tmem"]


def test_long_strings_are_read_and_written_in_portions(server: AppServer):
    code = """
      local text = ("0123456789abcdef"):rep(3 << 16)
      local f = io:open("long", "w+") print(f:write(text, "end"), f:seek(0), f:read"a" == text .. "end", f:close())
      print(io:stat"long".size)
    """
    with nobody_waits():
        assert told(server, code) == ["true\ttrue\ttrue\ttrue", str((3 << 20) + 3)]


def test_a_pipe_without_the_other_end(server: AppServer):
    folder = server.write("", {"page.lsp": ""})
    os.mkfifo(folder / "pipe")
    reading = gevent.spawn(told, server, 'local f = io:open"pipe" print(f:read(5)) print(f:read"a") print(f:read"a")')
    with nobody_waits():
        wait_until_in(server, ".read")
        assert not reading.ready()
        writer = gevent.spawn(
            server.page, "<?lsp local f = io:open('pipe', 'w') print(f:write'hello', f:write' you', f:close()) ?>"
        )
        assert writer.get(timeout=5).text == "true\ttrue\ttrue\n"
        assert reading.get(timeout=5) == ["hello", " you", "nil"]


def test_a_writer_waits_for_its_reader_until_close(server: AppServer):
    os.mkfifo(server.write("", {"page.lsp": ""}) / "pipe")
    code = 'app.f = io:open("pipe", "w") print(app.f:write"x")'
    writing = gevent.spawn(told, server, code)
    wait_until_in(server, ".write")
    server.write("", {"close.lsp": "<?lsp print(app.f:seek(1)) print(app.f:close(), app.f:close()) ?>"})
    assert server.ask("/close.lsp").text == "nil\tnoimplementation\ntrue\tfalse\n"
    assert writing.get(timeout=5) == ["nil\tioerror"]


def test_a_reader_ends_when_the_pipe_is_closed(server: AppServer):
    os.mkfifo(server.write("", {"page.lsp": ""}) / "pipe")
    reading = gevent.spawn(told, server, 'app.f = io:open"pipe" print(app.f:read())')
    wait_until_in(server, ".read")
    server.write("", {"close.lsp": "<?lsp print(app.f:close()) ?>"})
    assert server.ask("/close.lsp").text == "true\n"
    assert reading.get(timeout=5) == ["nil\tioerror"]


def test_a_folder_with_very_many_entries(server: AppServer):
    folder = server.write("", {"many/0": ""}) / "many"
    first = str(folder / "0")
    for number in range(1, 50_000):
        name = f"{folder}/{number}"
        os.link(first, name) if number % 30_000 else Path(name).touch()
    with nobody_waits():
        assert told(server, "local n = 0 for name in io:files'many' do n = n + 1 end print(n)") == ["50000"]


def test_archives(server: AppServer):
    server.app({"page.lsp": ""})
    with zipfile.ZipFile(server.folder / "z.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("large", os.urandom(1 << 20) * 30)
        for number in range(3_000):
            archive.writestr(f"d/{number}", "")
    code = """
      local zip = ba.mkio(ba.openio"home", "z.zip")
      print(#zip:open"large":read"a", zip:stat"large".size)
      local n = 0 for name in zip:files"d" do n = n + 1 end print(n)
      local f = zip:open"large" print(f:seek(7), #f:read(), f:write"x") print(zip:remove"large")
    """
    with nobody_waits():
        size = 30 << 20
        assert told(server, code) == [f"{size}\t{size}", "3000", "true\t4096\tnil\tnoaccess", "nil\tnoaccess"]


class HungDisk:
    """A disk on which nothing answers until `answer` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *operations: str) -> None:
        self.asked, self.answer = threading.Event(), threading.Event()
        for name in operations:
            monkeypatch.setattr(os, name, self.hung(getattr(os, name)))

    def hung(self, function):
        def call(*args, **more):
            if threading.current_thread() is not threading.main_thread():
                self.asked.set()
                assert self.answer.wait(20)
            return function(*args, **more)

        return call


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[HungDisk]:
    disks = HungDisk(monkeypatch, "mkdir", "pread", "remove")
    yield disks
    disks.answer.set()


def test_a_hanging_disk_blocks_no_other_and_recovers(server: AppServer, hung: HungDisk):
    server.write("", {"big": b"x" * 300_000, "other.lsp": "<?lsp print(io:stat'big'.size) ?>"})
    server.page("")
    code = "local f = io:open'big' print(io:mkdir'd' or 'there', #f:read'a')"
    asking = [gevent.spawn(told, server, code) for _ in range(6)]
    wait_until(lambda: server.vm.activities.blocked == 6)
    with nobody_waits():
        assert server.ask("/other.lsp").text == "300000\n"
    hung.answer.set()
    answers = [job.get(timeout=10)[0] for job in asking]
    assert sorted(answers) == ["there\t300000"] * 5 + ["true\t300000"]


def test_a_file_is_closed_behind_the_read_that_hangs(server: AppServer, hung: HungDisk):
    server.write("", {"big": b"x" * 300_000})
    reading = gevent.spawn(told, server, "app.f = io:open'big' print(#app.f:read'a')")
    wait_until(hung.asked.is_set)
    server.write("", {"close.lsp": "<?lsp print(app.f:close()) print(pcall(app.f.read, app.f)) ?>"})
    assert server.ask("/close.lsp").text.startswith("true\nfalse\t")
    assert is_open(server.folder / "root" / "big")
    hung.answer.set()
    assert reading.get(timeout=10) == ["300000"]
    wait_until(lambda: not is_open(server.folder / "root" / "big"))


def test_an_application_is_unloaded_while_its_read_hangs(server: AppServer, hung: HungDisk):
    application = server.app({"page.lsp": "<?lsp local f <close> = io:open'big' f:read'a' ?>", "big": b"x" * 300_000})
    reading = gevent.spawn(server.ask, "/page.lsp")
    wait_until(hung.asked.is_set)
    application.unload()
    server.vm.stop()
    wait_until(lambda: server.vm.activities.blocked == 0)
    hung.answer.set()
    reading.kill()
    wait_until(lambda: not is_open(server.folder / "root" / "big"))


def is_open(file: Path) -> bool:
    """Whether this process has the file open."""
    return str(file) in {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}


def test_a_file_opened_after_its_caller_left_is_closed(server: AppServer, monkeypatch: pytest.MonkeyPatch):
    begun, answer, seen = threading.Event(), threading.Event(), []
    opened = DiskIo.open

    def slow(io: DiskIo, name: str, mode: str = "r"):
        begun.set()
        assert answer.wait(20)
        file = opened(io, name, mode)
        seen.append(is_open(server.folder / "root" / "new"))
        return file

    server.page("")
    monkeypatch.setattr(DiskIo, "open", slow)
    opening = gevent.spawn(server.page, "<?lsp io:open('new', 'w') ?>")
    wait_until(begun.is_set)
    server.vm.stop()
    wait_until(lambda: server.vm.activities.blocked == 0)
    opening.kill()
    answer.set()
    wait_until(lambda: seen == [True])
    wait_until(lambda: not is_open(server.folder / "root" / "new"))


def test_calls_in_nonblocking_places_work_or_fail_clearly(server: AppServer):
    server.write("", {"a.txt": "hello"})
    os.mkfifo(server.folder / "root" / "pipe")
    code = """
      local f, p = io:open("b.txt", "w+"), io:open"pipe"
      local function here(call) -- in the comparator of a sort
        local told
        table.sort({2, 1}, function(a, b) told = told or table.pack(pcall(call)) return a < b end)
        print(table.unpack(told, 1, told.n))
      end
      here(function() return io:stat"a.txt".size, io:mkdir"d", io:stat"d".isdir, io:rmdir"d" end)
      here(function() return f:write(("x"):rep(200000)), f:flush(), f:seek(199999), f:read"a", f:close() end)
      here(function() for name in io:files"." do return type(name) end end)
      here(function() return io:dofile"a.lua" end)
      here(function() return p:read() end)
    """
    server.write("", {"a.lua": "return 7"})
    lines = told(server, code)
    assert lines[:4] == [
        "true\t5\ttrue\ttrue\ttrue",
        "true\ttrue\ttrue\ttrue\tx\ttrue",
        "true\tstring",
        "true\t7",
    ]
    assert lines[4].startswith("false\t")
    assert "a C boundary is in between" in lines[4]


def test_writes_are_visible_soon_and_errors_follow(server: AppServer):
    server.app({"w.lsp": "<?lsp app.f = io:open('log', 'a') print(app.f:write'line') ?>"})
    assert server.ask("/w.lsp").text == "true\n"
    wait_until(lambda: (server.folder / "root" / "log").read_text() == "line")
    code = 'local f = ba.openio"disk":open("/dev/full", "w") print(f:write"x") print(f:close())'
    assert told(server, code) == ["nil\tnospace", "true"]


def test_names_replaced_by_links_or_pipes_use_a_thread(server: AppServer):
    folder = server.write("", {"a.txt": "hello"})
    (folder / "link").symlink_to("a.txt")
    (folder / "nowhere").symlink_to("none")
    code = """
      for i = 1, 2 do print(io:stat"link".size, io:open"link":read"a", io:stat"nowhere") end
      print(io:open"nowhere")
    """
    assert told(server, code) == ["5\thello\tnil\tnotfound"] * 2 + ["nil\tnotfound"]
    assert disk.is_special("/dev/null")
    assert not disk.is_special(str(folder))


def test_files_of_remote_disks_are_served_by_threads(
    server: AppServer, monkeypatch: pytest.MonkeyPatch, hung: HungDisk
):
    """Static files and pages: when the disk hangs, everybody else is served."""
    page = "<?lsp io:stat'a.txt' print(io:open'b.txt':read()) ?>"
    server.app({"a.txt": b"a" * 300_000, "b.txt": "b", "page.lsp": page})
    server.app({"c.txt": "c"}, "near")
    far = str(server.folder / "root")
    is_near = Disks.is_local_tree
    monkeypatch.setattr(Disks, "is_local_tree", lambda disks, root: root != far and is_near(disks, root))
    monkeypatch.setattr(Disks, "is_local", lambda disks, path: False)
    hung.answer.set()
    for _ in range(2):
        assert server.ask("/a.txt").body == b"a" * 300_000
        assert server.ask("/b.txt").text == "b"
        assert server.ask("/page.lsp").text == "b\n"
    hung.answer.clear()
    monkeypatch.setattr(os, "stat", hung.hung(os.stat))
    waiting = gevent.spawn(server.ask, "/b.txt")
    with nobody_waits():
        assert server.ask("/near/c.txt").text == "c"
    assert not waiting.ready()
    hung.answer.set()
    assert waiting.get(timeout=10).text == "b"


def test_loadfile_and_dofile_of_lua(server: AppServer):
    folder = server.write("", {"m.lua": "#!shebang\nlocal a = ...\nreturn x, a", "bad.lua": "\n)"})
    code = f"""
      local path = "{folder}/m.lua"
      print(dofile(path)) print(loadfile(path, "t", {{x = 7}})(8)) print(loadfile(path, "b"))
      print(loadfile"/none") print(pcall(dofile, "/none")) print((select(2, loadfile"{folder}/bad.lua")):match":2:.*")
    """
    assert told(server, code) == [
        "nil\tnil",
        "7\t8",
        "nil\tattempt to load a chunk (only text can be loaded, mode is 'b')",
        "nil\tcannot open /none: No such file or directory",
        "false\tpage.lsp:4: cannot open /none: No such file or directory",
        ":2: unexpected symbol near ')'",
    ]
