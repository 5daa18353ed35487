"""Blocking calls: the places where they work, and those where they are a clean error."""

from __future__ import annotations

import re

import pytest

from smqrt.apps.lua.vm import Vm
from tests.apps.lua.recorder import Recorder
from tests.support.waiting import wait_until

WORKS = {
    "pcall": "return select(2, pcall(test.sleep, 0.001, 'ok'))",
    "xpcall with arguments": "return select(2, xpcall(function(v) return test.sleep(0.001, v) end, print, 'ok'))",
    "error after it, inside pcall": """
        local ok, message = pcall(function() test.sleep(0.001) error('ok', 0) end)
        return message""",
    "message handler of xpcall afterwards": """
        return select(2, xpcall(function() test.sleep(0.001) error('x', 0) end, function() return 'ok' end))""",
    "__index": "return setmetatable({}, {__index = function(_, k) return test.sleep(0.001, k) end}).ok",
    "__newindex": """
        local seen
        setmetatable({}, {__newindex = function(_, k) test.sleep(0.001) seen = k end}).ok = 1
        return seen""",
    "__call": "return setmetatable({}, {__call = function(_, v) return test.sleep(0.001, v) end})('ok')",
    "__add": "return setmetatable({}, {__add = function() return test.sleep(0.001, 'ok') end}) + 1",
    "__concat": "return setmetatable({}, {__concat = function() return test.sleep(0.001, 'ok') end}) .. 'x'",
    "__eq": """
        local meta = {__eq = function() return test.sleep(0.001, true) end}
        return setmetatable({}, meta) == setmetatable({}, meta) and 'ok'""",
    "__lt": """
        local meta = {__lt = function() return test.sleep(0.001, true) end}
        return setmetatable({}, meta) < setmetatable({}, meta) and 'ok'""",
    "__len": "return #setmetatable({}, {__len = function() return test.sleep(0.001, 2) end}) == 2 and 'ok'",
    "__pairs": """
        local t = setmetatable({}, {__pairs = function() test.sleep(0.001) return next, {ok = 1} end})
        for k in pairs(t) do return k end""",
    "an iterator of for": """
        local n = 0
        local function iterator() n = n + 1 return test.sleep(0.001, n < 4 and n or nil) end
        local sum = 0
        for v in iterator do sum = sum + v end
        return sum == 6 and 'ok'""",
    "<close> at the end of a block": """
        local seen
        do local c <close> = setmetatable({}, {__close = function() seen = test.sleep(0.001, 'ok') end}) end
        return seen""",
    "<close> when an error passes": """
        local seen
        pcall(function()
          local c <close> = setmetatable({}, {__close = function() seen = test.sleep(0.001, 'ok') end})
          error('x')
        end)
        return seen""",
    "<close> when the function returns": """
        local function f()
          local c <close> = setmetatable({}, {__close = function() test.sleep(0.001) end})
          return 'ok'
        end
        return f()""",
    "a coroutine": """
        local co = coroutine.create(function() return test.sleep(0.001, 'ok') end)
        return select(2, coroutine.resume(co))""",
    "a coroutine that yields too": """
        local co = coroutine.wrap(function(a)
          local b = coroutine.yield(test.sleep(0.001, a))
          local c = coroutine.yield(test.sleep(0.001, b))
          return test.sleep(0.001, c)
        end)
        return co('o') .. co('k') == 'ok' and co('ok')""",
    "five coroutines deep": """
        local function nest(depth)
          if depth == 0 then return test.sleep(0.001, 'ok') end
          return coroutine.wrap(function() coroutine.yield(nest(depth - 1)) end)()
        end
        return nest(5)""",
    "a coroutine in a coroutine, pcall between": """
        local co = coroutine.wrap(function()
          return select(2, pcall(coroutine.wrap(function() test.sleep(0.001) error('ok', 0) end)))
        end)
        return co()""",
    "require": """
        package.preload.slow = function() test.sleep(0.001) return 'ok' end
        return (require 'slow')""",
    "dofile": """
        local name = os.tmpname()
        local file = io.open(name, 'w') file:write("return test.sleep(0.001, 'ok')") file:close()
        local value = dofile(name)
        os.remove(name)
        return value""",
    "a tail call": """
        local function f(n) if n == 0 then return test.sleep(0.001, 'ok') end return f(n - 1) end
        return f(1000)""",
    "a call with many values": "return select('#', test.sleep(0.001, table.unpack({}, 1, 29))) == 29 and 'ok'",
}


@pytest.mark.parametrize("source", WORKS.values(), ids=WORKS)
def test_blocking_works_in(vm: Vm, recorder: Recorder, source: str) -> None:
    assert vm.eval(source) == (b"ok",)


@pytest.mark.parametrize("source", WORKS.values(), ids=WORKS)
def test_blocking_works_inside_a_coroutine_in(vm: Vm, recorder: Recorder, source: str) -> None:
    assert vm.eval("return coroutine.wrap(load(...))()", "=x", source.encode()) == (b"ok",)


