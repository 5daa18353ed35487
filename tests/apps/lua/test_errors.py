"""Errors name the author's file and line, and a Python exception never reaches Lua as more than text."""

from __future__ import annotations

import logging

import pytest

from smqrt.apps.lua.bridge import LuaError, fail
from smqrt.apps.lua.vm import Vm
from smqrt.errors import ArgumentError
from tests.apps.lua.recorder import Recorder


def error_of(vm: Vm, source: str) -> LuaError:
    with pytest.raises(LuaError) as caught:
        vm.eval(source, "@shop/index.lsp")
    return caught.value


def test_a_runtime_error_has_message_and_traceback(vm: Vm) -> None:
    error = error_of(vm, "local function inner(x)\n  return x.y.z\nend\n\nlocal v = inner({})")
    assert error.message == "shop/index.lsp:2: attempt to index a nil value (field 'y')"
    lines = error.traceback.split("\n")
    assert any("shop/index.lsp:5: in main chunk" in line for line in lines)
    assert "core/activity.lua" not in error.traceback


def test_a_syntax_error_names_file_and_line(vm: Vm) -> None:
    assert error_of(vm, "local a = 1\nlocal b = = 2").message.startswith("shop/index.lsp:2: unexpected symbol near '='")


def test_errors_that_are_no_strings(vm: Vm) -> None:
    assert error_of(vm, "error({code = 1})").message == "(error object is a table value)"
    assert error_of(vm, "error()").message == "(error object is a nil value)"
    assert error_of(vm, "error(12)").message == "12"
    assert error_of(vm, "error(setmetatable({}, {__tostring = function() return 'own' end}))").message == "own"


def test_an_error_within_tostring_is_only_an_error(vm: Vm) -> None:
    error_of(vm, "error(setmetatable({}, {__tostring = function() error('again') end}))")
    assert vm.eval("return 1") == (1,)


def test_endless_recursion_is_an_error_and_not_the_end(vm: Vm) -> None:
    assert "stack overflow" in str(error_of(vm, "local function f() return 1 + f() end return f()"))
    assert "overflow" in str(error_of(vm, "local function f() return coroutine.wrap(f)() end return f()"))
    assert vm.eval("return 1") == (1,)


def test_an_error_in_a_wrapped_coroutine_has_its_line(vm: Vm) -> None:
    error = error_of(
        vm, "local function deep()\n error('inside')\nend\nlocal w = coroutine.wrap(function() deep() end)\nw()"
    )
    assert error.message == "shop/index.lsp:2: inside"
    assert "in upvalue 'deep'" in str(error)
    assert "shop/index.lsp:5:" in str(error)


def test_pcall_around_a_wrapped_coroutine_gets_the_plain_message(vm: Vm) -> None:
    source = "return pcall(coroutine.wrap(function() error('plain', 0) end))"
    assert vm.eval(source) == (False, b"plain")


HALF = (
    b"local core, py = ...\nhalf = {}\nfor name, fn in pairs(py) do half[name] = function(...) return fn(...) end end"
)


@pytest.fixture
def half(vm: Vm) -> None:
    def wrong(*_: object) -> None:
        raise ArgumentError("bad argument #1 to 'wrong' (string expected, got table)")

    def crash(*_: object) -> None:
        raise KeyError("secret")

    def absent(*_: object) -> object:
        return fail("notfound", "more", 3)

    functions = {"wrong": wrong, "crash": crash, "absent": absent}
    vm.namespace("half", functions, {"b" + name: fn for name, fn in functions.items()}, source=HALF)


@pytest.mark.parametrize("name", ["wrong", "bwrong"])
def test_argument_errors_name_the_line_of_the_application(vm: Vm, half: None, name: str) -> None:
    error = error_of(vm, f"local x = 1\n\nhalf.{name}({{}})")
    assert error.message == "shop/index.lsp:3: bad argument #1 to 'wrong' (string expected, got table)"


@pytest.mark.parametrize("name", ["wrong", "bwrong"])
def test_in_tail_calls_errors_name_the_outer_caller(vm: Vm, half: None, name: str) -> None:
    error = error_of(vm, f"local function f()\n  return half.{name}()\nend\nlocal v = f()")
    assert error.message.startswith("shop/index.lsp:4: ")


@pytest.mark.parametrize("name", ["crash", "bcrash"])
def test_unexpected_exceptions_are_text_and_a_logged_traceback(
    vm: Vm, half: None, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "smqrt.lua"):
        kind, message = vm.eval(f"local ok, e = pcall(function()\n half.{name}() end) return type(e), e", "@a.lua")
    assert (kind, message) == (b"string", b"a.lua:2: internal error: KeyError: 'secret'")
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("name", ["absent", "babsent"])
def test_a_failure_is_nil_and_a_word(vm: Vm, half: None, name: str) -> None:
    assert vm.eval(f"return half.{name}()") == (None, b"notfound", b"more", 3)


def test_many_errors_leave_nothing_behind(vm: Vm, recorder: Recorder, half: None) -> None:
    ref = vm.compile("for i = 1, 100 do pcall(half.wrong) pcall(half.bwrong) end collectgarbage() collectgarbage()")
    vm.run(ref)
    before = vm.memory_bytes()
    for _ in range(20):
        vm.run(ref)
    assert vm.memory_bytes() < before + 20_000


def test_type_answers_userdata_for_objects_of_the_api(vm: Vm, recorder: Recorder) -> None:
    source = """
    local Thing = test.core.class("thing", {name = function(self) return "n" .. self.handle end})
    local thing = setmetatable({handle = 4}, Thing)
    return type(thing), thing:name(), (tostring(thing):gsub("0x.*", "")), type({}), type(nil), type(print),
      pcall(type), getmetatable(thing)
    """
    assert vm.eval(source) == (
        b"userdata", b"n4", b"thing: ", b"table", b"nil", b"function",
        False, b"thing",
    )  # fmt: skip
    assert vm.eval("return select(2, pcall(type))")[0].endswith(b"bad argument #1 to 'type' (value expected)")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("ba.sleep('x')", "bad argument #1 to 'sleep' (number expected, got string)"),
        ("ba.timer(1)", "bad argument #1 to 'timer' (function expected, got number)"),
        ("ba.timer(print).set({}, 1)", "bad argument #1 to 'set' (timer expected, got table)"),
        ("ba.b64encode()", "bad argument #1 to 'b64encode' (string expected, got no value)"),
        ("ba.timer(print):set(1, 1)", "bad argument #3 to 'set' (boolean expected, got number)"),
        ("ba.crypto.hash('md4')", "unknown hash algorithm 'md4': use one of md5, sha1, sha256, sha384, sha512"),
    ],
)
def test_wrong_arguments_raise_at_the_line_of_the_application(vm: Vm, call: str, message: str) -> None:
    assert error_of(vm, f"\n{call}").message == f"shop/index.lsp:2: {message}"
