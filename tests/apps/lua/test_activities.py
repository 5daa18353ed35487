"""vm.run, vm.call, vm.start: results, blocking, order, killing, and what is left behind."""

from __future__ import annotations

import logging

import gevent
import pytest
from greenlet import GreenletExit

from smqrt.apps.lua.activities import MAX_DEPTH, MAX_IDLE
from smqrt.apps.lua.bridge import LuaError
from smqrt.apps.lua.vm import Vm
from smqrt.broker.deferred import Deferred
from tests.apps.lua.recorder import Recorder
from tests.support.waiting import wait_until

VALUES = (None, True, False, 0, -(2**63), 2**63 - 1, 1.5, b"", b"\0\xff\n", None)


def test_values_pass_unchanged_in_both_directions(vm: Vm) -> None:
    assert vm.run(vm.compile("return ..."), *VALUES) == VALUES
    assert vm.call(vm.compile("return ..."), *VALUES) == VALUES
    assert vm.run(vm.compile("")) == ()


def test_integers_and_floats_stay_what_they_are(vm: Vm) -> None:
    integer, number = vm.run(vm.compile("return ..., 2.0"), 2)
    assert (type(integer), type(number)) == (int, float)


def test_a_result_beyond_64_bits_ends_the_activity_cleanly(vm: Vm, recorder: Recorder) -> None:
    vm.namespace("big", {}, {"number": lambda: 2**64}, source=b"big = select(2, ...)")
    with pytest.raises(LuaError):
        vm.eval("local c <close> = setmetatable({}, {__close = function() test.record('closed') end}) big.number()")
    assert recorder.seen == [b"closed"]


def test_many_results(vm: Vm) -> None:
    assert len(vm.eval("return table.unpack({}, 1, 30)")) == 30
    with pytest.raises(LuaError, match="too many values"):
        vm.eval("return table.unpack({}, 1, 250)")


def test_many_values_use_the_direct_path(vm: Vm, recorder: Recorder) -> None:
    vm.eval("test.record(table.unpack({}, 1, 250))")
    assert recorder.seen == [(None,) * 250]
    vm.namespace(
        "wide", {"direct": lambda: (1,) * 250}, {"blocking": lambda: (1,) * 250}, source=b"wide = select(2, ...)"
    )
    assert vm.eval("return #{wide.direct()}, #{wide.blocking()}") == (250, 250)


def test_numbers_beyond_64_bits_are_refused(vm: Vm) -> None:
    ref = vm.compile("return ...")
    with pytest.raises(LuaError):
        vm.run(ref, 2**64)
    assert vm.run(ref, 1) == (1,)


def test_run_blocks_the_calling_greenlet(vm: Vm, recorder: Recorder) -> None:
    assert vm.run(vm.compile("return 1, test.sleep(0.001, 'a', nil, 3)")) == (1, b"a", None, 3)


def test_call_gives_the_values_at_once_when_nothing_blocks(vm: Vm) -> None:
    assert vm.call(vm.compile("return 1, 2")) == (1, 2)


def test_call_gives_a_pending_when_the_function_blocks(vm: Vm, recorder: Recorder) -> None:
    pending = vm.call(vm.compile("local v = ... return test.sleep(0.001, v + 1)"), 1)
    assert type(pending) is Deferred
    answers: list[object] = []
    pending.then(lambda value, error: answers.append((value, error)))
    assert answers == []
    wait_until(lambda: answers)
    assert answers == [((2,), None)]


def test_call_rejects_the_pending_when_the_function_fails_later(vm: Vm, recorder: Recorder) -> None:
    pending = vm.call(vm.compile("test.sleep(0.001) error('late')", "@a.lua"))
    errors: list[BaseException | None] = []
    pending.then(lambda _value, error: errors.append(error))
    wait_until(lambda: errors)
    assert isinstance(errors[0], LuaError)
    assert errors[0].message == "a.lua:1: late"


def test_call_works_inside_a_call_from_lua(vm: Vm, recorder: Recorder) -> None:
    source = """
    local inner = test.ref(function(v) test.record(v) return v * 2 end)
    local blocks = test.ref(function() test.sleep(0.001) test.record("slept") end)
    return test.back(inner, 4), test.back(blocks)
    """
    assert vm.eval(source) == (8, b"pending")
    wait_until(lambda: len(recorder.seen) == 2)
    assert recorder.seen == [4, b"slept"]


def test_call_works_in_the_hub_greenlet(vm: Vm, recorder: Recorder) -> None:
    ref = vm.compile("test.record(...) test.sleep(0.001) test.record('after')")
    gevent.get_hub().loop.run_callback(vm.start, ref, b"before")
    wait_until(lambda: len(recorder.seen) == 2)
    assert recorder.seen == [b"before", b"after"]


def test_run_inside_a_call_from_lua_is_refused(vm: Vm) -> None:
    vm.namespace("half", {"run": lambda ref: vm.run(ref)}, source=b"local core, py = ... half = py half.ref = core.ref")
    ok, message = vm.eval("return pcall(half.run, half.ref(function() end))")
    assert (ok, b"use call" in message) == (False, True)


