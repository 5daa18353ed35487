"""An activity that computes for too long gets an error, wherever its loop is; everybody else goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import gevent
import pytest

from smqrt.apps.lua.bridge import LuaError
from smqrt.apps.lua.vm import Vm
from smqrt.apps.lua.watchdog import LoopWatchdog
from tests.apps.lua.recorder import Recorder
from tests.support.waiting import wait_until

LOOP_S = 0.06
FOREVER = "\nwhile true do\nend"
MESSAGE = f"this ran for {LOOP_S:g} s without yielding"


@pytest.fixture
def vm(vm: Vm) -> Iterator[Vm]:
    watchdog = LoopWatchdog(vm, 60, loop_s=LOOP_S)
    watchdog.start()
    yield vm
    watchdog.stop()


def failure(vm: Vm, source: str) -> LuaError:
    """The error of an application's code, which must come soon."""
    began_s = time.process_time()
    with pytest.raises(LuaError) as raised:
        vm.run(vm.compile(source, "@shop/.preload"))
    assert LOOP_S * 0.9 < time.process_time() - began_s < 10 * LOOP_S + 2
    return raised.value


def test_an_endless_loop_raises_with_file_and_line(vm: Vm) -> None:
    error = failure(vm, "local function compute()" + FOREVER + " end\ncompute()")
    assert error.message.startswith(f"shop/.preload:2: {MESSAGE} and blocked all other activities")
    assert error.traceback == "\tshop/.preload:2: in local 'compute'\n\tshop/.preload:4: in main chunk"
    assert vm.eval("return 1 + 1") == (2,)


LOOPS = {
    "function": "for i = 1, math.huge do end",
    "goto": "::again:: goto again",
    "recursion": "local function f() return f() end f()",
    "calls": "local function f() end while true do f() end",
    "coroutine": "coroutine.wrap(function() while true do end end)()",
    "coroutine resumed": "assert(coroutine.resume(coroutine.create(function() while true do end end)))",
    "coroutines": "local function f(n) if n == 0 then while true do end end coroutine.wrap(f)(n - 1) end f(5)",
    "coroutine resumed again": "local f = coroutine.wrap(function() coroutine.yield() while true do end end) f() f()",
    "many coroutines": "while true do coroutine.wrap(function() for i = 1, 100 do end end)() end",
    "pcall": "while true do pcall(function() while true do end end) end",
    "pcalls": "local function f(n) while true do if n > 0 then pcall(f, n - 1) end end end f(50)",
    "pcall in a coroutine": "coroutine.wrap(function() while true do pcall(function() ::a:: goto a end) end end)()",
    "coroutines in pcall": "while true do pcall(coroutine.wrap(function() while true do pcall(error) end end)) end",
    "coroutines in pcall in coroutines": "coroutine.wrap(function() while true do pcall(coroutine.wrap(function() "
    "while true do pcall(error) end end)) end end)()",
    "comparator": "table.sort({3, 2, 1}, function(a, b) while true do end end)",
    "gsub": "('x'):gsub('.', function() while true do end end)",
    "metamethod": "return #setmetatable({}, {__len = function() while true do end end})",
    "close": "do local x <close> = setmetatable({}, {__close = function() while true do end end}) end",
    "iterator": "for x in function() while true do end end do end",
    "message handler": "xpcall(function() while true do end end, function(m) return m end) while true do end",
    "after a wait": "test.sleep(0.01) while true do end",
    "coroutine after a wait": "coroutine.wrap(function() test.sleep(0.01) while true do end end)()",
    "calls of Python": "while true do test.record() end",
    "loaded": "load('while true do end')()",
    "garbage": "while true do local t = {{}} end",
    "C functions": "while true do ('x'):rep(1000000) end",
}


@pytest.mark.parametrize("source", LOOPS.values(), ids=LOOPS.keys())
def test_loops_of_every_kind(vm: Vm, recorder: Recorder, source: str) -> None:
    assert MESSAGE in failure(vm, source).message
    for _ in range(3):
        assert vm.run(vm.compile("local n = 0 for i = 1, 1e5 do n = n + 1 end return n")) == (100_000,)


def test_what_was_blocked_elsewhere_goes_on(vm: Vm, recorder: Recorder) -> None:
    waiting = [gevent.spawn(vm.run, vm.compile(f"test.sleep(0.05) return {n}")) for n in range(10)]
    gevent.sleep(0)
    failure(vm, "while true do end")
    assert [task.get(timeout=1) for task in waiting] == [(n,) for n in range(10)]


