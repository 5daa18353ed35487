"""`require "serpent"`: tables as Lua text (spec: bas-api §12, §17)."""

from __future__ import annotations

import pytest

from smqrt.apps.lua.bridge import LuaError
from smqrt.apps.lua.vm import Vm
from tests.apps.lua.versions import by_version

SORTED = "sortkeys = function(k) table.sort(k, function(a, b) return tostring(a) > tostring(b) end) end"
ONE = "local serpent = require 'serpent' "


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("nil", "nil"),
        ("'a\\n\"\\r\\0b'", '"a\\n\\"\\13\\0b"'),
        ("{1, 2, nil, 4}", by_version("{1, 2, nil, 4}", "{1, 2, [4] = 4}")),
        ("{0.1, 1e100, 2.0, -0.0, 2^53, 1/3}", "{0.1, 1e+100, 2.0, -0.0, 9007199254740992.0, 0.3333333333333333}"),
        ("{1/0, -1/0, 0/0}", "{1/0, -1/0, 0/0}"),
        ("{math.mininteger, -3}", "{0x8000000000000000, -3}"),
        ("{a = 1, ['b c'] = 2, ['end'] = 3, [true] = 4}", '{a = 1, ["b c"] = 2, ["end"] = 3, [true] = 4}'),
        ("{a = 1, [-1] = 5}", "{[-1] = 5, a = 1}"),
        ("{i10 = 1, i9 = 2, i009 = 3}", "{i009 = 3, i9 = 2, i10 = 1}"),
        ("{print, math.sin, function() end}", "{print, math.sin, function() --[[..skipped..]] end}"),
        ("{[{1}] = 2}", "{[{1}] = 2}"),
        ("setmetatable({}, {__tostring = function() return 'I' end})", '"I"'),
        ("setmetatable({}, {__serialize = function() return {5} end})", "{5}"),
    ],
)  # fmt: skip
def test_values(vm: Vm, value: str, text: str) -> None:
    assert vm.eval(f"{ONE} return serpent.line({value}, {{comment = false}})") == (text.encode(),)


def test_block_indents_and_comments(vm: Vm) -> None:
    (text,) = vm.eval(f"{ONE} return (serpent.block({{1, a = {{b = {{}}}}}}):gsub('0x%x+', 'X'))")
    assert text == b"{\n  1,\n  a = {\n    b = {} --[[table: X]]\n  } --[[table: X]]\n} --[[table: X]]"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("compact = true", "{1,2,c={d={3}},x=1.5}"),
        ("maxlevel = 1", "{1, 2, c = {}, x = 1.5}"),
        ("maxnum = 3", "{1, 2, c = {d = {3}}}"),
        ("maxlength = 1", "{1}"),
        ("keyallow = {c = true, d = true}", "{c = {d = {}}}"),
        ("keyignore = {c = true}", "{1, 2, x = 1.5}"),
        ("valignore = {[1] = true}, keyignore = {c = true}", "{2, x = 1.5}"),
        ("valtypeignore = {table = true}", "{1, 2, x = 1.5}"),
        ("numformat = '%.3f'", "{1, 2, c = {d = {3}}, x = 1.500}"),
        ("indent = ' '", "{\n 1,\n 2,\n c = {\n  d = {\n   3\n  }\n },\n x = 1.5\n}"),
        ("custom = function(tag, _, body) return tag .. '<' .. body .. '>' end", "<1, 2, c = <d = <3>>, x = 1.5>"),
        (SORTED, "{x = 1.5, c = {d = {[1] = 3}}, [2] = 2, [1] = 1}"),
        ("comment = 1", None),
    ],
)  # fmt: skip
def test_options(vm: Vm, options: str, text: str | None) -> None:
    (found,) = vm.eval(
        f"{ONE} return serpent.line({{1, 2, c = {{d = {{3}}}}, x = 1.5}}, {{comment = false, {options}}})"
    )
    assert isinstance(found, bytes)
    if text is None:
        assert found.count(b"--[[table") == 1
    else:
        assert found.decode() == text


def test_what_is_dumped_is_loaded(vm: Vm) -> None:
    vm.eval(f"""{ONE}
    local t = {{1, nil, 3, a = {{b = {{1.5, 1/0}}}}, [true] = false, ['x y'] = 'z'}}
    t.self, t.again, t[t.a] = t, t.a.b, 'by table'
    t[{{'key'}}] = {{t}}
    local ok, copy = serpent.load(serpent.dump(t))
    assert(ok and copy ~= t and copy.self == copy and copy.again == copy.a.b and copy[copy.a] == 'by table')
    assert(copy[1] == 1 and copy[2] == nil and copy[3] == 3 and copy[true] == false and copy['x y'] == 'z')
    assert(copy.a.b[1] == 1.5 and copy.a.b[2] == 1/0)
    for key, value in pairs(copy) do
      if type(key) == 'table' and key ~= copy.a then assert(key[1] == 'key' and value[1] == copy) end
    end
    """)
    assert vm.eval(f"{ONE} return serpent.dump({{a = 1}})") == (b"do local _={a=1};return _;end",)


def test_more_keys_that_are_tables_than_lua_has_locals(vm: Vm) -> None:
    assert vm.eval(f"""{ONE} local t = {{}} for i = 1, 300 do t[{{i}}] = i end
    local ok, copy = serpent.load(serpent.dump(t)) local n = 0
    for key, value in pairs(copy) do assert(key[1] == value) n = n + 1 end return n""") == (300,)


def test_loading_is_safe(vm: Vm) -> None:
    assert vm.eval(f"{ONE} return serpent.load('{{os.getenv \"PATH\"}}')") == (False, b"cannot call functions")
    assert vm.eval(f"{ONE} return select(2, serpent.load('{{type(1)}}', {{safe = false}}))[1]") == (b"number",)
    assert vm.eval(f"{ONE} return (serpent.load('{{'))") == (False,)
    assert vm.eval(f"{ONE} return serpent.load('a = 1 return 7')") == (True, 7)


@pytest.mark.parametrize(
    "call",
    [
        "line({}, 5)",
        "line({}, {indent = {}})",
        "line({}, {name = 'a b'})",
        "load(nil)",
        "line({coroutine.create(print)}, {fatal = true})",
    ],
)
def test_wrong_arguments_raise(vm: Vm, call: str) -> None:
    with pytest.raises(LuaError, match=r"eval:1: (bad argument|serpent)"):
        vm.eval(f"{ONE} local text = serpent.{call}")


def test_tables_too_deep_for_lua_to_read(vm: Vm) -> None:
    deep = "local t = {{}} for i = 1, {} do t = {{t}} end return serpent.load(serpent.dump(t))"
    assert vm.eval(ONE + deep.format(140))[0] is True
    with pytest.raises(LuaError, match="nested deeper"):
        vm.eval(ONE + deep.format(160))
