"""Ops that park: what waits in one has no greenlet."""

from __future__ import annotations

import gc
import time
from typing import Any

import gevent
import greenlet
import pytest

from smqrt.apps.lua.activities import Coroutine
from smqrt.apps.lua.bridge import LuaError
from smqrt.apps.lua.vm import Vm
from smqrt.broker.deferred import Deferred
from smqrt.errors import ArgumentError
from tests.apps.lua.recorder import Recorder
from tests.support.waiting import wait_until


class Desk:
    """Hands out `Deferred`s and answers them."""

    def __init__(self) -> None:
        self.waiting: list[Deferred] = []

    def park(self) -> Deferred:
        self.waiting.append(Deferred())
        return self.waiting[-1]

    def at_once(self, *values: Any) -> Any:
        parking = Deferred()
        parking.resolve(values)
        return parking

    def plain(self, value: Any) -> Any:
        return value

    def refuse(self) -> Deferred:
        raise ArgumentError("not like that")

    def answer(self, *values: Any) -> None:
        self.waiting.pop(0).resolve(values)


@pytest.fixture
def desk(vm: Vm) -> Desk:
    desk = Desk()
    ops = {name: getattr(desk, name) for name in ("park", "at_once", "plain", "refuse")}
    vm.namespace("desk", {"answer": desk.answer}, parking=ops, source=b"local core, py = ... desk = py")
    return desk


def test_an_answer_at_once_and_later(vm: Vm, desk: Desk, recorder: Recorder) -> None:
    ref = vm.compile("local a, b = desk.at_once(1, 2) return a, b, desk.plain(3), desk.park()")
    result = vm.call(ref)
    assert type(result) is Deferred
    assert (result.done, vm.activities.blocked) == (False, 1)
    wait_until(lambda: desk.waiting)  # in a later turn, when the share of this one is spent
    desk.answer(4, 5)
    gevent.sleep(0)
    assert (result.result(), vm.activities.blocked) == ((1, 2, 3, 4, 5), 0)


def test_what_parks_at_once_ends_the_call_at_once(vm: Vm, desk: Desk) -> None:
    assert vm.call(vm.compile("return desk.at_once(1, nil, 3)")) == (1, None, 3)


def test_run_waits(vm: Vm, desk: Desk) -> None:
    running = gevent.spawn(vm.eval, "return desk.park()")
    gevent.sleep(0)
    desk.answer(b"now")
    assert running.get(timeout=1) == (b"now",)


def test_errors(vm: Vm, desk: Desk) -> None:
    assert vm.eval("return pcall(desk.refuse)") == (False, b"eval:1: not like that")
    result = vm.call(vm.compile("return pcall(desk.park)", "@a.lua"))
    desk.waiting.pop().reject(ArgumentError("later refused"))
    gevent.sleep(0)
    assert type(result) is Deferred
    assert result.result() == (False, b"a.lua:1: later refused")
    failing = vm.call(vm.compile("desk.park() error'behind it'", "@b.lua"))
    desk.answer()
    gevent.sleep(0)
    assert type(failing) is Deferred
    with pytest.raises(LuaError, match="b.lua:1: behind it"):
        failing.result()


def test_an_activity_that_answers_another_does_not_run_it(vm: Vm, desk: Desk, recorder: Recorder) -> None:
    vm.start(vm.compile("test.record('resumed', desk.park())"))
    vm.eval("desk.answer('x') test.record('first')")
    gevent.sleep(0)
    assert recorder.seen == [b"first", (b"resumed", b"x")]


def test_parking_and_blocking_ops_in_turn(vm: Vm, desk: Desk, recorder: Recorder) -> None:
    source = """
    local a = desk.park()
    local b = test.sleep(0.001, 2)
    local c = coroutine.wrap(function() return desk.park() end)()
    local d = select(2, pcall(desk.park))
    test.record(a, b, c, test.sleep(0.001, d))
    """
    vm.start(vm.compile(source))
    for number in (1, 3, 4):
        wait_until(lambda: desk.waiting)
        desk.answer(number)
    wait_until(lambda: recorder.seen == [(1, 2, 3, 4)])


def test_no_greenlet_waits(vm: Vm, desk: Desk) -> None:
    gevent.sleep(0)

    def greenlets() -> int:
        gc.collect()
        return sum(isinstance(thing, greenlet.greenlet) for thing in gc.get_objects())

    before = greenlets()
    ref = vm.compile("desk.park()")
    for _ in range(500):
        vm.start(ref)
    gevent.sleep(0)
    assert (vm.activities.blocked, greenlets()) == (500, before)
    for _ in range(500):
        desk.answer()
    wait_until(lambda: vm.activities.blocked == 0)


def test_stop_ends_the_parked(vm: Vm, desk: Desk, recorder: Recorder) -> None:
    source = """
    local x <close> = setmetatable({}, {__close = function() test.record("closed") end})
    pcall(desk.park)
    test.record("went on")
    """
    result = vm.call(vm.compile(source))
    vm.stop()
    gevent.sleep(0)
    desk.answer("too late")
    gevent.sleep(0)
    assert recorder.seen == [b"closed"]
    assert type(result) is Deferred
    assert result.failed


def test_others_have_turns_beside_a_hundred_that_never_wait(vm: Vm, desk: Desk) -> None:
    busy = vm.compile("while going do desk.plain(1) for i = 1, 10000 do end n = n + 1 end")
    vm.eval("n, going = 0, true")
    for _ in range(100):
        vm.start(busy)
    worst_s = 0.0
    for _ in range(20):
        began_s = time.process_time()
        gevent.sleep(1e-6)
        worst_s = max(worst_s, time.process_time() - began_s)
    assert vm.eval("going = false return n")[0] > 20
    wait_until(lambda: vm.activities.blocked == 0)
    assert worst_s < 0.05  # all hundred together


def test_coroutines_do_not_pile_up(vm: Vm, desk: Desk, recorder: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")  # errors that are logged have tracebacks, and these have frames with coroutines
    counts = []
    for _ in range(3):
        for source in ("desk.park()", "desk.park() error'x'", "test.sleep(0.01)"):
            ref = vm.compile(source)
            for _ in range(200):
                vm.start(ref)
            gevent.sleep(0.05)
            while desk.waiting:
                desk.answer()
            wait_until(lambda: vm.activities.blocked == 0)
        for _ in range(100):
            vm.start(vm.compile("desk.park()"))
        vm.stop()
        wait_until(lambda: vm.activities.blocked == 0)
        desk.waiting.clear()
        gc.collect()
        counts.append(sum(type(thing) is Coroutine for thing in gc.get_objects()))
    # An idle greenlet holds the last coroutine that it worked for, and there may be some more of them. What piled up
    # would be 200 of each source a round.
    assert counts[2] - counts[0] < 100
