"""Hundreds of activities that do everything at once, every result checked, and nothing left behind."""

from __future__ import annotations

import gc
import random
import time
import timeit
from collections.abc import Callable
from typing import Any

import gevent
import greenlet
import pytest

from smqrt.apps.lua.activities import MAX_IDLE
from smqrt.apps.lua.bridge import LuaError
from smqrt.apps.lua.vm import Vm
from smqrt.broker.deferred import Deferred
from smqrt.loop import greenlets as greenlet_pool
from tests.apps.lua.recorder import Recorder
from tests.support.waiting import wait_until

ACTIVITIES = 400
ROUNDS = 3

WORK = """
local id, steps = ...
open = (open or 0) + 1
local guard <close> = setmetatable({}, {__close = function() open = open - 1 end})

local function step(n)
  local answer = test.sleep(0.01 + id % 7 * 0.002, id * 1000 + n)
  assert(answer == id * 1000 + n, "a foreign answer")
  return answer
end

local ways = {
  function(n) return step(n) end,
  function(n) return select(2, pcall(step, n)) end,
  function(n) return coroutine.wrap(function() return step(n) end)() end,
  function(n)
    local ok, message = pcall(function() error("e" .. step(n), 0) end)
    return tonumber(message:sub(2))
  end,
  function(n)
    local co = coroutine.wrap(function() for i = 1, 3 do coroutine.yield(step(n) + i) end end)
    return co() + co() - co() + step(n) - id * 1000 - n
  end,
  function(n) return setmetatable({}, {__index = function(_, k) return step(k) end})[n] end,
  function(n)
    local sum = 0
    for v in coroutine.wrap(function() coroutine.yield(step(n)) end) do sum = sum + v end
    return sum
  end,
  function(n)
    local t = {}
    for i = 1, 20 do t[i] = {id = id, name = ("x"):rep(i)} end
    if n % 5 == 0 then collectgarbage("step") end
    local back = ba.json.decode(ba.json.encode(t))
    assert(#back == 20 and back[20].id == id)
    return step(n)
  end,
  function(n)
    local done
    local ref = test.ref(function(v) done = step(v) end)
    test.back(ref, n)
    while not done do test.sleep(0.004) end
    test.core.unref(ref)
    return done
  end,
  function(n)
    local ok, message = pcall(table.sort, {3, 2, 1}, function(a, b) step(n) return a < b end)
    assert(not ok and message:find("C boundary", 1, true), message)
    return step(n)
  end,
}

local sum = 0
for n = 1, steps do
  local value = ways[(id + n) % #ways + 1](n)
  local expected = (id + n) % #ways == 4 and value or id * 1000 + n
  assert(value == expected, value)
  sum = sum + 1
end
if id % 10 == 3 then error("planned " .. id, 0) end
return id, sum
"""


def greenlets() -> int:
    gc.collect()
    return sum(isinstance(thing, greenlet.greenlet) and not thing.dead for thing in gc.get_objects())


def test_hundreds_of_activities(vm: Vm, recorder: Recorder) -> None:
    work = vm.compile(WORK, "@work.lua")
    greenlets_before = greenlets()
    memory_bytes: list[int] = []
    outcomes: dict[int, Any] = {}
    killed: set[int] = set()

    def settle(number: int, value: Any, error: BaseException | None) -> None:
        outcomes[number] = str(error).partition("\n")[0] if error else value

    def run(number: int, steps: int) -> None:
        try:
            settle(number, vm.run(work, number, steps), None)
        except LuaError as error:
            settle(number, None, error)

    def call(number: int, steps: int) -> None:
        result = vm.call(work, number, steps)
        assert type(result) is Deferred
        result.then(lambda value, error: settle(number, value, error))

    dice = random.Random(7)
    steps_of: dict[int, int] = {}
    for round_number in range(ROUNDS):
        tasks = []
        for number in range(round_number * ACTIVITIES, (round_number + 1) * ACTIVITIES):
            steps_of[number] = steps = dice.randint(3, 12)
            way = number % 4
            if way == 0:
                call(number, steps)
            elif way == 1:
                gevent.get_hub().loop.run_callback(call, number, steps)
            elif way == 2:
                greenlet_pool.start(run, number, steps)
            else:
                tasks.append((number, gevent.spawn(run, number, steps)))
        wait_until(lambda: vm.activities.blocked >= 300)
        for number, task in dice.sample(tasks, 20):
            task.kill()
            if number not in outcomes:
                killed.add(number)
        wait_until(lambda: not vm.activities.blocked and len(outcomes) + len(killed) >= len(steps_of))
        vm.eval("collectgarbage() collectgarbage()")
        memory_bytes.append(vm.memory_bytes())

    assert len(killed) > ROUNDS * 10
    for number in range(ROUNDS * ACTIVITIES):
        if number in killed:
            assert number not in outcomes
        elif number % 10 == 3:
            assert outcomes[number] == f"planned {number}"
        else:
            assert outcomes[number] == (number, steps_of[number])
    assert vm.eval("return open") == (0,)
    assert vm.activities.idle <= MAX_IDLE
    assert greenlets() <= greenlets_before + greenlet_pool.MAX_IDLE + 2  # the hub, a timer of its own
    assert memory_bytes[-1] < memory_bytes[0] + 700_000  # tables shrink late; a KB an activity would be 0.8 MB


def test_the_test_guard_detects_switches_inside_lua_calls(vm: Vm, violations: list[str]) -> None:
    vm.namespace("naughty", {"nap": lambda: gevent.sleep(0)}, source=b"local core, py = ... naughty = py")
    assert violations == []
    vm.eval("naughty.nap()")
    assert violations
    violations.clear()


def test_costs_are_printed(vm: Vm, capsys: pytest.CaptureFixture[str]) -> None:
    """Not a bar, but a figure to look at: `pytest -s -k costs`. Ten times the measured cost is the alarm."""
    nothing = vm.compile("")
    costs = {"vm.call of an empty function": _cost_us(lambda: vm.call(nothing))}
    costs["vm.run of an empty function"] = _cost_us(lambda: vm.run(nothing))
    with capsys.disabled():
        print()
        for name, cost_us in costs.items():
            print(f"  {name}: {cost_us:.2f} us")
    assert max(costs.values()) < 13


def _cost_us(call: Callable[[], object], times: int = 20_000) -> float:
    return min(timeit.repeat(call, timer=time.thread_time, number=times, repeat=3)) / times * 1e6
