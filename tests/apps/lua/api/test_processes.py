"""ba.forkpty: children on a pseudo terminal, what they say, and that nothing of them is left."""

from __future__ import annotations

import gc
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import gevent
import pytest

from smqrt.apps.lua.api import processes
from smqrt.apps.lua.bridge import LuaError
from smqrt.apps.lua.vm import Services, Vm
from smqrt.child_processes import processes as pty
from smqrt.process.current_process import AppScope, running_app
from tests.apps.lua.app_server import AppServer
from tests.apps.lua.recorder import Recorder
from tests.support.waiting import wait_until

ALL = """
function all(pty) -- what a child says until its end
  local text = ""
  while true do
    local data, word = pty:read()
    if not data then assert(word == "terminated") return text end
    text = text .. data
  end
end
function sh(...) return assert(ba.forkpty("sh", "-c", ...)) end
"""


def children() -> set[int]:
    """The living and the dead that nobody has waited for."""
    return {int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()}


def opened() -> set[tuple[str, str]]:
    """The descriptors of this process, with what each of them is."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the list itself
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


def descriptors() -> int:
    return len(opened())


@pytest.fixture(autouse=True)
def nothing_is_left(vm: Vm, services: Services) -> Iterator[None]:
    """There are no new children and descriptors, however the test went; those of tests before may end meanwhile."""
    vm.eval(ALL)
    gc.collect()
    children_before, opened_before = children(), opened()
    yield
    services.processes.shutdown()
    gevent.sleep(0)
    gc.collect()
    assert (children() - children_before, opened() - opened_before) == (set(), set())


def test_output_of_a_child(vm: Vm) -> None:
    source = """local pty = sh("echo out; echo err >&2; exit 3")
    assert(type(pty) == "userdata")
    return all(pty), pty:close(true), pty:close(), pty:close(true)"""
    assert vm.eval(source) == (b"out\nerr\n", 3, False, 3)


def test_a_terminal_is_raw_without_stty(vm: Vm) -> None:
    source = """local function said(stty)
      local pty = ba.forkpty({stty = stty}, "sh", "-c", "echo a; tty >&2; read line; echo $line")
      assert(pty:write "b\\n")
      return (all(pty):gsub("/dev/pts/%d+", "PTY"))
    end
    return said(nil), said(false), said(true), said "-echo", said {"-echo", "-onlcr"}"""
    raw, given_false, usual, silent, bare = vm.eval(source)
    assert raw == given_false == b"a\nPTY\nb\n"
    assert isinstance(usual, bytes)
    assert sorted(usual.split()) == [b"PTY", b"a", b"b", b"b"]  # one of them is the echo
    assert usual.count(b"\r\n") == 4
    assert silent == b"a\r\nPTY\r\nb\r\n"
    assert bare == raw


def test_environment_and_descriptors_of_a_child(vm: Vm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "kept")
    monkeypatch.setenv("GONE", "gone")
    spare = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(spare, True)
    source = """local script = 'echo "$0 $1 $KEPT $GONE. $NEW $OTHER"; ulimit -n; '
      .. 'grep SigIgn /proc/$$/status; ls -l /proc/$$/fd'
    local env = {NEW = "new", GONE = false, "OTHER=a=b"}
    return all(assert(ba.forkpty({env = env}, "sh", "-c", script, "zero", "one")))"""
    text = vm.eval(source)[0]
    os.close(spare)
    assert isinstance(text, bytes)
    lines = text.splitlines()
    assert lines[:2] == [b"zero one kept . new a=b", b"1024"]
    assert int(lines[2].split()[1], 16) & 0x7FFFFFFF == 0  # those above are of the C library
    opened = [line.split(b" -> ")[1] for line in lines[3:] if b" -> " in line]
    assert len(opened) == 3
    assert len({*opened}) == 1


def test_arg0_and_a_session_of_its_own(vm: Vm) -> None:
    source = """local command = "ps -o sid=,pgid=,pid=,tty=,args= -p $$"
    return all(assert(ba.forkpty({arg0 = "-other"}, "sh", "-c", command)))"""
    session, group, process, terminal, *args = vm.eval(source)[0].split()  # type: ignore[union-attr]
    assert session == group == process
    assert terminal.startswith(b"pts/")
    assert args[0] == b"-other"


def test_window_size(vm: Vm) -> None:
    source = """local pty = sh "trap 'stty size; exit' WINCH; echo ready; while :; do sleep 0.01; done"
    local first = pty:read()
    local rows, columns = pty:winsize()
    assert(pty:winsize(10, 20))
    return first, rows, columns, all(pty), pty:close(true)"""
    assert vm.eval(source) == (b"ready\n", 24, 80, b"10 20\n", 0)


def test_ends(vm: Vm) -> None:
    source = """local pty = assert(ba.forkpty "cat")
    assert(pty:write "x" and pty:read() == "x")
    local ok, status = pty:terminate()
    assert(pty:read() == nil and select(2, pty:read()) == "terminated")
    assert(select(2, pty:write "x") == "terminated" and select(2, pty:winsize(1, 1)) == "terminated")
    assert(pty:pause() and select(2, pty:terminate()) == status and pty:close() == false)
    local again = assert(ba.forkpty "cat")
    assert(again:write "x" and again:read() == "x")
    return ok, status, again:close(true)"""
    assert vm.eval(source) == (True, 128 + 15, 128 + 1)


def test_a_stubborn_child_is_killed_with_what_it_began(vm: Vm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pty, "HANG_UP_S", 0.2)
    source = """stubborn = sh "trap '' HUP TERM; sleep 1000 & echo $!; while :; do sleep 0.05; done"
    local pid = stubborn:read()
    return pid, stubborn:terminate()"""
    pid, ok, status = vm.eval(source)
    assert (ok, status) == (True, 128 + 9)
    wait_until(lambda: not Path(f"/proc/{int(pid or 0)}").exists())


def test_orphans_do_not_delay_the_end_of_output(vm: Vm) -> None:
    """A grandchild keeps the terminal open."""
    source = """local pty = sh "trap '' HUP; (sleep 30 & echo $!); echo done; exit 5"
    local text = all(pty)
    return text, pty:close(true)"""
    text, status = vm.eval(source)
    assert isinstance(text, bytes)
    assert (text.split()[1], status) == (b"done", 5)
    os.kill(int(text.split()[0]), 9)


def test_output_is_bounded_and_the_child_waits(vm: Vm, services: Services) -> None:
    vm.eval('pty = sh "yes"')
    child = services.processes._ptys[max(services.processes._ptys)]
    wait_until(lambda: child._out.full)
    gevent.sleep(0.05)
    assert len(child._out.buffer) == pty.MAX_BUFFERED_BYTES
    first, more = vm.eval("return #pty:read(), #pty:read() > 0")
    assert (first, more) == (pty.MAX_BUFFERED_BYTES, True)


def test_output_before_the_exit_is_readable(vm: Vm, services: Services) -> None:
    vm.eval('pty = sh "echo last; exec sleep 100"')
    child = services.processes._ptys[max(services.processes._ptys)]
    wait_until(lambda: len(child._out.buffer) == 5)
    assert vm.eval("pty:close() return (pty:read()), pty:read()") == (b"last\n", None, b"terminated")


def test_a_paused_child_triggers_no_callbacks(vm: Vm, recorder: Recorder, services: Services) -> None:
    vm.eval("""pty = ba.forkpty(function(pty) test.record(pty:read()) end, "sh", "-c", "echo a; read x; echo b")""")
    wait_until(lambda: len(recorder.seen) == 1)
    vm.eval('pty:pause() pty:write "\\n"')
    child = services.processes._ptys[max(services.processes._ptys)]
    wait_until(lambda: child.status == 0)
    gevent.sleep(2.5 * pty.LATE_OUTPUT_S)
    assert len(recorder.seen) == 1
    vm.eval("pty:pause(false)")
    wait_until(lambda: recorder.seen[-1] == (None, b"terminated"))


def test_a_read_has_a_time_out_in_milliseconds(vm: Vm, services: Services) -> None:
    vm.eval('pty = sh "read x; echo $x; read x; exit 4"')
    begin = time.monotonic()
    assert vm.eval("return pty:read(20)") == (None, b"timeout")
    assert 0.015 < time.monotonic() - begin < 5
    assert vm.eval("return pty:read(0)") == (None, b"timeout")
    assert vm.eval("return pty:read(-1)") == (None, b"timeout")
    assert vm.eval('pty:write "a\\n" return pty:read(20000)') == (b"a\n", False)
    assert vm.eval('pty:write "\\n" return pty:read(20000)') == (None, b"terminated")
    assert vm.eval("return pty:close(true)") == (4,)


def test_expired_reads_leave_nothing(vm: Vm, services: Services, recorder: Recorder) -> None:
    """Also behind one that waits without an end."""
    vm.eval('pty = sh "read x; echo $x" ba.thread.run(function() test.record(pty:read()) end)')
    gevent.sleep(0)
    vm.eval("for _ = 1, 50 do assert(not pty:read(0)) end")
    assert len(services.processes._ptys[max(services.processes._ptys)]._reads) <= 2
    vm.eval('pty:write "all of it\\n"')
    wait_until(lambda: recorder.seen == [(b"all of it\n", False)])


def test_data_has_its_stream_and_arrives_in_order(vm: Vm) -> None:
    source = """local seen = {}
    local pty = ba.forkpty({async = function() end}, "sh", "-c",
      "echo 1; read x; echo 2 >&2; read x; echo 3")
    for _ = 1, 3 do
      local data, is_stderr = pty:read()
      assert(#data > 0)
      seen[#seen + 1] = (is_stderr and "e" or "o") .. data:sub(1, 1)
      pty:write "\\n"
    end
    return table.concat(seen, " "), (select(2, ba.forkpty("sh", "-c", "echo x >&2"):read()))"""
    assert vm.eval(source) == (b"o1 e2 o3", False)


def test_single_reads_get_both_streams_and_the_end(vm: Vm, recorder: Recorder, services: Services) -> None:
    """Both had arrived before it was called."""
    vm.eval("""pty = ba.forkpty(function(pty) test.record(pty:read()) end, "sh", "-c", "read x; echo a; echo b >&2")
    pty:pause() pty:write "\\n" """)
    child = services.processes._ptys[max(services.processes._ptys)]
    wait_until(lambda: child.status == 0)
    vm.eval("pty:pause(false)")
    wait_until(lambda: len(recorder.seen) == 3)
    assert sorted(recorder.seen[:2]) == [(b"a\n", False), (b"b\n", True)]
    assert recorder.seen[2] == (None, b"terminated")


def test_pause(vm: Vm, services: Services) -> None:
    vm.eval('pty = sh "while :; do echo x; sleep 0.01; done" pty:read() pty:pause()')
    child = services.processes._ptys[max(services.processes._ptys)]
    before = len(child._out.buffer)
    gevent.sleep(0.1)
    assert len(child._out.buffer) == before
    arrivals = child.arrivals
    vm.eval("pty:pause(false)")
    wait_until(lambda: child.arrivals > arrivals)


def test_input_is_bounded_by_time(vm: Vm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pty, "WRITE_S", 0.1)
    assert vm.eval('return sh("sleep 100"):write(("x"):rep(1 << 20))') == (None, b"timeout")


def test_large_input_and_output(vm: Vm, recorder: Recorder) -> None:
    source = """local pty = assert(ba.forkpty "cat")
    local size = 1 << 20
    ba.thread.run(function() test.record(pty:write(("x"):rep(size))) end)
    local read = 0
    while read < size do read = read + #pty:read() end
    return read"""
    assert vm.eval(source) == (1 << 20,)
    wait_until(lambda: recorder.seen == [True])


def test_async_callback_that_reads_to_the_end(vm: Vm, recorder: Recorder) -> None:
    vm.eval("""
    ba.forkpty({async = function(pty)
      assert(pty:write "in\\n")
      local out, err, others = "", "", nil
      while true do
        local data, b = pty:read()
        if not data then others = b break end
        if b then err = err .. data else out = out .. data end
      end
      test.record(out, err, others, pty:close(true))
    end}, "sh", "-c", "read x; echo out $x; echo err >&2; exit 7")""")
    wait_until(lambda: recorder.seen == [(b"out in\n", b"err\n", b"terminated", 7)])


def test_async_callback_that_is_called_for_each_arrival(vm: Vm, recorder: Recorder) -> None:
    vm.eval("""ba.forkpty(function(pty) test.record(pty:read()) end, "sh", "-c", "echo a; read x; echo b >&2")""")
    wait_until(lambda: recorder.seen == [(b"a\n", False)])
    vm.eval("collectgarbage()")  # the callback keeps it
    vm.eval("ba.forkpty(function(pty) first = pty pty:read() end, 'cat')")
    assert len(recorder.seen) == 1


def test_async_callback_gets_all_of_it(vm: Vm, recorder: Recorder) -> None:
    vm.eval("""ba.forkpty(function(pty) test.record(pty:read()) end, "sh", "-c", "echo a; sleep 0.1; echo b >&2")""")
    wait_until(lambda: recorder.seen[-1:] == [(None, b"terminated")])
    assert recorder.seen == [(b"a\n", False), (b"b\n", True), (None, b"terminated")]


def test_async_callback_that_never_reads(vm: Vm, recorder: Recorder) -> None:
    before = descriptors()
    vm.eval("""ba.forkpty(function() test.record(1) end, "echo", "much")""")
    wait_until(lambda: len(recorder.seen) >= 2)

    def is_freed() -> bool:
        vm.eval("collectgarbage()")
        return descriptors() == before

    wait_until(is_freed)


def test_async_callback_that_fails(vm: Vm, caplog: pytest.LogCaptureFixture) -> None:
    vm.eval("""pty = ba.forkpty(function(pty) pty:read() error "no" end, "cat") pty:write "x" """)
    wait_until(lambda: "Pty callback failed" in caplog.text)
    assert vm.eval("return pty:read()") == (None, b"terminated")


def test_the_end_of_an_application_ends_its_children(vm: Vm) -> None:
    app = AppScope(None)
    with running_app(app):
        vm.eval('pty = sh "echo ready; exec sleep 1000"')
    assert vm.eval("return pty:read()") == (b"ready\n", False)
    waiting = gevent.spawn(vm.eval, "return pty:read()")
    gevent.sleep(0)
    app.close()
    assert waiting.get(timeout=5) == (None, b"terminated")
    assert vm.eval("return pty:close(true)") == (128 + 1,)


def test_an_unreferenced_child_is_ended(vm: Vm) -> None:
    before = children()
    vm.eval('sh "exec sleep 1000"; (function() local pty <close> = sh "exec sleep 1000" end)()')
    vm.eval("collectgarbage() collectgarbage()")
    wait_until(lambda: children() == before)


def test_shutdown_waits_for_unreferenced_children(vm: Vm, services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pty, "HANG_UP_S", 0.1)
    before = children()
    vm.eval(
        """local pty = sh "trap '' HUP; echo ready; while :; do sleep 0.05; done" assert(pty:read() == "ready\\n")"""
    )
    vm.eval("collectgarbage() collectgarbage()")
    services.processes.shutdown()
    assert children() == before


def test_faults_leave_nothing(vm: Vm, recorder: Recorder) -> None:
    """The applications of these children fail, in every way there is; the fixture looks for what is left."""
    before = descriptors()
    vm.eval("""ba.thread.configure(9)
    local function job(f) ba.thread.run(function() test.record(pcall(f)) end) end
    for _ = 1, 4 do
      job(function() local pty = sh "echo a; exit 1" pty:read() error "forgotten" end)
      job(function() local pty <close> = assert(ba.forkpty "cat") error "closed" end)
      local function fails(pty) pty:read() error "in the callback" end
      job(function() local pty = ba.forkpty(fails, "cat") pty:write "x" end)
      job(function() local pty = assert(ba.forkpty "cat")
        ba.thread.run(function() pty:terminate() end) pty:read() error "gone" end)
    end""")

    def is_over() -> bool:
        vm.eval("collectgarbage()")
        return len(recorder.seen) == 16 and descriptors() == before

    wait_until(is_over, recorder.seen)


def test_children_are_limited(vm: Vm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MAX_PER_APP", 2)
    source = """local one, two = ba.forkpty "cat", ba.forkpty "cat"
    local none, word, detail = ba.forkpty "cat"
    one:terminate()
    return none, word, detail, ba.forkpty "cat" ~= nil"""
    assert vm.eval(source) == (None, b"mem", b"too many children: 2 of an application, 128 in all", True)


def test_many_at_once(vm: Vm) -> None:
    vm.eval("""many = {}
    for at = 1, 10 do many[at] = sh("read x; echo $x") end
    for at, pty in ipairs(many) do pty:write(at .. "\\n") end
    for at, pty in ipairs(many) do assert(all(pty) == at .. "\\n" and pty:close(true) == 0) end""")


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ('ba.forkpty "no such command"', (None, b"notfound", b"no such command cannot be run")),
        ('ba.forkpty "/etc/passwd"', (None, b"noaccess", b"/etc/passwd cannot be run")),
        ("ba.forkpty()", "bad argument #1 to 'forkpty'"),
        ("ba.forkpty({})", "(command expected)"),
        ("ba.forkpty({async = 1}, 'ls')", "bad argument #async"),
        ("ba.forkpty({env = 1}, 'ls')", "bad argument #env"),
        ("ba.forkpty({env = {['a=b'] = 'c'}}, 'ls')", "the name of a variable"),
        ("ba.forkpty({stty = 'blue'}, 'ls')", "unknown stty word 'blue'"),
        ("ba.forkpty('ls', 'a\\0b')", "NUL"),
        ("ba.forkpty('ls', {})", "bad argument #2 to 'forkpty'"),
        ("ba.forkpty('true'):read(true)", "bad argument #1 to 'read' (number expected, got boolean)"),
        ("ba.forkpty('true'):write({})", "bad argument #1 to 'write'"),
        ("ba.forkpty('true'):winsize(0, 1)", "rows and columns must be"),
        ("ba.forkpty('true'):close(1)", "bad argument #1 to 'close'"),
    ],
)
def test_what_cannot_be(vm: Vm, call: str, expected: object) -> None:
    if isinstance(expected, tuple):
        assert vm.eval(f"return {call}") == expected
    else:
        with pytest.raises(LuaError, match=re.escape(str(expected))):
            vm.eval(f"local _ = {call}")


@pytest.mark.parametrize("where", ["ba.thread.run(work)", "ba.timer(work):set(1, true)", "ba.socket.event(work)"])
def test_children_of_threads_timers_cosockets_end_with_the_application(server: AppServer, where: str) -> None:
    before = children()
    preload = f"function work() _G.child = ba.forkpty('/bin/sleep', '1000') end {where}"
    application = server.app({".preload": preload})
    wait_until(lambda: server.vm.eval("return child ~= nil") == (True,))
    application.unload()
    wait_until(lambda: children() <= before)
    wait_until(lambda: server.vm.eval("return child:close(true)")[0] is not None, patience_s=5)
    assert server.vm.eval("return child:read()") == (None, b"terminated")


class Running:
    """A child that runs until the test ends it."""

    status: int | None = None

    def close(self) -> None:
        self.status = 0


def test_applications_and_the_server_have_limits_of_children(vm: Vm, services: Services, monkeypatch: Any) -> None:
    monkeypatch.setattr(processes, "MAX_PER_APP", 1)
    monkeypatch.setattr(processes, "MAX_IN_ALL", 2)
    binding = processes.ProcessBinding(vm, services)
    one, two = AppScope(Path("/one")), AppScope(Path("/two"))
    first, second = Running(), Running()
    binding.keep(first, one)
    assert [bool(binding.refusal(owner)) for owner in (one, two, None)] == [True, False, False]
    binding.keep(second, two)
    assert binding.refusal(None) == "too many children: 1 of an application, 2 in all"
    one.close()
    assert first.status == 0
    assert [bool(binding.refusal(owner)) for owner in (one, two, None)] == [False, True, False]
    binding.shutdown()
    assert second.status == 0


def test_a_place_is_one_start_of_an_application(services: Services, vm: Vm) -> None:
    shells = processes.ShellBinding(services.processes, services)
    started, again = AppScope(Path("/one")), AppScope(Path("/one"))
    services.scopes[1] = started
    first = shells.place(1)
    assert first == shells.place(1) > 0
    services.scopes[1] = again
    assert shells.place(1) not in (0, first)
    assert shells.place(None) == 0


def test_a_temporary_file_is_for_this_user_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    name = processes.make_temporary()
    assert isinstance(name, bytes)
    assert os.stat(name).st_mode & 0o777 == 0o600
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    assert processes.make_temporary() is None