def test_an_activity_inside_another_is_the_one_that_ends(vm: Vm, recorder: Recorder) -> None:
    source = """
        local inner = test.ref(function() while true do end end)
        local done = pcall(test.back, inner)
        for i = 1, 3e5 do end
        return done, "outer"
    """
    assert vm.run(vm.compile(source)) == (False, b"outer")


def test_an_activity_around_others_that_are_short_ends(vm: Vm, recorder: Recorder) -> None:
    source = """
        local inner = test.ref(function() for i = 1, 1000 do end end)
        while true do test.back(inner) end
    """
    assert MESSAGE in failure(vm, source).message


def test_a_caught_error_leaves_time_to_close_and_respond(vm: Vm) -> None:
    source = """
        local done, message = pcall(function() while true do end end)
        for i = 1, 3e5 do end
        return done, message
    """
    for _ in range(3):
        done, message = vm.run(vm.compile(source, "@shop/.preload"))
        assert not done
        assert message.decode().startswith(f"shop/.preload:2: {MESSAGE}")
        assert vm.run(vm.compile("for i = 1, 3e5 do end return 1")) == (1,)


def test_yielding_again_resets_the_limit(vm: Vm, recorder: Recorder) -> None:
    source = """
        local failures = 0
        coroutine.wrap(function()
          for i = 1, 2 do
            if not pcall(function() while true do end end) then failures = failures + 1 end
            test.sleep(0.2)
            for i = 1, 3e5 do end
          end
        end)()
        return failures
    """
    assert vm.run(vm.compile(source)) == (2,)


def test_loops_that_yield_are_allowed(vm: Vm, recorder: Recorder) -> None:
    source = """
        local stop = os.clock() + 0.3
        while os.clock() < stop do for i = 1, 1e5 do end test.sleep(0) end
        return "done"
    """
    assert vm.run(vm.compile(source)) == (b"done",)


def test_many_short_computations_in_a_turn_are_allowed(vm: Vm) -> None:
    work = vm.compile("local stop = os.clock() + 0.05 while os.clock() < stop do end return 1")
    assert [vm.run(work) for _ in range(8)] == [(1,)] * 8


def test_python_that_computes_is_left_alone(vm: Vm, recorder: Recorder) -> None:
    def compute() -> None:
        end_s = time.process_time() + 3 * LOOP_S
        while time.process_time() < end_s:
            pass

    vm.namespace("slow", {"compute": compute}, source=b"local core, py = ... test.compute = py.compute")
    assert vm.run(vm.compile("pcall(test.compute) return 1"), "") == (1,)


def test_the_library_is_never_in_the_middle_of_something(vm: Vm) -> None:
    """It ends, and only then does the application get the error."""
    vm.namespace(
        "slow",
        {},
        source=b"""local core = ...
        slow = function()
          busy = true
          local stop = os.clock() + 0.3
          while os.clock() < stop do end
          busy = false
        end""",
    )
    assert MESSAGE in failure(vm, "slow()\nfor i = 1, math.huge do end").message
    assert vm.eval("return busy") == (False,)


def test_code_after_a_long_c_function_is_ended(vm: Vm) -> None:
    pattern = "('a'):rep(600):find('.-.-b')"
    assert MESSAGE in failure(vm, f"{pattern} while true do end").message


def test_zero_is_for_ever() -> None:
    machine = Vm()
    watchdog = LoopWatchdog(machine, 60)
    watchdog.start()
    assert machine.run(machine.compile("local stop = os.clock() + 0.5 while os.clock() < stop do end return 1")) == (1,)
    watchdog.stop()


def test_the_error_of_a_callback_is_logged(vm: Vm, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    vm.start(vm.compile("while true do end", "@shop/timer.lua"))
    assert caplog.records[0].message.startswith(f"shop/timer.lua:1: {MESSAGE}")


def test_an_activity_is_ended_that_is_closed(vm: Vm, recorder: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    source = "local x <close> = setmetatable({}, {__close = function() while true do end end}) test.sleep(100)"
    task = gevent.spawn(vm.run, vm.compile(source, "@shop/.preload"))
    wait_until(lambda: vm.activities.blocked)
    task.kill()
    assert f"shop/.preload:1: {MESSAGE}" in caplog.text
    assert vm.activities.blocked == 0
