"""ba.thread, ba.sleep, ba.clock, ba.exec (spec: bas-api §7)."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import gevent
import pytest

from smqrt.apps.lua.vm import Vm
from tests.apps.lua.recorder import Recorder
from tests.support.waiting import wait_until


def test_three_pool_jobs_run_concurrently_in_order(vm: Vm, recorder: Recorder) -> None:
    source = """
    running, most, order = 0, 0, {}
    for i = 1, 9 do
      ba.thread.run(function()
        running = running + 1
        most = math.max(most, running)
        ba.sleep(3)
        running = running - 1
        order[#order + 1] = i
      end)
    end
    return running, (ba.thread.dbg())
    """
    assert vm.eval(source) == (0, 3)
    wait_until(lambda: vm.eval("return #order") == (9,))
    assert vm.eval("return most, table.concat(order), ba.thread.dbg()") == (3, b"123456789", 0, 0)


def test_run_answers_how_many_wait(vm: Vm) -> None:
    assert vm.eval("local q = ba.thread.create() return q:run(print), q:run(print), type(q)") == (1, 2, b"userdata")
    assert vm.eval("return ba.thread.run(function() end)") == (1,)


def test_a_separate_queue_runs_jobs_in_sequence(vm: Vm) -> None:
    vm.eval("""
    order = {}
    local queue = ba.thread.create()
    for i = 1, 6 do
      queue:run(function() ba.sleep(i % 2 == 0 and 0 or 4) order[#order + 1] = i end)
    end
    """)
    wait_until(lambda: vm.eval("return #order") == (6,))
    assert vm.eval("return table.concat(order)") == (b"123456",)


def test_job_errors_are_traced_and_the_next_one_runs(vm: Vm, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "smqrt.lua"):
        vm.eval("ba.thread.run(function()\n error('bad job') end) ba.thread.run(function() done = true end)", "@a.lua")
        wait_until(lambda: vm.eval("return done") == (True,))
    assert "Thread job failed: a.lua:2: bad job" in caplog.text


def test_configure_sets_the_size_of_the_pool(vm: Vm) -> None:
    assert vm.eval("return ba.thread.configure(), ba.thread.configure(5), ba.thread.configure()") == (3, 5, 5)
    vm.eval("most, running = 0, 0")
    vm.eval("""
    for i = 1, 8 do
      ba.thread.run(function()
        running = running + 1
        most = math.max(most, running)
        ba.sleep(3)
        running = running - 1
      end)
    end
    """)
    wait_until(lambda: vm.eval("return ba.thread.dbg()") == (0, 0))
    assert vm.eval("return most, pcall(ba.thread.configure, 0)")[:2] == (5, False)


def test_a_killed_job_frees_its_thread(vm: Vm) -> None:
    vm.eval("q = ba.thread.create() q:run(function() ba.sleep(10000) end)")
    wait_until(lambda: vm.activities.blocked)
    vm.eval("q:run(function() done = true end)")
    vm.stop()
    wait_until(lambda: vm.eval("return done") == (True,))


def test_sleep_lets_others_run(vm: Vm, recorder: Recorder) -> None:
    vm.start(vm.compile("ba.sleep(5) test.record('first')"))
    before = time.monotonic()
    vm.eval("ba.sleep(20) test.record('second')")
    assert 0.015 < time.monotonic() - before < 2
    assert recorder.seen == [b"first", b"second"]


def test_clock_counts_milliseconds(vm: Vm) -> None:
    took, kind = vm.eval("local a = ba.clock() ba.sleep(20) return ba.clock() - a, math.type(a)")
    assert 15 <= took < 2000
    assert kind == b"integer"


def test_exec_gives_output_and_exit_code(vm: Vm) -> None:
    assert vm.eval("return ba.exec('echo out; echo err >&2')") == (b"out\nerr\n", 0)
    assert vm.eval("return ba.exec('echo no; exit 3')") == (None, 3, b"no\n")
    assert vm.eval("return (ba.exec('head -c 200000 /dev/zero'))")[0] == b"\0" * 65536


def test_exec_blocks_only_its_caller(vm: Vm, recorder: Recorder) -> None:
    vm.start(vm.compile("test.record(ba.exec('sleep 0.05; echo x'))"))
    vm.eval("ba.sleep(2) test.record('meanwhile')")
    wait_until(lambda: len(recorder.seen) == 2)
    assert recorder.seen == [b"meanwhile", (b"x\n", 0)]


def test_a_killed_exec_ends_the_command(vm: Vm, tmp_path: Path) -> None:
    task = gevent.spawn(vm.eval, f"ba.exec('touch {tmp_path}/begun; exec sleep 30')")
    wait_until((tmp_path / "begun").exists)
    before = time.monotonic()
    task.kill()
    assert time.monotonic() - before < 20, "the command sleeps 30 s"


def test_waiting_jobs_are_bounded_and_accepted_jobs_run(vm: Vm) -> None:
    vm.eval("done = 0 function job() done = done + 1 end for _ = 1, 10000 do ba.thread.run(job) end")
    taken, message = vm.eval("return pcall(ba.thread.run, job)")
    assert (taken, b"limit reached: 10000 waiting jobs" in message) == (False, True)
    wait_until(lambda: vm.eval("return done") == (10_000,))
    assert vm.eval("return pcall(ba.thread.run, job)")[0] is True
