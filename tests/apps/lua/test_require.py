"""require: the search order, errors, and modules of applications."""

from __future__ import annotations

import pytest

from smqrt.apps.lua.bridge import LuaError
from smqrt.apps.lua.vm import Vm
from tests.apps.lua.recorder import Recorder
from tests.support.waiting import wait_until

LOADER = """
test.core.add_loader(function(path)
  test.sleep(0.001)
  local source = modules[path]
  if source then return source, "@app/.lua/" .. path .. ".lua" end
end)
"""


@pytest.fixture
def modules(vm: Vm, recorder: Recorder) -> None:
    vm.eval("modules = {}")
    vm.eval(LOADER)


def test_a_module_of_an_application_is_loaded_once(vm: Vm, modules: None) -> None:
    vm.eval("modules['shop/cart'] = 'loads = (loads or 0) + 1 return {name = ..., file = select(2, ...)}'")
    assert vm.eval("local m = require 'shop.cart' return m.name, m.file, require 'shop.cart' == m, loads") == (
        b"shop.cart",
        b"@app/.lua/shop/cart.lua",
        True,
        1,
    )


def test_slashes_work_like_dots(vm: Vm, modules: None) -> None:
    vm.eval("modules['shop/cart'] = 'return 5'")
    assert vm.eval("return (require 'shop/cart')") == (5,)


def test_a_module_without_a_value_is_true(vm: Vm, modules: None) -> None:
    vm.eval("modules.quiet = ''")
    assert vm.eval("return (require 'quiet')") == (True,)


def test_a_module_that_is_false_stays_false(vm: Vm, modules: None) -> None:
    vm.eval("modules.no = 'return false'")
    assert vm.eval("return (require 'no'), package.loaded.no") == (False, False)


def test_preload_comes_first(vm: Vm, modules: None) -> None:
    vm.eval("modules.x = 'return 1' package.preload.x = function(name, extra) return name .. extra end")
    assert vm.eval("return (require 'x')") == (b"x:preload:",)


def test_a_file_of_package_path_is_found(vm: Vm, tmp_path: object) -> None:
    source = """
    local folder = ...
    local file = io.open(folder .. "/fromdisk.lua", "w") file:write("return {...}") file:close()
    package.path = folder .. "/?.lua"
    return table.unpack((require "fromdisk"))
    """
    name, file = vm.eval(source, "=x", str(tmp_path).encode())
    assert (name, file) == (b"fromdisk", f"{tmp_path}/fromdisk.lua".encode())


def test_a_missing_module_is_an_error_at_its_require(vm: Vm, modules: None) -> None:
    with pytest.raises(LuaError) as caught:
        vm.eval("\nrequire 'absent'", "@app/.preload")
    message = caught.value.message
    assert message.startswith("app/.preload:2: module 'absent' not found:")
    assert "'.lua/absent.lua' in an application that has called mako.createloader(io)" in message
    assert "appreq 'absent'" in message
    assert "/usr/" not in message


def test_a_module_with_a_syntax_error_names_its_file(vm: Vm, modules: None) -> None:
    vm.eval("modules.bad = 'local x = 1\\nlocal = 2'")
    ok, message = vm.eval("return pcall(require, 'bad')")
    assert not ok
    assert message.startswith(b"error loading module 'bad':\n\tapp/.lua/bad.lua:2: <name> expected")


def test_a_module_that_fails_is_tried_again(vm: Vm, modules: None) -> None:
    vm.eval("modules.late = 'assert(ready, \"not ready\") return 1'")
    assert vm.eval("return pcall(require, 'late')")[0] is False
    assert vm.eval("ready = true return (require 'late')") == (1,)


def test_a_module_that_requires_itself_is_an_error(vm: Vm, modules: None) -> None:
    vm.eval("modules.a = 'return require \"b\"' modules.b = 'return require \"a\"'")
    ok, message = vm.eval("return pcall(require, 'a')")
    assert not ok
    assert b"loop" in message


def test_two_activities_that_require_a_slow_module_share_it(vm: Vm, modules: None) -> None:
    vm.eval("modules.slow = 'loads = (loads or 0) + 1 test.sleep(0.02) return {}'")
    ref = vm.compile("slow = slow or {} local m = require 'slow' slow[#slow + 1] = m")
    vm.start(ref)
    vm.start(ref)
    wait_until(lambda: vm.eval("return #(slow or {})") == (2,))
    assert vm.eval("return loads, #slow, slow[1] == slow[2]") == (1, 2, True)
