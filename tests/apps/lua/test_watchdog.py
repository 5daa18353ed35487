"""The watchdog tells where a loop hangs that does not turn."""

from __future__ import annotations

import time
from collections.abc import Iterator

import gevent
import pytest

from smqrt.apps.lua.vm import Vm
from smqrt.apps.lua.watchdog import LoopWatchdog

LIMIT_S = 0.25
BUSY = """
local seconds = ...
local function compute()
  local stop = os.clock() + seconds
  while os.clock() < stop do end
end
compute()
return "done"
"""


@pytest.fixture
def reports(vm: Vm) -> Iterator[list[str]]:
    seen: list[str] = []
    watchdog = LoopWatchdog(vm, LIMIT_S, lambda text: seen.append(text.decode()))
    watchdog.start()
    gevent.sleep(LIMIT_S)
    yield seen
    watchdog.stop()


def test_a_busy_application_is_named_with_file_and_line(vm: Vm, reports: list[str]) -> None:
    assert vm.run(vm.compile(BUSY, "@shop/index.lsp"), 0.7) == (b"done",)
    assert len(reports) == 1
    assert reports[0].startswith("the event loop has been blocked for 0.2 s:\nstack traceback:\n")
    assert "shop/index.lsp:5: in local 'compute'" in reports[0]
    assert vm.eval("return 1") == (1,)


def test_python_that_blocks_the_loop_is_named_too(vm: Vm, reports: list[str]) -> None:
    time.sleep(0.7)
    assert "test_python_that_blocks_the_loop_is_named_too" in reports[0]


def test_a_loop_that_turns_is_not_reported(vm: Vm, reports: list[str]) -> None:
    for _ in range(10):
        vm.run(vm.compile(BUSY), 0.02)
        gevent.sleep(0.03)
    assert reports == []


def test_errors_name_the_coroutine_and_its_callers(vm: Vm, reports: list[str]) -> None:
    source = (
        f"local function inner(...)\n{BUSY}\nend\ncoroutine.wrap(function(...)\ncoroutine.wrap(inner)(...)\nend)(...)"
    )
    vm.run(vm.compile(source, "@shop/index.lsp"), 0.7)
    assert len(reports) == 1
    _, middle, inner = reports[0].split("\ninside the coroutine, stack traceback:\n")
    assert "shop/index.lsp:13: in function <shop/index.lsp:12>" in middle
    assert "shop/index.lsp:6: in local 'compute'" in inner
