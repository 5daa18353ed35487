"""ba.timer (spec: bas-api §7)."""

from __future__ import annotations

import logging
from collections.abc import Callable

import gevent
import pytest

from smqrt.apps.lua.bridge import LuaError
from smqrt.apps.lua.vm import Vm
from tests.apps.lua.recorder import Recorder
from tests.support.waiting import wait_until

Reaches = Callable[[str, object], None]
A_FEW_TICKS_S = 0.02


@pytest.fixture
def reaches(vm: Vm) -> Reaches:
    """Waits until a Lua expression has a value, and a few ticks more in which it must keep it."""

    def wait(expression: str, value: object) -> None:
        wait_until(lambda: vm.eval(f"return {expression}") == (value,))
        gevent.sleep(A_FEW_TICKS_S)
        assert vm.eval(f"return {expression}") == (value,)

    return wait


def test_a_timer_repeats_while_its_function_returns_true(vm: Vm, reaches: Reaches) -> None:
    vm.eval("n = 0 t = ba.timer(function() n = n + 1 return n < 3 end) t:set(2)")
    reaches("n", 3)
    assert vm.eval("return t:cancel()") == (None,)


def test_a_timer_without_true_ticks_once(vm: Vm, reaches: Reaches) -> None:
    vm.eval("n = 0 t = ba.timer(function() n = n + 1 return 1 end) t:set(2)")
    reaches("n", 1)


def test_a_yielding_function_goes_on_behind_its_yield(vm: Vm, reaches: Reaches) -> None:
    vm.eval("""
    seen = {}
    t = ba.timer(function()
      local step = 0
      while step < 3 do step = step + 1 seen[#seen + 1] = step coroutine.yield(true) end
    end)
    t:set(2)
    """)
    reaches("table.concat(seen, ',')", b"1,2,3")
    assert vm.eval("return t:cancel()") == (None,)


def test_yielding_something_else_ends_it(vm: Vm, reaches: Reaches) -> None:
    vm.eval("n = 0 t = ba.timer(function() while true do n = n + 1 coroutine.yield(n < 2) end end) t:set(2)")
    reaches("n", 2)


def test_now_ticks_at_once_too(vm: Vm, reaches: Reaches) -> None:
    vm.eval("n = 0 t = ba.timer(function() n = n + 1 return true end) t:set(200, false, true)")
    reaches("n", 1)
    assert vm.eval("return t:cancel(), t:cancel()") == (True, None)


def test_the_first_tick_waits_for_the_interval(vm: Vm) -> None:
    vm.eval("at = ba.clock() t = ba.timer(function() took = ba.clock() - at end) t:set(30)")
    wait_until(lambda: vm.eval("return took") != (None,))
    assert 25 <= vm.eval("return took")[0] < 1000


def test_cancel_and_reset(vm: Vm) -> None:
    vm.eval("n = 0 t = ba.timer(function() n = n + 1 return true end)")
    assert vm.eval("return t:reset(1), t:cancel(), t:set(5)") == (None, None, True)
    assert vm.eval("return t:reset(500), t:cancel(), t:reset(1)") == (True, True, None)
    gevent.sleep(A_FEW_TICKS_S)
    assert vm.eval("return n") == (0,)


def test_set_again_replaces_the_interval(vm: Vm) -> None:
    vm.eval("n = 0 t = ba.timer(function() n = n + 1 return true end) t:set(500) t:set(3)")
    wait_until(lambda: vm.eval("return n")[0] >= 2)
    vm.eval("t:cancel()")


def test_values_set_in_the_callback_override_its_result(vm: Vm, reaches: Reaches) -> None:
    vm.eval("n = 0 t = ba.timer(function() n = n + 1 if n < 4 then t:set(2) end end) t:set(2)")
    reaches("n", 4)


def test_cancel_inside_the_callback_counts_more_than_true(vm: Vm, reaches: Reaches) -> None:
    vm.eval("n = 0 t = ba.timer(function() n = n + 1 t:cancel() return true end) t:set(2)")
    reaches("n", 1)


def test_only_unreferenced_timers_are_collected(vm: Vm, reaches: Reaches) -> None:
    vm.eval("""
    lost, kept = 0, 0
    do local t = ba.timer(function() lost = lost + 1 return true end) t:set(5) end
    do local t = ba.timer(function() kept = kept + 1 return kept < 3 end) t:set(5, true) end
    collectgarbage() collectgarbage()
    """)
    reaches("kept", 3)
    assert vm.eval("return lost") == (0,)


def test_a_timer_referenced_by_its_function_is_collected(vm: Vm) -> None:
    vm.eval("""
    n = 0
    do local t t = ba.timer(function() n = n + 1 return t ~= nil end) t:set(5) end
    collectgarbage() collectgarbage()
    """)
    gevent.sleep(A_FEW_TICKS_S)
    assert vm.eval("return n") == (0,)


def test_an_error_stops_the_timer_and_later_calls_raise(
    vm: Vm, caplog: pytest.LogCaptureFixture, reaches: Reaches
) -> None:
    vm.eval("n = 0 t = ba.timer(function()\n n = n + 1 error('bad') end) t:set(2)", "@app/.preload")
    with caplog.at_level(logging.ERROR, "smqrt.lua"):
        reaches("n", 1)
    assert "Timer callback failed: app/.preload:2: bad" in caplog.text
    assert "stack traceback" in caplog.text
    for call in ("set(1)", "reset(1)", "cancel()"):
        with pytest.raises(LuaError, match="callback of this timer failed"):
            vm.eval(f"t:{call}")


def test_a_callback_may_block_without_accumulating_ticks(vm: Vm, recorder: Recorder) -> None:
    vm.eval("""
    running, n = 0, 0
    t = ba.timer(function()
      running = running + 1
      test.record(running)
      n = n + 1
      ba.sleep(12)
      running = running - 1
      return true
    end)
    t:set(2)
    """)
    wait_until(lambda: len(recorder.seen) == 3)
    vm.eval("t:cancel()")
    assert recorder.seen == [1, 1, 1]


def test_type(vm: Vm) -> None:
    assert vm.eval("return type(ba.timer(print))") == (b"userdata",)