FAILS = {
    "table.sort": "table.sort({3, 2, 1}, function(a, b) test.sleep(0.001) return a < b end)",
    "string.gsub": "string.gsub('abc', '.', function(c) test.sleep(0.001) return c end)",
    "__tostring": "tostring(setmetatable({}, {__tostring = function() test.sleep(0.001) return 'x' end}))",
    "load with a function": "assert(load(function() test.sleep(0.001) end))",
    "a call with very many values": "local t = {} test.sleep(0.001, table.unpack(t, 1, 200))",
    "a coroutine resumed in table.sort": """
        table.sort({3, 2, 1}, function(a, b)
          assert(coroutine.resume(coroutine.create(function() test.sleep(0.001) end)))
          return a < b
        end)""",
}


@pytest.mark.parametrize("source", FAILS.values(), ids=FAILS)
def test_blocking_is_a_clean_error_in(vm: Vm, recorder: Recorder, source: str) -> None:
    ok, message = vm.eval("return pcall(load(..., '@a.lua'))", "=x", source.encode())
    assert not ok
    assert re.search(rb"blocking call( across a C boundary|$)", message)
    assert b"a.lua:" in message
    assert vm.eval("return test.sleep(0, 1)") == (1,)


def test_blocking_in_a_finalizer_fails_silently(vm: Vm, recorder: Recorder) -> None:
    vm.eval("""
    do setmetatable({}, {__gc = function() test.record(select(2, pcall(test.sleep, 0))) end}) end
    collectgarbage() collectgarbage()
    """)
    assert b"blocking call" in recorder.seen[0]


# -- the application's own view of coroutines


def test_a_plain_yield_reaches_only_the_resumer(vm: Vm, recorder: Recorder) -> None:
    source = """
    local co = coroutine.create(function(a, b)
      test.sleep(0.001)
      local c = coroutine.yield(a + b)
      test.sleep(0.001)
      return c * 2
    end)
    local out = {coroutine.resume(co, 1, 2)}
    local rest = {coroutine.resume(co, 10)}
    return out[1], out[2], rest[1], rest[2], coroutine.status(co), coroutine.resume(co)
    """
    assert vm.eval(source) == (True, 3, True, 20, b"dead", False, b"cannot resume dead coroutine")


def test_yield_outside_a_coroutine_is_an_error(vm: Vm) -> None:
    ok, message = vm.eval("return pcall(function()\n coroutine.yield(1) end)", "@a.lua")
    assert (ok, message) == (False, b"a.lua:2: attempt to yield from outside a coroutine")
    assert vm.eval("return coroutine.isyieldable()") == (False,)
    assert vm.eval("return coroutine.wrap(function() return coroutine.isyieldable() end)()") == (True,)


STRANGER = """
co = coroutine.create(function() test.sleep(0.02, 1) return 'done' end)
local result = {coroutine.resume(co)}
return table.unpack(result)
"""


def test_a_waiting_coroutine_cannot_be_resumed_or_closed(vm: Vm, recorder: Recorder) -> None:
    answers: list[object] = []
    vm.call(vm.compile(STRANGER)).then(lambda value, error: answers.append(value))  # type: ignore[union-attr]
    assert vm.eval("return coroutine.status(co), coroutine.resume(co)") == (
        b"normal",
        False,
        b"cannot resume non-suspended coroutine",
    )
    assert vm.eval("return pcall(coroutine.close, co)")[0] is False
    wait_until(lambda: answers)
    assert answers == [(True, b"done")]


def test_an_activity_cannot_be_resumed(vm: Vm, recorder: Recorder) -> None:
    answers: list[object] = []
    pending = vm.call(vm.compile("activity = coroutine.running() return test.sleep(0.02, 'mine')"))
    pending.then(lambda value, error: answers.append(value))  # type: ignore[union-attr]
    assert vm.eval("return coroutine.resume(activity, 'stolen')")[0] is False
    assert vm.eval("return pcall(coroutine.close, activity)")[0] is False
    assert vm.eval("return pcall(coroutine.wrap(function() return coroutine.resume(activity) end))")[1] is False
    wait_until(lambda: answers)
    assert answers == [(b"mine",)]


def test_a_coroutine_may_be_resumed_by_another_activity_later(vm: Vm, recorder: Recorder) -> None:
    vm.eval(
        "co = coroutine.wrap(function() test.sleep(0.001) coroutine.yield(1) test.sleep(0.001) coroutine.yield(2) end)"
    )
    assert vm.eval("return co()") == (1,)
    assert vm.eval("return co()") == (2,)


def test_closing_a_suspended_coroutine_runs_its_close(vm: Vm, recorder: Recorder) -> None:
    vm.eval("""
    local co = coroutine.create(function()
      local c <close> = setmetatable({}, {__close = function() test.record('closed') end})
      test.sleep(0.001)
      coroutine.yield()
    end)
    coroutine.resume(co)
    assert(coroutine.close(co))
    """)
    assert recorder.seen == [b"closed"]