def test_endless_nesting_is_an_error_and_not_a_crash(vm: Vm, recorder: Recorder) -> None:
    source = """
    local depth = 0
    local ref
    ref = test.ref(function() depth = depth + 1 test.back(ref) end)
    return pcall(test.back, ref), depth
    """
    # every level fails with the error of the level below it
    ok, depth = vm.eval(source)
    assert (ok, depth) == (False, MAX_DEPTH - 1)
    assert vm.eval("return 1") == (1,)


def test_a_freed_reference_is_an_error(vm: Vm) -> None:
    ref = vm.compile("return 1")
    vm.free(ref)
    with pytest.raises(LuaError, match="freed"):
        vm.call(ref)
    assert vm.compile("return 2") != ref


def test_references_keep_and_free_what_they_refer_to(vm: Vm, recorder: Recorder) -> None:
    vm.eval("""
    weak = setmetatable({}, {__mode = 'v'})
    for i = 1, 100 do
      local big = {}
      weak[i] = big
      refs = refs or {}
      refs[i] = test.ref(function() return big end)
    end
    """)
    count = "collectgarbage() collectgarbage() local n = 0 for _ in pairs(weak) do n = n + 1 end return n"
    assert vm.eval(count) == (100,)
    for (ref,) in [vm.eval(f"return refs[{i}]") for i in range(1, 101)]:
        vm.free(ref)
    vm.eval("refs = nil")
    assert vm.eval(count) == (0,)


def test_start_logs_an_error_and_the_runtime_goes_on(vm: Vm, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "smqrt.lua"):
        vm.start(vm.compile("local t = nil\nt.x = 1", "@app/main.lua"))
    assert "app/main.lua:2: attempt to index a nil value (local 't')" in caplog.text
    assert "stack traceback" in caplog.text
    assert vm.eval("return 1") == (1,)


def test_start_logs_an_error_after_blocking(vm: Vm, recorder: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "smqrt.lua"):
        vm.start(vm.compile("test.sleep(0.001)\nerror('oops')", "@app/main.lua"))
        wait_until(lambda: caplog.text)
    assert "app/main.lua:2: oops" in caplog.text


KILLED = """
local name = ...
local function closing(what)
  return setmetatable({}, {__close = function() test.record(name .. ' closed ' .. what) end})
end
local outer <close> = closing('outer')
local co = coroutine.wrap(function()
  local inner <close> = closing('inner')
  while true do pcall(test.sleep, 10) end
end)
while true do pcall(co) end
"""


def test_killing_the_greenlet_closes_the_activity_inside_out(vm: Vm, recorder: Recorder) -> None:
    ref = vm.compile(KILLED)
    greenlets = [gevent.spawn(vm.run, ref, name) for name in (b"a", b"b")]
    wait_until(lambda: vm.activities.blocked == 2)
    greenlets[0].kill()
    assert recorder.seen == [b"a closed inner", b"a closed outer"]
    assert vm.activities.blocked == 1
    greenlets[1].kill()
    assert isinstance(greenlets[1].value, GreenletExit)
    assert vm.activities.blocked == 0


def test_stop_ends_all_that_wait(vm: Vm, recorder: Recorder) -> None:
    ref = vm.compile("local c <close> = setmetatable({}, {__close = function() test.record(1) end}) test.sleep(10)")
    for _ in range(20):
        vm.start(ref)
    wait_until(lambda: vm.activities.blocked == 20)
    vm.stop()
    wait_until(lambda: vm.activities.blocked == 0)
    assert recorder.seen == [1] * 20


def test_a_timeout_around_run_closes_the_activity(vm: Vm, recorder: Recorder) -> None:
    ref = vm.compile("local c <close> = setmetatable({}, {__close = function() test.record(1) end}) test.sleep(10)")
    with gevent.Timeout(0.005, False):
        vm.run(ref)
    assert recorder.seen == [1]
    assert vm.eval("return 1") == (1,)


def test_errors_in_close_of_killed_activities_are_logged(
    vm: Vm, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    source = "local c <close> = setmetatable({}, {__close = function() error('in close') end}) test.sleep(10)"
    task = gevent.spawn(vm.run, vm.compile(source, "@a.lua"))
    wait_until(lambda: vm.activities.blocked)
    with caplog.at_level(logging.ERROR, "smqrt.lua"):
        task.kill()
    assert "a.lua:1: in close" in caplog.text


def test_the_pool_keeps_no_burst(vm: Vm, recorder: Recorder) -> None:
    ref = vm.compile("while not test.over do test.sleep(0.05) end")
    for _ in range(10 * MAX_IDLE):
        vm.start(ref)
    wait_until(lambda: vm.activities.blocked == 10 * MAX_IDLE)
    vm.start(vm.compile("test.over = true"))
    wait_until(lambda: vm.activities.blocked == 0)
    assert vm.activities.idle <= MAX_IDLE


def test_stop_ignores_already_ended_processes(vm: Vm, recorder: Recorder) -> None:
    ref = vm.compile("test.sleep(0)")
    ended: list[object] = []

    def start_fifty() -> None:
        for _ in range(50):
            vm.call(ref).then(lambda value, error: ended.append(value))  # type: ignore[union-attr]

    start_fifty()
    gevent.get_hub().loop.run_callback(vm.stop)
    wait_until(lambda: len(ended) == 50)
    start_fifty()
    wait_until(lambda: len(ended) == 100)
    assert ended[50:] == [()] * 50
