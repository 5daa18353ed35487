"""ba.timer (spec: bas-api §7)."""

from __future__ import annotations

import logging

import gevent
import pytest
from recorder import Recorder

from smqrt.lua.bridge import LuaError
from smqrt.lua.vm import Vm


def test_a_timer_repeats_while_its_function_returns_true(vm: Vm) -> None:
    vm.eval("n = 0 t = ba.timer(function() n = n + 1 return n < 3 end) t:set(2)")
    gevent.sleep(0.03)
    assert vm.eval("return n, t:cancel()") == (3, None)


def test_a_timer_without_true_ticks_once(vm: Vm) -> None:
    vm.eval("n = 0 t = ba.timer(function() n = n + 1 return 1 end) t:set(2)")
    gevent.sleep(0.02)
    assert vm.eval("return n") == (1,)


def test_a_yielding_function_goes_on_behind_its_yield(vm: Vm) -> None:
    vm.eval("""
    seen = {}
    t = ba.timer(function()
      local step = 0
      while step < 3 do step = step + 1 seen[#seen + 1] = step coroutine.yield(true) end
    end)
    t:set(2)
    """)
    gevent.sleep(0.04)
    assert vm.eval("return table.concat(seen, ','), t:cancel()") == (b"1,2,3", None)


def test_yielding_something_else_ends_it(vm: Vm) -> None:
    vm.eval("n = 0 t = ba.timer(function() while true do n = n + 1 coroutine.yield(n < 2) end end) t:set(2)")
    gevent.sleep(0.03)
    assert vm.eval("return n") == (2,)


def test_now_ticks_at_once_too(vm: Vm) -> None:
    vm.eval("n = 0 t = ba.timer(function() n = n + 1 return true end) t:set(200, false, true)")
    gevent.sleep(0.01)
    assert vm.eval("return n, t:cancel(), t:cancel()") == (1, True, None)


def test_the_first_tick_waits_for_the_interval(vm: Vm) -> None:
    vm.eval("at = ba.clock() t = ba.timer(function() took = ba.clock() - at end) t:set(30)")
    gevent.sleep(0.06)
    assert 25 <= vm.eval("return took")[0] <= 55


def test_cancel_and_reset(vm: Vm) -> None:
    vm.eval("n = 0 t = ba.timer(function() n = n + 1 return true end)")
    assert vm.eval("return t:reset(1), t:cancel(), t:set(5)") == (None, None, True)
    assert vm.eval("return t:reset(500), t:cancel(), t:reset(1)") == (True, True, None)
    gevent.sleep(0.02)
    assert vm.eval("return n") == (0,)


def test_set_again_replaces_the_interval(vm: Vm) -> None:
    vm.eval("n = 0 t = ba.timer(function() n = n + 1 return true end) t:set(500) t:set(3)")
    gevent.sleep(0.02)
    assert vm.eval("t:cancel() return n")[0] >= 2


def test_set_inside_the_callback_counts_more_than_what_it_returns(vm: Vm) -> None:
    vm.eval("n = 0 t = ba.timer(function() n = n + 1 if n < 4 then t:set(2) end end) t:set(2)")
    gevent.sleep(0.04)
    assert vm.eval("return n") == (4,)


def test_cancel_inside_the_callback_counts_more_than_true(vm: Vm) -> None:
    vm.eval("n = 0 t = ba.timer(function() n = n + 1 t:cancel() return true end) t:set(2)")
    gevent.sleep(0.02)
    assert vm.eval("return n") == (1,)


def test_an_unkept_timer_is_collected_and_an_anchored_one_is_not(vm: Vm) -> None:
    vm.eval("""
    lost, kept = 0, 0
    do local t = ba.timer(function() lost = lost + 1 return true end) t:set(5) end
    do local t = ba.timer(function() kept = kept + 1 return kept < 3 end) t:set(5, true) end
    collectgarbage() collectgarbage()
    """)
    gevent.sleep(0.04)
    assert vm.eval("return lost, kept") == (0, 3)


def test_a_timer_that_its_own_function_knows_is_collected_too(vm: Vm) -> None:
    vm.eval("""
    n = 0
    do local t t = ba.timer(function() n = n + 1 return t ~= nil end) t:set(5) end
    collectgarbage() collectgarbage()
    """)
    gevent.sleep(0.02)
    assert vm.eval("return n") == (0,)


def test_an_error_stops_the_timer_and_later_calls_raise(vm: Vm, caplog: pytest.LogCaptureFixture) -> None:
    vm.eval("n = 0 t = ba.timer(function()\n n = n + 1 error('bad') end) t:set(2)", "@app/.preload")
    with caplog.at_level(logging.ERROR, "smqrt.lua"):
        gevent.sleep(0.02)
    assert vm.eval("return n") == (1,)
    assert "Timer callback failed: app/.preload:2: bad" in caplog.text
    assert "stack traceback" in caplog.text
    for call in ("set(1)", "reset(1)", "cancel()"):
        with pytest.raises(LuaError, match="callback of this timer failed"):
            vm.eval(f"t:{call}")


def test_a_callback_may_block_and_its_ticks_do_not_pile_up(vm: Vm, recorder: Recorder) -> None:
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
    gevent.sleep(0.06)
    vm.eval("t:cancel()")
    assert set(recorder.seen) == {1}
    assert 2 <= len(recorder.seen) <= 6


def test_type(vm: Vm) -> None:
    assert vm.eval("return type(ba.timer(print))") == (b"userdata",)
