"""io.popen and what waits in os: the results of plain Lua 5.4, and nobody is held."""

from __future__ import annotations

import gc
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import gevent
import pytest

from smqrt.apps.lua.api import processes
from smqrt.apps.lua.bridge import LuaError
from smqrt.apps.lua.vm import Services, Vm
from smqrt.child_processes import processes as shell
from smqrt.process.current_process import AppScope, running_app
from tests.apps.lua.app_server import AppServer
from tests.apps.lua.recorder import Recorder
from tests.support.waiting import wait_until


def children() -> set[int]:
    """The living and the dead that nobody has waited for."""
    return {int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()}


def pipes() -> set[str]:
    """The pipes that this process has open."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the list itself
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {name for name in found if name.startswith("pipe:")}


@pytest.fixture(autouse=True)
def nothing_is_left(vm: Vm, services: Services) -> Iterator[None]:
    """There are no new children and pipes, however the test went."""
    gevent.get_hub().threadpool.apply(int)  # its own pipes are there
    gc.collect()
    children_before, pipes_before = children(), pipes()
    yield
    services.processes.shutdown()
    gevent.sleep(0)
    gc.collect()
    assert (children() - children_before, pipes() - pipes_before) == (set(), set())


@pytest.mark.parametrize(
    ("call", "results"),
    [
        ("os.execute()", (True,)),
        ("os.execute 'true'", (True, b"exit", 0)),
        ("os.execute 'exit 4'", (None, b"exit", 4)),
        ("os.execute 'kill -9 $$'", (None, b"signal", 9)),
        ("os.execute '/no/such/program 2>/dev/null'", (None, b"exit", 127)),
        ("os.execute 'cat'", (True, b"exit", 0)),  # its standard input is empty
        ("io.popen('true'):close()", (True, b"exit", 0)),
        ("io.popen('exit 4'):close()", (None, b"exit", 4)),
        ("io.close(io.popen 'kill -9 $$')", (None, b"signal", 9)),
        ("io.popen('cat >/dev/null; exit 3', 'w'):close()", (None, b"exit", 3)),
        ("io.popen('kill -15 $$', 'w'):close()", (None, b"signal", 15)),
    ],
)
def test_how_a_command_ended(vm: Vm, call: str, results: object) -> None:
    assert vm.eval(f"return {call}") == results


@pytest.mark.parametrize(
    ("output", "call", "values"),
    [
        ("one\\ntwo", "f:read(), f:read(), f:read()", (b"one", b"two", None)),
        ("one\\n\\ntwo\\n", "f:read('L', '*l', 'l', 'l')", (b"one\n", b"", b"two", None)),
        ("abcdef", "f:read(0, 2, 'a', 0)", (b"", b"ab", b"cdef", None)),
        ("", "f:read 'a', f:read(0), f:read(1)", (b"", None, None)),
        ("12 0x1F -.5e1 abc", "f:read('n', 'n', 'n', 'l')", (12, 31, -5.0, b" abc")),
        ("0x\\n1e+x\\nnan", "f:read 'n', f:read(), f:read 'n', f:read(), f:read 'n', f:read()", None),
        ("7" * 250, "f:read 'n', f:read 'a'", (None, b"7" * 50)),
        ("1.5", "f:read(2.0)", (b"1.",)),
        ("x", "f:read(), f:write 'x'", (b"x", None, b"Bad file descriptor", 9)),
        ("x", "f:seek()", (None, b"Illegal seek", 29)),
        ("x", "f:setvbuf('no'), f:setvbuf('full', 1024), f:flush()", (True, True, True)),
    ],
)
def test_formats_of_read(vm: Vm, output: str, call: str, values: object) -> None:
    expected = values or (None, b"", None, b"x", None, b"nan")
    source = f"""local f = io.popen [[printf '{output}']]
    local values = table.pack({call})
    f:close()
    return table.unpack(values, 1, values.n)"""
    assert vm.eval(source) == expected


def test_lines(vm: Vm) -> None:
    source = """local f, seen = io.popen "printf '1 a\\nb\\n2 c\\nd'", {}
    for number, rest in f:lines("n", "l") do seen[#seen + 1] = number .. rest .. f:read() end
    assert(io.type(f) == "file")
    io.input(f)
    assert(io.read() == nil and io.lines()() == nil and io.input() == f)
    f:close()
    return table.concat(seen, " "), (select(2, pcall(f.lines, f))), (select(2, pcall(io.read)))"""
    text, error, read_error = vm.eval(source.replace("\\n", "\\\\n"))
    assert text == b"1 ab 2 cd"
    assert b"attempt to use a closed file" in error  # type: ignore[operator]
    assert b"default input file is closed" in read_error  # type: ignore[operator]


def test_a_handle_is_a_file(vm: Vm) -> None:
    source = """local f = io.popen "exec sleep 0"
    local before = {type(f), io.type(f), tostring(f):match "^file %(0x%x+%)$" ~= nil}
    f:close()
    return before[1], before[2], before[3], io.type(f), tostring(f), io.type(5), io.type(io.stdout)"""
    assert vm.eval(source) == (b"userdata", b"file", True, b"closed file", b"file (closed)", None, b"file")


def test_writing(vm: Vm, tmp_path: Path) -> None:
    source = """local f = io.popen("cat > " .. ..., "w")
    assert(f:write("a", 1, 2.5, "\\0") == f and f:write() == f and f:flush())
    local none, message, number = f:read()
    assert(none == nil and message == "Bad file descriptor" and number == 9)
    io.output(f)
    assert(io.write "z" == f and io.output() == f)
    local closed = table.pack(io.close())
    io.output(io.stdout)
    return table.unpack(closed)"""
    assert vm.eval(source, "=x", bytes(tmp_path / "written")) == (True, b"exit", 0)
    assert (tmp_path / "written").read_bytes() == b"a12.5\0z"


def test_a_command_that_closed_its_input(vm: Vm) -> None:
    """SIGPIPE ends neither the server nor the call."""
    source = """local f = io.popen("exec true", "w")
    local ok, message, number
    repeat ok, message, number = f:write(("x"):rep(70000)) until not ok
    return message, number, f:close()"""
    assert vm.eval(source) == (b"Broken pipe", 32, True, b"exit", 0)
    assert vm.eval("local f = io.popen 'exec yes' return f:read(), f:close()") == (b"y", None, b"signal", 13)


def test_much_of_it(vm: Vm, recorder: Recorder, tmp_path: Path) -> None:
    source = """local name, size = ..., 3 << 20
    local f = io.popen("sleep 0.05; cat > " .. name, "w")
    assert(f:write(("x"):rep(size), "end") == f and f:close())
    local g = io.popen("cat " .. name)
    local text = g:read "a"
    g:close()
    local h = io.popen("cat " .. name)
    return #text == size + 3, #h:read(size), h:read(10), h:close()"""
    assert vm.eval(source, "=x", bytes(tmp_path / "much")) == (True, 3 << 20, b"end", True, b"exit", 0)


def test_other_greenlets_run(vm: Vm, tmp_path: Path) -> None:
    """While they wait for a command that ends when others have had their turn."""
    go = tmp_path / "go"
    wait = f"while [ ! -e {go} ]; do sleep 0.01; done"
    calls = [
        f"return os.execute '{wait}'",
        f"return io.popen('{wait}; echo x'):read() == 'x', 'exit', 0",
        f"return io.popen('{wait}'):close()",
        f"local f = io.popen('{wait}; cat >/dev/null', 'w') f:write(('x'):rep(200000)) return f:close()",
    ]
    waiting = [gevent.spawn(vm.eval, call) for call in calls]
    longest_s, begin = 0.0, time.thread_time()
    for _ in range(50):
        gevent.sleep(0.001)
        begin, before = time.thread_time(), begin
        longest_s = max(longest_s, begin - before)
    assert longest_s < 0.05
    assert not any(one.ready() for one in waiting)
    go.touch()
    assert [one.get(timeout=20) for one in waiting] == [(True, b"exit", 0)] * 4


@pytest.mark.parametrize(
    "call",
    [
        "local f, n = io.popen 'yes | head -20000', 0 for _ in f:lines() do n = n + 1 end f:close() return n",
        "local f, n = io.popen 'yes 12 | head -4000', 0 for _ in f:lines 'n' do n = n + 1 end f:close() return n",
        "local f, t = io.popen('cat >/dev/null', 'w'), ('x'):rep(1 << 18) for _ = 1, 16 do f:write(t) end f:close()",
    ],
)
def test_other_greenlets_run_during_large_transfers(vm: Vm, call: str) -> None:
    """What is read and written without a wait."""
    longest_s, begin = 0.0, time.thread_time()
    running = gevent.spawn(vm.eval, call)
    while not running.ready():
        gevent.sleep(1e-6)
        begin, before = time.thread_time(), begin
        longest_s = max(longest_s, begin - before)
    running.get()
    assert longest_s < 0.05


PLACES = {
    "a thread": "ba.thread.run(work)",
    "a timer": "ba.timer(function() work() return false end):set(1, true)",
    "a cosocket": "ba.socket.event(work)",
    "a coroutine": "coroutine.wrap(work)()",
    ".preload": "work()",
}
WORK = """function work()
  local f = _G.io.popen("read x; echo $x; exit 2 <&-; cat", "r")
  local first = f:read() local g = _G.io.popen("cat >/dev/null; exit 3", "w") g:write "x"
  _G.seen = {first, select(3, f:close()), select(3, g:close()), select(3, os.execute "exit 4")}
end
"""


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_it_works_in(server: AppServer, place: str) -> None:
    server.app({".preload": WORK + place})
    wait_until(lambda: server.vm.eval("return seen and table.concat(seen, ' ')") == (b" 2 3 4",))


def test_it_works_in_a_page(server: AppServer) -> None:
    page = "<?lsp local f = _G.io.popen 'echo page' response:write(f:read(), ' ', select(3, f:close())) ?>"
    server.app({"a.lsp": page})
    assert server.ask("/a.lsp").body == b"page 0"


def test_across_a_c_boundary(vm: Vm, tmp_path: Path) -> None:
    """What is there can be read, what would have to be waited for is a clear error."""
    source = """local f = io.popen "printf 'a\\nb\\n'; sleep 100"
    f:read()
    local line = ("x"):gsub("x", function() return f:read() end)
    local _, message = pcall(string.gsub, "x", "x", function() return f:read() end)
    local _, close = pcall(string.gsub, "x", "x", function() f:close() end)
    local _, execute = pcall(string.gsub, "x", "x", function() os.execute "true" end)
    local g = io.popen("cat >/dev/null", "w")
    ;("x"):gsub("x", function() assert(g:write "y" == g) end)
    return line, message, close, execute, io.type(f), g:close()"""
    line, *errors, kind, ok, _, code = vm.eval(source.replace("\\n", "\\\\n"))
    assert (line, kind, ok, code) == (b"b", b"file", True, 0)
    assert all(b"C boundary" in error for error in errors)  # type: ignore[operator]
    name = vm.eval("local name ('x'):gsub('x', function() name = os.tmpname() end) return name")[0]
    assert vm.eval(
        "local ok ('x'):gsub('x', function() ok = os.remove(...) end) return ok".replace("...", repr(name)[1:])
    )


def test_environment_and_descriptors_of_a_command(vm: Vm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "kept")
    (tmp_path / "file").touch()
    source = """local file = io.open(... .. "/file", "w")
    local f = io.popen "echo $KEPT; ulimit -n; grep SigIgn /proc/$$/status; ls -l /proc/$$/fd"
    local text = f:read "a"
    f:close() file:close()
    return text"""
    text = vm.eval(source, "=x", bytes(tmp_path))[0]
    assert isinstance(text, bytes)
    lines = text.splitlines()
    assert lines[:2] == [b"kept", b"1024"]
    assert int(lines[2].split()[1], 16) & 0x7FFFFFFF == 0  # those above are of the C library
    numbers = [int(line.split(b" -> ")[0].split()[-1]) for line in lines[3:] if b" -> " in line]
    assert numbers == [0, 1, 2]
    assert str(tmp_path).encode() not in text


def test_the_end_of_an_application_ends_its_commands(vm: Vm, recorder: Recorder) -> None:
    app, before = AppScope(None), children()
    with running_app(app):
        vm.eval("f, g = io.popen 'exec sleep 1000', io.popen('exec sleep 1000', 'w')")
    executing = gevent.spawn(execute_in, app, vm)
    reading = gevent.spawn(vm.eval, "return f:read()")
    wait_until(lambda: len([child for child in children() - before if b"sleep" in command_of(child)]) == 3)
    app.close()
    assert executing.get(timeout=20) == (None, b"signal", 15)
    assert reading.get(timeout=20) == (None, b"Bad file descriptor", 9)
    assert vm.eval("return g:write 'x'") == (None, b"Bad file descriptor", 9)
    assert vm.eval("return f:close()") == (None, b"signal", 15)


def execute_in(app: AppScope, vm: Vm) -> object:
    with running_app(app):
        return vm.eval("return os.execute 'exec sleep 1000'")


def command_of(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_command_ends_with_its_application(server: AppServer, place: str) -> None:
    before = children()
    application = server.app({".preload": "function work() _G.f = _G.io.popen 'exec sleep 1000' end " + place})
    wait_until(lambda: server.vm.eval("return f ~= nil") == (True,))
    application.unload()
    wait_until(lambda: children() <= before)
    assert server.vm.eval("return f:close()") == (None, b"signal", 15)


def test_a_stuck_command_is_killed_with_its_group(vm: Vm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "TERMINATE_S", 0.1)
    app = AppScope(None)
    with running_app(app):
        source = """f = io.popen "trap '' TERM; sleep 1000 & echo $!; while :; do sleep 0.02; done" return f:read()"""
        grandchild = int(vm.eval(source)[0] or 0)
    app.close()
    assert vm.eval("return f:close()") == (None, b"signal", 9)
    wait_until(lambda: not Path(f"/proc/{grandchild}").exists() or b"\nState:\tZ" in status_of(grandchild))


def status_of(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/status").read_bytes()
    return b"\nState:\tZ"


def test_forgotten_handles_are_collected(vm: Vm) -> None:
    before = pipes()
    vm.eval("for _ = 1, 5 do io.popen 'true' end (function() local f <close> = io.popen 'echo x' f:read() end)()")
    vm.eval("collectgarbage() collectgarbage()")
    assert pipes() == before


def test_shutdown_ends_commands(vm: Vm, services: Services) -> None:
    before = children()
    vm.eval("io.popen 'exec sleep 1000'")
    vm.eval("collectgarbage() collectgarbage()")
    services.processes.shutdown()
    assert children() == before


def test_commands_are_limited_with_other_children(vm: Vm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MAX_PER_APP", 2)
    vm.eval("one, two = io.popen('cat', 'w'), ba.forkpty 'cat'")
    message = b"too many children: 2 of an application, 128 in all"
    assert vm.eval("return io.popen 'true'") == (None, b"true: " + message, 11)
    assert vm.eval("return os.execute 'true'") == (None, message, 11)
    assert vm.eval("return ba.forkpty 'true'") == (None, b"mem", message)
    assert vm.eval("one:close() return os.execute 'true'") == (True, b"exit", 0)


def test_default_files_are_separate_for_each_application(vm: Vm) -> None:
    one, other = AppScope(None), AppScope(None)
    with running_app(one):
        vm.eval("f = io.popen 'echo mine' io.input(f)")
    with running_app(other):
        assert vm.eval("return io.input() == f") == (False,)
    with running_app(one):
        assert vm.eval("local line = io.read() f:close() io.input(io.stdin) return line") == (b"mine",)
        assert vm.eval("return io.input() == io.stdin") == (True,)


def test_tmpname_makes_a_file_for_this_user(vm: Vm) -> None:
    one, other = vm.eval("return os.tmpname(), os.tmpname()")
    assert isinstance(one, bytes)
    assert one != other
    facts = os.stat(one)
    assert (stat.S_IMODE(facts.st_mode), facts.st_size, stat.S_ISREG(facts.st_mode)) == (0o600, 0, True)
    assert vm.eval("return os.remove(...)", "=x", one) == vm.eval("return os.remove(...)", "=x", other) == (True,)
    assert not os.path.exists(one)


def test_remove_and_rename(vm: Vm, tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "full" / "x").mkdir(parents=True)
    source = """local folder = ... .. "/"
    local function both(f, ...) -- where it can wait, and where it can't
      local with, other = table.pack(f(...)), nil
      local args = table.pack(...)
      ;("x"):gsub("x", function() other = table.pack(f(table.unpack(args))) end)
      return with, other
    end
    for _, call in ipairs{{os.remove, "none"}, {os.remove, "full"}, {os.rename, "none", "other"}} do
      local with, other = both(call[1], folder .. call[2], call[3] and folder .. call[3])
      assert(with.n == 3 and other.n == 3 and not with[1])
      assert(with[2] == other[2] and with[3] == other[3], with[2])
      if call[2] == "none" then assert(with[3] == 2) end
    end
    assert(select(2, os.remove(folder .. "none")) == folder .. "none: No such file or directory")
    assert(select(2, os.rename(folder .. "none", folder)) == "No such file or directory")
    return os.rename(folder .. "a", folder .. "b"), os.remove(folder .. "b"), os.remove(folder .. "folder")"""
    assert vm.eval(source, "=x", bytes(tmp_path)) == (True, True, True)
    assert os.listdir(tmp_path) == ["full"]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("io.popen()", "bad argument #1 to 'popen' (string expected, got no value)"),
        ("io.popen('true', 'rw')", "bad argument #2 to 'popen' (invalid mode)"),
        ("io.popen('a\\0b')", "bad argument #1 to 'popen' (the string has a NUL character)"),
        ("os.execute('a\\0b')", "bad argument #1 to 'execute' (the string has a NUL character)"),
        ("os.execute {}", "bad argument #1 to 'execute' (string expected, got table)"),
        ("os.remove()", "bad argument #1 to 'remove' (string expected, got no value)"),
        ("os.rename('a')", "bad argument #2 to 'rename' (string expected, got no value)"),
        ("io.popen('cat', 'w'):write(nil)", "bad argument #1 to 'write' (string expected"),
        ("io.popen('true'):read('x')", "bad argument #1 to 'read' (invalid format)"),
        ("io.popen('true'):read({})", "bad argument #1 to 'read' (string expected, got table)"),
        ("io.popen('true'):read(-1)", "bad argument #1 to 'read'"),
        ("io.popen('true'):seek('x')", "bad argument #1 to 'seek' (invalid option 'x')"),
        ("io.popen('true').close()", "FILE* expected, got no value"),
        ("io.type()", "bad argument #1 to 'type' (value expected)"),
        ("(function() local f = io.popen 'true' f:close() f:close() end)()", "attempt to use a closed file"),
        ("io.popen('cat', 'w'):lines()()", "Bad file descriptor"),
    ],
)
def test_what_cannot_be(vm: Vm, call: str, error: str) -> None:
    with pytest.raises(LuaError, match=re.escape(error)):
        vm.eval(f"local _ = {call}")
    vm.eval("collectgarbage()")
