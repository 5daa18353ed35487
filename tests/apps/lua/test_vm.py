"""A Lua runtime: what Python and Lua give each other, libraries, and its end."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import gevent
import pytest

from smqrt.apps.lua import api
from smqrt.apps.lua.bridge import LuaError
from smqrt.apps.lua.lupa_internals import interrupt_of
from smqrt.apps.lua.vm import LuaFunction, Services, Vm, chunk_name, library_source, requirable_source
from smqrt.process.current_process import AppScope, running_app
from tests.support.waiting import wait_until

SCRIPT = """
import gc
import gevent
from smqrt.apps.lua import api
from smqrt.apps.lua.vm import Services
from smqrt.apps.lua.vm import Vm

def quiet_runtime():
    vm = Vm()
    api.install(vm, Services())
    vm.eval('''
    for i = 1, 50 do
      _G["timer" .. i] = ba.timer(function() return true end)
      _G["digest" .. i] = ba.crypto.hash("sha1")("x")
      _G["own" .. i] = setmetatable({}, {__gc = function() ba.rnd() trace("finalizer") ba.sleep(1) end})
    end
    ''')
    return vm

def busy_runtime():
    vm = quiet_runtime()
    vm.eval('''
    for i = 1, 50 do
      _G["timer" .. i]:set(1, i % 2 == 0)
      ba.thread.run(function() ba.sleep(100000) end)
    end
    ''')
    gevent.sleep(0.01)
    return vm

for _ in range(3):
    quiet_runtime()
    busy_runtime()
    gc.collect()
vm = busy_runtime()
keep = busy_runtime().namespace
print("ready")
"""


# Finalizers of Lua objects run when their Python half is being taken apart.
def test_runtimes_end_quietly_before_and_at_process_exit() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "ready\n"), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("version", "number"), [("5.4", 504), ("5.5", 505)])
def test_a_runtime_of_each_version(version: str, number: int, caplog: pytest.LogCaptureFixture) -> None:
    vm = Vm(version)
    api.install(vm, Services())
    assert vm.number == number
    assert vm.eval("return _VERSION, select(2, ba.version()), ba.json.encode{1.5}") == (
        f"Lua {version}".encode(),
        number,
        b"[1.5]",
    )
    assert interrupt_of(vm)
    assert caplog.records == []


def test_a_lua_half_gives_the_module_of_its_name(vm: Vm) -> None:
    vm.namespace("toy.part", {"two": lambda: 2}, source=b"local core, py = ... return {two = py.two}")
    assert vm.eval("return require('toy.part').two()") == (2,)


def test_a_namespace_without_a_lua_half_is_refused(vm: Vm) -> None:
    with pytest.raises(ValueError, match=r"lib/nothere\.lua"):
        vm.namespace("nothere", {})


def test_libraries_have_names_below_their_folder_only() -> None:
    assert library_source("core.require") == library_source("core/require")
    assert chunk_name("core.require") == b"@smqrt/apps/lua/lib/core/require.lua"
    for name in ("nothere", "", "../vm", "core..require", "/etc/passwd", "core.require.lua", "core\0"):
        assert library_source(name) is None, name


def test_applications_cannot_require_parts_of_the_runtime(vm: Vm) -> None:
    for name in ("core.require", "core/require", "ba.json", "ba/json"):
        assert library_source(name) is not None
        assert requirable_source(name) is None
        assert vm.eval("return pcall(require, ...)", "=x", name.encode())[0] is False
    assert requirable_source("serpent") is not None


def test_a_freed_function_cannot_be_called(vm: Vm) -> None:
    ref = vm.compile("return 7")
    assert vm.run(ref) == (7,)
    vm.free(ref)
    with pytest.raises(LuaError):
        vm.run(ref)
    assert vm.compile("return 8") != ref, "no number is given twice"


def test_a_function_that_fails_is_logged_by_its_name(vm: Vm, caplog: pytest.LogCaptureFixture) -> None:
    function = LuaFunction(
        vm, vm.compile("local name = ... if name == 'bad' then error 'oh' end return name, 2"), "the hook"
    )
    assert function("ä") == "ä".encode()
    assert function("bad") is None
    assert function.run("the late hook", "bad") is None
    assert [message.partition(":")[0] for message in caplog.messages] == ["the hook failed", "the late hook failed"]


def test_a_function_that_is_forgotten_is_freed(vm: Vm) -> None:
    ref = vm.compile("return 7")
    function = LuaFunction(vm, ref)
    assert function() == 7
    del function

    def is_freed() -> bool:
        try:
            vm.run(ref)
        except LuaError:
            return True
        return False

    wait_until(is_freed)


def test_waiting_names_line_call_and_duration(vm: Vm) -> None:
    vm.start(vm.compile("\nba.sleep(60000)", "@app/.preload"))
    gevent.sleep(0)
    [line] = vm.waiting()
    assert re.fullmatch(r"app/\.preload:2 in \S+ for \d+\.\d s", line), line


def test_code_knows_its_application_by_number(services: Services) -> None:
    named, other = AppScope(Path("/one")), AppScope(Path("/two"))
    services.scopes[7] = named
    assert services.known_application() is False
    assert services.scope_of(7) is named
    assert services.scope_of(None) is None
    with running_app(named):
        assert services.known_application() == 7
        assert services.scope_of(8) is named
    with running_app(other):
        assert services.known_application() is None
